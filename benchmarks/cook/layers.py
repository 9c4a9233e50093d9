"""Compressed layers beside torch's bf16 `F.linear` and dense feed-forward, in one run under CUDA graphs: time at M
rows, the floor of bytes and FLOPs, and whether it pays.

usage: python benchmarks/cook/layers.py [--out FILE.json] [--rows 1 16 64 512 4096] [--kinds int8 Q4_K …] [--tiny]

Needs a GPU; FILE grows row by row. --kinds: only these linear layers, and no experts. --tiny: small shapes on a CPU,
to see that it runs.
"""
import argparse, json, sys
from functools import partial
from pathlib import Path

import pandas as pd
import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(1, str(Path(__file__).resolve().parents[1] / "common"))
from bmlab.formats.gguf_writer import to_blocks
from bmlab.kernels.float8 import Float8Linear
from bmlab.kernels.ggml import BLOCKS, GGMLLinear
from bmlab.kernels.low_bits import LowBitLinear
from bmlab.kernels.layers import Int4Linear, Int8Linear
from bmlab.cook.moefy import MoEMLP, Router
from bmlab.cook.ffn import FFN
from bmlab.cook.sparse24 import Sparse24Linear, pick24
from clock import memory_rate, seconds

SHAPES = [(4096, 4096), (28672, 4096), (4096, 14336)]   # (N, K) of an 8B LLaMA: o, gate and up together, down
# of the feed-forward layer: a quarter of its 14336 neurons, 256 in an expert
EXPERTS, ACTIVE = 56, 14
FLUSH = 600_000_000                                     # bytes of weights a measurement walks through: ten times the L2


def rates(device, tiny):
    "Measured here: bytes/s of a pass over memory, FLOP/s of a large bf16 and op/s of a large int8 product"
    n = 512 if tiny else 8192
    x = torch.randn(n, n, device=device, dtype=torch.bfloat16)
    q = torch.randint(-127, 128, (n, n), device=device, dtype=torch.int8)
    return (memory_rate(device, n * n if tiny else 1 << 28), 2 * n**3 / seconds([lambda: x @ x] * 4, device),
            2 * n**3 / seconds([lambda: torch._int_mm(q, q.t())] * 4, device))


def floor(bytes, flops, integers, rate):
    "(seconds below which this cannot be done, what says so)"
    memory, compute = bytes / rate[0], flops / rate[2 if integers else 1]
    return max(memory, compute), "bytes" if memory >= compute else "FLOPs"


def dense(N, K, device):
    layer = nn.Linear(K, N, bias=False, device=device, dtype=torch.bfloat16)
    return layer.requires_grad_(False)


def sparse(layer):
    "Two of four of its weights go, in the dense one too, so that `error` is that of the sparse product alone"
    layer.weight.data = torch.where(pick24(layer.weight.float().abs()), layer.weight, 0)
    return Sparse24Linear.from_dense(layer)


def blocks(layer, kind):
    "ggml's blocks of 256 of its rows, again and again, in the dense one too: `error` is that of the product alone"
    some = to_blocks(layer.weight[:256].float(), kind)
    new = GGMLLinear(layer.in_features, layer.out_features, bias=False, kind=kind, device=layer.weight.device)
    new.codes.copy_(some.repeat(len(layer.weight) // len(some), 1))
    layer.weight.data = new.dequantize(torch.bfloat16)
    return new


def float8(layer, block=(128, 128)):
    "Codes of eight bits with a scale for each block"
    w = layer.weight.unflatten(0, (-1, block[0])).unflatten(-1, (-1, block[1])).float()
    scale = w.abs().amax((1, 3)) / 448
    codes = (w / scale[:, None, :, None]).to(torch.float8_e4m3fn).flatten(2).flatten(0, 1)
    new = Float8Linear.from_tensors(codes, scale, block)
    layer.weight.data = new.dequantize(torch.bfloat16)
    return new


def int8_activations(layer):
    new = Int8Linear.from_float(layer)
    new.activations = 8
    return new


# name → (makes it of a dense layer, bytes a weight, share of the FLOPs, rows from which it multiplies integers)
KINDS = {"int8": (Int8Linear.from_float, 1, 1, None), "w8a8": (int8_activations, 1, 1, 17),
         "int4 g128": (Int4Linear.from_float, 0.5 + 4 / 128, 1, None), "2:4": (sparse, 1.125, 0.5, None),
         **{f"int{b} g128": (partial(LowBitLinear.from_float, bits=b), b / 8 + 4 / 128, 1, None) for b in (3, 2)},
         **{k: (partial(blocks, kind=k), BLOCKS[k].bytes / BLOCKS[k].weights, 1, None) for k in BLOCKS},
         "fp8 128×128": (float8, 1, 1, None)}


def row(layer, kind, M, ours, theirs, least, error, device):
    "One line of the table; what cannot run, or not inside a graph, says why"
    line, (least_s, by) = {"layer": layer, "kind": kind, "M": M}, least
    try: t, u = seconds(ours, device), seconds(theirs, device)
    except Exception as e: return line | {"note": f"{type(e).__name__}: {e}"[:200]}
    return line | {"µs": t * 1e6, "floor µs": least_s * 1e6, "by": by, "% of floor": 100 * least_s / t,
                   "bf16 µs": u * 1e6, "times faster": u / t, "pays": "yes" if u > t else "no", "error": error}


def off(got, want): return ((got.float() - want.float()).norm() / want.float().norm()).item()


@torch.no_grad()
def linears(N, K, kinds, rows, device, rate, flush):
    count = max(2, min(64, flush // (2 * N * K)))
    for name, (make, size, share, integers) in ((k, KINDS[k]) for k in kinds):
        layers = [dense(N, K, device) for _ in range(count)]
        try: packed = [make(m) for m in layers]
        except Exception as e:
            yield {"layer": f"{N}×{K}", "kind": name, "note": f"{type(e).__name__}: {e}"[:200]}
            continue
        # the small one walks through as many bytes
        packed += [make(dense(N, K, device)) for _ in range((max(1, round(2 / size)) - 1) * count)]
        for M in rows:
            x = torch.randn(M, K, device=device, dtype=torch.bfloat16)
            least = floor(size * N * K + 2 * M * (N + K), 2 * M * N * K * share, integers is not None and M >= integers,
                          rate)
            yield row(f"{N}×{K}", name, M, [lambda m=m: m(x) for m in packed],
                      [lambda m=m: F.linear(x, m.weight) for m in layers], least,
                      off(packed[0](x), F.linear(x, layers[0].weight)), device)


class MLP(nn.Module):
    def __init__(self, D, N, device):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = dense(N, D, device), dense(N, D, device), dense(D, N, device)
        self.act_fn = nn.SiLU()
    def forward(self, x): return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


@torch.no_grad()
def experts(D, N, E, k, rows, device, rate, flush):
    "The feed-forward layer with k of E experts by a router of centroids, beside the same layer dense"
    layers = [MLP(D, N, device) for _ in range(max(2, min(16, flush // (6 * N * D))))]
    for k in (k, E):
        made = [MoEMLP(m, FFN("up_proj", "down_proj", "gate_proj", "act_fn"),
                       Router("centroid", {"centres": torch.randn(E, D, device=device, dtype=torch.bfloat16)}),
                       [0, *range(0, N + 1, N // E)], k).eval().requires_grad_(False)
                for m in layers]
        for M in rows:
            x = torch.randn(M, D, device=device, dtype=torch.bfloat16)
            # share of the experts that M tokens reach if each goes its own way
            touched = 1 - (1 - k / E) ** M
            least = floor(6 * N * D * touched + 4 * M * D, 6 * M * N * D * k / E, False, rate)
            error = off(made[0](x), layers[0](x)) if k == E else float("nan")
            yield row(f"{D}→{N}→{D}", f"MoE {k}/{E}", M, [lambda m=m: m(x) for m in made],
                      [lambda m=m: m(x) for m in layers], least, error, device)


def main():
    args = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    args.add_argument("--tiny", action="store_true")
    args.add_argument("--out")
    args.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64, 512, 4096])
    args.add_argument("--kinds", nargs="+", choices=KINDS)
    args = args.parse_args()
    if not args.tiny and not torch.cuda.is_available():
        raise SystemExit("no GPU here; --tiny shows on a CPU that the benchmark runs")
    device, shapes, flush = ("cpu", [(256, 256), (128, 512)], 0) if args.tiny else ("cuda", SHAPES, FLUSH)
    torch.manual_seed(0)
    rate = rates(device, args.tiny)
    name = "a CPU, small shapes: no result" if args.tiny else torch.cuda.get_device_name()
    print(f"{name}, torch {torch.__version__}; measured: memory {rate[0] / 1e9:.0f} GB/s, bf16 {rate[1] / 1e12:.1f} "
          f"TFLOP/s, int8 {rate[2] / 1e12:.1f} TOP/s")
    rows = []
    work = [linears(N, K, args.kinds or KINDS, args.rows, device, rate, flush) for N, K in shapes]
    if not args.kinds:
        sizes = (128, 256, 8, 2) if args.tiny else (4096, 14336, EXPERTS, ACTIVE)
        work.append(experts(*sizes, args.rows, device, rate, flush))
    for line in (line for lines in work for line in lines):
        rows.append(line)
        if args.out:
            with open(args.out, "w") as f:
                json.dump({"device": name, "torch": torch.__version__, "memory_bytes_s": rate[0],
                           "bf16_flop_s": rate[1], "int8_op_s": rate[2], "rows": rows},
                          f, indent=1)
    frame = pd.DataFrame(rows)
    print(frame.round({"µs": 1, "floor µs": 1, "% of floor": 0, "bf16 µs": 1, "times faster": 2,
                       "error": 4}).astype(object).where(frame.notna(), "").to_string(index=False))


if __name__ == "__main__": main()

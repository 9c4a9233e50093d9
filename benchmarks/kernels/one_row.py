"""A row or a few by programs that stay (one_row.cu, few_rows.cu, one_token.cu) beside the Triton kernels and torch

The four products of LLaMA-3-8B's blocks, each alone over many layers' weights, then whole blocks, of a single row with
the attention of 257 and 1,000 keys between them too, in CUDA graphs. Packed weights: the bits of both are compared.
Weights in bf16: beside torch's products with bmlab's norms and gates between them. Bound: the bytes of weights at the
rate of a copy.

usage: python benchmarks/kernels/one_row.py [--bits 4 8 16] [--rows 1 2 4 8 16] [--layers 16]

Needs a Hopper GPU or a later one.
"""
import argparse, contextlib, functools, sys
from pathlib import Path
from unittest import mock

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(1, str(Path(__file__).resolve().parents[1] / "common"))
from bmlab.kernels import nvrtc
from bmlab.kernels.few_rows import few_rows, takes
from bmlab.kernels.triton_attention import rms_norm, rope_and_attend
from bmlab.kernels.triton_products import int4_linear, int8_linear, silu_mul
from clock import memory_rate

D, SHAPES = 4096, {"q, k, v": (6144, 4096), "out": (4096, 4096), "up": (28672, 4096), "down": (4096, 14336)}


# ---- products ----
def drawn(N, K, bits):
    draw = lambda *shape: torch.rand(*shape, device="cuda") / K**0.5
    if bits == 16: return (torch.randn(N, K, device="cuda").bfloat16() / K**0.5,)
    if bits == 8: return torch.randint(-127, 128, (N, K), dtype=torch.int8, device="cuda"), draw(N) / 73
    codes = torch.randint(256, (N, K // 2), dtype=torch.uint8, device="cuda")
    return codes, (draw(N, K // 128) / 4).half(), (draw(N, K // 128) / 4).half()


def by_torch(x, w, norm=None, gate=None, residual=None, **when):
    "A product of weights in bf16, and its ends as kernels of their own"
    if norm is not None: x = rms_norm(x, norm[0], norm[1], offset=norm[2])
    y = F.linear(x, w)
    if gate: y = silu_mul(y, gate)
    return y if residual is None else y + residual


def by_few(x, w, norm=None, gate=None, residual=None, **when):
    "The same as one kernel, where it takes that"
    if not takes(x, w, norm=norm, gate=gate): return by_torch(x, w, norm, gate, residual)
    return few_rows(x, w, norm=norm, gate=gate, residual=residual, **when)


def block(h, ahead, w, bits, weight, attend, mine):
    "(the next block's rows, the same times the weight of its norm) after the products of a block, `attend` between"
    soon, spread = dict(soon=mine and attend is not None), dict(spread=mine)
    if bits == 16:
        product, norm = (by_few if mine else by_torch), (weight, 1e-5, 0.0)
        q = product(h, *w["q, k, v"], norm=norm, **soon)
        h = product(attend(q) if attend else q[:, :D].contiguous(), *w["out"], residual=h, **spread)
        return product(product(h, *w["up"], norm=norm, gate="silu"), *w["down"], residual=h), None
    product = int8_linear if bits == 8 else int4_linear
    q = product(ahead, *w["q, k, v"], norm=(h, 1e-5), **soon)
    y = attend(q) if attend else q[:, :D].contiguous()
    h, ahead = product(y, *w["out"], residual=h, ahead=(weight, 0.0), **spread)
    y = product(ahead, *w["up"], gate="silu", norm=(h, 1e-5))
    return product(y, *w["down"], residual=h, ahead=(weight, 0.0))


class Cache:
    "Keys of one row, its length, and angles"
    def __init__(self, keys, heads=8, head=128):
        new = functools.partial(torch.zeros, device="cuda", dtype=torch.bfloat16)
        self.k, self.v = (new(1, heads, 2 * keys, head).normal_() for _ in range(2))
        self.cos, self.sin = new(1, 1, head) + 1, new(1, 1, head)
        self.lengths = torch.full((1,), keys, dtype=torch.int32, device="cuda")
        self.arrived, self.most = torch.zeros(64, dtype=torch.int32, device="cuda"), -(-(keys + 1) // 128) * 128
    def __call__(self, qkv):
        y = rope_and_attend(
            qkv.view(1, 1, -1), self.cos, self.sin, self.k, self.v, self.lengths, arrived=self.arrived, most=self.most,
            soon=nvrtc.usable(qkv))
        return y.transpose(1, 2).reshape(1, -1)


# ---- clocks ----
def microseconds(call, n):
    "(µs of each of n, what the call gave) in a CUDA graph"
    for _ in range(2): call()
    torch.cuda.synchronize()
    graph, best = torch.cuda.CUDAGraph(), float("inf")
    with torch.cuda.graph(graph): y = call()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(4):
        begin.record()
        for _ in range(5): graph.replay()
        end.record()
        torch.cuda.synchronize()
        best = min(best, begin.elapsed_time(end) / 5 * 1e3 / n)
    return best, y.clone()


def beside(name, bound, bits, n, call):
    "Print what `call(mine)` takes without and with the kernels, and whether the bits are the same"
    found = []
    for mine in (False, True):
        with contextlib.nullcontext() if mine else mock.patch.object(nvrtc, "usable", lambda x: False):
            found.append(microseconds(lambda: call(mine), n))
    (theirs, y), (ours, z) = found
    same = "" if bits == 16 else "; the same bits" if torch.equal(y, z) else "; OTHER BITS"
    other = "torch" if bits == 16 else "Triton"
    print(f"{name}: bound {bound:.1f} µs, {other} {theirs:.1f}, here {ours:.1f} ({bound / ours:.0%}){same}", flush=True)


def measure(bits, rate, n, x, weight):
    layers = [{name: drawn(N, K, bits) for name, (N, K) in SHAPES.items()} for _ in range(n)]
    bound = {name: sum(t.nbytes for t in w) / rate * 1e6 for name, w in layers[0].items()}
    many = f"{len(x)} rows, " if len(x) > 1 else ""
    for name, (_, K) in SHAPES.items():
        row = torch.randn(len(x), K, device="cuda").bfloat16()
        gate = dict(gate="silu") if name == "up" else {}
        def call(mine):
            product = {8: int8_linear, 4: int4_linear}.get(bits) or (by_few if mine else by_torch)
            return [product(row, *w[name], **gate) for w in layers][-1]
        beside(f"{bits} bits, {many}{name}", bound[name], bits, n, call)
    for keys in (0, 257, 1000) if len(x) == 1 else (0,):
        attend = Cache(keys) if keys else None
        def call(mine):
            h = ahead = x
            for w in layers: h, ahead = block(h, ahead, w, bits, weight, attend, mine)
            return h
        beside(f"{bits} bits, {many}a block" + f", {keys} keys" * bool(keys), sum(bound.values()), bits, n, call)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--bits", type=int, nargs="+", default=[4, 8, 16], choices=[4, 8, 16])
    p.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16], help="of x, up to 16")
    p.add_argument("--layers", type=int, default=16, help="whose weights are read before one comes again")
    args = p.parse_args()
    if why := nvrtc.unavailable(): sys.exit(why)
    rate = memory_rate()
    torch.manual_seed(0)
    weight = torch.rand(D, device="cuda").bfloat16()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, a copy moves {rate / 1e9:.0f} GB/s")
    for bits in args.bits:
        for rows in args.rows:
            measure(bits, rate, args.layers, torch.randn(rows, D, device="cuda").bfloat16(), weight)


if __name__ == "__main__": main()

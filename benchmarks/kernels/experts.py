"""The kernels of mixtures of experts alone, in CUDA graphs: microseconds and bytes a second for 1 to 256 tokens

Every call reads other experts, drawn evenly. GB/s are those of the experts that are chosen, each counted once, beside
what a copy reaches. The peers, in bfloat16 and in the same run: transformers' `batched_mm` and `grouped_mm` over the
same weights.

usage: python benchmarks/kernels/experts.py [--shape NAME …] [--kinds …] [--rows …] [--sweep] [--tiny]
       --sweep tries other tiles first, for one token; --tiny runs on a CPU, by Triton's interpreter
"""
import argparse, os, sys, time, traceback
from pathlib import Path

import torch

if not torch.cuda.is_available(): os.environ["TRITON_INTERPRET"] = "1"
import pandas as pd

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(1, str(Path(__file__).resolve().parents[1] / "common"))
from bmlab.kernels import triton_experts as T
from clock import memory_rate, seconds

# experts, of a token, D, F
SHAPES = {
    "qwen3-30b-a3b": (128, 8, 2048, 768),
    "gpt-oss-120b": (128, 4, 2880, 2880),
    "mixtral-8x7b": (8, 2, 4096, 14336),
    "deepseek-v2-lite": (64, 6, 2048, 1408),
    "tiny": (4, 2, 64, 32),
}
SWEEP = {
    "float": [(4, 2048, 4, 2), (8, 1024, 4, 3), (4, 1024, 4, 3), (4, 1024, 2, 3), (8, 512, 4, 4)],
    "int8": [(8, 1024, 4, 1), (8, 1024, 4, 3), (8, 2048, 4, 1), (4, 1024, 2, 2), (16, 512, 4, 2), (16, 1024, 4, 1)],
    "int4": [(8, 512, 4, 1), (8, 1024, 4, 1), (16, 512, 4, 1), (4, 512, 2, 1), (4, 1024, 2, 1), (16, 256, 4, 2),
             (16, 1024, 4, 1), (16, 512, 2, 1), (32, 512, 4, 1), (16, 384, 4, 1)],
    "MXFP4": [(8, 256, 4, 1), (8, 512, 4, 1), (4, 256, 2, 1), (16, 256, 4, 1), (8, 128, 2, 1), (16, 128, 4, 2)],
}
GROUP = 128
cuda = torch.cuda.is_available()
device, dtype = ("cuda", torch.bfloat16) if cuda else ("cpu", torch.float32)


def matrices(kind, E, N, K):
    "Random experts in one form"
    random = lambda *s, top=256: torch.randint(0, top, s, dtype=torch.uint8, device=device)
    if kind == "float": return T.Matrices.of(torch.randn(E, N, K, device=device, dtype=dtype).mul_(0.02))
    if kind == "int8":
        return T.Matrices.of(random(E, N, K).view(torch.int8), torch.full((E, N), 1e-3, device=device))
    if kind == "int4":
        group = GROUP if K % GROUP == 0 else 32
        s = torch.full((E, N, K // group), 1e-3, device=device, dtype=torch.float16)
        return T.Matrices.of(random(E, N, K // 2), s, s.clone())
    raw = random(E, N, K // 32 * 17)
    raw[..., ::17] = 120
    return T.Matrices.of(raw, kind="MXFP4")


def nbytes(m): return sum(t.nbytes for t in (m.codes, m.scale, m.zero) if t is not None) / len(m.codes)


class Layers:
    "A few layers' experts, and calls that each read others"
    def __init__(self, shape, kind):
        self.E, self.k, D, F = SHAPES[shape]
        self.D, self.oss = D, shape.startswith("gpt-oss")
        one = 3 * D * F * self.E * {"float": 2, "int8": 1, "int4": 0.56, "MXFP4": 0.53}[kind]
        n = max(1, min(4, int(6e9 // one))) if cuda else 1
        self.mixtures = [
            T.Mixture(matrices(kind, self.E, 2 * F, D), matrices(kind, self.E, D, F),
                      gate="oss" if self.oss else "silu", beside=self.oss) for _ in range(n)]
        self.bytes = nbytes(self.mixtures[0].up), nbytes(self.mixtures[0].down)
    def calls(self, rows, what, n=24):
        "(functions, bytes of weights a call reads on average)"
        out, read = [], 0
        for i in range(n if cuda else 1):
            m, x = self.mixtures[i % len(self.mixtures)], torch.randn(rows, self.D, device=device, dtype=dtype)
            shares, ids = T.route(torch.randn(rows, self.E, device=device), self.k, T.Rule(norm=True))
            hit = len(set(ids.flatten().tolist()))
            h = torch.randn(rows * self.k, m.down.columns, device=device, dtype=dtype)
            read += hit * {"all": sum(self.bytes), "up": self.bytes[0], "down": self.bytes[1], "tiles": self.bytes[0],
                           "sort": 0}[what]
            tiles = T.sort_pairs(ids, self.E, 16)
            out.append({
                "all": lambda x=x, ids=ids, s=shares, m=m: T.run_experts(x, ids, s, m),
                "up": lambda x=x, ids=ids, m=m: T.experts_product(x, ids, m.up, gate=m.gate, beside=m.beside),
                "tiles": lambda x=x, t=tiles, m=m: T.experts_product(x, t, m.up, gate=m.gate, beside=m.beside),
                "down": lambda h=h, ids=ids, m=m: T.experts_product(h, ids.reshape(-1), m.down),
                "sort": lambda ids=ids: T.sort_pairs(ids, self.E, 16),
            }[what])
        return out, read / len(out)


class Dummy:
    "As transformers' functions want their module"
    has_gate, has_bias, is_transposed, has_post_expert_norm, _is_expert_parallel = True, False, False, False, False
    def __init__(self, m):
        self.gate_up_proj, self.down_proj, self.num_experts = m.up.codes, m.down.codes, len(m.up.codes)
    def _apply_gate(self, v):
        g, u = v.chunk(2, -1)
        return torch.nn.functional.silu(g) * u


def peer(layers, rows):
    from transformers.integrations.moe import batched_mm_experts_forward, grouped_mm_experts_forward
    run, out = (batched_mm_experts_forward if rows <= 16 else grouped_mm_experts_forward), []
    for i in range(24 if cuda else 1):
        m, x = layers.mixtures[i % len(layers.mixtures)], torch.randn(rows, layers.D, device=device, dtype=dtype)
        shares, ids = T.route(torch.randn(rows, layers.E, device=device), layers.k, T.Rule(norm=True))
        d = Dummy(m)
        out.append(lambda d=d, x=x, ids=ids, s=shares: run(d, x, ids, s.to(dtype)))
    return seconds(out, device)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--shape", nargs="+", default=["qwen3-30b-a3b"])
    p.add_argument("--kinds", nargs="+", default=["int4", "float", "int8", "MXFP4"])
    p.add_argument("--rows", nargs="+", type=int, default=[1, 4, 16, 64, 256])
    p.add_argument("--sweep", action="store_true")
    p.add_argument("--tiny", action="store_true")
    a, begin = p.parse_args(), time.perf_counter()
    if a.tiny: a.shape, a.rows = ["tiny"], [1, 20]
    rate = memory_rate(device, 1 << (28 if cuda else 20))
    card = torch.cuda.get_device_name() if cuda else "a CPU, by the interpreter"
    print(f"{card}, torch {torch.__version__}; a copy moves {rate / 1e9:.0f} GB/s", flush=True)
    for shape in a.shape:
        table = []
        for kind in a.kinds:
            try:
                layers = Layers(shape, kind)
                if a.sweep: sweep(layers, kind, rate)
                for rows in a.rows:
                    row = {"shape": shape, "kind": kind, "tokens": rows}
                    for what in ("all", "up", "down", "tiles", "sort"):
                        if rows > 16 and what in ("up", "down"): continue
                        try:
                            calls, read = layers.calls(rows, what)
                            t = seconds(calls, device)
                            row[f"{what} µs"] = t * 1e6
                            if read: row[f"{what} %"] = 100 * read / t / rate
                            if what == "all": row |= {"GB/s": read / t / 1e9, "bound µs": read / rate * 1e6}
                        except Exception as e: print(kind, rows, what, type(e).__name__, str(e)[:300], flush=True)
                    if kind == "float":
                        try: row["peer µs"] = peer(layers, rows) * 1e6
                        except Exception as e: print("peer", rows, type(e).__name__, str(e)[:300], flush=True)
                    table.append(row)
                del layers
                if cuda: torch.cuda.empty_cache()
            except Exception: traceback.print_exc()
        print(pd.DataFrame(table).round(1).to_string(index=False), f"\n{time.perf_counter() - begin:.0f} s", flush=True)
    # the router, for one token and for sixteen
    for rows in (1, 16):
        logits = [torch.randn(rows, 128, device=device) for _ in range(24)]
        t = seconds([lambda v=v: T.route(v, 8, T.Rule(norm=True)) for v in logits], device)
        print(f"route, 128 experts, {rows} tokens: {t * 1e6:.1f} µs", flush=True)


def sweep(layers, kind, rate):
    rows, plain = [], T.PAIR_TILES[kind]
    for tiles in SWEEP[kind][:None if cuda else 1]:
        T.PAIR_TILES[kind] = tiles, tiles
        row = {"kind": kind, "rows, bytes, warps, stages": tiles}
        for what in ("up", "down"):
            try:
                calls, read = layers.calls(1, what)
                t = seconds(calls, device)
                row |= {f"{what} µs": t * 1e6, f"{what} %": 100 * read / t / rate}
            except Exception as e: print(tiles, what, type(e).__name__, str(e)[:200], flush=True)
        rows.append(row)
    T.PAIR_TILES[kind] = plain
    print(pd.DataFrame(rows).round(1).to_string(index=False), flush=True)


if __name__ == "__main__": main()

"""The int8 linear layer for few rows, beside torch's bf16 `F.linear`, in one run

Prints time, bytes a second and the share of what a copy reaches.

usage: python benchmarks/kernels/int8_linear.py [--sweep]      needs a GPU
       --sweep tries other tile sizes on the first shapes
"""
import argparse
import itertools
import sys
from pathlib import Path

import pandas as pd
import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(1, str(Path(__file__).resolve().parents[1] / "common"))
from bmlab.kernels import triton_products
from bmlab.kernels.triton_products import int8_linear
from clock import memory_rate, seconds

SHAPES = [(1024, 4096), (4096, 4096), (14336, 4096), (4096, 14336), (128256, 4096)]   # (N, K) of an 8B LLaMA
# bytes of weights a measurement walks through: ten times the L2
FLUSH = 600_000_000


def packed(N, K):
    return [
        (torch.randint(-127, 128, (N, K), dtype=torch.int8, device="cuda"), torch.rand(N, device="cuda") / 1000)
        for _ in range(max(4, FLUSH // (N * K)))
    ]


def main():
    args = argparse.ArgumentParser()
    args.add_argument("--sweep", action="store_true")
    args, rate, rows = args.parse_args(), memory_rate(), []
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}; a pass over 1 GiB, read and written, moves "
        f"{rate / 1e9:.0f} GB/s"
    )
    for N, K in SHAPES:
        ours = packed(N, K)
        theirs = [torch.randn(N, K, device="cuda", dtype=torch.bfloat16) for _ in range(len(ours))]
        for M in (1, 4, 16):
            x = torch.randn(M, K, device="cuda", dtype=torch.bfloat16)
            t = seconds([lambda c=c, s=s: int8_linear(x, c, s) for c, s in ours])
            u = seconds([lambda w=w: F.linear(x, w) for w in theirs])
            moved = N * K + 4 * N + 2 * M * (N + K)
            rows.append(
                {
                    "N×K": f"{N}×{K}", "M": M, "int8 µs": t * 1e6, "GB/s": moved / t / 1e9,
                    "% of it": 100 * moved / t / rate, "bf16 µs": u * 1e6, "bf16 GB/s": (2 * N * K) / u / 1e9,
                    "times faster": u / t}
            )
        del ours, theirs
    print(pd.DataFrame(rows).round(2).to_string(index=False))
    if not args.sweep: return
    plain, rows = triton_products._blocks, []
    for N, K in SHAPES[:4]:
        x, ours = torch.randn(1, K, device="cuda", dtype=torch.bfloat16), packed(N, K)
        for n, k, w, s in itertools.product((16, 32, 64), (128, 256, 512), (4, 8), (3, 5)):
            if (n + 16) * k * 2 * s > 200_000: continue
            triton_products._blocks = lambda *_: dict(BLOCK_M=16, BLOCK_N=n, BLOCK_K=k, num_warps=w, num_stages=s)
            try: t = seconds([lambda c=c, s=s: int8_linear(x, c, s) for c, s in ours], replays=3)
            except Exception as e:
                print(f"{n} {k} {w} {s}: {type(e).__name__}")
                continue
            rows.append({"N×K": f"{N}×{K}", "n": n, "k": k, "warps": w, "stages": s, "GB/s": N * K / t / 1e9})
        del ours
    triton_products._blocks = plain
    df = pd.DataFrame(rows)
    for shape, part in df.groupby("N×K", sort=False):
        print(part.sort_values("GB/s", ascending=False).head(8).round(0).to_string(index=False))
    print(
        df.groupby(["n", "k", "warps", "stages"])["GB/s"]
        .agg(lambda g: g.prod() ** (1 / len(g)))
        .sort_values(ascending=False)
        .head(8)
        .round(0)
    )


if __name__ == "__main__": main()

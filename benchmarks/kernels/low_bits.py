"""Linear layers of 3 and 2 bits for few rows: which tiles are fastest, beside torch's bf16 `F.linear`, in one run

Prints for each shape and number of rows the time by the tiles that the kernel takes and by the fastest of the others,
the bytes a second that it reads, and their share of what a pass over memory moves.

usage: python benchmarks/kernels/low_bits.py [--bits 3 2] [--group 128] [--rows 1 16] [--tiny]
       --tiny: one small shape by Triton's interpreter (TRITON_INTERPRET=1), without times worth reading
"""
import argparse
import sys
import time
from pathlib import Path

import pandas as pd
import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(1, str(Path(__file__).resolve().parents[1] / "common"))
from bmlab.kernels import triton_low_bits
from clock import memory_rate, seconds

SHAPES = [(4096, 4096), (28672, 4096), (4096, 14336)]   # (N, K) of an 8B LLaMA: o, gate and up together, down
FLUSH = 600_000_000                                     # bytes of weights that a measurement walks through
# rows of a program, warps, groups of a warp's step, stages
TILES = [(16, w, steps, stages) for w in (4, 8) for steps, stages in ((1, 1), (1, 2), (1, 3), (2, 1), (2, 2), (4, 1))]
TILES += [(32, 4, 1, 2), (32, 4, 1, 3), (32, 8, 1, 2), (32, 2, 2, 2), (16, 16, 1, 2), (16, 2, 4, 1), (16, 2, 2, 2)]


def made_up(N, K, group, bits, device):
    codes = torch.randint(0, 256, (N, K // 8 * bits), dtype=torch.uint8, device=device)
    scale, zero = (torch.rand(N, K // group, device=device).half() / 100 for _ in range(2))
    return codes, scale, zero, bits


def measured(x, some, tiles, device):
    "Seconds by these tiles, and what the first product was; a string where they cannot run"
    before, triton_low_bits._TILES = triton_low_bits._TILES, (tiles,) * 3
    try:
        y = triton_low_bits.low_linear(x, *some[0])
        return seconds([lambda m=m: triton_low_bits.low_linear(x, *m) for m in some], device, 3), y
    except Exception as e: return f"{type(e).__name__}: {str(e)[:80]}", None
    finally: triton_low_bits._TILES = before


@torch.no_grad()
def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--bits", nargs="+", type=int, default=[3, 2])
    p.add_argument("--group", type=int, default=128)
    p.add_argument("--rows", nargs="+", type=int, default=[1, 16])
    p.add_argument("--tiny", action="store_true")
    args = p.parse_args()
    device, dtype = ("cpu", torch.float32) if args.tiny else ("cuda", torch.bfloat16)
    shapes, tiles = ([(32, 512)], TILES[:2]) if args.tiny else (SHAPES, TILES)
    rate, begun = memory_rate(device, 1 << 16 if args.tiny else 1 << 28), time.perf_counter()
    card = "CPU" if args.tiny else torch.cuda.get_device_name()
    print(f"{card}, torch {torch.__version__}; memory {rate / 1e12:.2f} TB/s; µs", flush=True)
    for bits in args.bits:
        rows = []
        for N, K in shapes:
            size = N * K // 8 * bits + 4 * N * K // args.group
            some = [made_up(N, K, args.group, bits, device) for _ in range(2 if args.tiny else max(4, FLUSH // size))]
            dense = [torch.randn(N, K, device=device, dtype=dtype) for _ in range(max(2, len(some) * bits // 16))]
            for M in args.rows:
                x = torch.randn(M, K, device=device, dtype=dtype)
                now = triton_low_bits._TILES[int(N >= 8192)]
                took, y = measured(x, some, now, device)
                theirs = seconds([lambda w=w: F.linear(x, w) for w in dense], device, 3)
                want = F.linear(x.float(), triton_low_bits.low_widen(*some[0], torch.float32))
                others = {t: measured(x, some, t, device)[0] for t in tiles}
                wrong = {t: v for t, v in others.items() if isinstance(v, str)}
                for t, why in wrong.items(): print(f"{t} cannot: {why}", flush=True)
                good = sorted((v, t) for t, v in others.items() if t not in wrong)
                line = {"shape": f"{N}×{K}", "rows": M, "bf16": theirs * 1e6}
                if y is None: line["tiles taken cannot"] = took
                else:
                    error = ((y.float() - want).norm() / want.norm()).item()
                    line |= {"µs": took * 1e6, "GB/s": size / took / 1e9, "%": 100 * size / took / rate, "error": error}
                for k, (v, t) in enumerate(good[:5]): line[f"fastest {k + 1}"] = f"{v * 1e6:.1f} {t}"
                rows.append(line)
                print(line, flush=True)
            del some, dense
        print(f"{bits} bits, groups of {args.group}\n" + pd.DataFrame(rows).round(4).to_string(index=False), flush=True)
    print(f"{time.perf_counter() - begun:.0f} s")


if __name__ == "__main__": main()

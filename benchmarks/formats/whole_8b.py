"""Reading a whole file of the 8B shape into packed weights: one copy of it in memory, at which rate, warm and cold.

usage: python benchmarks/formats/whole_8b.py [--kinds Q4_0 Q4_K] [--threads 1] [--rounds 2] [--folder /tmp]

Writes a file with LLaMA-3-8B's configuration for each kind (32 layers, 4,096 wide, 14,336 forward, a vocabulary of
128,256), its codes random, some 4.5 GB, one at a time, and deletes it. Fresh processes open it by `load`, with packed
layers, and beside them read its bytes into memory. "warm": the file is in the system's cache; "cold": its pages were
dropped by posix_fadvise before (a disk below the machine may keep a cache of its own). Prints seconds of the clock and
of the processor, GB/s of file bytes by the clock and for a core, and the peak of the process's own memory above its
start, as a share of the file and of what the model keeps (Int4Linear has zero points beside Q4_0's scales); pages of
the mapped file are not counted, which the system takes back at will.
"""
import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from gguf_reading import ROOT, one

sys.path.insert(0, str(ROOT))
HALVES = {"Q4_0": (0,), "Q4_K": (0, 2)}               # where a block's float16 numbers lie


def write(path, kind):
    "A LLaMA of the 8B shape whose matrices are random codes under plausible scales, one tensor at a time"
    import transformers as tf
    from bmlab.formats.gguf_layout import gguf_metadata
    from bmlab.formats.gguf_writer import write_gguf
    from bmlab.kernels.ggml import BLOCKS
    config = tf.LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, max_position_embeddings=8192, rms_norm_eps=1e-5)
    rng, block, D, F = np.random.default_rng(0), BLOCKS[kind], config.hidden_size, config.intermediate_size
    def matrix(rows, columns):
        raw = np.frombuffer(bytearray(rng.bytes(rows * columns // block.weights * block.bytes)), np.uint8)
        blocks = raw.reshape(rows, -1, block.bytes)
        for at in HALVES[kind]: blocks[..., at:at + 2] = np.array([0.001], np.float16).view(np.uint8)
        return torch.from_numpy(raw.reshape(rows, -1))
    def of(rows, columns): return (rows, columns), kind, lambda: matrix(rows, columns)
    ones = (D,), "F32", lambda: torch.ones(D).view(torch.uint8).view(1, -1)
    tensors = {"token_embd.weight": of(config.vocab_size, D), "output.weight": of(config.vocab_size, D)}
    tensors["output_norm.weight"] = ones
    for i in range(config.num_hidden_layers):
        sides = dict(attn_q=(D, D), attn_k=(D // 4, D), attn_v=(D // 4, D), attn_output=(D, D), ffn_gate=(F, D),
                     ffn_up=(F, D), ffn_down=(D, F))
        tensors |= {f"blk.{i}.{n}.weight": of(*s) for n, s in sides.items()}
        tensors |= {f"blk.{i}.{n}.weight": ones for n in ("attn_norm", "ffn_norm")}
    metadata, _ = gguf_metadata(config, "llama")
    write_gguf(path, metadata | {"tokenizer.ggml.model": "none"}, tensors)


def drop(file):
    "Take the file's pages from the system's cache"
    fd = os.open(file, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def main():
    args = argparse.ArgumentParser()
    args.add_argument("--kinds", nargs="+", default=["Q4_0", "Q4_K"], choices=list(HALVES))
    args.add_argument("--threads", type=int, default=1)
    args.add_argument("--rounds", type=int, default=2)
    args.add_argument("--folder", default=None)
    args.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    args = args.parse_args()
    if args.one: return one(args.one[0], Path(args.one[1]), args.threads)
    rows = {}
    for kind in args.kinds:
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            file = Path(folder, f"{kind}.gguf")
            write(file, kind)
            size = file.stat().st_size
            for how in ("warm", "cold"):
                for way in ("copy", "packed"):
                    got = []
                    for _ in range(args.rounds):
                        if how == "cold": drop(file)
                        else: subprocess.run(["cat", str(file)], stdout=subprocess.DEVNULL, check=True)
                        command = [sys.executable, __file__, "--one", way, str(file), "--threads", str(args.threads)]
                        out = subprocess.run(command, capture_output=True, text=True)
                        if out.returncode: raise RuntimeError(out.stderr[-2000:])
                        got.append(json.loads(out.stdout.splitlines()[-1]))
                    seconds, busy, peak = (min(g[k] for g in got) for k in ("seconds", "busy", "peak"))
                    rows[kind, how, way] = {
                        "GB": size / 1e9, "s": seconds, "CPU s": busy, "GB/s": size / seconds / 1e9,
                        "GB/s a core": size / busy / 1e9, "peak, GB": peak / 1e9, "peak / file": peak / size,
                        "peak / kept": peak / got[0]["kept"]}
    print(f"{args.threads} thread(s), best of {args.rounds}")
    print(pd.DataFrame(rows).T.round(3).to_string())


if __name__ == "__main__": main()

"""Reading a GGUF file: bmlab's packed and widened layers beside transformers' own loader, in one run.

usage: python benchmarks/formats/gguf_reading.py [--layers 4] [--kinds Q4_0 Q8_0 Q4_K] [--threads 1] [--rounds 3]
                                                 [--folder /tmp] [--no-peer]

Writes a LLaMA of the 3B shape (3,072 wide, few layers, a vocabulary of 16,384) for each kind, its codes random, and
opens it in fresh processes: by `load` with packed layers, by `load(packed=False)`, and by transformers'
`from_pretrained(gguf_file=)`. Prints seconds of the clock and of the processor (the best of the rounds; the peer runs
once, being slow), GB/s of file bytes by the clock and for a core (bytes by seconds of the processor, which others on
the machine disturb less), the ratios to the peer, and the peak of the process's own memory above its start; pages of
the mapped file are not counted, since the system takes them back at will. The file is in the system's cache, so that
no disk is measured: a disk slower than a row's GB/s is what that row waits for. A plain copy of the file's bytes into
memory stands beside.
"""
import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import pandas as pd

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
WIDTH, FORWARD, HEADS, KV_HEADS, VOCABULARY = 3072, 8192, 24, 8, 16384


def write(path, kind, layers):
    "A LLaMA whose matrices are random codes under plausible scales; norms and the rest in float32"
    import gguf
    rng, type_ = np.random.default_rng(0), gguf.GGMLQuantizationType[kind]
    weights, size = gguf.GGML_QUANT_SIZES[type_]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(2048)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(VOCABULARY)
    halves = {"Q4_0": (0,), "Q8_0": (0,), "Q4_1": (0, 2), "Q4_K": (0, 2), "Q6_K": (208,)}[kind]
    def matrix(name, rows, columns):
        raw = rng.integers(0, 256, (rows, columns // weights, size), dtype=np.uint8)
        for at in halves: raw[..., at:at + 2] = np.array([0.001], np.float16).view(np.uint8)
        writer.add_tensor(name, raw.reshape(rows, -1), raw_dtype=type_)
    one = lambda name: writer.add_tensor(name, np.ones(WIDTH, np.float32))
    matrix("token_embd.weight", VOCABULARY, WIDTH)
    matrix("output.weight", VOCABULARY, WIDTH)
    one("output_norm.weight")
    for i in range(layers):
        kv = WIDTH // HEADS * KV_HEADS
        for name, rows, columns in (("attn_q", WIDTH, WIDTH), ("attn_k", kv, WIDTH), ("attn_v", kv, WIDTH),
                                    ("attn_output", WIDTH, WIDTH), ("ffn_gate", FORWARD, WIDTH),
                                    ("ffn_up", FORWARD, WIDTH), ("ffn_down", WIDTH, FORWARD)):
            matrix(f"blk.{i}.{name}.weight", rows, columns)
        one(f"blk.{i}.attn_norm.weight")
        one(f"blk.{i}.ffn_norm.weight")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class Peak:
    "The most of this process's own memory, above what it was at the start"
    def __enter__(self):
        self.start, self.most, self.over = self.now(), 0, threading.Event()
        self.thread = threading.Thread(target=self.watch, daemon=True)
        self.thread.start()
        return self

    def now(self):
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * int(next(l for l in lines if l.startswith("RssAnon")).split()[1])

    def watch(self):
        while not self.over.wait(0.005): self.most = max(self.most, self.now() - self.start)

    def __exit__(self, *_):
        self.over.set()
        self.thread.join()
        self.most = max(self.most, self.now() - self.start)


def one(way, file, threads):
    "Seconds and peak bytes of one reading, in this process"
    import gguf  # noqa: F401 - what is imported on the way is not what is measured
    import torch
    import transformers as tf
    import transformers.models.llama.modeling_llama  # noqa: F401
    torch.set_num_threads(threads)
    if way == "transformers":
        def read(): return tf.AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, dtype=torch.float32,
            quantization_config=tf.GgufConfig(dequantize=True))
    elif way == "copy":
        def read():
            out = torch.empty(file.stat().st_size, dtype=torch.uint8)
            with open(file, "rb", buffering=0) as f:
                at, view = 0, memoryview(out.numpy())
                while at < len(out): at += f.readinto(view[at:])
            return out
    else:
        import bmlab.cook.quantize  # noqa: F401 - has the layer of Q8_0
        from bmlab.kernels.ggml import widen
        from bmlab.models.load import load
        widen(torch.zeros(1, 34, dtype=torch.uint8), "Q8_0")                  # compiles the library, or finds it
        def read(): return load(file, device="cpu", dtype=torch.float32, packed=way == "packed")
    with Peak() as peak:
        start, busy = time.perf_counter(), time.thread_time()
        held = read()
        seconds, busy = time.perf_counter() - start, time.thread_time() - busy
    if way == "copy": kept = held.nbytes
    else:
        model = held[0] if isinstance(held, tuple) else held
        kept = sum({t.data_ptr(): t.nbytes for t in (*model.parameters(), *model.buffers())}.values())
    print(json.dumps({"seconds": seconds, "busy": busy, "peak": peak.most, "kept": kept}))


def main():
    args = argparse.ArgumentParser()
    args.add_argument("--layers", type=int, default=4)
    args.add_argument("--kinds", nargs="+", default=["Q4_0", "Q8_0", "Q4_K"])
    args.add_argument("--threads", type=int, default=1)
    args.add_argument("--rounds", type=int, default=3)
    args.add_argument("--folder", default=None)
    args.add_argument("--no-peer", action="store_true")
    args.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    args = args.parse_args()
    if args.one: return one(args.one[0], Path(args.one[1]), args.threads)
    rows = {}
    for kind in args.kinds:
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            file = Path(folder, f"{kind}.gguf")
            write(file, kind, args.layers)
            size, results = file.stat().st_size, {}
            def run(way):
                command = [sys.executable, __file__, "--one", way, str(file), "--threads", str(args.threads)]
                out = subprocess.run(command, capture_output=True, text=True)
                if out.returncode: raise RuntimeError(out.stderr[-2000:])
                results.setdefault(way, []).append(json.loads(out.stdout.splitlines()[-1]))
            for _ in range(args.rounds):
                for way in ("copy", "packed", "widened"): run(way)
            if not args.no_peer: run("transformers")
            for way, got in results.items():
                seconds, busy = (min(g[k] for g in got) for k in ("seconds", "busy"))
                rows[kind, way] = {
                    "MB": size / 1e6, "s": seconds, "CPU s": busy, "GB/s": size / seconds / 1e9,
                    "GB/s a core": size / busy / 1e9,
                    "peak, MB": min(g["peak"] for g in got) / 1e6,
                    "peak / file": min(g["peak"] for g in got) / size,
                }
            if "transformers" in results:
                theirs = rows[kind, "transformers"]
                for way in results:
                    rows[kind, way]["× transformers"] = theirs["s"] / rows[kind, way]["s"]
                    rows[kind, way]["× in CPU time"] = theirs["CPU s"] / rows[kind, way]["CPU s"]
    print(f"{args.layers} layers, {args.threads} thread(s), best of {args.rounds}")
    print(pd.DataFrame(rows).T.round(2).to_string())


if __name__ == "__main__": main()

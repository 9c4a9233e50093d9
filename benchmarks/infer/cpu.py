"""SmolLM2-135M on a CPU: int8 decode with fused blocks beside transformers' generate in fp32 and bf16, with dynamic and
static cache, in turns in one process.

usage: python benchmarks/infer/cpu.py [--threads 2] [--rounds 5] [--prompt 32] [--tokens 32] [--all]

Prints milliseconds from one token to the next (the median within a round; of the rounds their median and best; and
process CPU time), the ratio to the faster peer, and the bound: the bytes of weights that a token reads over the rate
at which this machine reads memory. Rounds alternate, so that what else runs on the machine disturbs all alike; the
ratio is taken within each round, and its median printed. --all adds bmlab's other forms (not fused, fp32 activations,
bf16 and int4 weights).
"""
import argparse
import copy
import resource
import sys
import time
from pathlib import Path

import pandas as pd
import torch
from transformers.generation.streamers import BaseStreamer

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from bmlab.core import count, format_bytes
from bmlab.infer.decode import Decoder
from bmlab.infer.fused import fuse_decode
from bmlab.kernels.layers import pack_linears
from bmlab.models.load import load


def read_rate(repeats=8):
    "Bytes/s that all threads together read from memory: the best of a few sums over 256 MiB"
    x, best = torch.ones(64 << 20), float("inf")
    for _ in range(repeats):
        t = time.perf_counter()
        x.sum()
        best = min(best, time.perf_counter() - t)
    return x.nbytes / best


def now():
    "Wall clock and CPU seconds of this process"
    r = resource.getrusage(resource.RUSAGE_SELF)
    return time.perf_counter(), r.ru_utime + r.ru_stime


def between(times):
    "Median seconds from one token to the next: wall, CPU (whose clock is coarse: the mean)"
    wall = sorted(b[0] - a[0] for a, b in zip(times, times[1:]))
    return wall[len(wall) // 2], (times[-1][1] - times[0][1]) / (len(times) - 1)


class Times(BaseStreamer):
    "Notes when each token came; the first call brings the prompt"
    def __init__(self): self.at, self.prompt = [], True
    def put(self, value):
        if self.prompt: self.prompt = False
        else: self.at.append(now())
    def end(self): pass


class Peer:
    "transformers' own loop"
    def __init__(self, model, cache=None):
        self.model, self.options = model, {} if cache is None else dict(cache_implementation=cache)
    def run(self, ids, n):
        times = Times()
        out = self.model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, temperature=None, top_p=None,
            top_k=None, pad_token_id=0, min_new_tokens=n + 1, max_new_tokens=n + 1, streamer=times, **self.options
        )
        return *between(times.at), out[0, ids.shape[1]:].tolist()


class Ours:
    "bmlab's Decoder, greedily"
    def __init__(self, model, fuse, context):
        self.model, self.decoder = model, Decoder(model, max_batch=1, max_ctx=context)
        if fuse and not (handle := fuse_decode(model)).table.fused.all():
            raise RuntimeError(f"not all of it is fused\n{handle}")
    def run(self, ids, n):
        next_ = self.decoder.prefill(ids).argmax(-1, keepdim=True)
        out, times = [next_.item()], [now()]
        for _ in range(n):
            next_ = self.decoder.step(next_)[:, -1].argmax(-1, keepdim=True)
            out.append(next_.item())
            times.append(now())
        return *between(times), out


def main():
    args = argparse.ArgumentParser()
    for name, value in (("threads", 2), ("rounds", 5), ("prompt", 32), ("tokens", 32)):
        args.add_argument(f"--{name}", type=int, default=value)
    args.add_argument("--all", action="store_true")
    args = args.parse_args()
    torch.set_num_threads(args.threads)
    torch.set_grad_enabled(False)
    model, _ = load("smollm2-135m")
    model.eval().float()
    half, context = copy.deepcopy(model).bfloat16(), args.prompt + args.tokens + 8
    packed = lambda m, **how: pack_linears(copy.deepcopy(m), **how)
    ours = {"int8, fused": Ours(packed(half), True, context)}
    if args.all:
        ours |= {
            "int8, not fused": Ours(packed(half), False, context),
            "int8, fp32 activations, fused": Ours(packed(model), True, context),
            "bf16, fused": Ours(copy.deepcopy(half), True, context),
            "int4, fused": Ours(packed(half, bits=4), True, context),
        }
    peers = {
        f"transformers {d}, {c or 'dynamic'}": Peer(m, c) for d, m in (("fp32", model), ("bf16", half))
        for c in (None, "static")
    }
    ids = torch.randint(5, 40000, (1, args.prompt), generator=torch.Generator().manual_seed(0))
    everyone = ours | peers
    for name, who in list(everyone.items()):                                              # warm
        try: who.run(ids, 2)
        except RuntimeError as e:
            if name == "int8, fused": raise
            print(f"{name} is left out: {e}")
            del everyone[name]
    rounds = []
    for _ in range(args.rounds):
        rounds.append({name: who.run(ids, args.tokens) for name, who in everyone.items()})
    ms = pd.DataFrame([{n: 1e3 * r[0] for n, r in one.items()} for one in rounds])
    cpu = pd.DataFrame([{n: 1e3 * r[1] for n, r in one.items()} for one in rounds])
    best_peer, best_cpu = ms[list(peers)].min(axis=1), cpu[list(peers)].min(axis=1)
    table = pd.DataFrame({
        "ms, median": ms.median(),
        "ms, best": ms.min(),
        "CPU ms, median": cpu.median(),
        "tok/s": 1e3 / ms.median(),
        "× faster peer": ms.rdiv(best_peer, axis=0).median(),
        "× of its CPU time": cpu.rdiv(best_cpu, axis=0).median()
    })
    print(
        f"torch {torch.__version__}, {args.threads} threads, {args.rounds} rounds of {args.tokens} tokens behind "
        f"{args.prompt}"
    )
    print(table.round(2).to_string())
    read, rate = count(ours["int8, fused"].model).bytes, read_rate()
    print(
        f"the int8 weights are {format_bytes(read)}; memory reads at {rate / 1e9:.1f} GB/s: no token below "
        f"{1e3 * read / rate:.2f} ms; int8, fused takes "
        f"{ms['int8, fused'].min() / (1e3 * read / rate):.2f} times that at its best"
    )
    same = sum(a == b for a, b in zip(rounds[0]["int8, fused"][2], rounds[0]["transformers bf16, dynamic"][2]))
    print(f"of {args.tokens + 1} tokens, {same} are those of bf16")
    print(
        f"int8 decode is {table.loc['int8, fused', '× faster peer']:.2f} × the faster peer (in wall time), "
        f"{table.loc['int8, fused', '× of its CPU time']:.2f} × in CPU time"
    )


if __name__ == "__main__": main()

"""SmolLM2-135M on a CPU beside llama.cpp, in int8 and int4: steps and prompts, in turns.

usage: python benchmarks/infer/llama_cpp.py [--threads 1] [--rounds 5] [--prompt 512] [--before 32] [--tokens 128]
       [--files FOLDER] [--node FOLDER]
       (node: node_modules with node-llama-cpp, which brings llama.cpp built; or NODE_LLAMA_CPP)

One process of each, alternating. Printed: milliseconds from one token to the next, the best and the median of all
rounds, and CPU time (user and system, all threads), which what else runs on the machine moves less; the same for a
prompt; and what the bytes of the weights would take if they alone were read. llama.cpp rounds the inputs of every
product to int8 in blocks of 32; bmlab keeps 23 bits of them, or rounds them too where `round_inputs` asks for it.
"""
import argparse
import copy
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pandas as pd
import torch

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE)]
from cpu import read_rate
from bmlab.cook import export_gguf
from bmlab.core import count
from bmlab.infer.decode import Decoder
from bmlab.infer.fused import fuse_decode
from bmlab.kernels.layers import pack_linears, round_inputs
from bmlab.models.load import load


class Theirs:
    "llama.cpp in a process of its own"
    def __init__(self, node, threads):
        command = ["node", str(HERE / "llama_cpp.mjs"), node, str(threads)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    def run(self, file, prompt, tokens):
        self.process.stdin.write(json.dumps(dict(file=str(file), prompt=prompt, tokens=tokens)) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())
    def close(self): self.process.communicate(timeout=60)


class Ours:
    "bmlab's Decoder on packed weights, greedily"
    def __init__(self, model, bits, room, rounds=False):
        self.model = pack_linears(model, bits=bits)
        self.decoder = Decoder(self.model, max_batch=1, max_ctx=room)
        fuse_decode(self.model)
        if rounds: round_inputs(self.model)
    def run(self, prompt, tokens):
        at, spent = time.perf_counter(), time.process_time()
        self.decoder.prefill([prompt[:-1]])
        out = dict(prompt=time.perf_counter() - at, promptCpu=time.process_time() - spent, steps=[], ids=[])
        next_, spent = torch.tensor([prompt[-1:]]), time.process_time()
        for _ in range(tokens + 1):
            at = time.perf_counter()
            next_ = self.decoder.step(next_)[:, -1].argmax(-1, keepdim=True)
            out["ids"].append(next_.item())
            out["steps"].append(time.perf_counter() - at)
        return out | dict(stepCpu=(time.process_time() - spent) / (tokens + 1))


def summary(runs, prompts):
    "Milliseconds of a step, tokens a second of a prompt; by wall clock (best, median) and by CPU time (best)"
    steps = pd.Series([s for r in runs for s in r["steps"][1:]])
    n = len(prompts[0]["prompt_ids"]) - 1
    return {
        "step, ms": 1e3 * steps.min(), "median": 1e3 * steps.median(), "CPU": 1e3 * min(r["stepCpu"] for r in runs),
        "prompt, tok/s": n / min(r["prompt"] for r in prompts), "by CPU": n / min(r["promptCpu"] for r in prompts),
    }


def main():
    args = argparse.ArgumentParser()
    for name, value in (("threads", 1), ("rounds", 5), ("prompt", 512), ("before", 32), ("tokens", 128)):
        args.add_argument(f"--{name}", type=int, default=value)
    args.add_argument("--node", default=os.environ.get("NODE_LLAMA_CPP", str(HERE.parents[1] / ".node/node_modules")))
    args.add_argument("--files", help="where the GGUF files are kept; made where they are not there")
    args = args.parse_args()
    torch.set_num_threads(args.threads)
    torch.set_grad_enabled(False)
    model, tok = load("smollm2-135m")
    half = model.eval().to(torch.bfloat16)
    draw = lambda n: torch.randint(5, 40000, (n + 1,), generator=torch.Generator().manual_seed(0)).tolist()
    long, short, room = draw(args.prompt), draw(args.before), args.prompt + args.before + args.tokens + 8
    ours = {f"int{b}": Ours(copy.deepcopy(half), b, room) for b in (8, 4)}
    ours |= {f"int{b}, inputs int8": Ours(copy.deepcopy(half), b, room, True) for b in (8, 4)}
    theirs = Theirs(args.node, args.threads)
    files = {"int8": ("Q8_0",), "int4": ("Q4_0", "Q4_1")}
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(args.files or folder)
        made = {k: folder / f"{k}.gguf" for ks in files.values() for k in ks}
        for kind, file in made.items():
            if not file.exists(): export_gguf(half, file, kind, tokenizer=tok)
        everyone = {("bmlab", n): o.run for n, o in ours.items()}
        everyone |= {("llama.cpp", k): lambda p, n, f=f: theirs.run(f, p, n) for k, f in made.items()}
        runs, prompts = ({w: [] for w in everyone} for _ in range(2))
        for n in range(args.rounds + 1):                                               # the first round warms
            for who, run in everyone.items():
                found = run(short, args.tokens if n else 2), run(long, 1)
                if n:
                    runs[who].append(found[0])
                    prompts[who].append(found[1] | dict(prompt_ids=long))
        theirs.close()
        table = pd.DataFrame({who: summary(runs[who], prompts[who]) for who in everyone}).T
        size = {("llama.cpp", k): Path(f).stat().st_size for k, f in made.items()}
    size |= {("bmlab", n): count(o.model).bytes for n, o in ours.items()}
    rate = read_rate()
    table.insert(0, "weights, MB", pd.Series(size) / 1e6)
    table["at the memory's rate, ms"] = pd.Series(size) / rate * 1e3
    print(f"{args.threads} thread(s), {args.rounds} rounds of {args.tokens} tokens behind {args.before}, prompts of "
          f"{args.prompt}; memory is read at {rate / 1e9:.1f} GB/s")
    print(table.round(2).to_string())
    for bits, kinds in ((n, files[n[:4]]) for n in ours):
        mine, peers = table.loc[("bmlab", bits)], table.loc["llama.cpp"].loc[list(kinds)]
        print(
            f"{bits}: decode {peers['step, ms'].min() / mine['step, ms']:.2f} × llama.cpp's at its best, "
            f"{peers['median'].min() / mine['median']:.2f} × in the median, {peers['CPU'].min() / mine['CPU']:.2f} × "
            f"by CPU time; prompt {mine['prompt, tok/s'] / peers['prompt, tok/s'].max():.2f} ×, "
            f"{mine['by CPU'] / peers['by CPU'].max():.2f} × by CPU time"
        )


if __name__ == "__main__": main()

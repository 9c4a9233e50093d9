"""Looking into a packed model while its blocks stream: `look`, `hidden_states`, `replace_at` and one attention map.

usage: python benchmarks/infer/look_8b.py [--tokens 64] [--rounds 5] [--tiny]

A LLaMA of the 8B shape with random 4-bit weights, under a limit halfway between the smallest plan and all of it. Times
are medians of rounds behind one that warms up; the bound is what streams in one pass over the link's own rate. The peak
is the driver's count of what the process holds (CUDA context included) and torch's, beside the limit. Then the same
weights without a limit: how far the numbers lie apart, as a share of the largest, and whether one engine says the same
twice, bit for bit. `--tiny` runs a small shape on a CPU in seconds.
"""
import argparse, statistics, sys, time, traceback
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))
import inference as I

from bmlab.core import format_bytes
from bmlab.infer import hidden_states, look, replace_at
from bmlab.infer.engine import wrap
from bmlab.infer.placement import plan_inference

GPU = torch.cuda.is_available()


def held():
    "Bytes in use on the GPU by the driver's count, CUDA context included (nobody else is to be on it)"
    free, total = torch.cuda.mem_get_info() if GPU else (0, 0)
    return total - free


def farthest(a, b):
    "The largest difference, as a share of the largest number"
    a, b = a.double(), b.double()
    return float((a - b).abs().max() / b.abs().max().clamp(min=1e-30))


class Looks:
    "What is asked of a model, each part with its time"
    def __init__(self, engine, ids, rounds):
        self.e, self.ids, self.rounds = engine, ids, rounds
        self.found, self.seconds, self.steady, self.most = {}, {}, {}, held()
        n = engine.model.config.num_hidden_layers
        self.middle, self.first, self.last = n // 2, "layers[0].mlp", f"layers[{n - 1}]"

    def timed(self, name, call):
        took, steady = [], True
        try:
            for i in range(1 + self.rounds):
                I.sync()
                begin = time.perf_counter()
                out = call()
                I.sync()
                took.append(time.perf_counter() - begin)
                self.most = max(self.most, held())
                out = {k: v.cpu() for k, v in out.items()}
                if i: steady &= all(torch.equal(self.found[name][k], v) for k, v in out.items())
                self.found[name] = out
            self.seconds[name], self.steady[name] = statistics.median(took[1:]), steady
        except Exception: traceback.print_exc()

    def seen(self):
        s = look(self.e, self.ids)
        return {"residual": s.residual, "losses": s.losses.nan_to_num(), "guesses": s.guesses}

    def states(self): return dict(hidden_states(self.e, self.ids, [self.first, self.last]))

    def replaced(self):
        with replace_at(self.e, {self.first: 0}): return dict(hidden_states(self.e, self.ids, [self.last]))

    def all(self):
        self.timed("look", self.seen)
        self.timed("hidden_states of two sites", self.states)
        self.timed("replace_at, and the last block", self.replaced)
        whole = look(self.e, self.ids)
        self.timed("an attention map", lambda: {"map": whole.attention(self.middle, 0)})
        lens = lambda: {"losses": whole.lens([1, self.middle, -1]).losses.nan_to_num()}
        self.timed("the lens behind three blocks", lens)
        return self


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    torch.set_grad_enabled(False)
    link = I.Link()
    rate = link.rate()
    link.close()
    shape, ctx = ("tiny", 72) if args.tiny else ("llama8", 256)
    tokens = min(args.tokens, ctx - 8)
    model = I.skeleton(shape)
    asked = dict(bits=4, max_batch=1, max_ctx=ctx, machine=I.machine())
    plan = plan_inference(model, None, **asked)
    limit = (plan.min_bytes + plan.peak_bytes) // 2
    begin = time.perf_counter()
    I.fill(I.pack(model, 4), "cpu" if args.tiny or not GPU else "cuda")
    model.to("cpu")
    print(f"{I.device()}: 4-bit weights of {shape} filled in {time.perf_counter() - begin:.1f} s; whole plan "
          f"{format_bytes(plan.peak_bytes)}, limit {format_bytes(limit)}", flush=True)
    if GPU:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    ids = torch.tensor(I.prompt_of(model.config.vocab_size, 1, tokens)[0])
    with wrap(model, None, limit, **asked) as e:
        print(e.plan.sentence(), flush=True)
        assert e.plan.streamed, "nothing streams: the limit is too high"
        streamed = Looks(e, ids, args.rounds).all()
        bound = e.streamer.pass_bytes / rate
        if GPU:
            kept = "kept" if streamed.most <= limit else "BROKEN"
            print(f"peak {format_bytes(streamed.most)} by the driver, {format_bytes(torch.cuda.max_memory_reserved())} "
                  f"by torch; limit {format_bytes(limit)}: {kept}")
    with wrap(model, None, None, **asked) as e:
        resident = Looks(e, ids, args.rounds).all()
    print(f"{tokens} tokens; bound of a pass that streams: {1e3 * bound:.1f} ms")
    print(f"{'':32}{'streamed ms':>12}{'resident ms':>12}{'÷ bound':>9}   apart, the same twice (streamed, resident)")
    for name, took in streamed.seconds.items():
        one, other = streamed.found[name], resident.found.get(name, {})
        apart = ", ".join(f"{k} {farthest(one[k], v):.1e}" for k, v in other.items())
        steady = f"{streamed.steady[name]}, {resident.steady.get(name)}"
        times = f"{1e3 * took:12.1f}{1e3 * resident.seconds.get(name, 0):12.1f}{took / bound:9.2f}"
        print(f"{name:32}{times}   {apart}; {steady}")


if __name__ == "__main__": main()

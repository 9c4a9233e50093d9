"""Seconds from a prompt to its first logits, LLaMA-3-8B's shape, by transformers and by bmlab, in turn in one run.

usage: python benchmarks/infer/prompts.py [--lengths 512 8192 30000] [--runs bf16 int8 int4] [--tiny]

transformers: one forward with sdpa and a dynamic cache, logits of the last token. bmlab: `wrap`, then `prefill`,
whole and in pieces of 512; the plan's seconds and peak beside them. Bound: 2 × weights × tokens plus the attention's
products, over the rate of a bf16 product of 8192 × 8192 × 8192 in this process. Weights are random; apart: difference
of the two logits, relative to their spread.
"""
import sys, time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))
import inference as I

p = I.arguments(__doc__, ["bf16", "int8", "int4"])
p.add_argument("--lengths", type=int, nargs="+", default=[512, 8192, 30000])
args = p.parse_args()
SHAPE = "tiny" if args.tiny else "llama8"
LENGTHS = [40, 120] if args.tiny else args.lengths


def seconds(call, repeats=3):
    "Median seconds of a call that has run before"
    call()
    took = []
    for _ in range(repeats):
        I.sync()
        begin = time.perf_counter()
        call()
        I.sync()
        took.append(time.perf_counter() - begin)
    return sorted(took)[repeats // 2]


def peak(call):
    "GiB that a call needs at most, all that is held included"
    if not torch.cuda.is_available(): return 0.0
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    call()
    I.sync()
    return torch.cuda.max_memory_allocated() / I.GiB


def peer(model, ids):
    from transformers import DynamicCache
    ids = torch.tensor(ids, device=I.device())
    def call():
        cache = DynamicCache(config=model.config)
        return model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1].float()
    return call() if ids.shape[1] < 9000 else None, seconds(call), peak(call)


def product_rate():
    "FLOP/s of a square bf16 product"
    n = 256 if args.tiny else 8192
    a, b = (torch.randn(n, n, dtype=torch.bfloat16, device=I.device()) for _ in "ab")
    return 2 * n ** 3 / I.seconds_each(lambda: a @ b)


def rows(engine, prompts, known, rate):
    "What each prompt takes, whole and in pieces, beside the plan, the bound and the peer"
    c, d = engine.model.config, engine.decoder
    linear = [m for n, m in engine.model.named_modules() if n.endswith("_proj")]
    weights = sum(m.in_features * m.out_features for m in linear)
    for n, ids in prompts.items():
        def read(chunk=None):
            d.free()
            return d.prefill(ids, chunk=chunk)
        bound = (2 * weights * n + 2 * n * n * c.hidden_size * c.num_hidden_layers) / rate
        row = {"tokens": n, "pieces of": d.chunk, "s": seconds(read), "peak GiB": peak(read)}
        row |= {"planned s": engine.plan.first_token(n), "bound s": bound}
        said = engine.plan.predicted({"prompt_tokens": n})["peak_bytes"] - engine.plan.context_bytes
        row["planned GiB"] = said / I.GiB
        if n <= 8192: row["s by 512"] = seconds(lambda: read(512))
        if n in known:
            logits, took, most = known[n]
            row |= {"transformers s": took, "transformers GiB": most, "times": took / row["s"]}
            if logits is not None: row["apart"] = ((read() - logits).norm() / (logits - logits.mean()).norm()).item()
        yield row


def main():
    from bmlab.infer.engine import wrap
    torch.set_grad_enabled(False)
    rate = product_rate()
    print(f"{torch.cuda.get_device_name() if torch.cuda.is_available() else 'cpu'}: {rate / 1e12:.0f} TFLOP/s bf16")
    for kind in args.runs:
        bits = {"bf16": None, "int8": 8, "int4": 4}[kind]
        model = I.fill(I.pack(I.skeleton(SHAPE), bits), I.device())
        prompts = {n: I.prompt_of(model.config.vocab_size, 1, n) for n in LENGTHS}
        known = {n: peer(model, ids) for n, ids in prompts.items()} if bits is None else {}
        engine = wrap(model, None, None, bits=bits, max_ctx=max(LENGTHS) + 64, machine=I.machine())
        for row in rows(engine, prompts, known, rate):
            print(kind, *(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()), flush=True)
        print("masks unwritten:", engine.decoder.net.facts.unwritten, engine.decoder.why_eager or "")
        engine.close()
        engine = model = None
        if torch.cuda.is_available(): torch.cuda.empty_cache()


main()

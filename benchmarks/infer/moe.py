"""Mixtures of experts: tokens a second of Qwen3-30B-A3B's shape, resident and inside 12 and 8 GiB, and of
gpt-oss-120b's in MXFP4 inside 24 GiB with 80 GiB of host memory; predicted beside measured, and the share of the
memory's rate.

usage: python benchmarks/infer/moe.py [--parts NAME …] [--batches 1 8 64] [--cores] [--ahead] [--tiny]

--cores: the limited parts once more, with host cores that compute some of the missing experts (`wrap(…, cores=True)`).
--ahead: and with experts that are guessed and copied ahead; of random weights the guesses are as good as the branches
are small beside the residual.

Weights are random and made in the form in which they stay; routers of random weights choose their experts evenly. A
prompt of 128 random tokens, then 256 (limits: 64), greedy, CUDA graphs. GB/s: bytes of weights that a token reads ×
tokens/s, of one row. The peer, on the same weights in the same process: transformers with a static cache, compiled,
experts by `batched_mm`. Each part is tried alone: what fails is printed, and the next goes on.
"""
import argparse, gc, sys, time, traceback
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))
import inference as I

PARTS = ["int4", "int4 12GiB", "int4 8GiB", "bf16", "gpt-oss-120b 24GiB", "peer"]
SMALL = dict(num_hidden_layers=2, hidden_size=64, vocab_size=512, num_attention_heads=4, num_key_value_heads=2)
SMALL |= dict(head_dim=16)
p = argparse.ArgumentParser()
p.add_argument("--parts", nargs="+", default=PARTS)
p.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64])
p.add_argument("--cores", action="store_true")
p.add_argument("--ahead", action="store_true")
p.add_argument("--tiny", action="store_true")
args = p.parse_args()
CTX, PROMPT, NEW = (96, 16, 24) if args.tiny else (512, 128, 256)
begin = time.perf_counter()


def say(*words): print(f"[{time.perf_counter() - begin:.0f} s]", *words, flush=True)


def skeleton(name, bits):
    "A model on meta, packed to 4 bits, its experts in MXFP4, or in bfloat16"
    from bmlab.kernels.experts import cacheable, put_stack, stack_names
    from bmlab.kernels.ggml import GGMLStack
    from bmlab.models.zoo import build
    small = {}
    if args.tiny:
        more = dict(moe_intermediate_size=64, num_experts=8, num_experts_per_tok=2)
        if "oss" in name: more = dict(intermediate_size=64, num_local_experts=8, num_experts_per_tok=2)
        small = SMALL | more
    model = build(name, device="meta", dtype=torch.bfloat16, **small).eval()
    if bits == 4: return I.pack(model, 4)
    for m in cacheable(model).values() if bits == "MXFP4" else ():
        for stack in stack_names(m):
            E, K, N = m._parameters[stack].shape
            put_stack(m, stack, GGMLStack(E, K, N, "MXFP4", device="meta"))
    return model


@torch.no_grad()
def fill(model, device):
    "Random numbers for a skeleton, in the form that it has"
    pools = {}
    def random(shape, dtype):
        if dtype not in pools: pools[dtype] = I.tile(dtype, torch.device(device))
        pool, n = pools[dtype], torch.Size(shape).numel()
        out = torch.empty(n, dtype=dtype, device=device)
        for a in range(0, n, len(pool)): out[a:a + len(pool)].copy_(pool[:min(len(pool), n - a)])
        return out.view(shape)
    def value(path, m, key, t):
        last, K = path.rpartition(".")[2], getattr(m, "in_features", t.shape[-1] if t.ndim else 1)
        std = (0.25 if last in ("down_proj", "o_proj") or key == "down_proj" else 1.28) / K ** 0.5
        full = lambda v: torch.full(t.shape, v, dtype=t.dtype, device=device)
        if key == "scale": return full(std / 73.3 if t.dtype == torch.float32 else std / 4.61)
        if key == "zero": return full(std / 9.22)
        if "bias" in key or key == "sinks": return full(0.0)
        if t.ndim < 2: return full(1.0)
        new = random(t.shape, t.dtype)
        # blocks' scales, 2^-7: about 1.2 / √K; and a quarter of that where a branch ends
        if getattr(m, "kind", "") == "MXFP4": new[..., ::17] = 118 if last == "down_proj" else 120
        return new.mul_(1.0 if "embed" in last else std) if t.dtype.is_floating_point else new
    for path, m in list(model.named_modules()):
        for held in (m._parameters, m._buffers):
            for key, t in held.items():
                if t is None or not t.is_meta or "inv_freq" in key: continue
                new = value(path, m, key, t)
                held[key] = torch.nn.Parameter(new, requires_grad=False) if isinstance(t, torch.nn.Parameter) else new
    for parent in list(model.modules()):
        for child, m in parent._modules.items():
            if m is not None and "inv_freq" in m._buffers:
                parent._modules[child] = type(m)(config=model.config).to(device)
    return model


def switch(e, cores, ahead):
    "Let the cores compute or not from now on, in the engine and in its plan, and experts be fetched ahead or not"
    cache = e.expert_cache
    cache.enlist(cores)
    cache.foresee(ahead)
    e.plan = e.plan.with_cores(cores)
    if cores:
        call, first, more = (1e6 * s for s in cache._core_s)
        say(f"cores: planned {e.plan.cores / I.GB:.0f} GB/s, measured {1e-3 / first:.0f} and {call:.0f} µs a call")
        say(e.plan.sentence())


def measure(name, bits, limit=None, host=None, batches=(1,), new=None):
    from bmlab.infer.engine import wrap
    resident, new = limit is None, new or NEW
    asked = dict(max_batch=max(batches), max_ctx=CTX, machine=I.machine(None if resident or args.tiny else LINK))
    model = fill(skeleton(name, bits), I.device() if resident else "cpu")
    say(name, bits, "filled")
    if args.tiny and limit:
        from bmlab.infer.placement import plan_inference
        limit, host = plan_inference(model, **asked).min_bytes + (8 << 10), None
    e = wrap(model, None, limit, host_limit=host, device=I.device(), **asked)
    say(e.plan.sentence())
    n, cache = e.plan.token_bytes, e.expert_cache
    asked_for = lambda flag: (False, True) if flag and cache is not None else (False,)
    ways = [(ahead, cores, b) for ahead in asked_for(args.ahead) for cores in asked_for(args.cores) for b in batches]
    left = set()
    for ahead, cores, batch in ways:
        if (ahead, cores) in left: continue
        try:
            if (args.cores or args.ahead) and cache is not None and batch == batches[0]:
                # (what could not be switched to is no way at all)
                left.add((ahead, cores))
                switch(e, cores, ahead)
                left.clear()
            before = dict(cache.stats) if cache else {}
            row = I.decode(e, batch, PROMPT, new, rounds=2)
            row |= I.compared(e.plan, batch, PROMPT, new, row["tok_s"])
            rate = n * row["tok_s"] / batch / I.GB
            row |= {"gb_s": rate, "share": rate / RATES["copy_gb_s"]}
            if cache:
                took = {k: cache.stats[k] - before[k] for k in before}
                row |= {"hit_rate": took["hits"] / max(took["hits"] + took["misses"], 1), "even": e.plan.expert_hits()}
                row |= {"copied_gb": took["bytes"] / I.GB, "computed": took["computed"] / max(took["misses"], 1)}
                row |= {"pace": cache._pace} if cores else {}
                row |= {k: took[k] for k in ("guessed", "right") if ahead}
                by_trace = e.plan.with_routing(cache.routing[-200:])
                row["predicted by trace"] = by_trace.tokens_per_s(batch, 1.0, PROMPT + new / 2)
            if torch.cuda.is_available(): row["peak_gib"] = torch.cuda.max_memory_reserved() / I.GiB
            short = lambda v: round(v, 3) if isinstance(v, float) else v
            how = ", ".join(["cores"] * cores + ["ahead"] * ahead)
            say(name, bits, limit or "resident", how, {k: short(v) for k, v in row.items()})
        except Exception:
            say(name, bits, limit, "batch", batch)
            traceback.print_exc()
    if cache: say(f"a look at a router's choice, planned: {e.plan.decoding['look_s'] * 1e6:.0f} µs")
    if e.decoder is not None: say("graph:", e.decoder.graph, e.decoder.why_eager)
    if cache is None: e.close()
    else:
        # (the cache would give tens of gigabytes ordinary memory)
        e._end.detach()
        for h in reversed(e.held):
            if h is not cache: h.close()
    return model


def peer(model, new=64):
    "transformers, static cache and compile, on a model that bmlab has closed"
    try: model.set_experts_implementation("batched_mm")
    except Exception as error: say("batched_mm:", error)
    ids = torch.randint(5, 500, (1, PROMPT), device=I.device())
    how = dict(do_sample=False, cache_implementation="static", eos_token_id=None, pad_token_id=0)
    def seconds(n):
        I.sync()
        t = time.perf_counter()
        model.generate(ids, max_new_tokens=n, min_new_tokens=n, **how)
        I.sync()
        return time.perf_counter() - t
    for n in (4, new): seconds(n)
    short, long = seconds(4), seconds(new)
    say("transformers, static + compile, batched_mm:", round((new - 4) / (long - short), 1), "tokens/s")


torch.set_grad_enabled(False)
RATES = I.read_rates()
LINK = I.Link().rate()
say(torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu", RATES, f"link {LINK / I.GB:.1f} GB/s")
QWEN = "qwen3-30b-a3b"
LIMITS = "12GiB", "8GiB", "24GiB"
RUNS = {
    "int4": lambda: measure(QWEN, 4, batches=args.batches),
    "int4 12GiB": lambda: measure(QWEN, 4, LIMITS[0], new=64),
    "int4 8GiB": lambda: measure(QWEN, 4, LIMITS[1], new=64),
    "bf16": lambda: measure(QWEN, None, batches=args.batches),
    "gpt-oss-120b 24GiB": lambda: measure("gpt-oss-120b", "MXFP4", LIMITS[2], "80GiB", new=32),
}
last = None
for part in args.parts:
    try:
        if part == "peer": peer(last if last is not None else fill(skeleton(QWEN, None), I.device()))
        else:
            model = RUNS[part]()
            # the peer takes the weights in bfloat16
            last = model if part == "bf16" and "peer" in args.parts else None
            del model
    except Exception:
        say(part)
        traceback.print_exc()
    gc.collect()
    if torch.cuda.is_available(): torch.cuda.empty_cache()
say("done")

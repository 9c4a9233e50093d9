"""A 9.51B decoder that is wholly on the GPU: tokens a second at batch 1 and 8, and the share of the memory's rate that
this is.

usage: python benchmarks/infer/resident.py [--runs NAME …] [--batches 1 8] [--tiny]

bmlab: `wrap(model, bits=…)` without a limit, CUDA graphs, fused blocks, greedy. Peers, batch 1: transformers eager;
transformers with a static cache, which compiles itself; the same with torchao's int8 and int4 weight-only weights;
bitsandbytes int8, eager, where it is installed. A prompt of 32 random tokens, then 256 (peers: the difference of a
long and a short generate, both warm). Weights are random.

GB/s: bytes of weights that a token reads × tokens/s (of one row). Its share is of the rate at which this process's
bf16 matrix–vector product of 2 GiB read memory just before; a copy's rate, both ways counted, stands beside it.
Bound: that rate over a token's bytes. Predictions are written to benchmarks/plans before the model has weights.
"""
import sys, time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))
import inference as I

OURS = {"bmlab bf16": None, "bmlab int8": 8, "bmlab int4": 4}
PEERS = {
    "transformers bf16, eager": None, "transformers bf16, static + compile": None,
    "torchao int8wo, static + compile": 8, "torchao int4wo, static + compile": 4, "bitsandbytes int8, eager": 8
}
RUNS = [
    "bmlab bf16", "transformers bf16, static + compile", "bmlab int8", "torchao int8wo, static + compile", "bmlab int4",
    "torchao int4wo, static + compile", "transformers bf16, eager", "bitsandbytes int8, eager"
]
p = I.arguments(__doc__, RUNS)
p.add_argument("--batches", type=int, nargs="+", default=[1, 8])
args = p.parse_args()
SHAPE, CTX, PROMPT, NEW = ("tiny", 72, 16, 24) if args.tiny else ("decoder", 544, 32, 256)


def token_bytes(bits):
    "Bytes of weights that a token reads"
    from bmlab.infer.placement import plan_inference
    return plan_inference(I.skeleton(SHAPE), None, bits=bits, max_ctx=CTX, machine=I.machine()).token_bytes


def rated(row, bits, rates):
    "The rows of a run, with what its rate means"
    n = token_bytes(bits)
    gb_s = n * row["tok_s"] / row["batch"] / I.GB
    return (
        row | rates
        | {
            "token_gb": n / I.GB,
            "gb_s": gb_s,
            "share": gb_s / rates["read_gb_s"],
            "bound_tok_s": rates["read_gb_s"] * I.GB / n * row["batch"]
        }
    )


def ours(name):
    from bmlab.infer.engine import wrap
    from bmlab.infer.placement import plan_inference
    torch.set_grad_enabled(False)
    bits, rates, begin = OURS[name], I.read_rates(), time.perf_counter()
    model, asked = I.skeleton(SHAPE), dict(bits=bits, max_batch=max(args.batches), max_ctx=CTX, machine=I.machine())
    plan = plan_inference(model, None, **asked)
    I.keep(plan, name.replace("bmlab ", "infer_resident_"), args.tiny)
    I.fill(I.pack(model, bits), I.device())
    e = wrap(model, None, None, **asked)
    ready, rows = time.perf_counter() - begin, []
    for batch in args.batches:
        row = I.decode(e, batch, PROMPT, NEW)
        rows.append(
            rated(row, bits, rates) | I.compared(plan, batch, PROMPT, NEW, row["tok_s"])
            | {"predicted_gib": plan.peak_bytes / I.GiB, "ready_s": round(ready, 1)}
        )
    I.result(run=name, rows=rows)


def torchao_config(bits):
    from torchao.quantization import Int4WeightOnlyConfig, Int8WeightOnlyConfig
    if bits == 8: return [Int8WeightOnlyConfig()]
    return [
        Int4WeightOnlyConfig(group_size=128, int4_packing_format="tile_packed_to_4d"),
        Int4WeightOnlyConfig(group_size=128),
    ]  # the first is torch's own kernel, the second needs another package


def bitsandbytes(model):
    import bitsandbytes as bnb
    for parent in list(model.modules()):
        for child, m in list(parent._modules.items()):
            if type(m) is torch.nn.Linear:
                new = bnb.nn.Linear8bitLt(m.in_features, m.out_features, bias=False, has_fp16_weights=False)
                new.weight = bnb.nn.Int8Params(m.weight.data.cpu(), requires_grad=False, has_fp16_weights=False)
                parent._modules[child] = new.to(I.device())


def theirs(name):
    torch.set_grad_enabled(False)
    rates, bits = I.read_rates(), PEERS[name]
    if "torchao" in name: configs = torchao_config(bits)
    model, note = I.fill(I.skeleton(SHAPE), I.device()), ""
    if "torchao" in name:
        from torchao.quantization import quantize_
        for i, c in enumerate(configs):
            try:
                quantize_(model, c)
                note = str(c)[:80]
                break
            except Exception:
                if i + 1 == len(configs): raise
    if "bitsandbytes" in name: bitsandbytes(model)
    if torch.cuda.is_available(): torch.cuda.empty_cache()
    ids = torch.tensor(I.prompt_of(model.config.vocab_size, 1, PROMPT), device=I.device())
    static = "static" in name
    def go(n):
        I.sync()
        begin = time.perf_counter()
        model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, min_new_tokens=n, max_new_tokens=n,
            pad_token_id=0, **({"cache_implementation": "static"} if static else {})
        )
        I.sync()
        return time.perf_counter() - begin
    new = NEW if static or args.tiny else NEW // 4
    few, begin = max(new // 4, 2), time.perf_counter()
    # a static cache is as long as the longest text so far: the long one first, or it would be compiled for two lengths
    go(new)
    warm = time.perf_counter() - begin
    go(few)
    long, short = sorted(go(new) for _ in range(3))[1], sorted(go(few) for _ in range(3))[1]
    I.result(
        run=name,
        rows=[rated(
            {
                "tok_s": (new - few) / (long - short), "batch": 1, "prompt": PROMPT, "new": new, "first_token_s": None,
                "ready_s": round(warm, 1), "note": note
            },
            bits, rates
        )]
    )


def main():
    rows = []
    for name, got in I.children(__file__, args, "--batches", *args.batches):
        common = {"run": name, "driver_gib": got.get("driver_gib"), "run_s": got["run_s"], "error": got.get("error")}
        rows += [common | r for r in got.get("rows", [])] or [common]
        print(rows[-len(got.get("rows", [1])):], flush=True)
    peers = [r["tok_s"] for r in rows if r["run"].startswith("transformers") and "tok_s" in r]
    for r in rows:
        if peers and r.get("batch") == 1: r["times bf16 peer"] = r["tok_s"] / max(peers)
    I.report(
        f"infer resident: {'tiny' if args.tiny else '9.51B'} decoder, wholly on the device", rows,
        {
            "": "run",
            "batch": "batch",
            "tok/s": "tok_s",
            "predicted": "predicted_tok_s",
            "predicted / measured": "predicted/measured",
            "× transformers' best": "times bf16 peer",
            "bound, tok/s": "bound_tok_s",
            "GB/s read": "gb_s",
            "share of what is measured": lambda r: f"{r['share']:.0%} of {r['read_gb_s']:.0f}",
            "copy GB/s": "copy_gb_s",
            "first token, s": "first_token_s",
            "peak GiB, driver": "driver_gib",
            "predicted GiB": "predicted_gib",
            "notes": lambda r: "" if r.get("graph", "graph") == "graph" else r["graph"]
        }
    )


if __name__ == "__main__": I.start(args, ours, theirs, OURS, main)

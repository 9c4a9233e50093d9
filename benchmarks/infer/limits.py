"""Models inside a memory limit: bmlab's streamed decoding beside accelerate's device_map.

usage: python benchmarks/infer/limits.py [--runs NAME …] [--tiny]

A 9.51B decoder (48 × 4096, untied) in 6 GiB, context 544 (a prompt of 512, 32 new tokens), batch 1, as int8, bf16 and
int4; a LLaMA of 70B's shape as int4 in 24 GiB; CPM-2's shape (11B encoder–decoder) as int8 in 6 GiB with the link
held at 12 GB/s and at most 16 GiB of host memory. Peers: accelerate's device_map with 5 GiB for weights, in bf16;
with int8 weights, once as torchao's tensors, once as plain int8 linear layers (dequantize and multiply, which is what
torchao computes) in buffers that accelerate offloads; bitsandbytes keeps what it offloads in float32, so it has no
int8 row here.

Weights are random. The plan is written to benchmarks/plans before the model has any. Columns: predicted over measured
tokens/s; GB/s over the link while decoding, and the share of what the same process measured for one copy of
page-locked memory (the best of before and after; of 12 GB/s where the link is held there); the driver's own count of
the process's memory, CUDA context included, the most at any time, beside limit and plan; the process's peak of host
memory. Bound: streamed bytes over the link's rate.
"""
import sys, time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))
import inference as I

#         name                        shape      bits  limit    max_ctx  prompt new  link GB/s  host limit
OURS = {
    "bmlab int8, 6 GiB": ("decoder", 8, "6GiB", 544, 512, 32, None, None),
    "bmlab bf16, 6 GiB": ("decoder", None, "6GiB", 544, 512, 32, None, None),
    "bmlab int4, 6 GiB": ("decoder", 4, "6GiB", 544, 512, 32, None, None),
    "bmlab CPM-2 int8, 6 GiB": ("cpm2", 8, "6GiB", 544, 512, 32, 12e9, "16GiB"),
    "bmlab 70B int4, 24 GiB": ("llama70", 4, "24GiB", 2048, 512, 12, None, None)
}
# new tokens behind a prompt of 512
PEERS = {"accelerate bf16, 5 GiB": 8, "accelerate int8 linears, 5 GiB": 12, "accelerate torchao int8, 5 GiB": 8}
RUNS = [
    "bmlab int8, 6 GiB", "accelerate int8 linears, 5 GiB", "accelerate torchao int8, 5 GiB", "bmlab bf16, 6 GiB",
    "accelerate bf16, 5 GiB", "bmlab int4, 6 GiB", "bmlab CPM-2 int8, 6 GiB", "bmlab 70B int4, 24 GiB"
]
args = I.arguments(__doc__, RUNS).parse_args()


def ours(name):
    from bmlab.core import parse_bytes
    from bmlab.infer.engine import wrap
    from bmlab.infer.placement import plan_inference
    torch.set_grad_enabled(False)
    shape, bits, limit, ctx, prompt, new, slow, host = OURS[name]
    if args.tiny: shape, ctx, prompt, new, host = "tiny_t5" if shape in I.T5 else "tiny", 72, 48, 24, "1GiB"
    begin, clock = time.perf_counter(), {}
    def lap(what): clock[what] = round(time.perf_counter() - begin, 1)
    source = I.Link()
    before = source.rate()
    lap("start")
    model = I.skeleton(shape)
    asked = dict(bits=bits, max_batch=1, max_ctx=ctx, host_limit=host, machine=I.machine(slow))
    if args.tiny:
        limit = (lambda p: (p.min_bytes + p.peak_bytes) // 2)(
            plan_inference(model, None, **asked | dict(host_limit=None))
        )
    plan = plan_inference(model, limit, **asked)
    I.keep(plan, name.replace("bmlab ", "infer_").replace(", ", "_").replace(" ", "-"), args.tiny)
    lap("planned")
    I.fill(I.pack(model, bits))
    lap("filled")
    e = wrap(model, None, limit, **asked, link=link(slow))
    lap("wrapped")
    if e.plan.peak_bytes != plan.peak_bytes or e.plan.streamed != plan.streamed:
        raise RuntimeError(f"wrap planned anew: {e.plan.sentence()}; before: {plan.sentence()}")
    row = I.decode(e, 1, prompt, new)
    lap("decoded")
    gpu, moved = torch.cuda.is_available(), e.streamer.pass_bytes if e.streamer else 0
    after = source.rate(e.streamer.slots[0]) if e.streamer else 0
    most = slow or max(before, after)
    I.result(
        run=name, **row, **I.compared(plan, 1, prompt if not plan.encoder else 1, new, row["tok_s"]),
        plan=plan.sentence(), clock=clock, predicted_first_s=plan.first_token(prompt), streamed_gb=moved / I.GB,
        streamed_blocks=len(plan.streamed), blocks=len(plan.blocks), link_gb_s=moved * row["tok_s"] / I.GB,
        link_share=moved * row["tok_s"] / most if moved else None, link_before=before / I.GB, link_after=after / I.GB,
        bound_tok_s=most / moved if moved else None, limit_gib=parse_bytes(limit) / I.GiB,
        predicted_gib=plan.peak_bytes / I.GiB, reserved_gib=torch.cuda.max_memory_reserved() / I.GiB if gpu else None,
        host_gib=I.host_peak_gib(), predicted_host_gib=plan.host_bytes / I.GiB
    )


def link(slow):
    "What is between host and device: None, or a slower one"
    from bmlab.infer.links import GpuLink, SimulatedLink
    if slow is None: return None
    return GpuLink("cuda", bytes_per_s=slow) if torch.cuda.is_available() else SimulatedLink(bytes_per_s=slow)


class Int8(torch.nn.Module):
    "A linear layer with int8 weights, as torchao's int8 weight-only computes it"
    def __init__(self, codes, scale):
        super().__init__()
        self.register_buffer("codes", codes)
        self.register_buffer("scale", scale)
    def forward(self, x): return torch.nn.functional.linear(x, self.codes.to(x.dtype)) * self.scale


def theirs(name):
    from accelerate import cpu_offload, dispatch_model, infer_auto_device_map
    torch.set_grad_enabled(False)
    model, gpu = I.skeleton("tiny" if args.tiny else "decoder"), torch.cuda.is_available()
    if "int8 linears" in name:
        # codes that bmlab's layers hold, taken over by the peer's
        I.fill(I.pack(model, 8))
        for parent in model.modules():
            for child, m in list(parent._modules.items()):
                if type(m).__name__ == "Int8Linear": parent._modules[child] = Int8(m.codes, m.scale.bfloat16())
    else: I.fill(model)
    if "torchao" in name:
        from torchao.quantization import Int8WeightOnlyConfig, quantize_
        quantize_(model, Int8WeightOnlyConfig())
    model.tie_weights = lambda *a, **k: None
    if gpu:
        places = infer_auto_device_map(
            model, max_memory={0: "5GiB", "cpu": "110GiB"}, no_split_module_classes=["LlamaDecoderLayer"], dtype=None
        )
        model = dispatch_model(model, places, offload_buffers=True)
    else: model, places = cpu_offload(model, torch.device("cpu"), offload_buffers=True), {}
    row = generate(model, 48 if args.tiny else 512, 6 if args.tiny else PEERS[name])
    I.result(
        run=name, **row, blocks=len(model.model.layers),
        streamed_blocks=sum(v != 0 for n, v in places.items() if ".layers." in n), limit_gib=None,
        host_gib=I.host_peak_gib(), reserved_gib=torch.cuda.max_memory_reserved() / I.GiB if gpu else None
    )


def generate(model, prompt, new):
    "Tokens/s between the first and the last token of transformers' own greedy generate"
    from transformers.generation.streamers import BaseStreamer
    class Times(BaseStreamer):
        at, said = None, False
        def put(self, value):
            self.at = (self.at or []) + ([time.perf_counter()] if self.said else [])
            self.said = True
        def end(self): pass
    ids = torch.tensor(I.prompt_of(model.config.vocab_size, 1, prompt), device=I.device())
    for n in (2, new):
        times, begin = Times(), time.perf_counter()
        model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, min_new_tokens=n, max_new_tokens=n,
            pad_token_id=0, streamer=times
        )
    return {
        "tok_s": (len(times.at) - 1) / (times.at[-1] - times.at[0]),
        "first_token_s": times.at[0] - begin,
        "prompt": prompt,
        "new": new,
        "batch": 1,
    }


def main():
    rows = []
    for name, got in I.children(__file__, args):
        rows.append({"run": name} | got)
        print(rows[-1], flush=True)
    speed = {r["run"]: r["tok_s"] for r in rows if "tok_s" in r}
    versus = {
        "bmlab int8, 6 GiB": ("accelerate int8 linears, 5 GiB", "accelerate torchao int8, 5 GiB"),
        "bmlab bf16, 6 GiB": ("accelerate bf16, 5 GiB",),
        "bmlab int4, 6 GiB": ("accelerate bf16, 5 GiB",),
    }
    for r in rows:
        peers = [speed[p] for p in versus.get(r["run"], ()) if p in speed]
        if peers and "tok_s" in r: r["times peer"] = r["tok_s"] / max(peers)
    I.report(
        f"infer limits: {'tiny shapes' if args.tiny else 'models larger than their memory'}", rows,
        {
            "": "run",
            "streams": lambda r: f"{r['streamed_blocks']} of {r['blocks']}",
            "tok/s": "tok_s",
            "predicted": "predicted_tok_s",
            "predicted / measured": "predicted/measured",
            "× its peer": "times peer",
            "bound, tok/s": "bound_tok_s",
            "GB/s on the link": "link_gb_s",
            "share of the measured": lambda r: f"{r['link_share']:.1%}",
            "first token, s": "first_token_s",
            "predicted, s": "predicted_first_s",
            "peak GiB, driver": "driver_gib",
            "predicted GiB": "predicted_gib",
            "limit": "limit_gib",
            "inside": lambda r: "yes" if r["driver_gib"] <= r["limit_gib"] else "**no**",
            "host GiB": "host_gib",
            "notes": lambda r: "" if r.get("graph", "graph") == "graph" else r["graph"]
        },
        "plans: " + " · ".join(f"{r['run']}: {r['plan']}" for r in rows if "plan" in r)
    )


if __name__ == "__main__": I.start(args, ours, theirs, OURS, main)

"""Predicted beside measured on ten shapes that no constant of a plan was fitted to.

usage: python benchmarks/plan/predictions.py [--rows TEXT …] [--tiny] [--budget SECONDS] [--picture FILE]

The machine is measured first (`machine=None` does it), which prints its record; each row has a process of its own.
Decoding: a prompt of 2048 tokens and
one of 128, then some new ones, through `wrap` and the loop that `generate` uses, of random weights; whole on the GPU
or inside a limit. Training: `plan_training`, then steps. Predictions are made while the model is on meta. Errors are
predicted / measured - 1: tokens/s, first token, step time, peak of memory.

Under each row stand the parts: what the plan says for products, attention, what is between, what is outside the
blocks, and what a profiler finds, with the kernels of one step in order. Peers predict memory only: accelerate's
`calculate_maximum_sizes` (weights) and `estimate_training_usage`, and DeepSpeed's
`estimate_zero2_model_states_mem_needs` and `estimate_zero3_…` (formulas of its documentation, "Memory Requirements",
with one GPU).
--rows chooses rows whose name holds one of the texts. Rows that have not begun when --budget is spent are left out.
"""
import argparse, contextlib, json, os, statistics, subprocess, sys, threading, time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))
import inference as I

p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
p.add_argument("--rows", nargs="+", default=[""], metavar="TEXT")
p.add_argument("--tiny", action="store_true", help="sizes for a CPU")
p.add_argument("--budget", type=float, default=280, help="seconds")
p.add_argument("--picture", help="a PNG file for the histogram")
p.add_argument("--refresh", action="store_true", help="measure the machine although there is a record")
p.add_argument("--part", help=argparse.SUPPRESS)         # of this program, in a process of its own
args = p.parse_args()
GPU, GiB = torch.cuda.is_available(), 2**30
DEVICE = torch.device("cuda", 0) if GPU else torch.device("cpu")
BEGAN = time.perf_counter()


def left(): return args.budget - (time.perf_counter() - BEGAN)


# ---- shapes: class, and what its configuration says ----
def shape(cls, D, layers, H, Hk, F, vocab, tied=False, **more):
    keys = dict(hidden_size=D, num_hidden_layers=layers, num_attention_heads=H, num_key_value_heads=Hk)
    keys |= dict(intermediate_size=F, vocab_size=vocab, tie_word_embeddings=tied, max_position_embeddings=8192)
    return cls, keys | more


SHAPES = {
    "llama3.2-1b": shape("Llama", 2048, 16, 32, 8, 8192, 128256, True, head_dim=64),
    "llama3.2-3b": shape("Llama", 3072, 28, 24, 8, 8192, 128256, True, head_dim=128),
    "qwen3-4b": shape("Qwen3", 2560, 36, 32, 8, 9728, 151936, True, head_dim=128),
    "qwen3-8b": shape("Qwen3", 4096, 36, 32, 8, 12288, 151936, head_dim=128),
    "qwen3-14b": shape("Qwen3", 5120, 40, 40, 8, 17408, 151936, head_dim=128),
    "phi-4": shape("Phi3", 5120, 40, 40, 10, 17920, 100352, pad_token_id=0),
    "gemma3-4b": shape("Gemma3", 2560, 34, 8, 4, 10240, 262208, True, head_dim=256, sliding_window=1024),
    "minicpm-1b": shape("Llama", 1536, 52, 24, 8, 3840, 73440, True),
    "mistral-7b": shape("Mistral", 4096, 32, 32, 8, 14336, 32768, sliding_window=None, head_dim=128),
    "llama70b-8-blocks": shape("Llama", 8192, 8, 64, 8, 28672, 128256),
}
#         shape, bits, limit
DECODE = [
    ("llama3.2-1b", None, None), ("mistral-7b", 4, None), ("qwen3-4b", 8, None), ("phi-4", 4, None),
    ("gemma3-4b", None, None), ("qwen3-14b", None, None), ("minicpm-1b", 4, None), ("llama70b-8-blocks", 8, None),
    ("qwen3-8b", 8, "6GiB"), ("llama3.2-3b", 8, None), ("qwen3-8b", 4, None), ("mistral-7b", None, "9GiB"),
    ("llama3.2-1b", 4, None), ("gemma3-4b", 8, None), ("llama70b-8-blocks", 4, None), ("minicpm-1b", None, None),
]
#        shape, batch, length, LoRA?, share of the optimizer on the host, memory limit
TRAIN = [
    ("llama3.2-1b", 8, 1024, False, None, None), ("qwen3-4b", 4, 1024, True, None, None),
    ("minicpm-1b", 8, 1024, False, 0.5, None), ("llama3.2-3b", 8, 1024, True, None, "30GiB"),
]


def skeleton(name, dtype=torch.bfloat16):
    "The model of a shape on meta; --tiny: two small layers of the same class"
    import transformers as tf
    cls, said = SHAPES[name]
    if args.tiny:
        said = said | dict(
            hidden_size=128, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, intermediate_size=256,
            vocab_size=512, max_position_embeddings=512)
        if "head_dim" in said: said["head_dim"] = 32
    config = getattr(tf, "Gemma3TextConfig" if cls == "Gemma3" else f"{cls}Config")(**said)
    with torch.device("meta"): return getattr(tf, f"{cls}ForCausalLM")._from_config(config, dtype=dtype).eval()


def fill(model, device):
    "As `inference.fill`; rotary angles of any class are computed anew, and what learns still learns"
    learns = {n for n, q in model.named_parameters() if q.requires_grad}
    for parent in model.modules():
        for child, m in parent._modules.items():
            if m is not None and any("inv_freq" in n for n in m._buffers):
                parent._modules[child] = type(m)(config=model.config).to(device)
    I.fill(model, device)
    for n, q in model.named_parameters(): q.requires_grad_(n in learns)
    return model


def pack(model, bits):
    "As `inference.pack`, also where the head is the embedding's table, which stays in int8"
    from bmlab.kernels.codes import group_for
    from bmlab.kernels.layers import pack_linears
    tied = model.config.tie_word_embeddings
    def rounding(name, w):
        (N, K), make = w.shape, lambda *shape, dtype: torch.empty(*shape, dtype=dtype, device="meta")
        table = tied and name.rpartition(".")[2] in ("lm_head", "embed_tokens")
        g = group_for(K, 128) if bits == 4 and not table else None
        if g is None: return make(N, K, dtype=torch.int8), make(N, dtype=torch.float32)
        scale = lambda: make(N, K // g, dtype=torch.float16)
        return make(N, K // 2, dtype=torch.uint8), scale(), scale()
    return pack_linears(model, bits=bits, rounding=rounding) if bits else model


def used(): return (lambda free, total: total - free)(*torch.cuda.mem_get_info()) if GPU else 0


class Watched:
    "The most memory of the GPU that the driver counted meanwhile"
    def __enter__(self):
        self.used = used()
        self.on, self.looks, self.thread = True, True, threading.Thread(target=self._watch, daemon=True)
        self.thread.start()
        return self
    @contextlib.contextmanager
    def away(self):
        "Inside, it does not look: asking the driver a hundred times a second makes a host launch more slowly"
        self.looks = False
        time.sleep(0.02)
        try: yield
        finally: self.looks = True
    def _watch(self):
        while self.on:
            if self.looks: self.used = max(self.used, used())
            time.sleep(0.01)
    def __exit__(self, *_):
        self.on = False
        self.thread.join()
        self.used = max(self.used, used())


# ---- what a profiler finds ----
def kind_of(name):
    low = name.lower()
    attention = "_attention_kernel", "_combine", "one_token", "flash", "fmha", "softmax"
    if any(w in low for w in attention): return "attention"
    products = "one_row", "few_rows", "int8_", "int4_", "gemm", "gemv", "nvjet", "cutlass", "splitk", "dot_kern", "xmma"
    if any(w in low for w in products): return "products"
    if "memcpy" in low or "memset" in low: return "copies"
    return "small"


def profiled(call, steps):
    "(seconds of a step by kind, the kernels in order with µs) of `call`, which makes so many steps"
    if not GPU: return {}, []
    from torch.profiler import ProfilerActivity, profile
    with profile(activities=[ProfilerActivity.CUDA]) as got:
        call()
        torch.cuda.synchronize()
    events = [e for e in got.events() if e.device_type == torch.autograd.DeviceType.CUDA and e.device_time > 0]
    events.sort(key=lambda e: e.time_range.start)
    parts, counts = {}, {}
    for e in events:
        k = kind_of(e.name)
        parts[k] = parts.get(k, 0.0) + e.device_time / 1e6 / steps
        counts[k] = counts.get(k, 0) + 1 / steps
    return {k: (v, counts[k]) for k, v in parts.items()}, [(e.name, e.device_time, e.time_range.start) for e in events]


def said_parts(plan, batch, ctx):
    "What the plan counts for a step: products, attention, between, outside, in seconds"
    from bmlab.infer.placement import _attend_s
    from bmlab.plan.machine import Machine
    from bmlab.plan.roofline import Decoding, product_seconds
    m, d, phase = Machine(**plan.machine), Decoding(**plan.decoding), plan.phases["step"]
    small_s = m.kernel_s if d.kernel_s is None else d.kernel_s
    fixed = {b: product_seconds(d, b, batch, 0, m.hbm, n, small_s)[1] for b, n in phase["products"].items()}
    read = {b: product_seconds(d, b, batch, n, m.hbm)[0] for b, n in phase["read"].items()}
    lane = plan.step(batch, ctx=ctx)[0]
    packed = 2 * sum(n for b, n in phase["read"].items() if b in ("8", "4")) > sum(phase["read"].values())
    cache_s = lane["memory"] - sum(read.values())
    attend_s = _attend_s(phase, packed, d)
    attend = (phase["blocks"] - phase["loose"]) * (small_s if attend_s is None else attend_s)
    return {
        "products": sum(fixed.values()) + sum(read.values()), "attention": cache_s + attend,
        "small": lane["launch"] - sum(fixed.values()) - attend - d.token_s, "outside": d.token_s,
        "link": lane["link"], "all": 1 / (plan.tokens_per_s(batch, ctx=ctx) / batch)}


def show_parts(said, found, wall):
    ms = lambda s: f"{1e3 * s:.3f}"
    print("    said, ms:  " + "  ".join(f"{k} {ms(v)}" for k, v in said.items()))
    if found:
        busy = sum(v for v, _ in found.values())
        parts = "  ".join(f"{k} {ms(v)} in {n:.0f}" for k, (v, n) in found.items())
        print(f"    found, ms: {parts}  busy {ms(busy)}  wall {ms(wall)}")


def in_order(events, steps):
    "Kernels of the last whole step in order, short, with µs and the gap before each"
    n = len(events) // steps
    last, out, before = events[-n:], [], None
    for name, us, start in last:
        gap = 0.0 if before is None else start - before
        before = start + us
        short = name.replace("void ", "").replace("at::native::", "")[:26]
        out.append(f"{short} {us:.1f}(+{gap:.1f})")
    return out


# ---- decoding ----
ERRORS = []                      # (row, what, predicted, measured)


def note(row, what, said, found):
    ERRORS.append((row, what, float(said), float(found)))
    print(f"    {what}: predicted {said:.4g}, measured {found:.4g}, off {100 * (said / found - 1):+.1f} %", flush=True)
    print("NOTED " + json.dumps(ERRORS[-1]), flush=True)


def decode_row(name, bits, limit):
    from bmlab.infer.engine import wrap
    from bmlab.infer.placement import plan_inference
    from bmlab.infer.text import decode_tokens
    row = f"{name} {f'int{bits}' if bits else 'bf16'}{f' in {limit}' if limit else ''}"
    long, short, new = (64, 16, 12) if args.tiny else (2048, 128, 24 if limit else 64)
    asked = dict(bits=bits, max_batch=1, max_ctx=long + new + 8)
    model = skeleton(name)
    if args.tiny and limit:
        p = plan_inference(model, None, **asked)
        limit = (p.min_bytes + p.peak_bytes) // 2
    plan = plan_inference(model, limit, **asked)
    print(f"\n== {row}\n    {plan.sentence()}", flush=True)
    fill(pack(model, bits), "cpu" if limit else DEVICE)
    if GPU: torch.cuda.empty_cache()
    with Watched() as watched:
        e = wrap(model, None, limit, **asked)
        if e.decoder.mode != "static": raise RuntimeError(f"no static cache: {e.decoder.why_generate}")
        for prompt in (long, short):
            ids = I.prompt_of(e.decoder.vocab, 1, prompt)
            def once():
                stats = {}
                for _ in decode_tokens(e.decoder, ids, None, new, stats=stats): pass
                return stats
            for _ in range(2): once()                                # (the second captures the prompt)
            with watched.away(): best = [once() for _ in range(2 if limit else 3)]
            tok_s = max(s["decode_tok_s"] for s in best)
            said = plan.predicted(dict(prompt_tokens=prompt, new_tokens=new))
            note(row, f"tok/s at {prompt}", said["decode_tok_s"], tok_s)
            note(row, f"first token of {prompt}, s", said["first_token_s"], min(s["first_token_s"] for s in best))
            if prompt == short: wall = 1 / tok_s
    fused = getattr(e, "fused", None)
    print(f"    graph: {'yes' if e.decoder.graph else e.decoder.why_eager}; {fused.counts.to_dict() if fused else ''}")
    peak = plan.predicted(dict(prompt_tokens=long, new_tokens=new))["peak_bytes"]
    # (all that the driver counts on a GPU of one's own, as a memory_limit does)
    found = watched.used / GiB
    if GPU: note(row, "peak, GiB", peak / GiB, found)
    others = {"accelerate, weights": accelerate_bytes(name, bits)}
    PEERS.append((row, others, found, plan.peak_bytes / GiB))
    ids = I.prompt_of(e.decoder.vocab, 1, short)
    steps = 6
    def steps_alone():
        # (the prompt's kernels come first, and are left out below)
        for _ in decode_tokens(e.decoder, ids, None, steps + 1): pass
    found, events = profiled(steps_alone, 1)
    if events:
        # a step repeats: the last ones, of equal length
        marks = [i for i, (n, _, _) in enumerate(events) if "_greatest_of" in n or "argmax" in n.lower()]
        per = statistics.mode([b - a for a, b in zip(marks[-4:-1], marks[-3:])]) if len(marks) > 4 else 0
        if per > 10:
            tail = events[marks[-1] + 1 - 3 * per:marks[-1] + 1]
            parts = {}
            for n, us, _ in tail:
                s, c = parts.get(kind_of(n), (0.0, 0))
                parts[kind_of(n)] = s + us / 3e6, c + 1 / 3
            show_parts(said_parts(plan, 1, short + new / 2), parts, wall)
            order = in_order(tail, 3)
            print(f"    one step, {per} kernels: " + "; ".join(order[:42]) + " … " + "; ".join(order[-14:]))
        else:
            show_parts(said_parts(plan, 1, short + new / 2), {}, wall)
    ids = I.prompt_of(e.decoder.vocab, 1, long)
    found, events = profiled(lambda: e.decoder.prefill(ids), 1)
    if events:
        busy, span = sum(us for _, us, _ in events) / 1e6, (events[-1][2] + events[-1][1] - events[0][2]) / 1e6
        lane = plan._lanes("prompt", min(long, getattr(plan, "chunk", 512)), True)[0]
        print(f"    said of a pass of a prompt, ms: {({k: round(1e3 * v, 2) for k, v in lane.items()})}")
        parts = "  ".join(f"{k} {1e3 * v:.2f} in {n:.0f}" for k, (v, n) in found.items())
        print(f"    prompt of {long}, ms: busy {1e3 * busy:.1f} of {1e3 * span:.1f}  {parts}", flush=True)
        by = {}
        for n, us, _ in events:
            c = by.setdefault(n[:60], [0, 0.0])
            c[0] += 1
            c[1] += us / 1e3
        top = sorted(by.items(), key=lambda x: -x[1][1])[:6]
        print("      " + "; ".join(f"{n} ×{c} {t:.2f} ms" for n, (c, t) in top), flush=True)
    e.close()


# ---- training ----
def train_row(name, batch, length, lora, offload, limit):
    from bmlab.all import Lora, lm_loss, plan_training, shard
    from bmlab.train.offload import AdamW
    what = "LoRA" if lora else f"in full{f', {offload:.0%} on the host' if offload else ''}"
    row = f"{name} {what} {batch}×{length}{f' in {limit}' if limit else ''}"
    if args.tiny: batch, length, limit = 2, 32, None
    print(f"\n== {row}", flush=True)
    model = skeleton(name).train()
    if hasattr(model.config, "use_cache"): model.config.use_cache = False
    elements = sum(q.numel() for q in model.parameters())
    if lora: delta = Lora(model, r=16).freeze()
    ids = torch.zeros(batch, length, dtype=torch.long)
    how = dict(offload=offload, compile=False, inputs={"input_ids": ids, "labels": ids}, loss="chunked")
    if lora: how |= dict(master=None, offload=None)
    plan = plan_training(model, batch, length, memory_limit=limit, machine=None if GPU else "h200", **how)
    print("    " + str(plan).splitlines()[-1])
    fill(model, DEVICE)
    if lora:
        for n, q in model.named_parameters():
            if q.requires_grad: torch.nn.init.normal_(q, 0, 0.01)
    shard(model, checkpoint=plan.recompute, compile=False)
    if lora: opt = torch.optim.AdamW(delta.trainable(), lr=1e-4, fused=True)
    else: opt = AdamW(model, lr=1e-5, offload=plan.offload)
    draw = torch.Generator(DEVICE).manual_seed(0)
    if GPU:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    def step():
        ids = torch.randint(0, model.config.vocab_size, (batch, length), device=DEVICE, generator=draw)
        lm_loss(model, {"input_ids": ids, "labels": ids}).backward()
        opt.step()
        opt.zero_grad()
    def finish():
        if hasattr(opt, "flush"): opt.flush()
        I.sync()
    for _ in range(2): step()
    finish()
    n = 2 if args.tiny else 4
    begin = time.perf_counter()
    for _ in range(n): step()
    finish()
    note(row, "step, s", plan.step_s, (time.perf_counter() - begin) / n)
    if GPU:
        peak = torch.cuda.max_memory_allocated() / GiB
        note(row, "peak, GiB", plan.peak_bytes / GiB, peak)
        PEERS.append((row, training_peers(model, elements, name, lora, offload), peak, plan.peak_bytes / GiB))
        found, events = profiled(step, 1)
        busy = sum(us for _, us, _ in events) / 1e6
        print("    phases said, ms: " + "  ".join(f"{k} {1e3 * v:.1f}" for k, v in plan.phases.items()))
        print("    lanes said, ms:  " + "  ".join(f"{k} {1e3 * v:.1f}" for k, v in plan.times.items() if v))
        parts = "  ".join(f"{k} {1e3 * v:.1f} in {n:.0f}" for k, (v, n) in found.items())
        print(f"    found, ms: busy {1e3 * busy:.1f}  {parts}")


# ---- peers, which foretell memory alone ----
PEERS = []                       # (row, {peer: GiB}, measured GiB, ours)


def accelerate_bytes(name, bits):
    "What accelerate says of a model's weights: `calculate_maximum_sizes`, in the dtype of its estimator"
    from accelerate.utils import calculate_maximum_sizes
    return calculate_maximum_sizes(skeleton(name))[0] / 2 * (bits or 16) / 8 / GiB


def training_peers(model, elements, name, lora, offload):
    "GiB: accelerate's estimate with Adam, DeepSpeed's of the states (its documentation: Memory Requirements)"
    from accelerate.commands.estimate import estimate_training_usage
    out, largest = {}, max(q.numel() for q in skeleton(name).parameters())
    out["accelerate, Adam"] = sum(
        v for k, v in estimate_training_usage(4 * elements, "bfloat16").items() if k != "step") / GiB
    out["DeepSpeed ZeRO-2"] = (2 * elements if offload else 4 * elements + 16 * elements) / GiB
    out["DeepSpeed ZeRO-3"] = (4 * largest + (0 if offload else 18 * elements)) / GiB
    return out


# ---- all of them ----
BARS = {"tok/s": 10, "first token": 15, "step": 15, "peak": 5}


def report():
    print(f"\n## plan predictions: {torch.cuda.get_device_name() if GPU else 'CPU'}, torch {torch.__version__}")
    print("| row | what | predicted | measured | off, % |\n|---|---|---|---|---|")
    for row, what, said, found in ERRORS:
        print(f"| {row} | {what} | {said:.4g} | {found:.4g} | {100 * (said / found - 1):+.1f} |")
    for kind, bar in BARS.items():
        off = [100 * (s / f - 1) for _, what, s, f in ERRORS if what.startswith(kind)]
        if not off: continue
        inside = sum(abs(x) <= bar for x in off)
        print(f"\n{kind}: {inside} of {len(off)} within {bar} %, median |off| {statistics.median(map(abs, off)):.1f} %")
        for low in range(-50, 50, 5):
            n = sum(low <= x < low + 5 or low == -50 and x < low or low == 45 and x >= 50 for x in off)
            if n: print(f"  {low:+4d} … {low + 5:+4d} %  {'█' * n} {n}")
    print("\npeak of memory, GiB, beside what others foretell:")
    for row, said, found, mine in PEERS:
        others = "; ".join(f"{k} {v:.2f} ({100 * (v / found - 1):+.0f} %)" for k, v in said.items()) if found else said
        print(f"  {row}: measured {found:.2f}; {others}")
    if out := os.environ.get("OUT"):
        (Path(out) / "plan_predictions.json").write_text(json.dumps(ERRORS), encoding="utf-8")
    path = args.picture or (Path(out) / "plan_predictions.png" if out else None)
    if path: picture(path)


def picture(path):
    from bmlab.core import figure
    with figure(8, 2.4, columns=len(BARS), show=False) as axes:
        for ax, (kind, bar) in zip(axes, BARS.items()):
            off = [max(-60, min(60, 100 * (s / f - 1))) for _, what, s, f in ERRORS if what.startswith(kind)]
            ax.hist(off, bins=range(-60, 65, 5))
            ax.axvspan(-bar, bar, alpha=0.15, color="#3b8132")
            ax.set(title=kind, xlabel="predicted / measured − 1, %", ylabel="rows")
        axes[0].figure.savefig(path, dpi=110)


def measured():
    "The machine's record, which every row reads"
    from bmlab.plan.machine import machine, measure, record_path
    from bmlab.plan.roofline import points_table
    begin = time.perf_counter()
    m = measure(refresh=True) if args.refresh else machine(None)
    print(f"{m}\n{time.perf_counter() - begin:.1f} s to measure")
    kept = record_path(DEVICE)
    print("RECORD " + json.dumps(json.loads(kept.read_text())) if kept.exists() else "no record")
    if m.points: print(points_table(m).to_string())


def alone(part):
    "A part of this program in a process of its own, as a user's is: what ran before makes launching slower"
    command = [sys.executable, "-u", __file__, *sys.argv[1:], "--part", part]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        for line in child.stdout:
            kept = {"NOTED": ERRORS, "PEERS": PEERS}.get(line[:5])
            if kept is None: print(line, end="", flush=True)
            else: kept.append(json.loads(line[6:]))
    if child.returncode: print(f"part {part} ended with {child.returncode}")
    return child.returncode


def row(run, what):
    with torch.set_grad_enabled(run is train_row): run(*what)
    for others in PEERS: print("PEERS " + json.dumps(others), flush=True)


def main():
    todo = [(decode_row, r) for r in DECODE] + [(train_row, r) for r in TRAIN]
    if args.part: return measured() if args.part == "machine" else row(*todo[int(args.part)])
    failed = bool(GPU and alone("machine"))
    # what proves most comes first
    order = [0, 1, 16, 2, 3, 17, 4, 5, 18, 6, 8, 7, 9, 19, 10, 11, 12, 13, 14, 15]
    for i in order:
        name = f"{todo[i][0].__name__} " + " ".join(map(str, todo[i][1]))
        if not any(t in name for t in args.rows): continue
        if left() < 20:
            print(f"left out, the time is spent: {name}")
            continue
        begin = time.perf_counter()
        failed |= bool(alone(str(i)))
        print(f"    {time.perf_counter() - begin:.1f} s", flush=True)
    report()
    return failed


if __name__ == "__main__": sys.exit(main())

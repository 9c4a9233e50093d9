"""Forward and backward of a LLaMA-3-8B shape in bfloat16, with its linear layers in float8, and torchao's beside.

usage: python benchmarks/train/fp8.py [--layers 8] [--tokens 8192] [--runs NAME …] [--tiny]

`--layers` of the shape's 32 blocks with its head, random weights, one batch of `--tokens` in rows of 1,024; no
optimizer. Each line runs in a process of its own: seconds (median), times bfloat16, TFLOP/s of the linear layers over
the whole time and its share of the card's float8 peak, GiB at the peak, the plan's prediction, and the least cosine of
the first block's gradients with those of bfloat16. A line is void where the compiler makes that worse. Then the parts:
products alone at the shapes of one block in bfloat16, float8 with and without fast sums, in TFLOP/s, and the casts in
GB/s.
torchao is optional and is asked for its row-wise recipes; it is built for torch.compile, so it runs compiled, and
bfloat16 compiled stands beside it.
"""
import argparse, dataclasses, statistics, sys, time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))
from training import child, result, show

RUNS = ["bf16", "fp8", "fp8 keep", "fp8 ∂W bf16", "bf16 compiled", "fp8 compiled"]
RUNS += ["torchao rowwise", "torchao rowwise_with_gw_hp"]
p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
p.add_argument("--layers", type=int, default=8)
p.add_argument("--tokens", type=int, default=8192)
p.add_argument("--runs", nargs="+", default=RUNS)
p.add_argument("--tiny", action="store_true")
p.add_argument("--child")
args = p.parse_args()
GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")


def model():
    import transformers as tf
    size = (
        dict(hidden_size=64, intermediate_size=128, num_attention_heads=4, num_key_value_heads=2, vocab_size=512)
        if args.tiny else
        dict(
            hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8, vocab_size=128256)
    )
    config = tf.LlamaConfig(
        **size, num_hidden_layers=2 if args.tiny else args.layers, max_position_embeddings=8192, use_cache=False,
        attn_implementation="sdpa")
    torch.manual_seed(0)
    with torch.device(DEVICE): return tf.LlamaForCausalLM(config).bfloat16().train()


def seconds(call, times=10):
    "(median of a call, after a warm-up)"
    sync = torch.cuda.synchronize if GPU else lambda: None
    for _ in range(1 if args.tiny else 3): call()
    took = []
    for _ in range(2 if args.tiny else times):
        sync()
        begin = time.perf_counter()
        call()
        sync()
        took.append(time.perf_counter() - begin)
    return statistics.median(took)


def linear_flops(net, tokens):
    return 6 * tokens * sum(m.weight.numel() for m in net.modules() if isinstance(m, torch.nn.Linear))


def step(how):
    "One way to multiply: seconds of forward and backward, peak"
    from bmlab.plan.machine import DATASHEETS, nearest
    from bmlab.train.fp8 import fp8
    net, tokens, length = model(), (64 if args.tiny else args.tokens), (32 if args.tiny else 1024)
    ids = torch.randint(0, net.config.vocab_size, (tokens // length, length), device=DEVICE)
    work, said = linear_flops(net, tokens), {}
    def gradients():
        net(input_ids=ids, labels=ids).loss.backward()
        found = [w.grad.float().flatten() for w in net.model.layers[0].parameters() if w.ndim == 2]
        for w in net.parameters(): w.grad = None
        return found
    first = gradients()
    def near(): return min(torch.cosine_similarity(a, b, 0).item() for a, b in zip(first, gradients()))
    if how.startswith("fp8"):
        more = {"fp8 keep": dict(keep=True), "fp8 ∂W bf16": dict(weight_grad="bfloat16"), "fp8": {}}
        more = more[how.removesuffix(" compiled")]
        where = "layers[:]" if args.tiny else None
        handle = fp8(net, where, tokens, None if GPU else "h100-80", **more)
        said = dict(layers=len(handle.layers), predicted=round(handle.plan.gain, 2))
    if how.startswith("torchao"):
        try: from torchao.float8 import Float8LinearConfig, convert_to_float8_training
        except ImportError as e: return result(run=how, note=f"torchao: {e}")
        chosen = lambda m, name: "lm_head" not in name and isinstance(m, torch.nn.Linear)
        config = Float8LinearConfig.from_recipe_name(how.split()[1])
        if not GPU: config = dataclasses.replace(config, emulate=True)
        convert_to_float8_training(net, config=config, module_filter_fn=chosen)
    eager = near()
    if how.endswith("compiled") or how.startswith("torchao"):
        for block in net.model.layers: block.compile(backend="inductor" if GPU else "eager")
    def both():
        net(input_ids=ids, labels=ids).loss.backward()
        for w in net.parameters(): w.grad = None
    found = near()
    if not found > eager - 0.05: raise AssertionError(f"{how}: a cosine of {found:.3f}, {eager:.3f} if not compiled")
    first.clear()
    if GPU: torch.cuda.reset_peak_memory_stats()
    s = seconds(both)
    sheet = nearest(torch.cuda.get_device_name(), torch.cuda.mem_get_info()[1]) if GPU else None
    peak = DATASHEETS[sheet.name].fp8 if sheet else float("nan")
    result(
        run=how, seconds=round(s, 4), linear_TFLOPs=round(work / s / 1e12, 1),
        of_fp8_peak=round(work / s / 1e12 / peak, 3), gradients=round(found, 4),
        GiB=round(torch.cuda.max_memory_allocated() / 2**30, 2) if GPU else 0.0, **said)


def parts():
    "Products and casts alone"
    import torch.nn.functional as F
    from bmlab.train.fp8 import cast_float8
    M = 64 if args.tiny else args.tokens
    shapes = [(M, 64, 32)] if args.tiny else [(M, 4096, 4096), (M, 14336, 4096), (M, 4096, 14336), (14336, 4096, M)]
    row, out = F.ScalingType.RowWise, {}
    ways = ("rows", 3, {}), ("both", 6, dict(columns=True)), ("columns", 5, dict(rows=False, columns=True))
    for m, n, k in shapes:
        a, b = (torch.randn(s, k, device=DEVICE).bfloat16() for s in (m, n))
        (x, xs, *_), (w, ws, *_) = cast_float8(a), cast_float8(b)
        rate = lambda call: round(2 * m * n * k / seconds(call, 30) / 1e12, 1)
        name = f"{m}×{n}×{k}"
        out[f"{name} bf16"] = rate(lambda: a @ b.t())
        for fast in (True, False):
            out[f"{name} fp8{' fast' if fast else ''}"] = rate(
                lambda: F.scaled_mm(x, w.t(), xs, row, ws.t(), row, use_fast_accum=fast))
        for way, moved, how in ways:
            took = seconds(lambda: cast_float8(a, **how), 30)
            out[f"cast {m}×{k} {way}, GB/s"] = round(moved * m * k / took / 1e9, 1)
    result(run="parts", **out)


if args.child:
    parts() if args.child == "parts" else step(args.child)
    sys.exit()
flags = ["--layers", args.layers, "--tokens", args.tokens, *(["--tiny"] if args.tiny else [])]
rows = []
for n in args.runs:
    rows.append({"run": n} | child(__file__, "--child", n, *flags))
    print(rows[-1], flush=True)
first = next((r["seconds"] for r in rows if r.get("seconds")), None)
for r in rows:
    if r.get("seconds"): r["times bf16"] = round(first / r["seconds"], 3)
show(rows, "float8: forward and backward, TFLOP/s of the linear layers over all of the time")
for name, value in child(__file__, "--child", "parts", *flags).items(): print(f"{name:40s} {value}")

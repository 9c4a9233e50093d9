"""The goals of QLoRA, checked in one command: memory, time beside LoRA in bf16, and what each limit's plan says.

usage: python benchmarks/train/qlora.py [--runs NAME …] [--tiny]

An 8B LLaMA shape with a LoRA of rank 16 on every linear layer, its base in int4 (made layer by layer, so that the peak
of the whole process counts): 1 × 1024 inside 8 GiB and 2 × 1024 inside 10 GiB, the allocator held to the limit, and
8 × 1024 in at most 1.2 × the time of the bf16 base. A 70B shape in int4 at 1 × 2048 inside 80 GB. LoRA on the bf16 base
inside 29 GiB at 8 × 1024. Then the widening alone: how much of a product with packed weights it is, forward and back.
Ends with 1 where a goal is missed. `benchmarks/delta/qlora.py` has the peers.
"""
import argparse, sys, time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))
from training import child, clock, leave, random_ids, result, show, with_delta

GIB = 1 << 30
LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
# name → (shape, bits, rows, tokens, limit in GiB, of which memory must be kept)
RUNS = {
    "8B bf16, 8 x 1024": ("8b", None, 8, 1024, None),
    "8B int4, 8 x 1024": ("8b", 4, 8, 1024, None),
    "8B int4, 2 x 1024 in 10 GiB": ("8b", 4, 2, 1024, 10),
    "8B int4, 1 x 1024 in 8 GiB": ("8b", 4, 1, 1024, 8),
    "8B bf16, 8 x 1024 in 29 GiB": ("8b", None, 8, 1024, 29),
    "70B int4, 1 x 2048 in 74.5 GiB": ("70b", 4, 1, 2048, 74.5),  # 80 GB
    "widening": None,
}
p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
p.add_argument("--runs", nargs="+", default=list(RUNS))
p.add_argument("--tiny", action="store_true", help="sizes for a CPU; no goal is checked")
p.add_argument("--child")
args = p.parse_args()
GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if GPU else torch.device("cpu")


def config(shape):
    import transformers as tf
    size = dict(hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, intermediate_size=14336)
    if shape == "70b":
        size = dict(hidden_size=8192, num_hidden_layers=80, num_attention_heads=64, intermediate_size=28672)
    size |= dict(num_key_value_heads=8, vocab_size=128256, max_position_embeddings=4096)
    if args.tiny: size |= dict(
        hidden_size=64, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, intermediate_size=128,
        vocab_size=512)
    return tf.LlamaConfig(**size)


@torch.no_grad()
def llama(shape, bits):
    "Random weights, a layer at a time on the device, packed before the next one comes"
    import transformers as tf
    from bmlab.all import pack_linears
    torch.manual_seed(0)
    c = config(shape)
    with torch.device("meta"): model = tf.LlamaForCausalLM(c).bfloat16().train()
    model.model.rotary_emb = type(model.model.rotary_emb)(c).to(DEVICE)
    for name in ("model.embed_tokens", *(f"model.layers.{i}" for i in range(c.num_hidden_layers)), "model.norm"):
        part = model.get_submodule(name).to_empty(device=DEVICE)
        for w in part.parameters(): w.fill_(1) if w.ndim == 1 else w.normal_(0, .02)
        if bits and "layers" in name: pack_linears(part, bits=bits, modules=LAYERS)
    model.lm_head.to_empty(device=DEVICE).weight.normal_(0, .02)
    return pack_linears(model, bits=bits, modules=["lm_head"]) if bits else model


def trained(shape, bits, rows, tokens, limit, name):
    from bmlab.all import Lora, measure
    if args.tiny: tokens = 32
    if limit and GPU:
        torch.cuda.set_per_process_memory_fraction(limit * GIB / torch.cuda.get_device_properties(0).total_memory)
    machine = measure() if GPU else "h100-80"
    model = llama(shape, bits)
    delta = Lora(model, r=16, modules=LAYERS).freeze()
    more = dict(memory_limit=f"{limit}GiB") if limit and GPU else {}
    step, said = with_delta(model, delta, rows, tokens, f"qlora {name}", args.tiny, machine=machine, **more)
    batches = random_ids(config(shape).vocab_size, rows, tokens, DEVICE)
    result(**clock(step, batches, DEVICE, warm=3, steps=6), **said)


def widening():
    "The share of a product with packed weights that widening takes, at as many rows as training has"
    from bmlab.kernels.layers import Int4Linear
    N, K = (256, 128) if args.tiny else (14336, 4096)
    layer, took = Int4Linear.from_float(torch.nn.Linear(K, N, bias=False, device=DEVICE)), {}
    wide = layer.dequantize(torch.bfloat16)
    sync = torch.cuda.synchronize if GPU else (lambda: None)
    def seconds(call, n=20):
        call()
        sync()
        start = time.perf_counter()
        for _ in range(n): call()
        sync()
        return (time.perf_counter() - start) / n
    for rows in (512, 1024, 2048, 8192) if not args.tiny else (16,):
        x = torch.randn(rows, K, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
        g = torch.randn(rows, N, device=DEVICE, dtype=torch.bfloat16)
        both = lambda f: seconds(lambda: torch.autograd.grad(f(x), x, g))
        plain = both(lambda x: torch.nn.functional.linear(x, wide))
        took[f"packed over wide, {rows} rows"] = round(both(layer) / plain, 3)
    result(**took)


def missed(known):
    "Goals that these rows do not reach"
    at = lambda name, key: known.get(name, {}).get(key)
    if at("8B int4, 8 x 1024", "step_s") and at("8B bf16, 8 x 1024", "step_s"):
        ratio = at("8B int4, 8 x 1024", "step_s") / at("8B bf16, 8 x 1024", "step_s")
        print(f"int4 over bf16, 8 x 1024: {ratio:.3f} of the time (goal: at most 1.2)")
        if ratio > 1.2: yield "8 x 1024 in 1.2 × bf16's time"
    for name in known:
        limit = RUNS[name] and RUNS[name][4]
        if "error" in known[name]: yield f"{name}: {known[name]['error']}"
        elif limit and known[name]["peak_GiB"] > limit: yield name
        elif (want := known[name].get("predicted_GiB")) and abs(known[name]["peak_GiB"] / want - 1) > 0.05:
            yield f"{name}: peak within 5 % of the plan"


if __name__ == "__main__":
    if args.child:
        if RUNS[args.child] is None: widening()
        else: trained(*RUNS[args.child], args.child)
        leave()
    rows = []
    for name in args.runs:
        rows.append({"run": name} | child(__file__, "--child", name, *(["--tiny"] if args.tiny else [])))
        print(rows[-1], flush=True)
    show(rows, "qlora: LoRA r16 on all linear layers")
    if GPU and not args.tiny and (bad := list(missed({r["run"]: r for r in rows}))):
        sys.exit("missed: " + "; ".join(bad))

"""LoRA of rank 16 on every linear layer of an 8B LLaMA shape, its base in bf16 and in int4: step time and peak memory.

usage: python benchmarks/delta/qlora.py [--runs NAME …] [--tiny]

bmlab: layers compiled, `lm_loss`, as many layers recomputed as the plan says; the int4 base is made layer by layer,
so that the peak of the whole process counts.
PEFT as its users write it: gradient checkpointing of every layer, the model's own loss, fused AdamW; its 4-bit base
is bitsandbytes' (NF4, scales quantized too), in bf16.
Bound: the arithmetic of a LoRA step (forward, and the way back without gradients of weights), and for int4 the bytes
that widening writes, twice or, recomputed, three times a step.
"""
import argparse, sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))
from training import child, clock, leave, llama_8b, random_ids, result, show, with_delta, with_peft

RUNS = [
    "PEFT, bf16",
    "PEFT, NF4",
    "PEFT, NF4, 2 rows",
    "bmlab, bf16",
    "bmlab, int4",
    "bmlab, int8",
    "bmlab, int4, 2 rows in 10 GiB",
]
p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
p.add_argument("--runs", nargs="+", default=RUNS)
p.add_argument("--tiny", action="store_true", help="sizes for a CPU")
p.add_argument("--child")
args = p.parse_args()
GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if GPU else torch.device("cpu")
LENGTH, LAYERS = (
    (32 if args.tiny else 1024),
    ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
)


def config(): return llama_8b(args.tiny, vocab=512)


@torch.no_grad()
def llama(bits=None):
    "Random weights, a layer at a time on the device, packed before the next one comes"
    import transformers as tf
    from bmlab.all import pack_linears
    torch.manual_seed(0)
    c = config()
    with torch.device("meta"): model = tf.LlamaForCausalLM(c).bfloat16().train()
    model.model.rotary_emb = type(model.model.rotary_emb)(c).to(DEVICE)
    parts = [
        ("model.embed_tokens", None),
        *((f"model.layers.{i}", bits) for i in range(c.num_hidden_layers)),
        ("model.norm", None),
    ]
    for name, pack in parts:
        part = model.get_submodule(name).to_empty(device=DEVICE)
        for n, w in part.named_parameters(): w.fill_(1) if w.ndim == 1 else w.normal_(0, .02)
        if pack: pack_linears(part, bits=pack, modules=LAYERS)
    model.lm_head.to_empty(device=DEVICE).weight.normal_(0, .02)
    if bits: pack_linears(model, bits=bits, modules=["lm_head"])
    return model


def run(step, rows, **said):
    batches = random_ids(config().vocab_size, rows, LENGTH, DEVICE)
    result(**clock(step, batches, DEVICE, warm=4, steps=6), **said)


def peft_lora(name, rows):
    if "NF4" in name:
        import bitsandbytes as bnb
        model = llama()
        def swap(m):
            for n, child in m.named_children():
                if isinstance(child, torch.nn.Linear) and n in LAYERS:
                    new = bnb.nn.Linear4bit(
                        child.in_features,
                        child.out_features,
                        bias=False,
                        compute_dtype=torch.bfloat16,
                        quant_type="nf4",
                        compress_statistics=True,
                        device="meta",
                    )
                    new.weight = bnb.nn.Params4bit(
                        child.weight.data.cpu(),
                        requires_grad=False,
                        quant_type="nf4",
                        compress_statistics=True,
                        module=new,
                    )
                    setattr(m, n, new.to(DEVICE))
                else: swap(child)
        swap(model)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()  # (its base was made whole)
    else: model = llama()
    step, tunable = with_peft(model, 16, LAYERS)
    run(step, rows, tunable=tunable)


def ours(name, rows):
    from bmlab.all import Lora, measure
    limit = "10GiB" if "10 GiB" in name and GPU else None
    # what the allocator may reserve, too
    if limit: torch.cuda.set_per_process_memory_fraction((10 << 30) / torch.cuda.get_device_properties(0).total_memory)
    machine = measure() if GPU else "h200"
    model = llama(4 if "int4" in name else 8 if "int8" in name else None)
    delta = Lora(model, r=16, modules=LAYERS).freeze()
    named = "qlora_" + name.replace("bmlab, ", "")
    step, said = with_delta(
        model, delta, rows, LENGTH, named, args.tiny, memory_limit=limit, machine=machine)
    run(step, rows, **said)


if __name__ == "__main__":
    if args.child:
        rows = 2 if "2 rows" in args.child else 8
        (peft_lora if args.child.startswith("PEFT") else ours)(args.child, rows)
        leave()
    rows = []
    for name in args.runs:
        rows.append({"run": name} | child(__file__, "--child", name, *(["--tiny"] if args.tiny else [])))
        print(rows[-1], flush=True)
    known = {r["run"]: r for r in rows if r.get("step_s")}
    for r in rows:
        small = "2 rows" in r["run"]
        nf4 = "PEFT, NF4, 2 rows" if small else "PEFT, NF4"
        for whose, peer in (("PEFT's bf16", "PEFT, bf16"), ("PEFT's NF4", nf4), ("bmlab's bf16", "bmlab, bf16")):
            if peer in known and r.get("step_s") and (not small or "2 rows" in peer):
                r[f"of {whose} time"] = round(r["step_s"] / known[peer]["step_s"], 3)
    show(rows, "qlora: 8B, LoRA r16 on all linear layers")

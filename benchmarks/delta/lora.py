"""An 8B LLaMA shape on one GPU, 8 × 1024 tokens: full fine-tuning, PEFT's LoRA, bmlab's deltas: step time, peak memory.

usage: python benchmarks/delta/lora.py [--runs NAME …] [--tiny]

bf16 weights everywhere, r = 8 on q and v. PEFT as its users write it: gradient checkpointing of every layer, the
model's own loss, fused AdamW. bmlab: `shard` inside the memory that PEFT was measured
with (28.9 GiB), so that the plan says how many layers recompute; layers compiled; `lm_loss`. Full fine-tuning: all
layers recompute, torch's fused AdamW on bf16 weights and moments.
Bound: a delta saves the products of weight gradients, a third of the arithmetic of a step, and the optimizer; forward
and the way back through the layers stay.
"""
import argparse, sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))
from training import (
    child, clock, leave, llama_8b, own_loss, plain_step, random_ids, recompute, result, show, with_delta, with_peft,
)

RUNS = ["full fine-tuning", "PEFT LoRA", "bmlab Lora", "bmlab Lora, all layers recompute", "bmlab Adapter"]
p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
p.add_argument("--runs", nargs="+", default=RUNS)
p.add_argument("--tiny", action="store_true", help="sizes for a CPU")
p.add_argument("--child")
p.add_argument("--limit", default="28.9GiB")
args = p.parse_args()
GPU = torch.cuda.is_available()
DEVICE, (BATCH, LENGTH) = torch.device("cuda", 0) if GPU else torch.device("cpu"), (2, 32) if args.tiny else (8, 1024)


def llama():
    import transformers as tf
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with DEVICE: model = tf.LlamaForCausalLM(llama_8b(args.tiny, vocab=500))
    torch.set_default_dtype(torch.float32)
    return model.train()


def run(step, vocab, **said):
    result(**clock(step, random_ids(vocab, BATCH, LENGTH, DEVICE), DEVICE, warm=4, steps=6), **said)


def peft_lora():
    model = llama()
    vocab = model.config.vocab_size
    step, tunable = with_peft(model, 8, ["q_proj", "v_proj"])
    run(step, vocab, tunable=tunable)


def full():
    model = recompute(llama())
    opt = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    step = plain_step(model, opt, own_loss)
    run(step, model.config.vocab_size, tunable=sum(p.numel() for p in model.parameters()))


def ours(name):
    from bmlab.all import Adapter, Lora
    model = llama()
    delta = Adapter(model) if "Adapter" in name else Lora(model, r=8, modules=["q_proj", "v_proj"])
    limit, machine = (args.limit, None) if GPU else (None, "h200")
    checkpoint = True if "all layers" in name else "auto"
    step, said = with_delta(
        model, delta.freeze(), BATCH, LENGTH, name, args.tiny, memory_limit=limit, checkpoint=checkpoint,
        machine=machine)
    run(step, model.config.vocab_size, **said)


if args.child:
    {"PEFT LoRA": peft_lora, "full fine-tuning": full}.get(args.child, lambda: ours(args.child))()
    leave()
rows = []
for name in args.runs:
    rows.append(
        {"run": name} | child(__file__, "--child", name, "--limit", args.limit, *(["--tiny"] if args.tiny else []))
    )
    print(rows[-1], flush=True)
peer = next((r for r in rows if r["run"] == "PEFT LoRA" and r.get("step_s")), None)
whole = next((r for r in rows if r["run"] == "full fine-tuning" and r.get("step_s")), None)
for r in rows:
    if peer and r.get("step_s"):
        r["of PEFT's time"], r["of PEFT's peak"] = (
            round(r["step_s"] / peer["step_s"], 3),
            round(r["peak_GiB"] / peer["peak_GiB"], 3) if peer["peak_GiB"] else None,
        )
    if whole and r.get("step_s"): r["of full fine-tuning's time"] = round(r["step_s"] / whole["step_s"], 3)
show(rows, "lora: 8B, 8 × 1024 tokens")

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
from training import child, clock, keep, leave, result, show

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
    size = (
        dict(
            hidden_size=64,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            intermediate_size=128,
            vocab_size=500,
        )
        if args.tiny
        else dict(
            hidden_size=4096,
            num_hidden_layers=32,
            num_attention_heads=32,
            num_key_value_heads=8,
            intermediate_size=14336,
            vocab_size=128256,
            max_position_embeddings=4096,
        )
    )
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with DEVICE: model = tf.LlamaForCausalLM(tf.LlamaConfig(**size))
    torch.set_default_dtype(torch.float32)
    return model.train()


def run(step, vocab, **said):
    row = clock(
        step, lambda g: torch.randint(0, vocab, (BATCH, LENGTH), device=DEVICE, generator=g), DEVICE, warm=4, steps=6
    )
    result(**row, **said)


def peft_lora():
    import peft
    model = llama()
    vocab = model.config.vocab_size
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=dict(use_reentrant=False))
    model.enable_input_require_grads()
    model = peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules=["q_proj", "v_proj"]))
    opt = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4, fused=True)
    def step(ids):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss
    run(step, vocab, tunable=sum(p.numel() for p in model.parameters() if p.requires_grad))


def full():
    model = llama()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=dict(use_reentrant=False))
    opt = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    def step(ids):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss
    run(step, model.config.vocab_size, tunable=sum(p.numel() for p in model.parameters()))


def ours(name):
    from bmlab.all import Lora, lm_loss, plan_training, shard
    model = llama()
    if "Adapter" in name:
        from bmlab.delta.adapter import Adapter
        delta = Adapter(model).freeze()
    else: delta = Lora(model, r=8, modules=["q_proj", "v_proj"]).freeze()
    whole = "all layers" in name
    ids = torch.zeros(BATCH, LENGTH, dtype=torch.long)
    plan = plan_training(
        model,
        BATCH,
        LENGTH,
        inputs={"input_ids": ids, "labels": ids},
        memory_limit=args.limit if GPU else None,
        checkpoint=True if whole else "auto",
        offload=None,
        master=None,
        compile=GPU,
        loss="chunked",
        machine=None if GPU else "h200",
    )
    keep(plan, name.replace(", ", "_").replace(" ", "-"), args.tiny)
    shard(model, checkpoint=plan.recompute, compile=GPU)
    opt = torch.optim.AdamW(delta.trainable(), lr=1e-4, fused=True)
    def step(ids):
        loss = lm_loss(model, {"input_ids": ids, "labels": ids})
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss
    run(
        step,
        model.config.vocab_size,
        tunable=delta.count().delta,
        recomputed=plan.recompute,
        predicted_s=round(plan.step_s, 3),
        predicted_GiB=round(plan.peak_bytes / 2**30, 2),
    )


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

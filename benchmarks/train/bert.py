"""BERT-Large (masked language model) at 512 tokens under a memory limit of 11 and 32 GiB: the largest batch and its
examples/s, bmlab beside transformers.

usage: python benchmarks/train/bert.py [--limits 11 32] [--runs NAME …] [--tiny]

transformers: its BertForMaskedLM, fp32 weights, bf16 autocast, torch's fused AdamW; without and with its
gradient_checkpointing_enable(); the largest batch is found by trying.
bmlab: the same class in bf16 with fp32 masters. plan_training chooses the batch, the recomputed layers and the host's
share: once for the largest batch that fits, once for the batch with the most examples/s. The limit is enforced on both
by torch.cuda.set_per_process_memory_fraction.
"""
import argparse, sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))
from training import child, clock, keep, leave, result, show

p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
p.add_argument("--limits", type=float, nargs="+", default=[11, 32])
p.add_argument("--tiny", action="store_true")
p.add_argument("--child")
p.add_argument("--limit", type=float)
p.add_argument(
    "--runs",
    nargs="+",
    default=["transformers", "transformers, gradient checkpointing", "bmlab, largest batch", "bmlab, fastest batch"],
)
args = p.parse_args()
LENGTH = 32 if args.tiny else 512


def bert(device, dtype):
    import transformers as tf
    size = (
        dict(hidden_size=64, num_hidden_layers=3, num_attention_heads=4, intermediate_size=128, vocab_size=500)
        if args.tiny
        else dict(
            hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096, vocab_size=30522
        )
    )
    torch.manual_seed(0)
    with torch.device(device): return tf.BertForMaskedLM(tf.BertConfig(**size)).to(dtype).train(), size["vocab_size"]


def cap(device):
    if device.type == "cuda":
        torch.cuda.set_per_process_memory_fraction(
            args.limit * 2**30 / torch.cuda.get_device_properties(0).total_memory
        )


def draw(batch, vocab, device):
    return lambda g: torch.randint(0, vocab, (batch, LENGTH), device=device, generator=g)


def theirs(recompute):
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    cap(device)
    model, vocab = bert(device, torch.float32)
    if recompute: model.gradient_checkpointing_enable()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    def step(ids):
        with torch.autocast(device.type, torch.bfloat16): loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss
    def fits(batch):
        try:
            [step(draw(batch, vocab, device)(torch.Generator(device))) for _ in range(2)]
            return True
        except torch.OutOfMemoryError:
            opt.zero_grad()
            torch.cuda.empty_cache()
            return False
    best, low, high = 0, 1, 4 if device.type == "cpu" else 512
    while low <= high:                                                 # the largest that fits, by halving
        mid = (low + high) // 2
        if fits(mid): best, low = mid, mid + 1
        else: high = mid - 1
    row = clock(step, draw(best, vocab, device), device, warm=2, steps=5) if best else {"step_s": None}
    result(largest_batch=best, **row)


def ours(goal):
    from bmlab.train.offload import AdamW
    from bmlab.plan.training import plan_training
    from bmlab.train.sharding import shard
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    cap(device)
    gpu = device.type == "cuda"
    model, vocab = bert(device, torch.bfloat16)
    # what torch may allocate: fragments and workspaces stay outside
    limit = (args.limit - 0.6) * 2**30
    def plan_of(batch):
        ids = torch.zeros(batch, LENGTH, dtype=torch.long)
        try:
            return plan_training(
                model,
                batch,
                LENGTH,
                memory_limit=limit,
                checkpoint="auto",
                offload="auto" if goal == "largest" else None,
                compile=gpu,
                machine=None if gpu else "h200",
                inputs={"input_ids": ids, "labels": ids},
            )
        except ValueError: return None
    batches = [4] if not gpu else [8, 16, 24, 32, 48, 64, 72, 96, 128, 160, 192, 256, 320, 384, 512]
    plans = {b: plan for b in batches if (plan := plan_of(b)) is not None}
    batch = max(plans) if goal == "largest" else max(plans, key=lambda b: b / plans[b].step_s)
    plan = plans[batch]
    keep(plan, f"bert_{args.limit:g}GiB_{goal}", args.tiny)
    shard(model, checkpoint=plan.recompute, budget=plan.budget, compile=gpu)
    opt = AdamW(model, lr=1e-4, offload=plan.offload)
    def step(ids):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss
    row = clock(step, draw(batch, vocab, device), device, warm=3, steps=5, finish=opt.flush)
    result(
        largest_batch=max(plans),
        batch=batch,
        recomputed=plan.recompute,
        offload=round(plan.offload, 2),
        **row,
        predicted_s=round(plan.step_s, 3),
        predicted_GiB=round(plan.peak_bytes / 2**30, 2),
    )


if args.child:
    {
        "transformers": lambda: theirs(False),
        "transformers, gradient checkpointing": lambda: theirs(True),
        "bmlab, largest batch": lambda: ours("largest"),
        "bmlab, fastest batch": lambda: ours("fastest"),
    }[args.child]()
    leave()
rows = []
for limit in args.limits:
    for name in args.runs:
        row = child(__file__, "--child", name, "--limit", limit, *(["--tiny"] if args.tiny else []))
        rows.append(
            {
                "limit GiB": limit,
                "run": name,
                "examples/s": round((row.get("batch") or row.get("largest_batch", 0)) / row["step_s"], 1)
                if row.get("step_s") else None,
            }
            | row
        )
show(rows, "bert: BERT-Large, 512 tokens")

"""Weak scaling of GPT 2.78B, 16 × 512 tokens a GPU, ZeRO-3: tokens/s a GPU on 1, 2 and 4 GPUs of one host.

usage: python benchmarks/train/scaling.py [--gpus 1 2 4] [--batch 16] [--zero 3] [--tiny]
"""
import argparse, sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))
from training import GPT, child, clock, fill, here, keep, leave, lm_loss, result, show

p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
p.add_argument("--gpus", type=int, nargs="+", default=[1, 2, 4])
p.add_argument("--tiny", action="store_true")
p.add_argument("--child", action="store_true")
p.add_argument("--batch", type=int, default=16)
p.add_argument("--zero", type=int, default=3)
args = p.parse_args()
SHAPE = (
    dict(layers=3, D=64, H=4, vocab=500, length=32) if args.tiny
    else dict(layers=32, D=2560, H=32, vocab=50304, length=512)
)


def main():
    from bmlab.train.offload import AdamW
    from bmlab.plan.training import plan_training
    from bmlab.train.processes import init_distributed, local_device, world_size
    from bmlab.train.sharding import shard
    init_distributed(seed=0)
    with torch.device("meta"): model = GPT(**SHAPE, dtype=torch.bfloat16)
    gpu = torch.cuda.is_available()
    plan = plan_training(
        model, args.batch, SHAPE["length"], gpus=world_size(), zero=args.zero, checkpoint=False, offload=None,
        compile=gpu, machine=(m := here()),
    )
    keep(plan, f"scaling_zero{args.zero}_batch{args.batch}_{world_size()}", args.tiny)
    shard(model, zero=args.zero, checkpoint=False, compile=gpu)
    fill(model)
    opt = AdamW(model, lr=1e-4)
    def step(ids):
        opt.zero_grad()
        loss = lm_loss(model, ids)
        loss.backward()
        opt.step()
        return loss
    row = clock(
        step,
        lambda g: torch.randint(0, SHAPE["vocab"], (args.batch, SHAPE["length"]), device=local_device(), generator=g),
        local_device(),
        steps=12,
    )
    result(
        gpus=world_size(), **row, network_GB_s=round(m.network / 1e9), predicted_s=round(plan.step_s, 3),
        predicted_GiB=round(plan.peak_bytes / 2**30, 2),
    )


if args.child:
    main()
    leave()
rows = [
    {"gpus": n}
    | child(__file__, "--child", "--batch", args.batch, "--zero", args.zero, *(["--tiny"] if args.tiny else []), gpus=n)
    for n in args.gpus
]
for r in rows: r["tokens/s/GPU"] = round(args.batch * SHAPE["length"] / r["step_s"]) if "step_s" in r else None
for r in rows:
    r["of one GPU"] = (
        round(r["tokens/s/GPU"] / rows[0]["tokens/s/GPU"], 3) if r["tokens/s/GPU"] and rows[0]["tokens/s/GPU"] else None
    )
show(rows, f"scaling_zero{args.zero}_batch{args.batch}: GPT 2.78B")

"""GPT 13B (40 × 5120, 128 heads), 512 tokens a sequence, ZeRO-3 on 2 GPUs: bmlab beside FSDP2 as its users write it.

usage: python benchmarks/train/zero.py [--batches 8 16 24 32] [--gpus 2] [--tiny]

bmlab: shard(model, checkpoint="auto", compile=True) and AdamW on fp32 weights: as many layers recompute as the memory
forces. FSDP2: compiled layers, fp32 weights and moments, bf16 compute and reduction, all layers recomputed; and, tuned
by hand, as many as bmlab chose. No clipping on either side. Bound: 8·P·T FLOPs with full recompute, 6·P·T without, at
790 TFLOP/s. The plan is written to a file before the run.
"""
import argparse, os, sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))
from training import GPT, child, clock, fill, here, keep, leave, lm_loss, plain_step, random_ids, result, show

p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
p.add_argument("--batches", type=int, nargs="+", default=[16, 32, 8, 24])
p.add_argument("--gpus", type=int, default=2)
p.add_argument("--tiny", action="store_true")
p.add_argument("--child")
p.add_argument("--batch", type=int)
p.add_argument("--zero", type=int, default=3)
p.add_argument("--recompute", type=int, default=-1)
p.add_argument("--steps", type=int, default=5)
p.add_argument("--peers", type=int, nargs="*", default=[16, 32], help="batches that FSDP2 runs too")
p.add_argument("--chunked", type=int, default=0, help="bmlab's loss without whole logits")
args = p.parse_args()
SHAPE = (
    dict(layers=3, D=64, H=4, vocab=500, length=32) if args.tiny
    else dict(layers=40, D=5120, H=128, vocab=50304, length=512)
)


def ours():
    from bmlab.train.losses import lm_loss as chunked_loss
    from bmlab.train.offload import AdamW
    from bmlab.train.optim import OptimManager
    from bmlab.plan.training import plan_training
    from bmlab.train.processes import init_distributed, local_device, world_size
    from bmlab.train.sharding import shard
    init_distributed(seed=0)
    # fp32 weights are their own masters: no gradient lies beside them where the activations peak
    with torch.device("meta"): model = GPT(**SHAPE)
    gpu = torch.cuda.is_available()
    plan = plan_training(
        model,
        args.batch,
        SHAPE["length"],
        gpus=world_size(),
        zero=args.zero,
        checkpoint="auto" if args.recompute < 0 else args.recompute,
        offload=None,
        compile=gpu,
        loss="chunked" if args.chunked else "full",
        machine=here(),
    )
    keep(plan, f"13b_zero{args.zero}_batch{args.batch}{'_chunked' * bool(args.chunked)}", args.tiny)
    shard(model, zero=args.zero, checkpoint=plan.recompute, budget=plan.budget, compile=gpu)
    fill(model)
    opt, loss_of = AdamW(model, lr=1e-4), chunked_loss if args.chunked else lm_loss
    om = OptimManager()
    om.add_optimizer(opt)
    def step(ids):
        om.zero_grad()
        loss = loss_of(model, ids)
        om.backward(loss)
        om.step()
        return loss
    row = run(step, local_device())
    result(
        **row,
        recomputed=plan.recompute,
        predicted_s=round(plan.step_s, 3),
        predicted_GiB=round(plan.peak_bytes / 2**30, 2),
        P=sum(p.numel() for p in model.parameters()),
    )


def theirs():
    import torch.distributed as dist
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    gpu, local = torch.cuda.is_available(), int(os.environ["LOCAL_RANK"])
    if gpu: torch.cuda.set_device(local)
    dist.init_process_group("nccl" if gpu else "gloo")
    torch.manual_seed(0)
    with torch.device("meta"): model = GPT(**SHAPE)
    n = SHAPE["layers"] if args.recompute < 0 else args.recompute
    recomputed = set(map(id, list(model.layers)[:n]))
    apply_activation_checkpointing(model, check_fn=lambda m: id(m) in recomputed)
    how = dict(
        mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16),
        reshard_after_forward=args.zero == 3,
    )
    for layer in model.layers:
        if gpu: layer.compile()
        fully_shard(layer, **how)
    fully_shard(model, **how)
    device = torch.device("cuda", local) if gpu else torch.device("cpu")
    model.to_empty(device=device)
    fill(model)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    result(**run(plain_step(model, opt, lm_loss), device), recomputed=n)


def run(step, device):
    ids = random_ids(SHAPE["vocab"], args.batch, SHAPE["length"], device)
    return clock(step, ids, device, warm=3, steps=args.steps)


if args.child:
    (ours if args.child == "bmlab" else theirs)()
    leave()
common, rows = ["--steps", args.steps, *(["--tiny"] if args.tiny else [])], []
def add(name, batch, zero=3, recompute=-1):
    row = child(
        __file__, "--child", name, "--batch", batch, "--zero", zero, "--recompute", recompute, "--chunked",
        args.chunked, *common, gpus=args.gpus,
    )
    rows.append(
        {
            "run": name,
            "batch": batch,
            "zero": zero,
            "samples/s/GPU": round(batch / row["step_s"], 2) if "step_s" in row else None,
        }
        | row
    )
    print(rows[-1], flush=True)
    return row
for batch in args.batches:
    mine = add("bmlab", batch)
    if batch in args.peers:
        add("FSDP2 compiled", batch)
        if batch == args.peers[0]: add("FSDP2 compiled", batch, recompute=mine.get("recomputed", 0))
if 8 in args.batches: add("bmlab", 8, zero=2)
show(rows, f"zero: GPT 13B on {args.gpus} GPUs")

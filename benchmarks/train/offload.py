"""GPT 2.78B, 16 × 512 tokens a step, one GPU, the whole optimizer state on the host: bmlab beside FSDP2's
CPUOffloadPolicy.

usage: python benchmarks/train/offload.py [--runs NAME …] [--tiny]

fp32 masters and moments, bf16 compute; every layer is recomputed on both sides, except in "as planned".
Bounds: the step cannot be shorter than computing alone, nor than moving the state. So a lane of host cores alone and
the link alone are measured too.
"""
import argparse, sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))
from training import GPT, Layer, child, clock, fill, keep, leave, lm_loss, plain_step, random_ids, result, show

p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
p.add_argument("--tiny", action="store_true", help="sizes for a CPU")
p.add_argument("--child")
p.add_argument("--steps", type=int, default=8)
p.add_argument("--runs", nargs="+", help="only these")
args = p.parse_args()
SHAPE = (
    dict(layers=3, D=64, H=4, vocab=500, length=32) if args.tiny
    else dict(layers=32, D=2560, H=32, vocab=50304, length=512)
)
BATCH = 4 if args.tiny else 16
CLIP = 1e-3                                                            # triggers on every step
RUNS = [
    "compute alone", "bmlab", "bmlab, clip triggers", "bmlab, as planned", "bmlab, as planned, clip triggers",
    "bmlab, cores alone", "bmlab, link alone", "torchao CPUOffloadOptimizer", "FSDP2 CPUOffloadPolicy",
]


def device(): return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
def batches(): return random_ids(SHAPE["vocab"], BATCH, SHAPE["length"], device())


def time_peer(name, model, opt):
    steps = max(3, args.steps // 2)
    result(run=name, **clock(plain_step(model, opt, lm_loss), batches(), device(), warm=2, steps=steps))


def ours(name):
    from bmlab.train.offload import AdamW
    from bmlab.train.optim import OptimManager
    from bmlab.plan.training import plan_training
    from bmlab.train.sharding import shard
    torch.manual_seed(0)
    model = GPT(**SHAPE, device=device(), dtype=torch.bfloat16)
    fill(model)
    clip, link = (
        CLIP if "clip" in name else None, {"bmlab, cores alone": 0.0, "bmlab, link alone": 1.0}.get(name, "auto")
    )
    # the plan chooses what recomputes; layers are compiled
    planned = "as planned" in name
    compile = planned and torch.cuda.is_available()
    plan = plan_training(
        model,
        BATCH,
        SHAPE["length"],
        checkpoint="auto" if planned else SHAPE["layers"],
        offload=1.0,
        overlap="forward" if clip else "backward",
        compile=compile,
        link=0.6 if link == "auto" else link,
        machine=None if torch.cuda.is_available() else "h200",
    )
    if name != "compute alone": keep(plan, name.replace(", ", "_").replace(" ", "-"), args.tiny)
    shard(model, checkpoint=plan.recompute, budget=plan.budget, compile=compile)
    if name == "compute alone":
        def step(ids):
            loss = lm_loss(model, ids)
            loss.backward()
            model.zero_grad()
            return loss
        finish = lambda: None
    else:
        opt = AdamW(model, lr=1e-4, offload=1.0, link=link, overlap="forward" if clip else "backward")
        om = OptimManager()
        om.add_optimizer(opt)
        def step(ids):
            om.zero_grad()
            loss = lm_loss(model, ids)
            om.backward(loss)
            if clip: om.clip_grad_norm(clip)
            om.step()
            return loss
        finish = opt.flush
    row = clock(step, batches(), device(), steps=args.steps, finish=finish)
    said = (
        {} if name == "compute alone"
        else {"predicted_s": round(plan.step_s, 3), "predicted_GiB": round(plan.peak_bytes / 2**30, 2)}
    )
    result(run=name, recomputed=plan.recompute, **row, **said)


def theirs(name):
    import torch.distributed as dist
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
    gpu = device().type == "cuda"
    dist.init_process_group("cpu:gloo,cuda:nccl" if gpu else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.manual_seed(0)
    with torch.device("meta"): model = GPT(**SHAPE)
    apply_activation_checkpointing(model, check_fn=lambda m: isinstance(m, Layer))
    how = dict(
        mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16),
        offload_policy=CPUOffloadPolicy(pin_memory=gpu),
    )
    for layer in model.layers: fully_shard(layer, **how)
    fully_shard(model, **how)
    model.to_empty(device="cpu")
    fill(model)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    time_peer(name, model, opt)


def torchao(name):
    "bf16 weights, gradients to the host while backward runs, torch's fused CPU AdamW: torchao's as its page says"
    from functools import partial
    from torch.utils.checkpoint import checkpoint
    from torchao.optim import CPUOffloadOptimizer
    torch.manual_seed(0)
    model = GPT(**SHAPE, device=device(), dtype=torch.bfloat16)
    fill(model)
    for layer in model.layers: layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    opt = CPUOffloadOptimizer(model.parameters(), torch.optim.AdamW, offload_gradients=True, lr=1e-4, fused=True)
    time_peer(name, model, opt)


if args.child:
    (theirs if args.child.startswith("FSDP2") else torchao if args.child.startswith("torchao") else ours)(args.child)
    leave()
rows = [
    child(__file__, "--child", name, "--steps", args.steps, *(["--tiny"] if args.tiny else [])) | {"run": name}
    for name in args.runs or RUNS
]
peer = rows[-1].get("step_s", 0)                                       # FSDP2's, or the last of the chosen
for r in rows: r["times faster"] = round(peer / r["step_s"], 2) if r.get("step_s") else None
show(rows, "optimizer on the host: GPT 2.78B, 16 × 512 tokens")

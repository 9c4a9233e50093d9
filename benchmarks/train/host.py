"""Weights on the host while training: 9.4B, 14B and 32B shapes trained in full on one GPU of 80 GB with 128 GiB of host
memory. The plan is printed and kept before each run; what was measured stands beside it.

usage: python benchmarks/train/host.py [--only 9b|9b-hosted|9b-fsdp2|14b|32b] [--batch 32] [--gpus 1] [--tiny]

9b:        CPM-Ant's shape as one_gpu.py trains it: weights on the GPU, the optimizer's state by plan.
9b-hosted: the same with blocks on the host, as many as `host="auto"` says.
9b-fsdp2:  the peer: FSDP2 with CPUOffloadPolicy, bf16 weights and moments (torch's CPU AdamW), layers recomputed.
14b, 32b:  Qwen3's shapes, `host="auto"`, moments of 8 bits and bf16 weights rounded by chance.

--gpus: ranks of one host, each with `--batch` rows of its own; bmlab's have one copy on the host, FSDP2's a shard each.
of_8PT is 8 · parameters · tokens of a GPU, recomputation counted, over the measured rate of matrix products and the
step's time.
"""
import argparse, sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))
from training import child, clock, here, keep, leave, own_loss, plain_step, random_ids, recompute, result, show

RUNS = ["9b", "9b-hosted", "9b-fsdp2", "14b", "32b"]
SHAPES = {
    "9b": dict(hidden_size=4096, num_hidden_layers=48, num_attention_heads=32, num_key_value_heads=32,
               intermediate_size=10240, vocab_size=30720, tie_word_embeddings=True),
    "14b": dict(hidden_size=5120, num_hidden_layers=40, num_attention_heads=40, num_key_value_heads=8, head_dim=128,
                intermediate_size=17408, vocab_size=151936),
    "32b": dict(hidden_size=5120, num_hidden_layers=64, num_attention_heads=64, num_key_value_heads=8, head_dim=128,
                intermediate_size=25600, vocab_size=151936),
}
TINY = dict(hidden_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
            intermediate_size=128, vocab_size=500)

p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
p.add_argument("--only", choices=RUNS)
p.add_argument("--batch", type=int, default=32)
p.add_argument("--length", type=int, default=1024)
p.add_argument("--steps", type=int, default=3)
p.add_argument("--gpus", type=int, default=1)
p.add_argument("--limit", help="of the GPU, such as 75GiB: an 80 GB card on a larger one")
p.add_argument("--host", help="of the host, such as 115GiB")
p.add_argument("--tiny", action="store_true")
p.add_argument("--child")
args = p.parse_args()


def make(name):
    "The model on meta, and its vocabulary"
    import transformers as tf
    size = TINY if args.tiny else SHAPES[name.partition("-")[0]]
    config, kind = tf.Qwen3Config, tf.Qwen3ForCausalLM
    if name.startswith("9b"): config, kind = tf.LlamaConfig, tf.LlamaForCausalLM
    config = config(**size, max_position_embeddings=args.length, dtype="bfloat16", use_cache=False)
    with torch.device("meta"): return kind(config).bfloat16(), size["vocab_size"]


def fsdp2(model, device, vocab):
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
    recompute(model)
    for m in (*model.model.layers, model): fully_shard(m, offload_policy=CPUOffloadPolicy(torch.cuda.is_available()))
    model.to_empty(device="cpu")
    with torch.no_grad():
        for t in (p.to_local() for p in model.parameters()):
            t.copy_(torch.randn_like(t, device=device).mul_(.02)) if t.ndim > 1 else t.fill_(1)
        for m in model.modules():
            if hasattr(m, "inv_freq"):
                dim = model.config.hidden_size // model.config.num_attention_heads
                m.inv_freq = (1.0 / 10000 ** (torch.arange(0, dim, 2) / dim)).to(device)
    return torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True), {}


def ours(model, name):
    from bmlab.plan.training import plan_training
    from bmlab.train.offload import AdamW
    from bmlab.train.sharding import shard
    how = dict(overlap="backward") | ({} if name.startswith("9b") else dict(states=8, master="bf16-sr"))
    host = 0.0 if name == "9b" else 0.5 if args.tiny else "auto"
    plan = plan_training(
        model, args.batch, args.length, host=host, gpus=args.gpus, loss="chunked", memory_limit=args.limit,
        host_memory=args.host, machine=here() if torch.cuda.is_available() else "h100-80", **how,
    )
    print(plan, file=sys.stderr)
    keep(plan, f"host_{name}{f'_{args.gpus}' if args.gpus > 1 else ''}", args.tiny)
    shard(model, checkpoint=plan.recompute, host=plan.host)
    opt = AdamW(model, lr=1e-5, offload=plan.offload, **how)
    return opt, dict(
        on_host=f"{plan.host:.0%}", recomputed=plan.recompute, offload=round(plan.offload, 3),
        predicted_s=round(plan.step_s, 3), predicted_GiB=round(plan.peak_bytes / 2**30, 2),
        predicted_host_GiB=round(plan.host_bytes / 2**30, 1),
    )


def main(name):
    from bmlab.plan.machine import machine
    from bmlab.train.losses import lm_loss
    from bmlab.train.processes import init_distributed, local_device
    init_distributed(seed=0)
    (model, vocab), device = make(name), local_device()
    parameters = sum(p.numel() for p in model.parameters())
    opt, said = fsdp2(model, device, vocab) if name == "9b-fsdp2" else ours(model, name)
    loss = own_loss if name == "9b-fsdp2" else lambda m, ids: lm_loss(m, {"input_ids": ids, "labels": ids})
    ids = random_ids(vocab, args.batch, args.length, device)
    row = clock(plain_step(model, opt, loss), ids, device, warm=2, steps=args.steps,
                finish=getattr(opt, "flush", lambda: None))
    rate = machine(None if torch.cuda.is_available() else "h100-80").flops
    host = open("/proc/self/status").read().split("VmHWM:")[1].split()[0]
    # (what ranks share counts for each of them by its part, as in the plan; read at the end, not at the peak)
    if args.gpus > 1: host = open("/proc/self/smaps_rollup").read().split("Pss:")[1].split()[0]
    result(
        run=name, parameters=parameters, batch=args.batch, **row, **said, host_GiB=round(int(host) / 2**20, 1),
        of_8PT=round(8 * parameters * args.batch * args.length / rate / row["step_s"], 3),
    )


if args.child:
    main(args.child)
    leave()
if args.tiny: args.batch, args.length = 2, 32
passed = ["--batch", args.batch, "--length", args.length, "--steps", args.steps, "--gpus", args.gpus]
for k in ("limit", "host"):
    if getattr(args, k): passed += [f"--{k}", getattr(args, k)]
rows = [
    {"run": n} | child(__file__, "--child", n, *passed, *(["--tiny"] if args.tiny else []), gpus=args.gpus)
    for n in ([args.only] if args.only else RUNS)
]
show(rows, f"weights on the host, {args.gpus} GPU{'s' * (args.gpus > 1)}")

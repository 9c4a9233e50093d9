"""What fits one GPU when the plan says how: a CPM-Ant-shaped decoder of 9.39B, trained in full with the state partly on
the host, and one rank's share of a 175B GPT.

usage: python benchmarks/train/one_gpu.py [--only cpm-ant|gpt3] [--tiny]

The plan is written to a file before each run; what was measured stands beside what was predicted.

cpm-ant: 48 layers of width 4096, 32 heads, gated feed-forward 10240, vocabulary 30720, tied: the shape of OpenBMB's
         CPM-Ant in transformers' LLaMA class. 16 B a parameter are 140 GiB, more than the GPU has.
gpt3:    GPT-3 175B on 64 GPUs with ZeRO-3 leaves each GPU 1/64 of the weights and state, and the activations of its own
         batch. 2 of the 96 layers (width 12288, 96 heads) on one GPU are about such a share, and do such a step's
         arithmetic for 2 layers.
"""
import argparse, sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))
from training import GPT, child, clock, fill, keep, leave, lm_loss, plain_step, random_ids, result, show

p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
p.add_argument("--only", choices=["cpm-ant", "gpt3"])
p.add_argument("--tiny", action="store_true")
p.add_argument("--child")
p.add_argument("--compile", type=int, default=1)
args = p.parse_args()


def make(name):
    "The model on meta, batch, length, vocabulary"
    if name == "gpt3":
        shape = (
            dict(layers=2, D=64, H=4, vocab=500, length=32) if args.tiny
            else dict(layers=2, D=12288, H=96, vocab=50304, length=2048)
        )
        with torch.device("meta"): return GPT(**shape, dtype=torch.bfloat16), 4, shape["length"], shape["vocab"]
    import transformers as tf
    size = (
        dict(
            hidden_size=64, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=4, intermediate_size=128,
            vocab_size=500,
        )
        if args.tiny
        else dict(
            hidden_size=4096, num_hidden_layers=48, num_attention_heads=32, num_key_value_heads=32,
            intermediate_size=10240, vocab_size=30720,
        )
    )
    config = tf.LlamaConfig(
        **size, max_position_embeddings=1024, tie_word_embeddings=True, dtype="bfloat16", use_cache=False
    )
    with torch.device("meta"): model = tf.LlamaForCausalLM(config).bfloat16()
    return model, 16, 32 if args.tiny else 512, size["vocab_size"]


def main(name):
    from bmlab.train.offload import AdamW
    from bmlab.plan.training import plan_training
    from bmlab.train.processes import init_distributed, local_device
    from bmlab.train.sharding import shard
    init_distributed(seed=0)
    model, batch, length, vocab = make(name)
    gpu, device = torch.cuda.is_available(), local_device()
    how = (
        dict(
            inputs={
                "input_ids": torch.zeros(batch, length, dtype=torch.long),
                "labels": torch.zeros(batch, length, dtype=torch.long),
            }
        )
        if name == "cpm-ant" else {}
    )
    plan = plan_training(
        model, batch, length, checkpoint="auto", offload="auto", compile=gpu and bool(args.compile), overlap="backward",
        machine=None if gpu else "h200", **how,
    )
    keep(plan, name, args.tiny)
    shard(model, checkpoint=plan.recompute, budget=plan.budget, compile=gpu and bool(args.compile))
    if name == "gpt3": fill(model)
    opt = AdamW(model, lr=1e-5, offload=plan.offload, overlap="backward")
    loss_of = lm_loss if name == "gpt3" else lambda m, ids: m(input_ids=ids, labels=ids).loss
    step, ids = plain_step(model, opt, loss_of), random_ids(vocab, batch, length, device)
    row = clock(step, ids, device, steps=6, finish=opt.flush)
    host = open("/proc/self/status").read().split("VmHWM:")[1].split()[0]
    result(
        run=name,
        parameters=sum(p.numel() for p in model.parameters()),
        batch=batch,
        recomputed=plan.recompute,
        offload=round(plan.offload, 3),
        **row,
        predicted_s=round(plan.step_s, 3),
        predicted_GiB=round(plan.peak_bytes / 2**30, 2),
        host_GiB=round(int(host) / 2**20, 1),
        predicted_host_GiB=round(plan.host_bytes / 2**30, 1),
    )


if args.child:
    main(args.child)
    leave()
rows = [
    {"run": n} | child(__file__, "--child", n, "--compile", args.compile, *(["--tiny"] if args.tiny else []))
    for n in ([args.only] if args.only else ["cpm-ant", "gpt3"])
]
show(rows, "one GPU: large models under a plan")

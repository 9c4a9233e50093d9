"""Muon beside AdamW: seconds a step and peak of memory, planned and measured, with state on the GPU and on the host.

usage: python benchmarks/train/muon.py [--tiny] [--steps N]

A decoder of 1.1B in bf16, 4 × 1024 tokens: AdamW for all of it; torch's own Muon without masters, AdamW for the rest;
`muon.Muon` with fp32 masters, AdamW for the rest; with no state and with all state on the host. --tiny: for a CPU.
"""
import argparse, gc, statistics, time

import torch
import transformers as tf

from bmlab.all import AdamW, Muon, OptimManager, format_bytes, plan_training, shard, split_parameters

p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
p.add_argument("--tiny", action="store_true", help="sizes for a CPU")
p.add_argument("--steps", type=int, default=8)
args = p.parse_args()
GPU = torch.cuda.is_available()
D, LAYERS, BATCH, SEQ, VOCAB = (64, 2, 2, 32, 512) if args.tiny else (2048, 20, 4, 1024, 32000)
WAYS = {"AdamW": (None, 0.0), "AdamW, host": (None, 1.0), "torch's Muon": (torch.optim.Muon, 0.0)}
WAYS |= {"Muon": (Muon, 0.0), "Muon, host": (Muon, 1.0)}


def run(name, kind, share):
    config = tf.LlamaConfig(
        vocab_size=VOCAB, hidden_size=D, intermediate_size=11 * D // 4, num_hidden_layers=LAYERS,
        num_attention_heads=max(1, D // 128))
    with torch.device("cuda" if GPU else "cpu"): model = tf.LlamaForCausalLM(config).to(torch.bfloat16)
    plan = plan_training(
        model, BATCH, SEQ, checkpoint=False, offload=share, optimizer="muon" if kind else "adamw", sharded=False,
        machine=None if GPU else "h200")
    shard(model, checkpoint=False)
    matrices, rest = split_parameters(model)
    om = OptimManager(model=model)
    if kind is Muon: om.add_optimizer(Muon(matrices, lr=0.02, offload=share))
    elif kind: om.add_optimizer(kind(matrices, lr=0.02))
    om.add_optimizer(AdamW(rest if kind else model, lr=1e-4, offload=share))
    ids = torch.randint(0, VOCAB, (BATCH, SEQ), device=next(model.parameters()).device)
    took = []
    for i in range(args.steps):
        if GPU:
            torch.cuda.synchronize()
            if i == 2: torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        om.zero_grad()
        om.backward(model(input_ids=ids, labels=ids, use_cache=False).loss)
        om.step()
        if GPU: torch.cuda.synchronize()
        took.append(time.perf_counter() - start)
    peak = torch.cuda.max_memory_allocated() if GPU else 0
    step = statistics.median(took[2:])
    planned = f"planned {plan.step_s:.3f} s, {format_bytes(plan.peak_bytes)}, host {format_bytes(plan.host_bytes)}"
    print(f"{name}: {step:.3f} s, {format_bytes(peak)}; {planned}", flush=True)


for name, (kind, share) in WAYS.items():
    run(name, kind, share)
    gc.collect()
    if GPU: torch.cuda.empty_cache()

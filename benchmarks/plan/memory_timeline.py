"""A step's memory as planned, over the allocator's own record of it: peaks, whose the difference is, and a picture.

usage: python benchmarks/plan/memory_timeline.py [--tiny] [--pictures FOLDER]

An 8B-like decoder of 16 blocks in bf16, trained in full by `offload.AdamW` with half of its state on the host, and its
LoRA, each plain and with every block recomputed. For each: the plan's peak, the peak of the snapshot, that of
`torch.cuda.max_memory_allocated`, the share of planned bytes found among the allocations, and the three modules
that differ most. --tiny: sizes for a CPU.
"""
import argparse, gc
from pathlib import Path

import torch
import transformers as tf

from bmlab.all import AdamW, Lora, format_bytes, plan_training, record_memory, shard

p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
p.add_argument("--tiny", action="store_true", help="sizes for a CPU")
p.add_argument("--pictures", type=Path, help="a folder for a PNG of each")
args = p.parse_args()
GPU = torch.cuda.is_available()
D, LAYERS, BATCH, SEQ, VOCAB = (64, 2, 2, 32, 512) if args.tiny else (4096, 16, 4, 1024, 32768)


def run(name, lora, checkpoint):
    config = tf.LlamaConfig(
        vocab_size=VOCAB, hidden_size=D, intermediate_size=7 * D // 2, num_hidden_layers=LAYERS,
        num_attention_heads=D // 32, num_key_value_heads=D // 128 or 1)
    with torch.device("cuda" if GPU else "cpu"): model = tf.LlamaForCausalLM(config).to(torch.bfloat16)
    if lora: Lora(model, r=16, modules=["q_proj", "k_proj", "v_proj", "o_proj"]).freeze()
    share = 0.0 if lora else 0.5
    plan = plan_training(model, BATCH, SEQ, checkpoint=checkpoint, offload=share, machine="h200", sharded=False)
    shard(model, checkpoint=checkpoint)
    opt = AdamW(model, lr=1e-5, offload=share)
    ids = torch.randint(0, VOCAB, (BATCH, SEQ), device=next(model.parameters()).device)
    def step():
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        opt.step()
        opt.zero_grad()
    for _ in range(2): step()
    opt.flush()
    if GPU: torch.cuda.reset_peak_memory_stats()
    shown = plan.timeline(record_memory(step, held=[model, opt]))
    peak = torch.cuda.max_memory_allocated() if GPU else shown.peak_bytes
    peaks = {"planned": plan.peak_bytes, "snapshot": shown.peak_bytes, "torch": peak}
    said = ", ".join(f"{n} {format_bytes(b)}" for n, b in peaks.items())
    print(f"{name}: {said}; found {shown.matched:.0%}")
    print((shown.table[["planned", "measured", "difference"]].head(3) / 2**20).round(1).to_string(), flush=True)
    if args.pictures:
        args.pictures.mkdir(parents=True, exist_ok=True)
        (args.pictures / f"{name.replace(' ', '_').replace(',', '')}.png").write_bytes(shown.png())


for lora in (False, True):
    for checkpoint in (False, True):
        run(f"{'LoRA' if lora else 'in full'}{', recomputed' * checkpoint}", lora, checkpoint)
        gc.collect()
        if GPU: torch.cuda.empty_cache()

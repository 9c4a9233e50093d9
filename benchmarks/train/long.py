"""Long rows on one GPU, the plan printed first: an 8B LLaMA shape with LoRA of rank 16 on every linear layer.

usage: python benchmarks/train/long.py [--runs NAME …] [--tiny]

16k, PEFT      bf16 base, 1 × 16,384, as its users write it: every layer recomputed, the model's own loss
16k            bmlab's as `benchmarks/delta/lora.py` runs it: compiled, no tiles
16k in 40 GiB  the same inside 40 GiB, by the allocator's own limit, layers recomputed as the plan says
…, tiles       with MLPs by tiles, which the compiler leaves out
340k, int4     int4 base, 1 × 344,064 tokens in a row, in 80 GB: MLPs and norms by tiles, every layer recomputed, its
               input on the host (the plan says how much), the loss by chunks; one step
packed         16k of short documents: attention within each, beside transformers' own mask

Bound: a step's arithmetic, 4 · P · T of the base and, recomputed, 2 · P · T more; attention forward, again and
backward.
At 344k tokens attention is nine tenths of it.
"""
import argparse, sys, time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))
from training import child, clock, keep, leave, llama_8b, plain_step, random_ids, result, show, with_peft

LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
RUNS = ["16k, PEFT", "16k", "16k in 40 GiB", "16k in 40 GiB, tiles", "340k, int4", "packed, own mask", "packed"]
p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
p.add_argument("--runs", nargs="+", default=RUNS)
p.add_argument("--tiny", action="store_true", help="sizes for a CPU")
p.add_argument("--plan", action="store_true", help="print the plans, run nothing")
p.add_argument("--child")
args = p.parse_args()
GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if GPU else torch.device("cpu")
SHORT, LONG = (64, 96) if args.tiny else (16_384, 344_064)
TILE = 16 if args.tiny else 4096
CONFIG = llama_8b(args.tiny, vocab=512)


@torch.no_grad()
def llama(bits=None, device=DEVICE):
    "Random weights, a layer at a time on the device, packed before the next one comes; on meta shapes alone"
    import transformers as tf
    from bmlab.all import pack_linears
    torch.manual_seed(0)
    with torch.device("meta"): model = tf.LlamaForCausalLM(CONFIG).bfloat16().train()
    if device.type != "meta": model.model.rotary_emb = type(model.model.rotary_emb)(CONFIG).to(device)
    layers = [(f"model.layers.{i}", bits) for i in range(CONFIG.num_hidden_layers)]
    for name, pack in (("model.embed_tokens", None), *layers, ("model.norm", None), ("lm_head", None)):
        part = model.get_submodule(name).to_empty(device=device)
        for _, w in part.named_parameters():
            if device.type != "meta": w.fill_(1) if w.ndim == 1 else w.normal_(0, .02)
        if pack: pack_linears(part, bits=pack, modules=LAYERS)
    return model


def tuned(name, device=DEVICE):
    "(model, delta) of a run"
    from bmlab.all import Lora
    from bmlab.train.long import document_attention, tile
    model = llama(4 if "int4" in name else None, device)
    delta = Lora(model, r=16, modules=LAYERS).freeze()
    if "tiles" in name: tile(model, TILE)
    if "340k" in name: tile(model, 4 * TILE, modules=["mlp", "*norm"])
    if name == "packed": document_attention(model)
    return model, delta


def planned(name, model, machine):
    from bmlab.all import plan_training
    long = "340k" in name
    how = dict(checkpoint=True, move=True) if long else {}
    limit = "40GiB" if "40 GiB" in name else None
    plan = plan_training(
        model, 1, LONG if long else SHORT, machine=machine, memory_limit=limit, offload=None, master=None,
        loss="chunked", compile=GPU and not long, **how)
    print(name, plan, sep="\n", flush=True)
    keep(plan, "long_" + name.replace(", ", "_").replace(" ", "-"), args.tiny)
    return plan


def batches(name, rows, length):
    "Random tokens; for the packed ones documents of random lengths around 1,000 tokens"
    draw = random_ids(CONFIG.vocab_size, rows, length, DEVICE)
    def batch(generator):
        ids = draw(generator)
        if "packed" not in name: return {"input_ids": ids, "labels": ids}
        begins = torch.rand(ids.shape, device=DEVICE, generator=generator) < (1 / 8 if args.tiny else 1 / 1000)
        begins[:, 0] = True
        place = torch.arange(length, device=DEVICE).expand(rows, -1)
        start = torch.where(begins, place, 0).cummax(1)[0]
        labels = ids.masked_fill(begins, -100)
        return {"input_ids": ids, "labels": labels, "position_ids": place - start, "use_cache": False}
    return batch


def peft(name):
    step, tunable = with_peft(llama(), 16, LAYERS)
    result(**clock(step, random_ids(CONFIG.vocab_size, 1, SHORT, DEVICE), DEVICE, warm=2, steps=4), tunable=tunable)


def ours(name):
    from bmlab.all import lm_loss, measure, shard
    long, gpu_limit = "340k" in name, 40 << 30 if "40 GiB" in name else None
    if GPU and gpu_limit:
        torch.cuda.set_per_process_memory_fraction(gpu_limit / torch.cuda.get_device_properties(0).total_memory)
    model, delta = tuned(name)
    plan = planned(name, model, measure() if GPU else "h100-80")
    shard(model, checkpoint=plan.recompute, budget=plan.budget, move=long, compile=GPU and not long)
    opt = torch.optim.AdamW(delta.trainable(), lr=1e-4, fused=True)
    step = plain_step(model, opt, lm_loss)
    began = time.time()
    length, turns = (LONG, dict(warm=0, steps=1)) if long else (SHORT, dict(warm=2, steps=4))
    row = clock(step, batches(name, 1, length), DEVICE, **turns)
    result(
        **row, recomputed=plan.recompute, predicted_s=round(plan.step_s, 3),
        predicted_GiB=round(plan.peak_bytes / 2**30, 2), host_GiB=round(plan.host_bytes / 2**30, 1),
        tokens=length, all_s=round(time.time() - began, 1))


if __name__ == "__main__":
    if args.child:
        (peft if "PEFT" in args.child else ours)(args.child)
        leave()
    if args.plan:
        for name in args.runs:
            if "PEFT" not in name: planned(name, tuned(name, torch.device("meta"))[0], "h100-80")
        sys.exit()
    rows = []
    for name in args.runs:
        tiny = ["--tiny"] if args.tiny else []
        rows.append({"run": name} | child(__file__, "--child", name, *tiny, timeout_s=1200))
        print(rows[-1], flush=True)
    show(rows, "long rows: 8B, LoRA r16 on all linear layers")

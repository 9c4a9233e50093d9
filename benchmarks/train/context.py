"""Rows of 131,072 tokens shared by the GPUs of one host: an 8B LLaMA shape trained in full, ZeRO-3 and cp over all of
them, in bf16 and with float8 linear layers. The plan is printed and kept before each run.

usage: python benchmarks/train/context.py [--gpus 4] [--length 131072] [--runs bf16 fp8] [--tiny]

Every layer is recomputed, the loss is made by chunks, AdamW on bf16 weights with fp32 masters; random tokens. First two
layers of the shape compute one row of `--short` tokens on one rank and on all of them: "apart" is the difference of the
two losses. Bound: 8 · P · tokens, and attention forward twice and backward, over the rate of bf16 products and the
GPUs: "of the bound" says how much of it is reached.
"""
import argparse, sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))
from training import child, clock, keep, leave, llama_8b, plain_step, result, show

p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
p.add_argument("--gpus", type=int, default=4)
p.add_argument("--length", type=int, default=131072)
p.add_argument("--short", type=int, default=8192)
p.add_argument("--runs", nargs="+", default=["bf16", "fp8"])
p.add_argument("--steps", type=int, default=2)
p.add_argument("--tiny", action="store_true", help="sizes for a CPU")
p.add_argument("--child")
args = p.parse_args()
if args.tiny: args.length, args.short = 256, 64


def llama(device, layers=None):
    "The shape in bf16, with room for the rows"
    import transformers as tf
    config = llama_8b(args.tiny, vocab=512)
    config.max_position_embeddings, config.use_cache = args.length, False
    if layers: config.num_hidden_layers = layers
    torch.manual_seed(0)
    with torch.device(device): return tf.LlamaForCausalLM(config).bfloat16().train()


def one_rank_and_all(device, ranks):
    "Difference of the losses of one row by one rank and by all of them, relative"
    from bmlab.all import lm_loss, shard
    model = llama(device, layers=2)
    ids = torch.randint(0, model.config.vocab_size, (1, args.short), device=device,
                        generator=torch.Generator(device).manual_seed(1))
    batch = {"input_ids": ids, "labels": ids}
    with torch.no_grad(): alone = lm_loss(model, batch).item()
    together = lm_loss(shard(model, cp=ranks, checkpoint=True), batch).item()
    return abs(together - alone) / alone


@torch.no_grad()
def fill(model):
    for m in model.modules():
        for n, w in m.named_parameters(recurse=False): w.fill_(1) if w.ndim == 1 else w.normal_(0, .02)


def main(name):
    from bmlab.all import AdamW, fp8, lm_loss, plan_training, shard
    from bmlab.plan.machine import machine
    from bmlab.train.processes import init_distributed, local_device, world_size
    init_distributed(seed=0)
    device, gpu, ranks = local_device(), torch.cuda.is_available(), world_size()
    preset = None if gpu else "h100-80"
    apart = one_rank_and_all(device, ranks)
    if gpu: torch.cuda.empty_cache(), torch.cuda.reset_peak_memory_stats()
    model = llama("meta")
    if name == "fp8": fp8(model, tokens=args.length // ranks, machine=preset)
    plan = plan_training(
        model, 1, args.length, gpus=ranks, cp=ranks, checkpoint=True, offload=None, loss="chunked", machine=preset)
    print(plan, file=sys.stderr)
    keep(plan, f"context_{name}_{ranks}", args.tiny)
    c, P = model.config, sum(w.numel() for w in model.parameters())
    rotary = type(model.model.rotary_emb)(c).to(device)
    shard(model, cp=ranks, checkpoint=True)
    fill(model)
    model.model.rotary_emb = rotary
    opt = AdamW(model, lr=1e-5)
    step = plain_step(model, opt, lambda m, ids: lm_loss(m, {"input_ids": ids, "labels": ids}))
    one = torch.randint(0, c.vocab_size, (1, args.length), device=device,
                        generator=torch.Generator(device).manual_seed(2))
    row = clock(step, lambda g: one, device, warm=1, steps=args.steps)
    products = 8 * P * args.length
    attention = 4.5 * 2 * args.length**2 * c.hidden_size * c.num_hidden_layers     # (causal; forward twice, backward)
    bound = (products + attention) / ranks / machine(preset).flops
    result(
        gpus=ranks, tokens=args.length, **row, predicted_s=round(plan.step_s, 3),
        predicted_GiB=round(plan.peak_bytes / 2**30, 2), tokens_per_s_gpu=round(args.length / ranks / row["step_s"]),
        of_the_bound=round(bound / row["step_s"], 3), apart=f"{apart:.1e}")


if args.child:
    main(args.child)
    leave()
more = ["--length", args.length, "--short", args.short, "--steps", args.steps, *(["--tiny"] if args.tiny else [])]
rows = [{"run": n} | child(__file__, "--child", n, "--gpus", args.gpus, *more, gpus=args.gpus) for n in args.runs]
show(rows, f"context: 8B, a row of {args.length} tokens on {args.gpus} GPUs")

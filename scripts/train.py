"""LoRA or full training of a model on a text, on one process or on as many as torchrun starts, weights and optimizer
spread over them.

alone:             train.py --model smollm2-135m --steps 50 --out tuned
on 4 GPUs:         torchrun --nproc-per-node 4 scripts/train.py --model … --full --zero 3 --out tuned
on several hosts:  HOSTS=2 HEAD=node0 scripts/launch/torchrun.sh scripts/train.py …   (on each of them; Slurm and
Kubernetes: docs/scaling_out.md)
"""
import argparse
from pathlib import Path

import torch

from bmlab.all import *


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", default="smollm2-135m", help="sample, folder or hub name")
    p.add_argument("--text", help="a text file, one text a line (default: sample film reviews)")
    p.add_argument("--full", action="store_true", help="train all weights, not a LoRA")
    p.add_argument("--rank", type=int, default=8, help="LoRA rank")
    p.add_argument("--lr", type=float, help="learning rate (default: 1e-3, with --full 1e-4)")
    p.add_argument("--clip", type=float, default=1.0, help="bound of the gradient norm")
    p.add_argument("--zero", type=int, default=3, choices=[2, 3])
    p.add_argument("--offload", default="auto", help="share of the optimizer on the host, or auto")
    p.add_argument("--batch", type=int, default=4, help="rows a process and micro-batch")
    p.add_argument("--accumulate", type=int, default=1, help="micro-batches a step")
    p.add_argument("--length", type=int, default=64)
    p.add_argument("--steps", type=int, default=50)
    p.add_argument(
        "--out",
        required=True,
        help="folder for the adapter, in PEFT's format, or with --full for the model, in Hugging Face's",
    )
    args = p.parse_args()
    init_distributed(seed=0)
    gpu = local_device().type == "cuda"
    model, tok = load(args.model, device=local_device())
    texts = Path(args.text).read_text(encoding="utf-8").splitlines() if args.text else sample_texts("movies").text
    train, held = split([t for t in texts if t.strip()])
    delta = None if args.full else Lora(model, r=args.rank).freeze()
    shard(model, zero=args.zero, dtype=torch.bfloat16 if gpu else None)
    opt = AdamW(
        model,
        lr=args.lr or (1e-4 if args.full else 1e-3),
        offload=args.offload if args.offload == "auto" else float(args.offload),
    )
    rows = pack_tokens(train, tok, args.length)[rank()::world_size()]        # each process its own rows
    log = fit(
        model,
        Batches(rows, batch=args.batch, seed=rank()),
        opt,
        steps=args.steps,
        clip=args.clip,
        accumulate=args.accumulate,
        held_out=list(Batches(pack_tokens(held[:100], tok, args.length), batch=args.batch, shuffle=False)),
    )
    if delta is not None: delta.save(args.out)
    else: export_hf(model, args.out)
    first, last = log.held_out.dropna().iloc[[0, -1]]
    print_rank(
        f"{world_size()} process{'es' * (world_size() > 1)}, held-out loss {first:.4f} → {last:.4f}, "
        f"{'model' if delta is None else 'adapter'} in {args.out}"
    )
    shutdown()


if __name__ == "__main__": main()

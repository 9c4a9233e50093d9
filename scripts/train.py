"""LoRA on a model and a text, on one process or on as many as torchrun starts.

alone:             train.py --model smollm2-135m --steps 50 --out tuned
on 4 GPUs:         torchrun --nproc-per-node 4 scripts/train.py --model … --out tuned
on several hosts:  torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 scripts/train.py …   (on each host)
"""
import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from bmlab.all import *


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", default="smollm2-135m", help="sample, folder or hub name")
    p.add_argument("--text", help="a text file, one text a line (default: sample film reviews)")
    p.add_argument("--rank", type=int, default=8, help="LoRA rank"); p.add_argument("--lr", type=float, default=1e-3)
    p.add_argument("--batch", type=int, default=4, help="rows a process and step"); p.add_argument("--length", type=int, default=64)
    p.add_argument("--steps", type=int, default=50); p.add_argument("--out", required=True, help="folder for the adapter, in PEFT's format")
    args = p.parse_args()
    rank, world, local = (int(os.environ.get(k, d)) for k, d in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0)))
    device = torch.device("cuda", local) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda": torch.cuda.set_device(device)
    if world > 1: dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    set_seed(0)
    model, tok = load(args.model, device=device)
    texts = Path(args.text).read_text(encoding="utf-8").splitlines() if args.text else sample_texts("movies").text
    train, held = split([t for t in texts if t.strip()])
    delta = Lora(model, r=args.rank).freeze()
    runner = DistributedDataParallel(model) if world > 1 else model
    rows = pack_tokens(train, tok, args.length)[rank::world]                 # each process its own rows
    log = fit(runner, Batches(rows, batch=args.batch, seed=rank), torch.optim.AdamW(delta.trainable(), lr=args.lr), steps=args.steps,
              held_out=list(Batches(pack_tokens(held[:100], tok, args.length), batch=args.batch, shuffle=False)))
    if rank == 0:
        delta.save(args.out)
        first, last = log.held_out.dropna().iloc[[0, -1]]
        print(f"{world} process{'es' * (world > 1)}, held-out loss {first:.4f} → {last:.4f}, adapter in {args.out}")
    if world > 1: dist.destroy_process_group()


if __name__ == "__main__": main()

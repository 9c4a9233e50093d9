"""Seconds until ranks have started, imported bmlab.all, met and returned: forked by run_ranks' server, as new
interpreters, by torch.multiprocessing; in turn.

usage: start_of_ranks.py [--ranks 2] [--rounds 3] [--tiny]
"""
import argparse, os, statistics, tempfile, time
from functools import partial
from unittest import mock

import torch
import torch.distributed as dist

from bmlab.train import processes
from bmlab.train.forkserver import start_process
from bmlab.train.processes import run_ranks


def meet():
    import bmlab.all  # noqa: F401
    t = torch.ones(1)
    dist.all_reduce(t)
    return t.item()


def spawned(rank, world_size, folder):
    "A rank of torch.multiprocessing"
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size)
    assert meet() == world_size
    dist.destroy_process_group()


def by_torch(world_size):
    with tempfile.TemporaryDirectory() as folder: torch.multiprocessing.spawn(spawned, (world_size, folder), world_size)


def by_interpreters(world_size):
    with mock.patch.object(processes, "start_process", partial(start_process, fork=False)):
        run_ranks(meet, world_size=world_size)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--ranks", type=int, default=2)
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--tiny", action="store_true", help="one round")
    args = p.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    ways = {"torch.multiprocessing.spawn": by_torch, "new interpreters": by_interpreters}
    ways["run_ranks"] = lambda n: run_ranks(meet, world_size=n)
    start = time.perf_counter()
    run_ranks(meet, world_size=args.ranks)
    print(f"run_ranks, first call (the server imports): {time.perf_counter() - start:.2f} s")
    took = {name: [] for name in ways}
    for _ in range(1 if args.tiny else args.rounds):
        for name, call in ways.items():
            start = time.perf_counter()
            call(args.ranks)
            took[name].append(time.perf_counter() - start)
    fastest = statistics.median(took["run_ranks"])
    for name, seconds in took.items():
        middle = statistics.median(seconds)
        print(f"{name:28} {middle:6.2f} s   {middle / fastest:5.1f} ×   {[round(s, 2) for s in seconds]}")


if __name__ == "__main__": main()

"""AdamW on the host's cores: one pass of C beside torch's operations, alone and while the link copies both ways.

usage: python benchmarks/train/host_adam.py [--tiny]

Masters and moments in float32, weights and gradients in bfloat16, page-locked, as `offload.AdamW` keeps them, updated
in pieces of 8 Mi elements by two threads that share the cores but two. Billions of parameters a second, the better of
two rounds; in GB/s at 28 bytes a parameter; and GB/s that the link keeps, each way. In turn, on the same memory:
torch's fused step between two casts, in chunks of 4 Mi and of 256 Ki; the C of `kernels.cpu_adamw`.
"""
import argparse, os, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pandas as pd
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from bmlab.kernels.cpu_adamw import available, cpu_adamw_
from bmlab.plan.machine import _both_ways, host_threads

p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
p.add_argument("--tiny", action="store_true")
args = p.parse_args()
GPU = torch.cuda.is_available()
N, UNIT = (1 << 22, 1 << 20) if args.tiny else (1 << 29, 1 << 23)
WORKERS, THREADS = host_threads()
HOW = dict(lr=1e-4, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1)


def slab(dtype):
    t = torch.zeros(N, dtype=dtype)
    if GPU and int(torch.cuda.cudart().cudaHostRegister(t.data_ptr(), t.nbytes, 0)): raise MemoryError("page-locking")
    return t


def by_torch(chunk):
    told = dict(lr=1e-4, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1, amsgrad=False, maximize=False)
    scratch = {}
    def update(tensors):
        wide = scratch.setdefault(threading.get_ident(), torch.empty(chunk))
        for weight, grad, master, m, v in zip(*(t.split(chunk) for t in tensors)):
            part = wide[:len(grad)].copy_(grad)
            torch._fused_adamw_([master], [part], [m], [v], [], [torch.tensor(3.0)], **told)
            weight.copy_(master)
    return update


def rate(update, tensors, link=None):
    "(parameters/s, rounds/s of the link)"
    done, stop = [0], threading.Event()
    def copies():
        while not stop.is_set():
            link()
            done[0] += 1
    with ThreadPoolExecutor(WORKERS, initializer=torch.set_num_threads, initargs=(THREADS,)) as pool:
        begin, other = time.perf_counter(), threading.Thread(target=copies)
        if link: other.start()
        list(pool.map(lambda a: update([t[a:a + UNIT] for t in tensors]), range(0, N, UNIT)))
        took = time.perf_counter() - begin
    stop.set()
    if link: other.join()
    return N / took, done[0] / took


def main():
    tensors = [slab(torch.bfloat16), slab(torch.bfloat16), *(slab(torch.float32) for _ in range(3))]
    tensors[1].normal_()
    ways = {"torch, 4 Mi": by_torch(1 << 22), "torch, 256 Ki": by_torch(1 << 18)}
    if available(): ways["one pass"] = lambda t: cpu_adamw_(*t, step=3, threads=THREADS, **HOW)
    link, size = (_both_ways(torch.device("cuda"), 1 << 28), 1 << 28) if GPU else (None, 0)
    rows = {}
    for _ in range(2):
        for name, update in ways.items():
            row = rows.setdefault(name, {"alone": 0.0})
            row["alone"] = max(row["alone"], rate(update, tensors)[0] / 1e9)
            row["GB/s"] = 28 * row["alone"]
            if not GPU: continue
            beside, rounds = rate(update, tensors, link)
            if beside / 1e9 > row.get("beside the link", 0.0): row |= {
                "beside the link": beside / 1e9, "link GB/s": rounds * size / 1e9}
    print(f"{os.cpu_count()} cores, {WORKERS} × {THREADS} threads, {torch.cuda.get_device_name() if GPU else 'no GPU'}")
    print(pd.DataFrame(rows).T.round(2).to_string())


if __name__ == "__main__": main()

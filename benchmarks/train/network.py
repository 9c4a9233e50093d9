"""What the GPUs of a host reach together: an all-gather and a reduce-scatter of several sizes, and the smallest one.

usage: python benchmarks/train/network.py [--gpus 2] [--tiny]

`measure_network`, which plans take for the network's rate; beside it the datasheet's rate that presets have. Bound:
what NVLink moves one way (450 GB/s to an H100 or H200).
"""
import argparse, sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))
from training import child, leave, result, show

p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
p.add_argument("--gpus", type=int, default=2)
p.add_argument("--tiny", action="store_true", help="small sizes")
p.add_argument("--mib", type=int, help=argparse.SUPPRESS)
args = p.parse_args()


def main():
    from bmlab.plan.machine import machine, measure_network, nearest
    from bmlab.train.processes import init_distributed
    init_distributed(seed=0)
    found = measure_network(args.mib << 20)
    about = torch.cuda.get_device_properties(0) if torch.cuda.is_available() else None
    preset = about and nearest(about.name, about.total_memory) or machine("h200")
    GB_s = lambda rate: round(rate / 1e9, 1)
    result(MiB=args.mib, gather_GB_s=GB_s(found.gather), reduce_GB_s=GB_s(found.reduce),
           latency_us=round(1e6 * found.latency, 1), preset_GB_s=GB_s(preset.network))


if args.mib:
    main()
    leave()
sizes = [1, 4] if args.tiny else [16, 64, 256, 1024]
show([child(__file__, "--mib", n, gpus=args.gpus) for n in sizes], f"network: {args.gpus} GPUs")

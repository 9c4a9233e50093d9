"""BMTrain's own examples, run on bmlab from a checkout: after their import lines are changed, nothing else.

usage: original_bmtrain.py CHECKOUT [RANKS]   a git checkout of github.com/OpenBMB/BMTrain with its tags

example/train.py of 0.1.8, 0.2.2, v0.2.3 and v1.0.1 (which asks for tp_size=2, so for two ranks or four). Numbers are
made smaller, so that a CPU is enough: widths, vocabulary, length, steps. Prints the last line of each.
"""
import re, subprocess, sys, tarfile, tempfile
from io import BytesIO
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TAGS = "0.1.8", "0.2.2", "v0.2.3", "v1.0.1"
IMPORTS = {r"^(\s*)import bmtrain as": r"\1import bmlab.bmtrain as", r"^(\s*)from bmtrain": r"\1from bmlab.bmtrain"}
SMALLER = {
    "num_layers=8": "num_layers=2", "dim_model=2560": "dim_model=32", "dim_head=80": "dim_head=8",
    "num_heads=32": "num_heads=4", "dim_ff=8192": "dim_ff=64", "10240": "512", "seq_len = 512": "seq_len = 32",
    "randint(128,": "randint(8,", "range(1000)": "range(14)"}


def run(checkout, tag, ranks, folder):
    "The lines that an example prints"
    archive = subprocess.run(["git", "-C", checkout, "archive", tag, "example"], capture_output=True, check=True).stdout
    tarfile.open(fileobj=BytesIO(archive)).extractall(folder, filter="data")
    for path in Path(folder).rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        for pattern, instead in IMPORTS.items(): text = re.sub(pattern, instead, text, flags=re.M)
        if path.name == "train.py":
            for large, small in SMALLER.items(): text = text.replace(large, small)
        path.write_text(text, encoding="utf-8")
    launch = ["-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "--standalone"] if ranks > 1 else []
    env = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [sys.executable, *launch, "train.py"], cwd=Path(folder, "example"), env=env, capture_output=True, text=True)
    if done.returncode: raise SystemExit(f"{tag} on {ranks} ranks failed:\n{done.stderr[-3000:]}")
    return done.stdout.splitlines()


def main(checkout, ranks=None):
    for tag in TAGS:
        for n in [int(ranks)] if ranks else (1, 2):
            if tag == "v1.0.1" and n % 2: continue
            with tempfile.TemporaryDirectory() as folder: lines = run(checkout, tag, n, folder)
            print(f"{tag} on {n}: {[line for line in lines if line.startswith('| Iter')][-1]}", flush=True)


if __name__ == "__main__": main(*sys.argv[1:])

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


def unpack(checkout, commit, paths, folder):
    "Files of a commit, as they are"
    archive = subprocess.run(["git", "-C", checkout, "archive", commit, *paths], capture_output=True, check=True).stdout
    tarfile.open(fileobj=BytesIO(archive)).extractall(folder, filter="data")


def change_imports(folder, imports=IMPORTS):
    "In all Python files below a folder"
    for path in Path(folder).rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        for pattern, instead in imports.items(): text = re.sub(pattern, instead, text, flags=re.M)
        path.write_text(text, encoding="utf-8")


def started(folder, args, ranks, launch=True):
    "A script that has run to its end, by torchrun if `launch`"
    launcher = ["-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "--standalone"] if launch else []
    env = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return subprocess.run([sys.executable, *launcher, *args], cwd=folder, env=env, capture_output=True, text=True)


def printed(folder, args, ranks=1):
    "The lines that a script prints; one rank needs no launcher"
    done = started(folder, args, ranks, launch=ranks > 1)
    if done.returncode: raise SystemExit(f"{' '.join(args)} on {ranks} ranks failed:\n{done.stderr[-3000:]}")
    return done.stdout.splitlines()


def run(checkout, tag, ranks, folder):
    "The lines that an example prints"
    unpack(checkout, tag, ["example"], folder)
    change_imports(folder)
    script = Path(folder, "example/train.py")
    text = script.read_text(encoding="utf-8")
    for large, small in SMALLER.items(): text = text.replace(large, small)
    script.write_text(text, encoding="utf-8")
    return printed(script.parent, [script.name], ranks)


def main(checkout, ranks=None):
    for tag in TAGS:
        for n in [int(ranks)] if ranks else (1, 2):
            if tag == "v1.0.1" and n % 2: continue
            with tempfile.TemporaryDirectory() as folder: lines = run(checkout, tag, n, folder)
            print(f"{tag} on {n}: {[line for line in lines if line.startswith('| Iter')][-1]}", flush=True)


if __name__ == "__main__": main(*sys.argv[1:])

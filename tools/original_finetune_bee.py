"""CPM-Bee's own finetune_cpm_bee.py, run on bmlab: after import lines are changed, nothing else.

usage: original_finetune_bee.py CHECKOUT [RANKS]   a git checkout of github.com/OpenBMB/CPM-Bee

What is run is src/ of the last commit: preprocess_dataset.py writes the binary data sets, of a small task that is made
here, and finetune_cpm_bee.py trains a small model of random weights on them: all of it, then LoRA on its file. Its own
cpm_live package (models, tokenizer, data sets) comes along. At last its beam search runs on the trained model, and says
what it says on its model of plain torch. Of pkg_resources, which its tokenizers read their word lists with and
setuptools no longer brings, a stand-in of one function lies beside it. Prints the first line and the last two.
"""
import json, random, re, subprocess, sys, tarfile, tempfile
from io import BytesIO
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
IMPORTS = {
    r"^(\s*)import bmtrain as": r"\1import bmlab.bmtrain as", r"^(\s*)from bmtrain": r"\1from bmlab.bmtrain",
    r"^(\s*)from opendelta import": r"\1from bmlab.opendelta import"}
MODEL = dict(vocab_size=86583, dim_model=32, num_heads=4, dim_head=8, dim_ff=64, num_layers=2, dropout_p=0.0, eps=1e-6,
             half=True, position_bias_num_buckets=32, position_bias_num_segment_buckets=32,
             position_bias_max_distance=64)
OPTIONS = ["--model-config", "model.json", "--dataset", "bin/train", "--eval_dataset", "bin/eval", "--batch-size", "4",
           "--max-length", "96", "--save", "results", "--save-name", "bee", "--warmup-iters", "2",
           "--inspect-iters", "3", "--eval-interval", "3", "--loss-scale", "1024", "--train-iters", "100"]
PKG_RESOURCES = """
import importlib.resources
def resource_stream(package, name): return importlib.resources.files(package).joinpath(name).open("rb")
"""
RUNS = {"whole": ["--epoch", "2", "--lr", "0.3"],
        "delta": ["--epoch", "1", "--lr", "0.03", "--use-delta", "--load", "results/bee-best.pt"]}

GENERATE = """
import copy, json
import torch
import bmtrain as bmt
from cpm_live.generation.bee import CPMBeeBeamSearch
from cpm_live.models import CPMBee, CPMBeeConfig, CPMBeeTorch
from cpm_live.tokenizers import CPMBeeTokenizer

bmt.init_distributed(seed=0)
config, tasks = CPMBeeConfig.from_json_file("model.json"), open("raw/eval/eval.jsonl").read().splitlines()
tasks = [json.loads(task) | {"<ans>": ""} for task in tasks[:3]]                    # the same on every rank
model, plain = CPMBee(config), CPMBeeTorch(config)
bmt.load(model, "results/bee-best.pt")
plain.load_state_dict(torch.load("results/bee-best.pt"))
said = [CPMBeeBeamSearch(m, CPMBeeTokenizer()).generate(copy.deepcopy(tasks), max_length=6) for m in (model, plain)]
assert said[0] == said[1], said
bmt.print_rank([task["<ans>"] for task in said[0]])
"""


def extract(checkout, folder):
    "Its src/, and a script that generates, with import lines changed"
    done = subprocess.run(["git", "-C", checkout, "archive", "HEAD", "src"], capture_output=True, check=True)
    tarfile.open(fileobj=BytesIO(done.stdout)).extractall(folder, filter="data")
    Path(folder, "src", "generate.py").write_text(GENERATE)
    for path in Path(folder).rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        for pattern, instead in IMPORTS.items(): text = re.sub(pattern, instead, text, flags=re.M)
        path.write_text(text, encoding="utf-8")
    return Path(folder, "src")


def write_task(folder, lines, seed): # questions of which word stands in a text
    draw, words = random.Random(seed), "sun moon sea hill tree bird fish rain snow wind".split()
    folder.mkdir(parents=True)
    with open(folder / f"{folder.name}.jsonl", "w", encoding="utf-8") as f:
        for _ in range(lines):
            text = draw.sample(words, 4)
            wrong = draw.choice([w for w in words if w not in text])
            answer = draw.randint(0, 1)
            options = [wrong, wrong]
            options[answer] = draw.choice(text)
            task = {"input": " ".join(text), "question": "which?", "<ans>": f"<option_{answer}>",
                    "options": {f"<option_{i}>": o for i, o in enumerate(options)}}
            f.write(json.dumps(task) + "\n")


def run(src, args, ranks=1):
    "The lines that a script prints"
    launch = ["-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "--standalone"] if ranks > 1 else []
    env = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run([sys.executable, *launch, *args], cwd=src, env=env, capture_output=True, text=True)
    if done.returncode: raise SystemExit(f"{' '.join(args)} on {ranks} ranks failed:\n{done.stderr[-3000:]}")
    return done.stdout.splitlines()


def main(checkout, ranks=None):
    with tempfile.TemporaryDirectory() as folder:
        src = extract(checkout, folder)
        (src / "pkg_resources.py").write_text(PKG_RESOURCES)
        (src / "model.json").write_text(json.dumps(MODEL))
        for name, lines in (("train", 48), ("eval", 12)):
            write_task(src / "raw" / name, lines, seed=len(name))
            run(src, ["preprocess_dataset.py", "--input", f"raw/{name}", "--output_path", "bin", "--output_name", name])
        for n in [int(ranks)] if ranks else (1, 2):
            for kind, options in RUNS.items():
                lines = run(src, ["finetune_cpm_bee.py", *OPTIONS, *options], n)
                told = [line for line in lines if line.startswith(("| Epoch", "| Eval"))]
                print(f"{kind} on {n}:", told[0], *told[-2:], sep="\n", flush=True)
            print(f"beam search on {n}:", *run(src, ["generate.py"], n), flush=True)


if __name__ == "__main__": main(*sys.argv[1:])

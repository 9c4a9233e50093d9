"""CPM-Bee's own finetune_cpm_bee.py, run on bmlab: after import lines are changed, nothing else.

usage: original_finetune_bee.py CHECKOUT [RANKS]   a git checkout of github.com/OpenBMB/CPM-Bee

What is run is src/ of the last commit: preprocess_dataset.py writes the binary data sets, of a small task that is made
here, and finetune_cpm_bee.py trains a small model of random weights on them: all of it, then LoRA on its file. Its own
cpm_live package (models, tokenizer, data sets) comes along. At last its beam search runs on the trained model, and says
what it says on its model of plain torch. Of pkg_resources, which its tokenizers read their word lists with and
setuptools no longer brings, a stand-in of one function lies beside it. Prints the first line and the last two.
"""
import json, random, sys, tempfile
from pathlib import Path

from original_bmtrain import IMPORTS, change_imports, printed, unpack

OPENDELTA = {r"^(\s*)from opendelta import": r"\1from bmlab.opendelta import"}
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
    unpack(checkout, "HEAD", ["src"], folder)
    Path(folder, "src", "generate.py").write_text(GENERATE)
    change_imports(folder, IMPORTS | OPENDELTA)
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


def main(checkout, ranks=None):
    with tempfile.TemporaryDirectory() as folder:
        src = extract(checkout, folder)
        (src / "pkg_resources.py").write_text(PKG_RESOURCES)
        (src / "model.json").write_text(json.dumps(MODEL))
        for name, lines in (("train", 48), ("eval", 12)):
            write_task(src / "raw" / name, lines, seed=len(name))
            written = ["--input", f"raw/{name}", "--output_path", "bin", "--output_name", name]
            printed(src, ["preprocess_dataset.py", *written])
        for n in [int(ranks)] if ranks else (1, 2):
            for kind, options in RUNS.items():
                lines = printed(src, ["finetune_cpm_bee.py", *OPTIONS, *options], n)
                told = [line for line in lines if line.startswith(("| Epoch", "| Eval"))]
                print(f"{kind} on {n}:", told[0], *told[-2:], sep="\n", flush=True)
            print(f"beam search on {n}:", *printed(src, ["generate.py"], n), flush=True)


if __name__ == "__main__": main(*sys.argv[1:])

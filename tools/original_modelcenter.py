"""ModelCenter's own models, README and example, run on bmlab: after their import lines are changed, nothing else.

usage: original_modelcenter.py CHECKOUT [RANKS]   a git checkout of github.com/OpenBMB/ModelCenter

What is run is model_center/ of the last commit, on a small task that is made here. First its families: a small model of
random weights is made, runs, gives its state dict, is saved, and loaded by another, which says the same. Then the code
of its README's quick start and examples/bert/finetune_bert.py, from a folder with a model. For what they import besides
bmtrain and is not here, a few lines lie beside them. Prints a line for each family, and of each training the last.
"""
import json, random, re, sys, tempfile
from pathlib import Path

from original_bmtrain import change_imports, printed, unpack
from original_center import FAMILIES, arguments

WORDS = "sun moon sea hill tree bird fish rain snow wind".split()
BERT = dict(vocab_size=32, position_size=32, dim_model=32, num_heads=4, dim_head=8, dim_ff=64, num_layers=2,
            dropout_p=0.0, emb_init_std=0.5, att_init_std=0.1, ffn_init_std=0.1)
OTHERS = {
    "h5py.py": "", "pkg_resources.py": "def require(name): raise ImportError(name)\n", "sklearn/metrics.py":
    "def accuracy_score(true, said): return sum(a == b for a, b in zip(true, said)) / len(true)\n"
    "recall_score = f1_score = None\n"}
README = { # its numbers, and the names that it leaves to the reader
    "bert-base-uncased": "bert", "your_path_to_dataset": "down_data/superglue", "batch_size = 64": "batch_size = 8",
    "max_encoder_length=512": "max_encoder_length=10", "warmup_iter = 100": "warmup_iter = 20",
    "start_lr = 1e-5": "start_lr = 1e-2", "range(5)": "range(12)",
    # models of this commit give the pooler's output where it is asked for, as examples/bert does
    "attention_mask=attention_mask).pooler": "attention_mask=attention_mask, output_pooler_output=True).pooler"}
EXAMPLE = ["finetune_bert.py", "--model-config", "bert", "--base-path", ".", "--dataset_name", "BoolQ", "--batch-size",
           "8", "--lr", "1e-2", "--warmup-iters", "20", "--max-encoder-length", "10", "--loss-scale", "1024"]

MODELS = """
import json, sys
import torch
import bmtrain as bmt
import model_center.model as center

bmt.init_distributed(seed=0)
for name, (kind, config, sizes, given) in json.load(open("families.json")).items():
    kind, config = getattr(center, kind), getattr(center, config)(**sizes)
    given = {k: torch.tensor(v).half() if k == "input_seq" else torch.tensor(v) for k, v in given.items()}
    def say(model):
        with torch.no_grad(): out = model.eval()(**given)
        return out if isinstance(out, torch.Tensor) else next(x for x in out.to_tuple() if x is not None)
    model, other = kind(config), kind(config)
    names = {n for n, _ in model.named_parameters()}
    if name == "vit": # two tables that have no init method: memory as it was found
        for table in (model.patch_embed.cls_token, model.patch_embed.pos_embed): table.data.fill_(.02)
    bmt.init_parameters(model)
    state = model.state_dict()
    assert names <= set(state) if bmt.rank() == 0 else not state, set(state) ^ names
    bmt.save(model, "model.pt")
    bmt.load(other, "model.pt")
    said = say(model)
    assert said.isfinite().all() and torch.equal(said, say(other)), name
    bmt.print_rank(f"{name}: {sum(p.numel() for p in state.values()):,} numbers, says {tuple(said.shape)}")
"""
MADE = """
import json
import bmtrain as bmt
from model_center.model import Bert

bmt.init_distributed(seed=0)
bmt.save(Bert.from_json_file("bert/config.json"), "bert/pytorch_model.pt")
"""


def extract(checkout, folder):
    "model_center/, the example, and as scripts of their own what README and this file say; import lines changed"
    paths = ["model_center", "README.md", "examples/bert/finetune_bert.py"]
    unpack(checkout, "HEAD", paths, folder)
    (folder / "examples/bert/finetune_bert.py").rename(folder / "finetune_bert.py")
    blocks = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(encoding="utf-8"), re.S)
    quick = "\n".join(b for b in blocks if "your/path/to" not in b)       # (the other way to a model)
    for there, here in README.items():
        if there not in quick: raise SystemExit(f"{there!r} does not stand in README.md")
        quick = quick.replace(there, here)
    for name, text in {"quick_start.py": quick, "models.py": MODELS, "made.py": MADE, **OTHERS}.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    change_imports(folder)


def write_task(folder): # BoolQ's form: does the word stand in the text?
    draw = random.Random(0)
    folder.mkdir(parents=True)
    for split, lines in (("train", 96), ("val", 32)):
        with open(folder / f"{split}.jsonl", "w", encoding="utf-8") as f:
            for _ in range(lines):
                text = draw.sample(WORDS, 4)
                task = {"passage": " ".join(text), "question": draw.choice(WORDS), "label": "sun" in text}
                f.write(json.dumps(task) + "\n")


def write_models(folder): # configurations: of all families, of few layers, and of the BERT that is trained
    families = {}
    for name, (kind, config, sizes) in FAMILIES.items():
        few = {k: 2 if k.endswith("num_layers") or k.endswith("coder_layers") else v for k, v in sizes.items()}
        families[name] = kind, config, few | {"half": True}, arguments(name)
    (folder / "families.json").write_text(json.dumps(families))
    (folder / "bert").mkdir()
    (folder / "bert/config.json").write_text(json.dumps(BERT))
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ".", *WORDS]
    (folder / "bert/vocab.txt").write_text("\n".join(words) + "\n")


def main(checkout, ranks=None):
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        extract(checkout, folder)
        write_task(folder / "down_data/superglue/BoolQ")
        write_models(folder)
        printed(folder, ["made.py"])
        for n in [int(ranks)] if ranks else (1, 2):
            print(f"families on {n}:", *printed(folder, ["models.py"], n), sep="\n  ", flush=True)
            for name, script in (("quick start", ["quick_start.py"]), ("finetune_bert.py", EXAMPLE)):
                lines = printed(folder, script, n)
                told = [line for line in lines if "grad_norm" in line]
                right = [line for line in lines if line.startswith("accuracy")]
                print(f"{name} on {n}:", told[0], told[-1], f"{right[0]}, then {right[-1]}", sep="\n  ", flush=True)


if __name__ == "__main__": main(*sys.argv[1:])

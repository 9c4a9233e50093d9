"""A 135M model that judges sentences, cooked until it runs ten times as fast on a CPU: what each method gave, and a dense model of the small shape beside it.

usage: python benchmarks/cook_headline.py [--keep FOLDER] [--rows 4096] [--held 2000] [--layers 2] [--ffn 1024] [--epochs 6] [--score first] [--seed 0] [--threads 2] [--rounds 15] [--tiny]

Task: which sentences of film reviews are good (VADER's ratings of at least 1 either way), the split of benchmarks/delta_quality.py. The original is SmolLM2-135M as a classifier, tuned with LoRA on all
linear layers and merged. Each row of the table is one more method than the row above; every student sees the same rows in the same order for as many steps. Accuracy is on held-out sentences. Speed is of
one process, in turns: the median milliseconds for one sentence of 24 tokens, and sentences a second in batches of 16 x 32 tokens; `faster` is the ratio to the faster of the eager fp32 and bf16 originals
within each round, median over rounds; `cpu_faster` the same by the processor's own time on one thread, which other work on the machine disturbs less. The plan (benchmarks/plans/cook_headline.json) is
written before anything is measured: the ratio of the matrices' work. --keep holds the tuned original and its answers, so that a second call begins with the students.
"""
import argparse, copy, json, sys, time
from pathlib import Path

import pandas as pd
import torch
import torch.nn.functional as F
import transformers as tf
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from bmlab.cook import Cook, bytes_on_disk
from bmlab.core import count, set_seed
from bmlab.data import sample_texts
from bmlab.distill import Distill
from bmlab.kernels import pack_linears
from bmlab.lora import Lora
from bmlab.models import sample_dir
from bmlab.train import fit, model_loss

PAD = 0


def sentences(rows, held):
    "(training texts, labels), (held-out texts, labels)"
    texts = sample_texts("movies")
    texts = texts[texts.rating.abs() >= 1].reset_index(drop=True).sample(frac=1, random_state=0)
    part = lambda t: (t.text.tolist(), torch.tensor((t.rating > 0).to_numpy()).long())
    return part(texts[:rows]), part(texts[4096:][:held])


def batches(tok, texts, labels, size, seed=None, length=48):
    "Dicts of padded rows; alike in length within a batch, the batches in a drawn order, or in order without a seed"
    ids = [i[:length] for i in tok(texts, add_special_tokens=False)["input_ids"]]
    g = torch.Generator().manual_seed(seed or 0)
    order = sorted(range(len(ids)), key=lambda i: (len(ids[i]), i)) if seed is not None else list(range(len(ids)))
    parts = [order[i:i + size] for i in range(0, len(order), size)]
    for k in torch.randperm(len(parts), generator=g).tolist() if seed is not None else range(len(parts)):
        n = max(len(ids[i]) for i in parts[k])
        rows = torch.tensor([ids[i] + [PAD] * (n - len(ids[i])) for i in parts[k]])
        yield {"input_ids": rows, "attention_mask": (torch.arange(n) < torch.tensor([[len(ids[i])] for i in parts[k]])).long(), "labels": labels[parts[k]]}


@torch.no_grad()
def answers(model, data):
    "Logits (N, 2) in the order of the rows"
    return torch.cat([model(input_ids=b["input_ids"], attention_mask=b["attention_mask"]).logits.float() for b in data])


class Remembered(nn.Module):
    "A teacher whose answers were noted: a row of known tokens → its logits"
    def __init__(self, data, logits):
        super().__init__()
        rows = [row[m.bool()] for b in data for row, m in zip(b["input_ids"], b["attention_mask"])]
        self.known = {tuple(r.tolist()): z for r, z in zip(rows, logits)}
    def forward(self, input_ids, attention_mask): return (torch.stack([self.known[tuple(r[m.bool()].tolist())] for r, m in zip(input_ids, attention_mask)]),)


def learn(model, data, steps, rate, params=None, extra=lambda: 0):
    "The model after `steps` steps; the rate rises and falls"
    opt = torch.optim.AdamW([p for p in params or model.parameters() if p.requires_grad], lr=rate, weight_decay=0.01)
    slope = torch.optim.lr_scheduler.OneCycleLR(opt, rate, total_steps=steps + 1, pct_start=0.1)
    def loss(m, b):
        with torch.autocast("cpu", torch.bfloat16): return model_loss(m, b).float() + extra()
    fit(model, data, opt, steps=steps, loss=loss, schedule=slope, clip=1.0, plot=False)
    return model.eval()


def original(args, tok, train):
    "The tuned classifier, merged, in bfloat16; and its answers to the training rows"
    folder = Path(args.keep) if args.keep else None
    if folder and (folder / "config.json").is_file(): model = tf.LlamaForSequenceClassification.from_pretrained(folder, dtype=torch.bfloat16).eval()
    else: model = tuned(args, tok, train)
    if folder and (folder / "answers.pt").is_file(): return model, torch.load(folder / "answers.pt")
    if folder: folder.mkdir(parents=True, exist_ok=True); model.save_pretrained(folder)
    known = answers(model, batches(tok, *train, 64))
    if folder: torch.save(known, folder / "answers.pt")
    return model, known


def tuned(args, tok, train):
    "SmolLM2-135M as a classifier, tuned with LoRA and merged, in bfloat16"
    set_seed(args.seed)
    model = tf.LlamaForSequenceClassification.from_pretrained(sample_dir("smollm2-135m"), num_labels=2, dtype=torch.bfloat16)
    model.config.pad_token_id, model.config.use_cache = PAD, False
    if args.tiny: model.model.layers, model.config.num_hidden_layers = model.model.layers[:6], 6
    lora = Lora(model, r=8, modules=["*_proj"], dtype=torch.float32); lora.freeze(keep="score")
    data = list(batches(tok, *train, 16, seed=args.seed))
    learn(model, data, len(data) * args.teacher_epochs, 1e-3)
    lora.merge()
    return model.eval().requires_grad_(True)


def scaled_down(model, args, methods, data, rate, seed):
    "What a recipe makes of the original in the given steps: the cut model, trained"
    set_seed(seed)
    small = copy.deepcopy(model).float()
    if methods["cut"]: small = methods["cut"](small)
    small.requires_grad_(True)
    if not methods.get("fresh"): small.get_input_embeddings().requires_grad_(False)      # what the original knows of words
    teacher = methods.get("teacher")
    cook = Cook(small, [Distill(teacher, logits=args.weight, T=args.T)]) if teacher is not None else None
    learn(small, data, args.epochs * len(data), rate, extra=cook.loss if cook else lambda: 0)
    return cook.export() if cook else small


def cut(model, layers, ffn, calib, score):
    "Layers, then neurons, taken out for good by bmlab's structural pruning"
    from bmlab.prune import StructPrune
    kept = {"layers": layers} | ({"ffn": ffn} if ffn else {})
    with_cook = Cook(model, [StructPrune(score=score, **kept)], calib=calib)
    return with_cook.export()


def first(model, layers, ffn, calib):
    "The first layers, and of each the neurons that were most active on the calibration batches"
    from bmlab.slicing import slice_model
    keep = {"model.layers": list(range(layers))}
    if ffn:
        energy = {n: 0. for n in (f"model.layers.{i}.mlp.down_proj" for i in range(layers))}
        def add(name): return lambda m, args: energy.__setitem__(name, energy[name] + args[0].detach().float().flatten(0, -2).square().sum(0) * m.weight.detach().float().square().sum(0))
        hooks = [model.get_submodule(n).register_forward_pre_hook(add(n)) for n in energy]
        with torch.no_grad():
            for b in calib: model(input_ids=b["input_ids"], attention_mask=b["attention_mask"])
        for h in hooks: h.remove()
        keep |= {n: e.topk(ffn).indices.sort().values.tolist() for n, e in energy.items()}
    slice_model(model, keep)
    return model


def fresh(model):
    "The same shape, its weights drawn anew"
    new = type(model)(copy.deepcopy(model.config))
    return new.to(next(model.parameters()).dtype)


def plan(layers, ffn):
    "What the ratio of the matrices' work promises: all of it, and per step of the recipe; from shapes alone"
    c = tf.AutoConfig.from_pretrained(sample_dir("smollm2-135m"))
    attention = c.hidden_size * c.head_dim * (2 * c.num_attention_heads + 2 * c.num_key_value_heads)
    work = lambda n, f: n * (attention + 3 * c.hidden_size * f)
    whole, steps = work(c.num_hidden_layers, c.intermediate_size), {f"{layers} layers": work(layers, c.intermediate_size), f"+ {ffn} neurons": work(layers, ffn)}
    return {"multiply-adds a token": whole} | {k: {"multiply-adds a token": v, "times less": round(whole / v, 1)} for k, v in steps.items()}


@torch.no_grad()
def speeds(models, rounds, threads):
    "Median milliseconds of one sentence and sentences a second, in turns; and the CPU's own time with one thread, which other work on the machine disturbs less"
    one, many = torch.randint(5, 40000, (1, 24)), torch.randint(5, 40000, (16, 32))
    def measure(ids, clock, n):
        seen = {k: [] for k in models}
        for r in range(n + 2):
            for k, m in models.items():
                t = clock(); m(input_ids=ids, attention_mask=torch.ones_like(ids)); seen[k].append(clock() - t)
        return pd.DataFrame(seen).iloc[2:]
    out = {}
    for name, ids, n in (("one", one, rounds), ("many", many, max(2, rounds // 3))):
        torch.set_num_threads(threads)
        out[name] = measure(ids, time.perf_counter, n)
        torch.set_num_threads(1)
        out[name + "_cpu"] = measure(ids, time.thread_time, max(2, n // 2))
    torch.set_num_threads(threads)
    return out


def faster(frame):
    "Ratio of the faster original to each, median of the rounds"
    best = frame[["original, fp32", "original, bf16"]].min(axis=1)
    return frame.rdiv(best, axis=0).median()


def accuracy(model, tok, held): return (answers(model, batches(tok, *held, 64)).argmax(-1) == held[1]).float().mean().item()


if __name__ == "__main__":
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers = {"rows": 4096, "held": 2000, "layers": 2, "ffn": 1024, "epochs": 6, "teacher-epochs": 1, "seed": 0, "threads": 2, "rounds": 15, "T": 1., "weight": 2., "rate": 5e-4, "rate-new": 1e-3}
    for name, default in numbers.items(): p.add_argument(f"--{name}", type=type(default), default=default)
    p.add_argument("--score", default="first", help="'first': the first layers and their most active neurons; else the score of StructPrune")
    p.add_argument("--whole", action="store_true", help="the fp32 original's accuracy too"); p.add_argument("--out", help="a .json file for the table")
    p.add_argument("--keep"); p.add_argument("--tiny", action="store_true"); p.add_argument("--stop-after-teacher", action="store_true")
    args = p.parse_args()
    torch.set_num_threads(args.threads)
    if args.tiny: args.rows, args.held, args.layers, args.epochs, args.rounds = 128, 64, 1, 1, 2
    promised = plan(args.layers, args.ffn)
    print("plan:", json.dumps(promised), flush=True)
    if not args.tiny: (Path(__file__).parent / "plans/cook_headline.json").write_text(json.dumps(promised, indent=1) + "\n")
    tok = tf.AutoTokenizer.from_pretrained(sample_dir("smollm2-135m"))
    train, held = sentences(args.rows, args.held)
    start = time.perf_counter()
    model, known = original(args, tok, train)
    right = (answers(model, batches(tok, *held, 64)).argmax(-1) == held[1]).float().mean().item()
    print(f"original: accuracy {right:.4f} held out, {(known.argmax(-1) == train[1]).float().mean():.4f} in training, {time.perf_counter() - start:.0f} s", flush=True)
    if args.stop_after_teacher: sys.exit()
    data = list(batches(tok, *train, 32, seed=args.seed))
    teacher = Remembered(list(batches(tok, *train, 64)), known)
    calib = data[:4]
    taken = (lambda n, f: lambda m: first(m, n, f, calib)) if args.score == "first" else lambda n, f: lambda m: cut(m, n, f, calib, args.score)
    ladder = {f"{args.layers} layers": dict(cut=taken(args.layers, None)),
              f"+ {args.ffn} neurons": dict(cut=taken(args.layers, args.ffn)),
              "+ distillation": dict(cut=taken(args.layers, args.ffn), teacher=teacher),
              "the same shape, from nothing": dict(cut=lambda m: fresh(taken(args.layers, args.ffn)(m)), fresh=True),
              "from nothing + distillation": dict(cut=lambda m: fresh(taken(args.layers, args.ffn)(m)), fresh=True, teacher=teacher)}
    models, rows = {"original, fp32": copy.deepcopy(model).float(), "original, bf16": model}, {}
    for i, (name, methods) in enumerate(ladder.items()):
        t = time.perf_counter()
        small = scaled_down(model, args, methods, data, args.rate if i < 3 else args.rate_new, args.seed)
        rows[name] = {"accuracy": accuracy(small, tok, held), "trained_s": round(time.perf_counter() - t)}
        print(name, rows[name], flush=True)
        models[name] = small
        if name == "+ distillation":
            models["+ bf16"] = copy.deepcopy(small).bfloat16(); models["+ int8"] = pack_linears(copy.deepcopy(small).bfloat16(), modules=["*_proj", "embed_tokens"])
    for name in ("+ bf16", "+ int8"): rows[name] = {"accuracy": accuracy(models[name], tok, held)}
    rows["original, bf16"] = {"accuracy": right}
    if args.whole: rows["original, fp32"] = {"accuracy": accuracy(models["original, fp32"], tok, held)}
    seen = speeds(models, args.rounds, args.threads)
    ratios = {kind: faster(frame) for kind, frame in seen.items()}
    frame = pd.DataFrame({k: {"accuracy": (right_k := rows.get(k, {}).get("accuracy", float("nan"))), "of_original": right_k / right, "parameters_M": count(m).total / 1e6, "file_MB": bytes_on_disk(m) / 1e6,
                              "one_ms": seen["one"][k].median() * 1e3, "sentences_s": 16 / seen["many"][k].median(), "faster_one": ratios["one"][k], "faster_many": ratios["many"][k],
                              "cpu_faster_one": ratios["one_cpu"][k], "cpu_faster_many": ratios["many_cpu"][k]} for k, m in models.items()}).T
    print(frame.round(3).to_string())
    if args.out: frame.to_json(args.out, orient="index", indent=1)

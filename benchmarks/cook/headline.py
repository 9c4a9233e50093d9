"""A 135M model that judges sentences, cooked until it runs ten times as fast: what each method gave, and a dense model
of the small shape beside it.

usage: python benchmarks/cook/headline.py [--keep FOLDER] [--layers 2] [--ffn 1024] [--epochs 6] [--seeds 0 1 2]
                                          [--time cpu cuda] [--threads 2] [--out FILE.json] [--tiny] …
       quietly, on two cores, after a first call with --keep:  taskset -c 0,1 python benchmarks/cook/headline.py
       --keep FOLDER --time cpu

Task: which sentences of film reviews are good (VADER's ratings of at least 1 either way), the split of
benchmarks/delta/quality.py. The original is SmolLM2-135M as a classifier, tuned with LoRA on all linear layers and
merged. Each row is one more method than the row above; every student sees the same rows in the same order for as
many steps. Accuracy is on held-out sentences, the mean over seeds (`least`: the worst). Speed is of one process, in
turns, after warm-ups: milliseconds of one sentence of 24 tokens, and sentences a second in a large batch of 32
tokens; `faster` is the ratio to the fastest eager original within each round (CPU: of fp32 and bf16; GPU: bf16, by
events), median over rounds; `step` the ratio to the row above. `cpu_time`: by the processor's own time on one
thread, which other work on the machine disturbs less. On a GPU all is bf16, and each model runs eagerly and as a
CUDA graph. --compile: the cooked model compiled, too. The plan (benchmarks/plans/cook_headline.json) is written
before anything is measured: the ratio of the matrices' work. --keep holds the tuned original, its answers and the
students, so that a second call only measures. --minutes: no student is begun when less is left than the longest
took.
"""
import argparse, copy, json, sys, time
from pathlib import Path

import pandas as pd
import torch
import transformers as tf
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from bmlab.cook.cook import Cook
from bmlab.cook.report import bytes_on_disk
from bmlab.core import count, set_seed
from bmlab.data.samples import sample_texts
from bmlab.cook.distill import Distill
from bmlab.kernels.layers import pack_linears
from bmlab.delta.lora import Lora
from bmlab.models.load import sample_dir
from bmlab.cook.prune import StructPrune
from bmlab.cook.structure import slice_model
from bmlab.train.loop import eval_mode, fit, model_loss, to_device

PAD = 0
ORIGINALS = ("original, fp32", "original, bf16")
FROM_NOTHING = ("the same shape, from nothing", "from nothing + distillation")


def sentences(args):
    "(training texts, labels), (held-out texts, labels)"
    texts = pd.read_json(Path(args.texts) / "movies.json", orient="records") if args.texts else sample_texts("movies")
    texts = texts[texts.rating.abs() >= 1].reset_index(drop=True).sample(frac=1, random_state=0)
    part = lambda t: (t.text.tolist(), torch.tensor((t.rating > 0).to_numpy()).long())
    return part(texts[:args.rows]), part(texts[4096:][:args.held])


def batches(tok, texts, labels, size, seed=None, length=48):
    "Dicts of padded rows; alike in length within a batch, the batches in a drawn order, or in order without a seed"
    ids = [i[:length] for i in tok(texts, add_special_tokens=False)["input_ids"]]
    g = torch.Generator().manual_seed(seed or 0)
    order = sorted(range(len(ids)), key=lambda i: (len(ids[i]), i)) if seed is not None else list(range(len(ids)))
    parts = [order[i:i + size] for i in range(0, len(order), size)]
    for k in torch.randperm(len(parts), generator=g).tolist() if seed is not None else range(len(parts)):
        n = max(len(ids[i]) for i in parts[k])
        rows = torch.tensor([ids[i] + [PAD] * (n - len(ids[i])) for i in parts[k]])
        yield {"input_ids": rows,
               "attention_mask": (torch.arange(n) < torch.tensor([[len(ids[i])] for i in parts[k]])).long(),
               "labels": labels[parts[k]]}


@torch.no_grad()
def answers(model, data):
    "Logits (N, 2) in the order of the rows, on the CPU"
    with eval_mode(model):
        return torch.cat([model(**to_device({k: v for k, v in b.items() if k != "labels"},
                                            model.device)).logits.float().cpu()
                          for b in data])


def accuracy(model, tok, held):
    return (answers(model, batches(tok, *held, 64)).argmax(-1) == held[1]).float().mean().item()


class Remembered(nn.Module):
    "A teacher whose answers were noted: a row of known tokens → its logits"
    def __init__(self, data, logits, device):
        super().__init__()
        rows = [row[m.bool()] for b in data for row, m in zip(b["input_ids"], b["attention_mask"])]
        self.known = {tuple(r.tolist()): z for r, z in zip(rows, logits)}
        self.register_buffer("home", torch.empty(0, device=device))
    def forward(self, input_ids, attention_mask):
        rows = [tuple(r[m.bool()].tolist()) for r, m in zip(input_ids.cpu(), attention_mask.cpu())]
        return (torch.stack([self.known[r] for r in rows]).to(self.home.device),)


def learn(model, data, steps, rate, extra=lambda: 0):
    "The model after `steps` steps; the rate rises and falls"
    opt = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=rate, weight_decay=0.01)
    slope = torch.optim.lr_scheduler.OneCycleLR(opt, rate, total_steps=steps + 1, pct_start=0.1)
    def loss(m, b):
        with torch.autocast(m.device.type, torch.bfloat16): return model_loss(m, b).float() + extra()
    fit(model, data, opt, steps=steps, loss=loss, schedule=slope, clip=1.0, plot=False)
    return model.eval()


def classifier(args):
    "SmolLM2-135M with a new head, in bfloat16"
    where, options = args.model or sample_dir("smollm2-135m"), dict(num_labels=2, dtype=torch.bfloat16)
    set_seed(0)
    if not args.tiny: model = tf.LlamaForSequenceClassification.from_pretrained(where, **options)
    else:
        shape = dict(hidden_size=32, intermediate_size=96, num_hidden_layers=6, num_attention_heads=4,
                     num_key_value_heads=2)
        model = tf.LlamaForSequenceClassification(tf.LlamaConfig(vocab_size=49152, num_labels=2, **shape)).bfloat16()
    model.config.pad_token_id, model.config.use_cache = PAD, False
    return model


def original(args, tok, train):
    "The classifier, tuned with LoRA and merged, in bfloat16; and its answers to the training rows"
    folder = Path(args.keep) if args.keep else None
    if folder and (folder / "answers.pt").is_file():
        return tf.LlamaForSequenceClassification.from_pretrained(folder, dtype=torch.bfloat16).to(
            args.device
        ).eval(), torch.load(folder / "answers.pt")
    model = classifier(args).to(args.device)
    lora = Lora(model, r=8, modules=["*_proj"], dtype=torch.float32)
    lora.freeze(keep="score")
    data = list(batches(tok, *train, 16, seed=0))
    learn(model, data, len(data) * args.teacher_epochs, 1e-3)
    lora.merge()
    model, known = model.eval().requires_grad_(True), answers(model, batches(tok, *train, 64))
    if folder:
        model.save_pretrained(folder)
        torch.save(known, folder / "answers.pt")
    return model, known


def cut(model, layers, ffn, calib, score):
    "Layers, and neurons, taken out for good by bmlab's structural pruning"
    return Cook(model, [StructPrune(score=score, layers=layers, **({"ffn": ffn} if ffn else {}))], calib=calib).export()


@torch.no_grad()
def first(model, layers, ffn, calib):
    "The first layers, and of each the neurons that were most active on the calibration batches"
    keep = {"model.layers": list(range(layers))}
    if ffn:
        energy = {n: 0. for n in (f"model.layers.{i}.mlp.down_proj" for i in range(layers))}
        def add(name):
            return lambda m, args: energy.__setitem__(
                name, energy[name] + args[0].float().flatten(0, -2).square().sum(0) * m.weight.float().square().sum(0)
            )
        hooks = [model.get_submodule(n).register_forward_pre_hook(add(n)) for n in energy]
        for b in calib: model(**to_device({k: v for k, v in b.items() if k != "labels"}, model.device))
        for h in hooks: h.remove()
        keep |= {n: e.topk(ffn).indices.sort().values.tolist() for n, e in energy.items()}
    slice_model(model, keep)
    return model


def student(model, args, data, ffn, seed, teacher=None, fresh=False):
    "What the methods make of the original in the given steps: the cut model, trained; `fresh`: with weights drawn anew"
    set_seed(seed)
    small = copy.deepcopy(model).float()
    small = (first(small, args.layers, ffn, data[:4]) if args.score == "first"
             else cut(small, args.layers, ffn, data[:4], args.score))
    if fresh: small = type(small)(copy.deepcopy(small.config)).to(small.device, torch.float32)
    # what the original knows of words stays
    small.requires_grad_(True).get_input_embeddings().requires_grad_(fresh)
    cook = Cook(small, [Distill(teacher, logits=args.weight, T=args.T)]) if teacher is not None else None
    learn(small, data, args.epochs * len(data), args.rate_new if fresh else args.rate, cook.loss if cook else lambda: 0)
    return cook.export() if cook else small


def finished(small):
    "The last two methods, which need no training"
    return {"+ bf16": copy.deepcopy(small).bfloat16(),
            "+ int8": pack_linears(copy.deepcopy(small).bfloat16(), modules=["*_proj", "embed_tokens"])}


def plan(args):
    "What the ratio of the matrices' work promises: all of it, and per step of the recipe; from shapes alone"
    c = tf.AutoConfig.from_pretrained(args.model or sample_dir("smollm2-135m"))
    attention = c.hidden_size * c.head_dim * (2 * c.num_attention_heads + 2 * c.num_key_value_heads)
    work = lambda n, f: n * (attention + 3 * c.hidden_size * f)
    whole = work(c.num_hidden_layers, c.intermediate_size)
    steps = {f"{args.layers} layers": work(args.layers, c.intermediate_size),
             f"+ {args.ffn} neurons": work(args.layers, args.ffn)}
    return {"multiply-adds a token": whole} | {k: {"multiply-adds a token": v, "times less": round(whole / v, 1)}
                                               for k, v in steps.items()}


def students(args, tok, train, held):
    "({name: model of the first seed}, {name: accuracies}): the original and the ladder"
    start = time.perf_counter()
    model, known = original(args, tok, train)
    rows = {"original, bf16": [accuracy(model, tok, held)]} | (
        {"original, fp32": [accuracy(copy.deepcopy(model).float(), tok, held)]} if args.device == "cuda" else {}
    )
    learnt = (known.argmax(-1) == train[1]).float().mean().item()
    print(f"original: accuracy {rows['original, bf16'][0]:.4f} held out, {learnt:.4f} in training, "
          f"{time.perf_counter() - start:.0f} s", flush=True)
    teacher = Remembered(list(batches(tok, *train, 64)), known, args.device)
    ladder = {f"{args.layers} layers": dict(ffn=None), f"+ {args.ffn} neurons": dict(ffn=args.ffn),
              "+ distillation": dict(ffn=args.ffn, teacher=teacher), FROM_NOTHING[0]: dict(ffn=args.ffn, fresh=True),
              FROM_NOTHING[1]: dict(ffn=args.ffn, fresh=True, teacher=teacher)}
    models, longest = {"original, bf16": model}, 0.
    for seed in args.seeds:
        data = list(batches(tok, *train, 32, seed=seed))
        for name, methods in ladder.items():
            if time.perf_counter() - start + longest > args.minutes * 60:
                print(f"{name}, seed {seed}: no time left", flush=True)
                continue
            t = time.perf_counter()
            small = student(model, args, data, seed=seed, **methods)
            longest = max(longest, time.perf_counter() - t)
            made = {name: small} | (finished(small) if name == "+ distillation" else {})
            for k, m in made.items():
                rows.setdefault(k, []).append(accuracy(m, tok, held))
                models.setdefault(k, m)
                print(f"{k}, seed {seed}: accuracy {rows[k][-1]:.4f}, {time.perf_counter() - t:.0f} s", flush=True)
    return models, rows


def turns(calls, measure, rounds):
    "A column a call, a row a round; three rounds of warming up before"
    seen = {k: [] for k in calls}
    for _ in range(rounds + 3):
        for k, call in calls.items(): seen[k].append(measure(call))
    return pd.DataFrame(seen).iloc[3:]


def timed(clock):
    "A measure by a clock of the processor"
    def measure(call):
        t = clock()
        call()
        return clock() - t
    return measure


def by_events(call):
    "Seconds on the GPU's stream, launches that it waits for included"
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    call()
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop) / 1e3


def graphed(call):
    "The call as one CUDA graph"
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3): call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph): call()
    return graph.replay


def variants(models, ids, compiled):
    "{name: call} of each model on one input; on a GPU as a CUDA graph too; the cooked one compiled, if asked for"
    calls = {k: (lambda m=m: m(input_ids=ids)) for k, m in models.items()}
    more = {f"{k}, graph": lambda c=c: graphed(c) for k, c in calls.items()} if ids.is_cuda else {}
    for k in ("+ bf16",) if compiled and "+ bf16" in models else ():
        fast = torch.compile(copy.deepcopy(models[k]), dynamic=False)
        more[f"{k}, compiled"] = lambda: ((lambda: fast(input_ids=ids)) if not ids.is_cuda
                                          else graphed(lambda: fast(input_ids=ids)))
    for k, make in more.items():
        try:
            call = make()
            call()
        except Exception as e:
            print(f"{k}: {type(e).__name__}: {str(e)[:200]}", flush=True)
            continue
        calls[k] = call
    return calls


@torch.no_grad()
def speeds(models, device, args):
    "{what: seconds, a column a model}, and how many sentences are many; in turns, on a CPU also by one thread's time"
    many = args.many or (256 if device == "cuda" else 16)
    out = {}
    for name, shape, n in (("one", (1, 24), args.rounds), ("many", (many, 32), max(2, args.rounds // 3))):
        calls = variants(models, torch.randint(5, 40000, shape, device=device), args.compile)
        out[name] = turns(calls, by_events if device == "cuda" else timed(time.perf_counter),
                          4 * n if device == "cuda" else n)
        if device == "cuda": continue
        torch.set_num_threads(1)
        out[f"{name}_cpu_time"] = turns(calls, timed(time.thread_time), max(2, n // 2))
        torch.set_num_threads(args.threads)
    return out, many


def table(models, rows, seen, many):
    "Accuracy, size and speed of each row, and what each method gave"
    frame = pd.DataFrame(index=list(seen["one"]))
    base = {k: k.removesuffix(", graph").removesuffix(", compiled") for k in frame.index}
    right = pd.Series({k: rows.get(b) for k, b in base.items()}).dropna()
    frame["accuracy"], frame["least"] = right.map(lambda a: sum(a) / len(a)), right.map(min)
    frame["of_original"] = frame.accuracy / frame.accuracy["original, bf16"]
    frame["parameters_M"] = [count(models[b]).total / 1e6 for b in base.values()]
    frame["file_MB"] = [bytes_on_disk(models[b]) / 1e6 for b in base.values()]
    frame["one_ms"], frame["sentences_s"] = seen["one"].median() * 1e3, many / seen["many"].median()
    for what, t in seen.items():
        frame[f"faster_{what}"] = t.rdiv(t[[k for k in ORIGINALS if k in t]].min(axis=1), axis=0).median()
    steps = frame.faster_one[[k for k, b in base.items() if k == b and k not in ORIGINALS + FROM_NOTHING]]
    frame["step_one"] = steps / steps.shift(fill_value=1.0)
    return frame


def settings():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers = {"rows": 4096, "held": 2000, "layers": 2, "ffn": 1024, "epochs": 6, "teacher-epochs": 1, "threads": 2,
               "rounds": 15, "many": 0}
    numbers |= {"T": 1., "weight": 2., "rate": 5e-4, "rate-new": 1e-3, "minutes": 1e3}
    for name, default in numbers.items(): p.add_argument(f"--{name}", type=type(default), default=default)
    p.add_argument("--model", help="a folder with SmolLM2-135M, if not the cached sample")
    p.add_argument("--texts", help="a folder with movies.json instead of the cached sample")
    p.add_argument("--score", default="first",
                   help="'first': the first layers and their most active neurons; else the score of StructPrune")
    p.add_argument("--seeds", type=int, nargs="+", default=[0])
    p.add_argument("--out", help="a .json file for the results")
    p.add_argument("--keep", help="a folder")
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="where students learn")
    p.add_argument("--time", nargs="*", help="devices to measure on; by default both")
    p.add_argument("--compile", action="store_true", help="the cooked model compiled, too")
    p.add_argument("--tiny", action="store_true")
    args = p.parse_args()
    if args.tiny:
        vars(args).update(rows=128, held=64, layers=1, ffn=64, epochs=1, rounds=2, many=4)
    if args.time is None: args.time = ["cpu"] + ["cuda"] * torch.cuda.is_available()
    return args


def main():
    args = settings()
    torch.set_num_threads(args.threads)
    promised = plan(args)
    print("plan:", json.dumps(promised), flush=True)
    if not args.tiny:
        (Path(__file__).resolve().parents[1] / "plans/cook_headline.json").write_text(json.dumps(promised,
                                                                                                 indent=1) + "\n")
    kept = Path(args.keep) / "students.pt" if args.keep else None
    if kept and kept.is_file(): models, rows = torch.load(kept, weights_only=False, map_location="cpu")
    else:
        tok = tf.AutoTokenizer.from_pretrained(args.model or sample_dir("smollm2-135m"))
        models, rows = students(args, tok, *sentences(args))
        models = {k: m.cpu() for k, m in models.items()}
        if kept:
            kept.parent.mkdir(parents=True, exist_ok=True)
            torch.save((models, rows), kept)
    models = {"original, fp32": copy.deepcopy(models["original, bf16"]).float()} | dict(
        sorted(models.items(), key=lambda kv: kv[0] in FROM_NOTHING)
    )
    found = {"plan": promised, "torch": torch.__version__, "arguments": vars(args), "accuracy": rows}
    for device in args.time:
        name = torch.cuda.get_device_name() if device == "cuda" else f"CPU, {args.threads} threads"
        # in bf16 they are of a shape that is there
        twins = ("original, fp32", "+ distillation", *FROM_NOTHING)
        here = (models if device == "cpu"
                else {k: copy.deepcopy(m).to(device, torch.bfloat16) for k, m in models.items() if k not in twins})
        frame = table(here, rows, *speeds(here, device, args))
        print(f"\n{name}, torch {torch.__version__}\n{frame.round(3).to_string()}", flush=True)
        found[device] = {"name": name, "rows": json.loads(frame.to_json(orient="index"))}
        if args.out: Path(args.out).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__": main()

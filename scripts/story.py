"""From raw text to titles: corpus, shards, plan, pre-training, a delta, cooking, int8, and a table; every size an
argument.

here:              story.py --out story
on an H200:        story.py --out story --more @benchmarks/story/packages.txt --width 768 --layers 12 --heads 12 --ff
2560 --vocab 16000 --every 1 --pages 1 --seq 512 --batch 64 --steps 2600 --dropout 0.1
                   --lr 1.5e-3 --room 96 --tune 800 --tune-rows 96 --tune-lr 1e-3 3e-3 --cook 300 --price 3      (12
                   minutes; with --prepare first, where there is no network on the machine with the GPU)
on 4 GPUs:         torchrun --nproc-per-node 4 scripts/story.py --out story …      (weights and optimizer spread over
them; the last steps run on the first)
"""
import argparse
import copy
import json
import math
import re
import time
from collections import Counter
from pathlib import Path

import pandas as pd
import torch

from bmlab.all import *
from bmlab.app.panels import lead, rouge_l
from bmlab.plan.training import training_cost

LONGEST = 15                                                      # tokens of a title
MADE = ("vocab", "every", "pages", "more", "tasks")               # what corpus, tokenizer and shards are made by
MODULES = ["project_q", "project_k", "project_v", "attention_out", "w_0", "w_1", "w_out"]


def arguments():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument(
        "--out",
        required=True,
        help="folder for everything; a second run keeps the corpus, the tokenizer and the shards, and trains anew",
    )
    for name, default, what in (
        ("width", 128, "of the model"),
        ("layers", 3, ""),
        ("heads", 4, ""),
        ("ff", 320, "width of the network"),
        ("vocab", 2000, "pieces of the tokenizer"),
        ("seq", 64, "tokens of a row"),
        ("batch", 16, "rows of a step, all processes together"),
        ("steps", 600, "of pre-training"),
        ("tune", 300, "steps of the delta"),
        ("rank", 8, "of the delta"),
        ("tune-rows", 24, "texts of such a step"),
        ("room", 32, "tokens of a text that its title is made of"),
        ("cook", 100, "steps of each stair"),
        ("every", 3, "take each so many-th manual"),
        ("pages", 20, "take each so many-th page of help"),
        ("tasks", 2, "parts of the corpus' work"),
        (
            "common",
            3,
            "headings over fewer texts are no titles to learn: a model this small finds a title, it makes up none",
        ),
        ("bits", 8, "of the last model: 8 or 4"),
    ):
        p.add_argument(f"--{name}", type=int, default=default, help=f"{what} ({default})".strip())
    p.add_argument(
        "--more",
        action="append",
        default=[],
        metavar="PACKAGE=PATTERN",
        help="further pages out of a Debian package, such as python3-doc='usr/share/doc/python3*/html/library/*.html', "
             "or @FILE with such lines; may be given several times",
    )
    p.add_argument("--prepare", action="store_true", help="end when corpus, tokenizer and shards are there")
    p.add_argument("--dropout", type=float, default=0., help="of pre-training, where the texts are read many times")
    p.add_argument(
        "--lr",
        type=float,
        default=1e-2,
        help="of pre-training (CPM-Ant's matrices have factors: larger than elsewhere)",
    )
    p.add_argument(
        "--prefix",
        type=float,
        default=0.5,
        help="share of pre-training's rows that begin with context, read from both sides, as a text is whose title is "
             "asked (0.5)",
    )
    p.add_argument(
        "--tune-lr",
        type=float,
        nargs="+",
        help="of the delta (half of --lr); of several the one stays whose titles are best on texts kept aside",
    )
    p.add_argument("--cook-lr", type=float, help="of cooking (half of --lr)")
    p.add_argument("--zero", type=int, default=3, choices=[2, 3])
    p.add_argument("--offload", default="0.5", help="share of the optimizer on the host, or auto")
    p.add_argument("--limit", help="of memory for the last model, such as 16MiB")
    p.add_argument(
        "--price", type=float, default=0.10, help="of an hour of one GPU, or of the machine where there is none"
    )
    args = p.parse_args()
    args.more = [
        line
        for more in args.more
        for line in (Path(more[1:]).read_text(encoding="utf-8").splitlines() if more.startswith("@") else [more])
        if line.strip()
    ]
    if bad := [m for m in args.more if "=" not in m]: p.error(f"--more {bad[0]}: expected PACKAGE=PATTERN")
    args.tune_lr, args.cook_lr = args.tune_lr or [args.lr / 2], args.cook_lr or args.lr / 2
    return args


def corpus(args, out):
    "Cleaned texts, split; the card lies beside them"
    from bmlab.data.corpus import Corpus
    from bmlab.data.recipes import recipe
    pages = sorted(
        fetch_deb("libreoffice-help-en-us", ["usr/share/libreoffice/help/en-US/text/*.html"]).rglob("*.html")
    )
    manuals = Corpus.from_frame(
        sample_texts("manpages-zh")[:: args.every], "manuals", license="several free ones", origin="Debian, manpages-zh"
    )
    raw = manuals + Corpus.from_html(
        pages[:: args.pages], "help", license="MPL-2.0", origin="Debian, libreoffice-help-en-us"
    )
    for package, pattern in (more.split("=", 1) for more in args.more):
        raw = raw + Corpus.from_html(
            sorted(f for f in fetch_deb(package, [pattern]).rglob("*.html") if f.is_file()),
            package,
            license="as the package says",
            origin=f"Debian, {package}",
        )
    cleaned = raw.then(recipe("cpm")).run(out / "corpus", tasks=args.tasks, workers=min(args.tasks, 8))
    print(cleaned.card.waterfall.to_string())
    texts = cleaned.frame().text
    return split(texts, held_out=min(0.12, 600 / len(texts)))


def tokens(args, out, train):
    "A tokenizer learnt from the texts, and their shards"
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = (
        pre_tokenizers.Sequence(
            [pre_tokenizers.Split("[\u3400-\u9fff]+", "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        ),
        decoders.ByteLevel(),
    )
    bpe.train_from_iterator(
        train,
        trainers.BpeTrainer(
            vocab_size=args.vocab,
            special_tokens=["<eod>", "<title>", "<pad>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token="<eod>", pad_token="<pad>", additional_special_tokens=["<title>"]
    ).save_pretrained(out / "tokenizer")
    tokenize(train, PreTrainedTokenizerFast.from_pretrained(out / "tokenizer"), out / "shards")


def sections(texts):
    """(heading, paragraph) pairs, each once: a short line behind the end of something, and a paragraph that is a
    sentence"""
    found = {}
    for text in texts:
        lines = [line.strip() for line in text.split("\n")]
        for before, a, b in zip([""] + lines, lines, lines[1:]):
            a = re.sub(r"^[\d.]+\s+|\s*[¶#]+$", "", a)
            ends = (not before or before[-1] in "。！？!?.:：;；…") and len(b) >= 40 and b[-1] in "。！？!?.:："
            if ends and re.fullmatch(r"[A-Z0-9\u4e00-\u9fff][^\\$@,，。.;；:：<>{}=_|]{1,30}[\w)）?？]", a):
                found.setdefault(b, a)
    return [(a, b) for b, a in found.items()]


class Prefixed:
    """Batches in which a share of the rows begins with context, of any length: CPM-Ant is to read from both sides
    what it is given"""
    def __init__(self, packed, share, seed=0):
        self.packed, self.share, self.rng = packed, share, torch.Generator().manual_seed(seed)

    def __iter__(self):
        for batch in self.packed:
            B, L = batch["labels"].shape
            first = torch.randint(L, (B, 1), generator=self.rng) * (torch.rand(B, 1, generator=self.rng) < self.share)
            yield batch | {"labels": batch["labels"].masked_fill(torch.arange(L) < first, -100)}


class Task:
    "Titles as a task: prompts, batches, what a model says, its score"
    def __init__(self, tok, known, held, most, room, common=0):
        often = Counter(a for a, _ in known)
        title = lambda a: often[a] >= common
        self.tok, self.room, self.known = tok, room, [(a, b) for a, b in known if title(a)]
        self.end, self.mark, self.pad = tok.convert_tokens_to_ids(["<eod>", "<title>", "<pad>"])
        below = {b for _, b in self.known}
        self.asked = [(a, b) for a, b in sections(held) if b not in below and title(a)]
        self.asked = self.asked[::max(len(self.asked) // most, 1)][:most]
        if not self.asked or len(self.known) < 20:
            raise SystemExit(
                f"--common {common}: {len(self.known)} texts with such a heading to learn from and {len(self.asked)} "
                "to ask for; take a smaller number, or more texts"
            )
        self.usual = max(often, key=often.get)
        self.aside = [
            self.known.pop(i)
            for i in reversed(
                range(0, len(self.known), max(len(self.known) // min(most, len(self.known) // 20 + 1), 1))
            )
        ]  # to choose by

    def prompt(self, text): return self.tok(text).input_ids[:self.room] + [self.mark]

    def rows(self, ids):
        "Rows of one length: padded in front, where nothing moves by it"
        x = torch.tensor([[self.pad] * (max(map(len, ids)) - len(i)) + i for i in ids])
        return x, (x != self.pad).long()

    def batch(self, pairs):
        prompts, titles = (
            [self.prompt(b) for _, b in pairs],
            [self.tok(a).input_ids[:LONGEST] + [self.end] for a, _ in pairs],
        )
        x, there = self.rows([p + t for p, t in zip(prompts, titles)])
        said = torch.arange(x.shape[1])[None] >= x.shape[1] - torch.tensor([[len(t)] for t in titles])
        return {"input_ids": x, "attention_mask": there, "labels": x.masked_fill(~said, -100), "context": ~said}

    def lessons(self, n, rows, seed=0):
        g = torch.Generator().manual_seed(seed)
        return [
            self.batch([self.known[i] for i in torch.randint(len(self.known), (rows,), generator=g).tolist()])
            for _ in range(n)
        ]

    def score(self, said, pairs=None):
        return sum(rouge_l(t, a) for t, (a, _) in zip(said, pairs or self.asked, strict=True)) / len(said)

    def nearest(self):
        """For each text that is asked the heading of the most alike text that is known: cosine of rare words' counts,
        no model at all"""
        bags = [Counter(self.prompt(b)[:-1]) for _, b in self.known]
        rare, seen = {t: math.log(len(bags) / n) for t, n in Counter(t for bag in bags for t in bag).items()}, {}
        weigh = lambda bag: {t: n * rare[t] for t, n in bag.items() if t in rare}
        for i, bag in enumerate(bags):
            size = math.sqrt(sum(w * w for w in weigh(bag).values())) or 1.
            for t, w in weigh(bag).items(): seen.setdefault(t, []).append((i, w / size))
        out = []
        for _, b in self.asked:
            alike = Counter()
            for t, w in weigh(Counter(self.prompt(b)[:-1])).items():
                for i, v in seen[t]: alike[i] += w * v
            out.append(self.known[alike.most_common(1)[0][0]][0] if alike else self.usual)
        return out

    @torch.no_grad()
    def said(self, model, pairs=None):
        "What a model says of (heading, text) pairs, those that are asked or others"
        out, pairs = [], pairs or self.asked
        for i in range(0, len(pairs), 50):
            x, there = self.rows([self.prompt(b) for _, b in pairs[i:i + 50]])
            said = model.eval().generate(
                x.to(model.device),
                attention_mask=there.to(model.device),
                max_new_tokens=LONGEST + 1,
                do_sample=False,
                eos_token_id=self.end,
                pad_token_id=self.pad,
            )
            out += [self.tok.decode(o, skip_special_tokens=True).strip() for o in said[:, x.shape[1]:]]
        return out


def learn(model, batches, params, steps, lr, offload=None, cook=None, **options):
    "Adam on a cosine"
    opt = AdamW(params, lr=lr, weight_decay=0.01, offload=offload)
    if cook: cook.follow(opt)
    om = OptimManager(model=model)
    om.add_optimizer(opt, Cosine(opt, warmup_iter=20, end_iter=steps + 20))
    return fit(
        model, batches, om, steps=steps, clip=1.0, plot=False, **({"loss": cook.objective()} if cook else {}), **options
    )


def main():
    args = arguments()
    out, made = Path(args.out), {k: getattr(args, k) for k in MADE}
    if (
        (out / "texts.json").exists()
        and (out / "made.json").exists()
        and (was := json.loads((out / "made.json").read_text(encoding="utf-8"))) != made
    ):
        raise SystemExit(
            f"--out {out} holds corpus, tokenizer and shards of other arguments, {was}, not {made}; give these again, "
            "or another folder"
        )
    init_distributed(seed=0)
    device = local_device()
    gpu = device.type == "cuda"
    if gpu: torch.set_float32_matmul_precision("high")
    if rank() == 0:
        out.mkdir(parents=True, exist_ok=True)
        if not (out / "texts.json").exists():
            train, held = corpus(args, out)
            tokens(args, out, train)
            (out / "made.json").write_text(json.dumps(made), encoding="utf-8")
            (out / "texts.json").write_text(json.dumps([sections(train), held], ensure_ascii=False), encoding="utf-8")
    synchronize()
    if args.prepare: return shutdown()
    from transformers import PreTrainedTokenizerFast
    known, held = json.loads((out / "texts.json").read_text(encoding="utf-8"))
    tok = PreTrainedTokenizerFast.from_pretrained(out / "tokenizer")
    shape = dict(
        vocab_size=len(tok),
        hidden_size=args.width,
        num_attention_heads=args.heads,
        dim_head=args.width // args.heads,
        dim_ff=args.ff,
        num_hidden_layers=args.layers,
        prompt_types=4,
        prompt_length=4,
        position_bias_num_buckets=64,
        position_bias_max_distance=256,
        dropout_p=args.dropout,
        init_std=0.1,
    )
    rows = pack_tokens(held, tok, args.seq)[:96]
    held_rows = list(Batches(rows, batch=16, shuffle=False))
    offload, dtype = args.offload if args.offload == "auto" else float(args.offload), torch.bfloat16 if gpu else None

    here = measure()
    plan = plan_training(
        build("cpm-ant-10b", device="meta", **shape),
        batch=args.batch // world_size(),
        seq=args.seq,
        gpus=world_size(),
        zero=args.zero,
        machine=here,
        dtype=dtype,
        checkpoint=False,
        offload=offload,
        tokens=args.steps * args.batch * args.seq,
        price_per_gpu_hour=args.price,
    )
    print_rank(plan)
    set_seed(0)
    ant = build("cpm-ant-10b", device=device, **shape)
    shard(ant, zero=args.zero, dtype=dtype, checkpoint=False)
    log = learn(
        ant,
        Prefixed(Packed(Shards(out / "shards"), seq=args.seq, batch=args.batch), args.prefix, rank()),
        ant,
        args.steps,
        args.lr,
        offload,
        held_out=[{k: v[rank() :: world_size()] for k, v in b.items()} for b in held_rows],
        every=max(args.steps // 4, 1),
        plan=plan,
    )
    export_hf(ant, out / "ant")
    synchronize()
    first, ranks, task = rank() == 0, world_size(), Task(tok, known, held, 500 if gpu else 150, args.room, args.common)
    shutdown()                                                    # the rest is for one process
    if first: finish(args, out, task, held_rows, log, plan, here, ranks)


def finish(args, out, task, held_rows, log, plan, here, ranks):
    "Delta, cooking, packed weights and the table, on one process"
    from bmlab.models.cpm import CpmAntTied
    log.to_csv(out / "log.csv", index=False)
    print("perplexity at each look:", [round(math.exp(x), 1) for x in log.held_out.dropna()])
    used = {"pre-trained": training_cost(log.seconds.iloc[-1], ranks, here.watts, args.price)}
    beside = [
        ("pre-train", "tokens/s", plan.tokens_s, log.tokens_per_s.median() * ranks),
        ("pre-train", "Wh", 1000 * plan.cost.kwh, 1000 * used["pre-trained"].kwh),
    ]
    ant = CpmAntTied.from_pretrained(out / "ant").to(local_device())
    scores = {
        "first sentence": task.score([lead(b) for _, b in task.asked]),
        "commonest heading": task.score([task.usual] * len(task.asked)),
        "nearest text": task.score(task.nearest()),
        "pre-trained": task.score(task.said(ant)),
    }

    lessons, tried = task.lessons(args.tune, args.tune_rows), []
    for lr in args.tune_lr:
        tuned = copy.deepcopy(ant)
        delta = Lora(tuned, r=args.rank, alpha=16 * args.rank, modules=MODULES).freeze()
        faster = plan_training(tuned, inputs=lessons[0], machine=here, dtype=None, checkpoint=False, offload=0.)
        taught = learn(tuned, lessons, delta.trainable(), args.tune, lr)
        tried.append((task.score(task.said(tuned, task.aside), task.aside), lr, tuned, delta, taught))
        print(
            f"delta at a rate of {lr:g}: loss {taught.loss.tail(20).mean():.3f}, titles of {len(task.aside)} texts "
            f"kept aside {tried[-1][0]:.3f}"
        )
    _, _, tuned, delta, taught = max(tried, key=lambda t: t[0])
    beside.append(("Lora", "tokens/s", faster.tokens_s, taught.tokens_per_s.median()))
    delta.save(out / "titles")
    scores["tuned"], used["tuned"] = (
        task.score(task.said(tuned)),
        training_cost(sum(t[-1].seconds.iloc[-1] for t in tried), 1, here.watts, args.price),
    )

    whole, start = copy.deepcopy(tuned), time.perf_counter()
    for d in deltas(whole).values(): d.merge()
    whole.requires_grad_(True)
    lessons = task.lessons(max(args.cook, 2), args.tune_rows, seed=1)
    cuts = [
        StructPrune(heads=max(args.heads * a // 4, 1), ffn=args.ff * a // 4, steps=max(args.cook // 3, 1))
        for a in (3, 2)
    ]
    small = staircase(
        cuts,
        whole,
        lambda model, cook, i: learn(model, lessons, model.parameters(), args.cook, args.cook_lr, cook=cook),
        lessons[:2],
        methods=lambda i: [Distill(tuned)],
        save=out / "stairs",
    )[-1]
    used["cooked"], said = training_cost(time.perf_counter() - start, 1, here.watts, args.price), task.said(small)
    scores["cooked"] = task.score(said)

    engine = wrap(
        copy.deepcopy(small).to(torch.bfloat16 if small.device.type == "cuda" else small.dtype),
        task.tok,
        memory_limit=args.limit,
        bits=args.bits,
        max_ctx=-(-(task.room + 1 + 24) // 32) * 32,
        max_batch=4,
    )
    print(engine.plan)
    scores["packed"] = task.score(
        [
            t.strip()
            for t in engine.generate(
                [task.prompt(b) for _, b in task.asked], max_new_tokens=LONGEST + 1, temperature=0, stop=("\n",)
            )
        ]
    )
    for _ in range(2):                                            # the first captures the graphs
        # hot, so that it does not come to an end at once
        for _ in engine.stream(task.prompt(task.asked[0][1]), max_new_tokens=24, temperature=2., seed=0): pass
    beside.append(("packed", "tokens/s", *(engine.stats.get(k, math.nan) for k in ("predicted_tok_s", "decode_tok_s"))))
    rows = []
    for stage, m in (("pre-trained", ant), ("tuned", tuned), ("cooked", small), ("packed", engine.model)):
        speed = (
            engine.stats.get("decode_tok_s", math.nan)
            if stage == "packed"
            else decode_speed(m, task.room + 1, 24)["decode_tok_s"]
        )
        row = {
            "stage": stage,
            "parameters": count(m).total,
            "bytes": count(m).bytes,
            "perplexity": perplexity(m, held_rows),
            "title score": scores[stage],
            "tokens/s": speed,
        }
        rows.append(row | ({"Wh": 1000 * used[stage].kwh, "cost": used[stage].money} if stage in used else {}))
    table, beside = (
        pd.DataFrame(rows).set_index("stage"),
        pd.DataFrame(beside, columns=["step", "what", "predicted", "measured"]).assign(
            **{"predicted / measured": lambda t: t.predicted / t.measured}
        ),
    )
    table.to_csv(out / "table.csv")
    beside.to_csv(out / "predicted.csv", index=False)
    print(
        f"{len(task.asked)} titles asked; the first sentence scores {scores['first sentence']:.3f}, {task.usual!r} for "
        f"all of them {scores['commonest heading']:.3f}, the heading of the most alike text "
        f"{scores['nearest text']:.3f}"
    )
    print(table.round(4).to_string())
    print(beside.round(3).to_string())
    for (heading, text), title in list(zip(task.asked, said))[::max(len(said) // 12, 1)]:
        print(f"{title!r} for {heading!r}: {text[:60]!r}")


if __name__ == "__main__": main()

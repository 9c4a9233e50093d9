"""Speculative decoding of a 9.51B decoder: what guesses are worth on real prompts, and what that makes of the speed
where weights stream, and where they stay.

usage: python benchmarks/infer/speculate.py --measure [--tiny]
           on a CPU: SmolLM2-135M answers the prompts below greedily; writes benchmarks/infer/acceptance.json
       python benchmarks/infer/speculate.py [--runs NAME …] [--tiny]
           on a GPU: random weights, the recorded passes replayed

Acceptance: SmolLM2-135M-Instruct in int8 (the kernels that a streamed model decodes with) makes up to 128 tokens for
each prompt; each guesser then follows that text (`bmlab.infer.speculate.replay`). The guessers: prompt look-up (no
weights), with one chain and as a tree; a draft model: the same model without 4 of its 30 layers, not trained again (a
draft that is often wrong), and the same model in int4 (one that is mostly right); look-up and draft in one tree of 16
nodes. No smaller model with this tokenizer can be had without a hub: these two stand for drafts, and are none that a
user would take.

Timing: of the recorded passes the first --passes of each prompt run, whole: the guesser proposes (a draft: SmolLM2's
shape, random weights, on the GPU, inside the limit), the guess is laid out, `step(ids (1, M), keep=False)`, the
sampler looks at all M rows, `keep(n)` with the recorded n. M is always the guesser's full width, and a tree always a
full tree. tok/s = recorded tokens a pass, all passes, over seconds a pass. Plain decoding runs in the same process;
the ratio is to that.
"""
import hashlib, json, re, sys, tempfile, time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))
import inference as I

# "bf16, 6 GiB" takes three times as long
RUNS = ["int8, 6 GiB", "int4, 6 GiB"]
p = I.arguments(__doc__, RUNS)
p.add_argument("--measure", action="store_true", help="measure acceptance instead")
p.add_argument("--new", type=int, default=128, help="tokens that --measure makes for a prompt")
p.add_argument("--passes", type=int, default=12, help="of each prompt that are timed")
args = p.parse_args()
FILE = (
    (Path(tempfile.gettempdir()) / "bmlab-tiny-acceptance.json") if args.tiny
    else Path(__file__).parent / "acceptance.json"
)
CTX = 160 if args.tiny else 544


# ---- prompts ----

def section(name, first, last):
    "Lines of a file of this repository from one that begins so to one that begins so"
    lines = (I.ROOT / name).read_text(encoding="utf-8").splitlines()
    a = next(i for i, l in enumerate(lines) if l.strip().startswith(first))
    b = next(i for i in range(a + 1, len(lines)) if lines[i].strip().startswith(last))
    return "\n".join(l.strip() for l in lines[a:b]).strip()


ZEN = """Beautiful is better than ugly. Explicit is better than implicit. Simple is better than complex. Complex is \
better than complicated. Flat is better than nested. Sparse is better than dense.
Readability counts. Special cases aren't special enough to break the rules. Although practicality beats purity. \
Errors should never pass silently. Unless explicitly silenced."""
CODE = '''def bisect_right(a, x, lo=0, hi=None):
    if lo < 0:
        raise ValueError('lo must be non-negative')
    if hi is None:
        hi = len(a)
    while lo < hi:
        mid = (lo + hi) // 2
        if x < a[mid]:
            hi = mid
        else:
            lo = mid + 1
    return lo'''
LETTER = """Dear Ms. Alvarez, thank you for your order of 24 March. We are sorry to tell you that the blue lamp is out \
of stock until the end of April. You can wait for it, choose the green lamp at the same price, or have
your money back. Please let us know by Friday which of the three you would like. Yours sincerely, Peter Holm, \
Holm & Sons"""
TABLE = """City, country, population, height above the sea
Oslo, Norway, 709037, 23
Bern, Switzerland, 134591, 540
Lima, Peru, 10092000, 154
Quito, Ecuador, 1763275, 2850"""


def prompts():
    "name → text"
    return {
        "licence, quoted": f"{section('LICENSE', '4. Redistribution', '5. Submission')[:1400]}\n\nQuote the conditions "
                           "of the text above, one by one.",
        "zen, as a list": f"{ZEN}\n\nWrite these sentences as a numbered list.",
        "code, renamed": f"{CODE}\n\nRewrite this function with the argument `a` renamed to `values`.",
        "code, explained": f"{CODE}\n\nExplain what this function does.",
        "letter, corrected": f"{LETTER}\n\nRewrite this letter: the red lamp is meant, not the blue one.",
        "letter, summed up": f"{LETTER}\n\nSummarize this letter in two sentences.",
        "table, as JSON": f"{TABLE}\n\nWrite this table as JSON.",
        "question": "Why is the sky blue, and why is it red in the evening?",
        "story": "Write a short story about a lighthouse keeper who finds a letter in a bottle.",
    }


# ---- acceptance ----

def follower(model, length, branches=1):
    "A draft model that follows a text that is there already"
    from bmlab.infer.decode import Decoder
    from bmlab.infer.sampling import Sampler
    from bmlab.infer.speculate import DraftModel
    class Follower(DraftModel):
        def begin(self, decoder, sampler):
            if self.decoder is None: self.decoder = Decoder(self.model, 1, CTX + 32)
            self.decoder.free()
            self.texts, self.full, self.sampler = {}, set(), Sampler()
        def set(self, row, ids):
            self.sampler.start([ids], self.decoder.vocab)
            super().set(row, ids)
    return Follower(model, length, branches)


def guessers(drafts=None):
    "name → guesser, as measured and as timed; drafts: name → a function (length, branches) → guesser"
    from bmlab.infer.speculate import PromptLookup, Tree
    out = {
        "look-up": PromptLookup(length=8, adapt=False),
        "look-up, tree": PromptLookup(length=5, branches=3, adapt=False)
    }
    for name, make in (drafts or {}).items():
        out[name] = make(4, 1)
        out[f"look-up and {name}"] = Tree(PromptLookup(length=8, adapt=False), make(4, 2), nodes=16)
    return out


def drafts_of(model):
    "Small models to guess with: without some layers; in int4"
    import copy
    from bmlab.kernels.layers import arrange_int4, pack_linears
    fewer = copy.deepcopy(model)
    layers = list(fewer.model.layers)
    # in the middle, where models mind least
    gone = set(range(len(layers) // 2, len(layers) // 2 + max(1, len(layers) * 4 // 30)))
    fewer.model.layers = torch.nn.ModuleList([l for i, l in enumerate(layers) if i not in gone])
    for i, l in enumerate(fewer.model.layers): l.self_attn.layer_idx = i
    fewer.config.num_hidden_layers = len(fewer.model.layers)
    if getattr(fewer.config, "layer_types", None):
        fewer.config.layer_types = fewer.config.layer_types[:len(fewer.model.layers)]
    return {
        f"draft without {len(gone)} of {len(layers)} layers": pack_linears(fewer),
        "draft in int4": arrange_int4(pack_linears(copy.deepcopy(model), bits=4)),
    }


def measure():
    from bmlab.infer.decode import Decoder
    from bmlab.infer.fused import fuse_decode
    from bmlab.kernels.layers import pack_linears
    from bmlab.infer.text import decode_tokens, end_ids
    from bmlab.models.stream import prompt_ids
    from bmlab.infer.speculate import replay
    torch.set_grad_enabled(False)
    if args.tiny:
        model, tok, new = I.fill(I.skeleton("tiny")), None, 16
        texts = {n: I.prompt_of(64, 1, 24, i)[0] for i, n in enumerate(list(prompts())[:2])}
    else:
        from bmlab.models.load import load
        (model, tok), new = load("smollm2-135m"), args.new
        texts = {
            n: prompt_ids(tok, [{"role": "user", "content": t}])["input_ids"][0].tolist() for n, t in prompts().items()
        }
    model = model.eval().bfloat16()
    small = drafts_of(model)
    pack_linears(model)
    for m in (model, *small.values()): fuse_decode(m)
    decoder = Decoder(model, 1, CTX)
    everyone = guessers({n: lambda length, branches, m=m: follower(m, length, branches) for n, m in small.items()})
    out = {}
    for name, ids in texts.items():
        begin = time.time()
        made = [
            t[0]
            for t in decode_tokens(
                decoder, [ids], None, min(new, CTX - len(ids)), () if tok is None else end_ids(model, tok)
            )
        ]
        out[name] = {
            "prompt_tokens": len(ids),
            "new_tokens": len(made),
            "sha256": hashlib.sha256(str(ids).encode()).hexdigest()[:12],
            "begins": "" if tok is None else tok.decode(made[:16]),
            "passes": {g: replay(guesser, ids, made)[1:] for g, guesser in everyone.items()},
        }  # (the prompt's own pass is nobody's guess)
        print(
            f"{name}: {len(ids)} + {len(made)} tokens, {time.time() - begin:.0f} s; " + ", ".join(
                f"{g} {(len(made) - 1) / max(len(q), 1):.2f}" for g, q in out[name]["passes"].items()
            ),
            flush=True
        )
    text = json.dumps(
        {
            "model": "random, tiny" if args.tiny else "SmolLM2-135M-Instruct, int8",
            "nodes": {n: g.nodes for n, g in everyone.items()},
            "prompts": out,
        },
        indent=1,
    )
    # (a list of passes on one line)
    FILE.write_text(re.sub(r"\[[\s\d,]+\]", lambda m: re.sub(r"\s+", "", m[0]), text) + "\n", encoding="utf-8")
    print(acceptance(json.loads(FILE.read_text(encoding="utf-8"))))


def acceptance(recorded):
    "Tokens a pass, for each prompt and guesser, as a markdown table"
    rows = [
        {
            "prompt": n,
            "tokens": f"{r['prompt_tokens']} + {r['new_tokens']}"
        } | {g: sum(q) / len(q) for g, q in r["passes"].items() if q}
        for n, r in recorded["prompts"].items()
    ]
    every = {g: [k for r in recorded["prompts"].values() for k in r["passes"][g]] for g in recorded["nodes"]}
    rows.append({"prompt": "all"} | {g: sum(q) / len(q) for g, q in every.items() if q})
    return f"tokens a pass, {recorded['model']}:\n\n" + I.table(
        rows, {"prompt": "prompt", "tokens": "tokens"} | {f"{g} (≤ {n} nodes)": g for g, n in recorded["nodes"].items()}
    )


# ---- timing ----

def plain(decoder, ids, n):
    "Seconds of n tokens behind a prompt, as `decode_tokens` makes them"
    from bmlab.infer.text import decode_tokens
    stats = {}
    for _ in decode_tokens(decoder, [ids], None, n + 1, stats=stats): pass
    return n / stats["decode_tok_s"]


# what a guess looks like at its fullest
CHAINS = {"look-up": (8,), "look-up, tree": (5, 5, 5), "draft": (4,), "look-up and draft": (8, 4, 3)}


# one draft is timed, whatever its acceptance was
def kind(g): return g if g in CHAINS else "look-up and draft" if g.startswith("look-up and") else "draft"


def replayed(decoder, sampler, guesser, g, nodes, ids, passes):
    "Seconds of the recorded passes behind a prompt; what was right is taken to be the first chain's beginning"
    from bmlab.infer.speculate import join, lay_out
    logits = decoder.prefill([ids])
    sampler.start([ids], logits.shape[1], logits.device)
    guesser.begin(decoder, sampler)
    guesser.set(0, ids)
    last = int(sampler(logits)[0])
    guesser.add(0, [last])
    I.sync()
    begin = time.perf_counter()
    for n in passes:
        # takes its time; what it says of random numbers is not used
        guesser.propose([0])
        guess = join(
            last, [[(last + 10 * i + j + 1) % 500 for j in range(length)] for i, length in enumerate(CHAINS[kind(g)])],
            nodes
        )
        batch, mask, depth = lay_out([guess], nodes, decoder.lengths.device)
        tree = {} if mask is None else dict(mask=mask, positions=depth)
        drawn = sampler.look(decoder.step(batch, keep=False, **tree), batch, mask).tolist()
        # as many as were right then, whatever was drawn now
        new = [drawn[0][i] for i in range(n)]
        decoder.keep([list(range(n))] if tree else [n])
        sampler.take(torch.tensor([new], device=batch.device), torch.tensor([n], device=batch.device))
        guesser.add(0, new)
        last = new[-1]
    I.sync()
    return time.perf_counter() - begin


def ours(name):
    from bmlab.infer.engine import wrap
    from bmlab.infer.placement import plan_inference
    from bmlab.infer.sampling import Sampler
    from bmlab.infer.speculate import DraftModel
    torch.set_grad_enabled(False)
    recorded, bits = json.loads(FILE.read_text(encoding="utf-8")), {"int8": 8, "int4": 4}.get(name.split(",")[0])
    model, on_meta = I.skeleton("tiny" if args.tiny else "decoder"), I.skeleton("tiny_small" if args.tiny else "small")
    begin, clock, out = time.perf_counter(), {}, []
    def lap(what):
        "What is known so far: a run that ends early has said that much"
        now = torch.cuda.memory_stats() if torch.cuda.is_available() else {}
        clock[what] = [
            round(time.perf_counter() - begin, 1),
            round(now.get("reserved_bytes.all.current", 0) / I.GiB, 3),
            now.get("num_alloc_retries", 0),
        ]  # seconds, GiB of torch's, times that its memory ran out
        I.result(run=name, **row, rows=out, clock=clock)
    link = I.Link()
    before = link.rate()
    common = dict(bits=bits, max_ctx=CTX, draft=on_meta, machine=I.machine())
    limit = (
        (lambda p: (p.min_bytes + p.peak_bytes) // 2)(plan_inference(model, None, **common)) if args.tiny else "6GiB"
    )
    plan = plan_inference(model, limit, **common)
    I.keep(plan, f"speculate_{name.split(',')[0]}", args.tiny)
    row = {"plan": plan.sentence(), "link_gb_s": before / I.GB}
    lap("planned")
    I.fill(I.pack(model, bits))
    small = I.fill(on_meta, I.device())
    lap("filled")
    e = wrap(model, None, limit, **common | dict(draft=small))
    lap("wrapped")
    who = guessers({"draft": lambda length, branches: DraftModel(small, length, branches)})
    d, sampler, reader = e.decoder, Sampler(), None
    most = args.passes
    cases = [
        (I.prompt_of(d.vocab, 1, r["prompt_tokens"], i)[0], r["passes"])
        for i, r in enumerate(recorded["prompts"].values())
    ]
    # one in each size of what attention is shown: graphs are captured
    warm = [I.prompt_of(d.vocab, 1, n)[0] for n in (32, 300, 512) if n <= CTX - 20]
    for ids in warm: plain(d, ids, 2)
    row |= {
        "graph": "graph" if d.graph else d.why_eager,
        "copied_gb_per_pass": (e.streamer.pass_bytes if e.streamer else 0) / I.GB
    }
    lap("warm")
    row["plain_tok_s"] = sum(most for _ in cases) / sum(plain(d, ids, most) for ids, _ in cases)
    row["predicted_plain_tok_s"] = without_draft(plan).tokens_per_s(1, 1.0, 256)
    lap("plain")
    for g, nodes in recorded["nodes"].items():
        guesser, passes = who[kind(g)], [q[g] for _, q in cases]
        drafts = [x for x in (guesser, *getattr(guesser, "drafts", ())) if isinstance(x, DraftModel)]
        # one cache, and one set of graphs, for all that guess with the small model
        for x in drafts: x.decoder = reader
        for ids in warm: replayed(d, sampler, guesser, g, nodes, ids, [1, 1])
        # what a draft reads after a pass is as wide as that was right: a graph for each width
        for (ids, _), q in zip(cases, passes): replayed(d, sampler, guesser, g, nodes, ids, q[:most])
        reader = drafts[0].decoder if drafts else reader
        lap(f"{g}, warm")
        took = sum(
            replayed(d, sampler, guesser, g, nodes, ids, q[:most]) for (ids, _), q in zip(cases, passes)
        ) / sum(len(q[:most]) for q in passes)
        each = sum(map(sum, passes)) / sum(map(len, passes))
        said = (plan if drafts else without_draft(plan)).tokens_per_s(1, each, 256, nodes, levels=4)
        out.append({
            "run": name, "guesser": g, "tok_s": each / took, "tokens/pass": each, "ms/pass": 1e3 * took,
            "times plain": each / took / row["plain_tok_s"], "predicted_tok_s": said
        })
        lap(g)


def without_draft(plan):
    import dataclasses
    return dataclasses.replace(plan, draft_step=None)


def main():
    if args.measure: return measure()
    if args.child:
        ours(args.child)
        return I.leave()
    if args.tiny and not FILE.exists(): measure()
    rows = []
    for name in args.runs:
        row = I.child(
            __file__, "--child", name, "--passes", args.passes, *(["--tiny"] if args.tiny else []),
            timeout_s=args.timeout, budget_s=args.budget
        )
        head = {
            "run": name,
            "guesser": "none: plain decoding",
            "tok_s": row.get("plain_tok_s"),
            "predicted_tok_s": row.get("predicted_plain_tok_s"),
            "tokens/pass": 1.0,
            "times plain": 1.0,
            "error": row.get("error"),
            "ms/pass": 1e3 / row["plain_tok_s"] if "plain_tok_s" in row else None,
            "driver_gib": row.get("driver_gib"),
            "plan": row.get("plan"),
            "graph": row.get("graph"),
            "run_s": row["run_s"],
        }
        rows += [head, *row.get("rows", [])]
        print({k: v for k, v in row.items() if k != "rows"}, flush=True)
    I.report(
        f"infer speculate: {'tiny' if args.tiny else '9.51B'} decoder, recorded passes replayed", rows,
        {
            "": "run",
            "guesser": "guesser",
            "tokens a pass": "tokens/pass",
            "ms a pass": "ms/pass",
            "tok/s": "tok_s",
            "predicted": "predicted_tok_s",
            "times plain": "times plain",
            "peak GiB, driver": "driver_gib",
            "notes": lambda r: r.get("error") or (r["graph"] if r.get("graph") not in (None, "graph") else "")
        },
        acceptance(json.loads(FILE.read_text(encoding="utf-8")))
    )


if __name__ == "__main__": main()

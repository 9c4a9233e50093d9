"""What each method of cook costs SmolLM2-135M on real text: perplexity on held-out film reviews before and after, and
what distillation brings back.

usage: python benchmarks/cook/quality.py [--rows NAME …] [--model FOLDER] [--texts FOLDER] [--out FILE.json]
                                         [--minutes 2] [--batch 32] [--length 256] [--hidden 0] [--rate 3e-4]
                                         [--repeat 1] [--more NAME …] [--seeds 0 1 2] [--tiny]

Rows: w8a16, w8a8, w4 (int4 by 64, GPTQ), w4-trained (the same of a model whose weights training in fp32 has moved
off the grid of 4 bits on which SmolLM2's come), w4-qat (int4 by 64, trained with the rounding), neurons (half of
them, by the exported predictor; the work counted), 24 and 24-sparsegpt (two of four weights: one-shot, distilled,
the share of the loss that comes back), moe (three quarters of the neurons run), relu (ReLU for SiLU, trained on;
then a part of the neurons), prune (learned gates beside random masks, equal tokens). Held out: 20,480 tokens, a
fifth of the film reviews, never seen in training or calibration. Training sees the other four fifths, reviews of
products, editorials and Shakespeare; the student is told only what the original predicts (KL, no labels; --hidden:
a weight of its layers' outputs beside it), so that it cannot gain by knowing the domain better. Only `w4-trained`
learns labels, and is compared with itself. Perplexities are of float32 activations. Each row prints as soon as it
is there, and is added to --out. --minutes: of training, for each model that learns. --tiny: a small LLaMA with
random weights, to see that all runs.
"""
import argparse, copy, json, sys, time
from pathlib import Path

import pandas as pd
import torch
import transformers as tf

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from bmlab.cook.cook import Cook
from bmlab.cook.report import bytes_on_disk, divergence, perplexity
from bmlab.core import count, set_seed
from bmlab.data.samples import Batches, pack_tokens, sample_texts, split
from bmlab.cook.distill import Distill
from bmlab.cook.fakequant import FakeQuant
from bmlab.models.load import load
from bmlab.cook.moefy import MoEfy
from bmlab.cook.ffn import executed
from bmlab.cook.neurons import NeuronSparse, relufy
from bmlab.cook.prune import StructPrune
from bmlab.cook.quantize import quantize
from bmlab.cook.sparse24 import Sparse24
from bmlab.train.loop import eval_mode, model_loss, to_device


class Characters:
    "The tokenizer of --tiny: bytes"
    eos_token_id = 0
    def __call__(self, texts, add_special_tokens=False): return {"input_ids": [list(t.encode())[:400] for t in texts]}


def small_llama():
    shape = dict(hidden_size=64, intermediate_size=192, num_hidden_layers=3, num_attention_heads=4,
                 num_key_value_heads=2)
    return tf.LlamaForCausalLM(tf.LlamaConfig(vocab_size=256, pad_token_id=0, bos_token_id=0, eos_token_id=0, **shape))


class Table:
    "The original, the texts, and the rows that there are"
    def __init__(self, args):
        self.args, self.rows = args, []
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        set_seed(0)
        self.model, tok = ((small_llama(), Characters()) if args.tiny
                           else load(args.model or "smollm2-135m", dtype="float32", device="cpu"))
        self.model = self.model.to(self.device).eval()
        kept, held = split(self.texts("movies"), held_out=0.2)
        if args.tiny: kept, held = kept[:200], held[:40]
        self.held = list(Batches(pack_tokens(held, tok, args.length)[: -(-args.held // args.length)], batch=8,
                                 shuffle=False))
        self.calib = list(Batches(pack_tokens(kept[:400], tok, 128), batch=4))[:4 if args.tiny else 8]
        more = [t for name in args.more for t in self.texts(name)]
        self.train = pack_tokens(args.repeat * kept + [t[i : i + 4000] for t in more for i in range(0, len(t), 4000)],
                                 tok, args.length)
        self.teacher = copy.deepcopy(self.model).to(torch.float32 if args.tiny else torch.bfloat16)
        self.before = perplexity(self.model, self.held)
        self.facts = {"device": torch.cuda.get_device_name() if self.device == "cuda" else "CPU",
                      "torch": torch.__version__, "perplexity": self.before,
                      "held-out tokens": sum(b["input_ids"].numel() for b in self.held),
                      "training tokens": self.train.numel(), "arguments": vars(args)}
        print("; ".join(f"{k} {v}" for k, v in self.facts.items() if k != "arguments"), flush=True)

    def texts(self, name):
        return (pd.read_json(next(Path(self.args.texts).glob(f"{name}.json*")), orient="records") if self.args.texts
                else sample_texts(name)).text.tolist()

    def put(self, row, what, asked="", **numbers):
        "Print a line, and add it to the file"
        self.rows.append({"row": row, "what": what, **numbers, "asked": asked})
        print(f"{row:12} {what:44} "
              + "  ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}"
                          for k, v in numbers.items()) + (f"   (asked: {asked})" if asked else ""),
              flush=True)
        if self.args.out: Path(self.args.out).write_text(json.dumps(self.facts | {"rows": self.rows}, indent=1) + "\n")

    def measured(self, small, beside=None):
        "What a model is worth, beside the original or another one"
        base = beside if beside is not None else self.model
        before = self.before if beside is None else perplexity(beside, self.held)
        now, (kl, same) = perplexity(small, self.held), divergence(base, small, self.held)
        return {"perplexity": now, "change %": 100 * (now / before - 1), "kl": kl, "same first %": 100 * same,
                "file MB": bytes_on_disk(small) / 1e6}

    def learn(self, model, cook, rate, steps=None, seed=0, labels=False):
        "Train a cooked model on the original's predictions for some steps, or for --minutes; the number of steps"
        opt = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=rate, weight_decay=0.0,
                                betas=(0.9, 0.98))
        # gates and routers, which set their own pace
        own = {id(p) for p in cook.parameters()} if cook is not None else set()
        data, done, start = Batches(self.train, batch=self.args.batch, seed=seed), 0, time.perf_counter()
        if self.args.tiny: steps = steps or 6
        model.train()
        while True:
            for batch in data:
                over = done / steps if steps else (time.perf_counter() - start) / (60 * self.args.minutes)
                if over >= 1:
                    model.eval()
                    return done
                for g in opt.param_groups: g["lr"] = rate * min(1, (done + 1) / 30) * (1 - over)
                batch = to_device(batch, self.device)
                with torch.autocast(self.device, torch.bfloat16, enabled=not self.args.tiny):
                    value = (model_loss(model, batch) if labels
                             else model(input_ids=batch["input_ids"]).logits.new_zeros(()))
                (value.float() + (cook.loss() if cook is not None else 0)).backward()
                torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if id(p) not in own], 1.0)
                opt.step()
                if cook is not None: cook.step()
                opt.zero_grad(set_to_none=True)
                done += 1

    def distill(self, hidden=True):
        "What the original predicts; with --hidden also its layers' outputs"
        more = (dict(hidden="model.layers.*", hidden_weight=self.args.hidden, measure="cosine") if hidden
                and self.args.hidden else {})
        return Distill(self.teacher, T=1.0, **more)

    def cooked(self, method, rate, start=None):
        "(exported before training, exported after it, steps) of a copy of the original"
        model = copy.deepcopy(self.model if start is None else start)
        cook = Cook(model, [method, self.distill()], calib=self.calib)
        first, done = cook.export(), self.learn(model, cook, rate)
        return first, cook.export(), done

    def pruned(self, method, steps, seed):
        "(exported, steps) of a copy of the original; no layer of it needs to be like the original's"
        model = copy.deepcopy(self.model)
        cook = Cook(model, [method, self.distill(hidden=False)], calib=self.calib)
        done = self.learn(model, cook, 3e-4, steps, seed)
        return cook.export(), done


def w8a16(t):
    t.put("w8a16", "GPTQ", "≤ +0.5 %", **t.measured(quantize(copy.deepcopy(t.model), t.calib)))
    t.put("w8a16", "to nearest", **t.measured(quantize(copy.deepcopy(t.model))))


def w8a8(t):
    t.put("w8a8", "GPTQ, SmoothQuant 0.5, inputs by the token", "≤ +3 %",
          **t.measured(quantize(copy.deepcopy(t.model), t.calib, activations=8, smooth=0.5)))
    t.put("w8a8", "the same without SmoothQuant",
          **t.measured(quantize(copy.deepcopy(t.model), t.calib, activations=8, smooth=False)))


def w4(t):
    t.put("w4", "g64, GPTQ", "≤ +8 %", **t.measured(quantize(copy.deepcopy(t.model), t.calib, bits=4, group_size=64)))
    t.put("w4", "g64, AWQ",
          **t.measured(quantize(copy.deepcopy(t.model), t.calib, bits=4, group_size=64, rounding="awq")))


def w4_trained(t):
    model = copy.deepcopy(t.model)
    steps = t.learn(model, None, 1e-4, labels=True)
    t.put("w4-trained", f"trained in fp32 for {steps} steps", **t.measured(model))
    t.put("w4-trained", "g64, GPTQ, beside it", "≤ +8 %",
          **t.measured(quantize(copy.deepcopy(model), t.calib, bits=4, group_size=64), model))


def w4_qat(t):
    first, small, steps = t.cooked(FakeQuant("w4a16-g64"), 3e-5)
    t.put("w4-qat", "g64, to nearest", **t.measured(first))
    t.put("w4-qat", f"distilled with the rounding, {steps} steps", "≤ +8 %", **t.measured(small))


@torch.no_grad()
def work(t, small, tokens=64):
    "(share of the feed-forward layers' products that one-token steps compute, what choosing costs beyond)"
    ids, cache = t.held[0]["input_ids"][:1, :tokens].to(t.device), None
    with eval_mode(small), executed(small) as counted:
        for i in range(ids.shape[1]):
            cache = small(input_ids=ids[:, i:i + 1], past_key_values=cache, use_cache=True).past_key_values
    return {"FLOPs %": 100 * counted.share, "choosing %": 100 * counted.overhead}


def neurons(t):
    for how in ("cascade", "lowrank"):
        small = Cook(copy.deepcopy(t.model), [NeuronSparse(0.5, predictor=how)], calib=t.calib).export()
        t.put("neurons", f"half of them, predictor {how}", "≤ +5 %", **t.measured(small), **work(t, small))


def two_of_four(t, name, method):
    first, small, steps = t.cooked(method, t.args.rate)
    loss = lambda m: torch.tensor(perplexity(m, t.held)).log().item()
    gap, left = loss(first) - loss(t.model), loss(small) - loss(t.model)
    t.put(name, f"{method.score}, one-shot", **t.measured(first), gap=gap)
    t.put(name, f"distilled, {steps} steps", "≥ 90 % of the gap", **t.measured(small),
          **{"gap": left, "recovered %": 100 * (1 - left / gap)})


def moe(t):
    first, small, steps = t.cooked(MoEfy(experts=48, active=0.75, shared=0.25, router="mlp", cluster="coactivation"),
                                   1e-4)
    t.put("moe", "75 % active, a quarter always on", **t.measured(first))
    t.put("moe", f"distilled, {steps} steps", "≤ +10 %", **t.measured(small), **work(t, small))


def first_choices(t, model):
    "Share of held-out tokens that are the model's first choice"
    right = n = 0
    with torch.no_grad(), eval_mode(model):
        for b in to_device(t.held, t.device):
            said = model(input_ids=b["input_ids"]).logits[:, :-1].argmax(-1)
            right, n = right + (said == b["input_ids"][:, 1:]).sum().item(), n + said.numel()
    return 100 * right / n


def relu(t):
    model = relufy(copy.deepcopy(t.model))
    t.put("relu", "ReLU for SiLU, untrained", **t.measured(model))
    cook = Cook(model, [t.distill()], calib=t.calib)
    steps = t.learn(model, cook, 3e-4)
    dense, score = cook.export(), first_choices(t, t.model)
    base = first_choices(t, dense)
    t.put("relu", f"distilled, {steps} steps", **t.measured(dense),
          **{"its score %": base, "of the original's %": 100 * base / score})
    beside = lambda small: (
        t.measured(small, dense)
        | work(t, small)
        | {"of its score %": 100 * (now := first_choices(t, small)) / base, "of the original's %": 100 * now / score}
    )
    for keep in (0.5, 0.3, 0.2):
        small = Cook(copy.deepcopy(dense), [NeuronSparse(keep, candidates=keep)], calib=t.calib).export()
        t.put("relu", f"of these {keep:.0%} of the neurons, beside them", **beside(small))
    _, small, steps = t.cooked(NeuronSparse(0.2, candidates=0.2), 1e-4, dense)
    t.put("relu", f"20 %, distilled with them, {steps} steps", "≥ 95 % of its score", **beside(small))


def prune(t):
    shape, steps = dict(layers=0.8, ffn=0.75), None
    for seed in t.args.seeds:
        # the first run's minutes set the steps of all
        small, steps = t.pruned(StructPrune(**shape, score="random", seed=seed), steps, seed)
        random = t.measured(small)
        t.put("prune", f"random masks, seed {seed}, {steps} steps", **random, parameters_M=count(small).total / 1e6)
        small, _ = t.pruned(StructPrune(**shape, steps=max(1, steps // 3), seed=seed), steps, seed)
        gates = t.measured(small)
        t.put("prune", f"learned gates, seed {seed}, {steps} steps", "≤ 0.95 × random", **gates,
              parameters_M=count(small).total / 1e6, ratio=gates["perplexity"] / random["perplexity"])


ROWS = {"w8a16": w8a16, "w8a8": w8a8, "w4": w4, "w4-trained": w4_trained, "w4-qat": w4_qat, "neurons": neurons,
        "24": lambda t: two_of_four(t, "24", Sparse24()),
        "24-sparsegpt": lambda t: two_of_four(t, "24-sparsegpt", Sparse24(score="sparsegpt")), "moe": moe, "relu": relu,
        "prune": prune}


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--rows", nargs="+", default=list(ROWS), choices=list(ROWS))
    p.add_argument("--seeds", type=int, nargs="+", default=[0])
    p.add_argument("--model", help="a folder with SmolLM2-135M, if not the cached sample")
    p.add_argument("--texts", help="a folder with movies.json and NAME.json of --more, instead of the cached samples")
    p.add_argument("--more", nargs="*", default=["products", "editorials", "shakespeare"],
                   help="texts to learn from beside the film reviews")
    p.add_argument("--out", help="a .json file")
    p.add_argument("--repeat", type=int, default=1,
                   help="times that each film review stands among the texts to learn from")
    for name, default in {"minutes": 2., "batch": 32, "length": 256, "held": 20480, "hidden": 0., "rate": 3e-4}.items():
        p.add_argument(f"--{name}", type=type(default), default=default)
    p.add_argument("--tiny", action="store_true")
    args = p.parse_args()
    if args.tiny: vars(args).update(batch=4, length=64, held=1024, more=[])
    table = Table(args)
    for name in args.rows:
        start = time.perf_counter()
        try: ROWS[name](table)
        except Exception as e: table.put(name, f"{type(e).__name__}: "
                                               f"{str(e)[:300]}")  # the other rows are worth their minutes
        print(f"{name}: {time.perf_counter() - start:.0f} s", flush=True)


if __name__ == "__main__": main()

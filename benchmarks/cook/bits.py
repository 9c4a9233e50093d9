"""What weights of 8, 4, 3 and 2 bits cost by each of bmlab's methods and by each published tool that is installed:
perplexity and KL divergence on texts that nothing has seen, the same calibration for all.

usage: python benchmarks/cook/bits.py [--models shuffled smollm2] [--bits 8 4 3 2] [--tools bmlab auto-round
                                      llm-compressor] [--model FOLDER] [--texts FOLDER] [--samples 128] [--length 512]
                                      [--group 64] [--steps 200] [--rows GPTQ learned …] [--blocks N]
                                      [--out FILE.json] [--tiny]

Models: smollm2 is SmolLM2-135M, whose weights come from a file of 4 bits (Q4_1) and so favour that file's grid;
shuffled is the same function with its columns in another order, so that its groups lie on no grid. Every linear layer
of the blocks is rounded, embedding and head are not; zero points are codes, as all formats have them, but where a row
says "free". Held out: 20,480 tokens each of film reviews (a fifth that calibration did not see) and of Shakespeare (a
domain that calibration does not know). Perplexities are of float32 activations, weights as they would be stored.
--blocks N: only the first N blocks, and how far what they put out is off on these texts, for a machine without a GPU.
--tiny: a small LLaMA with random weights, to see that all runs.
"""
import argparse, copy, gc, json, sys, tempfile, time
from pathlib import Path

import pandas as pd
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from bmlab.cook.quantize import quantize
from bmlab.cook.report import divergence, perplexity
from bmlab.cook.rounding import Learned
from bmlab.core import set_seed
from bmlab.data.samples import Batches, pack_tokens, sample_texts, split
from bmlab.models.load import load
from quality import Characters, small_llama


class Texts:
    "Rows of tokens: to calibrate with, and two sets held out"
    def __init__(self, args, tok):
        kept, held = split(self.read(args, "movies"), held_out=0.2)
        if args.tiny: kept, held = kept[:400], held[:40]
        tokens = args.length * args.samples
        packed = pack_tokens(kept, tok, args.length)
        self.calib = packed[: args.samples]
        plays = "\n".join(self.read(args, "shakespeare"))
        pieces = [plays[i : i + 4000] for i in range(0, min(len(plays), 400_000), 4000)]
        self.held = {"reviews": self.batches(held, tok, args.held), "Shakespeare": self.batches(pieces, tok, args.held)}
        if len(self.calib) < args.samples: raise SystemExit(f"{tokens} tokens to calibrate with are not there")

    def read(self, args, name):
        return (pd.read_json(next(Path(args.texts).glob(f"{name}.json*")), orient="records") if args.texts
                else sample_texts(name)).text.tolist()

    def batches(self, texts, tok, tokens):
        return list(Batches(pack_tokens(texts, tok, 256)[: -(-tokens // 256)], batch=8, shuffle=False))


@torch.no_grad()
def shuffled(model, seed=0):
    """The same LLaMA with its columns in another order, so that no group of them has the scales of the file it is from

    What it computes is the same; hidden states, neurons, and the values of a head change their places."""
    model, order = copy.deepcopy(model).cpu(), torch.Generator().manual_seed(seed)
    c, places = model.config, torch.randperm(model.config.hidden_size, generator=order)
    heads, shared, size = c.num_attention_heads, c.num_key_value_heads, c.hidden_size // c.num_attention_heads
    def columns(places, *layers):
        for m in layers: m.weight.copy_(m.weight[:, places])
    def rows(places, *layers):
        for m in layers: m.weight.copy_(m.weight[places])
    columns(places, model.model.embed_tokens)
    if not c.tie_word_embeddings: columns(places, model.lm_head)
    rows(places, model.model.norm)
    for block in model.model.layers:
        a, f = block.self_attn, block.mlp
        rows(places, block.input_layernorm, block.post_attention_layernorm, a.o_proj, f.down_proj)
        columns(places, a.q_proj, a.k_proj, a.v_proj, f.gate_proj, f.up_proj)
        neurons = torch.randperm(c.intermediate_size, generator=order)
        rows(neurons, f.gate_proj, f.up_proj)
        columns(neurons, f.down_proj)
        values = torch.stack([torch.randperm(size, generator=order) for _ in range(shared)])
        rows((values + torch.arange(shared)[:, None] * size).flatten(), a.v_proj)
        of_head = values.repeat_interleave(heads // shared, 0) + torch.arange(heads)[:, None] * size
        columns(of_head.flatten(), a.o_proj)
    return model


class OfBmlab:
    "bmlab's own methods"
    def __init__(self, args, texts, tok): self.args, self.texts = args, texts

    def rows(self, bits):
        "name → a function of a copy of the model"
        group = {} if bits == 8 else dict(group_size=self.args.group)
        if bits < 8: group["integer_zero"] = True
        calib = [{"input_ids": r} for r in self.texts.calib.split(8)]
        group |= dict(bits=bits, exclude=["embed_tokens"] if self.args.blocks else ["lm_head", "embed_tokens"])
        def by(**more): return lambda m: quantize(m, calib, **group | more)
        yield "nearest", lambda m: quantize(m, **group)
        yield "AWQ", by(rounding="awq")
        yield "GPTQ", by(rounding="gptq")
        yield "learned", by(rounding=Learned(steps=self.args.steps))
        if bits == 8: yield "SmoothQuant, W8A8", by(activations=8)
        else:
            yield "nearest, free zeros", lambda m: quantize(m, **group | dict(integer_zero=False))
            yield "GPTQ, free zeros", by(rounding="gptq", integer_zero=False)
            yield "learned, free zeros", by(rounding=Learned(steps=self.args.steps), integer_zero=False)


class OfAutoRound:
    "Intel's auto-round: rounding learned by signed gradient descent (Cheng et al. 2023)"
    def __init__(self, args, texts, tok): self.args, self.texts, self.tok = args, texts, tok

    def rows(self, bits):
        if bits == 8: return
        yield f"{self.args.steps} steps", lambda m: self.run(m, bits, self.args.steps)

    def run(self, model, bits, steps):
        from auto_round import AutoRound
        data = torch.utils.data.DataLoader(
            [{"input_ids": r, "attention_mask": torch.ones_like(r)} for r in self.texts.calib], batch_size=8)
        done = AutoRound(model, tokenizer=self.tok, bits=bits, group_size=self.args.group, sym=False, iters=steps,
                         nsamples=len(self.texts.calib), seqlen=self.args.length, batch_size=8, dataset=data,
                         device_map=self.args.device, low_gpu_mem_usage=False)
        return done.quantize()[0].to(self.args.device, torch.float32)


class OfCompressor:
    "vLLM's llm-compressor: its GPTQ and AWQ"
    def __init__(self, args, texts, tok): self.args, self.texts, self.tok = args, texts, tok

    def rows(self, bits):
        from llmcompressor.modifiers.quantization import GPTQModifier, QuantizationModifier
        from llmcompressor.modifiers.transform.awq import AWQModifier
        if bits == 8:
            from llmcompressor.modifiers.smoothquant import SmoothQuantModifier
            yield "SmoothQuant, W8A8", self.by(
                lambda: [SmoothQuantModifier(smoothing_strength=0.5),
                         GPTQModifier(targets="Linear", scheme="W8A8", ignore=["lm_head"])])
            return
        yield "nearest", self.by(lambda: [QuantizationModifier(**self.scheme(bits))])
        yield "GPTQ", self.by(lambda: [GPTQModifier(**self.scheme(bits))])
        yield "GPTQ, by activation", self.by(lambda: [GPTQModifier(actorder="weight", **self.scheme(bits))])
        yield "AWQ", self.by(lambda: [AWQModifier(duo_scaling="both"), QuantizationModifier(**self.scheme(bits))])

    def scheme(self, bits):
        weights = dict(num_bits=bits, type="int", symmetric=False, strategy="group", group_size=self.args.group)
        return dict(config_groups={"all": dict(targets=["Linear"], weights=weights)}, ignore=["lm_head"])

    def by(self, recipe):
        def run(model):
            from datasets import Dataset
            from llmcompressor import oneshot
            rows = Dataset.from_dict({"input_ids": self.texts.calib.tolist(),
                                      "attention_mask": torch.ones_like(self.texts.calib).tolist()})
            with torch.enable_grad():
                oneshot(model=model, tokenizer=self.tok, dataset=rows, recipe=recipe(), pipeline="sequential",
                        max_seq_length=self.args.length, num_calibration_samples=len(rows))
            return model.to(self.args.device)
        return run


TOOLS = {"bmlab": OfBmlab, "auto-round": OfAutoRound, "llm-compressor": OfCompressor}


@torch.no_grad()
def off(model, base, held):
    "Percent by which what the blocks put out is off"
    pairs = [(model(b["input_ids"])[0], base(b["input_ids"])[0]) for b in held]
    return 100 * (sum((y - x).square().sum() for y, x in pairs) / sum(x.square().sum() for _, x in pairs)).sqrt().item()


def measured(model, base, texts):
    "perplexity and KL beside the original, by the set of texts"
    if not hasattr(base, "lm_head"): return {f"{k} error %": off(model, base, held) for k, held in texts.held.items()}
    out = {}
    for name, held in texts.held.items():
        kl, same = divergence(base, model, held)
        out |= {f"{name} perplexity": perplexity(model, held), f"{name} kl": kl, f"{name} same first %": 100 * same}
    return out


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--models", nargs="+", choices=("shuffled", "smollm2"), default=["shuffled", "smollm2"])
    p.add_argument("--rows", nargs="+", help="only rows of these names")
    p.add_argument("--bits", nargs="+", type=int, default=[8, 4, 3, 2])
    p.add_argument("--tools", nargs="+", choices=TOOLS, default=list(TOOLS))
    p.add_argument("--model")
    p.add_argument("--texts")
    p.add_argument("--samples", type=int, default=128)
    p.add_argument("--length", type=int, default=512)
    p.add_argument("--held", type=int, default=20480)
    p.add_argument("--group", type=int, default=64)
    p.add_argument("--steps", type=int, default=200)
    p.add_argument("--blocks", type=int)
    p.add_argument("--out")
    p.add_argument("--tiny", action="store_true")
    args = p.parse_args()
    args.device = "cuda" if torch.cuda.is_available() else "cpu"
    if args.tiny: args.samples, args.length, args.held, args.group = 16, 64, 2048, 32
    set_seed(0)
    first, tok = ((small_llama(), Characters()) if args.tiny
                  else load(args.model or "smollm2-135m", dtype="float32", device="cpu", packed=False))
    first, texts = first.to(args.device).eval(), Texts(args, tok)
    if not args.tiny:                                                           # llm-compressor asks for a folder
        home = tempfile.mkdtemp()
        for part in (first.config, tok): part.save_pretrained(home)
        first.config._name_or_path = first.name_or_path = tok.name_or_path = home
    facts = {"device": torch.cuda.get_device_name() if args.device == "cuda" else "CPU", "torch": torch.__version__,
             "calibration tokens": texts.calib.numel(), "arguments": vars(args)}
    print("; ".join(f"{k} {v}" for k, v in facts.items() if k != "arguments"), flush=True)
    table = []
    for which in args.models:
        base = shuffled(first).to(args.device) if which == "shuffled" else first
        if args.blocks:
            base = base.model
            base.layers = base.layers[: args.blocks]
        row = dict(model=which, bits=32, tool="", how="float32", **measured(base, base, texts))
        show(row, table, args, facts)
        before = row
        for bits in args.bits:
            for tool in args.tools:
                for how, run in TOOLS[tool](args, texts, tok).rows(bits):
                    if args.rows and how not in args.rows: continue
                    start = time.perf_counter()
                    model = copy.deepcopy(base).cpu().to(args.device)
                    try: model = run(model)
                    except Exception as e:
                        print(f"{which} {bits} {tool} {how}: {type(e).__name__}: {str(e)[:300]}", flush=True)
                        continue
                    row = dict(model=which, bits=bits, tool=tool, how=how, seconds=time.perf_counter() - start,
                               **measured(model.eval(), base, texts))
                    for name in texts.held if not args.blocks else ():
                        now, then = row[f"{name} perplexity"], before[f"{name} perplexity"]
                        row[f"{name} change %"] = 100 * (now / then - 1)
                    show(row, table, args, facts)
                    del model
                    gc.collect()
                    if args.device == "cuda": torch.cuda.empty_cache()


def show(row, table, args, facts):
    "Print a row, and add it to the file"
    table.append(row)
    numbers = "  ".join(f"{k} {v:.4g}" for k, v in row.items() if isinstance(v, float))
    print(f"{row['model']:8} {row['bits']:2} {row['tool']:15} {row['how']:22} {numbers}", flush=True)
    if args.out: Path(args.out).write_text(json.dumps(facts | {"rows": table}, indent=1, default=str) + "\n")


if __name__ == "__main__": main()

"""Fewer bytes a parameter: what `AdamW(states=8, master="bf16-sr")` costs in loss, and what its update takes.

usage: python benchmarks/train/states.py quality [--seeds N] [--steps N] [--rows N] [--lr X] [--lora-steps N] [--ways …]
       python benchmarks/train/states.py speed [--tiny]

quality  a pre-training on the story's corpus (tutorials/90_story) and a LoRA of SmolLM2-135M, on any machine: held-out
         loss at the end, and how far it is from that of fp32, seed by seed
speed    milliseconds of one update of 8 of an 8B LLaMA's 32 layers (2.8 G parameters), tensor by tensor, beside
         torch's fused AdamW and, where they are installed, torchao's and bitsandbytes' AdamW8bit; and what the memory's
         rate allows. On a CPU a small shape, by the host's way
"""
import argparse, json, sys, tempfile, time
from pathlib import Path

import pandas as pd
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))
from training import llama_8b                                          # (puts the project on the path)
from clock import memory_rate

p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
p.add_argument("what", choices=["quality", "speed"])
p.add_argument("--seeds", type=int, default=3)
p.add_argument("--steps", type=int, default=600, help="of the pre-training")
p.add_argument("--lr", type=float, default=4e-3, help="of the pre-training")
p.add_argument("--rows", type=int, default=16, help="of 64 tokens in a batch; a quarter of them for the LoRA")
p.add_argument("--lora-steps", type=int, default=100)
p.add_argument("--ways", nargs="+", help="only these")
p.add_argument("--only", nargs="+", choices=["pre-training", "LoRA"], default=["pre-training", "LoRA"])
p.add_argument("--tiny", action="store_true", help="a few steps, small shapes")
args = p.parse_args()
gpu = torch.cuda.is_available()
device = torch.device("cuda" if gpu else "cpu")

# dtype of the weights, options of AdamW, bytes a parameter of weight, gradient and state
WAYS = {
    "fp32": (torch.float32, dict(), 16),
    "bf16, fp32 masters": (torch.bfloat16, dict(), 16),
    "bf16, fp32 masters, 8-bit moments": (torch.bfloat16, dict(states=8), 10),
    "bf16 by chance": (torch.bfloat16, dict(master="bf16-sr"), 12),
    "bf16 by chance, 8-bit moments": (torch.bfloat16, dict(states=8, master="bf16-sr"), 6),
    "bf16 to nearest": (torch.bfloat16, dict(master=None), 8),
}


def corpus(work):
    "The story's texts as batches of token ids (B, 64): training, held out; and the size of the vocabulary"
    from bmlab.all import Batches, Packed, fetch_deb, pack_tokens, sample_texts, split, tokenize
    from bmlab.data.corpus import Corpus
    from bmlab.data.recipes import recipe
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast
    pages = sorted(
        fetch_deb("libreoffice-help-en-us", ["usr/share/libreoffice/help/en-US/text/*.html"]).rglob("*.html"))
    manuals = Corpus.from_frame(
        sample_texts("manpages-zh")[::3], "manuals", license="several free ones", origin="Debian, manpages-zh")
    helps = Corpus.from_html(pages[::20], "help", license="MPL-2.0", origin="Debian, libreoffice-help-en-us")
    texts = (manuals + helps).then(recipe("cpm")).run(work / "corpus", tasks=1, workers=1).frame()
    train, held = split(texts.text, held_out=0.12)
    bpe = Tokenizer(models.BPE())
    bpe.decoder, bpe.pre_tokenizer = decoders.ByteLevel(), pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(train, trainers.BpeTrainer(
        vocab_size=2000, special_tokens=["<eod>"], initial_alphabet=alphabet, show_progress=False))
    tok = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<eod>", pad_token="<eod>")
    shards = tokenize(train, tok, work / "shards")
    held = list(Batches(pack_tokens(held, tok, 64)[:96], batch=16, shuffle=False))
    return (lambda seed: Packed(shards, seq=64, batch=args.rows, seed=seed)), held, len(tok)


def learn(model, params, batches, held, steps, lr, options):
    "Held-out loss after some steps on a cosine, with a clip"
    from bmlab.all import Cosine, OptimManager, evaluate, fit
    from bmlab.train import AdamW
    opt = AdamW(params, lr=lr, weight_decay=0.01, **options)
    om = OptimManager()
    om.add_optimizer(opt, Cosine(opt, warmup_iter=20, end_iter=steps + 20))
    fit(model, batches, om, steps=steps, clip=1.0, plot=False)
    return float(evaluate(model, held))


def pretraining(ways):
    "{(way, seed): held-out loss} of the story's CPM-Ant"
    from bmlab.all import build, set_seed
    with tempfile.TemporaryDirectory() as work:
        batches, held, vocab = corpus(Path(work))
        shape = dict(
            vocab_size=vocab, hidden_size=128, num_attention_heads=4, dim_head=32, dim_ff=320, num_hidden_layers=3,
            dropout_p=0.0, init_std=0.1, prompt_types=4, prompt_length=4, position_bias_num_buckets=64,
            position_bias_max_distance=256)
        for seed in range(args.seeds):
            for way in ways:
                dtype, options, _ = WAYS[way]
                set_seed(seed)
                model = build("cpm-ant-10b", device="cpu", **shape).to(device, dtype)
                yield way, seed, learn(model, model, batches(seed), held, args.steps, args.lr, options)


def lora(ways):
    "{(way, seed): held-out loss} of a LoRA of SmolLM2-135M on reviews of films; the frozen weights are bf16"
    from bmlab.all import Batches, Lora, load, pack_tokens, sample_texts, set_seed, split
    train = held = None
    for seed in range(args.seeds):
        for way in ways:
            _, options, _ = WAYS[way]
            model, tok = load("smollm2-135m")
            if train is None:
                train, held = split(sample_texts("movies").text)
                held = list(Batches(pack_tokens(held, tok, 64)[:32], batch=8, shuffle=False))
            set_seed(seed)
            model.to(device, torch.bfloat16)
            delta = Lora(model, r=8, modules=["q_proj", "v_proj", "up_proj"]).freeze()
            batches = Batches(pack_tokens(train, tok, 64), batch=max(2, args.rows // 4), seed=seed)
            yield way, seed, learn(model, delta.trainable(), batches, held, args.lora_steps, 2e-3, options)


def quality():
    if args.tiny: args.steps, args.lora_steps, args.seeds = 3, 3, 1
    rows = []
    ways = {"pre-training": [w for w in WAYS if w not in ("bf16, fp32 masters", "bf16 by chance")],
            "LoRA": ["bf16, fp32 masters", "bf16, fp32 masters, 8-bit moments", "bf16 by chance, 8-bit moments"]}
    for what, runs in (("pre-training", pretraining), ("LoRA", lora)):
        if what not in args.only: continue
        base = {}
        for way, seed, loss in runs([w for w in ways[what] if not args.ways or w in args.ways]):
            base.setdefault(seed, loss)
            row = {"what": what, "way": way, "B a parameter": WAYS[way][2], "seed": seed}
            row |= {"held-out loss": round(loss, 4), "from the first, %": round(100 * (loss / base[seed] - 1), 2)}
            print(json.dumps(row), flush=True)
            rows.append(row)
    table = pd.DataFrame(rows).pivot_table(
        index=["what", "way", "B a parameter"], values=["held-out loss", "from the first, %"], sort=False)
    print(table.round(3).to_string())


def shapes():
    "Sizes of the parameters of an 8B LLaMA with 8 of its layers: at 16 bytes each they fit any card"
    import transformers as tf
    if args.tiny: return [(2048, 2048)] * 2
    config = llama_8b(False, 0)
    config.num_hidden_layers = 8
    with torch.device("meta"): model = tf.LlamaForCausalLM(config)
    return [tuple(p.shape) for p in model.parameters()]


def clock(step, n=5):
    "Seconds of a call: the median"
    times = []
    for i in range(n + 2):
        if gpu: torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        if gpu: torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return sorted(times[2:])[n // 2]


def ours(way):
    from bmlab.train import AdamW
    dtype, options, size = WAYS[way]
    def make(ps): return AdamW(ps, lr=1e-4, offload=None if gpu else 1.0, **options)
    return make, dtype, size


def peers():
    "name → (params → optimizer, dtype of the weights, bytes a parameter)"
    out = {w: ours(w) for w in WAYS if w not in ("fp32", "bf16 to nearest")}
    out["torch's fused AdamW, fp32"] = lambda ps: torch.optim.AdamW(ps, lr=1e-4, fused=True), torch.float32, 16
    out["torch's fused AdamW, all bf16"] = lambda ps: torch.optim.AdamW(ps, lr=1e-4, fused=True), torch.bfloat16, 8
    try: from torchao.optim import AdamW8bit
    except ImportError: print("torchao is not installed: no AdamW8bit")
    else: out["torchao's AdamW8bit, bf16 by chance"] = (
        lambda ps: AdamW8bit(ps, lr=1e-4, bf16_stochastic_round=True), torch.bfloat16, 6)
    try: from bitsandbytes.optim import AdamW8bit as Blockwise
    except ImportError: print("bitsandbytes is not installed: no AdamW8bit of its")
    else: out["bitsandbytes' AdamW8bit, bf16 to nearest"] = lambda ps: Blockwise(ps, lr=1e-4), torch.bfloat16, 6
    return out


def speed():
    rate = memory_rate(device.type, 1 << (28 if gpu else 24))
    rows, sizes = [], shapes()
    # bytes that an update reads and writes: gradient, and weight, master and moments twice
    for name, (make, dtype, size) in peers().items():
        ps = [torch.nn.Parameter(torch.randn(s, device=device, dtype=dtype) * 0.02) for s in sizes]
        for q in ps: q.grad = torch.randn_like(q) * 1e-3
        opt = make(ps)
        seconds = clock(opt.step)
        n, item = sum(q.numel() for q in ps), dtype.itemsize
        bound = n * (item + 2 * (size - item)) / rate
        rows.append({"optimizer": name, "B a parameter": size, "ms": round(1e3 * seconds, 2),
                     "bound, ms": round(1e3 * bound, 2), "G parameters/s": round(n / seconds / 1e9, 2)})
        print(json.dumps(rows[-1]), flush=True)
        del ps, opt
        if gpu: torch.cuda.empty_cache()
    print(f"{torch.cuda.get_device_name() if gpu else 'CPU'}, {rate / 1e9:.0f} GB/s copied")
    print(pd.DataFrame(rows).to_string(index=False))


quality() if args.what == "quality" else speed()

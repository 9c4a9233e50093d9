"""Many requests at once on LLaMA-3's 8B shape: output tokens a second of `Batcher`, beside transformers' continuous
batching in the same run.

usage: python benchmarks/infer/batch.py [--tiny] [--pace] [--parts host bmlab lora peer]

64 and 128 requests are handed over together: 16–700 tokens in, 16–256 out, greedy, no end token; weights in bf16,
random numbers (--tiny: a small model on the CPU, float32). bmlab: `wrap`, then a `Batcher` with 32 and with 64 places;
each load twice, the first time with what is captured and compiled in it. "alone": how many tokens of eight of the texts
are those of the same request alone (in bf16 the order of sums decides between equals; in float32 it is all). Pace:
steps and forwards over prompts by themselves. Host: processor time of a step of 64 rows whose work on the device is
left out, the reading of the texts included. Peer: transformers' continuous batching manager, each request with
its own length, as it comes and again.
LoRA: rank 8 on all linear layers, requests over 8 and 16 users in one batch, against the same load without.

Bound: prompts at the rate of this process's own matrix product, then steps that read weights and keys and values once,
with all places taken until the requests run out.
"""
import argparse, random, statistics, sys, time, traceback
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))
import inference as I

PARTS = ["host", "bmlab", "lora", "peer"]
p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
p.add_argument("--tiny", action="store_true")
p.add_argument("--pace", action="store_true", help="steps and forwards over prompts alone")
p.add_argument("--parts", nargs="+", default=PARTS, choices=PARTS)
args = p.parse_args()
GPU = torch.cuda.is_available() and not args.tiny
DEVICE = "cuda" if GPU else "cpu"
I.LLAMA["llama3"] = dict(
    hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8, intermediate_size=14336,
    vocab_size=128256, max_position_embeddings=8192, rope_theta=500000.0
)
SHAPE, CTX, MOST_IN, MOST_OUT = ("llama3", 1024, 700, 256) if GPU else ("tiny", 128, 60, 24)
LOADS, PLACES = ((64, 128), (32, 64)) if GPU else ((8, 16), (4, 8))


def asks(n, vocab):
    "(ids, new tokens) of requests"
    draw = random.Random(0)
    return [([draw.randrange(vocab) for _ in range(draw.randint(16, MOST_IN))], draw.randint(16, MOST_OUT))
            for _ in range(n)]


def tokenizer(vocab):
    "Bytes; ids above say nothing"
    import transformers as tf
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    t = Tokenizer(models.BPE())
    t.pre_tokenizer, t.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    t.train_from_iterator(["text"], trainers.BpeTrainer(vocab_size=300, initial_alphabet=letters, show_progress=False))
    return tf.PreTrainedTokenizerFast(tokenizer_object=t)


def sync():
    if GPU: torch.cuda.synchronize()


def rates():
    "(FLOP/s of a matrix product, bytes/s read) of this process"
    if not GPU: return 5e10, 1e10
    a, b = (torch.randn(4096, 8192, device=DEVICE, dtype=torch.bfloat16) for _ in "ab")
    w = torch.randn(1 << 15, 1 << 15, device=DEVICE, dtype=torch.bfloat16)
    x = torch.randn(1 << 15, 1, device=DEVICE, dtype=torch.bfloat16)
    def timed(f, n):
        f()
        sync()
        begin = time.perf_counter()
        for _ in range(n): f()
        sync()
        return (time.perf_counter() - begin) / n
    return 2 * 4096 * 4096 * 8192 / timed(lambda: a @ b.T, 20), w.nbytes / timed(lambda: w @ x, 10)


def bound(model, load, places, flops, read):
    "Output tokens a second that no engine passes"
    weights = sum(t.numel() for n, t in model.named_parameters() if "embed_tokens" not in n)
    c, item = model.config, next(model.parameters()).element_size()
    token = 2 * c.num_hidden_layers * c.num_key_value_heads * (c.hidden_size // c.num_attention_heads) * item
    read_s = 2 * weights * sum(len(ids) for ids, _ in load) / flops
    left, waiting, bytes_ = [], list(load), 0
    while left or waiting:
        while waiting and len(left) < places:
            ids, n = waiting.pop(0)
            left.append([n, len(ids)])
        bytes_ += weights * item + sum(n for _, n in left) * token
        left = [[n - 1, k + 1] for n, k in left if n > 1]
    return sum(n for _, n in load) / (read_s + bytes_ / read)


def run(b, load, **options):
    "One load: (seconds, handles)"
    sync()
    begin = time.perf_counter()
    with b.wake: handles = [b.submit(ids, n, stop_ids=(), **{k: v[i] for k, v in options.items()})
                            for i, (ids, n) in enumerate(load)]
    for h in handles:
        for _ in h: pass
    return time.perf_counter() - begin, handles


def told(name, load, seconds, handles, b, before, **more):
    new = sum(n for _, n in load)
    first = sorted(h.stats["first_token_s"] for h in handles)
    row = {
        "run": name, "requests": len(load), "tok/s": round(new / seconds), "s": round(seconds, 2),
        "first token s, median": round(statistics.median(first), 2), "last": round(first[-1], 2)
    }
    row |= {k: b.stats[k] - before[k] for k in ("steps", "passes", "reused")} | more
    print(row, flush=True)
    return row


def ours(rows, flops, read):
    from bmlab.infer.batcher import Batcher
    from bmlab.infer.decode import Decoder
    from bmlab.infer.engine import wrap
    model = I.fill(I.skeleton(SHAPE, torch.bfloat16 if GPU else torch.float32), DEVICE)
    model.generation_config.eos_token_id = None
    tok = tokenizer(model.config.vocab_size)
    e = wrap(model, tok, max_batch=1, max_ctx=CTX, device=DEVICE)
    e.decoder, texts = None, {}
    for places in () if args.pace else PLACES:
        d = Decoder(model, places, CTX)
        with Batcher(d, tok) as b:
            for n in LOADS:
                load = asks(n, model.config.vocab_size)
                top = bound(model, load, places, flops, read)
                for turn in ("first", "again"):
                    b.call(b.kept.clear)
                    before = dict(b.stats)
                    seconds, handles = run(b, load)
                    rows.append(told(
                        f"bmlab, {places} places, {turn}", load, seconds, handles, b, before, bound=round(top),
                        by_row=d.attends_by_row, why_eager=d.why_eager
                    ))
                texts[n] = [list(h.ids) for h in handles], load
        del d
        if GPU: torch.cuda.empty_cache()
    for work in (lambda: pace(model, PLACES[-1]), lambda: texts and alone(model, tok, *texts[LOADS[0]])):
        try: work()
        except Exception: traceback.print_exc()
    return e, model, tok                     # (an engine that is dropped takes its fused blocks apart)


def pace(model, places):
    "Milliseconds of a captured step and of a forward over prompts, one behind the other, the host ahead"
    from bmlab.infer.decode import Decoder
    from bmlab.infer.sampling import Sampler
    d, sampler, out = Decoder(model, places, CTX), Sampler(), {}
    for r in range(places): logits = d.prefill([[5] * (CTX // 3)], rows=[r], packed=True)
    sampler.start([[]] * places, logits.shape[1], logits.device)
    d.sample(sampler, logits.expand(places, -1), list(range(places)))
    for n in (1, places // 2, places):
        d.choose(list(range(n)))
        for _ in range(3): last = d.step_sampled(sampler)
        sync()
        begin = time.perf_counter()
        for _ in range(20): last = d.step_sampled(sampler)
        issued = time.perf_counter() - begin
        last.ids()
        sync()
        out[f"step of {n}"] = f"{(time.perf_counter() - begin) * 50:.2f} ms, issued in {issued * 50:.2f}"
    for T in (128, 256, 512) if GPU else (16,):
        d.free()
        for i in range(7):
            if i == 2:
                sync()
                begin = time.perf_counter()
            d.free([i % places])
            d.prefill([[5] * T], rows=[i % places], packed=True)
        issued = time.perf_counter() - begin
        sync()
        out[f"prompt of {T}"] = f"{(time.perf_counter() - begin) * 200:.2f} ms, issued in {issued * 200:.2f}"
    print(f"{places} places:", out, flush=True)


def host(rows=64, new=400):
    "Microseconds of the processor for a step, without what the device does"
    import transformers as tf
    from bmlab.infer.batcher import Batcher
    from bmlab.infer.decode import Decoder, Sampled
    tok, size = tokenizer(300), dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    d = Decoder(tf.LlamaForCausalLM(tf.LlamaConfig(**size, vocab_size=300)).eval(), rows, new + 32)
    ids = torch.full((rows,), 70)
    def step(sampler):
        sampler.key
        d.cache.span.numbers, d.cache.span.width = d.chosen, 1
        d.cache.commit([1] * len(d.chosen), device=False)
        return Sampled(ids[:len(d.chosen)])
    d.step_sampled = step
    with Batcher(d, tok) as b:
        b.runs_ahead = True
        own, begin = b.call(time.thread_time), time.process_time()
        for h in run(b, [([1 + r] * 20, new) for r in range(rows)])[1]: assert len(h.ids) == new
        took = [(end - at) / b.stats["steps"] * 1e6 for end, at in (
            (b.call(time.thread_time), own), (time.process_time(), begin))]
        print(f"host: {took[0]:.0f} µs a step of {rows} rows, {took[1]:.0f} with the texts put together", flush=True)


def alone(model, tok, got, load):
    from bmlab.infer.decode import Decoder
    from bmlab.infer.text import decode_tokens
    d, same, all_ = Decoder(model, 1, CTX), 0, 0
    for ids, (prompt, n) in list(zip(got, load))[:8]:
        want = [t for (t,) in decode_tokens(d, [prompt], None, n)]
        same += next((i for i, (x, y) in enumerate(zip(ids, want)) if x != y), len(want))
        all_ += len(want)
    print(f"alone: the first {same} of {all_} tokens of eight texts are the same", flush=True)


def adapters(rows, e, model, tok):
    from bmlab.delta.bank import DeltaBank
    from bmlab.delta.lora import Lora
    from bmlab.infer.batcher import Batcher
    from bmlab.infer.decode import Decoder
    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    load = asks(LOADS[0], model.config.vocab_size)
    for users in (8, 16):
        bank = DeltaBank(model)
        for i in range(users):
            d = Lora(model, r=8, modules=names)
            for s in d.sites.values(): torch.nn.init.normal_(s.B, std=0.01)
            bank.add(f"user{i}", d)
        d = Decoder(model, PLACES[-1], CTX)
        with Batcher(d, tok, bank=bank) as b:
            took = {}
            for what in ("base", "users", "base", "users"):
                b.call(b.kept.clear)
                whose = [None if what == "base" else f"user{i % users}" for i in range(len(load))]
                before = dict(b.stats)
                took[what], handles = run(b, load, adapter=whose)
                told(f"bank of {users}: {what}", load, took[what], handles, b, before)
            print(f"by_row={d.attends_by_row}, why_eager={d.why_eager}")
            rows.append({"run": f"LoRA of {users} users, all linear, × base", "tok/s": round(
                sum(n for _, n in load) / took["users"]), "ratio": round(took["users"] / took["base"], 3)})
            print(rows[-1], flush=True)
        bank.detach()
        del d
        if GPU: torch.cuda.empty_cache()


def peer(rows):
    from transformers import GenerationConfig
    model = I.fill(I.skeleton(SHAPE, torch.bfloat16 if GPU else torch.float32), DEVICE)
    config = GenerationConfig(max_new_tokens=MOST_OUT, do_sample=False, eos_token_id=-1, pad_token_id=0, use_cache=True)
    for n in LOADS:
        load = asks(n, model.config.vocab_size)
        manager = model.init_continuous_batching(generation_config=config)
        manager.start()
        try:
            for turn in ("first", "again"):
                sync()
                begin = time.perf_counter()
                for i, (ids, k) in enumerate(load):
                    manager.add_request(ids, request_id=f"{turn}{i}", max_new_tokens=k)
                left, made = len(load), 0
                while left and time.perf_counter() - begin < 60:
                    r = manager.get_result(timeout=5)
                    if r is not None and r.is_finished(): left, made = left - 1, made + len(r.generated_tokens)
                seconds = time.perf_counter() - begin
                rows.append({"run": f"transformers, {turn}", "requests": n, "tok/s": round(made / seconds),
                             "s": round(seconds, 2), "left": left})
                print(rows[-1], flush=True)
        finally: manager.stop(block=True)


def main():
    torch.set_grad_enabled(False)
    rows, (flops, read) = [], rates()
    name = torch.cuda.get_device_name() if GPU else "CPU"
    print(f"{name}, torch {torch.__version__}: {flops / 1e12:.0f} TFLOP/s, {read / 1e12:.2f} TB/s", flush=True)
    if "host" in args.parts: host()
    made = None
    if "bmlab" in args.parts or "lora" in args.parts:
        try: made = ours(rows, flops, read)
        except Exception: traceback.print_exc()
    if "lora" in args.parts and made is not None:
        try: adapters(rows, *made)
        except Exception: traceback.print_exc()
    made = None
    if GPU: torch.cuda.empty_cache()
    if "peer" in args.parts:
        try: peer(rows)
        except Exception: traceback.print_exc()
    best = max((r["tok/s"] for r in rows if r["run"].startswith("transformers")), default=0)
    for r in rows:
        ratio = f", × transformers' best {r['tok/s'] / best:.2f}" if best else ""
        of = f", of the bound {r['tok/s'] / r['bound']:.2f}" if "bound" in r else ""
        print(f"{r['run']}, {r.get('requests', '')}: {r['tok/s']} tok/s{of}{ratio}")


if __name__ == "__main__": main()

"""Many users' LoRAs in one batch: bmlab's bank, PEFT's adapter_names (serving only; it cannot train so), one pass per
user, and the base model's own step, in one run.

usage: python benchmarks/delta/bank.py [--device cpu|cuda] [--tiny] [--users 8 16] [--modules qv all]
       [--work read decode loop train]

cpu:  LLaMA of 6 layers × 512; cuda: LLaMA-3's 8B shape in bf16 (4096, 32 layers, 32/8 heads, 14336, vocabulary
      128256), random weights. LoRA r = 8 on q and v, or on all seven linear layers of a block; every B away from zero.
read  one forward of `rows` × `length` tokens without gradients;   decode  one token per row after that many in the
      cache, through transformers' forward, eagerly
decode, own loop  the same by bmlab's Decoder, which captures a step on a GPU (PEFT has no such loop); "fused" is that
      with the kernels that `wrap` brings, base and bank both
train forward, backward and (where there are users) AdamW on their parameters: bmlab's `BankAdamW`, and torch's in a
      row of its own. The base model's step is forward and backward to its input, all weights frozen: the least that a
      delta's step needs. "one LoRA" is a single bmlab Lora for all rows, attached before the clock starts.
The ways take turns, round by round ("per user" comes in the first only); a time is the median over the rounds, a
ratio the median of the rounds' ratios. PEFT gets the very same matrices, and the logits are compared first.
"""
import argparse, contextlib, copy, statistics, sys, time
from pathlib import Path

import torch
import transformers as tf

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))
from training import show

WORK = ["read", "decode", "loop", "train"]
p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
p.add_argument("--tiny", action="store_true")
p.add_argument("--users", type=int, nargs="+", default=[8, 16])
p.add_argument("--modules", nargs="+", choices=["qv", "all"], default=["qv", "all"])
p.add_argument("--work", nargs="+", choices=WORK, default=WORK)
p.add_argument("--rounds", type=int, help="5, on a GPU 3")
p.add_argument("--rows", type=int, default=16)
p.add_argument("--length", type=int)
p.add_argument("--steps", type=int, default=4, help="decode steps per round")
args = p.parse_args()

from bmlab.delta.bank import DeltaBank
from bmlab.delta.bank_optimizer import BankAdamW
from bmlab.infer.decode import Decoder
from bmlab.infer.fused import fuse_decode
from bmlab.delta.delta import deltas
from bmlab.delta.lora import Lora

device, gpu = torch.device(args.device), args.device.startswith("cuda")
args.rounds = args.rounds or (3 if gpu else 5)
small = dict(
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=200,
)
cpu = dict(
    hidden_size=512,
    intermediate_size=1408,
    num_hidden_layers=6,
    num_attention_heads=8,
    num_key_value_heads=8,
    vocab_size=2000,
)
llama8b = dict(
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    vocab_size=128256,
)
shape, length = small if args.tiny else llama8b if gpu else cpu, args.length or (8 if args.tiny else 128 if gpu else 32)


TARGETS = {
    "qv": ["q_proj", "v_proj"],
    "all": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
}


def build():
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16 if gpu else torch.float32)
    try:
        with device:
            return (
                tf.LlamaForCausalLM(tf.LlamaConfig(**shape, max_position_embeddings=4096)).eval().requires_grad_(False)
            )
    finally: torch.set_default_dtype(torch.float32)


def seconds(call):
    if gpu: torch.cuda.synchronize()
    # on the CPU the time of this process, so that others on the machine do not count
    clock = time.perf_counter if gpu else time.process_time
    start = clock()
    call()
    if gpu: torch.cuda.synchronize()
    return clock() - start


def in_turns(ways, rounds, around=None):
    "{way: seconds of each round}; around: {way: what to open for it, outside of its time}"
    def timed(k):
        with (around or {}).get(k, contextlib.nullcontext)(): return seconds(ways[k])
    for k in ways:
        if k != "per user": timed(k)
    times = {k: [] for k in ways}
    for _ in range(rounds):
        for k in ways:
            if k != "per user" or not times[k]: times[k].append(timed(k))
    return times


def peft_twin(model, bank, modules):
    "PEFT on a copy of the backbone, with the bank's matrices under the same names"
    import peft
    config = peft.LoraConfig(r=8, lora_alpha=16, target_modules=TARGETS[modules])
    names = list(bank)
    theirs = peft.get_peft_model(model, config, adapter_name=names[0], autocast_adapter_dtype=False)
    for u in names[1:]: theirs.add_adapter(u, config, autocast_adapter_dtype=False)
    with torch.no_grad():
        for u in names:
            for n, site in bank[u].sites.items():
                layer = theirs.base_model.model.get_submodule(n)
                layer.lora_A[u].weight.copy_(site.A)
                layer.lora_B[u].weight.copy_(site.B)
    return theirs.eval()


def compare(model, users, modules):
    spare = copy.deepcopy(model)
    bank = DeltaBank(model)
    for i in range(users):
        d = Lora(model, r=8, modules=TARGETS[modules])
        for s in d.sites.values(): torch.nn.init.normal_(s.B, std=0.2)
        bank.add(f"user{i}", d)
    bank.freeze()
    theirs = peft_twin(spare, bank, modules)
    rows = (
        [f"user{i * users // args.rows}" for i in range(args.rows)]
        if args.rows >= users
        else [f"user{i}" for i in range(args.rows)]
    )
    mine = {u: [i for i, v in enumerate(rows) if v == u] for u in dict.fromkeys(rows)}
    ids = torch.randint(0, shape["vocab_size"], (args.rows, length), device=device)
    out = []

    def once(m, ids, **kw): return m(input_ids=ids, use_cache=False, **kw).logits
    def base_read():
        with torch.no_grad(), bank.off(): once(model, ids)
    def bank_read():
        with torch.no_grad(), bank.route(rows): return once(model, ids)
    def peft_read():
        with torch.no_grad(): return once(theirs, ids, adapter_names=rows)
    def loop_read():
        with torch.no_grad():
            for u, at in mine.items():
                with bank.route(u): once(model, ids[at])
    a, b = bank_read().float(), peft_read().float()
    with torch.no_grad(), bank.off(): plain = once(model, ids).float()
    print(
        f"{users} users: logits differ from PEFT's by {(a - b).abs().max():.1e} at most, from the base model's by "
        f"{(a - plain).abs().max():.1e}",
        flush=True,
    )
    del a, b, plain
    ways = {"base": base_read, "bank": bank_read, "PEFT adapter_names": peft_read, "per user": loop_read}
    if "read" in args.work: out.append(("read", in_turns(ways, args.rounds)))

    def filled(m, ids, **kw):
        cache = tf.DynamicCache(config=model.config)
        with torch.no_grad(): m(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1, **kw)
        return cache
    def decode(m, ids, cache, **kw):
        with torch.no_grad():
            for _ in range(args.steps): m(input_ids=ids[:, :1], past_key_values=cache, use_cache=True, **kw)
        cache.crop(-args.steps)
    base_cache = bank_cache = peft_cache = caches = None
    if "decode" in args.work:
        with bank.off(): base_cache = filled(model, ids)
        with bank.route(rows): bank_cache = filled(model, ids)
        peft_cache, caches = filled(theirs, ids, adapter_names=rows), {}
        for u, at in mine.items():
            with bank.route(u): caches[u] = filled(model, ids[at])
    def base_decode():
        with bank.off(): decode(model, ids, base_cache)
    def bank_decode():
        with bank.route(rows): decode(model, ids, bank_cache)
    def loop_decode():
        for u, at in mine.items():
            with bank.route(u): decode(model, ids[at], caches[u])
    def peft_decode(): decode(theirs, ids, peft_cache, adapter_names=rows)
    ways = {"base": base_decode, "bank": bank_decode, "PEFT adapter_names": peft_decode, "per user": loop_decode}
    if "decode" in args.work: out.append(("decode", in_turns(ways, args.rounds)))
    theirs = spare = base_cache = bank_cache = peft_cache = caches = None      # their memory is free again
    if gpu: torch.cuda.empty_cache()

    opt, embed = torch.optim.AdamW(bank.param_groups(1e-4), fused=gpu), model.get_input_embeddings()
    optimizers = {"bank": opt}
    def own_loop(way):
        "Seconds of each round of steps in bmlab's own loop: static cache, on a GPU a captured graph"
        with torch.no_grad(), way:
            d = Decoder(model, args.rows, length + (args.rounds + 1) * args.steps)
            d.prefill(ids.tolist())
            def steps():
                for _ in range(args.steps): d.step(ids[:, :1])
            steps()
            times = [seconds(steps) for _ in range(args.rounds)]
        if gpu and d.why_eager: print(f"no graph: {d.why_eager}", flush=True)
        return times
    def in_loop(): return {"base": own_loop(bank.off()), "bank": own_loop(bank.route(rows))}
    if "loop" in args.work:
        out.append(("decode, own loop", in_loop()))
        fused = fuse_decode(model)
        out.append(("decode, own loop, fused", in_loop()))
        fused.undo()
    if gpu: torch.cuda.empty_cache()

    def backward(ids):
        model(inputs_embeds=embed(ids).detach().requires_grad_(), labels=ids, use_cache=False).loss.backward()
    def base_train():
        with bank.off(): backward(ids)
    def bank_train():
        with bank.route(rows): backward(ids)
        optimizers["bank"].step()
        optimizers["bank"].zero_grad()
    def loop_train():
        for u, at in mine.items():
            with bank.route(u): backward(ids[at])
        optimizers["bank"].step()
        optimizers["bank"].zero_grad()
    one = Lora(model, r=8, modules=TARGETS[modules], name="one").detach()
    one_opt = torch.optim.AdamW(one.parameters(), lr=1e-4, fused=gpu)
    def one_train():
        with bank.off(): backward(ids)
        one_opt.step()
        one_opt.zero_grad()
    @contextlib.contextmanager
    def one_attached():
        one.attach()
        yield
        one.detach()
    if "train" in args.work:
        ways = {"base": base_train, "bank": bank_train}
        out.append(("train, torch's AdamW", in_turns(ways, args.rounds)))
        # (its moments go before the other's come)
        optimizers.clear()
        del opt
        optimizers["bank"] = BankAdamW(bank, 1e-4)
        ways |= {"per user": loop_train, "one LoRA": one_train}
        out.append(("train", in_turns(ways, args.rounds, {"one LoRA": one_attached})))
    bank.unfreeze().detach()
    for name in ("one", bank.name): deltas(model).forget(name)
    return out


model, rows = build(), []
for modules in args.modules:
    for users in args.users:
        for work, times in compare(model, users, modules):
            ratio = lambda a, b: statistics.median(x / y for x, y in zip(times[a], times[b]))
            per = args.steps if work.startswith("decode") else 1
            rows.append(
                {
                    "LoRA on": modules,
                    "users": users,
                    "work": work,
                    **{f"{k} ms": round(statistics.median(t) * 1e3 / per, 2) for k, t in times.items()},
                    "× base": round(ratio("bank", "base"), 3),
                    "faster than PEFT": round(ratio("PEFT adapter_names", "bank"), 2)
                    if "PEFT adapter_names" in times
                    else None,
                    "faster than per user": round(ratio("per user", "bank"), 2) if "per user" in times else None,
                }
            )
            print(rows[-1], flush=True)
        if gpu: torch.cuda.empty_cache()
frame = show(
    rows, f"delta bank: {args.rows} rows of {length} tokens on {torch.cuda.get_device_name() if gpu else 'the CPU'}"
)
slow = frame[frame["× base"] > 1.25]
print(
    "≤ 1.25 × the base model's step: "
    + ("all" if slow.empty else "not " + ", ".join(f"{r[0]} {r[2]} at {r[1]}" for r in slow.values.tolist()))
)
behind = frame[(frame["faster than PEFT"] < 2) & (frame["users"] == 8)]
print(
    "≥ 2 × faster than PEFT's adapter_names at 8 users: "
    + ("all" if behind.empty else "not " + ", ".join(f"{r[0]} {r[2]}" for r in behind.values.tolist()))
)

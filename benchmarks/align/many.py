"""Sixteen users' supervised steps on one backbone beside one user's with the same tokens: seconds a step.

usage: python benchmarks/align/many.py [--size tiny|smol|8b] [--users 16] [--length 1024] [--bits 4] [--runs NAME …]

Every user brings one row of random tokens, has a LoRA r = 8 on all linear layers and AdamW of torch. "one user" has all
rows. "one after another" are the same users, a pass and a step each. "PEFT" keeps as many adapters on one model, and
switches from one to the next with `set_adapter`, as its users do. Bound: the one user's time, whose work it is.
"""
import argparse, sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))
from training import child, clock, leave, llama_8b, random_ids, recompute, result, show

RUNS = ["one user", "many at once", "one after another", "PEFT"]
p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
p.add_argument("--runs", nargs="+", default=RUNS)
p.add_argument("--size", choices=("tiny", "smol", "8b"), default="8b")
p.add_argument("--users", type=int, default=16)
p.add_argument("--length", type=int, default=1024)
p.add_argument("--bits", type=int, choices=(4, 8), help="of the backbone; 16 where not given (32 on a CPU)")
p.add_argument("--steps", type=int, default=6)
p.add_argument("--child")
args = p.parse_args()
GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if GPU else torch.device("cpu")


def llama():
    import transformers as tf
    config = llama_8b(args.size == "tiny", vocab=500)
    if args.size == "smol":
        config = tf.LlamaConfig(
            hidden_size=576, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3, intermediate_size=1536,
            vocab_size=49152, tie_word_embeddings=True)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16 if GPU else torch.float32)
    with DEVICE: model = tf.LlamaForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    if args.bits:
        from bmlab.kernels.layers import pack_linears
        pack_linears(model, bits=args.bits)
    return (recompute(model) if args.size == "8b" else model).train()


def timed(step, vocab):
    said = clock(step, random_ids(vocab, args.users, args.length, DEVICE), DEVICE, warm=2, steps=args.steps)
    said.pop("loss")
    result(**said, tokens_per_s=round(args.users * args.length / said["step_s"]))


def ours(users, together):
    from bmlab.align.many import ManyRuns
    model = llama()
    many = ManyRuns(model, None, rows=args.users)
    runs = [many.add(f"user {n}", r=8, lr=1e-4, dtype=torch.float32) for n in range(users)]

    def step(ids):
        calls = []
        for run, rows in zip(runs, ids.chunk(users)):
            calls.append(run.forward_backward(dict(input_ids=rows, labels=rows)))
            last = run.optim_step()
            if not together: last.result()
        last.result()
        return torch.tensor(calls[-1].result().loss)
    timed(step, model.config.vocab_size)


def theirs():
    import peft
    model = llama()
    vocab = model.config.vocab_size
    config = peft.LoraConfig(r=8, lora_alpha=16, target_modules="all-linear")
    names = [f"user{n}" for n in range(args.users)]
    if args.size == "8b": model.enable_input_require_grads()
    model = peft.get_peft_model(model, config, names[0])
    for name in names[1:]: model.add_adapter(name, config)
    own = {n: [q for k, q in model.named_parameters() if f".{n}." in k] for n in names}
    opts = {n: torch.optim.AdamW(own[n], lr=1e-4) for n in names}

    def step(ids):
        for name, rows in zip(names, ids.chunk(args.users)):
            model.set_adapter(name)
            loss = model(input_ids=rows, labels=rows, use_cache=False).loss
            loss.backward()
            opts[name].step()
            opts[name].zero_grad()
        return loss
    timed(step, vocab)


if args.child:
    if args.child == "PEFT": theirs()
    else: ours(1 if args.child == "one user" else args.users, args.child != "one after another")
    leave()
rows = []
for name in args.runs:
    more = ["--size", args.size, "--users", str(args.users), "--length", str(args.length), "--steps", str(args.steps)]
    if args.bits: more += ["--bits", str(args.bits)]
    rows.append({"run": name} | child(__file__, "--child", name, *more))
    print(rows[-1], flush=True)
one = next((r["step_s"] for r in rows if r["run"] == "one user" and r.get("step_s")), None)
for r in rows:
    if one and r.get("step_s"): r["of one user's time"] = round(r["step_s"] / one, 2)
show(rows, f"many: {args.size}, {args.users} users, a row of {args.length} tokens each")

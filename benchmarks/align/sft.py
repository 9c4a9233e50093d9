"""SFT of an 8B LLaMA shape on chats, packed into rows of 2 × 4096 tokens, LoRA of rank 16 on all linear layers:
tokens/s and peak memory, beside TRL's SFTTrainer with PEFT.

usage: python benchmarks/align/sft.py [--runs NAME …] [--tiny]

bf16 weights, adapters in float32, the assistant's words learned and gradients clipped to 1 on both sides. TRL as its
users write it: `packing=True`, `assistant_only_loss=True`, its default of recomputing every layer, "fused" AdamW, the
attention that is there without a further package. bmlab: `Chats.batches`, attention within each conversation, layers
compiled, as many recomputed as the plan says, the loss by chunks, `fit`; once more inside about the memory that TRL
takes on an H100. Conversations have 64 to 1,024 tokens, all sizes of their logarithm alike. Tokens are those of
conversations, padding left out.
Bound: a step's arithmetic at the rate that a large product reaches, 4 · P · T (no gradients of frozen weights).
"""
import argparse, math, random, sys, tempfile, time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))
from training import child, keep, leave, llama_8b, result, show, word_tokenizer

RUNS = ["TRL + PEFT", "bmlab", "bmlab in 20.4GiB"]
p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
p.add_argument("--runs", nargs="+", default=RUNS, choices=RUNS)
p.add_argument("--tiny", action="store_true", help="sizes for a CPU")
p.add_argument("--child")
args = p.parse_args()
GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if GPU else torch.device("cpu")
CONFIG = llama_8b(args.tiny, vocab=512)
LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
BATCH, SEQ = 2, 256 if args.tiny else 4096
WARM, STEPS = (1, 3) if args.tiny else (3, 13)
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ '2 ' + m.content + ' ' }}{% else %}{{ '3 ' }}{% generation %}"
    "{{ m.content + ' 4 ' }}{% endgeneration %}{% endif %}{% endfor %}"
)


def llama():
    import transformers as tf
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with DEVICE: model = tf.LlamaForCausalLM(CONFIG)
    torch.set_default_dtype(torch.float32)
    return model.train()


def tokenizer():
    tok = word_tokenizer(CONFIG.vocab_size)
    tok.chat_template, tok.eos_token = TEMPLATE, "4"
    return tok


def chats():
    "As many conversations as the steps read, and some more"
    draw, least, most = random.Random(0), 64, SEQ // 4
    words = lambda n: " ".join(str(draw.randrange(10, CONFIG.vocab_size)) for _ in range(n))
    rows, tokens = [], 0
    while tokens < 1.3 * STEPS * BATCH * SEQ:
        n = round(math.exp(draw.uniform(math.log(least), math.log(most))))
        turns = [("user", n // 3), ("assistant", n - n // 3 - 3)]
        rows.append({"messages": [{"role": role, "content": words(k)} for role, k in turns]})
        tokens += n
    return rows


class Watch:
    "Seconds and tokens of the steps after the first ones"
    def __init__(self): self.ends, self.tokens = [], []

    def step(self):
        if GPU: torch.cuda.synchronize()
        self.ends.append(time.perf_counter())

    def said(self, **more):
        seconds = self.ends[-1] - self.ends[WARM - 1]
        tokens = sum(self.tokens[WARM:len(self.ends)])
        return dict(
            tokens_per_s=round(tokens / seconds), step_s=round(seconds / (len(self.ends) - WARM), 4),
            tokens=round(tokens / (len(self.ends) - WARM)),
            peak_GiB=round((torch.cuda.max_memory_allocated() if GPU else 0) / 2**30, 2), **more)


def theirs():
    import peft, transformers as tf
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer
    watch, tok = Watch(), tokenizer()

    class Clock(tf.TrainerCallback):
        def on_step_end(self, *a, **kw): watch.step()

    how = SFTConfig(
        tempfile.mkdtemp(), packing=True, max_length=SEQ, assistant_only_loss=True, learning_rate=1e-4,
        per_device_train_batch_size=BATCH, max_steps=STEPS, logging_steps=STEPS, save_strategy="no",
        max_grad_norm=1.0, report_to="none", bf16=GPU, use_cpu=not GPU, optim="adamw_torch_fused")
    trainer = SFTTrainer(
        llama(), how, train_dataset=Dataset.from_list(chats()), processing_class=tok, callbacks=[Clock()],
        peft_config=peft.LoraConfig(r=16, target_modules=LAYERS))
    collate = trainer.data_collator

    def counted(rows):
        batch = collate(rows)
        watch.tokens.append(sum(len(r["input_ids"]) for r in rows))
        return batch
    trainer.data_collator = counted
    trainer.train()
    result(**watch.said(attention=trainer.model.config._attn_implementation))


def ours(name):
    from bmlab.all import Chats, Lora, document_attention, fit, lm_loss, plan_training, shard
    model = llama()
    delta = Lora(model, r=16, modules=LAYERS, dtype=torch.float32).freeze()
    document_attention(model)
    rows = Chats(chats(), tokenizer()).batches(seq=SEQ, batch=BATCH, seed=0)
    example = next(iter(rows))
    plan = plan_training(
        model, BATCH, SEQ, inputs=example, loss="chunked", offload=None, master=None, compile=GPU,
        memory_limit=name.partition(" in ")[2] if GPU and " in " in name else None, machine=None if GPU else "h100-80")
    print(plan, file=sys.stderr)
    keep(plan, name.replace(" ", "-").replace("bmlab", "sft"), args.tiny)
    shard(model, checkpoint=plan.recompute, budget=plan.budget, compile=GPU, dtype=torch.bfloat16 if GPU else None)
    opt, watch = torch.optim.AdamW(delta.trainable(), lr=1e-4, fused=True), Watch()

    def counted():
        for batch in rows:
            watch.tokens.append(int((batch["input_ids"] != 0).sum()))         # (nothing but padding is 0)
            yield batch
    timed = [lambda run: watch.step()]
    fit(model, counted(), opt, steps=STEPS, loss=lm_loss, clip=1.0, callbacks=timed, plot=False)
    result(**watch.said(
        recomputed=plan.recompute, predicted_s=round(plan.step_s, 3),
        predicted_GiB=round(plan.peak_bytes / 2**30, 2)))


if args.child:
    theirs() if args.child == "TRL + PEFT" else ours(args.child)
    leave()
rows = []
for name in args.runs:
    rows.append({"run": name} | child(__file__, "--child", name, *(["--tiny"] if args.tiny else [])))
    print(rows[-1], flush=True)
peer = next((r.get("tokens_per_s") for r in rows if r["run"] == "TRL + PEFT"), None)
for r in rows:
    if peer and r.get("tokens_per_s"): r["of TRL's tokens/s"] = round(r["tokens_per_s"] / peer, 2)
show(rows, f"sft: 8B, {BATCH} × {SEQ} tokens of packed chats")

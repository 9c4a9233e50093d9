"""A step of Grpo on an 8B shape in int4 with a LoRA: sampling tokens/s, seconds of each part, peak memory; and the
tokens/s of transformers' `generate` on the same model and prompts, in the same run.

usage: grpo.py [--tiny] [--prompts 16] [--group 8] [--new 512] [--batch 8] [--steps 3] [--bits 4] [--peer-new 64]
       grpo.py --eager [--tiny] …  blocks as transformers writes them, every one recomputed
       grpo.py --trl [--tiny] …    the same steps by TRL's GRPOTrainer and PEFT, on bf16 weights

Blocks are compiled, and as few recompute as the plan says (`shard`). What was planned is printed first. Weights are
random, and no token ends a text, so that each has all its tokens; the peer writes --peer-new of them, after some that
warm it up. What bmlab did is printed before the peer begins. --tiny is a dry run of a small model.
"""
import argparse, json, sys, time
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from bmlab.align.grpo import Grpo
from bmlab.core import set_seed
from bmlab.delta.lora import Lora
from bmlab.kernels.layers import pack_linears
from bmlab.train.sharding import shard

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))
from training import word_tokenizer

LLAMA3_8B = dict(hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
                 num_key_value_heads=8, vocab_size=128256, rope_theta=5e5, max_position_embeddings=8192)  # fmt: skip
TINY = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=512)


LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def made(a):
    "(model, its tokenizer, prompts as ids)"
    set_seed(0)
    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    size = TINY if a.tiny else LLAMA3_8B
    with torch.device(device): model = LlamaForCausalLM(LlamaConfig(**size, eos_token_id=None)).to(dtype)
    model.generation_config.eos_token_id = None
    words = torch.randint(1, size["vocab_size"], (a.prompts, a.length)).tolist()
    return model, word_tokenizer(size["vocab_size"]), words


def trl(a):
    "Seconds of the steps of TRL's trainer, with transformers' sampler, and its peak"
    import tempfile
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer
    model, tok, words = made(a)
    cuda, began, took = torch.cuda.is_available(), [], []
    class Clock(TrainerCallback):
        def on_step_begin(self, *_, **__): began.append(time.perf_counter())
        def on_step_end(self, *_, **__):
            if cuda: torch.cuda.synchronize()
            took.append(round(time.perf_counter() - began[-1], 2))
            print(json.dumps({"step": len(took), "seconds": took[-1]}), flush=True)
    # (random weights draw it hardly ever)
    tok.eos_token = tok.pad_token = tok.convert_ids_to_tokens(0)
    tok.padding_side = "left"
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            folder, num_generations=a.group, max_completion_length=a.new, per_device_train_batch_size=a.batch,
            gradient_accumulation_steps=a.prompts * a.group // a.batch, max_steps=a.steps, learning_rate=1e-4,
            beta=0.0, loss_type="dapo", temperature=1.0, bf16=cuda, use_cpu=not cuda, gradient_checkpointing=True,
            report_to="none", save_strategy="no", logging_strategy="no", disable_tqdm=True,
        )
        rows = Dataset.from_list([{"prompt": " ".join(map(str, row))} for row in words])
        reward = lambda completions, **_: [len(set(t.split())) / a.new for t in completions]
        lora = LoraConfig(r=16, target_modules=LINEAR, task_type="CAUSAL_LM")
        trainer = GRPOTrainer(model, reward, config, rows, processing_class=tok, peft_config=lora, callbacks=[Clock()])
        if cuda: torch.cuda.reset_peak_memory_stats()
        trainer.train()
    print(json.dumps({
        "run": "TRL + PEFT", "machine": torch.cuda.get_device_name() if cuda else "cpu", "texts": a.prompts * a.group,
        "seconds of each step": took,
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2) if cuda else None}))


def main(a):
    if a.trl: return trl(a)
    cuda = torch.cuda.is_available()
    model, tok, words = made(a)
    device = model.device
    if a.bits: pack_linears(model, bits=a.bits, exclude="lm_head", group_size=32 if a.tiny else 128)
    lora = Lora(model, r=16, modules=LINEAR).freeze()
    if a.eager: model.gradient_checkpointing_enable()
    else: shard(model, checkpoint="auto", compile=True, dtype=None)
    prompts = [" ".join(map(str, row)) for row in words]
    grpo = Grpo(
        model, tok, prompts, lambda p, t: len(set(t.split())) / a.new, "dapo", group=a.group,
        prompts_per_step=a.prompts, max_new_tokens=a.new, batch=a.batch
    )
    plan = grpo.plan()
    print(plan, flush=True)
    if cuda: torch.cuda.reset_peak_memory_stats()
    log = grpo.fit(torch.optim.AdamW(lora.trainable(), lr=1e-4), steps=a.steps, plot=False)
    last = log.tail(max(len(log) - 1, 1))                           # (the first step captures graphs)
    row = {
        "machine": torch.cuda.get_device_name() if cuda else "cpu", "texts": grpo.texts, "new": a.new,
        "sampling_tok_s": round((last.new_tokens / last.sampling_s).median(), 1), "gap": log.gap.max(),
        **{k: round(last[k].median(), 3) for k in ("sampling_s", "scoring_s", "training_s")},
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2) if cuda else None,
        "predicted": {
            "sampling_s": round(plan.sampling_s, 2), "training_s": round(plan.training_s, 2),
            "peak_gib": round(plan.peak_bytes / 2**30, 2)},
        "blocks": repr(model.sharding) if not a.eager else "eager, all recomputed",
        "cache_gib": round(grpo.decoder.cache.bytes / 2**30, 2), "eager": grpo.decoder.why_eager,
    }
    print(json.dumps(row), flush=True)
    if not a.peer_new: return
    grpo.decoder = None
    ids = torch.tensor([r for r in words for _ in range(a.group)], device=device)
    if a.eager: model.gradient_checkpointing_disable()
    model.eval()
    # (fresh shapes at every token: nothing to compile)
    torch.compiler.set_stance("force_eager")
    for n in (4, a.peer_new):
        start = time.perf_counter()
        with torch.no_grad(): out = model.generate(ids, max_new_tokens=n, do_sample=True, top_k=0, pad_token_id=0)
        if cuda: torch.cuda.synchronize()
        took = time.perf_counter() - start
    row["transformers_tok_s"] = round(out[:, ids.shape[1]:].numel() / took, 1)
    row["ratio"] = round(row["sampling_tok_s"] / row["transformers_tok_s"], 2)
    print(json.dumps(row))


if __name__ == "__main__":
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--tiny", action="store_true")
    p.add_argument("--trl", action="store_true")
    p.add_argument("--eager", action="store_true")
    for name, n in dict(prompts=16, group=8, new=512, batch=8, steps=3, bits=4, length=128, peer_new=64).items():
        p.add_argument(f"--{name.replace('_', '-')}", type=int, default=n)
    main(p.parse_args())

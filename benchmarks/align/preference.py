"""DPO of an 8B LLaMA shape on one GPU, 4 pairs of 2 × 1024 tokens, LoRA r = 8 on q and v: seconds a step, peak memory.

usage: python benchmarks/align/preference.py [--runs NAME …] [--pairs 4] [--length 1024] [--tiny]

bf16 weights, every layer recomputed, fused AdamW on all sides. The first half of each row is prompt. "PEFT, logits
held" is the loss as it is mostly written: both forwards' logits, a log-softmax of them, the adapters switched off for
the reference. "TRL" is its DPOTrainer's own loss where TRL is installed. bmlab: `Dpo`, in the same loop; once more on
weights of four bits.
Bound: two forwards and one backward of 2 × 4 × 1024 tokens, with one more forward for what is recomputed.
"""
import argparse, sys, tempfile
from pathlib import Path

import torch
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))
from training import child, clock, leave, llama_8b, plain_step, random_ids, recompute, result, show, word_tokenizer

RUNS = ["PEFT, logits held", "TRL", "bmlab Dpo", "bmlab Dpo, int4"]
p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
p.add_argument("--runs", nargs="+", default=RUNS)
p.add_argument("--pairs", type=int, default=4)
p.add_argument("--length", type=int, default=1024)
p.add_argument("--tiny", action="store_true", help="sizes for a CPU")
p.add_argument("--child")
args = p.parse_args()
GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if GPU else torch.device("cpu")
PAIRS, LENGTH = (2, 32) if args.tiny else (args.pairs, args.length)
BETA, WHERE = 0.1, ["q_proj", "v_proj"]


def llama():
    import transformers as tf
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with DEVICE: model = tf.LlamaForCausalLM(llama_8b(args.tiny, vocab=500))
    torch.set_default_dtype(torch.float32)
    return recompute(model).train()


def learned(ids):
    "(2 · pairs, L) the second half of each row"
    return torch.arange(ids.shape[1], device=ids.device).expand_as(ids) >= ids.shape[1] // 2


def run(model, tuned, loss_of):
    step = plain_step(model, torch.optim.AdamW(tuned, lr=1e-4, fused=True), loss_of)
    said = clock(step, random_ids(model.config.vocab_size, 2 * PAIRS, LENGTH, DEVICE), DEVICE, warm=3, steps=6)
    result(**said, tokens_per_s=round(2 * PAIRS * LENGTH / said["step_s"]))


def with_peft():
    import peft
    model = llama()
    model.enable_input_require_grads()
    model = peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules=WHERE))
    return model, [q for q in model.parameters() if q.requires_grad]


def held():
    model, tuned = with_peft()

    def sums(ids):
        logp = model(input_ids=ids, use_cache=False).logits[:, :-1].float().log_softmax(-1)
        return (logp.gather(2, ids[:, 1:, None])[..., 0] * learned(ids)[:, 1:]).sum(1)

    def loss_of(model, ids):
        with torch.no_grad(), model.disable_adapter(): reference = sums(ids)
        chosen, rejected = (BETA * (sums(ids) - reference)).chunk(2)
        return -F.logsigmoid(chosen - rejected).mean()
    run(model, tuned, loss_of)


def theirs():
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer
    model, tuned = with_peft()
    tok = word_tokenizer(model.config.vocab_size)
    tok.eos_token = "4"
    text = Dataset.from_list([{"prompt": "5", "chosen": " 6", "rejected": " 7"}] * 2)
    how = DPOConfig(tempfile.mkdtemp(), beta=BETA, report_to="none", bf16=False, use_cpu=not GPU)
    trainer = DPOTrainer(model, args=how, train_dataset=text, processing_class=tok)

    def loss_of(_, ids):
        batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "completion_mask": learned(ids).long()}
        return trainer.compute_loss(trainer.model, batch)
    run(trainer.model, [q for q in trainer.model.parameters() if q.requires_grad], loss_of)


def ours(name):
    from bmlab.all import Dpo, Lora, pack_linears
    model = llama()
    if "int4" in name: pack_linears(model, bits=4, exclude="lm_head")
    d = Lora(model, r=8, modules=WHERE).freeze()
    dpo = Dpo(BETA)
    labels = torch.tensor([1.] * PAIRS + [0.] * PAIRS, device=DEVICE)
    lengths = torch.full((2 * PAIRS,), LENGTH, device=DEVICE)

    def loss_of(model, ids):
        how = {"learned": learned(ids), "lengths": lengths, "labels": labels, "paired": True, "use_cache": False}
        return dpo(model, {"input_ids": ids} | how)
    run(model, d.trainable(), loss_of)


if args.child:
    {"PEFT, logits held": held, "TRL": theirs}.get(args.child, lambda: ours(args.child))()
    leave()
rows = []
for name in args.runs:
    more = ["--pairs", str(args.pairs), "--length", str(args.length), *(["--tiny"] if args.tiny else [])]
    rows.append({"run": name} | child(__file__, "--child", name, *more))
    print(rows[-1], flush=True)
peer = next((r for r in rows if r["run"] == "PEFT, logits held" and r.get("step_s")), None)
for r in rows:
    if peer and r.get("step_s"):
        r["of PEFT's time"] = round(r["step_s"] / peer["step_s"], 3)
        r["of PEFT's peak"] = round(r["peak_GiB"] / peer["peak_GiB"], 3) if peer["peak_GiB"] else None
show(rows, f"preference: 8B, {PAIRS} pairs of 2 × {LENGTH} tokens")

"""What TRL's own DPO, KTO, ORPO and CPO trainers give for tiny models: tests/align/test_preference.py compares with it.

usage: original_trl_preference.py [FILE]     with TRL 1.16 and datasets installed

FILE: default tests/fixtures/original_trl_preference.json

The trainers are made as their users make them, on a CPU in float32, and asked for the loss of one batch. Weights and
ids are computed by formulas, so that nothing but figures is stored: of each loss its value, and of each gradient its
product with a fixed vector.
"""
import json, sys, tempfile
from pathlib import Path

import torch
import transformers as tf

ROOT = Path(__file__).resolve().parents[1]
SIZES = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=61)
KV = dict(SIZES, num_key_value_heads=2)
FAMILIES = {
    "llama": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**KV)),
    "gpt2": lambda: tf.GPT2LMHeadModel(tf.GPT2Config(
        n_embd=32, n_layer=2, n_head=4, vocab_size=61, n_positions=64, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)),
    "qwen3": lambda: tf.Qwen3ForCausalLM(tf.Qwen3Config(**KV, head_dim=8)),
    "gemma2": lambda: tf.Gemma2ForCausalLM(tf.Gemma2Config(**KV, head_dim=8, final_logit_softcapping=3.0)),
}
LENGTHS = {"prompt": [5, 3, 7], "chosen": [6, 2, 4], "rejected": [3, 9, 4]}    # tokens of three pairs
PAD = 0
DPO = {
    "dpo": dict(beta=0.3, loss_types=["sigmoid"]),
    "dpo, sft": dict(beta=0.3, loss_types=["sigmoid", "sft"], loss_weights=[1.0, 0.5]),
    "dpo, robust": dict(beta=0.3, loss_types=["robust"], label_smoothing=0.1),
    "dpo, per token": dict(beta=1.5, loss_types=["sigmoid_norm"]),
    "ipo": dict(beta=0.3, loss_types=["ipo"]),
}


def noise(n, seed):
    "(n,) float64 in [−0.5, 0.5), the same everywhere"
    x = torch.sin((torch.arange(n, dtype=torch.float64) + 1) * 12.9898 + 78.233 * (seed + 1)) * 43758.5453
    return x - x.floor() - 0.5


def family(name, moved=0.):
    "A model of a family; `moved` away from where it was"
    model = FAMILIES[name]()
    for i, (_, p) in enumerate(model.named_parameters()):
        new = noise(p.numel(), i) * 0.5 + noise(p.numel(), 1000 + i) * moved
        p.data.copy_((new if p.ndim > 1 else new * 0.2 + 0.9).view(p.shape))
    return model.train()


def pairs():
    "prompt, chosen and rejected of each pair, as ids"
    def ids(n, seed): return [1 + int((x + 0.5) * 60) for x in noise(n, seed)]
    return [{k: ids(n[i], 10 * i + j) for j, (k, n) in enumerate(LENGTHS.items())} for i in range(3)]


def projected(model):
    "name → product of its gradient with a fixed vector"
    return {n: float(p.grad.double().flatten() @ noise(p.numel(), 5000 + i))
            for i, (n, p) in enumerate(model.named_parameters()) if p.grad is not None}


def padded(rows, fill):
    return torch.tensor([r + [fill] * (max(map(len, rows)) - len(r)) for r in rows])


def joined(prompts, answers):
    "ids, attention mask and completion mask of prompts with answers"
    rows = [p + a for p, a in zip(prompts, answers)]
    marks = [[0] * len(p) + [1] * len(a) for p, a in zip(prompts, answers)]
    return padded(rows, PAD), padded([[1] * len(r) for r in rows], 0), padded(marks, 0)


def main(out):
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer
    from trl.experimental.cpo import CPOConfig, CPOTrainer
    from trl.experimental.orpo import ORPOConfig, ORPOTrainer
    sys.path.insert(0, str(ROOT))
    from bmlab.models.load import sample_dir

    tok = tf.AutoTokenizer.from_pretrained(sample_dir("smollm2-135m"))
    options = dict(output_dir=tempfile.mkdtemp(), use_cpu=True, report_to="none")
    options |= dict(bf16=False, gradient_checkpointing=False)
    text = Dataset.from_list([{"prompt": "a", "chosen": " b", "rejected": " c"}] * 2)
    judged = Dataset.from_list([{"prompt": "a", "completion": " b", "label": n % 2 == 0} for n in range(4)])
    rows = pairs()
    column = lambda k: [r[k] for r in rows]
    prompts, answers = column("prompt") * 2, column("chosen") + column("rejected")
    found = {}

    def note(name, what, loss, model):
        loss.backward()
        found.setdefault(name, {})[what] = {"loss": loss.item(), "gradients": projected(model)}
        model.zero_grad()

    for name in FAMILIES:
        model, before = family(name, 0.2), family(name)
        ids, there, said = joined(prompts, answers)
        batch = {"input_ids": ids, "attention_mask": there, "completion_mask": said}
        trainer = DPOTrainer(model, before, DPOConfig(**options), train_dataset=text, processing_class=tok)
        for what, how in DPO.items():
            trainer.beta, trainer.loss_types = how["beta"], how["loss_types"]
            trainer.label_smoothing = how.get("label_smoothing", 0.)
            trainer.loss_weights = how.get("loss_weights", [1.])
            note(name, what, trainer.compute_loss(model, batch), model)

        model = family(name, 0.2)
        how = dict(beta=0.3, desirable_weight=1.5, undesirable_weight=0.75, per_device_train_batch_size=2)
        trainer = KTOTrainer(model, before, KTOConfig(**options, **how), train_dataset=judged, processing_class=tok)
        keys = ("KL_input_ids", "KL_attention_mask", "KL_completion_mask")
        other = dict(zip(keys, joined(prompts, answers[-1:] + answers[:-1])))
        good = torch.tensor([True] * 3 + [False] * 3)
        note(name, "kto", trainer.compute_loss(model, batch | other | {"label": good}), model)

        sides = {}
        for side in ("chosen", "rejected"):
            ids, there, said = joined(column("prompt"), column(side))
            sides |= {f"{side}_input_ids": ids, f"{side}_attention_mask": there}
            sides[f"{side}_labels"] = ids.masked_fill(said == 0, -100)
        model = family(name, 0.2)
        trainer = ORPOTrainer(model, ORPOConfig(**options, beta=0.4), train_dataset=text, processing_class=tok)
        note(name, "orpo", trainer.compute_loss(model, sides), model)
        model = family(name, 0.2)
        how = dict(loss_type="simpo", cpo_alpha=0., beta=2., simpo_gamma=1., label_smoothing=0.1)
        trainer = CPOTrainer(model, CPOConfig(**options, **how), train_dataset=text, processing_class=tok)
        note(name, "simpo", trainer.compute_loss(model, sides), model)

    short = json.loads(json.dumps(found), parse_float=lambda x: float(f"{float(x):.9g}"))
    made = {"recipe": "tools/original_trl_preference.py", "of": "https://github.com/huggingface/trl, 1.16.0"}
    made["families"] = short
    Path(out).write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:] or [ROOT / "tests/fixtures/original_trl_preference.json"])

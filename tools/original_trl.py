"""Losses and gradients that TRL's own GRPO and RLOO trainers compute: what tests/align/test_grpo.py reads.

usage: original_trl.py [FILE]   in an environment with trl==1.16.0; FILE: default tests/fixtures/original_trl_grpo.json

The trainers are made as their users make them, on a CPU, and are given inputs of ours in the place of sampled texts.
Weights are not stored: `weights` draws the same ones again, name by name, and `texts` the same inputs. A gradient is
kept as its norm and its product with drawn numbers.
"""
import json, sys, tempfile, zlib
from pathlib import Path

import torch
import transformers

WORDS, PROMPT, LENGTH, ROWS, GROUP = 24, 5, 7, 8, 4
SIZE = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, vocab_size=WORDS,
            max_position_embeddings=32, bos_token_id=1, eos_token_id=2, pad_token_id=0)  # fmt: skip
FAMILIES = {
    "Llama": SIZE,
    "Qwen3": dict(SIZE, num_key_value_heads=1, head_dim=8),
    "Gemma2": dict(SIZE, num_key_value_heads=1, head_dim=8, final_logit_softcapping=3.0),
    "GPTNeoX": SIZE,
}
CASES = {  # name → options of TRL's GRPOConfig, and the same in our words
    "grpo": (dict(loss_type="grpo"), dict(method="grpo")),
    "dr_grpo": (dict(loss_type="dr_grpo", scale_rewards="none"), dict(method="dr_grpo")),
    "dapo": (dict(loss_type="dapo", epsilon_high=0.28), dict(method="dapo")),
    "bnpo": (dict(loss_type="bnpo"), dict(method="grpo", normalize="token")),
    "batch": (dict(loss_type="grpo", scale_rewards="batch"), dict(method="grpo", scale="batch")),
    "clip-higher": (dict(loss_type="grpo", epsilon=0.1, epsilon_high=0.4), dict(method="grpo", clip=(0.1, 0.4))),
    "sequence": (dict(loss_type="grpo", importance_sampling_level="sequence"), dict(method="grpo", level="sequence")),
    "kl": (dict(loss_type="grpo", beta=0.3), dict(method="grpo", kl=0.3)),
    "kl, plain": (dict(loss_type="grpo", beta=0.3, use_bias_correction_kl=False), dict(kl=0.3, kl_ratio=False)),
    "kl, dapo": (dict(loss_type="dapo", epsilon_high=0.28, beta=0.3), dict(method="dapo", kl=0.3)),
    "temperature": (dict(loss_type="grpo", temperature=0.7), dict(method="grpo", temperature=0.7)),
    "cap": (dict(loss_type="grpo", vllm_importance_sampling_mode="token_truncate",
                 vllm_importance_sampling_clip_max=1.05), dict(method="grpo", cap=1.05)),
    "rloo": (dict(rloo=True, beta=0.0), dict(method="rloo")),
}


def drawn(name, shape, scale):
    "Numbers that depend on a name alone"
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(shape, generator=generator, dtype=torch.float64) * scale


def weights(family, shift=""):
    "A tiny model with drawn weights; another `shift`, another model near it"
    config = getattr(transformers, f"{family}Config")(**FAMILIES[family], attn_implementation="eager")
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    for name, p in model.named_parameters():
        p.data = drawn(name, p.shape, 0.3).float()
        if shift: p.data += drawn(name + shift, p.shape, 0.08).float()
    return model


def texts():
    "(prompts (B, P), texts (B, T), mask (B, T), rewards (B,)); prompts of one length, so that nothing is padded there"
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, WORDS, (ROWS, PROMPT + LENGTH), generator=generator)
    ids[:, :PROMPT] = ids[::GROUP, :PROMPT].repeat_interleave(GROUP, 0)
    lengths = torch.tensor([7, 3, 5, 1, 6, 7, 2, 4])
    mask = torch.arange(LENGTH) < lengths[:, None]
    rewards = torch.tensor([1.0, 0.0, 0.5, 0.0, 2.0, -1.0, 0.25, 0.0])
    return ids[:, :PROMPT], ids[:, PROMPT:].masked_fill(~mask, 0), mask.long(), rewards


def told(model):
    "{parameter: [norm of its gradient, product with drawn numbers]}"
    return {n: [p.grad.double().norm().item(), (p.grad.double() * drawn(n + " seen", p.shape, 1.0)).sum().item()]
            for n, p in model.named_parameters()}  # fmt: skip


class Tokenizer(transformers.PreTrainedTokenizerFast):
    "One of single numbers: a trainer wants a tokenizer, and reads nothing with it here"


def tokenizer():
    from tokenizers import Tokenizer as Made, models, pre_tokenizers
    made = Made(models.WordLevel({str(i): i for i in range(WORDS)}, unk_token="0"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return Tokenizer(tokenizer_object=made, pad_token="0", bos_token="1", eos_token="2")


def trained(family, options, folder):
    "(loss, told gradients, advantages) of TRL's trainer"
    import datasets, trl
    options = dict(options)
    kind = "RLOO" if options.pop("rloo", False) else "GRPO"
    cap = "vllm_importance_sampling_clip_max" in options
    prompt_ids, ids, mask, rewards = texts()
    config = getattr(trl, f"{kind}Config")(
        output_dir=folder, per_device_train_batch_size=ROWS, num_generations=GROUP, max_completion_length=LENGTH,
        use_cpu=True, bf16=False, report_to="none", **options
    )
    weights(family, "reference").save_pretrained(folder)              # (the trainer reads its reference from files)
    model = weights(family)
    model.config._name_or_path = str(folder)
    trainer = getattr(trl, f"{kind}Trainer")(
        model=model, args=config, processing_class=tokenizer(),
        reward_funcs=lambda prompts, completions, **kw: rewards.tolist(),
        train_dataset=datasets.Dataset.from_list([{"prompt": "3"}] * ROWS)
    )
    trainer.model.eval()                                             # (no dropout here; and one batch is a step)
    lists = [[int(i) for i, on in zip(row, m) if on] for row, m in zip(ids, mask)]
    whole = torch.cat([prompt_ids, ids], 1)
    def log_probs(model):
        logp = model(whole).logits.detach().div(config.temperature).log_softmax(-1)[:, :-1]
        return logp.gather(-1, whole[:, 1:, None])[:, PROMPT - 1:, 0]
    sampled = log_probs(weights(family, "sampler")) * mask
    words = ["3"] * ROWS
    known = [s[m.bool()].tolist() for s, m in zip(sampled, mask)] if cap else None
    given = (prompt_ids.tolist(), lists, None, words, known, {}, None, [])
    trainer._generate = lambda prompts: given if kind == "GRPO" else (prompt_ids.tolist(), lists, words)
    trainer.use_vllm = cap
    inputs = trainer._generate_and_score_completions([{"prompt": "3"}] * ROWS)
    if kind == "GRPO" and not cap: inputs["old_per_token_logps"] = sampled
    trainer.current_gradient_accumulation_steps = 1
    loss = trainer._compute_loss(model, inputs)
    loss.backward()
    return loss.item(), told(model), inputs["advantages"].tolist()


def main(file):
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for family in FAMILIES:
            for name, (options, _) in CASES.items():
                loss, gradients, over = trained(family, options, folder)
                found.setdefault(family, {})[name] = {"loss": loss, "gradients": gradients, "advantages": over}
                print(family, name, loss)
    file.write_text(json.dumps(found, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    default = Path(__file__).parents[1] / "tests/fixtures/original_trl_grpo.json"
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else default)

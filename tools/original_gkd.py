"""What TRL's own code says of GKD's divergence: what tests/align/test_opd.py compares with.

usage: original_gkd.py [FILE]     FILE: default tests/fixtures/original_gkd.json

Needs TRL 1.16.0 and torch. Logits are not stored: `logits` draws the same ones again, and a small model's weights are
those of `model`.
"""
import json, os, sys
from pathlib import Path

import numpy as np
import torch

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
ROOT = Path(__file__).resolve().parents[1]
SHAPE = 2, 4, 7
LABELS = [[-100, 3, 1, 6], [-100, -100, 2, -100]]
CASES = [(beta, T) for beta in (0., 0.1, 0.5, 0.9, 1.) for T in (1., 0.7)]
SIZES = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, vocab_size=24)
IDS = [[1, 5, 9, 13, 17, 21], [2, 4, 8, 16, 3, 9]]
BEGIN = 3                                     # the first token that was completed


def logits(): # (2, 2, 4, 7) float64: of student and teacher
    return torch.from_numpy(np.random.RandomState(5).standard_normal((2, *SHAPE)) * 2)


def model(seed): # a tiny Llama
    import transformers as tf
    m, draw = tf.LlamaForCausalLM(tf.LlamaConfig(**SIZES)).eval(), np.random.RandomState(seed)
    with torch.no_grad():
        for _, p in sorted(m.named_parameters()): p.copy_(torch.from_numpy(draw.standard_normal(tuple(p.shape)) * .4))
    return m


def numbers(t): return [float(f"{x:.9g}") for x in t.flatten().tolist()]


def figures():
    import trl
    from trl.experimental.gkd import GKDTrainer
    loss_of, out = GKDTrainer.generalized_jsd_loss, {"trl": trl.__version__, "cases": [], "models": []}
    for beta, T in CASES:
        z, t = logits()
        z = z.clone().requires_grad_()
        loss = loss_of(z, t, labels=torch.tensor(LABELS), beta=beta, temperature=T)
        loss.backward()
        out["cases"].append({"beta": beta, "T": T, "loss": loss.item(), "grad": numbers(z.grad)})
    for beta in (0.5, 1.):
        student, teacher, ids = model(1), model(2), torch.tensor(IDS)
        cut = slice(BEGIN - 1, -1)            # as GKDTrainer.compute_loss cuts
        with torch.no_grad(): told = teacher(ids).logits[:, cut]
        loss = loss_of(student(ids).logits[:, cut], told, labels=ids[:, BEGIN:], beta=beta)
        loss.backward()
        grads = {n: numbers(p.grad) for n, p in student.named_parameters() if p.ndim == 1 or "q_proj" in n}
        out["models"].append({"beta": beta, "loss": loss.item(), "grads": grads})
    return out


if __name__ == "__main__":
    file = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "tests/fixtures/original_gkd.json"
    file.write_text(json.dumps(figures()) + "\n")

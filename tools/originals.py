"""What the scripts that run an original's code have in common: weights and inputs by name, and how figures are written.

Weights are not stored: `weights` draws the same ones again on both sides, name by name. NumPy promises that what a
RandomState draws stays as it is.
"""
import json, math, re, subprocess, sys, types, zlib
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[1]
NORM = re.compile(r"layer_?norm|\bln_|\.norm\.|^norm\.", re.IGNORECASE)


def drawn(name):
    "A source of random numbers that belongs to a name"
    return np.random.RandomState(zlib.crc32(name.encode()))


def weights(
    shapes,        # {the original's name: shape}
    spread={},     # {part of a name: what its numbers are multiplied with}; the first that fits
    summed=False,  # is a matrix divided by the root of what it sums over?
    same={},       # {name: the name whose tensor it shares}
):                 # → {name: Tensor, float32}
    "Normal numbers; norms between a half and one and a half, biases a tenth as large."
    def one(name, shape):
        draw = drawn(name)
        if name.endswith("bias") and len(shape) == 1: return draw.standard_normal(shape) * .1
        if NORM.search(name): return draw.uniform(.5, 1.5, shape)
        numbers = draw.standard_normal(shape) * next((s for word, s in spread.items() if word in name), 1)
        return numbers / math.sqrt(shape[-1]) if summed and len(shape) > 1 else numbers
    return {name: torch.from_numpy(one(same.get(name, name), tuple(shape)).astype(np.float32))
            for name, shape in shapes.items()}


def ids(name, rows, length, vocabulary, first=1): # → [[int]], no special tokens below `first`
    return drawn(name).randint(first, vocabulary, (rows, length)).tolist()


def few(logits, places, others=-2): # → [[row, place, token, logit]]
    "Of each place three logits: the largest, the smallest, and the one but last"
    out = []
    for row, place in places:
        at = logits[row, place]
        for token in (at.argmax().item(), at.argmin().item(), len(at) + others):
            out.append([row, place, token, float(f"{at[token].item():.8g}")])
    return out


def said(logits): return logits.argmax(-1).tolist()                          # the likeliest token everywhere


def stand_in(name, **values):
    "A module of that name, and those above it, with nothing in them but `values`"
    for at in [i for i, c in enumerate(name) if c == "."] + [len(name)]:
        whole = name[:at]
        if whole not in sys.modules: sys.modules[whole] = types.ModuleType(whole)
        above, _, last = whole.rpartition(".")
        if above: setattr(sys.modules[above], last, sys.modules[whole])
    for k, v in values.items(): setattr(sys.modules[name], k, v)
    return sys.modules[name]


def commit(checkout): # → the commit of a checkout, or of what `git archive` unpacked beside a file COMMIT
    if (told := Path(checkout) / "COMMIT").is_file(): return told.read_text().strip()
    head = ["git", "-C", str(checkout), "rev-parse", "HEAD"]
    return subprocess.run(head, capture_output=True, text=True, check=True).stdout.strip()


def written(found, margin=" "): # → JSON with a line for each argument
    lines = []
    for k, v in found.items():
        text = written(v, margin + " ") if isinstance(v, dict) else json.dumps(v)
        lines.append(f"{margin}{json.dumps(k)}: {text}")
    return "{\n" + ",\n".join(lines) + "}"


def keep(name, found): # writes tests/fixtures/original_NAME.json
    (ROOT / f"tests/fixtures/original_{name}.json").write_text(written(found) + "\n")

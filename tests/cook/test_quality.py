"What int8 costs on the real model: twenty thousand held-out tokens, and the size of the file."
import copy

import pytest

from bmlab.cook.report import bytes_on_disk, divergence, perplexity
from bmlab.core import count, weights
from bmlab.data.samples import Batches, pack_tokens, sample_texts, split
from bmlab.kernels.layers import pack_linears
from bmlab.cook.quantize import quantize
from bmlab.models.load import load


# 2,048 training tokens
def calibration(tok):
    return list(Batches(pack_tokens(split(sample_texts("movies").text, held_out=0.2)[0][:200], tok, 128), batch=4))[:4]


def held_out(tok, tokens, length=256):
    rows = pack_tokens(split(sample_texts("movies").text, held_out=0.2)[1], tok, length)[:-(-tokens // length)]
    assert rows.numel() >= tokens
    return list(Batches(rows, batch=4, shuffle=False))


@pytest.mark.slow
def test_int8_perplexity_within_half_a_percent():
    model, tok = load("smollm2-135m", device="cpu")
    batches = held_out(tok, 20_480)
    before = perplexity(model, batches)
    nearest = perplexity(pack_linears(copy.deepcopy(model)), batches)
    after = perplexity(quantize(model, calibration(tok)), batches)
    print(
        f"\nperplexity over 20,480 tokens: fp32 {before:.4f}, int8 {after:.4f} ({after / before - 1:+.3%}); rounded to "
        f"nearest {nearest:.4f} ({nearest / before - 1:+.3%})"
    )
    assert after < 1.005 * before and after < nearest < 1.01 * before


@pytest.mark.long
def test_int8_file_is_what_the_format_promises():
    "A byte a weight, four bytes a row, four a float32 number of the norms; the header names each tensor"
    model, tok = load("smollm2-135m", device="cpu")
    before = bytes_on_disk(model)
    small = pack_linears(copy.deepcopy(model))
    matrices = [p for p in model.parameters() if p.ndim == 2]
    promised = sum(p.numel() + 4 * p.shape[0] for p in matrices) + 4 * sum(p.numel() for p in model.parameters()
                   if p.ndim == 1)
    assert count(small).bytes == promised == sum(w.nbytes for w in weights(small) if w.tied_to is None)
    assert promised < bytes_on_disk(small) < promised + 120 * len(small.state_dict()) + 4096
    assert 0.25 < bytes_on_disk(small) / before < 0.255
    kl, same = divergence(model, small, held_out(tok, 128))
    assert kl < 0.02 and same > 0.9

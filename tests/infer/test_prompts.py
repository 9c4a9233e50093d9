"A prompt in one pass, its mask unwritten and its blocks fused, has the logits that it has in small pieces."
import pytest
import torch
import transformers as tf

from bmlab.infer.decode import Decoder
from bmlab.infer.fused import fuse_decode
from bmlab.infer.prompts import PromptMask
from bmlab.kernels.layers import pack_linears
from every_family import make

ROWS = [list(range(3, 43)), list(range(5, 24)), list(range(1, 31))]
FEW = [list(range(3, 23)), list(range(1, 18))]           # (the interpreter is slow)


def read(model, unwritten, chunk, rows=ROWS, **options):
    "Logits of the last tokens of rows that begin, and of the same rows as they go on; how often a mask was met"
    decoder, of = Decoder(model, len(rows), 60, **options), list(range(len(rows)))
    decoder.net.facts.unwritten = unwritten
    met, attend = [], PromptMask.attend
    PromptMask.attend = lambda *args: met.append(1) or attend(*args)
    try: got = [decoder.prefill(r, rows=of, chunk=chunk) for r in (rows, [r[:17] for r in rows])]
    finally: PromptMask.attend = attend
    return torch.cat(got), len(met)


def qwen(**more):
    torch.manual_seed(0)
    size = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, vocab_size=99)
    return tf.Qwen3ForCausalLM(tf.Qwen3Config(**size | more, num_key_value_heads=1, head_dim=16)).eval()


@pytest.mark.parametrize("family", ["gemma3_text", "mistral", "phi3", "gpt_neox", "granite"])
def test_unwritten_masks_in_every_family(family):
    model = make(family).eval()
    want, none = read(model, False, 24)
    got, met = read(model, True, 512)
    assert met and not none
    assert (got - want).abs().max() < 1e-4


@pytest.mark.parametrize("bits,kv_bits", [(None, 16), pytest.param(4, 8, marks=pytest.mark.slow)])
def test_fused_blocks_read_a_prompt(bits, kv_bits):
    model = qwen(num_hidden_layers=1)
    if bits: pack_linears(model, bits=bits, group_size=32)
    want, _ = read(model, False, 20, FEW, kv_bits=kv_bits)
    fused = fuse_decode(model, kernels="triton")
    assert fused.counts.loc["block", "left"] == 0
    (got, met), store = read(model, True, 512, FEW, kv_bits=kv_bits), model.model.layers[0]._fused
    assert met == 2 and store.step.prompt
    assert (got - want).norm() < (0.02 if bits else 1e-4) * want.norm()


@pytest.mark.slow                              # (test_fused.test_in_the_interpreter has windows)
def test_windows_are_kept_in_fused_blocks():
    kinds = dict(layer_types=["sliding_attention", "full_attention"], sliding_window=9, use_sliding_window=True)
    model = qwen(**kinds)
    want, _ = read(model, False, 20, FEW[:1])
    fuse_decode(model, kernels="triton")
    got, met = read(model, True, 512, FEW[:1])
    assert met == 4 and (got - want).norm() < 1e-4 * want.norm()
    # without the window the logits are others
    assert (read(qwen(), False, 20, FEW[:1])[0] - want).norm() > 1e-2 * want.norm()


def test_where_memory_ends_pieces_get_small(monkeypatch):
    model = qwen()
    want, _ = read(model, False, 512)
    decoder, was = Decoder(model, 3, 60), Decoder._read
    decoder.chunk, asked = 4096, []
    def full(self, prompts, rows, chunk, encoded):
        asked.append(chunk)
        if chunk > 512: raise torch.OutOfMemoryError("no more")
        return was(self, prompts, rows, chunk, encoded)
    monkeypatch.setattr(Decoder, "_read", full)
    assert torch.equal(decoder.prefill(ROWS, rows=[0, 1, 2]), want[:3])
    assert asked == [4096, 512] and decoder.chunk == 512
    assert decoder.held == [len(r) for r in ROWS]

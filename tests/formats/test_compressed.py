"Packed layers in files of compressed-tensors: transformers opens them with that package, with our logits and codes"
import json

import pytest
import torch
import transformers as tf

from bmlab.cook import quantize
from bmlab.formats import BadQuantization, QuantizedFiles
from bmlab.formats.compressed import int4_codes
from bmlab.models import load
from bmlab.train import export_hf

IDS = torch.tensor([[1, 5, 2, 9, 3, 7, 8]])
WAYS = {
    "int8": dict(bits=8), "int8 in groups": dict(bits=8, group_size=32),
    "W8A8": dict(bits=8, activations=8, exclude="lm_head"),
    "int4": dict(bits=4), "int4, symmetric": dict(bits=4, group_size=32, symmetric=True),
    "int4, groups of two sizes": dict(bits=4, intermediate=256),
}


def packed(tie=False, intermediate=128, **how):
    torch.manual_seed(0)
    config = tf.LlamaConfig(hidden_size=64, intermediate_size=intermediate, num_hidden_layers=1, num_attention_heads=4,
                            vocab_size=20, tie_word_embeddings=tie)
    return quantize(tf.LlamaForCausalLM(config).eval(), **how)


@pytest.mark.parametrize("how", WAYS)
def test_their_logits_are_ours(how, tmp_path):
    pytest.importorskip("compressed_tensors", minversion="0.20")
    ours = packed(tie=how == "int8", **WAYS[how])
    export_hf(ours, tmp_path / "x", format="compressed-tensors")
    # (W8A8: the weights; their inputs are rounded in units of another size. int4: for zero points its package makes
    # room of another shape than it writes)
    asked = tf.CompressedTensorsConfig(dequantize=True)
    zeros = WAYS[how]["bits"] == 4 and "symmetric" not in WAYS[how]
    widened = dict(quantization_config=asked) if how == "W8A8" or zeros else {}
    theirs = tf.AutoModelForCausalLM.from_pretrained(tmp_path / "x", **widened).eval()
    with torch.no_grad(): want, got = ours(IDS).logits, theirs(IDS).logits
    assert (want - got).norm() < 1e-5 * want.norm()


@pytest.mark.parametrize("how", WAYS)
def test_codes_come_back_bit_for_bit(how, tmp_path):
    ours = packed(**WAYS[how])
    export_hf(ours, tmp_path / "x", format="compressed-tensors")
    back, _ = load(tmp_path / "x", device="cpu")
    found = 0
    for n, layer in ours.named_modules():
        if not hasattr(layer, "tensors"): continue
        got = back.get_submodule(n)
        if getattr(layer, "group_size", None) == getattr(got, "group_size", None):
            for a, b in zip(layer.tensors, got.tensors, strict=True): assert torch.equal(a, b)
        else: assert torch.equal(int4_codes(layer), int4_codes(got)) and got.group_size == 64      # that of the others
        assert torch.equal(layer.dequantize(), got.dequantize())
        found += 1
    assert found == 8 - ("exclude" in WAYS[how])


def test_in_bfloat16_int4_loses_nothing(tmp_path):
    ours = packed(bits=4).bfloat16()
    export_hf(ours, tmp_path / "x", format="compressed-tensors")
    back = load(tmp_path / "x", device="cpu")[0].get_submodule("model.layers.0.mlp.up_proj")
    for a, b in zip(ours.model.layers[0].mlp.up_proj.tensors, back.tensors): assert torch.equal(a, b)


def test_what_the_format_cannot_hold_is_listed_before_anything_is_written(tmp_path):
    with pytest.raises(ValueError, match="8 of the packed layers.*lie between codes.*integer_zero=True"):
        export_hf(packed(bits=4, integer_zero=False), tmp_path / "x", format="compressed-tensors")
    with pytest.raises(ValueError, match="format='hqq'"): export_hf(packed(bits=8), tmp_path / "x", format="hqq")
    with pytest.raises(ValueError, match=r"no GGUF \(export_gguf does\)"):
        export_hf(packed(bits=8), tmp_path / "x.gguf")
    with pytest.raises(ValueError, match="could not read this LlamaFor"): export_hf(packed(bits=8), tmp_path / "x")
    assert not any(tmp_path.iterdir())


def test_a_damaged_file_is_refused(tmp_path):
    export_hf(packed(bits=8), tmp_path / "x", format="compressed-tensors")
    said = json.loads((tmp_path / "x" / "config.json").read_text())
    said["quantization_config"]["config_groups"]["group_0"]["weights"]["num_bits"] = 5
    (tmp_path / "x" / "config.json").write_text(json.dumps(said))
    with pytest.raises(BadQuantization, match="num_bits"): QuantizedFiles(tmp_path / "x")


@pytest.mark.slow
def test_smollm2_says_the_same_in_transformers(tmp_path):
    pytest.importorskip("compressed_tensors", minversion="0.20")
    model, tok = load("smollm2-135m", dtype="float32", device="cpu")
    ours = quantize(model, bits=4)
    folder = export_hf(ours, tmp_path / "x", format="compressed-tensors", tokenizer=tok)
    asked = tf.CompressedTensorsConfig(dequantize=True)
    theirs = tf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, quantization_config=asked).eval()
    ids = tok("The capital of France is", return_tensors="pt").input_ids
    say = lambda m: m.generate(ids, max_new_tokens=64, do_sample=False).tolist()
    with torch.no_grad(): want, got = ours(ids).logits, theirs(ids).logits
    assert (got - want).norm() < 1e-4 * want.norm() and say(theirs) == say(ours)
    for format in ("gptq", "awq"):
        back, _ = load(export_hf(ours, tmp_path / format, format=format), dtype="float32", device="cpu")
        assert say(back) == say(ours)

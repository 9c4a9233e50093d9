"What export_hf writes as GPTQ, AWQ, FP8 or 2:4 is what the owners of these formats read, and comes back bit for bit"
import json
import zipfile
from pathlib import Path

import pytest
import torch
import transformers as tf
from packed_models import CASES, SIZES, digest, digest_of, logits, model_like, packed_model
from safetensors.torch import load_file
from torch import nn

from bmlab.cook import export_gguf, quantize
from bmlab.cook.sparse24 import pack24
from bmlab.core import parts
from bmlab.formats import BadQuantization, QuantizedFiles
from bmlab.formats.written import FORMATS, fp8_blocks, grouped
from bmlab.kernels.exchange import dequantize
from bmlab.models import ModelCard, license_check, load, read_card
from bmlab.models.card import check_hashes
from bmlab.models.conversions import conversion_loss
from bmlab.train import export_hf

FIXTURES = Path(__file__).parents[1] / "fixtures"
JUDGED = json.loads((FIXTURES / "judged_exports.json").read_text())


def config_of(folder): return json.loads((folder / "config.json").read_text())["quantization_config"]


def packed_layers(model): return {n: m for n, m in parts(model) if hasattr(m, "_bmlab_packed")}


@pytest.mark.parametrize("case", CASES)
def test_the_owner_reads_our_weights(case, tmp_path):
    ours, said = packed_model(case), JUDGED[case]
    folder = export_hf(ours, tmp_path / "x", format=CASES[case][0])
    files = QuantizedFiles(folder)
    tensors = load_file(folder / "model.safetensors")
    stored = {k: tensors[k] for w in files.weights.values() for k in w.keys.values()}
    assert config_of(folder) == said["config"] and digest_of(stored) == said["files"]     # what the owner was given
    wide = {n: digest(m.dequantize(torch.float32)) for n, m in packed_layers(ours).items()}
    assert wide == said["weights"]                                                        # what the owner made of it
    want = torch.tensor(said["logits"])
    assert (logits(ours) - want).norm() < 1e-4 * want.norm()


@pytest.mark.parametrize("case", CASES)
def test_codes_come_back_bit_for_bit(case, tmp_path):
    ours = packed_model(case)
    back, _ = load(export_hf(ours, tmp_path / "x", format=CASES[case][0]), device="cpu")
    if case.startswith("2:4"): pack24(back, modules="*layers*_proj")
    layers = packed_layers(ours)
    assert len(layers) == 7
    for n, layer in layers.items():
        got = back.get_submodule(n)
        if case.startswith("2:4"):
            pair = layer.state_dict(), got.state_dict()
            assert all(torch.equal(t, pair[1][k]) for k, t in pair[0].items())
            continue
        a, b = grouped(layer), grouped(got)
        assert torch.equal(a.codes, b.codes) and torch.equal(a.wide(torch.float32), b.wide(torch.float32))
    assert (logits(back) - logits(ours)).norm() < 1e-5 * logits(ours).norm()


@pytest.mark.parametrize("format", ["gptq", "awq", "compressed-tensors"])
def test_what_quantize_makes_of_four_bits_loses_nothing(format, tmp_path):
    "By default, to nearest and by GPTQ: codes, and the weights that they stand for, come back bit for bit"
    batch = dict(input_ids=torch.arange(16)[None])
    for k, calib in enumerate((None, [batch])):
        ours = quantize(model_like(), calib, bits=4, exclude=None if format == "compressed-tensors" else "lm_head")
        back, _ = load(export_hf(ours, tmp_path / f"{k}", format=format), device="cpu")
        layers = packed_layers(ours)
        assert len(layers) == 7 + (format == "compressed-tensors")
        for n, layer in layers.items():
            a, b = grouped(layer), grouped(back.get_submodule(n))
            assert torch.equal(a.codes, b.codes) and torch.equal(a.wide(torch.float32), b.wide(torch.float32))
        assert (logits(back) - logits(ours)).norm() < 1e-6 * logits(ours).norm()


@pytest.mark.parametrize("format", ["gptq", "awq"])
def test_a_packed_head_becomes_the_floats_of_its_codes(format, tmp_path):
    ours = quantize(model_like(), bits=4)
    back, _ = load(export_hf(ours, tmp_path / "x", format=format), device="cpu")
    assert (logits(back) - logits(ours)).norm() < 1e-6 * logits(ours).norm()
    assert type(back.lm_head) is nn.Linear                          # loaders look for packed layers inside the blocks


def test_transformers_knows_the_configurations(tmp_path):
    ours = quantize(model_like(), bits=4)
    said = config_of(export_hf(ours, tmp_path / "gptq", format="gptq"))
    known = tf.GPTQConfig.from_dict(dict(said))
    assert (known.bits, known.group_size, known.desc_act, known.format) == (4, 64, False, said["checkpoint_format"])
    assert not {"dynamic", "modules_in_block_to_quantize"} & said.keys()
    ours = quantize(model_like(), bits=4, exclude="*gate*")
    said = config_of(export_hf(ours, tmp_path / "gptq", format="gptq"))
    assert list(said["dynamic"]) == [r"-:^model\.layers\.0\.mlp\.gate_proj$"]            # GPTQModel, vLLM
    (ends,) = said["modules_in_block_to_quantize"]                                       # transformers, by optimum
    assert len(ends) == 6 and "mlp.up_proj" in ends and "mlp.gate_proj" not in ends
    said = config_of(export_hf(ours, tmp_path / "awq", format="awq"))
    known = tf.AwqConfig.from_dict(dict(said))
    assert (known.bits, known.group_size, known.format, known.zero_point) == (4, 64, "gemm", True)
    assert sorted(known.modules_to_not_convert) == ["lm_head", "model.layers.0.mlp.gate_proj"]


REFUSED = {
    "gptq": (dict(bits=4, integer_zero=False), "7 of the packed layers.*lie between codes.*integer_zero=True"),
    "awq": (dict(bits=8), "7 of the packed layers.*it has 8 bits, and AWQ has 4; format='gptq' holds it"),
}


@pytest.mark.parametrize("format", REFUSED)
def test_what_a_format_cannot_hold_is_listed(format, tmp_path):
    how, why = REFUSED[format]
    with pytest.raises(ValueError, match=why): export_hf(quantize(model_like(), **how), tmp_path / "x", format=format)
    with pytest.raises(ValueError, match="no packed layer"): export_hf(model_like(), tmp_path / "x", format=format)
    with pytest.raises(ValueError, match="did you mean 'gptq'"): export_hf(model_like(), tmp_path / "x", format="gpt")
    assert not any(tmp_path.iterdir())


def test_orders_int8_inputs_and_2_4_are_named(tmp_path):
    ordered, inputs = packed_model("gptq-order"), quantize(model_like(), bits=8, activations=8)
    with pytest.raises(ValueError, match="another order.*format='gptq'"):
        export_hf(ordered, tmp_path / "x", format="awq")
    with pytest.raises(ValueError, match="rounded to int8.*compressed-tensors"):
        export_hf(inputs, tmp_path / "x", format="gptq")
    with pytest.raises(ValueError, match="another order than its inputs"):
        export_hf(ordered, tmp_path / "x", format="compressed-tensors")
    for format in ("gptq", "awq"):
        with pytest.raises(ValueError, match="two of every four.*compressed-tensors"):
            export_hf(packed_model("2:4"), tmp_path / "x", format=format)


def test_fp8_is_what_transformers_reads(tmp_path):
    torch.manual_seed(0)
    config = tf.LlamaConfig(hidden_size=128, intermediate_size=384, num_hidden_layers=1, num_attention_heads=4,
                            vocab_size=16, tie_word_embeddings=False)
    model = tf.LlamaForCausalLM(config).eval()
    folder = export_hf(model, tmp_path / "x", format="fp8")
    theirs = tf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    files, tensors = QuantizedFiles(folder, packed=False), load_file(folder / "model.safetensors")
    assert len(files.weights) == 7 and tensors["lm_head.weight"].dtype == torch.float32
    for n in files.weights:
        assert torch.equal(files.widen(n, torch.float32), theirs.get_parameter(n))
        code, scale = fp8_blocks(model.get_parameter(n))
        assert torch.equal(code.view(torch.uint8), tensors[n].view(torch.uint8))
        assert torch.equal(scale, tensors[n + "_scale_inv"])
    ours, _ = load(folder, device="cpu", dtype="float32")
    assert (logits(ours) - logits(theirs)).norm() < 1e-4 * logits(theirs).norm()
    half = load_file(export_hf(model, tmp_path / "y", torch.bfloat16, format="fp8") / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(half[name].view(torch.uint8), tensors[name].view(torch.uint8))
    assert half["lm_head.weight"].dtype == torch.bfloat16 and half[name + "_scale_inv"].dtype == torch.float32


def test_fp8_widens_packed_layers_and_leaves_odd_ones(tmp_path, caplog):
    torch.manual_seed(0)
    config = tf.LlamaConfig(hidden_size=64, intermediate_size=160, num_hidden_layers=1, num_attention_heads=4,
                            vocab_size=16, tie_word_embeddings=False)
    ours = quantize(tf.LlamaForCausalLM(config).eval(), bits=8)
    folder = export_hf(ours, tmp_path / "x", format="fp8")
    files = QuantizedFiles(folder)
    assert {n.split(".")[-2] for n in files.weights} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert "model.layers.0.mlp.up_proj" in config_of(folder)["modules_to_not_convert"]     # 160 is no whole block
    assert "4 packed layers are widened and rounded again" in caplog.text
    assert "3 layers stay in float, no whole blocks" in caplog.text
    for theirs in (load(folder, device="cpu")[0], tf.AutoModelForCausalLM.from_pretrained(folder).eval()):
        assert (logits(theirs) - logits(ours)).norm() < 0.1 * logits(ours).norm()


def test_fp8_that_was_read_is_written_the_same(tmp_path):
    torch.manual_seed(0)
    config = tf.LlamaConfig(hidden_size=128, intermediate_size=256, num_hidden_layers=1, num_attention_heads=4,
                            vocab_size=16, tie_word_embeddings=False)
    first = export_hf(tf.LlamaForCausalLM(config).eval(), tmp_path / "x", format="fp8")
    again = export_hf(load(first, device="cpu", dtype="float32")[0], tmp_path / "y", format="fp8")
    assert conversion_loss(first, again)["relative error"].max() < 1e-6


@pytest.mark.parametrize("format", FORMATS)
def test_biases_tied_words_and_several_files(format, tmp_path):
    torch.manual_seed(0)
    sizes = {k: v for k, v in SIZES.items() if k != "tie_word_embeddings"} | {"vocab_size": 96}
    model = tf.Qwen2ForCausalLM(tf.Qwen2Config(**sizes, tie_word_embeddings=True)).eval()
    for n, p in model.named_parameters():
        if n.endswith("bias"): p.data.normal_()
    ours = quantize(model, bits=4)
    folder = export_hf(ours, tmp_path / "x", format=format, max_shard="20KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 1
    back, _ = load(folder, device="cpu")
    limit = 0.1 if format == "fp8" else 1e-5
    assert (logits(back) - logits(ours)).norm() < limit * logits(ours).norm()
    assert back.lm_head.weight.data_ptr() == back.model.embed_tokens.weight.data_ptr()


@pytest.mark.parametrize("format", FORMATS)
def test_layers_that_lie_the_other_way_round_are_refused(format, tmp_path):
    config = tf.GPT2Config(n_embd=64, n_layer=1, n_head=2, vocab_size=20, n_positions=16)
    model = quantize(tf.GPT2LMHeadModel(config).eval(), bits=4, exclude="lm_head")
    why = "no linear layer inside a block" if format == "fp8" else "stands for a Conv1D"
    with pytest.raises(ValueError, match=why): export_hf(model, tmp_path / "x", format=format)


@pytest.mark.parametrize("case", ["2:4", "2:4-int8"])
def test_a_damaged_bitmask_is_refused(case, tmp_path):
    folder = export_hf(packed_model(case), tmp_path / "x", format="compressed-tensors")
    raw = bytearray((folder / "model.safetensors").read_bytes())
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:8 + size])
    at = 8 + size + next(v["data_offsets"][0] for k, v in header.items() if k.endswith(".bitmask"))
    raw[at] ^= 1
    (folder / "model.safetensors").write_bytes(raw)
    with pytest.raises(BadQuantization, match="bitmask does not name half"): load(folder, device="cpu")


def test_transformers_makes_up_no_weights_of_2_4(tmp_path):
    pytest.importorskip("compressed_tensors", minversion="0.20")        # without it, it opens no such folder at all
    folder = export_hf(packed_model("2:4"), tmp_path / "x", format="compressed-tensors")
    for cls in (tf.AutoModelForCausalLM, tf.AutoModel):
        with pytest.raises(ValueError, match="bmlab's load"): cls.from_pretrained(folder)
    back, _ = load(folder, device="cpu")
    back.save_pretrained(tmp_path / "y")                            # which is a model like any other
    assert torch.equal(logits(tf.AutoModelForCausalLM.from_pretrained(tmp_path / "y").eval()), logits(back))


@pytest.mark.parametrize("format", FORMATS)
def test_the_card_goes_along_and_says_what_was_done(format, tmp_path):
    terms = "Meta\nLLAMA 2 COMMUNITY LICENSE AGREEMENT"
    card = ModelCard(name="little", license="llama2", source="a folder", license_text=terms)
    model = quantize(card.put(model_like()), bits=4)
    back, _ = load(export_hf(model, tmp_path / "x", format=format), device="cpu")
    read = read_card(tmp_path / "x")
    assert read.changes[-1].startswith("written as ") and format in read.changes[-1]
    assert check_hashes(tmp_path / "x") == [] and (tmp_path / "x" / "LICENSE").read_text() == card.license_text
    assert license_check(back).origin == license_check(tmp_path / "x").origin == ("a folder", read.changes[-1])
    assert license_check(tmp_path / "x").answer == "ask" and "made from a folder; " in str(license_check(back))
    export_hf(dequantize(back), tmp_path / "y")                     # a second conversion keeps the first in mind
    assert read_card(tmp_path / "y").changes == read.changes and check_hashes(tmp_path / "y") == []


@pytest.mark.parametrize("format", [None, *FORMATS, "GGUF"])
def test_the_model_is_left_as_it_is(format, tmp_path):
    "Its modules, its numbers, its configuration and its mode"
    model = model_like() if format is None else quantize(model_like(), bits=4)
    before = {k: t.clone() for k, t in model.state_dict().items()}
    kinds, said = [(n, type(m), m.training) for n, m in parts(model)], model.config.to_dict()
    held = {n: id(t) for n, t in (*model.named_parameters(), *model.named_buffers())}
    if format == "GGUF": export_gguf(model, tmp_path / "x.gguf", type=None)
    else: export_hf(model, tmp_path / "x", format=format)
    assert kinds == [(n, type(m), m.training) for n, m in parts(model)] and said == model.config.to_dict()
    assert held == {n: id(t) for n, t in (*model.named_parameters(), *model.named_buffers())}
    assert all(torch.equal(t, before[k]) for k, t in model.state_dict().items())


def test_a_gguf_file_knows_its_origin(tmp_path):
    file = q4_0(tmp_path)
    folder = export_hf(load(file, device="cpu")[0], tmp_path / "x", format="gptq")
    assert license_check(folder).origin[0].startswith("GGUF file") and "gptq" in license_check(folder).origin[1]


# ---- from one format to another -----------------------------------------------------------------------------------
def q4_0(to):
    from test_gguf_models import rewritten, unpacked
    return rewritten(unpacked("llama", to)[0], to / "q.gguf", "Q4_0")


def unzipped(case, to):
    with zipfile.ZipFile(FIXTURES / "quantized_folders.zip") as z:
        z.extractall(to, [n for n in z.namelist() if n.startswith(f"{case}/")])
    return to / case


PAIRS = {  # what is lost: nothing, or so much of a weight at most
    ("gptq-4-asym", "compressed-tensors"): 0, ("gptq-4-act-order", "gptq"): 0, ("awq", "gptq"): 0,
    ("W4A16-asym", "awq"): 0, ("Q4_0", "gptq"): 0, ("fp8-blocks", "W8A16"): 0.01, ("gptq-3", "fp8"): 0.04,
    ("gptq-3", "gptq"): 0, ("gptq-2", "awq"): 0, ("FP8", "fp8"): 0.04,
}


@pytest.mark.parametrize("pair", PAIRS, ids=" to ".join)
def test_what_a_conversion_loses_is_said(pair, tmp_path):
    before, format = pair
    source = q4_0(tmp_path) if before == "Q4_0" else unzipped(before, tmp_path)
    model, _ = load(source, device="cpu")
    if format == "W8A16": model, format = quantize(dequantize(model), bits=8, exclude="lm_head"), "compressed-tensors"
    loss = conversion_loss(source, export_hf(model, tmp_path / "x", format=format))
    worst = loss["relative error"].max()
    assert worst == 0 if PAIRS[pair] == 0 else 0 < worst < PAIRS[pair]
    assert loss["bits before"].min() < 9 and loss["bits after"].min() < 9 and loss.notna().all().all()


@pytest.mark.parametrize("tied", [True, False])
def test_weights_that_are_tied_by_hand_come_back(tied, tmp_path):
    torch.manual_seed(0)
    sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=64)
    model = tf.LlamaForCausalLM(tf.LlamaConfig(**sizes, tie_word_embeddings=tied)).eval()
    model.lm_head.weight = model.model.embed_tokens.weight
    export_hf(model, tmp_path)
    names, ids = set(load_file(tmp_path / "model.safetensors")), torch.arange(12)[None]
    assert ("lm_head.weight" in names) == (not tied) and "model.embed_tokens.weight" in names
    back = tf.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    with torch.no_grad(): assert torch.equal(back(ids).logits, model(ids).logits)

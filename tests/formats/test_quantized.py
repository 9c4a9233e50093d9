"Folders that GPTQ, AWQ, compressed-tensors, FP8, MXFP4 or bitsandbytes packed, read as their owners do, or refused"
import hashlib
import json
import shutil
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from bmlab.formats import BadQuantization, QuantizedFiles, TensorFiles
from bmlab.kernels.float8 import Float8Linear
from bmlab.kernels.ggml import widen
from bmlab.kernels.low_bits import split_bits

ZIP = Path(__file__).parents[1] / "fixtures" / "quantized_folders.zip"
CASES = sorted({n.partition("/")[0] for n in zipfile.ZipFile(ZIP).namelist()})


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    folder = tmp_path_factory.mktemp("quantized")
    zipfile.ZipFile(ZIP).extractall(folder)
    return folder


def digest(t): return hashlib.sha256(t.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


@pytest.mark.parametrize("case", CASES)
def test_weights_are_the_owners_bit_for_bit(shelf, case):
    want, files = json.loads((shelf / case / "expected.json").read_text()), QuantizedFiles(shelf / case, packed=False)
    dtype = getattr(torch, want["dtype"])
    assert {n: digest(files.widen(n, dtype)) for n in files.weights} == want["weights"]
    assert {n: tuple(files.read(n, ()).shape) for n in files.where} == {n: files.shape(n) for n in files.where}
    assert files.read(next(iter(want["weights"])), ()).dtype == dtype


@pytest.mark.parametrize("case", CASES)
def test_codes_stay_bit_for_bit(shelf, case):
    files = QuantizedFiles(shelf / case)
    for name, form in files.forms.items():
        if not form: continue
        q, parts = files._parsed(name), {k.rpartition(".")[2]: t for k, t in files.packed(name).items()}
        if form == "mxfp4":
            assert torch.equal(widen(parts["codes"], "MXFP4").transpose(1, 2), files.widen(name, torch.float32))
            continue
        if form == "float8":
            layer = Float8Linear.from_tensors(parts["codes"], parts["scale"], files.block(name))
            assert torch.equal(layer.codes.view(torch.uint8), q.values.view(torch.uint8))
            for dtype in (torch.float32, torch.bfloat16):
                assert torch.equal(layer.dequantize(dtype), files.widen(name, dtype))
            continue
        if form.startswith("int8"):
            assert torch.equal(parts["codes"].short(), q.codes.short() - 2 ** (q.bits - 1))
            continue
        g = files.group(name)
        if form in ("int3", "int2"):
            bits, each = int(form[3:]), q.codes.shape[1] // files.weights[name].groups // g
            codes = split_bits(parts["codes"].unflatten(1, (-1, g * bits // 8)), bits).flatten(1)
            zero = 2**(bits - 1) - (parts["zero"].float() / parts["scale"].float()).round()
            assert bits == q.bits and torch.equal(codes, q.codes)
            assert torch.equal(zero, q.zero.float().repeat_interleave(each, 1))
            continue
        pairs = parts["codes"].view(len(q.codes), -1, g // 2)
        codes = torch.cat((pairs & 15, pairs >> 4), -1).flatten(1)
        order = parts.get("order", torch.arange(codes.shape[1])).long()
        assert torch.equal(torch.empty_like(codes).index_copy_(1, order, codes), q.codes)
        zero = 8 - (parts["zero"].float() / parts["scale"].float()).round()     # the owner's number comes back
        each = codes.shape[1] // files.weights[name].groups // g
        assert torch.equal(zero, q.zero.float().repeat_interleave(each, 1))


def broken(shelf, to, case, change=None, **config):
    shutil.copytree(shelf / case, to)
    said = json.loads((to / "config.json").read_text())
    said["quantization_config"] |= config
    (to / "config.json").write_text(json.dumps(said))
    if change is not None:
        tensors = load_file(to / "model.safetensors")
        change(tensors)
        save_file(tensors, to / "model.safetensors")
    return to


def read_all(folder):
    files = QuantizedFiles(folder)
    for key in files.where: files.read(key, ())


NAME = "model.layers.0.mlp.down_proj"


def put(role, make):
    def change(tensors): tensors[f"{NAME}.{role}"] = make(tensors[f"{NAME}.{role}"])
    return change


@pytest.mark.parametrize("case, config, why", [
    ("gptq-4", {"quant_method": "hqq"}, "'hqq' is not read"),
    ("gptq-4", {"checkpoint_format": "marlin"}, "checkpoint_format='marlin'"),
    ("awq", {"version": "gemv"}, "version='gemv'"),
    ("W4A16", {"format": "marlin-24"}, "format='marlin-24'"),
    ("W4A16", {"config_groups": []}, r"config_groups=\[\]"),
    ("W4A16", {"config_groups": {"a": {"weights": {"num_bits": 3}}}}, "num_bits"),
    ("W8A8", {"sparsity_config": {"format": "sparse-bitmask"}}, "sparsity_config.format"),
    ("fp8-blocks", {"weight_block_size": [128, 128]}, "do not fit"),
    ("fp8-blocks", {"weight_block_size": "16"}, "expected two sizes"),
])
def test_what_a_configuration_may_not_say(shelf, tmp_path, case, config, why):
    with pytest.raises(BadQuantization, match=why) as e: read_all(broken(shelf, tmp_path / "x", case, **config))
    assert str(tmp_path / "x") in str(e.value)


@pytest.mark.parametrize("case, change, why", [
    ("gptq-4", lambda t: t.pop(f"{NAME}.scales"), "no tensor 'scales'"),
    ("gptq-4", put("g_idx", lambda t: t + 5), "g_idx does not name"),
    ("gptq-4", put("qzeros", lambda t: t[:, :1].clone()), "do not fit"),
    ("gptq-4", put("qweight", lambda t: t[:3].clone()), "bits; known"),
    ("awq", put("scales", lambda t: t[:, :8].clone()), "scales of 8 outputs"),
    ("W4A16", put("weight_shape", lambda t: torch.tensor([-1, 64])), "weight_shape"),
    ("W4A16", lambda t: t.pop(f"{NAME}.weight_shape"), "no tensor 'weight_shape'"),
    ("W8A8", put("weight", lambda t: t.float()), "expected int8 or float8"),
    ("mxfp4", lambda t: t.pop("model.layers.0.mlp.experts.down_proj_scales"), "no tensor 'scales'"),
    ("nf4", put("weight.quant_state.bitsandbytes__nf4", lambda t: t[:-9].clone()), "quant_state is damaged"),
])
def test_what_tensors_may_not_be(shelf, tmp_path, case, change, why):
    with pytest.raises(BadQuantization, match=why) as e: read_all(broken(shelf, tmp_path / "x", case, change))
    assert str(tmp_path / "x") in str(e.value)


def test_a_plain_folder_is_no_quantized_one(shelf, tmp_path):
    folder = broken(shelf, tmp_path / "x", "W8A8")
    said = json.loads((folder / "config.json").read_text())
    del said["quantization_config"]
    (folder / "config.json").write_text(json.dumps(said))
    assert TensorFiles(folder).shape(f"{NAME}.weight") == (32, 64)
    with pytest.raises(BadQuantization, match="has no quantization_config"): QuantizedFiles(folder)

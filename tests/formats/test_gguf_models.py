"GGUF files as llama.cpp's own converter wrote them become the models that they were made from"
import json
import weakref
import zipfile
from pathlib import Path
from unittest.mock import patch

import gguf
import pytest
import torch

from bmlab.core import count
from bmlab.formats.gguf import GGUF
from bmlab.formats.gguf_models import GGUFTensors, fill_from, gguf_model, gguf_on_meta
from bmlab.models.load import load

FILES = Path(__file__).parents[1] / "fixtures/gguf_models.zip"          # of tools/gguf_oracles.py
with zipfile.ZipFile(FILES) as z: NAMES = sorted(Path(n).stem for n in z.namelist() if n.endswith(".gguf"))


def unpacked(name, folder):
    "(file, what is known of it)"
    with zipfile.ZipFile(FILES) as z:
        (folder / f"{name}.gguf").write_bytes(z.read(f"{name}.gguf"))
        return folder / f"{name}.gguf", json.loads(z.read(f"{name}.json"))


def outputs(model, ids):
    more = dict(decoder_input_ids=ids[:, :5]) if model.config.is_encoder_decoder else {}
    with torch.no_grad(): out = model(input_ids=ids, **more)
    return (out.logits if hasattr(out, "logits") else out.last_hidden_state)[0, 3::4]


@pytest.mark.parametrize("name", NAMES)
def test_logits(name, tmp_path):
    "The class, and its logits as transformers computed them before llama.cpp's converter had the model"
    file, known = unpacked(name, tmp_path)
    model = gguf_on_meta(GGUF(file), torch.float32)
    fill_from(model, GGUFTensors(GGUF(file), model))
    want = torch.tensor(known["outputs"])
    assert type(model).__name__ == {"MistralForCausalLM": "LlamaForCausalLM"}.get(known["model"], known["model"])
    assert (outputs(model, torch.tensor(known["ids"])) - want).abs().max() <= 1e-4 * max(1, want.abs().max())


def rewritten(file, path, kind=None, **writer_options):
    "A copy of a file with its matrices stored as another type where their rows allow it; split if the options say so"
    reader = gguf.GGUFReader(file)
    arch = reader.get_field("general.architecture").contents()
    writer = gguf.GGUFWriter(path, arch, **writer_options)
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture": continue
        writer.add_key_value(field.name, field.contents(), field.types[0])
    to = kind and gguf.GGMLQuantizationType[kind]
    for t in reader.tensors:
        rows = GGUF(file).tensor(t.name)
        if kind and t.tensor_type == gguf.GGMLQuantizationType.F16 and rows.shape[-1] % 32 == 0:
            writer.add_tensor(t.name, gguf.quants.quantize(rows, to), raw_dtype=to)
        else: writer.add_tensor(t.name, t.data, raw_dtype=t.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1"])
@pytest.mark.parametrize("name", ["llama", "gptneox", "falcon-new"])
def test_packed_holds_the_bits(kind, name, tmp_path):
    "Rows turned, biases kept: the packed weight is the widened one bit for bit, and so nearly are the logits"
    file = rewritten(unpacked(name, tmp_path)[0], tmp_path / "q.gguf", kind)
    wide, packed = gguf_model(file, torch.float32), gguf_model(file, torch.float32, packed=True)
    layers = {n: m for n, m in packed.named_modules() if hasattr(m, "codes")}
    assert len(layers) >= 6 and count(packed).bytes < count(wide).bytes
    for n, m in layers.items(): assert torch.equal(m.dequantize(), wide.get_submodule(n).weight), n
    ids = torch.arange(12)[None]
    want, got = outputs(wide, ids), outputs(packed, ids)
    assert (got - want).abs().max() < 1e-5 * want.abs().max()


def test_the_host_holds_one_widened_tensor_besides(tmp_path):
    "When a tensor is read, those that were widened before it are gone"
    model = gguf_on_meta(files := GGUF(unpacked("llama", tmp_path)[0]), torch.bfloat16)
    widened, alive, read = [], [], GGUFTensors.read
    def watched(self, key, where):
        alive.append(sum(t() is not None for t in widened))
        t = read(self, key, where)
        assert t.dtype == torch.float32
        widened.append(weakref.ref(t))
        return t
    with patch.object(GGUFTensors, "read", watched): fill_from(model, GGUFTensors(files, model))
    assert len(alive) > 10 and max(alive) == 0
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


def test_load_needs_no_other_step(tmp_path):
    "Packed where a layer holds the bits, float on request, as stored or as asked; nothing is written anywhere"
    file = rewritten(unpacked("llama", tmp_path)[0], tmp_path / "q.gguf", "Q4_0")
    with patch.dict("os.environ", BMLAB_CACHE=str(tmp_path / "cache")):
        model, tok = load(file, device="cpu", packed=False)
        half, _ = load(str(file), dtype="bfloat16", device="cpu", packed=False)
        packed, _ = load(file, device="cpu")
        stored, _ = load(tmp_path / "llama.gguf", device="cpu", attn_implementation="eager")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["llama.gguf", "q.gguf"] and tok is None
    assert (model.dtype, half.dtype, stored.dtype) == (torch.float32, torch.bfloat16, torch.float16)
    assert stored.config._attn_implementation == "eager" and not model.training
    assert count(packed).bytes < count(model).bytes / 2
    with pytest.raises(FileNotFoundError, match="there is no file"): load(tmp_path / "none.gguf")
    with pytest.raises(ValueError, match="holds float weights"): load("smollm2-135m", packed=True)


def test_split_model(tmp_path):
    file = unpacked("llama", tmp_path)[0]
    rewritten(file, tmp_path / "s.gguf", split_max_tensors=9)
    parts = sorted(tmp_path.glob("s-*.gguf"))
    whole, split = gguf_model(file, torch.float32), load(parts[1], dtype="float32", device="cpu")[0]
    assert len(parts) > 1
    for a, b in zip(whole.state_dict().values(), split.state_dict().values(), strict=True): assert torch.equal(a, b)


def test_unknown_architecture_is_refused_with_the_list(tmp_path):
    file = tmp_path / "x.gguf"
    writer = gguf.GGUFWriter(file, "rwkv7")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ValueError, match="holds the architecture 'rwkv7'; these can be opened: llama, qwen2, .*mamba"):
        load(file, device="cpu")

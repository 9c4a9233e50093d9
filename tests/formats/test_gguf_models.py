"GGUF files as llama.cpp's own converter wrote them become the models that they were made from"
import json
import zipfile
from pathlib import Path

import pytest
import torch

from bmlab.formats.gguf import GGUF
from bmlab.formats.gguf_models import GGUFTensors, fill_from, gguf_on_meta

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

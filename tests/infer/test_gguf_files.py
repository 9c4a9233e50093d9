"A GGUF file is planned from its header, streamed within a limit, and its packed weights take a LoRA"
import zipfile
from pathlib import Path
from unittest.mock import patch

import gguf
import numpy as np
import torch

from bmlab.core import count
from bmlab.delta import Lora
from bmlab.formats.gguf import GGUF
from bmlab.infer.engine import wrap
from bmlab.infer.loading import load_placed
from bmlab.models.weights import model_on_meta
from bmlab.infer.placement import plan_inference
from bmlab.models.load import load
from bmlab.models.tree import tree

FILES = Path(__file__).parents[1] / "fixtures/gguf_models.zip"
IDS = torch.arange(3, 15)[None]


def tiny(folder, name="qwen3"):
    with zipfile.ZipFile(FILES) as z: (folder / f"{name}.gguf").write_bytes(z.read(f"{name}.gguf"))
    return folder / f"{name}.gguf"


def logits(model):
    with torch.no_grad(): return model(input_ids=IDS).logits


def test_header_alone(tmp_path):
    "Tree, sizes and plan before a byte of weights is read"
    file = tiny(tmp_path)
    with patch.object(GGUF, "stored", side_effect=AssertionError("weights were read")):
        model = model_on_meta(file, "float32")
        plan = plan_inference(model, bits=8, max_ctx=32)
        assert "Qwen3" in str(tree(model)) and plan.weights > 0
    whole = load(file, dtype="float32", device="cpu")[0]
    assert count(model).bytes == count(whole).bytes


def test_streamed_and_packed_on_the_way(tmp_path):
    file = tiny(tmp_path, "gemma3")
    want = logits(load(file, dtype="float32", device="cpu")[0])
    assert torch.equal(logits(load_placed(file, device="cpu", dtype="float32")[0]), want)
    plan = plan_inference(model_on_meta(file), max_ctx=32)
    with wrap(file, memory_limit=plan.min_bytes, max_ctx=32, device="cpu") as e:
        assert e.plan.streamed
        assert torch.allclose(logits(e.model).float(), want, atol=0.05 * want.abs().max().item())
    with wrap(file, bits=8, max_ctx=32, device="cpu") as e:
        assert count(e.model).bytes < count(model_on_meta(file)).bytes


def test_lora_on_the_file_s_own_bits(tmp_path):
    "QLoRA: the codes stay, the delta learns"
    file, to = tiny(tmp_path, "llama"), gguf.GGMLQuantizationType.Q4_1
    reader = gguf.GGUFReader(file)
    writer = gguf.GGUFWriter(tmp_path / "q.gguf", "llama")
    for f in reader.fields.values():
        if not f.name.startswith(("GGUF.", "general.arch")): writer.add_key_value(f.name, f.contents(), f.types[0])
    for t in reader.tensors:
        small = t.name.startswith("blk.") and t.data.ndim == 2 and t.data.shape[1] % 32 == 0
        data = gguf.quants.quantize(t.data.astype(np.float32), to) if small else t.data
        writer.add_tensor(t.name, data, raw_dtype=to if small else t.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    model, _ = load(tmp_path / "q.gguf", dtype="float32", device="cpu")
    before = {n: b.clone() for n, b in model.named_buffers()}
    want = logits(model)
    lora = Lora(model, r=4)
    lora.freeze()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.5)
    losses = []
    for _ in range(5):
        loss = model(input_ids=IDS, labels=IDS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    lora.detach()
    for n, b in model.named_buffers(): assert torch.equal(b, before[n]), n
    assert torch.equal(logits(model), want)

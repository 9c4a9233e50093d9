"A quantized folder is a model by its path: loaded, counted, planned, tuned and streamed, its logits its owner's"
import json
import zipfile
from pathlib import Path

import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file

from bmlab.core import count
from bmlab.delta import Lora
from bmlab.formats import QuantizedFiles
from bmlab.infer import plan_inference, wrap
from bmlab.models import load, tree

ZIP = Path(__file__).parents[1] / "fixtures" / "quantized_folders.zip"
CASES = sorted({n.partition("/")[0] for n in zipfile.ZipFile(ZIP).namelist()})
IDS = torch.tensor([[1, 5, 2, 9, 3]])


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    folder = tmp_path_factory.mktemp("quantized")
    zipfile.ZipFile(ZIP).extractall(folder)
    return folder


def near(model, want, limit):
    got, want = model.float()(IDS).logits[0, -1], torch.tensor(want)
    assert ((got - want).norm() / want.norm()).item() < limit


@pytest.mark.parametrize("case", CASES)
def test_logits_are_the_owners(shelf, case):
    want = json.loads((shelf / case / "expected.json").read_text())["logits"]
    near(load(shelf / case, packed=False, device="cpu")[0], want, 1e-5)
    model, tok = load(shelf / case, device="cpu")
    # (the owner rounds each weight to 16 bits, a packed layer does not; a zero point has 11 bits of precision)
    near(model, want, 5e-3)
    assert tok is None and not hasattr(model.config, "quantization_config")


def test_counted_and_planned_without_reading_a_weight(shelf, monkeypatch):
    whole, _ = load(shelf / "gptq-4-act-order", device="cpu")
    monkeypatch.setattr(QuantizedFiles, "_parsed", lambda *a: pytest.fail("a weight was read"))
    folder = str(shelf / "gptq-4-act-order")
    assert count(folder) == count(whole)
    assert "Int4Ordered" in str(tree(folder)) and str(tree(folder)).count("meta")
    assert plan_inference(folder, max_ctx=32).weights == count(whole).bytes


def test_lora_learns_on_the_codes(shelf):
    model, _ = load(shelf / "gptq-4-act-order", dtype="float32", device="cpu")
    before = {n: b.clone() for n, b in model.named_buffers()}
    delta = Lora(model, r=2)
    delta.freeze()
    loss = lambda: model(IDS, labels=IDS).loss
    step, first = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.5), loss().item()
    for _ in range(5):
        step.zero_grad()
        loss().backward()
        step.step()
    assert loss().item() < first
    delta.detach()
    assert all(torch.equal(b, before[n]) for n, b in model.named_buffers())


@pytest.mark.parametrize("case", ["awq", "gptq-4-act-order", "nf4"])
def test_wrap_reads_it_block_by_block(shelf, case):
    model, _ = load(shelf / case, device="cpu")
    engine = wrap(str(shelf / case), device="cpu", max_ctx=32)
    got = engine.model(IDS).logits.float()
    engine.close()
    assert (got - model(IDS).logits.float()).norm() / got.norm() < 5e-3


def test_a_mixture_whose_experts_are_joined_on_the_way(tmp_path):
    torch.manual_seed(0)
    config = tf.Qwen3MoeConfig(hidden_size=32, intermediate_size=32, moe_intermediate_size=32, num_hidden_layers=1,
                               num_attention_heads=2, num_key_value_heads=2, head_dim=16, num_experts=2, vocab_size=16,
                               num_experts_per_tok=1, tie_word_embeddings=False)
    model = tf.Qwen3MoeForCausalLM(config).eval()
    model.save_pretrained(tmp_path / "x")
    tensors, wide = load_file(tmp_path / "x" / "model.safetensors"), {}
    experts = [k for k in tensors if "experts" in k]
    assert len(experts) == 6
    for k in experts:
        w, scale = tensors[k].view(2, 16, 1, 32), tensors[k].view(2, 16, 1, 32).abs().amax((1, 3)) / 448
        tensors[k] = (w / scale[:, None, :, None]).to(torch.float8_e4m3fn).view(32, 32)
        tensors[k + "_scale_inv"] = scale
        wide[k] = (tensors[k].float().view(w.shape) * scale[:, None, :, None]).view(32, 32)
    save_file(tensors, tmp_path / "x" / "model.safetensors", {"format": "pt"})
    said = json.loads((tmp_path / "x" / "config.json").read_text())
    said["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [16, 32]}
    (tmp_path / "x" / "config.json").write_text(json.dumps(said))
    loaded, _ = load(tmp_path / "x", device="cpu")
    rounded = loaded.model.layers[0].mlp.experts.down_proj.data
    names = [k for k in experts if "down_proj" in k]
    assert torch.equal(rounded, torch.stack([wide[k] for k in sorted(names)]))

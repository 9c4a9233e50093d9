"""A GGUF file of another family and owner goes the whole way: tree, LoRA on its packed weights, merged, four bits,
exported, streamed"""
import pytest
import torch

from bmlab.cook.export_gguf import export_gguf
from bmlab.cook.quantize import quantize
from bmlab.core import set_seed
from bmlab.data.samples import pack_tokens, sample_gguf, sample_texts
from bmlab.delta import Delta
from bmlab.delta.lora import Lora
from bmlab.infer import plan_inference, wrap
from bmlab.infer.fused import fuse_decode
from bmlab.models import license_check, load, tree
from bmlab.models.card import check_hashes
from bmlab.train.checkpoint import export_hf

PROMPT = "The capital of France is"


@pytest.fixture(scope="module")
def shelf():
    try: return sample_gguf("gemma-3-270m")
    except RuntimeError as e: pytest.skip(f"Gemma 3 270M could not be fetched: {str(e).splitlines()[0]}")


def written(model, tok, n=12):
    ids = tok(PROMPT, return_tensors="pt").input_ids
    with torch.no_grad(): out = model.generate(ids, max_new_tokens=n, do_sample=False)
    return tok.decode(out[0, ids.shape[1]:])


@pytest.mark.slow
def test_gemma_3_goes_the_whole_way(shelf, tmp_path):
    model, tok = load(shelf, device="cpu", dtype="float32")
    assert "GGMLLinear" in {type(m).__name__ for m in model.modules()} and "Gemma3" in str(tree(model))
    assert "France" in written(model, tok)
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
    with torch.no_grad(): want = model(ids[:1]).logits
    lora.save(tmp_path / "lora")
    del model, lora, optimizer
    wide, _ = load(shelf, device="cpu", dtype="float32", packed=False)
    Delta.load(tmp_path / "lora", wide).merge()
    with torch.no_grad(): got = wide(ids[:1]).logits
    assert (got - want).norm() < 1e-4 * want.norm()
    # as GGUF, and in four bits for others
    file, tuned = export_gguf(wide, tmp_path / "tuned.gguf", "F32", tok), written(wide, tok)
    assert written(*load(file, device="cpu")) == tuned
    small = quantize(wide, bits=4, group_size=32, exclude="lm_head")
    with torch.no_grad(): want = small(ids[:1]).logits
    folder = export_hf(small, tmp_path / "gptq", tokenizer=tok, format="gptq")
    with torch.no_grad(): got = load(folder, device="cpu", dtype="float32")[0](ids[:1]).logits
    assert (got - want).norm() < 1e-4 * want.norm()


@pytest.mark.slow
def test_the_terms_go_with_it(shelf, tmp_path):
    folder = shelf.parent
    check = license_check(folder, ["commercial", "share_changed", "relicense", "advertise"])
    assert check.license == "gemma" and list(check.table.answer) == ["yes", "yes", "ask", "no"]
    assert "Notice" in (folder / "LICENSE").read_text() and not check_hashes(folder)


@pytest.mark.slow
def test_streamed_under_a_limit_it_writes_the_same(shelf):
    model, tok = load(shelf, device="cpu")
    want, ids = written(model, tok), tok(PROMPT).input_ids
    del model
    least = plan_inference(shelf, max_ctx=64).min_bytes
    with wrap(shelf, memory_limit=least, max_ctx=64, device="cpu") as e:
        assert e.plan.streamed and "".join(e.stream(ids, max_new_tokens=12, temperature=0)) == want


@pytest.mark.slow
def test_fused_steps_on_the_packed_file_write_the_same(shelf):
    model, tok = load(shelf, device="cpu", dtype="float32")
    want = written(model, tok)
    fuse_decode(model)
    assert written(model, tok) == want

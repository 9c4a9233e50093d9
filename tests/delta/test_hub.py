"Published deltas: sharded models, packed backbones, sums that PEFT reads, hashes that are cheap the second time."
import dataclasses
import errno
import hashlib
import json

import pytest
import torch

from bmlab.core import set_seed
from bmlab.train.processes import run_ranks
from bmlab.delta.delta import Delta
from bmlab.delta.hub import DeltaCard, DeltaCardError, Hub, backbone_hash, cat, publish, svd
from bmlab.kernels.layers import pack_linears
from bmlab.delta.lora import Lora

IDS = torch.arange(32).view(4, 8) * 7 % 96


def llama(cls="LlamaForCausalLM", **kw):
    import transformers as tf
    set_seed(0)
    return getattr(tf, cls)(
        tf.LlamaConfig(
            **dict(
                hidden_size=32,
                intermediate_size=64,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                vocab_size=96,
                pad_token_id=0,
            )
            | kw
        )
    ).eval()


def logits(model):
    with torch.no_grad(): return model(input_ids=IDS).logits


def stirred(d):
    g = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in d.parameters(): p += 0.1 * torch.randn(p.shape, generator=g)
    return d


def test_the_hash_is_what_it_says():
    "Sorted names, each with SHA-256 of shape, dtype and bytes"
    model = llama()
    whole = hashlib.sha256()
    for n, t in sorted(model.state_dict().items()):
        whole.update(
            f"{n} {hashlib.sha256(f'{tuple(t.shape)} float32 '.encode() + t.numpy().tobytes()).hexdigest()}\n".encode()
        )
    assert backbone_hash(model) == whole.hexdigest()


def test_the_second_hash_reads_nothing(monkeypatch):
    import bmlab.delta.hub as hub
    model, read = llama(), []
    digest = hub._digest
    monkeypatch.setattr(hub, "_digest", lambda t: read.append(t) or digest(t))
    h = backbone_hash(model)
    assert len(read) == len(model.state_dict())
    Lora(model)
    read.clear()
    assert backbone_hash(model) == h and read == []
    with torch.no_grad(): model.model.layers[1].mlp.up_proj.weight.mul_(2)
    assert backbone_hash(model) != h and len(read) == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtypes_and_packed_models_hash(dtype):
    model = llama().to(dtype)
    assert backbone_hash(model) == backbone_hash(llama().to(dtype)) != backbone_hash(llama())
    packed = pack_linears(llama())
    assert backbone_hash(packed) == backbone_hash(pack_linears(llama())) != backbone_hash(llama())


def test_a_delta_for_a_packed_backbone(tmp_path):
    model = pack_linears(llama())
    publish(stirred(Lora(model, name="zh")), tmp_path, "zh", "letters", "mit")
    other = pack_linears(llama())
    Hub(tmp_path).load("zh", other)
    assert torch.equal(logits(other), logits(model))
    with pytest.raises(ValueError, match="was trained on"): Hub(tmp_path).load("zh", llama())


def test_peft_reads_sums(tmp_path):
    import peft
    model = llama()
    a, b = (
        stirred(Lora(model, r=4, name="a")),
        stirred(Lora(model, r=2, modules=["q_proj", "mlp.*_proj"], alpha=3, name="b")),
    )
    both = logits(model)
    for make, tol in ((lambda: cat(a, b), 1e-6), (lambda: svd(a, b, r=6), 1e-5)):
        d = make()
        theirs = peft.PeftModel.from_pretrained(llama(), d.save(tmp_path / "sum")).eval()
        torch.testing.assert_close(logits(theirs), both, atol=tol, rtol=0)
        other = llama()
        Delta.load(tmp_path / "sum", other)
        torch.testing.assert_close(logits(other), both, atol=tol, rtol=0)


def test_every_method_publishes(tmp_path):
    from test_delta_matrix import METHODS, make
    for name in METHODS:
        model = llama()
        d = stirred(make(name, model))
        tuned = logits(model)
        card = publish(d, tmp_path, name, "letters", "mit")
        assert card.parameters == d.count().delta and 0 < card.ratio < 1
        other = llama()
        Hub(tmp_path).load(name, other)
        torch.testing.assert_close(logits(other), tuned, atol=1e-6, rtol=0)
    assert len(Hub(tmp_path).table) == len(METHODS)


def sharded(folder):
    import torch.distributed as dist
    from bmlab.train.sharding import shard
    r, W = dist.get_rank(), dist.get_world_size()
    labels = torch.tensor([0, 1, 1, 0])
    def steps(model, d, part):
        opt = torch.optim.AdamW(d.param_groups(1e-2))
        for _ in range(2):
            model(input_ids=IDS[part], labels=labels[part]).loss.backward()
            opt.step()
            opt.zero_grad()
    alone = llama("LlamaForSequenceClassification")
    steps(alone, stirred(Lora(alone, name="zh")).freeze(), slice(None))
    model = llama("LlamaForSequenceClassification")
    d = stirred(Lora(model, name="zh")).freeze()
    h, start = backbone_hash(model), model.score.weight.detach().clone()
    shard(model, zero=3, dtype=None)
    assert backbone_hash(model) == h
    steps(model, d, slice(r * 4 // W, (r + 1) * 4 // W))
    head = model.score.weight.full_tensor()
    card = publish(d, folder, "zh", "letters", "mit")
    other = llama("LlamaForSequenceClassification")
    with torch.no_grad(): other.score.weight.normal_()
    back = Hub(folder).load("zh", other)
    moved = (head - start).abs().max().item()
    d.unfreeze()
    assert all(p.requires_grad for p in model.parameters())
    return (
        d.kept,
        card.heads,
        card.parameters,
        (logits(other) - logits(alone)).abs().max().item(),
        list(back.heads),
        back.count().delta,
        moved,
    )


@pytest.mark.long
def test_published_from_two_ranks(tmp_path):
    for kept, heads, n, difference, back, total, moved in run_ranks(sharded, str(tmp_path)):
        assert kept == heads == ("score",) and back == ["score"] and n == total
        assert difference < 1e-5 and moved > 1e-3                # the head was trained, as on one process


def test_a_full_disk_leaves_the_old_card_and_the_old_page(tmp_path, monkeypatch):
    "DeltaCard.write and Hub.write_index, whole or not at all"
    publish(Lora(llama(), r=2), tmp_path, "one", task="first", license="mit")
    card, page = DeltaCard.read(tmp_path / "one"), (tmp_path / "index.html").read_text()
    def full(fd): raise OSError(errno.ENOSPC, "No space left on device")
    with monkeypatch.context() as m:
        m.setattr("os.fsync", full)
        with pytest.raises(OSError, match="No space"): dataclasses.replace(card, task="second").write(tmp_path / "one")
        with pytest.raises(OSError, match="No space"): Hub(tmp_path).write_index()
    assert DeltaCard.read(tmp_path / "one") == card and (tmp_path / "index.html").read_text() == page
    assert [p.name for p in tmp_path.rglob("*~*")] == []
    dataclasses.replace(card, task="second").write(tmp_path / "one")
    assert "second" in Hub(tmp_path).write_index().read_text()


def test_a_card_with_a_field_missing_is_named(tmp_path):
    publish(Lora(llama(), r=2), tmp_path, "one", task="first", license="mit")
    file = tmp_path / "one/card.json"
    said = json.loads(file.read_text())
    for k in ("task", "backbone_sha256"):
        file.write_text(json.dumps({n: v for n, v in said.items() if n != k}))
        with pytest.raises(DeltaCardError, match=k): DeltaCard.read(tmp_path / "one")

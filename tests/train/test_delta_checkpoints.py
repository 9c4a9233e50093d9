"Checkpoints of a run with a delta: what is trained alone, on the same backbone; stopped by hand, killed, without room"
import os, shutil, signal, subprocess, sys
from collections import namedtuple
from pathlib import Path

import pytest
import torch
import transformers as tf

from bmlab.core import set_seed
from bmlab.data.samples import Batches
from bmlab.delta.adapter import Adapter
from bmlab.delta.lora import Lora
from bmlab.delta.peft_plugin import PeftDelta
from bmlab.kernels.layers import pack_linears
from bmlab.train import checkpoint
from bmlab.train.checkpoint import checkpoint_bytes, fingerprints, latest, load_weights
from bmlab.train.loop import fit, model_loss

ROWS = torch.randint(0, 99, (12, 8), generator=torch.Generator().manual_seed(0))
STEPS = 8


def made(seed=0, bits=4):
    "A model whose frozen part, in codes, is most of it, with dropout in the delta"
    set_seed(seed)
    model = tf.LlamaForCausalLM(tf.LlamaConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=99, tie_word_embeddings=False))
    if bits: pack_linears(model, bits=bits)
    d = Lora(model, r=2, dropout=0.1).freeze()
    return model, torch.optim.AdamW(d.trainable(), lr=1e-2)


def run(folder, loss=model_loss, parts=None, **options):
    folder = Path(folder)
    model, opt = parts or made()
    torch.manual_seed(1)
    log = fit(model, Batches(ROWS, batch=5), opt, steps=STEPS, loss=loss, save_to=folder, plot=False, **options)
    return log.loss.tolist(), {n: p.detach().clone() for n, p in model.named_parameters()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory): return run(tmp_path_factory.mktemp("whole") / "run")


def same(a, b): return a[0] == b[0] and all(torch.equal(a[1][n], b[1][n]) for n in a[1])


def size(folder): return sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())


def ending(how, at):
    "A loss that ends the run in step `at`"
    seen = []
    def loss(model, batch):
        seen.append(1)
        if len(seen) == at and how == "button": os.kill(os.getpid(), signal.SIGINT)
        if len(seen) == at and how == "exception": raise KeyboardInterrupt
        if len(seen) == at and how == "kill": os.kill(os.getpid(), signal.SIGKILL)
        return model_loss(model, batch)
    return loss


@pytest.mark.parametrize("how", ("kill", "button", "exception"))
def test_a_run_that_ends_in_the_middle_goes_on_bit_for_bit(tmp_path, whole, how, capsys):
    "Killed, told by the stop button, or interrupted in a forward: the delta alone is kept, and the run is the same"
    options = dict(save_every=2) if how == "kill" else {}
    if how == "kill":
        code = "import sys; sys.path.insert(0, sys.argv[1]); import test_delta_checkpoints as t"
        code += "; t.run(sys.argv[2], t.ending('kill', 6), save_every=2)"
        done = subprocess.run([sys.executable, "-c", code, str(Path(__file__).parent), str(tmp_path)])
        assert done.returncode == -signal.SIGKILL
    else:
        losses, _ = run(tmp_path, ending(how, 6), **options)
        assert losses == whole[0][:len(losses)] and len(losses) == {"button": 6, "exception": 5}[how]
        said = f"stopped by hand after {len(losses)} of 8 steps; resume=True goes on from step-"
        assert said in capsys.readouterr().out
    step = {"kill": 4, "button": 6, "exception": 5}[how]
    assert latest(tmp_path).name == f"step-{step:08d}" and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    model, opt = made()
    tuned = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    said = checkpoint_bytes(model, opt, backbone=False)
    assert 3 * tuned < size(latest(tmp_path)) < said < 0.5 * checkpoint_bytes(model, opt)
    assert same(run(tmp_path, resume=True, **options), whole)


def test_another_backbone_is_refused(tmp_path, whole):
    run(tmp_path)
    others = (made(seed=3), "of another backbone: model"), (made(bits=None), "which this model lacks")
    for other, said in others:
        before = {n: p.clone() for n, p in other[0].named_parameters()}
        with pytest.raises(ValueError, match="holds a delta alone") as e: run(tmp_path, parts=other, resume=True)
        assert said in str(e.value) and "load the backbone that the delta was trained on" in str(e.value)
        assert all(torch.equal(p, before[n]) for n, p in other[0].named_parameters())


def lora(**options): return lambda model: Lora(model, r=2, **options)
def adapter(**options): return lambda model: Adapter(model, bottleneck=4, **options)
def pefts(alpha):
    pytest.importorskip("peft")
    return lambda model: PeftDelta(model, {"peft_type": "LORA", "r": 2, "lora_alpha": alpha})


@pytest.mark.parametrize("then, now, said", (
    (lora(alpha=4), lora(alpha=16), r"alpha / r = 2\.0 and the model has alpha / r = 8\.0 at .*q_proj, delta lora"),
    (lora(alpha=4), lora(alpha=4, rslora=True), r"alpha / r = 2\.0 and the model has alpha / r = 2\.8"),
    (adapter(), adapter(scale=0.5), r"scale = 1\.0 .* scale = 0\.5"),
    (adapter(), adapter(activation="relu"), "gelu_new .* relu"),
    (lambda m: pefts(4)(m), lambda m: pefts(16)(m), "scaling of .* = 2.0 .* = 8.0"),
))
def test_a_delta_of_another_scale_is_refused(tmp_path, then, now, said):
    "No tensor tells it, so the model would compute something else without a word"
    def parts(make):
        set_seed(0)
        model = tf.LlamaForCausalLM(tf.LlamaConfig(
            hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=99))
        d = make(model).freeze()
        return model, torch.optim.AdamW(d.trainable(), lr=1e-2)
    run(tmp_path, parts=parts(then))
    model, opt = parts(now)
    before = {n: p.clone() for n, p in model.named_parameters()}
    with pytest.raises(ValueError, match=said): run(tmp_path, parts=(model, opt), resume=True)
    with pytest.raises(ValueError, match=said): load_weights(model, tmp_path)
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
    run(tmp_path, parts=parts(then), resume=True)


def test_a_whole_checkpoint_of_before_is_taken_up(tmp_path, whole, monkeypatch):
    with monkeypatch.context() as m:
        m.setattr("bmlab.train.loop.fingerprints", lambda model: {})
        run(tmp_path, ending("button", 4))
    assert same(run(tmp_path, resume=True), whole)


def test_a_fingerprint_is_made_of_every_bit_and_of_no_rank():
    for t in (torch.randn(37, 13), torch.randn(64, 8).bfloat16(), torch.arange(77, dtype=torch.uint8), torch.randn(9)):
        first = checkpoint._sum_of_bits(t, 0)
        parts = [checkpoint._sum_of_bits(t[a:b], a) for a, b in ((0, 5), (5, 8), (8, len(t)))]
        assert sum(p.item() for p in parts) % 2**64 == first.item() % 2**64
        for i in (0, len(t) // 2, -1):
            other = t.clone().view(torch.uint8)
            other.flatten()[i] ^= 1
            assert checkpoint._sum_of_bits(other.view(t.dtype), 0) != first
        if t.ndim > 1: assert checkpoint._sum_of_bits(t.flip(0), 0) != first
    model, _ = made()
    marks = fingerprints(model)
    assert "model.layers.0.self_attn.q_proj.codes" in marks and not any("lora" in n for n in marks)
    assert marks["model.embed_tokens.weight"].startswith("float32 99×256 ")
    assert fingerprints(tf.LlamaForCausalLM(model.config)) == {}


def test_a_disk_without_room_is_an_error_before_the_first_step(tmp_path, monkeypatch):
    model, opt = made()
    each, seen = checkpoint_bytes(model, opt, backbone=False), []
    Usage = namedtuple("Usage", "total used free")
    for free, keep, fits in ((3 * each, 2, True), (2 * each, 2, False), (2 * each, 1, True)):
        monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(0, 0, free))
        loss = lambda m, b: seen.append(1) or model_loss(m, b)
        go = lambda: run(tmp_path / f"{free}-{keep}", loss, save_every=1, keep=keep)
        if fits: go()
        else:
            with pytest.raises(OSError, match=r"3 checkpoints of .* and its disk has .* left; keep=1"): go()
    assert len(seen) == 2 * STEPS


def spread(folder, resume):
    from bmlab.train.sharding import shard
    model, _ = made()
    shard(model, dtype=None)
    opt = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    return run(folder, parts=(model, opt), resume=resume)[0]


@pytest.mark.slow
def test_two_ranks_and_one_know_the_same_backbone(tmp_path):
    from bmlab.train.processes import run_ranks
    run_ranks(spread, tmp_path, False)
    load_weights(made()[0], tmp_path)

"Losses of preferences beside TRL's (tools/original_trl_preference.py), and what only a model with a delta can show"
import copy
import importlib.util
import json
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bmlab.align.chats import ChatError, Chats
from bmlab.align.preference import Dpo, Ipo, Kto, Orpo, PreferenceBatches, Preferences, Scores, Simpo
from bmlab.delta import Lora, deltas
from bmlab.kernels.layers import pack_linears
from bmlab.models.load import sample_dir
from bmlab.train import fit
from bmlab.train.loop import model_loss
from bmlab.train.losses import lm_loss

ROOT = Path(__file__).resolve().parents[2]
ORIGINAL = json.loads((ROOT / "tests/fixtures/original_trl_preference.json").read_text(encoding="utf-8"))
SPEC = importlib.util.spec_from_file_location("original_trl_preference", ROOT / ORIGINAL["recipe"])
trl = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(trl)

LOSSES = {
    "dpo": lambda ref: Dpo(0.3, ref),
    "dpo, sft": lambda ref: Dpo(0.3, ref, sft=0.5),
    "dpo, robust": lambda ref: Dpo(0.3, ref, label_smoothing=0.1, robust=True),
    "dpo, per token": lambda ref: Dpo(1.5, ref, per_token=True),
    "ipo": lambda ref: Ipo(0.3, ref),
    "kto": lambda ref: Kto(0.3, ref, good=1.5, bad=0.75),
    "orpo": lambda ref: Orpo(0.4),
    "simpo": lambda ref: Simpo(2.0, 1.0, label_smoothing=0.1),
}


def preferences(pairs):
    "Preferences of ids instead of texts"
    def answer(p, side):
        learned = np.array([False] * len(p["prompt"]) + [True] * len(p[side]))
        return np.array(p["prompt"] + p[side], np.int32), learned, side == "chosen"

    prefer = Preferences.__new__(Preferences)
    prefer.tok, prefer.paired = SimpleNamespace(pad_token_id=trl.PAD), True
    prefer.names = [f"row {n}" for n in range(len(pairs))]
    prefer.answers = [[answer(p, "chosen"), answer(p, "rejected")] for p in pairs]
    return prefer


def batch_of(pairs): return preferences(pairs).batches(batch=len(pairs), shuffle=False)[0]


def with_delta(name="llama", packed=False):
    "A model of a family that moved away from its reference by a delta alone"
    model = trl.family(name)
    if packed: pack_linears(model, bits=4)
    d = Lora(model, r=4).freeze()
    for i, p in enumerate(d.parameters()): p.data.copy_(trl.noise(p.numel(), i).view(p.shape) * 0.5)
    return model, d


@pytest.mark.parametrize("name", ORIGINAL["families"])
def test_losses_and_gradients_are_those_of_trl(name):
    batch, before = batch_of(trl.pairs()), trl.family(name)
    for what, want in ORIGINAL["families"][name].items():
        model = trl.family(name, 0.2)
        loss = LOSSES[what](before)
        value = loss(model, batch)
        value.backward()
        assert value.item() == pytest.approx(want["loss"], rel=1e-5), what
        got, norms = trl.projected(model), {n: p.grad.norm().item() for n, p in model.named_parameters()}
        assert got.keys() == want["gradients"].keys()
        for n, x in want["gradients"].items(): assert abs(got[n] - x) <= 1e-5 * max(norms[n], 1e-2), (what, n)


@pytest.mark.parametrize("packed", [False, True])
def test_the_reference_is_the_model_before_it_was_tuned_bit_for_bit(packed):
    model, d = with_delta(packed=packed)
    copied = copy.deepcopy(model)
    deltas(copied).forget("lora")
    batches = preferences(trl.pairs()).batches(batch=1)
    fit(model, batches, torch.optim.AdamW(d.trainable(), lr=1e-2), steps=5, loss=Dpo(), plot=False)
    for loss in (Dpo, Ipo, Kto):
        own, by_copy = (loss(reference=r).scores(model, batch_of(trl.pairs())) for r in (None, copied))
        assert torch.equal(own.reference, by_copy.reference) and torch.equal(own.logp, by_copy.logp)
        assert (own.logp != own.reference).any()
    own, by_copy = (Kto(reference=r).scores(model, batch_of(trl.pairs())).drift for r in (None, copied))
    assert torch.equal(own, by_copy)


@pytest.mark.parametrize("loss", [Dpo(), Kto(), Orpo(), Simpo()], ids=lambda x: type(x).__name__)
def test_no_tensor_is_as_large_as_the_logits(loss):
    class Largest(TorchDispatchMode):
        numel = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for t in torch.utils._pytree.tree_leaves(out):
                if isinstance(t, torch.Tensor): self.numel = max(self.numel, t.numel())
            return out

    words, loss.chunk = 5000, 4
    sizes = trl.tf.LlamaConfig(**trl.KV | {"vocab_size": words})
    model = trl.tf.LlamaForCausalLM(sizes)
    Lora(model, r=2).freeze()
    batch = batch_of(trl.pairs() * 4)
    with Largest() as seen: loss(model, batch).backward()
    rows, length = batch["input_ids"].shape
    assert seen.numel <= words * 32 < rows * (length - 1) * words / 8           # 32: the head's own width


def test_four_bit_weights_below_a_delta_train():
    model, d = with_delta(packed=True)
    loss, prefer = Dpo(), preferences(trl.pairs())
    fit(model, prefer.batches(batch=3), torch.optim.AdamW(d.trainable(), lr=1e-2), steps=12, loss=loss, plot=False)
    log = loss.log
    assert log.margin.iloc[-1] > log.margin.iloc[0] + 0.5 and log.accuracy.iloc[-1] == 1 and len(log) == 12
    assert np.allclose(log.margin, log.reward_chosen - log.reward_rejected, atol=1e-5)


def test_answers_do_not_see_what_shares_their_batch():
    model, _ = with_delta("gpt2")
    pairs = trl.pairs()
    together = Dpo().scores(model, batch_of(pairs))
    for i, p in enumerate(pairs):
        alone = Dpo().scores(model, batch_of([p]))
        for a, b in ((alone.logp, together.logp), (alone.reference, together.reference)):
            assert torch.allclose(a, b[[i, i + 3]], atol=1e-5)


def test_batches_of_a_step_count_by_their_pairs():
    pairs, found = trl.pairs() + trl.pairs()[:1], []
    for parts, accumulate in ([pairs], 1), ([pairs[:1], pairs[1:]], 2):
        model, d = with_delta()
        opt = torch.optim.SGD(d.trainable(), lr=1.0)
        fit(model, [batch_of(p) for p in parts], opt, steps=1, accumulate=accumulate, loss=Dpo(), plot=False)
        found.append(d.parameters())
    for a, b in zip(*found): assert torch.allclose(a, b, atol=1e-5)


def test_the_reference_knows_no_dropout():
    model, d = with_delta("gpt2")
    for m in model.modules():
        if isinstance(m, torch.nn.Dropout): m.p = 0.5
    one, two = (Dpo().scores(model.train(), batch_of(trl.pairs())) for _ in range(2))
    assert torch.equal(one.reference, two.reference) and not torch.equal(one.logp, two.logp) and model.training


def test_a_frozen_delta_of_an_earlier_stage_belongs_to_the_reference():
    model, first = with_delta()
    batch = batch_of(trl.pairs())
    for p in first.parameters(): p.requires_grad_(False)
    Lora(model, r=2, name="second").freeze()
    s = Dpo().scores(model, batch)
    assert torch.equal(s.logp, s.reference)                                      # the new one does nothing yet
    assert (Dpo(reference=first).scores(model, batch).reference != s.reference).any()


def test_what_cannot_be_a_reference_is_refused():
    batch = batch_of(trl.pairs())
    plain = trl.family("llama")
    for loss in (Dpo(), Ipo(), Kto()):
        with pytest.raises(ValueError, match="no delta of this LlamaForCausalLM trains.*reference=copy.deepcopy"):
            loss(plain, batch)
    assert Dpo(reference=trl.family("llama"))(plain, batch).requires_grad and Simpo()(plain, batch).requires_grad
    half, _ = with_delta()
    half.model.norm.weight.requires_grad_(True)
    with pytest.raises(ValueError, match="model.norm.weight train beside 'lora'"): Dpo()(half, batch)


def test_batches_go_on_where_they_stood():
    prefer = preferences(trl.pairs())
    whole, other = prefer.batches(batch=2, seed=3), prefer.batches(batch=2, seed=3)
    seen = [next(iter(whole))["input_ids"] for _ in range(5)]
    for _ in range(3): next(iter(other))
    again = prefer.batches(batch=2, seed=3)
    again.load_state_dict(json.loads(json.dumps(other.state_dict())))
    assert isinstance(again, PreferenceBatches)
    for i in (3, 4): assert torch.equal(next(iter(again))["input_ids"], seen[i])


def smol(): return trl.tf.AutoTokenizer.from_pretrained(sample_dir("smollm2-135m"))


def test_only_what_the_assistant_says_may_differ():
    tok, talk = smol(), lambda *texts: [{"role": r, "content": t} for r, t in zip(("user", "assistant") * 2, texts)]
    pair = lambda a, b: Preferences(Chats([{"chosen": a, "rejected": b}], tok))
    later = talk("Q", "A", "B?", "C"), talk("Q", "A", "D?", "E"), 2
    for a, b, n in ((talk("2+2?", "4"), talk("3+3?", "5"), 0), later):
        with pytest.raises(ChatError, match=f"row 0: .* differ first in message {n}, which is of user"): pair(a, b)
    with pytest.raises(ChatError, match="message 0, which is of system"):
        pair([{"role": "system", "content": "Be kind."}, *talk("Q", "A")], talk("Q", "B"))
    assert len(pair(talk("Q", "A", "B?", "C"), talk("Q", "D", "E?", "F"))) == 1       # (after another answer, anything)


def test_rows_that_are_cut_before_their_answer_are_left_out_as_bad_ones_are(caplog):
    long, short = ({"prompt": " ".join("a" * n), "chosen": "x", "rejected": "y"} for n in (60, 1))
    rows = [long, short, short]
    with pytest.raises(ChatError, match="seq=50 leaves nothing of an answer"):
        Preferences(Chats(rows, smol())).batches(batch=1, seq=50)
    prefer = Preferences(Chats(rows, smol(), bad="skip"))
    found = list(prefer.batches(batch=1, seq=50, shuffle=False))
    assert len(found) == 2 and len(prefer) == 3 and all(b["learned"].any(1).all() for b in found)
    assert "1 of 3 rows are left out" in caplog.text and prefer.skipped == []
    batches = prefer.batches(batch=1, seq=50)
    assert len(batches.prefer.skipped) == 1 and batches.prefer.skipped[0].startswith(prefer.names[0])
    assert len(list(prefer.batches(batch=1))) == 3
    with pytest.raises(ChatError, match="leaves nothing"): prefer.batches(batch=1, seq=4)


def test_what_cannot_be_compared_is_named_and_skipped_as_the_chats_are(tmp_path):
    tok, good = smol(), {"prompt": "a", "chosen": "x", "rejected": "y"}
    rows = [good, {"prompt": "b", "chosen": "same", "rejected": "same"}, {"prompt": "c", "chosen": "x"}, good]
    file = tmp_path / "p.jsonl"
    file.write_text("\n".join(["no JSON", *map(json.dumps, rows)]))
    prefer = Preferences(Chats.from_jsonl(file, tok, bad="skip"))
    assert len(prefer) == 2 and repr(prefer).endswith("3 skipped") and len(list(prefer.batches(batch=1))) == 2
    found = [re.search(r"p.jsonl, line (.): (?:.* )?(JSON|same|no rejected)", s).groups() for s in prefer.skipped]
    assert found == [("1", "JSON"), ("3", "same"), ("4", "no rejected")]
    with pytest.raises(ChatError, match="p.jsonl, line 5: seq=4 leaves nothing|p.jsonl, line 2: seq=4"):
        prefer.batches(batch=1, seq=4)
    file.write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(ChatError, match="p.jsonl, line 2: its chosen and its rejected"):
        Preferences(Chats.from_jsonl(file, tok))
    with pytest.raises(ChatError, match="no answer to learn from; row 0"):
        Preferences(Chats(rows[1:2], tok, bad="skip"))
    with pytest.raises(TypeError, match=r"chats is a list: wrap the rows, Preferences\(Chats\(rows, tok\)\)"):
        Preferences(rows)


def test_a_loss_of_labels_says_which_loss_judged_answers_take():
    model, batches = trl.family("llama"), preferences(trl.pairs()).batches(batch=3)
    for loss in ({}, {"loss": lm_loss}):
        with pytest.raises(ValueError, match=r"batches of judged answers, from Preferences: .* loss=Dpo\(\)"):
            fit(model, batches, "adamw", lr=1e-3, steps=1, plot=False, **loss)
    with pytest.raises(ValueError, match=r"loss=Kto\(\)"):
        model_loss(torch.nn.Linear(2, 2), batches[0] | {"paired": False})


@pytest.mark.parametrize("loss", [Dpo, Ipo, Kto, Orpo, Simpo])
def test_beta_is_a_number(loss):
    for bad in ("x", None, 0, -1.0, float("nan")):
        with pytest.raises(ValueError, match=f"beta={re.escape(repr(bad))}: a number above 0"): loss(beta=bad)


def test_kto_estimates_the_drift_on_other_prompts():
    model, _ = with_delta()
    one, two = trl.pairs()[:2]
    with pytest.raises(ValueError, match="both answers of a batch are to one prompt.*two or more"):
        Kto()(model, batch_of([one]))
    assert Kto()(model, batch_of([one, two])).isfinite()


def test_orpo_of_a_sure_answer_has_a_gradient():
    def found(logp, dtype=torch.float32):
        logp = torch.tensor(logp, dtype=dtype, requires_grad=True)
        none, tokens = torch.zeros(len(logp)), torch.full((len(logp),), 4)
        s = Scores(logp, none, tokens, torch.arange(len(logp)) < len(logp) // 2, torch.tensor(0.))
        value = Orpo(0.4).of(s)
        value.backward()
        return value.detach(), logp.grad

    for logp in ([0., -3.], [-3., 0.], [0., 0.]):
        for x in found(logp): assert x.isfinite().all()
    logp = [-1e-6, -0.3, -5., -80., -2e-6, -4e-5, -7., -900.]
    exact = torch.tensor(logp, dtype=torch.float64, requires_grad=True)
    p = (exact / 4).exp()
    odds = p.log() - (1 - p).log()                                              # eq. 6 as it is written, in float64
    want = -0.4 * torch.nn.functional.logsigmoid(odds[:4] - odds[4:]).mean()
    want.backward()
    value, gradient = found(logp)
    torch.testing.assert_close(value.double(), want.detach(), rtol=1e-5, atol=0)
    torch.testing.assert_close(gradient.double(), exact.grad, rtol=1e-4, atol=1e-9)


@pytest.mark.slow
def test_two_ranks_agree_with_one():
    from bmlab.train import run_ranks

    def step(kind):
        import torch.distributed as dist
        from bmlab.train import shard, world_size

        model, d = with_delta()
        if world_size() > 1: shard(model, dtype=None)
        batches = preferences(trl.pairs() + trl.pairs()[:1]).batches(batch=4, shuffle=False)
        loss = {"dpo": Dpo, "kto": Kto}[kind]()
        fit(model, batches, torch.optim.SGD(d.trainable(), lr=1.0), steps=2, loss=loss, plot=False)
        if world_size() > 1: dist.barrier()
        return [(p.full_tensor() if hasattr(p, "full_tensor") else p).detach() for p in d.parameters()]

    two = run_ranks(step, "dpo", world_size=2)[0]
    for a, b in zip(two, step("dpo")): assert torch.allclose(a, b, atol=1e-5)
    run_ranks(step, "kto", world_size=2)

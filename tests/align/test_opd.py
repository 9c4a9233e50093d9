"On-policy distillation against TRL's numbers, resumed bit for bit, with teachers of every kind."
import copy, importlib.util, json
from pathlib import Path

import pytest
import torch
import transformers as tf

from bmlab.align.opd import (
    OnPolicyDistill, OwnTexts, completed, generalized_jsd, log_probs_of, prompts_of, sampled_kl,
)
from bmlab.core import set_seed
from bmlab.delta import Lora, deltas
from bmlab.kernels.layers import pack_linears
from bmlab.train.loop import evaluate, fit
from bmlab.train.processes import run_ranks

ROOT = Path(__file__).resolve().parents[2]
THEIRS = json.loads((ROOT / "tests/fixtures/original_gkd.json").read_text())
SIZES = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=61)


def original():
    spec = importlib.util.spec_from_file_location("original_gkd", ROOT / "tools/original_gkd.py")
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def build(name="llama", seed=0, **more):
    set_seed(seed)
    sizes, gpt2 = SIZES | more, dict(n_embd=32, n_layer=2, n_head=4, vocab_size=61, n_positions=64)
    opt = dict(hidden_size=32, ffn_dim=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=61,
               word_embed_proj_dim=32, max_position_embeddings=64)
    grouped = dict(num_key_value_heads=2, eos_token_id=7)
    return {
        "llama": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**sizes, **grouped)),
        "gpt2": lambda: tf.GPT2LMHeadModel(tf.GPT2Config(**gpt2, eos_token_id=7, bos_token_id=7)),
        "qwen3": lambda: tf.Qwen3ForCausalLM(tf.Qwen3Config(**sizes, **grouped, head_dim=8)),
        "opt": lambda: tf.OPTForCausalLM(tf.OPTConfig(**opt, eos_token_id=7)),
    }[name]().eval()


def prompts(n, seed=0, length=4):
    return {"input_ids": torch.randint(8, 61, (n, length), generator=torch.Generator().manual_seed(seed))}


@pytest.mark.parametrize("case", THEIRS["cases"], ids=lambda c: f"beta{c['beta']}-T{c['T']}")
def test_divergence_is_trls(case):
    own = original()
    z, t = own.logits()
    z = z.clone().requires_grad_()
    keep = torch.tensor(own.LABELS) != -100
    loss = generalized_jsd(z, t, case["beta"], case["T"], keep, chunk=3)
    loss.backward()
    assert abs(loss.item() - case["loss"]) <= 1e-7
    torch.testing.assert_close(z.grad.flatten(), torch.tensor(case["grad"], dtype=torch.float64), atol=1e-7, rtol=1e-6)


@pytest.mark.parametrize("case", THEIRS["models"], ids=lambda c: f"beta{c['beta']}")
def test_a_models_step_is_trls(case):
    own = original()
    student, teacher = own.model(1), own.model(2)
    rows = completed([r[:own.BEGIN] for r in own.IDS], [r[own.BEGIN:] for r in own.IDS])
    loss = OnPolicyDistill(student, teacher, beta=case["beta"], on_policy=0.)(student, rows)
    loss.backward()
    assert abs(loss.item() - case["loss"]) <= 1e-5
    for n, grad in case["grads"].items():
        torch.testing.assert_close(student.get_parameter(n).grad.flatten(), torch.tensor(grad), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_a_loss_scale_finds_the_gradient_of_float16(beta):
    draw, scale = torch.Generator().manual_seed(0), 65536.0
    z = torch.randn(32, 3000, generator=draw).half()
    t = (z.float() + 0.05 * torch.randn(z.shape, generator=draw)).half()
    mine, exact = z.clone().requires_grad_(), z.double().requires_grad_()
    (generalized_jsd(mine, t, beta) * scale).backward()
    p, q = t.double().softmax(-1), exact.softmax(-1)
    kl = lambda a, b: (a * (a.log() - b.log())).sum(-1).mean()
    if beta in (0, 1): loss = kl(p, q) if beta == 0 else kl(q, p)
    else: loss = beta * kl(p, beta * p + (1 - beta) * q) + (1 - beta) * kl(q, beta * p + (1 - beta) * q)
    (loss * scale).backward()
    assert (mine.grad.double() - exact.grad).norm() < 2e-3 * exact.grad.norm()


def test_sampled_form_is_the_full_one_on_average():
    "Over all tokens that could be drawn, weighted by how likely they are: value and gradient"
    g = torch.Generator().manual_seed(1)
    z, t = (torch.randn(3, 9, generator=g, dtype=torch.float64) for _ in range(2))
    z.requires_grad_()
    full = generalized_jsd(z, t)
    want, = torch.autograd.grad(full, z)
    value, grad = 0., torch.zeros_like(z)
    for row in range(3):
        for i in range(9):
            p, at = z[row].softmax(0)[i].item(), torch.tensor([i])
            one = sampled_kl(log_probs_of(z[row:row + 1], at), log_probs_of(t[row:row + 1], at))
            value += p * one.item() / 3
            grad += p * torch.autograd.grad(one, z)[0] / 3
    assert abs(value - full.item()) <= 1e-12
    torch.testing.assert_close(grad, want, atol=1e-12, rtol=1e-10)
    old = torch.tensor([-1.5], dtype=torch.float64)                     # drawn when it was less likely
    at = torch.tensor([4])
    logp, theirs = log_probs_of(z[:1], at), log_probs_of(t[:1], at)
    got = sampled_kl(logp, theirs, old)
    assert abs(got.item() - ((logp - old).exp() * (logp - theirs)).item()) <= 1e-12


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3", "opt"])
def test_sampler_and_trainer_agree(name):
    "The log-probabilities of what was drawn, prompts of unequal length, and rows that end early"
    model = build(name)
    with torch.no_grad(): model.get_output_embeddings().weight.mul_(10)
    opd = OnPolicyDistill(model, build(name, 1), tokens=12)
    batch = {"input_ids": torch.tensor([[0, 0, 9, 8], [11, 12, 13, 14], [0, 30, 31, 32]]),
             "attention_mask": torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1], [0, 1, 1, 1]])}
    set_seed(4)
    rows = opd.texts(batch)
    with torch.no_grad(): z, t, labels = opd.both(model, rows)
    keep = labels != -100
    found = log_probs_of(z[keep], labels[keep])
    assert (found - rows["drawn"]).abs().max() <= 1e-4 and keep.sum() == opd.sampled
    whole = build(name, 1)(rows["input_ids"]).logits[:, :-1]            # and the teacher's logits are where they belong
    at = rows["labels"][:, 1:] != -100
    torch.testing.assert_close(t[keep], whole[at], atol=1e-4, rtol=1e-4)


def test_rows_end_with_the_end_of_text():
    model = build()
    write = OwnTexts(model, tokens=40, eos=list(range(0, 61, 4)))
    texts, logp = write(prompts_of(prompts(6)))
    assert all(i % 4 for t in texts for i in t[:-1]) and all(t[-1] % 4 == 0 for t in texts)
    assert [len(t) for t in texts] == [len(p) for p in logp] and len({len(t) for t in texts}) > 1
    set_seed(9)
    both = write(prompts_of(prompts(6)))[0]
    set_seed(9)
    assert write(prompts_of(prompts(6)))[0] == both


@pytest.mark.parametrize("form", ["full", "sampled"])
def test_resume_is_bit_identical(form, tmp_path):
    teacher = build(seed=1)
    def run(steps, folder, **more):
        model = build()
        set_seed(2)
        share = dict(on_policy=0.6) if form == "full" else {}
        opd = OnPolicyDistill(model, teacher, tokens=5, form=form, **share)
        batches = [completed(prompts_of(prompts(4, i)), [[20, 21, 7]] * 4) for i in range(3)]
        opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
        log = fit(model, batches, opt, steps, loss=opd, plot=False, save_to=folder, save_every=2, **more)
        return model, log
    whole, log = run(6, tmp_path / "whole")
    run(4, tmp_path / "cut")
    torch.manual_seed(77)                                                # another process has other random numbers
    again, then = run(6, tmp_path / "cut", resume=True)
    assert then.loss.tolist() == log.loss.tolist()
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), again.parameters()))


def test_teachers():
    "In four bits; the backbone with the delta off, equal to a copy of it; one delta for another"
    student, batch = build(), prompts(4)
    teacher = build(seed=1)
    packed = pack_linears(copy.deepcopy(teacher), 4)
    opd = OnPolicyDistill(student, packed, tokens=6)
    loss = opd(student, batch)
    loss.backward()
    assert loss.item() > 0 and all(p.grad is None for p in packed.parameters())
    student.zero_grad()
    bare = copy.deepcopy(student)
    d = Lora.without_regret(student, 4).freeze()
    for s in d.sites.values(): torch.nn.init.normal_(s.B, std=0.1)
    def grads(teacher):
        set_seed(6)
        for p in d.parameters(): p.grad = None
        loss = OnPolicyDistill(student, teacher, tokens=6)(student, batch)
        loss.backward()
        return [loss, *(p.grad for p in d.parameters())]
    assert all(torch.equal(a, b) for a, b in zip(grads(d.off), grads(bare)))
    other = Lora(student, 2, name="other")
    for s in other.sites.values(): torch.nn.init.normal_(s.B, std=0.1)
    other.detach()
    assert grads(lambda: deltas(student).use("other"))[0].item() > 0
    assert d.attached and not other.attached and student.model.embed_tokens.weight.grad is None


def test_a_step_leaves_the_model_in_its_mode_and_counts_tokens():
    student = build(attention_dropout=0.5)
    opd = OnPolicyDistill(student.train(), build(seed=1), tokens=6)
    opd(student, prompts(4)).backward()
    assert student.training and opd.sampled == opd.notes["tokens"] and opd.notes["own"]
    held = evaluate(student, [prompts(4, 1)], opd)                       # a measure, too
    assert 0 < held < 10


def test_refusals():
    student, teacher = build(), build(seed=1)
    with pytest.raises(ValueError, match="scores 61 tokens and the teacher LlamaForCausalLM 64"):
        OnPolicyDistill(student, build(vocab_size=64))
    from transformers import PreTrainedTokenizerFast
    from tokenizers import Tokenizer, models
    inner = [models.WordLevel({w: i for i, w in enumerate(words)}, "a") for words in ("abc", "acb")]
    toks = [PreTrainedTokenizerFast(tokenizer_object=Tokenizer(m)) for m in inner]
    with pytest.raises(ValueError, match="'b' is token 1 of the student's and 2 of the teacher's"):
        OnPolicyDistill(student, teacher, tok=toks[0], teacher_tok=toks[1])
    OnPolicyDistill(student, teacher, tok=toks[0], teacher_tok=toks[0])
    with pytest.raises(TypeError, match=r"load\(\) returns"): OnPolicyDistill(student, (teacher, None))
    with pytest.raises(TypeError, match="delta.off"): OnPolicyDistill(student, "big")
    with pytest.raises(ValueError, match="student itself"): OnPolicyDistill(student, student)
    with pytest.raises(ValueError, match="beta=1.5"): OnPolicyDistill(student, teacher, beta=1.5)
    with pytest.raises(ValueError, match="on_policy=-1"): OnPolicyDistill(student, teacher, on_policy=-1)
    with pytest.raises(ValueError, match="tokens=0"): OnPolicyDistill(student, teacher, tokens=0)
    with pytest.raises(ValueError, match="form='sampled' estimates"):
        OnPolicyDistill(student, teacher, form="sampled", beta=0.5)
    with pytest.raises(ValueError, match="several conversations"):
        prompts_of(prompts(1) | {"position_ids": torch.tensor([[0, 1, 0, 1]])})
    opd = OnPolicyDistill(student, teacher, tokens=4)
    with pytest.raises(ValueError, match="another LlamaForCausalLM"): opd(teacher, prompts(2))
    with torch.no_grad(): student.model.norm.weight.fill_(float("nan"))
    with pytest.raises(FloatingPointError, match="row 0"): opd(student, prompts(2))


def on_two(paths):
    "Greedy texts of one length, so that halves of a batch weigh alike: weights after three steps"
    import sys
    sys.path[:0] = paths
    import test_opd as t
    from torch.nn.parallel import DistributedDataParallel
    from bmlab.train import rank, shard, world_size
    def run(joined, **how):
        model = t.build()
        if joined == "ddp": model = DistributedDataParallel(model)
        elif joined: shard(model, zero=joined, dtype=None)
        opd = OnPolicyDistill(model, t.build(seed=1), tokens=5, temperature=0, eos=[], **how)
        part = slice(rank() * 4 // world_size(), (rank() + 1) * 4 // world_size())
        batches = [completed(prompts_of(prompts(4, i)), [[20, 21, 7, 9, 9]] * 4) for i in range(3)]
        batches = [{k: v[part] for k, v in b.items()} for b in batches]
        set_seed(5 + rank())
        log = fit(model, batches, torch.optim.SGD(model.parameters(), lr=0.5), steps=3, loss=opd, plot=False)
        whole = [getattr(p, "full_tensor", lambda p=p: p)().detach().clone() for p in model.parameters()]
        return log.loss.tolist(), whole, opd.sampled
    if world_size() == 1: return run(None)
    return {joined: run(joined) for joined in ("ddp", 2, 3)} | {"mixed": run(3, on_policy=0.5)}


@pytest.mark.long
def test_two_processes_learn_what_one_does():
    paths = [str(ROOT / p) for p in ("tests/align", "tests/helpers", "tools")]
    found, (losses, weights, sampled) = run_ranks(on_two, paths), on_two(paths)
    for rank in found:
        for joined in ("ddp", 2, 3):
            assert rank[joined][0] == pytest.approx(losses, rel=1e-4) and 2 * rank[joined][2] == sampled
            for a, b in zip(rank[joined][1], weights, strict=True): assert torch.allclose(a, b, atol=1e-5), joined
    # (each has random numbers of its own, and still all write, or none)
    assert found[0]["mixed"][2] == found[1]["mixed"][2]


def test_micro_batches_count_by_what_was_written():
    "Prompts of unlike widths to which the same number of tokens was written count the same"
    student, teacher = build(seed=1), build(seed=2)
    seen = []
    class Told(OnPolicyDistill):
        def __call__(self, model, batch):
            value = super().__call__(model, batch)
            seen.append((value.item(), self.notes["tokens"]))
            return value
    loss, sgd = Told(student, teacher, tokens=6, eos=[]), torch.optim.SGD(student.parameters(), lr=0.0)
    long, short = (dict(input_ids=torch.randint(1, 20, (2, n))) for n in (20, 3))
    log = fit(student, [long, short], sgd, steps=1, accumulate=2, loss=loss, plot=False)
    (a, n), (b, m) = seen
    assert n == m == 12 and abs(log.loss.iloc[0] - (a + b) / 2) < 1e-6 and abs(a - b) > 1e-3
    seen.clear()
    assert abs(evaluate(student, [long, short], loss, progress=None) - sum(v for v, _ in seen) / 2) < 1e-6

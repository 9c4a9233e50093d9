"Tasks one after the other: exactness, files, other deltas, two ranks."
import copy

import pytest
import torch

from bmlab.delta.continual import Continual, orthogonality
from bmlab.core import set_seed
from bmlab.train.processes import run_ranks
from bmlab.delta.delta import deltas
from bmlab.delta.lora import Lora
from toys import llama, tune

IDS = torch.arange(16).view(2, 8)


def logits(model):
    with torch.no_grad(): return model(input_ids=IDS).logits


def train(model, d, shift, penalty=lambda: 0.0): tune(model, d, (IDS + shift) % 96, penalty, steps=4, weight_decay=0.1)


def make(model, name):
    set_seed(sum(map(ord, name)))
    return Lora(model, r=4, modules="*_proj", name=name)


@pytest.mark.parametrize("stack", [True, False])
def test_old_tasks_stay_bit_identical(stack, tmp_path):
    model = llama()
    state, plain = copy.deepcopy(model.state_dict()), logits(model)
    # a delta that is no task, on when it was
    other = Lora(model, r=2, modules="q_proj", name="elsewhere")
    c, had = Continual(model, make, stack), {}
    for i, t in enumerate("abcd"):
        with c.learn(t) as d:
            train(model, d, 10 * i, c.penalty)
            inside = logits(model)
        with c.use(t): had[t] = logits(model)
        assert torch.equal(inside, had[t])
    for t in "abcd":
        with c.use(t): assert torch.equal(logits(model), had[t])
    assert len({tuple(x.flatten()[:9].tolist()) for x in had.values()}) == 4
    with deltas(model).use(): assert torch.equal(logits(model), plain)
    assert all(torch.equal(state[k], v) for k, v in model.state_dict().items() if k in state) and other.attached
    twin = copy.deepcopy(model)
    with deltas(twin).use(*c.tasks["b"]): assert torch.equal(logits(twin), had["b"])
    back = Continual.load(c.save(tmp_path), llama(), make)
    for t in "abcd":
        with back.use(t): torch.testing.assert_close(logits(back.model), had[t], atol=1e-6, rtol=0)
    for t in reversed("abcd"): deltas(model).forget(t)
    deltas(model).forget("elsewhere")
    assert torch.equal(logits(model), plain) and list(model.state_dict()) == list(state)


def test_gradients_reach_the_new_delta_only():
    model = llama()
    c = Continual(model, make)
    with c.learn("a") as d: train(model, d, 0)
    old = [p.detach().clone() for p in deltas(model)["a"].parameters()]
    with c.learn("b") as d:
        (model(input_ids=IDS, labels=IDS).loss + c.penalty()).backward()
        assert all(p.grad is None and not p.requires_grad for p in deltas(model)["a"].parameters())
        assert {n for n, p in model.named_parameters() if p.grad is not None} == {
            n for n, _ in model.named_parameters() if "_deltas.b." in n
        }
        train(model, d, 5, c.penalty)
    assert all(torch.equal(x, y) for x, y in zip(old, deltas(model)["a"].parameters()))


def test_a_failure_inside_leaves_no_trace():
    model = llama()
    c = Continual(model, make)
    with c.learn("a") as d: train(model, d, 0)
    with c.use("a"): first = logits(model)
    grads = [p.requires_grad for p in model.parameters()]
    with pytest.raises(KeyboardInterrupt):
        with c.learn("b"): raise KeyboardInterrupt
    assert (
        list(c.tasks) == ["a"]
        and list(deltas(model)) == ["a"]
        and [p.requires_grad for p in model.parameters()] == grads
    )
    with c.use("a"): assert torch.equal(logits(model), first)
    with c.learn("b") as d: train(model, d, 3)
    assert list(c.tasks) == ["a", "b"]


def test_other_kinds_of_delta():
    "Any delta can be a task's; the penalty is for LoRAs"
    from bmlab.delta.adapter import Adapter
    model = llama()
    c = Continual(model, lambda model, name: Adapter(model, bottleneck=4, name=name))
    with c.learn("a") as d: train(model, d, 0)
    with c.use("a"): first = logits(model)
    with c.learn("b") as d:
        with pytest.raises(TypeError, match="penalty=0"): c.penalty()
        train(model, d, 5)
    with c.use("a"): assert torch.equal(logits(model), first)


def test_penalty_by_hand():
    model = llama()
    a, b, new = (make(model, n) for n in ("a", "b", "new"))
    want = sum(((old.sites[n].A @ new.sites[n].A.T) ** 2).sum() for old in (a, b) for n in new.sites)
    torch.testing.assert_close(orthogonality(new, [a, b]), want)


def two_ranks(zero):
    import torch.distributed as dist
    from bmlab.train.sharding import shard
    r = dist.get_rank()
    def build():
        model = llama()
        old, new = make(model, "a"), make(model, "b").freeze()
        for p in old.parameters(): p.requires_grad_(False)
        return model, old, new
    def run(model, old, new, ids):
        tune(model, new, ids, lambda: orthogonality(new, [old]))
        return [p.full_tensor() if hasattr(p, "full_tensor") else p.detach() for p in new.parameters()]
    want = run(*build(), IDS)
    model, old, new = build()
    shard(model, zero=zero, dtype=None)
    got = run(model, old, new, IDS[r:r + 1])
    return max((x - y).abs().max().item() for x, y in zip(got, want))


@pytest.mark.long
@pytest.mark.parametrize("zero", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_sharded(zero):
    "The penalty on two ranks trains as on one; at zero 3 parameters are shards after the forward, and gathered for it"
    for diff in run_ranks(two_ranks, zero, timeout_s=90): assert diff < 1e-5

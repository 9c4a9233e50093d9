"AdamW on the cores in one pass: the bits of torch's fused step, and of the lanes that use it."
import copy

import pytest
import torch
from torch import nn

from bmlab.kernels import cpu_adamw
from bmlab.kernels.cpu_adamw import available, cpu_adamw_, takes

KINDS = [torch.float32, torch.bfloat16, torch.float16, None]
compiled = pytest.mark.skipif(not available(), reason="no compiled step here")


def drawn(n, dtype, seed=0):
    "weight or None, gradient, master, m, v; some moments and gradients are zero"
    torch.manual_seed(seed)
    master, grad, m, v = torch.randn(n), torch.randn(n), torch.randn(n) / 10, torch.randn(n).square() / 100
    for t in (grad, m, v): t[::7] = 0
    return [None if dtype is None else master.to(dtype), grad.to(dtype or torch.float32), master, m, v]


def by_torch(weight, grad, master, m, v, step, lr, betas, eps, weight_decay, divisor=1.0):
    told = dict(lr=lr, beta1=betas[0], beta2=betas[1], weight_decay=weight_decay, eps=eps)
    told |= dict(amsgrad=False, maximize=False)
    scale = None if divisor == 1 else torch.tensor(divisor)
    wide = grad.to(torch.float32, copy=True)
    count = [torch.tensor(float(step))]
    torch._fused_adamw_([master], [wide], [m], [v], [], count, grad_scale=scale, found_inf=None, **told)
    if weight is not None: weight.copy_(master)


def same(a, b): return all(x is None or torch.equal(x, y) for x, y in zip(a, b, strict=True))


@compiled
@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_a_step_has_the_bits_of_torchs(dtype):
    "Lengths that end in every rest and in several pieces; averages that forget fast and slowly; divided gradients"
    for n in (1, 3, 8, 15, 16, 31, 4096, 4103, 20_011):
        for betas in ((0.9, 0.999), (0.3, 0.8)):
            for divisor in (1.0, 3.0):
                how = dict(lr=1e-2, betas=betas, eps=1e-8, weight_decay=0.1, divisor=divisor)
                mine = drawn(n, dtype, n)
                theirs = copy.deepcopy(mine)
                for step in (1, 2, 1000):
                    cpu_adamw_(*mine, step=step, threads=2, **how)
                    by_torch(*theirs, step=step, **how)
                assert same(mine, theirs), (n, betas, divisor)


@compiled
def test_what_is_not_finite_stays_so_and_a_given_up_step_changes_nothing():
    weight, grad, *state = drawn(100, torch.bfloat16)
    grad[3], grad[5] = float("nan"), float("inf")
    before = copy.deepcopy([weight, *state])
    how = dict(step=2, lr=1e-2, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)
    cpu_adamw_(weight, grad, *state, found=torch.ones(()), **how)
    assert same([weight, *state], before)
    cpu_adamw_(weight, grad, *state, found=torch.zeros(()), **how)
    assert weight[[3, 5]].isnan().all() and weight.isfinite().sum() == 98 and not same([weight, *state], before)


@compiled
@pytest.mark.parametrize("how", [
    (dict(grad=torch.ones(9)), ValueError, "grad has 9 elements: the master has 8"),
    (dict(grad=torch.ones(8)), TypeError, "weight bfloat16, grad float32"),
    (dict(m=torch.ones(16)[::2]), TypeError, "all contiguous"),
    (dict(v=torch.ones(8, dtype=torch.float64)), TypeError, "v float64"),
], ids=["length", "dtype", "strides", "state"])
def test_wrong_tensors_are_named(how):
    change, kind, said = how
    names = "weight", "grad", "master", "m", "v"
    given = dict(zip(names, drawn(8, torch.bfloat16))) | change
    kept = copy.deepcopy(given)
    with pytest.raises(kind, match=said):
        cpu_adamw_(*given.values(), step=1, lr=0.1, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.0)
    assert same(given.values(), kept.values())


def trained(dtype, **how):
    from bmlab.train.offload import AdamW
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(33, 70), nn.Tanh(), nn.Linear(70, 5)).to(dtype)
    opt, x = AdamW(net, lr=1e-2, offload=1.0, unit=500, **how), torch.randn(6, 33).to(dtype)
    for _ in range(4):
        net(x).float().square().mean().backward()
        opt.step()
        opt.zero_grad()
    opt.flush()
    return [*net.parameters(), *(t for s in opt.state_dict()["state"].values() for t in s.values())]


@pytest.mark.parametrize("overlap", ["forward", "backward"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_lanes_give_the_same_with_and_without_a_compiler(dtype, overlap, monkeypatch):
    import bmlab.train.offload as offload
    calls, step = [], offload.cpu_adamw_
    monkeypatch.setattr(offload, "cpu_adamw_", lambda *a, **k: (calls.append(1), step(*a, **k)))
    once = trained(dtype, overlap=overlap)
    assert bool(calls) == available()
    seen = len(calls)
    monkeypatch.setattr(offload, "takes", lambda *a: False)
    assert same(once, trained(dtype, overlap=overlap)) and len(calls) == seen


def test_without_a_way_to_torchs_bits_torch_steps(monkeypatch, caplog):
    cpu_adamw._kernel.cache_clear()
    monkeypatch.setattr(cpu_adamw, "_way", lambda made: None)
    try:
        assert not available() and not takes(*drawn(8, torch.bfloat16))
        with pytest.raises(RuntimeError, match="ask available"):
            cpu_adamw_(*drawn(8, None), step=1, lr=0.1, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.0)
        assert all(t.isfinite().all() for t in trained(torch.bfloat16))
    finally: cpu_adamw._kernel.cache_clear()

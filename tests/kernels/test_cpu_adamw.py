"AdamW on the cores in one pass: the bits of torch's fused step, and of the lanes that use it."
import copy, os, shutil, subprocess, sys

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


def test_without_a_way_to_torchs_bits_torch_steps(monkeypatch):
    cpu_adamw._kernel.cache_clear()
    monkeypatch.setattr(cpu_adamw, "_way", lambda made: None)
    try:
        assert not available() and not takes(*drawn(8, torch.bfloat16))
        with pytest.raises(RuntimeError, match="ask available"):
            cpu_adamw_(*drawn(8, None), step=1, lr=0.1, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.0)
        assert all(t.isfinite().all() for t in trained(torch.bfloat16))
    finally: cpu_adamw._kernel.cache_clear()


@compiled
def test_no_two_ways_to_add_look_alike():
    "What a way gives on the trials, taken for torch's: no way that adds otherwise gives it"
    made, trials = cpu_adamw._kernel(), list(cpu_adamw._trials())
    def results(way):
        out = []
        for numbers, (weight, grad, *state), _ in trials:
            got = [t.clone() for t in (weight, *state)]
            cpu_adamw._call(made, way, got[0], grad, *got[1:], numbers, 1)
            out.append((numbers, (weight, grad, *state), got))
        return out
    ways = [w for w in cpu_adamw._WAYS if w[1] != w[2] or w[0] == 8]      # (if both ends add alike, no width is seen)
    for way in ways:
        as_torchs = results(way)
        assert [w for w in ways if cpu_adamw._agrees(made, w, as_torchs)] == [way]


@pytest.mark.parametrize("how", ["set_default_dtype(torch.bfloat16)", "set_default_dtype(torch.float64)",
                                 "set_default_device('meta')"])
def test_defaults_do_not_reach_the_trial(how):
    code = (f"import torch; torch.{how}\nfrom bmlab.kernels import cpu_adamw\nprint(cpu_adamw.available())")
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert out.returncode == 0, out.stderr
    assert out.stdout.strip() == str(available())


@compiled
def test_a_fake_tensor_is_not_taken():
    from torch._subclasses.fake_tensor import FakeTensorMode
    real = drawn(8, torch.bfloat16)
    cpu_adamw._kernel.cache_clear()
    with FakeTensorMode() as mode:
        assert available() and not takes(*real) and not takes(*map(mode.from_tensor, real))
    assert takes(*real) and not takes(*(t.to("meta") for t in real))


@compiled
def test_a_compiler_without_float16_leaves_it_to_torch():
    "as gcc before 12 on x86: other kinds are taken"
    code = ("import torch; from bmlab.kernels.cpu_adamw import available, takes\n"
            "state = [torch.zeros(8) for _ in range(3)]\n"
            "kinds = torch.half, torch.bfloat16, torch.float32\n"
            "print([takes(*(torch.zeros(2, 8, dtype=d)), *state) for d in kinds])")
    env = os.environ | {"CC": f"{shutil.which('gcc') or shutil.which('cc')} -U__FLT16_MAX__"}
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=180, env=env)
    assert out.stdout.strip() == "[False, True, True]", out.stderr


def test_each_lane_has_its_share_of_the_cores(monkeypatch):
    import bmlab.train.offload as offload
    had, step = set(), offload._cpu_unit
    def spied(*args):
        had.add(torch.get_num_threads())
        return step(*args)
    monkeypatch.setattr(offload, "_cpu_unit", spied)
    monkeypatch.setattr(offload, "host_threads", lambda ranks: (2, 3))
    before = torch.get_num_threads()
    trained(torch.bfloat16)
    assert had == {3} and torch.get_num_threads() == before

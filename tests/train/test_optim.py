"OptimManager: every torch optimizer, schedules against their formulas, sharded and replicated parameters on ranks."
import logging, math, threading, traceback, warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from bmlab.train import optim as O
from bmlab.train.processes import run_ranks
from bmlab.train.optim import OptimManager, gradient_norm

CLASSES = sorted(
    n for n in dir(torch.optim) if isinstance(getattr(torch.optim, n), type)
    and issubclass(getattr(torch.optim, n), torch.optim.Optimizer) and n not in ("Optimizer", "LBFGS")
)


class Net(nn.Module):
    def __init__(self, sparse=False, matrices=False):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(11, 6, sparse=sparse)
        self.a, self.b = nn.Linear(6, 8, bias=not matrices), nn.Linear(8, 11, bias=not matrices)

    def forward(self, ids): return self.b(torch.tanh(self.a(self.embed(ids))))


IDS = torch.arange(6 * 4 * 5).view(6, 4, 5) * 7 % 11


def loss_of(net, ids): return F.cross_entropy(net(ids).flatten(0, -2), (ids.flatten() + 1) % 11)


def parameters(name, net):
    "SparseAdam takes sparse gradients only: the embedding"
    return [net.embed.weight] if name == "SparseAdam" else list(net.parameters())


def train(name, managed, scale=None, clip=None, **options):
    net = Net(sparse=name == "SparseAdam", matrices=name == "Muon")
    opt = getattr(torch.optim, name)(parameters(name, net), lr=0.05, **options)
    schedule = O.Linear(opt, warmup_iter=1, end_iter=8)
    om = OptimManager(loss_scale=scale)
    om.add_optimizer(opt, schedule)
    for ids in IDS:
        if managed:
            om.zero_grad()
            om.backward(loss_of(net, ids))
            if clip: om.clip_grad_norm(clip)
            assert om.step()
        else:
            opt.zero_grad()
            loss_of(net, ids).backward()
            if clip:
                grads = [p.grad.coalesce().values() if p.grad.is_sparse else p.grad for p in parameters(name, net)]
                c = min(1., clip / (math.sqrt(sum(g.square().sum().item() for g in grads)) + 1e-6))
                for p in parameters(name, net): p.grad *= c
            opt.step()
            schedule.step()
    return torch.cat([p.detach().flatten() for p in net.parameters()])


@pytest.mark.parametrize("name", CLASSES)
def test_every_torch_optimizer(name):
    plain = train(name, False)
    assert torch.equal(plain, train(name, True))
    assert torch.equal(plain, train(name, True, scale=2.0 ** 12))
    # (Adam's division by √v makes the last bit of the coefficient visible where v is tiny)
    torch.testing.assert_close(
        train(name, False, clip=0.05), train(name, True, clip=0.05, scale=2.0**12), rtol=1e-4, atol=1e-4
    )
    assert not torch.equal(plain, Net(sparse=name == "SparseAdam", matrices=name == "Muon").embed.weight.flatten())


@pytest.mark.parametrize("name", ["Adam", "AdamW", "SGD", "Adagrad"])
def test_fused_optimizers(name):
    assert torch.equal(train(name, False, fused=True), train(name, True, scale=2.0 ** 12, fused=True))


def test_lbfgs_is_refused():
    with pytest.raises(TypeError, match="LBFGS evaluates the loss many times"):
        OptimManager().add_optimizer(torch.optim.LBFGS(Net().parameters()))


FORMULAS = {  # written down anew, term by term, from BMTrain's documentation
    "NoDecay": lambda s, n, w, e: s * n / w if n < w else s,
    "Linear": lambda s, n, w, e: s * n / w if n < w else max(0., s * (e - n) / (e - w)),
    "Cosine": lambda s, n, w, e: s * n / w if n < w else max(0., s * 0.5 * (1 + math.cos((n - w) / (e - w) * math.pi))),
    "Exponential": lambda s, n, w, e: s * n / w if n < w else s * 0.9 ** (n - w),
    "Noam": lambda s, n, w, e: s / math.sqrt(w) * n / w if n < w else s / math.sqrt(n),
}


def group(lr): return {"params": [nn.Parameter(torch.ones(2))], "lr": lr}


@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize("w, e, start, n0", [(0, 7, None, 1), (3, 12, None, 0), (10, 11, 0.3, 0), (4, 30, 2., 17)])
def test_schedules_against_their_formulas(name, w, e, start, n0):
    more = {"gamma": 0.9} if name == "Exponential" else {}
    opt = torch.optim.SGD([group(0.5), group(torch.tensor(4.))], lr=1.)      # a rate in a tensor stays one
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        schedule = getattr(O, name)(opt, start, w, e, n0, **more)
        tensor = opt.param_groups[1]["lr"]
        for n in range(n0, 40):
            want = [FORMULAS[name](start or base, n, w, e) for base in (0.5, 4.)]
            assert [float(g["lr"]) for g in opt.param_groups] == pytest.approx(
                want, rel=1e-6, abs=1e-7
            ) and schedule.get_last_lr() == pytest.approx(want, rel=1e-12, abs=1e-15)
            opt.step()
            schedule.step()
        assert opt.param_groups[1]["lr"] is tensor
        schedule.step(5)
        assert schedule.num_iter == 5 and schedule.current_lr == pytest.approx(
            FORMULAS[name](start or 0.5, 5, w, e), rel=1e-12
        )
        other = getattr(O, name)(torch.optim.SGD([group(9.), group(9.)], lr=1.), end_iter=99)
        other.load_state_dict(schedule.state_dict())
        assert other.get_last_lr() == schedule.get_last_lr()
        other.step()
        schedule.step()
        assert other.get_last_lr() == schedule.get_last_lr()


def test_schedules_are_torch_schedules():
    opt = torch.optim.SGD([group(1.)], lr=1.)
    both = torch.optim.lr_scheduler.SequentialLR(
        opt, [O.NoDecay(opt, warmup_iter=2), O.Linear(opt, end_iter=4)], milestones=[3]
    )
    seen = []
    for _ in range(8):
        seen.append(opt.param_groups[0]["lr"])
        opt.step()
        both.step()
    assert seen == [0., 0.5, 1., 1., 0.75, 0.5, 0.25, 0.]


def test_the_scale_grows_to_its_bound_and_warnings_are_said_once(caplog):
    net = nn.Linear(3, 3).half()
    om = OptimManager(loss_scale="dynamic", loss_scale_steps=2, loss_scale_factor=4, max_loss_scale=2.0 ** 17)
    om.add_optimizer(torch.optim.SGD(net.parameters(), lr=0.))
    scales = []
    with caplog.at_level(logging.INFO, logger="bmlab.train.optim"):
        for _ in range(5):
            om.zero_grad()
            om.backward(net(torch.ones(1, 3).half()).float().sum() * 1e-3)
            om.step()
            scales.append(om.loss_scale)
        assert scales == [2.0 ** 16, 2.0 ** 17, 2.0 ** 17, 2.0 ** 17, 2.0 ** 17]
        assert sum("float16" in r.message for r in caplog.records) == 1
        om.min_loss_scale = om.loss_scale
        om.backward(net(torch.ones(1, 3).half()).float().sum() * math.inf)
        om.step()
    assert any(r.levelno == logging.WARNING and "skipped" in r.message for r in caplog.records)


def half_gpt():
    import transformers as tf
    torch.manual_seed(0)
    return tf.GPT2LMHeadModel(
        tf.GPT2Config(
            n_embd=32, n_layer=2, n_head=4, vocab_size=99, n_positions=16, resid_pdrop=0.0, embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
    ).half()


def half_optimizer(kind, net):
    from bmlab.train.offload import AdamW
    if kind == "sgd": return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    return AdamW(net, lr=1e-2, offload=0.0 if kind == "masters" else 0.5)


@pytest.mark.parametrize("clip", [None, 1.0])
@pytest.mark.parametrize("kind", ["sgd", "masters", "offload"])
def test_a_model_in_half_precision_comes_down_from_a_scale_that_overflows(kind, clip):
    "float16 throughout, at 2**24: weights, schedule, optimizer stand still until the scale fits, then the loss falls"
    net, ids = half_gpt(), (torch.arange(4 * 12).view(4, 12) * 5) % 99
    opt = half_optimizer(kind, net)
    om = OptimManager(loss_scale=2.0 ** 24, model=net)
    om.add_optimizer(opt, O.Linear(opt, end_iter=100))
    made = lambda: [int(s["step"]) if "step" in s else s["momentum_buffer"].clone() for s in opt.state.values()]
    taken, losses = [], []
    for _ in range(30):
        before, states = {n: t.clone() for n, t in net.state_dict().items()}, made()
        lr, scale = opt.param_groups[0]["lr"], om.loss_scale
        loss = net(input_ids=ids, labels=ids).loss
        om.backward(loss)
        overflown = not all(p.grad.isfinite().all() for p in net.parameters())
        norm = om.clip_grad_norm(clip) if clip else None
        taken.append(om.step())
        om.flush()
        losses.append(loss.item())
        assert taken[-1] != overflown and (norm is None or norm.isfinite() == taken[-1])
        same = all(torch.equal(t, before[n]) for n, t in net.state_dict().items())
        if taken[-1]:
            assert (
                not same and om.loss_scale == scale and om.schedules[0].num_iter == sum(taken)
                and opt.param_groups[0]["lr"] < lr
            )
        else:
            assert (
                same and om.loss_scale == scale / 2 and opt.param_groups[0]["lr"] == lr
                and om.schedules[0].num_iter == sum(taken) and all(p.grad is None for p in net.parameters())
            )
        if not taken[-1] and states:
            assert all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in zip(states, made()))
    skipped = taken.index(True)
    # (on the way a step may be too large once more)
    assert 3 <= skipped < 20 and sum(taken) > 15 and om.loss_scale == 2.0 ** (24 - taken.count(False))
    assert all(t.dtype != torch.float16 or t.isfinite().all() for t in net.state_dict().values()) and {
        p.dtype for p in net.parameters()
    } == {torch.float16}
    assert len(set(losses[:skipped + 1])) == 1 and losses[-1] < 0.8 * losses[0], losses


def test_fit_goes_through_an_overflow():
    "A step that is left out is a row of the log like any other, also where the scale itself makes a loss infinite"
    from bmlab.train.loop import fit, model_loss
    net, ids = half_gpt(), (torch.arange(4 * 12).view(4, 12) * 5) % 99
    opt = half_optimizer("masters", net)
    om = OptimManager(loss_scale=2.0 ** 24)
    om.add_optimizer(opt)
    log = fit(
        net, [{"input_ids": ids, "labels": ids}], om, steps=30, clip=1.0, plot=False,
        loss=lambda m, b: model_loss(m, b).half(),
    )
    left_out = (log.loss_scale.diff(-1) > 0).tolist()
    assert log.loss_scale[0] == 2.0 ** 24 and all(left_out[:3]) and sum(left_out) < 15
    assert [math.isfinite(n) for n in log.grad_norm] == [not x for x in left_out] and log.loss.iloc[
        -1
    ] < 0.8 * log.loss[0]
    assert log.lr.nunique() == 1 and all(p.isfinite().all() for p in net.parameters())


def test_no_value_is_read_back_without_need(monkeypatch):
    "The threads that other tests may have left are not asked"
    reads, inside, here = [], [], threading.get_ident()

    def counted(name, real):
        def read(t, *args):
            outermost = threading.get_ident() == here and not inside
            if not outermost: return real(t, *args)
            reads.append("".join(traceback.format_stack(limit=6)))
            inside.append(name)                                     # a mode of torch functions calls it once more
            try: return real(t, *args)
            finally: inside.clear()
        return read

    for name in ("item", "tolist", "__bool__", "__float__"):
        monkeypatch.setattr(torch.Tensor, name, counted(name, getattr(torch.Tensor, name)))
    for scale, most in (None, 0), (8., 1):
        net = Net()
        om = OptimManager(loss_scale=scale)
        om.add_optimizer(torch.optim.SGD(net.parameters(), lr=0.1))
        om.backward(loss_of(net, IDS[0]))
        reads.clear()
        om.clip_grad_norm(0.1)
        om.step()
        assert len(reads) == most, "\n".join(reads)


def wide():
    torch.manual_seed(0)
    # the middle has fewer rows than ranks
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1), nn.Tanh(), nn.Linear(1, 8)).double()


X = torch.randn(6, 8, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def whole(t): return t.full_tensor() if hasattr(t, "full_tensor") else t


def weights(net): return torch.cat([whole(p).flatten() for p in net.parameters()]).detach()


def steps(net, rows, om, micro=1, bad=None, average=()):
    "Six steps; norms, which were taken, reductions in each backward of the first"
    from torch.distributed.tensor.debug import CommDebugMode
    from bmlab.train.processes import all_reduce, rank
    norms, taken, reductions = [], [], []
    for i, x in enumerate(X[:, rows]):
        om.zero_grad()
        for k, part in enumerate(x.chunk(micro)):
            loss = (net(part) - part.sin()).square().mean() / micro
            with CommDebugMode() as counted: om.backward(loss, final=k == micro - 1)
            if i == 0: reductions.append(sum(n for op, n in counted.get_comm_counts().items() if "reduce" in str(op)))
        for p in average: p.grad = all_reduce(p.grad, "avg")
        if i == bad and rank() == 1: next(net.parameters()).grad.to_local().fill_(math.inf)
        norms.append(om.clip_grad_norm(0.2).item())
        taken.append(om.step())
    return norms, taken, reductions


def manager(net, model=None, scale=None, cls=torch.optim.AdamW):
    om = OptimManager(loss_scale=scale, model=model)
    opt = cls(net.parameters(), lr=0.02, **({"foreach": False} if cls is torch.optim.AdamW else {}))
    om.add_optimizer(opt, O.Linear(opt, end_iter=20))
    return om


def variants():
    "All that two ranks have to show"
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.nn.parallel import DistributedDataParallel as DDP
    from bmlab.train.processes import init_distributed, rank
    init_distributed(timeout_s=60)
    mesh, rows, out = init_device_mesh("cpu", (2,)), slice(4 * rank(), 4 * rank() + 4), {}

    def sharded(reshard=True, root=True, **kwargs):
        net = wide()
        for m in (net[0], net[2]): fully_shard(m, mesh=mesh, reshard_after_forward=reshard, **kwargs)
        if root: fully_shard(net, mesh=mesh, reshard_after_forward=reshard, **kwargs)
        return net

    mixed = sharded(root=False)
    cases = ("zero3", sharded(), ()), ("zero2", sharded(False), ()), ("mixed", mixed, list(mixed[4].parameters()))
    for name, net, average in cases:
        for micro in (1, 4):
            om = manager(net, net, scale=16.)
            out[f"{name} {micro}"] = (*steps(net, rows, om, micro, average=average), weights(net))
            net.load_state_dict({n: p for n, p in net.state_dict().items()})
            net = sharded(name != "zero2", name != "mixed")
            average = list(net[4].parameters()) if average else ()
    net = sharded()
    out["overflow"] = (*steps(net, rows, om := manager(net, net, scale=16.), bad=2), om.loss_scale)
    net = sharded()
    try: manager(net).backward(net(X[0]).sum(), final=False)
    except ValueError as e: out["no model"] = str(e)
    for name in "plain", "no_sync":
        net = DDP(wide())
        om = manager(net, net)
        for x in X[:, rows]:
            om.zero_grad()
            for k, part in enumerate(x.chunk(2)):
                with net.no_sync() if name == "no_sync" and k == 0 else torch.enable_grad():
                    om.backward((net(part) - part.sin()).square().mean() / 2, final=k == 1)
            om.clip_grad_norm(0.2)
            om.step()
        out[f"ddp {name}"] = weights(net.module)
    # a compute dtype of its own keeps accumulated gradients elsewhere; what is unfinished must go
    net = wide().float()
    fully_shard(net, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    om, x = manager(net, net), X[0, rows].float()
    def grads(unfinished):
        if unfinished: om.backward(net(x).square().sum(), final=False)
        om.zero_grad()
        om.backward(net(x).square().mean())
        return [whole(p.grad).clone() for p in net.parameters()]
    out["dropped"] = all(torch.equal(a, b) for a, b in zip(grads(False), grads(True)))
    # a gradient that only one rank has
    net = sharded()
    net(X[0]).sum().backward()
    plain = nn.Parameter(torch.ones(2))
    plain.grad = torch.full((2,), 2.)
    if rank() == 1: net[0].weight.grad = None
    out["uneven"] = gradient_norm([plain, *net.parameters()]).item()
    out["inf"] = gradient_norm([net[2].weight], "inf").item(), gradient_norm([net[2].weight], 3).item()
    group = dist.new_group([0, 1])
    own = nn.Parameter(torch.zeros(1))
    own.grad = torch.tensor([3. + rank()])
    out["pipeline"] = gradient_norm([own], group=group).item(), gradient_norm([own], "inf", group=group).item()
    return out


@pytest.fixture(scope="module")
def two(): return run_ranks(variants)


@pytest.fixture(scope="module")
def alone():
    net = wide()
    return (*steps(net, slice(0, 8), manager(net)), weights(net))


@pytest.mark.long
@pytest.mark.parametrize("name", ["zero3 1", "zero3 4", "zero2 1", "zero2 4", "mixed 1", "mixed 4"])
def test_sharded_equals_one_process(two, alone, name):
    "Norms, weights, and no communication before the last of four micro-batches"
    for r in two:
        norms, taken, reductions, end = r[name]
        assert norms == pytest.approx(alone[0], rel=1e-9) and all(taken)
        torch.testing.assert_close(end, alone[3], rtol=0, atol=1e-9)
        assert reductions[-1] > 0 and not any(reductions[:-1])


@pytest.mark.long
def test_an_overflow_on_one_rank_skips_the_step_on_all(two):
    for r in two:
        norms, taken, _, scale = r["overflow"]
        assert taken == [True, True, False, True, True, True] and scale == 8 and norms[2] == math.inf


@pytest.mark.long
def test_what_else_two_ranks_show(two, alone):
    net = wide()
    net(X[0]).sum().backward()
    without_half = math.sqrt(
        sum(p.grad.square().sum().item() for p in net.parameters()) - net[0].weight.grad[8:].square().sum().item() + 8
    )
    for r in two:
        assert "give the model to OptimManager" in r["no model"] and r["dropped"]
        for name in "plain", "no_sync": torch.testing.assert_close(r[f"ddp {name}"], alone[3], rtol=0, atol=1e-9)
        assert r["uneven"] == pytest.approx(without_half, rel=1e-9)
        assert r["inf"] == pytest.approx(
            (net[2].weight.grad.abs().max().item(), net[2].weight.grad.norm(3).item()), rel=1e-9
        )
        assert r["pipeline"] == (5., 4.)


def overflows():
    "float16 on two ranks whose second alone overflows: by its shard of a matrix, and by a network of its own"
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from bmlab.train.offload import AdamW
    from bmlab.train.processes import init_distributed, rank
    init_distributed(timeout_s=60)
    mesh, out = init_device_mesh("cpu", (2,)), {}
    # the rows of the matrix that the second rank holds
    loud = torch.cat([torch.ones(8), torch.full((8,), 1000.)])
    for case in "shard", "own":
        for kind in "sgd", "offload":
            torch.manual_seed(0)
            net = nn.Linear(8, 16, bias=False).half()
            x = torch.randn(4, 8).half()
            if case == "shard": fully_shard(net, mesh=mesh)
            opt = torch.optim.SGD(net.parameters(), lr=1e-4) if kind == "sgd" else AdamW(net, lr=1e-3, offload=1.0)
            om = OptimManager(loss_scale=2.0 ** 12, model=net)
            om.add_optimizer(opt, O.NoDecay(opt, warmup_iter=9))
            rows = []
            for _ in range(12):
                before = [p.detach().clone() for p in net.parameters()]
                y = net(x).float() * loud if case == "shard" else net(x).float() * (1. if rank() == 0 else 1000.)
                om.backward(y.square().mean() * 1e-3)
                mine = all(
                    (p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad).isfinite().all().item()
                    for p in net.parameters()
                )
                scale, taken = om.loss_scale, om.step()
                om.flush()
                rows.append(
                    (
                        scale,
                        mine,
                        taken,
                        om.schedules[0].num_iter,
                        all(torch.equal(whole(a), whole(b)) for a, b in zip(before, net.parameters())),
                    )
                )
            out[case, kind] = rows, all(whole(p).isfinite().all().item() for p in net.parameters())
    return out


@pytest.mark.long
def test_an_overflow_in_float16_on_one_rank_alone_skips_on_both():
    first, second = run_ranks(overflows)
    for key in first:
        (rows, finite), (others, finite2) = first[key], second[key]
        assert finite and finite2
        steps = 0
        for (scale, fits, taken, n, still), (scale2, fits2, taken2, n2, still2) in zip(rows, others):
            steps += taken
            assert fits and taken == taken2 == fits2 and scale == scale2 and n == n2 == steps, (key, rows, others)
            if not taken: assert still and still2
        skipped = len(rows) - steps
        assert 2 <= skipped < 10 and rows[-1][0] == 2.0 ** (12 - skipped) and rows[-1][2] and not others[-1][4], (
            key, rows
        )


def four_ranks():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel, parallelize_module
    )
    from bmlab.train.processes import init_distributed, rank
    init_distributed(timeout_s=60)
    out = {}
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    net = wide()
    fully_shard(net, mesh=mesh)  # replicated over two, sharded over two
    rows = slice(2 * rank(), 2 * rank() + 2)
    out["hybrid"] = (*steps(net, rows, manager(net, net), 2), weights(net))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    net = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)).double()
    parallelize_module(
        net,
        mesh["tp"],
        {"0": SequenceParallel(sequence_dim=0), "1": ColwiseParallel(input_layouts=Shard(0)), "3": RowwiseParallel()},
    )
    parallelize_module(net, mesh["tp"], PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(0)))
    fully_shard(net, mesh=mesh["dp"])
    om, rows = manager(net, net, cls=torch.optim.SGD), slice(4 * (rank() // 2), 4 * (rank() // 2) + 4)
    out["tensor parallel"] = (*steps(net, rows, om), weights(net), str({p.placements for p in net.parameters()}))
    return out


@pytest.mark.long
def test_four_ranks_hybrid_and_tensor_parallel(alone):
    "A norm counts replicated parts once and sums over both dimensions of a 2 × 2 mesh"
    torch.manual_seed(0)
    net = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)).double()
    want = (*steps(net, slice(0, 8), manager(net, cls=torch.optim.SGD)), weights(net))
    for r in run_ranks(four_ranks, world_size=4, timeout_s=200):
        assert r["hybrid"][0] == pytest.approx(alone[0], rel=1e-9) and not r["hybrid"][2][0]
        torch.testing.assert_close(r["hybrid"][3], alone[3], rtol=0, atol=1e-9)
        assert r["tensor parallel"][0] == pytest.approx(want[0], rel=1e-9), r["tensor parallel"][4]
        torch.testing.assert_close(r["tensor parallel"][3], want[3], rtol=0, atol=1e-9)

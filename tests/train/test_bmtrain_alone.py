"BMTrain's names in one process: what its own tests assert, in other words and small sizes."
import errno
import threading
import weakref

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import bmlab.bmtrain as bmt


@pytest.fixture(autouse=True)
def processes():
    bmt.init_distributed(seed=0)
    yield
    bmt.shutdown()


class Gives(nn.Module):
    "Gives back what `make` makes of its input"
    def __init__(self, make):
        super().__init__()
        self.make, self.runs = make, 0
    def forward(self, *args):
        self.runs += 1
        return self.make(*args)


class Line(bmt.DistributedModule):
    "A linear layer with init methods"
    def __init__(self, into=6, out=6):
        super().__init__()
        self.weight = bmt.DistributedParameter(torch.empty(out, into), init_method=nn.init.xavier_normal_)
        self.bias = bmt.DistributedParameter(torch.empty(out), init_method=nn.init.zeros_)
    def forward(self, x): return nn.functional.linear(x, self.weight, self.bias)


def given(make):
    bmt.init_parameters(make)
    return make


def test_what_blocks_give_back():
    "Tensors, tuples, several values in a row, dropout; and no second run where nothing needs a gradient"
    x = torch.arange(3.)
    assert torch.equal(bmt.Block(Gives(lambda x: x))(x), x)
    for make, n in ((lambda x: (x,), 1), (lambda x: (x, x), 2), (lambda x: [x] * 10, 10)):
        y = bmt.Block(Gives(make))(x)
        assert isinstance(y, tuple) and len(y) == n
    three = lambda a, b, c, d, e: (a * 2, b + d, c * 4 + e * 5)
    values = [torch.randn(4, requires_grad=True) for _ in range(5)]
    got = []
    plain = [Gives(three) for _ in range(3)]
    for ms in (plain, bmt.TransformerBlockList([Gives(three) for _ in range(3)], num_hidden=3)):
        if isinstance(ms, list):
            y = tuple(values[:3])
            for m in ms: y = m(*y, *values[3:])
        else: y = ms(*values)
        got.append([*y, *torch.autograd.grad(sum((t * i).sum() for i, t in enumerate(y, 1)), values)])
    for a, b in zip(*got): torch.testing.assert_close(a, b)
    drops = bmt.TransformerBlockList([nn.Dropout(0.5) for _ in range(5)])
    assert (drops.train()(torch.ones(64)) == 0).any() and torch.equal(drops.eval()(torch.ones(64)), torch.ones(64))
    layers = [given(bmt.Block(nn.Sequential(Gives(lambda x: x), Line()))) for _ in range(4)]
    for layer in layers[:2]: layer.requires_grad_(False)
    y = torch.randn(2, 6)
    for layer in layers: y = layer(y)
    y.sum().backward()
    assert [layer[0].runs for layer in layers] == [1, 1, 2, 2] and layers[2][1].weight.grad is not None


@pytest.mark.parametrize("wrap", [lambda m: m, bmt.Block, lambda m: bmt.TransformerBlockList([bmt.Block(m)])])
def test_gradients_add_up(wrap):
    "Two backwards are twice one; what is frozen keeps its gradient, and statistics of none are 0"
    line = Line()
    m, x = given(wrap(line)), torch.randn(3, 6)
    line.bias.requires_grad_(False)
    m(x).sum().backward()
    once = line._parameters["weight"].grad.clone()
    row = bmt.inspect.inspect_model(m, "*bias")[0]
    assert line.bias.grad is None and (row["grad_std"], row["grad_mean"]) == (0, 0)
    assert bmt.inspect.format_summary([row]).splitlines()[1].split()[-2:] == ["0.0000", "0.0000"]
    m(x).sum().backward()
    torch.testing.assert_close(line._parameters["weight"].grad, 2 * once)
    line.weight.requires_grad_(False)
    line.bias.requires_grad_(True)
    m(x).sum().backward()
    torch.testing.assert_close(line._parameters["weight"].grad, 2 * once)
    torch.testing.assert_close(line.bias.grad, torch.full((6,), 3.))


@pytest.mark.parametrize("dtype", [torch.half, torch.bfloat16])
def test_overflow_is_seen(dtype):
    "Anywhere in a tensor, by the function and by the manager's own check"
    for n in (1, 7, 1000):
        for place, value in ((0, torch.inf), (n // 2, torch.nan), (n - 1, -torch.inf)):
            seen, g = torch.zeros((), dtype=torch.uint8), torch.rand(n).to(dtype)
            bmt.loss._function.has_inf_nan(g, seen)
            assert seen == 0
            g[place] = value
            bmt.loss._function.has_inf_nan(g, seen)
            assert seen == 1
    p = nn.Parameter(torch.ones(4, dtype=dtype))
    p.grad, groups = torch.full_like(p, 6), [{"params": [p]}]
    bmt.optim.optim_manager.check_overflow(groups)
    bmt.optim.optim_manager.grad_rescale(groups, 2)
    assert (p.grad == 3).all()
    p.grad[1] = torch.nan
    with pytest.raises(OverflowError): bmt.optim.optim_manager.check_overflow(groups)


def test_weights_of_a_seed():
    "By init methods, by hand, by the wrapper, in lists and blocks, loaded before init_parameters: those of plain torch"
    torch.manual_seed(33)
    plain = nn.Linear(3, 5)
    nn.init.xavier_normal_(plain.weight)
    nn.init.zeros_(plain.bias)
    def seeded(make):
        torch.manual_seed(33)
        plain_again = nn.Linear(3, 5)                                      # (draws what nn.Linear draws first)
        return make(plain_again)
    class ByHand(bmt.DistributedModule):
        def __init__(self, _):
            super().__init__()
            self.weight = bmt.DistributedParameter(nn.init.xavier_normal_(torch.empty(5, 3)))
            self.bias = bmt.DistributedParameter(torch.zeros(5))
    kinds = [
        lambda _: given(Line(3, 5)), ByHand, lambda _: given(bmt.CheckpointBlock(Line(3, 5))),
        lambda _: given(bmt.TransformerBlockList([Line(3, 5), Line(5, 3)]))[0],
        lambda _: given(bmt.PipelineTransformerBlockList([Line(3, 5), Line(5, 3)]))[0],
        lambda _: given(nn.ModuleList([bmt.CheckpointBlock(Line(3, 5)), Line(5, 3)]))[0]]
    for make in kinds:
        m = seeded(make)
        for n, p in plain.named_parameters(): assert torch.equal(m.state_dict()[n], p), n
    state = plain.state_dict()
    wrapped = bmt.BMTrainModelWrapper(nn.Linear(3, 5))
    for m in (wrapped, bmt.Block(Line(3, 5)), Line(3, 5)):
        m.load_state_dict(state)
        assert all(torch.equal(m.state_dict()[k], v) for k, v in state.items())
    listed = bmt.TransformerBlockList([bmt.Block(Line(3, 5))])
    listed.load_state_dict({f"0.{k}": v for k, v in state.items()})
    x = torch.randn(2, 3)
    torch.testing.assert_close(listed(x), plain(x))


@pytest.mark.parametrize("dtype", [torch.half, torch.bfloat16])
def test_loss_in_half_precision(dtype):
    "Loss and scaled gradient beside fp32's, with weights of the classes and rows that do not count"
    rows, scale = 32, 64
    for classes, weights in ((10, None), (300, None), (40, torch.randperm(40) + 1)):
        x, target = torch.randn(rows, classes).to(dtype), torch.randint(0, classes, (rows,))
        if weights is not None: target[torch.rand(rows) < .5] = -100
        results = []
        for wide in (False, True):
            z = (x.float() if wide else x.clone()).requires_grad_()
            w = None if weights is None else weights.to(torch.float if wide else dtype)
            make = nn.CrossEntropyLoss if wide else bmt.loss.FusedCrossEntropy
            loss = make(weight=w)(z, target)
            (loss * scale).backward()
            results.append((loss.item(), z.grad.float()))
        (a, da), (b, db) = results
        assert abs(a - b) < 1e-5 and (da - db).abs().max() < 1e-1


@pytest.mark.parametrize("dtype", [torch.half, torch.bfloat16])
def test_adam_beside_torch(dtype):
    "Twenty steps with the same gradients: resident and offloaded, half and whole precision"
    start = [torch.randn(8, 8), torch.randn(13)]
    kinds = {"half": (bmt.optim.AdamOptimizer, dtype), "half offloaded": (bmt.optim.AdamOffloadOptimizer, dtype),
             "torch": (torch.optim.Adam, torch.float), "whole": (bmt.optim.AdamOptimizer, torch.float),
             "whole offloaded": (bmt.optim.AdamOffloadOptimizer, torch.float)}
    params = {k: [nn.Parameter(t.to(kind, copy=True)) for t in start] for k, (_, kind) in kinds.items()}
    manager = bmt.optim.OptimManager(loss_scale=4)
    for k, (make, _) in kinds.items(): manager.add_optimizer(make(params[k], lr=1))
    for _ in range(20):
        manager.zero_grad()
        grads = [torch.randn_like(t) for t in start]
        for ps in params.values():
            for p, g in zip(ps, grads): p.grad = g.to(p.dtype, copy=True)
        manager.step()
        for k in ("half", "half offloaded", "whole", "whole offloaded"):
            for p, q in zip(params[k], params["torch"]):
                assert (p.float() - q).abs().max() < (1 if k.startswith("half") else 1e-5), k
        for p, q in zip(params["half"], params["half offloaded"]): assert torch.equal(p, q)


def test_a_file_that_cannot_be_written_in_the_background_is_said(tmp_path, monkeypatch):
    "Its thread's error, and the old file stands"
    line, said = given(Line()), []
    monkeypatch.setattr("threading.excepthook", lambda args: said.append(args.exc_value))
    bmt.save(line, tmp_path / "x.pt")
    old = (tmp_path / "x.pt").read_bytes()
    def full(fd): raise OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr("os.fsync", full)
    bmt.save(line, tmp_path / "x.pt", non_blocking=True)
    for t in threading.enumerate():
        if t.name == "saving x.pt": t.join()
    assert [str(e) for e in said] == ["[Errno 28] No space left on device"]
    assert (tmp_path / "x.pt").read_bytes() == old


def test_a_file_is_read_a_tensor_at_a_time(tmp_path):
    "When a tensor is brought to the model's dtype, those before it are gone"
    bmt.save(given(Line()), tmp_path / "x.pt")
    alive, made = [], []
    class Copies(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is not torch.ops.aten._to_copy.default: return func(*args, **(kwargs or {}))
            alive.append(sum(t() is not None for t in made))
            made.append(weakref.ref(out := func(*args, **(kwargs or {}))))
            return out
    half = given(Line()).bfloat16()
    with Copies(): bmt.load(half, tmp_path / "x.pt")
    assert len(alive) >= 2 and max(alive) == 0


@pytest.mark.parametrize("optimizer", [bmt.optim.AdamOptimizer, bmt.optim.AdamOffloadOptimizer])
def test_a_state_of_bmtrains_own_is_refused_whole(optimizer):
    "Its optimizers keep flat parts, times the loss scale, with masters as _param_fp32 (bmtrain/optim/adam.py)"
    model = given(Line())
    opt = optimizer(model.parameters(), lr=1e-2)
    manager, schedule = bmt.optim.OptimManager(loss_scale=1024), bmt.lr_scheduler.Noam(opt, 1e-2, 10, 100)
    manager.add_optimizer(opt, schedule)
    part = lambda n: {"step": 9, "exp_avg": torch.ones(n), "exp_avg_sq": torch.ones(n), "_param_fp32": torch.ones(n)}
    group = {"params": [0, 1], "lr": 1e-2, "betas": (.9, .999), "eps": 1e-8, "weight_decay": 0}
    theirs = {"optimizers": [{"state": {0: part(36), 1: part(6)}, "param_groups": [group]}], "loss_scale": 512.,
              "loss_scale_enabled": True,
              "lr_schedulers": [{"start_lr": 1e-2, "warmup_iter": 10, "end_iter": 100, "num_iter": 50}]}
    before = {k: v.clone() for k, v in model.state_dict().items()}
    for load, state in (manager.load_state_dict, theirs), (opt.load_state_dict, theirs["optimizers"][0]):
        with pytest.raises(ValueError, match="saved by BMTrain itself.*begin with a new optimizer"): load(state)
    assert manager.loss_scale == 1024 and all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    schedule.load_state_dict(theirs["lr_schedulers"][0])
    assert schedule.num_iter == 50

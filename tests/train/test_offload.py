"AdamW with state on the host: sharded over two processes, under recompute and accumulation, and what it leaves behind."
import copy, gc, subprocess, sys, threading, time

import pytest
import torch
from torch import nn

from bmlab.train import offload
from bmlab.train.processes import run_ranks


class Block(nn.Module):
    def __init__(self, D):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(D), nn.Linear(D, 4 * D), nn.Linear(4 * D, D)
    def forward(self, x): return x + self.down(torch.relu(self.up(self.norm(x))))


class Tiny(nn.Module):
    def __init__(self, D=32, L=3, V=64, recompute=False):
        super().__init__()
        self.embed, self.blocks = nn.Embedding(V, D), nn.ModuleList([Block(D) for _ in range(L)])
        self.head, self.recompute = nn.Linear(D, V, bias=False), recompute
        self.head.weight = self.embed.weight
    def forward(self, ids):
        x = self.embed(ids)
        for b in self.blocks:
            x = torch.utils.checkpoint.checkpoint(b, x, use_reentrant=False) if self.recompute else b(x)
        return self.head(x)


def loss_of(model, ids):
    return nn.functional.cross_entropy(model(ids)[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


def batches(n=6): return [torch.randint(0, 64, (4, 16), generator=torch.Generator().manual_seed(i)) for i in range(n)]


def model(**kw):
    torch.manual_seed(0)
    return Tiny(**kw)


def run(opt_of, net, data, clip=None, accumulate=1):
    "Full weights after training on the data, in order"
    from torch.distributed.tensor import DTensor
    opt = opt_of(net)
    for ids in data:
        for k, part in enumerate(ids.chunk(accumulate)):
            if hasattr(opt, "before_backward"): opt.before_backward(final=k == accumulate - 1)
            (loss_of(net, part) / accumulate).backward()
        if clip is not None:
            norm = nn.utils.get_total_norm([p.grad for p in net.parameters()])
            coef = min(1.0, clip / (float(norm.full_tensor() if isinstance(norm, DTensor) else norm) + 1e-6))
            if hasattr(opt, "grad_divisor"): opt.grad_divisor = 1 / coef
            else: [p.grad.div_(1 / coef) for p in net.parameters()]
        opt.step()
        opt.zero_grad()
    state = net.state_dict()
    return {k: (t.full_tensor() if isinstance(t, DTensor) else t).clone() for k, t in state.items()}, opt


def torch_adamw(net): return torch.optim.AdamW(net.parameters(), lr=1e-2, fused=True)


def sharded():
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor
    from bmlab.train.offload import AdamW
    mesh, rank, out = init_device_mesh("cpu", (2,)), dist.get_rank(), {}
    data = [ids.chunk(2)[rank] for ids in batches()]
    def net():
        m = model()
        for b in m.blocks: fully_shard(b, mesh=mesh)
        return fully_shard(m, mesh=mesh)
    for clip in (None, 0.9):
        want, _ = run(torch_adamw, net(), data, clip)
        settings = [dict(offload=0.5), dict(offload=1.0, link=0.5), dict(offload=1.0, link=1.0)]
        if clip is None: settings.append(dict(offload=1.0, link=0.5, overlap="backward"))
        for kw in settings:
            got, opt = run(lambda m: AdamW(m, lr=1e-2, unit=3000, **kw), net(), data, clip)
            out[clip, str(kw)] = all(torch.equal(want[k], got[k]) for k in want)
    states = opt.state_dict()["state"].values()
    out["states are DTensors of the whole shape"] = all(isinstance(s["exp_avg"], DTensor) for s in states)
    return out


@pytest.mark.long
def test_sharded_over_two_processes_equals_torch():
    "The same bits as torch's fused AdamW on the same FSDP2 model, clipped or not"
    for r in run_ranks(sharded): assert all(r.values()), [k for k, v in r.items() if not v]


SETTINGS = [
    dict(offload=1.0), dict(offload=1.0, link=1.0, overlap="backward"), dict(offload=0.5, link=0.5, overlap="backward")
]


@pytest.mark.parametrize("kw", SETTINGS, ids=str)
def test_tied_recomputed_accumulated(kw):
    "Gradients of inner micro-batches are not used alone; a tied weight is one parameter"
    from bmlab.train.offload import AdamW
    want, _ = run(torch_adamw, model(recompute=True), batches(), accumulate=2)
    got, opt = run(lambda m: AdamW(m, lr=1e-2, unit=3000, **kw), model(recompute=True), batches(), accumulate=2)
    assert all(torch.equal(want[k], got[k]) for k in want)
    assert sum(u.n for u in opt.units) == sum(p.numel() for p in model().parameters())


@pytest.mark.parametrize("how", [dict(), dict(states=8), dict(master="bf16-sr")], ids=str)
def test_a_large_head_is_shared_by_the_cores_and_the_link(how):
    "By tasks, as the link's share says; the bits, also of what is saved and taken up, are those of the cores alone"
    from bmlab.train.offload import AdamW
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(50, 64), nn.Linear(64, 64), nn.Linear(64, 2000, bias=False)).bfloat16()
    ids, out, opts = torch.randint(0, 50, (4, 16)), [], []
    for link in (0.6, 0.0):
        m = copy.deepcopy(net)
        opt = AdamW(m, lr=1e-2, offload=1.0, link=link, unit=4096, **how)
        for i in range(4):
            if i == 2:
                saved, m = copy.deepcopy(opt.state_dict()), copy.deepcopy(m)
                opt = AdamW(m, lr=1e-2, offload=1.0, link=link, unit=4096, **how)
                opt.load_state_dict(saved)
            m(ids).float().square().mean().backward()
            opt.step()
            opt.zero_grad()
        opt.flush()
        states = opt.state_dict()["state"]
        out.append([*m.parameters(), *(t for k in sorted(states) for t in states[k].values())])
        opts.append(opt)
    assert all(torch.equal(a, b) for a, b in zip(*out, strict=True))
    held = opts[0].table.set_index("place").parameters
    assert held["link"] == pytest.approx(0.6 * held.sum(), abs=4096) and held["cpu"] > 0 and held["gpu"] == 0


def prepared(**how):
    from bmlab.train.offload import AdamW
    from bmlab.train.sharding import shard
    net = shard(model().bfloat16(), blocks=["blocks.0", "blocks.1", "blocks.2"], dtype=None)
    return net, AdamW(net, lr=1e-2, **how)


@pytest.mark.parametrize("offload", [0.0, 0.5])
@pytest.mark.parametrize("write", [lambda p: p.mul_(0.5), lambda p: p.data.mul_(0.5)], ids=["counted", "data"])
def test_state_is_made_as_the_first_training_forward_begins(offload, write):
    "Of a model that `shard` prepared: before activations, and of the weights as they are at the first step"
    from bmlab.train.offload import AdamW
    seen, data = [], batches(3)
    net, opt = prepared(offload=offload)
    with torch.no_grad(): net(data[0])
    net.eval()(data[0])
    assert opt.units is None
    net.train().blocks[0].register_forward_pre_hook(lambda *_: seen.append(opt.units is not None))
    loss_of(net, data[0]).backward()
    assert seen[-1]
    plain = model().bfloat16()
    for m in (net, plain):                                      # (a file that was loaded in between)
        with torch.no_grad(): [write(p) for p in m.parameters()]
    opt.zero_grad()
    ours, _ = run(lambda _: opt, net, data)
    expected, _ = run(lambda m: AdamW(m, lr=1e-2, offload=offload), plain, data)
    for k, t in expected.items(): torch.testing.assert_close(ours[k], t, rtol=0, atol=0)


def test_state_that_found_no_memory_is_made_anew(monkeypatch):
    from bmlab.train import offload
    net, opt = prepared(offload=0.5)
    real, calls = offload.AdamW._allocate, []
    def fail(self, *args):
        calls.append(args)
        if len(calls) == 2: raise torch.OutOfMemoryError("none left")
        return real(self, *args)
    monkeypatch.setattr(offload.AdamW, "_allocate", fail)
    data = batches(3)
    with pytest.raises(torch.OutOfMemoryError): net(data[0])
    assert opt.units is None and not opt.state
    ours, _ = run(lambda _: opt, net, data)
    expected, _ = run(lambda m: offload.AdamW(m, lr=1e-2, offload=0.5), model().bfloat16(), data)
    for k, t in expected.items(): torch.testing.assert_close(ours[k], t, rtol=0, atol=0)


def test_a_trial_backward_changes_nothing_and_a_copy_builds_nothing():
    "With overlap='backward' the first step makes the state; a copied model has nothing to do with the optimizer"
    net, opt = prepared(offload=1.0, overlap="backward")
    before = {k: t.clone() for k, t in net.state_dict().items()}
    for ids in batches(2): loss_of(net, ids).backward()
    assert opt.units is None and all(torch.equal(t, before[k]) for k, t in net.state_dict().items())
    net, opt = prepared()
    loss_of(copy.deepcopy(net), batches(1)[0]).backward()
    assert opt.units is None


def test_evaluation_between_steps_sees_the_new_weights():
    from bmlab.train.offload import AdamW
    net, plain = model(), model()
    opt, theirs = AdamW(net, lr=1e-2, offload=1.0, unit=2000), torch_adamw(plain)
    for ids in batches():
        for m, o in ((net, opt), (plain, theirs)):
            loss_of(m, ids).backward()
            o.step()
            o.zero_grad()
        with torch.no_grad(): assert torch.equal(net(ids), plain(ids))


def test_torch_schedule_and_zero_lr():
    from bmlab.train.offload import AdamW
    net, plain = model(), model()
    opts = AdamW(net, lr=1e-2, offload=1.0), torch_adamw(plain)
    schedules = [torch.optim.lr_scheduler.LinearLR(o, 1.0, 0.0, 4) for o in opts]
    for ids in batches():
        for m, o, s in zip((net, plain), opts, schedules):
            loss_of(m, ids).backward()
            o.step()
            o.zero_grad()
            s.step()
    a, b = net.state_dict(), plain.state_dict()
    assert all(torch.equal(a[k], b[k]) for k in a)


def test_threads_end_with_the_optimizer():
    from bmlab.train.offload import AdamW
    before = set(threading.enumerate())                                  # (other tests' may end meanwhile)
    net = model()
    opt = AdamW(net, offload=1.0, link=0.5)
    loss_of(net, batches(1)[0]).backward()
    opt.step()
    opt.flush()
    own = set(threading.enumerate()) - before
    assert own
    del opt
    gc.collect()
    assert not [t for t in own if t.is_alive()]
    loss_of(net, batches(1)[0]).backward()                               # the model goes on without it
    copy.deepcopy(net)


def test_a_program_may_end_while_lanes_work():
    code = ("import torch; from torch import nn; from bmlab.train.offload import AdamW\n"
            "m = nn.Sequential(*[nn.Linear(512, 512) for _ in range(4)]); o = AdamW(m, offload=1.0, link=0.5)\n"
            "m(torch.ones(2, 512)).sum().backward(); o.step(); print('end')")
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert out.returncode == 0 and out.stdout == "end\n" and out.stderr == "", out.stderr


@pytest.mark.cuda
def test_gpu_lanes():
    "On a GPU: all places give the weights of torch's fused AdamW to rounding, the GPU's own places bit for bit"
    from bmlab.train.offload import AdamW
    for dtype, steps in ((torch.float32, 8), (torch.bfloat16, 8), (torch.bfloat16, 1)):
        data = [ids.cuda() for ids in batches(steps)]
        net = lambda: model(D=256).cuda().to(dtype)
        for clip in (None, 0.9):
            want, _ = run(lambda m: AdamW(m, lr=1e-3), net(), data, clip)
            settings = [dict(link=1.0), dict(link=0.0), dict(link=0.5)]
            if clip is None: settings += [dict(link=link, overlap="backward") for link in (0.5, 1.0)]
            for kw in settings:
                got, opt = run(lambda m: AdamW(m, lr=1e-3, offload=1.0, unit=1 << 15, **kw), net(), data, clip)
                for k in want:
                    if kw["link"] == 1.0: assert torch.equal(got[k], want[k]), (kw, k)
                    # (m̂/√v̂ of tiny gradients turns rounding into parts of a step)
                    elif dtype == torch.float32: torch.testing.assert_close(got[k], want[k], rtol=1e-4, atol=5e-5)
                    # the next bf16 number at most; later steps drift apart
                    elif len(data) == 1: torch.testing.assert_close(got[k], want[k], rtol=2 ** -7, atol=1e-6)


@pytest.mark.parametrize("link", [0.0, 1.0])
def test_a_first_step_that_is_not_finite_leaves_its_block_as_it_was(link):
    "When nothing has travelled yet in the buffers through which weights go back"
    from bmlab.train.offload import AdamW
    net = model().bfloat16()
    before = {k: t.clone() for k, t in net.state_dict().items()}
    opt = AdamW(net, lr=1e-2, offload=1.0, link=link, overlap="backward", unit=3000)
    weight, name = next((p, n) for n, p in net.named_parameters() if "blocks.1" in n and p.ndim == 2)
    handle = weight.register_hook(lambda g: torch.full_like(g, float("inf")))
    opt.before_backward()
    loss_of(net, batches(1)[0]).backward()
    handle.remove()
    with pytest.raises(FloatingPointError, match=name): opt.step()
    opt.zero_grad()
    now = net.state_dict()
    assert torch.equal(now[name], before[name]) and all(t.isfinite().all() for t in now.values())
    assert not all(torch.equal(now[k], before[k]) for k in now)


# what reads weights before the optimizer has finished: each must wait, seen by lanes that are made slow

class Late(nn.Module):
    "The embedding is registered after the layers"
    def __init__(self):
        super().__init__()
        self.layers, self.embed = nn.ModuleList(nn.Linear(8, 8) for _ in range(3)), nn.Embedding(10, 8)
    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers: x = x + layer(x).tanh()
        return x


class Nested(nn.Module):
    "The blocks are only containers"
    def __init__(self):
        super().__init__()
        self.embed, self.layers = (
            nn.Embedding(10, 8), nn.ModuleList(nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)]) for _ in range(3))
        )
    def forward(self, ids):
        x = self.embed(ids)
        for a, b in self.layers: x = x + b(a(x).tanh())
        return x


class Headed(nn.Module):
    "Called by its parts"
    def __init__(self):
        super().__init__()
        self.body, self.head = Late(), nn.Linear(8, 10)
    def forward(self, ids): return self.head(self.body(ids))


class Shared(nn.Module):
    "A weight of the last layer is the root's too"
    def __init__(self):
        super().__init__()
        self.embed, self.first, self.layers = (
            nn.Embedding(10, 8), nn.Linear(8, 8), nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        )
        self.layers[2].weight = self.first.weight
    def forward(self, ids):
        x = self.first(self.embed(ids))
        for layer in self.layers: x = x + layer(x).tanh()
        return x


class Dropping(nn.Module):
    "Every other forward leaves the last layer out"
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.layers, self.norm = nn.ModuleList(nn.Linear(8, 8) for _ in range(3)), nn.LayerNorm(8)
        self.calls = 0
    def forward(self, ids):
        self.calls, x = self.calls + 1, self.embed(ids)
        for layer in list(self.layers)[:3 if self.calls % 2 else 2]: x = x + layer(x).tanh()
        return self.norm(x) - 1


IDS = torch.randint(0, 10, (4, 5), generator=torch.Generator().manual_seed(0))
READERS = {
    "late": (Late, lambda m: m(IDS)),
    "nested": (Nested, lambda m: m(IDS)),
    "parts": (Headed, lambda m: m.body(IDS) @ m.head.weight.T),
    "shared": (Shared, lambda m: m(IDS)),
    "dropping": (Dropping, lambda m: m(IDS)),
    "compiled": (Late, None),
    "state_dict": (Late, lambda m: torch.func.functional_call(m, dict(m.state_dict(keep_vars=True)), (IDS,))),
    "part's state_dict": (
        Late, lambda m: nn.functional.linear(m.embed(IDS), m.layers[2].state_dict(keep_vars=True)["weight"])
    ),
}


def losses(make, run, slow, monkeypatch, steps=3):
    import bmlab.train.offload as offload
    update = offload._cpu_unit
    with monkeypatch.context() as patch:
        patch.setattr(offload, "_cpu_unit", lambda *a: (time.sleep(0.05 if slow else 0), update(*a)))
        torch.manual_seed(0)
        net = make()
        opt, out = offload.AdamW(net, lr=0.1, offload=1.0), []
        call = run or torch.compile(net, backend="eager")
        for _ in range(steps):
            loss = call(net).pow(2).mean() if run else call(IDS).pow(2).mean()
            loss.backward()
            opt.step()
            opt.zero_grad()
            out.append(loss.item())
            if not slow: opt.flush()
        opt.flush()
        return out


@pytest.mark.parametrize("name", READERS)
def test_who_reads_weights_waits_for_them(name, monkeypatch):
    make, run = READERS[name]
    assert losses(make, run, True, monkeypatch) == losses(make, run, False, monkeypatch)


def sharded_readers():
    "FSDP2 gathers ahead of time, and blocks may be coarser or tied: [(case, losses with slow lanes, with flush)]"
    import bmlab.train.offload as offload
    from bmlab.train.sharding import shard
    update, out = offload._cpu_unit, {}
    for case, kw in {"zero 3": dict(zero=3), "zero 2": dict(zero=2), "coarse": dict(blocks=["halves"])}.items():
        for slow in (True, False):
            offload._cpu_unit = lambda *a: (time.sleep(0.05 if slow else 0), update(*a))
            torch.manual_seed(0)
            net = (
                nn.Sequential(
                    nn.Embedding(10, 8), nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)])
                )
                if case != "coarse" else Halves()
            )
            shard(net, dtype=None, **kw)
            opt = offload.AdamW(net, lr=0.1, offload=1.0)
            for _ in range(3):
                loss = net(IDS).pow(2).mean()
                loss.backward()
                opt.step()
                opt.zero_grad()
                if not slow: opt.flush()
                out.setdefault(case, {}).setdefault(slow, []).append(loss.item())
            opt.flush()
    offload._cpu_unit = update
    return out


class Halves(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.halves = (
            nn.Embedding(10, 8), nn.ModuleList(nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)]) for _ in range(2))
        )
    def forward(self, ids):
        x = self.embed(ids)
        for half in self.halves: x = x + half(x).tanh()
        return x


@pytest.mark.long
def test_who_gathers_weights_waits_for_them():
    for r in run_ranks(sharded_readers):
        for case, got in r.items(): assert got[True] == got[False], case


def test_masters_follow_weights_that_others_write():
    from bmlab.train.offload import AdamW
    def train(offload, half=False):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Embedding(10, 8, max_norm=0.5), nn.Linear(8, 8)).to(
            torch.bfloat16 if half else torch.float32
        )
        opt = AdamW(net.parameters() if half else net, lr=0.1, offload=offload, unit=20)
        for i in range(4):
            (net(IDS) - 1).pow(2).mean().backward()
            opt.step()
            opt.zero_grad()
            opt.flush()
            with torch.no_grad(): net[1].weight.clamp_(-0.05, 0.05)
            if i == 2: net[1].load_state_dict({"weight": torch.zeros(8, 8), "bias": torch.ones(8)})
        return net.state_dict()
    for half in (False, True):
        a, b = train(None, half), train(1.0, half)
        assert all(torch.equal(a[k], b[k]) for k in a)
        assert b["1.weight"].abs().max() <= 0.05


@pytest.mark.parametrize("offload", [None, 1.0])
def test_weights_written_through_data_are_kept(offload):
    "Another tensor in a weight's place is seen; what is written into the same one is told"
    from bmlab.train.offload import AdamW
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).bfloat16()
    opt, x = AdamW(net, lr=1e-3, offload=offload), torch.ones(2, 4).bfloat16()
    def step():
        net(x).sum().backward()
        opt.step()
        opt.zero_grad()
        opt.flush()
    step()
    net[1].weight.data = torch.full((4, 4), 3.).bfloat16()
    step()
    assert (net[1].weight - 3).abs().max() < 0.1
    net[0].weight.data.fill_(5.)
    opt.reset_masters()
    step()
    assert (net[0].weight - 5).abs().max() < 0.1


def sharded_writes():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from bmlab.train import offload
    looked, where = [0], torch.where
    def counted(*a):
        looked[0] += 1
        return where(*a)
    offload.torch.where = counted
    net = model().bfloat16()
    for m in (*net.blocks, net): fully_shard(m, mesh=init_device_mesh("cpu", (2,)))
    opt, p, out = offload.AdamW(net, lr=0.1, offload=0.5, unit=3000), net.blocks[0].up.weight, []
    def step():
        loss_of(net, batches(1)[0]).backward()
        opt.step()
        opt.zero_grad()
        opt.flush()
        out.append(looked[0])
        looked[0] = 0
    for _ in range(3): step()                                          # the first look, then none
    for write in (lambda: p.clamp_(-0.05, 0.05), lambda: p.to_local().zero_()):
        with torch.no_grad(): write()
        want = p.full_tensor().clone()
        step()
        state = next(s["master"] for q, s in opt.state_dict()["state"].items() if list(net.parameters())[q] is p)
        # a step from where others left it
        out.append(((state.full_tensor() - want.float()).abs().max() < 0.2).item())
    offload.torch.where = where
    return out


@pytest.mark.long
def test_masters_of_shards_follow_weights_that_others_write():
    for first, second, third, clamped, a, zeroed, b in run_ranks(sharded_writes):
        assert first > 0 and second == third == 0 and 0 < clamped < first and 0 < zeroed < first and a and b


def test_a_copy_of_the_model_is_free():
    "It neither waits for the optimizer nor changes its masters; and it pickles"
    import pickle
    from bmlab.train.offload import AdamW
    net = model().bfloat16()
    opt = AdamW(net, lr=1e-3, offload=1.0)
    loss_of(net, batches(1)[0]).backward()
    opt.step()
    opt.zero_grad()
    opt.flush()
    masters, other = [s["master"].clone() for s in opt.state.values()], copy.deepcopy(net)
    other.load_state_dict(net.state_dict())
    pickle.loads(pickle.dumps(net))
    assert all(torch.equal(a, s["master"]) for a, s in zip(masters, opt.state_dict()["state"].values()))


def test_what_overlap_backward_cannot_do_is_refused():
    from bmlab.train.offload import AdamW
    from bmlab.train.optim import OptimManager
    net = model()
    opt = AdamW(net, offload=1.0, overlap="backward")
    om = OptimManager()
    om.add_optimizer(opt)
    for _ in range(2):
        om.backward(loss_of(net, batches(1)[0]))
        om.step()
        om.zero_grad()
    om.backward(loss_of(net, batches(1)[0]))
    with pytest.raises(RuntimeError, match="used the gradients already"): om.clip_grad_norm(1.0)
    with pytest.raises(RuntimeError, match="arrived twice"): loss_of(net, batches(1)[0]).backward()
    om.zero_grad()
    scaled = OptimManager(loss_scale=1024)
    scaled.add_optimizer(opt)
    with pytest.raises(RuntimeError, match="loss_scale=1024"): scaled.backward(loss_of(net, batches(1)[0]))


def test_parameters_without_elements_and_odd_kinds():
    from bmlab.train.offload import AdamW
    net = nn.Linear(4, 4)
    net.empty = nn.Parameter(torch.empty(0))
    for offload in (None, 1.0):
        before = net.weight.detach().clone()
        opt = AdamW(net, lr=0.1, weight_decay=0., offload=offload)
        (net(torch.ones(1, 4)).sum() + net.empty.sum()).backward()
        opt.step()
        opt.zero_grad()
        opt.flush()
        # a first step goes by the learning rate
        torch.testing.assert_close(before - net.weight, torch.full((4, 4), 0.1))
        assert [int(s["step"]) for s in opt.state.values()] == [1, 1, 1]
    with pytest.raises(ValueError, match="not contiguous"):
        AdamW(nn.Conv2d(4, 4, 3).to(memory_format=torch.channels_last))
    with pytest.raises(ValueError, match="complex64"): AdamW([nn.Parameter(torch.zeros(2, dtype=torch.complex64))])


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("offload, link", [(1.0, 0.0), (1.0, 1.0), (1.0, 0.5), (0.5, 0.5)])
def test_a_block_whose_gradient_is_not_finite_stays_as_it_was(device, dtype, offload, link):
    "In either lane: the manager hears of it with the loss, another loop is told by an error, and training can go on"
    from bmlab.train.offload import AdamW
    from bmlab.train.optim import OptimManager
    torch.manual_seed(0)
    net = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(6)]).to(device, dtype)
    opt, x = (
        AdamW(net, lr=1e-2, offload=offload, link=link, overlap="backward", unit=5000),
        torch.randn(8, 64, device=device, dtype=dtype),
    )
    om = OptimManager(model=net)
    om.add_optimizer(opt)
    weight, three = net[4][0].weight, torch.tensor(3, device=device)
    def backward(bad=None):
        om.zero_grad()
        hook = weight.register_hook(lambda g: g.clone().index_fill_(0, three, bad)) if bad is not None else None
        om.backward(net(x).float().square().mean())
        if hook is not None: hook.remove()
    for _ in range(4):
        backward()
        assert om.gradients_finite().item()
        om.step()
    opt.flush()
    for bad in (float("inf"), float("nan")):
        before = [p.detach().clone() for p in net.parameters()]
        backward(bad)
        assert not om.gradients_finite().item() and [p is weight for p in opt.spoilt()] == [True]
        om.zero_grad()                                                   # as `fit` does, which then ends
        opt.flush()
        assert (
            all(p.isfinite().all() for p in net.parameters()) and torch.equal(weight, before[8])
            and not torch.equal(net[5][0].weight, before[10])
        )
        backward()
        om.step()
        opt.flush()
    backward(float("nan"))
    with pytest.raises(FloatingPointError, match="the gradient of 4.0.weight is not finite"):
        # at once, or on a GPU where the host first knows
        om.step()
        for _ in range(3):
            backward()
            om.step()
    om.zero_grad()
    backward()
    om.step()
    opt.flush()
    assert all(p.isfinite().all() for p in net.parameters())


def test_a_delta_is_saved_and_merged_as_the_last_step_left_it(tmp_path, monkeypatch):
    "Also while the host still updates"
    from safetensors.torch import load_file
    from bmlab.delta.lora import Lora
    slow, inner = threading.Event(), offload._cpu_unit
    def late(*args):
        slow.wait(0.3)
        return inner(*args)
    monkeypatch.setattr(offload, "_cpu_unit", late)
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(8, 8))
    delta = Lora(net, r=2, modules=["0"]).freeze()
    opt = offload.AdamW(net, lr=0.1, offload=1.0)
    net(torch.randn(2, 8)).sum().backward()
    opt.step()
    delta.save(tmp_path / "early")
    opt.flush()
    delta.save(tmp_path / "late")
    early, late = (load_file(tmp_path / n / "adapter_model.safetensors") for n in ("early", "late"))
    assert all(torch.equal(early[k], late[k]) for k in late)


def held_back(monkeypatch):
    "Updates on the host come late: whoever does not wait reads the weights of before"
    inner = offload._cpu_unit
    monkeypatch.setattr(offload, "_cpu_unit", lambda *args: (time.sleep(0.05), inner(*args)))


@pytest.mark.parametrize("make", (lambda: nn.Linear(8, 8), lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))))
def test_a_copy_of_a_model_has_the_weights_of_the_last_step(make, monkeypatch):
    "Also those that are copied before any hook, as a module's own parameters are"
    held_back(monkeypatch)
    torch.manual_seed(0)
    net = make()
    opt = offload.AdamW(net, lr=0.1, offload=1.0)
    for _ in range(3):
        net(torch.randn(2, 8)).pow(2).sum().backward()
        opt.step()
        opt.zero_grad()
        copied, part = copy.deepcopy(net).state_dict(), copy.deepcopy([*net.modules()][-1])
        opt.flush()
        assert all(torch.equal(t, copied[n]) for n, t in net.state_dict().items())
        assert torch.equal(part.weight, [*net.modules()][-1].weight) and part.weight is not [*net.modules()][-1].weight


def test_a_delta_that_is_copied_onto_another_model_leaves_its_weights(monkeypatch):
    from bmlab.delta.lora import Lora
    held_back(monkeypatch)
    torch.manual_seed(0)
    make = lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    net, other = make(), make()
    delta, before = Lora(net, r=2, modules=["0"]), {n: p.clone() for n, p in other.named_parameters()}
    opt = offload.AdamW(net, lr=0.1, offload=1.0)
    for _ in range(2):
        net(torch.randn(2, 8)).pow(2).sum().backward()
        opt.step()
        opt.zero_grad()
    copied = delta.copy_to(other)
    opt.flush()
    assert all(map(torch.equal, delta.parameters(), copied.parameters()))
    copied.detach()
    assert all(torch.equal(p, before[n]) for n, p in other.named_parameters())


def test_callbacks_see_the_weights_of_the_step_they_are_told_of(monkeypatch):
    "As a run does whose optimizer keeps everything beside the weights"
    from bmlab.train.loop import fit
    held_back(monkeypatch)
    batches = [torch.full((2, 8), 0.1 * n) for n in range(4)]
    def seen(offload_to):
        torch.manual_seed(0)
        net, sums = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), []
        read = lambda run: sums.append([p.double().sum().item() for p in run.model.parameters()])
        fit(net, batches, offload.AdamW(net, lr=0.1, offload=offload_to), steps=4, plot=False, callbacks=[read],
            loss=lambda model, x: model(x).pow(2).mean())
        return torch.tensor(sums)
    torch.testing.assert_close(seen(1.0), seen(0.0), rtol=1e-5, atol=1e-5)


def test_arguments_that_would_never_end():
    net = torch.nn.Linear(2, 2)
    for given in (dict(unit=0), dict(workers=-1), dict(workers="2")):
        with pytest.raises(ValueError, match="a whole number of 1 or more"): offload.AdamW(net, **given)


def test_gradients_that_are_sparse_or_turned():
    table = torch.nn.Embedding(10, 4, sparse=True)
    opt = offload.AdamW(table)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(TypeError, match="sparse=False"): opt.step()
    mine, theirs = (torch.nn.Parameter(torch.ones(4, 6)) for _ in range(2))
    for p in (mine, theirs): p.grad = torch.arange(24.0).view(6, 4).t()
    offload.AdamW([mine], lr=0.1, weight_decay=0.0).step()
    torch.optim.AdamW([theirs], lr=0.1, weight_decay=0.0).step()
    assert torch.equal(mine, theirs)

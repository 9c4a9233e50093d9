"BMTrain's names on several processes: its README's GPT-2 under torchrun, world sizes, tensor parallelism times ZeRO."
from pathlib import Path

import pytest
import torch

from bmlab.train.forkserver import start_process
from bmlab.train.processes import run_ranks
from conftest import free_port
from fresh import fresh_python, torchrun

DATA = Path(__file__).resolve().parents[1] / "fixtures"
pytestmark = pytest.mark.long


def launch(text, folder):
    "Output lines of a script that torchrun runs in a folder of its own"
    folder.mkdir()
    (folder / "script.py").write_text(text)
    out = torchrun("script.py", cwd=folder)
    assert out.returncode == 0, out.stderr[-3000:]
    return out.stdout.splitlines()


def ranks(text, folder, world):
    "The same of processes with the environment that torchrun gives, forked with torch imported; lines of rank 0"
    folder.mkdir()
    where = dict(WORLD_SIZE=world, MASTER_ADDR="127.0.0.1", MASTER_PORT=free_port(), GLOO_SOCKET_IFNAME="lo")
    def start(rank):
        own = {k: str(v) for k, v in (where | dict(RANK=rank, LOCAL_RANK=rank)).items()}
        apart = f"os.dup2(os.open({str(folder / f'errors {rank}')!r}, os.O_WRONLY | os.O_CREAT), 2)"
        head = f"import os\nos.environ.update({own})\n{apart}\n"
        return start_process(head + text, log=folder / f"log {rank}", cwd=folder)
    codes = [p.wait(300) for p in [start(rank) for rank in range(world)]]
    assert codes == [0] * world, "\n".join((folder / f"errors {r}").read_text()[-3000:] for r in range(world))
    return (folder / "log 0").read_text().splitlines()


def test_the_readme_runs_after_its_import_line_is_changed(tmp_path):
    "torch.half, loss_scale=1024, Noam, AdamOffloadOptimizer on two processes: losses and norms of bmlab's own lines"
    theirs = (DATA / "readme_gpt2.py").read_text()
    changed = theirs.replace("\nimport bmtrain as bmt\n", "\nimport bmlab.bmtrain as bmt\n")
    assert [a for a, b in zip(theirs.splitlines(), changed.splitlines()) if a != b] == ["import bmtrain as bmt"]
    lines = launch(changed, tmp_path / "a")
    own = ranks((DATA / "own_gpt2.py").read_text(), tmp_path / "b", 2)
    losses = [line for line in lines if line.startswith("| Iter")]
    assert len(losses) == 6 and losses == own
    assert [line.split()[0] for line in lines[6:]] == [
        "name", "transformers.7.w_in.weight", "transformers.7.w_out.weight"
    ]
    (tmp_path / "c").mkdir()
    alone = fresh_python(changed, cwd=tmp_path / "c", check=True).stdout.splitlines()
    assert len(alone) == 9 and float(alone[4].split()[5]) < float(alone[0].split()[5])
    saved = [torch.load(tmp_path / d / "checkpoint.pt") for d in "ac"]
    assert saved[0].keys() == saved[1].keys() and all(
        saved[0][k].shape == v.shape and v.dtype == torch.half for k, v in saved[1].items()
    )


def small(bmt, d=8, layers=3, dtype=torch.float64, tied=False):
    "A model with blocks of all settings"
    class Feed(bmt.DistributedModule):
        def __init__(self):
            super().__init__()
            self.norm, self.up, self.down = (
                torch.nn.LayerNorm(d, dtype=dtype),
                bmt.nn.Linear(d, 2 * d, dtype=dtype),
                bmt.nn.Linear(2 * d, d, dtype=dtype),
            )

        def forward(self, x, gain):
            bmt.inspect.record_tensor(x, "in", group="feed")
            return x + gain * self.down(self.up(self.norm(x)).relu())

    class Net(bmt.DistributedModule):
        def __init__(self):
            super().__init__()
            self.table = bmt.DistributedParameter(
                torch.empty(12, d, dtype=dtype), init_method=torch.nn.init.normal_, group="words"
            )
            self.layers = bmt.TransformerBlockList(
                [bmt.Block(Feed(), use_checkpoint=i != 1, zero_level=2 if i == 0 else 3) for i in range(layers)]
            )
            self.head = bmt.nn.Linear(d, 12, bias=False, dtype=dtype)
            if tied: self.head.weight = self.table

        def forward(self, ids): return self.head(self.layers(torch.nn.functional.embedding(ids, self.table), 0.5))
    return Net()


def batch(rank=0, world=1):
    ids = torch.randint(0, 12, (4, 7), generator=torch.Generator().manual_seed(5))
    return ids[rank::world]


def trained(net, bmt, make, steps=3, clip=0.5, micro=1, **options):
    "[(loss, norm)] of some steps, and the manager"
    ids, opt = batch(bmt.rank(), bmt.world_size()), make([p for p in net.parameters() if p.requires_grad])
    om = bmt.optim.OptimManager(**options)
    om.add_optimizer(opt)
    out = []
    for _ in range(steps):
        om.zero_grad()
        total = 0
        for part in ids.chunk(micro):
            loss = bmt.loss.FusedCrossEntropy()(net(part[:, :-1]).flatten(0, 1), part[:, 1:].flatten())
            om.backward(loss / micro)
            total += bmt.sum_loss(loss).item() / micro
        norm = om.clip_grad_norm(opt.param_groups, max_norm=clip)
        om.step()
        out.append((total, norm.item()))
    return out, om


def everything(folder):
    import bmlab.bmtrain as bmt
    from torch.distributed.fsdp import FSDPModule
    bmt.init_distributed(seed=0)
    sgd, out = lambda ps: torch.optim.SGD(ps, lr=0.1), {}
    def fresh(**options):
        torch.manual_seed(1)
        net = small(bmt, **options)
        bmt.init_parameters(net)
        return net
    net = fresh()
    out["start"] = net.state_dict()
    out["sharded"] = (
        isinstance(net, FSDPModule),
        [
            isinstance(b, FSDPModule) and b._get_fsdp_state()._fsdp_param_group.post_forward_mesh_info is not None
            for b in net.layers
        ],
    )
    out["groups"] = {k: len(v) for k, v in bmt.grouped_parameters(net)}
    with bmt.inspect.inspect_tensor() as t: out["steps"], _ = trained(net, bmt, sgd)
    out["weights"], out["model"], out["tensors"] = (
        net.state_dict(), bmt.inspect.inspect_model(net, "*.weight"), t.get_summary()[:3]
    )
    net = fresh()
    out["micro"], _ = trained(net, bmt, sgd, micro=2)
    net = fresh(tied=True)
    out["tied"], _ = trained(net, bmt, sgd)
    out["tied weights"] = net.state_dict()
    net = fresh()
    for p in net.layers[1].parameters(): p.requires_grad_(False)
    out["frozen"], _ = trained(net, bmt, sgd)
    out["frozen weights"] = net.state_dict()
    for name in ("AdamOffloadOptimizer", "AdamOptimizer"):
        net = fresh(dtype=torch.float32)
        out[name], om = trained(net, bmt, lambda ps: getattr(bmt.optim, name)(ps, lr=1e-2, weight_decay=1e-2))
    if folder is not None and bmt.world_size() == 2:
        state = om.state_dict(gather_opt=True)
        bmt.save(net, f"{folder}/net.pt")
        if bmt.rank() == 0: torch.save(state, f"{folder}/opt.pt")
        local, own = om.optimizers[0].state_dict(), torch.load(f"{folder}/opt.pt") if bmt.rank() == 0 else state
        om.optimizers[0].load_state_dict(local)
        om.load_state_dict(own)
        out["further"], _ = trained_on(net, bmt, om)
    if folder is not None and bmt.world_size() == 1:                       # what two ranks saved goes on here
        net = small(bmt, dtype=torch.float32)
        bmt.load(net, f"{folder}/net.pt")
        opt = bmt.optim.AdamOptimizer(net.parameters(), lr=5.)
        om = bmt.optim.OptimManager()
        om.add_optimizer(opt)
        om.load_state_dict(torch.load(f"{folder}/opt.pt"))
        out["further"], _ = trained_on(net, bmt, om)
    net = fresh(dtype=torch.half)
    before = net.state_dict()
    out["overflow"], om = trained(net, bmt, sgd, steps=1, loss_scale=2.0 ** 24)
    out["skipped"] = all(torch.equal(before[k], v) for k, v in net.state_dict().items()), om.loss_scale
    return out


def trained_on(net, bmt, om):
    ids, out = batch(bmt.rank(), bmt.world_size()), []
    for _ in range(2):
        loss = bmt.loss.FusedCrossEntropy()(net(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        om.zero_grad()
        om.backward(loss)
        om.step()
        out.append(bmt.sum_loss(loss).item())
    return out, om


def close(a, b, tol):
    torch.testing.assert_close(
        torch.as_tensor(a, dtype=torch.float64), torch.as_tensor(b, dtype=torch.float64), rtol=tol, atol=tol
    )


def test_two_ranks_train_as_one(tmp_path):
    "ZeRO 2 and 3, recompute, accumulation, ties, frozen blocks, optimizers, files: the same on one and two processes"
    two = run_ranks(everything, str(tmp_path), timeout_s=400)
    (one,) = run_ranks(everything, str(tmp_path), world_size=1, timeout_s=400)
    assert two[0]["sharded"] == (True, [False, True, True]) and one["sharded"][0] is False
    assert one["groups"] == two[0]["groups"] == {"words": 1, None: 19}
    for r in two:
        # whatever the number of ranks
        for k in one["start"]: assert torch.equal(r["start"][k], one["start"][k])
        for kind in ("weights", "tied weights", "frozen weights"):
            for k, v in one[kind].items(): torch.testing.assert_close(r[kind][k], v, rtol=1e-9, atol=1e-9)
        for kind in ("steps", "micro", "tied", "frozen"): close(r[kind], one[kind], 1e-9)
        close(r["micro"], one["steps"], 1e-9)
        for kind in ("AdamOffloadOptimizer", "AdamOptimizer", "further"): close(r[kind], one[kind], 2e-5)
        assert r["AdamOffloadOptimizer"] == r["AdamOptimizer"]
        for kind in ("model", "tensors"):
            for a, b in zip(r[kind], one[kind], strict=True):
                assert (a["name"], a["shape"]) == (b["name"], b["shape"])
                close(
                    [a[k] for k in ("mean", "std", "min", "max", "grad_mean")],
                    [b[k] for k in ("mean", "std", "min", "max", "grad_mean")],
                    1e-9 if kind == "model" else 1,
                )
        assert r["skipped"] == one["skipped"] == (True, 2.0 ** 23)
    assert torch.equal(one["tied weights"]["table"], one["tied weights"]["head.weight"])
    assert all(torch.equal(one["frozen weights"][k], v) for k, v in one["start"].items() if k.startswith("layers.1"))


def tensor_parallel(tp):
    import bmlab.bmtrain as bmt
    bmt.init_distributed(seed=0, tp_size=tp)
    class Feed(bmt.DistributedModule):
        def __init__(self):
            super().__init__()
            self.norm, self.up, self.down = (
                torch.nn.LayerNorm(8), bmt.nn.ColumnParallelLinear(8, 16), bmt.nn.RowParallelLinear(16, 8)
            )

        def forward(self, x): return x + self.down(self.up(self.norm(x)).relu())

    class Net(bmt.DistributedModule):
        def __init__(self):
            super().__init__()
            self.embed, self.layers = (
                bmt.nn.VPEmbedding(12, 8, dtype=torch.float32),
                bmt.TransformerBlockList([bmt.Block(Feed(), zero_level=i + 2) for i in range(2)]),
            )

        def forward(self, ids): return self.embed(self.layers(self.embed(ids)), projection=True)
    net = Net()
    bmt.init_parameters(net)
    ids = torch.randint(0, 12, (4, 1, 5), generator=torch.Generator().manual_seed(3))
    mine = ids[bmt.rank()] if bmt.world_size() > 1 else ids.flatten(0, 1)
    labels = bmt.distributed.all_gather(mine, comm=bmt.config["tp_comm"]).view(len(mine), -1)
    opt = bmt.optim.AdamOffloadOptimizer(net.parameters(), lr=1e-2)
    om, out = bmt.optim.OptimManager(loss_scale=8.), []
    om.add_optimizer(opt)
    for _ in range(3):
        loss = bmt.loss.FusedCrossEntropy(parallel=True)(net(mine).flatten(0, 1), labels.flatten())
        om.zero_grad()
        om.backward(loss)
        norm = om.clip_grad_norm(opt.param_groups, max_norm=0.5)
        om.step()
        out.append((bmt.sum_loss(loss).item(), norm.item()))
    return out, net.state_dict()


@pytest.mark.slow                              # (test_sharding has one)
def test_tensor_parallelism_times_zero():
    "Four ranks, two by two, and all four in one group: the losses, norms and weights of one process"
    ((alone, weights),) = run_ranks(tensor_parallel, 1, world_size=1)
    for tp in (2, 4):
        for out, state in run_ranks(tensor_parallel, tp, world_size=4, timeout_s=300):
            close(out, alone, 1e-5)
            for k, v in weights.items(): torch.testing.assert_close(state[k], v, rtol=1e-4, atol=1e-5)


def parallel_example():
    "(input (8, 3, 8), weights of the loss by place, so that rows or columns that change places are seen)"
    whole = torch.randn(8, 3, 8, generator=torch.Generator().manual_seed(1))
    return whole, torch.arange(whole.numel() * 1.).view_as(whole).sin()


def four_forms(tp):
    """{form: (this rank's output, gradients of input, weight and bias)} of RowParallelLinear and ColumnParallelLinear

    An input whose rows are divided, and an output that is, are this rank's rows.
    """
    import itertools
    import bmlab.bmtrain as bmt
    bmt.init_distributed(seed=0, tp_size=tp)
    rank, (whole, place) = bmt.rank(), parallel_example()
    rows, columns = lambda t: t.chunk(tp, 0)[rank], lambda t: t.chunk(tp, -1)[rank]
    out = {}
    for kind, a, b in itertools.product(("row", "column"), (False, True), (False, True)):
        torch.manual_seed(2)
        if kind == "row":
            layer = bmt.nn.RowParallelLinear(8, 8, split_input=a, all_reduce_output=b)
            x, weights = (rows if a else columns)(whole), (place if b else rows(place))
        else:
            layer = bmt.nn.ColumnParallelLinear(8, 8, gather_input=a, gather_output=b)
            x, weights = (rows(whole) if a else whole), (place if b else columns(place))
        bmt.init_parameters(layer)
        x = x.clone().requires_grad_()
        y = layer(x)
        (y * weights).sum().backward()
        grads = {n: p.grad.full_tensor() for n, p in layer.named_parameters()}
        out[kind, a, b] = y.detach(), x.grad, grads, {n: p.detach().full_tensor() for n, p in layer.named_parameters()}
    return out


@pytest.mark.parametrize("tp", [2, 4])
def test_all_forms_of_parallel_layers(tp):
    "Forward and backward of a plain linear layer, from the same weights, on the whole input"
    whole, place = parallel_example()
    for rank, forms in enumerate(run_ranks(four_forms, tp, world_size=tp)):
        rows, columns = lambda t: t.chunk(tp, 0)[rank], lambda t: t.chunk(tp, -1)[rank]
        for (kind, a, b), (y, grad_x, grads, weights) in forms.items():
            plain = torch.nn.Linear(8, 8)
            plain.load_state_dict(weights)
            x = whole.clone().requires_grad_()
            want = plain(x)
            (want * place).sum().backward()
            if kind == "row": into, outof = (rows if a else columns), ((lambda t: t) if b else rows)
            else: into, outof = (rows if a else (lambda t: t)), ((lambda t: t) if b else columns)
            where = dict(rtol=1e-5, atol=1e-5, msg=lambda m: f"{kind} {a} {b} on rank {rank}: {m}")
            torch.testing.assert_close(y, outof(want.detach()), **where)
            torch.testing.assert_close(grad_x, into(x.grad), **where)
            for n, p in plain.named_parameters(): torch.testing.assert_close(grads[n], p.grad, **where)


def one_product_for_three(tp):
    "Query, key and value by one product of their joined weights, and by a layer each: outputs and gradients"
    import bmlab.bmtrain as bmt
    bmt.init_distributed(seed=0, tp_size=tp)
    class Projections(bmt.DistributedModule):
        def __init__(self):
            super().__init__()
            for name in "qkv": setattr(self, name, bmt.nn.ColumnParallelLinear(8, 8, gather_input=True))
            self.out = bmt.nn.RowParallelLinear(8, 8)
        def forward(self, x, joined):
            layers = [getattr(self, name) for name in "qkv"]
            if joined:
                weight, bias = (torch.cat([getattr(m, name) for m in layers]) for name in ("weight", "bias"))
                parts = bmt.nn.OpParallelLinear.apply(x, weight, bias, True, False, False, None).chunk(3, -1)
            else: parts = [m(x) for m in layers]
            return self.out(parts[0] * parts[1].tanh() + parts[2])
    net = bmt.Block(Projections())
    bmt.init_parameters(net)
    x, out = torch.randn(4, 3, 8, generator=torch.Generator().manual_seed(bmt.rank())), []
    with torch.no_grad(): quiet = net(x, True)
    for joined in (False, True):
        net.zero_grad()
        y = net(x, joined)
        y.square().sum().backward()
        out.append((y.detach(), {n: p.grad.full_tensor() for n, p in net.named_parameters()}))
    assert torch.equal(quiet, out[1][0])
    return out, type(net.q.weight).__name__


@pytest.mark.parametrize("ranks", [2, 4])
def test_joined_weights_of_parallel_layers(ranks):
    "On four ranks ZeRO divides each part once more"
    for ((y, grads), (joined, theirs)), kind in run_ranks(one_product_for_three, 2, world_size=ranks):
        torch.testing.assert_close(joined, y, rtol=1e-5, atol=1e-5)
        for n, g in grads.items(): torch.testing.assert_close(theirs[n], g, rtol=1e-4, atol=1e-4)
        # outside a forward it is what the optimizer sees
        assert kind == "DTensor"


def config_of_two_by_two():
    import bmlab.bmtrain as bmt
    bmt.init_distributed(seed=0, tp_size=2)
    kinds, t = ("zero", "tp", "tp_zero", "pipe"), bmt.config["topology"]
    names = "world_size", "zero_size", "zero_rank", "tp_size", "tp_rank", "tp_zero_size", "tp_zero_rank"
    return [bmt.config[n] for n in names], {k: (t.get_group_id(k), t.get_group_rank(k)) for k in kinds}


def test_places_of_four_ranks():
    "As BMTrain 1.0.1's topology numbers them: neighbours share tensors, every second rank shares the same part"
    for rank, (config, groups) in enumerate(run_ranks(config_of_two_by_two, world_size=4)):
        assert config == [4, 4, rank, 2, rank % 2, 2, rank // 2]
        assert groups == {"zero": (0, rank), "tp": (rank // 2, rank % 2), "tp_zero": (rank % 2, rank // 2),
                          "pipe": (rank, 0)}


OLD_LOOP = """
import torch, bmlab.bmtrain as bmt
bmt.init_distributed(seed=0, loss_scale_steps=4)
bmt.print_rank(torch.cuda.memory_summary(), torch.cuda.current_device(), torch.cuda.FloatTensor([1]).device)
net = bmt.nn.Linear(4, 4, dtype=torch.half)
bmt.init_parameters(net)
optimizer = bmt.optim.AdamOffloadOptimizer(net.parameters(), lr=1e-2, scale=2**20)
schedule = bmt.lr_scheduler.Noam(optimizer, start_lr=1e-2, warmup_iter=2, end_iter=100, num_iter=0)
x = torch.ones(2, 4, dtype=torch.half, device="cuda") * (bmt.rank() + 1)
for step in range(16):
    optimizer.zero_grad()
    loss = net(x).float().square().mean()
    seen = bmt.sum_loss(loss).item()
    optimizer.loss_scale(loss).backward()
    bmt.optim.clip_grad_norm(optimizer.param_groups, 1.0, scale=optimizer.scale)
    bmt.optim_step(optimizer, schedule)
    torch.cuda.synchronize()
    bmt.print_rank(f"| {step} {seen:.5f} {optimizer.scale:.0f}")
"""


def test_scripts_of_the_first_versions(tmp_path):
    "BMTrain 0.1: the optimizer holds the scale of the loss; overflow halves it, clean steps double it"
    lines = ranks(OLD_LOOP, tmp_path / "old", 2)
    assert "there is no GPU 0 cpu" in lines
    seen = [line.split() for line in lines if line.startswith("| ")]
    losses, scales = [float(s[2]) for s in seen], [float(s[3]) for s in seen]
    assert scales[0] == 2 ** 19 and min(scales) < scales[0] and any(b > a for a, b in zip(scales, scales[1:]))
    assert losses[-1] < 0.9 * losses[0]


def wrapped():
    import transformers as tf
    import bmlab.bmtrain as bmt
    bmt.init_distributed(seed=0)
    config = tf.GPT2Config(
        n_embd=16, n_layer=2, n_head=2, vocab_size=12, n_positions=16, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    )
    torch.manual_seed(0)
    plain = tf.GPT2LMHeadModel(config)
    torch.manual_seed(0)
    model = bmt.BMTrainModelWrapper(tf.GPT2LMHeadModel(config))
    ids = batch(bmt.rank(), bmt.world_size())
    with torch.no_grad(): same = model(ids).logits.sub(plain(ids).logits).abs().max().item()
    bmt.optim.OptimManager().add_optimizer(opt := bmt.optim.AdamOffloadOptimizer(model.parameters(), lr=1e-2))
    losses = []
    for _ in range(3):
        loss = model(ids, labels=ids).loss
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(bmt.sum_loss(loss).item())
    late = torch.nn.Sequential()
    late.w = bmt.DistributedParameter(torch.ones(4, 4))
    try:
        bmt.optim.AdamOptimizer(late.parameters())
        error = ""
    except RuntimeError as e: error = str(e)
    state = model.state_dict()
    model.load_state_dict({k: v * 0 for k, v in state.items()})
    zero = all(v.abs().sum() == 0 for v in model.state_dict().values())
    return same, losses, len([m for m in model.modules() if isinstance(m, bmt.CheckpointBlock)]), error, zero


def test_the_wrapper_takes_a_model_of_transformers():
    (one,), two = run_ranks(wrapped, world_size=1), run_ranks(wrapped)
    for same, losses, blocks, error, zero in two:
        assert same < 1e-6 and blocks == 2 and zero and "call bmt.init_parameters(model)" in error
        close(losses, one[1], 2e-5)
    assert one[1][-1] < one[1][0]


def part_of_a_model():
    "Parts that run alone, a weight read by a loss, a state dict before init_parameters; on any number of ranks"
    import bmlab.bmtrain as bmt
    from torch.nn.functional import embedding
    bmt.init_distributed(seed=0)
    class Table(bmt.DistributedModule):
        def __init__(self):
            super().__init__()
            self.weight = bmt.DistributedParameter(torch.empty(12, 8), init_method=torch.nn.init.normal_)
        def forward(self, ids): return embedding(ids, self.weight)
    class Net(bmt.DistributedModule):
        def __init__(self):
            super().__init__()
            self.table, self.norm = Table(), torch.nn.LayerNorm(8)
            self.layers = bmt.TransformerBlockList([bmt.Block(bmt.nn.Linear(8, 8)) for _ in range(2)])
        def part(self, ids): return self.layers(self.table(ids)) @ self.table.weight.T
        def forward(self, ids): return self.layers(self.norm(self.table(ids))) @ self.table.weight.T
    torch.manual_seed(1)
    start, net, out = Net(), Net(), {}
    bmt.init_parameters(start)
    net.load_state_dict(start.state_dict())
    out["loaded"] = all(torch.equal(v, net.state_dict()[k]) for k, v in start.state_dict().items())
    ids = batch(bmt.rank(), bmt.world_size())
    with torch.inference_mode(): out["quiet"] = bmt.gather_result(net.part(ids).clone()).clone()
    for kind, run in (("part", net.part), ("whole", net)):                 # the whole model after a part of it
        net.zero_grad()
        loss = run(ids).square().mean() + net.table.weight.square().sum()
        loss.backward()
        grads = {n: p.grad for n, p in net.named_parameters() if p.grad is not None}
        whole = {n: getattr(g, "full_tensor", g.clone)() for n, g in grads.items()}
        out[kind] = bmt.sum_loss(loss).item(), whole
    with bmt.block_layer.CheckpointBlockContext(net.layers[0]) as block: out["block"] = block.weight.detach().clone()
    try: net.norm(torch.ones(1, 8))
    except RuntimeError as error: out["alone"] = str(error)
    state, whole = bmt.store._save_to_rank0(net), net.state_dict()
    out["saved"] = list(state), all(torch.equal(v, whole[k]) for k, v in state.items())
    return out


def test_parts_of_a_model_run_alone():
    "In training and in inference mode, before and after the whole model: on two ranks as on one"
    two, (one,) = run_ranks(part_of_a_model), run_ranks(part_of_a_model, world_size=1)
    assert "alone" not in one and one["saved"] == (list(one["whole"][1]), True)
    rows = torch.cat([torch.arange(4)[rank::2] for rank in range(2)])
    for rank, out in enumerate(two):
        assert out["loaded"] and "call the model itself" in out["alone"] and out["saved"][1]
        assert out["saved"][0] == (one["saved"][0] if rank == 0 else [])
        close(out["quiet"], one["quiet"][rows], 1e-5)
        close(out["block"], one["block"], 1e-6)
        for kind in ("part", "whole"):
            close(out[kind][0], one[kind][0], 1e-5)
            for n, g in one[kind][1].items(): close(out[kind][1][n], g, 1e-4)


def models_with_a_state_dict_of_their_own(folder):
    "A class whose state_dict asks bmtrain for it, alone and inside another model: saved, loaded, trained"
    import bmlab.bmtrain as bmt
    bmt.init_distributed(seed=0)
    class Reader(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = bmt.TransformerBlockList([bmt.Block(bmt.nn.Linear(8, 8)) for _ in range(2)])
            self.norm = torch.nn.LayerNorm(8)
            self.register_buffer("gain", torch.zeros(8))
        def forward(self, x): return self.norm(self.layers(x)) * self.gain
        def state_dict(self, destination=None, prefix="", keep_vars=False):
            return bmt.store._save_to_rank0(self, destination, prefix)
    class Classifier(torch.nn.Module):
        def __init__(self, file):
            super().__init__()
            self.reader, self.dense = Reader(), bmt.nn.Linear(8, 2)
            bmt.load(self.reader, file)                                                # two parts, shared out apart
            bmt.init_parameters(self.dense)
        def forward(self, x): return self.dense(self.reader(x))
    torch.manual_seed(1)
    reader = Reader()
    bmt.init_parameters(reader)
    reader.gain.fill_(2.)                                                              # buffers go along
    bmt.save(reader, f"{folder}/reader.pt")
    net, out = Classifier(f"{folder}/reader.pt"), {"names": list(reader.state_dict())}
    x = torch.arange(32.).view(4, 8).sin()[bmt.rank()::bmt.world_size()]
    with torch.no_grad(): out["loaded"] = torch.equal(net.reader(x), reader(x))
    opt, om = bmt.optim.AdamOffloadOptimizer(net.parameters(), lr=1e-2), bmt.optim.OptimManager(loss_scale=1024)
    om.add_optimizer(opt, bmt.lr_scheduler.Noam(opt, start_lr=1e-2, warmup_iter=2, end_iter=-1))
    out["steps"] = []
    for _ in range(3):
        loss = net(x).square().mean()
        om.zero_grad()
        om.backward(loss)
        norm = om.clip_grad_norm(opt.param_groups, max_norm=10.0, scale=opt.scale, norm_type=2)
        om.step()
        out["steps"].append((bmt.sum_loss(loss).item(), norm.item()))
    out["state"] = net.state_dict()
    bmt.save(net, f"{folder}/net.pt")
    with torch.no_grad(): said, again = net(x), Classifier(f"{folder}/reader.pt")
    out["missing"] = bmt.load(again, f"{folder}/net.pt")
    with torch.no_grad(): out["again"] = torch.equal(again(x), said)
    return out


def test_a_state_dict_by_way_of_bmtrain(tmp_path):
    "Whole on rank 0, of ModelCenter's form: a model of its own, a part of another; two ranks train as one"
    (one,) = run_ranks(models_with_a_state_dict_of_their_own, str(tmp_path), world_size=1)
    for rank, out in enumerate(run_ranks(models_with_a_state_dict_of_their_own, str(tmp_path))):
        assert out["loaded"] and out["again"] and not any(out["missing"])
        assert out["names"] == ([] if rank else one["names"])
        close(out["steps"], one["steps"], 1e-4)
        assert set(one["state"]) - set(out["state"]) == ({f"reader.{n}" for n in one["names"]} if rank else set())
        for k, v in out["state"].items(): torch.testing.assert_close(v, one["state"][k], rtol=1e-4, atol=1e-5)
    assert len(one["names"]) == 7 and one["steps"][-1][0] < one["steps"][0][0]


def nested():
    "A model of which parts were wrapped before: losses and norms"
    import bmlab.bmtrain as bmt
    bmt.init_distributed(seed=0)
    class Part(bmt.DistributedModule):
        def __init__(self):
            super().__init__()
            self.up = bmt.BMTrainModelWrapper(torch.nn.Linear(8, 16))
            self.down = bmt.BMTrainModelWrapper(torch.nn.Linear(16, 8))
            self.gain = bmt.DistributedParameter(torch.ones(8))
        def forward(self, x): return x + self.gain * self.down(self.up(x).relu())
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = Part(), bmt.CheckpointBlock(Part())
        def forward(self, x): return self.second(self.first(x))
    torch.manual_seed(1)
    net = Net()
    bmt.init_parameters(net)
    opt, om = bmt.optim.AdamOffloadOptimizer(net.parameters(), lr=1e-2), bmt.optim.OptimManager(loss_scale=16.)
    om.add_optimizer(opt)
    x, out = torch.arange(32.).view(4, 8).sin()[bmt.rank()::bmt.world_size()], []
    for _ in range(3):
        om.zero_grad()
        loss = net(x).square().mean()
        om.backward(loss)
        norm = om.clip_grad_norm(opt.param_groups, max_norm=1.0)
        om.step()
        out.append((bmt.sum_loss(loss).item(), norm.item()))
    return out, net.state_dict()


def test_wrappers_inside_a_model():
    ((alone, weights),) = run_ranks(nested, world_size=1)
    for out, state in run_ranks(nested):
        close(out, alone, 1e-5)
        for k, v in weights.items(): torch.testing.assert_close(state[k], v, rtol=1e-4, atol=1e-5)
    assert alone[-1][0] < alone[0][0]


def plain_norm(x: torch.Tensor, weight: torch.Tensor, eps: float):
    wide = x.to(torch.float32)
    return (x * torch.rsqrt(wide.pow(2).mean(dim=-1, keepdim=True) + eps)).to(x.dtype) * weight


def test_functions_of_torchscript_in_recomputed_blocks():
    "Called in blocks and outside of them, several times, in half precision: gradients of the same lines in plain torch"
    import bmlab.bmtrain as bmt
    scripted_norm = torch.jit.script(plain_norm)
    class Layer(torch.nn.Module):
        def __init__(self, norm):
            super().__init__()
            self.norm, self.up, self.weight = norm, torch.nn.Linear(8, 8), torch.nn.Parameter(torch.ones(8))
        def forward(self, x): return x + self.up(self.norm(x, self.weight, 1e-6))
    try:
        bmt.init_distributed(seed=0)
        got = []
        for norm, wrap in ((scripted_norm, bmt.Block), (plain_norm, lambda m: m)):
            torch.manual_seed(0)
            net = torch.nn.Sequential(*(wrap(Layer(norm).half()) for _ in range(2)))
            for i in range(3):
                net.zero_grad()
                y = norm(net(torch.ones(2, 3, 8, dtype=torch.half)), torch.ones(8).half(), 1e-6)
                (y.float() * torch.arange(8.)).sum().backward()
            got.append([p.grad.clone() for p in net.parameters()])
        for a, b in zip(*got): torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-2)
    finally: bmt.shutdown()


def collectives():
    "A rank's loss through a product of all ranks, nccl's calls, objects, and the mean over a group"
    import bmlab.bmtrain as bmt
    bmt.init_distributed(seed=0, tp_size=2)
    rank, mine = bmt.rank(), torch.arange(4.) + bmt.rank()
    x = torch.full((1,), rank + 1., dtype=torch.half, requires_grad=True)
    y = bmt.distributed.all_reduce(x, "prod")
    (y * y).sum().div(2).backward()
    part, whole, total = torch.zeros(2), torch.zeros(8), mine.clone()
    bmt.nccl.allGather(mine.storage(), whole.storage(), bmt.config["comm"])
    bmt.nccl.allReduce(total.storage(), total.storage(), "max", bmt.config["comm"])
    bmt.nccl.reduceScatter(mine.storage(), part.storage(), "sum", bmt.config["comm"])
    out = {"grad": x.grad.item(), "gathered": whole.tolist(), "max": total.tolist(), "scattered": part.tolist()}
    if rank == 0: bmt.nccl.send(mine, 1)
    else: bmt.nccl.recv(total, 0)
    out["received"], out["rows"] = total.tolist(), bmt.gather_result(torch.ones(6, 6)[:2, :3] * rank).tolist()
    out["objects"] = bmt.store.allgather_objects(rank), bmt.store.broadcast_object({"from": rank}, src=1)
    out["mean"] = bmt.sum_loss(torch.tensor(float(rank)), comm=bmt.config["tp_comm"]).item()
    head, words = bmt.nn.VPEmbedding(12, 8, dtype=torch.float32), torch.arange(6)
    bmt.init_parameters(head)
    hidden = torch.randn(1, 6, 8, generator=torch.Generator().manual_seed(2)).chunk(2, 1)[rank]
    logits = head(hidden, True).detach().requires_grad_()
    bmt.loss.FusedCrossEntropy(parallel=True)(logits[0], words).backward()
    return out | {"head": head.state_dict()["weight"], "logits": logits.detach(), "slope": logits.grad}


def test_collectives_of_two_ranks():
    "A divided vocabulary has the logits, and the gradients of the loss, of a whole one"
    both = run_ranks(collectives)
    whole = torch.randn(1, 6, 8, generator=torch.Generator().manual_seed(2)) @ both[0]["head"].T
    whole.requires_grad_()
    torch.nn.functional.cross_entropy(whole[0], torch.arange(6)).backward()
    for rank, out in enumerate(both):
        assert out["grad"] == 2 * 2 * 2 / (rank + 1)                       # of both ranks' losses
        assert out["gathered"] == [0, 1, 2, 3, 1, 2, 3, 4] and out["max"] == [1, 2, 3, 4]
        assert out["scattered"] == [[1, 3], [5, 7]][rank] and out["received"] == [[1, 2, 3, 4], [0, 1, 2, 3]][rank]
        assert out["rows"] == [[0.] * 3] * 2 + [[1.] * 3] * 2
        assert out["objects"] == ([0, 1], {"from": 1}) and out["mean"] == 0.5
        close(out["logits"], whole.detach().chunk(2, -1)[rank], 1e-5)
        close(out["slope"], whole.grad.chunk(2, -1)[rank], 1e-5)


def hidden():
    """{kind: statistics} of a model whose blocks are plain, blocks, in a list, and in a pipeline

    For a loss of its output, of the blocks' inputs, and of both.
    """
    import bmlab.bmtrain as bmt
    bmt.init_distributed(seed=0)
    class Line(bmt.DistributedModule):
        def __init__(self):
            super().__init__()
            self.weight = bmt.DistributedParameter(torch.empty(8, 8), init_method=torch.nn.init.xavier_normal_)
        def forward(self, x):
            bmt.inspect.record_tensor(x, "into")
            return torch.nn.functional.linear(x, self.weight)
    wraps = {"plain": torch.nn.ModuleList, "blocks": lambda ms: torch.nn.ModuleList(map(bmt.Block, ms)),
             "list": bmt.TransformerBlockList, "pipeline": bmt.PipelineTransformerBlockList}
    out = {kind: [] for kind in wraps}
    for kind in wraps:
        for inside, last in ((0, 1), (1, 0), (1, 1)):
            torch.manual_seed(33)
            pre, ms, post = Line(), [Line() for _ in range(2)], Line()
            for m in (pre, *ms, post): bmt.init_parameters(m)
            ms, x = wraps[kind](ms), torch.arange(48.).view(2, 3, 8).sin() * (1 + bmt.rank())
            weights = torch.randn(3, 2, 3, 8)
            with bmt.inspect.inspect_tensor() as seen:
                y, inputs = pre(x), []
                if kind in ("list", "pipeline"): y, inputs = ms(y, return_hidden_states=True)
                else:
                    for m in ms:
                        inputs.append(y)
                        y = m(y)
                loss = last * (post(y) * weights[2]).sum()
                loss = loss + inside * sum((h * w).sum() for h, w in zip(inputs, weights))
                loss.backward()
            rows = [r for m in (pre, ms, post) for r in bmt.inspect.inspect_model(m, "*")]
            four = "std", "mean", "max", "min"
            numbers = [[*r["shape"], *(r[k] for k in (*four, "grad_std", "grad_mean"))] for r in rows]
            told = [[*r["shape"], *(r[k] for k in four)] for r in seen.get_summary()]
            out[kind].append((numbers, told))
    return out


def test_lists_blocks_and_plain_modules_agree():
    first, second = run_ranks(hidden)
    for out in (first, second):
        for kind, losses in out.items():
            for got, plain in zip(losses, first["plain"], strict=True):
                for a, b in zip(got, plain, strict=True): close(a, b, 1e-4)


def thawed():
    "Gradients' norms of a block whose parameters are frozen and thawed between steps"
    import bmlab.bmtrain as bmt
    bmt.init_distributed(seed=0)
    net = bmt.TransformerBlockList([bmt.Block(bmt.nn.Linear(8, 8)) for _ in range(2)])
    bmt.init_parameters(net)
    out, x = [], torch.arange(24.).view(3, 8).cos() + bmt.rank()
    for weight, bias in ((True, False), (False, True), (True, False)):
        net[0].weight.requires_grad_(weight)
        net[0].bias.requires_grad_(bias)
        net(x).square().mean().backward()
        out.append([(r["grad_std"], r["grad_mean"]) for r in bmt.inspect.inspect_model(net[0], "*")])
    return out


def test_freezing_between_steps():
    for first, second, third in run_ranks(thawed):
        assert first[1] == (0, 0) and first[0] != (0, 0)                   # a frozen bias has no gradient
        assert second[0] == first[0] and second[1] != (0, 0)               # the weight's stays as it was
        assert third[0] != second[0] and third[1] == second[1]

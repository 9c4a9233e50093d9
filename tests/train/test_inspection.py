"Statistics of sharded models against those of the whole, on two and four processes."
import pytest
import torch

from bmlab.train.processes import run_ranks
from bmlab.train.inspection import inspect_model

pytestmark = pytest.mark.long
NUMBERS = ["mean", "std", "min", "max", "grad_mean", "grad_std"]


def net(seed=0):
    "Odd shapes: five rows or one row on two ranks, a scale, a frozen layer and a shared one, far from zero mean"
    from torch import nn
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1), nn.Linear(1, 7), nn.LayerNorm(7), nn.Linear(7, 6)
    )
    model.append(model[0])
    with torch.no_grad(): model[3].weight += 1000
    model[5].requires_grad_(False)
    # (the mean of 1000 makes float32 gradients depend on the order of sums)
    return model.double()


def loss(model, rows): return model(rows).square().mean()


def whole(rows):
    model = net()
    loss(model, rows).backward()
    return inspect_model(model)


def sharded(rows, kind):
    "The table of one rank, for one way of sharding"
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor
    model, rank, world = net(), dist.get_rank(), dist.get_world_size()
    # hand-made: columns of one matrix, rows of another; the rest is plain
    if kind == "tensor":
        mesh = init_device_mesh("cpu", (world,))
        loss(model, rows).backward()
        for i, dim in ((0, 1), (5, 0)):
            grad = model[i].weight.grad
            model[i].weight = torch.nn.Parameter(
                distribute_tensor(model[i].weight.detach(), mesh, [Shard(dim)]), requires_grad=i == 0
            )
            if grad is not None: model[i].weight.grad = distribute_tensor(grad, mesh, [Shard(dim)])
        return inspect_model(model)
    mesh = (
        init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard")) if kind == "hybrid"
        else init_device_mesh("cpu", (world,))
    )
    for i in (2, 3, 5): fully_shard(model[i], mesh=mesh, reshard_after_forward=kind != "zero2")
    fully_shard(model, mesh=mesh)
    loss(model, rows[rank::world]).backward()
    if kind == "one without": model[2].weight.grad = None if rank else model[2].weight.grad
    return inspect_model(model)


def close(table, want, columns=NUMBERS):
    assert table[["name", "shape"]].equals(want[["name", "shape"]])
    torch.testing.assert_close(
        torch.tensor(table[columns].to_numpy(float)), torch.tensor(want[columns].to_numpy(float)), rtol=1e-6, atol=1e-6,
        equal_nan=True,
    )


def variants(rows, kinds): return {kind: sharded(rows, kind) for kind in kinds}


def test_two_ranks():
    rows = torch.randn(8, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    want = whole(rows)
    assert want.grad_std.isna().sum() == 3                 # the frozen layer, and a single element, which has no spread
    for tables in run_ranks(variants, rows, ["zero3", "zero2", "tensor"]):
        for kind in tables: close(tables[kind], want)


def test_four_ranks():
    rows = torch.randn(8, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    want = whole(rows)
    for tables in run_ranks(variants, rows, ["zero3", "hybrid", "one without"], world_size=4):
        close(tables["zero3"], want)
        close(tables["hybrid"], want)
        close(tables["one without"], want, NUMBERS[:4])    # all ranks take part, so that nobody waits for ever


def recomputed_blocks(rows):
    "A block that is recomputed inside a sharded one: recorded once, the gradient that of this rank's rows"
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.utils.checkpoint import checkpoint
    from bmlab.train.inspection import inspect_tensor, record_tensor

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.up = nn.Linear(6, 6)
        def inner(self, x): return torch.tanh(record_tensor(self.up(x), "up"))
        def forward(self, x): return checkpoint(self.inner, x, use_reentrant=False) if self.recompute else self.inner(x)

    out = {}
    for recompute in (False, True):
        torch.manual_seed(0)
        model, mesh = nn.Sequential(Block(), Block()), init_device_mesh("cpu", (2,))
        for block in model:
            block.recompute = recompute
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        with inspect_tensor(model, "[r]\\d") as t: model(rows[dist.get_rank()::2]).square().mean().backward()
        out[recompute] = t.table
    return out


def test_recomputed_inside_sharded():
    for tables in run_ranks(recomputed_blocks, torch.randn(8, 6, generator=torch.Generator().manual_seed(0))):
        assert tables[True].name.tolist() == ["up", "0", "up", "1"] and tables[True].equals(tables[False])
        assert tables[True].grad_std.notna().all()


def test_a_sharded_activation_counts_as_the_whole():
    def recorded():
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Partial, Shard, distribute_tensor, DTensor
        from bmlab.train.inspection import inspect_tensor, record_tensor
        mesh, x = init_device_mesh("cpu", (2,)), torch.arange(15.).view(5, 3)
        d = distribute_tensor(x, mesh, [Shard(0)]).requires_grad_()
        with inspect_tensor() as t:
            record_tensor(d, "sharded").square().sum().backward()
            record_tensor(DTensor.from_local(x / 2, mesh, [Partial()]), "partial")
        y = x.clone().requires_grad_()
        with inspect_tensor() as plain:
            record_tensor(y, "sharded").square().sum().backward()
            record_tensor(x, "partial")
        return t.table, plain.table
    for table, plain in run_ranks(recorded): close(table, plain)

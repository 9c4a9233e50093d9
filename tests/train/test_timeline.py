"The timeline of a sharded step on two processes: collectives have a lane of their own."
import json

import pytest

from bmlab.train.processes import run_ranks

pytestmark = pytest.mark.long


def sharded_steps(folder):
    import torch, torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from bmlab.train.timeline import timeline
    torch.manual_seed(0)
    model, mesh = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4))), init_device_mesh("cpu", (2,))
    for layer in model: fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    opt, x = torch.optim.AdamW(model.parameters()), torch.randn(64, 64)
    def step():
        model(x).square().mean().backward()
        opt.step()
        opt.zero_grad()
    t = timeline(step, steps=2, trace=f"{folder}/{dist.get_rank()}.json")
    return t.events, t.table, t.starts_us, t.length_us


def test_two_ranks(tmp_path):
    for rank, (events, table, starts, length) in enumerate(run_ranks(sharded_steps, str(tmp_path))):
        assert set(table.index) == {"forward", "backward", "optimizer", "gloo", "idle"} and len(starts) == 2
        assert events.start_us.min() >= 0 and events.end_us.max() <= length
        gathers = events[(events.lane == "gloo") & (events.name == "gloo:all_gather")]
        for a, b in zip(starts, [*starts[1:], length]):
            assert ((gathers.start_us >= a) & (gathers.end_us <= b)).sum() >= 4  # each layer's weights, in each step
        assert (table.exposed_ms.drop("idle") <= table.busy_ms.drop("idle") + 1e-9).all()
        assert "traceEvents" in json.loads((tmp_path / f"{rank}.json").read_text())


def test_the_offloaded_optimizer_has_its_lane():
    import torch
    from bmlab.train.offload import AdamW
    from bmlab.train.timeline import timeline
    torch.manual_seed(0)
    model, x = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(4))), torch.randn(64, 256)
    opt = AdamW(model, lr=1e-3, offload=1.0)
    def step():
        model(x).square().mean().backward()
        opt.step()
        opt.zero_grad()
    t = timeline(step, steps=3, optimizer=opt)
    adam = t.events[t.events.lane == "host Adam"]
    assert len(adam) >= 2 and (adam.end_us > adam.start_us).all() and adam.end_us.max() <= t.length_us + 1e-6
    assert opt.trace is None                                       # noting has ended
    assert timeline(step, optimizer=AdamW(model)).step_ms > 0      # nothing on the host, nothing to note
    opt.flush()

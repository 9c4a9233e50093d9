"The loop over processes: killed and taken up again, accumulation, offload, data parallel, sharded with a delta."
import os, signal
from pathlib import Path

import pytest
import torch

from bmlab.core import set_seed
from bmlab.train.processes import run_ranks

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.long
ROWS = (torch.arange(24)[:, None] * 3 + torch.arange(12)) % 90
# (what one rank says all say; others of these tests run on two)
ON_TWO = pytest.param(2, marks=pytest.mark.slow)


def gpt(dropout=0.1, **options):
    import transformers as tf
    set_seed(0)
    return tf.GPT2LMHeadModel(
        tf.GPT2Config(
            n_embd=32, n_layer=2, n_head=4, vocab_size=99, n_positions=16, resid_pdrop=dropout, embd_pdrop=dropout,
            attn_pdrop=dropout, **options,
        )
    )


def mine(rank, world, batch=2):
    from bmlab.data.samples import Batches
    return Batches(ROWS[rank::world], batch=batch, seed=rank)


def run(folder, kill_at=None, kind="adamw", **options):
    "A run on this rank's rows, which dies by kill -9 when it comes to the batch `kill_at`"
    import torch.distributed as dist
    from bmlab.train.offload import AdamW
    from bmlab.train.optim import Cosine, OptimManager
    from bmlab.train.sharding import shard
    from bmlab.train.loop import fit, model_loss
    up = dist.is_initialized()
    r, w = (dist.get_rank(), dist.get_world_size()) if up else (0, 1)
    model = shard(gpt(), dtype=None, checkpoint=1)
    opt = AdamW(model, lr=1e-2, offload=0.5) if kind == "offload" else torch.optim.AdamW(model.parameters(), lr=1e-2)
    om = OptimManager(loss_scale=2.**8, loss_scale_steps=4, model=model)
    om.add_optimizer(opt, Cosine(opt, start_lr=1e-2, warmup_iter=2, end_iter=10))
    seen = []
    def dies(model, batch):
        if model.training: seen.append(1)
        if len(seen) == kill_at and r == w - 1: os.kill(os.getpid(), signal.SIGKILL)
        return model_loss(model, batch)
    return fit(
        model, mine(r, w), om, steps=8, loss=dies, clip=0.5, accumulate=2, save_to=folder, save_every=2, plot=False,
        held_out=list(mine(r, w)), every=3, **options,
    )


@pytest.mark.parametrize("world, kind", [
    (1, "offload"), pytest.param(2, "adamw", marks=pytest.mark.slow), (2, "offload")])
def test_a_killed_run_goes_on_bit_for_bit(tmp_path, world, kind):
    "Dropout, a schedule, a loss scale, a clip that triggers, micro-batches, recompute: as if nothing had happened"
    ranks = lambda *args: [run(*args)] if world == 1 else run_ranks(run, *args, world_size=world)
    whole = ranks(tmp_path / "whole", None, kind)
    resume = lambda folder: run(folder, None, kind, resume=True)
    if world == 1:
        with pytest.raises(RuntimeError): run_ranks(run, tmp_path / "cut", 11, kind, world_size=1)
    else:
        with pytest.raises(RuntimeError): run_ranks(run, tmp_path / "cut", 11, kind, world_size=world)
    assert sorted(p.name for p in (tmp_path / "cut").iterdir() if not p.name.startswith(".")) == [
        "latest", "step-00000002", "step-00000004"
    ]
    went_on = [resume(tmp_path / "cut")] if world == 1 else run_ranks(resume, tmp_path / "cut", world_size=world)
    for a, b in zip(whole, went_on):
        for column in ("step", "loss", "grad_norm", "lr", "loss_scale", "held_out"):
            assert a[column].dropna().tolist() == b[column].dropna().tolist(), column
        assert len(a) == 9 and (a.grad_norm.dropna() > 0.5).any()


def accumulated(wrap, accumulate, folder=None):
    "Losses and weights of four steps of eight rows, however they are cut and spread"
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from bmlab.train.sharding import shard
    from bmlab.train.loop import fit
    r, w = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    model = gpt(dropout=0.).double()
    runner = (
        DistributedDataParallel(model) if wrap == "ddp" else shard(model, dtype=None, zero=int(wrap), checkpoint=False)
        if wrap else model
    )
    size = 8 // w // accumulate
    batches = [{"input_ids": b, "labels": b} for i in range(0, 24, 8) for b in ROWS[i:i + 8][r::w].split(size)]
    log = fit(
        runner, batches, torch.optim.SGD(model.parameters(), lr=0.5), steps=4, clip=1.0, accumulate=accumulate,
        plot=False,
    )
    return log, {
        n: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone() for n, p in model.named_parameters()
    }


def all_ways(): return {(wrap, n): accumulated(wrap, n) for wrap in ("ddp", "2", "3") for n in (1, 2, 4)}


def test_accumulation_is_one_large_batch():
    whole, weights = accumulated("", 1)
    for ranks in run_ranks(all_ways):
        for way, (log, got) in ranks.items():
            torch.testing.assert_close(log.loss.tolist(), whole.loss.tolist(), rtol=1e-6, atol=0, msg=str(way))
            torch.testing.assert_close(
                log.grad_norm.tolist(), whole.grad_norm.tolist(), rtol=1e-6, atol=0, msg=str(way)
            )  # a loss is float32 in transformers
            for n, p in weights.items(): torch.testing.assert_close(got[n], p, rtol=1e-6, atol=1e-6, msg=str((way, n)))


def other_world(folder, resume=False):
    import torch.distributed as dist
    from bmlab.train.sharding import shard
    from bmlab.train.loop import fit
    r, w = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    model = shard(gpt(dropout=0.), dtype=None)
    batches = [{"input_ids": b, "labels": b} for i in range(0, 24, 4) for b in [ROWS[i:i + 4][r::w]]]
    return fit(
        model,
        batches,
        torch.optim.AdamW(model.parameters(), lr=1e-2),
        steps=3 + 3 * resume,
        save_to=folder,
        resume=resume,
        plot=False,
    )


def test_a_run_goes_on_at_another_world_size(tmp_path):
    whole = other_world(tmp_path / "whole", resume=True)
    other_world(tmp_path / "one")
    went_on = run_ranks(other_world, tmp_path / "one", True)[0]
    torch.testing.assert_close(went_on.loss.tolist(), whole.loss.tolist(), rtol=2e-5, atol=2e-5)
    two = run_ranks(other_world, tmp_path / "two")
    assert len(two[0]) == 3
    torch.testing.assert_close(
        other_world(tmp_path / "two", resume=True).loss.tolist(), whole.loss.tolist(), rtol=2e-5, atol=2e-5
    )


def test_a_sampler_of_ranks_hears_of_each_pass(tmp_path):
    "Another order in each pass, the same order after a resume"
    from bmlab.train.loop import fit
    seen = []
    def loss(model, x):
        seen.append(x.flatten().int().tolist())
        return model(x).mean()
    def go(folder, steps, **options):
        model = torch.nn.Linear(1, 1)
        rows = torch.arange(12.)[:, None]
        loader = torch.utils.data.DataLoader(
            rows, batch_size=2, sampler=torch.utils.data.DistributedSampler(rows, num_replicas=2, rank=1)
        )
        seen.clear()
        fit(
            model, loader, torch.optim.SGD(model.parameters(), lr=0.1), steps=steps, loss=loss, plot=False,
            save_to=folder, **options,
        )
        return list(seen)
    whole = go(tmp_path / "a", 8)
    assert whole[:3] != whole[3:6]
    assert go(tmp_path / "b", 5) + go(tmp_path / "b", 8, resume=True) == whole


def test_a_complete_run_says_so(tmp_path, caplog):
    "Asked for as many steps as are done, or fewer: no step, a warning; asked for more: the rest"
    from bmlab.train.loop import fit
    def go(steps):
        caplog.clear()
        model = gpt(dropout=0.)
        log = fit(
            model, mine(0, 1), torch.optim.SGD(model.parameters(), lr=0.1), steps=steps, save_to=tmp_path, resume=True,
            plot=False,
        )
        return (
            log.loss.tolist(),
            [p.detach().clone() for p in model.parameters()],
            [r.message for r in caplog.records if r.name == "bmlab.train.loop"],
        )
    losses, weights, said = go(3)
    assert len(losses) == 3 and said == []
    for steps in (3, 2):
        again, same, said = go(steps)
        assert (
            again == losses and all(map(torch.equal, weights, same)) and said
            == [
                f"steps={steps}, but the run in {tmp_path} is complete with 3: no step is made; give more steps to go "
                "on"
            ]
        )
    again, other, said = go(4)
    assert again[:3] == losses and len(again) == 4 and said == [] and not all(map(torch.equal, weights, other))


def spoilt(folder, overlap):
    "A loss that is not a number on the last rank, in step 3: (message, weights finite?, the log from step 2 on)"
    import math
    import torch.distributed as dist
    from bmlab.train.offload import AdamW
    from bmlab.train.sharding import shard
    from bmlab.train.loop import Diverged, fit, model_loss
    r, w = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    model = shard(gpt(dropout=0.), dtype=None)
    opt, seen = AdamW(model, lr=1e-2, offload=0.5, overlap=overlap), []
    def loss(model, batch):
        seen.append(1)
        return model_loss(model, batch) * (math.nan if len(seen) == 5 and r == w - 1 else 1)
    go = lambda **options: fit(
        model, mine(r, w), opt, steps=4, accumulate=2, save_to=folder, save_every=2, plot=False, **options
    )
    try:
        go(loss=loss)
        said = ""
    except Diverged as e: said = str(e)
    finite = all((p.to_local() if hasattr(p, "to_local") else p).isfinite().all().item() for p in model.parameters())
    return said, finite, go(resume=True).loss.tolist()


@pytest.mark.parametrize("world", [1, 2])
def test_a_diverged_loss_says_whether_the_weights_are_whole(tmp_path, world):
    "An optimizer that uses gradients as they arrive has made the step; from a checkpoint it goes on as the other does"
    ends = {}
    for overlap in ("forward", "backward"):
        folder = tmp_path / overlap
        for said, finite, losses in [spoilt(folder, overlap)] if world == 1 else run_ranks(spoilt, folder, overlap):
            assert "the loss of step 3 is nan" in said and finite
            assert ("the step was not taken" in said) == (overlap == "forward") and (
                "the step is half made" in said
            ) == (overlap == "backward")
            assert overlap == "forward" or f"resume=True goes on from {tmp_path / overlap / 'step-00000002'}" in said
            ends.setdefault(overlap, losses)
            assert len(losses) == 4 and torch.tensor(losses).isfinite().all()
    assert ends["forward"] == ends["backward"]


class Poisoned(torch.autograd.Function):
    "The numbers as they are; a gradient that holds an infinity"
    @staticmethod
    def forward(ctx, x): return x.clone()
    @staticmethod
    def backward(ctx, g): return g.index_fill(-1, torch.tensor([1]), float("inf"))


def poisoned(folder, kind, options, steps=5, at=3, **more):
    "A bad gradient on the last rank in step `at`: (message, weights as before?, finite?, newest checkpoint, log)"
    import torch.distributed as dist
    from bmlab.train.checkpoint import latest
    from bmlab.train.offload import AdamW
    from bmlab.train.sharding import shard
    from bmlab.train.loop import Diverged, fit, model_loss
    r, w = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    model = shard(gpt(dropout=0.), dtype=None, checkpoint=False)
    made = {
        "sgd": lambda: torch.optim.SGD(model.parameters(), lr=1e-2),
        "adamw": lambda: torch.optim.AdamW(model.parameters(), lr=1e-2),
    }
    opt = (
        made[kind]() if kind in made
        else AdamW(
            model,
            lr=1e-2,
            offload=0.5 if kind == "part" else 1.0,
            overlap="forward" if kind == "forward" else "backward",
            unit=2000,
        )
    )
    local, seen = (
        lambda: [(p.to_local() if hasattr(p, "to_local") else p).detach().clone() for p in model.parameters()], []
    )
    accumulate = options.get("accumulate", 1)
    def loss(model, batch):
        seen.append(local())
        # (again where the step is looked at once more)
        bad = len(seen) >= at * accumulate and r == w - 1
        hook = (
            model.transformer.h[1].mlp.register_forward_hook(lambda m, args, out: Poisoned.apply(out)) if bad else None
        )
        try: return model_loss(model, batch)
        finally:
            if bad: hook.remove()
    go = lambda **o: fit(
        model, mine(r, w), opt, steps=steps, save_to=folder, save_every=2 if folder else None, plot=False, **options,
        **more, **o,
    )
    try:
        go(loss=loss)
        said = ""
    except Diverged as e: said = str(e)
    now = local()
    same, finite = all(map(torch.equal, seen[-1], now)), all(t.isfinite().all().item() for t in now)
    newest = latest(folder).name if folder and latest(folder) else None
    return said, same, finite, newest, go(resume=True).loss.tolist() if newest else None


WAYS = {
    "sgd": ("sgd", {}),
    "micro-batches": ("adamw", dict(accumulate=2)),
    "forward": ("forward", {}),
    "clip": ("adamw", dict(clip=1.0)),
}


def poisoned_ways(folder, ways): return {name: poisoned(folder / name, *way) for name, way in ways.items()}


@pytest.mark.parametrize("world", [1, 2])
def test_a_step_on_a_gradient_that_is_not_finite_is_not_taken(tmp_path, world):
    "With a clip and without: the weights are those before it, and a run goes on from the checkpoint before"
    for ways in [poisoned_ways(tmp_path, WAYS)] if world == 1 else run_ranks(poisoned_ways, tmp_path, WAYS):
        for name, (said, same, finite, newest, losses) in ways.items():
            assert (
                "the gradient of step 3 is not finite (nearest to the loss, that of transformer.h.1.mlp." in said
                and said.endswith("(the step was not taken)")
            ), name
            assert ("on rank" in said) == (world == 2) and same and finite and newest == "step-00000002", name
            assert len(losses) == 5 and torch.tensor(losses).isfinite().all(), name


@pytest.mark.parametrize("world", [1, ON_TWO])
def test_a_block_whose_gradient_is_not_finite_is_not_updated(tmp_path, world):
    "Gradients used as they arrive: the run ends before anything is saved, says whose gradient it was, and what to do"
    kinds = {"part": ("part", {}), "whole": ("whole", {})}                    # of the state on the host
    for ways in [poisoned_ways(tmp_path, kinds)] if world == 1 else run_ranks(poisoned_ways, tmp_path, kinds):
        for name, (said, same, finite, newest, losses) in ways.items():
            # (a shard's whole block arrives at once)
            assert "the gradient of step 3 is not finite (nearest to the loss, that of transformer.h.1." in said, name
            assert "half made" in said and f"resume=True goes on from {tmp_path / name / 'step-00000002'}" in said, name
            # (the final norm is updated; sharded, it lies in a block with the embedding)
            assert finite and newest == "step-00000002" and (world == 2 or not same), name
            assert len(losses) == 5 and torch.tensor(losses).isfinite().all(), name


def test_a_bad_step_without_a_checkpoint_says_so(tmp_path):
    said, *_ = poisoned(None, "whole", {})
    assert "There is no checkpoint to go on from: give save_to= and save_every=" in said
    said, _, _, newest, _ = poisoned(tmp_path, "whole", {}, at=1)
    assert f"There is no checkpoint to go on from: {tmp_path} holds none yet" in said and newest is None


class Overflows(torch.optim.SGD):
    "Whose step number `at` leaves what is not finite, in a weight or in its own state"
    def __init__(self, params, at, where):
        super().__init__(params, lr=1e-2, momentum=0.9)
        self.at, self.where, self.made = at, where, 0
    def step(self, closure=None):
        super().step()
        self.made += 1
        if self.made != self.at: return
        p = self.param_groups[0]["params"][-1]
        t = p if self.where == "weight" else self.state[p]["momentum_buffer"]
        with torch.no_grad(): (t.to_local() if hasattr(t, "to_local") else t).view(-1)[-1:].fill_(float("nan"))


def overflows(folder, ways): return [overflow(folder / "".join(map(str, way)), *way) for way in ways]


def overflow(folder, where, background):
    import torch.distributed as dist
    from bmlab.train.checkpoint import latest
    from bmlab.train.sharding import shard
    from bmlab.train.loop import Diverged, fit
    r, w = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    model = shard(gpt(dropout=0.), dtype=None)
    go = lambda at, **options: fit(
        model, mine(r, w), Overflows(model.parameters(), at, where), steps=6, save_to=folder, save_every=2,
        save_in_background=background, plot=False, **options,
    )
    try:
        go(4)
        said = ""
    except Diverged as e: said = str(e)
    return said, latest(folder).name, go(99, resume=True).loss.tolist()


@pytest.mark.parametrize("world", [1, ON_TWO])
def test_what_is_not_finite_is_never_the_newest_checkpoint(tmp_path, world):
    ways = [("weight", False), ("weight", True), ("state", False)]            # what, saved in the background?
    words = {
        "weight": "the weight transformer.ln_f.bias",
        "state": "the optimizer's momentum_buffer of transformer.ln_f.bias",
    }
    for rank in [overflows(tmp_path, ways)] if world == 1 else run_ranks(overflows, tmp_path, ways):
        for (where, background), (said, newest, losses) in zip(ways, rank):
            assert said.startswith("after step 4 ") and words[where] in said and "no checkpoint was written" in said
            assert said.endswith(f"resume=True goes on from {tmp_path / f'{where}{background}' / 'step-00000002'}")
            assert newest == "step-00000002" and len(losses) == 6


def spoilt_on_disk(folder, steps, **options):
    "Checkpoints as they were written before they were looked at; those of `steps` hold what is not finite"
    import torch.distributed as dist
    from bmlab.train import checkpoint
    from bmlab.train.sharding import shard
    from bmlab.train.loop import fit
    r, w = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    model = shard(gpt(dropout=0.), dtype=None)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batches = mine(r, w)
    fit(model, batches, opt, steps=6, save_to=folder, save_every=2, keep=None, plot=False)
    look, checkpoint._spoilt = getattr(checkpoint, "_spoilt", None), lambda *_: None
    for step in steps:
        name = folder / f"step-{step:08d}"
        found = checkpoint.load_weights(model, name, optimizer=opt)
        if step % 4: next(iter(opt.state.values()))["exp_avg"].fill_(float("nan"))
        else: model.transformer.ln_f.weight.data.fill_(float("inf"))
        from bmlab.train.optim import OptimManager
        om = OptimManager(model=model)
        om.add_optimizer(opt)
        path = checkpoint.save(model, folder / "new", manager=om, step=step, extra=found["extra"]).path
        if r == 0:
            import shutil
            shutil.rmtree(name)
            path.rename(name)
        if dist.is_initialized(): dist.barrier()
    checkpoint._spoilt = look
    said, again = [], shard(gpt(dropout=0.), dtype=None)
    import logging
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("bmlab.train.loop").addHandler(handler)
    try:
        log = fit(
            again,
            mine(r, w),
            torch.optim.AdamW(again.parameters(), lr=1e-2),
            steps=8,
            save_to=folder,
            resume=True,
            keep=None,
            plot=False,
        ).loss.tolist()
    except ValueError as e: return str(e), said
    return log, said


@pytest.mark.parametrize("world", [1, ON_TWO])
def test_a_run_goes_on_from_the_newest_good_checkpoint(tmp_path, world):
    ranks = lambda *args: [spoilt_on_disk(*args)] if world == 1 else run_ranks(spoilt_on_disk, *args)
    (whole, _), *_ = ranks(tmp_path / "a", [])
    for i, (log, said) in enumerate(ranks(tmp_path / "b", [4, 6])):
        assert log == whole and len(said) == (i == 0)
        if said:
            assert (
                "step-00000002" in said[0] and "step-00000006 (the optimizer's exp_avg" in said[0]
                and "step-00000004 (the weight transformer.ln_f.weight" in said[0]
            )
    for error, _ in ranks(tmp_path / "c", [2, 4, 6]):
        assert (
            "no checkpoint there is fit to go on from: step-00000006" in error
            and "begin anew in another folder" in error
        )


def test_a_loss_scale_that_skips_for_ever_ends_the_run():
    from bmlab.train.optim import OptimManager
    from bmlab.train.loop import Diverged, fit
    model = gpt(dropout=0.)
    om = OptimManager(loss_scale=4., model=model)
    om.add_optimizer(torch.optim.SGD(model.parameters(), lr=.1))
    model.transformer.h[1].mlp.c_fc.weight.register_hook(lambda g: g * float("inf"))
    with pytest.raises(Diverged, match="no step was taken since step 0: the gradients are not finite at any loss "
                                       "scale, now 1") as e:
        fit(model, mine(0, 1), om, steps=300, plot=False)
    assert len(e.value.log) == 99


def apart(capture):
    import logging
    from bmlab.train.loop import fit
    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("bmlab.train.loop").addHandler(handler)
    model = gpt()
    fit(model, mine(0, 1), torch.optim.SGD(model.parameters(), lr=.1), steps=1, plot=False)
    return said


def test_ranks_that_train_apart_are_warned():
    for said in run_ranks(apart, None): assert "each for itself" in said[0]


@pytest.mark.cuda
def test_on_a_gpu(tmp_path):
    from bmlab.train.offload import AdamW
    from bmlab.train.sharding import shard
    from bmlab.train.loop import Diverged, fit
    torch.use_deterministic_algorithms(False)
    def go(folder, steps, **options):
        model = shard(gpt(dropout=0.).cuda(), dtype=torch.bfloat16)
        return fit(
            model, mine(0, 1), AdamW(model, lr=1e-2, offload=0.5), steps=steps, clip=0.5, accumulate=2, save_to=folder,
            plot=False, **options,
        ), model
    whole, _ = go(tmp_path / "a", 6)
    go(tmp_path / "b", 3, save_in_background=True)
    went_on, model = go(tmp_path / "b", 6, resume=True)
    torch.testing.assert_close(went_on.loss.tolist(), whole.loss.tolist(), rtol=1e-2, atol=1e-2)
    assert (went_on.memory > 0).all() and went_on.memory.iloc[-1] == torch.cuda.max_memory_allocated()
    model.transformer.h[1].mlp.c_fc.register_forward_hook(lambda m, args, out: out * float("nan"))
    with pytest.raises(Diverged, match="transformer.h.1.mlp.c_fc"):
        fit(model, mine(0, 1), torch.optim.SGD(model.parameters(), lr=.1), steps=1, plot=False)


def test_a_learning_rate_that_a_resumed_run_does_not_use_is_said(tmp_path, caplog):
    from bmlab.train.loop import fit
    batches = [torch.randn(2, 4) for _ in range(3)]
    def run(steps, lr, **more):
        torch.manual_seed(0)
        net = torch.nn.Linear(4, 1)
        loss = lambda model, x: model(x).square().mean()
        return fit(net, batches, loss=loss, steps=steps, lr=lr, plot=False, save_to=tmp_path, **more)
    run(2, 1e-2)
    run(3, 1e-2, resume=True)
    assert "not used" not in caplog.text
    run(4, 1e-5, resume=True)
    assert "not used: lr=1e-05 (the checkpoint's is 0.01)" in caplog.text


def test_evaluation_keeps_no_graph_and_its_batches_in_place(tmp_path):
    import numpy as np
    from bmlab.data.batches import Packed
    from bmlab.data.shards import ShardWriter, seal_shards
    from bmlab.train.loop import evaluate
    rng = np.random.default_rng(0)
    with ShardWriter(tmp_path, 99, "shard", 10**6, {"eos": 0}) as w:
        for i in range(23): w.write([*rng.integers(1, 99, rng.integers(3, 30)).tolist(), 0], "s", str(i))
    packed, seen = Packed(seal_shards(tmp_path), seq=16, batch=4), []
    def loss(model, batch):
        seen.append((torch.is_grad_enabled(), batch["input_ids"].sum().item()))
        return model.weight.sum() * 0 + batch["input_ids"].float().mean()
    net = torch.nn.Linear(2, 2)
    first, n = evaluate(net, packed, loss), len(seen)
    assert evaluate(net, packed, loss) == first and seen[:n] == seen[n:] and not any(grad for grad, _ in seen)


def test_micro_batches_count_as_their_losses_do():
    "Pairs with −100s, a label a row, answers from a place to a place: parts of unlike widths are as one batch"
    import torch.nn.functional as F
    from torch import nn

    from bmlab.train.loop import evaluate, fit
    from bmlab.train.losses import lm_loss
    draw = torch.Generator().manual_seed(0)
    ids = [torch.randint(1, 20, (2, n), generator=draw) for n in (30, 6)]
    told = [x.masked_fill(torch.arange(x.shape[1]) >= torch.tensor(ends)[:, None], -100)
            for x, ends in zip(ids, ([3, 4], [6, 6]))]  # fmt: skip
    def make():
        torch.manual_seed(0)
        return nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 20, bias=False))
    def tokens(m, how):
        sums = [
            F.cross_entropy(m(x)[:, :-1].flatten(0, 1), t[:, 1:].flatten(), ignore_index=-100, reduction=how)
            for x, t in zip(ids, told)]
        return sum(sums) / sum(int((t[:, 1:] != -100).sum()) for t in told)
    of_rows = lambda m, b: F.cross_entropy(m(b["input_ids"]).mean(1), b.get("label", b.get("start_positions")))
    def rows(m, _):
        y = torch.tensor([3, 4, 5, 6])
        return F.cross_entropy(torch.cat([m(x).mean(1) for x in ids]), y)
    y = torch.tensor([[3, 4], [5, 6]])
    cases = [
        (list(zip(ids, told)), lm_loss, tokens),
        ([dict(input_ids=x, label=t) for x, t in zip(ids, y)], of_rows, rows),
        ([dict(input_ids=x, start_positions=t) for x, t in zip(ids, y)], of_rows, rows),
    ]
    for batches, loss, whole in cases:
        mine, theirs = make(), make()
        before = evaluate(mine, batches, loss, progress=None)
        value = whole(theirs, "sum")
        assert abs(before - value.item()) < 1e-6
        sgd, steps = (torch.optim.SGD(m.parameters(), lr=1.0) for m in (mine, theirs))
        log = fit(mine, batches, sgd, steps=1, accumulate=2, loss=loss, plot=False)
        assert abs(log.loss.iloc[0] - value.item()) < 1e-6
        value.backward()
        steps.step()
        for a, b in zip(mine.parameters(), theirs.parameters()): torch.testing.assert_close(a, b, atol=1e-6, rtol=0)


def small(n=4, size=2, seed=0, length=6):
    draw = torch.Generator().manual_seed(seed)
    return [dict(input_ids=(x := torch.randint(1, 16, (size, length), generator=draw)), labels=x) for _ in range(n)]


def test_what_was_done_before_an_error_is_saved(tmp_path):
    from bmlab.train.loop import fit
    spoilt = small(4)
    spoilt[2] = spoilt[2] | dict(labels=torch.full((2, 6), -100))
    with pytest.raises(ValueError, match="step 3: no label counts") as error:
        fit(gpt(), spoilt, None, lr=1e-3, steps=4, save_to=tmp_path, plot=False)
    assert error.value.log.step.tolist() == [1, 2] and "resume=True goes on" in error.value.__notes__[0]
    log = fit(model := gpt(), small(4), None, lr=1e-3, steps=4, save_to=tmp_path, resume=True, plot=False)
    assert log.step.tolist() == [1, 2, 3, 4]
    with pytest.raises(ValueError) as error: fit(model, spoilt, None, lr=1e-3, steps=4, plot=False)
    assert "after 2 of 4 steps; with save_to=" in error.value.__notes__[0]


@pytest.mark.parametrize("other", [dict(seed=1), dict(size=4), {}])
def test_a_run_that_goes_on_with_other_data_says_so(other, tmp_path, caplog):
    from bmlab.train.loop import fit
    fit(gpt(), small(6), None, lr=1e-3, steps=3, save_to=tmp_path, plot=False)
    fit(gpt(), small(6, **other), None, lr=1e-3, steps=5, save_to=tmp_path, resume=True, plot=False)
    assert ("of other data, or of another batch size" in caplog.text) == bool(other)


def test_evaluations_of_nothing_are_refused():
    from bmlab.train.loop import fit
    with pytest.raises(ValueError, match="every=2: .* held_out"): fit(gpt(), small(), None, lr=1e-3, every=2)


def test_a_delta_that_is_missing_is_said_to_be(tmp_path):
    from bmlab.delta import Lora
    from bmlab.train.loop import fit
    model = gpt()
    Lora(model, r=2).freeze()
    fit(model, small(), None, lr=1e-3, steps=2, save_to=tmp_path, plot=False)
    with pytest.raises(ValueError, match="holds a delta alone, and this model has none"):
        fit(gpt(), small(), None, lr=1e-3, steps=4, save_to=tmp_path, resume=True, plot=False)


def test_what_is_no_pair_of_ids_and_labels_is_weighed_as_it_was():
    from bmlab.train.loop import _predicted
    x, mask = torch.ones(3, 8, dtype=torch.long), torch.ones(3, 8, dtype=torch.bool)
    column = torch.ones(3, 1, dtype=torch.long)
    for batch, n in (
        ((torch.rand(3, 4), column), 3), ((x, torch.tensor([8, 2, 3])), 24), ((x, mask), 24), ((x, column), 24),
        (dict(input_ids=x, label=column), 3), ((x, x), 21), (dict(input_ids=x, labels=x), 21),
    ): assert _predicted(batch, torch.nn.Linear(1, 1)) == n


def test_an_error_of_a_callback_finds_the_step_saved(tmp_path):
    from bmlab.train.loop import fit
    class Own(Exception):
        log = "its own"
    def fails(run):
        if run.step == 2: raise Own("no network")
    with pytest.raises(Own) as error:
        fit(gpt(), small(), None, lr=1e-3, steps=4, save_to=tmp_path, callbacks=[fails], plot=False)
    assert "after 2 of 4 steps; resume=True goes on" in error.value.__notes__[0] and error.value.log == "its own"
    def full(*_, **__): raise torch.distributed.checkpoint.CheckpointException("full", {})
    import bmlab.train.loop as loop
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "save", full)
        with pytest.raises(Own) as error:
            fit(gpt(), small(), None, lr=1e-3, steps=4, save_to=tmp_path / "b", callbacks=[fails], plot=False)
    assert "could not be saved: CheckpointException" in error.value.__notes__[0]


def test_batches_that_cannot_be_told_apart_train(tmp_path):
    from bmlab.train.loop import fit
    model = torch.nn.Linear(4, 1)
    odd = [torch.eye(4).to_sparse(), torch.nested.nested_tensor([torch.ones(2, 4)], layout=torch.jagged)]
    for x in odd:
        loss = lambda m, b: m(b.to_dense() if b.is_sparse else b.values()).mean()
        log = fit(model, [x], None, lr=1e-3, steps=2, loss=loss, save_to=tmp_path / str(x.is_sparse), plot=False)
        assert len(log) == 2

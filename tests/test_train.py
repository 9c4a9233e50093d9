"The loop over processes: killed and taken up again, accumulation, offload, data parallel, sharded with a delta."
import os, signal, subprocess, sys
from pathlib import Path

import pytest
import torch

from bmlab.core import run_ranks, set_seed

ROOT = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.long
ROWS = (torch.arange(24)[:, None] * 3 + torch.arange(12)) % 90


def gpt(dropout=0.1, **options):
    import transformers as tf
    set_seed(0)
    return tf.GPT2LMHeadModel(tf.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=99, n_positions=16, resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout, **options))


def mine(rank, world, batch=2):
    from bmlab.data import Batches
    return Batches(ROWS[rank::world], batch=batch, seed=rank)


def run(folder, kill_at=None, kind="adamw", **options):
    "A run on this rank's rows, which dies by kill -9 when it comes to the batch `kill_at`"
    import torch.distributed as dist
    from bmlab.offload import AdamW
    from bmlab.optim import Cosine, OptimManager
    from bmlab.sharding import shard
    from bmlab.train import fit, model_loss
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
    return fit(model, mine(r, w), om, steps=8, loss=dies, clip=0.5, accumulate=2, save_to=folder, save_every=2, plot=False, held_out=list(mine(r, w)), every=3, **options)


@pytest.mark.parametrize("world, kind", [(1, "offload"), (2, "adamw"), (2, "offload")])
def test_a_killed_run_goes_on_bit_for_bit(tmp_path, world, kind):
    "Dropout, a schedule, a loss scale, a clip that triggers, micro-batches, recompute: as if nothing had happened"
    ranks = lambda *args: [run(*args)] if world == 1 else run_ranks(run, *args, world_size=world)
    whole = ranks(tmp_path / "whole", None, kind)
    resume = lambda folder: run(folder, None, kind, resume=True)
    if world == 1:
        with pytest.raises(RuntimeError): run_ranks(run, tmp_path / "cut", 11, kind, world_size=1)
    else:
        with pytest.raises(RuntimeError): run_ranks(run, tmp_path / "cut", 11, kind, world_size=world)
    assert sorted(p.name for p in (tmp_path / "cut").iterdir() if not p.name.startswith(".")) == ["latest", "step-00000002", "step-00000004"]
    went_on = [resume(tmp_path / "cut")] if world == 1 else run_ranks(resume, tmp_path / "cut", world_size=world)
    for a, b in zip(whole, went_on):
        for column in ("step", "loss", "grad_norm", "lr", "loss_scale", "held_out"): assert a[column].dropna().tolist() == b[column].dropna().tolist(), column
        assert len(a) == 9 and (a.grad_norm.dropna() > 0.5).any()


def accumulated(wrap, accumulate, folder=None):
    "Losses and weights of four steps of eight rows, however they are cut and spread"
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from bmlab.sharding import shard
    from bmlab.train import fit
    r, w = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    model = gpt(dropout=0.).double()
    runner = DistributedDataParallel(model) if wrap == "ddp" else shard(model, dtype=None, zero=int(wrap), checkpoint=False) if wrap else model
    size = 8 // w // accumulate
    batches = [{"input_ids": b, "labels": b} for i in range(0, 24, 8) for b in ROWS[i:i + 8][r::w].split(size)]
    log = fit(runner, batches, torch.optim.SGD(model.parameters(), lr=0.5), steps=4, clip=1., accumulate=accumulate, plot=False)
    return log, {n: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone() for n, p in model.named_parameters()}


def all_ways(): return {(wrap, n): accumulated(wrap, n) for wrap in ("ddp", "2", "3") for n in (1, 2, 4)}


def test_accumulation_is_one_large_batch():
    whole, weights = accumulated("", 1)
    for ranks in run_ranks(all_ways):
        for way, (log, got) in ranks.items():
            torch.testing.assert_close(log.loss.tolist(), whole.loss.tolist(), rtol=1e-6, atol=0, msg=str(way))
            torch.testing.assert_close(log.grad_norm.tolist(), whole.grad_norm.tolist(), rtol=1e-6, atol=0, msg=str(way))      # a loss is float32 in transformers
            for n, p in weights.items(): torch.testing.assert_close(got[n], p, rtol=1e-6, atol=1e-6, msg=str((way, n)))


def other_world(folder, resume=False):
    import torch.distributed as dist
    from bmlab.sharding import shard
    from bmlab.train import fit
    r, w = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    model = shard(gpt(dropout=0.), dtype=None)
    batches = [{"input_ids": b, "labels": b} for i in range(0, 24, 4) for b in [ROWS[i:i + 4][r::w]]]
    return fit(model, batches, torch.optim.AdamW(model.parameters(), lr=1e-2), steps=3 + 3 * resume, save_to=folder, resume=resume, plot=False)


def test_a_run_goes_on_at_another_world_size(tmp_path):
    whole = other_world(tmp_path / "whole", resume=True)
    other_world(tmp_path / "one")
    went_on = run_ranks(other_world, tmp_path / "one", True)[0]
    torch.testing.assert_close(went_on.loss.tolist(), whole.loss.tolist(), rtol=2e-5, atol=2e-5)
    two = run_ranks(other_world, tmp_path / "two")
    assert len(two[0]) == 3
    torch.testing.assert_close(other_world(tmp_path / "two", resume=True).loss.tolist(), whole.loss.tolist(), rtol=2e-5, atol=2e-5)


def test_a_sampler_of_ranks_hears_of_each_pass(tmp_path):
    "Another order in each pass, the same order after a resume"
    from bmlab.train import fit
    seen = []
    def loss(model, x): seen.append(x.flatten().int().tolist()); return model(x).mean()
    def go(folder, steps, **options):
        model = torch.nn.Linear(1, 1)
        rows = torch.arange(12.)[:, None]
        loader = torch.utils.data.DataLoader(rows, batch_size=2, sampler=torch.utils.data.DistributedSampler(rows, num_replicas=2, rank=1))
        seen.clear(); fit(model, loader, torch.optim.SGD(model.parameters(), lr=.1), steps=steps, loss=loss, plot=False, save_to=folder, **options)
        return list(seen)
    whole = go(tmp_path / "a", 8)
    assert whole[:3] != whole[3:6]
    assert go(tmp_path / "b", 5) + go(tmp_path / "b", 8, resume=True) == whole


def test_a_complete_run_says_so(tmp_path, caplog):
    "Asked for as many steps as are done, or fewer: no step, a warning; asked for more: the rest"
    from bmlab.train import fit
    def go(steps):
        caplog.clear()
        model = gpt(dropout=0.)
        log = fit(model, mine(0, 1), torch.optim.SGD(model.parameters(), lr=.1), steps=steps, save_to=tmp_path, resume=True, plot=False)
        return log.loss.tolist(), [p.detach().clone() for p in model.parameters()], [r.message for r in caplog.records if r.name == "bmlab.train"]
    losses, weights, said = go(3)
    assert len(losses) == 3 and said == []
    for steps in (3, 2):
        again, same, said = go(steps)
        assert again == losses and all(map(torch.equal, weights, same)) and said == [f"steps={steps}, but the run in {tmp_path} is complete with 3: no step is made; give more steps to go on"]
    again, other, said = go(4)
    assert again[:3] == losses and len(again) == 4 and said == [] and not all(map(torch.equal, weights, other))


def spoilt(folder, overlap):
    "A loss that is not a number on the last rank, in step 3: (message, are the weights finite?, the log when gone on from step 2)"
    import math
    import torch.distributed as dist
    from bmlab.offload import AdamW
    from bmlab.sharding import shard
    from bmlab.train import Diverged, fit, model_loss
    r, w = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    model = shard(gpt(dropout=0.), dtype=None)
    opt, seen = AdamW(model, lr=1e-2, offload=0.5, overlap=overlap), []
    def loss(model, batch): seen.append(1); return model_loss(model, batch) * (math.nan if len(seen) == 5 and r == w - 1 else 1)
    go = lambda **options: fit(model, mine(r, w), opt, steps=4, accumulate=2, save_to=folder, save_every=2, plot=False, **options)
    try: go(loss=loss); said = ""
    except Diverged as e: said = str(e)
    finite = all((p.to_local() if hasattr(p, "to_local") else p).isfinite().all().item() for p in model.parameters())
    return said, finite, go(resume=True).loss.tolist()


@pytest.mark.parametrize("world", [1, 2])
def test_a_diverged_loss_says_whether_the_weights_are_whole(tmp_path, world):
    "An optimizer that uses gradients as they arrive has made the step; the same optimizer goes on from a checkpoint as the other does"
    ends = {}
    for overlap in ("forward", "backward"):
        for said, finite, losses in [spoilt(tmp_path / overlap, overlap)] if world == 1 else run_ranks(spoilt, tmp_path / overlap, overlap):
            assert "the loss of step 3 is nan" in said and finite == (overlap == "forward")
            assert ("the step was not taken" in said) == finite and ("the weights are spoilt" in said) != finite
            ends.setdefault(overlap, losses)
            assert len(losses) == 4 and torch.tensor(losses).isfinite().all()
    assert ends["forward"] == ends["backward"]


def apart(capture):
    import logging
    from bmlab.train import fit
    said = []
    handler = logging.Handler(); handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("bmlab.train").addHandler(handler)
    model = gpt()
    fit(model, mine(0, 1), torch.optim.SGD(model.parameters(), lr=.1), steps=1, plot=False)
    return said


def test_ranks_that_train_apart_are_warned():
    for said in run_ranks(apart, None): assert "each for itself" in said[0]


@pytest.mark.cuda
def test_on_a_gpu(tmp_path):
    from bmlab.offload import AdamW
    from bmlab.sharding import shard
    from bmlab.train import Diverged, fit
    torch.use_deterministic_algorithms(False)
    def go(folder, steps, **options):
        model = shard(gpt(dropout=0.).cuda(), dtype=torch.bfloat16)
        return fit(model, mine(0, 1), AdamW(model, lr=1e-2, offload=0.5), steps=steps, clip=0.5, accumulate=2, save_to=folder, plot=False, **options), model
    whole, _ = go(tmp_path / "a", 6)
    go(tmp_path / "b", 3, save_in_background=True)
    went_on, model = go(tmp_path / "b", 6, resume=True)
    torch.testing.assert_close(went_on.loss.tolist(), whole.loss.tolist(), rtol=1e-2, atol=1e-2)
    assert (went_on.memory > 0).all() and went_on.memory.iloc[-1] == torch.cuda.max_memory_allocated()
    model.transformer.h[1].mlp.c_fc.register_forward_hook(lambda m, args, out: out * float("nan"))
    with pytest.raises(Diverged, match="transformer.h.1.mlp.c_fc"): fit(model, mine(0, 1), torch.optim.SGD(model.parameters(), lr=.1), steps=1, plot=False)

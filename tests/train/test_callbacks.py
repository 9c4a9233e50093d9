"Callbacks over a kill and over ranks; trackers that are installed get the numbers of the log."
import os, signal
from pathlib import Path

import pandas as pd
import pytest
import torch

from bmlab.core import set_seed
from bmlab.train.callbacks import EarlyStop, KeepBest, ShowText
from bmlab.train.checkpoint import latest
from bmlab.train.loop import fit
from bmlab.train.processes import run_ranks
from bmlab.train.track import Track, compare_runs
from fresh import fresh_python

pytestmark = pytest.mark.long
ROWS = (torch.arange(12)[:, None] * 3 + torch.arange(8)) % 48
BATCHES = [{"input_ids": r, "labels": r} for r in ROWS.split(3)]


def tiny():
    import transformers as tf
    set_seed(0)
    return tf.GPT2LMHeadModel(tf.GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=48, n_positions=8))


def watchers():
    def says(model, prompts): return [f"{next(model.parameters()).sum().item():.6f}"]
    return [EarlyStop(patience=2), KeepBest(), ShowText(prompts=["a"], generate=says), Track("csv")]


def run(folder, kill_at=None, steps=14, **options):
    "With dropout, and a callback that draws random numbers; it dies by kill -9 after the step `kill_at`"
    seen = watchers()
    def dies(run):
        torch.rand(run.step)
        if run.step == kill_at: os.kill(os.getpid(), signal.SIGKILL)
    log = fit(
        tiny(), BATCHES[:3], lr=0.06, steps=steps, held_out=BATCHES[3:], every=2, save_to=folder, save_every=3,
        callbacks=[*seen, dies], plot=False, **options)
    return log, [c.state_dict() for c in seen[:3]]


def test_callbacks_of_a_killed_run_go_on_bit_for_bit(tmp_path):
    "Losses, rates, what was best, when it stops, the texts and the file are those of a run that nobody disturbed"
    whole, states = run(tmp_path / "run")
    # (not a fork of this process: what other threads of it hold, nobody there would let go)
    here = str(Path(__file__).parent)
    code = f"import sys; sys.path.insert(0, {here!r}); import test_callbacks as t; t.run(sys.argv[1], 5)"
    assert fresh_python(code, tmp_path / "killed").returncode == -signal.SIGKILL
    assert latest(tmp_path / "killed").name == "step-00000003"
    assert pd.read_csv(tmp_path / "killed/log.csv").step.iloc[-1] == 5         # the file was ahead of the checkpoint
    again, same = run(tmp_path / "killed", resume=True)
    for column in ("step", "loss", "lr", "held_out"):
        assert again[column].dropna().tolist() == whole[column].dropna().tolist()
    assert whole.attrs == again.attrs and same == states
    files = [pd.read_csv(tmp_path / name / "log.csv", float_precision="round_trip") for name in ("run", "killed")]
    for column in ("step", "loss", "lr", "held_out"): pd.testing.assert_series_equal(*(f[column] for f in files))
    assert compare_runs([tmp_path / "run", tmp_path / "killed"]).table.loss.nunique() == 1


def ranked(folder):
    import torch.distributed as dist
    from bmlab.train.sharding import shard
    r = dist.get_rank()
    def one_alone(run):
        if r == 1 and run.step == 5: run.stop("rank 1 has seen enough")
    mine = [{k: v[r:r + 1] for k, v in b.items()} for b in BATCHES]
    best, model = KeepBest(restore=True), shard(tiny(), dtype=None)
    log = fit(model, mine[:3], lr=0.05, steps=9, held_out=mine[3:], every=2, save_to=folder, plot=False,
              callbacks=[best, Track("csv"), one_alone])
    return len(log), log.attrs["stopped"], best.best, best.step, latest(folder).name


def test_ranks_stop_together_and_keep_the_same_best(tmp_path):
    one, other = run_ranks(ranked, tmp_path)
    assert one == other and one[:2] == (6, "rank 1 has seen enough on rank 1") and one[4] == "step-00000005"
    assert pd.read_csv(tmp_path / "log.csv").step.tolist() == [0, 1, 2, 3, 4, 5]


def test_tensorboard_has_the_measured_and_the_planned(tmp_path):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed: pip install tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from bmlab.plan import plan_training
    plan = plan_training(tiny(), batch=3, seq=8, machine="h100-80")
    options = dict(lr=0.01, held_out=BATCHES[3:], plan=plan, save_to=tmp_path, save_every=2, plot=False)
    fit(tiny(), BATCHES[:3], steps=2, callbacks=[Track("tensorboard")], **options)
    log = fit(tiny(), BATCHES[:3], steps=4, resume=True, callbacks=[Track("tensorboard")], **options)
    runs = {}
    for name in ("measured", "planned"):
        runs[name] = EventAccumulator(str(tmp_path / "tensorboard" / name))
        runs[name].Reload()
    points = runs["measured"].Scalars("loss")
    assert [p.step for p in points] == [1, 2, 3, 4]
    assert torch.allclose(torch.tensor([p.value for p in points]), torch.tensor(log.loss[1:].tolist()).float())
    assert {p.value for p in runs["planned"].Scalars("memory")} == {float(torch.tensor(float(plan.peak_bytes)))}
    assert set(runs["planned"].Tags()["scalars"]) <= set(runs["measured"].Tags()["scalars"])    # drawn in one picture


@pytest.mark.parametrize("name", ["trackio", "wandb"])
def test_a_tracker_takes_the_calls(tmp_path, monkeypatch, name):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))                # (read when it is imported)
    monkeypatch.chdir(tmp_path)
    pytest.importorskip(name, reason=f"{name} is not installed: pip install {name}")
    fit(tiny(), BATCHES[:3], lr=0.01, steps=3, callbacks=[Track(name, project="tests")], plot=False)
    assert any(p.is_file() for p in Path(tmp_path).rglob("*"))


def test_a_delta_whose_backbone_is_trained_is_said(caplog):
    import transformers as tf
    from bmlab.delta import Lora
    model = tf.GPT2LMHeadModel(tf.GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=50, n_positions=16))
    d, rows = Lora(model, r=2), [{"input_ids": torch.arange(8)[None], "labels": torch.arange(8)[None]}]
    def said(model=model, **options):
        caplog.clear()
        fit(model, rows, steps=1, plot=False, **options)
        return [r.message for r in caplog.records if "call its freeze() first" in r.message]
    whole = sum(p.numel() for p in model.parameters()) - sum(p.numel() for p in d.parameters())
    assert len(said()) == 1 and f"all {whole:,} numbers" in said(opt="adamw")[0] and "'lora'" in said()[0]
    d.freeze()
    assert not said()
    model.transformer.ln_f.requires_grad_(True)                     # a part that is tunable too is wanted
    assert not said()
    d.unfreeze()
    assert not said(opt=torch.optim.AdamW(d.parameters()))          # an optimizer says itself what it trains
    d.detach()
    assert not said()

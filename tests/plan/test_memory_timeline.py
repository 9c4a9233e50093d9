"The planned curve of a step, and the allocator's record over it"
import pickle

import pytest
import torch
import transformers as tf

from bmlab.plan.timeline import common, read_snapshot, record_memory
from bmlab.plan.training import plan_training
from live import Live

IDS = torch.randint(0, 300, (4, 64), generator=torch.Generator().manual_seed(0))


def llama():
    torch.manual_seed(0)
    config = tf.LlamaConfig(
        vocab_size=320, hidden_size=96, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4)
    return tf.LlamaForCausalLM(config)


def ask(model, **how):
    return plan_training(model, batch=4, seq=64, machine="h200", **{"dtype": None} | how)


def stepping(model):
    opt = torch.optim.AdamW(model.parameters(), fused=True)
    def step():
        model(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
        opt.step()
        opt.zero_grad()
    step()
    return step, opt


@pytest.mark.parametrize("how", [
    {}, dict(checkpoint=True), dict(checkpoint=2, move=True), dict(offload=1.0), dict(accumulate=3), dict(host=0.5),
    dict(states=8, master="bf16-sr", dtype=torch.bfloat16), dict(loss="chunked"),
    pytest.param(dict(compile=True), marks=pytest.mark.slow)],
    ids=str)
def test_the_highest_moment_is_the_planned_peak(how):
    plan = plan_training(llama(), **{"batch": 4, "seq": 64, "machine": "h200", "dtype": None} | how)
    curve = plan.timeline().planned
    top = curve.loc[curve.sum(axis=1).idxmax()]
    assert top.sum() == plan.peak_bytes
    assert {n: b for n, b in top.items() if b} == {n: int(b) for n, (b, _) in plan.parts.items() if int(b)}


@pytest.mark.parametrize("gpus", [2, 8])
def test_ranks_share_it(gpus):
    plan = ask(llama(), gpus=gpus, dtype=torch.bfloat16)
    shown = plan.timeline()
    assert abs(shown.planned.sum(axis=1).max() - plan.peak_bytes) < 16           # (whole bytes of shares)
    assert shown.planned["weights in flight"].max() > 0
    assert abs(shown.table["planned"].sum() - plan.peak_bytes) < 4096


def test_the_curve_is_what_a_step_on_the_cpu_keeps_alive():
    model = llama()
    batch = {"input_ids": IDS, "labels": IDS, "use_cache": False}
    model(**batch).loss.backward()
    model.zero_grad()
    with Live([*model.parameters(), *model.buffers(), IDS]) as live:
        loss = model(**batch).loss
        after_forward = live.now
        loss.backward()
    plan = ask(model, offload=None)
    curve = plan.timeline().planned
    moving = curve.drop(columns=["weights", "optimizer state", "workspace", "optimizer's chunk", "inputs"]).sum(axis=1)
    spans = plan.timeline().spans
    turn = next(s.start for s in spans if s.phase == "backward")
    assert abs(moving.max() / live.peak - 1) < 0.02
    assert abs(moving[turn - 1] / after_forward - 1) < 0.02
    end = sum(-(-p.nbytes // 512) * 512 for p in model.parameters())             # gradients alone
    assert moving[spans[-1].start - 1] == end + 512                              # … and the loss


@pytest.fixture(scope="module")
def recorded():
    model = llama()
    step, opt = stepping(model)
    return model, opt, step, record_memory(step, held=[model, opt])


def test_the_record_is_what_the_step_did(recorded):
    model, _, _, snapshot = recorded
    did = read_snapshot(snapshot)
    weights = sum(-(-p.nbytes // 512) * 512 for p in model.parameters())
    steps = 512 * len(list(model.parameters()))                                   # (AdamW counts them for each)
    assert did.held == 3 * weights + steps + 2 * 512                              # (and the rotary frequencies)
    assert abs(did.live[-1] - did.held) < 0.02 * weights                          # a step leaves nothing behind
    plan = ask(model, offload=None)
    shown = plan.timeline(snapshot)
    assert shown.matched > 0.85
    planned = plan.peak_bytes - plan.parts["workspace"][0]
    assert abs(planned / shown.peak_bytes - 1) < 0.02
    assert shown.table["measured"].sum() == shown.peak_bytes
    assert abs(shown.table["planned"].sum() - plan.peak_bytes) < 4096
    blocks = shown.table.filter(like="model.layers", axis=0)
    assert len(blocks) == 4 and (blocks["difference"].abs() < 0.02 * blocks["planned"]).all()


def test_what_a_block_keeps_too_much_has_its_name(recorded):
    model, opt, step, _ = recorded
    kept = []
    def keep(block, args, output): kept.append(torch.ones(1 << 20))
    plan = ask(model, offload=None)
    for i in (1, 3):
        hook = model.model.layers[i].register_forward_hook(keep)
        try: snapshot = record_memory(step, held=[model, opt])
        finally: hook.remove()
        kept.clear()
        row = plan.timeline(snapshot).table.drop("held between steps").iloc[0]
        assert row.name == f"model.layers.{i}" and abs(row["difference"] - 4 * 2**20) < 1e5
        assert row["where"].startswith("test_memory_timeline.py:") and row["where"].endswith(" keep")
        found = plan.check(snapshot=snapshot)
        assert f"peak_bytes, model.layers.{i}" in found.index and found.loc["peak_bytes", "measured"] > 0


def cuda_like(rows, live):
    "A snapshot as torch's allocator writes it: rows of (action, address, requested bytes)"
    trace = [dict(action=a, addr=p, size=n, stream=0, time_us=i, frames=[]) for i, (a, p, n) in enumerate(rows)]
    blocks = [dict(size=n, requested_size=n, state=s, address=p, frames=[]) for p, n, s in live]
    return {"segments": [{"device": 1, "total_size": 1 << 21, "blocks": blocks, "address": 0, "stream": 0}],
            "device_traces": [[], trace], "allocator_settings": {}, "external_annotations": []}


def test_a_gpus_snapshot_is_read_as_its_allocator_counts(tmp_path):
    rows = [("alloc", 1, 1000), ("segment_alloc", 0, 1 << 21), ("alloc", 2, 512), ("free_requested", 1, 1000),
            ("free_completed", 1, 1000), ("free_requested", 9, 2048), ("free_completed", 9, 2048), ("alloc", 1, 100)]
    live = [(1, 512, "active_allocated"), (2, 512, "active_allocated"), (7, 4096, "active_allocated"),
            (8, 1024, "active_awaiting_free"), (10, 4096, "inactive")]
    with open(tmp_path / "step.pickle", "wb") as f: pickle.dump(cuda_like(rows, live), f)
    did = read_snapshot(tmp_path / "step.pickle")
    assert did.held == 4096 + 2048                                   # one that stays, one that the step freed
    assert did.live.tolist() == [7168, 7680, 6656, 4608, 5120]
    assert did.stop.tolist() == [2, 5, 5] and did.bytes.tolist() == [1024, 512, 512]
    with pytest.raises(ValueError, match="no history of device 0"): read_snapshot(tmp_path / "step.pickle", device=0)


class Shell:
    def __reduce__(self): return print, ("run",)


def test_a_file_runs_no_code(tmp_path, capsys):
    with open(tmp_path / "odd.pickle", "wb") as f: pickle.dump({"segments": [], "device_traces": Shell()}, f)
    with pytest.raises(ValueError, match="builtins.print"): read_snapshot(tmp_path / "odd.pickle")
    assert not capsys.readouterr().out


def test_common_is_the_longest():
    from difflib import SequenceMatcher
    draw = torch.Generator().manual_seed(1)
    for _ in range(30):
        a, b = (torch.randint(0, 5, (n,), generator=draw).numpy() for n in (12, 9))
        pairs = common(a, b)
        assert (a[pairs[:, 0]] == b[pairs[:, 1]]).all() and (pairs[1:] > pairs[:-1]).all()
        least = sum(m.size for m in SequenceMatcher(None, list(a), list(b), False).get_matching_blocks())
        assert len(pairs) >= least


def test_a_plan_from_a_file_has_no_trace(tmp_path):
    plan = ask(llama())
    plan.save(tmp_path / "plan.json")
    with pytest.raises(ValueError, match="without its trace"): type(plan).load(tmp_path / "plan.json").timeline()
    assert pickle.loads(pickle.dumps(plan)) == plan

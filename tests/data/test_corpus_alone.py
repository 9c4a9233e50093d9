"A corpus's folder has one call at work in it, and whoever is killed takes its workers along and lets go of the folder."
import json, os, signal, threading
from pathlib import Path

import pandas as pd
import pytest

pytest.importorskip("datatrove")
from bmlab.data.corpus import Cleaned, Corpus  # noqa: E402
from bmlab.data.steps import Rule  # noqa: E402
from bmlab.train.forkserver import start_process  # noqa: E402
from conftest import every_other, gone, until

ROOT = Path(__file__).resolve().parents[2]
ROWS = pd.DataFrame({"text": [f"text number {i}" for i in range(8)]})

WORKS = """
import os, sys, threading, time
from pathlib import Path
import pandas as pd
from bmlab.data.corpus import Corpus
from bmlab.data.steps import Rule
into, state, thread = sys.argv[1:]
def note(text):
    "tells of itself, and stays for ever while it is told to"
    Path(state, str(os.getpid())).touch()
    while Path(state, "hang").exists(): time.sleep(0.01)
def work():
    rows = pd.DataFrame({"text": [f"text number {i}" for i in range(8)]})
    Corpus.from_frame(rows, "rows").then(Rule(note, "note")).run(into, tasks=4, workers=2)
if thread == "thread":
    t = threading.Thread(target=work)
    t.start()
    t.join()
else: work()
"""


class Note:
    "A rule that remembers what it saw, and waits for leave to go on; a recipe passes over such attributes"
    def __init__(self): self._seen, self._first, self._go = [], threading.Event(), threading.Event()
    def __call__(self, text):
        self._seen.append(text)
        self._first.set()
        self._go.wait(60)


def hanging(tmp_path, thread):
    "(a run whose two workers hang, their process ids)"
    state = tmp_path / f"state-{thread}"
    state.mkdir()
    (state / "hang").touch()
    run = start_process(WORKS, [tmp_path / "run", state, thread], log=tmp_path / "log", cwd=ROOT)
    pids = lambda: [int(p.name) for p in state.iterdir() if p.name.isdigit()]
    until(lambda: len(pids()) == 2 or run.poll() is not None, 240)
    assert run.poll() is None, (tmp_path / "log").read_text()
    return run, pids()


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="processes are looked at in /proc")
@pytest.mark.parametrize("thread", every_other(("main", "thread")))
def test_a_killed_run_takes_its_workers_along_and_another_goes_on(tmp_path, thread):
    "The second call is refused while the first works, at once; after the kill it is not, and finishes the corpus"
    run, workers = hanging(tmp_path, thread)
    corpus = Corpus.from_frame(ROWS, "rows").then(Rule(lambda text: None, "note"))
    try:
        with pytest.raises(TimeoutError, match="another process is at work in .*run; wait until it has ended"):
            corpus.run(tmp_path / "run", tasks=4)
        assert json.loads((tmp_path / "run/recipe.json").read_text())["tasks"] == 4
    finally: run.kill()
    assert run.wait(60) == -signal.SIGKILL
    until(lambda: all(map(gone, workers)))
    # the rule is another function now, so the folder is that of another run: it is looked at, no longer held
    with pytest.raises(ValueError, match="holds another run: its steps were"): corpus.run(tmp_path / "run", tasks=4)


def test_two_calls_at_once_work_one_after_the_other_where_asked(tmp_path):
    "Two threads take turns; every document is looked at once, and who does not wait long enough is told"
    note, counts = Note(), []
    corpus = Corpus.from_frame(ROWS, "rows").then(Rule(note, "note"))
    def work(): counts.append(len(corpus.run(tmp_path / "run", tasks=2, wait_s=None).frame()))
    threads = [threading.Thread(target=work) for _ in range(2)]
    for t in threads: t.start()
    assert note._first.wait(60)
    with pytest.raises(TimeoutError): corpus.run(tmp_path / "run", tasks=2, wait_s=0.1)
    note._go.set()
    for t in threads: t.join(60)
    assert counts == [8, 8] and sorted(note._seen) == sorted(ROWS.text) and Cleaned(tmp_path / "run").finished


def test_shards_of_one_folder_are_made_by_one_call(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    from bmlab.files import alone_in
    words = {w: n for n, w in enumerate(["<eod>", "text", "number", *map(str, range(8))])}
    tok = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<eod>"))
    tok.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    done = Corpus.from_frame(ROWS, "rows").run(tmp_path / "run")
    with alone_in(tmp_path / "run/shards"), pytest.raises(TimeoutError, match="another process is at work"):
        done.shards(tok, tokenize={"eos": 0})
    assert len(list(done.shards(tok, tokenize={"eos": 0}))) == 8 and os.path.isfile(tmp_path / "run/card.json")

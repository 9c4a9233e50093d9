"The cache and what fills it, with several processes and bad luck"
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import zipfile

import pytest

from bmlab.files import cached, fetch
from bmlab.train.processes import run_ranks

CLOSED = dict(
    PIP_INDEX_URL="http://127.0.0.1:9/", PIP_CONFIG_FILE=os.devnull, PIP_FIND_LINKS="", PIP_EXTRA_INDEX_URL="")


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
        z.writestr(
            "bmlab_toy-1.0.dist-info/WHEEL",
            "Wheel-Version: 1.0\nGenerator: hand\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        z.writestr("bmlab_toy-1.0.dist-info/RECORD", "")
    for k, v in dict(PIP_NO_INDEX="1", PIP_FIND_LINKS=str(shelf), PIP_CONFIG_FILE=os.devnull).items():
        monkeypatch.setenv(k, v)
    return shelf


@pytest.mark.long
def test_three_processes_fetch_at_once(cache, toy_index):
    def all_fetch():
        import time
        from bmlab import files
        made = []
        def slow(folder):
            made.append(1)
            time.sleep(0.5)
            (folder / "x").write_text("x" * 1000)
        folder = files.fetch("bmlab-toy", "1.0", ["bmlab_toy/words.txt"])
        files.cached("slow", slow)
        return files.damage(folder, full=True), (folder / "bmlab_toy/words.txt").read_text(), len(made)
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
    p.send_signal(signal.SIGKILL)
    p.wait()
    assert not (cache / "toy").exists() and len(list(cache.glob(".toy~*"))) == 1
    assert (cached("toy", lambda folder: (folder / "x").write_text("whole")) / "x").read_text() == "whole"
    assert list(cache.glob(".toy~*")) == []


def test_a_file_cut_in_half_is_made_again_or_reported(cache, toy_index, monkeypatch, caplog):
    words = fetch("bmlab-toy", "1.0", ["bmlab_toy/words.txt"]) / "bmlab_toy/words.txt"
    words.write_text("alpha")
    assert fetch("bmlab-toy", "1.0", ["bmlab_toy/words.txt"]) / "bmlab_toy/words.txt" == words
    assert words.read_text() == "alpha beta"
    assert "words.txt has 5 bytes of 10" in caplog.text
    words.write_text("alpha")
    shutil.rmtree(toy_index)
    with pytest.raises(RuntimeError, match=r"(?s)is damaged \(bmlab_toy/words.txt has 5 bytes of 10\) and could not be "
                                           r"made again: could not fetch.*By hand"):
        fetch("bmlab-toy", "1.0", ["bmlab_toy/words.txt"])


def test_a_read_only_cache_serves(cache, toy_index):
    folder = fetch("bmlab-toy", "1.0", ["bmlab_toy/words.txt"])
    for lock in cache.glob(".*.lock"): lock.unlink()
    before = {p: p.stat().st_mtime_ns for p in cache.rglob("*")}
    assert fetch("bmlab-toy", "1.0", ["bmlab_toy/words.txt"]) == folder
    assert {p: p.stat().st_mtime_ns for p in cache.rglob("*")} == before


@pytest.mark.slow
def test_an_sdist_gives_its_members(cache):
    folder = fetch(
        "vaderSentiment", "3.3.2", ["additional_resources/hutto_ICWSM_2014.tar.gz", "LICENSE.txt"], sdist=True)
    assert (folder / "additional_resources/hutto_ICWSM_2014.tar.gz").stat().st_size > 10**6
    assert "MIT" in (folder / "LICENSE.txt").read_text()


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
    with pytest.raises(RuntimeError, match="holds no 'data/y.txt'"):
        fetch("Toy.Pack", "2.0", ["data/y.txt"], sdist=True)

"""A folder is replaced whole or not at all

Writers that are killed at each of their steps, a full disk, two writers, systems without the exchange."""
import os
from pathlib import Path

import pytest
from fresh import fresh_python

from bmlab import files
from bmlab.data.shards import ShardError, ShardWriter
from bmlab.files import damage, replace_file, replace_folder, settle
from bmlab.train.forkserver import start_process
from conftest import until
from fresh import fresh_python

OLD, NEW = {"a": "old", "deep/b": "old"}, {"a": "new", "deep/c": "new", "d": "new"}

WRITERS = """
import os, shutil, signal, sys
from bmlab import files

root, how, before = sys.argv[1:]
own = ("a", "d", "deep/*") if how == "moves" else None

def counted(call, last, steps):
    def step(*args, **kwargs):
        steps.append(call)
        if len(steps) == last: os.kill(os.getpid(), signal.SIGKILL)
        return call(*args, **kwargs)
    return step

def write(folder, last):
    steps = []
    files._exchange = counted(files._exchange, last, steps) if how == "exchange" else lambda a, b: False
    for name in ("mkdir", "rename", "replace", "fsync", "unlink", "rmdir", "chmod"):
        setattr(os, name, counted(getattr(os, name), last, steps))
    shutil.rmtree = counted(shutil.rmtree, last, steps)
    with files.replace_folder(folder, manifest=own is None, own=own) as new:
        for name in ("a", "deep/c", "d"):
            (new / name).parent.mkdir(exist_ok=True)
            (new / name).write_text("new")

last, status = 0, None
while status != 0:                       # one writer for each step, until one gets through
    last += 1
    folder = os.path.join(root, str(last), "out")
    os.makedirs(os.path.join(folder, "deep") if before == "again" else os.path.dirname(folder))
    if before == "again":
        for name in ("a", "deep/b"): open(os.path.join(folder, name), "w").write("old")
    if how == "moves":
        os.makedirs(folder, exist_ok=True)
        open(os.path.join(folder, "mine"), "w").write("mine")
    if not (child := os.fork()):
        try: write(folder, last)
        except BaseException: os._exit(1)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status not in (0, -signal.SIGKILL): sys.exit(f"step {last}: exit status {status}")
print(last)
"""


def write(folder, content):
    for name, text in content.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def content(folder):
    return {
        p.relative_to(folder).as_posix(): p.read_text()
        for p in folder.rglob("*")
        if p.is_file() and p.name != "manifest.json"
    }


def beside(folder): return sorted(p.name for p in folder.parent.iterdir() if "~" in p.name)


def writers(root, how, before):
    "Writers that kill themselves before their first step, their second … and one that gets through: their folders"
    done = fresh_python(WRITERS, root, how, before, check=True)
    return [root / str(i) / "out" for i in range(1, int(done.stdout) + 1)]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="each writer is a fork")
@pytest.mark.parametrize("how", ["exchange", "renames"])
@pytest.mark.parametrize("before", ["first", "again"])
def test_a_writer_that_is_killed_at_any_step(tmp_path, how, before):
    "Whatever the step, a reader finds the old content or the new; the next writer finds a clean table, and no lock"
    old, seen = OLD if before == "again" else None, []
    for folder in writers(tmp_path, how, before):
        absent = not folder.exists()
        settle(folder)
        found = content(folder) if folder.exists() else None
        assert found in (old, NEW), folder
        if found == NEW: assert damage(folder, full=True) is None
        seen.append((found == NEW, absent))
        with replace_folder(folder, wait_s=0) as new: write(new, {"after": "next"})
        assert content(folder) == {"after": "next"} and beside(folder) == []
    assert [new for new, _ in seen] == sorted(new for new, _ in seen)            # once new, it stays new
    assert not seen[0][0] and seen[-1] == (True, False) and len(seen) > 10
    half_way = [new for new, absent in seen if absent and old]
    assert half_way == ([True] if old and (how == "renames" or not _exchanges(tmp_path)) else [])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="each writer is a fork")
@pytest.mark.parametrize("before", ["first", "again"])
def test_a_writer_that_is_killed_beside_other_files(tmp_path, before):
    "Files that are not the writer's stay whatever happens; a reader that settles finds all old ones or all new ones"
    old, seen, mixed = OLD if before == "again" else {}, [], 0
    for folder in writers(tmp_path, "moves", before):
        visible = {n: text for n, text in content(folder).items() if not n.startswith(".bmlab~")}
        mixed += visible not in ({**old, "mine": "mine"}, {**NEW, "mine": "mine"})
        found = content(settle(folder))
        assert found.pop("mine") == "mine"
        found = {n: text for n, text in found.items() if not n.startswith(".bmlab~")}
        assert found in (old, NEW), folder
        seen.append(found == NEW)
        with replace_folder(folder, wait_s=0, own=("a", "d", "deep/*")) as new: write(new, {"a": "next"})
        assert content(folder) == {"a": "next", "mine": "mine"} and beside(folder) == []
    assert seen == sorted(seen) and not seen[0] and seen[-1] and len(seen) > 10 and mixed > 1


def _exchanges(folder):
    for name in "xy": (folder / name).mkdir()
    return files._exchange(folder / "x", folder / "y")


def test_no_space_while_it_is_written(tmp_path, monkeypatch):
    folder = tmp_path / "out"
    write(folder, OLD)
    def full(self, text):
        self.touch()
        raise OSError(28, "No space left on device")
    with pytest.raises(OSError, match="No space left"), replace_folder(folder) as new:
        write(new, {"a": "new"})
        monkeypatch.setattr(Path, "write_text", full)
        write(new, {"b": "new"})
    assert content(folder) == OLD and beside(folder) == []


@pytest.mark.parametrize("step", range(1, 7))
def test_no_space_when_it_is_brought_to_the_disk(tmp_path, monkeypatch, step):
    folder, calls, plain = tmp_path / "out", [], os.fsync
    write(folder, OLD)
    def full(fd):
        calls.append(fd)
        if len(calls) == step: raise OSError(28, "No space left on device")
        plain(fd)
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"), replace_folder(folder) as new: write(new, NEW)
    # the sixth is of the folder around, when the move is made
    assert content(folder) == (OLD if step < 6 else NEW) and beside(folder) == []
    assert len(calls) == step


def test_the_manifest_says_what_is_there(tmp_path):
    with replace_folder(tmp_path / "out", manifest=True) as new: write(new, NEW)
    assert damage(tmp_path / "out", full=True) is None
    (tmp_path / "out" / "d").write_text("other")
    assert "d has 5 bytes of 3" == damage(tmp_path / "out")


def test_two_writers_come_one_after_the_other(tmp_path):
    "The second waits for the first, whose content it then replaces; who does not want to wait is told"
    folder = tmp_path / "out"
    code = (
        "import os, sys, time\nfrom bmlab.files import replace_folder\nwith replace_folder(sys.argv[1]) as new:\n"
        "    print('in', flush=True)\n    while not os.path.exists(sys.argv[2] + '.go'): time.sleep(.001)\n"
        "    (new / os.path.basename(sys.argv[2])).touch()\n"
    )
    names, inside = ["one", "two"], lambda name: (tmp_path / f"{name}.log").read_text() == "in\n"
    both = {n: start_process(code, [folder, tmp_path / n], log=tmp_path / f"{n}.log") for n in names}
    try:
        until(lambda: any(map(inside, names)))
        first, second = sorted(names, key=inside, reverse=True)
        assert not inside(second)
        with pytest.raises(TimeoutError, match="another writer has held"), replace_folder(folder, wait_s=0): pass
        assert not folder.exists() and not inside(second)
        (tmp_path / f"{first}.go").touch()
        assert both[first].wait(120) == 0
        until(lambda: inside(second))
        assert list(content(folder)) == [first]                                   # whole, while the second writes
        (tmp_path / f"{second}.go").touch()
        assert both[second].wait(120) == 0
    finally:
        for p in both.values(): p.kill()
    assert list(content(folder)) == [second] and beside(folder) == []


def test_a_file_has_one_writer_at_a_time(tmp_path):
    "Who does not want to wait is told, and the first writer's content comes in"
    file = tmp_path / "plan.json"
    file.write_text("old")
    with replace_file(file) as new:
        with pytest.raises(TimeoutError, match="another writer has held"), replace_file(file, wait_s=0): pass
        new.write_text("new")
        assert file.read_text() == "old"
    assert file.read_text() == "new" and beside(file) == []
    with pytest.raises(FileNotFoundError, match="there is no folder"), replace_file(tmp_path / "none/x"): pass


@pytest.mark.parametrize("kind", ["file", "shards"])
def test_a_lock_ends_with_its_holder_not_with_the_child_that_it_forked(kind, tmp_path):
    file, end = tmp_path / "plan.json", tmp_path / "end"
    writer = lambda: replace_file(file, wait_s=0) if kind == "file" else ShardWriter(tmp_path, 1 << 16)
    code = (
        "import os, sys, time\nfrom pathlib import Path\nfrom bmlab.files import replace_file\n"
        "from bmlab.data.shards import ShardWriter\nfile, end = map(Path, sys.argv[1:])\n"
        f"with {'replace_file(file)' if kind == 'file' else 'ShardWriter(file.parent, 1 << 16)'}:\n"
        "    if os.fork() == 0:\n        end.with_name('forked').touch()\n"
        "        while not end.exists(): time.sleep(.01)\n        os._exit(0)\n"
        "    print('in', flush=True)\n    time.sleep(100)\n"
    )
    p = start_process(code, [file, end], log=tmp_path / "log")
    try:
        until(lambda: (tmp_path / "log").read_text() == "in\n" and (tmp_path / "forked").exists())
        with pytest.raises((TimeoutError, ShardError), match="another"), writer(): pass
        p.kill()
        p.wait(60)
        with writer() as new:                                                     # the child still lives
            if kind == "file": new.touch()
    finally:
        p.kill()
        end.touch()


def test_open_files_of_the_old_content_stay_readable(tmp_path):
    folder = tmp_path / "out"
    write(folder, OLD)
    with open(folder / "a") as f:
        with replace_folder(folder) as new: write(new, NEW)
        assert f.read() == "old" and (folder / "a").read_text() == "new"


def test_folders_with_names_alike_are_left_alone(tmp_path):
    "What another folder's writer is making is no leftover"
    with replace_folder(tmp_path / "out~b") as other:
        write(other, {"x": "1"})
        with replace_folder(tmp_path / "out") as new: write(new, NEW)
        assert other.is_dir()
    assert content(tmp_path / "out~b") == {"x": "1"} and content(tmp_path / "out") == NEW


def test_somebody_elses_folder_is_not_touched(tmp_path):
    folder = tmp_path / "thesis"
    write(folder, {"chapter.tex": "one"})
    with pytest.raises(
            FileExistsError,
            match="holds other things \\(chapter.tex\\)"), replace_folder(folder, marks=("config.json",)):
        pass
    assert content(folder) == {"chapter.tex": "one"}
    (tmp_path / "empty").mkdir()
    with replace_folder(tmp_path / "empty", marks=("config.json",)) as new: write(new, {"config.json": "{}"})
    with replace_folder(tmp_path / "empty", marks=("config.json",)) as new: write(new, NEW)
    assert content(tmp_path / "empty") == NEW


def test_settle_needs_no_lock_where_there_is_nothing_to_do(tmp_path):
    write(tmp_path / "out", OLD)
    assert settle(tmp_path / "out") == tmp_path / "out"
    assert settle(tmp_path / "nowhere" / "out") == tmp_path / "nowhere" / "out"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out"]

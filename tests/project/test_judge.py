"tools/judge.py: what passes, what fails, what is compared and what is stored"
import base64, json, struct, subprocess, sys
from pathlib import Path

import pytest

judge = pytest.importorskip("judge", reason="pip install nbval")
TOOLS = Path(judge.__file__).parent
SLEEPER = "import threading, time\nsleeper = threading.Thread(target=time.sleep, args=(600,))\nsleeper.start()"


@pytest.mark.parametrize("stored, come, same", [
    ("loss 0.1234", "loss 0.1236", True), ("loss 0.1234", "loss 0.1334", False), ("loss 0.1", "loss 0.2", True),
    ("12 layers", "13 layers", False), ("1,024", "1,025", False),
    ("1e-05", "1.001e-05", True), ("1e-05", "2e-05", False),
    ("a  1.000\nb 20.00", "a 1.001\nb  19.99", True), ("yes 1.0", "no 1.0", False),
    ("-1.50", "1.50", False), ("−3.00", "-3.00", True), ("1.0 2.0", "1.0", False), ("nan", "0.5", False),
])
def test_numbers_to_three_digits(stored, come, same): assert judge.same_text(stored, come) == same


def png(width, height):
    head = b"\x89PNG\r\n\x1a\n" + struct.pack(">I4sII", 13, b"IHDR", width, height)
    return base64.b64encode(head).decode()


def test_pictures_by_size():
    assert judge.size_of(png(640, 480)) == (640, 480)
    def output(wide, high, **at): return {"data": {"image/png": png(wide, high)}, "metadata": {"image/png": at}}
    stored, come, other = (judge.shown_size(output(*size)) for size in ((640, 480), (620, 470), (640, 300)))
    assert judge.same_size(stored, come) and not judge.same_size(stored, other)
    sharp = judge.shown_size(output(1280, 960, width=640, height=480))             # (two dots a pixel)
    assert sharp == stored and not judge.same_size(stored, judge.shown_size(output(1280, 960)))


def notebook(path, *cells):
    "cells: (source, outputs)"
    plain = dict(cell_type="code", metadata={}, execution_count=None)
    code = [dict(id=f"c{i}", source=source, outputs=outputs, **plain) for i, (source, outputs) in enumerate(cells)]
    spec = dict(name="python3", display_name="python3", language="python")
    path.write_text(json.dumps(dict(nbformat=4, nbformat_minor=5, metadata=dict(kernelspec=spec), cells=code)))


def printed(text): return [dict(output_type="stream", name="stdout", text=text)]


def shown(text):
    return [dict(output_type="execute_result", metadata={}, execution_count=None, data={"text/plain": text})]


RUNS = """
import json, os, sys
import pytest
heard, tell = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
for line in heard:
    with open("said", "w") as said:
        os.dup2(said.fileno(), 1)
        pytest.main(["-q", "-rA", "--color=no", *json.loads(line)])
        sys.stdout.flush()
    print("done", file=tell, flush=True)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("judged")
    (folder / "pytest.ini").write_text(f"[pytest]\npythonpath = {TOOLS}\n")
    (folder / "conftest.py").write_text('pytest_plugins = ["judge"]\n')
    return folder


@pytest.fixture(scope="module")
def run(folder):
    "One process for all runs of pytest: its kernels are forked by one server, which takes seconds to start"
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with subprocess.Popen([sys.executable, "-c", RUNS], cwd=folder, **pipes) as p:
        def run(*args):
            print(json.dumps(args), file=p.stdin, flush=True)
            assert p.stdout.readline() == "done\n"
            return (folder / "said").read_text()
        yield run
        p.stdin.close()
        assert p.wait(60) == 0


@pytest.mark.long
def test_a_notebook_is_run_and_compared(run, folder):
    record, timed = ("#| cuda\n1 / 0", printed("what a GPU said")), ("print(1 / 3, '12 s')", printed("0.33311 14 s\n"))
    notebook(folder / "good.ipynb", (SLEEPER, []), record, timed)
    loose = "#| tolerance: 0.5\n1.2", shown("1.0")
    notebook(folder / "bad.ipynb", ("1 + 1", shown("3")), ("2", []), ("{}['key']", []), loose)
    said = run("--nbval", "good.ipynb", "bad.ipynb")
    failed = [f"FAILED bad.ipynb::Cell {i}" for i in range(3)]
    passed = ["PASSED good.ipynb::Cell 0", "PASSED good.ipynb::Cell 2", "PASSED bad.ipynb::Cell 3"]
    for words in (*passed, *failed, "KeyError", "1 skipped"): assert words in said, said
    assert "ZeroDivisionError" not in said


@pytest.mark.long
def test_what_comes_is_stored(run, folder):
    path = folder / "new.ipynb"
    record = "#| cuda\n1 / 0", printed("what a GPU said")
    notebook(path, ("print('a')\nprint('b')", []), ("1 + 1", shown("3")), record, ("None", printed("old")))
    assert "3 passed, 1 skipped" in run("--store", "new.ipynb")
    *outputs, last = [c["outputs"] for c in json.loads(path.read_text())["cells"]]
    said = [o.get("text") or o["data"]["text/plain"] for (o,) in outputs]
    assert said == [["a\n", "b\n"], ["2"], ["what a GPU said"]] and last == []
    before = path.read_text()
    run("--store", "new.ipynb")
    assert path.read_text() == before
    assert "3 passed, 1 skipped" in run("--nbval", "new.ipynb")


DRAWN = """
import base64, struct
from IPython.display import display
def picture(width, height):
    head = b"\\x89PNG\\r\\n\\x1a\\n" + struct.pack(">I4sII", 13, b"IHDR", width, height)
    return {"image/png": base64.b64encode(head).decode()}
place, other = (display(picture(w, 200), raw=True, display_id=True) for w in (300, 500))
place.update(picture(400, 200), raw=True)
place.update(picture(450, 200), raw=True)
"""


@pytest.mark.long
def test_a_picture_that_is_drawn_anew_is_stored_as_it_became(run, folder):
    path = folder / "drawn.ipynb"
    notebook(path, (DRAWN, []))
    assert "1 passed" in run("--store", "drawn.ipynb")
    (cell,) = json.loads(path.read_text())["cells"]
    assert [o["data"]["image/png"].strip() for o in cell["outputs"]] == [png(450, 200), png(500, 200)]
    assert "1 passed" in run("--nbval", "drawn.ipynb")


DIES = """import judge
KERNEL = judge.KERNEL
judge.KERNEL = '''
import os, pathlib
os.setsid()
if not (came := pathlib.Path("came")).exists():
    came.touch()
    raise SystemExit("no room")
''' + KERNEL.replace("os.setsid()", "")
def pytest_unconfigure(): judge.KERNEL = KERNEL
"""


@pytest.mark.long
def test_a_kernel_that_does_not_start_is_started_again(run, folder):
    (dying := folder / "dying").mkdir()
    (dying / "conftest.py").write_text(DIES)
    notebook(dying / "once.ipynb", ("1 + 1", shown("2")))
    said = run("--nbval", "dying/once.ipynb")
    assert "1 passed" in said and "Kernel died" in said and "no room" in said, said
    assert (dying / "came").exists()

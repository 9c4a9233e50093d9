"The checkout keeps its own rules: notebooks clean, modules exported from them, README made from the index."
import json, re, shutil, subprocess, sys, tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import house, readme, tidy  # noqa: E402

NOTEBOOKS = sorted(p for p in (ROOT / "nbs").rglob("*.ipynb") if ".ipynb_checkpoints" not in p.parts)


def test_house_rules(): assert list(house.problems(ROOT)) == []


def test_house_rules_see_what_breaks_them(tmp_path):
    "Each rule finds a planted offence"
    def notebook(name, *cells):
        cells = [{"cell_type": "code", "source": c} for c in cells]
        path = tmp_path / "nbs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"cells": cells}))
    (tmp_path / "bmlab/high").mkdir(parents=True)
    notebook("00_low.ipynb", "#| default_exp low", "import os\nx = 1", "#| hide\ntest_eq(1, 1)")
    notebook("10_high.ipynb", "1", "#| default_exp high.__init__\nfrom bmlab.high.room import y\n__all__ = ['y']")
    notebook("10_high/00_room.ipynb", "#| default_exp high.room")
    notebook("10_high/01_lost.ipynb", "#| default_exp low.lost")
    notebook("20_none.ipynb", "1")
    notebook("30_door.ipynb", "1")
    notebook("30_door/00_room.ipynb", "#| default_exp door.room")
    (tmp_path / "bmlab/low.py").write_text("import matplotlib\ndef f():\n    import ipywidgets\n")
    (tmp_path / "bmlab/high/room.py").write_text(
        "from ..low import _x, y\nfrom .other import _own\nfrom ..app import picker\n"
    )
    (tmp_path / "bmlab/stale.py").write_text("")
    found = "\n".join(house.problems(tmp_path))
    for words in (
        "00_low.ipynb cell 1: mixes",
        "cell 2: a hidden test",
        "low.py:1: imports matplotlib",
        "stale.py: no notebook",
        "20_none.ipynb: no default_exp",
        "30_door.ipynb: no default_exp",
        "01_lost.ipynb: exports low.lost, and lies where high.lost does",
        "high/room.py:1: takes the private _x of bmlab.low",
        "high/room.py:3: imports bmlab.app when",
    ):
        assert words in found, words
    assert "ipywidgets" not in found and "_own" not in found and "00_room" not in found and "10_high.ipynb" not in found


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.relative_to(ROOT / "nbs").as_posix())
def test_notebook_is_clean(path):
    nb = json.loads(path.read_text(encoding="utf-8"))
    assert set(nb["metadata"]) <= {"kernelspec"}
    for cell in nb["cells"]:
        assert set(cell["metadata"]) <= {"tags"}
        if cell["cell_type"] == "code":
            assert cell["execution_count"] is None


def test_no_drift(tmp_path):
    "bmlab/ is exactly what the notebooks export, with nothing stale beside it"
    shutil.copy(ROOT / "settings.ini", tmp_path)
    shutil.copytree(ROOT / "nbs", tmp_path / "nbs")
    shutil.copytree(
        ROOT / "bmlab",
        tmp_path / "bmlab",
        ignore=lambda folder, names: [
            n
            for n in names
            if n.endswith(".py") and (folder, n) != (f"{ROOT}/bmlab", "__init__.py") or n == "__pycache__"
        ],
    )
    subprocess.run([Path(sys.executable).parent / "nbdev_export"], cwd=tmp_path, check=True, capture_output=True)
    have, want = (
        {p.relative_to(d / "bmlab"): p.read_text() for p in (d / "bmlab").rglob("*.py")} for d in (ROOT, tmp_path)
    )
    assert sorted(have) == sorted(want)
    assert [str(p) for p in want if have[p] != want[p]] == []


def test_the_last_lines_of_a_run_name_what_failed():
    "Each part that failed is named, whatever else did; what was left out stands in one line"
    import suite
    fine = dict(took=61.0, passed=3, failed=[], skipped={}, seconds={})
    text, failed = suite.summary(
        {
            "lines": fine,
            "tests": fine | dict(failed=[f"t{i}" for i in range(6)], skipped={"no compiler": 2}),
            "tutorials": fine | dict(failed=["01.ipynb"]),
        }
    )
    assert failed and text.splitlines()[-1] == "FAILED tests: t0, t1, t2, t3 and 2 more; tutorials: 01.ipynb"
    assert text.splitlines()[-2] == "left out: no compiler (2)" and "1:01 of 17:00" in text and "3:03" in text
    assert suite.summary({"tests": fine}) == (
        "\ntests        1:01 of 17:00   3 passed\ntogether     1:01\nleft out: nothing",
        False,
    )


def test_what_fails_beside_others_runs_once_more(monkeypatch):
    "A few files: what fails again has failed, what passes is named; many, or no file at all, have failed"
    import suite
    ran, again = [], dict(failed=[], took=2.0, seconds={})
    monkeypatch.setattr(suite, "run", lambda part, env, files: ran.append((part, files)) or again)
    house, plan = "tests/project/test_house.py::test_a", "tests/project/test_docs.py"
    fine = dict(took=61.0, passed=3, failed=[], skipped={}, seconds={}, code=1)
    assert suite.once_more("tests", fine, {}) == fine
    pytest_itself, many = (fine | dict(failed=f) for f in (["pytest itself (exit 2)"], [house, plan, "a.py", "b.py"]))
    assert [suite.once_more("tests", f, {}) for f in (pytest_itself, many)] == [pytest_itself, many] and not ran
    assert suite.once_more("tests", fine | dict(failed=[house], code=3), {})["failed"] == [house] and not ran
    again["seconds"] = {house: 1.0, house + "2": 1.0, plan: 1.0}
    once = suite.once_more("tests", fine | dict(failed=[house, house + "2", plan]), {})
    assert ran == [("tests", [plan, house.partition("::")[0]])] and once["failed"] == [] and once["took"] == 63.0
    text, failed = suite.summary({"tests": once})
    assert not failed and text.splitlines()[-1].startswith("passed only when run once more, to be mended: tests: ")
    again["failed"] = [plan]
    twice = suite.once_more("tests", fine | dict(failed=[house, plan]), {})
    assert (twice["failed"], twice["unsteady"]) == ([plan], [house]) and suite.summary({"tests": twice})[1]
    again |= dict(failed=["tests (exit -9)"], seconds={})                   # what did not run again has not passed
    assert suite.once_more("tests", fine | dict(failed=[house]), {})["failed"] == [house, "tests (exit -9)"]


def test_no_file_is_excused():
    "The rules for lines hold everywhere"
    assert "per-file-ignores" not in tomllib.loads((ROOT / "ruff.toml").read_text())["lint"]


def test_readme_is_the_index(): assert readme.main(["--check"]) == 0, "README.md is not what nbs/ says: make readme"


def test_outputs_are_tidy():
    assert tidy.main(["--check"]) == 0
    for path in (ROOT / "tutorials").glob("*.ipynb"):
        counts = [c["execution_count"] for c in json.loads(path.read_text())["cells"] if c["cell_type"] == "code"]
        assert counts == list(range(1, len(counts) + 1)), path.name


def test_cleaner_drops_what_changes():
    widget = "application/vnd.jupyter.widget-view+json"
    view = {
        "output_type": "display_data",
        "data": {widget: {}, "text/plain": "x", "text/html": "x"},
        "metadata": {"a": 1},
    }
    bar, bar2 = (
        {"output_type": "stream", "name": "stderr", "text": ["100%"]},
        {"output_type": "display_data", "data": {widget: {}, "text/plain": "0%|"}, "metadata": {}},
    )
    said = [{"output_type": "stream", "name": "stdout", "text": [t]} for t in ("a ", "b\n", "c")]
    cell = {
        "cell_type": "code",
        "source": "1",
        "execution_count": 7,
        "metadata": {"tags": ["t"], "time": 1},
        "outputs": [view, bar, bar2, *said],
    }
    out = tidy.tidy({"cells": [cell, dict(cell)], "metadata": {"widgets": {}}})
    assert [c["execution_count"] for c in out["cells"]] == [1, 2] and set(out["metadata"]) == {"kernelspec"}
    assert out["cells"][0]["metadata"] == {"tags": ["t"]}
    assert out["cells"][0]["outputs"] == [
        {"output_type": "display_data", "data": {"text/plain": ["x"], "text/html": ["x"]}, "metadata": {}},
        {**said[0], "text": ["a b\n", "c"]},
    ]


def test_nothing_speaks_of_a_machine():
    "No absolute path of somebody's machine in what is shipped"
    for path in subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout.split() or []:
        file = ROOT / path
        if (
            file.suffix in (".py", ".ipynb", ".md", ".toml", ".txt", ".ini", "")
            and file.is_file()
            and path != "tests/project/test_house.py"
        ):
            assert not re.search(r"/(root|work|home/\w+|Users/\w+)/(?!\[)\w", file.read_text(encoding="utf-8")), path


def test_what_a_run_leaves_in_temporary_folders_goes_with_it():
    import suite
    leave = "import pathlib, tempfile; d = tempfile.mkdtemp(); pathlib.Path(d, 'a').write_text('a'); print(d)"
    with suite.environment(["tests"]) as env:
        done = subprocess.run([sys.executable, "-c", leave], env=env, capture_output=True, text=True, check=True)
        left = Path(done.stdout.strip())
        assert (left / "a").exists()
        # compiled code is kept from run to run
        assert not env["TORCHINDUCTOR_CACHE_DIR"].startswith(env["TMPDIR"])
    assert not left.exists() and not Path(env["TMPDIR"]).exists()

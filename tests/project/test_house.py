"The checkout keeps its own rules: notebooks clean, modules exported from them, README made from the index."
import json, re, shutil, subprocess, sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import clean_tutorials, house, readme  # noqa: E402

NOTEBOOKS = sorted((ROOT / "nbs").glob("*.ipynb"))


def test_house_rules(): assert list(house.problems(ROOT)) == []


def test_house_rules_see_what_breaks_them(tmp_path):
    "Each rule finds a planted offence"
    def notebook(name, *cells):
        cells = [{"cell_type": "code", "source": c} for c in cells]
        (tmp_path / "nbs" / name).write_text(json.dumps({"cells": cells}))
    (tmp_path / "nbs").mkdir(); (tmp_path / "bmlab").mkdir()
    notebook("00_low.ipynb", "#| default_exp low", "#| export\nfrom bmlab.high import x", "#| export\ndef f():\n    import bmlab.high", "import os\nx = 1", "#| hide\ntest_eq(1, 1)", "#| export\n" + "x = 1\n" * 70)
    notebook("10_high.ipynb", "#| default_exp high")
    (tmp_path / "bmlab/low.py").write_text("import matplotlib\ndef f():\n    import ipywidgets\n")
    (tmp_path / "bmlab/high.py").write_text("import bmlab.app.picker\n"); (tmp_path / "bmlab/stale.py").write_text("")
    found = "\n".join(house.problems(tmp_path))
    for words in ("cell 1: imports upward, high", "cell 2: imports upward, high", "cell 3: mixes", "cell 4: a hidden test", " exported lines, at most 60", "low.py:1: imports matplotlib", "high.py:1: imports bmlab.app.picker", "stale.py: no notebook"):
        assert words in found, words
    assert "ipywidgets" not in found


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.name)
def test_notebook_is_clean(path):
    nb = json.loads(path.read_text(encoding="utf-8"))
    assert set(nb["metadata"]) <= {"kernelspec"}
    for cell in nb["cells"]:
        assert set(cell["metadata"]) <= {"tags"}
        if cell["cell_type"] == "code":
            assert cell["execution_count"] is None
            assert path.name == "index.ipynb" or cell["outputs"] == []


def test_no_drift(tmp_path):
    "bmlab/ is exactly what the notebooks export, with nothing stale beside it"
    shutil.copy(ROOT / "settings.ini", tmp_path); shutil.copytree(ROOT / "nbs", tmp_path / "nbs")
    (tmp_path / "bmlab").mkdir(); shutil.copy(ROOT / "bmlab/__init__.py", tmp_path / "bmlab")
    subprocess.run([Path(sys.executable).parent / "nbdev_export"], cwd=tmp_path, check=True, capture_output=True)
    have, want = ({p.relative_to(d / "bmlab"): p.read_text() for p in (d / "bmlab").rglob("*.py")} for d in (ROOT, tmp_path))
    assert sorted(have) == sorted(want)
    assert [str(p) for p in want if have[p] != want[p]] == []


def test_readme_is_the_index(): assert readme.main(["--check"]) == 0, "README.md is not what nbs/ says: make readme"


def test_tutorials_are_clean():
    assert clean_tutorials.main(["--check"]) == 0
    for path in (ROOT / "tutorials").glob("*.ipynb"):
        counts = [c["execution_count"] for c in json.loads(path.read_text())["cells"] if c["cell_type"] == "code"]
        assert counts == list(range(1, len(counts) + 1)), path.name


def test_cleaner_drops_what_changes():
    widget = "application/vnd.jupyter.widget-view+json"
    view = {"output_type": "display_data", "data": {widget: {}, "text/plain": "x", "text/html": "x"}, "metadata": {"a": 1}}
    bar, bar2 = {"output_type": "stream", "name": "stderr", "text": ["100%"]}, {"output_type": "display_data", "data": {widget: {}, "text/plain": "0%|"}, "metadata": {}}
    said = [{"output_type": "stream", "name": "stdout", "text": [t]} for t in ("a ", "b\n", "c")]
    cell = {"cell_type": "code", "source": "1", "execution_count": 7, "metadata": {"tags": ["t"], "time": 1}, "outputs": [view, bar, bar2, *said]}
    out = clean_tutorials.clean({"cells": [cell, dict(cell)], "metadata": {"widgets": {}}})
    assert [c["execution_count"] for c in out["cells"]] == [1, 2] and set(out["metadata"]) == {"kernelspec"}
    assert out["cells"][0]["metadata"] == {"tags": ["t"]}
    assert out["cells"][0]["outputs"] == [{"output_type": "display_data", "data": {"text/plain": "x", "text/html": "x"}, "metadata": {}}, {**said[0], "text": ["a b\n", "c"]}]


def test_nothing_speaks_of_a_machine():
    "No absolute path of somebody's machine in what is shipped"
    for path in subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout.split() or []:
        file = ROOT / path
        if file.suffix in (".py", ".ipynb", ".md", ".toml", ".txt", ".ini", "") and file.is_file() and path != "tests/project/test_house.py":
            assert not re.search(r"/(root|work|home/\w+|Users/\w+)/(?!\[)\w", file.read_text(encoding="utf-8")), path

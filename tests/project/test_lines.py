"The lines that the README shows are run as they stand."
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def lines_with(word):
    "README's Python lines in which a word stands"
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return next(b for b in re.findall(r"```python\n(.*?)```", text, re.S) if word in b)


def everything(layers=None):
    "The names of a script that begins with the package's star import; `layers`: models loaded are cut to so many"
    names = {"__name__": "__main__"}
    exec("from bmlab.all import *", names)
    load = names["load"]

    def cut(*args, **kw):
        model, tok = load(*args, **kw)
        model.model.layers = model.model.layers[:layers]
        model.config.num_hidden_layers = layers
        return model, tok

    if layers: names["load"] = cut
    return names


@pytest.mark.long
@pytest.mark.parametrize("layers", [4, pytest.param(None, marks=pytest.mark.slow)])
def test_readme_lines_run(tmp_path, monkeypatch, capsys, layers):
    code = lines_with("fit(")
    assert "steps=100" in code
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("bmlab.all.load", everything(layers)["load"])
    smaller = {
        "steps=100": "steps=2",
        "pack_tokens(train, tok, 64)": "pack_tokens(train, tok, 16)",
        "pack_tokens(held, tok, 64)": "pack_tokens(held[:4], tok, 16)",
        "range(8))]": "range(1))]",
        "calib=calib)": 'calib=calib, modules="layers[3:].mlp.*_proj")',
    }
    for long, short in smaller.items():                               # minutes → seconds
        assert long in code
        code = code.replace(long, short)
    exec(compile(code, "README.md", "exec"), {"__name__": "__main__"})
    said = capsys.readouterr().out
    assert said.strip() if layers else "Paris" in said
    assert (tmp_path / "tuned/adapter_model.safetensors").is_file() and (
        tmp_path / "small/cooked.safetensors"
    ).is_file()


@pytest.mark.long
def test_readme_training_lines_run(tmp_path, monkeypatch):
    code = lines_with("shard(")
    assert "steps=100" in code and "save_every=50" in code
    monkeypatch.chdir(tmp_path)
    names = everything(layers=2)
    try:
        for long, short in {"steps=100": "steps=2", "save_every=50": "save_every=2", "tok, 64": "tok, 16"}.items():
            code = code.replace(long, short)
        exec(compile(code, "README.md", "exec"), names)
    finally: names["shutdown"]()
    assert (
        len(names["log"]) == 2 and (tmp_path / "out/model.safetensors").is_file() and names["latest"]("run") is not None
    )


@pytest.mark.long
def test_readme_inference_lines_run(capsys):
    names = everything()
    exec(compile(lines_with("memory_limit"), "README.md", "exec"), names)
    assert names["e"].plan.streamed and "0 Paris" in capsys.readouterr().out.replace("0  ", "0 ")
    names["e"].close()


@pytest.mark.long
def test_readme_cooking_lines_run(tmp_path, monkeypatch):
    code = lines_with("Cook(")
    assert "range(100)" in code and "steps=50" in code
    monkeypatch.chdir(tmp_path)
    names = everything(layers=2)
    exec("import copy, torch", names)
    smaller = {"range(100)": "range(2)", "steps=50": "steps=1", "pack_tokens(held, tok": "pack_tokens(held[:5], tok"}
    for long, short in smaller.items(): code = code.replace(long, short)
    exec(compile(code, "README.md", "exec"), names)
    small, whole = (names[n].model.layers for n in ("small", "teacher"))
    assert small[0].mlp.up_proj.out_features == 1152
    assert names["count"](small).bytes < 0.25 * names["count"](whole).bytes


@pytest.mark.long
def test_readme_lines_about_texts_and_prompts_run(tmp_path, monkeypatch):
    texts, prompts = lines_with("Corpus.from_frame"), lines_with("PromptModel(")
    monkeypatch.chdir(tmp_path)
    names = everything()
    names["model"], names["tok"] = names["load"]("smollm2-135m", device="cpu")
    exec(compile(texts.replace("[::20]", "[::200]"), "README.md", "exec"), names)
    assert names["clean"].finished and names["batches"][0]["input_ids"].shape == (2, 64)
    exec(compile(prompts, "README.md", "exec"), names)
    said = names["reader"].predict(["A dull film, far too long.", "A film of rare beauty."])
    assert said.label.tolist() == ["bad", "good"]


@pytest.mark.long
def test_readme_picture_is_what_the_lines_print():
    from bmlab.all import Lora, load, tree
    model, _ = load("smollm2-135m", device="cpu")
    Lora(model, r=8, modules=["q_proj", "v_proj"]).freeze()
    assert str(tree(model)).rstrip() in (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.long
def test_runner_without_nbdev(tmp_path):
    "It runs a notebook whole, and says which cell failed"
    import json
    from fresh import fresh_python
    script = ROOT / "tools/run_cells.py"
    program = f"import runpy; runpy.run_path({str(script)!r}, run_name='__main__')"
    run = lambda nb: fresh_python(program, "--all", nb)
    good = run(ROOT / "nbs/04_models/00_card.ipynb")
    assert good.returncode == 0 and "ok 00_card.ipynb" in good.stdout, good.stdout
    cells = [
        {"cell_type": "code", "source": s} for s in ("x = 1", "#| slow\n1/0", "#| cuda\nassert cuda", "assert x == 2")
    ]
    (tmp_path / "bad.ipynb").write_text(json.dumps({"cells": cells}))
    bad = run(tmp_path / "bad.ipynb")
    assert bad.returncode == 1 and "FAILED bad.ipynb[3]" in bad.stdout and "0 passed, 1 failed" in bad.stdout
    absent = ("raise OSError('could not fetch the sample'); text = 1", "len(text)", "y = 2", "assert y == 2")
    (tmp_path / "alone.ipynb").write_text(json.dumps({"cells": [{"cell_type": "code", "source": s} for s in absent]}))
    alone = run(tmp_path / "alone.ipynb")
    assert alone.returncode == 0 and "cells 0, 1" in alone.stdout, alone.stdout


def test_what_a_gpu_shows_is_stored_under_its_name(monkeypatch):
    import datetime, run_cells, torch
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA X")
    value, error = run_cells.run_cell("a = 2\nprint('said')\na * 21", "cell", {})
    assert (value, error) == (42, None) and run_cells.run_cell("a = 2\na * 21;", "cell", {}) == (None, None)
    said, shown = run_cells.outputs_of("said\n", value)
    assert "".join(said["text"]) == f"NVIDIA X, {datetime.date.today()}\nsaid\n"
    assert shown["data"] == {"text/plain": ["42"]}
    assert run_cells.outputs_of("", None) == []


def test_readme_names_every_tutorial_and_every_door():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for path in (ROOT / "tutorials").glob("*.ipynb"): assert f"](tutorials/{path.name})" in text, path.name
    for path in (ROOT / "nbs").glob("[0-9]*.ipynb"): assert f"](nbs/{path.name})" in text, path.name
    assert len(text.splitlines()) < 200, "whoever adds to README makes room"


def test_every_door_names_its_rooms():
    for folder in (p for p in (ROOT / "nbs").glob("[0-9]*") if p.is_dir()):
        door = folder.with_suffix(".ipynb").read_text(encoding="utf-8")
        for room in folder.glob("[0-9]*.ipynb"): assert f"]({folder.name}/{room.name})" in door, room.name


def test_readme_links_exist():
    for name in ("README.md", "README.zh.md", "CONTRIBUTING.md"):
        for link in re.findall(r"\]\(([^)#:]+)\)", (ROOT / name).read_text(encoding="utf-8")):
            assert (ROOT / link).exists(), link

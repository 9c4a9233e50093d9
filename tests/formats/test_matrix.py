"The table of docs/formats.md is what the code does: each test that it names exists, each refusal is raised as it says"
import ast
import json
import re
import zipfile
from pathlib import Path

import pytest
from packed_models import model_like

from bmlab.cook import export_gguf, quantize
from bmlab.formats import QuantizedFiles
from bmlab.formats.gguf import _STORED
from bmlab.formats.gguf_models import PACKED
from bmlab.models import load
from bmlab.train import export_hf

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "formats.md").read_text(encoding="utf-8")
ROWS = [[c.strip() for c in line.strip("|").split("|")] for line in TEXT.partition("\n\n## ")[0].splitlines()
        if line.startswith("| ")][1:]
HELD = dict(re.findall(r"^- \*\*(\d+)\*\* (.*)$", TEXT, re.M))
REFUSED = dict(re.findall(r"^- \*\*(r\d+)\*\* .*?: \*(.*)\*$", TEXT, re.M))
CASES = {  # row → folders made by the owners
    "GPTQ, 4 bits, act-order too": ("gptq-4", "gptq-4-asym", "gptq-4-act-order"),
    "GPTQ, 2 and 3 bits": ("gptq-2", "gptq-3"), "GPTQ, 8 bits": ("gptq-8",), "AWQ": ("awq",),
    "compressed-tensors W4A16": ("W4A16", "W4A16-asym"), "compressed-tensors W8A16": ("W8A16", "W8A16-groups"),
    "compressed-tensors W8A8": ("W8A8",), "compressed-tensors FP8": ("FP8", "FP8-tensor"),
    "FP8 in blocks": ("fp8-blocks",), "MXFP4": ("mxfp4",), "bitsandbytes, NF4 and FP4": ("nf4", "nf4-double", "fp4"),
    "bitsandbytes, 8 bits": ("int8",),
}
CALLS = {
    "r1": lambda to: load(export_hf(model_like(), to / "x"), packed=True, device="cpu"),
    "r2": lambda to: export_hf(model_like(), to / "x", format="compressed-tensors"),
    "r3": lambda to: export_hf(model_like(), to / "x", format="mxfp4"),
    "r4": lambda to: export_hf(model_like(), to / "x", format="bitsandbytes"),
    "r5": lambda to: export_gguf(model_like(), to / "x.gguf", type="IQ2_S"),
    "r6": lambda to: load(marlin(to), device="cpu"),
    "r7": lambda to: export_hf(model_like(), to / "x", format="marlin-24"),
}


def marlin(to):
    "A folder that says that it is of that format"
    folder = export_hf(quantize(model_like(), bits=4), to / "x", format="compressed-tensors")
    said = json.loads((folder / "config.json").read_text())
    said["quantization_config"]["format"] = "marlin-24"
    (folder / "config.json").write_text(json.dumps(said))
    return folder


def test_every_cell_is_a_test_or_a_refusal():
    assert len(ROWS) > 20 and all(len(row) == 5 for row in ROWS)
    used = set()
    for name, *cells in ROWS:
        for cell in cells:
            marks = re.findall(r"\((r?\d+)\)", cell)
            assert marks, f"{name}: {cell!r} names neither a test nor a refusal"
            used |= set(marks)
    assert used == HELD.keys() | REFUSED.keys()


def test_each_test_is_there():
    named = [n for line in HELD.values() for n in re.findall(r"`(tests/[^`]+)`", line)]
    assert len(named) >= len(HELD)
    for file, _, function in (n.partition("::") for n in named):
        there = {f.name for f in ast.parse((ROOT / file).read_text(encoding="utf-8")).body
                 if isinstance(f, ast.FunctionDef)}
        assert function in there, f"{file} has no {function}"


@pytest.mark.parametrize("mark", CALLS)
def test_each_refusal_is_raised(mark, tmp_path):
    with pytest.raises(ValueError) as e: CALLS[mark](tmp_path)
    assert REFUSED[mark] in str(e.value) and CALLS.keys() == REFUSED.keys()


def said(cell): return {"yes": True, "widened": False}[re.match(r"\w+", cell)[0]]


def test_what_is_kept_packed(tmp_path):
    kept = {name: said(row[1]) for name, *row in ROWS if name in CASES}
    with zipfile.ZipFile(ROOT / "tests" / "fixtures" / "quantized_folders.zip") as z:
        z.extractall(tmp_path)
        assert {n.partition("/")[0] for n in z.namelist()} == {c for cases in CASES.values() for c in cases}
    for name, cases in CASES.items():
        for case in cases:
            forms = QuantizedFiles(tmp_path / case).forms.values()
            assert any(map(bool, forms)) == kept[name], f"{case} is not as docs/formats.md says"


def test_what_of_gguf_is_kept_packed():
    kinds = {kind: said(row[1]) for name, *row in ROWS if name.startswith("GGUF")
             for kind in re.findall(r"[A-Z]+\d*[A-Z\d_]*", name.removeprefix("GGUF"))}
    assert {k for k, kept in kinds.items() if kept} == set(PACKED)
    assert kinds.keys() == {k for k, *_ in _STORED.values() if not re.fullmatch(r"I\d+|F64", k)}

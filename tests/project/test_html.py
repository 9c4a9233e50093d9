"""One way to HTML: the browser's test feeds every picture with tags, one function escapes, no script writes HTML"""
import ast
import itertools
import json
import random
import re
from pathlib import Path

import pytest

from bmlab.infer.placement import InferencePlan, plan_inference
from bmlab.plan.training import TrainingPlan, plan_training
from toys import FAMILIES

ROOT = Path(__file__).resolve().parents[2]
FED = ROOT / "tests/app/test_html_browser.py"


def pictures():
    "Classes that have a `_repr_html_` or a `_repr_markdown_`: methods, patches and assignments"
    found, wanted = set(), ("_repr_html_", "_repr_markdown_")
    texts = (p.read_text(encoding="utf-8") for p in (ROOT / "bmlab").rglob("*.py"))
    for text in texts:
        if "_repr_html_" not in text and "_repr_markdown_" not in text: continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef):
                if any(getattr(f, "name", "") in wanted for f in node.body): found.add(node.name)
            elif isinstance(node, ast.FunctionDef) and node.name in wanted and node.args.args[0].annotation is not None:
                found.add(ast.unparse(node.args.args[0].annotation))
            elif isinstance(node, ast.Attribute) and node.attr in wanted and isinstance(node.ctx, ast.Store):
                found.add(ast.unparse(node.value))
    return found


def test_every_picture_is_fed_with_tags():
    "`Picture` is HTML that others made, which are fed"
    fed = set(re.findall(r'yield "(\w+)', FED.read_text())) | {"Server", "Picture"}
    missing = sorted((there := pictures()) - fed)
    assert len(there) > 15 and not missing, f"{FED.name} does not yet feed {', '.join(missing)}"


def test_one_function_escapes():
    of = lambda path: "html.escape" in path.read_text(encoding="utf-8")
    assert [p.name for p in (ROOT / "bmlab").rglob("*.py") if of(p)] == ["core.py"]


def test_no_script_writes_html():
    writes = re.compile(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|createContextualFragment|\beval\(")
    scripts = sorted((ROOT / "bmlab/app/static").glob("*.js"))
    assert scripts and not [p.name for p in scripts if writes.search(p.read_text(encoding="utf-8"))]


def places(x, path=()):
    "Paths to all that stands in a JSON object"
    yield path
    inside = x.items() if isinstance(x, dict) else enumerate(x) if isinstance(x, list) else ()
    for k, v in itertools.islice(inside, 40): yield from places(v, (*path, k))


@pytest.mark.parametrize("kind, make", [(InferencePlan, plan_inference), (TrainingPlan, plan_training)])
def test_a_plan_of_other_kinds_is_refused(tmp_path, kind, make):
    "An odd value in a place of a plan's file: the file is named, or the plan is drawn without tags"
    file = tmp_path / "plan.json"
    make(FAMILIES["llama"]()).save(file)
    whole, refused, drawn = file.read_text(), 0, 0
    odd = "<b>", None, True, [], {}, ["<b>"], {"<b>": "<b>"}, float("nan"), -1, 10**400
    for path, value in random.Random(0).sample([*itertools.product(places(json.loads(whole)), odd)], 150):
        d = json.loads(whole)
        inner = d
        for k in path[:-1]: inner = inner[k]
        if path: inner[path[-1]] = value
        file.write_text(json.dumps(d if path else value))
        try: plan = kind.load(file)
        except ValueError as e:
            assert str(file) in str(e), (path, value, e)
            refused += 1
            continue
        assert "<b>" not in plan._repr_html_(), (path, value)
        drawn += 1
    assert refused > 80 and drawn > 5

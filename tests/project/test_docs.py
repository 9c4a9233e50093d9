"""The documentation: what Sphinx reads is made rightly, every link leads somewhere, nothing comes from elsewhere,
search finds."""
import ast, importlib.util, json, re, subprocess, sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "docs"))
import check, stage

SPHINX = pytest.mark.skipif(
    not all(importlib.util.find_spec(m) for m in ("sphinx", "myst_nb", "furo")),
    reason="Sphinx, myst-nb and furo are not installed",
)
PART = [
    "index",
    "overview",
    "rooms",
    "nbs/00_core",
    "nbs/30_delta",
    "nbs/30_delta/01_lora",
    "api/index",
    "api/core",
    "api/delta.lora",
    "tutorials/01_quickstart",
]


# ---- links of the sources ----------------------------------------------------------------------------------------
def prose():
    "(file, its Markdown) of everything that a reader follows links in"
    files = [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        ROOT / "SECURITY.md",
        ROOT / "benchmarks/RESULTS.md",
        *(ROOT / "docs").glob("*.md"),
    ]
    for f in files: yield f.relative_to(ROOT), f.read_text(encoding="utf-8")
    for f in [*stage.notebooks(), *(ROOT / "tutorials").glob("*.ipynb")]:
        for c in json.loads(f.read_text(encoding="utf-8"))["cells"]:
            if c["cell_type"] == "markdown": yield f.relative_to(ROOT), "".join(c["source"])


def test_every_link_of_the_sources_leads_somewhere():
    dead = []
    for path, text in prose():
        try: stage.relink(text, path, stage.page_of(path), lambda *_: True)
        except ValueError as e: dead.append(str(e))
    assert not dead, "\n".join(dead)


def test_links_are_carried_to_the_pages():
    def go(text, source="tutorials/35_prompt.ipynb", known=lambda *_: True):
        return stage.relink(text, Path(source), stage.page_of(Path(source)), known)
    assert go("[it](../nbs/35_prompt/02_template.ipynb#Fields)") == "[it](../nbs/35_prompt/02_template.ipynb#Fields)"
    assert (
        go("[the `x`](../nbs), [code](../scripts/train.py)")
        == "[the `x`](../rooms.md), [code](../files/scripts/train.py.md)"
    )
    assert (
        go("[me](../README.md) [out](https://x.org) [here](#below)", "docs/index.md")
        == "[me](overview.md) [out](https://x.org) [here](#below)"
    )
    assert go("```\n[a](gone.md)\n```") == "```\n[a](gone.md)\n```"
    assert go("see [it](../nbs/35_prompt/02_template.ipynb)", known=lambda path, page: False) == "see it"
    with pytest.raises(ValueError, match="tutorials/35_prompt.ipynb: the link to '../nbs/gone.ipynb' leads nowhere"):
        go("[x](../nbs/gone.ipynb)")


def test_pictures_travel_and_dead_links_are_named_together(tmp_path, monkeypatch):
    for folder in ("docs", "bmlab", "benchmarks"): (tmp_path / folder).mkdir()
    for name, text in (
        ("README.md", "# bmlab\n[x](gone.py) [y](gone2.py)"),
        ("CONTRIBUTING.md", "# c"),
        ("SECURITY.md", "# s"),
        ("benchmarks/RESULTS.md", "# r"),
        ("docs/a.md", "# a\n![plot](a.png) [code](../x.py)"),
        ("x.py", "x = 1\n"),
    ):
        (tmp_path / name).write_text(text)
    (tmp_path / "docs/a.png").write_bytes(b"\x89PNG")
    monkeypatch.setattr(stage, "ROOT", tmp_path)
    with pytest.raises(ValueError, match="'gone.py' leads nowhere(.|\n)*'gone2.py' leads nowhere"):
        stage.stage(tmp_path / "out")
    (tmp_path / "README.md").write_text("# bmlab")
    assert "files/x.py.md" in stage.stage(tmp_path / "out") and (tmp_path / "out/docs/a.png").read_bytes() == b"\x89PNG"
    assert (tmp_path / "out/docs/a.md").read_text() == "# a\n![plot](a.png) [code](../files/x.py.md)"


def test_public_names_in_prose_lead_to_the_reference():
    names = {
        "near_duplicates": "bmlab.data.dedup.near_duplicates",
        "Lora": "bmlab.delta.lora.Lora",
        "rank": "bmlab.train.processes.rank",
    }
    assert (
        stage.linkname("`Lora` and `near_duplicates(texts)`", names)
        == "{py:obj}`Lora <bmlab.delta.lora.Lora>` and {py:obj}`near_duplicates(texts) "
           "<bmlab.data.dedup.near_duplicates>`"
    )
    for same in ("# `Lora`", "[`Lora`](x.md)", "a `rank` of 8", "    `Lora`", "```\n`Lora`\n```", "``Lora``"):
        assert stage.linkname(same, names) == same
    assert stage.linkname("`rank()`", names) == "{py:obj}`rank() <bmlab.train.processes.rank>`"


# ---- notebooks and modules as pages ------------------------------------------------------------------------------
def test_a_notebook_is_made_tidy():
    code = lambda s, **k: dict(
        cell_type="code", id=k.pop("id", "a"), source=s, metadata={}, outputs=k.pop("outputs", []), execution_count=None
    )
    widget = dict(
        output_type="display_data",
        data={"text/plain": "w", "application/vnd.jupyter.widget-view+json": {}},
        metadata={},
    )
    cells = [
        dict(cell_type="markdown", id="m", source=["# x\n", "\n", "> y"], metadata={}),
        code("#| default_exp x"),
        code("#| export\ndef f(): pass", id="e1"),
        code("#| hide\nfrom z import *"),
        code("#| cuda\nf()"),
        code("#| echo: false\nf()", outputs=[widget]),
    ]
    nb = dict(cells=cells)
    made = stage.tidy(nb)["cells"]
    assert [c["source"] for c in made if c["cell_type"] == "code"] == ["def f(): pass", "from z import *", "f()", "f()"]
    assert [c["metadata"]["tags"] for c in made if c["cell_type"] == "code"] == [
        ["exported"],
        ["hide-cell"],
        ["cuda"],
        ["remove-input"],
    ]
    assert made[1]["source"] == '<div id="cell-e1"></div>' and made[-1]["outputs"][0]["data"] == {"text/plain": "w"}
    assert stage.exports(nb) == "x" and stage.title_of(nb) == ("x", "y")


MODULE = '''"""What it is for"""
__all__ = ["K", "f", "C", "D"]
# %% ../nbs/00_x.ipynb #ab12
K = (1, 2)  # two
def f(
    x:int, # (B, L) any | all
           # going on
    *rest,
    y:str="a", # a *word*
)->float:  # > 0
    "Does `it`."
class _Base:
    def go(self, n:int): "Goes."
# %% ../nbs/00_x.ipynb #cd34
class C(_Base):
    "A thing."
    def __init__(self, a): pass
    @property
    def size(self): "How big."
    def _own(self): pass
@dataclass(kw_only=True)
class D:
    "Fields."
    limit_s:float = 2.0 # seconds
'''


def test_a_module_becomes_a_page():
    text, names = stage.api(MODULE, "x", "nbs/00_x")
    assert names == ["K", "f", "C", "D"] and text.startswith("# bmlab.x\n\n> What it is for")
    for line in (
        "::::{py:function} f(x, *rest, y='a')",
        r"| `` x `` | `` int `` |  | (B, L) any \| all going on "
        r"|",
        r"| `` y `` | `` str `` | `` 'a' `` | a \*word\* |",
        r"Returns `` float ``: \> 0",
        "::::{py:class} C(a)",
        ":::{py:method} go(n)",
        ":::{py:property} size",
        "::::{py:class} D(limit_s=2.0)",
        "| `` limit_s `` | `` float `` | `` 2.0 `` | seconds |",
        "::::{py:data} K",
    ):
                     assert line in text.split("\n"), line
    assert "_own" not in text and '<a class="made-in" href="../nbs/00_x.html#cell-ab12">' in text


def test_every_public_name_is_in_the_reference():
    "A page lists what its module's `__all__` lists: what bmlab.all brings must be in one of them"
    listed = set()
    for f in stage.modules():
        if found := re.search(r"^__all__ = (\[.*?\])", f.read_text(encoding="utf-8"), re.M | re.S):
            listed |= set(ast.literal_eval(found[1]))
    tree = ast.parse((ROOT / "bmlab/all.py").read_text(encoding="utf-8"))
    brought = {a.name for node in tree.body if isinstance(node, ast.ImportFrom) for a in node.names if a.asname is None}
    lost = brought - listed
    assert brought and not lost, f"public, but in no module's __all__: {lost}"


def test_every_notebook_is_behind_a_door():
    reached = [p for door, rooms in stage.chapters() for p in (door, *rooms)]
    assert reached == stage.notebooks(), "a folder of nbs/ has a notebook of its name beside it: the chapter's door"
    for path in reached:
        title, what = stage.title_of(json.loads(path.read_text(encoding="utf-8")))
        assert title and what, f"{path.name}: the first line is a title, the line after > says what it is for"


# ---- the pages ---------------------------------------------------------------------------------------------------
def test_the_checker_sees_what_is_wrong(tmp_path):
    (tmp_path / "a.html").write_text(
        '<p id="x"><a href="b.html#y">b</a><a href="#x">a</a><a href="https://x.org">out</a><img '
        'src="data:image/png;base64,AA">'
    )
    (tmp_path / "b.html").write_text('<p id="y">')
    assert check.problems(tmp_path) == []
    (tmp_path / "b.html").write_text(
        '<a href="gone.html">x</a><script src="https://cdn.org/x.js"></script><link rel="stylesheet" href="s.css"><p '
        'style="background: url(//cdn.org/p.png)">'
    )
    (tmp_path / "s.css").write_text('@import "https://cdn.org/f.css"; a { background: url(data:x) }')
    found = check.problems(tmp_path)
    assert len(found) == 5 and "a.html: no place #y in b.html" in found and "b.html: nothing is at gone.html" in found
    assert (
        "b.html: loads https://cdn.org/x.js from elsewhere" in found
        and "s.css: loads https://cdn.org/f.css from elsewhere" in found
    )


def build(out, *args):
    run = subprocess.run([sys.executable, ROOT / "docs/build.py", "--out", out, *args], capture_output=True, text=True)
    assert run.returncode == 0, (run.stdout + run.stderr)[-4000:]
    return run.stdout


@SPHINX
def test_a_small_part_is_built(tmp_path):
    assert "pages, every link leads somewhere" in build(tmp_path, "--jobs", "1", "--only", *PART)
    html = {p: (tmp_path / f"html/{p}.html").read_text(encoding="utf-8") for p in PART}
    assert (
        'id="bmlab.core.resolve"' in html["api/core"]
        and "tag_exported" in html["nbs/00_core"]
        and "data:image/png" not in html["index"]
    )
    assert "bmlab.core.html" not in html["nbs/00_core"] and "../api/core.html#bmlab.core" in html["nbs/00_core"]
    assert (
        'href="30_delta/01_lora.html"' in html["nbs/30_delta"]
        and 'href="../api/delta.lora.html"' in html["nbs/30_delta"]
    )
    assert ">#|" not in html["nbs/00_core"] and "needs a GPU" not in html["nbs/00_core"]


@SPHINX
@pytest.mark.slow
def test_all_pages_in_a_browser(tmp_path):
    """Every page is built without a warning; opened from the folder, search finds, light and dark, and nothing is
    asked of a network"""
    browsing = pytest.importorskip("browsing")
    if browsing.CHROMIUM is None: pytest.skip("no Chromium")
    build(tmp_path)
    with browsing.playwright.sync_playwright() as p:
        browser = p.chromium.launch(executable_path=browsing.CHROMIUM, headless=True, args=browsing.FLAGS)
        page, bad = browser.new_page(), []
        page.on("request", lambda r: None if r.url.startswith(("file:", "data:")) else bad.append(r.url))
        page.on("console", lambda m: bad.append(m.text) if m.type == "error" else None)
        page.on("pageerror", lambda e: bad.append(str(e)))
        grounds = []
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            page.goto((tmp_path / "html/index.html").as_uri())
            grounds.append(page.evaluate("getComputedStyle(document.body).backgroundColor"))
        page.locator("input[name=q]").fill("near_duplicates")
        page.keyboard.press("Enter")
        page.locator("#search-results li a", has_text="bmlab.data.dedup.near_duplicates").first.click()
        browsing.expect(page.locator("dt[id='bmlab.data.dedup.near_duplicates']")).to_be_visible()
        page.locator("dl:has(> dt[id='bmlab.data.dedup.near_duplicates']) a.made-in").click()
        browsing.expect(page.locator("h1")).to_contain_text("dedup")
        browser.close()
    assert not bad and grounds[0] != grounds[1]


def test_every_test_that_a_promise_of_security_names_is_there():
    text = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    tests = "".join(p.read_text(encoding="utf-8") for p in (ROOT / "tests").rglob("test_*.py"))
    named = re.findall(r"`(test_\w+)`", text)
    assert len(named) > 10 and [n for n in named if f"def {n}(" not in tests] == []
    assert [f for f in re.findall(r"`((?:tests|nbs)/[\w/.]+)`", text) if not (ROOT / f).is_file()] == []

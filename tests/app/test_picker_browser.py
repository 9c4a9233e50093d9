"""The picker in JupyterLab, driven in headless Chromium: boxes, keys, filter, a Lora that appears, themes, and
what is left in a saved notebook."""
import json, re

import pytest

from browsing import CHROMIUM, REDRAWN, expect, opened, shot

pytest.importorskip("jupyterlab", reason="jupyterlab is not installed")
pytestmark = [
    pytest.mark.slow,                                       # (test_life_browser picks in JupyterLab, too)
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium on the PATH: apt-get install chromium"),
]

CELLS = ["""import torch, transformers as tf
from bmlab.core import resolve
from bmlab.delta.lora import Lora
from bmlab.app.picker import pick
torch.manual_seed(0)
sizes = dict(hidden_size=64, num_hidden_layers=24, num_attention_heads=4, intermediate_size=128)
model = tf.BertModel(tf.BertConfig(**sizes, vocab_size=99))
picker = pick(model)""", "picker", "d = Lora(model, modules=picker, r=8).freeze()", "print('scratch')"]


@pytest.fixture(scope="module")
def lab():
    with opened(CELLS) as lab:
        lab.run(0)
        lab.run(1)
        lab.picker.wait_for()
        yield lab


LAYER = "encoder.layer.0"


def test_a_folded_row_of_24_is_24_names(lab):
    "Unfold the tree down to a matrix, tick it, and Python has the names, and a pattern that means them"
    expect(lab.row("encoder.layer.0").locator(".bm-fold")).to_have_text("×24")
    for name in (f"{LAYER}.attention", f"{LAYER}.attention.self"):                    # closed and opened again by hand
        lab.row(name).locator(".bm-twist").click()
        expect(lab.row(f"{LAYER}.attention.self.query")).to_have_count(0)
        lab.row(name).locator(".bm-twist").click()
        expect(lab.row(f"{LAYER}.attention.self.query")).to_be_visible()
    lab.pick(f"{LAYER}.attention.self.query")
    assert (
        lab.ask("len(picker.selected), picker.pattern, resolve(model, picker.pattern).keys() == set(picker.selected)")
        == "24 ['query'] True"
    )
    expect(lab.row(f"{LAYER}.attention.self.query")).to_have_attribute("aria-checked", "true")
    for name in ("encoder", "encoder.layer", LAYER, f"{LAYER}.attention"):
        expect(lab.row(name)).to_have_attribute("aria-checked", "mixed")
    expect(lab.picker.locator(".bm-code")).to_have_text('modules="query"')
    expect(lab.picker.locator(".bm-preview")).to_have_text(lab.ask("picker.preview"))
    expect(lab.picker.locator(".bm-preview")).to_contain_text("24,576 parameters")
    shot(lab, "picker-light")


def test_numbers_are_those_of_the_tree(lab):
    "The browser formats counts and bytes as Python does"
    source = """import json
from bmlab.app.picker import _walk
from bmlab.models.tree import cell_text
columns, rows = ("each", "parameters", "trainable", "bytes"), zip(picker._rows, _walk(picker.tree))
print(json.dumps({names[0]: [cell_text(r, c) for c in columns] for r, (node, names) in rows}))"""
    want = json.loads("".join(lab.run(3, source)))
    rows = lab.picker.locator("[role=treeitem]")
    shown = {
        r.get_attribute("data-name"): [
            r.locator(f".bm-{c}").inner_text() for c in ("each", "parameters", "trainable", "memory")
        ]
        for r in rows.all()
    }
    assert len(shown) > 15 and shown == {n: want[n] for n in shown}


def test_one_by_one(lab):
    "The badge shows the 24 layers singly; one of them is taken back; the badge folds them again"
    lab.row(LAYER).locator(".bm-fold").click()
    expect(lab.row("encoder.layer.23")).to_be_attached()
    # below it, open is what was open in the fold
    lab.row("encoder.layer.7").locator(".bm-twist").click()
    lab.pick("encoder.layer.7.attention.self.query")
    assert (
        lab.ask("len(picker.selected), picker.pattern, list(resolve(model, picker)) == picker.selected")
        == "23 ['layer[:7].query', 'layer[8:].query'] True"
    )
    lab.pick("encoder.layer.7.attention.self.query")
    lab.row(LAYER).locator(".bm-fold").click()
    expect(lab.row(LAYER).locator(".bm-fold")).to_have_text("×24")
    assert lab.ask("len(picker.selected)") == "24"


def test_keys(lab):
    "Arrows move and open, Space picks, Enter opens, u unfolds, and the notebook hears none of it"
    cells = lab.page.locator(".jp-Notebook .jp-Cell").count()
    lab.row("encoder").locator(".bm-name").click()
    lab.row("encoder").locator(".bm-name").click()  # picked and taken back: the row is the active one
    keys = lab.page.keyboard
    active = lab.picker.locator(".bm-active")
    expect(active).to_have_attribute("data-name", "encoder")
    keys.press("ArrowLeft")
    expect(lab.row("encoder")).to_have_attribute("aria-expanded", "false")
    keys.press("ArrowLeft")
    expect(active).to_have_attribute("data-name", "")
    keys.press("ArrowDown")
    keys.press("ArrowDown")
    expect(active).to_have_attribute("data-name", "encoder")
    keys.press("ArrowRight")
    expect(lab.row("encoder.layer")).to_be_visible()
    keys.press("ArrowRight")
    keys.press("Enter")
    expect(lab.row(LAYER)).to_have_count(0)
    keys.press("Enter")
    keys.press("ArrowRight")
    expect(active).to_have_attribute("data-name", LAYER)
    keys.press("u")
    expect(lab.row("encoder.layer.23")).to_be_attached()
    keys.press("u")
    expect(lab.row("encoder.layer.23")).to_have_count(0)
    keys.press("Space")
    expect(lab.row(LAYER)).to_have_attribute("aria-checked", "true")
    keys.press("Space")
    for key in ("a", "b", "x", "d", "d", "End", "Home"): keys.press(key)
    assert lab.page.locator(".jp-Notebook .jp-Cell").count() == cells and lab.ask("len(picker.selected)") == "24"


def test_what_is_pressed_stays(lab):
    """Between the press and the release of a box the rows are drawn anew, or the picture around the tree: one
    click; and the keys stay in the tree"""
    box = lab.row(f"{LAYER}.attention.self.key").locator(".bm-box")
    lab.run(3, "import asyncio; asyncio.get_running_loop().call_later(1, setattr, picker, 'rank', 9)")
    box.hover()
    lab.page.mouse.down()
    expect(lab.picker.locator(".bm-preview")).to_contain_text("r=8")
    lab.page.wait_for_timeout(2000)
    lab.page.mouse.up()
    expect(box.locator("xpath=ancestor::*[@role='treeitem']")).to_have_attribute("aria-checked", "true")
    expect(lab.picker.locator(".bm-preview")).to_contain_text("r=9")
    box.hover()
    lab.page.mouse.down()
    lab.page.evaluate(REDRAWN, lab.picker.locator("[role=tree]").element_handle())
    lab.page.mouse.up()
    expect(lab.row(f"{LAYER}.attention.self.key")).to_have_attribute("aria-checked", "false")
    lab.page.evaluate(REDRAWN, lab.picker.locator("[role=tree]").element_handle())
    expect(lab.picker.locator("[role=tree]")).to_be_focused()
    assert lab.ask("len(picker.selected)") == "24"
    lab.run(3, "picker.rank = 8")
    expect(lab.picker.locator(".bm-preview")).to_contain_text("r=8")


def test_screen_readers(lab):
    "Roles, levels and spoken names"
    items = lab.page.get_by_role("tree", name="modules of BertModel").get_by_role("treeitem")
    assert items.count() > 10
    item = lab.page.get_by_role("treeitem", name="query, Linear, 64×64, tunable, 24 of 24 picked")
    expect(item).to_have_attribute("aria-level", "7")
    expect(item).to_be_checked()
    expect(lab.page.get_by_role("treeitem", name="0–23, BertLayer, 24 folded, tunable")).to_have_attribute(
        "aria-checked", "mixed"
    )
    tree = lab.picker.locator("[role=tree]")
    at = tree.get_attribute("aria-activedescendant")
    assert lab.page.locator(f"#{at}").count() == 1
    expect(lab.picker.locator("[role=status]").first).to_be_attached()


def test_ticks_while_the_kernel_works(lab):
    "A cell that runs does not hold up the tree; the kernel hears of it afterwards"
    with lab.working():
        lab.pick(f"{LAYER}.attention.self.key")
        expect(lab.row(f"{LAYER}.attention.self.key")).to_have_attribute("aria-checked", "true")
    assert lab.ask("picker.pattern") == "['query', 'key']"
    lab.pick(f"{LAYER}.attention.self.key")
    assert lab.ask("picker.pattern") == "['query']"


def test_filter_with_a_live_count(lab):
    """Matches are counted while one types, rows that do not match go, Enter picks them; a box under the filter
    stands for the matches"""
    box, status = lab.picker.locator(".bm-filter"), lab.picker.locator(".bm-status")
    box.fill("layer[3:6].value")
    expect(status).to_have_text("3 modules")
    expect(lab.picker.locator(".bm-take")).to_have_text("pick 3")
    expect(lab.row(f"{LAYER}.attention.self.key")).to_have_count(0)
    expect(lab.row(f"{LAYER}.attention.self.value")).to_be_visible()
    box.press("Enter")
    expect(lab.picker.locator(".bm-take")).to_have_text("unpick 3")
    expect(lab.picker.locator(".bm-chosen")).to_have_text("27 modules")
    assert lab.ask("picker.pattern") == "['query', 'layer[3:6].value']"
    box.fill("layer[3:6].attention.*")
    expect(status).to_have_text("27 modules")
    expect(lab.picker.locator(".bm-take")).to_have_text("pick 27")  # 3 × 9, containers too
    box.fill("valu")
    expect(status).to_have_text("24 contain this")
    box.fill("quary")
    expect(status).to_contain_text("nearest: query")
    box.fill("layer[3:6].value")
    expect(status).to_have_text("3 modules")
    box.press("Enter")
    expect(lab.picker.locator(".bm-chosen")).to_have_text("24 modules")
    box.press("Escape")
    expect(lab.row(f"{LAYER}.attention.self.key")).to_be_visible()
    expect(status).to_have_text("")


def test_only_linear(lab):
    "A box stands for all matrices below it"
    toggle = lab.picker.locator(".bm-toggle")
    toggle.click()
    expect(toggle).to_have_attribute("aria-pressed", "true")
    expect(lab.row(f"{LAYER}.attention.self.dropout")).to_have_count(0)
    lab.pick(f"{LAYER}.attention")
    assert lab.ask("len(picker.selected), list(resolve(model, picker.pattern)) == picker.selected") == "96 True"
    lab.picker.get_by_role("button", name="clear").click()
    assert lab.ask("picker.selected + picker.pattern") == "[]"
    toggle.click()
    lab.pick(f"{LAYER}.attention.self.query")
    assert lab.ask("picker.pattern") == "['query']"


def test_a_lora_appears(lab):
    "Attached in another cell, the delta is in the open tree at once; what was picked and open stays"
    expect(lab.picker.locator(".bm-row.bm-delta")).to_have_count(0)
    lab.run(2)
    query = lab.row(f"{LAYER}.attention.self.query")
    expect(query.locator(".bm-delta-mark")).to_have_text("▲")
    expect(query.locator(".bm-mark")).to_have_text("◐")
    expect(lab.row(f"{LAYER}.attention.self.key").locator(".bm-mark")).to_have_text("░")
    expect(query).to_have_attribute("aria-checked", "true")
    expect(query).to_have_attribute("aria-label", re.compile("with delta"))
    assert lab.ask("len(d.sites), list(d.sites) == picker.selected") == "24 True"
    shot(lab, "picker-delta")
    lab.run(3, "d.detach()")
    expect(query.locator(".bm-delta-mark")).to_have_text("")
    lab.run(3, "d.attach()")
    expect(query.locator(".bm-delta-mark")).to_have_text("▲")


def test_dark(lab):
    lab.menu("Settings", "Theme", "JupyterLab Dark")
    lab.page.wait_for_function("() => document.body.dataset.jpThemeLight === 'false'")
    lab.page.wait_for_timeout(500)
    ink = lab.picker.evaluate("e => [getComputedStyle(e).color, getComputedStyle(e).backgroundColor]")
    light = [sum(map(int, re.findall(r"\d+", c)[:3])) for c in ink]
    assert light[0] > 450 and light[1] < 200, ink
    shot(lab, "picker-dark")
    lab.menu("Settings", "Theme", "JupyterLab Light")
    lab.page.wait_for_function("() => document.body.dataset.jpThemeLight === 'true'")


def test_saved_is_a_picture_that_says_what_was_picked(lab):
    lab.save()
    text = lab.notebook.read_text(encoding="utf-8")
    assert "widget-view" not in text and "application/vnd.jupyter.widget" not in text
    html = "".join(json.loads(text)["cells"][1]["outputs"][0]["data"]["text/html"])
    assert "☑ query" in html and "modules=&quot;query&quot;" in html and "▲" in html and "<script" not in html


def test_reloaded_page_is_alive_while_the_kernel_lives(lab):
    lab.page.reload()
    lab.page.get_by_text("| Idle").wait_for(timeout=60_000)
    lab.picker.wait_for()
    expect(lab.picker.locator(".bm-code")).to_have_text('modules="query"')
    lab.pick(f"{LAYER}.attention.self.key")
    assert lab.ask("picker.pattern") == "['query', 'key']"
    lab.pick(f"{LAYER}.attention.self.key")
    lab.save()


def test_fresh_kernel_shows_the_picture(lab):
    "Never 'model not found'"
    for s in lab.api("GET", "sessions"): lab.api("DELETE", f"sessions/{s['id']}")
    lab.open()
    picture = lab.cell(1).locator("[class^=bmlab-pick-]")
    picture.wait_for()
    expect(picture).to_contain_text("BertModel")
    expect(picture).to_contain_text('Picked: 24 modules, modules="query"')
    expect(picture.locator("details").first).to_be_visible()
    assert lab.page.locator(".bmlab-picker").count() == 0 and lab.page.get_by_text("model not found").count() == 0
    shot(lab, "picker-reopened")


def test_nothing_went_wrong(lab): assert [e for e in lab.errors if "favicon" not in e and "404" not in e] == []

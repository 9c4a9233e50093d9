"""What the widgets show in JupyterLab, wide and narrow, in both themes, and when their kernel has ended: they fit, and
a record says that it is one. In the template editor a typo shows its caret, a mended template the bars of a real
model's answer. A look to walk in: a click and arrow keys choose a head in Python, its map is drawn, a
token shows where it looks, and a notebook without a kernel keeps the record of the head chosen last."""
import re

import pytest

from browsing import CHROMIUM, expect, opened, shot

pytest.importorskip("jupyterlab", reason="jupyterlab is not installed")
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium on the PATH: apt-get install chromium"),
]

CELLS = ["""import pandas as pd, torch
from bmlab.all import *
from bmlab.app.panels import chat
model, tok = load("smollm2-135m", device="cpu")
class Typist:
    def __init__(self): self.stats, self.model = {}, model
    def chat(self, messages, **options): yield from (w + " " for w in ["fine"] * 9)
t = Template('{"placeholder":"text_a"} It was {"mask"}', tok)
words = Verbalizer(tok, {"negative": "terrible", "positive": "great"})
editor = edit(t, model, verbalizer=words, example={"text_a": "A film of rare beauty."})
picker, talk = pick(model), chat(Typist())
plan = plan_training(build("llama2-7b", device="meta"), batch=4, seq=256, machine="a100-80")""",
    "picker", "talk", "print('scratch')", "editor", "plan",
    "pareto(pd.DataFrame(dict(file_bytes=[1e6, 3e6, 9e6], perplexity=[30., 20., 19.]), index=[*'abc']))",
    """from bmlab.app.beside import side_by_side
class Fixed:
    tok = type("Tok", (), {"chat_template": "yes", "is_fast": False})()
    def __init__(self, said): self.said, self.stats = said, {"new_tokens": 3, "decode_tok_s": 5.}
    def stop(self): pass
    def story(self, prompt, n=1, **options): yield 0, self.said
    def chat(self, messages, **options): yield self.said
beside = side_by_side({"a": Fixed("It is Paris."), "b": Fixed("It is Rome.")}, "Where?", blind=True); beside""",
    """import transformers as tf
from bmlab.app.heads import walk
torch.manual_seed(0)
sizes = dict(hidden_size=32, num_hidden_layers=6, num_attention_heads=4, intermediate_size=48, vocab_size=99)
w = walk(look(tf.LlamaForCausalLM(tf.LlamaConfig(**sizes)), torch.arange(9) + 3), 0, 0); w"""]


@pytest.fixture(scope="module")
def lab():
    with opened(CELLS) as lab:
        for i in (0, 1, 2, 4, 5, 6, 7, 8): lab.run(i)
        lab.picker.wait_for()
        yield lab


FITS = """e => [...e.querySelectorAll("*")].filter(x => x.getBoundingClientRect().width
  && !x.parentElement.closest("[style*='overflow: auto'], .jp-RenderedHTML pre")
  && x.getBoundingClientRect().right > e.getBoundingClientRect().right + 2).map(x => x.outerHTML.slice(0, 90))"""
CUT = "e => [...e.querySelectorAll('.bm-name')].filter(x => x.scrollWidth > x.clientWidth + 1).map(x => x.textContent)"
APART = """e => [...e.querySelectorAll(".bm-head .bm-cell")].filter(h => h.offsetParent).flatMap(h => {
  const name = [...h.classList].find(c => c !== "bm-cell");
  return [...e.querySelectorAll(`.bm-tree .${name}`)].map(
    c => Math.abs(c.getBoundingClientRect().right - h.getBoundingClientRect().right));
})"""


def test_columns_stand_over_their_numbers_and_names_are_whole(lab):
    body = lab.picker.locator(".bm-body")
    for width in (1440, 800):
        lab.page.set_viewport_size({"width": width, "height": 1000})
        lab.page.wait_for_timeout(200)
        assert max(body.evaluate(APART), default=0) < 1 and body.evaluate(CUT) == [], width
    lab.page.set_viewport_size({"width": 1440, "height": 1000})
    lab.page.wait_for_timeout(200)
    memory = lab.row("model.layers.0.self_attn.q_proj").locator(".bm-memory")
    right = lambda e: e.evaluate("e => e.getBoundingClientRect().right")
    expect(memory).to_have_text("37.97MiB")
    assert right(memory) <= right(body)
    assert lab.picker.locator(".bm-about").inner_text().startswith("smollm2-135m:")
    expect(lab.cell(2).locator(".bp-about")).to_contain_text("smollm2-135m · cpu")


def test_shift_takes_a_range(lab):
    row = lambda name: lab.row(f"model.layers.0.{name}").locator(".bm-box")
    row("self_attn.q_proj").click()
    row("mlp.gate_proj").click(modifiers=["Shift"])
    expect(lab.picker.locator(".bm-chosen")).to_have_text("150 modules")
    assert lab.ask("sorted({n.split('.')[-1] for n in picker.selected})") == str(
        ["gate_proj", "k_proj", "o_proj", "q_proj", "v_proj"])
    row("self_attn.k_proj").click(modifiers=["Shift"])
    expect(lab.picker.locator(".bm-chosen")).to_have_text("90 modules")
    assert lab.page.evaluate("getSelection().toString()") == ""


def test_a_typo_and_its_mending(lab):
    cell = lab.cell(4)
    source, alert = cell.locator("textarea").first, cell.get_by_role("alert")
    # (the record, which the editor hides, has bars too)
    bars = cell.get_by_text("at the mask").filter(visible=True)
    expect(bars).to_be_visible(timeout=60_000)
    expect(cell.locator("td", has_text="positive").filter(visible=True)).to_be_visible()
    source.click()
    lab.page.keyboard.press("Control+End")
    for _ in range(3): lab.page.keyboard.press("ArrowLeft")                        # before the k of mask
    lab.page.keyboard.type("x")
    expect(alert).to_contain_text("did you mean 'mask'")
    assert "^^^^^^^" in alert.inner_text() and bars.count() == 0
    shot(lab, "editor_error")
    lab.page.keyboard.press("Backspace")
    expect(bars).to_be_visible(timeout=60_000)
    expect(alert).to_have_count(0)
    labelled = cell.get_by_label("text_a")
    field = labelled.first if labelled.count() else cell.locator("input[type=text]").first
    shares = "() => [...document.querySelectorAll('td')].map(x => x.innerText).filter(x => x.includes('%')).join()"
    before = lab.page.evaluate(shares)
    field.click()
    lab.page.keyboard.press("Control+A")
    lab.page.keyboard.type("Two wasted hours.")
    expect(cell.locator("span", has_text="wasted").filter(visible=True).first).to_be_visible()
    lab.page.wait_for_function(f"n => ({shares})() !== n", arg=before, timeout=60_000)
    expect(bars).to_be_visible(timeout=60_000)
    shot(lab, "editor")
    assert not [x for x in lab.errors if "bmlab" in x.lower()]


def test_plan_and_editor_fit_their_width(lab):
    lab.menu("View", "Appearance", "Show Left Sidebar")
    for width in (1440, 800, 390):
        lab.page.set_viewport_size({"width": width, "height": 1000})
        lab.page.wait_for_timeout(300)
        for i in (4, 5):
            out = lab.cell(i).locator(".jp-OutputArea-output").last
            assert out.evaluate(FITS) == [], (width, i)
        shot(lab, f"life-{width}")
    lab.page.set_viewport_size({"width": 1440, "height": 1000})


def test_a_picture_is_sharp_and_takes_the_page_s_colour(lab):
    image = lab.cell(6).locator("img").first
    assert image.evaluate("e => e.naturalWidth / e.clientWidth") == pytest.approx(2, abs=.01)
    seen = """e => { const c = document.createElement("canvas"); c.width = c.height = 9;
      const g = c.getContext("2d"); g.drawImage(e, 0, 0, 9, 9, 0, 0, 9, 9);
      return g.getImageData(2, 2, 1, 1).data[3] }"""
    assert image.evaluate(seen) == 0
    lab.menu("Settings", "Theme", "JupyterLab Dark")
    lab.page.wait_for_function("() => document.body.dataset.jpThemeLight === 'false'")
    behind = image.evaluate("""e => { while (getComputedStyle(e).backgroundColor === "rgba(0, 0, 0, 0)")
      e = e.parentElement; return getComputedStyle(e).backgroundColor }""")
    assert sum(map(int, re.findall(r"\d+", behind)[:3])) < 150
    shot(lab, "life-dark")


def test_side_by_side_is_asked_and_voted_on(lab):
    "In the dark theme: names come after the vote, what parts is marked, narrow columns stand below each other"
    panel = lab.cell(7).locator(".bmlab-panel")
    better = panel.get_by_role("button", name="better")
    panel.get_by_role("button", name="Ask all").click()
    expect(panel.locator(".bp-who")).to_have_text(["text A", "text B"])
    expect(better.first).to_be_enabled()
    parts = panel.locator(".bp-said .bp-part2").all_inner_texts()
    assert sorted(x.strip() for x in parts) == ["Paris", "Rome"]
    better.first.click()
    expect(panel.locator(".bp-score")).to_contain_text("votes:")
    expect(panel.locator(".bp-about")).to_have_text(re.compile("^(a, b|b, a)$"))
    lab.recorded(7, "votes:")
    first = panel.locator(".bp-who").first.inner_text()
    assert first in "ab" and lab.ask("beside.votes.winner[0]") == first
    expect(better.first).to_be_disabled()
    columns = panel.locator(".bp-column")
    tops = lambda: columns.evaluate_all("e => e.map(x => Math.round(x.getBoundingClientRect().top))")
    assert len(set(tops())) == 1
    shot(lab, "life-beside")
    lab.page.set_viewport_size({"width": 600, "height": 1000})
    lab.page.wait_for_timeout(200)
    assert len(set(tops())) == 2
    expect(panel.locator(".bp-about")).to_be_visible()
    lab.page.set_viewport_size({"width": 1440, "height": 1000})


def test_a_record_that_a_newer_one_replaces_is_not_missed(lab):
    "Two records come at once: the page, which looks for the first when the second is there, warns of nothing"
    panel = lab.cell(7).locator(".bmlab-panel")
    panel.evaluate("""p => { const e = p.querySelector(".bp-stale"); p.checked = []; new MutationObserver(
      () => p.checked.push(e.hidden)).observe(e, {attributes: true}) }""")
    lab.ask("[beside.set_trait('score', s) or beside._record() for s in ('votes: one', 'votes: two')]")
    lab.recorded(7, "votes: two")
    lab.page.wait_for_timeout(1200)                                       # (the page looks 0.8 seconds later)
    checked = panel.evaluate("p => p.checked")
    assert checked and all(checked)


def test_walk(lab):
    "In the dark theme, beside a picker, whose style sheet is not the walk's"
    page = lab.cell(8).locator(".bmlab-walk")
    grid, words = page.locator(".bw-grid"), page.locator(".bw-word")
    expect(words).to_have_count(9)
    assert grid.evaluate("e => [e.clientWidth, e.clientHeight]") == [4 * 12, 6 * 12]
    expect(page.locator(".bw-rows").first).to_have_text("012345")
    grid.click(position={"x": 3 * 12 + 5, "y": 4 * 12 + 5})
    expect(page.locator(".bw-title").last).to_contain_text("layer 4 head 3")
    assert lab.ask("w.chosen") == "[4, 3]"
    grid.focus()
    lab.page.keyboard.press("ArrowUp")
    expect(page.locator(".bw-title").last).to_contain_text("layer 3 head 3")
    words.nth(8).click()
    want = lab.ask("[f'{v:.2f}' for v in (w.maps[3, 3, 8] * 255).round() / 255]")
    assert str([words.nth(i).get_attribute("title") for i in range(9)]) == want
    drawn = "c => [...c.getContext('2d').getImageData(2, c.height - 2, 1, 1).data][3]"
    alpha = page.locator(".bw-map").evaluate(drawn)
    assert abs(alpha - float(lab.ask("w.maps[3, 3, 8, 0].item() * 255"))) < 3
    lab.recorded(8, "layer 3 head 3: where tokens look")
    page.scroll_into_view_if_needed()
    shot(lab, "walk-dark")


def test_a_kernel_that_ended_leaves_records_that_say_so(lab):
    "The panel keeps what it showed, greyed and shut; the picker goes back to its record, whose pattern fits its ticks"
    box = lab.cell(2).locator("textarea")
    box.click()
    lab.page.keyboard.type("how are you?")
    lab.page.keyboard.press("Enter")
    expect(lab.cell(2).locator(".bp-said").last).to_contain_text("fine fine")
    box.fill("half a thought")
    lab.row("model.layers.0.mlp").locator(".bm-name").scroll_into_view_if_needed()
    lab.cell(3).locator(".cm-content").click()
    lab.recorded(2, "fine fine")
    lab.menu("Kernel", "Restart Kernel…")
    lab.page.locator(".jp-Dialog button", has_text="Restart").click()
    panel = lab.cell(2).locator(".bmlab-panel")
    expect(panel.locator(".bm-record")).to_contain_text("the kernel behind it has ended")
    expect(panel.locator(".bp-said").last).to_contain_text("fine fine")
    expect(panel.get_by_role("button", name="Send")).to_be_disabled()
    expect(box).to_have_value("half a thought")
    expect(box).not_to_be_editable()
    expect(lab.page.locator(".bmlab-picker")).to_have_count(0)
    record = lab.cell(1).locator("[class^=bmlab-pick-]")
    expect(record).to_contain_text('Picked: 90 modules, modules=["v_proj", "o_proj", "gate_proj"]')
    expect(record).to_contain_text("A record, with nothing running behind it")
    shot(lab, "life-ended")


def test_without_a_kernel_there_are_records(lab):
    lab.page.get_by_text("| Idle").wait_for()
    lab.save()
    for s in lab.api("GET", "sessions"): lab.api("DELETE", f"sessions/{s['id']}")
    lab.open()
    for i in (1, 2, 7):
        expect(lab.cell(i).locator("[class^=bmlab-pick-]")).to_contain_text("A record, with nothing")
    expect(lab.cell(8)).to_contain_text("layer 3 head 3: where tokens look")
    expect(lab.cell(4)).to_contain_text("wasted")
    assert lab.page.get_by_text("model not found").count() == 0
    shot(lab, "life-without")
    assert not lab.errors, lab.errors

"""The panels in JupyterLab, driven in headless Chromium: type, stream, stop, fill, continue, find titles and copy one,
two panels on one engine, themes, and what a saved notebook keeps."""
import json, re

import pytest

from bmlab.app.widget import static
from browsing import CHROMIUM, Lab, REDRAWN, expect, opened, shot

pytest.importorskip("jupyterlab", reason="jupyterlab is not installed")
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium on the PATH: apt-get install chromium"),
]

ENGINE = """import threading, time
from bmlab.app.panels import chat, fill_blank, story
class Typist:
    "Types fixed texts, a word at a time, for one reader; waits after `only` pieces; a long text ends when stopped"
    def __init__(self, pause=0.05):
        self.pause, self.only, self.stats = pause, 9999, {}
        self.lock, self.left = threading.Lock(), threading.Event()
    def stop(self): self.left.set()
    def _type(self, items):
        if not self.lock.acquire(blocking=False): raise RuntimeError("this engine is busy with another call")
        try:
            self.left.clear(); self.stats.clear(); self.stats.update(prompt_tokens=4, new_tokens=0)
            for n, item in enumerate(items):
                while not (left := self.left.wait(self.pause)) and n >= self.only: pass
                if left: return
                self.stats["new_tokens"] += 1
                yield item
        finally: self.lock.release()
    def chat(self, messages, max_new_tokens=256, **options):
        last = messages[-1]["content"]
        code = "Here is `len` in **bold**:\\n```python\\nlen([1, 2])\\n```\\nand <b>no</b> markup."
        words = f"You said: {last} ({len(messages)} messages, temperature {options['temperature']:g})"
        if "code" in last: words = code
        elif "long" in last: words = "word " * 5000
        return self._type(w + " " for w in words.split(" ")[:None if "long" in last else max_new_tokens])
    def fill(self, text, blank="__", **options):
        return self._type((i, w) for i in range(text.count(blank)) for w in ("the", " blue", f" one {i + 1}"))
    def story(self, prompt, n=3, **options):
        word = lambda w, i: w + str(i + 1) if w[-1] == " " else w
        return self._type((i, word(w, i)) for w in (" and", " then", " it", " rained ") for i in range(n))
e = Typist()
talk = chat(e, max_new_tokens=512, temperature=0.5)
blanks = fill_blank(e, "We took the __ bus, and then the ____ train.")
tale = story(e, text="We left the house,")
other = chat(e)"""
NAMER = """import time
from bmlab.app.panels import title
class Namer:
    "Names a text by its first word, a word at a time"
    def __init__(self): self.stats, self.left = {}, False
    def stop(self): self.left = True
    def story(self, prompt, n=3, **options):
        self.left, first = False, prompt.split()[0]
        for k, word in enumerate((f'"{first} ', "and ", "others", " for ever" * (400 if "long" in prompt else 1))):
            for piece in word.split("|") if k < 3 else [" for ever"] * (400 if "long" in prompt else 1):
                for i in range(n):
                    if self.left: return
                    time.sleep(0.02); yield i, piece if k != 2 else f"others {i + 1}"
names = title(Namer(), n=3)
names"""
CELLS = [ENGINE, "talk", "blanks", "print('scratch')", "tale", "other", NAMER]


class Panels(Lab):
    def panel(self, i): return self.cell(i).locator(".bmlab-panel").first
    def box(self, i): return self.panel(i).locator("textarea")
    def button(self, i, name): return self.panel(i).get_by_role("button", name=name, exact=True)
    def note(self, i): return self.panel(i).locator(".bp-note")
    def said(self, i): return self.panel(i).locator(".bp-turn .bp-said")
    def idle(self, i): expect(self.panel(i)).to_have_attribute("aria-busy", "false", timeout=60_000)
    def theme(self, name):
        self.menu("Settings", "Theme", f"JupyterLab {name}")
        self.page.wait_for_function(f"() => document.body.dataset.jpThemeLight === '{str(name == 'Light').lower()}'")
        self.page.wait_for_timeout(500)


@pytest.fixture(scope="module")
def lab():
    with opened(CELLS, Panels, 1300, 1100) as lab:
        for i in (0, 1, 2, 4, 5, 6): lab.run(i)
        for i in (1, 2, 4, 5, 6): lab.panel(i).wait_for()
        yield lab


def ask(lab, i, text):
    n = lab.said(i).count()
    lab.box(i).click()
    lab.page.keyboard.type(text)
    lab.page.keyboard.press("Enter")
    expect(lab.said(i)).to_have_count(n + 2)


def test_type_and_stream(lab):
    "Enter sends; words appear while the engine still writes; the meter runs; the kernel is free meanwhile"
    ask(lab, 1, "Tell me a long story")
    expect(lab.said(1).last).to_contain_text("word word")
    expect(lab.panel(1)).to_have_attribute("aria-busy", "true")
    expect(lab.box(1)).to_have_value("")
    expect(lab.box(1)).to_be_focused()
    expect(lab.panel(1).locator(".bp-meter")).to_contain_text(
        re.compile(r"\d+ tokens · [\d.]+ tokens/s · first after .* [\d.]+(MiB|GiB) \(process\)")
    )
    before = len(lab.said(1).last.inner_text())
    assert lab.ask("1 + 1, talk.state") == "2 running"
    expect(lab.said(1).last).to_contain_text("word " * (before // 5 + 5))
    shot(lab, "panel-streaming")


def test_stop(lab):
    "The button ends it; what has come stays, and so does what was typed meanwhile; the focus is back in the box"
    lab.box(1).click()
    lab.page.keyboard.type("half a th")  # typed while the model writes
    lab.button(1, "Stop").click()
    lab.idle(1)
    expect(lab.panel(1).locator(".bp-mark")).to_have_text("stopped")
    expect(lab.button(1, "Send")).to_be_visible()
    expect(lab.button(1, "Stop")).to_be_hidden()
    lab.page.wait_for_timeout(300)
    lab.page.keyboard.type("ought")  # the record was written around the box meanwhile
    expect(lab.box(1)).to_have_value("half a thought")
    assert (
        lab.ask("talk.turns[-1]['note'], 0 < len(talk.result.split()) < 5000, talk.state, e.lock.locked()")
        == "stopped True idle False"
    )
    lab.box(1).fill("")
    ask(lab, 1, "A long one again")
    lab.page.keyboard.press("Escape")
    lab.idle(1)
    assert lab.ask("[t.get('note') for t in talk.turns]") == "[None, 'stopped', None, 'stopped']"


def test_streams_while_a_cell_runs(lab):
    "Text goes on; a click is heard when the cell is done, or before: JupyterLab may send it over a subshell"
    ask(lab, 1, "Something long")
    with lab.working():
        seen = len(lab.said(1).last.inner_text())
        expect(lab.said(1).last).to_contain_text("word " * (seen // 5 + 8))
        lab.button(1, "Stop").click()
    lab.idle(1)
    assert lab.ask("talk.turns[-1]['note']") == "stopped"


def test_code_bold_and_no_markup(lab):
    ask(lab, 1, "Some code")
    lab.idle(1)
    said = lab.said(1).last
    expect(said.locator("code")).to_have_text("len")
    expect(said.locator("strong")).to_have_text("bold")
    expect(said.locator(".bp-code")).to_have_text("len([1, 2])")
    expect(said).to_contain_text("and <b>no</b> markup.")
    assert said.locator("b").count() == 0
    shot(lab, "panel-chat")


def test_history_again_and_clear(lab):
    "The whole conversation is sent; another answer replaces the last; a new conversation is empty"
    lab.button(1, "clear").click()
    expect(lab.said(1)).to_have_count(0)
    ask(lab, 1, "one")
    lab.idle(1)
    ask(lab, 1, "two")
    lab.idle(1)
    expect(lab.said(1).last).to_contain_text("You said: two (3 messages, temperature 0.5)")
    slider = lab.panel(1).get_by_label("temperature")
    slider.focus()
    lab.page.keyboard.press("Home")
    lab.page.keyboard.press("ArrowRight")
    lab.button(1, "another answer").click()
    expect(lab.said(1).last).to_contain_text("temperature 0.05)")
    lab.idle(1)
    assert lab.ask("len(talk.turns), talk.temperature") == "4 0.05"
    slider.focus()
    lab.page.keyboard.press("Home")
    seed = lab.panel(1).get_by_label("seed")
    seed.fill("7")
    seed.press("Tab")
    assert lab.ask("talk.seed, talk.temperature") == "7 0.0"
    seed.fill("")
    seed.press("Tab")
    assert lab.ask("talk.seed") == "None"


def test_keys_stay_in_the_panel(lab):
    "Letters are text, or nothing; new lines are new lines; the notebook hears none of it, but Ctrl+S saves"
    cells = lab.page.locator(".jp-Notebook .jp-Cell").count()
    box, keys = lab.box(1), lab.page.keyboard
    box.click()
    keys.type("a b dd x")
    keys.press("Shift+Enter")
    keys.type("second line")
    expect(box).to_have_value("a b dd x\nsecond line")
    keys.press("Escape")
    keys.press("Home")
    keys.press("ArrowUp")
    lab.panel(1).locator(".bp-log").focus()
    for key in ("a", "b", "x", "d", "d", "Enter", "m"): keys.press(key)
    lab.panel(1).get_by_label("top-k").focus()
    for key in ("a", "b", "x", "d", "d", "ArrowRight"): keys.press(key)
    assert lab.page.locator(".jp-Notebook .jp-Cell").count() == cells and lab.ask("talk.top_k") == "1"
    box.fill("")
    ask(lab, 1, "to be saved")
    lab.idle(1)
    lab.recorded(1, "You said: to be saved")
    keys.press("Control+s")
    lab.saved("You said: to be saved")


def test_busy_is_said(lab):
    ask(lab, 1, "long")
    expect(lab.said(1).last).to_contain_text("word")
    lab.box(5).click()
    lab.page.keyboard.type("Are you there?")
    lab.page.keyboard.press("Enter")
    expect(lab.note(5)).to_contain_text("The engine is busy")
    expect(lab.note(5)).to_have_attribute("role", "status")
    expect(lab.box(5)).to_have_value("Are you there?")
    expect(lab.said(5)).to_have_count(0)
    shot(lab, "panel-busy")
    lab.button(1, "Stop").click()
    lab.idle(1)
    lab.box(5).press("Enter")
    expect(lab.said(5).last).to_contain_text("You said: Are you there?")
    expect(lab.note(5)).to_have_text("")
    expect(lab.box(5)).to_have_value("")
    lab.idle(5)


def test_focus_that_went_on_is_not_fetched_back(lab):
    "The record of a panel is drawn in the moment at which the next panel gets the focus"
    lab.box(1).click()
    assert lab.page.evaluate("""async ([from, to]) => {
      const place = from.closest(".bmlab-panel").parentElement;
      const fresh = place.cloneNode(false);
      fresh.append(...[...place.children].filter(e => !e.contains(from)).map(e => e.cloneNode(true)));
      to.focus(); place.replaceWith(fresh);
      await new Promise(done => queueMicrotask(() => queueMicrotask(done)));
      return [from.isConnected, document.activeElement === to];
    }""", [lab.box(1).element_handle(), lab.box(5).element_handle()]) == [True, True]


def test_a_press_survives_the_record(lab):
    "The record is drawn between the press and the release of a button: one click, not none and not two"
    lab.page.evaluate(
        "() => { window.bmlabClicks = 0; addEventListener('click', e => { if (e.target.closest('button')) "
        "window.bmlabClicks += 1 }, true) }"
    )
    for redrawn in (True, False):
        before = lab.box(4).input_value()
        lab.button(4, "random example").hover()
        lab.page.mouse.down()
        if redrawn: lab.page.evaluate(REDRAWN, lab.box(4).element_handle())
        lab.page.mouse.up()
        expect(lab.box(4)).not_to_have_value(before)
        lab.page.wait_for_timeout(100)
        assert lab.page.evaluate("window.bmlabClicks") == 2 - redrawn
    lab.button(4, "random example").hover()
    lab.page.mouse.down()
    lab.page.evaluate(REDRAWN, lab.box(4).element_handle())
    lab.box(4).hover()
    lab.page.mouse.up()
    lab.page.wait_for_timeout(100)
    assert lab.page.evaluate("window.bmlabClicks") == 2  # released somewhere else: taken back
    lab.box(4).fill("We left the house,")
    expect(lab.box(4)).to_have_value("We left the house,")


def test_a_tap_is_one_click(lab):
    "A finger's click comes behind its release, and what is disabled is not clicked: nobody adds one"
    page = lab.page.context.browser.new_context(has_touch=True).new_page()
    source = static("notebook.js")
    page.set_content(
        "<div id=root><button id=one style='width:200px;height:60px'>one</button><button id=two disabled "
        "style='width:200px;height:60px'><span>two</span></button></div>"
    )
    page.evaluate(
        "keep => { const made = Function(keep + '; return keep')(); window.n = [0, 0]; window.kept = made(root, () => "
        "{}); [one, two].forEach((e, i) => e.addEventListener('click', () => { n[i] += 1 })) }",
        source[source.index("function keep(") : source.index("export default")],
    )
    for i in range(4):
        page.touchscreen.tap(50, 30)
        page.wait_for_timeout(150)
    box = page.locator("span").bounding_box()
    page.mouse.click(box["x"] + 3, box["y"] + 3)
    page.wait_for_timeout(100)
    assert page.evaluate("[...n, kept.held()]") == [4, 0, False]
    page.context.close()


def test_blanks_are_filled_in_place(lab):
    lab.run(3, "e.only = 1")
    lab.box(2).click()
    lab.page.keyboard.press("Control+Enter")
    answers = lab.panel(2).locator(".bp-answer")
    expect(answers).to_have_count(2)
    expect(answers.first).to_have_text("the")
    expect(answers.nth(1)).to_have_class(re.compile("bp-empty"))
    shot(lab, "panel-blanks")
    lab.run(3, "e.only = 9999")
    lab.idle(2)
    expect(answers).to_have_text(["the blue one 1", "the blue one 2"])
    # not by colour alone
    assert answers.first.evaluate("e => getComputedStyle(e).textDecorationLine") == "underline"
    assert lab.ask("blanks.result") == "We took the the blue one 1 bus, and then the the blue one 2 train."
    lab.button(2, "edit").click()
    expect(lab.box(2)).to_have_value("We took the __ bus, and then the ____ train.")
    expect(lab.box(2)).to_be_focused()
    lab.button(2, "Fill in").click()
    lab.idle(2)
    lab.button(2, "keep").click()
    expect(lab.box(2)).to_have_value("We took the the blue one 1 bus, and then the the blue one 2 train.")
    lab.box(2).press("Control+Enter")
    expect(lab.note(2)).to_contain_text("has no blank")
    lab.button(2, "random example").click()
    expect(lab.box(2)).to_have_value(re.compile("__"))
    lab.box(2).fill("Nothing but __.")
    lab.button(2, "Fill in").click()
    lab.idle(2)
    # the raised 1 counts the blanks
    expect(lab.panel(2).locator(".bp-paper")).to_have_text("Nothing but the blue one 11.")


def test_a_story_goes_on_with_tab(lab):
    box, list_, keys = lab.box(4), lab.panel(4).locator("[role=option]"), lab.page.keyboard
    box.click()
    keys.press("Control+End")
    keys.press("Tab")
    expect(list_).to_have_count(3)
    expect(box).to_be_focused()
    lab.idle(4)
    expect(list_).to_have_text([f"{i}and then it rained {i}" for i in (1, 2, 3)])
    keys.press("ArrowDown")
    expect(list_.nth(1)).to_have_attribute("aria-selected", "true")
    assert box.get_attribute("aria-activedescendant") == list_.nth(1).get_attribute("id")
    shot(lab, "panel-story")
    keys.press("Enter")
    expect(box).to_have_value("We left the house, and then it rained 2")
    expect(list_).to_have_count(0)
    lab.page.evaluate("document.execCommand('undo')")
    expect(box).to_have_value("We left the house,")
    lab.page.evaluate("document.execCommand('redo')")
    expect(box).to_have_value("We left the house, and then it rained 2")
    assert lab.ask("tale.text, tale.choices") == "We left the house, and then it rained 2 []"
    box.focus()
    keys.press("Control+End")
    keys.press("Tab")
    expect(list_).to_have_count(3)
    list_.nth(2).hover()
    lab.page.mouse.down()                                      # a press that lasts while they are still written
    expect(list_.nth(2)).to_contain_text("and")
    lab.page.mouse.up()
    lab.idle(4)
    expect(list_).to_have_count(0)
    expect(box).to_be_focused()
    lab.page.wait_for_timeout(300)
    expect(list_).to_have_count(0)
    keys.press("Tab")
    expect(list_).to_have_count(3)
    lab.idle(4)
    keys.press("Escape")
    expect(list_).to_have_count(0)
    keys.press("Escape")
    keys.press("Tab")
    expect(box).not_to_be_focused()  # the way out
    box.focus()
    keys.press("Tab")
    expect(list_.nth(2)).to_contain_text("and")
    keys.type(" but")
    expect(list_).to_have_count(0)
    lab.idle(4)
    expect(list_).to_have_count(0)
    expect(box).to_have_value(re.compile(" but$"))


def test_titles_of_a_pasted_text(lab):
    panel = lab.panel(6)
    box, items = panel.get_by_role("textbox", name="text"), panel.locator(".bp-titles li")
    panel.get_by_role("button", name="Find titles", exact=True).click()
    expect(panel.locator(".bp-note")).to_contain_text("the text is empty")
    box.click()
    lab.page.keyboard.insert_text("Rings are made of iron.\nThey may be worn.")
    panel.get_by_role("button", name="Find titles", exact=True).click()
    expect(items).to_have_count(3)
    expect(items.nth(0)).to_contain_text("Rings and")
    lab.idle(6)
    expect(items.locator(".bp-said")).to_have_text([f'Rings and others {i} for ever' for i in (1, 2, 3)])
    expect(panel.locator(".bp-meter")).to_contain_text("tokens")
    shot(lab, "panel-title")
    assert lab.ask("names.result[0]") == "Rings and others 1 for ever"


def test_a_title_is_copied(lab):
    panel = lab.panel(6)
    copy = panel.get_by_role("button", name="copy title 2")
    copy.evaluate(
        "e => { window.told = []; new MutationObserver(() => told.push(e.textContent)).observe(e, {childList: true}) }"
    )
    copy.click()
    lab.page.wait_for_function("told.length > 1")
    expect(copy).to_have_text("copy")
    assert lab.page.evaluate("told") == [
        "copied" if lab.page.evaluate("navigator.clipboard !== undefined && window.isSecureContext") else "selected",
        "copy",
    ]


def test_titles_by_keys_and_stop(lab):
    panel = lab.panel(6)
    box, items = panel.get_by_role("textbox", name="text"), panel.locator(".bp-titles li")
    box.fill("A long text")
    box.press("Control+Enter")
    expect(items.nth(0)).to_contain_text("for ever for ever")
    box.press("Escape")
    lab.idle(6)
    expect(panel.locator(".bp-note")).to_have_text("stopped")
    expect(items).to_have_count(3)


@pytest.mark.slow
def test_a_real_model(lab):
    "SmolLM2 answers in the panel; the plan is behind the disclosure"
    lab.run(
        3,
        "from bmlab.infer.engine import wrap; smol = wrap('smollm2-135m', bits=8); real = chat(smol, temperature=0.0, "
        "max_new_tokens=20); real",
    )
    lab.panel(3).wait_for()
    ask(lab, 3, "What is the capital of France? Answer in one sentence.")
    expect(lab.said(3).last).to_contain_text("Paris", timeout=60_000)
    lab.idle(3)
    expect(lab.panel(3).locator(".bp-meter")).to_contain_text("tokens/s")
    expect(lab.panel(3).locator(".bp-about")).to_contain_text("smollm2-135m · cpu")
    table = lab.panel(3).locator(".bp-plan table").first
    expect(table).to_be_hidden()
    lab.panel(3).locator("summary").click()
    expect(table).to_be_visible()
    shot(lab, "panel-real")
    lab.run(3, "print('scratch')")


def test_dark(lab):
    lab.theme("Dark")
    for i, name in ((1, "chat"), (2, "fill"), (4, "story"), (6, "title")):
        ink = lab.panel(i).evaluate("e => [getComputedStyle(e).color, getComputedStyle(e).backgroundColor]")
        light = [sum(map(int, re.findall(r"\d+", c)[:3])) for c in ink]
        assert light[0] > 450 and light[1] < 200, ink
        lab.panel(i).scroll_into_view_if_needed()
        shot(lab, f"panel-dark-{name}")
    lab.theme("Light")


def test_a_reloaded_page_goes_on(lab):
    "The panel is alive again after a reload, in the middle of an answer, and the slider stands where it stood"
    turns = lab.said(1).count()
    lab.run(3, "e.pause = 0.1")
    ask(lab, 1, "long")
    expect(lab.said(1).last).to_contain_text("word")
    lab.save()
    lab.page.reload()
    lab.page.get_by_text("| Idle").wait_for(timeout=60_000)
    lab.panel(1).wait_for()
    expect(lab.said(1)).to_have_count(turns + 2)
    expect(lab.panel(1)).to_have_attribute("aria-busy", "true")
    expect(lab.said(1).last).to_contain_text("word word word")
    lab.button(1, "Stop").click()
    lab.idle(1)
    expect(lab.panel(1).get_by_label("top-k")).to_have_value("1")
    expect(lab.panel(1).locator(".bp-stale")).to_be_visible()
    expect(lab.panel(2).locator(".bp-stale")).to_be_hidden()  # an old output takes no new version,
    lab.run(1)
    lab.panel(1).wait_for()
    expect(lab.panel(1).locator(".bp-stale")).to_be_hidden()  # a new one does
    ask(lab, 1, "the last word")
    lab.idle(1)
    lab.page.wait_for_timeout(1500)
    expect(lab.panel(1).locator(".bp-stale")).to_be_hidden()


def test_saved_is_what_was_said(lab):
    expect(lab.said(1).last).to_be_visible()
    lab.recorded(1, "You said: the last word")
    lab.save()
    text = lab.saved("You said: the last word")
    assert "widget-view" not in text and "application/vnd.jupyter.widget" not in text
    html = ["".join(json.loads(text)["cells"][i]["outputs"][0]["data"]["text/html"]) for i in (1, 2, 4, 5)]
    assert (
        "You said: two (3 messages" in html[0]
        and "Model, stopped" in html[0]
        and "underline\">the blue one 1</span>" in html[1]
        and "and then it rained" in html[2]
        and "Are you there?" in html[3]
    )
    assert all("<script" not in h and "first after" in h for h in html)
    titles = json.dumps(json.loads(text)["cells"][6]["outputs"])
    assert "Titles" in titles and "for ever for ever" in titles and "<script" not in titles


def test_fresh_kernel_shows_the_record(lab):
    "Never 'model not found'"
    for s in lab.api("GET", "sessions"): lab.api("DELETE", f"sessions/{s['id']}")
    lab.open()
    for i, text in ((1, "You said: two"), (2, "Nothing but the blue one "
                                              "1."), (4, "and then it rained"), (5, "Are you there?")):
        record = lab.cell(i).locator("[class^=bmlab-pick-]")
        record.wait_for()
        expect(record).to_contain_text(text)
    assert lab.page.locator(".bmlab-panel").count() == 0 and lab.page.get_by_text("model not found").count() == 0
    shot(lab, "panel-reopened")


def test_nothing_went_wrong(lab): assert [e for e in lab.errors if "favicon" not in e and "404" not in e] == []

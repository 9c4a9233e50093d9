"""The title panel in JupyterLab, driven in headless Chromium: paste, click, read the titles as they come, copy
one, stop, and what the saved notebook keeps."""
import json

import pytest

from browsing import CHROMIUM, Lab, expect, opened, shot

pytest.importorskip("jupyterlab", reason="jupyterlab is not installed")
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium on the PATH: apt-get install chromium"),
]

ENGINE = """import time
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
names = title(Namer(), n=3)"""


class Titles(Lab):
    def panel(self, i): return self.cell(i).locator(".bmlab-panel").first
    def idle(self, i): expect(self.panel(i)).to_have_attribute("aria-busy", "false", timeout=60_000)


@pytest.fixture(scope="module")
def lab():
    with opened([ENGINE, "names", "", "print('scratch')"], Titles, 1200, 900) as lab:
        for i in (0, 1): lab.run(i)
        lab.panel(1).wait_for()
        yield lab


def test_paste_and_click(lab):
    panel = lab.panel(1)
    box, items = panel.get_by_role("textbox", name="text"), panel.locator(".bp-titles li")
    panel.get_by_role("button", name="Find titles", exact=True).click()
    expect(panel.locator(".bp-note")).to_contain_text("the text is empty")
    box.click()
    lab.page.keyboard.insert_text("Rings are made of iron.\nThey may be worn.")
    panel.get_by_role("button", name="Find titles", exact=True).click()
    expect(items).to_have_count(3)
    expect(items.nth(0)).to_contain_text("Rings and")
    lab.idle(1)
    expect(items.locator(".bp-said")).to_have_text([f'Rings and others {i} for ever' for i in (1, 2, 3)])
    expect(panel.locator(".bp-meter")).to_contain_text("tokens")
    shot(lab, "panel-title")
    assert lab.ask("names.result[0]") == "Rings and others 1 for ever"


def test_copy(lab):
    panel = lab.panel(1)
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


def test_keys_and_stop(lab):
    panel = lab.panel(1)
    box, items = panel.get_by_role("textbox", name="text"), panel.locator(".bp-titles li")
    box.fill("A long text")
    box.press("Control+Enter")
    expect(items.nth(0)).to_contain_text("for ever for ever")
    box.press("Escape")
    lab.idle(1)
    expect(panel.locator(".bp-note")).to_have_text("stopped")
    expect(items).to_have_count(3)


def test_dark_and_saved(lab):
    lab.page.evaluate("document.body.dataset.jpThemeLight = 'false'")
    shot(lab, "panel-title-dark")
    lab.recorded(1, "stopped")
    lab.page.keyboard.press("Control+s")
    saved = json.dumps(json.loads(lab.saved("stopped"))["cells"][1]["outputs"])
    assert "Titles" in saved and "for ever for ever" in saved and "<script" not in saved

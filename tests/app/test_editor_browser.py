"""The template editor in JupyterLab, driven in headless Chromium: a typo shows its caret, a mended template the
bars of a real model's answer."""
import pytest

from browsing import CHROMIUM, expect, opened, shot

pytest.importorskip("jupyterlab", reason="jupyterlab is not installed")
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium on the PATH: apt-get install chromium"),
]

CELLS = ["""from bmlab.all import *
model, tok = load("smollm2-135m", device="cpu")
t = Template('{"placeholder":"text_a"} It was {"mask"}', tok)
words = Verbalizer(tok, {"negative": "terrible", "positive": "great"})
e = edit(t, model, verbalizer=words, example={"text_a": "A film of rare beauty."})""", "e", "1", "print('scratch')"]


def test_a_typo_and_its_mending():
    with opened(CELLS) as lab:
        lab.run(0)
        lab.run(1)
        cell = lab.cell(1)
        source = cell.locator("textarea").first
        expect(cell.get_by_text("at the mask")).to_be_visible(timeout=60_000)
        expect(cell.locator("td", has_text="positive")).to_be_visible()
        source.click()
        lab.page.keyboard.press("Control+End")
        for _ in range(3): lab.page.keyboard.press("ArrowLeft")                    # before the k of mask
        lab.page.keyboard.type("x")
        alert = cell.get_by_role("alert")
        expect(alert).to_contain_text("did you mean 'mask'")
        assert "^^^^^^^" in alert.inner_text() and cell.get_by_text("at the mask").count() == 0
        shot(lab, "editor_error")
        lab.page.keyboard.press("Backspace")
        expect(cell.get_by_text("at the mask")).to_be_visible(timeout=60_000)
        expect(alert).to_have_count(0)
        field = (
            cell.get_by_label("text_a").first
            if cell.get_by_label("text_a").count()
            else cell.locator("input[type=text]").first
        )
        before = cell.locator("td", has_text="%").all_inner_texts()
        field.click()
        lab.page.keyboard.press("Control+A")
        lab.page.keyboard.type("Two wasted hours.")
        expect(cell.locator("span", has_text="wasted").first).to_be_visible()
        lab.page.wait_for_function(
            "n => [...document.querySelectorAll('td')].map(x => x.innerText).filter(x => x.includes('%')).join() !== n",
            arg=",".join(before),
            timeout=60_000,
        )
        expect(cell.get_by_text("at the mask")).to_be_visible(timeout=60_000)
        shot(lab, "editor")
        assert not [x for x in lab.errors if "bmlab" in x.lower()]

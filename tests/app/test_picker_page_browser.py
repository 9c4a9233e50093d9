"The picker on a page of its own, in headless Chromium: filtered, picked, done; and a page without its token."
import pytest
import transformers as tf

from browsing import CHROMIUM, FLAGS, expect, playwright
from bmlab.app.picker_page import PickerPage

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium on the PATH: apt-get install chromium"),
]


def test_a_page_picks_modules():
    sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4, vocab_size=99)
    model = tf.LlamaForCausalLM(tf.LlamaConfig(**sizes))
    with PickerPage(model) as page, playwright.sync_playwright() as p:
        with p.chromium.launch(executable_path=CHROMIUM, args=FLAGS) as browser:
            tab, wrong = browser.new_page(), []
            tab.on("pageerror", lambda e: wrong.append(str(e)))
            tab.on("console", lambda m: wrong.append(m.text) if m.type == "error" else None)
            tab.goto(page.url)
            tab.locator(".bm-filter").fill("q_proj")
            tab.locator(".bm-take").click()
            expect(tab.locator(".bm-code")).to_contain_text("q_proj")
            tab.get_by_role("button", name="Done").click()
            expect(tab.locator("#said")).to_contain_text('Picked: ["q_proj"]')
            assert page.wait(30) == ["q_proj"] and not wrong

    with PickerPage(model) as page, playwright.sync_playwright() as p:
        with p.chromium.launch(executable_path=CHROMIUM, args=FLAGS) as browser:
            tab = browser.new_page()
            tab.goto(page.url.partition("#")[0])
            expect(tab.locator("#said")).to_contain_text("asks for its token")
            expect(tab.get_by_role("button", name="Done")).to_be_disabled()

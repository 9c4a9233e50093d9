"""A look to walk in, in JupyterLab and headless Chromium: a click and arrow keys choose a head in Python, its map is
drawn, a token shows where it looks, and a notebook without a kernel keeps the record of the head chosen last."""
import pytest

from browsing import CHROMIUM, Lab, expect, opened, shot

pytest.importorskip("jupyterlab", reason="jupyterlab is not installed")
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium on the PATH: apt-get install chromium"),
]

CELLS = ["""import torch, transformers as tf
from bmlab.app import pick
from bmlab.app.heads import walk
from bmlab.infer import look
torch.manual_seed(0)
sizes = dict(hidden_size=32, num_hidden_layers=6, num_attention_heads=4, intermediate_size=48, vocab_size=99)
model = tf.LlamaForCausalLM(tf.LlamaConfig(**sizes))
w = walk(look(model, torch.arange(9) + 3), 0, 0)""", "w", "pick(model)", "print('scratch')"]


def test_walk():
    with opened(CELLS, Lab) as lab:
        lab.run(0)
        lab.run(1)
        page = lab.page.locator(".bmlab-walk").first
        page.wait_for()
        lab.run(2)
        lab.picker.wait_for()
        grid, words = page.locator(".bw-grid"), page.locator(".bw-word")
        expect(words).to_have_count(9)
        # (a picker on the same page has a style sheet of its own)
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
        shot(lab, "walk-light")
        lab.menu("Settings", "Theme", "JupyterLab Dark")
        lab.page.wait_for_function("() => document.body.dataset.jpThemeLight === 'false'")
        lab.page.wait_for_timeout(500)
        shot(lab, "walk-dark")
        lab.save()
        assert "layer 3 head 3: where tokens look" in lab.saved("layer 3 head 3")
        assert not lab.errors, lab.errors

"""What a name, a text or a figure of a file holds stays text on every page: all that makes HTML or Markdown is fed with
tags, and one page of Chromium holds the outcome"""
import contextlib
import json
import re
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

from browsing import CHROMIUM, FLAGS, expect, playwright
MarkdownIt = pytest.importorskip("markdown_it", reason="markdown-it-py is not installed").MarkdownIt
from toys import FAMILIES, make_tok

pytest.importorskip("anywidget", reason="anywidget is not installed")
pytest.importorskip("fastapi", reason="fastapi is not installed: pip install '.[serve]'")
from bmlab.align.chats import Chat
from bmlab.align.opd import Scored
from bmlab.app.editor import Editor
from bmlab.app.panels import chat, fill_blank, story, title
from bmlab.app.picker import pick
from bmlab.app.serve import serve
from bmlab.core import esc, table
from bmlab.data.card import DataCard, Ledger, add_measure
from bmlab.data.corpus import Corpus
from bmlab.data.dedup import NearDuplicates
from bmlab.data.rules import MainText
from bmlab.data.sources import Source
from bmlab.data.steps import Rule
from bmlab.delta import Lora
from bmlab.delta.delta import deltas
from bmlab.delta.hub import DeltaCard, Hub
from bmlab.infer.look import look
from bmlab.infer.placement import InferencePlan, plan_inference
from bmlab.infer.sites import States
from bmlab.models.card import Check, ModelCard, license_check
from bmlab.models.tree import tree
from bmlab.plan.timeline import MemoryTimeline, Span
from bmlab.plan.training import TrainingPlan, plan_training
from bmlab.prompt.bee import Bee
from bmlab.prompt.template import Template
from bmlab.prompt.view import bars_html, lengths_html, tokens_html
from bmlab.train.fp8 import Fp8Plan
from bmlab.train.timeline import Timeline
from bmlab.train.track import Runs

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on the PATH: apt-get install chromium")

# (no dot: it is the name of a module too)
EVIL = """'"><img src=x onerror="hit=1"><script>hit=1</script>[a](javascript:hit=1)"""


def evil_model():
    "Modules, a class and a configuration of bad names"
    block = type(EVIL, (nn.Module,), {"forward": lambda self, x: x})
    m = block()
    m.add_module(EVIL, nn.ModuleList(nn.Linear(4, 4) for _ in range(3)))
    m.add_module("twin", m.get_submodule(EVIL)[0])
    return m


def attacked(x, keys=True):
    "JSON whose texts are all the attack"
    if isinstance(x, dict): return {EVIL + k if keys else k: attacked(v) for k, v in x.items()}
    if isinstance(x, list): return [attacked(v) for v in x]
    return EVIL if isinstance(x, str) else x


def rendered(text):
    "Markdown as HTML, raw HTML allowed, as most readers do"
    return MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"]).render(text)


def of_models(folder):
    m = evil_model()
    yield "Tree", tree(m)._repr_html_()
    yield "Tree in Markdown", rendered(tree(m)._repr_markdown_())
    tree(m).to_html(folder / "tree.html")
    yield "tree page", (folder / "tree.html").read_text()
    with contextlib.closing(pick(m)) as p:
        p.selected = [f"{EVIL}.0"]
        yield "picker's record", p._static()["text/html"]
    yield "Check", license_check(ModelCard(name=EVIL, source=EVIL, license=EVIL, license_text=EVIL))._repr_html_()
    yield "Check by hand", Check(EVIL, (("commercial", "no", EVIL),), (EVIL,))._repr_html_()
    yield "Table", table({EVIL: {EVIL: EVIL}})._repr_html_()
    lora = Lora(m, modules=f"{EVIL}.0", r=1)
    lora.kind = EVIL
    yield "Deltas", deltas(m)._repr_html_()


def of_hubs(folder):
    said = dict(backbone=EVIL, method=EVIL, task=EVIL, license=EVIL, created=EVIL, notes=EVIL)
    card = DeltaCard(name="fine", backbone_sha256="0" * 64, parameters=1, ratio=.5, heads=(EVIL,), **said)
    (folder / "hub/fine").mkdir(parents=True)
    card.write(folder / "hub/fine")
    hub = Hub(folder / "hub")
    yield "Hub", hub._repr_html_()
    yield "hub's page", hub.write_index().read_text()
    with pytest.raises(ValueError, match="make a name"): replace(card, name=EVIL)


def of_data():
    ledger = Ledger()
    ledger.count(EVIL, "in", 9)
    ledger.count(EVIL, EVIL, 9)
    ledger.sample(EVIL, EVIL, EVIL, text=EVIL, twin=EVIL)
    ledger.sample("changed", EVIL, EVIL, text=f"a {EVIL} b", after=f"a {EVIL}  c")
    add_measure(measured := {}, EVIL, EVIL, EVIL)
    sources = [{"name": EVIL, "license": EVIL, "origin": EVIL}]
    card = DataCard.of(sources, [(EVIL, EVIL, ledger)], measured, measured, {EVIL: EVIL})
    yield "DataCard", card.to_html(picture=False)
    yield "card.html", card.files()["card.html"]
    yield "card.md", rendered(card.files()["card.md"])
    pairs = pd.DataFrame({"a": [0], "b": [1], "jaccard": [.9]})
    near = NearDuplicates(cluster=np.zeros(2, int), pairs=pairs, texts=[EVIL + "a", EVIL + "b"])
    yield "NearDuplicates", near._repr_html_()
    yield "Pairs", near.browse()._repr_html_()
    page = f"<title>{esc(EVIL)}</title><article><h1>{esc(EVIL)}</h1><p>{esc(EVIL) * 9}</p></article>"
    yield "MainText", MainText(text=EVIL, title=EVIL, lang=EVIL, source=page)._repr_html_()
    yield "Corpus", Corpus([Source(name="x", kind="text", path="x")], [Rule(len, EVIL, language=EVIL)])._repr_html_()


def of_plans(folder, model):
    plan_inference(model).save(folder / "plan.json")
    d = json.loads((folder / "plan.json").read_text())
    d |= {k: attacked(d[k]) for k in ("embeddings", "settings", "fusable")} | {"host": [EVIL], "packable": [EVIL]}
    d["blocks"] |= {k: attacked(d["blocks"][k]) for k in ("name", "stack")}
    d["machine"] |= {"name": EVIL, "source": EVIL}
    (folder / "plan.json").write_text(json.dumps(d))
    plan = InferencePlan.load(folder / "plan.json")
    yield "InferencePlan", plan._repr_html_()
    plan_training(model, seq=8, tokens=1e6).save(folder / "training.json")
    d = json.loads((folder / "training.json").read_text())
    d |= {k: attacked(d[k]) for k in ("parts", "phases", "machine", "settings")}
    (folder / "training.json").write_text(json.dumps(d))
    yield "TrainingPlan", TrainingPlan.load(folder / "training.json")._repr_html_()
    layer = dict(name=EVIL, outputs=8, inputs=8, bf16_s=2., fp8_s=1., why=EVIL)
    sizes = dict(tokens=9, bf16_s=2., fp8_s=1., saved_bf16=2, saved_fp8=1, kept_bytes=0)
    yield "Fp8Plan", Fp8Plan(layers=pd.DataFrame([layer]), machine=EVIL, **sizes)._repr_html_()
    rows = [(lane, EVIL, 0., 9., 9) for lane in ("compute", EVIL)]
    events = pd.DataFrame(rows, columns=["lane", "name", "start_us", "end_us", "bytes"])
    yield "Timeline", Timeline(events, [0.], 9.)._repr_html_()
    row = dict(planned=9 << 20, measured=1, difference=1 - (9 << 20), where=EVIL)
    planned, told = pd.DataFrame({"activations": [1., 2.], EVIL: [1., 2.]}), pd.DataFrame(row, index=[EVIL])
    seen = MemoryTimeline(planned=planned, spans=[Span(EVIL, "forward", 0, 2)], limit=9, table=told)
    yield "MemoryTimeline", seen._repr_html_()
    log = pd.DataFrame({"step": [1, 2], "loss": [2., 1.], "tokens_per_s": [1., 1.], "seconds": [1., 1.]})
    yield "Runs", Runs({EVIL: log})._repr_html_()


def of_looks(tok, model):
    seen = look(model, tok(EVIL, return_tensors="pt").input_ids[0] % model.config.vocab_size, tok)
    seen.tokens = [EVIL] * len(seen.tokens)
    yield "Look", seen._repr_html_()
    yield "Lens", seen.lens()._repr_html_()
    yield "States", States(model, {EVIL: torch.zeros(2)})._repr_html_()
    ids = np.array(tok(EVIL).input_ids, np.int32)
    yield "Scored", Scored(EVIL, [EVIL], pd.DataFrame({"kl": [1.], "token": [EVIL]}))._repr_html_()
    yield "Chat", Chat(tok, None, ids, ids > ids.min())._repr_html_()


def of_prompts(tok):
    text = "{'placeholder': 'text_a'} <b>x</b> {'mask'} {'soft': 'good'}"
    t = Template(text.replace("'", '"'), tok)
    yield "Encoded", t.encode({"text_a": EVIL}, 64)._repr_html_()
    yield "tokens", tokens_html([(EVIL, "text", EVIL)])
    yield "lengths", lengths_html([(EVIL, 1, 2, True)], limit=EVIL)
    yield "bars", bars_html([(EVIL, .5)])
    yield "Bee", Bee({EVIL.replace("<", "<<"): EVIL.replace("<", "<<"), "<ans>": ""})._repr_html_()
    editor = Editor(t, example={"text_a": EVIL})
    yield "editor", editor.static()
    editor.source.value = f"{EVIL} {{"
    yield "editor's error", editor.static()


class Liar:
    "An engine that says the attack, in texts, plan and errors"
    class plan:
        peak_bytes = 0
        def sentence(self): return EVIL
        def _repr_html_(self): return f"<table style='color:red' onclick='hit=1'><tr><td>{EVIL}<svg onload='hit=1'>"
    def __init__(self, tok):
        self.tok, self.stats, self.max_ctx, self.plan, self.model = tok, {}, 10**6, Liar.plan(), None
    def chat(self, *_, **__): yield EVIL
    def fill(self, *_, **__): yield 0, EVIL
    def story(self, *_, **__):
        yield 0, EVIL
        raise RuntimeError(EVIL)
    @contextlib.contextmanager
    def batcher(self): yield self
    def submit(self, ids, **_):
        class Handle:
            finish, stats = None, {"prompt_tokens": 3, "new_tokens": 1}
            cancel = lambda h: None
            def __iter__(h):
                yield EVIL
                h.finish = "stop"
        return Handle()


def panels(tok):
    "(name, record, script, traits) of each widget, after it has written"
    liar = Liar(tok)
    made = dict(chat=chat(liar, examples=[EVIL]), fill=fill_blank(liar, f"{EVIL} __"))
    made |= dict(story=story(liar, text=EVIL), title=title(liar, text=EVIL))
    for name, p in made.items():
        p.title = p.about = EVIL
        p.ask(*[EVIL] * (name == "chat"))
        with contextlib.suppress(RuntimeError): p.wait(60)
        if name == "chat": p.turns = [*p.turns, {"role": "user", "content": EVIL, "note": EVIL}]
        traits, p.plan = p.get_state(), ""
        yield name, p._static()["text/html"], str(p._esm), traits
        p.close()
    with contextlib.closing(pick(evil_model())) as p:
        p.selected, p.filter = [f"{EVIL}.0"], EVIL
        yield "picker", p._static()["text/html"], str(p._esm), p.get_state()


# a widget of the chapter, drawn from its traits as its front end would
DRAW = """async ([script, traits]) => {
  const widget = (await import(URL.createObjectURL(new Blob([script], {type: "text/javascript"})))).default;
  const model = {get: k => traits[k], set() {}, save_changes() {}, send() {}, on() {}, off() {}};
  const el = document.createElement("div");
  document.body.append(el);
  await widget.initialize?.({model});
  await widget.render({model, el});
  return el.textContent;
}"""

def harmless(page, where):
    page.wait_for_timeout(100)                 # an image that cannot be loaded says so later
    assert page.evaluate("window.hit") is None, where
    bad = "img[src=x], [onerror], [onload], [onclick], svg, [href^=javascript]"
    found = page.evaluate("bad => [...document.querySelectorAll(bad)].map(e => e.outerHTML)", bad)
    assert not found, (where, found[:3])
    assert page.evaluate("[...document.scripts].every(s => !s.text.startsWith('hit'))"), where


def test_nothing_of_a_file_is_markup(tmp_path):
    tok = make_tok()
    tok.add_tokens([EVIL])
    tok.add_special_tokens({"mask_token": "[MASK]", "unk_token": "[UNK]"})
    model = FAMILIES["llama"]()
    made = [*of_models(tmp_path), *of_hubs(tmp_path), *of_data(), *of_plans(tmp_path, model), *of_looks(tok, model)]
    made += of_prompts(tok)
    drawn = [*panels(tok)]
    made += [(f"{name}'s record", record) for name, record, *_ in drawn]
    silent = [name for name, html in made if "onerror" not in html]
    assert not silent, f"these do not show what they were given: {silent}"
    sections = "".join(f"<section id='{esc(name)}'>{html}</section>" for name, html in made)
    with playwright.sync_playwright() as p:
        browser = p.chromium.launch(executable_path=CHROMIUM, headless=True, args=FLAGS)
        page = browser.new_page()
        page.set_content(f"<div>{EVIL}</div>")                              # (it does hit, where nothing escapes it)
        page.wait_for_function("window.hit === 1")
        page.goto("about:blank")
        page.set_content(f"<!doctype html><body>{sections}")
        harmless(page, "the pictures")
        # (nothing has closed its section)
        nested = page.evaluate("[...document.body.children].map(s => s.id)")
        assert nested == [name for name, _ in made]
        for name, _, script, traits in drawn:
            traits = {k: v for k, v in traits.items() if isinstance(v, (str, int, float, list, dict, type(None)))}
            assert "onerror" in page.evaluate(DRAW, [script, traits]), name
            # (what cannot run is left of a plan's picture)
            if name == "chat": assert page.locator('.bp-plan table[style="color:red"] td').count()
            harmless(page, name)
        with serve(Liar(tok), port=0, background=True, name=EVIL) as server:
            page.goto(server.page)
            expect(page.locator("#about")).to_contain_text("onerror")
            page.get_by_role("tab", name="Chat").click()
            box = page.locator("textarea:visible").first
            box.fill(EVIL)
            box.press("Enter")
            expect(page.get_by_role("log")).to_contain_text(re.compile("onerror.*onerror", re.S))
            harmless(page, "the server's page")
            page.set_content(server._repr_html_())
            harmless(page, "Server")
        browser.close()

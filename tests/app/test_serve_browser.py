"""The server's page in headless Chromium: four tabs, streams and stops, keys, light and dark, a token, and
nothing fetched from elsewhere."""
import contextlib, math, re, threading

import pytest

from browsing import CHROMIUM, FLAGS, expect, playwright, shot
from test_serve import serve
import torch

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium on the PATH: apt-get install chromium"),
]


# ends when its client leaves, whatever length was asked for: no test has to be quick
LONG = ["word "] * 5000

class Typist:
    """Types what the last message asks for, a word at a time; `pause` is its speed; after `only` words of a text
    it waits"""
    model, max_ctx, each, only = None, 600, 5, math.inf
    def __init__(self, pause=0.01, chat=True):
        self.tok, self.pause, self.made, self.asked, self.chat_template = self, pause, [], "", "yes" if chat else None
    def __call__(self, text, return_tensors):
        self.asked = text
        return {"input_ids": torch.ones(1, self.each * len(self.talk), dtype=torch.long)}
    talk = [None]
    def apply_chat_template(self, messages, **_):
        self.talk = messages
        return self(messages[-1]["content"], "pt")
    @contextlib.contextmanager
    def batcher(self): yield self
    def words(self, n):
        if "words filled in" in self.asked: return ["the ", "blue ", f"one {len(self.made)}"]
        if "title" in self.asked.lower(): return ['"A ', "Title, ", f'number {n}"']
        if "long" in self.asked: return LONG
        if "code" in self.asked:
            return ["Here:\n", "```python\n", "len([1, 2])\n", "```\n", "and <b>no</b> ", "markup. 你好"]
        if "break" in self.asked: return ["half ", None]
        return (
            [" and ", "then ", "it ", f"rained {n}"]
            if "house" in self.asked
            else [f"You said: {self.asked} ", f"({len(self.talk)} messages)"]
        )
    def submit(self, ids, max_new_tokens, **options):
        same = [h for h in self.made if h.asked is self.asked]
        h = Handle(self, self.words(len(same) + 1), max_new_tokens, options)
        self.made.append(h)
        return h

class Handle:
    def __init__(self, typist, words, most, options):
        self.typist, self.words, self.most, self.options, self.asked, self.left, self.over, self.finish, self.stats = (
            typist,
            words,
            most,
            options,
            typist.asked,
            threading.Event(),
            threading.Event(),
            None,
            {"prompt_tokens": 5, "new_tokens": 0},
        )
    def cancel(self): self.left.set()
    def __iter__(self):
        try: yield from self.typed()
        finally: self.over.set()
    def typed(self):
        for n, w in enumerate(self.words if self.words is LONG else self.words[:self.most]):
            while not (left := self.left.wait(self.typist.pause)) and n >= self.typist.only: pass
            if left:
                self.finish = "cancelled"
                return
            if w is None: raise RuntimeError("the device is gone")
            self.stats["new_tokens"] += 1
            yield w
        self.finish = "stop"
    def cut(self):
        return self.over.wait(10) and self.finish == "cancelled" and self.stats["new_tokens"] < len(self.words)


class Site:
    def __init__(self, page, server, engine):
        self.page, self.server, self.engine, self.errors, self.asked = page, server, engine, [], []
        page.on("console", lambda m: self.errors.append(m.text) if m.type == "error" else None)
        page.on("pageerror", lambda e: self.errors.append(str(e)))
        page.on("request", lambda r: self.asked.append(r.url))
        page.set_default_timeout(15_000)
        page.goto(server.page)
    def tab(self, name):
        self.page.get_by_role("tab", name=name).click()
        return self.page.get_by_role("tabpanel")
    @property
    def panel(self): return self.page.get_by_role("tabpanel")
    @property
    def box(self): return self.panel.locator("textarea")
    @property
    def meter(self): return self.panel.locator(".meter")
    def button(self, name): return self.panel.get_by_role("button", name=name, exact=True)
    def fresh(self):
        "The chat, empty"
        self.tab("Chat")
        if self.button("clear").is_enabled(): self.button("clear").click()
        expect(self.panel.locator(".turn")).to_have_count(0)
    def idle(self): expect(self.panel).to_have_attribute("aria-busy", "false")


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as p:
        b = p.chromium.launch(executable_path=CHROMIUM, headless=True, args=FLAGS)
        yield b
        b.close()


@pytest.fixture(scope="module")
def site(browser):
    engine = Typist()
    with serve(engine, port=0, background=True, name="typist") as server:
        context = browser.new_context(viewport={"width": 1000, "height": 900}, color_scheme="light")
        yield Site(context.new_page(), server, engine)
        context.close()


def test_chat_streams_and_stops(site):
    site.tab("Chat")
    expect(site.page.locator("#about")).to_have_text("typist · context of 600 tokens")
    site.box.click()
    site.page.keyboard.type("Tell me a long story")
    site.page.keyboard.press("Enter")
    said = site.panel.locator(".turn .said")
    expect(said).to_have_count(2)
    expect(said.last).to_contain_text("word word")
    expect(site.panel).to_have_attribute("aria-busy", "true")
    expect(site.box).to_have_value("")
    expect(site.box).to_be_focused()
    expect(site.meter).to_have_text(re.compile(r"\d+ pieces · [\d.]+ per s · first after [\d.]+ s"))
    site.page.keyboard.type("half a th")
    site.button("Stop").click()
    site.idle()
    assert site.engine.made[-1].cut() and site.engine.made[-1].most == 128
    expect(site.panel.locator(".mark")).to_have_text("stopped")
    site.page.keyboard.type("ought")
    expect(site.box).to_have_value("half a thought")
    site.box.fill("A long one again")
    site.box.press("Enter")
    expect(said).to_have_count(4)
    expect(said.last).to_contain_text("word word")
    site.box.press("Escape")
    site.idle()
    assert site.engine.made[-1].cut()
    expect(site.meter).to_contain_text("stopped")
    shot(site, "serve-chat")


def test_chat_history_code_again_and_clear(site):
    site.fresh()
    said = site.panel.locator(".turn .said")
    for text in ("one", "two"):
        site.box.fill(text)
        site.box.press("Enter")
        site.idle()
        expect(said.last).to_contain_text(f"You said: {text}")
    expect(said.last).to_have_text("You said: two (3 messages)")
    expect(site.meter).to_contain_text("2 tokens")
    site.button("another answer").click()
    expect(said).to_have_count(4)
    site.idle()
    expect(said.last).to_have_text("You said: two (3 messages)")
    assert len(site.engine.made[-1].asked) == 3
    site.box.fill("some code")
    site.box.press("Shift+Enter")
    expect(site.box).to_have_value("some code\n")
    site.box.press("Enter")
    site.idle()
    expect(said.last.locator(".code")).to_have_text("len([1, 2])")
    expect(said.last).to_contain_text("and <b>no</b> markup. 你好")
    assert said.last.locator("b").count() == 0
    site.page.locator("#temperature").fill("0")
    site.page.locator("#seed").fill("7")
    site.box.fill("three")
    site.box.press("Enter")
    site.idle()
    o = site.engine.made[-1].options
    assert (o["temperature"], o["seed"], o["top_p"]) == (0, 7, 0.95) and site.engine.made[-1].most == 128
    site.page.locator("#temperature").fill("0.7")
    site.page.locator("#seed").fill("")


def test_a_long_talk_loses_its_oldest_messages(site):
    site.fresh()
    said = site.panel.locator(".turn .said")
    site.engine.each = 140
    for text in ("one", "two", "three"):
        site.box.fill(text)
        site.box.press("Enter")
        site.idle()
        expect(said.last).to_contain_text(f"You said: {text}")
    expect(said).to_have_count(6)
    expect(said.last).to_have_text("You said: three (3 messages)")
    expect(site.meter).to_contain_text("the oldest 2 messages no longer fit and were left out")
    site.engine.each = 5
    site.errors.clear()


def test_an_error_is_said_and_the_message_is_not_lost(site):
    site.fresh()
    site.box.fill("x" * 1_100_000)
    site.box.press("Enter")
    site.idle()
    expect(site.meter).to_have_class(re.compile("problem"))
    expect(site.meter).to_contain_text("longer than max_body=1MiB")
    assert len(site.box.input_value()) == 1_100_000
    site.box.fill("break")
    site.box.press("Enter")
    site.idle()
    expect(site.meter).to_contain_text("the device is gone")
    expect(site.panel.locator(".said").last).to_have_text("half ")
    expect(site.panel.locator(".mark")).to_have_text("broken off")
    site.button("clear").click()
    site.errors.clear()


def test_blanks(site):
    site.tab("Fill in the blank")
    answers = site.panel.locator(".answer")
    site.box.fill("No blank")
    site.box.press("Control+Enter")
    expect(site.meter).to_contain_text("There is no blank")
    site.engine.only = 1
    site.box.fill("We took the __ bus, and then the ____ train.")
    site.box.press("Control+Enter")
    expect(answers).to_have_count(2)
    expect(answers.first).to_have_text("the")
    expect(answers.nth(1)).to_have_class("answer empty")
    shot(site, "serve-fill")
    site.engine.only = math.inf
    site.idle()
    expect(answers).to_have_text([re.compile(r"the blue one \d+")] * 2)
    assert answers.first.evaluate("e => getComputedStyle(e).textDecorationLine") == "underline"
    expect(site.meter).to_contain_text("6 tokens")
    site.button("edit").click()
    expect(site.box).to_have_value("We took the __ bus, and then the ____ train.")
    site.button("Fill in").click()
    site.idle()
    text = site.panel.locator(".paper").inner_text()
    site.button("keep").click()
    expect(site.box).to_have_value(text)
    assert "the blue one" in text and "__" not in text
    site.box.press("Control+z")
    expect(site.box).to_have_value(re.compile("__"))


def test_story(site):
    site.tab("Story")
    list_ = site.panel.get_by_role("option")
    keys = site.page.keyboard
    site.box.fill("We left the house,")
    site.box.press("Tab")
    expect(list_).to_have_count(3)
    expect(site.box).to_be_focused()
    site.idle()
    expect(list_).to_have_text([re.compile(rf"^{i}and then it rained \d+$") for i in (1, 2, 3)])
    keys.press("ArrowDown")
    expect(list_.nth(1)).to_have_attribute("aria-selected", "true")
    assert site.box.get_attribute("aria-activedescendant") == list_.nth(1).get_attribute("id")
    shot(site, "serve-story")
    keys.press("Enter")
    expect(list_).to_have_count(0)
    expect(site.box).to_have_value(re.compile(r"^We left the house, and then it rained \d+$"))
    site.page.evaluate("document.execCommand('undo')")
    expect(site.box).to_have_value("We left the house,")
    site.engine.only = 1
    keys.press("Tab")
    expect(list_.nth(2)).to_contain_text("and")
    list_.nth(2).click()
    site.idle()
    expect(list_).to_have_count(0)  # a click, while they are written
    assert site.engine.made[-1].cut()
    site.engine.only = math.inf
    expect(site.box).to_have_value(re.compile(r"^We left the house, and"))
    keys.press("Tab")
    expect(list_).to_have_count(3)
    keys.press("Escape")
    keys.press("Escape")
    expect(list_).to_have_count(0)
    keys.press("Escape")
    keys.press("Tab")
    expect(site.box).not_to_be_focused()


def test_title(site):
    site.tab("Title")
    items = site.panel.get_by_role("listitem")
    site.box.fill("A long report about rain.")
    site.box.press("Control+Enter")
    expect(items).to_have_count(3)
    site.idle()
    expect(items.locator(".said")).to_have_text([re.compile(r"^A Title, number \d+$")] * 3)
    shot(site, "serve-title")
    assert site.engine.talk[0]["content"].startswith("A long report about rain.\n\nWrite a title")
    # as long as the slider says
    first = site.page.locator("#length").input_value()
    site.page.locator("#length").fill("2")
    site.box.press("Control+Enter")
    expect(items.locator(".said")).to_have_text(["A Title,"] * 3)
    site.idle()
    site.page.locator("#length").fill(first)


def test_two_tabs_at_once(site):
    site.tab("Chat")
    site.box.fill("something long")
    site.box.press("Enter")
    expect(site.panel.locator(".said").last).to_contain_text("word word")
    site.tab("Title")
    expect(site.page.locator("#tab-chat")).to_have_attribute("data-busy", "")
    site.box.fill("Snow.")
    site.button("Find titles").click()
    site.idle()
    expect(site.panel.locator(".said")).to_have_count(3)
    site.tab("Chat")
    expect(site.panel).to_have_attribute("aria-busy", "true")
    site.button("Stop").click()
    site.idle()
    assert next(h for h in site.engine.made if h.asked == "something long").cut()


def test_tabs_by_keys_and_names_of_all_controls(site):
    site.page.get_by_role("tab", name="Chat").focus()
    keys = site.page.keyboard
    for key, name in (
        ("ArrowRight", "Story"), ("ArrowRight", "Title"), ("ArrowRight", "Fill in the blank"), ("ArrowLeft", "Title"),
        ("Home", "Fill in the blank"), ("End", "Title"),
    ):
        keys.press(key)
        tab = site.page.get_by_role("tab", name=name)
        expect(tab).to_be_focused()
        expect(tab).to_have_attribute("aria-selected", "true")
        expect(site.panel).to_have_count(1)
    nameless = site.page.evaluate(
        "[...document.querySelectorAll('input, textarea, button')].filter(e => !(e.ariaLabel || e.textContent || "
        "e.labels?.length || e.placeholder)).map(e => e.outerHTML)"
    )
    assert nameless == []


def test_light_and_dark(site):
    ink = lambda: [
        sum(map(int, re.findall(r"\d+", c)[:3]))
        for c in site.page.evaluate("(s => [s.color, s.backgroundColor])(getComputedStyle(document.body))")
    ]
    assert ink()[0] < 200 < 600 < ink()[1]
    site.page.emulate_media(color_scheme="dark")
    expect(site.page.locator("html")).to_have_attribute("data-theme", "dark")
    assert ink()[0] > 600 and ink()[1] < 200
    site.tab("Story")
    shot(site, "serve-dark")
    theme = site.page.locator("#theme")
    theme.click()
    expect(theme).to_have_text("colours: light")
    assert ink()[1] > 600
    site.page.reload()
    expect(theme).to_have_text("colours: light")
    assert ink()[1] > 600 and site.page.get_by_role("tab", name="Story").get_attribute("aria-selected") == "true"
    theme.click()
    theme.click()
    expect(theme).to_have_text("colours: auto")
    site.page.emulate_media(color_scheme="light")


def test_narrow(site):
    site.page.set_viewport_size({"width": 380, "height": 800})
    for name in ("Fill in the blank", "Chat", "Story", "Title"):
        site.tab(name)
        assert site.page.evaluate("document.documentElement.scrollWidth <= innerWidth"), name
    shot(site, "serve-narrow")
    site.page.set_viewport_size({"width": 1000, "height": 900})


def test_nothing_from_elsewhere_and_nothing_went_wrong(site):
    assert site.asked and all(u.startswith(site.server.url) or u.startswith("data:") for u in site.asked)
    assert site.errors == []


def test_a_token_is_asked_for(browser):
    with serve(Typist(chat=False), port=0, token="sesame-open", background=True, name="locked") as server:
        context = browser.new_context()
        page = context.new_page()
        page.goto(server.url)
        key = page.locator("#key")
        expect(key).to_be_visible()
        expect(page.locator("#about")).to_contain_text("asks for its token")
        page.get_by_label("token").fill("wrong-one")
        page.keyboard.press("Enter")
        expect(key).to_be_visible()
        page.get_by_label("token").fill("sesame-open")
        page.keyboard.press("Enter")
        expect(key).to_be_hidden()
        expect(page.locator("#about")).to_contain_text("locked")
        page.reload()
        expect(page.locator("#about")).to_contain_text("locked")
        expect(key).to_be_hidden()
        page.get_by_role("tab", name="Chat").click()
        expect(page.get_by_role("button", name="Send")).to_be_disabled()
        expect(page.get_by_role("tabpanel")).to_contain_text("no chat template")
        page.get_by_role("tab", name="Title").click()
        page.get_by_label("text", exact=True).fill("Rain.")
        page.get_by_role("button", name="Find titles").click()
        expect(page.get_by_role("listitem")).to_have_count(3)
        context.close()
        context = browser.new_context()
        page = context.new_page()
        page.goto(server.page)
        expect(page.locator("#about")).to_contain_text("locked")
        assert page.url == f"{server.url}/"
        context.close()


def test_a_server_that_is_gone_is_said(browser):
    engine = Typist()
    server = serve(engine, port=0, background=True, name="brief")
    context = browser.new_context()
    page = context.new_page()
    page.goto(server.url)
    page.get_by_role("tab", name="Chat").click()
    page.locator("#chat textarea").fill("long")
    page.keyboard.press("Enter")
    expect(page.locator("#chat .said").last).to_contain_text("word")
    server.close()
    expect(page.locator("#chat .meter")).to_contain_text("the server is closing")
    assert engine.made[-1].cut()
    page.locator("#chat textarea").fill("hello?")
    page.keyboard.press("Enter")
    expect(page.locator("#chat .meter")).to_contain_text("does not answer")
    expect(page.locator("#chat textarea")).to_have_value("hello?")
    context.close()


@pytest.mark.slow
def test_a_real_model(browser):
    "SmolLM2 under a limit smaller than itself, in all four tabs"
    from bmlab.infer.engine import wrap
    with serve(
        wrap("smollm2-135m", bits=8, max_batch=3, max_ctx=256, memory_limit="200MiB"), port=0, background=True,
        name="smollm2",
    ) as server:
        context = browser.new_context(viewport={"width": 1000, "height": 900})
        site = Site(context.new_page(), server, None)
        site.page.set_default_timeout(60_000)
        done = lambda: expect(site.panel).to_have_attribute("aria-busy", "false", timeout=60_000)
        site.page.locator("#length").fill("24")
        site.page.locator("#temperature").fill("0.6")
        site.page.locator("#seed").fill("1")
        site.tab("Chat")
        site.box.fill("What is the capital of France? Answer in one sentence.")
        site.box.press("Enter")
        done()
        expect(site.panel.locator(".said").last).to_contain_text("Paris")
        site.tab("Fill in the blank")
        site.box.fill("The capital of France is __.")
        site.button("Fill in").click()
        done()
        expect(site.panel.locator(".answer")).not_to_have_class("answer empty")
        site.tab("Story")
        site.box.fill("Once upon a time there was")
        site.box.press("Tab")
        done()
        options = site.panel.get_by_role("option").all_inner_texts()
        assert len(options) == len(set(options)) == 3
        shot(site, "serve-real-story")
        site.tab("Title")
        site.box.fill(
            "Heavy rain flooded several streets in the old town on Monday. The fire brigade pumped out forty cellars."
        )
        site.button("Find titles").click()
        done()
        assert all(len(x) > 5 for x in site.panel.get_by_role("listitem").locator(".said").all_inner_texts())
        shot(site, "serve-real-title")
        assert site.errors == []
        context.close()


def test_conversations_stay_in_the_browser(browser):
    "After a reload, several of them, each with its system prompt; code and bold as the notebook's panel shows them"
    with serve(Typist(), port=0, background=True, name="typist") as server:
        context = browser.new_context(viewport={"width": 390, "height": 844})
        site = Site(context.new_page(), server, None)
        said, list_ = site.panel.locator(".said"), site.panel.get_by_role("combobox", name="conversations")
        system = site.page.get_by_label("system prompt")
        def ask(text):
            site.box.fill(text)
            site.box.press("Enter")
            site.idle()
        expect(list_).to_be_hidden()
        system.fill("Be **brief**.")
        ask("use `len` and **care**")
        expect(said.first.locator("code")).to_have_text("len")
        expect(said.first.locator("strong")).to_have_text("care")
        expect(said.last).to_contain_text("(2 messages)")
        site.button("new").click()
        expect(said).to_have_count(0)
        system.fill("")
        ask("a second talk")
        expect(said.last).to_contain_text("(1 messages)")
        site.page.reload()
        expect(said.first).to_have_text("a second talk")
        expect(list_.locator("option")).to_have_text(["a second talk", "use `len` and **care**"])
        list_.select_option("use `len` and **care**")
        expect(said.first.locator("code")).to_have_text("len")
        expect(system).to_have_value("Be **brief**.")
        assert site.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        shot(site, "serve-phone")
        site.page.emulate_media(color_scheme="dark")
        shot(site, "serve-phone-dark")
        site.button("clear").click()
        expect(list_.locator("option")).to_have_text(["new conversation", "a second talk"])
        # what somebody else wrote there is passed over
        for text in ('{"turns": 5}', "no JSON"):
            site.page.evaluate("text => localStorage.setItem(`talk:${text}`, text)", text)
        site.page.reload()
        expect(list_.locator("option")).to_have_count(2)
        assert site.errors == []
        context.close()


def test_an_adapter_is_chosen(browser):
    "The list holds the model and its adapters, the choice goes with every request, and lasts"
    import transformers as tf
    from toys import make_tok
    from bmlab.delta.lora import Lora
    from bmlab.infer.engine import wrap
    tok = make_tok()
    size = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, vocab_size=len(tok))
    model = tf.LlamaForCausalLM(tf.LlamaConfig(**size))
    model.generation_config.eos_token_id = None
    own = Lora(model, r=2, name="own")
    own.detach()
    with wrap(model, tok, device="cpu", max_ctx=256) as e:
        with serve(e, port=0, background=True, name="tiny", adapters={"pirate": own}) as server:
            context = browser.new_context(viewport={"width": 390, "height": 844})
            site, asked = Site(context.new_page(), server, None), []
            site.page.on("request", lambda r: asked.append(r.post_data_json) if r.post_data else None)
            which = site.page.get_by_role("combobox", name="model")
            expect(which.locator("option")).to_have_text(["tiny", "pirate (adapter)"])
            which.select_option("pirate")
            site.page.reload()
            expect(which).to_have_value("pirate")
            site.page.locator("#length").fill("4")
            site.box.fill("ahoy")
            site.box.press("Enter")
            site.idle()
            assert asked[-1]["model"] == "pirate" and site.errors == []
            shot(site, "serve-adapter")
            server.drop_adapter("pirate")
            site.page.evaluate("dispatchEvent(new Event('focus'))")
            expect(which).to_be_hidden()
            context.close()

"""The panels' life without a browser: one generation at a time, what is kept when it is cut, many threads at
once, the record, and what a closed panel leaves."""
import gc, json, re, threading, weakref

import pytest
import torch

pytest.importorskip("anywidget")
import bmlab.app.panels as panels
from bmlab.app.beside import side_by_side
from bmlab.app.panels import _Panel, _memory, chat, fill_blank, story
from bmlab.delta import Adapter, Lora
from fresh import fresh_python
from conftest import until
from toys import FAMILIES, IDS


class Script:
    "An engine that plays a list: texts, (part, text), an exception to raise, or an event to wait for"
    def __init__(self, *items):
        self.items, self.stats, self.tok, self.lock, self.calls, self.stops, self.closed = (
            list(items),
            {},
            "none",
            threading.Lock(),
            [],
            0,
            0,
        )
    def stop(self): self.stops += 1
    def _play(self, call):
        if not self.lock.acquire(blocking=False): raise RuntimeError("busy")
        try:
            self.calls.append(call)
            for item in self.items:
                if isinstance(item, BaseException): raise item
                if isinstance(item, threading.Event): assert item.wait(20)
                else: yield item
        finally:
            self.closed += 1
            self.lock.release()
    def chat(self, messages, **options): return self._play({"messages": messages, **options})
    def fill(self, text, blank="__", **options): return self._play({"text": text, "blank": blank, **options})
    def story(self, prompt, n=3, **options): return self._play({"prompt": prompt, "n": n, **options})


def test_text_is_there_while_it_is_made():
    gate = threading.Event()
    e = Script("one", " two", gate, " three")
    p = chat(e)
    def seen():
        # one message, as a browser gets them
        with p._guard: return p.live == "one two" and p.meter["words"][:1] == ["2 tokens"]
    p.ask("count")
    until(seen)
    assert p.state == "running" and p.turns == [{"role": "user", "content": "count"}]
    gate.set()
    assert p.wait(60) == "one two three"
    assert (
        p.state == "idle"
        and p.live == ""
        and p.turns[1] == {"role": "assistant", "content": "one two three"}
        and e.closed == 1
    )


def test_an_answer_leaves_room_for_its_question():
    e = Script("x")
    lengths = lambda **options: (chat(e, **options).max_new_tokens, story(e, **options).max_new_tokens)
    assert lengths() == (256, 24)
    e.max_ctx = 256
    assert lengths() == (128, 24) and lengths(max_new_tokens=200) == (200, 200)
    e.max_ctx = 32
    assert lengths() == (16, 16)


def test_a_silent_engine_shows_a_clock():
    gate = threading.Event()
    p = chat(Script(gate, "x"))
    p.ask("?")
    until(lambda: p.meter["words"] and p.meter["words"][0].startswith("reading the prompt"))
    first = p.meter["words"][0]
    until(lambda: p.meter["words"][0] != first)
    gate.set()
    p.wait(60)
    assert p.meter["words"][0] == "1 token"


def test_stopping_is_passed_to_the_engine_and_keeps_the_text():
    gate = threading.Event()
    e = Script("a", gate, "b", "c")
    p = chat(e)
    p.ask("?")
    until(lambda: p.live == "a")
    p.stop()
    assert p.state == "stopping" and e.stops == 1
    p.stop()
    assert e.stops == 1  # once is enough
    gate.set()
    assert p.wait(60) == "ab" and p.turns[-1]["note"] == "stopped" and e.closed == 1 and e.lock.acquire(blocking=False)


def test_stopped_before_the_first_piece():
    gate = threading.Event()
    p = chat(Script(gate))
    p.ask("?")
    p.stop()
    gate.set()
    p.wait(60)
    assert (
        p.turns[-1] == {"role": "assistant", "content": "", "note": "stopped"}
        and p.state == "idle"
        and p.meter["words"] == []
    )


def test_an_engine_that_breaks_off():
    p = chat(Script("half", ValueError("out of paper")))
    p.ask("?")
    with pytest.raises(ValueError, match="out of paper"): p.wait(60)
    assert p.turns[-1] == {"role": "assistant", "content": "half", "note": "broken off"} and (p.note, p.problem) == (
        "ValueError: out of paper",
        True,
    )
    p = chat(Script(MemoryError("no room")))
    p.ask("a question")
    with pytest.raises(MemoryError): p.wait(60)
    assert p.turns == [] and p.text == "a question" and p.state == "idle" and "no room" in p.note
    p._engine.items = ["fine"]
    assert p.ask().wait(60) == "fine" and p.note == "" and p.text == ""


def test_an_engine_that_refuses_when_it_is_called():
    e = Script()
    e.chat = lambda messages, **options: (_ for _ in ()).throw(ValueError("too long"))
    p = chat(e)
    p.text = "a question"
    p.ask()
    with pytest.raises(ValueError, match="too long"): p.wait(60)
    assert p.text == "a question" and p.turns == [] and "too long" in p.note


def test_two_panels_on_one_engine():
    "The second says that it is busy and keeps its text, whatever the kinds"
    gate = threading.Event()
    e = Script("a", gate)
    first = chat(e)
    first.ask("?")
    until(lambda: first.live == "a")
    f, s, c = fill_blank(e, "x __"), story(e, text="once"), chat(e)
    f.ask()
    s.ask()
    c.ask("me too")
    for p in (f, s, c):
        with pytest.raises(RuntimeError, match="busy"): p.wait(60)
        assert p.problem and "busy" in p.note and p.state == "idle"
    assert (
        (f.text, f.asked, f.answers) == ("x __", "", [])
        and (s.text, s.choices) == ("once", [])
        and (c.text, c.turns) == ("me too", [])
    )
    gate.set()
    assert first.wait(60) == "a"
    e.items = [(0, "y")]
    assert f.ask().wait(60) == "x y"


def test_a_panel_that_writes_refuses_more():
    gate = threading.Event()
    p = story(Script((0, "a"), gate), text="once")
    p.ask()
    with pytest.raises(RuntimeError, match="still writing"): p.ask()
    with pytest.raises(TimeoutError, match="timeout_s=0.02"): p.wait(0.02)
    gate.set()
    p.wait(60)


def test_blanks():
    e = Script((0, " big"), (1, "two"), (0, "ger"), (2, ", too"))
    p = fill_blank(e)
    assert p.ask("A __ house\nfor ___ people__").wait(60) == "A bigger house\nfor two people, too"
    assert (
        p.answers == ["bigger", "two", ", too"]
        and e.calls[0]["text"] == "A __ house\nfor __ people__"
        and e.calls[0]["max_new_tokens"] == 32
    )
    text = p._static()["text/plain"]
    assert "A [bigger] house\nfor [two] people[, too]" in text
    html = p._static()["text/html"]
    assert html.count("text-decoration:underline") == 3 and "<br>" in html
    p.asked = ""
    assert p.result == p.text and "underline" not in p._static()["text/html"]  # edited again


def test_stories():
    e = Script((0, " a"), (1, " b"), (0, "A"), (2, " c"))
    p = story(e, n=3, text="Once ")
    assert p.ask().wait(60) == [" aA", " b", " c"] and e.calls[0]["prompt"] == "Once" and e.calls[0]["n"] == 3
    assert "<li>aA</li>" in p._static()["text/html"] and "  2. b" in p._static()["text/plain"]
    p.take(1)
    assert p.text == "Once b" and p.choices == []
    p.ask().wait(60)
    p.take(0)
    assert p.text == "Once b aA"
    with pytest.raises(IndexError): p.take(0)


def test_taken_while_the_others_are_written():
    gate = threading.Event()
    e = Script((0, " x"), gate, (1, " y"), (1, " z"))
    p = story(e, n=2, text="Once")
    p.ask()
    until(lambda: p.choices == [" x", ""])
    p.take(0)
    assert p.text == "Once x" and p.choices == []
    gate.set()
    p.wait(60)
    assert p.choices == [] and e.stops == 1 and e.closed == 1
    e.items = [(0, "!")]
    p.n = 1
    assert p.ask().wait(60) == ["!"]  # the next list is shown again


def test_options_reach_the_engine():
    e = Script("x")
    p = chat(e, temperature=0.3, top_p=0.5, top_k=7, max_new_tokens=11, seed=5, stop=("\n",), repetition_penalty=1.2)
    p.ask("?").wait(60)
    assert {k: v for k, v in e.calls[0].items() if k != "messages"} == dict(
        temperature=0.3, top_p=0.5, top_k=7, max_new_tokens=11, seed=5, stop=("\n",), repetition_penalty=1.2
    )
    assert [x for x in p._settings_said()] == ["temperature 0.3", "top-p 0.5", "top-k 7", "seed 5"] and chat(
        e, temperature=0
    )._settings_said() == ["greedy"]


def test_a_browser_types_while_the_engine_writes():
    "Traits that arrive on one thread and pieces on another, for a while: nothing is lost, nothing breaks"
    n = 3000
    e = Script(*[f"{i} " for i in range(n)])
    p = chat(e, max_new_tokens=5)
    errors = []
    def browser(k):
        try:
            for i in range(300):
                p.set_state({"text": f"draft {i}"} if k else {"top_k": i, "temperature": i / 300})
                p._hear(p, {"record": True}, [])
        except BaseException as error: errors.append(error)
    for _ in range(3):
        p.clear()
        p.ask("?")
        threads = [threading.Thread(target=browser, args=(k,)) for k in (0, 1)]
        for t in threads: t.start()
        for t in threads: t.join()
        assert p.wait(30) == "".join(f"{i} " for i in range(n))
    assert not errors and (p.top_k, p.text) == (299, "draft 299") and len(p.turns) == 2


def test_commands_are_a_closed_list():
    p = chat(Script("x"))
    for do in ("close", "_begin", "set_state", "__init__", "take", None): p._hear(p, {"do": do}, [])
    assert p.comm is not None and p.turns == [] and p.state == "idle"
    p._hear(p, {"do": "ask", "args": ["hello"], "settings": {"_engine": None, "top_k": 3}}, [])
    p.wait(60)
    assert p.top_k == 3 and p._engine is not None and len(p.turns) == 2


def test_the_record_is_written_when_a_browser_has_seen_it(monkeypatch):
    shown = []
    monkeypatch.setattr("IPython.display.display", lambda data, **kw: shown.append((data, kw)))
    p = chat(Script("an answer"))
    p._ipython_display_()
    p.ask("?").wait(60)
    p._record()
    assert (
        len(shown) == 1
        and shown[0][1] == {"raw": True, "display_id": p.token}
        and "Nothing said" in shown[0][0]["text/html"]
    )  # no browser: the picture of the moment
    p._hear(p, {"here": True}, [])
    p._hear(p, {"record": True}, [])
    p._hear(p, {"record": True}, [])
    # and once, not twice
    assert len(shown) == 2 and shown[1][1]["update"] and "an answer" in shown[1][0]["text/html"]
    assert all(set(d) == {"text/html", "text/plain"} for d, _ in shown)


@pytest.mark.parametrize("make", [chat, lambda e: fill_blank(e), lambda e: story(e)], ids=["chat", "fill", "story"])
def test_nothing_of_a_text_is_markup(make):
    nasty = "<script>alert(1)</script> & \"quotes\" __ <img src=x onerror=y>"
    p = make(Script(nasty, (0, nasty)))
    p.ask(nasty).wait(60)
    page = p._static()
    assert (
        not re.search(r"<(script|style|svg|input|button|img)|var\(", page["text/html"])
        and "&lt;script&gt;" in page["text/html"]
        and nasty[:8] in page["text/plain"]
    )
    json.dumps({k: v for k, v in p.get_state().items() if k in p.keys and k != "layout" and not k.startswith("_")})


class Sums:
    "An engine that says what its model gives; `then` comes in the midst of it"
    tok, stats = type("Tok", (), {"chat_template": "yes", "is_fast": False})(), {}
    def __init__(self, model, then=lambda: None): self.model, self.then = model, then
    def stop(self): pass
    def story(self, prompt, n=1, **_): raise NotImplementedError
    @torch.no_grad()
    def said(self): return repr(self.model(IDS).logits.double().sum().item())
    def chat(self, messages, **_):
        yield self.said()
        self.then()
        yield "."


def moved(delta):
    for p in delta.parameters(): torch.nn.init.normal_(p, std=0.3)
    return delta


@pytest.mark.parametrize("end", ["whole", "stop", "error"])
@pytest.mark.parametrize("on", ["", "a", "b", "ab"])
def test_a_round_leaves_deltas_as_they_were(on, end):
    "On the model or off it, below what stands above them, switched off or on, frozen or not; however the round ends"
    model = FAMILIES["llama"]().eval()
    a, b = moved(Lora(model, modules="q_proj", r=2, name="a")), moved(Adapter(model, bottleneck=4, name="b"))
    above, e, listed = moved(Adapter(model, bottleneck=4, name="above")), Sums(model), {"a": a, "b": b}
    b.freeze()
    for d in (a, b, above): d.detach()
    for name in on: listed[name].attach()
    above.attach()
    state = lambda: ([d.attached for d in (a, b, above)], {n: p.requires_grad for n, p in model.named_parameters()},
                     {n: list(m._deltas) for n, m in model.named_modules() if hasattr(m, "_deltas")}, e.said())
    before = state()
    panel = side_by_side({"bare": e, "a": (e, a), "b": (e, b)}, "?")
    if end == "stop": e.then = panel.stop
    if end == "error": e.then = lambda: panel._engine.at == 1 and 1 / 0
    panel.ask()
    if end == "error":
        with pytest.raises(ZeroDivisionError): panel.wait(60)
    else: panel.wait(60)
    assert state() == before
    if end == "whole":
        said = {n: t.removesuffix(".") for n, t in panel.result.items()}
        assert len(set(said.values())) == 3 and (len(on) == 2 or said[on or "bare"] == before[-1])
    with a.off():
        before, e.then = state(), lambda: None
        panel.ask().wait(60)
        assert state() == before


def test_two_deltas_of_one_name_side_by_side():
    model = FAMILIES["llama"]().eval()
    first = moved(Lora(model, modules="q_proj", r=2))
    e = Sums(model)
    texts = [e.said()]
    first.detach()
    second = moved(Lora(model, modules="q_proj", r=2, name=first.name))
    texts.append(e.said())
    got = side_by_side({"first": (e, first), "second": (e, second)}, "?").ask().wait(60)
    assert got == {"first": texts[0] + ".", "second": texts[1] + "."} and len(set(texts)) == 2
    assert (first.attached, second.attached, e.said()) == (False, True, texts[1])


def test_a_blind_round_tells_nothing_before_the_vote():
    "The columns fill from the left, whoever stands there, and no figure is shown; after the vote they are"
    asked = []
    class Said(Script):
        def chat(self, messages, **options):
            asked.append(self)
            self.stats = {"new_tokens": 7, "decode_tok_s": 5.0}
            return self._play(messages)
        tok = property(lambda self: type("Tok", (), {"chat_template": "yes", "is_fast": False})(), lambda self, t: None)
    engines, orders = {n: Said(n) for n in "abc"}, set()
    panel = side_by_side(engines, "?", blind=True)
    meters = []
    panel.observe(lambda change: meters.append(change["new"]["words"]), "meter")
    for _ in range(6):
        asked.clear()
        panel.ask().wait(60)
        assert [e.items[0] for e in asked] == ["".join(x for x, _ in c["pieces"]) for c in panel.columns]
        orders.add("".join(e.items[0] for e in asked))
        assert not any(meters) and not panel.meter["words"] and not any(c["meter"] for c in panel.columns)
        assert "token" not in panel._static()["text/html"]
        panel.vote(0)
        assert [c["name"] for c in panel.columns] == [e.items[0] for e in asked]
        assert all("5 tokens/s" in c["meter"] for c in panel.columns) and "5 tokens/s" in panel.meter["words"]
        # (what is shown after the vote goes when the next one is asked)
        panel.meter = {"words": [], "share": None}
        meters.clear()
    assert len(orders) > 1


def test_script_is_one_module():
    "Plain JavaScript: balanced, no import, no address, no HTML"
    script, css = _Panel._esm, _Panel._css
    script, css = (x if isinstance(x, str) else str(x) for x in (script, css))
    assert (
        "import " not in script
        and "http" not in script + css
        and "innerHTML" not in script
    )
    for text in (script, css):
        for a, b in ("{}", "()"): assert text.count(a) == text.count(b)
    colors = {
        name: re.findall(rf"--bp-{name}: (#\w{{6}});", css)[:2]
        for name in ("soft", "accent", "answer", "problem", "on")
    }
    def luminance(c):
        c = [int(c[i:i + 2], 16) / 255 for i in (1, 3, 5)]
        return sum(
            k * (x / 12.92 if x <= 0.03928 else ((x + 0.055) / 1.055) ** 2.4)
            for k, x in zip((0.2126, 0.7152, 0.0722), c)
        )
    def contrast(a, b):
        low, high = sorted((luminance(a), luminance(b)))
        return (high + 0.05) / (low + 0.05)
    for name in ("soft", "answer", "problem"):
        for papers, color in zip(
            (("#ffffff", "#eeeeee"), ("#111111", "#212121", "#424242" if name == "soft" else "#212121")),
            colors[name],
        ):
            assert min(contrast(color, p) for p in papers) >= 4.2, (name, color)
    for on, accent in zip(colors["on"], colors["accent"]): assert contrast(on, accent) >= 4.5


def test_closed_panels_let_go():
    gate = threading.Event()
    e = Script("a", gate)
    p = chat(e)
    p.ask("?")
    until(lambda: p.live == "a")
    p.close()
    gate.set()
    p.wait(60)
    with pytest.raises(RuntimeError, match="closed"): p.ask("?")
    gone = weakref.ref(e)
    e = p = None
    gc.collect()
    until(lambda: gone() is None and not any(t.name.startswith("panel") for t in threading.enumerate()))


def test_what_is_refused():
    for make, name in ((chat, "chat"), (fill_blank, "fill"), (story, "story")):
        with pytest.raises(TypeError, match=f"without a method '{name}'"): make(torch.nn.Linear(2, 2))
        bare = Script()
        bare.tok = None
        with pytest.raises(ValueError, match="no tokenizer"): make(bare)
        for bad in (
            {"temperature": 3}, {"top_p": 0}, {"top_k": -1}, {"max_new_tokens": 0}, {"seed": -1}, {"seed": "x"},
        ):
            with pytest.raises(Exception, match=next(iter(bad))): make(Script(), **bad)
        with pytest.raises(ValueError, match="examples"): make(Script(), examples=[3])


def test_old_turns_are_left_out(monkeypatch):
    class Tok: chat_template = "yes"
    monkeypatch.setattr(
        panels,
        "prompt_ids",
        lambda tok, messages: {"input_ids": torch.zeros(1, sum(len(m["content"]) for m in messages), dtype=torch.long)},
    )
    e = Script("x")
    e.tok, e.max_ctx = Tok(), 60
    p = chat(e, system="S" * 10, max_new_tokens=20)
    p.turns = [
        {"role": r, "content": c * 10}
        for r, c in (("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"))
    ]
    p.ask("e" * 10).wait(60)
    assert [m["content"][0] for m in e.calls[0]["messages"]] == list("Se") or [
        m["content"][0] for m in e.calls[0]["messages"]
    ] == list("Scde")
    assert (
        sum(len(m["content"]) for m in e.calls[0]["messages"]) + 20 <= 60 and "oldest" in p.note and len(p.turns) == 6
    )
    p.clear()
    p.ask("f" * 10).wait(60)
    assert p.note == ""


@pytest.mark.long
def test_a_terminal_gets_text():
    "Without IPython's display, print works; nothing is left running"
    code = """if 1:
        from bmlab.app.panels import chat
        class E:
            stats, tok = {}, ''
            def chat(self, messages, **options): yield 'hello'
        p = chat(E()); p.ask('hi').wait(); print(p)"""
    out = fresh_python(code)
    assert out.returncode == 0 and out.stdout == "Chat panel, E. You: hi\nModel: hello\n", out.stderr


@pytest.mark.cuda
def test_memory_of_a_gpu():
    class E: model, plan = torch.nn.Linear(2, 2).cuda(), type("P", (), {"limit": 6 * 2**30})()
    E.model.device = torch.device("cuda")
    used, limit, whose = _memory(E())
    assert 0 < used == torch.cuda.memory_reserved() and limit == 6 * 2**30 and whose == "GPU"

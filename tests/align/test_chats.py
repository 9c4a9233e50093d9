"Chats beside the templates that models bring, and beside what TRL marks in them"
import json
import re

import numpy as np
import pandas as pd
import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from bmlab.align.chats import ChatError, Chats, assistant_spans, conversation, mix
from bmlab.align.preference import Preferences
from bmlab.files import fetch
from bmlab.models.load import sample_dir
from bmlab.train.loop import fit

SAID = ["It is five.", "Then it is fifteen, I think."]
TALK = [
    {"role": "user", "content": "What is two and three?"},
    {"role": "assistant", "content": SAID[0]},
    {"role": "user", "content": "And ten more?"},
    {"role": "assistant", "content": SAID[1]},
]
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds", "parameters": {
    "type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}}}}]  # fmt: skip
SIGHT = ("idefics3", "llava_next", "smolvlm")  # their messages hold pictures and texts in lists
CALL = [
    {"role": "user", "content": "What is two and three?"},
    {"role": "assistant", "tool_calls": [
        {"type": "function", "id": "call00001", "function": {"name": "add", "arguments": {"a": 2, "b": 3}}}]},
    {"role": "tool", "content": "5", "name": "add", "tool_call_id": "call00001"},
    {"role": "assistant", "content": SAID[0]},
]  # fmt: skip


@pytest.fixture(scope="module")
def templates():
    "TRL's copies of the templates that models are published with (Apache 2.0), and its own marked forms of them"
    folder = fetch("trl", "1.16.0", ["trl/chat_templates/*.jinja"]) / "trl/chat_templates"
    return {f.stem: f.read_text(encoding="utf-8") for f in folder.glob("*.jinja")}


@pytest.fixture(scope="module")
def tokenizer():
    base = AutoTokenizer.from_pretrained(sample_dir("smollm2-135m"))

    def make(*templates):
        marks = {m for t in templates for m in re.findall(r"<[^<>\s{}'\"]{2,30}>|\[/?[A-Z_]{2,20}\]", t)}
        base.add_special_tokens({"additional_special_tokens": sorted(marks)})
        base.chat_template = templates[0]
        return base

    return make


def learned(tok, messages, tools=None):
    text, spans = assistant_spans(tok, conversation({"messages": messages, "tools": tools}))
    return [text[a:b] for a, b in spans]


def test_the_assistant_is_found_in_every_template(templates, tokenizer):
    plain = [n for n in templates if not n.endswith("_training") and n not in SIGHT]
    assert len(plain) >= 35
    for name in plain:
        got = learned(tokenizer(templates[name]), TALK)
        for said, mine in zip(SAID, got, strict=True):
            assert said in mine, name
            before, after = mine.split(said)
            # before it: thoughts and channels that the model opens itself; after it: the mark that ends the turn
            assert not set(before.split()) & {"user", "<|im_start|>", "[INST]", "<start_of_turn>"}, (name, mine)
            assert "user" not in after.replace("<|user|>", "") and "And" not in after, (name, mine)


def test_what_trl_marks_is_what_is_found(templates, tokenizer):
    pairs = [n for n in templates if f"{n}_training" in templates and n not in SIGHT]
    equal, longer = [], []
    for name in pairs:
        tok = tokenizer(templates[name], templates[name + "_training"])
        got, whole = learned(tok, TALK), tok.apply_chat_template(TALK, tokenize=False)
        tok.chat_template = templates[name + "_training"]
        found = tok.apply_chat_template(TALK, return_dict=True, return_assistant_tokens_mask=True)
        if tok.apply_chat_template(TALK, tokenize=False) != whole: continue        # it writes other words
        ids, on = torch.tensor(found["input_ids"]), torch.tensor(found["assistant_masks"]).bool()
        marked = [tok.decode(ids[a:b]).strip() for a, b in stretches(on)]
        (equal if marked == [g.strip() for g in got] else longer).append(name)
        # where TRL's stretch is longer, it is so by what the template writes before the model begins
        assert all(m.endswith(g.strip()) for m, g in zip(marked, got, strict=True)), (name, marked, got)
    assert len(equal) >= 13, (equal, longer)


@pytest.mark.parametrize("name", SIGHT)
def test_a_template_that_does_not_write_the_words_is_an_error(name, templates, tokenizer):
    with pytest.raises(ChatError, match="message 1|refuses"): learned(tokenizer(templates[name]), TALK)


def stretches(on):
    edges = torch.diff(torch.nn.functional.pad(on.int(), (1, 1))).nonzero().flatten().tolist()
    return list(zip(edges[::2], edges[1::2]))


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3", "llama3_1", "llama3_2", "qwen3_5_think", "glm4moe", "gptoss"])
def test_calls_of_tools_are_learned_and_their_answers_are_not(name, templates, tokenizer):
    call, answer = learned(tokenizer(templates[name]), CALL, TOOLS)
    assert "add" in call and "2" in call and "tool_response" not in call
    assert SAID[0] in answer and "tool_response" not in answer


def test_conversations_of_a_row_do_not_see_each_other():
    tok = AutoTokenizer.from_pretrained(sample_dir("smollm2-135m"))
    chats = Chats([{"messages": TALK}, {"prompt": "Who?", "completion": "I."}, {"messages": TALK[2:]}], tok)
    torch.manual_seed(0)
    config = LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
                         num_key_value_heads=2, vocab_size=len(tok))  # fmt: skip
    model = LlamaForCausalLM(config).double()

    def gradients(batches):
        "Of the sum over learned tokens"
        model.zero_grad()
        for b in batches:
            logits, labels = model(**{k: v for k, v in b.items() if k != "labels"}).logits, b["labels"]
            loss = torch.nn.functional.cross_entropy(
                logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")  # fmt: skip
            loss.backward()
        return torch.cat([p.grad.flatten() for p in model.parameters()])

    together = chats.batches(seq=192, batch=1)
    assert together.rows == 1
    alone = []
    for c in (chats[i] for i in range(3)):
        ids, on = torch.from_numpy(c.ids).long(), torch.from_numpy(c.learned)
        alone.append({"input_ids": ids[None], "labels": ids.masked_fill(~on, -100)[None]})
    torch.testing.assert_close(gradients([together[0]]), gradients(alone), rtol=1e-9, atol=1e-12)


def test_marks_of_the_template_itself():
    tok = AutoTokenizer.from_pretrained(sample_dir("smollm2-135m"))
    tok.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}"
        "{{ m.content }}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
    )
    silent = [TALK[0], {**TALK[1], "weight": 0}, *TALK[2:]]
    both, one = (Chats([{"messages": m}], tok)[0] for m in (TALK, silent))
    texts = lambda chat: [tok.decode(ids) for on, ids in chat.runs() if on]
    assert texts(both) == [s + "<|im_end|>" for s in SAID] and texts(one) == texts(both)[1:]


def test_a_resumed_run_sees_the_same_rows():
    tok = AutoTokenizer.from_pretrained(sample_dir("smollm2-135m"))
    rows = [{"prompt": f"{i} and {i}?", "completion": f"{2 * i}."} for i in range(50)]
    make = lambda: Chats(rows, tok).batches(seq=80, batch=4, seed=3)
    first, again = make(), make()
    want = [b["input_ids"] for b in first]
    for _ in zip(range(3), again): pass
    state, later = again.state_dict(), make()
    later.load_state_dict(state)
    assert all(torch.equal(a, b["input_ids"]) for a, b in zip(want[3:], later, strict=True))


def dictated(n):
    "Conversations of many lengths, each with its number"
    return [{"prompt": f"Say {k}.", "completion": f"{k} " + "and so on " * (k * 7 % 13)} for k in range(n)]


def told(batches):
    "The learned tokens of each conversation, whatever row it lies in, sorted"
    out = []
    for b in batches:
        for ids, labels, place in zip(b["input_ids"], b["labels"], b["position_ids"]):
            for part in torch.tensor_split(torch.arange(len(ids)), torch.nonzero(place == 0)[1:, 0]):
                if (labels[part] != -100).any(): out.append(ids[part][labels[part] != -100].tolist())
    return sorted(out)


def test_a_streamed_data_set_is_read_once_and_goes_on_where_it_was():
    import datasets
    tok, rows = AutoTokenizer.from_pretrained(sample_dir("smollm2-135m")), dictated(60)
    flow = datasets.Dataset.from_list(rows).to_iterable_dataset().shuffle(seed=0, buffer_size=16)
    packed, stream = Chats(rows, tok).batches(seq=128, batch=1), Chats.stream(flow, tok, seq=128, batch=3)
    seen = [*stream]
    assert told(seen) == told(packed[k] for k in range(packed.rows))
    assert (stream.epoch, stream.read) == (1, 0) and len(seen) > 5
    filled = sum((b["input_ids"] != tok.pad_token_id).sum() for b in seen[:-1]) / (len(seen) - 1) / 3 / 128
    assert filled > 0.75                                         # (three rows of 128 are few to choose from)
    for k in (1, 3):
        half = Chats.stream(flow, tok, seq=128, batch=3)
        for _ in zip(range(k), half): pass
        again = Chats.stream(flow, tok, seq=128, batch=3)
        again.load_state_dict(half.state_dict())
        rest = [*again]
        assert len(rest) == len(seen) - k
        assert all(a[c].equal(b[c]) for a, b in zip(rest, seen[k:]) for c in ("input_ids", "labels", "position_ids"))


def test_ranks_share_a_stream_and_skip_what_cannot_be_used():
    tok, rows = AutoTokenizer.from_pretrained(sample_dir("smollm2-135m")), dictated(40)
    rows.insert(3, {"text": "no conversation"})
    one = Chats.stream(rows, tok, 96, 4, bad="skip", rank=0, world_size=1)
    parts = [Chats.stream(rows, tok, 96, 4, bad="skip", rank=r, world_size=2) for r in range(2)]
    for whole, *mine in zip(one, *parts):
        assert torch.cat([b["input_ids"] for b in mine]).equal(whole["input_ids"])
    for _ in one: pass                                           # another pass
    assert len(one.skipped) == 1 and one.skipped[0].startswith("row 3: the keys are 'text'")
    with pytest.raises(ChatError, match="row 3"): list(Chats.stream(rows, tok, 96, 4))
    once = Chats.stream(iter(rows[:3]), tok, 96, 1)
    assert [*once]
    with pytest.raises(ValueError, match="read once"): list(once)
    left = Chats.stream(iter(rows[4:]), tok, 96, 1)
    next(iter(left))
    with pytest.raises(ValueError, match="read once"): next(iter(left))
    with pytest.raises(ValueError, match="less than one batch=8"):
        list(Chats.stream(rows[:2], tok, 96, 8, rank=0, world_size=2))


def test_two_ranks_go_on_from_the_last_full_batch_of_a_pass():
    tok, rows = AutoTokenizer.from_pretrained(sample_dir("smollm2-135m")), dictated(31)
    make = lambda: Chats.stream(rows, tok, 96, 4, rank=0, world_size=2)
    stream, states, want = make(), [], []
    for _ in range(2):
        for b in stream:
            states.append(stream.state_dict())
            want.append(b["input_ids"])
    assert stream.epoch == 2 and states[-1]["read"] < len(rows)              # what is left is less than a batch
    last = next(k for k, s in enumerate(states) if s["epoch"] == 1) - 1
    again = make()
    again.load_state_dict(states[last])
    assert next(iter(again))["input_ids"].equal(want[last + 1]) and again.epoch == 1


def test_a_resumed_run_over_a_stream_sees_the_same_rows(tmp_path):
    tok, rows = AutoTokenizer.from_pretrained(sample_dir("smollm2-135m")), dictated(50)

    def run(steps, **options):
        torch.manual_seed(0)
        sizes = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
        model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=len(tok)))
        opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
        return fit(model, Chats.stream(rows, tok, 96, 4), opt, steps=steps, plot=False, **options).loss.tolist()

    straight = run(9)                                            # more than a pass
    run(4, save_to=tmp_path, save_every=4)
    assert run(9, save_to=tmp_path, save_every=4, resume=True)[-5:] == straight[-5:]


USER, BOT = ({"role": r, "content": c} for r, c in (("user", "Who?"), ("assistant", "A robot.")))
LEAD = {"role": "system", "content": "Be short."}


@pytest.fixture(scope="module")
def smol(): return AutoTokenizer.from_pretrained(sample_dir("smollm2-135m"))


@pytest.mark.parametrize("prompt", ["Who?", [USER], [{"from": "human", "value": "Who?"}]], ids=str)
def test_a_prompt_that_its_answers_hold_too_is_said_once(prompt):
    worse = BOT | {"content": "No."}
    row = {"prompt": prompt, "chosen": [USER, BOT], "rejected": [USER, worse]}
    c = conversation(row)
    assert (c.messages, c.learned, c.rejected) == ([USER, BOT], [False, True], [USER, worse])
    assert conversation(row | {"chosen": [BOT], "rejected": "No."}) == c               # only what is said after it
    led = conversation(row | {"chosen": [LEAD, USER, BOT], "rejected": [LEAD, USER, worse]})
    assert (led.messages, led.learned, led.rejected) == ([LEAD, *c.messages], [False, *c.learned], [LEAD, *c.rejected])
    assert conversation(row | {"system": "Be short."}) == led
    assert conversation({"prompt": prompt, "completion": [USER, BOT, USER, worse]}).learned == [False, True] * 2
    with pytest.raises(ChatError, match="rejected begins with user: 'What.', the prompt with user: 'Who.'"):
        conversation(row | {"rejected": [USER | {"content": "What?"}, worse]})
    more = {"prompt": [USER, BOT], "completion": [USER | {"content": "And now?"}, BOT]}        # a talk that goes on
    assert [m["content"] for m in conversation(more).messages] == ["Who?", "A robot.", "And now?", "A robot."]


def test_labels_and_weights_are_yes_or_no(smol):
    row = {"prompt": "Q", "completion": "A"}
    yes, no = (True, 1, 1.0, np.True_, "true", "True", "1"), (False, 0, 0.0, np.False_, "false", "FALSE", "0")
    for said, want in ((yes, True), (no, False)):
        assert [conversation(row | {"label": x}).label for x in said] == [want] * 7
        got = Chats.from_frame(pd.DataFrame([row | {"label": x} for x in said]), smol).conversations
        assert [c.label for c in got] == [want] * 7
        got = conversation({"messages": [x for w in said for x in (USER, BOT | {"weight": w})]})
        assert got.learned == [False, want] * 7
    for bad in ("no", "", -1, 2, 0.5, []):
        with pytest.raises(ChatError, match=f"row 0: label is {re.escape(repr(bad))}: expected true or false"):
            Preferences(Chats([row | {"label": bad}], smol))
        if isinstance(bad, (str, list)):
            with pytest.raises(ChatError, match="weight is"): conversation({"messages": [USER, BOT | {"weight": bad}]})
        else:
            both = [USER | {"weight": 0.7}, BOT | {"weight": bad}]
            assert conversation({"messages": both}).learned == [False, True]
    assert len(Chats([row | {"label": "math", "tools": {}}], smol)) == 1         # a column of another meaning


@pytest.mark.parametrize("row, said", [
    ({"prompt": "a", "chosen": 3, "rejected": "b"}, "chosen is 3: expected a text or a list of messages"),
    ({"prompt": 4, "completion": "b"}, "prompt is 4: expected a text"),
    ({"messages": 5}, "messages is 5: expected a list of messages"),
    ({"messages": [USER, BOT | {"content": 7.5}]}, "the content of assistant is 7.5: expected a text"),
    ({"instruction": "a", "input": 0, "output": "b"}, "input is 0: expected a text"),
    ({"instruction": "a", "output": 1}, "the content of assistant is 1"),
    ({"instruction": "a", "output": "b", "history": [["q", "a", "x"]]}, "history holds .*expected pairs"),
    ({"instruction": "a", "output": "b", "history": 3}, "history is 3: expected pairs of texts"),
    ({"prompt": "a", "completion": "half \ud83d"}, r"the content of assistant holds '\\ud83d' at position 5"),
    ({"messages": [USER, BOT], "tools": "{bad"}, "tools is no JSON"),
    ({"messages": [USER, BOT], "tools": "[" * 200_000}, "tools is nested too deeply"),
])  # fmt: skip
def test_what_is_no_conversation_says_what_was_given(row, said, smol):
    with pytest.raises(ChatError, match=f"row 1: {said}"): Chats([{"messages": TALK}, row], smol)
    assert len(Chats([{"messages": TALK}, row], smol, bad="skip").skipped) == 1
    stream = Chats.stream([{"messages": TALK}, row], smol, seq=128, bad="skip")
    assert len([*stream]) == 1 and re.match(f"row 1: {said}", stream.skipped[0])


def test_a_bad_line_is_named_and_skipped(smol, tmp_path):
    good = b'{"prompt": "Who?", "completion": "I."}'
    bad = [b'{"prompt": "caf\xe9", "completion": "b"}', b"[" * 200_000, b"{", b'{"messages": 5}']
    (file := tmp_path / "train.jsonl").write_bytes(b"\xef\xbb\xbf" + b"\n".join([good, b"", *bad, b"  \r", good, b""]))
    for chats in (Chats.from_jsonl(file, smol, bad="skip"), Chats.from_hub_folder(tmp_path, smol, bad="skip")):
        assert [n.rpartition(", ")[2] for n in chats.names] == ["line 1", "line 8"]
        assert [re.search("line .", s).group() for s in chats.skipped] == [f"line {n}" for n in (3, 4, 5, 6)]
    for n, line in enumerate(bad):
        file.write_bytes(good + b"\n\n" + line)
        with pytest.raises(ChatError, match="line 3: .*(UTF-8|deeply|no JSON|messages is 5)"):
            Chats.from_jsonl(file, smol)


ROWS = [
    {"prompt": "0", "completion": "1"}, {"prompt": "true", "completion": "NA"},
    {"prompt": "2020-01-01", "completion": "None"}, {"prompt": "1e3", "completion": "12345678901234567890123"},
]  # fmt: skip


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv"])
def test_texts_of_a_folder_stay_texts(kind, smol, tmp_path):
    file = tmp_path / f"train.{kind}"
    for rows in (ROWS, ROWS[:1], ROWS[2:3]):                     # (of a column that is all numbers or dates, too)
        if kind == "csv": pd.DataFrame(rows).to_csv(file, index=False)
        elif kind == "json": file.write_text(json.dumps(rows))
        else: file.write_text("".join(json.dumps(r) + "\n" for r in rows))
        got = Chats.from_hub_folder(tmp_path, smol).conversations
        assert [[m["content"] for m in c.messages] for c in got] == [list(r.values()) for r in rows]


def test_a_conversation_that_is_cut_before_its_answer_is_told_before_the_run(smol):
    rows = [{"prompt": "word " * n, "completion": "ok"} for n in (3, 200, 5, 300)]
    begin = [int(Chats([r], smol)[0].learned.argmax()) for r in rows]
    said = f"row 1: seq=48 leaves nothing of an answer, which begins after {begin[1]} tokens"
    said += f"; seq={begin[1] + 1} reaches it"
    with pytest.raises(ChatError, match=re.escape(said) + "; 2 of 4 conversations are cut off so; .*bad='skip'"):
        Chats(rows, smol).batches(seq=48, batch=1)
    with pytest.raises(ChatError, match="long, row 1"):
        mix({"short": Chats(rows[:1], smol), "long": Chats(rows, smol)}, 48, 1)
    assert Chats(rows[:2], smol).batches(seq=begin[1] + 1, batch=1).skipped == []
    batches = Chats(rows, smol, bad="skip").batches(seq=48, batch=1)
    assert batches.skipped[0] == said and len(batches.skipped) == 2
    stream = Chats.stream(rows, smol, seq=48, batch=1, bad="skip")
    whole = Chats(rows[::2], smol).batches(seq=48, batch=1)
    assert told(batches[g] for g in range(batches.rows)) == told(whole[g] for g in range(whole.rows)) == told(stream)
    assert stream.skipped == batches.skipped
    with pytest.raises(ChatError, match=re.escape(said)): list(Chats.stream(rows, smol, seq=48, batch=1))
    with pytest.raises(ChatError, match="row 0: seq=20 .*; 2 of 2"):
        Chats(rows[:2], smol, bad="skip").batches(seq=20, batch=1)

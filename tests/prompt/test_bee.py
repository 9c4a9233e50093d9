"CPM-Bee's JSON: whatever a tree holds comes back, and whatever is typed gives a task or an error with its place."
import json
import random

import pytest
import transformers as tf
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from bmlab.prompt.bee_answers import _said
from bmlab.prompt.bee import SPECIALS, Bee, BeeError, bee_of, encode_bee, escape, pieces, read, render, template_of
from bmlab.prompt.language import TemplateError
from bmlab.prompt.template import InputExample, Template

PIECES = [
    '{',
    '}',
    '"',
    '"a"',
    ':',
    ',',
    '[',
    ']',
    '<',
    '<mask_0>',
    '"<ans>"',
    ': ""',
    '"x < y"',
    "\\u00e9",
    "\\ud83d",
    "\\",
    "1",
    "null",
    "今",
    "\n",
    '{"a":"b","<ans>":""}',
]
TEXTS = ["a", "今天", "1 << 2", "<option_0>", "<<mask_0>", "line\nline", "\"quoted\" \\ back", "\U0001f600", "{}", "é"]


def tree(rng, depth=0):
    "Texts and dicts of texts"
    if depth == 3 or rng.random() < .5: return rng.choice(TEXTS)
    return {f"{rng.choice(TEXTS)}{i}": tree(rng, depth + 1) for i in range(rng.randrange(1, 4))}


@pytest.mark.parametrize("seed", range(40))
def test_a_nested_task_comes_back(seed):
    rng = random.Random(seed)
    data = {
        "given": tree(rng),
        "more": tree(rng),
        "<ans>": {f"k{i}": rng.choice(TEXTS[:4]) for i in range(3)} if seed % 2 else rng.choice(TEXTS[:4]),
    }
    task = Bee(data, training=True)
    assert (
        Bee(task.json()) == task
        and Bee(json.dumps(data)) == task
        and hash(Bee(task.json())) == hash(task)
        and task.data == data
    )
    assert not task.asked().answered and [s.text for s in task.asked().segments if not s.answer] == [
        s.text for s in task.segments if not s.answer
    ]
    # a target is read as the answer that it is
    for how in ("chat", "json", "plain"): assert read(task.asked(), render(task, how)[1]) == task
    way, D = task.relations(), task.max_depth
    # one up, one down
    for i, s in enumerate(task.segments[1:], 1): assert way[i, s.parent] == D + 1 and way[s.parent, i] == 2


def test_a_text_holds_no_special_of_the_tokenizer():
    t = Tokenizer(
        models.BPE(
            {w: i for i, w in enumerate([*(f"<{s}>" for s in SPECIALS), *pre_tokenizers.ByteLevel.alphabet()])}, []
        )
    )
    t.pre_tokenizer, t.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    for kind in ({"special_tokens": True}, {}):                          # special, and merely added
        tok = tf.PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(t.to_str()), unk_token="<unk>")
        tok.add_tokens([f"<{s}>" for s in SPECIALS], **kind)
        text = "a <ans> b <mask> c </s> 中"
        e = encode_bee(Bee({"text": escape(text), "<ans>": ""}), tok)
        ids = e.ids[e.segments == 2].tolist()[1:-1]
        assert (
            tok.decode(ids) == text
            and not {*ids} & {*range(len(SPECIALS))}
            and _said(ids, e, tok, len(tok)) == escape(text)
        )


def test_a_nested_answer_and_keys_as_they_are_shown():
    task = Bee({"q": "x", "<ans>": {"a": {"b": ""}, "c<<d": ""}})
    assert (
        read(task, '{"a": {"b": "y"}, "c<d": "z"}').data["<ans>"]
        == read(task, '{"a": {"b": "y"}, "c<<d": "z"}').data["<ans>"]
        == {"a": {"b": "y"}, "c<<d": "z"}
    )
    with pytest.raises(BeeError, match="no text for a.b; it has 'x'"): read(task, '{"a": {"x": "y"}, "c<d": "z"}')


def test_noise_is_a_task_or_an_error_with_its_place():
    rng, made = random.Random(0), 0
    for i in range(3000):
        text = "".join(rng.choice(PIECES) for _ in range(rng.randrange(12)))
        if i % 2:
            text = (
                f'{{"k": {{"q": {rng.choice(["3", "{}", TEXTS[0], json.dumps(rng.choice(TEXTS))])}, "r": '
                f'"{"".join(rng.choice(PIECES[8:10] + PIECES[13:15] + ["a"]) for _ in range(4))}"}}, "<ans>": ""}}'
            )
        try:
            Bee(text)
            made += 1
        except BeeError as e: assert 0 <= e.span[0] <= e.span[1] <= len(e.source)
    assert made


@pytest.mark.parametrize("text, under", [
    ('{"a": {"b": 3}, "<ans>": ""}', "3"), ('{"a": "\\u4eca\\ud83d\\ude00 1 < 2", "<ans>": ""}', "<"),
    ('{"a": "x",\n "b": {"<anz>": "y"}, "<ans>": ""}', "<anz>"), ('{"a": "x", "a": "y", "<ans>": ""}', '"a"'),
    ('{"a": {"x": "1"}, "b": {"x": "2", "x": "3"}, "<ans>": ""}', '"x"'),
    ('{"a": [{"x": "<"}], "<ans>": ""}', "["), ('{"a": "x" "b": ""}', '"'), ('{"a": null, "<ans>": ""}', "null"),
])
def test_a_mistake_is_shown_in_the_json_that_was_given(text, under):
    with pytest.raises(BeeError) as e: Bee(text)
    assert e.value.source == text and text[slice(*e.value.span)] == under and "^" in str(e.value)
    if text.count("\n"): assert (e.value.line, e.value.column) == (2, 9)
    if text.count('"x"') == 3: assert e.value.span[0] == text.rindex('"x"')


def test_templates_and_tasks():
    t = Template('{"placeholder":"text_a"} 很{"mask"}，{"options":"choice"}')
    want = {
        "text_a": "1 << 2",
        "choice": {"<option_0>": "棒", "<option_1>": "糟"},
        "prompt": "[text_a] 很，",
        "<ans>": "<option_1>",
    }
    assert (
        bee_of(t, {"text_a": "1 < 2", "choice": ["棒", "糟"]}, "<option_1>").data
        == Bee.of(t, InputExample(text_a="1 < 2", meta={"choice": ["棒", "糟"]}), "<option_1>").data
        == want
    )
    back = template_of(Bee({"text_a": escape("1 < 2 <mask_0>"), "<ans>": ""})).wrap(
        {"text_a": escape("1 < 2 <mask_0>")}
    )
    assert back[1][1] == "1 < 2 <mask_0>" == pieces(escape("1 < 2 <mask_0>"))[0][1]
    for text, example, says in (
        ('{"special":"<eos>"}{"mask"}', {}, "special has no place"),
        ('{"chat":"user"}a{"/chat"}{"mask"}', {}, "chat has no place"),
        ('{"options":"c"}{"mask"}', {"c": "xyz"}, "expected a list"),
        ('{"placeholder":"a"}{"meta":"a"}{"mask"}', {"a": "x", "meta": {"a": "y"}}, "another name"),
    ):
        with pytest.raises(TemplateError, match=says): bee_of(Template(text), example)
    with pytest.raises(TypeError, match="one mask"): bee_of(t, {"text_a": "x", "choice": ["y"]}, {"mask_0": "z"})

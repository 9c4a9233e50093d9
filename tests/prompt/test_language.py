"""The template language against whatever is typed and whatever an example holds: no code, no endless run, no
error but its own."""
import ast
import copy
import dataclasses
import pathlib
import pickle
import random
import time
from collections import namedtuple
from string import Formatter

import pytest
import torch
import transformers as tf
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from bmlab.prompt.language import TemplateError, parse_template, safe_lambda
from bmlab.prompt.template import InputExample, Template

Q, S = '{"placeholder":"text_a"} it was {"mask"}', '{"soft":2} {"placeholder":"text_a"} it was {"mask"}'
WORDS = "a fun movie ! i love it . is the answer was great bad terrible good one two three four five dull so".split()
CHAT = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}<eos>{{ m.role "
    "}}:{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}me:{% endif %}"
)


def bert_tok(side="right"):
    v = {
        w: i
        for i, w in enumerate(
            dict.fromkeys(
                [
                    "[PAD]",
                    "[UNK]",
                    "[CLS]",
                    "[SEP]",
                    "[MASK]",
                    *WORDS,
                    *"abcdefghijklmnopqrstuvwxyz[]",
                    *[f"##{c}" for c in "abcdefghijklmnopqrstuvwxyz"],
                ]
            )
        )
    }
    t = Tokenizer(models.WordPiece(v, unk_token="[UNK]"))
    t.normalizer, t.pre_tokenizer, t.decoder = (
        normalizers.BertNormalizer(lowercase=True),
        pre_tokenizers.BertPreTokenizer(),
        decoders.WordPiece(),
    )
    t.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return tf.PreTrainedTokenizerFast(
        tokenizer_object=t,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
        padding_side=side,
    )


def byte_tok(chat=False):
    t = Tokenizer(
        models.BPE({c: i for i, c in enumerate(["<pad>", "<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())])}, [])
    )
    t.pre_tokenizer, t.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tok = tf.PreTrainedTokenizerFast(tokenizer_object=t, pad_token="<pad>", eos_token="<eos>")
    if chat: tok.chat_template = CHAT
    return tok


def t5_tok():
    v = [
        ("<pad>", 0.0),
        ("</s>", 0.0),
        ("<unk>", 0.0),
        ("▁", -3.0),
        *[("▁" + w, -2.0) for w in WORDS],
        *[(c, -4.0) for c in "abcdefghijklmnopqrstuvwxyz.,!<>_0123456789/"],
    ]
    t = Tokenizer(models.Unigram(v, unk_id=2))
    t.pre_tokenizer, t.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    t.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    tok = tf.PreTrainedTokenizerFast(tokenizer_object=t, pad_token="<pad>", eos_token="</s>", unk_token="<unk>")
    tok.add_tokens([tf.AddedToken(f"<extra_id_{i}>", special=True) for i in range(3)], special_tokens=True)
    return tok


def masked_model(kind):
    torch.manual_seed(0)
    config, cls = {"bert": (tf.BertConfig, tf.BertForMaskedLM), "roberta": (tf.RobertaConfig, tf.RobertaForMaskedLM)}[
        kind
    ]
    return cls(
        config(
            vocab_size=120,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=64,
            max_position_embeddings=64,
            pad_token_id=0,
        )
    ).eval()


# ---- lambdas: what they reach

def test_a_lambda_reaches_no_method_of_another_object(tmp_path):
    a, b = tmp_path / "a", tmp_path / "b"
    a.write_text("kept")
    t = Template(
        '{"meta":"f","post_processing":"lambda p: str(p.replace(' + repr(str(b)).replace("'", "\\'") + '))"}{"mask"}'
    )
    with pytest.raises(TemplateError, match="this is a PosixPath"): t.wrap({"meta": {"f": pathlib.Path(a)}})
    assert a.exists() and not b.exists()


class Sly(str):
    def lower(self): raise AssertionError("ran")
    def __str__(self): raise AssertionError("ran")
    def __iter__(self): raise AssertionError("ran")

class SlyList(list):
    def __iter__(self): raise AssertionError("ran")


def test_a_subclass_of_text_is_taken_as_its_text_and_other_subclasses_are_refused():
    assert (
        safe_lambda("lambda x: x.lower()")(Sly("AB")) == "ab"
        and safe_lambda("lambda x: str(x[0])")([Sly("AB")]) == "AB"
    )
    for value in (SlyList("a"), {1}, b"a", 1j, object(), [pathlib.Path("a")], {"a": object()}, len, range(3)):
        with pytest.raises(TemplateError, match="takes text, numbers"): safe_lambda("lambda x: 'a'")(value)
    assert safe_lambda("lambda x: x")({"a": [1, 2.5, None, ("b", True)]}) == {"a": [1, 2.5, None, ("b", True)]}


def test_functions_that_the_user_passes_take_anything():
    t = Template('{"meta":"f","post_processing":"name"}{"mask"}', fns={"name": lambda p: p.name})
    assert t.wrap({"meta": {"f": pathlib.Path("/tmp/a")}})[0][1] == "a"


SAME = [
    "lambda x: x[::-1]",
    "lambda x: x.upper() if len(x) > 3 else x.title()",
    "lambda x: ' '.join(w[:1].upper() + w[1:] for w in x.split() if w.isalpha() and not w in string.digits)",
    "lambda x: f'{x!r}, {len(x)}!'",
    "lambda x: ''.join([a + b for a in x for b in a if b != 'o'])",
    "lambda x: [i for i, c in enumerate(x) if c in 'aeiou']",
    "lambda x: 1 < len(x) <= 20 < 30",
    "lambda x: x and x[0] or 'none'",
    "lambda x: [a for a, b in zip(x, reversed(x)) if a == b]",
    "lambda x: sorted(x, reverse=True)[0:3]",
    "lambda x: (x.find('l'), x.rfind('l'), -1, not x)",
    "lambda x: max(x, default=None) is None",
    "lambda x: x.replace('l', '').partition(' ')",
    "lambda x: [x for x in x.split()]",
    "lambda x: x.removeprefix('he').rsplit(' ', 1)",
]

@pytest.mark.parametrize("text", SAME)
def test_a_lambda_gives_what_python_gives(text):
    import string
    for value in ("hello world", "", "é ß 电影", "otto"):
        try: expected = eval(text, {"string": string})(value)
        except Exception: expected = None
        try: got = safe_lambda(text)(value)
        except TemplateError: got = None
        assert got == expected


# ---- lambdas: what they cost

GREEDY = [
    "lambda x: x" + ".replace('', 'aaaaaaaaaa')" * 9,
    "lambda x: [1 for a in x for b in x for c in x for d in x for e in x for f in x for g in x for h in x for i in x "
    "for j in x]",
    "lambda x: x.join([x.join([x.join(list(x)) for a in x]) for a in x])",
    "lambda x: [y + y + y + y for y in [x + x + x + x] for z in [y + y + y] for u in [z + z + z + z] for v in [u + u + "
    "u + u] for w in [v + v + v + v] for q in [w + w + w + w]]",
    "lambda x: [[[[x for a in x] for a in x] for a in x] for a in x]",
    "lambda x: str([x for a in x for b in x for c in x])",
    "lambda x: f'{x}{x}{x}{x}' + ''.join([f'{x}{x}' for a in x for b in x for c in x for d in x])",
    "lambda x: (x + 'b' + x).rfind('b' + x + x)",
    "lambda x: [x.rfind('b' + x) for a in x for b in x]",
    "lambda x: x.strip(x)",
    "lambda x: sorted([x for a in x for b in x])",
    "lambda x: list(zip(x, x, x, x, x, x, x, x))",
    "lambda x: list(enumerate(x))",
    "lambda x: [x == x for a in x for b in x for c in x]",
    "lambda x: [n for n in [" + "0x" + "f" * 4000 + "] for a in x for b in x]",
    "lambda x: x.split('a')",
    "lambda x: [a.title() for a in x.split('') or x]",
    "lambda x: [(x, a) in [(x, a) for b in x] for a in x]",
]

@pytest.mark.parametrize("text", GREEDY)
@pytest.mark.parametrize("value", ["a fun movie", "a" * 1000, "a" * 300_000, "é电\U0001f600" * 90_000])
def test_no_lambda_runs_long_or_grows(text, value):
    start = time.process_time()
    try: safe_lambda(text)(value)
    except TemplateError: pass
    assert time.process_time() - start < 20


def test_data_that_never_ends_or_is_too_large():
    endless = []
    endless.append(endless)
    deep = "a"
    for _ in range(3000): deep = [deep]
    for value in (endless, deep, [endless] * 9, "a" * 2_000_000, list(range(300_000))):
        with pytest.raises(TemplateError): safe_lambda("lambda x: len(x)")(value)


ATOMS = [
    "x",
    "x",
    "a",
    "b",
    "''",
    "'aaaaaaaaaa'",
    "'l'",
    "0",
    "1",
    "-1",
    "99999999",
    "True",
    "None",
    "[]",
    "string.digits",
    "string.punctuation",
    "()",
]
MADE = [
    "{}.replace({}, {})",
    "{}.join({})",
    "{} + {}",
    "{} + {}",
    "{}.split({})",
    "{}.rsplit({})",
    "{}.strip({})",
    "{}.rfind({})",
    "[{} for a in {}]",
    "[{} for a in {} for b in {}]",
    "({} for a, b in {} if {})",
    "f'{{{}}}{{{}}}'",
    "[{}, {}, {}]",
    "({}, {})",
    "{}[{}]",
    "{}[{}:{}]",
    "{} if {} else {}",
    "{} and {}",
    "not {}",
    "-({})",
    "{} in {}",
    "{} < {} <= {}",
    "list({})",
    "str({})",
    "len({})",
    "sorted({})",
    "zip({}, {})",
    "enumerate({})",
    "reversed({})",
    "min({}, {})",
    "max({})",
    "{}.title()",
    "{}.count({})",
    "{}.partition({})",
    "{}.get({})",
    "{}.items()",
    "{} - {}",
    "{}.splitlines()",
    "{}.startswith({})",
    "{}.format({})",
    "{}.__class__",
    "{} * {}",
    "(lambda a: {})({})",
    "{}({})",
    "{}.join({} for b in {})",
    "{}.get(a={}, a={})",
]

def nested(rng, depth):
    if depth == 0 or rng.random() < .1: return rng.choice(ATOMS)
    form = rng.choice(MADE)
    fields = sum(name is not None for _, name, *_ in Formatter().parse(form))
    return form.format(*(nested(rng, depth - 1) for _ in range(fields)))


def judge(rng, values):
    "One random lambda on some values: 'refused', 'failed' or 'ran'"
    text = "lambda x: " + nested(rng, rng.randrange(1, 7))
    if rng.random() < .5:
        text = (
            text.replace("a", "x").replace("b", "x")
            if rng.random() < 0.5
            else f"lambda x: [{text[10:]} for a in x for b in [a]]"
        )
    start = time.process_time()
    try: f = safe_lambda(text)
    except TemplateError: return "refused"
    finally: assert time.process_time() - start < 20, text
    fate = "ran"
    for value in values:
        start = time.process_time()
        try: f(value)
        except TemplateError: fate = "failed"
        assert time.process_time() - start < 20, text
    return fate


VALUES = [
    "hello world",
    "",
    "a" * 20_000,
    ["one", "two", ["three"]],
    {"a": "b", "l": {"x": 1}},
    7,
    None,
    [["a", "b"]] * 500,
]

def test_random_lambdas_raise_template_errors_alone():
    rng = random.Random(0)
    fates = [judge(rng, VALUES) for _ in range(120)]
    assert {"refused", "failed"} <= set(fates)


@pytest.mark.slow                              # (the same on short values is quick)
def test_many_random_lambdas_raise_template_errors_alone():
    rng = random.Random(1)
    fates = [judge(rng, [*VALUES, "a" * 400_000, "é电\U0001f600" * 20_000]) for _ in range(120)]
    assert all(fates.count(f) > 8 for f in ("refused", "failed", "ran"))


# ---- parsing

UNREADABLE = [
    "lambda x: x.get(a=1,a=1)",
    "lambda x: [a async for a in x]",
    "lambda x: x" + ".strip()" * 500,
    "lambda x: " + "-" * 1000 + "1",
    "lambda x: " + "x+" * 3000 + "x",
    "lambda x: " + "not " * 5000 + "x",
    "lambda x: " + "[" * 300 + "]" * 300,
    "lambda x: " + "f'{" * 50,
    "lambda x: [0 for x[0] in x]",
    "lambda x: [0 for (a, *b) in x]",
    "lambda x: [0 for x.y in x]",
    "lambda x: " + "9" * 5000,
    "lambda x: {**x}",
    "lambda x: x.get(**x)",
    "lambda x, /: x",
]

@pytest.mark.parametrize("text", UNREADABLE)
def test_a_lambda_that_cannot_be_is_a_template_error(text):
    for whole in (
        '{"placeholder":"a","post_processing":' + text + '}{"mask"}',
        '{"placeholder":"a","post_processing":' + repr(text) + '}{"mask"}',
    ):
        with pytest.raises(TemplateError): parse_template(whole)
    with pytest.raises(TemplateError): safe_lambda(text)


def test_a_keyword_of_python_as_an_argument_is_harmless():
    with pytest.raises(TemplateError): safe_lambda("lambda x: x.get(__debug__=1)")({"a": 1})


@pytest.mark.parametrize("key", ["mask", "soft_id", "duplicate", "shortenable", "soft", "text", "name", "weight"])
def test_a_number_of_many_digits_is_a_template_error(key):
    for number in ("0x" + "f" * 5000, "9" * 5000, "-0x" + "f" * 5000, "1e999" if key != "weight" else "'a'"):
        with pytest.raises(TemplateError):
            parse_template('{"mask"}{"soft","' + key + '":' + number + "}", attrs={"weight": 0})


@pytest.mark.parametrize("text", [
    '{"x":[' + "{}," * 6600, '{"text":"' + "}" * 19_000 + '"}', '{"text":"' + "}" * 40_000,
    "{[" * 5000 + "]}" * 3000, '{"mask"}' + '{"mask", ' * 3000, "{" * 40_000, '{"a' * 20_000,
    '{"mask",' + '"a":1,' * 3000 + "}", '{"text":"a}"}' * 1500, '{"text":' + "'a' " * 3000 + "}",
    "{'''" + "a" * 40_000, "{" + "(" * 15_000 + "}",
])
def test_parsing_takes_time_in_proportion(text):
    start = time.process_time()
    try: parse_template(text)
    except TemplateError as e: assert 0 <= e.span[0] <= e.span[1] <= len(text)
    assert time.process_time() - start < 10


def test_braces_and_quotes_inside_of_a_tag():
    tags = {
        '{"text":"a } b"}': "a } b", """{"text":'it"s } {'}""": 'it"s } {', '{"text":"\\"}{"}': '"}{',
        '{"text":\'\'\'a"}\'b\'\'\'}': 'a"}\'b', '{"text":""}': "",
    }
    for tag, value in tags.items():
        assert [(p.kind, p.value) for p in parse_template(tag + '{"mask"}')] == [("text", value), ("mask", None)]
    f = parse_template('{"placeholder":"a","post_processing":lambda x: "".join([f"{{{c}}}" for c in x])}{"mask"}')[
        0
    ].post_processing
    assert f("ab") == "{a}{b}" and repr(f).startswith("lambda x:")


def test_what_does_not_go_together():
    for text, says in (
        ('{"mask","shortenable":True}', "cannot be cut"),
        ('{"soft":None,"duplicate":3,"soft_id":1}{"soft":None,"duplicate":5,"soft_id":1}{"mask"}', "another size"),
        ('{"soft_id":1}{"soft_id":1,"duplicate":2}{"mask"}', "another size"),
        ('{"soft":"it was","soft_id":1}{"soft_id":1,"duplicate":2}{"mask"}', "another size"),
        ('{"soft_id":1}{"soft":"it","soft_id":1}{"mask"}', "vectors without words"),
    ):
        with pytest.raises(TemplateError, match=says): parse_template(text)
    assert (
        len(
            parse_template(
                '{"soft":None,"duplicate":3,"soft_id":1}{"soft_id":1}{"soft":None,"duplicate":3,"soft_id":1}{"mask","shortenable":False}'
            )
        )
        == 4
    )


@pytest.mark.parametrize("name", [
    "mask_positions", "loss_ids", "soft_ids", "part_ids", "label", "labels", "input_ids", "attention_mask",
    "position_ids", "decoder_input_ids", "words", "to", "placeholder", "length",
])
def test_names_that_are_taken(name):
    with pytest.raises(ValueError, match="already"): Template('{"mask"}', attrs={name: 0})


def test_keys_of_ones_own_are_numbers():
    for bad in ("a", None, [1], 2 ** 70, torch.zeros(1)):
        with pytest.raises(ValueError, match="expected a number"): Template('{"mask"}', attrs={"weight": bad})
    assert Template('{"text":"a","weight":True} {"mask"}', byte_tok(), attrs={"weight": False}).encode({})[
        "weight"
    ].tolist() == [True]


# ---- binding

def test_a_mask_of_several_tokens_is_for_masked_models():
    assert Template('{"placeholder":"text_a"} {"mask","length":3}', bert_tok()).encode({"text_a": "a"})[
        "mask_positions"
    ].shape == (3,)
    for tok in (byte_tok(), t5_tok()):
        with pytest.raises(TemplateError, match="masked models"):
            Template('{"placeholder":"text_a"} {"mask","length":3}', tok)


def test_tokens_that_are_added_later_do_not_shift_soft_tokens():
    tok = byte_tok()
    t, plain = Template(S, tok), Template(Q, tok)
    e, base = t.encode({"text_a": "a"}), t.soft_base
    assert (
        base == len(tok) and e["input_ids"][:2].tolist() == [base, base + 1] and e["soft_ids"][:3].tolist() == [1, 2, 0]
    )
    tok.add_tokens(["<new>"])
    assert e.words()[:2] == ["<S1>", "<S2>"] and "S2" in e._repr_html_()
    with pytest.raises(ValueError, match="bind the template again"): t.encode({"text_a": "a"})
    words = plain.encode({"text_a": "<new>"})
    assert words["soft_ids"].sum() == 0 and "<new>" in words.words()
    assert t.bind(tok).encode({"text_a": "<new>"})["soft_ids"].tolist()[:5] == [1, 2, 0, 0, 0] and t.soft_base == base


def test_a_chat_template_that_refuses_is_a_template_error():
    with pytest.raises(TemplateError, match="no tools here"):
        Template('{"chat":"tool"}a{"/chat"}{"mask"}', byte_tok(True))
    tok = byte_tok()
    tok.chat_template = "{{ messages[7].content }}"
    with pytest.raises(TemplateError, match="refuses"): Template('{"chat":"user"}a{"/chat"}{"mask"}', tok)


def test_a_turn_begins_and_ends_with_a_word():
    tok = byte_tok(True)
    read = lambda text: tok.decode(Template(text, tok).encode({"text_a": "x"})["input_ids"])
    assert read('{"chat":"user"}  Review: {"placeholder":"text_a"} {"/chat"} {"mask"}') == "<eos>user:Review: x\nme:"
    assert read('{"chat":"user"} {"placeholder":"text_a"} . {"/chat"}{"mask"}') == "<eos>user:x .\nme:"


def test_a_template_is_pickled_by_its_arguments():
    tok = bert_tok()
    t = Template(
        '{"soft":2} {"placeholder":"text_a","post_processing":lambda x: x.lower(),"weight":2} {"mask"}',
        tok,
        attrs={"weight": 1},
    )
    t.soft, t.prefix = {"encoder": "mlp"}, 4
    for again in (pickle.loads(pickle.dumps(t)), copy.copy(t), copy.deepcopy(t)):
        assert (again.text, again.family, again.attrs, again.joint, again.soft, again.prefix, again.soft_base) == (
            t.text,
            t.family,
            t.attrs,
            t.joint,
            t.soft,
            t.prefix,
            t.soft_base,
        )
        assert torch.equal(again.encode({"text_a": "GREAT"})["input_ids"], t.encode({"text_a": "GREAT"})["input_ids"])
    assert (
        pickle.loads(pickle.dumps(Template(Q))).tok is None
        and pickle.loads(pickle.dumps(Template(Q, tok, family="causal"))).family == "causal"
    )


# ---- examples

@pytest.mark.parametrize("joint", [False, True])
def test_what_an_example_says_is_no_special_token(joint):
    B, G, T, C = bert_tok(), byte_tok(), t5_tok(), byte_tok(True)
    for tok, text, said in (
        (B, Q, "a [SEP] [MASK] [CLS] " "[PAD]"), (G, Q, "a <eos> b<pad>"),
        (T, Q, "good <extra_id_0> bad </s> " "<extra_id_1>"),
        (C, '{"chat":"user"}{"placeholder":"text_a"}{"/chat"}{"mask"}', "a<eos>me:b"),
        (B, 'a [SEP] {"placeholder":"text_a"}{"mask"}', "[MASK]"),
        (G, '<e{"placeholder":"text_a"} ' '<eos> {"mask"}', "os>"),
        (B, '{"options":"o"} {"meta":"m"} {"mask"}', "[SEP]"),
    ):
        t = Template(text, tok, joint=joint)
        values = lambda v: {"text_a": v, "o": ["a", v], "meta": {"m": v}}
        counts = [
            [e.count(i) for i in tok.all_special_ids if i != tok.unk_token_id]
            for e in (t.encode(values(v))["input_ids"].tolist() for v in (said, "good"))
        ]
        assert counts[0] == counts[1], (text, said)
    # the tokenizer is as before
    assert tok("a [SEP]", add_special_tokens=False)["input_ids"].count(tok.sep_token_id) == 1
    assert (
        Template('a [SEP] {"special":"<sep>"} {"mask"}', B, joint=joint).encode({})["input_ids"].tolist().count(3) == 3
    )


def test_parts_tokenized_together_are_what_the_tokenizer_makes_of_the_whole():
    tok = t5_tok()
    for x in ("good movie", "q x", ""):
        got = (
            Template('a {"placeholder":"text_a"}, it was {"mask"}', tok, joint=True)
            .encode({"text_a": x})["input_ids"]
            .tolist()
        )
        assert got == tok(f"a {x}, it was", add_special_tokens=False)["input_ids"] + [
            tok.convert_tokens_to_ids("<extra_id_0>"),
            tok.eos_token_id,
        ]


@pytest.mark.parametrize("joint", [False, True])
def test_a_sign_that_was_added_is_the_templates_own_and_an_added_word_is_anybodys(joint):
    tok = bert_tok()
    tok.add_tokens(["<think>", "[unused1]", "{end}", "blockbuster"])
    signs, word = (
        [tok.convert_tokens_to_ids(x) for x in ("<think>", "[unused1]", "{end}")],
        tok.convert_tokens_to_ids("blockbuster"),
    )
    t = Template('{"placeholder":"text_a"} <think> {"mask"}', tok, joint=joint)
    ids = t.encode({"text_a": "a blockbuster <think> [unused1] {end}"})["input_ids"].tolist()
    assert [ids.count(i) for i in (*signs, word)] == [1, 0, 0, 1]


@pytest.mark.parametrize("text, want", [
    ('a {"placeholder":"text_a"}, it {"mask"}.', ["<extra_id_0>", "."]),
    ('it {"mask"}, {"mask"} !', ["<extra_id_0>", ",", "<extra_id_1>"]), ('{"soft"}, {"mask"}', ["<S1>", ","]),
])
def test_what_is_glued_to_a_mask_or_a_soft_token_has_no_space_of_its_own(text, want):
    words = Template(text, t5_tok(), joint=True).encode({"text_a": "good"}).words()
    at = words.index(want[0])
    assert words[at:at + len(want)] == want


@pytest.mark.parametrize("kind", ["bert", "roberta"])
@pytest.mark.parametrize("text", [Q, S])
def test_a_batch_of_a_masked_model_gives_what_its_examples_give(kind, text):
    from bmlab.prompt.soft import SoftTokens
    examples = [{"text_a": "a fun movie"}, {"text_a": "dull"}, {"text_a": "one two three four five"}]
    # the tokenizer pads on the left: a template does not
    model, t = masked_model(kind), Template(text, bert_tok("left"))
    if t.soft_count: SoftTokens(model, t)
    at = lambda e, n: model(**e).logits[torch.arange(n)[:, None], e["mask_positions"]]
    with torch.no_grad():
        together, alone = at(t.encode(examples), 3), torch.cat([at(t.encode([e]), 1) for e in examples])
    assert torch.allclose(together, alone, atol=1e-5)
    with pytest.raises(ValueError, match="pad on the right"): t.encode(examples, padding_side="left")


@dataclasses.dataclass
class Own: text_a: str

def test_what_an_example_may_be():
    import pandas as pd
    t, Row = Template(Q, byte_tok()), namedtuple("Row", "text_a")
    table = pd.DataFrame({"text_a": ["good", "bad"]})
    same = [
        t.encode(e)["input_ids"].tolist()
        for e in (
            {"text_a": "good"},
            InputExample(text_a="good"),
            Own("good"),
            table.iloc[0].to_dict(),
            Row("good")._asdict(),
        )
    ]
    assert all(s == same[0] for s in same) and t.encode(iter([Own("good")]))["input_ids"].tolist() == [same[0]]
    for bad in (
        "abc", "", ["abc"], 5, None, [None], Row("good"), [Row("good")], table, table.iloc[0], [table.iloc[0]],
        [["a"]], len, dict,
    ):
        with pytest.raises(TypeError, match="expected a dict, an InputExample or an object"): t.encode(bad)
    for bad in ("abc", 5, None, Row("good"), table.iloc[0], [{"text_a": "good"}]):
        with pytest.raises(TypeError, match="expected a dict"): t.wrap(bad)


def test_what_a_value_may_be():
    import numpy as np, pandas as pd
    t = Template('{"placeholder":"text_a"} {"meta":"m"} {"options":"o"} {"mask"}', byte_tok())
    good = {"text_a": "a", "meta": {"m": 1}, "o": ["x", 2]}
    t.encode(good | {"text_a": np.int64(3), "meta": {"m": 2.5}, "o": (True, np.str_("b"))})
    for bad in (
        ["a", "b"], {"a": 1}, ("a",), {"a"}, b"a", np.zeros(2), torch.zeros(2), pd.Series(["a"]), float("nan"),
        np.float32("nan"), pd.NA, pd.NaT, None,
    ):
        for e in (good | {"text_a": bad}, good | {"meta": {"m": bad}}, good | {"o": ["x", bad]}):
            with pytest.raises(TemplateError, match="expected text|missing value|is None"): t.encode(e)
    lower = Template('{"placeholder":"text_a","post_processing":lambda x: str(x)}{"mask"}', byte_tok())
    with pytest.raises(TemplateError, match="missing value"): lower.encode({"text_a": float("nan")})
    class Odd:
        def __repr__(self): raise RuntimeError("odd")
    with pytest.raises(TemplateError, match="this is a Odd"): lower.encode({"text_a": Odd()})


def test_what_encode_is_told_is_checked_first():
    t = Template(Q, byte_tok())
    for bad in ("12", 0, -3, 2.5, True):
        with pytest.raises(ValueError, match="max_length="): t.encode({"text_a": "a"}, max_length=bad)
    with pytest.raises(ValueError, match="did you mean 'tail'"): t.encode({"text_a": "a"}, truncate="tial")
    with pytest.raises(ValueError, match="padding_side"): t.encode({"text_a": "a"}, padding_side="top")


def test_a_safe_lambda_is_never_compiled():
    import bmlab.prompt.language as language
    source = ast.parse(pathlib.Path(language.__file__).read_text(encoding="utf-8"))
    assert not {n.func.id for n in ast.walk(source) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)} & {
        "eval",
        "exec",
        "compile",
    }

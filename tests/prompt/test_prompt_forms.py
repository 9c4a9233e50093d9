"""OpenPrompt's template forms: parts, ids, soft numbers and losses as a plain reading of its documentation gives them,
and the right behaviour where its own is broken.

The reading here is written on its own, by counting braces and evaluating these strings (they are ours, so that is
safe); the library parses by syntax trees and evaluates nothing.
"""
import string

import pytest
import torch
import transformers as tf
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from bmlab.prompt.language import TemplateError, parse_template
from bmlab.prompt.learned import SoftVerbalizer
from bmlab.prompt.template import Template
from bmlab.prompt.openprompt import ManualTemplate, MixedTemplate, PTRTemplate, PtuningTemplate, SoftTemplate
from bmlab.prompt.classify import PromptModel
from bmlab.prompt.soft import SoftTokens
from bmlab.prompt.targets import GenerationVerbalizer, target_texts
from bmlab.prompt.verbalize import KnowledgeableVerbalizer, PtrVerbalizer, Verbalizer

WORDS = """a fun movie film it was is the of in this that good bad great terrible yes no question answer type category
entity sentence one two three four five six love i red green blue true false word refer to does , . ! ? : ' " ( ) | 0
1 2 because the""".split()
FORMS = [
    '{"placeholder":"text_a"} It was {"mask"}.',
    'It was {"mask"} . {"placeholder":"text_a"}',
    'A {"mask"} film : {"placeholder":"text_a"} {"placeholder":"text_b"}',
    '{"placeholder": "text_a"} {"placeholder": "text_b", "shortenable": False} {"meta": "word"} is {"mask"}.',
    '{"placeholder":"text_a", "shortenable":True} {"placeholder":"text_b", "shortenable":False} In this sentence , '
    '{"meta":"word"} is a {"mask"} .',
    ' {"placeholder": "text_a","shortenable": False} {"placeholder": "text_a", "post_processing": "lambda '
    'x:x.strip(\'.\')", "shortenable": False} is a {"mask"} .',
    '{"placeholder":"text_a", "post_processing": lambda s: s[:-1]} {"mask"} {"meta":"word"} {"mask"} '
    '{"placeholder":"text_b", "post_processing": lambda s: s[:1].lower() + s[1:]}',
    '{"placeholder":"text_a","post_processing":lambda s: s.rstrip(string.punctuation)} '
    '?{"mask"},{"placeholder":"text_b","add_prefix_space":" ","post_processing":lambda s: s[:1].lower()+s[1:]}',
    '{"placeholder":"text_a", "post_processing": lambda x: x + "."} {"mask"}',
    '{"placeholder":"text_a", "post_processing": lambda x: x.strip("。")} {"mask"}',
    '{"meta":"many", "post_processing": lambda x: " ".join(x)} {"mask"}',
    '{"meta":"many", "post_processing": lambda lis: " , ".join([f"{i} : {c}" for i,c in enumerate(lis)])} {"mask"}',
    '{"meta":"pairs", "post_processing": lambda x: " | ".join(["( " + i["label"] + " ) " + i["text"] for i in x])} '
    '{"mask"}',
    '{"meta":"many", "post_processing": lambda x: "\\n\\n".join(x)} question {"mask"}',
    '"{"meta":"span2_text"}" in that sentence does refer to "{"meta":"span1_text"}" ? {"mask"}',
    '{"text":"the question : "} {"placeholder":"text_a"} {"text":"?", "shortenable":True} {"mask"}',
    '{"placeholder":"text_a"} {"special":"<sep>"} it was {"mask":None} .',
    '{"special":"<cls>"} {"placeholder":"text_a"} {"mask"}',
    '{"soft"} {"soft"} {"soft"} {"placeholder":"text_a"} {"soft"} {"mask"} .',
    '{"soft":None} {"placeholder":"text_a"} {"soft":"it was"} {"mask"} {"soft"} .',
    '{"placeholder":"text_a"} question : {"placeholder":"text_b"} ? {"soft"}the answer {"soft"}is {"mask"} .',
    '{"soft": None} {"soft": "the", "soft_id": 1} {"soft": None} {"soft": "it", "soft_id": 3} {"soft_id": 1} {"soft": '
    '"was"} {"mask"}',
    '{"soft":None,"duplicate":3} {"placeholder":"text_a"} {"mask"}',
    '{"soft":None,"duplicate":3,"same":True} {"placeholder":"text_a"} {"mask"}',
    '{"soft_id":5} {"placeholder":"text_a"} {"soft_id":5} {"soft"} {"mask"}',
    '{"soft":"this is","soft_id":2} {"placeholder":"text_a"} {"soft_id":2} {"mask"}',
    '{"soft":"does the first sentence"} {"placeholder":"text_a"} {"soft":"?"} {"mask"} {"soft":"."}',
    '{"placeholder":"text_a"} the {"mask"} {"meta":"word"} {"mask"} {"mask"} {"mask"} the {"mask"} '
    '{"meta":"span1_text"}',
    '  a   b  {"mask"}   {"placeholder":"text_a"}  ',
    "{'placeholder':'text_a'} answer : {'mask'} because : {'mask'}",
    '{"placeholder":"text_a"}\n{"placeholder":"text_b"}\nanswer : {"mask"}',
]
EXAMPLE = dict(
    text_a="A fun movie.",
    text_b="I love it.",
    meta=dict(
        word="film",
        span1_text="the film",
        span2_text="it",
        many=["one", "two"],
        pairs=[{"label": "0", "text": "yes"}, {"label": "1", "text": "no"}],
    ),
)


def tokenizer(kind="masked"):
    special = {
        "masked": ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"],
        "causal": ["[PAD]", "[UNK]"],
        "seq2seq": ["<pad>", "<unk>", "</s>", *[f"<extra_id_{i}>" for i in range(6)]],
    }[kind]
    t = Tokenizer(
        models.WordLevel({w: i for i, w in enumerate(dict.fromkeys([*special, *WORDS]))}, unk_token=special[1])
    )
    t.normalizer, t.pre_tokenizer = normalizers.Lowercase(), pre_tokenizers.BertPreTokenizer()
    if kind == "masked":
        t.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
        )
    if kind == "seq2seq":
        t.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 2)])
    names = {
        "masked": dict(pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]", mask_token="[MASK]"),
        "causal": dict(pad_token="[PAD]", unk_token="[UNK]"),
        "seq2seq": dict(pad_token="<pad>", unk_token="<unk>", eos_token="</s>", additional_special_tokens=special[3:]),
    }[kind]
    return tf.PreTrainedTokenizerFast(tokenizer_object=t, **names)


def read(text):
    """A template's parts [(kind, value, space, everything else)] by the documentation: spaces, then a tag up to
    the brace that closes it, or text up to the next tag"""
    out, i = [], 0
    while i < len(text):
        space = ""
        while i < len(text) and text[i] == " ": space, i = " ", i + 1
        if i == len(text): break
        if text[i] != "{":
            j = text.find("{", i) if "{" in text[i:] else len(text)
            words = text[i:j]
            i = j - (len(words) - len(words.rstrip(" "))) if j < len(text) else j
            out.append(("text", words.rstrip(" "), space, {}))
            continue
        j, depth = i, 0
        while True:
            depth += {"{": 1, "}": -1}.get(text[j], 0)
            j += 1
            if depth == 0: break
        tag = eval(text[i:j], {"string": string})
        tag = {k: None for k in tag} if isinstance(tag, set) else dict(tag)
        kind = next((k for k in ("placeholder", "meta", "text", "mask", "special", "soft") if k in tag), "soft")
        out.append((kind, tag.pop(kind, None), tag.pop("add_prefix_space", space), tag))
        i = j
    return out


def numbered(parts, tok):
    "Soft numbers of each part, by the documentation"
    out, n, groups = {}, 0, {}
    for i, (kind, value, space, more) in enumerate(parts):
        if kind != "soft": continue
        key = more.get("soft_id")
        if key in groups:
            out[i] = groups[key]
            continue
        size = len(tok(value, add_special_tokens=False)["input_ids"]) if value else more.get("duplicate", 1)
        out[i] = [n + 1] * size if more.get("same") else list(range(n + 1, n + size + 1))
        n += 1 if more.get("same") else size
        if key is not None: groups[key] = out[i]
    return out


def texts(parts, e):
    "What every part says of an example"
    for kind, value, space, more in parts:
        if kind in ("placeholder", "meta"):
            f = more.get("post_processing", lambda x: x)
            yield space + (eval(f) if isinstance(f, str) else f)((e if kind == "placeholder" else e["meta"])[value])
        else: yield space + (value or "")


@pytest.mark.parametrize("text", FORMS)
def test_the_parts_are_those_of_the_documentation(text):
    want, got = read(text), parse_template(text)
    assert [(p.kind, p.value, p.space) for p in got] == [w[:3] for w in want]
    assert [(p.soft_id, p.duplicate, p.same) for p in got] == [
        (w[3].get("soft_id"), w[3].get("duplicate", 1), w[3].get("same", False)) for w in want
    ]
    assert [p.shortenable for p in got] == [w[3].get("shortenable", w[0] == "placeholder") for w in want]
    filled = [t for (p, t), w in zip(Template(text).wrap(EXAMPLE), want) if w[0] in ("text", "placeholder", "meta")]
    assert filled == [t for t, w in zip(texts(want, EXAMPLE), want) if w[0] in ("text", "placeholder", "meta")]


@pytest.mark.filterwarnings("ignore:a causal model reads")
@pytest.mark.parametrize("kind", ["masked", "causal", "seq2seq"])
@pytest.mark.parametrize("text", FORMS)
def test_ids_soft_numbers_and_loss_positions_are_those_of_the_documentation(text, kind):
    tok, parts = tokenizer(kind), read(text)
    masks = [i for i, p in enumerate(parts) if p[0] == "mask"]
    special = "special" in text
    if kind == "causal" and (len(masks) > 1 or masks[0] == 0 or special) or kind == "seq2seq" and special:
        pytest.skip("not of this kind of model")
    # its answer is read behind the last word
    if kind == "causal": parts = parts[:masks[0]]
    soft, ids, numbers, at = numbered(parts, tok), [], [], []
    for i, ((k, value, space, more), t) in enumerate(zip(parts, texts(parts, EXAMPLE))):
        own = (
            [0] * len(soft[i])
            if k == "soft"
            else [tok.mask_token_id if kind == "masked" else tok.convert_tokens_to_ids(f"<extra_id_{masks.index(i)}>")]
            if k == "mask"
            else [{"<sep>": tok.sep_token_id, "<cls>": tok.cls_token_id}[value]]
            if k == "special"
            else tok(t, add_special_tokens=False)["input_ids"]
        )
        if k == "mask": at.append(len(ids))
        ids += own
        numbers += soft.get(i, [0] * len(own))
    before, behind = (
        ([tok.cls_token_id], [tok.sep_token_id])
        if kind == "masked"
        else ([], [tok.eos_token_id] if kind == "seq2seq" else [])
    )
    enc, n = Template(text, tok).encode(EXAMPLE), len(before)
    assert enc["soft_ids"].tolist() == [0] * n + numbers + [0] * len(behind)
    assert [0 if s else i for i, s in zip(enc["input_ids"].tolist(), enc["soft_ids"].tolist())] == before + ids + behind
    wanted = (
        [n + i for i in at]
        if kind == "masked"
        else [len(ids) - 1]
        if kind == "causal"
        else list(range(1, len(masks) + 1))
    )
    assert enc["mask_positions"].tolist() == wanted and enc["loss_ids"].nonzero().flatten().tolist() == wanted


@pytest.mark.parametrize("text", [f for f in FORMS if f.count("mask") == 1 and "soft" not in f and "<" not in f])
def test_the_loss_is_that_of_the_words_at_the_mask(text):
    torch.manual_seed(0)
    tok = tokenizer()
    bert = tf.BertForMaskedLM(
        tf.BertConfig(
            vocab_size=len(tok), hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64
        )
    ).eval()
    m = PromptModel(bert, Template(text, tok), Verbalizer(tok, {"no": ["bad", "terrible"], "yes": "good"}))
    batch = next(iter(m.batches([EXAMPLE | {"label": "yes"}])))
    ids = Template(text, tok).encode(EXAMPLE)["input_ids"]
    with torch.no_grad(): logits = bert(ids[None]).logits[0, ids.tolist().index(tok.mask_token_id)]
    p = logits[[tok.convert_tokens_to_ids(w) for w in ("bad", "terrible", "good")]].softmax(-1)
    scores = torch.stack([p[:2].log().mean(), p[2].log()])
    torch.testing.assert_close(
        m.verbalizer.loss(m(batch), batch["label"]), -scores.log_softmax(-1)[1], atol=1e-5, rtol=0
    )


# what is broken there and right here, in the order of the research note

def test_soft_tokens_of_a_causal_model_stay():
    tok = tokenizer("causal")
    t = Template('{"soft"} {"placeholder":"text_a"} {"soft"} {"soft":"it was"} {"mask"}', tok)
    assert [w for w in t.encode({"text_a": "film"}).words() if w.startswith("<S")] == ["<S1>", "<S2>", "<S3>", "<S4>"]
    assert Template('{"soft":"it","soft_id":1} film {"soft_id":1} {"mask"}', tok).encode({})["soft_ids"].tolist() == [
        1,
        0,
        1,
    ]


def test_a_causal_models_answer_is_read_behind_what_is_left():
    tok = tokenizer("causal")
    enc = Template('{"placeholder":"text_a"} {"mask"}', tok).encode(
        {"text_a": "one two three four five six"}, max_length=3
    )
    assert enc.words() == ["one", "two", "three"] and enc["mask_positions"].tolist() == [2]


def test_cutting():
    t = Template('{"placeholder":"text_a"} {"placeholder":"text_b"} {"mask"}', tokenizer())
    e = {"text_a": "one two three four", "text_b": ""}
    assert t.encode(e, max_length=5, truncate="head").words() == ["[CLS]", "three", "four", "[MASK]", "[SEP]"]
    assert t.encode(e, max_length=5, truncate="balanced").words() == ["[CLS]", "one", "two", "[MASK]", "[SEP]"]


@pytest.mark.parametrize("text, says", [
    ('{"placeholder":"text_a" {"mask"}', "never closed"),
    ('{"placeholder":"text_a","post_processing":lambda x: __import__("os").system("true")}{"mask"}', "__import__"),
    ('{"meta":"a","post_processing":"mlp"}{"mask"}', "fns="),
    ('{"placeholder":"a","shortenabel":True}{"mask"}', "did you mean 'shortenable'"),
])
def test_a_bad_template_is_an_error_with_its_place_when_it_is_made(text, says):
    with pytest.raises(TemplateError, match=says) as e: Template(text)
    assert "^" in str(e.value)


def test_soft_in_a_manual_template_and_unknown_names_are_said():
    tok = tokenizer()
    with pytest.raises(TemplateError, match="MixedTemplate"): ManualTemplate(tok, '{"soft"}{"mask"}')
    with pytest.raises(TemplateError, match="did you mean 'text_a'"):
        Template('{"placeholder":"txt_a"}{"mask"}', tok).encode({"text_a": "x"})


def test_p_tuning_keeps_words_and_sharing():
    tok = tokenizer()
    torch.manual_seed(0)
    bert = tf.BertForMaskedLM(
        tf.BertConfig(
            vocab_size=len(tok), hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64
        )
    ).eval()
    t = PtuningTemplate(bert, tok, '{"soft":"it","soft_id":1} {"placeholder":"text_a"} {"soft_id":1} {"mask"}', "mlp")
    assert t.soft_count == 1 and t.start == [tok.convert_tokens_to_ids("it")] and t.soft == {"encoder": "mlp"}
    d = SoftTokens(bert, MixedTemplate(bert, tok, t.text))
    assert torch.equal(d.prompt()[0], bert.get_input_embeddings().weight[t.start[0]])


def test_a_soft_template_is_tokens_in_front_of_a_text():
    tok = tokenizer()
    assert SoftTemplate(None, tok, '{"placeholder":"text_a"} {"mask"}', num_tokens=3).encode({"text_a": "film"})[
        "soft_ids"
    ].tolist() == [1, 2, 3, 0, 0, 0, 0]       # in front of [CLS], as OpenPrompt's soft_template.py puts them
    with pytest.raises(AttributeError, match="give text="): SoftTemplate(None, tok).encode({})
    # vectors to begin with, as many as they are
    assert SoftTemplate(None, tok, '{"placeholder":"text_a"} {"mask"}', torch.zeros(2, 32)).soft_count == 2


def test_many_words_are_given_to_the_constructor():
    k = KnowledgeableVerbalizer(tokenizer(), {"no": ["bad", "terrible"], "yes": ["good", "great"]})
    assert k.calibrate(torch.full((1, len(WORDS) + 9), -1.0).index_fill(1, torch.tensor([5]), 9.0)).used.keys() == {
        "no",
        "yes",
    }  # a class that would be emptied keeps a word


def test_relations_do_not_look_at_the_label():
    tok = tokenizer()
    torch.manual_seed(0)
    bert = tf.BertForMaskedLM(
        tf.BertConfig(
            vocab_size=len(tok), hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64
        )
    ).eval()
    m = PromptModel(
        bert,
        PTRTemplate(None, tok, '{"placeholder":"text_a"} {"mask"} {"mask"}'),
        PtrVerbalizer(tok, {"a": ["good", "film"], "b": ["bad", "film"]}),
    )
    with torch.no_grad():
        one, two, none = (
            m(next(iter(m.batches([{"text_a": "film", **more}])))) for more in ({"label": "a"}, {"label": "b"}, {})
        )
    assert torch.equal(one, two) and torch.equal(one, none)


def test_an_answer_has_a_text_for_every_mask():
    tok = tokenizer("seq2seq")
    t = Template("{'placeholder':'text_a'} answer : {'mask'} because : {'mask'}", tok)
    v = GenerationVerbalizer({0: ["no", '{"meta":"explanation"}'], 1: ["yes", '{"meta":"explanation"}']})
    e = {"text_a": "does it", "meta": {"explanation": "the film is bad"}}
    assert v.texts(t, [e]) == [["no", "the film is bad"], ["yes", "the film is bad"]] and target_texts(
        t, e | {"tgt_text": ["no", "x"]}
    ) == ["no", "x"]
    for form, want in (
        (' {"text":"No"}', "No"), (' {"text": "Another word"} ', "Another word"),
        (' {"meta":"explanation"} {"placeholder":"text_a"} .', "the film is bad does it ."), ("good", "good"),
    ):
        assert GenerationVerbalizer({"a": form, "b": "x"}).target("a", e) == [want]


def test_a_soft_verbalizer_finds_its_layer_by_the_model_and_not_by_its_order():
    tok = tokenizer()
    bert = tf.BertForMaskedLM(
        tf.BertConfig(
            vocab_size=len(tok), hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64
        )
    )
    s = SoftVerbalizer(bert, tok, {"no": "bad", "yes": "good"})
    torch.testing.assert_close(
        s.layer.weight, bert.get_output_embeddings().weight[[tok.convert_tokens_to_ids(w) for w in ("bad", "good")]]
    )

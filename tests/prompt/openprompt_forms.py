"""What tests/prompt/test_openprompt_templates.py and tools/original_openprompt_templates.py share: tokenizers,
examples, patterns, and what our templates make of them."""
import functools
import hashlib
import json
import tempfile
import warnings
from pathlib import Path

import numpy as np
import transformers as tf
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from bmlab.models.cpm2 import Cpm2Tokenizer
from bmlab.models.load import sample_dir
from bmlab.prompt.language import TemplateError
from bmlab.prompt.openprompt import MixedTemplate
from bmlab.prompt.targets import written
from bmlab.prompt.template import Template

# name of a form: (tokenizer, OpenPrompt's wrapper, our family)
FORMS = {
    "wordpiece": ("wordpiece", "MLMTokenizerWrapper", "masked"),
    "bytes": ("bytes", "MLMTokenizerWrapper", "masked"),
    "bpe": ("bpe", "LMTokenizerWrapper", "causal"),
    "unigram": ("unigram", "T5TokenizerWrapper", "seq2seq"),
    "t5-lm": ("unigram", "T5LMTokenizerWrapper", "t5-lm"),
    "cpm-2": ("words", "CPM2TokenizerWrapper", "seq2seq"),
}
# (max_length, its truncate_method, our truncate)
CUTS = [
    (512, "tail", "tail"),
    (40, "tail", "tail"),
    (40, "head", "openprompt-head"),
    (40, "balanced", "balanced"),
    (20, "tail", "tail"),
]
META = (
    "word head tail entity labelword choice0 choice1 choice2 choice3 question answer query passage entities span1_text "
    "span2_text sentence title description premise hypothesis text translation answers explanation"
).split()


def example(a, b, k):
    "The three examples differ in length; every name of meta is there"
    more = {name: " ".join([name.replace("_", " ")] * (1 + (i + k) % 3)) for i, name in enumerate(META)}
    lists = {"options": ["good", "bad"][:1 + k % 2], "context": ["Hello there.", "Yes?"] if k == 1 else "some words."}
    return {"text_a": a, "text_b": b, "meta": more | lists, "label": k}


EXAMPLES = [
    example("Rain fell on the town.", "The streets were wet", 0),
    example("nobody knew Anna's 3rd answer, until the last train had left", "", 1),
    example("One, two, three; " * 4, "A long walk by the sea in the month of May " * 2, 2),
]
A, B = '{"placeholder":"text_a"}', '{"placeholder":"text_b"}'
PATTERNS = [
    f'{A} it was {{"mask"}}',
    f' {A} it was {{"mask"}} . ',
    f'{A}{B}{{"mask"}}',
    f'{A}  {B}   {{"mask"}}',
    f'{{"mask"}} : {A}',
    f'[ {{"mask"}} ] {A} {B}',
    f'{A} {{"mask"}} , {{"mask"}} and {{"mask"}} {B}',
    f'{A}? {{"mask"}}, {B}.',
    f'{{"placeholder":"text_a", "shortenable": False}} {B} {{"mask"}}',
    f'{A} {{"meta":"word"}} or "{{"meta":"title", "shortenable": True}}" {{"mask"}}',
    f'{{"placeholder":"text_a", "post_processing": lambda x: x.strip(".").lower()}} {B} {{"mask"}}',
    f'{{"placeholder":"text_a", "post_processing": "lambda x: x[:-1]"}} : {{"mask"}}',
    f'{A} {{"text":" so "}} {{"mask"}}',
    f'{A} {{"special":"<sep>"}} {B} {{"mask"}}',
    f'{A} {{"special":"<eos>"}} {{"mask"}}',
    f'{{"soft":"this is"}} {A} {{"soft":"it"}} {{"mask"}}',
    f'{A}{{"soft":"word"}}{{"mask"}}{{"soft":"end"}}',
    f'{{"soft":"my", "soft_id": 1}} {A} {{"soft":"own"}} {{"mask"}}',
    f'{{"soft"}} {A} {{"soft"}} {{"soft"}} {{"mask"}}',
    f'{{"soft": None, "duplicate": 3}} {A} {{"mask"}}',
    f'{{"soft": None, "duplicate": 3, "same": True}} {A} {{"soft"}} {{"mask"}}',
    f'{{"soft": None, "soft_id": 2}} {A} {{"soft":"so", "soft_id": 1}} {{"soft_id": 2}} {{"soft_id": 1}} {{"mask"}}',
    '{"meta":"title"} 好 {"meta":"word"}。{"mask"}',
    '{"mask"}',
]

# words of three classes, one of them in two of them, several of more than one token
WORDS = [
    "sport ball goal unbelievably league stadiums race quarterbacks win".split(),
    "money bank market deregulation price win shareholders tax".split(),
    "earth sea thunderstorms river rain biodiversity wind".split(),
]
KNOWLEDGE = [(name, most, share) for name in ("wordpiece", "bpe") for most in (-1, 1, 2) for share in (0, .2, .5, .9)]

# what is to be written: (template, a text for each mask)
ANSWERS = [
    (f'{A} it was {{"mask"}}', ["great"]),
    (f'{A} {{"mask"}} , {{"mask"}} and {{"mask"}} {B}', ["so it was", "as", "a word"]),
    (f'so {{"mask"}} : {A} {B}', ["the sea"]),
    (f'{A}{{"mask"}}', ["great"]),
    (f'{A} {{"mask"}} {{"mask"}}', ["", "it"]),
    (f'{{"soft":"it is"}} {A} {{"mask"}}', ["the 3rd"]),
]


def habit(n): return np.random.RandomState(n).standard_normal(n).astype("float32")     # mean logits of n words


def _fast(model, pre, decoder, single, specials, **roles):
    t = Tokenizer(model)
    t.pre_tokenizer, t.decoder = pre, decoder
    ids = [(s, t.token_to_id(s)) for s in specials]
    t.post_processor = processors.TemplateProcessing(single=single, special_tokens=ids)
    return tf.PreTrainedTokenizerFast(tokenizer_object=t, **roles)


@functools.cache
def tokenizer(name):
    "Two of trained models, and two small ones: as RoBERTa's, of bytes, and as T5's, of pieces with scores"
    if name == "wordpiece": return tf.AutoTokenizer.from_pretrained(sample_dir("minilm-l6"))
    if name == "bpe": return tf.AutoTokenizer.from_pretrained(sample_dir("smollm2-135m"))
    if name == "words":
        signs = ["<pad>", "<s>", "<eod>", "<unk>", "\u2582", "\u2583"]
        lines = [*signs, *map(chr, range(33, 127)), *"好。", "the", "word"]
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "vocab.txt"
            path.write_text("\n".join(lines + [f"<s_{i}>" for i in range(12)]), encoding="utf-8")
            return Cpm2Tokenizer(str(path), cut="none")
    if name == "bytes":
        marks = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
        merges = [("Ġ", "t"), ("h", "e"), ("Ġt", "he"), ("i", "t"), ("Ġ", "it"), ("Ġ", "w"), ("a", "s"), ("Ġw", "as")]
        pieces = [*marks, *sorted(pre_tokenizers.ByteLevel.alphabet()), *(a + b for a, b in merges)]
        bpe = models.BPE({p: i for i, p in enumerate(pieces)}, merges)
        return _fast(bpe, pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel(), "<s> $A </s>",
                     ["<s>", "</s>"], bos_token="<s>", eos_token="</s>", sep_token="</s>", cls_token="<s>",
                     pad_token="<pad>", unk_token="<unk>", mask_token="<mask>")
    blanks = [f"<extra_id_{i}>" for i in range(8)]
    letters = [*map(chr, range(33, 127))]
    words = ["▁the", "▁it", "▁was", "▁a", "▁is", "▁so", "▁", "as", "it", "er", "▁an", "ing", "▁word"]
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", -20.0), *((w, -3.0 - i / 8) for i, w in enumerate(words)),
              *((c, -8.0 - i / 64) for i, c in enumerate(letters)), *((b, 0.0) for b in blanks)]
    unigram = models.Unigram(pieces, unk_id=2, byte_fallback=False)
    listed = {"additional_special_tokens": blanks} if name == "unigram" else {}              # mT5's are not
    tok = _fast(unigram, pre_tokenizers.Metaspace(), decoders.Metaspace(), "$A </s>", ["</s>"], pad_token="<pad>",
                eos_token="</s>", unk_token="<unk>", **listed)
    tok.backend_tokenizer.normalizer = normalizers.Replace("  ", " ")
    return tok


def ours(text, form, made=MixedTemplate, **options):
    "[of each cut and example: ids, soft token n as −n, the places of answers and the decoder's ids; None: refused]"
    kind, _, family = FORMS[form]
    tok, out = tokenizer(kind), []
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # its names end the text of a model that goes on at the first mask, as its code does
            template = made(None, tok, text, family=family, **options)
    except TemplateError: return [None] * (len(CUTS) * len(EXAMPLES))
    for length, _, truncate in CUTS:
        for one in EXAMPLES:
            try: enc = template.encode(one, max_length=length, truncate=truncate)
            except TemplateError: out.append(None)
            else:
                ids = [-n if (n := template.soft_number(i)) else i for i in enc["input_ids"].tolist()]
                more = [enc["decoder_input_ids"].tolist()] if "decoder_input_ids" in enc else []
                out.append([ids, enc["mask_positions"].tolist(), *more])
    return out


def ours_written(form, kind=None):
    "[of each of ANSWERS and EXAMPLES: what the decoder reads, what it is to say there]"
    usual, _, family = FORMS[form]
    kind, out = kind or usual, []
    for text, answers in ANSWERS:
        if family == "t5-lm" and len(answers) > 1: continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            template = Template(text, tokenizer(kind), family)
        got = written(template, EXAMPLES, [answers] * len(EXAMPLES))
        rows = zip(got["decoder_input_ids"].tolist(), got["targets"].tolist(), strict=True)
        out += [[x, y] for x, y in rows]
    return out


def digest(x): return hashlib.sha256((x if isinstance(x, str) else json.dumps(x)).encode()).hexdigest()[:8]

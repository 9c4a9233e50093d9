"Vocabularies in GGUF files cut text as the libraries that they come from: sentencepiece, transformers"
import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import sentencepiece
import transformers as tf
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from bmlab.formats.gguf import GGUF
from bmlab.formats.gguf_models import _RULE, gguf_tokenizer

CORPUS = (Path(tf.__file__).parent / "modeling_utils.py").read_text(encoding="utf-8").splitlines()[:3000]
TEXTS = [
    "Hello world!",
    "a  two  blanks and\ttabs",
    "In 1984 there were 12,345 apples; x = 10",
    "don't we'll I'd THEY'RE",
    "naïve Zoë über straße",
    "你好 한국어 🙂",
    "def f(x): return x ** 2  # ok",
    "x",
    *CORPUS[100:140:3],
]


def file_of(path, kind, arch="llama", **metadata):
    "A GGUF with a vocabulary alone, by the gguf package's writer"
    writer = gguf.GGUFWriter(path, arch)
    writer.add_tokenizer_model(kind)
    for key, value in metadata.items(): getattr(writer, f"add_{key}")(value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return GGUF(path)


def trained(folder, kind):
    "A sentencepiece model of 600 pieces, and what conversion/base.py, _create_vocab_sentencepiece, keeps of it"
    (folder / "corpus.txt").write_text("\n".join(CORPUS), encoding="utf-8")
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "corpus.txt"), model_prefix=str(folder / "m"), vocab_size=600, model_type=kind,
        byte_fallback=kind == "bpe", minloglevel=2, num_threads=1
    )
    sp = sentencepiece.SentencePieceProcessor(str(folder / "m.model"))
    T, n = gguf.TokenType, range(sp.vocab_size())
    def type_of(i):
        if sp.IsUnknown(i): return T.UNKNOWN
        if sp.IsControl(i): return T.CONTROL
        return T.BYTE if sp.IsByte(i) else T.NORMAL
    pieces = dict(token_list=[sp.IdToPiece(i) for i in n], token_scores=[sp.GetScore(i) for i in n])
    special = {f"{k}_token_id": getattr(sp, f"{k}_id")() for k in ("bos", "eos", "unk")}
    return sp, {**pieces, "token_types": [type_of(i) for i in n], **special}


def fields(data):
    "{number: bytes} of the length-delimited fields of a protocol buffer"
    out, at = {}, 0
    def varint():
        nonlocal at
        value, shift = 0, 0
        while True:
            value |= (data[at] & 127) << shift
            shift, at = shift + 7, at + 1
            if data[at - 1] < 128: return value
    while at < len(data):
        key = varint()
        if key & 7 == 2:
            size = varint()
            out[key >> 3] = data[at:at + size]
            at += size
        elif key & 7 == 0: varint()
        else: at += 4 if key & 7 == 5 else 8
    return out


def test_sentencepiece_bpe(tmp_path):
    "Ids of sentencepiece after the token that begins a text; back to the text; blanks kept as it keeps them"
    sp, known = trained(tmp_path, "bpe")
    tok = gguf_tokenizer(file_of(tmp_path / "t.gguf", "llama", **known))
    for text in TEXTS:
        text = " ".join(text.split())                              # this model's normalizer joins blanks
        ids = tok(text).input_ids
        assert ids == [sp.bos_id(), *sp.encode(text)], text
        assert tok.decode(ids, skip_special_tokens=True) == text
    bare = gguf_tokenizer(file_of(tmp_path / "b.gguf", "llama", **known, add_bos_token=False, add_eos_token=True))
    assert bare("x").input_ids == [*sp.encode("x"), sp.eos_id()]


def test_unigram(tmp_path):
    "Ids of sentencepiece, its normalizer's map included, before the token that ends a text"
    sp, known = trained(tmp_path, "unigram")
    map_ = fields(fields((tmp_path / "m.model").read_bytes())[3])[2]           # normalizer_spec.precompiled_charsmap
    tok = gguf_tokenizer(file_of(tmp_path / "t.gguf", "t5", "t5", **known, precompiled_charsmap=map_))
    for text in [*TEXTS[:4], *TEXTS[6:], "ﬁne ½ Ⅳ"]:
        text = text.strip()
        assert tok(text).input_ids == [*sp.encode(text), sp.eos_id()], text


@pytest.mark.parametrize("lower", [True, False])
def test_wordpiece(lower, tmp_path):
    "What the converter's phantom blanks hide (conversion/bert.py, set_vocab) is undone"
    letters = "abcdefghijklmnopqrstuvwxyz0123456789"
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *".,;!'()=*#", *(f"##{c}" for c in letters)]
    words += ["the", "hello", "##ld", "##ing", "wor", "##ere", "zoe", "uber"]
    if not lower: words += ["Hello", "In", "Z"]
    theirs = tf.BertTokenizerFast(vocab={w: i for i, w in enumerate(words)}, do_lower_case=lower)
    def phantom(w):
        if w.startswith("["): return w
        return w[2:] if w.startswith("##") else f"▁{w}"
    kinds = [gguf.TokenType.CONTROL if w.startswith("[") else gguf.TokenType.NORMAL for w in words]
    known = dict(pad_token_id=0, unk_token_id=1, sep_token_id=3, mask_token_id=4, token_types=kinds)
    ours = gguf_tokenizer(file_of(tmp_path / "t.gguf", "bert", "bert", token_list=[phantom(w) for w in words], **known))
    for text in [*TEXTS, "[MASK] the [SEP]"]:
        a, b = ours(text, "hello"), theirs(text, "hello")
        assert a.input_ids == b.input_ids and a.token_type_ids == b.token_type_ids, text
    assert (ours.cls_token, ours.sep_token, ours.mask_token, ours.pad_token) == ("[CLS]", "[SEP]", "[MASK]", "[PAD]")


@pytest.mark.parametrize("rule", ["gpt-2", "llama-bpe", "qwen2", "gpt-4o", "tekken"])
def test_byte_level(rule, tmp_path):
    "Ids of a vocabulary trained with the rule that the original tokenizers spell out"
    table = pytest.importorskip("transformers.integrations.gguf.gguf_tokenizer_mapping")
    cut = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if rule != "gpt-2":
        from tokenizers import Regex
        split = pre_tokenizers.Split(Regex(table.GGUF_PRE_TOKENIZER_SPLITS[rule]), "isolated")
        cut = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    theirs = Tokenizer(models.BPE())
    theirs.pre_tokenizer = cut
    options = dict(initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=["<|end|>"], **options)
    theirs.train_from_iterator(CORPUS + TEXTS, trainer)
    made = json.loads(theirs.to_str())["model"]
    words = sorted(made["vocab"], key=made["vocab"].get)
    kinds = [gguf.TokenType.CONTROL] + [gguf.TokenType.NORMAL] * (len(words) - 1)
    merges = [" ".join(m) for m in made["merges"]]
    known = dict(tokenizer_pre=rule, token_list=words, token_types=kinds, token_merges=merges, eos_token_id=0)
    ours = gguf_tokenizer(file_of(tmp_path / "t.gguf", "gpt2", **known, bos_token_id=0, add_bos_token=False))
    rng = np.random.default_rng(0)
    mixed = ["".join(rng.choice(list("aB1 .'\n你é🙂_"), 40)) for _ in range(50)]
    for text in [*TEXTS, *mixed, "12345 a<|end|>B"]:
        assert ours(text).input_ids == theirs.encode(text).ids, text
        assert ours.decode(ours(text).input_ids) == text


def test_every_rule_is_a_pattern(tmp_path):
    "Each name compiles and loses no text; a name that nobody knows is an error with the list"
    known = dict(token_list=[*sorted(pre_tokenizers.ByteLevel.alphabet()), "th"], token_merges=["t h"])
    for rule in _RULE:
        tok = gguf_tokenizer(file_of(tmp_path / "t.gguf", "gpt2", tokenizer_pre=rule, **known))
        for text in TEXTS: assert tok.decode(tok(text).input_ids) == text, rule
    with pytest.raises(ValueError, match="of the kind 'gpt2', 'klingon'; 'gpt2' with one of a.x-4.0"):
        gguf_tokenizer(file_of(tmp_path / "t.gguf", "gpt2", tokenizer_pre="klingon", **known))
    with pytest.raises(ValueError, match="of the kind 'rwkv'; gpt2, llama, bert, t5 can be converted"):
        gguf_tokenizer(file_of(tmp_path / "t.gguf", "rwkv", **known))
    assert gguf_tokenizer(file_of(tmp_path / "t.gguf", "none")) is None

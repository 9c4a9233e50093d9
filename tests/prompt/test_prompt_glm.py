"Templates on GLM: the blank anywhere in the text, the answer written behind <|startofpiece|> at two positions."
import pandas as pd
import pytest
import sentencepiece
import torch
import transformers as tf
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from bmlab.core import set_seed
from bmlab.models.glm import (
    BlankGlmConfig,
    BlankGlmForConditionalGeneration,
    BlankGlmTokenizer,
    blank_example,
    blank_inputs,
)
from bmlab.prompt.learned import ProtoVerbalizer, SoftVerbalizer
from bmlab.delta.lora import Lora
from bmlab.delta.prefix import Prefix
from bmlab.prompt.template import Template, one_batch
from bmlab.prompt.classify import PromptModel
from bmlab.prompt.soft import SoftTokens
from bmlab.prompt.targets import GenerationVerbalizer, Written
from bmlab.prompt.search import find_templates
from bmlab.prompt.verbalize import AutomaticVerbalizer, Verbalizer

SIGNS = ["<|endoftext|>", "[UNK]", "[CLS]", "[MASK]", "[gMASK]", "<|startofpiece|>", "<|endofpiece|>"]
WORDS = "a dull fun film it was . bad good fine poor so not love hate very".split()
Q = 'it was {"mask"} . {"placeholder":"text_a"}'
S = '{"soft":2} ' + Q
DATA = [
    {"text_a": text, "label": label}
    for text, label in [
        ("a fun film", "yes"),
        ("dull", "no"),
        ("love it", "yes"),
        ("hate it", "no"),
        ("so so", "no"),
        ("fine film", "yes"),
    ]
]


def tokenizer():
    t = Tokenizer(models.WordLevel({w: i for i, w in enumerate(SIGNS + WORDS)}, unk_token="[UNK]"))
    t.normalizer, t.pre_tokenizer = normalizers.Lowercase(), pre_tokenizers.BertPreTokenizer()
    t.post_processor = processors.TemplateProcessing(
        single="[CLS] $A <|endoftext|>", special_tokens=[("[CLS]", 2), ("<|endoftext|>", 0)]
    )
    return tf.PreTrainedTokenizerFast(
        tokenizer_object=t,
        unk_token="[UNK]",
        pad_token=SIGNS[0],
        eos_token=SIGNS[0],
        cls_token="[CLS]",
        mask_token="[MASK]",
        additional_special_tokens=SIGNS[4:],
    )


def network(V=len(SIGNS + WORDS) + 5, **ids):
    torch.manual_seed(0)
    ids = dict(mask_token_ids=[3, 4], sop_token_id=5, eos_token_id=6, pad_token_id=0) | ids
    return BlankGlmForConditionalGeneration(
        BlankGlmConfig(
            vocab_size=V,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_sequence_length=48,
            initializer_range=0.2,
            **ids,
        )
    ).eval()


def words(tok, **kw): return Verbalizer(tok, {"no": "bad", "yes": "good"}, **kw)


def test_the_answer_is_what_the_model_writes_first():
    net, tok = network(), tokenizer()
    t = Template(Q, tok)
    enc = t.encode(DATA[0])
    by_hand = blank_inputs(tok, "it was [MASK] . a fun film")
    assert enc["input_ids"].tolist() == by_hand["input_ids"][0].tolist()
    # a piece of one token, as training makes it
    piece = blank_example(enc["input_ids"][:-1].tolist(), [(3, 4)], 3, 5, 6)
    assert enc["position_ids"].tolist() == piece["position_ids"][:, :-1].tolist()
    with torch.no_grad(): want = net(**by_hand).logits[0, -1].log_softmax(-1)
    p = PromptModel(net, t, words(tok)).predict(DATA[0])
    ratio = (want[tok.convert_tokens_to_ids("good")] - want[tok.convert_tokens_to_ids("bad")]).sigmoid()
    assert p["p(yes)"][0] == pytest.approx(ratio.item(), abs=1e-5)
    cut = t.encode({"text_a": "a fun film so very very fine"}, max_length=9)
    assert (
        cut.words() == ["[CLS]", "it", "was", "[MASK]", ".", "a", "fun", "<|endoftext|>", "<|startofpiece|>"]
        and "line-through" in cut._repr_html_()
    )


@pytest.mark.parametrize("text", [Q, S], ids=["words", "soft"])
@pytest.mark.parametrize("chain", [False, True], ids=["first", "chained"])
def test_a_batch_is_its_examples(text, chain):
    net, tok = network(), tokenizer()
    m = PromptModel(
        net,
        Template(text, tok),
        Verbalizer(
            tok, {"no": ["bad", "not good"], "yes": ["good", "so very fine"]}, multi="first" if chain else "mean"
        ),
        chain=chain,
    )
    alone = pd.concat([m.predict(e, words=True) for e in DATA], ignore_index=True).drop(columns="label")
    assert abs(m.predict(DATA, batch=6, words=True).drop(columns="label") - alone).values.max() < 1e-5
    left, right = (m.template.encode(DATA, padding_side=side) for side in ("left", "right"))
    with torch.no_grad(): a, b = (net(**e).logits[torch.arange(6), e.mask_positions[:, 0]] for e in (left, right))
    torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def test_words_of_several_tokens_by_hand():
    net, tok = network(), tokenizer()
    m = PromptModel(
        net, Template(Q, tok), Verbalizer(tok, {"no": "not good", "yes": ["good", "so very fine"]}), chain=True
    )
    got = m.answer(next(iter(m.batches(DATA[:3], batch=3))))[0].words
    for i, e in enumerate(DATA[:3]):
        ids = m.template.encode(e)["input_ids"].tolist()
        for c, w, word in ((0, 0, "not good"), (1, 0, "good"), (1, 1, "so very fine")):
            more = tok(word, add_special_tokens=False)["input_ids"]
            with torch.no_grad(): p = net(torch.tensor([ids + more])).logits[0].log_softmax(-1)
            assert got[i, c, w].item() == pytest.approx(
                sum(p[len(ids) - 1 + k, t].item() for k, t in enumerate(more)), abs=1e-4
            )


def test_a_label_stands_where_its_token_is_predicted():
    from bmlab.cook.report import perplexity
    net = network()
    V = net.config.vocab_size
    ids = torch.arange(10, 22).view(2, 6) % V
    labels = torch.where(torch.arange(6) < 2, -100, (ids * 7 + 3) % V)
    batch = {
        "input_ids": ids,
        "labels": labels,
        "position_ids": torch.stack([torch.arange(6), torch.zeros(6, dtype=torch.long)]).expand(2, 2, 6),
    }
    assert perplexity(net, [batch]) == pytest.approx(net(**batch).loss.exp().item(), rel=1e-5)


def test_what_is_trained_and_its_files(tmp_path):
    net, tok = network(), tokenizer()
    weights = [p.clone() for p in net.parameters()]
    m = PromptModel(net, Template(S, tok), words(tok))
    yes = [e for e in DATA if e["label"] == "yes"]
    before, log = m.calibrate().evaluate(yes).loss, m.fit(yes, epochs=15, lr=2e-2, plot=False)
    assert m.evaluate(yes).loss < 0.8 * before and all(
        map(torch.equal, weights, [p for n, p in net.named_parameters() if "_deltas" not in n])
    )
    said = m.predict(DATA, batch=6)
    assert "nearest words" in m.show(DATA[0]) and len(log)
    m.save(tmp_path)
    m.soft.detach()
    again = PromptModel.load(tmp_path, net, tok)
    assert again.template.family == "blank" and again.predict(DATA, batch=6).equals(said)
    again.soft.detach()
    for delta in (Lora(net, modules=["query_key_value"]), Prefix(net, length=3)):
        m = PromptModel(net, Template(Q, tok), words(tok))
        before = m.evaluate(yes).loss
        m.fit(yes, epochs=6, lr=2e-2, plot=False)
        assert m.evaluate(yes).loss < before
        delta.detach()
    for v in (
        AutomaticVerbalizer(tok, ["no", "yes"]), ProtoVerbalizer(32, ["no", "yes"], 8),
        SoftVerbalizer(net, tok, {"no": "bad", "yes": "good"}),
    ):
        m = PromptModel(net, Template(Q, tok), v)
        m.fit(DATA, epochs=40, lr=2e-2, plot=False)
        assert m.evaluate(DATA).accuracy >= (.8 if isinstance(v, ProtoVerbalizer) else .5), v


@pytest.mark.parametrize("text", [Q, S], ids=["words", "soft"])
def test_what_is_written(text):
    net, tok = network(), tokenizer()
    m = PromptModel(net, Template(text, tok))
    lesson = [{"text_a": "a fun film", "tgt_text": "so very good"}, {"text_a": "dull", "tgt_text": "bad"}]
    # … <|startofpiece|> so very good <|endofpiece|>
    one = m.verbalizer.encode(m.template, lesson)
    assert (
        one["targets"][0].tolist()[-5:] == [*tok("so very good", add_special_tokens=False)["input_ids"], 6, -100]
        and (one["targets"][1] >= 0).sum() == 2
    )
    blank = one["input_ids"][0].tolist().index(3)
    assert one["position_ids"][0, :, -6:].tolist() == [[blank + 5, *[blank] * 5], [0, 1, 2, 3, 4, 5]]
    set_seed(0)
    m.fit(lesson, epochs=80, lr=1e-2, batch=2, tune="all", plot=False)
    assert (
        m.generate(lesson, max_new_tokens=8)
        == ["so very good", "bad"]
        == m.generate(lesson[:1], max_new_tokens=8) + m.generate(lesson[1:], max_new_tokens=8)
    )
    assert m.evaluate(lesson).exact == 1
    if text == S:
        with pytest.raises(ValueError, match="repetition_penalty="): m.generate(lesson, repetition_penalty=1.1)
    else: assert m.generate(lesson, max_new_tokens=8, repetition_penalty=1.01) == ["so very good", "bad"]
    endings = PromptModel(
        net, m.template, GenerationVerbalizer({"short": '{"meta":"x"}', "long": "so very good"}), soft=m.soft
    )
    assert endings.predict([{**e, "x": "bad"} for e in lesson]).label.tolist() == ["long", "short"]


def test_with_its_own_tokenizer(tmp_path):
    (tmp_path / "t.txt").write_text(
        "\n".join(
            ["这电影让我感觉浪费生命，它真的很糟。", "好看的电影，它真的很棒！", "浪费生命，糟。", "真的好看，棒。"] * 4
        ),
        encoding="utf-8",
    )
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "t.txt"),
        model_prefix=str(tmp_path / "cog-pretrain"),
        vocab_size=60,
        character_coverage=1.0,
        hard_vocab_limit=False,
        user_defined_symbols=["<n>"],
        minloglevel=2,
    )
    tok = BlankGlmTokenizer(str(tmp_path / "cog-pretrain.model"))
    n = tok.vocab_size
    net = network(n + 11, mask_token_ids=[n + 3, n + 8, n + 9], sop_token_id=n + 6, eos_token_id=n + 7, pad_token_id=n)
    t = Template('{"placeholder":"text_a"}，它真的很{"mask"}。', tok)
    assert t.family == "blank"
    enc = t.encode([{"text_a": "这电影让我感觉浪费生命"}, {"text_a": "好看<|startofpiece|>[MASK]"}])
    assert [row.count(i) for i in (n + 3, n + 6) for row in enc["input_ids"].tolist()] == [
        1
    ] * 4 and tok.convert_ids_to_tokens(enc["input_ids"][:, -1].tolist()) == ["<|startofpiece|>"] * 2
    # part by part as in one piece
    whole = blank_inputs(tok, "这电影让我感觉\n浪费生命，它真的很[MASK]")["input_ids"][0].tolist()
    assert (
        Template('{"placeholder":"text_a"}，它真的很{"mask"}', tok)
        .encode({"text_a": "这电影让我感觉\n浪费生命"})["input_ids"]
        .tolist()
        == whole
    )
    assert tok.convert_ids_to_tokens(
        Template('{"placeholder":"text_a"}{"mask"}', tok).encode({"text_a": "龘"})["input_ids"].tolist()
    )[1:3] == ["▁", "<unk>"]
    v = PromptModel(net, t, Verbalizer(tok, {"a": "糟", "b": "棒"}, prefix=""))
    assert (
        Written().encode(t, [{"text_a": "好", "tgt_text": "糟"}])["input_ids"][0, -2].item()
        == v.verbalizer.ids[0, 0, 0].item()
    )
    data = [{"text_a": "这电影让我感觉浪费生命", "label": "差评"}, {"text_a": "好看", "label": "好评"}]
    m = PromptModel(net, t, Verbalizer(tok, {"差评": "糟", "好评": "棒"}, prefix=""))
    before = m.evaluate(data).loss
    m.fit(data, epochs=20, lr=3e-3, tune="all", plot=False)
    assert m.evaluate(data).loss < before and m.evaluate(data).accuracy == 1
    writes = PromptModel(net, t)
    writes.fit(
        [e | {"tgt_text": x} for e, x in zip(data, ("浪费", "好看"))], epochs=60, lr=3e-3, tune="all", plot=False,
    )
    assert writes.generate(data, max_new_tokens=6) == ["浪费", "好看"]


def test_what_cannot_be_is_said():
    net, tok = network(), tokenizer()
    llama = tf.LlamaForCausalLM(
        tf.LlamaConfig(vocab_size=30, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    )
    with pytest.raises(ValueError, match="its own tokenizer"):
        PromptModel(net, Template('{"placeholder":"text_a"} {"mask"}', tok, family="causal"), words(tok))
    with pytest.raises(ValueError, match="its own tokenizer"):
        PromptModel(net, Template(Q, tok, family="masked"), words(tok))
    with pytest.raises(ValueError, match="does not write into blanks"): PromptModel(llama, Template(Q, tok), words(tok))
    with pytest.raises(ValueError, match="a blank-filling model: leave it out"):
        PromptModel(net, Template(Q, tok), words(tok), pack=True)
    with pytest.raises(ValueError, match="these make no batch"):
        one_batch([Template(Q, tok).encode(DATA), Template(Q, tok, family="masked").encode(DATA)])
    with pytest.raises(TypeError, match="GLM"): find_templates(net, tok, DATA, {"no": "bad", "yes": "good"})
    assert isinstance(SoftTokens(net, Template(S, tok)), SoftTokens)

"""Verbalizers: tokenizers with spaces of their own, words that nothing can tell apart, several classes at once,
and what a constant in the logits must not change."""
import json
import math

import pytest
import torch
import transformers as tf
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from bmlab.prompt.learned import ProtoVerbalizer, SoftVerbalizer
from bmlab.prompt.verbalize import (
    AutomaticVerbalizer, Chained, KnowledgeableVerbalizer, PtrVerbalizer, Verbalizer, WordsError, read_words
)

WORDS = "bad dull terrible fun good great".split()


def fast(t, **names): return tf.PreTrainedTokenizerFast(tokenizer_object=t, **names)


@pytest.fixture(scope="module")
def plain():
    "A word is a token, or pieces of one letter"
    t = Tokenizer(
        models.WordPiece(
            {
                w: i
                for i, w in enumerate(
                    ["[UNK]", *WORDS, *"abcdefghijklmnopqrstuvwxyz", *(f"##{c}" for c in "abcdefghijklmnopqrstuvwxyz")]
                )
            },
            unk_token="[UNK]",
        )
    )
    t.pre_tokenizer, t.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    return fast(t, unk_token="[UNK]")


@pytest.fixture(scope="module")
def byte():
    "Bytes, as of GPT-2, with a token for ' bad' and ' good'"
    merges = [("Ġ", "b"), ("Ġb", "a"), ("Ġba", "d"), ("Ġ", "g"), ("Ġg", "o"), ("Ġgo", "o"), ("Ġgoo", "d")]
    names = sorted(pre_tokenizers.ByteLevel.alphabet()) + ["".join(m) for m in merges]
    t = Tokenizer(models.BPE({c: i for i, c in enumerate(names)}, merges))
    t.pre_tokenizer, t.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return fast(t)


def sentencepiece(llama):
    pieces = [
        ("<unk>", 0.0),
        ("▁", -3.0),
        *(("▁" + w, -2.0) for w in WORDS[:5]),
        *((c, -4.0) for c in "abcdefghijklmnopqrstuvwxyz糟棒"),
        ("great", -3.0),
    ]
    t = Tokenizer(models.Unigram(pieces, unk_id=0))
    if llama:
        t.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        t.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    else: t.pre_tokenizer, t.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return fast(t, unk_token="<unk>")


def tokens(v, tok):
    return [
        [tok.convert_ids_to_tokens(i[on].tolist()) for i, on in zip(own, there) if on.any()]
        for own, there in zip(v.ids, v.there)
    ]


def said(tok, n=4, seed=0): return torch.randn(n, len(tok), generator=torch.Generator().manual_seed(seed))


def test_a_space_of_the_tokenizer_is_no_part_of_a_word():
    llama, t5 = sentencepiece(True), sentencepiece(False)
    v = Verbalizer(llama, {"n": "bad", "p": "good"})
    assert llama(" bad", add_special_tokens=False).tokens() == ["▁", "▁bad"] and tokens(v, llama) == [
        [["▁bad"]],
        [["▁good"]],
    ]
    assert (v(said(llama)).diff() != 0).all()
    assert tokens(Verbalizer(t5, ["bad", "good"]), t5) == [[["▁bad"]], [["▁good"]]]
    for tok in (llama, t5): assert tokens(Verbalizer(tok, ["糟", "棒"], prefix=""), tok) == [[["糟"]], [["棒"]]]
    # here the space stands in the text
    assert tokens(Verbalizer(t5, ["great", "good"]), t5) == [[["▁", "great"]], [["▁good"]]]
    assert PtrVerbalizer(llama, [["bad", "fun"], ["good", "fun"]]).ids.shape == (2, 2)


def test_words_that_begin_alike_are_refused_where_only_the_first_token_is_read(byte):
    words = {"差": ["糟"], "好": ["棒"]}
    v = Verbalizer(byte, words)
    x = said(byte)
    with pytest.raises(ValueError, match=r"'Ġ'.*prefix=\"\".*multi=\"mean\".*chain=True"): v(x)
    with pytest.raises(ValueError, match="begin with the same token"): v.calibrate(x)
    several = torch.stack([x] * v.ids.shape[2], 1) + torch.arange(v.ids.shape[2])[:, None] * said(byte, seed=1)[:1]
    chained = v(Chained(torch.tensor([[[-1.], [-3.]]])))
    assert chained[0, 0] - chained[0, 1] == pytest.approx(2., abs=1e-5)
    for scores in (v(several), Verbalizer(byte, words, multi="mean")(x), Verbalizer(byte, words, prefix="")(x)):
        assert (scores.diff().abs() > 1e-4).all()
    with pytest.raises(ValueError, match="begin with"):
        Verbalizer(byte, [["bad", "bat"], ["bad", "bac"], ["b"]], prefix="")(x)  # whichever of them is the one
    with pytest.raises(ValueError, match="begin with"):
        Verbalizer(sentencepiece(False), ["great", "x"])(said(sentencepiece(False)))


def test_soft_rows_differ_where_words_begin_alike(byte):
    torch.manual_seed(0)
    model = tf.LlamaForCausalLM(
        tf.LlamaConfig(
            vocab_size=len(byte), hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8
        )
    )
    s = SoftVerbalizer(model, byte, {"差": "糟", "好": ["棒", "<!>b"]})
    rows = lambda w: model.lm_head.weight[byte(w)["input_ids"]].mean(0)
    torch.testing.assert_close(s.layer.weight, torch.stack([rows(" 糟"), (rows(" 棒") + rows("b")) / 2]))


def test_unknown_parts_are_refused(plain):
    for tok, word in ((plain, "good ☃"), (sentencepiece(False), "雪"), (sentencepiece(True), "good雪")):
        for make in (
            lambda: Verbalizer(tok, [word, "bad"]), lambda: PtrVerbalizer(tok, [[word], ["bad"]]),
            lambda: KnowledgeableVerbalizer(tok, [[word], ["bad"]]),
        ):
            with pytest.raises(ValueError, match="unknown to the tokenizer"): make()


def test_classes_with_the_same_words_are_refused(plain):
    with pytest.raises(ValueError, match="nothing could tell"):
        Verbalizer(plain, {"a": ["good", "fun"], "b": ["bad"], "c": ["fun", "good"]})
    with pytest.raises(ValueError, match="nothing could tell"):
        PtrVerbalizer(plain, {"a": ["good", "fun"], "b": ["good", "fun"]})
    x = said(plain)
    # one word in two classes is no harm
    v = Verbalizer(plain, {"a": ["good", "fun"], "b": ["good", "bad"]})
    assert (v(x).diff() != 0).all() and PtrVerbalizer(plain, {"a": ["good", "fun"], "b": ["fun", "good"]})(
        torch.stack([x, x + x[:1]], 1)
    ).isfinite().all()


def test_prototypes_with_two_classes_keep_how_sure_they_are(plain):
    g = torch.Generator().manual_seed(0)
    y = torch.arange(16) % 2
    hidden = torch.randn(16, 8, generator=g) + 2 * torch.randn(2, 8, generator=g)[y]
    torch.manual_seed(0)
    p = ProtoVerbalizer(8, ["n", "p"], 4, Verbalizer(plain, {"n": "bad", "p": "good"})).fit(hidden, y, steps=20)
    x = said(plain, 16)
    both, words = p(x, hidden), p.by_words(x)
    assert both.abs().unique().numel() > 16 and both.diff().abs().std() > 1e-3
    p.by_words = None
    torch.testing.assert_close(both, (p(x, hidden).log_softmax(-1) + words.log_softmax(-1)) / 2)
    torch.testing.assert_close(p.loss(both, y), torch.nn.functional.cross_entropy(both, y))


@pytest.mark.parametrize("log_softmax", (True, False))
def test_several_classes_at_once_by_hand(plain, log_softmax):
    bad, good, fun = (plain.convert_tokens_to_ids(w) for w in ("bad", "good", "fun"))
    v = Verbalizer(plain, {"n": "bad", "p": ["good", "fun"]}, log_softmax=log_softmax, multi_label=True)
    x, h = said(plain).double(), said(plain, 3, seed=1).double()

    def logit(row, i):
        if not log_softmax: return row[i]
        rest = sum(math.exp(a) for j, a in enumerate(row) if j != i)
        return row[i] - math.log(rest)
    sigmoid = lambda a: 1 / (1 + math.exp(-a))
    usual = h.mean(0).tolist()
    for habit in (None, usual):
        v.calibrate(None if habit is None else h)
        off = {i: 0. if habit is None else logit(habit, i) for i in (bad, good, fun)}
        scores = [[logit(r, bad) - off[bad], sum(logit(r, i) - off[i] for i in (good, fun)) / 2] for r in x.tolist()]
        torch.testing.assert_close(v(x), torch.tensor(scores), atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(
            v.probabilities(x), torch.tensor([[sigmoid(a) for a in r] for r in scores]), atol=1e-5, rtol=1e-4
        )
        torch.testing.assert_close(
            v.word_probabilities(x)[:, 1],
            torch.tensor([[sigmoid(logit(r, i) - off[i]) for i in (good, fun)] for r in x.tolist()]),
            atol=1e-5,
            rtol=1e-4,
        )
        # there is no such word
        assert (v.word_probabilities(x)[:, 0, 1] == 0).all()
        targets = torch.tensor([[1., 0.], [1., 1.], [0., 0.], [0., 1.]])
        loss = (
            -sum(
                math.log(sigmoid(a) if t else 1 - sigmoid(a))
                for r, ts in zip(scores, targets.tolist())
                for a, t in zip(r, ts)
            )
            / 8
        )
        assert v.loss(v(x), targets).item() == pytest.approx(loss, abs=1e-4)
    torch.testing.assert_close(v.probabilities(h.mean(0, keepdim=True)), torch.full((1, 2), .5), atol=1e-5, rtol=0)
    with pytest.raises(ValueError, match="expected \\(4, 2\\)"): v.loss(v(x), torch.zeros(4, dtype=torch.long))


def test_several_classes_at_once_learn_and_mean_the_same_in_every_reading(plain):
    v = Verbalizer(plain, {"n": "bad", "p": ["good"]}, multi_label=True)
    x = said(plain, 4).requires_grad_()
    targets = torch.tensor([[1., 0.], [1., 1.], [0., 0.], [0., 1.]])
    opt = torch.optim.Adam([x], lr=.5)
    for _ in range(200):
        opt.zero_grad()
        v.loss(v(x), targets).backward()
        opt.step()
    p = v.probabilities(x)
    # two words share one mask: half each is the most
    assert ((p > .5) == targets.bool())[[0, 2, 3]].all() and p[1].sum().item() == pytest.approx(1, abs=.02)
    v.calibrate(said(plain, 2))
    # and more than usual for both
    assert ((v.probabilities(x) > .5) == targets.bool()).all()
    y = said(plain, 4)
    chained = Chained(
        torch.stack([y.log_softmax(-1)[:, plain.convert_tokens_to_ids(w)] for w in ("bad", "good")], 1)[..., None]
    )
    for z in (y - 50, torch.stack([y, y.flip(1)], 1), chained):
        torch.testing.assert_close(v.probabilities(z), v.probabilities(y), atol=1e-5, rtol=1e-4)


def test_one_class_has_a_cross_entropy(plain):
    x, y = said(plain), torch.tensor([0, 1, 1, 0])
    ptr = PtrVerbalizer(plain, [["bad", "dull"], ["good", "fun"]])
    found = AutomaticVerbalizer(plain, 2).fit(x, y)
    for v, z in (
        (Verbalizer(plain, ["bad", "good"]), x), (KnowledgeableVerbalizer(plain, [["bad", "dull"], ["good"]]), x),
        (ptr, torch.stack([x, x], 1)), (found, x),
    ):
        assert v.loss(v(z), y).item() == pytest.approx(-v.probabilities(z)[range(4), y].log().mean().item(), abs=1e-5)
        with pytest.raises(ValueError, match="multi_label=True"):
            v.loss(v(z), torch.nn.functional.one_hot(y, 2).float())


@pytest.mark.parametrize("masks", (None, 1, 2))
def test_a_constant_in_the_logits_does_not_change_which_words_are_left(plain, masks):
    v = KnowledgeableVerbalizer(plain, {"n": ["bad", "terrible", "dull", "ab"], "p": ["good", "great", "fun", "xy"]})
    x = torch.randn(5, *([masks] if masks else []), len(plain), generator=torch.Generator().manual_seed(1))
    used, habit = v.calibrate(x).used, v.habit
    assert sum(map(len, used.values())) < 8 and all(used.values())
    for off in (-100, 100):
        assert v.calibrate(x + off).used == used
        torch.testing.assert_close(v.habit, habit, atol=1e-5, rtol=1e-3)
    # " ab" is "a" at the first mask and "##b" at the second: it goes if either is rare there
    if masks == 2:
        mean = x.mean(0)
        rare = lambda j, t: bool(mean[j][plain.convert_tokens_to_ids(t)] < mean[j].sort().values[int(.5 * len(plain))])
        assert (" ab" in used["n"]) == (not rare(0, "a") and not rare(1, "##b"))
        assert [w for w in (" bad", " terrible", " dull") if not rare(0, w.strip())] == [
            w for w in used["n"] if w != " ab"
        ]


def test_a_word_without_a_space_stays_one(byte):
    assert KnowledgeableVerbalizer(byte, {"a": ["<!>good"], "b": ["<!>bad"]}, multi="mean").words == {
        "a": ["good"],
        "b": ["bad"],
    }
    # with the space and without are two words
    v = KnowledgeableVerbalizer(byte, {"a": ["<!>good", "bad"], "b": ["good", "<!> bad", "<!>bad"]}, multi="mean")
    assert v.words == {"a": ["good"], "b": [" good", "bad"]}


def test_words_that_are_found_go_on_past_taken_ones(plain):
    for words in (1, 3):
        v = AutomaticVerbalizer(plain, 2, words=words, candidates=words).fit(
            torch.arange(len(plain)).float().repeat(4, 1), torch.tensor([0, 1, 0, 1])
        )
        assert v.ids.shape == (2, words, 1) and len(set(v.ids.flatten().tolist())) == 2 * words
        assert v(said(plain)).isfinite().all() and v.probabilities(said(plain)).isfinite().all()
    usable = len(v._usable)
    assert AutomaticVerbalizer(plain, 2, words=usable // 2).fit(said(plain), torch.tensor([0, 1, 0, 1])).ids.shape == (
        2,
        usable // 2,
        1,
    )
    with pytest.raises(ValueError, match="has only"): AutomaticVerbalizer(plain, 2, words=usable)
    with pytest.raises(RuntimeError, match="fit"): AutomaticVerbalizer(plain, 2).word_probabilities(said(plain))


def test_words_found_need_no_text_of_their_own():
    # "▁bad" and "b", "a", "d": texts do not lead back to tokens
    tok = sentencepiece(True)
    v = AutomaticVerbalizer(tok, 2, words=2).fit(said(tok), torch.tensor([0, 1, 0, 1]))
    assert v(said(tok)).isfinite().all()


def test_a_word_for_every_mask_is_no_text(plain):
    for words in ({"n": "bad", "p": "fun"}, ["bad", "fun"]):
        with pytest.raises(TypeError, match=r"as \['bad'\]"): PtrVerbalizer(plain, words)
    with pytest.raises(ValueError, match="two or more"): PtrVerbalizer(plain, {"n": ["bad"]})


@pytest.mark.parametrize("value", (float("nan"), float("inf"), float("-inf")))
def test_what_is_no_number_is_refused(plain, value):
    x = said(plain)
    x[1:3, 5] = value
    for multi_label in (False, True):
        with pytest.raises(ValueError, match="logits: 2 of 4 rows"):
            Verbalizer(plain, ["bad", "good"], multi_label=multi_label).calibrate(x)
    with pytest.raises(ValueError, match="1 of 2 rows"):
        KnowledgeableVerbalizer(plain, [["bad", "dull"], ["good"]]).calibrate(torch.stack([x[:2], x[:2]], 1))
    with pytest.raises(ValueError, match="1 of 2 rows"):
        Verbalizer(plain, ["bad", "good"]).calibrate(Chained(torch.tensor([[[value], [0.]], [[0.], [0.]]])))
    with pytest.raises(ValueError, match="2 of 4 rows"):
        AutomaticVerbalizer(plain, 2).fit(x, torch.tensor([0, 1, 0, 1]))
    with pytest.raises(ValueError, match="hidden: 2 of 4 rows"):
        ProtoVerbalizer(len(plain), 2).fit(x, torch.tensor([0, 1, 0, 1]))


def test_words_of_several_classes_as_openprompt_drops_them(plain, tmp_path):
    """What `KnowledgeableVerbalizer.delete_common_words` of github.com/thunlp/OpenPrompt gives for these lists

    (openprompt/prompts/knowledgeable_verbalizer.py, run as it is; on its own files agnews, amazon, dbpedia, imdb and
    yahoo_answers_topics both keep the same words). The files write blanks behind their commas.
    """
    path = tmp_path / "topics.txt"
    path.write_text("society, culture,state, people\nscience,culture,society\nstate, law,law, people\n")
    k = KnowledgeableVerbalizer.from_file(plain, path, classes=["society", "science", "state"], prefix="", multi="mean")
    assert k.words == {"society": ["society"], "science": ["science"], "state": ["state", "law"]}
    assert sorted(k.left_out["in other classes"]) == ["culture", "culture", "people", "people", "society", "state"]
    assert "6 words left out" in repr(k)


def test_words_that_cannot_be_read_are_counted(plain):
    words = {"n": ["bad", "bat", "☃", "terribly long"], "p": ["good", "bow", "fun"]}
    with pytest.warns(UserWarning, match="1 unknown to the tokenizer, 1 too long, 2 begins as another class's"):
        k = KnowledgeableVerbalizer(plain, words, prefix="", max_token_split=5)
    assert k.words == {"n": ["bad"], "p": ["good", "fun"]}
    assert k.left_out["too long"] == ["terribly long"] and k.left_out["begins as another class's"] == ["bat", "bow"]
    k(torch.zeros(1, len(plain)))


def test_a_mask_reads_the_first_of_several_tokens(plain, tmp_path):
    "OpenPrompt's files for TACRED write \"'s\", which many tokenizers part"
    path = tmp_path / "ptr.jsonl"
    path.write_text('{"parent": ["fun", "ab", "good"], "sibling": ["fun", "cd", "good"]}')
    with pytest.warns(UserWarning, match=r"a mask takes one token: of .ab. \(2 tokens\), .cd. \(2 tokens\) it is"):
        ptr = PtrVerbalizer.from_file(plain, path, prefix="")
    names = plain.convert_ids_to_tokens(ptr.ids.flatten().tolist())
    assert names == ["fun", "a", "good", "fun", "c", "good"]
    with pytest.warns(UserWarning), pytest.raises(ValueError, match="nothing could tell these classes apart"):
        PtrVerbalizer(plain, {"a": ["ab"], "b": ["ac"]}, prefix="")


def test_words_of_json_files(tmp_path):
    "Sets are lists of classes, or objects; a class is a word, or words, or words of several masks"
    sets = [
        [["good"], ["bad"]], ["good", "bad"], {"no": "bad", "yes": ["good", "great"]}, [[["very", "good"]], ["bad"]],
    ]
    (tmp_path / "a.json").write_text(json.dumps(sets))
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, sets)))
    for i, own in enumerate(sets):
        for name in ("a.json", "a.jsonl"): assert read_words(tmp_path / name, i) == own
    for bad in ([[[1]]], [[["good", 2]]], [{"no": 3}], [[[["a", 1]]]], [5]):
        (tmp_path / "a.json").write_text(json.dumps(bad))
        with pytest.raises(WordsError): read_words(tmp_path / "a.json")

"Written answers, packing, soft tokens of many users anywhere, found templates, words of a thesaurus."
import itertools

import pytest
import torch
import transformers as tf
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from bmlab.delta.bank import DeltaBank
from bmlab.delta.lora import Lora
from bmlab.delta.prefix import Prefix
from bmlab.prompt.template import Template, one_batch
from bmlab.prompt.classify import PromptModel, answers
from bmlab.delta.soft import SoftPrompt
from bmlab.prompt.soft import SoftTokens, input_vectors
from bmlab.prompt.targets import GenerationVerbalizer, Written, said, write, written
from bmlab.prompt.search import find_templates, rank_templates
from bmlab.prompt.verbalize import Verbalizer
from bmlab.prompt.wordnet import WordNet, expand_words

WORDS = "a dull fun film it was . , bad good fine poor so not love hate person city one two three four five six".split()
Q, S = '{"placeholder":"text_a"} it was {"mask"}', '{"soft":2} {"placeholder":"text_a"} {"soft"} it was {"mask"}'
DATA = [
    {"text_a": x, "label": y}
    for x, y in [
        ("a fun film", "yes"),
        ("dull", "no"),
        ("love it so", "yes"),
        ("hate it", "no"),
        ("one two three four five six", "no"),
        ("fine film", "yes"),
    ]
]
EXAMPLES = [{"text_a": e["text_a"]} for e in DATA]


def tokenizer(kind="causal"):
    special = {
        "causal": ["[PAD]", "[UNK]", "</s>"],
        "masked": ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"],
        "seq2seq": ["<pad>", "<unk>", "</s>", "<extra_id_0>", "<extra_id_1>", "<extra_id_2>"],
    }[kind]
    t = Tokenizer(models.WordLevel({w: i for i, w in enumerate([*special, *WORDS])}, unk_token=special[1]))
    t.normalizer, t.pre_tokenizer = normalizers.Lowercase(), pre_tokenizers.BertPreTokenizer()
    if kind == "masked":
        t.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
        )
    if kind == "seq2seq":
        t.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 2)])
    names = dict(
        zip(
            (
                "pad_token",
                "unk_token",
                *(("cls_token", "sep_token", "mask_token") if kind == "masked" else ("eos_token",)),
            ),
            special,
        )
    )
    return tf.PreTrainedTokenizerFast(
        tokenizer_object=t, **names, **({"additional_special_tokens": special[3:]} if kind == "seq2seq" else {})
    )


def network(name="llama"):
    torch.manual_seed(0)
    V, size = (
        len(tokenizer(kind_of(name))),
        dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64),
    )
    make = {
        "llama": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(vocab_size=V, **size, eos_token_id=2)),
        "gpt2": lambda: tf.GPT2LMHeadModel(
            tf.GPT2Config(vocab_size=V, n_embd=32, n_layer=2, n_head=2, bos_token_id=2, eos_token_id=2)
        ),
        "qwen2": lambda: tf.Qwen2ForCausalLM(tf.Qwen2Config(vocab_size=V, **size, num_key_value_heads=1)),
        "bert": lambda: tf.BertForMaskedLM(tf.BertConfig(vocab_size=V, **size)),
        "roberta": lambda: tf.RobertaForMaskedLM(
            tf.RobertaConfig(vocab_size=V, **size, pad_token_id=0, max_position_embeddings=66)
        ),
        "albert": lambda: tf.AlbertForMaskedLM(tf.AlbertConfig(vocab_size=V, embedding_size=16, **size)),
        "opt": lambda: tf.OPTForCausalLM(
            tf.OPTConfig(
                vocab_size=V,
                hidden_size=32,
                num_hidden_layers=2,
                num_attention_heads=2,
                ffn_dim=64,
                word_embed_proj_dim=32,
            )
        ),
        "falcon": lambda: tf.FalconForCausalLM(
            tf.FalconConfig(vocab_size=V, hidden_size=32, num_hidden_layers=2, num_attention_heads=2)
        ),
        "lfm2": lambda: tf.Lfm2ForCausalLM(
            tf.Lfm2Config(vocab_size=V, **size, num_key_value_heads=1, layer_types=["conv", "full_attention"])
        ),
        "deberta": lambda: tf.DebertaV2ForMaskedLM(
            tf.DebertaV2Config(vocab_size=V, **size, relative_attention=True, pos_att_type=["c2p", "p2c"])
        ),
        "t5": lambda: tf.T5ForConditionalGeneration(
            tf.T5Config(
                vocab_size=V,
                d_model=32,
                d_kv=16,
                d_ff=64,
                num_layers=2,
                num_heads=2,
                decoder_start_token_id=0,
                pad_token_id=0,
                eos_token_id=2,
                dropout_rate=0.0,
            )
        ),
    }
    return make[name]().eval()


def kind_of(name):
    return "masked" if name in ("bert", "roberta", "albert", "deberta") else "seq2seq" if name == "t5" else "causal"
def verbalizer(tok): return Verbalizer(tok, {"no": "bad", "yes": "good"})


# packing

@pytest.mark.parametrize("text", [Q, S], ids=["words", "soft"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen2", "bert", "roberta", "albert"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_packed_batch_answers_as_a_padded_one(name, text, attention):
    model, tok = network(name), tokenizer(kind_of(name))
    model.set_attn_implementation(attention)
    t = Template(text, tok)
    padded = PromptModel(model, t, verbalizer(tok))
    packed = PromptModel(model, t, padded.verbalizer, soft=padded.soft, pack=True)
    a, b = (m.predict(EXAMPLES, batch=6)["p(yes)"].values for m in (padded, packed))
    assert abs(a - b).max() < 1e-5
    enc, first = t.encode(EXAMPLES), 2 if name == "roberta" else 0
    if name == "roberta": first = 1                                         # its padding's number is 0 here
    for length in (16, 30):
        p = enc.packed(length, first=first)
        rows = p["example_ids"]
        assert sorted(set(rows.flatten().tolist()) - {-1}) == list(range(6)) and rows.shape[1] <= length
        with torch.no_grad():
            logits, _ = answers(
                model,
                {k: v for k, v in p.items() if isinstance(v, torch.Tensor)}
                | {k: p[k] for k in ("mask_positions", "mask_rows")},
            )
        with torch.no_grad(): want, _ = answers(model, dict(enc) | {"mask_positions": enc["mask_positions"]})
        assert (logits - want).abs().max() < 1e-5


def test_training_packed_gives_the_gradient_of_training_padded():
    tok, grads = tokenizer(), []
    for pack in (False, True):
        model = network()
        m = PromptModel(model, Template(S, tok), verbalizer(tok), pack=pack)
        b = next(iter(m.batches(DATA, 6)))
        m.verbalizer.loss(m(b), b["label"]).backward()
        grads.append(m.soft.site.table.grad)
    assert (grads[0] - grads[1]).abs().max() < 1e-6 < grads[0].abs().max()


def test_what_cannot_be_packed_is_said(tmp_path):
    tok, model = tokenizer(), network()
    with pytest.raises(ValueError, match="an encoder–decoder"):
        PromptModel(network("t5"), Template(Q, tokenizer("seq2seq")), verbalizer(tokenizer("seq2seq")), pack=True)
    prefix = Prefix(model, length=2)
    with pytest.raises(ValueError, match="in front of each row"):
        PromptModel(model, Template(Q, tok), verbalizer(tok), prefix=prefix, pack=True)
    prefix.detach()
    front = SoftPrompt(model, 3)
    with pytest.raises(ValueError, match="in front of each row"):
        PromptModel(model, Template(Q, tok), verbalizer(tok), pack=True)
    front.detach()
    for name in ("opt", "falcon", "lfm2"):
        with pytest.raises(ValueError, match="lets one change the answer to another"):
            PromptModel(network(name), Template(Q, tok), verbalizer(tok), pack=True)
    with pytest.raises(ValueError, match="cannot be asked so"):
        PromptModel(network("deberta"), Template(Q, tokenizer("masked")), verbalizer(tokenizer("masked")), pack=True)
    m = PromptModel(model, Template(Q, tok), verbalizer(tok), pack=True)
    m.save(tmp_path)
    assert PromptModel.load(tmp_path, model, tok).pack and PromptModel.load(tmp_path, model, tok).predict(
        EXAMPLES
    ).equals(m.predict(EXAMPLES))


def test_vectors_in_front_take_positions_too():
    tok, long = tokenizer("masked"), [{"text_a": "fun " * 60}]
    model = tf.BertForMaskedLM(
        tf.BertConfig(
            vocab_size=len(tok),
            hidden_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=64,
            max_position_embeddings=32,
        )
    ).eval()
    with pytest.raises(ValueError, match="have room for 32"):
        PromptModel(model, Template(Q, tok), verbalizer(tok), max_length=33)
    front = SoftPrompt(model, 8)
    assert len(PromptModel(model, Template(Q, tok), verbalizer(tok)).predict(long)) == 1
    front.detach()
    tok = tokenizer()
    model = tf.GPT2LMHeadModel(
        tf.GPT2Config(
            vocab_size=len(tok), n_embd=32, n_layer=1, n_head=2, n_positions=32, bos_token_id=2, eos_token_id=2
        )
    ).eval()
    m = PromptModel(model, Template(Q, tok), verbalizer(tok), prefix=Prefix(model, length=8))
    assert m.max_length == 24 and len(m.predict(long)) == 1 and len(m.generate(long, max_new_tokens=8)) == 1
    with pytest.raises(ValueError, match="max_new_tokens=23: of the model's 32 positions that leaves 1"):
        m.generate(long, max_new_tokens=23)


# written answers

@pytest.mark.parametrize("name", ["llama", "gpt2", "t5"])
def test_written_answers_are_learned_and_written(name, tmp_path):
    tok, model = tokenizer(kind_of(name)), network(name)
    data = [{"text_a": "a fun film", "tgt_text": "good , so good"}, {"text_a": "dull", "tgt_text": "bad"}]
    m = PromptModel(model, Template(Q, tok))
    before = m.evaluate(data)
    m.fit(data, epochs=60, lr=1e-2, batch=2, tune="all", plot=False)
    after = m.evaluate(data)
    assert (
        after.exact == 1
        and after.loss < 0.1 < before.loss
        and m.predict(data).text.tolist() == ["good , so good", "bad"]
    )
    assert m.generate(data[0], max_new_tokens=2) == ["good ,"] and m.generate(data, max_new_tokens=6, num_beams=2) == [
        "good , so good",
        "bad",
    ]
    m.save(tmp_path)
    assert PromptModel.load(tmp_path, model, tok).evaluate(data).equals(after)


def test_several_masks_are_written_in_turn():
    tok, model = tokenizer("seq2seq"), network("t5")
    data = [{"text_a": "film", "tgt_text": ["good", "fun"]}, {"text_a": "city", "tgt_text": ["bad", "so dull"]}]
    m = PromptModel(model, Template('{"placeholder":"text_a"} it was {"mask"} , {"mask"} .', tok))
    m.fit(data, epochs=60, lr=1e-2, batch=2, tune="all", plot=False)
    assert m.generate(data, max_new_tokens=8) == [["good", "fun"], ["bad", "so dull"]]


@pytest.mark.parametrize("mean", [True, False])
@pytest.mark.parametrize("name", ["llama", "t5"])
def test_classes_that_are_texts(name, mean, tmp_path):
    tok, model = tokenizer(kind_of(name)), network(name)
    data = [
        {"text_a": "film", "meta": {"a": "good", "b": "one two three"}, "label": "left"},
        {"text_a": "city", "meta": {"a": "bad", "b": "so so"}, "label": "right"},
    ]
    m = PromptModel(
        model, Template(Q, tok), GenerationVerbalizer({"left": '{"meta":"a"}', "right": 'not {"meta":"b"}'}, mean=mean)
    )
    by_hand = []
    for e in data:
        own = [
            said(model, written(m.template, [e], [[t]]))[0].detach() for t in (e["meta"]["a"], "not " + e["meta"]["b"])
        ]
        by_hand.append(torch.stack([s[0] / s[1] if mean else s[0] for s in own]).softmax(0))
    assert (torch.tensor(m.predict(data)[["p(left)", "p(right)"]].values) - torch.stack(by_hand)).abs().max() < 1e-5
    m.fit(data, epochs=30, lr=1e-2, batch=2, tune="all", plot=False)
    assert m.evaluate(data).accuracy == 1
    m.save(tmp_path)
    assert PromptModel.load(tmp_path, model, tok).predict(data).equals(m.predict(data))


def test_a_label_is_not_needed_where_none_is_read_and_a_masked_model_writes_nothing():
    with pytest.raises(ValueError, match="writes no text"):
        PromptModel(network("bert"), Template(Q, tokenizer("masked")))
    with pytest.raises(ValueError, match="writes no text"):
        PromptModel(network("bert"), Template(Q, tokenizer("masked")), verbalizer(tokenizer("masked"))).generate(
            EXAMPLES
        )
    m = PromptModel(network(), Template(Q, tokenizer()))
    assert isinstance(m.verbalizer, Written) and m.verbalizer.labels == []
    with pytest.raises(ValueError, match="no 'tgt_text'"): m.fit(DATA, tune="all")
    with pytest.raises(TypeError, match="no habit"): m.calibrate()
    assert "that is" not in str(m.show("a film")) and "at the mask" in str(m.show("a film"))


def test_soft_tokens_are_vectors_to_generate():
    tok, model = tokenizer(), network()
    t = Template(S, tok)
    d = SoftTokens(model, t)
    texts = write(model, t, EXAMPLES, 5, repetition_penalty=1.3, no_repeat_ngram_size=2)
    one = [write(model, t, [e], 5, repetition_penalty=1.3, no_repeat_ngram_size=2)[0] for e in EXAMPLES]
    assert texts == one and input_vectors(model, t.encode(EXAMPLES)["input_ids"]).shape[-1] == 32
    d.detach()
    assert input_vectors(model, torch.tensor([[1]])) is None


# many users' soft tokens anywhere

@pytest.mark.parametrize("encoder", [None, "mlp", "lstm"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "t5"])
def test_every_row_has_its_own_users_soft_tokens(name, encoder, tmp_path):
    model, tok = network(name), tokenizer(kind_of(name))
    forms = [S, S, '{"soft":"so not"} {"placeholder":"text_a"} {"mask"}']
    alone, users = [], {}
    for i, text in enumerate(forms):
        torch.manual_seed(i)
        t = Template(text, tok)
        d = SoftTokens(model, t, init="random", encoder=encoder)
        with torch.no_grad(): alone.append(answers(model, one_batch([t.encode(EXAMPLES)]))[0])
        d.save(tmp_path / str(i))
        d.detach()
        users[f"user {i}"] = tmp_path / str(i)                               # all with the same first id
    bank = DeltaBank(model, users)
    plain = Template(Q, tok).encode(EXAMPLES)
    batch = one_batch([Template(f, tok).encode(EXAMPLES) for f in forms] + [plain])
    with bank.route([f"user {i}" for i in range(3) for _ in EXAMPLES] + [None] * 6), torch.no_grad():
        got = answers(model, batch)[0]
    with bank.off(), torch.no_grad(): bare = answers(model, one_batch([plain]))[0]
    for ours, want in zip(got.split(6), [*alone, bare]): assert (ours - want).abs().max() < 1e-5
    assert (alone[0] - alone[1]).abs().max() > 1e-4


def test_prompts_in_front_and_soft_tokens_anywhere_and_loras_in_one_batch():
    model, tok = network(), tokenizer()
    t, plain = Template(S, tok), Template(Q, tok)
    torch.manual_seed(1)
    want, deltas = [], {}
    for u, make in {
        "soft": lambda: SoftTokens(model, t, init="random"), "front": lambda: SoftPrompt(model, 3),
        "lora": lambda: Lora(model, r=2),
    }.items():
        d = make()
        for p in d.parameters(): p.data.add_(torch.randn_like(p) * .1)
        with torch.no_grad():
            want.append(answers(model, one_batch([(t if u == "soft" else plain).encode(EXAMPLES)]))[0])
        deltas[u] = d.detach()
    bank = DeltaBank(model, deltas)
    with bank.route([u for u in deltas for _ in EXAMPLES]), torch.no_grad():
        got = answers(model, one_batch([t.encode(EXAMPLES), plain.encode(EXAMPLES), plain.encode(EXAMPLES)]))[0]
    for ours, one in zip(got.split(6), want): assert (ours - one).abs().max() < 1e-5


def test_users_train_together_as_each_alone():
    tok, model = tokenizer(), network()
    t = Template(S, tok)
    labels = torch.tensor([e["label"] == "yes" for e in DATA]).long()
    loss = lambda logits: torch.nn.functional.cross_entropy(
        logits[:, 0, [tok.convert_tokens_to_ids(w) for w in ("bad", "good")]], labels[: len(logits)]
    )
    alone = []
    for i in range(2):
        torch.manual_seed(i)
        d = SoftTokens(model, t, init="random")
        loss(answers(model, one_batch([t.encode(EXAMPLES)]))[0]).backward()
        alone.append((d.detach(), d.site.table.grad.clone()))
        d.site.table.grad = None
    bank = DeltaBank(model, {str(i): d for i, (d, _) in enumerate(alone)})
    with bank.route(["0"] * 6 + ["1"] * 6):
        both = answers(model, one_batch([t.encode(EXAMPLES)] * 2))[0]
        (loss(both[:6]) + loss(both[6:])).backward()
    for d, g in alone: assert (d.site.table.grad - g).abs().max() < 1e-6 < g.abs().max()


def test_beams_go_with_their_row_and_labels_leave_soft_tokens_out():
    tok, model = tokenizer(), network()
    t = Template(S, tok)
    said_ = []
    users = {}
    for i in range(2):
        torch.manual_seed(i)
        d = SoftTokens(model, t, init="random")
        said_.append(write(model, t, EXAMPLES[:2], 5, num_beams=3))
        users[str(i)] = d.detach()
    bank = DeltaBank(model, users)
    b = one_batch([t.encode(EXAMPLES[:2])] * 2)
    with bank.route(["0", "0", "1", "1"]):
        out = model.generate(
            input_ids=b["input_ids"],
            attention_mask=b["attention_mask"],
            max_new_tokens=5,
            num_beams=3,
            do_sample=False,
            pad_token_id=0,
        )
        assert model(
            input_ids=b["input_ids"], attention_mask=b["attention_mask"], labels=b["input_ids"]
        ).loss.isfinite()
    got = [tok.decode(r, skip_special_tokens=True).strip() for r in out[:, b["input_ids"].shape[1]:]]
    assert got == [x for own in said_ for x, in own]


# found templates

def test_a_causal_models_templates_have_the_score_of_their_words_and_labels():
    tok, model = tokenizer(), network()
    words = {"no": "bad", "yes": "good"}
    found = find_templates(model, tok, DATA[:4], words, beams=3, most=3, keep=50)
    assert len(found) > 5 and found.score.is_monotonic_decreasing and found.template.is_unique
    for text, score in itertools.islice(zip(found.template, found.score), 5):
        own = []
        for e in DATA[:4]:
            before = tok(e["text_a"])["input_ids"]
            ids = tok(text.replace('{"placeholder":"text_a"}', e["text_a"]).replace('{"mask"}', words[e["label"]]))[
                "input_ids"
            ]
            with torch.no_grad(): p = model(torch.tensor([ids])).logits[0].log_softmax(-1)
            own.append(sum(p[i - 1, ids[i]].item() for i in range(len(before), len(ids))))
        assert abs(sum(own) / 4 - score) < 1e-4
    ranked = rank_templates(
        found[:3], lambda x: PromptModel(model, Template(x, tok), verbalizer(tok)).calibrate(), DATA
    )
    assert set(ranked.template) == set(found.template[:3]) and ranked.accuracy.is_monotonic_decreasing


def test_wide_beams_find_the_best_of_all_short_templates():
    tok, model = tokenizer(), network()
    found = find_templates(model, tok, DATA[:3], {"no": "bad", "yes": "good"}, beams=len(WORDS) + 9, most=1, keep=1)
    best = []
    for w in WORDS:
        ids = [
            [
                *tok(e["text_a"])["input_ids"],
                *tok(w)["input_ids"],
                *tok({"no": "bad", "yes": "good"}[e["label"]])["input_ids"],
            ]
            for e in DATA[:3]
        ]
        with torch.no_grad(): p = [model(torch.tensor([i])).logits[0].log_softmax(-1) for i in ids]
        best.append(sum(q[-3, i[-2]].item() + q[-2, i[-1]].item() for q, i in zip(p, ids)) / 3)
    assert abs(max(best) - found.score[0]) < 1e-4


def test_where_no_template_ends_in_time_that_is_said():
    with pytest.raises(ValueError, match="raise most, or beams=2"):
        find_templates(network("t5"), tokenizer("seq2seq"), DATA[:2], {"no": "bad", "yes": "good"}, beams=2, most=2)


# a thesaurus

def test_a_small_thesaurus_of_its_own(tmp_path):
    at = {}
    def data(name, sets):
        out, places = "  1 a licence\n", []
        for s in sets:
            places.append(len(out.encode()))
            out += s.format(*range(9)) + "\n"
        (tmp_path / f"data.{name}").write_text(out, encoding="utf-8")
        at[name] = places
    data(
        "adj",
        [
            "00000000 00 a 02 dull 0 dreary(p) 0 001 & 00000015 a 0000 | not interesting; \"a dull, 1|2 play\"",
            "00000001 00 s 01 très_gris 0 000 | grey",
        ],
    )
    first, second = at["adj"]
    text = (tmp_path / "data.adj").read_text(encoding="utf-8").replace("00000015", f"{second:08d}")
    (tmp_path / "data.adj").write_text(text, encoding="utf-8")
    (tmp_path / "index.adj").write_text(
        f"  1 a licence\ndull a 1 1 & 1 1 {first:08d}  \ndreary a 1 1 & 1 0 {first:08d}  \ntrès_gris a 1 0 1 0 "
        f"{second:08d}  \n",
        encoding="utf-8",
    )
    for name in ("noun", "verb", "adv"):
        data(name, [])
        (tmp_path / f"index.{name}").write_text("", encoding="utf-8")
    wn = WordNet(tmp_path)
    assert (
        wn.related("dull") == ["dreary", "très gris"]
        and wn.related("Dull", "synonym") == ["dreary"]
        and "très gris" in wn
        and len(wn) == 2
    )
    assert expand_words({"no": "dull", "yes": "good"}, wn) == {"no": ["dull", "dreary"], "yes": ["good"]}
    (tmp_path / "index.adv").unlink()
    with pytest.raises(FileNotFoundError, match="index.adv"): WordNet(tmp_path)


def test_words_of_two_classes_are_nobodys_and_given_ones_stay():
    more = expand_words(
        {"no": ["bad"], "yes": ["good"]}, {"bad": ["poor", "so", "good"], "good": ["fine", "So", "bad"]}
    )
    assert more == {"no": ["bad", "poor"], "yes": ["good", "fine"]}
    tok = tokenizer()
    assert expand_words(
        {"no": ["bad"], "yes": ["good"]}, {"bad": ["poor", "poor film"], "good": ["fine"]}, tok=tok, most=2
    ) == {"no": ["bad", "poor"], "yes": ["good", "fine"]}
    assert expand_words({"no": "bad", "yes": "<!>good"}, {"bad": ["poor"], "good": ["fine"]}) == {
        "no": ["bad", "poor"],
        "yes": ["<!>good", "<!>fine"],
    }


def test_a_prompt_model_answers_for_a_user_of_a_bank():
    tok, model = tokenizer(), network()
    t = Template(S, tok)
    alone = PromptModel(model, t, verbalizer(tok))
    want, wrote = alone.predict(EXAMPLES), alone.generate(EXAMPLES, max_new_tokens=4)
    bank = DeltaBank(model, {"ada": alone.soft.detach()})
    m = PromptModel(model, t, verbalizer(tok), soft=bank["ada"])
    with bank.route("ada"):
        assert abs(m.predict(EXAMPLES)["p(yes)"].values - want["p(yes)"].values).max() < 1e-6
        assert m.generate(EXAMPLES, max_new_tokens=4) == wrote
        m.fit(DATA, epochs=3, lr=5e-2, plot=False)
        assert abs(m.predict(EXAMPLES)["p(yes)"].values - want["p(yes)"].values).max() > 1e-4

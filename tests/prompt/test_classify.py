"""The prompt model on tiny models: labels of any kind, tables with gaps, what is trained and what stays, several
on one model, files."""
import json
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
import transformers as tf
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from bmlab.core import set_seed
from bmlab.delta.delta import Delta, deltas
from bmlab.prompt.learned import ProtoVerbalizer, SoftVerbalizer
from bmlab.delta.lora import Lora
from bmlab.delta.prefix import Prefix
from bmlab.prompt.template import Template
from bmlab.prompt.openprompt import PrefixTuningTemplate
from bmlab.prompt.classify import FewShotSampler, PromptData, PromptModel, class_number, examples_of
from bmlab.prompt.scores import classification_score, generation_score
from bmlab.prompt.soft import SoftTokens
from bmlab.prompt.targets import GenerationVerbalizer
from bmlab.prompt.verbalize import AutomaticVerbalizer, KnowledgeableVerbalizer, PtrVerbalizer, Verbalizer

WORDS = "a dull fun film it was . bad good fine poor so not love hate person city".split()
Q = '{"placeholder":"text_a"} it was {"mask"}'
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


def tokenizer(kind="causal"):
    special = {
        "causal": ["[PAD]", "[UNK]"],
        "masked": ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"],
        "seq2seq": ["<pad>", "<unk>", "</s>", "<extra_id_0>", "<extra_id_1>"],
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
                *(
                    ("cls_token", "sep_token", "mask_token")
                    if kind == "masked"
                    else ("eos_token",)
                    if kind == "seq2seq"
                    else ()
                ),
            ),
            special,
        )
    )
    return tf.PreTrainedTokenizerFast(
        tokenizer_object=t, **names, **({"additional_special_tokens": special[3:]} if kind == "seq2seq" else {})
    )


def network(kind="causal", **kw):
    torch.manual_seed(0)
    V = len(tokenizer(kind))
    if kind == "masked":
        return tf.BertForMaskedLM(
            tf.BertConfig(
                vocab_size=V, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, **kw
            )
        ).eval()
    if kind == "seq2seq":
        return tf.T5ForConditionalGeneration(
            tf.T5Config(
                vocab_size=V, d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2, decoder_start_token_id=0, **kw
            )
        ).eval()
    return tf.LlamaForCausalLM(
        tf.LlamaConfig(
            vocab_size=V, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, **kw
        )
    ).eval()


def words(tok, **kw): return Verbalizer(tok, {"no": "bad", "yes": "good"}, **kw)


@pytest.mark.parametrize("text", [Q, S], ids=["words", "soft"])
@pytest.mark.parametrize("kind", ["causal", "masked", "seq2seq"])
def test_a_batch_is_its_examples(kind, text):
    tok = tokenizer(kind)
    m = PromptModel(network(kind), Template(text, tok), words(tok))
    alone = pd.concat([m.predict(e) for e in DATA], ignore_index=True)
    assert np.abs(m.predict(DATA, batch=6)[["p(no)", "p(yes)"]].values - alone[["p(no)", "p(yes)"]].values).max() < 1e-5


def test_labels_of_any_kind():
    assert [class_number(x, ["no", "yes"]) for x in ("yes", 1, np.int64(0), torch.tensor(1))] == [1, 1, 0, 1]
    assert [class_number(x, [3, 7]) for x in (3, np.int64(7))] == [0, 1] and class_number(
        True, [False, True]
    ) == class_number(np.True_, [np.False_, np.True_]) == 1
    assert (
        class_number(1, [np.int64(1), np.int64(0)])
        == class_number(1.0, [1.0, 0.0])
        == class_number("yes", [np.str_("yes"), "no"])
        == 0
    )
    with pytest.raises(ValueError, match="none of the classes: 3, 7$"): class_number(1, [3, 7])
    assert len(FewShotSampler(1)([{"text_a": "a", "label": torch.tensor(i % 2)} for i in range(6)])) == 2
    for bad in (True, 2, -1, 0.5, "maybe", None):
        with pytest.raises(ValueError, match="none of the classes"): class_number(bad, ["no", "yes"])
    frame = pd.DataFrame({"text_a": ["fun", None, "dull"], "label": [1, 0, None]})
    assert [e["label"] for e in examples_of(frame)] == [1.0, 0.0, None] and examples_of(frame)[1]["text_a"] is None
    tok = tokenizer()
    m = PromptModel(network(), Template(Q, tok), words(tok))
    assert len(m.predict(frame.iloc[[0, 2]])) == 2 and m.evaluate(frame.iloc[:1]).examples == 1
    with pytest.raises(ValueError, match="no label"): m.evaluate(frame.iloc[[0, 2]])
    with pytest.raises(ValueError, match="is None"): m.predict(frame)
    with pytest.raises(ValueError, match="labels=, their names"): list(PromptData(DATA, m.template))
    assert m.predict(SimpleNamespace(text_a="a fun film")).equals(m.predict("a fun film")) and "that is" in m.show(
        SimpleNamespace(text_a="a fun film")
    )
    with pytest.raises(ValueError, match="have no label"): FewShotSampler(1)(frame)


def test_two_on_one_model_do_not_meet():
    net, tok = network(), tokenizer()
    first = PromptModel(net, Template(S, tok), words(tok))
    first.fit(DATA, epochs=2, lr=.05, plot=False)
    said = first.predict(DATA)
    second = PromptModel(net, Template(S, tok), words(tok))
    assert first.predict(DATA).equals(said) and not second.predict(DATA).equals(said)
    before = second.soft.site.table.detach().clone()
    table = first.soft.site.table.detach().clone()
    second.soft.site.table.requires_grad_(False)
    first.fit(DATA, epochs=1, lr=.05, plot=False)
    assert torch.equal(second.soft.site.table, before) and not torch.equal(first.soft.site.table, table)
    assert PromptModel(net, first.template, words(tok)).soft is first.soft
    with pytest.raises(ValueError, match="has 3 soft tokens, the table 2"):
        PromptModel(net, Template('{"soft":3} ' + Q, tok), words(tok), soft=first.soft)


def test_what_is_trained_and_what_stays(tmp_path):
    net, tok = network(), tokenizer()
    lora = Lora(net)
    m = PromptModel(net, Template(S, tok), words(tok))
    backbone = {n: p.detach().clone() for n, p in net.named_parameters() if "_deltas" not in n}
    grads = {n: p.requires_grad for n, p in net.named_parameters()}
    moved = {n: p.detach().clone() for n, p in net.named_parameters() if "_deltas" in n}
    m.fit(DATA, epochs=3, lr=.01, plot=False)
    now = dict(net.named_parameters())
    assert all(torch.equal(p, now[n]) for n, p in backbone.items()) and all(
        p.requires_grad == grads[n] for n, p in now.items()
    )
    assert any(not torch.equal(p, now[n]) for n, p in moved.items() if "lora" in n) and not torch.equal(
        moved["_deltas.soft_tokens.table"], now["_deltas.soft_tokens.table"]
    )
    m.soft.freeze()
    m.fit(DATA, epochs=1, lr=.01, tune="all", plot=False)
    assert any(not torch.equal(p, now[n]) for n, p in backbone.items())
    with pytest.raises(ValueError): m.fit([*DATA[:1], {"text_a": "x", "label": "maybe"}], plot=False)
    # as freeze() left it
    assert not any(p.requires_grad for n, p in net.named_parameters() if "_deltas" not in n)
    lora.detach()


@pytest.mark.parametrize("make", [
    lambda tok, net: words(tok), lambda tok, net: words(tok, log_softmax=False),
    lambda tok, net: KnowledgeableVerbalizer(tok, {"no": ["bad", "poor"], "yes": ["good", "fine"]}),
    lambda tok, net: AutomaticVerbalizer(tok, ["no", "yes"], 2),
    lambda tok, net: SoftVerbalizer(net, tok, {"no": "bad", "yes": "good"}),
    lambda tok, net: ProtoVerbalizer(32, ["no", "yes"], words=words(tok)),
], ids="words raw many found rows centres".split())
def test_files_of_every_verbalizer(make, tmp_path):
    net, tok = network(), tokenizer()
    set_seed(0)
    m = PromptModel(net, Template(S, tok), make(tok, net))
    m.fit(DATA, epochs=2, plot=False)
    if hasattr(m.verbalizer, "calibrate"): m.calibrate(DATA)
    said = m.predict(DATA)
    m.save(tmp_path)
    m.soft.detach()
    again = PromptModel.load(tmp_path, net, tok)
    assert again.predict(DATA).equals(said)
    about = json.loads((tmp_path / "prompt.json").read_text())
    (tmp_path / "prompt.json").write_text(json.dumps(about | {"verbalizer": about["verbalizer"] | {"class": "Evil"}}))
    again.soft.detach()
    with pytest.raises(OSError, match="another version"): PromptModel.load(tmp_path, net, tok)


def test_a_prefix_is_part_of_it(tmp_path):
    net, tok = network(), tokenizer()
    set_seed(0)
    m = PromptModel(net, PrefixTuningTemplate(None, tok, Q, num_token=3), words(tok))
    m.fit(DATA, epochs=2, lr=.05, plot=False)
    said = m.predict(DATA)
    m.save(tmp_path)
    m.prefix.detach()
    again = PromptModel.load(tmp_path, net, tok)
    assert (
        again.prefix is not m.prefix
        and np.abs(
            again.predict(DATA)[["p(no)", "p(yes)"]].values.astype(float)
            - said[["p(no)", "p(yes)"]].values.astype(float)
        ).max()
        < 1e-6
    )


@pytest.mark.parametrize("how", ["plain", "checkpointing", "soft"])
def test_chained_words(how):
    net, tok = network(), tokenizer()
    v = Verbalizer(tok, {"no": ["bad film"], "yes": ["good", "so good it"]})
    m = PromptModel(net, Template(S if how == "soft" else Q, tok), v, chain=True)
    if how == "checkpointing":
        net.gradient_checkpointing_enable({"use_reentrant": False})
        net.train()
    b = next(iter(m.batches(DATA, 6)))
    got = m.answer(b)[0].words
    net.eval()
    net.gradient_checkpointing_disable()
    for i, e in enumerate(DATA):
        ids = m.template.encode(e)["input_ids"].tolist()
        for c, own in enumerate((["bad film"], ["good", "so good it"])):
            for w, word in enumerate(own):
                more = tok(word, add_special_tokens=False)["input_ids"]
                with torch.no_grad(): p = net(input_ids=torch.tensor([ids + more])).logits[0].log_softmax(-1)
                assert abs(got[i, c, w].item() - sum(p[len(ids) - 1 + k, t].item() for k, t in enumerate(more))) < 1e-4
    with pytest.raises(ValueError, match="chain=True"):
        PromptModel(net, m.template, AutomaticVerbalizer(tok, 2), chain=True)


def test_answers_that_are_no_numbers():
    net, tok = network(), tokenizer()
    m = PromptModel(net, Template(Q, tok), words(tok))
    with torch.no_grad(): net.model.norm.weight.fill_(float("nan"))
    with pytest.raises(ValueError, match="example 0 is not finite"): m.predict(DATA)
    with pytest.raises(ValueError, match="not finite"): m.calibrate(DATA)


def test_parts_that_do_not_go_together():
    tok, t5 = tokenizer(), tokenizer("seq2seq")
    with pytest.raises(ValueError, match="family="): PromptModel(network(), Template(Q, t5), words(t5))
    with pytest.raises(ValueError, match="family="): PromptModel(network("seq2seq"), Template(Q, tok), words(tok))
    with pytest.raises(TypeError, match="head"): PromptModel(network().model, Template(Q, tok), words(tok))
    with pytest.raises(ValueError, match="give data="):
        PromptModel(network(), Template("it was" + '{"mask"}', tok), words(tok)).calibrate()


def test_model_and_other_deltas_are_not_in_its_folder(tmp_path):
    "Template, verbalizer and soft tokens alone; a file of yours stays"
    net, tok = network(), tokenizer()
    Lora(net)
    m = PromptModel(net, Template(S, tok), words(tok))
    (tmp_path / "mine.txt").write_text("mine")
    for _ in range(2): m.save(tmp_path)
    files = {p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*") if p.is_file()}
    soft = {"soft/adapter_config.json", "soft/adapter_model.safetensors"}
    assert soft <= files and files - {"soft/card.json"} == soft | {"prompt.json", "verbalizer.safetensors", "mine.txt"}
    assert list(deltas(PromptModel.load(tmp_path, network(), tok).model)) == ["soft_tokens"]


def test_several_labels_at_once():
    net, tok = network(), tokenizer()
    set_seed(0)
    m = PromptModel(
        net,
        Template(S, tok),
        Verbalizer(tok, {"dull": "bad", "short": "so", "dear": "love"}, multi_label=True, log_softmax=False),
    )
    data = [
        {"text_a": "dull", "label": ["dull", "short"]},
        {"text_a": "love it", "label": ["dear"]},
        {"text_a": "so so", "label": []},
    ]
    log = m.fit(data, epochs=120, lr=.01, batch=3, tune="all", plot=False)
    assert log.loss.iloc[-1] < .5 * log.loss.iloc[0]
    assert m.evaluate(data).accuracy == 1 and m.predict(data).label.tolist() == [["dull", "short"], ["dear"], []]
    assert m.batches([{"text_a": "so", "label": 1}]).target({"label": np.int64(1)}) == [0, 1, 0]
    with pytest.raises(ValueError, match="names a class twice"): m.evaluate([{"text_a": "so", "label": [0, 0, 1]}])


FILMS = [
    {"text_a": text, "label": label}
    for text, label in [
        ("dull", ["no", "long"]),
        ("love it", ["yes"]),
        ("so so", []),
        ("a dull fun film", ["yes", "long"]),
        ("fine film", ["yes"]),
        ("hate it so", ["no"]),
    ]
]
SEVERAL = {
    "words": lambda net, tok: Verbalizer(tok, {"no": "bad", "yes": "good", "long": "poor"}, multi_label=True),
    "knowledgeable": lambda net, tok: KnowledgeableVerbalizer(
        tok, {"no": ["bad", "hate"], "yes": ["good", "fine"], "long": ["poor", "not"]}, multi_label=True
    ),
    "ptr": lambda net, tok: PtrVerbalizer(
        tok, {"no": ["bad", "film"], "yes": ["good", "film"], "long": ["poor", "city"]}, multi_label=True
    ),
    "automatic": lambda net, tok: AutomaticVerbalizer(tok, ["no", "yes", "long"], words=2, multi_label=True),
    "soft": lambda net, tok: SoftVerbalizer(net, tok, {"no": "bad", "yes": "good", "long": "poor"}, multi_label=True),
    "proto": lambda net, tok: ProtoVerbalizer(32, ["no", "yes", "long"], 8, multi_label=True),
}


@pytest.mark.parametrize("kind", SEVERAL)
def test_several_labels_by_every_verbalizer(kind, tmp_path):
    tok = tokenizer("masked")
    net = network("masked")
    set_seed(0)
    m = PromptModel(
        net,
        Template('{"placeholder":"text_a"} {"mask"} so {"mask"}' if kind == "ptr" else Q, tok),
        SEVERAL[kind](net, tok),
    )
    found = kind in ("automatic", "proto")
    if found: m.fit(FILMS)
    before = m.evaluate(FILMS)
    # one half: as much as ever
    if hasattr(m.verbalizer, "calibrate") and not found: assert m.calibrate(FILMS).evaluate(FILMS).loss < before.loss
    # what was found is used at once
    if found: assert before.accuracy >= .5 and before.macro_f1 > .6
    m.fit(FILMS, epochs=60, lr=1e-2, batch=6, tune="all", plot=False)
    after, said = m.evaluate(FILMS), m.predict(FILMS)
    assert after.loss < .5 * before.loss and after.accuracy >= .8 and after.macro_f1 > .8
    assert said.label.tolist()[0] == ["no", "long"] and "that is" in m.show("dull")
    m.save(tmp_path)
    again = PromptModel.load(tmp_path, net, tok)
    assert again.several and again.predict(FILMS).equals(said)


def test_several_labels_are_asked_for():
    net, tok = network(), tokenizer()
    with pytest.raises(ValueError, match="several at once are for"):
        PromptModel(net, Template(Q, tok), words(tok)).evaluate(FILMS)
    with pytest.raises(TypeError, match="has one label"): FewShotSampler(1)(FILMS)
    with pytest.raises(ValueError, match="one is written"):
        GenerationVerbalizer({"no": "bad", "yes": "good"}, multi_label=True)
    with pytest.raises(ValueError, match="every example is of 'yes'"):
        PromptModel(net, Template(Q, tok), AutomaticVerbalizer(tok, ["no", "yes"], multi_label=True)).fit(
            [{"text_a": "fun", "label": ["yes"]}, {"text_a": "so", "label": ["yes", "no"]}]
        )


def test_relations_over_two_masks():
    tok = tokenizer("masked")
    m = PromptModel(
        network("masked"),
        Template('{"placeholder":"text_a"} {"mask"} so {"mask"}', tok),
        PtrVerbalizer(tok, {"lives": ["person", "city"], "is": ["person", "person"]}),
    )
    p = m.predict([{"text_a": "fun"}, {"text_a": "a dull film"}])
    assert np.allclose(p["p(lives)"] + p["p(is)"], 1) and set(p.label) <= {"lives", "is"}


def test_soft_tokens_of_a_file_on_a_model_in_use(tmp_path):
    net, tok = network(), tokenizer()
    d = SoftTokens(net, Template(S, tok))
    d.save(tmp_path)
    with pytest.raises(ValueError, match="detach those first"): Delta.load(tmp_path, net)
    assert list(deltas(net)) == ["soft_tokens"] and isinstance(Prefix, type)


CPM1, T5 = (
    dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2),
    dict(d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2),
)
ANT = dict(
    hidden_size=32,
    num_attention_heads=2,
    dim_head=16,
    dim_ff=64,
    num_hidden_layers=2,
    prompt_length=4,
    position_bias_num_buckets=16,
    position_bias_max_distance=64,
)


@pytest.mark.parametrize("name", ["cpm-1", "cpm-2", "cpm-ant"])
def test_openbmbs_models_with_their_tokenizers_of_python(name, tmp_path):
    from bmlab.models.cpm import CpmAntTied
    from bmlab.models.cpm2 import Cpm1Config, Cpm1ForCausalLM, Cpm2Config, Cpm2ForConditionalGeneration, Cpm2Tokenizer
    own = [
        "<unk>",
        "<s>",
        "</s>",
        "<sep>",
        "<pad>",
        "<mask>",
        "<go>",
        "<eod>",
        *"这电影让我感觉浪费生命它真的很棒糟好看，,",
        *(["<s_0>", "<s_1>"] if name == "cpm-2" else []),
    ]
    (tmp_path / "vocab.txt").write_text("\n".join(own) + "\n", encoding="utf-8")
    tok = Cpm2Tokenizer(str(tmp_path / "vocab.txt"), cut="none")
    torch.manual_seed(0)
    net = {
        "cpm-1": lambda: Cpm1ForCausalLM(Cpm1Config(vocab_size=len(tok), **CPM1)),
        "cpm-2": lambda: Cpm2ForConditionalGeneration(Cpm2Config(vocab_size=len(tok), **T5)),
        "cpm-ant": lambda: CpmAntTied(tf.CpmAntConfig(vocab_size=len(tok), **ANT)),
    }[name]().eval()
    data = [{"text_a": "这电影让我感觉浪费生命", "label": "差评"}, {"text_a": "好看</s><s_0>", "label": "好评"}]
    t = Template('{"soft":2}{"placeholder":"text_a"}，{"soft":"它"}真的很{"mask"}', tok)
    m = PromptModel(net, t, Verbalizer(tok, {"差评": "糟", "好评": "棒"}, prefix=""), max_length=40)
    enc = t.encode(data)
    assert t.family == ("seq2seq" if name == "cpm-2" else "causal") and [
        w for w in enc.words(0) if w.startswith("<S")
    ] == ["<S1>", "<S2>", "<S3>"]
    signs = [tok.convert_tokens_to_ids(w) for w in ("</s>", "<s_0>") if w in own]
    # an example's own text is no sign
    assert [sum(row.count(i) for i in signs) for row in enc["input_ids"].tolist()] == [name == "cpm-2"] * 2
    if name == "cpm-2": assert tok.convert_ids_to_tokens(enc["decoder_input_ids"][0].tolist()) == ["<s>", "<s_0>"]
    before, weights = m.evaluate(data).loss, [p.clone() for n, p in net.named_parameters() if "_deltas" not in n]
    m.fit(data, epochs=6, lr=2e-2, plot=False)
    said = m.predict(data, batch=2)
    assert m.evaluate(data).loss < before and all(
        map(torch.equal, weights, [p for n, p in net.named_parameters() if "_deltas" not in n])
    )
    torch.testing.assert_close(
        said["p(好评)"].values, pd.concat([m.predict(e) for e in data])["p(好评)"].values, atol=1e-5, rtol=0
    )
    m.save(tmp_path / "saved")
    m.soft.detach()
    again = PromptModel.load(tmp_path / "saved", net, tok)
    assert again.predict(data, batch=2).equals(said) and "nearest words" in again.show(data[0])
    with pytest.raises(TypeError, match="joint=True"): Template(t.text, tok, joint=True)
    if name != "cpm-2":
        with pytest.raises(ValueError, match="takes none"):
            PromptModel(net, Template('{"placeholder":"text_a"}{"mask"}', tok), m.verbalizer, pack=True)


@pytest.mark.parametrize("names", [[0, 1], [False, True], ["no", 7]])
@pytest.mark.parametrize("kind", ["manual", "soft", "automatic", "proto", "generation"])
def test_labels_come_back_from_a_file_as_they_are(tmp_path, names, kind):
    net, tok = network(), tokenizer()
    v = {
        "manual": lambda: Verbalizer(tok, dict(zip(names, (["bad"], ["good"])))),
        "soft": lambda: SoftVerbalizer(net, tok, labels=names),
        "automatic": lambda: AutomaticVerbalizer(tok, names),
        "proto": lambda: ProtoVerbalizer(16, names, 4),
        "generation": lambda: GenerationVerbalizer(dict(zip(names, ("bad", "good")))),
    }[kind]()
    PromptModel(net, Template(Q, tok), v).save(tmp_path)
    got = PromptModel.load(tmp_path, net, tok).verbalizer.labels
    assert [(type(k), k) for k in got] == [(type(k), k) for k in names]


def test_a_label_that_a_file_cannot_hold_is_not_saved(tmp_path):
    net, tok = network(), tokenizer()
    for label in (None, 0.0):
        m = PromptModel(net, Template(Q, tok), Verbalizer(tok, {label: ["bad"], "yes": ["good"]}))
        with pytest.raises(TypeError, match=f"label {label!r} is a"): m.save(tmp_path)


SMALL = dict(
    vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1, pad_token_id=0,
)
MAMBA = dict(mamba_n_heads=4, mamba_n_groups=1, mamba_d_state=8)
HYBRID = {
    "Lfm2": dict(layer_types=["conv", "full_attention"]),
    "Jamba": dict(attn_layer_period=2, attn_layer_offset=1, num_experts=1, num_experts_per_tok=1, mamba_d_state=4),
    "Bamba": MAMBA | dict(attn_layer_indices=[1], mamba_d_head=16),
    "FalconH1": MAMBA | dict(head_dim=16, mamba_d_ssm=32, mamba_d_head=8),   # both kinds of state in a layer
}


@pytest.mark.parametrize("kind", HYBRID)
def test_chained_words_of_hybrid_models(kind):
    torch.manual_seed(0)
    net = getattr(tf, f"{kind}ForCausalLM")(getattr(tf, f"{kind}Config")(**SMALL, **HYBRID[kind])).eval()
    tok, words = tokenizer(), {"no": ["bad film"], "yes": ["good", "so good it"]}
    m = PromptModel(net, Template(Q, tok), Verbalizer(tok, words), chain=True)
    got = m.answer(next(iter(m.batches(DATA, 6))))[0].words
    for i, e in enumerate(DATA):
        ids = m.template.encode(e)["input_ids"].tolist()
        for c, own in enumerate(words.values()):
            for w, word in enumerate(own):
                more = tok(word, add_special_tokens=False)["input_ids"]
                with torch.no_grad(): p = net(input_ids=torch.tensor([ids + more])).logits[0].log_softmax(-1)
                nats = sum(p[len(ids) - 1 + k, t].item() for k, t in enumerate(more))
                assert abs(got[i, c, w].item() - nats) < 1e-4


@pytest.mark.parametrize("kind", ["causal", "seq2seq"])
def test_options_that_would_not_give_a_text_an_example(kind):
    tok = tokenizer(kind)
    m = PromptModel(network(kind), Template(Q, tok), words(tok))
    with pytest.raises(ValueError, match="num_return_sequences=2: each example has one answer"):
        m.generate(DATA, 2, num_beams=2, num_return_sequences=2)
    with pytest.raises(TypeError, match="max_length=30: max_new_tokens counts"): m.generate(DATA, max_length=30)
    with pytest.raises(TypeError, match="return_dict_in_generate=True: it gives texts"):
        m.generate(DATA, 2, return_dict_in_generate=True)
    usual = m.generate(DATA, 2, num_return_sequences=1, return_dict_in_generate=False)
    assert usual == m.generate(DATA, 2) and len(usual) == len(DATA)


SMALL = dict(hidden_size=32, num_hidden_layers=2, vocab_size=25)
TURNED = dict(d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2, decoder_attention_heads=2,
              decoder_ffn_dim=48, encoder_ffn_dim=48, vocab_size=25)
READS_PADDING = {
    "rwkv": lambda: tf.RwkvForCausalLM(tf.RwkvConfig(**SMALL, attention_hidden_size=32)),
    "bart": lambda: tf.BartForCausalLM(tf.BartConfig(**TURNED)),
    "pegasus": lambda: tf.PegasusForCausalLM(tf.PegasusConfig(**TURNED)),
    "recurrent_gemma": lambda: tf.RecurrentGemmaForCausalLM(tf.RecurrentGemmaConfig(
        **SMALL | dict(num_hidden_layers=3), num_attention_heads=2, intermediate_size=64, lru_width=32,
        attention_window_size=8)),
    "trocr": lambda: tf.TrOCRForCausalLM(tf.TrOCRConfig(
        d_model=32, decoder_layers=2, decoder_attention_heads=2, decoder_ffn_dim=48, vocab_size=25)),
    "mamba behind a soft prompt": lambda: tf.MambaForCausalLM(tf.MambaConfig(**SMALL, state_size=4)),
    "llama": lambda: network("causal"),
}


@pytest.mark.parametrize("name", READS_PADDING)
def test_models_that_read_their_padding(name):
    "In a batch of several lengths each example is answered as it is alone, also where padding would be read"
    from bmlab.delta.soft import SoftPrompt
    torch.manual_seed(0)
    model = READS_PADDING[name]().eval()
    if "soft" in name: SoftPrompt(model, length=3, name="soft")
    with torch.no_grad():
        for p in model.parameters(): p.mul_(2)
    tok, widths = tokenizer("causal"), []
    tok.padding_side = "left"
    m = PromptModel(model, Template(Q, tok, family="causal"), words(tok))
    model.register_forward_pre_hook(lambda module, args, kw: widths.append(kw["input_ids"].shape), with_kwargs=True)
    together = m.predict(DATA, batch=6)
    calls = len(widths)
    alone = pd.concat([m.predict([e]) for e in DATA], ignore_index=True)
    torch.testing.assert_close(
        torch.tensor(together[["p(no)", "p(yes)"]].values), torch.tensor(alone[["p(no)", "p(yes)"]].values),
        rtol=0, atol=2e-5)
    # two to see, then all at once or three lengths
    assert calls == (3 if name in ("llama", "recurrent_gemma") else 5)
    chained = PromptModel(model, Template(Q, tok, family="causal"), Verbalizer(tok, {"no": "bad film", "yes": "good"}),
                          chain=True) if name in ("llama", "recurrent_gemma") else None
    if chained:
        one = torch.tensor([chained.predict([e])["p(yes)"][0] for e in DATA])
        both = torch.tensor(chained.predict(DATA)["p(yes)"].values)
        torch.testing.assert_close(both, one.double(), rtol=0, atol=2e-5)
    if "soft" in name:
        with deltas(model)["soft"].off(): m.predict(DATA, batch=6)             # says nothing of it when it is on
        assert m.predict(DATA, batch=6).equals(together)
        return
    text = m.generate(DATA, max_new_tokens=5, batch=6)
    assert text == [m.generate([e], max_new_tokens=5)[0] for e in DATA]


@pytest.mark.parametrize("name", ["llama", "rwkv"])
def test_rows_that_a_bank_tells_apart_stay_together(name):
    from bmlab.delta import DeltaBank
    torch.manual_seed(0)
    model = READS_PADDING[name]().eval()
    m = PromptModel(model, Template(Q, tokenizer("causal"), family="causal"), words(tokenizer("causal")))
    bank, users = DeltaBank(model), ["a", "b", None, "b", "a", "a"]
    for u in "ab":
        d = Lora(model, r=2, modules=["q_proj"] if name == "llama" else ["key"])
        for s in d.sites.values(): torch.nn.init.normal_(s.B)
        bank.add(u, d)
    with bank.route(users): got = m.predict(DATA, batch=6)["p(yes)"]
    with bank.route("b"): one = m.predict(DATA, batch=6)["p(yes)"]
    want = []
    for u, e in zip(users, DATA):
        with bank.route(u): want.append(m.predict([e])["p(yes)"][0])
    with bank.route("b"): alone = [m.predict([e])["p(yes)"][0] for e in DATA]
    np.testing.assert_allclose(one, alone, atol=2e-5)
    if name == "llama": np.testing.assert_allclose(got, want, atol=2e-5)


def test_numbers_are_told_from_places():
    "Keys of JSON are texts: a label 1 is the class that is called \"1\", wherever it stands"
    assert [class_number(x, ["1", "0"]) for x in (1, 0, "1", "0")] == [0, 1, 0, 1]
    assert [class_number(x, ["1", "2", "3"]) for x in (1, 2, 3)] == [0, 1, 2]
    assert [class_number(x, [7, 3]) for x in ("7", "3", 3)] == [0, 1, 1]
    for label, names in ((0, ["1", "2"]), ("0", [1, 2]), (2, ["one", "2", "3"]), (True, ["1", "0"])):
        if (label, names[0]) == (2, "one"):
            assert class_number(label, names) == 1
            continue
        with pytest.raises(ValueError, match="none of the classes"): class_number(label, names)
    with pytest.raises(ValueError, match="none of the classes"): class_number(0, ["one", "2", "3"])
    tok = tokenizer("masked")
    m = PromptModel(network("masked"), Template(Q, tok), Verbalizer(tok, {"1": "good", "0": "bad"}))
    other = PromptModel(m.model, m.template, Verbalizer(tok, {0: "bad", 1: "good"}))
    data = [e | dict(label=int(e["label"] == "yes")) for e in DATA]
    pd.testing.assert_series_equal(m.evaluate(data), other.evaluate(data))


def test_a_class_that_does_not_occur_is_no_part_of_the_mean():
    tok = tokenizer("masked")
    m = PromptModel(network("masked"), Template(Q, tok), Verbalizer(tok, {"a": "good", "b": "bad", "c": "fun"}))
    said = m.predict(DATA).label.tolist()
    data = [e | dict(label=s) for e, s in zip(DATA, said)]
    assert m.evaluate(data).macro_f1 == 1.0 == classification_score(said, said, "macro-f1")
    wrong = [e | dict(label=next(k for k in "abc" if k != s)) for e, s in zip(DATA[:1], said)]
    assert m.evaluate(wrong).macro_f1 == 0.0


@pytest.mark.parametrize("name", ["Cohere", "Granite", "HyperCLOVAX", "Gemma2", "FalconH1"])
def test_a_soft_verbalizer_begins_as_what_the_model_says(name):
    "Also where logits are scaled or bent behind the head: as the model's own logits of the words"
    tok, own = tokenizer("causal"), {}
    sizes = dict(vocab_size=len(tok), hidden_size=32, intermediate_size=48, num_hidden_layers=1,
                 num_attention_heads=2, num_key_value_heads=2, pad_token_id=0)
    if name == "Cohere": own = dict(logit_scale=0.25)
    if name in ("Granite", "HyperCLOVAX"): own = dict(logits_scaling=4.0)
    if name == "Gemma2": own = dict(final_logit_softcapping=0.5, head_dim=16)
    if name == "FalconH1": own = dict(lm_head_multiplier=3.0, mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8,
                                      mamba_d_state=8)
    torch.manual_seed(0)
    model = getattr(tf, f"{name}ForCausalLM")(getattr(tf, f"{name}Config")(**sizes, **own)).eval()
    with torch.no_grad(): model.get_output_embeddings().weight.mul_(20)
    soft = SoftVerbalizer(model, tok, {"no": "bad", "yes": "good"})
    got = PromptModel(model, Template(Q, tok, family="causal"), soft).predict(DATA)
    for row, e in zip(got.to_dict("records"), DATA):
        ids = torch.tensor([tok(f"{e['text_a']} it was")["input_ids"]])
        with torch.no_grad(): logits = model(ids).logits[0, -1, tok.convert_tokens_to_ids(["bad", "good"])]
        want = logits.softmax(0).tolist()
        assert [row["p(no)"], row["p(yes)"]] == pytest.approx(want, abs=1e-5)


def test_what_a_learned_verbalizer_refuses():
    h = torch.randn(6, 8)
    proto = lambda: ProtoVerbalizer(8, 2)
    for bad in (2, -1):
        with pytest.raises(ValueError, match=f"label {bad}: expected the number of a class, 0 to 1"):
            proto().fit(h, torch.tensor([0, 1, 0, 1, 0, bad]))
    with pytest.raises(ValueError, match="3 labels of 6 examples"): proto().fit(h, torch.tensor([0, 1, 0]))
    with pytest.raises(TypeError, match="a tensor is needed, the number of a class"): proto().fit(h, list("ababab"))
    with pytest.raises(ValueError, match="width 8, and width=16 was given"):
        ProtoVerbalizer(16, 2).fit(h, torch.tensor([0, 1] * 3))
    tok = tokenizer("masked")
    bert = dict(vocab_size=len(tok), hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2)
    mobile = tf.MobileBertForMaskedLM(tf.MobileBertConfig(
        **bert, embedding_size=32, intra_bottleneck_size=32, num_feedforward_networks=1, true_hidden_size=32)).eval()
    with pytest.raises(TypeError, match="MobileBertForMaskedLM does not call its head"):
        PromptModel(mobile, Template(Q, tok), ProtoVerbalizer(32, ["no", "yes"])).fit(DATA)
    with pytest.raises(ValueError, match="batch=0"):
        PromptModel(network(), Template(Q, tokenizer()), words(tokenizer())).generate(DATA, batch=0)


def test_answers_of_an_article_and_labels_of_two_kinds():
    score = lambda said, right: [generation_score([said], [right], m) for m in ("exact", "f1")]
    assert score("A", "A") == score("a.", "A") == score("The B", "B") == score("!", "!") == [1, 1]
    assert score("", "A") == score("B", "A") == score("?", "!") == score("a", "B") == [0, 0]
    assert score("the end", "The") == [0, pytest.approx(2 / 3)]
    ids, names = [0, 1, 1], ["neg", "pos"]
    assert classification_score(ids, [0, 1, 0], "precision", names=names) == 0.5
    assert classification_score([names[i] for i in ids], ["neg", "pos", "neg"], "precision", names=names) == 0.5
    assert classification_score(np.array(ids), torch.tensor(ids), "accuracy") == 1
    with pytest.raises(TypeError, match="'1' and labels such as 1 are never equal"): classification_score(["1"], [1])
    with pytest.raises(ValueError, match="label 'negg' is none of the classes.*did you mean"):
        classification_score(["neg"], ["negg"], names=names)
    with pytest.raises(ValueError, match="label 2 is none of the classes"):
        classification_score([2], [1], names=names)

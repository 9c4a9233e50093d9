"""Experiments in OpenPrompt's words: small yaml files of every kind on tiny models, and what is read of them."""
import json
from pathlib import Path

import pytest
import torch

from bmlab.prompt.experiment import DATA_SETS, Experiment, Words, examples_for, load_template, load_verbalizer
from bmlab.prompt.scores import classification_score
from bmlab.prompt.learned import ProtoVerbalizer, SoftVerbalizer
from bmlab.prompt.verbalize import AutomaticVerbalizer, KnowledgeableVerbalizer, PtrVerbalizer
from bmlab.core import set_seed
from openprompt_forms import tokenizer as pieces
from test_classify import DATA, tokenizer
import transformers as tf

TEXT = '{"placeholder":"text_a"} it was {"mask"}'
FILE = """
dataset: {name: reviews, path: nowhere}
plm:
  model_name: bert
  model_path: nowhere
  optimize: {freeze_para: FROZEN, lr: 1e-2, weight_decay: 0.01, scheduler: {type: , num_warmup_steps: 0}}
dataloader: {max_seq_length: 16, truncate_method: head}
train: {batch_size: 2, num_epochs: 2, gradient_accumulation_steps: 1, max_grad_norm: 1.0}
dev: {batch_size: 2}
test: {batch_size: 2}
template: TEMPLATE
TEMPLATE: {file_path: texts.txt, choice: CHOICE, OPTIONS}
verbalizer: VERBALIZER
VERBALIZER: {WORDS}
environment: {num_gpus: 1}
learning_setting: few_shot
few_shot: {parent_config: learning_setting, few_shot_sampling: sampling_from_train}
sampling_from_train: {num_examples_per_label: 1, num_examples_per_label_dev: 1, seed: [1]}
classification: {parent_config: task, metric: [accuracy, macro-f1]}
"""
TEXTS = [TEXT, '{"soft":2} ' + TEXT, '{"placeholder":"text_a"} {"mask"} it {"mask"}']
FILES = 'file_path: words.txt, choice: 0'
CASES = {
    "manual": ("manual_template", 0, "", "manual_verbalizer", FILES, False),
    "mixed": ("mixed_template", 1, "optimize: {lr: 0.1}", "one2one_verbalizer", FILES, True),
    "soft": (
        "soft_template", 0, "num_tokens: 2, optimize: {lr: 0.1, scheduler: {num_warmup_steps: 1}}", "manual_verbalizer",
        FILES, True),
    "ptuning": ("ptuning_template", 1, "prompt_encoder_type: mlp", "manual_verbalizer", FILES, True),
    "prefix": ("prefix_tuning_template", 0, "num_token: 2, optimize: {lr: 0.1}", "manual_verbalizer", FILES, True),
    "kpt": (
        "manual_template", 0, "", "knowledgeable_verbalizer",
        FILES + ", candidate_frac: 0.0, optimize: {lr: 0.1}", True),
    "ptr": ("ptr_template", 2, "", "ptr_verbalizer", "label_words: [[bad, hate], [good, love]]", False),
    "soft verbalizer": ("manual_template", 0, "", "soft_verbalizer", "num_classes: 2", True),
    "automatic": (
        "manual_template", 0, "", "automatic_verbalizer",
        "num_classes: 2, num_cadidates: 9, label_word_num_per_class: 2", False),
    "proto": ("manual_template", 0, "", "proto_verbalizer", FILES + ", mid_dim: 8, epochs: 3, lr: 0.01", True),
}
ROWS = [e | {"label": int(e["label"] == "yes")} for e in DATA]


def bert(tok):
    set_seed(0)
    sizes = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, is_decoder=False)
    return tf.BertForMaskedLM(tf.BertConfig(vocab_size=len(tok), max_position_embeddings=32, **sizes)).eval()


def write(folder, template, choice, options, verbalizer, words, frozen):
    (folder / "texts.txt").write_text("\n".join(TEXTS))
    (folder / "words.txt").write_text("bad,poor\ngood,fine\n")
    said = {"TEMPLATE": template, "CHOICE": str(choice), "OPTIONS": options, "VERBALIZER": verbalizer, "WORDS": words}
    text = FILE.replace("FROZEN", str(frozen))
    for k, v in said.items(): text = text.replace(k, v)
    (folder / "it.yaml").write_text(text.replace(", }", "}"))
    return folder / "it.yaml"


@pytest.mark.parametrize("case", [k for k in CASES if k != "prefix"])
def test_every_kind_runs_and_trains_what_it_says(case, tmp_path):
    tok, kept = tokenizer("masked"), []
    model = bert(tok)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    e = Experiment(write(tmp_path, *CASES[case]), model, tok, root=tmp_path)
    runs = e.run(ROWS, test=ROWS[:2], keep=lambda seed, pm: kept.append(pm))
    assert list(runs.seed) == [1] and {"accuracy", "macro-f1"} <= {*runs}
    after = dict(kept[0].model.named_parameters())
    moved = [n for n, p in before.items() if not torch.equal(p, after[n])] if case != "ptuning" else []
    assert bool(moved) != CASES[case][-1]                       # a frozen model stays, a tuned one moves
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())          # the one given is never touched
    idle = {*e.idle.word}
    assert {"environment.num_gpus", "dataset.path", "plm.model_name"} <= idle and not any("train" in w for w in idle)


def test_a_prefix_is_trained_on_a_causal_model(tmp_path):
    tok, kept = tokenizer("causal"), []
    set_seed(0)
    sizes = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    model = tf.LlamaForCausalLM(tf.LlamaConfig(vocab_size=len(tok), pad_token_id=0, **sizes))
    tail = {"dataloader.truncate_method": "tail"}
    e = Experiment(write(tmp_path, *CASES["prefix"]), model, tok, root=tmp_path, changes=tail)
    e.run(ROWS, test=ROWS[:2], keep=lambda seed, pm: kept.append(pm))
    assert kept[0].prefix.length == 2 and e._rates(kept[0])[0] == {"prefix": 0.1}


def test_the_verbalizers_are_those_of_the_section(tmp_path):
    tok = tokenizer("masked")
    kinds = {"kpt": KnowledgeableVerbalizer, "ptr": PtrVerbalizer, "soft verbalizer": SoftVerbalizer,
             "automatic": AutomaticVerbalizer, "proto": ProtoVerbalizer}
    for case, kind in kinds.items():
        v = load_verbalizer(write(tmp_path, *CASES[case]), tok, bert(tok), root=tmp_path)
        assert type(v) is kind and v.labels == [0, 1]
    assert (v.steps, v.lr, v.into.out_features) == (3, 0.01, 8) and v.by_words is not None
    own = load_verbalizer(write(tmp_path, *CASES["manual"]), tok, classes=["no", "yes"], root=tmp_path)
    assert own.words == {"no": [" bad", " poor"], "yes": [" good", " fine"]}


def test_warm_ups_and_rates_are_each_parts_own(tmp_path):
    tok = tokenizer("masked")
    tuned = {"plm.optimize.freeze_para": False}
    e = Experiment(write(tmp_path, *CASES["soft"]), bert(tok), tok, root=tmp_path, changes=tuned)
    rates, warm = e._rates(e.prompt_model())
    assert rates == {"soft": 0.1} and warm == {"soft": 1, "model": 0}
    assert e.rate == 0.01 and e.truncate == "openprompt-head"


def test_changes_defaults_and_words_that_are_wrong(tmp_path):
    e = Experiment({"train": {"num_training_steps": 7}})
    assert (e.steps, e.batch["train"], e.rate, e.warmup["plm"], e.length) == (7, 2, 5e-4, 500, 256)
    assert e.metric == ["micro-f1"]
    assert Words({}, {"a.b": 1}).tree == {"a": {"b": 1}}
    with pytest.raises(ValueError, match="text: and file_path"):
        load_template({"template": "manual_template", "manual_template": {"text": TEXT, "file_path": "x"}}, None)
    with pytest.raises(ValueError, match="num_classes=3"):
        two = {"label_words": [["bad"], ["good"]], "num_classes": 3}
        load_verbalizer({"verbalizer": "manual_verbalizer", "manual_verbalizer": two}, tokenizer("masked"))
    with pytest.raises(ValueError, match="calibrate: other"):
        Experiment({"calibrate": "other"})._calibrate(None, [], [])


def test_few_examples_are_drawn_apart():
    e = Experiment({"learning_setting": "few_shot", "sampling_from_train": {
        "num_examples_per_label": 1, "num_examples_per_label_dev": 2, "seed": 5}})
    few, dev = e.draw(ROWS, seed=5)
    assert len(few) == 2 and len(dev) == 4 and not [x for x in few if any(x is d for d in dev)]
    assert e.draw(ROWS, ROWS[:4], 5)[1] != [] and e.seeds == [5]


def test_few_examples_in_all():
    "As OpenPrompt's FewShotSampler reads it: so many of each class, or so many in all, and development as training"
    def drawn(valid=None, **words):
        e = Experiment({"learning_setting": "few_shot", "sampling_from_train": words})
        few, dev = e.draw(many, valid, seed=5)
        assert "sampling_from_train" not in str(list(e.idle.word))
        assert not [x for x in few if any(x is d for d in dev or [])]
        return len(few), dev and len(dev)
    many = [{"text_a": "fun" if i % 2 else "dull", "label": i % 2} for i in range(40)]
    none = {"num_examples_per_label": None}
    assert drawn(num_examples_total=6, **none, also_sample_dev=False) == (6, None)
    assert drawn(num_examples_total=6) == (6, 20)                                # ten a class are the default
    assert drawn(num_examples_total=6, **none, num_examples_per_label_dev=None) == (6, 6)
    assert drawn(num_examples_total=6, **none, num_examples_total_dev=3) == (6, 3)
    assert drawn(num_examples_per_label=2, num_examples_per_label_dev=None) == (4, 4)
    assert drawn(num_examples_per_label=2, num_examples_total_dev=5) == (4, 5)
    for wrong in (none, {"num_examples_per_label": 2, "num_examples_total": 6}):
        with pytest.raises(ValueError, match="num_examples_total .*say one of the two"): drawn(**wrong)
    with pytest.raises(ValueError, match="num_examples_total=41: a whole number from 1 to 40"):
        drawn(num_examples_total=41)


def test_rows_of_data_sets_become_examples():
    wic = {"sentence1": "A bank.", "sentence2": "The bank.", "word": "bank", "label": 1, "idx": 3}
    assert examples_for("super_glue.wic", [wic]) == [
        {"text_a": "A bank.", "text_b": "The bank.", "label": 1, "meta": {"word": "bank"}}]
    tacred = {"token": ["He", "left", "."], "head": "He", "tail": "left", "relation": "no_relation"}
    assert examples_for("TACRED", [tacred])[0]["text_a"] == "He left ."
    yahoo = {"question_title": "a", "question_content": "b", "best_answer": "c", "topic": 2}
    assert examples_for("yahoo", [yahoo]) == [{"text_a": "a b", "text_b": "c", "label": 2}]
    assert examples_for("agnews", [{"title": "t", "description": "d"}]) == [{"text_a": "t", "text_b": "d"}]
    with pytest.raises(KeyError, match="column 'span1_index'"):
        examples_for("super_glue.wsc", [{"text": "a b", "span1_text": "a", "span2_text": "b", "span2_index": 1}])


FIGURES = json.loads((Path(__file__).parents[1] / "fixtures/original_openprompt.json").read_text())


def test_every_data_set_of_openprompts_list_is_here():
    "Those for Chinese data sets stand beside its list, and are not"
    assert {name.lower() for name in FIGURES["listed"]} == {*DATA_SETS} and FIGURES["chinese"] == 42


@pytest.mark.parametrize("name", FIGURES["rows"])
def test_rows_that_lie_deep_become_its_examples(name):
    "Its own processors on the same rows (tools/original_openprompt.py); labels there are numbers, here names"
    case = FIGURES["rows"][name]
    here, there = examples_for(name, case["rows"]), case["examples"]
    if name == "record":
        assert there == "NameError"                          # openprompt/data_utils/fewglue_dataset.py:294, data_dir
        assert here == [{"text_a": "Anna left Oslo.\n- Rain", "text_b": "@placeholder left", "tgt_text": "Anna",
                         "meta": {"candidates": ["Anna", "Oslo"], "answers": "Anna"}}]
        return
    if name == "lama": assert there.pop() == "<text_a> lives in <mask> ."
    assert len(here) == len(there)
    for mine, its in zip(here, there):
        if name == "super_glue.record": assert its["text_a"] == "" and mine["text_a"] == its["meta"]["passage"]
        else: assert mine.get("text_a", "") == its["text_a"]
        assert mine.get("text_b", "") == its["text_b"]
        own = mine.get("meta", {})                               # FewGLUE's has numbers of spans and answers besides
        assert own == {k: v for k, v in its["meta"].items() if k in own or name not in ("wsc", "multirc")}
        if its["tgt_text"] is not None: assert mine["tgt_text"] == its["tgt_text"]
        assert (mine.get("label") is None) == (its["label"] is None) or name == "super_glue.record"


def test_loose_scores_are_openprompts():
    "Figures of its own openprompt/utils/metrics.py (tools/original_openprompt.py makes them)"
    cases = FIGURES["loose"]
    assert len(cases) == 8
    for case in cases:
        for metric, value in case["scores"].items():
            assert classification_score(case["said"], case["right"], metric) == pytest.approx(value, abs=1e-12)


def test_a_t5_that_goes_on_and_one_text_as_the_answer():
    "plm.model_name: t5-lm, and a generation_verbalizer of a single text, as for ReCoRD"
    section = {"plm": {"model_name": "t5-lm"}, "template": "manual_template"}
    section |= {"manual_template": {"text": '{"meta":"query"} {"mask"}'}, "verbalizer": "generation_verbalizer"}
    section["generation_verbalizer"] = {"label_words": ['{"meta": "answers"}'], "is_rule": True}
    template, v = load_template(section, pieces("unigram")), load_verbalizer(section, pieces("unigram"))
    said = {"meta": {"query": "who was it", "answers": "Anna"}}
    assert (template.family, type(v).__name__, v.texts(template, [said])) == ("t5-lm", "Written", [["Anna"]])
    ids = template.encode(said)["input_ids"].tolist()
    assert template.tok.decode(ids) == "who was it</s>"


def optimizers(config, monkeypatch):
    "What each part is trained by in a run: {part: [(optimizer, rate, weight decay) at each step]}"
    seen = {}
    for kind in (torch.optim.AdamW, tf.Adafactor):
        def step(self, closure=None, kind=kind, plain=kind.step):
            for g in self.param_groups:
                seen.setdefault(g["part"], []).append((kind.__name__, round(g["lr"], 6), g["weight_decay"]))
            return plain(self, closure)
        monkeypatch.setattr(kind, "step", step)
    tok = tokenizer("masked")
    usual = {"train": {"num_epochs": 1, "batch_size": 2}, "template": "soft_template",
             "soft_template": {"text": TEXT, "num_tokens": 2}, "verbalizer": "manual_verbalizer",
             "manual_verbalizer": {"label_words": [["bad"], ["good"]]}}
    own = Experiment(usual | config, bert(tok), tok)
    own.run(ROWS[:4])
    return seen, own


FROZEN = {"plm": {"optimize": {"freeze_para": True}}}


def test_a_template_is_trained_by_the_optimizer_it_names(monkeypatch):
    "openprompt/trainer.py: AdamW, decaying where there is a scheduler, or Adafactor at a constant rate; no other"
    text = {"text": TEXT, "num_tokens": 2}
    made = lambda **words: FROZEN | {"soft_template": text | {"optimize": {"lr": 0.3, **words}}}
    assert optimizers(made(name="AdamW"), monkeypatch)[0] == {"soft": [("AdamW", 0.3, 0.0)] * 2}
    falling = made(name="AdamW", scheduler={"num_warmup_steps": 0})
    assert optimizers(falling, monkeypatch)[0] == {"soft": [("AdamW", 0.3, 0.0), ("AdamW", 0.15, 0.0)]}
    seen, own = optimizers(made(name="Adafactor", adam_epsilon=1e-8), monkeypatch)
    assert seen == {"soft": [("Adafactor", 0.3, 1e-5)] * 2} and own.idle.word.str.endswith("adam_epsilon").any()
    both = made(name="adafactor") | {"plm": {"optimize": {"lr": 0.01, "scheduler": None}}}
    seen = optimizers(both, monkeypatch)[0]
    assert {*seen["model"]} == {("AdamW", 0.01, 0.01), ("AdamW", 0.01, 0.0)} and {*seen["soft"]} == {
        ("Adafactor", 0.3, 1e-5)}
    with pytest.raises(ValueError, match="optimize.name: sgd.*AdamW or Adafactor"): Experiment(
        {"template": "soft_template"} | made(name="SGD"))


def test_what_is_left_out_is_as_in_openprompts_default_config(monkeypatch):
    "openprompt/default_config.py: a mixed template and a prefix at 5e-5, falling from the start"
    mixed = FROZEN | {"template": "mixed_template", "mixed_template": {"text": '{"soft":2} ' + TEXT}}
    assert optimizers(mixed, monkeypatch)[0] == {"soft": [("AdamW", 5e-5, 0.0), ("AdamW", 2.5e-5, 0.0)]}
    section = {"text": '{"placeholder":"text_a"} {"mask"}'}
    prefix = {"template": "prefix_tuning_template", "prefix_tuning_template": section}
    assert load_template(prefix, tokenizer("causal")).prefix_options["hidden"] == 512
    section["mid_dim"] = 0
    assert "hidden" not in load_template(prefix, tokenizer("causal")).prefix_options
    assert Experiment(prefix).rates == {"template": 5e-5} and Experiment(prefix).warmup["template"] == 0


def test_a_verbalizers_own_vectors_do_not_decay(monkeypatch):
    "openprompt/trainer.py: AdamW(verbalizer.parameters(), lr), whose weight decay is 0"
    section = {"label_words": [["bad"], ["good"]], "optimize": {"name": "AdamW", "lr": 0.02}}
    config = {"template": "manual_template", "manual_template": {"text": TEXT}, "verbalizer": "soft_verbalizer",
              "soft_verbalizer": section, "plm": {"optimize": {"freeze_para": False, "lr": 0.01}}}
    seen = optimizers(config, monkeypatch)[0]
    assert {*seen["verbalizer"]} == {("AdamW", 0.02, 0.0)} and {wd for _, _, wd in seen["model"]} == {0.01, 0.0}


def test_a_verbalizer_looks_for_its_words_where_openprompt_does(monkeypatch):
    "default_config.py: automatic_verbalizer.init_using_split = 'valid'"
    from bmlab.prompt.classify import PromptModel
    used = []
    monkeypatch.setattr(PromptModel, "_find", lambda self, data, batch: used.append(len(data)))
    monkeypatch.setattr(Experiment, "_learn", lambda *args: None)
    config = {"template": "manual_template", "manual_template": {"text": TEXT}, "verbalizer": "automatic_verbalizer",
              "automatic_verbalizer": {"num_classes": 2}}
    tok = tokenizer("masked")
    for split in (None, "train", "valid"):
        config["automatic_verbalizer"]["init_using_split"] = split
        Experiment(config, bert(tok), tok).once(ROWS[:4], ROWS[:3])
    assert used == [3, 4, 3]


def test_texts_are_written_by_openprompts_defaults(monkeypatch):
    "Five beams, at least 5 and at most 512 tokens, of which the prompt is a part; a limit of new ones goes before"
    tok, asked = tokenizer("causal"), []
    set_seed(0)
    sizes = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    model = tf.LlamaForCausalLM(tf.LlamaConfig(vocab_size=len(tok), pad_token_id=0, **sizes))
    def generate(self, **options):
        asked.append(options)
        return options["input_ids"]
    monkeypatch.setattr(tf.LlamaForCausalLM, "generate", generate)
    config = {"task": "generation", "template": "manual_template", "learning_setting": "zero_shot",
              "manual_template": {"text": '{"placeholder":"text_a"} {"mask"}'}}
    rows = [{"text_a": "the film was good", "tgt_text": "good"}]
    Experiment(config, model, tok).run(test=rows)
    said = asked.pop()
    assert {k: said.get(k) for k in ("num_beams", "min_length", "do_sample", "top_p")} == {
        "num_beams": 5, "min_length": 5, "do_sample": False, "top_p": None}
    assert said["max_new_tokens"] + said["input_ids"].shape[1] == 512
    Experiment(config | {"generation": {"do_sample": True, "max_new_tokens": 7}}, model, tok).run(test=rows)
    said = asked.pop()
    assert (said["max_new_tokens"], said["top_p"], said["top_k"], said["temperature"]) == (7, 0.9, 0, 1.0)
    with pytest.raises(ValueError, match="generation.max_length=2"):
        Experiment(config | {"generation": {"max_length": 2}}, model, tok).run(test=rows)


def test_the_weights_of_many_words_have_openprompts_temperature():
    "knowledgeable_verbalizer.py: softmax of the weights in training, of pred_temp times the weights otherwise"
    section = {"label_words": [["bad", "poor"], ["good", "fine"]], "pred_temp": 3}
    v = load_verbalizer({"verbalizer": "knowledgeable_verbalizer", "knowledgeable_verbalizer": section},
                        tokenizer("masked"))
    with torch.no_grad(): v.weight.copy_(torch.tensor([[0.2, -0.4], [1.0, 0.5]]))
    values = torch.tensor([[[1.0, 2.0], [3.0, 5.0]]])
    for training, times in ((True, 1), (False, 3)):
        share = (v.weight.detach() * times).softmax(-1)
        assert torch.allclose(v.train(training)._gather(values), (values * share).sum(-1))

"""OpenPrompt's own yaml files, run from a checkout on tiny models: each with its own template, words, rates and seeds.

usage: openprompt_yaml.py CHECKOUT [NAME …]

CHECKOUT: of github.com/thunlp/OpenPrompt; NAME: only the files whose path holds it

The models have random weights, the examples random words, a run two steps: what is looked at is that every word of the
file is understood, that its template and its words are read, and that training and scoring go through. What changes
nothing is listed by `Experiment.idle`. A file that OpenPrompt itself cannot run (a verbalizer that it does not have) is
expected to be refused.
"""
import random, re, sys, warnings
from pathlib import Path

import torch
import transformers as tf
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from bmlab.core import set_seed
from bmlab.prompt.experiment import DATA_SETS, Experiment, _class_words, Words

REFUSED = {
    "copa_bert_large_cased_softprompt.yaml": "contextual_verbalizer",           # none in OpenPrompt's VERBALIZER_CLASS
    "wsc_t5_large_softprompt.yaml": "holds no words",                           # its manual_verbalizer.txt is empty
}
SIZES = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32)


def tokenizer(checkout, kind):
    "Of bytes, learned on the checkout's own templates and words"
    special = {
        "masked": ["<s>", "<pad>", "</s>", "<unk>", "<mask>"], "causal": ["<pad>", "</s>"],
        "seq2seq": ["<pad>", "</s>", "<unk>", *(f"<extra_id_{i}>" for i in range(100))],
    }[kind]
    t = Tokenizer(models.BPE())
    t.pre_tokenizer, t.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=40000, min_frequency=1, special_tokens=special, show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    texts = [p.read_text(encoding="utf-8") for p in sorted((checkout / "scripts").rglob("*.*")) if p.suffix != ".py"]
    words = [w for text in texts for w in [*text.split("\n"), *re.findall("[A-Za-z]+", text)]]
    t.train_from_iterator([s + w for w in words for s in ("", " ")], trainer)
    names = dict(pad_token="<pad>", eos_token="</s>")
    if kind == "masked":
        names |= dict(bos_token="<s>", cls_token="<s>", sep_token="</s>", mask_token="<mask>", unk_token="<unk>")
        ends = [("<s>", t.token_to_id("<s>")), ("</s>", t.token_to_id("</s>"))]
        t.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=ends)
    if kind == "seq2seq":
        names |= dict(unk_token="<unk>", additional_special_tokens=special[3:])
        ends = [("</s>", t.token_to_id("</s>"))]
        t.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=ends)
    return tf.PreTrainedTokenizerFast(tokenizer_object=t, **names)


def model(kind, tok):
    set_seed(0)
    V, ends = len(tok), dict(pad_token_id=tok.pad_token_id, eos_token_id=tok.eos_token_id)
    if kind == "masked": return tf.BertForMaskedLM(tf.BertConfig(vocab_size=V, max_position_embeddings=600, **SIZES))
    if kind == "causal":
        small = dict(n_embd=32, n_layer=2, n_head=2, n_positions=700, bos_token_id=1)
        return tf.GPT2LMHeadModel(tf.GPT2Config(vocab_size=V, **small, **ends))
    small = dict(d_model=32, d_kv=16, d_ff=32, num_layers=2, num_heads=2, decoder_start_token_id=tok.pad_token_id)
    return tf.T5ForConditionalGeneration(tf.T5Config(vocab_size=V, **small, **ends))


def examples(name, classes, count):
    "Random ones, `count` of each class, with the data set's own columns"
    rng, columns = random.Random(0), DATA_SETS[name.lower()][0]
    text = lambda: " ".join(rng.choice("a film of rare beauty that nobody saw in the rain".split()) for _ in range(6))
    names = [c for k, v in columns.items() if k != "label" for c in (v if isinstance(v, tuple) else (v,))]
    rows = [{c: text() for c in names} | ({columns["label"]: i} if classes else {})
            for i in range(len(classes or [0])) for _ in range(count)]
    rng.shuffle(rows)
    return rows


def go(path, checkout, made):
    "(refused or its scores, words that change nothing)"
    words = Words(path)
    family = {"bert": "masked", "roberta": "masked", "t5": "seq2seq", "gpt2": "causal"}[words.take("plm.model_name")]
    small = {"train.num_training_steps": 2, "sampling_from_train.num_examples_per_label": 1,
             "sampling_from_train.num_examples_per_label_dev": 1}
    if words.take("task") == "generation": small |= {"generation.metric": "bleu", "generation.max_new_tokens": 4}
    writer = made["causal"] if words.take("classification.auto_t") else None
    if writer: small |= {"template_generator.beam_width": 3, "template_generator.max_length": 3}
    e = Experiment(path, *made[family], root=checkout, changes=small, writer=writer)
    verbalizer = e.words.take("verbalizer")
    if e.classes is None and verbalizer: e.classes = list(_class_words(e.words, verbalizer, None, checkout))
    train, test = (examples(e.data, e.classes, n) for n in (2, 1))
    runs = e.run(train, test=test[:16])
    return runs, e.idle


def main(args):
    checkout = Path(args[0])
    files = [f for folder in ("experiments", "referenced_yamls") for f in sorted((checkout / folder).glob("*.yaml"))]
    files = [f for f in files if not args[1:] or any(a in str(f) for a in args[1:])]
    made = {k: (model(k, tok), tok) for k in ("masked", "causal", "seq2seq") for tok in (tokenizer(checkout, k),)}
    wrong = 0
    for path in files:
        try: runs, idle = go(path, checkout, made)
        except Exception as e:
            expected = REFUSED.get(path.name, "\0") in str(e)
            wrong += not expected
            print(f"{path.name}: {'refused, as expected' if expected else 'FAILED'}: {type(e).__name__}: {e}")
            continue
        scores = ", ".join(f"{k} {v:.2f}" for k, v in runs.drop(columns="seed").mean().items())
        print(f"{path.name}: runs, {len(runs)} seeds, {scores}; {len(idle)} idle words: {', '.join(idle.word[:40])}")
    print(f"{len(files) - wrong} of {len(files)} as expected")
    return wrong


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    sys.exit(main(sys.argv[1:]))

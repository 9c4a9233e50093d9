"""The ids that OpenPrompt's own code makes of template texts, and ours (tools/original_openprompt_templates.py makes
the figures, and compares every template text of its repository)."""
import json
from pathlib import Path

import pytest
import torch

from bmlab.prompt.openprompt import SoftTemplate
from bmlab.prompt.verbalize import KnowledgeableVerbalizer
from openprompt_forms import (
    ANSWERS, CUTS, EXAMPLES, FORMS, KNOWLEDGE, PATTERNS, WORDS, digest, habit, ours, ours_written, tokenizer,
)

FIGURES = json.loads((Path(__file__).parents[1] / "fixtures/original_openprompt_templates.json").read_text())


@pytest.mark.parametrize("form", FORMS)
def test_patterns_have_its_ids(form):
    for i, text in enumerate(PATTERNS):
        first, *rest = FIGURES["patterns"][str(i)][form]
        place = f"pattern {i} {form}"
        known = {k for d in FIGURES["known"].values() for k in d["cases"].get(place, [])}
        got = ours(text, form)
        assert len(got) == len(rest) == len(CUTS) * len(EXAMPLES)
        assert {k for k, x in enumerate(got) if digest(x) != rest[k]} == known, place
        if 0 not in known: assert got[0] == first, place


@pytest.mark.parametrize("form", ["wordpiece", "bpe", "t5-lm"])
def test_soft_template_puts_its_vectors_in_front_of_those_ids(form):
    "Beside max_length: openprompt/prompts/soft_template.py, process_batch, concatenates them with what was encoded"
    for i in (0, 1, 7, 9):
        rest = FIGURES["patterns"][str(i)][form][1:]
        known = {k for d in FIGURES["known"].values() for k in d["cases"].get(f"pattern {i} {form}", [])}
        for k, x in enumerate(ours(PATTERNS[i], form, SoftTemplate, num_tokens=3)):
            if x is None or k in known: continue
            ids, places, *decoder = x
            assert ids[:3] == [-1, -2, -3]
            assert digest([ids[3:], places if decoder else [p - 3 for p in places], *decoder]) == rest[k]


@pytest.mark.parametrize("form", ["unigram", "t5-lm", "cpm-2"])
def test_a_decoder_reads_and_says_what_it_does_there(form):
    "An answer's own text behind its mark; what CPM-2's asks for behind the end is padding, and nothing here"
    theirs, here = FIGURES["written"][form], ours_written(form)
    known = {k: why for why, d in FIGURES["known"].items() for k in d["cases"].get(f"written {form}", [])}
    assert len(theirs) == len(here) == len(EXAMPLES) * sum(form != "t5-lm" or len(a) == 1 for _, a in ANSWERS)
    assert {k for k, x in enumerate(theirs) if x != here[k]} == {*known}
    for k, why in known.items():
        if why != "padding asked for": continue
        ids, said = theirs[k]
        assert said.pop() == tokenizer("words").pad_token_id and ids.pop() == tokenizer("words").eos_token_id
        plain = lambda row: [i for i in row if i != tokenizer("words").convert_tokens_to_ids("\u2582")]
        assert plain(ids) == plain(here[k][0]) and plain(said) == plain(here[k][1])


def test_marks_that_a_tokenizer_does_not_list():
    "mT5's are words of its vocabulary: as T5's here, an error there"
    assert FIGURES["written"]["mt5"] == "IndexError"
    assert not getattr(tokenizer("pieces"), "additional_special_tokens", [])
    assert ours_written("unigram", "pieces") == ours_written("unigram")


@pytest.mark.filterwarnings("ignore:words that are left out")
def test_knowledgeable_verbalizer_keeps_its_words():
    "max_token_split and candidate_frac (here frac); where a class of its loses all words, it fails, and ours keeps one"
    plain = lambda words: [[w.strip() for w in own] for own in words.values()]
    for name, most, share in KNOWLEDGE:
        v = KnowledgeableVerbalizer(tokenizer(name), WORDS, frac=share, max_token_split=most)
        made, left = FIGURES["knowledge"][f"{name} {most} {share}"]
        assert plain(v.words) == made
        used = plain(v.calibrate(torch.from_numpy(habit(len(tokenizer(name))))[None]).used)
        assert used == left if left is not None else all(used), (name, most, share)


def test_every_text_of_its_repository_was_compared():
    "Each with all forms; what differs is said, with its reason"
    assert len(FIGURES["texts"]) == 104 and sum(t.startswith("scripts/") for t in FIGURES["texts"]) == 76
    assert FIGURES["forms"] == list(FORMS) and all(len(x) == 1 + len(FORMS) for x in FIGURES["texts"].values())
    assert all(d["why"] for d in FIGURES["known"].values())

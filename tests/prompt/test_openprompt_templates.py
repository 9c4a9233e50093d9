"""The ids that OpenPrompt's own code makes of template texts, and ours (tools/original_openprompt_templates.py makes
the figures, and compares every template text of its repository)."""
import json
from pathlib import Path

import pytest
import torch

from bmlab.prompt.openprompt import SoftTemplate
from bmlab.prompt.verbalize import KnowledgeableVerbalizer
from openprompt_forms import (
    CUTS, EXAMPLES, FORMS, KNOWLEDGE, PATTERNS, WORDS, digest, habit, ours, tokenizer,
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

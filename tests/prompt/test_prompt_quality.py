"A real task: which sentences about films are good, by SmolLM2, a template and two words (minutes on two cores)."
import pytest
import torch

from bmlab.core import set_seed
from bmlab.data.samples import sample_texts
from bmlab.models.load import load
from bmlab.prompt.template import Template
from bmlab.prompt.classify import FewShotSampler, PromptModel
from bmlab.prompt.learned import ProtoVerbalizer, SoftVerbalizer
from bmlab.prompt.verbalize import AutomaticVerbalizer, KnowledgeableVerbalizer, Verbalizer
from bmlab.prompt.wordnet import expand_words

pytestmark = [pytest.mark.slow]
WORDS = {"negative": "terrible", "positive": "great"}
MANY = {
    "negative": "terrible bad awful boring poor dull worst horrible disappointing stupid weak lame".split(),
    "positive": "great good wonderful excellent brilliant amazing best beautiful fun perfect fantastic "
                "delightful".split(),
}
PLAIN = '{"placeholder":"text_a"} It was {"mask"}'


@pytest.fixture(scope="module")
def task():
    model, tok = load("smollm2-135m", device="cpu")
    films = sample_texts("movies")
    films = films[films.rating.abs() >= 1].sample(frac=1, random_state=0)
    data = [{"text_a": text, "label": "positive" if r > 0 else "negative"} for text, r in zip(films.text, films.rating)]
    return model, tok, FewShotSampler(32, seed=0)(data[:3000]), FewShotSampler(300, seed=0)(data[3000:])


def accuracy(model, test): return model.evaluate(test, batch=20).accuracy


def test_calibrated_and_soft_and_learned(task):
    model, tok, few, test = task
    plain = Template(PLAIN, tok)
    scores = {}
    zero = PromptModel(model, plain, Verbalizer(tok, WORDS))
    scores["zero-shot"] = accuracy(zero, test)
    scores["calibrated on nothing"] = accuracy(zero.calibrate(), test)
    scores["calibrated"] = accuracy(zero.calibrate(few), test)
    print(scores, flush=True)
    for name, v in {
        "knowledgeable": KnowledgeableVerbalizer(tok, MANY),
        "thesaurus": KnowledgeableVerbalizer(tok, expand_words(WORDS, tok=tok, pos="a")),
        "automatic": AutomaticVerbalizer(tok, list(WORDS), words=3), "prototypes": ProtoVerbalizer(576, list(WORDS)),
        "soft verbalizer": SoftVerbalizer(model, tok, WORDS),
    }.items():
        set_seed(0)
        m = PromptModel(model, plain, v)
        if name in ("knowledgeable", "thesaurus"): m.calibrate(few)
        else: m.fit(few, epochs=4, lr=1e-3, plot=False)
        if name == "automatic":
            m.calibrate(few)
            print(v.words)
        scores[name] = accuracy(m, test)
        print(name, scores[name], flush=True)
    before = [p.clone() for p in model.parameters()]
    set_seed(0)
    soft = PromptModel(
        model,
        Template('{"soft":"Is this movie review positive or negative? Review:"} ' + PLAIN, tok),
        Verbalizer(tok, WORDS),
    )
    soft.fit(few, epochs=6, lr=5e-3, plot=False)
    scores["ten soft tokens"] = accuracy(soft, test)
    soft.soft.detach()
    print(scores)
    assert all(map(torch.equal, before, model.parameters())) and soft.template.soft_count == 10
    assert scores["calibrated"] >= 0.65 and scores["ten soft tokens"] >= 0.80
    assert all(
        scores[n] >= scores["calibrated"] - 0.02
        for n in ("knowledgeable", "thesaurus", "automatic", "prototypes", "soft verbalizer")
    )

"Black-box tuning against the package cma, and on a real language model."
import math

import pytest
import torch
from torch.nn import functional as F

from bmlab.delta.bbt import Bbt, CmaEs, PromptScore
from bmlab.delta.delta import deltas


def valley(d, turned):
    "Steeper along one axis than along another, a thousand times"
    steep = 10 ** torch.linspace(0, 3, d, dtype=torch.float64)
    turn = (
        torch.linalg.qr(torch.randn(d, d, generator=torch.Generator().manual_seed(1), dtype=torch.float64))[0]
        if turned
        else torch.eye(d, dtype=torch.float64)
    )
    return lambda x: ((x - 1) @ turn.T).square() @ steep


def lowest(f, es, evaluations):
    best = math.inf
    for _ in range(evaluations // es.popsize):
        x = es.ask()
        y = f(x)
        es.tell(x, y)
        best = min(best, y.min().item())
    return best


VALLEYS = [(8, 2000, False, True), (8, 2000, True, False), (20, 4000, True, False), (100, 6000, True, False)]


@pytest.mark.parametrize("d,evaluations,diagonal,turned", VALLEYS)
def test_as_good_as_cma(d, evaluations, diagonal, turned):
    "Median of five seeds within a factor of the reference, on a logarithmic scale of many decades"
    cma = pytest.importorskip("cma", reason="pip install cma")
    from bmlab.delta.bbt import _Cma
    assert cma
    f = valley(d, turned)
    ours, theirs = (
        sorted(lowest(f, make(d, 1.0, None, diagonal, seed), evaluations) for seed in range(5))[2]
        for make in (CmaEs, _Cma)
    )
    start = f(torch.zeros(1, d, dtype=torch.float64)).item()
    assert math.log(start / ours) > 0.7 * math.log(start / theirs), (ours, theirs)


def test_the_package_can_take_over():
    pytest.importorskip("cma", reason="pip install cma")
    goal = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    score = lambda p: (p - goal).square().sum()
    found = Bbt(score, torch.zeros(4, 3), dim=12, spread=1.0, solver="cma")
    assert found.run(2000).best.iloc[-1] < 1e-2 and len(found.log) == 2000


@pytest.mark.parametrize("diagonal", [False, True])
@pytest.mark.parametrize("popsize", [4, 5, 20])
def test_any_generation_stays_sound(popsize, diagonal):
    "Small and odd generations, ties and infinite losses: the covariance stays positive, the numbers finite"
    es, f = CmaEs(6, popsize=popsize, diagonal=diagonal), valley(6, False)
    for i in range(200):
        x = es.ask()
        y = f(x)
        if i % 7 == 0: y[:] = 1.0
        if i % 5 == 0: y[0] = math.inf
        es.tell(x, y)
        assert es.lengths.isfinite().all() and (es.lengths > 0).all() and math.isfinite(es.sigma)
    if not diagonal:
        torch.testing.assert_close(
            es.axes @ torch.diag(es.lengths**2) @ es.axes.T, (es.C + es.C.T) / 2, atol=1e-6, rtol=0.5
        )


@pytest.mark.parametrize("kind", ["bert", "t5", "gpt2"])
def test_other_architectures(kind, tmp_path):
    "Encoders, encoder–decoders and learned positions are scored through the same function, and the prompt can be saved"
    import transformers as tf
    torch.manual_seed(0)
    ids = torch.arange(12).view(2, 6)
    model = {
        "bert": lambda: tf.BertForMaskedLM(
            tf.BertConfig(
                hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=99
            )
        ),
        "gpt2": lambda: tf.GPT2LMHeadModel(tf.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=99)),
        "t5": lambda: tf.T5ForConditionalGeneration(
            tf.T5Config(d_model=32, d_ff=64, num_layers=2, num_heads=4, d_kv=8, vocab_size=99, decoder_start_token_id=0)
        ),
    }[kind]().eval()
    score = PromptScore(model, dict(input_ids=ids, labels=ids))
    state = {k: v.clone() for k, v in model.state_dict().items()}
    tuner = Bbt(score, score.start(3), dim=20, spread=1.0)
    log = tuner.run(200)
    assert (
        tuner.best < log.loss[:20].mean()
        and list(model.state_dict()) == list(state)
        and all(torch.equal(state[k], v) for k, v in model.state_dict().items())
    )
    with torch.no_grad():
        d = tuner.delta(model)
        torch.testing.assert_close(model(input_ids=ids, labels=ids).loss.item(), tuner.best, atol=1e-5, rtol=0)
        d.save(tmp_path)
        deltas(model).forget(d.name)


@pytest.mark.slow
def test_a_real_model():
    "SmolLM2 on a few reviews: better than no prompt and than as many random ones, and right about reviews not tuned on"
    from bmlab.models.load import load
    model, tok = load("smollm2-135m")
    model = model.float().eval()
    good = [
        "a warm and funny film",
        "the acting is superb",
        "I loved every minute",
        "a moving, clever story",
        "one of the best this year",
        "sharp, fresh and full of heart",
    ]
    bad = [
        "a dull and lifeless mess",
        "the plot makes no sense",
        "I walked out bored",
        "a tedious waste of time",
        "one of the worst this year",
        "clumsy, cold and empty",
    ]
    tok.padding_side, tok.pad_token = "left", tok.pad_token or tok.eos_token
    enc, y = (
        tok([f"{x}. All in all, it was" for x in good + bad], return_tensors="pt", padding=True),
        torch.tensor([0] * 6 + [1] * 6),
    )
    words, seen = [tok(" great").input_ids[0], tok(" terrible").input_ids[0]], torch.tensor([0, 1, 6, 7])
    modes = []
    def loss(out, batch):
        modes.append(torch.is_inference_mode_enabled() and not out.logits.requires_grad)
        return F.cross_entropy(out.logits[:, -1, words], y[seen])
    batch = {k: v[seen] for k, v in enc.items()}
    score = PromptScore(model, batch, loss)
    with torch.inference_mode(): untuned = loss(model(**batch), batch).item()
    tuner, guesses = (Bbt(score, score.start(5), dim=20, popsize=10) for _ in range(2))
    tuner.run(120)
    guesses.search_randomly(120)
    assert tuner.best < untuned and tuner.best < guesses.best, (tuner.best, untuned, guesses.best)
    assert all(modes)

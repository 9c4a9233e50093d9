"The sampler against transformers' processors, against probabilities, and against itself one row at a time"
import random

import pytest
import torch
from transformers.generation import logits_process as theirs

from bmlab.infer.sampling import Sampler, Token, exponentials, keep_likely, row_options

V = 50


def oracle(logits, prompts, temperature, top_k, top_p, min_p, repetition_penalty):
    "transformers' chain, row by row"
    rows = []
    for b, x in enumerate(logits):
        ids, x = torch.tensor([prompts[b]], dtype=torch.long), x[None].clone()
        if repetition_penalty[b] != 1: x = theirs.RepetitionPenaltyLogitsProcessor(repetition_penalty[b])(ids, x)
        if temperature[b] == 0:
            rows.append(torch.nn.functional.one_hot(x.argmax(-1), x.shape[1]).float())
            continue
        x = theirs.TemperatureLogitsWarper(temperature[b])(ids, x)
        if top_k[b]: x = theirs.TopKLogitsWarper(top_k[b])(ids, x)
        if top_p[b] < 1: x = theirs.TopPLogitsWarper(top_p[b])(ids, x)
        if min_p[b]: x = theirs.MinPLogitsWarper(min_p[b])(ids, x)
        rows.append(x.softmax(-1))
    return torch.cat(rows)


@pytest.mark.parametrize("vocab", [V, 5000])
def test_distribution_is_that_of_transformers(vocab):
    rng = random.Random(vocab)
    for turn in range(40):
        B = rng.randint(1, 4)
        options = dict(
            temperature=[rng.choice([0.0, 0.3, 0.8, 1.0, 1.7]) for _ in range(B)],
            top_k=[rng.choice([0, 1, 3, 20, 600, 10**6]) for _ in range(B)],
            top_p=[rng.choice([1.0, 0.95, 0.5, 0.01]) for _ in range(B)],
            min_p=[rng.choice([0.0, 0.05, 0.9]) for _ in range(B)],
            repetition_penalty=[rng.choice([1.0, 1.2, 0.8]) for _ in range(B)],
        )
        prompts = [[rng.randrange(vocab) for _ in range(rng.randint(1, 9))] for _ in range(B)]
        logits = torch.randn(B, vocab, generator=torch.Generator().manual_seed(turn)) * rng.choice([0.1, 1, 5, 20])
        got = Sampler(**options, seed=0).start(prompts, vocab).probabilities(logits)
        want = oracle(logits, prompts, **options)
        assert (got - want).abs().max() < 1e-6, (turn, options)
        assert ((got > 0) == (want > 0)).float().mean() > 0.999              # the same tokens are in the running


def test_penalties_on_what_was_drawn():
    "OpenAI's formula on a row's own draws, not its prompt, after the repetition penalty and before the temperature"
    rng = random.Random(0)
    for turn in range(20):
        B = rng.randint(1, 3)
        options = dict(
            temperature=[rng.choice([0.5, 1.0, 1.5]) for _ in range(B)],
            repetition_penalty=[rng.choice([1.0, 1.3]) for _ in range(B)],
            frequency_penalty=[rng.choice([0.0, 0.4, 2.0, -1.0]) for _ in range(B)],
            presence_penalty=[rng.choice([0.0, 0.9, -2.0]) for _ in range(B)],
        )
        prompts, drawn = [[rng.randrange(9) for _ in range(4)] for _ in range(B)], [[] for _ in range(B)]
        s = Sampler(**options, seed=turn).start(prompts, 9)
        for step in range(12):
            logits = torch.randn(B, 9, generator=torch.Generator().manual_seed(100 * turn + step)) * 2
            got = s.probabilities(logits)
            for b in range(B):
                x = (
                    theirs.RepetitionPenaltyLogitsProcessor(options["repetition_penalty"][b])(
                        torch.tensor([prompts[b] + drawn[b]]), logits[b : b + 1].clone()
                    )[0]
                    if options["repetition_penalty"][b] != 1 else logits[b]
                )
                counts = [drawn[b].count(j) for j in range(9)]
                mu = [
                    x[j].item()
                    - counts[j] * options["frequency_penalty"][b]
                    - (counts[j] > 0) * options["presence_penalty"][b]
                    for j in range(9)
                ]
                assert torch.allclose(
                    got[b], (torch.tensor(mu) / options["temperature"][b]).softmax(-1), atol=1e-6
                ), (turn, step, b)
            for b, t in enumerate(s(logits).tolist()): drawn[b].append(t)
        # a new user begins at nothing
        s.set(0, [3], frequency_penalty=1.0)
        assert not s.state["said"][0].any()


def test_logprobs_are_the_models_own():
    "The log-softmax of the logits as they came, whatever the options; alone, in company, and after a look"
    kw = dict(
        temperature=[0.7, 0.0, 1.2], top_k=[3, 0, 0], frequency_penalty=[1.0, 0.0, 0.0], logprobs=[2, 0, -1], seed=4
    )
    s = Sampler(**kw).start([[1], [2], [3]], V)
    for step in range(6):
        logits = torch.randn(3, V, generator=torch.Generator().manual_seed(step)) * 3
        ids = s(logits)
        tokens, raw = s.tokens(ids), logits.log_softmax(-1)
        assert tokens == ids.tolist() and [type(t) for t in tokens] == [Token, Token, int]
        assert [
            abs(t.logprob - raw[b, t].item()) < 1e-6 for b, t in enumerate(tokens[:2])
        ] == [True, True] and tokens[1].likeliest == []
        assert tokens[0].likeliest == [
            (i, v) for i, v in zip(raw[0].topk(2).indices.tolist(), raw[0].topk(2).values.tolist())
        ]
        assert s.row(0).tokens(ids[:1])[0].logprob == tokens[0].logprob
    assert torch.tensor(tokens).tolist() == ids.tolist() and s.told(2)[0] == [2, 0]
    few = Sampler(logprobs=20).start([[]], 5)
    assert len(few.tokens(few(torch.randn(1, 5)))[0].likeliest) == 5 and Sampler().start([[]], 5).told(1) is None


def test_draws_follow_the_distribution():
    "Every row with options of its own; chi-square over 6000 draws, for several seeds"
    logits = torch.randn(3, 12, generator=torch.Generator().manual_seed(0)) * 1.5
    for seed in range(2):
        s = Sampler(
            temperature=[1.0, 0.6, 1.3], top_k=[0, 5, 0], top_p=[1.0, 1.0, 0.8], seed=seed
        ).start([[], [], []], 12)
        p, n = s.probabilities(logits), 6000
        ids, mask = torch.zeros(3, 1000, dtype=torch.long), torch.ones(3, 1000, 1000, dtype=torch.bool).tril()
        counts = torch.cat(
            [s.look(logits[:, None].expand(-1, 1000, -1), ids, mask) for s.state["count"][:] in range(0, n, 1000)], 1
        )  # (each turn sets the counts) 1000 draws at a time
        for row, q in zip(counts, p):
            seen, live = row.bincount(minlength=12).float(), q > 0
            assert not seen[~live].any()
            # 11 degrees of freedom: above it two times in ten thousand
            assert (((seen - n * q) ** 2)[live] / (n * q)[live]).sum() < 36


def test_numbers_are_well_mixed():
    "Neighbouring seeds, counts, tokens, and seeds that share their low 32 bits give independent numbers"
    n = 200
    for seeds, counts in (
        (torch.full((n,), 7), torch.arange(n)), (torch.arange(n), torch.zeros(n, dtype=torch.long)),
        (torch.arange(n), torch.arange(n)), (torch.arange(n) << 32, torch.arange(n))
    ):
        e = exponentials(seeds, counts, 2000)
        assert (e > 0).all() and e.isfinite().all()
        assert abs(e.mean() - 1) < 0.01 and abs(e.var() - 1) < 0.03
        assert torch.corrcoef(e).fill_diagonal_(0).abs().max() < 0.13
        assert len(e.flatten().unique()) > 0.9 * e.numel()
    assert not torch.equal(
        exponentials(torch.tensor([0]), torch.tensor([0]), 9), exponentials(torch.tensor([2**62]), torch.tensor([0]), 9)
    )


def test_rows_do_not_depend_on_each_other():
    "A random life: rows are set anew at random; each row's draws equal those of a sampler of one row"
    rng, B = random.Random(0), 4
    s, alone = Sampler().start([[]] * B, V), [None] * B
    for turn in range(150):
        for r in range(B):
            if alone[r] is None or rng.random() < 0.1:
                options = dict(
                    temperature=rng.choice([0, 0.7, 1.0]), top_k=rng.choice([0, 10]), top_p=rng.choice([1.0, 0.9]),
                    repetition_penalty=rng.choice([1.0, 1.3])
                )
                prompt, seed = [rng.randrange(V) for _ in range(5)], rng.randrange(2**40)
                s.set(r, prompt, seed=seed, **options)
                alone[r] = Sampler(**options, seed=seed).start([prompt], V)
        b = rng.randint(1, B)
        logits = torch.randn(b, V, generator=torch.Generator().manual_seed(turn)) * 2
        assert s(logits).tolist() == [alone[r](logits[r:r + 1]).item() for r in range(b)]


def test_a_look_sees_what_drawing_finds():
    rng = random.Random(3)
    for turn in range(30):
        B, M = rng.randint(1, 3), rng.randint(1, 5)
        make = lambda: Sampler(
            temperature=[rng2.choice([0, 1.0]) for _ in range(B)], top_k=[rng2.choice([0, 7]) for _ in range(B)],
            top_p=0.9, repetition_penalty=[rng2.choice([1.0, 1.4]) for _ in range(B)],
            frequency_penalty=[rng2.choice([0, 1.5]) for _ in range(B)],
            presence_penalty=[rng2.choice([0, -1]) for _ in range(B)], seed=turn
        ).start([[1, 2]] * B, V)
        rng2 = random.Random(turn)
        a = make()
        rng2 = random.Random(turn)
        b = make()
        logits = torch.randn(B, M + 1, V, generator=torch.Generator().manual_seed(turn)) * 2
        assert torch.equal(a(logits[:, 0]), first := b(logits[:, 0]))
        drawn = torch.stack([first] + [a(logits[:, i]) for i in range(1, M + 1)], 1)
        assert torch.equal(b.look(logits[:, 1:], drawn[:, :M]), drawn[:, 1:])
        n = torch.tensor([rng.randint(0, M) for _ in range(B)])
        b.take(drawn[:, 1:], n)
        assert b.state["count"].tolist() == (n + 1).tolist()
        if a.key[2]:
            want = torch.zeros(B, V, dtype=torch.bool)
            for r in range(B):
                if a.host[r]["repetition_penalty"] != 1: want[r, [1, 2]] = True
                want[r, drawn[r, :n[r] + 1]] = True
            assert torch.equal(b.state["seen"], want)
        if a.key[3]:
            assert b.state["said"].tolist() == [drawn[r, :n[r] + 1].bincount(minlength=V).tolist() for r in range(B)]


def test_equal_logits_stay_together():
    one = lambda v, dtype=torch.float32: torch.tensor([v], dtype=dtype)
    x = torch.tensor([2.0, 1.0, 1.0, 1.0, 0.0])
    assert (keep_likely(x, one(2, torch.long), one(1.0), one(0.0)) > -torch.inf).tolist() == [True] * 4 + [False]
    assert (keep_likely(x, one(0, torch.long), one(1e-6), one(0.0)) > -torch.inf).tolist() == [True] + [False] * 4


def test_seeds():
    draw = lambda **kw: [
        Sampler(temperature=1.0, **kw).start([[]] * 3, 1000)(torch.zeros(3, 1000)).tolist() for _ in range(2)
    ]
    same, = {tuple(x) for x in draw(seed=5)}
    assert len(set(same)) == 3                                                # rows differ
    one, = {tuple(x) for x in draw(seed=[5, 5, 6])}
    assert one[0] == one[1] == same[0] != one[2]                              # a list: each as row 0
    torch.manual_seed(0)
    a = draw()
    torch.manual_seed(0)
    b = draw()
    assert a == b and a[0] != a[1]                                            # no seed: torch's generator
    before = torch.get_rng_state()
    Sampler().start([[]], 9)(torch.zeros(1, 9))
    assert torch.equal(before, torch.get_rng_state())  # greedy takes nothing from it


@pytest.mark.parametrize(
    "bad",
    [
        dict(temperature=-1), dict(temperature="hot"), dict(temperature=None), dict(top_k=-1), dict(top_k=1.5),
        dict(top_p=0), dict(top_p=1.1), dict(min_p=-0.1), dict(min_p=2), dict(repetition_penalty=0),
        dict(frequency_penalty=2.5), dict(presence_penalty="no"), dict(logprobs=-2), dict(logprobs=21),
        dict(logprobs=0.5), dict(temperature=True), dict(top_p=float("nan")), dict(temperature=float("inf")),
        dict(temperature=1e-38), dict(repetition_penalty=1e10)
    ]
)
def test_bad_options_name_themselves(bad):
    (name, value), = bad.items()
    with pytest.raises(ValueError, match=f"{name}={value!r}".replace("(", r"\(")): Sampler(**bad)
    with pytest.raises(ValueError, match=name): row_options(**bad)


def test_a_row_that_cannot_be_set_stays_as_it_was():
    s = Sampler().start([[]], V)
    with pytest.raises(IndexError): s.set(0, [V], repetition_penalty=2.0, frequency_penalty=1.0)
    assert not any(s.key)


def test_seen_are_the_prompts_tokens_whatever_else_is_asked():
    for ids in ([7, 8], torch.tensor([7, 8], dtype=torch.int32), torch.tensor([7, 8]).numpy()):
        s = Sampler(repetition_penalty=1.3, logit_bias={3: -5.0}).start([ids, [4]], V)
        assert [row.nonzero().flatten().tolist() for row in s.state["seen"]] == [[7, 8], [4]]
        assert s.state["bias"][:, 3].tolist() == [-5, -5] and s.state["bias"].sum() == -10


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_captured_sampler_draws_on():
    "A graph of the sampler: same draws as eager, also after a row has been given to another user"
    kw = dict(
        temperature=[1.0, 0.0, 0.8, 0.9], top_k=[0, 0, 50, 0], top_p=[0.9, 1.0, 1.0, 1.0],
        repetition_penalty=[1.0, 1.3, 1.1, 1.0], frequency_penalty=[0.0, 0.5, 0.0, 1.0],
        presence_penalty=[0.0, 0.0, 1.0, 0.0], logprobs=[3, -1, 0, -1], seed=[3, 0, 4, 5]
    )
    x = torch.randn(4, 30720, device="cuda", generator=torch.Generator("cuda").manual_seed(0)) * 3
    prompts = [[1], [2, 3], [4], []]
    s = Sampler(**kw).start(prompts, 30720, "cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        s(x)
        s(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph): out = s(x)
    s.start(prompts, 30720, "cuda")
    eager, key = Sampler(**kw).start(prompts, 30720, "cuda"), s.key
    for turn in range(8):
        if turn == 4:
            for sampler in (s, eager):
                sampler.set(
                    1, [7], temperature=0.7, top_p=0.8, repetition_penalty=1.1, frequency_penalty=0.3, logprobs=1,
                    seed=9
                )
            assert s.key == key
        graph.replay()
        assert torch.equal(out, want := eager(x)) and [getattr(t, "logprob", None) for t in s.tokens(out)] == [
            getattr(t, "logprob", None) for t in eager.tokens(want)
        ]


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_rows_are_set_without_waiting_for_the_gpu():
    many = dict(repetition_penalty=1.3, logit_bias={3: -5.0}, frequency_penalty=0.5, top_k=7, temperature=[0.7, 0.0])
    s = Sampler(**many, seed=4)
    prompts = [[1, 2, 3], [4]]
    s.start(prompts, V, "cuda")
    fresh = {k: v.clone() for k, v in s.state.items()}
    s(torch.randn(2, V, device="cuda"))
    torch.cuda.set_sync_debug_mode("error")
    try: s.start(prompts, V, "cuda")
    finally: torch.cuda.set_sync_debug_mode("default")
    for k, v in fresh.items(): assert torch.equal(s.state[k], v), k
    # (and the check can fail)
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchroniz"): s.state["count"][:1].item()
    finally: torch.cuda.set_sync_debug_mode("default")

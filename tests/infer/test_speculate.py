"Speculation changes how many passes a text takes, never the text: families, guessers, options; and the loop around it"
import random

import pytest
import torch
import transformers as tf

from bmlab.infer.decode import Decoder
from bmlab.infer.text import decode_tokens, end_ids, stream_text
from bmlab.infer.sampling import Sampler
from bmlab.infer.speculate import DraftModel, PromptLookup, Tree, join, lay_out, replay, walk

V = 40
SMALL = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=V)
DEVICE = [
    "cpu",
    pytest.param(
        "cuda", marks=[pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
    ),
]


def family(name):
    torch.manual_seed(0)
    model = {
        "llama": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**SMALL, num_key_value_heads=2)),
        "gpt2": lambda: tf.GPT2LMHeadModel(tf.GPT2Config(
            n_embd=32, n_layer=2, n_head=4, vocab_size=V, n_positions=128
        )),
        "mixtral": lambda: tf.MixtralForCausalLM(tf.MixtralConfig(**SMALL, num_key_value_heads=2, num_local_experts=4)),
        "gemma3": lambda: tf.Gemma3ForCausalLM(tf.Gemma3TextConfig(
            **SMALL, num_key_value_heads=2, head_dim=8, sliding_window=6,
            layer_types=["sliding_attention", "full_attention"]
        )),
        "t5": lambda: tf.T5ForConditionalGeneration(tf.T5Config(
            d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, vocab_size=V, decoder_start_token_id=0
        ))
    }[name]()
    model.generation_config.eos_token_id = None
    return model.eval()


def rows_of(tokens, n):
    out = [[] for _ in range(n)]
    for ids in tokens: [out[r].append(t) for r, t in enumerate(ids) if t is not None]
    return out


PROMPTS = [[5, 9, 3, 3, 5, 9], [7], [1, 2, 3, 4, 5, 6, 1, 2, 3]]
OPTIONS = [
    {},
    dict(
        temperature=[0.8, 1.0, 0.0], top_p=[0.9, 1.0, 1.0], top_k=[0, 9, 0], repetition_penalty=[1.0, 1.2, 1.3],
        seed=[1, 2, 3]
    )
]


@pytest.mark.parametrize("device", DEVICE)
@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral", "gemma3", "t5"])
def test_same_tokens_in_fewer_passes(name, device):
    model = family(name).to(device)
    d, noisy = Decoder(model, max_batch=3, max_ctx=64), family("llama").to(device)
    assert d.mode == "static", d.why_generate
    drafts = [
        PromptLookup(length=5), PromptLookup(length=4, branches=3), DraftModel(noisy, branches=2),
        Tree(PromptLookup(), DraftModel(noisy, length=3), nodes=14)
    ]
    for options in OPTIONS:
        want = rows_of(decode_tokens(d, PROMPTS, Sampler(**options), [15, 6, 15], stats=(one := {})), 3)
        assert one["passes"] == 15 and one["drafted"] == 0
        if not options and device == "cpu":
            for p, w, n in zip(PROMPTS, want, (15, 6, 15)):
                with torch.no_grad():
                    out = model.generate(
                        torch.tensor([p]), attention_mask=torch.ones(1, len(p)), max_new_tokens=n, do_sample=False,
                        pad_token_id=0
                    )[0]
                assert w == out[1 if name == "t5" else len(p):].tolist()
        for draft in drafts:
            stats = {}
            assert (
                rows_of(decode_tokens(d, PROMPTS, Sampler(**options), [15, 6, 15], draft=draft, stats=stats), 3) == want
            )
            assert stats["new_tokens"] == 36 and stats["passes"] <= 15 and 0 <= stats["accepted"] <= stats["drafted"]
    assert not any(d.held)


@pytest.mark.parametrize("device", DEVICE)
def test_a_source_and_an_output_that_a_draft_has_no_room_for(device):
    d, draft = Decoder(family("t5").to(device), max_batch=3, max_ctx=24), DraftModel(family("llama").to(device))
    prompts = [list(range(3, 23)), [5, 6], list(range(3, 27))]                  # runs out of room; has it; never had it
    want = rows_of(decode_tokens(d, prompts, max_new_tokens=20), 3)
    for guesser in (draft, Tree(PromptLookup(), draft)):
        assert (
            rows_of(decode_tokens(d, prompts, max_new_tokens=20, draft=guesser, stats=(stats := {})), 3) == want
            and stats["drafted"] > 0
        )


@pytest.mark.parametrize("device", DEVICE)
def test_a_draft_may_be_asked_twice(device):
    "The same answer, for all rows or some, with nothing added in between; and it goes on rightly afterwards"
    model = family("llama").to(device)
    d, draft = Decoder(model, max_batch=3, max_ctx=64), DraftModel(family("gpt2").to(device), length=3, branches=2)
    draft.begin(d, Sampler(**OPTIONS[1]).start(PROMPTS, V, device))
    for r, p in enumerate(PROMPTS): draft.set(r, p)
    first = draft.propose([0, 1, 2])
    assert (
        draft.propose([0, 1, 2]) == first and draft.propose([0, 1]) == {r: first[r] for r in (0, 1)}
        and draft.propose([0, 1, 2], length=2).keys() == first.keys()
    )
    for r in range(3): draft.add(r, [4, 9])
    again = draft.propose([0, 1, 2])
    fresh = DraftModel(draft.model, length=3, branches=2)
    fresh.begin(d, draft.sampler)
    for r, p in enumerate(PROMPTS): fresh.set(r, p + [4, 9])
    assert fresh.propose([0, 1, 2]) == again == draft.propose([0, 1, 2])


def test_penalties_on_what_was_said_and_a_draft():
    "Counts of a text that is being guessed are those of the same text drawn one by one"
    model = family("llama")
    d = Decoder(model, max_batch=3, max_ctx=64)
    options = dict(
        temperature=[0.0, 1.0, 0.7], frequency_penalty=[1.0, 0.5, 0.0], presence_penalty=[0.0, 0.5, -1.0],
        logprobs=[0, -1, 2], seed=3
    )
    want = rows_of(decode_tokens(d, PROMPTS, Sampler(**options), 15, stats=(one := {})), 3)
    assert want != rows_of(decode_tokens(d, PROMPTS, Sampler(temperature=options["temperature"], seed=3), 15), 3)
    for draft in (
        PromptLookup(length=5), PromptLookup(length=4, branches=3), DraftModel(model, branches=2),
        Tree(PromptLookup(), DraftModel(model, length=3), nodes=14)
    ):
        assert rows_of(decode_tokens(d, PROMPTS, Sampler(**options), 15, draft=draft, stats=(two := {})), 3) == want
        for r in (0, 2):
            assert two["tokens"][r] == one["tokens"][r] and all(
                abs(a.logprob - b.logprob) < 1e-4 and [i for i, _ in a.likeliest] == [i for i, _ in b.likeliest]
                for a, b in zip(two["tokens"][r], one["tokens"][r])
            )


def test_right_guesses_are_all_taken():
    model = family("llama")
    d = Decoder(model, max_batch=3, max_ctx=64)
    for options in OPTIONS:
        rows_of(
            decode_tokens(d, PROMPTS, Sampler(**options), 21, draft=DraftModel(model, length=4), stats=(stats := {})), 3
        )
        assert stats["passes"] == 5 and stats["accepted"] == stats["drafted"] == 3 * 16


@pytest.mark.parametrize("kind", ["chain", "tree"])
def test_distribution_is_exact(kind):
    "Pairs of tokens drawn with guesses, over many seeds, follow the model's probabilities (chi-square)"
    torch.manual_seed(1)
    model = tf.LlamaForCausalLM(tf.LlamaConfig(**SMALL | dict(vocab_size=5), initializer_range=0.4)).eval()
    d, n, prompt = Decoder(model, max_batch=128, max_ctx=16), 24 * 128, [1, 2, 3]
    with torch.no_grad():
        p1 = model(torch.tensor([prompt])).logits[0, -1].softmax(-1)
        p2 = torch.stack([model(torch.tensor([prompt + [t]])).logits[0, -1].softmax(-1) for t in range(5)])
        p3 = torch.stack([
            torch.stack([model(torch.tensor([prompt + [t, u]])).logits[0, -1].softmax(-1) for u in range(5)])
            for t in range(5)
        ])
    counts = torch.zeros(5, 5, 5)
    class Fixed:
        nodes = 8
        def begin(self, *_): pass
        set = add = drop = lambda self, *_: None
        def propose(self, rows, length=None):
            return {r: ([[0, 3]] if kind == "chain" else [[0, 3], [1], [0, 2], [4, 4]]) for r in rows}
    for batch in range(n // 128):
        for a, b, c in rows_of(
            decode_tokens(d, [prompt] * 128, Sampler(temperature=1.0, seed=batch), 3, draft=Fixed()), 128
        ):
            counts[a, b, c] += 1
    want = n * p1[:, None, None] * p2[:, :, None] * p3
    big = want > 3
    chi2 = ((counts - want) ** 2 / want)[big].sum().item()
    assert chi2 < big.sum() + 4 * (2 * big.sum()) ** 0.5, (chi2, big.sum())


def test_trees_at_random():
    "Laying out and walking: against following each chain by hand"
    rng = random.Random(0)
    for _ in range(200):
        chains = [[rng.randrange(4) for _ in range(rng.randint(0, 5))] for _ in range(rng.randint(0, 4))]
        g = join(9, chains, nodes=rng.randint(1, 16))
        ids, mask, depth = lay_out([g, join(3, [])], width=rng.choice([None, 12]))
        story = lambda i: story(g.before[i]) + [g.tokens[i]] if i else []
        texts = [story(i) for i in range(len(g.tokens))]
        assert len({tuple(t) for t in texts}) == len(texts) and ids[0, :len(g.tokens)].tolist() == g.tokens
        if mask is None: assert g.is_chain
        else:
            for i in range(len(g.tokens)):
                seen = mask[0, i].nonzero().flatten().tolist()
                assert [g.tokens[j] for j in seen[1:]] == texts[i] and seen[0] == 0 and depth[0, i] == len(texts[i])
        drawn = [rng.randrange(4) for _ in g.tokens]
        new, path = walk(g, drawn)
        assert [drawn[i] for i in path] == new and texts[path[-1]] == new[:-1]
        # it went as far as it could
        assert not any(b == path[-1] and t == new[-1] for i, (t, b) in enumerate(zip(g.tokens, g.before)) if i)


def test_lookup_against_a_search():
    "The table of places finds what looking through the text finds"
    rng = random.Random(0)
    for _ in range(60):
        text = [rng.randrange(4) for _ in range(rng.randint(1, 30))]
        look = PromptLookup(ngram=3, length=4, least=rng.choice([1, 2]))
        length = 4
        look.set(0, text[:len(text) // 2])
        look.add(0, text[len(text) // 2:])
        want = []
        for n in range(min(3, len(text)), look.least - 1, -1):
            at = next((i + n for i in range(len(text) - n - 1, -1, -1) if text[i:i + n] == text[-n:]), None)
            if at is not None:
                want = [(text + [None] * 9)[at + i] for i in range(length)]
                period = len(text) - at
                break
        got = look.propose([0])[0]
        if not want: assert got == []
        else:
            for i, t in enumerate(want):
                if t is None: want[i] = want[i - period]
            assert got == [want]


def test_chains_end_where_the_room_ends():
    "Prompts that nearly fill the cache, and limits below a guess's length"
    model = family("llama")
    d = Decoder(model, max_batch=2, max_ctx=32)
    prompts = [[1, 2, 3, 4] * 6, [5, 6] * 3]
    for n in ([8, 3], [8, 26], [1, 1], [2, 26]):
        want = rows_of(decode_tokens(d, prompts, max_new_tokens=n), 2)
        assert [len(w) for w in want] == n
        for draft in (PromptLookup(length=12), DraftModel(model, length=6, branches=2)):
            assert rows_of(decode_tokens(d, prompts, max_new_tokens=n, draft=draft), 2) == want


def test_a_stop_id_inside_a_guess_ends_the_row():
    model = family("llama")
    d = Decoder(model, max_batch=3, max_ctx=64)
    want = rows_of(decode_tokens(d, PROMPTS, max_new_tokens=20), 3)
    for stop in {want[0][3], want[1][6], want[2][9]}:
        cut = [w[:w.index(stop) + 1] if stop in w else w for w in want]
        for draft in (None, DraftModel(model, length=5), PromptLookup()):
            assert rows_of(decode_tokens(d, PROMPTS, max_new_tokens=20, stop_ids=[stop], draft=draft), 3) == cut


def test_refusals():
    torch.manual_seed(0)
    ant = tf.CpmAntForCausalLM(tf.CpmAntConfig(
        vocab_size=V, hidden_size=32, num_attention_heads=4, dim_head=8, dim_ff=64, num_hidden_layers=2, prompt_length=4
    )).eval()
    d = Decoder(ant, max_batch=1, max_ctx=32)
    with pytest.raises(ValueError, match="cannot check several tokens"):
        decode_tokens(d, [[1, 2]], draft=PromptLookup())
    llama = Decoder(family("llama"), max_batch=1, max_ctx=32)
    with pytest.raises(ValueError, match="draft CpmAnt"):
        list(decode_tokens(llama, [[1, 2]], max_new_tokens=4, draft=DraftModel(ant)))
    assert rows_of(decode_tokens(llama, [[1, 2]], max_new_tokens=4), 1)                       # and the decoder is free


@pytest.mark.slow
def test_smollm2_says_the_same():
    from bmlab.models.load import load
    model, tok = load("smollm2-135m")
    d = Decoder(model, max_batch=2, max_ctx=256)
    text = "The quick brown fox jumps over the lazy dog near the river bank."
    prompts = [
        [{"role": "user", "content": f"Repeat this text word for word: {text}"}],
        "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return",
    ]
    say = lambda **kw: [
        "".join(p for r, p in out if r == i) for out in [list(stream_text(d, tok, prompts, max_new_tokens=24, **kw))]
        for i in range(2)
    ]
    want = say()
    assert "quick brown fox" in want[0]
    for draft in (PromptLookup(), PromptLookup(length=5, branches=3)):
        stats = {}
        assert say(draft=draft, stats=stats) == want and stats["accepted"] > 8
    drawn = say(sampler=Sampler(temperature=0.7, top_p=0.9, seed=1))
    assert say(sampler=Sampler(temperature=0.7, top_p=0.9, seed=1), draft=PromptLookup()) == drawn != want
    ids = tok("one two one two one two", add_special_tokens=False)["input_ids"]
    assert sum(replay(PromptLookup(), ids[:4], ids[4:])) == len(ids) - 4 and end_ids(model, tok)

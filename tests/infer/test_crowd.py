"A doubled load gives each request the text that it has alone, whatever is shared, sliced or at fault beside it"
import random

import pytest
import torch
import transformers as tf
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from bmlab.delta.bank import DeltaBank
from bmlab.delta.delta import deltas
from bmlab.delta.lora import Lora
from bmlab.delta.soft import SoftPrompt
from bmlab.infer.batcher import Batcher
from bmlab.infer.decode import Decoder
from bmlab.infer.fused import fuse_decode
from bmlab.infer.sampling import Sampler
from bmlab.infer.text import stream_text

LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@pytest.fixture(scope="module")
def tok():
    t = Tokenizer(models.BPE())
    t.pre_tokenizer, t.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    t.train_from_iterator(["plain"], trainers.BpeTrainer(vocab_size=262, initial_alphabet=letters, show_progress=False))
    return tf.PreTrainedTokenizerFast(tokenizer_object=t)


def llama(tok, layers=2):
    torch.manual_seed(0)
    m = tf.LlamaForCausalLM(tf.LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=len(tok)
    )).eval()
    m.generation_config.eos_token_id = None
    return m


@pytest.fixture(scope="module")
def model(tok): return llama(tok)


def alone(d, tok, prompt, max_new_tokens, stop=(), stop_ids=(), seed=None, **options):
    texts = stream_text(d, tok, [prompt], Sampler(**options, seed=[seed]), max_new_tokens, stop, stop_ids)
    return "".join(p for _, p in texts)


def load(n, vocab, longest=40, most=6):
    "Requests, half of which begin like one of three others"
    rng = random.Random(0)
    ids = lambda k: [rng.randrange(vocab) for _ in range(k)]
    starts = [ids(20), ids(33), ids(17)]
    for i in range(n):
        yield dict(
            prompt=(rng.choice(starts) if i % 2 else []) + ids(rng.randint(1, longest // 2)),
            max_new_tokens=rng.randint(1, most), stop_ids=rng.choice([(), (7, 8, 9)]),
            **rng.choice([{}, dict(temperature=0.9, seed=i), dict(repetition_penalty=1.3)])
        )


def said(b, asks):
    with b.wake: handles = [b.submit(**a) for a in asks]
    return ["".join(h) for h in handles]


def test_a_doubled_load(model, tok):
    d, asks = Decoder(model, 12, 80), list(load(128, len(tok)))
    want = [alone(d, tok, **a) for a in asks]
    for share, ahead in ((True, True), (False, True), (True, False)):
        with Batcher(d, tok, share=share, slice=24) as b:
            b.runs_ahead = ahead
            assert said(b, asks[:64]) == want[:64] and said(b, asks) == want
            assert (b.stats["reused"] > 1000) == share
            assert b.stats["reused"] + b.stats["read"] == sum(len(a["prompt"]) for a in asks[:64] + asks)


@pytest.mark.parametrize("by_row", [True, False])
def test_steps_that_are_filled_up(by_row, model, tok):
    "A captured step has one of few sizes: rows that rest, wait or are just read fill it up, and hold what they held"
    asks = [a | dict(stop_ids=()) for a in load(40, len(tok))]
    asks += [dict(prompt=list(range(3, 82)), max_new_tokens=1) for _ in range(2)]            # a row that is full
    want = [alone(Decoder(model, 1, 80), tok, **a) for a in asks]
    d = Decoder(model, 7, 80)
    d.graph, d._run = True, lambda body, *how, **given: body()                  # as on a GPU, not captured
    d._by_row, d._pass_by_row, d.views = by_row, lambda *a: None, [len(d.span.steps)]
    sizes, choose = set(), d.choose
    d.choose = lambda rows: (choose(rows), sizes.add((len(rows), len(d._stepped))))
    with Batcher(d, tok, slice=8) as b:
        b.runs_ahead = True
        assert said(b, asks) == want and said(b, asks[::-1]) == want[::-1]
    assert {n for _, n in sizes} <= {1, 2, 4, 7} and (5, 7) in sizes and ((3, 4) in sizes or not by_row)


@pytest.mark.parametrize("kernels", ["torch", pytest.param("triton", marks=pytest.mark.slow)])
def test_fused_blocks_and_eight_bit_caches(kernels, tok):
    "With attention that goes by rows (Triton's interpreter) each prompt token finds its own keys"
    # (the interpreter is slow)
    n, most, m = *((2, 2) if kernels == "triton" else (6, 4)), llama(tok, layers=1)
    asks = [a | dict(prompt=a["prompt"][-9:], max_new_tokens=most) for a in load(n, len(tok), 10)]
    kinds = (8,) if kernels == "triton" else (16, 8)
    want = {bits: [alone(Decoder(m, 1, 48, kv_bits=bits), tok, **a) for a in asks] for bits in kinds}
    fuse_decode(m, kernels=kernels)
    for bits in kinds:
        d = Decoder(m, 2, 48, kv_bits=bits)
        assert d.attends_by_row == (kernels == "triton")
        with Batcher(d, tok, slice=16) as b: assert said(b, asks) == want[bits]


def test_a_long_prompt_lets_the_others_go_on(model, tok):
    "Between two slices of it every running row makes a token"
    d = Decoder(model, 3, 200)
    short, long = dict(prompt=[5, 6, 7], max_new_tokens=60), dict(prompt=list(range(3, 123)), max_new_tokens=3)
    want = [alone(d, tok, **a) for a in (short, long)]
    with Batcher(d, tok, slice=8) as b:
        first = b.submit(**short, stop_ids=())
        next(first)
        b.trace = []
        second = b.submit(**long, stop_ids=())
        assert ["".join(second), len(first.ids) >= 15] == [want[1], True]
        first.cancel()
        reads = [i for i, (_, what, rows) in enumerate(b.trace) if what == "read"]
        assert len(reads) == 15 and all(n == 8 for i in reads for _, n in b.trace[i][2].values())
        assert all(any(what == "step" for _, what, _ in b.trace[i + 1:j]) for i, j in zip(reads, reads[1:]))


def test_a_beginning_that_is_just_being_read_is_read_once(model, tok):
    d, common = Decoder(model, 8, 120), list(range(3, 63))
    asks = [dict(prompt=common + [i + 1, 5], max_new_tokens=4) for i in range(8)]
    want = [alone(d, tok, **a) for a in asks]
    with Batcher(d, tok, slice=16) as b:
        assert said(b, asks) == want
        assert (b.stats["reused"], b.stats["read"]) == (7 * 60, 62 + 7 * 2)
        # one that gives up half-way leaves those that waited for it to themselves
        asks = [dict(a, prompt=[9] + a["prompt"]) for a in asks]
        with b.wake: handles = [b.submit(**a) for a in asks]
        handles[0].cancel()
        assert ["".join(h) for h in handles[1:]] == [alone_of(model, tok, a) for a in asks[1:]]


def test_giving_up_before_the_prompt_was_begun(model, tok):
    "The row holds what it was left with, whatever the request was about"
    first, other = [dict(prompt=list(range(a, a + 40)) + [9], max_new_tokens=4) for a in (3, 60)]
    d = Decoder(model, 2, 120)
    want = [alone(d, tok, **a) for a in (first, other)]
    with Batcher(d, tok, slice=16) as b:
        assert said(b, [first]) == want[:1]
        for _ in range(3):
            with b.wake: handles = [b.submit(**other) for _ in range(2)]        # the second waits for the first one's
            b.call(handles[1].cancel)
            assert ["".join(handles[0]), handles[1].cancelled] == [want[1], True]
            assert said(b, [other, first]) == [want[1], want[0]]


def alone_of(model, tok, ask): return alone(Decoder(model, 1, 120), tok, **ask)


def test_errors_in_a_forward_of_several_prompts(model, tok):
    "Each prompt is tried by itself then, and the one at fault fails alone"
    d, asks = Decoder(model, 6, 80), list(load(6, len(tok)))
    want, real, asks[2]["prompt"] = [alone(d, tok, **a) for a in asks], d.prefill, [1, 2, 200, 3]
    def prefill(prompts, **options):
        if any(p and 200 in p[2:3] for p in prompts): raise RuntimeError("this one cannot be read")
        return real(prompts, **options)
    d.prefill = prefill
    with Batcher(d, tok) as b:
        with b.wake: handles = [b.submit(**a) for a in asks]
        for i, h in enumerate(handles):
            if i != 2: assert "".join(h) == want[i]
        with pytest.raises(RuntimeError, match="cannot be read"): list(handles[2])
    assert not any(d.held)


def lora(m, name, seed):
    d = Lora(m, r=1 + seed, modules=LINEAR, name=name)
    torch.manual_seed(seed)
    for p in d.parameters(): p.data.normal_(std=0.3)
    return d


@pytest.mark.parametrize("kernels", [None, "torch"])
def test_adapters_side_by_side(kernels, tok):
    "Each request goes through its own, in one batch with others' and with nobody's, and costs no step more"
    m = llama(tok)
    if kernels: fuse_decode(m, kernels=kernels)
    users = {u: lora(m, u, i) for i, u in enumerate(["ann", "bob", "cy"])}
    d, asks = Decoder(m, 5, 80), list(load(15, len(tok)))
    whose, want = [[None, *users][i % 4] for i in range(15)], []
    for u, a in zip(whose, asks):
        with deltas(m).use(*([u] if u else [])): want.append(alone(d, tok, **a))
    bank = DeltaBank(m, users)
    for ahead in (False, True):
        with Batcher(d, tok, bank=bank, slice=24) as b:
            b.runs_ahead = ahead
            assert b.mixes
            assert said(b, [dict(a, adapter=u) for u, a in zip(whose, asks)]) == want
            assert b.stats["steps"] < sum(a["max_new_tokens"] for a in asks) / 2.5
            # texts that rest are an adapter's own
            assert said(b, [dict(a, adapter=u) for u, a in zip(whose, asks)]) == want
    # one that cannot stand beside the others: from then on one adapter runs at a time
    with Batcher(d, tok, bank=bank) as b:
        b.add_adapter("soft", SoftPrompt(m, 3).detach())
        assert not b.mixes
        assert said(b, [dict(a, adapter=u) for u, a in zip(whose, asks)]) == want


@pytest.mark.slow
def test_a_doubled_load_on_a_real_model():
    from bmlab.models.load import load as load_model
    m, tok = load_model("smollm2-135m", device="cpu")
    asks = list(load(128, 40000, longest=120, most=10))
    d = Decoder(m, 24, 200)
    want = [alone(d, tok, **a) for a in asks]
    for share in (True, False):
        with Batcher(d, tok, share=share) as b: assert said(b, asks[:64]) == want[:64] and said(b, asks) == want


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("bits", [16, 8])
def test_a_doubled_load_in_graphs(bits, tok):
    "Float32 on a GPU: fused blocks, captured steps of chosen rows and captured forwards over prompts, adapters mixed"
    torch.manual_seed(0)
    m = tf.LlamaForCausalLM(tf.LlamaConfig(
        hidden_size=256, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=len(tok)
    )).eval().cuda()
    m.generation_config.eos_token_id = None
    asks = list(load(96, len(tok), 80, 12))
    plain = Decoder(m, 1, 140, kv_bits=bits, graph=False)
    want = [alone(plain, tok, **a) for a in asks]
    fuse_decode(m)
    users = {u: lora(m, u, i) for i, u in enumerate(["ann", "bob", "cy"])}
    whose, own = [[None, *users][i % 4] for i in range(32)], []
    for u, a in zip(whose, asks):
        with deltas(m).use(*([u] if u else [])): own.append(alone(plain, tok, **a))
    bank = DeltaBank(m, users)
    for share in (True, False):
        d = Decoder(m, 24, 140, kv_bits=bits)
        assert d.attends_by_row
        with Batcher(d, tok, share=share, slice=64, bank=bank) as b:
            assert said(b, asks[:48]) == want[:48] and said(b, asks) == want
            assert said(b, [dict(a, adapter=u) for u, a in zip(whose, asks)]) == own
            assert said(b, asks[:48]) == want[:48]
        assert d.graph and d.why_eager is None and d.attends_by_row

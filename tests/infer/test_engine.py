"""Engines: every way of placing a model gives the same numbers, deltas inside, refusals that leave nothing behind"""
import bisect
import gc
import threading
import weakref
from types import SimpleNamespace

import pytest
import torch
import transformers as tf

from bmlab.all import (
    Adapter,
    CpmAntTied,
    DeltaBank,
    Lora,
    Sampler,
    SimulatedLink,
    decode_tokens,
    load,
    pack_linears,
    plan_inference,
    wrap,
)
from bmlab.infer.decode import Decoder
from bmlab.infer.fused import fuse_decode
from bmlab.models.glm import BlankGlmConfig, BlankGlmForConditionalGeneration
from bmlab.infer.speculate import DraftModel, PromptLookup

TINY = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=5, num_attention_heads=4, vocab_size=99)
SMALL = dict(n_embd=64, n_layer=5, n_head=4, vocab_size=99, n_positions=128)
CPM = dict(
    vocab_size=99, hidden_size=64, num_attention_heads=4, dim_head=16, dim_ff=128, num_hidden_layers=5, prompt_length=4
)
MODELS = {
    "llama": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**TINY, num_key_value_heads=2)),
    "t5": lambda: tf.T5ForConditionalGeneration(tf.T5Config(
        d_model=64, d_kv=16, d_ff=128, num_layers=4, num_heads=4, vocab_size=99, dropout_rate=0.0,
        decoder_start_token_id=0
    )),
    "mixtral": lambda: tf.MixtralForCausalLM(tf.MixtralConfig(**TINY, num_key_value_heads=2, num_local_experts=4)),
    "gpt2": lambda: tf.GPT2LMHeadModel(tf.GPT2Config(**SMALL)),
    "gptj": lambda: tf.GPTJForCausalLM(tf.GPTJConfig(**SMALL, rotary_dim=8)),
    "gemma3": lambda: tf.Gemma3ForCausalLM(tf.Gemma3TextConfig(
        **TINY, num_key_value_heads=2, head_dim=16, sliding_window=8
    )),
    "ant": lambda: CpmAntTied(tf.CpmAntConfig(**CPM)),
    "glm": lambda: BlankGlmForConditionalGeneration(BlankGlmConfig(
        vocab_size=99, hidden_size=64, num_attention_heads=4, num_hidden_layers=5, max_sequence_length=128,
        sop_token_id=98, mask_token_ids=[1, 2]
    )),
    "theirs": lambda: tf.CpmAntForCausalLM(tf.CpmAntConfig(**CPM))
}
PROMPTS = [[5, 6, 7, 8, 9, 5, 6], [11, 12, 13]]


def made(name):
    torch.manual_seed(0)
    return MODELS[name]().eval()


def limit_for(model, streamed, **options):
    "A limit under which about so many blocks stream"
    if not streamed: return None
    whole = plan_inference(model, **options)
    low, high = whole.min_bytes, whole.peak_bytes
    fits = lambda i: len(whole.at(high - (high - low) * i // 64).streamed) >= streamed
    return high - (high - low) * bisect.bisect_left(range(64), True, key=fits) // 64


def decoded(decoder, steps=5):
    "Logits of a prompt and of `steps` greedy steps"
    if decoder.net.facts.source: decoder.encode(PROMPTS)
    out = [decoder.prefill(
        None if decoder.net.facts.source else [p + (decoder.net.facts.opening or []) for p in PROMPTS]
    )]
    for _ in range(steps): out.append(decoder.step(out[-1].view(2, -1, out[-1].shape[-1])[:, -1].argmax(-1))[:, -1])
    decoder.free()
    return torch.stack(out)


OPTIONS = dict(max_batch=2, max_ctx=64)


@pytest.mark.parametrize("bits", [None, pytest.param(8, marks=pytest.mark.slow), 4])
@pytest.mark.parametrize("name", [n for n in MODELS if n != "theirs"])
def test_wrapped_equals_unwrapped(name, bits):
    plain = made(name)
    if bits: pack_linears(plain, bits=bits, group_size=32)
    fuse_decode(plain)
    want = decoded(Decoder(plain, 2, 64))
    for streamed, slots in {None: ((0, 2), (3, 2), (5, 3)), 8: ((3, 2),), 4: ((5, 3),)}[bits]:
        model = made(name)
        limit = limit_for(model, streamed, bits=bits, group_size=32, slots=slots, **OPTIONS)
        with wrap(
            model, bits=bits, memory_limit=limit, slots=slots, group_size=32, link=SimulatedLink(order="random"),
            device="cpu", **OPTIONS
        ) as e:
            assert bool(e.plan.streamed) == bool(streamed) and e.decoder.mode == "static"
            assert torch.equal(decoded(e.decoder), want), (streamed, slots)


@pytest.mark.parametrize("name", ["ant", "glm"])
def test_prompts_that_are_read_from_both_sides(name):
    "The tokens of `generate`, with streamed weights, ragged prompts, and rows that come one by one"
    plain, model = made(name), made(name)
    prompts = [p + getattr(plain, "opening", []) for p in (PROMPTS[0], PROMPTS[1], list(range(20, 50)))]
    with torch.no_grad():
        want = [
            plain.generate(
                torch.tensor([p]), max_new_tokens=9, do_sample=False, eos_token_id=None, pad_token_id=0
            )[0, len(p) :].tolist()
            for p in prompts
        ]
    with wrap(model, memory_limit=limit_for(model, 3, **OPTIONS), device="cpu", **OPTIONS) as e:
        assert e.plan.streamed and e.decoder.mode == "static"
        if name == "ant": assert e.plan.kv_cache == e.decoder.cache.bytes      # the vectors in front are planned
        steps = list(decode_tokens(e.decoder, prompts[:2], max_new_tokens=9))
        assert [list(t) for t in zip(*steps)] == want[:2]
        # one after the other
        first = [e.decoder.prefill([prompts[2]], rows=[1]), e.decoder.prefill([prompts[0]], rows=[0])]
        now, out = torch.cat(first[::-1]).argmax(-1), []
        for _ in range(9):
            out.append(now.tolist())
            now = e.decoder.step(now)[:, 0].argmax(-1)
        assert [list(t) for t in zip(*out)] == [want[0], want[2]]
        if name == "glm":
            with e.batcher() as b, pytest.raises(ValueError, match="begin a piece"): b.submit(PROMPTS[0], 4)


def test_a_model_that_decodes_by_generate_only():
    plain, model = made("theirs"), made("theirs")
    fuse_decode(plain)
    limit = limit_for(model, 3, max_ctx=64)
    ids = torch.tensor([PROMPTS[0]])
    with torch.no_grad(), wrap(model, memory_limit=limit, max_ctx=64, device="cpu") as e:
        # (the embedding has more rows)
        assert e.plan.streamed and e.decoder.mode == "generate" and e.decoder.vocab == 99
        assert torch.equal(e.model(input_ids=ids).logits, plain(input_ids=ids).logits)
        assert (
            e.model.generate(ids, max_new_tokens=6, do_sample=False).tolist()
            == plain.generate(ids, max_new_tokens=6, do_sample=False).tolist()
        )


@pytest.mark.parametrize("name", ["llama", "t5", "theirs"])
def test_logits_that_are_no_numbers_are_one_error(name):
    "Greedy, drawn, by beams, with a draft, by transformers' own loop; the engine serves the next prompt"
    model, tok = made(name), SimpleNamespace(decode=lambda ids, **_: " ".join(map(str, ids)), eos_token_id=None)
    model.generation_config.eos_token_id = None
    weight = model.get_input_embeddings().weight
    draft = {"llama": lambda: DraftModel(made("llama"), 3), "t5": PromptLookup}.get(name, lambda: None)()
    with wrap(model, tok, draft=draft, device="cpu", **OPTIONS) as e:
        want = e.generate([[5, 6, 7]], max_new_tokens=5)
        for options in (
            {}, dict(temperature=0.8, seed=1),
            dict(
                temperature=0.8, top_k=9, top_p=0.9, min_p=0.01, repetition_penalty=1.2, frequency_penalty=0.2,
                logprobs=3
            ),
            dict(beams=2)
        ):
            before = weight.data[11].clone()
            weight.data[11] = torch.nan
            calls = [lambda: e.generate([[5, 11, 6]], max_new_tokens=5, **options)] + [
                lambda: list(e.stream([5, 11, 6], max_new_tokens=5, **options))
            ] * ("beams" not in options)
            if e.decoder.mode == "static":
                calls.append(lambda: e.generate(
                    [[5, 6, 7], [5, 11, 6]], max_new_tokens=5, **options
                )) if "beams" not in options else None
            for call in calls:
                with pytest.raises(FloatingPointError, match="logits are nan"): call()
                assert not e.busy
            weight.data[11] = before
            assert e.generate([[5, 6, 7]], max_new_tokens=5) == want, options


def test_a_draft_whose_logits_are_no_numbers_guesses_wrong():
    small, d = made("llama"), Decoder(made("llama"), 1, 64)
    said = lambda draft=None: [t for (t,) in decode_tokens(d, [PROMPTS[0]], max_new_tokens=12, draft=draft)]
    want, draft = said(), DraftModel(small, 3)
    assert said(draft) == want
    small.lm_head.weight.data[3] = torch.nan
    assert said(draft) == want


@pytest.mark.parametrize("kv_bits, store", [(8, "ram"), (16, "mmap")])
def test_cache_in_int8_and_slabs_in_a_file(kv_bits, store):
    with wrap(made("llama"), kv_bits=kv_bits, device="cpu", **OPTIONS) as e: want = decoded(e.decoder)
    model = made("llama")
    with wrap(
        model, memory_limit=limit_for(model, 3, kv_bits=kv_bits, **OPTIONS), kv_bits=kv_bits, store=store, device="cpu",
        **OPTIONS
    ) as e:
        assert torch.equal(decoded(e.decoder), want)


def test_deltas_inside():
    plain, model = made("llama"), made("llama")
    def drawn(m, cls=Lora, seed=0, **kw):
        d = cls(m, **kw)
        torch.manual_seed(seed)
        for p in d.parameters(): torch.nn.init.normal_(p, std=0.3)
        return d
    base = decoded(Decoder(plain, 2, 64))
    with wrap(model, memory_limit=limit_for(model, 3, **OPTIONS), device="cpu", fuse=False, **OPTIONS) as e:
        a, b = drawn(plain, r=4), drawn(e.model, r=4)
        assert torch.equal(decoded(e.decoder), decoded(Decoder(plain, 2, 64)))
        assert not torch.equal(decoded(e.decoder), base)
        e.streamer.refresh()                                                   # the delta streams with its blocks
        assert torch.equal(decoded(e.decoder), decoded(Decoder(plain, 2, 64)))
        a.detach()
        b.detach()
        assert torch.equal(decoded(e.decoder), base)
        banks = [
            DeltaBank(m, {"x": drawn(m, r=2, seed=1, name="x"), "y": drawn(m, Adapter, bottleneck=4, seed=2, name="y")})
            for m in (plain, e.model)
        ]
        with banks[0].route(["x", "y"]), banks[1].route(["x", "y"]):
            assert torch.equal(decoded(e.decoder), decoded(Decoder(plain, 2, 64)))


def test_fused_steps_aside_for_a_delta():
    model = made("llama")
    with wrap(model, device="cpu", **OPTIONS) as e:
        base = decoded(e.decoder)
        d = Lora(e.model, r=4)
        for p in d.parameters(): torch.nn.init.normal_(p, std=0.3)
        plain = made("llama")
        d.copy_to(plain)
        torch.testing.assert_close(decoded(e.decoder), decoded(Decoder(plain, 2, 64)), atol=1e-4, rtol=1e-4)
        d.detach()
        assert torch.equal(decoded(e.decoder), base)


def test_close_leaves_the_model_as_it_was():
    model = made("gpt2")
    keys, classes = list(model.state_dict()), [type(m) for m in model.modules()]
    before = {k: t.clone() for k, t in model.state_dict().items()}
    e = wrap(model, memory_limit=limit_for(model, 3, **OPTIONS), device="cpu", **OPTIONS)
    assert all(torch.equal(t, before[k]) for k, t in model.state_dict().items())
    with pytest.raises(RuntimeError, match="close"): e.model.half()
    e.close()
    e.close()
    assert [type(m) for m in model.modules()] == classes and list(model.state_dict()) == keys
    assert all(torch.equal(t, before[k]) for k, t in model.state_dict().items())
    dead = weakref.ref(e)
    del e
    gc.collect()
    assert dead() is None
    model.half()


def test_a_failed_wrap_leaves_the_model_as_it_was(monkeypatch):
    model = made("llama")
    classes, limit = [type(m) for m in model.modules()], limit_for(model, 3, **OPTIONS)
    import bmlab.infer.engine as infer
    def broken(*a, **kw): raise MemoryError("no room for the cache")
    monkeypatch.setattr(infer, "Decoder", broken)
    with pytest.raises(MemoryError, match="no room"): wrap(model, memory_limit=limit, device="cpu", **OPTIONS)
    assert [type(m) for m in model.modules()] == classes and "_bmlab_streamer" not in model.__dict__
    model.half()


def test_many_users_and_a_stop_from_another_thread():
    model, tok = load("smollm2-135m")
    with wrap(model, tok, max_batch=3, max_ctx=96, device="cpu") as e:
        alone = ["".join(e.stream(p, max_new_tokens=6)) for p in ("One, two,", "The sun", "A, B, C,", "Red, green,")]
        with e.batcher() as b:
            handles = [b.submit(p, max_new_tokens=6) for p in ("One, two,", "The sun", "A, B, C,", "Red, green,")]
            with pytest.raises(RuntimeError, match="busy"): next(e.stream("Hello"))
            assert ["".join(h) for h in handles] == alone
        pieces = e.stream("Once upon a time", max_new_tokens=60)
        next(pieces)
        threading.Timer(0.3, e.stop).start()
        assert len(list(pieces)) < 59 and not e.busy
        assert "".join(e.stream("One, two,", max_new_tokens=6)) == alone[0]


def test_an_encoder_decoder_fills_by_sentinels(monkeypatch):
    from tokenizers import Tokenizer, models, pre_tokenizers
    words = [
        "<pad>", "</s>", "<unk>", "<extra_id_0>", "<extra_id_1>", "<extra_id_2>", "the", "cat", "sat", "on", "mat", "."
    ] + [f"w{i}" for i in range(87)]
    raw = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tok = tf.PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="<pad>", eos_token="</s>", unk_token="<unk>",
        additional_special_tokens=[f"<extra_id_{i}>" for i in range(3)]
    )
    import bmlab.infer.fields as infer
    # a random model has nothing to say: <0> cat sat <1> mat <2> </s>
    said = iter([3, 7, 8, 4, 10, 5, 1])
    class Scripted(Sampler):
        def __call__(self, logits): return torch.full((len(logits),), next(said))
    monkeypatch.setattr(infer, "Sampler", Scripted)
    with wrap(made("t5"), tok, max_ctx=32, device="cpu") as e:
        assert e.plan.encoder
        with pytest.raises(ValueError, match="a source of 40 tokens exceeds max_ctx=32"):
            e.stream([7] * 40, max_new_tokens=4)
        with e.batcher() as b, pytest.raises(ValueError, match="a source of 40 tokens exceeds max_source=32"):
            b.submit([7] * 40, 4)
        answers = {}
        for i, piece in e.fill("the __ on the __ .", max_new_tokens=8): answers[i] = answers.get(i, "") + piece
        assert {i: a.strip() for i, a in answers.items()} == {0: "cat sat", 1: "mat"} and not e.busy


def test_a_masked_model_fills_and_does_not_generate():
    tok = tf.BertTokenizer(vocab={
        w: i
        for i, w in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "mat", "sat", "on", "."])
    })
    torch.manual_seed(0)
    model = tf.BertForMaskedLM(tf.BertConfig(
        vocab_size=11, hidden_size=32, num_hidden_layers=4, num_attention_heads=2, intermediate_size=64
    )).eval()
    plan = plan_inference(model, max_ctx=16)
    with wrap(model, tok, max_ctx=16, device="cpu") as e: resident = dict(e.fill("the __ sat on the __ ."))
    with wrap(model, tok, memory_limit=plan.min_bytes, max_ctx=16, device="cpu") as e:
        assert e.plan.streamed and dict(e.fill("the __ sat on the __ .")) == resident and set(resident) == {0, 1}
        with pytest.raises(TypeError, match="cannot generate text"): e.stream("the")
    model = tf.RobertaForMaskedLM(tf.RobertaConfig(
        vocab_size=11, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=34
    )).eval()
    tok.model_max_length = 99
    # its positions begin behind the padding's number, 1
    with wrap(model, tok, device="cpu") as e:
        assert e.max_ctx == 32 and [i for i, _ in e.fill("the " * 28 + "__ .")] == [0]
        with pytest.raises(ValueError, match="a text of 33 tokens exceeds max_ctx=32"): e.fill("the " * 29 + "__ .")


CUDA = dict(
    hidden_size=512, intermediate_size=1024, num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=4,
    vocab_size=4096
)


def on_gpu(bits, **options):
    torch.manual_seed(0)
    return wrap(
        tf.LlamaForCausalLM(tf.LlamaConfig(**CUDA)).to(torch.bfloat16).eval(), bits=bits, max_ctx=256, max_batch=2,
        device="cuda", **options
    )


@pytest.mark.cuda
@pytest.mark.parametrize("bits", [None, 8, 4])
def test_streamed_on_the_gpu_equals_resident(bits):
    with on_gpu(bits) as e:
        want, whole = decoded(e.decoder), e.plan
        assert e.decoder.graph, e.decoder.why_eager
    # (a plan under a limit goes without graphs of prompts and long pieces of them before a block streams)
    resident = whole.peak_bytes - whole._graph() - whole._long(whole.chunk)
    for share in (0.0, 0.5):
        limit = whole.min_bytes + int((resident - whole.min_bytes) * share)
        for graph in ("auto", False):
            del e
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_reserved()
            with on_gpu(bits, memory_limit=limit, graph=graph) as e:
                assert e.plan.streamed and torch.equal(decoded(e.decoder), want), (share, graph)
                assert torch.cuda.max_memory_reserved() - before + e.plan.context_bytes <= limit, (share, graph)


def test_the_fence_counts_what_was_planned(monkeypatch):
    "Others' memory is let be; the draft, the model and the workspace that trying the draft has left are in the plan"
    from bmlab.infer import fence as infer
    said, total, others = [], 100 << 30, 300 << 20
    MiB = 1 << 20
    held = {"draft": 90 * MiB, "model": 700 * MiB}
    for name, stand_in in dict(
        empty_cache=lambda: None, get_device_properties=lambda _: SimpleNamespace(total_memory=total),
        set_per_process_memory_fraction=lambda share, _: said.append(round(share * total))
    ).items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    segment = lambda start, size, used, device=0: dict(
        address=start * MiB, total_size=size * MiB, allocated_size=used * MiB, device=device
    )
    monkeypatch.setattr(
        torch.cuda, "memory_snapshot", lambda: [segment(0, 20, 2), segment(20, 20, 0), segment(0, 20, 2, 1)]
    )  # 18 MiB idle beside what others hold; free; of another GPU
    monkeypatch.setattr(infer, "use_expandable_segments", lambda *_: None)
    monkeypatch.setattr(infer, "_stores", lambda *_: {})
    monkeypatch.setattr(
        infer, "_besides", lambda _, *planned,
        hosted: others + 32 * MiB + sum(v for k, v in held.items() if k not in planned)
    )
    plan = SimpleNamespace(host=[], limit=6 << 30, peak_bytes=(6 << 30) - 2 * MiB, context_bytes=790 * MiB)
    fence = infer._Fence(plan, torch.device("cuda", 0), "draft", 32 * MiB)
    fence.stand("draft", "model")
    assert said == [
        others + 18 * MiB + held["model"] + plan.limit - plan.context_bytes,
        others + 18 * MiB + plan.limit - plan.context_bytes,
    ]


@pytest.mark.cuda
def test_crumbs_of_others_take_nothing_from_a_plan():
    "One of many small tensors in each segment of torch's allocator: what lies idle around them is not the plan's"
    with on_gpu(None) as e: want, least = decoded(e.decoder), e.plan.min_bytes
    del e
    gc.collect()
    torch.cuda.empty_cache()
    # of 2 MiB, ten to a segment
    crumbs = [torch.ones(1 << 19, device="cuda") for _ in range(400)][::10]
    torch.cuda.empty_cache()
    held, before = torch.cuda.memory_reserved(), torch.cuda.memory_allocated()
    assert held - before > 300 << 20
    with on_gpu(None, memory_limit=least) as e:
        assert torch.equal(decoded(e.decoder), want)
        assert torch.cuda.max_memory_reserved() - held + e.plan.context_bytes <= least
    assert all((c == 1).all() for c in crumbs)


@pytest.mark.cuda
def test_memory_that_others_hold_is_said(monkeypatch):
    gc.collect()
    torch.cuda.empty_cache()
    total = torch.cuda.mem_get_info()[1]
    # (memory that were really taken, tests beside this one would lack)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (64 << 20, total))
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda *_: [])           # nothing that tests before have left
    with pytest.raises(ValueError, match="are free: others hold the rest"):
        wrap(
            tf.LlamaForCausalLM(tf.LlamaConfig(**{**CUDA, "num_hidden_layers": 40})).to(torch.bfloat16),
            max_ctx=256, device="cuda"
        ).close()


@pytest.mark.parametrize("name", ["llama", "t5", "mixtral"])
def test_without_fusing_streamed_equals_the_untouched_model(name):
    plain = made(name)
    pack_linears(plain, bits=8)
    want = decoded(Decoder(plain, 2, 64))
    model = made(name)
    with wrap(
        model, bits=8, memory_limit=limit_for(model, 3, bits=8, **OPTIONS), fuse=False, device="cpu", **OPTIONS
    ) as e:
        assert e.plan.streamed and torch.equal(decoded(e.decoder), want)


def test_a_row_keeps_its_users_delta_when_others_end():
    model = made("llama")
    deltas = {}
    for i, user in enumerate("ab"):
        d = Lora(model, r=4, name=user)
        torch.manual_seed(i)
        for p in d.parameters(): torch.nn.init.normal_(p, std=0.5)
        deltas[user] = d
    alone = {}
    for user, d in deltas.items():
        others = [o for o in deltas.values() if o is not d]
        for o in others: o.detach()
        alone[user] = [t for t, in decode_tokens(Decoder(model, 1, 64), [PROMPTS[0]], None, 8)]
        for o in others: o.attach()
    bank = DeltaBank(model, deltas)
    with wrap(model, device="cpu", max_batch=4, max_ctx=64) as e:
        assert e.decoder.mode == "static"
        with bank.route(["a", "b"]):                                             # rows 0 and 1 are a's, 2 and 3 b's
            rows = list(zip(*decode_tokens(e.decoder, [PROMPTS[0]] * 4, None, [8, 3, 8, 3])))
        assert [
            t for t in rows[0] if t is not None
        ] == alone["a"] and [t for t in rows[2] if t is not None] == alone["b"]
        with bank.route(["a", "b"]):
            rows = list(zip(*decode_tokens(e.decoder, [PROMPTS[0]] * 4, None, [8, 8, 3, 3])))
        assert [t for t in rows[1] if t is not None] == alone["a"]


def test_a_dropped_engine_is_freed():
    model = made("llama")
    e = wrap(model, memory_limit=limit_for(model, 3, **OPTIONS), store="mmap", device="cpu", **OPTIONS)
    dead = weakref.ref(e), weakref.ref(model)
    del e, model
    gc.collect()
    assert [d() for d in dead] == [None, None]


def test_what_is_refused_changes_nothing():
    model = made("llama")
    e = wrap(model, device="cpu", **OPTIONS)
    for wrong, error, says in (
        (dict(bits=16), ValueError, "bits=16"), (dict(memory_limit="1KiB"), ValueError, "smallest feasible"),
        (dict(graph="yes"), ValueError, "graph="), (dict(max_batch=1.5), TypeError, "max_batch=1.5"),
        (dict(max_ctx="128"), TypeError, "max_ctx='128'"), (dict(device="tpu"), ValueError, "device="),
        (dict(fuse="no"), ValueError, "fuse='no'")
    ):
        with pytest.raises(error, match=says): wrap(model, **{"device": "cpu", **OPTIONS, **wrong})
    e._lock, free = SimpleNamespace(acquire=lambda timeout: False), e._lock      # a text that does not end
    for _ in range(2):
        with pytest.raises(RuntimeError, match="busy"): wrap(model, fuse=False, device="cpu", **OPTIONS)
    e._lock = free
    assert len(decoded(e.decoder, 2)) == 3                                       # still the model's engine
    e.close()
    limit = limit_for(model, 3, **OPTIONS)
    with pytest.raises(TypeError, match="link=3"): wrap(model, memory_limit=limit, link=3, device="cpu", **OPTIONS)
    link = SimulatedLink()
    with wrap(model, memory_limit=limit, link=link, device="cpu", **OPTIONS):
        with pytest.raises(RuntimeError, match="give each its own"):
            wrap(made("llama"), memory_limit=limit, link=link, device="cpu", **OPTIONS)
    pack_linears(model)
    with pytest.raises(ValueError, match="packed to int8 already"): wrap(model, bits=4, device="cpu", **OPTIONS)


def test_weights_written_while_they_stream_are_noticed():
    model = made("llama")
    with wrap(model, memory_limit=limit_for(model, 3, **OPTIONS), device="cpu", **OPTIONS) as e:
        name = e.plan.streamed[0]
        with torch.no_grad(): e.model.get_submodule(name).mlp.up_proj.weight.zero_()
        with pytest.raises(RuntimeError, match="on_host"), e._alone(): pass


def test_an_engine_for_one_text_leaves_no_trace():
    model, ids = made("llama"), torch.tensor([PROMPTS[0]])
    classes = [type(m) for m in model.modules()]
    with torch.no_grad(): want = model(ids).logits
    for limit in (None, limit_for(model, 3, **OPTIONS)):
        wrap(model, memory_limit=limit, device="cpu", **OPTIONS)                                 # gone at once
        assert [type(m) for m in model.modules()] == classes
        with torch.no_grad(): assert torch.equal(model(ids).logits, want)


def test_a_draft_is_fused_as_long_as_an_engine_has_it():
    "Two engines share one; nothing is packed beneath fused parts; one that streams or was fused before stays as it is"
    from bmlab.infer.fused import fuse_decode
    fused = lambda m: sum("_bmlab_fused" in type(x).__dict__ for x in m.modules())
    make = lambda layers, seed: tf.LlamaForCausalLM(tf.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64
    )).eval()
    torch.manual_seed(0)
    small, one, two = make(1, 0), make(2, 1), make(2, 2)
    a, b = (wrap(m, None, max_ctx=32, draft=small) for m in (one, two))
    n = fused(small)
    assert n > 0
    with pytest.raises(ValueError, match="close the engine that it drafts for first"):
        wrap(small, None, bits=8, max_ctx=32)
    assert not any(type(m).__name__ == "Int8Linear" for m in small.modules())
    a.close()
    assert fused(small) == n
    b.close()
    assert fused(small) == 0
    e = wrap(small, None, bits=8, max_ctx=32)
    for m in small.modules():
        if hasattr(m, "codes"): m.codes.zero_()
    assert small.model.layers[0].mlp(torch.randn(1, 1, 32)).abs().max() == 0
    e.close()
    own = make(1, 3)
    undo = fuse_decode(own).undo
    wrap(make(2, 4), None, max_ctx=32, draft=own).close()
    assert fused(own) == n
    undo()

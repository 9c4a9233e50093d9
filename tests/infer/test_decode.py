"The decoder against plain forwards and transformers' generate; its graph code with a stand-in for CUDA's"
import contextlib, contextvars, copy, functools, gc, pickle, random, threading, weakref
from unittest import mock

import pytest
import torch
import transformers as tf

from bmlab.models.cpm import CpmAntTied
from bmlab.models.cpmbee import CpmBeeConfig, CpmBeeForCausalLM
from bmlab.delta.site import Site, attach_site, detach_site
from bmlab.infer.decode import Decoder
from bmlab.models.glm import BlankGlmConfig, BlankGlmForConditionalGeneration
from bmlab.kernels.layers import pack_linears

TINY = dict(
    hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=99, pad_token_id=0
)
GPT = dict(n_embd=32, n_layer=2, n_head=4, vocab_size=99, bos_token_id=1, eos_token_id=2)
WINDOWS = dict(TINY, num_key_value_heads=2, head_dim=8, sliding_window=5)
CPM = dict(
    vocab_size=99, hidden_size=32, num_attention_heads=4, dim_head=8, dim_ff=64, num_hidden_layers=2, eos_token_id=None
)
GLM = dict(
    vocab_size=99, hidden_size=32, num_attention_heads=4, num_hidden_layers=2, max_sequence_length=48, sop_token_id=98,
    mask_token_ids=[1, 2], eos_token_id=97
)
T5 = dict(
    d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, vocab_size=99, decoder_start_token_id=0,
    tie_word_embeddings=False
)
BART = dict(
    d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
    encoder_ffn_dim=64, decoder_ffn_dim=64, vocab_size=99, max_position_embeddings=48, pad_token_id=1,
    decoder_start_token_id=2, eos_token_id=2, forced_eos_token_id=None
)
MAKE = {
    "llama": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**TINY, num_key_value_heads=2)),
    "llama eager": lambda: tf.LlamaForCausalLM._from_config(
        tf.LlamaConfig(**TINY, num_key_value_heads=2), attn_implementation="eager"
    ),
    "gpt2": lambda: tf.GPT2LMHeadModel(tf.GPT2Config(**GPT)),
    "gptj": lambda: tf.GPTJForCausalLM(tf.GPTJConfig(**GPT, rotary_dim=4)),
    "opt": lambda: tf.OPTForCausalLM(tf.OPTConfig(
        hidden_size=32, ffn_dim=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=99, word_embed_proj_dim=32
    )),
    "mistral": lambda: tf.MistralForCausalLM(tf.MistralConfig(**TINY, num_key_value_heads=2, sliding_window=5)),
    "mixtral": lambda: tf.MixtralForCausalLM(tf.MixtralConfig(**TINY, num_key_value_heads=2, num_local_experts=4)),
    "qwen3": lambda: tf.Qwen3ForCausalLM(tf.Qwen3Config(**TINY, num_key_value_heads=2, head_dim=8)),
    "gemma2": lambda: tf.Gemma2ForCausalLM(tf.Gemma2Config(**WINDOWS)),
    "gemma3": lambda: tf.Gemma3ForCausalLM(tf.Gemma3TextConfig(
        **WINDOWS, layer_types=["sliding_attention", "full_attention"]
    )),
    "deepseek": lambda: tf.DeepseekV3ForCausalLM(tf.DeepseekV3Config(
        **TINY, num_key_value_heads=4, n_routed_experts=4, num_experts_per_tok=2, n_group=2, topk_group=1,
        moe_intermediate_size=16, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=4, qk_nope_head_dim=8, v_head_dim=6,
        first_k_dense_replace=1, n_shared_experts=1
    )),
    "t5": lambda: tf.T5ForConditionalGeneration(tf.T5Config(**T5, feed_forward_proj="gated-gelu")),
    "switch": lambda: tf.SwitchTransformersForConditionalGeneration(tf.SwitchTransformersConfig(
        **T5, num_decoder_layers=2, num_sparse_encoder_layers=1, num_sparse_decoder_layers=1, num_experts=3,
        expert_capacity=64
    )),
    "bart": lambda: tf.BartForConditionalGeneration(tf.BartConfig(**BART)),
    "marian": lambda: tf.MarianMTModel(tf.MarianConfig(**BART)),
    "m2m": lambda: tf.M2M100ForConditionalGeneration(tf.M2M100Config(**BART)),
    "bloom": lambda: tf.BloomForCausalLM(tf.BloomConfig(hidden_size=32, n_layer=2, n_head=4, vocab_size=99)),
    "mpt": lambda: tf.MptForCausalLM(tf.MptConfig(d_model=32, n_layers=2, n_heads=4, vocab_size=99, max_seq_len=32)),
    "ant": lambda: CpmAntTied(tf.CpmAntConfig(**CPM, prompt_length=5, prompt_types=4)),
    "ant eager": lambda: CpmAntTied._from_config(
        tf.CpmAntConfig(**{**CPM, "num_hidden_layers": 4}, mask_modules="ba.b", prompt_length=5, prompt_types=4),
        attn_implementation="eager"
    ),
    "bee": lambda: CpmBeeForCausalLM(CpmBeeConfig(**CPM)),
    "glm": lambda: BlankGlmForConditionalGeneration(BlankGlmConfig(**GLM))
}
BOTH, SOURCES = ["ant", "bee", "glm"], ["t5", "switch", "bart", "marian", "m2m"]
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad(): yield


def make(name, dtype=torch.float32):
    torch.manual_seed(0)
    model = MAKE[name]().eval()
    for p in model.parameters():
        if p.ndim > 1: p.mul_(3)
    return model.to(dtype)


def draw(rng, n): return [rng.randint(3, 98) for _ in range(n)]


def prompt(model, rng, n):
    "A prompt; GLM's has a blank, and begins its piece"
    text = draw(rng, n)
    return text if not hasattr(model, "opening") else [min(t, 97) for t in text[:-2]] + model.opening


def plain(model, text, n=1, read=None):
    "Logits after each of the last n tokens, without any cache; the first `read` are read from both sides"
    more = (
        dict(context=torch.arange(len(text), device=model.device)[None] < read)
        if read and hasattr(model, "tokens_in_front")
        else {}
    )  # (GLM knows by the ids)
    return model(torch.tensor([text], device=model.device), use_cache=False, **more).logits[0, -n:].float()


def near(got, want, limit=2e-5):
    error = ((got.float() - want).norm() / (want - want.mean(-1, keepdim=True)).norm()).item()
    assert error < limit, error


# ---------------------------------------------------------------- rows that live their lives

@pytest.mark.parametrize("name", [n for n in MAKE if n not in SOURCES])
def test_a_random_life(name):
    "Rows come, go, grow, try, shrink and are copied, in any order: logits stay those of a plain forward over the text"
    model, rng = make(name), random.Random(3)
    # read: tokens of each row's first prompt
    d = Decoder(model, max_batch=3, max_ctx=24)
    texts, most, read = {}, 24, {}
    assert d.mode == "static", d.why_generate
    for _ in range(30):
        what = rng.choice(["enter", "step", "step", "try", "tree", "more", "leave", "crop", "move"])
        free = [r for r in range(3) if r not in texts]
        if what == "enter" and free:
            rows = rng.sample(free, rng.randint(1, len(free)))
            new = [prompt(model, rng, rng.randint(1, 14)) for _ in rows]
            for got, r, t in zip(d.prefill(new, rows=rows, chunk=rng.randint(1, 20)), rows, new):
                texts[r] = t
                read[r] = len(t)
                near(got, plain(model, t)[0])
        elif what == "more" and (rows := [r for r in texts if len(texts[r]) < most - 6]):
            rng.shuffle(rows)
            new = [draw(rng, rng.randint(1, 5)) for _ in rows]
            for got, r, t in zip(d.prefill(new, rows=rows, chunk=rng.randint(2, 12)), rows, new):
                texts[r] = texts[r] + t
                near(got, plain(model, texts[r], 1, read[r])[0])
        elif what == "leave" and texts:
            r = rng.choice(list(texts))
            d.free(r)
            del texts[r]
        elif what == "crop" and texts:
            for r in texts: texts[r] = texts[r][:rng.randint(read[r] if d.net.facts.both else 1, len(texts[r]))]
            d.crop([len(texts.get(r, [])) for r in range(3)])
        elif what == "move" and len(texts) == 3:
            order = [rng.randrange(3) for _ in range(3)]
            d.move(order)
            texts, read = ({i: x[r] for i, r in enumerate(order)} for x in (texts, read))
        elif what in ("step", "try", "tree"):
            B, M = rng.randint(1, 3), rng.randint(1, 4)
            if what == "tree" and name == "mpt": B = 1
            news = [draw(rng, M) for _ in range(B)]
            if what == "step":
                for r in [r for r in texts if r < B and len(texts[r]) + M > most]:
                    d.free(r)
                    del texts[r]
                logits = d.step(news)
                for r in range(B):
                    if r in texts:
                        texts[r] = texts[r] + news[r]
                        near(logits[r], plain(model, texts[r], M, read[r]))
                continue
            # of each node the nodes from the first one to itself
            above = [[[0]] for _ in range(B)]
            for a in above:
                for i in range(1, M): a.append((a[-1] if what == "try" else rng.choice(a)) + [i])
            tree = {}
            if what == "tree":
                mask = torch.zeros(B, M, M, dtype=torch.bool)
                for b in range(B):
                    for i, path in enumerate(above[b]): mask[b, i, path] = True
                tree = dict(mask=mask, positions=mask.sum(-1) - 1)
            logits, kept = d.step(news, keep=False, **tree), [[] for _ in range(B)]
            for r in range(B):
                paths = [p for p in above[r] if r in texts and len(texts[r]) + len(p) <= most]
                for p in paths: near(logits[r, p[-1]], plain(model, texts[r] + [news[r][i] for i in p], 1, read[r])[0])
                if paths:
                    kept[r] = rng.choice([[], *paths])
                    texts[r] = texts[r] + [news[r][i] for i in kept[r]]
            d.keep(kept if what == "tree" else [len(k) for k in kept])
        assert d.held == [len(texts.get(r, [])) for r in range(3)] == d.lengths.tolist(), what
        assert d.active == [r in texts for r in range(3)]


@pytest.mark.parametrize("name", [n for n in MAKE if n not in SOURCES])
def test_a_tree_that_forks(name):
    "Each node says what it says behind its own path, and so does what comes after the path that is kept"
    model, rng = make(name), random.Random(1)
    text, new, paths = prompt(model, rng, 6), draw(rng, 6), [[0], [0, 1], [0, 1, 2], [0, 3], [0, 3, 4], [0, 5]]
    d, mask = Decoder(model, max_batch=1, max_ctx=24), torch.zeros(1, 6, 6, dtype=torch.bool)
    for i, path in enumerate(paths): mask[0, i, path] = True
    d.prefill([text])
    logits = d.step([new], keep=False, mask=mask, positions=mask.sum(-1) - 1)
    for i, path in enumerate(paths): near(logits[0, i], plain(model, text + [new[n] for n in path], 1, len(text))[0])
    d.keep([paths[4]])
    text, read = text + [new[n] for n in paths[4]] + [7], len(text)
    near(d.step([[7]])[0], plain(model, text, 1, read))


def test_slopes_go_on_behind_max_seq_len():
    "MPT's code makes slopes for max_seq_len tokens; its cache, and so its texts, may be longer"
    model, text = make("mpt"), draw(random.Random(0), 45)
    d, longer = Decoder(model, 1, 60), copy.deepcopy(model)
    longer.config.max_seq_len = longer.transformer.config.max_seq_len = 64
    near(
        torch.cat([d.prefill([text[:38]], chunk=9), *(d.step([[i]])[0] for i in text[38:])]),
        longer(torch.tensor([text])).logits[0, 37:], 1e-4
    )
    assert longer.transformer.config.max_seq_len == 64 and model.config.max_seq_len == 32 < d.held[0]


def test_trees_of_several_texts_that_cannot_be():
    d = Decoder(make("mpt"), 2, 24)
    d.prefill([[5, 6], [7]])
    two = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]]).bool().expand(2, 3, 3)
    with pytest.raises(ValueError, match="trees of one text at a time"):
        d.step([[5, 6, 7]] * 2, keep=False, mask=two, positions=two.sum(-1) - 1)
    assert d.held == [2, 1] and d.step([[5], [6]]).shape == (2, 1, 99)


@pytest.mark.parametrize("name", SOURCES)
def test_encoder_decoder_rows(name):
    "Sources and outputs of different lengths, rows that change, against forwards without a cache"
    model, rng = make(name), random.Random(0)
    d, texts = Decoder(model, max_batch=3, max_ctx=20, max_source=16), {}
    assert d.mode == "static", d.why_generate
    def check(r, got):
        source, text = texts[r]
        near(
            got,
            model(
                torch.tensor([source]), decoder_input_ids=torch.tensor([text]), use_cache=False
            ).logits[0, -len(got) :],
            1e-4
        )
    for turn in range(14):
        rows = rng.sample(range(3), rng.randint(1, 3)) if turn else [0, 1, 2]
        d.free([r for r in rows if r in texts])
        sources = [draw(rng, rng.randint(1, 16)) for _ in rows]
        begin = [[0] + draw(rng, rng.randint(0, 3)) for _ in rows]
        d.encode(sources, rows=rows)
        logits = d.prefill(begin, rows=rows, chunk=rng.randint(1, 9))
        for i, r in enumerate(rows):
            texts[r] = (sources[i], begin[i])
            check(r, logits[i:i + 1])
        for _ in range(2):
            news = [draw(rng, 2) for _ in range(3)]
            for r in [r for r in range(3) if d.held[r] + 2 > 20]:
                d.crop([0 if q == r else h for q, h in enumerate(d.held)])
                texts[r] = (texts[r][0], [])
            logits = d.step(news)
            for r in range(3):
                texts[r] = (texts[r][0], texts[r][1] + news[r])
                check(r, logits[r])
        if turn % 4 == 3:
            d.move([2, 0, 1])
            texts = {i: texts[r] for i, r in enumerate([2, 0, 1])}


@pytest.mark.parametrize(
    "name", ["llama", "mistral", "gptj", "gemma3", "mixtral", "bloom", *SOURCES, *BOTH, "ant eager"]
)
def test_tokens_of_generate(name):
    model, rng = make(name), random.Random(5)
    prompts = [prompt(model, rng, n) for n in (9, 2, 17)]
    want = [
        model.generate(
            torch.tensor([p]), attention_mask=torch.ones(1, len(p)).long(), max_new_tokens=10, do_sample=False,
            pad_token_id=0, eos_token_id=None
        )[0, -10:].tolist()
        for p in prompts
    ]
    d = Decoder(model, max_batch=3, max_ctx=40)
    if name in SOURCES: d.encode(prompts)
    now, out = d.prefill(None if name in SOURCES else prompts).argmax(-1), []
    d.start(now)
    out.append(now.tolist())
    for _ in range(9): out.append(d.step_sampled(lambda logits: logits.argmax(-1)).ids())
    assert [list(t) for t in zip(*out)] == want


@pytest.mark.parametrize("name", BOTH)
def test_a_padded_batch_of_generate(name):
    "Prompts that are read from both sides, padded at the left, in the batches of one chunk or several"
    model, rng = make(name), random.Random(6)
    prompts = [prompt(model, rng, n) for n in (9, 3, 17)]
    ids, mask = (
        torch.tensor([[pad] * (17 - len(p)) + (p if pad == 3 else [1] * len(p)) for p in prompts]) for pad in (3, 0)
    )
    want = model.generate(
        ids, attention_mask=mask, max_new_tokens=10, do_sample=False, pad_token_id=0, eos_token_id=None
    )[:, 17:].tolist()
    for chunk in (512, 20):
        d = Decoder(model, max_batch=3, max_ctx=40)
        now = d.prefill(ids, mask, chunk=chunk).argmax(-1)
        out = [now.tolist()]
        for _ in range(9):
            now = d.step(now)[:, 0].argmax(-1)
            out.append(now.tolist())
        assert [list(t) for t in zip(*out)] == want


def test_a_prompt_that_begins_no_piece():
    model = make("glm")
    d = Decoder(model, max_batch=2, max_ctx=40)
    with pytest.raises(ValueError, match="must begin a piece, with the id 98"): d.prefill([[5, 1, 98], [5, 1, 6]])
    with pytest.raises(ValueError, match="no blank before it"): d.prefill([[5, 6, 98]])
    assert d.held == [0, 0] and d.active == [False, False]
    with pytest.raises(ValueError, match="positions for 48 tokens"): Decoder(model, max_ctx=49)


# ---------------------------------------------------------------- precision, packed layers, eight-bit caches

@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["llama", "gptj", "gemma3", "bloom", *SOURCES, *BOTH])
def test_half_precision(name, dtype):
    model, rng = make(name, dtype), random.Random(1)
    d = Decoder(model, max_batch=2, max_ctx=24)
    assert d.mode == "static", d.why_generate
    assert d.cache.layers[0].k.dtype == dtype
    texts = [prompt(model, rng, 9), prompt(model, rng, 4)]
    if name not in SOURCES: return near(d.prefill(texts), torch.stack([plain(model, t)[0] for t in texts]), .08)
    d.encode(texts)
    got = torch.cat([d.prefill()[:, None], d.step([[7, 8, 9]] * 2)], 1)
    near(
        got,
        torch.cat([
            model(
                torch.tensor([t]), decoder_input_ids=torch.tensor([[model.config.decoder_start_token_id, 7, 8, 9]]),
                use_cache=False
            ).logits
            for t in texts
        ]),
        0.08
    )


def test_slopes_of_many_tokens_in_half_precision():
    "Counted in whole numbers: bfloat16 has none behind 256"
    model, text = make("bloom", torch.bfloat16), draw(random.Random(0), 400)
    d, seen, line = Decoder(model, max_ctx=416), {}, type(model.transformer).build_alibi_tensor
    attention = model.transformer.h[0].self_attention
    hook = attention.register_forward_pre_hook(
        lambda m, args, kw: seen.update(own=next(kw[k] if k in kw else args[2] for k in ["alibi"])), with_kwargs=True
    )
    d.prefill([text])
    hook.remove()
    own = seen["own"][:, 0, :400]
    assert torch.equal(
        own, line(model.transformer, torch.ones(1, 400, dtype=torch.int64), 4, torch.bfloat16)[:, 0, :400]
    )


@pytest.mark.parametrize("name", ["llama", "gptj", "bloom", *SOURCES, *BOTH])
def test_packed(name):
    model = make(name)
    pack_linears(model)
    d = Decoder(model, max_batch=2, max_ctx=24)
    assert d.mode == "static" and d.cache.layers[0].k.dtype == torch.float32, d.why_generate


@pytest.mark.parametrize("name", ["llama", "gemma3", "gptj", "bloom", "t5", "bart", *BOTH])
def test_eight_bit_cache(name):
    model, rng, out = make(name), random.Random(2), []
    prompts = [prompt(model, rng, 12), prompt(model, rng, 5)]
    news = [[draw(rng, 1) for _ in range(2)] for _ in range(6)]
    for bits in (16, 8):
        d = Decoder(model, max_batch=2, max_ctx=32, kv_bits=bits)
        assert d.cache.layers[0].k.dtype == (torch.float32 if bits == 16 else torch.int8)
        if name in SOURCES:
            d.encode(prompts)
            assert d.net.cross.bits == bits
        out.append(torch.stack([d.prefill(None if name in SOURCES else prompts)] + [d.step(n)[:, 0] for n in news]))
    near(out[1], out[0], .1)
    assert not torch.equal(*out)


# ---------------------------------------------------------------- what goes wrong leaves nothing behind

def test_prefill_that_fails_is_undone():
    model, rng = make("llama"), random.Random(0)
    d, text = Decoder(model, max_batch=2, max_ctx=40), draw(rng, 20)
    d.prefill([text[:6]], rows=[1])
    calls, layer = [], model.model.layers[1]
    def fail(*_):
        calls.append(1)
        if len(calls) == 3: raise KeyboardInterrupt
    hook = layer.register_forward_pre_hook(fail)
    with pytest.raises(KeyboardInterrupt): d.prefill([text[6:]], rows=[1], chunk=4)
    assert len(calls) == 3 and d.held == [0, 6] == d.lengths.tolist() and d.active == [False, True]
    hook.remove()
    near(d.prefill([text[6:]], rows=[1], chunk=4)[0], plain(model, text)[0])


def test_a_row_that_overflowed_does_not_reach_the_next():
    model, rng = make("llama"), random.Random(0)
    d, text = Decoder(model, max_batch=2, max_ctx=24), draw(rng, 5)
    row = model.model.embed_tokens.weight[50].clone()
    model.model.embed_tokens.weight[50] = torch.inf
    assert d.prefill([[50] * 12, text])[0].isnan().any()
    d.step([[50, 50]] * 2, keep=False)
    d.free(0)
    model.model.embed_tokens.weight[50] = row
    near(d.prefill([text], rows=[0])[0], plain(model, text)[0])


def test_nothing_is_held():
    "The model does not hold its decoders: caches go when they go"
    model = make("llama")
    d = Decoder(model, max_batch=1, max_ctx=16)
    d.prefill([[5, 6]])
    d.step([7])
    cache = weakref.ref(d.cache)
    d_ref = weakref.ref(d)
    d.start([8])
    d.step_sampled(lambda logits: logits.argmax(-1))
    gc.disable()
    # at once: nothing goes round in circles
    try:
        del d
        assert d_ref() is None and cache() is None and not model._bmlab_listeners
    finally: gc.enable()


@pytest.mark.parametrize("name", [*SOURCES, "bloom", "mpt"])
def test_a_models_code_is_put_back(name):
    model = make(name)
    d = Decoder(model, max_ctx=16)
    own = lambda: [
        n for n, m in model.named_modules()
        if {"compute_bias", "build_alibi_tensor", "build_mpt_alibi_tensor", "forward"} & m.__dict__.keys()
    ]
    assert own() == []
    if name in SOURCES: d.encode([[5, 6]])
    def fails(*_):
        assert own()
        raise ZeroDivisionError
    hook = model.get_output_embeddings().register_forward_hook(fails)
    with pytest.raises(ZeroDivisionError): d.prefill(None if name in SOURCES else [[5, 6]])
    hook.remove()
    assert own() == [] and d.held == [0]


@pytest.mark.parametrize("name", ["bart", "m2m"])
def test_a_hook_in_its_place_stays(name):
    "accelerate puts a `forward` of its own into a module's dict"
    model = make(name)
    at = model.model.decoder.embed_positions
    old, calls = at.forward, []
    at.forward = hook = functools.update_wrapper(lambda *a, **k: calls.append(1) or old(*a, **k), old)
    d = Decoder(model, max_ctx=16)
    d.encode([[5, 6]])
    d.prefill()
    assert d.mode == "static" and at.__dict__["forward"] is hook
    calls.clear()
    model(torch.tensor([[5, 6]]), decoder_input_ids=torch.tensor([[2]]))
    assert calls


def test_positions_that_are_told_are_not_counted():
    "OPT's code takes positions: nothing is put in its modules' place"
    model = tf.OPTForCausalLM(tf.OPTConfig(
        hidden_size=32, ffn_dim=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=99,
        max_position_embeddings=48, word_embed_proj_dim=32, do_layer_norm_before=True
    )).eval()
    d = Decoder(model, 2, 24)
    assert d.mode == "static" and d.net.counting == {}
    near(
        torch.cat([d.prefill([[5, 6, 7], [8]])[:1], d.step([[9], [9]])[0]]),
        model(torch.tensor([[5, 6, 7, 9]])).logits[0, -2:], 1e-4
    )


def test_a_table_of_positions_is_not_made_anew():
    "M2M-100: one row's text is long while another's begins; graphs know the table by its address"
    model = make("m2m")
    table = model.model.decoder.embed_positions
    before = table.weights
    d = Decoder(model, 2, 40)
    d.encode([[5, 6]], rows=[0])
    d.prefill([[2] + draw(random.Random(0), 35)], rows=[0])
    d.encode([[7, 8]], rows=[1])
    got = d.prefill([text := [2] + draw(random.Random(1), 19)], rows=[1])
    assert table.weights is before and d.held == [36, 20]
    near(
        got, model(torch.tensor([[7, 8]]), decoder_input_ids=torch.tensor([text]), use_cache=False).logits[0, -1:], 1e-4
    )


def test_no_number_is_no_small_error():
    model = make("llama")
    def spoil(model, args, given, out):
        if given.get("past_key_values") is not None: out.logits.fill_(torch.nan)
    model.register_forward_hook(spoil, with_kwargs=True)
    d = Decoder(model, max_ctx=16)
    assert d.mode == "generate" and "no numbers with the cache" in d.why_generate


@pytest.mark.parametrize("name", ["t5", "bart", "m2m"])
def test_two_decoders_of_one_model(name):
    "In two threads each says what it says alone; the model can be copied and pickled after that"
    model, said = make(name), [[], []]
    def say(i, d):
        d.encode([[5 + i, 6, 7]])
        d.prefill()
        for _ in range(40): said[i].append(d.step([8])[0, -1])
    decoders = [Decoder(model, max_ctx=48) for _ in said]
    threads = [threading.Thread(target=say, args=a) for a in enumerate(decoders)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    both, said = said, [[], []]
    for i, d in enumerate(decoders): say(i, d)
    assert [len(x) for x in both] == [40, 40] and all(
        torch.equal(torch.stack(a), torch.stack(b)) for a, b in zip(both, said)
    )
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))): Decoder(again, max_ctx=48).encode([[5, 6]])


@pytest.mark.parametrize("name", ["t5", "bart", "m2m", "bloom", "mpt"])
def test_a_model_beside_its_decoder(name):
    "While one thread decodes, others read, make decoders, copy and pickle: all have the model as it is"
    model, stop, failed = make(name), threading.Event(), []
    d, source = Decoder(model, max_ctx=32), name in SOURCES
    ids = dict(input_ids=torch.tensor([[5, 6, 7, 8, 9]])) | (
        dict(decoder_input_ids=torch.tensor([[2, 7, 8]])) if source else {}
    )
    say = lambda model: model(**ids, use_cache=False).logits
    def run():
        try:
            while not stop.is_set():
                d.free()
                if source: d.encode([[5, 6]])
                d.prefill(None if source else [[5, 6]])
                for _ in range(20): d.step([8])
        except BaseException as e:
            failed.append(e)
            raise
    want, thread = say(model), threading.Thread(target=run)
    thread.start()
    try:
        for _ in range(12):
            for m in (model, model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
                assert torch.equal(say(m), want)
            again = Decoder(model, max_ctx=8)
            assert again.mode == "static", again.why_generate
    finally:
        stop.set()
        thread.join()
    assert not failed
    for m in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))): assert torch.equal(say(m), want)


# ---------------------------------------------------------------- graphs, with a stand-in

class Graph:
    "Replays by running the captured body again on the same tensors, while the host's lengths are nonsense"
    log = []
    def replay(self):
        d = Graph.decoder()
        key, out = next((key, out) for key, (g, out, *_) in d._graphs.items() if g is self)
        caches = [c for c in (d.net.cache, d.net.cross) if c is not None]
        held = [c.span.held for c in caches]
        for c in caches: c.span.held = [3] * len(c.span.held)                  # nonsense
        try: out.copy_(Graph.bodies[key]())
        finally:
            for c, h in zip(caches, held): c.span.held = h
        for c in caches: c.span.numbers, c.span.width, c.span.index = [0], 0, None      # (a replay selects nothing)
        Graph.log.append("replay")


@contextlib.contextmanager
def capture(graph, pool=None, stream=None, capture_error_mode=None):
    "CUDA runs nothing while it captures: what the body changed is put back"
    Graph.log.append("capture")
    tensors = [t for t in (Graph.decoder().lengths, Graph.decoder()._next, *Graph.state) if t is not None]
    before = [t.clone() for t in tensors]
    if Graph.broken: raise RuntimeError("operation not permitted when stream is capturing\nmore")
    yield
    for t, b in zip(tensors, before): t.copy_(b)


class Stream:
    device = "cpu"
    def __init__(self, *_): pass
    def wait_stream(self, _): pass


@pytest.fixture
def graphs(monkeypatch):
    Graph.log, Graph.broken, Graph.state = [], False, []
    Graph.decoder, Graph.bodies, original = None, {}, Decoder._capture
    def captured(d, body, key, *rest, **how):
        # (a graph keeps the route that was open)
        Graph.bodies[key] = functools.partial(contextvars.copy_context().run, body)
        return original(d, body, key, *rest, **how)
    monkeypatch.setattr(Decoder, "_capture", captured)
    for name, stand_in in dict(
        Stream=Stream, CUDAGraph=Graph, graph=capture, current_stream=Stream, stream=lambda s: contextlib.nullcontext(),
        graph_pool_handle=lambda: (0, 0), synchronize=lambda *_: None, set_stream=lambda s: Graph.log.append("stream")
    ).items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    def on(d):
        "Let a decoder on the CPU do what it does on a GPU"
        d.graph, d.why_eager = True, None
        d.views = [8, 16, len(d.cache.span.steps)]
        if d.net.cross is not None: d.source_views = [8, len(d.net.cross.span.steps)]
        for c in d._caches(): c.span.slices = False
        Graph.decoder = weakref.ref(d)
        return d
    return on


def scenario(d, prompts, news, greedy):
    "Everything that steps do, with all logits"
    out = []
    if d.net.cross is not None: d.encode(prompts)
    now = d.prefill([[3, 4], [5], [6, 7, 8]] if d.net.cross is not None else prompts).argmax(-1)
    for i in range(6):
        out.append(d.step(now)[:, 0])
        now = out[-1].argmax(-1)
    out.append(d.step(news[:, :3], keep=False)[:, 1])
    d.keep([1, 3, 0])
    tree = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]]).bool().expand(3, 3, 3)
    if isinstance(d.model, tf.MptForCausalLM):
        out.append(d.step(news[:, 1:4], keep=False)[:, 2])
        d.keep([2, 1, 2])  # (no trees of several texts)
    else:
        out.append(d.step(news[:, 1:4], keep=False, mask=tree, positions=tree.sum(-1) - 1)[:, 2])
        d.keep([[0, 2], [0], [0, 1]])
    d.free(2)
    out.append(d.step(news[:, :2])[:, 1])
    out.append(d.step(news[:2, 1])[:, 0])
    d.start(out[-1].argmax(-1))
    out += [torch.tensor(d.step_sampled(greedy).ids()) for _ in range(4)]
    return out, list(d.held), d.lengths.tolist()


@pytest.mark.parametrize("name", ["llama", "gemma3", "gptj", "bloom", "mpt", "t5", "bart", "marian", "m2m", *BOTH])
@pytest.mark.parametrize("bits", [16, 8])
def test_captured_equals_eager(graphs, name, bits):
    "A captured body reads only tensors: it gives the same while the host's lengths are nonsense"
    model, rng = make(name), random.Random(4)
    prompts, news = [prompt(model, rng, n) for n in (6, 2, 9)], torch.tensor([draw(rng, 4) for _ in range(3)])
    greedy = lambda logits: logits.argmax(-1)
    want = scenario(Decoder(model, 3, 40, bits), prompts, news, greedy)
    d = graphs(Decoder(model, 3, 40, bits))
    got = scenario(d, prompts, news, greedy)
    assert d.why_eager is None and got[1:] == want[1:]
    for a, b in zip(got[0], want[0]):
        (near(a, b) if a.is_floating_point() else torch.testing.assert_close(a, b, rtol=0, atol=0))
    assert Graph.log.count("replay") == 6 + 4 + 4 and Graph.log.count("capture") == len(d._graphs) < 12
    d.prefill([[1, 98]], rows=[2]) if name not in SOURCES else None
    again = Graph.log.count("capture")
    scenario(d, prompts, news, greedy)
    assert Graph.log.count("capture") == again                                     # what is captured is used again


class Counter:
    "A sampler with state, as Decoder expects one"
    def __init__(self):
        self.state = {"count": torch.zeros(3, dtype=torch.int64)}
        self.key = 0
    def __call__(self, logits):
        self.state["count"] += 1
        return (logits.argmax(-1) + self.state["count"]) % 99


def test_a_samplers_state_survives_the_capture(graphs):
    model = make("llama")
    out = []
    for on in (lambda d: d, graphs):
        sampler = Counter()
        Graph.state = list(sampler.state.values())
        d = on(Decoder(model, 3, 40))
        d.start(d.prefill([[5, 6], [7], [8, 9, 4]]).argmax(-1))
        out.append([d.step_sampled(sampler).ids() for _ in range(5)])
        assert sampler.state["count"].tolist() == [5] * 3
    assert out[0] == out[1] and Graph.log == ["capture"] + ["replay"] * 5
    sampler.key = 1
    Graph.log.clear()
    d.step_sampled(sampler)
    # its work has another shape now
    assert Graph.log == ["capture", "replay"]


class Around:
    def __init__(self): self.log = []
    @contextlib.contextmanager
    def captures(self):
        marks = []
        self.log.append("fork")
        yield marks
        self.log.append("join")
        marks.append(("before", "after"))
    def before_replay(self, marks): self.log.append(marks[0])
    def after_replay(self, marks): self.log.append(marks[1])


@pytest.mark.parametrize("kind, captures", [("lora", 1), ("lora by bmm", 3), ("adapter", 3)])
def test_routes_of_a_bank_and_graphs(graphs, kind, captures):
    "Each route's users, whoever was captured: few rows of plain Loras share a graph, others have their own"
    from bmlab.delta import Adapter, DeltaBank, Lora
    model = make("llama")
    bank = DeltaBank(model, path="bmm" if "bmm" in kind else "auto")
    def one(name):
        d = Adapter(model, bottleneck=4) if kind == "adapter" else Lora(model, r=2, modules=["q_proj", "down_proj"])
        for p in d.parameters(): torch.nn.init.normal_(p, std=0.3)
        bank.add(name, d)
    for name in "ab": one(name)
    prompts, ids = [[5, 6, 7]] * 3, torch.tensor([8, 9, 9])
    def say(d):
        d.free()
        d.prefill(prompts)
        return torch.cat([d.step(ids, keep=False), d.step(ids, keep=False)])
    def want(): return say(Decoder(model, 3, 24))
    d, routes = graphs(Decoder(model, 3, 24)), [["a", "b", None], ["b", None, "a"], ["a", "a", "a"]]
    seen = []
    for rows in (*routes, *routes[::-1]):
        with bank.route(rows):
            seen.append(want())
            near(say(d), seen[-1])
    assert (seen[0] - seen[1]).norm() > 0.1 * seen[0].norm()
    assert Graph.log.count("capture") == captures and Graph.log.count("replay") == 2 * len(seen) and not d.why_eager
    one("c")
    for rows in (["c", "b", "a"], ["a", "c", None], [None] * 3):
        with bank.route(rows): near(say(d), want())
    with bank.route(["a", "b"]), pytest.raises(ValueError, match="one user per row"):
        d.step(torch.ones(3, 2, dtype=torch.int64), keep=False)     # (six tokens, that two would divide)
    if kind != "lora": return
    for rows in (["a", "b", None], ["b", "a", "c"]):
        slots = torch.tensor([0 if u is None else bank.key.slots[u] for u in rows])
        with bank.rows(lambda slots=slots: slots): got = say(d)
        with bank.route(rows): near(got, want())


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("fused", [False, True])
def test_routes_of_a_bank_in_cuda_graphs(fused):
    from bmlab.delta import DeltaBank, Lora
    from bmlab.infer.fused import fuse_decode
    torch.manual_seed(0)
    sizes = TINY | dict(hidden_size=256, intermediate_size=512, num_key_value_heads=2)
    model = tf.LlamaForCausalLM(tf.LlamaConfig(**sizes)).cuda().eval()
    bank = DeltaBank(model)
    for i in range(5):
        d = Lora(model, r=8, modules=["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"][i:] + ["k_proj"])
        for s in d.sites.values(): torch.nn.init.normal_(s.B, std=0.1)
        bank.add(f"u{i}", d)
    undo = fuse_decode(model).undo if fused else lambda: None
    def say(d):
        d.free()
        d.prefill([[5, 6, 7, 8 + r] for r in range(6)])
        return torch.cat([d.step(torch.arange(6) + 9 + i) for i in range(3)], 1)
    made, d = [], Decoder(model, 6, 32)
    routes = ["u0", "u1", "u2", "u3", "u4", None], ["u4"] * 6, [None] * 6, ["u3", "u3", None, "u1", "u1", "u0"]
    for rows in routes * 2:
        with bank.route(rows):
            made.append(say(d))
            near(made[-1], say(Decoder(model, 6, 32, graph=False)), 2e-3)
    assert d.why_eager is None and not torch.allclose(made[0], made[1], atol=1e-2)
    assert all(torch.equal(a, b) for a, b in zip(made[:4], made[4:]))
    undo()


def test_around_and_recapture(graphs):
    model = make("llama")
    d = graphs(Decoder(model, 1, 40))
    d.around.append(a := Around())
    d.prefill([[5, 6]])
    d.step([7])
    d.step([8])
    assert a.log == ["fork", "join"] + ["before", "after"] * 2
    from bmlab.delta.lora import Lora
    delta = Lora(model, r=2)
    [p.normal_() for p in delta.parameters()]
    want = plain(model, [5, 6, 7, 8, 9])
    assert not d._graphs
    d.crop([2])
    d.prefill([[7, 8]], rows=[0])
    d.free()
    d.prefill([[5, 6, 7, 8]])
    near(d.step([9])[0], want)
    d.recapture()
    assert not d._graphs


def test_capture_that_fails(graphs, caplog):
    model = make("llama")
    d = graphs(Decoder(model, 2, 40))
    want = Decoder(model, 2, 40)
    d.prefill([[5, 6], [7]])
    want.prefill([[5, 6], [7]])
    Graph.broken = True
    near(d.step([3, 4]), want.step([3, 4]))
    near(d.step([3, 4]), want.step([3, 4]))
    assert (
        d.why_eager == "capturing failed: operation not permitted when stream is capturing" and not d.graph
        and d.held == [4, 3] == d.lengths.tolist()
    )
    # the stream that was current is so again, and a second capture tells torch's generator that the first is over
    assert Graph.log == ["capture", "stream", "capture"] and "without CUDA graphs" in caplog.text


def test_graphs_are_bounded(graphs):
    model = make("llama")
    d = graphs(Decoder(model, 1, 40))
    d._most = 2
    d.prefill([[5]])
    for M in (1, 2, 3, 1): d.step([[4] * M])
    assert len(d._graphs) == 2 and Graph.log.count("capture") == 4


def test_a_decoder_captures_on_one_stream(graphs, monkeypatch):
    "Each stream costs a workspace: a decoder has one for all its graphs, and leaves it to the next"
    made = []
    monkeypatch.setattr("bmlab.infer.decode._IDLE", {})
    monkeypatch.setattr(torch.cuda, "Stream", lambda *_: made.append(Stream()) or made[-1])
    def stepped():
        d = graphs(Decoder(make("llama"), 1, 40))
        d.prefill([[5]])
        for M in (1, 2, 3): d.step([[4] * M])
        return d
    a, b = stepped(), stepped()
    assert Graph.log.count("capture") == 6 and len(made) == 2 and a._stream is made[0] and b._stream is made[1]
    del a
    Graph.bodies.clear()
    gc.collect()
    c = stepped()
    assert c._stream is made[0] and len(made) == 2


def test_a_capture_without_memory_drops_the_graphs(graphs, monkeypatch):
    d = graphs(Decoder(make("llama"), 1, 40))
    d.prefill([[5]])
    d.step([[4]])
    assert d._graphs and d._pool
    want, graph, tries = d.step([[4, 4]], keep=False), torch.cuda.graph, []
    d.recapture()
    d.step([[5]], keep=False)
    def full(*how, **given):
        tries.append(len(d._graphs))
        if len(tries) <= refused: raise torch.OutOfMemoryError("no memory")
        return graph(*how, **given)
    # the second try has the room of all other graphs; then it is as without graphs
    monkeypatch.setattr(torch.cuda, "graph", full)
    refused = 1
    near(d.step([[4, 4]], keep=False), want)
    assert tries == [1, 1, 0] and d.graph and len(d._graphs) == 1              # (the second only ends the first)
    tries.clear()
    d.recapture()
    refused = 99
    for _ in range(2): near(d.step([[4, 4]], keep=False), want)
    assert not d._graphs and d._pool is None and not d.graph and "no memory" in d.why_eager


@pytest.mark.parametrize("name", ["llama", "gemma3", "gptj", "bloom", "mixtral"])
@pytest.mark.parametrize("rows", [1, 2])
def test_a_short_prompt_in_a_graph(graphs, name, rows):
    "Its width is captured when it is asked for again, and serves every length up to it; nothing behind the end is seen"
    model, rng = make(name), random.Random(5)
    tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    if not tied: model.get_input_embeddings().weight[0].fill_(float("nan"))             # (nobody reads what is not his)
    d = graphs(Decoder(model, rows, 72))
    d.begins = 512
    seen = {}
    for i, n in enumerate((21, 30, 3, 21, 33, 64, 40)):
        text, width, r = prompt(model, rng, n), 32 if n <= 32 else 64, i % rows
        seen[width] = seen.get(width, 0) + 1
        Graph.log.clear()
        d.free()
        near(d.prefill([text], rows=[r])[0], plain(model, text)[0])
        assert Graph.log == [[], ["capture", "replay"], ["replay"]][min(seen[width], 3) - 1]
        assert d.held[r] == n == d.lengths[r] and d.span.high[r] == width
        text += draw(rng, 5)                                                # its next turn
        near(d.prefill([text[n:]], rows=[r])[0], plain(model, text)[0])
        near(d.step([[7]] * rows)[r], plain(model, [*text, 7])[0])
    d.free()
    ids = prompt(model, rng, 65)                                            # 128 tokens would have no room
    near(d.prefill([ids], rows=[r])[0], plain(model, ids)[0])
    with pytest.raises(ValueError, match="exceed max_ctx"): d.prefill([draw(rng, 8)], rows=[r])
    assert d.held[r] == 65 == d.lengths[r]


def test_a_longer_prompt_in_a_graph(graphs):
    "Up to as many tokens as the plan says; its next turn is read as ever"
    model, rng = make("llama"), random.Random(5)
    d = graphs(Decoder(model, 1, 1100))
    d.begins = 1024
    made = ["capture", "replay"]
    for n, log in ((600, []), (700, made), (800, []), (520, ["replay"]), (1000, made)):
        text = prompt(model, rng, n)
        Graph.log.clear()
        d.free()
        near(d.prefill([text])[0], plain(model, text)[0])
        assert Graph.log == log and d.held == [n] and d.span.high == [768 if n <= 768 else 1024]
    text += draw(rng, 60)
    near(d.prefill([text[1000:]], rows=[0])[0], plain(model, text)[0])
    Graph.log.clear()
    for _ in range(3):
        d.free()
        near(d.prefill([text])[0], plain(model, text)[0])
    assert Graph.log == []                                                  # wider than was said


def test_a_short_prompt_of_a_model_that_is_looked_at_or_loses_its_delta(graphs):
    "Hooks see the prompt alone; a delta that is off for a while has no part in what is replayed"
    from bmlab.delta.lora import Lora
    from bmlab.infer.sites import replace_at
    model, text = make("llama"), list(range(5, 20))
    want = plain(model, text)
    d = graphs(Decoder(model, 1, 72))
    d.begins = 512
    def read():
        d.free()
        return d.prefill([text])
    with replace_at(model, {"layers[0]": 0}, positions=-1):
        padded = read()
        d.begins = 0
        near(padded, read())
        d.begins = 512
    lora = Lora(model, r=2)
    [p.normal_() for p in lora.parameters()]
    for _ in range(3): near(read()[0], plain(model, text)[0])
    Graph.log.clear()
    with lora.off(): near(read(), want)
    assert Graph.log == [] and (read() - want).norm() > 0.1 * want.norm()
    lora.detach()
    Graph.log.clear()
    for _ in range(2): near(read(), want)
    assert Graph.log == ["capture", "replay"]


class Twice(Site):
    def around(self, call, x): return 2 * call(x)


@pytest.mark.parametrize("where", ["model.layers.1.mlp.down_proj", "model.layers.0.self_attn.q_proj"])
def test_a_site_that_tells_nobody_takes_part(graphs, where):
    "`attach_site` alone: neither a captured step nor fused layers pass it over"
    from bmlab.infer.fused import fuse_decode
    model, text = make("llama"), list(range(5, 20))
    want = plain(model, text)
    d = graphs(Decoder(model, 1, 72))
    fuse_decode(model)
    d.begins = 512
    def read():
        d.free()
        return d.prefill([text])
    for _ in range(3): near(read()[0], want[0])
    attach_site(model.get_submodule(where), "twice", Twice())
    other = plain(model, text)
    assert (other - want).norm() > 1e-3 * want.norm()
    Graph.log.clear()
    for _ in range(3): near(read()[0], other[0])
    assert Graph.log == ["capture", "replay", "replay"]     # (what was captured before is gone)
    near(d.step([7])[0], plain(model, [*text, 7])[0])
    detach_site(model.get_submodule(where), "twice")
    Graph.log.clear()
    near(read()[0], want[0])
    assert Graph.log == []                                  # (a width is captured when it is asked for again)


def test_a_short_prompt_whose_graph_has_no_memory(graphs, monkeypatch, caplog):
    "It is read kernel by kernel, and so from now on; steps keep theirs"
    model = make("llama")
    d = graphs(Decoder(model, 1, 64))
    d.begins = 512
    text, full = list(range(5, 20)), mock.Mock(side_effect=torch.OutOfMemoryError("no memory"))
    d.prefill([text])
    with monkeypatch.context() as m:
        m.setattr(torch.cuda, "graph", full)
        near(d.prefill([text])[0], plain(model, text)[0])
    assert full.called and not d.begins and d.graph and d.held == [15] and d.span.high == [32]
    near(d.step([[7]])[0], plain(model, [*text, 7])[0])
    d.free()
    assert not any(t.any() for layer in d.cache.layers for t in layer.stores())
    d.begins, Graph.broken = 512, True
    for _ in range(2): near(d.prefill([text])[0], plain(model, text)[0])
    assert not d.begins and d.graph and d.why_eager is None and "reads prompts without CUDA graphs" in caplog.text


# ---------------------------------------------------------------- GPU

cuda = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.mark.parametrize("bits", [16, 8])
@pytest.mark.parametrize("name", [pytest.param(n, marks=cuda) for n in MAKE])
def test_cuda_graph_equals_eager(name, bits):
    "To the bit, over the borders of views; a family whose code waits for the host (experts) says that it is eager"
    model, rng = make(name, torch.bfloat16).cuda(), random.Random(4)
    prompts, news = [prompt(model, rng, n) for n in (6, 2, 9)], torch.tensor([draw(rng, 4) for _ in range(3)])
    greedy, out = lambda logits: logits.argmax(-1), []
    for graph in (False, "auto"):
        d = Decoder(model, 3, 40, bits, graph=graph)
        assert d.mode == "static", d.why_generate
        d.views = [8, 16, len(d.cache.span.steps)]
        out.append(scenario(d, prompts, news, greedy))
    if name not in ("mixtral", "deepseek", "switch"): assert d.why_eager is None, d.why_eager
    for a, b in zip(out[0][0], out[1][0]): assert torch.equal(a, b), (a.float() - b.float()).abs().max()
    assert out[0][1:] == out[1][1:]


@pytest.mark.parametrize("bits", [16, 8])
@pytest.mark.parametrize("name", [pytest.param(n, marks=cuda) for n in MAKE if n not in SOURCES + BOTH])
def test_cuda_a_short_prompt_has_the_same_bits_in_a_graph(name, bits):
    model, rng = make(name, torch.bfloat16).cuda(), random.Random(6)
    d = Decoder(model, 2, 72, bits)
    for row, n in ((0, 21), (1, 21), (0, 40), (1, 3)):
        text, out = prompt(model, rng, n), []
        d.free()
        want = d.prefill([text], rows=[row])
        d.begins = 512
        for _ in range(3):
            d.free()
            out.append(d.prefill([text], rows=[row]))
            assert d.held[row] == n == d.lengths[row]
        for other in out[1:]: assert torch.equal(other, out[0])
        assert (out[0] - want).norm() < 0.1 * (want - want.mean()).norm() and d.graph
        d.begins = 0
    if d.net.facts.unwritten and not d.cache.has_states: assert [k for k in d._graphs if k[0] == "begin"]


@pytest.mark.parametrize("name", [pytest.param("llama", marks=cuda)])
def test_cuda_graphs_of_prompts_share_their_memory(name):
    "A wide one finds room in what a narrow one had, since both are cut from one piece"
    sizes = dict(hidden_size=1024, intermediate_size=4096, num_hidden_layers=2, num_attention_heads=8, vocab_size=1000)
    sizes |= dict(max_position_embeddings=4096)
    model, rng = tf.LlamaForCausalLM(tf.LlamaConfig(**sizes)).cuda().bfloat16().eval(), random.Random(8)
    def taken(widths, begin_bytes):
        d = Decoder(model, 1, 2100)
        d.begins, d.begin_bytes = 2048, begin_bytes
        for n in (w for w in widths for _ in range(3)):
            d.free()
            d.prefill([draw(rng, n)])
        assert len(d._graphs) == len(widths)
        return sum(s["total_size"] for s in torch.cuda.memory_snapshot() if tuple(s["segment_pool_id"]) == d._pool)
    every = (500, 700, 1000, 1500, 2000)
    widest = taken((2000,), 0)
    assert taken(every, widest) <= 1.2 * widest + (4 << 20) < taken(every, 0)


@pytest.mark.parametrize("name", [pytest.param("llama", marks=cuda)])
def test_cuda_a_capture_that_fails(name):
    "Afterwards the GPU draws random numbers, on the stream that was current before"
    model, stream = make(name, torch.bfloat16).cuda(), torch.cuda.current_stream()
    model.lm_head.register_forward_hook(lambda m, x, y: y.sum().item() and None)
    d = Decoder(model, 1, 64)
    d.prefill([[5]])
    d.step([[4]])
    assert "capturing failed" in d.why_eager and torch.cuda.current_stream() == stream
    assert torch.randn(4, device="cuda").isfinite().all() and d.step([[4]]).isfinite().all()


@pytest.mark.parametrize("name", [pytest.param("llama", marks=cuda)])
def test_graphs_share_a_workspace(name):
    "A workspace is 8 MiB or more; torch's allocator counts it"
    d = Decoder(make(name, torch.bfloat16).cuda(), 1, 64)
    d.prefill([[5]])
    d.step([[4]])
    before = torch.cuda.memory_allocated()
    for M in range(2, 8): d.step([[4] * M])
    assert d.why_eager is None and len(d._graphs) == 7 and torch.cuda.memory_allocated() - before < 4 << 20


@pytest.mark.parametrize("name", [pytest.param(n, marks=cuda) for n in MAKE if n not in SOURCES])
def test_cuda_life(name, monkeypatch):
    "The random life of above, in float32 and with graphs"
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    before = make
    monkeypatch.setitem(globals(), "make", lambda n: before(n).cuda())
    test_a_random_life(name)


@pytest.mark.parametrize("name", [pytest.param("llama", marks=cuda)])
def test_cuda_memory_goes_with_the_decoder(name):
    model = make(name, torch.bfloat16).cuda()
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
    def use():
        d = Decoder(model, 4, 2048)
        d.prefill([[5] * 9] * 4)
        d.start([5] * 4)
        [d.step_sampled(lambda logits: logits.argmax(-1)) for _ in range(4)][-1].ids()
    use()
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    use()
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_allocated() <= before


def test_logits_of_a_sampler():
    "The library's own takes logits in the model's dtype, with the same ids; a subclass is given float32"
    from bmlab.infer.sampling import Sampler
    seen = []
    class Mine(Sampler):
        def __call__(self, logits):
            seen.append(logits.dtype)
            return super().__call__(logits.masked_fill(torch.arange(logits.shape[1]) == 3, -1e9))
    class Float(Sampler): pass
    torch.manual_seed(0)
    model = tf.LlamaForCausalLM(tf.LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        vocab_size=64
    )).eval().half()
    out = []
    for sampler in (Sampler(), Float(), Mine(), Sampler(logprobs=2), Float(logprobs=2)):
        d = Decoder(model, max_ctx=40)
        d.prefill([[5, 9, 33]])
        sampler.start([[5, 9, 33]], 64)
        d.start([7])
        out.append([d.step_sampled(sampler).ids() for _ in range(6)])
    assert (
        out[0] == out[1] and out[3] == out[4] and set(seen) == {torch.float32} and all(3 not in ids for ids in out[2])
    )


def test_minus_one_positions_are_any_number():
    "XLNet's configuration says −1: a text has no end for it, and no error speaks of positions for −1 tokens"
    from bmlab.models.stream import max_positions
    torch.manual_seed(0)
    sizes = dict(vocab_size=64, d_model=32, n_layer=2, n_head=2, d_inner=64)
    model = tf.XLNetLMHeadModel(tf.XLNetConfig(**sizes)).eval()
    assert max_positions(model) is None
    assert Decoder(model, max_batch=1, max_ctx=32).mode == "generate"

"The static cache against transformers' own, and against tensors that simply grow"
import copy, pickle, random

import pytest
import torch
import transformers as tf

from bmlab.infer.cache import KVCache, attention_mask, capacity, dequantize_tokens, kv_shapes, quantize_tokens

CONFIG = tf.LlamaConfig(
    hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    vocab_size=99
)


# (k or v, layer, B, heads, n, width)
def new(n, B, seed=0): return torch.randn(2, 2, B, 2, n, 8, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("bits", [16, 8])
@pytest.mark.parametrize("slices", [True, False])
def test_rows_are_what_was_written(bits, slices):
    "A random life of four rows, beside lists that grow"
    rng, cache = random.Random(1), KVCache(CONFIG, rows=4, max_ctx=20, bits=bits)
    cache.span.slices = slices
    # [layer][row] → (k or v, heads, n, width)
    want = [[torch.zeros(2, 2, 0, 8) for _ in range(4)] for _ in range(2)]
    limit = 1e-6 if bits == 16 else 0.03
    for turn in range(120):
        rows = rng.choice([rng.randint(1, 4), sorted(rng.sample(range(4), rng.randint(1, 4))), rng.sample(range(4), 2)])
        numbers, M = list(range(rows)) if isinstance(rows, int) else rows, rng.randint(1, 4)
        if any(cache.held[r] + M > 20 for r in numbers):
            cache.free(numbers)
            [[w.__setitem__(r, w[r][:, :, :0]) for r in numbers] for w in want]
        pad = [rng.randint(0, M - 1) for _ in numbers] if rng.random() < .5 else None
        fresh = new(M, len(numbers), turn)
        cache.select(rows, M, pad)
        assert cache.span.view == max(cache.held[r] + M - p for r, p in zip(numbers, pad or [0] * M * 4))
        for layer in range(2):
            k, v = cache.update(fresh[0, layer], fresh[1, layer], layer)
            for b, r in enumerate(numbers):
                p = pad[b] if pad else 0
                want[layer][r] = torch.cat([want[layer][r], fresh[:, layer, b, :, p:]], 2)
                n = want[layer][r].shape[2]
                assert (torch.stack([k[b, :, :n], v[b, :, :n]]) - want[layer][r]).abs().max() < limit
        cache.commit([M - (pad[b] if pad else 0) for b in range(len(numbers))])
        assert cache.held == [w.shape[2] for w in want[0]] == cache.lengths.tolist()
        if (what := rng.random()) < .2:
            cut = [rng.randint(0, h) for h in cache.held]
            cache.crop(cut)
            want = [[w[:, :, :n] for w, n in zip(layer, cut)] for layer in want]
        elif what < .4:
            order = [rng.randrange(4) for _ in range(rng.randint(1, 4))]
            cache.move(order)
            want = [[layer[r] for r in order] + layer[len(order):] for layer in want]


@pytest.mark.parametrize("bits", [16, 8])
def test_pick_compacts(bits):
    cache, fresh = KVCache(CONFIG, rows=3, max_ctx=20, bits=bits), new(6, 3)
    cache.select(3, 2)
    [cache.update(fresh[0, i, :, :, :2], fresh[1, i, :, :, :2], i) for i in range(2)]
    cache.commit([2, 2, 2])
    cache.crop([2, 0, 1])
    cache.select(3, 6)
    [cache.update(fresh[0, i], fresh[1, i], i) for i in range(2)]
    cache.commit()
    assert cache.held == [2, 0, 1]
    cache.pick([[0, 2, 5], [], [1]])
    assert cache.held == [5, 0, 2]
    cache.select(3, 1, view=8)
    assert (cache.layers[1].keys[0, :, 2:5] - fresh[0, 1, 0, :, [0, 2, 5]]).abs().max() < (1e-6 if bits == 16 else .03)
    assert (cache.layers[0].values[2, :, 1] - fresh[1, 0, 2, :, 1]).abs().max() < (1e-6 if bits == 16 else .03)


def test_mask_against_a_slow_one():
    "Window, chunk, tree and padding, pair by pair"
    rng = random.Random(0)
    for trial in range(30):
        cache, B, M = KVCache(CONFIG, rows=3, max_ctx=30), rng.randint(1, 3), rng.randint(1, 5)
        held = [rng.randint(0, 12) for _ in range(3)]
        cache.set_lengths(held)
        # the parent of each node
        before = [[-1] + [rng.randrange(i) for i in range(1, M)] for _ in range(B)] if trial % 2 else None
        tree = depth = pad = None
        if before:
            tree = torch.zeros(B, M, M, dtype=torch.bool)
            for b in range(B):
                for i in range(M):
                    if i: tree[b, i] = tree[b, before[b][i]]
                    tree[b, i, i] = True
            depth = tree.sum(-1) - 1
        else: pad = [rng.randint(0, M - 1) for _ in range(B)]
        cache.select(B, M, pad, depth=depth)
        window, chunk = rng.choice([None, 3]), rng.choice([None, 4])
        got = attention_mask(cache.span, window, chunk, tree)[:, 0]
        for b in range(B):
            for i in range(M):
                if pad and i < pad[b]:
                    assert got[b, i].any()
                    continue  # padding sees something: a softmax over nothing is nan
                at = held[b] + (depth[b, i].item() if before else i - pad[b])
                for t in range(cache.span.view):
                    nth = t - held[b]
                    where = t if nth < 0 or not before else held[b] + depth[b, nth].item() if nth < M else None
                    sees = (nth < 0 or nth < M and bool(tree[b, i, nth])) if before else t <= at
                    sees = (
                        sees and where is not None and (window is None or at - where < window)
                        and (chunk is None or at // chunk == where // chunk)
                    )
                    assert bool(got[b, i, t]) == sees, (trial, b, i, t)


def test_trash_slot():
    "What has no room is written where nobody looks"
    cache = KVCache(CONFIG, rows=2, max_ctx=7)
    cache.set_lengths([5, 0])
    cache.select(2, 4)
    assert cache.span.slots.tolist() == [[5, 6, 7, 7], [0, 1, 2, 3]] and cache.span.positions.max() == 6
    k = torch.ones(2, 2, 4, 8)
    cache.update(k, k, 0)
    cache.commit()
    assert cache.layers[0].k[0, :, :5].eq(0).all() and cache.held == [5, 0]


@pytest.mark.parametrize("bits", [16, 8])
@pytest.mark.parametrize("room", [True, False])
def test_layers_lie_in_one_tensor_if_there_is_room(bits, room, monkeypatch):
    "Rows are cleared and copied in all of them, however they were allocated"
    zeros = torch.zeros
    def lacks(*shape, **kw):
        if not room and len(shape) in (4, 5) and shape[0] == 4: raise torch.OutOfMemoryError("no memory")
        return zeros(*shape, **kw)
    monkeypatch.setattr(torch, "zeros", lacks)
    cache = KVCache(CONFIG, rows=3, max_ctx=20, bits=bits)
    stores = [t for layer in cache.layers for t in layer.stores()]
    assert len(cache.span.stores()) == (bits == 8) + 1 if room else len(stores)
    assert len({t.data_ptr() for t in stores}) == len(stores) == (4 if bits == 16 else 8)
    assert sum(t.nbytes for t in cache.span.stores()) == cache.bytes and all(t.is_contiguous() for t in stores)
    fresh = new(6, 3)
    cache.select(3, 6)
    for layer in range(2): cache.update(fresh[0, layer], fresh[1, layer], layer)
    cache.commit([6, 6, 6])
    before = [t.clone() for t in stores]
    cache.free([1])
    cache.begin_like(2, 0, 4)
    for t, b in zip(stores, before):
        assert torch.equal(t[0], b[0]) and not t[1].any() and b[1].any()
        assert torch.equal(t[2, :, :4], b[0, :, :4]) and not t[2, :, 4:].any()


@pytest.mark.parametrize("again", [copy.deepcopy, lambda c: pickle.loads(pickle.dumps(c))])
def test_a_copy_is_cleared_as_the_cache_is(again):
    cache = KVCache(CONFIG, rows=2, max_ctx=20)
    alone = len(pickle.dumps(KVCache(CONFIG, rows=2, max_ctx=20, shapes=[(2, 8, 8)])))
    fresh = new(6, 2)
    cache.select(2, 6)
    for layer in range(2): cache.update(fresh[0, layer], fresh[1, layer], layer)
    cache.commit([6, 6])
    assert len(pickle.dumps(cache)) < 2.2 * alone                           # (each layer its own numbers)
    other = again(cache)
    other.free([0])
    for a, b in zip(other.layers, cache.layers):
        assert not a.k[0].any() and torch.equal(a.k[1], b.k[1]) and b.k[0].any()


def test_gradients_go_through():
    "A layer's numbers are its own: what is written to the next does not spoil what backward needs"
    model = tf.LlamaForCausalLM(CONFIG)
    model(torch.arange(6)[None], past_key_values=KVCache(CONFIG, max_ctx=20)).logits.sum().backward()
    got = model.model.embed_tokens.weight.grad.clone()
    model.zero_grad()
    model(torch.arange(6)[None], use_cache=False).logits.sum().backward()
    torch.testing.assert_close(got, model.model.embed_tokens.weight.grad, rtol=1e-4, atol=1e-5)


def test_a_row_that_overflowed_leaves_nothing():
    "0 · nan is nan: a freed row is cleared, the trash slot too"
    cache = KVCache(CONFIG, rows=2, max_ctx=16)
    cache.select(2, 3, pad=[1, 0])
    bad = torch.full((2, 2, 3, 8), torch.nan)
    [cache.update(bad, bad, i) for i in range(2)]
    cache.commit([0, 1])  # only tried, and kept in part
    cache.free([0, 1])
    assert not any(t.isnan().any() for t in cache._stores())
    cache = KVCache(CONFIG, rows=2, max_ctx=10)
    cache.set_lengths([10, 3])
    cache.select(2, 4)
    bad = torch.full((2, 2, 4, 8), torch.nan)  # behind a full row, where slots are left over
    [cache.update(bad, bad, i) for i in range(2)]
    cache.commit()
    cache.free([0, 1])
    assert not any(t.isnan().any() for t in cache._stores())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_quantized(dtype):
    x = torch.randn(2, 3, 5, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    codes, scale = quantize_tokens(x)
    assert codes.dtype == torch.int8 and scale.shape == (2, 3, 5) and codes.abs().max() <= 127
    step = x.float().abs().amax(-1, keepdim=True) / 127
    assert ((dequantize_tokens(codes, scale, torch.float32) - x.float()).abs() <= step * .51).all()
    huge = quantize_tokens(torch.tensor([[1e30, -1.0]]))
    assert huge[1].isfinite().all() and dequantize_tokens(*huge, torch.float32).isfinite().all()


def test_size_is_what_is_allocated():
    for config in (
        CONFIG, tf.GPT2Config(n_embd=48, n_layer=3, n_head=4),
        tf.Gemma3TextConfig(
            hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=1, head_dim=16
        )
    ):
        for bits in (16, 8):
            assert KVCache(config, 3, 50, torch.float16, bits=bits).bytes == KVCache.size(config, 3, 50, 2, bits)
    # heads of 8: the scales weigh a quarter
    assert KVCache.size(CONFIG, 1, 2048, 2, 8) / KVCache.size(CONFIG, 1, 2048, 2) < 0.63
    assert capacity(2048) - 2048 == 8
    latent = tf.DeepseekV3Config(
        num_hidden_layers=2, num_attention_heads=4, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=6
    )
    assert kv_shapes(latent) == [(4, 12, 6)] * 2


@pytest.mark.parametrize(
    "make",
    [
        lambda: tf.LlamaForCausalLM(CONFIG),
        lambda: tf.MistralForCausalLM(tf.MistralConfig(
            hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            vocab_size=99, sliding_window=5
        )),
        lambda: tf.Gemma3ForCausalLM(tf.Gemma3TextConfig(
            hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            vocab_size=99, head_dim=8, sliding_window=5, layer_types=["sliding_attention", "full_attention"]
        )),
        lambda: tf.GPT2LMHeadModel(tf.GPT2Config(
            n_embd=32, n_layer=2, n_head=4, vocab_size=99, bos_token_id=1, eos_token_id=2
        ))
    ],
    ids=["llama", "mistral", "gemma3", "gpt2"]
)
@torch.no_grad()
def test_in_the_place_of_transformers_own(make):
    "Beams and greedy search of generate, through reorder_cache"
    torch.manual_seed(0)
    model, ids = make().eval(), torch.randint(3, 99, (2, 9))
    run = lambda **kw: model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=7, do_sample=False, pad_token_id=0, eos_token_id=None,
        **kw
    )
    assert torch.equal(run(), run(past_key_values=KVCache(model.config, 2, 30)))
    assert torch.equal(run(num_beams=3), run(num_beams=3, past_key_values=KVCache(model.config, 6, 30)))


@torch.no_grad()
def test_a_forward_that_failed():
    "Without a Decoder too, the next one is right"
    torch.manual_seed(0)
    model, ids, cache = tf.LlamaForCausalLM(CONFIG).eval(), torch.randint(3, 99, (2, 9)), KVCache(CONFIG, 2, 30)
    model(ids[:, :4], past_key_values=cache)
    hook = model.model.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError): model(ids[:, 4:6], past_key_values=cache)
    hook.remove()
    assert cache.held == [4, 4]
    torch.testing.assert_close(
        model(ids[:, 4:], past_key_values=cache).logits, model(ids).logits[:, 4:], rtol=1e-4, atol=1e-5
    )


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("bits", [16, 8])
def test_cuda_equals_cpu(bits):
    caches, fresh = [KVCache(CONFIG, 3, 20, torch.float32, device, bits) for device in ("cpu", "cuda")], new(5, 3)
    for cache in caches:
        device = cache.lengths.device
        for rows, M, pad in ((3, 5, [0, 2, 4]), ([2, 0], 3, None), (2, 1, None)):
            cache.select(rows, M, pad)
            B = cache.span.index.numel()
            for i in range(2): cache.update(fresh[0, i, :B, :, :M].to(device), fresh[1, i, :B, :, :M].to(device), i)
            attention_mask(cache.span).cpu()
            cache.commit([M - (pad[b] if pad else 0) for b in range(B)])
        cache.move([1, 1, 2])
        cache.crop([2, 1, 4])
    a, b = caches
    assert a.held == b.held == b.lengths.tolist()
    assert all(torch.equal(x[:, :, :12], y[:, :, :12].cpu()) for x, y in zip(a._stores(), b._stores()))

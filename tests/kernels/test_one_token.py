"The attention of one token on a GPU: the bits of the Triton kernels, whatever the heads, the cache and the rotation"
import itertools

import pytest
import torch

from test_one_row import made_by_nvcc, on_a_gpu, replays

from bmlab.kernels import nvrtc, triton_attention as attention
from bmlab.kernels.nvrtc import unavailable
from bmlab.kernels.few_rows import few_rows
from bmlab.kernels.one_token import programs, takes
from bmlab.kernels.triton_products import int4_linear, int8_linear
from bmlab.plan.roofline import packed_weights

KINDS = dict(D=128, G=4, BF16=1, WIDE=0, ROPE=1, INTERLEAVED=0, NORM=0, WINDOWED=0, LENGTHS=8, ROWS=0, SOON=0)
KINDS |= dict(PARTS=8, MANY=0)


@pytest.mark.parametrize("more", [
    {}, dict(D=64, G=16, BF16=0, WIDE=1, INTERLEAVED=1, NORM=1), dict(ROPE=0, WINDOWED=1, LENGTHS=4, ROWS=4, G=1),
    dict(PARTS=16), dict(PARTS=16, MANY=1, WINDOWED=1),
])
def test_it_compiles_for_hopper(more, tmp_path):
    try: assert len(nvrtc.compiled("one_token", "sm_90", KINDS | more)) > 1000
    except OSError: made_by_nvcc("one_token", KINDS | more, tmp_path)


def drawn(keys, B=1, HK=8, G=4, D=128, T=512, dtype=torch.bfloat16, R=None, wide=False, per=False, aside=False,
          norm=False, number=torch.int64):
    "qkv, angles, a cache, lengths, and what is given by name"
    g = torch.Generator("cuda").manual_seed(keys)
    new = lambda *shape: torch.randn(*shape, device="cuda", generator=g).to(dtype)
    qkv, cache, R = new(B, 1, (G + 2) * HK * D), [new(B + 1, HK, T, D) for _ in range(2)], D if R is None else R
    angles = torch.rand(B if per else 1, 1, R, device="cuda", generator=g) * 6
    cos, sin = (t if wide else t.to(dtype) for t in (angles.cos(), angles.sin())) if R else (None, None)
    lengths = torch.tensor([max(0, keys - 37 * i) for i in range(B)], dtype=number, device="cuda")
    more = dict(rows=torch.arange(B, 0, -1, device="cuda", dtype=number)) if aside else {}
    if norm: more |= dict(q_norm=new(D), k_norm=new(D), eps=1e-6, offset=0.5)
    return (qkv, cos, sin), cache, lengths, more


def counted(monkeypatch):
    "A list that grows by one for each call of the kernel"
    calls, inner = [], attention.one_token
    monkeypatch.setattr(attention, "one_token", lambda *a, **k: calls.append(1) or inner(*a, **k))
    return calls


@on_a_gpu
@pytest.mark.parametrize("shape,more", [
    *((dict(keys=n), {}) for n in (0, 5, 127, 128, 200, 257, 511, 512)),
    *((dict(keys=n, T=1000), {}) for n in (700, 999, 1000)), (dict(keys=1000, T=4000), dict(most=1024, window=300)),
    *((dict(keys=n, T=2047), {}) for n in (3, 1024, 1030, 1900, 2046, 2047)),
    *((dict(keys=n, T=n + 20), {}) for n in (1040, 1200, 1500, 1700)),
    *((dict(keys=n, T=9000), dict(most=4096)) for n in (0, 100, 2047, 2048, 2049, 3000, 4000, 4095)),
    *((dict(keys=n, T=4095), {}) for n in (2050, 4094, 4095)),
    *((dict(keys=n, T=4000, HK=2, D=64, G=16), {}) for n in (1500, 2100, 3999)),
    *((dict(keys=3500, T=4000, HK=4), dict(window=n)) for n in (1, 100, 1024, 2049, 3000)),
    (dict(keys=1500, T=2000, B=2, HK=4, aside=True), {}), (dict(keys=3100, T=5000, HK=2, norm=True), dict(most=3200)),
    (dict(keys=2040, T=9000, B=3, HK=2, per=True, number=torch.int32), dict(most=2048)),
    (dict(keys=300, B=3, aside=True, per=True), {}), (dict(keys=300, B=2, aside=True, number=torch.int32), {}),
    (dict(keys=300, G=1, HK=4), {}), (dict(keys=300, G=7, HK=2, D=64), {}),
    (dict(keys=300, G=16, HK=2, D=64, wide=True), {}), (dict(keys=300, dtype=torch.float16), {}),
    (dict(keys=300, R=64), {}), (dict(keys=300, R=0), {}), (dict(keys=300), dict(interleaved=True)),
    (dict(keys=300), dict(window=100)), (dict(keys=100, D=64), dict(window=20)), (dict(keys=300), dict(scale=0.3)),
    (dict(keys=300, norm=True), {}), (dict(keys=90, norm=True, D=64, wide=True), {}),
    (dict(keys=300, norm=True, R=32), {}), (dict(keys=300, norm=True, G=5), dict(interleaved=True)),
    (dict(keys=300, norm=True, dtype=torch.float16), {}),
], ids=str)
def test_bits_are_those_of_triton(shape, more, monkeypatch):
    turned, cache, lengths, named = drawn(**shape)
    apart, calls = [t.clone() for t in cache], counted(monkeypatch)
    got = attention.rope_and_attend(*turned, *cache, lengths, **named, **more)
    assert len(calls) == 1
    monkeypatch.setattr(attention, "takes", lambda *a: False)
    want = attention.rope_and_attend(*turned, *apart, lengths, **named, **more)
    assert len(calls) == 1 and torch.isfinite(got).all()
    assert torch.equal(got, want) and all(map(torch.equal, cache, apart))


@on_a_gpu
@pytest.mark.parametrize("keys", [60, 400])
def test_it_is_the_softmax(keys):
    "Beside torch's own attention in float64, of keys that were turned there too"
    (qkv, cos, sin), (k, v), lengths, _ = drawn(keys, T=512, wide=True)
    y = attention.rope_and_attend(qkv, cos, sin, k, v, lengths)
    q, key, value = qkv.double().view(48, 128).split([32, 8, 8])
    turn = lambda x: x * cos[0].double() + torch.cat([-x[:, 64:], x[:, :64]], 1) * sin[0].double()
    keys_of, values_of = (t[0, :, :keys + 1].double().clone() for t in (k, v))
    keys_of[:, keys], values_of[:, keys] = turn(key), value
    want = torch.nn.functional.scaled_dot_product_attention(
        turn(q).view(1, 32, 1, 128), keys_of[None], values_of[None], enable_gqa=True)
    torch.testing.assert_close(y.double(), want, atol=2e-2, rtol=2e-2)


@on_a_gpu
@pytest.mark.parametrize("bits", [16, 8, 4])
@pytest.mark.parametrize("keys,B", [
    *((keys, B) for keys in (60, 300) for B in (1, 2, 4)), (1500, 1), (1500, 4), (3000, 1)])
def test_blocks_in_a_graph_wait_for_what_is_ahead(bits, keys, B, monkeypatch):
    "Each kernel begins while the one ahead ends, and gives the bits of kernels that are apart; angles are made in it"
    g = torch.Generator("cuda").manual_seed(0)
    shapes = dict(qkv=(1536, 1024), o=(1024, 1024), up=(4096, 1024), down=(1024, 2048))
    made = lambda N, K: packed_weights(
        N, K, bits, torch.bfloat16, torch.randint(256, (N * K * 2,), dtype=torch.uint8, device="cuda", generator=g), 0)
    floats = lambda *shape: (torch.randn(shape, device="cuda", generator=g).bfloat16() / 32,)
    weights = [{n: (floats if bits == 16 else made)(*shape) for n, shape in shapes.items()} for _ in range(4)]
    T = 512 if keys < 500 else keys + 500
    lengths, caches = drawn(keys, B, HK=2, T=T)[2], [drawn(keys + i, B, HK=2, T=T)[1] for i in range(4)]
    x, turn, calls = floats(B, 1024)[0] * 32, torch.rand(64, device="cuda", generator=g), counted(monkeypatch)
    ones = torch.ones(1024, device="cuda", dtype=torch.bfloat16)
    linear = {8: int8_linear, 4: int4_linear}.get(bits)
    def chain(wait=lambda: None, n=3):
        h, at = x, lengths.clone()
        for _ in range(n):
            cos, sin = attention.rope_angles(at[:, None], turn, torch.bfloat16)
            ahead = h * ones
            for w, cache in zip(weights, caches):
                if linear: q = linear(ahead, *w["qkv"], norm=(h, 1e-5), soon=True)
                else: q = few_rows(h, *w["qkv"], norm=(ones, 1e-5, 0.0), soon=True)
                wait()
                y = attention.rope_and_attend(q.view(B, 1, -1), cos, sin, *cache, at, soon=True)
                wait()
                y = y.transpose(1, 2).reshape(B, -1)
                if linear: h, ahead = linear(y, *w["o"], residual=h, ahead=(ones, 0.0), spread=True)
                else: h = few_rows(y, *w["o"], residual=h, spread=True)
                wait()
                if linear: y = linear(ahead, *w["up"], norm=(h, 1e-5), gate="silu")
                else: y = few_rows(h, *w["up"], norm=(ones, 1e-5, 0.0), gate="silu")
                wait()
                if linear: h, ahead = linear(y, *w["down"], residual=h, ahead=(ones, 0.0))
                else: h = few_rows(y, *w["down"], residual=h)
                wait()
            at = at + 1
        return h
    before = [[t.clone() for t in cache] for cache in caches]
    apart = chain(torch.cuda.synchronize)
    assert torch.isfinite(apart).all() and apart.std() > 0 and len(calls) == 12
    def begin():
        for cache, old in zip(caches, before): [t.copy_(o) for t, o in zip(cache, old)]
    replays(chain, apart, begin)


@on_a_gpu
def test_what_it_does_not_take():
    (qkv, cos, sin), (k, v), lengths, named = drawn(300, norm=True)
    def fits(qkv=qkv, cos=cos, sin=sin, k=k, v=v, lengths=lengths, rows=None, most=None, norms=(None, None), **more):
        return takes(qkv, (cos, sin), (k, v), (lengths, rows), most, norms, **more)
    weight = named["q_norm"]
    assert fits() and fits(cos=None, sin=None, most=1024) and fits(norms=(weight, weight)) and fits(rows=lengths.int())
    assert fits(most=1025) and fits(most=4096) and not fits(most=4097) and not fits(most=0)
    assert not fits(k=k.to(torch.int8)) and not fits(v=v.half())
    assert not fits(qkv.float(), k=k.float(), v=v.float()) and not fits(lengths=lengths.short())
    assert not fits(cos=cos.half(), sin=sin.half()) and not fits(norms=(weight, weight.float()))
    short = dict(cos=cos[..., :100], sin=sin[..., :100])
    assert not fits(**short) and fits(**short, interleaved=True)
    assert not fits(qkv.expand(60, -1, -1)), "more programs than fit at once"
    assert programs(1) == 1 and programs(1024) == 8 and programs(2048) == programs(9000) == 16


def test_a_cpu_has_none():
    assert unavailable() or torch.cuda.is_available()
    lengths = torch.zeros(1, dtype=torch.int64)
    for dtype, norm in itertools.product((torch.float32, torch.bfloat16), (None, torch.ones(128))):
        cache = (torch.zeros(1, 1, 8, 128, dtype=dtype),) * 2
        assert not takes(torch.zeros(1, 1, 384, dtype=dtype), (None, None), cache, (lengths, None), None, (norm, norm))

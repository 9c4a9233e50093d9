"The attention of one token on a GPU: the bits of the Triton kernels, whatever the heads, the cache and the rotation"
import itertools

import pytest
import torch

from test_one_row import made_by_nvcc, on_a_gpu

from bmlab.kernels import nvrtc, triton_attention as attention
from bmlab.kernels.nvrtc import unavailable
from bmlab.kernels.one_token import programs, takes

KINDS = dict(D=128, G=4, BF16=1, WIDE=0, ROPE=1, INTERLEAVED=0, NORM=0, WINDOWED=0, LENGTHS=8, ROWS=0, SOON=0)


@pytest.mark.parametrize("more", [
    {}, dict(D=64, G=16, BF16=0, WIDE=1, INTERLEAVED=1, NORM=1), dict(ROPE=0, WINDOWED=1, LENGTHS=4, ROWS=4, G=1),
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
def test_in_a_graph_it_waits_for_what_is_ahead():
    "Forty tokens behind each other, each product's input the attention of the one before"
    (qkv, cos, sin), cache, lengths, _ = drawn(300)
    weight = torch.randn(4096, qkv.shape[2], device="cuda").bfloat16() / 64
    def chain(wait=lambda: None):
        x, at = qkv, lengths.clone()
        for _ in range(40):
            x = (attention.rope_and_attend(x, cos, sin, *cache, at).transpose(1, 2).reshape(1, -1) @ weight)[None]
            x = x / x.float().norm().to(x.dtype) * 64
            at = at + 1
            wait()
        return x
    apart = chain(torch.cuda.synchronize)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph): y = chain()
    for _ in range(3):
        y.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(y, apart)


@on_a_gpu
def test_what_it_does_not_take():
    (qkv, cos, sin), (k, v), lengths, named = drawn(300, norm=True)
    weight = named["q_norm"]
    assert takes(qkv, cos, k) and takes(qkv, None, k, 1024) and takes(qkv, cos, k, None, weight)
    assert not takes(qkv, cos, k, 1025) and not takes(qkv, cos, k.to(torch.int8))
    assert not takes(qkv.float(), cos, k.float())
    assert not takes(qkv, cos.half(), k) and not takes(qkv, cos, k, None, weight.float())
    assert not takes(qkv, cos[..., :100], k) and takes(qkv, cos[..., :100], k, interleaved=True)
    assert not takes(qkv.expand(60, -1, -1), cos, k), "more programs than fit at once"
    assert programs(1) == 1 and programs(1024) == 8


def test_a_cpu_has_none():
    assert unavailable() or torch.cuda.is_available()
    for dtype, norm in itertools.product((torch.float32, torch.bfloat16), (None, torch.ones(128))):
        assert not takes(torch.zeros(1, 1, 384, dtype=dtype), None, torch.zeros(1, 1, 8, 128, dtype=dtype), None, norm)

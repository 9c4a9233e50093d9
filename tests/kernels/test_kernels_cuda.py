"The packed layers and their Triton kernel on a GPU, against float64; the notebook and benchmarks/ measure the speed"
import copy

import pytest
import torch
import torch.nn.functional as F
import transformers as tf
from torch import nn

from bmlab.core import count
from bmlab.kernels.codes import dequantize_rows, packed_linear, quantize_rows
from bmlab.kernels.layers import Int8Embedding, Int8Linear, pack_linears

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
# relative; float32: one long sum; half precisions: the one rounding of the result
LIMIT = {torch.float32: 1e-5, torch.float16: 2**-11, torch.bfloat16: 2**-8}
DTYPES = list(LIMIT)
# (N, K)
SHAPES = [(4096, 4096), (10240, 4096), (576, 1536), (577, 1531), (1, 7), (33, 129), (30720, 4096), (129, 16384)]


def make(N, K, M=16, dtype=torch.bfloat16, seed=0):
    torch.manual_seed(seed)
    codes = torch.randint(-127, 128, (N, K), dtype=torch.int8, device="cuda")
    return (
        torch.randn(M, K, device="cuda").to(dtype), codes, torch.rand(N, device="cuda") / 1000 + 1e-5,
        torch.randn(N, device="cuda").to(dtype))


def reference(x, codes, scale, bias=None):
    y = (x.double() @ codes.double().T) * scale.double()
    return y if bias is None else y + bias.double()


def error(got, want): return ((got.double() - want).norm() / want.norm()).item()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("N,K", SHAPES)
def test_kernel_equals_float64(N, K, dtype):
    from bmlab.kernels.triton_products import int8_linear
    x, codes, scale, bias = make(N, K, dtype=dtype)
    for M in (1, 2, 7, 16):
        for b in (None, bias):
            got = int8_linear(x[:M], codes, scale, b)
            assert got.dtype == dtype and error(got, reference(x[:M], codes, scale, b)) < LIMIT[dtype], (M, b is None)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("N,K", [(4096, 4096), (577, 1531), (10240, 4096)])
def test_a_row_does_not_depend_on_its_company(N, K, dtype):
    from bmlab.kernels.triton_products import int8_linear
    x, codes, scale, bias = make(N, K, dtype=dtype)
    alone = torch.cat([int8_linear(row, codes, scale, bias) for row in x.split(1)])
    for M in range(1, 17): assert torch.equal(int8_linear(x[:M], codes, scale, bias), alone[:M]), M
    order = torch.randperm(16, device="cuda")
    assert torch.equal(int8_linear(x[order], codes, scale, bias), alone[order])
    assert torch.equal(int8_linear(x, codes, scale, bias), int8_linear(x, codes, scale, bias))


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("N,K", [(4096, 4096), (20480, 4096), (4096, 10240), (96, 640)])
def test_gate_and_residual_see_the_rounded_product(N, K, dtype, bits):
    "One kernel or three: the same bits, for any number of rows"
    from bmlab.kernels.codes import quantize_groups
    from bmlab.kernels.triton_products import int4_linear, int8_linear, silu_mul
    x, codes, scale, bias = make(N, K, dtype=dtype)
    packed = (codes, scale) if bits == 8 else quantize_groups(torch.randn(N, K, device="cuda"), 64)
    linear = int8_linear if bits == 8 else int4_linear
    for M in (1, 5, 16):
        for b in (None, bias):
            y, r = linear(x[:M], *packed, b), torch.randn(M, N, device="cuda").to(dtype)
            assert torch.equal(linear(x[:M], *packed, b, residual=r), y + r), (M, b is None)
            for gate in ("silu", "gelu_tanh", "gelu"):
                want, half = silu_mul(y, gate), r[:, :N // 2].contiguous()
                assert torch.equal(linear(x[:M], *packed, b, gate=gate), want) and torch.equal(
                    linear(x[:M], *packed, b, gate=gate, residual=half), want + half), (M, b is None, gate)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("N,K", [(4096, 4096), (1536, 1024), (5632, 1024), (20480, 4096), (1024, 2816), (96, 640)])
def test_norm_between_two_products(N, K, dtype, bits):
    """Close to the definition; a row alone has the bits that it has among sixteen

    (There another kernel takes its root mean square.)"""
    from bmlab.kernels.codes import quantize_groups
    from bmlab.kernels.triton_products import int4_linear, int8_linear
    x, codes, scale, bias = make(N, K, dtype=dtype)
    packed = (codes, scale) if bits == 8 else quantize_groups(torch.randn(N, K, device="cuda"), 128)
    linear, rows, weight = (
        int8_linear if bits == 8 else int4_linear, torch.randn(16, K, device="cuda").to(dtype),
        torch.rand(N, device="cuda").to(dtype))
    r = torch.randn(16, N, device="cuda").to(dtype)
    for b in (None, bias):
        want = linear(x.float(), *packed).double() * torch.rsqrt(
            rows.double().square().mean(-1, keepdim=True) + 1e-5
        ) + (0 if b is None else b.double())
        whole = linear(x, *packed, b, norm=(rows, 1e-5))
        assert error(whole, want) < CLOSE[dtype]
        total, ahead = linear(x, *packed, b, residual=r, ahead=(weight, 1.))
        assert torch.equal(total, linear(x, *packed, b, residual=r))
        assert torch.equal(ahead, (total.float() * (weight.float() + 1)).to(dtype))
        for M in (1, 2, 8, 12):
            for at in range(0, 16 - M + 1, M):
                part = slice(at, at + M)
                assert torch.equal(linear(x[part], *packed, b, norm=(rows[part], 1e-5)), whole[part]), (M, at)
                assert all(
                    torch.equal(a, w[part])
                    for a, w in zip(linear(x[part], *packed, b, residual=r[part], ahead=(weight, 1.0)), (total, ahead))
                ), (M, at)
        if N % 2 == 0:
            gated = linear(x, *packed, b, norm=(rows, 1e-5), gate="silu")
            assert error(gated, F.silu(whole[:, :N // 2].double()) * whole[:, N // 2:].double()) < CLOSE[dtype]
            one = lambda i: linear(x[i:i + 1], *packed, b, norm=(rows[i:i + 1], 1e-5), gate="silu")
            assert torch.equal(torch.cat([one(i) for i in range(16)]), gated)


def test_views_into_a_slab():
    "Streamed weights are views at any byte offset; what lies around them is neither read into the sums nor written"
    from bmlab.kernels.triton_products import int8_linear
    x, codes, scale, _ = make(96, 640)
    want = int8_linear(x, codes, scale)
    for offset in (0, 1, 4, 16, 100):
        slab = torch.full((codes.numel() + 200,), 127, dtype=torch.int8, device="cuda")
        view = slab[offset:offset + codes.numel()].view(codes.shape).copy_(codes)
        assert torch.equal(int8_linear(x, view, scale), want), offset
    guarded = torch.full((18, 96), 7.0, device="cuda", dtype=x.dtype)
    guarded[1:17] = want
    assert (guarded[0] == 7).all() and (guarded[17] == 7).all()


def test_more_than_two_to_the_31_weights():
    from bmlab.kernels.triton_products import int8_linear
    N, K = 2**17 + 16, 2**14
    codes, scale = torch.zeros(N, K, dtype=torch.int8, device="cuda"), torch.ones(N, device="cuda")
    codes[-1] = 1
    codes[5] = 2
    y = int8_linear(torch.ones(2, K, device="cuda", dtype=torch.bfloat16), codes, scale)
    assert y[:, -1].tolist() == [K, K] and y[:, 5].tolist() == [2 * K, 2 * K] and y.double().sum().item() == 6 * K


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("M", [1, 16, 17, 300])
def test_layer_and_its_gradients(M, dtype):
    torch.manual_seed(0)
    layer = Int8Linear.from_float(nn.Linear(1024, 700)).to("cuda", dtype)
    assert (layer.codes.dtype, layer.scale.dtype, layer.bias.dtype) == (torch.int8, torch.float32, dtype)
    x = torch.randn(2, M, 1024, device="cuda", dtype=dtype)[:1].requires_grad_()
    g = torch.randn(1, M, 700, device="cuda", dtype=dtype)
    y = layer(x)
    y.backward(g)
    W = layer.dequantize(torch.float64)
    # above 16 rows the weight is rounded too
    most = {torch.float32: 1e-5, torch.float16: 2**-9, torch.bfloat16: 2**-6}[dtype]
    assert error(y, F.linear(x.double(), W, layer.bias.double())) < most
    assert error(x.grad, g.double() @ W) < most
    assert error(layer.bias.grad, g.double().sum((0, 1))) < most
    with torch.no_grad(): assert error(layer(x), F.linear(x.double(), W, layer.bias.double())) < most


@pytest.mark.parametrize("M", [1, 16, 64])
def test_layer_in_a_cuda_graph(M):
    layer = Int8Linear.from_float(nn.Linear(2048, 1024)).to("cuda", torch.bfloat16)
    table = Int8Embedding.from_float(nn.Embedding(100, 2048)).to("cuda", torch.bfloat16)
    ids = torch.randint(100, (M,), device="cuda")
    with torch.no_grad():
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side): layer(table(ids))
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph): y = layer(table(ids))
        for seed in range(3):
            torch.manual_seed(seed)
            ids.copy_(torch.randint(100, (M,), device="cuda"))
            graph.replay()
            assert torch.equal(y, layer(table(ids)))


def small_llama(tied=True):
    torch.manual_seed(0)
    return tf.LlamaForCausalLM(
        tf.LlamaConfig(
            hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            vocab_size=1000, tie_word_embeddings=tied)
    ).eval()


def test_packed_before_or_after_the_move():
    ids = torch.randint(1000, (2, 7))
    moved, there = pack_linears(small_llama()).to("cuda"), pack_linears(small_llama().to("cuda"))
    for model in (moved, there):
        assert model.lm_head.codes is model.model.embed_tokens.codes and model.lm_head.codes.is_cuda
        assert count(model) == count(pack_linears(small_llama()))
    with torch.no_grad():
        cpu = pack_linears(small_llama())(ids).logits
        assert error(moved(ids.cuda()).logits.cpu(), cpu.double()) < 1e-3
    # a division may round the other way on a tie
    assert (moved.lm_head.codes != there.lm_head.codes).float().mean() < 1e-3
    back = copy.deepcopy(moved).cpu()
    assert back.lm_head.codes is back.model.embed_tokens.codes and not back.lm_head.codes.is_cuda


def test_packing_needs_little_memory():
    layer = nn.Linear(8192, 32768, bias=False, device="cuda", dtype=torch.bfloat16)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    packed = Int8Linear.from_float(layer)
    # the codes and a few slices
    assert torch.cuda.max_memory_allocated() - before < packed.codes.numel() + (400 << 20)


@pytest.mark.parametrize("M", [1, 5, 40])
def test_compiled_in_one_piece(M):
    layer = Int8Linear.from_float(nn.Linear(512, 384)).to("cuda", torch.bfloat16)
    x = torch.randn(M, 512, device="cuda", dtype=torch.bfloat16)
    compiled = torch.compile(layer, fullgraph=True)
    with torch.no_grad(): assert error(compiled(x), layer(x).double()) < 2**-7
    x.requires_grad_()
    got, want = (torch.autograd.grad(f(x).float().square().sum(), x)[0] for f in (compiled, layer))
    assert error(got, want.double()) < 2**-6


def test_quantized_on_the_gpu():
    torch.manual_seed(0)
    w = torch.randn(300, 1000, device="cuda") * torch.logspace(-5, 2, 300, device="cuda")[:, None]
    codes, scale = quantize_rows(w)
    assert ((w - dequantize_rows(codes, scale)).abs() <= scale[:, None] * (0.5 + 1e-4)).all()
    on_cpu = quantize_rows(w.cpu())
    assert torch.allclose(on_cpu[1], scale.cpu(), rtol=1e-6, atol=0)
    assert ((on_cpu[0].int() - codes.cpu().int()).abs() <= 1).all()


def test_odd_inputs():
    x, codes, scale, _ = make(64, 128)
    assert packed_linear(x[:0], codes, scale).shape == (0, 64)
    assert packed_linear(x.double(), codes, scale).dtype == torch.float64
    assert torch.equal(
        packed_linear(torch.cat([x, x], 1)[:, ::2], codes, scale),
        packed_linear(torch.cat([x, x], 1)[:, ::2].contiguous(), codes, scale))
    with torch.autocast("cuda", torch.bfloat16): assert packed_linear(x.float(), codes, scale).dtype == torch.bfloat16


# ---- int4, GEMM, the kernels of a decode step

SHAPES4 = [
    (4096, 4096, 128), (12288, 4096, 128), (20480, 4096, 128), (4096, 10240, 128), (4096, 14336, 64), (28672, 4096, 64),
    (577, 1536, 32), (1, 64, 32), (33, 4224, 128), (9000, 96, 32)]  # (N, K, group)
# attention: the probabilities are rounded too
CLOSE = {torch.float32: 1e-5, torch.float16: 2**-9, torch.bfloat16: 2**-6}


def make4(N, K, group, M=16, dtype=torch.bfloat16, seed=0):
    torch.manual_seed(seed)
    codes = torch.randint(256, (N, K // 2), dtype=torch.uint8, device="cuda")
    scale, zero = (
        torch.rand(N, K // group, device="cuda").div(500).add(1e-4).half(),
        torch.randn(N, K // group, device="cuda").div(500).half())
    return torch.randn(M, K, device="cuda").to(dtype), codes, scale, zero, torch.randn(N, device="cuda").to(dtype)


def reference4(x, codes, scale, zero, bias=None):
    byte = codes.view(*scale.shape, -1)
    q = torch.cat([byte & 15, byte >> 4], 2).double()
    return F.linear(
        x.double(), ((q - 8) * scale[..., None].double() + zero[..., None].double()).flatten(1),
        None if bias is None else bias.double())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("N,K,group", SHAPES4)
def test_int4_equals_float64(N, K, group, dtype):
    from bmlab.kernels.triton_products import int4_linear
    x, *packed, bias = make4(N, K, group, dtype=dtype)
    for M in (1, 2, 7, 16):
        for b in (None, bias):
            got = int4_linear(x[:M], *packed, b)
            assert got.dtype == dtype and error(got, reference4(x[:M], *packed, b)) < LIMIT[dtype], (M, b is None)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("N,K,group", [(4096, 4096, 128), (
    20480, 4096, 128), (577, 1536, 32), (4096, 14336, 64), (1536, 1024, 128), (1024, 2816, 128), (5632, 1024, 128)])
def test_int4_row_does_not_depend_on_its_company(N, K, group, dtype):
    "Up to eight rows take narrower tiles: the same bits"
    from bmlab.kernels.triton_products import int4_linear
    x, *packed = make4(N, K, group, dtype=dtype)
    alone = torch.cat([int4_linear(row, *packed) for row in x.split(1)])
    for M in range(1, 17): assert torch.equal(int4_linear(x[:M], *packed), alone[:M]), M
    order = torch.randperm(16, device="cuda")
    assert torch.equal(int4_linear(x[order], *packed), alone[order])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_nibble(dtype):
    "Each of the 256 bytes at each place of a word, alone under an x that picks one column: the unpacking is exact"
    from bmlab.kernels.triton_products import int4_linear
    codes = torch.arange(256, device="cuda", dtype=torch.uint8)[:, None].repeat(1, 16).contiguous()
    one, none = torch.ones(256, 1, device="cuda").half(), torch.zeros(256, 1, device="cuda").half()
    for columns in (range(16), range(16, 32)):
        x = torch.zeros(16, 32, device="cuda", dtype=dtype)
        for i, c in enumerate(columns): x[i, c] = 1
        want = (codes[:, 0] & 15 if columns[0] == 0 else codes[:, 0] >> 4).to(dtype) - 8
        assert torch.equal(int4_linear(x, codes, one, none), want.expand(16, -1))


def test_int4_views_into_a_slab():
    from bmlab.kernels.triton_products import int4_gemm, int4_linear
    x, codes, scale, zero, _ = make4(96, 1024, 128)
    want, wide = int4_linear(x, codes, scale, zero), int4_gemm(x, codes, scale, zero)
    for offset in (0, 2, 16, 100, 256):
        views = []
        for t, fill in ((codes, 255), (scale, 7), (zero, 7)):
            size = t.numel() * t.element_size()
            slab = torch.full((size + 600,), fill, dtype=torch.uint8, device="cuda")
            views.append(slab[offset:offset + size].view(t.dtype).view(t.shape).copy_(t))
        assert torch.equal(int4_linear(x, *views), want) and torch.equal(int4_gemm(x, *views), wide), offset


def test_int4_more_than_two_to_the_31_bytes():
    from bmlab.kernels.triton_products import int4_linear
    N, K = 2**18 + 16, 2**14
    codes = torch.full((N, K // 2), 0x88, dtype=torch.uint8, device="cuda")                  # q = 8: weight zero
    codes[-1] = 0x99
    codes[5] = 0xAA
    scale, zero = torch.ones(N, K // 128, device="cuda").half(), torch.zeros(N, K // 128, device="cuda").half()
    y = int4_linear(torch.ones(2, K, device="cuda", dtype=torch.bfloat16), codes, scale, zero)
    assert y[:, -1].tolist() == [K, K] and y[:, 5].tolist() == [2 * K, 2 * K] and y.double().sum().item() == 6 * K


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("M", [1, 17, 64, 65, 300])
def test_gemm_equals_float64(M, dtype):
    from bmlab.kernels.triton_products import int4_gemm, int8_gemm
    for N, K in ((4096, 4096), (577, 1531), (129, 70), (1, 7)):
        x, codes, scale, bias = make(N, K, M, dtype)
        assert error(int8_gemm(x, codes, scale, bias), reference(x, codes, scale, bias)) < max(LIMIT[dtype], 3e-5), (
            N, K)  # float32: three TF32 products, summed by the tensor core
    # int4 weights are rounded to the dtype
    rounded = {torch.float32: 3e-5, torch.float16: 2**-10, torch.bfloat16: 2**-7}[dtype]
    for N, K, group in ((4096, 4096, 128), (577, 1536, 64), (1, 96, 32)):
        x, *packed = make4(N, K, group, M, dtype)
        assert error(int4_gemm(x, *packed), reference4(x, *packed)) < rounded, (N, K, group)


@pytest.mark.parametrize("M", [1, 16, 40])
def test_kernels_in_one_graph_and_compiled(M):
    from bmlab.kernels.triton_products import int4_gemm, int4_linear, silu_mul
    from bmlab.kernels.triton_attention import rms_norm
    x, *packed, _ = make4(2048, 1024, 128, M)
    weight = torch.rand(1024, device="cuda", dtype=torch.bfloat16)
    def step(x):
        y, total = rms_norm(x, weight, 1e-5, x)
        return silu_mul((int4_linear if M <= 16 else int4_gemm)(y, *packed)) + total
    step(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph): out = step(x)
    for seed in range(3):
        torch.manual_seed(seed)
        x.copy_(torch.randn_like(x))
        graph.replay()
        assert torch.equal(out, step(x))
    with torch.no_grad(): assert error(torch.compile(step, fullgraph=True)(x), step(x).double()) < 2**-7


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_and_gate(dtype):
    from bmlab.kernels.triton_products import silu_mul
    from bmlab.kernels.triton_attention import rms_norm
    most = {torch.float32: 1e-6, torch.float16: 2**-10, torch.bfloat16: 2**-7}[dtype]
    for shape in ((1, 4096), (3, 5, 577), (16, 16384), (2, 1)):
        x, r, w = (
            torch.randn(shape, device="cuda").to(dtype), torch.randn(shape, device="cuda").to(dtype),
            torch.randn(shape[-1], device="cuda").to(dtype))
        y, total = rms_norm(x, w, 1e-5, r, offset=1.)
        assert torch.equal(total, x + r) and torch.equal(y, rms_norm(x + r, w, 1e-5, offset=1.))
        assert error(y, F.rms_norm(total.double(), shape[-1:], w.double() + 1, 1e-5)) < most
        gate_up = 4 * torch.cat([x, r], -1)
        for name, act in (("silu", F.silu), ("gelu", F.gelu), ("gelu_tanh", lambda g: F.gelu(g, approximate="tanh"))):
            gate, up = gate_up.double().chunk(2, -1)
            assert error(silu_mul(gate_up, name), act(gate) * up) < most, name
    assert silu_mul(torch.tensor([[-1e4, 1e4, 1., 1.]], device="cuda")).tolist() == [[0., 1e4]]


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_sum_and_norm(dtype):
    "The bits of two norms, each a kernel; in a graph between products, of which the one behind begins early"
    from bmlab.kernels.few_rows import few_rows, takes
    from bmlab.kernels.triton_attention import add_norm, rms_norm
    for shape in ((1, 2560), (3, 5, 577), (16, 5376), (2, 1152), (4, 16384), (2, 1)):
        y, x, w, v = (torch.randn(s, device="cuda").to(dtype) for s in (shape, shape, shape[-1], shape[-1]))
        total, normed = add_norm(y, x, (w, 1e-6, 1.0), (v, 1e-5, 0.0))
        assert torch.equal(total, x + rms_norm(y, w, 1e-6, offset=1.0))
        assert torch.equal(normed, rms_norm(total, v, 1e-5))
        assert torch.equal(add_norm(y, x, (w, 1e-6, 1.0)), total)
    D = 2048
    weight, (x, w) = torch.randn(D, D, device="cuda").to(dtype) / D**0.5, torch.rand(2, 1, D, device="cuda").to(dtype)
    if not takes(x, weight): return                                 # (float32, or no Hopper)
    end = w[0], 1e-6, 1.0
    def chain(x, n, wait=lambda: None):
        for i in range(n):
            for more in (dict(gate="gelu_tanh"), {}):               # the next begins before this one, or after
                y = few_rows(x, weight, norm=end)
                wait()
                x = add_norm(y, x, end)
                wait()
                h = few_rows(x, weight, norm=end, **more)
                wait()
                x = add_norm(h if not more else torch.cat([h, h], 1), x, end)
                wait()
        return x
    apart = chain(x, 20, torch.cuda.synchronize)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side): chain(x, 2)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph): out = chain(x, 20)
    for _ in range(5):
        out.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, apart)


def quantize_heads(x):
    scale = (x.float().abs().amax(-1) / 127).clamp(6e-8, 65504).half()
    return (x.float() / scale.float()[..., None]).round().clamp(-127, 127).to(torch.int8), scale


@pytest.mark.parametrize("bits8", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("M", [4, 33])                           # of a program each, and by tiles
def test_rope_and_store(dtype, bits8, M):
    from bmlab.kernels.triton_attention import rope_and_store
    torch.manual_seed(0)
    B, H, HK, D, T = 3, 32, 8, 128, 80
    qkv, angles = torch.randn(B, M, (H + 2 * HK) * D, device="cuda").to(dtype), torch.rand(B, M, D, device="cuda") * 6
    cos, sin, start = angles.cos().to(dtype), angles.sin().to(dtype), torch.tensor([0, 36, 7], device="cuda")
    store = [torch.full((B, HK, T, D), 7, device="cuda", dtype=torch.int8 if bits8 else dtype) for _ in "kv"]
    scales = [torch.full((B, HK, T), 7, device="cuda", dtype=torch.float16) for _ in "kv"] if bits8 else [None, None]
    q = rope_and_store(qkv, cos, sin, *store, start, *scales)
    heads = qkv.double().view(B, M, -1, D).transpose(1, 2)
    partner = torch.cat([-heads[..., D // 2:], heads[..., :D // 2]], -1)
    turned = heads * cos.double()[:, None] + partner * sin.double()[:, None]
    most = {torch.float32: 1e-6, torch.float16: 2**-10, torch.bfloat16: 2**-7}[dtype]
    assert q.dtype == dtype and error(q, turned[:, :H]) < most
    slots = start[:, None] + torch.arange(M, device="cuda")
    for b in range(B):
        for at, want in ((0, turned[b, H:H + HK]), (1, heads[b, H + HK:])):                  # (Hk, M, D)
            got = store[at][b, :, slots[b]]
            if not bits8: assert error(got, want) < most
            elif at == 1:
                assert all(
                    torch.equal(a, w)
                    for a, w in zip(
                        (got, scales[at][b, :, slots[b]]),
                        quantize_heads(qkv.view(B, M, -1, D).transpose(1, 2)[b, H + HK :]))
                )  # values: bit for bit
            else: assert error(got.double() * scales[at][b, :, slots[b]].double()[..., None], want) < 0.01
            rest = torch.ones(T, dtype=torch.bool, device="cuda")
            rest[slots[b]] = False
            assert (store[at][b, :, rest] == 7).all()                                        # nothing else was touched
    # nothing is written outside
    some = torch.tensor([[-1, T, T + 5, 10**6]], device="cuda")
    edge = rope_and_store(qkv[:1, :4].contiguous(), None, None, *store, some, *scales)
    assert torch.equal(edge, qkv[:1, :4].view(1, 4, -1, D).transpose(1, 2)[:, :H])


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("D", [64, 128, 256])
def test_many_tokens_are_turned_and_stored_as_few(D, packed):
    "With norms, a row's tokens behind each other or each a row of its own: to the bit"
    from bmlab.kernels.triton_attention import rope_and_store
    torch.manual_seed(0)
    M, H, HK, T = 37, 8, 2, 64
    qkv, angles = torch.randn(1, M, (H + 2 * HK) * D, device="cuda").bfloat16(), torch.rand(1, M, D, device="cuda") * 6
    cos, sin, norms = angles.cos().bfloat16(), angles.sin().bfloat16(), torch.randn(2, D, device="cuda").bfloat16()
    slots, norms = torch.randperm(T, device="cuda")[None, :M], dict(zip(("q_norm", "k_norm"), norms))
    one, every = ([torch.zeros(2, HK, T, D, device="cuda", dtype=torch.bfloat16) for _ in "kv"] for _ in "12")
    row = torch.ones(1, dtype=torch.int64, device="cuda")
    q = torch.cat([
        rope_and_store(*(t[:, i:i + 1] for t in (qkv, cos, sin)), *one, slots[:, i:i + 1], rows=row, **norms)
        for i in range(M)], 2)
    if packed:
        got = rope_and_store(*(t.transpose(0, 1) for t in (qkv, cos, sin)), *every,
                             slots.mT.contiguous(), rows=row.expand(M), **norms).transpose(0, 2)
    else: got = rope_and_store(qkv, cos, sin, *every, slots, rows=row, **norms)
    assert torch.equal(got, q) and every[0].any() and torch.equal(torch.stack(one), torch.stack(every))


def attention(q, k, v, lengths, k_scale=None, v_scale=None, mask=None, window=None, causal=True):
    (B, H, M, D), T = q.shape, k.shape[2]
    k, v = (t.double() * (1 if s is None else s[..., None].double()) for t, s in ((k, k_scale), (v, v_scale)))
    slot, newest = torch.arange(T, device=q.device), torch.arange(M, device=q.device)
    last = lengths[:, None] + newest if causal else (lengths - 1)[:, None].expand(B, M)
    unread = (slot > last[:, -1:]).view(B, 1, T, 1)
    k, v = (t.masked_fill(unread, 0).repeat_interleave(H // k.shape[1], 1) for t in (k, v))
    if mask is not None: last = lengths[:, None] - 1 + mask.sum(-1)
    seen = slot <= last[..., None]
    if mask is not None:
        for b, n in enumerate(lengths.tolist()):
            seen[b, :, n:n + M] = mask[b]
            seen[b, :, n + M:] = False
    if window is not None: seen &= slot > last[..., None] - window
    return (q.double() @ k.transpose(-1, -2) * D**-0.5).masked_fill(~seen[:, None], float("-inf")).softmax(
        -1
    ).nan_to_num() @ v


def attention_case(B, M, H, HK, D, T, dtype, bits8, lengths=None):
    torch.manual_seed(0)
    q = torch.randn(B, H, M, D, device="cuda").to(dtype)
    k, v = (torch.randn(B, HK, T, D, device="cuda").to(dtype) for _ in "kv")
    if lengths is None: lengths = torch.randint(0, T - M + 1, (B,), device="cuda")
    else: lengths = torch.tensor(lengths, device="cuda")
    (k, ks), (v, vs) = (quantize_heads(k), quantize_heads(v)) if bits8 else ((k, None), (v, None))
    for b in range(B):
        for t in (k, v): t[b, :, lengths[b] + M:] = 99 if bits8 else float("nan")
        for t in (ks, vs):
            if t is not None: t[b, :, lengths[b] + M:] = float("nan")
    return dict(q=q, k=k, v=v, lengths=lengths, k_scale=ks, v_scale=vs)


@pytest.mark.parametrize("bits8", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("B,M,H,HK,D,T", [(1, 1, 32, 32, 128, 544), (
    4, 16, 32, 8, 128, 5000), (2, 5, 9, 3, 64, 100), (2, 3, 8, 1, 256, 700), (1, 2, 4, 4, 80, 65), (1, 1, 2, 2, 20, 1)])
def test_attention_equals_float64(B, M, H, HK, D, T, dtype, bits8):
    from bmlab.kernels.triton_attention import decode_attention
    case = attention_case(B, M, H, HK, D, T, dtype, bits8)
    most = max(CLOSE[dtype], 2**-6 if bits8 and dtype != torch.float32 else 0)
    assert error(decode_attention(**case), attention(**case)) < most
    tree = torch.eye(M, device="cuda").bool().repeat(B, 1, 1)
    tree[:, 1:, 0] = True
    for extra in (dict(mask=tree), dict(mask=tree, window=40), dict(window=7), dict(causal=False)):
        if "causal" in extra: case["lengths"] = (case["lengths"] + 0).clamp_min(1)
        assert error(decode_attention(**case, **extra), attention(**case, **extra)) < most, extra


@pytest.mark.parametrize("bits8", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("H,HK", [(32, 32), (32, 8), (9, 3)])
def test_attention_row_does_not_depend_on_its_company(H, HK, dtype, bits8):
    "Alone or in a batch, one token or sixteen at once, in a short cache or a long one, in any cache row: the same bits"
    from bmlab.kernels.triton_attention import decode_attention
    # over the ends of steps and of spans
    case = attention_case(3, 16, H, HK, 128, 1200, dtype, bits8, lengths=[1140, 250, 1020])
    whole = decode_attention(**case)
    assert torch.equal(decode_attention(**case), whole)
    for b in range(3):
        one = {n: t if t is None else t[b:b + 1] for n, t in case.items()}
        assert torch.equal(decode_attention(**one), whole[b:b + 1])
        longer = one | {
            n: torch.cat([one[n], torch.full_like(one[n], 99)], 2)
            for n in ("k", "v", "k_scale", "v_scale")
            if one[n] is not None
        }
        assert torch.equal(decode_attention(**longer), whole[b:b + 1])
        for m in range(16):
            single = one | dict(q=one["q"][:, :, m:m + 1], lengths=one["lengths"] + m)
            assert torch.equal(decode_attention(**single)[:, :, 0], whole[b:b + 1, :, m]), (b, m)
        assert torch.equal(
            decode_attention(**case | dict(q=one["q"], lengths=one["lengths"]), rows=torch.tensor([b], device="cuda")),
            whole[b : b + 1])


@pytest.mark.parametrize("bits8", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("B,M,H,HK,D,T,lengths", [
    (1, 1, 32, 32, 128, 1600, [900]), (3, 1, 8, 2, 64, 900, [0, 63, 899]), (2, 4, 9, 9, 80, 300, [60, 254]),
    (5, 2, 4, 2, 128, 4400, [1, 64, 65, 1023, 4200]), (1, 5, 8, 2, 64, 600, [400])])
def test_attention_summed_by_the_last_program_is_the_same_bits(B, M, H, HK, D, T, lengths, dtype, bits8):
    "Many times over, since who comes last is chance; and the counts are zeros again"
    from bmlab.kernels.triton_attention import decode_attention
    case, arrived = (
        attention_case(B, M, H, HK, D, T, dtype, bits8, lengths=lengths),
        torch.zeros(64, dtype=torch.int32, device="cuda"))
    for more in ({}, dict(mask=torch.ones(B, M, M, dtype=torch.bool, device="cuda").tril())):
        want = decode_attention(**case, **more)
        for _ in range(100): assert torch.equal(decode_attention(**case, **more, arrived=arrived), want)
    assert not arrived.any()
    none = case | dict(lengths=torch.zeros_like(case["lengths"]))
    assert torch.equal(decode_attention(**none, causal=False, arrived=arrived), torch.zeros_like(want))


@pytest.mark.parametrize("bits8", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("H,HK,D,R,T,lengths,window", [
    (32, 32, 128, 128, 700, [70], None), (32, 32, 128, 128, 5000, [4999], None),
    (8, 2, 64, 64, 900, [0, 63, 64, 899], None), (9, 9, 80, 20, 300, [60, 299], 40),
    (32, 1, 128, 64, 3000, [1023, 1024, 2999], None)])
def test_one_token_turned_stored_and_attended_by_one_kernel(H, HK, D, R, T, lengths, window, dtype, bits8):
    "The bits of two kernels, in what is given and what is written"
    from bmlab.kernels.triton_attention import decode_attention, rope_and_attend, rope_and_store
    torch.manual_seed(0)
    B, lengths, arrived = (
        len(lengths), torch.tensor(lengths, device="cuda"), torch.zeros(256, dtype=torch.int32, device="cuda"))
    k, v = (torch.randn(B, HK, T, D, device="cuda").to(dtype) for _ in "kv")
    stores = [t for pair in zip(quantize_heads(k), quantize_heads(v)) for t in pair] if bits8 else [k, v, None, None]
    for interleaved in (False, True):
        for counts in (None, arrived):
            for _ in range(5):
                qkv, angles = (
                    torch.randn(B, 1, (H + 2 * HK) * D, device="cuda").to(dtype),
                    torch.rand(B, 1, R, device="cuda") * 6)
                cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
                two, one = ([t if t is None else t.clone() for t in stores] for _ in range(2))
                q = rope_and_store(qkv, cos, sin, two[0], two[1], lengths, *two[2:], interleaved=interleaved)
                want = decode_attention(q, two[0], two[1], lengths, None, *two[2:], None, window, arrived=counts)
                assert torch.equal(
                    rope_and_attend(
                        qkv, cos, sin, one[0], one[1], lengths, None, *one[2:], window, None, interleaved, counts,
                        int(lengths.max()) + 1),
                    want,
                )
                assert all(a is None or torch.equal(a, b) for a, b in zip(one, two)) and not arrived.any()
    ends = torch.full_like(lengths, T)
    torch.cuda.synchronize()
    # a full cache: nothing is written
    full = rope_and_attend(qkv, cos, sin, one[0], one[1], ends, None, *one[2:])
    assert full.isfinite().all() and all(a is None or torch.equal(a, b) for a, b in zip(one, two))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_greatest_and_the_angles(dtype):
    from bmlab.kernels.triton_attention import argmax, rope_angles
    torch.manual_seed(0)
    for rows, V in ((1, 30720), (8, 128256), (3, 4097), (1, 400000)):
        x = torch.randn(rows, V, device="cuda").to(dtype)
        x[:, V - 2:] = x[:, V // 2:V // 2 + 1] = 9.                                     # of equal ones the first
        assert torch.equal(argmax(x), torch.full((rows,), V // 2, device="cuda"))
        assert torch.equal(argmax(-x), (-x.float()).argmax(-1))
        for at in (0, V // 2, V - 1):
            bad = x.clone()
            bad[-1, at] = torch.nan
            assert argmax(bad).tolist() == [V // 2] * (rows - 1) + [-1]
    inv_freq, places = (
        5e5 ** (-torch.arange(0, 128, 2, device="cuda") / 128), torch.randint(131072, (2, 3), device="cuda"))
    emb = torch.cat([places[..., None].float() * inv_freq] * 2, -1)
    for got, want in zip(rope_angles(places, inv_freq, dtype, 1.25), (emb.cos(), emb.sin())):
        assert torch.equal(got, (want * 1.25).to(dtype))


def test_attention_in_a_graph_follows_its_lengths():
    from bmlab.kernels.triton_attention import decode_attention, rope_and_attend, rope_and_store, rms_norm
    # a second program is given its first key on the way, at 256
    B, H, HK, D, T = 2, 8, 2, 64, 400
    k, v = (torch.zeros(B, HK, T, D, device="cuda", dtype=torch.bfloat16) for _ in "kv")
    qkv, lengths = (
        torch.randn(B, 1, (H + 2 * HK) * D, device="cuda", dtype=torch.bfloat16), torch.tensor([0, 180], device="cuda"))
    def step(k, v):
        q = rope_and_store(qkv, None, None, k, v, lengths)
        return decode_attention(q, k, v, lengths)
    step(k.clone(), v.clone())
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph): out = step(k, v)
    k2, v2 = k.clone().zero_(), v.clone().zero_()
    k.zero_()
    v.zero_()
    for token in range(130):
        torch.manual_seed(token)
        qkv.copy_(torch.randn_like(qkv))
        graph.replay()
        assert torch.equal(out, step(k2, v2)), token
        lengths += 1
    assert torch.equal(k, k2) and torch.equal(v, v2)
    # behind a kernel that ends late: what it writes is waited for
    raw, k3, v3 = qkv.clone(), k.clone().zero_(), v.clone().zero_()
    def late(k, v): return rope_and_attend(rms_norm(raw, None), None, None, k, v, lengths)
    lengths.copy_(torch.tensor([0, 180]))
    k2.zero_()
    v2.zero_()
    late(k3.clone(), v3.clone())
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph): out = late(k3, v3)
    k3.zero_()
    v3.zero_()
    for token in range(130):
        torch.manual_seed(token)
        raw.copy_(torch.randn_like(raw))
        graph.replay()
        assert torch.equal(
            out,
            decode_attention(rope_and_store(rms_norm(raw, None), None, None, k2, v2, lengths), k2, v2, lengths)), token
        lengths += 1
    assert torch.equal(k3, k2) and torch.equal(v3, v2)


# ---- training over packed weights
# ---------------------------------------------------------------------------------------------------

class Block(nn.Module):
    "A feed-forward block of a LLaMA, with a LoRA on each layer"
    def __init__(self, D=1024, F_=2816):
        super().__init__()
        self.norm = nn.RMSNorm(D)
        self.gate, self.up, self.down = (
            nn.Linear(D, F_, bias=False), nn.Linear(D, F_, bias=False), nn.Linear(F_, D, bias=False))
    def forward(self, x):
        h = self.norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def packed_pair(bits, layers=4):
    "Blocks with packed weights under LoRA, and the same with the widened weights"
    from bmlab.delta.lora import Lora
    torch.manual_seed(0)
    packed = nn.Sequential(*(Block() for _ in range(layers))).to("cuda", torch.bfloat16)
    widened = copy.deepcopy(packed)
    pack_linears(packed, bits=bits, modules=["gate", "up", "down"])
    for n, m in packed.named_modules():
        if hasattr(m, "dequantize"): widened.get_submodule(n).weight = nn.Parameter(m.dequantize(torch.bfloat16))
    for m in (packed, widened):
        torch.manual_seed(1)
        d = Lora(m, r=8, modules=["gate", "up", "down"], dtype=torch.float32).freeze()
        with torch.no_grad(): [p.normal_(0, .05) for p in d.parameters()]
    return packed, widened


def lora_grads(model, compiled, rows=512):
    for b in model: b.compile() if compiled else None
    x = torch.randn(rows, 1024, device="cuda", dtype=torch.bfloat16, generator=torch.Generator("cuda").manual_seed(2))
    model(x).float().square().mean().backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("bits", [8, 4])
def test_the_way_back_is_that_of_widened_weights(bits, compiled):
    torch.compiler.reset()
    got, want = (lora_grads(m, compiled) for m in packed_pair(bits))
    assert got.keys() == want.keys() and len(got) == 24
    if not compiled:
        for n in want: assert torch.equal(got[n], want[n]), n
    for n in want: assert error(got[n], want[n].double()) < 2**-6, n
    # one layer, given what comes back to it: bit for bit
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        linear = nn.Linear(1024, 2816, bias=False, device="cuda")
        layer = pack_linears(nn.Sequential(linear), bits=bits, modules="0")[0]
        plain = nn.Linear(1024, 2816, bias=False, device="cuda", dtype=dtype)
        with torch.no_grad(): plain.weight.copy_(layer.dequantize(dtype))
        x, up = (
            torch.randn(700, 1024, device="cuda", dtype=dtype, requires_grad=True),
            torch.randn(700, 2816, device="cuda", dtype=dtype))
        f = torch.compile(layer, fullgraph=True) if compiled else layer
        assert torch.equal(torch.autograd.grad(f(x), x, up)[0], torch.autograd.grad(plain(x), x, up)[0]), dtype


@pytest.mark.parametrize("bits", [8, 4])
def test_a_compiled_step_over_packed_weights_keeps_nothing_wide(bits):
    "A step holds the activations between forward and backward, no more than over plain weights, which are there anyway"
    held = []
    for model in packed_pair(bits, layers=8):
        torch.compiler.reset()
        lora_grads(model, True)
        torch.cuda.synchronize()
        for p in model.parameters(): p.grad = None
        x = torch.randn(512, 1024, device="cuda", dtype=torch.bfloat16)
        before = torch.cuda.memory_allocated()
        y = model(x)
        held.append(torch.cuda.memory_allocated() - before)
        del y
    assert held[0] <= 1.02 * held[1] + (1 << 20), held

"The packed layers and their Triton kernel on a GPU, against float64; speed is measured in the notebook and in benchmarks/"
import copy

import pytest
import torch
import torch.nn.functional as F
import transformers as tf
from torch import nn

from bmlab.core import count
from bmlab.kernels import Int8Embedding, Int8Linear, dequantize_rows, pack_linears, packed_linear, quantize_rows

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
LIMIT = {torch.float32: 1e-5, torch.float16: 2**-11, torch.bfloat16: 2**-8}   # relative; float32: one long sum; half precisions: the one rounding of the result
DTYPES = list(LIMIT)
SHAPES = [(4096, 4096), (10240, 4096), (576, 1536), (577, 1531), (1, 7), (33, 129), (30720, 4096), (129, 16384)]   # (N, K)


def make(N, K, M=16, dtype=torch.bfloat16, seed=0):
    torch.manual_seed(seed)
    codes = torch.randint(-127, 128, (N, K), dtype=torch.int8, device="cuda")
    return torch.randn(M, K, device="cuda").to(dtype), codes, torch.rand(N, device="cuda") / 1000 + 1e-5, torch.randn(N, device="cuda").to(dtype)


def reference(x, codes, scale, bias=None):
    y = (x.double() @ codes.double().T) * scale.double()
    return y if bias is None else y + bias.double()


def error(got, want): return ((got.double() - want).norm() / want.norm()).item()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("N,K", SHAPES)
def test_kernel_equals_float64(N, K, dtype):
    from bmlab.triton_kernels import int8_linear
    x, codes, scale, bias = make(N, K, dtype=dtype)
    for M in (1, 2, 7, 16):
        for b in (None, bias):
            got = int8_linear(x[:M], codes, scale, b)
            assert got.dtype == dtype and error(got, reference(x[:M], codes, scale, b)) < LIMIT[dtype], (M, b is None)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("N,K", [(4096, 4096), (577, 1531), (10240, 4096)])
def test_a_row_does_not_depend_on_its_company(N, K, dtype):
    from bmlab.triton_kernels import int8_linear
    x, codes, scale, bias = make(N, K, dtype=dtype)
    alone = torch.cat([int8_linear(row, codes, scale, bias) for row in x.split(1)])
    for M in range(1, 17): assert torch.equal(int8_linear(x[:M], codes, scale, bias), alone[:M]), M
    order = torch.randperm(16, device="cuda")
    assert torch.equal(int8_linear(x[order], codes, scale, bias), alone[order])
    assert torch.equal(int8_linear(x, codes, scale, bias), int8_linear(x, codes, scale, bias))


def test_views_into_a_slab():
    "Streamed weights are views at any byte offset; what lies around them is neither read into the sums nor written"
    from bmlab.triton_kernels import int8_linear
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
    from bmlab.triton_kernels import int8_linear
    N, K = 2**17 + 16, 2**14
    codes, scale = torch.zeros(N, K, dtype=torch.int8, device="cuda"), torch.ones(N, device="cuda")
    codes[-1] = 1; codes[5] = 2
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
    y = layer(x); y.backward(g)
    W = layer.dequantize(torch.float64)
    most = {torch.float32: 1e-5, torch.float16: 2**-9, torch.bfloat16: 2**-6}[dtype]   # above 16 rows the weight is rounded too
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
    return tf.LlamaForCausalLM(tf.LlamaConfig(hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                                              vocab_size=1000, tie_word_embeddings=tied)).eval()


def test_packed_before_or_after_the_move():
    ids = torch.randint(1000, (2, 7))
    moved, there = pack_linears(small_llama()).to("cuda"), pack_linears(small_llama().to("cuda"))
    for model in (moved, there):
        assert model.lm_head.codes is model.model.embed_tokens.codes and model.lm_head.codes.is_cuda
        assert count(model) == count(pack_linears(small_llama()))
    with torch.no_grad():
        cpu = pack_linears(small_llama())(ids).logits
        assert error(moved(ids.cuda()).logits.cpu(), cpu.double()) < 1e-3
    assert (moved.lm_head.codes != there.lm_head.codes).float().mean() < 1e-3   # a division may round the other way on a tie
    back = copy.deepcopy(moved).cpu()
    assert back.lm_head.codes is back.model.embed_tokens.codes and not back.lm_head.codes.is_cuda


def test_packing_needs_little_memory():
    layer = nn.Linear(8192, 32768, bias=False, device="cuda", dtype=torch.bfloat16)
    torch.cuda.synchronize(); torch.cuda.reset_peak_memory_stats(); before = torch.cuda.memory_allocated()
    packed = Int8Linear.from_float(layer)
    assert torch.cuda.max_memory_allocated() - before < packed.codes.numel() + (400 << 20)   # the codes and a few slices


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
    assert torch.allclose(on_cpu[1], scale.cpu(), rtol=1e-6, atol=0) and ((on_cpu[0].int() - codes.cpu().int()).abs() <= 1).all()


def test_odd_inputs():
    x, codes, scale, _ = make(64, 128)
    assert packed_linear(x[:0], codes, scale).shape == (0, 64)
    assert packed_linear(x.double(), codes, scale).dtype == torch.float64
    assert torch.equal(packed_linear(torch.cat([x, x], 1)[:, ::2], codes, scale), packed_linear(torch.cat([x, x], 1)[:, ::2].contiguous(), codes, scale))
    with torch.autocast("cuda", torch.bfloat16): assert packed_linear(x.float(), codes, scale).dtype == torch.bfloat16

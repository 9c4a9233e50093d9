"Weights of three and two bits are multiplied by as they lie: by C, by Triton on a GPU, and in a fused decoder"
import copy

import pytest
import torch
import torch.nn.functional as F
import transformers as tf

from bmlab.infer.decode import Decoder
from bmlab.infer.fused import fuse_decode
from bmlab.cook import quantize
from bmlab.kernels import cpu, low_bits
from bmlab.kernels.low_bits import LowBitLinear, low_linear, low_widen

needs_gpu = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
TINY = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            head_dim=16, vocab_size=128, pad_token_id=0, bos_token_id=1, eos_token_id=2)
# (rows of codes, columns, columns of a group): odd numbers of rows, of groups, and rows of less than a tile
SHAPES = [(4096, 4096, 128), (577, 1536, 64), (1, 32, 32), (33, 416, 32), (129, 14336, 128), (5, 192, 64)]


def made_up(N, K, group, bits, device="cpu"):
    torch.manual_seed(0)
    codes = torch.randint(0, 256, (N, K // 8 * bits), dtype=torch.uint8)
    scale = torch.rand(N, K // group).half() / 50
    return [t.to(device) for t in (codes, scale, torch.randn(N, K // group).half() / 50)]


def apart(got, want): return ((got.double() - want.double()).norm() / want.double().norm()).item()


def packed_llama(bits):
    torch.manual_seed(0)
    model = tf.LlamaForCausalLM(tf.LlamaConfig(**TINY)).eval()
    return quantize(model, bits=bits, group_size=32)


@torch.no_grad()
def walk(model, device="cpu"):
    decoder = Decoder(model, max_batch=2, max_ctx=64)
    assert decoder.mode == "static", decoder.why_generate
    out = [decoder.prefill([[5, 9, 33, 7], [7, 11]])[:, None], *(decoder.step([[i + 3], [40 + i]]) for i in range(3))]
    return torch.cat(out, 1).float()


@pytest.mark.skipif(not cpu.available(), reason="no C compiler, or no AVX2")
@pytest.mark.parametrize("bits", [3, 2])
def test_a_fused_decoder_multiplies_by_the_codes(bits, monkeypatch):
    packed = packed_llama(bits)
    widened, rows = copy.deepcopy(packed), []
    for n, m in list(widened.named_modules()):
        if isinstance(m, LowBitLinear):
            plain = torch.nn.Linear(m.in_features, m.out_features, bias=m.bias is not None)
            plain.weight.data = m.dequantize()
            widened.set_submodule(n, plain)
    want, run = walk(widened), cpu.low_bit_rows
    monkeypatch.setattr(cpu, "low_bit_rows", lambda x, *more: rows.append(len(x)) or run(x, *more))
    monkeypatch.setattr(low_bits, "low_widen", None)                            # nothing is widened
    fuse_decode(packed)
    assert any("_bmlab_fused" in type(m).__dict__ for m in packed.modules())
    rows.clear()                                                                # of the proofs
    assert apart(walk(packed), want) < 1e-5
    # a block is one call of its own: the heads of three steps of two rows, and of the prompts of both
    assert rows.count(2) == 3 + 2


@pytest.mark.parametrize("bits", [3, 2])
def test_more_rows_than_the_kernel_takes_and_other_dtypes(bits):
    matrix = made_up(40, 96, 32, bits)
    for dtype, limit in ((torch.float32, 1e-5), (torch.float64, 1e-6), (torch.float16, 2e-3), (torch.bfloat16, 1e-2)):
        want = low_widen(*matrix, bits, torch.float64)
        for rows in (0, 1, 16, 17, 40):
            x = torch.randn(rows, 96).to(dtype)
            got = low_linear(x, *matrix, bits)
            assert got.dtype == dtype and got.shape == (rows, 40)
            if rows: assert apart(got, x.double() @ want.T) < limit, (dtype, rows)


@pytest.mark.parametrize("bits", [3, 2])
def test_a_compiler_sees_one_operator(bits):
    matrix, x = made_up(40, 96, 32, bits), torch.randn(3, 96)
    f = torch.compile(lambda v: low_linear(v, *matrix, bits), fullgraph=True, backend="eager")
    torch.testing.assert_close(f(x), low_linear(x, *matrix, bits), rtol=1e-5, atol=1e-5)


class TestGPU:
    pytestmark = needs_gpu

    @pytest.mark.parametrize("bits", [3, 2])
    @pytest.mark.parametrize("N,K,group", SHAPES)
    def test_products_equal_the_widened_one(self, N, K, group, bits):
        matrix = made_up(N, K, group, bits, "cuda")
        wide = low_widen(*(t.cpu() for t in matrix), bits)
        assert torch.equal(low_widen(*matrix, bits).cpu(), wide)
        # (2^-8 is the rounding of a sum to bf16; a tenth for what was rounded on the way to it)
        for dtype, limit in ((torch.bfloat16, 1.1 * 2**-8), (torch.float16, 2**-11), (torch.float32, 1e-5)):
            w = low_widen(*matrix, bits, dtype)
            assert torch.equal(w.cpu(), wide.to(dtype))
            for rows in (1, 4, 16, 17, 64, 128):
                x = torch.randn(rows, K, device="cuda").to(dtype)
                want, got = x.double() @ w.double().T, low_linear(x, *matrix, bits)
                assert got.dtype == dtype and got.shape == want.shape
                # (of one output or five, all of whose terms may cancel, rounding is measured by the terms)
                size = max(1.0, ((x.double() ** 2 @ w.double().T ** 2).sum().sqrt() / want.norm()).item())
                if rows <= 64 or dtype != torch.float16: assert apart(got, want) < limit * size, (dtype, rows)
                assert apart(got, F.linear(x, w)) < 2 * limit * size, (dtype, rows)

    @pytest.mark.parametrize("bits", [3, 2])
    def test_a_row_does_not_depend_on_its_company(self, bits):
        matrix, x = made_up(577, 1536, 64, bits, "cuda"), torch.randn(16, 1536, device="cuda").bfloat16()
        whole = low_linear(x, *matrix, bits)
        for rows in range(1, 17): assert torch.equal(low_linear(x[:rows], *matrix, bits), whole[:rows]), rows

    @pytest.mark.parametrize("bits", [3, 2])
    def test_the_way_back_is_that_of_the_widened_weight(self, bits):
        matrix, grads = made_up(640, 1024, 128, bits, "cuda"), []
        w = low_widen(*matrix, bits, torch.bfloat16)
        for f in (lambda x: low_linear(x, *matrix, bits), lambda x: F.linear(x, w)):
            torch.manual_seed(1)
            x = torch.randn(32, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            up = torch.randn(32, 640, device="cuda", dtype=torch.bfloat16)
            grads.append(torch.autograd.grad(f(x), x, up)[0])
        assert apart(*grads) < 2**-7

    @pytest.mark.parametrize("bits", [3, 2])
    def test_a_fused_decoder_on_a_gpu(self, bits):
        packed = packed_llama(bits).to("cuda", torch.bfloat16)
        plain = copy.deepcopy(packed)
        fuse_decode(packed)
        assert apart(walk(packed), walk(plain)) < 0.03

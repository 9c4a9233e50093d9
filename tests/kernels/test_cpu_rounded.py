"Inputs rounded to int8: the products are those of plain arithmetic with llama.cpp's rule, whatever rows and threads"
import copy
import sys

import pytest
import torch
import transformers as tf

from bmlab.infer.decode import Decoder
from bmlab.infer.engine import wrap
from bmlab.infer.fused import fuse_decode
from bmlab.kernels import cpu
from bmlab.kernels.cpu_block import CpuBlock, run_blocks
from bmlab.kernels.layers import Int4Linear, Int8Linear, pack_linears, round_inputs
from bmlab.kernels.low_bits import LowBitLinear
from bmlab.models.load import load

pytestmark = pytest.mark.skipif(not cpu.available(), reason="no C compiler, or no AVX2")
SMALL = dict(vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, head_dim=16, max_position_embeddings=128, pad_token_id=0)
FAMILIES = {
    "llama": tf.LlamaConfig(**SMALL), "qwen2, biases": tf.Qwen2Config(**SMALL),
    "qwen3, norms of heads": tf.Qwen3Config(**SMALL), "mistral, a window": tf.MistralConfig(**SMALL, sliding_window=6),
    "gemma3, four norms": tf.Gemma3TextConfig(**SMALL, sliding_window=6),
}


def q8(x, block):
    "(Q8_0's numbers of x in float64: d = max |x| / 127, q = round(x / d); how far each may be off, being near a tie)"
    M, K = x.shape
    out, off = torch.zeros(M, K, dtype=torch.float64), torch.zeros(M, K, dtype=torch.float64)
    for k in range(0, K, block):
        part = x[:, k:k + block].double()
        d = part.abs().amax(1, keepdim=True) / 127
        q = part / d.clamp_min(1e-300)
        out[:, k:k + block] = q.round() * d
        off[:, k:k + block] = d * ((q - q.floor() - 0.5).abs() < 1e-4)
    return out, off


def matrix(N, K, g, bits):
    "(tensors, what they stand for in float64), unpacked bit by bit"
    if bits == 8:
        codes, scale = torch.randint(-128, 128, (N, K)).to(torch.int8), torch.rand(N) / 100
        return (codes, scale), codes.double() * scale[:, None].double()
    layer = Int4Linear(K, N, False, g) if bits == 4 else LowBitLinear(K, N, False, g, bits)
    layer._put(torch.randint(0, 256, layer.codes.shape).to(torch.uint8), torch.rand(N, K // g).half() / 10,
               torch.randn(N, K // g).half())
    return tuple(layer.tensors), layer.dequantize(torch.float64)


@pytest.mark.parametrize("g,bits", [(0, 8), *((g, b) for g in (32, 64, 128) for b in (4, 3, 2))])
def test_products_are_those_of_rounded_inputs(g, bits):
    torch.manual_seed(bits + g)
    sizes = [(1, 1), (5, 31), (7, 64), (33, 100), (17, 1537), (48, 576), (3, 5000)]
    for N, K in sizes if bits == 8 else [(1, g), (5, 3 * g), (33, 6 * g), (17, 5120)]:
        tensors, wide = matrix(N, K, g, bits)
        for power in (1, 5):
            for dtype, e in ((torch.float32, 2e-6), (torch.bfloat16, 2**-8)):
                x = (torch.randn(40, K)**power).to(dtype)
                rounded, off = q8(x, g or 32)
                want, near = rounded @ wide.T, off @ wide.abs().T + 4e-6 * rounded.abs() @ wide.abs().T
                for M in (1, 2, 3, 4, 7, 16, 17, 22, 40):
                    got = cpu.rounded_rows(x[:M], *tensors, bits=bits)
                    assert got.dtype == dtype
                    assert ((got - want[:M]).abs() <= e * want[:M].abs() + near[:M]).all(), (N, K, M, dtype)
                    torch.set_num_threads(2)
                    try: assert torch.equal(cpu.rounded_rows(x[:M], *tensors, bits=bits), got)
                    finally: torch.set_num_threads(1)
                many = cpu.rounded_rows(x, *tensors, bits=bits)
                for M in (17, 23): assert torch.equal(cpu.rounded_rows(x[40 - M:], *tensors, bits=bits), many[40 - M:])


def test_odd_numbers_stay_in_their_row():
    tensors, wide = matrix(20, 96, 0, 8)
    x = torch.randn(20, 96)
    x[3, 40], x[5, 2], x[7], x[9] = float("inf"), float("nan"), 0, torch.randn(96) * 1e-37
    for M in (10, 20):
        y = cpu.rounded_rows(x[:M], *tensors)
        assert y[[3, 5]].isnan().all() and y[[0, 1, 2, 4, 6, 8]].isfinite().all() and not y[7].any()
        want = x[9:10].double() @ wide.T
        assert (y[9] - want).abs().max() <= 0.03 * want.abs().max()
    assert cpu.rounded_rows(x[:0], *tensors) is None and cpu.rounded_rows(x.double(), *tensors) is None


def emulated(model, ids):
    "Logits of the model's own code, its packed layers exact, on inputs that q8 rounded"
    def before(m, args):
        x, K = args[0], args[0].shape[-1]
        return (q8(x.reshape(-1, K), getattr(m, "group_size", 32))[0].to(x.dtype).view(x.shape),)
    hooks = [m.register_forward_pre_hook(before) for m in model.modules() if isinstance(m, (Int8Linear, Int4Linear))]
    try: return model(input_ids=ids, use_cache=False).logits
    finally: [h.remove() for h in hooks]


@torch.no_grad()
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("family,bits", [*((f, 8) for f in FAMILIES), ("llama", 4), ("gemma3, four norms", 4)])
def test_prompts_and_steps_are_those_of_rounded_inputs(family, bits, threads, monkeypatch):
    torch.manual_seed(0)
    model = tf.AutoModelForCausalLM.from_config(FAMILIES[family]).eval()
    for n, p in model.named_parameters():
        if "norm" in n or "bias" in n: torch.nn.init.normal_(p, 0.5, 0.3)
    pack_linears(model, bits=bits, group_size=32)
    texts = torch.randint(1, 97, (2, 40))
    exact, want = model(input_ids=texts, use_cache=False).logits, emulated(model, texts)
    decoder = Decoder(model, max_batch=2, max_ctx=64)
    fused = fuse_decode(model)
    assert fused.table.query("form == 'block'").fused.all()
    seen, takes = [], CpuBlock.__call__
    monkeypatch.setattr(CpuBlock, "__call__", lambda s, x, *a: seen.append(x[..., 0].numel()) or takes(s, x, *a))
    together = lambda blocks, x, *a: seen.append(x[..., 0].numel()) or run_blocks(blocks, x, *a)
    monkeypatch.setattr(sys.modules[fuse_decode.__module__], "run_blocks", together)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        round_inputs(model)
        # one row behind padding, one longer
        got = [decoder.prefill([texts[0, :35].tolist(), texts[1, :31].tolist()])]
        assert seen and max(seen) > 16
        for n in range(5): got.append(decoder.step(torch.stack([texts[0, 35 + n], texts[1, 31 + n]])[:, None])[:, 0])
    finally: torch.set_num_threads(before)
    for row, first in ((0, 34), (1, 30)):
        mine = torch.stack([g[row] for g in got])
        error, rounding = ((t - want[row, first:first + 6]).norm() for t in (mine, exact[row, first:first + 6]))
        assert error < 0.2 * rounding, (row, error, rounding)
    round_inputs(model, False)                              # as it was
    again = decoder.prefill([texts[0, :35].tolist()])
    torch.testing.assert_close(again, exact[:1, 34], rtol=2e-3, atol=2e-4)


def test_the_engine_takes_it_and_gives_it_back():
    model = tf.LlamaForCausalLM(FAMILIES["llama"]).eval()
    with pytest.raises(ValueError, match="input_bits=8 with float weights"): wrap(model, input_bits=8, device="cpu")
    with pytest.raises(ValueError, match="input_bits=4: 16 keeps"): wrap(model, bits=8, input_bits=4, device="cpu")
    with pytest.raises(ValueError, match="no packed layer"): round_inputs(copy.deepcopy(model))
    e = wrap(model, bits=8, input_bits=8, device="cpu", max_ctx=32)
    inside = [m.input_bits for m in model.modules() if isinstance(m, Int8Linear)]
    e.close()
    assert set(inside) == {8} and {m.input_bits for m in model.modules() if isinstance(m, Int8Linear)} == {16}


def test_a_real_model_is_decoded_with_rounded_inputs():
    "Thirty layers' roundings part its two ways further than a packed model's without them; fused before or after"
    e = wrap("smollm2-135m", bits=4, input_bits=8, device="cpu", max_ctx=64)
    try:
        assert e.decoder.mode == "static", e.decoder.why_generate
        first = e.decoder.prefill([list(range(30, 60))])
        forms = {type(m.__dict__["_fused"]) for m in e.model.model.layers}
    finally: e.close()
    model, _ = load("smollm2-135m", device="cpu")
    pack_linears(model, bits=4)
    fused = fuse_decode(round_inputs(model))
    assert forms == {type(m.__dict__["_fused"]) for m in model.model.layers} and fused.table.fused.all()
    assert torch.equal(Decoder(model, max_ctx=64).prefill([list(range(30, 60))]), first)
    assert {m.input_bits for m in model.modules() if isinstance(m, (Int4Linear, Int8Linear))} == {8}


@torch.no_grad()
def test_a_layer_rounds_where_no_kernel_can():
    layer = Int8Linear.from_float(torch.nn.Linear(96, 20))
    x = torch.randn(30, 96)
    round_inputs(layer)
    want = q8(x, 32)[0] @ layer.dequantize(torch.float64).T + layer.bias.double()
    for rows in (x, x[:3], x.half(), x.double()):
        got = layer(rows)
        assert got.dtype == rows.dtype
        torch.testing.assert_close(got.double(), want[:len(rows)], rtol=2e-2, atol=2e-2)
    x.requires_grad_()
    with torch.enable_grad(): gradient, = torch.autograd.grad(layer(x).sum(), x)              # what trains is exact
    torch.testing.assert_close(gradient, layer.dequantize().sum(0).expand(30, -1), rtol=1e-5, atol=1e-5)

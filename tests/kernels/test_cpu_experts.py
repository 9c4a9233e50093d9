"Experts that C computes in one call are those that torch computes in float64: every form, any tokens and threads"
import random

import pytest
import torch
import torch.nn.functional as F
from transformers import GptOssConfig, Qwen3MoeConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from bmlab.kernels import cpu
from bmlab.kernels.codes import dequantize_groups, dequantize_rows, quantize_groups, quantize_rows
from bmlab.kernels.cpu_experts import CpuExperts
from bmlab.kernels.ggml import _any_blocks, widen

pytestmark = pytest.mark.skipif(not cpu.available(), reason="no C compiler, or no AVX2")
OSS = dict(gate="oss", beside=True, alpha=1.702, limit=1.5)
GATES = [dict(gate="silu", beside=False), dict(gate="silu", beside=True), dict(gate="gelu_tanh", beside=False), OSS]


def stack(kind, E, N, K):
    "(what a stack holds, its kind as C is told, its float weights)"
    w = torch.randn(E, N, K) / K**0.5
    if kind == "float32": return [w], None, w
    if kind == "bfloat16": return [w.bfloat16()], None, w.bfloat16()
    if kind == "MXFP4":
        blocks = _any_blocks(kind, E * N, K // 32).view(E, N, -1)
        blocks[..., ::17] = torch.randint(117, 124, (E, N, K // 32))
        return [blocks], kind, widen(blocks, kind)
    group = next(g for g in (128, 64, 32) if kind == "int8" or K % g == 0)
    rows = [quantize_rows(m) if kind == "int8" else quantize_groups(m, group) for m in w]
    wide = dequantize_rows if kind == "int8" else dequantize_groups
    return [torch.stack(t) for t in zip(*rows)], None, torch.stack([wide(*m) for m in rows])


def in_torch(x, ids, k, up, down, biases, gate):
    "The same pairs in float64, rounded where the device rounds"
    near = lambda v: v.to(x.dtype).double()
    out = []
    for p, e in enumerate(ids):
        u = near(up[e].double() @ x[p // k].double() + biases[0][e].double())
        g, v = (u[::2], u[1::2]) if gate["beside"] else u.chunk(2)
        if gate["gate"] == "oss":
            g, v = g.clamp(max=gate["limit"]), v.clamp(-gate["limit"], gate["limit"])
            h = (v + 1) * g * torch.sigmoid(g * gate["alpha"])
        else: h = v * (F.silu(g) if gate["gate"] == "silu" else F.gelu(g, approximate="tanh"))
        out.append(down[e].double() @ near(h) + biases[1][e].double())
    return torch.stack(out)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8", "int4", "MXFP4"])
def test_any_form_is_what_torch_computes(kind, dtype):
    torch.manual_seed(0)
    draw, threads = random.Random(0), torch.get_num_threads()
    try:
        for gate in GATES * 3:
            # (widths that end inside a register, where the form has them)
            odd = kind in ("float32", "bfloat16", "int8")
            D, width, E = draw.choice([32, 160, 704]) + odd * draw.choice([0, 1, 24]), draw.choice([32, 96, 352]), 3
            up, down = stack(kind, E, 2 * width, D), stack(kind, E, D, width)
            biases = [torch.randn(E, n).to(dtype) * draw.choice([0, 1]) for n in (2 * width, D)]
            own = CpuExperts((up[0], biases[0], up[1]), (down[0], biases[1], down[1]), gate)
            assert own.why is None
            T, k = draw.choice([1, 2, 3, 7, 16, 40]), draw.choice([1, 2])
            x, ids = torch.randn(T, D).to(dtype), [draw.randrange(E) for _ in range(T * k)]
            torch.set_num_threads(draw.choice([1, 2, 3]))
            got, want = own(x, ids, k), in_torch(x, ids, k, up[2], down[2], biases, gate)
            # (int4 rounds small numbers of bfloat16, and a number of h may be rounded the other way)
            assert (got - want).norm() < (2e-6 if dtype == torch.float32 else 5e-3) * want.norm(), (gate, T, D, width)
            # a pair is the same beside any others
            some = draw.sample(range(T * k), 1)
            assert torch.equal(own(x, ids, k, some)[some], got[some])
    finally: torch.set_num_threads(threads)


def test_what_c_does_not_read_is_said():
    up, down = stack("int8", 2, 64, 32), stack("int8", 2, 32, 32)
    why = lambda u, d, gate=GATES[0]: CpuExperts((u[0], None, u[1]), (d[0], None, d[1]), gate).why
    assert why(up, down) is None and "a gate that is none of" in why(up, down, None)
    assert "other columns" in why(stack("int8", 2, 96, 32), down)
    assert "float16" in why(([up[2].half()], None), down) and "Q4_K" in why(([up[0][0]], "Q4_K"), down)
    turned = [up[2].transpose(1, 2).contiguous().transpose(1, 2)], None
    assert "columns before rows" in why(turned, down)


def test_a_refusal_needs_no_weights():
    small = dict(hidden_size=64, intermediate_size=64, num_local_experts=4, num_experts=4, moe_intermediate_size=32,
                 vocab_size=96, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=4, head_dim=16)
    def experts(kind, dtype):
        with torch.device("meta"): return kind(**small).to(dtype)
    oss = lambda **kw: GptOssExperts(GptOssConfig(**kw))
    qwen = lambda **kw: Qwen3MoeExperts(Qwen3MoeConfig(**kw))
    assert CpuExperts.refusal(experts(qwen, torch.bfloat16)) is None
    assert "in float16" in CpuExperts.refusal(experts(qwen, torch.float16))
    assert "columns before rows" in CpuExperts.refusal(experts(oss, torch.bfloat16))
    # as they would be packed
    for bits in (8, 4): assert CpuExperts.refusal(experts(oss, torch.bfloat16), bits) is None
    assert CpuExperts.refusal(experts(qwen, torch.float16), 4, 32) is None
    assert "biased in torch.float16" in CpuExperts.refusal(experts(oss, torch.float16), 8)


def test_rows_with_gaps_are_read_as_they_are():
    up, down = stack("float32", 3, 64, 32), stack("float32", 3, 32, 32)
    own, x = CpuExperts((up[0], None, None), (down[0], None, None), GATES[0]), torch.randn(32, 5)
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        wide = x.to(dtype).t()
        assert not wide.is_contiguous()
        assert torch.equal(own(wide, [2, 0, 1, 1, 0]), own(wide.contiguous(), [2, 0, 1, 1, 0]))


def test_what_is_undefined_stays_so_behind_a_gate():
    up, down = stack("float32", 2, 64, 32), stack("float32", 2, 32, 32)
    bias = torch.zeros(2, 64)
    bias[1, 6] = float("nan")                                                                          # of a gate
    got = CpuExperts((up[0], bias, None), (down[0], None, None), OSS)(torch.randn(2, 32), [0, 1])
    assert got[0].isfinite().all() and got[1].isnan().all()

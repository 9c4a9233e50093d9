"The kernel for a few rows on a GPU: the bits of the Triton kernels at any number of rows, and what it leaves to others"
import itertools

import pytest
import torch
from test_one_row import GATES, SHAPES, made, made_by_nvcc, on_a_gpu, replays

from bmlab.kernels import few_rows as module, triton_products as products
from bmlab.kernels.few_rows import few_rows, layout_of, takes
from bmlab.kernels.nvrtc import compiled
from bmlab.kernels.one_row import ALONE
from bmlab.kernels.triton_attention import rms_norm


@pytest.mark.parametrize("bits,rows", [(16, 2), (16, 8), (8, 4), (8, 16), (4, 2), (4, 8), (4, 16)])
def test_it_compiles_for_hopper(bits, rows, tmp_path):
    "By NVRTC where torch brings it, else by nvcc"
    normed = dict(GATE=1, NORM=2 if bits == 16 else 1)
    others = dict(HAS_RESIDUAL=1, AHEAD=bits < 16), dict(GATE=2)
    for (N, K), ends in itertools.product(SHAPES[:3], (normed, *others)):
        layout = layout_of(N, K, bits, rows, "NORM" in ends)
        if layout is None: continue
        kinds = module._kinds(N, K, bits, rows, True, 2 if N >= 8192 else 4, layout, **ends)
        try: assert len(compiled("few_rows", "sm_90", kinds)) > 1000
        except OSError: made_by_nvcc("few_rows", kinds, tmp_path)


@pytest.mark.parametrize("bits,normed", [(16, False), (16, True), (8, False), (4, False)])
def test_a_layout_fits(bits, normed):
    "What shared memory holds; the programs that a multiprocessor should have; each tile has a warp"
    for (N, K), rows in itertools.product([*SHAPES, (256, 8192), (128256, 4096), (4096, 53248)], range(2, 17)):
        found = layout_of(N, K, bits, rows, normed)
        if found is None: continue
        team, warps = 2 if N >= 8192 else 4, found["warps"]
        assert found["fit"] * (found["shared"] + 1024) <= 228 << 10 and found["stages"] >= 2, (N, K, rows, found)
        assert found["fit"] == 2 or rows > 8 or bits == 16
        assert team % found["cluster"] == 0 and warps % (team // found["cluster"]) == 0
        assert 120 <= found["clusters"] * found["cluster"] <= 132
        # x's columns of a program, and the sums of its tiles
        tiles = -(-N // 16 // found["clusters"])
        held = rows * K * 2 / found["cluster"] + 64 * tiles * team / found["cluster"] * rows
        held += warps * found["stages"] * 16 * 128
        assert held <= found["shared"], (N, K, rows, found)


def packed_rows(N, K, bits, dtype, rows):
    x, packed, *_, weight = made(N, K, bits, dtype)
    g = torch.Generator("cuda").manual_seed(rows)
    normal = lambda width: torch.randn(rows, width, device="cuda", generator=g).to(dtype)
    return normal(K), packed, normal(K), normal(N), weight


@on_a_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("N,K", SHAPES)
def test_bits_are_those_of_triton(N, K, bits, dtype, monkeypatch):
    linear, taken = products.int8_linear if bits == 8 else products.int4_linear, 0
    for rows in (2, 3, 4, 7, 8, 9, 16):
        x, packed, of, residual, weight = packed_rows(N, K, bits, dtype, rows)
        ends = dict(
            plain={}, bias=dict(bias=weight), residual=dict(residual=residual, ahead=(weight, 1.0)),
            gate=dict(gate="silu", norm=(of, 1e-5)), norm=dict(norm=(of, 1e-6), bias=weight),
            tanh=dict(gate="gelu_tanh", norm=(of, 1e-5)), far=dict(gate="gelu_tanh", bias=weight * 8))
        for name, kinds in ends.items():
            taken += takes(x, *packed, **{k: v for k, v in kinds.items() if k != "residual"})
            got = linear(x, *packed, **kinds)
            with monkeypatch.context() as m:
                m.setattr(products, "takes", lambda *a: False)
                want = linear(x, *packed, **kinds)
            for a, b in zip(got if isinstance(got, tuple) else [got], want if isinstance(want, tuple) else [want]):
                assert torch.equal(a, b), (rows, name, (a != b).sum().item())
    assert taken >= 10 or K > 20000


@on_a_gpu
@pytest.mark.parametrize("bits,rows", [(8, 3), (8, 16), (4, 4), (4, 16)])
def test_it_reads_what_the_kernel_before_it_wrote(bits, rows):
    "Products of the one before, in a graph: programs begin early, and wait; those of a cluster leave together"
    D, linear = 2048, products.int8_linear if bits == 8 else products.int4_linear
    x, packed, *_ = packed_rows(D, D, bits, torch.bfloat16, rows)
    assert takes(x, *packed)
    def chain(v, n, wait=lambda: None):
        for i in range(n):
            v = linear(v, *packed)
            wait()
            v = linear(v, *packed, residual=v)
            wait()
            if i % 10 == 0: v = v / v.float().norm().to(v.dtype) * 8
        return v
    apart = chain(x, 50, torch.cuda.synchronize)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side): chain(x, 2)
    torch.cuda.synchronize()
    replays(lambda: chain(x, 50), apart)


@on_a_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("N,K", [*SHAPES, (64, 64), (4096, 11008)])
def test_weights_as_wide_as_x(N, K, dtype):
    "As near float64's product as torch's own, with each of its ends"
    for rows in (2, 5, 8):
        x, _, of, residual, bias = packed_rows(N, K, 8, dtype, rows)
        w = (torch.randn(N, K, device="cuda", generator=torch.Generator("cuda").manual_seed(1)) / K**0.5).to(dtype)
        near = lambda got, want: torch.testing.assert_close(
            got.double(), want, rtol=4 * torch.finfo(dtype).eps, atol=2e-3)
        assert not takes(torch.cat([x] * 9), w) and takes(x, w) == (layout_of(N, K, 16, rows) is not None)
        if not takes(x, w): continue                        # (x leaves no room)
        plain = x.double() @ w.double().T
        near(few_rows(x, w), plain)
        near(few_rows(x, w, bias=bias, soon=True), plain + bias)
        apart = (few_rows(x, w, residual=residual).double() - plain - residual).abs()
        assert (apart <= 2e-3 + torch.finfo(dtype).eps * (plain.abs() + (plain + residual).abs())).all()
        end = dict(norm=(of[0], 1e-5, 0.5))
        if not takes(x, w, **end): continue
        normed = rms_norm(x, of[0], 1e-5, offset=0.5)
        near(few_rows(x, w, **end), normed.double() @ w.double().T)
        gate, up = few_rows(normed, w).double().chunk(2, 1)
        for name, act in GATES.items():
            got = few_rows(x, w, gate=name, **end).double()
            torch.testing.assert_close(got, act(gate) * up, rtol=8 * torch.finfo(dtype).eps, atol=2e-2)


def test_two_programs_share_a_multiprocessor_with_those_behind_attention():
    "(the product behind attention asks for a little more than half; a single row's)"
    for rows in (2, 4, 8):
        found = layout_of(6144, 4096, 4, rows)
        assert found["shared"] + ALONE + 2048 <= 228 << 10 < 3 * (found["shared"] + 1024)

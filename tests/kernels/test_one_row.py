"The kernel for a single row on a GPU: the bits of the Triton kernels, whatever the shape, the ends, what comes before"
import itertools, shutil, subprocess
from pathlib import Path

import pytest
import torch

from bmlab.kernels import nvrtc, one_row as module, triton_products as products
from bmlab.kernels.nvrtc import compiled, unavailable
from bmlab.kernels.one_row import one_row, ring_of
from bmlab.kernels.triton_attention import rms_norm

# (N, K): of LLaMA-3-8B; uneven over multiprocessors, teams and steps; one tile
SHAPES = [
    (6144, 4096), (28672, 4096), (4096, 14336), (5120, 3072), (1040, 2304), (8208, 1280), (16, 512), (4096, 28672)]


GATES = {"silu": torch.nn.functional.silu, "gelu_tanh": lambda g: torch.nn.functional.gelu(g, approximate="tanh")}


def on_a_gpu(test): return pytest.mark.cuda(pytest.mark.skipif(bool(unavailable()), reason=unavailable() or "-")(test))


def made_by_nvcc(name, kinds, folder):
    "Where torch brings no NVRTC; where there is no nvcc either, nothing is known"
    nvcc = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    if not Path(nvcc).exists(): pytest.skip("neither NVRTC nor nvcc")
    told = [nvcc, "-cubin", "-arch=sm_90", "-o", str(folder / "k"), *(f"-D{k}={int(v)}" for k, v in kinds.items())]
    run = subprocess.run([*told, str(nvrtc.TEXTS / f"{name}.cu")], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def kinds_of(N, K, bits, **more):
    "What the text leaves open, by name"
    ring = ring_of(N, K, bits)
    kinds = dict(N=N, K=K, BITS=bits, BF16=1, WARPS=2 if N >= 8192 else 4, TOTAL=ring["warps"], DEPTH=ring["stages"])
    return kinds | dict(AFTER=0, HAS_BIAS=0, HAS_RESIDUAL=0, GATE=0, AHEAD=0, NORM=0) | more


@pytest.mark.parametrize("bits", [16, 8, 4])
def test_it_compiles_for_hopper(bits, tmp_path):
    "By NVRTC where torch brings it, else by nvcc; two programs fit a multiprocessor"
    normed = dict(GATE=1, NORM=2 if bits == 16 else 1)
    others = dict(HAS_RESIDUAL=1, AHEAD=bits < 16, BF16=0), dict(GATE=2)
    for (N, K), ends in itertools.product(SHAPES[:3], (normed, *others)):
        kinds, ring = kinds_of(N, K, bits, **ends), ring_of(N, K, bits)
        assert ring["shared"] + module.ALONE + 2048 <= 228 << 10 < 3 * (ring["shared"] + 1024), ring
        try: assert len(compiled("one_row", "sm_90", kinds)) > 1000
        except OSError: made_by_nvcc("one_row", kinds, tmp_path)


def made(N, K, bits, dtype, seed=0):
    "x, packed weights, and what ends need"
    g = torch.Generator("cuda").manual_seed(seed)
    normal = lambda *shape: torch.randn(*shape, device="cuda", generator=g).to(dtype)
    draw = lambda *shape: torch.rand(*shape, device="cuda", generator=g) / K**0.5
    if bits == 8:
        packed = torch.randint(-128, 128, (N, K), dtype=torch.int8, device="cuda", generator=g), draw(N) / 73
    else:
        codes = torch.randint(256, (N, K // 2), dtype=torch.uint8, device="cuda", generator=g)
        packed = codes, (draw(N, K // 128) / 4).half(), (draw(N, K // 128) / 4).half()
    return normal(1, K), packed, normal(1, K), normal(1, N), normal(N)


def replays(call, want, begin=lambda: None):
    "In a graph the call gives the same, each time"
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph): y = call()
    for _ in range(5):
        begin()
        y.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(y, want)


def counted(monkeypatch):
    "A list that grows by one for each call of the kernel"
    calls, inner = [], products.few_rows
    monkeypatch.setattr(products, "few_rows", lambda *a: calls.append(1) or inner(*a))
    return calls


@on_a_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("N,K", SHAPES)
def test_bits_are_those_of_triton(N, K, bits, dtype, monkeypatch):
    x, packed, of, residual, weight = made(N, K, bits, dtype)
    linear = products.int8_linear if bits == 8 else products.int4_linear
    ends = dict(
        plain={}, bias=dict(bias=weight), residual=dict(residual=residual, ahead=(weight, 1.0)),
        gate=dict(gate="silu", norm=(of, 1e-5)), norm=dict(norm=(of, 1e-6), bias=weight), soon=dict(soon=True),
        tanh=dict(gate="gelu_tanh", norm=(of, 1e-5)), far=dict(gate="gelu_tanh", bias=weight * 8))
    calls = counted(monkeypatch)
    for name, kinds in ends.items():
        got = linear(x, *packed, **kinds)
        assert len(calls) == int(bits == 4 or K > 512 or "norm" not in kinds), (name, calls)
        with monkeypatch.context() as m:
            m.setattr(products, "takes", lambda *a: False)
            want = linear(x, *packed, **kinds)
        calls.clear()
        for a, b in zip(got if isinstance(got, tuple) else [got], want if isinstance(want, tuple) else [want]):
            assert torch.equal(a, b), (name, (a != b).sum().item())


@on_a_gpu
@pytest.mark.parametrize("bits", [8, 4])
def test_it_reads_what_the_kernel_before_it_wrote(bits):
    "Two hundred products, each of the one before, in a graph: programs begin early, and wait"
    D, linear = 2048, products.int8_linear if bits == 8 else products.int4_linear
    x, packed, *_ = made(D, D, bits, torch.bfloat16)
    def chain(v, n, wait=lambda: None):
        for i in range(n):
            v = linear(v, *packed)
            wait()
            v = linear(v, *packed, residual=v)
            wait()
            if i % 10 == 0: v = v / v.float().norm().to(v.dtype) * 8
        return v
    apart = chain(x, 100, torch.cuda.synchronize)           # nothing begins early across that
    side = torch.cuda.Stream()
    with torch.cuda.stream(side): chain(x, 2)
    torch.cuda.synchronize()
    replays(lambda: chain(x, 100), apart)


@on_a_gpu
def test_what_it_does_not_take():
    x, packed, of, residual, weight = made(4096, 4096, 8, torch.bfloat16)
    assert module.takes(x, *packed) and module.takes(x, *packed, gate="gelu_tanh")
    assert not module.takes(torch.cat([x, x]), *packed) and not module.takes(x.float(), *packed)
    assert not module.takes(x, *packed, gate="gelu") and not module.takes(x, *packed, bias=weight.float())
    assert not module.takes(x[:, :4000], packed[0][:, :4000], packed[1])
    assert not module.takes(x, packed[0][:4090], packed[1][:4090]) and not module.takes(x, *packed, warps=8)


@on_a_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("N,K", [*SHAPES, (64, 64), (4096, 11008)])
def test_weights_as_wide_as_x(N, K, dtype):
    "As near float64's product as torch's own, with each of its ends"
    x, _, of, residual, bias = made(N, K, 8, dtype)
    w = (torch.randn(N, K, device="cuda", generator=torch.Generator("cuda").manual_seed(1)) / K**0.5).to(dtype)
    assert module.takes(x, w)
    near = lambda got, want: torch.testing.assert_close(got.double(), want, rtol=4 * torch.finfo(dtype).eps, atol=2e-3)
    plain = x.double() @ w.double().T
    near(one_row(x, w), plain)
    near(one_row(x, w, bias=bias, soon=True), plain + bias)
    # (a product at the edge between two numbers may be rounded to either, and the residual may take most of it away)
    apart = (one_row(x, w, residual=residual).double() - plain - residual).abs()
    assert (apart <= 2e-3 + torch.finfo(dtype).eps * (plain.abs() + (plain + residual).abs())).all()
    weight = of[0]
    normed = rms_norm(x, weight, 1e-5, offset=0.5)
    near(one_row(x, w, norm=(weight, 1e-5, 0.5)), normed.double() @ w.double().T)
    gate, up = one_row(normed, w).double().chunk(2, 1)
    for name, act in GATES.items():
        got = one_row(x, w, norm=(weight, 1e-5, 0.5), gate=name)
        torch.testing.assert_close(got.double(), act(gate) * up, rtol=8 * torch.finfo(dtype).eps, atol=2e-2)
    assert not module.takes(x, w.float()) and not module.takes(x, w[:, ::2]) and not module.takes(x, w.T)


def test_cubins_are_kept(tmp_path, monkeypatch, caplog):
    "A kernel is compiled once for each kind and compiler; what is not as it was made is made again"
    class Compiler:
        minor, made = 0, 0
        def nvrtcVersion(self, major, minor): minor._obj.value = self.minor
    compiler = Compiler()
    def compiled(name, architecture, kinds):
        compiler.made += 1
        return f"{name} {architecture} {kinds} {compiler.minor}".encode()
    monkeypatch.setenv("BMLAB_CACHE", str(tmp_path))
    monkeypatch.setattr(nvrtc, "_nvrtc", lambda: compiler)
    monkeypatch.setattr(nvrtc, "compiled", compiled)
    def made(*given):
        before, cubin = compiler.made, nvrtc.kept(*given)
        assert cubin == f"{given[0]} {given[1]} {given[2]} {compiler.minor}".encode()
        return compiler.made - before
    assert made("one_row", "sm_90", {"N": 1}) == 1 and made("one_row", "sm_90", {"N": 1}) == 0
    for other in (("one_row", "sm_90", {"N": 2}), ("one_row", "sm_100", {"N": 1}), ("few_rows", "sm_90", {})):
        assert made(*other) == 1
    compiler.minor = 1
    assert made("one_row", "sm_90", {"N": 1}) == 1 and made("one_row", "sm_90", {"N": 1}) == 0
    kept = sorted((tmp_path / "kernels").iterdir())
    assert len(kept) == 5 and {f.suffix for f in kept} == {".cubin"}
    for f in kept: f.write_bytes(f.read_bytes()[:-1])
    assert made("one_row", "sm_90", {"N": 1}) == 1 and "it is made again" in caplog.text
    assert made("one_row", "sm_90", {"N": 1}) == 0
    kept[0].parent.chmod(0o777)
    assert made("one_row", "sm_90", {"N": 3}) == made("one_row", "sm_90", {"N": 3}) == 1
    assert "for this process alone" in caplog.text

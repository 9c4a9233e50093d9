"""A single row times packed weights by programs that stay and read ahead (one_row.cu), beside the Triton kernels

The four products of LLaMA-3-8B's blocks, each alone over 32 layers' weights and one after another as in a block, in
CUDA graphs; the bits of both are compared. Not part of bmlab: with attention between them it is no gain yet, see
RESULTS.

usage: python benchmarks/kernels/one_row.py [--bits 4 8] [--attention] [--carveout]      needs a GPU, and NVRTC
       --attention puts bmlab's attention of 256 keys between the first two products
       --carveout gives its kernel as much shared memory as these have
"""
import argparse, ctypes, functools, glob, importlib.util, os, sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(1, str(Path(__file__).resolve().parents[1] / "common"))
from bmlab.kernels import triton_attention
from bmlab.kernels.triton_products import int4_linear, int8_linear
from clock import memory_rate

D, LAYERS, SHAPES = 4096, 32, {"q, k, v": (6144, 4096), "out": (4096, 4096), "up": (28672, 4096), "down": (4096, 14336)}
# bytes of shared memory of a program: at most, that two fit a multiprocessor; at least, that three do not
ROOM, LEAST = 113 << 10, 80 << 10


# ---- compiler and driver ----
@functools.cache
def nvrtc():
    names = [f"libnvrtc.so.{torch.version.cuda.split('.')[0]}"]
    spec = importlib.util.find_spec("nvidia")
    for place in spec.submodule_search_locations if spec else ():
        names += sorted(glob.glob(os.path.join(place, "*", "lib", names[0] + "*")))
    for name in names:
        try: return ctypes.CDLL(name)
        except OSError: pass
    sys.exit(f"{names[0]} was not found; pip install nvidia-cuda-nvrtc")


def ok(error, what):
    if error: raise RuntimeError(f"{what} failed with error {error}")


def compiled(architecture, kinds):
    "A cubin of one_row.cu"
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    text = Path(__file__).with_name("one_row.cu").read_bytes()
    ok(nvrtc().nvrtcCreateProgram(ctypes.byref(program), text, b"one_row.cu", 0, None, None), "nvrtcCreateProgram")
    told = [f"-arch={architecture}", "--std=c++17", *(f"-D{name}={number}" for name, number in kinds)]
    failed = nvrtc().nvrtcCompileProgram(program, len(told), (ctypes.c_char_p * len(told))(*(t.encode() for t in told)))
    what = "ProgramLog" if failed else "CUBIN"
    ok(getattr(nvrtc(), f"nvrtcGet{what}Size")(program, ctypes.byref(size)), what)
    out = ctypes.create_string_buffer(size.value)
    ok(getattr(nvrtc(), f"nvrtcGet{what}")(program, out), what)
    if failed: raise RuntimeError(out.raw.decode())
    return out.raw


class Attribute(ctypes.Structure): # CUlaunchAttribute
    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int), ("rest", ctypes.c_char * 60)]


class Launch(ctypes.Structure): # CUlaunchConfig
    _fields_ = [
        ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p), ("attributes", ctypes.POINTER(Attribute)), ("count", ctypes.c_uint),
    ]


# CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION: it may begin before the kernel ahead has ended
EARLY = Attribute(6, 0, 1, b"")
# CU_FUNC_ATTRIBUTE_: bytes of dynamic shared memory; percent of the cache that is shared memory
SHARED_BYTES, CARVEOUT = 8, 9


@functools.cache
def driver(): return ctypes.CDLL("libcuda.so.1")


@functools.cache
def kernel(shared, kinds):
    major, minor = torch.cuda.get_device_capability()
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    ok(driver().cuModuleLoadData(ctypes.byref(module), compiled(f"sm_{major}{minor}", kinds)), "cuModuleLoadData")
    ok(driver().cuModuleGetFunction(ctypes.byref(function), module, b"one_row"), "cuModuleGetFunction")
    for name, value in ((SHARED_BYTES, shared), (CARVEOUT, 100)):
        ok(driver().cuFuncSetAttribute(function, name, value), "cuFuncSetAttribute")
    return function


# ---- the product ----
def ring_of(K, bits):
    "Warps of a program, stages of a warp's ring, bytes of shared memory; None: a row of x leaves no room"
    unit = 2048 if bits == 8 else 2176
    for warps, most in ((16, 3), (12, 3), (8, 4)) if bits == 8 else ((12, 2), (8, 2)):
        rest = 2 * K + (0 if bits == 8 else K // 32) + 128 * warps + 32
        stages = min(most, (ROOM - rest) // (unit * warps))
        if stages >= 2: return warps, stages, max(LEAST, warps * stages * unit + rest)


def one_row(x, codes, scale, zero=None, residual=None, gate=None, norm=None, ahead=None, soon=False):
    "As `int8_linear` and `int4_linear`, for a row in bf16 or float16 and groups of 128"
    (N, K), bits = (len(codes), x.shape[1]), 8 if zero is None else 4
    (warps, stages, shared), F = ring_of(K, bits), N if gate is None else N // 2
    kinds = dict(N=N, K=K, BITS=bits, BF16=x.dtype == torch.bfloat16, WARPS=2 if N >= 8192 else 4, TOTAL=warps)
    kinds |= dict(DEPTH=stages, AFTER=soon, HAS_BIAS=0, HAS_RESIDUAL=residual is not None, GATE=gate is not None)
    kinds |= dict(AHEAD=ahead is not None, NORM=norm is not None)
    function = kernel(shared, tuple((name, int(n)) for name, n in kinds.items()))
    y = x.new_empty(1, F)
    more = None if ahead is None else torch.empty_like(y)
    tensors = x, codes, scale, zero, None, residual, ahead and ahead[0], norm and norm[0], y, more
    given = [ctypes.c_void_p(None if t is None else t.data_ptr()) for t in tensors]
    given += [ctypes.c_float(norm[1] if norm else 0.0), ctypes.c_float(ahead[1] if ahead else 0.0)]
    places = (ctypes.c_void_p * len(given))(*(ctypes.addressof(g) for g in given))
    grid = min(N // 16, torch.cuda.get_device_properties(0).multi_processor_count), 1, 1
    launch = Launch(
        grid, (32 * warps, 1, 1), shared, torch.cuda.current_stream().cuda_stream, ctypes.pointer(EARLY), 1)
    ok(driver().cuLaunchKernelEx(ctypes.byref(launch), function, places, None), "cuLaunchKernelEx")
    return y if ahead is None else (y, more)


def triton(x, *packed, **ends): return (int8_linear if len(packed) == 2 else int4_linear)(x, *packed, **ends)


# ---- a block ----
def packed(N, K, bits):
    draw = lambda *shape: torch.rand(*shape, device="cuda") / K**0.5
    if bits == 8: return torch.randint(-127, 128, (N, K), dtype=torch.int8, device="cuda"), draw(N) / 73
    codes = torch.randint(256, (N, K // 2), dtype=torch.uint8, device="cuda")
    return codes, (draw(N, K // 128) / 4).half(), (draw(N, K // 128) / 4).half()


class Cache:
    "Keys of one row, its length, and angles"
    def __init__(self, keys=256, heads=8, head=128):
        new = functools.partial(torch.zeros, device="cuda", dtype=torch.bfloat16)
        self.k, self.v = (new(1, heads, 2 * keys, head).normal_() for _ in range(2))
        self.cos, self.sin = new(1, 1, head) + 1, new(1, 1, head)
        self.lengths = torch.full((1,), keys, dtype=torch.int32, device="cuda")
        self.arrived = torch.zeros(64, dtype=torch.int32, device="cuda")
    def __call__(self, qkv):
        y = triton_attention.rope_and_attend(
            qkv.view(1, 1, -1), self.cos, self.sin, self.k, self.v, self.lengths, arrived=self.arrived)
        return y.transpose(1, 2).reshape(1, -1)


def chain(product, layers, x, weight, attend=None):
    h = ahead = x
    for w in layers:
        q = product(ahead, *w["q, k, v"], norm=(h, 1e-5), soon=attend is not None)
        y = attend(q) if attend else q[:, :D]
        h, ahead = product(y, *w["out"], residual=h, ahead=(weight, 0.0))
        y = product(ahead, *w["up"], gate="silu", norm=(h, 1e-5))
        h, ahead = product(y, *w["down"], residual=h, ahead=(weight, 0.0))
    return h


def microseconds(call, n=LAYERS):
    "(µs of each of n, what the call gave) in a CUDA graph"
    for _ in range(2): call()
    torch.cuda.synchronize()
    graph, best = torch.cuda.CUDAGraph(), float("inf")
    with torch.cuda.graph(graph): y = call()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(4):
        begin.record()
        for _ in range(5): graph.replay()
        end.record()
        torch.cuda.synchronize()
        best = min(best, begin.elapsed_time(end) / 5 * 1e3 / n)
    return best, y.clone()


def beside(name, bound, call):
    "Print what `call` of either product takes, and whether the bits are the same"
    (theirs, y), (ours, z) = (microseconds(lambda: call(product)) for product in (triton, one_row))
    same = "the same bits" if torch.equal(y, z) else "OTHER BITS"
    print(f"{name}: bound {bound:.1f} µs, Triton {theirs:.1f}, one_row {ours:.1f}; {same}", flush=True)


def measure(bits, rate, x, weight, attend):
    layers = [{name: packed(N, K, bits) for name, (N, K) in SHAPES.items()} for _ in range(LAYERS)]
    bound = {name: sum(t.nbytes for t in w) / rate * 1e6 for name, w in layers[0].items()}
    for name, (_, K) in SHAPES.items():
        row = torch.randn(1, K, device="cuda").bfloat16()
        ends = dict(gate="silu", norm=(row, 1e-5)) if name == "up" else {}
        def call(product): return [product(row, *w[name], **ends) for w in layers][-1]
        beside(f"int{bits}, {name}", bound[name], call)
    name = f"int{bits}, a block's products" + (" and attention" if attend else "")
    beside(name, sum(bound.values()), lambda product: chain(product, layers, x, weight, attend))


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--bits", type=int, nargs="+", default=[4, 8])
    p.add_argument("--attention", action="store_true")
    p.add_argument("--carveout", action="store_true")
    args, rate = p.parse_args(), memory_rate()
    torch.manual_seed(0)
    x, weight = torch.randn(1, D, device="cuda").bfloat16(), torch.rand(D, device="cuda").bfloat16()
    attend = Cache() if args.attention else None
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, a copy moves {rate / 1e9:.0f} GB/s")
    if args.attention and args.carveout:
        chain(triton, [{name: packed(N, K, 8) for name, (N, K) in SHAPES.items()}], x, weight, attend)
        for made in triton_attention._attention_kernel.device_caches[0][0].values():
            ok(driver().cuFuncSetAttribute(ctypes.c_void_p(made.function), CARVEOUT, 100), "cuFuncSetAttribute")
    for bits in args.bits: measure(bits, rate, x, weight, attend)


if __name__ == "__main__": main()

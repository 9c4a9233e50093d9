"""Compiles every Triton kernel for an H200, without a GPU, and prints what became of each as one line of JSON; for
test_triton.py, in a process of its own"""
import itertools, json, re

import torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from bmlab.kernels import triton_attention as attention, triton_ggml as ggml, triton_groups as groups
from bmlab.kernels import triton_adamw as adamw, triton_cast as cast, triton_experts as experts
from bmlab.kernels import triton_low_bits as low_bits, triton_products as products


def build(kernel, types, const, num_warps=4, num_stages=3):
    "PTX and shared memory of one launch; integers are multiples of 16, as real sizes are"
    names = kernel.arg_names
    if "EARLY" in names: const = const | dict(EARLY=True)
    if "SOON" in names: const = dict(SOON=False) | const
    signature = {n: "constexpr" if n in const else types.get(n, "i32") for n in names}
    even = {
        (i,): [["tt.divisibility", 16]]
        for i, n in enumerate(names)
        if n not in const and n not in ("M", "m") and (signature[n][0] == "*" or signature[n] == "i32")
    }
    made = triton.compile(
        ASTSource(
            fn=kernel, signature=signature, constexprs={(names.index(k),): v for k, v in const.items()}, attrs=even
        ),
        target=GPUTarget("cuda", 90, 32),
        options=dict(num_warps=num_warps, num_stages=num_stages),
    )
    ptx = made.asm["ptx"]
    return dict(
        widths=re.findall(r"tt.dot [^\n]*?kWidth = (\d)", made.asm["ttgir"]),
        shared=made.metadata.shared,
        mma="mma.sync" in ptx,
        wgmma="wgmma.mma_async" in ptx,
        copies="cp.async" in ptx,
        waits="griddepcontrol.wait" in ptx,
        announces="griddepcontrol.launch_dependents" in ptx,
        machine=len(made.asm["cubin"]),
    )

X, F, H, I = "*bf16", "*fp32", "*fp16", "*i64"


def typed(type, names): return dict.fromkeys(names.split(), type)
def split(blocks): return [{k: v for k, v in blocks.items() if (k[0] == "n") == launch} for launch in (False, True)]


out, floats, tensors = {}, dict(eps="fp32", offset="fp32"), "x bias residual weight y ahead"
linear = typed(X, tensors) | dict(of=F, scale=F, codes="*i8") | floats
four = linear | dict(codes="*u8", scale=H, zero=H)
of_row = dict(of=X)
bias = dict(HAS_BIAS=True, INTERPRETED=False)
end, gated = dict(HAS_RESIDUAL=True, GATE=-1, AHEAD=True, NORM=0), dict(HAS_RESIDUAL=False, GATE=0, AHEAD=False, NORM=1)
# one row is normed by every program
alone = lambda const, one: const | dict(ONE=one) | (dict(NORM=4096) if one and const["NORM"] else {})
for N, K in ((4096, 4096), (20480, 4096)):
    const, launch = split(products._blocks(N, K, torch.bfloat16))
    for (name, more), one in itertools.product((("residual", end), ("gate", gated)), (True, False)):
        types = linear | (of_row if one and more is gated else {})
        const_of = bias | const | alone(more, one) | dict(EVEN=True)
        out[f"int8 {N} {name} {one}"] = build(products._int8_split_kernel, types, const_of, **launch)
    for group, M in itertools.product((32, 64, 128), (1, 8, 16)):
        const4, launch4 = split(products._blocks4(N, K, group, torch.bfloat16, M=M))
        types = four | (of_row if M == 1 and N > 8192 else {})
        const_of = bias | alone(gated if N > 8192 else end, M == 1) | const4
        out[f"int4 {N} group {group}, {M} rows"] = build(products._int4_linear_kernel, types, const_of, **launch4)

# products of few rows that no plan above chooses: types, constants, warps (and stages)
tiles4 = dict(EVEN=True, PAIRS=False, BLOCK_M=16, BLOCK_N=16, WARPS=8, STAGES=3, ONE=False)
tiles8 = dict(EVEN=False, ONE=False, BLOCK_M=8, BLOCK_N=16, BLOCK_K=64, WARPS=8)
askew, _ = split(products._blocks4(4096, 4096, 128, torch.bfloat16, aligned=False))
soon = dict(EVEN=True, ONE=True, SOON=True)
soon8, launch8 = split(products._blocks(12288, 4096, torch.bfloat16))
soon4, launch4 = split(products._blocks4(12288, 4096, 128, torch.bfloat16))
many, _ = split(products._blocks(1 << 17, 4096, torch.bfloat16))
single, half = four | typed(F, tensors), four | typed(H, tensors)
rows = [
    ("int4 float32, eight rows", single, tiles4 | dict(GROUP=64, BLOCK_M=8, STEPS=2), dict(num_warps=8)),
    ("int4 float32, sixteen", single, tiles4 | dict(GROUP=64, BLOCK_M=16, STEPS=2), dict(num_warps=8)),
    ("int4 words that are not aligned", four, askew | dict(ONE=True, EVEN=False), {}),
    ("int4 eight rows", four, tiles4 | dict(GROUP=128, BLOCK_M=8, STEPS=1), dict(num_warps=8, num_stages=4)),
    ("int8 eight rows", linear, tiles8, dict(num_warps=8, num_stages=4)),
    ("int4 half", half, tiles4 | dict(GROUP=128, STEPS=1), dict(num_warps=8)),
    ("int8 soon", linear, soon | soon8, launch8),
    ("int4 soon", four, soon | soon4, launch4),
]
for name, types, const, launch in rows:
    kernel = products._int8_split_kernel if name.startswith("int8") else products._int4_linear_kernel
    out[name] = build(kernel, types, bias | end | const, **launch)
out["int8 very many rows"] = build(products._int8_linear_kernel, linear, bias | many)
for M in (20, 512):
    const, launch = split(products._blocks_gemm(torch.empty(M, 1, dtype=torch.bfloat16)))
    of_group = dict(BLOCK_K=64 if M > 64 else 128)
    out[f"gemm8 {M}"] = build(products._int8_gemm_kernel, linear, bias | const | of_group, **launch)
    out[f"gemm4 {M}"] = build(products._int4_gemm_kernel, four, bias | const | dict(GROUP=128), **launch)

keys, warps, stages = attention._steps(torch.bfloat16, 128)
runs = dict(INTERPRETED=False, CHUNK=keys, RUN=attention._RUN, SPLITS=attention.SPLITS, BLOCK_Q=16, BLOCK_D=128)
for bits8 in (False, True):
    C, S = ("*i8", H) if bits8 else (X, X)
    rope = typed(X, "qkv cos sin q_weight k_weight q") | typed(C, "k_cache v_cache") | typed(S, "k_scale v_scale")
    const = dict(ROPE=True, INTERLEAVED=False, NORM=True, ROWS=True, BITS8=bits8, BLOCK=128)
    rope |= typed(I, "positions rows") | floats
    for tile, few in {attention._tile(rows, 128, True) for rows in (1, 64, 2048)}:
        out[f"rope {bits8} {tile}"] = build(attention._rope_store_kernel, rope, const | dict(TOKENS=tile), few)
    attend = typed(X, "q cos sin y") | typed(C, "k v") | typed(S, "k_scale v_scale") | typed(I, "lengths rows")
    attend |= typed("*i32", "mask arrived") | typed(F, "part stats") | dict(scale="fp32")
    ways = {}
    for G, sums, (causal, tree) in itertools.product(
        (1, 4), (True, False), ((True, False), (True, True), (False, False))
    ):
        ways[f"{G} {sums} {causal} {tree}"] = dict(
            TURN=False, PREREAD=False, INTERLEAVED=False, G=G, SUMS=sums, CAUSAL=causal, TREE=tree, WINDOW=tree,
            ROWS=tree, PARTS=attention.SPLITS)
    for G, sums, window in itertools.product((1, 4), (True, False), (True, False)):
        ways[f"{G} {sums} {window} turning" + " soon" * (G == 4)] = dict(
            TURN=True, PREREAD=True, SOON=G == 4, INTERLEAVED=window, G=G, SUMS=sums, CAUSAL=True, TREE=False,
            WINDOW=window, ROWS=window, PARTS=2 if window else attention.SPLITS)
    for name, const in ways.items():
        const |= runs | dict(BITS8=bits8)
        out[f"attention {bits8} {name}"] = build(attention._attention_kernel, attend, const, warps, stages)

# what lies as it lay in a file
for kind, (weights, size) in ggml._SIZES.items():
    const, bytes_ = dict(KIND=kind, WEIGHTS=weights, BYTES=size), dict(x=X, raw="*u8", w=X, y=X)
    out[f"blocks {kind}, widened"] = build(ggml._widen_kernel, bytes_, const | dict(BLOCK_N=16), 4)
    for N, M in ((4096, 1), (28672, 16)):
        more, launch = split(ggml._tiles(N, 4096 // weights, kind, M))
        more |= dict(HEAD=ggml._HEADS.get(kind, 0), INTERPRETED=False, ONE=M == 1)
        out[f"blocks {kind}, {M} rows"] = build(ggml._linear_kernel, bytes_, const | more, **launch)
eights = dict(x=X, codes="*u8", scale=F, y=X, w=X)
rows, columns, warps, stages = ggml._TILES8
tiles = dict(BLOCK_N=rows, BLOCK_K=columns, WARPS=warps, STAGES=stages, INTERPRETED=False, EVEN=True)
for M in (1, 16):
    const = tiles | dict(BLOCK_M=8 if M == 1 else 16, ONE=M == 1)
    out[f"floats of eight bits, {M} rows"] = build(ggml._float8_kernel, eights, const, warps, stages)
out["floats of eight bits, widened"] = build(ggml._widen8_kernel, eights, dict(BLOCK_N=16, BLOCK_K=256), 4)

low = dict(x=X, codes="*u8", scale=H, zero=H, w=X, y=X)
for bits, group in itertools.product((3, 2), (32, 64, 128)):
    const = dict(GROUP=group, BITS=bits)
    out[f"low {bits} {group}, widened"] = build(low_bits._widen_kernel, low, const | dict(BLOCK_N=16, BLOCK_B=128), 4)
    for N, M in ((4096, 1), (28672, 16), (4096, 64)):
        more, launch = split(low_bits._tiles(N, 4096 // group, M, bits))
        more |= dict(INTERPRETED=False, ONE=M == 1)
        out[f"low {bits} {group}, {M} rows"] = build(low_bits._linear_kernel, low, const | more, **launch)
    out[f"low {bits} {group}, half"] = build(low_bits._linear_kernel, low | dict(x=H, y=H), const | more, **launch)

# experts in every form, by pairs and by tiles; blocks of ggml as far as they differ
meta = lambda *shape, dtype=torch.uint8: torch.empty(2, 1536, *shape, dtype=dtype, device="meta")
stacks = {
    "float": experts.Matrices.of(meta(2048, dtype=torch.bfloat16)),
    "int8": experts.Matrices.of(meta(2048, dtype=torch.int8), meta()),
    "int4": experts.Matrices.of(meta(1024), meta(16), meta(16)),
    **{kind: experts.Matrices.of(meta(2048 // experts._SIZES[kind][0] * experts._SIZES[kind][1]), kind=kind)
       for kind in ("MXFP4", "Q8_0", "Q4_K")},
}
forms = {"float": dict(codes=X, scale=X, zero=X), "int8": dict(codes="*i8", scale=F, zero=X),
         "int4": dict(codes="*u8", scale=H, zero=H)}
for kind, m in stacks.items():
    types = typed(X, "x bias y") | dict(ids=I, order="*i32", tiles="*i32", alpha="fp32", limit="fp32")
    types |= forms.get(kind, dict(codes="*u8", scale=X, zero=X))
    const = dict(KIND=kind, GROUP=m.group, BYTES=experts._bytes(m), GATE=0, BESIDE=False, HAS_BIAS=True, k_stride=1)
    blocks, launch = split(experts._pair_blocks(m))
    out[f"experts {kind}, pairs"] = build(
        experts._pair_kernel, types, const | dict(CHOSEN=True, WORDS=True, ASM=True) | blocks, **launch)
    for rows in (16, 128):
        blocks, launch = split(experts._tile_blocks(m, rows, True, torch.bfloat16))
        out[f"experts {kind}, tiles of {rows}"] = build(
            experts._tile_kernel, types, const | dict(INTERPRETED=False) | blocks, **launch)

# what `WAYS` may name for int4
stack4 = {role: experts.Matrices.of(*(torch.empty(2, N, K // d, dtype=t, device="meta") for d, t in (
    (2, torch.uint8), (128, torch.float16), (128, torch.float16))))
    for role, N, K in (("up", 1536, 2048), ("down", 2048, 768))}
types = typed(X, "x bias y") | dict(codes="*u8", scale=H, zero=H, ids=I, alpha="fp32", limit="fp32")
for role, m in stack4.items():
    const = dict(GROUP=128, GATE=0 if role == "up" else -1, BESIDE=False, HAS_BIAS=True, ASM=True, SOON=1)
    for name, kernel, blocks in (
            ("rows", experts._rows_kernel, experts._row_blocks(m, role) | dict(AHEAD=role == "down")),
            ("dots", experts._dots_kernel, experts._dot_blocks(m, role))):
        blocks, launch = split({k: v for k, v in blocks.items() if k != "maxnreg"})
        out[f"experts by {name}, {role}"] = build(kernel, types, const | blocks, **launch)

# AdamW with moments of 8 bits (blocks of 256 and 64) and of 32
for size, weight in ((256, X), (256, F), (64, X), (0, X)):
    types = dict(weight=weight, grad=X, found=F) | typed("*u8" if size else F, "m v m_exponents v_exponents")
    types |= dict.fromkeys("lr beta1 beta2 eps decay step_size root divisor".split(), "fp32")
    const = dict(SIZE=size, BY_CHANCE=weight is X, FOUND=False, ROWS=1024 // (size or 1024), COLUMNS=size or 1024)
    out[f"AdamW {size} {weight}"] = build(adamw._adamw_kernel, types, const)

# the rest: kernel, types, constants, warps
spans = dict(SPAN=attention._RUN * keys, SPLITS=attention.SPLITS, PARTS=attention.SPLITS)
tiles = dict(ROWS=True, BLOCK_M=cast.BLOCK_M, BLOCK_K=cast.BLOCK_K)
e4m3 = dict(TOP=448.0, BITS=3, FIRST=-6, LEAST=cast.LEAST, INTERPRETED=False)
rest = {
    "norm": (
        attention._rms_norm_kernel, typed(X, "x residual weight total y") | floats,
        dict(HAS_RESIDUAL=True, HAS_WEIGHT=True, BLOCK=4096), 8),
    "norm, sum and norm": (
        attention._add_norm_kernel,
        typed(X, "y x weight then total normed") | typed("fp32", "one then_eps then_offset") | floats,
        dict(THEN=True, BLOCK=4096), 8),
    "gate": (products._gate_kernel, typed(X, "x y"), dict(ACTIVATION=0, BLOCK=512)),
    "rows' norms": (products._inverse_rms_kernel, dict(x=X, y=F, eps="fp32"), dict(NORM=4096), 2),
    "combine": (
        attention._combine_kernel, dict(part=F, stats=F, lengths=I, y=X), dict(CAUSAL=True, BLOCK_D=128) | spans),
    "greatest": (attention._greatest_kernel, dict(x=X, best=F, index="*i32"), dict(PIECES=32, BLOCK=1024)),
    "greatest of them": (attention._greatest_of_kernel, dict(best=F, index="*i32", out=I), dict(PIECES=32), 1),
    "angles": (
        attention._angles_kernel, dict(positions=I, inv_freq=F, cos=X, sin=X, scaling="fp32"), dict(BLOCK=128), 1),
    "widen": (products._widen4_kernel, dict(codes="*u8", scale=H, zero=H, w=X), dict(GROUP=128, BLOCK_N=32)),
    "neurons": (
        groups._neuron_hidden_kernel, typed(X, "x gate up gate_bias up_bias given") | dict(ids=I, h=F),
        dict(GATE=True, GIVEN=False, BIAS=True, ACT="silu", BLOCK_N=4, BLOCK_D=512)),
    "rows cast": (
        cast._rows_kernel, dict(x=X, codes="*fp8e4nv", scale=F), e4m3 | dict(BLOCK=16384), 16),
    "largest": (
        cast._largest_kernel, dict(x=X, of_rows=F, of_columns=F), tiles, 8),
    "rows and columns cast": (
        cast._both_kernel,
        typed(F, "of_rows of_columns scale turned_scale") | typed("*fp8e4nv", "codes turned") | dict(x=X),
        e4m3 | tiles, 8),
    "experts sorted": (
        experts._sort_kernel, dict(ids=I, order="*i32", tiles="*i32"),
        dict(BLOCK_M=16, BLOCK_P=64, BLOCK_E=128, PLACES=8)),
    "experts chosen": (
        experts._route_kernel, dict(logits=F, bias=F, weights=F, ids=I, scale="fp32"),
        dict(TOP=8, SCORE=2, HAS_BIAS=True, NORM=True, GROUPS=8, KEPT=4, BEST=2, BLOCK_E=256, BLOCK_K=8,
             WHOLE=False), 1),
    "experts mixed": (
        experts._mix_kernel, dict(y=F, weights=X, residual=X, out=X), dict(HAS_RESIDUAL=True, BLOCK_D=256, TOP=0), 2),
    "sums of neurons": (
        groups._neuron_sum_kernel, dict(h=F, ids=I, down=X, parts=F),
        dict(NEURON_SPLITS=groups.NEURON_SPLITS, BLOCK_N=32, BLOCK_D=64)),
}
out |= {name: build(*how) for name, how in rest.items()}
print(json.dumps(out))

"""Compiles every Triton kernel for an H200, without a GPU, and prints what became of each as one line of JSON; for
test_triton.py, in a process of its own"""
import itertools, json, re

import torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from bmlab.kernels import triton_attention as attention, triton_groups as groups, triton_products as products


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

X = "*bf16"
linear, out = (
    dict(
        x=X,
        bias=X,
        residual=X,
        weight=X,
        of="*fp32",
        y=X,
        ahead=X,
        scale="*fp32",
        codes="*i8",
        eps="fp32",
        offset="fp32",
    ),
    {},
)
of_row = dict(of=X)
four = linear | dict(codes="*u8", scale="*fp16", zero="*fp16")
bias = dict(HAS_BIAS=True, INTERPRETED=False)
end, gated = dict(HAS_RESIDUAL=True, GATE=-1, AHEAD=True, NORM=0), dict(HAS_RESIDUAL=False, GATE=0, AHEAD=False, NORM=1)
# one row is normed by every program
alone = lambda const, one: const | dict(ONE=one) | (dict(NORM=4096) if one and const["NORM"] else {})
for N, K in ((4096, 4096), (20480, 4096)):
    blocks = products._blocks(N, K, torch.bfloat16)
    const, launch = (
        bias | {k: v for k, v in blocks.items() if k[0] != "n"},
        {k: v for k, v in blocks.items() if k[0] == "n"},
    )
    for (name, more), one in itertools.product((("residual", end), ("gate", gated)), (True, False)):
        out[f"int8 {N} {name} {one}"] = build(
            products._int8_split_kernel,
            linear | (of_row if one and more is gated else {}),
            const | alone(more, one) | dict(EVEN=True),
            **launch,
        )
    for group, M in itertools.product((32, 64, 128), (1, 8, 16)):
        blocks = products._blocks4(N, K, group, torch.bfloat16, M=M)
        out[f"int4 {N} group {group}, {M} rows"] = build(
            products._int4_linear_kernel,
            four | (of_row if M == 1 and N > 8192 else {}),
            bias | alone(gated if N > 8192 else end, M == 1) | {k: blocks.pop(k) for k in list(blocks) if k[0] != "n"},
            **blocks,
        )
tiles4 = dict(EVEN=True, PAIRS=False, BLOCK_M=16, BLOCK_N=16, WARPS=8, STAGES=3, ONE=False)
for M, name in ((8, "eight rows"), (16, "sixteen")):
    out[f"int4 float32, {name}"] = build(
        products._int4_linear_kernel,
        four | dict(x="*fp32", bias="*fp32", residual="*fp32", weight="*fp32", y="*fp32", ahead="*fp32"),
        bias | end | tiles4 | dict(GROUP=64, BLOCK_M=M, STEPS=2),
        8,
    )
out["int4 words that are not aligned"] = build(
    products._int4_linear_kernel,
    four,
    bias
    | end
    | {k: v for k, v in products._blocks4(4096, 4096, 128, torch.bfloat16, aligned=False).items() if k[0] != "n"}
    | dict(ONE=True, EVEN=False),
)
out["int4 eight rows"] = build(
    products._int4_linear_kernel, four, bias | end | tiles4 | dict(GROUP=128, BLOCK_M=8, STEPS=1), 8, 4
)
out["int8 eight rows"] = build(
    products._int8_split_kernel,
    linear,
    bias | end | dict(EVEN=False, ONE=False, BLOCK_M=8, BLOCK_N=16, BLOCK_K=64, WARPS=8),
    8,
    4,
)
out["int4 half"] = build(
    products._int4_linear_kernel,
    four | dict(x="*fp16", bias="*fp16", residual="*fp16", weight="*fp16", y="*fp16", ahead="*fp16"),
    bias | end | tiles4 | dict(GROUP=128, STEPS=1),
    8,
)
blocks8, blocks4 = products._blocks(12288, 4096, torch.bfloat16), products._blocks4(12288, 4096, 128, torch.bfloat16)
for name, kernel, types, blocks in (
    ("int8", products._int8_split_kernel, linear, blocks8),
    ("int4", products._int4_linear_kernel, four, blocks4),
):
    out[f"{name} soon"] = build(
        kernel,
        types,
        bias | end | dict(EVEN=True, ONE=True, SOON=True) | {k: blocks.pop(k) for k in list(blocks) if k[0] != "n"},
        **blocks,
    )
out["int8 very many rows"] = build(
    products._int8_linear_kernel,
    linear,
    bias | {k: v for k, v in products._blocks(1 << 17, 4096, torch.bfloat16).items() if k[0] != "n"},
    4,
    3,
)
for M in (20, 512):
    blocks = products._blocks_gemm(torch.empty(M, 1, dtype=torch.bfloat16))
    const, blocks = (
        bias | {k: v for k, v in blocks.items() if k[0] != "n"},
        {k: v for k, v in blocks.items() if k[0] == "n"},
    )
    out[f"gemm8 {M}"] = build(products._int8_gemm_kernel, linear, const | dict(BLOCK_K=64 if M > 64 else 128), **blocks)
    out[f"gemm4 {M}"] = build(products._int4_gemm_kernel, four, const | dict(GROUP=128), **blocks)
out["norm"] = build(
    attention._rms_norm_kernel,
    dict(x=X, residual=X, weight=X, total=X, y=X, eps="fp32", offset="fp32"),
    dict(HAS_RESIDUAL=True, HAS_WEIGHT=True, BLOCK=4096),
    8,
)
out["gate"] = build(products._gate_kernel, dict(x=X, y=X), dict(ACTIVATION=0, BLOCK=512))
keys, warps, stages = attention._steps(torch.bfloat16, 128)
for bits8 in (False, True):
    C, S = ("*i8", "*fp16") if bits8 else (X, X)
    out[f"rope {bits8}"] = build(
        attention._rope_store_kernel,
        dict(
            qkv=X,
            cos=X,
            sin=X,
            q_weight=X,
            k_weight=X,
            q=X,
            k_cache=C,
            v_cache=C,
            k_scale=S,
            v_scale=S,
            positions="*i64",
            rows="*i64",
            eps="fp32",
            offset="fp32",
        ),
        dict(ROPE=True, INTERLEAVED=False, NORM=True, ROWS=True, BITS8=bits8, BLOCK=128),
        1,
    )
    for G, sums, (causal, tree) in itertools.product(
        (1, 4), (True, False), ((True, False), (True, True), (False, False))
    ):
        out[f"attention {bits8} {G} {sums} {causal} {tree}"] = build(
            attention._attention_kernel,
            dict(
                q=X,
                k=C,
                v=C,
                k_scale=S,
                v_scale=S,
                lengths="*i64",
                rows="*i64",
                mask="*i32",
                cos=X,
                sin=X,
                part="*fp32",
                stats="*fp32",
                arrived="*i32",
                y=X,
                scale="fp32",
            ),
            dict(
                TURN=False,
                PREREAD=False,
                INTERLEAVED=False,
                G=G,
                SUMS=sums,
                CAUSAL=causal,
                TREE=tree,
                WINDOW=tree,
                ROWS=tree,
                BITS8=bits8,
                INTERPRETED=False,
                CHUNK=keys,
                RUN=attention._RUN,
                SPLITS=attention.SPLITS,
                PARTS=attention.SPLITS,
                BLOCK_Q=16,
                BLOCK_D=128,
            ),
            warps,
            stages,
        )
    for G, sums, window in itertools.product((1, 4), (True, False), (True, False)):
        out[f"attention {bits8} {G} {sums} {window} turning"] = build(
            attention._attention_kernel,
            dict(
                q=X,
                k=C,
                v=C,
                k_scale=S,
                v_scale=S,
                lengths="*i64",
                rows="*i64",
                mask="*i32",
                cos=X,
                sin=X,
                part="*fp32",
                stats="*fp32",
                arrived="*i32",
                y=X,
                scale="fp32",
            ),
            dict(
                TURN=True,
                PREREAD=True,
                INTERLEAVED=window,
                G=G,
                SUMS=sums,
                CAUSAL=True,
                TREE=False,
                WINDOW=window,
                ROWS=window,
                BITS8=bits8,
                INTERPRETED=False,
                CHUNK=keys,
                RUN=attention._RUN,
                SPLITS=attention.SPLITS,
                PARTS=2 if window else attention.SPLITS,
                BLOCK_Q=16,
                BLOCK_D=128,
            ),
            warps,
            stages,
        )
out["rows' norms"] = build(products._inverse_rms_kernel, dict(x=X, y="*fp32", eps="fp32"), dict(NORM=4096), 2)
out["combine"] = build(
    attention._combine_kernel,
    dict(part="*fp32", stats="*fp32", lengths="*i64", y=X),
    dict(CAUSAL=True, SPAN=attention._RUN * keys, SPLITS=attention.SPLITS, PARTS=attention.SPLITS, BLOCK_D=128),
)
out["greatest"], out["greatest of them"] = (
    build(attention._greatest_kernel, dict(x=X, best="*fp32", index="*i32"), dict(PIECES=32, BLOCK=1024), 4),
    build(attention._greatest_of_kernel, dict(best="*fp32", index="*i32", out="*i64"), dict(PIECES=32), 1),
)
out["angles"] = build(
    attention._angles_kernel, dict(positions="*i64", inv_freq="*fp32", cos=X, sin=X, scaling="fp32"), dict(BLOCK=128), 1
)
out["widen"] = build(
    products._widen4_kernel, dict(codes="*u8", scale="*fp16", zero="*fp16", w=X), dict(GROUP=128, BLOCK_N=32)
)
out["neurons"] = build(
    groups._neuron_hidden_kernel,
    dict(x=X, ids="*i64", gate=X, up=X, gate_bias=X, up_bias=X, given=X, h="*fp32"),
    dict(GATE=True, GIVEN=False, BIAS=True, ACT="silu", BLOCK_N=4, BLOCK_D=512),
)
out["sums of neurons"] = build(
    groups._neuron_sum_kernel,
    dict(h="*fp32", ids="*i64", down=X, parts="*fp32"),
    dict(NEURON_SPLITS=groups.NEURON_SPLITS, BLOCK_N=32, BLOCK_D=64),
)
print(json.dumps(out))

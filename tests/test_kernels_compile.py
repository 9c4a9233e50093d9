"Kernels of decoding are compiled for a GPU where there is none: the interpreter, which runs them in the other tests, takes what the compiler refuses"
import itertools, json, os, subprocess, sys

POINTERS = dict(x="bf16", codes="i8", scale="fp32", bias="bf16", residual="bf16", y="bf16", zero="fp16", q="bf16", k="bf16", v="bf16", k_scale="fp16", v_scale="fp16", lengths="i64", rows="i64", mask="u8", part="fp32",
                stats="fp32", arrived="i32")


def compiled(cases):
    "Each case's shared memory, or what the compiler says, from a process that has no interpreter"
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, __file__], input=json.dumps(cases), capture_output=True, text=True, env=env, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def check(cases):
    for case, said in zip(cases, compiled(cases)): assert isinstance(said, int) and said <= 232_448, (case, said)     # bytes of a Hopper's program


def test_products():
    tiles = dict(BLOCK_N=32, WARPS=4, INTERPRETED=False, EARLY=True)
    ends = [dict(GATE=-1, HAS_RESIDUAL=False), dict(GATE=0, HAS_RESIDUAL=False), dict(GATE=-1, HAS_RESIDUAL=True)]
    cases = [["_int4_linear_kernel", tiles | end | dict(GROUP=128, BLOCK_M=8 if one else 16, STEPS=1, STAGES=3, PAIRS=pairs, EVEN=pairs, ONE=one, HAS_BIAS=not pairs), dict(codes="u8", scale="fp16")]
             for end, one, pairs in itertools.product(ends, (True, False), (True, False))]
    cases += [["_int8_split_kernel", tiles | end | dict(BLOCK_M=8, BLOCK_K=128, EVEN=one, ONE=one, HAS_BIAS=one), {}] for end in ends for one in (True, False)]
    check(cases)


def test_attention():
    tiles = dict(CHUNK=64, SPLITS=16, BLOCK_Q=16, BLOCK_D=128, INTERPRETED=False, EARLY=True)
    cases = [["_attention_kernel", tiles | dict(G=G, SUMS=sums, CAUSAL=causal, TREE=tree, WINDOW=tree, ROWS=tree, BITS8=bits8), dict(k="i8", v="i8") if bits8 else {}]
             for G, sums, (causal, tree), bits8 in itertools.product((1, 4), (True, False), ((True, False), (True, True), (False, False)), (True, False))]
    check(cases + [["_combine_kernel", dict(CAUSAL=True, CHUNK=64, SPLITS=16, BLOCK_D=128, EARLY=True), {}]])


def main():
    import triton.compiler
    from triton.backends.compiler import GPUTarget
    import bmlab.triton_kernels as kernels
    said = []
    for name, constants, types in json.load(sys.stdin):
        f = getattr(kernels, name)
        kinds = {n: "constexpr" if n in constants else "*" + (types.get(n) or POINTERS[n]) if n in POINTERS else "i32" for n in f.arg_names}
        if "q" in kinds: kinds["scale"] = "fp32"                                       # of the scores, not of a matrix
        whole = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(f.arg_names) if n not in constants and (kinds[n].startswith("*") or n in ("N", "K", "row_bytes", "groups"))}
        source = triton.compiler.ASTSource(fn=f, signature=kinds, constexprs={(f.arg_names.index(n),): v for n, v in constants.items()}, attrs=whole)
        try: said.append(triton.compiler.compile(source, target=GPUTarget("cuda", 90, 32), options=dict(num_warps=4, num_stages=3)).metadata.shared)
        except Exception as e: said.append(f"{type(e).__name__}: {e}"[-600:])
    print(json.dumps(said))


if __name__ == "__main__": main()

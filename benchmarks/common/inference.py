"""What the inference benchmarks share: shapes, models of random numbers that are packed from the start, a fair clock,
the machine's own rates, children watched by the driver, one table.

A benchmark is a list of runs, bmlab's and the peers', that follow one another in fresh processes. While one runs, its
parent, which holds nothing but a context of its own, asks the driver how much
memory is free: what is missing against before is the run's, its CUDA context included. A plan is written to a file
before its model has weights.
"""
import json, os, resource, subprocess, sys, tempfile, time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
GB, GiB, BEGAN = 1e9, 2**30, time.time()

LLAMA = dict(
    decoder=dict(
        hidden_size=4096,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=32,
        intermediate_size=10240,
        vocab_size=30720,
        max_position_embeddings=2048,
    ),  # 9.51B
    llama8=dict(
        hidden_size=4096,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        intermediate_size=14336,
        vocab_size=128256,
        max_position_embeddings=131072,
    ),
    llama70=dict(
        hidden_size=8192,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        intermediate_size=28672,
        vocab_size=128256,
        max_position_embeddings=8192,
    ),
    small=dict(
        hidden_size=576,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        intermediate_size=1536,
        vocab_size=30720,
        max_position_embeddings=2048,
    ),  # SmolLM2-135M with the large one's vocabulary
    tiny=dict(
        hidden_size=128,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=4,
        intermediate_size=256,
        vocab_size=512,
        max_position_embeddings=256,
    ),
    tiny_small=dict(
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        intermediate_size=128,
        vocab_size=512,
        max_position_embeddings=256,
    ),
)
T5 = dict(
    cpm2=dict(
        d_model=4096, d_kv=64, d_ff=10240, num_layers=24, num_decoder_layers=24, num_heads=64, vocab_size=26240
    ),  # 10.98B
    tiny_t5=dict(d_model=128, d_kv=32, d_ff=256, num_layers=3, num_decoder_layers=6, num_heads=4, vocab_size=512),
)


# ---- models ----

def skeleton(shape, dtype=torch.bfloat16):
    "A model of one of the shapes, untied, every tensor on meta"
    import transformers as tf
    if shape in LLAMA: cls, config = tf.LlamaForCausalLM, tf.LlamaConfig(**LLAMA[shape], tie_word_embeddings=False)
    else:
        cls, config = (
            tf.T5ForConditionalGeneration,
            tf.T5Config(
                **T5[shape], feed_forward_proj="gated-gelu", tie_word_embeddings=False, decoder_start_token_id=0
            ),
        )
    with torch.device("meta"):
        model = cls._from_config(config, dtype=dtype).eval()
        # transformers ties T5's head whatever the configuration says; CPM-2 has one of its own
        if shape in T5: model.lm_head = torch.nn.Linear(config.d_model, config.vocab_size, bias=False, dtype=dtype)
    return model


def pack(model, bits):
    """Pack a model that is on meta: shapes alone (rounding to nearest would be computed on meta too, and takes a
    minute for 9.51B in int4)"""
    from bmlab.kernels.codes import group_for
    from bmlab.kernels.layers import pack_linears
    def rounding(name, w):
        (N, K), g = w.shape, group_for(w.shape[1], 128) if bits == 4 else None
        make = lambda *shape, dtype: torch.empty(*shape, dtype=dtype, device="meta")
        if g is None: return make(N, K, dtype=torch.int8), make(N, dtype=torch.float32)
        return (
            make(N, K // 2, dtype=torch.uint8),
            make(N, K // g, dtype=torch.float16),
            make(N, K // g, dtype=torch.float16),
        )
    return pack_linears(model, bits=bits, rounding=rounding) if bits else model


def tile(dtype, device):
    "64 MiB of random numbers"
    draw = torch.Generator(device).manual_seed(0)
    n = (64 << 20) // dtype.itemsize
    if dtype == torch.int8: return torch.randint(-127, 128, (n,), dtype=dtype, device=device, generator=draw)
    if dtype == torch.uint8: return torch.randint(0, 256, (n,), dtype=dtype, device=device, generator=draw)
    return torch.empty(n, dtype=dtype, device=device).normal_(generator=draw)


def spread(name, columns):
    """Standard deviation of a weight. Blocks add little to what comes in, or 48 of them would make noise of rounding;
    T5 does not divide its scores by √d, so its queries are small"""
    last = name.rpartition(".")[2]
    if last in ("embed_tokens", "shared"): return 1.0
    return {"q": 0.16, "o_proj": 0.25, "down_proj": 0.25, "o": 0.25, "wo": 0.25}.get(last, 1.28) / columns ** 0.5


@torch.no_grad()
def fill(model, device="cpu"):
    """Memory and random numbers for a model on meta, in the form in which it is: floats, or int8 and int4 codes;
    nothing is quantized. The siblings of a module share a storage, as fusing wants them"""
    device, tiles, made, turn = torch.device(device), {}, {}, 0
    def random(n, dtype):
        nonlocal turn
        if dtype not in tiles: tiles[dtype] = tile(dtype, device)
        pool = tiles[dtype]
        out = torch.empty(n, dtype=dtype, device=device)
        at = turn = (turn + 1_000_003) % len(pool)                       # tensors differ
        for a in range(0, n, len(pool)):
            part = out[a:a + len(pool)]
            first = min(len(part), len(pool) - at)
            part[:first].copy_(pool[at:at + first])
            if first < len(part): part[first:].copy_(pool[:len(part) - first])
        return out
    def place(module, name, new):
        for held in (module._parameters, module._buffers):
            if held.get(name) is not None: held[name] = new
    as_was = lambda t, new: torch.nn.Parameter(new, requires_grad=False) if isinstance(t, torch.nn.Parameter) else new
    def constant(module, name, t, path):
        "Scales, zero points, norms: one number all over"
        K = getattr(module, "in_features", None) or getattr(module, "embedding_dim", 1)
        std = spread(path, K)
        value = {"scale": std / 73.3 if t.dtype == torch.float32 else std / 4.61, "zero": std / 9.22}.get(
            name, 1.0 if name == "weight" else 0.0
        )
        return torch.full(t.shape, value, dtype=t.dtype, device=device)
    for path, parent in model.named_modules():
        groups = {}
        for child, m in parent._modules.items():
            if m is None: continue
            for name, t in [*m._parameters.items(), *m._buffers.items()]:
                if t is None or not t.is_meta: continue
                if id(t) in made: place(m, name, made[id(t)][1])         # tied
                elif t.ndim == 2 and name in ("weight", "codes"):
                    groups.setdefault((name, t.dtype), {}).setdefault(id(t), (t, f"{path}.{child}", []))[2].append(m)
                elif name != "inv_freq" and not name.endswith("original_inv_freq"):
                    made[id(t)] = t, as_was(t, constant(m, name, t, f"{path}.{child}"))
                    place(m, name, made[id(t)][1])
        for (name, dtype), same in groups.items():
            whole, at = random(sum(t.numel() for t, *_ in same.values()), dtype), 0
            for t, where, owners in same.values():
                part = torch.empty(0, dtype=dtype, device=device).set_(whole.untyped_storage(), at, t.shape)
                at += t.numel()  # a view would keep `whole` when the weight moves
                if dtype.is_floating_point: part.mul_(spread(where, t.shape[1]))
                made[id(t)] = t, as_was(t, part)
                for m in owners: place(m, name, made[id(t)][1])
    for parent in model.modules():
        for child, m in parent._modules.items():
            if m is not None and "inv_freq" in m._buffers:
                parent._modules[child] = type(m)(config=model.config).to(device)  # rotary angles are computed anew
    left = [n for n, t in [*model.named_parameters(), *model.named_buffers()] if t.is_meta]
    if left: raise RuntimeError(f"{left[:3]} have no numbers")
    return model


def sync():
    if torch.cuda.is_available(): torch.cuda.synchronize()


def device(): return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


# ---- the machine ----

class Link:
    "The rate at which page-locked host memory reaches the GPU; on a CPU that of copying"
    def __init__(self, nbytes=256 << 20):
        self.gpu = torch.cuda.is_available()
        self.host = torch.zeros(nbytes if self.gpu else 4 << 20, dtype=torch.uint8).random_(255)
        if self.gpu and (code := int(torch.cuda.cudart().cudaHostRegister(self.host.data_ptr(), self.host.numel(), 0))):
            raise MemoryError(f"cudaHostRegister: error {code}")
    # bytes/s, the best of a few copies; into a buffer of its own, that is given back, or into a given one
    def rate(self, target=None, repeats=8):
        own = target is None
        target = torch.empty(len(self.host), dtype=torch.uint8, device=device()) if own else target
        n, best = min(len(target), len(self.host)), float("inf")
        for _ in range(repeats):
            if self.gpu:
                a, b = (torch.cuda.Event(enable_timing=True) for _ in "ab")
                a.record()
                target[:n].copy_(self.host[:n], non_blocking=True)
                b.record()
                b.synchronize()
                best = min(best, a.elapsed_time(b) / 1e3)
            else:
                t = time.perf_counter()
                target[:n].copy_(self.host[:n])
                best = min(best, time.perf_counter() - t)
        if own and self.gpu:
            del target
            torch.cuda.empty_cache()
        return n / best
    def close(self):
        if self.gpu: torch.cuda.cudart().cudaHostUnregister(self.host.data_ptr())


def seconds_each(call, repeats=20):
    "Best seconds of a call, by events on a GPU"
    call()
    sync()
    best = float("inf")
    for _ in range(repeats):
        if torch.cuda.is_available():
            a, b = (torch.cuda.Event(enable_timing=True) for _ in "ab")
            a.record()
            call()
            b.record()
            b.synchronize()
            best = min(best, a.elapsed_time(b) / 1e3)
        else:
            t = time.perf_counter()
            call()
            best = min(best, time.perf_counter() - t)
    return best


def read_rates():
    """Bytes/s of device memory: of a bf16 matrix–vector product of 2 GiB, which only reads, and of a copy, both ways
    counted"""
    gpu = torch.cuda.is_available()
    N, K = (1 << 17, 1 << 13) if gpu else (1 << 11, 1 << 10)
    w, x = (
        torch.empty(N, K, dtype=torch.bfloat16, device=device()).normal_(),
        torch.empty(1, K, dtype=torch.bfloat16, device=device()).normal_(),
    )
    read = w.nbytes / seconds_each(lambda: torch.nn.functional.linear(x, w))
    y = torch.empty_like(w)
    copy = 2 * w.nbytes / seconds_each(lambda: y.copy_(w))
    w = x = y = None
    if gpu: torch.cuda.empty_cache()
    return {"read_gb_s": round(read / GB, 1 if not gpu else 0), "copy_gb_s": round(copy / GB, 1 if not gpu else 0)}


def machine(link=None):
    "The preset whose rates a plan uses; link: another rate of the link, bytes/s"
    import dataclasses
    from bmlab.plan.machine import machine as preset
    from bmlab.infer.placement import CPU
    m = preset(None) if torch.cuda.is_available() else CPU
    return m if link is None else dataclasses.replace(m, h2d=link)


# ---- decoding ----

def keep(plan, name, tiny=False):
    "Write a plan to a file, before the run that it predicts"
    folder = Path(tempfile.gettempdir()) / "bmlab-plans" if tiny else Path(__file__).resolve().parents[1] / "plans"
    folder.mkdir(exist_ok=True)
    plan.save(folder / f"{name}.json")


def prompt_of(vocab, batch, length, seed=0):
    "Random prompts as lists of ids"
    return torch.randint(5, vocab, (batch, length), generator=torch.Generator().manual_seed(seed)).tolist()


def decode(engine, batch, prompt, new, rounds=3, enough_s=15.0):
    """What greedy decoding takes: the median of rounds, behind one that warms up (captures the graphs); prompt
    lengths as asked. Rates are of all rows together"""
    from bmlab.infer.text import decode_tokens
    d, streamer = engine.decoder, engine.streamer
    if d.mode != "static": raise RuntimeError(f"no static cache: {d.why_generate}")
    ids, rows, begin = prompt_of(d.vocab, batch, prompt), [], None
    for i in range(1 + rounds):
        stats, before = {}, dict(streamer.stats) if streamer else {}
        for _ in decode_tokens(d, ids, None, new, stats=stats): pass
        if streamer: stats["copied_bytes"] = streamer.stats["bytes"] - before["bytes"]
        if i: rows.append(stats)
        else: begin = time.perf_counter()
        if rows and time.perf_counter() - begin > enough_s: break
    best = sorted(rows, key=lambda s: s["decode_tok_s"])[len(rows) // 2]
    return {
        "tok_s": best["decode_tok_s"],
        "first_token_s": best["first_token_s"],
        "spread": round((max(s["decode_tok_s"] for s in rows) / min(s["decode_tok_s"] for s in rows) - 1) * 100, 1),
        "rounds": len(rows),
        "graph": "graph" if d.graph else d.why_eager,
        "prompt": prompt,
        "new": new,
        "batch": batch,
    } | ({"copied_gb": best["copied_bytes"] / GB} if streamer else {})


def compared(plan, batch, prompt, new, measured):
    "Predicted tokens/s for what was measured, and the ratio"
    said = plan.tokens_per_s(batch, 1.0, prompt + new / 2)
    return {"predicted_tok_s": said, "predicted/measured": round(said / measured, 3)}


# ---- children ----

def result(**row): print("RESULT " + json.dumps(row), flush=True)


def leave():
    "End this process at once: tens of gigabytes of page-locked memory take long to unmap one by one"
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def host_peak_gib(): return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2)


def _free(): return torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else 0


def child(script, *args, timeout_s=300, budget_s=None):
    """One run in a process of its own; its result row with the most memory that the driver says it had, or what it
    said last. budget_s: seconds since this program began, after which nothing starts"""
    if budget_s is not None:
        timeout_s = min(timeout_s, round(budget_s - (time.time() - BEGAN)))
        if timeout_s < 20: return {"error": f"left out: {budget_s} s are spent", "run_s": 0}
    env = dict(
        os.environ,
        OMP_NUM_THREADS=os.environ.get("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0)))),
        PYTHONPATH=os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        TOKENIZERS_PARALLELISM="false",
        HF_HUB_OFFLINE="1",
    )
    start, before = time.time(), _settled()
    least, late = before, False
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        p = subprocess.Popen([sys.executable, str(script), *map(str, args)], env=env, stdout=out, stderr=err)
        try:
            while p.poll() is None:
                least = min(least, _free())
                if late := time.time() - start > timeout_s: break
                time.sleep(0.02)
        finally:
            if p.poll() is None:
                p.kill()
                p.wait()
        out.seek(0)
        err.seek(0)
        said, wrong = out.read(), err.read()
    rows = [json.loads(line[7:]) for line in said.splitlines() if line.startswith("RESULT ")]
    row = rows[-1] if rows else {}
    if late: row["error"] = f"not done after {timeout_s} s"
    elif not rows or p.returncode:
        row["error"] = (wrong.strip().splitlines() or said.strip().splitlines() or [f"ended with {p.returncode}"])[-1][
            :160
        ]
        print(wrong[-3000:], flush=True)
    if torch.cuda.is_available(): row["driver_gib"] = round((before - least) / GiB, 3)
    return row | {"run_s": round(time.time() - start)}


def _settled():
    "Free bytes of the GPU, once what ran before is gone"
    last = _free()
    for _ in range(100 if torch.cuda.is_available() else 0):
        time.sleep(0.1)
        if (now := _free()) == last: break
        last = now
    return last


def start(args, ours, theirs, mine, every):
    """The one run that this process is a child for (`mine`: names that `ours` knows, `theirs` the others), or all of
    them"""
    if args.child:
        (ours if args.child in mine else theirs)(args.child)
        leave()
    every()


def children(script, args, *more):
    "Names and results of the runs that were asked for, each in a process of its own"
    for name in args.runs:
        yield (
            name,
            child(
                script,
                "--child",
                name,
                *more,
                *(["--tiny"] if args.tiny else []),
                timeout_s=args.timeout,
                budget_s=args.budget,
            ),
        )


# ---- tables ----

def cell(v):
    if v is None or isinstance(v, float) and v != v: return ""
    if isinstance(v, float): return f"{v:.0f}" if abs(v) >= 1000 else f"{v:.3g}" if abs(v) < 100 else f"{v:.1f}"
    return str(v).replace("|", "/").replace("\n", " ")


def table(rows, columns):
    "A markdown table; columns: heading → key, or a function of the row; the last holds what went wrong"
    of = lambda row, key: key(row) if callable(key) else row.get(key)
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    for r in rows:
        cells = []
        for key in columns.values():
            try: cells.append(cell(of(r, key)))
            except (KeyError, TypeError, ZeroDivisionError): cells.append("")                # what a failed run lacks
        if r.get("error"): cells[-1] = f"**{cell(r['error'])}**"
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def report(title, rows, columns, *more):
    "Print the table, and leave the rows in $OUT where that is set"
    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else f"CPU, {len(os.sched_getaffinity(0))} cores"
    print(f"\n## {title} — {gpu}, torch {torch.__version__}\n\n{table(rows, columns)}", flush=True)
    for line in more: print(f"\n{line}", flush=True)
    if out := os.environ.get("OUT"):
        (Path(out) / f"{title.split(':')[0].lower().replace(' ', '_')}.json").write_text(
            json.dumps(rows, indent=1), encoding="utf-8"
        )


def arguments(doc, runs):
    import argparse
    p = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--tiny", action="store_true", help="sizes for a CPU")
    p.add_argument("--runs", nargs="+", default=runs, metavar="NAME", help="only these of: " + "; ".join(runs))
    p.add_argument("--child", help=argparse.SUPPRESS)
    p.add_argument("--timeout", type=int, default=240, help="seconds for one run")
    p.add_argument("--budget", type=int, default=470, help="seconds for all; what has not begun then is left out")
    return p

"""Trainings foretold, then run: memory and time of shapes and ways to train that no constant of a plan was fitted to.

usage: python benchmarks/plan/trainings.py [--rows TEXT …] [--plan] [--tiny] [--budget SECONDS] [--refresh]

Each row is a shape of which some blocks are made, with random weights, and a way to train it. The machine is measured
first; then, row by row, `plan_training` says what recomputes, what goes to the host, the peak and the seconds, and the
same is run: two steps, then the mean of four. A limit is also that of the allocator, so what breaks it fails;
`retries` is how often the allocator gave memory back to stay inside; where there is no limit, `held_GiB` is what it
held with the holes between what lives, `planned_held` the same in the plan. At the end: how many rows kept their limit,
peaks within 5 % of the plan, steps within 15 %.
--rows chooses rows whose name holds one of the texts; --plan plans alone, on any machine.
"""
import argparse, gc, json, math, os, sys, time, traceback
from pathlib import Path

import pandas as pd
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
p.add_argument("--rows", nargs="+", default=[""], metavar="TEXT")
p.add_argument("--plan", action="store_true", help="plan alone")
p.add_argument("--tiny", action="store_true", help="sizes for a CPU")
p.add_argument("--budget", type=float, default=540, help="seconds; rows that have not begun then are left out")
p.add_argument("--refresh", action="store_true", help="measure the machine although there is a record")
args = p.parse_args()
GPU, GiB = torch.cuda.is_available(), 2**30
DEVICE = torch.device("cuda", 0) if GPU else torch.device("cpu")
BEGAN, STEPS = time.perf_counter(), 4


def llama_like(kind, D, H, Hk, F, vocab, **more):
    "A decoder: class of transformers, and what its configuration says"
    keys = dict(hidden_size=D, num_attention_heads=H, num_key_value_heads=Hk, intermediate_size=F, vocab_size=vocab)
    return f"{kind}ForCausalLM", keys | dict(max_position_embeddings=16384, use_cache=False) | more


# as published: SmolLM2 1.7B, Qwen2.5 7B, LLaMA 2 13B, Mistral NeMo 12B, Gemma 2 2B, OLMo 2 7B, LLaMA 3 8B, …
SHAPES = {
    "smollm2-1.7b": llama_like("Llama", 2048, 32, 32, 8192, 49152, tie_word_embeddings=True),
    "qwen2.5-7b": llama_like("Qwen2", 3584, 28, 4, 18944, 152064),
    "llama2-13b": llama_like("Llama", 5120, 40, 40, 13824, 32000),
    "nemo-12b": llama_like("Mistral", 5120, 32, 8, 14336, 131072, head_dim=128, sliding_window=None),
    "gemma2-2b": llama_like("Gemma2", 2304, 8, 4, 9216, 256000, head_dim=256),
    "olmo2-7b": llama_like("Olmo2", 4096, 32, 32, 11008, 100352),
    "llama3-8b": llama_like("Llama", 4096, 32, 8, 14336, 128256),
    "gpt2-xl": ("GPT2LMHeadModel", dict(n_embd=1600, n_head=25, n_positions=1024, use_cache=False)),
    "neox-20b": ("GPTNeoXForCausalLM", dict(
        hidden_size=6144, num_attention_heads=64, intermediate_size=24576, vocab_size=50432, use_cache=False,
        max_position_embeddings=2048)),
    "opt-6.7b": ("OPTForCausalLM", dict(
        hidden_size=4096, num_attention_heads=32, ffn_dim=16384, vocab_size=50272, word_embed_proj_dim=4096,
        max_position_embeddings=2048, use_cache=False)),
    "bert-large": ("BertForMaskedLM", dict(
        hidden_size=1024, num_attention_heads=16, intermediate_size=4096, vocab_size=30522)),
    "t5-large": ("T5ForConditionalGeneration", dict(
        d_model=1024, d_kv=64, d_ff=4096, num_heads=16, vocab_size=32128, use_cache=False)),
}
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
DEEP = {"gpt2-xl": "n_layer", "t5-large": "num_layers"}   # what says how many blocks, where it has another name


def row(shape, layers, batch, length, limit=None, *, lora=0, bits=None, tiles=None, float8=False, compile=False, **how):
    "how: what goes to `plan_training`, `shard` and the optimizer alike"
    return dict(shape=shape, layers=layers, batch=batch, length=length, limit=limit, lora=lora, bits=bits, tiles=tiles,
                float8=float8, compile=compile, how=how)


ROWS = {
    "in full": row("smollm2-1.7b", 24, 8, 1024),
    "in full, limit": row("smollm2-1.7b", 24, 8, 1024, "44GiB"),
    "in full, compiled, limit": row("smollm2-1.7b", 24, 8, 1024, "32GiB", compile=True),
    "in full, 60 GiB": row("qwen2.5-7b", 14, 4, 2048, "60GiB"),
    "6 bytes": row("qwen2.5-7b", 14, 4, 2048, states=8, master="bf16-sr"),
    "all recomputed": row("llama2-13b", 8, 2, 4096, checkpoint=True),
    "part on the host": row("nemo-12b", 6, 8, 1024, "36GiB"),
    "sent in backward": row("nemo-12b", 6, 16, 1024, offload=1.0, overlap="backward"),
    "LoRA, capped": row("gemma2-2b", 26, 2, 1024, lora=16),
    "LoRA": row("olmo2-7b", 32, 8, 1024, lora=16),
    "LoRA, compiled, limit": row("olmo2-7b", 32, 8, 1024, "30GiB", lora=16, compile=True),
    "QLoRA, limit": row("llama2-13b", 40, 2, 2048, "16GiB", lora=16, bits=4),
    "QLoRA, compiled": row("qwen2.5-7b", 28, 4, 1024, lora=16, bits=4, compile=True),
    "LoRA, tiles": row("nemo-12b", 12, 1, 16384, "42GiB", lora=16, tiles=4096),
    "LoRA, inputs moved": row("nemo-12b", 12, 1, 16384, lora=16, checkpoint=True, move=True),
    "GPT-2, compiled": row("gpt2-xl", 48, 8, 1024, compile=True),
    "OPT, four batches a step": row("opt-6.7b", 8, 4, 2048, accumulate=4),
    "BERT": row("bert-large", 24, 32, 512, "14GiB"),
    "T5": row("t5-large", 24, 8, 512),
    "NeoX": row("neox-20b", 4, 4, 2048, "70GiB"),
    "Muon": row("smollm2-1.7b", 24, 4, 1024, optimizer="muon"),
    "float8, compiled": row("llama2-13b", 8, 4, 2048, float8=True, compile=True),
    "weights on the host": row("qwen2.5-7b", 14, 16, 1024, host=1.0, overlap="backward"),
    "weights on the host, limit": row("olmo2-7b", 16, 16, 1024, "30GiB", host="auto", overlap="backward"),
    "in full, compiled, 60 GiB": row("qwen2.5-7b", 14, 4, 2048, "60GiB", compile=True),
    "QLoRA, compiled, limit": row("llama2-13b", 40, 2, 2048, "14GiB", lora=16, bits=4, compile=True),
    "16k LoRA, compiled, limit": row("llama3-8b", 32, 1, 16384, "40GiB", lora=16, compile=True),
    "8B in full on 80 GB": row(
        "llama3-8b", 32, 8, 1024, "78GiB", states=8, master="bf16-sr", overlap="backward", compile=True),
}


def skeleton(r):
    "The model on meta"
    import transformers as tf
    name, said = SHAPES[r["shape"]]
    if args.tiny:
        small = dict.fromkeys(["hidden_size", "n_embd", "d_model", "word_embed_proj_dim"], 128)
        small |= dict.fromkeys(["intermediate_size", "ffn_dim", "d_ff"], 256) | dict.fromkeys(["head_dim", "d_kv"], 32)
        small |= dict.fromkeys(["num_attention_heads", "n_head", "num_heads"], 4)
        small |= dict(num_key_value_heads=2, vocab_size=512)
        said = {k: small.get(k, v) for k, v in said.items()}
    cls = getattr(tf, name)
    config = cls.config_class(**said, **{DEEP.get(r["shape"], "num_hidden_layers"): 2 if args.tiny else r["layers"]})
    with torch.device("meta"): return cls._from_config(config, dtype=torch.bfloat16).train()


def prepared(r, meta):
    "(model, what trains)"
    from bmlab.all import Lora, find_blocks, pack_linears, tile
    from bmlab.train.fp8 import fp8
    from bmlab.train.sharding import materialize
    model = skeleton(r)
    if r["bits"]:
        if not meta: materialize(model, device=DEVICE)
        for b in find_blocks(model).values():
            pack_linears(b, bits=r["bits"], modules=LINEAR, **(dict(rounding=codes(r["bits"])) if meta else {}))
    if r["float8"]: fp8(model, "layers[:]" if args.tiny else None, r["batch"] * r["length"], None if GPU else "h200")
    if r["lora"]: Lora(model, r=r["lora"], modules="all-linear").freeze()
    if r["tiles"]: tile(model, 16 if args.tiny else r["tiles"])
    return model


def codes(bits):
    "Codes without contents"
    def rounding(name, w):
        (N, K), make = w.shape, lambda *shape, dtype: torch.empty(*shape, dtype=dtype, device="meta")
        scale = lambda: make(N, K // 128, dtype=torch.float16)
        return make(N, K // 2, dtype=torch.uint8), scale(), scale()
    return rounding


def batch_of(r, model):
    "A batch, as `plan_training` and the model take it"
    B, L = (2, 32) if args.tiny else (r["batch"], r["length"])
    ids = torch.zeros(B, L, dtype=torch.long)
    more = dict(decoder_input_ids=ids) if model.config.is_encoder_decoder else {}
    return {"input_ids": ids, "labels": ids, **more}


def planned(name, r, machine, model):
    from bmlab.all import plan_training
    how = dict(r["how"])
    if r["lora"]: how |= dict(master=None, offload=None)
    chunked = not model.config.is_encoder_decoder and r["shape"] != "bert-large"
    plan = plan_training(
        model, machine=machine, memory_limit=None if args.tiny else r["limit"], compile=r["compile"],
        inputs=batch_of(r, model), loss="chunked" if chunked else None, **how)
    print(f"\n== {name}: {r['shape']}, {r['layers']} blocks, {r['batch']} × {r['length']}"
          f"{', inside ' + r['limit'] if r['limit'] else ''}")
    print("\n".join(str(plan).splitlines()[-2:]), flush=True)
    return plan, chunked


def optimizer(r, model, plan):
    from bmlab.train.offload import AdamW
    how = {k: v for k, v in r["how"].items() if k in ("states", "master", "overlap")}
    if r["lora"]: return [torch.optim.AdamW([q for q in model.parameters() if q.requires_grad], lr=1e-4, fused=GPU)]
    if r["how"].get("optimizer") != "muon": return [AdamW(model, lr=1e-5, offload=plan.offload, **how)]
    from bmlab.train.muon import Muon, split_parameters
    matrices, rest = split_parameters(model)
    return [Muon(matrices, lr=1e-3, offload=plan.offload), AdamW(rest, lr=1e-5, offload=plan.offload)]


def fence(limit):
    """A limit of GiB, all of which is asked for at once

    Segments grow: of a block at their end often only a part is new memory. Held to a share of the card, the allocator
    counts all of such a block against it, and gives up before a card of that size would.
    """
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(limit * GiB / total)
    torch.cuda.empty_cache()
    # (storages of up to 1 MiB lie in segments of their own)
    room = int(limit * GiB) - torch.cuda.memory_reserved() - (256 << 20)
    if room > 0: torch.empty(room, dtype=torch.uint8, device=DEVICE)


def run(name, r, machine):
    from bmlab.all import lm_loss, shard
    plan, chunked = planned(name, r, machine, model := prepared(r, False))
    try:
        more = {k: v for k, v in r["how"].items() if k == "move"} | ({"host": plan.host} if plan.host else {})
        shard(model, checkpoint=plan.recompute, budget=plan.budget, compile=r["compile"] and GPU, **more)
        if GPU and r["limit"]: fence(float(r["limit"][:-3]))
        opts, like = optimizer(r, model, plan), batch_of(r, model)
        draw = torch.Generator(DEVICE).manual_seed(0)
        accumulate = r["how"].get("accumulate", 1)
        def fresh(t): return torch.randint(0, model.config.vocab_size, t.shape, device=DEVICE, generator=draw)
        def step():
            for _ in range(accumulate):
                batch = {k: fresh(t) for k, t in like.items()}
                loss = lm_loss(model, batch) if chunked else model(**batch).loss
                (loss / accumulate).backward()
            for o in opts: o.step()
            for o in opts: o.zero_grad()
            return loss.detach()
        def wait():
            if GPU: torch.cuda.synchronize()
        if GPU:
            if not r["limit"]: torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        # (from the end of a step to the end of another: what the optimizer leaves for the next forward is inside)
        losses = []
        for i in range(2 + STEPS):
            if i == 2:
                wait()
                retries = torch.cuda.memory_stats()["num_alloc_retries"] if GPU else 0
                begin = time.perf_counter()
            losses.append(step())
        wait()
        took = (time.perf_counter() - begin) / STEPS
        for o in opts: getattr(o, "flush", lambda: None)()
        losses = [float(x) for x in losses]
        if not all(map(math.isfinite, losses)): raise FloatingPointError(f"losses: {losses}")
        peak = torch.cuda.max_memory_allocated() if GPU else plan.peak_bytes
        if GPU: retries = torch.cuda.memory_stats()["num_alloc_retries"] - retries
        held = torch.cuda.max_memory_reserved() / GiB if GPU and not r["limit"] else None
    except FloatingPointError:
        print("  losses", [float(x) for x in losses])
        raise
    finally:
        if GPU: torch.cuda.set_per_process_memory_fraction(1.0)
    print("  planned: " + "  ".join(f"{k} {1e3 * v:.0f}" for k, v in plan.phases.items()) + " ms")
    limit = float(r["limit"][:-3]) if r["limit"] else None
    return dict(
        recomputed=plan.recompute, kept=plan.budget, offload=plan.offload, host=plan.host,
        planned_s=plan.step_s, s=took, time=plan.step_s / took - 1, planned_GiB=plan.peak_bytes / GiB, GiB=peak / GiB,
        memory=plan.peak_bytes / peak - 1, planned_held=plan.held_bytes / GiB,
        held_GiB=held, retries=retries, loss=losses[-1], limit=limit,
        within=limit is None or peak <= limit * GiB)


def main():
    from bmlab.plan.machine import machine, measure
    m = machine("h200") if not GPU else measure(refresh=True) if args.refresh else machine(None)
    print(m, f"{time.perf_counter() - BEGAN:.0f} s", sep="\n", flush=True)
    rows = {}
    for name, r in ROWS.items():
        if not any(t in f"{name} {r['shape']}" for t in args.rows): continue
        if args.budget - (time.perf_counter() - BEGAN) < 15:
            print(f"left out, the time is spent: {name}")
            continue
        begin = time.perf_counter()
        try:
            if args.plan: planned(name, r, m, prepared(r, True))
            else: rows[name] = run(name, r, m) | {"shape": r["shape"]}
        except Exception as e:
            rows[name] = {"shape": r["shape"], "within": False, "failed": f"{type(e).__name__}: {str(e)[:200]}"}
            traceback.print_exc(file=sys.stdout)
        gc.collect()
        torch._dynamo.reset()
        if GPU: torch.cuda.empty_cache()
        if out := os.environ.get("OUT"): (Path(out) / "trainings.json").write_text(json.dumps(rows), encoding="utf-8")
        if name in rows: print("  " + "  ".join(
            f"{k} {v:.3f}" if isinstance(v, float) else f"{k} {v}" for k, v in rows[name].items()))
        print(f"  {time.perf_counter() - begin:.0f} s", flush=True)
    if not rows: return
    table = pd.DataFrame(rows).T
    if "s" not in table: return print(table.to_string())
    print(table.to_string(float_format="{:.3f}".format))
    done = table[table.s.notna()]
    print(f"limits kept: {int(table.within.sum())} of {len(table)}; peak within 5 %: "
          f"{int((done.memory.abs() <= .05).sum())} of {len(table)}; time within 15 %: "
          f"{int((done.time.abs() <= .15).sum())} of {len(table)}")


if __name__ == "__main__": main()

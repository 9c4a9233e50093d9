"""How long a step takes on 1 to 1024 GPUs, by the planner, for models of 13B and 175B: one table and one picture, with
the runs of GPTs of 2.8B and 13B on up to four GPUs beside what is planned for them; nothing is run.

usage: scaling.py [--models 13b 175b] [--gpus 1 2 4 …] [--machine h200] [--step-latency-us 5] [--write docs]
"""
import argparse, dataclasses, functools, re, warnings
from pathlib import Path

import pandas as pd
import torch
import transformers as tf

from bmlab.all import figure, find_blocks, plan_training
from bmlab.plan.machine import machine
from bmlab.plan.trace import trace_step

# tokens of a sequence, sequences of a fixed step, tokens of a training, share of the best rate that still counts as
# linear
SEQ, SEQUENCES, TOKENS, NEAR = 2048, 1024, 300e9, 0.9
SHAPES = {"13b": (40, 5120, 40), "175b": (96, 12288, 96)}      # layers, width, heads
KEPT = {"13b": 4, "175b": 2}                                   # sequences on each GPU where each GPU keeps its batch
GPUS = [2 ** k for k in range(11)]
UNIT = "tokens/s a GPU"

# (layers, width, heads, sequences of 512 tokens on each GPU, dtype of the weights, loss): seconds of a step by GPUs,
# measured on H200s with compiled layers, ZeRO-3 and nothing recomputed or on the host (benchmarks/RESULTS.md)
RUNS = {
    "2.8B, 32 × 512 tokens": ((32, 2560, 32, 32, torch.bfloat16, "full"), {1: 0.501, 2: 0.523, 4: 0.526}),
    "13B, 16 × 512 tokens": ((40, 5120, 128, 16, torch.float32, "chunked"), {2: 1.347, 4: 1.239}),
}


def gpt(layers, width, heads, length, dtype=torch.bfloat16):
    "A GPT without weights"
    config = tf.GPT2Config(
        n_layer=layers, n_embd=width, n_head=heads, n_positions=length, vocab_size=50304, bos_token_id=None,
        eos_token_id=None)
    with torch.device("meta"): return tf.GPT2LMHeadModel(config).to(dtype)


@functools.cache
def model_of(name): return gpt(*SHAPES[name], SEQ)


@functools.cache
def traced(name, batch):
    "One pass of a micro-batch"
    ids = torch.zeros(batch, SEQ, dtype=torch.long, device="meta")
    return trace_step(
        model_of(name), {"input_ids": ids, "labels": ids}, list(find_blocks(model_of(name))), dtype=torch.bfloat16
    )


def parameters(name): return sum(p.numel() for p in model_of(name).parameters())


def block_of(name): return 2 * parameters(name) / SHAPES[name][0]      # its bytes in bf16


def networked(m, block, gpus, step_s):
    "The machine whose network also waits `step_s` at each of the gpus − 1 steps in which a ring hands on one block"
    full = m.network if gpus <= m.gpus_per_host else min(m.network, m.gpus_per_host * m.network_hosts)
    rate = block / (block / full + gpus * step_s)
    return dataclasses.replace(
        m, network=rate if gpus <= m.gpus_per_host else m.network, network_hosts=rate / m.gpus_per_host
    )


def planned(name, gpus, batch, m, accumulate=1):
    "The plan, or None where it does not fit"
    try:
        return plan_training(
            model_of(name), batch, SEQ, gpus=gpus, machine=m, accumulate=accumulate, trace=traced(name, batch)
        )
    except ValueError as e:
        if "is below" in str(e): return None
        raise


def row(name, gpus, m, step_s, fixed):
    "One point: the fastest way to do the fixed batch, or what each GPU keeps"
    net, each = networked(m, block_of(name), gpus, step_s), SEQUENCES // gpus
    ways = [(b, each // b) for b in (1, 2, 4, 8, 16) if b <= each and each // b <= 64] if fixed else [(KEPT[name], 1)]
    plans = {way: p for way in ways if (p := planned(name, gpus, way[0], net, way[1]))}
    if not plans: return {"model": name, "GPUs": gpus, "batch": "fixed" if fixed else "kept"}
    (batch, accumulate), p = min(plans.items(), key=lambda c: c[1].step_s)
    rate = p.tokens_s
    return {
        "model": name,
        "GPUs": gpus,
        "batch": "fixed" if fixed else "kept",
        "sequences a GPU": f"{batch}" + f" × {accumulate}" * (accumulate > 1),
        "step, s": p.step_s,
        UNIT: rate / gpus,
        "TFLOP/s a GPU": 6 * parameters(name) * rate / gpus / 1e12,
        "waiting for the network": p.phases.get("waiting for the network", 0.0) / p.step_s,
        "recomputed": p.recompute / p.blocks,
        "on the host": p.offload,
        "peak, GiB": p.peak_bytes / 2**30,
        "days": TOKENS / rate / 86400,
    }


def curve(models=tuple(SHAPES), gpus=GPUS, which="h200", step_s=5e-6):
    "All points, with the share of the best rate a GPU that each still has"
    m = machine(which)
    out = pd.DataFrame([row(n, w, m, step_s, fixed) for n in models for fixed in (False, True) for w in gpus])
    out["of the best"] = out[UNIT] / out.groupby(["model", "batch"])[UNIT].transform("max")
    return out


def bends(table):
    "{(model, batch): the most GPUs up to which a GPU keeps NEAR of the best rate, from there on down}"
    return {
        k: int(t[t["of the best"] >= NEAR].GPUs.max()) for k, t in table.dropna(subset=UNIT).groupby(["model", "batch"])
    }


def patience(models=tuple(SHAPES), gpus=1024, which="h200", waits_us=(0, 2, 5, 10)):
    "Tokens a second a GPU at the far end of the curve, fixed batch, by what a step of the ring waits"
    m = machine(which)
    return pd.DataFrame(
        [
            {
                "model": n,
                "GPUs": gpus,
                **{f"{u} µs": row(n, gpus, m, u * 1e-6, True).get(UNIT, float("nan")) for u in waits_us},
            }
            for n in models
        ]
    )


def runs(gpus, which="h200", step_s=5e-6):
    "What was run: the planned seconds of a step by GPUs, and the measured ones where there are any"
    out, m = [], machine(which)
    for name, ((*shape, batch, dtype, loss), measured) in RUNS.items():
        model = gpt(*shape, 512, dtype)
        block = 2 * sum(p.numel() for p in model.parameters()) / shape[0]
        for n in (n for n in gpus if n >= min(measured)):
            p = plan_training(
                model, batch, 512, gpus=n, machine=networked(m, block, n, step_s), checkpoint=False, offload=None,
                compile=True, loss=loss)
            out.append({"run": name, "GPUs": n, "planned, s": p.step_s, "measured, s": measured.get(n)})
    return pd.DataFrame(out)


def pipes(frame, forms):
    "A frame as a table in Markdown, columns by these formats"
    lines = ["| " + " | ".join(frame.columns) + " |", "|" + "--:|" * len(frame.columns)]
    for r in frame.to_dict("records"):
        lines.append("| " + " | ".join(forms.get(c, "{}").format(v) for c, v in r.items()) + " |")
    return "\n".join(lines)


def text(table):
    "The table as the page shows it"
    number = {
        "step, s": "{:.3g}",
        UNIT: "{:,.0f}",
        "TFLOP/s a GPU": "{:.0f}",
        "waiting for the network": "{:.0%}",
        "recomputed": "{:.0%}",
        "on the host": "{:.0%}",
        "peak, GiB": "{:.0f}",
        "days": "{:,.0f}",
        "of the best": "{:.0%}",
    }
    parts = []
    for (name, batch), t in table.groupby(["model", "batch"], sort=False):
        columns = [c for c in t.columns if c not in ("model", "batch")]
        parts.append(
            f"**{name.upper()}, "
            + (f"{SEQUENCES:,} sequences a step" if batch == "fixed" else f"{KEPT[name]} sequences on each GPU")
            + f"**: a GPU keeps {NEAR:.0%} of its best rate up to {bends(t)[name, batch]} GPUs.\n"
        )
        parts.append("| " + " | ".join(columns) + " |\n|" + "--:|" * len(columns))
        for r in t.to_dict("records"):
            cells = [
                r["GPUs"],
                *(
                    "does not fit"
                    if c == "sequences a GPU" and r[c] != r[c]
                    else ""
                    if r[c] != r[c]
                    else ("{:.3g}" if c == "days" and r[c] < 100 else number.get(c, "{}")).format(r[c])
                    for c in columns[1:]
                ),
            ]
            parts.append("| " + " | ".join(map(str, cells)) + " |")
        parts.append("")
    return "\n".join(parts)


def picture(table, beside, path):
    "Tokens a second a GPU over the number of GPUs; seconds of a step, planned and measured"
    with figure(12, 2.8, columns=table.model.nunique() + 1, show=False) as axes:
        for ax, (name, t) in zip(axes, table.groupby("model", sort=False)):
            for (batch, s), marker in zip(t.groupby("batch", sort=False), "os"):
                label = "the batch grows with the GPUs" if batch == "kept" else f"{SEQUENCES:,} sequences a step"
                ax.plot(s.GPUs, s[UNIT], marker + "-", ms=4, label=label)
            ax.set(ylabel=UNIT, title=name.upper())
        for k, (name, t) in enumerate(beside.groupby("run", sort=False)):
            axes[-1].plot(t.GPUs, t["planned, s"], f"C{k}-", lw=1)
            axes[-1].plot(t.GPUs, t["measured, s"], f"C{k}o", ms=5, label=name)
        axes[-1].set(ylabel="step, s", title="planned (lines), measured (points)")
        for ax in axes:
            ax.set(xscale="log", xlabel="GPUs", ylim=(0, None))
            ax.set_xticks(GPUS[::2], map(str, GPUS[::2]))
            ax.minorticks_off()
            ax.legend(frameon=False, loc="lower left")
        ax.figure.savefig(path)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--models", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    p.add_argument("--gpus", nargs="+", type=int, default=GPUS)
    p.add_argument("--machine", default="h200", help="a preset of bmlab.plan.machine")
    p.add_argument("--step-latency-us", type=float, default=5.0, help="microseconds of a step of the ring")
    p.add_argument("--write", help="folder with scaling_out.md: put table and picture there")
    args = p.parse_args()
    warnings.simplefilter("ignore")
    table = curve(args.models, args.gpus, args.machine, args.step_latency_us * 1e-6)
    waits = patience(args.models, max(args.gpus), args.machine)
    beside = runs(args.gpus, args.machine, args.step_latency_us * 1e-6)
    off = beside.dropna().assign(**{"planned beside measured": lambda t: t["planned, s"] / t["measured, s"] - 1})
    forms = {"planned, s": "{:.3f}", "measured, s": "{:.3f}", "planned beside measured": "{:+.1%}"}
    out = "\n".join([
        text(table),
        "**Planned and measured**, a step of what was run on the GPUs of one host.\n", pipes(off, forms), "",
        f"**Tokens/s a GPU by what one step of the ring waits**, {SEQUENCES:,} sequences a step.\n",
        pipes(waits.assign(model=waits.model.str.upper()), dict.fromkeys(waits.columns[2:], "{:,.0f}")), ""])
    print(out)
    if args.write:
        page = Path(args.write) / "scaling_out.md"
        page.write_text(
            re.sub(
                r"(<!-- table -->\n).*?(<!-- end -->)",
                lambda m: m[1] + "\n" + out + "\n" + m[2],
                page.read_text(encoding="utf-8"),
                flags=re.S,
            ),
            encoding="utf-8",
        )
        picture(table, beside, page.with_suffix(".png"))


if __name__ == "__main__": main()

"""How long a step takes on 1 to 1024 GPUs, by the planner, for models of 13B and 175B: one table and one picture;
nothing is run.

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


@functools.cache
def model_of(name):
    "A GPT without weights, stored in bf16"
    layers, width, heads = SHAPES[name]
    with torch.device("meta"):
        return tf.GPT2LMHeadModel(
            tf.GPT2Config(
                n_layer=layers,
                n_embd=width,
                n_head=heads,
                n_positions=SEQ,
                vocab_size=50304,
                bos_token_id=None,
                eos_token_id=None,
            )
        ).to(torch.bfloat16)


@functools.cache
def traced(name, batch):
    "One pass of a micro-batch"
    ids = torch.zeros(batch, SEQ, dtype=torch.long, device="meta")
    return trace_step(
        model_of(name), {"input_ids": ids, "labels": ids}, list(find_blocks(model_of(name))), dtype=torch.bfloat16
    )


def parameters(name): return sum(p.numel() for p in model_of(name).parameters())


def networked(m, name, gpus, step_s):
    "The machine whose network also waits `step_s` at each of the gpus − 1 steps in which a ring hands on one block"
    full = m.network if gpus <= m.gpus_per_host else min(m.network, m.gpus_per_host * m.network_hosts)
    # bytes of a block in bf16
    block = 2 * parameters(name) / SHAPES[name][0]
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
    net, each = networked(m, name, gpus, step_s), SEQUENCES // gpus
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


def picture(table, path):
    "Tokens a second a GPU over the number of GPUs"
    with figure(9, 2.8, columns=table.model.nunique(), show=False) as axes:
        for ax, (name, t) in zip([axes] if table.model.nunique() == 1 else axes, table.groupby("model", sort=False)):
            for (batch, s), marker in zip(t.groupby("batch", sort=False), "os"):
                ax.plot(
                    s.GPUs,
                    s[UNIT],
                    marker + "-",
                    ms=4,
                    label="the batch grows with the GPUs" if batch == "kept" else f"{SEQUENCES:,} sequences a step",
                )
            ax.set(xscale="log", xlabel="GPUs", ylabel=UNIT, title=name.upper(), ylim=(0, None))
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
    out = (
        text(table)
        + "\n**Tokens/s a GPU by what one step of the ring waits**, "
        + f"{SEQUENCES:,} sequences a step.\n\n| "
        + " | ".join(waits.columns)
        + " |\n|"
        + "--:|" * len(waits.columns)
        + "\n"
    )
    out += (
        "\n".join(
            "| " + " | ".join(f"{v:,.0f}" if isinstance(v, float) else str(v).upper() for v in r) + " |"
            for r in waits.values.tolist()
        )
        + "\n"
    )
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
        picture(table, page.with_suffix(".png"))


if __name__ == "__main__": main()

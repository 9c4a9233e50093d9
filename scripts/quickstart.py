"""The quickstart as a program: load, see, tune, shrink and stream a real model; prints what happens and leaves a page.

usage: quickstart.py [--steps 12] [--html demo.html]
"""
import argparse
import ast
import base64
import html
import io
import platform
import sys
from datetime import date
from types import GeneratorType

import pandas as pd
import torch

from bmlab.all import *

ASKED = (
    "Load a small language model, tune it on film reviews, take the tuning off again, "
    "and make the model a quarter of its size."
)
LINES = [
    ("A real model", """
model, tok = load("smollm2-135m")
tree(model)
"""), ("It answers", """
question = "What is the capital of France? Answer in one sentence."
wrap(model, tok).chat(question, max_new_tokens=24)
"""), ("A LoRA on it: what will train is marked ●", """
delta = Lora(model, r=8, modules=["q_proj", "v_proj"]).freeze()
tree(model)
"""), ("Tuned on film reviews", """
train, held = split(sample_texts("movies").text)
batches = Batches(pack_tokens(train, tok, 64), batch=4)
held_out = list(Batches(pack_tokens(held[:40], tok, 64), shuffle=False))
optimizer = torch.optim.AdamW(delta.trainable(), lr=3e-3)
log = fit(model, batches, optimizer, steps=steps, held_out=held_out)
log
"""), ("With the delta it sounds like a review", """
stream(model, tok, "This is a", max_new_tokens=24)
"""), ("Taken off, the model is the old one", """
delta.detach()
wrap(model, tok).chat(question, max_new_tokens=24)
"""), ("A quarter of the size: int8", """
small = quantize(copy.deepcopy(model))
report(model, small, held_out)
"""), ("The small one answers", """
engine = wrap(small, tok)
engine.chat(question, max_new_tokens=24)
"""),
]
STYLE = """
:root { color-scheme: light dark }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
h2 { margin: 2.5rem 0 .5rem; font-size: 1.15rem }
pre { background: #8881; border-radius: 6px; padding: .7rem; font-size: .85rem }
pre { white-space: pre-wrap; overflow-wrap: anywhere }
pre.typed { border-left: 4px solid #3b7dd8 }
blockquote { margin: .5rem 0; padding: .5rem 1rem; border-left: 4px solid #2a9d5c; background: #8881 }
table { border-collapse: collapse; font-variant-numeric: tabular-nums }
td, th { padding: .15rem .7rem; text-align: right; border-bottom: 1px solid #8883; white-space: nowrap }
th:first-child { text-align: left }
img { max-width: 100%; background: #fff; border-radius: 6px }
.machine { opacity: .75; font-size: .9rem }
@media (max-width: 44rem) {     /* a phone: the tree's names without its columns */
  table { font-size: .8rem }
  td, th { padding: .15rem .25rem }
  .tree > div { font-size: 9px !important }
  .tree [style*="min-width"] { min-width: 0 !important; display: block !important }
  .tree [style*="margin-left:auto"] { display: none !important }
}
"""


def readable(table):
    "The report with units that people read"
    def cell(name, value, column):
        if value in ("", None) or pd.isna(value): return ""
        value = float(value)
        if column == "ratio": return f"× {value:.3g}"
        if name.endswith("_bytes"): return format_bytes(int(value))
        if name == "parameters": return format_count(int(value))
        if name.endswith("tok_s"): return f"{value:.3g} tokens/s"
        return f"{value:.1%}" if name == "same_top1" else f"{value:.4g}"
    rows = [[cell(name, table.at[name, c], c) for c in table.columns] for name in table.index]
    names = [n.removesuffix("_bytes").removesuffix("_tok_s").replace("_", " ") for n in table.index]
    return pd.DataFrame(rows, index=names, columns=table.columns)


class Page:
    "Runs lines as a notebook does; prints what comes and collects it as HTML"
    def __init__(self): self.parts, self.said = [], ""

    def add(self, tag, text, kind=""): self.parts.append(f'<{tag} class="{kind}">{html.escape(str(text))}</{tag}>')

    def run(self, title, lines, names):
        print(f"\n━━ {title}", flush=True)
        self.add("h2", title)
        self.add("pre", lines.strip(), "typed")
        *body, last = ast.parse(lines).body
        exec(compile(ast.Module(body, []), title, "exec"), names)
        self.show(eval(compile(ast.Expression(last.value), title, "eval"), names))

    def show(self, value):
        if isinstance(value, GeneratorType): return self.pieces(value)
        if not isinstance(value, pd.DataFrame):
            print(value, flush=True)
            self.parts.append(f'<div class="tree">{value._repr_html_()}</div>')
        elif "held_out" in value: self.losses(value)
        else:
            value = readable(value)
            print(value.to_string(), flush=True)
            self.parts.append(value.to_html(border=0))

    def pieces(self, pieces):
        self.said = ""
        for piece in pieces:
            self.said += piece
            print(piece, end="", flush=True)
        print()
        self.add("blockquote", self.said)

    def losses(self, log):
        first, last = log.held_out.dropna().iloc[[0, -1]]
        steps, speed = log.step.iloc[-1], log.tokens_per_s.mean()
        line = f"loss on held-out reviews {first:.3f} → {last:.3f} ({last / first - 1:+.1%}) in {steps} steps"
        line += f", {speed:,.0f} tokens/s"
        print(line, flush=True)
        self.add("p", line)
        picture = io.BytesIO()
        with figure(6.4, 2.4, columns=2, show=False) as (left, right):
            plot_log(log, left, right)
            left.figure.savefig(picture, format="png", dpi=160)
        data = base64.b64encode(picture.getvalue()).decode()
        self.parts.append(f'<img alt="loss and throughput" src="data:image/png;base64,{data}">')

    def write(self, path):
        device = f"CPU, threads: {torch.get_num_threads()}"
        if torch.cuda.is_available(): device = torch.cuda.get_device_name()
        machine = f"{date.today():%d %B %Y} · {platform.machine()} · {device} · torch {torch.__version__}"
        head = '<!doctype html><html lang="en"><meta charset="utf-8">'
        head += '<meta name="viewport" content="width=device-width">'
        top = f"<h1>bmlab quickstart</h1><p>{ASKED}</p><p class='machine'>{html.escape(machine)}</p>"
        with open(path, "w", encoding="utf-8") as f:
            f.write("\n".join([f"{head}<title>bmlab quickstart</title><style>{STYLE}</style>", top, *self.parts]))


def main():
    args = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    args.add_argument("--steps", type=int, default=12, help="training steps (default: 12)")
    args.add_argument("--html", default="demo.html", help="where the page goes (default: demo.html)")
    args, page = args.parse_args(), Page()
    set_seed(0)
    names = {"steps": args.steps}
    exec("import copy, torch\nfrom bmlab.all import *", names)
    for title, lines in LINES: page.run(title, lines, names)
    page.write(args.html)
    print(f"\nThe same as a page: {args.html}")
    return 0 if "Paris" in page.said else "the small model no longer knows the answer"


if __name__ == "__main__": sys.exit(main())

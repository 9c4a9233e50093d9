"""The quickstart as a program: load, see, tune, shrink and stream a real model; prints what happens and leaves a page of it.

usage: quickstart.py [--steps 16] [--html demo.html]
"""
import argparse
import base64
import copy
import html
import io
import sys
import tempfile

import torch

from bmlab.all import *

QUESTION = "What is the capital of France? Answer in one sentence."


class Page:
    "Prints sections and collects them as HTML"
    def __init__(self): self.parts = []
    def title(self, text):
        print(f"\n━━ {text}", flush=True)
        self.parts.append(f"<h2>{html.escape(text)}</h2>")
    def text(self, text):
        print(text, flush=True)
        self.parts.append(f"<pre>{html.escape(str(text))}</pre>")
    def tree(self, t):
        print(t, flush=True)
        self.parts.append(t._repr_html_())
    def table(self, df):
        print(df.to_string(), flush=True)
        self.parts.append(df.to_html(border=0))
    def stream(self, pieces):
        whole = ""
        for piece in pieces:
            whole += piece
            print(piece, end="", flush=True)
        print()
        self.parts.append(f"<blockquote>{html.escape(whole)}</blockquote>")
        return whole
    def picture(self, log):
        buffer = io.BytesIO()
        with figure(6.4, 2.4, columns=2, show=False) as (left, right):
            plot_log(log, left, right)
            left.figure.savefig(buffer, format="png")
        self.parts.append(
            '<img alt="loss and throughput" '
            f'src="data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}">'
        )
    def write(self, path):
        style = (
            "body{font:15px/1.5 system-ui,sans-serif;max-width:1000px;margin:2em auto;padding:0 "
            "1em}pre,blockquote{background:#8881;padding:.8em;overflow-x:auto}td,th{padding:.2em "
            ".7em;text-align:right}:root{color-scheme:light dark}"
        )
        with open(path, "w", encoding="utf-8") as f:
            f.write(
                f'<!doctype html><meta charset="utf-8"><title>bmlab quickstart</title><style>{style}</style><h1>bmlab '
                'quickstart</h1>'
                + "\n".join(self.parts)
            )


def main():
    args = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    args.add_argument("--steps", type=int, default=16, help="training steps (default: 16)")
    args.add_argument("--html", default="demo.html", help="where the page goes (default: demo.html)")
    args, page = args.parse_args(), Page()
    set_seed(0)

    page.title("A real model: SmolLM2-135M")
    model, tok = load("smollm2-135m")
    page.tree(tree(model))
    page.text(count(model))
    page.stream(wrap(model, tok).chat(QUESTION, max_new_tokens=24))

    page.title("Tune 0.3 % of it on film reviews")
    train, held = split(sample_texts("movies").text)
    batches, held_out = (
        Batches(pack_tokens(train, tok, 64), batch=4),
        list(Batches(pack_tokens(held[:60], tok, 64), shuffle=False)),
    )
    delta = Lora(model, r=8, modules=["q_proj", "v_proj"]).freeze()
    page.text(delta)
    log = fit(model, batches, torch.optim.AdamW(delta.trainable(), lr=3e-3), steps=args.steps, held_out=held_out)
    first, last = log.held_out.dropna().iloc[[0, -1]]
    page.picture(log)
    page.text(
        f"held-out loss {first:.3f} → {last:.3f} ({last / first - 1:+.1%}) in {args.steps} steps, "
        f"{log.tokens_per_s.mean():.0f} tokens/s"
    )
    page.tree(tree(model))
    page.text("with the delta:")
    page.stream(stream(model, tok, "This is a", max_new_tokens=24))
    with tempfile.TemporaryDirectory() as folder:
        page.text(
            f"saved in PEFT's format: {format_bytes((delta.save(folder) / 'adapter_model.safetensors').stat().st_size)}"
        )
    delta.detach()
    page.text("detached, the model is the old one:")
    page.stream(wrap(model, tok).chat(QUESTION, max_new_tokens=24))

    page.title("Shrink it to int8")
    small = quantize(copy.deepcopy(model), calib=[b for b, _ in zip(batches, range(8))])
    page.table(report(model, small, held_out))

    page.title("Stream from the small one")
    engine = wrap(small, tok)
    answer = page.stream(engine.chat(QUESTION, max_new_tokens=24))
    page.text(f"{engine.stats['decode_tok_s']:.1f} tokens/s")
    page.write(args.html)
    print(f"\nThe same as a page: {args.html}")
    return 0 if "Paris" in answer else "the small model no longer knows the answer"


if __name__ == "__main__": sys.exit(main())

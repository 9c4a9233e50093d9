"""OpenPrompt's own experiment on film reviews: a few examples a class to learn from, as many to choose by, three seeds,
a method a yaml file beside this script, on MiniLM (masked) and SmolLM2 (causal).

usage: few_shot.py [--models minilm-l6 smollm2-135m] [--methods manual …] [--test 500] [--set train.num_epochs=4 …]
                   [--longest 100] [--fill 600] [--batch 16] [--device cuda] [--log FILE]

MiniLM is published without a head over words: it gets one here (the embedding's own matrix behind a layer that begins
as the identity) and learns to fill masks, for 600 steps, on reviews that are in no experiment.
"""
import argparse, json, time, warnings
from pathlib import Path

import pandas as pd
import torch
import transformers as tf

from bmlab.core import set_seed
from bmlab.data.samples import sample_texts
from bmlab.models.load import load, sample_dir
from bmlab.prompt.experiment import Experiment

HERE = Path(__file__).parent
METHODS = ("manual", "kpt", "ptuning", "soft", "prefix", "manual_tuned", "ptr")


def reviews(longest):
    "(texts without labels, examples to draw from, examples to score by), none in two of them"
    films = sample_texts("movies").sample(frac=1, random_state=0)
    short = films.text.str.len() < longest
    rated = films[short & (films.rating.abs() >= 1.5)].iloc[:1200]
    made = [{"text_a": t, "label": "positive" if r > 0 else "negative"} for t, r in zip(rated.text, rated.rating)]
    return list(films.drop(rated.index).text), made[:600], made[600:]


def filling(texts, steps=600, batch=16, device="cpu", rate=2e-4):
    "MiniLM as a model that fills masks"
    tok = tf.AutoTokenizer.from_pretrained(sample_dir("minilm-l6"))
    model = tf.BertForMaskedLM.from_pretrained(sample_dir("minilm-l6"), dtype=torch.float32)
    model.to(device)
    change = model.cls.predictions.transform.dense
    with torch.no_grad():
        change.weight.copy_(torch.eye(len(change.weight)))
        change.bias.zero_()
    set_seed(0)
    draw, opt = torch.Generator().manual_seed(0), torch.optim.AdamW(model.parameters(), lr=rate)
    cool = torch.optim.lr_scheduler.LinearLR(opt, 1, .05, steps)
    model.train()
    for step in range(steps):
        rows = torch.randint(len(texts), (batch,), generator=draw).tolist()
        b = tok([texts[i] for i in rows], padding=True, truncation=True, max_length=64, return_tensors="pt")
        hidden = (torch.rand(b.input_ids.shape, generator=draw) < .15) & (b.input_ids >= 1000)
        labels = b.input_ids.masked_fill(~hidden, -100)
        b["input_ids"] = b.input_ids.masked_fill(hidden, tok.mask_token_id)
        loss = model(**b.to(device), labels=labels.to(device)).loss
        loss.backward()
        opt.step()
        cool.step()
        opt.zero_grad()
        if step % 100 == 99: print(f"MiniLM, filling masks: step {step + 1}, {loss.item():.2f} nats", flush=True)
    return model.eval(), tok


def main():
    ask = argparse.ArgumentParser()
    ask.add_argument("--models", nargs="+", default=["minilm-l6", "smollm2-135m"])
    ask.add_argument("--methods", nargs="+", default=list(METHODS))
    ask.add_argument("--test", type=int, default=500, help="examples to score by")
    ask.add_argument("--set", nargs="*", default=[], help="WORD=VALUE, said on top of the files")
    ask.add_argument("--longest", type=int, default=100, help="characters of a review")
    ask.add_argument("--fill", type=int, default=600, help="steps in which MiniLM learns to fill masks")
    ask.add_argument("--batch", type=int, default=16, help="reviews in each of these steps")
    ask.add_argument("--device", default="cpu")
    ask.add_argument("--log", default=None)
    args = ask.parse_args()
    texts, train, test = reviews(args.longest)
    changes, rows = {k: json.loads(v) for k, _, v in (word.partition("=") for word in args.set)}, []
    for name in args.models:
        if name == "minilm-l6": model, tok = filling(texts, args.fill, args.batch, args.device)
        else: model, tok = load(name, device=args.device, dtype=torch.float32)
        for method in args.methods:
            if method == "ptr" and name != "minilm-l6": continue                 # a causal model reads one mask
            start = time.perf_counter()
            made = Experiment(HERE / f"{method}.yaml", model, tok, changes=changes)
            runs = made.run(train, test=test[:args.test])
            row = {"model": name, "method": method, "seconds": round((time.perf_counter() - start) / len(runs), 1)}
            row |= {"accuracy": runs.accuracy.mean(), "± over seeds": runs.accuracy.std()}
            row["macro-f1"] = runs["macro-f1"].mean()
            rows.append(row | {f"seed {s}": a for s, a in zip(runs.seed, runs.accuracy)})
            print(json.dumps(rows[-1]), flush=True)
            if args.log: Path(args.log).write_text(json.dumps(rows, indent=1) + "\n")
    print(pd.DataFrame(rows).round(3).to_string(index=False))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()

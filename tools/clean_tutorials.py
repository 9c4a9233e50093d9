"""Tutorials keep their outputs; this drops what changes from run to run: widget state, ids of the kernel, times of cells.

usage: clean_tutorials.py [--check] [NOTEBOOK…]   default: tutorials/*.ipynb; --check changes nothing and exits 1 if there is something to clean
"""
import json, sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WIDGET = "application/vnd.jupyter.widget-view+json"


def clean_output(output):
    "The output without widget views; None for a progress bar"
    data = output.get("data", {})
    if WIDGET in data and "text/html" not in data: return None                             # a bar; a picker has an HTML face
    if output["output_type"] == "stream" and output["name"] == "stderr": return None
    return {**output, **({"data": {k: v for k, v in data.items() if k != WIDGET}, "metadata": {}} if "data" in output else {})}


def joined(outputs):
    "Text that was printed in pieces as one output"
    out = []
    for o in outputs:
        if out and o["output_type"] == "stream" == out[-1]["output_type"]: out[-1] = {**o, "text": "".join([*out[-1]["text"], *o["text"]]).splitlines(keepends=True)}
        else: out.append(o)
    return out


def clean(nb):
    "The notebook with counts 1..n, tags as the only cell metadata, and a bare kernelspec"
    cells, n = [], 0
    for cell in nb["cells"]:
        cell = {**cell, "metadata": {k: v for k, v in cell["metadata"].items() if k == "tags"}}
        if cell["cell_type"] == "code":
            n += 1
            outputs = joined([o for o in map(clean_output, cell["outputs"]) if o is not None])
            cell |= {"execution_count": n, "outputs": [{**o, "execution_count": n} if o["output_type"] == "execute_result" else o for o in outputs]}
        cells.append(cell)
    spec = {"display_name": "python3", "language": "python", "name": "python3"}
    return {"cells": cells, "metadata": {"kernelspec": spec}, "nbformat": 4, "nbformat_minor": 5}


def dump(nb): return json.dumps(nb, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def main(args):
    check, paths = "--check" in args, [Path(a) for a in args if a != "--check"] or sorted((ROOT / "tutorials").glob("*.ipynb"))
    dirty = []
    for path in paths:
        text = path.read_text(encoding="utf-8")
        cleaned = dump(clean(json.loads(text)))
        if cleaned != text:
            dirty.append(path.name)
            if not check: path.write_text(cleaned, encoding="utf-8")
    if check and dirty: print(f"not clean: {', '.join(dirty)}; run tools/clean_tutorials.py")
    return int(check and bool(dirty))


if __name__ == "__main__": sys.exit(main(sys.argv[1:]))

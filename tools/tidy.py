"""Notebooks keep their outputs; this drops what changes from run to run: widget state, progress bars, times of cells.

usage: tidy.py [--check] [NOTEBOOK…]   default: all of nbs/ and tutorials/
               --check changes nothing and exits 1 if there is something to tidy
"""
import json, sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WIDGET = "application/vnd.jupyter.widget-view+json"


def shown_at(output):
    "The size at which a picture is shown, where it has more dots than that"
    said = output.get("metadata", {}).get("image/png", {})
    size = {k: said[k] for k in ("width", "height") if k in said}
    return {"image/png": size} if size else {}


def clean(output):
    "The output without widget views; None for a progress bar"
    data = output.get("data", {})
    if WIDGET in data and "text/html" not in data: return None         # a bar; a picker has an HTML face
    if output["output_type"] == "stream" and output["name"] == "stderr": return None
    if output["output_type"] == "display_data" and set(data) == {"text/plain"} and not "".join(data["text/plain"]):
        return None                                                    # where a bar was
    if "data" not in output: return output
    return {**output, "data": {kind: said for kind, said in data.items() if kind != WIDGET},
            "metadata": shown_at(output)}


def joined(outputs):
    "Text that was printed in pieces as one output"
    out = []
    for o in outputs:
        if out and o["output_type"] == "stream" == out[-1]["output_type"]:
            text = "".join([*out[-1]["text"], *o["text"]])
            out[-1] = {**out[-1], "text": text.splitlines(keepends=True)}
        else: out.append(o)
    return out


def lines(text): return text.splitlines(keepends=True) if isinstance(text, str) else text


def as_lines(output):
    "Text as a list of its lines, as Jupyter writes it; pictures as one line"
    if "text" in output: return {**output, "text": lines(output["text"])}
    if "data" not in output: return output
    as_is = lambda kind, said: said.rstrip() if kind == "image/png" else lines(said)
    return {**output, "data": {kind: as_is(kind, said) for kind, said in output["data"].items()}}


def tidy(nb, counts=True):
    "The notebook with tags as the only cell metadata, a bare kernelspec, and counts 1..n; nbdev wants none of these"
    cells, n = [], 0
    for cell in nb["cells"]:
        cell = {**cell, "metadata": {k: v for k, v in cell["metadata"].items() if k == "tags"}}
        if cell["cell_type"] == "code":
            n += 1
            outputs = joined([as_lines(o) for o in map(clean, cell["outputs"]) if o is not None])
            count = n if counts else None
            numbered = [{**o, "execution_count": count} if o["output_type"] == "execute_result" else o for o in outputs]
            cell |= {"execution_count": count, "outputs": numbered}
        cells.append(cell)
    spec = {"display_name": "python3", "language": "python", "name": "python3"}
    return {"cells": cells, "metadata": {"kernelspec": spec}, "nbformat": 4, "nbformat_minor": 5}


def counted(path): return "tutorials" in Path(path).parts


def dump(nb): return json.dumps(nb, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def main(args):
    check, paths = "--check" in args, [Path(a) for a in args if a != "--check"]
    found = (p for folder in ("nbs", "tutorials") for p in (ROOT / folder).rglob("[!.]*.ipynb"))
    paths = paths or sorted(p for p in found if ".ipynb_checkpoints" not in p.parts)
    dirty = []
    for path in paths:
        text = path.read_text(encoding="utf-8")
        tidied = dump(tidy(json.loads(text), counted(path)))
        if tidied != text:
            dirty.append(path.name)
            if not check: path.write_text(tidied, encoding="utf-8")
    if check and dirty: print(f"not tidy: {', '.join(dirty)}; run tools/tidy.py")
    return int(check and bool(dirty))


if __name__ == "__main__": sys.exit(main(sys.argv[1:]))

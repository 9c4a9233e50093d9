"""README.md from nbs/index.ipynb: prose as it is, code as code, outputs below it; and a table of all notebooks by their subtitles.

usage: readme.py [--check]
"""
import json, re, sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "docs"))
from stage import chapters, exports, title_of

MARK = re.compile(r"<!-- rooms.*?-->")


def output_text(output):
    if output["output_type"] == "stream": return "".join(output["text"])
    return "".join(output.get("data", {}).get("text/plain", ""))


def tables():
    "For each chapter a heading and a table of its rooms: the module, and what it is for"
    row = lambda path, nb: (
        f"| [`{exports(nb) or path.stem.partition('_')[2]}`]({path.relative_to(ROOT).as_posix()}) | {title_of(nb)[1]} |"
    )
    read = lambda path: json.loads(path.read_text(encoding="utf-8"))
    head, alone, lines = ["| module | what it is for |", "|---|---|"], [], []
    for door, rooms in chapters():
        nb = read(door)
        if not rooms:
            alone.append(row(door, nb))
            continue
        name = door.stem.partition("_")[2]
        lines += [
            "",
            f"### {name}",
            "",
            f"{title_of(nb)[1].rstrip('.')}. Its door: [{door.stem}]({door.relative_to(ROOT).as_posix()}).",
            "",
            *head,
        ]
        if exports(nb): lines.append(row(door, nb))
        lines += [row(room, read(room)) for room in rooms]
    return "\n".join(
        [
            "### Beside the chapters",
            "",
            "What every chapter stands on, BMTrain's own names, and all public names in one module.",
            "",
            *head,
            *alone,
            *lines,
        ]
    )


def render(nb):
    blocks = []
    for cell in nb["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown": blocks.append(source)
        elif not re.search(r"^#\|\s*(hide|default_exp)\b", source, re.M):
            if not re.search(r"^#\|\s*echo:\s*false", source, re.M): blocks.append(f"```python\n{source}\n```")
            if text := "".join(output_text(o) for o in cell["outputs"]).rstrip(): blocks.append(f"```\n{text}\n```")
    return (
        "<!-- made from nbs/index.ipynb by make readme -->\n\n"
        + MARK.sub(lambda _: tables(), "\n\n".join(blocks))
        + "\n"
    )


def main(args):
    text, path = render(json.loads((ROOT / "nbs/index.ipynb").read_text(encoding="utf-8"))), ROOT / "README.md"
    if "--check" in args: return int(path.read_text(encoding="utf-8") != text)
    path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__": sys.exit(main(sys.argv[1:]))

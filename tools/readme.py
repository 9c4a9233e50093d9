"""README.md from nbs/index.ipynb: prose as it is, code as code, outputs below it; and a table of the chapters' doors
by their subtitles.

usage: readme.py [--check]
"""
import json, re, sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "docs"))
from stage import chapters, title_of

MARK = re.compile(r"<!-- doors.*?-->")
TUTORIALS = {
    "03_formats": ["22_formats"], "04_models": ["02_zoo"], "05_data": ["03_data"],
    "10_train": ["10_train", "11_offload"],
    "20_cook": ["20_cook", "21_staircase"], "30_delta": ["30_delta", "31_many_users", "31a_qlora"],
    "35_prompt": ["35_prompt", "35a_chinese", "36_bee", "37_eva_glm"], "40_infer": ["40_infer", "02_look"],
    "45_align": ["45_chat", "46_preference", "47_reward", "48_on_policy"], "50_app": ["41_panels", "42_server"],
}


def output_text(output):
    if output["output_type"] == "stream": return "".join(output["text"])
    return "".join(output.get("data", {}).get("text/plain", ""))


def table():
    "A row for each chapter: its door, how many rooms it has, what it is for, and its tutorials"
    lines = ["| door | what is behind it | tutorials |", "|---|---|---|"]
    for door, rooms in chapters():
        nb = json.loads(door.read_text(encoding="utf-8"))
        count = f", {len(rooms)} room{'s' * (len(rooms) > 1)}" if rooms else ""
        jobs = ", ".join(f"[{name}](tutorials/{name}.ipynb)" for name in TUTORIALS.get(door.stem, ()))
        lines.append(f"| [{door.stem}]({door.relative_to(ROOT).as_posix()}){count} | {title_of(nb)[1]} | {jobs} |")
    return "\n".join(lines)


def render(nb):
    blocks = []
    for cell in nb["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown": blocks.append(source.replace("](../", "]("))      # (nbs/ lies deeper)
        elif not re.search(r"^#\|\s*(hide|default_exp)\b", source, re.M):
            if not re.search(r"^#\|\s*echo:\s*false", source, re.M): blocks.append(f"```python\n{source}\n```")
            if text := "".join(output_text(o) for o in cell["outputs"]).rstrip(): blocks.append(f"```\n{text}\n```")
    body = MARK.sub(lambda _: table(), "\n\n".join(blocks))
    return f"<!-- made from nbs/index.ipynb by make readme -->\n\n{body}\n"


def main(args):
    text, path = render(json.loads((ROOT / "nbs/index.ipynb").read_text(encoding="utf-8"))), ROOT / "README.md"
    if "--check" in args: return int(path.read_text(encoding="utf-8") != text)
    path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__": sys.exit(main(sys.argv[1:]))

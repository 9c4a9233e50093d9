"A page of docs/ that maps another library's calls to this one's: its set-ups and rows, to be run as they stand"
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FENCE, CODE = re.compile(r"```python\n(.*?)```", re.S), re.compile(r"`((?:[^`\\]|\\.)+)`")


class Page:
    "`sections`: {title: (set-up code, [(what stands left, the lines of its row)])}"
    def __init__(self, name):
        self.text, self.sections = (ROOT / "docs" / name).read_text(encoding="utf-8"), {}
        for part in re.split(r"^## ", self.text, flags=re.M)[1:]:
            title, _, body = part.partition("\n")
            rows = []
            for line in FENCE.sub("", body).splitlines():
                if not line.startswith("|"): continue
                cells = [c.strip() for c in re.split(r"(?<!\\)\|", line)[1:-1]]
                if cells[0] == "there" or set(cells[0]) <= set("-: "): continue
                rows.append((cells[0], [c.replace(r"\|", "|") for c in CODE.findall(cells[1])]))
            self.sections[title.strip()] = ("\n".join(FENCE.findall(body)), rows)
        self.common = self.sections["What the rows stand on"][0]
        self.packages = [t for t, (_, rows) in self.sections.items() if rows]

    def run(self, title):
        "The rows of a table in their order, each in what the set-up and the rows before it left; which were wrong"
        setup, rows = self.sections[title]
        space, wrong = {"__name__": "page"}, []
        exec(compile(self.common + "\n" + setup, f"set-up of {title}", "exec"), space)
        for left, lines in rows:
            assert lines, f"{left}: no line of this library stands beside it"
            for line in lines:
                try: exec(compile(line, left, "exec"), space)
                except Exception as e: wrong.append(f"{left} → {line}\n    {type(e).__name__}: {e}")
        assert not wrong, f"{len(wrong)} of {len(rows)} rows:\n" + "\n".join(wrong)

    def check_verdicts(self, title):
        "Same, better or not; better and not say more"
        for line in re.split(rf"^## {title}$", self.text, flags=re.M)[1].partition("\n## ")[0].splitlines():
            if not line.startswith("| `"): continue
            said = re.split(r"(?<!\\)\|", line)[-2].strip()
            assert re.fullmatch(r"same\b.*|(better|not)\b.*\w{3}.*", said), line

"The lines that the README shows are run as they stand."
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.long
def test_readme_lines_run(tmp_path, monkeypatch, capsys):
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    code = next(b for b in re.findall(r"```python\n(.*?)```", text, re.S) if "fit(" in b)
    assert "steps=100" in code
    monkeypatch.chdir(tmp_path)
    code = code.replace("steps=100", "steps=2").replace('pack_tokens(held, tok, 64)', 'pack_tokens(held[:20], tok, 64)')     # minutes → seconds
    exec(compile(code, "README.md", "exec"), {"__name__": "__main__"})
    assert "Paris" in capsys.readouterr().out
    assert (tmp_path / "tuned/adapter_model.safetensors").is_file() and (tmp_path / "small/model.safetensors").is_file()


def test_readme_links_exist():
    for name in ("README.md", "CONTRIBUTING.md"):
        for link in re.findall(r"\]\(([^)#:]+)\)", (ROOT / name).read_text(encoding="utf-8")): assert (ROOT / link).exists(), link

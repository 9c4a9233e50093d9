"tools/notebooks.py: what passes, what fails and what is stuck; each says what happened, and a thread left running holds nobody up"
import json, subprocess, sys
from pathlib import Path

import pytest

RUNNER = Path(__file__).resolve().parents[2] / "tools/notebooks.py"
SLEEPER = "import threading, time\nsleeper = threading.Thread(target=time.sleep, args=(600,))\nsleeper.start()"


@pytest.mark.long
def test_notebook_runner(tmp_path):
    for name, cells in {"good": [SLEEPER, "1 + 1"], "bad": ["#| cuda\n1 / 0", "wrong = {}['key']"], "stuck": [SLEEPER, "sleeper.join()"]}.items():
        cells = [dict(cell_type="code", id=f"c{i}", metadata={}, outputs=[], execution_count=None, source=c) for i, c in enumerate(cells)]
        (tmp_path / f"{name}.ipynb").write_text(json.dumps(dict(nbformat=4, nbformat_minor=5, metadata=dict(kernelspec=dict(name="python3", display_name="python3", language="python")), cells=cells)))
    done = subprocess.run([sys.executable, RUNNER, "--limit", "20", *sorted(tmp_path.glob("*.ipynb"))], capture_output=True, text=True, timeout=200)
    said = {line.split()[-1]: line.split()[0] for line in done.stdout.splitlines() if line.startswith(("passed", "FAILED"))}
    assert done.returncode == 1 and said == {"good.ipynb": "passed", "bad.ipynb": "FAILED", "stuck.ipynb": "FAILED"}, done.stdout + done.stderr
    assert "KeyError" in done.stdout and "ZeroDivisionError" not in done.stdout and "Timeout (0:00:20)!" in done.stdout and "_wait_for_tstate_lock" in done.stdout
    assert "1 of 3 notebooks passed" in done.stdout and done.stdout.rstrip().endswith("all but bad.ipynb, stuck.ipynb")

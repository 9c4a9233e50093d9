"scripts/story.py: from text to titles on two processes, at a size of seconds; a second run goes on behind the corpus"
from pathlib import Path

import pandas as pd
import pytest

from bmlab.data.samples import sample_texts
from fresh import fresh_python, torchrun

ROOT = Path(__file__).resolve().parents[2]

SIZES = """--width 32 --layers 2 --ff 64 --vocab 500 --steps 8 --tune 4 --cook 4 --every 12 --pages 120 --tasks 1
           --batch 4 --common 1 --tune-lr 1e-3 5e-3""".split()


@pytest.mark.long
@pytest.mark.parametrize("where", ["alone", pytest.param("torchrun", marks=pytest.mark.slow)])
def test_story(tmp_path, where):
    try: sample_texts("manpages-zh"), sample_texts("help-en")
    except (LookupError, OSError, RuntimeError) as e: pytest.skip(f"the texts of Debian's packages are not here: {e}")
    story = [ROOT / "scripts/story.py", "--out", tmp_path, *SIZES]
    alone = lambda *more: fresh_python(story[0].read_text(encoding="utf-8"), *story[1:], *more)
    for run in (alone,) if where == "alone" else (lambda: torchrun(*story), alone):
        done = run()
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
        table, beside, log = (pd.read_csv(tmp_path / f"{name}.csv") for name in ("table", "predicted", "log"))
        assert (
            list(table.stage) == ["pre-trained", "tuned", "cooked", "packed"]
            and table.perplexity.between(1, 1e5).all()
            and table["title score"].between(0, 1).all()
        )
        assert (
            table.parameters.is_monotonic_decreasing is False
            and table.parameters[2] < table.parameters[0]
            and table.bytes[3] < table.bytes[2]
        )
        assert (
            set(beside.step) == {"pre-train", "Lora", "packed"}
            and log.step.iloc[-1] == 8
            and log.held_out.notna().sum() == 5
        )
    if where == "torchrun": assert "language" not in done.stdout  # (the corpus was there)
    done = alone("--every", "6")
    assert done.returncode == 1 and "of other arguments" in done.stderr

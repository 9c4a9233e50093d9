"The page for people who come from TRL, PEFT, Unsloth and torchtune: its code is run as it stands there, row by row."
import pytest

from pages import Page

PAGE = Page("coming_from_trl.md")


@pytest.mark.parametrize("title", PAGE.packages)
def test_every_row_runs(title, tmp_path, monkeypatch):
    from bmlab.train.processes import shutdown
    monkeypatch.chdir(tmp_path)
    try: PAGE.run(title)
    finally: shutdown()


@pytest.mark.parametrize("title", PAGE.packages)
def test_every_row_says_how_it_compares(title): PAGE.check_verdicts(title)

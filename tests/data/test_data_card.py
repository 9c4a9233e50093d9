"Promise: a data card masks personal data in what it shows, comes back as it was, and leaves other files alone."
import json

from bmlab.data.card import DataCard, Ledger

PHONE, MAIL = "13912345678", "someone@example.com"


def card():
    ledger = Ledger()
    ledger.count("web", "short", 20)
    ledger.sample("short", "web/1", "web", text=f"call {PHONE}", after=f"write to {MAIL}", twin=f"or {PHONE}")
    return DataCard.of([{"name": "web"}], [("rule", "", ledger)], {}, {})


def test_personal_data_in_samples_is_masked_in_every_form():
    for name, text in card().files().items():
        assert PHONE not in text and MAIL not in text, name
    assert "[PHONE]" in card().files()["card.json"] and "[EMAIL]" in card().files()["card.json"]


def test_it_is_saved_beside_other_files_and_comes_back(tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    made = card()
    for _ in range(2): made.save(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["card.html", "card.json", "card.md", "mine.txt"]
    again = DataCard.load(tmp_path)
    assert json.loads(again.files()["card.json"]) == json.loads(made.files()["card.json"])
    assert again.waterfall.equals(made.waterfall) and again.samples().equals(made.samples())

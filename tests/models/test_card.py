"""Promise: a card is written with or without hashes, each file whole, and comes back from a GGUF file without them."""
import errno
import json

import pytest

import toys
from bmlab.cook import export_gguf
from bmlab.formats import GGUF
from bmlab.models.card import ModelCard, ModelCardError, card_in, check_hashes, read_card, write_card

CARD = ModelCard(name="a model", license="mit", source="random", license_text="Do as you like.")


def test_without_hashes(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    assert write_card(CARD, tmp_path, hashes=False) == CARD == read_card(tmp_path)
    assert check_hashes(tmp_path) == ["the card has no hashes"]
    assert list(write_card(CARD, tmp_path).sha256) == ["model.safetensors"] and check_hashes(tmp_path) == []


def test_a_full_disk_leaves_the_old_card_and_licence(tmp_path, monkeypatch):
    write_card(CARD, tmp_path, hashes=False)
    before = {p.name: p.read_text() for p in tmp_path.iterdir()}
    def full(fd): raise OSError(errno.ENOSPC, "No space left on device")
    with monkeypatch.context() as m, pytest.raises(OSError, match="No space"):
        m.setattr("os.fsync", full)
        write_card(CARD, tmp_path, change="trained")
    assert {p.name: p.read_text() for p in tmp_path.iterdir()} == before and set(before) >= {"LICENSE"}


def test_of_a_gguf_file(tmp_path):
    "The file cannot hold its own hash: that stands in the card beside it"
    model = toys.build("llama")
    assert card_in(GGUF(export_gguf(model, tmp_path / "bare.gguf"))) is None
    CARD.put(model)
    found = card_in(GGUF(export_gguf(model, tmp_path / "x.gguf")))
    assert (found.name, found.license, found.sha256) == (CARD.name, CARD.license, {})
    assert list(json.loads((tmp_path / "x.card.json").read_text())["sha256"]) == ["x.gguf"]
    with pytest.raises(ModelCardError, match="bmlab.card"): card_in(Said("{"))


class Said:
    "A GGUF file that says one thing"
    def __init__(self, text): self.text, self.path = text, "x.gguf"
    def get(self, key, default=None): return self.text

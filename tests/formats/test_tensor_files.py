"Promise: files of tensors are opened when one is asked for, let go by `close`, and opened again by the next `read`."
import json

import pytest
import torch
from safetensors.torch import save_file

from bmlab.formats.safetensors import TensorFileError, TensorFiles


def test_a_file_is_opened_when_it_is_asked_for_and_again_after_close(tmp_path):
    parts = {"a": torch.arange(12.).view(3, 4), "b": torch.ones(2, dtype=torch.bfloat16)}
    for k, t in parts.items(): save_file({k: t}, tmp_path / f"{k}.safetensors")
    index = {"weight_map": {k: f"{k}.safetensors" for k in (*parts, "lost")}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    files = TensorFiles(tmp_path)
    assert not files.open
    assert torch.equal(files.read("a", (slice(1, 2), slice(0, 3))), parts["a"][1:2, :3])
    assert [p.name for p in files.open] == ["a.safetensors"] and files.read_bytes == 3 * 4
    files.close()
    assert not files.open and torch.equal(files.read("b", ()), parts["b"])
    assert files.shape("a") == (3, 4) and len(files.open) == 2
    with pytest.raises((TensorFileError, FileNotFoundError), match="lost.safetensors"): files.read("lost", ())

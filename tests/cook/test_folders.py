"""Promise: packing from disk to disk may be cut off anywhere, goes on or begins anew, and its folder is there when it
is whole; a packed folder is read without filling the floats that it was made of."""
import json
import os

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import toys
from bmlab.cook import load_cooked, save_cooked
from bmlab.cook.folders import OnDisk, quantize_folder
from bmlab.cook.report import CookedError, bytes_on_disk
from bmlab.kernels.layers import pack_linears

HOW = dict(bits=4, group_size=32)


def cut_off(monkeypatch, model, to, **how):
    "A run that ends behind its first block → the folder where it works"
    leave = OnDisk.leave
    def left(self, block):
        leave(self, block)
        raise KeyboardInterrupt
    with monkeypatch.context() as m, pytest.raises(KeyboardInterrupt):
        m.setattr(OnDisk, "leave", left)
        quantize_folder(model, to, **how)
    assert not to.exists()
    return to.parent / f".{to.name}~unfinished"


def test_anew_forgets_an_unfinished_run(tmp_path, monkeypatch):
    toys.build("llama").save_pretrained(tmp_path / "model")
    work = cut_off(monkeypatch, tmp_path / "model", tmp_path / "small", bits=8)
    with pytest.raises(ValueError, match="anew=True"): quantize_folder(tmp_path / "model", tmp_path / "small", **HOW)
    made = load_cooked(quantize_folder(tmp_path / "model", tmp_path / "small", **HOW, anew=True)).state_dict()
    once = load_cooked(quantize_folder(tmp_path / "model", tmp_path / "once", **HOW)).state_dict()
    assert not work.exists() and made.keys() == once.keys()
    assert all(torch.equal(made[k], once[k]) for k in once)


@pytest.mark.parametrize("torn", ["", "{", "[" * 10_000])
def test_a_torn_note_of_a_run_is_named(tmp_path, monkeypatch, torn):
    toys.build("llama").save_pretrained(tmp_path / "model")
    note = cut_off(monkeypatch, tmp_path / "model", tmp_path / "small", **HOW) / "run.json"
    assert json.loads(note.read_text())["options"]["bits"] == 4
    note.write_text(torn)
    with pytest.raises(CookedError, match="run.json.*anew=True"):
        quantize_folder(tmp_path / "model", tmp_path / "small", **HOW)
    assert quantize_folder(tmp_path / "model", tmp_path / "small", **HOW, anew=True).is_dir()


def test_one_process_at_a_time(tmp_path, monkeypatch):
    "The second is told so at once, whatever it asks for, and the first comes through; nothing of the lock stays"
    model, to = tmp_path / "model", tmp_path / "small"
    toys.build("llama").save_pretrained(model)
    enter, told = OnDisk.enter, []
    def second():
        monkeypatch.setattr(OnDisk, "enter", enter)
        for more in ({}, {"anew": True}):
            try: quantize_folder(model, to, **HOW, **more)
            except TimeoutError as e: told.append(str(e))
        os._exit(len(told))
    def entered(self, block):
        if not told:
            pid = os.fork()
            if pid == 0: second()
            told.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
            with pytest.raises(TimeoutError, match="small.*another process is at"): quantize_folder(model, to, **HOW)
        enter(self, block)
    monkeypatch.setattr(OnDisk, "enter", entered)
    quantize_folder(model, to, **HOW)
    assert told == [2] and load_cooked(to) is not None
    assert not [p.name for p in to.iterdir() if "lock" in p.name] and sorted(p.name for p in tmp_path.iterdir()) == [
        "model", "small"]
    with pytest.raises(FileExistsError, match="small"): quantize_folder(model, to, **HOW)


class Filled(TorchDispatchMode):
    "The bytes of the largest float tensor that something is written into; memory that nothing touches is not taken"
    most = 0
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        kept = isinstance(out, torch.Tensor) and out.is_floating_point() and not out.is_meta
        if kept and func not in (torch.ops.aten.empty.memory_format, torch.ops.aten.detach.default):
            self.most = max(self.most, out.untyped_storage().nbytes())
        return out


def test_the_uncompressed_model_is_never_filled(tmp_path):
    "No float tensor of a weight's size is written; on meta no tensor takes memory"
    model = pack_linears(toys.llama(vocab_size=8))             # its table of words stays in float, and is small
    save_cooked(model, tmp_path)
    smallest = min(4 * t.numel() for k, t in model.state_dict().items() if t.dtype == torch.int8 and ".layers." in k)
    with Filled() as seen: again = load_cooked(tmp_path)
    assert 0 < seen.most < smallest
    assert all(torch.equal(a, b) for a, b in zip(again.state_dict().values(), model.state_dict().values(), strict=True))
    with Filled() as seen: empty = load_cooked(tmp_path, "meta")
    assert all(t.is_meta for t in empty.state_dict().values()) and seen.most < smallest
    wanted = {k: (t.shape, t.dtype) for k, t in model.state_dict().items()}
    assert {k: (t.shape, t.dtype) for k, t in empty.state_dict().items()} == wanted


def test_bytes_on_disk_are_those_of_the_file(tmp_path):
    model = pack_linears(toys.build("llama"))
    assert bytes_on_disk(model) == (save_cooked(model, tmp_path) / "cooked.safetensors").stat().st_size

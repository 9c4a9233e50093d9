"""Promise: what is no file of theirs is refused by all public loaders in words: the argument or the file is named,
and no traceback of another library comes out."""
import inspect
import re
import traceback
from pathlib import Path

import pytest
import torch

import toys
from bmlab.all import (
    AutoDeltaConfig, AutoDeltaModel, BlankGlmTokenizer, Continual, Cook, Cpm1Tokenizer, Cpm2Tokenizer, CpmBeeTokenizer,
    DataCard, Delta, DeltaBank, EvaTokenizer, Experiment, Hub, InferencePlan, Lora, PeftDelta, PromptModel, ShardError,
    Shards, Template, TrainingPlan, Verbalizer, WordNet, export_hf, latest, load, load_cooked, load_weights, open_ds,
    open_mmididx, publish, read_blocks, read_card, save, save_cooked, seal_shards, to_original, to_safetensors,
    word_list,
)
from bmlab.cook import export_gguf
from bmlab.cook.bmcook import methods_of
from bmlab.cook.folders import quantize_folder
from bmlab.data.layouts import write_mmididx
from bmlab.data.rules import CharModel
from bmlab.delta.hub import DeltaCard
from bmlab.files import FileError, check_shape, damage, replace_file, replace_folder, replace_text, settle
from bmlab.formats import GGUF
from bmlab.formats.gguf_models import convert_gguf
from bmlab.formats.gguf_writer import write_gguf
from bmlab.formats.quantized import quantization_of
from bmlab.formats.safetensors import indexed, load_tensors, open_tensors, read_weights
from bmlab.models.card import check_hashes, write_card
from bmlab.models.cpm2 import Cpm2Config
from bmlab.models.tree import Tree
from bmlab.prompt.experiment import load_template, load_verbalizer
from bmlab.prompt.verbalize import read_words
from bmlab.train import bmblocks

pytestmark = pytest.mark.filterwarnings("ignore")
MODEL = toys.build("llama")
OUT = Path("/nowhere/out")                       # where nothing can be written


def source(kind):
    def read(path):
        sources = pytest.importorskip("bmlab.data.sources")
        return list(sources.read_source(sources.Source(name="s", kind=kind, path=path)))
    return read


def cleaned(path):
    pytest.importorskip("datatrove")
    from bmlab.data.corpus import Cleaned
    return Cleaned(path)


LOADERS = {
    "load": lambda p: load(p, device="cpu"),
    "load_cooked": load_cooked,
    "load_weights": lambda p: load_weights(MODEL, p),
    "latest": latest,
    "read_card": read_card,
    "check_hashes": check_hashes,
    "Delta.load": lambda p: Delta.load(p, MODEL),
    "PeftDelta.load": lambda p: PeftDelta.load(p, MODEL),
    "DeltaBank.load": lambda p: DeltaBank.load(p, MODEL),
    "Continual.load": lambda p: Continual.load(p, MODEL),
    "DeltaCard.read": DeltaCard.read,
    "Hub": lambda p: list(Hub(p)),
    "AutoDeltaConfig": AutoDeltaConfig.from_finetuned,
    "AutoDeltaModel": lambda p: AutoDeltaModel.from_finetuned(p, MODEL),
    "PromptModel.load": lambda p: PromptModel.load(p, MODEL, None),
    "Template.from_file": Template.from_file,
    "Verbalizer.from_file": lambda p: Verbalizer.from_file(None, p),
    "read_words": read_words,
    "word_list": word_list,
    "WordNet": WordNet,
    "Experiment": Experiment,
    "Cook.from_config": lambda p: Cook.from_config(MODEL, p),
    "InferencePlan.load": InferencePlan.load,
    "TrainingPlan.load": TrainingPlan.load,
    "Shards": Shards,
    "seal_shards": seal_shards,
    "open_ds": open_ds,
    "open_mmididx": open_mmididx,
    "read_blocks": lambda p: list(read_blocks(p)),
    "DataCard.load": DataCard.load,
    "Cleaned": cleaned,
    "jsonl": source("jsonl"),
    "csv": source("csv"),
    "parquet": source("parquet"),
    "text": source("text"),
    "warc": source("warc"),
    "CharModel.load": CharModel.load,
    "Cpm1Tokenizer": Cpm1Tokenizer,
    "Cpm2Tokenizer": Cpm2Tokenizer,
    "EvaTokenizer": EvaTokenizer,
    "CpmBeeTokenizer": CpmBeeTokenizer,
    "BlankGlmTokenizer": BlankGlmTokenizer,
    "GGUF": GGUF,
    "open_tensors": open_tensors,
    "load_tensors": load_tensors,
    "read_weights": lambda p: read_weights(torch.nn.Linear(2, 2), p),
    "indexed": indexed,
    "quantize_folder": lambda p: quantize_folder(p, OUT),
    "to_safetensors": lambda p: to_safetensors(p, OUT, "cpm-2", Cpm2Config(num_layers=1, num_decoder_layers=1)),
    "to_original": lambda p: to_original(p, OUT, "cpm-2"),
    "damage": damage,
    "settle": settle,
    # the writers: their folder is the argument
    "save": lambda p: save(MODEL, p),
    "save_cooked": lambda p: save_cooked(MODEL, p),
    "export_hf": lambda p: export_hf(MODEL, p),
    "publish": lambda p: publish(Lora(toys.build("llama"), r=2), p, "n", task="t", license="mit"),
}
ERRORS = (FileError, ShardError, FileNotFoundError, NotADirectoryError, IsADirectoryError)
ERRORS += (TypeError, ValueError, LookupError)


def given(folder):
    "{what: it} that no loader can read"
    (folder / "a folder").mkdir()
    (folder / "empty").write_bytes(b"")
    (folder / "bytes").write_bytes(bytes(range(256)) * 4)
    names = ("a folder", "empty", "bytes", "missing/such")
    return {"None": None, "a number": 5, "no text": ""} | {n: folder / n for n in names}


@pytest.mark.parametrize("name", LOADERS)
def test_what_is_no_file_of_its_kind(name, tmp_path):
    for what, x in given(tmp_path).items():
        try: LOADERS[name](x)
        except ERRORS as e:
            said = str(e)
            last = traceback.extract_tb(e.__traceback__)[-1].filename
            assert "/bmlab/" in last or "/nowhere" in said, f"{what}: {type(e).__name__} of {last}: {said}"
            assert "[Errno" not in said, f"{what}: {said}"
            named = x.name in said if isinstance(x, Path) else re.match(r"\w+( or \w+)?(=| is |:)", said)
            assert named, f"{what}: {said}"
        else: assert isinstance(x, Path), f"{what} is taken"


# ---- what the docs say ---------------------------------------------------------------------------------------------
ERROR_OF = {
    load: FileError, load_cooked: "CookedError", load_weights: "Foreign", read_card: "ModelCardError",
    Delta.load: "DeltaFileError", DeltaBank.load: "BankError", Continual.load: "TasksError",
    DeltaCard.read: "DeltaCardError", PromptModel.load: "PromptFileError", read_words: "WordsError",
    TrainingPlan.load: "PlanError", InferencePlan.load: "PlanError", DataCard.load: "DataCardError",
    CharModel.load: "CharModelError", open_ds: "ShardError", open_mmididx: "ShardError", seal_shards: "finished",
    open_tensors: "TensorFileError", load_tensors: "TensorFileError", indexed: "TensorFileError",
    load_template: "ConfigError", load_verbalizer: "ConfigError", methods_of: "BMCookError",
    quantization_of: "BadQuantization",
}
WRITERS = (
    Delta.save, DeltaBank.save, Continual.save, DeltaCard.write, publish, Hub.write_index, Lora.save_gguf, save_cooked,
    export_gguf, quantize_folder, export_hf, save, bmblocks.save, convert_gguf, write_gguf, to_safetensors, to_original,
    write_card, Tree.to_html, PromptModel.save, TrainingPlan.save, InferencePlan.save, DataCard.save, CharModel.save,
    write_mmididx, seal_shards, replace_folder, replace_file, replace_text,
)


def said(f):
    "A function's parameters, with their comments, and its docstring"
    source = inspect.getsource(f)
    return source[:source.index(f.__doc__.splitlines()[0]) + len(f.__doc__)]


def test_the_docs_of_each_loader_name_the_class_of_its_errors():
    for f, error in ERROR_OF.items(): assert getattr(error, "__name__", error) in said(f), f.__qualname__


def test_the_docs_of_each_writer_say_that_it_writes_all_or_nothing():
    for f in WRITERS: assert "whole" in said(f), f.__qualname__


def test_so_do_those_of_a_run_s_files():
    steps = pytest.importorskip("bmlab.data.steps")
    assert "RunFileError" in said(steps.load_json) and "whole" in said(steps.save_json)


def test_a_list_has_one_shape():
    "list[(str, int)] is list[str, int] to Python: without a word, only the first would be asked for"
    for shape in (list[(str, int)], {"labels?": (None, list[str, int])}):
        with pytest.raises(TypeError, match=r"list\[str, int\] is no shape.*list\[int \| str\]"):
            check_shape({"labels": ["a"]} if isinstance(shape, dict) else ["a"], shape)
    assert check_shape(["a", 1], list[str | int]) == ["a", 1]

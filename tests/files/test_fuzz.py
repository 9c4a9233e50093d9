"""Promise: a file that bmlab loads is loaded, or refused by its format's one class of error with the file's name; it
never runs code, hangs, takes memory out of proportion, or leaves a model half-changed."""
import atexit
import copy
import functools
import json
import math
import os
import pickle
import random
import resource
import shutil
import signal
import struct
import tempfile
import zipfile
from pathlib import Path

import pytest
import torch

from bmlab.files import FileError, damage

ZIP = Path(__file__).resolve().parents[1] / "fixtures/saved_before_chapters.zip"
SLOW, SECONDS = 10_000, 60                       # tries of a format, and for one of them
HUGE = (2**31, 2**32 - 1, 2**62, 2**63, 2**64 - 1, 10**30, -1, -2**63)
NAMES = ("../x", "/etc/passwd", "a\0b", "C:\\x", "\ud800", "", ".", "__class__", "forward", "os.system", "(a+)+$")
NAMES += ("x" * 5000,)
VALUES = (None, True, False, 0, 1, -1, 0.5, 1e308, "", [], {}, [[]], [None], {"a": {}}, *HUGE, *NAMES)


# ---- mutators ------------------------------------------------------------------------------------------------------

def flipped(rng, raw):
    "One to eight bits, cuts, spliced or repeated stretches, and numbers of eight bytes"
    raw = bytearray(raw)
    for _ in range(rng.choice((1, 1, 2, 8))):
        if not raw: break
        at, kind = rng.randrange(len(raw)), rng.randrange(6)
        if rng.random() < .5: at = rng.randrange(min(len(raw), 512))              # headers stand at the beginning
        if kind < 2: raw[at] ^= 1 << rng.randrange(8)
        elif kind == 2: del raw[at:]
        elif kind == 3: raw[at:at] = raw[(b := rng.randrange(len(raw))):b + rng.randrange(1, 64)]
        elif kind == 4: raw[at:at + 8] = struct.pack("<Q", rng.choice(HUGE) % 2**64)
        else: raw[at:at + rng.randrange(1, 16)] = bytes(rng.choice((0, 255, 34, 92)) for _ in range(rng.randrange(4)))
    return bytes(raw)


def places(tree):
    "[(container, key)] of everything in it"
    out, todo = [], [tree]
    for x in todo:
        for k in x if isinstance(x, dict) else range(len(x)):
            out.append((x, k))
            if isinstance(x[k], (dict, list)): todo.append(x[k])
    return out


def changed(rng, raw):
    "A value of JSON exchanged for one of another type, a huge one, a name that leads out; keys taken away or twice"
    if rng.random() < .15: return flipped(rng, raw)
    tree = json.loads(raw)
    for _ in range(rng.choice((1, 1, 2))):
        spots = places(tree)
        if not spots: break
        x, k = rng.choice(spots)
        kind = rng.randrange(8)
        if kind == 0: del x[k]
        elif kind == 1 and isinstance(x, dict): x[rng.choice(NAMES)] = x.pop(k)
        elif kind == 2: x[k] = [x[k]] if rng.random() < .5 else {"a": x[k]}
        elif kind == 3: x[k] = copy.deepcopy(rng.choice(spots)[0])
        else: x[k] = copy.deepcopy(rng.choice(VALUES))
    text = json.dumps(tree)
    if (kind := rng.randrange(40)) == 0: text = text.replace("{", '{"a": ' + "[" * 3000, 1)
    if kind == 1: text = text.replace("{", '{"a": 1, "a": 2, ', 1)
    if kind == 2: text = text.replace(":", ": NaN, \"x\":", 1)
    if kind == 3: text = text.replace("1", "9" * 5000, 1)
    return text.encode()


def tensors_changed(rng, raw):
    "A header of safetensors that says something else, or other bytes"
    if rng.random() < .4: return flipped(rng, raw)
    n = int.from_bytes(raw[:8], "little")
    head = changed(rng, raw[8:8 + n])
    return (len(head) if rng.random() < .9 else rng.choice(HUGE) % 2**64).to_bytes(8, "little") + head + raw[8 + n:]


def mutated(rng, name, raw):
    if name.endswith(".json"):
        try: return changed(rng, raw)
        except ValueError: return flipped(rng, raw)
    return tensors_changed(rng, raw) if name.endswith(".safetensors") else flipped(rng, raw)


# ---- what is loaded ------------------------------------------------------------------------------------------------

@functools.cache
def saved():
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    with zipfile.ZipFile(ZIP) as z: z.extractall(folder)
    return Path(folder)


@functools.cache
def backbone(kind="hf"):
    from bmlab.all import load
    return load(saved() / kind, device="cpu")


def look(model):
    "What a load may not change"
    names = [(n, id(m), len(m._forward_hooks), len(m._forward_pre_hooks)) for n, m in model.named_modules()]
    weights = [(n, id(p), p._version, p.requires_grad) for n, p in model.named_parameters()]
    return names, weights


def onto(load):
    "A loader onto the model, which is as before after an error and once its deltas are gone"
    def run(folder):
        from bmlab.all import deltas
        model, tok = backbone()
        before = look(model)
        try: load(folder, model, tok)
        finally:
            for name in list(deltas(model)): deltas(model).forget(name)
        assert look(model)[1] == before[1]
    return run


def refused_whole(load, kind="hf"):
    "A loader onto a saved model, which is as before after an error"
    def run(folder):
        from bmlab.all import deltas
        model, tok = backbone(kind)
        before = look(model)
        try: load(folder, model, tok)
        except Exception:
            assert not list(deltas(model)) and look(model) == before, "a failed load left something behind"
            raise
        for name in list(deltas(model)): deltas(model).forget(name)
    return run


def gguf(folder):
    from bmlab.formats import GGUF, gguf_config, gguf_tokenizer, gguf_weights
    g = GGUF(folder / "a.gguf")
    for k in g.keys: g.get(k)
    config, tok, weights = gguf_config(g), gguf_tokenizer(g), gguf_weights(g)
    return config, tok, weights


def make_gguf(folder):
    text = lambda s: struct.pack("<Q", len(s.encode())) + s.encode()
    u32, f32 = (lambda x: (4, struct.pack("<I", x))), (lambda x: (6, struct.pack("<f", x)))
    texts = lambda *xs: (9, struct.pack("<IQ", 8, len(xs)) + b"".join(map(text, xs)))
    pairs = {"general.architecture": (8, text("llama")), "llama.block_count": u32(1), "llama.embedding_length": u32(8)}
    pairs |= {"llama.attention.head_count": u32(2), "llama.feed_forward_length": u32(16)}
    pairs |= {"llama.context_length": u32(32)}
    pairs |= {"llama.attention.layer_norm_rms_epsilon": f32(1e-5), "tokenizer.ggml.model": (8, text("gpt2"))}
    pairs |= {"tokenizer.ggml.tokens": texts("a", "b", "ab", "<e>"), "tokenizer.ggml.merges": texts("a b")}
    pairs |= {"tokenizer.ggml.token_type": (9, struct.pack("<IQ4i", 5, 4, 1, 1, 1, 3))}
    pairs |= {"tokenizer.ggml.eos_token_id": u32(3), "general.alignment": u32(32)}
    shapes = {"token_embd": (4, 8), "output_norm": (8,), "blk.0.attn_norm": (8,), "blk.0.ffn_norm": (8,)}
    shapes |= {f"blk.0.attn_{n}": (8, 8) for n in ("q", "k", "v", "output")}
    shapes |= {"blk.0.ffn_gate": (16, 8), "blk.0.ffn_up": (16, 8), "blk.0.ffn_down": (8, 16)}
    infos, blob = b"", b""
    for name, shape in shapes.items():
        dims = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        infos += text(f"{name}.weight") + dims + struct.pack("<IQ", 0, len(blob))
        blob += bytes(4 * math.prod(shape))
    head = struct.pack("<4sIQQ", b"GGUF", 3, len(shapes), len(pairs))
    head += b"".join(text(k) + struct.pack("<I", t) + v for k, (t, v) in pairs.items()) + infos
    (folder / "a.gguf").write_bytes(head + bytes(-len(head) % 32) + blob)


def used(load):
    "A loader of a model whose packed weights are then all decoded: no code of a file leads out of its tables"
    def run(folder):
        model = load(folder)
        for m in model.modules():
            if hasattr(m, "_bmlab_packed"): m.dequantize()
    return run


def packed_gguf(folder):
    from bmlab.all import load
    return load(folder / "a.gguf", device="cpu")[0]


def make_packed_gguf(kind, **options):
    "A file whose matrices, table and experts lie in blocks of one kind"
    def make(folder):
        import transformers as tf
        from bmlab.all import export_gguf
        torch.manual_seed(0)
        cls = tf.MixtralForCausalLM if "num_local_experts" in options else tf.LlamaForCausalLM
        sizes = dict(hidden_size=256, intermediate_size=256, num_hidden_layers=1, num_attention_heads=4, vocab_size=16,
                     num_key_value_heads=1, max_position_embeddings=32)
        export_gguf(cls(cls.config_class(**sizes | options)), folder / "a.gguf", type=kind)
    return make


def quantized(folder):
    from bmlab.all import load
    try: return load(folder, device="cpu", packed=True)[0]
    except ValueError as e:
        if "packed=True, but" not in str(e): raise
        return torch.nn.Identity()                                        # it says nothing of quantization any more


def make_quantized(case):
    "A folder that the format's owner made"
    def make(folder):
        with zipfile.ZipFile(ZIP.with_name("quantized_folders.zip")) as z:
            for n in z.namelist():
                if n.startswith(f"{case}/") and not n.endswith("/"): (folder / Path(n).name).write_bytes(z.read(n))
    return make


def make_sparse(folder):
    from packed_models import packed_model
    from bmlab.all import export_hf
    export_hf(packed_model("2:4"), folder, format="compressed-tensors")


def tensors(folder):
    from bmlab.formats.safetensors import TensorFiles, load_tensors
    files = TensorFiles(folder)
    for k in files.where: files.shape(k)
    load_tensors(folder / "model.safetensors")


def make_tensors(folder):
    from safetensors.torch import save_file
    save_file({"a": torch.ones(2, 3), "b": torch.ones(4, dtype=torch.float16)}, folder / "model.safetensors")
    index = {"metadata": {}, "weight_map": {"a": "model.safetensors", "b": "model.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def words(folder):
    from bmlab.prompt.verbalize import read_words
    for name in ("a.json", "b.txt", "c.jsonl"): read_words(folder / name)


def make_words(folder):
    (folder / "a.json").write_text(json.dumps([{"good": ["fine", "great"], "bad": ["poor"]}, {"good": "fine"}]))
    (folder / "b.txt").write_text("fine, great\npoor\n\ngood\nbad\n")
    (folder / "c.jsonl").write_text('{"good": ["fine"]}\n{"bad": ["poor"]}\n')


def experiment(folder):
    from bmlab.prompt.experiment import Words
    Words(folder / "a.yaml").take("plm.model_name")


def make_experiment(folder):
    (folder / "a.yaml").write_text("plm:\n  model_name: gpt2\ntrain: {num_epochs: 3, batch: [1, 2]}\ntext: 'x'\n")


def bmcook(folder):
    from bmlab.cook.bmcook import _read
    _read(folder / "a.json")


def make_bmcook(folder):
    said = {"distillation": {"ce_scale": 1, "mse_hidn_module": ["[post]a:[pre]a"]}, "quantization": {"is_quant": True}}
    said |= {"pruning": {"is_pruning": True, "pruned_module": ["ffn"], "mask_method": "m4n2_1d"}}
    (folder / "a.json").write_text(json.dumps(said))


def manifest(folder):
    for full in (False, True): assert damage(folder, full) is None or isinstance(damage(folder, full), str)


def make_manifest(folder):
    from bmlab.files import _write_manifest
    make_tensors(folder)
    _write_manifest(folder)


def sources(folder):
    from bmlab.data.sources import Source, read_source
    files = {"jsonl": "a.jsonl.gz", "csv": "b.csv", "parquet": "c.parquet", "text": "d.txt", "warc": "e.warc.gz"}
    for kind, name in (files | {"html": "f.html"}).items():
        skip = Source(name="s", kind=kind, path=folder / name, limit=1 << 16, on_error="skip", per="line")
        for _ in read_source(skip): pass                                    # (goes on whatever the file holds)
        list(read_source(Source(name="s", kind=kind, path=folder / name, limit=1 << 16, per="line")))


def make_sources(folder):
    import gzip
    import pandas as pd
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(b'{"text": "One.", "n": 1}\n{"text": "Two.", "n": 2}\n'))
    (folder / "b.csv").write_text('text,n\n"One, and",1\nTwo,2\n')
    pd.DataFrame({"text": ["One.", "Two.", None], "n": [1, 2, 3]}).to_parquet(folder / "c.parquet")
    (folder / "d.txt").write_text("One.\nTwo.\n")
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nTransfer-Encoding: chunked\r\n\r\n"
    body = head + b"8\r\n<p>One.\n\r\n0\r\n\r\n"
    about = "WARC/1.0\r\nWARC-Type: response\r\nWARC-Target-URI: http://a/\r\nWARC-Record-ID: <urn:1>\r\n"
    record = about.encode() + f"Content-Length: {len(body)}\r\n\r\n".encode() + body + b"\r\n\r\n"
    (folder / "e.warc.gz").write_bytes(gzip.compress(record) * 2)
    (folder / "f.html").write_text("<p>One.")


def shards(folder):
    from bmlab.data.shards import Shards
    found = Shards(folder / "shards", verify=True)
    for i in range(len(found)): found[i]


def mmididx(folder):
    from bmlab.data.layouts import open_mmididx
    found = open_mmididx(next((folder).glob("*.idx")).with_suffix(""))
    found.verify()
    for i in range(len(found)): found[i]


def blocks(folder):
    from bmlab.data.layouts import read_blocks
    for _ in read_blocks(folder, block_size=256): pass


def make_blocks(folder):
    rows = [pickle.dumps([1, 2, 3], 4), pickle.dumps({"a": [1.5, "x"]}, 4), json.dumps({"a": 1}).encode()]
    block = b"".join(b"\x1f" + struct.pack("<I", len(r)) + r for r in rows)
    (folder / "data").write_bytes(block.ljust(256, b"\0"))
    said = {"file_name": "data", "block_begin": 0, "block_end": 1, "nbytes": 256, "nlines": 3, "mask": False}
    (folder / "meta.bin").write_text(json.dumps(said | {"block_size": 256}) + "\n")


def recipe(folder):
    from bmlab.data.corpus import Cleaned
    Cleaned(folder).progress


def plans(folder):
    from bmlab.all import InferencePlan, TrainingPlan
    repr(TrainingPlan.load(folder / "training.json"))
    repr(InferencePlan.load(folder / "inference.json"))


def make_plans(folder):
    for kind in ("training", "inference"):
        files = (saved() / f"plan_{kind}").glob("*.json")
        shutil.copy(next(p for p in files if p.name != "expected.json"), folder / f"{kind}.json")


def checkpoint(folder):
    from bmlab.train.checkpoint import load_weights
    model = torch.nn.Linear(1, 1, device="meta")
    load_weights(model, folder, strict=False)


def vocabularies(folder):
    from bmlab.models.cpm2 import Cpm1Tokenizer, Cpm2Tokenizer
    from bmlab.models.cpmbee import CpmBeeTokenizer
    for cut in (CpmBeeTokenizer(folder / "bee.txt"), Cpm2Tokenizer(folder / "cpm2.txt", cut="none")): cut("some words")
    if (folder / "cpm1.model").exists(): Cpm1Tokenizer(folder / "cpm1.model", cut="none")("some words")


def make_vocabularies(folder):
    from bmlab.models.cpmbee import BEE_SPECIALS
    words = ["some", "words", " ", "s", "o", "m", "e"]
    (folder / "bee.txt").write_text("\n".join([*BEE_SPECIALS, *words]), encoding="utf-8")
    (folder / "cpm2.txt").write_text("\n".join(["<unk>", "<s>", "<eod>", "<pad>", "<s_0>", *words]), encoding="utf-8")


def counts(folder):
    from bmlab.data.rules import CharModel
    CharModel.load(folder / "model.npz").perplexity(["some words"])


def make_counts(folder):
    from bmlab.data.rules import CharModel
    CharModel.fit(["some words and other words"] * 3, order=3).save(folder / "model.npz")


def thesaurus(folder):
    from bmlab.prompt.wordnet import WordNet, word_list
    word_list(folder / "words.txt")
    net = WordNet(folder)
    for word in ("dog", "run", "big", "fast"): net.related(word)


def make_thesaurus(folder):
    (folder / "words.txt").write_text("big: large, huge\n", encoding="utf-8")
    licence = "  1 a licence\n"
    for word, pos, name in (("dog", "n", "noun"), ("run", "v", "verb"), ("big", "a", "adj"), ("fast", "r", "adv")):
        line = f"{len(licence):08} 00 {pos} 01 {word} 0 000 | a meaning\n"
        (folder / f"data.{name}").write_text(licence + line)
        (folder / f"index.{name}").write_text(licence + f"{word} {pos} 1 0 1 0 {len(licence):08}\n")


def opendelta(folder, model, tok):
    from bmlab.all import Delta
    Delta.load(folder, model)


def make_opendelta(folder):
    model, _ = backbone()
    name = next(n for n, m in model.named_modules() if n.endswith("q_proj"))
    w = model.get_submodule(name).weight
    torch.save({f"{name}.lora.lora_A": torch.ones(2, w.shape[1]), f"{name}.lora.lora_B": torch.ones(w.shape[0], 2)},
               folder / "pytorch_model.bin")
    said = {"delta_type": "lora", "lora_r": 2, "lora_alpha": 4, "lora_dropout": 0.0, "modified_modules": [name]}
    (folder / "config.json").write_text(json.dumps(said))


def kept(kind):
    def make(folder): shutil.copytree(saved() / kind, folder, dirs_exist_ok=True)
    return make


def attach(folder, model, tok):
    from bmlab.all import Delta
    Delta.load(folder, model)


def bank(folder, model, tok):
    from bmlab.all import DeltaBank
    DeltaBank.load(folder, model).detach()


def tasks(folder, model, tok):
    from bmlab.all import Continual
    Continual.load(folder, model)


def prompt(folder, model, tok):
    from bmlab.all import PromptModel
    PromptModel.load(folder, model, tok)


def cooked(folder):
    from bmlab.all import load_cooked
    load_cooked(folder)


def cards(folder):
    from bmlab.all import read_card
    read_card(folder)


def data_card(folder):
    from bmlab.all import DataCard
    card = DataCard.load(folder)
    card.sources, card.waterfall, card.reasons


def hub(folder):
    from bmlab.delta.hub import DeltaCard
    DeltaCard.read(folder)


def make_hub(folder): shutil.copy(next((saved() / "hub").rglob("card.json")), folder)


def make_card(folder):
    from bmlab.models.card import ModelCard, write_card
    write_card(ModelCard(name="a", license="mit", source="random", sha256={"a.bin": "0" * 64}), folder)
    (folder / "config.json").write_text(json.dumps({"bmlab_card": {"name": "a", "license": "mit", "source": "x"}}))


def make_recipe(folder): shutil.copy(next((saved() / "corpus").rglob("recipe.json")), folder)


def make_shards(folder):
    shutil.copytree(next((saved() / "shards").rglob("manifest.json")).parent, folder / "shards")


def make_mmididx(folder):
    for p in (saved() / "mmididx").iterdir(): shutil.copy(p, folder)


def error(name):
    "A class by the name of its room and itself"
    import importlib
    room, _, cls = name.rpartition(".")
    return getattr(importlib.import_module(f"bmlab.{room}"), cls)


GGUF_ERROR = "formats.gguf.GGUFError"
DELTA, COOKED, SHARD = "delta.store.DeltaFileError", "cook.report.CookedError", "data.shards.ShardError"
FORMATS = {  # what makes a folder, what loads it, the class of its errors
    "gguf": (make_gguf, gguf, GGUF_ERROR),
    "gguf Q4_0": (make_packed_gguf("Q4_0"), used(packed_gguf), GGUF_ERROR),
    "gguf Q4_K": (make_packed_gguf("Q4_K"), used(packed_gguf), GGUF_ERROR),
    "gguf table": (make_packed_gguf("Q6_K", tie_word_embeddings=True), used(packed_gguf), GGUF_ERROR),
    "gguf experts": (make_packed_gguf("Q4_K", num_local_experts=2), used(packed_gguf), GGUF_ERROR),
    "gguf MXFP4": (make_packed_gguf("MXFP4", num_local_experts=2), used(packed_gguf), GGUF_ERROR),
    "GPTQ": (make_quantized("gptq-4-act-order"), used(quantized), "files.FileError"),
    "GPTQ of 3 bits": (make_quantized("gptq-3"), used(quantized), "files.FileError"),
    "AWQ": (make_quantized("awq"), used(quantized), "files.FileError"),
    "compressed W4A16": (make_quantized("W4A16-asym"), used(quantized), "files.FileError"),
    "compressed FP8": (make_quantized("FP8"), used(quantized), "files.FileError"),
    "compressed 2:4": (make_sparse, used(quantized), "files.FileError"),
    "FP8 in blocks": (make_quantized("fp8-blocks"), used(quantized), "files.FileError"),
    "MXFP4": (make_quantized("mxfp4"), used(quantized), "files.FileError"),
    "safetensors": (make_tensors, tensors, "formats.safetensors.TensorFileError"),
    "manifest": (make_manifest, manifest, "files.FileError"),
    "cooked int4": (kept("cooked_int4"), cooked, COOKED),
    "cooked moefy": (kept("cooked_moefy"), cooked, COOKED),
    "cooked pruned": (kept("cooked_pruned"), cooked, COOKED),
    "lora": (kept("delta_lora"), refused_whole(attach), DELTA),
    "shared lora": (kept("delta_lora_shared/delta"), refused_whole(attach, "delta_lora_shared/backbone"), DELTA),
    "slices": (kept("delta_lora_slices/delta"), refused_whole(attach, "delta_lora_slices/backbone"), DELTA),
    "adapter": (kept("delta_adapter"), refused_whole(attach), DELTA),
    "ia3": (kept("delta_ia3"), refused_whole(attach), DELTA),
    "prefix": (kept("delta_prefix"), refused_whole(attach), DELTA),
    "prompt tuning": (kept("delta_prompt_tuning"), refused_whole(attach), DELTA),
    "opendelta": (make_opendelta, refused_whole(opendelta), DELTA),
    "bank": (kept("delta_bank"), onto(bank), "delta.bank.BankError"),
    "tasks": (kept("continual"), refused_whole(tasks), "files.FileError"),
    "hub": (make_hub, hub, "delta.hub.DeltaCardError"),
    "model card": (make_card, cards, "models.card.ModelCardError"),
    "data card": (kept("data_card"), data_card, "data.card.DataCardError"),
    "recipe": (make_recipe, recipe, "data.steps.RunFileError"),
    "plans": (make_plans, plans, "plan.training.PlanError"),
    "classifier": (kept("prompt_words"), refused_whole(prompt), "prompt.classify.PromptFileError"),
    "words": (make_words, words, "prompt.verbalize.WordsError"),
    "thesaurus": (make_thesaurus, thesaurus, "prompt.verbalize.WordsError"),
    "vocabularies": (make_vocabularies, vocabularies, "models.cpmbee.VocabularyError"),
    "counts": (make_counts, counts, "data.rules.CharModelError"),
    "experiment": (make_experiment, experiment, "prompt.experiment.ConfigError"),
    "bmcook": (make_bmcook, bmcook, "cook.bmcook.BMCookError"),
    "shards": (make_shards, shards, SHARD),
    "mmididx": (make_mmididx, mmididx, SHARD),
    "blocks": (make_blocks, blocks, SHARD),
    "checkpoint": (kept("checkpoint_hf"), checkpoint, "train.checkpoint.Foreign"),
    "sources": (make_sources, sources, "files.FileError"),
}


# ---- the property --------------------------------------------------------------------------------------------------

class Hang(BaseException):
    "A try that does not end"


def too_long(*_): raise Hang


def memory_short(e):
    "Was memory asked for that is out of proportion?"
    while e is not None:
        if isinstance(e, MemoryError) or "allocate memory" in str(e) or "Unable to allocate" in str(e): return True
        e = e.__cause__ or e.__context__
    return False


def survive(kind, tries, seed, folder):
    "Mutate one file of a folder, load the folder, again and again → (loaded, refused)"
    make, load, wanted = FORMATS[kind]
    clean, work = folder / "clean", folder / "work"
    clean.mkdir()
    make(clean)
    (clean / "expected.json").unlink(missing_ok=True)
    load(shutil.copytree(clean, work))                                # whole, it is loaded
    files = (p for p in clean.rglob("*") if p.is_file() and p.name != "tokenizer.json")
    names = sorted(p.relative_to(clean).as_posix() for p in files)
    rng, wanted, count = random.Random(f"{kind} {seed}"), error(wanted), [0, 0]
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limits, old = resource.getrlimit(resource.RLIMIT_AS), signal.signal(signal.SIGALRM, too_long)
    resource.setrlimit(resource.RLIMIT_AS, (used + (4 << 30), limits[1]))
    try:
        for n in range(tries):
            name = rng.choice(names)
            raw = mutated(rng, name, (clean / name).read_bytes())
            (work / name).write_bytes(raw)
            shown = f"{kind}, try {n} of seed {seed}, {name}: {raw[:2000]!r}"
            signal.setitimer(signal.ITIMER_REAL, SECONDS)
            try:
                load(work)
                count[0] += 1
            except Hang: raise AssertionError(f"no end after {SECONDS} s: {shown}") from None
            except Exception as e:
                if memory_short(e): raise AssertionError(f"memory: {shown}") from e
                # (a file that another one names may be missing: that is said as ever)
                fits = isinstance(e, (wanted, FileNotFoundError)) or kind == "sources" and type(e) is ValueError
                named = Path(name).name in str(e) or folder.name in str(e) or Path(name).parent.name in str(e)
                if not (fits and named): raise AssertionError(f"{type(e).__name__}: {e}: {shown}") from e
                count[1] += 1
            finally: signal.setitimer(signal.ITIMER_REAL, 0)
            (work / name).write_bytes((clean / name).read_bytes())
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
        signal.signal(signal.SIGALRM, old)
    return count


QUICK = {"cooked int4": 8, "cooked moefy": 8, "cooked pruned": 8, "bank": 25, "tasks": 25, "classifier": 25}
PACKED = [k for k in FORMATS if k.startswith(("gguf ", "GPTQ", "AWQ", "compressed", "FP8", "MXFP4"))]
QUICK |= dict.fromkeys(PACKED, 30) | {"checkpoint": 25, "sources": 25, "recipe": 30, "data card": 20}


@pytest.mark.parametrize("kind", FORMATS)
def test_it_is_loaded_or_refused(kind, tmp_path): survive(kind, QUICK.get(kind, 60), 0, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("kind", FORMATS)
def test_ten_thousand_are_loaded_or_refused(kind, tmp_path):
    print(kind, survive(kind, int(os.environ.get("FUZZ", SLOW)), 1, tmp_path))


# ---- no file runs code ---------------------------------------------------------------------------------------------

class Evil:
    def __init__(self, mark): self.mark = mark
    def __reduce__(self): return os.mkdir, (str(self.mark),)


@pytest.mark.parametrize("kind", FORMATS)
def test_a_pickle_in_place_of_any_file_is_not_run(kind, tmp_path):
    make, load, _ = FORMATS[kind]
    clean, mark = tmp_path / "clean", tmp_path / "ran"
    clean.mkdir()
    make(clean)
    files = [p for p in clean.rglob("*") if p.is_file()]
    stranger = {n: clean / n for n in ("pytorch_model.bin", "training_args.bin", "modeling_evil.py", "optimizer.pt")}
    torch.save(Evil(mark), tmp_path / "evil.pt")
    for evil in (pickle.dumps(Evil(mark)), pickle.dumps(Evil(mark), 0), (tmp_path / "evil.pt").read_bytes(),
                 f"!!python/object/apply:os.mkdir ['{mark}']".encode()):
        for p in (*files, *(p for p in stranger.values() if p not in files)):
            before = p.read_bytes() if p.exists() else None
            p.write_bytes(evil)
            try: load(clean)
            except Exception: pass
            assert not mark.exists(), f"{p.name} was run"
            p.write_bytes(before) if before is not None else p.unlink()


def test_a_configuration_that_names_code_does_not_run_it(tmp_path):
    from bmlab.all import load
    folder, mark = shutil.copytree(saved() / "hf", tmp_path / "hf"), tmp_path / "ran"
    (folder / "evil.py").write_text(f"import os\nos.mkdir({str(mark)!r})\nclass Evil: pass\n")
    for name, entries in (("config.json", ("AutoConfig", "AutoModel", "AutoModelForCausalLM", "AutoTokenizer")),
                          ("tokenizer_config.json", ("AutoTokenizer",))):
        said = json.loads((folder / name).read_text())
        said["auto_map"] = {k: ["evil.Evil", "evil.Evil"] if k == "AutoTokenizer" else "evil.Evil" for k in entries}
        for change in ({}, {"tokenizer_class": "Evil", "model_type": "evil", "architectures": ["Evil"]}):
            (folder / name).write_text(json.dumps(said | change))
            try: load(folder, device="cpu")
            except Exception: pass
            assert not mark.exists()
        shutil.copy(saved() / "hf" / name, folder / name)


def test_a_file_that_says_two_billion_layers_is_refused_at_once(tmp_path):
    from bmlab.formats.gguf import GGUFError
    make_gguf(tmp_path)
    raw = bytearray((tmp_path / "a.gguf").read_bytes())
    at = raw.index(b"llama.block_count") + len(b"llama.block_count") + 4
    for n in (2**31, 2**32 - 1, 10**6):
        raw[at:at + 4] = struct.pack("<I", n)
        (tmp_path / "a.gguf").write_bytes(raw)
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        limits = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 28), limits[1]))
        try:
            with pytest.raises(GGUFError, match="a.gguf"): gguf(tmp_path)
        finally: resource.setrlimit(resource.RLIMIT_AS, limits)


def test_links_and_names_that_lead_out_are_refused(tmp_path):
    from bmlab.all import DeltaBank
    from bmlab.formats.safetensors import indexed
    model, _ = backbone()
    shutil.copytree(saved() / "delta_bank", tmp_path / "in" / "bank")
    said = json.loads((tmp_path / "in/bank/bank.json").read_text())
    user = next(iter(said["users"]))
    outside = shutil.move(tmp_path / "in/bank" / said["users"][user], tmp_path / "outside")
    (tmp_path / "in/bank/link").symlink_to(outside)
    for name in ("../../outside", str(outside), "link", "..\\..\\outside", "a\0b"):
        said["users"][user] = name
        (tmp_path / "in/bank/bank.json").write_text(json.dumps(said))
        with pytest.raises(FileError, match="bank.json"): DeltaBank.load(tmp_path / "in/bank", model)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "../x.safetensors"}}))
    with pytest.raises(FileError, match="index.json: weight_map"): indexed(index)

"Loading straight into place: with a streamer, from GGUF, from a hub that is not there; no trace after errors"
import contextlib
import gc
import importlib
import json
import os
import shutil
import weakref
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import transformers as tf
from safetensors import safe_open
from safetensors.torch import save_file

from bmlab.core import count
from bmlab.kernels.layers import pack_linears
from bmlab.infer.engine import wrap
from bmlab.infer.loading import load_placed
from bmlab.models.weights import model_folder, model_on_meta
from bmlab.formats.safetensors import TensorFiles
from bmlab.models.load import load
from bmlab.files import cache_dir
from bmlab.infer.placement import InferencePlan, plan_inference
from bmlab.core import find_blocks

TINY = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=6, num_attention_heads=4, vocab_size=160)
IDS = torch.arange(12)[None]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(0)
    d = tmp_path_factory.mktemp("llama")
    tf.LlamaForCausalLM(tf.LlamaConfig(**TINY, num_key_value_heads=2)).save_pretrained(d, max_shard_size="60KB")
    return d


def logits(model):
    with torch.no_grad(): return model(input_ids=IDS).logits


def test_long_loading_shows_how_far_it_is(folder, monkeypatch):
    "A bar with a step for each block and one for the rest, which short loading leaves out"
    told = []
    def bar(rows, **how): return told.append(how | {"rows": [*dict(rows)]}) or rows
    monkeypatch.setattr(importlib.import_module("bmlab.infer.loading"), "tqdm", bar)
    load_placed(folder, bits=8, device="cpu")
    rows = [*(f"model.layers.{i}" for i in range(TINY["num_hidden_layers"])), ""]
    assert told == [{"desc": "loading blocks", "delay": 2.0, "leave": False, "rows": rows}]


@pytest.mark.parametrize("bits", [None, 8, 4])
def test_planned_loaded_streamed(folder, bits):
    "Plan by the files' shapes, load and stream by the plan: the resident model's logits, bit for bit, and its weights"
    from bmlab.infer import streaming
    plan = plan_inference(model_on_meta(folder), bits=bits, max_ctx=64)
    plan = plan.at((plan.min_bytes + plan.peak_bytes) // 2)
    assert plan.streamed and plan.resident
    model, tok = load_placed(folder, plan, device="cpu")
    whole = load(folder, device="cpu")[0]
    if bits: pack_linears(whole, bits)
    assert tok is None and count(model).bytes == plan.weights == count(whole).bytes
    want = logits(whole)
    streamer = streaming.Streamer(model, streamed=plan.streamed, slots=plan.slots, device="cpu")
    try: assert torch.equal(logits(model), want) and torch.equal(logits(model), want)
    finally: streamer.close()
    assert torch.equal(logits(model), want)


def test_a_plan_is_read_and_not_made_again(folder, tmp_path):
    "Loading packs what the plan names; a plan of before names nothing, and the same layers are packed"
    plan = plan_inference(model_on_meta(folder), bits=8, max_ctx=64, machine="h200")
    plan.save(tmp_path / "plan.json")
    stored = json.loads((tmp_path / "plan.json").read_text())
    old = {k: v for k, v in stored.items() if k not in ("packable", "fusable")}
    (tmp_path / "before.json").write_text(json.dumps(old))
    never = patch("bmlab.infer.loading.packable", side_effect=AssertionError("looked for again"))
    with never: want = logits(load_placed(folder, plan, device="cpu")[0])
    read, before = (InferencePlan.load(tmp_path / f"{n}.json") for n in ("plan", "before"))
    with never: got, _ = load_placed(folder, read, device="cpu", model=model_on_meta(folder))
    assert torch.equal(logits(got), want)
    assert torch.equal(logits(load_placed(folder, before, device="cpu")[0]), want)
    with pytest.raises(ValueError, match="give the dtype to model_on_meta"):
        load_placed(folder, plan, device="cpu", dtype="bfloat16", model=model_on_meta(folder))


@pytest.mark.parametrize("bits", [None, 8])
def test_wrap_finds_things_once(folder, bits):
    "From files, what a model is made of is found for the plan; loading, packing, fusing and streaming read it there"
    plan = plan_inference(model_on_meta(folder), bits=bits, max_ctx=64)
    placement = importlib.import_module("bmlab.infer.placement")
    finds = "find_blocks", "packable", "fusable"
    seen = {n: patch.object(placement, n, wraps=getattr(placement, n)) for n in finds}
    later = "loading.find_blocks", "loading.packable", "fused.fusable", "streaming.find_blocks"
    again = [patch(f"bmlab.infer.{n}", side_effect=AssertionError(f"{n} was called")) for n in later]
    bones = patch("bmlab.infer.engine.model_on_meta", wraps=model_on_meta)
    with contextlib.ExitStack() as stack:
        mocks = {n: stack.enter_context(p) for n, p in seen.items()}
        for p in again: stack.enter_context(p)
        made = stack.enter_context(bones)
        with wrap(folder, memory_limit=plan.min_bytes, bits=bits, max_ctx=64, device="cpu") as e:
            assert e.plan.streamed and e.decoder.mode == "static"
    assert [mocks[n].call_count for n in finds] == [1, int(bits is not None), 1] and made.call_count == 1


def test_order_of_placing(folder):
    "Blocks in order, then the rest, each once, each whole when it is handed over"
    seen = []
    def put(name, module):
        seen.append(name)
        assert not any(t.is_meta for t in (*module.parameters(), *module.buffers()))
        if name in blocks:
            assert {
                type(m).__name__ for m in module.modules() if "proj" in type(m).__name__ or "Linear" in type(m).__name__
            } == {"Int8Linear"}
    blocks = list(find_blocks(model_on_meta(folder)))
    load_placed(folder, bits=8, device="cpu", put=put)
    assert (
        seen[: len(blocks)] == blocks and len(seen) == len(set(seen))
        and set(seen[len(blocks) :]) == {"model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"}
    )


@pytest.mark.parametrize("bits", [None, 8])
def test_nothing_stays_mapped(folder, bits):
    "When the call returns the model owns its weights: the files can go"
    copy = Path(shutil.copytree(folder, folder.parent / f"copy{bits}"))
    model, _ = load_placed(copy, bits=bits, device="cpu")
    gc.collect()
    assert str(copy) not in Path("/proc/self/maps").read_text() if Path("/proc/self/maps").is_file() else True
    before = logits(model)
    for f in copy.glob("*.safetensors"): f.write_bytes(b"\0" * f.stat().st_size)
    assert torch.equal(logits(model), before)


def test_no_second_copy(folder):
    "When a block is handed over, the float weights of those before it are gone"
    floats = {}
    def watch(self, key, where, plain=TensorFiles.read):
        t = plain(self, key, where)
        if t.ndim == 2: floats[key] = weakref.ref(t.untyped_storage())
        return t
    alive = []
    with patch("bmlab.formats.safetensors.TensorFiles.read", watch):
        load_placed(
            folder, bits=8, device="cpu", put=lambda name,
            module: alive.append(sum(r() is not None for k, r in floats.items() if "proj" in k))
        )
    assert len(floats) == 6 * 7 + 2 and max(alive) == 0


def test_damaged_files(folder, tmp_path):
    "Each kind of damage is one error that names the file, and no tensor of the model outlives it"
    def broken(change):
        d = Path(shutil.copytree(folder, tmp_path / f"d{len(list(tmp_path.iterdir()))}"))
        change(sorted(d.glob("*.safetensors")), d)
        return d
    def cut(files, d): files[2].write_bytes(files[2].read_bytes()[:-100])
    def header(files, d): files[2].write_bytes(files[2].read_bytes()[:6])
    def gone(files, d): files[2].unlink()
    def other_shape(files, d):
        with safe_open(files[0], "pt") as f: tensors = {k: f.get_tensor(k) for k in f.keys()}
        save_file({k: t[:-1].contiguous() for k, t in tensors.items()}, files[0], {"format": "pt"})
    def no_weights(files, d):
        [f.unlink() for f in files]
        (d / "model.safetensors.index.json").unlink()
    damages = (
        (cut, OSError, "bytes of"), (header, OSError, "ends inside its header"), (gone, OSError, "is missing"),
        (other_shape, ValueError, "of another shape"), (no_weights, OSError, None)
    )
    for change, error, words in damages:
        d, made = broken(change), []
        with pytest.raises(error, match=words): load_placed(d, bits=8, device="cpu", put=lambda n, m: made.append(n))
        assert not made
    gc.collect()
    assert not [
        o for o in gc.get_objects()
        if type(o) in (
            torch.Tensor, torch.nn.Parameter
        ) and not o.is_meta and o.shape == (160, 64) and o.dtype == torch.float32
    ]


def test_a_lacking_weight(folder, tmp_path):
    "A weight that no file holds is not made up"
    d = Path(shutil.copytree(folder, tmp_path / "lacking"))
    index = json.loads((d / "model.safetensors.index.json").read_text())
    name = "model.layers.3.mlp.up_proj.weight"
    file = d / index["weight_map"].pop(name)
    with safe_open(file, "pt") as f: tensors = {k: f.get_tensor(k) for k in f.keys() if k != name}
    save_file(tensors, file, {"format": "pt"})
    (d / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="lacks 1 weights of LlamaForCausalLM, such as " + name):
        load_placed(d, bits=8, device="cpu")


def test_hub_names():
    "A name on the hub becomes a snapshot of the files that are needed; without the hub, the error of load"
    with patch("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9"):
        with pytest.raises((OSError, LookupError), match="neither a sample nor a folder"):
            load_placed("no-such/model", device="cpu")
    with (
        patch("bmlab.models.weights.find_on_hub", lambda name: (name, {"local_files_only": True})),
        patch("huggingface_hub.snapshot_download") as fetched
    ):
        fetched.return_value = "/nowhere"
        with pytest.raises(FileNotFoundError): model_folder("some/model")
    assert (
        fetched.call_args.args == ("some/model",) and "*.safetensors" in fetched.call_args.kwargs["allow_patterns"]
        and fetched.call_args.kwargs["local_files_only"]
    )


@pytest.mark.long
def test_gguf(tmp_path):
    "A GGUF file is packed as it is read, is what the sample is, and leaves nothing in the cache"
    found = sorted(cache_dir().rglob("SmolLM2*.gguf"))
    if not found: pytest.skip("the cache holds no GGUF file; load('smollm2-135m') fetches one")
    with patch.dict(os.environ, BMLAB_CACHE=str(tmp_path)):
        assert model_folder(found[0]) == found[0]
        model, tok = load_placed(found[0], bits=8, device="cpu")
        assert {f.name for f in tmp_path.iterdir()} <= {"machines", "kernels"}    # (what any model leaves there)
    want = pack_linears(load("smollm2-135m", device="cpu")[0])
    assert (
        all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), want.state_dict().values()))
        and tok is not None
    )


@pytest.mark.cuda
def test_onto_a_gpu(folder):
    "What stays is on the GPU, what streams on the host, with a CPU's codes; the peak is the plan's weights and a block"
    plan = plan_inference(model_on_meta(folder), bits=8, max_ctx=64, machine="h200")
    plan = plan.at((plan.min_bytes + plan.peak_bytes) // 2)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    model, _ = load_placed(folder, plan, device="cuda")
    peak = torch.cuda.max_memory_allocated() - before
    on_cpu, _ = load_placed(folder, bits=8, device="cpu")
    for name, block in find_blocks(model).items():
        assert {
            t.device.type for t in (*block.parameters(), *block.buffers())
        } == {"cpu" if name in plan.streamed else "cuda"}
        assert all(
            torch.equal(a.cpu(), b)
            for a, b in zip(block.state_dict().values(), on_cpu.get_submodule(name).state_dict().values())
        )
    assert (
        model.model.embed_tokens.weight.device.type == ("cpu" if plan.host else "cuda") and model.lm_head.codes.is_cuda
    )
    block = sum(4 * p.numel() for p in find_blocks(model_on_meta(folder))["model.layers.0"].parameters())
    assert peak <= plan.resident_bytes + plan.rest_bytes + 3 * block + (1 << 20)

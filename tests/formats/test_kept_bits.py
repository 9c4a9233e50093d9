"Bits of a file stay as they lie there, in linear layers, tables, heads and experts; all that takes a model takes these"
import zipfile
from pathlib import Path
from unittest.mock import patch

import gguf
import numpy as np
import pytest
import torch
from torch import nn

from bmlab.cook import load_cooked, save_cooked
from bmlab.core import count
from bmlab.delta import Lora
from bmlab.formats.gguf import GGUF
from bmlab.formats.gguf_models import gguf_model
from bmlab.infer import plan_inference, wrap
from bmlab.kernels import dequantize
from bmlab.kernels.ggml import BLOCKS, GGMLEmbedding, GGMLLinear, GGMLStack
from bmlab.models import load, tree

FILES = Path(__file__).parents[1] / "fixtures/gguf_models.zip"          # of tools/gguf_oracles.py
IDS = torch.arange(3, 15)[None]
D, F = 256, 512


def blocks(kind, rows, columns, rng):
    "Rows of any codes; scales (by their place in a block) that keep weights small, and about zero"
    b = BLOCKS[kind]
    raw = rng.integers(0, 256, (rows, columns // b.weights, b.bytes)).astype(np.uint8)
    if kind == "MXFP4": raw[..., 0] = 120 + raw[..., 0] % 4
    scales = {"Q4_0": {0: 5e-3}, "Q4_1": {0: 5e-3, 2: -0.0375}, "Q8_0": {0: 4e-4}, "Q4_K": {0: 2e-4, 2: 1.5e-3},
              "Q6_K": {208: 2e-5}}
    for at, x in scales.get(kind, {}).items(): raw[..., at:at + 2] = np.array([x], np.float16).view(np.uint8)
    return raw.reshape(rows, -1)


def llama(path, kind, tied=False, layers=1):
    "A LLaMA, its matrices of one kind"
    rng, writer = np.random.default_rng(0), gguf.GGUFWriter(path, "llama")
    numbers = dict(context_length=64, embedding_length=D, block_count=layers, feed_forward_length=F, head_count=4,
                   head_count_kv=2, layer_norm_rms_eps=1e-5, vocab_size=32)
    for key, value in numbers.items(): getattr(writer, f"add_{key}")(value)
    block = {"attn_q": (D, D), "attn_k": (D // 2, D), "attn_v": (D // 2, D), "attn_output": (D, D),
             "ffn_gate": (F, D), "ffn_up": (F, D), "ffn_down": (D, F)}
    sizes = {f"blk.{i}.{n}": size for i in range(layers) for n, size in block.items()}
    sizes |= {"token_embd": (32, D), **({} if tied else {"output": (32, D)})}
    for name, size in sizes.items():
        raw = blocks(kind, *size, rng)
        writer.add_tensor(f"{name}.weight", raw, raw_dtype=gguf.GGMLQuantizationType[kind])
    for name in ("output_norm", *(f"blk.{i}.{n}_norm" for i in range(layers) for n in ("attn", "ffn"))):
        writer.add_tensor(f"{name}.weight", np.ones(D, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def logits(model):
    with torch.no_grad(): return model(input_ids=IDS).logits


def apart(got, want): return ((got - want).norm() / want.norm()).item()


def kept(model): return {n: m for n, m in model.named_modules() if hasattr(m, "_bmlab_packed")}


@pytest.mark.parametrize("kind", list(BLOCKS))
def test_every_kind_holds_the_file_s_bits(kind, tmp_path):
    "Rows turned back; a table and a head apart; as compact as the file where the layer holds its blocks"
    file = llama(tmp_path / "x.gguf", kind)
    wide, packed = gguf_model(file, torch.float32), gguf_model(file, torch.float32, packed=True)
    layers = kept(packed)
    assert len(layers) == 9 and isinstance(layers["model.embed_tokens"], GGMLEmbedding)
    for n, m in layers.items(): assert torch.equal(m.dequantize(), wide.get_submodule(n).weight), n
    if kind in ("Q4_K", "Q6_K", "MXFP4"):
        assert all(isinstance(m, (GGMLLinear, GGMLEmbedding)) for m in layers.values())
        assert count(packed).bytes == sum(map(GGUF(file).stored_bytes, GGUF(file).tensors))
    assert apart(logits(packed), logits(wide)) < 1e-5 and count(packed).total == count(wide).total
    back = dequantize(packed)
    assert not kept(back) and torch.equal(logits(back), logits(wide))


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K", "Q8_0"])
def test_what_takes_a_model_takes_it_by_path(kind, tmp_path):
    "Counted, drawn and planned before a byte of weights is read; streamed within a limit; a head tied to its table"
    file = llama(tmp_path / "x.gguf", kind, tied=True, layers=4)
    with patch.object(GGUF, "stored", side_effect=AssertionError("weights were read")):
        sizes, drawn, plan = count(file), str(tree(file)), plan_inference(str(file), max_ctx=32)
    model, _ = load(file, device="cpu")
    assert sizes == count(model) and plan.weights == sizes.bytes and "GGMLEmbedding" in drawn
    assert model.lm_head.codes is model.model.embed_tokens.codes
    want = logits(model)
    with wrap(str(file), max_ctx=32, device="cpu", memory_limit=plan.min_bytes) as e:
        assert e.plan.streamed and apart(logits(e.model), want) < 1e-5
    with wrap(str(file), bits=8, max_ctx=32, device="cpu") as e:          # other bits are packed from the floats
        assert {type(m).__name__ for m in kept(e.model).values()} == {"Int8Linear", "Int8Embedding"}


@pytest.mark.parametrize("kind", ["Q4_1", "Q4_K", "MXFP4"])
def test_saved_moved_and_tuned(kind, tmp_path):
    "A cooked folder, opened by `load` and `wrap` too; bfloat16; a LoRA that learns on the codes"
    model, _ = load(llama(tmp_path / "x.gguf", kind, tied=True), device="cpu")
    want, folder = logits(model), save_cooked(model, tmp_path / "cooked")
    for again in (load_cooked(folder), load(folder, device="cpu")[0]):
        assert torch.equal(logits(again), want) and again.lm_head.codes is again.model.embed_tokens.codes
    assert count(folder) == count(model) and str(tree(folder)).count("meta")
    assert plan_inference(folder, max_ctx=32).weights == count(model).bytes
    with wrap(folder, max_ctx=32, device="cpu") as e: assert apart(logits(e.model), want) < 1e-5
    assert not kept(load(folder, device="cpu", packed=False)[0])
    state = {n: t.clone() for n, t in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    half = logits(load(folder, dtype="bfloat16", device="cpu")[0])
    assert half.dtype == torch.bfloat16 and apart(half.float(), want) < 0.05
    lora = Lora(model, r=2)
    lora.freeze()
    step = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.5)
    losses = []
    for _ in range(4):
        losses.append(model(input_ids=IDS, labels=IDS).loss)
        losses[-1].backward()
        step.step()
        step.zero_grad()
    assert losses[-1] < losses[0]
    lora.detach()
    for n, t in model.state_dict().items(): assert torch.equal(t, state[n]), n


def with_experts(name, folder, kind):
    "A file of the fixtures with other experts: 64 wide, so that blocks of 32 divide their rows, of one kind"
    with zipfile.ZipFile(FILES) as z: (folder / "x.gguf").write_bytes(z.read(f"{name}.gguf"))
    reader, to = gguf.GGUFReader(folder / "x.gguf"), gguf.GGMLQuantizationType[kind]
    writer = gguf.GGUFWriter(folder / f"{kind}.gguf", reader.get_field("general.architecture").contents())
    for f in reader.fields.values():
        value = 64 if f.name.endswith("feed_forward_length") else f.contents()
        if not f.name.startswith(("GGUF.", "general.arch")): writer.add_key_value(f.name, value, f.types[0])
    rng, old = np.random.default_rng(0), GGUF(folder / "x.gguf")
    for t in reader.tensors:
        shape = old.tensors[t.name][0]
        if "_exps." not in t.name: writer.add_tensor(t.name, t.data, raw_dtype=t.tensor_type)
        elif t.name.endswith("bias"):
            writer.add_tensor(t.name, rng.normal(size=(shape[0], 32 if "down" in t.name else 64)).astype(np.float32))
        else:
            N, K = (shape[1], 64) if "down" in t.name else (64, shape[2])
            rows = rng.normal(size=(shape[0], N, K)).astype(np.float32) / 8
            writer.add_tensor(t.name, gguf.quants.quantize(rows, to), raw_dtype=to)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return folder / f"{kind}.gguf"


@pytest.mark.parametrize("name, kind", [("qwen3moe", "Q8_0"), ("gpt-oss", "MXFP4"), ("gpt-oss", "Q4_0")])
def test_experts(name, kind, tmp_path):
    "Gate and up joined as bytes, side by side or row by row; the stacks of the widened model bit for bit; saved"
    file = with_experts(name, tmp_path, kind)
    wide, packed = gguf_model(file, torch.float32), gguf_model(file, torch.float32, packed=True)
    stacks = {n: m for n, m in packed.named_modules() if isinstance(m, GGMLStack)}
    assert stacks and count(packed).total == count(wide).total and count(packed).bytes < count(wide).bytes
    for n, m in stacks.items():
        w = wide.get_parameter(n)
        turned = packed.get_submodule(n.rpartition(".")[0]).is_transposed
        assert torch.equal(m.dequantize(), w.transpose(1, 2) if turned else w), n
    want = logits(packed)
    assert apart(want, logits(wide)) < 1e-5 and count(file) == count(load(file, device="cpu")[0])
    assert torch.equal(logits(load_cooked(save_cooked(packed, tmp_path / "cooked"))), want)
    assert type(dequantize(packed).model.layers[0].mlp.experts) is type(wide.model.layers[0].mlp.experts)


def test_without_a_compiler_the_same_bits(tmp_path):
    file = llama(tmp_path / "x.gguf", "Q4_0")
    packed = gguf_model(file, torch.float32, packed=True)
    with patch("bmlab.kernels.ggml._library", lambda: None):
        again, wide = gguf_model(file, torch.float32, packed=True), gguf_model(file, torch.float32)
    for a, b in zip(packed.state_dict().values(), again.state_dict().values(), strict=True): assert torch.equal(a, b)
    assert apart(logits(packed), logits(wide)) < 1e-5


def test_a_block_beyond_float16_is_widened(tmp_path):
    "m + 8 · d of Q4_1 may be larger than float16 holds: then its layers are float, and the rest stays packed"
    file = llama(tmp_path / "x.gguf", "Q4_1")
    with patch("bmlab.formats.gguf_models._four_and_eight") as decode:
        from bmlab.formats.gguf_models import BeyondHalf
        decode.side_effect = BeyondHalf("m + 8 · d is beyond float16")
        model = gguf_model(file, torch.float32, packed=True)
    assert not kept(model) and isinstance(model.lm_head, nn.Linear)

"""Conversions: the manifests against the published modules written down a second time, other dtypes and formats, what a
killed or a wrong conversion leaves."""
import json
import subprocess
import sys
import zipfile

import pytest
import torch
import transformers as tf

import reference_cpm2 as ref
from bmlab.models.convert import Folder, _class, families, manifest, plan, to_original, to_safetensors
from bmlab.core import set_seed
from bmlab.models.cpm2 import CPM1, Cpm1Config, Cpm2Config, EvaConfig
from bmlab.models.cpmbee import CpmBeeConfig
from bmlab.models.glm import BlankGlmConfig
from bmlab.files import damage
from fresh import fresh_python

T5 = dict(vocab_size=40, d_model=16, d_kv=4, d_ff=24, num_heads=4, num_layers=2)
SMALL = Cpm2Config(**T5)


def test_manifests_at_full_size():
    assert manifest("cpm-1", tf.GPT2Config(**CPM1)) == ref.megatron_names(32, 2560, 30000, 1024)
    assert manifest("cpm-2", Cpm2Config()) == ref.encdec_names(24, 4096, 4096, 10240, 64, 26240)
    assert manifest("eva", EvaConfig()) == ref.encdec_names(24, 2048, 2048, 5120, 32, 30000)
    assert manifest("glm", BlankGlmConfig()) == ref.megatron_names(48, 4096, 50048, 1025, blocks=True)


def test_manifests_of_modelcenter_and_cpm_live():
    one = ref.center_names(32, 2560, 2560, 6400) | {
        "input_embedding.weight": (30968, 2560),
        "position_bias.relative_attention_bias": (64, 32),
    }
    assert manifest("cpm-1-modelcenter", Cpm1Config()) == one
    two = ref.center_names(24, 4096, 4096, 10240) | ref.center_names(
        24, 4096, 4096, 10240, cross=True, prefix="decoder"
    )
    two |= {
        "input_embedding.weight": (26240, 4096),
        "output_projection.weight": (26240, 4096),
        "position_bias_enc.relative_attention_bias": (32, 64),
        "position_bias_dec.relative_attention_bias": (32, 64),
    }
    assert manifest("cpm-2-modelcenter", Cpm2Config(attn_scale=True, length_scale=True)) == two
    ant = ref.center_names(48, 4096, 4096, 10240) | {
        "input_embedding.weight": (30720, 4096),
        "prompt_embedding.weight": (1024, 4096),
        "segment_embedding.weight": (32, 4096),
        "position_bias.relative_attention_bias": (512 + 32 * 32, 32),
    }
    assert manifest("cpm-ant", tf.CpmAntConfig()) == ant
    assert manifest("cpm-bee", CpmBeeConfig()) == ref.center_names(48, 4096, 4096, 10240) | {
        "input_embedding.weight": (86583, 4096),
        "position_bias.relative_attention_bias": (512, 32),
    }
    glm = ref.center_names(48, 4096, 4096, 16384, bias=True, gated=False, norm_bias=True) | {
        "input_embedding.weight": (50048, 4096),
        "position_embedding.weight": (1025, 4096),
        "block_position_embedding.weight": (1025, 4096),
    }
    assert manifest("glm-modelcenter", BlankGlmConfig()) == glm


def test_manifests_of_known_families():
    d = 768
    stack = ref.center_names(12, d, d, 3072, bias=True, gated=False, norm_bias=True)
    bert = stack | {
        "input_embedding.weight": (30522, d),
        "position_embedding.weight": (512, d),
        "token_type_embedding.weight": (2, d),
        "lm_head.dense.weight": (d, d),
        "lm_head.dense.bias": (d,),
        "lm_head.layer_norm.weight": (d,),
        "lm_head.layer_norm.bias": (d,),
        "lm_head.decoder.weight": (30522, d),
        "lm_head.decoder.bias": (30522,),
    }
    assert manifest("bert-modelcenter", tf.BertConfig()) == bert
    assert manifest("gpt2-modelcenter", tf.GPT2Config()) == stack | {
        "input_embedding.weight": (50258, d),
        "position_embedding.weight": (1024, d),
    }
    opt = {n.replace("encoder.", "decoder.", 1): s for n, s in stack.items()} | {
        "input_embedding.weight": (50272, d),
        "position_embedding.weight": (2050, d),
    }
    assert manifest("opt-modelcenter", tf.OPTConfig()) == opt
    llama = ref.center_names(32, 4096, 4096, 11008) | {
        "input_embedding.weight": (32000, 4096),
        "output_projection.weight": (32000, 4096),
    }
    assert manifest("llama-modelcenter", tf.LlamaConfig()) == llama
    long = bert | {
        f"encoder.layers.{i}.self_att.self_attention.project_{x}_global.{leaf}": (d, d)[: 2 - (leaf == "bias")]
        for i in range(12)
        for x in "qkv"
        for leaf in ("weight", "bias")
    }
    assert manifest("longformer-modelcenter", tf.LongformerConfig()) == long
    t5 = ref.center_names(6, 512, 512, 2048, gated=False) | ref.center_names(
        6, 512, 512, 2048, gated=False, cross=True, prefix="decoder"
    )
    t5 |= {
        "input_embedding.weight": (32128, 512),
        "output_projection.weight": (32128, 512),
        "position_bias_enc.relative_attention_bias": (32, 8),
        "position_bias_dec.relative_attention_bias": (32, 8),
    }
    assert manifest("t5-modelcenter", tf.T5Config(decoder_start_token_id=0)) == t5


def saved(tmp_path, config=SMALL, family="cpm-2", dtype=torch.float32):
    set_seed(0)
    _class(families()[family])(config).to(dtype).save_pretrained(tmp_path / "a")
    return torch.load(to_original(tmp_path / "a", tmp_path / "b.pt", family), weights_only=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_every_dtype_keeps_its_bits(tmp_path, dtype):
    saved(tmp_path, dtype=dtype)
    back, a = Folder(to_safetensors(tmp_path / "b.pt", tmp_path / "c", "cpm-2", SMALL)), Folder(tmp_path / "a")
    assert set(back.names) == set(a.names) and all(
        torch.equal(back.get(n), a.get(n)) and back.dtype(n) is dtype for n in a.names
    )
    half = Folder(to_safetensors(tmp_path / "b.pt", tmp_path / "h", "cpm-2", SMALL, dtype=torch.float16))
    assert all(half.dtype(n) is torch.float16 and torch.equal(half.get(n), a.get(n).half()) for n in a.names)


@pytest.mark.parametrize("kind", ["zip", "legacy", "module", "prefixed", "deepspeed"])
def test_containers(tmp_path, kind):
    import argparse
    w = saved(tmp_path)
    form = {
        "zip": w,
        "legacy": w,
        "module": {"module": w, "iteration": 3},
        "prefixed": {"model": {f"module.{n}": t for n, t in w.items()}},
        "deepspeed": {"module": w, "args": argparse.Namespace(lr=1e-3), "global_steps": 7, "optimizer": None},
    }[kind]
    torch.save(form, tmp_path / "x.pt", _use_new_zipfile_serialization=kind != "legacy")
    back, a = Folder(to_safetensors(tmp_path / "x.pt", tmp_path / "c", "cpm-2", SMALL)), Folder(tmp_path / "a")
    assert all(torch.equal(back.get(n), a.get(n)) for n in a.names)


def test_older_names(tmp_path):
    config = Cpm1Config(
        vocab_size=40, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, dim_head=8, dim_ff=24
    )
    w = saved(tmp_path, config, "cpm-1-modelcenter")
    old = {}
    bare = [(f"{x}.weight", x) for x in ("project_q", "project_k", "project_v", "attention_out")]
    for n, t in w.items():
        for a, b in (("ffn.ffn.w_in.w_", "ffn.ffn.w_"), *bare): n = n.replace(a, b)
        old[n.replace(".weight", "") if "ffn.ffn" in n else n] = t
    torch.save(old, tmp_path / "old.pt")
    back, a = (
        Folder(to_safetensors(tmp_path / "old.pt", tmp_path / "c", "cpm-1-modelcenter", config)),
        Folder(tmp_path / "a"),
    )
    assert all(torch.equal(back.get(n), a.get(n)) for n in a.names)
    t5 = tf.T5Config(**T5, decoder_start_token_id=0)
    w = saved(tmp_path / "t5", t5, "t5-modelcenter")
    torch.save({n.replace("output_projection.", "output_projection.w."): t for n, t in w.items()}, tmp_path / "t5.pt")
    assert set(Folder(to_safetensors(tmp_path / "t5.pt", tmp_path / "d", "t5-modelcenter", t5)).names) == set(
        Folder(tmp_path / "t5/a").names
    )


def test_bert_with_its_pooler(tmp_path):
    config = tf.BertConfig(
        vocab_size=40, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24
    )
    w = saved(tmp_path, config, "bert-modelcenter")
    w |= {"pooler.dense.weight": torch.randn(16, 16), "pooler.dense.bias": torch.randn(16)}
    torch.save(w, tmp_path / "x.pt")
    folder = to_safetensors(tmp_path / "x.pt", tmp_path / "c", "bert-modelcenter", config)
    assert torch.equal(tf.BertModel.from_pretrained(folder).pooler.dense.weight, w["pooler.dense.weight"])
    again = torch.load(to_original(folder, tmp_path / "y.pt", "bert-modelcenter"), weights_only=True)
    assert set(again) == set(w) and all(torch.equal(again[n], w[n]) for n in w)


def test_scale_at_its_limits(tmp_path):
    "A T5 v1.1 divided by 100 in float16: widened on the way, and refused where float16 has no room for it"
    config = tf.T5Config(**T5, decoder_start_token_id=0, feed_forward_proj="gated-gelu", tie_word_embeddings=False)
    w = saved(tmp_path, config, "t5-v1_1-modelcenter")
    half = {n: t.half() for n, t in w.items()} | {"input_embedding.weight": torch.full((40, 16), 900.1).half()}
    torch.save(half, tmp_path / "half.pt")
    wide = Folder(
        to_safetensors(
            tmp_path / "half.pt", tmp_path / "wide", "t5-v1_1-modelcenter", config, scale=100, dtype=torch.float32
        )
    )  # no float16 on the way
    assert torch.equal(wide.get("shared.weight"), half["input_embedding.weight"].float() * 100)
    with pytest.raises(ValueError, match="'input_embedding.weight' holds numbers that torch.float16 has no room for"):
        to_safetensors(tmp_path / "half.pt", tmp_path / "narrow", "t5-v1_1-modelcenter", config, scale=100)


def test_plan_names_everything_once():
    for name, config in {"cpm-2": SMALL, "llama-modelcenter": tf.LlamaConfig(num_hidden_layers=2)}.items():
        rules = plan(name, config)
        new, old = [n for r in rules for n in r.new], [n for r in rules for n in r.old]
        assert len(new) == len(set(new)) and len(old) == len(set(old))


@pytest.mark.long
def test_memory_is_one_tensor(tmp_path):
    "A model of 200 MB is converted both ways, in a process that grows by little more than its largest matrices"
    code = f"""
import math, re, threading, time, torch
from pathlib import Path
from bmlab.models.convert import plan, to_original, to_safetensors, write_safetensors
from bmlab.models.cpm2 import Cpm2Config
config = Cpm2Config(vocab_size=2000, d_model=768, d_kv=64, d_ff=2048, num_heads=12, num_layers=4)
folder = Path({str(tmp_path)!r})
sizes = {{n: (torch.float32, tuple(s)) for r, (new, _) in plan("cpm-2", config).items() for n, s in zip(r.new, new)}}
(folder / "a").mkdir(); config.save_pretrained(folder / "a")
write_safetensors(folder / "a/model.safetensors", sizes, ((n, torch.rand(s)) for n, (_, s) in sizes.items()))
def anonymous(): return int(re.search(r"RssAnon:\\s+(\\d+)", open("/proc/self/status").read())[1]) / 1024
peak, stop, start = [0], threading.Event(), anonymous()
def watch():
    while not stop.is_set(): peak[0] = max(peak[0], anonymous()); time.sleep(.002)
t = threading.Thread(target=watch); t.start()
to_original(folder / "a", folder / "b.pt", "cpm-2")
to_safetensors(folder / "b.pt", folder / "c", "cpm-2", config)
stop.set(); t.join(); print(peak[0] - start)
"""
    grown = float(
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()[-1]
    )
    size = (tmp_path / "b.pt").stat().st_size / 2**20
    assert size > 150 and grown < .35 * size, (grown, size)
    a, c = Folder(tmp_path / "a"), Folder(tmp_path / "c")
    assert all(torch.equal(a.get(n), c.get(n)) for n in a.names)


def test_killed_half_way_leaves_nothing(tmp_path):
    saved(tmp_path)
    code = f"""
import os, bmlab.models.convert as c
from bmlab.models.cpm2 import Cpm2Config
ways, n = c._ways, [0]
def dying(*a):
    n[0] += 1
    if n[0] > 40: os._exit(9)
    return ways(*a)
rules = len(c.plan("cpm-2", Cpm2Config(**{T5!r})))
n[0] = 40 - rules - 5
c._ways = dying
c.to_safetensors({str(tmp_path / 'b.pt')!r}, {str(tmp_path / 'c')!r}, "cpm-2", Cpm2Config(**{T5!r}))
"""
    assert fresh_python(code).returncode == 9
    assert not (tmp_path / "c").exists()
    folder = to_safetensors(tmp_path / "b.pt", tmp_path / "c", "cpm-2", SMALL)      # the same name is free
    assert damage(folder, full=True) is None


def test_hashes_and_checksums(tmp_path):
    w = saved(tmp_path)
    said = json.loads((tmp_path / "b.pt.json").read_text())
    with zipfile.ZipFile(tmp_path / "b.pt") as z: assert z.testzip() is None
    folder = to_safetensors(tmp_path / "b.pt", tmp_path / "c", "cpm-2", SMALL, sha256=said["sha256"])
    weights = folder / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-3] ^= 1
    weights.write_bytes(data)
    assert "has changed" in damage(folder, full=True)
    with pytest.raises(ValueError, match="damaged"): to_original(folder, tmp_path / "d.pt", "cpm-2", sha256="ab" * 32)
    with pytest.raises(ValueError, match="2 hashes for 1 files"):
        to_safetensors(tmp_path / "b.pt", tmp_path / "e", "cpm-2", SMALL, sha256=["a", "b"])
    assert not (tmp_path / "e").exists() and not (tmp_path / "d.pt").exists() and len(w) == said["tensors"]


def test_what_is_there_already_is_not_written_over(tmp_path):
    "A new folder or an empty one, a new file: what holds anything stays as it is"
    saved(tmp_path)
    (tmp_path / "empty").mkdir()
    folder = to_safetensors(tmp_path / "b.pt", tmp_path / "empty", "cpm-2", SMALL)
    (tmp_path / "full").mkdir()
    for place in (tmp_path / "full/mine.txt", tmp_path / "mine.pt"): place.write_text("mine")
    with pytest.raises(FileExistsError, match="full exists already"):
        to_safetensors(tmp_path / "b.pt", tmp_path / "full", "cpm-2", SMALL)
    with pytest.raises(FileExistsError, match="mine.pt exists already"):
        to_original(folder, tmp_path / "mine.pt", "cpm-2")
    assert [p.read_text() for p in (tmp_path / "full/mine.txt", tmp_path / "mine.pt")] == ["mine", "mine"]
    assert len([*(tmp_path / "full").iterdir()]) == 1 and not (tmp_path / "mine.pt.json").exists()


def test_parts_that_do_not_belong_together(tmp_path):
    w = saved(tmp_path)
    torch.save(w, tmp_path / "r0.pt")
    torch.save({n: t for n, t in w.items() if "lm_head" not in n}, tmp_path / "r1.pt")
    with pytest.raises(ValueError, match="does not hold the same names"):
        to_safetensors([tmp_path / "r0.pt", tmp_path / "r1.pt"], tmp_path / "c", "cpm-2", SMALL)
    torch.save({n: t + 1 if "layer_norm" in n else t for n, t in w.items()}, tmp_path / "r1.pt")
    half = Cpm2Config(**{**T5, "vocab_size": 80, "d_ff": 48, "num_heads": 8})
    with pytest.raises(ValueError, match="they differ"):
        to_safetensors([tmp_path / "r0.pt", tmp_path / "r1.pt"], tmp_path / "c", "cpm-2", half)
    torch.save(w, tmp_path / "r1.pt")
    both = Folder(to_safetensors([tmp_path / "r0.pt", tmp_path / "r1.pt"], tmp_path / "c", "cpm-2", half))
    assert torch.equal(
        both.get("encoder.block.0.layer.0.SelfAttention.k.weight"),
        w["encoder.blocks.0.self_attn.self_attn.project.weight"][16:32].repeat(2, 1),
    )
    assert torch.equal(
        both.get("encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"),
        w["encoder.blocks.0.self_attn.self_attn.relative_attention_bias.weight"].repeat(1, 2),
    )

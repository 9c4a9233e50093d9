"Counts and file sizes of every method: what the papers' formulas, OpenDelta's own counts and the published shares say."
import importlib

import pytest
import torch

from bmlab.core import count, set_seed
from bmlab.delta.lora import Lora
from bmlab.models.load import build


def method(name):
    "The class of `room:Class`"
    where, _, cls = name.partition(":")
    return getattr(importlib.import_module(f"bmlab.delta.{where}"), cls)


def llama(**kw):
    import transformers as tf
    return tf.LlamaForCausalLM(
        tf.LlamaConfig(
            **dict(
                hidden_size=64,
                intermediate_size=128,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                vocab_size=99,
                head_dim=16,
            )
            | kw
        )
    )


def bert(d=64, layers=3, f=128, **kw):
    import transformers as tf
    return tf.BertModel(
        tf.BertConfig(
            hidden_size=d, intermediate_size=f, num_hidden_layers=layers, num_attention_heads=4, vocab_size=99, **kw
        )
    )


def added(model, d):
    "What a delta counts, three ways: its own count, the model's, the tensors themselves"
    n = d.count().delta
    assert n == count(d.model).delta == sum(p.numel() for p in {id(p): p for p in d.parameters()}.values())
    return n


# OpenDelta's counts on BERT with d = 64 and 3 layers, run with its version 0.3.2
OPENDELTA = {
    "lora": ("lora:Lora", dict(r=8), 6144),
    "adapter": ("adapter:Adapter", dict(bottleneck=24), 18960),
    "parallel": ("adapter:ParallelAdapter", dict(bottleneck=24), 18960),
    "low_rank": ("adapter:LowRankAdapter", dict(reduction_factor=4), 1440),
    "compacter": ("adapter:Compacter", dict(reduction_factor=4), 2208),
}


@pytest.mark.parametrize("name", OPENDELTA)
def test_opendeltas_counts(name):
    where, kw, want = OPENDELTA[name]
    model = bert()
    assert added(model, method(where)(model, **kw)) == want


d, b, L = 64, 24, 3
FORMULAS = {  # per method: class, arguments, parameters by formula on BERT(d=64, 3 layers, f=128) with two sites per
              # layer
    "lora r(in+out)": ("lora:Lora", dict(r=4), 2 * L * 4 * (d + d)),
    "lora, all linears": (
        "lora:Lora",
        dict(r=2, modules=["query", "key", "value", "dense"], exclude="pooler"),
        L * 2 * (4 * (d + d) + 2 * (d + 128)),
    ),
    "dora r(in+out)+out": ("lora:Lora", dict(r=4, dora=True), 2 * L * (4 * (d + d) + d)),
    "pissa r(in+out)": ("lora:Lora", dict(r=4, init="pissa"), 2 * L * 4 * (d + d)),
    "embedding r(tokens+d)": ("lora:Lora", dict(r=4, modules="word_embeddings"), 4 * (99 + d)),
    "ranks by pattern": ("lora:Lora", dict(r={"query": 2, "value": 6}), L * (2 + 6) * (d + d)),
    "shared by layers": ("lora:Lora", dict(r=4, share="layers"), 4 * (d + d)),
    "shared by places": ("lora:Lora", dict(r=4, share="places"), 2 * 4 * (d + d)),
    "adapter 2db+b+d, houlsby": ("adapter:Adapter", dict(bottleneck=b), 2 * L * (2 * d * b + b + d)),
    "adapter, pfeiffer": ("adapter:Adapter", dict(bottleneck=b, place="pfeiffer"), L * (2 * d * b + b + d)),
    "adapter, learned scale": ("adapter:Adapter", dict(bottleneck=b, scale="learned"), 2 * L * (2 * d * b + b + d + 1)),
    "parallel, learned scale": (
        "adapter:ParallelAdapter",
        dict(bottleneck=b, scale="learned"),
        2 * L * (2 * d * b + b + d + 1),
    ),
    **{
        f"low rank {r}: 2r(d+m)+m+d": (
            "adapter:LowRankAdapter",
            dict(r=r, reduction_factor=4),
            2 * L * (2 * r * (d + 16) + 16 + d),
        )
        for r in (1, 2, 3, 4)
    },
    "compacter 2n³+2r(d+m)+m+d": (
        "adapter:Compacter",
        dict(n=4, r=2, reduction_factor=4),
        2 * L * (2 * 4**3 + 2 * 2 * (d + 16) + 16 + d),
    ),
    "compacter, shared rule n³ once": (
        "adapter:Compacter",
        dict(n=4, reduction_factor=4, shared_rule=True),
        4**3 + 2 * L * (2 * (d + 16) + 16 + d),
    ),
    "ia3 dk+dv+df": ("vectors:IA3", {}, L * (d + d + 128)),
    "ln_tuning 2d per norm": ("vectors:LayerNormTuning", {}, (2 * L + 1) * 2 * d),
    "bitfit Σ bias": ("vectors:BitFit", {}, (2 * L + 1) * d + L * (3 * d + d + 128 + d) + d),
    "prompt P·d": ("soft:SoftPrompt", dict(length=10), 10 * d),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_formulas(name):
    where, kw, want = FORMULAS[name]
    model = bert()
    assert added(model, method(where)(model, **kw)) == want


def test_fused_products_and_experts():
    import transformers as tf
    gpt2 = tf.GPT2LMHeadModel(tf.GPT2Config(n_embd=64, n_layer=3, n_head=4, vocab_size=99))
    assert added(gpt2, Lora(gpt2, r=4)) == 3 * 4 * (64 + 192)
    gpt2 = tf.GPT2LMHeadModel(tf.GPT2Config(n_embd=64, n_layer=3, n_head=4, vocab_size=99))
    assert added(gpt2, Lora(gpt2, r=4, slices=("q", "v"))) == 3 * 4 * (64 + 128)
    config = tf.Qwen3MoeConfig(
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=99,
        head_dim=16,
        moe_intermediate_size=16,
        num_experts=8,
    )
    moe = tf.Qwen3MoeForCausalLM(config)
    assert added(moe, Lora(moe, r=2, modules="mlp.experts")) == 2 * 8 * 2 * ((64 + 32) + (16 + 64))


def test_prefix_on_grouped_keys():
    "L · 2 · P · K · head_dim: 1280 on a tiny LLaMA of two layers with 2 of 4 heads for keys and P = 10"
    model = llama()
    assert added(model, method("prefix:Prefix")(model, length=10)) == 1280


def test_lora_on_cpm_ant_10b():
    "The 0.067 % of OpenBMB's overview; the table of outputs is a slice of the table of inputs and counts once"
    model = build("cpm-ant-10b", device="meta")
    assert count(model).total == 9_391_624_192
    d = Lora(model, r=8, modules=["project_q", "project_v"])
    assert added(model, d) == 6_291_456 == 8 * 2 * 4096 * 2 * 48
    assert round(6_291_456 / 9_391_624_192, 7) == 0.0006699 and len(d.sites) == 96
    # the same by role
    assert d.sites.keys() == Lora(build("cpm-ant-10b", device="meta"), r=8).sites.keys()


def test_bert_large():
    "LoRA r 8 on q and v: 786,432, 0.235 %; BitFit: 303,930, 0.0907 %"
    model = build("bert-large", device="meta")
    lora = Lora(model, r=8)
    assert added(model, lora) == 786_432 == 24 * 2 * 8 * 2048
    total = count(model).total - 786_432
    assert total == 335_174_458 and f"{786_432 / total:.3%}" == "0.235%"
    lora.detach()
    bitfit = method("vectors:BitFit")(model)
    assert added(model, bitfit) == 303_930 and f"{303_930 / total:.4%}" == "0.0907%"


def test_sites_as_the_overview_writes_them():
    model, sites = build("bert-large", device="meta"), ["20.attention.output.dense", "23.attention.self.value"]
    d = Lora(model, r=8, modules=sites)
    assert [n.split("layer.")[1] for n in d.sites] == sites and added(model, d) == 2 * 8 * 2048


def test_file_is_its_parameters(tmp_path):
    "Tiny LLaMA, r 8 on q and v: 7168 numbers in 30,704 bytes, as PEFT; at most 1.02 × their bytes + 4 KiB + 80 a key"
    model = llama()
    d = Lora(model, r=8)
    assert added(model, d) == 2 * 8 * ((64 + 64) + (64 + 32)) == 3584
    e = Lora(llama(num_hidden_layers=4), r=8)
    assert added(e.model, e) == 7168
    for delta in (d, e, Lora(llama(), r=2, dora=True, modules="*_proj")):
        folder = delta.save(tmp_path / str(id(delta)))
        size, raw = (
            (folder / "adapter_model.safetensors").stat().st_size,
            sum(t.numel() * t.element_size() for t in delta.file_tensors().values()),
        )
        assert size <= 1.02 * raw + 4096 + 80 * len(delta.file_tensors()), (size, raw)
        assert (folder / "adapter_config.json").stat().st_size < 1024
    peft = pytest.importorskip("peft")
    theirs = peft.get_peft_model(llama(num_hidden_layers=4), peft.LoraConfig(r=8, target_modules=["q_proj", "v_proj"]))
    theirs.save_pretrained(tmp_path / "peft")
    assert (
        (tmp_path / "peft/adapter_model.safetensors").stat().st_size
        == (tmp_path / str(id(e)) / "adapter_model.safetensors").stat().st_size
        == 30_704
    )


def test_every_parameter_gets_a_gradient():
    "Within two steps: B in the first, A once B has moved"
    for kw in (dict(), dict(dora=True), dict(init="pissa"), dict(modules="embed_tokens"), dict(share="places")):
        set_seed(0)
        model = llama()
        d = Lora(model, r=4, **kw).freeze(keep=None)
        ids, opt = torch.arange(24).view(2, 12), torch.optim.AdamW(d.trainable(), lr=1e-2)
        moved = {id(p): 0. for p in d.parameters()}
        first = None
        for _ in range(2):
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            first = first or loss.item()
            for p in d.parameters(): moved[id(p)] += p.grad.abs().sum().item()
            opt.step()
            opt.zero_grad()
        assert all(moved.values()) and model(input_ids=ids, labels=ids).loss.item() < first

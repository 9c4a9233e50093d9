"Plans: bytes of many families, placements against brute force, worked lines of a 405B model, streaming as planned"
import dataclasses
import itertools
import json
import random
import warnings
from pathlib import Path

import pandas as pd
import pytest
import torch
import transformers as tf

from bmlab.infer.cache import KVCache, attention_mask
from bmlab.core import count
from bmlab.kernels.layers import pack_linears, packable
from bmlab.plan.machine import machine
from bmlab.models.load import build
from bmlab.infer.placement import DECODING, InferencePlan, fusable, place_blocks, plan_inference, smallest
from bmlab.core import find_blocks

TINY = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4, vocab_size=160)
T5 = dict(d_model=64, d_kv=16, d_ff=96, num_layers=4, num_heads=4, vocab_size=160, decoder_start_token_id=0)
GPT = dict(n_embd=64, n_layer=4, n_head=4, vocab_size=160, n_positions=64)


def models():
    yield "llama", lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**TINY, num_key_value_heads=2))
    yield "llama, tied", lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**TINY, tie_word_embeddings=True))
    yield "columns without groups", lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**TINY | dict(intermediate_size=100)))
    yield "qwen3", lambda: tf.Qwen3ForCausalLM(tf.Qwen3Config(**TINY, num_key_value_heads=2, head_dim=32))
    yield "gpt2", lambda: tf.GPT2LMHeadModel(tf.GPT2Config(**GPT))
    yield "gptj", lambda: tf.GPTJForCausalLM(tf.GPTJConfig(**GPT, rotary_dim=8))
    yield (
        "opt",
        lambda: tf.OPTForCausalLM(tf.OPTConfig(
            hidden_size=64, ffn_dim=96, num_hidden_layers=4, num_attention_heads=4, vocab_size=160,
            max_position_embeddings=64, word_embed_proj_dim=64
        ))
    )
    yield "bert", lambda: tf.BertForMaskedLM(tf.BertConfig(**TINY))
    yield "bert classifier", lambda: tf.BertForSequenceClassification(tf.BertConfig(**TINY))
    yield "t5", lambda: tf.T5ForConditionalGeneration(tf.T5Config(**T5))
    yield (
        "t5 v1.1",
        lambda: build(
            "t5-v1_1-small", device="meta", d_model=64, d_kv=16, d_ff=96, num_layers=4, num_heads=4, vocab_size=160
        ),
    )
    yield (
        "bart",
        lambda: tf.BartForConditionalGeneration(tf.BartConfig(
            d_model=64, encoder_ffn_dim=96, decoder_ffn_dim=96, encoder_layers=3, decoder_layers=4,
            encoder_attention_heads=4, decoder_attention_heads=4, vocab_size=160, max_position_embeddings=64
        ))
    )
    yield "gemma3", lambda: tf.Gemma3ForCausalLM(tf.Gemma3TextConfig(**TINY, num_key_value_heads=2, head_dim=16))
    yield "mixtral", lambda: tf.MixtralForCausalLM(tf.MixtralConfig(**TINY, num_key_value_heads=2, num_local_experts=4))
    yield (
        "qwen3 moe",
        lambda: tf.Qwen3MoeForCausalLM(tf.Qwen3MoeConfig(
            **TINY, num_key_value_heads=2, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32
        ))
    )
    yield (
        "gpt-oss",
        lambda: tf.GptOssForCausalLM(tf.GptOssConfig(
            **TINY, num_key_value_heads=2, head_dim=16, num_local_experts=4, num_experts_per_tok=2, sliding_window=8
        ))
    )
    yield (
        "cpm-ant",
        lambda: build(
            "cpm-ant-10b", device="meta", num_hidden_layers=4, hidden_size=64, num_attention_heads=4, dim_head=16,
            dim_ff=96, vocab_size=160
        )
    )


MODELS = dict(models())


def made(name):
    with torch.device("meta"), warnings.catch_warnings(): return MODELS[name]()


def decoder(layers, width, heads, kv, inner, vocab, dtype=torch.bfloat16):
    with torch.device("meta"):
        return tf.LlamaForCausalLM(tf.LlamaConfig(
            hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=kv,
            intermediate_size=inner, vocab_size=vocab
        )).to(dtype)


@pytest.mark.parametrize("name", MODELS)
def test_what_was_found_holds_after_packing(name, tmp_path):
    "Blocks, layers to pack and modules to fuse are found on meta, kept by name, and hold for the packed model"
    model = made(name)
    plan = plan_inference(model, bits=8, max_ctx=32, machine="h200")
    assert plan.packable == list(packable(model)) and plan_inference(model, max_ctx=32, machine="h200").packable is None
    pack_linears(model, bits=8)
    # (packed experts take their kernels by themselves)
    assert fusable(model) == {n: f for n, f in plan.fusable.items() if f != "experts"}
    assert all(n.endswith("experts") for n, f in plan.fusable.items() if f == "experts")
    assert plan.blocks_in(model) == find_blocks(model)
    plan.save(tmp_path / "plan.json")
    again = InferencePlan.load(tmp_path / "plan.json").at(plan.min_bytes)
    assert (again.packable, again.fusable) == (plan.packable, plan.fusable)


def test_plans_of_before_load(tmp_path):
    "Plans that were saved before they named what can be packed and fused"
    plans = (Path(__file__).parents[2] / "benchmarks" / "plans").glob("*.json")
    plans = [p for p in plans if "token_bytes" in json.loads(p.read_text())]
    assert plans
    for path in plans:
        plan = InferencePlan.load(path)
        assert plan.packable is None and plan.fusable is None
        assert plan.sentence() and plan.at(None).peak_bytes >= plan.weights


@pytest.mark.parametrize("name", MODELS)
def test_weights_to_the_byte(name):
    "A plan's weights are what packing makes of them, and a packed model is planned like the one it came from"
    for bits in (None, 8, 4):
        model = made(name)
        plan = plan_inference(model, bits=bits, max_ctx=64, machine="h200")
        if bits: pack_linears(model, bits)
        assert plan.weights == count(model).bytes
        assert plan_inference(model, bits=bits, max_ctx=64, machine="h200").weights == plan.weights
        assert (
            plan.token_bytes <= plan.weights
            and plan.rest_bytes + plan.embedding_bytes + plan.resident_bytes >= plan.weights
        )


@pytest.mark.parametrize("name", MODELS)
def test_every_limit_holds(name):
    model = made(name)
    plan, blocks = plan_inference(model, max_ctx=64, bits=8, machine="h200"), sorted(find_blocks(model))
    whole, last = plan.peak_bytes, 0.0
    assert plan.min_bytes <= whole and not plan.streamed
    for i in range(13):
        limit = plan.min_bytes + (whole - plan.min_bytes) * i // 12
        p = plan.at(limit)
        assert (
            p.peak_bytes <= limit and len(p.streamed) not in (1, 2)
            and sorted(p.resident + p.streamed) == blocks
        )
        rate = p.tokens_per_s()
        assert rate >= last * (1 - 1e-9) and p.first_token_s > 0
        if i % 6 == 0: assert p.sentence() and p._repr_html_()           # (all streams, half of it, nothing)
        last = rate
    with pytest.raises(ValueError, match="below the smallest feasible plan"): plan.at(plan.min_bytes - 1)


def test_models_without_blocks():
    "Nothing repeats: everything stays, and a limit below that has no plan"
    for model in (
        torch.nn.Linear(64, 8), torch.nn.Sequential(torch.nn.Embedding(9, 4), torch.nn.Tanh()), torch.nn.ReLU()
    ):
        plan = plan_inference(model, machine="h200")
        assert (
            plan.min_bytes == plan.peak_bytes and plan.table().loc["peak", "device bytes"] == plan.peak_bytes
            and plan.sentence() and plan._repr_html_()
        )
        with pytest.raises(ValueError, match="smallest feasible plan"):
            plan_inference(model, plan.peak_bytes - 1, machine="h200")
    with pytest.raises(TypeError, match="expected a model"): plan_inference(7)
    with pytest.raises((OSError, LookupError), match="neither a sample nor a folder"): plan_inference("llama")


def test_cache_bytes():
    for name in ("llama", "qwen3", "gpt2", "gemma3"):
        config = made(name).config
        for bits, batch, ctx in ((16, 1, 33), (8, 3, 64)):
            plan = plan_inference(made(name), max_batch=batch, max_ctx=ctx, kv_bits=bits, machine="h200")
            assert plan.kv_cache == KVCache(config, batch, ctx, torch.float32, bits=bits).bytes


def brute(blocks, limit, fixed, slots):
    "The fewest bytes a token of all choices, None if none fits"
    names, best = list(blocks.index), None
    for gone in itertools.chain.from_iterable(itertools.combinations(names, k) for k in range(len(names) + 1)):
        if 0 < len(gone) <= slots or any(blocks.shared[n] for n in gone): continue
        held = (
            fixed + sum(blocks.bytes[n] for n in names if n not in gone)
            + (slots * max(blocks.bytes[n] for n in gone) if gone else 0)
        )
        cost = sum(blocks.bytes[n] for n in gone)
        if held <= limit and (best is None or cost < best): best = cost
    return best


def test_placement_against_brute_force():
    "Equal blocks: never more than needed. Blocks of several sizes: it fits if anything does, never a large block worse"
    chance = random.Random(0)
    for turn in range(60):
        n, slots = chance.randint(1, 8), chance.choice((2, 2, 3))
        sizes = [100] * n if turn % 2 else [chance.choice((60, 100, 100, 250)) for _ in range(n)]
        blocks = pd.DataFrame(
            {"bytes": sizes, "shared": [chance.random() < 0.1 for _ in range(n)], "each_token": True},
            index=[f"b{i}" for i in range(n)],
        )
        limit = chance.randint(150, 50 + sum(sizes) + 50)
        want, got = brute(blocks, limit, 50, slots), place_blocks(blocks, limit, 50, slots=slots)
        assert (want is None) == (got is None) and (want is None) == (
            limit < smallest(blocks, 50, slots)
        ), (sizes, limit)
        if got:
            cost = sum(blocks.bytes[n] for n in got.streamed)
            held = 50 + sum(sizes) - cost + slots * got.slot_bytes
            assert (
                held <= limit and not any(blocks.shared[n] for n in got.streamed)
                and len(got.streamed) not in range(1, slots + 1)
            )
            assert cost == want if turn % 2 else cost - want < max(sizes), (sizes, limit, slots, got, want)


def test_decoder_before_encoder():
    "CPM-2's shape: the decoder stays longest; at 5.3 GB, by hand, 8 of its blocks stream, 5.9 tokens/s over PCIe 3"
    cpm2 = build("t5-v1_1-xxl", device="meta", dtype="bfloat16", random=False, vocab_size=26240)
    half = dataclasses.replace(machine("h200"), context=0, h2d=12.3e9)
    plan = plan_inference(cpm2, 5_300_000_000, bits=8, max_ctx=128, machine=half)
    gone = [n for n in plan.streamed if n.startswith("decoder")]
    assert (
        len(plan.streamed) - len(gone) >= 22 and len(gone) == 8 and abs(plan.tokens_per_s() / 5.9 - 1) < 0.05
        and plan.bound == "link"
    )
    roomy = plan.at("8GiB")
    assert (
        not [n for n in roomy.streamed if n.startswith("decoder")] and roomy.link_bytes == 0 and roomy.bound == "launch"
        and roomy.first_token_s < plan.first_token_s
    )
    throttled = plan_inference(
        cpm2, "6GiB", bits=8, max_ctx=256, host_limit="16GiB", machine=dataclasses.replace(machine("h200"), h2d=12e9)
    )
    assert throttled.tokens_per_s() >= 4 and throttled.host_bytes < 16 << 30


@pytest.mark.long
def test_worked_lines():
    "405 billion in int4 under three limits; gigabytes streamed and tokens a second as worked out by hand"
    big = decoder(126, 16384, 128, 8, 53248, 128256)
    plan = plan_inference(big, bits=4, max_ctx=2048, machine="h200")
    assert 200e9 < plan.weights < 220e9
    for limit, streamed, rate in (("24GiB", 192e9, 0.29), ("80GiB", 133e9, 0.41), ("139GiB", 69e9, 0.80)):
        p = plan.at(limit)
        assert abs(p.streamed_bytes / streamed - 1) < 0.06 and abs(p.tokens_per_s() / rate - 1) < 0.08
    assert dataclasses.replace(plan.at("24GiB"), store="mmap").tokens_per_s() < 0.04
    seventy = build("llama3-70b", device="meta", dtype="bfloat16", random=False)
    p = plan_inference(seventy, "24GiB", bits=4, max_ctx=8192, machine="h200")
    assert abs(p.streamed_bytes / 15.4e9 - 1) < 0.1 and abs(p.tokens_per_s() / 3.6 - 1) < 0.15


def test_blocks_that_are_not_fused_launch_more_kernels():
    ant = build(
        "cpm-ant-10b", device="meta", vocab_size=500, hidden_size=64, num_attention_heads=4, dim_head=16, dim_ff=96,
        num_hidden_layers=3, prompt_types=4, prompt_length=4
    )
    plans = [
        plan_inference(m, None, bits=8, max_ctx=64, machine=dataclasses.replace(machine("h200"), decoding=None))
        for m in (ant, decoder(2, 64, 4, 2, 96, 500))
    ]
    assert [p.phases["step"]["loose"] for p in plans] == [3, 0]
    d, launch = DECODING["gpu"], [p.step(1)[0]["launch"] for p in plans]
    # seven products, attention, and torch's own kernels
    loose = 3 * (8 * d.kernel_s + d.loose * d.plain_s)
    assert loose == pytest.approx(3 * 36 * d.kernel_s)                  # (as measured on an H200)
    assert launch[0] == pytest.approx(loose + d.token_s) and launch[1] == pytest.approx(
        plans[1].phases["step"]["blocks"] * (d.kernels - d.joined) * d.kernel_s + d.token_s
    )


def test_nine_billion():
    "The lines to reach: what they ask for is possible by the plan"
    nine = decoder(48, 4096, 32, 32, 10240, 30720)
    plans = {bits: plan_inference(nine, bits=bits, max_ctx=544, machine="h200") for bits in (None, 4, 8)}
    at = lambda bits, limit="6GiB": plans[bits].at(limit)
    assert at(8).tokens_per_s() >= 11 and at(None).tokens_per_s() >= 3.4 and not at(4).streamed
    assert at(None, None).tokens_per_s(ctx=160) >= 150 and at(8).bound == "link" and at(4).bound == "memory"
    eight = at(8)
    assert (
        eight.step(batch=8)[0]["memory"] < eight.step()[0]["link"]
        and 7.9 < eight.tokens_per_s(8) / eight.tokens_per_s() < 8.01
    )  # batch is free while the link is the bound
    assert eight.first_token(2048) > 3 * eight.first_token_s


def test_short_prompts_are_planned_in_graphs_where_they_fit(tmp_path):
    "An H200 took 18.5, 12.2 and 6.6 ms for 512, 128 and 8 tokens of this shape in int8, and 34, 40 and 26 without"
    eight = decoder(32, 4096, 32, 8, 14336, 128256)
    plan = plan_inference(eight, bits=8, max_ctx=2048, machine="h200")
    one_by_one = dataclasses.replace(plan, begins=0)
    assert sorted(map(int, plan.graphs)) == [32, 64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048]
    plan = dataclasses.replace(plan, begins=512)
    for n in (8, 100, 128, 512): assert plan.first_token(n) < 0.8 * one_by_one.first_token(n)
    assert plan.first_token(100) == plan.first_token(128) < plan.first_token(129)          # one width
    assert plan.first_token(512) == pytest.approx(0.0185, rel=0.25)
    for n, batch in ((513, 1), (100, 2)): assert plan.first_token(n, batch) == one_by_one.first_token(n, batch)
    graphs = plan.parts["prompts in graphs"][0]
    assert graphs == plan.graphs["512"] == plan.peak_bytes - one_by_one.peak_bytes
    peak = lambda p, n, batch=1: p.predicted({"prompt_tokens": n, "batch": batch})["peak_bytes"]
    for n in (20, 512): assert peak(plan, n) - peak(one_by_one, n) == plan.graphs["512"]        # taken at once
    for n, batch in ((1000, 1), (20, 4)): assert peak(plan, n, batch) == peak(one_by_one, n, batch)
    plan.save(tmp_path / "plan.json")
    assert InferencePlan.load(tmp_path / "plan.json").first_token(100) == plan.first_token(100)
    # from the smallest limit to more than all: never above it, and graphs stay once there is room for them
    found = [plan.at(limit) for limit in range(plan.min_bytes, plan.peak_bytes + (1 << 30), 97 << 20)]
    assert all(p.peak_bytes <= p.limit for p in found)
    begins = [p.begins for p in found if not p.host]
    assert begins == sorted(begins) and not begins[0] and begins[-1]
    assert not any(p.begins for p in found if p.streamed or p.chunk == 512)
    assert all(p.chunk >= p.begins for p in found) and len(set(begins)) > 3      # (what is captured is read first)
    # files of plans that said but whether short prompts are in graphs
    saved = json.loads((tmp_path / "plan.json").read_text())
    for was, now in ((True, 2048), (False, 0)):
        (tmp_path / "old.json").write_text(json.dumps(saved | {"begins": was}))
        assert InferencePlan.load(tmp_path / "old.json").begins == now


def test_longer_prompts_are_planned_in_graphs_where_launching_takes_longer():
    "Of LLaMA-3.2-1B's shape an H200 took 9.4 ms for 2,048 tokens, and 16 to 38 launched one by one"
    small, large = decoder(16, 2048, 32, 8, 8192, 128256), decoder(32, 4096, 32, 8, 14336, 128256)
    plan = plan_inference(small, max_ctx=2200, machine="h200")
    assert plan.begins == 2048 and plan.first_token(2048) == pytest.approx(0.0094, rel=0.25)
    one_by_one = dataclasses.replace(plan, begins=0)
    assert one_by_one.first_token(2048) > 0.015 and plan.first_token(2049) == one_by_one.first_token(2049)
    assert plan.first_token(1600) == plan.first_token(2048) > plan.first_token(1536)       # one width
    peak = lambda p, n: p.predicted({"prompt_tokens": n})["peak_bytes"]
    assert peak(plan, 2000) == max(peak(one_by_one, 2000), peak(one_by_one, 20) + plan.graphs["2048"])
    # of this one 12.5, 18.2, 23.6 and 48.6 for 512, 700, 1,000 and 2,000 (the last not in a graph)
    for n, ms in ((512, 12.5), (700, 18.2), (1000, 23.6), (2000, 48.6)):
        assert plan_inference(large, max_ctx=2200, machine="h200").first_token(n) == pytest.approx(ms / 1e3, rel=0.15)
    # arithmetic is the bound of more
    assert 512 <= plan_inference(large, max_ctx=2200, machine="h200").begins < 2048
    assert plan_inference(small, max_ctx=1000, machine="h200").begins == 768


def test_a_plan_has_no_more_positions_than_the_model():
    "As `wrap`; keys and values of 4 layers, 2 heads of 16, in 4 bytes"
    model = tf.LlamaForCausalLM(tf.LlamaConfig(**TINY, num_key_value_heads=2, max_position_embeddings=96))
    plan = plan_inference(model, max_ctx=100_000, machine="h200")
    assert plan.max_ctx == plan.settings["max_ctx"] == 96 and 1 <= plan.kv_cache / (96 * 4 * 2 * 2 * 16 * 4) < 1.1
    assert plan.peak_bytes == plan_inference(model, max_ctx=96, machine="h200").peak_bytes


def test_json_and_check(tmp_path):
    asked = dict(bits=8, max_ctx=64, draft=made("llama"), machine="h200")
    plan = plan_inference(made("t5"), plan_inference(made("t5"), **asked).min_bytes + (64 << 10), **asked)
    assert plan.streamed and plan.resident
    plan.save(tmp_path / "plan.json")
    again = InferencePlan.load(tmp_path / "plan.json")
    for k in (
        "peak_bytes", "host_bytes", "streamed", "resident", "host", "link_bytes", "bound", "first_token_s", "settings"
    ):
        assert getattr(again, k) == getattr(plan, k)
    assert (
        again.tokens_per_s(4, 2.5) == plan.tokens_per_s(4, 2.5) and again.table().equals(plan.table())
        and str(again) == str(plan)
    )
    row = again.check(dict(peak_bytes=2 * plan.peak_bytes, batch=2, decode_tok_s=plan.tokens_per_s(2))).loc
    assert (
        row["peak_bytes", "predicted / measured"] == 0.5 and abs(row["decode_tok_s", "predicted / measured"] - 1) < 1e-9
    )


def test_a_tree_of_guesses_costs_its_depth():
    "A draft model makes a tree level by level, as wide as you like"
    plan = plan_inference(
        decoder(8, 1024, 8, 8, 2048, 4000), max_ctx=256, draft=decoder(2, 256, 4, 4, 512, 4000), machine="h200"
    )
    seconds = lambda **kw: 1 / plan.tokens_per_s(accepted=2, checked=13, **kw)
    level = seconds(levels=1) - seconds(levels=0)
    assert (
        level > 0 and abs(seconds(levels=4) - seconds(levels=0) - 4 * level) < 1e-9
        and abs(seconds() - seconds(levels=12)) < 1e-12
    )
    got = plan.check(dict(decode_tok_s=1.0, accepted=2, checked=13, levels=4))
    assert (
        abs(got.at["decode_tok_s", "predicted"] - plan.tokens_per_s(accepted=2, checked=13, levels=4, ctx=None)) < 1e-9
    )
    with pytest.raises(ValueError, match="give at least one, as measured"): plan.check({})


def test_all_that_a_draft_takes_is_counted():
    "Weights, a cache in its own dtype, activations, kernels, and logits for all tokens that a step checks"
    from bmlab.infer.placement import CHECKED, DRAFTED, LIBRARIES, SEGMENT
    large, small, V = decoder(8, 1024, 8, 8, 2048, 4000), decoder(2, 256, 4, 4, 512, 4000), 4000
    for batch in (1, 8):
        for bits in (16, 8):
            alone, beside = (
                plan_inference(large, max_batch=batch, max_ctx=256, kv_bits=bits, draft=d, machine="h200")
                for d in (None, small)
            )
            own = beside.draft_bytes - count(small).bytes - KVCache.size(small.config, batch, 256)
            assert 0 < own - (LIBRARIES + SEGMENT + batch * CHECKED * V * 14) < 16 << 20
            assert beside.workspace - alone.workspace == (batch * CHECKED - max(batch, CHECKED)) * V * 14
            assert (
                beside.peak_bytes == alone.peak_bytes + beside.draft_bytes + DRAFTED
                + beside.workspace - alone.workspace
            )


def test_settings_left_as_they_are():
    "Planning changes nothing and needs no GPU"
    model = tf.LlamaForCausalLM(tf.LlamaConfig(**TINY))
    before = {n: (p.data_ptr(), p.clone()) for n, p in model.named_parameters()}
    plan_inference(model, "256MiB", bits=4, machine=dataclasses.replace(machine("h200"), context=0))
    assert (
        all(p.data_ptr() == at and torch.equal(p, old) for n, p in model.named_parameters() for at, old in [before[n]])
        and model.training
    )
    assert {
        f.name for f in dataclasses.fields(DECODING["gpu"])
    } == {f.name for f in dataclasses.fields(DECODING["cpu"])}


def test_the_streamer_does_what_was_planned():
    "Slots, slabs and bytes a token"
    from bmlab.infer import streaming
    for layers, part in ((8, 0.0), (8, 0.4), (7, 0.0), (9, 0.5)):
        model = tf.LlamaForCausalLM(tf.LlamaConfig(**TINY | dict(num_hidden_layers=layers))).eval()
        plan = plan_inference(model, max_ctx=32)
        plan = plan.at(int(plan.min_bytes + part * (plan.peak_bytes - plan.min_bytes)))
        streamer = streaming.Streamer(model, streamed=plan.streamed, slots=plan.slots, device="cpu")
        try:
            slack = 4096 * len(plan.streamed)
            assert (
                abs(streamer.device_bytes - plan.ring_bytes) <= slack
                and abs(streamer.host_bytes - plan.streamed_bytes) <= slack
            )
            with torch.no_grad():
                for _ in range(2): model(torch.arange(4)[None])
                before = streamer.stats["bytes"]
                for _ in range(3): model(torch.arange(4)[None])
            assert abs((streamer.stats["bytes"] - before) / 3 - plan.link_bytes) <= slack
        finally: streamer.close()


@pytest.mark.cuda
def test_peak_on_a_gpu():
    "What torch allocates for weights, cache and a prefill in chunks stays below the plan, and near it"
    torch.manual_seed(0)
    before = torch.cuda.memory_allocated()
    model = decoder(12, 2048, 16, 16, 5632, 32000).to_empty(device="cuda")
    for t in (*model.parameters(), *model.buffers()): torch.nn.init.normal_(t, std=0.02)
    plan = plan_inference(model, max_ctx=2048, machine="h200")
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    cache = KVCache(model.config, 1, 2048, torch.bfloat16, device="cuda")
    ids = torch.randint(32000, (1, 2048), device="cuda")
    with torch.no_grad():
        for i in range(0, 2048, 512):
            cache.select(1, 512)
            model(
                input_ids=ids[:, i : i + 512], past_key_values=cache, attention_mask=attention_mask(cache.span),
                position_ids=cache.span.positions, logits_to_keep=1
            )
            cache.commit([512])
    used = torch.cuda.max_memory_allocated() - before
    # (there are no graphs of prompts here, and no longer pieces)
    planned = plan.peak_bytes - plan.context_bytes - plan._graph() - plan._long(plan.chunk)
    assert 0.85 * planned <= used <= planned


def test_the_host_takes_part_in_prompts_and_in_guesses(tmp_path):
    "The encoder's blocks read a prompt; a model that only reads has no such lane; an old plan knows of no host"
    with torch.device("meta"):
        t5, llama, bert = (
            m(c)
            for m, c in (
                (tf.T5ForConditionalGeneration, tf.T5Config(**T5 | dict(num_decoder_layers=7))),
                (tf.LlamaForCausalLM, tf.LlamaConfig(**TINY)), (tf.BertForMaskedLM, tf.BertConfig(**TINY))
            )
        )
    d, host = DECODING["gpu"], lambda plan: plan._lanes("prompt", 32, not plan.encoder)[0]["host"]
    plans = [
        plan_inference(m, bits=bits, max_ctx=64, machine="h200")
        for m, bits in ((t5, None), (llama, None), (llama, 8), (bert, None))
    ]
    wanted = [4 * d.loose_s, 4 * d.block_s, 4 * (d.block_s + d.packed_s), 0]               # (T5's blocks are not fused)
    assert [host(p) for p in plans] == pytest.approx(wanted)
    assert plans[1].first_token(32) >= 4 * d.block_s and plans[1].step()[0]["host"] == 0
    alone, guessed = (1 / plans[1].tokens_per_s(checked=n, levels=0) for n in (1, 2))
    assert guessed - alone == pytest.approx(d.guess_s, rel=0.05)
    old = dataclasses.replace(
        plans[1],
        decoding={
            k: v for k, v in plans[1].decoding.items()
            if k not in ("guess_s", "draft_s", "block_s", "packed_s", "stretch_s")
        }
    )
    old.save(tmp_path / "old.json")
    assert InferencePlan.load(tmp_path / "old.json").first_token(32) < 4 * d.block_s
    # (what a graph's beginning took was one number, for blocks and tokens of any number)
    told = {k: v for k, v in plans[1].decoding.items() if not k.startswith("begin_")} | dict(begin_s=1e-3)
    dataclasses.replace(plans[1], decoding=told).save(tmp_path / "told.json")
    loaded = InferencePlan.load(tmp_path / "told.json").decoding
    assert (loaded["begin_s"], loaded["begin_block_s"], loaded["begin_token_s"]) == (1e-3, 0, 0)


def test_a_step_is_the_sum_of_what_its_kernels_take():
    "With measured kernels: bytes over a rate, a fixed time each, attention, what is between, what is outside"
    model = tf.LlamaConfig(**TINY | dict(num_attention_heads=8, num_key_value_heads=2, head_dim=8, num_hidden_layers=3))
    with torch.device("meta"): model = tf.LlamaForCausalLM(model).to(torch.bfloat16)
    found = dict(
        floats=0.9, floats_s=4e-6, int8=0.8, int8_s=3e-6, int8_16=0.4, int8_16_s=5e-6, cache=0.5, attend_s=6e-6,
        cache_packed=0.25, attend_packed_s=2e-6, kernel_s=1e-6, plain_s=2e-6, token_s=40e-6, kernels=9, joined=4)
    m = dataclasses.replace(machine("h200"), decoding=found, source="measured now")
    for bits in (None, 8):
        plan = plan_inference(model, bits=bits, max_ctx=64, machine=m)
        read, norms = sum(plan.phases["step"]["read"].values()), plan.phases["step"]["read"]["16"]
        cache = 40 * plan.cache_token_bytes / m.hbm
        seconds = lambda rows: rows / plan.tokens_per_s(rows, ctx=40)
        own = read / (0.9 * m.hbm) + cache / 0.5 + 3 * (4 * 4e-6 + 6e-6 + 4e-6)
        if bits:
            own = norms / (0.9 * m.hbm) + (read - norms) / (0.8 * m.hbm) + cache / 0.25 + 3 * (4 * 3e-6 + 2e-6)
        assert seconds(1) == pytest.approx(own + 40e-6, rel=1e-6)
        assert plan.phases["step"]["products"] == {str(bits or 16): 12} and plan.phases["step"]["more"] == 0
    slower = 3 * 4 * 2e-6 + (read - norms) / m.hbm * (1 / 0.4 - 1 / 0.8) + 16 * cache / 0.6 - cache / 0.25
    assert seconds(16) - seconds(1) == pytest.approx(slower, rel=1e-6)      # (the keys of many rows fill a GPU)
    near = 1 / plan.tokens_per_s(ctx=2047)
    m = dataclasses.replace(m, decoding=found | dict(far_s=5e-6))
    far = 1 / plan_inference(model, bits=8, max_ctx=64, machine=m).tokens_per_s(ctx=2048)
    # (another token, and what comes behind 2,048 of them)
    assert far - near == pytest.approx(3 * 5e-6 + cache / 40 / 0.25, rel=1e-3)


def test_heads_and_norms_of_their_own_are_kernels_more():
    "A norm of queries and keys, parts of a row that are summed, and norms behind attention and MLP"
    def more(cls, config, **kw):
        with torch.device("meta"): model = cls(config(**TINY | dict(head_dim=8, num_hidden_layers=3) | kw))
        step = plan_inference(model, max_ctx=64, machine="h200").phases["step"]
        return step["more"] + step["norms"]
    wide = dict(num_attention_heads=8, num_key_value_heads=1)
    assert more(tf.LlamaForCausalLM, tf.LlamaConfig, **wide) == 3
    assert more(tf.Qwen3ForCausalLM, tf.Qwen3Config, **wide) == 6
    assert more(tf.Qwen3ForCausalLM, tf.Qwen3Config, num_attention_heads=4, num_key_value_heads=2) == 3
    assert more(tf.Gemma3ForCausalLM, tf.Gemma3TextConfig, num_attention_heads=4, num_key_value_heads=2) == 3 * 3


def test_a_block_that_is_not_fused_copies_its_keys():
    "Its kernels are torch's, and keys and values are repeated for each head of queries; Phi-3's own block is fused"
    def step_of(**more):
        config = tf.Phi3Config(**TINY | dict(num_attention_heads=4, num_key_value_heads=2, pad_token_id=0) | more)
        with torch.device("meta"): model = tf.Phi3ForCausalLM(config)
        return plan_inference(model, max_ctx=64, machine="h200").phases["step"]
    assert step_of()["loose"] == 0
    step = step_of(partial_rotary_factor=0.5)
    assert step["loose"] == step["blocks"] and step["repeats"] == 2 and step["products"] == {"32": 4 * step["blocks"]}

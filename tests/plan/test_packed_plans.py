"Plans of deltas over packed bases, and the ways out that a refusal names, taken"
import re, sys
from pathlib import Path

import pytest
import torch
import transformers as tf

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "kernels"))

from bmlab.core import parse_bytes, set_seed
from bmlab.delta.lora import Lora
from bmlab.kernels.layers import pack_linears
from bmlab.models.tree import tree
from bmlab.plan.trace import trace_step
from bmlab.plan.training import plan_training
from bmlab.train.losses import lm_loss
from test_qlora import LINEAR, pair

HOW = dict(machine="h100-80", offload=None, master=None, checkpoint=0)


def test_a_plan_knows_every_packed_format():
    "Its bytes as they lie, its products as products, its name; nothing wide is kept"
    ids = torch.zeros(2, 64, dtype=torch.long)
    make = lambda m: Lora(m, r=4, modules=LINEAR, dtype=torch.float32)
    for form in ("int3", "Q4_K", "MXFP4", "float8"):
        small, wide = pair(form, torch.bfloat16, make)
        batch = {"input_ids": ids, "labels": ids}
        traces = [trace_step(m, batch, loss="chunked", dtype=torch.bfloat16) for m in (small, wide)]
        for a, b in zip(*(t.blocks.values() for t in traces)):
            assert a.saved_bytes <= b.saved_bytes
            assert (a.forward_flops, a.backward_flops) == (b.forward_flops, b.backward_flops)
        plan = plan_training(small, inputs=batch, trace=traces[0], **HOW)
        stored = sum(t.nbytes for t in (*small.parameters(), *small.buffers()))
        assert plan.parts["weights"][0] == pytest.approx(stored, rel=1e-3)
        name, = plan.notes
        assert name.startswith("QLoRA: lora over ") and name in str(plan) and name in plan._repr_html_()
        assert name in str(tree(small)) and "QLoRA" not in str(tree(wide))


def llama(**size):
    size = dict(
        hidden_size=512, intermediate_size=1408, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=4,
        vocab_size=32000, use_cache=False) | size
    with torch.device("meta"): return tf.LlamaForCausalLM(tf.LlamaConfig(**size)).bfloat16()


def refusal(*args, **options):
    with pytest.raises(ValueError, match="below the smallest feasible") as e: plan_training(*args, **options)
    ways = [w.partition(" (about ") for w in str(e.value).split("; try ")[1].split(" or ")]
    return {said: parse_bytes(re.match(r"[\d.]+\w+", price)[0]) for said, _, price in ways if price}


def test_the_ways_out_of_a_refusal_fit():
    model, how = llama(), dict(batch=32, seq=512, machine="h100-80", offload=None)
    limit = parse_bytes("1.6GiB")
    ways = refusal(model, memory_limit=limit, **how)
    chunked = plan_training(model, memory_limit=limit, loss="chunked", **how)
    assert chunked.peak_bytes <= limit and ways["loss='chunked', as lm_loss computes it"] <= limit
    few = next(int(k.removeprefix("batch=")) for k in ways if k.startswith("batch="))
    assert plan_training(model, memory_limit=limit, **how | {"batch": few}).peak_bytes <= limit
    with pytest.raises(ValueError): plan_training(model, memory_limit=limit, **how | {"batch": few + 1})


def test_a_lora_and_a_qlora_take_what_a_refusal_says():
    model, how = llama(vocab_size=2048, num_hidden_layers=6), dict(batch=1, seq=64, machine="h100-80", offload=None)
    for limit, said, bits in (("200MiB", "a Lora on the frozen model in 16 bits", None), ("310MiB", "QLoRA", 4)):
        price = next(v for k, v in refusal(model, memory_limit=limit, **how).items() if said in k)
        own = llama(vocab_size=2048, num_hidden_layers=6)
        if bits: pack_linears(own, bits=bits)
        Lora(own, r=4, modules=LINEAR).freeze()
        took = plan_training(own, memory_limit=limit, **how).peak_bytes
        assert took <= price <= parse_bytes(limit), said


def test_a_skeleton_is_planned_in_what_it_computes_in_where_its_own_width_does_not_fit():
    "`build` makes float32; without contents nothing holds the plan to it, and it says so"
    model = llama(vocab_size=2048, hidden_size=2048, intermediate_size=5632).float()
    how = dict(batch=1, seq=64, machine="h100-80")
    wide = plan_training(model, **how)
    assert not wide.notes
    thin = plan_training(model, **how, memory_limit=wide.min_bytes - 1)
    assert thin.notes == ["weights in bfloat16, since as they are built they do not fit"]
    assert all(p.dtype == torch.float32 for p in model.parameters()) and thin.peak_bytes < wide.min_bytes


def test_shard_plans_the_loss_that_runs():
    "Under `lm_loss` the logits are never whole, and fewer blocks recompute for the same limit"
    from bmlab.train.processes import init_distributed
    from bmlab.train.sharding import shard
    init_distributed(seed=0)
    ids, found = torch.zeros(2, 64, dtype=torch.long), []
    for loss in (lambda model, batch: model(**batch).loss, lm_loss):
        set_seed(0)
        model = tf.LlamaForCausalLM(tf.LlamaConfig(
            hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=4,
            vocab_size=20000)).bfloat16()
        shard(model, memory_limit="150MiB")
        loss(model, {"input_ids": ids, "labels": ids}).backward()
        found.append(model.sharding.plan.parts["logits and embeddings"][0])
    assert found[1] < 0.6 * found[0]

"""Compiled blocks that keep a share of their activations: the same gradients, as many bytes as planned, and the plan's
choice of the share. The oracles are the model without any of this, and hooks that count what autograd keeps."""
import contextlib, copy, dataclasses, threading, weakref

import numpy as np
import pytest
import torch
import transformers as tf
from torch import nn

from bmlab.core import find_blocks
from bmlab.delta.lora import Lora
from bmlab.plan.fusion import fuse_blocks, keeping
from bmlab.plan.machine import MATMUL, OP, machine, op_seconds
from bmlab.plan.timeline import TrainingPlan
from bmlab.plan.trace import trace_step
from bmlab.plan.training import plan_training, weight_groups
from bmlab.train import losses
from bmlab.train.fp8 import fp8
from bmlab.train.long import ActivationOffload
from bmlab.train.losses import lm_loss
from bmlab.train.sharding import shard

BACKEND = "aot_eager_decomp_partition"       # torch's partitioner, without a compiler of kernels


def llama(device="cpu", layers=3, **size):
    torch.manual_seed(0)
    config = tf.LlamaConfig(**dict(
        hidden_size=64, num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2, intermediate_size=192,
        vocab_size=128, use_cache=False) | size)
    with torch.device(device): return tf.LlamaForCausalLM(config)


@pytest.fixture(scope="module")
def ids(): return torch.randint(0, 128, (2, 64), generator=torch.Generator().manual_seed(0))


def step(model, ids):
    "Gradients, and the bytes that autograd keeps of one forward beside the weights"
    weights, seen = {p.untyped_storage().data_ptr() for p in model.parameters()}, {}
    def pack(t):
        if t.untyped_storage().data_ptr() not in weights:
            seen[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        loss = lm_loss(model, {"input_ids": ids, "labels": ids})
    loss.backward()
    return [p.grad for p in model.parameters()], sum(seen.values())


def test_gradients_are_the_models_and_bytes_fall_with_the_budget(ids):
    plain = llama()
    want, _ = step(copy.deepcopy(plain), ids)
    kept = []
    for how in (dict(checkpoint=0), dict(budget=0.6), dict(budget=0.3), dict(budget=0.1), dict(budget=0.0)):
        model = shard(copy.deepcopy(plain), dtype=None, compile=BACKEND, **dict(checkpoint=True) | how)
        got, bytes_ = step(model, ids)
        for g, w in zip(got, want): torch.testing.assert_close(g, w, rtol=1e-5, atol=1e-6)
        kept.append(bytes_)
    assert kept == sorted(kept, reverse=True) and len(set(kept)) == len(kept)


@pytest.mark.parametrize("budget", [0.5, 0.2])
def test_a_block_keeps_what_was_planned(ids, budget):
    model = llama()
    trace = trace_step(model, {"input_ids": ids, "labels": ids})
    planned = [fuse_blocks(trace, dict.fromkeys(find_blocks(model), b)).blocks for b in (1.0, budget)]
    planned = sum(b.saved_bytes + b.input_bytes for b in planned[0].values()) - sum(
        b.saved_bytes + b.input_bytes for b in planned[1].values())
    whole = step(shard(copy.deepcopy(model), dtype=None, compile=BACKEND, checkpoint=0), ids)[1]
    less = step(shard(copy.deepcopy(model), dtype=None, compile=BACKEND, checkpoint=True, budget=budget), ids)[1]
    # (attention on a CPU is another operation than the one that a GPU's plan has)
    assert (whole - less) == pytest.approx(planned, rel=0.1)


def big(lora=True):
    size = dict(hidden_size=1024, intermediate_size=4096, num_attention_heads=8, vocab_size=1024)
    model = llama("meta", 4, **size).bfloat16()
    if lora: Lora(model, r=8, modules="all-linear").freeze()
    return model


def test_a_plan_keeps_a_share_where_that_is_faster():
    model, how = big(), dict(batch=4, seq=1024, loss="chunked", compile=True, machine="h100-80")
    how |= dict(offload=None, master=None)
    free = plan_training(model, **how)
    assert (free.recompute, free.budget) == (0, 0.0)
    limit = int(0.65 * free.peak_bytes)
    whole = plan_training(model, **how, memory_limit=limit, budget=0.0)
    some = plan_training(model, **how, memory_limit=limit)
    assert some.budget > 0 and some.recompute and some.peak_bytes <= limit >= whole.peak_bytes
    assert free.step_s < some.step_s < 0.99 * whole.step_s
    assert f"all but {some.budget:.0%}" in str(some) and some.phases["recompute"] < whole.phases["recompute"]
    # what was chosen, asked for
    again = plan_training(model, **how, memory_limit=limit, checkpoint=some.recompute, budget=some.budget)
    assert (again.peak_bytes, again.step_s) == (some.peak_bytes, some.step_s)
    assert int(some.timeline().planned.sum(axis=1).max()) == pytest.approx(some.peak_bytes, rel=1e-6)


def test_a_plan_with_a_share_is_kept_in_a_file(tmp_path):
    how = dict(compile=True, offload=None, master=None, machine="h100-80", checkpoint=2, budget=0.3)
    plan = plan_training(big(), 4, 1024, **how)
    plan.save(tmp_path / "plan.json")
    assert TrainingPlan.load(tmp_path / "plan.json").budget == 0.3


def test_full_training_under_a_limit_keeps_it_with_a_share():
    model, how = big(lora=False), dict(batch=8, seq=1024, loss="chunked", compile=True, machine="h100-80")
    free = plan_training(model, **how)
    limit = int(0.9 * free.peak_bytes)
    plan = plan_training(model, **how, memory_limit=limit)
    never = plan_training(model, **how, memory_limit=limit, budget=0.0)
    assert plan.peak_bytes <= limit and plan.budget > 0 and plan.step_s < never.step_s


def test_shard_by_plan_sets_the_share(ids):
    model = llama()
    sharded = shard(copy.deepcopy(model), dtype=None, compile=BACKEND, checkpoint=0)
    s = sharded.sharding
    s.set_recompute(2, 0.4)
    assert (s.recompute, s.budget) == (2, 0.4) and "2 but 40%" in repr(s)
    s.set_recompute(2)
    assert s.budget == 0.0
    by_hand = dict(memory_limit=None, checkpoint="auto", compile=BACKEND, dtype=None)
    assert shard(copy.deepcopy(model), **by_hand).sharding.kept == "auto"


def test_a_limit_is_met_by_a_share_in_training(ids):
    "`shard(checkpoint='auto')` plans at its first forward, and takes the share that the plan found"
    model = llama(hidden_size=128, intermediate_size=512)
    Lora(model, r=2, modules="all-linear").freeze()
    ids = ids.repeat(8, 1)
    limits = trace_step(model, {"input_ids": ids, "labels": ids})
    free = plan_training(model, inputs={"input_ids": ids, "labels": ids}, trace=limits, compile=True, dtype=None,
                         offload=None, master=None, machine="h200")
    limit = (free.peak_bytes + free.min_bytes) // 2
    sharded = shard(copy.deepcopy(model), dtype=None, compile=BACKEND, memory_limit=limit)
    lm_loss(sharded, {"input_ids": ids, "labels": ids}).backward()
    s = sharded.sharding
    assert s.recompute == s.plan.recompute > 0 and s.budget == s.plan.budget


@pytest.mark.parametrize("how, says", [
    (dict(budget=0.3), "compile=False"), (dict(budget=1.5, compile=True), "0 to 1"),
    (dict(budget=0.3, compile=True, move=True), "move=True"), (dict(budget="all", compile=True), "'auto' or a share")])
def test_a_share_that_cannot_be(how, says):
    with pytest.raises(ValueError, match=says): plan_training(llama("meta"), 1, 32, **how)
    with pytest.raises(ValueError, match=says): shard(llama(), dtype=None, checkpoint=True, **how)


def test_the_head_is_there_after_a_trace_with_the_chunked_loss(ids):
    "Plans with weights on the host count what the traced skeleton has"
    model = llama("meta")
    trace = trace_step(model, {"input_ids": ids, "labels": ids}, loss="chunked")
    held = lambda m: sum(g.elements for g in weight_groups(m, list(find_blocks(model))).values())
    assert held(trace.module) == held(model)
    how = dict(machine="h200", offload=0.0, host=1.0, inputs={"input_ids": ids, "labels": ids})
    full, chunked = (plan_training(model, loss=l, **how).parts["weights"][0] for l in (None, "chunked"))
    assert full == chunked


def test_no_chunk_of_logits_is_left_when_the_next_is_made(monkeypatch):
    "What was made of a chunk dies before the next one"
    made, usual, rows = [], losses._logits, losses.cross_entropy_rows
    def logits(*args):
        assert not [r for r in made if r() is not None]
        z, out = usual(*args)
        made.append(weakref.ref(z))
        return z, out
    def each(*args):
        loss, d = rows(*args)
        made.append(weakref.ref(d))
        return loss, d
    monkeypatch.setattr(losses, "_logits", logits)
    monkeypatch.setattr(losses, "cross_entropy_rows", each)
    h, w = torch.randn(12, 8, requires_grad=True), torch.randn(20, 8, requires_grad=True)
    losses.chunked_cross_entropy(h, w, torch.arange(12), chunk=4).backward()
    assert len(made) == 6


def test_a_mask_with_steps_is_traced_by_the_formula():
    "As T5 makes its bias: heads innermost. No fused kernel takes it, and the scores are kept"
    class Biased(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.bias, self.inner = nn.Parameter(torch.zeros(32, 32, 4) if inner else torch.zeros(4, 32, 32)), inner
        def forward(self, x):
            bias = self.bias.permute(2, 0, 1) if self.inner else self.bias
            return nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=bias[None])
    x = torch.empty(2, 4, 32, 16, requires_grad=True)
    kept = [trace_step(nn.Sequential(Biased(i), Biased(i)), (x,)).blocks["0"].saved_bytes for i in (False, True)]
    scores = 2 * 4 * 32 * 32 * 4
    assert kept[0] < scores <= kept[1]


def test_a_plan_of_compiled_blocks_knows_float8():
    how = dict(batch=8, seq=1024, compile=True, checkpoint=0, machine="h100-80", loss="chunked")
    model = big(lora=False)
    wide = plan_training(model, **how)
    fp8(model, "layers[:]", 8192, "h100-80")
    narrow = plan_training(model, **how)
    assert narrow.step_s < 0.95 * wide.step_s


def test_products_of_float8_take_its_rate():
    m = machine("h100-80")
    row = lambda item: (MATMUL, 1, 8192, 8192, 8192, 2.0 * 8192**3, 0.0, item, 1)
    bf16, f8 = (op_seconds(np.array([row(i)], OP), m)[0] for i in (2, 1))
    assert bf16 / f8 == pytest.approx(m.fp8 / m.flops, rel=0.1)


def test_a_host_that_issues_slowly_is_waited_for():
    slow = dataclasses.replace(machine("h100-80"), issue_s=1e-4)
    step_s = lambda m: plan_training(llama("meta"), 1, 32, machine=m, offload=0.0).step_s
    fast, late = step_s(machine("h100-80")), step_s(slow)
    assert late > 5 * fast


def test_what_a_share_changes_in_torch_is_there_for_it_alone():
    from torch._functorch import config, partitioners
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    inside, done, seen = threading.Event(), threading.Event(), []
    def other():
        with keeping(0.5):
            inside.set()
            done.wait(30)
    def costly(): return attention in partitioners.get_default_op_list().compute_intensive_ops
    thread = threading.Thread(target=other)
    thread.start()
    inside.wait(30)
    with contextlib.suppress(ZeroDivisionError), keeping(0.25):
        seen += [costly(), config.activation_memory_budget]
        done.set()
        thread.join()
        1 / 0
    assert seen == [True, 0.25] and not costly() and config.activation_memory_budget == 1.0
    assert not torch.compiler.is_compiling()


def test_a_share_that_does_not_fit_is_not_the_least_there_is():
    model, how = big(), dict(batch=8, seq=1024, compile=True, offload=None, master=None, machine="h100-80")
    whole = plan_training(model, **how, checkpoint=True)
    with pytest.raises(ValueError, match="try budget='auto'"):
        plan_training(model, **how, checkpoint=True, budget=0.9, memory_limit=whole.peak_bytes)


def test_inputs_are_not_moved_from_blocks_that_keep_a_share():
    s = shard(llama(), dtype=None, compile=BACKEND, checkpoint=2, budget=0.4).sharding
    with pytest.raises(ValueError, match="budget=0.4 with move"): s.set_away(ActivationOffload())

"A delta over packed weights: the steps of the widened weights bit for bit, and nothing wide is kept"
import copy, weakref

import pytest
import torch
import transformers as tf
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bmlab.delta.adapter import Adapter, Compacter, ParallelAdapter
from bmlab.delta.lora import Lora
from bmlab.delta.prefix import Prefix
from bmlab.delta.vectors import IA3, BitFit, LayerNormTuning
from bmlab.kernels import codes as packed
from bmlab.kernels.float8 import Float8Linear
from bmlab.kernels.ggml import BLOCKS, GGMLLinear, _any_blocks
from bmlab.kernels.layers import Int4Linear, Int8Linear
from bmlab.kernels.low_bits import LowBitLinear
from bmlab.train.losses import lm_loss

LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
IDS = torch.randint(0, 128, (2, 20), generator=torch.Generator().manual_seed(2))
DELTAS = {
    "lora": lambda m: Lora(m, r=4, modules=LINEAR),
    "dora": lambda m: Lora(m, r=4, modules=LINEAR, dora=True, dropout=0.1),
    "adapter": Adapter, "parallel": ParallelAdapter, "compacter": Compacter, "ia3": IA3, "bitfit": BitFit,
    "norms": LayerNormTuning, "prefix": lambda m: Prefix(m, length=3)}


def in_blocks(linear, kind):
    N, K = linear.weight.shape
    new = GGMLLinear(K, N, bias=False, kind=kind, device="meta")
    new._put(_any_blocks(kind, N, K // BLOCKS[kind].weights))
    return new


def in_float8(linear):
    scale = torch.rand(linear.weight.shape[0] // 64, linear.weight.shape[1] // 64) / 100 + 1e-3
    wide = scale.repeat_interleave(64, 0).repeat_interleave(64, 1)
    return Float8Linear.from_tensors((linear.weight.detach().float() / wide).to(torch.float8_e4m3fn), scale, (64, 64))


FORMATS = {
    "int8": Int8Linear.from_float, "int4": Int4Linear.from_float, "float8": in_float8,
    "int3": lambda m: LowBitLinear.from_float(m, bits=3), "int2": lambda m: LowBitLinear.from_float(m, bits=2),
    **{kind: lambda m, kind=kind: in_blocks(m, kind) for kind in BLOCKS}}


def pair(form, dtype, make):
    "(packed model, the same with the widened weights), each under a delta of its own with the same numbers"
    torch.manual_seed(0)
    wide = tf.LlamaForCausalLM(tf.LlamaConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=128, use_cache=False, tie_word_embeddings=False)).to(dtype)
    small = copy.deepcopy(wide)
    for n, m in wide.named_modules():
        if not isinstance(m, nn.Linear): continue
        new = FORMATS[form](m)
        owner, _, child = n.rpartition(".")
        small.get_submodule(owner)._modules[child] = new
        m.weight = nn.Parameter(new.dequantize(dtype))
    for m in (small, wide):
        torch.manual_seed(1)
        d = make(m).freeze()
        with torch.no_grad(): [p.copy_(torch.randn(p.shape) * 0.05 + p) for p in d.parameters()]
    # beside packed weights the delta is in float32
    for p, q in zip(*[(p for p in m.parameters() if p.requires_grad) for m in (small, wide)]): q.data = p.data.clone()
    return small.train(), wide.train()


class Live(TorchDispatchMode):
    "The largest storage and the most bytes that live at once, beside those there before"
    def __init__(self, fixed):
        super().__init__()
        self.seen, self.now, self.peak, self.sizes = {t.untyped_storage()._cdata for t in fixed}, 0, 0, []
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if not isinstance(t, torch.Tensor) or (key := t.untyped_storage()._cdata) in self.seen: continue
            size = t.untyped_storage().nbytes()
            self.seen.add(key)
            self.now += size
            self.sizes.append(size)
            def gone(_, key=key, size=size):
                self.seen.discard(key)
                self.now -= size
            weakref.finalize(t.untyped_storage(), gone, None)
        self.peak = max(self.peak, self.now)
        return out


def a_step(model):
    "Loss, gradients by name, and the storages that wait between forward and backward beside those of the model"
    model.zero_grad()
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    held = {}
    def note(t):
        if (key := t.untyped_storage().data_ptr()) not in own: held[key] = t.untyped_storage().nbytes()
        return t
    torch.manual_seed(3)                                                                      # of dropout
    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        loss = lm_loss(model, {"input_ids": IDS, "labels": IDS})
    loss.backward()
    return loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}, held


def check(form, delta, dtype):
    (loss, grads, held), (want_loss, want, want_held) = map(a_step, pair(form, dtype, DELTAS[delta]))
    assert torch.isfinite(loss) and torch.equal(loss, want_loss) and grads.keys() == want.keys() and grads
    for n in want: assert torch.equal(grads[n], want[n]), n
    assert any(g.any() for g in grads.values())
    assert sum(held.values()) <= sum(want_held.values())
    # a widened matrix of this model has at least 128 · 256 weights; of activations nothing is so large
    assert max(held.values()) < 128 * 256 * dtype.itemsize or max(held.values()) <= max(want_held.values())


@pytest.mark.parametrize("form, dtype", zip(FORMATS, [torch.bfloat16, torch.float32] * 6))
def test_a_lora_over_any_packed_format_learns_as_over_the_widened_weights(form, dtype, recwarn):
    check(form, "lora", dtype)
    # whatever the format of the head, its logits are never whole
    assert not [w for w in recwarn if "lm_loss" in str(w.message)]


@pytest.mark.parametrize("delta", [d for d in DELTAS if d != "lora"])
def test_any_delta_learns_over_packed_weights(delta):
    check("int4", delta, torch.float32)
    # (the norms of a DoRA are those of the weight as it is stored: of codes they are exact, of bfloat16 they are not)
    check("MXFP4", delta, torch.float32 if delta == "dora" else torch.bfloat16)


@pytest.mark.parametrize("form", FORMATS)
def test_a_large_matrix_is_widened_a_piece_at_a_time(form, monkeypatch):
    "Forward and backward: the numbers of the whole; never more of it at once than a piece"
    torch.manual_seed(0)
    layer = FORMATS[form](nn.Linear(512, 1024, bias=False)).train()
    x = torch.randn(40, 512)
    want = x.clone().requires_grad_()
    y = nn.functional.linear(want, layer.dequantize(torch.float32))
    g = torch.randn_like(y)
    y.backward(g)
    monkeypatch.setattr(packed, "PIECE_BYTES", 600_000)
    got = x.clone().requires_grad_()
    with Live([got, g, *layer.buffers()]) as live:
        out = layer(got)
        out.backward(g)
    assert torch.equal(out, y) and torch.equal(got.grad, want.grad)
    assert max(live.sizes) <= max(600_000, y.nbytes)

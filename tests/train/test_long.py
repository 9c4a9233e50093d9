"Long rows: tiles and moved activations change no gradient, documents do not meet, two ranks share a row; all planned."
import copy

import pytest
import torch
import torch.distributed as dist
import transformers as tf
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bmlab.core import find_blocks, set_seed
from bmlab.data.batches import document_mask
from bmlab.plan import trace as trace_room
from bmlab.delta.lora import Lora
from bmlab.plan.trace import lifetimes, occupancy, trace_step
from bmlab.plan.training import plan_training
from bmlab.train.long import _by_document, _varlen, document_attention, tile
from bmlab.train.loop import fit
from bmlab.train.losses import lm_loss
from bmlab.train.processes import init_distributed, run_ranks
from bmlab.train.sharding import shard
from live import Live

SMALL = dict(hidden_size=32, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, vocab_size=99)
NO_DROPOUT = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)


def llama(heads=2, **kw): return tf.LlamaForCausalLM(tf.LlamaConfig(**SMALL | dict(num_key_value_heads=heads) | kw))


def gpt2(**kw):
    return tf.GPT2LMHeadModel(tf.GPT2Config(n_embd=32, n_layer=3, n_head=4, vocab_size=99, n_positions=64, **kw))


def t5():
    size = dict(d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, vocab_size=99, dropout_rate=0.0)
    return tf.T5ForConditionalGeneration(tf.T5Config(**size, decoder_start_token_id=0))


def ids(*shape): return torch.randint(1, 99, shape, generator=torch.Generator().manual_seed(0))


def gradients(model, loss=None, **batch):
    model.zero_grad()
    value = model(**batch).loss if loss is None else loss(model, batch)
    value.backward()
    whole = lambda g: g.full_tensor() if hasattr(g, "full_tensor") else g
    return value.detach(), {n: whole(p.grad).clone() for n, p in model.named_parameters() if p.grad is not None}


def farthest(a, b):
    (x, g), (y, h) = a, b
    assert g.keys() == h.keys()
    return max(abs(x - y).item(), *((g[n] - h[n]).abs().max().item() for n in g))


@pytest.mark.parametrize("make", [llama, lambda: gpt2(**NO_DROPOUT), t5], ids=["llama", "gpt2", "t5"])
def test_tiles_equal_the_whole(make):
    "In float64, where what differs is wrong: any length, with and without the input's gradient"
    set_seed(0)
    whole = make().double()
    batch = {"input_ids": ids(2, 23), "labels": ids(2, 23)}
    expected = gradients(whole, **batch)
    for length in (1, 5, 22, 23):
        tiled = tile(copy.deepcopy(whole), length)
        assert farthest(gradients(tiled, **batch), expected) < 1e-12
    found = [m for m in tiled.modules() if hasattr(m, "tile_length")]
    assert len(found) == len(find_blocks(whole)) and all(type(m).__name__ in type(m).__mro__[1].__name__ for m in found)
    assert farthest(gradients(tile(tiled, None), **batch), expected) == 0
    # other position-wise modules by pattern
    norm = {"llama": "*norm", "gpt2": "ln_1", "t5": "layer_norm"}[whole.config.model_type]
    assert farthest(gradients(tile(copy.deepcopy(whole), 7, modules=norm), **batch), expected) < 1e-12


def test_tiles_with_deltas_recomputation_and_dropout():
    set_seed(0)
    whole = llama()
    for m in (whole, tiled := tile(copy.deepcopy(whole), 6)):
        set_seed(1)
        Lora(m, r=4, modules=["*proj"]).freeze()
        for n, p in m.named_parameters():
            if n.endswith("B"): nn.init.normal_(p, generator=torch.Generator().manual_seed(2))
    batch = {"input_ids": ids(2, 20), "labels": ids(2, 20)}
    whole, tiled = whole.double(), tiled.double()
    expected = gradients(whole, **batch)
    assert farthest(gradients(tiled, **batch), expected) < 1e-12
    calls = []
    tiled.model.layers[1].mlp.up_proj.register_forward_hook(lambda *a: calls.append(a[1][0].shape[-2]))
    init_distributed(seed=None)
    shard(tiled, dtype=None, checkpoint=True)
    assert farthest(gradients(tiled, **batch), expected) < 1e-12
    # forward, and once more in backward: the block that recomputes stops in front of its MLP
    assert calls == [6, 6, 6, 2] * 2
    # dropout draws the same numbers again: a step against autograd's own differences
    set_seed(0)
    noisy = tile(gpt2(resid_pdrop=0.5, embd_pdrop=0.0, attn_pdrop=0.0).double(), 4)
    noisy.train()
    w, batch = noisy.transformer.h[0].mlp.c_fc.bias, {"input_ids": ids(1, 10)}
    def value():
        set_seed(5)
        return noisy(**batch).logits.square().mean()
    value().backward()
    step = torch.zeros_like(w).index_fill_(0, torch.tensor([3]), 1e-5)
    with torch.no_grad():
        w += step
        up = value()
        w -= 2 * step
    assert ((up - value()) / 2e-5).item() == pytest.approx(w.grad[3].item(), rel=1e-5)


def test_moved_inputs_come_back_bit_for_bit():
    set_seed(0)
    kept, moved = (shard(llama(), dtype=None, checkpoint=True, move=m) for m in (False, True) if not set_seed(0))
    away = moved.sharding.away
    for rows in (ids(2, 16), ids(2, 16).flip(0), ids(1, 30)):
        batch = {"input_ids": rows, "labels": rows}
        assert farthest(gradients(moved, **batch), gradients(kept, **batch)) == 0
    size = 4 * 32
    # three blocks' inputs of each shape, taken anew for another; none is held after backward
    assert away.host_bytes == 3 * size * (32 + 30) and sum(map(len, away.rooms.values())) == 6
    # two micro-batches in flight
    model = lambda m, b: m(input_ids=b, labels=b).loss + m(input_ids=b.flip(0), labels=b).loss
    a, b = (gradients(m, lambda m, _: model(m, ids(2, 16))) for m in (kept, moved))
    assert farthest(a, b) == 0
    with pytest.raises(ValueError, match="move=True moves what recomputed blocks keep"):
        shard(llama(), dtype=None, checkpoint=False, move=True)


ENDS = [[(0, 7), (7, 20)], [(0, 1), (1, 12), (12, 20)]]      # documents of two rows of 20


def packed():
    rows, positions = ids(2, 20), torch.zeros(2, 20, dtype=torch.long)
    labels = rows.clone()
    for b, spans in enumerate(ENDS):
        for i, j in spans: positions[b, i:j], labels[b, i] = torch.arange(j - i), -100
    return {"input_ids": rows, "labels": labels, "position_ids": positions, "use_cache": False}


def test_documents_do_not_meet():
    "The gradients of a packed batch are those of its documents, each run by itself"
    set_seed(0)
    plain = llama().double()
    batch = packed()
    alone = [batch["input_ids"][b:b + 1, i:j] for b, spans in enumerate(ENDS) for i, j in spans if j - i > 1]
    def one_by_one(m, _):
        counts = [d.numel() - 1 for d in alone]
        return sum(m(input_ids=d, labels=d).loss * n for d, n in zip(alone, counts)) / sum(counts)
    expected = gradients(plain, one_by_one)
    model = document_attention(copy.deepcopy(plain))
    # (transformers computes the loss in float32)
    assert farthest(gradients(model, **batch), expected) < 1e-6
    shapes = []
    class Shapes(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            shapes.extend(tuple(t.shape) for t in tree_leaves(out) if isinstance(t, torch.Tensor))
            return out
    with Shapes(): model(**batch)
    assert not any(s[-2:] == (20, 20) for s in shapes)
    # rows of one document each, and transformers' own mask for the packed ones
    rows = {k: batch[k] for k in ("input_ids", "labels")}
    assert farthest(gradients(model, **rows), gradients(plain, **rows)) < 1e-12
    assert farthest(gradients(plain, **batch), expected) < 1e-6
    mask = document_mask(batch["position_ids"])
    assert mask.sum() == sum((j - i) * (j - i + 1) // 2 for spans in ENDS for i, j in spans)


def _grouped(
        query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1), enable_gqa=False):
    "Stands in for torch's kernel, which has no CPU"
    assert window_size == (-1, 0) and (enable_gqa or query.shape[1] == key.shape[1])
    ends = cu_seq_q.tolist()
    part = lambda x, a, b: x[a:b].transpose(0, 1)[None]
    return torch.cat([
        F.scaled_dot_product_attention(*(part(x, a, b) for x in (query, key, value)), is_causal=True, scale=scale,
                                       enable_gqa=enable_gqa)[0].transpose(0, 1) for a, b in zip(ends, ends[1:])])


def _ungrouped(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1)):
    "torch 2.11's takes groups of heads without a word"
    how = dict(scale=scale, window_size=window_size, enable_gqa=True)
    return _grouped(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, **how)


@pytest.mark.parametrize("kernel", [_grouped, _ungrouped], ids=["torch 2.13", "torch 2.11"])
def test_groups_of_heads_by_either_torch(kernel, monkeypatch):
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", kernel)
    q, bounds = torch.randn(20, 8, 16), torch.tensor([0, 7, 20], dtype=torch.int32)
    for heads in (8, 2):
        k, v = torch.randn(20, heads, 16), torch.randn(20, heads, 16)
        out = _varlen(q, k, v, bounds, 13, 0.25)
        row = lambda x: x.transpose(0, 1)[None]
        want = _by_document(row(q), row(k), row(v), bounds, 13, 0.0, 0.25)
        assert torch.allclose(row(out), want, atol=1e-6)


def test_what_documents_are_refused_for():
    model = document_attention(llama())
    with pytest.raises(ValueError, match="pack rows without padding"):
        model(input_ids=ids(1, 4), attention_mask=torch.tensor([[0, 1, 1, 1]]))
    with pytest.raises(ValueError, match="each row begins with a document"):
        model(input_ids=ids(1, 4), position_ids=torch.arange(1, 5)[None])
    mistral = tf.MistralForCausalLM(tf.MistralConfig(**SMALL, num_key_value_heads=2, sliding_window=8))
    with pytest.raises(ValueError, match="a sliding window"): document_attention(mistral)(input_ids=ids(1, 9))
    with pytest.raises(TypeError, match="transformers' table"): document_attention(nn.Linear(2, 2))
    with pytest.raises(LookupError, match="name position-wise modules"): tile(nn.Sequential(nn.Linear(2, 2)), 4)
    with pytest.raises(ValueError, match="length=0"): tile(llama(), 0)


CASES = {"grouped": 2, "one key head": 1, "as many": 4}


def saved_bytes(model, **batch):
    "What autograd keeps for backward, each storage once, weights left out"
    own, seen = {p.untyped_storage()._cdata for p in (*model.parameters(), *model.buffers())}, {}
    def pack(t):
        seen[t.untyped_storage()._cdata] = t
        return t
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t): model(**batch)
    return sum(t.untyped_storage().nbytes() for k, t in seen.items() if k not in own)


def shared_rows(W):
    "Losses and gradients of every case on this rank's model; a run; what autograd keeps"
    out = {}
    for name, heads in CASES.items():
        set_seed(0)
        model = llama(heads, num_hidden_layers=2).double()
        if name == "as many": tile(document_attention(model), 3)
        if W > 1: shard(model, dtype=None, cp=W, checkpoint=1, move=name == "grouped")
        batch = packed()
        if name == "grouped": batch = {k: batch[k] for k in ("input_ids", "labels")}
        elif W == 1: document_attention(model)
        out[name] = gradients(model, lm_loss if name == "one key head" else None, **batch)
    log = fit(model, [packed()], torch.optim.AdamW(model.parameters(), lr=1e-2), steps=2, plot=False)
    return out, log


def on_ranks():
    out, log = shared_rows(2)
    plain = shard(llama(4), dtype=None, cp=2, checkpoint=False)
    kept, said = saved_bytes(plain, input_ids=ids(2, 128), labels=ids(2, 128), use_cache=False), []
    other = shard(llama(), dtype=None, cp=2, checkpoint=False)
    for rows in (ids(2, 20) + dist.get_rank(), ids(2, 21)):
        try: other(input_ids=rows % 99)
        except ValueError as e: said.append(str(e))
    for kw in (dict(cp=3), dict(cp=2, tp=2)):
        try: shard(llama(), dtype=None, **kw)
        except ValueError as e: said.append(str(e))
    return out, log, kept, said


def test_two_ranks_that_share_rows_equal_one():
    (one, log), rows = shared_rows(1), ids(2, 64)
    trace = trace_step(llama(4), {"input_ids": rows, "labels": rows, "use_cache": False}, cp=2)
    saved = lambda l: l.kind != "gradient" and any(trace.segments[c].forward for c in l.claims)
    planned = sum(l.bytes for l in trace.lives if saved(l))
    for two, theirs, kept, (others, odd, three, both) in run_ranks(on_ranks):
        for name in CASES: assert farthest(two[name], one[name]) < 1e-6, name
        assert torch.allclose(torch.tensor(theirs.loss), torch.tensor(log.loss), atol=1e-6)
        assert planned == pytest.approx(kept, rel=0.05)
        assert "got others" in others and "rank() // 2" in others
        assert "21 tokens do not divide by 2" in odd and "a divisor of the number of ranks" in three
        assert "neither tp= nor mesh=" in both


@pytest.mark.parametrize("length", [128, 256])
@pytest.mark.parametrize("tiles,move", [(None, False), (64, False), (64, True)], ids=["whole", "tiles", "moved"])
def test_the_plan_tells_what_a_long_row_takes(length, tiles, move, monkeypatch):
    "Peak of one real step on the CPU against the plan's"
    # (what a GPU's attention takes for itself in backward, a CPU's does not; its kernel of float32 repeats key heads)
    cost = trace_room._attention_cost
    monkeypatch.setattr(trace_room, "_attention_cost", lambda *args: (cost(*args)[0], 0))
    set_seed(0)
    model = llama(4, num_hidden_layers=4, intermediate_size=256)
    Lora(model, r=4, modules=["*proj"]).freeze()
    tile(model, tiles)
    rows = ids(1, length)
    batch = {"input_ids": rows, "labels": rows}
    trace = trace_step(model, batch | {"use_cache": False}, loss="chunked")
    names = list(trace.blocks)
    line = lifetimes(trace, names, move)
    init_distributed(seed=None)
    shard(model, dtype=None, checkpoint=True, move=move)
    with Live([*model.parameters(), *model.buffers(), rows]) as live: lm_loss(model, batch).backward()
    host = model.sharding.away.host_bytes if move else 0
    planned = occupancy(line, line.kind != 3).max()
    assert planned == pytest.approx(live.peak - host, rel=0.05)
    assert not move or host == 4 * 32 * length * 4


def test_auto_moves_inputs_where_recomputing_alone_does_not_fit():
    deep = lambda: llama(num_hidden_layers=5)
    model, batch = deep(), {"input_ids": ids(8, 64), "labels": ids(8, 64)}
    trace = trace_step(model, batch)
    ask = lambda **how: plan_training(
        model, inputs=batch, trace=trace, dtype=None, machine="h200", offload=0.0, **how)
    alone, moved = (ask(checkpoint=True, move=m).peak_bytes for m in (False, True))
    limit = (alone + moved) // 2
    assert moved < limit < alone
    with pytest.raises(ValueError, match="below the smallest"): ask(memory_limit=limit)
    plan = ask(memory_limit=limit, move="auto")
    assert plan.settings["move"] and "recomputing alone does not fit; with inputs moved to the host" in plan.notes[0]
    assert not ask(memory_limit="10GiB", move="auto").settings["move"]
    sizes = limit, "10GiB"
    model, twin = (shard(deep(), dtype=None, memory_limit=n, move="auto") for n in sizes if not set_seed(0))
    assert farthest(gradients(model, **batch), gradients(twin, **batch)) == 0
    away = model.sharding.away
    assert away is not None and away.host_bytes > 0 and "inputs moved" in repr(model.sharding)
    assert twin.sharding.away is None and twin.sharding.recompute == 0
    with pytest.raises(ValueError, match="move='often'"): shard(deep(), dtype=None, move="often")


def test_documents_and_a_cache_of_keys():
    "Said, not computed with the wrong keys hidden"
    torch.manual_seed(0)
    m = document_attention(tf.LlamaForCausalLM(tf.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=99))).eval()
    ids = torch.randint(1, 99, (1, 8))
    out = m(input_ids=ids, use_cache=True)
    with pytest.raises(ValueError, match="set_attn_implementation"): m(ids[:, :1], past_key_values=out.past_key_values)
    with pytest.raises(ValueError, match="set_attn_implementation"): m.generate(ids, max_new_tokens=4, pad_token_id=0)


def test_an_mlp_that_is_called_by_its_arguments_name():
    class Mlp(nn.Module):
        def __init__(self):
            super().__init__()
            self.up_proj, self.down_proj = nn.Linear(16, 32), nn.Linear(32, 16)
        def forward(self, hidden_states): return self.down_proj(torch.relu(self.up_proj(hidden_states)))
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.mlp = Mlp()
        def forward(self, h): return h + self.mlp(hidden_states=h)
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([Block() for _ in range(3)])
        def forward(self, x):
            for layer in self.layers: x = layer(x)
            return x
    torch.manual_seed(0)
    net, x = Net(), torch.randn(2, 12, 16)
    want = net(x)
    assert torch.allclose(tile(net, 4)(x), want, atol=1e-6)
    assert torch.allclose(tile(net, 8)(x), want, atol=1e-6)             # and again, by others
    assert torch.equal(tile(net, None)(x), want)

"2:4 sparsity: oracles, recipes, sharding, compiled training, files, tensor cores, what distillation gives back."
import copy, itertools, math, pickle, warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import toys
import transformers as tf
from torch import nn

from bmlab.cook.cook import Cook, Method
from bmlab.cook.chain import chain, stored
from bmlab.cook.report import load_cooked, save_cooked
from bmlab.core import parts, resolve, set_seed
from bmlab.train.processes import run_ranks
from bmlab.cook.fakequant import FakeQuant
from bmlab.kernels.layers import pack_linears
from bmlab.cook.sparse24 import (Sparse24, Sparse24Linear, arrange24, compress24, expand24, input_norms, is24, pack24,
                                 pick24, sparsegpt24, unpack24)
from fresh import fresh_python

ROOT = Path(__file__).resolve().parents[2]
ROWS = torch.randint(0, 99, (6, 4, 12), generator=torch.Generator().manual_seed(0))
CALIB = [{"input_ids": r, "labels": r} for r in ROWS[:2]]


def llama(**kw):
    set_seed(0)
    return tf.LlamaForCausalLM(tf.LlamaConfig(**dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                                                     num_attention_heads=4, num_key_value_heads=2,
                                                     vocab_size=99) | kw)).eval()


def gpt2():
    set_seed(0)
    return tf.GPT2LMHeadModel(tf.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=99, n_positions=32,
                                            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)).eval()


def logits(model, ids=ROWS[0]):
    with torch.no_grad(): return model.eval()(ids).logits


def train(model, cook, rows=ROWS, opt=None, start=0):
    "AdamW with weight decay; the losses"
    opt, losses = opt or torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1), []
    model.train()
    for x in rows[start:]:
        loss = model(input_ids=x, labels=x).loss + cook.loss()
        loss.backward()
        opt.step()
        cook.step()
        opt.zero_grad()
        losses.append(loss.item())
    return losses


# ---- oracles

def test_every_pattern_of_small_integers():
    "All scores of 0…3 in a block, ties among them: no other pair keeps more, and of equal scores the first stay"
    blocks = torch.tensor(list(itertools.product(range(4), repeat=4)), dtype=torch.float32)
    mask = pick24(blocks)
    best = torch.stack([blocks[:, list(pair)].sum(1) for pair in itertools.combinations(range(4), 2)]).amax(0)
    assert (mask.sum(1) == 2).all() and torch.equal((blocks * mask).sum(1), best)
    for block, m in zip(blocks.tolist(), mask.tolist()):
        assert all(not (block[i] == block[j] and m[j] and not m[i])
                   for i, j in itertools.combinations(range(4), 2)), (block)


def test_wanda_as_torchao_computes_it():
    "torchao's WandaSparsifier: |W| · ‖x‖, and of each block of four the two smallest are dropped"
    set_seed(0)
    layer = nn.Linear(64, 24)
    xs = [torch.randn(5, 7, 64) * torch.logspace(0, -2, 64)[torch.randperm(64)] for _ in range(3)]
    model = nn.Sequential(layer)
    norm = torch.cat([x.flatten(0, 1) for x in xs]).norm(dim=0)
    metric = (layer.weight.abs() * norm).detach().view(-1, 4)
    want = torch.ones_like(metric).scatter_(1, metric.topk(2, dim=1, largest=False).indices, 0).bool().view(24, 64)
    got = pick24(layer.weight.detach().abs() * input_norms(model, {"0": layer}, xs)["0"])
    assert torch.equal(got, want)


def test_sparsegpt_against_the_best_weights_for_its_mask():
    """Least squares for each row's mask in float64 is the floor; SparseGPT, which may not go back, stays near it and
    far below the uncorrected mask"""
    set_seed(0)
    w, x = torch.randn(16, 32), torch.randn(600, 32) @ torch.randn(32, 32)
    H = (x.T @ x).double()
    small, mask = sparsegpt24(w, H.float(), damping=1e-6)
    error = lambda v: ((v.double() - w.double()) @ H * (v.double() - w.double())).sum().item()
    best = torch.zeros_like(w, dtype=torch.float64)
    for i in range(len(w)):
        at = mask[i].nonzero()[:, 0]
        best[i, at] = torch.linalg.solve(H[at][:, at], (H @ w[i].double())[at])
    assert error(best) <= error(small) < 4 * error(best) and error(small) < 0.6 * error(w * mask)


def test_packed_bits_are_torchs():
    "The bits as torch's converter makes them, before it reorders them for CUTLASS"
    from torch.sparse._semi_structured_conversions import (_calculate_meta_reordering_scatter_offsets as offsets,
                                                           sparse_semi_structured_from_dense_cutlass as theirs)
    w = (torch.randn(64, 128).clamp_min(0.1) * pick24(torch.rand(64, 128))).to(torch.bfloat16)
    values, meta = theirs(w)
    plain = torch.gather(meta.view(-1), 0, offsets(64, meta.shape[1], meta.dtype, "cpu")).view(meta.shape)
    ours = compress24(w)
    assert torch.equal(values, ours[0]) and torch.equal(plain.contiguous().view(torch.uint8), ours[1])


def test_any_width_and_dtype_round_trips():
    for K in range(1, 20):
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int8):
            w = (torch.randn(3, K) * 9 * pick24(torch.rand(3, K))).to(dtype)
            w[0] = 0
            assert torch.equal(expand24(*compress24(w), K), w) and is24(w)


# ---- calibration

TEXTS = [torch.tensor([[5, 6, 7, 8, 9]]), torch.tensor([[11, 12, 13]])]


def padded(side):
    "The two texts as one batch"
    rows = [F.pad(t, (0, 5 - t.shape[1]) if side == "right" else (5 - t.shape[1], 0)) for t in TEXTS]
    return [{"input_ids": torch.cat(rows), "attention_mask": (torch.cat(rows) > 0).long()}]


def norms_of(model, calib): return input_norms(model, resolve(model, "*", kind=nn.Linear), calib)


def test_padding_counts_nowhere():
    """Right- and left-padded batches, unpadded ones and bare tensors of the same texts: the same norms, and the same
    corrections by SparseGPT's Grams"""
    plain, found = norms_of(llama(), [{"input_ids": t} for t in TEXTS]), []
    for calib in (padded("right"), padded("left"), TEXTS, [{"input_ids": t, "labels": t} for t in TEXTS]):
        for n, x in norms_of(llama(), calib).items(): assert torch.allclose(x, plain[n], rtol=1e-5), n
        found.append(logits(Cook(llama(), [Sparse24(score="sparsegpt")], calib).model))
    for other in found[1:]: assert torch.allclose(other, found[0], atol=1e-4)
    assert not torch.allclose(
        found[0],
        logits(Cook(llama(), [Sparse24(score="sparsegpt")], [{"input_ids": padded("right")[0]["input_ids"]}]).model),
        atol=1e-3,
    )  # (had it counted)


def test_padding_of_an_encoder_and_of_its_decoder():
    set_seed(0)
    t5 = tf.T5ForConditionalGeneration(tf.T5Config(d_model=32, d_ff=64, d_kv=8, num_heads=4, num_layers=2,
                                                   vocab_size=99, decoder_start_token_id=0, dropout_rate=0.0)).eval()
    answers = [torch.tensor([[3, 4]]), torch.tensor([[21, 22, 23, 24]])]
    plain = norms_of(t5, [{"input_ids": t, "labels": a} for t, a in zip(TEXTS, answers)])
    got = norms_of(t5,
                   [padded("right")[0] | {"labels": torch.cat([F.pad(a, (0, 4 - a.shape[1]), value=-100)
                                                               for a in answers])}])
    for n, x in plain.items():
        if n != "lm_head": assert torch.allclose(x, got[n], rtol=1e-5, atol=1e-5), n


# ---- recipes

class Narrow(Method):
    "Cuts FFN neurons at export, as StructPrune does: a mask goes along with its weight"
    slot = 10
    def __init__(self, index): self.index = torch.tensor(index)
    def export(self, small):
        for n, m in parts(small):
            dim = {"gate_proj": 0, "up_proj": 0, "down_proj": 1}.get(n.rpartition(".")[2])
            if dim is None: continue
            for p in chain(m): p.cut(dim, self.index)
            holder = m.parametrizations.weight if chain(m) else m
            name = "original" if chain(m) else "weight"
            holder._parameters[name] = nn.Parameter(stored(m).detach().index_select(dim, self.index))
            m.out_features, m.in_features = holder._parameters[name].shape


@pytest.mark.parametrize("score", ["wanda", "magnitude", "sparsegpt"])
def test_columns_that_are_cut_are_picked_anew(score):
    "What is left of trained masks: blocks that now hold three or four lose the least; the zeros of training stay zero"
    # 54 neurons: blocks shift, and the last is short
    index = [i for i in range(64) if i % 7]
    exports = []
    for order in (1, -1):
        model = llama()
        cook = Cook(model, [Sparse24("*.mlp.*", score=score), Narrow(index)][::order], CALIB)
        masks = cook.methods[1].masks()
        train(model, cook)
        exports.append(cook.export())
    a, b = (unpack24(copy.deepcopy(m)).state_dict() for m in exports)
    assert all(torch.equal(a[k], b[k]) for k in a)
    for n, m in resolve(exports[0], "*.mlp.*", kind=Sparse24Linear).items():
        w = m.dequantize()
        was = masks[n][:, index] if n.endswith("down_proj") else masks[n][index]
        assert is24(w) and not (w != 0)[~was].any()
        assert (w != 0).sum() >= (0.8 if n.endswith("down_proj") else 1) * was.sum()
    assert logits(exports[0]).isfinite().all()


def test_zeros_survive_int8_and_are_packed_in_five_eighths():
    "pack24 behind a quantizer: the codes of zeros are zeros"
    model = llama()
    cook = Cook(model, [Sparse24("*.mlp.*", packed=False)], CALIB)
    eight = pack_linears(cook.export(), modules="*.mlp.*")
    both = arrange24(pack24(copy.deepcopy(eight)), "packed")
    assert torch.equal(logits(both), logits(eight))
    for n, m in resolve(both, "*.mlp.*", kind=Sparse24Linear).items():
        assert 8 * (m.values.nbytes + m.indices.nbytes) == 5 * eight.get_submodule(n).codes.nbytes


def test_with_fake_quantization_in_any_order():
    from bmlab.cook import fakequant
    exports = []
    for order in (1, -1):
        model = llama()
        cook = Cook(model, [Sparse24("*.mlp.*"), fakequant.FakeQuant("w8a16", modules="*.mlp.*")][::order], CALIB)
        train(model, cook)
        exports.append((cook.export(), logits(model)))
    (a, cooked), (b, _) = exports
    assert (logits(a) - cooked).abs().max() < 1e-5
    assert all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))
    layers = resolve(a, "*.mlp.*", kind=Sparse24Linear)
    assert len(layers) == 6
    assert all(m.scale is not None and m.dequantize().shape == (m.out_features, m.in_features) for m in layers.values())


def test_four_methods_in_any_order():
    "Sliced neurons, experts, 2:4 and int8: the same tensors in any order of the list, equal to the cooked model"
    prune, moefy, fakequant = (pytest.importorskip(f"bmlab.cook.{m}") for m in ("prune", "moefy", "fakequant"))
    exports = []
    for order in ((0, 1, 2, 3), (3, 2, 1, 0), (2, 0, 3, 1)):
        model = llama()
        methods = [prune.StructPrune(ffn=0.75), moefy.MoEfy(experts=4, active=0.5), Sparse24("*.mlp.*"),
                   fakequant.FakeQuant("w8a16", modules="*.mlp.*")]
        cook = Cook(model, [methods[i] for i in order], CALIB)
        train(model, cook, ROWS[:2])
        exports.append(cook.export())
    for other in exports[1:]:
        assert all(torch.equal(x, y)
                   for x, y in zip(exports[0].state_dict().values(), other.state_dict().values(), strict=True))
    layers = resolve(exports[0], "*.mlp.*", kind=Sparse24Linear)
    assert len(layers) == 6 and {m.dequantize().shape for m in layers.values()} == {(48, 32), (32, 48)}
    assert logits(exports[0]).isfinite().all()


def test_disjoint_twice_and_the_same_refused():
    model = llama()
    cook = Cook(model, [Sparse24("*.mlp.*", score="magnitude"), Sparse24("self_attn.*", when="repick", packed=False)],
                CALIB)
    train(model, cook)
    small = cook.export()
    assert [(m.notes["layers"], m.notes["packed"]) for m in cook.methods] == [(6, 6), (8, 0)]
    assert torch.equal(logits(small), logits(model))
    kinds = {n: type(m) for n, m in resolve(small, ["*_proj"]).items()}
    assert {k for n, k in kinds.items() if "mlp" in n} == {Sparse24Linear}
    assert {k for n, k in kinds.items() if "attn" in n} == {nn.Linear}
    with pytest.raises(ValueError, match="two Sparse24 shape"):
        Cook(llama(), [Sparse24("*.mlp.*"), Sparse24("up_proj", score="magnitude")], CALIB)


def test_a_failing_attach_leaves_no_trace():
    class Fails(Method):
        slot = 35
        def attach(self, model): raise KeyError("no")
    model = llama()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(KeyError): Cook(model, [Sparse24(score="sparsegpt"), Fails()], CALIB)
    assert list(model.state_dict()) == list(before)
    assert all(torch.equal(model.state_dict()[k], v) for k, v in before.items())
    assert {type(m) for m in resolve(model, "*_proj").values()} == {nn.Linear}
    assert not any(m._forward_pre_hooks for m in model.modules())


def test_deltas_on_the_same_layers():
    "A LoRA before or after, trained over the masked weight; either may leave first"
    from bmlab.delta.lora import Lora
    for first in (True, False):
        model = llama()
        before = logits(model)
        if first: d, cook = Lora(model, r=2, modules="up_proj"), Cook(model, [Sparse24("*.mlp.*")], CALIB)
        else:
            cook = Cook(model, [Sparse24("*.mlp.*")], CALIB)
            d = Lora(model, r=2, modules="up_proj")
        d.freeze()
        masked = logits(model)
        train(model, cook, opt=torch.optim.AdamW(d.trainable(), lr=1e-2))
        assert not torch.equal(logits(model), masked)
        for leave in ((d, cook) if first else (cook, d)): leave.detach()
        assert torch.equal(logits(model), before)


def test_transposable_both_ways():
    for make, pattern in ((llama, "*.mlp.*"), (gpt2, "mlp.*")):
        model = make()
        cook = Cook(model, [Sparse24(pattern, transposable=True, when="repick")], CALIB)
        train(model, cook)
        for m in cook.export().modules():
            if isinstance(m, Sparse24Linear): assert is24(m.dequantize()) and is24(m.dequantize().t())


def test_conv1d():
    "GPT-2 stores its weights the other way round; a mask lies along the inputs all the same"
    for options in (dict(), dict(score="sparsegpt"), dict(when="repick")):
        model = gpt2()
        cook = Cook(model, [Sparse24(**options)], CALIB)
        train(model, cook)
        small = cook.export()
        assert (logits(small) - logits(model)).abs().max() < 1e-5
        assert sum(isinstance(m, Sparse24Linear) for m in small.modules()) == 8
        assert all(is24(m) for m in cook.methods[0].masks().values())


@pytest.mark.parametrize("options",
                         [dict(), dict(score="magnitude", transposable=True), dict(score="sparsegpt"),
                          dict(when="repick"), dict(score="sparsegpt", when="ramp", steps=2)])
def test_widths_that_four_does_not_divide(options):
    "Short last blocks keep at most two, in every recipe, in the file too"
    set_seed(0)
    net = nn.Sequential(nn.Linear(10, 7), nn.GELU(), nn.Linear(7, 3), nn.Linear(3, 5), nn.Linear(5, 1)).train()
    x = torch.randn(40, 10)
    cook = Cook(net, [Sparse24("*", **options)], [x])
    opt = torch.optim.AdamW(net.parameters(), lr=1e-2)
    for _ in range(3):
        net(x).square().mean().backward()
        opt.step()
        cook.step()
        opt.zero_grad()
    small = cook.export()
    net.eval()
    with torch.no_grad(): assert torch.equal(small(x), net(x))
    for m in (m for m in small if isinstance(m, Sparse24Linear)):
        assert is24(m.dequantize()) and (not options.get("transposable") or is24(m.dequantize().t()))
    assert sum(isinstance(m, Sparse24Linear) for m in small) == 4
    assert (small[0].dequantize() != 0).sum() >= 5 * 7 * (0.6 if options.get("transposable") else 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_weights(dtype):
    "Scores and Grams are float32, masks those of the same weights in float32; a cast after attaching changes nothing"
    for options in dict(), dict(score="sparsegpt"), dict(when="repick"), dict(score="sparsegpt", when="ramp", steps=2):
        half = llama(num_hidden_layers=1).to(dtype)
        full = copy.deepcopy(half).float()
        method, wide = Sparse24(**options), Sparse24(**options)
        cook, other = Cook(half, [method], CALIB), Cook(full, [wide], CALIB)
        same = [(a == b).float().mean().item()
                for a, b in zip(method.masks().values(), wide.masks().values(), strict=True)]
        # the inputs of layers behind the first are rounded
        assert min(same) > (0.97 if "score" in options else 0.985), (options, min(same))
        train(half, cook, ROWS[:2], torch.optim.SGD(half.parameters(), lr=1e-2))
        small = cook.export()
        assert {p.dtype for p in half.parameters()} == {dtype} and torch.equal(logits(small), logits(half))
        assert logits(small).isfinite().all()
        other.model.to(dtype)
        if options.get("when") != "ramp": assert torch.equal(logits(other.export()), logits(full))
        for m in small.modules():
            if isinstance(m, Sparse24Linear): assert m.weight.dtype == dtype and is24(m.dequantize())


def test_models_without_values():
    with torch.device("meta"): model = tf.LlamaForCausalLM(llama().config)
    for score in ("magnitude", "wanda", "sparsegpt"):
        with pytest.raises(ValueError, match="load the weights before you cook"):
            Cook(model, [Sparse24(score=score)], CALIB)
    with pytest.raises(ValueError, match="lies on meta"): pack24(model)
    assert {type(m) for m in resolve(model, "*_proj").values()} == {nn.Linear}


def test_a_ramp_that_is_left_early_or_long_over():
    "Exported as at its end, with a word of warning; behind its end nothing changes"
    for score, steps, left in (("wanda", 100, True), ("sparsegpt", 100, True), ("wanda", 6, False),
                               ("sparsegpt", 3, False)):
        method = Sparse24(score=score, when="ramp", steps=steps)
        model = llama(num_hidden_layers=1)
        cook = Cook(model, [method], CALIB)
        train(model, cook)
        with warnings.catch_warnings(record=True) as said: small = cook.export()
        assert ["the ramp has done 6 of steps=100" in str(w.message) and w.filename == __file__
                for w in said] == [True] * left
        # the cooked model's own goes on
        assert (method.state()["fade"] == 0) == (not left)
        assert torch.equal(logits(small), logits(model)) == (not left)
        for n, mask in method.masks().items(): assert torch.equal(small.get_submodule(n).dequantize() != 0, mask)


def test_what_is_not_packed_is_said():
    "int4 has no 2:4 form here: the notes count"
    from bmlab.cook import fakequant
    for scheme, packed in (("w8a16", 6), ("w4a16-g32", 0)):
        method = Sparse24("*.mlp.*")
        cook = Cook(llama(), [method, fakequant.FakeQuant(scheme, modules="*.mlp.*")], CALIB)
        cook.export()
        assert method.state()["layers"] == 6 and method.state()["packed"] == packed


def test_only_what_it_can_pack():
    int4 = pack_linears(nn.Sequential(nn.Linear(64, 32)), 4, group_size=32)[0]
    with pytest.raises(TypeError, match="Int4Linear; expected nn.Linear"): Sparse24Linear.from_dense(int4)


def test_packing_loses_no_delta():
    "A layer that carries one stays, in float and int8; named alone it is refused"
    from bmlab.delta.lora import Lora
    for make, name, int8 in ((gpt2, "mlp.c_fc", False), (llama, "up_proj", False), (llama, "up_proj", True)):
        model = make()
        for m in resolve(model, name).values():
            size = m.weight.detach().abs()
            m.weight.data *= pick24(size.t()).t() if make is gpt2 else pick24(size)
        if int8: pack_linears(model, modules=name)
        d = Lora(model, r=2, modules=name)
        for p in d.trainable(): nn.init.normal_(p)
        before = logits(model)
        assert torch.equal(logits(pack24(model)), before)
        assert not any(isinstance(m, Sparse24Linear) for m in resolve(model, name).values())
        with pytest.raises(LookupError, match="none of them a plain linear layer"): pack24(model, name)
        d.detach()
        assert all(isinstance(m, Sparse24Linear) for m in resolve(pack24(model), name).values())


# ---- training

def test_stopped_and_resumed_in_the_middle_of_a_ramp():
    for options in (dict(when="ramp", steps=5), dict(when="repick", steps=4),
                    dict(when="ramp", steps=5, score="sparsegpt")):
        model = llama()
        cook = Cook(model, [Sparse24(**options)], CALIB)
        train(model, cook)
        half = llama()
        a = Cook(half, [Sparse24(**options)], CALIB)
        opt = torch.optim.AdamW(half.parameters(), lr=1e-2, weight_decay=0.1)
        train(half, a, ROWS[:3], opt)
        rest = llama()
        b = Cook(rest, [Sparse24(**options)], CALIB[:1])  # other masks, which the state dict replaces
        rest.load_state_dict(copy.deepcopy(half.state_dict()))
        again = torch.optim.AdamW(rest.parameters(), lr=1e-2, weight_decay=0.1)
        again.load_state_dict(copy.deepcopy(opt.state_dict()))
        train(rest, b, ROWS, again, start=3)
        assert all(torch.equal(x, y)
                   for x, y in zip(model.state_dict().values(), rest.state_dict().values(), strict=True)), options


def all_three():
    "Each way of treating what goes, on its own layers"
    return [Sparse24("*.mlp.*", when="repick"), Sparse24(["q_proj", "k_proj"], when="ramp", steps=2, score="sparsegpt"),
            Sparse24(["v_proj", "o_proj"])]


def same_losses(run_of):
    losses = []
    for wrap in (lambda m: m, run_of):
        model = llama(num_hidden_layers=1)
        cook = Cook(model, all_three(), CALIB)
        losses.append(train(wrap(model), cook))
    assert max(abs(a - b) for a, b in zip(*losses)) < 1e-5, losses


@pytest.mark.long
def test_compiled():
    torch.compiler.reset()
    same_losses(lambda m: torch.compile(m, backend="aot_eager"))


def test_compiled_once_for_all_steps():
    "Nothing that a step counts is read in forward"
    torch.compiler.reset()
    for options in (dict(when="repick", steps=50), dict(when="ramp", steps=50)):
        net = nn.Sequential(nn.Linear(16, 8)).train()
        x = torch.randn(12, 16)
        cook, made = Cook(net, [Sparse24("0", **options)], [x]), []
        fast = torch.compile(net, backend=lambda graph, inputs: made.append(graph) or graph)
        for _ in range(12):
            fast(x).sum().backward()
            cook.step()
        assert len(made) == 1, (options, len(made))


def test_exported_layers_compile_whole_and_take_deltas():
    from bmlab.delta.lora import Lora
    model = llama(num_hidden_layers=1)
    small = Cook(model, [Sparse24()], CALIB).export()
    mlp, x = small.model.layers[0].mlp, torch.randn(3, 32)
    for form in ("dense", "packed"):
        arrange24(small, form)
        torch.compiler.reset()
        with torch.no_grad(): assert torch.equal(torch.compile(mlp, backend="aot_eager", fullgraph=True)(x), mlp(x))
    before, d = logits(small), Lora(small, r=2, modules="up_proj")
    d.freeze()
    for p in d.trainable(): nn.init.normal_(p)
    small(input_ids=ROWS[0], labels=ROWS[0]).loss.backward()
    assert all(p.grad is not None for p in d.trainable()) and not torch.equal(logits(small), before)
    assert torch.equal(logits(copy.deepcopy(small)), logits(small))
    d.detach()
    assert torch.equal(logits(small), before)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_checkpointed():
    same_losses(lambda m: m.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False}) or m)


def sharded():
    import torch.distributed as dist
    from bmlab.train.sharding import shard
    losses, kept = [], []
    for many in (False, True):
        model = llama()
        cook = Cook(model, all_three(), CALIB)
        if many: shard(model, dtype=None)
        opt, log = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1), []
        model.train()
        for x in ROWS[:3]:
            part = x.chunk(dist.get_world_size())[dist.get_rank()] if many else x
            loss = model(input_ids=part, labels=part).loss + cook.loss()
            loss.backward()
            opt.step()
            cook.step()
            opt.zero_grad()
            with torch.no_grad(): log.append(model(input_ids=x, labels=x).loss.item())
        losses.append(log)
        kept.append({n: m.clone() for method in cook.methods for n, m in method.masks().items()})
    # of the sharded one, whole on each rank
    small = cook.export()
    with torch.no_grad(): apart = (small(ROWS[0]).logits - model.eval()(ROWS[0]).logits).abs().max().item()
    whole = (all(is24(m.dequantize()) for m in small.modules() if isinstance(m, Sparse24Linear))
             and sum(isinstance(m, Sparse24Linear) for m in small.modules()) == 14)
    try:
        Cook(shard(llama(), dtype=None), [Sparse24(score="magnitude")])
        refused = ""
    except RuntimeError as e: refused = str(e)
    return losses, all(torch.equal(kept[0][n], kept[1][n]) for n in kept[0]), whole and apart < 1e-5, refused


@pytest.mark.long
def test_two_ranks_are_one():
    ranks = run_ranks(sharded)
    assert ranks[0][0][1] == ranks[1][0][1]
    for (one, many), same, exported, refused in ranks:
        assert max(abs(a - b) for a, b in zip(one, many)) < 2e-5 and same and exported
        assert "attach Cook before shard" in refused


# ---- files

@pytest.mark.long
def test_reloads_in_a_fresh_process(tmp_path):
    model = tf.LlamaForCausalLM._from_config(llama(tie_word_embeddings=True).config, dtype=torch.bfloat16)
    cook = Cook(model, [Sparse24()], CALIB)
    small = cook.export()
    save_cooked(small, tmp_path)
    torch.save((ROWS[0], logits(small)), tmp_path / "expected.pt")
    code = ("import sys, torch; from bmlab.cook.report import load_cooked; m = load_cooked(sys.argv[1]); ids, want = "
            "torch.load(sys.argv[1] + '/expected.pt')\n"
            "with torch.no_grad(): assert torch.equal(m(ids).logits, want)\n"
            "print(sum(type(x).__name__ == 'Sparse24Linear' for x in m.modules()), m.lm_head.weight is "
            "m.model.embed_tokens.weight)")
    done = fresh_python(code, tmp_path)
    assert done.stdout.split() == ["14", "True"], done.stderr[-2000:]


def test_file_is_nine_sixteenths(tmp_path):
    set_seed(0)
    model = nn.Sequential(nn.Linear(256, 512, bias=False, dtype=torch.bfloat16))
    model[0].weight.data *= pick24(model[0].weight.detach().float().abs())
    dense = model[0].weight.nbytes
    size = (save_cooked(pack24(model), tmp_path) / "cooked.safetensors").stat().st_size
    assert dense * 9 // 16 < size < dense * 9 // 16 + 400
    again = load_cooked(tmp_path, skeleton=nn.Sequential(nn.Linear(256, 512, bias=False, dtype=torch.bfloat16)))
    assert torch.equal(again[0].dequantize(), model[0].dequantize())


# ---- what distillation gives back

def bytes_of(texts): return torch.frombuffer(bytearray("\n".join(texts).encode()), dtype=torch.uint8).long()


def optimize(model, steps, lr, loss_of, cook=None, seed=0):
    opt, g = torch.optim.AdamW(model.train().parameters(), lr=lr, weight_decay=0.), torch.Generator().manual_seed(seed)
    schedule = torch.optim.lr_scheduler.OneCycleLR(opt, lr, total_steps=steps, pct_start=.1)
    for _ in range(steps):
        loss = loss_of(g)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.)
        opt.step()
        schedule.step()
        opt.zero_grad()
        if cook: cook.step()


@pytest.fixture(scope="module")
def reviewer():
    "A model of bytes trained here on film reviews, its held-out loss, and batches for the calibration"
    from bmlab.data.samples import sample_texts, split
    train_text, held_text = (bytes_of(t) for t in split(sample_texts("movies").text, held_out=0.1))
    held = held_text[:40 * 96].view(40, 96)
    def batch(g):
        return torch.stack([train_text[j:j + 96] for j in torch.randint(0, len(train_text) - 96, (16,), generator=g)])
    def held_loss(m):
        with torch.no_grad(): return m.eval()(input_ids=held, labels=held).loss.item()
    set_seed(0)
    dense = tf.LlamaForCausalLM(tf.LlamaConfig(hidden_size=64, intermediate_size=176, num_hidden_layers=3,
                                               num_attention_heads=4, num_key_value_heads=4, vocab_size=256,
                                               tie_word_embeddings=True))
    optimize(dense, 700, 4e-3, lambda g: (lambda x: dense(input_ids=x, labels=x).loss)(batch(g)))
    return dense.eval(), held_loss, batch, [{"input_ids": batch(torch.Generator().manual_seed(5))} for _ in range(4)]


@pytest.mark.slow
@pytest.mark.parametrize("name, options, hidden",
                         [("magnitude", dict(score="magnitude"), None), ("Wanda", dict(), None),
                          ("Wanda, ramped", dict(when="ramp", steps=100), None),
                          ("Wanda, re-picked", dict(when="repick", steps=200), None),
                          ("SparseGPT, hidden states too", dict(score="sparsegpt"), "layers.*")])
def test_distillation_recovers_the_gap(reviewer, name, options, hidden):
    "All blocks 2:4, the dense model teaches: at least nine tenths of what the same choice loses in one shot"
    from bmlab.cook.distill import Distill
    dense, held_loss, batch, calib = reviewer
    floor = held_loss(dense)
    once = held_loss(Cook(copy.deepcopy(dense), [Sparse24(score=options.get("score", "wanda"))], calib).model)
    model = copy.deepcopy(dense)
    cook = Cook(model, [Sparse24(**options), Distill(dense, T=1., hidden=hidden, measure="cosine")], calib)
    def taught(g):
        model(input_ids=batch(g))
        return cook.loss()
    optimize(model, 300, 4e-3, taught, cook, seed=7)
    after, small = held_loss(model), cook.export()
    print(f"\n{name}: dense {floor:.4f}, one-shot {once:.4f}, distilled {after:.4f}: "
          f"{(once - after) / (once - floor):.1%} of the gap")
    assert once - after >= 0.9 * (once - floor) and abs(held_loss(small) - after) < 1e-5
    assert all(is24(m.dequantize()) for m in small.modules() if isinstance(m, Sparse24Linear))


class _OnCpu:
    "cuSPARSELt's two functions for a CPU: values and indices in one tensor of nine sixteenths, as theirs"
    @staticmethod
    def compress(w):
        values, indices = compress24(w)
        return torch.cat([values.flatten(), indices.flatten().view(w.dtype)])
    @staticmethod
    def mm(packed, B, bias=None, alpha=None, out_dtype=None, transpose_result=False, alg_id=0, split_k=1,
           split_k_mode=-1):
        K = B.shape[0]
        N = packed.numel() * 16 // (9 * K)
        w = expand24(packed[:N * K // 2].view(N, -1), packed[N * K // 2:].view(torch.uint8).view(N, -1), K)
        # as cuSPARSELt asks
        assert B.shape[1] % 8 == 0 and B.shape[1] > 0
        y = w @ B if bias is None else w @ B + bias[:, None]
        return y.t().contiguous() if transpose_result else y


@pytest.fixture
def semi_on_cpu(monkeypatch):
    "torch's own semi-structured tensor, whose dispatch is what is tested, over a stand-in for the GPU's library"
    from bmlab.cook import sparse24
    if not all(hasattr(torch.ops.aten, n) for n in ("_cslt_compress", "_cslt_sparse_mm")):
        pytest.skip("torch without cuSPARSELt's functions")
    tensor = torch.sparse.SparseSemiStructuredTensorCUSPARSELT
    monkeypatch.setattr(sparse24,
                        "_semi_fits", lambda device, dtype, N, K: (device.type == "cpu"
                                                                   and dtype in (torch.float16, torch.bfloat16)
                                                                   and N % 64 == K % 64 == 0))
    monkeypatch.setattr(tensor, "_validate_device_dim_dtype_shape", classmethod(lambda cls, w: None))
    lib = torch.library.Library("aten", "IMPL")
    lib.impl("_cslt_compress", _OnCpu.compress, "CPU")
    lib.impl("_cslt_sparse_mm", _OnCpu.mm, "CPU")
    yield
    lib._destroy()


def semi_layer(K=128, N=64, dtype=torch.bfloat16):
    set_seed(0)
    linear = nn.Linear(K, N, dtype=dtype)
    linear.weight.data *= pick24(linear.weight.detach().float().abs())
    return linear, Sparse24Linear.from_dense(linear)


@pytest.mark.filterwarnings("ignore:The PyTorch API of SparseSemiStructuredTensor")
def test_the_semi_form_multiplies_like_a_linear_layer(semi_on_cpu):
    "Any number of rows and dimensions, strides, no rows, autocast, gradients for the input and for the bias"
    linear, layer = semi_layer()
    assert layer.form == "semi" and layer.values is None and layer.matrix is None
    assert layer.weight.dtype == torch.bfloat16
    x = torch.randn(3, 5, 128, dtype=torch.bfloat16)
    with torch.no_grad():
        for v in (x, x[0, 0], x[:1], x[:, :1], x.transpose(0, 1), torch.randn(128, 7, dtype=torch.bfloat16).t(),
                  x[:, ::2], x[:0], torch.randn(64, 128, dtype=torch.bfloat16)):
            y = layer(v)
            assert y.shape == linear(v).shape and torch.allclose(y.float(), linear(v).float(), atol=2**-6)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16): assert torch.equal(layer(x.float()), layer(x))
    # the bias alone, or both
    for v in (x, x.clone().requires_grad_()):
        layer(v).float().square().sum().backward()
        got = layer.bias.grad.clone()
        layer.bias.grad = None
        linear(v).float().square().sum().backward()
        assert torch.allclose(got, layer.bias.grad, atol=1) and layer.bias is linear.bias
        layer.bias.grad = None


@pytest.mark.filterwarnings("ignore:The PyTorch API of SparseSemiStructuredTensor")
def test_the_semi_form_compiles_whole(semi_on_cpu):
    linear, layer = semi_layer()
    torch.compiler.reset()
    fast = torch.compile(lambda x: F.silu(layer(x)) * 2, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        for M in (1, 16, 64, 512):
            x = torch.randn(2, M, 128, dtype=torch.bfloat16)
            assert torch.allclose(fast(x).float(), (F.silu(layer(x)) * 2).float(), atol=2**-6)


@pytest.mark.filterwarnings("ignore:The PyTorch API of SparseSemiStructuredTensor")
def test_the_semi_form_is_left_for_files_copies_and_moves(semi_on_cpu):
    linear, layer = semi_layer()
    x = torch.randn(8, 128, dtype=torch.bfloat16)
    fresh = Sparse24Linear(128, 64, dtype=torch.bfloat16, device="meta")
    fresh.load_state_dict(layer.state_dict(), assign=True)
    for twin in copy.deepcopy(layer), fresh, pickle.loads(pickle.dumps(layer)), copy.deepcopy(layer).half().bfloat16():
        assert twin.form == "semi" and torch.equal(twin.dequantize(), linear.weight)
        with torch.no_grad(): assert torch.equal(twin(x), layer(x))
    assert copy.deepcopy(layer).float().form == "dense" and copy.deepcopy(layer).to("meta").form == "packed"
    assert layer.arrange("packed").form == "packed"
    # what was asked for stays, until something else is
    assert layer.to(torch.float16).form == "packed" and layer.arrange().form == "semi"
    assert semi_layer(128, 96)[1].form == "dense"


# ---- the GPU

@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_semi_structured_layer_equals_the_dense_one(dtype):
    set_seed(0)
    linear = nn.Linear(1024, 512, device="cuda", dtype=dtype)
    linear.weight.data *= pick24(linear.weight.detach().float().abs())
    layer = Sparse24Linear.from_dense(linear)
    if not torch.backends.cusparselt.is_available():
        assert layer.form == "dense"
        pytest.skip("torch was built without cuSPARSELt")
    assert layer.form == "semi" and torch.equal(layer.dequantize(), linear.weight)
    for M in (1, 3, 16, 64, 300):
        x = torch.randn(M, 1024, device="cuda", dtype=dtype)
        with torch.no_grad(): got, want = layer(x), F.linear(x.double(), linear.weight.double(), linear.bias.double())
        assert got.dtype == dtype and (got.double() - want).norm() / want.norm() < (2**-7 if dtype == torch.bfloat16
                                                                                    else 2**-10), M
    x = torch.randn(8, 1024, device="cuda", dtype=dtype, requires_grad=True)
    layer(x).sum().backward()
    assert (x.grad.double() - linear.weight.double().sum(0)).abs().max() < 0.1
    state = layer.state_dict()
    assert 16 * sum(state[k].nbytes for k in ("values", "indices")) == 9 * linear.weight.nbytes
    assert sum(t.nbytes for t in layer._bmlab_packed()[0][1]) < 0.6 * linear.weight.nbytes
    for twin in (copy.deepcopy(layer), Sparse24Linear(1024, 512, dtype=dtype, device="cuda")):
        twin.load_state_dict(state)
        assert twin.form == "semi" and torch.equal(twin.dequantize(), linear.weight)
    assert copy.deepcopy(layer).cpu().form == "dense" and layer.arrange("packed").form == "packed"
    assert layer.arrange().form == "semi"


@pytest.mark.cuda
def test_a_model_on_sparse_tensor_cores():
    model = llama(hidden_size=256, intermediate_size=512, dtype=torch.bfloat16).to("cuda", torch.bfloat16)
    calib = [{"input_ids": r.cuda()} for r in ROWS[:2]]
    cook = Cook(model, [Sparse24()], calib)
    small = cook.export()
    ids = ROWS[0].cuda()
    a, b = logits(small, ids), logits(model, ids)
    assert (a.double() - b.double()).norm() / b.double().norm() < 0.02
    assert small.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0).shape == (4, 16)


def captured(layer, x):
    "A CUDA graph of one call, and what it writes"
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.no_grad(), torch.cuda.stream(side):
        for _ in range(2): layer(x)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph): y = layer(x)
    return graph, y


def gpu_layer(form, dtype=torch.bfloat16, K=1024, N=512):
    "A 2:4 layer in a form, and its dense float64 weight; int8: codes with a scale per row"
    set_seed(0)
    linear = nn.Linear(K, N, device="cuda", dtype=dtype)
    linear.weight.data *= pick24(linear.weight.detach().float().abs())
    if form == "int8": linear = pack_linears(nn.Sequential(linear))[0]
    if form == "semi" and not torch.backends.cusparselt.is_available():
        pytest.skip("torch was built without cuSPARSELt")
    layer = Sparse24Linear.from_dense(linear).arrange("dense" if form == "int8" else form)
    return layer, layer.dequantize().double()


@pytest.mark.cuda
@pytest.mark.parametrize("form", ["packed", "dense", "semi", "int8"])
def test_captured_in_a_graph_equals_eager(form):
    layer, w = gpu_layer(form)
    for M in (1, 16, 64, 512, 4096):
        x = torch.randn(M, 1024, device="cuda", dtype=torch.bfloat16)
        graph, y = captured(layer, x)
        for _ in range(2):
            x.copy_(torch.randn_like(x))
            graph.replay()
            torch.cuda.synchronize()
            with torch.no_grad(): eager = layer(x)
            want = F.linear(x.double(), w, layer.bias.double())
            assert (y.double() - eager.double()).norm() <= 2**-8 * eager.double().norm() and (
                y.double() - want
            ).norm() < 2**-7 * want.norm(), (form, M)


@pytest.mark.cuda
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("form", ["dense", "semi"])
def test_compiled_on_a_gpu_equals_eager(form, mode):
    layer, w = gpu_layer(form)
    torch.compiler.reset()
    fast = torch.compile(lambda x: F.silu(layer(x)), fullgraph=True, dynamic=False, mode=mode)
    for M in (1, 16, 64, 512, 4096):
        x = torch.randn(2, M, 1024, device="cuda", dtype=torch.bfloat16)
        with torch.no_grad():
            for _ in range(3): y = fast(x).clone()
            want = F.silu(layer(x)).double()
        assert (y.double() - want).norm() < 2**-6 * want.norm(), (form, mode, M)


@pytest.mark.cuda
def test_torchs_tensor_at_its_smallest_shapes():
    "What torch 2.11 and 2.13 state for bfloat16: multiples of 16; rows of x are padded to eight"
    if not torch.backends.cusparselt.is_available(): pytest.skip("torch was built without cuSPARSELt")
    set_seed(0)
    for N, K in ((16, 16), (32, 64), (64, 64), (48, 80), (576, 192)):
        w = (torch.randn(N, K, device="cuda") * pick24(torch.rand(N, K, device="cuda"))).bfloat16()
        semi, bias = torch.sparse.to_sparse_semi_structured(w), torch.randn(N, device="cuda", dtype=torch.bfloat16)
        assert torch.equal(semi.to_dense(), w)
        for M in (1, 8, 17):
            x = torch.randn(M, K, device="cuda", dtype=torch.bfloat16)
            with torch.no_grad():
                y, want = F.linear(x, semi, bias).double(), F.linear(x.double(), w.double(), bias.double())
            assert y.shape == (M, N) and (y - want).norm() < 2**-7 * want.norm(), (N, K, M)
    for N, K in ((8, 16), (16, 8), (24, 16), (16, 40)):
        with pytest.raises(RuntimeError, match="multiple of"):
            torch.sparse.to_sparse_semi_structured(torch.zeros(N, K, device="cuda", dtype=torch.bfloat16))


@pytest.mark.cuda
def test_semi_structured_takes_what_a_linear_layer_takes():
    "Strides, no rows, a gradient for the bias alone"
    layer, w = gpu_layer("semi")
    x = torch.randn(6, 5, 1024, device="cuda", dtype=torch.bfloat16)
    for v in (x.transpose(0, 1), x[:, ::2], x[0, 0], x[:0]):
        with torch.no_grad(): y = layer(v)
        want = F.linear(v.double(), w, layer.bias.double())
        assert y.shape == want.shape and (y.double() - want).norm() <= 2**-7 * want.norm()
    layer(x).sum().backward()
    assert (layer.bias.grad == 30).all()


@pytest.mark.cuda
def test_masks_are_the_cpus():
    set_seed(0)
    score = torch.rand(256, 512)
    score[:, ::3] = 0.5                                                                     # ties
    for transposable in (False, True):
        assert torch.equal(pick24(score.cuda(), transposable).cpu(), pick24(score, transposable))
    w = (torch.randn(64, 130) * pick24(torch.rand(64, 130))).cuda()
    assert torch.equal(expand24(*compress24(w), 130), w)


def test_masks_of_stacked_experts_are_quantized():
    model = toys.build("qwen3_moe")
    cook = Cook(model, [Sparse24(score="magnitude"), FakeQuant("w8a16")])
    with torch.no_grad(): torch.testing.assert_close(toys.logits(cook.export()), toys.logits(model))


def test_a_tied_weight_gets_one_mask():
    model = llama()
    first, second = (layer.self_attn.q_proj for layer in model.model.layers)
    second.weight = first.weight
    Cook(model, [Sparse24()], CALIB)
    assert len(chain(first)) == len(chain(second)) == 1 and first.weight.count_nonzero() == first.weight.numel() // 2


def test_damping_and_padding_are_refused():
    for damping in (-1, math.nan, "x"):
        with pytest.raises(ValueError, match="damping="): Sparse24(score="sparsegpt", damping=damping)
    with pytest.raises(ValueError, match="has no inverse"): sparsegpt24(torch.randn(4, 8), -torch.ones(8, 8), 0)
    with pytest.raises(ValueError, match="nothing but padding"):
        Cook(llama(), [Sparse24()], [{"input_ids": ROWS[0], "attention_mask": torch.zeros_like(ROWS[0])}])

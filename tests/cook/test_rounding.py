"Learned rounding is never worse than GPTQ on a block, and what 3 and 2 bits store is what was chosen"
import copy
import sys

import pytest
import torch
import transformers as tf
from torch import nn

from bmlab.cook import Learned, load_cooked, quantize, save_cooked
from bmlab.cook.calibrate import calibrate
from bmlab.cook.folders import OnDisk, plan_folder, quantize_folder
from bmlab.cook.quantize import Grid, choose_codes, to_nearest
from bmlab.cook.rounding import learn_rounding
from bmlab.core import count, set_seed
from bmlab.delta import Lora
from bmlab.kernels import low_bits
from bmlab.kernels.low_bits import LowBitLinear, join_bits, quantize_low_bits, split_bits

LLAMA = dict(vocab_size=96, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=False)
GRIDS = [Grid(bits=b, group_size=32, **kind) for b in (4, 3, 2)
         for kind in (dict(integer_zero=False), dict(symmetric=True), dict(integer_zero=True))]


def llama(kind=tf.LlamaForCausalLM, **options):
    set_seed(0)
    return kind(kind.config_class(**{**LLAMA, **options})).eval()


def texts(pad=0):
    ids = torch.randint(0, 96, (8, 24), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    if pad: mask[::2, -pad:] = 0
    return [dict(input_ids=i, attention_mask=m) for i, m in zip(ids.split(2), mask.split(2))]


def of_blocks(model, batches):
    "What each block makes of what it gets, real tokens only"
    out = []
    hooks = [b.register_forward_hook(lambda m, a, y: out.append(y[0] if isinstance(y, tuple) else y))
             for b in model.model.layers]
    with torch.no_grad():
        for b in batches: model(**b)
    for h in hooks: h.remove()
    masks = [b["attention_mask"].bool() for b in batches]
    return [torch.cat([y[m] for y, m in zip(out[i::len(hooks)], masks)]) for i in range(len(hooks))]


@pytest.mark.parametrize("bits", [3, pytest.param(2, marks=pytest.mark.slow)])
def test_a_block_is_never_worse_than_by_gptq(bits):
    "By the packed model itself: the first block has the same input in both"
    model, batches = llama(), texts(pad=6)
    want = of_blocks(model, batches)[0]
    errors = {}
    for name, how in {"gptq": "gptq", "few": Learned(steps=4, looks=1), "learned": Learned(steps=60)}.items():
        small = quantize(copy.deepcopy(model), batches, bits=bits, group_size=32, rounding=how)
        assert isinstance(small.model.layers[0].mlp.up_proj, LowBitLinear)
        errors[name] = (of_blocks(small, batches)[0] - want).square().mean().item()
    assert errors["few"] <= errors["gptq"] and errors["learned"] < errors["gptq"] * (.8 if bits == 2 else 1)


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_learned_codes_are_numbers_of_the_grid(grid):
    "The errors that it tells are those of the numbers that are stored; the model is left as it was"
    model, batches = llama(), texts()
    model.model.layers[0].mlp.up_proj.weight.data[:, ::3] = 0
    before = {n: p.clone() for n, p in model.named_parameters()}
    names = ["mlp.up_proj", "self_attn.q_proj"]
    layers = {f"model.layers.0.{n}": model.model.layers[0].get_submodule(n) for n in names}
    stage = next(calibrate(model, dict(layers), batches))
    start = {n: (m, grid, choose_codes(m.weight.detach(), stage[n], grid, "gptq")[0]) for n, m in layers.items()}
    made, (first, least) = learn_rounding(stage.replay, start, Learned(steps=30))
    assert least < first or least == first and grid.bits > 2
    assert all(torch.equal(before[n], p) and p.requires_grad for n, p in model.named_parameters())
    want = of_blocks(model, batches)[0]
    for (n, m), told in ((pair, told) for told in (first, least) for pair in layers.items()):
        codes, scale, zero = made[n] if told == least else start[n][2]
        packed = grid.pack(codes.float(), scale, zero)
        assert packed[1].dtype == packed[2].dtype == torch.float16
        m.weight.data = grid.values(codes, packed[1].float(), None if zero is None else packed[2].float())
        assert codes.min() >= grid.ends[0] and codes.max() <= grid.ends[1]
        if grid.keeps_zeros: assert not m.weight[before[f"{n}.weight"] == 0].any()
        if n.endswith("q_proj"):
            error = (of_blocks(model, batches)[0] - want).square().mean().item()
            assert error == pytest.approx(told, rel=1e-3)


@pytest.mark.parametrize("grid", [g for g in GRIDS if g.bits < 4], ids=str)
def test_what_is_stored_is_what_was_chosen(grid):
    set_seed(0)
    w = torch.randn(40, 96)
    scale, zero = grid.fit(w)
    codes = grid.round(w, scale, zero)
    layer = LowBitLinear.from_float(nn.Linear(96, 40), lambda _: grid.pack(codes, scale, zero), 32, grid.bits)
    assert torch.equal(layer.dequantize(), grid.values(codes, scale, zero))
    assert torch.equal(layer.dequantize(rows=slice(7, 9)), layer.dequantize()[7:9])
    assert layer.codes.nbytes * 8 == w.numel() * grid.bits
    assert codes.unique().numel() == 2**grid.bits


@pytest.mark.parametrize("bits", [4, 3, 2])
def test_codes_share_bytes_without_loss(bits):
    q = torch.randint(0, 2**bits, (5, 3, 64), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    b = join_bits(q, bits)
    assert b.shape == (5, 3, 8 * bits) and torch.equal(split_bits(b, bits), q)


@pytest.mark.parametrize("bits", [3, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_product_and_gradient_are_those_of_the_widened_weight(bits, dtype, monkeypatch):
    monkeypatch.setattr(low_bits, "_STRETCH", 0)                       # sixteen rows at a time
    set_seed(0)
    layer = LowBitLinear.from_float(nn.Linear(64, 40).to(dtype), group_size=32, bits=bits)
    x = torch.randn(2, 3, 64, dtype=dtype, requires_grad=True)
    y = layer(x)
    grad, = torch.autograd.grad(y.float().square().sum(), x)
    want = nn.functional.linear(x, layer.dequantize(dtype), layer.bias)
    wanted, = torch.autograd.grad(want.float().square().sum(), x)
    tolerance = dict(rtol=1e-5, atol=1e-5) if dtype == torch.float32 else dict(rtol=.02, atol=.1)
    torch.testing.assert_close(y, want, **tolerance)
    torch.testing.assert_close(grad, wanted, **tolerance)


@pytest.mark.parametrize("bits", [3, 2])
def test_saved_counted_and_tuned(bits, tmp_path):
    model = quantize(llama(), texts(), bits=bits, group_size=32)
    ids = texts()[0]["input_ids"]
    want = model(ids).logits
    save_cooked(model, tmp_path / "small")
    again = load_cooked(tmp_path / "small")
    assert torch.equal(again(ids).logits, want)
    assert count(model).total == count(llama()).total
    packed = [m for m in model.modules() if isinstance(m, LowBitLinear)]
    assert len(packed) == 15 and all(f"int{bits}" in str(m._bmlab_packed()[0]) for m in packed)
    delta = Lora(again, r=4)
    again(ids, labels=ids).loss.backward()
    assert all(p.grad is not None for p in delta.parameters())
    delta.detach()
    assert torch.equal(again(ids).logits, want)


@pytest.mark.parametrize("bits", [3, 2])
@pytest.mark.parametrize("group", [32, 64, 128])
def test_the_layer_rounds_to_nearest_as_the_grid_does(bits, group):
    set_seed(0)
    w = torch.randn(12, 256) * torch.logspace(-3, 2, 12)[:, None]
    w[3] = 0.25
    for a, b in zip(quantize_low_bits(w, group, bits), to_nearest(w, Grid(bits=bits, group_size=group)), strict=True):
        assert torch.equal(a, b)


def test_conv1d_is_learned_too():
    set_seed(0)
    model = tf.GPT2LMHeadModel(tf.GPT2Config(vocab_size=96, n_positions=64, n_embd=64, n_layer=2, n_head=4)).eval()
    ids, want = texts()[0]["input_ids"], []
    for how in ("gptq", Learned(steps=20)):
        small = quantize(copy.deepcopy(model), texts(), bits=2, group_size=32, rounding=how)
        want.append((small(ids).logits - model(ids).logits).square().mean().item())
    assert want[1] < want[0]


def test_from_disk_as_in_memory(tmp_path):
    "rounding='learned' in both, bit for bit; the plan counts what is learned"
    model, how = llama(), dict(bits=3, group_size=32, rounding=Learned(steps=6))
    model.save_pretrained(tmp_path / "model")
    made = load_cooked(quantize_folder(tmp_path / "model", tmp_path / "small", texts(), **how))
    whole = quantize(copy.deepcopy(model), texts(), **how)
    for (n, a), (_, b) in zip(made.state_dict().items(), whole.state_dict().items(), strict=True):
        assert torch.equal(a, b), n
    plans = [plan_folder(model, texts(), bits=3, group_size=32, rounding=r) for r in ("gptq", how["rounding"])]
    assert plans[1].rounding > plans[0].rounding and plans[1].waiting == 2 * plans[0].waiting


@pytest.mark.parametrize("written", [1, 2])
def test_goes_on_from_disk_bit_for_bit(tmp_path, monkeypatch, written):
    "Also of the blocks that are done already the next ones are told what the model put out as it was"
    model, how = llama(), dict(bits=3, group_size=32, rounding=Learned(steps=6))
    model.save_pretrained(tmp_path / "model")
    quantize_folder(tmp_path / "model", tmp_path / "whole", texts(), **how)
    module, left = sys.modules[OnDisk.__module__], [written]
    real = module._write
    def write(state, file):
        if not left[0]: raise KeyboardInterrupt
        left[0] -= 1
        real(state, file)
    monkeypatch.setattr(module, "_write", write)
    with pytest.raises(KeyboardInterrupt): quantize_folder(tmp_path / "model", tmp_path / "small", texts(), **how)
    left[0] = -1
    made, whole = (load_cooked(f).state_dict() for f in (
        quantize_folder(tmp_path / "model", tmp_path / "small", texts(), **how), tmp_path / "whole"))
    for n in whole: assert torch.equal(made[n], whole[n]), n


def test_what_a_block_put_out_before_anything_was_changed():
    "`wanted` of calibrate, whatever is done to the blocks before; so the last block's error falls too"
    model, batches = llama(), texts(pad=6)
    want, seen = of_blocks(model, batches), []
    broken = copy.deepcopy(model)
    layers = {n: m for n, m in broken.named_modules() if n.endswith("_proj")}
    for stage in calibrate(broken, layers, batches, wanted=True):
        replay = stage.replay
        seen.append(torch.cat([replay.tokens(y, k) for k, y in enumerate(replay.wanted)]))
        with torch.no_grad():
            for p in replay.block.parameters(): p.mul_(1.2)
    assert len(seen) == len(want) > 1
    for a, b in zip(seen, want): torch.testing.assert_close(a, b)
    errors = {}
    for how in ("gptq", Learned(steps=60)):
        small = quantize(copy.deepcopy(model), batches, bits=2, group_size=32, rounding=how)
        errors[str(how)] = (of_blocks(small, batches)[-1] - want[-1]).square().mean().item()
    assert errors[str(Learned(steps=60))] < .8 * errors["gptq"]


@pytest.mark.parametrize("kind,options", [
    (tf.MixtralForCausalLM, dict(num_local_experts=4, num_experts_per_tok=2)),
    (tf.GptOssForCausalLM, dict(num_local_experts=4, num_experts_per_tok=2, head_dim=16, num_hidden_layers=2)),
])
def test_experts_are_learned_too(kind, options, monkeypatch):
    "Stacks of experts, stored either way round: the block's error falls, and what was learned is what is stored"
    model, told, seen = llama(kind, **options), [], []
    learn = learn_rounding
    def listen(replay, layers, how):
        codes, errors = learn(replay, layers, how)
        told.append(errors)
        seen.append({n: codes[n] for n in layers if len(layers[n]) > 3})
        return codes, errors
    monkeypatch.setattr(sys.modules["bmlab.cook.quantize"], "learn_rounding", listen)
    for p in model.parameters(): p.data.mul_(5 if p.ndim == 3 else 1)
    how = dict(modules="*experts", bits=4, group_size=32, rounding=Learned(steps=60))
    small = quantize(copy.deepcopy(model), texts()[:2], **how)
    assert len(told) == 2 and len(seen[0]) == 2
    assert all(least <= first for first, least in told) and any(least < first for first, least in told)
    for name, (codes, scale, zero) in seen[0].items():
        stack, grid = small.get_submodule(name), Grid(bits=4, group_size=32)
        want = grid.values(codes.float(), scale, zero).view(4, stack.out_features, -1)
        torch.testing.assert_close(stack.dequantize(), want, rtol=1e-3, atol=1e-5)


def test_experts_are_named():
    "No stack of experts is packed in 3 bits, and none is left in float without a word"
    options = dict(num_local_experts=4, num_experts_per_tok=2)
    with pytest.raises(ValueError, match="bits=3: model.layers.0.mlp.experts holds experts.*exclude"):
        quantize(llama(tf.MixtralForCausalLM, **options), texts(), bits=3, group_size=32)


@pytest.mark.parametrize("make,said", [
    (lambda: Learned(steps=0), "steps=0"), (lambda: Learned(looks=0), "looks=0"), (lambda: Learned(rate=-1), "rate=-1"),
    (lambda: quantize(llama(), bits=3, rounding="learned"), "need calib="),
    (lambda: quantize(llama(), texts(), bits=5), "bits=5: one of 8, 4, 3, 2"),
    (lambda: quantize(llama(), texts(), rounding="lerned"), "rounding='lerned'"),
    (lambda: Grid(bits=3), "3 bits need groups"), (lambda: LowBitLinear(64, 8, bits=4), "Int4Linear has 4"),
])
def test_refusals(make, said):
    with pytest.raises(ValueError, match=said): make()


def test_nearest_is_the_nearest():
    "No number of the grid is nearer than the one that was taken"
    set_seed(0)
    grid, w = Grid(bits=2, group_size=32), torch.randn(16, 64)
    codes, scale, zero = to_nearest(w, grid)
    got = LowBitLinear.from_float(nn.Linear(64, 16), lambda _: (codes, scale, zero), 32, 2).dequantize()
    every = torch.stack([grid.values(torch.full_like(w, q), scale.float(), zero.float()) for q in range(-2, 2)])
    assert torch.allclose((got - w).abs(), (every - w).abs().amin(0))

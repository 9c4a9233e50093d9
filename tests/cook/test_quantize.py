"Rounding: other libraries' codes, dense solves, and what a recipe keeps whatever is done to the model."
import copy, importlib, itertools, math

import pytest
import torch
import torch.nn.functional as F
import transformers as tf
from torch import nn

from bmlab.cook.cook import Cook, Method
from bmlab.cook.report import perplexity
from bmlab.cook.chain import chain, parametrize_weight, unparametrize
from bmlab.kernels.exchange import dequantize
from bmlab.train.processes import run_ranks
from bmlab.data.samples import Batches, pack_tokens, sample_texts, split
from bmlab.cook.fakequant import FakeQuant
from bmlab.models.load import load
from bmlab.cook.quantize import Grid, Int8GroupLinear, gptq, quantize, to_nearest
from bmlab.cook.calibrate import calibrate

TINY = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            vocab_size=99)
IDS = torch.randint(0, 99, (4, 16), generator=torch.Generator().manual_seed(1))
CALIB = [{"input_ids": IDS, "labels": IDS}, {"input_ids": IDS.flip(1), "labels": IDS.flip(1)}]


def llama(**options):
    torch.manual_seed(0)
    return tf.LlamaForCausalLM(tf.LlamaConfig(**TINY | options)).eval()


def logits(model):
    with torch.no_grad(): return model.eval()(IDS).logits


def relative(got, want): return ((got.double() - want.double()).norm() / want.double().norm()).item()


# ── oracles ──────────────────────────────────────────────────────────────────────────────────────────────────────────

# torchao 0.18's quantize_affine for a zero point of 0
def affine(w, scale): return torch.clamp(torch.round(w * (1.0 / scale)), -128, 127)


@pytest.mark.parametrize("group", [None, 64])
def test_int8_codes_are_those_of_torchaos_formula(group):
    torch.manual_seed(0)
    w = torch.randn(64, 256)
    w[:, ::50] *= 4
    codes, scale = to_nearest(w, Grid(group_size=group))
    blocks, s = w.view(64, -1, group or 256), scale.float().view(64, -1)
    # it spreads 255 steps over the range, we 254: −128 is not used here
    theirs = blocks.abs().amax(-1) / 127.5
    # (a group's scale is float16)
    torch.testing.assert_close(theirs * 127.5 / 127, s, rtol=1e-3 if group else 0, atol=0)
    assert (affine(blocks, s[..., None]) - codes.view(blocks.shape)).abs().max() <= 1
    assert (affine(blocks, s[..., None]) != codes.view(blocks.shape)).sum() <= 2


def test_int8_codes_and_scales_equal_torchaos():
    torchao = pytest.importorskip("torchao.quantization")
    torch.manual_seed(0)
    w = torch.randn(64, 256)
    w[:, ::50] *= 4
    for granularity, grid in ((torchao.PerRow(), Grid()), (torchao.PerGroup(64), Grid(group_size=64))):
        codes, scale = to_nearest(w, grid)
        ours = scale.float().view(64, -1)
        theirs = torchao.Int8Tensor.from_hp(w, granularity)
        torch.testing.assert_close(theirs.scale.view(64, -1) * 127.5 / 127, ours,
                                   rtol=0 if grid.group_size is None else 1e-3, atol=0)
        same = torchao.Int8Tensor.from_hp(w, granularity, scale=ours,
                                          zero_point=torch.zeros_like(ours, dtype=torch.int8))
        assert torch.equal(same.qdata, codes) and (theirs.qdata - codes).abs().max() <= 1


def test_rows_follow_the_formula_of_bmquant():
    w = torch.randn(40, 100, generator=torch.Generator().manual_seed(0))
    codes, scale = to_nearest(w, Grid())
    assert torch.equal(scale, w.abs().amax(1) / 127)
    assert torch.equal(codes.float(), torch.round(w / (w.abs().amax(1, keepdim=True) / 127)))


@pytest.mark.parametrize("grid",
                         [Grid(), Grid(group_size=32), Grid(bits=4, group_size=32),
                          Grid(bits=4, group_size=32, integer_zero=False),
                          Grid(bits=4, group_size=32, symmetric=True)],
                         ids=str)
def test_gptq_against_a_dense_float64_solve(grid):
    "Each column's error goes to the columns that are left as the least-squares solution says, computed anew for each"
    g = torch.Generator().manual_seed(0)
    w, x = torch.randn(24, 64, generator=g), torch.randn(500, 64, generator=g) @ torch.randn(64, 64, generator=g)
    gram, damping = x.T @ x, 0.02
    codes, scale, zero = gptq(w, gram, grid, damping)
    s, z = grid.wide(scale, w).expand(w.shape).double(), 0 if zero is None else grid.wide(zero, w).double()
    H = gram.double() + torch.eye(64).double() * damping * gram.double().diagonal().mean()
    left, now = gram.diagonal().argsort(descending=True).tolist(), w.double().clone()
    want = torch.zeros(24, 64).double()
    zc = z if torch.is_tensor(z) else torch.zeros_like(s)
    while left:
        k, left = left[0], left[1:]
        want[:, k] = ((now[:, k] - zc[:, k]) / s[:, k]).round().clamp(*((-127, 127) if grid.bits == 8 else (-8, 7)))
        if left:
            now[:, left] += torch.linalg.solve(H[left][:, left],
                torch.outer(H[left, k], now[:, k] - want[:, k] * s[:, k] - zc[:, k])).T
    assert (want == codes).double().mean() > 0.99
    error = lambda q: ((grid.values(q.float(), scale, zero) - w) @ x.T).norm()
    assert error(codes) < 1.02 * error(want) and error(codes) < 0.8 * error(grid.round(w, scale, zero))


@pytest.mark.parametrize("K,bits,group", [(64, 8, 32), (128, 8, 128), (64, 4, 32), (256, 4, 64)])
def test_small_codes_are_the_best_there_are(K, bits, group):
    "Of all levels of its own grid, each weight takes the nearest"
    grid, w = Grid(bits=bits, group_size=group), torch.randn(4, K, generator=torch.Generator().manual_seed(0))
    scale, zero = grid.fit(w)
    levels = torch.arange(-127, 128) if bits == 8 else torch.arange(-8, 8)
    s, z = grid.wide(scale, w), 0 if zero is None else grid.wide(zero, w)
    best = (levels * s[..., None] + (z[..., None] if zero is not None else 0) - w[..., None]).abs().amin(-1)
    torch.testing.assert_close((grid.rounded(w) - w).abs(), best, rtol=0, atol=1e-6)


def test_int4_scales_are_solved_for_where_energy_is_known():
    """No other scale and zero point fits the codes better by more than float16's rounding, and the error is well below
    that of ranges that are only cut"""
    g = torch.Generator().manual_seed(0)
    w, energy = torch.randn(16, 256, generator=g), torch.rand(256, generator=g) + 0.1
    for grid in (Grid(bits=4, group_size=64, integer_zero=False), Grid(bits=4, group_size=64, symmetric=True)):
        scale, zero = grid.fit(w, energy)
        q = grid.round(w, scale, zero).double().view(-1, 64)
        e = energy.double().view(1, -1, 64).expand(16, -1, -1).reshape(-1, 64)
        want = w.double().view(-1, 64)
        A = torch.stack([q, torch.ones_like(q)], -1) if zero is not None else q[..., None]
        best = torch.linalg.lstsq(A * e.sqrt()[..., None], (want * e.sqrt())[..., None]).solution
        error = lambda x: ((((A @ x)[..., 0] - want).square() * e).sum(-1))
        ours = (torch.stack([scale, zero], -1).view(-1, 2, 1).double() if zero is not None
                else scale.view(-1, 1, 1).double())
        assert (error(ours) / error(best)).median() < 1.02
        cut = grid.fit(w)
        assert error(ours).sum() < 0.96 * ((grid.values(grid.round(w, *cut), *cut) - w).square() * energy).sum()


# ── calibration ──────────────────────────────────────────────────────────────────────────────────────────────────────

def texts(pad):
    "The same four texts: alone, or in two batches padded on one side; as dicts, labels among them"
    rows = [IDS[i, :n] for i, n in enumerate((7, 16, 11, 4))]
    if pad is None: return [{"input_ids": r[None], "labels": r[None]} for r in rows]
    out = []
    for a, b in ((0, 1), (2, 3)):
        L = max(len(rows[a]), len(rows[b]))
        fill = lambda r, v: torch.cat([torch.full((L - len(r),), v), r][::1 if pad == "left" else -1])
        mask = torch.stack([fill(torch.ones_like(rows[i]), 0) for i in (a, b)])
        out.append({"input_ids": torch.stack([fill(rows[i], 50) for i in (a, b)]), "attention_mask": mask,
                    "labels": torch.stack([fill(rows[i], -100) for i in (a, b)])})
    return out


def mixtral():
    torch.manual_seed(0)
    return tf.MixtralForCausalLM(tf.MixtralConfig(**TINY, num_local_experts=4, num_experts_per_tok=2)).eval()


def t5():
    torch.manual_seed(0)
    return tf.T5ForConditionalGeneration(tf.T5Config(d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4,
                                                     vocab_size=99, decoder_start_token_id=0)).eval()


def measured(model, calib):
    "name → Inputs, of experts too"
    out = {}
    for stage in calibrate(model,
                           {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear)
                            or hasattr(m, "num_experts") and "experts" in n},
                           calib):
        for n, i in stage.items():
            out |= ({f"{n}.{k}.{e}": one for k, stack in i.items() for e, one in enumerate(stack)}
                    if isinstance(i, dict) else {n: i})
    return out


@pytest.mark.parametrize("make,pads", [(llama, ("right", "left")), (mixtral, ("right", "left")), (t5, ("right",))])
def test_padding_is_not_counted(make, pads):
    want = measured(make(), texts(None))
    for pad in pads:
        got = measured(make(), texts(pad))
        assert list(got) == list(want) and any(i.rows for i in got.values())
        for n, i in got.items():
            assert i.rows == want[n].rows, (pad, n)
            if i.rows:
                torch.testing.assert_close(i.gram, want[n].gram, rtol=1e-4, atol=1e-5)
                torch.testing.assert_close(i.peak, want[n].peak, rtol=1e-4, atol=1e-5)


def test_batches_may_be_tensors():
    for options in (dict(), dict(activations=8), dict(bits=4, group_size=32, rounding="awq")):
        a, b = (quantize(llama(), calib, **options).state_dict() for calib in ([IDS], [{"input_ids": IDS}]))
        assert all(torch.equal(t, b[n]) for n, t in a.items())


@pytest.mark.parametrize("bits", [8, 4])
def test_experts_are_rounded_by_the_tokens_that_reach_them(bits):
    torch.manual_seed(1)
    model, calib = mixtral(), [{"input_ids": torch.randint(0, 99, (16, 64))} for _ in range(2)]
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(torch.logspace(1, -1, 32))                  # inputs as uneven as real ones
        for l in model.model.layers:
            l.mlp.experts.gate_up_proj.mul_(4)
            l.mlp.experts.down_proj.mul_(4)
    only = dict(modules="*.mlp.experts", bits=bits, group_size=32 if bits == 4 else None)
    experts = lambda m: m.model.layers[0].mlp.experts
    inputs = measured(model, calib)
    fine, plain = quantize(copy.deepcopy(model), calib, **only), quantize(copy.deepcopy(model), **only)
    for stack in ("gate_up_proj", "down_proj"):
        for e in range(4):
            i, w = inputs[f"model.layers.0.mlp.experts.{stack}.{e}"], getattr(experts(model), stack)[e]
            error = lambda m: (((q := dequantized(experts(m), stack, e) - w) @ i.gram) * q).sum().item()
            assert i.rows > 100 and error(fine) < 0.9 * error(plain), (stack, e)
    cook = Cook(copy.deepcopy(model),
                [FakeQuant(f"w{bits}a16" + ("-g32" if bits == 4 else ""), modules="*.mlp.experts", rounding="gptq")],
                calib=calib)
    small = cook.export()
    assert all(torch.equal(t, fine.state_dict()[n]) for n, t in small.state_dict().items())
    assert relative(logits(small), logits(cook.model)) < 1e-5


def dequantized(experts, stack, e):
    from bmlab.kernels.codes import dequantize_groups, dequantize_rows
    tensors = [t[e] for t in getattr(experts, stack).tensors]
    return (dequantize_rows if len(tensors) == 2 else dequantize_groups)(*tensors)


def test_experts_without_a_token_are_named(caplog):
    model = mixtral()
    with torch.no_grad():
        for l in model.model.layers:
            l.mlp.gate.weight.zero_()
            l.mlp.gate.weight[:2] = 0  # ties: the first two experts get all
    quantize(model, CALIB, bits=4, group_size=32)
    assert "of 4 experts got no token" in caplog.text and logits(model).isfinite().all()


@pytest.mark.parametrize("options,text",
                         [(dict(damping=-0.1), "damping=-0.1"), (dict(damping=math.nan), "damping=nan"),
                          (dict(damping=math.inf), "damping=inf"), (dict(damping="a"), "damping='a'"),
                          (dict(damping=True), "damping=True"), (dict(group_size=48), "group_size=48"),
                          (dict(group_size=64.0), "group_size=64.0"), (dict(group_size=0), "group_size=0"),
                          (dict(bits=4, group_size=-32), "group_size=-32"), (dict(bits=16), "bits=16"),
                          (dict(bits="8"), "bits='8'"), (dict(smooth=math.nan), "smooth=nan"),
                          (dict(smooth=True), "smooth=True"), (dict(activations=4), "activations=4")])
def test_arguments_out_of_range_are_named(options, text):
    model = llama()
    with pytest.raises(ValueError, match=text.replace("(", r"\(")): quantize(model, CALIB, **options)
    assert type(model.lm_head) is nn.Linear
    if "damping" in options or "smooth" in options:
        with pytest.raises(ValueError, match=text): FakeQuant("w8a16", rounding="gptq", **options)


@pytest.mark.parametrize("calib,kind",
                         [([], ValueError), ((b for b in ()), ValueError), ({"input_ids": IDS}, TypeError),
                          (IDS, TypeError), ([1], TypeError)])
def test_what_is_no_batch_is_refused(calib, kind):
    model = llama()
    with pytest.raises(kind, match="calib"): quantize(model, calib)
    assert type(model.lm_head) is nn.Linear


def uneven():
    "A model with a few channels of large inputs"
    model = llama()
    with torch.no_grad():
        for l in model.model.layers:
            for norm in (l.input_layernorm, l.post_attention_layernorm): norm.weight[::11] *= 30
    return model


def test_w8a8_is_smoothed_where_there_are_batches():
    same = lambda a, b: all(torch.equal(t, b.state_dict()[n]) for n, t in a.state_dict().items())
    plain = logits(uneven())
    smoothed, told, without = (quantize(uneven(), CALIB, activations=8, **o)
                               for o in ({}, dict(smooth=0.5), dict(smooth=False)))
    assert same(smoothed, told) and not same(smoothed, without)
    assert relative(logits(smoothed), plain) < 0.7 * relative(logits(without), plain)
    # inputs stay as they are: nothing to smooth
    assert same(quantize(uneven(), CALIB), quantize(uneven(), CALIB, smooth=False))
    assert same(quantize(uneven(), activations=8),
                quantize(uneven(), CALIB, activations=8, smooth=False, rounding="nearest"))
    for calib, want in ((CALIB, dict(calib=CALIB, rounding="nearest")), (None, {})):
        cook = Cook(uneven(), [FakeQuant("w8a8")], calib=calib)
        assert same(cook.export(), quantize(uneven(), activations=8, **want))
        assert ("smooth" in cook.methods[0].state()) == (calib is not None)


def test_smoothed_conv1d():
    torch.manual_seed(0)
    model = tf.GPT2LMHeadModel(tf.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=99)).eval()
    cook = Cook(model, [FakeQuant("w8a8", smooth=0.5)], calib=CALIB)
    assert relative(logits(cook.export()), logits(model)) < 1e-5


# ── recipes ──────────────────────────────────────────────────────────────────────────────────────────────────────────

class Cut(Method):
    "Structure: some neurons go, as the slicer would do it"
    slot = 10
    def __init__(self, keep): self.keep = keep
    def attach(self, model): pass
    def detach(self): pass
    def export(self, small):
        keep = torch.tensor(self.keep)
        for layer in small.model.layers:
            for m, dim in ((layer.mlp.gate_proj, 0), (layer.mlp.up_proj, 0), (layer.mlp.down_proj, 1)):
                for p in chain(m): p.cut(dim, keep)
                with torch.no_grad():
                    m.parametrizations.weight.original.data = m.parametrizations.weight.original.data.index_select(dim,
                                                                                                                   keep)
                m.in_features, m.out_features = m.parametrizations.weight.original.shape[::-1]
        small.config.intermediate_size = len(keep)


class Mask(nn.Module):
    def __init__(self, mask):
        super().__init__()
        self.register_buffer("mask", mask)
    def forward(self, w): return w * self.mask
    def cut(self, dim, index): self.mask = self.mask.index_select(dim, index)


class Zeros(Method):
    "A mask in the forward, baked at export"
    slot = 30
    def attach(self, model):
        for n, m in model.named_modules():
            if n.endswith("up_proj"):
                parametrize_weight(m, "weight",
                                   Mask((torch.arange(m.weight.numel()).view(m.weight.shape) % 4 < 2).float()), 20)
    def detach(self): pass
    @torch.no_grad()
    def export(self, small):
        for m in list(small.modules()):
            for p in chain(m, kind=Mask):
                w = m.parametrizations.weight.original
                w.data = p(w)
                unparametrize(m, "weight", p)


@pytest.mark.parametrize("scheme,options",
                         [("w8a16", {}), ("w8a8", dict(smooth=0.5)), ("w4a16-g32", dict(rounding="gptq")),
                          ("w4a16-g32", dict(rounding="awq"))])
def test_order_of_the_recipe_does_not_matter_and_slices_are_fitted_anew(scheme, options):
    exports, rounding = [], options.get("rounding", "nearest")
    # all, or the first and the last
    for order in list(itertools.permutations(range(3)))[::1 if rounding == "nearest" and not options else 5]:
        methods = [FakeQuant(scheme, skip="lm_head", **options), Cut(list(range(0, 64, 2))), Zeros()]
        exports.append(Cook(llama(), [methods[i] for i in order], calib=CALIB).export())
    first = exports[0].state_dict()
    assert first["model.layers.0.mlp.down_proj.codes"].shape[1] in (32, 16)
    for e in exports[1:]:
        assert all(torch.equal(a, b) for a, b in zip(first.values(), e.state_dict().values()))
        assert list(first) == list(e.state_dict())
    up = exports[0].model.layers[0].mlp.up_proj
    # the mask's zeros, whatever the scheme
    assert (up.dequantize()[:, 2::4] == 0).all() and (up.dequantize()[:, ::4] != 0).any()
    if "w4" in scheme: assert (up.zero == 0).all() and not (exports[0].model.layers[0].mlp.gate_proj.zero == 0).all()


def test_int4_says_that_zeros_save_nothing():
    notes = Cook(llama(), [Zeros(), FakeQuant("w4a16-g32")]).methods[1].state()
    assert notes["2:4 weights stored as int4, no smaller for their zeros"] == 2
    assert not any("zeros" in k
                   for cook in (Cook(llama(), [FakeQuant("w4a16-g32")]), Cook(llama(), [Zeros(), FakeQuant()]))
                   for m in cook.methods for k in m.state())


@pytest.mark.parametrize("calib", [None, CALIB])
def test_w8a8_of_experts_exports_what_was_cooked(calib):
    "A layer that is split multiplies by parts of its rows: there inputs stay as they are, and the rest is W8A8"
    from bmlab.cook.moefy import MoEfy
    model = llama()
    cook = Cook(model, [FakeQuant("w8a8"), MoEfy(experts=8, active=0.5)], calib=calib)
    small = cook.export()
    assert relative(logits(small), logits(model)) < 1e-5
    assert cook.methods[1].state()["layers of experts whose inputs are not rounded"] == 6
    layer = small.model.layers[0]
    assert layer.self_attn.q_proj.activations == 8
    assert {m.activations for n, m in layer.named_modules()
            if n.endswith(("gate_proj", "up_proj", "down_proj"))} == {None}


def test_zeros_stay_while_training_goes_on():
    model = llama()
    cook = Cook(model, [Zeros(), FakeQuant("w4a16-g32", rounding="gptq")], calib=CALIB)
    opt = torch.optim.AdamW(model.train().parameters(), 1e-2, weight_decay=0.5)
    for b in CALIB * 3:
        model(**b).loss.backward()
        opt.step()
        cook.step()
        opt.zero_grad()
    mask = chain(model.model.layers[0].mlp.up_proj)[0].mask
    small = cook.export()
    assert (small.model.layers[0].mlp.up_proj.dequantize()[mask == 0] == 0).all()
    assert relative(logits(small), logits(model)) < 1e-5


def test_a_resumed_recipe_goes_on_where_it_was():
    def recipe(): return Cook(m := llama(), [FakeQuant("w4a16-g32", rounding="gptq", smooth=0.3)], calib=CALIB), m
    cook, model = recipe()
    opt = torch.optim.AdamW(model.parameters(), 1e-2)
    for b in CALIB:
        model(**b).loss.backward()
        opt.step()
        opt.zero_grad()
    other, twin = recipe()
    twin.load_state_dict(copy.deepcopy(model.state_dict()))
    assert torch.equal(logits(twin), logits(model))
    assert all(torch.equal(a, b)
               for a, b in zip(other.export().state_dict().values(), cook.export().state_dict().values()))


def test_a_failing_attach_leaves_no_trace():
    model, before = llama(), llama().state_dict()
    # tokens that do not exist
    bad = [{"input_ids": IDS}, {"input_ids": IDS + 1000}]
    with pytest.raises(Exception): Cook(model, [FakeQuant("w8a16", rounding="gptq")], calib=bad)
    assert list(model.state_dict()) == list(before)
    assert not any(m._forward_pre_hooks or m._forward_hooks or hasattr(m, "parametrizations") for m in model.modules())
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), before.values()))
    Cook(model, [FakeQuant("w8a16", rounding="gptq")], calib=CALIB).detach()


def test_a_delta_lives_on_a_fake_quantized_layer():
    from bmlab.delta.lora import Lora
    for first in ("cook", "delta"):
        model = llama()
        if first == "cook": cook, d = Cook(model, [FakeQuant("w8a8", modules=["q_proj", "v_proj"])]), Lora(model, r=4)
        else: d, cook = Lora(model, r=4), Cook(model, [FakeQuant("w8a8", modules=["q_proj", "v_proj"])])
        quantized = logits(model)
        d.detach()
        assert torch.equal(logits(model), quantized)  # B is zero
        cook.detach()
        assert torch.equal(logits(model), logits(llama())) and type(model.model.layers[0].self_attn.q_proj) is nn.Linear


def test_cached_generation_is_that_of_the_cooked_model():
    model = llama()
    cook = Cook(model, [FakeQuant("w8a16", rounding="gptq")], calib=CALIB)
    take = dict(max_new_tokens=12, do_sample=False, pad_token_id=0)
    assert torch.equal(cook.export().generate(IDS[:2], **take), model.generate(IDS[:2], **take))


@pytest.mark.long
def test_compiled_in_one_piece():
    # what other tests compiled of the same code may be marked to be left alone
    torch._dynamo.reset()
    model = llama(num_hidden_layers=1)
    Cook(model,
         [FakeQuant("w8a8", modules="*.mlp.*", smooth=0.5),
          FakeQuant("w4a16-g32", modules="*.self_attn.*", rounding="gptq")],
         calib=CALIB)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad(): assert relative(compiled(IDS).logits, logits(model)) < 1e-5
    torch._dynamo.reset()


def test_calibration_needs_one_block_at_a_time():
    "Grams of more than one block are never there together"
    import weakref
    model, alive, most = llama(num_hidden_layers=4), [], 0
    layers = {n: m for n, m in model.named_modules() if n.endswith("_proj")}
    for stage in calibrate(model, layers, CALIB):
        most = max(most, sum(r() is not None for r in alive))
        alive += [weakref.ref(i.gram) for i in {id(i): i for i in stage.values()}.values()]
        stage = None
    assert len(alive) == 16 and most <= 4


# ── two processes ────────────────────────────────────────────────────────────────────────────────────────────────────

def trained(sharded, scheme, options):
    from bmlab.cook.cook import Cook
    from bmlab.cook.fakequant import FakeQuant
    torch.manual_seed(0)
    model = tf.LlamaForCausalLM(tf.LlamaConfig(**TINY))
    cook = Cook(model, [FakeQuant(scheme, **options)], calib=CALIB)
    if sharded:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        mesh = init_device_mesh("cpu", (2,))
        for layer in model.model.layers: fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    opt = torch.optim.Adam(model.train().parameters(), 1e-2)
    losses = []
    for i in range(3):
        loss = model(**CALIB[i % 2]).loss + cook.loss()
        loss.backward()
        opt.step()
        cook.step()
        opt.zero_grad()
        losses.append(loss.item())
    return losses, {n: t.clone() for n, t in cook.export().state_dict().items()}


SCHEMES = ("w4a16-g32", dict(rounding="gptq")), ("w8a8", dict(smooth=0.5))


def two_ranks():
    from torch.distributed.fsdp import fully_shard
    late = fully_shard(tf.LlamaForCausalLM(tf.LlamaConfig(**TINY)))
    with pytest.raises(RuntimeError, match="attach Cook before shard"): Cook(late, [FakeQuant()])
    return [trained(True, *s) for s in SCHEMES]


def test_what_is_packed_already_names_the_way_out():
    "Without modules= no pattern is blamed; and the way that is named works"
    model = quantize(llama(), rounding="nearest")
    with pytest.raises(ValueError, match="every layer of the LlamaForCausalLM is packed already; dequantize"):
        quantize(model, rounding="nearest")
    with pytest.raises(ValueError, match="what modules='q_proj' matches is packed already"):
        quantize(model, modules="q_proj", rounding="nearest")
    told = []
    def bar(rows, **how): return told.append(how | {"rows": len(rows)}) or rows
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(importlib.import_module("bmlab.cook.quantize"), "tqdm", bar)
        quantize(dequantize(model), bits=3, group_size=32, modules="mlp.*_proj", rounding="nearest")
    assert told == [{"desc": "packing", "delay": 2.0, "leave": False, "rows": 6}]


@pytest.mark.long
def test_two_ranks_are_one_and_sharded_already_is_refused():
    alone = [trained(False, *s) for s in SCHEMES]
    for rank in run_ranks(two_ranks):
        for (losses, small), (theirs, state) in zip(alone, rank):
            assert theirs == losses and list(state) == list(small) and all(torch.equal(state[n], small[n])
                                                                           for n in small)


# ── a model trained here, and a real one ─────────────────────────────────────────────────────────────────────────────

def character_model(steps=300, D=128, layers=3, length=64, seed=0):
    "A small model of characters, trained in fp32; held-out batches and calibration batches"
    torch.manual_seed(seed)
    text = "\n".join(sample_texts("shakespeare").text)
    chars = sorted(set(text))
    ids = torch.tensor([chars.index(c) for c in text])
    rows = ids[:len(ids) // length * length].view(-1, length)
    rows = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))]
    held, train = rows[:128], rows[128:]
    model = tf.LlamaForCausalLM(tf.LlamaConfig(hidden_size=D, intermediate_size=256, num_hidden_layers=layers,
                                               num_attention_heads=4, num_key_value_heads=4, vocab_size=len(chars)))
    continue_training(model, train, steps, 3e-3)
    batches = lambda r: [{"input_ids": b, "labels": b} for b in r.split(16)]
    return model.eval(), batches(held), batches(train[:128]), train


def continue_training(model, rows, steps, lr, cook=None, seed=0):
    opt, g = torch.optim.AdamW(model.train().parameters(), lr, weight_decay=0.01), torch.Generator().manual_seed(seed)
    rate = torch.optim.lr_scheduler.OneCycleLR(opt, lr, total_steps=steps)
    for _ in range(steps):
        b = rows[torch.randint(0, len(rows), (16,), generator=g)]
        loss = model(input_ids=b, labels=b).loss + (0 if cook is None else cook.loss())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        rate.step()
        opt.zero_grad()
        if cook is not None: cook.step()
    return model.eval()


@pytest.mark.slow
def test_four_bits_of_a_model_trained_in_float():
    model, held, calib, train = character_model()
    before, rows = perplexity(model, held), {}
    def tell(name, m): rows[name] = perplexity(m, held) / before - 1
    tell("int4 g64 nearest", quantize(copy.deepcopy(model), bits=4, group_size=64))
    tell("int4 g64 GPTQ", quantize(copy.deepcopy(model), calib, bits=4, group_size=64))
    tell("int4 g64 AWQ", quantize(copy.deepcopy(model), calib, bits=4, group_size=64, rounding="awq"))
    tell("int8", quantize(copy.deepcopy(model), calib))
    aware, floats = copy.deepcopy(model), continue_training(copy.deepcopy(model), train, 100, 3e-4)
    cook = Cook(aware, [FakeQuant("w4a16-g64")])
    continue_training(aware, train, 100, 3e-4, cook)
    tell("int4 g64 trained with the rounding", small := cook.export())
    longer = perplexity(floats, held)
    rows["float, trained as long"] = longer / before - 1
    print(f"\nperplexity of a model of characters: {before:.4f}; "
          + "; ".join(f"{k} {v:+.2%}" for k, v in rows.items()))
    assert rows["int4 g64 GPTQ"] < min(0.08, rows["int4 g64 nearest"]) and rows["int8"] < 0.005
    aware_loss, late_loss = (
        perplexity(m, held) / longer - 1 for m in (small, quantize(copy.deepcopy(floats), bits=4, group_size=64))
    )  # of models trained as long
    print(f"against float trained as long: trained with the rounding {aware_loss:+.2%}, rounded to nearest afterwards "
          f"{late_loss:+.2%}")
    assert aware_loss < min(0.08, late_loss)
    with torch.no_grad(): assert relative(small(held[0]["input_ids"]).logits, aware(held[0]["input_ids"]).logits) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("name,options,bound",
                         [("W8A16, nearest", dict(rounding="nearest"), 0.01), ("W8A16", {}, 0.005),
                          ("W8A8, nearest", dict(rounding="nearest", activations=8), 0.03),
                          ("W8A8", dict(activations=8), 0.03), ("W4A16 g64", dict(bits=4, group_size=64), 0.08)])
def test_perplexity_of_a_real_model(name, options, bound):
    """What a user gets without further options, on texts that nothing was chosen by: damping, scales and smoothing were
    chosen on the last training texts"""
    from test_quality import calibration, held_out
    model, tok = load("smollm2-135m", device="cpu")
    batches = held_out(tok, 8192)
    before = perplexity(model, batches)
    calib = (calibration(tok) if options.get("bits") != 4
             else list(Batches(pack_tokens(split(sample_texts("movies").text, held_out=0.2)[0][:800], tok, 128),
                               batch=4))[:16])
    after = perplexity(quantize(model, calib, **options), batches)
    print(f"\n{name}: perplexity {before:.4f} → {after:.4f} ({after / before - 1:+.3%})")
    assert after < (1 + bound) * before


# ── on a GPU ─────────────────────────────────────────────────────────────────────────────────────────────────────────

@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scheme,options",
                         [("w8a16", {}), ("w8a16-g32", {}), ("w8a8", dict(smooth=0.5)),
                          ("w4a16-g32", dict(rounding="gptq")), ("w4a16-g32", dict(rounding="awq"))])
def test_export_on_a_gpu_computes_what_the_cooked_model_does(scheme, options, dtype):
    torch.manual_seed(0)
    model = (tf.LlamaForCausalLM._from_config(tf.LlamaConfig(**TINY
                                                             | dict(hidden_size=64, intermediate_size=128,
                                                                    head_dim=16)),
                                              dtype=dtype).cuda().eval())
    calib = [{k: v.cuda() for k, v in b.items()} for b in CALIB]
    cook = Cook(model, [FakeQuant(scheme, **options)], calib=calib)
    small = cook.export()
    for ids in (IDS.cuda(), IDS[:1, :3].cuda()):
        # TF32 and bfloat16 products
        with torch.no_grad():
            assert relative(small(ids).logits, model(ids).logits) < (1e-3 if dtype == torch.float32 else 0.05)
    on_cpu = Cook(copy.deepcopy(llama()), [FakeQuant(scheme, **options)], calib=CALIB).export()
    assert {n: t.shape for n, t in on_cpu.state_dict().items()}.keys() == small.state_dict().keys()


@pytest.mark.cuda
def test_int8_groups_on_a_gpu():
    layer = Int8GroupLinear.from_float(nn.Linear(512, 256), group_size=64).to("cuda", torch.bfloat16)
    for M in (1, 17, 300):
        x = torch.randn(M, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        y = layer(x)
        y.sum().backward()
        want = F.linear(x.double(), layer.dequantize(torch.float64), layer.bias.double())
        assert relative(y, want) < 2**-7
        assert relative(x.grad, layer.dequantize(torch.float64).sum(0).expand(M, -1)) < 2**-6


def test_two_of_a_kind_in_either_order():
    "Two FakeQuants with GPTQ on different layers: neither sees the other's rounding while it is fitted"
    from bmlab.cook.cook import Cook
    from bmlab.cook.fakequant import FakeQuant
    torch.manual_seed(0)
    model = tf.LlamaForCausalLM(tf.LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                                               num_attention_heads=4, num_key_value_heads=2, vocab_size=60,
                                               bos_token_id=1, eos_token_id=2, pad_token_id=0)).eval()
    calib, files = [{"input_ids": torch.randint(3, 60, (4, 16))}], []
    for turn in (1, -1):
        cook = Cook(model,
                    [FakeQuant("w4a16-g32", modules="*.mlp.*", rounding="gptq"),
                     FakeQuant("w8a8", modules="*.self_attn.*", rounding="gptq", smooth=0.5)][::turn],
                    calib=calib)
        files.append(cook.export().state_dict())
        cook.detach()
    assert all(torch.equal(t, files[1][k]) for k, t in files[0].items())


def test_scales_beyond_float16_are_refused():
    for how in (dict(bits=4), dict(bits=8, group_size=32)):
        model = llama()
        model.model.layers[0].self_attn.q_proj.weight.data[0, 0] = 1e8
        with pytest.raises(ValueError, match="beyond float16"): quantize(model, **how)

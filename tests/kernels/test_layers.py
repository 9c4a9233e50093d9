"""Packed layers where a notebook would be too slow or too long

Grids of shapes, threads, fresh processes, families of experts, the real model; and the GPU."""
import copy
import gc
import importlib
import itertools
import pickle
import subprocess
import sys
import weakref

import pytest
import torch
import torch.nn.functional as F
import transformers as tf
from torch import nn
from tqdm import tqdm

from bmlab.kernels import codes as packing
from bmlab.core import count, roles, weights
from bmlab.kernels.experts import PackedStack, experts_refusal, pack_experts
from bmlab.kernels.codes import (
    dequantize_groups, dequantize_rows, packed_linear, packed_linear4, quantize_groups, quantize_rows)
from bmlab.kernels.layers import Int4Linear, Int8Linear, arrange_int4, join_packed, pack_linears, packable
from fresh import fresh_python

# float32: sums in another order; the halves: one rounding of the result, or two
LIMIT = {torch.float32: 1e-6, torch.float16: 2**-10, torch.bfloat16: 2**-7, torch.float64: 1e-6}
TINY = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, vocab_size=128)
vnni = pytest.mark.skipif(not packing._integers(), reason="needs a processor with VNNI")
gpu = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def error(got, want): return ((got.double() - want.double()).norm() / want.double().norm()).item()


def llama(**options):
    torch.manual_seed(0)
    return tf.LlamaForCausalLM(tf.LlamaConfig(**TINY, num_key_value_heads=2, **options)).eval()


# ---- the products

@pytest.mark.parametrize("dtype", LIMIT)
@pytest.mark.parametrize("N,K", [(1, 32), (7, 96), (33, 512), (400, 352), (16, 1024), (700, 257)])
def test_every_way_equals_float64(N, K, dtype):
    torch.manual_seed(0)
    w = torch.randn(N, K) * torch.logspace(-3, 0, N)[:, None]
    kinds = [(packed_linear, quantize_rows(w), dequantize_rows)] + [
        (packed_linear4, quantize_groups(w, g), dequantize_groups) for g in (32, 64, 128) if K % g == 0
    ]
    for multiply, packed, widen in kinds:
        for M in (1, 2, 5, 16, 17, 70):
            x, b = torch.randn(M, K).to(dtype), torch.randn(N).to(dtype)
            want = F.linear(x.double(), widen(*packed, torch.float64), b.double())
            with torch.no_grad(): y = multiply(x, *packed, b)
            assert y.dtype == dtype and error(y, want) < LIMIT[dtype], (multiply.__name__, M)


@vnni
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_row_depends_on_nothing_else(dtype):
    "Neither on its company, nor its place, nor on threads: integers add up in any order"
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    for N, K in ((700, 300), (2000, 576), (130, 4096)):
        codes, scale = quantize_rows(torch.randn(N, K))
        assert codes.numel() >= packing._DIGITS_FROM
        x = (torch.randn(40, K) * torch.logspace(-2, 2, 40)[:, None]).to(dtype)
        whole = packed_linear(x, codes, scale)
        try:
            for n in (1, 2):
                torch.set_num_threads(n)
                for M in (1, 2, 3, 7, 16, 17, 40):
                    assert torch.equal(packed_linear(x[:M], codes, scale), whole[:M]), (N, K, M, n)
                order = torch.randperm(40)
                assert torch.equal(packed_linear(x[order], codes, scale), whole[order])
                assert torch.equal(torch.cat([packed_linear(r, codes, scale) for r in x.split(1)]), whole)
        finally: torch.set_num_threads(threads)


def test_few_rows_of_bfloat16_do_not_depend_on_each_other():
    torch.manual_seed(0)
    for N, K in ((576, 576), (100, 96), (49, 1536)):
        codes, scale = quantize_rows(torch.randn(N, K))
        x = torch.randn(16, K).bfloat16()
        whole = packed_linear(x, codes, scale)
        for M in range(1, 17): assert torch.equal(packed_linear(x[:M], codes, scale), whole[:M]), (N, K, M)


@vnni
def test_outliers_and_odd_rows_through_the_digits():
    torch.manual_seed(0)
    codes, scale = quantize_rows(torch.randn(400, 1000))
    w = dequantize_rows(codes, scale, torch.float64)
    for change in (
            lambda x: x * (1 + 1e4 * (torch.rand_like(x) < 1e-3)), lambda x: x * 1e-30, lambda x: x * 1e30,
            lambda x: x.abs(), lambda x: -x.abs(), lambda x: x * 0):
        x = change(torch.randn(6, 1000))
        want = F.linear(x.double(), w)
        for rows in (x, x[:1]):
            assert (packed_linear(rows, codes, scale) - want[: len(rows)]).abs().max() <= 2e-6 * want[
                : len(rows)
            ].abs().max()
    x = torch.randn(3, 1000)
    x[1, 5] = float("inf")
    x[2, 7] = float("nan")
    y = packed_linear(x, codes, scale)
    assert y[0].isfinite().all() and not y[1].isfinite().any() and y[2].isnan().all()
    strided = torch.randn(4, 2000)[:, ::2]
    assert error(packed_linear(strided, codes, scale), F.linear(strided.double(), w)) < 1e-6


def test_without_vnni_the_same_numbers(monkeypatch):
    torch.manual_seed(0)
    codes, scale = quantize_rows(torch.randn(300, 600))
    x = torch.randn(20, 600)
    fast, fast8 = packed_linear(x, codes, scale), packed_linear(x, codes, scale, activations=8)
    monkeypatch.setattr(packing, "_integers", lambda: False)
    assert error(packed_linear(x, codes, scale), fast) < 1e-6
    assert torch.equal(packed_linear(x, codes, scale, activations=8), fast8)


def test_groups_beat_every_single_clip():
    "The share of its range that a group takes is the best of those tried, or has a zero point beside that is better"
    torch.manual_seed(0)
    w = torch.randn(20, 256) ** 3
    part, found = w.view(20, -1, 64), {}
    for integer_zero in (True, False):
        errors = torch.stack([packing._better(part, *r, None)[2] for r in packing._ranges(part, integer_zero)])
        got = (dequantize_groups(*quantize_groups(w, 64, integer_zero)) - w).view(20, -1, 64).square().sum(-1)
        found[integer_zero] = got / errors.amin(0)
        assert (got < errors[0]).any()
    assert torch.allclose(found[False], torch.ones(()), rtol=1e-3)
    assert (found[True] < 1 + 1e-3).all() and (found[True] < 0.99).any()


def test_a_zero_point_is_a_code():
    "Of any weights: the value of a code exactly, so that zero is a value of each group and other formats hold the same"
    g = torch.Generator().manual_seed(0)
    for size in (1e-6, 1e-3, 1.0, 1e3):
        w = (torch.randn(8, 256, generator=g) + torch.randn(8, 1, generator=g)) * size
        w[:, 5] = 0
        codes, scale, zero = quantize_groups(w, 32)
        z = 8 - zero.float() / scale.float()
        assert torch.equal(z, z.round()) and z.min() >= 0 and z.max() <= 15
        assert torch.equal((8 - z) * scale.float(), zero.float())
        assert (dequantize_groups(codes, scale, zero)[:, 5] == 0).all()

    big = torch.randn(64, 20000 // 32 * 32)
    for i in (0, 63):
        assert all(
            torch.equal(a[i : i + 1], b) for a,
            b in zip(quantize_groups(big, 32), quantize_groups(big[i : i + 1], 32)))  # slices of rows are no matter


def test_quantizing_in_slices(monkeypatch):
    w = torch.randn(50, 96)
    whole8, whole4 = quantize_rows(w), quantize_groups(w, 32)
    wide = dequantize_groups(*whole4)
    monkeypatch.setattr(packing, "_SLICE_BYTES", 4000)
    for a, b in zip((*whole8, *whole4), (*quantize_rows(w), *quantize_groups(w, 32))): assert torch.equal(a, b)
    assert torch.equal(dequantize_groups(*whole4), wide)


def test_blocks_smaller_than_the_matrix(monkeypatch):
    monkeypatch.setattr(packing, "_BLOCK_BYTES", 3000)
    monkeypatch.setattr(packing, "_integers", lambda: False)
    monkeypatch.setattr(packing, "_STRETCH_BYTES", 3000)
    for dtype in (torch.float32, torch.bfloat16): test_every_way_equals_float64(33, 512, dtype)


@vnni
def test_stretches_smaller_than_the_matrix(monkeypatch):
    torch.manual_seed(0)
    codes, scale = quantize_rows(torch.randn(700, 300))
    x = torch.randn(20, 300)
    whole = packed_linear(x, codes, scale)
    monkeypatch.setattr(packing, "_STRETCH_BYTES", 30_000)
    monkeypatch.setattr(packing, "_PRODUCT_BYTES", 1000)
    for M in (1, 2, 20): assert torch.equal(packed_linear(x[:M], codes, scale), whole[:M])


@pytest.mark.long
def test_fake_and_meta_tensors_pass(monkeypatch):
    from torch._subclasses.fake_tensor import FakeTensorMode
    monkeypatch.setattr(packing, "_DIGITS_FROM", 0)
    for model in (pack_linears(llama()), pack_linears(llama(), 4, group_size=32)):
        with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
            for M in (1, 40): assert model(torch.zeros(1, M, dtype=torch.long)).logits.shape == (1, M, 128)
    for bits in (4, 8):
        assert pack_linears(llama().to("meta"), bits)(
            torch.zeros(2, 3, dtype=torch.long, device="meta")
        ).logits.shape == (2, 3, 128)


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the real kernels are tested")
@pytest.mark.parametrize("bits", [8, 4])
def test_the_gpu_s_choice_in_the_interpreter(bits):
    "What a GPU would take for 1, 16, 17 and 40 rows, by Triton's interpreter"
    pytest.importorskip("triton")
    torch.manual_seed(0)
    w, b = torch.randn(48, 96) * 0.1, torch.randn(48)
    codes, scale, zero = (*quantize_rows(w), None) if bits == 8 else quantize_groups(w, 32)
    for M in (1, 16, 17, 40):
        x = torch.randn(M, 96)
        assert (
            error(
                packing._triton(x, codes, scale, zero, b),
                F.linear(x.double(), packing._widened(codes, scale, zero, torch.float64), b.double()))
            < 1e-5
        ), M


# ---- models

@pytest.mark.long
def test_packing_imports_neither_triton_nor_what_is_optional():
    code = (
        "import sys, bmlab.kernels, bmlab.kernels.layers\nassert not {'triton', 'bmlab.kernels.triton_products'} & "
        "set(sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize("bits", [8, 4])
def test_a_lora_learns_on_a_packed_model(bits):
    from bmlab.delta.lora import Lora
    model = pack_linears(llama(), bits)
    plain = {n: t.clone() for n, t in model.state_dict().items()}
    lora = Lora(model, r=4)
    lora.freeze()
    opt, ids = (
        torch.optim.AdamW(lora.trainable(), lr=0.02),
        torch.randint(0, 128, (2, 12), generator=torch.Generator().manual_seed(0)))
    losses = []
    for _ in range(8):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        opt.step()
        opt.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.1
    lora.detach()
    assert all(torch.equal(t, plain[n]) for n, t in model.state_dict().items())


def test_a_lora_on_packed_experts_is_refused():
    from bmlab.delta.lora import Lora
    model = pack_linears(moe("Mixtral"))
    state, ids = list(model.state_dict()), torch.arange(5, 12)[None]
    want = model(ids).logits.detach()
    with pytest.raises((TypeError, LookupError)): Lora(model, r=4, modules="gate_up_proj")
    assert list(model.state_dict()) == state and torch.equal(model(ids).logits, want)
    # attention is packed linear layers: fine
    Lora(model, r=4)


def test_shared_weights_stay_shared_in_four_bits():
    a, b = nn.Linear(64, 8), nn.Linear(64, 8)
    b.weight = a.weight
    net = pack_linears(nn.ModuleDict({"a": a, "b": b}), 4, modules=["a", "b"])
    assert net["a"].codes is net["b"].codes and net["a"].zero is net["b"].zero and count(net).total == 64 * 8 + 16
    moved = copy.deepcopy(net).to(torch.bfloat16)
    assert moved["a"].scale is moved["b"].scale and moved["a"].scale.dtype == torch.float16
    with pytest.raises(ValueError, match="tied to another"): join_packed([net["a"], net["b"]])


@pytest.mark.parametrize("bits", [8, 4])
def test_decoding_with_a_cache_equals_the_whole_pass(bits):
    model = pack_linears(llama(), bits)
    ids = torch.randint(0, 128, (1, 10))
    with torch.no_grad():
        whole, cache, steps = model(ids).logits, None, []
        for i in range(10):
            out = model(ids[:, i:i + 1], past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            steps.append(out.logits)
    assert error(torch.cat(steps, 1), whole) < 1e-5


def test_arranged_copies():
    model = pack_linears(llama(), 4, group_size=32, embeddings=False)
    before, size, ids = (
        model(torch.ones(1, 1, dtype=torch.long)).logits.detach(), count(model).bytes, torch.randint(0, 128, (2, 5)))
    state = {n: t.clone() for n, t in model.state_dict().items()}
    assert arrange_int4(model) is model and count(model).bytes > size and list(model.state_dict()) == list(state)
    with torch.no_grad(): assert 0 < error(model(torch.ones(1, 1, dtype=torch.long)).logits, before) < 0.02
    other = pack_linears(llama(), 4, group_size=32, embeddings=False)
    for m in other.modules():
        if isinstance(m, Int4Linear): m.codes.fill_(0x88)
    # new weights: the copies of the old ones are dropped
    model.load_state_dict(other.state_dict())
    assert torch.equal(model(ids).logits, other(ids).logits) and count(model).bytes == size
    arrange_int4(model)
    arrange_int4(model, False)
    assert count(model).bytes == size


def test_joined_layers_move_and_stream():
    "Views stay right when written through, and after a move each layer holds its own again"
    model = pack_linears(llama(), 8)
    attn, x = model.model.layers[0].self_attn, torch.randn(2, 64)
    layers = [attn.q_proj, attn.k_proj, attn.v_proj]
    want = [m(x) for m in layers]
    codes, scale, bias = join_packed(layers)
    assert bias is None and codes.shape == (128, 64)
    assert error(packed_linear(x, codes, scale), torch.cat(want, 1)) < 1e-6
    slab = torch.empty(codes.numel(), dtype=torch.int8)                          # as a streamed block would hold it
    moved = slab.view(codes.shape).copy_(codes)
    for m, part in zip(layers, moved.split([m.out_features for m in layers])): m.codes = part
    assert join_packed(layers)[0].data_ptr() == slab.data_ptr()
    assert all(torch.equal(m(x), y) for m, y in zip(layers, want))
    model.to(torch.bfloat16).to(torch.float32)
    assert all(torch.equal(m(x), y) for m, y in zip(layers, want))
    assert torch.equal(join_packed(layers)[0], codes)


# ---- experts

MOE = dict(moe_intermediate_size=96, num_experts=4, num_experts_per_tok=2)
EXPERTS = {
    "Mixtral": dict(num_key_value_heads=2, num_local_experts=4),
    "Qwen2Moe": dict(num_key_value_heads=2, **MOE, shared_expert_intermediate_size=96),
    "Qwen3Moe": dict(num_key_value_heads=2, head_dim=16, **MOE),
    "GptOss": dict(num_key_value_heads=2, head_dim=16, num_local_experts=4),
    "Olmoe": dict(num_key_value_heads=2, num_experts=4, num_experts_per_tok=2),
    "DeepseekV3": dict(
        num_key_value_heads=4, moe_intermediate_size=96, n_routed_experts=4, num_experts_per_tok=2, n_group=1,
        topk_group=1, first_k_dense_replace=1, n_shared_experts=1, kv_lora_rank=16, q_lora_rank=16, qk_rope_head_dim=16,
        qk_nope_head_dim=16, v_head_dim=16),
    "GraniteMoe": dict(num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2),
    "PhiMoE": dict(num_key_value_heads=2, num_local_experts=4),
}
CLASS = {"PhiMoE": ("PhimoeConfig", "PhimoeForCausalLM")}


def moe(family):
    torch.manual_seed(0)
    config, cls = CLASS.get(family, (family + "Config", family + "ForCausalLM"))
    model = getattr(tf, cls)(getattr(tf, config)(**TINY, **EXPERTS[family], pad_token_id=0)).eval()
    for m in model.modules():
        if any(p.ndim == 3 for p in m.parameters(recurse=False)):
            for p in m.parameters(recurse=False): nn.init.normal_(p, std=0.1)
    return model


@pytest.mark.parametrize("family", EXPERTS)
def test_experts_of_each_family(family):
    model, ids = moe(family), torch.randint(5, 120, (2, 7))
    known = [m for m in model.modules() if not experts_refusal(m)]
    if not known:
        stacked = [m for m in model.modules() if any(p.ndim == 3 for p in m.parameters(recurse=False))]
        return pytest.skip(f"{family}: {[experts_refusal(m) for m in stacked][:1]}")
    for bits in (8, 4):
        small, wide = copy.deepcopy(model), copy.deepcopy(model)
        for a, b in zip(
                [m for m in small.modules() if not experts_refusal(m)],
                [m for m in wide.modules() if not experts_refusal(m)]):
            pack_experts(a, bits)
            with torch.no_grad():
                for n, s in a.named_children():
                    if isinstance(s, PackedStack):
                        b._parameters[n].copy_(s.dequantize().transpose(1, 2) if b.is_transposed else s.dequantize())
        with torch.no_grad(): got, want = small(ids).logits, wide(ids).logits
        assert error(got, want) < 1e-5, (family, bits)
        # what transformers itself would choose changes nothing
        for how in ("batched_mm", "grouped_mm"):
            wide.set_experts_implementation(how)
            with torch.no_grad(): assert error(got, wide(ids).logits) < 1e-5, (family, bits, how)


@pytest.mark.long
def test_a_packed_mixture_in_a_fresh_process(tmp_path):
    model = pack_linears(moe("Mixtral"), 4, group_size=32)
    ids = torch.arange(5, 12)[None]
    torch.save({"model": model, "logits": model(ids).logits.detach()}, tmp_path / "a.pt")
    code = (
        f"import torch; d = torch.load({str(tmp_path / 'a.pt')!r}, weights_only=False); assert "
        "torch.equal(d['model'](torch.arange(5, 12)[None]).logits, d['logits'])"
    )
    fresh_python(code, check=True)
    assert torch.equal(
        model.generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=0),
        pickle.loads(pickle.dumps(model)).generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=0))
    fresh = pack_linears(moe("Mixtral"), 4, group_size=32)
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(fresh(ids).logits, model(ids).logits)


def test_a_cooked_mixture_is_saved_and_loaded(tmp_path):
    from bmlab.cook.report import load_cooked, save_cooked
    model, ids = pack_linears(moe("Mixtral")), torch.arange(5, 12)[None]
    save_cooked(model, tmp_path)
    back = load_cooked(tmp_path)
    assert torch.equal((back[0] if isinstance(back, tuple) else back).eval()(ids).logits, model(ids).logits)


def test_a_mixture_is_counted_and_named():
    model = moe("Mixtral")
    total, names = count(model).total, {n for n, r in roles(model).items() if "experts" in n}
    assert {"model.layers.0.mlp.experts", "model.layers.0.self_attn.q_proj"} <= set(packable(model))
    pack_linears(model, exclude="layers[1].mlp.experts")
    assert count(model).total == total and {n for n, r in roles(model).items() if "experts" in n} == names
    assert {w.dtype for w in weights(model) if "experts" in w.name} == {"int8", "float32"}
    assert list(packable(model)) == ["model.layers.1.mlp.experts"]


def test_long_packing_shows_how_far_it_is(monkeypatch, capsys):
    "One step of the bar for each weight, tied ones once; nothing where all is done within two seconds"
    told = []
    def bar(rows, **how):
        told.append((how, len(rows)))
        return tqdm(rows, mininterval=0, **how | {"delay": 1e-9})
    model = tf.LlamaForCausalLM(tf.LlamaConfig(**TINY, tie_word_embeddings=True)).eval()
    pack_linears(copy.deepcopy(model), bits=4, group_size=32)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(importlib.import_module("bmlab.kernels.layers"), "tqdm", bar)
    pack_linears(model, bits=4, group_size=32)
    quiet = {"delay": 2.0, "leave": False}
    assert told == [(quiet | {"desc": "packing experts to int4"}, 0), (quiet | {"desc": "packing to int4"}, 2 * 7 + 1)]
    shown = capsys.readouterr().err
    assert "packing to int4" in shown and "15/15" in shown and "experts" not in shown


# ---- the real model

@pytest.mark.slow
def test_four_bits_and_w8a8_on_the_real_model():
    """What each width costs in bytes and in agreement with float

    Its file was int4 in groups of 32 with zero points between codes, which that width gives back nearly exactly."""
    from bmlab.models.load import load
    model, tok = load("smollm2-135m", device="cpu")
    model.model.layers = model.model.layers[:10]
    ids = tok(
        "The capital of France is Paris. The capital of Germany is Berlin. Water boils at one hundred degrees. " * 3,
        return_tensors="pt").input_ids
    rows = {}
    with torch.no_grad():
        want = model(ids).logits[0].log_softmax(-1)
        ways = {"int8": {}, "w8a8": {"activations": 8}, "int4 g128": {"bits": 4}}
        for name, options in (ways | {"int4 g32": {"bits": 4, "group_size": 32, "integer_zero": False}}).items():
            small = pack_linears(copy.deepcopy(model), **options)
            got = small(ids).logits[0].log_softmax(-1)
            rows[name] = (
                count(small).bytes / count(model).bytes, (want.exp() * (want - got)).sum(-1).mean().item(),
                (got.argmax(-1) == want.argmax(-1)).float().mean().item())
    for name, (size, kl, same) in rows.items():
        print(f"{name:10} {size:.3f} of the bytes, KL {kl:.2e}, same next token {same:.1%}")
    assert rows["int8"][1] < 0.01 and rows["w8a8"][1] < 0.1
    assert rows["int4 g32"][1] < rows["int4 g128"][1] < 0.5
    assert rows["int4 g128"][0] < rows["int4 g32"][0] < rows["int8"][0]


# ---- a GPU

@pytest.mark.parametrize("N,K", [(4096, 4096), (10240, 4096), (4096, 10240), (4096, 14336), (128, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
class TestCuda:
    pytestmark = gpu
    limit = {torch.float32: 1e-5, torch.float16: 2**-9, torch.bfloat16: 2**-6}

    def test_int4_and_int8(self, N, K, dtype):
        torch.manual_seed(0)
        w = torch.randn(N, K, device="cuda") * 0.02
        for multiply, packed, widen in (
                (packed_linear, quantize_rows(w), dequantize_rows),
                (packed_linear4, quantize_groups(w, 64), dequantize_groups)):
            for M in (1, 2, 16, 17, 64, 65, 257):
                x, b = torch.randn(M, K, device="cuda").to(dtype), torch.randn(N, device="cuda").to(dtype)
                want = F.linear(x.double(), widen(*packed, torch.float64), b.double())
                with torch.no_grad():
                    y = multiply(x, *packed, b)
                    assert error(y, want) < self.limit[dtype], (multiply.__name__, M, error(y, want))
                    if M <= 16: assert torch.equal(multiply(x[:1], *packed, b), y[:1])

    def test_w8a8_is_the_cpu_s(self, N, K, dtype):
        codes, scale = quantize_rows(torch.randn(N, K, device="cuda") * 0.02)
        x = torch.randn(40, K, device="cuda").to(dtype)
        assert torch.equal(
            packed_linear(x, codes, scale, activations=8).cpu(),
            packed_linear(x.cpu(), codes.cpu(), scale.cpu(), activations=8))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_graph_holds_a_packed_mixture_and_joined_layers():
    model = pack_linears(moe("Mixtral"), 4, group_size=32).to("cuda", torch.bfloat16)
    e, x = model.model.layers[0].mlp.experts, torch.randn(4, 64, device="cuda", dtype=torch.bfloat16)
    index, weight = torch.tensor([[0, 2], [1, 3], [2, 0], [3, 1]], device="cuda"), torch.rand(4, 2, device="cuda")
    attn = model.model.layers[0].self_attn
    packed = join_packed([attn.q_proj, attn.k_proj, attn.v_proj])
    with torch.no_grad():
        side = torch.cuda.Stream()
        with torch.cuda.stream(side): e(x, index, weight), packed_linear4(x, *packed)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph): a, b = e(x, index, weight), packed_linear4(x, *packed)
        index.copy_(index.flip(1))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(a, e(x, index, weight))
        assert torch.equal(b, torch.cat([m(x) for m in (attn.q_proj, attn.k_proj, attn.v_proj)], -1))


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("N", [256, 600, 1024])
def test_widened_a_stretch_at_a_time(bits, N, monkeypatch):
    "Many rows on a GPU: the weight is never widened whole, and the product is the same"
    torch.manual_seed(0)
    w, x = torch.randn(N, 64), torch.randn(70, 64)
    packed = quantize_rows(w) if bits == 8 else quantize_groups(w, 32)
    widen, seen = packing._widened, []
    monkeypatch.setattr(packing, "_widened", lambda codes, *a: (seen.append(len(codes)), widen(codes, *a))[1])
    monkeypatch.setattr(packing, "WIDE_BYTES", 300 * 64 * 4)
    y = packing._by_stretches(x, packed[0], packed[1], packed[2] if bits == 4 else None)
    assert sum(seen) == N and max(seen) <= 300
    torch.testing.assert_close(
        y, x @ (dequantize_rows if bits == 8 else dequantize_groups)(*packed).T, atol=1e-4, rtol=1e-5)


def test_joined_buffers_let_go():
    "What was joined keeps nothing alive: when a layer's weight moves elsewhere, the joined storage is freed"
    layers = list(pack_linears(nn.ModuleList(nn.Linear(32, 16) for _ in range(2))))
    codes = join_packed(layers)[0]
    freed = weakref.ref(codes.untyped_storage())
    del codes
    assert all(m.codes._base is None for m in layers)
    for m in layers: m.codes.data = m.codes.clone()
    gc.collect()
    assert freed() is None


def test_the_hook_of_gradient_checkpointing_comes_along():
    "transformers leaves it on the embedding"
    model = llama(tie_word_embeddings=True)
    model.gradient_checkpointing_enable()
    model.gradient_checkpointing_disable()
    table = pack_linears(model).get_input_embeddings()
    assert table(torch.arange(3)).requires_grad
    model.disable_input_require_grads()
    assert not table(torch.arange(3)).requires_grad


# ---- training over packed weights (QLoRA)
# ---------------------------------------------------------------------------------------------------

def under_lora(bits, dtype):
    "A LLaMA with packed weights under LoRA, and the same with the widened weights"
    from bmlab.delta.lora import Lora
    torch.manual_seed(0)
    packed = tf.LlamaForCausalLM(
        tf.LlamaConfig(
            hidden_size=64, intermediate_size=160, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            vocab_size=300, use_cache=False)
    ).to(dtype)
    widened = copy.deepcopy(packed)
    pack_linears(packed, bits=bits)
    for n, m in packed.named_modules():
        if isinstance(m, (Int8Linear, Int4Linear)): widened.get_submodule(n).weight = nn.Parameter(m.dequantize(dtype))
    for m in (packed, widened):
        # (else the first layers of a CPU take another way)
        m.enable_input_require_grads()
        torch.manual_seed(1)
        d = Lora(
            m, r=4, modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
            dtype=torch.float32).freeze()
        with torch.no_grad(): [p.normal_(0, .05) for p in d.parameters()]
    return packed.train(), widened.train()


def a_step(model, compiled):
    "Loss, gradients, and the bytes that a step holds between forward and backward, beside what the model is made of"
    from bmlab.train.losses import lm_loss
    from bmlab.train.sharding import shard
    if compiled:
        torch.compiler.reset()
        shard(model, checkpoint=False, compile="aot_eager_decomp_partition")
    ids = torch.randint(0, 300, (2, 40), generator=torch.Generator().manual_seed(2))
    own, held = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}, {}
    def note(t):
        if (key := t.untyped_storage().data_ptr()) not in own: held[key] = t.untyped_storage().nbytes()
        return t
    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        loss = lm_loss(model, {"input_ids": ids, "labels": ids})
    loss.backward()
    return loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}, sum(held.values())


@pytest.mark.parametrize(
    "bits,dtype,compiled",
    [
        *itertools.product([8, 4], [torch.float32, torch.bfloat16], [False]),
        (8, torch.bfloat16, True),
        *(pytest.param(b, d, True, marks=pytest.mark.slow)
          for b, d in ((8, torch.float32), (4, torch.float32), (4, torch.bfloat16)))
    ]
)
def test_a_step_over_packed_weights_is_that_over_widened_ones(bits, dtype, compiled, recwarn):
    "The loss and every gradient, bit for bit; and nothing wide is kept for the way back"
    (loss, grads, held), (want_loss, want, want_held) = (a_step(m, compiled) for m in under_lora(bits, dtype))
    assert torch.equal(loss, want_loss) and grads.keys() == want.keys() and len(grads) == 2 * 7 * 2
    for n in want: assert torch.equal(grads[n], want[n]), n
    assert held <= want_held
    # its head is packed too, and its logits are never whole
    assert not [w for w in recwarn if "lm_loss" in str(w.message)]

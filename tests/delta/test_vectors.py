"Vectors against what they stand for: real biases tuned, PEFT's IA3 and norm tuning, every norm there is."
import warnings

import pytest
import torch
import transformers as tf
from torch import nn

from bmlab.delta.vectors import IA3, BitFit, LayerNormTuning, norm_rule
from bmlab.core import count, roles
from bmlab.delta.delta import Delta, deltas
from bmlab.kernels.layers import pack_linears
from bmlab.models.load import build as sized
from toys import (
    FAMILIES as ALL,
    IDS,
    as_it_is,
    build as plain_build,
    compiled,
    gradients,
    inputs,
    logits,
    moved,
    near_under_autocast,
    shared_files,
    unused,
)

FAMILIES = [f for f in ALL if f not in ("roberta", "distilbert", "bart")]
METHODS = {"bitfit": BitFit, "ia3": IA3, "ln_tuning": LayerNormTuning}


def build(name):
    model = plain_build(name)
    for p in model.parameters():
        if p.ndim == 1: p.data += 0.1 * torch.randn_like(p)
    return model


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("method", METHODS)
def test_every_family(method, family):
    "Identity at the start, every site runs and learns, merging is the same where it can be, the backbone is as it was"
    model = build(family)
    check = as_it_is(model)
    with torch.no_grad():
        plain, d = logits(model), METHODS[method](model)
        assert torch.equal(logits(model), plain)
        d.check(inputs(model))
    moved(d).freeze()
    tuned = logits(model)
    tuned.square().sum().backward()
    # (a key's bias may have none, see below)
    assert not [n for n in unused(d) if method != "bitfit" or roles(model)[n] != "k"], unused(d)
    if method != "bitfit":
        # (CPM-Ant's are in the tens)
        with d.merge(), torch.no_grad(): assert (logits(model) - tuned).abs().max() <= 1e-5 * max(1, tuned.abs().max())
    d.detach()
    check()


def test_counts():
    large = sized("bert-large", device="meta")
    whole = count(large).total
    d = BitFit(large)
    assert d.count().delta == 303_930 and f"{303_930 / whole:.4%}" == "0.0907%"
    d.detach()
    assert BitFit(large, missing=False).detach().count().delta == 303_930
    assert IA3(large).detach().count().delta == 24 * (2 * 1024 + 4096)
    assert LayerNormTuning(large).detach().count().delta == 2 * 1024 * (2 * 24 + 2)
    with torch.device("meta"):
        llama = tf.LlamaForCausalLM(
            tf.LlamaConfig(
                hidden_size=4096,
                num_hidden_layers=32,
                num_attention_heads=32,
                num_key_value_heads=8,
                intermediate_size=14336,
                vocab_size=128256,
            )
        )
    assert IA3(llama).detach().count().delta == 524_288 and LayerNormTuning(llama).detach().count().delta == 65 * 4096


def test_bitfit_is_tuning_the_biases():
    "Ten steps: the same losses and the same model as with the backbone's own biases unfrozen"
    for optimizer in (lambda p: torch.optim.SGD(p, lr=0.5), lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.0)):
        runs = []
        for ours in (True, False):
            model = build("bert").double()
            if ours: params = BitFit(model).freeze().trainable()
            else:
                model.requires_grad_(False)
                params = [
                    p.requires_grad_() for n, p in model.named_parameters() if n.endswith("bias") and "key" not in n
                ]  # a key's bias has no effect, but rounding; see below
            if ours:
                params = [p for n, s in deltas(model)["bitfit"].sites.items() for p in s.parameters() if "key" not in n]
            opt, losses = optimizer(params), []
            for _ in range(10):
                loss = model(input_ids=IDS, labels=IDS).loss
                loss.backward()
                opt.step()
                opt.zero_grad()
                losses.append(loss.item())
            runs.append((losses, logits(model).detach()))
        assert runs[0][0][-1] < runs[0][0][0] and max(abs(a - b) for a, b in zip(runs[0][0], runs[1][0])) < 1e-9
        torch.testing.assert_close(runs[0][1], runs[1][1], atol=1e-8, rtol=0)


def test_a_bias_of_the_keys_changes_nothing():
    "Without rotation it shifts all scores of a query alike: why its gradient is left out above"
    model = build("bert").double()
    d = BitFit(model, modules="key").freeze()
    logits(model).square().sum().backward()
    assert max(p.grad.abs().max() for p in d.parameters()) < 1e-10
    before = logits(model)
    torch.testing.assert_close(logits(moved(d, 1.0).model), before, atol=1e-10, rtol=0)


def test_convolutions():
    "The patches of a vision model are made by a convolution with a bias"
    vit = tf.ViTForImageClassification(
        tf.ViTConfig(
            hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, image_size=8, patch_size=4
        )
    ).eval()
    pixels = torch.randn(2, 3, 8, 8)
    d = moved(BitFit(vit))
    assert d.count().delta == sum(
        p.numel()
        for n, p in vit.named_parameters()
        if n.endswith("bias") and "_deltas" not in n and not n.startswith("classifier")
    )
    # the new head is tuned whole, so it gets no bias of the delta's
    assert d.freeze().kept == ("classifier",)
    tuned = vit(pixels).logits
    with d.merge(): torch.testing.assert_close(vit(pixels).logits, tuned, atol=1e-5, rtol=1e-5)


def peft_config(method, family):
    import peft
    if method == "ia3":
        own = {"qwen3_moe": dict(target_modules=["k_proj", "v_proj"], feedforward_modules=[])}
        return peft.IA3Config(**own.get(family, {}))
    return peft.LNTuningConfig(target_modules={"bert": ["LayerNorm"], "qwen3_moe": r".*norm"}.get(family))


PEFT_FAMILIES = ("bert", "gpt2", "llama", "t5", "qwen3_moe")


@pytest.mark.parametrize("family", PEFT_FAMILIES)
@pytest.mark.parametrize("method", ["ia3", "ln_tuning"])
def test_peft(method, family, tmp_path):
    "Ours in PEFT, PEFT's here: logits to 1e-6; twenty steps of AdamW: the same losses to 1e-5"
    peft = pytest.importorskip("peft")
    warnings.simplefilter("ignore")
    with torch.no_grad():
        ours = build(family)
        d = moved(METHODS[method](ours), 0.3)
        theirs = peft.PeftModel.from_pretrained(build(family), d.save(tmp_path / "ours")).eval()
        assert (
            (logits(ours) - logits(theirs)).abs().max()
            <= 1e-6
            < 1e-3
            < (logits(ours) - logits(build(family))).abs().max()
        )
        theirs = peft.get_peft_model(build(family), peft_config(method, family)).eval()
        for n, p in theirs.named_parameters():
            if "ia3_l" in n or "ln_tuning_layers" in n: p += 0.3 * torch.randn_like(p)
        theirs.save_pretrained(tmp_path / "theirs")
        ours = build(family)
        Delta.load(tmp_path / "theirs", ours)
        assert (logits(ours) - logits(theirs)).abs().max() <= 1e-6
    curves = []
    for mine in (True, False):
        model = (
            Delta.load(tmp_path / "theirs", build(family)).freeze().model
            if mine
            else peft.PeftModel.from_pretrained(build(family), tmp_path / "theirs", is_trainable=True)
        )
        params, losses = [p for p in model.parameters() if p.requires_grad], []
        opt = torch.optim.AdamW(params, lr=1e-3, weight_decay=0.0)
        for _ in range(20):
            loss = model(input_ids=IDS, labels=IDS).loss
            loss.backward()
            opt.step()
            opt.zero_grad()
            losses.append(loss.item())
        curves.append(losses)
    assert curves[0][-1] < curves[0][0] and max(abs(a - b) for a, b in zip(*curves)) <= 1e-5, curves


def test_peft_other_ways_to_name(tmp_path):
    "Regular expressions, and a feed-forward that takes the attention's last matrix in, as PEFT's default for BERT does"
    peft = pytest.importorskip("peft")
    where = dict(target_modules=r".*layer\.1.*(key|value|intermediate\.dense)", feedforward_modules=r".*dense")
    for config in (peft.IA3Config(**where, init_ia3_weights=False), peft.IA3Config(init_ia3_weights=False)):
        theirs = peft.get_peft_model(build("bert"), config).eval()
        theirs.save_pretrained(tmp_path)
        ours = build("bert")
        d = Delta.load(tmp_path, ours)
        assert (logits(ours) - logits(theirs)).abs().max() <= 1e-6
        d.save(tmp_path / "again")
        again = peft.PeftModel.from_pretrained(build("bert"), tmp_path / "again").eval()
        assert (logits(again) - logits(theirs)).abs().max() <= 1e-6


@pytest.mark.parametrize("method", METHODS)
def test_shared_files(method, tmp_path):
    "A change that sites share is written once; spread out for PEFT, each norm with its own sum"
    model = build("llama")
    d = moved(METHODS[method](model, share="layers"))
    assert d.count().delta < METHODS[method](model).detach().count().delta
    spread = shared_files(d, lambda: build("llama"), Delta.load, tmp_path, 1e-6)
    if method != "bitfit":
        peft = pytest.importorskip("peft")
        assert (
            logits(peft.PeftModel.from_pretrained(build("llama"), spread).eval()) - logits(model)
        ).abs().max() < 1e-6


def test_two_norm_tunings_add_up():
    model = build("llama")
    a, b = moved(LayerNormTuning(model)), moved(LayerNormTuning(model), 0.2)
    both = logits(model)
    merged = build("llama")
    for n, s in a.sites.items(): merged.get_submodule(n).weight.data += s.weight.data + b.sites[n].weight.data
    torch.testing.assert_close(logits(merged), both, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("method", METHODS)
def test_dtypes(method, tmp_path):
    "Half precision stays half; a change finer than the weight's grid is kept in the file; packed weights do not merge"
    half = build("llama").bfloat16()
    for dtype in (None, torch.float32):
        d = moved(METHODS[method](half, dtype=dtype), 1e-3)
        assert {p.dtype for p in d.parameters()} == {dtype or torch.bfloat16} and logits(half).dtype == torch.bfloat16
        d.detach()
    d.attach().save(tmp_path)
    back = Delta.load(tmp_path, build("llama").bfloat16())
    for mine, its in zip(d.parameters(), back.parameters()): assert (mine - its).abs().max() < 1e-5
    if method == "ia3":
        packed = pack_linears(build("llama"))
        with pytest.raises(TypeError, match="merge before packing"): IA3(packed).merge()
    model = build("llama")
    moved(METHODS[method](model))
    assert near_under_autocast(model)


@pytest.mark.parametrize("family", FAMILIES)
def test_norm_rule_knows_every_norm(family):
    model = build(family)
    norms = [n for n, r in roles(model).items() if r == "norm"]
    assert norms and all(norm_rule(model.get_submodule(n), n) for n in norms)


def test_norm_rule_refuses_what_it_would_get_wrong():
    class Odd(nn.Module):
        def __init__(self, f):
            super().__init__()
            self.weight, self.eps, self.f = nn.Parameter(torch.ones(8)), 1e-5, f
        def forward(self, x): return self.f(self, x)
    rms = lambda m, x, eps: x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    assert norm_rule(Odd(lambda m, x: rms(m, x, 1e-5) * m.weight)) == (8, False, 1e-5)
    odd = [lambda m, x: rms(m, x, 1e-6) * m.weight, lambda m, x: rms(m, x, 1e-5) * m.weight.exp()]
    for f in (*odd, lambda m, x: x * m.weight, lambda m, x: (x, m.weight)):
        with pytest.raises(TypeError, match="choose other modules"): norm_rule(Odd(f))


@pytest.mark.slow                              # (test_delta_matrix compiles others)
def test_whole_graph():
    "torch.compile takes all three at once without a break in the graph"
    model = build("llama")
    for method in METHODS.values(): moved(method(model))
    with torch.no_grad():
        torch.testing.assert_close(
            compiled(logits, model, backend="eager", fullgraph=True), logits(model), atol=1e-5, rtol=1e-5
        )


@pytest.mark.slow                                          # (test_delta_matrix keeps one: a Lora)
def test_inductor():
    model = build("llama")
    model.model.layers = model.model.layers[:1]
    params = [p for method in METHODS.values() for p in moved(method(model)).freeze().parameters()]
    for a, b in zip(compiled(gradients(params), model), gradients(params)(model)):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)

"Adapters against hand-made hooks, on every family, in all the ways a model runs."
import copy, math

import pytest
import torch
import torch.nn.functional as F
import transformers as tf
from torch import nn

from bmlab.delta.adapter import Adapter, Compacter, LowRankAdapter, ParallelAdapter, kronecker_sum
from bmlab.core import count
from bmlab.delta.delta import Delta, deltas
from bmlab.kernels.layers import pack_linears
from toys import (
    FAMILIES as ALL,
    GQA,
    IDS,
    SMALL,
    as_it_is,
    build,
    compiled,
    gradients,
    inputs,
    logits,
    moved,
    near_under_autocast,
    shared_files,
    unused,
)

KINDS = {
    "adapter": lambda m, **kw: Adapter(m, 8, **kw),
    "pfeiffer": lambda m, **kw: Adapter(m, 8, place="pfeiffer", activation="silu", scale="learned", **kw),
    "parallel": lambda m, **kw: ParallelAdapter(m, 8, scale=4.0, **kw),
    "low_rank": lambda m, **kw: LowRankAdapter(m, 2, 4, **kw),
    "compacter": lambda m, **kw: Compacter(m, reduction_factor=4, **kw),
    "compacter_rule": lambda m, **kw: Compacter(m, reduction_factor=4, shared_rule=True, **kw),
}
# which are built as others are
FAMILIES = [f for f in ALL if f not in ("gemma", "qwen3", "cohere", "olmo2", "nemotron", "falcon")]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_family(kind, family):
    "Identity at the start, every site runs, every parameter learns, the backbone is as it was"
    model = build(family)
    check = as_it_is(model)
    with torch.no_grad():
        plain, d = logits(model), KINDS[kind](model)
        assert torch.equal(logits(model), plain)
        d.check(inputs(model))
    moved(d).freeze()
    logits(model).square().sum().backward()
    assert not unused(d), unused(d)
    d.detach()
    check()


def test_counts():
    "OpenDelta's own numbers on a BERT of three layers of 64"
    bert = tf.BertForMaskedLM(tf.BertConfig(**dict(SMALL, hidden_size=64, intermediate_size=128, num_hidden_layers=3)))
    def parameters(make):
        d = make(bert).detach()
        return d.count().delta
    assert parameters(Adapter) == parameters(ParallelAdapter) == 18960
    assert (
        parameters(lambda m: LowRankAdapter(m, reduction_factor=4)) == 1440
        and parameters(lambda m: Compacter(m, reduction_factor=4)) == 2208
    )
    assert parameters(lambda m: Compacter(m, reduction_factor=4, shared_rule=True)) == 2208 - 6 * 2 * 64 + 64
    assert parameters(lambda m: Adapter(m, scale="learned")) == 18960 + 6
    for r in (1, 2, 3, 4): assert parameters(lambda m: LowRankAdapter(m, r, 4)) == 6 * (2 * r * (64 + 16) + 16 + 64)


def test_counts_shared():
    "A parameter set that all sites share is counted once, on the model too"
    bert = build("bert")
    before = count(bert).total
    d = Adapter(bert, 8, share="layers")
    assert d.count().delta == count(bert).delta == count(bert).total - before == 2 * 32 * 8 + 8 + 32


def test_shared_between_pairs(tmp_path):
    "Pairs of modules share too, with a file that says who uses what"
    bert = build("bert")
    d = moved(ParallelAdapter(bert, 8, share="layers"))
    assert d.count().delta == 2 * 32 * 8 + 8 + 32
    d.save(tmp_path)
    other = build("bert")
    back = Delta.load(tmp_path, other)
    assert torch.equal(logits(other), logits(bert)) and back.count().delta == d.count().delta and back.reads == d.reads


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("share", ["layers", "places"])
def test_shared_files(kind, share, tmp_path):
    model = build("llama")
    shared_files(moved(KINDS[kind](model, share=share)), lambda: build("llama"), Delta.load, tmp_path)


def test_a_forward_that_broke_leaves_nothing():
    "Copied after an error between the two modules of a pair, and run again"
    bert = build("bert")
    moved(ParallelAdapter(bert, 8))
    want = logits(bert)
    def broken(*_): raise ZeroDivisionError
    stop = bert.bert.encoder.layer[1].output.dense.register_forward_pre_hook(broken)
    with pytest.raises(ZeroDivisionError): logits(bert)
    stop.remove()
    assert torch.equal(logits(copy.deepcopy(bert)), want) and torch.equal(logits(bert), want)


def hooked(model, d, pairs):
    "The same function as `d`, by hooks on a model without deltas: OpenDelta's way, and an independent one"
    seen = {}
    for out, source in pairs.items():
        s = d.sites[out]
        w = [getattr(s, k).detach() for k in ("down_weight", "down_bias", "up_weight", "up_bias")]
        bend = lambda x, w=w: F.linear(F.gelu(F.linear(x, w[0], w[1]), approximate="tanh"), w[2], w[3])
        if source is None:
            model.get_submodule(out).register_forward_hook(
                lambda m, a, y, f=bend: y + f(y) if torch.is_tensor(y) else (y[0] + f(y[0]), *y[1:])
            )
        else:
            def note(m, a, kw, source=source): seen[source] = a[0] if a else kw["hidden_states"]
            model.get_submodule(source).register_forward_pre_hook(note, with_kwargs=True)
            def add(m, a, y, f=bend, source=source, s=s.scale):
                x = seen[source]
                return y + s * f(x) if torch.is_tensor(y) else (y[0] + s * f(x), *y[1:])
            model.get_submodule(out).register_forward_hook(add)
    with torch.no_grad(): return logits(model)


@pytest.mark.parametrize("family", ["bert", "llama", "gpt2", "t5", "opt"])
def test_equals_hooks(family):
    model = build(family).double()
    d = moved(Adapter(model, 8))
    with torch.no_grad(): got = logits(model)
    torch.testing.assert_close(got, hooked(build(family).double(), d, dict.fromkeys(d.sites)), atol=1e-10, rtol=1e-10)
    d.detach()
    d = moved(ParallelAdapter(model, 8, scale=2.0))
    with torch.no_grad(): got = logits(model)
    torch.testing.assert_close(got, hooked(build(family).double(), d, d.reads), atol=1e-10, rtol=1e-10)
    assert {s.box.x for s in d.sites.values() if getattr(s, "box", None)} <= {None}


@pytest.mark.parametrize("n, d, b, r", [(1, 6, 4, 1), (2, 6, 4, 3), (4, 32, 8, 1), (4, 12, 8, 2), (8, 64, 16, 4)])
def test_kronecker(n, d, b, r):
    "The sum, and its gradients, against products written out"
    g = torch.Generator().manual_seed(0)
    t = [
        torch.randn(*shape, generator=g, dtype=torch.float64).requires_grad_()
        for shape in ((n, n, n), (n, d // n, r), (n, r, b // n))
    ]
    x = torch.randn(5, d, generator=g, dtype=torch.float64)
    explicit = sum(torch.kron(t[0][i], t[1][i] @ t[2][i]) for i in range(n))
    got = kronecker_sum(*t)
    assert (got - explicit).abs().max() <= 1e-10
    want = torch.autograd.grad((x @ explicit).sin().sum(), t)
    for a, e in zip(torch.autograd.grad((x @ got).sin().sum(), t), want): assert (a - e).abs().max() <= 1e-10


def test_rule_is_one_object():
    model = build("llama")
    d = Compacter(model, reduction_factor=4, shared_rule=True)
    rules = {
        id(p) for s in d.sites.values() for k, p in s.named_parameters(remove_duplicate=False) if k.endswith("rule")
    }
    assert len(rules) == 1 and sum(id(p) in rules for p in d.parameters()) == 1
    twin = deltas(copy.deepcopy(model))["compacter"]
    assert len({id(s.up_rule) for s in twin.sites.values()} | {id(s.down_rule) for s in twin.sites.values()}) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_generate(kind):
    "With the cache as without it, and unlike the bare model; of the last step one position alone is read"
    model = build("llama")
    d = moved(KINDS[kind](model), 0.3)
    run = lambda **kw: model.generate(
        IDS[:1],
        attention_mask=torch.ones_like(IDS[:1]),
        max_new_tokens=6,
        do_sample=False,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
        **kw,
    )
    cached, plain = run(use_cache=True), run(use_cache=False)
    assert torch.equal(cached.sequences, plain.sequences)
    torch.testing.assert_close(torch.stack(cached.logits), torch.stack(plain.logits), atol=1e-5, rtol=1e-5)
    with d.off(): assert not torch.equal(torch.stack(run(use_cache=True).logits), torch.stack(cached.logits))


@pytest.mark.parametrize("family", ["bert", "opt", "llama", "t5"])
def test_recompute(family):
    "Checkpointed blocks give equal gradients, notes of the input included"
    model = build(family)
    for kind in ("adapter", "parallel", "compacter_rule"):
        d = moved(KINDS[kind](model)).freeze()
        grads = []
        for on in (False, True):
            if on: model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            model.train()
            for m in model.modules():
                if isinstance(m, nn.Dropout): m.p = 0.0
            torch.manual_seed(0)
            logits(model).square().mean().backward()
            grads.append([p.grad.clone() for p in d.parameters()])
            for p in d.parameters(): p.grad = None
        model.gradient_checkpointing_disable()
        d.detach().unfreeze()
        for a, b in zip(*grads): torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)


@pytest.mark.slow                              # (test_delta_matrix compiles one)
def test_whole_graph():
    "torch.compile takes all kinds at once, a note between two modules too, without a break in the graph"
    model = build("bert")
    for k in ("adapter", "parallel", "low_rank", "compacter_rule"): moved(KINDS[k](model))
    with torch.no_grad():
        torch.testing.assert_close(
            compiled(logits, model, backend="eager", fullgraph=True), logits(model), atol=1e-5, rtol=1e-5
        )


@pytest.mark.slow                                          # (test_delta_matrix keeps one: a Lora)
def test_inductor():
    "A Compacter: an adapter whose two products are built from factors"
    model = build("bert")
    model.bert.encoder.layer = model.bert.encoder.layer[:1]
    params = list(moved(KINDS["compacter_rule"](model)).freeze().parameters())
    for a, b in zip(compiled(gradients(params), model), gradients(params)(model)):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_dtypes(kind):
    "The hidden states keep their type, whatever the adapter's; on packed layers it is float32; under autocast too"
    half = build("llama").bfloat16()
    for dtype in (None, torch.float32):
        d = moved(KINDS[kind](half, dtype=dtype))
        assert {p.dtype for p in d.parameters()} == {dtype or torch.bfloat16}
        assert logits(half).dtype == torch.bfloat16
        d.detach()
    packed = pack_linears(build("llama"))
    assert {p.dtype for p in KINDS[kind](packed).parameters()} == {torch.float32}
    model = build("llama")
    moved(KINDS[kind](model))
    assert near_under_autocast(model)


@pytest.mark.parametrize("kind", KINDS)
def test_files(kind, tmp_path):
    "The file is little more than its parameters; what does not fit is refused whole"
    model = build("bert")
    d = moved(KINDS[kind](model))
    d.save(tmp_path)
    size = sum(p.numel() * p.element_size() for p in d.parameters())
    assert (tmp_path / "adapter_model.safetensors").stat().st_size <= 1.02 * size + 4096 + 80 * len(d.file_tensors())
    other = build("bert")
    Delta.load(tmp_path, other)
    assert torch.equal(logits(other), logits(model))
    wide = tf.BertForMaskedLM(tf.BertConfig(**dict(SMALL, hidden_size=64)))
    with pytest.raises((KeyError, ValueError)): Delta.load(tmp_path, wide)
    with pytest.raises((KeyError, ValueError)): Delta.load(tmp_path, build("llama"))
    assert len(deltas(wide)) == 0 or not any(x.attached for x in deltas(wide).values())
    assert not any("_deltas" in k for k in wide.state_dict())


@pytest.mark.parametrize("family", ["llama", "bert"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_file_for_fewer_layers_is_refused(kind, family, tmp_path):
    "Saved for all layers of a shallower backbone; saved for some of them it fits"
    deep = build(family)
    deep = type(deep)(type(deep.config)(**deep.config.to_dict() | {"num_hidden_layers": 3})).eval()
    d = moved(KINDS[kind](build(family)))
    check = as_it_is(deep)
    with pytest.raises(KeyError, match=r"layers?\.2\."): Delta.load(d.save(tmp_path / "all"), deep)
    assert not list(deltas(deep))
    check()
    if family == "bert": return
    part = moved(KINDS[kind](build(family), modules="layers[1].mlp"))
    assert list(Delta.load(part.save(tmp_path / "some"), deep).sites) == ["model.layers.1.mlp"]


def test_half_is_loaded_as_it_was_saved(tmp_path):
    model = build("llama").bfloat16()
    moved(Adapter(model, 8, dtype=torch.float32)).save(tmp_path)
    assert {p.dtype for p in Delta.load(tmp_path, build("llama").bfloat16()).parameters()} == {torch.float32}


@pytest.mark.parametrize("kind", KINDS)
def test_meta(kind):
    "Made without weights, filled by their own rule: an identity again, not zeros throughout"
    from bmlab.train.sharding import materialize
    with torch.device("meta"): model = build("llama")
    d = KINDS[kind](model)
    assert all(p.is_meta for p in d.parameters())
    materialize(model, device="cpu")
    ours = deltas(model)[d.name]
    named = {k: p for s in ours.sites.values() for k, p in s.named_parameters(remove_duplicate=False)}
    assert not any(p.is_meta for p in ours.parameters())
    assert all(
        p.abs().max() > 0
        for k, p in named.items()
        if k in ("down_weight", "down_left", "down_right", "down_rule", "up_left", "up_rule")
    )
    with torch.no_grad():
        got = logits(model)
        with ours.off(): assert torch.equal(logits(model), got)


def test_inits():
    "OpenDelta's: N(0, 0.01), and Glorot's bound times √2"
    wide = tf.LlamaForCausalLM(tf.LlamaConfig(**dict(GQA, hidden_size=512, num_hidden_layers=1)))
    s = next(iter(Adapter(wide, 64, init="opendelta").detach().sites.values()))
    for w in (s.down_weight, s.up_weight): assert abs(w.std().item() - 0.01) < 5e-4 and abs(w.mean().item()) < 3e-4
    s = next(iter(Adapter(wide, 64).detach().sites.values()))
    assert abs(s.down_weight.std().item() - 0.01) < 5e-4 and s.up_weight.abs().max() == 0
    s = next(iter(Compacter(wide, reduction_factor=4, init="opendelta").detach().sites.values()))
    bound = math.sqrt(2 * 6 / (512 / 4 + 1))
    assert 0.95 * bound < s.down_left.abs().max() <= bound and abs(s.down_rule.std().item() - 0.01) < 3e-3


def test_modules_and_exclude():
    "Patterns, exclusions, and words for what cannot be"
    model = build("llama")
    assert list(Adapter(model, modules="layers[1]", exclude=None).detach().sites) == ["model.layers.1"]
    assert len(Adapter(model, exclude="layers[0]").detach().sites) == 2
    bert = build("bert")
    assert set(ParallelAdapter(bert, exclude="layer[0]").detach().sites) == {
        f"bert.encoder.layer.1.{k}" for k in ("attention", "intermediate.dense", "output.dense")
    }
    with pytest.raises(TypeError, match="cannot be merged"): Adapter(model).merge()
    with pytest.raises(LookupError, match="drops everything"): Adapter(model, modules="o_proj", exclude="self_attn")
    with pytest.raises(LookupError, match="'o_proj'"): ParallelAdapter(model, modules="o_prj")
    whole = Adapter(bert, modules="encoder", name="whole")
    with pytest.raises(TypeError, match="encoder returns a BaseModelOutput"): logits(bert)
    whole.detach()

"Every delta method on every kind of model: exact detach, copies, files, int8, compiled, recomputed, sharded; or no."
import copy, functools, importlib, pickle, traceback

import pytest
import torch

from bmlab.core import set_seed
from bmlab.train.processes import run_ranks
from bmlab.delta.delta import Delta, deltas
from bmlab.kernels.layers import pack_linears
from bmlab.train.sharding import shard

METHODS = {  # name: ("module:Class", arguments, {axis: words of the refusal}); axes are the names of the tests below;
             # "identity": False where a fresh one changes the output
    "lora": ("lora:Lora", dict(r=4), {}),
    "lora_rs_all": ("lora:Lora", dict(r=2, rslora=True, modules=["*_proj", "lm_head"]), {}),
    "lora_shared": ("lora:Lora", dict(r=4, share="layers"), {}),
    "lora_places": ("lora:Lora", dict(r=4, share="places"), {}),
    # owners: one line each below this one
    "lora_dora": ("lora:Lora", dict(r=4, dora=True), {}),
    "lora_pissa": ("lora:Lora", dict(r=4, init="pissa"), {"identity": False}),
    "lora_embed": ("lora:Lora", dict(r={"embed_tokens": 2, "v_proj": 4}), {}),
    "peft_loha": (
        "peft_plugin:PeftDelta",
        dict(config={"peft_type": "LOHA", "r": 4, "target_modules": ["q_proj", "v_proj"]}),
        {"int8": "not supported"},
    ),
    "peft_oft": (
        "peft_plugin:PeftDelta",
        dict(config={"peft_type": "OFT", "r": 0, "oft_block_size": 8, "target_modules": ["q_proj", "v_proj"]}),
        {"int8": "."},
    ),
    "peft_vera": (
        "peft_plugin:PeftDelta",
        dict(config={"peft_type": "VERA", "r": 4, "target_modules": ["q_proj", "v_proj"]}),
        {"int8": "."},
    ),
    "adapter": ("adapter:Adapter", dict(bottleneck=8), {}),
    "adapter_pfeiffer": (
        "adapter:Adapter",
        dict(place="pfeiffer", reduction_factor=4, activation="relu", scale="learned"),
        {},
    ),
    "adapter_shared": ("adapter:Adapter", dict(bottleneck=8, share="layers"), {}),
    "parallel_adapter": ("adapter:ParallelAdapter", dict(bottleneck=8, scale=4.0), {}),
    "parallel_pairs": (
        "adapter:ParallelAdapter",
        dict(bottleneck=8, modules="self_attn", pairs={"down_proj": "gate_proj"}),
        {},
    ),
    "low_rank_adapter": ("adapter:LowRankAdapter", dict(r=2, reduction_factor=4), {}),
    "compacter": ("adapter:Compacter", dict(reduction_factor=4), {}),
    "compacter_rule": ("adapter:Compacter", dict(reduction_factor=4, shared_rule=True), {}),
    "bitfit": ("vectors:BitFit", dict(), {}),
    "ia3": ("vectors:IA3", dict(), {}),
    "ln_tuning": ("vectors:LayerNormTuning", dict(), {}),
    "soft_prompt": ("soft:SoftPrompt", dict(length=4), {"identity": False}),
    "p_tuning": ("soft:PTuning", dict(length=4, hidden=8), {"identity": False}),
    "p_tuning_lstm": ("soft:PTuning", dict(length=4, encoder="lstm", hidden=8), {"identity": False}),
    "prefix": ("prefix:Prefix", dict(length=4), {"identity": False}),
    "prefix_mlp": ("prefix:Prefix", dict(length=4, hidden=8), {"identity": False}),
    "prefix_shared": ("prefix:Prefix", dict(length=4, share="layers"), {"identity": False}),
}


def llama(**kw):
    import transformers as tf
    set_seed(0)
    return tf.LlamaForCausalLM(
        tf.LlamaConfig(
            **dict(
                hidden_size=32,
                intermediate_size=64,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                vocab_size=96,
            )
            | kw
        )
    ).eval()


IDS = torch.arange(32).view(4, 8) * 7 % 96


def logits(model, ids=IDS):
    with torch.no_grad(): return model(input_ids=ids).logits


def make(name, model):
    "The method on the model"
    where, kw, _ = METHODS[name]
    set_seed(1)
    module, _, cls = where.partition(":")
    return getattr(importlib.import_module(f"bmlab.delta.{module}"), cls)(model, **kw)


def moved(d, by=0.05):
    "The delta away from where it starts, the same on every rank"
    g = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in d.parameters(): p += by * torch.randn(p.shape, generator=g)
    return d


def refusal(name, axis):
    "Context that expects the refusal the table states, or nothing"
    words = METHODS[name][2].get(axis)
    return words


def train(model, params, ids=IDS, steps=3, **kw):
    "Losses of some steps"
    opt, losses = torch.optim.AdamW(params, lr=1e-2), []
    for _ in range(steps):
        loss = model(input_ids=ids, labels=ids, **kw).loss
        loss.backward()
        opt.step()
        opt.zero_grad()
        losses.append(loss.item())
    return losses


def gradients(model, d):
    "Gradients of the delta's parameters on the whole batch"
    for p in d.parameters(): p.grad = None
    model(input_ids=IDS, labels=IDS).loss.backward()
    return [None if p.grad is None else p.grad.clone() for p in d.parameters()]


def close(a, b, tol=1e-5):
    assert len(a) == len(b)
    for x, y in zip(a, b):
        assert (x is None) == (y is None)
        if x is not None: torch.testing.assert_close(x, y, atol=tol, rtol=tol)


SHARED = "lora_shared", "lora_places", "adapter_shared", "compacter_rule", "prefix_shared"
EACH_KIND = "lora lora_embed adapter parallel_adapter bitfit ia3 soft_prompt p_tuning prefix peft_loha".split()


def refused(axis, every=METHODS):
    "Run the test, or expect a refusal in the words of the table; methods not in `every` are slow"
    names = [name if name in every else pytest.param(name, marks=pytest.mark.slow) for name in METHODS]
    def wrap(test):
        @pytest.mark.parametrize("name", names)
        @functools.wraps(test)
        def run(name, **kw):
            words = METHODS[name][2].get(axis)
            if not isinstance(words, str): return test(name, **kw)
            with pytest.raises((ValueError, TypeError, RuntimeError, LookupError, NotImplementedError), match=words):
                test(name, **kw)
        return run
    return wrap


@refused("exact")
def test_exact(name):
    "attach → train → detach leaves the backbone as it was, bit for bit, class for class, key for key"
    model = llama()
    state, classes, plain = copy.deepcopy(model.state_dict()), [type(m) for m in model.modules()], logits(model)
    grads = [p.requires_grad for p in model.parameters()]
    d = make(name, model)
    if METHODS[name][2].get("identity", True): torch.testing.assert_close(logits(model), plain, atol=0, rtol=0)
    d.freeze()
    assert (
        sum(p.numel() for p in model.parameters() if p.requires_grad)
        == d.count().delta
        == sum(p.numel() for p in d.trainable())
    )
    losses = train(model, d.param_groups(1e-2), steps=12)
    assert losses[-1] < losses[0]
    tuned = logits(model)
    assert not torch.equal(tuned, plain)
    with d.off(): assert torch.equal(logits(model), plain)
    assert torch.equal(logits(model), tuned)
    d.detach()
    assert torch.equal(logits(model), plain)
    d.attach()
    assert torch.equal(logits(model), tuned)
    d.detach().unfreeze()
    assert [type(m) for m in model.modules()] == classes and [p.requires_grad for p in model.parameters()] == grads
    assert list(model.state_dict()) == list(state) and all(
        torch.equal(state[k], v) for k, v in model.state_dict().items()
    )
    assert not any("_deltas" in m.__dict__.get("_modules", {}) for m in model.modules())


@refused("stacked")
def test_stacked(name):
    "Beside a Lora, leaving in either order; a second of the kind too"
    from bmlab.delta.lora import Lora
    model = llama()
    plain, state = logits(model), copy.deepcopy(model.state_dict())
    for order in ((0, 1, 2), (2, 0, 1), (1, 2, 0)):
        three = [moved(Lora(model, r=2, modules="*_proj")), moved(make(name, model)), moved(make(name, model))]
        both = logits(model)
        for i in order: three[i].detach()
        assert torch.equal(logits(model), plain) and all(
            torch.equal(state[k], v) for k, v in model.state_dict().items()
        )
        for d in three: d.attach()
        assert torch.equal(logits(model), both)
        with deltas(model).use(three[1].name): alone = logits(model)
        three[0].detach()
        three[2].detach()
        assert torch.equal(logits(model), alone)
        three[1].detach()


@refused("copies")
def test_copies(name):
    "deepcopy and pickle take the delta and its handle along"
    model = llama()
    d = moved(make(name, model))
    tuned = logits(model)
    with d.off(): plain = logits(model)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(logits(twin), tuned)
        own = deltas(twin)[d.name]
        assert own is not d and own.model is twin and own.attached
        own.detach()
        assert torch.equal(logits(twin), plain) and torch.equal(logits(model), tuned)
    other = llama()
    there = d.copy_to(other)
    assert torch.equal(logits(other), tuned)
    there.detach()
    assert torch.equal(logits(other), plain)


@refused("file")
def test_file(name, tmp_path):
    "Saved and loaded: the same logits, a small file"
    model = llama()
    d = moved(make(name, model))
    d.save(tmp_path)
    other = llama()
    back = Delta.load(tmp_path, other, name="again")
    torch.testing.assert_close(logits(other), logits(model), atol=1e-6, rtol=0)
    assert back.name == "again" and deltas(other)["again"] is back
    stored = sum(f.stat().st_size for f in tmp_path.glob("*.safetensors"))
    size = sum(t.numel() * t.element_size() for t in d.file_tensors().values())
    assert stored <= 1.02 * size + 4096 + 120 * len(d.file_tensors())


@refused("check")
def test_check(name):
    "Every site runs"
    model = llama()
    d = make(name, model)
    runs = d.check({"input_ids": IDS})
    assert set(runs) == set(d.sites) and min(runs.values()) >= 1


@refused("merge")
def test_merge(name):
    "Merged equals unmerged, and restoring is exact; a packed backbone refuses; what is no change of weights says so"
    model = llama()
    state, d = copy.deepcopy(model.state_dict()), None
    d = moved(make(name, model))
    tuned = logits(model)
    try: merged = d.merge()
    except TypeError as e:
        assert "cannot be merged" in str(e)
        assert torch.equal(logits(model), tuned) and d.attached
        return
    torch.testing.assert_close(logits(model), tuned, atol=1e-5, rtol=0)
    assert not d.attached and set(model.state_dict()) == set(state)
    merged.restore()
    assert torch.equal(logits(model), tuned)
    d.detach()
    assert all(torch.equal(state[k], v) for k, v in model.state_dict().items())


@refused("int8")
def test_int8(name):
    "On a packed backbone: trains, leaves, and the codes are untouched"
    model = pack_linears(llama())
    plain, state = logits(model), copy.deepcopy(model.state_dict())
    d = make(name, model).freeze()
    before = logits(model)
    if METHODS[name][2].get("identity", True): torch.testing.assert_close(before, plain, atol=0, rtol=0)
    losses = train(model, d.param_groups(1e-2), steps=12)
    assert losses[-1] < losses[0]
    if name.startswith("lora"):
        with pytest.raises(TypeError, match="packed"): d.merge()
    d.detach()
    assert torch.equal(logits(model), plain) and all(torch.equal(state[k], v) for k, v in model.state_dict().items())


# (one that is added to a product, one in front of the words)
@pytest.mark.long
@refused("compile", ["lora", "soft_prompt"])
def test_compile(name):
    "Attached after compiling and before it: seen, switched off, left; with equal gradients"
    # (a layer is traced as the one before it: two where layers differ, and of one kind)
    layers = 2 if name in ("lora", "prefix") else 1
    model = llama(num_hidden_layers=layers)
    eager = llama(num_hidden_layers=layers)
    e = moved(make(name, eager)).freeze()
    # (all with gradients: without them everything would be traced a second time)
    logits = lambda m: m(input_ids=IDS).logits
    def learn(m, d):
        out = logits(m)
        return [out, *torch.autograd.grad(out.square().mean(), [*d.parameters()], allow_unused=True)]
    plain, want = logits(model), learn(eager, e)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager")
    close([logits(compiled)], [plain])
    d = moved(make(name, compiled)).freeze()
    close(learn(compiled, d), want)
    with d.off(): close([logits(compiled)], [plain])
    d.detach()
    close([logits(compiled)], [plain])
    d.attach()
    torch._dynamo.reset()
    close(learn(torch.compile(model, backend="eager"), d), want)
    torch._dynamo.reset()


@refused("recompute")
def test_recompute(name):
    "transformers' gradient checkpointing gives equal gradients"
    model = llama()
    model.train()
    d = moved(make(name, model)).freeze()
    plain = gradients(model, d)
    assert any(g is not None and g.abs().max() > 0 for g in plain)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    close(gradients(model, d), plain, 1e-6)


@pytest.mark.long
@refused("inductor")
def test_inductor(name):
    "One run by the real compiler, forward and backward"
    if name not in INDUCTOR:
        pytest.skip("the eager backend shows the same graph; the compiler itself runs for a few methods")
    model = llama()
    d = moved(make(name, model)).freeze()
    want, grads = logits(model), gradients(model, d)
    torch._dynamo.reset()
    compiled = torch.compile(model)
    close([logits(compiled)], [want])
    close(gradients(compiled, d), grads, 1e-4)
    torch._dynamo.reset()


INDUCTOR = ("lora",)


def built(name):
    model = llama()
    return model, moved(make(name, model)).freeze()


def sharded_run(name, zero, folder, alone, a, want):
    "Two ranks against one, with its losses: losses, parameters, file; returns differences"
    import torch.distributed as dist
    r, W = dist.get_rank(), dist.get_world_size()
    model, d = built(name)
    shard(model, zero=zero, dtype=None, checkpoint=zero == 3)
    opt, losses = torch.optim.AdamW(d.param_groups(1e-2)), []
    part = IDS[r * len(IDS) // W:(r + 1) * len(IDS) // W]
    for _ in range(3):
        loss = model(input_ids=part, labels=part).loss
        loss.backward()
        opt.step()
        opt.zero_grad()
        loss = loss.detach().clone()
        dist.all_reduce(loss)
        losses.append(loss.item() / W)
    full = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in d.parameters()]
    d.save(f"{folder}/{name}{zero}")
    other = llama()
    Delta.load(f"{folder}/{name}{zero}", other)
    return dict(
        loss=max(abs(x - y) for x, y in zip(losses, want)),
        parameters=max((x - y).abs().max().item() for x, y in zip(full, a.parameters())),
        file=(logits(other) - logits(alone)).abs().max().item(),
    )


def sharded_runs(asked, folder):
    "All methods on one pair of processes; a failure is kept as its text"
    out = {}
    for n, zeros in asked.items():
        model, d = built(n)
        want = train(model, d.param_groups(1e-2))
        for zero in zeros:
            try: out[n, zero] = sharded_run(n, zero, folder, model, d, want)
            except Exception as e: out[n, zero] = f"{type(e).__name__}: {e}\n{traceback.format_exc()}"
    return out


@pytest.fixture(scope="module")
def sharded(tmp_path_factory, request):
    "Results of the two ranks, made once"
    asked = {}
    for i in request.session.items:
        if i.originalname == "test_sharded" and i.fspath == request.fspath:
            asked.setdefault(i.callspec.params["name"], []).append(i.callspec.params["zero"])
    folder = tmp_path_factory.mktemp("sharded")
    return run_ranks(sharded_runs, asked, str(folder), timeout_s=60 + 40 * len(asked))


@pytest.mark.long
@pytest.mark.parametrize(
    "zero,name",
    # zero 2 for one method of each kind, and for parameters that several sites share
    [
        pytest.param(zero, n, marks=pytest.mark.slow if zero == 2 and n not in (*EACH_KIND, *SHARED) else ())
        for zero in (2, 3) for n in METHODS
    ]
)
def test_sharded(name, zero, sharded):
    "Two ranks equal one to 1e-5; zero 3 recomputes its blocks besides"
    words = METHODS[name][2].get("sharded")
    for got in (r[name, zero] for r in sharded):
        if words: assert isinstance(got, str) and words in got, got
        else:
            assert isinstance(got, dict), got
            assert max(got.values()) < 1e-5, got

"Lora against PEFT in both directions and step by step, its sites against formulas written out, and what it costs."
import copy, itertools, json, math, pickle, warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from bmlab.core import resolve, roles, set_seed
from bmlab.train.processes import run_ranks
from bmlab.delta.delta import Delta, deltas
from bmlab.kernels.layers import Int8Linear, pack_linears
from bmlab.delta.lora import EmbeddingSite, ExpertsSite, Lora, LoraSite, fused_rows
from bmlab.train.sharding import shard
from conftest import every_other

IDS = torch.arange(24).view(2, 12) * 5 % 90


def build(name):
    import transformers as tf
    set_seed(0)
    t = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=99)
    model = {
        "bert": lambda: tf.BertForMaskedLM(tf.BertConfig(**t)),
        "gpt2": lambda: tf.GPT2LMHeadModel(
            tf.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=99, n_positions=32)
        ),
        "llama": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**t, num_key_value_heads=2)),
        "t5": lambda: tf.T5ForConditionalGeneration(
            tf.T5Config(
                d_model=32,
                d_kv=8,
                d_ff=64,
                num_layers=2,
                num_heads=4,
                vocab_size=99,
                decoder_start_token_id=0,
                initializer_factor=0.3,
            )
        ),
        "moe": lambda: tf.Qwen3MoeForCausalLM(
            tf.Qwen3MoeConfig(
                **t, num_key_value_heads=2, head_dim=8, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2
            )
        ),
        "gptoss": lambda: tf.GptOssForCausalLM(
            tf.GptOssConfig(**t, num_key_value_heads=2, head_dim=8, num_local_experts=4, num_experts_per_tok=2)
        ),
    }[name]().eval()
    set_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim == 1: p += 0.1 * torch.randn_like(p)              # biases that count
    return model


TARGETS = {
    "bert": ["query", "value"],
    "gpt2": ["c_attn"],
    "llama": ["q_proj", "v_proj"],
    "t5": ["q", "v", "wo"],
    "moe": ["q_proj", "v_proj"],
}


def inputs(model):
    return dict(input_ids=IDS, labels=IDS) | (
        {"decoder_input_ids": IDS.flip(0)} if model.config.is_encoder_decoder else {}
    )


def logits(model, grad=False):
    with torch.set_grad_enabled(grad), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return model(**inputs(model)).logits


def shake(parameters, by=0.2):
    "Move the delta off its start"
    g = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for p in parameters: p += by * torch.randn(p.shape, generator=g).to(p.dtype)


def peft_of(model, **kw):
    import peft
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return peft.get_peft_model(copy.deepcopy(model), peft.LoraConfig(**kw)).eval()


def peft_reads(model, folder):
    import peft
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)                   # such as a pattern that fits nothing
        warnings.filterwarnings(
            "ignore", message=".*rank_pattern|.*alpha_pattern.*" if "patterns" in str(folder) else "nothing"
        )
        return peft.PeftModel.from_pretrained(copy.deepcopy(model), folder).eval()


def difference(a, b): return (logits(a) - logits(b)).abs().max().item()


VARIANTS = {
    "lora": (dict(alpha=12), dict(lora_alpha=12), 1e-6),
    "rslora": (dict(rslora=True), dict(use_rslora=True, lora_alpha=8), 1e-6),
    "dora": (dict(dora=True), dict(use_dora=True, lora_alpha=8), 1e-6),
    "pissa": (dict(init="pissa"), dict(init_lora_weights="pissa", lora_alpha=8), 1e-4),
}


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_peft_both_ways(name, variant, tmp_path):
    pytest.importorskip("peft")
    base, (ours, theirs, tolerance) = build(name), VARIANTS[variant]
    plain, state = logits(base), copy.deepcopy(base.state_dict())
    d = Lora(base, r=4, modules=TARGETS[name], **ours)
    assert (logits(base) - plain).abs().max() <= (1e-5 if variant == "pissa" else 0)
    shake(d.parameters(), 0.05 if variant == "dora" else 0.2)
    assert (logits(base) - plain).abs().max() > 1e-3
    d.save(tmp_path / "ours")
    bare = copy.deepcopy(base)
    deltas(bare)["lora"].detach()
    assert all(torch.equal(v, state[k]) for k, v in bare.state_dict().items()) and list(bare.state_dict()) == list(
        state
    )
    assert difference(base, peft_reads(bare, tmp_path / "ours")) <= tolerance
    again = copy.deepcopy(bare)
    Delta.load(tmp_path / "ours", again)
    assert difference(base, again) <= 1e-6
    peft_model = peft_of(bare, r=4, target_modules=TARGETS[name], **theirs)
    shake((p for n, p in peft_model.named_parameters() if "lora_" in n), 0.05 if variant == "dora" else 0.2)
    peft_model.save_pretrained(tmp_path / "theirs")
    mine = copy.deepcopy(bare)
    back = Delta.load(tmp_path / "theirs", mine)
    assert difference(mine, peft_model) <= tolerance and difference(mine, bare) > 1e-3
    with back.merge(): assert difference(mine, peft_model) <= 1e-4
    assert all(torch.equal(v, state[k]) for k, v in bare.state_dict().items())
    back.save(tmp_path / "back")
    assert difference(mine, peft_reads(bare, tmp_path / "back")) <= tolerance


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("variant", every_other(VARIANTS))
def test_twenty_steps_are_pefts(name, variant, tmp_path):
    "The same AdamW from the same start gives the same losses"
    pytest.importorskip("peft")
    base, (ours, theirs, _) = build(name), VARIANTS[variant]
    peft_model = peft_of(base, r=4, target_modules=TARGETS[name], **theirs)
    d = Lora(base, r=4, modules=TARGETS[name], **{"alpha": theirs["lora_alpha"], **ours}).freeze(keep=None)
    with torch.no_grad():
        for n, s in d.sites.items():
            layer = peft_model.base_model.model.get_submodule(n)
            if variant != "pissa": s.A.copy_(layer.lora_A["default"].weight)
            else: torch.testing.assert_close(s.A, layer.lora_A["default"].weight)  # the same decomposition
    def curve(model, params):
        opt, out = torch.optim.AdamW(params, lr=1e-2), []
        for _ in range(20):
            loss = model(**inputs(model)).loss
            loss.backward()
            opt.step()
            opt.zero_grad()
            out.append(loss.item())
        return torch.tensor(out)
    a, b = curve(base, d.trainable()), curve(peft_model, [p for p in peft_model.parameters() if p.requires_grad])
    assert a[-1] < a[0] - 0.005
    assert (a - b).abs().max() <= 1e-5, (a - b).abs().max()


def test_patterns_of_rank_and_alpha(tmp_path):
    pytest.importorskip("peft")
    base = build("llama")
    d = Lora(
        copy.deepcopy(base),
        r={"layers[0].self_attn.q_proj": 2, "q_proj": 4, "*": 3},
        alpha={"v_proj": 30},
        modules=["q_proj", "v_proj"],
    )
    got = {n: (s.A.shape[0], s.scale) for n, s in d.sites.items()}
    assert list(got.values()) == [(2, 2.0), (3, 10.0), (4, 2.0), (3, 10.0)]
    shake(d.parameters())
    d.save(tmp_path / "patterns")
    config = json.loads((tmp_path / "patterns/adapter_config.json").read_text())
    assert (
        config["rank_pattern"] == {"model.layers.0.self_attn.q_proj": 2, "model.layers.1.self_attn.q_proj": 4}
        and config["r"] == 3
        and config["lora_alpha"] == 30
    )
    assert difference(d.model, peft_reads(base, tmp_path / "patterns")) <= 1e-6
    back = Delta.load(tmp_path / "patterns", copy.deepcopy(base))
    assert {n: (s.A.shape[0], s.scale) for n, s in back.sites.items()} == got and difference(back.model, d.model) == 0
    theirs = peft_of(
        base,
        r=4,
        lora_alpha=8,
        target_modules=["q_proj", "v_proj", "down_proj"],
        rank_pattern={"q_proj": 2, r"layers.1.*down_proj": 5},
        alpha_pattern={"v_proj": 3},
        init_lora_weights=False,
    )
    theirs.save_pretrained(tmp_path / "theirs")
    assert difference(Delta.load(tmp_path / "theirs", copy.deepcopy(base)).model, theirs) <= 1e-6
    where = Lora(copy.deepcopy(base), r={"q_proj": 4, "v_proj": 8})
    assert len(where.sites) == 4 and where.count().delta == 2 * (4 * 64 + 8 * 48)
    assert len(Lora(copy.deepcopy(base), r={"layers[0].*": 2, "*": 4}).sites) == 4
    refused = [
        (dict(r={"q_porj": 4}), "q_proj"),
        (dict(r={"q_proj": 4, "mlp.up_proj": 2}, modules="q_proj"), "fits none of the modules chosen"),
        (dict(r={"q_proj": 4}, modules=["q_proj", "v_proj"]), "names no rank for model.layers.0.self_attn.v_proj"),
        (dict(alpha=-1), "alpha=-1"),
        (dict(r={}), "r={}"),
        (dict(r={"q_proj": 0}), "whole number"),
        (dict(r={"v_proj": 17}), "r=17 is more than"),
        (dict(alpha={"k_proj": 3}), "fits none"),
    ]
    for kw, words in refused:
        with pytest.raises((ValueError, LookupError), match=None) as e: Lora(base, **kw)
        assert words in str(e.value), e.value
    assert len(deltas(base)) == 0 and type(resolve(base, "layers[0].self_attn.q_proj").popitem()[1]) is nn.Linear


def test_a_word_that_is_mistyped():
    base = build("llama")
    for typed in ("all-linaer", "all_linear"):
        with pytest.raises(LookupError, match="; did you mean 'all-linear'\\?$"): Lora(base, modules=typed)
    with pytest.raises(LookupError) as e: Lora(base, modules="q_porj")
    assert "all-linear" not in str(e.value) and "q_proj" in str(e.value)


EMBEDDINGS = [("llama", "embed_tokens"), ("bert", "word_embeddings"), ("gpt2", "wte"), ("t5", "embed_tokens")]


@pytest.mark.parametrize("name,embedding", EMBEDDINGS)
def test_embedding_is_pefts(name, embedding, tmp_path):
    pytest.importorskip("peft")
    base = build(name)
    theirs = peft_of(base, r=4, lora_alpha=12, target_modules=[embedding, *TARGETS[name]])
    shake(p for n, p in theirs.named_parameters() if "lora_" in n)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs.save_pretrained(tmp_path / "theirs")
    mine = Delta.load(tmp_path / "theirs", copy.deepcopy(base))
    assert difference(mine.model, theirs) <= 1e-6 < difference(mine.model, base)
    assert EmbeddingSite in {type(s) for s in mine.sites.values()}
    mine.save(tmp_path / "ours")
    assert difference(mine.model, peft_reads(base, tmp_path / "ours")) <= 1e-6
    fresh = Lora(copy.deepcopy(base), r=4, modules=embedding).freeze(keep=None)
    assert difference(fresh.model, base) == 0
    logits(fresh.model, grad=True).sum().backward()
    # 98 is in no row of the batch
    for site in fresh.sites.values(): assert site.A.grad.abs().sum() > 0 and site.A.grad[:, 98].abs().sum() == 0
    assert fresh.count().delta == 4 * (99 + 32) * len(fresh.sites)


def test_embedding_merges_and_scales():
    import transformers as tf
    set_seed(0)
    config = tf.Gemma3TextConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=99,
        tie_word_embeddings=False,
    )
    model = tf.Gemma3ForCausalLM(config).eval()
    d = Lora(model, r=4, modules="embed_tokens")
    shake(d.parameters())
    tuned, words = logits(model), model.model.embed_tokens.weight.clone()
    with d.merge(): assert (logits(model) - tuned).abs().max() <= 1e-5
    assert torch.equal(model.model.embed_tokens.weight, words)
    tied = build("gpt2")
    with pytest.raises(ValueError, match="tied to lm_head"): Lora(tied, r=4, modules="wte").merge()


@pytest.mark.parametrize("name", ["moe", "gptoss"])
@pytest.mark.parametrize("how", ["eager", "grouped_mm", "batched_mm"])
def test_stacked_experts_are_pefts(name, how, tmp_path):
    pytest.importorskip("peft")
    base = build(name)
    if name == "gptoss" and how == "eager": base.config._attn_implementation = "eager"
    base.set_experts_implementation(how) if hasattr(base, "set_experts_implementation") else setattr(
        base.config, "_experts_implementation", how
    )
    state = copy.deepcopy(base.state_dict())
    theirs = peft_of(
        base,
        r=3,
        lora_alpha=12,
        target_modules=["q_proj"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        alpha_pattern={"down_proj": 5},
        rank_pattern={"gate_up_proj": 2},
    )
    shake(p for n, p in theirs.named_parameters() if "lora_" in n)
    theirs.save_pretrained(tmp_path / "theirs")
    mine = Delta.load(tmp_path / "theirs", copy.deepcopy(base))
    assert {type(s) for s in mine.sites.values()} == {LoraSite, ExpertsSite}
    assert difference(mine.model, theirs) <= 1e-6 < difference(mine.model, base)
    mine.save(tmp_path / "patterns")
    assert difference(mine.model, peft_reads(base, tmp_path / "patterns")) <= 1e-6
    ours = Lora(copy.deepcopy(base), r=2, modules="mlp.experts", experts=("down_proj",)).freeze(keep=None)
    assert difference(ours.model, base) == 0
    shake(ours.parameters())
    logits(ours.model, grad=True).square().sum().backward()
    assert all(p.grad.abs().sum() > 0 for p in ours.parameters())
    ours.save(tmp_path / "alone")
    assert difference(ours.model, peft_reads(base, tmp_path / "alone")) <= 1e-6
    assert difference(Delta.load(tmp_path / "alone", copy.deepcopy(base)).model, ours.model) == 0
    tuned = logits(mine.model)
    with mine.merge(): assert (logits(mine.model) - tuned).abs().max() <= 1e-5
    assert torch.equal(logits(mine.model), tuned)
    mine.detach()
    assert all(torch.equal(v, state[k]) for k, v in mine.model.state_dict().items()) and list(
        mine.model.state_dict()
    ) == list(state)


def test_experts_stack_copy_and_pickle():
    base = build("moe")
    plain = logits(base)
    a, b = Lora(base, r=2, modules="mlp.experts"), Lora(base, r=3, modules=["mlp.experts", "q_proj"], name="second")
    shake(a.parameters())
    shake(b.parameters(), 0.1)
    both = logits(base)
    twin, again = copy.deepcopy(base), pickle.loads(pickle.dumps(base))
    assert torch.equal(logits(twin), both) and torch.equal(logits(again), both)
    deltas(twin)["lora"].detach()
    a.detach()
    assert torch.equal(logits(twin), logits(base))
    b.detach()
    assert torch.equal(logits(base), plain)
    experts = base.model.layers[0].mlp.experts
    assert type(experts).__name__ == "Qwen3MoeExperts" and isinstance(experts.gate_up_proj, nn.Parameter)
    a.attach()
    # an error inside leaves the parameters where they were
    with pytest.raises(ZeroDivisionError):
        handle = base.model.layers[0].mlp.experts.act_fn.register_forward_hook(lambda *_: 1 / 0)
        logits(base)
    handle.remove()
    assert "gate_up_proj" not in vars(base.model.layers[0].mlp.experts)
    with pytest.raises(ValueError, match="experts=.*has gate_up_proj, down_proj"):
        Lora(base, modules="mlp.experts", experts=("up",), name="x")
    for kw in (dict(dropout=0.1), dict(dora=True), dict(init="pissa")):
        with pytest.raises(TypeError, match="stacks its experts"):
            Lora(base, r=2, modules="mlp.experts", name="x", **kw)


FUSED = {
    "gpt2": ("GPT2", dict(n_embd=32, n_layer=1, n_head=4), "c_attn"),
    "neox": ("GPTNeoX", {}, "query_key_value"),
    "bloom": ("Bloom", dict(n_layer=1, n_head=4), "query_key_value"),
    "falcon7": ("Falcon", dict(multi_query=True, new_decoder_architecture=False, alibi=False), "query_key_value"),
    "falcon40": ("Falcon", dict(num_kv_heads=2, new_decoder_architecture=True, alibi=False), "query_key_value"),
    "falconrw": ("Falcon", dict(multi_query=False, new_decoder_architecture=False, alibi=False), "query_key_value"),
    "persimmon": ("Persimmon", dict(qk_layernorm=False), "query_key_value"),
    "phi3": ("Phi3", dict(num_key_value_heads=2, pad_token_id=0), "qkv_proj"),
    "mpt": ("Mpt", dict(d_model=32, n_heads=4, n_layers=1), "Wqkv"),
    "codegen": ("CodeGen", dict(n_embd=32, n_layer=1, n_head=4, rotary_dim=4), "qkv_proj"),
    "starcoder": ("GPTBigCode", dict(n_embd=32, n_layer=1, n_head=4, multi_query=True), "c_attn"),
    "santacoder": ("GPTBigCode", dict(n_embd=32, n_layer=1, n_head=4, multi_query=False), "c_attn"),
}


@pytest.mark.parametrize("name", FUSED)
def test_rows_of_fused_products(name):
    "Which rows reach the cached keys and values is asked of autograd, in every family of the table"
    import transformers as tf
    family, kw, last = FUSED[name]
    set_seed(0)
    config = getattr(tf, f"{family}Config")(
        **{
            **dict(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, vocab_size=99),
            **kw,
        }
    )
    model = (getattr(tf, f"{family}ForCausalLM", None) or getattr(tf, f"{family}LMHeadModel", None))(config).eval()
    layer, module = resolve(model, last).popitem()
    seen = []
    handle = module.register_forward_hook(lambda m, i, o: seen.append(o) or o.retain_grad())
    cache = model(input_ids=IDS, use_cache=True).past_key_values
    handle.remove()
    K, V = cache.layers[0].keys, cache.layers[0].values
    weight = torch.randn_like
    rows = [
        (torch.autograd.grad((t * weight(t)).sum(), seen[0], retain_graph=True)[0].abs().sum((0, 1)) > 0).nonzero()[
            :, 0
        ]
        for t in (K, V)
    ]
    out = seen[0].shape[-1]
    rows.insert(0, torch.tensor(sorted(set(range(out)) - set(rows[0].tolist()) - set(rows[1].tolist()))))
    for part, want in zip("qkv", rows): assert torch.equal(fused_rows(model, layer, (part,)), want), part
    d = Lora(model, r=2, slices=("q", "v")).freeze(keep=None)
    assert set(d.sites) == {n for n, role in roles(model).items() if role == "qkv"}
    want = fused_rows(model, layer, ("q", "v"))
    assert d.count().delta == 2 * (32 + len(want))
    before = model(input_ids=IDS, use_cache=True).past_key_values.layers[0]
    shake(d.parameters())
    after = model(input_ids=IDS, use_cache=True).past_key_values.layers[0]
    assert torch.equal(before.keys, after.keys) and (before.values - after.values).abs().max() > 1e-3


def test_slices_in_files(tmp_path):
    pytest.importorskip("peft")
    base = build("gpt2")
    d = Lora(copy.deepcopy(base), r=4, slices="qv")
    shake(d.parameters())
    tuned = logits(d.model)
    d.save(tmp_path / "s")
    assert difference(d.model, peft_reads(base, tmp_path / "s")) <= 1e-6
    from safetensors.torch import load_file
    B = next(t for k, t in load_file(tmp_path / "s/adapter_model.safetensors").items() if "lora_B" in k)
    assert B.shape == (96, 4) and torch.count_nonzero(B[32:64]) == 0
    back = Delta.load(tmp_path / "s", copy.deepcopy(base))
    assert torch.equal(logits(back.model), tuned) and back.count().delta == d.count().delta == 2 * 4 * (32 + 64)
    with back.merge(): assert (logits(back.model) - tuned).abs().max() <= 1e-5
    rows = Lora(copy.deepcopy(base), r=4, slices=torch.arange(5))
    rows.save(tmp_path / "s")
    assert Delta.load(tmp_path / "s", copy.deepcopy(base)).count().delta == 2 * 4 * (32 + 5)
    Lora(copy.deepcopy(base), r=4).save(tmp_path / "s")                  # over the same folder: its slices are gone
    assert not (tmp_path / "s/bmlab.json").exists()
    refused = [
        (dict(slices="qx"), "slices=('q', 'x')", ValueError),
        (dict(slices="q", modules="c_proj"), "is none", TypeError),
        (dict(slices=torch.tensor([96])), "do not fit the 96", ValueError),
        (dict(slices="q", dora=True), "do not go together", ValueError),
    ]
    for kw, words, error in refused:
        with pytest.raises(error) as e: Lora(base, **kw)
        assert words in str(e.value)
    with pytest.raises(TypeError, match="is none"): Lora(build("llama"), slices="q")


def test_lora_plus_groups_are_pefts():
    pytest.importorskip("peft")
    from peft.optimizers import create_loraplus_optimizer
    base = build("llama")
    theirs = peft_of(base, r=4, target_modules=["q_proj", "v_proj"], use_dora=True)
    opt = create_loraplus_optimizer(theirs, torch.optim.AdamW, lr=1e-3, loraplus_lr_ratio=16)
    want = sorted((p.numel(), g["lr"]) for g in opt.param_groups for p in g["params"])
    d = Lora(base, r=4, dora=True).freeze(keep="lm_head")
    groups = d.param_groups(1e-3, lora_plus=16, weight_decay=0.1)
    got = [(p.numel(), g["lr"]) for g in groups for p in g["params"]]
    got.remove((base.lm_head.weight.numel(), 1e-3))                      # a tuned head learns at the plain rate
    assert sorted(got) == want and all(g["weight_decay"] == 0.1 for g in groups)
    torch.optim.AdamW(groups).step()
    assert len(d.param_groups(1e-3)) == 1 and len({id(p) for g in groups for p in g["params"]}) == sum(
        len(g["params"]) for g in groups
    )
    moe = Lora(build("moe"), r=2, modules="mlp.experts").freeze(keep=None).param_groups(1.0, lora_plus=4)
    assert [len(g["params"]) for g in moe] == [4, 4]


QUIET = {f"aten::{n}" for n in """linear matmul view reshape _unsafe_view as_strided t transpose expand empty
    empty_like empty_strided resize_ _reshape_alias flatten detach result_type view_as alias resolve_conj
    resolve_neg numpy_T permute""".split()}


def operations(f):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile: f()
    return {e.key: e.count for e in profile.key_averages() if e.key.startswith("aten::") and e.key not in QUIET}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_forward_is_three_products_and_nothing_else(dtype):
    model = nn.Sequential(nn.Linear(32, 48, bias=False)).to(dtype)
    x = torch.randn(2, 5, 32, dtype=dtype)
    own = operations(lambda: model(x))
    Lora(model, r=4, modules="0", dropout=0.1)
    model.eval()  # no call of dropout where it does nothing
    with_lora = operations(lambda: model(x))
    assert with_lora == {"aten::mm": own["aten::mm"] + 1, "aten::addmm_": 1}, with_lora
    model.train()
    assert any("dropout" in k or "bernoulli" in k for k in operations(lambda: model(x)))
    for p in model[0]._parameters.values(): p is None or p.requires_grad_(False)
    y = model.eval()(x.requires_grad_())
    grad = torch.ones(y.shape, dtype=dtype)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
        y.backward(grad)
    wide = [
        e.name
        for e in profile.events()
        if e.name not in QUIET
        and e.name.startswith("aten::")
        and any(math.prod(s) >= x.numel() for s in e.input_shapes if s)
    ]
    # the sum of the two gradients of x; no copies, no scaling of anything wide
    assert set(wide) == {"aten::add_", "aten::mm"} and wide.count("aten::add_") == 1, wide


def test_gradients_are_the_formulas():
    "Every path (in place, out of place, cast, one row, no gradient of x) against W x + s B A x written out"
    import transformers as tf
    conv = tf.pytorch_utils.Conv1D(48, 32)
    shapes = (7, 32), (2, 3, 32), (32,), (0, 32)
    for base, transposed, shape, grad_x in itertools.product((nn.Linear(32, 48), conv), (None,), shapes, (True, False)):
        model = nn.Sequential(copy.deepcopy(base))
        d = Lora(model, r=4, modules="0").freeze(keep=None)
        shake(d.parameters())
        (s,), x = d.sites.values(), torch.randn(shape).requires_grad_(grad_x)
        out = model(x)
        weight = torch.randn_like(out)
        got = torch.autograd.grad((out * weight).sum(), [s.A, s.B] + [x] * grad_x)
        W = model[0].weight.T if isinstance(base, type(conv)) else model[0].weight
        want_out = x @ W.T + model[0].bias + s.scale * (x @ s.A.T) @ s.B.T
        want = torch.autograd.grad((want_out * weight).sum(), [s.A, s.B] + [x] * grad_x)
        torch.testing.assert_close(out, want_out)
        for a, b in zip(got, want): torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def test_two_on_one_layer_and_others_below():
    "In place is only for the innermost of a chain; hooks and other deltas see whole tensors of the right shape"
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 8))
    x, seen = torch.randn(2, 3, 32), []
    model[0].register_forward_hook(lambda m, i, o: seen.append((i[0].shape, o.shape)))
    a, b, c = (Lora(model, r=2, modules="0", name=n, **kw) for n, kw in (("a", {}), ("b", dict(dora=True)), ("c", {})))
    for d in (a, b, c): shake(d.parameters())
    y = model(x)
    assert seen[-1] == (torch.Size([2, 3, 32]), torch.Size([2, 3, 32]))
    with b.merge(), a.merge(), c.merge(): pass
    (sa,), (sb,), (sc,) = a.sites.values(), b.sites.values(), c.sites.values()
    W = model[0].weight + sb.delta_weight(model[0]) + sa.delta_weight(model[0]) + sc.delta_weight(model[0])
    torch.testing.assert_close(model[1](F.linear(x, W, model[0].bias)), y, atol=1e-5, rtol=1e-5)
    y.sum().backward()
    assert all(p.grad is not None for d in (a, b, c) for p in d.parameters())


def test_selective_checkpointing_keeps_what_it_caches():
    "Outputs that checkpointing keeps are not written to"
    from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8, bias=False)), torch.randn(3, 8)
    d = Lora(model, r=2, modules=["0", "2"]).freeze(keep=None)
    shake(d.parameters())
    def gradients(run):
        for p in d.parameters(): p.grad = None
        run(x).square().sum().backward()
        return [p.grad.clone() for p in d.parameters()]
    contexts = lambda: create_selective_checkpoint_contexts([torch.ops.aten.mm.default, torch.ops.aten.addmm.default])
    def again(x): return checkpoint(model, x, use_reentrant=False, context_fn=contexts)
    for a, b in zip(gradients(model), gradients(again)):
        torch.testing.assert_close(a, b)


def test_experts_recompute():
    model = build("moe").train()
    d = Lora(model, r=2, modules=["mlp.experts", "q_proj"]).freeze(keep=None)
    shake(d.parameters())
    def gradients():
        for p in d.parameters(): p.grad = None
        model(**inputs(model)).loss.backward()
        return [p.grad.clone() for p in d.parameters()]
    plain = gradients()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for a, b in zip(plain, gradients()): assert torch.equal(a, b)


def test_pefts_parameter_targets_and_spread_files(tmp_path):
    "target_parameters of plain layers are LoRA on them; shared sets and slices, spread out, are PEFT's too"
    pytest.importorskip("peft")
    base = build("llama")
    theirs = peft_of(base, r=4, target_parameters=["q_proj.weight"], target_modules=["v_proj"], init_lora_weights=False)
    theirs.save_pretrained(tmp_path / "theirs")
    assert difference(Delta.load(tmp_path / "theirs", copy.deepcopy(base)).model, theirs) <= 1e-6
    for name, kw in (("gpt2", dict(slices="qv", share="layers")), ("moe", dict(modules="mlp.experts", share="layers"))):
        base = build(name)
        d = Lora(copy.deepcopy(base), r=2, **kw)
        shake(d.parameters())
        d.save(tmp_path / name, spread=True)
        assert difference(d.model, peft_reads(base, tmp_path / name)) <= 1e-6
        d.save(tmp_path / name)
        back = Delta.load(tmp_path / name, copy.deepcopy(base))
        assert difference(d.model, back.model) == 0 and back.count().delta == d.count().delta


STARTS = [dict(), dict(dora=True), dict(init="pissa"), dict(init="pissa_niter_4"), dict(init="gaussian")]


@pytest.mark.parametrize("kw", STARTS, ids=str)
def test_kept_wider_than_computed(kw):
    "float32 A and B beside bfloat16 compute in bfloat16; under autocast too; float32 gradients arrive"
    for autocast in (False, True):
        model = build("llama") if autocast else build("llama").bfloat16()
        d = Lora(model, r=4, dtype=torch.float32, **kw).freeze(keep=None)
        shake(d.parameters(), 0.05)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast): out = model(input_ids=IDS, labels=IDS)
        out.loss.backward()
        assert all(p.grad.dtype == torch.float32 and p.grad.abs().sum() > 0 for p in d.parameters())
        whole = build("llama")
        w = Lora(whole, r=4, dtype=torch.float32, **kw)
        for s, t in zip(w.sites.values(), d.sites.values()): s.load_state_dict(t.state_dict())
        assert (out.logits.float() - logits(whole)).abs().max() < 0.05


@pytest.mark.parametrize("kw", [dict(), dict(dora=True), dict(init="pissa")], ids=str)
def test_dropout_in_training(kw):
    "Dropped inputs as in PEFT: with the same random numbers the same training loss"
    pytest.importorskip("peft")
    base = build("llama")
    theirs = peft_of(
        base,
        r=4,
        lora_alpha=8,
        lora_dropout=0.4,
        target_modules=["q_proj", "v_proj"],
        use_dora=kw.get("dora", False),
        init_lora_weights=kw.get("init", True),
    ).train()
    d = Lora(base, r=4, dropout=0.4, **kw)
    with torch.no_grad():
        for n, s in d.sites.items():
            layer = theirs.base_model.model.get_submodule(n)
            nn.init.normal_(s.B, std=0.2)
            s.A.copy_(layer.lora_A["default"].weight)
            layer.lora_B["default"].weight.copy_(s.B)
    base.train()
    set_seed(3)
    a = base(**inputs(base)).loss
    set_seed(3)
    b = theirs(**inputs(base)).loss
    assert abs(a - b) <= 1e-5 and d.dropout == 0.4


KINDS = [dict(), dict(dora=True), dict(init="pissa"), dict(r={"q_proj": 2, "v_proj": 4})]


@pytest.mark.parametrize("kw", KINDS, ids=str)
def test_on_int8(kw):
    "On a packed backbone, the delta is that on the dequantized one"
    model = build("llama")
    pack_linears(model)
    d = Lora(model, **{"r": 4, **kw}).freeze(keep=None)
    shake(d.parameters(), 0.05)
    float_model = build("llama")
    whole = dict(float_model.named_modules())
    with torch.no_grad():
        for n, m in model.named_modules():
            if isinstance(m, Int8Linear): whole[n].weight.copy_(m.dequantize())
    if "init" in kw:
        kw = {}
        r = 8
    else: r = 4
    e = Lora(float_model, **{"r": r, **kw})
    if r == 8: e.alpha = None
    with torch.no_grad():
        for s, t in zip(e.sites.values(), d.sites.values()):
            if r == 8:
                A, B = t.pair()
                s.A.copy_(A)
                s.B.copy_(B)
                s.scale = t.scale
            else: s.load_state_dict(t.state_dict())
    assert difference(model, float_model) <= 1e-5
    logits(model, grad=True).sum().backward()
    assert all(p.grad is not None for p in d.parameters())
    with pytest.raises(TypeError, match="packed"): d.merge()


KINDS = [
    ("llama", dict(dora=True)),
    ("llama", dict(init="pissa")),
    ("gpt2", dict(slices="qv")),
    ("moe", dict(modules=["mlp.experts"])),
    ("llama", dict(modules=["embed_tokens", "q_proj"])),
]


@pytest.mark.long
@pytest.mark.parametrize("name,kw", [
    kind if {"dora", "modules"} & {*kind[1]} and "embed_tokens" not in str(kind) else
    pytest.param(*kind, marks=pytest.mark.slow) for kind in KINDS], ids=str)
def test_compiled(name, kw):
    "Compiled before and after attaching, forward and gradients"
    base = build(name)
    reference = copy.deepcopy(base)
    d = Lora(reference, r=4, **kw).freeze(keep=None)
    shake(d.parameters(), 0.05)
    want = logits(reference, grad=True)
    want.square().sum().backward()
    torch._dynamo.reset()
    compiled = torch.compile(base, backend="eager")
    breaks = lambda: sum(torch._dynamo.utils.counters["graph_break"].values())
    torch._dynamo.utils.counters.clear()
    plain = logits(compiled, grad=True)
    own = breaks()
    e = Lora(compiled, r=4, **kw).freeze(keep=None)
    with torch.no_grad():
        for s, t in zip(e.sites.values(), d.sites.values()): s.load_state_dict(t.state_dict())
    torch._dynamo.utils.counters.clear()
    got = compiled(**inputs(base)).logits
    assert breaks() <= own                                               # no graph breaks of the delta's
    assert (got - want).abs().max() <= 1e-6
    got.square().sum().backward()
    for p, q in zip(e.parameters(), d.parameters()): torch.testing.assert_close(p.grad, q.grad, atol=1e-4, rtol=1e-4)
    e.detach()
    assert (logits(compiled, grad=True) - plain).abs().max() <= 1e-6


def sharded_training(kinds, zeros, folder):
    "For each level and kind: three steps on this rank's rows, then a file"
    import torch.distributed as dist
    for zero, (k, (name, kw)) in itertools.product(zeros, enumerate(kinds)):
        world = dist.get_world_size() if zero else 1
        model = build(name)
        d = Lora(model, r=4, **kw).freeze(keep=None)
        shake(d.parameters(), 0.05)
        if zero: shard(model, zero=zero, dtype=torch.float32)
        opt = torch.optim.SGD(d.parameters(), lr=0.1)
        for _ in range(3):
            mine = IDS.chunk(world)[dist.get_rank()] if zero else IDS
            model(input_ids=mine, labels=mine).loss.backward()
            opt.step()
            opt.zero_grad()
        d.save(folder / f"{zero}-{k}")


@pytest.mark.long
def test_sharded_trains_and_saves_the_same(tmp_path):
    "Two ranks against one: tensors that a file lays out otherwise than the shards are gathered first"
    from safetensors.torch import load_file
    run_ranks(sharded_training, KINDS, (2, 3), tmp_path, timeout_s=300)
    sharded_training(KINDS, (None,), tmp_path)
    for k, zero in itertools.product(range(len(KINDS)), (2, 3)):
        one, two = (load_file(tmp_path / f"{of}-{k}" / "adapter_model.safetensors") for of in (None, zero))
        assert one.keys() == two.keys()
        for n in one: torch.testing.assert_close(one[n], two[n], atol=1e-5, rtol=1e-5)


def test_refusals():
    base = build("llama")
    refused = [
        (dict(init="svd"), "init='svd'"),
        (dict(dora=True, init="pissa"), "do not go together"),
        (dict(dora=True, share="layers"), "cannot share"),
        (dict(r=True), "r=True"),
        (dict(dropout=1), "dropout=1"),
        (dict(slices=()), "slices=()"),
    ]
    for kw, words in refused:
        with pytest.raises(ValueError) as e: Lora(base, **kw)
        assert words in str(e.value)
    for kw in (dict(dora=True), dict(init="pissa")):
        with pytest.raises(TypeError, match="goes with linear layers only"):
            Lora(base, r=4, modules="embed_tokens", **kw)
    with pytest.raises(TypeError, match="is a LlamaRMSNorm"): Lora(base, modules="norm")
    with torch.device("meta"): on_meta = type(base)(base.config)
    d = Lora(on_meta, r=4, dora=True)
    assert d.count().delta == Lora(base, r=4, dora=True).count().delta
    with pytest.raises(RuntimeError, match="load them first"): next(iter(d.sites.values())).reset_parameters()
    with pytest.raises(TypeError, match="no plain LoRA"): next(iter(d.sites.values())).pair()


def test_pissa_fast_start_is_near():
    "A few power iterations find the directions that the whole decomposition finds"
    base = build("llama")
    with torch.no_grad():
        for m in resolve(base, "q_proj").values():
            U, S, V = torch.linalg.svd(m.weight)
            m.weight.copy_(U @ torch.diag(S * torch.logspace(0, -3, len(S))) @ V)
    a, b = (
        Lora(copy.deepcopy(base), r=4, modules="q_proj", init="pissa"),
        Lora(copy.deepcopy(base), r=4, modules="q_proj", init="pissa_niter_8"),
    )
    for s, t in zip(a.sites.values(), b.sites.values()):
        torch.testing.assert_close(s.B @ s.A, t.B @ t.A, atol=1e-4, rtol=1e-3)


def test_copy_to_brings_the_head_that_freeze_kept():
    import transformers as tf
    config = tf.BertConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=99, num_labels=3
    )
    set_seed(0)
    model = tf.BertForSequenceClassification(config).eval()
    other, d = copy.deepcopy(model), Lora(model, 4).freeze()
    with torch.no_grad():
        for p in d.trainable(): p += 0.3
        d.copy_to(other)
        assert other(IDS).logits.equal(model(IDS).logits) and not other.classifier.weight.equal(model.classifier.weight)


def _family(name):
    import transformers as tf
    t = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, vocab_size=99)
    if name == "opt": return tf.OPTForCausalLM(tf.OPTConfig(**t, ffn_dim=64, word_embed_proj_dim=16))
    if name == "neox": return tf.GPTNeoXForCausalLM(tf.GPTNeoXConfig(**t, intermediate_size=64))
    return build(name)


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "t5", "moe", "gptoss", "opt", "neox"])
def test_all_linear_is_pefts(name):
    "The same layers, and on packed ones as on plain ones"
    pytest.importorskip("peft")
    model = _family(name)
    theirs = peft_of(model, r=2, target_modules="all-linear").base_model.model
    chosen = [n for n, m in theirs.named_modules() if hasattr(m, "lora_A")]
    # (of some families PEFT adds the stacked experts and the router, which are no linear layers)
    if name == "moe": chosen = [n for n in chosen if ".mlp." not in n]
    assert list(Lora(model, r=2, modules="all-linear").sites) == chosen
    assert list(Lora.without_regret(model, 2, name="second").sites) == chosen    # with a delta there already
    for d in list(deltas(model).values()): deltas(model).forget(d.name)
    if name == "llama":
        pack_linears(model, 8, "mlp.*_proj")
        assert list(Lora(model, r=2, modules="all-linear").sites) == chosen


def test_float32_beside_bfloat16_is_pefts():
    "The same types of the same parameters, and steps that bfloat16 would lose are kept"
    pytest.importorskip("peft")
    base = build("llama").bfloat16()
    theirs = peft_of(base, r=4, target_modules="all-linear", lora_alpha=32)
    d = Lora.without_regret(base, 4).freeze()
    kept = {n: (tuple(p.shape), p.dtype) for n, p in theirs.named_parameters() if "lora_" in n}
    mine = {(f"{n}.{k}", tuple(p.shape), p.dtype) for n, s in d.sites.items() for k, p in s.named_parameters()}
    short = lambda n: n.removeprefix("base_model.model.").replace(".lora_", ".").removesuffix(".default.weight")
    assert mine == {(short(n), *v) for n, v in kept.items()}
    assert {p.dtype for p in base.model.embed_tokens.parameters()} == {torch.bfloat16}
    half = copy.deepcopy(base)
    deltas(half).forget("lora")
    set_seed(3)
    low, moved = Lora.without_regret(half, 4, dtype=None).freeze(), {}
    for which, delta, model in (("float32", d, base), ("bfloat16", low, half)):
        start = [p.detach().clone() for p in delta.parameters()]
        opt = torch.optim.SGD(delta.trainable(), lr=1e-3)
        model(**inputs(model)).loss.backward()
        opt.step()
        tries = zip(start, delta.parameters())
        moved[which] = sum((a != b).sum().item() for a, b in tries if a.any())
    assert moved["float32"] == 0 and moved["bfloat16"] == 0              # (B is zero: A has no gradient yet)
    for model, delta in ((base, d), (half, low)): shake(delta.parameters(), 0.05)
    grads = []
    for which, delta, model in (("float32", d, base), ("bfloat16", low, half)):
        start = [p.detach().clone() for p in delta.parameters()]
        opt = torch.optim.SGD(delta.trainable(), lr=1e-3)
        opt.zero_grad()
        model(**inputs(model)).loss.backward()
        grads.append(sum((p.grad != 0).sum().item() for p in delta.parameters()))
        opt.step()
        moved[which] = sum((a != b).sum().item() for a, b in zip(start, delta.parameters()))
    assert min(grads) > 0 and moved["float32"] > 0.95 * grads[0] and moved["bfloat16"] < 0.9 * grads[1]


def test_detach_gives_back_what_freeze_took():
    model = build("llama")
    model.model.embed_tokens.weight.requires_grad_(False)
    state = lambda: {n: p.requires_grad for n, p in model.named_parameters() if "_deltas" not in n}
    before = state()
    a = Lora(model, r=2).freeze()
    frozen = state()
    assert not any(frozen.values())
    a.detach()
    assert state() == before
    a.attach()                                                                # and takes it again
    assert state() == frozen
    with deltas(model).aside(): assert state() == frozen                      # a save in the midst of training
    a.rename("first")
    with a.merge(): assert state() == frozen
    assert state() == frozen and a.attached
    b = Lora(model, r=2, name="b").freeze(keep="lm_head")
    kept = state()
    assert [n for n, on in kept.items() if on] == ["lm_head.weight"]
    a.detach()
    assert state() == kept                                                    # b holds it still
    a.attach()
    b.freeze(keep="lm_head").detach()
    assert state() == frozen                                                  # as a has it
    a.detach()
    assert state() == before
    deltas(model).forget("b")
    a.attach().unfreeze()
    assert state() == before
    a.detach().attach()
    assert state() == before                                                  # nothing was frozen, nothing is


def test_rows_of_a_model_on_meta():
    "A Lora of some rows is made where no number can be read"
    import transformers as tf
    with torch.device("meta"):
        model = tf.GPT2LMHeadModel(tf.GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=64, n_positions=16))
    sites = Lora(model, r=2, slices=("q", "v")).sites
    assert sites and all(p.is_meta for s in sites.values() for p in s.parameters())

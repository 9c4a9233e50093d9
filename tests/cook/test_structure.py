"Cut models in fresh processes, many random cuts, and CPM-Ant's published sizes by shape."
import copy

import pytest
import torch
import toys
import transformers as tf
from torch import nn

from bmlab.cook.report import load_cooked, save_cooked
from bmlab.core import count
from bmlab.models.load import build
from bmlab.cook.structure import mask_model, reloads, slice_model, structure, undroppable
from conftest import every_other
from every_family import FAMILIES as EVERY, make
from fresh import fresh_python

TINY = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4, vocab_size=99)
FAMILIES = {
    "gpt2": lambda: tf.GPT2LMHeadModel(
        tf.GPT2Config(n_embd=32, n_layer=4, n_head=4, n_inner=48, vocab_size=99, bos_token_id=1, eos_token_id=2)
    ),
    "llama": lambda: tf.LlamaForCausalLM(
        tf.LlamaConfig(**TINY, num_key_value_heads=2, tie_word_embeddings=True, attention_bias=True, mlp_bias=True)
    ),
    "qwen3": lambda: tf.Qwen3ForCausalLM(tf.Qwen3Config(**TINY, num_key_value_heads=2, head_dim=16)),
    "t5": lambda: tf.T5ForConditionalGeneration(
        tf.T5Config(
            d_model=32,
            d_kv=8,
            d_ff=48,
            num_layers=3,
            num_decoder_layers=2,
            num_heads=4,
            vocab_size=99,
            decoder_start_token_id=0,
        )
    ),
    "flan-t5": lambda: tf.T5ForConditionalGeneration(
        tf.T5Config(
            d_model=32,
            d_kv=8,
            d_ff=48,
            num_layers=3,
            num_heads=4,
            vocab_size=99,
            feed_forward_proj="gated-gelu",
            decoder_start_token_id=0,
        )
    ),
    "bert": lambda: tf.BertForMaskedLM(tf.BertConfig(**TINY)),
    "cpmant": lambda: tf.CpmAntForCausalLM(
        tf.CpmAntConfig(
            vocab_size=99,
            hidden_size=32,
            num_attention_heads=4,
            dim_head=8,
            dim_ff=48,
            num_hidden_layers=4,
            prompt_types=4,
            prompt_length=2,
            segment_types=4,
            init_std=0.1,
        )
    ),
    "phi3": lambda: tf.Phi3ForCausalLM(
        tf.Phi3Config(**TINY, num_key_value_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    ),  # gate and up in one matrix; q, k and v too
    "glm4": lambda: tf.Glm4ForCausalLM(
        tf.Glm4Config(**TINY, num_key_value_heads=2, head_dim=8, pad_token_id=0, eos_token_id=2)
    ),
}


def made(family, seed=0):
    torch.manual_seed(seed)
    model = FAMILIES[family]().eval()
    for p in model.parameters(): p.data += 0.05 * torch.randn_like(p)
    return model


def inputs(family):
    ids = torch.randint(3, 99, (2, 7), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids} | ({"decoder_input_ids": ids[:, :4]} if "t5" in family else {})


def anything(model, seed, uniform=False):
    "A random cut of everything that this family allows"
    found, g, keep = structure(model), torch.Generator().manual_seed(seed), {}
    def some(n, least=1):
        return torch.randperm(n, generator=g)[:int(torch.randint(least, n + 1, (), generator=g))].sort().values.tolist()
    shared = {}
    # whose heads are as many in every layer
    one, width, counted = some(2), some(48), "Phi3" in type(model).__name__
    for a in found.attention().values():
        per, groups = a.heads // a.groups, one if uniform and a.groups == 2 else some(a.groups)
        inside = some(per) if not uniform and not counted else range(per)
        if a.table or a.like or counted: groups = shared.setdefault("heads" if uniform else a.table or a.like, groups)
        elif uniform: groups = shared.setdefault("heads", groups)
        keep[a.out] = [h * per + i for h in groups for i in inside]
    for f in found.ffn().values(): keep[f.out] = width if uniform else some(f.width)
    for s, layers in found.stacks.items(): keep[s] = some(len(layers))
    if not uniform:
        for layer in found.layers():
            for u in (*layer.attention, *layer.ffn):
                if not undroppable(u, layer) and torch.rand((), generator=g) < 0.2: keep[u.out] = []
    try: slice_model(copy.deepcopy(model), {"hidden": range(16)})
    except ValueError: return keep
    return keep | {"hidden": some(32, 8)}


@pytest.mark.parametrize("family", every_other(FAMILIES))
def test_any_cut_says_what_its_mask_says(family, tmp_path):
    checked = 0
    for seed in range(6):
        model = made(family, seed)
        keep = anything(model, seed)
        small, big = copy.deepcopy(model), mask_model(copy.deepcopy(model), keep)
        try: slice_model(small, keep)
        except ValueError as e:
            assert "keep at least one" in str(e)
            continue
        with torch.no_grad(): a, b, whole = (m(**inputs(family)).logits for m in (small, big, model))
        assert (a - b).abs().max() < 1e-5 * max(1, b.abs().max()) and (a - whole).abs().max() > 1e-3
        again = load_cooked(save_cooked(small, tmp_path / f"{seed}"))
        # weights lie elsewhere in memory: sums in another order
        with torch.no_grad(): assert (again(**inputs(family)).logits - a).abs().max() < 1e-6 * max(1, a.abs().max())
        checked += 1
        if checked == 3: break
        if family == "bert" or seed > 1: continue
        ids = inputs(family)["input_ids"]
        how = dict(max_new_tokens=5, do_sample=False, pad_token_id=0, attention_mask=torch.ones_like(ids))
        assert small.generate(ids, **how).equal(big.generate(ids, **how))
        assert again.generate(ids, **how).equal(small.generate(ids, **how))
    assert checked >= 3


@pytest.mark.parametrize("family", ["llama", "qwen3", "t5", "flan-t5", "cpmant", "phi3", "glm4"])
def test_uniform_cuts_reload_in_transformers(family, tmp_path):
    model = made(family)
    keep = anything(model, 3, uniform=True)
    slice_model(model, keep)
    assert reloads(model)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path).eval()
    # Qwen3: one epsilon for norms of heads and channels
    with torch.no_grad():
        torch.testing.assert_close(again(**inputs(family)).logits, model(**inputs(family)).logits, rtol=0, atol=1e-4)


@pytest.mark.long
def test_both_ways_back_in_a_fresh_process(tmp_path):
    llama, gpt2 = made("llama"), made("gpt2")
    slice_model(llama, anything(llama, 3, uniform=True))
    slice_model(gpt2, anything(gpt2, 1))
    llama.save_pretrained(tmp_path / "llama")
    save_cooked(gpt2, tmp_path / "gpt2")
    with torch.no_grad(): torch.save([m(**inputs("llama")).logits for m in (llama, gpt2)], tmp_path / "logits")
    code = """import sys, torch, transformers as tf
from bmlab.cook.report import load_cooked
d = sys.argv[1]
ids = torch.randint(3, 99, (2, 7), generator=torch.Generator().manual_seed(0))
again = tf.LlamaForCausalLM.from_pretrained(d + "/llama").eval(), load_cooked(d + "/gpt2")
with torch.no_grad(): got = [m(ids).logits for m in again]
for a, b in zip(got, torch.load(d + "/logits")): torch.testing.assert_close(a, b, rtol=0, atol=1e-5)"""
    fresh_python(code, tmp_path, check=True)


def test_embeddings_stay_tied_and_the_original_is_untouched():
    model = made("llama")
    small = copy.deepcopy(model)
    slice_model(small, anything(small, 4))
    assert small.lm_head.weight is small.model.embed_tokens.weight and count(model).total == count(made("llama")).total
    assert all(p.equal(q) for p, q in zip(model.parameters(), made("llama").parameters()))


def test_cpm_ant_sizes_by_shape():
    cpm = build("cpm-ant-10b", device="meta")
    published = {(48, 48, 32, 10240): 9.261e9, (37, 32, 32, 10240): 6.510e9, (37, 32, 20, 3735): 3.021e9,
                 (25, 21, 20, 3735): 2.012e9, (25, 21, 16, 700): 1.019e9, (25, 21, 4, 350): 0.300e9}
    found = structure(cpm)
    for (attentions, networks, heads, width), size in published.items():
        model = copy.deepcopy(cpm)
        keep = {n: range(heads) if i < attentions else [] for i, n in enumerate(found.attention())}
        slice_model(model, keep | {n: range(width) if i < networks else [] for i, n in enumerate(found.ffn())})
        body = count(model).total - sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Embedding))
        assert abs(body / size - 1) < 0.01 and model.config.hidden_size == 4096


@pytest.mark.cuda
def test_cpm_ant_goes_down_its_stairs_on_a_gpu(tmp_path):
    "The real shape with random weights: cut to the five published sizes, saved, read back, run"
    from bmlab.cook.prune import StructPrune, staircase
    model = build("cpm-ant-10b", device="cuda", dtype=torch.bfloat16)
    cuts = [dict(attention=37, ffn_layers=32), dict(heads=20, ffn=3735), dict(attention=25, ffn_layers=21),
            dict(heads=16, ffn=700), dict(heads=4, ffn=350)]
    ids, sizes = torch.randint(10, 30000, (2, 16), device="cuda"), []
    for cut in cuts:
        model, = staircase([StructPrune(**cut, score="magnitude")], model)
        sizes.append(count(model).total - sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Embedding)))
        with torch.no_grad():
            said = model(ids).logits
            again = load_cooked(save_cooked(model, tmp_path / "cpm"), device="cuda")
            torch.testing.assert_close(again(ids).logits, said, rtol=1e-2, atol=1e-2 * said.abs().max().item())
            assert said.isfinite().all()
        del again
        torch.cuda.empty_cache()
    for size, want in zip(sizes, (6.510e9, 3.021e9, 2.012e9, 1.019e9, 0.300e9)): assert abs(size / want - 1) < 0.01
    print(f"\nCPM-Ant on the GPU: bodies of {', '.join(f'{s / 1e9:.3f}B' for s in sizes)}")


def test_what_stays_is_numbers_or_a_mask_of_them():
    model, name = made("llama"), "model.layers.0.mlp.down_proj"
    mask = torch.arange(48) % 2 == 0
    for keep in (mask, mask.tolist(), mask.numpy(), range(0, 48, 2), set(range(0, 48, 2)),
                 torch.arange(0, 48, 2, dtype=torch.int32)):
        small = copy.deepcopy(model)
        slice_model(small, {name: keep})
        assert small.get_submodule(name).weight.equal(model.get_submodule(name).weight[:, ::2])
    for wrong, error, text in ((mask[:-1], ValueError, r"a mask of shape \(47,\); there are 48 " r"neurons"),
                               ([-1, 0], ValueError, "neurons -1; there are 48, " "numbered from 0"),
                               ([0.0, 1.0], TypeError, "whole numbers"), (torch.ones(48), TypeError, "whole numbers"),
                               (7, TypeError, "whole numbers"), ([[0], [1]], TypeError, "whole numbers"),
                               (mask[None], ValueError, "a mask of shape")):
        with pytest.raises(error, match=text): slice_model(model, {name: wrong})
        with pytest.raises(error, match=text): mask_model(model, {name: wrong})
    assert all(p.equal(q) for p, q in zip(model.parameters(), made("llama").parameters()))


def everything_of(model):
    return ({n: (type(m), {k: v for k, v in vars(m).items() if isinstance(v, (int, float, str, tuple))},
                 {k: id(p) for k, p in m._parameters.items()}, {k: id(b) for k, b in m._buffers.items()})
             for n, m in model.named_modules()},
            {k: v.clone() for k, v in model.state_dict().items()}, model.config.to_dict())


def test_a_layout_that_mixes_the_heads_is_left_alone():
    "GPT-BigCode's c_attn holds q, k and v head by head where each head has its own; CodeGen's qkv_proj in four parts"
    sizes = dict(n_embd=32, n_layer=1, n_head=4, vocab_size=99, bos_token_id=1, eos_token_id=2)
    assert len(structure(tf.GPTBigCodeForCausalLM(tf.GPTBigCodeConfig(**sizes, multi_query=True))).attention()) == 1
    for model in (tf.GPTBigCodeForCausalLM(tf.GPTBigCodeConfig(**sizes, multi_query=False)),
                  tf.CodeGenForCausalLM(tf.CodeGenConfig(**sizes, rotary_dim=4))):
        found = structure(model)
        assert not found.attention() and len(found.ffn()) == 1


@pytest.mark.parametrize("what",
                         ["channels of a LayerNorm", "a delta", "a packed layer", "uneven groups", "tables",
                          "a parametrization"])
def test_a_refused_slice_leaves_the_model_bit_for_bit(what):
    from bmlab.kernels.layers import pack_linears
    from bmlab.delta.lora import Lora
    class Refuses(nn.Module):
        def forward(self, w): return w
        def cut(self, dim, index): raise RuntimeError("cannot be cut")
    model = made({"channels of a LayerNorm": "gpt2", "tables": "t5"}.get(what, "llama"))
    found = structure(model)
    keep = {n: range(8) for n in found.ffn()} | {n: [0, 1] for n in found.attention()}
    if what == "channels of a LayerNorm": keep["hidden"] = range(16)
    elif what == "a delta": Lora(model, r=2, modules="layers.3.mlp.down_proj")
    elif what == "a packed layer": pack_linears(model, 8, "layers.3.mlp.down_proj")
    elif what == "uneven groups": keep["model.layers.3.self_attn.o_proj"] = [0, 1, 2]
    elif what == "tables": keep["decoder.block.1.layer.0.SelfAttention.o"] = [0, 2]
    else: nn.utils.parametrize.register_parametrization(model.model.layers[3].mlp.down_proj, "weight", Refuses())
    before = everything_of(model)
    with pytest.raises((ValueError, TypeError, RuntimeError)): slice_model(model, keep)
    after = everything_of(model)
    assert after[0] == before[0] and after[2] == before[2] and all(v.equal(after[1][k]) for k, v in before[1].items())


@pytest.mark.parametrize("family", ["gpt2", "llama", "t5", "bert", "cpmant"])
def test_what_hangs_in_a_network_is_told_which_neurons_stay(family):
    class Site(nn.Module):
        def __init__(self, n):
            super().__init__()
            self.register_buffer("neurons", torch.arange(n))
            self.calls = 0
        def cut_neurons(self, index): self.neurons, self.calls = self.neurons[index], self.calls + 1
    model = made(family)
    ffn = structure(model).ffn()
    for f in ffn.values(): model.get_submodule(f.module).add_module("site", Site(48))
    first, second, *_ = ffn
    names = slice_model(model, {first: [9, 4, 31], second: range(48)})
    sites = {n: model.get_submodule(names[f.module]).site for n, f in ffn.items()}
    assert sites[first].neurons.tolist() == [4, 9, 31] and sites[first].calls == 1
    assert all(s.calls == 0 and len(s.neurons) == 48 for n, s in sites.items() if n != first)


def test_channels_that_cannot_be_told_from_heads_are_not_cut():
    "OLMo-2 has norms across its heads, Cohere's norm subtracts a mean under another name"
    for family, why in (("olmo2", "q_proj is not known"), ("cohere", "subtracts the mean")):
        with pytest.raises(ValueError, match=why): slice_model(toys.build(family), {"hidden": range(16)})
    xglm = tf.XGLMForCausalLM(tf.XGLMConfig(vocab_size=99, d_model=32, ffn_dim=48, num_layers=1,
                                            attention_heads=4)).eval()
    keep = {"model.layers.0.self_attn.out_proj": [1, 2]}
    small, ids = copy.deepcopy(xglm), inputs("xglm")["input_ids"]
    slice_model(small, keep)                                          # whose attention counts its own width
    with torch.no_grad(): torch.testing.assert_close(small(ids).logits, mask_model(xglm, keep)(ids).logits)


def said(model):
    ids = torch.arange(10, 34).view(2, 12)
    more = dict(decoder_input_ids=ids[:, :6]) if model.config.is_encoder_decoder else {}
    with torch.no_grad(): return model(input_ids=ids, **more).logits


def half(found, what):
    "Half of the heads' groups, every second neuron, or all layers but the first"
    if what == "heads":
        return {a.out: range(max(1, a.groups // 2) * (a.heads // a.groups)) for a in found.attention().values()}
    if what == "ffn": return {f.out: range(0, f.width, 2) for f in found.ffn().values()}
    return {s: range(1, len(layers)) for s, layers in found.stacks.items() if len(layers) > 1}


def check_cut(model, what, folder):
    "Cut, it says what its mask says, and a file of it says the same; or it is refused as it was"
    keep, plain = half(structure(model), what), said(model)
    small = copy.deepcopy(model)
    if not keep: return
    try: slice_model(small, keep)
    except ValueError:
        assert torch.equal(said(small), plain)
        return
    got = said(small)
    close = dict(rtol=0, atol=1e-4 * max(1, got.abs().max().item()))
    torch.testing.assert_close(got, said(mask_model(copy.deepcopy(model), keep)), **close)
    torch.testing.assert_close(said(load_cooked(save_cooked(small, folder / f"{what} cooked"))), got, **close)
    if not reloads(small): return
    small.save_pretrained(folder / what)
    torch.testing.assert_close(said(type(small).from_pretrained(folder / what).eval()), got, **close)


OF_THEIR_OWN = """recurrent_gemma bitnet aria_text deepseek_v4 big_bird gpt_neo umt5 longcat_flash openai-gpt minimax
    qwen3_next""".split()


@pytest.mark.parametrize("name", OF_THEIR_OWN)
def test_families_of_their_own_ways_are_cut_right_or_refused(name, tmp_path):
    for what in ("heads", "ffn", "layers"): check_cut(make(name), what, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERY)
def test_every_family_is_cut_right_or_refused(name, tmp_path):
    try:
        said(model := make(name))
        # (what transformers makes anew each time, Marian's positions and a row for the padding, as it makes it)
        model.save_pretrained(tmp_path / "whole")
        model = type(model).from_pretrained(tmp_path / "whole").eval()
    except Exception as e: pytest.skip(f"{name} cannot be made at these sizes: {e}")
    for what in ("heads", "ffn", "layers"): check_cut(model, what, tmp_path)


def test_what_a_configuration_cannot_say_of_layers_is_refused():
    "A first layer without experts, inputs for each layer in one table, an own first norm, windows of each layer"
    for name, why in (("afmoe", "makes a AfmoeMLP at model.layers.0.mlp"), ("gemma3n_text", "in one table"),
                      ("rwkv", "makes a"), ("led", "makes no model")):
        model = make(name)
        before = everything_of(model)[1:]
        with pytest.raises(ValueError, match=why): slice_model(model, half(structure(model), "layers"))
        after = everything_of(model)[1:]
        assert after[1] == before[1] and all(v.equal(after[0][k]) for k, v in before[0].items())


def test_heads_that_have_more_than_queries_keys_and_values_are_left_alone():
    for name in ("qwen3_next", "laguna", "prophetnet"): assert not structure(make(name)).attention()
    # BigBird makes itself other attentions for a short text, with all heads
    model = tf.BigBirdForMaskedLM(tf.BigBirdConfig(**TINY, block_size=4, num_random_blocks=1)).eval()
    keep = {a.out: [0, 1] for a in structure(model).attention().values()}
    with pytest.raises(ValueError, match="call bert.set_attention_type"): slice_model(model, keep)
    model.bert.set_attention_type("original_full")
    slice_model(model, keep)


def test_one_epsilon_for_heads_and_channels():
    "All that from_pretrained makes otherwise of cut channels is the epsilon of the norms of heads"
    model = make("apertus")
    slice_model(model, {"hidden": range(16)})
    with torch.device("meta"): made = dict(type(model)._from_config(model.config).named_modules())
    eps = {n: (m.variance_epsilon, made[n].variance_epsilon) for n, m in model.named_modules()
           if hasattr(m, "variance_epsilon")}
    other = {n for n, (mine, its) in eps.items() if mine != its}
    assert other and all(n.endswith(("q_norm", "k_norm")) for n in other)


def test_kinds_of_layers_that_a_rule_makes_are_not_mixed_up():
    "Jamba says by a period which layers attend; of BitNet's neurons a norm is taken, and fewer have another"
    jamba = make("jamba")
    with pytest.raises(ValueError, match="drop whole periods"): slice_model(jamba, {"model.layers": [1]})
    assert jamba.config.num_hidden_layers == 2 and not structure(make("bitnet")).ffn()

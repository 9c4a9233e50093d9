"""What `look`, `hidden_states` and `replace_at` show is what hooks written by hand and eager attention show, on every
family, packed, tuned, sharded and streamed"""
import copy
import importlib

import pytest
import torch
import transformers as tf

from bmlab.cook.export_gguf import export_gguf
from bmlab.delta import Lora
from bmlab.infer import ablate, hidden_states, look, plan_inference, replace_at, wrap
from bmlab.infer.text import decode_tokens
from bmlab.kernels.ggml import GGMLLinear
from bmlab.kernels.layers import pack_linears
from bmlab.models.load import load
from tests.helpers import packed_models, small, toys

KV = dict(num_key_value_heads=2)
SIX = {
    "llama": small.llama,
    "qwen3": lambda: tf.Qwen3ForCausalLM(tf.Qwen3Config(**small.TINY | KV, head_dim=8)),
    "gemma3": lambda: tf.Gemma3ForCausalLM(tf.Gemma3TextConfig(
        **small.TINY | KV | dict(num_hidden_layers=3), head_dim=8, sliding_window=4,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"], query_pre_attn_scalar=8)),
    "gpt2": small.gpt2, "bert": small.bert, "t5": small.t5,
}
IDS = torch.tensor([[5, 90, 17, 3, 44, 8, 61, 17]])
BLOCK = {"bert": "bert.encoder.layer", "t5": "decoder.block", "gpt2": "transformer.h"}
NORM_AND_HEAD = {  # what stands behind the last block, from the forward of transformers' modeling_*.py
    "gpt2": lambda m, h: m.lm_head(m.transformer.ln_f(h)),
    "bert": lambda m, h: m.cls(h),
    "t5": lambda m, h: m.lm_head(m.decoder.final_layer_norm(h) * m.config.d_model ** -0.5),
}


def made(name, std=0.3):
    "A small model whose weights are large enough for each part to matter"
    torch.manual_seed(0)
    model = SIX[name]().eval()
    with torch.no_grad():
        for p in model.parameters(): p.add_(std * torch.randn_like(p) / max(1, p.shape[-1]) ** 0.5)
    return model


def batch(model, ids=IDS):
    return {"input_ids": ids} | ({"decoder_input_ids": ids[:, :6]} if model.config.is_encoder_decoder else {})


def by_hand(model, given, modules):
    "Outputs of modules, by plain hooks"
    out, handles = {}, []
    for n in modules:
        def keep(m, a, o, n=n): out[n] = (o if isinstance(o, torch.Tensor) else o[0]).detach()
        handles.append(model.get_submodule(n).register_forward_hook(keep))
    with torch.no_grad(): logits = model(**given).logits
    for h in handles: h.remove()
    return out, logits


@pytest.fixture(scope="module", params=SIX)
def case(request):
    model = made(request.param)
    given = batch(model)
    return request.param, model, given, look(model, given)


def test_hidden_states_and_losses(case):
    name, model, given, seen = case
    n = model.config.num_hidden_layers
    blocks = [f"{BLOCK.get(name, 'model.layers')}.{i}" for i in range(n)]
    want, logits = by_hand(model, given, blocks)
    got = hidden_states(model, given)
    assert list(got) == blocks == seen.blocks
    for i, b in enumerate(blocks):
        torch.testing.assert_close(got[b], want[b], atol=0, rtol=0)
        torch.testing.assert_close(seen.residual[i + 1:i + 2], want[b], atol=0, rtol=0)
    own, shift = logits[0].log_softmax(-1), int(name != "bert")
    ids = given.get("decoder_input_ids", IDS)[0]
    want = -own[:len(ids) - shift].gather(1, ids[shift:, None])[:, 0]
    torch.testing.assert_close(seen.losses[shift:], want)
    assert seen.guesses[shift:].tolist() == own.argmax(-1)[:len(ids) - shift].tolist()


def test_logit_lens(case):
    name, model, given, seen = case
    tail = NORM_AND_HEAD.get(name, lambda m, h: m.lm_head(m.model.norm(h)))
    with torch.no_grad():
        for layer in range(seen.layers + 1):
            want = tail(model, seen.residual[layer:layer + 1])[0]
            torch.testing.assert_close(seen.logits(seen.residual[layer]), want)
        assert torch.equal(seen.logits(seen.residual[-1]), model(**given).logits[0])
    lens = seen.lens([0, -1])
    torch.testing.assert_close(lens.losses[1], seen.losses, equal_nan=True, atol=1e-5, rtol=1e-5)


def test_attention_is_the_eager_one(case):
    name, model, given, seen = case
    slow = copy.deepcopy(model)
    slow.set_attn_implementation("eager")
    with torch.no_grad(): out = slow(**given, output_attentions=True)
    kinds = {"self": out.attentions} if name != "t5" else {
        "self": out.decoder_attentions, "cross": out.cross_attentions, "encoder": out.encoder_attentions}
    for of, want in kinds.items():
        want = torch.cat(want)
        torch.testing.assert_close(seen.attention(of=of), want, atol=2e-6, rtol=1e-5)
        torch.testing.assert_close(seen.attention(-1, [3, 0], of=of), want[-1:, [3, 0]], atol=2e-6, rtol=1e-5)
        torch.testing.assert_close(look(slow, given).attention(0, 2, of=of), want[:1, 2:3], atol=2e-6, rtol=1e-5)


def test_heads_neurons_and_directions_add_up(case):
    name, model, given, seen = case
    own = {"gpt2": "attn.c_proj", "bert": "attention.output.dense", "t5": "layer.0.SelfAttention.o"}
    down = {"gpt2": "mlp.c_proj", "bert": "output.dense", "t5": "layer.2.DenseReluDense.wo"}
    o, w = (f"{seen.blocks[1]}.{d.get(name, e)}" for d, e in ((own, "self_attn.o_proj"), (down, "mlp.down_proj")))
    want, _ = by_hand(model, given, [o, w])
    bias = lambda n: getattr(model.get_submodule(n), "bias", None)
    plain = lambda n: want[n][0] - (0 if bias(n) is None else bias(n).detach())
    assert len(seen.heads(1)) == 4
    torch.testing.assert_close(seen.heads(1).sum(0), plain(o), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(seen.neurons(1) @ seen.directions(1), plain(w), atol=1e-5, rtol=1e-4)
    one = seen.heads(1)[2].norm(dim=-1)
    with ablate(model, f"{o}:heads[2]"): without, _ = by_hand(model, given, [o])
    torch.testing.assert_close((want[o] - without[o])[0].norm(dim=-1), one, atol=1e-5, rtol=1e-4)


def test_attribution_sums_up_to_the_logit(case):
    name, model, given, seen = case
    if name == "bert":
        with pytest.raises(NotImplementedError, match="not simply added"): seen.attribution(7)
        return
    with torch.no_grad(): logits = model(**given).logits[0, -1]
    whole, lead = seen.attribution(7), seen.attribution(7, against=30)
    torch.testing.assert_close(whole.logit.sum(), logits[7].item(), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(lead.logit.sum(), (logits[7] - logits[30]).item(), atol=1e-4, rtol=1e-4)
    with ablate(model, seen.blocks[1]), pytest.raises(NotImplementedError, match="ask outside"): seen.attribution(7)
    assert (whole.part == "head").sum() == 4 * seen.layers and (whole.part == "network").sum() == seen.layers
    # what the embeddings wrote, by hand: through the final norm with its scale held, times the word's row of the head
    state, names = {}, {"gpt2": "transformer.ln_f", "t5": "decoder.final_layer_norm"}
    norm = model.get_submodule(names.get(name, "model.norm"))
    handle = norm.register_forward_hook(lambda m, a, o: state.update(x=a[0][0, -1], y=o[0, -1]))
    with torch.no_grad(): model(**given)
    handle.remove()
    x, scale = seen.residual[0, -1], model.config.d_model ** -0.5 if name == "t5" else 1.0
    row = x * state["y"] / state["x"]
    if name == "gpt2": row = (x - x.mean()) / (state["x"].var(correction=0) + 1e-5).sqrt() * norm.weight
    with torch.no_grad(): want = model.get_output_embeddings().weight[7] @ row * scale
    assert whole[whole.part == "embeddings"].logit.item() == pytest.approx(want.item(), abs=1e-4)


OTHERS = "gemma2 qwen3_moe cohere olmo2 nemotron neox falcon opt phi3"

@pytest.mark.parametrize("name", OTHERS.split())
def test_other_decoders(name):
    "The lens ends on the model's own logits, attention is the eager one, and the parts of a logit sum up to it"
    model = toys.build(name)
    seen = look(model, toys.IDS[:1])
    with torch.no_grad(): logits = model(toys.IDS[:1]).logits[0]
    assert torch.equal(seen.logits(seen.residual[-1]), logits)
    if name != "falcon": model.set_attn_implementation("eager")
    with torch.no_grad(): want = torch.cat(model(toys.IDS[:1], output_attentions=True).attentions)
    torch.testing.assert_close(seen.attention(), want, atol=1e-6, rtol=1e-5)
    if name not in ("gemma2", "cohere"):                                     # (their logits are capped or scaled later)
        torch.testing.assert_close(seen.attribution(5).logit.sum(), logits[-1, 5].item(), atol=1e-4, rtol=1e-4)
    assert len(seen.attribution(5, against=6)) > 10


def tiny(layers=4):
    torch.manual_seed(0)
    model = small.llama(hidden_size=64, num_hidden_layers=layers).eval()
    with torch.no_grad():
        for p in model.parameters(): p.mul_(4 if p.ndim > 1 else 1)
    return model


def everything(seen):
    "All that a look can say, as tensors"
    lens = seen.lens([0, 2, -1], k=3)
    shares = seen.attribution(7).sort_values(["part", "layer", "head"]).logit
    return [seen.losses, seen.residual, lens.losses, lens.divergence, seen.attention([1, 3], [0, 2]), seen.neurons(2),
            seen.heads(3), seen.directions(1), torch.tensor(shares.to_numpy())]


def test_a_lens_weighs_few_tokens_at_once(monkeypatch):
    "A memory limit leaves room for few logits: in slices it says the same"
    seen = look(tiny(), IDS)
    want = seen.lens(k=3)
    monkeypatch.setattr(importlib.import_module("bmlab.infer.look"), "_ROWS", 3)
    got = seen.lens(k=3)
    for name in ("ids", "chances", "losses", "entropy", "divergence"):
        torch.testing.assert_close(getattr(got, name), getattr(want, name), equal_nan=True)


GPU = pytest.param(
    "cuda", marks=[pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")])


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("bits", [8, 4])
def test_streamed_is_resident(bits, device):
    "Packed, under a memory limit: hooks see the blocks as they visit their slots"
    packed, ids = copy.deepcopy(tiny()), IDS.to(device)
    pack_linears(packed, bits=bits, group_size=32)
    packed.to(device)
    least = plan_inference(copy.deepcopy(tiny()), bits=bits, max_ctx=32, group_size=32).min_bytes
    with wrap(tiny(), memory_limit=least, bits=bits, max_ctx=32, group_size=32, device=device) as e:
        assert e.plan.streamed
        got, want = everything(look(e, IDS)), everything(look(packed, IDS))
        for a, b in zip(got, want):
            torch.testing.assert_close(a.cpu(), b.cpu(), atol=2e-4, rtol=1e-3, equal_nan=True)
        with ablate(e, "layers[1].mlp"), ablate(packed, "layers[1].mlp"):
            a, b = e(input_ids=ids).logits, packed(ids).logits
        torch.testing.assert_close(a, b, atol=1e-3, rtol=1e-3)
        assert not torch.allclose(a, e(input_ids=ids).logits, atol=1e-2)
        assert e.decoder is not None and not e.busy


def agrees(model, ids):
    "Is what a look says of a packed LLaMA what its own modules give, and does a logit's sum come out?"
    seen, last = look(model, ids), f"model.layers.{model.config.num_hidden_layers - 1}"
    want, logits = by_hand(model, {"input_ids": ids}, [last, f"{last}.self_attn.o_proj", f"{last}.mlp.down_proj"])
    torch.testing.assert_close(seen.residual[-1:], want[last], atol=0, rtol=0)
    near = dict(atol=2e-2 * float(want[last].abs().max()), rtol=1e-2)
    torch.testing.assert_close(seen.heads(-1).sum(0), want[f"{last}.self_attn.o_proj"][0], **near)
    torch.testing.assert_close(seen.neurons(-1) @ seen.directions(-1), want[f"{last}.mlp.down_proj"][0], **near)
    assert seen.attribution(7).logit.sum() == pytest.approx(logits[0, -1, 7].item(), rel=0.05, abs=0.05)
    assert torch.equal(seen.logits(seen.residual[-1]), logits[0])
    with ablate(model, f"{last}.mlp"): assert not torch.equal(model(ids).logits, logits)


@pytest.mark.parametrize("case", ["gptq", "gptq-order", "gptq-8", "gptq-8-groups", "2:4"])
def test_cooked_and_packed_layers(case): agrees(packed_models.packed_model(case), packed_models.IDS)


def test_a_gguf_file(tmp_path):
    wide = small.llama(hidden_size=256, intermediate_size=256, num_hidden_layers=1).eval()      # (blocks of 256)
    model, _ = load(export_gguf(wide, tmp_path / "m.gguf", "Q4_K"), device="cpu", dtype="float32")
    assert any(isinstance(m, GGMLLinear) for m in model.modules())
    agrees(model, IDS)


def grown(model, ids, n, values, positions):
    "Greedy tokens without a cache"
    x = list(ids)
    for _ in range(n):
        here = None if positions is None else [p for p in positions if p < len(x)]
        with replace_at(model, values, here), torch.no_grad():
            x.append(model(torch.tensor([x]), use_cache=False).logits[0, -1].argmax().item())
    return x[len(ids):]


@pytest.mark.parametrize("values, positions", [
    ({"layers[1].mlp": 0.0}, None),
    ({"layers[2]": "states"}, [2, 3]),
    ({"layers[1]": torch.linspace(-9, 9, 64)}, [1, 9]),
    ({"layers[1].self_attn:heads[1]": lambda z: z * 3}, None),
])
def test_generation_with_a_cache_sees_what_is_replaced(values, positions):
    "An engine's decoder and transformers' generate say what the model without a cache says"
    model, ids = tiny(), (torch.arange(6) * 7 + 5).tolist()
    if "states" in values.values(): values = {"layers[2]": hidden_states(model, torch.tensor(ids) + 1)}
    want, plain = (grown(model, ids, 6, v, p) for v, p in ((values, positions), ({"layers[0]": lambda h: h}, None)))
    assert want != plain
    with replace_at(model, values, positions):
        out = model.generate(torch.tensor([ids]), max_new_tokens=6, do_sample=False, pad_token_id=0, eos_token_id=None)
    assert out[0, 6:].tolist() == want
    with wrap(copy.deepcopy(model), max_ctx=32, device="cpu") as e:
        say = lambda: [row[0] for row in decode_tokens(e.decoder, [ids], max_new_tokens=6)]
        with replace_at(e, values, positions): assert say() == want
        assert say() == plain


def test_patching_between_texts_of_other_lengths():
    model, long, short = tiny(), IDS, IDS[:, 2:7]
    states = hidden_states(model, long)
    with replace_at(model, {"layers[1]": states}, positions={4: 6, 1: 3}): got = hidden_states(model, short)
    assert torch.equal(got["layers[1]"][0, [4, 1]], states["layers[1]"][0, [6, 3]])
    heads = hidden_states(model, long, "layers[2].self_attn:heads")
    with replace_at(model, {"layers[2].self_attn:heads[1,3]": heads}, positions=[0, -1]):
        got = hidden_states(model, short, "layers[2].self_attn:heads")
    a, b = (s["self_attn:heads"][0, [0, -1]][:, [1, 3]] for s in (got, heads))
    assert torch.equal(a, b)
    with pytest.raises(ValueError, match="positions={here: there}"):
        with replace_at(model, {"layers[1]": states}): model(short)
    with pytest.raises(IndexError, match="0 … 7"), replace_at(model, {"layers[1]": states}, {0: 8}): model(short)


def test_gradients_pass_through_what_is_put():
    model, x = tiny(2), torch.zeros(1, 8, 64, requires_grad=True)
    with replace_at(model, {"layers[0].mlp": x}): model(IDS).logits[0, -1, 3].backward()
    assert x.grad.abs().sum() > 0


def test_compiled_and_captured_code_sees_hooks():
    model = tiny(2)
    whole, parts = torch.compile(model, backend="eager"), tiny(2)
    for block in parts.model.layers: block.compile(backend="eager")
    with torch.no_grad():
        plain = model(IDS).logits
        assert torch.equal(whole(IDS).logits, plain) and torch.equal(parts(IDS).logits, plain)
        with ablate(model, "layers[0].mlp"): want = model(IDS).logits
        for m in (whole, parts):
            with ablate(m, "layers[0].mlp"): assert torch.equal(m(IDS).logits, want)
            assert torch.equal(m(IDS).logits, plain) and not torch.equal(want, plain)
            assert torch.equal(hidden_states(m, IDS)["layers[1]"], hidden_states(model, IDS)["layers[1]"])


def test_deltas_off_and_training_mode_kept():
    model = tiny()
    bare = hidden_states(model, IDS)
    model.train()
    delta = toys.moved(Lora(model, 4, modules="layers[2].self_attn.q_proj"))
    seen = look(model, IDS)
    assert model.training and model.model.layers[1].training
    without = seen.without(delta.name)
    torch.testing.assert_close(without.residual[1:], torch.cat(list(bare.values())))
    moved = seen.change(without).change
    assert (moved[:3] == 0).all() and (moved[3:] > 0).all()
    torch.testing.assert_close(without.lens([-1]).losses[0], without.losses, equal_nan=True, atol=1e-5, rtol=1e-5)
    assert not torch.equal(seen.attention(2, 0), without.attention(2, 0))


def on_two(zero):
    from bmlab.train.sharding import shard
    model = tiny()
    if zero: shard(model, dtype=None)
    seen = everything(look(model, IDS))
    with ablate(model, "layers[1].mlp:neurons[:20]"): ablated = hidden_states(model, IDS, "layers[3]")["layers[3]"]
    return [*seen, ablated]


@pytest.mark.long
def test_sharded_is_whole():
    from bmlab.train.processes import run_ranks
    for got in run_ranks(on_two, True, timeout_s=200):
        for a, b in zip(got, on_two(False)): torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4, equal_nan=True)


def test_attention_maps_of_a_fused_model_with_eager_attention():
    m = tf.Gemma2ForCausalLM._from_config(tf.Gemma2Config(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, vocab_size=99, sliding_window=16), attn_implementation="eager").eval()
    ids = torch.tensor([[5, 6, 7]])
    want = m(ids, output_attentions=True).attentions[1][:, 0]
    got = look(wrap(m, device="cpu", max_ctx=64), ids).attention(1, [0])
    assert torch.allclose(got.squeeze(1), want, atol=1e-5)


def test_positions_of_a_text_whose_states_are_no_keys():
    "A place is counted from the beginning of the text, also by a model of states"
    torch.manual_seed(0)
    m = tf.MambaForCausalLM(tf.MambaConfig(hidden_size=32, num_hidden_layers=2, vocab_size=99, state_size=8)).eval()
    e, text = wrap(m, device="cpu", max_ctx=64), [5, 6, 7, 8, 9]
    with replace_at(e, {"backbone.layers.1": 0.0}, positions=[2]):
        made = [int(t) for step in decode_tokens(e.decoder, [text], None, 6) for t in step]
        want = list(text)
        for _ in range(6): want.append(int(e(torch.tensor([want])).logits[0, -1].argmax()))
    assert made == want[5:]


def test_a_place_is_replaced_beside_transformers_own_cache_of_states():
    torch.manual_seed(0)
    m = tf.MambaForCausalLM(tf.MambaConfig(hidden_size=32, num_hidden_layers=2, vocab_size=99, state_size=8)).eval()
    ids = torch.tensor([[5, 6, 7]])
    out = m(ids, use_cache=True)
    with replace_at(m, {"backbone.layers.1": 0.0}): m(ids[:, :1], cache_params=out.cache_params, use_cache=True)

"""What a delta promises holds in every family of transformers, or is refused with the reason: a prompt stands in front
once, each parameter has a gradient and an effect, a fresh delta changes nothing, and taken off it leaves nothing."""
import re

import pytest
import torch

from bmlab.core import passed_over, roles
from bmlab.delta.adapter import Adapter, Compacter, LowRankAdapter, ParallelAdapter
from bmlab.delta.lora import Lora
from bmlab.delta.prefix import Prefix
from bmlab.delta.soft import SoftPrompt
from bmlab.delta.vectors import IA3, BitFit, LayerNormTuning
from every_family import FAMILIES, make

pytestmark = pytest.mark.filterwarnings("ignore")
IDS, FRONT = torch.arange(10, 34).view(2, 12), torch.tensor([[4, 5, 6]] * 2)
# states instead of keys, an input for each layer, latents, a mixer under another name, a mixture of kinds
NASTY = ["mamba", "gemma3n_text", "deepseek_v3", "nemotron_h", "qwen3_5", "recurrent_gemma"]
METHODS = {
    "lora": lambda m: Lora(m, r=2),
    "adapter": lambda m: Adapter(m, bottleneck=4),
    "parallel": lambda m: ParallelAdapter(m, bottleneck=4),
    "low rank": lambda m: LowRankAdapter(m, bottleneck=4),
    "compacter": lambda m: Compacter(m, n=2, bottleneck=4),
    "norms": LayerNormTuning,
    "bitfit": BitFit,
    "ia3": IA3,
}
# no picture and no protein is shown, a head on words reads no pooler, DeepSeek-V4 compresses longer texts than these,
# and Longformer's global attention begins where a mask says so
UNSEEN = ("vision", "visual", "audio", "image", "patch", "multi_modal", "connector", "pooler", "compressor", "protein",
          "_global", ".adapter.")
REFUSALS = (LookupError, TypeError, ValueError, NotImplementedError)


def arguments(model, ids=IDS):
    more = dict(decoder_input_ids=ids[:, :6]) if model.config.is_encoder_decoder else {}
    return dict(input_ids=ids, **more)


def logits(model, ids=IDS, **kw):
    with torch.no_grad(): return model(**arguments(model, ids), **kw).logits


def words(model, ids, n=4):
    model.generation_config.eos_token_id = None
    how = dict(max_new_tokens=n, do_sample=False, pad_token_id=0, attention_mask=torch.ones_like(ids))
    out = model.generate(input_ids=ids, output_logits=True, return_dict_in_generate=True, **how)
    return out.sequences[:, -n:], torch.stack(out.logits, 1)


def made(name):
    try:
        model = make(name)
        logits(model)
    except Exception as e: pytest.skip(f"{name} cannot be made at these sizes: {e}")
    return model


def near(a, b): torch.testing.assert_close(a, b, rtol=0, atol=2e-4 * max(1, b.abs().max().item()))


def check_prompt(name):
    "The model with a prompt of words is the model with these words in front, whole and step by step"
    model = made(name)
    # the inputs of each layer are the padding token's where a prompt stands
    front = torch.zeros_like(FRONT) if "gemma3n" in name or "gemma4" in name else FRONT
    both = model.config.is_encoder_decoder
    longer = torch.cat([front, IDS], 1)
    with torch.no_grad():
        kw = dict(decoder_input_ids=IDS[:, :6]) if both else {}
        want = model(input_ids=longer, **kw).logits[:, 0 if both else 3:]
    try: spoken = words(model, longer)
    except Exception: spoken = None                                         # it does not generate from words alone
    try: SoftPrompt(model, init="text", text=front[0].tolist())
    except TypeError as e:
        assert "Lora" in str(e)
        return
    with torch.no_grad(): near(model(input_ids=IDS, **kw).logits, want)
    if spoken is None: return
    try: said = words(model, IDS)
    except NotImplementedError as e:
        assert "Lora" in str(e)
        return
    assert torch.equal(said[0], spoken[0])
    near(said[1], spoken[1])


def seen_sites(model, d):
    "{module: site} of those that a text comes by: a decoder on its own has no encoder to attend to"
    alone = () if model.config.is_encoder_decoder else ("encoder_attn", "crossattention", "cross_attn")
    return {n: s for n, s in d.sites.items() if not any(x in n for x in UNSEEN + alone) and list(s.parameters())}


def without_gradient(sites):
    return [n for n, s in sites.items() if any(p.grad is None or not p.grad.abs().max() > 0 for p in s.parameters())]


def check_off(model, d, plain, state):
    "Taken off, it leaves the model bit for bit"
    d.detach()
    assert torch.equal(logits(model), plain)
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())


def held(model): return {k: v.clone() for k, v in model.state_dict().items()}


def check_places(name, method):
    "A fresh delta changes nothing; moved, each of its parameters has a gradient, and each site an effect"
    model = made(name)
    plain, state = logits(model), held(model)
    try: d = METHODS[method](model)
    except REFUSALS as e:
        assert "modules=" in str(e) or "choose" in str(e), e
        return
    near(logits(model), plain)
    g = torch.Generator().manual_seed(1)
    for p in d.parameters(): p.data += 0.3 * torch.randn(p.shape, generator=g)
    # recurrent states are written in place where there is a cache
    out = model(**arguments(model), use_cache=False).logits
    out.float().square().mean().backward()
    seen = seen_sites(model, d)
    assert seen
    idle = without_gradient(seen)
    for n, s in seen.items():
        s.enabled = False
        with torch.no_grad(): without = model(**arguments(model), use_cache=False).logits
        s.enabled = True
        if torch.equal(without, out): idle.append(n)
    assert not idle
    check_off(model, d, plain, state)


# what carries states from word to word beside keys and values, or runs its layers in turns
STATES = re.compile("Mamba|Mixer|Conv|Delta|Recurrent|Lightning|HrmText")


def check_prefix(name):
    "Each layer's keys and values have an effect; those of words in front are these words, where all is attention"
    model = made(name)
    plain, state = logits(model), held(model)
    words_alone = not any(STATES.search(type(m).__name__) for m in model.modules())
    torch.manual_seed(0)
    try: d = Prefix(model, length=3, std=0.5)
    except REFUSALS as e:
        assert "try SoftPrompt" in str(e) or "name heads=" in str(e), e
        return
    out = model(**arguments(model), use_cache=False).logits
    assert not torch.equal(out, plain)
    near(logits(model), out.detach())
    out.float().square().mean().backward()
    seen = seen_sites(model, d)
    idle = without_gradient(seen)
    for n, s in seen.items():
        s.key.data += 1                                                        # (T5's layers have a prefix all or none)
        with torch.no_grad(): moved = model(**arguments(model), use_cache=False).logits
        s.key.data -= 1
        if torch.equal(moved, out): idle.append(n)
    assert seen and not idle
    check_off(model, d, plain, state)
    if model.config.is_encoder_decoder or not words_alone: return
    front = torch.zeros_like(FRONT) if "gemma3n" in name or "gemma4" in name else FRONT
    short = IDS[:, :8]                                                         # a window of 16 words holds them all
    longer = torch.cat([front, short], 1)
    want, spoken = logits(model, longer)[:, 3:], words(model, longer)
    try: Prefix(model, init="text", text=front[0].tolist())
    except ValueError as e:
        assert "use init='normal'" in str(e)
        return
    near(logits(model, short), want)
    said = words(model, short)
    assert torch.equal(said[0], spoken[0])
    near(said[1], spoken[1])


@pytest.mark.parametrize("name", NASTY)
def test_a_prompt_stands_in_front_once(name): check_prompt(name)


@pytest.mark.parametrize("name", NASTY)
def test_each_place_has_a_gradient_and_an_effect(name):
    for method in METHODS: check_places(name, method)


@pytest.mark.parametrize("name", [*NASTY, "hrm_text", "minimax", "inkling_text", "cohere2"])
def test_each_layer_sees_a_prefix(name): check_prefix(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_with_a_prefix(name): check_prefix(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_with_a_prompt(name): check_prompt(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_in_each_place(name):
    for method in METHODS: check_places(name, method)


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen3_vl"])
def test_places_in_a_picture_are_counted_behind_the_prompt(name):
    "Rows and columns of a picture, which the model counts by the ids, whole and with a cache"
    model = made(name)
    ids = torch.tensor([[10, 11, 88, 90, 90, 90, 90, 87, 12, 13]] * 2)
    seen = dict(pixel_values=torch.randn(32, 96, generator=torch.Generator().manual_seed(0)),
                image_grid_thw=torch.tensor([[1, 4, 4]] * 2))
    kinds = (ids == 90).long()
    def steps(x, k):
        with torch.no_grad():
            out = model(input_ids=x, mm_token_type_ids=k, use_cache=True, **seen)
            later = model(input_ids=x[:, -1:], past_key_values=out.past_key_values, use_cache=True)
        return torch.cat([out.logits[:, -len(ids[0]):], later.logits], 1)
    want = steps(torch.cat([FRONT, ids], 1), torch.cat([torch.zeros_like(FRONT), kinds], 1))
    SoftPrompt(model, init="text", text=FRONT[0].tolist())
    near(steps(ids, kinds), want)


def test_what_is_passed_over_is_refused_by_name():
    "Mamba's convolution never runs, its output matrix not in training on a GPU, an indexer gets no gradient"
    model = made("mamba")
    for last, why in (("conv1d", "never runs it"), ("dt_proj", "never runs it"), ("out_proj", "to a kernel")):
        with pytest.raises(TypeError, match=why): BitFit(model, modules=f"layers.0.mixer.{last}")
    assert not any("_deltas" in n for n, _ in model.named_modules())
    second = made("mamba2")
    for last in ("norm", "out_proj"):
        with pytest.raises(TypeError, match="to a kernel"): BitFit(second, modules=f"layers.0.mixer.{last}")
    # (a gate is multiplied with what the norm gives, and a head may be called after the model's norms)
    with pytest.raises(TypeError, match="multiplies by a gate"): LayerNormTuning(made("kimi_linear"), modules="o_norm")
    assert roles(made("roberta-prelayernorm")).get("lm_head") != "norm"
    v32 = made("deepseek_v32")
    with pytest.raises(TypeError, match="only chooses what is attended to"): Lora(v32, r=2, modules="indexer.wk")
    assert not any("indexer" in n for n in roles(v32)) and any("indexer" in n for n in passed_over(v32))

"""A mixture whose experts stream says under every limit the bits that it says whole, keeps the limit, and is saved"""
import copy

import pytest
import torch
import transformers as tf

from bmlab.cook.report import load_cooked, save_cooked
from bmlab.infer.engine import wrap
from bmlab.infer.experts import ExpertCache, lru_hits
from bmlab.kernels.experts import cacheable
from bmlab.kernels.layers import pack_linears

TINY = dict(vocab_size=96, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=4, num_experts_per_tok=2, bos_token_id=1, eos_token_id=2, pad_token_id=0)
LATENT = dict(q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8,
              moe_intermediate_size=32, n_shared_experts=1, n_routed_experts=8)
MODELS = {
    "qwen3": lambda: tf.Qwen3MoeForCausalLM(
        tf.Qwen3MoeConfig(**TINY, head_dim=16, moe_intermediate_size=32, num_experts=8)),
    "mixtral": lambda: tf.MixtralForCausalLM(tf.MixtralConfig(**TINY, num_local_experts=8)),
    "oss": lambda: tf.GptOssForCausalLM(tf.GptOssConfig(**TINY, head_dim=16, num_local_experts=8)),
    # the first block has no experts
    "deepseek": lambda: tf.DeepseekV3ForCausalLM(
        tf.DeepseekV3Config(**TINY, **LATENT, first_k_dense_replace=1, n_group=2, topk_group=1)),
}


def made(name, bits=None):
    torch.manual_seed(0)
    model = MODELS[name]().eval().requires_grad_(False)
    for p in model.parameters(): p.data = torch.randn_like(p) * (0.2 if p.ndim > 1 else 1)
    return pack_linears(model, bits) if bits else model


def walk(engine, rows=2):
    "Logits of a prompt of two rows, and of steps"
    d = engine.decoder
    assert d.mode == "static", d.why_generate
    out = [d.prefill([[5, 9, 33, 7, 61], [8, 4]][:rows])]
    out += [d.step([[t], [t + 1]][:rows]) for t in (4, 40, 7)]
    return torch.cat([o.reshape(rows, -1) for o in out], 1)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("bits", [8, 4])
def test_under_a_limit_it_says_what_it_says_whole(name, bits):
    asked = dict(max_batch=2, max_ctx=32, device="cpu")
    with wrap(made(name), bits=bits, **asked) as whole: want, plan = walk(whole), whole.plan
    for slots in {8: (2,), 4: (5,)}[bits] if name != "qwen3" else (2, 5):
        limit = plan.peak_bytes - plan.embedding_bytes - int(plan.blocks.experts.sum()) + plan._records(slots)
        with wrap(made(name), bits=bits, memory_limit=limit, **asked) as e:
            cache = e.expert_cache
            assert e.plan.expert_slots == slots and not e.plan.streamed and e.plan.peak_bytes <= limit
            assert torch.equal(walk(e), want)
            assert cache.stats["misses"] > 0 and cache.device_bytes == e.plan.expert_slots_bytes
            # (the plan counts the embedding that waits beside them)
            assert cache.host_bytes == e.plan.host_bytes - e.plan.embedding_bytes


@torch.no_grad()
def test_a_closed_engine_leaves_the_model_as_it_was(tmp_path):
    model, ids = made("qwen3", 8), torch.randint(3, 90, (1, 9))
    want, before = model(ids).logits, {n: t.clone() for n, t in model.state_dict().items()}
    cache = ExpertCache(model, 3)
    other = copy.deepcopy(model)
    assert torch.equal(other(ids).logits, want) and torch.equal(model(ids).logits, want)
    # saved while it streams
    assert torch.equal(load_cooked(save_cooked(model, tmp_path))(ids).logits, want)
    cache.close()
    assert all(torch.equal(t, before[n]) and t.is_contiguous() for n, t in model.state_dict().items())
    assert torch.equal(model(ids).logits, want) and cacheable(model).keys() == cacheable(other).keys()


def test_measured_hits_are_those_of_a_walk_through_the_trace():
    model, ids = made("mixtral"), torch.randint(3, 90, (60, 1, 1), generator=torch.Generator().manual_seed(0))
    for slots in (2, 4, 7):
        cache = ExpertCache(model, slots)
        for row in ids: model(row)
        assert cache.hit_rate == pytest.approx(lru_hits(cache.routing, 8)[slots])
        cache.close()


def test_a_limit_too_small_for_a_tokens_experts_says_what_would_work():
    with pytest.raises(ValueError, match="smallest feasible plan"):
        wrap(made("mixtral"), bits=8, max_ctx=32, device="cpu", memory_limit="150KiB")

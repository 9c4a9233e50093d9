"""A tiny random model of every family that the installed transformers can make one of: `make(name)`, of `FAMILIES`"""
import inspect

import torch
import transformers as tf
from transformers import CONFIG_MAPPING
from transformers.models.auto import modeling_auto as auto

_SIZES = {  # value: names of a configuration that get it
    32: """hidden_size d_model n_embd dim embed_dim word_embed_proj_dim projection_dim model_dim embedding_size
        lru_width moe_intermediate_size expert_ffn_hidden_size""",
    64: """intermediate_size ffn_dim d_ff n_inner encoder_ffn_dim decoder_ffn_dim dim_ff ffn_hidden_size hidden_dim
        shared_expert_intermediate_size intermediate_size_mlp max_position_embeddings n_positions max_seq_len n_ctx
        max_source_positions max_target_positions""",
    4: """num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads attention_heads
        num_encoder_attention_heads num_decoder_attention_heads num_experts num_local_experts n_routed_experts
        qk_rope_head_dim qk_nope_head_dim index_n_heads index_topk linear_num_value_heads patch_size""",
    2: """num_key_value_heads num_kv_heads num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers
        num_decoder_layers num_encoder_layers depth num_experts_per_tok top_k_experts linear_num_key_heads""",
    8: """head_dim d_kv attention_head_size dim_head qk_head_dim global_head_dim linear_key_head_dim
        linear_value_head_dim index_head_dim v_head_dim rotary_dim mamba_head_dim""",
    96: "vocab_size vocab_size_per_layer_input",
    16: """q_lora_rank kv_lora_rank hidden_size_per_layer_input chunk_size mamba_chunk_size sliding_window image_size
        window_size attention_chunk_size""",
    1: "n_shared_experts num_shared_experts n_group topk_group bos_token_id",
    0: "pad_token_id num_kv_shared_layers",
}
_QUIET = """attention_dropout hidden_dropout dropout resid_pdrop embd_pdrop attn_pdrop hidden_dropout_prob
    attention_probs_dropout_prob activation_dropout dropout_rate"""
_SMALL = {name: value for value, names in _SIZES.items() for name in names.split()} | {"eos_token_id": 2}
_SMALL |= dict.fromkeys(_QUIET.split(), 0.0)
_KINDS, _MLA = ["linear_attention", "full_attention"], dict(head_dim=4, num_key_value_heads=4)
_HEADS = dict(num_key_value_heads=4)          # as many as heads, where the keys are made of latents
_AXES = dict(rope_type="default", rope_theta=10000.0)
_SIGHT = dict(depth=2, embed_dim=32, hidden_size=32, num_heads=2, mlp_ratio=2, patch_size=4, spatial_merge_size=2,
              temporal_patch_size=2, intermediate_size=64, out_hidden_size=32)
_SEEN = dict(image_token_id=90, video_token_id=89, vision_start_token_id=88, vision_end_token_id=87)
_OWN = {  # model_type: what else it needs
    "bamba": dict(mamba_n_heads=8, mamba_d_head=8, attn_layer_indices=[1]),
    "granitemoehybrid": dict(mamba_n_heads=8, mamba_d_head=8, layer_types=["mamba", "attention"]),
    "mamba2": dict(num_heads=8, head_dim=8, expand=2, n_groups=1, state_size=16),
    "jamba": dict(attn_layer_period=2, attn_layer_offset=1, mamba_dt_rank=4, mamba_d_state=8),
    "qwen3_next": dict(layer_types=_KINDS),
    "qwen3_5_text": dict(layer_types=_KINDS),
    "kimi_linear": dict(layer_types=_KINDS, num_key_value_heads=4),
    "recurrent_gemma": dict(block_types=["recurrent", "attention"], attention_window_size=16),
    "lfm2_moe": dict(layer_types=["conv", "full_attention"]),
    "deepseek_v2": _HEADS,
    "deepseek_v3": _HEADS,
    "axk1": _HEADS,
    "glm4_moe_lite": _HEADS,
    "youtu": _HEADS,
    "minicpm3": _HEADS,
    "mistral4": _HEADS,
    "deepseek_v32": _MLA,
    "glm_moe_dsa": _MLA,
    "longcat_flash": _MLA,
    "gpt_neo": dict(attention_types=[[["global", "local"], 1]]),
    "xlm": dict(emb_dim=32, pad_token_id=2),
    "xlstm": dict(hidden_size=64, embedding_dim=64, head_dim=16, qk_dim_factor=1.0),
    "qwen2_vl_text": dict(rope_parameters=_AXES | dict(mrope_section=[1, 1, 2])),
    "qwen2_5_vl_text": dict(rope_parameters=_AXES | dict(mrope_section=[1, 1, 2])),
    "qwen3_vl_text": dict(rope_parameters=_AXES | dict(mrope_section=[2, 1, 1])),
    "qwen2_vl": dict(vision_config=_SIGHT, **_SEEN),
    "qwen2_5_vl": dict(vision_config=_SIGHT | dict(fullatt_block_indexes=[0, 1], window_size=16), **_SEEN),
    "qwen3_vl": dict(vision_config=_SIGHT | dict(deepstack_visual_indexes=[0], num_position_embeddings=16), **_SEEN),
    "qwen3_5": dict(vision_config=_SIGHT | dict(num_position_embeddings=16), **_SEEN),
}
_TEXT = {"qwen3_5": "Qwen3_5TextConfig", "llama4": "Llama4TextConfig"}        # where two models share a type
LARGEST = 6_000_000                                                          # parameters


def _families():
    "{name: (model type, class, of which kind)}; a class that stands for two types once"
    tables = {
        "causal": auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        "seq2seq": auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
        "image": auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    }
    out = {}
    for kind, table in tables.items():
        for model_type, cls in table.items():
            cls = cls[0] if isinstance(cls, (tuple, list)) else cls
            if all(cls != known for _, known, _ in out.values()):
                out[model_type if model_type not in out else f"{model_type}-{kind}"] = (model_type, cls, kind)
    return out


FAMILIES = _families()


def _config(cls, whole=True, **more):
    "A small configuration of a class, with more of its own values; those inside it as dictionaries"
    names = {n for c in cls.__mro__ for n in getattr(c, "__annotations__", {})}
    names |= {n for c in cls.__mro__ if "__init__" in c.__dict__ for n in inspect.signature(c.__init__).parameters}
    given = {k: v for k, v in _SMALL.items() if k in names}
    for a, b in getattr(cls, "attribute_map", {}).items():
        if a in given and b in given: given.pop(a)
    for k, sub in getattr(cls, "sub_configs", {}).items():
        if isinstance(sub, type) and sub.__name__ != "AutoConfig": given[k] = _config(sub, whole=False)
    kind = getattr(cls, "model_type", "")
    given |= _OWN.get(kind, {}) | more
    return cls(**given) if whole else given | ({"model_type": kind} if kind else {})


def make(name, **more):
    """The model of a family, with the same weights each time; raises whatever its class raises at such sizes

    more: values of its configuration
    """
    model_type, cls, kind = FAMILIES[name]
    cls = getattr(tf, cls)
    config = cls.config_class
    if config.__dict__.get("model_type") != model_type: config = CONFIG_MAPPING.get(model_type, config)
    if kind == "causal" and model_type in _TEXT: config = getattr(tf, _TEXT[model_type])
    with torch.device("meta"): size = sum(p.numel() for p in cls(_config(config, **more)).parameters())
    if size > LARGEST: raise ValueError(f"{name}: {size:,} parameters at these sizes")
    torch.manual_seed(0)
    model = cls(_config(config, **more)).eval()
    for p in model.parameters():
        if p.is_floating_point(): p.data += 0.05 * torch.randn_like(p)
    return model

"""Tiny GGUF files of every architecture, as llama.cpp's own converter writes them, and what their models compute.

    python tools/gguf_oracles.py FOLDER_OF_LLAMA_CPP [architecture …]

writes `tests/fixtures/gguf_models.zip`: per architecture a GGUF of a few kB, and a JSON of token ids and of the logits
of the transformers model that it was made from. FOLDER_OF_LLAMA_CPP holds `conversion/` and `gguf-py/` of
ggml-org/llama.cpp; the files in the repository were made with those in llama-cpp-python 0.3.36's source archive on PyPI
(vendor/llama.cpp; sha256 of the archive 832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e).
"""
import json
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
import transformers as tf

ROOT = Path(__file__).parents[1]
WHERE = ROOT / "tests/fixtures/gguf_models.zip"
IDS = [[1, 5, 9, 33, 17, 2, 60, 41, 7, 7, 12, 30]]
TINY = dict(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)
NO_KV = {k: v for k, v in TINY.items() if k != "num_key_value_heads"}
THETA = {"rope_type": "default", "rope_theta": 5000.0}
PARTIAL = {**THETA, "partial_rotary_factor": 0.5}
YARN = {"rope_type": "yarn", "rope_theta": 5000.0, "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 5000.0,
    "original_max_position_embeddings": 16,
    "short_factor": [1.0, 1.25, 1.5, 2.0],
    "long_factor": [1.0, 2.0, 3.0, 4.0],
}
MODELS = {  # name → class, configuration
    "llama": ("LlamaForCausalLM", TINY | dict(rope_parameters=THETA)),
    "llama-tied": ("LlamaForCausalLM", TINY | dict(tie_word_embeddings=True, attention_bias=True, mlp_bias=True)),
    "llama-llama3": ("LlamaForCausalLM", TINY | dict(rope_parameters=LLAMA3)),
    "llama-linear": ("LlamaForCausalLM", TINY | dict(rope_parameters={**THETA, "rope_type": "linear", "factor": 4.0})),
    "llama-head_dim": ("LlamaForCausalLM", TINY | dict(head_dim=16)),
    "mistral": ("MistralForCausalLM", TINY | dict(sliding_window=None)),
    "mixtral": ("MixtralForCausalLM", TINY | dict(num_local_experts=4, num_experts_per_tok=2, sliding_window=None)),
    "qwen2": ("Qwen2ForCausalLM", TINY),
    "qwen2-yarn": ("Qwen2ForCausalLM", TINY | dict(rope_parameters=YARN, tie_word_embeddings=True)),
    "qwen3": ("Qwen3ForCausalLM", TINY | dict(head_dim=16)),
    "qwen2moe": (
        "Qwen2MoeForCausalLM",
        TINY | dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=24)
    ),
    "qwen3moe": (
        "Qwen3MoeForCausalLM",
        TINY | dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, head_dim=16, norm_topk_prob=True)
    ),
    "gemma": ("GemmaForCausalLM", TINY | dict(head_dim=16)),
    "gemma2": ("Gemma2ForCausalLM", TINY | dict(head_dim=16, query_pre_attn_scalar=16, sliding_window=4)),
    "gemma3": (
        "Gemma3ForCausalLM",
        TINY | dict(head_dim=16, query_pre_attn_scalar=16, sliding_window=4, num_hidden_layers=7)
    ),
    "phi2": ("PhiForCausalLM", NO_KV | dict(intermediate_size=128, rope_parameters={**PARTIAL, "rope_theta": 10000.0})),
    "phi3": ("Phi3ForCausalLM", TINY | dict(sliding_window=6, original_max_position_embeddings=64)),
    "phi3-longrope": (
        "Phi3ForCausalLM",
        TINY | dict(rope_parameters=LONG, original_max_position_embeddings=16, sliding_window=None)
    ),
    "gpt2": (
        "GPT2LMHeadModel",
        dict(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=2)
    ),
    "gptneox": (
        "GPTNeoXForCausalLM",
        NO_KV | dict(rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5})
    ),
    "bloom": (
        "BloomForCausalLM",
        dict(vocab_size=64, hidden_size=32, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=2)
    ),
    "falcon": (
        "FalconForCausalLM",
        NO_KV | dict(multi_query=True, new_decoder_architecture=False, alibi=False, bias=False, parallel_attn=True)
    ),
    "falcon-new": (
        "FalconForCausalLM",
        NO_KV | dict(num_kv_heads=2, new_decoder_architecture=True, alibi=False, bias=False, parallel_attn=True)
    ),
    "starcoder2": ("Starcoder2ForCausalLM", TINY | dict(sliding_window=None, rope_parameters=THETA)),
    "stablelm": (
        "StableLmForCausalLM", TINY | dict(use_qkv_bias=True, rope_parameters={**PARTIAL, "rope_theta": 10000.0})
    ),
    "granite": (
        "GraniteForCausalLM",
        TINY | dict(
            embedding_multiplier=6.0, attention_multiplier=0.25, residual_multiplier=0.5, logits_scaling=4.0,
            rope_parameters=THETA
        )
    ),
    "granitemoe": (
        "GraniteMoeForCausalLM",
        TINY | dict(
            embedding_multiplier=6.0, attention_multiplier=0.25, residual_multiplier=0.5, logits_scaling=4.0,
            num_local_experts=4, num_experts_per_tok=2
        )
    ),
    "olmo": ("OlmoForCausalLM", TINY | dict(clip_qkv=0.5)),
    "olmo2": ("Olmo2ForCausalLM", TINY),
    "olmo3": ("Olmo3ForCausalLM", TINY | dict(num_hidden_layers=5, sliding_window=4)),
    "exaone4": ("Exaone4ForCausalLM", TINY | dict(num_hidden_layers=5, head_dim=8, sliding_window=4)),
    "ernie4_5": ("Ernie4_5ForCausalLM", TINY | dict(head_dim=8)),
    "seed_oss": ("SeedOssForCausalLM", TINY | dict(head_dim=8)),
    "starcoder": (
        "GPTBigCodeForCausalLM",
        dict(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=64, n_inner=128, bos_token_id=1, eos_token_id=2)
    ),
    "olmoe": ("OlmoeForCausalLM", TINY | dict(num_experts=4, num_experts_per_tok=2, num_key_value_heads=4)),
    "command-r": ("CohereForCausalLM", TINY | dict(logit_scale=0.25)),
    "nemotron": ("NemotronForCausalLM", TINY | dict(rope_parameters=PARTIAL)),
    "smollm3": ("SmolLM3ForCausalLM", TINY | dict(num_hidden_layers=4, rope_parameters=THETA)),
    "arcee": ("ArceeForCausalLM", TINY),
    "gpt-oss": (
        "GptOssForCausalLM",
        TINY | dict(
            num_local_experts=4, num_experts_per_tok=2, head_dim=16, sliding_window=4,
            rope_parameters={**YARN, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
        )
    ),
    "bert": ("BertModel", NO_KV),
    "xlm-roberta": ("XLMRobertaModel", {**NO_KV, "pad_token_id": 1, "bos_token_id": 0}),
    "nomic-bert": ("NomicBertModel", NO_KV | dict(head_dim=8)),
    "t5encoder": ("T5EncoderModel", dict(vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4)),
    "t5": (
        "T5ForConditionalGeneration",
        dict(
            vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, feed_forward_proj="gated-gelu",
            decoder_start_token_id=0, tie_word_embeddings=False
        )
    ),
    "t5-tied": (
        "T5ForConditionalGeneration",
        dict(
            vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4,
            feed_forward_proj="relu", decoder_start_token_id=0
        )
    ),
    "mamba": ("MambaForCausalLM", dict(vocab_size=64, hidden_size=32, num_hidden_layers=2, state_size=8)),
}


@torch.no_grad()
def build(name):
    "The model, its weights on a coarse grid: exact in float16, and small in a zip"
    cls, config = MODELS[name]
    cls = getattr(tf, cls)
    more = dict(add_pooling_layer=False) if cls in (tf.BertModel, tf.XLMRobertaModel) else {}
    config = cls.config_class(**config)
    if name == "t5": config.tie_word_embeddings = False                # the class ties whatever its keyword says
    model = cls(config, **more).eval().float()
    g = torch.Generator().manual_seed(7)
    for n, p in model.named_parameters():
        steps = torch.randint(-2, 3, p.shape, generator=g).float()
        if "A_log" in n or n.endswith(".D"): p.copy_(steps.abs() / 4 + 0.5)
        elif p.ndim == 1 and n.endswith("weight"): p.copy_(p.round() + steps / 8)
        else: p.copy_(steps / 8)
    if name == "t5":                                                   # one table of words, in any case
        for part in (model.encoder, model.decoder): part.embed_tokens.weight.copy_(model.shared.weight)
    model.config.architectures = [type(model).__name__]
    return model


@torch.no_grad()
def outputs(model, ids):
    "Logits or last hidden states, (1, L, …)"
    more = {}
    if model.config.is_encoder_decoder: more = dict(decoder_input_ids=torch.tensor(ids)[:, :5])
    out = model(input_ids=torch.tensor(ids), **more)
    return out.logits if hasattr(out, "logits") else out.last_hidden_state


def convert(model, folder, file, ftype="MOSTLY_F16"):
    "What `convert_hf_to_gguf.py` does, without a vocabulary"
    import conversion
    import gguf
    model.save_pretrained(folder)
    (folder / "tokenizer.model").touch()                                      # gemma3 asks for it
    hparams = conversion.ModelBase.load_hparams(folder, False)
    if hparams["model_type"] == "gpt2": hparams["n_ctx"] = 64                 # as in the configurations of the hub
    if hparams["model_type"] == "gpt_neox": hparams["rotary_pct"] = 0.5
    if hparams["model_type"] == "falcon" and not hparams["new_decoder_architecture"]: hparams["num_kv_heads"] = 1
    if hparams["model_type"] == "nomic_bert":                                 # as in the hub's own configuration
        hparams |= dict(n_positions=8192, max_trained_positions=2048, activation_function="swiglu", causal=False)
        hparams |= dict.fromkeys(("qkv_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias", "prenorm"), False)
        hparams |= dict(rotary_emb_fraction=1.0, rotary_emb_interleaved=False, rotary_emb_scale_base=None)
        (folder / "tokenizer.json").write_text('{"model": {"type": "WordPiece"}}')
    cls = conversion.get_model_class(conversion.get_model_architecture(hparams, conversion.ModelType.TEXT))
    vocabulary = "t5" if hparams["model_type"] == "xlm-roberta" else "none"
    cls.set_vocab = lambda self: self.gguf_writer.add_tokenizer_model(vocabulary)
    cls._create_vocab_sentencepiece = lambda self: ([None] * 64, [], [])
    cls(folder, gguf.LlamaFileType[ftype], file, hparams=hparams).write()


def main(source, *names):
    sys.path[:0] = [source, str(Path(source, "gguf-py"))]
    old = {}
    if WHERE.exists() and names:
        with zipfile.ZipFile(WHERE) as z: old = {n: z.read(n) for n in z.namelist()}
    for name in names or MODELS:
        with tempfile.TemporaryDirectory() as tmp:
            tmp, model = Path(tmp), build(name)
            (tmp / "hf").mkdir()
            try: convert(model, tmp / "hf", tmp / "m.gguf")
            except Exception as e:
                print(name, "FAILED", type(e).__name__, e)
                if "-v" in sys.argv: raise
                continue
            old[f"{name}.gguf"] = (tmp / "m.gguf").read_bytes()
            ids = [[3, *IDS[0][1:]]] if name == "xlm-roberta" else IDS         # without its padding
            values = [[round(v, 4) for v in row] for row in outputs(model, ids)[0, 3::4].tolist()]
            made = dict(model=type(model).__name__, ids=ids, outputs=values)
            old[f"{name}.json"] = json.dumps(made, separators=(",", ":")).encode()
    with zipfile.ZipFile(WHERE, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as z:
        for n in sorted(old): z.writestr(zipfile.ZipInfo(n, (2026, 1, 1, 0, 0, 0)), old[n], zipfile.ZIP_DEFLATED, 9)
    print(len(old) // 2, "models,", WHERE.stat().st_size, "bytes")


if __name__ == "__main__": main(*sys.argv[1:])

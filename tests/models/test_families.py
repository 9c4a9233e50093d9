"Families of transformers with ways of their own, wrapped whole and streamed: what generate says, token for token"
import copy
from types import SimpleNamespace

import pytest
import torch
import transformers as tf

from bmlab.infer.batcher import Batcher
from bmlab.infer.cache import KVCache, kv_shapes
from bmlab.infer.decode import Decoder
from bmlab.infer.engine import wrap
from bmlab.infer.text import decode_tokens
from bmlab.infer.speculate import PromptLookup

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.long]

COMMON = dict(
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=4,
    num_attention_heads=4,
    vocab_size=99,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
BART = dict(
    d_model=64,
    encoder_layers=2,
    decoder_layers=3,
    encoder_attention_heads=4,
    decoder_attention_heads=4,
    encoder_ffn_dim=128,
    decoder_ffn_dim=128,
    vocab_size=99,
    max_position_embeddings=48,
    pad_token_id=1,
    bos_token_id=0,
    eos_token_id=2,
    decoder_start_token_id=2,
    forced_eos_token_id=None,
)
GEMMA = dict(
    COMMON,
    num_key_value_heads=2,
    head_dim=16,
    global_head_dim=32,
    sliding_window=5,
    hidden_size_per_layer_input=16,
    vocab_size_per_layer_input=99,
)
QWEN = dict(
    COMMON,
    num_key_value_heads=2,
    head_dim=16,
    linear_num_key_heads=2,
    linear_num_value_heads=2,
    linear_key_head_dim=16,
    linear_value_head_dim=16,
    layer_types=["linear_attention", "full_attention"] * 2,
)
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, shared_expert_intermediate_size=32)
T5 = dict(
    d_model=64,
    d_kv=16,
    d_ff=128,
    num_layers=2,
    num_decoder_layers=2,
    num_heads=4,
    vocab_size=99,
    decoder_start_token_id=0,
    pad_token_id=0,
    eos_token_id=1,
)
MAKE = {  # name: (how it decodes, the model)
    "two widths of heads": (
        "static",
        lambda: tf.Gemma4ForCausalLM(
            tf.Gemma4TextConfig(
                **GEMMA, num_kv_shared_layers=0, layer_types=["sliding_attention", "full_attention"] * 2
            )
        ),
    ),
    "layers that share keys": (
        "static",
        lambda: tf.Gemma4ForCausalLM(
            tf.Gemma4TextConfig(
                **GEMMA, num_kv_shared_layers=2, layer_types=["sliding_attention", "full_attention"] * 2
            )
        ),
    ),
    "chunks": (
        "static",
        lambda: tf.Llama4ForCausalLM(
            tf.Llama4TextConfig(
                **COMMON,
                num_key_value_heads=2,
                head_dim=16,
                intermediate_size_mlp=128,
                num_local_experts=4,
                attention_chunk_size=6,
            )
        ),
    ),
    "slopes": (
        "static",
        lambda: tf.BloomForCausalLM(tf.BloomConfig(hidden_size=64, n_layer=4, n_head=4, vocab_size=99)),
    ),
    "positions counted inside": ("static", lambda: tf.MarianMTModel(tf.MarianConfig(**BART))),
    "positions counted from ids": ("static", lambda: tf.M2M100ForConditionalGeneration(tf.M2M100Config(**BART))),
    "a router that casts itself": (
        "static",
        lambda: tf.SwitchTransformersForConditionalGeneration(
            tf.SwitchTransformersConfig(**T5, num_sparse_encoder_layers=1, num_sparse_decoder_layers=1, num_experts=3)
        ),
    ),
    "gated norms and a state": ("static", lambda: tf.Qwen3NextForCausalLM(tf.Qwen3NextConfig(**QWEN, **EXPERTS))),
    "a state, with sight": (
        "static",
        lambda: tf.Qwen3_5ForConditionalGeneration(
            tf.Qwen3_5Config(
                text_config=QWEN,
                vision_config=dict(depth=2, hidden_size=32, intermediate_size=64, num_heads=2, out_hidden_size=64),
            )
        ),
    ),
    "one activation for all blocks": (
        "generate",
        lambda: tf.OpenAIGPTLMHeadModel(
            tf.OpenAIGPTConfig(n_embd=64, n_layer=4, n_head=4, vocab_size=99, n_positions=64)
        ),
    ),
}


def make(name):
    torch.manual_seed(0)
    try: model = MAKE[name][1]().eval()
    except AttributeError as e:
        if e.obj is not tf: raise
        pytest.skip(f"this transformers has no {e.name}")
    for p in model.parameters():
        if p.ndim > 1: torch.nn.init.normal_(p, std=0.1)
    model.generation_config.eos_token_id = None
    return model


def said(model, limit=None, n=16):
    "(tokens, the engine's mode, blocks that stream, the smallest limit)"
    with wrap(model, memory_limit=limit, max_ctx=40, device="cpu") as e:
        return (
            [t[0] for t in decode_tokens(e.decoder, [[5, 17, 42, 8, 77, 31, 9, 64, 23]], None, n)],
            e.decoder.mode,
            len(e.plan.streamed),
            e.plan.min_bytes,
        )


@pytest.mark.parametrize("name", MAKE)
def test_what_generate_says(name):
    model = make(name)
    ids = torch.tensor([[5, 17, 42, 8, 77, 31, 9, 64, 23]])
    with torch.no_grad():
        want = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=16, do_sample=False, pad_token_id=0
        )[0, -16:].tolist()
    got, mode, streamed, least = said(copy.deepcopy(model))
    assert (got, mode, streamed) == (want, MAKE[name][0], 0)
    got, mode, streamed, _ = said(model, least)
    assert (got, mode) == (want, MAKE[name][0]) and streamed >= 3
    assert model.to(torch.float64).dtype is torch.float64                                          # free again


def test_beams_of_a_generation_config_stay_out():
    "A checkpoint that asks for beams and penalties: a stream is still one text, as the sampler draws it"
    model = make("one activation for all blocks")
    want, mode, *_ = said(model)
    first = want[0]
    for asked in (
        dict(num_beams=4, no_repeat_ngram_size=2, repetition_penalty=9.0, min_length=12, early_stopping=True),
        dict(suppress_tokens=[first], bad_words_ids=[[first]], forced_eos_token_id=7),
        dict(eos_token_id=want[2], max_time=1e-4),
        dict(guidance_scale=3.0, stop_strings=["a"]),
        dict(prompt_lookup_num_tokens=3),
        dict(sequence_bias=[[[first], -50.0]], encoder_repetition_penalty=5.0),
    ):
        old, model.generation_config = model.generation_config, tf.GenerationConfig(**asked)
        assert (
            mode == "generate"
            and said(model)[0] == want
            and model.generation_config.to_diff_dict().keys() >= asked.keys() - {"early_stopping"}
        ), asked
        model.generation_config = old


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_router_that_casts_itself_in_half_precision(dtype, tmp_path):
    "It is float32 in every model; what is wrapped whole and what is streamed say the same"
    model = make("a router that casts itself").to(dtype)
    model.save_pretrained(tmp_path)
    whole = said(copy.deepcopy(model))
    for streamed in (said(str(tmp_path), whole[3]), said(model, whole[3])):
        assert whole[:2] == (streamed[0], "static") and streamed[2] >= 3
    assert {m.classifier.weight.dtype for m in model.modules() if hasattr(m, "classifier")} == {torch.float32}


def test_a_part_may_be_cast_to_what_it_is():
    model = make("chunks")
    for limit in (None, said(model)[3]):
        with wrap(model, memory_limit=limit, max_ctx=40, device="cpu") as e:
            part = model.model.layers[1].self_attn
            assert (
                bool(e.plan.streamed) == (limit is not None)
                and part.to(torch.float32) is part
                and part.float() is part
                and part.to("cpu") is part
            )
            casts = lambda: part.to(torch.float16), lambda: part.to("meta"), lambda: model.to(torch.float32)
            for move in (*casts, part.share_memory, part.cuda):
                with pytest.raises(RuntimeError, match="cannot be moved or cast"): move()


def test_shapes_of_layers_that_differ():
    config = make("two widths of heads").config
    assert kv_shapes(config) == [(2, 16, 16), (2, 32, 32)] * 2
    for name, layers in (("two widths of heads", 4), ("layers that share keys", 2)):
        model = make(name)
        d = Decoder(model, 2, 15)
        held = sum(t.nbytes for layer in d.cache.layers for t in (layer.k, layer.v) if layer.shape)
        assert (
            KVCache.size(model.config, 2, 15, 4) == held
            and sum(bool(layer.shape) for layer in d.cache.layers) == layers
        )


ENCODERS = {  # without a table of ids, or with one that is hashed: get_input_embeddings() raises
    "pictures": (
        lambda: tf.DINOv3ConvNextModel(tf.DINOv3ConvNextConfig(hidden_sizes=[8, 16, 24, 32], depths=[2, 2, 2, 2])),
        lambda: torch.randn(1, 3, 64, 64),
    ),
    "characters": (
        lambda: tf.CanineModel(
            tf.CanineConfig(
                hidden_size=32, num_hidden_layers=4, num_attention_heads=4, intermediate_size=64, num_hash_buckets=64
            )
        ),
        lambda: torch.randint(0, 99, (1, 16)),
    ),
}

@pytest.mark.parametrize("name", ENCODERS)
def test_encoders_without_a_table_of_ids(name):
    torch.manual_seed(0)
    model, x = (f() for f in ENCODERS[name])
    with torch.no_grad():
        want = model.eval()(x).last_hidden_state
        with wrap(copy.deepcopy(model), device="cpu") as e:
            assert torch.equal(e.model(x).last_hidden_state, want) and not e.plan.streamed
            plan = e.plan
        with wrap(model, memory_limit=(plan.min_bytes + plan.peak_bytes) // 2, device="cpu") as e:
            assert torch.equal(e.model(x).last_hidden_state, want) and len(e.plan.streamed) >= 3


def test_guesses_for_several_texts_of_mpt():
    "Its code tries trees of one text at a time: of several, each guess is a chain; alone it branches again"
    torch.manual_seed(0)
    model = tf.MptForCausalLM(tf.MptConfig(d_model=32, n_layers=2, n_heads=4, vocab_size=99, max_seq_len=64)).eval()
    text = [5, 6, 7, 5, 6, 8, 5, 6, 9, 5, 6]
    say = lambda **kw: [
        [t for t in row if t is not None]
        for row in zip(*decode_tokens(Decoder(model, 2, 60), [text, text[1:]], None, [20, 12], **kw))
    ]
    masks, step = [], Decoder.step
    class Forked(PromptLookup):
        def propose(self, rows, length): return {r: [[1] * min(3, length), [6] * min(3, length)] for r in rows}
    def watched(d, ids, *args, mask=None, **kw):
        masks.append((len(ids), mask is not None))
        return step(d, ids, *args, mask=mask, **kw)
    want = say()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Decoder, "step", watched)
        assert (
            say(draft=Forked(branches=3)) == want and {(2, False), (1, True)} <= set(masks) and (2, True) not in masks
        )
    tok = SimpleNamespace(decode=lambda ids, **_: " ".join(map(str, ids)), eos_token_id=None)
    with Batcher(Decoder(model, 2, 60), tok, draft=Forked(branches=3)) as b:
        got = [b.submit(text, 20, stop_ids=()), b.submit(text[1:], 12, stop_ids=())]
        assert ["".join(g).split() for g in got] == [list(map(str, w)) for w in want]

"""ModelCenter's families at width 64 against what its own models say: whole, padded, with poolers, there and back.

The figures are made by tools/original_center.py, which runs ModelCenter's models; weights and inputs are drawn again by
the same recipe, under its names, and go through the converter.
"""
import json, re, sys
from pathlib import Path

import pytest
import torch
import transformers as tf

from bmlab.models.convert import _class, families, plan, to_original, to_safetensors
from bmlab.models.cpm2 import Cpm1Config, Cpm2Config
from bmlab.models.glm import BlankGlmConfig, blank_positions

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
import original_center as center  # noqa: E402

FIGURES = json.loads((Path(__file__).parents[1] / "fixtures/original_center.json").read_text())
LIMIT = 2e-5                                             # of logits up to 64; some tables of angles are in float32
V, D = center.V, center.D
WIDTH = dict(vocab_size=V, hidden_size=D, num_hidden_layers=12, num_attention_heads=4)
BERT = dict(WIDTH, intermediate_size=128)
GPT = dict(vocab_size=V, n_positions=64, n_embd=D, n_layer=12, n_head=4, n_inner=128)
T5 = dict(vocab_size=V, d_model=D, d_kv=16, d_ff=128, num_layers=12, num_heads=4, decoder_start_token_id=0)
GATED = dict(T5, feed_forward_proj="gated-gelu", tie_word_embeddings=False)
CPM2 = dict(T5 | dict(num_layers=24), hidden_act="gelu")
CONFIGS = {
    "cpm-1": Cpm1Config(**WIDTH | dict(num_hidden_layers=32), dim_head=16, dim_ff=128, position_bias_num_buckets=32,
                        position_bias_max_distance=24),
    "cpm-2": Cpm2Config(**CPM2, attn_scale=True, length_scale=True),
    "cpm-2-plain": Cpm2Config(**CPM2),
    "glm": BlankGlmConfig(**WIDTH | dict(num_hidden_layers=48), intermediate_size=128, max_sequence_length=64,
                          mask_token_ids=[91], sop_token_id=92, hidden_act="gelu"),
    "bert": tf.BertConfig(**BERT, max_position_embeddings=64),
    "roberta": tf.RobertaConfig(**BERT, max_position_embeddings=66, type_vocab_size=1, layer_norm_eps=1e-5),
    "longformer": tf.LongformerConfig(**BERT, max_position_embeddings=66, type_vocab_size=1, pad_token_id=1,
                                      attention_window=[8] * 12),
    "gpt2": tf.GPT2Config(**GPT),
    "gpt-j": tf.GPTJConfig(**GPT, rotary_dim=8, activation_function="gelu"),
    "opt": tf.OPTConfig(**WIDTH, ffn_dim=128, max_position_embeddings=62, word_embed_proj_dim=D),
    "llama": tf.LlamaConfig(**BERT),
    "t5": tf.T5Config(**T5),
    "t5-v1_1": tf.T5Config(**GATED),
    "mt5": tf.MT5Config(**GATED),
    "vit": tf.ViTConfig(hidden_size=D, num_hidden_layers=12, num_attention_heads=4, intermediate_size=128,
                        image_size=32, patch_size=8, num_labels=10, layer_norm_eps=1e-5),
}
SCALE = {"t5": 100}                                      # `scale` of its configuration: weights come divided


def family(name): return name.removesuffix("-plain") + "-modelcenter"


def shapes(name): # of the original, optional tensors too
    return {n: s for r, (_, s_) in plan(family(name), CONFIGS[name]).items() for n, s in zip(r.old, s_)}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    "name → (model, folder): what ModelCenter would have saved, brought here by the converter"
    kept = {}
    def get(name):
        if name in kept: return kept[name]
        folder = tmp_path_factory.mktemp(name)
        own = center.shaped(name, shapes(name))
        own = {n: t for n, t in own.items() if re.sub(r"layers\.\d+", "layers.0", n) in FIGURES[name]["names"]}
        torch.save(own, folder / "original.pt")
        to_safetensors(folder / "original.pt", folder / "hf", family(name), CONFIGS[name], scale=SCALE.get(name, 1))
        kept[name] = _class(families()[family(name)]).from_pretrained(folder / "hf").double().eval(), folder
        return kept[name]
    return get


def given(name): # what our model takes in place of ModelCenter's arguments
    told = center.tensors(center.arguments(name))
    if name == "vit": return dict(pixel_values=told["input_seq"].double())
    length = told.pop("length", None)
    if length is not None: told["attention_mask"] = (torch.arange(told["input_ids"].shape[1]) < length[:, None]).long()
    told.pop("decoder_length", None)
    if name == "cpm-1": told["spans"] = told.pop("span")
    if name == "glm": # ours finds the places itself
        places = torch.stack([told.pop("position_ids"), told.pop("block_position_ids")], 1)
        assert torch.equal(blank_positions(told["input_ids"], 92, [91]), places)
    return told


@torch.no_grad()
@pytest.mark.parametrize("name", CONFIGS)
def test_it_says_what_modelcenter_says(made, name):
    model, found = made(name)[0], FIGURES[name]
    logits = model(**given(name)).logits
    if name == "vit": torch.testing.assert_close(logits, torch.tensor(found["logits"]).double(), rtol=0, atol=LIMIT)
    else:
        apart = max(abs(logits[row, place, token].item() - value) for row, place, token, value in found["logits"])
        assert apart < LIMIT, apart
        for row, likeliest in enumerate(found["said"]):
            assert logits[row, :len(likeliest)].argmax(-1).tolist() == likeliest


@torch.no_grad()
def test_cpm1_without_a_context(made):
    "Nothing is given and all is written: ids alone say that here, a context of zeros there"
    told, found = given("cpm-1"), FIGURES["cpm-1"]["causal"]
    logits = made("cpm-1")[0](told["input_ids"], attention_mask=told["attention_mask"]).logits
    assert max(abs(logits[row, at, token].item() - value) for row, at, token, value in found["logits"]) < LIMIT
    assert logits[:1].argmax(-1).tolist() == found["said"]
    assert logits[:1].argmax(-1).tolist() != FIGURES["cpm-1"]["said"][:1]


@torch.no_grad()
@pytest.mark.parametrize("name", ["bert", "roberta", "longformer"])
def test_poolers(made, name):
    "The first token's vector, from a folder opened without its head"
    kinds = dict(bert=tf.BertModel, roberta=tf.RobertaModel, longformer=tf.LongformerModel)
    model = kinds[name].from_pretrained(made(name)[1] / "hf").double().eval()
    pooled = model(**given(name)).pooler_output[:, :8]
    torch.testing.assert_close(pooled, torch.tensor(FIGURES[name]["pooled"]).double(), rtol=0, atol=LIMIT)


@pytest.mark.parametrize("name", CONFIGS)
def test_there_and_back(made, name, tmp_path):
    folder = made(name)[1]
    back = to_original(folder / "hf", tmp_path / "back.pt", family(name), scale=SCALE.get(name, 1))
    back, want = torch.load(back, weights_only=True), torch.load(folder / "original.pt", weights_only=True)
    assert {*want} <= {*back} and all(torch.allclose(back[k], v, rtol=1e-6, atol=0) for k, v in want.items())

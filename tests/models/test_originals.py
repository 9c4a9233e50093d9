"""CPM-Ant, CPM-1, CPM-2, EVA and GLM at their real depth against what their original code says: logits, losses, ids.

The figures are made by tools/original_cpm.py, which runs the originals; weights are drawn again by the same recipe and
go through the converter, so that names and shapes are judged too.
"""
import json, sys
from pathlib import Path

import pytest
import torch
import transformers as tf

from bmlab.infer.beams import beam_search
from bmlab.infer.decode import Decoder
from bmlab.models.convert import _class, families, manifest, to_original, to_safetensors
from bmlab.models.cpm2 import Cpm2Config, EvaConfig
from bmlab.models.glm import BlankGlmConfig, blank_example

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
import originals  # noqa: E402

LIMIT = 1e-5                                             # of logits up to 38, in float64 on both sides
ROUNDED = 1e-4                                           # of CPM-Ant, whose factors and norms are float32's


def figures(name): return json.loads((Path(__file__).parents[1] / f"fixtures/original_{name}.json").read_text())


ANT, ONE, TWO, EVA, GLM = (figures(name) for name in ("ant", "cpm1", "cpm2", "eva", "glm"))


def renamed(sizes, **names): return {names.get(k, k): v for k, v in sizes.items() if names.get(k, k)}


T5 = dict(num_decoder_layers="num_decoder_layers", layer_norm_epsilon="layer_norm_epsilon")
AS_GPT2 = dict(num_layers="n_layer", hidden_size="n_embd", num_attention_heads="n_head",
               max_sequence_length="n_positions")
AS_ANT = dict(dim_model="hidden_size", num_heads="num_attention_heads", num_layers="num_hidden_layers", half=None)
ENDLESS = dict(bos_token_id=None, eos_token_id=None, pad_token_id=0)
CONFIGS = {
    "cpm-ant": (ANT, lambda: tf.CpmAntConfig(**renamed(ANT["sizes"], **AS_ANT), **ENDLESS)),
    "cpm-1": (ONE, lambda: tf.GPT2Config(**renamed(ONE["sizes"], **AS_GPT2), **ENDLESS)),
    "cpm-2": (TWO, lambda: Cpm2Config(**TWO["sizes"], eos_token_id=None, decoder_start_token_id=None)),
    "eva": (EVA, lambda: EvaConfig(**EVA["sizes"], eos_token_id=4, decoder_start_token_id=None)),
    "glm": (GLM, lambda: BlankGlmConfig(
        **renamed(GLM["sizes"], num_layers="num_hidden_layers"), mask_token_ids=[91], sop_token_id=92,
        eos_token_id=GLM["end"], pad_token_id=94)),
}
SUMMED = {"cpm-ant": False}                              # its factors divide by the roots; else the weights are smaller
SAME = {f"{stack}.word_embeds.weight": "word_embeds.weight" for stack in ("encoder", "decoder")}


def drawn(family, config): # → the original's weights
    found = CONFIGS[family][0]
    return originals.weights(manifest(family, config), found["spread"], SUMMED.get(family, True), SAME)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    "family → its model, brought here by the converter from the original's names"
    kept = {}
    def get(family, **kw):
        key = family, *kw.items()
        if key in kept: return kept[key]
        folder, config = tmp_path_factory.mktemp(family), CONFIGS[family][1]()
        for k, v in kw.items(): setattr(config, k, v)
        torch.save(drawn(family, config), folder / "original.pt")
        to_safetensors(folder / "original.pt", folder / "hf", family, config)
        model = _class(families()[family]).from_pretrained(folder / "hf").eval()
        kept[key] = model.double() if SUMMED.get(family, True) else model, folder
        return kept[key]
    return get


def near(logits, found, limit=LIMIT):
    "Are logits and likeliest tokens those of the original?"
    apart = max(abs(logits[row, place, token].item() - value) for row, place, token, value in found["logits"])
    assert apart < limit, apart
    for row, likeliest in enumerate(found["said"]): assert logits[row, :len(likeliest)].argmax(-1).tolist() == likeliest


@torch.no_grad()
def test_ant(made):
    "Given and answered tokens in any order, a padded row, another prompt than the usual; the loss of its training task"
    model, mask = made("cpm-ant")[0], torch.arange(40) < torch.tensor(ANT["length"])[:, None]
    told = dict(context=torch.tensor(ANT["context"]), attention_mask=mask.long(), prompt_type=ANT["prompt_type"])
    logits = model(torch.tensor(ANT["input"]), **told).logits
    near(logits, ANT, ROUNDED)
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.tensor(ANT["targets"]).flatten())
    assert loss.item() == pytest.approx(ANT["loss"], abs=ROUNDED)


@torch.no_grad()
def test_ant_with_labels(made):
    "The library's own loss is the original's where what has a label is what is answered"
    model, ids = made("cpm-ant")[0], torch.tensor(ANT["input"])[:1]
    given = torch.tensor(ANT["context"])[:1].bool()
    labels = ids.masked_fill(given, -100)
    out = model(ids, labels=labels, prompt_type=ANT["prompt_type"])
    alone = ANT | {"logits": [x for x in ANT["logits"] if x[0] == 0], "said": ANT["said"][:1]}
    near(out.logits, alone, ROUNDED)
    wanted = torch.tensor(ANT["targets"])[0]
    loss = torch.nn.functional.cross_entropy(out.logits[0], wanted)
    assert out.loss.item() == pytest.approx(loss.item(), abs=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("beams", [1, 4])
def test_ant_writes_what_its_beam_search_writes(made, beams):
    """Two prompts of different lengths, the shorter padded on the left; `max_length` there is one token less than is
    written here, since its last word only weighs"""
    decoder = Decoder(made("cpm-ant")[0], max_batch=2 * beams, max_ctx=40)
    assert decoder.mode == "static", decoder.why_generate
    prompts = [[6, *p] for p in ANT["prompts"]]          # <s> before each
    wrote = beam_search(decoder, prompts, beams, 0.0, len(ANT[f"beams_{beams}"][0]) + 1)
    assert [found[0].ids[:-1] for found in wrote] == ANT[f"beams_{beams}"]


@torch.no_grad()
def test_cpm1(made):
    model, ids = made("cpm-1")[0], torch.tensor(ONE["input"])
    out = model(ids, labels=ids)
    near(out.logits, ONE)
    assert out.loss.item() == pytest.approx(ONE["loss"], abs=LIMIT)
    prompt = torch.tensor([ONE["prompt"]])
    wrote = model.generate(prompt, max_new_tokens=10, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert wrote[0, len(ONE["prompt"]):].tolist() == ONE["written"]


def between(model, found): # logits and losses of two texts, the second padded
    source = torch.tensor(found["source"])
    told = dict(input_ids=source, attention_mask=(source != 5).long(), decoder_input_ids=torch.tensor(found["target"]))
    near(model(**told).logits, found)
    for row, loss in enumerate(found["losses"]):
        one = {k: v[row:row + 1] for k, v in told.items()}
        got = model(**one, labels=torch.tensor(found["labels"])[row:row + 1]).loss
        assert got.item() == pytest.approx(loss, abs=LIMIT)
    return told


def writes(model, told, start, wrote, eos):
    "Greedy decoding over a cache, from the first token of the target"
    keep = dict(input_ids=told["input_ids"], attention_mask=told["attention_mask"])
    got = model.generate(**keep, decoder_start_token_id=start.tolist(), max_new_tokens=12, do_sample=False,
                         eos_token_id=eos, pad_token_id=5)[:, 1:].tolist()
    assert [row[:len(want)] for row, want in zip(got, wrote)] == wrote


@torch.no_grad()
def test_cpm2(made):
    "Beyond the last bucket, with padding; it stops at the first padding that it writes"
    model = made("cpm-2")[0]
    told = between(model, TWO)
    writes(model, told, torch.tensor(TWO["target"])[:, 0], TWO["written"], None)


@torch.no_grad()
@pytest.mark.parametrize("version", ["eva1", "eva2"])
def test_eva(made, version):
    "Without and with the root of a head's width, by the original's own decoding with k=1"
    found = EVA[version]
    model = made("eva", attn_scale=found["attn_scale"])[0]
    told = between(model, found)
    writes(model, told, torch.tensor(found["target"])[:, 0], found["written"], 4)


def test_eva_of_a_file_with_roles(made, tmp_path):
    "A table that no script of the original reads: left out, and said so"
    weights, config = drawn("eva", CONFIGS["eva"][1]()), CONFIGS["eva"][1]()
    roles = torch.zeros(2, 64)
    weights |= {f"{at}role_embeds.weight": roles for at in ("", "encoder.", "decoder.")}
    torch.save(weights, tmp_path / "eva.pt")
    folder = to_safetensors(tmp_path / "eva.pt", tmp_path / "hf", "eva", config)
    left = json.loads((folder / "conversion.json").read_text())["left_out"]
    assert left == ["role_embeds.weight", "encoder.role_embeds.weight", "decoder.role_embeds.weight"]


@torch.no_grad()
def test_glm(made):
    "Three pieces in another order than they stand: inputs, both positions, targets, loss and logits"
    model, e = made("glm")[0], blank_example(GLM["text"], GLM["spans"], 91, 92, 93)
    assert e["input_ids"].tolist() == GLM["input"] and e["position_ids"].tolist() == GLM["positions"]
    counts = torch.tensor(GLM["counts"]).bool()
    assert torch.equal(e["labels"], torch.tensor(GLM["targets"]).masked_fill(~counts, -100))
    out = model(**{k: v[None] for k, v in e.items()})
    near(out.logits, GLM)
    assert out.loss.item() == pytest.approx(GLM["loss"], abs=LIMIT)


@torch.no_grad()
def test_glm_reads_a_text_without_a_blank(made):
    "Every place sees every other, and no place is counted inside a piece"
    near(made("glm")[0](torch.tensor([GLM["text"]])).logits, GLM["read"])


@torch.no_grad()
def test_glm_writes_its_blanks_one_after_the_other(made):
    "Over a cache, as the original does it: the second piece sees the first, and the end of a piece is not read"
    model, ids, pieces = made("glm")[0], list(GLM["prompt"]), []
    while len(pieces) < 2:
        new = model.generate(torch.tensor([ids + [92]]), max_new_tokens=9, do_sample=False)[0, len(ids):].tolist()
        pieces.append(new[:-1] if new[-1] == GLM["end"] else new)
        ids += pieces[-1]
    assert pieces[0] + pieces[1] == GLM["written"]


@pytest.mark.parametrize("family", CONFIGS)
def test_there_and_back(made, family, tmp_path):
    _, folder = made(family)
    back = torch.load(to_original(folder / "hf", tmp_path / "back.pt", family), weights_only=True)
    want = torch.load(folder / "original.pt", weights_only=True)
    assert {*back} == {*want} and all(torch.equal(back[k], v) for k, v in want.items())

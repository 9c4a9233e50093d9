"Folders that OpenDelta's own code wrote (tools/original_opendelta.py) load, and their models say what they said there."
import importlib.util, json, zipfile
from pathlib import Path

import pytest
import torch

from bmlab.core import count
from bmlab.delta.delta import Delta, deltas
from bmlab.delta.opendelta import AutoDeltaConfig, AutoDeltaModel, load_opendelta

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "tests" / "fixtures" / "original_opendelta.zip"
with zipfile.ZipFile(FILE) as z: FIGURES = json.loads(z.read("figures.json"))
CASES = FIGURES["cases"]


def recipe():
    "tools/original_opendelta.py, which draws the weights"
    spec = importlib.util.spec_from_file_location("original_opendelta", ROOT / FIGURES["recipe"])
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


RECIPE = recipe()


def backbone(case):
    import transformers
    return RECIPE.backbone(CASES[case]["model"], transformers)


def logits(case, model):
    with torch.no_grad(): return model(**RECIPE.asked(CASES[case]["model"])).logits


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("opendelta")
    with zipfile.ZipFile(FILE) as z: z.extractall(folder)
    return folder


def seen(case, found):
    "Logits of words, not of padding"
    real = torch.tensor(FIGURES["mask"]).bool()
    return found[real] if found.ndim == 3 and "T5" not in CASES[case]["model"] else found


@pytest.mark.parametrize("case", CASES)
def test_a_folder_of_opendelta_loads(case, folders, tmp_path):
    "…says what it said there, goes off exactly, and is saved in our own format without loss"
    model = backbone(case)
    plain, want = logits(case, model), torch.tensor(CASES[case]["logits"])
    if CASES[case]["method"] == "soft_prompt" and want.ndim == 3 and "T5" not in CASES[case]["model"]:
        want = want[:, -6:]                                         # there the output is longer by the prompt
    d = Delta.load(folders / case, model)
    got = logits(case, model)
    torch.testing.assert_close(seen(case, got), seen(case, want), atol=2e-5, rtol=1e-5)
    assert (seen(case, got) - seen(case, plain)).abs().max() > 1e-3
    assert d.attached and not CASES[case]["kept"] or list(d.heads) == CASES[case]["kept"]
    other = backbone(case)
    again = Delta.load(d.save(tmp_path), other, name="again")
    torch.testing.assert_close(logits(case, other), got, atol=2e-6, rtol=1e-5)
    again.detach()
    d.detach()
    assert torch.equal(logits(case, model), plain) and torch.equal(logits(case, other), plain)


@pytest.mark.parametrize("case", CASES)
def test_a_configuration_makes_what_opendelta_makes(case, folders):
    "As many parameters, and on the same modules as in the file"
    model = backbone(case)
    d = AutoDeltaModel.from_config(AutoDeltaConfig.from_finetuned(folders / case), backbone_model=model)
    # there the biases of T5's norms come with the first forward, are never saved, and start at 0
    late = 12 * RECIPE.WIDTH if case == "T5ForConditionalGeneration-bitfit" else 0
    assert d.count().delta == CASES[case]["parameters"] + late


def test_words_of_a_configuration():
    "…that OpenDelta's users write: `unfrozen_modules`, an unknown word, T5's cross-attention"
    model = backbone("head")
    config = {"delta_type": "lora", "lora_r": 2, "unfrozen_modules": ["deltas", "output.LayerNorm", "classifier"]}
    d = AutoDeltaModel.from_config(AutoDeltaConfig.from_dict(config), backbone_model=model).freeze()
    tuned = {n for n, p in model.named_parameters() if p.requires_grad and "_deltas" not in n}
    assert {n.rsplit(".", 2)[-2] for n in tuned} == {"LayerNorm", "classifier"} and len(tuned) == 2 * 4 + 2
    d.freeze(keep=["deltas", "classifier"])
    assert d.kept == ("classifier",)
    d.freeze(keep=["deltas"])
    assert d.kept == () and count(model).trainable == d.count().delta
    with pytest.raises(ValueError, match="'lora_alfa' is no word.*did you mean 'lora_alpha'"):
        AutoDeltaConfig.from_dict({"delta_type": "lora", "lora_alfa": 2})
    with pytest.raises(LookupError, match="did you mean 'adapter'"): AutoDeltaConfig.from_dict({"delta_type": "adapte"})
    # as examples/examples_prompt/src/run.py hands over its arguments
    given = dict(delta_type="adapter", backbone_model="roberta-base", delay_push=True, force_download=False,
                 finetuned_delta_path=None, modified_modules=None, bottleneck_dim=5, lora_r=None)
    assert AutoDeltaModel.from_config(AutoDeltaConfig.from_dict(given), backbone("head")).bottleneck == 5
    t5 = backbone("T5ForConditionalGeneration-lora")
    there, more = (AutoDeltaModel.from_config({"delta_type": "lora"}, t5, cross=c) for c in (False, True))
    assert set(more.sites) - set(there.sites) == {n for n in more.sites if "EncDecAttention" in n}
    assert len(there.sites) == 8 and len(more.sites) == 12


@pytest.mark.parametrize("part, what, error", [
    ("config.json", b"{", ValueError), ("config.json", b'{"delta_type": "lora", "r": 2}', ValueError),
    ("pytorch_model.bin", b"PK", ValueError)])
def test_a_broken_folder_changes_nothing(part, what, error, folders, tmp_path):
    for p in (folders / "head").iterdir(): (tmp_path / p.name).write_bytes(p.read_bytes())
    (tmp_path / part).write_bytes(what)
    model = backbone("head")
    with pytest.raises(error): Delta.load(tmp_path, model)
    assert len(deltas(model)) == 0


def test_another_backbone_is_an_error(folders):
    model = backbone("GPT2LMHeadModel-adapter")
    for case in ("head", "BertForSequenceClassification-bitfit", "BertForSequenceClassification-prefix"):
        with pytest.raises((LookupError, ValueError, TypeError)): Delta.load(folders / case, model)
    assert len(deltas(model)) == 0


def test_a_folder_may_be_a_text(folders):
    case = next(c for c in CASES if CASES[c]["method"] == "lora")
    assert load_opendelta(str(folders / case), backbone(case)).attached
    with pytest.raises(TypeError, match="dir"): load_opendelta(None, backbone(case))

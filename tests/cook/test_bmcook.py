"BMCook's configurations, and what BMCook's own code says of masks and losses (tools/original_bmcook.py)."
import importlib.util, json
from pathlib import Path

import pytest
import torch

from bmlab.cook import Cook, Distill, Sparse24, StructPrune
from bmlab.cook.bmcook import methods_of
from bmlab.core import count

ROOT = Path(__file__).resolve().parents[2]
ORIGINAL = json.loads((ROOT / "tests/fixtures/original_bmcook.json").read_text(encoding="utf-8"))
SPEC = importlib.util.spec_from_file_location("original_bmcook", ROOT / ORIGINAL["recipe"])
RECIPE = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(RECIPE)
IDS = torch.tensor(RECIPE.IDS)


def cooked_loss(name):
    told = ORIGINAL["distil"][name]
    student, teacher = RECIPE.model("student"), RECIPE.model("teacher")
    cook = Cook.from_config(student, {"distillation": told["config"]}, teacher)
    logits = student(input_ids=IDS).logits
    return cook.loss().item(), told["loss"], logits, teacher


def test_the_loss_of_hidden_states_is_the_originals():
    "Inputs and outputs of modules, divided by their mean length, and a scale that means the same"
    got, want, *_ = cooked_loss("hidden")
    assert got == pytest.approx(want, rel=1e-5)


def test_the_loss_of_logits_and_the_originals():
    "There the cross entropy is summed over positions and averaged over the vocabulary; here it is the KL a token"
    got, want, logits, teacher = cooked_loss("logits")
    with torch.no_grad(): p = teacher(input_ids=IDS).logits.log_softmax(-1)
    B, L, V = logits.shape
    entropy = -(p.exp() * p).sum(-1).mean()                                    # of the teacher, which moves nothing
    scale = ORIGINAL["distil"]["logits"]["config"]["ce_scale"]
    assert (got + scale * entropy.item()) * L / V == pytest.approx(want, rel=1e-5)


def masks(transposable):
    linear = torch.nn.Linear(16, 8, bias=False)
    with torch.no_grad(): linear.weight.copy_(RECIPE.matrix())
    net = torch.nn.Sequential(linear)
    Cook(net, [Sparse24("0", score="magnitude", transposable=transposable)])
    return (net[0].weight != 0).int()


def test_masks_are_the_originals_or_keep_more():
    theirs = {k: torch.tensor([list(map(int, row)) for row in ORIGINAL[k]]) for k in ("m4n2_1d", "m4n2_2d")}
    assert torch.equal(masks(False), theirs["m4n2_1d"])
    size, ours = RECIPE.matrix().abs(), masks(True)
    assert (size * ours).sum() > (size * theirs["m4n2_2d"]).sum()              # the best mask, not the greedy one
    for m in (ours, theirs["m4n2_2d"]):
        blocks = m.view(2, 4, 4, 4)
        assert (blocks.sum(1) <= 2).all() and (blocks.sum(3) <= 2).all()


def test_states_before_a_module_need_a_module_that_runs():
    student, teacher = RECIPE.model("student"), RECIPE.model("teacher")
    with pytest.raises(ValueError, match="did not run"):
        Cook(student, [Distill(teacher, logits=0, hidden={"[pre]model.layers": "[pre]model.layers"})])
    cook = Cook(student, [Distill(teacher, logits=0, hidden="[pre]layers.*.mlp")])
    student(input_ids=IDS)
    assert cook.loss() > 0
    cook.detach()
    assert not any(m._forward_pre_hooks for m in student.modules())


@pytest.mark.parametrize("sparsity", [.25, .5, .8])
def test_one_number_for_structured_pruning(sparsity):
    "…is the share of what heads and neurons hold, to the width of a unit"
    model = RECIPE.model("student")
    attention, ffn = 4 * 32 * 32 * 2, 3 * 32 * 64 * 2
    before = count(model).total
    small = Cook(model, [StructPrune(target_sparsity=sparsity, score="magnitude")]).export()
    gone = (before - count(small).total) / (attention + ffn)
    assert sparsity <= gone <= sparsity + .15
    with pytest.raises(ValueError, match="leave layers="): StructPrune(heads=.5, target_sparsity=.5)
    with pytest.raises(ValueError, match="a share in"): StructPrune(target_sparsity=1.5)
    with pytest.raises(ValueError, match="did you mean 'ffn'"): StructPrune(target_sparsity=.5, units=["fnn"])


def test_a_whole_configuration():
    "All four sections, in the words of its examples"
    config = {
        "distillation": {"ce_scale": 1, "ce_temp": 2, "mse_hidn_scale": 1, "mse_hidn_proj": False,
                         "mse_hidn_module": ["[post]encoder.norm:[post]encoder.norm"]},
        "pruning": {"is_pruning": True, "pruning_mask_path": "prune_example.bin", "pruned_module": ["input_embedding"],
                    "mask_method": "sprune",
                    "sprune": {"criterion": "l0", "training_mask": ["transformer", "num_heads"], "fixed_mask_path": "",
                               "mask_mode": "train_mask", "target_mode": "sparsity", "target_sparsity": 0.5}},
        "quantization": {"is_quant": True, "quantized_module": ["mlp"]},
        "MoEfication": {"is_moefy": True, "first_FFN_module": ["before_ffn"]},
    }
    student, teacher = RECIPE.model("student"), RECIPE.model("teacher")
    names = {"encoder.": "model.", "before_ffn": "post_attention_layernorm"}
    found = {type(m).__name__: m for m in methods_of(student, config, teacher, names, experts=4, steps=3)}
    assert list(found) == ["StructPrune", "Distill", "FakeQuant", "MoEfy"]
    assert found["StructPrune"].of == ("layers", "heads") and found["StructPrune"].target_sparsity == .5
    assert (found["Distill"].T, found["Distill"].hidden) == (2, {"[post]model.norm": "[post]model.norm"})
    assert all(".mlp." in n for n in found["FakeQuant"].modules) and len(found["FakeQuant"].modules) == 6
    assert len(found["MoEfy"].modules) == 6
    config["pruning"]["sprune"]["training_mask"] = ["dim_model"]
    with pytest.raises(ValueError, match="'dim_model' cannot be cut"): methods_of(student, config, teacher, names)


def test_pruned_modules_are_found_by_their_parameters_names():
    "bmcook/pruning/__init__.py looks for the words in the keys of the state dict"
    for word, count in (("mlp.up_proj.weight", 2), ("layers.0.mlp", 3), ("q_proj.w", 2)):
        model = RECIPE.model("student")
        found, = methods_of(model, {"pruning": {"is_pruning": True, "pruned_module": [word], "mask_method": "m4n2_1d"}})
        keys = [k for k, p in model.state_dict().items() if word in k and p.ndim == 2]
        assert [f"{n}.weight" for n in found.modules] == keys and len(keys) == count

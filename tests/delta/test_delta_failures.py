"""What a failed or odd call leaves behind: nothing; what it says: which argument"""
import json

import pytest, torch
import transformers as tf

from bmlab.all import (
    Adapter,
    Bbt,
    Continual,
    Delta,
    DeltaBank,
    IA3,
    Lora,
    PeftDelta,
    Prefix,
    PromptScore,
    SoftPrompt,
    deltas,
    pick,
)
from bmlab.delta.hub import Hub, publish

def tiny(**more):
    torch.manual_seed(0)
    sizes = dict(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return tf.LlamaForCausalLM(tf.LlamaConfig(**sizes | more)).eval()

def bare(model): return not deltas(model) and not any(hasattr(m, "_deltas") for m in model.modules())

def test_load_under_another_name_keeps_detached_deltas(tmp_path):
    model = tiny()
    first = Lora(model, r=2)
    first.save(tmp_path / "a")
    first.detach()
    second = Delta.load(tmp_path / "a", model, name="zh")
    assert deltas(model)["lora"] is first and deltas(model)["zh"] is second
    with pytest.raises(ValueError, match="taken"): Delta.load(tmp_path / "a", model, name="zh")
    assert deltas(model)["lora"] is first and list(deltas(model)) == ["zh", "lora"]

def test_scoring_prompts_keeps_a_detached_prompt():
    model, ids = tiny(), torch.arange(1, 9).view(2, 4)
    mine = SoftPrompt(model, 3).detach()
    score = PromptScore(model, dict(input_ids=ids, labels=ids))
    Bbt(score, score.start(3), dim=4, popsize=4).run(4)
    assert deltas(model)["prompt_tuning"] is mine

LOHA = {"peft_type": "LOHA", "r": 2, "target_modules": ["q_proj"]}

@pytest.mark.parametrize("make", [lambda m: Prefix(m, 3), lambda m: PeftDelta(m, LOHA)])
def test_failed_load_leaves_nothing(tmp_path, make):
    make(tiny()).save(tmp_path)
    other = tiny(hidden_size=64)
    with pytest.raises(ValueError, match="another backbone"): Delta.load(tmp_path, other)
    assert bare(other)

def test_failed_continual_load_leaves_nothing(tmp_path):
    tasks = Continual(tiny())
    for t in ("a", "b"):
        with tasks.learn(t): pass
    tasks.save(tmp_path)
    (tmp_path / "b" / "adapter_config.json").unlink()
    model = tiny()
    with pytest.raises(FileNotFoundError, match="adapter_config.json"): Continual.load(tmp_path, model)
    assert bare(model)

def test_cut_files_are_named(tmp_path):
    Lora(tiny(), r=2).save(tmp_path)
    whole = (tmp_path / "adapter_config.json").read_text()
    (tmp_path / "adapter_config.json").write_text(whole[:20])
    with pytest.raises(ValueError, match=f"{tmp_path.name}.*cannot be read"): Delta.load(tmp_path, tiny())
    (tmp_path / "adapter_config.json").write_text(whole)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"xx")
    with pytest.raises(ValueError, match="cannot be read"): Delta.load(tmp_path, tiny())

def test_empty_name_changes_nothing():
    model = tiny()
    d = Lora(model, r=2)
    with pytest.raises(ValueError, match="name=''"): d.rename("")
    assert d.name == "lora" and d.attached
    with pytest.raises(ValueError, match="name=''"): Adapter(model, 4, name="")

@pytest.mark.parametrize("wrong, says", [
    (lambda m: Lora(m, experts=("down_proj",)), "stacks experts"),
    (lambda m: Lora(m, alpha="8"), "alpha='8'"),
    (lambda m: Lora(m, dropout="x"), "dropout='x'"),
    (lambda m: Lora(m, init=None), "init=None"),
    (lambda m: Adapter(m, 4, modules="layers"), "never called"),
    (lambda m: SoftPrompt(m, text=[1, 2]), "init='text'"),
    (lambda m: Prefix(m, text=[1, 2]), "init='text'"),
    (lambda m: deltas(m)[["lora"]], "one by one"),
    (lambda m: PeftDelta(m, {"peft_type": "loha"}), "'LOHA'"),
])
def test_wrong_arguments_are_named(wrong, says):
    model = tiny()
    with pytest.raises((ValueError, TypeError, LookupError), match=says): wrong(model)
    assert bare(model)

def test_card_names_no_folder_of_this_machine(tmp_path):
    model = tiny()
    model.config._name_or_path = str(tmp_path / "small-llama")
    assert publish(Lora(model, r=2), tmp_path / "hub", "a", "nothing yet", "mit").backbone == "small-llama"
    assert json.loads((tmp_path / "hub" / "a" / "card.json").read_text())["backbone"] == "small-llama" and list(
        Hub(tmp_path / "hub")
    ) == ["a"]

def test_pick_takes_a_pattern_by_place():
    pytest.importorskip("anywidget")
    assert len(pick(tiny(), "q_proj").selected) == 2


def test_a_delta_that_works_on_anothers_output_is_not_merged():
    m = tiny()
    IA3(m, modules=["k_proj"], feedforward=[])
    a = Lora(m, r=2, modules="k_proj")
    with pytest.raises(ValueError, match="works on the output of 'ia3'"): a.merge()
    assert a.attached
    two = [Lora(m, r=2, modules="v_proj", name=n) for n in ("one", "two")]
    for d in two:
        for p in d.parameters(): torch.nn.init.normal_(p, std=0.1)
    with torch.no_grad():
        want = m(torch.arange(1, 9).view(2, 4)).logits
        with two[1].merge():
            torch.testing.assert_close(m(torch.arange(1, 9).view(2, 4)).logits, want, atol=1e-5, rtol=1e-5)


def test_a_delta_below_one_that_reads_the_weight_is_not_merged():
    m = tiny()
    a, b = Lora(m, r=2, modules="v_proj"), Lora(m, r=2, modules="v_proj", dora=True, name="dora")
    with pytest.raises(ValueError, match="'dora' computes with the weight"): a.merge()
    assert a.attached and b.attached


def test_a_merge_taken_back_leaves_the_order():
    m, ids = tiny(), torch.arange(1, 9).view(2, 4)
    a, b = Lora(m, r=2, modules="down_proj"), Adapter(m, 4, modules="down_proj")
    for p in [*a.parameters(), *b.parameters()]: torch.nn.init.normal_(p, std=0.3)
    with torch.no_grad(): want = m(ids).logits
    with a.merge(), torch.no_grad(): torch.testing.assert_close(m(ids).logits, want, atol=1e-4, rtol=1e-4)
    with torch.no_grad(): assert torch.equal(m(ids).logits, want)
    with deltas(m).aside(): pass
    with torch.no_grad(): assert torch.equal(m(ids).logits, want)


def test_a_bank_that_cannot_be_made_leaves_the_deltas_where_they_were(tmp_path):
    m = tiny()
    a = Lora(m, r=2, name="mine")
    with pytest.raises(FileNotFoundError): DeltaBank(m, {"a": a, "b": tmp_path / "nope"})
    assert a.attached and list(deltas(m)) == ["mine"]


def test_unfreeze_in_any_order():
    m = tiny().requires_grad_(True)
    a, b = Lora(m).freeze(), Adapter(m, 4).freeze()
    a.unfreeze()
    b.unfreeze()
    assert all(p.requires_grad for p in m.parameters())


def test_not_a_model_and_nothing_picked():
    class Empty: selected = []                                          # a picker without a choice
    with pytest.raises(TypeError, match="load\\(\\) returns"): Lora((tiny(), None))
    with pytest.raises(LookupError, match="nothing is picked"): Lora(tiny(), modules=Empty())

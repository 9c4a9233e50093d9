"What transformers could not read is not written for it; packed weights come back in float; who opens a cooked folder"
import copy, pickle, shutil
from pathlib import Path

import pytest
import torch
import transformers as tf
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import nn

from bmlab.train.checkpoint import export_hf, load_weights, save
from bmlab.cook.cook import Cook
from bmlab.cook.report import load_cooked, save_cooked
from bmlab.kernels.exchange import Place, dequantize, foreign, refusal
from bmlab.kernels.layers import Int4Linear, Int8Embedding, Int8Linear, pack_linears
from bmlab.delta.lora import Lora
from bmlab.models.load import load
from bmlab.cook.moefy import MoEfy
from bmlab.cook.quantize import quantize
from bmlab.cook.structure import slice_model
from bmlab.cook.sparse24 import Sparse24, Sparse24Linear, pack24
from toys import FAMILIES, GQA, IDS, build, llama, logits

# what save_cooked wrote in format 2: weights in model.safetensors
OLD = Path(__file__).parents[1] / "fixtures/cooked_2"


def mixtral():
    torch.manual_seed(0)
    return tf.MixtralForCausalLM(tf.MixtralConfig(**GQA, num_local_experts=4)).eval()

def gpt_oss():
    "Experts with biases, stored as (inputs, outputs)"
    torch.manual_seed(0)
    sizes = dict(GQA, intermediate_size=64)
    experts = dict(num_local_experts=4, num_experts_per_tok=2)
    return tf.GptOssForCausalLM(tf.GptOssConfig(**sizes, **experts, head_dim=8, pad_token_id=0, eos_token_id=1)).eval()

def gemma3():
    "Word embeddings that scale their rows"
    torch.manual_seed(0)
    return tf.Gemma3ForCausalLM(tf.Gemma3TextConfig(**GQA, head_dim=8, pad_token_id=0)).eval()

def calib(): return [{"input_ids": IDS}]

def sparse(bits=None):
    model = llama()
    small = Cook(model, [Sparse24("*.mlp.*", score="magnitude")]).export()
    if bits:
        for m in [m for m in small.modules() if isinstance(m, Sparse24Linear)]: assert m.scale is None
        dense = Cook(llama(), [Sparse24("*.mlp.*", score="magnitude", packed=False)]).export()
        small = pack24(pack_linears(dense, modules="*.mlp.*"))
    return small

def without_attention():
    model = llama()
    slice_model(model, {"model.layers.0.self_attn.o_proj": []})
    return model

KINDS = {
    "int8": (lambda: pack_linears(llama()), "Int8Linear"),
    "int4": (lambda: pack_linears(llama(intermediate_size=64), 4, group_size=32), "Int4Linear"),
    "in groups": (lambda: quantize(llama(intermediate_size=64), calib(), bits=8, group_size=32), "Int8GroupLinear"),
    "experts": (lambda: pack_linears(mixtral(), modules="experts"), "PackedStack"),
    "2:4": (sparse, "Sparse24Linear"),
    "2:4 int8": (lambda: sparse(8), "Sparse24Linear"),
    "MoEfied": (lambda: Cook(llama(intermediate_size=64), [MoEfy(experts=4, active=.5)], calib()).export(), "MoEMLP"),
    "no attention": (without_attention, "Absent"),
}


def theirs(folder): return tf.AutoModelForCausalLM.from_pretrained(folder).eval()

def ways(model, folder):
    "All ways to write files for transformers"
    return {"export_hf": lambda: export_hf(model, folder), "save(hf=True)": lambda: save(model, folder, hf=True),
            "save_pretrained": lambda: model.save_pretrained(folder)}


def refused(call, kind, folder):
    "The sentence with which a way refuses, after which nothing is written and what was there is as it was"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text("mine")
    with pytest.raises(ValueError) as e: call()
    assert [p.name for p in folder.iterdir()] == ["config.json"] and (folder / "config.json").read_text() == "mine"
    said = str(e.value)
    ways_out = "save_cooked(", "load_cooked", "export_hf(model, folder, format=", "dequantize("
    assert all(words in said for words in (kind, *ways_out, "layers.0"))
    return said


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_written_that_transformers_could_not_read(kind, tmp_path):
    build_it, name = KINDS[kind]
    model = build_it()
    for way, call in ways(model, tmp_path / "here").items():
        said = refused(call, name, tmp_path / "here")
        assert ("for load_weights" in said) == (way == "save(hf=True)")
        assert ("would stay" in said) == (name in ("MoEMLP", "Absent"))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["here"]  # no hidden folder beside it
    again = load_cooked(save_cooked(model, tmp_path / "cooked"))
    assert torch.equal(logits(again), logits(model)) and refusal(again) == refusal(model)
    refused(lambda: again.save_pretrained(tmp_path / "here"), name, tmp_path / "here")
    save(model, tmp_path / "own")
    load_weights(again, tmp_path / "own")  # its own checkpoints are as they were


def test_the_noise_that_it_was(tmp_path):
    "By the class's own files nothing packed comes back: what is refused now"
    model = pack_linears(llama())
    assert model.__dict__.pop("hf_quantizer") is not None
    state = {k: t.contiguous() for k, t in model.state_dict().items()}
    how = dict(config=copy.deepcopy(model.config), state_dict=state, output_loading_info=True)
    back, info = tf.LlamaForCausalLM.from_pretrained(None, **how)
    assert len(info["missing_keys"]) == 15 and (logits(back) - logits(model)).abs().max() > 0.01


def test_the_refusal_goes_where_the_model_goes(tmp_path):
    model, here = pack_linears(llama()), tmp_path / "here"
    twins = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), copy.deepcopy(model).to(torch.bfloat16)]
    for twin in (*twins, torch.compile(model), copy.deepcopy(model).train(), model.model):
        refused(lambda: twin.save_pretrained(here), "Int8Linear", here)
    torch.save(model, tmp_path / "whole.pt")
    refused(lambda: torch.load(tmp_path / "whole.pt", weights_only=False).save_pretrained(here), "Int8Linear", here)
    refused(lambda: sparse().save_pretrained(here), "Sparse24Linear", here)
    assert model.generate(IDS[:1], max_new_tokens=2, do_sample=False, pad_token_id=0).shape == (1, 10)


@pytest.mark.parametrize("how", ["a part of it", "by hand"])
def test_what_came_in_unseen_is_seen_when_it_is_saved(how, tmp_path):
    "A part that was packed alone, a layer that was put there: no weights are written"
    model = llama()
    if how == "a part of it": pack_linears(model.model.layers[1], modules="mlp.*")
    else: model.model.layers[0].mlp.up_proj = Int8Linear.from_float(model.model.layers[0].mlp.up_proj)
    with pytest.raises(ValueError, match="save_cooked"): model.save_pretrained(tmp_path / "a")
    assert not list((tmp_path / "a").glob("*.safetensors"))
    with pytest.raises(ValueError, match="save_cooked"): export_hf(model, tmp_path / "b")
    assert not (tmp_path / "b").exists()
    model.state_dict()  # asked by others it answers


def test_other_reasons_why_a_class_could_not_read_it(tmp_path):
    "Parametrized, of another size than the configuration says, a layer of one's own in between"
    named, sized, boxed = llama(), llama(), llama()
    nn.utils.parametrizations.weight_norm(named.model.layers[0].mlp.up_proj)
    sized.model.layers[0].mlp.up_proj = nn.Linear(32, 40, bias=False)
    boxed.lm_head = nn.Sequential(boxed.lm_head)
    lost = "model.layers.0.mlp.up_proj.weight (48, 32)", "here (40, 32)", "lm_head.weight (96, 32)"
    for model, lost in zip((named, sized, boxed), lost):
        for call in (lambda: export_hf(model, tmp_path / "a"), lambda: save(model, tmp_path / "a", hf=True)):
            with pytest.raises(ValueError, match="1 parameters that it does not hold") as e: call()
            assert lost in str(e.value) and not (tmp_path / "a").exists()
    grown = llama()
    grown.resize_token_embeddings(100)  # which the configuration knows
    assert torch.equal(logits(theirs(export_hf(grown, tmp_path / "grown"))), logits(grown))
    with pytest.raises(ValueError, match="no GGUF"): export_hf(llama(), tmp_path / "x.gguf")


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_is_written_in_float(name, tmp_path):
    "What is asked of a file is in the file of every family"
    model = build(name)
    again = type(model).from_pretrained(export_hf(model, tmp_path / "a")).eval()
    assert torch.equal(logits(again), logits(model))


# ---- back in float -----------------------------------------------------------------------------------------------
def kinds_of(model): return {n: type(m) for n, m in model.named_modules()}


def round_trip(make, pack, folder, error=1e-5):
    "Packed, in float again, written, and read by transformers: the logits of the packed model"
    before, model = make(), make()
    pack(model)
    want, found = logits(model).detach(), foreign(model)
    assert found
    assert dequantize(model) is model and foreign(model) == {} and "hf_quantizer" not in model.__dict__
    assert kinds_of(model) == kinds_of(before)
    assert {n: t.shape for n, t in model.state_dict().items()} == {n: t.shape for n, t in before.state_dict().items()}
    trainable = lambda m: {n: p.requires_grad for n, p in m.named_parameters()}  # tied ones are there once
    assert trainable(model) == trainable(before)
    assert (logits(model) - want).abs().max() <= error * want.abs().max()
    model.save_pretrained(folder / "theirs")
    export_hf(model, folder / "ours")
    for where in ("theirs", "ours"):
        again, info = type(model).from_pretrained(folder / where, output_loading_info=True)
        assert not any(info[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        assert torch.equal(logits(again.eval()), logits(model))
    return model


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_comes_back(name, bits, tmp_path):
    round_trip(lambda: build(name), lambda m: pack_linears(m, bits, group_size=32), tmp_path)


@pytest.mark.parametrize("make", [mixtral, gpt_oss, gemma3])
def test_experts_and_scaled_tables_come_back(make, tmp_path):
    for bits in (8, 4): round_trip(make, lambda m: pack_linears(m, bits, group_size=32), tmp_path)


def test_tied_and_loose_tables_come_back(tmp_path):
    model = round_trip(lambda: llama(tie_word_embeddings=True), pack_linears, tmp_path)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    loose = round_trip(lambda: llama(tie_word_embeddings=True), lambda m: pack_linears(m, modules="mlp.*"), tmp_path)
    assert loose.lm_head.weight is loose.model.embed_tokens.weight
    apart = dequantize(pack_linears(llama(tie_word_embeddings=True), embeddings=False))  # one table rounded, one not
    assert apart.lm_head.weight is not apart.model.embed_tokens.weight
    assert torch.equal(logits(theirs(export_hf(apart, tmp_path / "apart"))), logits(apart))


@pytest.mark.parametrize("bits", [None, 8])
def test_two_of_four_come_back(bits, tmp_path):
    model = sparse(bits)
    want, values = logits(model), {n: m.dequantize() for n, m in model.named_modules() if isinstance(m, Sparse24Linear)}
    dequantize(model)
    made = {n: model.get_submodule(n) for n in values}
    assert made and all(torch.equal(m.weight, values[n]) and type(m) is nn.Linear for n, m in made.items())
    assert (logits(theirs(export_hf(model, tmp_path / "a"))) - want).abs().max() < 1e-5
    gpt = Cook(build("gpt2"), [Sparse24("*.mlp.*", score="magnitude")]).export()  # a Conv1D's
    want = logits(gpt)
    assert (logits(dequantize(gpt)) - want).abs().max() < 1e-5
    assert type(gpt.transformer.h[0].mlp.c_fc) is tf.pytorch_utils.Conv1D
    dense = sparse()
    dense.apply(lambda m: m.arrange("dense") if isinstance(m, Sparse24Linear) else None)
    held = dense.model.layers[0].mlp.up_proj.matrix
    assert dequantize(dense).model.layers[0].mlp.up_proj.weight.data_ptr() != held.data_ptr()


def test_int8_in_groups_comes_back(tmp_path):
    round_trip(lambda: llama(intermediate_size=64), lambda m: quantize(m, calib(), bits=8, group_size=32), tmp_path)


@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16])
def test_dtype_and_what_goes_along(dtype, tmp_path):
    model = build("gpt2").bfloat16()
    pack_linears(model)
    biases, table = {n: p for n, p in model.named_parameters() if n.endswith("bias")}, model.transformer.wte
    codes = model.transformer.h[0].mlp.c_fc.dequantize(dtype or torch.bfloat16)
    model.train()
    model.transformer.h[0].eval()
    training = {n: m.training for n, m in model.named_modules()}
    dequantize(model, dtype)
    assert torch.equal(model.transformer.h[0].mlp.c_fc.weight, codes.t())
    assert model.transformer.wte.weight.dtype == (dtype or torch.bfloat16)
    assert all(p is biases[n] for n, p in model.named_parameters() if n in biases)
    assert {n: m.training for n, m in model.named_modules()} == training
    assert table.codes.dtype == torch.int8
    with pytest.raises(ValueError, match="dtype=torch.int8"): dequantize(model, torch.int8)
    assert dequantize(model) is model  # nothing is packed: nothing to do


def test_an_old_cooked_folder_comes_back_as_its_class(tmp_path):
    "Format 2 says nothing of classes; the configuration does"
    model = load_cooked(OLD)
    want = load_file(OLD / "expected.safetensors")["logits"]
    ids = torch.arange(8)[None]
    with torch.no_grad(): assert torch.allclose(model(ids).logits, want, atol=1e-5)
    assert type(model.transformer.h[0].attn.c_attn) is Int4Linear and type(model.transformer.wte) is Int8Embedding
    dequantize(model)
    assert type(model.transformer.h[0].attn.c_attn) is tf.pytorch_utils.Conv1D
    assert model.lm_head.weight is model.transformer.wte.weight
    again, new = theirs(export_hf(model, tmp_path / "a")), load_cooked(save_cooked(load_cooked(OLD), tmp_path / "new"))
    with torch.no_grad(): assert torch.allclose(again(ids).logits, want, atol=1e-4)
    with torch.no_grad(): assert torch.allclose(new(ids).logits, want, atol=1e-5)


def test_a_cut_conv1d_comes_back_from_a_cooked_folder(tmp_path):
    "Its numbers are those of its weight, whatever the configuration says"
    model = build("gpt2")
    slice_model(model, {"transformer.h.0.mlp.c_proj": list(range(64))})
    pack_linears(model)
    again = load_cooked(save_cooked(model, tmp_path / "a"))
    want = logits(again)
    dequantize(again)
    assert again.transformer.h[0].mlp.c_fc.nf == 64 and (logits(again) - want).abs().max() < 1e-5
    with pytest.raises(ValueError, match="that it does not hold"): export_hf(again, tmp_path / "b")


def test_what_is_refused_before_anything_changes():
    model = pack_linears(llama())
    before = kinds_of(model)
    d = Lora(model, modules="q_proj")
    with pytest.raises(ValueError, match="q_proj carries a delta; merge or detach it first"): dequantize(model)
    d.detach()
    handle = model.lm_head.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="lm_head has forward hooks"): dequantize(model)
    handle.remove()
    model.lm_head.forward = model.lm_head.forward
    with pytest.raises(ValueError, match="lm_head has a patched forward"): dequantize(model)
    del model.lm_head.forward
    assert kinds_of(model) == before
    with pytest.raises(ValueError, match="its dequantize\\(\\) gives the weight"): dequantize(model.lm_head)
    scaled = nn.Sequential(Int8Embedding(4, 8, multiplier=2.))
    with pytest.raises(ValueError, match="from_float"): dequantize(scaled)
    model.enable_input_require_grads()
    pack_linears(model, modules="embed_tokens")
    hooks = model.model.embed_tokens._forward_hooks
    assert len(hooks) == 1 and dequantize(model).model.embed_tokens._forward_hooks is hooks  # gradient checkpointing's


def test_layers_made_by_hand_and_on_meta():
    net = nn.Sequential(Int8Linear(8, 6), Int8Embedding(4, 8, padding_idx=1), nn.ReLU())
    dequantize(net)
    assert [type(m) for m in net] == [nn.Linear, nn.Embedding, nn.ReLU]
    assert net[1].padding_idx == 1 and net[0].bias is not None
    with torch.device("meta"): big = gemma3()
    sizes = lambda m: {n: t.shape for n, t in m.state_dict().items()}
    before = sizes(big)
    assert sizes(dequantize(pack_linears(big))) == before and big.lm_head.weight.is_meta
    shared = nn.ModuleDict({"a": (m := nn.Linear(8, 8)), "b": m})  # one module at two places
    dequantize(pack_linears(shared, modules="a"))
    assert shared["a"] is shared["b"] and type(shared["a"]) is nn.Linear


def test_a_place_keeps_no_weight():
    layer = Int8Linear.from_float(nn.Linear(64, 64))
    place = layer._place
    assert isinstance(place, Place) and place.buffers == {}
    assert not any(isinstance(v, torch.Tensor) for v in place.attributes.values())
    assert pickle.loads(pickle.dumps(layer))._place == copy.deepcopy(layer)._place == place


def test_transformers_own_way_there():
    model = pack_linears(llama())
    want = logits(model)
    assert model.dequantize() is model and (logits(model) - want).abs().max() < 1e-5 and refusal(model) is None
    with pytest.raises(ValueError): model.dequantize()  # its own words: nothing is quantized


# ---- adapters alone ----------------------------------------------------------------------------------------------
@torch.no_grad()
def test_adapters_on_a_packed_base_are_saved(tmp_path):
    peft = pytest.importorskip("peft")
    base = lambda: pack_linears(llama(), modules="mlp.*")
    how = dict(r=2, target_modules=["q_proj"], init_lora_weights=False)
    around = peft.get_peft_model(base(), peft.LoraConfig(**how))
    around.save_pretrained(tmp_path / "peft")
    again = peft.PeftModel.from_pretrained(base(), tmp_path / "peft").eval()
    assert torch.equal(logits(again), logits(around.eval()))
    merged = around.merge_and_unload()
    refused(lambda: merged.save_pretrained(tmp_path / "here"), "Int8Linear", tmp_path / "here")
    inside = base()
    inside.add_adapter(peft.LoraConfig(**how))
    inside.save_pretrained(tmp_path / "inside")
    assert [p.name for p in (tmp_path / "inside").glob("*.safetensors")] == ["adapter_model.safetensors"]
    other = base()
    other.load_adapter(str(tmp_path / "inside"))
    assert torch.equal(logits(other), logits(inside))
    ours = pack_linears(llama())
    d = Lora(ours, modules="q_proj")
    d.save(tmp_path / "ours")
    fresh = pack_linears(llama())
    Lora.load(tmp_path / "ours", fresh)
    assert torch.equal(logits(fresh), logits(ours))
    refused(lambda: ours.save_pretrained(tmp_path / "here"), "by their own save()", tmp_path / "here")


def test_a_trainer_saves_adapters_and_refuses_the_rest(tmp_path):
    peft = pytest.importorskip("peft")
    rows = [{"input_ids": r, "labels": r} for r in IDS]
    how = dict(per_device_train_batch_size=1, max_steps=2, save_steps=1, report_to=[], use_cpu=True, disable_tqdm=True)
    model = peft.get_peft_model(pack_linears(llama(), modules="mlp.*"), peft.LoraConfig(r=2, target_modules=["q_proj"]))
    tf.Trainer(model, tf.TrainingArguments(str(tmp_path / "a"), **how), train_dataset=rows).train()
    assert (tmp_path / "a/checkpoint-2/adapter_model.safetensors").is_file()
    whole = pack_linears(llama(), modules="mlp.*")
    alone = tf.TrainingArguments(str(tmp_path / "b"), **how | {"save_strategy": "no"})
    trainer = tf.Trainer(whole, alone, train_dataset=rows)
    trainer.train()
    with pytest.raises(ValueError, match="save_cooked"): trainer.save_model(str(tmp_path / "c"))
    dequantize(whole)
    trainer.save_model(str(tmp_path / "c"))
    assert torch.equal(logits(theirs(tmp_path / "c")), logits(whole.eval()))


# ---- cooked folders ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("packed", [True, False])
def test_from_pretrained_refuses_a_cooked_folder(packed, tmp_path):
    words = Tokenizer(WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>"))
    tok = tf.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>")
    model = pack_linears(llama()) if packed else llama()
    save_cooked(model, tmp_path, tok)
    for cls in (tf.AutoModelForCausalLM, tf.AutoModel, tf.LlamaForCausalLM):
        for options in ({}, {"ignore_mismatched_sizes": True}, {"use_safetensors": True}, {"local_files_only": True}):
            with pytest.raises(ValueError, match="load_cooked"): cls.from_pretrained(tmp_path, **options)
    assert torch.equal(logits(load(tmp_path, device="cpu")[0]), logits(model))         # the house's own door opens it
    assert tf.AutoConfig.from_pretrained(tmp_path).hidden_size == 32
    assert tf.AutoTokenizer.from_pretrained(tmp_path)("a").input_ids == [0]
    again = load_cooked(tmp_path)
    assert torch.equal(logits(again), logits(model))
    assert again.config.to_dict() == model.config.to_dict() | {"architectures": ["LlamaForCausalLM"]}
    text = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(text.replace("transformers_weights", "another_word"))
    with pytest.raises(OSError, match="no file named model.safetensors"): theirs(tmp_path)


def test_a_cooked_folder_replaces_and_is_replaced(tmp_path):
    shutil.copytree(OLD, tmp_path / "a")
    model = load_cooked(tmp_path / "a")
    save_cooked(model, tmp_path / "a")
    assert not (tmp_path / "a/model.safetensors").exists()  # which from_pretrained would read as noise
    export_hf(dequantize(load_cooked(tmp_path / "a")), tmp_path / "a")
    assert not list((tmp_path / "a").glob("cooked.*"))
    ids = torch.arange(8)[None]
    assert torch.allclose(load(tmp_path / "a", device="cpu")[0](ids).logits, model(ids).logits, atol=1e-4)


def test_floats_that_came_back_part_by_part(tmp_path):
    model = pack_linears(llama(), exclude="lm_head")
    dequantize(model.model)
    with pytest.raises(ValueError, match=r"call dequantize\(model\) on the whole"): model.save_pretrained(tmp_path)
    dequantize(model).save_pretrained(tmp_path)
    with torch.no_grad(): assert torch.equal(logits(type(model).from_pretrained(tmp_path)), logits(model))
    with pytest.raises(ValueError, match="a floating dtype"): dequantize(model, "float16")

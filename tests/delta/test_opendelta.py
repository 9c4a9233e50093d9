"What users of OpenDelta 0.3.2 write and what goes wrong there: each known defect, as a test of what happens here."
import copy, importlib, pickle

import pytest
import torch
from torch import nn

from bmlab.core import count, resolve, set_seed
from bmlab.delta.delta import Delta, deltas
from fresh import fresh_python

TINY = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4, vocab_size=99)
IDS = torch.arange(12).view(2, 6)


def bert(cls="BertForMaskedLM", **kw):
    import transformers as tf
    set_seed(0)
    return getattr(tf, cls)(tf.BertConfig(**TINY, **kw)).eval()


def gpt2():
    import transformers as tf
    set_seed(0)
    return tf.GPT2LMHeadModel(tf.GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=99)).eval()


def logits(model, ids=IDS):
    with torch.no_grad(): return model(ids).logits


def method(path):
    module, _, cls = path.partition(":")
    return getattr(importlib.import_module(f"bmlab.delta.{module}"), cls)


INSERTED = [
    "lora:Lora",
    "adapter:Adapter",
    "adapter:ParallelAdapter",
    "adapter:LowRankAdapter",
    "adapter:Compacter",
    "vectors:BitFit",
    "vectors:IA3",
    "vectors:LayerNormTuning",
]
EIGHT = [*INSERTED[:6], "prefix:Prefix", "soft:SoftPrompt"]     # OpenDelta's eight methods


def made(path, model, **kw):
    if path.endswith("Compacter") or path.endswith("LowRankAdapter"): kw = {"reduction_factor": 4, **kw}
    return method(path)(model, **kw)


def stirred(d, by=0.1):
    with torch.no_grad():
        for p in d.parameters(): p += by * torch.randn_like(p)
    return d


# ---- how it is used

def test_three_lines_from_full_tuning_to_delta_tuning():
    from bmlab.delta.lora import Lora
    model, state = bert(), None
    state = copy.deepcopy(model.state_dict())
    delta = Lora(model, r=8)                                     # 1
    delta.freeze()                                               # 2
    opt = torch.optim.AdamW(delta.trainable(), lr=1e-2)          # 3: instead of model.parameters()
    losses = []
    for _ in range(5):
        loss = model(IDS, labels=IDS).loss
        loss.backward()
        opt.step()
        opt.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    delta.detach()
    assert all(torch.equal(state[k], v) for k, v in model.state_dict().items())


def test_sites_in_any_layer_of_bert_large():
    "`LoraModel(backbone_model, rank=8, modified_modules=[…])`, on meta"
    import transformers as tf
    from bmlab.delta.lora import Lora
    with torch.device("meta"):
        model = tf.BertModel(
            tf.BertConfig(
                hidden_size=1024, intermediate_size=4096, num_hidden_layers=24, num_attention_heads=16, vocab_size=28996
            )
        )
    d = Lora(model, r=8, modules=["20.attention.output.dense", "23.attention.self.value"])
    assert list(d.sites) == ["encoder.layer.20.attention.output.dense", "encoder.layer.23.attention.self.value"]
    assert d.count().delta == 2 * 8 * (1024 + 1024)


def test_addresses_as_in_opendelta():
    "A name's end at a dot; [r] is an expression that starts at a dot and ends at the end"
    from bmlab.delta.lora import Lora
    model = bert()
    assert (
        len(resolve(model, "self.value")) == 3
        and len(resolve(model, "[r]layer\\.[0-1]\\.attention\\.self\\.(query|value)")) == 4
    )
    with pytest.raises(LookupError): resolve(model, "elf.value")
    import transformers as tf
    with torch.device("meta"): deep = tf.BertModel(tf.BertConfig(**TINY | dict(num_hidden_layers=12)))
    # not layer 10
    assert list(resolve(deep, "[r][0-5]\\.attention")) == [f"encoder.layer.{i}.attention" for i in range(6)]
    assert len(Lora(model, modules="[r]layer\\.[0-1]\\.attention\\.self\\.query").sites) == 2


# ---- 1: the import

def test_imports_without_what_opendelta_needs():
    "No web server, hub client or viewer, and neither peft nor deepspeed"
    names = [
        "peft",
        "deepspeed",
        "bigmodelvis",
        "web",
        "DeltaCenter",
        "sqlitedict",
        "anywidget",
        "ipywidgets",
        "matplotlib",
    ]
    modules = ["delta", "lora", "hub", "adapter", "vectors", "soft", "prefix"]
    code = (
        f"import sys\nfor n in {names!r}: sys.modules[n] = None\nimport "
        f"{', '.join('bmlab.delta.' + m for m in modules)}"
    )
    fresh_python(code, check=True)


# ---- 2, 3, 4: attach and detach

@pytest.mark.parametrize("path", EIGHT)
def test_attach_after_detach(path):
    "OpenDelta #76: NotImplementedError for every inserted delta, and for BitFit"
    model = bert()
    plain, state = logits(model), copy.deepcopy(model.state_dict())
    d = stirred(made(path, model))
    tuned = logits(model)
    for _ in range(2):
        d.detach()
        assert (
            torch.equal(logits(model), plain)
            and list(model.state_dict()) == list(state)
            and all(torch.equal(state[k], v) for k, v in model.state_dict().items())
        )
        d.attach()
        assert torch.equal(logits(model), tuned)


@pytest.mark.parametrize("path", EIGHT)
def test_detached_in_any_order(path):
    "OpenDelta: AttributeError unless the last goes first"
    model = bert()
    plain = logits(model)
    a, b, c = (stirred(made(p, model)) for p in (path, "lora:Lora", path))
    both = logits(model)
    a.detach()
    c.detach()
    b.detach()
    assert torch.equal(logits(model), plain)
    for d in (a, b, c): d.attach()
    assert torch.equal(logits(model), both)


# ---- 5: ranks of the low-rank adapter

@pytest.mark.parametrize("r", [1, 2, 3, 4])
def test_low_rank_adapter_of_any_rank(r):
    "OpenDelta multiplies its factors element by element and crashes from rank 2 on"
    model, d, m = bert(), 64, 16
    low = method("adapter:LowRankAdapter")(model, r=r, reduction_factor=4)
    assert low.count().delta == len(low.sites) * (2 * r * (d + m) + m + d)
    stirred(low)
    assert logits(model).isfinite().all()


# ---- 6, 7: what is found

@pytest.mark.parametrize("path", INSERTED)
def test_exclude_is_heeded(path):
    "OpenDelta's LoraModel(exclude_modules=…) does nothing"
    model = bert()
    every, less = made(path, model), made(path, model, exclude="encoder.layer.1")
    assert (
        any("layer.1." in n for n in every.sites)
        and not any("layer.1." in n for n in less.sites)
        and len(less.sites) < len(every.sites)
    )


@pytest.mark.parametrize("path", EIGHT)
def test_defaults_find_something_on_gpt2(path):
    "OpenDelta's default LoRA adds nothing to GPT-2, and says nothing"
    model = gpt2()
    d = stirred(made(path, model))
    assert len(d.sites) > 0 and d.count().delta > 0
    with d.off(): plain = logits(model)
    assert not torch.equal(logits(model), plain)


def test_conv1d_by_name():
    "OpenDelta: 'Conv1D' object has no attribute 'in_features'"
    from bmlab.delta.lora import Lora
    d = Lora(gpt2(), r=4, modules=["c_attn"])
    assert d.count().delta == 2 * 4 * (64 + 192)


@pytest.mark.parametrize("path", INSERTED)
def test_a_typo_is_an_error(path):
    "OpenDelta goes on with no deltas"
    model = bert()
    classes = [type(m) for m in model.modules()]
    with pytest.raises(LookupError, match="'value'"): made(path, model, modules="valeu")
    assert [type(m) for m in model.modules()] == classes and len(deltas(model)) == 0


# ---- 8: freezing

def test_freeze_keeps_what_it_is_told():
    "OpenDelta freezes lm_head though told not to, and the deltas too unless 'deltas' is named"
    from bmlab.delta.lora import Lora
    import transformers as tf
    model = tf.LlamaForCausalLM(tf.LlamaConfig(**TINY, num_key_value_heads=2))
    d = Lora(model).freeze(keep=["lm_head", "norm"])
    tunable = {n for n, p in model.named_parameters() if p.requires_grad}
    assert {"lm_head.weight", "model.norm.weight"} <= tunable and all(
        "_deltas" in n or n in ("lm_head.weight", "model.norm.weight") for n in tunable
    )
    d.freeze()
    d.freeze(keep=None)  # again and again, without a warning
    assert (
        all("_deltas" in n for n, p in model.named_parameters() if p.requires_grad)
        and count(model).trainable == d.count().delta > 0
    )
    d.unfreeze()
    assert all(p.requires_grad for n, p in model.named_parameters())


@pytest.mark.parametrize("cls, head", [
    ("BertForSequenceClassification", ("classifier",)),
    ("BertForTokenClassification", ("classifier",)),
    ("BertForQuestionAnswering", ("qa_outputs",)),
    ("BertForMultipleChoice", ("classifier",)),
    ("BertForMaskedLM", ()),
    ("BertModel", ()),
])
def test_a_new_head_stays_tunable(cls, head):
    "OpenDelta freezes a classifier that nothing has trained yet"
    from bmlab.delta.lora import Lora
    d = Lora(bert(cls)).freeze()
    assert d.kept == head and all(h in repr(d) for h in head)


def test_every_task_head_of_other_families():
    import transformers as tf
    from bmlab.delta.lora import Lora
    gpt, l = (
        dict(n_embd=32, n_layer=1, n_head=4, vocab_size=99),
        dict(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4),
    )
    t5 = tf.T5Config(d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4, vocab_size=99)
    distil = tf.DistilBertConfig(dim=32, hidden_dim=64, n_layers=1, n_heads=4, vocab_size=99)
    heads = [
        (tf.RobertaForSequenceClassification(tf.RobertaConfig(**l, vocab_size=99)), ("classifier",)),
        (tf.DistilBertForSequenceClassification(distil), ("pre_classifier", "classifier")),
        (tf.GPT2ForSequenceClassification(tf.GPT2Config(**gpt)), ("score",)),
        (tf.LlamaForSequenceClassification(tf.LlamaConfig(**l, vocab_size=99)), ("score",)),
        (tf.T5ForSequenceClassification(t5), ("classification_head",)),
        (tf.T5ForConditionalGeneration(t5), ()),
        (tf.GPT2LMHeadModel(tf.GPT2Config(**gpt)), ()),
        (tf.ViTForImageClassification(tf.ViTConfig(**l, image_size=32, patch_size=8)), ("classifier",)),
    ]
    for model, kept in heads:
        assert Lora(model).freeze().kept == kept, type(model).__name__


def test_a_head_trained_along_is_saved_with_the_delta(tmp_path):
    "…and comes back beside a backbone whose own head stays as it is; PEFT reads it, and is read"
    import peft
    from bmlab.delta.lora import Lora
    model = bert("BertForSequenceClassification")
    base = copy.deepcopy(model)
    plain = logits(base)
    d = Lora(model, r=4).freeze()
    opt = torch.optim.AdamW(d.trainable(), lr=1e-2)
    for _ in range(3):
        model(IDS, labels=torch.tensor([0, 1])).loss.backward()
        opt.step()
        opt.zero_grad()
    d.unfreeze().save(tmp_path / "ours")
    assert not torch.equal(model.classifier.weight, base.classifier.weight)
    other, theirs = copy.deepcopy(base), peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / "ours").eval()
    back = Delta.load(tmp_path / "ours", other, name="zh")
    for got in (logits(other), logits(theirs)): torch.testing.assert_close(got, logits(model), atol=1e-6, rtol=0)
    with back.off(): assert torch.equal(logits(other), plain)
    for twin in (copy.deepcopy(other), pickle.loads(pickle.dumps(other))):
        assert torch.equal(logits(twin), logits(other))
    with back.merge(): torch.testing.assert_close(logits(other), logits(model), atol=1e-5, rtol=0)
    assert back.freeze().kept == () and {id(p) for p in back.trainable()} >= {
        id(p) for p in back.heads["classifier"].parameters()
    }
    back.save(tmp_path / "again")
    again = copy.deepcopy(base)
    Delta.load(tmp_path / "again", again)
    assert torch.equal(logits(again), logits(other))
    back.detach()
    assert torch.equal(logits(other), plain) and list(other.state_dict()) == list(base.state_dict())
    theirs = peft.get_peft_model(
        copy.deepcopy(base),
        peft.LoraConfig(task_type="SEQ_CLS", init_lora_weights=False, target_modules=["query", "value"]),
    ).eval()
    for p in theirs.parameters():
        if p.requires_grad: nn.init.normal_(p, std=0.1)
    theirs.save_pretrained(tmp_path / "peft")
    Delta.load(tmp_path / "peft", other)
    torch.testing.assert_close(logits(other), logits(theirs), atol=1e-6, rtol=0)


def test_a_tied_head_that_is_kept_takes_its_embedding_along(tmp_path):
    from bmlab.delta.lora import Lora
    model = gpt2()
    d = stirred(Lora(model, r=4)).freeze(keep="lm_head")
    with torch.no_grad(): model.lm_head.weight += 0.1
    d.save(tmp_path)
    other = gpt2()
    back = Delta.load(tmp_path, other)
    assert torch.equal(logits(other), logits(model)) and sorted(back.heads) == ["lm_head", "transformer.wte"]
    plain = gpt2()
    back.detach()
    assert torch.equal(logits(other), logits(plain))


def test_freezing_holds_no_old_weights():
    "Sharding exchanges parameters: what freeze remembers are names"
    import gc, weakref
    from bmlab.delta.lora import Lora
    model = bert("BertForSequenceClassification")
    d = Lora(model).freeze()
    old = weakref.ref(model.classifier.weight), weakref.ref(model.bert.embeddings.word_embeddings.weight)
    for m in (model.classifier, model.bert.embeddings.word_embeddings):
        m.weight = nn.Parameter(m.weight.detach().clone(), m.weight.requires_grad)
    gc.collect()
    assert [r() for r in old] == [None, None] and any(p is model.classifier.weight for p in d.trainable())


def test_state_dict_is_left_alone():
    "OpenDelta's freeze makes every later state_dict() return the tunable part only"
    from bmlab.delta.lora import Lora
    model = bert()
    keys = list(model.state_dict())
    Lora(model).freeze()
    assert set(keys) <= set(model.state_dict()) and "state_dict" not in model.__dict__


# ---- 9: copies

@pytest.mark.parametrize("path", EIGHT)
def test_copies_run_their_own_weights(path):
    "OpenDelta: a deep copy calls the original's weights, and pickling fails"
    model = bert()
    d = stirred(made(path, model))
    tuned = logits(model)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(logits(twin), tuned)
        with torch.no_grad():
            for n, p in twin.named_parameters():
                if "_deltas" not in n: p.zero_()
        assert not torch.equal(logits(twin), tuned) and torch.equal(logits(model), tuned)
        assert deltas(twin)[d.name].model is twin


# ---- 10: prefix and prompt on today's transformers

@pytest.mark.parametrize("path", ["prefix:Prefix", "soft:SoftPrompt"])
def test_prompts_generate(path):
    "OpenDelta hands over tuples for the cache, which transformers 5 has no more"
    model = gpt2()
    stirred(made(path, model), by=1.)
    with torch.no_grad():
        cached, plain = (
            model.generate(IDS, max_new_tokens=5, do_sample=False, use_cache=c, pad_token_id=0) for c in (True, False)
        )
    assert torch.equal(cached, plain) and cached.shape[1] == IDS.shape[1] + 5


# ---- 11: the start

@pytest.mark.parametrize("path", INSERTED)
def test_nothing_changes_at_the_start(path):
    "OpenDelta's LowRankAdapter, ParallelAdapter and Adapter change the logits before any training"
    model = bert()
    plain = logits(model)
    made(path, model)
    assert torch.equal(logits(model), plain)


# ---- 12 is a row of test_delta_matrix.py: Compacter on sharded models

# ---- 13: moving

@pytest.mark.parametrize("path", EIGHT)
def test_parameters_stay_registered_when_the_model_moves(path):
    "OpenDelta's SoftPrompt loses its parameter on a GPU"
    model = bert()
    d = made(path, model)
    n = d.count().delta
    model.to(torch.float64)
    own = {id(p) for k, p in model.named_parameters() if "_deltas" in k}
    assert all(id(p) in own and p.dtype == torch.float64 for p in d.parameters()) and d.count().delta == n
    assert logits(model).dtype == torch.float64
    model.to("meta")
    assert {p.device.type for p in d.parameters()} == {"meta"}


# ---- what OpenDelta announced

@pytest.mark.parametrize("path", INSERTED)
def test_shared_delta(path):
    "One parameter set in all layers"
    model = bert()
    own, shared = made(path, model).detach(), made(path, model, share="places")
    inside = sum(p.numel() for n, site in own.sites.items() if ".layer." in n for p in site.parameters())
    assert len(shared.sites) == len(own.sites) and shared.count().delta == own.count().delta - inside * 2 // 3


@pytest.mark.parametrize("path", INSERTED)
def test_shared_delta_is_saved_once(path, tmp_path):
    model = bert()
    d = stirred(made(path, model, share="places"))
    d.save(tmp_path / "once")
    own = made(path, bert())
    own.save(tmp_path / "own")
    sizes = [(tmp_path / k / "adapter_model.safetensors").stat().st_size for k in ("once", "own")]
    # PEFT's file of this method holds whole norms, which are each layer's own
    absolute = path.endswith("LayerNormTuning")
    assert absolute or sizes[0] < 0.6 * sizes[1]
    other = bert()
    back = Delta.load(tmp_path / "once", other)
    torch.testing.assert_close(logits(other), logits(model), atol=1e-6 if absolute else 0, rtol=0)
    assert back.count().delta == d.count().delta


def test_shared_lora_reaches_peft_when_spread(tmp_path):
    import peft
    from bmlab.delta.lora import Lora
    model = bert()
    d = stirred(Lora(model, r=4, share="layers"))
    # refuses instead of filling one site of six
    with pytest.raises(Exception): peft.PeftModel.from_pretrained(bert(), d.save(tmp_path / "once"))
    theirs = peft.PeftModel.from_pretrained(bert(), d.save(tmp_path / "spread", spread=True)).eval()
    torch.testing.assert_close(logits(theirs), logits(model), atol=1e-6, rtol=0)


def llama(**kw):
    import transformers as tf
    set_seed(0)
    config = tf.LlamaConfig(**TINY, num_key_value_heads=2, tie_word_embeddings=False, **kw)
    return tf.LlamaForCausalLM(config).eval()


def test_a_second_lora_model_adds_to_the_first():
    "OpenDelta adds both, and calls the second one's tensors lora_1"
    from bmlab.opendelta import LoraModel
    model, x = llama(), torch.randn(2, 64)
    layer = model.get_submodule("model.layers.0.self_attn.q_proj")
    first = LoraModel(model, lora_r=4, modified_modules=["q_proj"])
    second = LoraModel(model, lora_r=2, modified_modules=["q_proj", "v_proj"])
    named = {n: p for n, p in layer.named_parameters() if n != "weight"}
    with torch.no_grad():
        for p in named.values(): p.normal_()
    A, B, C, D = named.values()
    expected = x @ layer.weight.T + (x @ A.T @ B.T) * (16 / 4) + (x @ C.T @ D.T) * (16 / 2)
    assert torch.allclose(layer(x), expected, atol=1e-4)
    second.freeze_module()                                                    # "deltas" are those of both
    assert all(p.requires_grad for d in (first, second) for p in d.parameters())
    state = model.state_dict()
    own = {n.split("q_proj.")[1] for n in state if ".0.self_attn.q_proj" in n}
    assert own == {"lora.lora_A", "lora.lora_B", "lora_1.lora_A", "lora_1.lora_B"} and len(state) == 3 * 3 * 2
    other, before = llama(), logits(model)
    LoraModel(other, lora_r=4, modified_modules=["q_proj"])
    LoraModel(other, lora_r=2, modified_modules=["q_proj", "v_proj"])
    assert not other.load_state_dict(state, strict=False).unexpected_keys
    assert torch.equal(logits(other), before)


def test_a_later_freeze_decides_what_is_saved():
    from bmlab.opendelta import LoraModel
    model = llama()
    delta = LoraModel(model, modified_modules=["layers[0].self_attn.q_proj"])
    tensors = [f"model.layers.0.self_attn.q_proj.lora.lora_{k}" for k in "AB"]
    delta.freeze_module()
    assert list(model.state_dict()) == tensors
    model.lm_head.weight.requires_grad_(True)
    delta.freeze_module(exclude=["deltas", "lm_head"])
    assert list(model.state_dict()) == [*tensors, "lm_head.weight"]


def test_freezing_by_opendeltas_words():
    "Nothing but what is named, an empty list too; a word may name parameters of modules that hold no others"
    from bmlab.delta.opendelta import AutoDeltaModel
    from bmlab.opendelta import LoraModel
    tuned = lambda model: {n for n, p in model.named_parameters() if p.requires_grad}
    model = llama()
    LoraModel(model, modified_modules=["q_proj"]).freeze_module(exclude=[])
    assert not tuned(model)
    model = llama(attention_bias=True)
    LoraModel(model, modified_modules=["layers[0].self_attn.q_proj"]).freeze_module(exclude=["bias"])
    biases = {n for n in tuned(model) if n.endswith(".bias")}
    assert biases == tuned(model) and len(biases) == 3 * 4 - 1 and "model.layers.0.self_attn.q_proj.bias" not in biases
    model = llama(attention_bias=True)
    words = dict(delta_type="lora", modified_modules=["q_proj"], unfrozen_modules=["deltas", "bias"])
    AutoDeltaModel.from_config(words, model).freeze()
    plain = {n for n in tuned(model) if "_deltas" not in n}
    assert plain == {f"model.layers.{i}.self_attn.{k}_proj.bias" for i in range(3) for k in "kvo"}
    with pytest.raises(LookupError, match="'biass' matches no module"):
        LoraModel(llama(), modified_modules=["q_proj"]).freeze_module(exclude=["biass"])


def test_the_head_is_left_out_unless_nothing_is():
    "exclude_modules: None means lm_head there, and [] nothing"
    from bmlab.delta.opendelta import AutoDeltaModel
    from bmlab.opendelta import LoraModel
    named = ["layers[0].self_attn.q_proj", "lm_head"]
    first, head = "model.layers.0.self_attn.q_proj", "lm_head"
    assert list(LoraModel(llama(), modified_modules=named).sites) == [first]
    assert list(LoraModel(llama(), modified_modules=named, exclude_modules=[]).sites) == [first, head]
    with pytest.raises(LookupError, match=r"exclude_modules=\[\]"): LoraModel(llama(), modified_modules=["lm_head"])
    words = dict(delta_type="lora", modified_modules=named)
    assert list(AutoDeltaModel.from_config(words, llama()).sites) == [first]
    assert list(AutoDeltaModel.from_config(words | dict(exclude_modules=[]), llama()).sites) == [first, head]


def test_a_site_does_not_take_anothers_place():
    from bmlab.delta.site import Site, attach_site
    layer = nn.Linear(2, 2)
    attach_site(layer, "own", Site())
    with pytest.raises(ValueError, match="carries a delta of that name"): attach_site(layer, "own", Site())

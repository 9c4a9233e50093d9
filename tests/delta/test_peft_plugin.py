"Every method of peft behind PeftDelta, with peft itself as the oracle."
import copy, os, pickle
from unittest.mock import patch

import pytest
import torch

from bmlab.train.processes import run_ranks
from bmlab.delta.delta import deltas
from bmlab.delta.lora import Lora
from bmlab.delta.peft_plugin import PeftDelta
from toys import llama, moved, tune

peft = pytest.importorskip("peft")
QV = {"target_modules": ["q_proj", "v_proj"]}
METHODS = {  # peft_type: further fields
    "LORA": dict(r=4, use_dora=True),
    "BEFT": {},
    "BOFT": {},
    "C3A": dict(block_size=8),
    "DEFT": {},
    "DELORA": {},
    "FOURIERFT": {},
    "FROD": {},
    "GLORA": {},
    "GRALORA": {},
    "HIRA": {},
    "HRA": {},
    "IA3": dict(feedforward_modules=[]),
    "LILY": {},
    "LN_TUNING": dict(target_modules=["input_layernorm"]),
    "LOHA": {},
    "LOKR": {},
    "MISS": dict(r=4),
    "OFT": {},
    "PEANUT": {},
    "PSOFT": {},
    "PVERA": {},
    "RANDLORA": dict(r=4),
    "ROAD": dict(group_size=8),
    "SHIRA": dict(r=4),
    "SUPERTUNING": {},
    "TINYLORA": {},
    "TRAINABLE_TOKENS": dict(target_modules=["embed_tokens"], token_indices=[1, 2]),
    "UNILORA": {},
    "VBLORA": dict(vector_length=4, num_vectors=64, topk=2),
    "VERA": {},
    "WAVEFT": dict(n_frequency=16),
}
REFUSED = {
    "ADALORA": "a schedule of ranks",
    "POLY": "lost",
    "OSF": "hangs hooks",
    "PROMPT_TUNING": "SoftPrompt",
    "PREFIX_TUNING": "Prefix",
    "P_TUNING": "PTuning",
    "ADAPTION_PROMPT": "no layers",
}
IDS = torch.arange(12).view(2, 6)


@pytest.fixture(autouse=True)
def same_environment():
    "Where BOFT's kernel cannot be built, PEFT leaves CXX=gcc, and what inductor compiles later would lack libstdc++"
    with patch.dict(os.environ): yield


def logits(model):
    with torch.no_grad(): return model(input_ids=IDS).logits


def make(model, kind, **kw):
    if kind not in peft.PEFT_TYPE_TO_CONFIG_MAPPING: pytest.skip(f"peft {peft.__version__} has no {kind}")
    return PeftDelta(model, {"peft_type": kind, **QV, **METHODS.get(kind, {}), **kw})


def whole(model, d, folder):
    "All that a delta does, and that the backbone is as it was"
    state, classes, plain = copy.deepcopy(model.state_dict()), [type(m) for m in model.modules()], logits(model)
    d = moved(d(model))
    tuned = logits(model)
    assert (tuned - plain).abs().max() > 1e-3
    with d.off(): assert torch.equal(logits(model), plain)
    d.save(folder / "ours")
    def backbone():
        fresh = type(model)(model.config).eval()
        fresh.load_state_dict(state)
        return fresh
    theirs = peft.PeftModel.from_pretrained(backbone(), folder / "ours").eval()
    torch.testing.assert_close(logits(theirs), tuned, atol=1e-6, rtol=0)
    theirs.save_pretrained(folder / "theirs")
    for name in ("ours", "theirs"):
        other = backbone()
        PeftDelta.load(folder / name, other, name="again")
        torch.testing.assert_close(logits(other), tuned, atol=1e-6, rtol=0)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(logits(twin), tuned)
        deltas(twin)[d.name].detach()
        assert torch.equal(logits(twin), plain) and torch.equal(logits(model), tuned)
    d.freeze()
    assert all(p.requires_grad for p in d.trainable()) and d.count().trainable == sum(p.numel() for p in d.trainable())
    model(input_ids=IDS, labels=IDS).loss.backward()
    assert all(p.grad is not None for p in d.trainable())
    torch.optim.AdamW(d.param_groups(1e-2)).step()
    assert not torch.equal(logits(model), tuned)
    d.unfreeze().detach()
    assert (
        torch.equal(logits(model), plain)
        and [type(m) for m in model.modules()] == classes
        and list(model.state_dict()) == list(state)
    )
    assert all(torch.equal(state[k], v) for k, v in model.state_dict().items())


@pytest.mark.parametrize("kind", ["LOHA", "VERA", "LN_TUNING"])
def test_methods(kind, tmp_path): whole(llama(), lambda m: make(m, kind), tmp_path)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", [k for k in METHODS if k not in ("LOHA", "VERA", "LN_TUNING")])
def test_more_methods(kind, tmp_path): whole(llama(), lambda m: make(m, kind), tmp_path)


def test_head_is_copied(tmp_path):
    "modules_to_save: a tuned copy of the head is a part of the delta"
    whole(llama(), lambda m: make(m, "LORA", use_dora=False, modules_to_save=["lm_head"]), tmp_path)


@pytest.mark.parametrize("kind", ["LOKR", "HRA", "IA3", "LN_TUNING", "ROAD"])
def test_merge(kind):
    model = llama(attention_bias=True)
    state = copy.deepcopy(model.state_dict())
    d = moved(make(model, kind))
    tuned = logits(model)
    with d.merge(): torch.testing.assert_close(logits(model), tuned, atol=1e-5, rtol=0)
    assert torch.equal(logits(model), tuned)
    d.detach()
    assert all(torch.equal(state[k], v) for k, v in model.state_dict().items())


@pytest.mark.parametrize("kind", REFUSED)
def test_refusals(kind):
    model = llama()
    plain, classes = logits(model), [type(m) for m in model.modules()]
    more = {
        "ADALORA": dict(total_step=10),
        "PROMPT_TUNING": dict(num_virtual_tokens=2),
        "PREFIX_TUNING": dict(num_virtual_tokens=2),
        "P_TUNING": dict(num_virtual_tokens=2),
        "ADAPTION_PROMPT": dict(adapter_len=2, adapter_layers=1),
    }.get(kind, {})
    fields = {"peft_type": kind, "task_type": "CAUSAL_LM", **more} | (
        {} if "TUNING" in kind or kind == "ADAPTION_PROMPT" else QV
    )
    with pytest.raises(ValueError, match=REFUSED[kind]): PeftDelta(model, fields)
    assert (
        torch.equal(logits(model), plain) and [type(m) for m in model.modules()] == classes and not list(deltas(model))
    )


@pytest.mark.parametrize("init", ["pissa", "pissa_niter_4", "olora"])
def test_backbone_is_never_moved(init):
    "Initialisations that write into the weight do it to a clone, and are refused"
    model = llama()
    state = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match="changes the weight"):
        make(model, "LORA", use_dora=False, init_lora_weights=init)
    assert all(torch.equal(state[k], v) for k, v in model.state_dict().items())


def test_in_any_order_with_others():
    model = llama()
    plain = logits(model)
    for order in ((0, 1, 2), (2, 1, 0), (1, 0, 2)):
        three = [moved(Lora(model, r=2, modules="*_proj")), moved(make(model, "LOHA")), moved(make(model, "LOKR"))]
        both = logits(model)
        for i in order: three[i].detach()
        assert torch.equal(logits(model), plain)
        for d in three: d.attach()
        assert torch.equal(logits(model), both)
        for d in three: deltas(model).forget(d.name)


def test_other_models(tmp_path):
    "Conv1D of GPT-2, embeddings of BERT, T5"
    import transformers as tf
    gpt2 = tf.GPT2LMHeadModel(tf.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=99)).eval()
    whole(
        gpt2,
        lambda m: PeftDelta(m, peft.IA3Config(target_modules=["c_attn"], feedforward_modules=[], fan_in_fan_out=True)),
        tmp_path / "gpt2",
    )
    bert = tf.BertForMaskedLM(
        tf.BertConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=99)
    ).eval()
    whole(bert, lambda m: PeftDelta(m, peft.LoHaConfig(r=2, target_modules=["query", "value"])), tmp_path / "bert")


def test_half_and_wide(tmp_path):
    "A bfloat16 backbone under a float32 file"
    model = llama()
    moved(make(model, "LOHA")).save(tmp_path)
    d = PeftDelta.load(tmp_path, llama().bfloat16())
    assert {p.dtype for p in d.parameters()} == {torch.float32} and logits(d.model).dtype == torch.bfloat16


def test_meta():
    "On a weightless model: counted, not run"
    with torch.device("meta"): model = llama()
    assert make(model, "LOHA", r=4).count().delta == 4 * 4 * 4 * 32


def two_ranks(zero, folder):
    import torch.distributed as dist
    from bmlab.train.sharding import shard
    r = dist.get_rank()
    alone = llama()
    tune(alone, moved(make(alone, "LOHA")).freeze(), IDS)
    model = llama()
    d = moved(make(model, "LOHA")).freeze()
    shard(model, zero=zero, dtype=None)
    tune(model, d, IDS[r:r + 1])
    d.save(folder)
    other = llama()
    PeftDelta.load(folder, other)
    return (logits(other) - logits(alone)).abs().max().item()


@pytest.mark.long
@pytest.mark.parametrize("zero", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_sharded(zero, tmp_path):
    "Two ranks equal one, and the file is whole"
    for diff in run_ranks(two_ranks, zero, str(tmp_path), timeout_s=90): assert diff < 1e-5

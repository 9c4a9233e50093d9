"Muon with its state on the host is torch's Muon"
import copy

import pytest
import torch
import torch.distributed as dist
import transformers as tf
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from bmlab.plan.training import plan_training
from bmlab.train.checkpoint import load_weights, save
from bmlab.train.muon import Muon, split_parameters
from bmlab.train.offload import AdamW
from bmlab.train.optim import Cosine, OptimManager
from bmlab.train.sharding import shard

IDS = torch.randint(0, 97, (3, 4, 16), generator=torch.Generator().manual_seed(0))


def llama(dtype=torch.float32):
    torch.manual_seed(0)
    config = tf.LlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=2)
    return tf.LlamaForCausalLM(config).to(dtype)


def train(model, opts, steps, clip=1.0, start=0, om=None):
    om = om or OptimManager(loss_scale=8, min_loss_scale=8, max_loss_scale=8, model=model)
    for o in opts: om.add_optimizer(o, Cosine(o, 0.02, 1, 50))
    for i in range(start, start + steps):
        om.zero_grad()
        om.backward(model(input_ids=IDS[i % 3], labels=IDS[i % 3]).loss)
        om.clip_grad_norm(clip)
        om.step()
    return om


@pytest.mark.parametrize("offload", [None, 0.4, 1.0])
@pytest.mark.parametrize("how", [
    {}, dict(nesterov=False, momentum=0.8), dict(adjust_lr_fn="match_rms_adamw", ns_steps=3, weight_decay=0.0)],
    ids=str)
def test_the_bits_are_torchs_in_fp32(offload, how):
    models = llama(), llama()
    matrices, rest = zip(*map(split_parameters, models))
    theirs = torch.optim.Muon(matrices[0], lr=0.02, **how), torch.optim.AdamW(rest[0], lr=0.02)
    ours = Muon(models[1], lr=0.02, offload=offload, **how), torch.optim.AdamW(rest[1], lr=0.02)
    for model, opts in zip(models, (theirs, ours)): train(model, opts, 4)
    for p, q in zip(*(m.parameters() for m in models)): assert torch.equal(p, q)
    for p, q in zip(*matrices):
        assert torch.equal(theirs[0].state[p]["momentum_buffer"], ours[0].state[q]["momentum_buffer"])
    assert len(ours[0].hosted) == {None: 0, 0.4: 9, 1.0: 21}[offload]


@pytest.mark.parametrize("offload", [0.0, 1.0])
def test_masters_are_torchs_fp32_weights_under_the_same_gradients(offload):
    w = nn.Parameter(torch.randn(24, 40, generator=torch.Generator().manual_seed(1)).bfloat16())
    wide = nn.Parameter(w.detach().float())
    ours, theirs = Muon([w], lr=1e-3, offload=offload), torch.optim.Muon([wide], lr=1e-3)
    draw = torch.Generator().manual_seed(2)
    for _ in range(6):
        w.grad = torch.randn(24, 40, generator=draw).bfloat16()
        wide.grad = w.grad.float()
        ours.step()
        theirs.step()
        assert torch.equal(ours.state[w]["master"], wide) and torch.equal(w, wide.bfloat16())
    with torch.no_grad(): w.mul_(2)                                  # (others write: a loaded file)
    with torch.no_grad(): wide.copy_(w.float())
    w.grad.zero_()
    wide.grad.zero_()
    ours.step()
    theirs.step()
    assert torch.equal(ours.state[w]["master"], wide)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_run_goes_on_from_its_checkpoint(tmp_path, dtype):
    def make(offload):
        model = llama(dtype)
        matrices, rest = split_parameters(model)
        return model, [Muon(matrices, lr=0.02, offload=offload), AdamW(rest, lr=0.02)]
    whole, opts = make(1.0)
    train(whole, opts, 6)
    first, opts = make(0.3)
    om = train(first, opts, 3)
    save(first, tmp_path / "run", step=3, manager=om)
    then, opts = make(1.0)
    om = train(then, opts, 0)
    load_weights(then, tmp_path / "run", manager=om)
    train(then, [], 3, start=3, om=om)
    for p, q in zip(whole.parameters(), then.parameters()): assert torch.equal(p, q)


def test_one_rank_of_fsdp_has_whole_matrices():
    model = shard(llama(), dtype=torch.bfloat16, memory_limit="1GiB")
    matrices, rest = split_parameters(model)
    assert isinstance(matrices[0], DTensor)
    opt = Muon(matrices, lr=0.02, offload=0.5)
    before = [p.to_local().clone() for p in matrices]
    train(model, [opt, AdamW(rest, lr=1e-3)], 2)
    assert not any(torch.equal(a, p.to_local()) for a, p in zip(before, matrices))


def test_several_ranks_are_refused_by_name():
    from torch.testing._internal.distributed.fake_pg import FakeStore
    if dist.is_initialized(): dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        mesh = dist.init_device_mesh("cpu", (2,))
        w = nn.Parameter(DTensor.from_local(torch.randn(4, 8), mesh, [Shard(0)]))
        with pytest.raises(ValueError, match=r"a matrix of shape \(8, 8\) is spread over 2 ranks"): Muon([w])
    finally: dist.destroy_process_group()


def test_weights_on_the_host_are_refused_by_name():
    model = shard(llama(), dtype=None, host=1.0)
    with pytest.raises(ValueError, match="model.layers.0.self_attn.q_proj.weight lives on the host"): Muon(model)


def test_other_choices_are_refused():
    model = llama()
    with pytest.raises(ValueError, match="offload='auto'"): Muon(model, offload="auto")
    with pytest.raises(ValueError, match="gpus=2"): plan_training(model, 2, 8, gpus=2, optimizer="muon", machine="h200")
    with pytest.raises(ValueError, match="states=8"):
        plan_training(model, 2, 8, states=8, optimizer="muon", machine="h200")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_plan_counts_the_state_that_is_made(dtype):
    model = llama(dtype)
    matrices, rest = split_parameters(model)
    opts = [Muon(matrices), AdamW(rest)]
    train(model, opts, 1)
    made = sum(t.nbytes for o in opts for s in o.state.values() for k, t in s.items() if k != "step")
    plan = plan_training(model, 4, 16, optimizer="muon", machine="h200", offload=0.0, dtype=None)
    assert plan.parts["optimizer state"][0] == made
    hosted = plan_training(model, 4, 16, optimizer="muon", machine="h200", offload=1.0, dtype=None)
    own = 4 * sum(p.numel() for p in rest) if dtype == torch.float32 else 0         # AdamW's masters on the host
    assert hosted.parts["optimizer state"] == [0, made + own]
    adam = plan_training(model, 4, 16, machine="h200", offload=0.0, dtype=None)
    assert adam.parts["optimizer state"][0] - made == 4 * sum(p.numel() for p in matrices)
    assert plan.step_s > adam.step_s and copy.copy(plan) == plan

"The optimizer of a bank beside torch's AdamW on a twin, through everything that a training run does"
import copy
import math

import pytest
import torch
import transformers as tf
from torch import nn

from bmlab.delta import Adapter, BankAdamW, DeltaBank, Lora, SoftPrompt, deltas
from bmlab.train.checkpoint import load_weights, save

import small

IDS = torch.randint(0, 99, (4, 7), generator=torch.Generator().manual_seed(1))
ROWS = ["a", "b", "c", "a"], ["c", "a", "b", "a"], ["b", "b", None, "c"], ["a", "a", "c", "c"], ["a", "b", "c", "b"]
RATES = {"a": 2e-2, "b": 1e-2, "c": 2e-2}


def bank_of(kind=torch.float64, modules=("q_proj", "k_proj", "down_proj"), make=None, **options):
    torch.manual_seed(0)
    model = (make or small.llama)().to(kind).eval().requires_grad_(False)
    bank = DeltaBank(model, **options)
    for u, r in (("a", 4), ("b", 5), ("c", 8)):
        d = Lora(model, r=r, modules=modules if isinstance(modules, str) else list(modules), name=u)
        for s in d.sites.values(): nn.init.normal_(s.B, std=0.1)
        bank.add(u, d.detach())
    return bank.freeze()


def torchs(bank, lr=RATES, **numbers): return torch.optim.AdamW(bank.param_groups(lr), **numbers)


def backward(bank, rows, ids=IDS):
    with bank.route(list(rows)): loss = sum(bank.losses(bank.model(ids[:len(rows)]).logits, ids[:len(rows)]).values())
    loss.backward()
    return loss.item()


def steps(bank, opt, batches=ROWS, clip=None, **zero):
    curve = []
    for rows in batches:
        curve.append(backward(bank, rows))
        if clip: bank.clip_grad_norm(clip)
        opt.step()
        opt.zero_grad(**zero)
    return curve


def same(one, two, tolerance=1e-9):
    for u in one:
        for p, q in zip(one[u].parameters(), two[u].parameters(), strict=True):
            torch.testing.assert_close(p.detach(), q.detach(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("numbers", [dict(), dict(weight_decay=0.3, betas=(0.5, 0.7), eps=1e-3)], ids=["", "others"])
@pytest.mark.parametrize("zero", [dict(), dict(set_to_none=False)], ids=["none", "zeros"])
@pytest.mark.parametrize("clip", [None, 0.3])
def test_steps_are_those_of_torch(numbers, zero, clip):
    one, two = bank_of(), bank_of()
    curve = steps(one, torchs(one, **numbers), clip=clip, **zero)
    assert steps(two, BankAdamW(two, RATES, **numbers), clip=clip, **zero) == pytest.approx(curve, abs=1e-5)
    same(one, two)


@pytest.mark.parametrize("dtype, options", [
    (torch.bfloat16, {}), (torch.bfloat16, dict(dtype=torch.float32)), (torch.float32, dict(path="triton")),
    (torch.float32, dict(path="sorted")),
], ids=["bf16", "bf16 on float32 stacks", "triton", "sorted"])
def test_every_way_of_products(dtype, options):
    one, two = bank_of(dtype, **options), bank_of(dtype, **options)
    curve = steps(one, torchs(one, fused=True))
    assert steps(two, BankAdamW(two, RATES)) == pytest.approx(curve, rel=1e-5 if dtype == torch.float32 else 0.05)
    same(one, two, 1e-6 if dtype == torch.float32 else 0.02)


def qwen():
    return tf.Qwen2ForCausalLM(tf.Qwen2Config(
        vocab_size=99, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2))


def neox():
    return tf.GPTNeoXForCausalLM(tf.GPTNeoXConfig(
        vocab_size=99, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4))


@pytest.mark.parametrize("make", [qwen, neox, small.gpt2])
def test_layers_with_a_bias(make):
    "Their output is a view, in which nothing may be written on the way"
    one, two = (bank_of(torch.float64, make=make, modules="all-linear") for _ in range(2))
    curve = steps(one, torchs(one))
    assert steps(two, BankAdamW(two, RATES)) == pytest.approx(curve, abs=1e-6)
    same(one, two, 1e-9)


def test_one_user_does_not_feel_the_others():
    one, two = bank_of(), bank_of()
    steps(one, BankAdamW(one, RATES), [["a"]] * 4)
    opt = BankAdamW(two, RATES)
    for _ in range(4):
        backward(two, ["a", "b", "c"])
        assert all(p.grad is not None for p in two.parameters())
        opt.step()
        opt.zero_grad()
        assert all(p.grad is None for p in two.parameters())
    for p, q in zip(one["a"].parameters(), two["a"].parameters()): torch.testing.assert_close(p, q, atol=1e-5, rtol=0)


def test_absent_users_have_no_gradient_and_do_not_move():
    bank = bank_of()
    opt = BankAdamW(bank, 0.01, weight_decay=0.5)
    before = [p.detach().clone() for p in bank["c"].parameters()]
    backward(bank, ["b", "a"])
    assert all(p.grad is None for p in bank["c"].parameters())
    assert all(p.grad is not None for p in bank["a"].parameters())
    opt.step()
    assert all(map(torch.equal, before, bank["c"].parameters()))


def test_gradients_of_several_backwards_add_up():
    one, two = bank_of(), bank_of()
    opts = torchs(one), BankAdamW(two, RATES)
    for bank, opt in zip((one, two), opts):
        for rows in (["a", "b"], ["b", "c"], ["b", "b", "a", None]): backward(bank, rows)
    for p, q in zip(one.parameters(), two.parameters()):
        torch.testing.assert_close(p.grad, q.grad, atol=1e-6, rtol=1e-5)
    # a user who is let go before the step, and a gradient that somebody else has made
    for bank, opt in zip((one, two), opts):
        for p in bank["a"].parameters(): p.grad = None
        for p in bank["c"].parameters(): p.grad = torch.ones_like(p)
        opt.step()
        opt.zero_grad()
    same(one, two)
    for bank, opt in zip((one, two), opts):
        for p in bank["b"].parameters(): p.grad = torch.ones_like(p)
        backward(bank, ["a", "b"])
        opt.step()
    same(one, two)


@pytest.mark.parametrize("none", [True, False])
def test_a_broken_batch_leaves_nothing_behind(none):
    "inf times the zeros behind a rank of 5 is NaN, which neither a skipped step nor mended gradients bring in"
    one, two = bank_of(), bank_of()
    for bank, opt in ((one, torchs(one)), (two, BankAdamW(two, RATES))):
        steps(bank, opt, ROWS[:2])
        for mend in (False, True):
            with bank.route(["a", "b", "c"]): logits = bank.model(IDS[:3]).logits
            (logits * torch.tensor([1e38] * 98 + [3e38])).sum().mul(1e38).backward()
            assert not all(p.grad.isfinite().all() for p in bank["b"].parameters())
            if mend:
                for p in bank.parameters(): p.grad.nan_to_num_(0, 0, 0)
                opt.step()
            opt.zero_grad(none)
        assert all(map(math.isfinite, steps(bank, opt)))
    same(one, two)


def test_a_lower_rank_takes_a_place():
    "What the one before has left behind the new one's rank is in no sum"
    bank = bank_of()
    opt = BankAdamW(bank, 0.05)
    backward(bank, ["c", "a"])
    opt.step()
    bank.remove("c")
    opt.zero_grad(set_to_none=False)
    d = Lora(bank.model, r=2, modules=["q_proj", "k_proj", "down_proj"], name="d").detach()
    bank.add("d", d)
    opt.add_param_group({"params": d.parameters(), "lr": 0.05})
    steps(bank, opt, [["d", "a"]] * 3)
    with torch.no_grad(), bank.route(["d"]): served = bank.model(IDS[:1]).logits
    d = bank.remove("d").attach()
    with torch.no_grad(), bank.off(): alone = bank.model(IDS[:1]).logits
    torch.testing.assert_close(alone, served, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("where", ["frozen at first", "frozen later"])
def test_a_frozen_user_rests(where):
    one, two = bank_of(), bank_of()
    opts = []
    for bank, make in ((one, torchs), (two, BankAdamW)):
        if where == "frozen later": opts.append(opt := make(bank, RATES))
        if where == "frozen later": steps(bank, opt, ROWS[:1])
        for p in bank["b"].parameters(): p.requires_grad_(False)
        if where == "frozen at first": opts.append(opt := make(bank, RATES))
        steps(bank, opt)
        assert all(p.grad is None for p in bank["b"].parameters())
    same(one, two)


def test_users_come_and_go_and_their_moments_with_them():
    one, two = bank_of(), bank_of()
    opts = torchs(one), BankAdamW(two, RATES)
    for bank, opt in zip((one, two), opts):
        steps(bank, opt)
        gone = bank.remove("a")
        torch.manual_seed(5)
        # in the place of the one who left, and with a rank that no stack has room for
        for name, r in (("d", 2), ("e", 12)):
            late = Lora(bank.model, r=r, modules=["q_proj", "k_proj", "down_proj"], name=name)
            for s in late.sites.values(): nn.init.normal_(s.B, std=0.1)
            bank.add(name, late.detach())
            opt.add_param_group({"params": bank[name].parameters(), "lr": 5e-3})
        steps(bank, opt, [["d", "b", "e", "c"], ["e", "e", "b", "d"]])
        bank.add("a", gone)
        steps(bank, opt, [["a", "d", "e", "c"], ["a", "b", "c", "e"]])
    same(one, two)


def test_who_is_not_in_the_optimizer_is_not_stepped():
    bank = bank_of()
    opt = BankAdamW(bank, 0.1)
    late = Lora(bank.model, r=2, modules=["q_proj"], name="late").detach()
    bank.add("late", late)
    before = [p.detach().clone() for p in late.parameters()]
    steps(bank, opt, [["a", "late"]])
    assert all(map(torch.equal, before, late.parameters()))


@pytest.mark.parametrize("change", ["double", "data"])
def test_stacks_that_are_made_anew(change):
    one, two = bank_of(), bank_of()
    opts = torchs(one), BankAdamW(two, RATES)
    for bank, opt in zip((one, two), opts):
        steps(bank, opt)
        if change == "double": bank.model.double()
        else:
            for p in bank["a"].parameters(): p.data = p.data.clone() * 1.5
        if change == "double" and opt is opts[0]:
            for s in opt.state.values(): s.update({k: s[k].double() for k in ("exp_avg", "exp_avg_sq")})
        steps(bank, opt)
    same(one, two)
    # and between backward and step
    if change == "data":
        for bank, opt in zip((one, two), opts):
            backward(bank, ["a", "b"])
            for p in bank["b"].parameters(): p.data = p.data.clone() * 0.5
            opt.step()
        same(one, two)


@pytest.mark.parametrize("theirs", ["torch", "ours"])
@pytest.mark.parametrize("mine", ["torch", "ours"])
def test_state_dicts_go_either_way(theirs, mine, tmp_path):
    make = {"torch": torchs, "ours": lambda bank: BankAdamW(bank, RATES)}
    one, two = bank_of(), bank_of()
    steps(one, opt := make[theirs](one), ROWS[:3])
    torch.save(opt.state_dict(), tmp_path / "opt.pt")
    saved = torch.load(tmp_path / "opt.pt", weights_only=True)
    for p, q in zip(one.parameters(), two.parameters()): q.data.copy_(p.data)
    (again := make[mine](two)).load_state_dict(saved)
    assert again.param_groups[1]["lr"] == RATES["b"]
    # the one goes on as if nothing had been saved
    for bank, o in ((one, opt), (two, again)): steps(bank, o, ROWS[3:])
    same(one, two)


def test_a_checkpoint_holds_the_moments(tmp_path):
    one, two = bank_of(), bank_of()
    opt, again = BankAdamW(one, RATES), BankAdamW(two, RATES)
    steps(one, opt, ROWS[:3])
    save(one.model, tmp_path, opt, step=3)
    load_weights(two.model, tmp_path, optimizer=again)
    for bank, o in ((one, opt), (two, again)): steps(bank, o, ROWS[3:])
    same(one, two)
    # as torch counts them: "b" was in four of the five batches
    assert {again.state[p]["step"].item() for p in two["b"].parameters()} == {4}


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_layers(reentrant):
    one, two = bank_of(), bank_of()
    twin = deltas(copy.deepcopy(two.model))["bank"]
    twin.model.train().gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    twin.model.get_input_embeddings().register_forward_hook(lambda m, a, y: y.requires_grad_())
    curve = steps(one, torchs(one))
    assert steps(twin, BankAdamW(twin, RATES)) == pytest.approx(curve, abs=1e-5)
    same(one, twin)


def test_other_kinds_stand_beside_loras():
    banks = []
    for make in (torchs, BankAdamW):
        bank, kinds = bank_of(), dict(low=2e-2, soft=1e-2)
        torch.manual_seed(3)
        bank.add("low", Adapter(bank.model, bottleneck=6, name="low").detach())
        bank.add("soft", SoftPrompt(bank.model, 3, name="soft").detach())
        bank.freeze()
        opt = make(bank, RATES | kinds)
        steps(bank, opt, [["a", "low", "soft", "c"], ["low", "b", "soft", "a"], ["c", "c", "low", None]])
        state = opt.state_dict()
        assert len(state["state"]) == len(bank.parameters())
        opt.load_state_dict(state)
        steps(bank, opt, [["a", "low", "soft", "c"]])
        banks.append(bank)
    same(*banks)


def test_the_models_own_parameters_step_too():
    banks = []
    for make in (torchs, BankAdamW):
        bank = bank_of().unfreeze().freeze(keep=["norm"])
        opt = make(bank, 1e-2)
        assert opt.param_groups[-1]["user"] is None
        steps(bank, opt)
        banks.append(bank)
    same(*banks)
    for p, q in zip(*(b.model.model.norm.parameters() for b in banks)): torch.testing.assert_close(p, q)


def test_gradients_of_others_leave_users_alone():
    "torch.autograd.grad for an input writes nothing to the users; a second backward adds nothing of it"
    one, two = bank_of(), bank_of()
    BankAdamW(two, RATES)
    vectors = two.model.get_input_embeddings()(IDS).detach().requires_grad_()
    grads = []
    for bank in (one, two):
        with bank.route(ROWS[0]): loss = bank.model(inputs_embeds=vectors).logits.square().mean()
        grads += torch.autograd.grad(loss, [vectors])
        assert all(p.grad is None for p in bank.parameters())
    torch.testing.assert_close(*grads, atol=1e-7, rtol=1e-5)


def test_a_write_between_forward_and_backward_is_refused():
    bank = bank_of()
    opt = BankAdamW(bank, RATES)
    backward(bank, ["a", "b"])
    for write in (opt.step, lambda: bank["a"].parameters()[0].detach().add_(1)):
        with bank.route(["a", "b"]): loss = bank.model(IDS[:2]).logits.square().mean()
        write()
        with pytest.raises(RuntimeError, match="between forward and backward"): loss.backward()


def test_dropout_a_closure_and_a_schedule():
    one, two = bank_of(), bank_of()
    for bank in (one, two):
        for s in bank.sites.values():
            for own in s.users.values(): own.dropout = 0.3
        bank.model.train()
    for bank, opt in ((one, torchs(one)), (two, BankAdamW(two, RATES))):
        torch.manual_seed(9)
        schedule = torch.optim.lr_scheduler.StepLR(opt, 2, 0.1)
        for rows in ROWS:
            opt.zero_grad()
            assert isinstance(opt.step(lambda: backward(bank, rows)), float)
            schedule.step()
        assert opt.param_groups[0]["lr"] == pytest.approx(RATES["a"] * 0.01)
    same(one, two)


def test_what_it_refuses(monkeypatch):
    bank = bank_of()
    for numbers, said in (
        (dict(lr=-1.0), "at least 0"), (dict(lr={"a": 1e-3}), "no rate for 'b'"), (dict(eps=0.0), "above 0"),
        (dict(betas=(0.9, 1.0)), "below 1"), (dict(weight_decay=-1), "at least 0"),
    ):
        with pytest.raises(ValueError, match=said): BankAdamW(bank, **numbers)
    opt = BankAdamW(bank)
    for name in ("amsgrad", "maximize"):
        opt.param_groups[0][name] = True
        with pytest.raises(ValueError, match=f"{name}=True: use torch"): opt.step()
        opt.param_groups[0][name] = False
    with pytest.raises(TypeError, match="copy its state_dict"): copy.deepcopy(opt)
    with bank.route(["a"]): loss = bank.model(IDS[:1]).logits.square().mean()
    with pytest.raises(RuntimeError, match="have no graph"): loss.backward(create_graph=True)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(TypeError, match="several processes"): BankAdamW(bank)
    monkeypatch.undo()
    bank["a"].parameters()[0].register_hook(print)
    with pytest.raises(TypeError, match="has a hook"): BankAdamW(bank)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu(dtype):
    one, two = (deltas(bank_of(dtype).model.cuda())["bank"] for _ in range(2))
    ids = IDS.cuda()
    for bank, opt in ((one, torchs(one, fused=True)), (two, BankAdamW(two, RATES))):
        for rows in ROWS:
            backward(bank, rows, ids)
            opt.step()
            opt.zero_grad()
    same(one, two, 1e-6 if dtype == torch.float32 else 2e-2)

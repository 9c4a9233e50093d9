"Many users in one batch: PEFT's mixed batches as oracle, compiled, quantized, sharded, on other architectures"
import copy
import os

import pytest
import torch
from torch import nn

from bmlab.delta.adapter import Adapter, ParallelAdapter
from bmlab.delta.bank import DeltaBank
from bmlab.train.processes import run_ranks
from bmlab.delta.delta import deltas
from bmlab.models.glm import BlankGlmConfig, BlankGlmForConditionalGeneration, blank_positions
from bmlab.delta.lora import Lora
from bmlab.delta.soft import SoftPrompt

import small

IDS = torch.randint(0, 99, (6, 7), generator=torch.Generator().manual_seed(1))
ROWS = ["a", "b", None, "c", "a", "b"]


def frozen(make):
    torch.manual_seed(0)
    return make().eval().requires_grad_(False)
def llama(): return frozen(small.llama)
def gpt2(): return frozen(small.gpt2)


MODELS = {
    "llama": (llama, ["q_proj", "v_proj"]),
    "gpt2": (gpt2, ["c_attn"]),
    "bert": (lambda: frozen(small.bert), ["query", "value"]),
    "t5": (lambda: frozen(small.t5), ["q", "v"]),
}


def logits(model, ids=IDS):
    with torch.no_grad(): return model(ids, **({"labels": ids} if model.config.is_encoder_decoder else {})).logits


def drawn(d, seed):
    torch.manual_seed(seed)
    for s in d.sites.values():
        for p in s.parameters(): nn.init.normal_(p, std=0.2)
    return d.detach()


def alone(model, d, ids):
    if d is None: return logits(model, ids)
    d.attach()
    try: return logits(model, ids)
    finally: d.detach()


def users(model, modules=None):
    return {
        u: drawn(Lora(model, r=r, alpha=alpha, modules=modules), i)
        for i, (u, r, alpha) in enumerate((("a", 4, 8), ("b", 9, 3), ("c", 1, 5)))
    }


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("path", ["auto", "sorted"])
def test_equals_peft_adapter_names(name, path, tmp_path):
    peft = pytest.importorskip("peft")
    make, modules = MODELS[name]
    model, theirs = make(), make()
    lone = users(model, modules)
    for u, d in lone.items():
        d.save(tmp_path / u)
        if u == "a": theirs = peft.PeftModel.from_pretrained(theirs, tmp_path / u, adapter_name=u)
        else: theirs.load_adapter(tmp_path / u, u)
    theirs.eval()
    extra = {"labels": IDS} if name == "t5" else {}
    with torch.no_grad(): want = theirs(input_ids=IDS, adapter_names=[u or "__base__" for u in ROWS], **extra).logits
    bank = DeltaBank(model, lone, path=path)
    with bank.route(ROWS): got = logits(model)
    assert (got - want).abs().max() <= 1e-6 * max(1, want.abs().max()) and (
        want - logits(bank.detach().model)
    ).abs().max() > 1e-3


INTERPRETED = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="the kernels run on CPU tensors in Triton's interpreter only"
)


@pytest.mark.parametrize("path", ["bmm", "sorted", pytest.param("triton", marks=INTERPRETED)])
def test_gradients_in_batch_are_those_alone(path):
    model = llama()
    lone = users(model)
    ids, rows = IDS.repeat(2, 1), [*ROWS, "a", "a", "b", None, None, "c"]
    bank = DeltaBank(model, lone, path=path).freeze()
    with bank.route(rows): sum(bank.losses(model(ids).logits, ids).values()).backward()
    together = {u: [p.grad.clone() for p in d.parameters()] for u, d in lone.items()}
    bank.detach()
    for u, d in lone.items():
        for p in d.parameters(): p.grad = None
        d.attach()
        mine = ids[[i for i, v in enumerate(rows) if v == u]]
        model(mine, labels=mine).loss.backward()
        d.detach()
        for a, p in zip(together[u], d.parameters()): assert (a - p.grad).norm() <= 2e-6 * p.grad.norm() + 1e-9


def test_twenty_steps_together_are_twenty_steps_alone():
    model, curves = llama(), {}
    twins = {
        u: (m := copy.deepcopy(model), drawn(Lora(m, r=r), i).attach().freeze())
        for i, (u, r) in enumerate((("a", 4), ("b", 2)))
    }
    for u, (m, d) in twins.items():
        opt, rows = torch.optim.AdamW(d.trainable(), lr=1e-2), IDS[:2] if u == "a" else IDS[2:5]
        curves[u] = []
        for _ in range(20):
            loss = m(rows, labels=rows).loss
            loss.backward()
            nn.utils.clip_grad_norm_(d.trainable(), 0.5)
            opt.step()
            opt.zero_grad()
            curves[u].append(loss.item())
    bank = DeltaBank(model, {u: drawn(Lora(model, r=r), i) for i, (u, r) in enumerate((("a", 4), ("b", 2)))}).freeze()
    opt, got = torch.optim.AdamW(bank.param_groups(1e-2)), {"a": [], "b": []}
    for _ in range(20):
        with bank.route(["a", "a", "b", "b", "b"]):
            losses = bank.losses(model(IDS[:5]).logits, IDS[:5])
            sum(losses.values()).backward()
        bank.clip_grad_norm(0.5)
        opt.step()
        opt.zero_grad()
        for u in got: got[u].append(losses[u].item())
    assert max(abs(x - y) for u in got for x, y in zip(got[u], curves[u])) <= 1e-5


def test_absent_users_do_not_move():
    model = llama()
    bank = DeltaBank(model, users(model)).freeze()
    opt = torch.optim.AdamW(bank.param_groups(1e-2))
    for rows in (["a", "b", "c"], ["a", "b", "b"]):
        before = [p.detach().clone() for p in bank["c"].parameters()]
        with bank.route(rows): sum(bank.losses(model(IDS[:3]).logits, IDS[:3]).values()).backward()
        opt.step()
        opt.zero_grad()
        same = all(torch.equal(a, b) for a, b in zip(before, bank["c"].parameters()))
        assert same == ("c" not in rows)


def test_a_frozen_user_is_served_beside_one_that_trains():
    model = llama()
    bank = DeltaBank(model, users(model)).freeze()
    for p in bank["b"].parameters(): p.requires_grad_(False)
    with bank.route(["a", "b"]): sum(bank.losses(model(IDS[:2]).logits, IDS[:2]).values()).backward()
    assert all(p.grad is None for p in bank["b"].parameters()) and all(
        p.grad is not None for p in bank["a"].parameters()
    )


def test_step_between_forward_and_backward_is_refused():
    model = llama()
    bank = DeltaBank(model, users(model)).freeze()
    with bank.route(["a", "b"]): loss = model(IDS[:2]).logits.square().mean()
    with torch.no_grad(): bank["a"].parameters()[0].add_(1)
    with pytest.raises(RuntimeError, match="between forward and backward"): loss.backward()


@pytest.mark.parametrize("rows", [["a", "b", "c"], ["c", None, "a"], ["a", "a", "a"]])
@pytest.mark.parametrize("reopened", [False, True])
def test_what_a_route_keeps_is_never_old(rows, reopened):
    "After steps, writes past autograd, new scales, new storage, comings and goings"
    model = llama()
    lone = users(model)
    bank = DeltaBank(model, lone)
    def want():
        out = []
        for i, u in enumerate(rows):
            twin = llama()
            if u is not None:
                for n, s in bank[u].sites.items():
                    m = twin.get_submodule(n)
                    m.weight.data = m.weight + s.scale * s.B.detach() @ s.A.detach()
            out.append(logits(twin, IDS[i:i + 1]))
        return torch.cat(out)
    def got(fresh=reopened):
        if not fresh: return logits(model, IDS[:3])
        with bank.route(rows): return logits(model, IDS[:3])
    p = lambda: bank["a"].parameters()[1]
    def step():
        bank.freeze()
        opt = torch.optim.AdamW(bank.param_groups(1e-1))
        model(IDS[:3]).logits.square().mean().backward()
        opt.step()
        opt.zero_grad()
    def write(): p().data.mul_(3)
    def scale(): next(iter(bank["a"].sites.values())).scale = 7.0
    with bank.route(rows):
        assert torch.allclose(got(), want(), atol=1e-5)
        for change in (step, write, scale):
            change()
            assert torch.allclose(got(), want(), atol=1e-5), change
        with torch.inference_mode(): assert torch.allclose(model(IDS[:3]).logits, want(), atol=1e-5)
        step()
        assert torch.allclose(got(), want(), atol=1e-5)
    p().data = p().data * 2
    assert torch.allclose(got(True), want(), atol=1e-5)
    bank.add("d", drawn(Lora(model, r=14), 8))
    bank.remove("b")
    rows = ["d" if u == "b" else u for u in rows]
    assert torch.allclose(got(True), want(), atol=1e-5)
    with bank.route(rows): step()
    assert torch.allclose(got(True), want(), atol=1e-5)


def test_serving_first_does_not_spoil_training():
    "What was looked up in inference mode serves a backward"
    model = llama()
    bank = DeltaBank(model, users(model) | {"e": drawn(Adapter(model, bottleneck=4), 5)}).freeze()
    with torch.inference_mode(), bank.route(["e", "a", None]): model(IDS[:3])
    with bank.route(["e", "a", None]): sum(bank.losses(model(IDS[:3]).logits, IDS[:3]).values()).backward()
    assert all(p.grad.isfinite().all() for u in "ea" for p in bank[u].parameters()) and all(
        p.grad is None for p in bank["b"].parameters()
    )
    before = bank["a"].parameters()[1].grad.clone()
    bank["a"].parameters()[1].grad.mul_(2)
    assert torch.equal(bank["a"].parameters()[1].grad, 2 * before)


def test_dropout_is_each_users_own():
    model = llama().train()
    bank = DeltaBank(model, {"wet": drawn(Lora(model, dropout=0.5), 0), "dry": drawn(Lora(model), 1)})
    with bank.route(["wet", "dry"]): a, b = logits(model, IDS[:2]), logits(model, IDS[:2])
    assert not torch.equal(a[0], b[0]) and torch.allclose(a[1], b[1], atol=1e-6)
    model.eval()
    with bank.route(["wet", "dry"]): assert torch.equal(logits(model, IDS[:2]), logits(model, IDS[:2]))


@pytest.mark.long
@pytest.mark.parametrize("when", [pytest.param("before", marks=pytest.mark.slow), "after"])
def test_compiled(when):
    model = frozen(lambda: small.llama(num_hidden_layers=1))
    plain = logits(model)
    compiled = torch.compile(model, backend="eager") if when == "before" else None
    if compiled is not None: compiled(IDS)
    bank = DeltaBank(model, users(model)).freeze()
    if compiled is None: compiled = torch.compile(model, backend="eager")
    for rows in (ROWS, ROWS[::-1]):
        outs, grads = [], []
        for m in (model, compiled):
            with bank.route(rows):
                outs.append(m(IDS).logits)
                outs[-1].square().mean().backward()
            grads.append([p.grad.clone() for p in bank.parameters()])
            for p in bank.parameters(): p.grad = None
        assert torch.allclose(*outs, atol=1e-6) and not torch.allclose(outs[1], plain, atol=1e-3)
        assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(*grads))
    torch._dynamo.reset()


def test_on_an_int8_backbone():
    from bmlab.kernels.layers import pack_linears
    model = llama()
    pack_linears(model, modules="*_proj")
    lone = users(model)
    want = torch.cat([alone(model, lone.get(u), IDS[i:i + 1]) for i, u in enumerate(ROWS)])
    bank = DeltaBank(model, lone)
    with bank.route(ROWS): assert torch.allclose(logits(model), want, atol=1e-5)


def test_bfloat16_and_autocast():
    model = llama().bfloat16()
    lone = {u: drawn(Lora(model, r=4, dtype=torch.float32), i) for i, u in enumerate("ab")}
    want = torch.cat([alone(model, lone[u], IDS[:1]) for u in "ab"])
    bank = DeltaBank(model, lone)
    assert {p.dtype for p in bank.parameters()} == {torch.float32}
    with bank.route(["a", "b"]): got = logits(model, IDS[[0, 0]])
    assert got.dtype == torch.bfloat16 and (got.float() - want.float()).abs().max() < 2e-2
    wide = llama()
    bank = DeltaBank(wide, users(wide)).freeze()
    with bank.route(["a", "b"]), torch.autocast("cpu", torch.bfloat16):
        loss = wide(IDS[:2]).logits.float().square().mean()
    loss.backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for u in "ab" for p in bank[u].parameters())


def test_threads_have_routes_of_their_own():
    import threading
    model = llama()
    bank, out = DeltaBank(model, users(model)), {}
    def serve(u):
        for _ in range(5):
            with bank.route(u): out.setdefault(u, []).append(logits(model, IDS[:2]))
    threads = [threading.Thread(target=serve, args=(u,)) for u in "abc"]
    for t in threads: t.start()
    for t in threads: t.join()
    for u in "abc":
        with bank.route(u): want = logits(model, IDS[:2])
        assert len(out[u]) == 5 and all(torch.allclose(x, want, atol=1e-6) for x in out[u])


def test_what_autograd_keeps_elsewhere_stays_elsewhere():
    "A hook on saved tensors that was there before goes on working"
    model, seen = llama(), []
    bank = DeltaBank(model, users(model)).freeze()
    def noted(word): return lambda t: (seen.append(word), t)[1]
    with torch.autograd.graph.saved_tensors_hooks(noted("in"), noted("out")):
        with bank.route(["a"]): loss = model(IDS[:1]).logits.square().mean()
    loss.backward()
    assert seen.count("in") >= seen.count("out") > 0


def test_copy_to_another_model():
    model = llama()
    twin = copy.deepcopy(model)
    bank = DeltaBank(model, users(model))
    there = bank.copy_to(twin)
    with bank.route(ROWS): want = logits(model)
    with there.route(ROWS): assert torch.allclose(logits(twin), want, atol=1e-6)
    with torch.no_grad(): there["a"].parameters()[0].add_(1)
    with bank.route(ROWS): assert torch.allclose(logits(model), want, atol=1e-7)


def test_hundred_users_come_and_go():
    model = llama()
    bank = DeltaBank(model)
    for i in range(100): bank.add(f"user {i}", drawn(Lora(model, r=1 + i % 5), i))
    names = [f"user {i}" for i in (99, 3, 50, 3)]
    with bank.route(names): want = logits(model, IDS[:4])
    for i in range(0, 40, 2): bank.remove(f"user {i}")
    bank.add("late", drawn(Lora(model, r=12), 7))
    with bank.route(names): assert torch.allclose(logits(model, IDS[:4]), want, atol=1e-6)
    assert len(bank) == 81 and bank.key.slots["late"] == 1 and "bank" in deltas(model)


def mixed(model):
    return {"a": drawn(Lora(model, r=4), 0), "b": drawn(Adapter(model, 4), 1), "c": drawn(ParallelAdapter(model, 3), 2)}


def _sharded_rank(zero, kinds):
    import torch.distributed as dist
    from bmlab.train.processes import init_distributed
    from bmlab.train.sharding import shard
    init_distributed(seed=0)
    model = llama()
    bank = DeltaBank(model, kinds(model)).freeze()
    rank, world = dist.get_rank(), dist.get_world_size()
    shard(model, zero=zero, checkpoint=False, dtype=torch.float32)
    rows, ids = ROWS[rank * 3:rank * 3 + 3], IDS[rank * 3:rank * 3 + 3]
    with bank.route(rows):
        out = model(ids).logits
        out.square().sum().backward()
    grads = {
        u: [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in d.parameters()]
        for u, d in ((u, bank[u]) for u in bank)
    }
    return out.detach(), {u: [g * world for g in gs] for u, gs in grads.items()}


CASES = [(zero, kinds) for kinds in (users, mixed) for zero in (2, 3)]


def _sharded_cases(): return [_sharded_rank(*case) for case in CASES]


@pytest.fixture(scope="module")
def two_ranks(): return run_ranks(_sharded_cases, world_size=2)


@pytest.mark.long
@pytest.mark.parametrize("case", range(len(CASES)), ids=[f"{zero}-{kinds.__name__}" for zero, kinds in CASES])
def test_two_ranks_equal_one(case, two_ranks):
    ranks, kinds = [of_rank[case] for of_rank in two_ranks], CASES[case][1]
    model = llama()
    bank = DeltaBank(model, kinds(model)).freeze()
    with bank.route(ROWS): out = model(IDS).logits
    out.square().sum().backward()
    assert (torch.cat([r[0] for r in ranks]) - out.detach()).abs().max() <= 1e-5
    for u in bank:
        for g, p in zip(ranks[0][1][u], bank[u].parameters()): assert (g - p.grad).norm() <= 1e-5 * p.grad.norm() + 1e-7


def test_mixed_kinds_in_sixteen_rows():
    model = gpt2()
    lone = users(model) | {"d": drawn(Adapter(model, bottleneck=6), 9)}
    rows = ["d", "a", "d", "b"] * 4
    ids = IDS[:4].repeat(4, 1)
    want = torch.cat([alone(model, lone[u], ids[i:i + 1]) for i, u in enumerate(rows)])
    bank = DeltaBank(model, lone)
    with bank.route(rows): assert torch.allclose(logits(model, ids), want, atol=1e-6)



def test_prompts_on_glm():
    "Prompts of several lengths in one batch move the place in the text, and not the place within a written piece"
    torch.manual_seed(0)
    model = BlankGlmForConditionalGeneration(
        BlankGlmConfig(
            vocab_size=60,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_sequence_length=40,
            initializer_range=0.3,
            sop_token_id=56,
            mask_token_ids=[57],
            eos_token_id=58,
            pad_token_id=59,
        )
    ).eval()
    users = {
        "four": drawn(SoftPrompt(model, 4), 0),
        "two": drawn(SoftPrompt(model, 2), 1),
        "low": drawn(Lora(model, r=2), 2),
    }
    rows, ids = ["four", "low", None, "two"], torch.randint(4, 50, (4, 9))
    ids[:, 3], ids[:, -1] = 57, 56
    asked = dict(position_ids=blank_positions(ids, 56, [57]))
    alone = []
    for i, u in enumerate(rows):
        if u: users[u].attach()
        with torch.no_grad(): alone.append(model(ids[i:i + 1], position_ids=asked["position_ids"][i:i + 1]).logits)
        if u: users[u].detach()
    bank = DeltaBank(model, users)
    with bank.route(rows), torch.no_grad():
        torch.testing.assert_close(model(ids, **asked).logits, torch.cat(alone), atol=1e-5, rtol=1e-5)


def test_a_user_without_labels_has_no_loss():
    model = llama()
    bank, labels = DeltaBank(model), IDS.clone()
    for i, u in enumerate("ab"): bank.add(u, drawn(Lora(model, 4), i))
    labels[:3] = -100
    with bank.route(list("aaabbb")): losses = bank.losses(model(IDS).logits, labels)
    assert losses["a"] == 0 and losses["b"] > 0


def test_a_scale_that_changes_stays_where_a_graph_reads_it():
    model = llama()
    bank = DeltaBank(model)
    bank.add("a", drawn(Lora(model, r=2, modules=["q_proj"]), 1))
    site, slots = next(iter(bank.sites.values())), torch.tensor([bank.key.slots["a"]] * len(IDS))
    def rows():
        with bank.rows(lambda: slots): return logits(model)
    def route():
        with bank.route("a"): return logits(model)
    before, scale = rows(), site._layer()[2]
    torch.testing.assert_close(before, route())
    for s in bank["a"].sites.values(): s.scale *= 3
    after = rows()
    torch.testing.assert_close(after, route())
    assert (after - before).abs().max() > 1e-3 and site._layer()[2] is scale

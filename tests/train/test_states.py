"AdamW with moments of 8 bits and bf16 weights rounded by chance: the same in every place, on any ranks, resumed."
import copy, itertools, os

import pytest
import torch
from torch import nn

from bmlab.core import find_blocks
from bmlab.plan.training import weight_groups
from bmlab.train.checkpoint import load_weights, save
from bmlab.train.offload import AdamW, Hyper
from bmlab.train.processes import run_ranks
from bmlab.train.states import Eight, counter, random_bits, update_

WAYS = [dict(states=8), dict(master="bf16-sr"), dict(states=8, master="bf16-sr")]


class Block(nn.Module):
    def __init__(self, D):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(D), nn.Linear(D, 3 * D), nn.Linear(3 * D, D)
    def forward(self, x): return x + self.down(torch.relu(self.up(self.norm(x))))


class Tiny(nn.Module):
    def __init__(self, D=32, L=2, V=50):
        super().__init__()
        self.embed, self.blocks = nn.Embedding(V, D), nn.ModuleList([Block(D) for _ in range(L)])
        self.head = nn.Linear(D, V, bias=False)
    def forward(self, ids):
        x = self.embed(ids)
        for b in self.blocks: x = b(x)
        return self.head(x)


def made(dtype=torch.bfloat16):
    torch.manual_seed(0)
    return Tiny().to(dtype)


DATA = [torch.randint(0, 50, (4, 16), generator=torch.Generator().manual_seed(i)) for i in range(6)]


def train(net, opt, data=DATA):
    for ids in data:
        nn.functional.cross_entropy(net(ids)[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten()).backward()
        opt.step()
        opt.zero_grad()
    opt.flush()
    return {k: t.clone() for k, t in net.state_dict().items()}


def equal(a, b): return all(torch.equal(a[k], b[k]) for k in a)


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_places_and_chunks_change_no_bit(way):
    want = None
    settings = (0, 0, 1 << 20, 1 << 20), (.5, 0, 3000, 512), (1, .5, 5000, 4096), (1, 1, 2000, 256)
    for offload, link, unit, chunk in settings:
        net = made()
        got = train(net, AdamW(net, lr=1e-2, offload=offload, link=link, unit=unit, chunk=chunk, **way))
        want = want or got
        assert equal(want, got), (offload, link)
    net = made()
    early = AdamW(net, lr=1e-2, offload=1.0, link=.5, overlap="backward", **way)
    early.before_backward()
    assert equal(want, train(net, early))
    net = made()
    assert not way.get("master") or not equal(want, train(net, AdamW(net, lr=1e-2, seed=1, **way)))


def test_one_step_is_torchs():
    "What is rounded comes after: one step from nothing is that of torch's fused AdamW, to the grid's next number"
    for way in WAYS:
        net = made()
        opt = AdamW(net, lr=1e-2, **way)
        other = copy.deepcopy(net).float()
        theirs = torch.optim.AdamW(other.parameters(), lr=1e-2, fused=True)
        torch.manual_seed(1)
        for p, q in zip(net.parameters(), other.parameters()):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.float()
        opt.step()
        theirs.step()
        for p, q in zip(net.parameters(), other.parameters()):
            assert ((p.float() - q).abs() <= 2**-7 * q.abs() + 1e-6).all()


KINDS = [(64, torch.bfloat16, True), (256, torch.float32, False), (0, torch.bfloat16, True)]


@pytest.mark.parametrize("size, dtype, chance", KINDS)
def test_the_kernel_does_what_torchs_operations_do(size, dtype, chance):
    if os.environ.get("TRITON_INTERPRET") != "1": pytest.skip("on a CPU it needs TRITON_INTERPRET=1")
    from bmlab.kernels.triton_adamw import packed_adamw_
    torch.manual_seed(0)
    n, hyper = 2304, Hyper(lr=1e-2, betas=(.9, .999), eps=1e-8, weight_decay=.1, divisor=4.0)
    moments = lambda: (Eight.zeros(n, size, True), Eight.zeros(n, size, False)) if size else torch.zeros(2, n)
    p = torch.randn(n).to(dtype)
    q, (m, v), (m2, v2) = p.clone(), moments(), moments()
    theirs = (m2.codes, v2.codes, m2.exponents, v2.exponents) if size else (m2, v2)
    for t in range(1, 4):
        g, start = (torch.randn(n) * 10.0**torch.randn(n)).to(dtype), counter(0, 1, t)
        update_(p, g, m, v, t, hyper, start, chance)
        numbers = {k: getattr(hyper, k) for k in ("lr", "betas", "eps", "weight_decay", "divisor")}
        packed_adamw_(q, g, *theirs, step=t, start=start, by_chance=chance, **numbers)
        assert (p.float() - q.float()).abs().max() < 1e-5 or (p != q).float().mean() < 0.01
        if size:
            for a, b in ((m, m2), (v, v2)):
                apart = (a.codes.int() - b.codes.int()).abs()
                assert (apart > 0).float().mean() < 0.01 and (a.exponents != b.exponents).float().mean() < 0.03


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_a_resumed_run_goes_on_with_the_same_bits(way, tmp_path):
    net = made()
    opt = AdamW(net, lr=1e-2, **way)
    train(net, opt, DATA[:3])
    save(net, tmp_path, optimizer=opt, step=3)
    want, other = train(net, opt, DATA[3:]), made()
    there = AdamW(other, lr=1e-2, offload=1.0, link=.5, unit=3000, **way)
    load_weights(other, tmp_path, optimizer=there)
    assert equal(want, train(other, there, DATA[3:]))


@pytest.mark.parametrize("old, new", [(32, 8), (8, 32)])
def test_moments_of_other_bits_are_converted_and_it_is_said(old, new, tmp_path, caplog):
    net = made()
    opt = AdamW(net, lr=1e-2, states=old)
    train(net, opt, DATA[:3])
    save(net, tmp_path, optimizer=opt, step=3)
    other = made()
    there = AdamW(other, lr=1e-2, states=new)
    load_weights(other, tmp_path, optimizer=there)
    assert f"saved in other bits than states={new} keeps" in caplog.text
    def moments(o, q):
        s = o.state[q]
        if "exp_avg_exponent" not in s: return s["exp_avg"].flatten(), s["exp_avg_sq"].flatten()
        size = s["exp_avg"].numel() // s["exp_avg_exponent"].numel()
        both = [(s[k].flatten(), s[f"{k}_exponent"].flatten(), k == "exp_avg") for k in ("exp_avg", "exp_avg_sq")]
        return [Eight(codes, exponents, size, signed).read() for codes, exponents, signed in both]
    for p, q in zip(net.parameters(), other.parameters()):
        for a, b in zip(moments(opt, p), moments(there, q)):
            assert (a - b).abs().max() <= a.abs().max() / 16
        assert torch.equal(opt.state[p]["master"], there.state[q]["master"]) and there.state[q]["step"] == 3
    train(other, there, DATA[3:])


def sharded(folder):
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    mesh, out = init_device_mesh("cpu", (2,)), []
    for i, way in enumerate(WAYS):
        net = made()
        for b in net.blocks: fully_shard(b, mesh=mesh)
        fully_shard(net, mesh=mesh)
        opt = AdamW(net, lr=1e-2, offload=.5, unit=1000, **way)
        data = [ids.chunk(2)[dist.get_rank()] for ids in DATA]
        train(net, opt, data[:3])
        save(net, f"{folder}/{i}", optimizer=opt, step=3)
        out.append({k: t.full_tensor() for k, t in train(net, opt, data[3:]).items()})
    return out


@pytest.mark.long
def test_two_ranks_are_one_and_one_goes_on_from_two(tmp_path):
    first, second = run_ranks(sharded, str(tmp_path))
    for i, way in enumerate(WAYS):
        assert equal(first[i], second[i])
        net = made()
        opt = AdamW(net, lr=1e-2, **way)
        load_weights(net, tmp_path / str(i), optimizer=opt)
        got = train(net, opt, DATA[3:])
        far = max((got[k].float() - first[i][k].float()).norm() / got[k].float().norm() for k in got)
        assert far < 0.02, (way, far)        # (gradients are bf16 sums in another order)


def split(folder, width):
    "Moments of a row-parallel layer of 1 rank, and what 2 ranks of tensor parallelism read of them"
    import transformers as tf

    from bmlab.formats.safetensors import local_slices
    from bmlab.train.offload import _moment
    from bmlab.train.parallel import tensor_parallel
    from bmlab.train.processes import world_size
    def make():
        torch.manual_seed(0)
        return tf.LlamaForCausalLM(tf.LlamaConfig(
            hidden_size=width, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, vocab_size=64))
    model = make()
    if world_size() == 1:
        opt = AdamW(model, lr=1e-3, states=8)
        ids = torch.randint(0, 64, (2, 8), generator=torch.Generator().manual_seed(1))
        model(input_ids=ids, labels=ids).loss.backward()
        opt.step()
        save(model, folder, optimizer=opt, step=1)
    else: load_weights(tensor_parallel(model), folder, optimizer=(opt := AdamW(model, lr=1e-3, states=8)))
    p = model.model.layers[0].self_attn.o_proj.weight
    return [_moment(opt.state[p], k, p).read() for k in ("exp_avg", "exp_avg_sq")], local_slices(p)


@pytest.mark.parametrize("width", [256, 768])               # blocks of 256, where a rank of two has 128 or 384
def test_a_block_that_two_ranks_share_is_read_by_both(width, tmp_path):
    (whole, _), = run_ranks(split, tmp_path, width, world_size=1)
    for mine, part in run_ranks(split, tmp_path, width, world_size=2):
        for a, b in zip(mine, whole):
            want = b.view(width, width)[part].reshape(-1)
            assert (a - want).norm() < 1e-4 * want.norm()


def test_bytes_are_as_planned():
    for way, dtype in itertools.product([{}, *WAYS], (torch.bfloat16, torch.float32)):
        net = made(dtype)
        groups = weight_groups(net, find_blocks(net), **way).values()
        for offload, planned in ((None, sum(g.state for g in groups)), (1.0, sum(g.host_state for g in groups))):
            opt = AdamW(net, offload=offload, link=1.0, **way)
            opt.table
            assert sum(t.nbytes for t in opt._slabs) == planned, (way, dtype, offload)


def test_random_bits_depend_on_the_element_alone():
    whole = random_bits(counter(3, 5, 7), 1000)
    assert torch.equal(whole[300:], random_bits(counter(3, 5, 7, 300), 700))
    assert not torch.equal(whole, random_bits(counter(3, 5, 8), 1000))


def test_what_does_not_go_together():
    with pytest.raises(ValueError, match="states=16"): AdamW(made(), states=16)
    with pytest.raises(ValueError, match="use master='bf16-sr'"): AdamW(made(), states=8, master=None)
    with pytest.raises(ValueError, match="float16"): AdamW(made(torch.float16), master="bf16-sr")
    with pytest.raises(ValueError, match="float64"): AdamW(made(torch.float64), states=8)

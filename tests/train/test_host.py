"Weights on the host: bit for bit the resident training, whatever the ring, the share and the model; and no half step."
import contextlib, copy, gc, os, subprocess, sys, weakref
from unittest import mock

import pytest
import torch
import transformers as tf
from torch.nn.parallel import DistributedDataParallel

from bmlab.delta.lora import Lora
from bmlab.train import AdamW, OptimManager, fit, load_weights, shard
from bmlab.train.loop import Diverged, evaluate
from bmlab.train.processes import rank, run_ranks

IDS = (torch.arange(4)[:, None] * 3 + torch.arange(12)) % 90
BATCH = {"input_ids": IDS, "labels": IDS}


def llama(layers=4, **kw):
    torch.manual_seed(0)
    small = dict(hidden_size=32, intermediate_size=64, num_attention_heads=4, vocab_size=99, num_hidden_layers=layers)
    return tf.LlamaForCausalLM(tf.LlamaConfig(**small | kw))


def t5():
    torch.manual_seed(0)
    return tf.T5ForConditionalGeneration(tf.T5Config(d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4,
                                                     vocab_size=99, dropout_rate=0.1, decoder_start_token_id=0))


def gpt2():
    torch.manual_seed(0)
    return tf.GPT2LMHeadModel(tf.GPT2Config(n_embd=32, n_layer=3, n_head=4, vocab_size=99, n_positions=32))


def steps(model, opt, n=3, clip=None, accumulate=1):
    "Losses of a few steps, and the weights after them"
    om = OptimManager(model=model)
    om.add_optimizer(opt)
    torch.manual_seed(1)
    losses, device = [], next(model.parameters()).device
    for _ in range(n):
        for i in range(accumulate):
            rows = IDS[i::accumulate].to(device)
            # (a cache would lay keys out otherwise, and some processors' products depend on that)
            loss = model(input_ids=rows, labels=rows, use_cache=False).loss / accumulate
            om.backward(loss, final=i == accumulate - 1)
        if clip is not None: om.clip_grad_norm(clip)
        om.step()
        om.zero_grad()
        losses.append(loss.item())
    return losses, {k: v.cpu().clone() for k, v in model.state_dict().items()}


def adamw(model, **kw): return AdamW(model, lr=1e-2, **kw)


def hosted(model, poison=True, **kw):
    model = shard(model, **{"dtype": None, "host": 1.0} | kw)
    model.sharding.host.poison = poison
    return model


def same(a, b): return a[0] == b[0] and a[1].keys() == b[1].keys() and all(torch.equal(a[1][k], b[1][k]) for k in a[1])


@pytest.mark.parametrize("how", [
    dict(), dict(clip=0.5), dict(accumulate=2), dict(clip=0.5, accumulate=2),
], ids=["plain", "clipped", "micro-batches", "both"])
def test_any_ring_any_share_is_resident_training(how):
    model = llama()
    want = steps(model, adamw(model), **how)
    ways = (0.25, 2, True, True), (0.5, 3, 0, True), (1.0, 2, 2, False), (1.0, 4, 0, True)
    for host, ring, checkpoint, poison in ways:
        for overlap in ("forward",) if "clip" in how else ("forward", "backward"):
            model = hosted(llama(), poison, host=host, ring=ring, checkpoint=checkpoint)
            assert len(model.sharding.host.blocks) == 4 * host
            assert same(want, steps(model, adamw(model, overlap=overlap), **how)), (host, ring, checkpoint, overlap)


def test_a_stale_slot_would_be_seen():
    "What the equality above rests on: a slot that was let go of holds NaN"
    model = hosted(llama(), checkpoint=0)
    loss = model(**BATCH).loss
    assert all(s.bytes.view(torch.float32).isnan().all() for s in model.sharding.host.slots)
    model.sharding.host.begin_backward = lambda block: None               # backward on what forward kept, too late
    loss.backward()
    assert not model.model.embed_tokens.weight.grad.isfinite().all()


@pytest.mark.parametrize("build", [t5, gpt2, lambda: llama(tie_word_embeddings=True), lambda: llama().bfloat16()],
                         ids=["t5, dropout", "gpt2, tied", "llama, tied", "llama, bfloat16"])
def test_families(build):
    "Encoder and decoder, dropout, biases, tied embeddings (on the device), masters in fp32 for weights in bf16"
    model = build()
    want = steps(model, adamw(model))
    for overlap, checkpoint in (("forward", 1), ("backward", True)):
        model = hosted(build(), checkpoint=checkpoint)
        table = model.get_input_embeddings().weight
        assert not model.sharding.host.holds(table) and all(p.device.type == "cpu" for p in model.parameters())
        assert same(want, steps(model, adamw(model, overlap=overlap)))


def test_any_optimizer():
    "Gradients are the parameters' own on the host, and their norm is known before the step"
    def grouped(m):
        wide, narrow = ([p for p in m.parameters() if (p.ndim > 1) == wide] for wide in (True, False))
        return [{"params": wide}, {"params": narrow, "weight_decay": 0.0}]
    for make in (lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9),
                 lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2), lambda m: AdamW(grouped(m), lr=1e-2)):
        model, other, how = llama(), hosted(llama(), host=0.5), dict(clip=0.5, accumulate=2)
        assert same(steps(model, make(model), **how), steps(other, make(other), **how))


def test_state_of_the_others_may_be_offloaded_too():
    model = llama()
    want = steps(model, adamw(model))
    for overlap in ("forward", "backward"):
        model = hosted(llama(), host=0.5)
        opt = adamw(model, overlap=overlap, offload=0.5, link=0.5, unit=3000, chunk=1024)
        assert same(want, steps(model, opt))
        assert list(opt.table.place) == ["gpu", "cpu", "link", "host", "host link"]


@pytest.mark.parametrize("how", [dict(states=8), dict(master="bf16-sr"), dict(states=8, master="bf16-sr")])
def test_fewer_bytes_a_parameter(how):
    "On the host's cores and over the link; the same numbers by chance"
    model = llama().bfloat16()
    want = steps(model, adamw(model, **how))
    for link, overlap in ((0.0, "backward"), (1.0, "backward"), (0.5, "forward")):
        model = hosted(llama().bfloat16(), host=0.75)
        opt = adamw(model, link=link, overlap=overlap, unit=3000, **how)
        assert same(want, steps(model, opt))


def test_a_lora_streams_frozen_weights_in_only():
    def build(where=None):
        model = llama()
        torch.manual_seed(1)
        delta = Lora(model, r=2, modules=["layers[1:].**.q_proj", "layers[1:].**.down_proj"], dropout=0.0)
        delta.freeze()
        return model, delta
    model, delta = build()
    want = steps(model, adamw(model))
    for overlap in ("forward", "backward"):
        model, delta = build()
        model = hosted(model, checkpoint=2)
        ring = model.sharding.host
        assert not any(ring.holds(p) for p in model.parameters() if p.requires_grad)
        assert same(want, steps(model, adamw(model, overlap=overlap)))
        assert not any(b.gradients for b in ring.blocks)


def test_frozen_halves():
    "The first blocks frozen, so the input of the first trained one has no gradient; embedding too"
    def build():
        model = llama()
        for n, p in model.named_parameters(): p.requires_grad_("layers.2" in n or "layers.3" in n)
        return model
    model = build()
    want = steps(model, adamw(model))
    for overlap in ("forward", "backward"):
        model = hosted(build(), checkpoint=3)
        assert same(want, steps(model, adamw(model, overlap=overlap)))


def test_fit_evaluates_saves_and_goes_on_elsewhere(tmp_path):
    "At another ring and share, and with everything on the device"
    def run(model, opt, n, **kw):
        return fit(model, [BATCH], opt, steps=n, held_out=[BATCH], every=2, plot=False, **kw)
    model = llama()
    want = run(model, adamw(model), 6)
    first = hosted(llama(), host=0.75, ring=3, checkpoint=2)
    log = run(first, adamw(first, overlap="backward"), 3, save_to=tmp_path, save_every=3)
    assert log.loss.tolist()[1:] == want.loss.tolist()[1:4]
    for make, overlap in ((lambda: hosted(llama(), host=0.5, ring=2), "forward"), (llama, "forward"),
                          (lambda: hosted(llama(), host=1.0, ring=4), "backward")):
        other = make()
        opt = adamw(other, overlap=overlap)
        load_weights(other, tmp_path, optimizer=opt)
        got = steps(other, opt, 3)
        assert got[0] == want.loss.tolist()[4:]
        assert all(torch.equal(t, model.state_dict()[k]) for k, t in got[1].items())
    assert evaluate(other, [BATCH]) == want.held_out.iloc[-1]


def half(folder, out):
    "A rank's half of each batch, from the steps in a folder to the sixth; saved where asked"
    import torch.distributed as dist
    rank, ranks = dist.get_rank(), dist.get_world_size()
    rows = IDS[rank::ranks]
    model = shard(llama(), dtype=None)
    saved = dict(save_to=folder, resume=True) if out is None else dict(save_to=out, save_every=3)
    log = fit(model, [{"input_ids": rows, "labels": rows}], adamw(model), steps=6 if out is None else 3, plot=False,
              **saved)
    return log.loss.tolist(), {k: v.full_tensor() for k, v in model.state_dict().items()}


@pytest.mark.long
def test_it_goes_on_in_two_processes_and_comes_back(tmp_path):
    "From the host of one process to two that share the weights, and from two to the host of one"
    model = llama()
    want = fit(model, [BATCH], adamw(model), steps=6, plot=False).loss.tolist()
    near = lambda found: all(torch.allclose(t, model.state_dict()[k], atol=2e-4) for k, t in found.items())
    first = hosted(llama(), host=0.75, ring=3)
    fit(first, [BATCH], adamw(first), steps=3, save_to=tmp_path / "one", save_every=3, plot=False)
    for losses, weights in run_ranks(half, tmp_path / "one", None):
        assert losses == pytest.approx(want, abs=1e-5) and near(weights)
    run_ranks(half, None, tmp_path / "two")
    last = hosted(llama(), host=0.5, ring=2)
    log = fit(last, [BATCH], adamw(last), steps=6, save_to=tmp_path / "two", resume=True, plot=False)
    assert log.loss.tolist() == pytest.approx(want, abs=1e-5) and near(last.state_dict())


def test_a_bad_gradient_in_one_block_ends_the_run_before_anything_is_saved(tmp_path):
    for overlap, said in (("backward", "is half made"), ("forward", "the step was not taken")):
        model, folder = hosted(llama()), tmp_path / overlap
        spoil = [False]
        def bad(grad): return grad.clone().index_fill_(0, torch.tensor(3), float("nan")) if spoil[0] else grad
        model.model.layers[2].mlp.up_proj.weight.register_hook(bad)
        opt = adamw(model, overlap=overlap)
        fit(model, [BATCH], opt, steps=2, save_to=folder, plot=False)
        kept = sorted(folder.iterdir())
        before = model.state_dict()["model.layers.2.mlp.up_proj.weight"].clone()
        spoil[0] = True
        with pytest.raises(Diverged, match=said) as e:
            fit(model, [BATCH], opt, steps=4, save_to=folder, save_every=1, resume=True, plot=False)
        assert "model.layers.2.mlp.up_proj.weight" in str(e.value)
        assert sorted(folder.iterdir()) == kept
        after = model.state_dict()
        assert torch.equal(before, after["model.layers.2.mlp.up_proj.weight"])
        assert all(t.isfinite().all() for t in after.values())


def test_a_step_that_breaks_off_leaves_the_blocks_at_home():
    model = hosted(llama(), checkpoint=2)
    want = steps(llama_ := llama(), adamw(llama_))
    for where in ("forward", "backward"):
        broken = [True]
        def fail(*args):
            if broken[0]: raise OSError("unplugged")
        layer = model.model.layers[1]
        hook = layer.mlp.register_forward_hook if where == "forward" else layer.self_attn.o_proj.weight.register_hook
        handle = hook(fail)
        with pytest.raises(OSError, match="unplugged"): model(**BATCH).loss.backward()
        handle.remove()
        model.zero_grad()
        ring = model.sharding.host
        state = model.state_dict()
        assert not ring.bound and all(t.isfinite().all() for t in state.values())
    assert same(want, steps(model, adamw(model, overlap="backward")))


def test_no_gradients_of_the_whole_model_lie_on_the_host_in_the_first_step_either():
    "A loop of one's own tells the optimizer of no backward: it is there when the first forward begins"
    want, model = steps(other := llama(), adamw(other)), hosted(llama())
    opt, losses, ring = adamw(model, overlap="backward"), [], model.sharding.host
    with torch.no_grad(): model(IDS)
    assert opt.units is None
    torch.manual_seed(1)
    for _ in range(3):
        loss = model(input_ids=IDS, labels=IDS).loss
        loss.backward()
        assert ring.blocks and not any(b.gradients for b in ring.blocks) and all(p.grad is None for p in ring.of)
        opt.step()
        opt.zero_grad()
        losses.append(loss.item())
    assert same(want, (losses, model.state_dict()))


def test_an_error_of_the_optimizer_reaches_the_next_forward():
    model = hosted(llama())
    opt = adamw(model, overlap="backward")
    opt.before_backward()
    model(**BATCH).loss.backward()
    opt.step()
    opt.flush()
    opt.units[0].homes = opt.units[-1].homes = next(u for u in opt.units if u.place == "host").homes = None
    opt.zero_grad()
    model(**BATCH).loss.backward()
    opt.step()
    with pytest.raises(RuntimeError, match="lane 'host' failed.*load a checkpoint"): model(**BATCH)


def test_weights_given_to_a_block_at_home_are_used():
    "In place, by assignment, through `.data`; a change of shape is refused"
    model, other = hosted(llama(), poison=False), llama()
    other.load_state_dict({k: v + 0.01 for k, v in other.state_dict().items()})
    model(**BATCH)
    model.load_state_dict(other.state_dict(), assign=False)
    assert torch.equal(model(**BATCH).loss, other(**BATCH).loss)
    with torch.no_grad():
        for m in (model, other): m.model.layers[3].mlp.up_proj.weight.mul_(0.5)
    assert torch.equal(model(**BATCH).loss, other(**BATCH).loss)
    for m in (model, other): m.model.layers[0].mlp.up_proj.weight.data = torch.ones(64, 32)
    assert torch.equal(model(**BATCH).loss, other(**BATCH).loss)
    layer = model.model.layers[0].mlp.up_proj
    layer.weight.data = layer.weight.data.double()
    with pytest.raises(RuntimeError, match="change weights before shard"): model(**BATCH)


def test_copies_are_resident_and_nothing_outlives_the_model():
    model = hosted(llama())
    twin = copy.deepcopy(model)
    assert twin.sharding.host is None and same(([], model.state_dict()), ([], twin.state_dict()))
    with torch.no_grad(): assert torch.equal(model(IDS).logits, twin(IDS).logits)
    opt = adamw(model, overlap="backward")
    steps(model, opt, 1)
    gone = [weakref.ref(model), weakref.ref(model.sharding.host), weakref.ref(opt)]
    del model, opt
    gc.collect()
    assert [g() for g in gone] == [None] * 3


def test_from_meta_from_files_and_by_a_limit(tmp_path):
    llama().save_pretrained(tmp_path)
    with torch.device("meta"): model = llama()
    shard(model, dtype=None, host=0.5, weights=tmp_path)
    other = llama()
    assert torch.equal(model(**BATCH).loss, other(**BATCH).loss)
    counts = []
    for limit in ("1GiB", "84MiB", "83.4MiB"):                           # (80 MiB are workspace)
        model = shard(llama(), dtype=None, host="auto", memory_limit=int(float(limit[:-3]) * (1 << 20)) * 4 // 3
                      if "MiB" in limit else limit)
        counts.append(len(model.sharding.host.blocks) if model.sharding.host else 0)
    assert counts[0] == 0 and counts == sorted(counts), counts


def test_what_recomputes_is_planned_with_the_blocks_that_live_on_the_host():
    wide = dict(hidden_size=64, intermediate_size=256)
    rows = IDS.repeat(8, 2)
    peaks = []
    for host in (0.0, 1.0):
        model = shard(llama(**wide), dtype=None, host=host, memory_limit="1GiB")
        model(input_ids=rows, labels=rows).loss.backward()
        assert model.sharding.plan.host == host
        peaks.append(model.sharding.plan.peak_bytes)
    assert peaks[1] < peaks[0]


def test_refused():
    for kw, said in ((dict(host=1.5), "host=1.5: 'auto' or a share"), (dict(host=1.0, ring=1), "ring=1: 2 blocks")):
        with pytest.raises(ValueError, match=said): shard(llama(), dtype=None, **kw)
    model = hosted(llama())
    with pytest.raises(ValueError, match="clip=1.0 needs the norm of all gradients"):
        fit(model, [BATCH], adamw(model, overlap="backward"), clip=1.0, steps=1, plot=False)


def tuned_lora():
    model = llama()
    Lora(model, r=2, modules="all-linear").freeze()
    return model


# build, shard's options, the optimizer's, a step's; to the last bit?
SHARED = {
    "plain": (llama, {}, {}, {}, True),
    "half of the blocks, clipped": (llama, dict(host=0.5, ring=3), {}, dict(clip=0.5), True),
    "as gradients arrive": (llama, {}, dict(overlap="backward"), {}, True),
    "in small units, some over the link": (gpt2, dict(ring=3), dict(overlap="backward", unit=1000, link=0.5), {}, True),
    "moments of 8 bits": (llama, {}, dict(states=8), {}, True),
    "a LoRA": (tuned_lora, {}, {}, {}, True),
    # (torch's ranks average what has been added up, these add up averages)
    "micro-batches": (llama, dict(host=0.75), dict(link=0.5), dict(clip=0.5, accumulate=2), False),
    "micro-batches, as gradients arrive": (llama, {}, dict(overlap="backward"), dict(accumulate=2), False),
}


def half_of_the_rows(model, okw, how):
    opt, mine = adamw(model, **okw), slice(2 * rank(), 2 * rank() + 2)
    with mock.patch.dict(globals(), IDS=IDS[mine]): losses, weights = steps(model, opt, **how)
    return losses, {k.removeprefix("module."): v for k, v in weights.items()}, opt.state_dict()["state"]


def beside_data_parallel():
    "For each way, how far weights on the host of two ranks are from torch's DistributedDataParallel, and their states"
    out = {}
    for name, (build, kw, okw, how, exact) in SHARED.items():
        alone = {k: v for k, v in okw.items() if k not in ("overlap", "link")}
        losses, known, kept = half_of_the_rows(DistributedDataParallel(build()), alone, how)
        model = hosted(build(), **kw)
        found, weights, state = half_of_the_rows(model, okw, how)
        pairs = [(weights[k], t) for k, t in known.items()]
        pairs += [(state[i][k], t) for i, entries in kept.items() for k, t in entries.items()]
        same = losses == found and all(torch.equal(a, b) for a, b in pairs)
        far = max((a.double() - b.double()).abs().max().item() for a, b in pairs)
        out[name] = same, far, repr(model.sharding.host)
    ring = model.sharding.host
    t = next(iter(ring.of))
    if rank() == 0: t.data[0] = 7
    ring.ranks.barrier()
    return out, t[0].unique().tolist()


def test_two_ranks_train_from_one_copy_as_data_parallel_ranks_do():
    "Bit for bit as torch's ranks, which hold everything themselves; what one writes to the host the other reads there"
    for found, read in run_ranks(beside_data_parallel):
        for name, (same, far, said) in found.items():
            assert same if SHARED[name][-1] else far < 1e-5, (name, far)
            assert "on the host for 2 ranks" in said
        assert read == [7.0]


def fitted(folder, steps, share, resume=False, overlap="forward", world=2):
    model = hosted(llama(), host=share)
    rows = IDS[4 // world * rank():4 // world * (rank() + 1)]
    batch = {"input_ids": rows, "labels": rows}
    log = fit(model, [batch], adamw(model, overlap=overlap), steps=steps, save_to=folder, save_every=3, resume=resume,
              held_out=[batch], every=3, plot=False)
    return log.loss.dropna().tolist(), {k: v.clone() for k, v in model.state_dict().items()}


def test_two_ranks_save_and_go_on_alone_and_alone_begins_what_two_go_on_with(tmp_path):
    model = llama()
    want = fit(model, [BATCH], adamw(model), steps=6, plot=False).loss.tolist()
    near = lambda found: all(torch.allclose(t, model.state_dict()[k], atol=2e-4) for k, t in found.items())
    run_ranks(fitted, tmp_path / "two", 3, 1.0, False, "backward")
    last = hosted(llama(), host=0.5)
    log = fit(last, [BATCH], adamw(last), steps=6, save_to=tmp_path / "two", resume=True, plot=False)
    assert log.loss.dropna().tolist() == pytest.approx(want, abs=1e-5) and near(last.state_dict())
    first = hosted(llama(), host=0.75, ring=3)
    fit(first, [BATCH], adamw(first), steps=3, save_to=tmp_path / "one", save_every=3, plot=False)
    for losses, weights in run_ranks(fitted, tmp_path / "one", 6, 0.5, True):
        assert losses == pytest.approx(want, abs=1e-5) and near(weights)


def spoilt_on_one(folder): return [spoilt(folder / overlap, overlap) for overlap in ("backward", "forward")]


def spoilt(folder, overlap):
    model = hosted(llama())
    def bad(grad): return grad.clone().index_fill_(0, torch.tensor(3), float("nan")) if rank() == 1 else grad
    opt = adamw(model, overlap=overlap)
    rows = IDS[2 * rank():2 * rank() + 2]
    batch = {"input_ids": rows, "labels": rows}
    fit(model, [batch], opt, steps=2, save_to=folder, plot=False)
    kept = sorted(folder.iterdir())
    model.model.layers[2].mlp.up_proj.weight.register_hook(bad)
    try: fit(model, [batch], opt, steps=4, save_to=folder, save_every=1, resume=True, plot=False)
    except Diverged as e: return str(e), sorted(folder.iterdir()) == kept
    return "went on", None


def test_a_bad_gradient_on_one_rank_ends_the_run_on_both(tmp_path):
    for found in run_ranks(spoilt_on_one, tmp_path):
        for said, as_it_was in found: assert "model.layers.2.mlp.up_proj.weight" in said and as_it_was


def optimizer_that_fails():
    "The second rank's optimizer fails: what does the first one say?"
    model = hosted(llama())
    opt = adamw(model)
    def fails(*_, **__): raise OSError("no more")
    with mock.patch("bmlab.train.offload._host_unit", fails) if rank() == 1 else contextlib.nullcontext():
        try: steps(model, opt)
        except RuntimeError as e: return str(e)
        return "went on"


def rank_that_leaves():
    "The second rank ends without a word where the first one waits for it"
    ring = hosted(llama()).sharding.host
    child = run_and_leave()
    ring.ranks.pids = (os.getpid(), child)
    try:
        ring.ranks.progress.wait(0, ring.ranks.met + 5)
    except RuntimeError as e: return str(e)


def run_and_leave():
    "The number of a process that has ended"
    p = subprocess.Popen([sys.executable, "-c", ""])
    p.wait()
    return p.pid


def test_what_fails_on_one_rank_is_said_on_the_other():
    (first, left), (second, _) = run_ranks(failures)
    assert "rank 1 failed (the update of model.layers." in first and "no more" in second
    assert left.startswith("rank 1 of this host has ended")


def failures(): return optimizer_that_fails(), rank_that_leaves()


class Tagged(torch.nn.Module):
    "Hidden states that are a sum: the gradient of each summand is the same tensor"
    def __init__(self):
        super().__init__()
        self.words, self.places = torch.nn.Embedding(99, 8), torch.nn.Parameter(torch.randn(1, 4, 8))
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(3))
        self.tags = torch.nn.ModuleList(torch.nn.Linear(8, 1) for _ in range(2))
    def forward(self, ids, tag=0):
        x = self.words(ids) + self.places
        for layer in self.layers: x = x + layer(x).tanh()
        return self.tags[tag](x).mean()


def summands():
    "Gradients outside the blocks, one row a rank, and those of both rows; what is said where one rank has none"
    torch.manual_seed(0)
    model, ids = Tagged(), torch.arange(8).view(2, 4)
    whole = copy.deepcopy(model)
    (whole(ids[:1]) / 2 + whole(ids[1:]) / 2).backward()
    shard(model, dtype=None, host=1.0, blocks=["layers.0", "layers.1", "layers.2"])
    model(ids[rank():rank() + 1]).backward()
    far = max((p.grad - q.grad).abs().max().item() for p, q in zip(model.parameters(), whole.parameters())
              if q.grad is not None)
    try: model(ids, tag=rank()).backward()
    except RuntimeError as e: return far, str(e)
    return far, "went on"


def test_gradients_outside_the_blocks_are_averaged_and_have_to_be_everywhere():
    for far, said in run_ranks(summands):
        assert far < 1e-7 and "some ranks had gradients where others had none" in said


def from_meta(folder):
    "From a file, and by rule"
    with torch.device("meta"): a, b = llama(), llama()
    out = []
    for model, weights in ((a, folder), (b, None)):
        torch.manual_seed(rank())
        model = hosted(model, weights=weights, poison=False)
        out.append({k: v.clone() for k, v in model.state_dict().items()})
    return out


def test_the_first_rank_reads_and_all_have_it(tmp_path):
    model = llama()
    model.save_pretrained(tmp_path)
    first, second = run_ranks(from_meta, tmp_path)
    for a, b in zip(first, second): assert all(torch.equal(a[k], b[k]) for k in a)
    assert all(torch.equal(v, first[0][k]) for k, v in model.state_dict().items())
    assert not torch.equal(first[1]["lm_head.weight"], first[0]["lm_head.weight"])


def refused_on_two():
    said = []
    for kw in (dict(host=1.0, tp=2), dict(host=1.0, cp=2)):
        try: shard(llama(), dtype=None, **kw)
        except ValueError as e: said.append(str(e))
    name = mock.patch("socket.gethostname", lambda: f"node{rank()}")
    with mock.patch("bmlab.train.host._here", lambda: rank()), name:
        try: hosted(llama())
        except ValueError as e: said.append(str(e))
    model = hosted(llama())
    try: OptimManager(model=model).add_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    except ValueError as e: said.append(str(e))
    model(**BATCH).loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    try: adamw(model).step()
    except RuntimeError as e: said.append(str(e))
    delta = Lora(tuned := llama(), r=2, modules="all-linear")
    hosted(tuned)
    try: delta.merge()
    except RuntimeError as e: said.append(str(e))
    try: shard(llama(), dtype=None, host="auto")
    except ValueError as e: said.append(str(e))
    return said


def test_what_several_ranks_cannot_do_is_refused():
    for tp, cp, hosts, sgd, clipped, merged, auto in run_ranks(refused_on_two):
        assert "were changed after backward" in clipped and "merge it in one process" in merged
        assert "rows of their own with whole weights" in tp and tp == cp
        assert "ranks on 2 hosts (node0, node1)" in hosts
        assert sgd.startswith("SGD: the ranks share weights") and "ZeRO-3 spreads" in auto


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("updates", [dict(offload=1.0, link=0.0), dict(link=1.0)], ids=["processor", "card"])
@pytest.mark.parametrize("host,ring", [(0.25, 2), (0.5, 3), (1.0, 2), (1.0, 4)])
def test_on_a_gpu_any_ring_any_share_is_resident_training(host, ring, updates):
    "Bit for bit, over a real link, where the same unit updates; attention by products, whose sums have one order"
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        model = llama().cuda()
        want = steps(model, adamw(model, **updates))
        for checkpoint, overlap in ((0, "forward"), (True, "forward"), (2, "backward")):
            model = hosted(llama(), host=host, ring=ring, checkpoint=checkpoint)
            assert next(model.parameters()).is_cuda and len(model.sharding.host.blocks) == 4 * host
            assert same(want, steps(model, adamw(model, overlap=overlap, **updates))), (checkpoint, overlap)

"Streamed = resident, bit for bit: architectures, splits, slots, orders, failures; on a GPU memory, graphs, page locks."
import gc, threading, weakref

import pytest
import torch
import transformers as tf
from torch import nn

from bmlab.core import changed, count
from bmlab.kernels.layers import pack_linears
from bmlab.delta.lora import Lora
from bmlab.models.load import load
from bmlab.infer.streaming import HostTables, Streamer, move_weights
from bmlab.infer.links import GpuLink, SimulatedLink
from bmlab.core import find_blocks

STEPS = 32
TINY = dict(
    hidden_size=32, intermediate_size=48, num_hidden_layers=5, num_attention_heads=4, vocab_size=100, eos_token_id=None,
    pad_token_id=0
)
GPT = dict(n_embd=32, n_layer=5, n_head=4, vocab_size=100, eos_token_id=None, bos_token_id=None)
MODELS = {
    "llama": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**TINY, num_key_value_heads=2)),
    "t5": lambda: tf.T5ForConditionalGeneration(tf.T5Config(
        d_model=32, d_kv=8, d_ff=48, num_layers=5, num_heads=4, vocab_size=100, decoder_start_token_id=0,
        eos_token_id=None
    )),
    "mixtral": lambda: tf.MixtralForCausalLM(tf.MixtralConfig(**TINY, num_key_value_heads=2, num_local_experts=4)),
    "gpt2": lambda: tf.GPT2LMHeadModel(tf.GPT2Config(**GPT)),
    "gptj": lambda: tf.GPTJForCausalLM(tf.GPTJConfig(**GPT, rotary_dim=8)),
    "gemma3": lambda: tf.Gemma3ForCausalLM(tf.Gemma3TextConfig(
        **TINY, num_key_value_heads=2, head_dim=8, sliding_window=8,
        layer_types=["sliding_attention", "full_attention"] * 2 + ["sliding_attention"]
    )),
    "cpmant": lambda: tf.CpmAntForCausalLM(tf.CpmAntConfig(
        vocab_size=100, hidden_size=32, num_attention_heads=4, dim_head=8, dim_ff=48, num_hidden_layers=5,
        prompt_length=4, eos_token_id=None
    )),
    "bert": lambda: tf.BertForMaskedLM(tf.BertConfig(**TINY))
}


def made(name, bits=8, device="cpu", dtype=None):
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    with torch.no_grad():
        # logits that differ, so that a wrong weight shows
        for p in model.parameters(): p.normal_(0, 0.2) if p.ndim > 1 else p.add_(0.1 * torch.randn_like(p))
    model = pack_linears(model) if bits == 8 else model
    return model.to(device, dtype)


def logits(model, steps=STEPS):
    "Logits of each decode step over transformers' own cache, and the ids; of an encoder those of as many inputs"
    ids = torch.randint(1, 100, (2, 7), generator=torch.Generator().manual_seed(1)).to(next(model.buffers()).device)
    if not model.can_generate():
        with torch.no_grad(): return [model((ids + i) % 100)[0] for i in range(steps)]
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=steps, min_new_tokens=steps, do_sample=False,
        pad_token_id=0, return_dict_in_generate=True, output_logits=True
    )
    assert len(out.logits) == steps
    return [*out.logits, out.sequences]


def equal(a, b): return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b))


def same_after_closing(model, s, want):
    "Streamed once more, and then resident"
    assert equal(logits(model, 4), want)
    s.close()
    assert equal(logits(model, 4), want)


def splits(model):
    "Names of streamed blocks: all, an odd and an even number, one, those of the last stack"
    names = list(find_blocks(model))
    last = names[-1].rpartition(".")[0]
    return [names, names[1:4], names[::2][:2] + names[-2:], names[-1:], [n for n in names if n.startswith(last)]]


@pytest.mark.parametrize("name", MODELS)
def test_streamed_equals_resident(name):
    model = made(name)
    want, names = logits(model, 6), list(find_blocks(model))
    for streamed, slots, order in ((names, 2, "random"), (names[1:4], 3, "late"), (names[-3:], 2, "late")):
        with Streamer(model, streamed=streamed, slots=slots, link=SimulatedLink(order=order)):
            assert equal(logits(model, 6), want), (streamed, slots)
    assert equal(logits(model, 6), want)


@pytest.mark.long
@pytest.mark.parametrize("name", MODELS)
def test_every_split_slots_and_order(name):
    model, steps = made(name), 10                                        # (with the prompt, longer than a window)
    want = logits(model, steps)
    assert not equal(want[:1], want[1:2])
    for streamed, slots in [
        (list(find_blocks(model)), 1), *[(split, slots) for split in splits(model) for slots in (2, 3)]
    ]:
        with Streamer(
            model, streamed=streamed, slots=slots,
            link=SimulatedLink(order=("early", "late", "random")[slots - 1], seed=len(streamed))
        ) as s:
            assert equal(logits(model, steps), want), (streamed, slots)
            assert s.stats["unforeseen"] == 1, s.stats
    with Streamer(model, store="mmap"): assert equal(logits(model, steps), want)
    assert equal(logits(model, steps), want)


@pytest.mark.long
@pytest.mark.parametrize("name", ["smollm2-135m", "minilm-l6"])
def test_real_models(name):
    model = load(name)[0].eval()
    if model.can_generate(): model.generation_config.eos_token_id = None
    model = pack_linears(model)
    names, steps = list(find_blocks(model)), 6
    want = logits(model, steps)
    for streamed, slots, store in ((names, 2, "ram"), (names[::3], 3, "mmap")):
        with Streamer(model, streamed=streamed, slots=slots, store=store):
            assert equal(logits(model, steps), want), (len(streamed), slots, store)
    assert equal(logits(model, steps), want)


def test_a_loop_of_ones_own_over_transformers_cache():
    model = made("llama")
    ids = torch.randint(1, 100, (3, 5))
    @torch.no_grad()
    def loop():
        cache, out, x = tf.DynamicCache(config=model.config), [], ids
        for _ in range(STEPS):
            out.append(model(x, past_key_values=cache, use_cache=True).logits)
            x = out[-1][:, -1:].argmax(-1)
        return out
    want = loop()
    with Streamer(model, streamed=[f"model.layers.{i}" for i in range(3)]): assert equal(loop(), want)


@pytest.mark.parametrize("bits", [8, None])
def test_links_between_tensors_stay(bits):
    "One matrix that siblings are views of, tied tables, a weight of two blocks, names and objects"
    model = made("llama", bits)
    layer = model.model.layers[1].self_attn
    siblings = (layer.q_proj, layer.k_proj, layer.v_proj)
    for key in ("codes", "scale") if bits else ("weight",):
        joined = torch.cat([getattr(m, key) for m in siblings])
        setattr(layer, f"joined_{key}", joined.detach())
        for m, part in zip(siblings, joined.detach().split([len(getattr(m, key)) for m in siblings])):
            getattr(m, key).data = part
    model.model.layers[2].input_layernorm.weight = model.model.layers[3].input_layernorm.weight
    want = logits(model, 4)
    objects = [id(p) for p in [*model.parameters(), *model.buffers()]]
    keys = list(model.state_dict())
    for _ in range(2):
        with Streamer(model) as s:
            key = "codes" if bits else "weight"
            whole = getattr(layer, f"joined_{key}")
            assert [
                getattr(m, key).data_ptr() - whole.data_ptr() for m in siblings
            ] == [0, 32 * 32 * whole.itemsize, 48 * 32 * whole.itemsize]
            assert 0 <= whole.data_ptr() - s.slots[1].data_ptr() < len(s.slots[1])
            assert all(
                not 0 <= model.model.layers[3].input_layernorm.weight.data_ptr() - slot.data_ptr() < len(slot)
                for slot in s.slots
            )  # shared: it stays where it is
            assert (
                equal(logits(model, 4), want) and [id(p) for p in [*model.parameters(), *model.buffers()]] == objects
                and list(model.state_dict()) == keys
            )
        assert whole.data_ptr() == getattr(layer.q_proj, key).data_ptr()
        assert equal(logits(model, 4), want)


def test_count_sees_blocks_that_share_a_slot_apart():
    model = made("llama")
    want = count(model)
    with Streamer(model): got = count(model)
    assert (got.total, got.bytes, got.delta) == (want.total, want.bytes, want.delta)


def test_who_keeps_views_is_told():
    class Keeps(nn.Linear):
        kept = None
        def _bmlab_moved(self): self.kept = None
        def forward(self, x):
            if self.kept is None: self.kept = [self.weight.detach()]
            return x @ self.kept[0].T
    torch.manual_seed(0)
    net, x = nn.Sequential(*[Keeps(4, 4) for _ in range(4)], nn.Identity()), torch.randn(2, 4)
    with torch.no_grad():
        want = net(x)
        with Streamer(net, {str(i): net[i] for i in range(4)}) as s:
            for _ in range(2): assert torch.equal(net(x), want)
            with s.on_host(): net[1].weight.mul_(1)
            assert torch.equal(net(x), want)
        assert torch.equal(net(x), want)


def test_fused_before_it_streams():
    from bmlab.infer.fused import fuse_decode
    model = made("llama")
    fused = fuse_decode(model)
    want = logits(model, 8)
    for slots in (2, 3):
        with Streamer(model, slots=slots, link=SimulatedLink(order="random")): assert equal(logits(model, 8), want)
    assert equal(logits(model, 8), want)
    fused.undo()


def test_requires_grad_comes_back():
    model = made("llama", None)
    model.model.layers[0].requires_grad_(False)
    before = [p.requires_grad for p in model.parameters()]
    with Streamer(model):
        assert not any(p.requires_grad for p in model.model.layers.parameters()) and model.lm_head.weight.requires_grad
    assert [p.requires_grad for p in model.parameters()] == before


def test_merging_inside_a_streamed_block():
    model = made("llama", None)
    plain = logits(model, 4)
    lora = Lora(model, r=2, modules="q_proj")
    with torch.no_grad():
        for p in lora.parameters(): p.add_(torch.randn_like(p))
    up = model.model.layers[0].mlp.up_proj.weight.detach().clone()
    # the delta streams with its blocks
    s = Streamer(model)
    with_lora = logits(model, 4)
    assert not equal(with_lora, plain)
    with s.on_host(): merged = lora.merge()
    assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(logits(model, 1)[:1], with_lora))
    with s.on_host(): merged.restore()
    assert equal(logits(model, 4), with_lora)
    with lora.merge(): assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(logits(model, 1)[:1], with_lora))
    assert equal(logits(model, 4), with_lora)
    lora.detach() if lora.attached else None
    assert equal(logits(model, 4), plain)
    lora.attach()
    assert equal(logits(model, 4), with_lora)
    model.model.layers[0].mlp.up_proj.weight = nn.Parameter(torch.zeros(48, 32))
    with pytest.raises(RuntimeError, match="replaced while it streams"): changed(model)
    with s.on_host(): model.model.layers[0].mlp.up_proj.weight = nn.Parameter(up)
    same_after_closing(model, s, with_lora)


def test_an_encoder_that_runs_again_is_fetched_ahead():
    model = made("t5")
    want = logits(model, 4)
    with Streamer(model, slots=2) as s:
        for n in range(1, 4):
            assert equal(logits(model, 4), want)
            # each new source surprises the ring once, not once a block
            assert s.stats["unforeseen"] == n


def test_under_inference_mode():
    "Made inside and outside, run inside and outside"
    model = made("llama")
    want = logits(model, 4)
    for store in ("ram", "mmap"):
        with torch.inference_mode():
            s = Streamer(model, store=store)
            assert equal(logits(model, 4), want)
        assert equal(logits(model, 4), want)
        with torch.inference_mode(): s.close()
        with Streamer(model, store=store):
            with torch.inference_mode(): assert equal(logits(model, 4), want)
            assert equal(logits(model, 4), want)
    with torch.inference_mode(): s = Streamer(model)
    s.close()
    # no inference tensors are left behind
    model.model.layers[0].self_attn.q_proj.scale.mul_(1)
    assert equal(logits(model, 4), want)


@pytest.mark.parametrize("kv_bits", [16, 8])
def test_a_decoder_over_streamed_blocks(kv_bits):
    from bmlab.infer.decode import Decoder
    model = made("llama")
    ids = torch.randint(1, 100, (1, 9)).tolist()
    def steps():
        decoder, out = Decoder(model, max_ctx=64, kv_bits=kv_bits), []
        if "_bmlab_streamer" in model.__dict__: model._bmlab_streamer.attach(decoder)
        assert decoder.mode == "static" and decoder.around == (
            [model._bmlab_streamer] if "_bmlab_streamer" in model.__dict__ else []
        )
        out.append(decoder.prefill(ids))
        for _ in range(STEPS): out.append(decoder.step(out[-1].reshape(1, -1).argmax(-1)[:, None]).clone())
        return out
    want = steps()
    for streamed, slots in ((None, 2), (["model.layers.0", "model.layers.2", "model.layers.4"], 2), (None, 3)):
        with Streamer(model, streamed=streamed, slots=slots): assert equal(steps(), want)


def test_following_overrides_the_order():
    class Backwards(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(5))
        def forward(self, x):
            for layer in reversed(self.layers): x = layer(x)
            return x
    torch.manual_seed(0)
    net, x = Backwards(), torch.randn(2, 4)
    with torch.no_grad(): want = net(x)
    names = [f"layers.{i}" for i in range(5)]
    for following, surprises in ((None, True), (dict(zip(names[::-1], names[-2::-1] + names[-1:])), False)):
        with Streamer(net, following=following) as s, torch.no_grad():
            for _ in range(4): assert torch.equal(net(x), want)
            assert (s.stats["unforeseen"] > 1) == surprises


class Recorded:
    "A CUDA graph and slots, on a CPU: captured, a step's copies do not run; replayed, they run whatever is there"
    def __init__(self, streamer, step):
        self.s, self.step, self.log = streamer, step, []
        # a capture begins with a synchronization
        for slot in range(len(streamer.slots)): streamer.link._carry(slot)
        start, before = streamer.link.start, [t.clone() for t in streamer.slots]
        streamer.link.capturing = lambda: True
        streamer.fork()
        streamer.link.start = lambda slot, target, slab, name: (
            self.log.append((slot, name)) or start(slot, target, slab, name)
        )
        step()
        streamer.link.start, streamer.link.pending = start, []
        self.marks = streamer.join()
        del streamer.link.capturing
        for t, b in zip(streamer.slots, before): t.copy_(b)
    def replay(self):
        s, log = self.s, list(self.log)
        s.before_replay(self.marks)
        s.holds = [None] * len(s.slots)                                 # a graph asks nobody
        def copy(name):
            s.link.start(log.pop(0)[0], s.slots[s.slot[name]][:len(s.slabs[name].bytes)], s.slabs[name], name)
        s._fetch, s._demand = lambda name: copy(name) if log and log[0][1] == name else None, lambda name: None
        out = self.step()
        del s._fetch, s._demand
        assert not log
        s.after_replay(self.marks)
        return out


@pytest.mark.parametrize("n,slots", [(6, 2), (5, 2), (6, 3), (4, 3)])
def test_marks_of_a_capture(n, slots):
    "Replays mixed with plain forwards: each finds in the slots what it needs"
    torch.manual_seed(0)
    net, x = nn.Sequential(*[nn.Linear(4, 4) for _ in range(n)], nn.Identity()), torch.randn(2, 4)
    with torch.no_grad():
        want = net(x)
        s = Streamer(net, blocks={str(i): net[i] for i in range(n)}, slots=slots, link=SimulatedLink(order="random"))
        net(x)
        graph = Recorded(s, lambda: net(x))
        assert graph.marks[0] == graph.marks[1] == tuple(str(i) for i in range(slots))
        for _ in range(3): assert torch.equal(graph.replay(), want)
        for _ in range(2): assert torch.equal(net(x), want)
        assert torch.equal(graph.replay(), want)
        net[2](x)
        assert torch.equal(graph.replay(), want)  # one block by itself: the slots hold other things
        assert torch.equal(net(x), want)


def test_a_graph_does_not_outlive_a_change_of_addresses():
    model = made("llama")
    s = Streamer(model)
    logits(model, 2)
    s.link.capturing = lambda: True
    s.fork()
    marks = s.join()
    with s.on_host(): pass
    # nothing came or went: addresses are the same
    s.before_replay(marks)
    Lora(model, r=2, modules="layers.1.mlp.up_proj")
    s.refresh()
    with pytest.raises(RuntimeError, match="capture it anew"): s.before_replay(marks)


def test_a_capture_that_breaks_off():
    torch.manual_seed(0)
    net, x = nn.Sequential(*[nn.Linear(4, 4) for _ in range(5)], nn.Identity()), torch.randn(2, 4)
    with torch.no_grad():
        want = net(x)
        s = Streamer(net, blocks={str(i): net[i] for i in range(5)})
        net(x)
        holds = list(s.holds)
        s.fork()
        with pytest.raises(RuntimeError, match="fork"): s.fork()
        # outside a capture the fork is forgotten
        assert torch.equal(net(x), want) and s._forked is None
        assert s.holds == holds


def test_two_threads_in_turn():
    model = made("llama")
    want, got = logits(model, 8), []
    with Streamer(model):
        for _ in range(3):
            t = threading.Thread(target=lambda: got.append(logits(model, 8)))
            t.start()
            t.join()
            got.append(logits(model, 8))
    assert len(got) == 6 and all(equal(g, want) for g in got)


def test_a_truncated_file_is_one_clear_error():
    model = made("llama")
    want = logits(model, 4)
    s = Streamer(model, store="mmap")
    assert equal(logits(model, 4), want)
    size = s.file.seek(0, 2)
    keep = [slab.bytes.clone() for slab in s.slabs.values()]
    s.file.truncate(4096)
    with pytest.raises(EOFError, match="truncated"): logits(model, 4)
    s.file.truncate(size)
    for slab, b in zip(s.slabs.values(), keep): slab.bytes.copy_(b)
    same_after_closing(model, s, want)


def test_a_construction_that_fails_leaves_the_model():
    model = made("llama")
    want = logits(model, 4)
    class Broken(Streamer):
        def _store(self, name, layout):
            if name.endswith("3"): raise MemoryError("on purpose")
            super()._store(name, layout)
    with pytest.raises(MemoryError, match="on purpose"): Broken(model)
    assert equal(logits(model, 4), want) and "_bmlab_streamer" not in model.__dict__
    model.to(torch.float64).to(torch.float32)
    with Streamer(model): assert equal(logits(model, 4), want)


def test_host_memory_never_holds_two_copies():
    "While slabs are made, each block's own memory goes before the next block's is read"
    model = made("llama", None)
    alive = [weakref.ref(m.weight.untyped_storage()) for m in model.modules() if isinstance(m, nn.Linear)]
    first, seen = [m.q_proj.weight.data_ptr() for m in [layer.self_attn for layer in model.model.layers]], []
    class Watched(Streamer):
        def _store(self, name, layout):
            seen.append(sum(
                layer.self_attn.q_proj.weight.data_ptr() == p for layer, p in zip(model.model.layers, first)
            ))
            super()._store(name, layout)
    with Watched(model): assert seen == [5, 4, 3, 2, 1] and len(alive) > 0


def test_nothing_outlives_it():
    for close in (True, False):
        model = made("gpt2")
        s = Streamer(model, store="mmap")
        logits(model, 2)
        gone = [weakref.ref(o) for o in (s, model, s.link, *s.slabs.values(), *s.slots)]
        if close: s.close()
        del model, s
        gc.collect()
        assert [r() for r in gone] == [None] * len(gone)


# --- on a GPU ---
cuda = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def on_gpu(test):
    for mark in cuda: test = mark(test)
    return test


def registered(slab):
    "Does the driver say that this memory is page-locked?"
    return slab.bytes.is_pinned()


@on_gpu
@pytest.mark.parametrize("name", MODELS)
def test_cuda_streamed_equals_resident(name):
    model = made(name, device="cuda", dtype=torch.bfloat16)
    want = logits(model)
    for streamed in splits(model)[:3]:
        for slots, store in ((1, "ram"), (2, "ram"), (3, "ram"), (2, "mmap")):
            with Streamer(model, streamed=streamed, slots=slots, store=store, device="cuda"):
                assert equal(logits(model), want), (streamed, slots, store)
            move_weights(model, "cuda")
    assert equal(logits(model), want)


def big(n=12, D=2048):
    torch.manual_seed(0)
    net = nn.Sequential(
        *[nn.Sequential(nn.Linear(D, 4 * D), nn.GELU(), nn.Linear(4 * D, D)) for _ in range(n)], nn.Identity()
    )
    return net.requires_grad_(False).to(torch.bfloat16), {str(i): net[i] for i in range(n)}


@on_gpu
def test_cuda_peak_memory():
    "No more on the device than the ring, the residents and the activations; no more page-locked than the blocks"
    net, blocks = big(D=4096)
    nbytes, x = sum(p.nbytes for p in net[0].parameters()), torch.randn(8, 4096, dtype=torch.bfloat16, device="cuda")
    torch.cuda.synchronize()
    start = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    s = Streamer(net, blocks, [str(i) for i in range(2, 12)], device="cuda")
    moved = move_weights(net, "cuda", blocks, leave=s.streamed)
    for _ in range(3): net(x)
    torch.cuda.synchronize()
    assert 2 * nbytes <= moved < 2 * nbytes + 4096 and 2 * nbytes <= s.device_bytes < 2 * nbytes + 4096
    # (100 MiB: cuBLAS's workspace; a block has 256)
    assert torch.cuda.max_memory_allocated() - start < 4 * nbytes + (100 << 20)
    slabs = list(s.slabs.values())
    assert s.host_bytes < 10 * nbytes + 10 * 4096 and all(map(registered, slabs))
    # what is_pinned says of memory that is
    pinned = torch.empty(1, pin_memory=True)
    assert pinned.is_pinned()
    s.close("cuda")
    assert not any(map(registered, slabs)) and next(net[5].parameters()).is_cuda


@on_gpu
def test_cuda_unregistered_when_dropped():
    net, blocks = big(4, 256)
    s = Streamer(net, blocks, device="cuda")
    memory = [(slab.memory, torch.frombuffer(slab.memory, dtype=torch.uint8)) for slab in s.slabs.values()]
    assert all(t.is_pinned() for _, t in memory)
    del s, net, blocks
    gc.collect()
    assert not any(t.is_pinned() for _, t in memory)


@on_gpu
def test_cuda_copies_overlap_computation():
    "Streamed blocks give the resident result while copies and kernels run at once (bit for bit, many times)"
    net, blocks = big()
    x = torch.randn(512, 2048, dtype=torch.bfloat16, device="cuda")
    move_weights(net, "cuda", blocks)
    want = net(x)
    for slots in (2, 3):
        with Streamer(net, blocks, device="cuda", slots=slots):
            for _ in range(10): assert torch.equal(net(x), want)
        move_weights(net, "cuda", blocks)


@on_gpu
@pytest.mark.parametrize("n,slots", [(12, 2), (11, 2), (12, 3), (10, 3)])
def test_cuda_inside_a_captured_graph(n, slots):
    net, blocks = big(n)
    x = torch.randn(1, 2048, dtype=torch.bfloat16, device="cuda")
    move_weights(net, "cuda", blocks)
    want, other = net(x), net(2 * x)
    s = Streamer(net, blocks, device="cuda", slots=slots)
    for _ in range(2): net(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), s.captures() as got: y = net(x)
    marks, = got
    assert marks[0] == marks[1]
    def replay():
        s.before_replay(marks)
        graph.replay()
        s.after_replay(marks)
        return y.clone()
    for _ in range(5): assert torch.equal(replay(), want)
    assert torch.equal(net(2 * x), other) and torch.equal(replay(), want)             # a plain forward between replays
    net[n // 2](x)
    assert torch.equal(replay(), want)
    x.mul_(2)
    assert torch.equal(replay(), other)
    s.close()


@on_gpu
def test_cuda_a_capture_that_fails():
    net, blocks = big(6, 256)
    x = torch.randn(1, 256, dtype=torch.bfloat16, device="cuda")
    move_weights(net, "cuda", blocks)
    want = net(x)
    s = Streamer(net, blocks, device="cuda")
    net(x)
    torch.cuda.synchronize()
    with pytest.raises(Exception):
        with torch.cuda.graph(torch.cuda.CUDAGraph()), s.captures():
            net(x)
            x.sum().item()  # a sync: illegal in a capture
    torch.cuda.synchronize()
    for _ in range(2): assert torch.equal(net(x), want)
    s.close()
    move_weights(net, "cuda", blocks)
    with Streamer(net, blocks, device="cuda", store="mmap") as s:
        net(x)
        torch.cuda.synchronize()
        # (as decoders capture: the thread that reads goes on)
        with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
            with pytest.raises(RuntimeError, match="mmap"): s.fork()
        assert torch.equal(net(x), want)


@on_gpu
def test_cuda_decoder_carries_the_copies():
    from bmlab.infer.decode import Decoder
    model = made("llama", device="cuda", dtype=torch.bfloat16)
    ids = torch.randint(1, 100, (1, 9)).tolist()
    def steps(decoder):
        out = [decoder.prefill(ids)]
        for _ in range(STEPS): out.append(decoder.step(out[-1].reshape(1, -1).argmax(-1)[:, None]).clone())
        return out
    want = steps(Decoder(model, max_ctx=64, graph=False))
    for slots in (2, 3):
        with Streamer(model, device="cuda", slots=slots) as s:
            for graph in (False, "auto"):
                decoder = Decoder(model, max_ctx=64, graph=graph)
                s.attach(decoder)
                assert equal(steps(decoder), want), (slots, graph)
                assert graph is False or decoder.why_eager is None, decoder.why_eager
        move_weights(model, "cuda")


@on_gpu
def test_cuda_throttle():
    "A slower link is imitated: not a claim about speed, only that bytes are copied again and the numbers stay"
    net, blocks = big(4)
    x = torch.randn(1, 2048, dtype=torch.bfloat16, device="cuda")
    move_weights(net, "cuda", blocks)
    want = net(x)
    with Streamer(net, blocks, device="cuda", link=GpuLink("cuda", bytes_per_s=2e9)) as s:
        assert s.link.repeats > 1.5
        for _ in range(3): assert torch.equal(net(x), want)


@on_gpu
@pytest.mark.parametrize("bits", [8, None])
def test_cuda_tables_read_from_the_host(bits):
    model = made("llama", bits, "cuda", torch.bfloat16)
    want = logits(model)
    tables = HostTables(model, ["model.embed_tokens"], "cuda")
    assert equal(logits(model), want)
    ids, graph = torch.randint(1, 100, (1, 4), device="cuda"), torch.cuda.CUDAGraph()
    with torch.no_grad():
        rows = model.model.embed_tokens(ids)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph): out = model.model.embed_tokens(ids)
        graph.replay()
        assert torch.equal(out, rows)
    del graph
    tables.close()
    move_weights(model, "cuda")
    assert equal(logits(model), want)

"Plans of many architectures, and plans held against what torch allocates"
import copy
import gc
import dataclasses

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers as tf
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from bmlab.plan.fusion import fuse_blocks
from bmlab.plan.machine import MACHINES, machine
from bmlab.kernels.layers import pack_linears
from bmlab.plan.training import Setting, choose_recompute, moments, plan_training, training_cost, weight_groups
from bmlab.plan.trace import best_fit, lifetimes, occupancy, skeleton, step_loss, trace_step
from bmlab.core import find_blocks
from bmlab.delta.lora import Lora
from bmlab.models.zoo import build
from live import Live

SMALL = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4, vocab_size=211)
IDS = torch.randint(0, 200, (4, 32))


def models():
    yield "bert", tf.BertForMaskedLM(tf.BertConfig(**SMALL))
    yield "roberta", tf.RobertaForMaskedLM(tf.RobertaConfig(**SMALL, max_position_embeddings=64))
    yield "gpt2", tf.GPT2LMHeadModel(tf.GPT2Config(n_embd=64, n_layer=3, n_head=4, vocab_size=211, n_positions=64))
    yield (
        "gptj",
        tf.GPTJForCausalLM(tf.GPTJConfig(n_embd=64, n_layer=3, n_head=4, vocab_size=211, n_positions=64, rotary_dim=8)))
    yield "llama", tf.LlamaForCausalLM(tf.LlamaConfig(**SMALL, num_key_value_heads=2))
    yield "qwen3", tf.Qwen3ForCausalLM(tf.Qwen3Config(**SMALL, num_key_value_heads=2, head_dim=16))
    same = dict(hidden_size=64, num_hidden_layers=3, num_attention_heads=4, vocab_size=211)
    opt = tf.OPTConfig(**same, ffn_dim=128, max_position_embeddings=64, word_embed_proj_dim=64)
    yield "opt", tf.OPTForCausalLM(opt)
    t5 = tf.T5Config(d_model=64, d_kv=16, d_ff=128, num_layers=3, num_heads=4, vocab_size=211)
    yield "t5", tf.T5ForConditionalGeneration(t5)
    ant = tf.CpmAntConfig(**same, dim_ff=128, dim_head=16, prompt_types=2, prompt_length=4, segment_types=4)
    yield "cpm-ant", tf.CpmAntForCausalLM(ant)
    yield "mixtral", tf.MixtralForCausalLM(tf.MixtralConfig(**SMALL, num_key_value_heads=2, num_local_experts=4))


MODELS = dict(models())


@pytest.mark.parametrize("name", MODELS)
def test_every_family_has_a_plan(name):
    model = MODELS[name]
    before = {n: p.clone() for n, p in model.named_parameters()}
    plan = plan_training(model, 64, 32, dtype=torch.bfloat16)
    assert plan.blocks == len(find_blocks(model)) >= 3 and plan.peak_bytes > 0 and plan.step_s > 0
    tight = plan_training(model, 64, 32, dtype=torch.bfloat16, checkpoint=True)
    assert tight.peak_bytes <= plan.peak_bytes and tight.step_s > plan.step_s
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("name", [n for n in MODELS if n != "mixtral"])
def test_gradients_are_counted_whole(name):
    model = MODELS[name]
    inputs = {"input_ids": IDS, "labels": IDS} | ({"decoder_input_ids": IDS} if name == "t5" else {})
    trace = trace_step(model, inputs)
    size = sum(l.bytes for l in trace.lives if l.kind == "gradient")
    whole = sum(4 * p.numel() for p in model.parameters())
    # (a model may have weights that a batch does not reach)
    assert whole * 0.9 <= size <= whole + 512 * len(list(model.parameters()))


@pytest.mark.parametrize("loss", [None, "chunked"])
def test_every_gradient_lives_until_the_step(loss):
    "The head's too, which a loss in chunks makes in forward already"
    model = MODELS["llama"]
    trace = trace_step(model, {"input_ids": IDS, "labels": IDS}, loss=loss)
    at_end = moments(trace, weight_groups(model, trace.blocks), Setting(item=4, master=None))["gradients"][-1]
    whole = sum(4 * p.numel() for p in model.parameters())
    assert whole <= at_end <= whole + 512 * len(list(model.parameters()))


def smallest_gaps(line):
    "As `best_fit`, by looking at all that is there"
    there, top = {}, 0
    for t in range(line.slots + 1):
        for i in np.flatnonzero(line.stop == t): there.pop(i, None)
        for i in np.flatnonzero((line.start == t) & (line.stop > t)):
            taken, at, gaps = sorted(there.values()), 0, []
            for a, b in taken:
                if a > at: gaps.append((a - at, at))
                at = max(at, b)
            if top > at: gaps.append((top - at, at))
            n = int(line.bytes[i])
            a = min(((size, a) for size, a in gaps if size >= n), default=(0, at))[1]
            there[i], top = (a, a + n), max(top, a + n)
    return top


@pytest.mark.parametrize("seed", range(4))
def test_holes_are_those_of_the_smallest_gap(seed):
    draw, n, slots = np.random.default_rng(seed), 60, 40
    start = draw.integers(0, slots - 1, n)
    line = lifetimes(trace_step(MODELS["llama"], {"input_ids": IDS, "labels": IDS}))._replace(
        start=start, stop=np.minimum(start + draw.integers(0, 12, n), slots), slots=slots,
        bytes=draw.integers(1, 9, n).astype(float), kind=np.zeros(n, int), owner=np.zeros(n, int))
    assert best_fit(line, least=0) == smallest_gaps(line) >= occupancy(line).max()


def test_a_limit_leaves_room_for_holes(tmp_path):
    "A head whose gradient is made whole, in float32, beside blocks that recompute"
    size = dict(
        hidden_size=1024, intermediate_size=2048, num_hidden_layers=4, num_attention_heads=8, vocab_size=131072,
        use_cache=False, tie_word_embeddings=False)
    with torch.device("meta"): model = tf.LlamaForCausalLM(tf.LlamaConfig(**size)).to(torch.bfloat16)
    how = dict(batch=8, seq=1024, loss="chunked", machine="h200", offload=None)
    free = plan_training(model, **how, checkpoint=True)
    assert free.held_bytes - free.peak_bytes == free.holes == pytest.approx(free.search.holes(4), abs=1)
    free.save(tmp_path / "plan.json")
    assert type(free).load(tmp_path / "plan.json").held_bytes == free.held_bytes
    assert free.check(held_bytes=2 * free.held_bytes).loc["held_bytes", "predicted / measured"] == 0.5
    limit = free.peak_bytes + free.search.holes(4) // 2
    assert free.search.holes(4) > 0.05 * sum(free.parts[k][0] for k in ("activations", "gradients"))
    roomy = plan_training(model, **how | dict(offload="auto"), memory_limit=int(limit))
    assert roomy.search.needs(roomy.recompute, roomy.offload, True) <= limit
    assert roomy.offload > 0


def test_the_hosts_lead_hides_the_optimizers_issuing():
    "On every number of GPUs, and the more micro-batches the longer; what it does not hide is issuing"
    size = SMALL | dict(hidden_size=256, intermediate_size=512, num_hidden_layers=8, use_cache=False)
    with torch.device("meta"): model = tf.LlamaForCausalLM(tf.LlamaConfig(**size)).bfloat16()
    plan = lambda batch, **how: plan_training(model, batch, 1024, offload=None, machine="h200", **how)
    lead = lambda p: p.search.time(p.recompute, p.offload)[0].lead
    busy = {n: plan(256, gpus=n) for n in (1, 8)}
    assert lead(busy[1]) > 0.01 and lead(busy[8]) == pytest.approx(lead(busy[1]), rel=0.2)
    assert busy[1].search.time(0, 0.0)[1].issue_s == busy[8].search.time(0, 0.0)[1].issue_s == 0
    some, more = plan(64, checkpoint=0), plan(64, checkpoint=0, accumulate=4)
    assert lead(some) > 0.001 and lead(more) == pytest.approx(4 * lead(some), rel=0.05)
    idle = plan(1)
    took = idle.search.time(0, 0.0)[1]
    tensors = len(list(model.parameters()))
    assert lead(idle) == 0 and took.issue_s + took.optimizer_s == pytest.approx(8 * tensors * 5e-6, rel=1e-6)
    assert idle.bound == "issuing kernels" and took.optimizer_s < 0.1 * took.issue_s
    assert idle.step_s > plan(1, master=None).step_s


def without_dropout(model):
    for m in model.modules():
        if isinstance(m, nn.Dropout): m.p = 0.0
        elif isinstance(getattr(m, "dropout", None), float): m.dropout = 0.0


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "opt"])
@pytest.mark.parametrize("recomputed", [0, 1, 3])
def test_one_trace_tells_the_peak_under_recomputation(name, recomputed):
    model = skeleton(MODELS[name])
    model.set_attn_implementation("eager")                       # (the same kernels for both)
    without_dropout(model)
    for i, block in enumerate(find_blocks(model).values()):
        if i < recomputed: block.forward = lambda *a, f=block.forward, **k: checkpoint(f, *a, use_reentrant=False, **k)
    inputs = {"input_ids": torch.empty(16, 64, dtype=torch.long, device="meta"), "use_cache": False}
    inputs["labels"] = inputs["input_ids"]
    if name == "bert": inputs.pop("use_cache")
    with Live([*model.parameters(), *model.buffers(), inputs["input_ids"]]) as live: step_loss(model, inputs).backward()
    plain = copy.deepcopy(MODELS[name])
    plain.set_attn_implementation("eager")
    without_dropout(plain)
    trace = trace_step(plain, inputs)
    line = lifetimes(trace, list(trace.blocks)[:recomputed])
    assert occupancy(line, line.kind != 3).max() == pytest.approx(live.peak, rel=0.02)


def kept(model, inputs, block):
    "Bytes that autograd keeps of one forward of a block, beside weights and what it is called with"
    inside, seen, of = [], {}, lambda ts: {t.untyped_storage()._cdata for t in ts}
    block.register_forward_pre_hook(lambda m, args: inside.append(of([*args, *model.parameters()])))
    block.register_forward_hook(lambda *_: inside.clear())
    def pack(t):
        s = t.untyped_storage()
        if inside and s._cdata not in inside[0]: seen[s._cdata] = s.nbytes()
        return t
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t): model(**inputs)
    return sum(seen.values())


@pytest.mark.parametrize("rate", [0.0, 0.1])
def test_a_bias_that_no_kernel_takes_and_dropout_keep_what_torch_keeps(rate, monkeypatch):
    "A bias with heads innermost, as T5's: attention by torch's formula, in float32; a GPU's dropout, a byte a number"
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv, self.out, self.drop = nn.Linear(64, 192), nn.Linear(64, 64), nn.Dropout(rate)
            self.bias = nn.Parameter(torch.randn(32, 32, 4))
        def forward(self, x):
            q, k, v = self.qkv(x).view(8, 32, 3, 4, 16).permute(2, 0, 3, 1, 4)
            y = F.scaled_dot_product_attention(q, k, v, self.bias.permute(2, 0, 1)[None], dropout_p=rate)
            return x + self.drop(self.out(y.transpose(1, 2).reshape(8, 32, 64)))
    model = nn.Sequential(Block(), Block()).bfloat16().train()
    inputs = {"input": torch.randn(8, 32, 64, dtype=torch.bfloat16)}
    trace, theirs = trace_step(model, inputs, ["0", "1"]), F.scaled_dot_product_attention
    def formula(q, k, v, mask, dropout_p):
        with sdpa_kernel(SDPBackend.MATH):
            if not dropout_p: return theirs(q, k, v, mask)
        # (as on a GPU: on a CPU torch's formula keeps a float32 for each number that it drops)
        p = torch.softmax(q.float() / 2 @ (k.float() / 2).mT + mask, -1)
        return (torch.native_dropout(p, dropout_p, True)[0] @ v.float()).to(q.dtype)
    monkeypatch.setattr(F, "scaled_dot_product_attention", formula)
    monkeypatch.setattr(F, "dropout", lambda x, p, training, inplace: torch.native_dropout(x, p, True)[0] if p else x)
    assert trace.blocks["1"].saved_bytes == pytest.approx(kept(model, inputs, model[1]), rel=0.02)


def test_choice_is_the_smallest():
    trace = trace_step(MODELS["llama"], {"input_ids": IDS, "labels": IDS})
    groups = weight_groups(MODELS["llama"], trace.blocks)
    least = choose_recompute(trace, 1 << 40, groups)
    assert least == 0
    recomputing = lambda n: plan_training(MODELS["llama"], trace=trace, checkpoint=n, offload=None, dtype=None)
    peaks = [recomputing(n).peak_bytes for n in range(4)]
    for n, peak in enumerate(peaks):
        assert choose_recompute(trace, peak, groups) == peaks.index(next(p for p in peaks if p <= peak))
    with pytest.raises(ValueError, match="smallest feasible"): choose_recompute(trace, peaks[-1] // 2)
    # the limit that an error names is one that it takes
    for k in range(20):
        with pytest.raises(ValueError) as e: choose_recompute(trace, "1MiB", groups, held_bytes=10_000_000 + 12_345 * k)
        smallest = str(e.value).split("feasible, ")[1].split(" with")[0]
        assert choose_recompute(trace, smallest, groups, held_bytes=10_000_000 + 12_345 * k) <= 3


def test_what_cannot_be_planned_says_so():
    with pytest.raises(ValueError, match="give inputs=, a real batch"):
        plan_training(tf.BertForSequenceClassification(tf.BertConfig(**SMALL)), batch=2, seq=16)
    with pytest.raises(ValueError, match="inputs: the batch holds no token"):
        plan_training(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), inputs=(torch.zeros(0, 4),), tokens=1e6)


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
def test_compiled_blocks_keep_what_the_compiler_keeps(name):
    trace = trace_step(
        MODELS[name], {"input_ids": IDS, "labels": IDS, **({} if name == "bert" else {"use_cache": False})})
    fused = fuse_blocks(trace)
    assert [b.forward_flops for b in fused.blocks.values()] == [b.forward_flops for b in trace.blocks.values()]
    assert fused.seconds(machine()).sum() < trace.seconds(machine()).sum()
    saved = lambda trace: sum(b.saved_bytes for b in trace.blocks.values())
    assert 0.3 < saved(fused) / saved(trace) < 1.1


def test_a_compiled_block_keeps_its_input():
    "A norm in float32 keeps a copy of what it reads; compiled, the block keeps what it was called with"
    model = small_llama()
    trace = trace_step(model, {"input_ids": IDS, "labels": IDS})
    fused, size = fuse_blocks(trace), 2 * IDS.numel() * 64
    inputs = {f: fused.lives[i] for i, f in fused.inputs if fused.lives[i].bytes == size}
    assert len(inputs) == 3 and all(fused.segments[life.claims[f][0]].call == f for f, life in inputs.items())
    assert not any(f in trace.lives[i].claims for i, f in trace.inputs if trace.lives[i].bytes == size)


def test_the_picture_leaves_out_what_is_nothing_at_the_peak():
    "The loss alone is left of the logits at the end of backward: the table has it, the picture names what counts"
    plan = plan_training(tf.LlamaForCausalLM(tf.LlamaConfig(**SMALL)), 2, 16, machine="a100-80")
    parts = {"weights": [10 << 30, 0], "logits and embeddings": [512, 0], "gradients": [5 << 30, 0]}
    plan = dataclasses.replace(plan, parts=parts, limit=20 << 30)
    page = plan._repr_html_()
    assert "GPU at the peak: 15GiB of 20GiB" in page and "weights 10GiB · gradients 5GiB<" in page
    assert "logits and embeddings" not in page and "512B" in str(plan)
    assert "host: " not in page.replace("waiting for the host: ", "")       # nothing lies there


def test_capped_logits_take_more_than_plain_ones():
    "One kernel does the loss in the logits' place; what caps or scales them keeps copies in float32"
    size = dict(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, vocab_size=8192, use_cache=False)
    capped = lambda cap: tf.Gemma2ForCausalLM(tf.Gemma2Config(**size, final_logit_softcapping=cap))
    plans = [plan_training(capped(cap), 4, 256, offload=None, loss="chunked") for cap in (None, 30.0)]
    plain, capped = (p.parts["logits and embeddings"][0] for p in plans)
    # two float32 tensors of the logits' size
    assert capped - plain > 2 * 4 * 4 * 256 * 8192 * 0.9


def test_a_block_that_writes_to_its_buffers_is_planned_as_it_is(caplog):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin, self.norm = nn.Linear(64, 64), nn.BatchNorm1d(64)
        def forward(self, x): return x + self.norm(self.lin(x))
    model = nn.Sequential(*(Block() for _ in range(3)))
    inputs = (torch.zeros(8, 64),)
    plans = [plan_training(model, inputs=inputs, dtype=None, offload=None, compile=c) for c in (True, False)]
    assert plans[0].peak_bytes == plans[1].peak_bytes and "writes to its buffers" in caplog.text


def test_rates_change_what_they_should():
    trace = trace_step(MODELS["llama"], {"input_ids": torch.empty(8, 512, dtype=torch.long), "use_cache": False})
    plan = lambda **k: plan_training(MODELS["llama"], trace=trace, **k)
    fast = dataclasses.replace(machine("h200"), hbm=1e13)
    assert plan(machine=fast).step_s < plan(machine="h200").step_s
    whole = plan(offload=1.0)
    assert plan(offload=1.0, machine=dataclasses.replace(machine("h200"), host_adam=1e6)).step_s > 1.5 * whole.step_s
    assert plan(gpus=2, machine=dataclasses.replace(machine("h200"), network=1e8)).bound == "network"
    for m in MACHINES: assert plan(machine=m).step_s > 0


def test_a_host_too_small_for_its_blocks_is_told_apart_from_a_gpu_too_small():
    "Weights and gradients in 2 bytes, a master and two moments in 4; what is asked for suffices"
    model, batch = MODELS["llama"], {"input_ids": torch.empty(8, 512, dtype=torch.long), "use_cache": False}
    plan = lambda **k: plan_training(model, inputs=batch, host=1.0, **k)
    blocks = 16 * sum(p.numel() for p in model.model.layers.parameters())
    assert plan(host_memory=blocks, offload=None).parts["weights"][1] == blocks / 8
    with pytest.raises(ValueError, match="host_memory=.* is less than what host=1.0 keeps there, .*smaller host=$"):
        plan(host_memory=blocks - 1)
    rest = 12 * sum(p.numel() for n, p in model.named_parameters() if "layers" not in n)
    all_of_it = dict(offload=1.0, link=1.0)
    assert plan(host_memory=blocks + rest, **all_of_it).parts["optimizer state"][1] == blocks * 12 // 16 + rest
    with pytest.raises(ValueError, match="that offload=1.0 keeps on the host"):
        plan(host_memory=blocks + rest - 1, **all_of_it)


def test_gpus_share_what_lives_on_the_host():
    "One copy for all, as `HostRing` keeps it; a GPU as full as one alone; gradients of all blocks cross the network"
    model, batch = MODELS["llama"], {"input_ids": torch.empty(8, 512, dtype=torch.long), "use_cache": False}
    plan = lambda n, **k: plan_training(model, inputs=batch, gpus=n, host=1.0, offload=None, **k)
    one, two, four = map(plan, (1, 2, 4))
    for many, n in ((two, 2), (four, 4)):
        assert many.peak_bytes == one.peak_bytes and many.tokens == n * one.tokens and many.gpus == n
        for what in ("weights", "optimizer state", "gradients"):
            assert many.parts[what][1] == pytest.approx(one.parts[what][1] / n, abs=1)
    # a ring sends and receives (n − 1)/n of them twice; float32 and bf16 gradients of every weight
    grown = 2 * sum(p.numel() for p in model.parameters())
    for kind, size in ((None, grown), (torch.float32, 2 * grown)):
        for n in (2, 4):
            wire = plan(n, reduce_dtype=kind).times["network"]
            assert wire == pytest.approx(2 * (n - 1) / n * size / machine("h200").network, rel=1e-6)
    slow = dict(machine=dataclasses.replace(machine("h200"), host_adam=1e6))
    assert plan(2, **slow).step_s == pytest.approx(plan(1, **slow).step_s / 2, rel=0.02)      # each core has half of it
    with pytest.raises(ValueError, match="cp=2: host= is for GPUs with rows of their own"): plan(2, cp=2)
    with pytest.raises(ValueError, match="gpus=16: GPUs of one host share its memory, and one has 8"): plan(16)


# --------------------------------------------------------------------------------------------------------- on a GPU

class Layer(nn.Module):
    def __init__(self, d, heads):
        super().__init__()
        self.heads, self.ln1, self.ln2 = heads, nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.out, self.up, self.down = (
            nn.Linear(d, 3 * d), nn.Linear(d, d), nn.Linear(d, 4 * d), nn.Linear(4 * d, d))
    def forward(self, x):
        B, L, D = x.shape
        q, k, v = self.qkv(self.ln1(x)).view(B, L, 3, self.heads, D // self.heads).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(B, L, D))
        return x + self.down(F.gelu(self.up(self.ln2(x)), approximate="tanh"))


class GPT(nn.Module):
    def __init__(self, layers, d, heads, vocab=50304, length=512, recompute=0):
        super().__init__()
        self.recompute, self.emb, self.pos = recompute, nn.Embedding(vocab, d), nn.Embedding(length, d)
        self.ln, self.head, self.blocks = (
            nn.LayerNorm(d), nn.Linear(d, vocab, bias=False), nn.ModuleList(Layer(d, heads) for _ in range(layers)))
    def forward(self, ids):
        x = self.emb(ids) + self.pos(torch.arange(ids.shape[1], device=ids.device))
        for i, b in enumerate(self.blocks): x = checkpoint(b, x, use_reentrant=False) if i < self.recompute else b(x)
        return self.head(self.ln(x))


def forget():
    "What tests before left on the GPU: compiled blocks, which are freed as cycles, and cuBLAS's workspaces"
    torch.compiler.reset()
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize(
    "layers,d,batch,recompute,vocab",
    [(12, 1024, 16, 0, 50304), (12, 1024, 16, 8, 50304), (24, 2048, 32, 24, 50304), (16, 2048, 16, 4, 1024)])
def test_peak_is_within_five_percent_on_a_gpu(layers, d, batch, recompute, vocab, compile):
    plan = plan_training(
        GPT(layers, d, d // 64, vocab).bfloat16(), batch, 512, checkpoint=recompute, offload=None, master=None,
        compile=compile)
    forget()
    before = torch.cuda.memory_allocated()
    with torch.device("cuda"): model = GPT(layers, d, d // 64, vocab, recompute=recompute).bfloat16()
    if compile:
        for b in model.blocks: b.compile()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    ids = torch.randint(0, vocab, (batch, 512), device="cuda")
    for i in range(4):
        if i == 1: torch.cuda.reset_peak_memory_stats()
        step_loss(model, (ids,)).backward()
        opt.step()
        opt.zero_grad()
    peak = torch.cuda.max_memory_allocated() - before
    print(plan.check(peak_bytes=peak))
    assert plan.peak_bytes == pytest.approx(peak, rel=0.05)


def small_llama(**size):
    heads = dict(num_attention_heads=4, num_key_value_heads=2)
    size = dict(hidden_size=64, num_hidden_layers=3, intermediate_size=160, vocab_size=512) | heads | size
    return tf.LlamaForCausalLM(tf.LlamaConfig(**size, use_cache=False, tie_word_embeddings=False)).bfloat16()


def packed_under_lora(bits, device="meta", **size):
    from bmlab.delta.lora import Lora
    with torch.device(device): model = small_llama(**size)
    if device == "cuda": model.model.rotary_emb = type(model.model.rotary_emb)(model.config).cuda()
    if bits: pack_linears(model, bits=bits)
    return model, Lora(
        model, r=8, modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]).freeze()


@pytest.mark.parametrize("compile", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_plan_counts_packed_weights_as_they_lie(compile):
    "Codes where they are, a widened weight only while it is multiplied, and time for widening it"
    heads, plans = dict(num_attention_heads=8, num_key_value_heads=8), {}
    size = dict(hidden_size=1024, intermediate_size=2816, num_hidden_layers=4, vocab_size=4096) | heads
    for bits in (None, 8, 4):
        model, _ = packed_under_lora(bits, **size)
        stored = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
        plans[bits] = p = plan_training(
            model, 4, 256, offload=None, master=None, compile=compile, checkpoint=0, loss="chunked", machine="h200")
        assert p.parts["weights"][0] == pytest.approx(stored, rel=1e-3)
    mine, wide = plans[4], plans[None]
    # of the widest layer, or the head, and its like on the way
    whole = 2 * 2 * max(2816 * 1024, 4096 * 1024)
    assert mine.parts["activations"][0] <= wide.parts["activations"][0] + whole
    assert plans[8].peak_bytes < wide.peak_bytes and plans[4].peak_bytes < plans[8].peak_bytes
    assert wide.step_s < mine.step_s < 1.6 * wide.step_s


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("bits,recompute", [(None, 0), (8, 0), (4, 0), (4, 6)])
def test_peak_over_packed_weights_is_within_five_percent_on_a_gpu(bits, recompute, compile):
    from bmlab.train.losses import lm_loss
    from bmlab.train.sharding import shard
    size = dict(
        hidden_size=2048, intermediate_size=5632, num_hidden_layers=8, num_attention_heads=16, num_key_value_heads=4,
        vocab_size=32768)
    forget()
    before = torch.cuda.memory_allocated()
    model, delta = packed_under_lora(bits, "cuda", **size)
    ids = torch.randint(0, 32768, (4, 1024), device="cuda")
    plan = plan_training(
        model, inputs={"input_ids": ids, "labels": ids}, checkpoint=recompute, offload=None, master=None,
        compile=compile, loss="chunked")
    shard(model, checkpoint=recompute, compile=compile)
    opt = torch.optim.AdamW(delta.trainable(), lr=1e-4, fused=True)
    for i in range(4):
        if i == 1: torch.cuda.reset_peak_memory_stats()
        lm_loss(model, {"input_ids": ids, "labels": ids}).backward()
        opt.step()
        opt.zero_grad()
    peak = torch.cuda.max_memory_allocated() - before
    print(plan, plan.check(peak_bytes=peak))
    assert plan.peak_bytes == pytest.approx(peak, rel=0.05)


def test_a_packed_base_that_does_not_fit_is_told_of_the_host():
    "More GPUs would each hold all codes"
    m = build("llama2-7b", device="meta", dtype=torch.bfloat16)
    pack_linears(m, bits=4)
    Lora(m, r=8).freeze()
    asked = dict(batch=1, seq=256, machine="h100-80")
    with pytest.raises(ValueError, match="try host='auto'") as e: plan_training(m, memory_limit="3.5GiB", **asked)
    assert "gpus" not in str(e.value)
    assert plan_training(m, memory_limit="3.5GiB", host="auto", **asked).peak_bytes < 3.5 * 2**30


def test_names_of_dtypes_and_numbers_that_are_none():
    m = build("llama2-7b", device="meta", dtype=torch.bfloat16, num_hidden_layers=2)
    asked = dict(batch=1, seq=64, machine="h100-80")
    assert plan_training(m, dtype="bfloat16", **asked).peak_bytes == plan_training(m, **asked).peak_bytes
    for wrong in (dict(batch=2.5), dict(batch="4"), dict(tokens="20B"), dict(link="auto")):
        with pytest.raises(TypeError, match=f"{next(iter(wrong))}="): plan_training(m, **asked | wrong)
    with pytest.raises(ValueError, match="bf17"): plan_training(m, dtype="bf17", **asked)


def test_a_mixture_in_other_dtypes_than_bfloat16():
    "torch's own rule for the shapes of a grouped product takes bfloat16 alone; a step on a CPU says what it takes"
    model = MODELS["mixtral"]
    same = [plan_training(model, batch=2, seq=32, dtype=d, machine="h200") for d in (torch.bfloat16, torch.float16)]
    assert same[0].parts == same[1].parts
    plan_training(model, batch=2, seq=32, machine="h200", dtype=torch.float32)
    real = copy.deepcopy(model)
    real.set_attn_implementation("eager")
    ids = torch.randint(0, 200, (16, 64))
    inputs = {"input_ids": ids, "labels": ids, "use_cache": False}
    trace = trace_step(copy.deepcopy(real), inputs)
    with Live([*real.parameters(), *real.buffers(), ids]) as live: step_loss(real, inputs).backward()
    line = lifetimes(trace, [])
    assert occupancy(line, line.kind != 3).max() == pytest.approx(live.peak, rel=0.05)


@pytest.mark.parametrize("name, learned", [("gpt2", True), ("opt", True), ("bert", True), ("llama", False)])
def test_a_text_beyond_a_table_of_positions(name, learned):
    model, most = dict(models())[name], dict(bert=512, llama=2048).get(name, 64)
    plan_training(model, batch=1, seq=most, machine="h200")
    if not learned:
        plan_training(model, batch=1, seq=most + 1, machine="h200")
        return
    with pytest.raises(ValueError, match=f"seq={most + 1}: .* has positions for {most} tokens"):
        plan_training(model, batch=1, seq=most + 1, machine="h200")
    with pytest.raises((IndexError, RuntimeError)): model(torch.zeros(1, most + 1, dtype=torch.long))


def test_numbers_that_no_cost_has():
    model, given = dict(models())["llama"], dict(batch=1, seq=32, machine="h200")
    for name, x in dict(tokens=float("inf"), price_per_gpu_hour=-3, pue=0.5, carbon=-1).items():
        with pytest.raises(ValueError, match=f"{name}={x}: a "): plan_training(model, **given, **{name: x})
    with pytest.raises(TypeError, match="price_per_gpu_hour='3': a number"):
        plan_training(model, **given, tokens=1e9, price_per_gpu_hour="3")
    with pytest.raises(ValueError, match="gpus=-1: .* 1 at least"): training_cost(3600, gpus=-1)


def test_a_plan_says_of_which_machine():
    plan = plan_training(dict(models())["llama"], batch=1, seq=32, machine="l40s")
    assert "on l40s" in str(plan) and "1 GPU (l40s)" in plan._repr_html_()
    with pytest.raises(ValueError, match="measure.device='cpu'. this processor"): machine("cpu")


def test_advice_on_a_batch_that_is_far_too_large():
    with pytest.raises(ValueError, match=r"try batch=(\d+)") as e:
        plan_training(dict(models())["llama"], batch=1 << 40, seq=32, machine="h200")
    most = int(str(e.value).partition("try batch=")[2].split()[0])
    plan_training(dict(models())["llama"], batch=most, seq=32, machine="h200")
    with pytest.raises(ValueError, match="below the smallest"):
        plan_training(dict(models())["llama"], batch=int(most * 1.02), seq=32, machine="h200")

"Fused decoder blocks: SmolLM2, streamed, beneath delta banks and other wrappers, in Triton's interpreter, on a GPU"
import copy, functools, gc, sys, weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import transformers as tf
from torch.utils.flop_counter import FlopCounterMode

from bmlab.cook.cook import Cook
from bmlab.delta.delta import deltas
from bmlab.delta.lora import Lora
from bmlab.infer.decode import Decoder
from bmlab.infer.fused import _BlockPart, _Whole, fuse_decode
from bmlab.kernels import cpu as cpu_kernels
from bmlab.kernels.layers import Int4Linear, Int8Linear, pack_linears
from bmlab.cook.neurons import NeuronSparse

needs_c = pytest.mark.skipif(not cpu_kernels.available(), reason="no compiler here")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
TINY = dict(
    hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
    head_dim=16, vocab_size=128, pad_token_id=0, bos_token_id=1, eos_token_id=2
)


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad(): yield


def llama(**more):
    torch.manual_seed(0)
    model = tf.LlamaForCausalLM(tf.LlamaConfig(**(TINY | more))).eval()
    for p in model.parameters(): p.add_(torch.randn_like(p) * 0.02)
    return model


def gemma(family="gemma3", **more):
    "Norms behind attention and MLP, too"
    torch.manual_seed(0)
    config = TINY | dict(query_pre_attn_scalar=16, sliding_window=32) | more
    if family == "gemma2": model = tf.Gemma2ForCausalLM(tf.Gemma2Config(**config | dict(attn_logit_softcapping=None)))
    else: model = tf.Gemma3ForCausalLM(tf.Gemma3TextConfig(**config))
    for p in model.parameters(): p.add_(torch.randn_like(p) * 0.02)
    return model.eval()


def walk(model, kv_bits=16, steps=3, **options):
    decoder = Decoder(model, max_batch=2, max_ctx=100, kv_bits=kv_bits, **options)
    assert decoder.mode == "static", decoder.why_generate
    out = [decoder.prefill([[5, 9, 33, 7, 61, 20], [7, 11]])[:, None]]
    for i in range(steps): out.append(decoder.step([[i + 3], [40 + i]]))
    out.append(decoder.step([[8, 9, 10], [50, 51, 52]]))
    return torch.cat(out, 1).float()


def apart(a, b): return ((a - b).norm() / (b - b.mean(-1, keepdim=True)).norm()).item()


def test_a_tree_and_kept_tokens():
    model = llama()
    fast = copy.deepcopy(model)
    fuse_decode(fast)
    mask = torch.tensor([[[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]]] * 2).bool()
    depth = torch.tensor([[0, 1, 1, 2]] * 2)
    outs = []
    for m in (model, fast):
        d = Decoder(m, max_batch=2, max_ctx=60)
        d.prefill([[5, 9, 33], [7, 11]])
        a = d.step([[1, 6, 2, 9], [2, 2, 9, 4]], keep=False, mask=mask, positions=depth)
        d.keep([[0, 1, 3], [0]])
        outs.append(torch.cat([a, d.step([[3], [4]])], 1))
    assert apart(outs[1], outs[0]) < 1e-5


def test_rows_that_come_and_go():
    model = llama()
    fast = copy.deepcopy(model)
    fuse_decode(fast)
    outs = []
    for m in (model, fast):
        d = Decoder(m, max_batch=4, max_ctx=60)
        d.prefill([[5, 9, 33], [7, 11]], rows=[2, 0])
        a = d.step([[1], [2], [3], [4]])
        d.free(2)
        d.prefill([[8] * 20], rows=[2])
        d.prefill([[3, 4]], rows=[1])
        b = d.step([[1], [2], [3], [4]])
        d.move([2, 2])
        c = d.step([[9], [10]])
        outs.append(torch.cat([a[[0, 2]].flatten(), b[:3].flatten(), c.flatten()]))
    assert apart(outs[1][None], outs[0][None]) < 1e-5


def test_two_threads_with_one_model():
    "Each has a decoder of its own; what the layers of a forward share is a thread's own too"
    model = llama(num_hidden_layers=6)
    fuse_decode(model)
    # one at a time, three at a time
    tokens = [[[5], [9], [33], [7]] * 15, [[8, 9, 10], [50, 51, 52]] * 30]

    def decode(steps):
        d = Decoder(model, max_batch=1, max_ctx=300)
        with torch.no_grad(): return torch.cat([d.prefill([[5, 9, 33]])[:, None], *(d.step([ids]) for ids in steps)], 1)

    alone, interval = [decode(t) for t in tokens], sys.getswitchinterval()
    # let them take turns often
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(2) as pool: together = list(pool.map(decode, tokens * 2))
    finally: sys.setswitchinterval(interval)
    for got, want in zip(together, alone * 2): assert torch.equal(got, want)


def test_alone_in_a_batch_of_others():
    "A row's bits in bfloat16 do not depend on its neighbours"
    fast = pack_linears(llama().bfloat16())
    fuse_decode(fast)
    alone, both = Decoder(fast, max_batch=1, max_ctx=60), Decoder(fast, max_batch=3, max_ctx=60)
    prompts = [[5, 9, 33, 7], [8, 8, 8, 8], [3, 1, 4, 1]]
    first = alone.prefill(prompts[:1])
    many = both.prefill(prompts)
    assert torch.equal(first[0], many[0])
    for i in range(5): assert torch.equal(alone.step([[i + 3]])[0], both.step([[i + 3], [i + 9], [i + 20]])[0])


def test_streamed_is_fused_too():
    "Blocks that stream keep their joined weights and their bits"
    from bmlab.infer.streaming import Streamer
    model = pack_linears(llama().bfloat16())
    handle = fuse_decode(model)
    want = walk(model)
    with pytest.raises(ValueError, match="fused already"): fuse_decode(model)
    streamer = Streamer(model, streamed=["model.layers.0", "model.layers.1", "model.layers.2"], device="cpu")
    try:
        assert torch.equal(walk(model), want) and all(layer.self_attn._fused.qkv.joined for layer in model.model.layers)
        with pytest.raises(RuntimeError, match="streaming"): handle.join()
        handle.undo()
        with pytest.raises(ValueError, match="stream"): fuse_decode(model)
    finally: streamer.close()
    again = fuse_decode(model)
    assert torch.equal(walk(model), want) and again.table.fused.all()


def test_loaded_weights_are_seen():
    "Weights that are loaded over the joined ones, in place or as new tensors"
    for assign in (False, True):
        one, two = (pack_linears(llama(initializer_range=r).bfloat16()) for r in (0.02, 0.3))
        assert apart(walk(one), walk(two)) > 0.1
        fuse_decode(one)
        fast_two = copy.deepcopy(two)
        fuse_decode(fast_two)
        walk(one)
        one.load_state_dict(two.state_dict(), assign=assign)
        # (tensors that are put in are no longer joined: they take torch's way, which rounds elsewhere than C does)
        assert apart(walk(one), walk(fast_two)) <= (0.03 if assign else 0)


def with_peft(model):
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    peft.inject_adapter_in_model(
        peft.LoraConfig(target_modules=["q_proj", "down_proj"], init_lora_weights=False), model
    )


@pytest.mark.parametrize(
    "edit",
    [
        lambda m: setattr(m.model.layers[1], "mlp", copy.deepcopy(m.model.layers[0].mlp)),
        lambda m: setattr(m.model.layers[1].mlp, "act_fn", torch.nn.ReLU()),
        lambda m: setattr(m.model.layers[1].mlp, "down_proj", torch.nn.Identity()),
        lambda m: setattr(
            m.model.layers[1].self_attn, "q_proj",
            torch.nn.Sequential(m.model.layers[1].self_attn.q_proj, torch.nn.Tanh())
        ),
        lambda m: setattr(m.model.layers[1], "input_layernorm", torch.nn.Identity()),
        lambda m: m.model.layers.__setitem__(1, llama(intermediate_size=64, vocab_size=77).model.layers[1]),
        lambda m: torch.nn.utils.parametrize.register_parametrization(
            m.model.layers[1].self_attn.v_proj, "weight", torch.nn.Tanh()
        ),
        lambda m: torch.nn.utils.parametrize.register_parametrization(
            m.model.layers[1].post_attention_layernorm, "weight", torch.nn.Tanh()
        ),
        lambda m: pack_linears(m, 8), with_peft
    ],
    ids=["mlp", "activation", "down", "q", "norm", "block", "parametrized", "parametrized norm", "packed", "peft"]
)
@pytest.mark.parametrize("rows", [1, 2])
def test_what_is_put_in_later_is_used(edit, rows):
    model = llama(intermediate_size=64)
    fast = copy.deepcopy(model)
    fuse_decode(fast)
    for m in (model, fast):
        walk(m)
        edit(m)
    def ids(m):
        d = Decoder(m, max_batch=rows, max_ctx=50)
        return torch.cat([d.prefill([[5, 9, 33]] * rows)[:, None], *(d.step([[i]] * rows) for i in range(3))], 1)
    want = ids(model)
    assert apart(ids(fast), want) < 1e-5
    assert apart(ids(llama(intermediate_size=64)), want) > 1e-4                               # it matters


@pytest.mark.parametrize("bits", [None, 8, 4])
@pytest.mark.parametrize("had", [False, True])
def test_a_bias_that_comes_or_goes(bits, had):
    model = llama(intermediate_size=64, mlp_bias=had, attention_bias=had)
    if bits: pack_linears(model, bits)
    fast = copy.deepcopy(model)
    fuse_decode(fast)
    before = walk(fast)
    for m in (model, fast):
        layer = m.model.layers[1]
        for linear in (layer.mlp.down_proj, layer.mlp.up_proj, layer.self_attn.q_proj):
            linear.bias = None if had else torch.nn.Parameter(torch.linspace(-1, 1, 64))
    assert apart(walk(fast), walk(model)) < 1e-5 < 1e-4 < apart(before, walk(model))


def blocks(model): # that run fused when `model` decodes
    ran, call = [], _BlockPart.__call__
    try:
        _BlockPart.__call__ = lambda self, *args: ran.append(self) or call(self, *args)
        walk(model)
    finally: _BlockPart.__call__ = call
    return len({*ran})


def test_what_nobody_reads_may_go():
    "A method of compression puts a module beside the layers of an MLP, and takes it away"
    model = llama()
    cook = Cook(model, [NeuronSparse(keep=0.5)])
    fuse_decode(model)
    cook.detach()
    assert blocks(model) == 3


def test_parametrized_and_taken_back():
    model = llama()
    fused = fuse_decode(model)
    want = walk(model)
    norm, q = model.model.layers[1].input_layernorm, model.model.layers[0].self_attn.q_proj
    for m in (norm, q): torch.nn.utils.parametrize.register_parametrization(m, "weight", torch.nn.Identity())
    assert fused.join() == 5 and apart(walk(model), want) < 1e-5
    fused.undo()
    for m in (norm, q): torch.nn.utils.parametrize.remove_parametrizations(m, "weight")
    assert not any("Fused" in type(m).__name__ for m in model.modules())
    fuse_decode(model)
    assert blocks(model) == 3 and apart(walk(model), want) < 1e-5


def test_a_replica_has_its_own_weights():
    model = llama()
    fuse_decode(model)
    x = torch.randn(1, 3, 64)
    mlp = model.model.layers[0].mlp
    # as torch.nn.DataParallel does: with the attributes of the original
    twin = mlp._replicate_for_data_parallel()
    for name, m in mlp._modules.items(): twin._modules[name] = copy.deepcopy(m)
    twin.down_proj.weight.mul_(2)
    assert torch.allclose(twin(x), 2 * mlp(x), atol=1e-5)


@pytest.mark.parametrize("bits", [8, 4])
def test_joined_once(bits):
    "One storage for q, k, v and one for gate, up; nothing twice"
    model = pack_linears(llama(), bits=bits, group_size=32)
    fuse_decode(model)
    for layer in model.model.layers:
        a, m = layer.self_attn, layer.mlp
        assert {type(x) for x in (a.q_proj, m.up_proj)} == {Int8Linear if bits == 8 else Int4Linear}
        for group in ((a.q_proj, a.k_proj, a.v_proj), (m.gate_proj, m.up_proj)):
            assert len({x.codes.untyped_storage().data_ptr() for x in group}) == 1
            assert group[0].codes.untyped_storage().nbytes() == sum(x.codes.nbytes for x in group)


def test_a_bank_of_deltas():
    "Users' own LoRA on q and v, by row of the batch"
    from bmlab.delta.bank import DeltaBank
    from bmlab.delta.lora import Lora
    base, outs = llama(), []
    users = {}
    for i, user in enumerate(("ann", "bob")):
        d = Lora(base, r=2, modules=["q_proj", "v_proj"])
        torch.manual_seed(i + 1)
        for p in d.trainable(): p.data.normal_(std=0.3)
        users[user] = d
        d.detach()
    for fuse in (False, True):
        model = copy.deepcopy(base)
        if fuse: fuse_decode(model)
        bank = DeltaBank(model)
        for user, d in users.items(): bank.add(user, d.copy_to(model))
        with bank.route(["ann", "bob"]): outs.append(walk(model))
    assert apart(outs[1], outs[0]) < 1e-5 and apart(outs[0], walk(base)) > 0.05


@pytest.mark.parametrize("bits", [32, 8, 4])
def test_loras_stand_behind_one_product(bits):
    "plain Loras on layers that are one product cost no product of their own; others go the layers' own way"
    model = llama(hidden_size=128, intermediate_size=256)
    if bits < 32: pack_linears(model, bits=bits, group_size=32)
    for name, r, dtype in (("one", 4, torch.float32), ("two", 2, torch.bfloat16)):
        lora = Lora(model, r=r, modules=["q_proj", "v_proj", "up_proj", "o_proj"], name=name)
        for p in lora.parameters(): p.data = torch.randn_like(p).mul_(0.05).to(dtype)
    slow = copy.deepcopy(model)
    fuse_decode(model)
    layer = model.model.layers[0]
    product, x = layer.self_attn._fused.qkv, torch.randn(5, 128)
    y = product.with_loras(x)
    own = slow.model.layers[0].self_attn
    assert torch.allclose(y, torch.cat([m(x) for m in (own.q_proj, own.k_proj, own.v_proj)], 1), atol=1e-5)
    assert apart(walk(model), walk(slow)) < 1e-5
    with lora.off(), deltas(slow)["two"].off():
        assert torch.allclose(product.with_loras(x)[:, -32:], own.v_proj(x), atol=1e-5)
    layer.self_attn.q_proj._deltas["one"].register_forward_hook(lambda *_: None)
    assert product.with_loras(x) is None
    Lora(model, r=2, modules=["gate_proj"], dora=True)
    assert layer.mlp._fused.up.with_loras(x) is None


def test_under_autocast_and_in_training_it_steps_aside():
    model = llama()
    plain = copy.deepcopy(model)
    fuse_decode(model)
    with torch.autocast("cpu", torch.bfloat16): assert torch.equal(walk(model), walk(plain))
    ids = torch.randint(3, 120, (2, 6))
    with torch.enable_grad():
        a, b = model.train()(ids, labels=ids).loss, plain.train()(ids, labels=ids).loss
        a.backward()
        b.backward()
    assert torch.equal(a.detach(), b.detach()) and torch.equal(
        model.model.layers[0].self_attn.q_proj.weight.grad, plain.model.layers[0].self_attn.q_proj.weight.grad
    )


def test_attentions_and_hidden_states_are_given():
    model = llama()
    model.set_attn_implementation("eager")
    plain = copy.deepcopy(model)
    fuse_decode(model)
    ids = torch.randint(3, 120, (2, 6))
    a, b = (m(ids, output_attentions=True, output_hidden_states=True) for m in (model, plain))
    assert len(a.attentions) == len(b.attentions) == 3 and torch.allclose(a.attentions[1], b.attentions[1], atol=1e-6)
    assert len(a.hidden_states) == 4 and torch.allclose(a.hidden_states[2], b.hidden_states[2], atol=1e-5)
    assert apart(walk(model), walk(plain)) < 1e-5


@pytest.mark.slow
def test_smollm2_says_the_same():
    "Real weights: the fused model's greedy text is the plain one's"
    from bmlab.models.load import load
    model, tok = load("smollm2-135m")
    ids = tok("The capital of France is", return_tensors="pt").input_ids
    for dtype, form in ((torch.float32, dict(bits=8)), (torch.float32, None), (torch.bfloat16, dict(bits=8))):
        if form is None: model.model.layers = model.model.layers[:8]     # (all thirty once)
        plain = copy.deepcopy(model).to(dtype).eval()
        if form: pack_linears(plain, **form)
        fast = copy.deepcopy(plain)
        handle = fuse_decode(fast)
        assert handle.table.fused.all()
        texts = []
        for m in (plain, fast):
            d = Decoder(m, max_ctx=128)
            at = d.prefill(ids).argmax(-1, keepdim=True)
            text = [at.item()]
            for _ in range(20):
                at = d.step(at)[:, -1].argmax(-1, keepdim=True)
                text.append(at.item())
            texts.append(text)
        same = next((i for i, (a, b) in enumerate(zip(*texts)) if a != b), 21)
        assert same == 21 or dtype == torch.bfloat16 and same >= 4, (
            dtype, form, tok.decode(texts[0]), tok.decode(texts[1])
        )


@pytest.mark.long
@pytest.mark.skipif(torch.cuda.is_available(), reason="for the interpreter")
@pytest.mark.parametrize("name", [pytest.param("llama", marks=pytest.mark.slow), "gemma3", "mistral", "phi3"])
def test_in_the_interpreter(name):
    "The Triton form of a block equals the module, int8 cache and windows too"
    small = TINY | dict(
        hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        vocab_size=64
    )
    make = {
        "llama": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**small)),
        "gemma3": lambda: tf.Gemma3ForCausalLM(tf.Gemma3TextConfig(**small, sliding_window=6)),
        "mistral": lambda: tf.MistralForCausalLM(tf.MistralConfig(**small, sliding_window=6)),
        "phi3": lambda: tf.Phi3ForCausalLM(tf.Phi3Config(**small)),
    }[name]
    torch.manual_seed(0)
    plain = make().eval()
    fast = copy.deepcopy(plain)
    handle = fuse_decode(fast, kernels="triton")
    # (Gemma's rotary embedding has two kinds of angles)
    assert handle.table.fused[handle.table.form != "angles"].all(), handle
    for kv_bits in (16, 8):
        assert apart(walk(fast, kv_bits, 1), walk(plain, kv_bits, 1)) < (1e-5 if kv_bits == 16 else 0.03)


@pytest.mark.parametrize("bits", [None, 8, 4])
def test_queries_keys_and_values_of_one_layer(bits):
    "Phi-3's blocks are LLaMA's, but for one product that makes all three; where a part of a head turns, the table's"
    for turned in (1.0, 0.5):
        config = tf.Phi3Config(**TINY, partial_rotary_factor=turned)
        torch.manual_seed(0)
        plain = tf.Phi3ForCausalLM(config).eval()
        if bits: pack_linears(plain, bits=bits, **({"group_size": 32} if bits == 4 else {}))
        fast = copy.deepcopy(plain)
        handle = fuse_decode(fast)
        assert handle.table.fused.all(), handle
        block = fast.model.layers[0]._fused
        assert isinstance(block, _BlockPart) == (turned == 1.0)
        assert apart(walk(fast), walk(plain)) < 1e-5


@pytest.mark.skipif(not cpu_kernels.available(), reason="no compiler here")
@pytest.mark.parametrize("meddle", ["nothing", "a hook", "in place", "another tensor", "weights"])
def test_blocks_that_follow_each_other_are_one_call(meddle, monkeypatch):
    "Where one is not called with what the one before it gave, it computes by itself; as then, so are its weights seen"
    fused, calls = sys.modules["bmlab.infer.fused"], []
    model = pack_linears(llama(num_hidden_layers=4))
    handle = fuse_decode(model)
    real, second = fused._path, model.model.layers[1]
    def counted(step, *given):
        y = real(step, *given)
        if y is not None: calls.append(len(step.path))
        return y
    def meddled(m, args, out):
        if m is not second: return None
        if meddle == "in place": out.mul_(1.5)
        return out * 1.5 if meddle == "another tensor" else None
    def run():
        hooks, decoder, out = [], Decoder(model, max_batch=2, max_ctx=40), []
        decoder.prefill([[5, 9, 33], [7, 11]])
        calls.clear()
        for i in range(5):
            if i == 2 and meddle == "a hook":
                hooks.append(second.register_forward_hook(lambda m, args, out: out * 1.5))
            if i == 2 and meddle in ("in place", "another tensor"):
                hooks.append(torch.nn.modules.module.register_module_forward_hook(meddled))
            if meddle == "weights" and i in (2, 4):
                model.model.layers[3].mlp.down_proj.scale.mul_(4.0 if i == 2 else 0.25)
            out.append(decoder.step([[i + 3], [40 + i]]))
        for h in hooks: h.remove()
        return torch.cat(out, 1)
    monkeypatch.setattr(fused, "_path", counted)
    together, together_calls = run(), calls[:]
    monkeypatch.setattr(fused, "_path", lambda *given: None)
    assert torch.equal(run(), together)
    # (its own hook is looked for beforehand; weights that changed are read anew at that token)
    assert [4] * {"nothing": 5, "a hook": 2, "another tensor": 3, "in place": 3, "weights": 3}[meddle] == together_calls
    handle.undo()


def steps(decoder, n=4): return [decoder.step([[i + 3]]) for i in range(n)]


def begun(model):
    decoder = Decoder(model, max_batch=1, max_ctx=40)
    decoder.prefill([[5, 9, 33]])
    return decoder


def a_delta(model):
    decoder = begun(model)
    torch.manual_seed(0)
    out, lora = steps(decoder), Lora(model, r=2, modules=["layers[3].mlp.down_proj"])
    for site in lora.sites.values(): site.B.data.fill_(0.5)
    out += steps(decoder)
    lora.detach()
    return out + steps(decoder)


def embeddings_from_outside(model):
    out, decoder = [], begun(model)
    for how in (torch.no_grad, torch.inference_mode):
        given = torch.randn(1, 1, TINY["hidden_size"], generator=torch.Generator().manual_seed(0))
        hook = model.model.embed_tokens.register_forward_hook(lambda m, args, y: given)
        with how(): out += steps(decoder)
        hook.remove()
    return [t.clone() for t in out]


def a_model_of_fewer_blocks(model):
    few, out = copy.copy(model), []
    few._modules, few.config = dict(model._modules), copy.deepcopy(model.config)
    few.model = copy.copy(model.model)
    few.model._modules, few.config.num_hidden_layers = dict(model.model._modules), 2
    few.model.layers, few.model.config = model.model.layers[:2], few.config
    all_of_it, some = begun(model), begun(few)
    for i in range(4): out += [all_of_it.step([[i + 3]]), some.step([[i + 3]])]
    return out


def keys_of_eight_bits(model):
    decoder = Decoder(model, max_batch=1, max_ctx=40, kv_bits=8)
    decoder.prefill([[5, 9, 33]])
    return steps(decoder)


@pytest.mark.skipif(not cpu_kernels.available(), reason="no compiler here")
@pytest.mark.parametrize("run", [
    a_delta, embeddings_from_outside, a_model_of_fewer_blocks, keys_of_eight_bits])
def test_one_call_or_each_block_by_itself(run, monkeypatch):
    model, texts = pack_linears(llama(num_hidden_layers=4)), []
    fuse_decode(model)
    for path in (sys.modules["bmlab.infer.fused"]._path, lambda *given: None):
        monkeypatch.setattr(sys.modules["bmlab.infer.fused"], "_path", path)
        texts.append(torch.cat(run(model), 1))
    assert torch.equal(*texts)


@pytest.mark.skipif(torch.cuda.is_available(), reason="for the interpreter")
def test_angles():
    "As the module gives them; whatever is not few whole positions on one device is the module's own"
    small = dict(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1,
        vocab_size=32
    )
    plain = llama(**small)
    fast, x, at = copy.deepcopy(plain), torch.zeros(1, 5, 16), torch.tensor([[0, 3, 99, 5000, 7]])
    handle = fuse_decode(fast, kernels="triton")
    table = handle.table.set_index("form")
    assert table.fused["angles"]
    own, part = plain.model.rotary_emb, fast.model.rotary_emb
    for args, kwargs in (
        ((x, at), {}), ((x,), dict(position_ids=at)), ((), dict(x=x, position_ids=at)), ((x, at + 0.5), {}),
        ((x, torch.arange(200)[None]), {}), ((x.bfloat16(), at), {})
    ):
        for a, b in zip(part(*args, **kwargs), own(*args, **kwargs), strict=True):
            assert a.dtype == b.dtype and torch.allclose(a, b, atol=1e-5 if a.dtype == torch.float32 else 0.01)
    # as after .to("cpu") of a model that was fused on a GPU
    part._fused.step.kernels = None
    assert part._fused((x, at), {}) is None
    assert torch.equal(copy.deepcopy(fast).model.rotary_emb(x, at)[0], own(x, at)[0])
    handle.undo()
    assert type(part) is type(own) and torch.equal(part(x, at)[0], own(x, at)[0])
    for kind, factor in (("dynamic", True), ("linear", False)):
        fused = fuse_decode(
            llama(**small, rope_parameters=dict(rope_type=kind, rope_theta=1e4, factor=2.0)), kernels="triton"
        ).table.set_index("form")
        assert fused.fused["angles"] != factor and ("length of the text" in fused.why["angles"]) == factor


def test_one_row_is_tried_too(monkeypatch):
    import bmlab.kernels.triton_attention as tk
    def broken(*args, **kwargs): raise RuntimeError("no such kernel")
    monkeypatch.setattr(tk, "rope_and_attend", broken)
    table = fuse_decode(
        llama(num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1), kernels="triton"
    ).table.set_index("form")
    assert not table.fused["attention"] and "no such kernel" in table.why["attention"]


@pytest.mark.slow                               # (test_in_the_interpreter computes such blocks)
@pytest.mark.parametrize("bits", [8, 4])
def test_norms_between_products(bits, monkeypatch):
    "Three packed blocks: of seven norms' kernels one is left, and a block's rows have the same bits whoever ran before"
    import bmlab.kernels.triton_attention as small
    import bmlab.kernels.triton_products as tk
    from bmlab.infer.streaming import Streamer
    monkeypatch.setattr(
        tk, "_blocks", lambda N, K, dtype: dict(BLOCK_M=16, BLOCK_N=16, BLOCK_K=32, WARPS=2, num_warps=2, num_stages=2)
    )  # on a GPU only 16-bit rows take these
    calls, norm = [], small.rms_norm
    monkeypatch.setattr(small, "rms_norm", lambda *a, **k: calls.append(a) or norm(*a, **k))
    plain = pack_linears(
        llama(hidden_size=32, intermediate_size=32, num_attention_heads=2, num_key_value_heads=1, vocab_size=32),
        bits=bits,
        **(dict(group_size=32) if bits == 4 else {}),
    )
    fast = copy.deepcopy(plain)
    assert fuse_decode(fast, kernels="triton").table.fused.all()
    prompt, tokens = [[5, 9]], [3]
    decoders = {}                                       # making one tries the kernels, which takes as long as all else
    def steps(model, width=1):
        if model not in decoders: decoders[model] = Decoder(model, max_ctx=16)
        d = decoders[model]
        d.free(0)
        d.prefill(prompt)
        calls.clear()
        return torch.cat([d.step([[t] * width]) for t in tokens], 1)
    want = steps(plain)
    got = steps(fast)
    assert len(calls) == len(tokens) and apart(got, want) < 1e-5                            # the model's last norm
    assert apart(steps(fast, 3), steps(plain, 3)) < 1e-5
    layers = fast.model.layers
    # what the next block gets is another tensor
    hook = layers[1].register_forward_hook(lambda m, a, out: out * 1.0)
    assert torch.equal(steps(fast), got)
    hook.remove()
    with torch.inference_mode(): assert torch.equal(steps(fast), got)
    weight = layers[2].input_layernorm.weight
    kept = weight.clone()
    # behind what the block before has said of it
    def louder(m, args): m.input_layernorm.weight.copy_(2 * kept)
    hook = layers[2].register_forward_pre_hook(louder)
    loud = steps(fast)
    hook.remove()
    assert torch.equal(steps(fast), loud) and not torch.equal(loud, got)
    weight.copy_(kept)
    assert torch.equal(steps(fast), got)
    for outer in (True,) if bits == 8 else (False, True):
        streamed = copy.deepcopy(plain)
        inner = streamed.model
        fuse_decode(streamed, kernels="triton")
        # its next norm's weight is not there yet
        streamer = Streamer(streamed if outer else inner, device="cpu")
        assert torch.equal(steps(streamed), got), outer
        streamer.close()


@pytest.mark.cuda
@needs_gpu
@pytest.mark.parametrize("bits", [None, 8, 4])
def test_on_a_gpu(bits):
    """All steps from graphs, equal to eager ones, close to the plain model, rows of packed weights independent of how
    many come at once (of others one row, a few and many are products of different kernels)"""
    shape = dict(
        hidden_size=1024, intermediate_size=2816, num_attention_heads=16, num_key_value_heads=4, head_dim=64,
        vocab_size=2048
    )
    given = llama(**shape).to("cuda", torch.bfloat16)
    if bits: pack_linears(given, bits=bits)
    fast = copy.deepcopy(given)
    handle = fuse_decode(fast)
    assert handle.table.fused.all(), handle
    for kv_bits in (16, 8):
        assert apart(walk(fast, kv_bits), walk(given, kv_bits)) < 0.05
        assert torch.equal(walk(fast, kv_bits, graph=False), walk(fast, kv_bits))
    one, many = Decoder(fast, max_ctx=100), Decoder(fast, max_ctx=100)
    for d in (one, many): d.prefill([[5, 9, 33, 7]])
    tokens = list(range(3, 15))
    alone, together = torch.cat([one.step([[t]]) for t in tokens], 1), many.step([tokens])
    assert torch.equal(alone, together) if bits else apart(alone, together) < 0.05


@pytest.mark.cuda
@needs_gpu
@pytest.mark.parametrize("family", ["gemma2", "gemma3"])
def test_norms_behind_attention_and_mlp_on_a_gpu(family, monkeypatch):
    "transformers' own texts in float32, near in bfloat16; four products of a block by the kernel of a single row"
    import bmlab.kernels.few_rows as rows
    from bmlab.kernels.nvrtc import unavailable
    shape = dict(
        hidden_size=1024, intermediate_size=2816, num_attention_heads=16, num_key_value_heads=4, head_dim=64,
        vocab_size=2048)
    model = gemma(family, **shape).cuda()
    fast, prompt = copy.deepcopy(model), [5, 9, 33, 7]
    assert fuse_decode(fast).table.fused.all() and type(fast.model.layers[0]._fused) is _BlockPart
    model.generation_config.eos_token_id = None
    want = model.generate(torch.tensor([prompt], device="cuda"), max_new_tokens=12, do_sample=False)[0, 4:].tolist()
    decoder, got = Decoder(fast, max_ctx=40), []
    logits = decoder.prefill([prompt])
    while len(got) < 12:
        got.append(logits.argmax().item())
        logits = decoder.step([[got[-1]]])
    assert got == want and apart(walk(fast), walk(model)) < 1e-4
    for bits in (None, 8, 4):
        given = copy.deepcopy(model).bfloat16()
        if bits: pack_linears(given, bits=bits)
        fast, calls, inner = copy.deepcopy(given), [], rows.few_rows
        assert fuse_decode(fast).table.fused.all()
        assert apart(walk(fast), walk(given)) < 0.05
        assert torch.equal(walk(fast, graph=False), walk(fast))
        decoder = Decoder(fast, max_ctx=40, graph=False)
        decoder.prefill([prompt])
        alone = decoder.step([[3]])
        if bits is None and not unavailable():
            with monkeypatch.context() as m:
                m.setattr(rows, "few_rows", lambda x, w, **end: calls.append(end) or inner(x, w, **end))
                decoder.step([[4]])
            assert len(calls) == 4 * 3 and sum(end["gate"] == "gelu_tanh" for end in calls) == 3
            assert [end["norm"] is not None for end in calls] == [True, False, True, False] * 3
        decoder.free(0)
        hook = fast.model.layers[1].register_forward_hook(lambda m, args, out: out * 1.0)
        decoder.prefill([prompt])
        assert torch.equal(decoder.step([[3]]), alone)                      # what is handed over changes nothing
        hook.remove()


@pytest.mark.cuda
@needs_gpu
def test_moved_to_a_gpu_after_fusing():
    model = pack_linears(llama().bfloat16())
    handle = fuse_decode(model)
    model.cuda()
    plain = copy.deepcopy(model)
    assert not model.model.layers[0].self_attn._fused.qkv.lies() and apart(walk(model), walk(plain)) < 0.05
    assert handle.join() == 6 and apart(walk(model), walk(plain)) < 0.05


@pytest.mark.skipif(torch.cuda.is_available(), reason="for the interpreter")
def test_norms_behind_attention_and_mlp(monkeypatch):
    "Of six norms of a block and two sums two kernels are left; a block's rows have the same bits whoever ran before"
    import bmlab.kernels.triton_attention as small
    tiny = dict(hidden_size=32, intermediate_size=32, num_attention_heads=2, num_key_value_heads=1, vocab_size=32)
    model, calls = gemma(**tiny), []
    fast = copy.deepcopy(model)
    assert fuse_decode(fast, kernels="triton").table.fused.all()
    for name in ("rms_norm", "add_norm"):
        monkeypatch.setattr(small, name, lambda *a, f=getattr(small, name), n=name: calls.append(n) or f(*a))
    decoders = {m: Decoder(m, max_ctx=24) for m in (model, fast)}
    def steps(model):
        d = decoders[model]
        d.free(0)
        d.prefill([[5, 9, 3]])
        calls.clear()
        return torch.cat([d.step([[3]]), d.step([[4]])], 1)
    want, got = steps(model), steps(fast)
    # the first block's norm and the model's last one
    assert calls == ["rms_norm", *["add_norm"] * 6, "rms_norm"] * 2
    assert apart(got, want) < 1e-5
    hook = fast.model.layers[1].register_forward_hook(lambda m, args, out: out * 1.0)
    assert torch.equal(steps(fast), got) and calls.count("rms_norm") == 6
    hook.remove()
    with torch.inference_mode(): assert torch.equal(steps(fast), got)
    weight = fast.model.layers[2].input_layernorm.weight
    kept = weight.clone()
    def louder(m, args, kwargs): m.input_layernorm.weight.copy_(kept + 1)     # behind what was said of it
    hook = fast.model.layers[2].register_forward_pre_hook(louder, with_kwargs=True)
    loud = steps(fast)
    hook.remove()
    assert torch.equal(steps(fast), loud) and not torch.equal(loud, got)


# ---- whole steps: embedding, blocks, norm and head without the model's own loop

def own_loop(monkeypatch): monkeypatch.setattr(_Whole, "__call__", lambda self, feed, model, ids, mask, own: own())


def loops(model, monkeypatch):
    "Steps of the model's own code"
    ran, call = [], type(model.model).forward
    @functools.wraps(call)
    def noted(self, *a, **k):
        ran.append(1)
        return call(self, *a, **k)
    monkeypatch.setattr(type(model.model), "forward", noted)
    return ran


@needs_c
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bits", [8, 4])
def test_a_whole_step_is_the_models_own(bits, dtype, monkeypatch):
    model = pack_linears(llama(num_hidden_layers=4).to(dtype), bits=bits, group_size=32)
    ran = loops(model, monkeypatch)
    fuse_decode(model)
    def run():
        decoder, out, counts = Decoder(model, max_batch=2, max_ctx=60), [], []
        decoder.prefill([[5, 9, 33], [7, 11]])
        for ids in ([[3], [40]], [[4], [41]], [[5], [42]], [[6, 7, 8], [43, 44, 45]], [[9], [46]], [[10]]):
            ran.clear()
            out.append(decoder.step(ids).flatten(0, 1))
            counts.append(len(ran))
        ran.clear()
        tree = torch.tensor([[[1, 0, 0], [1, 1, 0], [1, 0, 1]]]).bool()
        out.append(decoder.step([[11, 12, 13]], keep=False, mask=tree, positions=torch.tensor([[0, 1, 1]]))[0])
        return torch.cat(out), counts + [len(ran)]
    (mine, first), (again, second) = run(), run()
    assert first[-5:] == second[-5:] == [0] * 5                        # (it is found out in the first two or three)
    own_loop(monkeypatch)
    want, counts = run()
    assert counts == [1] * 7 and torch.equal(mine, want) and torch.equal(again, want)


def hooked(module, **how):
    change = how.get("out", twice)
    return lambda model: module(model).register_forward_hook(lambda m, args, out: change(out)).remove


def twice(out):
    if isinstance(out, torch.Tensor): return out * 1.5
    field = "logits" if "logits" in out else "last_hidden_state"
    out[field] = out[field] * 1.5
    return out


def set_to(where, name, value):
    def meddle(model):
        owner = where(model)
        was, new = getattr(owner, name), value(getattr(owner, name))
        setattr(owner, name, new)
        return lambda: setattr(owner, name, was)
    return meddle


def patched(where, change):
    def meddle(model):
        module, call = where(model), where(model).forward
        module.forward = lambda *args, **kwargs: change(call(*args, **kwargs))
        return lambda: module.__dict__.pop("forward")
    return meddle


def scaled(tensor):
    def meddle(model):
        tensor(model).mul_(2)
        return lambda: tensor(model).mul_(0.5)
    return meddle


def changed_data(tensor):
    def meddle(model):
        tensor(model).data.mul_(2)
        return lambda: tensor(model).data.mul_(0.5)
    return meddle


class Doubled(torch.nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base = base
    def forward(self, *args, **kwargs): return twice(self.base(*args, **kwargs))
    def __getattr__(self, name):
        return super().__getattr__(name) if name == "base" else getattr(self.base, name)


def swapped(model):
    layers = model.model.layers._modules
    def swap(): layers["1"], layers["2"] = layers["2"], layers["1"]
    swap()
    return swap


def replaced(where):
    def other(module):
        new = copy.deepcopy(module)
        for t in (*new.parameters(), *new.buffers()):
            if t.is_floating_point(): t.mul_(1.5)
        return new
    return set_to(where[0], where[1], other)


def on_everything(model):
    def note(m, args, out): return out * 1.5 if m is model.model.norm else None
    return torch.nn.modules.module.register_module_forward_hook(note).remove


def a_lora(model):
    torch.manual_seed(0)
    lora = Lora(model, r=2, modules=["layers[3].mlp.down_proj"])
    for site in lora.sites.values(): site.B.data.fill_(0.5)
    return lora.detach


MEDDLES = {
    "a hook on the model": hooked(lambda m: m), "on its loop": hooked(lambda m: m.model),
    "on the embedding": hooked(lambda m: m.model.embed_tokens), "on a block": hooked(lambda m: m.model.layers[2]),
    "on the norm": hooked(lambda m: m.model.norm), "on the head": hooked(lambda m: m.lm_head),
    "on the angles": hooked(lambda m: m.model.rotary_emb, out=lambda out: (out[0] * 0.5, out[1])),
    "on a layer": hooked(lambda m: m.model.layers[1].mlp.up_proj), "on an activation": hooked(
        lambda m: m.model.layers[1].mlp.act_fn), "on everything": on_everything,
    "a patched loop": patched(lambda m: m.model, twice), "a patched head": patched(lambda m: m.lm_head, twice),
    "a patched layer": patched(lambda m: m.model.layers[3].self_attn.o_proj, twice),
    "a scale": scaled(lambda m: m.model.layers[2].mlp.down_proj.scale),
    "a norm": scaled(lambda m: m.model.layers[3].input_layernorm.weight),
    "the last norm": scaled(lambda m: m.model.norm.weight), "the head's scale": scaled(lambda m: m.lm_head.scale),
    "angles": scaled(lambda m: m.model.rotary_emb.inv_freq),
    "other data": set_to(lambda m: m.model.layers[1].post_attention_layernorm.weight, "data", lambda t: t * 2),
    "another scale": set_to(lambda m: m.model.layers[1].mlp.gate_proj, "scale", lambda t: t * 2),
    "another MLP": replaced((lambda m: m.model.layers[1], "mlp")),
    "another norm": replaced((lambda m: m.model, "norm")),
    "another head": replaced((lambda m: m, "lm_head")), "another base": replaced((lambda m: m, "model")),
    "angles, past torch's count": changed_data(lambda m: m.model.rotary_emb.inv_freq),
    "a wrapped base": set_to(lambda m: m, "model", Doubled), "blocks in another order": swapped,
    "fewer blocks": set_to(lambda m: m.model.config, "num_hidden_layers", lambda n: n - 1), "a delta": a_lora,
}


@needs_c
@pytest.mark.parametrize("meddle", MEDDLES)
def test_what_is_done_between_two_whole_steps_is_obeyed(meddle, monkeypatch):
    def run():
        model = pack_linears(llama(num_hidden_layers=4))
        fuse_decode(model)
        decoder, out = begun(model), []
        for i in range(12):
            if i == 4: undo = MEDDLES[meddle](model)
            if i == 8: undo()
            out.append(decoder.step([[i + 3]]))
        return torch.stack(out)
    mine = run()
    own_loop(monkeypatch)
    want = run()
    assert torch.equal(mine, want)
    monkeypatch.setitem(MEDDLES, meddle, lambda model: lambda: None)
    plain = run()
    assert torch.equal(want[:4], plain[:4]) and not torch.allclose(want[4:8], plain[4:8], rtol=1e-3)


WITHIN = torch.inference_mode, torch.enable_grad, lambda: torch.autocast("cpu"), FlopCounterMode


@needs_c
@pytest.mark.parametrize("within", WITHIN)
def test_where_whole_steps_are_not_the_way(within, monkeypatch):
    model = pack_linears(llama(num_hidden_layers=4))
    ran = loops(model, monkeypatch)
    fuse_decode(model)
    decoder = begun(model)
    steps(decoder)
    ran.clear()
    steps(decoder)
    assert not ran
    with within(): decoder.net(1, torch.tensor([[3]]))
    assert len(ran) == 1


class Capped(tf.LlamaForCausalLM):
    def forward(self, *args, **kwargs):
        out = super().forward(*args, **kwargs)
        out.logits = out.logits.tanh()
        return out


class Halved(tf.LlamaModel):
    def forward(self, input_ids=None, inputs_embeds=None, **kwargs):
        return super().forward(inputs_embeds=self.embed_tokens(input_ids) / 2, **kwargs)


@needs_c
@pytest.mark.parametrize("more", ["nothing", "behind the head", "before the blocks"])
def test_a_model_that_does_more_keeps_its_loop(more, monkeypatch):
    torch.manual_seed(0)
    model = (Capped if more == "behind the head" else tf.LlamaForCausalLM)(tf.LlamaConfig(**TINY)).eval()
    if more == "before the blocks": model.model.__class__ = Halved
    fuse_decode(pack_linears(model))
    mine = torch.cat(steps(begun(model)))
    whole = model.__dict__["_bmlab_whole"][0]
    assert len(whole.step.path) == 3 and (whole.step.known is None) == (more != "nothing")
    own_loop(monkeypatch)
    assert torch.equal(torch.cat(steps(begun(model))), mine)


class Placeholder(tf.LlamaModel):
    "One token means something else"
    def forward(self, input_ids=None, inputs_embeds=None, **kwargs):
        x = self.embed_tokens(input_ids)
        return super().forward(inputs_embeds=torch.where(input_ids[..., None] == 9, -x, x), **kwargs)


@needs_c
def test_a_loop_that_looks_at_its_tokens_is_kept(monkeypatch):
    model = llama(num_hidden_layers=4)
    model.model.__class__ = Placeholder
    fuse_decode(pack_linears(model))
    def run():
        decoder = begun(model)
        return torch.cat([decoder.step([[i]]) for i in (3, 4, 5, 9, 6)])
    mine = run()
    own_loop(monkeypatch)
    assert torch.equal(run(), mine)


@needs_c
@pytest.mark.parametrize("what", ["logits_scaling", "embedding_multiplier"])
def test_a_setting_that_the_loop_reads_is_obeyed(what, monkeypatch):
    torch.manual_seed(0)
    one = dict(attention_multiplier=0.25, residual_multiplier=1.0, embedding_multiplier=1.0, logits_scaling=1.0)
    model = pack_linears(tf.GraniteForCausalLM(tf.GraniteConfig(**TINY | one)).eval())
    fuse_decode(model)
    owner = model.config if what == "logits_scaling" else model.model
    def run():
        decoder, out = begun(model), []
        for i in range(8):
            if i == 4: setattr(owner, what, 2.0)
            out.append(decoder.step([[i + 3]]))
        setattr(owner, what, 1.0)
        return torch.cat(out)
    mine = run()
    own_loop(monkeypatch)
    assert torch.equal(run(), mine)


@needs_c
def test_positions_far_ahead_have_their_angles(monkeypatch):
    model = pack_linears(llama(num_hidden_layers=4, max_position_embeddings=4096))
    fuse_decode(model)
    def run():
        decoder = begun(model)
        steps(decoder)
        tree = torch.tensor([[[1, 0, 0], [1, 1, 0], [1, 1, 1]]]).bool()
        return decoder.step([[11, 12, 13]], keep=False, mask=tree, positions=torch.tensor([[0, 1, 400]]))
    mine = run()
    own_loop(monkeypatch)
    assert torch.equal(run(), mine)


@needs_c
def test_a_base_that_was_replaced_is_let_go():
    model = pack_linears(llama(num_hidden_layers=4))
    fuse_decode(model)
    steps(begun(model))
    block, model.model = weakref.ref(model.model.layers[1]), copy.deepcopy(model.model)
    gc.collect()
    assert block() is None


@needs_c
def test_nothing_keeps_what_is_dropped():
    model = pack_linears(llama(num_hidden_layers=4))
    fuse_decode(model)
    decoder = begun(model)
    steps(decoder)
    last, head = weakref.ref(model.model.layers[3]), weakref.ref(model.lm_head)
    model.model.layers, model.config.num_hidden_layers = model.model.layers[:3], 3
    model.lm_head = copy.deepcopy(model.lm_head)
    gc.collect()
    assert last() is None and head() is None
    assert len(steps(decoder)) == 4
    assert not copy.deepcopy(model).__dict__["_bmlab_whole"]


def of_torch(x, codes, bias=None, residual=None, gate=None, norm=None, **when):
    "What `one_row` gives for weights that are not packed, by torch"
    if norm is not None: x = torch.nn.functional.rms_norm(x, x.shape[1:], norm[0] + norm[2], norm[1])
    y = torch.nn.functional.linear(x, codes, bias)
    if gate:
        g, up = y.chunk(2, 1)
        y = (torch.nn.functional.silu(g) if gate == "silu" else torch.nn.functional.gelu(g, approximate="tanh")) * up
    return y if residual is None else residual + y


def alone(model, prompt=(5, 9, 33, 7), steps=2):
    decoder = Decoder(model, max_batch=1, max_ctx=40)
    return torch.cat([decoder.prefill([list(prompt)])[:, None], *(decoder.step([[i + 3]]) for i in range(steps))], 1)


@pytest.mark.parametrize("family,how", [
    ("llama", "made"), ("biased", "made"), ("qwen3", "made"), ("llama", "some shapes"), ("qwen3", "never made"),
    ("llama", "breaks"), ("gemma3", "made"), ("gemma3", "breaks")])
def test_a_row_of_weights_that_are_not_packed(family, how, monkeypatch):
    "The kernel of a single row has norms, gate and residual within it; where it cannot be made, others do its work"
    import bmlab.kernels.few_rows as rows
    if family == "qwen3":
        torch.manual_seed(0)
        model = tf.Qwen3ForCausalLM(tf.Qwen3Config(**TINY | dict(num_hidden_layers=2))).eval()
    elif family == "gemma3": model = gemma(num_hidden_layers=2)
    else: model = llama(num_hidden_layers=2, attention_bias=family == "biased")
    for n, p in model.named_parameters():
        if "norm" in n: p.add_(torch.rand_like(p) / 4)
    want, calls, broken = alone(copy.deepcopy(model)), [], []
    def takes(x, codes, scale=None, zero=None, bias=None, gate=None, norm=None, ahead=None, warps=4):
        # (a model's narrow products alone, its wide ones alone)
        kinds = (None, "gelu_tanh") if family == "gemma3" else (None, "silu")
        return len(x) == 1 and not broken and gate in kinds and (how != "some shapes" or codes.shape[1] < 96)
    def one_row(x, codes, **end):
        calls.append(end)
        if how == "never made" or how == "breaks" and len(calls) > 5: broken.append(1)
        return None if broken else of_torch(x, codes, **end)
    monkeypatch.setattr(rows, "takes", takes)
    monkeypatch.setattr(rows, "few_rows", one_row)
    handle = fuse_decode(model, kernels="triton")
    assert handle.table.fused.all()
    calls.clear()
    broken.clear()
    got = alone(model)
    torch.testing.assert_close(got, want, atol=2e-4, rtol=2e-4)
    if how == "made": assert len(calls) == 4 * 2 * 2, "four products of two blocks, two steps"
    if how == "made": assert sum(end["norm"] is not None for end in calls) == 2 * 2 * 2
    if how == "some shapes": assert 0 < len(calls) < 4 * 2 * 2
    if how in ("never made", "breaks"): assert broken and len(calls) <= 6


@pytest.mark.cuda
@needs_gpu
@pytest.mark.parametrize("rows", [1, 2, 4])
def test_attention_of_several_rows_is_one_kernel(rows, monkeypatch):
    "On Hopper and later, a call for each block; the rows say what each says alone"
    from bmlab.kernels import nvrtc, triton_attention as tk
    if nvrtc.unavailable(): pytest.skip(nvrtc.unavailable())
    torch.manual_seed(0)
    sizes = dict(hidden_size=256, intermediate_size=512, num_attention_heads=4, num_key_value_heads=2, head_dim=64)
    model = tf.LlamaForCausalLM(tf.LlamaConfig(**sizes, num_hidden_layers=2, vocab_size=99)).cuda().bfloat16().eval()
    pack_linears(model, bits=8)
    fuse_decode(model)
    calls, inner = [], tk.one_token
    monkeypatch.setattr(tk, "one_token", lambda *a, **k: calls.append(1) or inner(*a, **k))
    texts = [[5 + 3 * r + i for i in range(4 + 3 * r)] for r in range(rows)]
    def said(texts):
        d = Decoder(model, len(texts), 80, graph=False)
        d.prefill(texts)
        calls.clear()
        return d.step([[7]] * len(texts)).float()
    together = said(texts)
    assert len(calls) == 2
    for r, text in enumerate(texts): torch.testing.assert_close(together[r], said([text])[0], atol=2e-2, rtol=2e-2)

"Sharding over processes: equal to one process, from meta and from files, with deltas, mixed dtypes, compiled, cut off."
import copy

import pytest
import torch
from torch import nn

from bmlab.core import count, resolve, roles, set_seed
from bmlab.train.forkserver import start_process
from bmlab.train.processes import run_ranks
from bmlab.train.sharding import shard
from bmlab.core import find_blocks
from conftest import free_port

pytestmark = pytest.mark.long


def llama(**kw):
    import transformers as tf
    return tf.LlamaForCausalLM(
        tf.LlamaConfig(
            **dict(
                hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
                vocab_size=99,
            )
            | kw
        )
    )


def t5(**kw):
    import transformers as tf
    return tf.T5ForConditionalGeneration(
        tf.T5Config(
            d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, vocab_size=99, dropout_rate=0.0,
            decoder_start_token_id=0, **kw,
        )
    )


def gpt2(**kw):
    import transformers as tf
    return tf.GPT2LMHeadModel(tf.GPT2Config(n_embd=32, n_layer=3, n_head=4, vocab_size=99, n_positions=32, **kw))


class Tied(nn.Module):
    "A weight that root and block share, and one that two blocks share"
    def __init__(self):
        super().__init__()
        self.embed, self.layers, self.scale = (
            nn.Embedding(16, 16),
            nn.ModuleList(nn.Linear(16, 16) for _ in range(4)),
            nn.Parameter(torch.tensor(0.5), requires_grad=False),
        )
        self.layers[0].weight, self.layers[3].weight = self.embed.weight, self.layers[2].weight
    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers: x = x + self.scale * torch.tanh(layer(x))
        return x.square().mean()


def whole(t): return t.full_tensor() if hasattr(t, "full_tensor") else t


def sgd(model, rows, opt=None, loss=lambda m, x: m(input_ids=x, labels=x).loss):
    opt = opt or torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.3)
    for x in rows:
        loss(model, x).backward()
        opt.step()
        opt.zero_grad()
    return {n: whole(p).detach() for n, p in model.state_dict().items()}


def mine(x):
    import torch.distributed as dist
    return x.chunk(dist.get_world_size())[dist.get_rank()]


def rows(steps=3, n=8, high=99):
    return torch.randint(0, high, (steps, n, 12), generator=torch.Generator().manual_seed(0))


def difference(a, b):
    assert list(a) == list(b)
    return max((a[n].double() - b[n].double()).abs().max().item() for n in a)


def ties(zero, checkpoint):
    loss = lambda m, x: m(x)
    set_seed(0)
    one = Tied().double()
    set_seed(0)
    many = shard(Tied().double(), dtype=None, zero=zero, checkpoint=checkpoint)
    a, b = sgd(one, rows(high=16), loss=loss), sgd(many, [mine(x) for x in rows(high=16)], loss=loss)
    assert many.layers[0].weight is many.embed.weight and many.layers[3].weight is many.layers[2].weight
    return difference(a, b)


def all_ties(): return [ties(zero, checkpoint) for zero in (2, 3) for checkpoint in (False, True)]


def test_weights_shared_between_blocks_and_root():
    for r in run_ranks(all_ties): assert max(r) < 1e-9, r


def adamw():
    out = {}
    plain = lambda: gpt2(resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
    cases = [("llama", llama, 3), ("gpt2", plain, 3), ("t5", t5, 3), ("llama 2", llama, 2)]
    cases.append(("llama mixed", llama, {"layers.0": 2}))
    for name, build, zero in cases:
        losses = []
        for sharded in (False, True):
            set_seed(0)
            m = build()
            if sharded: shard(m, dtype=None, checkpoint=2, zero=zero)
            opt, log = torch.optim.AdamW(m.parameters(), lr=3e-3), []
            for x in rows(1).repeat(6, 1, 1):
                opt.zero_grad()
                if sharded: m(input_ids=mine(x), labels=mine(x)).loss.backward()
                else: m(input_ids=x, labels=x).loss.backward()
                torch.nn.utils.clip_grad_norm_(m.parameters(), 1.0)
                with torch.no_grad(): log.append(m(input_ids=x, labels=x).loss.item())
                opt.step()
            losses.append(log)
        out[name] = losses
    return out


def test_adamw_losses():
    "Six steps in float32 with a clip, and an evaluation between backward and step, which must not keep old weights"
    for r in run_ranks(adamw):
        for one, many in r.values():
            assert one[0] > one[-1] + 0.1 and max(abs(a - b) for a, b in zip(one, many)) < 2e-5, r


class Live:
    "Live and peak bytes of storages made inside, and the largest of them"
    def __enter__(self):
        import weakref
        from torch.utils._python_dispatch import TorchDispatchMode
        from torch.utils._pytree import tree_leaves
        self.now = self.peak = self.largest = 0
        seen = {}
        def gone(key, n):
            seen.pop(key, None)
            self.now -= n
        class Mode(TorchDispatchMode):
            def __torch_dispatch__(_, func, types, args=(), kwargs=None):
                out = func(*args, **kwargs or {})
                for t in tree_leaves(out):
                    s = t.untyped_storage() if type(t) is torch.Tensor and t.device.type != "meta" else None
                    if s is not None and s._cdata not in seen:
                        n = s.nbytes()
                        seen[s._cdata] = n
                        self.now += n
                        self.peak = max(self.peak, self.now)
                        self.largest = max(self.largest, n)
                        weakref.finalize(s, gone, s._cdata, n)
                return out
        self.mode = Mode()
        self.mode.__enter__()
        return self
    def __exit__(self, *e): self.mode.__exit__(*e)


def born(folder, kind):
    out = {}
    build = {"llama": lambda: llama(hidden_size=64, vocab_size=999), "t5": t5, "gpt2": gpt2}[kind]
    with torch.device("meta"): m = build()
    total = count(m).bytes
    shard(m, dtype=None, weights=folder)
    out["read"] = m.sharding.read_bytes / total
    out["held"] = sum(p.to_local().untyped_storage().nbytes() for p in m.parameters()) / total
    real = type(m).from_pretrained(folder)
    x = rows()[0]
    m.eval()
    real.eval()
    with torch.no_grad():
        out["logits"] = (m(input_ids=x, labels=x).logits - real(input_ids=x, labels=x).logits).abs().max().item()
    out["buffers"] = all(torch.equal(a, b) for a, b in zip(m.buffers(), real.buffers()))
    out["state"] = difference({n: whole(t) for n, t in m.state_dict().items()}, real.state_dict())
    out["trains"] = (
        difference(sgd(m.train(), [mine(x) for x in rows()]), sgd(real.train(), rows())) if kind == "llama" else 0.0
    )
    return out


def all_born(folder): return {k: born(f"{folder}/{k}", k) for k in ("llama", "t5", "gpt2")}


def test_a_meta_model_reads_its_own_part(tmp_path):
    for k, build in {"llama": lambda: llama(hidden_size=64, vocab_size=999), "t5": t5, "gpt2": gpt2}.items():
        set_seed(3)
        build().save_pretrained(tmp_path / k, max_shard_size="50KB")
        assert len(list((tmp_path / k).glob("*.safetensors"))) > 1
    for r in run_ranks(all_born, str(tmp_path)):
        for k, v in r.items():
            assert (
                0.4 < v["read"] < 0.6 and v["held"] < 0.6 and v["logits"] < 1e-5 and v["buffers"] and v["state"] == 0
                and v["trains"] < 1e-5
            ), (k, v)


def refused(folder):
    "Files of other models: {case: what was said, with the model as it was; it can be sharded still}"
    said = {}
    cases = (
        ("shapes", "llama", lambda: llama(intermediate_size=48)),
        ("fewer", "llama", lambda: llama(num_hidden_layers=2)),
        ("more", "llama", lambda: llama(num_hidden_layers=4)), ("another", "llama", gpt2),
        ("tied", "llama", lambda: llama(tie_word_embeddings=True)), ("nowhere", "nothing", llama),
    )
    for case, name, build in cases:
        for meta in (False, True):
            with torch.device("meta" if meta else "cpu"): m = build()
            before, classes = (
                {n: (t, t.clone(), t.dtype) for n, t in m.state_dict(keep_vars=True).items()},
                [type(x) for x in m.modules()],
            )
            try:
                shard(m, weights=f"{folder}/{name}")
                said[case, meta] = "accepted"
            except (ValueError, FileNotFoundError) as e: said[case, meta] = f"{type(e).__name__}: {e}"
            now = m.state_dict(keep_vars=True)
            assert [type(x) for x in m.modules()] == classes and not hasattr(m, "sharding") and not m._forward_pre_hooks
            assert all(
                now[n] is t and t.is_meta == meta and t.dtype == d and (meta or torch.equal(t, c))
                for n, (t, c, d) in before.items()
            )
            shard(m)
            said[case, meta, "then"] = all(whole(p).isfinite().all().item() for p in m.parameters())
    return said


def test_files_of_another_model_are_refused_before_anything_changes(tmp_path):
    llama().save_pretrained(tmp_path / "llama")
    for r in run_ranks(refused, str(tmp_path)):
        assert all(v for k, v in r.items() if k[-1] == "then")
        for meta in (False, True):
            said = lambda case: r[case, meta]
            assert all(
                said(c).startswith("ValueError: ") and "is a checkpoint of another model" in said(c)
                for c in ("shapes", "fewer", "more", "another", "tied")
            ), r
            assert (
                "9 of another shape: model.layers.0.mlp.down_proj.weight (32, 48) in the model, (32, 64) in the "
                "checkpoint" in said("shapes")
            ), r
            assert "9 only in the checkpoint: model.layers.2.input_layernorm.weight" in said(
                "fewer"
            ) and "9 only in the model: model.layers.3.input_layernorm.weight" in said("more"), r
            assert "only in the model: transformer.h.0.attn.c_attn.bias" in said(
                "another"
            ) and "lm_head.weight differs from model.embed_tokens.weight" in said("tied"), r
            assert said("nowhere").startswith("FileNotFoundError"), r


def accepted(folder):
    "What files of a model may have more or less: a head equal to its embedding, frequencies of older files, no delta"
    from bmlab.delta.lora import Lora
    out = []
    for meta in (False, True):
        with torch.device("meta" if meta else "cpu"): m = llama(tie_word_embeddings=True)
        if not meta: Lora(m, r=2, modules=["q_proj"])
        shard(m, dtype=None, weights=folder)
        out.append({n: whole(t) for n, t in m.state_dict().items() if "_deltas" not in n})
    return out


def test_files_may_hold_a_tied_head_and_old_frequencies(tmp_path):
    from safetensors.torch import save_file
    set_seed(4)
    m = llama(tie_word_embeddings=True)
    want = {n: t.clone() for n, t in m.state_dict().items()}
    save_file(
        want | {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.zeros(4) for i in range(3)},
        tmp_path / "model.safetensors",
    )
    for r in run_ranks(accepted, str(tmp_path)):
        for got in r: assert difference(got, want) == 0


def peak(folder):
    set_seed(0)
    with torch.device("meta"): m = llama(hidden_size=64, num_hidden_layers=8)
    total, block = count(m).bytes, count(m.model.layers[0]).bytes
    with Live() as live: shard(m, dtype=None, weights=folder)
    with torch.device("meta"): n = llama(hidden_size=64, num_hidden_layers=8)
    with Live() as random: shard(n, dtype=None)
    return live.peak / total, random.peak / total, block / total


def test_peak_memory_is_the_shard(tmp_path):
    "Reading: the shard and a read tensor; by rule: the shard and one whole block"
    llama(hidden_size=64, num_hidden_layers=8).save_pretrained(tmp_path)
    for read, random, block in run_ranks(peak, str(tmp_path)):
        assert read < 0.6 and random < 0.55 + 2 * block, (read, random, block)


def by_hand():
    """The loop that anyone would write with micro-batches and a manager, against one process with the whole batch:
    {case: (largest difference, without recompute also the reductions of each micro-batch in the first step)}"""
    from contextlib import nullcontext
    from torch.distributed.tensor.debug import CommDebugMode
    from bmlab.train.offload import AdamW
    from bmlab.train.optim import OptimManager
    made = {
        "sgd": lambda m, one: torch.optim.SGD(m.parameters(), lr=0.3),
        "offload": lambda m, one: AdamW(m, lr=1e-3, offload=0.0 if one else 0.5, unit=5000),
        "offload backward": lambda m, one: AdamW(
            m, lr=1e-3, offload=0.0 if one else 1.0, unit=5000, overlap="forward" if one else "backward"
        ),
    }
    def train(m, data, micro, opt, count=False):
        om, counts = OptimManager(model=m), []
        om.add_optimizer(opt)
        for x in data:
            for k, part in enumerate(x.chunk(micro)):
                loss = m(input_ids=part, labels=part).loss / micro
                # (it does not follow recomputed modules)
                with CommDebugMode() if count else nullcontext() as counted: om.backward(loss, final=k == micro - 1)
                if count and len(counts) < micro:
                    counts.append(sum(n for op, n in counted.get_comm_counts().items() if "reduce" in str(op)))
            if opt.__class__ is torch.optim.SGD: om.clip_grad_norm(0.5)
            om.step()
            om.zero_grad()
        return {n: whole(p).detach() for n, p in m.state_dict().items()}, counts
    out = {}
    for kind, optimizer in made.items():
        set_seed(0)
        one = llama().double()
        want, _ = train(one, rows(), 1, optimizer(one, True))
        for zero, checkpoint in ((2, False), (3, 2)):
            set_seed(0)
            many = shard(llama().double(), dtype=None, zero=zero, checkpoint=checkpoint)
            got, counts = train(many, [mine(x) for x in rows()], 4, optimizer(many, False), count=not checkpoint)
            out[kind, zero] = difference(want, got), counts
    return out


def test_accumulation_by_hand_is_one_large_batch():
    for r in run_ranks(by_hand):
        for (kind, zero), (far, counts) in r.items():
            assert far < 1e-6, (kind, zero, far)
            if zero == 2: assert counts[-1] > 0 and counts[:-1] == [0, 0, 0], (kind, counts)


def by_rule():
    out = {}
    for k, build in {"llama": llama, "t5": t5, "gpt2": gpt2}.items():
        set_seed(5)
        with torch.device("meta"): m = build()
        shard(m, dtype=None)
        out[k] = {n: whole(t) for n, t in [*m.state_dict().items(), *m.named_buffers()]}
    return out


def test_initialised_alike_on_any_number_of_ranks():
    (one,), (two, other) = run_ranks(by_rule, world_size=1), run_ranks(by_rule)
    for k in one:
        assert difference(one[k], two[k]) == difference(one[k], other[k]) == 0
        assert {n for n, t in one[k].items() if t.is_floating_point() and not t.isfinite().all()} <= {
            "transformer.h.0.attn.bias"
        }


def mixed():
    "T5 as it is loaded in bfloat16: one matrix of each block in float32; frozen encoder; computing in bfloat16"
    set_seed(0)
    m = t5().to(torch.bfloat16)
    for b in find_blocks(m).values(): b.layer[-1].DenseReluDense.wo.float()
    refused = ""
    try: shard(copy.deepcopy(m), dtype=None)
    except ValueError as e: refused = str(e)
    for p in m.encoder.block[0].parameters(): p.requires_grad_(False)
    shard(m)
    kinds = {n: p.dtype for n, p in m.named_parameters()}
    opt, log = torch.optim.AdamW(m.parameters(), lr=1e-3), []
    for _ in range(4):
        loss = m(input_ids=mine(rows()[0]), labels=mine(rows()[0])).loss
        loss.backward()
        opt.step()
        opt.zero_grad()
        log.append(loss.item())
    return refused, kinds, log


def test_mixed_dtypes():
    for refused, kinds, log in run_ranks(mixed):
        assert "dtype=None computes in the stored dtypes" in refused
        assert {d for n, d in kinds.items() if n.startswith("encoder.block.0")} == {torch.bfloat16}
        assert {d for n, d in kinds.items() if n.startswith(("encoder.block.1", "decoder.block"))} == {
            torch.float32
        } and log[-1] < log[0] - 0.3, log


def deltas():
    from bmlab.delta.lora import Lora
    set_seed(0)
    m = llama()
    d = Lora(m, r=4, modules=["q_proj", "down_proj"]).freeze()
    for s in d.sites.values(): nn.init.normal_(s.B, std=0.3)
    x = rows()[0]
    with torch.no_grad(): on = m(x).logits
    before = count(m), roles(m), len(resolve(m, "q_proj"))
    for backend in (False, "eager"):
        n = copy.deepcopy(m)
        shard(n, dtype=None, checkpoint=2, compile=backend)
        dn = next(v for v in [copy.copy(d)])
        dn.model, dn.sites = n, {k: resolve(n, k)[k]._deltas[d.name] for k in d.sites}
        assert (count(n), roles(n), len(resolve(n, "q_proj"))) == before and len(list(dn.trainable())) == 12
        with torch.no_grad(): assert (n(x).logits - on).abs().max() < 1e-5
        loss = n(x, labels=x).loss
        loss.backward()
        with torch.no_grad():
            dn.detach()
            off = n(x).logits
            dn.attach()
            again = n(x).logits
        with torch.no_grad(), d.off(): plain = m(x).logits
        assert (
            (off - plain).abs().max() < 1e-5 and (again - on).abs().max() < 1e-5 and (off - again).abs().max() > 1e-2
        ), backend
        switched = n(x, labels=x).loss.item()
        dn.detach()
        grad_off = n(x, labels=x).loss.item()
        assert abs(switched - loss.item()) < 1e-5 and abs(grad_off - switched) > 1e-3, backend
        assert all(p.grad is None for k, p in n.named_parameters() if "_deltas" not in k)
    return True


def test_deltas_on_a_sharded_and_compiled_model():
    assert run_ranks(deltas) == [True, True]


def evaluated():
    from torch.distributed.tensor import DTensor
    set_seed(0)
    one, x = llama(), rows()[0][:1]
    set_seed(0)
    m = llama()
    out = {}
    for zero in (2, 3):
        set_seed(0)
        m = shard(llama(), dtype=None, zero=zero)
        kw = dict(max_new_tokens=8, do_sample=False, pad_token_id=0)
        out[f"generate {zero}"] = torch.equal(m.generate(x, **kw), one.generate(x, **kw))
        out[f"shards after {zero}"] = all(isinstance(p, DTensor) for p in m.parameters())
        with torch.no_grad(): a = m(x).logits
        opt = torch.optim.SGD(m.parameters(), lr=0.5)
        m(x, labels=x).loss.backward()
        with torch.no_grad(): m(x)
        opt.step()
        opt.zero_grad()
        with torch.no_grad(): b = m(x).logits
        m2 = llama()
        m2.load_state_dict({k: whole(v) for k, v in m.state_dict().items()})
        with torch.no_grad():
            out[f"fresh {zero}"] = bool((m2(x).logits - b).abs().max() < 1e-5 and (a - b).abs().max() > 1e-3)
    return out


def test_generating_and_evaluating():
    for r in run_ranks(evaluated): assert all(r.values()), r


def interrupted():
    "An exception in the middle of a forward, and of a backward: the next step is as if nothing had been"
    class Stop(Exception): pass
    def stop(*a): raise Stop
    class Bomb(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x): return x.view_as(x)
        @staticmethod
        def backward(ctx, g): raise Stop
    out = {}
    for zero in (2, 3):
        set_seed(0)
        one = llama().double()
        set_seed(0)
        m = shard(llama().double(), dtype=None, zero=zero, checkpoint=1)
        opt = torch.optim.SGD(m.parameters(), lr=0.3)
        for kind in ("forward", "backward"):
            h = m.model.layers[1].mlp.register_forward_hook(
                stop if kind == "forward" else lambda mod, a, o: Bomb.apply(o)
            )
            try: m(mine(rows()[0]), labels=mine(rows()[0])).loss.backward()
            except Stop: pass
            h.remove()
            opt.zero_grad()
        out[zero] = difference(sgd(one, rows()), sgd(m, [mine(x) for x in rows()], opt))
    return out


@pytest.mark.skipif(tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13), reason="torch resets an interrupted "
                                                                                        "step from 2.13 on")
def test_an_interrupted_step_leaves_no_trace():
    for r in run_ranks(interrupted): assert max(r.values()) < 1e-8, r


LOST = """
import os, sys, time
import torch, transformers as tf
from bmlab.train.processes import init_distributed, rank, synchronize
from bmlab.train.sharding import shard
from bmlab.train.loop import fit
how, moment, loop, number, port = sys.argv[1:]
os.environ.update(RANK=number, LOCAL_RANK=number, WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
os.environ.update(GLOO_SOCKET_IFNAME="lo")
init_distributed(timeout_s=100)                              # a busy machine brings them up one long after the other
sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4, vocab_size=99)
model = shard(tf.LlamaForCausalLM(tf.LlamaConfig(**sizes)), dtype=None, checkpoint=1)
opt, ids, seen = torch.optim.AdamW(model.parameters(), lr=1e-2), torch.arange(24).view(2, 12), []
def run(steps):
    if loop == "fit": fit(model, [{"input_ids": ids, "labels": ids}], opt, steps=steps, clip=1., plot=False)
    else:
        for _ in range(steps):
            model(ids, labels=ids).loss.backward()
            opt.step()
            opt.zero_grad()
run(1)
synchronize()
init_distributed(timeout_s=8)
def leave(*args):
    seen.append(1)
    if len(seen) == 2 and rank() == 1: os._exit(7) if how == "dies" else time.sleep(200)
layer = model.model.layers[1]
layer.register_forward_pre_hook(leave) if moment == "forward" else layer.register_full_backward_hook(leave)
start = time.monotonic()
try:
    run(4)
    print("went on alone")
except RuntimeError as e:
    print(f"error in step {len(seen)} after {time.monotonic() - start:.1f} s: {str(e)[:200]}", flush=True)
    raise
"""


ENDS = [
    ("dies", "forward", "by hand"), ("dies", "backward", "fit"),
    ("hangs", "backward", "by hand"), ("hangs", "forward", "fit"),
]


def test_a_rank_lost_in_the_middle_of_a_step_is_an_error_on_the_others(tmp_path):
    "No rank waits for ever: an error within the time-out, and the process ends by itself (all four at once)"
    pairs, log = {}, lambda end, r: tmp_path / f"{' '.join(end)} {r}.log"
    try:
        for end in ENDS:
            port = free_port()
            pairs[end] = [start_process(LOST, [*end, r, port], log=log(end, r)) for r in range(2)]
        for end, ranks in pairs.items():
            code, out = ranks[0].wait(150), log(end, 0).read_text()
            assert code not in (0, None) and "error in step 2 after" in out and "went on alone" not in out, out[-3000:]
            # (the first step is in it)
            assert float(out.split("error in step 2 after ")[1].split()[0]) < 8 + 30, out[-3000:]
            if end[0] == "dies": assert ranks[1].wait(10) == 7
    finally:
        for p in sum(pairs.values(), []):
            p.kill()
            p.wait()


def too_many():
    m = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    messages = []
    scalar = lambda: nn.Sequential(nn.Linear(4, 4), Scalar())
    for build, kw in [(lambda: m, {}), (lambda: llama(), dict(tp=3)), (scalar, {})]:
        try:
            shard(build(), dtype=None, **kw)
            messages.append("accepted")
        except ValueError as e: messages.append(str(e))
    # fewer rows than ranks in one weight only: padded
    odd = shard(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1)), dtype=None, blocks='0')
    odd(torch.ones(2, 3)).sum().backward()
    return messages


class Scalar(nn.Module):
    def __init__(self):
        super().__init__()
        self.s = nn.Parameter(torch.tensor(1.))
    def forward(self, x): return self.s * x


def test_what_cannot_be_sharded_says_so():
    for rows_, tp, scalar in run_ranks(too_many):
        assert (
            "2 ranks, but no weight of block 0 has more than 1 rows" in rows_ and "tp=3" in tp
            and "trainable scalar" in scalar
        ), (rows_, tp, scalar)


def compiled(*names):
    import os, tempfile
    with tempfile.TemporaryDirectory() as folder:
        backends = {"eager": "eager", "aot": "aot_eager", "inductor": True}
        settings = {"plain": {}} | {name: dict(compile=backend, checkpoint=2) for name, backend in backends.items()}
        # of this rank alone: nobody loads what another is writing, or what a killed one left half written
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        out = {}
        for build in (llama, t5):
            state = {}
            for name, kw in settings.items():
                if name not in names: continue
                set_seed(0)
                m = shard(build().double(), dtype=None, **kw)
                state[name] = sgd(m, [mine(x) for x in rows()])
                m.sharding.set_recompute(0)
                state[name] = sgd(m, [mine(x) for x in rows()])
            out[build.__name__] = {k: difference(state["plain"], v) for k, v in state.items()}
    return out


# (some seventy small libraries a rank; what AOTAutograd takes apart has been traced for it)
@pytest.mark.slow                               # (test_deltas_on_a_sharded_and_compiled_model compiles blocks, too)
@pytest.mark.parametrize("names", [("plain", "aot"), ("plain", "eager", "inductor")], ids=["traced", "compiled"])
def test_compiled_blocks_give_the_same_numbers(names):
    for r in run_ranks(compiled, *names, timeout_s=600):
        for k in r.values(): assert max(k.values()) < 1e-7, r


def families(world):
    "Every family of the zoo computes in bfloat16 with recompute, and every weight that takes part gets a gradient"
    import transformers as tf
    tiny = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=99)
    kv = dict(tiny, num_key_value_heads=2)
    small = dict(n_embd=32, n_layer=2, n_head=4, vocab_size=99)
    made = {
        "bert": lambda: tf.BertForMaskedLM(tf.BertConfig(**tiny)),
        "roberta": lambda: tf.RobertaForMaskedLM(tf.RobertaConfig(**tiny)),
        "gpt2": lambda: tf.GPT2LMHeadModel(tf.GPT2Config(**small)),
        "gptj": lambda: tf.GPTJForCausalLM(tf.GPTJConfig(**small, rotary_dim=4)),
        "neox": lambda: tf.GPTNeoXForCausalLM(tf.GPTNeoXConfig(**tiny)),
        "t5": t5,
        "opt": lambda: tf.OPTForCausalLM(
            tf.OPTConfig(
                hidden_size=32, ffn_dim=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=99,
                word_embed_proj_dim=32,
            )
        ),
        "qwen3": lambda: tf.Qwen3ForCausalLM(tf.Qwen3Config(**kv, head_dim=8)),
        "mistral": lambda: tf.MistralForCausalLM(tf.MistralConfig(**kv)),
        "mixtral": lambda: tf.MixtralForCausalLM(tf.MixtralConfig(**kv, num_local_experts=4)),
        "phi3": lambda: tf.Phi3ForCausalLM(tf.Phi3Config(**kv, pad_token_id=0)),
        "gemma3": lambda: tf.Gemma3ForCausalLM(tf.Gemma3TextConfig(**kv, head_dim=8)),
        "longformer": lambda: tf.LongformerForMaskedLM(tf.LongformerConfig(**tiny, attention_window=4)),
        "distilbert": lambda: tf.DistilBertForMaskedLM(
            tf.DistilBertConfig(dim=32, hidden_dim=64, n_layers=2, n_heads=4, vocab_size=99)
        ),
        "cpmant": lambda: tf.CpmAntForCausalLM(
            tf.CpmAntConfig(
                vocab_size=99, hidden_size=32, num_attention_heads=4, dim_head=8, dim_ff=64, num_hidden_layers=2,
                prompt_length=4,
            )
        ),
        "glm": lambda: tf.GlmForCausalLM(tf.GlmConfig(**kv, head_dim=8, pad_token_id=0)),
        "modernbert": lambda: tf.ModernBertForMaskedLM(
            tf.ModernBertConfig(**tiny, pad_token_id=0, bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2)
        ),
    }
    out = {}
    for k, build in made.items():
        try:
            set_seed(0)
            m = build()
            blocks = len(find_blocks(m))
            shard(m, checkpoint=1)
            x = mine(torch.randint(3, 99, (4, 16)))
            if k == "cpmant": x = x.int()
            loss = m(input_ids=x, labels=x.long()).loss
            loss.backward()
            without = [n for n, p in m.named_parameters() if p.grad is None]
            with torch.device("meta"): bones = build()
            shard(bones)
            out[k] = (
                blocks, loss.item(), len(without), all(whole(p).isfinite().all().item() for p in bones.parameters())
            )
        except Exception as e: out[k] = repr(e)[:300]
    return out


@pytest.mark.parametrize("world", [1, 2])
def test_families_in_bfloat16(world):
    for r in run_ranks(families, world, world_size=world, timeout_s=400):
        for k, v in r.items():
            assert not isinstance(v, str), (k, v)
            # (its global attention is not asked for)
            assert v[0] in (2, 4) and 1 < v[1] < 20 and v[2] == (12 if k == "longformer" else 0) and v[3], (k, v)


def four():
    "Replicated over two, sharded over two"
    from torch.distributed.device_mesh import init_device_mesh
    set_seed(0)
    one = llama().double()
    set_seed(0)
    many = shard(
        llama().double(),
        dtype=None,
        checkpoint=1,
        mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("hosts", "gpus")),
    )
    held = sum(p.to_local().numel() for p in many.parameters()) / count(one).total
    set_seed(0)
    odd = shard(llama().double(), dtype=None, zero={"layers[1:]": 2})
    a, b, c = sgd(one, rows()), sgd(many, [mine(x) for x in rows()]), sgd(odd, [mine(x) for x in rows()])
    return difference(a, b), difference(a, c), held


def test_four_ranks_and_a_mesh_of_two_dimensions():
    for a, b, held in run_ranks(four, world_size=4): assert max(a, b) < 1e-8 and held < 0.55, (a, b, held)


def tensor_parallel(folder):
    "Matrices cut over two ranks, the cuts shared by the others"
    import torch.distributed as dist
    W = dist.get_world_size()
    set_seed(0)
    one = llama().double()
    data = rows()
    pairs = [x.chunk(W // 2)[dist.get_rank() // 2] for x in data]
    set_seed(0)
    many = shard(llama().double(), dtype=None, tp=2, checkpoint=1)
    with torch.device("meta"): born = llama()
    born = shard(born.double(), dtype=None, tp=2, weights=folder)
    held = sum(p.to_local().numel() for p in many.parameters()) / count(one).total
    start = difference({n: whole(t) for n, t in born.state_dict().items()}, {n: t for n, t in one.state_dict().items()})
    a, b, c = sgd(one, data), sgd(many, pairs), sgd(born, pairs)
    return difference(a, b), difference(a, c), held, start


@pytest.mark.parametrize("world", [2, 4])
def test_tensor_parallel_times_zero(world, tmp_path):
    set_seed(0)
    llama().double().save_pretrained(tmp_path)
    for a, c, held, start in run_ranks(tensor_parallel, str(tmp_path), world_size=world):
        assert start == 0 and max(a, c) < 1e-5 and held < 1.25 / world, (a, c, held, start)


@pytest.mark.parametrize("bits", [None, 8])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_a_lora_in_float32_needs_no_gathering_and_inputs_are_cast(stored, bits):
    "A and B take the input's dtype: one rank gathers nothing, and float inputs are cast as fully_shard's root does"
    import transformers as tf
    from bmlab.kernels.layers import pack_linears
    from bmlab.delta.lora import Lora
    from bmlab.train.processes import init_distributed
    init_distributed(seed=0)
    size = dict(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=100, use_cache=False,
    )
    model = tf.LlamaForCausalLM(tf.LlamaConfig(**size)).to(stored)
    if bits: pack_linears(model, bits=bits)
    d = Lora(model, r=2, dtype=torch.float32).freeze()
    shard(model)
    assert model.sharding.mesh is None and {p.dtype for p in d.parameters()} == {torch.float32}
    for grad in (torch.enable_grad, torch.no_grad):
        with grad(): assert model(inputs_embeds=torch.randn(2, 40, 64)).logits.dtype == torch.bfloat16
    model(input_ids=torch.ones(2, 8, dtype=torch.long)).logits.float().square().mean().backward()
    assert all(p.grad.dtype == torch.float32 for p in d.parameters())


def test_weights_that_move_keep_their_ties():
    "New memory for each storage, the same tensors over it"
    from bmlab.train.sharding import _rehome
    m = nn.ModuleDict({"a": nn.Linear(4, 3), "b": nn.Linear(4, 3)})
    m["b"].weight = m["a"].weight
    m.register_buffer("rows", m["a"].weight.data[1:])
    before = {n: t.data_ptr() for n, t in (*m.named_parameters(), *m.named_buffers())}
    want, weight = m["a"].weight.detach().clone(), m["a"].weight
    _rehome(m, torch.device("cpu"))
    assert all(t.data_ptr() != before[n] for n, t in (*m.named_parameters(), *m.named_buffers()))
    assert m["a"].weight is weight is m["b"].weight and torch.equal(weight, want)
    with torch.no_grad(): weight[2, 0] = 7.
    assert m.rows[1, 0] == 7


@pytest.mark.cuda
def test_no_holes_are_left_between_packed_weights():
    from bmlab.kernels.layers import pack_linears
    from bmlab.train.sharding import shard
    torch.cuda.empty_cache()
    before, m = torch.cuda.memory_reserved(), nn.Sequential()           # (what earlier tests have left)
    for i in range(12):
        layer = nn.Sequential(nn.Linear(4096, 4096, bias=False, device="cuda", dtype=torch.bfloat16))
        m.append(pack_linears(layer, bits=4))
    want = m(x := torch.randn(4, 4096, device="cuda", dtype=torch.bfloat16))
    ours = sum(t.nbytes for t in (*m.parameters(), *m.buffers()))
    shard(m)
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() - before < 1.1 * ours + (32 << 20)
    assert torch.equal(m(x), want)


def gathered(dtype, zero):
    "Forwards inside, a different number on each rank, equal those of the model before; the next step trains as ever"
    import torch.distributed as dist
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor
    from torch.nn.parallel import DistributedDataParallel

    from bmlab.train.sharding import whole_weights
    set_seed(0)
    model, ids = llama(), torch.arange(12).view(2, 6)
    other = copy.deepcopy(model)
    shard(model, dtype=dtype, zero=zero, checkpoint=False)
    with torch.no_grad(): want = (model if dtype else other)(ids).logits
    same, counted, steps = [], [], []
    with torch.no_grad(), whole_weights(model) as inner:
        dist.barrier()
        for _ in range(1 + 3 * dist.get_rank()): same.append(torch.equal(inner(ids).logits, want))
        counted.append(sum(isinstance(p, DTensor) for p in inner.parameters()))
        dist.barrier()
    counted.append(sum(not isinstance(p, DTensor) for p in model.parameters()))
    for m in (model, other):
        opt = torch.optim.SGD(m.parameters(), lr=0.1)
        m(ids, labels=ids).loss.backward()
        opt.step()
        steps.append(m(ids, labels=ids).loss.item())
    blocks = [b for b in model.sharding.blocks.values() if isinstance(b, FSDPModule)]
    freed = [isinstance(next(b.parameters()), DTensor) for b in blocks]         # after a forward, before the way back
    with whole_weights(DistributedDataParallel(copy.deepcopy(other))) as inner: ddp = type(inner).__name__
    return same, counted, steps, [f == (zero == 3) for f in freed], ddp


def all_gathered():
    return [gathered(dtype, zero) for dtype in (None, torch.bfloat16) for zero in (2, 3)]


def test_whole_weights():
    for found in run_ranks(all_gathered):
        for n, (same, counted, (a, b), freed, ddp) in enumerate(found):
            assert all(same) and counted == [0, 0] and all(freed) and ddp == "LlamaForCausalLM"
            assert abs(a - b) < (1e-6 if n < 2 else 0.05)


def broken_whole(old):
    "An error inside a forward leaves no weight whole, and the next forward is as ever; in torch before 2.13, too"
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor
    if old and hasattr(FSDPModule, "reset_iter_state"): del FSDPModule.reset_iter_state

    from bmlab.train.sharding import whole_weights
    model, ids = shard(llama(), dtype=None, checkpoint=False), torch.arange(12).view(2, 6)
    with torch.no_grad(): want = model(ids).logits
    with pytest.raises(IndexError), torch.no_grad(), whole_weights(model): model(ids + 95)
    with pytest.raises(ZeroDivisionError), torch.no_grad(), whole_weights(model):
        handle = model.model.layers[1].mlp.register_forward_hook(lambda *_: 1 / 0)
        try: model(ids)
        finally: handle.remove()
    whole = [n for n, p in model.named_parameters() if not isinstance(p, DTensor)]
    with torch.no_grad(): same = torch.equal(model(ids).logits, want)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    model(ids, labels=ids).loss.backward()
    opt.step()
    with torch.no_grad(): return whole, same, torch.equal(model(ids).logits, want)


@pytest.mark.parametrize("old", (False, True))
def test_an_error_leaves_no_weights_whole(old): assert run_ranks(broken_whole, old) == [([], True, False)] * 2


def refused_whole():
    from bmlab.train.sharding import whole_weights
    with pytest.raises(NotImplementedError, match="cp="), whole_weights(shard(llama(), dtype=None, cp=2)): pass


def test_whole_weights_of_rows_that_are_shared(): run_ranks(refused_whole)


def test_what_others_hold_is_not_planned_with(monkeypatch):
    "the keys and values of a sampler stay while a model trains; its own weights, states and gradients are the plan's"
    from bmlab.train import sharding
    model = shard(llama(), checkpoint="auto", dtype=None, memory_limit="1GiB")
    s, ids, cpu = model.sharding, torch.ones(4, 64, dtype=torch.long), torch.device("cpu")
    weights = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    assert sharding._own_bytes(model, cpu) == weights + 16 * sum(p.numel() for p in model.parameters())
    assert sharding._own_bytes(model, torch.device("cuda")) == 0 == sharding._beside(model, s, cpu)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: weights)
    assert sharding._beside(model, s, torch.device("cuda")) == weights
    s.memory_limit, limit = None, sharding.plan_training(s.bones, 4, 64, machine="h200", dtype=None).peak_bytes
    monkeypatch.setattr(sharding, "_limit", lambda *_: limit)
    recomputed = []
    for beside in (0, limit // 400):
        monkeypatch.setattr(sharding, "_beside", lambda *_: beside)
        sharding._decide(model, s, (), dict(input_ids=ids, labels=ids))
        recomputed.append(s.plan.limit)
    assert recomputed == [limit, limit - limit // 400]


def with_less_room(cp):
    "One rank has room for fewer activations than the other"
    import torch.distributed as dist
    ids, found = torch.arange(512).view(8, 64) % 99, []
    limits = [1 << 30] * 2
    for turn in range(2):
        set_seed(0)
        kw = dict(cp=2) if cp else dict(tp=2)
        model = shard(llama(), dtype=None, memory_limit=limits[dist.get_rank()], **kw)
        loss = model(ids, labels=ids).loss
        loss.backward()                                        # (hangs where one recomputes what the other does not)
        plan = model.sharding.plan
        found.append((loss.item(), model.sharding.recompute, plan.limit))
        limits[1] = limits[1] if turn else (plan.min_bytes + plan.peak_bytes) // 2
    return found, limits[1]


@pytest.mark.parametrize("cp", (False, True))
def test_ranks_that_share_rows_recompute_alike(cp):
    one, two = run_ranks(with_less_room, cp)
    (loss, none, _), (again, some, limit) = one[0]
    assert one == two and none == 0 < some and limit == one[1] and abs(loss - again) < 1e-6

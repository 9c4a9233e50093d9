"Grpo beside TRL, and runs that are killed, shared out and resumed"
import copy, functools, gc, json
from dataclasses import replace
from pathlib import Path

import original_trl as trl
import pytest
import torch
from fresh import fresh_python
from transformers import LlamaConfig, LlamaForCausalLM

from bmlab.align.grpo import Grpo, Rollouts, _draw, _fuse_to_sample, _policy, rollout
from bmlab.delta.lora import Lora
from bmlab.delta.site import Site, attach_site
from bmlab.infer.decode import Decoder
from bmlab.infer.engine import wrap
from bmlab.infer.fused import fuse_decode, fuse_for
from bmlab.kernels.layers import pack_linears
from bmlab.plan.machine import machine
from bmlab.train.checkpoint import latest
from bmlab.train.processes import run_ranks
from bmlab.train.sharding import shard

FIXTURE = Path(__file__).resolve().parents[1] / "fixtures" / "original_trl_grpo.json"


@functools.cache
def found(): return json.loads(FIXTURE.read_text())


def log_probs(model, ids, temperature):
    with torch.no_grad(): logp = model(ids).logits.div(temperature).log_softmax(-1)[:, :-1]
    return logp.gather(-1, ids[:, 1:, None])[..., 0]


@pytest.mark.parametrize("family", trl.FAMILIES)
def test_loss_and_gradients_are_trls(family):
    tok, sampler, ref = trl.tokenizer(), trl.weights(family, "sampler"), trl.weights(family, "reference")
    prompts, ids, mask, rewards = trl.texts()
    for name, (_, options) in trl.CASES.items():
        whole = torch.cat([prompts, ids], 1)
        sampled = log_probs(sampler, whole, options.get("temperature", 1.0))[:, trl.PROMPT - 1:]
        cut = lambda x: [row[m.bool()].tolist() for row, m in zip(x, mask)]
        rolled = Rollouts(
            ["3"] * trl.ROWS, [str(i) for i in range(trl.ROWS)], prompts.tolist(), cut(ids), cut(sampled),
            [True] * trl.ROWS
        )
        model = trl.weights(family)
        # leave-one-out is taught without a ratio: its value differs, and its gradient is TRL's where the ratio is one
        if options.get("kl"): options = options | dict(reference=ref)
        g = Grpo(
            model, tok, ["3", "4"], lambda p, t: rewards[int(t)], group=trl.GROUP, max_new_tokens=trl.LENGTH, **options
        )
        g.sample = lambda *args, **kw: rolled
        loss = g.loss(model, next(iter(g)))
        loss.backward()
        want = found()[family][name]
        assert g.samples.advantage.tolist() == pytest.approx(want["advantages"], abs=1e-5), name
        if name != "rloo": assert loss.item() == pytest.approx(want["loss"], abs=1e-5), name
        for n, (norm, product) in trl.told(model).items():
            close = functools.partial(pytest.approx, rel=1e-5, abs=1e-5)
            assert (norm, product) == (close(want["gradients"][n][0]), close(want["gradients"][n][1])), (name, n)


def small(seed=0, vocab=trl.WORDS, **more):
    torch.manual_seed(seed)
    size = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
    return LlamaForCausalLM(LlamaConfig(vocab_size=vocab, eos_token_id=2, bos_token_id=1, **size | more))


def sevens(prompt, text): return text.split().count("7") - 0.01 * len(prompt)


PROMPTS = ["3", "4 5 6", "9 8"]


def made(model, **options):
    options = dict(group=4, prompts_per_step=2, max_new_tokens=6) | options
    return Grpo(model, trl.tokenizer(), PROMPTS, sevens, **options)


@pytest.mark.parametrize("base", ["full", "lora", "int4", "fused"])
def test_what_is_sampled_after_an_update_is_what_a_new_decoder_samples(base):
    "static caches, packed bases, LoRA, and blocks that an engine has fused see the new weights"
    model = small(hidden_size=128, intermediate_size=256) if base == "int4" else small()
    if base == "int4": pack_linears(model, bits=4, group_size=32)
    if base == "fused": model = wrap(model, trl.tokenizer(), max_batch=8, max_ctx=64, device="cpu").model
    if base == "full": params = list(model.parameters())
    elif base == "fused": params = [p for p in model.parameters() if p.is_floating_point()]
    else: params = Lora(model, r=4, modules=["q_proj", "down_proj"]).freeze().trainable()
    g, opt = made(model), torch.optim.SGD(params, lr=2.0)
    before = g.sample(PROMPTS, 2, seed=5)
    for n in range(2):
        g.fit(opt, steps=1, plot=False)
        now = g.sample(PROMPTS, 2, seed=5)
        anew = small(hidden_size=128, intermediate_size=256) if base == "int4" else small()
        if base == "fused": anew.load_state_dict(model.state_dict())
        else: anew = copy.deepcopy(model)
        fresh = rollout(Decoder(anew, 8, 64), g.tok, PROMPTS, 2, 6, seed=5)
        assert now.drawn == fresh.drawn
        same = [a == pytest.approx(b, abs=1e-5) for a, b in zip(now.logps, fresh.logps)]
        assert all(same) and (base == "fused" or now.logps == fresh.logps)
    assert now.logps != before.logps


@pytest.mark.parametrize("bits", [32, 4])
def test_a_model_may_be_fused_while_it_trains(bits):
    "as on a GPU, where sampling fuses it: the same texts and steps, and its own blocks again once nobody samples"
    logs, texts = [], []
    for fused in (False, True):
        model = small(hidden_size=128, intermediate_size=256)
        if bits == 4: pack_linears(model, bits=4, group_size=32)
        lora = Lora(model, r=4, modules=["q_proj", "v_proj", "down_proj"]).freeze()
        with torch.no_grad():
            for p in lora.trainable(): p.add_(torch.randn_like(p) * 0.05)
        g, kind = made(model), type(model.model.layers[0])
        if fused: fuse_for(g, model)
        assert (type(model.model.layers[0]) is not kind) == fused
        logs.append(g.fit(torch.optim.SGD(lora.trainable(), lr=0.5), steps=3, plot=False))
        texts.append(g.sample(PROMPTS, 2, seed=5))
        del g
        gc.collect()
        assert type(model.model.layers[0]) is kind
    assert texts[0].drawn == texts[1].drawn and logs[0].reward.tolist() == logs[1].reward.tolist()
    assert logs[0].entropy.tolist() == pytest.approx(logs[1].entropy.tolist(), rel=1e-5) and max(logs[1].gap) < 1e-5


def test_an_engine_takes_a_sampled_model_over():
    model = small()
    g = made(model)
    fuse_for(g, model)
    g.sample(PROMPTS)
    engine = wrap(model, trl.tokenizer(), max_batch=8, max_ctx=64, device="cpu")
    assert len(g.sample(PROMPTS)) == 3
    engine.close()
    fuse_for(g, model)
    fused = fuse_decode(model)
    fused.undo()
    assert len(g.sample(PROMPTS)) == 3


def test_an_engine_with_plain_blocks_keeps_them(monkeypatch):
    "as on a GPU, where sampling fuses a model unless somebody has wrapped it with fuse=False"
    model = small()
    g, kind, cls = made(model), type(model.model.layers[0]), type(model)
    engine = wrap(model, trl.tokenizer(), max_batch=8, max_ctx=64, device="cpu", fuse=False)
    def fused():
        with monkeypatch.context() as m:
            m.setattr(cls, "device", property(lambda self: torch.device("cuda")))
            _fuse_to_sample(g, model)
        return type(model.model.layers[0]) is not kind
    assert not fused()
    engine.close()
    assert fused() and len(g.sample(PROMPTS)) == 3


def test_a_step_ahead_of_the_host_draws_the_same():
    model, stops = small(), {2, 5, 7, 9}
    def draw(ahead):
        decoder, ids = Decoder(model, 8, 64), [[3], [4, 5, 6], [9, 8]]
        sampler = _policy(decoder, 1.0, list(range(8)))
        with torch.no_grad(): return _draw(decoder, ids, 2, sampler, 12, stops, ahead)
    (drawn, logps), ahead = draw(False), draw(True)
    assert drawn == ahead[0] and [len(d) for d in drawn] != [12] * 6 and max(map(len, drawn)) > 2
    for a, b in zip(logps, ahead[1]): assert a == pytest.approx(b, abs=1e-6)


@pytest.mark.parametrize("dtype, most", [(torch.float32, 1e-5), (torch.bfloat16, 0.2)])
def test_sampler_and_trainer_agree(dtype, most):
    model = small().to(dtype)
    log = made(model, temperature=0.8).fit(torch.optim.SGD(model.parameters(), lr=0.1), steps=3, plot=False)
    assert 0 <= log.gap.max() < most


def test_a_shared_prefix_changes_nothing():
    model, tok = small(), trl.tokenizer()
    together = rollout(Decoder(model, 8, 64), tok, PROMPTS[:2], 4, 6, seed=3)
    for n, prompt in enumerate(PROMPTS[:2]):
        for row in range(4 * n, 4 * n + 4):
            ids, drawn = together.ids[row], together.drawn[row]
            alone = log_probs(model, torch.tensor([ids + drawn]), 1.0)[0, len(ids) - 1:]
            assert alone.tolist() == pytest.approx(together.logps[row], abs=1e-5)
            assert together.prompts[row] == prompt and 1 <= len(drawn) <= 6


def test_the_reference_is_the_model_with_its_delta_off_bit_for_bit():
    model = small()
    copied = copy.deepcopy(model)
    lora = Lora(model, r=4, modules=["q_proj", "v_proj"]).freeze()
    g = made(model, kl=0.1)
    log = g.fit(torch.optim.SGD(lora.trainable(), lr=2.0), steps=2, plot=False)
    assert log.kl[0] == 0 and log.kl[1] > 0
    refs = []
    for reference in (None, lora, copied):
        other = made(model, kl=0.1, reference=reference)
        refs.append(next(iter(other))["ref"])
    assert torch.equal(refs[0], refs[1]) and torch.equal(refs[0], refs[2])


def run(model, folder, steps, reward=sevens, **options):
    g = Grpo(model, trl.tokenizer(), PROMPTS, reward, group=4, prompts_per_step=2, max_new_tokens=6, batch=3, updates=2)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    g.fit(opt, steps=steps, save_to=folder, save_every=3, plot=False, **options)
    return g


KILLED = """
import os, signal, sys
sys.path[:0] = {paths!r}
import test_grpo as t
calls = []
def dies(prompt, text):
    calls.append(text)
    if len(calls) == 20: os.kill(os.getpid(), signal.SIGKILL)
    return t.sevens(prompt, text)
t.run(t.small(), {folder!r}, 6, dies)
"""


def test_a_run_that_is_killed_goes_on_bit_for_bit(tmp_path):
    "killed while the third texts are scored; the last checkpoint lies between two updates on the second ones"
    here = Path(__file__).resolve().parent
    paths = [str(here), *(str(here.parents[1] / p) for p in ("tests/helpers", "tools"))]
    done = fresh_python(KILLED.format(paths=paths, folder=str(tmp_path / "a")))
    assert done.returncode == -9 and latest(tmp_path / "a").name == "step-00000003", done.stderr
    model, whole = small(), small()
    g = run(model, tmp_path / "a", 6, resume=True)
    h = run(whole, tmp_path / "b", 6)
    assert all(map(torch.equal, model.parameters(), whole.parameters()))
    times = ["sampling_s", "scoring_s", "training_s"]
    assert g.log.drop(columns=times).equals(h.log.drop(columns=times)) and len(g.log) == 3


def test_a_second_run_of_the_same_grpo_has_a_log_of_its_own():
    model = small(max_position_embeddings=16)                        # (and the decoder asks for no more than there are)
    g, opt = made(model), torch.optim.SGD(model.parameters(), lr=0.1)
    logs = [g.fit(opt, steps=2, plot=False) for _ in range(2)]
    assert [list(log.step) for log in logs] == [[1, 2]] * 2 and list(g.log.step) == [1, 2, 3, 4]
    assert [*logs[0].reward, *logs[1].reward] == list(g.log.reward)


def test_a_failing_reward_counts_as_zero_by_option():
    model = small()
    odd = lambda prompt, text: 1 / (len(text) % 2)
    g = made(model, bad="zero")
    g.reward = odd
    log = g.fit(torch.optim.SGD(model.parameters(), lr=0.1), steps=2, plot=False)
    assert log.errors.sum() > 0 and g.samples.error.notna().any()


@pytest.mark.parametrize("options, said", [
    (dict(method="gpro"), "did you mean 'grpo'"), (dict(group=1), "group=1"), (dict(kl=0.1), "reference"),
    (dict(max_new_tokens=0), "max_new_tokens=0"), (dict(temperature=0), "temperature=0"),
    (dict(clip=(2, 0.1)), "clip=(2, 0.1)"), (dict(cap=0), "cap=0"), (dict(prompts=[]), "prompts"),
    (dict(normalize="mean"), "normalize='mean'"), (dict(bad="skip"), "bad='skip'"),
])  # fmt: skip
def test_a_wrong_argument_is_named_before_anything_runs(options, said):
    given = dict(model=small(), tok=trl.tokenizer(), prompts=PROMPTS, reward=sevens) | options
    with pytest.raises(ValueError) as e: Grpo(**given)
    assert said in str(e.value)


def test_a_plan_holds_what_the_run_will():
    "from shapes alone: the cache's bytes are the decoder's, and every option that costs time says so"
    with torch.device("meta"): bones = small()
    Lora(bones, r=4, modules=["q_proj", "v_proj"]).freeze()
    model = small()
    Lora(model, r=4, modules=["q_proj", "v_proj"]).freeze()
    g = made(model, batch=4)
    plan = made(bones, batch=4).plan("h100-80")
    assert plan.fits and plan.texts == 8 and plan.tokens == 6 and plan.machine == "h100-80"
    g.sample(PROMPTS)
    assert plan.parts["keys and values"] == g.decoder.cache.bytes
    assert plan.parts["weights"] == pytest.approx(sum(p.nbytes for p in model.parameters()), rel=1e-3)
    assert plan.sampling_tok_s == pytest.approx(48 / plan.sampling_s) and plan.log.sampling_s[0] == plan.sampling_s
    longer, twice = made(bones, max_new_tokens=24).plan("h100-80"), made(bones, updates=2).plan("h100-80")
    with_kl, in_turns = made(bones, kl=0.1).plan("h100-80"), made(bones, rows=4).plan("h100-80")
    once = made(bones).plan("h100-80")
    assert longer.sampling_s > 1.5 * once.sampling_s and twice.training_s == pytest.approx(2 * once.training_s)
    assert once.training_s < with_kl.training_s < twice.training_s and in_turns.sampling_s > 1.9 * once.sampling_s
    assert in_turns.parts["keys and values"] == once.parts["keys and values"] / 2
    with pytest.raises(ValueError, match="did you mean 'h100-80'"): made(bones).plan("h100-8")


def test_a_sharded_model_has_no_plan(monkeypatch):
    g = made(small())
    monkeypatch.setattr("bmlab.align.grpo.stays", lambda model: False)
    with pytest.raises(NotImplementedError, match="is sharded: ask a Grpo of the model as it is before"): g.plan("h200")


def test_a_plan_reads_whether_blocks_recompute():
    with torch.device("meta"): bones = small(num_hidden_layers=6, hidden_size=128, intermediate_size=512)
    g = made(bones, max_new_tokens=200)
    kept = g.plan("h200")
    bones.gradient_checkpointing_enable()
    less = g.plan("h200")
    assert less.peak_bytes < kept.peak_bytes and less.training_s > kept.training_s
    assert less.sampling_s == kept.sampling_s
    assert all(m.gradient_checkpointing for m in bones.model.layers)
    assert g.plan("h200", checkpoint=False).peak_bytes == kept.peak_bytes


def test_a_plan_is_of_the_blocks_that_train():
    "a model that `shard` laid out is planned as before it did, its blocks compiled and recomputed as they are"
    plain, laid = small(num_hidden_layers=3), small(num_hidden_layers=3)
    for model in (plain, laid): Lora(model, r=4, modules=["q_proj", "v_proj"]).freeze()
    def said(g, **how):
        plan = g.plan("h100-80", **how)
        return plan.training_s, plan.parts
    laid = shard(laid, checkpoint=2, compile="eager", dtype=None)
    assert said(made(laid)) == said(made(plain), checkpoint=2, compile=True) != said(made(plain))
    auto = shard(small(), checkpoint="auto", dtype=None, memory_limit="1GiB")
    assert said(made(auto)) == said(made(small()), checkpoint="auto") == said(made(small()), checkpoint=False)
    assert auto.sharding.plan is None
    # (a delta on a block that was laid out)
    class Same(Site):
        def around(self, call, *args, **kwargs): return call(*args, **kwargs)
    attach_site(laid.model.layers[0], "same", Same())
    assert said(made(laid)) == said(made(plain), checkpoint=2, compile=True)


def test_as_few_blocks_recompute_as_leave_room_for_keys_and_values():
    with torch.device("meta"): bones = small(num_hidden_layers=6, hidden_size=128, intermediate_size=512)
    g, h100 = made(bones, max_new_tokens=200, group=32), machine("h100-80")
    none, every = (g.plan(h100, checkpoint=n) for n in (False, True))
    holds = lambda peak: replace(h100, gpu_memory=int(peak / 0.94))
    some = g.plan(holds((none.peak_bytes + every.peak_bytes) / 2), checkpoint="auto")
    assert none.training_s < some.training_s < every.training_s and some.fits
    assert g.plan(holds(none.peak_bytes * 1.1), checkpoint="auto").training_s == none.training_s
    for little in (every.parts["keys and values"] / 2, every.peak_bytes * 0.9):
        assert not g.plan(holds(little), checkpoint="auto").fits
    auto = shard(small(num_hidden_layers=6, hidden_size=128, intermediate_size=512), checkpoint="auto", dtype=None,
                 memory_limit=(none.peak_bytes + every.peak_bytes) // 2 - every.parts["keys and values"])
    assert made(auto, max_new_tokens=200, group=32).plan(h100).training_s == some.training_s


def test_compiled_blocks_train_and_plain_ones_sample():
    ran = []
    def seen(graph, inputs):
        ran.append(torch.is_grad_enabled())
        return graph
    texts = {}
    for how in ("plain", "compiled"):
        model = small()
        Lora(model, r=4, modules=["q_proj", "v_proj"]).freeze()
        if how == "compiled":
            torch._dynamo.register_backend(seen, name="seen_by_grpo")
            model = shard(model, checkpoint=1, compile="seen_by_grpo", dtype=None)
        g = made(model)
        g.fit(torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5), steps=3, plot=False)
        texts[how] = [*g.samples.text, *(g.log.reward)], g.log.gap.max()
    assert texts["plain"][0] == texts["compiled"][0] and texts["compiled"][1] < 1e-5
    assert ran and all(ran)


METHODS_ON_RANKS = {
    "grpo": {}, "token": dict(method="dapo", scale="batch", batch=3, cap=2.0),
    "lora": dict(kl=0.1, updates=2, clip=(0.1, 0.1)),
}


def several(joined, method, folder=None, steps=4, **options):
    "(texts, log, weights) of a run whose model is one process's, in DistributedDataParallel, or sharded"
    from torch.nn.parallel import DistributedDataParallel
    from bmlab.train import shard
    model = small()
    lora = Lora(model, r=4, modules=["q_proj", "v_proj"]).freeze() if method == "lora" else None
    if joined == "ddp": model = DistributedDataParallel(model)
    elif joined: shard(model, zero=joined, dtype=None)
    g = made(model, **METHODS_ON_RANKS[method])
    opt = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=2.0 if lora else 0.2)
    log = g.fit(opt, steps=steps, plot=False, save_to=folder, save_every=1 if folder else None, **options)
    weights = [p for p in model.parameters() if p.requires_grad]
    whole = [getattr(p, "full_tensor", lambda p=p: p)().detach().clone() for p in weights]
    return list(g.samples.text), log.drop(columns=["sampling_s", "scoring_s", "training_s"]), whole


def on_two(paths, folder):
    import sys
    sys.path[:0] = paths
    import test_grpo as t
    kinds = [("ddp", "grpo"), ("ddp", "lora"), (2, "token"), (3, "grpo"), (3, "lora")]
    found = {kind: t.several(*kind) for kind in kinds}
    t.several("ddp", "token", folder, 2)
    # (saved between two updates on the same texts, and taken up again)
    t.several(3, "lora", folder + "-between", 1)
    found[3, "lora"] = t.several(3, "lora", folder + "-between", resume=True)
    return found


@pytest.mark.long
def test_two_processes_write_and_learn_what_one_does(tmp_path):
    here = Path(__file__).resolve().parent
    paths = [str(here), *(str(here.parents[1] / p) for p in ("tests/helpers", "tools"))]
    found = run_ranks(on_two, paths, str(tmp_path))
    alone = {method: several(None, method) for method in METHODS_ON_RANKS}
    for rank in found:
        for (joined, method), (texts, log, weights) in rank.items():
            want, numbers, there = alone[method]
            assert texts == want and len(set(texts)) > 4, (joined, method)
            assert list(log.reward) == pytest.approx(list(numbers.reward), nan_ok=True), (joined, method)
            exact = dict(loss=1e-4, length=1e-4, entropy=1e-4)
            # (means of batches, of other sizes here)
            rough = dict(clipped=0.2) | (dict(kl=0.2) if method == "lora" else {})
            for column, rel in (exact | rough).items():
                close = pytest.approx(list(numbers[column]), rel=rel, abs=1e-5, nan_ok=True)
                assert list(log[column]) == close, (joined, method, column)
            assert numbers.clipped.max() > 0 or method != "lora"
            for a, b in zip(weights, there, strict=True): assert torch.allclose(a, b, atol=1e-5), (joined, method)
    # a run of two processes goes on in one
    _, log, weights = several(None, "token", str(tmp_path), 4, resume=True)
    for a, b in zip(weights, alone["token"][2]): assert torch.allclose(a, b, atol=1e-5)


def on_two_refused(paths, folder):
    import sys
    sys.path[:0] = paths
    import test_grpo as t
    from bmlab.align.rewards import RewardError
    from bmlab.train.processes import rank
    with pytest.raises(ValueError, match="is not one that 2 processes train together; give DistributedDataParallel"):
        t.made(t.small())
    model = torch.nn.parallel.DistributedDataParallel(t.small())
    with pytest.raises(ValueError, match="prompts_per_step=3: a multiple of the 2 processes"):
        t.made(model, prompts_per_step=3)
    g = t.made(model)
    def odd(prompt, text): return 1 / (1 - rank())
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    g.fit(opt, steps=1, plot=False)
    g.reward = odd
    with pytest.raises(RewardError, match="division by zero.*in process 1") as e:
        g.fit(opt, steps=2, plot=False, save_to=folder)
    rows = len(g.rows)
    g.reward = t.sevens
    log = g.fit(opt, steps=1, plot=False)
    def breaks(decoder, *args, **kwargs):
        if rank(): raise MemoryError("none is left")
        return kept(decoder, *args, **kwargs)
    kept, Decoder.prefill = Decoder.prefill, breaks
    try:
        with pytest.raises(RuntimeError, match="process 1 failed: MemoryError: none is left"):
            g.fit(opt, steps=1, plot=False)
    finally: Decoder.prefill = kept
    g.fit(opt, steps=1, plot=False)
    h = t.made(model)
    with pytest.raises(ValueError, match="by 1 processes; go on with as many, not with 2"):
        h.load_state_dict(dict(done=1, first=0, rows=[], pending=[0], ranks=1))
    return e.value.prompt, (rows, len(log), len(g.rows), len(g.log.step.unique())), repr(h)


@pytest.mark.long
def test_what_fails_in_one_process_is_an_error_in_all(tmp_path):
    here = Path(__file__).resolve().parent
    paths = [str(here), *(str(here.parents[1] / p) for p in ("tests/helpers", "tools"))]
    one, two = run_ranks(on_two_refused, paths, str(tmp_path))
    assert one == two and one[0] in PROMPTS and one[1] == (1, 1, 3, 3) and "a step of 2 processes" in one[2]

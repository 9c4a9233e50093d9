"Continuous batching: what each request says is what it says alone, whatever the others do"
import copy
import random
import threading
import time

import pytest
import torch
import transformers as tf
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from bmlab.infer.batcher import Batcher
from bmlab.infer.decode import Decoder
from bmlab.infer.text import decode_tokens, stream_text
from bmlab.infer.sampling import Sampler
from bmlab.infer.speculate import DraftModel, PromptLookup

DEVICE = [
    "cpu",
    pytest.param(
        "cuda", marks=[pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
    ),
]


@pytest.fixture(scope="module")
def tok():
    t = Tokenizer(models.BPE())
    t.pre_tokenizer, t.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    t.train_from_iterator(
        ["plain english"],
        trainers.BpeTrainer(vocab_size=270, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    )
    return tf.PreTrainedTokenizerFast(tokenizer_object=t)


@pytest.fixture(scope="module")
def model(tok):
    torch.manual_seed(0)
    m = tf.LlamaForCausalLM(tf.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=len(tok)
    )).eval()
    m.generation_config.eos_token_id = None
    return m


def alone(d, tok, prompt, max_new_tokens, stop=(), stop_ids=None, seed=None, **options):
    return "".join(
        p for _, p in stream_text(d, tok, [prompt], Sampler(**options, seed=[seed]), max_new_tokens, stop, stop_ids)
    )


def asks(n, seed=0):
    rng = random.Random(seed)
    for i in range(n):
        yield dict(
            prompt="".join(rng.choice("plain english ") for _ in range(rng.randint(1, 30))),
            max_new_tokens=rng.randint(1, 14), stop_ids=rng.choice([[], [7, 8, 9]]),
            **rng.choice([
                {}, dict(temperature=0.9, seed=i), dict(temperature=0.7, top_p=0.9, top_k=40, seed=i),
                dict(repetition_penalty=1.3)
            ])
        )


@pytest.mark.parametrize("device", DEVICE)
@pytest.mark.parametrize("how", ["plain", "ahead", "lookup", "draft"])
def test_60_requests_from_20_threads(how, model, tok, device, sayings={}):
    m = model.to(device)
    d, todo, got = Decoder(m, max_batch=5, max_ctx=64), list(asks(60)), [None] * 60
    want = sayings[device] = sayings.get(device) or [alone(d, tok, **a) for a in todo]
    draft = {"lookup": PromptLookup(length=4), "draft": DraftModel(m, length=3)}.get(how)
    with Batcher(d, tok, draft) as b:
        if how == "ahead": b.runs_ahead = True
        def user(k):
            for i in range(k, 60, 20): got[i] = "".join(b.submit(**todo[i]))
        threads = [threading.Thread(target=user, args=(k,)) for k in range(20)]
        [t.start() for t in threads]
        [t.join(120) for t in threads]
        assert got == want
        assert b.stats["requests"] == 60 and not b.active and not b.waiting
        # rows do share the steps
        assert b.stats["steps"] < sum(a["max_new_tokens"] for a in todo) / 2
    assert not any(d.held) and not any(t.name == "bmlab-batcher" for t in threading.enumerate())
    model.to("cpu")


@pytest.mark.parametrize("ahead", [False, True])
def test_cancelling_at_random_disturbs_nobody(model, tok, ahead):
    d, todo, rng = Decoder(model, max_batch=3, max_ctx=64), list(asks(20, 1)), random.Random(2)
    want = [alone(d, tok, **a) for a in todo]
    with Batcher(d, tok) as b:
        b.runs_ahead = ahead
        handles, gone = [b.submit(**a) for a in todo], set(rng.sample(range(20), 8))
        for i in sorted(gone):
            handles[i].cancel()
            time.sleep(0.002)
        for i, h in enumerate(handles):
            text = "".join(h)
            assert text == want[i] if i not in gone else want[i].startswith(text.rstrip("\ufffd")), i
            assert h.done and h.finish in (("stop", "length") if i not in gone else ("stop", "length", "cancelled"))


def test_who_gives_up_while_waiting_leaves_the_queue(model, tok):
    "At once, while every row is taken; the place is the next one's, and nobody reads a text that nobody wants"
    d, go = Decoder(model, max_batch=2, max_ctx=64), threading.Event()
    step = d.step_sampled

    def held(sampler):
        assert go.wait(60), "the step was let go by nobody"
        return step(sampler)

    d.step_sampled = held
    with Batcher(d, tok, max_waiting=1) as b:
        # (both at once: a step that began between them would keep the second waiting until it is let go)
        with b.wake: running = [b.submit("plain", 30) for _ in range(2)]
        for h in running: next(h)
        waits = b.submit("english", 5)
        with pytest.raises(RuntimeError, match="busy: 2 requests run and 1 wait"): b.submit("english", 5)
        waits.cancel()
        waits.cancel()
        assert waits.finish == "cancelled" and list(waits) == [] and not b.waiting and waits.stats["new_tokens"] == 0
        other = b.submit("english", 5)
        go.set()
        assert "".join(other) == alone(
            Decoder(model, 1, 64), tok, "english", 5
        ) and [len(list(h)) > 0 for h in running] == [True, True]
    del d.step_sampled


@pytest.mark.parametrize("draft", [None, "lookup"])
def test_logprobs_and_penalties_of_one_request(model, tok, draft):
    "They are what the model gives its own text, and the neighbours do not notice"
    d, ids = Decoder(model, max_batch=3, max_ctx=64), tok("plain")["input_ids"]
    want = alone(d, tok, "english", 12)
    with Batcher(d, tok, PromptLookup() if draft else None) as b:
        told, other = b.submit("plain", 12, logprobs=2), b.submit("english", 12)
        pushed = b.submit("plain", 40, frequency_penalty=2.0)
        assert "".join(other) == want and not any(hasattr(t, "logprob") for t in other.ids)
        list(told)
        list(pushed)
    with torch.no_grad(): raw = model(torch.tensor([ids + told.ids])).logits[0, len(ids) - 1:-1].log_softmax(-1)
    assert torch.allclose(torch.tensor([t.logprob for t in told.ids]), raw[torch.arange(12), told.ids], atol=1e-4)
    assert [t.likeliest[1][0] for t in told.ids] == raw.topk(2).indices[:, 1].tolist()
    said = torch.zeros(raw.shape[1])
    for i, t in enumerate(pushed.ids):
        with torch.no_grad(): x = model(torch.tensor([ids + pushed.ids[:i]])).logits[0, -1]
        assert (x - 2 * said)[t] > (x - 2 * said).max() - 1e-4
        said[t] += 1


@pytest.mark.parametrize("ahead", [False, True])
def test_stop_strings(model, tok, ahead):
    d = Decoder(model, max_batch=2, max_ctx=64)
    whole = [alone(d, tok, p, 40) for p in ("plain", "english")]
    stops = [w[8:11] for w in whole]
    with Batcher(d, tok) as b:
        b.runs_ahead = ahead
        # both rows end by text while a step may be under way
        for _ in range(3):
            handles = [b.submit(p, 40, stop=s) for p, s in zip(("plain", "english"), stops)]
            assert ["".join(h) for h in handles] == [
                w[: w.find(s)] for w, s in zip(whole, stops)
            ] and all(h.finish == "stop" for h in handles)


def test_one_bad_request_is_its_own_affair(model, tok):
    d = Decoder(model, max_batch=2, max_ctx=64)
    want = alone(d, tok, "plain", 30)
    with Batcher(d, tok) as b:
        h = b.submit("plain", 30)
        for kw, says in (
            (dict(max_new_tokens=64), "exceed max_ctx=64"), (dict(top_p=2), "top_p=2"),
            (dict(nonsense=1), "unknown sampling option 'nonsense'"), (dict(max_new_tokens=2.5), "max_new_tokens=2.5"),
            (dict(prompt=""), "empty"), (dict(prompt=[5, -1]), "holds -1"), (dict(prompt=3), "prompt=3"),
            (dict(seed="x"), "seed='x'"), (dict(prompt=[5, None]), "holds None: ids are whole"),
            (dict(prompt=[True, 5]), "holds True: ids are"), (dict(prompt=[]), r"prompt=\[\] is empty"),
            (dict(prompt=torch.tensor([5])), r"prompt.tolist\(\) makes"), (dict(stop=[None]), "stop=.None.: a text"),
            (dict(stop_ids=5), "stop_ids=5: token ids"), (dict(stop_ids=["a"]), "stop_ids=.*: token ids such as")
        ):
            with pytest.raises((ValueError, TypeError), match=says):
                b.submit(**dict(dict(prompt="x", max_new_tokens=4), **kw))
        assert "".join(h) == want
        d.prefill, real = (
            (lambda *a, **k: (_ for _ in ()).throw(torch.OutOfMemoryError("no room for this one"))), d.prefill
        )
        bad = b.submit("english", 4)
        with pytest.raises(torch.OutOfMemoryError): list(bad)
        with pytest.raises(torch.OutOfMemoryError): list(bad)                                   # still the same error
        d.prefill = lambda *a, **k: real(*a, **k)[:, :3]
        with pytest.raises(RuntimeError): list(b.submit("english", 4, repetition_penalty=2.0))
        d.prefill = real
        assert bad.finish == "error" and not any(b.sampler.key) and "".join(b.submit("plain", 30)) == want
    del d.prefill


def test_closing(model, tok):
    d = Decoder(model, max_batch=1, max_ctx=64)
    b, step = Batcher(d, tok), d.step_sampled
    # no step before it closes
    def held(sampler):
        while not b.closed: time.sleep(0.001)
        return step(sampler)
    d.step_sampled = held
    handles = [b.submit("plain", 50) for _ in range(3)]
    next(iter(handles[0]))
    b.close()
    del d.step_sampled
    for h in handles: list(h)
    assert {h.finish for h in handles} == {"closed"} and not any(d.held)
    with pytest.raises(RuntimeError, match="closed"): b.submit("plain", 3)
    # and again with the same decoder
    with Batcher(d, tok) as b:
        with pytest.raises(RuntimeError, match="busy"): Batcher(d, tok)
        assert "".join(b.submit("plain", 5)) == "".join(b.submit("plain", 5))


@pytest.mark.parametrize("how", ["plain", "ahead", "lookup", "draft"])
def test_logits_that_are_no_numbers_end_their_request_alone(how, model, tok):
    "A token whose embedding is nan ends its own request, at any token, greedy or drawn; the others and the row go on"
    lost = copy.deepcopy(model)
    draft = {"lookup": PromptLookup, "draft": lambda: DraftModel(model, 3)}.get(how, lambda: None)
    d, bad = Decoder(lost, max_batch=3, max_ctx=96), tok("z")["input_ids"][0]
    plain = dict(prompt="plain english", max_new_tokens=12, stop_ids=[])
    want = alone(d, tok, **plain)
    lost.model.embed_tokens.weight.data[bad] = torch.nan
    with Batcher(d, tok, draft()) as b:
        b.runs_ahead = how == "ahead"
        for options in (
            {}, dict(temperature=0.9, seed=3),
            dict(
                temperature=0.8, top_p=0.9, top_k=40, seed=1, repetition_penalty=1.2, frequency_penalty=0.3, logprobs=2
            )
        ):
            first, lives = b.submit("plz", 9, **options), b.submit(**plain)
            with pytest.raises(FloatingPointError, match="logits are nan"): "".join(first)
            assert first.finish == "error" and "".join(lives) == want, options
        # spoilt in the middle of a text
        later = b.submit(**plain | dict(max_new_tokens=60))
        next(later)
        lost.lm_head.weight.data[bad] = torch.nan
        with pytest.raises(FloatingPointError, match="logits are nan"): "".join(later)
        lost.lm_head.weight.data[bad] = 0.
        lost.model.embed_tokens.weight.data[bad] = 0.
        assert "".join(b.submit(**plain))
    assert not any(d.held)


@pytest.mark.parametrize("share", [True, False])
def test_what_rows_hold_is_given_up_when_the_model_computes_something_else(model, tok, share):
    "An ablation, weights written to, and what follows it: each text as it is alone"
    from bmlab.infer import ablate
    m, prompt = copy.deepcopy(model), list(range(5, 40))
    d = Decoder(m, 2, 64)
    def alone(): return "".join(p for _, p in stream_text(d, tok, [prompt], Sampler(), 6))
    plain = alone()
    with ablate(m, "layers[1].mlp"): ablated = alone()
    def edit(): m.model.layers[0].self_attn.v_proj.weight.mul_(-2.0)
    with Batcher(d, tok, share=share) as b:
        def ask(): return "".join(b.submit(prompt, max_new_tokens=6))
        assert ask() == plain and ask() == plain and bool(b.stats["reused"]) == share
        with ablate(m, "layers[1].mlp"): assert ask() == ablated
        assert ask() == plain
        b.call(edit)
        edited = ask()
    assert edited == alone() != plain


def test_an_engine_of_its_own_accord_shares_what_it_has_read(model, tok):
    "Hooks that come and go within a step, as fused blocks and others of the process have them, are nobody's change"
    from bmlab.infer.engine import wrap
    other, prompt = torch.nn.Linear(2, 2), list(range(5, 40))
    with wrap(copy.deepcopy(model), tok, device="cpu", max_batch=2, max_ctx=80) as e, e.batcher() as b:
        reused = []
        for _ in range(3):
            h = b.submit(prompt, 5, stop_ids=())
            other.register_forward_hook(lambda *_: None).remove()
            list(h)
            reused.append(h.stats["reused_tokens"])
    assert reused[0] == 0 and min(reused[1:]) >= 34, reused


@pytest.mark.parametrize("what", ["hook", "delta"])
def test_what_comes_and_goes_within_a_row_leaves_nothing(what, model, tok):
    "A hook, or a delta that is off, during a slice of a prompt: nobody begins with what was read under it"
    from bmlab.delta import Lora
    m, prompt = copy.deepcopy(model), list(range(5, 40))
    for p in m.parameters(): torch.nn.init.normal_(p, std=0.4)
    lora = Lora(m, r=4, modules=["v_proj"])
    for p in lora.parameters(): torch.nn.init.normal_(p, std=0.4)
    d, mlp, slices = Decoder(m, 2, 120), m.model.layers[0].mlp, []
    def alone(): return "".join(p for _, p in stream_text(Decoder(m, 1, 120), tok, [prompt], Sampler(), 9))
    plain, real = alone(), d.prefill
    with Batcher(d, tok, slice=8) as b:
        def prefill(*args, **how):
            slices.append(args)
            if len(slices) == 3: hook.append(mlp.register_forward_hook(lambda m, args, y: -3 * y))
            if len(slices) == 4: hook.pop().remove()
            return real(*args, **how)
        def enabled(on): [setattr(s, "enabled", on) for s in lora.sites.values()]
        def toggled(*args, **how):
            slices.append(args)
            if len(slices) in (3, 4): enabled(len(slices) == 4)
            return real(*args, **how)
        hook, d.prefill = [], prefill if what == "hook" else toggled
        busy = b.submit([1, 2, 3], 100, stop_ids=())                            # a step between any two slices
        next(busy)
        assert "".join(b.submit(prompt, 9, stop_ids=())) != plain and len(slices) == 6 and not hook
        assert "".join(b.submit(prompt, 9, stop_ids=())) == plain
        h = b.submit(prompt, 9, stop_ids=())
        assert "".join(h) == plain and h.stats["reused_tokens"] > 0
        busy.cancel()


@pytest.mark.parametrize("what", ["hook", "write"])
def test_who_comes_while_a_prompt_is_read_finds_the_model_as_it_is(what, model, tok):
    "A request behind a change of the model does not begin with what was read before it, though in the same round"
    m, prompt, other = copy.deepcopy(model), list(range(5, 40)), list(range(60, 90))
    def plain():
        with torch.no_grad(): out = m.generate(torch.tensor([prompt]), max_new_tokens=6, do_sample=False)
        return out[0, len(prompt):].tolist()
    with Batcher(Decoder(m, 3, 64), tok) as b:
        "".join(b.submit(prompt, 6, stop_ids=()))
        prefill, late = b.decoder.prefill, []
        def change():
            mlp = m.model.layers[0].mlp
            if what == "hook": mlp.register_forward_hook(lambda module, args, y: -3 * y)
            else:
                with torch.no_grad(): mlp.down_proj.weight.mul_(-3)
            late.append(b.submit(prompt, 6, stop_ids=()))
        def read(*args, **kw):
            logits = prefill(*args, **kw)
            if not late:
                thread = threading.Thread(target=change)
                thread.start()
                thread.join()
            return logits
        b.decoder.prefill = read
        "".join(b.submit(other, 6, stop_ids=()))
        "".join(late[0])
        assert late[0].ids == plain() and late[0].stats["reused_tokens"] == 0


def test_rows_are_kept_when_an_adapter_comes_or_goes(model, tok):
    from bmlab.delta import Lora
    m, prompt = copy.deepcopy(model), list(range(5, 40))
    first, second = (Lora(m, r=2, modules=["q_proj"], name=n).detach() for n in "ab")
    with Batcher(Decoder(m, 2, 64), tok) as b:
        def ask(): return b.submit(prompt, max_new_tokens=4)
        def reused():
            h = ask()
            "".join(h)
            return h.stats["reused_tokens"]
        b.add_adapter("a", first)
        reused()
        assert reused() > 0
        b.add_adapter("b", second)
        assert reused() > 0


def test_what_many_adapters_take_of_the_host(model, tok):
    "Whether the model is another is asked at each request: a bank's users do not make that longer"
    from bmlab.delta.bank import DeltaBank
    from bmlab.delta.lora import Lora
    took = []
    for users in (1, 24):
        m = copy.deepcopy(model)
        bank = DeltaBank(m)
        for i in range(users): bank.add(f"u{i}", Lora(m, r=2))
        with Batcher(Decoder(m, 2, 64), tok, bank=bank) as b:
            def asked():
                begin = time.thread_time()
                for _ in range(20):
                    b._looked = False
                    b._era_now()
                return time.thread_time() - begin
            took.append(min(b.call(asked) for _ in range(5)))
    assert took[1] < 2 * took[0]


def test_adapters_of_different_modules_in_one_batch(model, tok):
    "Modules that only some are in, also of one that comes later: each text is transformers' with the adapter alone"
    from bmlab.delta import DeltaBank, Lora
    torch.manual_seed(1)
    m, prompts = copy.deepcopy(model), [[5, 6, 7], list(range(9, 20)), [8]]
    def say(ids): return m.generate(torch.tensor([ids]), max_new_tokens=6, do_sample=False)[0, len(ids):].tolist()
    users, want = {}, {None: [say(ids) for ids in prompts]}
    for n, modules in zip("abc", (["q_proj", "v_proj"], ["gate_proj"], ["v_proj", "down_proj"])):
        users[n] = Lora(m, r=4, modules=modules, name=n)
        for p in users[n].parameters(): torch.nn.init.normal_(p, std=0.5)
        want[n] = [say(ids) for ids in prompts]
        users[n].detach()
    assert len({str(w) for w in want.values()}) == 4
    last = users.pop("c")
    with Batcher(Decoder(m, 4, 64), tok, bank=DeltaBank(m, users)) as b:
        def texts(whose):
            asks = [(n, i) for i in range(3) for n in whose]
            handles = [b.submit(prompts[i], max_new_tokens=6, stop_ids=(), adapter=n) for n, i in asks]
            return [list(h) and h.ids for h in handles] == [want[n][i] for n, i in asks]
        assert b.mixes and texts([None, "a", "b"])
        b.add_adapter("c", last)
        assert b.mixes and texts(["c", None, "b", "a"])


@pytest.mark.parametrize("kind", ["states", "soft"])
def test_adapters_that_run_one_at_a_time(kind, model, tok):
    "Of a model that keeps states, and soft prompts: each text is transformers' with the adapter alone on the model"
    from bmlab.delta import DeltaBank, Lora, SoftPrompt
    torch.manual_seed(1)
    m = copy.deepcopy(model)
    if kind == "states":
        m = tf.MambaForCausalLM(tf.MambaConfig(
            hidden_size=32, num_hidden_layers=2, vocab_size=len(tok), state_size=8, eos_token_id=None
        )).eval()
    users = {n: Lora(m, r=4, modules=["in_proj" if kind == "states" else "q_proj"], name=n).detach() for n in "ab"}
    if kind == "soft": users["b"] = SoftPrompt(m, 3, name="soft").detach()
    for d in users.values():
        for p in d.parameters(): torch.nn.init.normal_(p, std=0.5)
    prompts = [[5, 6, 7], list(range(9, 20)), [8]]
    def say(ids): return m.generate(torch.tensor([ids]), max_new_tokens=6, do_sample=False)[0, len(ids):].tolist()
    want = {None: [say(ids) for ids in prompts]}
    for n, d in users.items():
        d.attach()
        want[n] = [say(ids) for ids in prompts]
        d.detach()
    assert want["a"] != want["b"] != want[None] != want["a"]
    bank, asks = DeltaBank(m, users), [(n, i) for i in range(3) for n in want]
    with Batcher(Decoder(m, 3, 64), tok, bank=bank) as b:
        assert not b.mixes
        handles = [b.submit(prompts[i], max_new_tokens=6, stop_ids=(), adapter=n) for n, i in asks]
        assert [list(h) and h.ids for h in handles] == [want[n][i] for n, i in asks]
    d = Decoder(m, 3, 64)
    def text(**how): return [list(row) for row in zip(*decode_tokens(d, prompts, max_new_tokens=6, **how))]
    if kind == "states":
        with bank.route(["a", "b", None]), pytest.raises(ValueError, match="one adapter at a time"): text()
    with bank.off(): assert text() == want[None]


def test_as_many_tokens_as_fit_by_default(model, tok):
    with Batcher(Decoder(model, 1, 64), tok) as b: h = b.submit(list(range(5, 20)))
    assert h.left <= 64 - 15

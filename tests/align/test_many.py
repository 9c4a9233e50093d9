"Many users' runs on one backbone: each is the run alone, on every kind of base; PEFT reads what is saved"
import gc
import threading
import warnings
import weakref

import original_trl as trl
import peft
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, MambaConfig, MambaForCausalLM

from bmlab.align.many import ManyRuns, RunError, grpo, sft
from bmlab.delta.adapter import Adapter
from bmlab.delta.delta import deltas
from bmlab.delta.lora import Lora
from bmlab.kernels.layers import pack_linears

TOK = trl.tokenizer()
SMALL = dict(vocab_size=len(TOK), bos_token_id=0, eos_token_id=0, initializer_range=0.1)


def llama():
    size = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
    return LlamaForCausalLM(LlamaConfig(**size, **SMALL))


def gpt2(): return GPT2LMHeadModel(GPT2Config(n_embd=64, n_layer=2, n_head=4, attn_pdrop=0, embd_pdrop=0,
                                              resid_pdrop=0, **SMALL))


def packed():
    pack_linears(model := llama(), bits=4)
    return model


BASES = {"llama": llama, "gpt2": gpt2, "int4": packed}


def base(kind):
    torch.manual_seed(0)
    return BASES[kind]()


def rows(seed, b, L):
    ids = torch.randint(1, len(TOK), (b, L), generator=torch.Generator().manual_seed(seed))
    return dict(input_ids=ids, labels=ids.clone())


DATA = {"ada": [rows(0, 2, 9), rows(1, 1, 5)], "ben": [rows(2, 3, 7)], "cy": [rows(3, 1, 12)]}
RATES = {"ada": 1e-2, "ben": 2e-3, "cy": lambda step: 1e-2 / step}


def trained(kind, users, rows=64):
    many = ManyRuns(base(kind), TOK, rows=rows)
    for u in users: many.add(u, r=4, lr=1e-3)
    log = many.run({u: sft(many[u], DATA[u], steps=4, lr=RATES[u], clip=1.0) for u in users})
    texts = {u: many[u].sample(["3 4", "5"], group=2, max_new_tokens=6, seed=2) for u in users}
    return many, log, {u: c.result() for u, c in texts.items()}


@pytest.mark.parametrize("kind", BASES)
def test_each_is_the_run_alone(kind):
    many, log, texts = trained(kind, DATA)
    assert many.counts["passes"] == 4 and many.counts["samplings"] == 1
    for u in DATA:
        _, own, said = trained(kind, [u], rows=2)               # and not all of its own rows at once
        torch.testing.assert_close(log[log.user == u].loss.tolist(), own.loss.tolist(), rtol=0, atol=1e-5)
        assert texts[u].drawn == said[u].drawn
        torch.testing.assert_close(sum(texts[u].logps, []), sum(said[u].logps, []), rtol=0, atol=1e-4)


def test_peft_reads_a_state(tmp_path):
    many, *_ = trained("llama", ["ada", "ben"])
    many["ada"].save_state(tmp_path / "ada").result()
    theirs = peft.PeftModel.from_pretrained(base("llama"), tmp_path / "ada").eval()
    ids = DATA["ben"][0]["input_ids"]
    with torch.no_grad(), many.bank.route("ada"): ours = many.model.eval()(ids).logits
    with torch.no_grad(): torch.testing.assert_close(theirs(ids).logits, ours)


def test_a_state_that_is_damaged_lets_nobody_in(tmp_path):
    many, *_ = trained("llama", ["ada"])
    many["ada"].save_state(tmp_path).result()
    for name in ("run.json", "optimizer.pt"):
        whole = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(whole[:len(whole) // 2])
        with pytest.raises(RunError, match=name if name == "run.json" else str(tmp_path)): many.add("ben", tmp_path)
        assert list(many) == list(many.bank) == ["ada"]
        (tmp_path / name).write_bytes(whole)
    assert many.add("ben", tmp_path).steps == 4


def test_a_run_goes_on_from_its_state(tmp_path):
    whole, *_ = trained("llama", ["ada", "ben"])
    half = ManyRuns(base("llama"), TOK)
    for u in ("ben", "ada"): half.add(u, r=4, lr=1e-3)          # (at other places in the stacks)
    how = {u: dict(lr=RATES[u], clip=1.0) for u in ("ada", "ben")}
    half.run({u: sft(half[u], DATA[u], steps=3, save_to=tmp_path / u, **how[u]) for u in ("ben", "ada")})
    rest = ManyRuns(base("llama"), TOK)
    for u in ("ada", "ben"): rest.add(u, tmp_path / u, lr=1e-3)
    rest.run({u: sft(rest[u], DATA[u], steps=4, **how[u]) for u in ("ada", "ben")})
    for u in ("ada", "ben"):
        assert rest[u].rows == whole[u].rows
        assert all(map(torch.equal, rest[u].delta.parameters(), whole[u].delta.parameters()))


def test_other_deltas_write_one_after_the_other():
    model = base("llama")
    many = ManyRuns(model, TOK)
    many.add("ada", r=4, lr=1e-2)
    many.add("ben", Adapter(model, bottleneck=4), lr=1e-2)
    many.run({u: sft(many[u], DATA[u], steps=2) for u in many})
    both = [many[u].sample(["3"], max_new_tokens=6) for u in many]
    alone = [many[u].sample(["3"], max_new_tokens=6).result() for u in many]
    assert [c.result().drawn for c in both] == [a.drawn for a in alone]
    assert len({tuple(c.result().logps[0]) for c in both}) == 2


def test_another_thread_samples_while_they_train():
    many, got = ManyRuns(base("llama"), TOK), []
    for u in DATA: many.add(u, r=4, lr=1e-2)

    def ask():
        for n in range(4):
            got.append(many["ada"].sample(["3"], max_new_tokens=4, seed=n).result())
            many.add(f"guest {n}", r=2)                         # users come and go meanwhile
            many.remove(f"guest {n}")
    thread = threading.Thread(target=ask)
    thread.start()
    log = many.run({u: sft(many[u], DATA[u], steps=8) for u in DATA})
    thread.join(60)
    assert len(got) == 4 and len(log) == 24 and not many.failed


def test_what_is_wrong_with_one_stops_nobody_else():
    many = ManyRuns(base("llama"), TOK)
    good, bad = (many.add(u, r=2) for u in ("ada", "ben"))
    ids = torch.full((1, 4), len(TOK))                          # no token
    calls = [good.forward_backward(DATA["ben"][0]), bad.forward_backward(dict(input_ids=ids, labels=ids.clone()))]
    assert calls[0].result().loss > 0 and not any(p.grad is not None for p in bad.delta.parameters())
    with pytest.raises(IndexError): calls[1].result()
    calls = [good.sample(["3"], max_new_tokens=2), bad.sample(["3 " * 3000], max_new_tokens=2)]
    assert len(calls[0].result().drawn[0]) <= 2
    with pytest.raises(ValueError): calls[1].result()
    assert not good.waiting and not bad.waiting and many.counts["alone"] == 4
    with pytest.raises(ValueError, match="is here already"): many.add("ada")
    assert list(many.bank) == ["ada", "ben"] and list(deltas(many.model)) == [many.bank.name]


def test_an_error_that_is_kept_holds_no_pass():
    many, seen = ManyRuns(base("llama"), TOK), []
    runs = [many.add(u, r=2) for u in ("ada", "ben")]

    def breaks(logp, batch):
        seen.append(weakref.ref(logp))
        return logp.sum() / len(batch["no such thing"])
    calls = [r.forward_backward(DATA["ben"][0], breaks) for r in runs]
    for c in calls:
        with pytest.raises(KeyError, match="no such thing"): c.result()
    gc.collect()
    assert len(seen) == 2 and not any(s() is not None for s in seen)


def test_programs_end_by_their_own_end_alone():
    many, last = ManyRuns(base("llama"), TOK), []
    for u in ("ada", "ben", "cy", "dan"): many.add(u, r=2, lr=1e-3)

    def odd(run):
        try: yield None
        except TypeError as e: last.append(e)
        yield run.forward_backward(DATA["ben"][0]), "not a call"
    once = (b for b in DATA["ada"])                             # two batches, and no way to begin again
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        many.run({"ada": sft(many["ada"], [], 2), "ben": sft(many["ben"], once, 4), "cy": odd(many["cy"]),
                  "dan": sft(many["dan"], DATA["cy"], 2)})
    assert "batches is empty" in str(many.failed["ada"]) and "yielded None" in str(last[0])
    assert isinstance(many.failed["cy"], TypeError) and "cannot start again" in str(many.failed["ben"])
    assert many["ben"].steps == 2 and many["dan"].steps == 2 and "dan" not in many.failed


def test_a_rate_that_is_given_counts_more_than_the_saved_one(tmp_path):
    many, *_ = trained("llama", ["ben"])
    many["ben"].save_state(tmp_path / "ben").result()
    rest = ManyRuns(base("llama"), TOK)
    assert rest.add("as saved", tmp_path / "ben").opt.param_groups[0]["lr"] == RATES["ben"]
    assert rest.add("another", tmp_path / "ben", lr=7e-5).opt.param_groups[0]["lr"] == 7e-5
    assert rest.add("new", r=2).opt.param_groups[0]["lr"] == 5e-4


def test_what_cannot_be_done_is_said():
    many = ManyRuns(base("llama"), TOK)
    run = many.add("ada", r=2)
    with pytest.raises(NotImplementedError, match="Grpo alone knows them"):
        next(grpo(run, ["3"], lambda prompt, text: 1.0, 1, kl=0.1, reference=run.delta))
    with pytest.raises(TypeError, match="r: of a Lora that is made"): many.add("ben", Lora(llama(), r=2), r=4)
    call = run.optim_step()
    many.remove("ada")
    with pytest.raises(LookupError, match="'ada' has left"): run.optim_step()
    with pytest.raises(LookupError, match="'ada' has left"): call.result()
    mamba = ManyRuns(MambaForCausalLM(MambaConfig(hidden_size=32, num_hidden_layers=1, **SMALL)), TOK)
    states = mamba.add("ada", r=2, modules=["in_proj"])
    with pytest.raises(ValueError, match="keeps states"): states.sample(["3"]).result()

"lm-evaluation-harness on our models says what it says on transformers' own, and its tasks run"
import pytest

pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install lm-eval")
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from bmlab.infer.engine import wrap
from bmlab.infer.harness import as_lm, harness, task
from bmlab.models.load import load

CITIES = dict(France="Paris", Germany="Berlin", Italy="Rome", Spain="Madrid", Austria="Vienna", Greece="Athens")


def ask(kind, *args): return Instance(request_type=kind, doc={}, arguments=args, idx=0)


def answers(lm):
    pairs = [("The sky is", " blue"), ("The sky is", " green"), ("", "Hello there"), ("One, two,", " three, four")]
    text = "\n".join(f"{n} times {n} is {n * n}." for n in range(12))                 # longer than a window
    stop = {"until": ["\n"], "max_gen_toks": 12, "do_sample": False}
    return (lm.loglikelihood([ask("loglikelihood", *p) for p in pairs], disable_tqdm=True),
            lm.loglikelihood_rolling([ask("loglikelihood_rolling", text)], disable_tqdm=True),
            lm.generate_until([ask("generate_until", t, stop) for t in ("1 + 1 =", "My name is")], disable_tqdm=True))


@pytest.mark.parametrize("engine", [False, True], ids=["model", "engine"])
def test_as_their_own_class(engine):
    model, tok = load("smollm2-135m")
    theirs = answers(HFLM(model, tokenizer=tok, max_length=64, batch_size=2))
    lm = as_lm(wrap(model, tok, max_ctx=64, max_batch=2)) if engine else as_lm(model, tok, batch=2)
    lm.room = 64
    ours = answers(lm)
    for a, b in zip(ours[0], theirs[0]): assert abs(a[0] - b[0]) < 1e-3 and a[1] == b[1]
    assert abs(ours[1][0] - theirs[1][0]) < 1e-2 and ours[2] == theirs[2]
    if engine: lm.model.close()


def test_tasks_of_rows():
    names = list(CITIES.values())
    rows = [{"land": l, "city": c, "among": [c, names[n - 1], names[n - 2]]} for n, (l, c) in enumerate(CITIES.items())]
    text, number = "The capital of {{land}} is", [{"n": n, "word": w} for n, w in zip("35", ("three", "five"))]
    tasks = [task("among", rows, text, "0", choices="{{among}}"), task("likely", rows, text, "{{city}}"),
             task("written", number, "1 is one.\n2 is two.\n4 is four.\n{{n}} is", "{{word}}", until=".")]
    with wrap("smollm2-135m", max_ctx=128, max_batch=2) as e:
        found = harness(e, tasks, limit=5).set_index(["task", "metric"])
        assert found.value["among", "acc"] == 1 and found.value["likely", "acc"] >= 0.6
        assert found.value["likely", "perplexity"] < 10 and 0 <= found.value["written", "exact_match"] <= 1
        assert found.loc["among"].rows.tolist() == [5, 5] and found.loc["written"].rows.tolist() == [2]
        with pytest.raises(ValueError, match="'hellaswag'"): harness(e, "helaswag")
    lm = as_lm(*load("smollm2-135m"))
    with pytest.raises(ValueError, match="num_beams: not known here"): lm._asked("", {"num_beams": 4})
    assert lm._asked("a", {"do_sample": True})[2]["temperature"] == 1.0
    assert "temperature" not in lm._asked("a", {"do_sample": False, "temperature": 0.7})[2]

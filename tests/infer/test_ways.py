"""Every family that transformers builds small says inside an engine what transformers' `generate` says, and decodes in
the way that `text_matrix` lists for it"""
import json
from pathlib import Path

import pytest
import torch

from bmlab.infer.batcher import Batcher
from bmlab.infer.beams import beam_search
from bmlab.infer.engine import wrap
from bmlab.infer.text import decode_tokens
from every_family import FAMILIES, make
from fresh import fresh_python
from text_matrix import LEVELS, MOST_USED, ORDER, engine, measure, prompts, said, spoken

pytestmark = pytest.mark.filterwarnings("ignore")
HELPERS = str(Path(__file__).parent.parent / "helpers")
PROGRAM = f"""
import json, logging, sys, warnings
sys.path.insert(0, {HELPERS!r})
warnings.simplefilter("ignore")
logging.disable(logging.WARNING)
from text_matrix import measure
print(json.dumps({{str(k): v for k, v in measure(sys.argv[1]).items()}}))
"""


def check(name, found, parts):
    assert "skipped" not in found, found
    wrong = {p: found[p] for p in parts if found[p] is not True}
    assert not wrong, (name, wrong)
    assert ORDER.index(found["level"]) >= ORDER.index(LEVELS[name]), (name, found["level"], found["why"])


@pytest.mark.parametrize("name", MOST_USED)
def test_the_most_used(name): check(name, measure(name, also=()), ["text"])


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(LEVELS))
def test_every_family(name):
    done = fresh_python(PROGRAM, name, check=True)
    check(name, json.loads(done.stdout.splitlines()[-1]), ["text", "limit", "8", "4"])


def test_levels_name_families_and_count_them():
    assert set(LEVELS) <= set(FAMILIES) and set(MOST_USED) <= set(LEVELS)
    of = {level: sum(x == level for x in LEVELS.values()) for level in ORDER}
    assert of["blocks"] >= 82 and of["generate"] <= 40, of


STATES = ["qwen3_next", "mamba", "recurrent_gemma"]


@pytest.mark.parametrize("name", STATES)
def test_rows_with_states_come_and_go(name):
    "A text's tokens do not depend on who was in its row before, who is beside it, or in how many pieces it was read"
    model = make(name)
    rows = prompts(model)
    want, _ = spoken(model, rows)
    with engine(model) as e:
        d = e.decoder
        assert said(e, rows) == want
        assert said(e, rows[::-1]) == want[::-1]
        logits = d.prefill([rows[0]])
        d.prefill([rows[1]], rows=[2])                                    # row 0 waits meanwhile
        d.step([want[0][0], 0, want[1][0]])                               # and row 1 is empty
        d.free([1])
        whole = d.prefill([rows[2]], rows=[1])
        d.free()
        for n in (7, 2):
            d.prefill([rows[0][:n]])
            torch.testing.assert_close(d.prefill([rows[0][n:]], rows=[0]), logits, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(d.prefill([rows[2]], chunk=5), whole, rtol=1e-4, atol=1e-4)


class _Letters:
    "A tokenizer of letters"
    eos_token_id = None
    def decode(self, ids, **_): return "".join(chr(60 + i) for i in ids)


def test_states_with_beams_and_many_users():
    model = make("qwen3_next")
    model.generation_config.eos_token_id = None
    rows = prompts(model)
    want, _ = spoken(model, rows)
    ids, asked = torch.tensor([rows[0]]), [12, 5, 9, 12, 12, 3]
    theirs = model.generate(
        ids, num_beams=3, max_new_tokens=6, min_new_tokens=6, do_sample=False, pad_token_id=0,
        attention_mask=torch.ones_like(ids)
    )
    with engine(model) as e:
        found = beam_search(e.decoder, [rows[0]], 3, 1.0, 6, ())[0][0].ids
        assert found == theirs[0, len(rows[0]):].tolist()
        with Batcher(e.decoder, _Letters()) as b:
            handles = [b.submit(r, max_new_tokens=n) for r, n in zip(rows * 2, asked)]
            for h in handles: list(h)
        assert [list(map(int, h.ids)) for h in handles] == [w[:n] for w, n in zip(want * 2, asked)]


def test_states_are_not_taken_back():
    model = make("qwen3_next")
    with pytest.raises(ValueError, match="keeps states, from which guesses that were wrong"):
        wrap(model, draft="lookup", device="cpu", max_ctx=32)
    with wrap(model, device="cpu", max_ctx=32) as e:
        d = e.decoder
        assert not d.can_rewind and not d.has_prefixes
        d.prefill([[5, 6, 7]])
        d.step([[8, 9]], keep=False)
        with pytest.raises(ValueError, match="states of a text's earlier tokens are gone"): d.keep([1])
        with pytest.raises(ValueError, match="no trees"):
            d.step([[8, 9]], mask=torch.ones(1, 2, 2).tril().bool(), positions=torch.tensor([[0, 1]]), keep=False)
        with pytest.raises(ValueError, match="draft"): decode_tokens(d, [[5, 6]], max_new_tokens=4, draft=object())


def test_a_prompt_that_fails_leaves_no_half_of_it():
    model = make("qwen3_next")
    rows = prompts(model)
    want, _ = spoken(model, rows)
    with engine(model) as e:
        layer = model.model.layers[1].mlp
        layer.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(RuntimeError("out")))
        with pytest.raises(RuntimeError, match="out"): e.decoder.prefill(rows)
        layer._forward_pre_hooks.clear()
        assert e.decoder.held == [0, 0, 0] and not any(t.any() for t in e.decoder.cache.all_states())
        assert said(e, rows) == want


def test_what_a_fallback_cannot_keep_is_refused_and_the_plan_says_why():
    model = make("xlstm")
    with pytest.raises(ValueError, match="kv_bits=8: xLSTMForCausalLM is left to transformers' generate"):
        wrap(model, kv_bits=8, device="cpu", max_ctx=32)
    with pytest.raises(ValueError, match="draft"): wrap(model, draft="lookup", device="cpu", max_ctx=32)
    with pytest.raises(ValueError, match="kv_bits=8: MambaForCausalLM keeps states and no keys"):
        wrap(make("mamba"), kv_bits=8, device="cpu", max_ctx=32)
    with wrap(model, device="cpu", max_ctx=32) as e:
        assert "decoded by transformers' generate, text after text: " in e.plan.sentence()
        assert "decoded by transformers' generate" in e.report().index.name
    with wrap(make("internlm3"), device="cpu", max_ctx=32) as e:
        assert "generate" not in e.plan.sentence() and not e.report().index.name


def test_layers_stay_float_where_the_model_uses_their_weight_or_they_are_excluded():
    with wrap(make("mamba"), bits=8, group_size=32, device="cpu", max_ctx=32) as e:
        mixer = e.model.backbone.layers[0].mixer
        assert type(mixer.dt_proj) is torch.nn.Linear and type(mixer.x_proj).__name__ == "Int8Linear"
        assert "lm_head stays float: its model casts" in e.plan.sentence() and "lm_head" in e.report().index.name
    with wrap(make("internlm3"), bits=4, exclude="*.o_proj", group_size=32, device="cpu", max_ctx=32) as e:
        attention = e.model.model.layers[0].self_attn
        assert type(attention.o_proj) is torch.nn.Linear and type(attention.q_proj).__name__ == "Int4Linear"
        assert "stay float: exclude=" in e.plan.sentence()
    with pytest.raises(ValueError, match="bits=None packs none"):
        wrap(make("internlm3"), exclude="*.o_proj", device="cpu", max_ctx=32)


def test_a_window_of_the_models_own_is_tried_beyond():
    "GPT-Neo counts its window back from the last slot, which is another row's where rows are of unequal lengths"
    model = make("gpt_neo")
    rows = prompts(model)
    with engine(model) as e: assert said(e, rows) == spoken(model, rows)[0]


ON_GPU = ["internlm3", "phi3", "cohere", "glm", "gpt-sw3", "gpt_neo", "gpt_oss", "mixtral", "qwen3_next", "falcon_h1",
          "mamba", "mamba2", "lfm2", "recurrent_gemma", "ministral3"]


@pytest.mark.cuda
@pytest.mark.parametrize("name", ON_GPU)
def test_on_a_gpu(name):
    "The same text in CUDA graphs; a graph's trial runs leave the states as they were"
    if name not in FAMILIES: pytest.skip(f"this transformers has no {name}")
    found = measure(name, also=(), device="cuda")
    print(found)
    assert found["text"] is True, found

"""What a grammar forbids is never said: schemas of the JSON-Schema project, every way of decoding, finished texts of a
model at temperature 1, grammars that are too much"""
import contextlib
import json
import sys
from pathlib import Path

import pytest
import torch
import transformers as tf

pytest.importorskip("llguidance", reason="llguidance is not installed: pip install '.[grammar]'")
from bmlab.infer.batcher import Batcher
from bmlab.infer.decode import Decoder
from bmlab.infer.engine import wrap
from bmlab.infer.grammar import Grammar
from bmlab.infer.sampling import Sampler
from bmlab.infer.speculate import DraftModel, PromptLookup, Tree
from bmlab.infer.text import stream_text
from toys import make_tok

SUITE = Path(__file__).parents[1] / "fixtures/json_schema_suite.json"


@pytest.fixture(scope="module")
def tok():
    t = make_tok(["<end>"])
    t.eos_token = "<end>"
    return t


def tiny(tok, seed=0, kind="llama"):
    torch.manual_seed(seed)
    size = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, vocab_size=len(tok) + 5)
    if kind == "llama": m = tf.LlamaForCausalLM(tf.LlamaConfig(**size, intermediate_size=64, num_key_value_heads=2))
    elif kind == "t5":
        m = tf.T5ForConditionalGeneration(
            tf.T5Config(d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, vocab_size=len(tok) + 5,
                        decoder_start_token_id=0, eos_token_id=tok.eos_token_id)
        )
    else:
        m = tf.CpmAntForCausalLM(
            tf.CpmAntConfig(vocab_size=len(tok) + 5, hidden_size=32, num_attention_heads=4, dim_head=8, dim_ff=64,
                            num_hidden_layers=2, prompt_length=4)
        )
    m.generation_config.eos_token_id = None
    return m.eval()


CITY = Grammar.schema({
    "type": "object", "additionalProperties": False, "required": ["city", "rain"],
    "properties": {"city": {"type": "string", "minLength": 1, "maxLength": 8}, "rain": {"enum": ["yes", "no"]}},
})
WORD = Grammar.regex("[a-z]{3,12}")
SUM = Grammar.lark('start: n (op n){0,3}\nn: /[0-9]{1,3}/\nop: "+" | "-" | "*"')


def test_schemas_of_the_suite(tok):
    "What a schema forbids is no way through its grammar; what it allows is one, but for spellings that are not written"
    suite = json.loads(SUITE.read_text(encoding="utf-8"))
    assert "MIT" in suite["licence"] and len(suite["cases"]) > 140
    for case in suite["cases"]:
        grammar = Grammar.schema(case["schema"])
        for t in case["tests"]:
            m, ids = grammar.start(tok, len(tok), (tok.eos_token_id,)), tok(json.dumps(t["data"]))["input_ids"]
            if "\\u" in json.dumps(t["data"]): ids = tok(json.dumps(t["data"], ensure_ascii=False))["input_ids"]
            whole = m.take(ids) == len(ids) and m.error is None and m.machine.is_accepting()
            assert whole == (t["valid"] and "narrower" not in t), (case["case"], t)
    for case in suite["refused"]:
        with pytest.raises(ValueError, match="schema: "): Grammar.schema(case["schema"]).start(tok, len(tok), (1,))


@pytest.mark.parametrize("kind", ["llama", "t5", "ant"])
def test_one_text_in_every_way_of_decoding(tok, kind):
    "Alone, in a batch, with guesses, among rows that come and go and have no grammar: the same text, and a valid one"
    model = tiny(tok, kind=kind)
    d = Decoder(model, 3, 96)
    asks = [dict(temperature=t, seed=s, grammar=g) for s, (t, g) in enumerate(
        [(1.0, CITY), (0.0, WORD), (1.3, SUM), (1.0, None), (0.7, CITY), (1.0, SUM), (1.0, WORD)]
    )]
    def alone(prompt, draft=None, grammar=None, decoder=d, **options):
        row = stream_text(decoder, tok, [prompt], Sampler(**options), 40, draft=draft, grammar=grammar)
        return "".join(p for _, p in row)
    prompts = [f"the {i}th plain text, plain text" for i in range(len(asks))]
    want = [alone(p, **a) for p, a in zip(prompts, asks)]
    for text, a in zip(want, asks):
        if a["grammar"] is CITY and text.endswith("}"): assert set(json.loads(text)) == {"city", "rain"}
        if a["grammar"] is WORD: assert text.isalpha() and 3 <= len(text) <= 12
        if a["grammar"] is SUM: assert set(text) <= set("0123456789+-*")
    with Batcher(d, tok) as b:
        with b.wake: handles = [b.submit(p, 40, **a) for p, a in zip(prompts, asks)]
        assert ["".join(h) for h in handles] == want
    if d.mode == "static":
        drafts = [PromptLookup(branches=2)]
        if kind == "llama":
            drafts += [DraftModel(tiny(tok, 1), length=3), Tree(PromptLookup(), DraftModel(model, branches=2), nodes=8)]
        for draft in drafts:
            assert [alone(p, draft, **a) for p, a in zip(prompts[:3], asks)] == want[:3]
            with Batcher(d, tok, draft) as b:
                assert ["".join(h) for h in [b.submit(p, 40, **a) for p, a in zip(prompts, asks)]] == want
        rows = {0: "", 1: "", 2: ""}
        sampler = Sampler(temperature=[a["temperature"] for a in asks[:3]], seed=[a["seed"] for a in asks[:3]])
        for r, piece in stream_text(d, tok, prompts[:3], sampler, 40, grammar=[a["grammar"] for a in asks[:3]]):
            rows[r] += piece
        assert list(rows.values()) == want[:3]


def test_a_grammar_that_comes_while_another_prompt_is_read(tok):
    "No step without its grammar follows its first token"
    d, late = Decoder(tiny(tok), 3, 96), []
    ask = dict(grammar=CITY, temperature=1.0, seed=3)
    with Batcher(d, tok) as b: want = "".join(b.submit("a city", 60, **ask))
    with Batcher(d, tok) as b:
        read = b._read_parts
        def reads(parts):
            if b.stats["steps"] and not late: late.append(b.submit("a city", 60, **ask))
            read(parts)
        b._read_parts = reads
        steady = b.submit("a text that runs", 60, stop_ids=())
        next(steady)
        other = b.submit("the plain text that is read meanwhile", 20, stop_ids=())
        list(other), list(steady)
        assert ["".join(h) for h in late] == [want]


def test_forced_tokens_cost_no_pass(tok):
    d, stats = Decoder(tiny(tok), 1, 96), {}
    fixed = Grammar.lark('start: "a text that is given to the letter" ("!" | "?")')
    text = "".join(p for _, p in stream_text(d, tok, ["plain"], None, 64, stats=stats, grammar=fixed))
    assert text[:-1] == "a text that is given to the letter" and text[-1] in "!?"
    # the prompt's pass, then at most fifteen forced tokens in each
    assert stats["new_tokens"] > 20 and stats["passes"] <= 2 + stats["new_tokens"] // 15


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_captured_graphs_are_held_to_a_grammar(tok):
    "Alone, among rows without one, and with guesses: texts are valid, and forced tokens cost no pass"
    d, stats = Decoder(tiny(tok).cuda(), 3, 96), {}
    fixed = Grammar.lark('start: "a text that is given to the letter" ("!" | "?")')
    for _ in stream_text(d, tok, ["plain"], None, 64, stats=stats, grammar=fixed): pass
    assert stats["new_tokens"] > 20 and stats["passes"] <= 2 + stats["new_tokens"] // 15
    for draft in (None, PromptLookup(branches=2)):
        with Batcher(d, tok, draft) as b:
            asks = [CITY, WORD, None, SUM, WORD, CITY]
            handles = [b.submit("plain text", 60, temperature=1.0, seed=i, grammar=g) for i, g in enumerate(asks)]
            for grammar, text in zip(asks, map("".join, handles)):
                if grammar is CITY and text.endswith("}"): assert set(json.loads(text)) == {"city", "rain"}
                if grammar is WORD: assert text.isalpha() and 3 <= len(text) <= 12
                if grammar is SUM: assert text and set(text) <= set("0123456789+-*")


def test_what_is_drawn_knows_how_likely_it_was(tok):
    "Log-probabilities are the model's, not those of the few that were allowed"
    d, stats = Decoder(tiny(tok), 1, 96), {}
    sampler = Sampler(temperature=1.0, seed=1, logprobs=2, repetition_penalty=1.2, top_k=3, presence_penalty=0.5)
    list(stream_text(d, tok, ["plain"], sampler, 40, stats=stats, grammar=CITY))
    assert len(stats["tokens"][0]) > 10 and all(t.logprob < -1 for t in stats["tokens"][0])


def test_a_grammar_that_is_too_much_ends_its_own_text_alone(tok):
    "Refused at once, or ended as an error; the text beside it goes on"
    d = Decoder(tiny(tok), 2, 96)
    # (each place has tens of thousands of ways to go on)
    wide = Grammar.lark("start: (" + " | ".join(f"r{i} r{i}" for i in range(30)) + ")+\n" + "\n".join(
        f"r{i}: (r{(i + 1) % 30} | r{(i + 7) % 30} | \"a\")+" for i in range(30)
    ))
    with Batcher(d, tok) as b:
        with b.wake: steady, other = b.submit("plain", 60, grammar=SUM, seed=1, temperature=1.0), b.submit("plain", 60)
        with contextlib.suppress(ValueError): list(b.submit("plain", 60, grammar=wide, temperature=1.0, seed=1))
        for bad in ("(", "(a{1000}){1000}{1000}"):
            with pytest.raises(ValueError): list(b.submit("plain", 60, grammar=Grammar.regex(bad)))
        assert "".join(other) and "".join(steady) and {steady.finish, other.finish} <= {"stop", "length"}
        assert "".join(b.submit("plain", 30, grammar=WORD)).isalpha()


def test_without_llguidance_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ImportError, match=r"pip install '\.\[grammar\]' in bmlab's repository"): Grammar.json()


SCHEMAS = [
    {"type": "object", "additionalProperties": False, "required": ["ok"], "properties": {"ok": {"type": "boolean"}}},
    {"type": "array", "items": {"type": "integer", "minimum": -9, "maximum": 99}, "minItems": 1, "maxItems": 4},
    {"enum": ["red", "green", 3, None, {"a": [1, 2]}]},
    {
        "type": "object", "additionalProperties": False, "required": ["name", "age"],
        "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "maximum": 130}},
    },
    {
        "type": "object", "additionalProperties": False, "required": ["city"],
        "properties": {
            "city": {"pattern": "^[A-Z][a-z]{2,8}$", "type": "string"}, "wet": {"type": ["null", "boolean"]},
        },
    },
    {"anyOf": [{"type": "number", "exclusiveMinimum": 0, "maximum": 10}, {"type": "string", "maxLength": 5}]},
    {
        "$defs": {"leaf": {"type": "object", "additionalProperties": False, "required": ["v"],
                           "properties": {"v": {"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 50}}}},
        "type": "array", "prefixItems": [{"$ref": "#/$defs/leaf"}, {"$ref": "#/$defs/leaf"}], "items": False,
    },
    {"type": "string", "format": "date"},
]


def finished(n):
    "So many finished texts of SmolLM2 at temperature 1, each (schema, text)"
    e, seed, done = wrap("smollm2-135m", device="cpu", max_batch=8, max_ctx=160), 0, []
    ask = [{"role": "user", "content": "Answer in JSON, briefly: what do you know about Paris?"}]
    with e, e.batcher() as b:
        while len(done) < n:
            asked = [SCHEMAS[(seed + i) % len(SCHEMAS)] for i in range(min(n - len(done), 64))]
            own = lambda i, s: dict(temperature=1.0, seed=seed + i, grammar=Grammar.schema(s))
            handles = [b.submit(ask, 96, **own(i, s)) for i, s in enumerate(asked)]
            texts = ["".join(h) for h in handles]
            done += [(s, t) for s, t, h in zip(asked, texts, handles) if h.finish == "stop"]
            seed += len(asked)
    return done


def check(done):
    jsonschema = pytest.importorskip("jsonschema")
    for schema, text in done: jsonschema.validate(json.loads(text), schema, jsonschema.Draft202012Validator)


def test_thirty_finished_texts_are_valid(): check(finished(30))


@pytest.mark.slow
def test_five_hundred_finished_texts_are_valid(): check(finished(500))

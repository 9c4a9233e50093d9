"""The HTTP server: OpenAI's own client, a hundred at once, clients that hang up, bodies that are too long, and
who may ask"""
import concurrent.futures as cf
import contextlib
import gc
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

import pytest
import torch
import transformers as tf
from tokenizers import Tokenizer, decoders, models

from bmlab.infer.batcher import Batcher
from bmlab.infer.decode import Decoder
from bmlab.models.stream import prompt_ids
from bmlab.infer.text import decode_tokens, stream_text
from bmlab.infer.sampling import Sampler
from conftest import free_port, until

openai = pytest.importorskip("openai", reason="openai is not installed")
pytest.importorskip("fastapi", reason="fastapi is not installed: pip install '.[serve]'")
from bmlab.app.serve import _spelled, serve  # noqa: E402
from toys import make_tok  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]


class Tiny:
    "What the server asks of an engine"
    def __init__(self, model, tok, rows=8, max_ctx=128):
        self.model, self.tok, self.max_ctx, self.decoder, self.steps = (
            model,
            tok,
            max_ctx,
            Decoder(model, rows, max_ctx),
            0,
        )
    @contextlib.contextmanager
    def batcher(self):
        with Batcher(self.decoder, self.tok) as b:
            self.b = b
            yield b


@pytest.fixture(scope="module")
def engine():
    torch.manual_seed(0)
    tok = make_tok()
    m = tf.LlamaForCausalLM(
        tf.LlamaConfig(
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=len(tok),
        )
    ).eval()
    m.generation_config.eos_token_id = None
    return Tiny(m, tok)


@pytest.fixture(scope="module")
def server(engine):
    with serve(engine, port=0, background=True, name="tiny", max_body="64KiB") as s: yield s


def make_client(server, **options):
    return openai.OpenAI(
        base_url=f"{server.url}/v1",
        api_key=server.token or "none",
        max_retries=0,
        timeout=60,
        http_client=openai.DefaultHttpxClient(trust_env=False),
        **options,
    )


@pytest.fixture(scope="module")
def client(server):
    with make_client(server) as c: yield c


def raw(server, method, path, body=None, headers=None):
    "(status, object or text) of one request by hand"
    c = http.client.HTTPConnection(server.url[7:], timeout=30)
    try:
        c.request(method, path, body, {"Content-Type": "application/json", **(headers or {})})
        answer = c.getresponse()
        text = answer.read().decode()
        return answer.status, json.loads(text) if "json" in answer.getheader("Content-Type", "") else text
    finally: c.close()


def post(server, path, headers=None, **body): return raw(server, "POST", path, json.dumps(body), headers)


def alone(e, prompt, n, **options):
    return "".join(
        p for _, p in stream_text(Decoder(e.model, 1, e.max_ctx), e.tok, [prompt], Sampler(**options), n, (), ())
    )


USER = [{"role": "user", "content": "hello"}]


def test_chat_whole_and_streamed_are_what_the_model_says(client, engine):
    want = alone(engine, USER, 12)
    whole = client.chat.completions.create(model="tiny", messages=USER, max_tokens=12, temperature=0)
    assert (
        whole.choices[0].message.content == want
        and whole.choices[0].message.role == "assistant"
        and whole.object == "chat.completion"
    )
    assert (whole.choices[0].finish_reason, whole.usage.completion_tokens, whole.usage.total_tokens) == (
        "length",
        12,
        12 + whole.usage.prompt_tokens,
    )
    chunks = list(
        client.chat.completions.create(
            model="tiny",
            messages=USER,
            max_completion_tokens=12,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert (
        "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == want
        and len({c.id for c in chunks}) == 1
    )
    assert (
        chunks[0].choices[0].delta.role == "assistant"
        and chunks[-2].choices[0].finish_reason == "length"
        and chunks[-1].usage == whole.usage
    )
    # the client's own accumulator
    with client.chat.completions.stream(model="tiny", messages=USER, max_tokens=12, temperature=0) as s:
        assert [e for e in s][-1] and s.current_completion_snapshot.choices[0].message.content == want


def test_completions_texts_ids_and_several(client, engine):
    ids = engine.tok("plain")["input_ids"]
    want = alone(engine, "plain", 5)
    got = client.completions.create(model="tiny", prompt=["plain", "english"], n=2, max_tokens=5, temperature=0)
    assert [c.text for c in got.choices] == [want] * 2 + [alone(engine, "english", 5)] * 2 and [
        c.index for c in got.choices
    ] == [0, 1, 2, 3]
    assert client.completions.create(model="tiny", prompt=ids, max_tokens=5, temperature=0).choices[0].text == want
    # 16 each, as there
    assert client.completions.create(model="tiny", prompt=[ids, ids], temperature=0).usage.completion_tokens == 32
    texts = ["", "", ""]
    for c in client.completions.create(
        model="tiny", prompt="plain", n=3, seed=3, max_tokens=9, stream=True,
        extra_body={"top_k": 40, "min_p": 0.01, "repetition_penalty": 1.1},
    ):
        texts[c.choices[0].index] += c.choices[0].text
    assert (
        texts
        == [
            alone(engine, "plain", 9, temperature=1.0, seed=3 + i, top_k=40, min_p=0.01, repetition_penalty=1.1)
            for i in range(3)
        ]
        and len(set(texts)) == 3
    )


def test_a_prompt_counts_once_however_many_texts_it_has(client, engine):
    prompts = ["plain english words", "other"]
    tokens = sum(len(engine.tok(p)["input_ids"]) for p in prompts)
    ask = dict(model="tiny", prompt=prompts, n=3, max_tokens=5)
    whole = client.completions.create(**ask).usage
    assert (whole.prompt_tokens, whole.completion_tokens, whole.total_tokens) == (tokens, 30, tokens + 30)
    *_, last = client.completions.create(**ask, stream=True, stream_options={"include_usage": True})
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (tokens, 30)
    # (it has been read before: all but its last token, which is read for what comes next)
    assert last.usage.prompt_tokens_details.cached_tokens <= tokens - len(prompts)


def given(engine, prompt, text, n):
    "The model's own log-probabilities of a greedy text, and the likeliest token at each place"
    ids, d = prompt_ids(engine.tok, prompt)["input_ids"][0].tolist(), Decoder(engine.model, 1, engine.max_ctx)
    out = [t for t, in decode_tokens(d, [ids], None, n)]
    with torch.no_grad(): raw = engine.model(torch.tensor([ids + out])).logits[0, len(ids) - 1:-1].log_softmax(-1)
    return raw[torch.arange(n), out].tolist(), [engine.tok.decode([i]) for i in raw.argmax(-1).tolist()]


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs(client, engine, stream):
    """Each token's, and the likeliest ones', in both forms, whole and in chunks; a stop string cuts them too;
    without the fields there are none"""
    close = lambda got, want: len(got) == len(want) and max(abs(a - b) for a, b in zip(got, want)) < 1e-3
    want, best = given(engine, USER, None, 12)
    ask = dict(model="tiny", messages=USER, max_tokens=12, temperature=0, logprobs=True, top_logprobs=3)
    got = (
        [c.choices[0] for c in client.chat.completions.create(**ask, stream=True) if c.choices]
        if stream
        else [client.chat.completions.create(**ask).choices[0]]
    )
    content = [t for c in got if c.logprobs for t in c.logprobs.content]
    text = "".join((c.delta.content or "") if stream else c.message.content for c in got)
    assert (
        close([t.logprob for t in content], want)
        and all(len(t.top_logprobs) == 3 for t in content)
        and [t.top_logprobs[0].token for t in content] == best
    )
    assert bytes(b for t in content for b in t.bytes).decode("utf-8", "replace") == text
    want, _ = given(engine, "plain", None, 9)
    ask = dict(model="tiny", prompt="plain", max_tokens=9, temperature=0, logprobs=2)
    got = (
        [c.choices[0] for c in client.completions.create(**ask, stream=True)]
        if stream
        else client.completions.create(**ask).choices
    )
    told = [c.logprobs for c in got if c.logprobs]
    assert (
        close([p for x in told for p in x.token_logprobs], want)
        and all(len(o) in (1, 2, 3) for x in told for o in x.top_logprobs)
        and told[0].text_offset[0] == 0
    )
    whole = "".join(c.text for c in got)
    end = whole[3:5]
    cut = client.completions.create(**ask, stop=end, stream=stream)
    cut = [c.choices[0] for c in cut] if stream else cut.choices
    pieces = [t for c in cut if c.logprobs for t in c.logprobs.tokens]
    assert (
        "".join(c.text for c in cut) == whole[: whole.index(end)]
        and 0 < len(pieces) < 9
        and "".join(pieces).startswith(whole[: whole.index(end)])
    )
    plain = client.chat.completions.create(model="tiny", messages=USER, max_tokens=3, logprobs=False, stream=stream)
    assert not any(c.logprobs for x in (plain if stream else [plain]) for c in x.choices)


PIECES = "▁Paris ▁is . ! X ▁ ▁▁ a b ▁a".split()


@pytest.fixture(scope="module")
def scripted():
    """ask(tokens, …) → choices, whole or in chunks, of a model that says these tokens, each with two rivals. Its
    tokenizer is one of SentencePiece's kind, whose decoder takes a text's first space off"""
    vocab = {w: i for i, w in enumerate(["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *PIECES])}
    t = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    space = decoders.Replace("▁", " ")
    t.decoder = decoders.Sequence([space, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    tok = tf.PreTrainedTokenizerFast(tokenizer_object=t, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
    torch.manual_seed(0)
    shape = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, eos_token_id=2)
    m = tf.LlamaForCausalLM(tf.LlamaConfig(vocab_size=len(vocab), **shape)).eval()
    with torch.no_grad():
        for layer in m.model.layers: layer.self_attn.o_proj.weight.zero_(), layer.mlp.down_proj.weight.zero_()
    with serve(Tiny(m, tok), port=0, background=True, name="scripted") as s, make_client(s) as client:
        def ask(tokens, rivals=(), stream=False, **options):
            chain = [vocab[w] for w in ["b", *tokens]]
            with torch.no_grad():
                m.model.embed_tokens.weight.zero_(), m.lm_head.weight.zero_()
                for i, (now, then) in enumerate(zip(chain, chain[1:])):
                    m.model.embed_tokens.weight[now, i] = m.lm_head.weight[then, i] = 5.0
                    for k, r in enumerate(rivals): m.lm_head.weight[vocab[r], i] = 4.0 - k
            ask = dict(model="scripted", prompt=chain[:1], max_tokens=len(tokens), temperature=0)
            got = client.completions.create(**ask, **{"logprobs": 2, **options}, stream=stream)
            return [c.choices[0] for c in got] if stream else got.choices[0]
        yield ask


@pytest.mark.parametrize("tokens, stop, text, told, offsets", [
    ("▁Paris . !", None, "Paris.!", ["Paris", ".", "!"], [0, 5, 6]),
    ("▁Paris ▁is X", "X", "Paris is", ["Paris", " is"], [0, 5]),
    ("▁Paris . X", "X", "Paris.", ["Paris", "."], [0, 5]),
    ("a . X", "X", "a.", ["a", "."], [0, 1]),
    ("▁ a ▁▁ ! X", "X", "a  !", ["", "a", "  ", "!"], [0, 0, 1, 3]),
    ("▁Paris <0xF0> <0x9F> <0x98> <0x80> ! X", "X", "Paris😀!",
     ["Paris", r"bytes:\xf0", r"bytes:\x9f", r"bytes:\x98", r"bytes:\x80", "!"], [0, 5, 5, 5, 5, 6]),
    ("X a b", "X", "", [], []),
], ids=lambda x: x if isinstance(x, str) else "")
def test_tokens_stand_where_the_text_has_them(scripted, tokens, stop, text, told, offsets):
    "The first one without the space that is not in the text, the bytes of a character where that begins"
    whole = scripted(tokens.split(), stop=stop)
    assert (whole.text, whole.logprobs.tokens, whole.logprobs.text_offset) == (text, told, offsets)
    chunks = scripted(tokens.split(), stop=stop, stream=True)
    assert "".join(c.text for c in chunks) == text
    at, seen = 0, []
    for c in chunks:
        for token, offset in zip(c.logprobs.tokens, c.logprobs.text_offset) if c.logprobs else ():
            assert at <= offset < at + len(c.text), (c, at)
            seen.append(token)
        at += len(c.text)
    assert seen == told


def test_rivals_that_are_no_character(scripted):
    "Parts of characters are told apart by their bytes; of others that are written alike the likelier is kept"
    best = scripted(["a", "<0xE2>", "<0x80>"], rivals=["<0xE6>", "<0xC3>"], logprobs=3).logprobs.top_logprobs
    assert [list(b) for b in best] == [
        ["a", r"bytes:\xe6", r"bytes:\xc3"], [r"bytes:\xe2", r"bytes:\xe6", r"bytes:\xc3"],
        [r"bytes:\x80", r"bytes:\xe6", r"bytes:\xc3"],
    ]
    assert all(list(b.values()) == sorted(b.values(), reverse=True) for b in best)
    first = scripted([".", "!"], rivals=["▁a", "a"], logprobs=3).logprobs.top_logprobs
    assert [list(b) for b in first] == [[".", "a"], ["!", " a", "a"]]
    assert first[0]["a"] == pytest.approx(first[1][" a"], abs=1e-3) and first[1][" a"] > first[1]["a"] + 0.1


def test_penalties(client, engine):
    ask = dict(model="tiny", prompt="plain", max_tokens=40, temperature=0)
    got = client.completions.create(**ask, frequency_penalty=1.5, presence_penalty=0.5).choices[0].text
    assert (
        got
        == alone(engine, "plain", 40, frequency_penalty=1.5, presence_penalty=0.5)
        != client.completions.create(**ask).choices[0].text
    )
    chat = (
        client.chat.completions.create(model="tiny", messages=USER, max_tokens=20, temperature=0, presence_penalty=2)
        .choices[0]
        .message.content
    )
    assert chat == alone(engine, USER, 20, presence_penalty=2.0)


def test_bytes_of_tokens():
    "A character in several tokens, in two kinds of tokenizer; tokens without a text"
    tok = make_tok()
    ids = tok("a 春🙂")["input_ids"]
    spelled = [_spelled(tok, i) for i in ids]
    assert bytes(b for _, raw in spelled for b in raw).decode() == "a 春🙂"
    assert all(raw is not None for _, raw in spelled)
    class Pieces:
        all_special_ids = []
        def convert_ids_to_tokens(self, i): return ["<0xE6>", "▁the", "x"][i]
        def decode(self, ids, **_): return ["\ufffd", "the", "x"][ids[0]]
    assert [_spelled(Pieces(), i) for i in range(3)] == [("\ufffd", [0xE6]), (" the", list(b" the")), ("x", [120])]


def test_a_text_with_blanks_that_is_too_long():
    words = tf.BertTokenizer(
        vocab={w: i for i, w in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat"])}
    )
    class Masks:
        model, tok, max_ctx = (
            tf.BertForMaskedLM(
                tf.BertConfig(
                    vocab_size=7, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
                )
            ).eval(),
            words,
            8,
        )
        def batcher(self): raise TypeError("it cannot generate")
    with serve(Masks(), port=0, background=True, name="masks") as server:
        assert post(server, "/v1/fill", text="the __")[0] == 200
        for stream in (False, True):
            status, body = post(server, "/v1/fill", text="the cat the cat the cat __", stream=stream)
            assert (
                status == 400
                and "a text of 9 tokens exceeds max_ctx=8" in body["error"]["message"]
                and body["error"]["code"] == "context_length_exceeded"
            )


def test_stop(client, engine):
    text = alone(engine, "plain", 30)
    end = text[10:12]
    got = client.completions.create(model="tiny", prompt="plain", max_tokens=30, temperature=0, stop=end).choices[0]
    assert (got.text, got.finish_reason) == (text[:text.index(end)], "stop")


def test_messages_in_their_forms(client):
    "Parts, developer, an answer sent back as it came; without a limit the context is filled"
    first = client.chat.completions.create(model="tiny", messages=USER, max_tokens=3, temperature=0)
    talk = [{"role": "developer", "content": [{"type": "text", "text": "be"}, {"type": "text", "text": "brief"}]}]
    assert (
        client.chat.completions.create(model="tiny", messages=talk, max_tokens=2).usage.prompt_tokens
        == client.chat.completions.create(
            model="tiny", messages=[{"role": "system", "content": "bebrief"}], max_tokens=2
        ).usage.prompt_tokens
    )
    again = client.chat.completions.create(
        model="tiny",
        messages=[*USER, first.choices[0].message, {"role": "user", "content": "and?"}],
        temperature=None,
        user="me",
        max_tokens=None,
    )
    assert again.usage.total_tokens == 128


def test_models_health_and_unknown_paths(client, server):
    assert [m.id for m in client.models.list()] == ["tiny"] and client.models.retrieve("tiny").max_model_len == 128
    assert raw(server, "GET", "/health")[1]["status"] == "ok"
    status, body = raw(server, "GET", "/v2/nothing")
    assert status == 404 and "GET /v2/nothing" in body["error"]["message"]
    assert raw(server, "GET", "/v1/chat/completions")[0] == 405 and raw(server, "GET", "/docs")[0] == 404
    assert set(raw(server, "GET", "/openapi.json")[1]["paths"]) == {
        "/v1/models",
        "/v1/models/{name}",
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/embeddings",
        "/v1/adapters",
        "/v1/adapters/{name}",
        "/v1/fill",
        "/health",
    }


@pytest.mark.parametrize("body, status, said, param", [
    ({"model": "gpt-7", "messages": USER}, 404, "there is no model 'gpt-7' here; this server has 'tiny'", "model"),
    ({"messages": []}, 400, "at least 1 item", "messages"),
    ({}, 400, "Field required", "messages"),
    ({"messages": [{"role": "robot", "content": "1"}]}, 400, "'system', 'developer', 'user', "
                                                             "'assistant' or 'tool'", "messages.0.role"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        400, "'text'", "messages.0.content.0.type",
    ),
    ({"messages": [USER[0], USER[0]]}, 400, "users speak first", "prompt"),
    ({"messages": USER, "temperature": 3}, 400, "less than or equal to 2", "temperature"),
    ({"messages": USER, "temperature": float("nan")}, 400, "finite", "temperature"),
    ({"messages": USER, "max_tokens": 0}, 400, "greater than or equal to 1", "max_tokens"),
    ({"messages": USER, "n": 99}, 400, "less than or equal to 16", "n"),
    ({"messages": USER, "top_p": 0}, 400, "greater than 0", "top_p"),
    ({"messages": USER, "stop": [1]}, 400, "valid string", "stop.0"),
    ({"messages": USER, "max_tokens": 500}, 400, "exceed this model's context of 128 tokens", "messages"),
    ({"messages": USER, "tools": [{"type": "function"}]}, 400, "Field required", "tools.0.function"),
    ({"messages": USER, "tool_choice": "required"}, 400, "needs tools", None),
    ({"messages": USER, "functions": [{"name": "f"}]}, 400, "is not supported", None),
    (
        {"messages": USER, "response_format": {"type": "json_object"}},
        400, "a token that ends the text", "response_format",
    ),
    ({"messages": USER, "response_format": {"type": "json_schema"}}, 400, "json_schema.schema", "response_format"),
    (
        {"messages": USER, "response_format": {"type": "regex", "regex": "x" * 40_000}},
        400, "at most max_grammar=32768", "response_format",
    ),
    ({"messages": USER, "logit_bias": {"1": 200}}, 400, "logit_bias=", None),
    ({"messages": USER, "logit_bias": {"9999": 2}}, 400, "9999 is no token", None),
    ({"messages": USER, "presence_penalty": 2.5}, 400, "less than or equal to 2", "presence_penalty"),
    ({"messages": USER, "top_logprobs": 2}, 400, "top_logprobs=2 needs logprobs=true", None),
    ({"messages": USER, "logprobs": True, "top_logprobs": 21}, 400, "less than or equal to 20", "top_logprobs"),
    ({"messages": USER, "bad \ud800": 1}, 400, "unicode", None),
], ids=lambda x: str(x)[:40] if isinstance(x, dict) else "")
@pytest.mark.parametrize("stream", [False, True])
def test_bad_requests_are_refused_in_openais_shape(server, body, status, said, param, stream):
    got, answer = post(server, "/v1/chat/completions", **body, stream=stream)
    e = answer["error"]
    assert (got, e["type"]) == (status, "invalid_request_error") and said in e["message"], answer
    assert param is None or e["param"] == param


@pytest.mark.parametrize("path, body, said, param", [
    ("completions", {"prompt": "plain", "max_tokens": 500}, "exceed this model's context of 128 tokens", "prompt"),
    ("completions", {"prompt": [5] * 200}, "exceed this model's context of 128 tokens", "prompt"),
    ("completions", {"prompt": [True, False]}, "not understood", "prompt"),
    ("completions", {"prompt": [[5, True]]}, "not understood", "prompt"),
    ("completions", {"prompt": "x", "max_tokens": True}, "not understood", "max_tokens"),
    ("completions", {"prompt": "x", "temperature": False}, "not understood", "temperature"),
    ("completions", {"prompt": "x", "logit_bias": {"5": True}}, "not understood", "logit_bias"),
    ("completions", {"prompt": "x", "stream": 7}, "valid boolean", "stream"),
    ("chat/completions", {"messages": USER, "n": True}, "not understood", "n"),
    ("embeddings", {"input": [True]}, "not understood", "input"),
    ("embeddings", {"input": "half \ud800"}, "cannot be encoded", "input"),
    ("embeddings", {"input": ["plain", "half \ud800"]}, "cannot be encoded", "input"),
    ("fill", {"text": "a __", "max_tokens": 500}, "exceed this model's context of 128 tokens", "text"),
], ids=lambda x: str(x)[:40] if isinstance(x, dict) else "")
def test_a_refusal_names_the_field_that_was_given(server, path, body, said, param):
    status, answer = post(server, f"/v1/{path}", **body)
    assert status == 400 and said in answer["error"]["message"] and answer["error"]["param"] == param, answer


def test_other_bad_bodies(server):
    for body, said in (
        (b"{", "no JSON"), (b"[]", "valid dictionary"), (b"", "required"), (b"[" * 60000, ""), (b'"\xff"', ""),
    ):
        status, answer = raw(server, "POST", "/v1/completions", body)
        assert status == 400 and said in answer["error"]["message"], (body[:10], answer)
    for prompt in ([], "", [[]], [10**9], [-1], [1.5]):
        status, answer = post(server, "/v1/completions", prompt=prompt)
        assert status == 400 and answer["error"]["type"] == "invalid_request_error", (prompt, answer)
    assert post(server, "/v1/completions", prompt="half \ud800")[0] in (200, 400)
    status, answer = post(server, "/v1/completions", prompt=["x"] * 40, n=2)
    assert status == 400 and "at most 64" in answer["error"]["message"]
    status, answer = raw(server, "POST", "/v1/completions", '{"prompt": "x"}', {"Content-Type": "text/plain"})
    assert status == 400


def test_client_raises_its_own_errors(client):
    with pytest.raises(openai.BadRequestError, match="not supported"):
        client.chat.completions.create(model="tiny", messages=USER, functions=[{"name": "f"}])
    with pytest.raises(openai.NotFoundError): client.chat.completions.create(model="nano", messages=USER)


def test_oversized_bodies(server, client, engine):
    "A little too long, much too long, and chunked without a length: refused, and the next request is served"
    with pytest.raises(openai.APIStatusError) as e: client.completions.create(model="tiny", prompt="x" * 70_000)
    assert (
        e.value.status_code == 413
        and "longer than max_body=64KiB" in str(e.value)
        and e.value.code == "request_too_large"
    )
    s = socket.create_connection(("127.0.0.1", int(server.url.rsplit(":", 1)[1])), timeout=60)
    s.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999\r\n\r\n")
    assert s.recv(100).startswith(b"HTTP/1.1 413")
    s.close()  # without a byte of it
    # read to its end; given up
    for n in (70_000, 2**20 + 70_000):
        s = socket.create_connection(("127.0.0.1", int(server.url.rsplit(":", 1)[1])), timeout=60)
        s.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n")
        with contextlib.suppress(OSError):
            for _ in range(n // 10_000): s.sendall(b"2710\r\n" + b"x" * 10_000 + b"\r\n")
            s.sendall(b"0\r\n\r\n")
        with contextlib.suppress(ConnectionResetError): assert s.recv(100).startswith(b"HTTP/1.1 413")
        s.close()
    assert client.completions.create(model="tiny", prompt="x", max_tokens=2).usage.completion_tokens == 2


@pytest.mark.parametrize("stream", [pytest.param(False, marks=pytest.mark.slow), True])
def test_100_at_once(server, engine, stream):
    "Each gets what it would get alone; eight rows serve them"
    jobs = [dict(prompt=f"plain {i % 7}", max_tokens=3 + i % 5, temperature=0.8 * (i % 2), seed=i) for i in range(100)]
    want, before = {}, engine.b.stats["steps"]
    for j in jobs:
        key = (j["prompt"], j["max_tokens"], j["temperature"], j["seed"] if j["temperature"] else 0)
        if key not in want:
            want[key] = alone(engine, j["prompt"], j["max_tokens"], temperature=j["temperature"], seed=j["seed"])
    b, go = engine.b, threading.Event()
    step = engine.decoder.step_sampled
    # no step before all are there
    engine.decoder.step_sampled = lambda sampler: (go.wait(60), step(sampler))[1]
    try:
        with make_client(server) as client, cf.ThreadPoolExecutor(101) as pool:
            def one(j):
                got = client.completions.create(model="tiny", **j, stream=stream)
                return "".join(c.choices[0].text for c in got) if stream else got.choices[0].text
            got = pool.map(one, jobs)
            until(lambda: len(b.waiting) + len(b.active) == 100)
            go.set()
            got = list(got)
    finally:
        go.set()
        del engine.decoder.step_sampled
    assert got == [
        want[j["prompt"], j["max_tokens"], j["temperature"], j["seed"] if j["temperature"] else 0] for j in jobs
    ]
    steps = b.stats["steps"] - before
    # together, not one after the other
    assert steps < 0.2 * sum(j["max_tokens"] for j in jobs), steps
    until(lambda: not server._desk.open and not [t for t in threading.enumerate() if t.name == "serve-reader"])


class Slow:
    "An engine that types without end until it is told to stop"
    model, max_ctx, chat_template = None, 10**6, "yes"
    def __init__(self, pause=0.002): self.tok, self.pause, self.made, self.broken = self, pause, [], False
    def __call__(self, text, return_tensors): return {"input_ids": torch.ones(1, 3, dtype=torch.long)}
    def apply_chat_template(self, messages, **_): return self("", "pt")
    @contextlib.contextmanager
    def batcher(self): yield self
    def submit(self, ids, **options):
        class Handle:
            left, finish, stats = threading.Event(), None, {"prompt_tokens": 3, "new_tokens": 0}
            def cancel(h): h.left.set()
            def __iter__(h):
                while not h.left.wait(self.pause):
                    if self.broken: raise RuntimeError("the device is gone")
                    h.stats["new_tokens"] += 1
                    yield "word "
                h.finish = "cancelled"
        self.made.append(Handle())
        return self.made[-1]


@pytest.fixture
def slow():
    e = Slow()
    with serve(e, port=0, background=True, name="slow", max_waiting=8) as s: yield e, s


def test_hang_up_while_streaming(slow):
    e, server = slow
    with make_client(server) as client:
        for n, c in enumerate(client.completions.create(model="slow", prompt="x", max_tokens=10**5, n=2, stream=True)):
            if n == 20: break
        client.close()
    assert (
        all(h.left.wait(60) for h in e.made) and len(e.made) == 2 and all(h.stats["new_tokens"] < 10**4 for h in e.made)
    )
    assert raw(server, "GET", "/health")[1]["open"] == 0


def test_hang_up_before_a_whole_answer(slow):
    e, server = slow
    for seconds in (0.3, 3, 30):
        with make_client(server) as client, pytest.raises(openai.APITimeoutError):
            client.with_options(timeout=seconds).completions.create(model="slow", prompt="x", max_tokens=10**5)
        # (not yet there when its client left: a longer wait)
        if e.made: break
    assert e.made and all(h.left.wait(60) for h in e.made)


def test_hang_up_while_it_waits_for_a_row():
    "Nothing has been written yet: signs of life come, and the place is given up"
    e = Slow(pause=30)
    with serve(e, port=0, background=True, name="slow") as server:
        server._desk.alive_s = 0.05
        s = socket.create_connection(("127.0.0.1", int(server.url.rsplit(":", 1)[1])), timeout=60)
        body = json.dumps({"prompt": "x", "stream": True}).encode()
        s.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: "
            b"%d\r\n\r\n"
            % len(body)
            + body
        )
        got = b""
        while got.count(b": waiting") < 2: got += s.recv(1000)
        assert not e.made[0].left.is_set()
        s.close()
        assert e.made[0].left.wait(60)


def test_hang_up_of_a_real_decoder_frees_its_row(server, engine, client):
    b, go, before = engine.b, threading.Event(), engine.b.stats["new_tokens"]
    step = engine.decoder.step_sampled
    engine.decoder.step_sampled = lambda sampler: (b.stats["new_tokens"] < before + 4 or go.wait(60), step(sampler))[1]
    try:
        stream = client.completions.create(model="tiny", prompt="plain", max_tokens=120, stream=True)
        next(iter(stream))
        stream.close()
        # it has been noticed
        until(lambda: not server._desk.open)
    finally:
        go.set()
        del engine.decoder.step_sampled
    assert client.completions.create(model="tiny", prompt="plain", max_tokens=2).usage.completion_tokens == 2
    until(lambda: not b.active)
    assert b.stats["new_tokens"] - before < 10


def test_too_many_are_told_to_come_back(slow):
    e, server = slow
    with make_client(server) as client:
        streams = [client.completions.create(model="slow", prompt="x", n=4, stream=True) for _ in range(2)]
        with pytest.raises(openai.InternalServerError, match="max_waiting=8") as error:
            client.completions.create(model="slow", prompt="x")
        assert error.value.status_code == 503 and error.value.response.headers["retry-after"] == "1"
        [s.close() for s in streams]
        assert all(h.left.wait(60) for h in e.made)


def test_an_engine_that_breaks(slow):
    "In the middle of a stream, and of a whole answer: said, and the server goes on"
    e, server = slow
    with make_client(server) as client:
        stream = client.chat.completions.create(model="slow", messages=USER, stream=True)
        next(iter(stream))
        e.broken = True
        with pytest.raises(openai.APIError, match="the device is gone"): list(stream)
        with pytest.raises(openai.InternalServerError, match="RuntimeError: the device is gone"):
            client.chat.completions.create(model="slow", messages=USER)
        e.broken = False
        assert next(iter(client.completions.create(model="slow", prompt="x", stream=True))).choices[0].text == "word "


def test_closing_ends_what_is_open():
    e, before = Slow(), set(threading.enumerate())
    server = serve(e, port=0, background=True, name="slow")
    with make_client(server) as client:
        stream = client.completions.create(model="slow", prompt="x", max_tokens=10**5, stream=True)
        next(iter(stream))
        server.close()
        with pytest.raises(openai.APIError, match="the server is closing"): list(stream)
    server.close()
    with pytest.raises(OSError): raw(server, "GET", "/health")
    assert not set(threading.enumerate()) - before
    gone = weakref.ref(e)
    del e, server, stream, client
    gc.collect()
    assert gone() is None


def test_forked_processes(slow):
    "One that ends does not end the server, which it has no threads of; one that stays does not keep the port"
    _, server = slow
    port, ended = int(server.url.rsplit(":", 1)[1]), []
    if not (ends := os.fork()):
        try: server.close()
        finally: os._exit(3)
    if not (stays := os.fork()):
        try: time.sleep(60)
        finally: os._exit(0)
    def over():
        pid, status = os.waitpid(ends, os.WNOHANG)
        if pid: ended.append(os.waitstatus_to_exitcode(status))
        return ended
    try:
        until(over, seconds=20)
        assert ended == [3] and raw(server, "GET", "/health")[0] == 200
        server.close()
        with pytest.raises(ConnectionRefusedError): socket.create_connection(("127.0.0.1", port), timeout=5)
        with serve(Slow(), port=port, background=True) as again: assert raw(again, "GET", "/health")[0] == 200
    finally:
        for pid in (stays, *([] if ended else [ends])):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def test_who_may_ask(slow):
    "Without a token: this machine, and no page of another origin"
    _, server = slow
    port = server.url.rsplit(":", 1)[1]
    for headers, status in (
        ({}, 200), ({"Host": f"localhost:{port}"}, 200), ({"Host": f"[::1]:{port}"}, 200),
        ({"Host": "evil.example"}, 403), ({"Host": f"127.0.0.1.evil.example:{port}"}, 403), ({"Host": ""}, 403),
        ({"Origin": server.url}, 200), ({"Origin": "https://evil.example"}, 403), ({"Origin": "null"}, 403),
        ({"Origin": "http://localhost:1"}, 403),
    ):
        assert raw(server, "GET", "/v1/models", headers=headers)[0] == status, headers
    error = raw(server, "POST", "/v1/completions", "{}", {"Origin": "https://evil.example"})[1]["error"]
    # (a token would not help it: a browser asks first without one)
    assert error["type"] == "permission_error" and "token" not in error["message"]


def test_token():
    with serve(Slow(), host="0.0.0.0", port=0, token="sesame-open", background=True, name="slow") as server:
        server.url = server.url.replace("0.0.0.0", "127.0.0.1")
        assert (
            raw(server, "GET", "/health")[0] == 200
            and raw(server, "GET", "/")[0] == 200
            and "sesame" not in raw(server, "GET", "/")[1]
        )
        for path in ("/v1/models", "/openapi.json", "/none"): assert raw(server, "GET", path)[0] == 401
        for given in (
            "sesame-open", "Bearer sesame", "Bearer ", "Bearer sesame-open2", "Basic sesame-open", "Bearer \xe9",
        ):
            status, answer = post(server, "/v1/completions", {"Authorization": given}, prompt="x")
            assert status == 401 and answer["error"]["code"] == "invalid_api_key", given
        assert (
            raw(
                server,
                "GET",
                "/v1/models",
                headers={"Authorization": "Bearer sesame-open", "Host": "big.lan", "Origin": "https://else.where"},
            )[0]
            == 200
        )
        with make_client(server) as client:
            assert (
                next(iter(client.completions.create(model="slow", prompt="x", stream=True))).choices[0].text == "word "
            )
        assert "sesame" not in repr(server) + server._repr_html_() and server.page.endswith("/#token=sesame-open")


def test_a_token_is_made():
    with serve(Slow(), port=0, token=True, background=True) as s: assert len(s.token) > 24


def test_what_serve_refuses():
    for host in (
        "0.0.0.0", "::",
        socket.gethostname() if not socket.gethostbyname(socket.gethostname()).startswith("127.") else "0.0.0.0",
    ):
        with pytest.raises(ValueError, match="can be reached from other machines"): serve(Slow(), host=host, port=0)
    for bad in (
        dict(host=""), dict(host=None), dict(port=-1), dict(port=True), dict(port="8000"), dict(token=""),
        dict(token="short"), dict(token="has a space in it"), dict(max_waiting=0), dict(max_body="many"),
    ):
        with pytest.raises(ValueError): serve(Slow(), **{"port": 0, **bad})
    with serve(Slow(), port=0, background=True) as s, pytest.raises(OSError, match="port=0 takes a free one"):
        serve(Slow(), port=int(s.url.rsplit(":", 1)[1]))
    with pytest.raises(TypeError, match="without a batcher"): serve(object())


def test_an_engine_that_is_busy_is_refused_and_the_port_is_free():
    class Busy(Slow):
        @contextlib.contextmanager
        def batcher(self):
            raise RuntimeError("this engine is busy with another text")
            yield
    port = free_port()
    with pytest.raises(RuntimeError, match="busy"): serve(Busy(), port=port)
    with serve(Slow(), port=port, background=True): pass


def test_a_server_that_cannot_start_lets_go(monkeypatch):
    import uvicorn
    class Held(Slow):
        free = True
        @contextlib.contextmanager
        def batcher(self):
            self.free = False
            try: yield self
            finally: self.free = True
    e = Held()
    monkeypatch.setattr(uvicorn.Server, "run", lambda self, sockets: None)
    with pytest.raises(RuntimeError, match="did not start"): serve(e, port=0)
    assert e.free


def test_fill_by_asking(server, engine):
    status, whole = post(server, "/v1/fill", text="a __ and ____.", max_tokens=4)
    assert (
        status == 200
        and len(whole["answers"]) == 2
        and whole["text"] == f"a {whole['answers'][0]} and {whole['answers'][1]}."
        and whole["usage"]["completion_tokens"] <= 8
    )
    events = [
        e for e in post(server, "/v1/fill", text="a __ and ____.", max_tokens=4, stream=True)[1].split("\n\n") if e
    ]
    told = [json.loads(e[6:]) for e in events[:-1]]
    assert events[-1] == "data: [DONE]" and told[-1]["answers"] == whole["answers"] == [
        "".join(t["text"] for t in told[:-1] if t["blank"] == i).rstrip() for i in (0, 1)
    ]
    for text in ("no blank", "", 7): assert post(server, "/v1/fill", text=text)[0] == 400


def test_fill_with_sentinels_and_masks():
    tok = make_tok([f"<extra_id_{i}>" for i in range(4)])
    torch.manual_seed(1)
    t5 = tf.T5ForConditionalGeneration(
        tf.T5Config(
            d_model=32,
            d_kv=8,
            d_ff=64,
            num_layers=2,
            num_heads=4,
            vocab_size=len(tok),
            decoder_start_token_id=0,
            eos_token_id=1,
            pad_token_id=0,
        )
    ).eval()
    with serve(Tiny(t5, tok, rows=2), port=0, background=True, name="t5") as server:
        status, whole = post(server, "/v1/fill", text="a __ and __.", max_tokens=20, temperature=1.5, seed=2)
        assert status == 200 and len(whole["answers"]) == 2 and whole["usage"]["completion_tokens"] > 0
        assert raw(server, "GET", "/v1/models")[1]["data"][0]["fill"] == "sentinel"
        for stream in (False, True):
            status, body = post(server, "/v1/completions", prompt=[5] * 999, max_tokens=4, stream=stream)
            assert (
                status == 400
                and "a source of 999 tokens" in body["error"]["message"]
                and body["error"]["code"] == "context_length_exceeded"
            )
    bert_tok = make_tok()
    bert_tok.add_special_tokens({"mask_token": "[MASK]", "unk_token": "[UNK]"})
    bert = tf.BertForMaskedLM(
        tf.BertConfig(
            hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, vocab_size=len(bert_tok)
        )
    ).eval()
    class Encoder:
        model, tok, max_ctx = bert, bert_tok, 64
        def batcher(self): raise TypeError("BertForMaskedLM cannot generate text")
    with serve(Encoder(), port=0, background=True, name="bert") as server:
        status, whole = post(server, "/v1/fill", text="a __ and __.")
        assert status == 200 and len(whole["answers"]) == 2
        assert post(server, "/v1/fill", text="a __ and __.", stream=True)[1].endswith("data: [DONE]\n\n")
        status, answer = post(server, "/v1/completions", prompt="x")
        assert status == 400 and "it can fill blanks" in answer["error"]["message"]


def test_the_page_says_where_everything_may_come_from(server):
    c = http.client.HTTPConnection(server.url[7:])
    c.request("GET", "/")
    answer = c.getresponse()
    page = answer.read().decode()
    c.close()
    policy = answer.getheader("Content-Security-Policy")
    assert (
        "default-src 'none'" in policy
        and "connect-src 'self'" in policy
        and "unsafe" not in policy
        and "://" not in page
    )


def test_in_a_running_event_loop_and_interrupted(engine):
    "As in a notebook; and `wait` ends with an interrupt"
    import asyncio
    async def cell():
        with serve(Slow(), port=0, background=True) as s: return await asyncio.to_thread(raw, s, "GET", "/health")
    assert asyncio.run(cell())[0] == 200
    s = serve(Slow(), port=0, background=True)
    ended, waits, before = s._ended.is_set, threading.Event(), signal.signal(signal.SIGINT, signal.default_int_handler)
    s._ended.is_set = lambda: waits.set() or ended()
    threading.Thread(target=lambda: (waits.wait(60), time.sleep(0.1), os.kill(os.getpid(), signal.SIGINT))).start()
    try: s.wait()
    finally: signal.signal(signal.SIGINT, before)
    assert s._closed.locked() and s._thread.ident not in sys._current_frames()


@pytest.mark.long
@pytest.mark.parametrize("stop", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM],
                         ids=["interrupted", "terminated"])
def test_the_script(stop):
    port = free_port()
    p = subprocess.Popen(
        [
            sys.executable,
            ROOT / "scripts/serve.py",
            "--model",
            "smollm2-135m",
            "--batch",
            "2",
            "--context",
            "256",
            "--port",
            str(port),
            "--drain-s",
            "40",
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # an interrupt reaches it, also where this process ignores them
    try:
        lines = []
        for line in p.stdout:
            lines.append(line)
            if "page" in line: break
        server = type("S", (), {"url": f"http://127.0.0.1:{port}", "token": None})
        assert raw(server, "GET", "/health")[0] == 200, lines
        with make_client(server) as c:
            assert (
                "Paris"
                in c.chat.completions.create(
                    model=c.models.list().data[0].id,
                    messages=[{"role": "user", "content": "What is the capital of France?"}],
                    temperature=0,
                    max_tokens=16,
                )
                .choices[0]
                .message.content
            )
        with make_client(server) as c:
            n = 200 if stop == signal.SIGINT else 40
            stream = c.completions.create(model=c.models.list().data[0].id, prompt="x", max_tokens=n, stream=True)
            next(iter(stream))
            p.send_signal(stop)
            # in the middle of a text, which an interrupt breaks off and SIGTERM lets end
            if stop == signal.SIGTERM:
                assert [c.choices[0].finish_reason for c in stream][-1] in ("length", "stop")
            assert p.wait(60) == 0, p.stdout.read()
        assert "Traceback" not in p.stdout.read()
    finally:
        p.kill()
        p.wait()
        p.stdout.close()


def test_what_a_client_leaves_out_is_as_the_model_asks():
    from bmlab.app.serve import _Asked
    assert "repetition_penalty" not in _Asked().options()
    assert _Asked(repetition_penalty=1.0).options()["repetition_penalty"] == 1.0

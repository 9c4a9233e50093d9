"""What programs ask of a server: calls of tools, texts of a fixed form, adapters by name, vectors, fields that nobody
knows; OpenAI's own client and a library of agents that calls tools"""
import concurrent.futures as cf
import copy
import http.client
import json

import pytest
import torch
import transformers as tf

openai = pytest.importorskip("openai", reason="openai is not installed")
pytest.importorskip("fastapi", reason="fastapi is not installed: pip install '.[serve]'")
pytest.importorskip("llguidance", reason="llguidance is not installed: pip install '.[grammar]'")
from bmlab.app.serve import serve
from bmlab.app.tools import CallReader, ToolFormat, tool_messages
from bmlab.delta.delta import Delta, deltas
from bmlab.delta.lora import Lora
from bmlab.infer.decode import Decoder
from bmlab.infer.engine import wrap
from bmlab.infer.sampling import Sampler
from bmlab.infer.text import stream_text
from toys import make_tok

USER = [{"role": "user", "content": "What is the weather in Paris?"}]
PARAMETERS = {
    "type": "object", "properties": {"city": {"enum": ["Paris", "Oslo"]}}, "required": ["city"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "function", "function": {"name": "weather", "description": "Weather.", "parameters": PARAMETERS},
}


def client_of(server):
    plain = openai.DefaultHttpxClient(trust_env=False)
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120, http_client=plain)


def raw(server, method, path, **body):
    c = http.client.HTTPConnection(server.url[7:], timeout=120)
    try:
        c.request(method, path, json.dumps(body), {"Content-Type": "application/json"})
        answer = c.getresponse()
        return answer.status, json.loads(answer.read()), dict(answer.getheaders())
    finally: c.close()


@pytest.fixture(scope="module")
def real():
    "SmolLM2, its server and OpenAI's client"
    with wrap("smollm2-135m", device="cpu", max_batch=2, max_ctx=1024) as e:
        with serve(e, port=0, background=True) as server, client_of(server) as client: yield e, server, client


def test_the_name_that_the_user_typed(real):
    _, server, client = real
    assert server.name == "smollm2-135m" == client.models.list().data[0].id
    for name in ("smollm2-135m", "smollm2-135m-0.1.2"): assert client.models.retrieve(name).id == "smollm2-135m"


def test_texts_of_a_fixed_form(real):
    _, server, client = real
    ask = dict(model=server.name, messages=USER, temperature=1, seed=1, max_tokens=60)
    form = {"type": "json_schema", "json_schema": {"name": "w", "schema": PARAMETERS, "strict": True}}
    whole = client.chat.completions.create(**ask, response_format=form).choices[0]
    assert json.loads(whole.message.content)["city"] in ("Paris", "Oslo") and whole.finish_reason == "stop"
    chunks = client.chat.completions.create(**ask, response_format=form, stream=True)
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == whole.message.content
    regex = {"type": "regex", "regex": "(yes|no), [a-z]{3,5}"}
    own = {"response_format": regex}
    said = client.completions.create(model=server.name, prompt="So?", temperature=1, extra_body=own)
    assert said.choices[0].text.split(",")[0] in ("yes", "no")
    lark = {"type": "grammar", "grammar": 'start: "a" | "b" "c"'}
    assert client.chat.completions.create(**ask, response_format=lark).choices[0].message.content in ("a", "bc")
    for bad in ({"type": "regex", "regex": "("}, {"type": "grammar", "grammar": "start: x"}):
        with pytest.raises(openai.BadRequestError, match="response_format"):
            client.chat.completions.create(**ask, response_format=bad)
    # one bit of the vocabulary, by hand
    bias = {real[0].tok("yes")["input_ids"][0]: 100}
    yes = client.chat.completions.create(**ask | {"max_tokens": 3}, logit_bias=bias)
    assert yes.choices[0].message.content == "yesyesyes"


def test_calls_of_tools(real):
    "Whole and streamed alike; a call and its result go back into the prompt; none of it where nobody may call"
    _, server, client = real
    ask = dict(model=server.name, messages=USER, tools=[WEATHER], tool_choice="required", seed=2, max_tokens=60)
    got = client.chat.completions.create(**ask, parallel_tool_calls=False).choices[0]
    call, = got.message.tool_calls
    assert (got.finish_reason, got.message.content, call.function.name) == ("tool_calls", None, "weather")
    assert json.loads(call.function.arguments)["city"] in ("Paris", "Oslo")
    chunks = list(client.chat.completions.create(**ask, parallel_tool_calls=False, stream=True))
    told = [c.choices[0].delta.tool_calls[0] for c in chunks if c.choices[0].delta.tool_calls]
    assert told[0].id and told[0].function.name == "weather" and len(told) > 1
    assert "".join(t.function.arguments for t in told) == call.function.arguments
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    result = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
    back = dict(messages=[*USER, got.message.model_dump(exclude_none=True), result], tools=[WEATHER])
    more = client.chat.completions.create(model=server.name, **back, max_tokens=8, temperature=0)
    assert more.usage.prompt_tokens > 100 and more.usage.prompt_tokens_details.cached_tokens > 50
    named = {"type": "function", "function": {"name": "weather"}}
    assert client.chat.completions.create(**ask | {"tool_choice": named}).choices[0].message.tool_calls
    none = client.chat.completions.create(**ask | {"tool_choice": "none", "max_tokens": 4}).choices[0]
    assert none.message.tool_calls is None and none.message.content
    for bad in ({"tools": [WEATHER] * 2}, {"tool_choice": {"type": "function", "function": {"name": "other"}}}):
        with pytest.raises(openai.BadRequestError): client.chat.completions.create(**ask | bad)


def h(name, arguments="{}"): return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


@pytest.mark.parametrize("kind, text, said", [
    ("hermes", f"\n{h('a')}", [("call", "a"), ("arguments", "{}")]),
    ("hermes", f"\n\n{h('a')}\n {h('b')}\n", [("call", "a"), ("arguments", "{}"), ("call", "b"), ("arguments", "{}")]),
    ("hermes", f"Well: {h('a')} Done.", [
        ("text", "Well: "), ("call", "a"), ("arguments", "{}"), ("text", " Done.")]),
    ("hermes", "\n Hello.", [("text", "\n Hello.")]),
    ("hermes", " \n", [("text", " \n")]),
    ("hermes", f"\n{h('none')}", [("text", f"\n{h('none')}")]),
    ("hermes", f"{h('none')}\n{h('a')}", [("text", h("none") + "\n"), ("call", "a"), ("arguments", "{}")]),
    ("hermes", f"{h('a')}\n{h('none')}{h('b')}", [
        ("call", "a"), ("arguments", "{}"), ("text", "\n" + h("none")), ("call", "b"), ("arguments", "{}")]),
    ("hermes", f'<tool_call>{{"name": "a"}}{h("b")}', [
        ("text", '<tool_call>{"name": "a"}'), ("call", "b"), ("arguments", "{}")]),
    ("llama", '\n{"name": "a", "parameters": {}}', [("call", "a"), ("arguments", "{}")]),
    ("llama", '\n{"name": "none", "parameters": {}}', [("text", '\n{"name": "none", "parameters": {}}')]),
    ("mistral", '\n[TOOL_CALLS][{"name": "a", "arguments": {"x": 1}}]', [("call", "a"), ("arguments", '{"x": 1}')]),
])
def test_a_text_is_read_alike_in_any_pieces(kind, text, said):
    "Space before a call is no text, and a call of a function that there is not takes no other one with it"
    pieces = [[text], list(text), *([text[:i], text[i:]] for i in range(1, len(text)))]
    for cut in pieces:
        reader, got = CallReader(ToolFormat(kind), {"a", "b"}), []
        for what, piece in [e for p in cut for e in reader.push(p)] + reader.end():
            if got and what == got[-1][0] != "call": got[-1] = (what, got[-1][1] + piece)
            else: got.append((what, piece))
        assert got == said, cut


def test_an_empty_system_message_and_functions():
    talk = [{"role": "system", "content": ""}, *USER]
    roles = [m["role"] for m in tool_messages(ToolFormat("hermes"), talk, [WEATHER])]
    assert roles == ["system", "user"]


@pytest.mark.long
def test_an_agent_that_calls_tools(real):
    "smolagents' own loop: the model calls a tool, sees the result, and calls for the end"
    agents = pytest.importorskip("smolagents", reason="smolagents is not installed: pip install '.[dev]'")
    _, server, _ = real
    asked = []

    @agents.tool
    def weather(city: str) -> str:
        """The weather of a city.

        Args:
            city: its name
        """
        asked.append(city)
        return "rain, 12 degrees"

    model = agents.OpenAIServerModel(
        server.name, f"{server.url}/v1", "none", max_tokens=32, seed=3, temperature=0.5,
        client_kwargs={"http_client": openai.DefaultHttpxClient(trust_env=False)},
    )
    agent = agents.ToolCallingAgent(tools=[weather], model=model, max_steps=2, verbosity_level=0)
    agent.prompt_templates["system_prompt"] = "Call weather, then final_answer."
    agent.prompt_templates["final_answer"] = {"pre_messages": "Answer.", "post_messages": "{{task}}"}
    answer = agent.run("What is the weather in Paris?")
    calls = [c.name for s in agent.memory.steps for c in getattr(s, "tool_calls", None) or ()]
    assert calls and set(calls) <= {"weather", "final_answer"} and answer is not None
    assert len(asked) == calls.count("weather")


def test_vectors(real):
    e, server, client = real
    got = client.embeddings.create(model=server.name, input=["The cat sleeps.", "A kitten naps."])        # (base64)
    ids = e.tok("The cat sleeps.")["input_ids"]
    plain = client.embeddings.create(model=server.name, input=ids, encoding_format="float")
    a, b = (torch.tensor(x.embedding) for x in (got.data[0], plain.data[0]))
    assert torch.allclose(a, b, atol=1e-5) and abs(a.norm() - 1) < 1e-4 and len(got.data) == 2
    with torch.no_grad():
        last = e.model.model(**e.tok("The cat sleeps.", return_tensors="pt")).last_hidden_state[0, -1].float()
    assert torch.allclose(a, last / last.norm(), atol=1e-3)
    cut = client.embeddings.create(model=server.name, input="x", dimensions=16).data[0].embedding
    assert len(cut) == 16 and abs(sum(v * v for v in cut) - 1) < 1e-3
    wrong = dict(input=[]), dict(input=""), dict(input=[10**6]), dict(input="y " * 2000)
    for bad in (*wrong, dict(input="x", dimensions=10**6)):
        with pytest.raises(openai.BadRequestError): client.embeddings.create(model=server.name, **bad)
    with wrap("minilm-l6", device="cpu") as encoder, serve(encoder, port=0, background=True) as other:
        with client_of(other) as ask:
            texts = ["The cat sleeps on the sofa.", "A kitten naps on the couch.", "Interest rates went up."]
            x = torch.tensor([d.embedding for d in ask.embeddings.create(model="minilm-l6", input=texts).data])
            assert x[0] @ x[1] > 0.5 > x[0] @ x[2]


def test_fields_that_nobody_knows(real):
    _, server, _ = real
    talk = [USER[0] | {"mood": "glad"}]
    status, _, headers = raw(
        server, "POST", "/v1/chat/completions", messages=talk, max_tokens=1, temprature=1, **{"a\r\nSet-Cookie: b": 2}
    )
    assert status == 200 and "Set-Cookie" not in headers
    assert headers["x-ignored-fields"].startswith("temprature, ") and "messages.0.mood" in headers["x-ignored-fields"]
    assert "x-ignored-fields" not in raw(server, "POST", "/v1/completions", prompt="x", max_tokens=1, user="me")[2]


# ---- adapters ----

@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    "(model, tokenizer, folder of 34 adapters)"
    torch.manual_seed(0)
    tok, root = make_tok(), tmp_path_factory.mktemp("adapters")
    size = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=len(tok))
    model = tf.LlamaForCausalLM(tf.LlamaConfig(**size, num_key_value_heads=2)).eval()
    model.generation_config.eos_token_id = None
    for i in range(34):
        delta = Lora(model, r=2, name=f"a{i}")
        for p in delta.parameters(): p.data.normal_()
        delta.save(root / f"a{i}")
        deltas(model).forget(delta.name)
    return model, tok, root


def own_text(model, tok, folder, prompt, n):
    one = copy.deepcopy(model)
    if folder: Delta.load(folder, one)
    return "".join(p for _, p in stream_text(Decoder(one, 1, 128), tok, [prompt], Sampler(), n, (), ()))


def at_once(model, tok, root, adapters):
    "Each text is the one of its own run; the model's own beside them"
    names = [f"a{i}" for i in range(adapters)] + [None]
    want = [own_text(model, tok, name and root / name, "plain english", 12) for name in names]
    assert len(set(want)) > adapters - 2
    engine = wrap(copy.deepcopy(model), tok, device=model.device, max_batch=4, max_ctx=128)
    given = {name: root / name for name in names[:-1]}
    here = dict(port=0, background=True, name="tiny", adapters=given)
    with engine, serve(engine, **here) as server, client_of(server) as client:
        assert [m.id for m in client.models.list()] == ["tiny", *names[:-1]] == ["tiny", *server.adapters]
        def ask(name):
            got = client.completions.create(model=name or "tiny", prompt="plain english", max_tokens=12, temperature=0)
            assert got.model == (name or "tiny")
            return got.choices[0].text
        with cf.ThreadPoolExecutor(adapters + 1) as pool: assert list(pool.map(ask, names)) == want


def test_thirty_two_adapters_at_once(folders): at_once(*folders, 32)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_adapters_at_once_on_a_gpu(folders):
    model, tok, root = folders
    at_once(copy.deepcopy(model).cuda(), tok, root, 5)


def test_adapters_come_and_go_and_nobody_stops(folders):
    "By Python and over HTTP, while a text is being made; only folders of the one that the server was given"
    model, tok, root = folders
    engine = wrap(copy.deepcopy(model), tok, device="cpu", max_batch=2, max_ctx=128)
    (root.parent / "else").mkdir()
    here = dict(port=0, background=True, name="tiny", adapters=root)
    with engine, serve(engine, **here) as server, client_of(server) as client:
        assert len(server.adapters) == 34
        server.drop_adapter("a32")
        long = client.completions.create(model="a1", prompt="plain", max_tokens=100, temperature=0, stream=True)
        pieces = [next(iter(long)).choices[0].text]
        status, answer, _ = raw(server, "POST", "/v1/adapters", name="late", folder="a32")
        assert (status, answer["parent"]) == (200, "tiny")
        got = client.completions.create(model="late", prompt="plain", max_tokens=8, temperature=0).choices[0].text
        assert got == own_text(model, tok, root / "a32", "plain", 8)
        pieces += [c.choices[0].text for c in long]
        assert "".join(pieces) == own_text(model, tok, root / "a1", "plain", 100)
        assert raw(server, "DELETE", "/v1/adapters/late")[1]["deleted"] and "late" not in server.adapters
        with pytest.raises(openai.NotFoundError, match="there is no model 'late' here"):
            client.completions.create(model="late", prompt="x")
        assert raw(server, "DELETE", "/v1/adapters/late")[0] == 404
        for folder, status in (("../else", 400), ("/etc", 400), ("none", 400), ("", 400)):
            assert raw(server, "POST", "/v1/adapters", name="x", folder=folder)[0] == status, folder
        for name in ("a1", "tiny"):
            status, answer, _ = raw(server, "POST", "/v1/adapters", name=name, folder="a2")
            assert (status, answer["error"]["param"]) == (400, "name")
        assert raw(server, "POST", "/v1/adapters", name="x", folder="none")[1]["error"]["param"] == "folder"
        for name in ("a1", "tiny"):
            assert raw(server, "POST", "/v1/fill", model=name, text="a __", max_tokens=2)[1]["model"] == name
        assert raw(server, "POST", "/v1/fill", model="x", text="a __")[0] == 404
        with pytest.raises(ValueError, match="no adapter 'x'"): server.drop_adapter("x")
    engine = wrap(copy.deepcopy(model), tok, device="cpu", max_ctx=128)
    with engine, serve(engine, port=0, background=True, name="tiny") as server:
        status, answer, _ = raw(server, "POST", "/v1/adapters", name="x", folder="a0")
        assert status == 403 and "adapters=FOLDER" in answer["error"]["message"]
        server.add_adapter("x", root / "a0")
        assert server.adapters == ["x"] and raw(server, "DELETE", "/v1/adapters/x")[0] == 403
        assert raw(server, "POST", "/v1/embeddings", model="x", input="plain")[1]["data"]
    # as it was: nothing of the adapters stays
    assert own_text(engine.model, tok, None, "plain", 8) == own_text(model, tok, None, "plain", 8)


def test_what_is_too_much_is_refused_and_the_next_is_served(real):
    "Schemas without end, expressions that blow up, calls that are no JSON: an error of their own, or an answer"
    _, server, _ = real
    deep = {}
    for _ in range(400): deep = {"type": "array", "items": deep}
    form = lambda **f: {"response_format": f}
    hostile = [
        form(type="json_schema", json_schema={"schema": deep}), form(type="json_schema", json_schema={"schema": 5}),
        form(type="json_schema", json_schema={"schema": {"$ref": "#/nowhere"}}),
        form(type="json_schema", json_schema={"schema": {"$ref": "file:///etc/passwd"}}),
        form(type="json_schema", json_schema={"schema": {"enum": ["x" * 40_000]}}),
        form(type="regex", regex="(?=a)a"), form(type="grammar", grammar=""),
        {"tools": [WEATHER | {"function": {"name": 'a"b', "parameters": {}}}]},
        {"tools": [WEATHER | {"function": {"name": "f", "parameters": deep}}], "tool_choice": "required"},
        {"tools": [WEATHER] * 129}, {"logit_bias": {"x": 1}}, {"logit_bias": {"-1": 1}},
    ]
    for body in hostile:
        status, answer, _ = raw(server, "POST", "/v1/chat/completions", messages=USER, max_tokens=4, **body)
        assert status == 400 and len(answer["error"]["message"]) < 2000, (body, answer)
    call = {"id": "x", "type": "function", "function": {"name": "weather", "arguments": '{"city": '}}
    odd = [*USER, {"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "content": None}]
    for more in ({"messages": odd, "tools": [WEATHER]}, form(type="regex", regex="(a{1000}){1000}{1000}")):
        ask = {"messages": USER, "max_tokens": 2} | more
        status, answer, _ = raw(server, "POST", "/v1/chat/completions", **ask)
        assert status == 200 and answer["choices"]

"""A client that is slow, broken or hostile is told its limit, and keeps nobody else waiting: sockets, headers, bodies,
prompts, stop strings, the log, and what comes after SIGTERM"""
import argparse
import concurrent.futures as cf
import contextlib
import dataclasses
import http.client
import json
import logging
import os
import random
import re
import resource
import signal
import socket
import threading
import time
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import torch

pytest.importorskip("fastapi", reason="fastapi is not installed: pip install '.[serve]'")
from bmlab.app.limits import Limits
from bmlab.app.serve import serve
from bmlab.infer.text import RowText, StopText
from conftest import until

ROOT = Path(__file__).resolve().parents[2]


class Engine:
    "Types until its `go` is set; a prompt's length in characters is its ids' number"
    model, max_ctx, chat_template, tok = None, 1000, "yes", None
    def __init__(self): self.tok, self.go, self.made, self.read, self.gates = self, threading.Event(), [], [], {}
    def __call__(self, text, return_tensors):
        self.read.append(len(text))
        if (gate := self.gates.get(len(text))) is not None: assert gate.wait(60)
        text.encode()
        return {"input_ids": torch.ones(1, min(len(text), 500), dtype=torch.long)}
    def apply_chat_template(self, messages, **_): return self(messages[-1]["content"], "pt")
    @contextlib.contextmanager
    def batcher(self): yield self
    def submit(self, ids, **options):
        class Handle:
            left, finish, stats = threading.Event(), None, {"prompt_tokens": len(ids), "new_tokens": 0}
            def cancel(h): h.left.set()
            def __iter__(h):
                while not h.left.wait(.002) and not self.go.is_set():
                    h.stats["new_tokens"] += 1
                    yield "word "
                h.finish = "cancelled" if h.left.is_set() else "stop"
        self.made.append(Handle())
        return self.made[-1]


@contextlib.contextmanager
def served(**options):
    "(engine, server, port)"
    e = Engine()
    with serve(e, port=0, background=True, name="typist", **options) as s:
        e.server = s
        yield e, s, int(s.url.rsplit(":", 1)[1])


def ask(port, path="/health", body=None, raw=None, source=None):
    "(status, answer, headers)"
    c = http.client.HTTPConnection("127.0.0.1", port, timeout=60, source_address=source)
    data = raw if raw is not None or body is None else json.dumps(body)
    c.request("GET" if data is None else "POST", path, data, {"Content-Type": "application/json"})
    r = c.getresponse()
    try: return r.status, json.loads(r.read()), r.headers
    finally: c.close()


def sent(port, *parts, wait=0.):
    "A socket that has sent these bytes"
    s = socket.create_connection(("127.0.0.1", port), timeout=60)
    for part in parts:
        s.sendall(part)
        time.sleep(wait)
    return s


def rest(s):
    "What comes until the server closes"
    with s, contextlib.suppress(ConnectionResetError): return b"".join(iter(lambda: s.recv(9999), b""))
    return b""


def gone(s):
    "Has the server closed it?"
    s.setblocking(False)
    try: return s.recv(1) == b""
    except BlockingIOError: return False
    except OSError: return True


def post(body, length=None):
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return head + b"Content-Length: %d\r\n\r\n" % (len(body) if length is None else length) + body


def last(request):
    "The connection's last request"
    return request.replace(b"Content-Type", b"Connection: close\r\nContent-Type")


HALF = b"GET /health HTTP/1.1\r\nHost: local"


def test_sockets_with_half_a_header_push_each_other_out():
    "None of them is late yet, and whoever sends a whole request is served"
    with served(max_connections=12, max_per_client=8, header_s=600) as (_, server, port):
        for parts in ((HALF,), (), (post(b"{", 99),)):
            held = [sent(port, *parts) for _ in range(30)]
            assert [ask(port)[0] for _ in range(3)] == [200] * 3
            # (another address too, though this one has used up all that it may have)
            assert ask(port, source=("127.0.0.2", 0))[0] == 200
            until(lambda: sum(map(gone, held)) >= 22)
            for s in held: s.close()
        until(lambda: len(server._loop.config.http_protocol_class.lobby.inside) == 0)


def test_where_all_are_at_work_the_next_is_refused():
    with served(max_connections=4, max_per_client=2) as (e, _, port):
        running = [sent(port, last(post(b'{"prompt": "x", "stream": true}'))) for _ in range(2)]
        until(lambda: len(e.made) == 2)
        answer = rest(sent(port, b"")).decode()
        assert " 503 " in answer and "retry-after: 1" in answer and "max_per_client=2" in answer
        assert ask(port, source=("127.0.0.3", 0))[0] == 200
        e.go.set()
        for s in running: assert b"data: [DONE]" in rest(s)


def test_what_is_late_is_told_and_closed():
    with served(header_s=.3, body_s=.3, keep_alive_s=.3) as (_, _, port):
        for s, said in (
            (sent(port), "header_s=0.3"), (sent(port, HALF), "header_s=0.3"),
            (sent(port, HALF + b"host\r\n\r\n" + HALF), "header_s=0.3"),
            (sent(port, post(b'{"prompt": ', 99)), "body_s=0.3"),
        ):
            answer = rest(s).decode()
            assert " 408 " in answer and said in answer and '"invalid_request_error"' in answer
        # a byte now and then does not help
        for begun in (HALF, post(b'{"prompt": ', 99)):
            s = sent(port, begun)
            with pytest.raises(OSError):
                for _ in range(600):
                    s.sendall(b"a")
                    time.sleep(.02)
            s.close()
        # between requests nothing is late, only at an end
        assert rest(sent(port, HALF + b"host\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
        # a body that nobody waits for any more
        s = sent(port, b"POST /none HTTP/1.1\r\nHost: evil.example\r\nContent-Length: 9\r\n\r\n12")
        assert b" 403 " in rest(s)


def test_a_client_that_does_not_read():
    "Its text is given up"
    with served(send_s=.3) as (e, server, port):
        s = socket.socket()
        s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        s.connect(("127.0.0.1", port))
        e.submit = lambda ids, **o: e.made.append(Flood()) or e.made[-1]
        class Flood:
            left, finish, stats = threading.Event(), None, {"prompt_tokens": 1, "new_tokens": 0}
            def cancel(h): h.left.set()
            def __iter__(h):
                while not h.left.wait(.001): yield "word " * 20_000
                h.finish = "cancelled"
        s.sendall(post(b'{"prompt": "x", "stream": true}'))
        until(lambda: e.made)
        assert e.made[0].left.wait(60)
        until(lambda: not server._desk.open)
        s.close()


def test_stop_strings():
    with served() as (e, _, port):
        e.go.set()
        long = ["a" * 60_000] * 16
        for stop, said in ((["a"] * 17, "max_stops=16"), (["a" * 1025], "max_stop=1024"), (long, "max_stop=1024")):
            for path, body in (("/v1/completions", {"prompt": "x"}), ("/v1/fill", {"text": "x __"})):
                status, answer, _ = ask(port, path, body | {"stop": stop})
                assert status == 400 and said in answer["error"]["message"] and answer["error"]["param"] == "stop"
        assert ask(port, "/v1/completions", {"prompt": "x", "stop": ["a" * 1024] * 16})[0] == 200


def brute(stops, pieces):
    "What comes of a text in pieces: each certain text, the end included"
    held, out = "", []
    for piece in pieces:
        text = held + piece
        if found := [i for s in stops if (i := text.find(s)) >= 0]: return [*out, text[:min(found)]], True
        keep = max((n for s in stops for n in range(1, len(s)) if text.endswith(s[:n])), default=0)
        held = text[len(text) - keep:]
        out.append(text[:len(text) - keep])
    return out, False


def test_stop_strings_are_found_where_a_plain_search_finds_them():
    rng = random.Random(0)
    some = lambda letters, most: "".join(rng.choice(letters) for _ in range(rng.randint(0, most)))
    for _ in range(1500):
        stops, pieces = [some("ab", 6) for _ in range(rng.randint(0, 3))], [some("abc", 5) for _ in range(8)]
        row, out = RowText(None, stops), []
        for piece in pieces:
            out.append(row._certain(piece))
            if row.ended: break
        assert (out, row.ended) == brute([s for s in stops if s], pieces), (stops, pieces)


def test_a_stop_string_is_gone_back_in_at_most_once_a_character():
    class Counted(StopText):
        steps = 0
        def _border(self, n):
            self.steps += 1
            return super()._border(n)
    stop, text = Counted("a" * 60_000 + "b"), "aaaaaaaaac" * 200 + "a" * 2000 + "c"
    assert stop.push(text) is None and 0 < stop.steps <= len(text) and len(stop.borders) < 2100


def test_a_short_prompt_waits_for_one_long_one():
    "And a prompt that is too long for any tokenizer to make fit is not tokenized at all"
    with served() as (e, _, port), cf.ThreadPoolExecutor(8) as pool:
        e.go.set()
        e.gates[900] = threading.Event()
        def put(n): return pool.submit(ask, port, "/v1/completions", {"prompt": "x" * n})
        asked = [put(900)]
        until(lambda: e.read == [900])
        asked += [put(n) for n in (901, 902)]
        queue = lambda: len(e.server._desk.turns.queue)
        until(lambda: queue() == 2)
        asked.append(put(3))
        until(lambda: queue() == 3)
        assert ask(port)[0] == 200                                       # the loop is free
        status, answer, _ = ask(port, "/v1/completions", {"prompt": "x" * 32_001})
        assert status == 400 and "max_prompt=32000" in answer["error"]["message"]
        many = [{"role": "user", "content": "x" * 20_000}] * 2
        status, answer, _ = ask(port, "/v1/chat/completions", {"messages": many})
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
        assert ask(port, "/v1/fill", {"text": "__" + "x" * 32_000})[0] == 400
        # who hangs up while waiting is not waited for
        s = sent(port, post(b'{"prompt": "xxxx"}'))
        until(lambda: queue() == 4)
        s.close()
        until(lambda: e.server._desk.places == 4)
        e.gates[900].set()
        assert [a.result()[0] for a in asked] == [200] * 4 and e.read == [900, 3, 901, 902]


def test_prompts_that_wait_are_counted():
    with served(max_waiting=3) as (e, _, port), cf.ThreadPoolExecutor(8) as pool:
        e.go.set()
        e.gates[5] = threading.Event()
        asked = [pool.submit(ask, port, "/v1/completions", {"prompt": "12345"}) for _ in range(3)]
        until(lambda: e.server._desk.places == 3)
        status, answer, headers = ask(port, "/v1/completions", {"prompt": "x"})
        assert (status, answer["error"]["code"], headers["retry-after"]) == (503, "overloaded", "1")
        e.gates[5].set()
        assert [a.result()[0] for a in asked] == [200] * 3


BODIES = [
    b"", b"[" * 100_000, b'{"prompt":' * 50_000, b'{"prompt": "x", "max_tokens": ' + b"9" * 9000 + b"}",
    b'{"prompt": "x", "max_tokens": 1e999}', b'{"prompt": "x", "temperature": NaN}', b'{"prompt": "x", "seed": 9e99}',
    b'{"prompt": "\xff\xfe"}', b"\xff\xfe\x00", b'{"prompt": "\\ud800"}', b'{"prompt": "x", "n": 1000000}',
    b'{"prompt": ' + json.dumps(["x"] * 65).encode() + b"}", b'{"prompt": [[]]}', b'{"prompt": [1, "x"]}',
    b"null", b"7",
    b'{"prompt": "x", "model": "' + b"m" * 90_000 + b'"}',
    b'{"messages": ' + json.dumps([{"role": "user"}] * 9999).encode() + b"}",
    b'{"text": "' + b"__ " * 9999 + b'"}', b"\x00" * 1000,
]


def test_bodies_that_are_no_request():
    with served() as (e, _, port):
        e.go.set()
        for path in ("/v1/completions", "/v1/chat/completions", "/v1/fill"):
            for body in BODIES:
                status, answer, _ = ask(port, path, raw=body)
                assert 400 <= status < 500 and answer["error"]["message"], (path, body[:40])
                assert len(answer["error"]["message"]) < 400, (path, body[:40])
        assert not e.made and ask(port)[0] == 200


LINES = [
    b"", b"\r\n" * 500, b"SSH-2.0-OpenSSH\r\n\r\n", b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01" * 30,
    b"GET / HTTP/1.1\r\nHost: localhost\r\nA: " + b"a" * 90_000, b"GET /" + b"a" * 90_000 + b" HTTP/1.1\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost : x\r\n\r\n", b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
    b"GET /\xff HTTP/1.1\r\nHost: x\r\n\r\n",
    b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
    b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9999999999999999999\r\n\r\n",
    b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nabc",
    b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: gzip, chunked\r\n\r\n",
]


def test_what_is_no_http(caplog):
    "Refused in the same shape, and written into the log a few times at most"
    with served(header_s=.3, body_s=.3, keep_alive_s=.3, log_lines=5) as (_, _, port):
        for line in LINES:
            answer = rest(sent(port, line))
            head, _, body = answer.partition(b"\r\n\r\n")
            # (a connection that is reset has said its part before)
            if not answer: continue
            assert head[9:10] == b"4" or head[9:12] == b"501" and b"gzip" in line, (line[:60], head)
            assert json.loads(body)["error"]["message"]
        before = len(caplog.text)
        for _ in range(200): rest(sent(port, b"nonsense\r\n\r\n"))
        until(lambda: ask(port)[0] == 200)
    assert len(caplog.text) - before < 2000


def test_requests_one_behind_the_other():
    with served() as (e, _, port):
        e.go.set()
        body = post(b'{"prompt": "x"}')
        last = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
        answer = rest(sent(port, body * 5 + last))
        assert answer.count(b"HTTP/1.1 200 ") == 6 and answer.count(b'"text_completion"') == 5
        assert b'"status":"ok"' in answer[-80:]
        # hanging up in the middle of them
        for n in range(1, 6): sent(port, (body * n)[:-1]).close()
        assert ask(port)[0] == 200


def ends(s):
    "The events of a stream, as a client reads them"
    events = [line[6:] for line in rest(s).decode().replace("\r\n", "\n").split("\n") if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    return [json.loads(x) for x in events[:-1]]


@pytest.mark.parametrize("cut", [False, True], ids=["in time", "cut"])
def test_sigterm_drains(cut):
    "A stream comes to its end, or is cut at the time's; whoever is new is told to go elsewhere; the engine is free"
    e = Engine()
    server = serve(e, port=0, background=True, name="typist", drain_s=.5 if cut else 60)
    port = int(server.url.rsplit(":", 1)[1])
    chat = last(post(b'{"messages": [{"role": "user", "content": "x"}], "stream": true}'))
    texts = last(post(b'{"prompt": "x", "n": 2, "stream": true}'))
    streams = [sent(port, texts), sent(port, chat.replace(b"/v1/completions", b"/v1/chat/completions"))]
    whole = sent(port, last(post(b'{"prompt": "x"}')))
    until(lambda: len(e.made) == 4)
    told = []
    def terminate():
        until(lambda: signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)
        until(lambda: server._desk.draining)
        told.append(ask(port, "/v1/completions", {"prompt": "x"}))
        told.append(ask(port))
        if not cut: e.go.set()
    thread = threading.Thread(target=terminate)
    thread.start()
    server.wait()
    thread.join()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    for status, answer, headers in told:
        assert (status, answer["error"]["code"]) == (503, "closing") and int(headers["retry-after"]) >= 1
    for s in streams:
        chunks = ends(s)
        said = [c["finish_reason"] for chunk in chunks for c in chunk["choices"] if c["finish_reason"]]
        assert said and set(said) == {"length" if cut else "stop"} and not any("error" in c for c in chunks)
    answer = rest(whole)
    if cut: assert b" 503 " in answer[:14] and b"retry-after" in answer
    else: assert b" 200 " in answer[:14] and b'"finish_reason":"stop"' in answer
    assert server._closed.locked() and server._desk.engine is None


def test_the_token_is_in_no_log_and_no_repr(caplog):
    caplog.set_level(logging.DEBUG)
    said = []
    logs = [logging.getLogger(log) for log in ("uvicorn", "uvicorn.error", "uvicorn.access", "asyncio", "fastapi")]
    for log in logs: log.setLevel(1)
    try:
        with served(token="sesame-open-42", keep_alive_s=.2) as (e, server, port):
            e.go.set()
            right = post(b'{"prompt": "x"}').replace(b"Host", b"Authorization: Bearer sesame-open-42\r\nHost")
            for s in (right, right.replace(b"42", b"43"), right[:-1] + b"x", right.replace(b"/v1", b"/no")):
                rest(sent(port, s))
            rest(sent(port, right.replace(b"Content-Length", b"\x00")))
            e.submit = lambda *a, **o: 1 / 0
            rest(sent(port, right))
            app = server._loop.config.app
            said += [repr(server), server._repr_html_(), str(server.limits), repr(app), repr(app.user_middleware)]
            said += [repr(server._loop.config), repr(server._loop), repr(server._desk)]
    finally:
        for log in logs: log.setLevel(0)
    # (what made the errors is there)
    assert "ZeroDivisionError" in caplog.text
    assert "sesame" not in caplog.text + "".join(said)
    with serve(Engine(), port=0, token=True, background=True) as server: pass
    assert server.token not in caplog.text + repr(server)


def test_a_call_that_waits_says_the_address_and_logs_none(caplog):
    caplog.set_level(logging.INFO)
    said = []
    def say(text):
        said.append(text)
        raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt): serve(Engine(), port=0, token="sesame-open-42", say=say)
    assert "/#token=sesame-open-42" in said[0] and "sesame" not in caplog.text
    assert "bmlab-serve" not in {t.name for t in threading.enumerate()}


def test_options():
    spec = spec_from_file_location("serve_script", ROOT / "scripts/serve.py")
    spec.loader.exec_module(script := module_from_spec(spec))
    script.add_limits(p := argparse.ArgumentParser())
    args = vars(p.parse_args([]))
    assert Limits(**{f.name: args[f.name] for f in dataclasses.fields(Limits)}) == Limits()
    assert p.parse_args(["--header-s", "3", "--max-connections", "9"]).max_connections == 9
    for odd in (dict(header_s=0), dict(max_stop=-1), dict(max_connections=10**9)):
        with pytest.raises(ValueError, match=[*odd][0]): serve(Engine(), port=0, **odd)
    with pytest.raises(TypeError, match="max_conections"): serve(Engine(), port=0, max_conections=3)


def test_what_serve_says_of_its_limits_is_what_they_are():
    said, limits = " ".join(serve.__doc__.split()), Limits()
    most, each = Limits(max_connections=512).connections
    for words in (
        f"A header has {limits.header_s:.0f} seconds, a body {limits.body_s:.0f}",
        f"kept for {limits.keep_alive_s:.0f} without a request",
        f"{limits.send_s:.0f} while its client takes nothing",
        f"{most} may be open, {each} of them from one address",
        f"at most {limits.max_stops} stop strings of {limits.max_stop:,} characters",
        f"all tools together {limits.max_grammar:,}",
        f"answers have {limits.drain_s:.0f} seconds to end",
        f"at most {limits.log_lines} lines of a kind a minute",
    ): assert words in said, words
    named = re.findall(r"`(\w+)`", said)
    assert set(named) == {f.name for f in dataclasses.fields(Limits)} - {"max_header"}


@pytest.mark.slow
def test_a_thousand_sockets_and_a_megabyte_of_stop_strings():
    "1,200 sockets with half a header, and 16 stop strings of 60 kB: another client is served all the while"
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(8192, before[1]), before[1]))
    try:
        with served(max_connections=512, max_stop=60_001) as (e, server, port):
            e.go.set()
            held = [sent(port, HALF) for _ in range(1200)]
            assert [ask(port)[0] for _ in range(50)] == [200] * 50
            until(lambda: sum(map(gone, held)) >= 1200 - 256)
            assert len(server._loop.config.http_protocol_class.lobby.inside) <= 512
            for s in held: s.close()
            body = {"prompt": "x", "stop": ["a" * 60_000 + c for c in "bcdefghijklmnopq"]}
            assert ask(port, "/v1/completions", body)[0] == 200
            row = RowText(None, body["stop"])
            assert "".join(row._certain("a" * 10) for _ in range(3000)) == "" and len(row.held) == 30_000
    finally: resource.setrlimit(resource.RLIMIT_NOFILE, before)

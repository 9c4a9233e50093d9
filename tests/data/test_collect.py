"Collecting from servers on this machine: kills, paces, hostile answers, readers of the result; Debian packages."
import contextlib, email.utils, encodings.aliases, gzip, importlib, io, itertools, json, os, random, re, signal
import textwrap, threading, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from bmlab.data.collect import Fetcher, Limits, Robots, Skipped, collect, index_records, page_text
from bmlab.data.samples import fetch_deb, sample_texts
from bmlab.files import FileError
from bmlab.train.forkserver import start_process

module = importlib.import_module("bmlab.data.collect")

warcio = pytest.importorskip("warcio")
from warcio.archiveiterator import ArchiveIterator  # noqa: E402

QUICK = dict(gap_s=0, backoff_s=0.02, retries=1, timeout_s=60)


class Site(ThreadingHTTPServer):
    "`pages`: path → bytes | (status, headers, bytes) | function of the handler"
    daemon_threads = True

    def __init__(self, pages=()):
        self.pages, self.asked, self.agents = dict(pages), [], set()

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            def do_GET(self): self.server.answer(self)
            def log_message(self, *args): pass
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def answer(self, to):
        self.asked.append((time.monotonic(), to.path))
        self.agents.add(to.headers["User-Agent"])
        page = self.pages.get(to.path, (404, {}, b""))
        if callable(page): page = page(to)
        if page is None:
            to.close_connection = True
            return
        status, headers, body = page if isinstance(page, tuple) else (200, {}, page)
        with contextlib.suppress(ConnectionError):
            to.send_response(status)
            usual = {"Content-Type": "text/html; charset=utf-8", "Content-Length": str(len(body))}
            for name, value in (usual | headers).items():
                to.send_header(name, value)
            to.end_headers()
            to.wfile.write(body)

    def handle_error(self, *_): pass
    def paths(self): return [p for _, p in self.asked if p != "/robots.txt"]


@pytest.fixture
def site():
    made = []

    def make(pages=()):
        made.append(Site(pages))
        return made[-1]
    yield make
    for s in made:
        s.shutdown()
        s.server_close()


def numbered(n, slow=0.0):
    def page(i):
        def answer(to):
            time.sleep(slow)
            return f"<p>第{i}页 {'x' * 5000}</p>".encode()
        return answer
    return {f"/{i}": page(i) for i in range(n)}


def rows(folder):
    return [
        json.loads(line)
        for f in sorted(Path(folder).glob("pages/*.jsonl"))
        for line in f.read_text(encoding="utf-8").splitlines()
    ]


def records(folder):
    out = []
    for path in sorted(Path(folder).glob("pages/*.warc.gz")):
        with open(path, "rb") as f:
            for r in ArchiveIterator(f):
                body = r.content_stream().read()
                if r.rec_type == "response":
                    out.append((r.rec_headers.get_header("WARC-Target-URI"), body, r.http_headers))
    return out


# robots.txt

RFC = """User-Agent: *
Disallow: *.gif$
Disallow: /example/
Allow: /publications/

User-Agent: foobot
Disallow:/
Allow:/example/page.html
Allow:/example/allowed.gif

User-Agent: barbot
User-Agent: bazbot
Disallow: /example/page.html

User-Agent: quxbot
"""


@pytest.mark.parametrize("agent, path, allowed", [
    ("foobot", "/example/page.html", True), ("foobot", "/example/allowed.gif", True), ("foobot", "/x", False),
    ("barbot", "/example/page.html", False), ("bazbot", "/example/page.html", False), ("bazbot", "/a.gif", True),
    ("quxbot", "/anything", True), ("other", "/a.gif", False), ("other", "/a.gif?x", True),
    ("other", "/example/x", False), ("other", "/publications/x.gif", True), ("other", "/", True),
])
def test_the_examples_of_rfc_9309(agent, path, allowed):
    assert Robots(RFC, agent).allows("https://example.com" + path) == allowed


def test_the_longest_match_of_rfc_9309():
    rules = "User-Agent: foobot\nAllow: /example/page/\nDisallow: /example/page/disallowed.gif\n"
    assert [
        Robots(rules, "foobot").allows("http://x" + p) for p in ("/example/page/a", "/example/page/disallowed.gif")
    ] == [True, False]


def test_patterns_match_as_their_regular_expressions():
    draw = random.Random(0)
    for _ in range(20_000):
        pattern = "/" + "".join(draw.choice("ab*/") for _ in range(draw.randrange(6))) + draw.choice(["", "$"])
        path = "/" + "".join(draw.choice("ab/") for _ in range(draw.randrange(7)))
        regex = "".join(".*" if c == "*" else re.escape(c) for c in pattern.removesuffix("$")) + (
            "$" if pattern.endswith("$") else ""
        )
        assert module._fits(pattern, path) == bool(re.match(regex, path)), (pattern, path)


def test_robots_of_any_shape():
    for text in ("\ufeffUser-agent: *\r\nDisallow: "
                 "/x\r\n", "user-AGENT:*\rdisallow : /x # "
                           "why", "junk\n:\nUser-agent: *\nSitemap: http://s\nDisallow: /x\nCrawl-delay: soon"):
        assert not Robots(text).allows("http://h/x") and Robots(text).allows("http://h/y") and Robots(text).delay_s == 0
    assert Robots("\0\xff" * 1000).allows("http://h/x")
    assert not Robots("User-agent: *\nDisallow: /a%2fb\nDisallow: /书").allows("http://h/a%2Fb") and not Robots(
        "User-agent: *\nDisallow: /书"
    ).allows("http://h/%E4%B9%A6/1")
    assert Robots("User-agent: *\nDisallow: /a%2fb").allows("http://h/a/b")
    merged = Robots("User-agent: bmlab\nDisallow: /1\n\nUser-agent: *\nDisallow: /2\n\nUser-agent: BMLAB\nDisallow: /3")
    assert [merged.allows(f"http://h/{n}") for n in (1, 2, 3)] == [False, True, False]


def test_what_is_forbidden_is_never_asked_for(site, tmp_path):
    home = site(
        {
            "/robots.txt": b"User-agent: bmlab\nDisallow: /no",
            "/no/1": b"secret",
            "/to": (302, {"Location": "/no/1"}, b""),
            "/yes": b"<p>fine</p>",
        }
    )
    found = collect([home.url + p for p in ("/no/1", "/to", "/yes", "/no%2f1")], tmp_path, **QUICK)
    assert found.outcome.tolist() == ["robots", "robots", "a page", "robots"] and home.paths() == ["/to", "/yes"]
    assert home.agents == {"bmlab/1.0"} and [a[1] for a in home.asked].count("/robots.txt") == 1


def test_robots_behind_a_redirect_and_without_end(site, tmp_path):
    def long(to):
        with contextlib.suppress(ConnectionError):
            to.send_response(200)
            to.send_header("Content-Type", "text/plain")
            to.end_headers()
            to.wfile.write(b"User-agent: *\nDisallow: /no\n")
            while True: to.wfile.write(b"# and so on\n" * 4000)
    other = site({"/rules": long})
    home = site({"/robots.txt": (301, {"Location": other.url + "/rules"}, b""), "/no": b"x", "/yes": b"x"})
    assert collect([home.url + "/no", home.url + "/yes"], tmp_path, **QUICK).outcome.tolist() == ["robots", "a page"]


# pace

def test_the_pace_of_each_host(site, tmp_path):
    "A redirect into another host waits for that host's turn; the hosts go side by side"
    both, gap = threading.Barrier(2, timeout=60), 0.15

    def meets(to):
        both.wait()
        return b"<p>met</p>"
    one = site(numbered(3) | {"/meet": meets})
    two = site(numbered(2) | {"/meet": meets, "/to": (302, {"Location": one.url + "/0"}, b"")})
    collect(
        [one.url + "/meet", two.url + "/meet", *(one.url + f"/{i}" for i in (1, 2)), two.url + "/to", two.url + "/1"],
        tmp_path,
        **QUICK | {"gap_s": gap},
    )
    for home in (one, two):
        times = [t for t, _ in home.asked]
        assert len(times) == 5 if home is one else 4
        assert min(b - a for a, b in zip(times, times[1:])) >= gap
    assert {r["text"][:10] for r in rows(tmp_path)} >= {"<p>met</p>"} and len(rows(tmp_path)) == 6


def test_a_site_may_ask_for_a_slower_pace(site, tmp_path):
    home = site(numbered(3) | {"/robots.txt": b"User-agent: *\nCrawl-delay: 0.2"})
    collect([home.url + f"/{i}" for i in range(3)], tmp_path, **QUICK)
    times = [t for t, _ in home.asked]
    assert len(times) == 4 and min(b - a for a, b in zip(times, times[1:])) >= 0.2


def test_a_pace_too_slow_to_wait_for(site, tmp_path):
    home = site(numbered(1) | {"/robots.txt": b"User-agent: *\nCrawl-delay: 86400"})
    found = collect([home.url + "/0"], tmp_path, **QUICK)
    assert (
        found.outcome.tolist() == ["a Crawl-delay of 86400 s, beyond longest_wait_s=120"]
        and found.again.all()
        and home.paths() == []
    )


# troubles

def test_troubles_that_pass(site, tmp_path):
    def cut(to):
        to.send_response(200)
        to.send_header("Content-Type", "text/html")
        to.send_header("Content-Length", "1000")
        to.end_headers()
        to.wfile.write(b"<p>half")
    home = site(
        {
            "/500": lambda to, n=iter(range(9)): (500, {}, b"") if next(n) == 0 else b"<p>at last</p>",
            "/429": lambda to, n=iter(range(9)): (
                (
                    429,
                    {
                        "Retry-After": email.utils.format_datetime(
                            email.utils.parsedate_to_datetime("Thu, 01 Jan 2015 00:00:00 GMT")
                        )
                    },
                    b"",
                )
                if next(n) == 0
                else b"<p>at last</p>"
            ),
            "/cut": lambda to, n=iter(range(9)): cut(to) if next(n) == 0 else b"<p>at last</p>",
        }
    )
    found = collect([home.url + p for p in ("/500", "/429", "/cut")], tmp_path, **QUICK)
    assert found.outcome.tolist() == ["a page"] * 3 and [r["text"] for r in rows(tmp_path)] == ["<p>at last</p>"] * 3
    assert home.paths() == ["/500", "/500", "/429", "/429", "/cut", "/cut"]


def test_waits_grow_and_follow_retry_after(site):
    home = site({"/": (503, {}, b""), "/asks": (503, {"Retry-After": "1"}, b"")})
    with Fetcher(Limits(gap_s=0, backoff_s=0.1, retries=2)) as guest, pytest.raises(Skipped, match="status 503"):
        guest.get(home.url + "/")
    times = [t for t, p in home.asked if p == "/"]
    assert len(times) == 3 and times[1] - times[0] >= 0.1 and times[2] - times[1] >= 0.2
    with Fetcher(Limits(gap_s=0, backoff_s=0, retries=1)) as guest, pytest.raises(Skipped):
        guest.get(home.url + "/asks")
    times = [t for t, p in home.asked if p == "/asks"]
    assert len(times) == 2 and times[1] - times[0] >= 1


def test_hostile_answers(site, tmp_path):
    def stream(piece, pause=0.0, **headers):
        def answer(to):
            with contextlib.suppress(ConnectionError):
                to.send_response(200)
                to.send_header("Content-Type", "text/html")
                for k, v in headers.items(): to.send_header(k.replace("_", "-"), v)
                to.end_headers()
                while True:
                    to.wfile.write(piece)
                    to.wfile.flush()
                    time.sleep(pause)
        return answer
    bomb = gzip.compress(b"<p>" + bytes(30_000_000))
    home = site(
        {
            "/endless": stream(b"<p>more</p>" * 6000),
            "/drip": stream(b"drip ", 0.03),
            "/bomb": (200, {"Content-Encoding": "gzip", "Content-Length": str(len(bomb))}, bomb),
            "/lie": (200, {"Content-Encoding": "gzip"}, b"not gzip"),
            "/loop": (302, {"Location": "/loop"}, b""),
            "/nowhere": (302, {}, b""),
            "/file": (302, {"Location": "file:///etc/passwd"}, b""),
            "/odd": (302, {"Location": "http://[:::/"}, b""),
            "/type": (200, {"Content-Type": "video/mp4"}, b"x"),
            "/empty": b"",
            "/204": (204, {}, b""),
            "/part": (206, {}, b"x"),
            **{f"/hop{n}": (307, {"Location": f"/hop{n + 1}"}, b"") for n in range(20)},
        }
    )
    asked = "/endless /bomb /lie /loop /nowhere /file /odd /type /empty /204 /part /hop0 /hop14".split()
    found = (
        collect([home.url + p for p in asked], tmp_path, **QUICK | {"max_bytes": 500_000, "page_s": 30})
        .assign(path=asked)
        .set_index("path")
    )
    assert found.outcome[["/endless", "/bomb", "/empty"]].tolist() == ["a page"] * 3
    assert (
        found.truncated.dropna().to_dict() == {"/endless": "length", "/bomb": "length"}
        and found.bytes[["/endless", "/bomb"]].tolist() == [500_000] * 2
    )
    assert found.outcome[["/loop", "/nowhere", "/file", "/type", "/204", "/part", "/hop0"]].tolist() == [
        "redirect loop",
        "status 302",
        "scheme file",
        "type video/mp4",
        "status 204",
        "status 206",
        "more than 5 redirects",
    ]
    assert (
        found.outcome["/odd"].startswith("no address")
        and found.outcome["/lie"].startswith("DecodingError")
        and found.outcome["/hop14"] == "more than 5 redirects"
    )
    assert found.again[found.again].index.tolist() == ["/lie"]
    drip = collect([home.url + "/drip"], tmp_path / "drip", **QUICK | {"page_s": 0.5})
    assert drip.outcome.tolist() == ["a page"] and drip.truncated.tolist() == ["time"] and drip.bytes[0] > 0


def test_a_dead_host_is_left_alone(site, tmp_path):
    dead = site()
    dead.shutdown()
    dead.server_close()
    alive = site(numbered(3))
    urls = [dead.url + f"/{i}" for i in range(20)] + [alive.url + f"/{i}" for i in range(3)]
    found = collect(urls, tmp_path, **QUICK | {"failures": 2, "retries": 0}).set_index("url")
    assert (
        found.outcome[urls[0]].startswith("robots.txt cannot be had: ConnectError")
        and found.outcome[urls[2]] == "left to a later run: 2 addresses of this host in a row failed"
    )
    assert found.again[urls[:20]].all() and (found.outcome[urls[20:]] == "a page").all()


def test_nothing_from_outside_leads_inside(site, tmp_path, monkeypatch):
    "A page or sitemap of the net (host 127.0.0.1 plays it) may not lead into this network (another port plays it)"
    inner = site({"/": b"secret"})
    outer = site({"/to": (302, {"Location": inner.url + "/"}, b"")})
    outer.pages["/sitemap.xml"] = (
        f"<urlset><url><loc>{inner.url}/</loc></url><url><loc>{outer.url}/to</loc></url></urlset>".encode()
    )
    monkeypatch.setattr(module, "_is_inside", lambda url: url.startswith(inner.url))
    found = collect(outer.url + "/sitemap.xml", tmp_path, **QUICK)
    assert (
        found.outcome.tolist()
        == ["named from outside, but inside this network", "redirect from outside into this network"]
        and inner.asked == []
    )


def test_one_odd_answer_does_not_end_it(site, tmp_path, monkeypatch):
    home, real = site(numbered(3)), module._request

    def odd(client, limits, stop, url, *rest):
        if url.endswith("/1"): raise ValueError("odd")
        return real(client, limits, stop, url, *rest)
    monkeypatch.setattr(module, "_request", odd)
    assert collect([home.url + f"/{i}" for i in range(3)], tmp_path, **QUICK).outcome.tolist() == [
        "a page",
        "unexpected ValueError: odd",
        "a page",
    ]


def test_sitemaps_that_name_themselves_and_files(site, tmp_path, caplog):
    home = site(numbered(2))
    named = [f"{home.url}/sitemap.xml", "/etc/passwd", f"{home.url}/s.xml.gz"]
    maps = "".join(f"<sitemap><loc>{place}</loc></sitemap>" for place in named)
    home.pages |= {
        "/sitemap.xml": f"<sitemapindex>{maps}</sitemapindex>".encode(),
        "/s.xml.gz": (
            200,
            {"Content-Type": "application/gzip"},
            gzip.compress(
                f"<urlset><url><loc>{home.url}/0</loc></url><url><loc> {home.url}/1 </loc></url></urlset>".encode()
            ),
        ),
    }
    assert collect(home.url + "/sitemap.xml", tmp_path / "a", **QUICK).outcome.tolist() == ["a page"] * 2
    assert "/etc/passwd" in caplog.text
    (tmp_path / "urls.txt").write_text(f"# two pages\n{home.url}/0\n\n{home.url}/1#part\n{home.url}/1\n")
    assert len(collect(tmp_path / "urls.txt", tmp_path / "b", **QUICK)) == 2
    laughs = (
        "<!DOCTYPE x [<!ENTITY a '"
        + "ha" * 1000
        + "'>"
        + "".join(f"<!ENTITY {chr(98 + i)} '{('&' + chr(97 + i) + ';') * 100}'>" for i in range(8))
        + "]><urlset><url><loc>&i;</loc></url></urlset>"
    )
    home.pages["/laugh.xml"] = laughs.encode()
    with pytest.raises(ValueError, match="cannot be read"): collect(home.url + "/laugh.xml", tmp_path / "c", **QUICK)


# going on

RUN = textwrap.dedent("""
    import json, sys
    from bmlab.data.collect import collect
    job = json.loads(sys.argv[1])
    collect(job.pop("urls"), job.pop("into"), **job)
    """)


def start(**job):
    "A process that an interrupt reaches, also where this one ignores them, as in a shell's background"
    return start_process(RUN, [json.dumps(job)], log=job["into"] + ".log")


@pytest.mark.parametrize("format", ["jsonl", "warc"])
def test_a_kill_loses_nothing_and_repeats_nothing(site, tmp_path, format):
    "Killed after some pages, again and again: every page once, whole, and hardly any asked for twice"
    home, kills = site(numbered(30, slow=0.01)), 0
    urls = [home.url + f"/{i}" for i in range(30)]
    job = dict(urls=urls, into=str(tmp_path), format=format, gap_s=0.01, max_file_bytes=40_000)
    for stop_at in (4, 15) if format == "jsonl" else (8,):
        process = start(**job)
        deadline = time.monotonic() + 60
        while len(home.paths()) < stop_at and process.poll() is None and time.monotonic() < deadline: time.sleep(0.002)
        if process.poll() is None:
            process.kill()
            kills += 1
        process.wait(60)
    collect(job.pop("urls"), job.pop("into"), **job)
    got = [r["requested"] for r in rows(tmp_path)] if format == "jsonl" else [u for u, _, _ in records(tmp_path)]
    assert sorted(got) == sorted(urls) and kills >= 1
    # the one page on its way when the kill came
    assert len(home.paths()) <= 30 + kills
    if format == "jsonl":
        assert (
            all(r["text"].endswith("x</p>") for r in rows(tmp_path)) and len(list(tmp_path.glob("pages/*.jsonl"))) > 1
        )
    log = [json.loads(line) for line in (tmp_path / "collect.log").read_text().splitlines()]
    assert sorted(r["key"] for r in log) == sorted(urls)


def test_an_interrupt_ends_it_soon_and_well(site, tmp_path):
    home = site(numbered(50))
    process = start(urls=[home.url + f"/{i}" for i in range(50)], into=str(tmp_path), gap_s=0.3)
    deadline = time.monotonic() + 60
    while len(home.paths()) < 3 and time.monotonic() < deadline: time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) != 0 and "KeyboardInterrupt" in Path(f"{tmp_path}.log").read_text()
    n = len(rows(tmp_path))
    assert 1 <= n < 50 and len((tmp_path / "collect.log").read_text().splitlines()) == n
    assert len(collect([home.url + f"/{i}" for i in range(10)], tmp_path, **QUICK)) == 10 and len(rows(tmp_path)) == 10


@pytest.mark.parametrize("file, text, said", [
    ("collect.json", "{", "collect.json"), ("collect.json", '{"format": 1}', "collect.json: format: 1"),
    ("collect.log", "[1]\n", "line 1 of"), ("collect.log", '{"key": "a"}\n', "line 1 of"),
    ("collect.log", "x\n", "line 1 of"),
    ("collect.log", '{"key": "a", "again": false, "file": "../x", "end": -9}\n', "line 1 of"),
])
def test_a_folder_that_it_did_not_write_is_named(tmp_path, file, text, said):
    (tmp_path / file).write_text(text)
    with pytest.raises((FileError, RuntimeError), match=said): collect([], tmp_path, **QUICK)
    (tmp_path / file).unlink()
    assert not len(collect([], tmp_path, **QUICK))                          # and it is let go


def test_one_process_a_folder(site, tmp_path):
    home = site(numbered(40))
    process = start(urls=[home.url + f"/{i}" for i in range(40)], into=str(tmp_path), gap_s=2)
    deadline = time.monotonic() + 60
    while not home.paths() and time.monotonic() < deadline: time.sleep(0.01)
    with pytest.raises(RuntimeError, match="another process collects into"):
        collect([home.url + "/0"], tmp_path, **QUICK)
    process.kill()
    process.wait(60)
    collect([home.url + f"/{i}" for i in range(3)], tmp_path, **QUICK)                # the lock went with the process


def test_a_machine_that_lost_power(site, tmp_path):
    "The log kept lines whose pages were lost: those pages come again, the rest does not"
    home = site(numbered(6))
    urls = [home.url + f"/{i}" for i in range(6)]
    collect(urls, tmp_path, **QUICK)
    pages = tmp_path / "pages/00000.jsonl"
    os.truncate(pages, pages.stat().st_size - 6000)
    home.asked.clear()
    collect(urls, tmp_path, **QUICK)
    assert sorted(home.paths()) == ["/4", "/5"] and sorted(r["requested"] for r in rows(tmp_path)) == urls
    pages.unlink()
    home.asked.clear()
    assert len(collect(urls, tmp_path, **QUICK)) == 6 and len(home.paths()) == 6 and len(rows(tmp_path)) == 6


def test_a_first_page_cut_off_leaves_no_empty_file(tmp_path):
    (tmp_path / "pages").mkdir()
    (tmp_path / "pages/00000.jsonl").write_text('{"id": "1')
    (tmp_path / "urls.txt").write_text("ftp://x/\n", encoding="utf-8-sig")
    assert collect(tmp_path / "urls.txt", tmp_path, **QUICK).outcome.tolist() == ["scheme ftp"] and not list(
        (tmp_path / "pages").iterdir()
    )  # (a byte-order mark is no part of an address)


def test_a_full_disk_says_so_and_the_folder_goes_on(site, tmp_path, monkeypatch):
    home = site(numbered(4))
    urls = [home.url + f"/{i}" for i in range(4)]
    real, calls = module._line, itertools.count()

    def full(page, about):
        if next(calls) == 2: raise OSError(28, "No space left on device")
        return real(page, about)
    monkeypatch.setattr(module, "_line", full)
    with pytest.raises(OSError, match="No space left"): collect(urls, tmp_path, **QUICK)
    collect(urls, tmp_path, **QUICK)
    assert sorted(r["requested"] for r in rows(tmp_path)) == urls


# what is written

def test_provenance(site, tmp_path):
    home = site(
        {
            "/a": (301, {"Location": "/b"}, b""),
            "/b": (
                200,
                {
                    "Content-Type": "text/html; charset=gb2312",
                    "Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT",
                    "ETag": '"x"',
                    "X-Robots-Tag": "noai",
                    "Content-Language": "zh",
                },
                "<p>朱镕基</p>".encode("gbk"),
            ),
        }
    )
    collect(
        [home.url + "/a"],
        tmp_path,
        about={"source": "test", "licence": "CC BY 4.0"},
        contact="https://example.org/bot",
        **QUICK,
    )
    row, = rows(tmp_path)
    assert (
        row["text"] == "<p>朱镕基</p>"
        and row["charset"] == "gb18030"
        and row["url"] == home.url + "/b"
        and row["requested"] == home.url + "/a"
        and row["redirects"] == [home.url + "/a"]
    )
    assert (row["language"], row["robots_tag"], row["etag"], row["licence"], row["source"]) == (
        "zh",
        "noai",
        '"x"',
        "CC BY 4.0",
        "test",
    ) and re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", row["fetched"])
    made = json.loads((tmp_path / "collect.json").read_text())
    assert (
        made["limits"]["contact"] == "https://example.org/bot"
        and made["about"]["licence"] == "CC BY 4.0"
        and home.agents == {"bmlab/1.0 (+https://example.org/bot)"}
    )


def test_warc_files_hold_what_came(site, tmp_path):
    body = "<p>书</p>".encode()
    home = site(
        {
            "/z": (
                200,
                {
                    "Content-Encoding": "gzip",
                    "Content-Length": str(len(packed := gzip.compress(body))),
                    "X-Odd": "\xe9",
                },
                packed,
            )
        }
    )
    collect([home.url + "/z"], tmp_path / "w", format="warc", about={"licence": "CC0"}, **QUICK)
    (url, got, headers), = records(tmp_path / "w")
    assert (
        (url, got) == (home.url + "/z", body)
        and headers.get_header("Content-Length") == str(len(body))
        and headers.get_header("X-Crawler-Content-Encoding") == "gzip"
        and headers.get_header("Content-Encoding") is None
    )
    with open(next((tmp_path / "w").glob("pages/*.warc.gz")), "rb") as f:
        first = next(iter(ArchiveIterator(f, check_digests="raise")))
        assert first.rec_type == "warcinfo" and b"licence: CC0" in first.content_stream().read()


def test_datatrove_reads_both(site, tmp_path):
    readers = pytest.importorskip("datatrove.pipeline.readers")
    home = site(numbered(3))
    urls = [home.url + f"/{i}" for i in range(3)]
    for format in ("jsonl", "warc"): collect(urls, tmp_path / format, format=format, about={"licence": "CC0"}, **QUICK)
    docs = list(readers.JsonlReader(str(tmp_path / "jsonl/pages")).run())
    assert sorted(d.metadata["url"] for d in docs) == urls and all(
        d.metadata["licence"] == "CC0" and "第" in d.text for d in docs
    )
    assert sorted(u for u, _, _ in records(tmp_path / "warc")) == urls
    try: reader = readers.WarcReader(str(tmp_path / "warc/pages"), compression="gzip")
    except ImportError: return  # it wants libmagic and another detector of encodings
    docs = list(reader.run())
    assert sorted(d.metadata["url"] for d in docs) == urls and all("第" in d.text for d in docs)


def test_an_index_in_any_form(tmp_path):
    record = {"url": "http://x/", "filename": "a.warc.gz", "offset": "10", "length": "20", "mime": "text/html"}
    line = json.dumps(record)
    cases = (
        ("i.jsonl", line + "\n"), ("i.cdxj", "!OpenWayback-CDXJ 1.0\norg,x)/ 2026 " + line), ("i.cdxj.gz", None),
    )
    for name, data in cases:
        # an index packed in pieces
        packed = gzip.compress(line.encode() + b"\n") + gzip.compress(line.encode()) if data is None else data.encode()
        (tmp_path / name).write_bytes(packed)
        assert index_records(tmp_path / name) == [
            {"url": "http://x/", "filename": "a.warc.gz", "offset": 10, "length": 20}
        ] * (2 if data is None else 1)
    for wrong in ({"offset": -1}, {"length": 0}, {"filename": "/etc/passwd"}, {"filename": "a/../../b"}):
        with pytest.raises(ValueError, match="unsafe place"): index_records([record | wrong])


@pytest.mark.parametrize("text", ["中文网页,标点。", "日本語のページ", "한국어 페이지", "Ünïcödé"])
def test_encodings(text):
    cases = (
        ("utf-8", "utf-8"), ("utf-16", None), ("utf-8-sig", None), ("gb18030", "gb2312"), ("cp932", "shift_jis"),
        ("cp949", "euc-kr"), ("cp1252", "iso-8859-1"),
    )
    for codec, name in cases:
        try: body = text.encode(codec)
        except UnicodeEncodeError: continue
        assert page_text(body, f"text/html; charset={name}" if name else "text/html")[0] == text
    assert page_text(text.encode() + "书".encode()[:2], "text/html") == (text, "utf-8")


def test_any_declared_encoding_gives_text():
    draw = random.Random(0)
    aliases = encodings.aliases.aliases
    for name in sorted({*aliases, *aliases.values(), "", "x-user-defined", "é", "..", "a" * 10_000}):
        body = draw.randbytes(300)
        for page in (body, b"<meta charset='" + name.encode("ascii", "ignore") + b"'>" + body):
            assert isinstance(page_text(page, f"text/html; charset={name}")[0], str), name


# packages of Debian

APT = """#!/bin/sh
echo "$@" >> "$CALLS"
case "$*" in
  *update*) exit ${UPDATE:-0};;
  *Dir::State::lists*download*) cp "$DEB" tiny_1.0_all.deb;;
  *) echo "E: Unable to locate package tiny"; exit 100;;
esac
"""


def deb(tmp_path):
    import tarfile
    box = io.BytesIO()
    with tarfile.open(fileobj=box, mode="w:gz") as tar:
        for name, text in (("./usr/a.txt", b"one"), ("./usr/b.txt", b"two")):
            entry = tarfile.TarInfo(name)
            entry.size = len(text)
            tar.addfile(entry, io.BytesIO(text))
        link = tarfile.TarInfo("./usr/c.txt")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
    parts = {"debian-binary": b"2.0\n", "data.tar.gz": box.getvalue()}
    path = tmp_path / "tiny.deb"
    path.write_bytes(
        b"!<arch>\n"
        + b"".join(
            f"{n:16}{0:<12}{0:<6}{0:<6}{100644:<8}{len(b):<10}`\n".encode() + b + b"\n" * (len(b) % 2)
            for n, b in parts.items()
        )
    )
    return path


@pytest.fixture
def apt(tmp_path, monkeypatch):
    "A machine whose apt has no lists yet"
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/apt-get").write_text(APT)
    (tmp_path / "bin/apt-get").chmod(0o755)
    places = {"DEB": deb(tmp_path), "CALLS": tmp_path / "calls", "BMLAB_CACHE": tmp_path / "cache"}
    for k, v in {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", **places}.items(): monkeypatch.setenv(k, str(v))
    return tmp_path


def test_apt_without_lists_fetches_private_ones(apt):
    folder = fetch_deb("tiny", ["usr/*.txt"])
    assert sorted(p.name for p in (folder / "usr").iterdir()) == ["a.txt", "b.txt"]                 # a link is left out
    calls = (apt / "calls").read_text().splitlines()
    assert (
        ["update" in c for c in calls] == [False, True, False]
        and "Dir::State::lists" not in calls[0]
        and "Dir::State::lists" in calls[1]
    )
    assert fetch_deb("tiny", ["usr/*.txt"]) == folder and len((apt / "calls").read_text().splitlines()) == 3
    assert not list((apt / "cache").rglob(".apt"))


def test_apt_that_fails_says_why(apt, monkeypatch):
    monkeypatch.setenv("UPDATE", "100")
    with pytest.raises(RuntimeError, match=r"(?s)could not fetch tiny: apt says: .*By hand.*apt-get download tiny"):
        fetch_deb("tiny", ["*"])
    assert not list((apt / "cache").glob("deb-tiny*"))


def test_poems_without_apt(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("BMLAB_CACHE", str(tmp_path))
    with pytest.raises(RuntimeError, match="apt-get download fortunes-zh"): sample_texts("poems")

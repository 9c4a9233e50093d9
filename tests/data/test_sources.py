"Promise: a record unpacks to no more than `limit` bytes and is never held longer; with on_error='skip' a run goes on."
import base64, gzip, json, tracemalloc, zlib

import pandas as pd
import pytest

from bmlab.data.corpus import Corpus
from bmlab.data.sources import Skipped, Source, read_source, rows_of

MB = 1 << 20
ROOM = 24 * MB      # what a reader may take with limit=MB: a few blocks, each 1,000 times as long unpacked


def zeros(n):
    "n MiB of zeros, packed"
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    return b"".join([*(packer.compress(bytes(MB)) for _ in range(n)), packer.flush()])


def warc(body, url="http://a.b/", more="", head=None):
    "A record of an archive, packed"
    head = "HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n" + more + "\r\n" if head is None else head
    body = head.encode() + body
    about = f"WARC/1.0\r\nWARC-Type: response\r\nWARC-Target-URI: {url}\r\nWARC-Record-ID: <urn:{url}>\r\n"
    about += "WARC-Date: 2020-01-01T00:00:00Z\r\nContent-Type: application/http; msgtype=response\r\n"
    return gzip.compress(about.encode() + f"Content-Length: {len(body)}\r\n\r\n".encode() + body + b"\r\n\r\n")


def page(text, **how): return warc(f"<p>{text}</p>".encode(), f"http://{text}/", **how)


def chunked(body): return f"{len(body):x}\r\n".encode() + body + b"\r\n0\r\n\r\n"


BOMBS = {
    "packed body": lambda: warc(zeros(64), more="Content-Encoding: gzip\r\n"),
    "packed twice": lambda: warc(zeros(64), more="Content-Encoding: gzip\r\n"),
    "in one chunk": lambda: warc(chunked(zeros(64)), more="Transfer-Encoding: chunked\r\nContent-Encoding: gzip\r\n"),
    "a chunk": lambda: warc(chunked(bytes(64 * MB)), more="Transfer-Encoding: chunked\r\n"),
    "plain": lambda: warc(bytes(64 * MB)),
    "deflate": lambda: warc(zlib.compress(bytes(64 * MB)), more="Content-Encoding: deflate\r\n"),
    "headers": lambda: warc(b"", head="HTTP/1.1 200 OK\r\n" + ("a: " + "b" * 500 + "\r\n") * 8000),
    "a header": lambda: warc(b"", head="HTTP/1.1 200 OK\r\na: " + "b" * (64 * MB)),
    "header of the record": lambda: gzip.compress(b"WARC/1.0\r\na: " + b"b" * (64 * MB)),
    "no archive": lambda: gzip.compress(b"\n" * (8 * MB)),
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_record_that_unpacks_to_much_is_named_and_the_next_is_read(tmp_path, bomb):
    (tmp_path / "a.warc.gz").write_bytes(page("one") + BOMBS[bomb]() + page("two"))
    skipped, found = Skipped(), []
    source = Source(name="w", kind="warc", path=tmp_path / "a.warc.gz", limit=MB, on_error="skip")
    tracemalloc.start()
    with open(tmp_path / "a.warc.gz", "rb") as f:
        for _, text, more in rows_of(source, f, "a.warc.gz", skipped): found.append(more["url"])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found == ["http://one/", "http://two/"] and peak < ROOM, (found, peak / MB)
    if bomb != "no archive":
        assert skipped.counts == {"w": 1} and skipped.first["w"][0][:1] == ["a.warc.gz"], skipped.first
        strict = Source(name="w", kind="warc", path=tmp_path / "a.warc.gz", limit=MB)
        with pytest.raises(ValueError, match=r"file a.warc.gz: record 2.* more than"): list(read_source(strict))


@pytest.mark.parametrize("damage", ["cut", "bits", "zeros"])
def test_a_damaged_member_of_an_archive_does_not_take_the_others_along(tmp_path, damage):
    whole = [page(f"p{n}" * 50) for n in range(6)]
    bad = {"cut": whole[2][:60], "bits": bytes(b ^ 255 if 40 < i < 60 else b for i, b in enumerate(whole[2])),
           "zeros": bytes(len(whole[2]))}[damage]
    (tmp_path / "a.warc.gz").write_bytes(b"".join([*whole[:2], bad, *whole[3:]]))
    skipped, source = Skipped(), Source(name="w", kind="warc", path=tmp_path / "a.warc.gz", on_error="skip")
    with open(tmp_path / "a.warc.gz", "rb") as f: rows = list(rows_of(source, f, "a.warc.gz", skipped))
    assert [more["url"][7:9] for _, _, more in rows] == ["p0", "p1", "p3", "p4", "p5"] and skipped.counts["w"] >= 1


PACKED = {"jsonl": b'{"text": "%s"}\n', "csv": b'text\n"%s"\n', "text": b"%s", "html": b"<p>%s"}


@pytest.mark.parametrize("kind", PACKED)
def test_packed_files_are_unpacked_no_further_than_a_record(tmp_path, kind):
    (tmp_path / "a.gz").write_bytes(gzip.compress(PACKED[kind].replace(b"%s", b"x" * (64 * MB)), 1))
    tracemalloc.start()
    with pytest.raises(ValueError, match=r"file a.gz: .*more than 1,048,576 bytes"):
        list(read_source(Source(name="s", kind=kind, path=tmp_path / "a.gz", limit=MB)))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < ROOM, peak / MB


def test_a_table_of_long_texts_is_read_a_row_at_a_time(tmp_path):
    frame = pd.DataFrame({"text": ["x" * (2 * MB)] * 60 + ["short"], "n": range(61)})      # 120 MiB, written out
    frame.to_parquet(tmp_path / "a.parquet")
    assert (tmp_path / "a.parquet").stat().st_size < MB
    skipped = Skipped()
    source = Source(name="p", kind="parquet", path=tmp_path / "a.parquet", limit=MB, on_error="skip")
    tracemalloc.start()
    with open(tmp_path / "a.parquet", "rb") as f: rows = list(rows_of(source, f, "a.parquet", skipped))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert [(t, m["n"]) for _, t, m in rows] == [("short", 60)] and skipped.counts == {"p": 60} and peak < ROOM
    assert skipped.first["p"][0] == ["a.parquet", "row 1", "has more than 1,048,576 bytes"]


def test_a_run_that_a_broken_line_stopped_goes_on_with_skip_and_says_what_it_left_out(tmp_path):
    good = "".join(json.dumps({"text": f"Document {n}, of some length."}) + "\n" for n in range(4))
    (tmp_path / "in").mkdir()
    for n in range(3): (tmp_path / f"in/{n}.jsonl").write_text(good + '{"text": "cut\n' * (n == 1) * 12 + good)
    source = dict(name="web", kind="jsonl", path=tmp_path / "in")
    with pytest.raises(ValueError, match=r"1\.jsonl: line 5 is no JSON"):
        Corpus([Source(**source)]).run(tmp_path / "out", tasks=3)
    done = Corpus([Source(**source, on_error="skip")]).run(tmp_path / "out", tasks=3)     # the first task stays
    lost = done.card.skipped
    assert done.finished and len(list(done.documents())) == 24 and lost.attrs == {"web": 12} and len(lost) == 10
    assert lost.iloc[0].tolist()[1:3] == ["1.jsonl", "line 5"]
    assert "12 records of web" in (tmp_path / "out/card.md").read_text()
    again = Corpus([Source(**source, on_error="skip")]).run(tmp_path / "out", tasks=3)
    assert again.card.skipped.attrs == {"web": 12}
    with pytest.raises(ValueError, match="holds another run"): Corpus([Source(**source)]).run(tmp_path / "out", tasks=3)


# two records of which the fuzzer changed some bytes: after them a reader's place is said to be below 0
LEADS_BACK = """
    H4sIAALBB2sC/0WNywrCMBBF94H8Q34gTetKQylIFSwKlVLpurRjI+okpFPQvzf1gcxm5t7hnGZd5SqJYs6asMn66UALD6OzOMIvbP0AJE9VoYUh
    clqpVn27Cjrre1lstEgnjzrJOMstEiDJA+BARotVoHO2q+sAAAAAAAAAQP/fPk6CBylD9xtntW9xPIOXW+xsf8FBi85MeIV+5iz/////AAAAAJPn
    eQF6AVY6yAAAAB+LCAACwQdrAv9FjcsKwjAQRfeB/EN+IE3rSkMpAAAAgAAAAAAAAACAAAAAAL839YHMZube4ZxmXeUqiWLOmrDJ+ulACw+jszjC
    L2z9ACRPVaFACw+jszjCL2z9ACRPVaGFIXJaqVZ9uwo663tZhSFyWqlWfbsKOut7WWy0SCePOsk4yy0SIMkD4EBGi1Wgc7ar62MwJWIQx6Lc/98+
    ToIHKUP3G2e1b3E8g5db7Gx/XEtdViJE4f//////////OsgAAAA=
"""


def test_a_record_that_leads_back_ends_the_file(tmp_path):
    pytest.importorskip("warcio")
    (tmp_path / "a.warc.gz").write_bytes(base64.b64decode(LEADS_BACK))
    source = dict(name="s", kind="warc", path=tmp_path / "a.warc.gz", limit=1 << 16)
    assert len(list(read_source(Source(**source, on_error="skip")))) <= 2
    with pytest.raises(ValueError, match="a.warc.gz"): list(read_source(Source(**source)))

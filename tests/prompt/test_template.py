"""Templates: what may be typed, OpenPrompt's golden cases on a real tokenizer, soft tokens on two ranks and in a
fresh process."""
import json
import random
import time

import pytest
import torch
import transformers as tf

from bmlab.train.processes import run_ranks
from bmlab.data.samples import sample_texts
from bmlab.delta.delta import Delta
from bmlab.prompt.language import TemplateError, parse_template
from bmlab.models.load import sample_dir
from bmlab.prompt.template import CUTS, Template, kept
from bmlab.prompt.soft import SoftTokens
from fresh import fresh_python

PIECES = [
    '{"mask"}',
    '{"soft":',
    '{"placeholder":"text_a"}',
    '"',
    "'",
    "{",
    "}",
    "lambda x:",
    "x",
    "(",
    ")",
    "[",
    "]",
    ":",
    ",",
    " ",
    "\n",
    "\r",
    "\\",
    "\\N{",
    "soft_id",
    "0",
    "9" * 5000,
    "电影",
    "\x00",
    "f'{x",
    "**",
    "#",
    '"mask"',
    "{'placeholder':'a'}",
    "\ud800",
    "None",
    "post_processing",
    "\f",
    "\u2028",
    "((((" * 60,
    "0x",
    "é",
    "👩‍🔬",
    '"duplicate":',
    "-1",
    "1e999",
    "b''",
    "...",
    "await ",
    "*",
    ":=",
]




@pytest.mark.long
def test_whatever_is_typed_gives_parts_or_a_template_error():
    rng, parsed = random.Random(1), 0
    for _ in range(10_000):
        text = "".join(rng.choice(PIECES) for _ in range(rng.randrange(16)))
        try:
            parse_template(text)
            parsed += 1
        except TemplateError as e:
            assert 0 <= e.span[0] <= e.span[1] <= len(text) and str(e).startswith(e.message)
            assert e.line == text[:e.span[0]].count("\n") + 1
    assert parsed > 20


@pytest.mark.parametrize("how", CUTS)
def test_truncation_keeps_what_it_must(how):
    rng = random.Random(0)
    for _ in range(300):
        lengths = [rng.randrange(9) for _ in range(rng.randrange(1, 6))]
        may, n = [rng.random() < 0.6 for _ in lengths], rng.randrange(12)
        out = kept(lengths, may, n, how)
        room = sum(x for x, m in zip(lengths, may) if m)
        if n > room:
            assert out is None
            continue
        assert sum(b - a for r in out for a, b in r) == sum(lengths) - n
        assert all(r in ([(0, x)], []) or m for r, x, m in zip(out, lengths, may)) and all(
            sum(b - a for a, b in r) == x for r, x, m in zip(out, lengths, may) if not m
        )


def tiny():
    torch.manual_seed(0)
    return tf.LlamaForCausalLM(
        tf.LlamaConfig(vocab_size=600, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)
    ).eval()


def byte_tok():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    t = Tokenizer(models.BPE({c: i for i, c in enumerate(["<pad>", "<eos>", *alphabet])}, []))
    t.pre_tokenizer, t.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return tf.PreTrainedTokenizerFast(tokenizer_object=t, pad_token="<pad>", eos_token="<eos>")


TEXT = '{"soft":3} {"placeholder":"text_a"} {"soft":"it was","soft_id":2} so {"soft_id":2}{"mask"}'


def gradients(sharded, lora):
    "Summed gradients of the soft tokens over four examples, this rank's share of them"
    from bmlab.delta.lora import Lora
    from bmlab.train.processes import rank, world_size
    from bmlab.train.sharding import shard
    model, t = tiny(), Template(TEXT, byte_tok())
    other = Lora(model) if lora else None
    d = SoftTokens(model, t, init=torch.randn(t.soft_count, 32, generator=torch.Generator().manual_seed(1)))
    d.freeze()
    if lora: [p.requires_grad_(True) for p in other.parameters()]
    if sharded: model = shard(model, zero=3, dtype=torch.float32)
    texts = [{"text_a": w} for w in ("a fun movie", "dull", "so so", "great")]
    mine = texts[rank()::world_size()] if sharded else texts
    e = t.encode(mine)
    out = model(**e).logits[torch.arange(len(mine)), e.mask_positions[:, 0]]
    out.float().log_softmax(-1)[:, 5].mean().backward()
    g = next(p for n, p in model.named_parameters() if n.endswith("soft_tokens.table")).grad
    g = g.full_tensor() if hasattr(g, "full_tensor") else g
    return g.detach()


@pytest.mark.long
@pytest.mark.parametrize("lora", [False, True])
def test_two_ranks_give_the_gradient_of_one(lora):
    one = gradients(False, lora)
    for two in run_ranks(gradients, True, lora): assert (two - one).abs().max() < 1e-6 * max(1, one.abs().max())
    assert one.abs().max() > 1e-4 and (one.norm(dim=1) > 0).all()


@pytest.mark.long
def test_a_fresh_process_computes_the_same_bits(tmp_path):
    model, t = tiny(), Template(TEXT, byte_tok())
    d = SoftTokens(model, t, init="random", encoder="mlp")
    d.save(tmp_path / "soft")
    d.detach()
    model.save_pretrained(tmp_path / "model")
    e = t.encode([{"text_a": "a fun movie"}, {"text_a": "dull"}])
    code = f"""
import torch, transformers as tf
from bmlab.delta.delta import Delta
model = tf.LlamaForCausalLM.from_pretrained({str(tmp_path / 'model')!r}).eval()
Delta.load({str(tmp_path / 'soft')!r}, model)
ids, mask = torch.tensor({e['input_ids'].tolist()}), torch.tensor({e['attention_mask'].tolist()})
with torch.no_grad(): torch.save(model(input_ids=ids, attention_mask=mask).logits, {str(tmp_path / 'out.pt')!r})
"""
    fresh_python(code, check=True)
    again = Delta.load(tmp_path / "soft", model)
    with torch.no_grad(): here = model(**e).logits
    assert torch.equal(torch.load(tmp_path / "out.pt"), here) and again.kind == "soft_tokens"
    config = json.loads((tmp_path / "soft/adapter_config.json").read_text())
    config["num_virtual_tokens"] += 1
    (tmp_path / "soft/adapter_config.json").write_text(json.dumps(config))
    again.detach()
    with pytest.raises(ValueError, match="another backbone"): Delta.load(tmp_path / "soft", model)


def test_soft_tokens_under_checkpointing_and_compile():
    model, t = tiny(), Template(TEXT, byte_tok())
    d = SoftTokens(model, t)
    d.freeze()
    e = t.encode([{"text_a": "a fun movie"}, {"text_a": "dull"}])
    def gradient():
        model.zero_grad()
        model(**e).logits[0, -1, 5].backward()
        return d.site.table.grad.clone()
    plain = gradient()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    assert torch.allclose(gradient(), plain, atol=1e-6)
    model.gradient_checkpointing_disable()
    model.eval()
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad(): assert torch.allclose(compiled(**e).logits, model(**e).logits, atol=1e-5)


def test_speed_of_encoding_is_that_of_the_tokenizer():
    "No timed assertion: the number of calls of the tokenizer does not grow with the examples"
    tok, calls = byte_tok(), []
    t = Template(TEXT, tok)
    class Counting:
        def __call__(self, *a, **k):
            calls.append(1)
            return tok(*a, **k)
        def __getattr__(self, k): return getattr(tok, k)
        def __len__(self): return len(tok)
    t.tok = Counting()
    t.encode([{"text_a": "a"}] * 500)
    assert len(calls) == 1


def test_short_examples_take_little_more_than_their_tokens():
    """Beside the tokenizer alone, in seconds of one core, in turns; the best of twelve at most counts. Reviews of
    films, 19 words on average: 1.5 to 1.9 times its time, measured on a virtual core of an EPYC that others shared."""
    tok = tf.AutoTokenizer.from_pretrained(sample_dir("smollm2-135m"))
    texts = list(sample_texts("movies").text[:1000])
    t, data = Template('{"placeholder":"text_a"} It was {"mask"}', tok), [{"text_a": x} for x in texts]
    def seconds(call):
        start = time.process_time()
        return call(), time.process_time() - start
    ratios = []
    while len(ratios) < 12 and min(ratios, default=9) > 2.5:
        (_, alone), (enc, ours) = seconds(lambda: tok(texts)), seconds(lambda: t.encode(data, max_length=64))
        ratios.append(ours / alone)
    assert min(ratios) <= 2.5 and len(enc["input_ids"]) == 1000, ratios

"""What BMInf's three demos do — filling blanks, talking, telling on — with models of its three classes, so small that
they are taught here, on sequences whose answers can be judged; and a wrapped model that is called as a module."""
import pytest
import torch

from bmlab.core import set_seed
from bmlab.infer.engine import wrap
from bmlab.models.cpm2 import (
    Cpm1Config, Cpm1ForCausalLM, Cpm2Config, Cpm2ForConditionalGeneration, Cpm2Tokenizer, EvaConfig,
    EvaForConditionalGeneration, EvaTokenizer,
)

LETTERS = "甲乙丙丁戊己庚辛壬癸"                        # in this order; behind the last comes the first
MARKS = ["<unk>", "<s>", "</s>", "\u2583", "<sep>", "<pad>", "<mask>", "<go>", "<eod>", "\u2582"]
T5 = dict(d_model=32, d_kv=8, d_ff=48, num_heads=4, num_layers=1)


def run(start, n): return "".join(LETTERS[(start + i) % 10] for i in range(n))


def tokenizer(tmp_path, kind):
    words = [*MARKS, *LETTERS, *(f"<s_{i}>" for i in range(4))]
    (tmp_path / "vocab.txt").write_text("\n".join(words) + "\n", encoding="utf-8")
    return kind(str(tmp_path / "vocab.txt"), cut="none"), len(words)


def taught(model, batch, steps, lr=1e-2):
    opt = torch.optim.Adam(model.parameters(), lr=lr)
    for _ in range(steps):
        loss = model(**batch).loss
        loss.backward()
        opt.step()
        opt.zero_grad()
    assert loss < .1
    return model.eval()


def ids(tok, texts): # → (B, L); all of one length
    return torch.tensor([tok(t, add_special_tokens=False).input_ids for t in texts])


def test_cpm2_fills_blanks(tmp_path):
    "examples/fill_blank.py: two blanks in a row of letters"
    tok, V = tokenizer(tmp_path, Cpm2Tokenizer)
    set_seed(0)
    rows = [run(s, 6) for s in range(10)]
    asked, told = ([f"{r[0]}<s_0>{r[2:4]}<s_1>{r[5]}" for r in rows], [f"<s_0>{r[1]}<s_1>{r[4]}<eod>" for r in rows])
    model = Cpm2ForConditionalGeneration(Cpm2Config(**T5, vocab_size=V))
    lesson = dict(input_ids=ids(tok, asked), labels=ids(tok, told))
    with wrap(taught(model, lesson, 60), tok, max_ctx=24, device="cpu") as e:
        for r in rows:
            answers = ["", ""]
            for i, piece in e.fill(f"{r[0]}__{r[2:4]}__{r[5]}", max_new_tokens=8): answers[i] += piece
            assert answers == [r[1], r[4]]


def test_eva_answers(tmp_path):
    "examples/dialogue.py: to what was said last, with what was said before in view"
    tok, V = tokenizer(tmp_path, EvaTokenizer)
    set_seed(0)
    turns = [[run(s, 2), run(s + 5, 2)] for s in range(10)]
    model = EvaForConditionalGeneration(EvaConfig(
        **T5, vocab_size=V, pad_token_id=tok.pad_token_id, eos_token_id=tok.eos_token_id,
        decoder_start_token_id=tok.bos_token_id))
    lesson = dict(input_ids=torch.cat([tok.dialogue(t) for t in turns]),
                  labels=ids(tok, [f"{t[1][1]}{t[0][0]}<sep>" for t in turns]))       # a letter of each turn
    with wrap(taught(model, lesson, 80), tok, max_ctx=24, device="cpu") as e:
        for t in turns:
            talk = [{"role": role, "content": text} for role, text in zip(("assistant", "user"), t)]
            assert "".join(e.chat(talk, max_new_tokens=4)) == t[1][1] + t[0][0]


def test_cpm1_tells_on(tmp_path):
    "examples/generate_cpm1.py: a little more each time, from what is there"
    tok, V = tokenizer(tmp_path, Cpm2Tokenizer)
    set_seed(0)
    model = Cpm1ForCausalLM(Cpm1Config(
        vocab_size=V, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, dim_head=8, dim_ff=48,
        position_bias_num_buckets=16, position_bias_max_distance=20))
    told = ids(tok, [run(s, 16) for s in range(10)])
    with wrap(taught(model, dict(input_ids=told, labels=told), 60), tok, bits=8, max_ctx=24, device="cpu") as e:
        for s in (0, 7):
            story = run(s, 2)
            for _ in range(3): story += "".join(e.stream(story, max_new_tokens=4))
            assert story == run(s, 14)


def test_an_engine_is_called_as_its_model(tmp_path):
    "bminf.wrapper's result is a module; so can an engine be called, resident or streaming"
    import transformers as tf
    set_seed(0)
    model = tf.LlamaForCausalLM(tf.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4, vocab_size=99)).eval()
    given = torch.arange(12).view(2, 6)
    with torch.no_grad(): want = model(given).logits
    with wrap(model, max_ctx=32, device="cpu") as e:
        torch.testing.assert_close(e(given).logits, want, atol=1e-5, rtol=1e-5)
        assert not e(input_ids=given).logits.requires_grad
    size = sum(p.numel() * 4 for p in model.parameters())
    with wrap(model, max_ctx=32, device="cpu", memory_limit=int(size * .8)) as e:
        assert e.plan.streamed
        torch.testing.assert_close(e(given).logits, want, atol=1e-5, rtol=1e-5)
    with pytest.raises(RuntimeError, match="closed"): e(given)

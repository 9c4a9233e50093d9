"An engine's calls: sums, refusals before any work, beams, drafts that cannot work, a model that is held still"
import copy
import math
import os
import pickle
import time
import warnings

import jinja2
import pytest
import torch
import transformers as tf

from bmlab.all import DraftModel, Lora, PromptLookup, plan_inference, wrap
from bmlab.infer.batcher import Batcher
from bmlab.infer.beams import beam_search
from bmlab.infer.decode import Decoder
from bmlab.infer.embed import embed_ids
from bmlab.infer.speculate import Tree
from bmlab.infer.text import stream_text
from bmlab.models.stream import prompt_ids
from test_engine import MODELS, OPTIONS, decoded, limit_for, made

from toys import make_tok

TALKS = dict(
    hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
    initializer_range=0.3
)


@pytest.fixture(scope="module")
def tok(): return make_tok()


def talker(tok, **config):
    torch.manual_seed(0)
    model = tf.LlamaForCausalLM(tf.LlamaConfig(**TALKS | dict(vocab_size=len(tok)) | config)).eval()
    model.generation_config.eos_token_id = None
    return model


def made_bert():
    tok = tf.BertTokenizer(vocab={
        w: i
        for i, w in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "mat", "sat", "on", "."])
    })
    torch.manual_seed(0)
    return tf.BertForMaskedLM(tf.BertConfig(
        vocab_size=11, hidden_size=32, num_hidden_layers=4, num_attention_heads=2, intermediate_size=64
    )).eval(), tok


ASKS = dict(repetition_penalty=1.7, suppress_tokens=list(range(10, 60)), bad_words_ids=[[i] for i in range(60, 90)])


@pytest.mark.parametrize("way", ["static", "generate"])
@pytest.mark.parametrize("kind", ["llama", "bart"])
def test_what_a_generation_config_asks_of_a_text(kind, way, tok, monkeypatch):
    "Each greedy text is that of transformers' generate, which follows the config; what is not followed is warned of"
    model = talker(tok)
    if kind == "bart":
        sizes = {f"{p}_{n}": v for p in ("encoder", "decoder") for n, v in dict(
            layers=4, attention_heads=4, ffn_dim=32).items()}
        model = tf.BartForConditionalGeneration(tf.BartConfig(
            vocab_size=len(tok), d_model=32, max_position_embeddings=64, init_std=0.3, forced_eos_token_id=None, **sizes
        )).eval()
        model.generation_config.update(forced_bos_token_id=95, eos_token_id=None, pad_token_id=0)
    if way == "generate":
        monkeypatch.setattr(Decoder, "_try", lambda self: setattr(self, "why_generate", "so that it is tried"))
    skip, prompts = (lambda p: 1 if kind == "bart" else len(p)), [[5, 6, 7, 8], [9, 11]]
    def say(p): return model.generate(torch.tensor([p]), max_new_tokens=9, do_sample=False)[0, skip(p):].tolist()
    plain = [say(p) for p in prompts]
    model.generation_config.update(**ASKS)
    want = [say(p) for p in prompts]
    assert want[0] != plain[0] and want[1] != plain[1]
    for draft in (None, *["lookup"] * (way == "static")):
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            e = wrap(copy.deepcopy(model), tok, draft=draft, max_ctx=32, device="cpu")
        with e:
            assert e.decoder.mode == way
            for p, ids in zip(prompts, want):
                assert "".join(e.stream(p, max_new_tokens=9, logprobs=0)) is not None
                assert e.stats["tokens"] == [ids] and all(math.isfinite(t.logprob) for t in e.stats["tokens"][0])
            e.stream(prompts[0], repetition_penalty=1.0, logit_bias={10: 0}).close()
            with e.batcher() as b:
                handles = [b.submit(p, max_new_tokens=9) for p in prompts]
                assert [list(h) and h.ids for h in handles] == want
    model.generation_config.update(no_repeat_ngram_size=3, min_new_tokens=2, bad_words_ids=[[1, 2], [3]])
    says = r"no_repeat_ngram_size=3, min_new_tokens=2, bad_words_ids=\[\[1, 2\]\]: not followed here"
    with pytest.warns(UserWarning, match=says), wrap(model, tok, max_ctx=32, device="cpu") as e:
        assert "no_repeat_ngram_size=3" in e.plan.sentence()


def test_a_model_in_training_mode_is_told_of_and_its_vectors_have_no_dropout(tok, caplog):
    model, (bert, _) = talker(tok), made_bert()
    decoder = Decoder(model, 1, 32)
    decoder.prefill([[5, 6]])
    assert not caplog.text
    model.train()
    for _ in range(2): decoder.prefill([[5, 6]])
    assert caplog.text.count("is in training mode") == 1
    rows = [[2, 5, 6, 3], [2, 7, 3]]
    hidden = bert.bert(input_ids=torch.tensor(rows[:1])).last_hidden_state
    want = torch.nn.functional.normalize(hidden.mean(1), dim=-1)[0]
    assert bert.config.hidden_dropout_prob > 0
    torch.testing.assert_close(embed_ids(bert.train(), rows, "mean")[0], want)
    assert bert.training and bert.bert.encoder.training
    config = tf.Llama4TextConfig(
        hidden_size=32, intermediate_size=64, intermediate_size_mlp=64, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, vocab_size=64, num_local_experts=2, pad_token_id=0)
    llama = tf.Llama4ForCausalLM(config).eval()
    want = llama.model(input_ids=torch.tensor([[5, 6, 7]])).last_hidden_state[:, -1]
    torch.testing.assert_close(embed_ids(llama, [[5, 6, 7]]), torch.nn.functional.normalize(want, dim=-1))


def test_a_dictionary_of_stats_holds_the_last_call_alone(tok):
    stats = {"mine": 1}
    with wrap(talker(tok), tok, max_ctx=32, device="cpu") as e:
        e.generate([[5, 6]], max_new_tokens=3, logprobs=1, stats=stats)
        assert len(stats["tokens"][0]) == 3
        e.generate([[5, 6]], max_new_tokens=2, stats=stats)
    assert "tokens" not in stats and stats["new_tokens"] == 2 and stats["mine"] == 1


def test_what_is_no_tokenizer_is_refused(tok):
    model = talker(tok)
    given = [("words", "tok is 'words': expected a tokenizer"), (model.config, "tok is a LlamaConfig: expected"),
             (model, "tok is a LlamaForCausalLM: "), (tf.AutoTokenizer, "the class AutoTokenizer: "),
             (tf.PreTrainedTokenizerFast, "tok is the class TokenizersBackend: "),
             (tok.backend_tokenizer, r"PreTrainedTokenizerFast\(tokenizer_object=tok\)")]
    before = model.state_dict()
    for bad, says in given:
        with pytest.raises(TypeError, match=says): wrap(model, bad, bits=8, max_ctx=32, device="cpu")
        with pytest.raises(TypeError, match=says): stream_text(Decoder(model, 1, 32), bad, [[1]])
        with pytest.raises(TypeError, match=says): Batcher(Decoder(model, 1, 32), bad)
    with pytest.raises(TypeError, match="decoder is a LlamaForCausalLM"): Batcher(model, tok)
    assert list(model.state_dict()) == list(before)
    with wrap(model, max_ctx=32, device="cpu") as e, e.batcher() as b:             # ids go in and out without one
        h = b.submit([5, 6], max_new_tokens=3, stop_ids=())
        with pytest.raises(ValueError, match="no tokenizer, no text"): list(h)
        for ask in (dict(prompt="a text"), dict(prompt=[5], stop="x")):
            with pytest.raises(ValueError, match="this batcher has no tokenizer"): b.submit(**ask)
        while not h.done: time.sleep(0.01)
        assert len(h.ids) == 3


def test_messages_are_looked_at_before_the_template(tok):
    "A role that nobody knows, and none to say; what calls tools says nothing, and a template may know more roles"
    ask, call = {"role": "user", "content": "plain"}, [{"type": "function", "function": {"name": "f", "arguments": {}}}]
    with wrap(talker(tok), tok, max_ctx=96, device="cpu") as e:
        say = lambda *m: "".join(e.chat(list(m), max_new_tokens=2))
        with pytest.raises(ValueError, match="'usr': expected system, user, assistant or tool"):
            say({"role": "usr", "content": "plain"})
        for empty in ({"role": "user"}, {"role": "assistant", "content": None}):
            with pytest.raises(ValueError, match="message 1 .* has no content"): say(ask, empty)
        called, said = {"role": "assistant", "tool_calls": call}, ({}, {"content": None}, {"content": ""})
        assert len({say(ask, called | m) for m in said}) == 1
    chatml = copy.deepcopy(tok)
    chatml.chat_template = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] }}{% endfor %}"
    def read(tok, *messages): return tok.decode(prompt_ids(tok, list(messages))["input_ids"][0])
    with pytest.raises(ValueError, match="'asistant': expected"): read(chatml, {"role": "asistant", "content": "plain"})
    assert "narrator: plain" in read(chatml, {"role": "narrator", "content": "plain"})
    for content in ({}, {"content": None}, {"content": ""}):               # (None would be no text here)
        assert "plainassistant: " in read(chatml, ask, called | content)


@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": ""}])
def test_a_template_that_asks_for_no_content_is_given_none(tok, content):
    "As DeepSeek's, which write calls there alone: they are in the prompt, or it is an error, and never left out"
    tok = copy.deepcopy(tok)
    tok.chat_template = (
        "{% for m in messages %}{% if m['content'] is none %}{{ m['tool_calls'][0]['function']['name'] }}"
        "{% else %}{{ m['content'] + '.' }}{% endif %}{% endfor %}")
    call = {"type": "function", "function": {"name": "weather", "arguments": {}}}
    talk = [{"role": "user", "content": "plain"}, {"role": "assistant", "tool_calls": [call]} | content]
    try: text = tok.decode(prompt_ids(tok, talk)["input_ids"][0])
    except jinja2.UndefinedError: return                                    # (a transformers that drops what is None)
    assert "plain.weather" in text


def test_stats_of_several_rounds_add_up(tok):
    with wrap(talker(tok), tok, max_batch=2, max_ctx=256, device="cpu") as e:
        n, mine = len(tok("Once")["input_ids"]), {}
        for _ in e.story("Once", n=5, max_new_tokens=6, seed=1, stats=mine): pass
        s = e.stats
        assert (
            s["texts"], s["prompt_tokens"], s["new_tokens"], s["passes"], s["batch"]
        ) == (5, 5 * n, 30, 18, 5 / 3) and mine == s
        # (a first token of each text does not count)
        assert s["decode_s"] > 0 and abs(s["decode_tok_s"] * s["decode_s"] - 25) < 1e-6 and s["first_token_s"] > 0
        got = e.report()
        assert (
            abs(got.at["decode_tok_s", "predicted"] - e.plan.tokens_per_s(5 / 3, ctx=n + 3)) < 1e-6
            and got.at["decode_tok_s", "measured"] == s["decode_tok_s"]
        )
        e.generate(["a", "bb", "ccc"], max_new_tokens=4)
        assert (e.stats["texts"], e.stats["new_tokens"], e.stats["passes"]) == (3, 12, 8)
        assert (
            len(list(e.fill("a __ and b __", max_new_tokens=3))) and e.stats["texts"] == 2
            and e.stats["new_tokens"] >= 2
        )
        e.json({"input": "a", "<ans>": {"x": "", "y": "", "z": ""}}, max_new_tokens=3)
        assert e.stats["texts"] == 3 and e.stats["prompt_tokens"] > 3
        list(e.stream("a", max_new_tokens=3))
        assert (e.stats["texts"], e.stats["new_tokens"], e.stats["batch"]) == (1, 3, 1)


def test_a_report_before_the_first_call_has_nothing_measured(tok):
    model, words = made_bert()
    for e in (wrap(talker(tok), tok, max_ctx=64, device="cpu"), wrap(model, words, max_ctx=16, device="cpu")):
        got = e.report()
        assert got.measured.isna().all() and got.at["peak_bytes", "predicted"] == e.plan.peak_bytes and e.stats == {}
        e.close()


def test_too_long_is_said_before_any_work(tok):
    model, words = made_bert()
    def forward(*a, **k): raise AssertionError("the model ran")
    with wrap(model, words, max_ctx=8, device="cpu") as e:
        model.forward = forward
        with pytest.raises(ValueError, match="a text of 9 tokens exceeds max_ctx=8"): e.fill("the __ sat on the __ .")
    asked = {"input": "a" * 20, "options": {"<option_0>": "yes", "<option_1>": "no" * 30}, "<ans>": {"x": "", "y": ""}}
    model = talker(tok)
    with wrap(model, tok, max_ctx=340, device="cpu") as e:
        assert e.json(asked)["<ans>"]["y"] in asked["options"] and e.stats["texts"] == 2
        model.forward = forward
        for wrong in (
            asked | {"options": {"<option_0>": "yes", "<option_1>": "no" * 90}}, asked | {"input": "a" * 170}
        ):
            with pytest.raises(ValueError, match="exceed max_ctx=340"): e.json_pieces(wrong)
        with pytest.raises(ValueError, match="an option has no tokens"):
            e.json_pieces(asked | {"options": {"<option_0>": ""}})
        with pytest.raises(ValueError, match="max_new_tokens=320 exceed max_ctx=340"):
            e.json_pieces({"input": "a", "<ans>": ""}, max_new_tokens=320)


def test_drafts_that_cannot_work_are_refused_by_wrap(tok):
    model, small = talker(tok), talker(tok, num_hidden_layers=2)
    torch.manual_seed(0)
    ant = tf.CpmAntForCausalLM(tf.CpmAntConfig(
        vocab_size=len(tok), hidden_size=32, num_attention_heads=4, dim_head=8, dim_ff=64, num_hidden_layers=2,
        prompt_length=4
    )).eval()
    rwkv = tf.RwkvForCausalLM(tf.RwkvConfig(
        hidden_size=32, attention_hidden_size=32, num_hidden_layers=2, vocab_size=len(tok), context_length=64
    )).eval()
    mamba = tf.MambaForCausalLM(tf.MambaConfig(vocab_size=len(tok), hidden_size=32, num_hidden_layers=1)).eval()
    for draft, says in (
        (talker(tok, vocab_size=900), "both need the same tokenizer"), (rwkv, "has no path with a cache"),
        (Tree(PromptLookup(), DraftModel(rwkv)), "has no path with a cache"), (mamba, "keeps states, from which"),
        (talker(tok, max_position_embeddings=32), "has positions for 32 " "tokens"),
        (torch.nn.Linear(2, 2), "cannot generate"), (MODELS["t5"](), "with an encoder"),
        (Tree(DraftModel(small), DraftModel(talker(tok))), "a Tree of 2 models")
    ):
        with pytest.raises(ValueError, match=says): wrap(model, tok, bits=8, draft=draft, max_ctx=64, device="cpu")
        assert type(model.model.layers[0].self_attn.q_proj) is torch.nn.Linear                      # nothing was packed
    with pytest.raises(ValueError, match="CpmAntForCausalLM cannot check several tokens"):
        wrap(ant, tok, draft="lookup", max_ctx=64, device="cpu")
    with pytest.raises(TypeError, match="BertForMaskedLM does not generate"):
        wrap(*made_bert(), draft="lookup", device="cpu")
    with wrap(model, tok, max_ctx=64, device="cpu") as e: want = "".join(e.stream("plain", max_new_tokens=12))
    both = Tree(PromptLookup(), DraftModel(small, length=3, branches=2))
    with wrap(model, tok, draft=both, max_ctx=64, device="cpu") as e:
        assert e.plan.draft_bytes and "".join(e.stream("plain", max_new_tokens=12)) == want
        s = e.stats
        assert (
            abs(
                s["predicted_tok_s"] - e.plan.tokens_per_s(
                    1, s["accepted_per_pass"], s["prompt_tokens"] + 6, 1 + s["drafted"] / s["passes"], levels=3
                )
            ) < 1e-6
        )


def test_an_engine_is_not_copied_or_pickled(tok):
    with wrap(talker(tok), tok, max_ctx=64, device="cpu") as e:
        for how in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match="an engine cannot be copied or pickled"): how(e)


def test_where_the_file_of_a_store_is(tok, tmp_path):
    model = made("llama")
    limit = limit_for(model, 3, **OPTIONS)
    with wrap(model, memory_limit=limit, store="mmap", folder=tmp_path, device="cpu", **OPTIONS) as e:
        assert os.readlink(f"/proc/self/fd/{e.streamer.file.fileno()}").startswith(str(tmp_path))
    with pytest.raises(ValueError, match="no such folder"):
        wrap(model, memory_limit=limit, store="mmap", folder=tmp_path / "none", device="cpu", **OPTIONS)
    with pytest.raises(ValueError, match="is for the file of store='mmap', and store='ram'"):
        wrap(model, memory_limit=limit, folder=tmp_path, device="cpu", **OPTIONS)


def test_beams(tok):
    "The texts of transformers' own beam search, a prompt or several at a time"
    model, prompts = talker(tok), ["plain", "english", "plain english", "ish"]
    def theirs(p, beams, penalty):
        ids = tok(p, return_tensors="pt")["input_ids"]
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=9, do_sample=False, pad_token_id=0,
            eos_token_id=None, num_beams=beams, length_penalty=penalty
        )
        return tok.decode(out[0, ids.shape[1]:], skip_special_tokens=True)
    want = {(beams, penalty): [theirs(p, beams, penalty) for p in prompts] for beams, penalty in ((4, 1.0), (2, 0.5))}
    for rows in (4, 9):
        with wrap(model, tok, max_batch=rows, max_ctx=64, fuse=False, device="cpu") as e:
            for (beams, penalty), texts in want.items():
                assert e.generate(prompts, 9, beams=beams, length_penalty=penalty) == texts
            assert (
                e.stats["texts"], e.stats["new_tokens"], e.stats["prompt_tokens"]
            ) == (4, 36, sum(len(tok(p)["input_ids"]) for p in prompts)) and not any(e.decoder.held)
            end = want[4, 1.0][0][2:4]
            assert (
                e.generate(prompts[:1], 9, beams=4, stop=end) == [want[4, 1.0][0].partition(end)[0]]
                and e.generate([], beams=2) == []
            )
            assert e.report().at["peak_bytes", "predicted"] == e.plan.peak_bytes
    with wrap(model, tok, max_batch=3, max_ctx=64, device="cpu") as e:
        for bad, says in (
            (dict(beams=4), r"beams=4 take 4 rows, and max_batch=3; wrap\(…, " r"max_batch=4\)"),
            (dict(beams=0), "beams=0"), (dict(beams=2, temperature=0.5), "with temperature: beam search draws nothing"),
            (dict(beams=2, seed=1), "with seed"), (dict(length_penalty=2.0), "is of beam search")
        ):
            with pytest.raises(ValueError, match=says): e.generate(prompts, 9, **bad)
        for call in (e.stream, e.chat, e.story): 
            with pytest.raises(ValueError, match=r"cannot come in pieces; use e.generate\(prompts, beams=…\)"):
                list(call("plain", max_new_tokens=4, beams=4))
        with pytest.raises(ValueError, match="use e.generate"): e.fill("a __", beams=4)
        best = beam_search(Decoder(model, 3, 64), [tok("plain")["input_ids"]], 3, max_new_tokens=9)[0][0]
        assert e.generate(["plain"], 9, beams=3) == [tok.decode(best.ids)]


def test_penalties_and_logprobs_through_an_engine(tok):
    model = talker(tok)
    with wrap(model, tok, max_batch=2, max_ctx=64, fuse=False, device="cpu") as e:
        plain, other = (e.generate(["plain"], 40, frequency_penalty=f)[0] for f in (0.0, 2.0))
        assert plain != other
        e.generate(["plain", "ish", "english"], 8, logprobs=2)
        prompts = [tok(p)["input_ids"] for p in ("plain", "ish", "english")]
        assert [len(t) for t in e.stats["tokens"]] == [8, 8, 8]
        for p, row in zip(prompts, e.stats["tokens"]):
            with torch.no_grad(): raw = model(torch.tensor([p + row])).logits[0, len(p) - 1:-1].log_softmax(-1)
            assert (
                torch.allclose(torch.tensor([t.logprob for t in row]), raw[torch.arange(8), row], atol=1e-4)
                and [t.likeliest[1][0] for t in row] == raw.topk(2).indices[:, 1].tolist()
            )


def test_a_resident_model_is_held_still(tmp_path):
    model = made("llama")
    ids = torch.tensor([[5, 6, 7]])
    with wrap(model, device="cpu", **OPTIONS) as e:
        assert not e.plan.streamed
        want = decoded(e.decoder, 4)
        for move in (
            lambda m: m.to("meta"), lambda m: m.cuda(), lambda m: m.half(), lambda m: m.model.layers[0].double()
        ):
            with pytest.raises(RuntimeError, match=r"cannot be moved or cast; e.close\(\) first, then .to\(\)"):
                move(model)
        assert torch.equal(decoded(e.decoder, 4), want)
        twin = copy.deepcopy(model).double()                                     # a copy is free
        assert twin.dtype is torch.float64 and torch.allclose(twin(ids).logits.float(), model(ids).logits, atol=1e-4)
        copy.deepcopy(twin).half()
        torch.save(model, tmp_path / "m.pt")
        assert torch.load(tmp_path / "m.pt", weights_only=False).half().dtype is torch.float16
        Lora(model, r=2).detach()
        assert model.dtype is torch.float32
    model.half()
    assert not [m for m in model.modules() if "_apply" in m.__dict__]
    with pytest.raises(ValueError, match="smallest feasible"): wrap(model, memory_limit=1000, device="cpu", **OPTIONS)
    assert plan_inference(model) and model.float().dtype is torch.float32


def test_bits_of_a_folder_that_is_packed_otherwise(tmp_path):
    from bmlab.cook.report import save_cooked
    from bmlab.infer import wrap
    from bmlab.kernels.layers import pack_linears
    import transformers as tf
    m = tf.LlamaForCausalLM(tf.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=99)).eval()
    save_cooked(pack_linears(m, bits=8), tmp_path / "packed")
    with pytest.raises(ValueError, match="packed to int8 in its files"):
        wrap(tmp_path / "packed", bits=4, device="cpu", max_ctx=32)
    with pytest.raises(ValueError, match="bits=8.0"): wrap(m, bits=8.0, device="cpu", max_ctx=32)


def test_bits_of_a_folder_of_floats_that_no_group_divides(tmp_path):
    "Its layers take eight bits instead, from files as from memory"
    m = tf.LlamaForCausalLM(tf.LlamaConfig(
        hidden_size=40, intermediate_size=72, num_hidden_layers=2, num_attention_heads=4, vocab_size=99)).eval()
    m.save_pretrained(tmp_path / "floats")
    e = wrap(tmp_path / "floats", bits=4, device="cpu", max_ctx=32)
    assert type(e.model.model.layers[0].mlp.up_proj).__name__ == "Int8Linear"

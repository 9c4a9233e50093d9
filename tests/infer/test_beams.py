"Beam search against transformers' own, over families and options"
import pytest
import torch
import transformers as tf

from bmlab.infer.beams import beam_search
from bmlab.infer.decode import Decoder
from every_family import make
from test_speculate import family

PROMPTS = [[5, 9, 3, 3, 5, 9], [7], [1, 2, 3, 4, 5, 6, 1, 2, 3]]


def theirs(model, p, beams, penalty, n, stops, early):
    ids = torch.tensor([p])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, num_beams=beams, num_return_sequences=beams,
        length_penalty=penalty, max_new_tokens=n, pad_token_id=0, eos_token_id=stops or None, early_stopping=early,
        return_dict_in_generate=True, output_scores=True
    )
    rows = [r[1 if model.config.is_encoder_decoder else len(p):] for r in out.sequences.tolist()]
    return [
        r[: next((i + 1 for i, t in enumerate(r) if t in stops), len(r))] for r in rows
    ], out.sequences_scores.tolist()


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral", "gemma3", "t5"])
def test_same_beams_as_transformers(name):
    model = family(name)
    with torch.no_grad(): [p.mul_(3) for n, p in model.named_parameters() if p.ndim > 1]        # sharper: no near ties
    d = Decoder(model, max_batch=12, max_ctx=48)
    assert d.mode == "static"
    often = [b.ids[i] for found in beam_search(d, PROMPTS, 4, 1.0, 8) for b in found for i in (2, 5)]
    for beams, penalty, stops, early in (
        (4, 1.0, [], False), (4, 1.0, often[:2], False), (2, 2.0, often[1:4], False), (3, -1.0, often[4:5], False),
        (4, 0.0, often[:1], True)
    ):
        got = beam_search(d, PROMPTS, beams, penalty, 10, stops, early)
        for p, found in zip(PROMPTS, got):
            with torch.no_grad(): ids, scores = theirs(model, p, beams, penalty, 10, stops, early)
            assert [b.ids for b in found] == ids
            assert torch.allclose(torch.tensor([b.score for b in found]), torch.tensor(scores), atol=1e-3)
    assert not any(d.held)


def test_more_beams_find_a_likelier_text():
    model = family("llama")
    with torch.no_grad(): [p.mul_(3) for n, p in model.named_parameters() if p.ndim > 1]
    d = Decoder(model, max_batch=8, max_ctx=48)
    one, eight = (beam_search(d, PROMPTS[:1], n, 0.0, 8)[0] for n in (1, 8))
    assert (
        eight[0].score >= one[0].score and eight == sorted(eight, reverse=True)
        and len({tuple(b.ids) for b in eight}) == 8
    )
    # a score is what the model gives the text
    with torch.no_grad():
        ids = PROMPTS[0] + eight[0].ids
        logp = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    at = len(PROMPTS[0])
    assert abs(sum(logp[at + i - 1, t].item() for i, t in enumerate(eight[0].ids)) - eight[0].score) < 1e-3


def test_more_beams_than_tokens():
    torch.manual_seed(0)
    model = tf.LlamaForCausalLM(tf.LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=3
    )).eval()
    found = beam_search(Decoder(model, max_batch=8, max_ctx=16), [[1]], 8, 0.0, 2)[0]
    # 8 of the 9 texts there are
    assert len(found) == 8 and len({tuple(b.ids) for b in found}) == 8
    assert abs(sum(torch.tensor([b.score for b in found]).exp()).item() - 1) < 0.5


def test_refusals():
    d = Decoder(family("llama"), max_batch=4, max_ctx=16)
    for kw, says in (
        (dict(beams=5), "take 5 rows"), (dict(beams=0), "beams=0"), (dict(max_new_tokens=0), "max_new_tokens=0"),
        (dict(max_new_tokens=16), "exceed max_ctx=16")
    ):
        with pytest.raises(ValueError, match=says): beam_search(d, [[1, 2]], **dict(dict(max_new_tokens=4), **kw))
    with pytest.raises(ValueError, match="none may be empty"): beam_search(d, [[]])


@pytest.mark.parametrize("name", ["rwkv", "xlstm"])
def test_where_states_cannot_pass_from_beam_to_beam(name):
    "RWKV and xLSTM keep states in a form that transformers does not reorder"
    d = Decoder(make(name), max_batch=2, max_ctx=16)
    with pytest.raises(ValueError, match="beams=2: .* keeps states .* take beams=1"):
        beam_search(d, [[5, 6]], beams=2, max_new_tokens=3)
    assert len(beam_search(d, [[5, 6]], beams=1, max_new_tokens=3)[0][0].ids) == 3

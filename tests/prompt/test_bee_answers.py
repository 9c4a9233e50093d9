"CPM-Bee's answers over a cache are those of the tasks read whole, and only what may be said is said"
import torch

from bmlab.models.cpmbee import BEE_SPECIALS, CpmBeeConfig, CpmBeeForCausalLM, CpmBeeTokenizer
from bmlab.prompt.bee import Bee, _special_ids, encode_bee
from bmlab.prompt.bee_answers import BeeCollator, _sayable, answer

SMALL = dict(hidden_size=16, num_attention_heads=2, dim_head=6, dim_ff=20, num_hidden_layers=4, mask_modules="banb",
             position_bias_num_buckets=16, position_bias_max_distance=20)
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


def tokenizer():
    return CpmBeeTokenizer(vocab=[*BEE_SPECIALS, *"今天气好冷一二三四问答选项是否", "天气", "ab", "a", "b"])


def bee(tok):
    torch.manual_seed(0)
    model = CpmBeeForCausalLM(CpmBeeConfig(**SMALL, vocab_size=len(tok)))
    with torch.no_grad(): model.cpmbee.encoder.layers[0].self_att.layernorm_before_attention.weight.uniform_(.5, 2)
    return model.eval()


def follow(model, tok, task, said):
    "Is each token of the answer the likeliest that may be said, when the answered task is read whole?"
    collate = BeeCollator(tok, max_length=900, pack=False)
    batch, tokens = collate([said]), encode_bee(task.asked(), tok)
    special, V = _special_ids(tok), model.config.vocab_size
    ok = _sayable(tokens, batch["ext_ids"].shape[1], special, V, None)
    ok[special["/s"]] = True
    with torch.no_grad(): logits = model(**batch).logits[0].masked_fill(~ok, -torch.inf)
    at = batch["targets"][0] >= 0
    return (logits[at].argmax(-1) == batch["targets"][0, at]).tolist()


def test_answers_over_a_cache_are_those_read_whole():
    tok, checked = tokenizer(), 0
    for seed in range(12):
        model = bee(tok)
        g = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for p in model.parameters(): p.copy_(torch.randn(p.shape, generator=g))
            # so that some answers end by themselves
            model.cpmbee.input_embedding.weight[tok.eos_token_id] *= 2.5
        tasks = [Bee(t).asked() for t in TASKS]
        for task, said in zip(tasks, answer(model, tok, tasks, max_new_tokens=6, min_new_tokens=0)):
            if not said.answered: continue
            answers = [said.data["<ans>"]] if isinstance(said.data["<ans>"], str) else list(said.data["<ans>"].values())
            lengths = [
                len(encode_bee(Bee({"<ans>": a}), tok).context)
                - int(encode_bee(Bee({"<ans>": a}), tok).context.sum())
                - 1
                for a in answers
            ]
            fits = follow(model, tok, task, said)
            at = 0
            # the last place says </s>, or was cut off by max_new_tokens
            for n in lengths:
                if all(fits[at:at + n]): checked += 1
                else: assert n > 1  # (two unknown words, or pieces, side by side read as one)
                at += n + 1
    assert checked >= 12


def test_only_options_and_only_what_is_there():
    tok = tokenizer()
    model = bee(tok)
    for seed in range(5):
        torch.manual_seed(seed)
        with torch.no_grad(): model.cpmbee.input_embedding.weight.normal_(std=3)
        said = answer(model, tok, Bee(TASKS[0]), only="options").data["<ans>"]
        assert said in {"<option_0>", "<option_1>", "<option_2>"}
        free = answer(model, tok, TASKS[2], max_new_tokens=20).data["<ans>"]["<mask_4>"]
        assert not any(s in free for s in ("<option", "<pad>", "<root>", "<s>", "<unk>"))
        # may stand in a task as it is
        Bee({"a": "<mask_4>", "<ans>": {"<mask_4>": free}})


def test_examples_beside_a_task_change_the_answer_and_a_batch_does_not():
    tok = tokenizer()
    model = bee(tok)
    with torch.no_grad(): [p.mul_(3) for p in model.parameters() if p.ndim > 1]      # sharper: not the same word always
    tasks = [Bee(t).asked() for t in TASKS]
    alone = [answer(model, tok, t, max_new_tokens=5).json() for t in tasks]
    assert [a.json() for a in answer(model, tok, tasks, max_new_tokens=5, batch=3)] == alone
    assert [a.json() for a in answer(model, tok, tasks, max_new_tokens=5, examples=[TASKS[0], TASKS[2]])] != alone

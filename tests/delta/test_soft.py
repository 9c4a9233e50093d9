"Soft prompts, P-tuning, prefixes: PEFT as oracle both ways, same training, same words, exact counts, many models."
import copy, json

import peft, pytest, torch
import transformers as tf
from safetensors.torch import load_file
from torch import nn

from bmlab.core import set_seed
from bmlab.delta.delta import Delta, deltas
from bmlab.models.glm import BlankGlmConfig, BlankGlmForConditionalGeneration, blank_positions
from bmlab.kernels.layers import pack_linears
from bmlab.delta.lora import Lora
from bmlab.delta.prefix import Prefix
from bmlab.delta.soft import PTuning, SoftPrompt
from fresh import fresh_python

import small
from small import KV, QUIET, t5

SPECIAL = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2)
TINY = small.TINY | SPECIAL
IDS = torch.arange(3, 15).view(2, 6)
LABELS = torch.arange(20, 32).view(2, 6)


def llama(**kw): return small.llama(**SPECIAL | kw)
def gpt2(**kw): return small.gpt2(**SPECIAL | kw)
def bert(): return small.bert(tf.BertModel, **SPECIAL)
def t5_odd(): return t5(3)
def bart():
    heads = dict(encoder_attention_heads=4, decoder_attention_heads=4)
    size = dict(d_model=32, encoder_layers=2, decoder_layers=2, encoder_ffn_dim=64, decoder_ffn_dim=64, vocab_size=99)
    return tf.BartForConditionalGeneration(tf.BartConfig(**size, **heads, dropout=0.0))
def qwen3moe():
    return tf.Qwen3MoeForCausalLM(
        tf.Qwen3MoeConfig(**TINY | KV, head_dim=8, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2)
    )
def roberta(): return tf.RobertaModel(tf.RobertaConfig(**TINY | QUIET, max_position_embeddings=64))
def bert_classifier(): return small.bert(tf.BertForSequenceClassification, **SPECIAL, num_labels=3)
def llama_classifier(): return tf.LlamaForSequenceClassification(tf.LlamaConfig(**TINY | KV, num_labels=3))


TASKS = {
    llama: "CAUSAL_LM",
    gpt2: "CAUSAL_LM",
    qwen3moe: "CAUSAL_LM",
    bert: "FEATURE_EXTRACTION",
    roberta: "FEATURE_EXTRACTION",
    t5: "SEQ_2_SEQ_LM",
    t5_odd: "SEQ_2_SEQ_LM",
    bart: "SEQ_2_SEQ_LM",
    bert_classifier: "SEQ_CLS",
    llama_classifier: "SEQ_CLS",
}
PEFT = {
    "prompt": lambda **kw: peft.PromptTuningConfig(num_virtual_tokens=5, **kw),
    "p_mlp": lambda **kw: peft.PromptEncoderConfig(num_virtual_tokens=5, encoder_hidden_size=16, **kw),
    "p_lstm": lambda **kw: peft.PromptEncoderConfig(
        num_virtual_tokens=5, encoder_hidden_size=16, encoder_reparameterization_type="LSTM", **kw
    ),
    "prefix": lambda **kw: peft.PrefixTuningConfig(num_virtual_tokens=5, **kw),
    "prefix_mlp": lambda **kw: peft.PrefixTuningConfig(
        num_virtual_tokens=5, prefix_projection=True, encoder_hidden_size=24, **kw
    ),
}
OURS = {
    "prompt": lambda m: SoftPrompt(m, 5, cut=False),
    "p_mlp": lambda m: PTuning(m, 5, hidden=16, cut=False),
    "p_lstm": lambda m: PTuning(m, 5, "lstm", hidden=16, cut=False),
    "prefix": lambda m: Prefix(m, 5, std=1.0),
    "prefix_mlp": lambda m: Prefix(m, 5, hidden=24, std=1.0),
}


def made(build):
    set_seed(0)
    return build().eval()


def out(model, **kw):
    if getattr(model.config, "is_encoder_decoder", False): kw.setdefault("decoder_input_ids", LABELS)
    with torch.no_grad(): o = model(input_ids=IDS, **kw)
    return o.logits if "logits" in o else o.last_hidden_state


def words(model, ids=IDS, **kw):
    "What it generates"
    got = model.generate(
        input_ids=ids,
        **dict(attention_mask=torch.ones_like(ids), max_new_tokens=5, do_sample=False, pad_token_id=0) | kw,
    )
    return got if getattr(model.config, "is_encoder_decoder", False) else got[:, ids.shape[1]:]


HEADS = pytest.mark.skipif(
    not hasattr(Delta, "head_prefix"),
    reason="delta knows one place for heads in files only; PEFT's prompt methods have another",
)
CASES = [
    pytest.param(b, m, marks=[HEADS] * b.__name__.endswith("classifier"))
    for b in TASKS
    for m in PEFT
    if not (m == "prefix_mlp" and b is not llama)
]


@pytest.mark.parametrize("build,method", CASES, ids=lambda x: x if isinstance(x, str) else x.__name__)
def test_peft_both_ways(build, method, tmp_path):
    "A file of ours in PEFT and one of PEFT's here: outputs within 1e-6, with padding, and the same words generated"
    if build is llama_classifier and method.startswith("prefix"):
        pytest.skip("PEFT pools the last word that it finds in input_ids; compared in test_classifier_prefix")
    plain, mask = out(made(build)), torch.tensor([[1] * 6, [1] * 4 + [0] * 2])
    def compare(ours, theirs):
        for kw in ({}, {"attention_mask": mask}):
            mine, pefts = out(ours, **kw), out(theirs, **kw)
            assert mine.shape == pefts.shape and (mine - pefts).abs().max() <= 1e-6 * max(1., pefts.abs().max().item())
        assert mine.shape != plain.shape or (out(ours) - plain).abs().max() > 1e-4
        if ours.can_generate():
            assert torch.equal(words(ours), words(theirs))
            if not method.startswith("prefix") or build is not bart:
                assert torch.equal(words(ours, num_beams=2), words(theirs, num_beams=2))
    ours = made(build)
    # which keeps the head of a classifier: PEFT wants it in the file
    d = OURS[method](ours).freeze()
    compare(ours, peft.PeftModel.from_pretrained(made(build), d.save(tmp_path / "ours")).eval())
    backbone = made(build)
    theirs = peft.get_peft_model(copy.deepcopy(backbone), PEFT[method](task_type=TASKS[build])).eval()
    theirs.save_pretrained(tmp_path / "peft")
    back = Delta.load(tmp_path / "peft", backbone)
    if hasattr(back, "site") and not backbone.config.is_encoder_decoder: back.site.cut = False
    compare(backbone, theirs)


def steps(model, params, call, n=20):
    opt, losses = torch.optim.AdamW(params, lr=1e-2), []
    for _ in range(n):
        loss = call(model).loss
        loss.backward()
        opt.step()
        opt.zero_grad()
        losses.append(loss.item())
    return losses


def as_peft(d, encoder):
    "Give our parameters the values of PEFT's"
    def put(own, values): own.data.copy_(values)
    if isinstance(d, Prefix):
        for row, s in enumerate(d.prefixes.values()):
            at = slice(2 * row * 16, 2 * (row + 1) * 16)
            if s.trunk is None:
                k, v = encoder.embedding.weight[:, at].chunk(2, 1)
                put(s.key, k)
                put(s.value, v)
            else:
                put(s.trunk.table, encoder.embedding.weight)
                put(s.trunk.inner.weight, encoder.transform[0].weight)
                put(s.trunk.inner.bias, encoder.transform[0].bias)
                put(s.out.weight, encoder.transform[2].weight[at])
                put(s.out.bias, encoder.transform[2].bias[at])
        return
    put(d.site.table, encoder.embedding.weight[:len(d.site.table)])
    if isinstance(d, PTuning):
        d.site.head.load_state_dict(encoder.mlp_head.state_dict())
        if d.site.lstm is not None: d.site.lstm.load_state_dict(encoder.lstm_head.state_dict())


@pytest.mark.parametrize("method", PEFT)
def test_twenty_steps(method):
    "The loss curve is PEFT's to 1e-5, and so are the numbers of parameters"
    backbone = made(llama)
    theirs = peft.get_peft_model(copy.deepcopy(backbone), PEFT[method](task_type="CAUSAL_LM"))
    d = OURS[method](backbone).freeze()
    as_peft(d, theirs.prompt_encoder["default"])
    assert (
        d.count().delta
        == sum(p.numel() for p in theirs.parameters() if p.requires_grad)
        == sum(p.numel() for p in d.trainable())
    )
    call = lambda m: m(input_ids=IDS, labels=LABELS)
    want = steps(theirs, [p for p in theirs.parameters() if p.requires_grad], call)
    got = steps(backbone, d.trainable(), call)
    assert max(abs(a - b) for a, b in zip(got, want)) <= 1e-5 and got[-1] < got[0]


@pytest.mark.parametrize("method", ["prompt", "p_mlp"])
def test_twenty_steps_t5(method):
    backbone = made(t5)
    theirs = peft.get_peft_model(copy.deepcopy(backbone), PEFT[method](task_type="SEQ_2_SEQ_LM"))
    d = OURS[method](backbone).freeze()
    as_peft(d, theirs.prompt_encoder["default"])
    call = lambda m: m(input_ids=IDS, labels=LABELS)
    want = steps(theirs, [p for p in theirs.parameters() if p.requires_grad], call)
    got = steps(backbone, d.trainable(), call)
    assert max(abs(a - b) for a, b in zip(got, want)) <= 1e-5 and got[-1] < got[0]


def test_counts():
    "P·D; an encoder beside it; layers · 2 · P · n_kv · d_head; BERT-large and an 8B shape on meta"
    assert SoftPrompt(made(llama), 10).count().delta == 10 * 32
    assert Prefix(made(llama), 10).count().delta == 2 * 2 * 10 * 2 * 8
    # research's tiny LLaMA with grouped heads
    assert Prefix(llama(hidden_size=64), 10).count().delta == 1280
    with torch.device("meta"):
        large = tf.BertForMaskedLM(
            tf.BertConfig(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096)
        )
        eight = tf.LlamaForCausalLM(
            tf.LlamaConfig(
                hidden_size=4096,
                num_hidden_layers=32,
                num_attention_heads=32,
                num_key_value_heads=8,
                intermediate_size=14336,
                vocab_size=128256,
            )
        )
    assert (
        SoftPrompt(large, 20, init="uniform").count().delta == 20 * 1024
        and Prefix(large, 20).count().delta == 24 * 2 * 20 * 1024
    )
    assert Prefix(eight, 20).count().delta == 32 * 2 * 20 * 8 * 128 and SoftPrompt(eight, 20).count().delta == 20 * 4096
    assert {p.device.type for p in deltas(eight)["prefix_tuning"].parameters()} == {"meta"}


ARCHITECTURES = {
    "llama": llama,
    "gpt2": gpt2,
    "qwen3moe": qwen3moe,
    "opt": lambda: tf.OPTForCausalLM(
        tf.OPTConfig(
            hidden_size=32,
            ffn_dim=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            vocab_size=99,
            word_embed_proj_dim=32,
            pad_token_id=0,
        )
    ),
    "neox": lambda: tf.GPTNeoXForCausalLM(tf.GPTNeoXConfig(**TINY)),
    "gptj": lambda: tf.GPTJForCausalLM(tf.GPTJConfig(n_embd=32, n_layer=2, n_head=4, vocab_size=99, rotary_dim=4)),
    "gptneo": lambda: tf.GPTNeoForCausalLM(
        tf.GPTNeoConfig(hidden_size=32, num_layers=2, num_heads=4, vocab_size=99, attention_types=[[["global"], 2]])
    ),
    "qwen2": lambda: tf.Qwen2ForCausalLM(tf.Qwen2Config(**TINY | KV)),
    "qwen3": lambda: tf.Qwen3ForCausalLM(tf.Qwen3Config(**TINY | KV, head_dim=16)),
    "mixtral": lambda: tf.MixtralForCausalLM(tf.MixtralConfig(**TINY | KV, num_local_experts=4)),
    "gemma2": lambda: tf.Gemma2ForCausalLM(tf.Gemma2Config(**TINY | KV, head_dim=8, query_pre_attn_scalar=8)),
    "gemma3": lambda: tf.Gemma3ForCausalLM(tf.Gemma3TextConfig(**TINY | KV, head_dim=8, query_pre_attn_scalar=8)),
    "phi3": lambda: tf.Phi3ForCausalLM(tf.Phi3Config(**TINY | KV)),
    "stablelm": lambda: tf.StableLmForCausalLM(tf.StableLmConfig(**TINY | KV)),
    "bigcode": lambda: tf.GPTBigCodeForCausalLM(tf.GPTBigCodeConfig(n_embd=32, n_layer=2, n_head=4, vocab_size=99)),
    "gptoss": lambda: tf.GptOssForCausalLM(
        tf.GptOssConfig(**TINY | KV, head_dim=8, num_local_experts=4, num_experts_per_tok=2, sliding_window=64)
    ),
    "deepseek": lambda: tf.DeepseekV3ForCausalLM(
        tf.DeepseekV3Config(
            **TINY | dict(num_key_value_heads=4),
            moe_intermediate_size=16,
            n_routed_experts=8,
            num_experts_per_tok=2,
            n_group=2,
            topk_group=1,
            first_k_dense_replace=1,
            kv_lora_rank=16,
            q_lora_rank=16,
            qk_rope_head_dim=4,
            qk_nope_head_dim=8,
            v_head_dim=8,
        )
    ),
    "bert_decoder": lambda: tf.BertLMHeadModel(tf.BertConfig(**TINY, is_decoder=True)),
    "roberta_decoder": lambda: tf.RobertaForCausalLM(tf.RobertaConfig(**TINY, is_decoder=True)),
    "bloom": lambda: tf.BloomForCausalLM(tf.BloomConfig(hidden_size=32, n_layer=2, n_head=4, vocab_size=99)),
    "mpt": lambda: tf.MptForCausalLM(tf.MptConfig(d_model=32, n_layers=2, n_heads=4, vocab_size=99)),
    "mamba": lambda: tf.MambaForCausalLM(tf.MambaConfig(hidden_size=32, num_hidden_layers=2, vocab_size=99)),
}


@pytest.mark.parametrize("method", [SoftPrompt, Prefix])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_words_in_front(name, method):
    "Made from words, it does what those do, whatever attention computes it, in generation too; it leaves no trace"
    model = made(ARCHITECTURES[name])
    refused = {"bloom": "of its own", "mpt": "of its own", "mamba": "no attention that takes a cache"}
    if method is Prefix and name in refused:
        with pytest.raises((TypeError, LookupError), match=refused[name]): method(model)
        return
    text = [7, 8, 9]
    longer, plain = torch.cat([torch.tensor([text] * 2), IDS], 1), out(model)
    with torch.no_grad(): want = model(longer).logits[:, 3:]
    generated = words(model, longer)
    d = method(model, init="text", text=text)
    assert (out(model) - want).abs().max() < 1e-6 < (want - plain).abs().max()
    assert torch.equal(words(model), generated)
    eager = copy.deepcopy(model)
    eager.set_attn_implementation("eager")
    assert (out(eager) - want).abs().max() < 1e-6
    d.detach()
    assert torch.equal(out(model), plain)


def test_padding_left():
    "A padded row generates what it generates alone, though PEFT's does not"
    model = made(llama)
    for d in (SoftPrompt(model, 5), Prefix(model, 5, std=1.)):
        with torch.no_grad():
            for p in d.parameters(): p.normal_()
        padded, mask = (
            torch.cat([torch.zeros(2, 3, dtype=torch.long), IDS], 1),
            (torch.arange(9) > 2).long().expand(2, 9),
        )
        assert torch.equal(words(model, padded, attention_mask=mask), words(model))
        d.detach()


def test_step_by_step():
    "Outputs token by token with a cache are those of one pass, for every kind of cache that holds words alone"
    model = made(llama)
    d = Prefix(model, 5, std=1.)
    whole = out(model)
    static = tf.StaticCache(config=model.config, max_cache_len=9)
    for cache in (tf.DynamicCache(), tf.DynamicCache(config=model.config), static):
        parts = []
        for t in IDS.T:
            with torch.no_grad(): parts.append(model(t[:, None], past_key_values=cache, use_cache=True).logits)
        assert (torch.cat(parts, 1) - whole).abs().max() < 1e-6
        assert int(cache.get_seq_length()) == 6
    with torch.no_grad():
        cache = tf.DynamicCache()
        first = model(IDS[:, :2], past_key_values=cache, use_cache=True).logits
        rest = model(IDS[:, 2:], past_key_values=cache, use_cache=True).logits
        assert (torch.cat([first, rest], 1) - whole).abs().max() < 1e-6                # a prompt in two pieces
    d.detach()
    s = SoftPrompt(model, 5)
    whole = out(model)
    with torch.no_grad():
        cache = tf.DynamicCache()
        pieces = [model(t[:, None], past_key_values=cache, use_cache=True).logits for t in IDS.T]
        assert (torch.cat(pieces, 1) - whole).abs().max() < 1e-6 and cache.get_seq_length() == 11
    s.detach()


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_glm_has_two_positions(rows):
    "Words as a prompt are words in front: the place in the text moves, the place within a written piece does not"
    set_seed(0)
    model = BlankGlmForConditionalGeneration(
        BlankGlmConfig(
            vocab_size=60,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_sequence_length=40,
            initializer_range=0.3,
            sop_token_id=56,
            mask_token_ids=[57],
            eos_token_id=58,
            pad_token_id=59,
        )
    ).eval()
    front, ids = torch.tensor([[4, 5, 6]]).expand(rows, 3), torch.arange(10, 10 + 9 * rows).view(rows, 9)
    ids[:, 3], ids[:, -1] = 57, 56
    d = SoftPrompt(model, init="text", text=front[0].tolist())
    with torch.no_grad():
        got = model(ids, position_ids=blank_positions(ids, 56, [57])).logits
        with d.off(): want = model(torch.cat([front, ids], 1)).logits
    torch.testing.assert_close(got, want[:, 3:], atol=1e-5, rtol=1e-5)
    new = words(model, ids)
    for how in (dict(), dict(use_cache=False)): assert torch.equal(words(model, ids, **how), new)
    with d.off():
        assert torch.equal(words(model, torch.cat([front, ids], 1)), new) and not torch.equal(words(model, ids), new)
    padded, mask = (
        torch.cat([torch.full((rows, 2), 59), ids], 1),
        torch.cat([torch.zeros(rows, 2), torch.ones(rows, 9)], 1).long(),
    )
    assert torch.equal(words(model, padded, attention_mask=mask), new)


def test_positions_in_three_rows_move_together():
    "Of models of pictures, (3, B, L): all of a text's rows are its places"
    for rows in (1, 2, 3):
        seen = {}
        class Asks(nn.Module):
            def __init__(self):
                super().__init__()
                self.words = nn.Embedding(9, 4)
            def get_input_embeddings(self): return self.words
            def forward(self, input_ids=None, position_ids=None, inputs_embeds=None):
                seen["at"] = position_ids
                return inputs_embeds
        SoftPrompt(model := Asks(), 2)
        model(torch.zeros(rows, 5, dtype=torch.long), position_ids=torch.arange(5).expand(3, rows, 5))
        assert torch.equal(seen["at"], torch.arange(7).expand(3, rows, 7))


def test_t5_rows(tmp_path):
    "Of an even number of layers PEFT lets two read one row; our files keep all apart, its own load as it reads them"
    for layers in (2, 3, 4):
        build = lambda: t5(layers)
        model = made(build)
        d = Prefix(model, 3, std=1.)
        table = load_file(d.save(tmp_path / str(layers)) / "adapter_model.safetensors")["prompt_embeddings"]
        assert table.shape == (3, 2 * 32 * (layers | 1))
        again = made(build)
        back = Delta.load(tmp_path / str(layers), again)
        assert all(torch.equal(a, b) for a, b in zip(d.parameters(), back.parameters()))
        theirs = peft.PeftModel.from_pretrained(made(build), tmp_path / str(layers)).eval()
        assert (out(theirs) - out(model)).abs().max() <= 1e-6


def test_t5_encoder_prefix():
    "Named, the encoder's attentions get one too"
    model = made(t5)
    plain = out(model)
    d = Prefix(model, 3, modules="[r]encoder\\.block\\.\\d\\.layer\\.0\\.SelfAttention", std=1.)
    assert (out(model) - plain).abs().max() > 1e-4 and torch.isfinite(out(model)).all()
    d.freeze()
    steps(model, d.trainable(), lambda m: m(input_ids=IDS, labels=LABELS), 3)
    d.detach()
    assert torch.equal(out(model), plain)


def test_classifier_prefix():
    "A LLaMA classifier with a prefix made from words pools what it pools behind these words"
    model = made(llama_classifier)
    with torch.no_grad(): want = model(torch.cat([torch.tensor([[7, 8, 9]] * 2), IDS], 1)).logits
    Prefix(model, init="text", text=[7, 8, 9])
    assert (out(model) - want).abs().max() < 1e-6


def test_heads_of_tasks():
    "Labels of tokens are lengthened, of sentences not; places of answers move; the loss is that of the longer input"
    config = tf.BertConfig(**TINY, num_labels=3, hidden_dropout_prob=0., attention_probs_dropout_prob=0.)
    text = torch.tensor([[7, 8, 9]] * 2)
    longer, ones = torch.cat([text, IDS], 1), dict(token_type_ids=torch.ones_like(IDS))
    def both(build, labels, long_labels):
        model = made(build)
        kinds = torch.cat([torch.zeros_like(text), ones["token_type_ids"]], 1)
        with torch.no_grad():
            want = model(longer, token_type_ids=kinds, **long_labels)
            SoftPrompt(model, init="text", text=[7, 8, 9])
            embeddings = model.bert.embeddings.word_embeddings(text)
            assert torch.equal(deltas(model)["prompt_tuning"].prompt(), embeddings[0])
            got = model(IDS, **ones, **labels)
        assert torch.allclose(got.loss, want.loss, atol=1e-6)
        return got, want
    tags = torch.tensor([[0, 1, 2, 0, 1, -100]] * 2)
    got, want = both(
        lambda: tf.BertForTokenClassification(config),
        dict(labels=tags),
        dict(labels=torch.cat([torch.full((2, 3), -100), tags], 1)),
    )
    assert torch.allclose(got.logits, want.logits[:, 3:], atol=1e-6)
    got, want = both(lambda: tf.BertForSequenceClassification(config), *[dict(labels=torch.tensor([0, 2]))] * 2)
    assert torch.allclose(got.logits, want.logits, atol=1e-6)
    at = torch.tensor([1, 2])
    got, want = both(
        lambda: tf.BertForQuestionAnswering(tf.BertConfig(**TINY)),
        dict(start_positions=at, end_positions=at + 1),
        dict(start_positions=at + 3, end_positions=at + 4),
    )
    assert got.start_logits.shape == IDS.shape and torch.allclose(got.end_logits, want.end_logits[:, 3:], atol=1e-6)
    model = made(llama)
    SoftPrompt(model, init="text", text=[7, 8, 9])
    with torch.no_grad():
        o = model(IDS, output_hidden_states=True, logits_to_keep=2)
        assert o.logits.shape == (2, 2, 99) and {h.shape for h in o.hidden_states} == {(2, 6, 32)}
        t = model(IDS, return_dict=False)
        assert t[0].shape == (2, 6, 99)


def test_half_precision():
    "A bf16 backbone with a table of its own dtype or of fp32"
    model = made(llama).bfloat16()
    for make in (lambda dtype: SoftPrompt(model, 3, dtype=dtype), lambda dtype: Prefix(model, 3, dtype=dtype)):
        for dtype in (None, torch.float32):
            d = make(dtype)
            assert {p.dtype for p in d.parameters()} == {dtype or torch.bfloat16} and out(model).dtype == torch.bfloat16
            d.freeze()
            steps(model, d.trainable(), lambda m: m(input_ids=IDS, labels=LABELS), 2)
            d.detach()


def test_file_errors(tmp_path):
    "Another width, another number of layers: refused, and the model is as it was"
    model = made(llama)
    plain = out(model)
    Prefix(made(lambda: llama(num_hidden_layers=3)), 4).save(tmp_path / "three")
    with pytest.raises(ValueError, match="3 layers, the model 2"): Delta.load(tmp_path / "three", model)
    Prefix(made(lambda: llama(num_key_value_heads=4)), 4).save(tmp_path / "heads")
    with pytest.raises(ValueError, match="another backbone"): Delta.load(tmp_path / "heads", model)
    SoftPrompt(made(lambda: llama(hidden_size=64)), 4).save(tmp_path / "wide")
    with pytest.raises(ValueError, match="another backbone"): Delta.load(tmp_path / "wide", model)
    assert torch.equal(out(model), plain) and not any(d.attached for d in deltas(model).values())
    assert not list(n for n, _ in model.named_modules() if "_deltas" in n)


def test_part_of_the_layers(tmp_path):
    "A prefix in some layers is a file of ours that PEFT refuses instead of reading it wrongly"
    model = made(llama)
    d = Prefix(model, 4, modules="layers[1:].self_attn", std=1.)
    d.save(tmp_path)
    again = made(llama)
    Delta.load(tmp_path, again)
    assert torch.equal(out(again), out(model)) and list(deltas(again)["prefix_tuning"].prefixes) == [
        "model.layers.1.self_attn"
    ]
    with pytest.raises(Exception): peft.PeftModel.from_pretrained(made(llama), tmp_path)


def test_beside_others():
    "A prompt, a prefix and a Lora on one model, in and out in any order; the loss falls; only what is trained moves"
    model = made(llama)
    plain, state = out(model), copy.deepcopy(model.state_dict())
    for order in ((0, 1, 2), (1, 2, 0), (2, 1, 0)):
        three = [SoftPrompt(model, 3), Prefix(model, 4), Lora(model, r=2)]
        for d in three: d.freeze(keep=None)
        for d in three:
            for p in d.parameters(): p.requires_grad_(True)
        losses = steps(model, [p for d in three for p in d.parameters()], lambda m: m(input_ids=IDS, labels=LABELS), 8)
        assert losses[-1] < losses[0]
        for i in order: three[i].detach()
        assert torch.equal(out(model), plain) and all(torch.equal(state[k], v) for k, v in model.state_dict().items())
        for d in three: deltas(model).forget(d.name)


def test_copy_to():
    "A copy on another model reads that model's words"
    model, other = made(llama), llama().eval()
    for d in (SoftPrompt(model, 3), PTuning(model, 3), Prefix(model, 3, std=1.)):
        there = d.copy_to(other)
        if hasattr(there, "site"): assert there.site.home[0] is other
        alone = out(other)
        d.detach()
        there.detach()
        there.attach()
        assert torch.equal(out(other), alone)
        there.detach()


def test_another_process(tmp_path):
    "A pickled model generates the same in an interpreter of its own"
    model = made(llama)
    SoftPrompt(model, 3)
    Prefix(model, 2, std=1.)
    torch.save(model, tmp_path / "model.pt")
    code = (
        f"import torch; m = torch.load({str(tmp_path / 'model.pt')!r}, weights_only=False); ids = torch.arange(3, "
        "15).view(2, 6)\n"
        "print(m.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=5, do_sample=False, "
        "pad_token_id=0)[:, 6:].tolist())"
    )
    done = fresh_python(code)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == words(model).tolist()


def test_words_change_under_it():
    "The embedding may be exchanged while the prompt is attached"
    model = made(llama)
    SoftPrompt(model, 3)
    model.resize_token_embeddings(120)
    assert out(model).shape == (2, 6, 120)


@HEADS
@pytest.mark.parametrize("method", ["prompt", "prefix"])
def test_head_goes_along(method, tmp_path):
    "A task head is kept, trains with the prompt, and travels in the file — here and to PEFT"
    model = made(bert_classifier)
    d = OURS[method](model).freeze()
    assert d.count().trainable == d.count().delta + 32 * 3 + 3
    losses = steps(model, d.trainable(), lambda m: m(input_ids=IDS, labels=torch.tensor([0, 2])), 10)
    assert losses[-1] < losses[0]
    d.save(tmp_path)
    again = made(bert_classifier)
    Delta.load(tmp_path, again)
    assert (out(again) - out(model)).abs().max() <= 1e-6
    theirs = peft.PeftModel.from_pretrained(made(bert_classifier), tmp_path).eval()
    assert (out(theirs) - out(model)).abs().max() <= 1e-6


def test_checkpointed_models():
    "Gradients under transformers' checkpointing are the plain ones for BERT, GPT-2 and T5 as well"
    for build in (bert, gpt2, t5):
        for make in (lambda m: SoftPrompt(m, 3), lambda m: Prefix(m, 3)):
            grads = []
            for recompute in (False, True):
                model = made(build).train()
                set_seed(1)
                d = make(model).freeze()
                if recompute:
                    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
                kw = {} if build is bert else dict(labels=LABELS)
                o = model(input_ids=IDS, **kw)
                (o.last_hidden_state.square().mean() if build is bert else o.loss).backward()
                grads.append([p.grad for p in d.parameters()])
            assert all(torch.allclose(a, b, atol=1e-6) and a.abs().max() > 0 for a, b in zip(*grads))


@pytest.mark.slow
@pytest.mark.parametrize("method", [SoftPrompt, Prefix])
def test_inductor(method):
    "The real compiler, forward and backward"
    model = made(lambda: llama(num_hidden_layers=1))
    d = method(model, 4).freeze()
    def grads(m):
        loss = m(input_ids=IDS, labels=LABELS).loss
        return torch.autograd.grad(loss, d.parameters())
    want, eager = out(model), grads(model)
    torch._dynamo.reset()
    compiled = torch.compile(model)
    assert (out(compiled) - want).abs().max() < 1e-5
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(grads(compiled), eager))
    torch._dynamo.reset()


@pytest.mark.parametrize("make", [SoftPrompt, PTuning])
def test_prompts_on_a_packed_embedding(make):
    model = pack_linears(llama(tie_word_embeddings=True))
    assert make(model, 5).prompt().shape == (5, 32)

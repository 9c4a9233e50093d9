"""What tests of several modules share: small models of every family, deltas moved away from where they start, what
must be as it was"""
import copy

import torch
import transformers as tf
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SMALL = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=96)
GQA = dict(SMALL, num_key_value_heads=2)
IDS = torch.arange(24).view(3, 8) % 90 + 3
FAMILIES = {
    "bert": lambda: tf.BertForMaskedLM(tf.BertConfig(**SMALL)),
    "roberta": lambda: tf.RobertaForMaskedLM(tf.RobertaConfig(**SMALL, pad_token_id=1)),
    "distilbert": lambda: tf.DistilBertForMaskedLM(
        tf.DistilBertConfig(dim=32, hidden_dim=48, n_layers=2, n_heads=4, vocab_size=96)
    ),
    "deberta": lambda: tf.DebertaV2ForMaskedLM(tf.DebertaV2Config(**SMALL)),
    "modernbert": lambda: tf.ModernBertForMaskedLM(
        tf.ModernBertConfig(**SMALL, pad_token_id=0, bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2)
    ),
    "llama": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**GQA)),
    "gemma": lambda: tf.GemmaForCausalLM(tf.GemmaConfig(**GQA, head_dim=8)),
    "gemma2": lambda: tf.Gemma2ForCausalLM(tf.Gemma2Config(**GQA, head_dim=8)),
    "qwen3": lambda: tf.Qwen3ForCausalLM(tf.Qwen3Config(**GQA, head_dim=8)),
    "qwen3_moe": lambda: tf.Qwen3MoeForCausalLM(
        tf.Qwen3MoeConfig(**GQA, head_dim=8, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2)
    ),
    "cohere": lambda: tf.CohereForCausalLM(tf.CohereConfig(**GQA, pad_token_id=0, bos_token_id=1, eos_token_id=2)),
    "olmo2": lambda: tf.Olmo2ForCausalLM(tf.Olmo2Config(**GQA, pad_token_id=0, eos_token_id=2)),
    "nemotron": lambda: tf.NemotronForCausalLM(tf.NemotronConfig(**GQA)),
    "gpt2": lambda: tf.GPT2LMHeadModel(
        tf.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=96, bos_token_id=1, eos_token_id=2)
    ),
    "neox": lambda: tf.GPTNeoXForCausalLM(tf.GPTNeoXConfig(**SMALL)),
    "falcon": lambda: tf.FalconForCausalLM(tf.FalconConfig(**SMALL)),
    "opt": lambda: tf.OPTForCausalLM(
        tf.OPTConfig(
            hidden_size=32,
            ffn_dim=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            vocab_size=96,
            max_position_embeddings=32,
            word_embed_proj_dim=32,
        )
    ),
    "phi3": lambda: tf.Phi3ForCausalLM(tf.Phi3Config(**GQA, pad_token_id=0)),
    "t5": lambda: tf.T5ForConditionalGeneration(
        tf.T5Config(
            d_model=32,
            d_kv=8,
            d_ff=48,
            num_layers=2,
            num_heads=4,
            vocab_size=96,
            initializer_factor=0.3,
            dropout_rate=0.0,
            decoder_start_token_id=0,
        )
    ),
    "bart": lambda: tf.BartForConditionalGeneration(
        tf.BartConfig(
            d_model=32,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=48,
            decoder_ffn_dim=48,
            vocab_size=96,
        )
    ),
    "cpmant": lambda: tf.CpmAntForCausalLM(
        tf.CpmAntConfig(
            vocab_size=96,
            hidden_size=32,
            num_attention_heads=4,
            dim_head=8,
            dim_ff=48,
            num_hidden_layers=2,
            prompt_types=4,
            prompt_length=2,
        )
    ),
}


def build(name):
    "A model of a family, with the same weights each time"
    torch.manual_seed(0)
    return FAMILIES[name]().eval()


def llama(**kw):
    "A LLaMA of one's own sizes, with the same weights each time"
    torch.manual_seed(0)
    return tf.LlamaForCausalLM(tf.LlamaConfig(**{**SMALL, "num_key_value_heads": 4, **kw})).eval()


def inputs(model, ids=IDS):
    "What a model of any family is called with"
    return {"input_ids": ids, **({"decoder_input_ids": ids} if model.config.is_encoder_decoder else {})}


def logits(model, ids=IDS): return model(**inputs(model, ids)).logits


def moved(d, std=0.1, seed=1):
    "The delta, its parameters away from where they start"
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in d.parameters():
            if p.is_floating_point(): p += std * torch.randn(p.shape, generator=g).to(p)
    return d


def tune(model, d, ids, penalty=lambda: 0.0, steps=3, weight_decay=0.01):
    "A few steps of AdamW on a delta"
    opt = torch.optim.AdamW(d.param_groups(1e-2), weight_decay=weight_decay)
    for _ in range(steps):
        opt.zero_grad()
        (model(input_ids=ids, labels=ids).loss + penalty()).backward()
        opt.step()


def unused(d):
    "Names of the sites with a parameter that got no gradient"
    return [n for n, s in d.sites.items() for p in s.parameters() if p.grad is None or not p.grad.abs().max() > 0]


def as_it_is(model):
    "A check, for later, that the model is what it is now: its classes, its names, its tensors and what it computes"
    state, classes = copy.deepcopy(model.state_dict()), [type(m) for m in model.modules()]
    with torch.no_grad(): plain = logits(model)
    def check():
        with torch.no_grad(): assert torch.equal(logits(model), plain)
        assert [type(m) for m in model.modules()] == classes and list(model.state_dict()) == list(state)
        assert all(torch.equal(state[k], v) for k, v in model.state_dict().items())
    return check


def compiled(run, model, **kw):
    "What `run` makes of the compiled model"
    torch._dynamo.reset()
    try: return run(torch.compile(model, **kw))
    finally: torch._dynamo.reset()


def gradients(params):
    "A function: model → gradients of the parameters"
    return lambda model: torch.autograd.grad(logits(model).square().mean(), params)


def shared_files(d, build, load, folder, atol=0.):
    """Parameters that sites share: written once they are shared again, spread out for PEFT they are not, and the file
    is larger. The second folder"""
    want, once, spread = logits(d.model), d.save(folder / "once"), d.save(folder / "spread", spread=True)
    for written in (once, spread):
        other = build()
        back = load(written, other)
        torch.testing.assert_close(logits(other), want, atol=atol, rtol=0)
        assert written == spread or back.count().delta == d.count().delta
    assert (once / "adapter_model.safetensors").stat().st_size < (spread / "adapter_model.safetensors").stat().st_size
    return spread


def near_under_autocast(model):
    "Are the logits in half precision, under autocast, what they are without?"
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad(): low = logits(model)
    with torch.no_grad(): full = logits(model)
    return (low.float() - full).abs().max() < 0.05 * full.abs().max()


TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'user' and loop.index0 % 2 %}{{ raise_exception('users speak first') }}{% "
    "endif %}{{ m.role[0] }}:{{ m.content }};{% endfor %}a:"
)


def make_tok(special=()):
    t = Tokenizer(models.BPE())
    t.pre_tokenizer, t.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    t.train_from_iterator(
        ["plain english"],
        trainers.BpeTrainer(vocab_size=270, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False),
    )
    return tf.PreTrainedTokenizerFast(
        tokenizer_object=t, chat_template=TEMPLATE, additional_special_tokens=list(special)
    )

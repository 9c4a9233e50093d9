"""A small one of everything that bmlab saves, as the code of this checkout writes it: what
tests/project/test_saved.py opens.

usage: make_saved.py FOLDER [KIND …]

FOLDER receives a folder for each kind, with an `expected.json` beside what was saved: figures of the object that was
saved, not of one that was read again. Without KIND all are made. The archive tests/fixtures/saved_before_chapters.zip
was made
when all modules lay beside each other in the package; it is not to be made anew, for then it would show nothing.
"""
import io, json, shutil, sys, tempfile, threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pandas as pd
import torch
import transformers as tf
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from torch import nn

WORDS = "a dull fun film it was . bad good fine poor so not love hate very".split()
SIGNS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "<eod>"]
VOCABULARY = SIGNS + WORDS
IDS = torch.tensor([[7, 9, 11, 6, 8], [20, 13, 6, 9, 17]])
QUESTION = '{"placeholder":"text_a"} it was {"mask"}'
SOFT = '{"soft":2} ' + QUESTION
FILMS = [{"text_a": text, "label": label} for text, label in [
    ("a fun film", "yes"), ("dull", "no"), ("love it", "yes"), ("hate it", "no"), ("so so", "no"),
    ("fine film", "yes")]]
LINES = ["a fun film .", "it was dull . it was bad .", "love it", "so very fine , good film", "not good . poor film ."]
SPECK = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
             vocab_size=12)
WIDE = dict(hidden_size=32, intermediate_size=32, num_key_value_heads=1, vocab_size=8)   # for groups of 32 columns
MAKERS = {}


def kind(f):
    MAKERS[f.__name__] = f
    return f


# ---- figures ------------------------------------------------------------------------------------------------------

def rounded(t):
    t = t.detach() if isinstance(t, torch.Tensor) else t
    return [float(f"{v:.5f}") for v in np.asarray(t, dtype=float).ravel().tolist()]


@torch.no_grad()
def figures(model, ids=IDS, **more):
    "The first logits of a model's last tokens, and how many parameters and bytes it has"
    out = model(input_ids=ids % model.config.vocab_size, **more).logits[:, -1, :6]
    return {"logits": rounded(out), "parameters": sum(p.numel() for p in model.parameters())}


def output(module, width=32, rows=3):
    "The first outputs of a layer for numbers that need no generator"
    with torch.no_grad(): return {"output": rounded(module(wave(rows, width))[:, :6])}


def wave(rows, width): return torch.arange(rows * width).view(rows, width).mul(0.7).sin()


def said(frame): return {"p": rounded(torch.tensor(frame.filter(like="p(").values)), "labels": frame.label.tolist()}


# ---- models to begin with -----------------------------------------------------------------------------------------

def tokenizer():
    t = Tokenizer(models.WordLevel({w: i for i, w in enumerate(VOCABULARY)}, unk_token="[UNK]"))
    t.normalizer, t.pre_tokenizer = normalizers.Lowercase(), pre_tokenizers.BertPreTokenizer()
    return tf.PreTrainedTokenizerFast(tokenizer_object=t, pad_token="[PAD]", unk_token="[UNK]", eos_token="<eod>")


def masked_tokenizer():
    tok = tokenizer().backend_tokenizer
    ends = [("[CLS]", 2), ("[SEP]", 3)]
    tok.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
    names = dict(pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]", mask_token="[MASK]")
    return tf.PreTrainedTokenizerFast(tokenizer_object=tok, **names)


def spread(model, seed=0, std=0.2):
    "Weights that are far from nothing, so that a mistake shows"
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim > 1: p.copy_(std * torch.randn(p.shape, generator=g))
            elif p.is_floating_point(): p.add_(0.1 * torch.randn(p.shape, generator=g))
    return model.eval()


def llama(**kw):
    sizes = dict(hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=24)
    sizes |= dict(num_key_value_heads=2, max_position_embeddings=64, bos_token_id=0, eos_token_id=5, pad_token_id=0)
    return spread(tf.LlamaForCausalLM(tf.LlamaConfig(**sizes | kw)))


def gpt2():
    sizes = dict(n_embd=8, n_layer=1, n_head=2, vocab_size=24, n_positions=16, bos_token_id=1, eos_token_id=5)
    return spread(tf.GPT2LMHeadModel(tf.GPT2Config(**sizes)))


def mixtral():
    sizes = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, vocab_size=24)
    sizes |= dict(num_key_value_heads=1, num_local_experts=2, num_experts_per_tok=1)
    return spread(tf.MixtralForCausalLM(tf.MixtralConfig(**sizes)))


def bert():
    sizes = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, vocab_size=24)
    return spread(tf.BertForMaskedLM(tf.BertConfig(**sizes, max_position_embeddings=24)))


def calib(vocabulary=24): return [{"input_ids": torch.arange(64).view(4, 16) % vocabulary}]


def moved(d, std=0.1, seed=1):
    "A delta away from where it starts"
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in d.parameters():
            if p.is_floating_point(): p += std * torch.randn(p.shape, generator=g)
    return d


def stack():
    "A model that no library knows"
    return spread(nn.Sequential(nn.Linear(4, 8, bias=False), nn.Tanh(), nn.Linear(8, 4, bias=False)))


# ---- folders for transformers -------------------------------------------------------------------------------------

@kind
def hf(to):
    from bmlab.all import ModelCard, export_hf
    model = llama()
    card = ModelCard(name="tiny", license="apache-2.0", source="drawn by chance", license_text="What one may do.\n")
    export_hf(card.put(model), to, tokenizer=tokenizer())
    return figures(model) | {"license": "apache-2.0", "tokens": tokenizer()("a fun film")["input_ids"]}


@kind
def hf_masked(to):
    from bmlab.all import export_hf
    model = bert()
    export_hf(model, to, tokenizer=masked_tokenizer(), max_shard="8kB")
    return figures(model) | {"files": len(list(to.glob("*.safetensors")))}


@kind
def cpm_ant(to):
    from bmlab.all import CpmAntTied, export_hf
    sizes = dict(hidden_size=8, num_attention_heads=2, dim_head=4, dim_ff=12, num_hidden_layers=1, vocab_size=24)
    more = dict(prompt_length=3, prompt_types=4, segment_types=5, position_bias_num_buckets=16)
    model = spread(CpmAntTied(tf.CpmAntConfig(**sizes, **more, position_bias_max_distance=20)))
    export_hf(model, to)
    return figures(model)


@kind
def cpm_bee(to):
    from bmlab.all import CpmBeeConfig, CpmBeeForCausalLM, CpmBeeTokenizer, answer, export_hf
    tok = CpmBeeTokenizer.learn(["今天天气好冷" * 3, "问答" * 6], size=40)
    sizes = dict(hidden_size=8, num_attention_heads=2, dim_head=4, dim_ff=12, num_hidden_layers=1)
    more = dict(position_bias_num_buckets=16, position_bias_max_distance=20)
    model = spread(CpmBeeForCausalLM(CpmBeeConfig(**sizes, **more, vocab_size=len(tok))))
    export_hf(model, to, tokenizer=tok)
    answered = answer(model, tok, {"问": "今天天气", "<ans>": ""}, max_new_tokens=3).data
    return {"answer": answered, "tokens": tok("今天天气好冷")["input_ids"], "vocabulary": len(tok)}


VOCAB = ["<unk>", "<s>", "</s>", "<sep>", "<pad>", "<mask>", "<go>", "<eod>",
         *"床前明月光疑是地上霜", "明月", "<s_0>", "<s_1>"]


@kind
def cpm_1(to):
    from bmlab.all import export_hf
    from bmlab.models.cpm2 import Cpm1Config, Cpm1ForCausalLM
    sizes = dict(vocab_size=24, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, dim_head=4, dim_ff=12)
    model = spread(Cpm1ForCausalLM(Cpm1Config(**sizes, position_bias_num_buckets=16)))
    export_hf(model, to)
    return figures(model)


def _encdec(to, cls, config, tok_class):
    from bmlab.all import export_hf
    with tempfile.TemporaryDirectory() as t:
        (Path(t) / "vocab.txt").write_text("\n".join(VOCAB) + "\n", encoding="utf-8")
        tok = tok_class(str(Path(t) / "vocab.txt"), cut="none")
        sizes = dict(vocab_size=len(VOCAB), d_model=8, d_kv=4, d_ff=8, num_heads=2, num_layers=1)
        model = spread(cls(config(**sizes)))
        export_hf(model, to, tokenizer=tok)
        return figures(model, decoder_input_ids=IDS) | {"tokens": tok("床前<s_0>光")["input_ids"]}


@kind
def cpm_2(to):
    from bmlab.all import Cpm2Tokenizer
    from bmlab.models.cpm2 import Cpm2Config, Cpm2ForConditionalGeneration
    return _encdec(to, Cpm2ForConditionalGeneration, Cpm2Config, Cpm2Tokenizer)


@kind
def eva(to):
    from bmlab.all import EvaTokenizer
    from bmlab.models.cpm2 import EvaConfig, EvaForConditionalGeneration
    return _encdec(to, EvaForConditionalGeneration, EvaConfig, EvaTokenizer)


@kind
def glm(to):
    from bmlab.all import BlankGlmTokenizer, export_hf
    from bmlab.models.glm import BlankGlmConfig, BlankGlmForConditionalGeneration
    import sentencepiece
    said, lines = io.BytesIO(), ["床前明月光，疑是地上霜。", "明月，地上"] * 4
    sentencepiece.SentencePieceTrainer.train(                 # from memory: a file would be named in the model
        sentence_iterator=iter(lines), model_writer=said, vocab_size=24, character_coverage=1.0, minloglevel=2,
        hard_vocab_limit=False, normalization_rule_name="identity", user_defined_symbols=["<n>"])
    with tempfile.TemporaryDirectory() as t:
        (Path(t) / "cog-pretrain.model").write_bytes(said.getvalue())
        tok = BlankGlmTokenizer(f"{t}/cog-pretrain.model")
        n = tok.vocab_size
        signs = dict(mask_token_ids=[n + 3, n + 8, n + 9], sop_token_id=n + 6, eos_token_id=n + 7, pad_token_id=n)
        sizes = dict(vocab_size=n + 11, hidden_size=8, num_hidden_layers=1, num_attention_heads=2)
        model = spread(BlankGlmForConditionalGeneration(BlankGlmConfig(**sizes, **signs, max_sequence_length=24)))
        export_hf(model, to, tokenizer=tok)
        return figures(model) | {"tokens": tok("床前[MASK]光")["input_ids"]}


@kind
def converted(to):
    from bmlab.all import to_original
    from bmlab.models.cpm2 import Cpm1Config, Cpm1ForCausalLM
    sizes = dict(vocab_size=24, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, dim_head=4, dim_ff=8)
    model = spread(Cpm1ForCausalLM(Cpm1Config(**sizes, position_bias_num_buckets=16)))
    with tempfile.TemporaryDirectory() as t:
        model.save_pretrained(t)
        to_original(t, to / "original.pt", "cpm-1-modelcenter")
        model.config.save_pretrained(to)
    return figures(model)


@kind
def converted_back(to):
    "What `to_safetensors` wrote, with the hashes that tell damage"
    from bmlab.all import to_original, to_safetensors
    from bmlab.models.cpm2 import Cpm1Config, Cpm1ForCausalLM
    sizes = dict(vocab_size=24, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, dim_head=4, dim_ff=8)
    model = spread(Cpm1ForCausalLM(Cpm1Config(**sizes, position_bias_num_buckets=16)))
    with tempfile.TemporaryDirectory() as t:
        model.save_pretrained(f"{t}/a")
        to_original(f"{t}/a", f"{t}/original.pt", "cpm-1-modelcenter")
        to_safetensors(f"{t}/original.pt", to / "folder", "cpm-1-modelcenter", model.config)
    return figures(model)


# ---- compressed models --------------------------------------------------------------------------------------------

def _cooked(to, model, **more):
    from bmlab.all import save_cooked
    save_cooked(model, to, **more)
    return figures(model) | {"classes": sorted({type(m).__name__ for m in model.modules()})}


def _exported(model, *methods):
    from bmlab.all import Cook
    return Cook(model, list(methods), calib()).export()


@kind
def cooked_float(to): return _cooked(to, llama(), tok=tokenizer())
@kind
def cooked_int8(to):
    from bmlab.all import quantize
    return _cooked(to, quantize(llama(), calib()))
@kind
def cooked_int8_tied(to):
    from bmlab.all import pack_linears
    return _cooked(to, pack_linears(llama(tie_word_embeddings=True)))
@kind
def cooked_int8_conv1d(to):
    from bmlab.all import pack_linears
    return _cooked(to, pack_linears(gpt2(), modules="[r]h.*(c_fc|c_proj|c_attn)"))
@kind
def cooked_int8_groups(to):
    from bmlab.all import quantize
    return _cooked(to, quantize(llama(**WIDE), calib(8), bits=8, group_size=32))
@kind
def cooked_w8a8(to):
    from bmlab.all import quantize
    return _cooked(to, quantize(llama(), calib(), activations=8))
@kind
def cooked_int4(to):
    from bmlab.all import quantize
    return _cooked(to, quantize(llama(**WIDE), calib(8), bits=4, group_size=32, integer_zero=False))
@kind
def cooked_experts(to):
    from bmlab.all import pack_linears
    return _cooked(to, pack_linears(mixtral(), modules="experts"))
@kind
def cooked_experts_int4(to):
    from bmlab.all import pack_linears
    model = spread(tf.MixtralForCausalLM(tf.MixtralConfig(**mixtral().config.to_dict() | dict(intermediate_size=32))))
    return _cooked(to, pack_linears(model, 4, modules="experts", group_size=32, integer_zero=False))
@kind
def cooked_moefy(to):
    from bmlab.all import MoEfy
    return _cooked(to, _exported(llama(), MoEfy(experts=4, active=.5)))
@kind
def cooked_moefy_mlp(to):
    from bmlab.all import MoEfy
    how = dict(router="mlp", cluster="coactivation", threshold=.8)
    return _cooked(to, _exported(llama(), MoEfy(experts=4, active=.5, **how)))
@kind
def cooked_moefy_int8(to):
    from bmlab.all import MoEfy, quantize
    return _cooked(to, quantize(_exported(llama(), MoEfy(experts=4, active=.5))))
@kind
def cooked_neurons(to):
    from bmlab.all import NeuronSparse
    return _cooked(to, _exported(llama(), NeuronSparse(keep=.5)))
@kind
def cooked_neurons_lowrank(to):
    from bmlab.all import NeuronSparse
    return _cooked(to, _exported(llama(), NeuronSparse(keep=.5, predictor="lowrank", rank=2)))
@kind
def cooked_pruned(to):
    from bmlab.all import StructPrune
    torch.manual_seed(0)
    method = StructPrune(layers=2, ffn=.5, heads=.5, hidden=.5, score="magnitude")
    return _cooked(to, _exported(llama(num_hidden_layers=3), method))
@kind
def cooked_sliced(to):
    from bmlab.all import slice_model
    model = llama(num_hidden_layers=2)
    slice_model(model, {"model.layers.0.self_attn.o_proj": [], "model.layers.1.mlp.down_proj": range(0, 16, 2)})
    return _cooked(to, model)
@kind
def cooked_sparse24(to):
    from bmlab.all import Sparse24
    return _cooked(to, _exported(llama(), Sparse24("*.mlp.*", score="magnitude")))
@kind
def cooked_sparse24_int8(to):
    from bmlab.all import Sparse24, pack_linears
    from bmlab.cook.sparse24 import pack24
    dense = _exported(llama(), Sparse24("*.mlp.*", score="magnitude", packed=False))
    return _cooked(to, pack24(pack_linears(dense, modules="*.mlp.*")))

@kind
def cooked_stack(to):
    from bmlab.all import pack_linears, save_cooked
    model = pack_linears(stack(), modules="2")
    save_cooked(model, to)
    return output(model, 4)


# ---- deltas -------------------------------------------------------------------------------------------------------

def _delta(to, make, model=None, **save):
    torch.manual_seed(0)
    model = llama() if model is None else model
    d = moved(make(model))
    d.save(to, **save)
    return {"logits": figures(model)["logits"], "kind": d.kind, "sites": len(d.sites)}


def delta(name, cls, **kw):
    "A maker for a delta of this class"
    def make(to):
        import bmlab.all as names
        return _delta(to, lambda model: getattr(names, cls)(model, **kw))
    MAKERS[f"delta_{name}"] = make


delta("lora", "Lora", r=2)
delta("lora_dora", "Lora", r=2, dora=True, rslora=True)
delta("adapter", "Adapter", bottleneck=4)
delta("adapter_pfeiffer", "Adapter", place="pfeiffer", reduction_factor=4, activation="relu", scale="learned")
delta("parallel_adapter", "ParallelAdapter", bottleneck=4, scale=2.0)
delta("low_rank_adapter", "LowRankAdapter", r=2, reduction_factor=4)
delta("compacter", "Compacter", n=2, reduction_factor=4)
delta("compacter_rule", "Compacter", n=2, reduction_factor=4, shared_rule=True)
delta("bitfit", "BitFit")
delta("ia3", "IA3")
delta("ln_tuning", "LayerNormTuning")
delta("prompt_tuning", "SoftPrompt", length=3)
delta("p_tuning", "PTuning", length=3, hidden=4)
delta("p_tuning_lstm", "PTuning", length=3, encoder="lstm", hidden=4)
delta("prefix", "Prefix", length=3)
delta("prefix_mlp", "Prefix", length=3, hidden=4)
delta("peft_loha", "PeftDelta", config={"peft_type": "LOHA", "r": 2, "target_modules": ["q_proj", "v_proj"]})
delta("peft_oft", "PeftDelta", config={"peft_type": "OFT", "r": 0, "oft_block_size": 4, "target_modules": ["q_proj"]})


@kind
def delta_lora_shared(to):
    from bmlab.all import Lora
    model = llama(num_hidden_layers=2)
    model.save_pretrained(to / "backbone")
    return _delta(to / "delta", lambda m: Lora(m, r=2, share="layers"), model)


@kind
def delta_lora_slices(to):
    from bmlab.all import Lora
    model = gpt2()
    model.save_pretrained(to / "backbone")
    return _delta(to / "delta", lambda m: Lora(m, r=2, modules="c_attn", slices=("q", "v")), model)


@kind
def delta_lora_experts(to):
    from bmlab.all import Lora
    model = mixtral()
    model.save_pretrained(to / "backbone")
    return _delta(to / "delta", lambda m: Lora(m, r=2, modules="experts"), model)


@kind
def delta_with_head(to):
    from bmlab.all import Lora
    model = llama()
    d = Lora(model, r=2).freeze(keep="lm_head")
    with torch.no_grad(): model.lm_head.weight.mul_(1.5)
    moved(d).save(to)
    return figures(model) | {"heads": ["lm_head"]}


@kind
def delta_bank(to):
    from bmlab.all import DeltaBank, Lora
    model = llama()
    users = {u: moved(Lora(model, r=2, name=u), seed=i).detach() for i, u in enumerate(("anna", "ben"))}
    bank = DeltaBank(model, users)
    bank.save(to)
    with bank.route(["ben", "anna"]): return figures(model) | {"users": sorted(bank)}


@kind
def delta_bbt(to):
    from bmlab.all import Bbt, PromptScore
    model = llama()
    score = PromptScore(model, {"input_ids": IDS, "labels": IDS})
    search = Bbt(score, score.start(2), dim=4, popsize=4)
    search.run(16)
    search.delta(model).save(to)
    return figures(model)


@kind
def continual(to):
    from bmlab.all import Continual, Lora
    model = llama()
    c = Continual(model, make=lambda model, name: Lora(model, r=2, name=name))
    c.evaluate({"first": lambda: .25, "second": lambda: .5})
    for n, name in enumerate(("first", "second")):
        with c.learn(name) as d: moved(d, seed=n)
        c.evaluate({"first": lambda: .5, "second": lambda: .75})
    c.save(to)
    with c.use("first"): first = figures(model)
    with c.use("second"): second = figures(model)
    return {"first": first["logits"], "second": second["logits"], "transfer": rounded(c.transfer().values)}


@kind
def hub(to):
    from bmlab.all import Lora, publish
    model = llama()
    publish(moved(Lora(model, r=2)), to, "films", "likes films", "mit", notes="a note")
    return figures(model) | {"names": ["films"], "task": "likes films"}


# ---- prompts ------------------------------------------------------------------------------------------------------

def _prompt(to, make, text=SOFT, masked=False, fit=True, **more):
    from bmlab.all import PromptModel, Template, set_seed
    set_seed(0)
    net, tok = (bert(), masked_tokenizer()) if masked else (llama(), tokenizer())
    template = text(tok) if callable(text) else Template(text, tok)
    m = PromptModel(net, template, make(tok, net), max_length=24, **more)
    if fit: m.fit(FILMS, epochs=1, lr=.05, plot=False)
    m.save(to)
    return said(m.predict(FILMS))


def prompt(name, make, **kw):
    "A maker for a model with a template and this verbalizer"
    MAKERS[f"prompt_{name}"] = lambda to: _prompt(to, make, **kw)


def words(tok, net=None):
    from bmlab.all import Verbalizer
    return Verbalizer(tok, {"no": "bad", "yes": "good"})


def many(tok, net):
    from bmlab.all import KnowledgeableVerbalizer
    return KnowledgeableVerbalizer(tok, {"no": ["bad", "poor"], "yes": ["good", "fine"]})


def found(tok, net):
    from bmlab.all import AutomaticVerbalizer
    return AutomaticVerbalizer(tok, ["no", "yes"], 2)


def rows(tok, net):
    from bmlab.all import SoftVerbalizer
    return SoftVerbalizer(net, tok, {"no": "bad", "yes": "good"})


def centres(tok, net):
    from bmlab.all import ProtoVerbalizer
    return ProtoVerbalizer(8, ["no", "yes"], 8, words=words(tok))


def pairs(tok, net):
    from bmlab.all import PtrVerbalizer
    return PtrVerbalizer(tok, {"no": ["bad", "film"], "yes": ["good", "film"]})


def texts(tok, net):
    from bmlab.all import GenerationVerbalizer
    return GenerationVerbalizer({"no": "so bad", "yes": "very good"})


def with_prefix(tok):
    from bmlab.all import PrefixTuningTemplate
    return PrefixTuningTemplate(None, tok, QUESTION, num_token=3)


prompt("words", words)
prompt("words_masked", words, masked=True)
prompt("knowledgeable", many)
prompt("automatic", found)
prompt("soft_verbalizer", rows)
prompt("centres", centres)
prompt("pairs", pairs, masked=True, text='{"placeholder":"text_a"} {"mask"} {"mask"}', fit=False)
prompt("texts", texts, text=QUESTION, fit=False)
prompt("prefix", words, text=with_prefix)


@kind
def prompt_written(to):
    from bmlab.all import PromptModel, Template
    m = PromptModel(llama(), Template(QUESTION, tokenizer()), max_length=24)
    m.save(to)
    return {"texts": m.generate(FILMS, max_new_tokens=4)}


# ---- checkpoints and states of training ---------------------------------------------------------------------------

def train(model, opt, steps, first=0):
    "Losses of some steps, each on other numbers"
    losses = []
    for i in range(first, first + steps):
        x = wave(4, 4) + i
        loss = (model(x) - x.cos()).square().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.item())
    return losses


@kind
def checkpoint(to):
    from bmlab.all import save
    model = stack()
    opt = torch.optim.SGD(model.parameters(), lr=1e-1, momentum=.9)
    train(model, opt, 2)
    save(model, to, optimizer=opt, step=2, extra={"seen": 8, "note": "eight rows"}, keep=1)
    return {"losses": rounded(train(model, opt, 3, 2)), "extra": {"seen": 8, "note": "eight rows"}}


def managed(model):
    "An optimizer with masters, a schedule and a loss scale"
    from bmlab.all import AdamW, Cosine, OptimManager
    opt = AdamW(model.parameters(), lr=1e-2)
    manager = OptimManager(loss_scale=64, loss_scale_steps=2)
    manager.add_optimizer(opt, Cosine(opt, 1e-2, 2, 10))
    return manager


def train_managed(model, manager, steps, first=0):
    losses = []
    for i in range(first, first + steps):
        x = (wave(4, 4) + i).bfloat16()
        manager.zero_grad()
        loss = (model(x) - x.cos()).float().square().mean()
        manager.backward(loss)
        manager.step()
        losses.append(loss.item())
    return losses


@kind
def checkpoint_manager(to):
    from bmlab.all import save
    model = stack().bfloat16()
    manager = managed(model)
    train_managed(model, manager, 3)
    save(model, to, manager=manager, step=3)
    scale = manager.loss_scale
    return {"losses": rounded(train_managed(model, manager, 3, 3)), "scale": scale, "rates": rounded(rates(manager))}


def rates(manager): return [g["lr"] for o in manager.optimizers for g in o.param_groups]


@kind
def checkpoint_hf(to):
    from bmlab.all import save
    model = llama(**SPECK)
    ids = IDS % 12
    opt = torch.optim.SGD(model.parameters(), lr=1e-1)
    model(input_ids=ids, labels=ids).loss.backward()
    opt.step()
    save(model, to, optimizer=opt, hf=True)
    return figures(model, ids)


def _two_ranks(folder):
    from bmlab.all import rank, save, shard
    model = stack()
    shard(model, zero=3, dtype=None)
    opt = torch.optim.SGD(model.parameters(), lr=1e-1, momentum=.9)
    train(model, opt, 2)
    save(model, folder, optimizer=opt, step=2, extra={"rank": rank()})
    return rounded(train(model, opt, 3, 2))


@kind
def checkpoint_two_ranks(to):
    from bmlab.all import run_ranks
    return {"losses": run_ranks(_two_ranks, str(to))[0], "extra": {"rank": 0}}


def speaker():
    "A language model of two matrices"
    return spread(nn.Sequential(nn.Embedding(24, 4), nn.Linear(4, 24, bias=False)))


def next_word(model, batch):
    logits = model(batch["input_ids"])[:, :-1]
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten())


def fitting(to, model, steps, batches, **kw):
    "A run of `fit` on shards that knows where it stands"
    from bmlab.all import fit
    opt = torch.optim.SGD(model.parameters(), lr=1e-1)
    log = fit(model, batches, opt, steps=steps, loss=next_word, save_to=to, keep=1, plot=False, **kw)
    return rounded(log.loss.tolist())


def written_shards(folder, **kw):
    from bmlab.all import tokenize
    lines = [{"text": t, "source": "good" if i % 2 else "bad"} for i, t in enumerate(LINES * 3)]
    return tokenize(lines, tokenizer(), folder, shard_tokens=30, recipe={"steps": ["none"]}, **kw)


@kind
def fit_run(to):
    from bmlab.all import Packed
    data = written_shards(to / "shards")
    model = speaker()
    fitting(to / "run", model, 2, Packed(data, seq=8, batch=2, seed=1))
    with tempfile.TemporaryDirectory() as t:
        shutil.copytree(to / "run", f"{t}/run")
        return {"losses": fitting(f"{t}/run", model, 4, Packed(data, seq=8, batch=2, seed=1), resume=True)}


@kind
def states(to):
    from bmlab.all import Packed
    model = stack().bfloat16()
    manager = managed(model)
    train_managed(model, manager, 3)
    data = written_shards(to / "shards")
    packed = Packed({"only": data}, seq=8, batch=2, weights=[1.0])
    next(iter(packed))
    torch.save({"model": model.state_dict(), "manager": manager.state_dict()}, to / "state.pt")
    (to / "packed.json").write_text(json.dumps(packed.state_dict()))
    ids = next(iter(packed))["input_ids"].tolist()
    return {"losses": rounded(train_managed(model, manager, 3, 3)), "ids": ids}


def bmt_manager(model):
    import bmlab.bmtrain as bmt
    opt = bmt.optim.AdamOffloadOptimizer(model.parameters(), lr=1e-2)
    manager = bmt.optim.OptimManager(loss_scale=64)
    manager.add_optimizer(opt, bmt.lr_scheduler.Noam(opt, 1e-2, 2, 10))
    return manager


@kind
def bmtrain(to):
    import bmlab.bmtrain as bmt
    model = stack()
    manager = bmt_manager(model)
    bmt_steps(model, manager, 2)
    bmt.save(model, to / "model.pt")
    torch.save(manager.state_dict(), to / "manager.pt")
    return {"losses": rounded(bmt_steps(model, manager, 3, 2))}


def bmt_steps(model, manager, steps, first=0):
    losses = []
    for i in range(first, first + steps):
        x = wave(4, 4) + i
        manager.zero_grad()
        loss = (model(x) - x.cos()).square().mean()
        manager.backward(loss)
        manager.step()
        losses.append(loss.item())
    return losses


# ---- data ---------------------------------------------------------------------------------------------------------

@kind
def shards(to):
    s = written_shards(to)
    sources = s.sources()
    tokens = {k: int(v) for k, v in sources.tokens.to_dict().items()}
    return {"documents": [d.tolist() for d in s][:5], "tokens": tokens, "count": len(s)}


@kind
def mmididx(to):
    from bmlab.all import write_mmididx
    with tempfile.TemporaryDirectory() as t:
        s = written_shards(t)
        write_mmididx(s, to / "data")
    return {"documents": [tokenizer()(t)["input_ids"] + [5] for t in LINES]}


def corpus_of(rows):
    "Rules by name, of a class and of a method, rules of datatrove, and steps that look at all documents"
    from datatrove.pipeline.filters import GopherQualityFilter
    from bmlab.all import ChineseQuality, PerplexityRule, mask_pii
    from bmlab.data.copies import ExactCopies, NearCopies
    from bmlab.data.corpus import Corpus
    from bmlab.data.steps import Repair, Rule, UrlFilter
    from bmlab.data.rules import CharModel, repair
    likely = PerplexityRule(score=CharModel.fit(LINES, order=2).perplexity, high=1e6)
    english = GopherQualityFilter(min_doc_words=1, min_stop_words=0)
    chinese = Rule(ChineseQuality(), language="zh")
    steps = [Repair(repair), Repair(mask_pii), UrlFilter(), chinese, Rule(likely), english]
    return Corpus.from_frame(rows, "films").then(*steps, ExactCopies(), NearCopies(.9))


def corpus_by_lambda(rows):
    "A rule without a name is known by its bytecode and by the names of what it calls"
    from bmlab.all import find_pii
    from bmlab.data.corpus import Corpus
    from bmlab.data.steps import Rule
    rule = eval("lambda text: 'personal' if find_pii(text) else None", {"find_pii": find_pii})
    return Corpus.from_frame(rows, "films").then(Rule(rule, "no persons"))


def frame(): return pd.DataFrame({"text": [*LINES, LINES[0], "Write to anna@example.org, please."]})


def memory_folder(name):
    "An empty folder in memory, whose path is the same on every machine: a run's recipe holds the path of its sources"
    import fsspec
    memory = fsspec.filesystem("memory")
    if memory.exists(f"/{name}"): memory.rm(f"/{name}", recursive=True)
    return memory, f"memory://{name}"


def cleaned(done):
    "Figures of a corpus"
    steps = done.card.waterfall.drop(columns="seconds").astype(str).values.tolist()
    return {"texts": done.frame().text.tolist(), "waterfall": steps}


def _run(to, make, name):
    memory, into = memory_folder(name)
    done = make(frame()).run(into, tasks=2)
    documents = [d.tolist() for d in done.shards(tokenizer(), to / "shards")]
    for extra in ("logs", "stats", "stats.json"):
        path = to / "shards/stages/tokenize" / extra
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    for path in memory.find(f"/{name}"):
        inside = path.partition(f"{name}/")[2]
        if any(part in path for part in ("/logs/", "/stats", "/signs/", "/docs/", "/card.")): continue  # not read again
        (to / "run" / inside).parent.mkdir(parents=True, exist_ok=True)
        (to / "run" / inside).write_bytes(memory.cat(path))
    return cleaned(done) | {"documents": documents, "python": list(sys.version_info[:2])}


@kind
def corpus(to): return _run(to, corpus_of, "saved-corpus")


@kind
def corpus_lambda(to): return _run(to, corpus_by_lambda, "saved-corpus-lambda")


@kind
def data_card(to):
    from bmlab.data.corpus import Corpus
    with tempfile.TemporaryDirectory() as t: card = Corpus.from_frame(frame(), "films").run(f"{t}/run").card
    card.save(to)
    (to / "card.html").unlink()                                          # a picture; nothing reads it again
    return {"sources": card.sources.astype(str).values.tolist()}


@kind
def char_model(to):
    from bmlab.data.rules import CharModel
    m = CharModel.fit(LINES, order=3)
    m.save(to / "model.npz")
    return {"perplexity": rounded(m.perplexity(["a fun film", "xyz"]))}


@kind
def paragraph_store(to):
    from bmlab.all import ParagraphStore
    store = ParagraphStore(to / "store.db", share=.5)
    for i, t in enumerate(LINES): store(f"{t}\nanother line {i}", id=str(i))
    n = len(store)
    store.close()
    return {"paragraphs": n, "again": "paragraphs seen before"}


@kind
def collected(to):
    from bmlab.all import collect

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            body = b"" if self.path == "/robots.txt" else f"<html><body><p>Page {self.path}</p></body></html>".encode()
            self.send_response(200 if body else 404)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
        def log_message(self, *args): pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    urls = [f"http://127.0.0.1:{server.server_port}/{name}" for name in ("a", "b")]
    found = collect(urls, to, about={"source": "here"}, contact="someone@example.org", gap_s=0)
    server.shutdown()
    (to / ".lock").unlink(missing_ok=True)
    return {"urls": urls, "outcomes": found.outcome.tolist()}


# ---- plans --------------------------------------------------------------------------------------------------------

@kind
def plan_inference(to):
    from bmlab.all import plan_inference
    asked = dict(bits=8, max_ctx=64, machine="h200")
    least = plan_inference(llama(), **asked).min_bytes
    plan = plan_inference(llama(num_hidden_layers=3), least + (32 << 10), **asked)
    plan.save(to / "plan.json")
    return {"text": str(plan), "peak": plan.peak_bytes}


@kind
def plan_training(to):
    from bmlab.all import plan_training
    plan = plan_training(llama(), 2, 16, machine="h200", gpus=2)
    plan.save(to / "plan.json")
    return {"text": str(plan), "peak": int(plan.peak_bytes)}


def main(argv):
    if not argv: return print(__doc__)
    for name in argv[1:] or MAKERS:
        to = Path(argv[0]) / name
        shutil.rmtree(to, ignore_errors=True)
        to.mkdir(parents=True)
        torch.manual_seed(0)
        expected = MAKERS[name](to)
        (to / "expected.json").write_text(json.dumps(expected, ensure_ascii=False) + "\n", encoding="utf-8")
        print(f"{name}: {sum(p.stat().st_size for p in to.rglob('*') if p.is_file()):,} bytes", flush=True)


if __name__ == "__main__": main(sys.argv[1:])

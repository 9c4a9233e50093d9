"""CPM-2 with experts against a transcription of its source, published sizes and cuts of text, and what takes CPM-1,
CPM-2, EVA and GLM: Auto classes, PEFT, decoding. Their equations are judged by the originals in test_originals.py."""
import errno
import json
import warnings
from pathlib import Path

import pytest
import torch
import transformers as tf

import reference_cpm2 as ref
from bmlab.models import cpm2
from bmlab.models import glm
from bmlab.models.convert import to_original
from bmlab.core import count, set_seed
from bmlab.models.cpm2 import (
    Cpm1Config,
    Cpm1ForCausalLM,
    Cpm2Config,
    Cpm2ForConditionalGeneration,
    EvaConfig,
    EvaForConditionalGeneration,
)
from bmlab.models.glm import BlankGlmConfig, BlankGlmForConditionalGeneration, blank_example, blank_positions

T5 = dict(vocab_size=60, d_model=32, d_kv=8, d_ff=40, num_heads=4, num_layers=2, decoder_start_token_id=1)
GLM = dict(
    vocab_size=60,
    hidden_size=32,
    num_hidden_layers=3,
    num_attention_heads=4,
    max_sequence_length=40,
    sop_token_id=50,
    mask_token_ids=[51],
    eos_token_id=52,
    pad_token_id=0,
    initializer_range=0.3,
)
CPM1 = dict(
    vocab_size=60,
    hidden_size=32,
    num_hidden_layers=3,
    num_attention_heads=4,
    dim_head=8,
    dim_ff=40,
    position_bias_num_buckets=16,
    position_bias_max_distance=20,
)


def made(kind, config, seed=0):
    set_seed(seed)
    model = kind(config).eval()
    with torch.no_grad():
        for n, p in model.named_parameters():
            if p.ndim == 1: p.add_(torch.randn_like(p) * .1)         # norms and biases that are not all alike
    return model


def original(model, tmp_path, family):
    model.save_pretrained(tmp_path / "m")
    return torch.load(to_original(tmp_path / "m", tmp_path / "m.pt", family), weights_only=True)


def close(got, want, eps=1e-5):
    assert (got - want).abs().max() <= eps * max(1.0, want.abs().max()), (got - want).abs().max()


ids = torch.tensor([8, 30, 9, 44, 17, 25, 8, 49, 31])
other = torch.tensor([1, 12, 40, 9, 22])


@torch.no_grad()
def test_cpm2_of_experts(tmp_path):
    model = made(Cpm2ForConditionalGeneration, Cpm2Config(**T5, num_experts=3))
    dense = made(Cpm2ForConditionalGeneration, Cpm2Config(**T5), seed=1)
    shared = {n: p for n, p in model.state_dict().items() if n in dense.state_dict()}
    dense.load_state_dict(shared, strict=False)
    w = original(dense, tmp_path, "cpm-2")
    for stack, last in (("encoder", 1), ("decoder", 2)):
        for i, block in enumerate(getattr(model, stack).block):
            layer, p = block.layer[last], f"{stack}.blocks.{i}.ff."
            w[p + "expert_centroids"] = layer.expert_centroids
            for e, expert in enumerate(layer.experts):
                w[f"{p}experts.{e}.layer_norm.weight"] = expert.layer_norm.weight
                for m in ("wi_0", "wi_1", "wo"):
                    w[f"{p}experts.{e}.dense_relu_dense.{m}.weight"] = getattr(expert.DenseReluDense, m).weight
    want, experts = ref.cpm2(w, ids, other, 4)
    close(model(ids[None], decoder_input_ids=other[None]).logits[0], want)
    assert len(experts) == 2 * (len(ids) + len(other)) and set(experts) == {0, 1, 2}


def test_folders_that_do_not_say_their_gelu(tmp_path):
    "CPM-1's is read as ModelCenter's, and told so; CPM-2's keeps what transformers calls it"
    for kind, config in ((Cpm1ForCausalLM, Cpm1Config(**CPM1)), (Cpm2ForConditionalGeneration, Cpm2Config(**T5))):
        kind(config).save_pretrained(tmp_path / kind.__name__)
    one, two = (tmp_path / kind.__name__ / "config.json" for kind in (Cpm1ForCausalLM, Cpm2ForConditionalGeneration))
    for file, length_scale in ((one, True), (two, True)):
        said = json.loads(file.read_text()) | dict(length_scale=length_scale)
        assert said.pop("hidden_act") in ("gelu", "gelu_new")
        file.write_text(json.dumps(said))
    with pytest.warns(UserWarning, match="hidden_act='gelu_new'"): read = Cpm1Config.from_pretrained(one.parent)
    assert read.hidden_act == "gelu"
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert Cpm1Config.from_pretrained(one.parent, hidden_act="gelu_new").hidden_act == "gelu_new"
        assert Cpm2Config.from_pretrained(two.parent).hidden_act == "gelu_new"
    assert Cpm2Config(**T5, length_scale=True, attn_scale=True).dense_act_fn == "gelu"


PUBLISHED = {
    "CPM-1": (tf.GPT2LMHeadModel, lambda: tf.GPT2Config(**cpm2.CPM1), 2_597_073_920),
    "CPM-2": (Cpm2ForConditionalGeneration, Cpm2Config, 11_087_097_856),
    "CPM-2 198B": (Cpm2ForConditionalGeneration, lambda: Cpm2Config(num_experts=32), 198_333_214_720),
    "CPM-1 of ModelCenter": (Cpm1ForCausalLM, Cpm1Config, 2_491_171_328),
    "EVA": (EvaForConditionalGeneration, EvaConfig, 2_841_040_896),
    "EVA 2.0 large": (
        EvaForConditionalGeneration,
        lambda: EvaConfig(d_model=1024, d_ff=4096, num_heads=16),
        967_535_616,
    ),
    "EVA 2.0 base": (
        EvaForConditionalGeneration,
        lambda: EvaConfig(d_model=768, d_ff=3072, num_heads=12, num_layers=12),
        300_932_352,
    ),
    "GLM-10B": (BlankGlmForConditionalGeneration, lambda: BlankGlmConfig(vocab_size=50304), 9_880_682_496),
    "GLM-10B-zh": (BlankGlmForConditionalGeneration, BlankGlmConfig, 9_879_633_920),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_sizes(name):
    kind, config, total = PUBLISHED[name]
    with torch.device("meta"): assert count(kind(config())).total == total


def everything():
    yield Cpm1ForCausalLM, Cpm1Config(**CPM1), torch.randint(8, 60, (2, 9))
    for more in ({}, dict(attn_scale=True, length_scale=True), dict(num_experts=3)):
        yield Cpm2ForConditionalGeneration, Cpm2Config(**T5, **more), torch.randint(8, 60, (2, 9))
    yield EvaForConditionalGeneration, EvaConfig(**T5), torch.randint(8, 60, (2, 9))
    yield (
        BlankGlmForConditionalGeneration,
        BlankGlmConfig(**GLM),
        torch.tensor([[8, 51, 9, 10, 50], [8, 9, 11, 51, 50]]),
    )


@pytest.mark.parametrize("which", range(6))
def test_decoding(which):
    kind, config, prompt = list(everything())[which]
    model = made(kind, config)
    for way in (dict(do_sample=False), dict(num_beams=3, do_sample=False)):
        uncached = model.generate(prompt, max_new_tokens=7, use_cache=False, **way)
        assert torch.equal(model.generate(prompt, max_new_tokens=7, **way), uncached)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        static = model.generate(
            prompt, max_new_tokens=7, do_sample=False, cache_implementation="static", disable_compile=True
        )
    assert torch.equal(static, model.generate(prompt, max_new_tokens=7, do_sample=False))


@pytest.mark.parametrize("which", range(6))
def test_bmlabs_own_decoding(which):
    "A Decoder compares cached rows of different lengths with uncached ones, GLM's with its two positions too"
    from bmlab.infer.decode import Decoder
    kind, config, prompt = list(everything())[which]
    decoder = Decoder(made(kind, config), max_batch=2, max_ctx=24)
    assert decoder.mode == "static", decoder.why_generate


@pytest.mark.parametrize("which", range(6))
def test_peft(which, tmp_path):
    peft = pytest.importorskip("peft")
    kind, config, prompt = list(everything())[which]
    model = made(kind, config)
    before = model.generate(prompt, max_new_tokens=4, do_sample=False)
    names = {Cpm1ForCausalLM: ["project_q", "project_v"], BlankGlmForConditionalGeneration: ["query_key_value"]}.get(
        kind, ["q", "v"]
    )
    wrapped = peft.get_peft_model(
        model,
        peft.LoraConfig(
            task_type="SEQ_2_SEQ_LM" if config.is_encoder_decoder else "CAUSAL_LM", r=2, target_modules=names
        ),
    )
    wrapped(input_ids=prompt, labels=prompt).loss.backward()
    wrapped.save_pretrained(tmp_path)
    # B starts at zero
    assert torch.equal(wrapped.generate(input_ids=prompt, max_new_tokens=4, do_sample=False), before)
    assert (tmp_path / "adapter_model.safetensors").is_file()


def test_trainer_and_auto_classes(tmp_path):
    cpm2.register()
    glm.register()
    model = made(BlankGlmForConditionalGeneration, BlankGlmConfig(**GLM))
    rows = [blank_example(torch.randint(8, 40, (9,)).tolist(), [(2, 4)], 51, 50, 52) for _ in range(8)]
    args = tf.TrainingArguments(
        tmp_path / "run",
        max_steps=3,
        per_device_train_batch_size=4,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        save_strategy="no",
        logging_strategy="no",
    )
    assert tf.Trainer(model, args, train_dataset=rows).train().training_loss > 0
    model.save_pretrained(tmp_path / "glm")
    again = tf.AutoModelForCausalLM.from_pretrained(tmp_path / "glm")
    assert type(again) is BlankGlmForConditionalGeneration and torch.equal(
        again.glm.word_embeddings.weight, model.glm.word_embeddings.weight
    )
    assert isinstance(tf.AutoConfig.from_pretrained(tmp_path / "glm"), BlankGlmConfig)


@torch.no_grad()
@pytest.mark.parametrize("which", range(6))
def test_half_precision(which):
    kind, config, prompt = list(everything())[which]
    model = made(kind, config)
    call = dict(input_ids=prompt) | (dict(decoder_input_ids=prompt) if config.is_encoder_decoder else {})
    want, got = model(**call).logits, model.to(torch.bfloat16)(**call).logits
    assert got.dtype is torch.bfloat16 and (got.float() - want).norm() < .1 * want.norm()


@torch.no_grad()
@pytest.mark.parametrize("which", range(5))
def test_slicing_keeps_the_factors(which, tmp_path):
    "Heads and neurons cut for good = the same ones silenced, also after a way through a folder"
    from bmlab.cook.structure import slice_model, structure
    kind, config, prompt = list(everything())[which]
    model, silent = made(kind, config), made(kind, config)
    keep, modules = {}, dict(silent.named_modules())
    for name, a in structure(model).attention().items():
        keep[name] = torch.tensor([0, 2])
        modules[a.out].weight.view(-1, 4, 8)[:, [1, 3]] = 0
    for name in structure(model).ffn():
        keep[name] = torch.arange(0, 40, 2)
        modules[name].weight[:, 1::2] = 0
    slice_model(model, keep)
    call = dict(input_ids=prompt) | (dict(decoder_input_ids=prompt) if config.is_encoder_decoder else {})
    close(model(**call).logits, silent(**call).logits)
    # experts of one layer share a configuration value with the others
    if getattr(config, "num_experts", 0): return
    model.save_pretrained(tmp_path)
    close(kind.from_pretrained(tmp_path).eval()(**call).logits, silent(**call).logits)


def test_load_by_folder(tmp_path):
    from bmlab.models.load import load
    for i, (kind, config, prompt) in enumerate(everything()):
        model = made(kind, config)
        model.save_pretrained(tmp_path / str(i))
        again, _ = load(tmp_path / str(i), device="cpu")
        assert type(again) is kind and torch.equal(
            again.generate(prompt, max_new_tokens=3, do_sample=False),
            model.generate(prompt, max_new_tokens=3, do_sample=False),
        )


TEXTS = [
    "今天天气很好，我们去公园。",
    "ＡＢＣ　ａｂｃ　１２３！？",
    "第一行\n第二行  两个空格",
    "GLM is a model（模型）; CPM-2 也是。",
    "",
    " ",
    "\n\n",
    "…“引号”‘单’—",
    "龘靐齉" * 3,
    "好" * 201 + "了",
]


def vocabulary(tmp_path):
    words = ["<unk>", "<s>", "</s>", "\u2583", "<sep>", "<pad>", "<mask>", "<go>", "<eod>", "\u2582"]
    words += sorted(
        {
            w
            for t in TEXTS[:8]
            for n in (1, 2, 3)
            for i in range(len(t))
            if (w := "".join(map(ref.half_width, t[i : i + n]))).strip() and not set(w) & set(" \n")
        }
    )
    (tmp_path / "vocab.txt").write_text(
        "\n".join(words[:60] + words[60::2] + ["<s_0>", "<s_1>"]) + "\n", encoding="utf-8"
    )
    return str(tmp_path / "vocab.txt")


def test_cpm2_cuts_as_published(tmp_path):
    pytest.importorskip("jieba")
    tok = cpm2.Cpm2Tokenizer(vocabulary(tmp_path))
    for text in TEXTS: assert tok.tokenize(text) == ref.cpm2_pieces(text, tok.encoder), text
    for text in TEXTS[:4]:
        assert tok.decode([i for i in tok(text).input_ids]).count("<unk>") == tok.tokenize(text).count("<unk>")
    (tmp_path / "twice.txt").write_text("<unk>\n<s>\n<eod>\n<pad>\n天\n天\n气\n", encoding="utf-8")
    twice = cpm2.Cpm2Tokenizer(tmp_path / "twice.txt", "none")
    assert twice.add_tokens(["<new>"]) == 1 and [twice.convert_tokens_to_ids(w) for w in ("天", "气", "<new>")] == [
        5,
        6,
        7,
    ]
    assert tok.tokenize("天气<s_0>很<s_1>") == [
        *ref.cpm2_pieces("天气", tok.encoder),
        "<s_0>",
        *ref.cpm2_pieces("很", tok.encoder),
        "<s_1>",
    ]


def test_cpm2_fills_its_blanks_in_an_engine(tmp_path):
    from bmlab.infer.engine import wrap
    from bmlab.infer.asks import fill_kind
    words = [
        "<unk>",
        "<s>",
        "</s>",
        "\u2583",
        "<sep>",
        "<pad>",
        "<mask>",
        "<go>",
        "<eod>",
        "\u2582",
        *"床前明月光，疑是地上霜。",
        "明月",
        *(f"<s_{i}>" for i in range(5)),
    ]
    (tmp_path / "vocab.txt").write_text("\n".join(words) + "\n", encoding="utf-8")
    tok = cpm2.Cpm2Tokenizer(str(tmp_path / "vocab.txt"), cut="none")
    torch.manual_seed(0)
    model = Cpm2ForConditionalGeneration(Cpm2Config(**T5 | dict(vocab_size=len(words))))
    batch = dict(
        input_ids=tok("床前<s_0>光，疑是<s_1>霜。", return_tensors="pt").input_ids,
        labels=tok("<s_0>明月<s_1>地上<eod>", return_tensors="pt").input_ids,
    )
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    for _ in range(60):
        opt.zero_grad()
        model(**batch).loss.backward()
        opt.step()
    assert fill_kind(model, tok) == "sentinel"
    with wrap(model, tok, max_ctx=32, device="cpu") as e:
        answers = {}
        for i, piece in e.fill("床前__光，疑是__霜。", max_new_tokens=10): answers[i] = answers.get(i, "") + piece
        assert answers == {0: "明月", 1: "地上"}
        with pytest.raises(ValueError, match="6 blanks; the sentinels are 5"): list(e.fill("__".join("床前明月光疑是")))


def test_cpm1_cuts_as_published(tmp_path):
    pytest.importorskip("jieba")
    sentencepiece = pytest.importorskip("sentencepiece")
    (tmp_path / "t.txt").write_text(
        "\n".join(t.replace("\n", " ") for t in TEXTS[:8] if t.strip()) + "\n\u2582 \u2583\n", encoding="utf-8"
    )
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "t.txt"),
        model_prefix=str(tmp_path / "v"),
        vocab_size=90,
        character_coverage=1.0,
        hard_vocab_limit=False,
        user_defined_symbols=["<cls>", "<sep>", "<pad>", "<mask>", "<eod>"],
        minloglevel=2,
    )
    tok = cpm2.Cpm1Tokenizer(str(tmp_path / "v.model"))
    for text in TEXTS: assert tok.tokenize(text) == ref.cpm1_pieces(text, tok.pieces), text


def test_eva_reads_a_dialogue_of_any_length(tmp_path):
    pytest.importorskip("jieba")
    tok = cpm2.EvaTokenizer(vocabulary(tmp_path))
    turns = [t for t in TEXTS if t.strip()][:6] + ["好"]
    lengths = []
    for n in range(4, 90, 7):
        ids = tok.dialogue(turns, max_length=n)[0].tolist()
        assert len(ids) <= n and ids[-2:] == [tok.eos_token_id, tok.bos_token_id]
        lengths.append(ids.count(tok.eos_token_id))
    assert lengths == sorted(lengths) and lengths[0] == 1 and lengths[-1] > 3


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@torch.no_grad()
@pytest.mark.parametrize("which", range(6))
def test_gpu_computes_what_the_cpu_does(which):
    kind, config, prompt = list(everything())[which]
    model = made(kind, config)
    call = dict(input_ids=prompt) | (dict(decoder_input_ids=prompt) if config.is_encoder_decoder else {})
    want = model(**call).logits
    model.cuda()
    close(model(**{k: v.cuda() for k, v in call.items()}).logits.cpu(), want, 1e-4)
    cached, uncached = (
        model.generate(prompt.cuda(), max_new_tokens=6, do_sample=False, use_cache=c) for c in (True, False)
    )
    assert torch.equal(cached, uncached)


def test_positions_at_any_padding():
    row = [8, 51, 9, 50, 7, 6]
    plain = blank_positions(torch.tensor([row]), 50, [51])
    for left in range(4):
        padded = blank_positions(torch.tensor([[0] * left + row]), 50, [51], torch.tensor([[0] * left + [1] * 6]))
        assert torch.equal(padded[:, :, left:], plain)


def test_a_vocabulary_is_saved_whole_or_not_at_all(tmp_path, monkeypatch):
    tok, first = cpm2.Cpm2Tokenizer(vocabulary(tmp_path), cut="none"), tmp_path / "saved"
    tok.save_pretrained(first)
    file, = first.glob("vocab*.txt")
    before = file.read_bytes()
    assert before == Path(tok.vocab_file).read_bytes()
    def full(fd): raise OSError(errno.ENOSPC, "No space left on device")
    file.write_bytes(old := b"an older one")
    with monkeypatch.context() as m, pytest.raises(OSError, match="No space"):
        m.setattr("os.fsync", full)
        tok.save_vocabulary(first)
    assert file.read_bytes() == old and [p.name for p in first.glob(".*~*")] == []
    tok.save_vocabulary(first)
    assert file.read_bytes() == before

"GGUF files that are written hold what llama.cpp's own tools would have written, and llama.cpp computes with them alike"
import json
import os
import shutil
import subprocess
import weakref
import zipfile
from pathlib import Path

import gguf_errors
import gguf_oracles
import numpy as np
import pytest
import torch
import transformers as tf
from test_gguf_tokenizers import TEXTS, file_of, trained
from tokenizers import Tokenizer, models, pre_tokenizers

from bmlab.core import count
from bmlab.cook import export_gguf, quantize
from bmlab.delta import Lora
from bmlab.formats import GGUF
from bmlab.formats.gguf_layout import family_of, gguf_metadata, gguf_pieces, gguf_vocabulary
from bmlab.formats.gguf_models import gguf_tokenizer
from bmlab.formats.gguf_writer import BLOCKS, from_blocks, to_blocks, write_gguf
from bmlab.models import load

FIXTURES = Path(__file__).parents[1] / "fixtures"


def letters(size=64):
    "A tokenizer that knows a few bytes"
    words = ["<pad>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())][:size - 1]
    made = Tokenizer(models.BPE({w: i for i, w in enumerate([*words, words[3] + words[4]])}, [(words[3], words[4])]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return tf.PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>", pad_token="<pad>")


# keys that llama.cpp's converter fills in otherwise: a width as the length (bloom), a constant (falcon)
ELSE = {"bloom.context_length", "falcon.context_length"}


@pytest.mark.parametrize("name", [n for n in gguf_oracles.MODELS if n != "xlm-roberta"])
def test_as_the_converter_writes_it(name, tmp_path):
    "Every key and every tensor, bit for bit, of the file that llama.cpp's converter made of the same model"
    with zipfile.ZipFile(FIXTURES / "gguf_models.zip") as z: theirs = GGUF(z.extract(f"{name}.gguf", tmp_path))
    ours = GGUF(export_gguf(gguf_oracles.build(name), tmp_path / "ours.gguf", "F16"))
    for key in theirs.keys:
        if key in ELSE or key in ("general.name", "general.size_label") or key.startswith("tokenizer."): continue
        a, b = theirs[key], ours[key]
        assert type(a) is type(b) and (a == b or isinstance(a, float) and abs(a - b) <= 1e-6 * abs(a)), key
    assert set(ours.tensors) == set(theirs.tensors)
    for n in theirs.tensors:
        a, b = theirs.tensor(n), ours.tensor(n)
        assert a.shape == b.shape, n
        assert np.array_equal(a, b) or n.startswith("rope_") and np.allclose(a, b, 1e-5), n


def test_xlm_roberta_needs_its_tokenizer(tmp_path):
    "GGUF tells it from BERT by the tokenizer; with it tensors and positions come back"
    model = gguf_oracles.build("xlm-roberta")
    with pytest.raises(ValueError, match="by its tokenizer; give it"): export_gguf(model, tmp_path / "x.gguf")
    assert gguf_metadata(model.config, family_of(model))[0]["bert.context_length"] == 62


KNOWN = json.loads((FIXTURES / "gguf_errors.json").read_text())           # of tools/gguf_errors.py


@pytest.mark.parametrize("kind", list(BLOCKS))
def test_no_worse_than_llama_cpp(kind):
    "The mean square error of each type is at most 1.02 times that of llama.cpp's quantizer, with importance or not"
    several, importance = gguf_errors.weights()
    for name, w in several.items():
        for known, columns in zip(KNOWN["errors"][kind][name], (None, importance)):
            ours = gguf_errors.error(from_blocks(to_blocks(w, kind, columns), kind), w, columns)
            assert ours <= 1.02 * known, (name, columns is not None, ours / known)


@pytest.mark.parametrize("name", list(gguf_errors.MODELS))
def test_mixed_types_are_llama_cpps(name):
    "Which matrix gets how many bits, in each mixed file"
    from bmlab.cook.export_gguf import _Plan
    cls, config = gguf_errors.MODELS[name]
    with torch.device("meta"): model = getattr(tf, cls)(getattr(tf, cls).config_class(**config))
    for mix, known in KNOWN["types"][name].items():
        types = {n: kind for n, (_, kind, _) in _Plan(model, mix, {}).tensors().items() if kind != "F32"}
        assert gguf_errors.short(types) == known, mix


def again(tok, path, arch, size=None):
    "A tokenizer that went through a GGUF file"
    size = size or len(tok)
    file = write_gguf(path, {"general.architecture": arch, **gguf_vocabulary(tok, size, arch)}, {})
    return gguf_tokenizer(GGUF(file))


def test_vocabularies(tmp_path):
    "Byte-level and SentencePiece's BPE, unigrams and word pieces come back with the same ids"
    made = []
    for kind, arch, model in (("bpe", "llama", "llama"), ("unigram", "t5", "t5")):
        (tmp_path / kind).mkdir()
        known = trained(tmp_path / kind, kind)[1]
        made.append((gguf_tokenizer(file_of(tmp_path / f"{kind}.gguf", model, arch, **known)), arch))
    made.append((load("smollm2-135m", device="cpu")[1], "llama"))
    alphabet = "abcdefghijklmnopqrstuvwxyz0123456789"
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "##ing", "(", *alphabet]
    words += [f"##{c}" for c in alphabet]
    made.append((tf.BertTokenizerFast(vocab={w: i for i, w in enumerate(words)}), "bert"))
    for tok, arch in made:
        back = again(tok, tmp_path / "x.gguf", arch, len(tok) + 7)
        for text in TEXTS: assert back(text).input_ids == tok(text).input_ids, (arch, text)
        for name in ("bos", "eos", "unk", "pad", "cls", "sep", "mask"):
            assert getattr(back, f"{name}_token_id") == getattr(tok, f"{name}_token_id") or arch == "bert", name
        assert back.chat_template == tok.chat_template


def test_whole_words_of_a_chat_model(tmp_path):
    "Tokenizer, chat template, card and the end of a turn are there again"
    model, tok = load("smollm2-135m", device="cpu")
    small = tf.LlamaForCausalLM(tf.LlamaConfig(**gguf_oracles.TINY | dict(vocab_size=len(tok)))).eval()
    small.generation_config.eos_token_id = [2, 0]
    back, other = load(export_gguf(small, tmp_path / "x.gguf", "Q8_0", tok), device="cpu")
    assert other.chat_template == tok.chat_template and other("one 2 three").input_ids == tok("one 2 three").input_ids
    assert back.generation_config.eos_token_id == [2, 0]


def test_a_header_that_is_refused_leaves_the_old_file(tmp_path):
    "`check` sees the header before any tensor is made; after its error the old file stands, and nothing beside it"
    write_gguf(tmp_path / "x.gguf", {"general.name": "old"}, {})
    made, seen = [], []
    def check(header):
        seen.append((header["general.name"], header.tensors["w"][0]))
        raise ValueError("not so")
    tensors = {"w": ((2, 4), "F32", lambda: made.append(1))}
    with pytest.raises(ValueError, match="not so"):
        write_gguf(tmp_path / "x.gguf", {"general.name": "new"}, tensors, check)
    assert seen == [("new", (2, 4))] and not made
    assert GGUF(tmp_path / "x.gguf")["general.name"] == "old"
    assert [p.name for p in tmp_path.iterdir() if "new" in p.name] == []


def test_one_tensor_at_a_time_is_held(tmp_path):
    "When a tensor is made, those before it are gone"
    made, alive = [], []
    def make():
        alive.append(sum(t() is not None for t in made))
        t = torch.zeros(64, dtype=torch.uint8)
        made.append(weakref.ref(t))
        return t
    write_gguf(tmp_path / "x.gguf", {"general.name": "x"}, {f"w{i}": ((16,), "F32", make) for i in range(4)})
    assert alive == [0, 0, 0, 0]


def test_packed_experts(tmp_path):
    "Stacks of int8 and int4 are written by their floats"
    torch.manual_seed(0)
    more = dict(num_local_experts=4, intermediate_size=64, sliding_window=None)
    config = tf.MixtralConfig(**gguf_oracles.TINY | more)
    for bits in (8, 4):
        model = quantize(tf.MixtralForCausalLM(config).eval(), bits=bits, group_size=32 if bits == 4 else None)
        ids = torch.arange(12)[None]
        with torch.no_grad(): want = model(ids).logits
        back, _ = load(export_gguf(model, tmp_path / "x.gguf", "F32"), device="cpu")
        with torch.no_grad(): assert (back(ids).logits - want).norm() < 1e-4 * want.norm()
        assert count(back).bytes > count(model).bytes


# llama.cpp itself

COMMAND = "npm install --ignore-scripts --prefix .node node-llama-cpp"


def modules():
    "The folder with node-llama-cpp in it"
    places = [os.environ.get("NODE_LLAMA_CPP", ""), Path(__file__).parents[2] / ".node/node_modules"]
    return next((p for p in map(Path, places) if (p / "node-llama-cpp").is_dir()), None)


def ask(*jobs):
    "What llama.cpp answers"
    if shutil.which("node") is None or modules() is None:
        pytest.skip(f"no llama.cpp: `{COMMAND}`, or NODE_LLAMA_CPP=its node_modules")
    script = Path(__file__).parents[1] / "helpers/llama_cpp.mjs"
    done = subprocess.run(["node", script, modules()], input=json.dumps(jobs), capture_output=True, text=True)
    assert done.stdout, done.stderr[-2000:]
    return json.loads(done.stdout)


# what this llama.cpp computes otherwise: phi3 wants SentencePiece's words, exaone4 knows windows in 64 layers only
UNLIKE = ("phi3", "phi3-longrope", "exaone4")
GENERATES = [n for n in gguf_oracles.MODELS if "bert" not in n and "t5" not in n and n not in UNLIKE]


def jittered(name):
    "A tiny model that computes something"
    model, g = gguf_oracles.build(name), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim > 1: p.copy_(torch.randn(p.shape, generator=g) * 0.15)
    return model


@pytest.mark.long
def test_llama_cpp_computes_the_same(tmp_path):
    "Logits of every architecture that writes text, in float32 (GELU is a table of float16 there)"
    ask()
    ids = gguf_oracles.IDS[0]
    all_of = {n: jittered(n) for n in GENERATES}
    files = [str(export_gguf(m, tmp_path / f"{n}.gguf", "F32", letters())) for n, m in all_of.items()]
    answers = ask(*({"file": f, "ids": ids, "logits": True} for f in files))
    for (name, model), answer in zip(all_of.items(), answers, strict=True):
        assert "error" not in answer, (name, answer)
        with torch.no_grad(): want = model(torch.tensor([ids])).logits[0]
        off = (torch.tensor(answer["logits"]) - want).norm() / want.norm()
        table = name.startswith(("gemma", "phi2", "gpt2", "gptneox", "bloom", "falcon", "starcoder"))
        assert off < (1e-3 if table else 2e-6), (name, off)


def rounded(x, wide):
    "Inputs as llama.cpp's kernels round them: int8 by 32, or by 256 with a float32 scale beside K-quants"
    if not wide: return from_blocks(to_blocks(x, "Q8_0"), "Q8_0").view_as(x)
    blocks = x.unflatten(-1, (-1, 256))
    d = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True)) / -127
    return ((blocks / d).round().clamp(-128, 127) * d).nan_to_num().view_as(x)


def round_inputs(model, file):
    "Let a model compute as llama.cpp does with the types of a file"
    gguf = GGUF(file)
    names = {n: [n] for n, m in model.named_parameters() if m.ndim == 2 and "embed" not in n}
    pieces = gguf_pieces(names, model.config, "llama")
    kinds = {p.names[0].removesuffix(".weight"): gguf.tensors[n][1] for n, p in pieces.items()}
    for n, m in model.named_modules():
        if not isinstance(m, torch.nn.Linear): continue
        wide = kinds.get(n, gguf.tensors["token_embd.weight"][1]).endswith("_K")
        m.register_forward_pre_hook(lambda m, args, wide=wide: (rounded(args[0], wide),))


@pytest.mark.long
def test_llama_cpp_takes_every_type(tmp_path):
    """Each type of block, computed by llama.cpp's kernels, which round inputs to int8 in ways of their own

    Where the way is known the logits are the same to the last digits, which is to say, so are the weights; but not at
    positions where a number lay between two codes, and after them."""
    ask()
    torch.manual_seed(0)
    sizes = dict(hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4, vocab_size=64)
    model, ids = tf.LlamaForCausalLM(tf.LlamaConfig(**sizes)).eval(), gguf_oracles.IDS[0]
    kinds = [*BLOCKS, "F16", "BF16", "Q4_K_M", "Q5_K_M", "Q3_K_M"]
    files = [export_gguf(model, tmp_path / f"{kind}.gguf", kind, letters()) for kind in kinds]
    answers = ask(*({"file": str(f), "ids": ids, "logits": True} for f in files))
    for file, answer in zip(files, answers, strict=True):
        assert "error" not in answer, (file.name, answer)
        back, _ = load(file, device="cpu", dtype="float32", packed=False)
        known = file.stem in ("Q8_0", "IQ4_NL") or file.stem.endswith("_K")
        if known: round_inputs(back, file)
        with torch.no_grad(): want = back(torch.tensor([ids])).logits[0]
        off = (torch.tensor(answer["logits"]) - want).norm(dim=1) / want.norm(dim=1)
        assert off.max() < 0.03 and (off.min() < 1e-5 or not known), (file.name, off)


WITH_EXPERTS = [n for n in GENERATES if n in ("mixtral", "llama-moe", "qwen3moe", "gpt-oss")]


@pytest.mark.long
def test_llama_cpp_takes_the_adapter(tmp_path):
    "A LoRA beside the model's file, on experts and words too, gives the logits of the model with the LoRA on it"
    ask()
    ids, jobs, wanted = gguf_oracles.IDS[0], [], []
    cases = [(name, None) for name in ("llama", "qwen2", "gptneox", "gpt2")]
    cases += [(name, "mlp.experts") for name in WITH_EXPERTS] + [("llama", "embed_tokens")]
    for i, (name, modules) in enumerate(cases):
        model = jittered(name)
        if modules == "embed_tokens": assert not model.config.tie_word_embeddings
        file = export_gguf(model, tmp_path / f"{i}.gguf", "F32", letters())
        jobs.append({"file": str(file), "ids": ids, "logits": True})
        with torch.no_grad(): before = model(torch.tensor([ids])).logits[0]
        lora = Lora(model, r=4, modules=modules)
        for p in lora.parameters() if modules else [site.B for site in lora.sites.values()]:
            torch.nn.init.normal_(p, std=0.2)
        jobs[-1]["lora"] = str(lora.save_gguf(tmp_path / f"{i}-lora.gguf"))
        with torch.no_grad(): wanted.append(model(torch.tensor([ids])).logits[0])
        assert (wanted[-1] - before).norm() > 0.02 * before.norm()
    for job, want, answer in zip(jobs, wanted, ask(*jobs), strict=True):
        assert "error" not in answer, answer
        off = (torch.tensor(answer["logits"]) - want).norm() / want.norm()
        assert off < 1e-3, (job["file"], off)


def written(model, ids, n):
    "The n tokens after ids, greedily, wherever a text would end"
    out, cache = [], None
    with torch.no_grad():
        for _ in range(n):
            made = model(ids, past_key_values=cache, use_cache=True)
            cache, ids = made.past_key_values, made.logits[:, -1:].argmax(-1)
            out.append(int(ids))
    return out


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0", "Q4_0", "Q4_K_M"])
def test_llama_cpp_writes_smollm2s_text(kind, tmp_path):
    """64 tokens, greedily, by llama.cpp and by what `load` makes of the file

    With blocks llama.cpp rounds its inputs to int8; over thirty layers that moves the logits by some percent, and the
    texts part where two tokens are nearly as likely."""
    ask()
    text = "The capital of France is"
    model, tok = load("smollm2-135m", device="cpu", dtype="float32")
    file, ids = export_gguf(model, tmp_path / "x.gguf", kind, tok), tok(text, return_tensors="pt").input_ids
    answer, = ask({"file": str(file), "text": text, "logits": True, "tokens": 64})
    assert "error" not in answer and answer["ids"] == ids[0].tolist(), answer
    if kind != "F32": model, _ = load(file, device="cpu", dtype="float32", packed=False)
    with torch.no_grad(): want = model(ids).logits[0]
    off = float((torch.tensor(answer["logits"]) - want).norm() / want.norm())
    ours = written(model, ids, 64)
    same = next((i for i, (a, b) in enumerate(zip(ours, answer["written"], strict=True)) if a != b), 64)
    print(f"{kind}: logits off by {off:.1e}, {same} of 64 tokens equal")
    assert off < (0.1 if kind.startswith("Q") else 1e-4)
    assert same == 64 or kind.startswith("Q") and same > 8


@pytest.mark.parametrize("kind", [tf.MixtralForCausalLM, tf.GptOssForCausalLM])
def test_experts_are_rounded_by_what_reaches_them(kind, tmp_path):
    "The error of an expert's product on its own tokens falls; one that no token reaches is rounded as without"
    torch.manual_seed(0)
    options = dict(head_dim=64) if kind is tf.GptOssForCausalLM else {}
    sizes = dict(hidden_size=256, intermediate_size=256, num_attention_heads=4, num_key_value_heads=2, vocab_size=64)
    model = kind(kind.config_class(**sizes, **options, num_hidden_layers=1, num_local_experts=4, num_experts_per_tok=1))
    model = model.eval()
    for norm in (m for n, m in model.named_modules() if n.endswith("post_attention_layernorm")):
        norm.weight.data = torch.randn(256).mul(1.5).exp()                       # some columns are large
    router = next(m for n, m in model.named_modules() if n.endswith((".gate", ".router")) and hasattr(m, "weight"))
    router.weight.data[3] = 0
    if getattr(router, "bias", None) is not None: router.bias.data[3] = -100
    ids, errors, rounded = torch.randint(0, 64, (4, 64)), [], []
    experts = next(m for n, m in model.named_modules() if n.endswith(".experts"))
    seen = []
    hook = experts.register_forward_pre_hook(
        lambda m, args, kwargs: seen.append((*args, *kwargs.values())), with_kwargs=True)
    with torch.no_grad(): model(ids)
    hook.remove()
    x, index = seen[0][0].reshape(-1, 256), next(t for t in seen[0] if not t.is_floating_point())
    for calib in (None, [ids]):
        export_gguf(model, tmp_path / "a.gguf", type="Q2_K", calib=calib)
        rounded.append(torch.from_numpy(GGUF(tmp_path / "a.gguf").tensor("blk.0.ffn_up_exps.weight").copy()))
    export_gguf(model, tmp_path / "a.gguf", type="F32")
    whole = torch.from_numpy(GGUF(tmp_path / "a.gguf").tensor("blk.0.ffn_up_exps.weight").copy())
    reached = index.unique().tolist()
    for e in reached:
        rows = x[(index.reshape(len(x), -1) == e).any(-1)]
        errors.append([(rows @ (w[e] - whole[e]).T).square().sum().item() for w in rounded])
    assert all(with_it < 0.8 * without for without, with_it in errors) and len(reached) >= 2
    for e in set(range(4)) - set(reached): assert torch.equal(rounded[0][e], rounded[1][e])

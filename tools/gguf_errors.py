"""What llama.cpp's own quantizers make of some weights, and which types it gives to the matrices of a mixed file.

    python tools/gguf_errors.py FOLDER_OF_BINARIES

writes `tests/fixtures/gguf_errors.json`: for each type the mean square error of `ggml_quantize_chunk` (libggml-base.so,
called by ctypes), without and with an importance matrix; and for some models with 1, 18 and 40 layers the type of each
tensor after `llama_model_quantize` (libllama.so). FOLDER_OF_BINARIES is node_modules/@node-llama-cpp/linux-x64/bins/
linux-x64 of npm's node-llama-cpp 3.22.1, which holds llama.cpp v0.5.0 as that package built it.
"""
import ctypes
import json
import re
import sys
import tempfile
from pathlib import Path

import gguf
import numpy as np
import torch
import transformers as tf

from bmlab.cook import export_gguf
from bmlab.formats import GGUF
from bmlab.formats.gguf_writer import BLOCKS

WHERE = Path(__file__).parents[1] / "tests/fixtures/gguf_errors.json"
MIXED = {"Q3_K_S": 11, "Q3_K_M": 12, "Q3_K_L": 13, "Q4_K_S": 14, "Q4_K_M": 15, "Q5_K_S": 16, "Q5_K_M": 17,
         "MXFP4_MOE": 38}
LETTERS = {"Q3_K": "3", "Q4_K": "4", "Q5_K": "5", "Q6_K": "6", "Q8_0": "8", "MXFP4": "m", "F16": "h", "Q4_0": "a",
           "Q5_0": "b", "Q5_1": "c"}
SIZES = dict(hidden_size=256, intermediate_size=256, num_attention_heads=4, num_key_value_heads=2, vocab_size=64)
MODELS = {  # name → class, configuration: layers enough for each branch of the rule
    "llama": ("LlamaForCausalLM", SIZES | dict(num_hidden_layers=18)),
    "llama-tied": ("LlamaForCausalLM", SIZES | dict(num_hidden_layers=40, tie_word_embeddings=True)),
    "mixtral": ("MixtralForCausalLM", SIZES | dict(num_hidden_layers=3, num_local_experts=8, sliding_window=None)),
    "narrow": ("LlamaForCausalLM", SIZES | dict(num_hidden_layers=3, hidden_size=96, intermediate_size=288)),
    "gptneox": ("GPTNeoXForCausalLM", {k: v for k, v in SIZES.items() if "key" not in k} | dict(num_hidden_layers=18)),
    "falcon": ("FalconForCausalLM", dict(hidden_size=256, num_hidden_layers=18, num_attention_heads=4, vocab_size=64)),
}


def weights():
    "{name: (32, 1024) float32}, normal and with heavy tails, and the importance of the columns"
    g = torch.Generator().manual_seed(0)
    normal = torch.randn(32, 1024, generator=g)
    tails = normal * (torch.randn(32, 1024, generator=g).abs() + 0.3)
    return {"normal": normal / 50, "tails": tails / 50}, torch.randn(1024, generator=g).mul(1.2).exp()


def model_of(name):
    cls, config = MODELS[name]
    cls = getattr(tf, cls)
    torch.manual_seed(0)
    return cls(cls.config_class(**config)).eval()


def error(got, w, importance):
    return float(((torch.as_tensor(got) - w).square() * (1 if importance is None else importance)).mean())


def chunk(library, w, kind, importance):
    "The rows as ggml quantizes them"
    number = gguf.GGMLQuantizationType[kind]
    n, size = gguf.GGML_QUANT_SIZES[number]
    rows, out = np.ascontiguousarray(w.numpy()), np.zeros((len(w), w.shape[1] // n * size), np.uint8)
    call, p, i = library.ggml_quantize_chunk, ctypes.c_void_p, ctypes.c_int64
    call.restype, call.argtypes = ctypes.c_size_t, [ctypes.c_int, p, p, i, i, i, p]
    columns = None if importance is None else np.ascontiguousarray(importance.numpy())
    at = None if columns is None else columns.ctypes.data
    assert call(int(number), rows.ctypes.data, out.ctypes.data, 0, *rows.shape, at) == out.nbytes
    return gguf.quants.dequantize(out, number)


class Options(ctypes.Structure):
    "llama_model_quantize_params of llama.h"
    _fields_ = [
        *((n, ctypes.c_int) for n in ("nthread", "ftype", "output_tensor_type", "token_embedding_type")),
        *((n, ctypes.c_bool) for n in ("requantize", "quantize_output", "only_copy", "pure", "keep_split", "dry_run")),
        *((n, ctypes.c_void_p) for n in ("imatrix", "kv_overrides", "tensor_types", "prune_layers")),
    ]


def types(library, file, mix, folder):
    "{tensor: type} after llama.cpp's own quantization"
    library.llama_model_quantize_default_params.restype = Options
    options = library.llama_model_quantize_default_params()
    options.ftype, options.nthread = MIXED[mix], 1
    library.llama_model_quantize.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.POINTER(Options)]
    out = folder / "out.gguf"
    assert library.llama_model_quantize(str(file).encode(), str(out).encode(), ctypes.byref(options)) == 0, (file, mix)
    return {n: kind for n, (_, kind, _) in GGUF(out).tensors.items() if kind != "F32"}


def short(types):
    "{tensor without its layer: a letter for each layer}"
    out = {}
    for n, kind in sorted(types.items(), key=lambda item: [int(x) for x in item[0].split(".") if x.isdigit()]):
        out.setdefault(re.sub(r"^blk\.\d+\.", "", n), []).append(LETTERS[kind])
    return {n: "".join(letters) for n, letters in out.items()}


def main(folder):
    folder = Path(folder)
    base = ctypes.CDLL(str(folder / "libggml-base.so"))
    several, importance = weights()
    errors = {
        kind: {name: [error(chunk(base, w, kind, i), w, i) for i in (None, importance)] for name, w in several.items()}
        for kind in BLOCKS
    }
    backends = ctypes.CDLL(str(next(folder.glob("libggml.*so"))), ctypes.RTLD_GLOBAL)
    backends.ggml_backend_load_all_from_path(str(folder).encode())
    library, mixed = ctypes.CDLL(str(next(folder.glob("libllama.*so")))), {}
    with tempfile.TemporaryDirectory() as tmp:
        for name in MODELS:
            file = export_gguf(model_of(name), Path(tmp) / f"{name}.gguf", "F32")
            mixed[name] = {mix: short(types(library, file, mix, Path(tmp))) for mix in MIXED}
    WHERE.write_text(json.dumps({"errors": errors, "types": mixed}, separators=(",", ":")), encoding="utf-8")
    print(WHERE, WHERE.stat().st_size, "bytes")


if __name__ == "__main__": main(*sys.argv[1:])

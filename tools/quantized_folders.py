"""Small quantized models made by the owners of the formats, and what their own code reads in them.

    python tools/quantized_folders.py            # writes tests/fixtures/quantized_folders.zip

Needs compressed-tensors 0.20.0, bitsandbytes 0.50.2, transformers 5.23.0, and a checkout of GPTQModel 7.3.4
(ModelCloud/GPTQModel at f4c327a17eb3e24524d5a97a3d682e3696ae6a28) on PYTHONPATH; to read the zip none is needed.
GPTQModel's packages for pictures are put in as empty modules: no layer uses them.
"""
import hashlib
import importlib.machinery
import json
import sys
import types
import zipfile
from pathlib import Path
from unittest.mock import MagicMock

import torch
import transformers as tf
from safetensors.torch import load_file, save_file
from torch import nn

OUT = Path(__file__).parent.parent / "tests" / "fixtures" / "quantized_folders.zip"
SIZES = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
             vocab_size=16, max_position_embeddings=64, tie_word_embeddings=False)
IDS = torch.tensor([[1, 5, 2, 9, 3]])


class Empty(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"): raise AttributeError(name)
        return MagicMock()


class Finder:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "torchvision": return importlib.machinery.ModuleSpec(name, self, is_package=True)
    def create_module(self, spec): return Empty(spec.name)
    def exec_module(self, module): module.__path__ = []


def tiny(dtype, seed=0):
    torch.manual_seed(seed)
    model = tf.LlamaForCausalLM(tf.LlamaConfig(**SIZES)).to(dtype).eval()
    for p in model.parameters():
        if p.ndim == 2: p.data.mul_(4)
    return model


def linears(model): return {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear) and n != "lm_head"}


def digest(t): return hashlib.sha256(t.contiguous().cpu().view(torch.uint8).numpy().tobytes()).hexdigest()


@torch.no_grad()
def logits(model):
    "Of a model made anew in float32: one that was cast has its rotary frequencies rounded"
    new = type(model)(model.config).eval()
    new.load_state_dict({k: v.float() for k, v in model.state_dict().items()})
    return [round(x, 6) for x in new(IDS).logits[0, -1].tolist()]


def folder(model, tensors, config, wide, more=None):
    "Files of one case: the tensors, the configuration, and what the owner's code reads"
    plain = {k: v for k, v in model.state_dict().items() if k not in wide}
    cfg = model.config.to_dict() | {"architectures": [type(model).__name__], "quantization_config": config}
    cfg["dtype"] = str(next(iter(wide.values())).dtype).removeprefix("torch.")
    model.load_state_dict(plain | wide, strict=True)
    expected = {"weights": {k: digest(v) for k, v in wide.items()}, "dtype": cfg["dtype"], "logits": logits(model)}
    return {"tensors": {k: v.contiguous() for k, v in (plain | tensors).items()}, "config": cfg,
            "expected": expected | (more or {})}


def gptq(bits, sym, act, v1, group=32):
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.utils.model import convert_gptq_v2_to_v1_format_module
    from gptqmodel.quantization import QuantizeConfig
    model, tensors, wide = tiny(torch.float16), {}, {}
    g = torch.Generator().manual_seed(bits)
    for n, m in linears(model).items():
        N, K = m.weight.shape
        middle, G = 2 ** (bits - 1), K // group
        low = 1 if v1 else 0                                      # a zero point of 0 cannot be written as one less
        zeros = torch.full((N, G), middle) if sym else torch.randint(low, 2**bits, (N, G), generator=g)
        scales = (torch.rand(N, G, generator=g) * 0.4 + 0.1).half().float() / 2 ** (bits - 1)
        scales = scales.half().float()
        index = torch.arange(K) // group
        if act: index = index[torch.randperm(K, generator=g)]
        codes = torch.randint(0, 2**bits, (N, K), generator=g)
        linear = nn.Linear(K, N, bias=False)
        linear.weight.data = (codes - zeros[:, index]) * scales[:, index]
        layer = TorchLinear(bits=bits, group_size=group, sym=sym, desc_act=act, in_features=K, out_features=N,
                            bias=False, register_buffers=True)
        layer.pack_original(linear, scales, zeros, index.int())
        layer.post_init()
        wide[f"{n}.weight"] = layer.eval().dequantize_weight().t().half().contiguous()
        if v1:
            cfg = QuantizeConfig(bits=bits, group_size=group, sym=sym, desc_act=act)
            convert_gptq_v2_to_v1_format_module(layer, cfg)
        tensors |= {f"{n}.{k}": getattr(layer, k).clone() for k in ("qweight", "qzeros", "scales", "g_idx")}
    config = {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": sym, "desc_act": act,
              "checkpoint_format": "gptq" if v1 else "gptq_v2"}
    return folder(model, tensors, config, wide)


def awq(group=32):
    from gptqmodel.nn_modules.qlinear.torch_awq import AwqTorchLinear
    from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm
    model, tensors, wide = tiny(torch.float16), {}, {}
    g = torch.Generator().manual_seed(44)
    for n, m in linears(model).items():
        N, K = m.weight.shape
        zeros = torch.randint(0, 16, (N, K // group), generator=g)
        scales = ((torch.rand(N, K // group, generator=g) * 0.4 + 0.1) / 8).half()
        index = torch.arange(K) // group
        linear = nn.Linear(K, N, bias=False)
        linear.weight.data = (torch.randint(0, 16, (N, K), generator=g) - zeros[:, index]) * scales.float()[:, index]
        layer = AwqTorchLinear(bits=4, group_size=group, sym=False, desc_act=False, in_features=K, out_features=N)
        layer.pack(linear, scales.float(), zeros)
        layer.scales = layer.scales.half()
        w = dequantize_gemm(layer.qweight, layer.qzeros, layer.scales, 4, group)
        wide[f"{n}.weight"] = w.t().half().contiguous()
        tensors |= {f"{n}.{k}": getattr(layer, k).clone() for k in ("qweight", "qzeros", "scales")}
    config = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}
    return folder(model, tensors, config, wide)


def compressed(kind, weights, activations=None, dtype=torch.bfloat16):
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams
    scheme = QuantizationScheme(targets=["Linear"], weights=weights, input_activations=activations)
    args, compressor = scheme.weights, BaseCompressor.get_value_from_registry(kind)
    model, tensors, wide = tiny(dtype), {}, {}
    for n, m in linears(model).items():
        w = m.weight.data
        if args.strategy == "group": part = w.unflatten(-1, (-1, args.group_size))
        elif args.strategy == "block":
            a, b = args.block_structure
            part = w.view(w.shape[0] // a, a, w.shape[1] // b, b).transpose(1, 2).flatten(2)
        else: part = w[:, None] if args.strategy == "channel" else w.view(1, 1, -1)
        scale, zero = calculate_qparams(part.amin(-1), part.amax(-1), args)
        if args.strategy == "tensor": scale, zero = scale.view(1), zero.view(1)
        state = {"weight": w, "weight_scale": scale, "weight_zero_point": zero}
        packed = compressor.compress(state, scheme)
        wide[f"{n}.weight"] = compressor.decompress(packed, scheme)["weight"].to(dtype)
        tensors |= {f"{n}.{k}": v for k, v in packed.items()}
    config = QuantizationConfig(config_groups={"group_0": scheme}, quantization_status="compressed", format=kind,
                                ignore=["lm_head"]).model_dump(mode="json")
    return folder(model, tensors, config | {"quant_method": "compressed-tensors"}, wide)


def fp8(block=(16, 32)):
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize
    model, tensors, wide = tiny(torch.bfloat16), {}, {}
    for n, m in linears(model).items():
        (N, K), (a, b) = m.weight.shape, block
        part = m.weight.data.float().view(N // a, a, K // b, b)
        scale = part.abs().amax((1, 3)) / 448
        w = (part / scale[:, None, :, None]).to(torch.float8_e4m3fn).view(N, K)
        wide[f"{n}.weight"] = Fp8Dequantize(None)._dequantize_one(w, scale, output_dtype=torch.bfloat16)
        tensors |= {f"{n}.weight": w, f"{n}.weight_scale_inv": scale}
    config = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": list(block)}
    return folder(model, tensors, config, wide)


def mxfp4():
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors
    torch.manual_seed(0)
    config = tf.GptOssConfig(num_hidden_layers=1, num_local_experts=2, vocab_size=16, hidden_size=32,
                             intermediate_size=32, head_dim=16, num_attention_heads=2, num_key_value_heads=1,
                             num_experts_per_tok=1, sliding_window=8, max_position_embeddings=64)
    config.layer_types = ["full_attention"]
    model, tensors, wide = tf.GptOssForCausalLM(config).to(torch.bfloat16).eval(), {}, {}
    for n, p in model.named_parameters():
        if not n.endswith(("gate_up_proj", "down_proj")): continue
        E, K, N = p.shape
        blocks = torch.randint(0, 256, (E, N, K // 32, 16), dtype=torch.uint8)
        scales = torch.randint(121, 125, (E, N, K // 32), dtype=torch.uint8)
        wide[n] = convert_moe_packed_tensors(blocks, scales)
        tensors |= {n + "_blocks": blocks, n + "_scales": scales}
    skip = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    return folder(model, tensors, {"quant_method": "mxfp4", "modules_to_not_convert": skip}, wide)


def bitsandbytes(tmp, **how):
    import bitsandbytes.functional as B
    from bitsandbytes.backends.default.ops import _dequantize_4bit_compute
    dtype = torch.float16
    source = tmp / "source"
    tiny(dtype).save_pretrained(source)
    quantized = tf.LlamaForCausalLM.from_pretrained(
        source, dtype=dtype, quantization_config=tf.BitsAndBytesConfig(**how), device_map="cpu")
    quantized.save_pretrained(tmp / "made")
    made = load_file(tmp / "made" / "model.safetensors")
    config = json.loads((tmp / "made" / "config.json").read_text())["quantization_config"]
    model, wide = tiny(dtype), {}
    for n in linears(model):
        w = quantized.get_submodule(n).weight
        if "load_in_8bit" in how: wide[f"{n}.weight"] = B.int8_vectorwise_dequant(w.data, w.SCB).to(dtype)
        else:
            raw = {k.removeprefix(f"{n}.weight."): v for k, v in made.items() if k.startswith(f"{n}.weight.")}
            state = B.QuantState.from_dict(raw, torch.device("cpu"))
            scale = B.dequantize_blockwise(state.absmax, state.state2) + state.offset if state.nested else state.absmax
            # not its kernel for CPUs, which takes the scales of other blocks where a row is shorter than a block
            packed = made[f"{n}.weight"].reshape(-1)
            shape = state.blocksize, state.shape
            wide[f"{n}.weight"] = _dequantize_4bit_compute(packed, scale, state.code, *shape, dtype)
    plain = set(model.state_dict()) - set(wide)
    return folder(model, {k: v for k, v in made.items() if k not in plain}, config, wide)


def main():
    sys.meta_path.append(Finder())
    import tempfile
    tmp = Path(tempfile.mkdtemp())
    int8 = dict(num_bits=8, type="int", symmetric=True)
    int4 = dict(num_bits=4, type="int", strategy="group", group_size=32)
    float8 = dict(num_bits=8, type="float", symmetric=True)
    token = dict(num_bits=8, type="int", strategy="token", dynamic=True)
    token8 = dict(num_bits=8, type="float", strategy="token", dynamic=True)
    cases = {
        "gptq-4": gptq(4, sym=True, act=False, v1=True),
        "gptq-4-act-order": gptq(4, sym=False, act=True, v1=False),
        "gptq-4-asym": gptq(4, sym=False, act=False, v1=True),
        "gptq-3": gptq(3, sym=False, act=False, v1=True),
        "gptq-2": gptq(2, sym=True, act=False, v1=False),
        "gptq-8": gptq(8, sym=True, act=False, v1=True),
        "awq": awq(),
        "W4A16": compressed("pack-quantized", int4 | {"symmetric": True}),
        "W4A16-asym": compressed("pack-quantized", int4 | {"symmetric": False}, dtype=torch.float16),
        "W8A16": compressed("pack-quantized", int8 | {"strategy": "channel"}),
        "W8A16-groups": compressed("pack-quantized", int8 | {"strategy": "group", "group_size": 32},
                                   dtype=torch.float16),
        "W8A8": compressed("int-quantized", int8 | {"strategy": "channel"}, token),
        "FP8": compressed("float-quantized", float8 | {"strategy": "channel"}, token8),
        "FP8-tensor": compressed("float-quantized", float8 | {"strategy": "tensor"}, token8),
        "fp8-blocks": fp8(),
        "mxfp4": mxfp4(),
        "nf4": bitsandbytes(tmp / "a", load_in_4bit=True, bnb_4bit_quant_type="nf4"),
        "nf4-double": bitsandbytes(tmp / "b", load_in_4bit=True, bnb_4bit_quant_type="nf4",
                                   bnb_4bit_use_double_quant=True),
        "fp4": bitsandbytes(tmp / "c", load_in_4bit=True, bnb_4bit_quant_type="fp4"),
        "int8": bitsandbytes(tmp / "d", load_in_8bit=True),
    }
    with zipfile.ZipFile(OUT, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as out:
        def put(name, data): out.writestr(zipfile.ZipInfo(name, (2026, 1, 1, 0, 0, 0)), data, zipfile.ZIP_DEFLATED)
        for name, case in cases.items():
            save_file(case["tensors"], tmp / "t.safetensors", {"format": "pt"})
            put(f"{name}/model.safetensors", (tmp / "t.safetensors").read_bytes())
            for k in ("config", "expected"): put(f"{name}/{k}.json", json.dumps(case[k], indent=1))
    print(OUT, OUT.stat().st_size, "bytes", {n: len(c["tensors"]) for n, c in cases.items()})


if __name__ == "__main__": main()

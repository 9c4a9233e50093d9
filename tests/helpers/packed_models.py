"""Small packed models of whole-number codes and short scales, the same on every machine: what exports are judged by."""
import hashlib

import torch
import transformers as tf
from torch import nn

from bmlab.cook.quantize import Int8GroupLinear
from bmlab.cook.sparse24 import pack24, pick24
from bmlab.kernels.layers import Int4Linear, Int4Ordered, Int8Linear

IDS = torch.tensor([[1, 5, 2, 9, 3]])
SIZES = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=4,
             vocab_size=16, max_position_embeddings=64, tie_word_embeddings=False)
CASES = {  # name → format of `export_hf`, and what its layers are
    "gptq": ("gptq", dict(low=1)),
    "gptq-zeros": ("gptq", dict(low=0)),
    "gptq-symmetric": ("gptq", dict(low=8, high=9)),
    "gptq-order": ("gptq", dict(low=1, ordered=True)),
    "gptq-8": ("gptq", dict(bits=8)),
    "gptq-8-groups": ("gptq", dict(bits=8, groups=True)),
    "awq": ("awq", dict(low=0)),
    "2:4": ("compressed-tensors", dict(sparse=True)),
    "2:4-int8": ("compressed-tensors", dict(sparse=True, bits=8)),
}


def model_like(dtype=torch.float32):
    torch.manual_seed(0)
    model = tf.LlamaForCausalLM(tf.LlamaConfig(**SIZES)).to(dtype).eval()
    for p in model.parameters():
        if p.ndim == 2: p.data.mul_(4)
    return model


def linears(model): return {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear) and n != "lm_head"}


def _int4(m, group, low, high, ordered, g):
    N, K = m.weight.shape
    codes = torch.randint(0, 16, (N, K // group, 2, group // 2), generator=g, dtype=torch.uint8)
    zero = torch.randint(low, high, (N, K // group), generator=g)
    scale = torch.randint(9, 32, (N, K // group), generator=g) / 512
    new = (Int4Ordered if ordered else Int4Linear).skeleton_of(m, group_size=group)
    order = (torch.randperm(K, generator=g).int(),) if ordered else ()
    new._put((codes[:, :, 0] | codes[:, :, 1] << 4).view(N, -1), scale.half(), ((8 - zero) * scale).half(), *order)
    return new


def _int8(m, group, mask, g):
    N, K = m.weight.shape
    codes = torch.randint(-127, 128, (N, K), generator=g, dtype=torch.int8) * mask
    kind = torch.randint(-9, -7, (N, K // group) if group else (N,), generator=g)
    new = Int8GroupLinear.skeleton_of(m, group_size=group) if group else Int8Linear.skeleton_of(m)
    new._put(codes, 2.0**kind if not group else (2.0**kind).half())
    return new


def packed_model(case):
    "The model of a case, its layers inside the block packed"
    _, how = CASES[case]
    model, g = model_like(), torch.Generator().manual_seed(len(case))
    for n, m in linears(model).items():
        group = 64 if n.endswith("down_proj") else 32          # of two sizes: the format has one
        mask = pick24(torch.randint(0, 1000, m.weight.shape, generator=g).float()) if how.get("sparse") else 1
        if how.get("bits") == 8: new = _int8(m, 32 if how.get("groups") else None, mask, g)
        elif how.get("sparse"):
            m.weight.data = torch.randint(-64, 65, m.weight.shape, generator=g) / 256 * mask
            continue
        else: new = _int4(m, group, how["low"], how.get("high", 16), how.get("ordered", False), g)
        model.set_submodule(n, new)
    return pack24(model, modules="*layers*_proj") if how.get("sparse") else model


def digest(t): return hashlib.sha256(t.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def digest_of(tensors):
    "One for all, with their names and shapes"
    seen = hashlib.sha256()
    for k in sorted(tensors): seen.update(f"{k} {tuple(tensors[k].shape)} {digest(tensors[k])}\n".encode())
    return seen.hexdigest()


@torch.no_grad()
def logits(model): return model(IDS).logits[0, -1]

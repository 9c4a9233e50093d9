"Steps whose blocks are one call of C give what transformers' own code gives on the same packed weights"
import sys

import pytest
import torch
import transformers as tf

from bmlab.infer.decode import Decoder
from bmlab.infer.fused import fuse_decode
from bmlab.kernels import cpu
from bmlab.kernels.cpu_block import CpuBlock, run_blocks
from bmlab.kernels.layers import pack_linears

pytestmark = pytest.mark.skipif(not cpu.available(), reason="no C compiler, or no AVX2")
SMALL = dict(vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, head_dim=16, max_position_embeddings=64, pad_token_id=0)
FAMILIES = {
    "llama": tf.LlamaConfig(**SMALL),
    "qwen2, biases": tf.Qwen2Config(**SMALL),
    "qwen3, norms of heads": tf.Qwen3Config(**SMALL),
    "mistral, a window": tf.MistralConfig(**SMALL, sliding_window=6),
    "gemma3, four norms": tf.Gemma3TextConfig(**SMALL, sliding_window=6),
}


def packed(config, bits, dtype=torch.float32):
    torch.manual_seed(0)
    model = tf.AutoModelForCausalLM.from_config(config).eval()
    for n, p in model.named_parameters():
        if "norm" in n or "bias" in n: torch.nn.init.normal_(p, 0.5, 0.3)
    return pack_linears(model.to(dtype), bits=bits, group_size=32)


def calls(monkeypatch):
    "How many tokens each block took that C computed"
    seen, call = [], CpuBlock.__call__
    monkeypatch.setattr(CpuBlock, "__call__", lambda self, x, *a: seen.append(x[..., 0].numel()) or call(self, x, *a))
    def together(blocks, x, *a):
        seen.extend([x[..., 0].numel()] * len(blocks))
        return run_blocks(blocks, x, *a)
    monkeypatch.setattr(sys.modules[fuse_decode.__module__], "run_blocks", together)
    return seen


@torch.no_grad()
@pytest.mark.parametrize("family,bits", [*((f, 8) for f in FAMILIES), ("llama", 4), ("gemma3, four norms", 4)])
def test_ragged_steps_are_transformers_own(family, bits, monkeypatch):
    model = packed(FAMILIES[family], bits)
    texts = torch.randint(1, 97, (2, 20))
    want = [model(input_ids=t[None, :n], use_cache=False).logits[0] for t, n in zip(texts, (20, 17))]
    decoder = Decoder(model, max_batch=2, max_ctx=32)
    assert fuse_decode(model).table.query("form == 'block'").fused.all()
    seen = calls(monkeypatch)
    decoder.prefill([texts[0, :15].tolist(), texts[1, :12].tolist()])
    seen.clear()
    got = torch.cat([decoder.step(torch.stack([texts[0, 15 + n], texts[1, 12 + n]])[:, None]) for n in range(5)], 1)
    assert seen == [2] * 10                                                       # two blocks, five steps
    for row, (mine, whole, first) in enumerate(zip(got, want, (15, 12))):
        torch.testing.assert_close(mine, whole[first:first + 5], rtol=2e-3, atol=2e-4, msg=lambda m: f"row {row}: {m}")


@torch.no_grad()
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_a_row_is_the_same_beside_others_and_by_any_number_of_threads(dtype):
    model, threads = packed(FAMILIES["llama"], 8, dtype), torch.get_num_threads()
    fuse_decode(model)
    texts, out = torch.randint(1, 97, (3, 9)).tolist(), []
    try:
        for n in (1, 2):
            torch.set_num_threads(n)
            for rows in ([0, 1, 2], [0], [1], [2]):
                decoder = Decoder(model, max_batch=len(rows), max_ctx=32)
                decoder.prefill([texts[r][:8] for r in rows], chunk=4 * len(rows))
                out.append(decoder.step(torch.tensor([[texts[r][8]] for r in rows])))
    finally: torch.set_num_threads(threads)
    assert torch.equal(torch.cat(out[1:4]), out[0])
    for one, two in zip(out[:4], out[4:]): assert torch.equal(one, two)


@torch.no_grad()
def test_changed_weights_are_seen_and_hooks_lead_back(monkeypatch):
    model = packed(FAMILIES["qwen2, biases"], 8)
    decoder = Decoder(model, max_batch=1, max_ctx=32)
    fuse_decode(model)
    seen, block = calls(monkeypatch), model.model.layers[0]
    def step():
        decoder.prefill([[5, 6, 7]])
        seen.clear()
        return decoder.step(torch.tensor([[8]]))
    before = step()
    assert seen == [1, 1]
    for t in (block.input_layernorm.weight, block.self_attn.q_proj.bias, block.mlp.up_proj.scale):
        was = t.clone()
        t.mul_(3)
        assert not torch.equal(step(), before)
        t.copy_(was)
        torch.testing.assert_close(step(), before)
    handle = block.mlp.register_forward_hook(lambda m, args, out: out * 0)
    assert not torch.allclose(step(), before) and seen == [1]                     # the other block's alone
    handle.remove()
    assert torch.equal(step(), before)

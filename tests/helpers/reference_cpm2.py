"""CPM-2 with experts transcribed from its source, names of original checkpoints, and how texts are cut there.

Weights are a plain dict under the original's names. No code is shared with the library. What models without experts
compute is judged by running the originals (test_originals.py, test_center.py). Equations name file and line of

- github.com/TsinghuaAI/CPM-2-Finetune, commit bd0fc493e2e8ce9ee7dcf47e30d77cfab546791a
- github.com/TsinghuaAI/CPM-2-Pretrain, branch moe, commit a00b3dd70d71a796a1ed2a925ddf7902e0209ab3: baselayer.py
- github.com/TsinghuaAI/CPM-1-Generate, commit 3f816d13dd3db902ca7d30077098d7f91523812b: tokenization_gpt2.py
"""
import math

import torch


def norm(w, x, eps=1e-6): # mpu/transformer_enc_dec.py:41-47
    return w * (x / math.sqrt(float((x ** 2).mean()) + eps))


def gelu(x): # mpu/transformer_enc_dec.py:53-54
    return 0.5 * x * (1.0 + torch.tanh(0.7978845608028654 * x * (1.0 + 0.044715 * x * x)))


def bucket(distance, buckets, both, far=128): # mpu/transformer_enc_dec.py:240-263
    base = 0
    if both: # :242-244
        buckets //= 2
        base, distance = buckets * (distance > 0), abs(distance)
    else: distance = -min(distance, 0)                                              # :246
    exact = buckets // 2                                                            # :250
    if distance < exact: return base + distance                                     # :251 and 263
    log = torch.log(torch.tensor(float(distance)) / exact) / math.log(far / exact) * (buckets - exact)   # :254-258
    return base + min(exact + int(log), buckets - 1)                                # :259-261


def attention(q, k, v, heads, seen, bias):
    "mpu/transformer_enc_dec.py:339-377, a query and a head at a time; seen(i, j): a bool; bias(i, j, h): a number"
    size, out = len(q[0]) // heads, []
    for i in range(len(q)):
        said = []
        for h in range(heads):
            part = slice(h * size, (h + 1) * size)                                  # :211-216, heads lie side by side
            keys = [j for j in range(len(k)) if seen(i, j)]                         # :363, -10000 elsewhere
            scores = [float(q[i][part] @ k[j][part]) + bias(i, j, h) for j in keys]   # :339-340 and 363, no root
            weight = [math.exp(s - max(scores)) for s in scores]                    # :368
            said.append(sum(a / sum(weight) * v[j][part] for a, j in zip(weight, keys)))   # :375
        out.append(torch.cat(said))                                                 # :377
    return out


def network(w, x): # a feed-forward layer with its residual: mpu/transformer_enc_dec.py:499-501 and 122-132
    y = norm(w["layer_norm.weight"], x)                                             # :499
    inner = gelu(w["dense_relu_dense.wi_0.weight"] @ y) * (w["dense_relu_dense.wi_1.weight"] @ y)   # :122-124
    return x + w["dense_relu_dense.wo.weight"] @ inner                              # :132 and 501


def routed(w, x, expert_of):
    """baselayer.py:47-62 of the branch moe: each token to one expert, whose layer has the residual inside. The training
    there shares tokens out evenly (:52 and 78-83); alone, a token takes what suits it best, as in :89"""
    if "expert_centroids" not in w: return network(w, x)
    y = norm(w["experts.0.layer_norm.weight"], x)                                   # :48, the norm is one for all
    best = int((w["expert_centroids"] @ y).argmax())                                # :49
    expert_of.append(best)
    return network(under(w, f"experts.{best}."), x)                                 # :62


def under(w, prefix): return {k[len(prefix):]: v for k, v in w.items() if k.startswith(prefix)}


def stack(w, table, ids, heads, memory=None, expert_of=None):
    "ParallelTransformer: mpu/transformer_enc_dec.py:677-824; memory: what the encoder said, for a decoder"
    x, decoder = [table[i] for i in ids], memory is not None                        # :685
    distances = w["blocks.0.self_attn.self_attn.relative_attention_bias.weight"]    # :633, of the first block, for all
    def bias(i, j, h): return float(distances[bucket(j - i, len(distances), not decoder)][h])   # :266-279
    def seen(i, j): return j <= i or not decoder                                    # tril, and everything
    for i in range(1 + max(int(k.split(".")[1]) for k in w if k.startswith("blocks."))):
        block = under(w, f"blocks.{i}.")
        y = [norm(block["self_attn.layer_norm.weight"], r) for r in x]              # :428
        q, k, v = zip(*((block["self_attn.self_attn.project.weight"] @ r).chunk(3) for r in y))   # :316-320
        out = attention(q, k, v, heads, seen, bias)
        x = [r + block["self_attn.self_attn.dense.weight"] @ o for r, o in zip(x, out)]   # :387 and 435
        if decoder:
            q = [block["cross_attn.cross_attn.project_q.weight"] @ norm(block["cross_attn.layer_norm.weight"], r)
                 for r in x]                                                        # :470 and 308
            k, v = zip(*((block["cross_attn.cross_attn.project_kv.weight"] @ m).chunk(2) for m in memory))   # :310-312
            out = attention(q, k, v, heads, lambda i, j: True, lambda i, j, h: 0.0)   # :349-351, zeros
            x = [r + block["cross_attn.cross_attn.dense.weight"] @ o for r, o in zip(x, out)]   # :387 and 479
        x = [routed(under(block, "ff."), r, expert_of) for r in x]
    return [norm(w["final_layernorm.weight"], r) for r in x]                        # :824


def cpm2(w, source, target, heads):
    "(logits of the target (L, V), the expert of every token of every layer): model/enc_dec_modeling.py:74-99"
    experts, table = [], w["word_embeds.weight"]
    memory = stack(under(w, "encoder."), table, source.tolist(), heads, None, experts)
    out = stack(under(w, "decoder."), table, target.tolist(), heads, memory, experts)
    return torch.stack([w["lm_head.weight"] @ r for r in out]), experts             # :99


# ---- names and shapes of the original checkpoints, by the modules that the published code defines

def megatron_names(layers, d, vocab, positions, blocks=False):
    "CPM-1 (blocks=False) and GLM: a layer's two norms, its four linear modules with biases"
    linear = lambda n, i, o: {n + ".weight": (o, i), n + ".bias": (o,)}
    both = lambda n: {n + ".weight": (d,), n + ".bias": (d,)}
    names = {"word_embeddings.weight": (vocab, d)}
    names |= (
        {
            "transformer.position_embeddings.weight": (positions, d),
            "transformer.block_position_embeddings.weight": (positions, d),
        }
        if blocks
        else {"position_embeddings.weight": (positions, d)}
    )
    for i in range(layers):
        p = f"transformer.layers.{i}."
        names |= (
            both(p + "input_layernorm")
            | linear(p + "attention.query_key_value", d, 3 * d)
            | linear(p + "attention.dense", d, d)
        )
        names |= (
            both(p + "post_attention_layernorm")
            | linear(p + "mlp.dense_h_to_4h", d, 4 * d)
            | linear(p + "mlp.dense_4h_to_h", 4 * d, d)
        )
    return names | both("transformer.final_layernorm")


def encdec_names(layers, d, inner, ff, heads, vocab, buckets=32):
    "CPM-2 and EVA: `word_embeds` is held by the model and by both stacks"
    names = {"word_embeds.weight": (vocab, d), "lm_head.weight": (vocab, d)}
    for stack in ("encoder", "decoder"):
        names |= {
            f"{stack}.word_embeds.weight": (vocab, d),
            f"{stack}.final_layernorm.weight": (d,),
            f"{stack}.blocks.0.self_attn.self_attn.relative_attention_bias.weight": (buckets, heads),
        }
        for i in range(layers):
            p = f"{stack}.blocks.{i}."
            names |= {
                p + "self_attn.self_attn.project.weight": (3 * inner, d),
                p + "self_attn.self_attn.dense.weight": (d, inner),
                p + "self_attn.layer_norm.weight": (d,),
            }
            if stack == "decoder":
                names |= {
                    p + "cross_attn.cross_attn.project_q.weight": (inner, d),
                    p + "cross_attn.cross_attn.project_kv.weight": (2 * inner, d),
                    p + "cross_attn.cross_attn.dense.weight": (d, inner),
                    p + "cross_attn.layer_norm.weight": (d,),
                }
            names |= {
                p + "ff.dense_relu_dense.wi_0.weight": (ff, d),
                p + "ff.dense_relu_dense.wi_1.weight": (ff, d),
                p + "ff.dense_relu_dense.wo.weight": (d, ff),
                p + "ff.layer_norm.weight": (d,),
            }
    return names


def center_names(layers, d, inner, ff, bias=False, gated=True, norm_bias=False, cross=False, prefix="encoder"):
    "A stack of ModelCenter's layers"
    names, linear = {}, lambda n, i, o: {n + ".weight": (o, i)} | ({n + ".bias": (o,)} if bias else {})
    normed = lambda n: {n + ".weight": (d,)} | ({n + ".bias": (d,)} if norm_bias else {})
    for i in range(layers):
        p = f"{prefix}.layers.{i}."
        for a in ["self_att"] + ["cross_att"] * cross:
            names |= normed(f"{p}{a}.layernorm_before_attention") | linear(
                f"{p}{a}.self_attention.attention_out", inner, d
            )
            for m in ("project_q", "project_k", "project_v"): names |= linear(f"{p}{a}.self_attention.{m}", d, inner)
        names |= normed(p + "ffn.layernorm_before_ffn") | linear(p + "ffn.ffn.w_out", ff, d)
        for m in (("w_in.w_0", "w_in.w_1") if gated else ("w_in.w",)): names |= linear(f"{p}ffn.ffn.{m}", d, ff)
    return names | normed(f"{prefix}.output_layernorm")


# ---- cutting text

def half_width(char): # CPM-2: tokenization_enc_dec.py:106-116
    if char in "，。！（）？、；：": return char
    code = 0x20 if ord(char) == 0x3000 else ord(char) - 0xFEE0
    return chr(code) if 0x20 <= code <= 0x7E else char


def cpm2_pieces(text, vocabulary): # tokenization_enc_dec.py:160-166 and 77-103
    import jieba
    out = []
    for word in jieba.cut("".join(half_width(c) for c in text), cut_all=False):
        word = word.replace(" ", "\u2582").replace("\n", "\u2583")
        if len(word) > 200:
            out.append("<unk>")
            continue
        start = 0
        while start < len(word):
            end = len(word)
            while end > start and word[start:end] not in vocabulary: end -= 1
            out.append(word[start:end] if end > start else "<unk>")
            start = end if end > start else start + 1
    return out


def cpm1_pieces(text, processor): # data_utils/tokenization_gpt2.py:63-65
    import jieba
    return processor.encode(
        " ".join(w.replace(" ", "\u2582").replace("\n", "\u2583") for w in jieba.cut(text, cut_all=False)), out_type=str
    )

"""CPM-1, CPM-2, EVA and GLM written down a second time: the published equations with plain loops over heads and
layers, on checkpoints under their
original names. Nothing here is shared with the library; it is what the tests compare it with."""
import math

import torch


def rms(x, w, eps): return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * w
def norm(x, w, b, eps):
    centred = x - x.mean(-1, keepdim=True)
    return centred / torch.sqrt((centred * centred).mean(-1, keepdim=True) + eps) * w + b
def gelu(x): return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x ** 3)))


def attend(q, k, v, heads, seen, bias=None, scale=1.0):
    "q (L, h), k, v (K, h), seen (L, K) bool, bias (heads, L, K) → (L, h), head by head"
    size, out = q.shape[1] // heads, []
    for h in range(heads):
        part = slice(h * size, (h + 1) * size)
        score = (q[:, part] @ k[:, part].T) * scale
        if bias is not None: score = score + bias[h]
        weight = torch.exp(score - score.masked_fill(~seen, -math.inf).amax(-1, keepdim=True)) * seen
        out.append(weight / weight.sum(-1, keepdim=True) @ v[:, part])
    return torch.cat(out, 1)


def bucket(distance, buckets, max_distance, both):
    "distance: key's place minus query's"
    base = 0
    if both:
        buckets //= 2
        base, distance = (buckets if distance > 0 else 0), abs(distance)
    else: distance = max(-distance, 0)
    exact = buckets // 2
    if distance < exact: return base + distance
    return base + min(
        exact + int(math.log(distance / exact) / math.log(max_distance / exact) * (buckets - exact)), buckets - 1
    )


def distance_bias(table, queries, keys, max_distance, both):
    "table (buckets, heads) → (heads, queries, keys)"
    rows = [[table[bucket(k - q, len(table), max_distance, both)] for k in range(keys)] for q in range(queries)]
    return torch.stack([torch.stack(r) for r in rows]).permute(2, 0, 1)


def causal(n): return torch.tensor([[k <= q for k in range(n)] for q in range(n)])


def cpm1(w, ids, heads):
    "CPM-1 as released: GPT-2 in Megatron's names. ids (L,) → (L, V)"
    x = w["word_embeddings.weight"][ids] + w["position_embeddings.weight"][:len(ids)]
    layers = 1 + max(int(n.split(".")[2]) for n in w if ".layers." in n)
    lin = lambda x, n: x @ w[n + ".weight"].T + w[n + ".bias"]
    for i in range(layers):
        p = f"transformer.layers.{i}."
        y = norm(x, w[p + "input_layernorm.weight"], w[p + "input_layernorm.bias"], 1e-5)
        q, k, v = lin(y, p + "attention.query_key_value").chunk(3, -1)
        x = x + lin(
            attend(q, k, v, heads, causal(len(ids)), scale=1 / math.sqrt(q.shape[1] / heads)), p + "attention.dense"
        )
        y = norm(x, w[p + "post_attention_layernorm.weight"], w[p + "post_attention_layernorm.bias"], 1e-5)
        x = x + lin(gelu(lin(y, p + "mlp.dense_h_to_4h")), p + "mlp.dense_4h_to_h")
    return (
        norm(x, w["transformer.final_layernorm.weight"], w["transformer.final_layernorm.bias"], 1e-5)
        @ w["word_embeddings.weight"].T
    )


def center_block(w, p, x, heads, seen, bias, scaled, attn_scale, eps, memory=None, memory_seen=None, activation=gelu):
    """One of ModelCenter's layers without biases; `scaled`: every product is divided by the square root of what it
    sums over"""
    over = lambda n: math.sqrt(n) if scaled else 1.0
    def lin(x, n): return x @ w[n + ".weight"].T / over(x.shape[1])
    def attention(p, x, source, seen, bias):
        y = rms(x, w[p + "layernorm_before_attention.weight"], eps)
        source = y if source is None else source
        p += "self_attention."
        q, k, v = lin(y, p + "project_q"), lin(source, p + "project_k"), lin(source, p + "project_v")
        return x + lin(
            attend(q, k, v, heads, seen, bias, 1 / math.sqrt(q.shape[1] / heads) if attn_scale else 1.0),
            p + "attention_out",
        )
    x = attention(p + "self_att.", x, None, seen, bias)
    if memory is not None: x = attention(p + "cross_att.", x, memory, memory_seen, None)
    y = rms(x, w[p + "ffn.layernorm_before_ffn.weight"], eps)
    return x + lin(activation(lin(y, p + "ffn.ffn.w_in.w_0")) * lin(y, p + "ffn.ffn.w_in.w_1"), p + "ffn.ffn.w_out")


def count_layers(w, prefix): return 1 + max(int(n[len(prefix):].split(".")[0]) for n in w if n.startswith(prefix))


def cpm1_center(w, ids, heads, max_distance, context=None, span=None, eps=1e-6):
    "CPM-1 of ModelCenter. ids (L,), context (L,) bool, span (L,) → (L, V)"
    n, d = len(ids), w["input_embedding.weight"].shape[1]
    context, span = [False] * n if context is None else context, [0] * n if span is None else span
    seen = torch.tensor(
        [[span[q] == span[k] and bool(context[k] or (not context[q] and k <= q)) for k in range(n)] for q in range(n)]
    )
    bias = distance_bias(w["position_bias.relative_attention_bias"], n, n, max_distance, True)
    x = w["input_embedding.weight"][ids] / math.sqrt(d)
    for i in range(count_layers(w, "encoder.layers.")):
        x = center_block(w, f"encoder.layers.{i}.", x, heads, seen, bias, True, True, eps)
    return rms(x, w["encoder.output_layernorm.weight"], eps) / math.sqrt(d) @ w["input_embedding.weight"].T


def cpm2_center(w, source, target, heads, scaled=True, attn_scale=True, eps=1e-6):
    "CPM-2 of ModelCenter (with both off: T5 v1.1). source (S,), target (L,) → (L, V)"
    S, L, d = len(source), len(target), w["input_embedding.weight"].shape[1]
    everything, memory = torch.ones(S, S, dtype=torch.bool), w["input_embedding.weight"][source]
    bias = distance_bias(w["position_bias_enc.relative_attention_bias"], S, S, 128, True)
    for i in range(count_layers(w, "encoder.layers.")):
        memory = center_block(w, f"encoder.layers.{i}.", memory, heads, everything, bias, scaled, attn_scale, eps)
    memory = rms(memory, w["encoder.output_layernorm.weight"], eps)
    x, bias = (
        w["input_embedding.weight"][target],
        distance_bias(w["position_bias_dec.relative_attention_bias"], L, L, 128, False),
    )
    for i in range(count_layers(w, "decoder.layers.")):
        x = center_block(
            w,
            f"decoder.layers.{i}.",
            x,
            heads,
            causal(L),
            bias,
            scaled,
            attn_scale,
            eps,
            memory,
            torch.ones(L, S, dtype=torch.bool),
        )
    return (
        rms(x, w["decoder.output_layernorm.weight"], eps)
        / (math.sqrt(d) if scaled else 1)
        @ w["output_projection.weight"].T
    )


def cpm2(w, source, target, heads, attn_scale=False, eps=1e-6):
    """CPM-2 as released, EVA, EVA 2.0 (attn_scale), and with `expert_centroids` the 198B model. source (S,), target
    (L,) → (L, V)"""
    scale = lambda q: 1 / math.sqrt(q.shape[1] / heads) if attn_scale else 1.0
    def network(p, x):
        y = rms(x, w[p + "layer_norm.weight"], eps)
        p += "dense_relu_dense."
        return x + (gelu(y @ w[p + "wi_0.weight"].T) * (y @ w[p + "wi_1.weight"].T)) @ w[p + "wo.weight"].T
    def feed(p, x):
        if p + "expert_centroids" not in w: return network(p, x)
        rows = []
        for token in x:
            best = int((w[p + "expert_centroids"] @ rms(token, w[p + "experts.0.layer_norm.weight"], eps)).argmax())
            rows.append(network(f"{p}experts.{best}.", token))
        return torch.stack(rows)
    def stack(name, ids, seen, both, memory=None):
        x = w["word_embeds.weight"][ids]
        bias = distance_bias(
            w[f"{name}.blocks.0.self_attn.self_attn.relative_attention_bias.weight"], len(ids), len(ids), 128, both
        )
        for i in range(count_layers(w, f"{name}.blocks.")):
            p = f"{name}.blocks.{i}."
            q, k, v = (
                rms(x, w[p + "self_attn.layer_norm.weight"], eps) @ w[p + "self_attn.self_attn.project.weight"].T
            ).chunk(3, -1)
            x = x + attend(q, k, v, heads, seen, bias, scale(q)) @ w[p + "self_attn.self_attn.dense.weight"].T
            if memory is not None:
                q = (
                    rms(x, w[p + "cross_attn.layer_norm.weight"], eps)
                    @ w[p + "cross_attn.cross_attn.project_q.weight"].T
                )
                k, v = (memory @ w[p + "cross_attn.cross_attn.project_kv.weight"].T).chunk(2, -1)
                x = (
                    x
                    + attend(q, k, v, heads, torch.ones(len(ids), len(memory), dtype=torch.bool), None, scale(q))
                    @ w[p + "cross_attn.cross_attn.dense.weight"].T
                )
            x = feed(p + "ff.", x)
        return rms(x, w[f"{name}.final_layernorm.weight"], eps)
    memory = stack("encoder", source, torch.ones(len(source), len(source), dtype=torch.bool), True)
    return stack("decoder", target, causal(len(target)), False, memory) @ w["lm_head.weight"].T


def glm(w, ids, positions, parts, heads):
    "GLM of 2021. ids (L,), positions (2, L), the first `parts` tokens are read in both directions → (L, V)"
    n = len(ids)
    seen = torch.tensor([[k < parts or k <= q for k in range(n)] for q in range(n)])
    x = (
        w["word_embeddings.weight"][ids]
        + w["transformer.position_embeddings.weight"][positions[0]]
        + w["transformer.block_position_embeddings.weight"][positions[1]]
    )
    lin = lambda x, n: x @ w[n + ".weight"].T + w[n + ".bias"]
    for i in range(count_layers(w, "transformer.layers.")):
        p = f"transformer.layers.{i}."
        q, k, v = lin(
            norm(x, w[p + "input_layernorm.weight"], w[p + "input_layernorm.bias"], 1e-5),
            p + "attention.query_key_value",
        ).chunk(3, -1)
        x = x + lin(attend(q, k, v, heads, seen, scale=1 / math.sqrt(q.shape[1] / heads)), p + "attention.dense")
        y = norm(x, w[p + "post_attention_layernorm.weight"], w[p + "post_attention_layernorm.bias"], 1e-5)
        x = x + lin(gelu(lin(y, p + "mlp.dense_h_to_4h")), p + "mlp.dense_4h_to_h")
    return (
        norm(x, w["transformer.final_layernorm.weight"], w["transformer.final_layernorm.bias"], 1e-5)
        @ w["word_embeddings.weight"].T
    )


# names and shapes of the original checkpoints, by the modules that the published code defines

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


# cutting text, as the published tokenizers describe it

def half_width(char):
    if char in "，。！（）？、；：": return char
    code = 0x20 if ord(char) == 0x3000 else ord(char) - 0xFEE0
    return chr(code) if 0x20 <= code <= 0x7E else char


def cpm2_pieces(text, vocabulary):
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


def cpm1_pieces(text, processor):
    import jieba
    return processor.encode(
        " ".join(w.replace(" ", "\u2582").replace("\n", "\u2583") for w in jieba.cut(text, cut_all=False)), out_type=str
    )

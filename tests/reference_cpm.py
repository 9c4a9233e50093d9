"CPM-Ant and CPM-Bee once more, from the published equations: one position, one head, one pair at a time, on plain dicts of weights. No code is shared with the library."
import math

import torch


def linear(W, x): return (W @ x) / math.sqrt(W.shape[1])                     # every matrix is divided by the root of what it reads


def norm(w, x, eps=1e-6): return x / math.sqrt(float((x.double() ** 2).mean()) + eps) * w


def gelu(x): return .5 * x * (1 + torch.erf(x / math.sqrt(2)))


def bucket(distance, buckets, far):
    "Where a distance key − query falls: half the buckets for each direction, half of these exact, the rest by the logarithm"
    half = buckets // 2
    base = half if distance > 0 else 0
    n, exact = abs(distance), half // 2
    if n < exact: return base + n
    return base + min(half - 1, exact + int(torch.log(torch.tensor(n / exact)) / math.log(far / exact) * (half - exact)))


def block(w, x, score, seen, heads, width):
    "One block on a list of vectors; `score(i, j)` is what is added for each head, `seen(i, j)` whether i may see j"
    n = len(x)
    if "self_att.self_attention.project_q.weight" in w:
        read = [norm(w["self_att.layernorm_before_attention.weight"], v) for v in x]
        q, k, v = ([linear(w[f"self_att.self_attention.project_{c}.weight"], r).view(heads, width) for r in read] for c in "qkv")
        out = []
        for i in range(n):
            mine = []
            for h in range(heads):
                places = [j for j in range(n) if seen(i, j)]
                s = torch.stack([(q[i][h] * k[j][h]).sum() / math.sqrt(width) + score(i, j)[h] for j in places]) if places else torch.zeros(0)
                p = torch.exp(s - s.max()) if places else s
                mine.append(sum((a / p.sum() * v[j][h] for a, j in zip(p, places)), torch.zeros(width)))
            out.append(linear(w["self_att.self_attention.attention_out.weight"], torch.cat(mine)))
        x = [a + b for a, b in zip(x, out)]
    if "ffn.ffn.w_out.weight" in w:
        read = [norm(w["ffn.layernorm_before_ffn.weight"], v) for v in x]
        x = [a + linear(w["ffn.ffn.w_out.weight"], gelu(linear(w["ffn.ffn.w_in.w_0.weight"], r)) * linear(w["ffn.ffn.w_in.w_1.weight"], r)) for a, r in zip(x, read)]
    return x


def layers(weights, prefix):
    "[weights of each block]"
    numbers = sorted({int(k[len(prefix):].split(".")[0]) for k in weights if k.startswith(prefix)})
    return [{k[len(f"{prefix}{i}."):]: v for k, v in weights.items() if k.startswith(f"{prefix}{i}.")} for i in range(numbers[-1] + 1)]


def ant(weights, config, ids, context, length, kind=2, span=None):
    "Logits (L, V) of one row: the prompt vectors, then `ids`, of which the first `length` count"
    P, V, d = config.prompt_length, config.vocab_size, config.hidden_size
    table, segments = weights["cpmant.input_embedding.weight"], [0] * P + [2] * len(ids)
    rows = [V + kind * P + i for i in range(P)] + list(ids)
    x = [table[r] / math.sqrt(d) + weights["cpmant.segment_embedding.weight"][s] / math.sqrt(d) for r, s in zip(rows, segments)]
    ctx, spans = [True] * P + list(context), [0] * P + list(span or [0] * len(ids))
    bias = weights["cpmant.position_bias.relative_attention_bias"]
    def score(i, j):
        if segments[i] == segments[j]: return bias[bucket(j - i, config.position_bias_num_buckets, config.position_bias_max_distance)]
        return bias[config.position_bias_num_buckets + segments[i] * config.segment_types + segments[j]]
    def seen(i, j): return (ctx[j] or (not ctx[i] and j <= i)) and spans[i] == spans[j] and i < P + length and j < P + length
    for w in layers(weights, "cpmant.encoder.layers."): x = block(w, x, score, seen, config.num_attention_heads, config.dim_head)
    h = [norm(weights["cpmant.encoder.output_layernorm.weight"], v) for v in x[P:]]
    return torch.stack([table[:V] @ (v / math.sqrt(d)) for v in h])


def turn(x, number, scale=16):
    "Rotary embedding over the whole vector: pairs (i, i + d/2)"
    d, out = len(x), x.clone()
    for i in range(d // 2):
        angle = number * scale / 10000 ** (2 * i / d)
        out[i] = x[i] * math.cos(angle) - x[i + d // 2] * math.sin(angle)
        out[i + d // 2] = x[i + d // 2] * math.cos(angle) + x[i] * math.sin(angle)
    return out


def bee(weights, config, ids, subs, length, context, samples, num_segments, segment, offset, relations, span, ext):
    "Logits (L, V + E) of one row, all of it flat as CPM-Live packs it: relations of each task one behind the other, `offset` where a token's begin; ext: [(token, number)]"
    d, table = config.hidden_size, weights["cpmbee.input_embedding.weight"]
    x = [turn(table[t] / math.sqrt(d), s) for t, s in zip(ids, subs)]
    bias, N = weights["cpmbee.position_bias.relative_attention_bias"], config.position_bias_num_buckets
    def relation(i, j):
        if samples[i] != samples[j] or span[i] != span[j]: return 1
        return relations[segment[i] * num_segments[i] + segment[j] + offset[i]]
    def score(i, j):
        r = relation(i, j)
        return bias[bucket(j - i, N, config.position_bias_max_distance)] if r == 0 else bias[N + r - 1]
    def seen(i, j):
        return (context[j] or (not context[i] and j <= i)) and (samples[i] == 0 or samples[i] == samples[j]) and span[i] == span[j] and i < length and j < length
    for w in layers(weights, "cpmbee.encoder.layers."): x = block(w, x, score, seen, config.num_attention_heads, config.dim_head)
    h = [norm(weights["cpmbee.encoder.output_layernorm.weight"], v) for v in x]
    beyond = [turn(table[t] / math.sqrt(d), s) for t, s in ext]
    return torch.stack([torch.cat([table @ (v / math.sqrt(d)), torch.stack([v @ e for e in beyond])]) for v in h])

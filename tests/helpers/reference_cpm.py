"""CPM-Ant and CPM-Bee, transcribed from OpenBMB's source: one position, one head, one pair at a time.

Weights are a plain dict and arguments one row, both under the original's names. No code is shared with the library.
Each equation names file and line under cpm_live/ of

- Bee: github.com/OpenBMB/CPM-Bee, commit 95cc575e956cc25115bf40e645bd082997462109, src/cpm_live
- Ant: github.com/OpenBMB/CPM-Live, branch cpm-ant, commit ba0e46dc0beb1c1c7bf24e42f907e2df4fe9e074, cpm-live/cpm_live

What is named once is the same line in both. They differ in native_layers/blocks.py:93 and 156, where Bee alone divides.
"""
import math

import torch


def linear(W, x): return (W @ x) / math.sqrt(W.shape[1])                            # native_layers/linear.py:49-50


def norm(weight, x, eps=1e-6): # native_layers/layernorm.py:7-9
    variance = float((x ** 2).mean())
    return x / math.sqrt(variance + eps) * weight


def gelu(x): return .5 * x * (1 + torch.erf(x / math.sqrt(2)))   # native_layers/feedforward.py:43, torch.nn.GELU()


def attention(w, x, bias, seen):
    "native_layers/attention.py:74-113, a query and a head at a time; bias(i, j): a number a head; seen(i, j): a bool"
    heads = len(bias(0, 0))
    q, k, v = ([linear(w[f"project_{c}.weight"], r).view(heads, -1) for r in x] for c in "qkv")   # :74-80
    out = []
    for i in range(len(x)):
        said = []
        for h in range(heads):
            keys = [j for j in range(len(x)) if seen(i, j)]                         # :90-94, -inf elsewhere
            score = [float(q[i][h] @ k[j][h]) / math.sqrt(len(q[i][h])) + float(bias(i, j)[h]) for j in keys]   # :88-89
            weight = [math.exp(s - max(score)) for s in score]                      # :96, softmax
            mixed = torch.zeros_like(v[i][h])                                       # :98-102, nothing seen: 0
            for a, j in zip(weight, keys): mixed = mixed + a / sum(weight) * v[j][h]   # :108
            said.append(mixed)
        out.append(linear(w["attention_out.weight"], torch.cat(said)))              # :110-113
    return out


def feed_forward(w, x): # native_layers/feedforward.py:55-58 and 113-118
    return linear(w["w_out.weight"], gelu(linear(w["w_in.w_0.weight"], x)) * linear(w["w_in.w_1.weight"], x))


def under(w, prefix): return {k[len(prefix):]: v for k, v in w.items() if k.startswith(prefix)}


def encoder(w, x, bias, seen, residual):
    """Bee: native_layers/transformer.py:102-106, Ant: :109-120 (103 calls a list, which does not run).

    residual(hidden, x): what a block makes of its input and of what it computed
    """
    numbers = [int(k.split(".")[1]) for k in w if k.startswith("layers.")]
    for i in range(max(numbers) + 1):
        block = under(w, f"layers.{i}.")
        if (att := under(block, "self_att.")):                                      # blocks.py:228-239
            read = [norm(att["layernorm_before_attention.weight"], hidden) for hidden in x]   # blocks.py:84
            out = attention(under(att, "self_attention."), read, bias, seen)        # blocks.py:85
            x = [residual(hidden, o) for hidden, o in zip(x, out)]                  # blocks.py:93
        if (ffn := under(block, "ffn.")):                                           # blocks.py:242-243
            read = [norm(ffn["layernorm_before_ffn.weight"], hidden) for hidden in x]   # blocks.py:152
            out = [feed_forward(under(ffn, "ffn."), r) for r in read]               # blocks.py:153
            x = [residual(hidden, o) for hidden, o in zip(x, out)]                  # blocks.py:156
    return [norm(w["output_layernorm.weight"], hidden) for hidden in x]


def bucket(distance, buckets, far):
    "Bee: native_layers/position_embedding.py:189-209, Ant: :99-123; distance: key - query"
    half = buckets // 2
    base, away, exact = half * (distance > 0), abs(distance), half // 2
    if away < exact: return base + away
    log = torch.log(torch.tensor(away, dtype=torch.float32) / exact) / math.log(far / exact) * (half - exact)
    return base + min(half - 1, exact + int(log))


# ---- CPM-Ant

def ant(
    w,                # {the original's name: Tensor}
    buckets, far,     # position_bias_num_buckets, position_bias_max_distance
    input,            # [int] a row: rows of the prompts' table, then tokens
    prompt_length,    # how many of these are prompts
    length,           # how many count, prompts among them
    context,          # [bool]
    segment,          # [int]
    span,             # [int]
):                    # → (L, V) logits, those of the prompts first
    "models/ant_torch.py:79-109 of the branch cpm-ant."
    E, S = w["input_embedding.weight"], w["segment_embedding.weight"]
    width, types = math.sqrt(E.shape[1]), len(S)
    tables = [w["prompt_embedding.weight"]] * prompt_length + [E] * (len(input) - prompt_length)   # :81-85
    x = [table[t] / width + S[s] / width for table, t, s in zip(tables, input, segment)]   # :84-87; embedding.py:46
    table = w["position_bias.relative_attention_bias"]
    def bias(i, j): # position_embedding.py:66-93
        if segment[j] == segment[i]: return table[bucket(j - i, buckets, far)]
        return table[segment[i] * types + segment[j] + buckets]                     # :97, :69
    def seen(i, j): # :91-103
        given = context[j] or (not context[i] and j <= i)
        return given and span[i] == span[j] and i < length and j < length
    h = encoder(under(w, "encoder."), x, bias, seen, lambda hidden, x: hidden + x)   # blocks.py:93, 156
    return torch.stack([E @ (hidden / width) for hidden in h])                      # :108; embedding.py:57


# ---- CPM-Bee

def turn(x, number, scale=16):
    "Pairs (i, i + D/2): native_layers/position_embedding.py:221-223 and 237-249; scale: embedding.py:71 and 77-79"
    half, out = len(x) // 2, x.clone()
    for i in range(half):
        angle = number * scale / 10000 ** (2 * i / len(x))
        out[i] = x[i] * math.cos(angle) - x[i + half] * math.sin(angle)
        out[i + half] = x[i + half] * math.cos(angle) + x[i] * math.sin(angle)
    return out


def bee(
    w,                              # {the original's name: Tensor}
    buckets, far,                   # position_bias_num_buckets, position_bias_max_distance
    input, input_sub,   # [int] a row: tokens and their numbers
    length,                         # how many count
    context,                        # [bool]
    sample_ids,                     # [int] 0: the task, else an example beside it
    num_segments, segment,   # [int] how many segments the token's task has, and which is its own
    segment_rel_offset,   # [int] where the relations of its task begin
    segment_rel,                    # [int] relations of all tasks, one behind the other
    span,                           # [int] which of the packed tasks
    ext_table_ids, ext_table_sub,   # [int] the numbered tokens behind the vocabulary
):                                  # → (L, V + E) logits
    "models/bee_torch.py:70-135."
    E = w["input_embedding.weight"]
    width = math.sqrt(E.shape[1])
    def embedded(t, number): return turn(E[t] / width, number)                      # embedding.py:94-95
    x = [embedded(t, n) for t, n in zip(input, input_sub)]                          # :127
    table = w["position_bias.relative_attention_bias"]
    def relation(i, j): # :77-100
        if sample_ids[i] != sample_ids[j] or span[i] != span[j]: return 1
        return segment_rel[segment[i] * num_segments[i] + segment[j] + segment_rel_offset[i]]
    def bias(i, j): # position_embedding.py:168-186
        r = relation(i, j)
        return table[bucket(j - i, buckets, far)] if r == 0 else table[r - 1 + buckets]
    def seen(i, j): # :103-124
        sample = sample_ids[i] == 0 or sample_ids[i] == sample_ids[j]
        given = context[j] or (not context[i] and j <= i)
        return given and sample and span[i] == span[j] and i < length and j < length
    h = encoder(under(w, "encoder."), x, bias, seen, lambda hidden, x: (hidden + x) / 1.05)   # blocks.py:93, 156
    ext_table = [embedded(t, n) for t, n in zip(ext_table_ids, ext_table_sub)]      # :132
    def logits(hidden): # embedding.py:106-109
        return torch.cat([E @ (hidden / width), torch.stack([hidden @ e for e in ext_table])])
    return torch.stack([logits(hidden) for hidden in h])                            # :134

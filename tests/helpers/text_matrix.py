"""Which way every family decodes inside an engine, and whether its greedy text is transformers': `measure(name)`

    python tests/helpers/text_matrix.py [FAMILY…]     # a line of JSON for each
"""
import copy
import json
import logging
import sys
import warnings

import torch

from bmlab.infer.engine import wrap
from bmlab.infer.placement import plan_inference
from bmlab.infer.text import decode_tokens
from bmlab.kernels.layers import pack_linears
from every_family import FAMILIES, make

ORDER = "generate", "loop", "attention", "blocks"            # the levels, from transformers' own to bmlab's
NEW, CTX = 12, 48
_KINDS = dict(layer_types=["linear_attention", "full_attention"])
MORE = {   # values that `make` has no reason to give: both kinds of layers, what a class asks for
    "bailing_hybrid": _KINDS,
    "inkling_text": dict(sliding_window_size=16),
    "lfm2": dict(layer_types=["conv", "full_attention"]),
    "lfm3": dict(layer_types=["conv", "full_attention"]),
    "qwen3_5_moe": _KINDS,
    "qwen4_exp": _KINDS,
    "zamba": dict(layers_block_type=["mamba", "hybrid"], layer_types=["mamba", "hybrid"], mamba_dt_rank=4),
    "zamba2": dict(layers_block_type=["mamba", "hybrid"], layer_types=["mamba", "hybrid"]),
    "zaya": dict(num_experts_per_tok=1),
}
_BY_LEVEL = {   # what every family that can be made this small decodes by; a higher level is better
    "blocks": """afmoe apertus arcee aria_text bamba cohere cohere2 cohere2_moe cwm dots1 emu3 ernie4_5
        ernie4_5_moe exaone4 exaone_moe falcon flex_olmo flint gemma gemma2 gemma3_text glm glm4 glm4_moe
        gpt-sw3 gpt_bigcode gpt_neox gpt_oss granite granite_swa granitemoe granitemoe_swa
        granitemoeshared helium hunyuan_v1_dense hunyuan_v1_moe hy_v3 hyperclovax internlm3 jais2 jamba
        kolibri1 laguna lfm2 lfm2_moe lfm3 mellum mimo_v2_flash minimax_m2 minimax_m3_vl_text ministral
        ministral3 mistral mixtral mllama nanochat nemotron olmo olmo2 olmo3 olmo_hybrid olmoe persimmon
        phi phi3 phimoe qwen2 qwen2_5_vl qwen2_moe qwen2_vl qwen3 qwen3_5 qwen3_5_moe qwen3_moe qwen3_next
        qwen3_vl seed_oss smollm3 solar_open stablelm starcoder2 vaultgemma""",
    "attention": """bart bigbird_pegasus bigbird_pegasus-seq2seq biogpt blenderbot blenderbot-seq2seq blenderbot-small
        blenderbot-small-seq2seq evolla falcon_h1 granitemoehybrid marian mbart mbart-seq2seq
        modernbert-decoder mvp nemotron_h opt pegasus pegasus-seq2seq plbart trocr whisper xglm""",
    "loop": """axk1 bart-seq2seq beam bitnet bloom codegen ctrl deepseek_v2 deepseek_v3 diffllama doge
        falcon_mamba gemma3n_text gemma4 gemma4_text gemma4_unified_text git glm4_moe_lite gpt_neo
        gpt_neox_japanese gptj hrm_text jetmoe kimi_linear llama4 longcat_flash longt5 mamba mamba2
        minicpm3 minimax_m3_vl mistral4 mllama-image mt5 plbart-seq2seq qwen3_5-image qwen3_vl_moe
        recurrent_gemma step3p7 switch_transformers umt5 youtu zamba2 zaya""",
    "generate": """bailing_hybrid bert bert-generation big_bird camembert cpmant data2vec-text deepseek_v32
        deepseek_v4 electra ernie fsmt glm_moe_dsa hy_v4 inkling2_text inkling_text kosmos-2.5 led m2m_100
        megatron-bert minimax mvp-seq2seq nllb-moe openai-gpt pegasus_x prophetnet prophetnet-seq2seq
        rembert roberta roberta-prelayernorm roformer rwkv seamless_m4t seamless_m4t_v2 t5gemma xlm
        xlm-roberta xlm-roberta-xl xlnet xlstm""",
}
LEVELS = {name: level for level, names in _BY_LEVEL.items() for name in names.split()}
# the thirty most used; internlm3 is LLaMA, gpt-sw3 GPT-2
MOST_USED = """internlm3 mistral mixtral qwen2 qwen2_moe qwen3 qwen3_moe qwen3_next qwen3_5 gemma gemma2 gemma3_text
    gpt_oss gpt-sw3 gpt_neox gpt_neo gptj opt bloom falcon phi phi3 deepseek_v3 olmo2 granite granitemoehybrid
    smollm3 glm4 mamba cohere2""".split()
# beyond every window of `every_family`, within it, and up to it while decoding
LENGTHS = [21, 3, 18]


def prompts(model):
    "Texts of unequal length, without the ids that stand for pictures and for the end"
    vocab = min(model.get_input_embeddings().num_embeddings, 80)
    draw = torch.Generator().manual_seed(1)
    return [torch.randint(3, vocab, (n,), generator=draw).tolist() for n in LENGTHS]


def spoken(model, rows, new=NEW):
    "What transformers' `generate` says to each text alone, and the narrowest choice that it made on the way"
    out, narrow = [], float("inf")
    for row in rows:
        ids = torch.tensor([row], device=model.device)
        start = dict(max_new_tokens=new, min_new_tokens=new, do_sample=False, pad_token_id=0, eos_token_id=None)
        start |= dict(forced_bos_token_id=None, forced_eos_token_id=None, suppress_tokens=None)
        start |= dict(begin_suppress_tokens=None)
        start |= dict(no_repeat_ngram_size=0, repetition_penalty=1.0, num_beams=1)
        got = model.generate(
            ids, attention_mask=torch.ones_like(ids), output_logits=True, return_dict_in_generate=True, **start
        )
        out.append(got.sequences[0, -new:].tolist())
        for logits in got.logits:
            two = logits[0].float().topk(2).values
            narrow = min(narrow, (two[0] - two[1]).item() / max(logits[0].float().std().item(), 1e-9))
    return out, narrow


def said(e, rows, new=NEW):
    "The same by an engine, all rows together"
    out = [[] for _ in rows]
    for step in decode_tokens(e.decoder, rows, max_new_tokens=new):
        for r, t in enumerate(step):
            if t is not None: out[r].append(int(t))
    return out


def level(e):
    "An engine's way, one of `ORDER`; what is fused must have been used while it spoke"
    way, parts = e.way, {n: m.__dict__.get("_fused") for n, m in e.model.named_modules()}
    if way not in ("blocks", "attention"): return way
    # (a block runs its attention's part itself)
    table = e.fused.table
    names = table.name[table.form == ("block" if way == "blocks" else "attention")]
    # (nor does a decoder alone look at an encoder's keys)
    return way if all(getattr(parts[n], "used", 1) for n in names if not n.endswith("encoder_attn")) else "loop"


def engine(model, **how):
    return wrap(model, device=model.device.type, max_ctx=CTX, max_batch=len(LENGTHS), group_size=32, **how)


def measure(name, also=("limit", 8, 4), device="cpu"):
    "{'level', 'why', 'text', 'limit', 8, 4}: each true, or a sentence that says what is wrong"
    model = make(name, **MORE.get(name, {})).to(device)
    try:
        rows = prompts(model)
        want, narrow = spoken(model, rows)
    except Exception as e: return dict(name=name, skipped=f"generate: {type(e).__name__}: {e}"[:160])
    out = dict(name=name, narrow=round(narrow, 6))

    def same(model, want, **how):
        try:
            with engine(model, **how) as e:
                got = said(e, rows)
                if "level" not in out: out.update(_way(e))
        except Exception as error: return f"{type(error).__name__}: {error}"[:200]
        return True if got == want else f"{sum(a == b for a, b in zip(got, want))} of {len(want)} texts are the same"

    out["text"] = same(copy.deepcopy(model), want)
    for more in also:
        m = copy.deepcopy(model)
        if more == "limit":
            plan = plan_inference(
                m, max_batch=len(LENGTHS), max_ctx=CTX, machine=None
            )
            out[more] = same(m, want, memory_limit=plan.min_bytes)
            continue
        try:
            todo = plan_inference(m, bits=more, group_size=32).packable
            rounded = pack_linears(copy.deepcopy(m), bits=more, group_size=32, modules=dict.fromkeys(todo))
            rounded, _ = spoken(rounded, rows)
        except Exception as e:
            out[more] = f"packed: {type(e).__name__}: {e}"[:160]
            continue
        out[more] = same(m, rounded, bits=more)
    return out


def _way(e):
    why = [] if e.fused is None else [
        f"{r.form} {r['class']}: {r.why}"
        for _, r in e.fused.table.drop_duplicates(["form", "class", "why"]).iterrows() if r.why
    ]
    graph = {} if e.device.type == "cpu" else dict(why_eager=e.decoder.why_eager if e.decoder.mode == "static" else "")
    return graph | dict(level=level(e), why=e.decoder.why_generate or "; ".join(why))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    for family in sys.argv[1:] or FAMILIES:
        try: found = measure(family)
        except Exception as e: found = dict(name=family, skipped=f"{type(e).__name__}: {e}"[:160])
        print(json.dumps({str(k): v for k, v in found.items()}), flush=True)

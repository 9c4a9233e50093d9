"""What ModelCenter's own models say, one of each family, at width 64: tests/models/test_center.py compares with it.

usage: original_center.py CHECKOUT [FAMILY…]

CHECKOUT: of github.com/OpenBMB/ModelCenter; tests/fixtures/original_center.json is written; without FAMILY all are run.
Models are imported and run as they are, on a CPU, in float64. bmtrain has a stand-in of a few lines (original_cpm.py).
"""
import json, re, sys, unittest.mock
from pathlib import Path

import torch

import original_cpm
from originals import ROOT, commit, drawn, few, ids, keep, said, weights

REPOSITORY = "https://github.com/OpenBMB/ModelCenter"
V, D = 96, 64
WIDTH = dict(vocab_size=V, dim_model=D, num_heads=4, dim_head=16, dim_ff=128, half=False)
SCALED = dict(WIDTH, length_scale=True, attn_scale=True)
BOTH = dict(num_encoder_layers=12, num_decoder_layers=12)
FAMILIES = { # name: (class of model, of configuration, what differs from its defaults)
    "cpm-1": ("CPM1", "CPM1Config", dict(SCALED, num_layers=32, position_bias_max_distance=24, tied=True)),
    "cpm-2": ("CPM2", "CPM2Config", dict(SCALED, num_encoder_layers=24, num_decoder_layers=24)),
    "cpm-2-plain": ("CPM2", "CPM2Config", dict(WIDTH, num_encoder_layers=24, num_decoder_layers=24)),
    "glm": ("GLM", "GLMConfig", dict(WIDTH, num_layers=48, position_size=65, sop_tok_id=92, mask_tok_id=91)),
    "bert": ("Bert", "BertConfig", dict(WIDTH, num_layers=12, position_size=64)),
    "roberta": ("Roberta", "RobertaConfig", dict(WIDTH, num_layers=12, position_size=66)),
    "longformer": ("Longformer", "LongformerConfig", dict(
        WIDTH, num_layers=12, position_size=66, type_size=1, attention_window=8)),
    "gpt2": ("GPT2", "GPT2Config", dict(WIDTH, num_layers=12, position_size=64, ffn_activate_fn="gelu_new")),
    "gpt-j": ("GPTj", "GPTjConfig", dict(WIDTH, num_layers=12, pos_rotary_dim=8)),
    "opt": ("OPT", "OPTConfig", dict(WIDTH, num_layers=12, position_size=64)),
    "llama": ("Llama", "LlamaConfig", dict(WIDTH, num_layers=12)),
    "t5": ("T5", "T5Config", dict(WIDTH, **BOTH, scale=True)),
    "t5-v1_1": ("T5", "T5Config", dict(WIDTH, **BOTH, tied=False, ffn_activate_fn="gated_gelu_new")),
    "mt5": ("T5", "T5Config", dict(WIDTH, **BOTH, tied=False, ffn_activate_fn="gated_gelu_new")),
    "vit": ("ViT", "VitConfig", dict(img_size=32, patch_size=8, num_classes=10, hidden_size=D, num_layers=12,
                                     num_heads=4, mlp_size=128, half=False)),
}
SPREAD = {"embedding": 8, "lm_head": 4, "output_projection": 8, "attention_bias": 8, "project_q": 1.4,
          "project_k": 1.4, "w_out": .7, "attention_out": .7, "pos_embed": 8, "patch": 4}
POST = {"embedding": 16, "lm_head": 4, "project_q": 2, "project_k": 2, "attention_out": .3, "w_out": .12}
SPREADS = { # of those whose layers divide by roots themselves, and of those whose weights a script has divided by 100
    "cpm-1": {"_embedding": 24, "attention_bias": 8, "project_": 8, "w_in": 8, "w_out": 5.6, "attention_out": 5.6},
    "cpm-2": {"_embedding": 8, "output_projection": 32, "attention_bias": 8, "project_": 8, "w_in": 8, "w_out": 5.6,
              "attention_out": 5.6},
    "t5": {"input_embedding": .08, "attention_bias": 8, "project_": .7, "w_in.w.": .1, "w_out": .07,
           "attention_out": .007},
    "bert": POST, "roberta": POST, "longformer": POST, "glm": {"_embedding": 8, "w_out": .1, "attention_out": .5},
}


def shaped(name, shapes): # the weights of a family, from its names and shapes
    same = {"lm_head.decoder.weight": "input_embedding.weight"}              # the head reads the table
    if name == "gpt-j": # one norm under two names
        same |= {n: n.replace("ffn.layernorm_before_ffn", "self_att.layernorm_before_attention") for n in shapes}
    return weights(shapes, SPREADS.get(name, SPREAD), summed=True, same=same)


def arguments(name): # → {name of an argument: lists}, as ModelCenter's forward takes them
    draw = drawn(name)
    if name == "vit": return dict(input_seq=draw.standard_normal((2, 3, 32, 32)).round(3).tolist())
    text = ids(name, 2, 30, V - 8, 4)
    if name.startswith(("t5", "mt5", "cpm-2")):
        return dict(input_ids=text, length=[30, 22], decoder_input_ids=ids(f"{name} target", 2, 12, V - 8, 4),
                    decoder_length=[12, 9])
    if name == "glm": # two pieces, with their places: left to itself the class counts on from the first to the second
        text, pieces = text[0][:20], [ids("glm b", 1, 4, V - 8, 4)[0], ids("glm c", 1, 3, V - 8, 4)[0]]
        text[4], text[11] = 91, 91
        return dict(
            input_ids=[[*text, 92, *pieces[0], 92, *pieces[1]]], position_ids=[[*range(20), *[4] * 5, *[11] * 4]],
            block_position_ids=[[*[0] * 20, *range(1, 6), *range(1, 5)]])
    if name == "longformer": # of whole windows; <pad> is 1 there
        text = ids(name, 2, 32, V - 8, 4)
        return dict(input_ids=[text[0], text[1][:22] + [1] * 10], attention_mask=[[1] * 32, [1] * 22 + [0] * 10],
                    global_attention_mask=[[1] + [0] * 31] * 2, token_type_ids=[[0] * 32] * 2)
    if name == "cpm-1":
        return dict(input_ids=text, length=[30, 22], context=(draw.rand(2, 30) < .5).tolist(),
                    span=[[0] * 12 + [1] * 18, [0] * 30])
    if name == "bert": return dict(input_ids=text, length=[30, 22], token_type_ids=[[0] * 14 + [1] * 16] * 2)
    if name == "opt": return dict(input_ids=text, attention_mask=[[1] * 30, [1] * 22 + [0] * 8])
    return dict(input_ids=text, length=[30, 22])


def tensors(given): return {k: torch.tensor(v) for k, v in given.items()}


def made(center, name):
    kind, config, sizes = FAMILIES[name]
    model = getattr(center, kind)(getattr(center, config)(**sizes))
    shapes = {k: v.shape for k, v in torch.nn.Module.state_dict(model).items() if not k.endswith("inv_freq")}
    model.double().load_state_dict(shaped(name, shapes), strict=False)           # some poolers are float16 there
    return model.eval(), sorted({re.sub(r"layers\.\d+", "layers.0", k) for k in shapes})


def figures(center, name):
    model, names = made(center, name)
    told, found = arguments(name), {}
    given = tensors(told)
    if name == "vit": given["input_seq"] = given["input_seq"].double()
    if name == "longformer":
        logits = model(**given, return_logits=True)
        found["pooled"] = model(**given).pooler_output[:, :8].tolist()
    else:
        if name in ("bert", "roberta"): given["output_pooler_output"] = True
        out = model(**given)
        logits = out if isinstance(out, torch.Tensor) else out.logits
        if name in ("bert", "roberta"): found["pooled"] = out.pooler_output[:, :8].tolist()
        if name == "cpm-1": # nothing is given, all is written: a causal model
            causal = model(**given | {k: torch.zeros_like(given[k]) for k in ("context", "span")}).logits
            found["causal"] = dict(logits=few(causal, [(0, 0), (0, 15), (0, 29), (1, 21)]), said=said(causal[:1]))
    if name == "vit": return dict(sizes=FAMILIES[name][2], names=names, logits=logits.tolist())
    lengths = told.get("decoder_length") or told.get("length") or [sum(m) for m in told.get("attention_mask", [])]
    lengths = lengths or [logits.shape[1]]
    places = [(row, place) for row, n in enumerate(lengths) for place in (0, n // 2, n - 1)]
    return dict(sizes=FAMILIES[name][2], names=names, lengths=lengths, **found, logits=few(logits, places),
                said=[said(row[:n]) for row, n in zip(logits, lengths)])


def main(args):
    checkout, wanted = Path(args[0]).resolve(), args[1:] or list(FAMILIES)
    original_cpm.bmtrain()
    sys.path.insert(0, str(checkout))
    for other in ("requests", "tqdm"): sys.modules.setdefault(other, unittest.mock.MagicMock())
    import model_center.model as center
    file = ROOT / "tests/fixtures/original_center.json"
    found = json.loads(file.read_text()) if args[1:] and file.is_file() else {}
    head = dict(repository=REPOSITORY, commit=commit(checkout), files=["model_center/model", "model_center/layer"],
                recipe="tools/original_center.py")
    arange = torch.arange
    def on_cpu(*args, device=None, **kwargs): return arange(*args, **kwargs)
    with torch.no_grad(), unittest.mock.patch("torch.arange", on_cpu):
        found |= head | {name: figures(center, name) for name in wanted}
    keep("center", found)


if __name__ == "__main__": sys.exit(main(sys.argv[1:]))

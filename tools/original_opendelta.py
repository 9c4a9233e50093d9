"""Folders that OpenDelta's own code wrote, and what its models said: what tests/delta/test_opendelta_folders.py reads.

usage: original_opendelta.py CHECKOUT TRANSFORMERS [FILE]

CHECKOUT: of github.com/thunlp/OpenDelta; TRANSFORMERS: a folder of packages with a transformers of its day
(pip install --no-deps --target=TRANSFORMERS transformers==4.29.2 tokenizers==0.13.3 huggingface_hub==0.17.3);
FILE: default tests/fixtures/original_opendelta.zip

The original is imported from the checkout and run as it is, on a CPU. It imports a web server, a viewer and a client of
a hub, and needs none of them here: empty modules stand in. Weights of the backbones are not stored: `weights` draws the
same ones again, name by name.
"""
import io, json, subprocess, sys, types, zipfile, zlib
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[1]
REPOSITORY = "https://github.com/thunlp/OpenDelta"
FILES = ["opendelta/delta_models", "opendelta/basemodel.py", "opendelta/utils/saving_loading_utils.py"]
WORDS, WIDTH = 24, 16
BERT = dict(hidden_size=WIDTH, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=WORDS,
            max_position_embeddings=24)
SIZES = {
    "BertForSequenceClassification": BERT,
    "RobertaForMaskedLM": BERT,
    "GPT2LMHeadModel": dict(n_embd=WIDTH, n_layer=2, n_head=2, vocab_size=WORDS, n_positions=24),
    "OPTForCausalLM": dict(hidden_size=WIDTH, ffn_dim=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=WORDS,
                           word_embed_proj_dim=WIDTH, max_position_embeddings=24),
    "T5ForConditionalGeneration": dict(d_model=WIDTH, d_kv=8, d_ff=32, num_layers=2, num_heads=2, vocab_size=WORDS,
                                       decoder_start_token_id=0),
}
METHODS = {
    "lora": dict(lora_r=3, lora_alpha=5),
    "adapter": dict(bottleneck_dim=3, non_linearity="relu"),
    "parallel_adapter": dict(bottleneck_dim=3),
    "low_rank_adapter": dict(reduction_factor=4),
    "compacter": dict(reduction_factor=4),
    "bitfit": {},
    "prefix": dict(prefix_token_num=3, embed_dim=5, mid_dim=7),
    "prefix_plain": dict(prefix_token_num=3, reparameterize=False),
    "soft_prompt": dict(soft_token_num=3),
}
# what the original has no code for, or fails in: LoRA finds nothing on GPT-2's Conv1D, and OPT calls its attention by
# names alone, which ParallelAdapter and Prefix do not take
NOT_THERE = {("GPT2LMHeadModel", "lora"), ("OPTForCausalLM", "parallel_adapter"), ("OPTForCausalLM", "prefix"),
             ("OPTForCausalLM", "prefix_plain")}
ONLY = {"RobertaForMaskedLM": {"lora", "prefix"}, "OPTForCausalLM": {"lora", "adapter", "bitfit"}}
MORE = {  # (name, model, method, words, what stays trainable besides)
    "named": ("BertForSequenceClassification", "lora", dict(modified_modules=["[r]layer\\.1.*self\\.(query|key)"]), []),
    "excluded": ("T5ForConditionalGeneration", "adapter",
                 dict(modified_modules=["layer_norm"], exclude_modules=["decoder"]), []),
    "head": ("BertForSequenceClassification", "adapter", dict(bottleneck_dim=3), ["classifier"]),
    "pairs": ("BertForSequenceClassification", "parallel_adapter",
              dict(bottleneck_dim=3, modified_modules=["intermediate.dense", "output.dense"],
                   exclude_modules=["bert.encoder.layer.0.attention", "bert.encoder.layer.1.attention"]), []),
}
IDS, MASK = [[3, 5, 7, 9, 11, 13], [4, 6, 8, 10, 2, 2]], [[1] * 6, [1, 1, 1, 1, 0, 0]]
ANSWER = [[1, 3, 5], [2, 4, 6]]                                   # of encoder–decoders


def weights(
    shapes,  # {parameter's name: shape}
    spread=.3,
):           # → {name: Tensor, float32}
    "Normal numbers; what has one dimension around 1, if it is the weight of a norm."
    def one(name, shape):
        draw = np.random.RandomState(zlib.crc32(name.encode()))
        norm = len(shape) == 1 and name.endswith("weight")
        return draw.uniform(.5, 1.5, shape) if norm else draw.standard_normal(shape) * spread
    return {name: torch.from_numpy(one(name, tuple(shape)).astype(np.float32)) for name, shape in shapes.items()}


def backbone(name, transformers):
    "A model of random weights, by the recipe"
    cls = getattr(transformers, name)
    model = cls(cls.config_class(**SIZES[name])).eval()
    fill(dict(model.named_parameters()))
    return model


def fill(parameters):
    with torch.no_grad():
        for k, t in weights({k: p.shape for k, p in parameters.items()}).items(): parameters[k].copy_(t)


def asked(name): # → what the model is called with
    given = dict(input_ids=torch.tensor(IDS), attention_mask=torch.tensor(MASK))
    return given | (dict(decoder_input_ids=torch.tensor(ANSWER)) if name.startswith("T5") else {})


def original(checkout, transformers):
    "The package, with empty modules where it imports what it does not need here"
    sys.path[:0] = [str(transformers), str(checkout)]
    for module, names in {"web": [], "bigmodelvis": ["Visualization"], "DeltaCenter": ["OssClient"],
                          "opendelta.utils.interactive.web": ["interactive"]}.items():
        sys.modules[module] = types.SimpleNamespace(**dict.fromkeys(names))
    import opendelta
    return opendelta


def made(package, name, method, words, kept): # → (model with the delta, the delta)
    import transformers
    model, cls = backbone(name, transformers), method.removesuffix("_plain").replace("_", " ").title().replace(" ", "")
    delta = getattr(package, {"Bitfit": "BitFit"}.get(cls, cls) + "Model")(model, **words)
    delta.freeze_module(exclude=["deltas", *kept], set_state_dict=True)
    tuned = {k: p for k, p in model.named_parameters() if p.requires_grad}
    fill({f"{method} {k}": p for k, p in tuned.items()})
    return model, delta


def main(args):
    checkout, file = Path(args[0]), Path(args[2] if args[2:] else ROOT / "tests/fixtures/original_opendelta.zip")
    package = original(checkout, args[1])
    import tempfile, transformers
    head = ["git", "-C", str(checkout), "rev-parse", "HEAD"]
    commit = subprocess.run(head, capture_output=True, text=True, check=True).stdout.strip()
    cases = {f"{name}-{m}": (name, m, words, []) for name in SIZES for m, words in METHODS.items()
             if (name, m) not in NOT_THERE and m in ONLY.get(name, METHODS)} | MORE
    figures, buffer = {}, io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as z, tempfile.TemporaryDirectory() as folder:
        for case, (name, method, words, kept) in cases.items():
            model, delta = made(package, name, method, dict(words), kept)
            delta.save_finetuned(f"{folder}/{case}")
            with torch.no_grad(): logits = model(**asked(name)).logits
            count = sum(p.numel() for p in model.parameters()
                        if getattr(p, "_is_delta", False) and p.requires_grad)
            figures[case] = dict(model=name, method=method, words=words, kept=kept, parameters=count,
                                 logits=[[[float(f"{x:.7g}") for x in row] for row in r] if logits.ndim == 3
                                         else [float(f"{x:.7g}") for x in r] for r in logits.tolist()])
            for part in sorted(Path(folder, case).iterdir()):
                z.writestr(zipfile.ZipInfo(f"{case}/{part.name}", (2020, 1, 1, 0, 0, 0)), part.read_bytes(),
                           zipfile.ZIP_DEFLATED)
        where = dict(repository=REPOSITORY, commit=commit, files=FILES, recipe="tools/original_opendelta.py",
                     transformers=transformers.__version__, ids=IDS, mask=MASK, answer=ANSWER, sizes=SIZES)
        lines = ",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in figures.items())
        text = json.dumps(where)[:-1] + ', "cases": {\n' + lines + "\n}}\n"
        z.writestr(zipfile.ZipInfo("figures.json", (2020, 1, 1, 0, 0, 0)), text, zipfile.ZIP_DEFLATED)
    file.write_bytes(buffer.getvalue())
    print(f"{len(cases)} folders, {len(buffer.getvalue()) / 1024:.0f} KiB, {commit[:10]}")


if __name__ == "__main__": main(sys.argv[1:])

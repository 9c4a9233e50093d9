"""What BMCook's own code says of masks and of losses of distillation: what tests/cook/test_bmcook.py compares with.

usage: original_bmcook.py CHECKOUT [FILE]     writes the figures
       original_bmcook.py CHECKOUT --run      runs the checkout's example configurations through Cook.from_config

CHECKOUT: of github.com/OpenBMB/BMCook; FILE: default tests/fixtures/original_bmcook.json

The original is imported from the checkout and run as it is, on a CPU. Of bmtrain and model_center, which it imports,
stand-ins do what it needs here: a record of tensors by name, and names of classes. Weights are not stored: `weights`
draws the same ones again, name by name.
"""
import contextlib, importlib.util, json, subprocess, sys, types, zlib
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[1]
REPOSITORY = "https://github.com/OpenBMB/BMCook"
FILES = ["bmcook/distilling/__init__.py", "bmcook/pruning/prune_func.py"]
SIZES = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=48)
IDS = [[1, 5, 9, 13, 17, 21, 25], [2, 4, 8, 16, 32, 3, 9]]
HIDDEN = ["[post]model.layers.0:[post]model.layers.0", "[pre]model.layers.1.mlp:[pre]model.layers.1.mlp",
          "[post]model.norm:[post]model.layers.1"]
DISTILS = {
    "hidden": dict(ce_scale=0, mse_hidn_scale=3, mse_hidn_module=HIDDEN, mse_hidn_proj=False, mse_att_scale=0),
    "logits": dict(ce_scale=2, ce_temp=1, mse_hidn_scale=0, mse_att_scale=0),
}


def weights(
    shapes,  # {parameter's name: shape}
    whose,   # "student" or "teacher"
):           # → {name: Tensor, float32}
    "Normal numbers; what has one dimension around 1."
    def one(name, shape):
        draw = np.random.RandomState(zlib.crc32(f"{whose} {name}".encode()))
        return draw.uniform(.5, 1.5, shape) if len(shape) == 1 else draw.standard_normal(shape) * .3
    return {name: torch.from_numpy(one(name, tuple(shape)).astype(np.float32)) for name, shape in shapes.items()}


def model(whose):
    import transformers as tf
    m = tf.LlamaForCausalLM(tf.LlamaConfig(**SIZES)).eval()
    m.load_state_dict(weights({k: v.shape for k, v in m.state_dict().items()}, whose))
    return m


def matrix(): # (8, 16), of which masks are made
    return torch.from_numpy(np.random.RandomState(zlib.crc32(b"matrix")).standard_normal((8, 16)).astype(np.float32))


def stand_ins():
    "bmtrain and model_center as far as they are asked for"
    records = []
    @contextlib.contextmanager
    def inspect_tensor():
        records.clear()
        yield types.SimpleNamespace(_summary=records)
    bmt = types.ModuleType("bmtrain")
    bmt.inspect = types.SimpleNamespace(
        inspect_tensor=inspect_tensor, record_tensor=lambda x, name: records.append(dict(name=name, tensor=x)))
    bmt.CheckpointBlock, bmt.print_rank = type("CheckpointBlock", (), {}), lambda *_: None
    center, layer = types.ModuleType("model_center"), types.ModuleType("model_center.layer")
    center.layer, layer.Linear = layer, torch.nn.Linear
    sys.modules |= {"bmtrain": bmt, "model_center": center, "model_center.layer": layer}
    torch.cuda.IntTensor, torch.cuda.FloatTensor = torch.IntTensor, torch.FloatTensor
    torch.Tensor.cuda = lambda self, *_: self


def module(checkout, file): # one file of the checkout, without its package
    spec = importlib.util.spec_from_file_location(Path(file).parent.name, Path(checkout) / file)
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def figures(checkout):
    stand_ins()
    distilling, pruning = (module(checkout, f) for f in FILES)
    out = dict(distil={})
    for name, told in DISTILS.items():
        student, teacher = model("student"), model("teacher")
        def forward(m, loss_func, targets, **inputs):
            return types.SimpleNamespace(loss=0, original_output=m(**inputs))
        run = distilling.BMDistill.set_forward(student, teacher, forward, dict(distillation=told))
        with torch.no_grad(): got = run(student, None, None, input_ids=torch.tensor(IDS)).d_loss
        out["distil"][name] = dict(config=told, loss=float(f"{got.item():.8g}"))
    out["m4n2_1d"], out["m4n2_2d"] = (pruning.m4n2_1d(matrix()), pruning.m4n2_2d_greedy(matrix()))
    for k in ("m4n2_1d", "m4n2_2d"):
        rows = torch.as_tensor(out[k]).int().tolist()
        out[k] = ["".join(map(str, row)) for row in rows]
    return out


# what transformers calls the parts that the configurations name
NAMES = {
    "cpm_live": {},
    "gpt": {"encoder.output_layernorm": "transformer.ln_f", "encoder.layers.": "transformer.h.",
            "input_embedding": "wte", "ffn.layernorm_before_ffn": "ln_2"},
    "t5": {"encoder.output_layernorm": "encoder.final_layer_norm", "encoder.layers.": "encoder.block.",
           "input_embedding": "shared", "ffn.layernorm_before_ffn": "layer.1.layer_norm"},
}


def small(family):
    import transformers as tf
    torch.manual_seed(0)
    if family == "gpt": return tf.GPT2LMHeadModel(tf.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=48))
    if family == "t5":
        return tf.T5ForConditionalGeneration(tf.T5Config(
            d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, vocab_size=48, decoder_start_token_id=0))
    from bmlab.models import CpmAntTied                             # its head is its embedding, as in the original
    return CpmAntTied(tf.CpmAntConfig(
        vocab_size=48, hidden_size=32, num_attention_heads=4, dim_head=8, dim_ff=64, num_hidden_layers=2,
        prompt_types=8, prompt_length=2))


def run(checkout):
    "Every example configuration on a small model of its family: attached, one step, taken off"
    from bmlab.cook import Cook
    ids = torch.tensor(IDS)
    for file in sorted(Path(checkout, "examples").glob("*/configs/*.json")):
        family = file.parts[-3]
        student, teacher = small(family), small(family)
        batch = dict(input_ids=ids.int() if family == "cpm_live" else ids, labels=ids)
        calib = [{k: v for k, v in batch.items() if k != "labels" or family == "t5"}]
        try:
            cook = Cook.from_config(student, file, teacher, calib, NAMES[family], experts=4, active=.5, steps=2)
            opt = torch.optim.AdamW(student.parameters(), lr=1e-3)
            for _ in range(2):
                loss = student(**batch).loss + cook.loss()
                loss.backward()
                opt.step()
                cook.step()
                opt.zero_grad()
            said = f"{', '.join(type(m).__name__ for m in cook.methods)}; loss {loss.item():.4f}"
        except Exception as e: said = f"{type(e).__name__}: {e}"
        print(f"{family}/{file.name}: {said}")


def main(args):
    if "--run" in args: return run(args[0])
    checkout, file = args[0], Path(args[1] if args[1:] else ROOT / "tests/fixtures/original_bmcook.json")
    head = ["git", "-C", checkout, "rev-parse", "HEAD"]
    commit = subprocess.run(head, capture_output=True, text=True, check=True).stdout.strip()
    where = dict(repository=REPOSITORY, commit=commit, files=FILES, recipe="tools/original_bmcook.py", sizes=SIZES)
    found = where | figures(checkout)
    file.write_text("{\n" + ",\n".join(f" {json.dumps(k)}: {json.dumps(v)}" for k, v in found.items()) + "\n}\n")


if __name__ == "__main__": main(sys.argv[1:])

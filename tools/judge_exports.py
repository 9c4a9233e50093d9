"""What the owners of formats read in folders that `export_hf` wrote, for tests that have none of their packages.

    python tools/judge_exports.py GPTQMODEL AUTOAWQ SPARSE      # writes tests/fixtures/judged_exports.json

GPTQMODEL: a checkout of GPTQModel 7.3.4 (ModelCloud/GPTQModel at f4c327a17eb3e24524d5a97a3d682e3696ae6a28), whose
`TorchLinear` reads GPTQ; it needs PyPcre, logbar, device-smi, tokenicer, threadpoolctl and defuser.
AUTOAWQ: one of casper-hansen/AutoAWQ (at 88e4c76b20755db275574e6a03c83c84ba3bece5), whose `dequantize_gemm` in
awq/utils/packing_utils.py, line 87, reads AWQ.
SPARSE: the unpacked wheel of compressed-tensors 0.12.2, whose `Sparse24BitMaskCompressor` reads 2:4; version 0.20 has
no such reader any more. The fixture holds digests of what was written and of what they made of it, and logits.
"""
import importlib.machinery
import importlib.util
import json
import subprocess
import sys
import tempfile
import types
from pathlib import Path
from unittest.mock import MagicMock

import torch
from safetensors.torch import load_file

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "helpers")]
OUT = ROOT / "tests" / "fixtures" / "judged_exports.json"

from packed_models import CASES, digest, digest_of, logits, model_like, packed_model

from bmlab.train import export_hf


class Empty(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"): raise AttributeError(name)
        return MagicMock()


class Finder:
    "GPTQModel's package for pictures is put in as an empty module: no layer uses it"
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "torchvision": return importlib.machinery.ModuleSpec(name, self, is_package=True)
    def create_module(self, spec): return Empty(spec.name)
    def exec_module(self, module): module.__path__ = []


def read_gptq(tensors, names, config):
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.utils.model import convert_gptq_v1_to_v2_format_module
    out = {}
    for n in names:
        q = {k: tensors[f"{n}.{k}"] for k in ("qweight", "qzeros", "scales", "g_idx")}
        sizes = dict(in_features=len(q["g_idx"]), out_features=q["scales"].shape[1])
        layer = TorchLinear(bits=config["bits"], group_size=config["group_size"], sym=config["sym"], bias=False,
                            desc_act=config["desc_act"], register_buffers=True, **sizes)
        for k, t in q.items():
            assert getattr(layer, k).shape == t.shape and getattr(layer, k).dtype == t.dtype, (n, k)
            setattr(layer, k, t.clone())                      # (zero points are converted in place)
        if config["checkpoint_format"] == "gptq":
            convert_gptq_v1_to_v2_format_module(layer, bits=config["bits"], pack_dtype=torch.int32)
        layer.post_init()
        out[n] = layer.eval().dequantize_weight().t().float()
    return out


def read_awq(tensors, names, config):
    where = Path(sys.argv[2]) / "awq" / "utils" / "packing_utils.py"
    spec = importlib.util.spec_from_file_location("packing_utils", where)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    part = lambda n: [tensors[f"{n}.{k}"] for k in ("qweight", "qzeros", "scales")]
    return {n: module.dequantize_gemm(*part(n), 4, config["group_size"]).t().float() for n in names}


SPARSE = """
import sys, torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.config import Sparse24BitMaskConfig
from safetensors.torch import save_file
reader = BaseCompressor.load_from_registry("sparse-24-bitmask", config=Sparse24BitMaskConfig())
save_file({k: t.contiguous() for k, t in reader.decompress(sys.argv[1])}, sys.argv[2])
"""


def read_sparse(folder):
    "Read in another process, which has the old package"
    made = folder / "made"
    env = {"PYTHONPATH": sys.argv[3], "PATH": "/usr/bin:/bin"}
    subprocess.run([sys.executable, "-c", SPARSE, str(folder / "model.safetensors"), str(made)], check=True, env=env)
    return load_file(made)


def main():
    sys.meta_path.append(Finder())
    sys.path.insert(0, sys.argv[1])
    judged = {}
    for case, (format, _) in CASES.items():
        folder = export_hf(packed_model(case), Path(tempfile.mkdtemp()) / "x", format=format)
        tensors = load_file(folder / "model.safetensors")
        config = json.loads((folder / "config.json").read_text())["quantization_config"]
        names = sorted({k.rpartition(".")[0] for k in tensors if k.endswith((".qweight", ".bitmask"))})
        stored = {k: t for k, t in tensors.items() if k.rpartition(".")[0] in names}
        if format == "compressed-tensors":
            read = read_sparse(folder)
            wide = {n: read[f"{n}.weight"].float() for n in names}
            for n in names:
                if f"{n}.weight_scale" in tensors: wide[n] *= tensors[f"{n}.weight_scale"].float()
        else: wide = {"gptq": read_gptq, "awq": read_awq}[format](tensors, names, config)
        model = model_like()
        model.load_state_dict({f"{n}.weight": w for n, w in wide.items()}, strict=False)
        said = [round(x, 6) for x in logits(model).tolist()]
        judged[case] = {"config": config, "files": digest_of(stored), "logits": said,
                        "weights": {n: digest(w) for n, w in wide.items()}}
    OUT.write_text(json.dumps(judged, indent=1) + "\n")
    print(OUT, OUT.stat().st_size, "bytes", list(judged))


if __name__ == "__main__": main()

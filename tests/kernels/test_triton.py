"""The Triton kernels as machine code for an H200, without a GPU

Each compiles, fits a multiprocessor and keeps its sums in registers; the notebooks test what they compute."""
import json, os, subprocess, sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COMPILE = ROOT / "tests" / "helpers" / "compile_kernels.py"


@pytest.mark.slow
def test_every_kernel_compiles_for_hopper(tmp_path):
    if sys.platform != "linux": pytest.skip("Triton's compiler is there on Linux only")
    pytest.importorskip("triton")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {
        "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    run = subprocess.run([sys.executable, COMPILE], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
    made = json.loads(run.stdout.splitlines()[-1])
    # keys, or columns, go into the products in one order, whatever M and mask: rows do not change
    starts = {name.rsplit(" ", 4)[0] for name in made if name.startswith("attention")}
    for start in starts | {name.split(",")[0] for name in made if " group " in name}:
        kinds = {tuple(sorted(set(m["widths"]))) for name, m in made.items() if name.startswith(start)}
        assert len(kinds) == 1 and kinds != {()}, (
            start, {name: m["widths"] for name, m in made.items() if name.startswith(start)})
    for name, m in made.items():
        # what a Hopper multiprocessor lets one program have
        assert m["machine"] > 0 and m["shared"] <= 227 << 10, (name, m)
        # begins while the kernel before it ends,
        if name.startswith(("int8", "int4", "attention")): assert m["waits"], name
        # which they let the next do only where they are told to
        if name.startswith(("int8", "int4", "attention")): assert m["announces"] == name.endswith("soon"), name
        # one instruction shape, whatever M: rows do not change
        if name.startswith(("int8", "int4", "attention")): assert m["mma"] and not m["wgmma"] and m["copies"], (name, m)
        if name.startswith("gemm"): assert m["wgmma"] and m["copies"], (name, m)
        # two programs side by side
        if name.startswith(("int8", "int4")): assert 2 * m["shared"] <= 227 << 10, (name, m)

"""Runs notebooks without nbdev: all cells in order, `#| cuda` cells too, where torch sees a GPU.

usage: run_cells.py [--all] NOTEBOOK…   only notebooks with `#| cuda` cells unless --all; exits 1 if a cell fails

`fastcore.test` is replaced by the three functions below where fastcore is not installed.
"""
import importlib.util, json, linecache, re, subprocess, sys, time, traceback, types
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def equal(a, b):
    import numpy as np, pandas as pd, torch
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor): return a.shape == b.shape and bool((a == b).all())
    if isinstance(a, (torch.Tensor, np.ndarray)) or isinstance(b, (torch.Tensor, np.ndarray)): return bool(np.array_equal(np.asarray(a), np.asarray(b)))
    if isinstance(a, (pd.DataFrame, pd.Series)): return a.equals(b)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)): return len(a) == len(b) and all(map(equal, a, b))
    return bool(a == b)


def test_eq(a, b): assert equal(a, b), f"==:\n{a}\n{b}"


def test_close(a, b, eps=1e-5):
    import torch
    diff = (torch.as_tensor(a).double() - torch.as_tensor(b).double()).abs().max().item()
    assert diff <= eps, f"close: they differ by {diff}"


def test_fail(f, msg="", contains="", args=None, kwargs=None):
    try: f(*(args or ()), **(kwargs or {}))
    except BaseException as e:
        assert contains in str(e), f"expected {contains!r} in: {e}"
        return
    raise AssertionError(f"expected a failure. {msg}")


def provide_fastcore():
    if importlib.util.find_spec("fastcore"): return
    package, module = types.ModuleType("fastcore"), types.ModuleType("fastcore.test")
    module.test_eq, module.test_close, module.test_fail = test_eq, test_close, test_fail
    sys.modules |= {"fastcore": package, "fastcore.test": module}


def run(path):
    "True if every cell ran"
    import torch
    start, ran, own = time.time(), 0, sys.modules["__main__"]
    module = sys.modules["__main__"] = types.ModuleType("__main__")     # what cells define is found where pickle looks for it
    module.display = print
    try:
        for n, cell in enumerate(json.loads(path.read_text(encoding="utf-8"))["cells"]):
            source = "".join(cell["source"])
            if cell["cell_type"] != "code" or re.search(r"^#\|\s*(notest|slow|eval:\s*false)\b", source, re.M): continue
            if cuda := re.search(r"^#\|\s*cuda\b", source, re.M):
                if not torch.cuda.is_available(): continue
                ran += 1
            name = f"{path.name}[{n}]"
            linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)   # Triton reads its kernels' source
            if cuda: print(f"--- {name}", flush=True)
            try: exec(compile(source, name, "exec"), module.__dict__)
            except Exception as error:
                if "could not fetch" in str(error):
                    print(f"ends at {name}: a sample cannot be fetched here; {ran} cuda cells before it", flush=True)
                    return True
                print(f"FAILED {name}\n{source}\n{traceback.format_exc()}", flush=True)
                return False
    finally: sys.modules["__main__"] = own
    print(f"ok {path.name}: {ran} cuda cells, {time.time() - start:.0f} s", flush=True)
    return True


def main(args):
    import torch
    if args[:1] == ["--one"]:
        sys.path.insert(0, str(ROOT)); provide_fastcore()
        return int(not run(Path(args[1])))
    if "--all" not in args and not torch.cuda.is_available(): print("no GPU: nothing to run"); return 1
    paths = [Path(a) for a in args if not a.startswith("--")]
    if "--all" not in args: paths = [p for p in paths if re.search(r'"#\| *cuda', p.read_text(encoding="utf-8"))]
    results = [subprocess.run([sys.executable, __file__, "--one", str(p)]).returncode == 0 for p in paths]   # a process each: no state leaks
    print(f"{sum(results)} passed, {len(results) - sum(results)} failed")
    return int(not all(results))


if __name__ == "__main__": sys.exit(main(sys.argv[1:]))

"""Runs notebooks without nbdev: all cells in order, `#| cuda` cells too, where torch sees a GPU.

usage: run_cells.py [--all] NOTEBOOK…   only notebooks with `#| cuda` cells unless --all; exits 1 if a cell fails
"""
import json, linecache, re, subprocess, sys, time, traceback, types
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def run(path):
    "True if every cell ran"
    import torch
    start, ran, own = time.time(), 0, sys.modules["__main__"]
    # what cells define is found where pickle looks for it
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    module.display = print
    try:
        for n, cell in enumerate(json.loads(path.read_text(encoding="utf-8"))["cells"]):
            source = "".join(cell["source"])
            if cell["cell_type"] != "code" or re.search(r"^#\|\s*(notest|slow|eval:\s*false)\b", source, re.M): continue
            if cuda := re.search(r"^#\|\s*cuda\b", source, re.M):
                if not torch.cuda.is_available(): continue
                ran += 1
            name = f"{path.name}[{n}]"
            # Triton reads its kernels' source
            linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
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
        sys.path.insert(0, str(ROOT))
        return int(not run(Path(args[1])))
    if "--all" not in args and not torch.cuda.is_available():
        print("no GPU: nothing to run")
        return 1
    paths = [Path(a) for a in args if not a.startswith("--")]
    if "--all" not in args: paths = [p for p in paths if re.search(r'"#\| *cuda', p.read_text(encoding="utf-8"))]
    # a process each: no state leaks
    results = [subprocess.run([sys.executable, __file__, "--one", str(p)]).returncode == 0 for p in paths]
    print(f"{sum(results)} passed, {len(results) - sum(results)} failed")
    return int(not all(results))


if __name__ == "__main__": sys.exit(main(sys.argv[1:]))

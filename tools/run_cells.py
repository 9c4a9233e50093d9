"""Runs notebooks without nbdev: all cells in order, `#| cuda` cells too, where torch sees a GPU.

usage: run_cells.py [--all] NOTEBOOK…   only notebooks with `#| cuda` cells unless --all; exits 1 if a cell fails

A machine without a network has no samples: a cell that asks for one is left out, and so is what needs its names.
"""
import json, linecache, re, subprocess, sys, time, traceback, types
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def run_cell(source, name, names):
    """The error of a cell, or None

    Triton reads its kernels' source: it is found under the cell's name.
    """
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    try: exec(compile(source, name, "exec"), names)
    except Exception as error: return error


def run(path):
    "True if every cell ran, or was left out for a sample that cannot be fetched here"
    import torch
    start, ran, left_out, own = time.time(), 0, [], sys.modules["__main__"]
    # what cells define is found where pickle looks for it
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    module.display = print
    try:
        for n, cell in enumerate(json.loads(path.read_text(encoding="utf-8"))["cells"]):
            source, name = "".join(cell["source"]), f"{path.name}[{n}]"
            if cell["cell_type"] != "code" or re.search(r"^#\|\s*(notest|slow|eval:\s*false)\b", source, re.M): continue
            cuda = re.search(r"^#\|\s*cuda\b", source, re.M)
            if cuda and not torch.cuda.is_available(): continue
            if cuda: print(f"--- {name}", flush=True)
            error = run_cell(source, name, module.__dict__)
            if error is None: ran += bool(cuda)
            elif "could not fetch" in str(error) or left_out and isinstance(error, NameError):
                left_out.append(f"{n} (cuda)" if cuda else str(n))
            else:
                print(f"FAILED {name}\n{source}\n{''.join(traceback.format_exception(error))}", flush=True)
                return False
    finally: sys.modules["__main__"] = own
    print(f"ok {path.name}: {ran} cuda cells, {time.time() - start:.0f} s", flush=True)
    if left_out: print(f"left out for a sample that cannot be fetched here: cells {', '.join(left_out)}", flush=True)
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

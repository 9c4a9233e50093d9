"""Runs notebooks without nbdev: all cells in order, `#| cuda` cells too, where torch sees a GPU.

usage: run_cells.py [--all] [--record] NOTEBOOK…   exits 1 if a cell fails

Only notebooks with `#| cuda` cells are run, unless --all. --record stores in them what these cells show, under the
card's name and the date. A machine without a network has no samples: a cell that asks for one is left out, and so is
what needs its names.
"""
import ast, contextlib, datetime, io, json, linecache, re, subprocess, sys, time, traceback, types
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def run_cell(source, name, names):
    """(the value of a cell's last line or None, its error or None)

    Triton reads its kernels' source: it is found under the cell's name.
    """
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    tree, shown = ast.parse(source), None
    # like a notebook's, a last line that ends in a semicolon shows nothing
    if tree.body and isinstance(tree.body[-1], ast.Expr) and not source.rstrip().endswith(";"):
        shown = ast.Expression(tree.body.pop().value)
    try:
        exec(compile(tree, name, "exec"), names)
        return (None if shown is None else eval(compile(shown, name, "eval"), names)), None
    except Exception as error: return None, error


def outputs_of(printed, value):
    "The outputs of a cell that ran on a GPU, as a notebook stores them; [] if it showed nothing"
    import torch
    if not printed and value is None: return []
    record = f"{torch.cuda.get_device_name()}, {datetime.date.today()}\n{printed}"
    outputs = [{"name": "stdout", "output_type": "stream", "text": record.splitlines(keepends=True)}]
    if value is None: return outputs
    data = {"text/plain": repr(value).splitlines(keepends=True)}
    if hasattr(value, "_repr_html_"): data["text/html"] = value._repr_html_().splitlines(keepends=True)
    return outputs + [{"data": data, "execution_count": None, "metadata": {}, "output_type": "execute_result"}]


class Both(io.StringIO):
    "What is printed is shown and kept"
    def write(self, text):
        sys.__stdout__.write(text)
        return super().write(text)


def run(path, record=False):
    "True if every cell ran, or was left out for a sample that cannot be fetched here"
    import torch
    start, ran, left_out, own = time.time(), 0, [], sys.modules["__main__"]
    notebook = json.loads(path.read_text(encoding="utf-8"))
    # what cells define is found where pickle looks for it
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    module.display = print
    try:
        for n, cell in enumerate(notebook["cells"]):
            source, name = "".join(cell["source"]), f"{path.name}[{n}]"
            if cell["cell_type"] != "code" or re.search(r"^#\|\s*(notest|slow|eval:\s*false)\b", source, re.M): continue
            cuda = re.search(r"^#\|\s*cuda\b", source, re.M)
            if cuda and not torch.cuda.is_available(): continue
            if cuda: print(f"--- {name}", flush=True)
            with contextlib.redirect_stdout(Both()) as printed: value, error = run_cell(source, name, module.__dict__)
            if error is None:
                ran += bool(cuda)
                if cuda: cell["outputs"] = outputs_of(printed.getvalue(), value)
            elif "could not fetch" in str(error) or left_out and isinstance(error, NameError):
                left_out.append(f"{n} (cuda)" if cuda else str(n))
            else:
                print(f"FAILED {name}\n{source}\n{''.join(traceback.format_exception(error))}", flush=True)
                return False
    finally: sys.modules["__main__"] = own
    stored = json.dumps(notebook, indent=1, sort_keys=True, ensure_ascii=False) + "\n"
    if record: path.write_text(stored, encoding="utf-8")
    print(f"ok {path.name}: {ran} cuda cells, {time.time() - start:.0f} s", flush=True)
    if left_out: print(f"left out for a sample that cannot be fetched here: cells {', '.join(left_out)}", flush=True)
    return True


def main(args):
    import torch
    if args[:1] == ["--one"]:
        sys.path.insert(0, str(ROOT))
        return int(not run(Path(args[-1]), "--record" in args))
    if "--all" not in args and not torch.cuda.is_available():
        print("no GPU: nothing to run")
        return 1
    paths = [Path(a) for a in args if not a.startswith("--")]
    if "--all" not in args: paths = [p for p in paths if re.search(r'"#\| *cuda', p.read_text(encoding="utf-8"))]
    # a process each: no state leaks
    one = [sys.executable, __file__, "--one", *(["--record"] if "--record" in args else [])]
    results = [subprocess.run([*one, str(p)]).returncode == 0 for p in paths]
    print(f"{sum(results)} passed, {len(results) - sum(results)} failed")
    return int(not all(results))


if __name__ == "__main__": sys.exit(main(sys.argv[1:]))

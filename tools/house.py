"""The house rules that neither ruff nor import-linter can see: where a notebook's module lies, what a module may
import when it is imported,
what crosses a chapter's wall, what a cell may hold.

usage: house.py [PROJECT]   prints one line a broken rule, exits 1 if there is any

ruff's PLC2701 does not hold the rule on private names: it passes over relative imports, which nbdev writes, and in a
notebook it takes the room's own
chapter for a stranger.
"""
import ast, json, re, sys
from pathlib import Path

LIGHT = {"torch", "transformers", "safetensors", "numpy", "pandas", "tqdm", "fastcore", "bmlab"} | set(
    sys.stdlib_module_names
)
LEAVES = {  # nothing imports these before it needs them
    "all",
    "app.beside",
    "app.editor",
    "app.heads",
    "app.limits",
    "app.panels",
    "app.picker",
    "app.picker_page",
    "app.serve",
    "app.widget",
    "data.copies",
    "data.corpus",
    "data.recipes",
    "data.steps",
    "kernels.triton_adamw",
    "kernels.triton_attention",
    "kernels.triton_cast",
    "kernels.triton_common",
    "kernels.triton_experts",
    "kernels.triton_ggml",
    "kernels.triton_low_bits",
    "kernels.triton_groups",
    "kernels.triton_products",
}


def code_cells(path):
    for n, cell in enumerate(json.loads(path.read_text(encoding="utf-8"))["cells"]):
        if cell["cell_type"] == "code": yield n, "".join(cell["source"])


def parse(source):
    lines = ["pass" if line.lstrip().startswith(("%", "!")) else line for line in source.split("\n")]
    return ast.parse("\n".join(lines))


def directive(source, name): return re.search(rf"^#\|\s*{name}\b", source, re.M)


def imported(node, package=()):
    "(dotted module, names taken from it) of one import statement; `package`: parts of the importing module's package"
    if isinstance(node, ast.Import): return [(a.name, []) for a in node.names]
    if not isinstance(node, ast.ImportFrom): return []
    base = [*package[:len(package) - node.level + 1]] if node.level else []
    return [(".".join([*base, *filter(None, [node.module])]), [a.name for a in node.names])]


def at_import_time(tree):
    "Nodes that run when the module is imported: everything outside functions"
    todo = list(tree.body)
    while todo:
        node = todo.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)): continue
        yield node
        todo += ast.iter_child_nodes(node)


def place_of(path, nbs):
    "The module that the place of a notebook names: 30_delta/01_lora.ipynb → delta.lora"
    return ".".join(part.partition("_")[2] for part in path.relative_to(nbs).with_suffix("").parts)


def in_notebooks(root):
    "What breaks a rule in the notebooks; the modules they export are added to `home`"
    nbs, home = root / "nbs", {}
    paths = sorted(p for p in nbs.rglob("[0-9]*.ipynb") if ".ipynb_checkpoints" not in p.parts)
    found = [] if paths else ["no numbered notebook under nbs/"]
    for path in paths:
        cells, place = list(code_cells(path)), place_of(path, nbs)
        name = next((m[1] for _, s in cells if (m := re.search(r"^#\|\s*default_exp\s+(\S+)", s, re.M))), None)
        door = path.with_suffix("").is_dir()
        should = f"{place}.__init__" if door else place
        if name is None: found.append(f"{path.name}: no default_exp")
        elif name != should: found.append(f"{path.name}: exports {name}, and lies where {should} does")
        if name: home[name] = path.name
        for n, source in cells:
            where, tree = f"{path.name} cell {n}", parse(source)
            front = door and "default_exp" in source                   # imports, and the list of their names
            if not front and len({isinstance(node, (ast.Import, ast.ImportFrom)) for node in tree.body}) == 2:
                found.append(f"{where}: mixes imports with code")
            if directive(source, "hide") and re.search(r"^\s*(test_\w+\(|assert )", source, re.M):
                found.append(f"{where}: a hidden test")
    return found, home


def in_modules(root, home):
    "What breaks a rule in the exported modules"
    for path in sorted((root / "bmlab").rglob("*.py")):
        parts = ("bmlab", *path.relative_to(root / "bmlab").with_suffix("").parts)
        name, where = ".".join(parts[1:]), path.relative_to(root / "bmlab").as_posix()
        if name in ("__init__", "_modidx"): continue
        if name not in home: yield f"{where}: no notebook exports it"
        tree = ast.parse(path.read_text(encoding="utf-8"))
        early = {id(node) for node in at_import_time(tree)}
        for node in ast.walk(tree):
            for module, names in imported(node, parts[:-1]):
                there = module.split(".")
                if there[0] == "bmlab" and there[1:2] != [parts[1]]:
                    for x in names:
                        if x.startswith("_") and not x.startswith("__"):
                            yield f"{where}:{node.lineno}: takes the private {x} of {module}"
                if id(node) not in early or name in LEAVES: continue
                reached = (
                    {".".join(there[1:]), *(".".join([*there[1:], x]) for x in names)} if there[0] == "bmlab" else set()
                )
                if there[0] not in LIGHT or reached & LEAVES:
                    yield f"{where}:{node.lineno}: imports {module} when it is imported"


def problems(root):
    root = Path(root)
    found, home = in_notebooks(root)
    yield from found
    yield from in_modules(root, home)


if __name__ == "__main__":
    rows = list(problems(sys.argv[1] if len(sys.argv) > 1 else "."))
    print("\n".join(rows))
    sys.exit(bool(rows))

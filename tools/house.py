"""The house rules: which way imports point, what a module may import when it is imported, what a cell may hold.

usage: house.py [PROJECT]   prints one line a broken rule, exits 1 if there is any
"""
import ast, json, re, sys
from pathlib import Path

LIGHT = {"torch", "transformers", "safetensors", "numpy", "pandas", "tqdm", "bmlab"} | set(sys.stdlib_module_names)
LEAVES = {"picker", "panels", "serve", "corpus", "triton_kernels", "all"}   # nothing imports these before it needs them
LONGEST_EXPORT = 60


def code_cells(path):
    for n, cell in enumerate(json.loads(path.read_text(encoding="utf-8"))["cells"]):
        if cell["cell_type"] == "code": yield n, "".join(cell["source"])


def parse(source):
    lines = ["pass" if line.lstrip().startswith(("%", "!")) else line for line in source.split("\n")]
    return ast.parse("\n".join(lines))


def directive(source, name): return re.search(rf"^#\|\s*{name}\b", source, re.M)


def imported(node):
    "Dotted names that one import statement reaches"
    if isinstance(node, ast.Import): return [a.name for a in node.names]
    if not isinstance(node, ast.ImportFrom): return []
    base = (("bmlab." + (node.module or "")).rstrip(".") if node.level else node.module) or ""
    return [base] + ([f"{base}.{a.name}" for a in node.names] if base == "bmlab" else [])


def at_import_time(tree):
    "Nodes that run when the module is imported: everything outside functions"
    todo = list(tree.body)
    while todo:
        node = todo.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)): continue
        yield node
        todo += ast.iter_child_nodes(node)


def problems(root):
    root, home = Path(root), {}
    notebooks = [(p, list(code_cells(p))) for p in sorted((root / "nbs").glob("[0-9]*.ipynb"))]
    if not notebooks: yield "no numbered notebook under nbs/"
    for path, cells in notebooks:
        name = next((m[1] for _, s in cells if (m := re.search(r"^#\|\s*default_exp\s+(\S+)", s, re.M))), None)
        if name is None: yield f"{path.name}: no default_exp"
        else: home[name] = path.name
    for path, cells in notebooks:
        for n, source in cells:
            where, tree = f"{path.name} cell {n}", parse(source)
            exported = directive(source, "exports?i?")
            for name in [x for node in ast.walk(tree) for x in imported(node)] if exported else []:
                module = name.split(".")[1] if name.startswith("bmlab.") else ""
                if home.get(module, "") > path.name: yield f"{where}: imports upward, {module} of {home[module]}"
            kinds = {isinstance(node, (ast.Import, ast.ImportFrom)) for node in tree.body}
            if len(kinds) == 2: yield f"{where}: mixes imports with code"
            if exported and source.count("\n") >= LONGEST_EXPORT: yield f"{where}: {source.count(chr(10)) + 1} exported lines, at most {LONGEST_EXPORT}"
            if directive(source, "hide") and re.search(r"^\s*(test_\w+\(|assert )", source, re.M): yield f"{where}: a hidden test"
    for path in sorted((root / "bmlab").glob("**/*.py")):
        name = path.stem
        if name in ("__init__", "_modidx"): continue
        if name not in home: yield f"{path.name}: no notebook exports it"
        if name in LEAVES: continue
        for node in at_import_time(ast.parse(path.read_text(encoding="utf-8"))):
            for x in imported(node):
                if x.split(".")[0] not in LIGHT or x.startswith("bmlab.") and x.split(".")[1] in LEAVES: yield f"{path.name}:{node.lineno}: imports {x} when it is imported"


if __name__ == "__main__":
    rows = list(problems(sys.argv[1] if len(sys.argv) > 1 else "."))
    print("\n".join(rows))
    sys.exit(bool(rows))

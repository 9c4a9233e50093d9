"""What Sphinx reads, made from the repository: notebooks made tidy, a page for each module, links that lead to pages.

Nothing is imported and nothing is run: outputs are as stored, and signatures come from the syntax tree.
"""
import ast, copy, io, json, os, re, tokenize
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

PICTURES = (".png", ".svg", ".jpg", ".gif", ".webp")
SPECIAL = {
    "README.md": "overview",
    "nbs/index.ipynb": "overview",
    "docs/index.md": "index",
    "nbs": "rooms",
    "bmlab": "api/index",
}


# ---- links -------------------------------------------------------------------------------------------------------
def page_of(path):
    "The page (without suffix) that shows the file or folder `path` of the repository"
    name = path.as_posix()
    if name in SPECIAL: return SPECIAL[name]
    if path.suffix in (".md", ".ipynb") and path.parts[0] in (
        "nbs",
        "tutorials",
        "docs",
        "benchmarks",
        "CONTRIBUTING.md",
        "SECURITY.md",
    ):
        return name.rsplit(".", 1)[0]
    if path.parts[0] == "bmlab" and path.suffix == ".py" and not path.stem.startswith("_"):
        return f"api/{module_of(path)}"
    return f"files/{name}"


def module_of(path):
    "The dotted name, without bmlab, of a module's file in the repository"
    return ".".join(path.with_suffix("").parts[1:])


def modules():
    "Files of the library's modules, those of the ground first"
    return sorted((p for p in (ROOT / "bmlab").rglob("[!_]*.py")), key=lambda p: (p.parent != ROOT / "bmlab", p))


LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")


def relink(text, source, page, known):
    "`text` of the file `source`, its local links leading from `page` to pages; ValueError for one that leads nowhere"
    spans, dead = [], []
    def keep(m):
        spans.append(m[0])
        return f"\0{len(spans) - 1}\0"
    def one(m):
        image, label, target = m.groups()
        path, _, fragment = target.partition("#")
        if not path or re.match(r"[a-z][a-z+.-]*:", path): return m[0]
        there = Path(os.path.normpath(source.parent / path))
        if not (ROOT / there).exists():
            dead.append(f"{source}: the link to {target!r} leads nowhere; there is no {there}")
            return label
        if there.suffix in PICTURES:                               # pictures travel, at their own path
            known(there, there.as_posix())
            return f"{image}[{label}]({os.path.relpath(there, Path(page).parent)})"
        goal = page_of(there)
        if known(there, goal) is False: return label
        kind = "ipynb" if there.suffix == ".ipynb" and there.as_posix() not in SPECIAL else "md"
        place = f"#{fragment}" if fragment else ""
        return f"[{label}]({os.path.relpath(goal, Path(page).parent)}.{kind}{place})"
    fenced = re.sub(r"^ {0,3}(`{3,}|~{3,}).*?^ {0,3}\1[`~]*[ \t]*$", keep, text, flags=re.M | re.S)
    fenced = LINK.sub(one, fenced)                                 # a label may hold code spans
    if dead: raise ValueError("\n".join(dead))
    return re.sub("\0(\\d+)\0", lambda m: spans[int(m[1])], fenced)


def linkname(text, names):
    "Prose in which a public name that stands as code leads to its page; headings, links and fences stay"
    def span(m):
        name = re.match(r"`(\w+)(\(.*\))?`$", m[0])
        if not name or name[1] not in names: return m[0]
        # `rank`, `table`: as often an argument as a function
        if not name[2] and name[1].islower() and "_" not in name[1]: return m[0]
        return f"{{py:obj}}`{m[0][1:-1].replace('<', chr(92) + '<')} <{names[name[1]]}>`"
    kept = []
    def keep(m):
        kept.append(m[0])
        return f"\0{len(kept) - 1}\0"
    text = re.sub(
        r"^ {0,3}(`{3,}|~{3,}).*?^ {0,3}\1[`~]*[ \t]*$|^(?: "
        r"{4}|\t).*$|^#.*$|!?\[(?:[^\[\]]|\[[^\]]*\])*\]\([^)]*\)|``.+?``|<[^>\n]+>",
        keep,
        text,
        flags=re.M | re.S,
    )
    text = re.sub(r"(?<!`)`[^`\n]+`(?!`)", span, text)
    while "\0" in text: text = re.sub("\0(\\d+)\0", lambda m: kept[int(m[1])], text)
    return text


# ---- notebooks ---------------------------------------------------------------------------------------------------
def split_directives(source):
    "(names of the `#|` lines, the source without them)"
    found = re.findall(r"^#\|\s*(\w+)(?::?[ \t]*(.*))?$", source, re.M)
    code = re.sub(r"^#\|.*\n?", "", source, flags=re.M).strip("\n")
    return dict(found), code


def imports_only(code):
    "Does a cell import and do nothing else?"
    try: body = ast.parse(code).body
    except SyntaxError: return False                               # (a line of IPython's)
    return all(isinstance(node, (ast.Import, ast.ImportFrom)) for node in body)


def tidy(nb, change=lambda text: text):
    """A notebook for the reader: no directives, set-up folded away, exported and GPU cells marked; prose through
    `change`"""
    cells = []
    for i, cell in enumerate(nb["cells"]):
        source = "".join(cell["source"])
        if cell["cell_type"] != "code":
            cells.append(dict(cell_type="markdown", id=cell.get("id", f"c{i}"), metadata={}, source=change(source)))
            continue
        marks, code = split_directives(source)
        if not code or "default_exp" in marks and not code.strip(): continue
        tags = [
            tag
            for mark, tag in (("export", "exported"), ("exporti", "exported"), ("cuda", "cuda"), ("slow", "slow"))
            if mark in marks
        ]
        if "hide" in marks or imports_only(code): tags.append("hide-cell")
        if marks.get("echo", "").strip() == "false": tags.append("remove-input")
        if "exported" in tags:
            cells.append(
                dict(
                    cell_type="markdown",
                    id=f"at-{cell['id']}",
                    metadata={},
                    source=f'<div id="cell-{cell["id"]}"></div>',
                )
            )
        outputs = [
            dict(o, data={k: v for k, v in o["data"].items() if "widget" not in k}) if "data" in o else o
            for o in cell.get("outputs", [])
        ]
        cells.append(
            dict(
                cell_type="code",
                id=cell.get("id", f"c{i}"),
                metadata=dict(tags=tags),
                execution_count=cell.get("execution_count"),
                source=code,
                outputs=outputs,
            )
        )
    meta = dict(
        kernelspec=dict(name="python3", display_name="python3", language="python"),
        language_info=dict(name="python", pygments_lexer="ipython3"),
    )
    return dict(nbformat=4, nbformat_minor=5, metadata=meta, cells=cells)


def exports(nb):
    "The module that a notebook exports, or None"
    return next(
        (m[1] for c in nb["cells"] if (m := re.search(r"^#\|\s*default_exp\s+(\S+)", "".join(c["source"]), re.M))), None
    )


def title_of(nb):
    "(title, subtitle) of a notebook, from its first cell"
    lines = "".join(nb["cells"][0]["source"]).split("\n")
    return lines[0].lstrip("# ").strip(), next((line[1:].strip() for line in lines if line.startswith(">")), "")


# ---- modules -----------------------------------------------------------------------------------------------------
def _comments(code):
    "{line: comment}, and the lines that hold nothing else"
    found, alone = {}, set()
    for t in tokenize.generate_tokens(io.StringIO(code).readline):
        if t.type == tokenize.COMMENT:
            found[t.start[0]] = t.string.lstrip("# ").strip()
            if not t.line[:t.start[1]].strip(): alone.add(t.start[0])
    return found, alone


def _remark(line, last, comments):
    "The comment at the end of `line`, going on in lines that hold only a comment, up to `last`"
    found, alone = comments
    words = [found[line]] if line in found else []
    while words and (line := line + 1) in alone and line < last: words.append(found[line])
    return " ".join(words)


def parameters(node, comments):
    "Rows (name, type, default, remark) of a function's parameters, and (type, remark) of what it returns"
    a, rows = node.args, []
    plain = a.posonlyargs + a.args
    pairs = (
        list(zip(plain, [None] * (len(plain) - len(a.defaults)) + a.defaults))
        + ([(a.vararg, None)] if a.vararg else [])
        + list(zip(a.kwonlyargs, a.kw_defaults))
        + ([(a.kwarg, None)] if a.kwarg else [])
    )
    end = node.body[0].lineno
    # a remark belongs to a parameter if it is the only one on its line
    alone = {}
    for arg, default in pairs:
        line = (default or arg).end_lineno
        alone.setdefault(line, []).append(arg.arg)
    for arg, default in pairs:
        if arg.arg in ("self", "cls"): continue
        line = (default or arg).end_lineno
        stars = "*" if arg is a.vararg else "**" if arg is a.kwarg else ""
        single = [n for n in alone[line] if n not in ("self", "cls")] == [arg.arg] and not (
            node.returns and node.returns.lineno == line
        )
        rows.append(
            (
                stars + arg.arg,
                ast.unparse(arg.annotation) if arg.annotation else "",
                ast.unparse(default) if default is not None else "",
                _remark(line, end, comments) if single else "",
            )
        )
    back = (ast.unparse(node.returns), _remark(node.returns.end_lineno, end, comments)) if node.returns else ("", "")
    return rows, back


def signature(node):
    "The arguments of a function as they are written, without types"
    args = ast.parse(f"def f({ast.unparse(node.args)}): pass").body[0].args
    for arg in ast.walk(args):
        if isinstance(arg, ast.arg): arg.annotation = None
    drop = [x for x in (args.posonlyargs or args.args)[:1] if x.arg in ("self", "cls")]
    for x in drop: (args.posonlyargs or args.args).remove(x)
    return f"({ast.unparse(args)})"


def escape(text):
    "Text with nothing that Markdown would read as a mark; code spans stay"
    return "".join(
        p if p.startswith("`") else re.sub(r"([\\*_\[\]<>|$~{}#])", r"\\\1", p) for p in re.split(r"(`[^`]+`)", text)
    ).replace("\n", " ")


def _code(text): return f"`` {text} ``".replace("|", "\\|") if text else ""


def _table(rows, head=("parameter", "type", "default", "what it is")):
    if not rows: return []
    used = [i for i in range(4) if i == 0 or any(r[i] for r in rows)]
    line = lambda cells: "| " + " | ".join(cells[i] for i in used) + " |"
    return [
        line(head),
        "|" + "---|" * len(used),
        *(line((_code(n), _code(t), _code(d), escape(w))) for n, t, d, w in rows),
        "",
    ]


def _function(node, comments, kind, prefix=""):
    "Directive lines of one function or method"
    rows, back = parameters(node, comments)
    marks = {ast.unparse(d).split(".")[-1] for d in node.decorator_list}
    if "property" in marks or "cached_property" in marks: head, rows = f"{{py:property}} {prefix}{node.name}", []
    else:
        kind = next((k for k in ("classmethod", "staticmethod") if k in marks), kind)
        head = f"{{py:{kind}}} {prefix}{node.name}{signature(node)}"
    doc = ast.get_docstring(node) or ""
    returns = (
        [f"Returns {_code(back[0]) if back[0] else ''}{': ' + escape(back[1]) if back[1] else ''}", ""]
        if back[0] not in ("", "None")
        else []
    )
    return head, [escape(doc), "", *_table(rows), *returns]


def _bases(node, classes):
    "A class and those of its private bases that stand in the same file, nearest first"
    seen = [node]
    for base in node.bases:
        if isinstance(base, ast.Name) and base.id.startswith("_") and base.id in classes:
            seen += [c for c in _bases(classes[base.id], classes) if c not in seen]
    return seen


def patched(node):
    "The class that a function is put into by fastcore's `@patch`, or None"
    marks = [d.func if isinstance(d, ast.Call) else d for d in node.decorator_list]
    if not any(getattr(d, "id", None) == "patch" for d in marks): return None
    return ast.unparse(node.args.args[0].annotation).strip("'\"")


def plain(node):
    "A patched function as the method that it becomes"
    calls = [d for d in node.decorator_list if isinstance(d, ast.Call) and getattr(d.func, "id", None) == "patch"]
    marks = {"as_prop": "property", "cls_method": "classmethod"}
    found = [ast.Name(marks[k.arg]) for d in calls for k in d.keywords if k.arg in marks]
    method = copy.copy(node)
    method.args = copy.deepcopy(node.args)
    method.args.args[0].arg = "self"
    others = [d for d in node.decorator_list if "patch" not in ast.unparse(d)]
    method.decorator_list = [*others, *found]
    return method


def _class(node, classes, comments, patches=()):
    "Directive lines of one class: what makes it, its fields, its methods, those among them that were patched in"
    family, init, fields, methods = _bases(node, classes), None, [], {}
    for c in family:
        for n in c.body:
            if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef)):
                if n.name == "__init__": init = init or n
                elif not n.name.startswith("_") or n.name == "__call__": methods.setdefault(n.name, n)
            elif isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name) and not n.target.id.startswith("_"):
                if n.target.id not in [f[0] for f in fields]:
                    fields.append(
                        (
                            n.target.id,
                            ast.unparse(n.annotation),
                            ast.unparse(n.value) if n.value else "",
                            _remark(n.end_lineno, n.end_lineno + 2, comments),
                        )
                    )
    for n in patches:
        if n.name == "__init__": init = init or n
        elif not n.name.startswith("_") or n.name == "__call__": methods[n.name] = n
    data = any("dataclass" in ast.unparse(d) for d in node.decorator_list) or any(
        "NamedTuple" in ast.unparse(b) for b in node.bases
    )
    args = (
        signature(init)
        if init
        else "("
        + ", ".join(f[0] + (f"={f[2]}" if f[2] and "field(" not in f[2] else "=…" if f[2] else "") for f in fields)
        + ")"
        if data
        else ""
    )
    shown = [ast.unparse(b) for b in node.bases if not ast.unparse(b).startswith("_")]
    body = [
        escape(ast.get_docstring(node) or ""),
        "",
        *([f"A kind of {', '.join(_code(b) for b in shown)}.", ""] if shown else []),
    ]
    body += (
        _table(parameters(init, comments)[0]) if init else _table(fields, ("field", "type", "default", "what it is"))
    )
    for name, n in methods.items():
        # it says no more than the base does
        if not ast.get_docstring(n) and not any(r[3] for r in parameters(n, comments)[0]): continue
        head, lines = _function(n, comments, "method")
        body += [f":::{head}", *lines, ":::", ""]
    return f"{{py:class}} {node.name}{args}", body


def api(code, name, notebook):
    "The page of module `name`, from its source: (Markdown, public names)"
    tree, comments = ast.parse(code), _comments(code)
    named = next(
        (n.value for n in tree.body if isinstance(n, ast.Assign) and getattr(n.targets[0], "id", "") == "__all__"), None
    )
    public = [e.value for e in named.elts if isinstance(e, ast.Constant)] if isinstance(named, ast.List) else []
    nodes, data, patches = {}, {}, {}
    def walk(body):
        for n in body:
            if isinstance(n, ast.FunctionDef) and (cls := patched(n)): patches.setdefault(cls, []).append(plain(n))
            elif isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)): nodes[n.name] = n
            elif isinstance(n, ast.Assign):
                for t in n.targets: data.setdefault(getattr(t, "id", None), n)
            elif isinstance(n, ast.AnnAssign): data.setdefault(getattr(n.target, "id", None), n)
            elif isinstance(n, (ast.If, ast.Try)):
                walk(n.body)
                walk(n.orelse)
    walk(tree.body)
    classes = {k: n for k, n in nodes.items() if isinstance(n, ast.ClassDef)}
    places = {
        int(i): m for i, m in enumerate((re.match(r"# %% \S+ #(\w+)", line) for line in code.split("\n")), 1) if m
    }
    def where(n):
        cell = max((i for i in places if i < n.lineno), default=None)
        return (
            f'<a class="made-in" href="../{notebook}.html#cell-{places[cell][1]}">where it is made</a>'
            if cell and notebook
            else ""
        )
    text = [
        f"# bmlab.{name}",
        "",
        f"> {escape(ast.get_docstring(tree) or '')}",
        "",
        f"```{{py:module}} bmlab.{name}\n```",
        "",
    ]
    if notebook: text += [f"Exported from [{notebook}](../{notebook}.ipynb), which shows every part at work.", ""]
    for p in public:
        if (n := nodes.get(p)) is None:
            value = ast.unparse(data[p].value) if p in data and data[p].value is not None else ""
            short = value if len(value) <= 200 else value[:200] + " …"
            text += [
                f"::::{{py:data}} {p}",
                *([f"    {short}"] if short else []),
                "",
                where(data[p]) if p in data else "",
                "::::",
                "",
            ]
            continue
        if isinstance(n, ast.ClassDef): head, lines = _class(n, classes, comments, patches.get(p, ()))
        else: head, lines = _function(n, comments, "function")
        text += [f"::::{head}", *lines, where(n), "::::", ""]
    for cls in sorted(patches.keys() - classes.keys()):            # methods for the class of another room
        told = [n for n in patches[cls] if not n.name.startswith("_")]
        if told: text += [f"## What {cls} gains here", ""]
        for n in told:
            head, lines = _function(n, comments, "method", f"{cls}.")
            text += [f"::::{head}", *lines, where(n), "::::", ""]
    return "\n".join(text), public


# ---- everything --------------------------------------------------------------------------------------------------
def _file_page(path):
    "A page for a linked file or folder that is no page of its own"
    full = ROOT / path
    if full.is_dir():
        inside = sorted(p for p in full.iterdir() if not p.name.startswith((".", "__")))
        body = "\n".join(f"- [{p.name}{'/' if p.is_dir() else ''}]({os.path.relpath(p, full.parent)})" for p in inside)
        return f"---\norphan: true\n---\n# {path}/\n\n" + body + "\n", True
    kind = {".py": "python", ".sh": "bash", ".sbatch": "bash", ".yaml": "yaml", ".yml": "yaml", ".json": "json"}.get(
        path.suffix, "text"
    )
    body = full.read_text(encoding="utf-8", errors="replace")
    fence = "`" * max(4, 1 + max((len(m) for m in re.findall("`+", body)), default=0))
    return f"---\norphan: true\n---\n# {path}\n\n{fence}{kind}\n{body.rstrip()}\n{fence}\n", False


def notebooks():
    "All notebooks of the library as a reader goes through them: a chapter's door, then its rooms"
    found = (p for p in (ROOT / "nbs").rglob("[0-9]*.ipynb") if ".ipynb_checkpoints" not in p.parts)
    return sorted(found, key=lambda p: p.relative_to(ROOT / "nbs").with_suffix("").parts)


def chapters():
    "(door, its rooms) in the order of their numbers; a notebook without a folder beside it has no rooms"
    for door in sorted((ROOT / "nbs").glob("[0-9]*.ipynb")):
        yield door, sorted(door.with_suffix("").glob("[0-9]*.ipynb"))


def stage(out, only="*"):
    """Fill the folder `out` with what Sphinx reads; `only`, a glob of pages, for a small part. Returns the pages;
    ValueError names the dead links."""
    out, texts = Path(out), {}
    wanted = lambda page: any(fnmatch(page, o) for o in ([only] if isinstance(only, str) else only))
    books = {
        p: json.loads(p.read_text(encoding="utf-8"))
        for p in [*notebooks(), *sorted((ROOT / "tutorials").glob("[0-9]*.ipynb"))]
    }
    rel = {p: p.relative_to(ROOT) for p in books}
    made = {m: page_of(rel[p]) for p, nb in books.items() if (m := exports(nb)) and wanted(page_of(rel[p]))}
    pages, public = {}, {}
    for f in modules():
        name = module_of(f.relative_to(ROOT))
        if wanted(f"api/{name}"):
            pages[f"api/{name}"], public[name] = api(f.read_text(encoding="utf-8"), name, made.get(name))
    first = {}
    for module, names in public.items():
        for n in names: first.setdefault(n, []).append(f"bmlab.{module}.{n}")
    unique = {n: where[0] for n, where in first.items() if len(where) == 1}
    queue, seen = [], set()
    def known(path, page):
        if path.suffix in PICTURES:
            texts[page] = (ROOT / path).read_bytes()
            return True
        if page.startswith("files/"):
            if path not in seen:
                seen.add(path)
                queue.append(path)
            return True
        return wanted(page)
    dead = []
    def prose(source, page, names):
        def change(text):
            try: return linkname(relink(text, source, page, known), names)
            except ValueError as e:
                dead.append(str(e))
                return text
        return change
    for p, nb in books.items():
        if not wanted(page := page_of(rel[p])): continue
        own = {n: f"bmlab.{m}.{n}" for n in public.get(m, [])} if (m := exports(nb)) else {}
        made_tidy = tidy(nb, prose(rel[p], page, {**unique, **own}))
        if rooms := [
            r
            for r in sorted(p.with_suffix("").glob("[0-9]*.ipynb"))
            if rel[p].parts[0] == "nbs" and wanted(page_of(rel[r]))
        ]:
            made_tidy["cells"].append(
                dict(
                    cell_type="markdown",
                    id="rooms",
                    metadata={},
                    source=_rooms_of(rel[p], [(rel[r], books[r]) for r in rooms], pages),
                )
            )
        texts[f"{page}.ipynb"] = json.dumps(made_tidy, ensure_ascii=False, indent=1)
    guides = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "benchmarks/RESULTS.md")]
    for f in [*guides, *sorted((ROOT / "docs").glob("*.md"))]:
        if wanted(page := page_of(r := f.relative_to(ROOT))):
            text = f.read_text(encoding="utf-8")
            if page == "index": text = text.replace("<!-- picture -->", _picture()).replace("<!-- doors -->", _doors())
            texts[f"{page}.md"] = prose(r, page, unique if page != "overview" else {})(text)
    if "overview.md" in texts:
        texts["overview.md"] = (
            texts["overview.md"]
            .replace("# bmlab\n", "# Overview\n", 1)
        )
    for page, text in pages.items(): texts[f"{page}.md"] = text
    for key, text in _contents(books, rel, pages, wanted).items():
        if wanted(key): texts[f"{key}.md"] = text
    if "index.md" in texts: texts["index.md"] = _only_there(texts["index.md"], [t.rsplit(".", 1)[0] for t in texts])
    while queue:
        path = queue.pop()
        page = f"files/{path.as_posix()}"
        text, folder = _file_page(path)
        texts[f"{page}.md"] = relink(text, path, page, known) if folder else text
    if dead: raise ValueError("\n".join(dead))
    _write(out, texts)
    return sorted(t for t in texts if not t.endswith(PICTURES))


def _only_there(text, pages):
    "A page whose tables of contents name only pages that there are"
    there = lambda line: not line.strip() or line.startswith((":", "`")) or any(fnmatch(p, line) for p in pages)
    return re.sub(
        r"^```\{toctree\}.*?^```$",
        lambda m: "\n".join(line for line in m[0].split("\n") if there(line)),
        text,
        flags=re.M | re.S,
    )


def _picture():
    "The tree that README opens with, as it is stored in the index"
    nb = json.loads((ROOT / "nbs/index.ipynb").read_text(encoding="utf-8"))
    cell = next(c for c in nb["cells"] if c.get("outputs"))
    shown = "".join(cell["outputs"][0]["data"]["text/plain"]).rstrip()
    return f"```python\n{''.join(cell['source'])}\n```\n\n```\n{shown}\n```"


def _doors():
    "A table of the chapters"
    lines = ["| chapter | what is behind its door |", "|---|---|"]
    for door, rooms in chapters():
        title, subtitle = title_of(json.loads(door.read_text(encoding="utf-8")))
        lines.append(f"| [{title}](../{door.relative_to(ROOT).as_posix()}) | {escape(subtitle)} |")
    return "\n".join(lines)


def _rooms_of(door, rooms, pages):
    "The end of a door's page: a table of its rooms"
    lines = ["## The rooms", "", "| room | what it is for | reference |", "|---|---|---|"]
    here = Path(page_of(door)).parent
    for path, nb in rooms:
        title, subtitle = title_of(nb)
        module = exports(nb)
        api = f"[api]({os.path.relpath(f'api/{module}', here)}.md)" if f"api/{module}" in pages else ""
        lines.append(f"| [{title}]({os.path.relpath(page_of(path), here)}.ipynb) | {escape(subtitle)} | {api} |")
    return "\n".join(
        [
            *lines,
            "",
            "```{toctree}",
            ":hidden:",
            *(os.path.relpath(page_of(path), here) for path, _ in rooms),
            "```",
            "",
        ]
    )


def _contents(books, rel, pages, wanted):
    "The pages that list others: the chapters, the modules"
    rooms, doors = {}, [(page_of(rel[d]), *title_of(books[d])) for d, _ in chapters() if wanted(page_of(rel[d]))]
    rooms["rooms"] = "\n".join(
        [
            "# The chapters",
            "",
            "Every technique is a notebook: one idea after the other, each with the code that the library exports, an "
            "example and a test. Cells with a bar",
            "and the word *exported* are the library. A chapter has a door, which shows what it is for, and rooms "
            "behind it; its number is its floor: it stands only on chapters with a smaller one.",
            "",
            *(f"- [{title}]({page}.ipynb) — {what}" for page, title, what in doors),
            "",
            "```{toctree}",
            ":hidden:",
            *(page for page, *_ in doors),
            "```",
            "",
        ]
    )
    said = lambda name: escape(
        ast.get_docstring(ast.parse((ROOT / "bmlab" / (name.replace(".", "/") + ".py")).read_text(encoding="utf-8")))
        or ""
    )
    rows = [f"| [bmlab.{p[4:]}]({p[4:]}.md) | {said(p[4:])} |" for p in pages]
    rooms["api/index"] = "\n".join(
        [
            "# Reference",
            "",
            "Every public function and class, by module: what it takes, with shapes and units, and what it gives.",
            "",
            "| module | what it is for |",
            "|---|---|",
            *rows,
            "",
            "```{toctree}",
            ":hidden:",
            *(f"{p[4:]} <{p[4:]}>" for p in pages),
            "```",
            "",
        ]
    )
    return rooms


def _write(out, texts):
    "Write what changed, so that Sphinx reads only that again; remove what is no longer there"
    for name, text in texts.items():
        f, data = out / name, text if isinstance(text, bytes) else text.encode()
        f.parent.mkdir(parents=True, exist_ok=True)
        if not f.exists() or f.read_bytes() != data: f.write_bytes(data)
    for f in out.rglob("*"):
        if f.is_file() and f.relative_to(out).as_posix() not in texts: f.unlink()

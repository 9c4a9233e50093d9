"""Runs what `make check` and `make test` run, part after part, and says at the end what each took, what was left out
and what failed.

usage: suite.py [--slowest N] PART…      PART: lines, quick, tests (quick and long ones), notebooks, tutorials

Both cores work in every part. All parts run even if one fails; the last line of a failed run names what failed. Where
no more than three files of a part fail, they run once more when all parts are done, with nothing beside them: what
fails again has failed, what passes is named, for somebody to mend. A part's budget (minutes on two cores) is printed,
not enforced: whoever adds to a part that is over it makes room.
"""
import argparse, contextlib, functools, getpass, json, os, re, subprocess, sys, tempfile, time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
REPORTS = ROOT / ".setup/reports"
MINUTES = {"quick": 5, "tests": 17, "notebooks": 10.25, "tutorials": 12.75}      # the last three: 40 together


def workers(n): return ["-n", os.environ.get("WORKERS", str(n))]


# on two cores: many tests and cells wait for processes, threads and browsers
TESTS = [*workers(3), "--dist", "worksteal"]
NBVAL = [*workers(3), "--dist", "loadfile", "--no-loadscope-reorder", "--nbval", "-o", "faulthandler_timeout=1000"]
PYTEST = {
    "quick": ("tests", [*TESTS, "-m", "not cuda and not slow and not long"]),
    "tests": ("tests", [*TESTS, "-m", "not cuda and not slow"]),
    "notebooks": ("nbs", NBVAL),
    "tutorials": ("tutorials", NBVAL),
}
FEW = 3                                             # files that failed may have been unlucky; more are not


class Report:
    "What a run of pytest did: seconds of each test, what failed, why some were skipped"
    def __init__(self): self.seconds, self.failed, self.skipped, self.passed = {}, [], {}, 0

    def pytest_runtest_logreport(self, report):
        name = report.nodeid
        self.seconds[name] = self.seconds.get(name, 0) + report.duration
        if report.failed and name not in self.failed: self.failed.append(name)
        if report.passed and report.when == "call": self.passed += 1
        if report.skipped and not hasattr(report, "wasxfail"): self._skip(report.longrepr)

    def pytest_collectreport(self, report):
        if report.failed: self.failed.append(report.nodeid)
        if report.skipped: self._skip(report.longrepr)

    def _skip(self, reason):
        text = reason[2] if isinstance(reason, tuple) else str(reason)
        text = text.removeprefix("Skipped: ")
        self.skipped[text] = self.skipped.get(text, 0) + 1


def run_pytest(part, files):
    "In a process of its own: pytest on a part, or on some of its files; the report goes to a file"
    (folder, options), report = PYTEST[part], Report()
    alone = [*options, "-n", "1", "--dist", "loadfile", *files]
    name, args = (f"{part}-again", alone) if files else (part, [*options, folder])
    code = int(pytest.main(args, plugins=[report]))
    if code and not report.failed: report.failed.append(f"pytest itself (exit {code})")
    write(name, vars(report))
    sys.exit(code)


def write(part, found):
    REPORTS.mkdir(parents=True, exist_ok=True)
    (REPORTS / f"{part}.json").write_text(json.dumps(found, indent=1) + "\n")


def run_lines():
    "ruff, import-linter: the lines, and which way imports point"
    failed, tools = [], Path(sys.executable).parent
    for name, command in {
        "ruff": ["ruff", "check", "--quiet", "--output-format", "concise", "."],
        "lint-imports": ["lint-imports", "--no-cache"],
    }.items():
        done = subprocess.run([tools / command[0], *command[1:]], cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            failed.append(name)
            print((done.stdout + done.stderr).strip())
    write("lines", dict(failed=failed, passed=2 - len(failed), skipped={}, seconds={}))
    sys.exit(bool(failed))


@contextlib.contextmanager
def environment(parts):
    """What the processes of all parts have in their environment: a folder of servers that fork processes for all of
    them, of which the one that forks kernels is started here, and imports while other parts run; and a folder for
    temporary files, gigabytes of which tutorials leave behind"""
    # hundreds of processes import bmlab: compiled once, where a container says otherwise in half a second each
    env = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    # (what torch compiled is kept where other programs find it)
    try: user = re.sub(r'[\\/:*?"<>|]', "_", getpass.getuser())
    except (KeyError, OSError): user = f"uid_{os.getuid()}"         # (a container may have no name for its user)
    env.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/torchinductor_{user}")
    folder = functools.partial(tempfile.TemporaryDirectory, ignore_cleanup_errors=True)
    with folder() as env["BMLAB_SERVERS"], folder() as env["TMPDIR"]:
        if not {"notebooks", "tutorials"} & {*parts}:
            yield env
            return
        keeps = "import judge, sys; process = judge.forked('pass'); sys.stdin.read()"
        path = os.pathsep.join(filter(None, [str(ROOT / "tools"), str(ROOT), env.get("PYTHONPATH")]))
        keeper = subprocess.Popen(
            [sys.executable, "-c", keeps], stdin=subprocess.PIPE, cwd=ROOT, env=env | {"PYTHONPATH": path},
            start_new_session=True)
        try: yield env
        finally:
            keeper.kill()                                           # (the server ends with the last who asks)
            keeper.wait()


def run(part, env, files=()):
    "One part, or some of its files, in a process of its own → its report, with the seconds that it took"
    report = REPORTS / (f"{part}-again.json" if files else f"{part}.json")
    report.unlink(missing_ok=True)
    start = time.monotonic()
    code = subprocess.run([sys.executable, __file__, "--inside", part, *files], cwd=ROOT, env=env).returncode
    found = json.loads(report.read_text()) if report.exists() else dict(failed=[], passed=0, skipped={}, seconds={})
    if code and not found["failed"]: found["failed"].append(f"{part} (exit {code})")
    return found | dict(took=time.monotonic() - start, code=code)


def once_more(part, found, env):
    "The files of a part that failed, if they are few, alone → the report with what failed both times"
    files = sorted({name.partition("::")[0] for name in found["failed"]})
    if not 0 < len(files) <= FEW or not all((ROOT / f).is_file() for f in files): return found
    if found["code"] != 1: return found                         # (pytest itself broke off: others have not run)
    print(f"\n{part}: once more, with nothing beside it: {' '.join(files)}", flush=True)
    again = run(part, env, files)
    passed = [n for n in found["failed"] if n in again["seconds"] and n not in again["failed"]]
    failed = [n for n in found["failed"] if n not in passed] + [n for n in again["failed"] if n not in found["failed"]]
    return found | dict(failed=failed, unsteady=passed, took=found["took"] + again["took"])


def clock(seconds): return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def summary(found):
    "The lines at the end of a run"
    lines = [""]
    for part, r in found.items():
        budget = (
            f" of {clock(60 * MINUTES[part])}" + (" — over its budget" if r["took"] > 60 * MINUTES[part] else "")
            if part in MINUTES
            else ""
        )
        skips = sum(r["skipped"].values())
        lines.append(
            f"{part:10} {clock(r['took']):>6}{budget}   {r['passed']} passed"
            + (f", {len(r['failed'])} failed" if r["failed"] else "")
            + (f", {skips} left out" if skips else "")
        )
    lines.append(f"{'together':10} {clock(sum(r['took'] for r in found.values())):>6}")
    why = {}
    for r in found.values():
        for reason, n in r["skipped"].items(): why[reason] = why.get(reason, 0) + n
    lines.append("left out: " + ("; ".join(f"{reason} ({n})" for reason, n in sorted(why.items())) or "nothing"))
    failed, unsteady = (
        {part: r[kind] for part, r in found.items() if r.get(kind)} for kind in ("failed", "unsteady"))
    def named(parts):
        return "; ".join(
            f"{part}: " + ", ".join(names[:4]) + (f" and {len(names) - 4} more" if names[4:] else "")
            for part, names in parts.items())
    if unsteady: lines.append("passed only when run once more, to be mended: " + named(unsteady))
    if failed: lines.append("FAILED " + named(failed))
    return "\n".join(lines), bool(failed)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("parts", nargs="+", choices=["lines", *PYTEST])
    p.add_argument("--slowest", type=int, default=0, help="list so many of the slowest tests and notebooks")
    if sys.argv[1:2] == ["--inside"]:
        part, *files = sys.argv[2:]
        return run_lines() if part == "lines" else run_pytest(part, files)
    args = p.parse_args()
    with environment(args.parts) as env:
        found = {part: run(part, env) for part in args.parts}
        found = {part: once_more(part, r, env) for part, r in found.items()}
    if args.slowest:
        times = sorted(((s, name) for r in found.values() for name, s in r["seconds"].items()), reverse=True)
        print("\n".join(["", *(f"{s:7.1f} s  {name}" for s, name in times[:args.slowest])]))
    text, failed = summary(found)
    print(text, flush=True)
    sys.exit(failed)


if __name__ == "__main__": main()

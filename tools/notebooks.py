"""Runs notebooks as nbdev_test does, each in a fresh process with a time limit; a notebook that is stuck says where.

usage: notebooks.py [--workers 2] [--limit 300] [--report FILE] [NOTEBOOK…]     all of nbs/ where none is named; exits 1 if one fails

nbdev_test keeps a process for many notebooks: what one leaves behind (threads, gigabytes, a changed default) the next one inherits.
"""
import argparse, concurrent.futures, faulthandler, gc, json, multiprocessing, os, re, signal, sys, tempfile, time
from pathlib import Path

from bmlab.train.forkserver import AHEAD

ROOT = Path(__file__).resolve().parents[1]


def run(path, log, limit):
    "In the fresh process: all output goes to log; exits 0 if every cell ran"
    gc.freeze()                                                   # what was imported ahead stays, and is not looked through again
    os.setsid()                                                   # what it starts ends with it
    with open(log, "w") as f: os.dup2(f.fileno(), 1), os.dup2(f.fileno(), 2)
    faulthandler.dump_traceback_later(limit, exit=True)
    multiprocessing.set_start_method(None, force=True)            # what it starts, it starts as a script would
    from nbdev.config import get_config
    from nbdev.test import test_nb
    os.chdir(ROOT)
    passed, _ = test_nb(path, skip_flags=get_config().tst_flags.split(), basepath=ROOT)
    sys.stdout.flush(), sys.stderr.flush()
    os._exit(not passed)                                          # a thread that was left running holds nobody up


def tested(context, path, limit):
    "(passed, seconds, what it said)"
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        child = context.Process(target=run, args=(path, log, limit))
        child.start(); child.join(limit + 30)
        try: os.killpg(child.pid, signal.SIGKILL)
        except ProcessLookupError: pass
        child.join()
        lines = re.split(r"[\r\n]+", log.read_text(errors="replace")) if log.exists() else []
    return child.exitcode == 0, time.monotonic() - start, [line for line in lines if line.strip() and "it/s" not in line]


def name_of(path): return path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else path.name


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("notebooks", nargs="*", type=Path)
    p.add_argument("--workers", type=int, default=2)
    p.add_argument("--limit", type=float, default=300, help="seconds for one")
    p.add_argument("--report", type=Path, help="JSON: seconds of each notebook, and what failed")
    args = p.parse_args()
    paths = [path.resolve() for path in args.notebooks or sorted((ROOT / "nbs").rglob("[!.]*.ipynb")) if ".ipynb_checkpoints" not in path.parts]
    if not paths: p.error("no notebook under nbs/")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["nbdev.test", "matplotlib.pyplot", *AHEAD])                     # imported once; threads come later
    failed, took, start = [], {}, time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(args.workers) as pool:
        for done in concurrent.futures.as_completed(running := {pool.submit(tested, context, path, args.limit): path for path in paths}):
            passed, seconds, said = done.result()
            name = name_of(running[done])
            took[name] = seconds
            print(f"{'passed' if passed else 'FAILED'} {seconds:5.0f} s  {name}", flush=True)
            if not passed:
                failed.append(name)
                print("\n".join(f"    {line}" for line in said[-80:]), flush=True)
    if args.report:
        args.report.parent.mkdir(parents=True, exist_ok=True)
        args.report.write_text(json.dumps(dict(failed=failed, passed=len(paths) - len(failed), skipped={}, seconds=took), indent=1) + "\n")
    print(f"{len(paths) - len(failed)} of {len(paths)} notebooks passed in {time.monotonic() - start:.0f} s" + (": all but " + ", ".join(sorted(failed)) if failed else ""))
    sys.exit(bool(failed))


if __name__ == "__main__": main()

"""The documentation as a folder of pages that opens without a network: notebooks, tutorials, guides, reference.

usage: build.py [--out _docs] [--only GLOB ...] [--jobs 2]
"""
import argparse, shutil, subprocess, sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from check import problems
from stage import ROOT, stage


def main(args):
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--out", default=str(ROOT / "_docs"), help="folder to fill: source, html, doctrees")
    p.add_argument("--only", nargs="*", default=["*"], help="globs of pages, for a small part")
    p.add_argument("--jobs", default="2", help="processes that read and write pages")
    a = p.parse_args(args)
    out = Path(a.out).resolve()
    try: pages = stage(out / "source", a.only)
    except ValueError as e:
        print(e)
        return 1
    # a page that is no more must not satisfy the link check
    shutil.rmtree(out / "html", ignore_errors=True)
    run = subprocess.run(
        [
            sys.executable,
            "-m",
            "sphinx",
            "-n",
            "-W",
            "--keep-going",
            "-q",
            "-j",
            a.jobs,
            "-b",
            "html",
            "-c",
            str(ROOT / "docs"),
            "-d",
            str(out / "doctrees"),
            str(out / "source"),
            str(out / "html"),
        ]
    )
    if run.returncode: return run.returncode
    found = problems(out / "html")
    print("\n".join(found) or f"{len(pages)} pages, every link leads somewhere: {out / 'html/index.html'}")
    return int(bool(found))


if __name__ == "__main__": sys.exit(main(sys.argv[1:]))

"""A fresh Python for a test, forked by a server that has imported torch and transformers: a second instead of five"""
import os, tempfile, textwrap
from pathlib import Path
from subprocess import CompletedProcess

from bmlab.train.forkserver import start_process


def fresh_python(
    program,        # source text, run as the main module
    *args,          # sys.argv[1:]
    env=None,       # more of the environment; a value of None takes a variable away
    cwd=None,       # its folder
    check=False,    # raise for any exit code but 0?
    timeout=300,    # seconds
):                  # subprocess.CompletedProcess with stdout and stderr as text
    wanted = {k: v for k, v in {**os.environ, **(env or {})}.items() if v is not None}
    with tempfile.TemporaryDirectory() as folder:
        log, errors = Path(folder, "log"), Path(folder, "errors")
        apart = f"import os; os.dup2(os.open({str(errors)!r}, os.O_WRONLY | os.O_CREAT), 2); del os\n"
        p = start_process(apart + textwrap.dedent(program), args, log=log, cwd=cwd, env=wanted)
        try: code = p.wait(timeout)
        finally:
            p.kill()
            p.wait()
        read = lambda file: file.read_text(errors="replace") if file.exists() else ""
        done = CompletedProcess(["python", *map(str, args)], code, read(log), read(errors))
    assert not check or code == 0, done.stdout + done.stderr
    return done

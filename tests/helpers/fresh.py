"""A fresh Python for a test, forked by a server that has imported torch and transformers: a second instead of five"""
import os, subprocess, sys, tempfile, textwrap
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
    if env: return _another_environment(program, args, wanted, cwd, check, timeout)
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


def _another_environment(program, args, env, cwd, check, timeout):
    "The same without the server, of which another environment needs another, with more imports than most programs have"
    path = os.pathsep.join(os.path.abspath(p) for p in sys.path)
    command = [sys.executable, "-c", textwrap.dedent(program), *map(str, args)]
    how = dict(capture_output=True, text=True, errors="replace", timeout=timeout)
    done = subprocess.run(command, cwd=cwd, env=env | {"PYTHONPATH": path}, **how)
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done


def torchrun(script, *args, cwd=None, timeout=300):
    "`torchrun --nproc-per-node 2`, its agent forked; subprocess.CompletedProcess"
    agent = "import os; os.environ['GLOO_SOCKET_IFNAME'] = 'lo'\nfrom torch.distributed.run import main; main()"
    where = "--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"
    return fresh_python(agent, *where, script, *args, cwd=cwd, timeout=timeout)

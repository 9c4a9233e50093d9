"The server that forks processes: threads, interrupts, open files, modules of the folder, children with its socket."
import os, re, signal, subprocess, sys, tempfile, threading
from pathlib import Path

import pytest

from bmlab.train import forkserver
from bmlab.train.forkserver import start_process
from conftest import gone, until

pytestmark = pytest.mark.long


@pytest.fixture(autouse=True)
def light_servers(tmp_path_factory, monkeypatch):
    "Servers of a test's own, which import no more than torch ahead: what is tested needs no more of them"
    for name in ("BMLAB_AHEAD", "BMLAB_SERVERS"): monkeypatch.delenv(name, raising=False)
    whole = Path(forkserver.__file__).read_text(encoding="utf-8")
    ahead = re.compile(r"^AHEAD = \(.*?^\)", re.S | re.M)
    assert ahead.search(whole)
    file = tmp_path_factory.mktemp("server") / "forkserver.py"
    file.write_text(ahead.sub('AHEAD = ("torch",)', whole), encoding="utf-8")
    monkeypatch.setattr(forkserver, "_FILE", str(file))
    monkeypatch.setattr(forkserver, "_servers", [])
    yield
    forkserver._close_servers()


def test_a_module_of_the_folder_is_found_and_a_relative_folder_is_ones_own(tmp_path, monkeypatch):
    (tmp_path / "inner").mkdir()
    (tmp_path / "mine.py").write_text("answer = 42")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")
    program = "import os; from mine import answer; print(answer, os.path.basename(os.getcwd()))"
    p = start_process(program, log="log", cwd="inner")
    assert p.wait(60) == 0 and Path("log").read_text().split() == ["42", "inner"]
    with pytest.raises(FileNotFoundError): start_process("pass", log=tmp_path / "none/log")


def test_more_open_files_than_select_can_name(tmp_path):
    kept = [open(os.devnull) for _ in range(1100)]
    try: assert start_process("print('here')", env=dict(os.environ, MANY="1"), log=tmp_path / "log").wait(60) == 0
    finally:
        for f in kept: f.close()
    assert (tmp_path / "log").read_text() == "here\n"


def test_two_threads_with_two_environments_at_once(tmp_path):
    codes = {}
    program = "import os, sys; sys.exit(int(os.environ['N']))"
    def one(name): codes[name] = start_process(program, env=dict(os.environ, N=name)).wait(120)
    threads = [threading.Thread(target=one, args=(name,)) for name in ("3", "4", "3")]
    for t in threads: t.start()
    for t in threads: t.join()
    assert codes == {"3": 3, "4": 4}


def test_an_interrupt_ends_what_was_started_and_the_next_call_works(tmp_path):
    "The alarm comes while the server still imports"
    def alarm(*_): raise KeyboardInterrupt
    before = signal.signal(signal.SIGALRM, alarm)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        with pytest.raises(KeyboardInterrupt):
            start_process("import time; time.sleep(600)", env=dict(os.environ, SLOW="1"))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert start_process("pass").wait(60) == 0


ENDS = """
import multiprocessing, sys, time
from bmlab.train.forkserver import start_process
if __name__ == "__main__":
    p = start_process("import time; time.sleep(600)", log=sys.argv[1])
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,), daemon=True)
    child.start()
    print(p.pid, p.server.server.pid)
"""


def test_a_program_ends_though_a_child_of_its_own_holds_the_socket(tmp_path):
    (tmp_path / "ends.py").write_text(ENDS)
    env = dict(os.environ, PYTHONPATH=os.pathsep.join(p for p in sys.path if p))
    command = [sys.executable, tmp_path / "ends.py", tmp_path / "log"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    state = lambda pid: Path(f"/proc/{pid}/status")
    gone = lambda pid: not state(pid).exists() or "State:\tZ" in state(pid).read_text()
    until(lambda: all(gone(pid) for pid in done.stdout.split()))


MIDDLE = """
import sys, time
from bmlab.train.forkserver import start_process
print(start_process("import time; time.sleep(600)").pid, flush=True)
time.sleep(600)
"""


def test_a_forked_process_that_is_killed_takes_what_it_asked_for_along_and_no_more(tmp_path):
    other, middle = start_process("import time; time.sleep(600)"), start_process(MIDDLE, log=tmp_path / "log")
    until(lambda: (tmp_path / "log").read_text().strip())
    inner = int((tmp_path / "log").read_text())
    assert not gone(inner)
    middle.kill()
    assert middle.wait(60) == -9
    until(lambda: gone(inner))
    assert other.poll() is None and start_process("pass").wait(60) == 0
    other.kill()
    assert other.wait(60) == -9


def test_a_server_that_is_killed_takes_its_processes_along():
    p = start_process("import time; time.sleep(600)")
    p.server.server.kill()
    assert p.wait(60) == -signal.SIGKILL
    until(lambda: not Path(f"/proc/{p.pid}").exists())
    assert start_process("pass").wait(60) == 0 and not any(s.gone for s in forkserver._servers if s.processes)


def test_two_who_name_a_folder_have_one_server_which_ends_with_the_last(tmp_path, monkeypatch, request):
    folder = tempfile.TemporaryDirectory()              # (a socket's name has 107 characters at most)
    request.addfinalizer(folder.cleanup)
    monkeypatch.setenv("BMLAB_SERVERS", folder.name)
    sleep, says = "import time; time.sleep(600)", "import os; print(os.getppid())"
    key = forkserver._key(dict(os.environ), sys.path)
    def there(): return forkserver._shared_server(key, dict(os.environ), sys.path)
    def order(program, log): return dict(program=program, args=[], fork=True, log=str(log), cwd=str(tmp_path),
                                         env=dict(os.environ), path=sys.path)  # fmt: skip
    one, two = there(), there()
    running = [s.fork(order(sleep, tmp_path / "sleeps")) for s in (one, two)]
    for n, s in enumerate((one, two)): assert s.fork(order(says, tmp_path / str(n))).wait(60) == 0
    server = {int((tmp_path / n).read_text()) for n in "01"}
    assert len(server) == 1
    one.close()
    until(lambda: gone(running[0].pid))
    assert running[1].poll() is None
    two.close()
    for pid in (running[1].pid, *server): until(lambda: gone(pid))
    third = there()                                             # nobody is at the old door: another server
    assert third.fork(order(says, tmp_path / "2")).wait(60) == 0
    assert int((tmp_path / "2").read_text()) not in server
    third.close()

"Set before anything imports torch or triton: one thread, and Triton's interpreter where there is no GPU."
import gc, os, random, shutil, socket, sys, time
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
# no pool of compiling processes: on two loaded cores a library was opened half written
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# processes that tests fork have it: nobody changes the library while they run (bmlab.train.forkserver)
os.environ.setdefault("BMLAB_AHEAD", "bmlab.all")
if shutil.which("nvidia-smi") is None: os.environ.setdefault("TRITON_INTERPRET", "1")


def until(condition, seconds=60):
    "Wait for what happens, not for a time"
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.005)


def every_other(values):
    "Parameters of a test, every other one of which runs with the slow tests alone"
    return [pytest.param(v, marks=pytest.mark.slow) if i % 2 else v for i, v in enumerate(values)]


def gone(pid):
    "Has a process ended? Nobody may have reaped it, where its parent is gone too"
    try: return "State:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError): return True


def free_port():
    """A port nobody listens on, below those that the system hands out by itself, so that it is still free when
    somebody binds it seconds later"""
    while True:
        with socket.socket() as s:
            try:
                s.bind(("", port := random.SystemRandom().randrange(20_000, 30_000)))
                return port
            except OSError: pass


@pytest.fixture(autouse=True)
def a_fresh_compiler():
    "What one test compiled of some code counts against the limit of recompilations in the next one"
    yield
    if (dynamo := sys.modules.get("torch._dynamo")) is not None: dynamo.reset()


def pytest_collection_finish():
    """What is imported stays: no collection of garbage, of which `wrap` asks for two, looks through it again (half a
    second each)"""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items):
    "torch.compile's own backend asks for a C++ compiler; what runs it is called test_inductor"
    if shutil.which(os.environ.get("CXX", "g++")): return
    for item in items:
        if item.name.startswith("test_inductor"): item.add_marker(pytest.mark.skip(reason="no C++ compiler"))

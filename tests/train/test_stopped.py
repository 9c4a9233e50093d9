"`fit` ends on SIGTERM after the step it is in, on all ranks, with a checkpoint from which a run goes on bit for bit."
import os, signal, threading
from pathlib import Path

import pytest
import torch

from bmlab.train.forkserver import start_process
from bmlab.train.loop import fit
from bmlab.train.processes import run_ranks
from conftest import until
from fresh import fresh_python

ROOT = Path(__file__).resolve().parents[2]

PROGRAM = '''
import logging, os, random, signal, sys, threading
from pathlib import Path
import torch
import transformers as tf
from bmlab.core import set_seed
from bmlab.data.samples import Batches
from bmlab.train.loop import Stopped, fit, model_loss
torch.set_num_threads(1)
logging.disable()
STEPS = 8
rows = torch.randint(0, 99, (12, 6), generator=torch.Generator().manual_seed(0))
config = tf.GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=99, n_positions=8)        # with its dropout

def run(folder, loss=model_loss, **options):
    set_seed(0)
    model = tf.GPT2LMHeadModel(config)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    log = fit(model, Batches(rows, batch=5), opt, steps=STEPS, loss=loss, save_to=folder, plot=False, **options)
    return log, model.state_dict()
'''

RANDOM_MOMENTS = PROGRAM + '''
folder, tries, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
draw, stops = random.Random(seed), []
log, weights = run(folder / "whole")
for trial in range(tries):
    at, delay, seen = draw.randint(1, STEPS), draw.uniform(0, 0.03), []
    timer = threading.Timer(delay, lambda: os.kill(os.getpid(), signal.SIGTERM))
    def loss(model, batch):
        seen.append(1)
        if len(seen) == at: timer.start()
        value = model_loss(model, batch)
        if len(seen) == STEPS: timer.join()             # within the run in any case
        return value
    more = {"save_every": 3} | ({"save_in_background": True} if trial % 2 else {})
    try: run(folder / str(trial), loss, **more)
    except Stopped as e: stopped = e
    else: raise SystemExit("not stopped")
    stops.append(len(stopped.log))
    assert stopped.path.name == f"step-{stops[-1]:08d}" and at <= stops[-1] <= STEPS, (stopped.path, at, stops)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    again, own = run(folder / str(trial), resume=True, save_every=3)
    assert again.loss.tolist() == log.loss.tolist() and again.lr.tolist() == log.lr.tolist()
    assert all(torch.equal(own[k], w) for k, w in weights.items())
print(*stops)
'''


@pytest.mark.long
def test_a_run_that_is_told_to_end_at_random_moments_goes_on_bit_for_bit(tmp_path):
    done = fresh_python(RANDOM_MOMENTS, tmp_path, 4, 0, cwd=ROOT, check=True)
    assert len(done.stdout.split()) == 4


@pytest.mark.slow
def test_a_run_that_is_told_to_end_at_forty_random_moments(tmp_path):
    done = fresh_python(RANDOM_MOMENTS, tmp_path, 40, 1, cwd=ROOT, check=True)
    assert len(set(done.stdout.split())) > 4


TOLD = PROGRAM + '''
logging.disable(logging.NOTSET)
def loss(model, batch):
    Path(sys.argv[1], "begun").touch()
    return model_loss(model, batch)
STEPS = 10**6
run(None if sys.argv[2] == "nowhere" else Path(sys.argv[1], "kept"), loss)
'''


@pytest.mark.long
@pytest.mark.parametrize("number", (signal.SIGTERM, signal.SIGUSR1))
def test_a_program_that_is_told_to_end_ends_with_a_sentence_and_an_exit_code(tmp_path, number):
    "From outside, as a scheduler does it; the program itself knows nothing of signals"
    where = "kept" if number == signal.SIGTERM else "nowhere"
    p = start_process(TOLD, [tmp_path, where], log=tmp_path / "log", cwd=ROOT)
    until(lambda: (tmp_path / "begun").exists() or p.poll() is not None, 240)
    p.send_signal(number)
    assert p.wait(60) == 128 + number, (tmp_path / "log").read_text()
    said = (tmp_path / "log").read_text()
    assert f"told to end by {number.name}: stopped after step " in said and "Traceback" not in said
    if where == "kept": assert "resume=True goes on from" in said and (tmp_path / "kept/latest").exists()
    else: assert "nothing was saved" in said


def two_ranks(folder, resume, told=None):
    "What a rank of two keeps of a run, in which one of them is told to end in the third step"
    from torch.nn.parallel import DistributedDataParallel
    from bmlab.train.loop import Stopped, fit
    from bmlab.train.processes import rank
    torch.manual_seed(0)
    net, seen = torch.nn.Linear(4, 1), []
    model = DistributedDataParallel(net)
    def loss(model, batch):
        seen.append(1)
        if len(seen) == 3 and rank() == told: os.kill(os.getpid(), signal.SIGTERM)
        return model(batch).square().mean()
    batches = [torch.randn(3, 4, generator=torch.Generator().manual_seed(2 * i + rank())) for i in range(4)]
    opt = torch.optim.Adam(net.parameters(), lr=0.1)
    try: log = fit(model, batches, opt, steps=6, loss=loss, save_to=folder, resume=resume, plot=False)
    except Stopped as e: log = e.log
    return log.loss.tolist(), net.weight.detach()


def ranks_in_turn(folder):
    return [two_ranks(folder / name, *how) for name, *how in (("a", False), ("b", False, 1), ("b", True))]


@pytest.mark.long
def test_all_ranks_end_after_the_same_step(tmp_path):
    for whole, stopped, again in run_ranks(ranks_in_turn, tmp_path):
        assert len(stopped[0]) == 3 and stopped[0] == whole[0][:3]
        assert again[0] == whole[0] and torch.equal(again[1], whole[1])


def net_and(loss, **options):
    net = torch.nn.Linear(2, 1)
    call = lambda model, batch: loss() or model(batch).square().mean()
    return fit(net, [torch.ones(2, 2)], torch.optim.SGD(net.parameters(), lr=0.1), loss=call, plot=False, **options)


def test_a_handler_of_the_programs_own_stays():
    heard = []
    before = signal.signal(signal.SIGTERM, lambda *_: heard.append(1))
    try: assert len(net_and(lambda: os.kill(os.getpid(), signal.SIGTERM), steps=3)) == 3 and len(heard) == 3
    finally: signal.signal(signal.SIGTERM, before)


def test_a_process_forked_meanwhile_is_not_deaf():
    "It inherits the handler; a pool that ends its workers by SIGTERM would wait for ever"
    ends = []
    def forks():
        pid = os.fork()
        if not pid:
            os.kill(os.getpid(), signal.SIGTERM)
            os._exit(7)
        ends.append(os.WTERMSIG(os.waitpid(pid, 0)[1]))
    assert len(net_and(forks, steps=1)) == 1 and ends == [signal.SIGTERM]


def test_outside_the_main_thread_no_handler_is_set():
    "Python would refuse it; fit works there as before"
    seen, logs = [], []
    work = lambda: logs.append(net_and(lambda: seen.append(signal.getsignal(signal.SIGTERM)), steps=2))
    thread = threading.Thread(target=work)
    thread.start()
    thread.join(60)
    assert len(logs[0]) == 2 and seen == [signal.SIG_DFL] * 2


LATE = '''
import os, signal
from bmlab.train import loop
class Late(loop._Ears):
    "hears it after the last step, when nobody asks any more"
    def __exit__(self, *error):
        os.kill(os.getpid(), signal.SIGTERM)
        return super().__exit__(*error)
loop._Ears = Late
from test_stopped import net_and
net_and(lambda: None, steps=2)
print("went on")
'''


@pytest.mark.long
def test_a_signal_that_comes_too_late_for_a_last_step_is_not_lost():
    there = os.pathsep.join([str(ROOT / "tests/train"), str(ROOT / "tests"), str(ROOT / "tests/helpers")])
    program = f"import sys\nsys.path[:0] = {there.split(os.pathsep)!r}\n{LATE}"
    done = fresh_python(program, cwd=ROOT)
    assert done.returncode == -signal.SIGTERM and "went on" not in done.stdout, done.stderr

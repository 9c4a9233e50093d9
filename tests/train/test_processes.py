"Processes: two torchrun agents, peers that die, interrupts at every line of the start, collectives in half precision."
import os, signal, subprocess, sys, threading, time
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from bmlab.train.forkserver import start_process
from bmlab.train.processes import run_ranks
from conftest import free_port, gone, until

ROOT = Path(__file__).resolve().parents[2]
ENV = {
    **{
        k: v
        for k, v in os.environ.items()
        if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    },
    "PYTHONPATH": str(ROOT),
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "CUDA_VISIBLE_DEVICES": "",
}


def start(script, *args, launcher=(), **env):
    return subprocess.Popen(
        [sys.executable, *launcher, script, *map(str, args)],
        env={**ENV, **{k: str(v) for k, v in env.items()}},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def fork(program, log, *args, **env):
    "The same, forked with torch imported; its output goes to a file"
    wanted = {k: str(v) for k, v in env.items()} | {"GLOO_SOCKET_IFNAME": "lo"}
    return start_process(f"import os\nos.environ.update({wanted!r})\n{program}", args, log=log)


def finish(processes, timeout_s=100):
    "Outputs and exit codes; whatever is left is ended"
    try: return [(p.communicate(timeout=timeout_s)[0], p.returncode) for p in processes]
    finally:
        for p in processes: p.poll() is None and p.kill()


AGENT = r"""
import torch
from bmlab.train.processes import *
before = rank(), world_size(), local_rank()
init_distributed(seed=3, timeout_s=60)
assert before == (rank(), world_size(), local_rank())
seeds = all_gather(torch.rand(1)).flatten()
x = torch.full((2,), rank() + 1., requires_grad=True)
(all_reduce(x) * (rank() + 1)).sum().backward()
# one write each: two processes share the pipe
total, mean = all_reduce(torch.tensor(rank() + 1)).item(), sum_loss(torch.tensor(float(rank()))).item()
equal = len(set(seeds.tolist())) == 1
print_rank(f"world {world_size()} sum {total} grad {x.grad.tolist()} seeds equal {equal} mean {mean}\n", end="")
print(f"here {rank()}/{world_size()} local {local_rank()}\n", end="", flush=True)
init_distributed(); synchronize(); shutdown()
"""


@pytest.mark.slow                               # (tests/plan/test_scaling_out.py trains a model so)
def test_two_agents_of_torchrun(tmp_path):
    "Two hosts are two agents: here both are local, with one process each"
    script, port = tmp_path / "agent.py", free_port()
    script.write_text(AGENT)
    common = ("-m", "torch.distributed.run", "--nnodes=2", "--master-addr=127.0.0.1", f"--master-port={port}")
    done = finish([start(script, launcher=(*common, f"--node-rank={i}", "--nproc-per-node=1")) for i in range(2)])
    assert all(code == 0 for _, code in done), done
    both = "".join(out for out, _ in done)
    assert both.count("world 2 sum 3 grad [3.0, 3.0] seeds equal True mean 0.5") == 1
    assert "here 0/2 local 0" in both and "here 1/2 local 0" in both


@pytest.mark.slow                               # (the same, on one)
def test_one_agent_two_processes(tmp_path):
    script = tmp_path / "agent.py"
    script.write_text(AGENT)
    ((out, code),) = finish(
        [
            start(
                script,
                launcher=(
                    "-m", "torch.distributed.run", "--nproc-per-node=2", "--rdzv-backend=c10d",
                    "--rdzv-endpoint=127.0.0.1:0",
                ),
            )
        ]
    )
    assert code == 0 and "world 2 sum 3" in out and "here 1/2 local 1" in out, out


DEAD = """
import os, signal, sys, time, torch
from bmlab.train.processes import *
init_distributed(timeout_s=100)                              # a busy machine brings them up one long after the other
synchronize(); init_distributed(timeout_s=float(sys.argv[2]))
if rank() == 1: os.kill(os.getpid(), signal.SIGKILL) if sys.argv[1] == "killed" else time.sleep(200)
start = time.monotonic()
try:
    while True: all_reduce(torch.ones(1))
except RuntimeError as e: print("error after", time.monotonic() - start, "s:", e, flush=True); os._exit(3)
"""


@pytest.mark.long
@pytest.mark.parametrize("how", ["killed", "hangs"])
def test_a_peer_that_dies_or_hangs_is_an_error_within_the_timeout(tmp_path, how):
    port, logs = free_port(), [tmp_path / f"{r}.log" for r in range(2)]
    ranks = [
        fork(DEAD, logs[r], how, 3, RANK=r, WORLD_SIZE=2, LOCAL_RANK=r, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        for r in range(2)
    ]
    try:
        code, out = ranks[0].wait(150), logs[0].read_text()
        assert code == 3, out
        assert float(out.split("error after")[1].split()[0]) < 3 + 30, out
    finally:
        for p in ranks:
            p.kill()
            p.wait()


def dies_in_a_collective(folder):
    "Rank 1 is killed while the others wait for it"
    Path(folder, str(os.getpid())).touch()
    x = torch.ones(1 << 24, device="cuda")
    torch.distributed.all_reduce(x)
    torch.cuda.synchronize()
    if torch.distributed.get_rank() == 1: os.kill(os.getpid(), signal.SIGKILL)
    while True:
        torch.distributed.all_reduce(x)
        torch.cuda.synchronize()


@pytest.mark.cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_gpus_are_free_again_after_a_rank_was_killed_in_a_collective(tmp_path):
    gpus = range(torch.cuda.device_count())
    free = lambda: [torch.cuda.mem_get_info(i)[0] for i in gpus]
    before, begin = free(), time.monotonic()
    with pytest.raises(RuntimeError, match=f"rank 1 of {len(gpus)} ended with exit code -9"):
        run_ranks(dies_in_a_collective, tmp_path, world_size=len(gpus), backend="nccl", timeout_s=200)
    assert time.monotonic() - begin < 200
    pids = [int(f.name) for f in tmp_path.iterdir()]
    assert len(pids) == len(gpus)
    until(lambda: all(map(gone, pids)), 30)
    until(lambda: all(now > was - (64 << 20) for now, was in zip(free(), before)), 30)


@pytest.mark.long
def test_a_peer_that_never_comes_is_an_error_within_the_timeout(tmp_path):
    late, log = "from bmlab.train.processes import *\ninit_distributed(timeout_s=2)", tmp_path / "log"
    begin = time.monotonic()
    code = fork(
        late, log, RANK=0, WORLD_SIZE=2, LOCAL_RANK=0, MASTER_ADDR="127.0.0.1", MASTER_PORT=free_port()
    ).wait(100)
    out = log.read_text()
    assert code != 0 and "1/2 clients joined" in out, out
    assert time.monotonic() - begin < 60                       # the time to start it is in it


INTERRUPTED = """
import os, sys, torch, torch.distributed as dist
from bmlab.train.processes import *
from bmlab.train import processes
files = {processes.__file__, dist.distributed_c10d.__file__}

def interrupted_at(line):
    "Stop the start at the so-many-th line it runs; False when it ended before"
    count = 0
    def trace(frame, event, arg):
        nonlocal count
        if frame.f_code.co_filename not in files: return None
        if event == "line":
            count += 1
            if count == line: raise KeyboardInterrupt
        return trace
    sys.settrace(trace)
    try: init_distributed(); return False
    except KeyboardInterrupt: return True
    finally: sys.settrace(None)

line = 0
while True:
    line += 1
    dist.is_initialized() and shutdown()
    stopped = interrupted_at(line)
    init_distributed(seed=1)
    a = torch.rand(2)
    init_distributed(seed=1)
    assert torch.equal(a, torch.rand(2)) and dist.get_world_size() == 1 and dist.get_rank() == 0
    group = dist.new_group([0])
    x = torch.ones(2); dist.all_reduce(x); dist.all_reduce(x, group=group); assert x.tolist() == [1, 1]
    if not stopped: break
print("lines", line, flush=True)
# (the threads of gloo groups that were left half made may abort an interpreter that shuts down)
os._exit(0)
"""


@pytest.mark.long
def test_an_interrupt_at_any_line_of_the_start_is_repaired_by_the_next_call(tmp_path):
    code, out = fork(INTERRUPTED, tmp_path / "log").wait(100), (tmp_path / "log").read_text()
    assert code == 0, out[-3000:]
    assert int(out.split("lines")[1]) > 50


def low_precision():
    from bmlab.train.processes import all_gather, all_reduce, broadcast, rank, reduce_scatter
    out = {}
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.int64):
        x = (torch.arange(4) + 4 * rank()).to(dtype)
        out[dtype] = [all_reduce(x), all_reduce(x, "max"), all_gather(x), reduce_scatter(x), broadcast(x, 1)]
    x = torch.randn(4, 3, requires_grad=True)
    strided = all_gather(x.t())                                # not contiguous
    strided.sum().backward()
    (second,) = torch.autograd.grad(
        all_reduce(all_reduce(y := torch.ones(2, dtype=torch.float64, requires_grad=True)).pow(2)).sum(),
        y,
        create_graph=True,
    )
    again, = torch.autograd.grad(second.sum(), y)
    return out, strided.shape, x.grad, again


@pytest.mark.long
def test_collectives_in_every_dtype_strided_and_twice_differentiated():
    for r, (out, shape, grad, again) in enumerate(run_ranks(low_precision)):
        for dtype, (total, most, gathered, scattered, cast) in out.items():
            both = torch.arange(8).view(2, 4).to(dtype)
            assert (
                torch.equal(total, both.sum(0).to(dtype)) and torch.equal(most, both[1]) and torch.equal(gathered, both)
                and torch.equal(cast, both[1])
            )
            assert torch.equal(scattered, both.sum(0).to(dtype)[2 * r:2 * r + 2])
        assert shape == (2, 3, 4) and torch.equal(grad, torch.full((4, 3), 2.))
        # each rank's loss is 2s², s = y0 + y1: their sum 4s² has gradient 8s; the sum over two ranks of that, 16s, has
        # gradient 16
        assert again.tolist() == [16., 16.]


def subgroup():
    import torch.distributed as dist
    from bmlab.train.processes import all_gather, all_reduce, broadcast, rank, reduce_scatter
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = groups[rank() // 2]
    x = torch.tensor([float(rank()), 10. + rank()], requires_grad=True)
    y = all_reduce(x, group=mine)
    (y * (rank() + 1)).sum().backward()
    return (
        y.tolist(),
        x.grad.tolist(),
        all_gather(x.detach(), mine)[:, 0].tolist(),
        broadcast(x.detach(), 1, mine)[0].item(),
        reduce_scatter(x.detach(), group=mine).tolist(),
    )


@pytest.mark.long
def test_collectives_over_a_part_of_the_ranks():
    got = run_ranks(subgroup, world_size=4)
    assert [g[0] for g in got] == [[1., 21.]] * 2 + [[5., 25.]] * 2
    assert [g[1] for g in got] == [[3., 3.]] * 2 + [[7., 7.]] * 2
    assert [g[2] for g in got] == [[0., 1.]] * 2 + [[2., 3.]] * 2
    assert [g[3] for g in got] == [1., 1., 3., 3.] and [g[4] for g in got] == [[1.], [21.], [5.], [25.]]


HANGS = """
import sys
import bmlab.train.processes as processes
sys.platform = sys.argv[2]                  # as another system, where each rank is a new interpreter
def hang(folder):
    import os, time
    with open(f"{folder}/{os.environ['RANK']}.tmp", "w") as f: f.write(f"{os.getpid()} {os.getppid()}")
    os.rename(f.name, f.name.removesuffix(".tmp"))
    time.sleep(600)
processes.run_ranks(hang, sys.argv[1])
"""


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="processes are looked at in /proc")
@pytest.mark.parametrize("platform, fork", (("linux", False), ("linux", True), ("elsewhere", True)))
def test_ranks_that_hang_end_with_a_parent_that_is_killed(tmp_path, monkeypatch, platform, fork):
    "And so does the server that forked them, unless it serves this process too, which has had their parent forked"
    monkeypatch.delenv("BMLAB_SERVERS", raising=False)          # (a new interpreter has a server of its own)
    parent = start_process(HANGS, [tmp_path, platform], log=tmp_path / "log", cwd=ROOT, fork=fork)
    ready = lambda: (tmp_path / "0").exists() and (tmp_path / "1").exists()
    until(lambda: ready() or parent.poll() is not None, 240)
    assert parent.poll() is None, (tmp_path / "log").read_text()
    ranks, parents = map(set, zip(*(map(int, (tmp_path / rank).read_text().split()) for rank in "01")))
    assert len(ranks) == 2 and len(parents) == 1
    log = tmp_path / "server"
    assert start_process("import os; print(os.getppid())", log=log).wait(60) == 0
    ours = parents == {int(log.read_text())}                    # (the parent itself, where each is a new interpreter)
    assert ours == (platform == "linux" and fork)
    parent.kill()
    assert parent.wait(60) == -signal.SIGKILL
    until(lambda: all(map(gone, ranks if ours else ranks | parents)))
    assert not ours or not any(map(gone, parents))


def test_results_of_any_class_come_back_and_what_cannot_is_an_error():
    class Found(NamedTuple): rank: int
    assert [f.rank for f in run_ranks(lambda: Found(torch.distributed.get_rank()), world_size=2)] == [0, 1]
    with pytest.raises(RuntimeError, match="(?s)rank 0 of 1 failed.*lock"): run_ranks(threading.Lock, world_size=1)

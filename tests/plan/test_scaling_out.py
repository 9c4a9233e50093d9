"""Scaling out

The page's table is what the planner says, its sentences are what the table says, every launcher starts one program."""
import os, re, subprocess, sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from conftest import free_port
from small import save_words

ROOT = Path(__file__).resolve().parents[2]
LAUNCH, PAGE = ROOT / "scripts" / "launch", ROOT / "docs" / "scaling_out.md"
PROGRAM = """import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
x = torch.ones(1) * (dist.get_rank() + 1)
dist.all_reduce(x)
print(f"rank {dist.get_rank()} of {dist.get_world_size()}, sum {x.item():.0f}", flush=True)
dist.destroy_process_group()
"""


def script():
    "scripts/scaling.py as a module"
    import importlib.util
    spec = importlib.util.spec_from_file_location("scaling", ROOT / "scripts" / "scaling.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def tables():
    "{(model, batch): {GPUs: {column: text}}} of the page"
    out = {}
    for name, batch, body in re.findall(r"\*\*(\d+B), ([^*]+)\*\*: a GPU "
                                        r"keeps[^\n]*\n\n(.*?)\n\n", PAGE.read_text(encoding="utf-8"), re.S):
        head, _, *rows = [[c.strip() for c in line.strip("|").split("|")] for line in body.splitlines()]
        out[name, "fixed" if "a step" in batch else "kept"] = {int(r[0]): dict(zip(head, r)) for r in rows}
    return out


@pytest.mark.long
@pytest.mark.parametrize("gpus, fixed", [(64, False), pytest.param(1024, True, marks=pytest.mark.slow)])
def test_the_table_is_what_the_planner_says(gpus, fixed):
    scaling = script()
    m = scaling.machine("h200")
    assert set(tables()) == {(n.upper(), b) for n in scaling.SHAPES for b in ("fixed", "kept")}
    assert all(list(t) == scaling.GPUS for t in tables().values())
    now, page = scaling.row("13b", gpus, m, 5e-6, fixed), tables()["13B", "fixed" if fixed else "kept"][gpus]
    if scaling.UNIT not in now:
        assert page["sequences a GPU"] == "does not fit"
        return
    assert abs(float(page["step, s"]) / now["step, s"] - 1) < 0.01
    assert abs(float(page[scaling.UNIT].replace(",", "")) / now[scaling.UNIT] - 1) < 0.01
    assert page["sequences a GPU"] == str(now["sequences a GPU"])


def test_its_sentences_are_what_the_table_says():
    t, best = tables(), lambda r: int(r["of the best"].rstrip("%") or 0)
    # linear to the end
    assert all(best(t[name, "kept"][1024]) >= 98 for name in ("13B", "175B"))
    # the larger model bends less, and bends
    assert all(best(t["13B", "fixed"][g]) < best(t["175B", "fixed"][g]) < 90 for g in (512, 1024))
    # more GPUs are no gain
    assert float(t["13B", "fixed"][1024]["days"]) >= 0.9 * float(t["13B", "fixed"][512]["days"])
    assert (
        t["175B", "kept"][8]["sequences a GPU"]
        == t["175B", "fixed"][32]["sequences a GPU"]
        == "does not fit"
        != t["13B", "kept"][1]["sequences a GPU"]
    )
    # what was run came as planned
    off = re.findall(r"^\| .* tokens \| \d \| .* \| ([+-][\d.]+)% \|$", PAGE.read_text(encoding="utf-8"), re.M)
    assert len(off) == 5 and all(abs(float(x)) < 10 for x in off)
    assert (PAGE.parent / "scaling_out.png").stat().st_size < 50_000


def test_a_wait_in_the_ring_costs_time():
    scaling = script()
    m = scaling.machine("h200")
    block, hosts = scaling.block_of("13b"), min(m.network, m.gpus_per_host * m.network_hosts) / m.gpus_per_host
    rates = [scaling.networked(m, block, g, s).network_hosts for g, s in ((16, 0), (16, 5e-6), (1024, 5e-6))]
    assert abs(rates[0] / hosts - 1) < 1e-9 and rates[0] > rates[1] > rates[2]
    assert abs(block - 2 * scaling.parameters("13b") / 40) < 1
    assert abs(block / (8 * rates[2]) - block / min(m.network, 320e9) - 1024 * 5e-6) < 1e-9


def test_what_the_launchers_say():
    yaml = pytest.importorskip("yaml")
    for f in ("torchrun.sh", "slurm.sh"):
        subprocess.run(["bash", "-n", LAUNCH / f], check=True)
        assert os.access(LAUNCH / f, os.X_OK) and "scripts/train.py" in (LAUNCH / f).read_text()
    job = yaml.safe_load((LAUNCH / "pytorchjob.yaml").read_text())
    hosts = job["spec"]["pytorchReplicaSpecs"]
    assert (job["apiVersion"], job["kind"], hosts["Master"]["replicas"]) == ("kubeflow.org/v1", "PyTorchJob", 1)
    assert hosts["Master"]["template"] == hosts["Worker"]["template"]
    container, = hosts["Worker"]["template"]["spec"]["containers"]
    assert container["name"] == "pytorch" and container["command"] == ["torchrun"]
    assert container["args"][0] == "scripts/train.py"
    assert job["spec"]["nprocPerNode"] == str(container["resources"]["limits"]["nvidia.com/gpu"])
    volumes = hosts["Worker"]["template"]["spec"]["volumes"]
    assert {v["name"] for v in container["volumeMounts"]} == {v["name"] for v in volumes}
    known = set(re.findall(r'"(--[a-z]+)"', (ROOT / "scripts" / "train.py").read_text()))
    for line in [" ".join(map(str, container["args"])), *re.findall(
            r"scripts/train\.py [^\n`]*",
            PAGE.read_text() + "".join((LAUNCH / f).read_text() for f in ("torchrun.sh", "slurm.sh")))]:
        assert set(re.findall(r"--[a-z]+", line)) <= known, line


def test_what_a_launcher_lacks():
    out = subprocess.run(
        [LAUNCH / "torchrun.sh", "x.py"], capture_output=True, text=True, env={"PATH": os.environ["PATH"]})
    assert out.returncode != 0 and "how many hosts? HOSTS=2" in out.stderr


def started(commands, folder):
    "Outputs of commands that run beside each other, each (arguments, variables)"
    base = dict(os.environ, OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo", PYTHON=sys.executable, PYTHONPATH=str(ROOT))
    run = lambda c: subprocess.run(c[0], capture_output=True, text=True, cwd=folder, env=base | c[1], timeout=300)
    with ThreadPoolExecutor(len(commands)) as pool: outs = list(pool.map(run, commands))
    assert all(o.returncode == 0 for o in outs), "\n".join(o.stderr[-2000:] for o in outs)
    return "".join(o.stdout for o in outs)


@pytest.mark.long
def test_two_hosts_train_one_model(tmp_path):
    "torchrun.sh on two hosts, both this one, with the program that the page names"
    save_words(tmp_path / "model")
    (tmp_path / "text.txt").write_text("a b c d e f a b c d\n" * 200)
    line = [
        LAUNCH / "torchrun.sh", ROOT / "scripts" / "train.py", "--model", "model", "--text", "text.txt", "--full",
        "--lr", "1e-2", "--length", "16", "--steps", "6", "--offload", "0", "--out", "tuned"]
    here = dict(HOSTS="2", HEAD="127.0.0.1", PORT=str(free_port()), GPUS="1")
    out = started([(line, here)] * 2, tmp_path)
    found = re.findall(r"(\d) processes, held-out loss ([\d.]+) → ([\d.]+)", out)
    assert len(found) == 1 and found[0][0] == "2" and float(found[0][2]) < float(found[0][1]), out
    assert (tmp_path / "tuned" / "config.json").is_file()


def test_slurm_starts_it_on_every_host(tmp_path):
    "With a scontrol that knows three hosts and an srun that starts its command once for each; prints what would run"
    (tmp_path / "bin").mkdir()
    programs = {"scontrol": 'printf "node0\\nnode1\\nnode2\\n"'}
    programs["srun"] = 'shift; for i in 0 1 2; do "$@"; done'
    for name, text in programs.items():
        (tmp_path / "bin" / name).write_text(f"#!/usr/bin/env bash\nset -e\n{text}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    env = dict(
        PATH=f"{tmp_path / 'bin'}:{os.environ['PATH']}", SLURM_JOB_NODELIST="node[0-2]", SLURM_JOB_ID="123456",
        SLURM_GPUS_ON_NODE="8", SLURM_SUBMIT_DIR=str(ROOT), PYTHON="echo")
    lines = started(
        [([LAUNCH / "slurm.sh", "scripts/train.py", "--text", "two words.txt"], env)], tmp_path).splitlines()
    assert (
        lines
        == [
            "-m torch.distributed.run --nnodes 3 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint node0:23456 "
            "--rdzv-id 123456 scripts/train.py --text two words.txt"
        ]
        * 3
    )


@pytest.mark.long
def test_the_operators_variables_are_enough(tmp_path):
    "torchrun without arguments, as in the pod, with what the operator sets for two hosts"
    (tmp_path / "program.py").write_text(PROGRAM)
    port = str(free_port())
    line = [sys.executable, "-m", "torch.distributed.run", "program.py"]
    pods = [
        (
            line,
            dict(
                PET_NNODES="2", PET_NODE_RANK=str(i), PET_NPROC_PER_NODE="1", PET_MASTER_ADDR="127.0.0.1",
                PET_MASTER_PORT=port),
        )
        for i in range(2)
    ]
    assert sorted(started(pods, tmp_path).split("\n")) == ["", "rank 0 of 2, sum 3", "rank 1 of 2, sum 3"]

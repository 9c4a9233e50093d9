"The machine at hand is measured once, its record is kept by what it depends on, and nothing else is ever measured."
import dataclasses, json, logging, math, time, timeit

import pytest
import torch

from bmlab.core import format_bytes
from bmlab.files import FileError
from bmlab.infer.placement import CPU, plan_inference
from bmlab.plan import machine as M
from bmlab.plan.machine import DATASHEETS, MACHINES, at_hand, depends_on, machine, measure, read_record, record_path
from helpers.fresh import fresh_python


@pytest.fixture
def cache(tmp_path, monkeypatch):
    "A cache of the test's own, in which measuring is allowed"
    monkeypatch.setenv("BMLAB_CACHE", str(tmp_path))
    monkeypatch.delenv("BMLAB_MEASURE", raising=False)
    return tmp_path


@pytest.fixture
def counted(cache, monkeypatch):
    "Measuring takes no time and is counted"
    calls = []
    def now(device, long, room, told):
        told("nothing")
        calls.append((device.type, torch.is_grad_enabled(), torch.is_inference_mode_enabled(), room))
        found = dict(flops=1e9 * len(calls), decoding={"int4": 0.5}, source="measured now")
        return dataclasses.replace(CPU, name="cpu×1", **found)
    monkeypatch.setattr(M, "_measure_now", now)
    return calls


def test_measured_once_and_kept_as_json(counted):
    first, second = measure(), at_hand("cpu")
    assert len(counted) == 1 and first == dataclasses.replace(second, source="measured now")
    assert second.source.startswith("measured 2") and second.decoding == {"int4": 0.5}
    said = json.loads(record_path("cpu").read_text())
    assert said["depends_on"] == depends_on("cpu") and said["machine"]["flops"] == 1e9
    assert measure(refresh=True).flops == 2e9 and measure().flops == 2e9 and len(counted) == 2
    assert measure(host_memory="8GiB").host_memory == 8 << 30 and len(counted) == 2


@pytest.mark.parametrize("change", [("torch", "9.0"), ("threads", 77), ("cpu", "another"), ("record", 99)])
def test_anything_that_it_depends_on_is_a_key(counted, monkeypatch, change):
    measure()
    before, path = depends_on("cpu"), record_path("cpu")
    monkeypatch.setattr(M, "depends_on", lambda device: before | dict([change]))
    assert record_path("cpu") != path
    measure()
    assert len(counted) == 2 and path.exists() and record_path("cpu").exists()


@pytest.mark.parametrize("torn", ["", "{", "[]", '{"depends_on": {}}', None])
def test_a_damaged_record_is_measured_anew(counted, torn, caplog):
    measure()
    path = record_path("cpu")
    said = json.loads(path.read_text())
    if torn is None: torn = json.dumps(said | {"machine": said["machine"] | {"hbm": -1}})
    path.write_text(torn)
    with pytest.raises(FileError, match="refresh=True"): read_record(path)
    assert measure().flops == 2e9 and len(counted) == 2
    assert read_record(path).flops == 2e9


def test_a_record_of_a_later_version_keeps_what_is_known(counted):
    measure()
    path = record_path("cpu")
    said = json.loads(path.read_text())
    path.write_text(json.dumps(said | {"machine": said["machine"] | {"of_tomorrow": 1.0}, "more": [1]}))
    assert measure().flops == 1e9 and len(counted) == 1


def test_two_processes_measure_once(cache):
    program = """
        import dataclasses, os, sys, threading, time
        from pathlib import Path
        from bmlab.infer.placement import CPU
        from bmlab.plan import machine as M
        folder, children = Path(sys.argv[1]), []
        def now(device, long, room, told):
            (folder / f"began-{os.getpid()}-{threading.get_ident()}").touch()
            while not (folder / "go").exists(): time.sleep(.01)
            return dataclasses.replace(CPU, flops=3e9)
        def one():
            assert M.measure().flops == 3e9
        M._measure_now = now
        for _ in range(2):
            if not (child := os.fork()):
                threads = [threading.Thread(target=one) for _ in range(2)]
                for t in threads: t.start()
                for t in threads: t.join()
                os._exit(0 if M.measure().flops == 3e9 else 1)
            children.append(child)
        while not list(folder.glob("began-*")): time.sleep(.01)
        print(M.record_path("cpu").exists(), flush=True)
        (folder / "go").touch()
        print([os.waitpid(c, 0)[1] for c in children])
    """
    assert fresh_python(program, cache, check=True).stdout == "False\n[0, 0]\n"
    assert len(list(cache.glob("began-*"))) == 1                        # of four who asked at once


def test_what_other_programs_take_of_a_cpu_is_not_measured(monkeypatch):
    "A call of 1 ms, held up to 5 ms in two thirds of the time, is one of 1 ms; and no more calls are made for that"
    clock, calls = [0.0], []
    monkeypatch.setattr(M.time, "perf_counter", lambda: clock[0])
    def call():
        calls.append(None)
        clock[0] += 1e-3 if len(calls) <= 22 else 5e-3
    assert M._seconds(call, torch.device("cpu"), 0.06) == pytest.approx(1e-3) and len(calls) == 2 + 60


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, lambda: torch.device("meta")])
def test_it_measures_under_any_mode(cache, monkeypatch, mode):
    monkeypatch.setattr(M, "_sizes", lambda gpu, long, room: (64, 1 << 20, 1 << 16, 1 << 10))
    monkeypatch.setattr(M, "_host_bytes", lambda: 128 << 20)
    monkeypatch.setattr(M, "_seconds", lambda call, device, at_least_s=0: (call(), 1e-3)[1])
    with mode(): m = measure()
    assert m.flops > 0 and m.decoding["int8"] > 0 and record_path("cpu").exists()
    assert torch.ones(1).device.type == "cpu" and torch.is_grad_enabled()


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_graph_that_was_there_before_can_be_replayed():
    "It remembers where cuBLAS had its workspace, which measuring must not give back"
    a, b = torch.randn(64, 1 << 16, device="cuda"), torch.randn(1 << 16, 64, device="cuda")
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side): want = a.bfloat16() @ b.bfloat16()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=side): got = a.bfloat16() @ b.bfloat16()
    with M._plainly(torch.device("cuda", 0)): a.half() @ b.half()
    other = [torch.full((1 << 20,), 7.0, device="cuda") for _ in range(64)]
    for _ in range(2):
        got.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(got, want)
    assert all((t == 7).all() for t in other)


def test_a_small_pool_has_no_whole_heads_of_narrow_blocks(monkeypatch):
    "There widths are divided by four; the plan takes the attention of usual blocks for all"
    from bmlab.plan import roofline as R
    asked = []
    def attention(bits, device, dtype, pool, scale, width=1, held=()):
        if held: return 0.0, 0.0, [dict(seconds=3e-6), dict(seconds=5e-6)]
        head = 128 if width else 64
        assert not (R.WIDTHS[width][0] // scale) % (4 * head), "whole heads, four of queries for one of keys"
        asked.append((bits, width))
        return 2e-6, 1e-12, []
    monkeypatch.setattr(R, "measure_attention", attention)
    monkeypatch.setattr(R, "measure_experts", lambda *a: (1e-6, 1e-12, []))
    monkeypatch.setattr(R, "measure_small", lambda *a: (dict(kernel_s=1e-6), []))
    monkeypatch.setattr(R, "_measure_flash", lambda *a: 0.5)
    monkeypatch.setattr(R, "measure_look", lambda *a: 1e-5)
    monkeypatch.setattr(R, "measure_host", lambda *a: {})
    given = torch.device("cpu"), torch.bfloat16, 1e12, 1e14, 1e-5, torch.zeros(8)
    for scale in (1, 4):
        asked.clear()
        found, _ = R._on_a_gpu(*given, scale, lambda what: None, {}, [])
        assert [(16, 1), (8, 1), (4, 1)] == [a for a in asked if a[1]] and len(asked) == (6 if scale == 1 else 3)
        assert ("attend_packed_narrow_s" in found) == (scale == 1) and R.Decoding(**found).flash_64 == 0.5
        assert math.isclose(found["far_s"], 2e-6)


def test_off_measures_nothing_and_keeps_nothing(counted, monkeypatch):
    monkeypatch.setenv("BMLAB_MEASURE", "off")
    assert at_hand("cpu", CPU) is CPU and machine(None).name == "h200" and not counted
    assert measure().flops == 1e9 and not record_path("cpu").exists()   # who asks for it by name gets it


def test_a_plan_without_a_name_uses_the_record(counted):
    from bmlab.models.load import build
    model = build("smollm2-135m", device="meta", random=False)
    plan = plan_inference(model, max_ctx=64)
    assert plan.machine["name"] == "cpu×1" and plan.decoding["int4"] == 0.5 and len(counted) == 1
    plan_inference(model, max_ctx=64)
    plan_inference(model, max_ctx=64, machine="h200")
    assert len(counted) == 1
    assert counted[0][1:3] == (True, False)


def test_a_cache_that_cannot_be_written_is_said(counted, cache, monkeypatch, caplog):
    (cache / "file").touch()
    monkeypatch.setenv("BMLAB_CACHE", str(cache / "file"))
    with caplog.at_level(logging.WARNING, "bmlab"): assert measure().flops == 1e9
    assert "not kept" in caplog.text


class Card:
    "What torch says of a GPU that nobody knows"
    name, total_memory, multi_processor_count = "Some Card 9000", 24 << 30, 60


@pytest.fixture
def unknown_card(monkeypatch, counted):
    free = [20 << 30]
    for name, value in dict(
        is_available=lambda: True, get_device_properties=lambda d: Card, get_device_name=lambda d=None: Card.name,
        device_count=lambda: 2, mem_get_info=lambda d=None: (free[0], 24 << 30), memory_reserved=lambda d=None: 0,
        memory_allocated=lambda d=None: 0, is_current_stream_capturing=lambda: False).items():
        monkeypatch.setattr(torch.cuda, name, value)
    import contextlib
    monkeypatch.setattr(M, "_plainly", lambda device: contextlib.nullcontext())
    return free


def test_an_unknown_card_is_measured(unknown_card, counted):
    assert M.nearest(Card.name) is None
    machine(None)
    assert machine(None).flops == 1e9 and [c[0] for c in counted] == ["cuda"]
    said = json.loads(record_path("cuda").read_text())["depends_on"]
    assert said["card"] == "Some Card 9000" and said["gpus"] == 2 and said["driver"]
    assert machine(None, measured=False).gpu_memory == 24 << 30 and len(counted) == 1


def test_a_nearly_full_card_takes_small_buffers_and_keeps_nothing(unknown_card, counted, caplog):
    unknown_card[0] = 600 << 20
    with caplog.at_level(logging.WARNING, "bmlab"): machine(None)
    assert "nearly full" in caplog.text and counted[0][3] == 300 << 20 and not record_path("cuda").exists()
    assert machine(None).flops == 1e9 and len(counted) == 1             # (this process knows it)
    M._BRIEFLY.clear()
    assert M._sizes(True, 1, 300 << 20)[0] < 8192
    unknown_card[0] = 4 << 20
    with caplog.at_level(logging.WARNING, "bmlab"): assert machine(None).source != "measured now"
    assert "too little for measuring" in caplog.text and len(counted) == 1


def test_measuring_keeps_a_limit(unknown_card, counted, caplog):
    with caplog.at_level(logging.WARNING, "bmlab"): assert machine(None, room=300 << 20).source != "measured now"
    assert "without a limit, keeps a record" in caplog.text and not counted
    machine(None, room=2 << 30)
    assert counted[0][3] == 2 << 30
    assert machine(None, room=300 << 20).flops == 1e9                   # a record needs no room


def test_presets_are_complete_and_marked():
    named = "h200 b200 h100-80 h100-nvl h100-pcie a100-80 a100-40 l40s l4 a10g t4 v100-32 rtx3090 rtx4090 rtx5090"
    assert set(named.split()) <= MACHINES.keys() and set(named.split()) == DATASHEETS.keys()
    for name, m in MACHINES.items():
        assert "datasheet" in m.source and (m.source == "datasheet" or name == "h200")
        if name not in DATASHEETS: continue
        s = DATASHEETS[name]
        assert 0.7 < m.flops / s.tensor / 1e12 < 0.86 and 0.8 < m.hbm / s.memory / 1e9 < 0.95, name
        assert 0.7 < m.h2d / s.link / 1e9 < 0.9 and abs(m.gpu_memory / (s.mib << 20) - 1) < 0.01, name
        assert m.units == s.units and s.int8 >= s.fp8 and format_bytes(m.gpu_memory)


@pytest.mark.parametrize("wrong, right", [
    ("h100", "'h100-80'"), ("A100", "'a100-80'"), ("RTX 4090", "'rtx4090'"), ("NVIDIA L40S", "'l40s'"),
    ("h20", "'h200'"), ("Tesla T4", "'t4'")])
def test_a_wrong_name_is_told_the_right_one(wrong, right):
    with pytest.raises(ValueError, match="is unknown") as e: machine(wrong)
    assert right in str(e.value) and "machine=None measures" in str(e.value)


def routed(**fields):
    "Milliseconds of a step of Qwen3-30B-A3B's shape in 4 bits at 1 and 8 rows, with some of `Decoding` as measured"
    from bmlab.models.zoo import build
    model = build("qwen3-30b-a3b", device="meta", dtype=torch.bfloat16).eval()
    h100 = dataclasses.replace(machine("h100-80"), decoding=dict(machine("h100-80").decoding or {}) | fields)
    plan = plan_inference(model, bits=4, max_batch=8, max_ctx=256, machine=h100)
    return [1e3 * rows / plan.tokens_per_s(rows, 1.0, 64) for rows in (1, 8)]


def test_experts_that_were_measured_decide_what_a_mixture_takes():
    "48 layers of 8 experts, 3 · 2048 · 768 weights of 4.25 bits each: a pair reads its own; then the fixed time"
    kernel_s, read = 1e-6, 48 * 8 * 3 * 2048 * 768 * 4.25 / 8
    known = dict(kernel_s=kernel_s, experts_int4=0.5, experts_int4_s=10e-6)
    base, twice, later = routed(**known), routed(**known | dict(experts_int4=0.25)), routed(
        **known | dict(experts_int4_s=20e-6))
    hbm = machine("h100-80").hbm
    for i, rows in enumerate((1, 8)):
        assert twice[i] - base[i] == pytest.approx(1e3 * rows * read / hbm * (4 - 2), rel=0.02)
        assert later[i] - base[i] == pytest.approx(48 * 10e-3, rel=1e-6)


def test_a_token_s_experts_are_measured_by_their_kernels(monkeypatch):
    "Of two experts, once: Triton's interpreter takes seconds for each"
    from bmlab.plan import roofline
    from bmlab.plan.roofline import Decoding, measure_experts
    monkeypatch.setattr(roofline, "_CHOSEN", 2)
    monkeypatch.setattr(roofline, "graph_seconds", lambda calls, device: timeit.timeit(calls[0], number=1))
    pool = torch.randint(100, (1 << 20,), dtype=torch.uint8)
    for bits, a_weight in ((8, 1 + 4 / 128), (4, 4.25 / 8)):
        fixed, slow, points = measure_experts(bits, torch.device("cpu"), torch.float32, pool, 16)
        Decoding(**{f"experts_int{bits}": 1 / slow / 1e12, f"experts_int{bits}_s": fixed})
        for p in points:
            # the widths divide by 128; a scale of int8 is one for each row
            weights = p["flops"] / 2
            assert weights * a_weight * 0.95 < p["bytes"] <= weights * (a_weight + 0.02) and p["seconds"] > 0


def test_two_at_once_are_both_counted_while_both_go_on():
    "The other does not stop before the slower one has ended"
    each, beside = M._beside(lambda: time.sleep(0.2), lambda: time.sleep(0.002), seconds=0.3)
    assert 2 < each <= 5 and beside > 50
    calls = []
    with pytest.raises(ZeroDivisionError): M._beside(lambda: 1 / 0, lambda: (calls.append(1), time.sleep(0.01)))
    seen = len(calls)
    time.sleep(0.05)
    assert len(calls) == seen                                          # (no thread is left)


@pytest.mark.parametrize("c", [True, False])
def test_the_hosts_adam_is_what_an_optimizer_on_the_host_runs(c, monkeypatch):
    "Each element once a call, with C or with torch's three passes, on the threads that the lanes have"
    seen, threads = [], set()
    def note(weight, *rest, **how):
        seen.append(len(weight))
        threads.add(torch.get_num_threads())
    monkeypatch.setattr(M, "available", lambda: c)
    monkeypatch.setattr(M, "cpu_adamw_" if c else "_three_passes", note)
    monkeypatch.setattr(M, "host_threads", lambda: (2, 3))
    before = torch.get_num_threads()
    M._host_adam(10_001)()
    assert sorted(seen) == [5000, 5001] and threads == {3} and torch.get_num_threads() == before


def test_three_passes_are_a_step_of_adamw():
    torch.manual_seed(0)
    master, grad = torch.randn(2, 100)
    mine = torch.zeros(100).bfloat16(), grad.bfloat16(), master.clone(), torch.zeros(100), torch.zeros(100)
    M._three_passes(*mine)
    assert torch.equal(mine[0], mine[2].bfloat16()) and not torch.equal(mine[2], master)
    assert torch.allclose(mine[3], 0.1 * grad.bfloat16().float())


def test_lanes_beside_each_other_keep_their_measured_shares():
    from bmlab.plan.training import ADAM, LINK, host_rates
    m = dataclasses.replace(machine("h200"), host_adam=4e9, duplex=50e9, adam_beside=0.5, link_beside=0.8)
    assert host_rates(m, True) == pytest.approx((ADAM * 2e9, LINK * 40e9))
    assert host_rates(m, False) == pytest.approx((ADAM * 3e9, LINK * 45e9))

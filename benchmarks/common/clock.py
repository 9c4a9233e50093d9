"What the benchmarks of layers share: seconds of a call by CUDA graphs, and how fast memory moves."
import time

import torch


def seconds(calls, device="cuda", replays=7):
    """Seconds per call; on a GPU all calls in one CUDA graph, so launches cost nothing: median of replays. On a CPU
    the best of three turns"""
    times = []
    if device == "cpu":
        for _ in range(3):
            t = time.perf_counter()
            for call in calls: call()
            times.append((time.perf_counter() - t) / len(calls))
        return min(times)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            for call in calls[:2]: call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls: call()
    for _ in range(replays + 2):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop) / 1e3 / len(calls))
    return sorted(times[2:])[replays // 2]


def memory_rate(device="cuda", numbers=1 << 28):
    "Bytes a second of a pass over float32 numbers, read and written"
    a = torch.randn(numbers, device=device)
    b = torch.empty_like(a)
    # a kernel: a copy captured in a graph takes the slower copy engine
    return 2 * 4 * numbers / seconds([lambda: torch.neg(a, out=b)] * 4, device)

"""`python -m shardmuon bench ns`: errors and times of Newton-Schulz on this machine.

Owns what is measured and how: fresh random matrices, float64 for errors, medians of repeated runs
that take turns for times. Changes nothing.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from shardmuon.orthogonalize.checks import orthogonality_error
from shardmuon.orthogonalize.coefficients import schedule_of
from shardmuon.orthogonalize.newton_schulz import METHODS, newton_schulz
from shardmuon.planning.cost import newton_schulz_flops
from shardmuon.planning.report import table
from shardmuon.tools import accuracy

__all__ = ["run"]

GPU_SHAPES = (
    (8, 2048, 2048),
    (8, 2048, 8192),
    (4, 4096, 4096),
    (2, 4096, 14336),
    (16, 768, 3072),
    (16, 512, 2048),
)
CPU_SHAPES = ((1, 256, 256), (1, 256, 1024))
STEPS = (3, 5, 7, 10)
ROUNDS = 20

Call = Callable[[Tensor], object]


def run(graph: bool = False) -> None:
    """Print all tables. graph: time replays of CUDA graphs, so without the host's launches."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    dtype = torch.bfloat16 if cuda else torch.float32
    name = torch.cuda.get_device_name() if cuda else f"CPU, {torch.get_num_threads()} thread(s)"
    print(f"{name}, torch {torch.__version__}, {str(dtype).removeprefix('torch.')}\n")
    print("||X X^T - I|| / sqrt(n) of a Gaussian 256 x 1024 matrix, by number of steps\n")
    _print_errors(device, dtype)
    print(f"\nlargest relative error of {accuracy.STEPS} steps against float64, by kind of matrix;")
    print("bounds of the first three kinds and of the others\n")
    accuracy.print_errors(device)
    print("\nmilliseconds of 5 steps with keller, and TFLOP/s as if by the standard method\n")
    _print_times(device, dtype, GPU_SHAPES if cuda else CPU_SHAPES, graph and cuda)


def _print_errors(device: torch.device, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(1, 256, 1024, device=device)
    rows = []
    for preset in ("keller", "cubic"):
        for method in METHODS:
            schedules = [schedule_of(preset, steps) for steps in STEPS]
            errors = [
                orthogonality_error(newton_schulz(x, schedule, 1e-7, dtype, method)[0])
                for schedule in schedules
            ]
            rows.append((preset, method, *(f"{error:.2e}" for error in errors)))
    print("\n".join(table(("preset", "method", *map(str, STEPS)), rows)))


def _print_times(
    device: torch.device,
    dtype: torch.dtype,
    shapes: tuple[tuple[int, int, int], ...],
    graph: bool,
) -> None:
    rows = []
    for n, r, k in shapes:
        inputs = [torch.randn(n, r, k, device=device).to(dtype) for _ in range(2)]
        calls: list[Call] = [partial(_orthogonalize, method) for method in METHODS]
        if graph:
            calls = [_captured(call, inputs) for call in calls]
        times = _take_turns(calls, inputs)
        work = n * newton_schulz_flops(r, k, schedule_of("keller", 5).segments) / 1e9
        cells = [f"{ms:.3f} ({work / ms:.0f})" for ms in times]
        rows.append((f"{n} x {r} x {k}", *cells, METHODS[times.index(min(times))]))
    print("\n".join(table(("batch x rows x cols", *METHODS, "fastest"), rows)))


def _orthogonalize(method: str, x: Tensor) -> Tensor:
    return newton_schulz(x, schedule_of("keller", 5), 1e-7, x.dtype, method)


def _captured(call: Call, inputs: Sequence[Tensor]) -> Call:
    """`call` as replays of graphs, one for each input."""
    graphs: dict[int, torch.cuda.CUDAGraph] = {}
    for x in inputs:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            call(x)  # compiles and chooses kernels, which must not happen in a capture
        torch.cuda.current_stream().wait_stream(side)
        graphs[id(x)] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[id(x)]):
            call(x)
    return lambda x: graphs[id(x)].replay()


def _take_turns(calls: Sequence[Call], inputs: Sequence[Tensor]) -> list[float]:
    """Median milliseconds of each call; inputs rotate, so that no cache holds them."""
    times: list[list[float]] = [[] for _ in calls]
    for number in range(ROUNDS + 3):
        for call, mine in zip(calls, times, strict=True):
            ms = _milliseconds(call, inputs[number % len(inputs)])
            if number >= 3:
                mine.append(ms)
    return [statistics.median(mine) for mine in times]


def _milliseconds(call: Call, x: Tensor) -> float:
    if not x.is_cuda:
        start = time.perf_counter()
        call(x)
        return (time.perf_counter() - start) * 1e3
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    call(x)
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))

"""`python -m shardmuon bench ns`: errors and times of Newton-Schulz on this machine.

Owns what is measured and how: fresh random matrices, float64 for errors, medians of repeated runs
that take turns for times, batches run as the optimizer runs them. Changes nothing.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from shardmuon.orthogonalize import replay
from shardmuon.orthogonalize.checks import orthogonality_error
from shardmuon.orthogonalize.choice import Problem, fastest, guess, milliseconds
from shardmuon.orthogonalize.coefficients import schedule_of
from shardmuon.orthogonalize.newton_schulz import METHODS, newton_schulz
from shardmuon.planning.cost import newton_schulz_flops
from shardmuon.planning.models import MODELS
from shardmuon.planning.planner import LARGEST_BUCKET
from shardmuon.planning.report import table
from shardmuon.tools import accuracy

__all__ = ["run"]

Shape = tuple[int, int, int]

GPU_SHAPES: tuple[Shape, ...] = (
    (8, 2048, 2048),
    (8, 2048, 8192),
    (4, 4096, 4096),
    (2, 4096, 14336),
    (16, 768, 3072),
    (16, 512, 2048),
)
CPU_SHAPES: tuple[Shape, ...] = ((1, 256, 256), (1, 256, 1024))
STEPS = (3, 5, 7, 10)
ROUNDS = 20
MOST_COUNT = 16
"""Largest batch of a model's small matrices that is timed."""

Call = Callable[[Tensor], object]


def run(models: bool = False, compiled: bool = False) -> None:
    """Print all tables.

    models: time the shapes of well-known models too, in batches of a bucket. compiled: time the
    standard method through torch.compile as well.
    """
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
    peak = _peak(device, dtype)
    print(f"\na product of large matrices reaches {peak:.3g} TFLOP/s; 5 steps with keller:")
    print("milliseconds, and TFLOP/s as if by the standard method\n")
    _print_times(device, dtype, GPU_SHAPES if cuda else CPU_SHAPES, peak, compiled)
    if models:
        print("\nthe same for the matrices of models, in batches of a bucket\n")
        _print_times(device, dtype, _model_shapes(dtype), peak, compiled)


def _model_shapes(dtype: torch.dtype) -> tuple[Shape, ...]:
    """Distinct shapes of all named models, each in the batch that fits in a bucket."""
    sides = {(min(r, c), max(r, c)) for shapes in MODELS.values() for _, r, c in shapes}
    room = LARGEST_BUCKET // dtype.itemsize
    return tuple((max(1, min(MOST_COUNT, room // (r * k))), r, k) for r, k in sorted(sides))


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


def _peak(device: torch.device, dtype: torch.dtype) -> float:
    """TFLOP/s of a batch of square products, the fastest of ten."""
    n, side = (4, 4096) if device.type == "cuda" else (1, 512)
    x = torch.randn(n, side, side, device=device).to(dtype)
    best = min(milliseconds(lambda y: y @ y.mT, x) for _ in range(10))
    return 2 * n * side**3 / best / 1e9


def _print_times(
    device: torch.device, dtype: torch.dtype, shapes: Sequence[Shape], peak: float, compiled: bool
) -> None:
    extra = ("compiled",) if compiled else ()
    header = ("batch x rows x cols", *METHODS, *extra, "taken", "guess", "of peak")
    rows = []
    segments = schedule_of("keller", 5).segments
    for n, r, k in shapes:
        inputs = [torch.randn(n, r, k, device=device).to(dtype) for _ in range(2)]
        calls: list[Call] = [_as_run(partial(_orthogonalize, m), inputs[0]) for m in METHODS]
        if compiled:
            calls.append(torch.compile(partial(_orthogonalize, "standard"), dynamic=False))
        times = _take_turns(calls, inputs)
        work = n * newton_schulz_flops(r, k, segments) / 1e9
        taken = fastest(dict(zip(METHODS, times, strict=False))).method
        rate = work / times[METHODS.index(taken)]
        rows.append(
            (
                f"{n} x {r} x {k}",
                *(f"{ms:.3f} ({work / ms:.0f})" for ms in times),
                taken,
                guess(Problem(n, r, k, str(dtype), segments)),
                f"{rate / peak:.2f}",
            )
        )
    print("\n".join(table(header, rows)))


def _orthogonalize(method: str, x: Tensor) -> Tensor:
    return newton_schulz(x, schedule_of("keller", 5), 1e-7, x.dtype, method)


def _as_run(call: Callable[[Tensor], Tensor], example: Tensor) -> Call:
    """`call` as the optimizer would run it."""
    return replay.Replay(call, example) if replay.pays(example) else call


def _take_turns(calls: Sequence[Call], inputs: Sequence[Tensor]) -> list[float]:
    """Median milliseconds of each call; inputs rotate, so that no cache holds them."""
    times: list[list[float]] = [[] for _ in calls]
    for number in range(ROUNDS + 3):
        for call, mine in zip(calls, times, strict=True):
            ms = milliseconds(call, inputs[number % len(inputs)])
            if number >= 3:
                mine.append(ms)
    return [statistics.median(mine) for mine in times]

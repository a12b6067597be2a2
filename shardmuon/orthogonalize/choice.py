"""Which Newton-Schulz method is fastest for a batch on this device.

Owns the measurement, the cache file that remembers it, and what is taken where there was no time
to measure. Each process asks for itself; that ranks take the same answer is not decided here.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardmuon.orthogonalize import replay
from shardmuon.orthogonalize.coefficients import KELLER, Schedule
from shardmuon.orthogonalize.newton_schulz import METHODS, newton_schulz
from shardmuon.orthogonalize.products import KERNEL_VERSION

__all__ = ["Answer", "Problem", "cache_file", "choose_methods", "guess", "measure", "milliseconds"]

BUDGET_S = 2.0
# A method must beat the standard one by this much: what is nearer is noise, and the standard
# method has the bits of torch.
MARGIN = 0.97
MOST_ROUNDS, ROUNDS_S = 5, 0.02


@dataclass(frozen=True, order=True)
class Problem:
    """A batch of equal matrices as Newton-Schulz gets them.

    count: matrices in the batch. rows, cols: of one, rows <= cols. dtype: torch's name of the
    dtype that comes in and goes out. segments: steps between two starts of the gram method.
    """

    count: int
    rows: int
    cols: int
    dtype: str
    segments: tuple[int, ...]

    def __str__(self) -> str:
        steps = "+".join(map(str, self.segments))
        return f"{self.count} x {self.rows} x {self.cols} {self.dtype}, {steps} steps"


class Answer(NamedTuple):
    """A method, and milliseconds that it takes for the whole batch, if they are known."""

    method: str
    ms: float | None = None


def choose_methods(
    problems: Iterable[Problem], device: torch.device, budget_s: float = BUDGET_S
) -> dict[Problem, Answer]:
    """The method for each problem: from the cache file, else measured, else guessed.

    On a CPU always "standard", whose bits depend on no measurement. The largest problems are
    measured first, until `budget_s` seconds are over, compilation of kernels included; what was
    measured is remembered, so that a later process measures the rest.
    """
    problems = set(problems)
    if device.type != "cuda":
        return dict.fromkeys(problems, Answer("standard"))
    path = cache_file(device)
    known = _read(path)
    deadline = time.monotonic() + budget_s
    found: dict[str, dict[str, float]] = {}
    for problem in sorted(problems, key=lambda p: (-p.count * p.rows**2 * p.cols, p)):
        if str(problem) not in known and time.monotonic() < deadline:
            found[str(problem)] = measure(problem, device)
    if found:
        _write(path, {**_read(path), **found})
    times = {**known, **found}
    return {p: fastest(times[str(p)]) if str(p) in times else Answer(guess(p)) for p in problems}


def fastest(times: Mapping[str, float]) -> Answer:
    """The quickest method; "standard" unless another is clearly quicker."""
    best = min(times, key=lambda method: times[method])
    best = best if times[best] < MARGIN * times["standard"] else "standard"
    return Answer(best, times[best])


def guess(problem: Problem) -> str:
    """A method without measurement, from those that were the quickest on an H200.

    Source: the table of `python -m shardmuon bench ns --models` in docs/benchmarks.md.
    """
    if problem.rows < 512:
        return "standard"
    return "gram" if problem.cols >= 2 * problem.rows else "symmetric"


def measure(problem: Problem, device: torch.device) -> dict[str, float]:
    """Milliseconds of each method on a random batch, run as a step would run it.

    Methods take turns, so that a change of the clock meets all of them.
    """
    shape = (problem.count, problem.rows, problem.cols)
    x = torch.randn(shape, device=device, dtype=getattr(torch, problem.dtype))
    schedule = Schedule((KELLER,) * sum(problem.segments), segments=problem.segments)
    runs: dict[str, Callable[[Tensor], Tensor]] = {}
    for method in METHODS:
        runs[method] = partial(_run, schedule, method)
        if replay.pays(x):
            runs[method] = replay.Replay(runs[method], x)
    times: dict[str, list[float]] = {method: [] for method in METHODS}
    first = {method: milliseconds(run, x) for method, run in runs.items()}
    for _ in range(max(1, min(MOST_ROUNDS, int(ROUNDS_S * 1e3 / first["standard"])))):
        for method, run in runs.items():
            times[method].append(milliseconds(run, x))
    return {method: statistics.median(each) for method, each in times.items()}


def _run(schedule: Schedule, method: str, x: Tensor) -> Tensor:
    return newton_schulz(x, schedule, 1e-7, x.dtype, method)


def milliseconds(run: Callable[[Tensor], object], x: Tensor) -> float:
    """Time of one call, on the device where `x` lies."""
    if not x.is_cuda:
        start = time.perf_counter()
        run(x)
        return (time.perf_counter() - start) * 1e3
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run(x)
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))


# -- the cache file -----------------------------------------------------------------------------


def cache_file(device: torch.device) -> Path:
    """Where times on this kind of device are kept, for these versions of what computes them.

    In the folder $SHARDMUON_CACHE, else $XDG_CACHE_HOME/shardmuon, else ~/.cache/shardmuon.
    """
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(os.environ.get("SHARDMUON_CACHE") or Path(home) / "shardmuon")
    try:
        triton = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        triton = "none"
    versions = f"torch {torch.__version__} triton {triton} kernel {KERNEL_VERSION}"
    name = f"{torch.cuda.get_device_name(device)} {versions}"
    return folder / (re.sub(r"[^A-Za-z0-9.+]+", "-", name) + ".json")


def _read(path: Path) -> dict[str, dict[str, float]]:
    """Times by problem; nothing where the file is missing or is not one of ours."""
    try:
        content: Any = json.loads(path.read_text())
        return {
            str(problem): {method: float(times[method]) for method in METHODS}
            for problem, times in content.items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _write(path: Path, times: Mapping[str, Mapping[str, float]]) -> None:
    """Replace the file in one go: others may read it meanwhile."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(f".{os.getpid()}.tmp")
        draft.write_text(json.dumps(times, indent=1, sort_keys=True) + "\n")
        draft.replace(path)
    except OSError as error:
        warnings.warn(
            f"Newton-Schulz will be measured again by the next process: {error}", stacklevel=2
        )

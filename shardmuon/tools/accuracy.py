"""How far Newton-Schulz strays from float64, by preset, method, dtype and kind of matrix.

Owns the kinds of matrices and the bounds on the error, which tests hold every cell to. An error is
relative, in the Frobenius norm, against the standard iteration of the same schedule in float64:
what the polynomial itself leaves is no error here.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from shardmuon.orthogonalize.coefficients import PRESETS, schedule_of
from shardmuon.orthogonalize.newton_schulz import METHODS, iteration_dtype, newton_schulz
from shardmuon.planning.report import table

__all__ = ["BOUNDS", "KINDS", "bound", "conditioned", "error", "errors", "print_errors"]

KINDS = ("gaussian", "spiked", "1e2", "1e4", "1e6", "half")
"""Normal entries; those and one singular value three times the largest; a condition number, with
singular values evenly spaced on a logarithmic scale; normal entries with half the rank."""

WELL = ("gaussian", "spiked", "1e2")
SHAPES = ((256, 256), (256, 1024))
DTYPES = (torch.float32, torch.bfloat16)
STEPS = 5

BOUNDS = {
    "cubic": (3.0, 3.0),
    "keller": (16.0, 45.0),
    "you": (12.0, 45.0),
    "polar_express": (16.0, 70.0),
}
"""Largest error of 5 steps in units of roundoff: of kinds in `WELL`, and of the others. Where
singular values are small, the rounding of the input itself grows by the product of all slopes."""


def bound(preset: str, kind: str, inner: torch.dtype, dtype: torch.dtype) -> float:
    """Largest error where iterations in `inner` are rounded to `dtype` at the end."""
    units = BOUNDS[preset][0 if kind in WELL else 1]
    return units * _roundoff(inner) + (_roundoff(dtype) if dtype != inner else 0.0)


def _roundoff(dtype: torch.dtype) -> float:
    """Largest relative error of rounding to the nearest; in float32, what sums may add to it.

    Products in smaller dtypes are summed in float32, so that their sums count for nothing.
    """
    eps = torch.finfo(dtype).eps
    return 8 * eps if dtype == torch.float32 else eps / 2


def conditioned(kind: str, rows: int, cols: int, seed: int = 0) -> Tensor:
    """A float64 matrix of that kind on the CPU, the same on every machine but for rounding."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, cols, generator=generator, dtype=torch.float64)
    if kind == "gaussian":
        return x
    u, s, v = torch.linalg.svd(x, full_matrices=False)
    if kind == "spiked":
        s[0] *= 3
    elif kind == "half":
        s[len(s) // 2 :] = 0
    else:
        s = torch.logspace(0, -float(kind[2:]), len(s), dtype=torch.float64)
    out: Tensor = (u * s) @ v
    return out


def error(value: Tensor, right: Tensor) -> float:
    """||value - right|| / ||right||."""
    return float((value.double() - right).norm() / right.norm())


def errors(
    preset: str,
    method: str,
    dtype: torch.dtype,
    device: torch.device,
    shapes: Sequence[tuple[int, int]],
) -> dict[str, float]:
    """The largest error over `shapes`, by kind."""
    schedule = schedule_of(preset, STEPS)
    worst = dict.fromkeys(KINDS, 0.0)
    for kind in KINDS:
        for shape in shapes:
            x, right = _problem(preset, kind, *shape)
            out = newton_schulz(x.to(device), schedule, None, dtype, method)[0].cpu()
            found = error(out, right)
            worst[kind] = max(worst[kind], found if math.isfinite(found) else math.inf)
    return worst


@functools.cache
def _problem(preset: str, kind: str, rows: int, cols: int) -> tuple[Tensor, Tensor]:
    """A batch of one matrix in float32, and its result in float64."""
    x = conditioned(kind, rows, cols).float()
    return x[None], newton_schulz(x.double(), schedule_of(preset, STEPS), None, torch.float64)


def print_errors(device: torch.device) -> None:
    """Print a row per preset, method and dtype, with the bounds of the row."""
    header = ("preset", "method", "dtype", "iterates in", *KINDS, "bounds")
    rows = []
    for preset in sorted(PRESETS):
        for method in METHODS:
            for dtype in DTYPES:
                inner = iteration_dtype(schedule_of(preset, STEPS), method, dtype, device)
                found = errors(preset, method, dtype, device, SHAPES)
                limits = (bound(preset, kind, inner, dtype) for kind in (WELL[0], KINDS[-1]))
                cells = [*(f"{found[kind]:.1e}" for kind in KINDS)]
                names = (str(each).removeprefix("torch.") for each in (dtype, inner))
                rows.append(
                    (preset, method, *names, *cells, ", ".join(f"{each:.1e}" for each in limits))
                )
    print("\n".join(table(header, rows)))

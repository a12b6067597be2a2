"""Where the gram method should start anew: a search, on a CPU, for how float16 behaves on a GPU.

    python -m tests.orthogonalize.restarts [PRESET ...]

Emulates kernels that sum in float32 and round each product once. For a number of steps it tries
every way to cut them into segments, fewest segments first, which are the cheapest: a segment of L
steps costs 1.5 r + 2 L - 1.5 products of rows x rows matrices, r = cols / rows, as the formula in
planning/cost.py says. It takes the first number of segments with a cut whose error is small enough,
and of its cuts the best.

Small enough, for each kind of matrix by itself: at most half the error of the standard iteration in
bfloat16, which this method replaces; or, where Newton-Schulz itself magnifies any rounding (many
steps with keller), at most a quarter above the error of a new start in every step.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardmuon.orthogonalize.coefficients import PRESETS, Schedule, Triple, schedule_of
from shardmuon.orthogonalize.newton_schulz import newton_schulz
from shardmuon.planning.report import table
from shardmuon.tools.accuracy import KINDS, conditioned

__all__ = ["Emulation", "Found", "search"]

SHAPES = ((256, 256), (256, 1024), (1000, 264))
SEEDS = 2
NUMBERS = (3, 5, 7, 10)

OF_BFLOAT16, OF_EVERY_STEP = 0.5, 1.25

Cut = tuple[int, ...]
"""Lengths of segments."""


def product(a: Tensor, b: Tensor, dtype: torch.dtype, alpha: float = 1.0) -> Tensor:
    """alpha a b^T rounded to `dtype`. All tensors hold such values, as float32."""
    return _rounded((a @ b.mT).mul_(alpha), dtype)


def _polynomial(r: Tensor, triple: Triple, dtype: torch.dtype, diagonal: bool) -> Tensor:
    """b r + c r r, plus a I if `diagonal`."""
    a, b, c = triple
    out = (r @ r.mT).mul_(c).add_(r, alpha=b)
    if diagonal:
        out.diagonal(dim1=-2, dim2=-1).add_(a)
    return _rounded(out, dtype)


def _rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype).float()


def standard(x: Tensor, triples: Sequence[Triple], dtype: torch.dtype) -> Tensor:
    """The standard iteration. x: [n, rows, cols], float32."""
    x = _rounded(x, dtype)
    for triple in triples:
        p = _polynomial(product(x, x, dtype), triple, dtype, diagonal=False)
        x = _rounded((p @ x).add_(x, alpha=triple[0]), dtype)
    return x


def gram(
    x: Tensor, triples: Sequence[Triple], dtype: torch.dtype, segments: int, only: Cut = ()
) -> Iterator[tuple[Cut, Tensor]]:
    """The gram iteration by every cut into that many segments, or by one. x: as above."""
    x = _rounded(x, dtype)
    if not triples:
        yield (), x
        return
    last = len(triples) - (segments - 1)  # one step at least is left for each other segment
    q, r = None, product(x, x, dtype)
    for length in range(1, last + 1):
        p = _polynomial(r, triples[length - 1], dtype, diagonal=True)
        q = p if q is None else product(p, q, dtype)
        if (segments > 1 or length == last) and (not only or length == only[0]):
            start = product(q, x.mT, dtype)
            for rest, out in gram(start, triples[length:], dtype, segments - 1, only[1:]):
                yield (length, *rest), out
        if length < last:
            r = product(product(p, r, dtype), p, dtype)


class Emulation:
    """Errors of one schedule on matrices of all kinds; the worst of some shapes and seeds."""

    def __init__(
        self, schedule: Schedule, shapes: Sequence[tuple[int, int]] = SHAPES, seeds: int = SEEDS
    ) -> None:
        self._schedule, self._seeds = schedule, seeds
        self._inputs: list[tuple[Tensor, Tensor]] = []
        for rows, cols in shapes:
            each = [conditioned(kind, rows, cols, seed) for seed in range(seeds) for kind in KINDS]
            x = torch.stack(each)
            x = x.mT.contiguous() if rows > cols else x
            norm = torch.linalg.matrix_norm(x, keepdim=True) * schedule.margin
            right = newton_schulz(x, schedule, None, torch.float64)
            self._inputs.append(((x / norm).float(), right))

    def standard(self, dtype: torch.dtype) -> Tensor:
        """Errors by kind. [kinds]"""
        outs = [standard(x, self._schedule.triples, dtype) for x, _ in self._inputs]
        return self._errors(outs)

    def gram(self, dtype: torch.dtype, cut: Cut) -> Tensor:
        """Errors by kind. [kinds]"""
        triples = self._schedule.triples
        outs = [dict(gram(x, triples, dtype, len(cut), cut))[cut] for x, _ in self._inputs]
        return self._errors(outs)

    def all_cuts(self, segments: int) -> dict[Cut, Tensor]:
        """Errors by kind of every cut into that many segments, in float16."""
        triples = self._schedule.triples
        runs = [gram(x, triples, torch.float16, segments) for x, _ in self._inputs]
        errors: dict[Cut, Tensor] = {}
        for together in zip(*runs, strict=True):
            errors[together[0][0]] = self._errors([out for _, out in together])
        return errors

    def limits(self) -> Tensor:
        """The largest error that a cut may have, by kind. [kinds]"""
        every = (1,) * len(self._schedule.triples)
        coarse = OF_BFLOAT16 * self.standard(torch.bfloat16)
        return torch.maximum(coarse, OF_EVERY_STEP * self.gram(torch.float16, every))

    def _errors(self, outs: Sequence[Tensor]) -> Tensor:
        found = []
        for out, (_, right) in zip(outs, self._inputs, strict=True):
            differences = torch.linalg.matrix_norm(out.double() - right)
            each = (differences / torch.linalg.matrix_norm(right)).view(self._seeds, len(KINDS))
            found.append(each.nan_to_num(nan=float("inf")).amax(0))
        return torch.stack(found).amax(0)


@dataclass(frozen=True)
class Found:
    """A cut, and the largest quotient of its errors and their limits: it will do up to 1."""

    cut: Cut
    load: float


def search(emulation: Emulation, steps: int) -> list[Found]:
    """The best cut of each number of segments, up to the first that will do, which is the last."""
    limits = emulation.limits()
    best: list[Found] = []
    while not best or best[-1].load > 1:
        loads = {
            cut: float((errors / limits).max())
            for cut, errors in emulation.all_cuts(len(best) + 1).items()
        }
        cut = min(loads, key=lambda each: loads[each])
        best.append(Found(cut, loads[cut]))
        assert len(best) <= steps, "a new start in every step is within its own limit"
    return best


def main(names: Sequence[str]) -> None:
    rows = []
    for name in names or sorted(PRESETS):
        single = len(PRESETS[name].triples) == 1
        for steps in NUMBERS if single else (len(PRESETS[name].triples),):
            schedule = schedule_of(name, steps)
            emulation = Emulation(schedule)
            *fewer, found = search(emulation, steps)
            mine = emulation.gram(torch.float16, schedule.segments)
            load = float((mine / emulation.limits()).max())
            exact = (emulation.standard(torch.float16), emulation.standard(torch.bfloat16))
            coarse = emulation.gram(torch.bfloat16, schedule.segments)
            quotient = f"{float((coarse / exact[1]).max()):.1f}"
            rows.append(
                (
                    f"{name} {steps}",
                    " ".join(f"{_text(each.cut)} ({each.load:.2f})" for each in fewer[-1:]) or "-",
                    f"{_text(found.cut)} ({found.load:.2f})",
                    f"{_text(schedule.segments)} ({load:.2f})",
                    *(f"{_products(schedule, r):.1f}" for r in (1, 4)),
                    *(f"{float(each.max()):.1e}" for each in (mine, *exact)),
                    quotient,
                )
            )
            print(f"{name} {steps}: {rows[-1][2]}", file=sys.stderr, flush=True)
    print(
        "Cuts, and in brackets their largest error as a part of its limit. Products of the stored"
    )
    print("cut at r = cols / rows. Worst errors over all kinds.\n")
    header = ("preset, steps", "one segment less", "found", "stored", "r = 1", "r = 4")
    print("\n".join(table((*header, "fp16 gram", "fp16", "bf16", "in bf16"), rows)))


def _text(cut: Cut) -> str:
    return "+".join(map(str, cut))


def _products(schedule: Schedule, r: float) -> float:
    return sum(1.5 * r + 2 * length - 1.5 for length in schedule.segments)


if __name__ == "__main__":
    main(sys.argv[1:])

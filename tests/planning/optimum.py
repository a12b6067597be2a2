"""The best possible makespans, found without the planner.

Owns an exact solver for lists with few different costs, and the table `optimum.json` that holds its
answers for the models of `planning/models.py`. Matrices of one cost are alike, so what matters is
how many of each cost a rank carries. All arithmetic is on integers.

`python -m tests.planning.optimum` computes the table anew, in some ten minutes on one core.
"""

from __future__ import annotations

import json
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from heapq import heapreplace
from itertools import product
from pathlib import Path

import numpy as np
import numpy.typing as npt

from shardmuon.planning.cost import newton_schulz_flops
from shardmuon.planning.models import MODELS

__all__ = [
    "NEAR",
    "RANKS",
    "Optimum",
    "columns",
    "fits",
    "floor",
    "model_costs",
    "recorded",
    "solve",
]

NEAR = 1.001
"""A makespan within this factor of a lower bound counts as optimal, and is not searched below."""

RANKS = (*range(2, 65), 128, 256, 512, 1024)

TABLE = Path(__file__).with_suffix(".json")

# Marks what ranks cannot carry. Far below any count, and the sum of two fits into an int32.
NEVER = -(2**29)

Costs = Mapping[int, int]
"""How many matrices have each cost."""

Grid = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Optimum:
    """What is known of the best makespan, in FLOPs.

    bound: no plan is below. best: makespan of the best plan, found by the search; None if
    longest-first is within `NEAR` of the bound, so that nothing was searched.
    """

    bound: int
    best: int | None


def model_costs(model: str) -> Costs:
    """Costs of a named model's matrices by the standard method with five steps."""
    costs: Counter[int] = Counter()
    for count, rows, cols in MODELS[model]:
        costs[newton_schulz_flops(rows, cols, (5,))] += count
    return costs


def floor(costs: Costs, ranks: int) -> int:
    """The larger of the mean load, rounded up, and the largest cost."""
    total = sum(cost * count for cost, count in costs.items())
    return max(-(-total // ranks), max(costs))


def solve(costs: Costs, ranks: int) -> Optimum:
    """The optimum, by bisection over all loads between the lower bound and longest-first."""
    bound, known = floor(costs, ranks), _longest_first(costs, ranks)
    if known <= bound * NEAR:
        return Optimum(bound, None)
    loads = _loads_between(costs, bound, known)
    best = loads[bisect_left(loads[:-1], True, key=lambda top: fits(costs, ranks, top))]
    return Optimum(best, best)


def fits(costs: Costs, ranks: int, top: int) -> bool:
    """Whether some plan has no load above `top`.

    The grid of k ranks says at [i, j, ...] how many of the commonest cost they can carry beside
    exactly i, j, ... of the other costs. Two grids of half of the ranks are joined at the end.
    """
    slack = ranks * top - sum(cost * count for cost, count in costs.items())
    common, others = _split(costs)
    if not others:
        return -(-costs[common] // ranks) * common <= top
    usable = []
    for taken, load in columns(costs, top):
        most = min(costs[common], (top - load) // common)
        # All ranks together leave `slack` free, so no rank leaves more.
        if top - load - most * common <= slack:
            usable.append((taken, most))
    half = np.full([costs[cost] + 1 for cost in others], NEVER, np.int32)
    half[(0,) * len(others)] = 0
    for _ in range(ranks // 2):
        half = _one_more_rank(half, usable)
    rest = _one_more_rank(half, usable) if ranks % 2 else half
    return bool((half + np.flip(rest)).max() >= costs[common])


def columns(costs: Costs, top: int) -> Iterator[tuple[tuple[int, ...], int]]:
    """What one rank can carry of all costs but the commonest, each with its load."""
    _, others = _split(costs)
    for taken in product(*(range(min(costs[cost], top // cost) + 1) for cost in others)):
        load = sum(cost * count for cost, count in zip(others, taken, strict=True))
        if load <= top:
            yield taken, load


def _split(costs: Costs) -> tuple[int, list[int]]:
    """(the commonest cost, the others)."""
    common = max(costs, key=lambda cost: (costs[cost], cost))
    return common, sorted(costs.keys() - {common})


def _one_more_rank(grid: Grid, usable: list[tuple[tuple[int, ...], int]]) -> Grid:
    after = np.full_like(grid, NEVER)
    for taken, most in usable:
        before = grid[tuple(slice(size - n) for size, n in zip(grid.shape, taken, strict=True))]
        target = after[tuple(slice(n, None) for n in taken)]
        np.maximum(target, before + np.int32(most), out=target)
    return after


def _loads_between(costs: Costs, low: int, high: int) -> list[int]:
    """All loads of one rank from `low` to `high`; an optimal makespan is one of them."""
    common, _ = _split(costs)
    loads: set[int] = set()
    for _, load in columns(costs, high):
        fewest = max(0, -(-(low - load) // common))
        most = min(costs[common], (high - load) // common)
        loads.update(load + n * common for n in range(fewest, most + 1))
    return sorted(loads)


def _longest_first(costs: Costs, ranks: int) -> int:
    loads = [0] * ranks
    for cost in sorted(costs, reverse=True):
        for _ in range(costs[cost]):
            heapreplace(loads, loads[0] + cost)
    return max(loads)


def recorded() -> dict[tuple[str, int], Optimum]:
    """The table, by model and number of ranks."""
    rows = json.loads(TABLE.read_text())
    return {(model, ranks): Optimum(bound, best) for model, ranks, bound, best in rows}


def main() -> None:
    """Compute and write the table."""
    rows = []
    for model in MODELS:
        costs, start = model_costs(model), time.perf_counter()
        for ranks in RANKS:
            found = solve(costs, ranks)
            rows.append(json.dumps([model, ranks, found.bound, found.best]))
            seconds = time.perf_counter() - start
            print(f"{model} {ranks} ranks: {found}, {seconds:.1f} s of this model", flush=True)
    TABLE.write_text("[\n" + ",\n".join(rows) + "\n]\n")


if __name__ == "__main__":
    main()

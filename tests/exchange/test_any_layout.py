"""Any shape, structure, placement, mesh and dtype: the bits of separate matrices on one process.

Problems are drawn in batches, so that a call to a pool of ranks costs little per problem.
SHARDMUON_EXAMPLES=5000 draws more of them, from new seeds.
"""

from __future__ import annotations

import itertools
import math
import os
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import shardmuon
from tests import ranks
from tests.conftest import Worlds
from tests.grids import PLAIN, Grid, Weight, check, solve_alone

DEFAULT = 200
EXAMPLES = int(os.environ.get("SHARDMUON_EXAMPLES", str(DEFAULT)))
BATCH = 25
MESHES: dict[int, list[tuple[int, ...]]] = {
    1: [(1,), (1, 1)],
    2: [(2,), (2,), (1, 2), (2, 1)],
    3: [(3,), (3,), (1, 3), (3, 1)],
    4: [(4,), (2, 2), (2, 2), (1, 4), (4, 1)],
    8: [(8,), (2, 4), (4, 2), (2, 2, 2)],
}
WORLDS = [w for w in (2, 4, 3, 8, 1) if ranks.backend() == "gloo" or w <= ranks.capacity()]
SHARE = {1: 0.05, 2: 0.3, 3: 0.2, 4: 0.3, 8: 0.15}
"""Part of all problems that each world solves; large worlds are slow on few cores."""
SIDES = st.one_of(st.integers(1, 9), st.integers(1, 70))
FLOATS = st.sampled_from([torch.float32, torch.float32, torch.bfloat16])


@st.composite
def sizes(draw: st.DrawFn, total: int) -> list[int]:
    """`total` in one to four summands."""
    borders = draw(st.sets(st.integers(1, total - 1), max_size=3)) if total > 1 else set()
    marks = [0, *sorted(borders), total]
    return [stop - start for start, stop in itertools.pairwise(marks)]


@st.composite
def structures(draw: st.DrawFn) -> tuple[tuple[int, ...], dict[str, Any]]:
    """Shape and group keys of a weight."""
    kind = draw(st.sampled_from(["matrix", "matrix", "stack", "convolution"]))
    if kind == "convolution":
        shape = (draw(SIDES), draw(st.integers(1, 6)), *draw(st.sampled_from([(3,), (2, 3)])))
        return shape, {"flatten": True}
    rows, cols = draw(SIDES), draw(SIDES)
    keys: dict[str, Any] = {}
    fused = draw(st.sampled_from(["", "", "split_sizes", "num_heads"]))
    if fused == "split_sizes":
        keys[fused] = draw(sizes(rows))
    elif fused == "num_heads":
        keys[fused] = draw(st.integers(1, 6))
        rows = keys[fused] * min(rows, 12)
    if draw(st.booleans()):
        keys["transposed"] = True
        rows, cols = cols, rows
    stack = (draw(st.integers(1, 6)),) if kind == "stack" else ()
    return (*stack, rows, cols), keys


@st.composite
def layouts(draw: st.DrawFn, mesh: tuple[int, ...], dims: int) -> str:
    """Letters for a weight with `dims` dims that may be cut."""
    if draw(st.integers(0, 9)) == 0:
        return PLAIN
    letters = "".join(draw(st.sampled_from("R0123"[: dims + 1])) for _ in mesh)
    for dim, strided in (("0", "s"), ("1", "t")):
        if letters.count(dim) == 2 and draw(st.booleans()):
            letters = letters.replace(dim, strided, 1)
    return letters


@st.composite
def weights(draw: st.DrawFn, mesh: tuple[int, ...]) -> Weight:
    shape, keys = draw(structures())
    keys["algorithm"] = draw(st.sampled_from(["muon", "muon", "normuon"]))
    keys["adjust_lr_fn"] = draw(st.sampled_from([None, "match_rms_adamw", "spectral"]))
    keys["cautious_weight_decay"] = draw(st.booleans())
    keys["momentum_dtype"] = draw(st.sampled_from([None, None, torch.float32, torch.bfloat16]))
    return Weight(
        shape=shape,
        letters=draw(layouts(mesh, min(3 if "flatten" not in keys else 2, len(shape)))),
        dtype=draw(FLOATS),
        gradient_dtype=draw(st.sampled_from([None, None, torch.float32, torch.bfloat16])),
        keys=keys,
    )


@st.composite
def grids(draw: st.DrawFn, world: int) -> Grid:
    mesh = draw(st.sampled_from(MESHES[world]))
    return Grid(
        mesh=mesh,
        weights=tuple(draw(st.lists(weights(mesh), min_size=1, max_size=3))),
        seed=draw(st.integers(0, 1000)),
        options={"lr": 0.02, "nesterov": draw(st.booleans()), "ns_dtype": torch.float32},
        runtime=shardmuon.Runtime(
            deterministic=True,
            exchange=draw(st.sampled_from(["auto", "auto", "all_gather"])),
            bucket_bytes=draw(st.sampled_from([1, 3000, 2**26])),
            replicas=draw(st.sampled_from(["auto", "auto", "repeat"])),
        ),
    )


def repeats(grid: Grid, weight: Weight) -> int:
    """How often each matrix is orthogonalized, all ranks together."""
    if grid.runtime.replicas != "repeat":
        return 1
    letters = "R" * len(grid.mesh) if weight.letters == PLAIN else weight.letters
    return math.prod(size for size, letter in zip(grid.mesh, letters, strict=True) if letter == "R")


@pytest.mark.timeout(max(120, EXAMPLES))
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.supports(
    "random shapes, stacks, parts, heads, placements, meshes of 1, 2, 3, 4 and 8 ranks and dtypes"
)
def test_any_layout_gives_the_bits_of_separate_matrices(pools: Worlds, world: int) -> None:
    # The first batch that hypothesis draws is the simplest problem many times: it does not count.
    @settings(
        max_examples=1 + math.ceil(EXAMPLES * SHARE[world] / BATCH),
        deadline=None,
        derandomize=EXAMPLES <= DEFAULT,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(batch=st.lists(grids(world), min_size=BATCH, max_size=BATCH))
    def solve(batch: list[Grid]) -> None:
        if all(grid == batch[0] for grid in batch):
            batch = batch[:1]
        (right,) = pools.run(1, solve_alone, batch)
        answers = pools.run(world, check, batch, right)
        for grid, *found in zip(batch, *answers, strict=True):
            faults = {rank: answer.fault for rank, answer in enumerate(found) if answer.fault}
            assert not faults, f"{grid}\n" + "\n".join(f"rank {r}: {f}" for r, f in faults.items())
            parts = sum(weight.parts() * repeats(grid, weight) for weight in grid.weights)
            counts = [sum(step) for step in zip(*(a.orthogonalized for a in found), strict=True)]
            assert counts == [parts] * grid.steps, grid
            assert sum(a.bytes_sent for a in found) == sum(a.bytes_received for a in found), grid

    solve()

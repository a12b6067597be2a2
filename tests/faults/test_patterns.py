"""Missing and non-finite gradients in random places: one outcome on all ranks, the documented one.

`SHARDMUON_PATTERNS=200 pytest tests/faults/test_patterns.py` tries as many on 4 and on 8 ranks;
without it a few. What must come of a pattern is worked out here, from the pattern alone.
"""

from __future__ import annotations

import os
import random
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import shardmuon
from tests import ranks
from tests.conftest import Worlds
from tests.grids import random as normal
from tests.grids import same_bits
from tests.problems import local, place, world_mesh

PATTERNS = int(os.environ.get("SHARDMUON_PATTERNS", "4"))
SHAPES = ((16, 12), (5, 24), (40, 8), (8, 8), (19,), (3,))
"""On 8 ranks (5, 24) and the vectors leave some ranks empty. Vectors take AdamW."""


class Pattern(NamedTuple):
    """missing: (rank, parameter) pairs without gradient. bad: (rank, parameter, place, value).

    mode: of `missing_grad`, or of `nonfinite` if there is something bad.
    """

    mode: str
    missing: frozenset[tuple[int, int]] = frozenset()
    bad: tuple[int, int, float, float] | None = None
    seed: int = 0


class Seen(NamedTuple):
    """On one rank: the error, whether each parameter changed, and what differs from a control."""

    error: str
    changed: tuple[bool, ...]
    wrong: str


def holders(number: int, world: int) -> set[int]:
    """Ranks whose shard of a parameter is not empty, by torch's rule of splitting."""
    rows = SHAPES[number][0]
    size = -(-rows // world)
    return {rank for rank in range(world) if rank * size < rows}


class Side:
    """Parameters on this rank with an optimizer of their own, after one good step."""

    def __init__(self, runtime: dict[str, Any], names: frozenset[int], seed: int) -> None:
        self.mesh, self.seed = world_mesh(), seed
        self.params = {
            number: nn.Parameter(place(normal(shape, seed + number), self.mesh, Shard(0)))
            for number, shape in enumerate(SHAPES)
            if number in names
        }
        named = [(f"p{number}", p) for number, p in self.params.items()]
        groups: list[dict[str, Any]] = [
            {"params": [pair for pair in named if pair[1].ndim == 2], "lr": 0.02},
            {"params": [pair for pair in named if pair[1].ndim == 1], "algorithm": "adamw"},
        ]
        self.optimizer = shardmuon.Muon(
            [group for group in groups if group["params"]],
            ns_dtype=torch.float32,
            runtime=shardmuon.Runtime(**runtime),
        )

    def step(self, time: int, gradients: dict[int, Tensor | None] | None = None) -> str:
        """Take a step with normal gradients, or others where given; what was raised."""
        for number, p in self.params.items():
            p.grad = self.gradient(time, number)
            if gradients is not None and number in gradients:
                p.grad = gradients[number]
        try:
            self.optimizer.step()
            self.optimizer.check()
        except RuntimeError as error:
            return str(error)
        return ""

    def gradient(self, time: int, number: int) -> Tensor:
        return place(normal(SHAPES[number], 1000 * time + self.seed + number), self.mesh, Shard(0))

    def tensors(self, number: int) -> list[Tensor]:
        """Copies of a parameter and its state on this rank."""
        p = self.params[number]
        return [local(t).detach().clone() for t in (p, *self.optimizer.state[p].values())]


def tried(patterns: list[Pattern]) -> list[Seen]:
    """What this rank sees of each pattern."""
    return [_try(pattern) for pattern in patterns]


def _try(pattern: Pattern) -> Seen:
    rank, world, everything = dist.get_rank(), dist.get_world_size(), frozenset(range(len(SHAPES)))
    setting = "nonfinite" if pattern.bad else "missing_grad"
    side = Side({setting: pattern.mode}, everything, pattern.seed)
    side.step(0)
    before = {number: side.tensors(number) for number in everything}
    error = side.step(1, _gradients(pattern, side, rank))
    changed = tuple(
        not all(map(same_bits, before[number], side.tensors(number)))
        for number in sorted(everything)
    )
    wrong = "" if error else _compare(side, _control(pattern, world), pattern)
    # Whatever came of it, the next step is a normal one, from where this one left off.
    if side.step(2):
        wrong += " the next step fails"
    return Seen(error, changed, wrong)


def _gradients(pattern: Pattern, side: Side, rank: int) -> dict[int, Tensor | None]:
    result: dict[int, Tensor | None] = {n: None for r, n in pattern.missing if r == rank}
    if pattern.bad is not None and pattern.bad[0] == rank:
        _, number, where, value = pattern.bad
        gradient = side.gradient(1, number)
        held = local(gradient).view(-1)
        held[int(where * held.numel())] = value
        result[number] = gradient
    return result


def _control(pattern: Pattern, world: int) -> Side:
    """The same two steps with what a pattern amounts to: zeros, fewer parameters, or no step."""
    absent = {n for n in range(len(SHAPES)) if _fate(pattern, n, world) == "missing"}
    zeroed = pattern.mode == "zero"
    runtime = {"missing_grad": "error"}
    side = Side(runtime, frozenset(range(len(SHAPES))), pattern.seed)
    side.step(0)
    if pattern.bad is not None:
        return side
    rank = dist.get_rank()
    gradients: dict[int, Tensor | None] = {}
    for number in range(len(SHAPES)):
        if zeroed and (rank, number) in pattern.missing:
            gradients[number] = _zeros(side.params[number], side.mesh)
        elif number in absent:
            gradients[number] = None
    error = side.step(1, gradients)
    assert not error, error
    return side


def _zeros(parameter: Tensor, mesh: DeviceMesh) -> Tensor:
    held = torch.zeros_like(local(parameter))
    return DTensor.from_local(
        held, mesh, [Shard(0)], run_check=False, shape=parameter.shape, stride=parameter.stride()
    )


def _compare(side: Side, control: Side, pattern: Pattern) -> str:
    wrong = [
        number
        for number in range(len(SHAPES))
        if not all(map(same_bits, side.tensors(number), control.tensors(number)))
    ]
    return f"parameters {wrong} differ under {pattern}" if wrong else ""


def _fate(pattern: Pattern, number: int, world: int) -> str:
    """ "whole", "missing" on all ranks that count, or "torn"."""
    who = holders(number, world)
    without = {rank for rank, n in pattern.missing if n == number and rank in who}
    if not without or pattern.mode == "zero":
        return "whole"
    return "missing" if without == who else "torn"


def missing_patterns(world: int, count: int) -> list[Pattern]:
    rng = random.Random(world)
    patterns = []
    for number in range(count):
        kind = number % 4
        pairs = [(r, n) for r in range(world) for n in range(len(SHAPES))]
        if kind == 0:  # whole parameters
            gone = {n for n in range(len(SHAPES)) if rng.random() < 0.4}
            chosen = [(r, n) for r, n in pairs if n in gone]
        elif kind == 1:  # whole ranks
            away = {r for r in range(world) if rng.random() < 0.3}
            chosen = [(r, n) for r, n in pairs if r in away]
        elif kind == 2:  # only where a rank holds nothing
            chosen = [(r, n) for r, n in pairs if r not in holders(n, world)]
        else:
            density = rng.random()
            chosen = [pair for pair in pairs if rng.random() < density]
        mode = "zero" if rng.random() < 0.4 else "error"
        patterns.append(Pattern(mode, frozenset(chosen), seed=rng.randrange(1000)))
    return patterns


def nonfinite_patterns(world: int, count: int) -> list[Pattern]:
    rng = random.Random(-world)
    patterns = []
    for _ in range(count):
        number = rng.randrange(len(SHAPES))
        rank = rng.choice(sorted(holders(number, world)))
        value = rng.choice([float("inf"), -float("inf"), float("nan")])
        bad = rank, number, rng.random(), value
        patterns.append(Pattern(rng.choice(["error", "skip"]), bad=bad, seed=rng.randrange(1000)))
    return patterns


def judge(pattern: Pattern, seen: tuple[Seen, ...], world: int) -> None:
    fates = [_fate(pattern, number, world) for number in range(len(SHAPES))]
    text = ""
    if pattern.bad is not None and pattern.mode == "error":
        text = "a gradient is inf or nan on at least one rank"
    elif pattern.bad is None and "torn" in fates:
        text = "some ranks have no gradient for"
        for number, fate in enumerate(fates):
            assert (f"p{number}" in seen[0].error) == (fate == "torn"), (pattern, seen[0])
    assert len({each.error for each in seen}) == 1, (pattern, seen)
    assert text in seen[0].error, (pattern, seen[0])
    assert bool(text) == bool(seen[0].error), (pattern, seen[0])
    for rank, each in enumerate(seen):
        assert not each.wrong, (pattern, rank, each)
        for number, fate in enumerate(fates):
            lives = not seen[0].error and pattern.bad is None and fate == "whole"
            expected = lives and rank in holders(number, world)
            if number < 4 or not expected:  # AdamW's counter is one number on all ranks
                assert each.changed[number] == expected or (lives and number >= 4), (pattern, each)


@pytest.mark.skipif(ranks.backend() == "nccl", reason="answers come at once on a CPU only")
@pytest.mark.timeout(max(120, 3 * PATTERNS))
@pytest.mark.parametrize("world", [4, 8])
@pytest.mark.parametrize("kind", ["missing", "nonfinite"])
def test_every_pattern_has_its_documented_outcome(pools: Worlds, kind: str, world: int) -> None:
    make = missing_patterns if kind == "missing" else nonfinite_patterns
    patterns = make(world, PATTERNS)
    for first in range(0, PATTERNS, 25):
        some = patterns[first : first + 25]
        answers = pools.run(world, tried, some)
        for pattern, *seen in zip(some, *answers, strict=True):
            judge(pattern, tuple(seen), world)

"""Every variant on several ranks: the bits of separate matrices in one process, on any layout."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardmuon
from tests import models
from tests.conftest import Worlds
from tests.exchange.test_overlap import (
    HOWS,
    everything,
    fsdp,
    fsdp_with_unused_one,
    hsdp,
    plain_steps,
    runtime,
    skipped,
    tensor_parallel,
)
from tests.grids import PLAIN, Grid, Weight, check, solve_alone
from tests.problems import digest, local
from tests.variants import ELEMENTS, MATRICES

MESHES: dict[int, list[tuple[int, ...]]] = {1: [(1,)], 2: [(2,)], 4: [(4,), (2, 2)]}

STRUCTURES: list[tuple[tuple[int, ...], dict[str, Any]]] = [
    ((10, 8), {}),
    ((18, 48), {}),
    ((1, 9), {}),
    ((3, 5, 7), {}),
    ((12, 8), {"split_sizes": [3, 9]}),
    ((8, 10), {"transposed": True}),
]
LETTERS = {1: ["0", "1", "R"], 2: ["R0", "s0", "01", "R1", "10", PLAIN]}
"""Of one axis; and of two: HSDP, FSDP2 over tensor parallelism in three ways, replicas."""

EXCHANGES: list[Literal["auto", "all_gather"]] = ["auto", "all_gather"]


def weights(mesh: tuple[int, ...], turn: int) -> Iterator[Weight]:
    """All variants, with each of them every structure, in placements that change with `turn`."""
    letters = LETTERS[len(mesh)]
    for number, variant in enumerate(MATRICES.values()):
        for index, (shape, structure) in enumerate(STRUCTURES):
            yield Weight(
                shape=shape,
                letters=letters[(index + number + turn) % len(letters)],
                dtype=torch.bfloat16 if index == 1 else torch.float32,
                keys={**variant.keys, **structure},
            )
    for variant in ELEMENTS.values():
        for index, shape in enumerate([(7, 6), (2, 3, 4), (1, 5)]):
            place = letters[(index + turn) % len(letters)]
            half = torch.bfloat16 if index == 1 else torch.float32
            yield Weight(shape=shape, letters=place, dtype=half, keys=variant.keys)


def grids(world: int) -> Iterator[Grid]:
    for mesh in MESHES[world]:
        for turn in range(3):
            yield Grid(
                mesh=mesh,
                weights=tuple(weights(mesh, 2 * turn)),
                steps=3,
                options={"ns_dtype": torch.float32},
                runtime=shardmuon.Runtime(
                    deterministic=True,
                    exchange=EXCHANGES[turn % 2],
                    bucket_bytes=[1, 3000, 2**26][turn],
                ),
            )


@pytest.mark.parametrize("world", MESHES)
def test_bits_are_those_of_separate_matrices(pools: Worlds, world: int) -> None:
    problems = list(grids(world))
    (right,) = pools.run(1, solve_alone, problems)
    for answers in pools.run(world, check, problems, right):
        for grid, answer in zip(problems, answers, strict=True):
            assert not answer.fault, f"{grid.mesh} {grid.runtime}\n{answer.fault}"


PAIRS = [(muon.keys, ELEMENTS["lion"].keys) for muon in MATRICES.values()]
"""(keys of matrices, keys of the rest)."""


def optimizer_of(model: nn.Module, pair: Any, **settings: Any) -> shardmuon.Muon:
    muon, rest = pair
    groups = shardmuon.param_groups(model, muon={"ns_dtype": torch.float32, **muon}, adamw=rest)
    return shardmuon.Muon(groups, runtime=runtime(**settings))


WAYS: list[tuple[int, Callable[[], models.Net], Any, dict[str, Any]]] = [
    (2, fsdp, plain_steps, {}),
    (2, fsdp_with_unused_one, plain_steps, {"exchange": "all_gather"}),
    (2, fsdp, skipped, {"nonfinite": "skip"}),
    (4, hsdp, plain_steps, {}),
    (4, tensor_parallel, plain_steps, {}),
]


def _overlapped(index: int) -> list[tuple[str, str]]:
    """Hashes of everything without and with overlap, by variant."""
    _, build, way, settings = WAYS[index]
    answers = []
    for pair in PAIRS:
        hashes = []
        for overlap in HOWS:
            model = build()
            optimizer = optimizer_of(model, pair, overlap=overlap, **settings)
            way(model, optimizer)
            hashes.append(everything(model, optimizer))
        answers.append((hashes[0], hashes[1]))
    return answers


@pytest.mark.parametrize(
    "index", range(len(WAYS)), ids=[f"{b.__name__}-{w.__name__}-{n}" for n, b, w, _ in WAYS]
)
def test_overlap_changes_no_bit(pools: Worlds, index: int) -> None:
    for answers in pools.run(WAYS[index][0], _overlapped, index):
        assert all(without == with_overlap for without, with_overlap in answers)
        assert len(set(answers)) == len(PAIRS)


def states(model: nn.Module, optimizer: shardmuon.Muon) -> dict[str, str]:
    """Hash of what this rank holds, by name."""
    found = {}
    for name, p in model.named_parameters():
        for kind, value in {"parameter": p, **optimizer.state.get(p, {})}.items():
            found[f"{name}.{kind}"] = digest([local(value)])
    return found


def _refused_and_missing() -> list[str]:
    """What changed that must not, or did not and must."""
    faults: list[str] = []
    for pair in PAIRS:
        model = fsdp()
        optimizer = optimizer_of(model, pair, nonfinite="skip", overlap="none")
        named = dict(model.named_parameters())
        full = [name for name, p in named.items() if local(p).numel()]
        steps: list[Mapping[str, str]] = []
        for step in range(4):
            models.backward(model, step)
            if step == 2 and dist.get_rank() == 1:
                gradient = named["blocks.0.up.weight"].grad
                assert gradient is not None
                local(gradient).view(-1)[0] = float("nan")
            if step == 3:
                for name in ("blocks.1.up.weight", "lm_head.weight"):
                    named[name].grad = None
            optimizer.step()
            steps.append(states(model, optimizer))
        faults += [f"refused, {key}" for key in steps[1] if steps[2][key] != steps[1][key]]
        for key, value in steps[3].items():
            name = key.rpartition(".")[0]
            kept = name in ("blocks.1.up.weight", "lm_head.weight", "spare.proj.weight")
            if name in full and kept != (value == steps[2][key]):
                faults.append(f"{'changed' if kept else 'did not change'}, {key}")
    return faults


def test_refused_steps_and_missing_gradients_leave_all_state(pools: Worlds) -> None:
    assert pools.run(2, _refused_and_missing) == [[], []]


def test_ranks_with_other_settings_are_told(pools: Worlds) -> None:
    errors = pools.run_expecting_error(2, _other_settings)
    assert all("made different plans" in error.message for error in errors)


def _other_settings() -> None:
    keys = {**MATRICES["normuon"].keys, "beta2": 0.5 + 0.25 * dist.get_rank()}
    optimizer_of(fsdp(), (keys, {}), overlap="none").prepare()

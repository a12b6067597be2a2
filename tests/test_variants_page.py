"""docs/variants.md: its examples run, and its rule has what rules inherit.

That is: the same bits on any layout, checkpoints that move between ranks, and overlap.
"""

from __future__ import annotations

import contextlib
import re
import textwrap
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardmuon
from shardmuon import rules
from shardmuon.checkpoint import Checkpointer
from shardmuon.groups import ALGORITHMS
from shardmuon.training.config import OptimizerSection
from shardmuon.training.load import load
from tests import models, ranks
from tests.conftest import Worlds
from tests.exchange.test_overlap import (
    HOWS,
    everything,
    fsdp,
    hsdp,
    plain_steps,
    runtime,
    skipped,
    tensor_parallel,
)
from tests.grids import PLAIN, Answer, Grid, Values, Weight, check, solve_alone
from tests.refused import assert_kept
from tests.test_documents import ROOT, examples

PAGE = ROOT / "docs" / "variants.md"
NAME = "row_limit"
KEYS = {"algorithm": NAME, "growth": 1.1, "lr": 0.02}
LONGEST = 60
"""Lines of the rule, as the page promises less."""


@contextlib.contextmanager
def page() -> Iterator[dict[str, Any]]:
    """The page from top to bottom, and its rule registered meanwhile: workers have more to do."""
    names: dict[str, Any] = {"__name__": "page"}
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".* are plain tensors", UserWarning)
            for block in examples(PAGE):
                exec(compile(block, str(PAGE), "exec"), names)
        yield names
    finally:
        for registry in (ALGORITHMS, rules.RULES):
            registry.pop(NAME, None)


def test_the_rule_is_one_short_file() -> None:
    (block,) = (each for each in examples(PAGE) if "rules.register" in each)
    assert len(block.splitlines()) < LONGEST


def test_the_settings_of_train_py_are_understood(tmp_path: Path) -> None:
    found = re.findall(r"^    optimizer:\n(?:      .+\n)+", PAGE.read_text("utf-8"), re.MULTILINE)
    assert len(found) >= 7
    for text in found:
        path = tmp_path / "run.yaml"
        path.write_text(textwrap.dedent(text), encoding="utf-8")
        assert load(path).optimizer != OptimizerSection()


def test_a_refused_step_changes_nothing() -> None:
    with page():
        assert_kept(KEYS)


def _alone(grids: Sequence[Grid]) -> list[list[Values]]:
    with page():
        return solve_alone(grids)


def _check(grids: Sequence[Grid], right: Sequence[list[Values]]) -> list[Answer]:
    with page():
        return check(grids, right)


def grids(world: int) -> list[Grid]:
    """Row shards, column shards, replicas, HSDP and FSDP2 over tensor parallelism."""
    shapes = [((10, 8), {}), ((3, 5, 7), {}), ((8, 10), {"transposed": True})]
    letters = {(world,): ["0", "1", "R"], (2, world // 2): ["R0", "s0", "01", PLAIN]}
    return [
        Grid(
            mesh=mesh,
            weights=tuple(
                Weight(shape=shape, letters=place, keys={**KEYS, **keys})
                for place in places
                for shape, keys in shapes
            ),
            steps=3,
            options={"ns_dtype": torch.float32},
        )
        for mesh, places in letters.items()
        if len(mesh) == 1 or world == 4
    ]


@pytest.mark.parametrize("world", [1, 2, 4])
def test_its_bits_are_those_of_separate_matrices(pools: Worlds, world: int) -> None:
    if ranks.backend() != "gloo":
        pytest.skip("the page computes on the CPU")
    problems = grids(world)
    (right,) = pools.run(1, _alone, problems)
    for answers in pools.run(world, _check, problems, right):
        assert [answer.fault for answer in answers] == [""] * len(problems)
    assert all("row_size" in values for values in right[0])


def optimizer_of(model: nn.Module, overlap: Any, **settings: Any) -> shardmuon.Muon:
    groups = shardmuon.param_groups(model, muon={**KEYS, "ns_dtype": torch.float32})
    return shardmuon.Muon(groups, runtime=runtime(overlap, **settings))


WAYS: list[tuple[int, Callable[[], models.Net], Any, dict[str, Any]]] = [
    (2, fsdp, plain_steps, {}),
    (2, fsdp, skipped, {"nonfinite": "skip"}),
    (4, hsdp, plain_steps, {}),
    (4, tensor_parallel, plain_steps, {}),
]


def _overlapped(index: int) -> list[str]:
    _, build, way, settings = WAYS[index]
    hashes = []
    with page():
        for overlap in HOWS:
            model = build()
            optimizer = optimizer_of(model, overlap, **settings)
            way(model, optimizer)
            hashes.append(everything(model, optimizer))
    return hashes


@pytest.mark.parametrize("index", range(len(WAYS)))
def test_overlap_changes_no_bit(pools: Worlds, index: int) -> None:
    if ranks.backend() != "gloo":
        pytest.skip("the page computes on the CPU")
    for without, with_overlap in pools.run(WAYS[index][0], _overlapped, index):
        assert without == with_overlap


def _steps(build: Callable[[], models.Net], folder: str, first: int, last: int) -> str:
    """Hash after steps `first` to `last`, from the checkpoint of `first` if that is not zero."""
    with page():
        model = build()
        optimizer = optimizer_of(model, "none")
        checkpoints = Checkpointer(folder)
        if first:
            newest = checkpoints.newest().path
            assert newest is not None
            checkpoints.load(newest, model, optimizer)
        for step in range(first, last):
            models.spread_gradients(model, step)
            optimizer.step()
        checkpoints.save(last, model, optimizer)
        checkpoints.close()
        return everything(model, optimizer)


def test_it_goes_on_from_a_checkpoint_on_other_ranks(pools: Worlds, tmp_path: Path) -> None:
    if ranks.backend() != "gloo":
        pytest.skip("the page computes on the CPU")
    moving, staying = str(tmp_path / "moving"), str(tmp_path / "staying")
    (right,) = pools.run(1, _steps, models.make, staying, 0, 6)
    pools.run(4, _steps, tensor_parallel, moving, 0, 2)
    pools.run(2, _steps, fsdp_of_all, moving, 2, 4)
    assert pools.run(1, _steps, models.make, moving, 4, 6) == [right]


def fsdp_of_all() -> models.Net:
    """Under FSDP2 over all ranks, with no parameter frozen."""
    model = fsdp()
    model.spare_weight.requires_grad_(True)
    return model

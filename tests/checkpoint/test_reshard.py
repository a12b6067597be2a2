"""Checkpoints load on any number of ranks and in any layout, with the bits that were saved."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

from shardmuon.checkpoint import Checkpointer
from tests import ranks
from tests.checkpoint.placed_model import Bits, bits, make, train
from tests.conftest import Worlds

T = TypeVar("T")

HERE = 0
"""Instead of a number of ranks: this process, without a process group."""

Place = tuple[int, str]
"""Number of ranks, layout."""

PLACES: list[Place] = [
    (HERE, "plain"),
    (1, "fsdp"),
    (2, "fsdp"),
    (3, "fsdp"),
    (4, "hsdp"),
    (4, "tp"),
    (8, "tp"),
]

STEPS = 2
"""Steps before the save; one more follows it, uninterrupted or after loading."""


def run(pools: Worlds, place: Place, function: Callable[..., T], *arguments: object) -> T:
    """What `function(layout, *arguments)` returns on the ranks: the same on all of them."""
    world, layout = place
    if world == HERE:
        if ranks.backend() != "gloo":
            pytest.skip("this process computes on the CPU")
        return function(layout, *arguments)
    first, *others = pools.run(world, function, layout, *arguments)
    assert all(other == first for other in others)
    return first


def _save(layout: str, folder: str) -> tuple[Bits, Bits]:
    """Bits at the save and after one further step."""
    pair = make(layout)
    train(pair, range(STEPS))
    saver = Checkpointer(folder)
    saver.save(STEPS, *pair)
    saver.close()
    saved = bits(pair)
    train(pair, range(STEPS, STEPS + 1))
    return saved, bits(pair)


def _load(layout: str, folders: list[str]) -> list[tuple[Bits, Bits]]:
    """As `_save`, after loading from each of `folders`."""
    answers = []
    for folder in folders:
        pair = make(layout, fresh=True)
        loader = Checkpointer(folder)
        path = loader.newest().path
        assert path is not None
        loader.load(path, *pair)
        loader.close()
        loaded = bits(pair)
        train(pair, range(STEPS, STEPS + 1))
        answers.append((loaded, bits(pair)))
    return answers


class Saved:
    """Checkpoints of one state, made where and when they are first asked for."""

    def __init__(self, pools: Worlds, root: Path) -> None:
        self._pools, self._root = pools, root
        self._folders: dict[Place, str] = {}
        self.right = run(pools, (1, "plain"), _save, str(root / "right"))

    def folder(self, place: Place) -> str:
        """What `place` has saved, after the same steps and with the same bits as all others."""
        if place not in self._folders:
            folder = str(self._root / f"{place[1]}{place[0]}")
            assert run(self._pools, place, _save, folder) == self.right
            self._folders[place] = folder
        return self._folders[place]


@pytest.fixture(scope="module")
def saved(pools: Worlds, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """The state that one rank has, which never loads anything, saved everywhere."""
    return Saved(pools, tmp_path_factory.mktemp("saved"))


@pytest.mark.parametrize("number", range(len(PLACES)), ids=lambda n: "-".join(map(str, PLACES[n])))
@pytest.mark.supports("checkpoints between 1, 2, 3, 4 and 8 ranks")
def test_bits_do_not_depend_on_where_they_were_saved(
    pools: Worlds, saved: Saved, number: int
) -> None:
    sources = [saved.folder(PLACES[(number + away) % len(PLACES)]) for away in (1, 3)]
    for answer in run(pools, PLACES[number], _load, sources):
        assert answer == saved.right


WAY: list[Place] = [(2, "fsdp"), (4, "hsdp"), (8, "tp"), (HERE, "plain"), (4, "tp"), (3, "fsdp")]


def _hop(layout: str, folder: str, step: int) -> Bits:
    """Take step `step` from the checkpoint of the step before, if there is one, and save."""
    pair = make(layout, fresh=step > 0)
    keeper = Checkpointer(folder)
    path = keeper.newest().path
    if path is not None:
        assert keeper.load(path, *pair)["step"] == step
    train(pair, range(step, step + 1))
    keeper.save(step + 1, *pair)
    keeper.close()
    return bits(pair)


def _straight(layout: str) -> list[Bits]:
    """Bits after each step of one process."""
    pair = make(layout)
    answers = []
    for step in range(len(WAY)):
        train(pair, range(step, step + 1))
        answers.append(bits(pair))
    return answers


@pytest.mark.supports("checkpoints from FSDP2 to HSDP, to FSDP2 over TP, to one process, and back")
def test_a_run_that_moves_after_every_step_is_the_run_that_stays(
    pools: Worlds, shared_folder: str
) -> None:
    for step, right in enumerate(run(pools, (1, "plain"), _straight)):
        assert run(pools, WAY[step], _hop, shared_folder, step) == right

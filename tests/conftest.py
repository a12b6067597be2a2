"""Fixtures of all tests: the pools of ranks, one torch thread, and the count of skipped tests."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import ranks

INTEGRATIONS = (
    "torch",
    "transformers",
    "accelerate",
    "lightning",
    "torchtitan",
    "tokenizers",
    "datasets",
    "safetensors",
    "tensorboard",
    "wandb",
)
"""Packages that shardmuon is tested with, named with their versions after each run of the tests."""


class Worlds(ranks.RankPools):
    """Pools that skip, and so count, a case whose world needs more GPUs than there are."""

    def _call(
        self, world: int, function: Any, arguments: tuple[object, ...], limit: float
    ) -> list[Any]:
        if ranks.backend() == "nccl" and world > ranks.capacity():
            pytest.skip(f"needs {world} ranks with a GPU, there are {ranks.capacity()}")
        return super()._call(world, function, arguments, limit)


def pytest_configure() -> None:
    """Fix the thread count that bit-equality rests on."""
    torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip GPU tests where no GPU is."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print how many tests were skipped, also when it is none."""
    skipped = len(terminalreporter.stats.get("skipped", []))
    found = ", ".join(f"{name} {_version(name)}" for name in INTEGRATIONS)
    terminalreporter.write_line(f"integrations: {found}")
    terminalreporter.write_line(f"skipped tests: {skipped} (ranks over {ranks.backend()})")


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "(absent)"


@pytest.fixture(scope="session")
def pools() -> Iterator[Worlds]:
    """Pools of ranks, each started by the first test that needs its world size."""
    worlds = Worlds()
    yield worlds
    worlds.stop()


@pytest.fixture
def shared_folder(tmp_path: Path) -> str:
    """A folder that all ranks can write to, as a string that travels to them."""
    return str(tmp_path)

"""A small job that trains and saves, and faults that are put into its storage.

Owns what the cases of a save have in common. A fault lasts as long as its `with` block and is on
one rank only.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch.distributed as dist

from shardmuon.checkpoint import CheckpointError, publish
from shardmuon.checkpoint.contents import collect
from shardmuon.checkpoint.storage import Writer
from tests import models
from tests.problems import digest, local, world_mesh

__all__ = ["Job", "full_disk", "names", "no_manifest", "no_rename", "refused", "slow_disk"]


class Job:
    """A model and an optimizer on all ranks; `seed` says from which values they start."""

    def __init__(self, seed: int = 0) -> None:
        self.model = models.sharded(world_mesh(), seed)
        self.optimizer = models.optimizer_of(self.model)
        self.step = 0

    @property
    def parts(self) -> tuple[Any, Any]:
        """What `save` and `load` want."""
        return self.model, self.optimizer

    def train(self, steps: int) -> None:
        """Take steps with gradients that depend on the step alone."""
        for _ in range(steps):
            models.spread_gradients(self.model, self.step)
            self.optimizer.step()
            self.step += 1

    def bits(self) -> str:
        """Hash of this rank's blocks of all that is saved."""
        tensors = collect(self.model, self.optimizer).tensors
        return digest([local(tensors[key]) for key in sorted(tensors)])

    def momentum(self) -> str:
        """Hash of this rank's blocks of the optimizer's state."""
        tensors = collect(self.model, self.optimizer).tensors
        return digest([local(tensors[k]) for k in sorted(tensors) if k.startswith("optimizer.")])


def names(root: str | Path) -> list[str]:
    """What is in a folder."""
    return sorted(path.name for path in Path(root).iterdir())


def refused(call: Callable[[], object]) -> str:
    """Text of the CheckpointError that `call` must raise."""
    try:
        call()
    except CheckpointError as error:
        return str(error)
    raise AssertionError("no CheckpointError")


@contextmanager
def full_disk(rank: int, room_bytes: int = 1000) -> Iterator[None]:
    """Data files find no more room than that."""
    write_data = Writer.write_data

    def filling(self: Writer, *arguments: Any) -> Any:
        create = self.fs.create_stream

        @contextmanager
        def limited(path: Any, mode: str) -> Iterator[Any]:
            with create(path, mode) as stream:
                write: Callable[[Any], int] = stream.write

                def write_if_room(data: Any) -> int:
                    if stream.tell() > room_bytes:
                        raise OSError(errno.ENOSPC, "No space left on device")
                    return write(data)

                with patch.object(stream, "write", write_if_room):
                    yield stream

        with patch.object(self.fs, "create_stream", limited):
            return write_data(self, *arguments)

    with _on(rank, Writer, "write_data", filling):
        yield


@contextmanager
def slow_disk(rank: int, seconds: float) -> Iterator[None]:
    """Data files take their time."""
    write = Writer.write_data

    def slow(self: Writer, *arguments: Any) -> Any:
        time.sleep(seconds)
        return write(self, *arguments)

    with _on(rank, Writer, "write_data", slow):
        yield


@contextmanager
def no_manifest() -> Iterator[None]:
    """The first rank cannot write the manifest."""
    open_ = Path.open

    def failing(self: Path, mode: str = "r", *arguments: Any, **options: Any) -> Any:
        if self.name == publish.MANIFEST and "w" in mode:
            raise OSError(errno.EDQUOT, "Disk quota exceeded")
        return open_(self, mode, *arguments, **options)

    with _on(0, Path, "open", failing):
        yield


@contextmanager
def no_rename() -> Iterator[None]:
    """The first rank cannot give a new checkpoint its name."""
    rename = Path.rename

    def failing(self: Path, target: Path) -> Path:
        if self.suffix == ".tmp" and self.is_dir():
            raise OSError(errno.EIO, "Input/output error")
        return rename(self, target)

    with _on(0, Path, "rename", failing):
        yield


@contextmanager
def _on(rank: int, owner: Any, name: str, value: Any) -> Iterator[None]:
    if dist.get_rank() != rank:
        yield
        return
    with patch.object(owner, name, value):
        yield

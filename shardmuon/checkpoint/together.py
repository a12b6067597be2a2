"""What all ranks of a job do together while they read and write checkpoints.

Owns the process group of checkpoints, on the host and apart from those that train: storage that is
slow or fails must not reach them. An error of one rank is an error of all.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, TypeVar

from torch.distributed.checkpoint.api import CheckpointException

from shardmuon.checkpoint.publish import CheckpointError
from shardmuon.exchange import collectives

__all__ = ["Ranks"]

T = TypeVar("T")

_REACH = "reach the other ranks"


class Ranks:
    """All ranks of the job, or this process alone. Making one is collective.

    group: gloo, None without a process group. timeout_s: how long a rank waits for another one.
    """

    def __init__(self, timeout_s: float) -> None:
        self.group: collectives.Group = collectives.host_group(timeout_s)
        self._timeout_s = timeout_s
        self.rank, self.count = collectives.rank(), collectives.world_size()
        # DCP without other ranks is meant. Filtered for good, because threads cannot do it.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")

    @property
    def first(self) -> bool:
        """True on the rank that publishes."""
        return self.rank == 0

    def gather(self, value: T) -> list[T]:
        """The picklable `value` of every rank, in rank order."""
        return self._talk(_REACH, lambda: collectives.gather_objects(value, self.group))

    def broadcast(self, value: T) -> T:
        """The picklable `value` of the first rank."""
        result: T = self._talk(
            _REACH, lambda: collectives.broadcast_object(value, group=self.group)
        )
        return result

    def together(self, what: str, act: Callable[[], T]) -> T:
        """Run `act`, which is local, on every rank; CheckpointError on all if it fails on one."""
        result: Any = None
        cause: Exception | None = None
        try:
            result = act()
        except Exception as error:
            cause = error
        mine = None if cause is None else _text(cause)
        texts = self._talk(what, lambda: collectives.gather_objects(mine, self.group))
        for rank, text in enumerate(texts):
            if text is not None:
                raise CheckpointError(f"cannot {what}: rank {rank}: {text}") from cause
        return result  # type: ignore[no-any-return]

    def dcp(self, what: str, call: Callable[[], object]) -> None:
        """Run a function of DCP, which tells all ranks of an error, but not by an Exception."""
        try:
            self._talk(what, call)
        except CheckpointException as error:
            rank, (cause, _) = next(iter(error.failures.items()))
            raise CheckpointError(f"cannot {what}: rank {rank}: {_text(cause)}") from None

    def _talk(self, what: str, call: Callable[[], T]) -> T:
        """Have the group's own errors, which DCP lets through, in the class of all others."""
        try:
            return call()
        except RuntimeError as error:
            if self.count == 1:
                raise
            raise CheckpointError(
                f"cannot {what}: another rank did not answer within {self._timeout_s:g} s or is"
                f" gone: {error}"
            ) from error

    def close(self) -> None:
        """Give up the process group."""
        collectives.close_group(self.group)


def _text(error: BaseException) -> str:
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"

"""Ends a run early and in good order when the scheduler says so.

Owns the signals SIGTERM and SIGUSR1 and the marker file by which a job script knows that the run
wants to go on. The ranks agree on the last step by a number that travels with the gradient norm.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor

__all__ = ["StopRequest", "clear_marker", "write_marker"]

MARKER = "preempted"
_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
_ECHO_S = 1.0


class StopRequest:
    """Whether some rank was asked to stop. `wish` is what this rank adds to the ranks' sum."""

    def __init__(self) -> None:
        self.wish = 0.0
        self._sum: Tensor | None = None
        self._arrived: torch.cuda.Event | None = None

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Take the signals while the block runs; a second one ends the process at once.

        What follows the first within a second is its echo: a scheduler tells every process of the
        job, and torchrun then tells its workers once more.
        """
        if threading.current_thread() is not threading.main_thread():
            yield  # only a main thread may take signals
            return
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        watcher = threading.Thread(target=_end_at_the_second, args=(reader,), daemon=True)
        watcher.start()
        pipe_before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        before = {number: signal.signal(number, self._ask) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(pipe_before)
            os.close(writer)
            watcher.join()
            os.close(reader)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.wish = 1.0

    def agreed(self, wishes: Tensor) -> bool:
        """True on all ranks at the same step once a rank was asked; called after every step.

        wishes: [] float32, the sum of all ranks' `wish`. On a GPU the answer is that of the step
        before, so that nobody waits for the device.
        """
        if not wishes.is_cuda:
            return bool(wishes > 0)
        answer = self._read()
        self._sum = torch.empty((), dtype=wishes.dtype, pin_memory=True)
        self._sum.copy_(wishes, non_blocking=True)
        self._arrived = torch.cuda.Event()
        self._arrived.record()
        return answer

    def _read(self) -> bool:
        if self._sum is None or self._arrived is None:
            return False
        self._arrived.synchronize()
        return bool(self._sum > 0)


def _end_at_the_second(reader: int) -> None:
    """Watch the signals of this process, also while its main thread waits in a collective."""
    first: float | None = None
    while number := os.read(reader, 1):
        if number[0] not in _SIGNALS:
            continue
        now = time.monotonic()
        if first is None:
            first = now
        elif now - first > _ECHO_S:
            os._exit(128 + number[0])


def write_marker(folder: Path, **facts: Any) -> None:
    """Leave the file `preempted` with `facts` as JSON: this run was asked to stop, and has saved.

    torchrun itself exits with 1 after SIGTERM, so that its exit code cannot say this.
    """
    temporary = folder / f"{MARKER}.tmp"
    temporary.write_text(json.dumps(facts) + "\n", encoding="utf-8")
    temporary.replace(folder / MARKER)


def clear_marker(folder: Path) -> None:
    """Remove the marker of an earlier run."""
    (folder / MARKER).unlink(missing_ok=True)

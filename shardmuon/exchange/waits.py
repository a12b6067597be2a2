"""How long a rank has only waited for others in a step: communication that nothing hid.

Owns the measurement, on the host for CPU groups and by events on the stream of a GPU.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["Waits"]


class Waits:
    """Waits of one step on this rank."""

    def __init__(self) -> None:
        self._on_host = 0.0
        self._on_gpu: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def timed(self, device: torch.device) -> Iterator[None]:
        """Count the block, in which nothing is done but to wait."""
        if device.type != "cuda":
            start = time.perf_counter()
            yield
            self._on_host += time.perf_counter() - start
            return
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        yield
        end.record()
        self._on_gpu.append((begin, end))

    def seconds(self) -> float | None:
        """Sum of all; None while the GPU has not come to the last of them. Does not wait."""
        if self._on_gpu and not self._on_gpu[-1][1].query():
            return None
        on_gpu: float = sum(begin.elapsed_time(end) for begin, end in self._on_gpu) * 1e-3
        return self._on_host + on_gpu

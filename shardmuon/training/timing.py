"""Times of the phases of a step, and memory: what a run measures of itself."""

from __future__ import annotations

import resource
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["PhaseTimer", "memory_bytes"]


class PhaseTimer:
    """Seconds spent in named phases of a step, without stalling a GPU.

    On CUDA the marks are events on the current stream, read when `take` has synchronized.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._spans: dict[str, list[tuple[Any, Any]]] = defaultdict(list)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time what runs inside."""
        start = self._mark()
        yield
        self._spans[name].append((start, self._mark()))

    def take(self) -> dict[str, float]:
        """Mean seconds of each phase since the last call; forgets them."""
        if self._cuda:
            torch.cuda.synchronize()
        means = {}
        for name, spans in self._spans.items():
            seconds = [s.elapsed_time(e) / 1e3 if self._cuda else e - s for s, e in spans]
            means[name] = sum(seconds) / len(seconds)
        self._spans.clear()
        return means

    def _mark(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def memory_bytes(device: torch.device) -> int:
    """Highest memory so far: allocated on the GPU, or resident in this process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024

"""Numbers of a run: the JSONL file, phase times and memory.

Owns the form of metrics.jsonl: one JSON object a line with `event` and `step` (optimizer steps
done). "start" holds the configuration, "train" and "evaluate" the numbers. A resumed run appends,
so that a step can occur twice; `read` keeps the later line.
"""

from __future__ import annotations

import json
import math
import resource
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

__all__ = ["MetricsFile", "PhaseTimer", "memory_bytes", "read"]


class MetricsFile:
    """Appends records; a closed or absent file (path None) takes none and says nothing."""

    def __init__(self, path: Path | None) -> None:
        self._file = None
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a", encoding="utf-8")

    def write(self, event: str, step: int, **values: Any) -> None:
        """Append one line and hand it to the system at once. Non-finite numbers become null."""
        if self._file is not None:
            record = {"event": event, "step": step, **_finite(values)}
            self._file.write(json.dumps(record, allow_nan=False) + "\n")
            self._file.flush()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


def read(path: Path, event: str) -> list[dict[str, Any]]:
    """Records of one kind in the order of their steps, the last one written for each step."""
    found = {}
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            record = json.loads(line)
            if record["event"] == event:
                found[record["step"]] = record
    return [found[step] for step in sorted(found)]


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


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value

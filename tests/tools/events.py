"""Events of Chrome traces, made by hand. Times in microseconds."""

from __future__ import annotations

from typing import Any

Event = dict[str, Any]

HOST = 7
"""The thread that launches."""


def range_(name: str, start: float, stop: float, thread: int = HOST) -> Event:
    """A `record_function` on the host."""
    return _event("user_annotation", name, start, stop, thread)


def launch(
    correlation: int, at: float, name: str = "cudaLaunchKernel", thread: int = HOST
) -> Event:
    """A launch on the host that takes no time."""
    event = _event("cuda_runtime", name, at, at, thread)
    return {**event, "args": {"correlation": correlation}}


def kernel(
    correlation: int, start: float, stop: float, stream: int = 1, name: str = "gemm"
) -> Event:
    """A kernel on a stream."""
    event = _event("kernel", name, start, stop, stream)
    return {**event, "pid": 0, "args": {"correlation": correlation, "stream": stream}}


def _event(cat: str, name: str, start: float, stop: float, thread: int) -> Event:
    times = {"ts": start, "dur": stop - start}
    return {"ph": "X", "cat": cat, "name": name, "pid": 5, "tid": thread, **times}

"""What this process is doing just now, for a thread that looks on.

Owns one record and nothing that acts on it. Written by the code that works, for a microsecond each
time; read by `shardmuon.watchdog`.
"""

from __future__ import annotations

import time
from collections import deque
from typing import NamedTuple

import torch

__all__ = ["Activity", "Mark", "during", "enter_step", "mark", "now", "oldest_mark", "watch_marks"]


class Activity(NamedTuple):
    """text: what is done. since: `time.monotonic()`. waits: it ends when other ranks come too."""

    text: str
    since: float
    waits: bool


class Mark(NamedTuple):
    """A place in the work given to a GPU, reached when `event` is done. since: of being given."""

    text: str
    since: float
    event: torch.cuda.Event


_OUTSIDE = "outside of an optimizer step"
_now = Activity(_OUTSIDE, time.monotonic(), waits=False)
_step = 0
_marks: deque[Mark] | None = None


def now() -> tuple[int, Activity]:
    """(optimizer steps begun in this process, what is being done)."""
    return _step, _now


def enter_step() -> during:
    """For a `with` around one optimizer step: counts it."""
    global _step
    _step += 1
    return during("step")


class during:  # noqa: N801  (reads as a verb: with during("gather of bucket 3"))
    """`with during(text):` says that this is done now. waits: see `Activity`."""

    def __init__(self, text: str, waits: bool = False) -> None:
        self._activity = text, waits
        self._before = _now

    def __enter__(self) -> None:
        global _now
        self._before = _now
        text, waits = self._activity
        _now = Activity(text, time.monotonic(), waits)

    def __exit__(self, *error: object) -> None:
        global _now
        before = self._before
        _now = Activity(before.text, time.monotonic(), before.waits)


def watch_marks(on: bool) -> None:
    """Whether `mark` keeps anything."""
    global _marks
    _marks = deque(maxlen=4096) if on else None


def mark(text: str, device: torch.device) -> None:
    """Remember that the current stream of a GPU has to get here."""
    if _marks is not None and device.type == "cuda":
        while _marks and _marks[0].event.query():
            _marks.popleft()
        event = torch.cuda.Event()
        event.record()
        _marks.append(Mark(f"step {_step}, {text}", time.monotonic(), event))


def oldest_mark(older_than_s: float) -> Mark | None:
    """The oldest that a GPU has not reached, if it is older than that.

    For another thread than the one that works. Events of younger ones are left alone: to ask for
    one while the working thread captures a CUDA graph would spoil the capture.
    """
    for each in tuple(_marks or ()):
        if time.monotonic() - each.since <= older_than_s:
            break
        if not each.event.query():
            return each
    return None

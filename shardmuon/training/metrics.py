"""Records of a run, and their file.

Owns the form of metrics.jsonl: one JSON object a line with `event`, `step` (optimizer steps done)
and `elapsed_s` (seconds since this process began to train). "start" holds the configuration,
"train" and "evaluate" the numbers. A resumed run appends another "start", and repeats steps that
came after its checkpoint; the readers here leave out what was repeated. Must not import torch.
"""

from __future__ import annotations

import json
import math
import time
import warnings
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

__all__ = ["MetricsFile", "Recorder", "Tracker", "history", "read"]


class Tracker(Protocol):
    """Takes the records of a run as they come; only the first rank of a run has any."""

    def write(self, event: str, step: int, numbers: Mapping[str, Any]) -> None:
        """Take one record. numbers: as in metrics.jsonl, perhaps not finite."""

    def close(self) -> None:
        """No record follows."""


class Recorder:
    """Hands each record to all trackers, with the seconds since the recorder was made.

    needed: an error of theirs ends the run. optional: an error of one warns, and it gets no more.
    """

    def __init__(self, needed: Sequence[Tracker], optional: Sequence[Tracker] = ()) -> None:
        self._needed, self._optional = list(needed), list(optional)
        self._began = time.perf_counter()

    def write(self, event: str, step: int, **numbers: Any) -> None:
        """Write one record."""
        record = {"elapsed_s": round(time.perf_counter() - self._began, 3), **numbers}
        for tracker in self._needed:
            tracker.write(event, step, record)
        for tracker in list(self._optional):
            try:
                tracker.write(event, step, record)
            except Exception as error:
                self._give_up(tracker, error)

    def close(self) -> None:
        """Close all trackers."""
        for tracker in self._needed:
            tracker.close()
        for tracker in list(self._optional):
            try:
                tracker.close()
            except Exception as error:
                self._give_up(tracker, error)

    def _give_up(self, tracker: Tracker, error: Exception) -> None:
        self._optional.remove(tracker)
        warnings.warn(
            f"{type(tracker).__name__} gets no more numbers of this run, training goes on: "
            f"{type(error).__name__}: {error}",
            stacklevel=3,
        )


class MetricsFile:
    """metrics.jsonl, appended to. Each line reaches the system at once."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        torn = path.exists() and path.read_bytes()[-1:] not in (b"", b"\n")
        self._file = path.open("a", encoding="utf-8")
        if torn:  # by a process that was killed while it wrote
            self._file.write("\n")

    def write(self, event: str, step: int, numbers: Mapping[str, Any]) -> None:
        """Append one line. Non-finite numbers become null."""
        record = {"event": event, "step": step, **_finite(dict(numbers))}
        self._file.write(json.dumps(record, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read(path: Path, event: str) -> list[dict[str, Any]]:
    """Records of one kind in the order of their steps, the last one written for each step."""
    found = {}
    for record in _records(path):
        if record["event"] == event:
            found[record["step"]] = record
    return [found[step] for step in sorted(found)]


def history(path: Path) -> list[dict[str, Any]]:
    """Records of all processes that took part in a run, as if it had never been interrupted.

    Each also has `time_s` and `tokens`, of the whole run up to there. A "start" drops what came
    after its checkpoint, and the time that was lost with it. Raises ValueError for a file that
    does not begin with a "start".
    """
    kept: list[dict[str, Any]] = []
    begun: dict[str, Any] | None = None
    for record in _records(path):
        step = record["step"]
        if record["event"] == "start":
            time_s, tokens = _reached(kept, record)
            begun = record | {"time_s": time_s, "tokens": tokens}
            kept = [r for r in kept if r["step"] <= step]
            kept.append(begun)
        elif begun is None:
            raise ValueError(f'{path}: expected a line with "event": "start" first')
        else:
            more = (step - begun["step"]) * _tokens_a_step(begun)
            time_s = begun["time_s"] + record.get("elapsed_s", math.nan)
            kept.append(record | {"time_s": time_s, "tokens": begun["tokens"] + more})
    return kept


def _records(path: Path) -> Iterator[dict[str, Any]]:
    """All whole lines; the last may be half written, or was when its process was killed."""
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            try:
                yield json.loads(line)
            except json.JSONDecodeError:
                continue


def _reached(kept: Sequence[dict[str, Any]], start: dict[str, Any]) -> tuple[float, int]:
    """(seconds, tokens) after the steps at which `start` continues, between records in a line."""
    step = start["step"]
    after = bisect_right(kept, step, key=lambda record: record["step"])
    if not after:
        return 0.0, step * _tokens_a_step(start)  # nothing, or it continues another folder's run
    last = kept[after - 1]
    share, time_s, tokens = 0.0, last["time_s"], last["tokens"]
    if after < len(kept) and last["step"] < step:
        following = kept[after]
        share = (step - last["step"]) / (following["step"] - last["step"])
        time_s += share * (following["time_s"] - last["time_s"])
    owner = next(r for r in reversed(kept[:after]) if r["event"] == "start")
    return time_s, tokens + (step - last["step"]) * _tokens_a_step(owner)


def _tokens_a_step(start: Mapping[str, Any]) -> int:
    data = start["config"]["data"]
    return int(data["batch_sequences"] * data["sequence_length"])


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value

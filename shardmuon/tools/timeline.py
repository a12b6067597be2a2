"""Where the time of optimizer steps went, read from a Chrome trace of torch's profiler.

Owns the arithmetic of intervals and the rule that gives each stretch of time to a phase. Imports no
torch. Words: a *range* is a named stretch of host code (`record_function`); a *span* is a stretch
in which a GPU stream ran one kernel or copy or, without a GPU, in which the host was in one range.
A span of a GPU belongs to the innermost range in which it was launched, a span of the host is a
range without the ranges inside it: no time is counted twice. Times are microseconds, as in the
file; of results, milliseconds.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = [
    "COMMUNICATION",
    "MODEL",
    "STEP",
    "Interval",
    "Span",
    "Summary",
    "Timeline",
    "difference",
    "intersection",
    "length",
    "read",
    "union",
]

STEP = "tools.step"
"""Name of the range that must lie around each optimizer step."""

COMMUNICATION, MODEL, REST = "communication", "model", "step"
"""Phases of gloo's collectives, of spans outside all ranges, and of spans that no phase claims."""

_PHASED = re.compile(r"shardmuon\.(prepare|gather|orthogonalize|scatter|apply)\.(\d+)")
_PLAIN = {"shardmuon.header": "header", "shardmuon.elements": "elements", STEP: REST}
_AWAITING = frozenset({"gather", "scatter", "header"})
_DEVICE = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
_LAUNCH = frozenset({"cuda_runtime", "cuda_driver"})

Interval = tuple[float, float]
Event = Mapping[str, Any]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same points as disjoint intervals in ascending order; empty intervals are dropped."""
    out: list[Interval] = []
    for start, stop in sorted(each for each in intervals if each[0] < each[1]):
        if out and start <= out[-1][1]:
            out[-1] = out[-1][0], max(stop, out[-1][1])
        else:
            out.append((start, stop))
    return out


def intersection(a: Sequence[Interval], b: Sequence[Interval]) -> list[Interval]:
    """Points in both; `a` and `b` as `union` returns them."""
    out, i, j = [], 0, 0
    while i < len(a) and j < len(b):
        start, stop = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if start < stop:
            out.append((start, stop))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return out


def difference(a: Sequence[Interval], b: Sequence[Interval]) -> list[Interval]:
    """Points of `a` that are not in `b`; both as `union` returns them."""
    edges = [-math.inf, *(edge for interval in b for edge in interval), math.inf]
    return intersection(a, list(zip(edges[::2], edges[1::2], strict=True)))


def length(intervals: Iterable[Interval]) -> float:
    """Total length of disjoint intervals."""
    return sum(stop - start for start, stop in intervals)


@dataclass(frozen=True, kw_only=True)
class Span:
    """One stretch of work. row: the stream or, on the host, the phase.

    step: number of the optimizer step that it belongs to, None for the model's own work.
    communicates: it is a collective, or the wait for one. computes: what may hide a collective.
    """

    phase: str
    bucket: int | None
    step: int | None
    row: str
    start: float
    stop: float
    communicates: bool
    computes: bool


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Milliseconds of one rank in a step, a mean over steps.

    step: from its first span to its last. orthogonalize: in which a kernel of Newton-Schulz ran.
    communication: in which a collective of the optimizer ran. hidden: of those, under Newton-
    Schulz. exposed: of those, under no other work at all.
    """

    step_ms: float
    orthogonalize_ms: float
    communication_ms: float
    hidden_ms: float
    exposed_ms: float

    @property
    def hidden_share(self) -> float | None:
        """Share of communication that ran under Newton-Schulz, None without communication."""
        return self.hidden_ms / self.communication_ms if self.communication_ms else None

    @property
    def exposed_share(self) -> float:
        """Share of the step in which nothing but communication ran."""
        return self.exposed_ms / self.step_ms if self.step_ms else 0.0


@dataclass(frozen=True)
class Timeline:
    """Spans of one rank, and the extent of each step. on_host: they are of the host, not a GPU."""

    spans: tuple[Span, ...]
    windows: tuple[Interval, ...]
    on_host: bool

    def last_step(self) -> Timeline:
        """The last step alone, without the model's work."""
        number = len(self.windows) - 1
        spans = tuple(span for span in self.spans if span.step == number)
        return Timeline(spans, self.windows[number:], self.on_host)

    def summary(self) -> Summary:
        """Raises ValueError if the trace has no optimizer step."""
        if not self.windows:
            raise ValueError(f"the trace has no range {STEP!r}, expected one per step")
        ours = [span for span in self.spans if span.step is not None]
        talk = _covered(span for span in ours if span.communicates)
        work = _covered(span for span in self.spans if span.computes)
        schulz = _covered(s for s in ours if s.phase == "orthogonalize" and s.computes)
        per_step = 1e-3 / len(self.windows)
        return Summary(
            step_ms=length(self.windows) * per_step,
            orthogonalize_ms=length(schulz) * per_step,
            communication_ms=length(talk) * per_step,
            hidden_ms=length(intersection(talk, schulz)) * per_step,
            exposed_ms=length(difference(talk, work)) * per_step,
        )


def read(events: Iterable[Event]) -> Timeline:
    """The timeline of a trace's `traceEvents`."""
    complete = [event for event in events if event.get("ph") == "X"]
    ranges = [found for event in complete if (found := _range(event)) is not None]
    steps = union((each.start, each.stop) for each in ranges if each.phase == REST)
    pieces = _pieces(ranges)
    if any(event.get("cat") in _DEVICE for event in complete):
        return _of_device(complete, pieces, steps)
    return _of_host(complete, pieces, steps)


def _covered(spans: Iterable[Span]) -> list[Interval]:
    return union((span.start, span.stop) for span in spans)


@dataclass(frozen=True)
class _Range:
    """A range of the optimizer, or a piece of one."""

    phase: str
    bucket: int | None
    thread: tuple[Any, Any]
    start: float
    stop: float


def _thread(event: Event) -> tuple[Any, Any]:
    return event.get("pid"), event.get("tid")


def _extent(event: Event) -> Interval:
    start = float(event["ts"])
    return start, start + float(event.get("dur", 0.0))


def _range(event: Event) -> _Range | None:
    if event.get("cat") != "user_annotation":
        return None
    name = str(event.get("name"))
    match = _PHASED.fullmatch(name)
    if match is not None:
        return _Range(match[1], int(match[2]), _thread(event), *_extent(event))
    if name in _PLAIN:
        return _Range(_PLAIN[name], None, _thread(event), *_extent(event))
    return None


def _pieces(ranges: Iterable[_Range]) -> dict[tuple[Any, Any], list[_Range]]:
    """Each thread's time by innermost range: disjoint pieces in ascending order."""
    by_thread: dict[tuple[Any, Any], list[_Range]] = defaultdict(list)
    for each in ranges:
        by_thread[each.thread].append(each)
    return {thread: _innermost(mine) for thread, mine in by_thread.items()}


def _innermost(ranges: list[_Range]) -> list[_Range]:
    """The pieces of one thread, whose ranges nest."""
    out: list[_Range] = []
    stack: list[_Range] = []
    reached = -math.inf

    def advance(until: float) -> None:
        """Give the time up to `until` to the ranges that are open."""
        nonlocal reached
        while stack and reached < until:
            top = stack[-1]
            stop = min(top.stop, until)
            if reached < stop:
                out.append(_Range(top.phase, top.bucket, top.thread, reached, stop))
                reached = stop
            if top.stop <= until:
                stack.pop()
        reached = max(reached, until)

    for each in sorted(ranges, key=lambda r: (r.start, -r.stop)):
        advance(each.start)
        stack.append(each)
    advance(math.inf)
    return out


def _around(pieces: Sequence[_Range], instant: float) -> _Range | None:
    """The piece that `instant` lies in."""
    index = bisect_right(pieces, instant, key=lambda piece: piece.start) - 1
    return pieces[index] if index >= 0 and instant < pieces[index].stop else None


def _step_of(steps: Sequence[Interval], instant: float) -> int | None:
    """The step that `instant` lies in, or else the next one."""
    index = bisect_right(steps, instant, key=lambda step: step[1])
    return index if index < len(steps) else None


def _of_device(
    events: Sequence[Event],
    pieces: Mapping[tuple[Any, Any], Sequence[_Range]],
    steps: Sequence[Interval],
) -> Timeline:
    """Spans are kernels and copies; a replayed graph's kernels share the launch of the graph."""
    launches = {
        event["args"]["correlation"]: event
        for event in events
        if event.get("cat") in _LAUNCH and "correlation" in event.get("args", {})
    }
    spans = []
    inside: dict[int, list[Interval]] = defaultdict(list)
    for event in events:
        if event.get("cat") not in _DEVICE:
            continue
        args = event.get("args", {})
        launch = launches.get(args.get("correlation"))
        launched = -math.inf if launch is None else float(launch["ts"])
        piece = None if launch is None else _around(pieces.get(_thread(launch), ()), launched)
        step = None if piece is None else _step_of(steps, launched)
        start, stop = _extent(event)
        talks = "nccl" in str(event.get("name")).lower()
        spans.append(
            Span(
                phase=MODEL if piece is None else piece.phase,
                bucket=None if piece is None else piece.bucket,
                step=step,
                row=f"stream {args.get('stream', event.get('tid'))}",
                start=start,
                stop=stop,
                communicates=talks,
                computes=not talks,
            )
        )
        if step is not None and steps[step][0] <= launched:
            inside[step].append((start, stop))
    windows = [(min(a for a, _ in each), max(b for _, b in each)) for each in inside.values()]
    return Timeline(tuple(spans), tuple(sorted(windows)), on_host=False)


def _of_host(
    events: Sequence[Event],
    pieces: Mapping[tuple[Any, Any], Sequence[_Range]],
    steps: Sequence[Interval],
) -> Timeline:
    """Spans are ranges, and gloo's collectives where the profiler saw them, else the waits."""
    spans = []
    for event in events:
        extent = _extent(event)
        step = _step_of(steps, extent[0])
        inside = step is not None and steps[step][0] <= extent[0]
        if inside and str(event.get("name")).startswith("gloo:"):
            spans.append(_host_span(COMMUNICATION, None, step, extent, talks=True))
    seen = bool(spans)
    for piece in (piece for mine in pieces.values() for piece in mine):
        step = _step_of(steps, piece.start)
        talks = piece.phase in _AWAITING and not seen
        extent = piece.start, piece.stop
        spans.append(_host_span(piece.phase, piece.bucket, step, extent, talks=talks))
    return Timeline(tuple(spans), tuple(steps), on_host=True)


def _host_span(
    phase: str, bucket: int | None, step: int | None, extent: Interval, *, talks: bool
) -> Span:
    return Span(
        phase=phase,
        bucket=bucket,
        step=step,
        row=phase,
        start=extent[0],
        stop=extent[1],
        communicates=talks,
        computes=phase not in (COMMUNICATION, REST, *_AWAITING),
    )

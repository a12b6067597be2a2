"""The arithmetic of timelines: against a count on a grid, and on traces made by hand."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardmuon.tools.timeline import (
    COMMUNICATION,
    STEP,
    Interval,
    Timeline,
    difference,
    intersection,
    length,
    read,
    union,
)
from tests.tools.events import Event, kernel, launch, range_

CELLS = 24
INTERVALS = st.lists(
    st.tuples(st.integers(0, CELLS), st.integers(0, CELLS)).map(
        lambda pair: (min(pair), max(pair))
    ),
    max_size=6,
)
Grid = set[int]


def cells(intervals: list[tuple[int, int]] | list[Interval]) -> Grid:
    """The unit cells that intervals with whole ends cover."""
    return {cell for cell in range(CELLS) if any(a <= cell < b for a, b in intervals)}


@given(INTERVALS, INTERVALS)
def test_intervals_are_sets_of_points(a: list[tuple[int, int]], b: list[tuple[int, int]]) -> None:
    whole_a, whole_b = union(a), union(b)
    for found, right in (
        (whole_a, cells(a)),
        (intersection(whole_a, whole_b), cells(a) & cells(b)),
        (difference(whole_a, whole_b), cells(a) - cells(b)),
    ):
        assert cells(found) == right
        assert length(found) == len(right)
        assert all(start < stop for start, stop in found)
        assert all(x[1] <= y[0] for x, y in pairwise(found))
    assert all(x[1] < y[0] for x, y in pairwise(whole_a))


@given(INTERVALS, INTERVALS, INTERVALS)
def test_a_summary_counts_every_instant_once(
    schulz: list[tuple[int, int]], talk: list[tuple[int, int]], other: list[tuple[int, int]]
) -> None:
    """Kernels of any number and overlap, on streams of their own, against the count of cells."""
    events = [range_(STEP, 0, 10), range_("shardmuon.orthogonalize.0", 1, 2)]
    events += [range_("shardmuon.gather.0", 3, 4), range_("shardmuon.apply.0", 5, 6), launch(9, 9)]
    for at, name, extents in ((1, "gemm", schulz), (3, "ncclKernel", talk), (5, "add", other)):
        events.append(launch(at, at))
        events += [kernel(at, a, b, stream=at, name=name) for a, b in extents]
    events.append(kernel(9, 0, CELLS, stream=0, name="ncclKernel_of_the_whole_step"))
    found = read(events).summary()
    talking = set(range(CELLS))
    assert found.step_ms == pytest.approx(CELLS / 1e3)
    assert found.orthogonalize_ms == pytest.approx(len(cells(schulz)) / 1e3)
    assert found.communication_ms == pytest.approx(len(talking) / 1e3)
    assert found.hidden_ms == pytest.approx(len(cells(schulz)) / 1e3)
    assert found.exposed_ms == pytest.approx(len(talking - cells(schulz) - cells(other)) / 1e3)


def two_buckets() -> list[Event]:
    """Backward, then a step with two buckets; collectives on stream 2.

    Stream 1: backward [0, 30), prepare [30, 34), orthogonalize [50, 70) and [70, 90),
    AdamW [90, 95). Stream 2: FSDP's [10, 28), gather [34, 50) and [52, 66), scatter [72, 100).
    """
    return [
        launch(1, 0, thread=8),
        kernel(1, 0, 30),
        launch(2, 1, thread=8),
        kernel(2, 10, 28, stream=2, name="ncclDevKernel_ReduceScatter"),
        range_(STEP, 2, 29),
        range_("shardmuon.prepare.0", 3, 4),
        launch(3, 3.5),
        kernel(3, 30, 34),
        range_("shardmuon.gather.0", 4, 5),
        launch(4, 4.5),
        kernel(4, 34, 50, stream=2, name="ncclDevKernel_SendRecv"),
        range_("shardmuon.gather.1", 6, 7),
        launch(5, 6.5),
        kernel(5, 52, 66, stream=2, name="ncclDevKernel_SendRecv"),
        range_("shardmuon.orthogonalize.0", 8, 14),
        launch(6, 9, name="cudaGraphLaunch"),
        kernel(6, 50, 60),
        kernel(6, 60, 70),
        range_("shardmuon.scatter.0", 11, 12),
        launch(7, 11.5),
        kernel(7, 72, 100, stream=2, name="ncclDevKernel_SendRecv"),
        range_("shardmuon.orthogonalize.1", 15, 16),
        launch(8, 15.5),
        kernel(8, 70, 90),
        range_("shardmuon.elements", 17, 18),
        launch(9, 17.5),
        kernel(9, 90, 95),
        {"ph": "i", "name": "an instant", "ts": 3},
        {"ph": "X", "cat": "gpu_user_annotation", "name": STEP, "pid": 0, "ts": 30, "dur": 99},
    ]


def test_kernels_belong_to_the_innermost_range_of_their_launch() -> None:
    found = read(two_buckets())
    assert not found.on_host
    assert [(s.phase, s.bucket, s.step, s.communicates) for s in found.spans] == [
        ("model", None, None, False),
        ("model", None, None, True),
        ("prepare", 0, 0, False),
        ("gather", 0, 0, True),
        ("gather", 1, 0, True),
        ("orthogonalize", 0, 0, False),
        ("orthogonalize", 0, 0, False),
        ("scatter", 0, 0, True),
        ("orthogonalize", 1, 0, False),
        ("elements", None, 0, False),
    ]
    assert {span.row for span in found.spans} == {"stream 1", "stream 2"}


def test_hidden_and_exposed_communication() -> None:
    found = read(two_buckets()).summary()
    assert found.step_ms == pytest.approx(0.070)  # from 30 to 100: the host ran ahead
    assert found.orthogonalize_ms == pytest.approx(0.040)
    assert found.communication_ms == pytest.approx(0.016 + 0.014 + 0.028)
    assert found.hidden_ms == pytest.approx(0.014 + 0.018)
    assert found.exposed_ms == pytest.approx(0.016 + 0.005)
    assert found.hidden_share == pytest.approx(32 / 58)
    assert found.exposed_share == pytest.approx(21 / 70)


def test_a_step_without_named_phases_has_no_newton_schulz() -> None:
    events = [range_(STEP, 0, 9), launch(1, 1), kernel(1, 5, 25)]
    events += [launch(2, 2), kernel(2, 20, 45, stream=2, name="ncclKernel")]
    found = read(events).summary()
    assert found.step_ms == pytest.approx(0.040)
    assert found.orthogonalize_ms == 0
    assert found.exposed_ms == pytest.approx(0.020)


def test_what_is_sent_during_backward_counts_for_the_next_step() -> None:
    """Another thread launches it; the step begins where its own first kernel does."""
    events = [range_("shardmuon.gather.0", 1, 2, thread=8), launch(1, 1, thread=8)]
    events += [kernel(1, 2, 12, stream=2, name="ncclKernel"), range_(STEP, 20, 30)]
    events += [launch(2, 21), kernel(2, 22, 32), range_(STEP, 40, 50), launch(3, 41)]
    events += [kernel(3, 42, 62), launch(4, 60), kernel(4, 70, 80)]
    timeline = read(events)
    assert [span.step for span in timeline.spans] == [0, 0, 1, None]
    assert list(timeline.windows) == [(22, 32), (42, 62)]
    found = timeline.summary()
    assert found.step_ms == pytest.approx((10 + 20) / 2e3)
    assert found.exposed_ms == pytest.approx(10 / 2e3)
    assert [span.start for span in timeline.last_step().spans] == [42]
    assert timeline.last_step().summary().step_ms == pytest.approx(0.020)


def host_step(gloo: bool) -> Timeline:
    """A step of 100 on the host; gloo's own thread works from 12 on, and in backward too."""
    events = [
        range_(STEP, 0, 100),
        range_("shardmuon.header", 0, 10),
        range_("shardmuon.gather.1", 10, 14),
        range_("shardmuon.orthogonalize.0", 14, 54),
        range_("shardmuon.scatter.0", 50, 52),
        range_("shardmuon.gather.1", 60, 75),
        range_("shardmuon.apply.0", 80, 90),
    ]
    if gloo:
        events += [range_("gloo:all_to_all", 12, 72, thread=9)]
        events += [range_("gloo:reduce_scatter", -40, -20, thread=9)]
    return read(events)


def test_on_the_host_a_range_lacks_the_ranges_inside_it() -> None:
    found = host_step(gloo=True)
    assert found.on_host
    lengths: dict[str, float] = {}
    for span in found.spans:
        lengths[span.phase] = lengths.get(span.phase, 0) + span.stop - span.start
    assert lengths.pop(COMMUNICATION) == 60
    assert lengths == {
        "header": 10,
        "gather": 4 + 15,
        "orthogonalize": 38,
        "scatter": 2,
        "apply": 10,
        "step": 21,
    }
    assert sum(lengths.values()) == 100


def test_gloos_collectives_hide_under_the_hosts_work() -> None:
    found = host_step(gloo=True).summary()
    assert found.communication_ms == pytest.approx(0.060)
    assert found.hidden_ms == pytest.approx(0.038)
    assert found.exposed_ms == pytest.approx(0.022)


def test_without_gloos_collectives_the_waits_stand_for_them() -> None:
    found = host_step(gloo=False).summary()
    assert found.communication_ms == pytest.approx(0.010 + 0.004 + 0.002 + 0.015)
    assert found.hidden_ms == 0
    assert found.exposed_ms == found.communication_ms


def test_a_range_that_outlasts_its_parent_by_a_rounding_is_counted_once() -> None:
    events = [range_(STEP, 0, 10), range_("shardmuon.elements", 8, 10.001)]
    assert sum(span.stop - span.start for span in read(events).spans) == pytest.approx(10.001)


def test_a_trace_without_a_step_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no range 'tools\.step'"):
        read([range_("shardmuon.header", 0, 1)]).summary()

"""The bound on what a step holds: by hand, and for plans too large to look at as a whole."""

from __future__ import annotations

import pytest

from shardmuon.planning.layout import Layout, Mesh
from shardmuon.planning.memory import Held, most_bytes
from shardmuon.planning.plan import Plan
from shardmuon.planning.planner import make_plan
from tests.planning.records import matrix, rows_over

SQUARE = 64 * 64


def squares(count: int, ranks: int, *, in_bucket: int = 1, exchange: str = "auto") -> Plan:
    """Float32 matrices of SQUARE elements, sharded by rows."""
    layout = rows_over(ranks)
    matrices = [matrix(f"m{i:02}", 64, 64, layout, wire="float32") for i in range(count)]
    return make_plan(matrices, bucket_bytes=4 * SQUARE * in_bucket, exchange=exchange)


def elements(plan: Plan, rank: int) -> float:
    """The bound in float32 matrices."""
    return plan.transient_bytes([rank])[rank] / (4 * SQUARE)


def test_one_matrix_on_one_rank() -> None:
    # The block, the whole, the update, and four matrices in Newton-Schulz; blocks are gone by then.
    assert elements(squares(1, 1), 0) == 1 + 1 + 4


def test_three_buckets_are_in_flight() -> None:
    # On its way in: blocks sent and received. Worked on: as above. On its way back: likewise.
    assert elements(squares(12, 4), 0) == 2 + (1 + 1 + 4) + 2
    assert elements(squares(120, 4), 0) == 10
    # With all-gathers, buffers that are received hold the parts of four ranks.
    assert elements(squares(12, 4, exchange="all_gather"), 0) == (1 + 4) + (1 + 1 + 4) + (1 + 4)


def test_a_rank_that_owns_nothing_holds_only_blocks() -> None:
    plan = squares(1, 4)
    (idle, *_) = set(range(4)) - set(plan.owners().values())
    # Its rows as sent, or as received, beside four float32 blocks in elementwise work.
    assert elements(plan, idle) == (1 + 4) / 4


def test_matrices_of_one_kind_are_one_batch() -> None:
    one, two = squares(8, 4, in_bucket=1), squares(8, 4, in_bucket=2)
    assert len(one.buckets) == 2 * len(two.buckets) == 2
    assert elements(two, 0) == 2 * (1 + 1 + 4)
    assert elements(one, 0) == max(2 + 6, 6 + 2)


def test_buckets_that_are_passed_over_bring_others_together() -> None:
    small, large = Held(1, 1, 2, 1, 1), Held(100, 100, 200, 150, 150)
    assert most_bytes([large, small, small, small, large]) == 200 + 150
    assert most_bytes([]) == 0


def test_large_plans_report_the_bytes_of_some_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = squares(40, 64)
    monkeypatch.setattr("shardmuon.planning.report.MOST_PARCELS", 400)
    report = plan.report().splitlines()
    rows = {row.split()[0]: row.split() for row in report if row[:1].isdigit()}
    assert len(rows) == 64
    assert list(plan.transient_bytes([9, 63])) == [9, 63]
    assert float(rows["9"][-1]) == pytest.approx(plan.transient_bytes([9])[9] / 1e6, abs=1e-3)
    assert rows["10"][-3:] == ["-", "-", "-"]
    assert any("of the first 10 ranks" in line for line in report)


def test_report_shows_the_bound_of_each_rank() -> None:
    plan = squares(13, 4)
    report = plan.report().splitlines()
    (header,) = (row for row in report if row.startswith("rank "))
    assert header.endswith("step MB")
    rows = [row.split() for row in report if row[:1].isdigit()]
    shown = {int(row[0]): float(row[-1]) for row in rows}
    bound = {rank: bytes / 1e6 for rank, bytes in plan.transient_bytes().items()}
    assert shown == pytest.approx(bound, abs=1e-3)
    assert any(f"the largest is {max(bound.values()):.3f} MB" in line for line in report)


def test_ranks_outside_a_mesh_hold_nothing_for_it() -> None:
    pair = Layout(Mesh((0, 1), (2,)))
    wide = [matrix("w", 8, 8, rows_over(3))]
    alone, both = (
        make_plan(ms, bucket_bytes=2**20) for ms in (wide, [*wide, matrix("p", 256, 256, pair)])
    )
    assert both.transient_bytes([2])[2] <= alone.transient_bytes([2])[2] + 2 * 6 * 8 * 8
    assert both.transient_bytes([0])[0] > 256 * 256 * 2

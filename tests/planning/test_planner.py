"""Owners and buckets: complete, balanced, bounded, and independent of order."""

from __future__ import annotations

import random
from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardmuon.planning.cut import Cut
from shardmuon.planning.layout import Layout, Mesh
from shardmuon.planning.matrix import Matrix
from shardmuon.planning.plan import Bucket, Plan
from shardmuon.planning.planner import bucket_size, make_plan
from tests.planning.records import gpt2, matrix, rows_over

MIB = 2**20

shapes = st.lists(st.tuples(st.integers(1, 300), st.integers(1, 300)), min_size=1, max_size=40)


def plan_of(sizes: list[tuple[int, int]], ranks: int, bucket_bytes: int = MIB) -> Plan:
    layout = rows_over(ranks)
    matrices = [matrix(f"m{i:03}", *size, layout) for i, size in enumerate(sizes)]
    return make_plan(matrices, bucket_bytes=bucket_bytes)


@given(shapes, st.integers(1, 9))
def test_every_matrix_has_one_owner_of_its_mesh(sizes: list[tuple[int, int]], ranks: int) -> None:
    plan = plan_of(sizes, ranks)
    assert sorted(plan.owners()) == [f"m{i:03}" for i in range(len(sizes))]
    assert set(plan.owners().values()) <= set(range(ranks))
    assert sum(plan.loads().values()) == sum(m.cost for m, _ in plan)


@given(shapes, st.integers(1, 9))
def test_makespan_is_within_the_bound_of_longest_first(
    sizes: list[tuple[int, int]], ranks: int
) -> None:
    plan = plan_of(sizes, ranks)
    # Graham 1969: list scheduling ends within total / ranks + largest (1 - 1 / ranks).
    total = sum(m.cost for m, _ in plan)
    largest = max(m.cost for m, _ in plan)
    assert plan.lower_bound <= plan.makespan
    assert plan.makespan <= total / ranks + largest * (1 - 1 / ranks) + 1e-6


@given(shapes, st.integers(1, 6), st.randoms())
def test_plan_does_not_depend_on_the_order_of_matrices(
    sizes: list[tuple[int, int]], ranks: int, rng: random.Random
) -> None:
    layout = rows_over(ranks)
    matrices = [matrix(f"m{i}", *size, layout) for i, size in enumerate(sizes)]
    shuffled = matrices[:]
    rng.shuffle(shuffled)
    one, other = (make_plan(ms, bucket_bytes=4096) for ms in (matrices, shuffled))
    assert one == other
    assert one.digest == other.digest


@given(shapes, st.integers(1, 6), st.integers(1, 200_000))
def test_an_owner_receives_at_most_bucket_bytes_in_a_bucket(
    sizes: list[tuple[int, int]], ranks: int, bucket_bytes: int
) -> None:
    for bucket in plan_of(sizes, ranks, bucket_bytes).buckets:
        received: dict[int, list[Matrix]] = defaultdict(list)
        for each, owner in zip(bucket.matrices, bucket.owners, strict=True):
            received[owner].append(each)
        for portion in received.values():
            assert len(portion) == 1 or sum(m.total_bytes for m in portion) <= bucket_bytes


def test_buckets_never_mix_wire_dtypes_or_meshes() -> None:
    four, two = rows_over(4), Layout(Mesh((1, 2), (2,)))
    matrices = [matrix(f"a{i}", 8, 8, four) for i in range(3)]
    matrices += [matrix(f"b{i}", 8, 8, four, wire="float32") for i in range(3)]
    matrices += [matrix(f"c{i}", 8, 8, two) for i in range(3)]
    plan = make_plan(matrices, bucket_bytes=MIB)
    kinds = [{(m.layout, m.wire_dtype) for m in bucket.matrices} for bucket in plan.buckets]
    assert len(plan) == 9
    assert all(len(kind) == 1 for kind in kinds)
    assert {plan.owners()[f"c{i}"] for i in range(3)} <= {1, 2}


def test_loads_are_carried_from_the_large_mesh_to_the_small_one() -> None:
    large = matrix("dense", 512, 512, rows_over(2))
    small = matrix("expert", 8, 8, Layout(Mesh((0, 1), (2, 1))))
    plan = make_plan([small, large], bucket_bytes=MIB)
    assert plan.owners()["dense"] != plan.owners()["expert"]


def test_gpt2_on_sixteen_ranks_is_perfectly_balanced() -> None:
    """Longest first alone comes to 1.095."""
    layout = rows_over(16)
    plan = make_plan([matrix(*each, layout) for each in gpt2()], bucket_bytes=64 * MIB)
    assert plan.imbalance == 1.0
    assert plan.lower_bound == pytest.approx(sum(plan.loads().values()) / 16)


def test_digest_sees_every_input() -> None:
    base = [matrix(name, 8, cols, rows_over(2)) for name, cols in (("a", 8), ("b", 6), ("d", 5))]
    plans = [
        make_plan(base, bucket_bytes=MIB),
        make_plan(base[:2], bucket_bytes=MIB),
        make_plan(base, bucket_bytes=16),
        make_plan(base, bucket_bytes=MIB, exchange="all_gather"),
        make_plan(base, bucket_bytes=MIB, settings="x"),
        make_plan([matrix("a", 8, 7, rows_over(2)), *base[1:]], bucket_bytes=MIB),
        make_plan([matrix(m.id, m.rows, m.cols, rows_over(3)) for m in base], bucket_bytes=MIB),
        make_plan([matrix("c", 8, 8, rows_over(2)), *base[1:]], bucket_bytes=MIB),
    ]
    assert len({plan.digest for plan in plans}) == len(plans)


def test_plans_check_themselves() -> None:
    one = matrix("a", 8, 8, rows_over(2))
    with pytest.raises(ValueError, match="a is planned twice"):
        make_plan([one, one], bucket_bytes=MIB)
    with pytest.raises(ValueError, match="owner 7 is not in its mesh"):
        Bucket((one,), (7,))
    with pytest.raises(ValueError, match="cannot share a bucket"):
        Bucket((one, matrix("b", 8, 8, rows_over(3))), (0, 0))


def test_report_names_owners_bytes_and_what_limits_the_plan() -> None:
    sizes = [(256, 256), (8, 8)]
    plan = plan_of(sizes, 3)
    report = plan.report()
    assert "2 matrices on 3 rank(s)" in report
    assert "m000 alone costs" in report
    assert "own no matrix: 2" in report
    for name, owner in plan.owners().items():
        line = next(row for row in report.splitlines() if row.startswith(name))
        assert line.split()[-5] == str(owner)


def test_an_empty_plan_reports_itself() -> None:
    plan = make_plan([], bucket_bytes=MIB)
    assert plan.imbalance == 1.0
    assert "0 matrices" in plan.report()


def test_matrices_that_a_rank_holds_whole_stay_there_if_that_costs_no_time() -> None:
    layout = rows_over(4)
    stack = [Cut((8, 6, 10), expert) for expert in range(8)]
    experts = [Matrix(f"e[{i}]", cut, layout, "bfloat16", 2, 100) for i, cut in enumerate(stack)]
    plan = make_plan(experts, bucket_bytes=MIB)
    assert plan.owners() == {f"e[{i}]": i // 2 for i in range(8)}
    assert set(plan.bytes_sent().values()) == {0}
    # One rank holds all of two experts, and would need the time of two: they part.
    pair = [Matrix(f"e[{i}]", Cut((2, 6, 10), i), rows_over(1), "bfloat16", 2, 100) for i in (0, 1)]
    assert set(make_plan(pair, bucket_bytes=MIB).owners().values()) == {0}
    uneven = [
        Matrix(f"e[{i}]", Cut((5, 6, 10), i), rows_over(4), "bfloat16", 2, cost)
        for i, cost in enumerate((100, 100, 1, 1, 1))
    ]
    assert make_plan(uneven, bucket_bytes=MIB).makespan == 100


def test_ranks_of_a_mesh_agree_whatever_other_meshes_each_is_in() -> None:
    def on(*ranks: int) -> Layout:
        return Layout(Mesh(ranks, (len(ranks),)))

    world = [matrix(f"w{i}", 8 + i, 8, on(0, 1, 2, 3)) for i in range(5)]
    halves = {
        pair: [matrix(f"h{pair}{i}", 9, 9 + i, on(*pair)) for i in range(3)]
        for pair in ((0, 1), (2, 3), (0, 2), (1, 3))
    }
    plans = {
        rank: make_plan(
            [*world, *(m for pair, ms in halves.items() if rank in pair for m in ms)],
            bucket_bytes=MIB,
        )
        for rank in range(4)
    }
    for pair in halves:
        mesh = Mesh(pair, (2,))
        assert len({plans[rank].digest_of((mesh,)) for rank in pair}) == 1
    assert len({plans[rank].digest_of((Mesh((0, 1, 2, 3), (4,)),)) for rank in range(4)}) == 1


def test_report_says_who_shares_the_work() -> None:
    mesh = Mesh((0, 1, 2, 5), (2, 2))
    plan = make_plan([matrix("a", 8, 8, Layout(mesh))], bucket_bytes=MIB)
    assert "mesh 2x2 of ranks 0-2, 5: 1 matrices, each orthogonalized once" in plan.report()


@pytest.mark.parametrize(
    ("count", "ranks", "mib", "buckets"),
    [(4, 2, 128, 1), (64, 8, 128, 1), (128, 2, 256, 8), (160, 8, 160, 4), (4, 1, 256, 1)],
)
def test_buckets_are_a_quarter_of_what_an_owner_has(
    count: int, ranks: int, mib: int, buckets: int
) -> None:
    """Matrices of 16 or 32 MiB; within 128 and 256 MiB."""
    layout = rows_over(ranks)
    cols = 2048 if count < 100 else 4096
    matrices = [matrix(f"m{i}", 4096, cols, layout) for i in range(count)]
    assert bucket_size(matrices) == mib * MIB
    plan = make_plan(matrices)
    assert len(plan.buckets) == buckets
    assert plan == make_plan(matrices, bucket_bytes=mib * MIB)


def test_with_overlap_the_last_layer_comes_first_whatever_the_order_given() -> None:
    """Numbers count by value, also those that differ in leading zeros only."""
    names = ["layers.2.w", "layers.10.w", "layers.9.w", "layers.09.w", "head.w"]
    layout = rows_over(2)
    matrices = [matrix(name, 64, 64, layout) for name in names]
    plans = [
        make_plan(each, bucket_bytes=1, overlap="backward") for each in (matrices, matrices[::-1])
    ]
    assert plans[0] == plans[1]
    order = [sorted(m.id for m in bucket.matrices) for bucket in plans[0].buckets]
    assert sorted(name for bucket in order for name in bucket) == sorted(names)
    assert "layers.10.w" in order[0]
    assert "head.w" in order[-1]

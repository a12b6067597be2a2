"""Teams, replicas and homes: who owns what beyond one owner for each matrix."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardmuon.planning.cost import newton_schulz_flops, panel_flops
from shardmuon.planning.cut import Cut
from shardmuon.planning.device import DEVICES, Device, Link, Rate
from shardmuon.planning.layout import Layout, Mesh, Split
from shardmuon.planning.matrix import Matrix, panels_of
from shardmuon.planning.owners import Assigned
from shardmuon.planning.plan import Bucket, Plan
from shardmuon.planning.planner import Freedom, make_buckets, make_plan
from shardmuon.planning.simulation import simulate
from shardmuon.planning.text import dumps, loads

SEGMENTS = (3, 2)
# A TFLOP/s whatever the size, links that cost nothing.
IDEAL = Device(
    name="ideal",
    rates={method: Rate(1.0, 0.0, 0.0) for method in ("standard", "symmetric", "gram")},
    memory_gbs=1e12,
    near=Link(1e12, 0.0),
    far=Link(1e12, 0.0),
    near_ranks=8,
)
SHARING = Freedom(IDEAL, share_large=True)


def record(
    name: str, rows: int, cols: int, layout: Layout, shape: tuple[int, ...] | None = None
) -> Matrix:
    cut = Cut(shape or (rows, cols), expert=None if shape is None else int(name[1:]))
    cost = newton_schulz_flops(rows, cols, SEGMENTS, "gram")
    return Matrix(
        name, cut, layout, "bfloat16", 2, cost, method="gram", segments=SEGMENTS, may_share=True
    )


def rows_over(*mesh: int) -> Layout:
    """The last axis shards rows, the others replicate."""
    ranks = 1
    for size in mesh:
        ranks *= size
    return Layout(Mesh(tuple(range(ranks)), mesh), (Split(len(mesh) - 1, 0),))


def shares(plan: Plan) -> dict[str, tuple[int, ...]]:
    """Owners of each matrix, several for one that a team shares."""
    owners: dict[str, tuple[int, ...]] = {}
    for matrix, owner in plan:
        owners[matrix.whole_id] = (*owners.get(matrix.whole_id, ()), owner)
    return owners


# -- teams --------------------------------------------------------------------------------------


def test_one_large_matrix_is_shared_by_the_largest_team_that_helps() -> None:
    layout = rows_over(16)
    plan = make_plan([record("m", 512, 2048, layout)], freedom=SHARING)
    assert shares(plan) == {"m": tuple(range(16))}
    each = panel_flops(512, 2048 // 16, SEGMENTS)
    assert plan.loads() == dict.fromkeys(range(16), each)
    columns = {m.cut.part_cols for m, _ in plan}
    assert columns == {(i * 128, (i + 1) * 128) for i in range(16)}
    alone = make_plan([record("m", 512, 2048, layout)], freedom=Freedom(IDEAL))
    assert simulate(plan, IDEAL).step_ms < 0.45 * simulate(alone, IDEAL).step_ms


def test_a_slow_link_makes_teams_smaller_or_none() -> None:
    layout = rows_over(4)
    one = [record("m", 512, 2048, layout)]
    square = 512 * 512 * 2 / 2  # bytes of one sum that come from the other of two ranks
    gain = one[0].cost - panel_flops(512, 1024, SEGMENTS)  # microseconds at a TFLOP/s, times 1e6
    for factor, sizes in ((0.001, {4}), (10.0, {1})):
        rate = 4 * square / (gain * 1e-9 * factor) * 1e-6  # GB/s
        device = replace(IDEAL, near=Link(rate, 0.0))
        plan = make_plan(one, freedom=Freedom(device, share_large=True))
        assert {len(owners) for owners in shares(plan).values()} == sizes


def test_small_matrices_are_never_shared_and_none_without_leave() -> None:
    layout = rows_over(4)
    small = [record(f"s{i}", 64, 64, layout) for i in range(8)]
    large = record("m", 512, 2048, layout)
    plan = make_plan([large, *small], freedom=SHARING)
    owners = shares(plan)
    assert len(owners["m"]) == 4
    assert all(len(owners[m.id]) == 1 for m in small)
    assert all(len(each) == 1 for each in shares(make_plan([large, *small])).values())
    mute = replace(large, may_share=False)
    assert len(shares(make_plan([mute, *small], freedom=SHARING))["m"]) == 1


def test_teams_lie_along_the_last_axis() -> None:
    plan = make_plan([record("m", 512, 2048, rows_over(4, 2))], freedom=SHARING)
    (team,) = shares(plan).values()
    assert team == (0, 1)


def test_buckets_of_a_team_are_cut_alike_though_its_last_panel_is_smaller() -> None:
    layout, team = rows_over(4), (0, 1, 2, 3)
    shared = [panels_of(record(f"m{i}", 16, 45, layout), 4, 0, 1) for i in range(5)]
    assigned = [Assigned(pieces, team) for pieces in shared]
    buckets = make_buckets(assigned, 2 * shared[0][0].total_bytes, "none")
    assert [Counter(bucket.owners) for bucket in buckets] == [
        dict.fromkeys(team, 2),
        dict.fromkeys(team, 2),
        dict.fromkeys(team, 1),
    ]


def test_panels_that_are_no_team_are_refused() -> None:
    layout = rows_over(4)
    pieces = panels_of(record("m", 16, 64, layout), 2, 0, 1)
    Bucket(pieces, (2, 3))
    for owners in ((1, 2), (1, 0), (0, 0), (0, 2)):
        with pytest.raises(ValueError, match="not those of a team"):
            Bucket(pieces, owners)
    with pytest.raises(ValueError, match="not those of a team"):
        Bucket(pieces[:1], (0,))


shapes = st.lists(
    st.tuples(st.sampled_from([16, 64, 200, 512]), st.sampled_from([16, 96, 800])),
    min_size=1,
    max_size=10,
)


@settings(deadline=None)
@given(
    shapes,
    st.sampled_from([(1,), (2,), (3,), (8,), (2, 4), (4, 2)]),
    st.sampled_from(["once", "repeat"]),
    st.sampled_from(["h200", "cpu"]),
    st.sampled_from([1, 10_000, 2**28]),
    st.randoms(),
)
def test_every_matrix_has_one_owner_or_one_team(
    sizes: list[tuple[int, int]],
    mesh: tuple[int, ...],
    replicas: str,
    device: str,
    in_bucket: int,
    rng: random.Random,
) -> None:
    freedom = Freedom(DEVICES[device], share_large=True, replicas=replicas)
    matrices = [record(f"m{i}", *size, rows_over(*mesh)) for i, size in enumerate(sizes)]
    shuffled = matrices[:]
    rng.shuffle(shuffled)
    plan, other = (
        make_plan(m, bucket_bytes=in_bucket, freedom=freedom) for m in (matrices, shuffled)
    )
    assert plan == other == loads(dumps(plan))
    assert plan.digest == other.digest
    areas: Counter[str] = Counter()
    for matrix, _ in plan:
        areas[matrix.whole_id] += matrix.rows * matrix.cols
        assert matrix.whole_shape == matrices[int(matrix.whole_id[1:])].whole_shape
    assert areas == {m.id: m.rows * m.cols for m in matrices}
    copies = mesh[0] if len(mesh) == 2 and replicas == "repeat" else 1
    if all(matrix.panel is None for matrix, _ in plan):
        assert sum(plan.loads().values()) == copies * sum(m.cost for m in matrices)
    assert simulate(plan, freedom.device).step_ms > 0


# -- replicas -----------------------------------------------------------------------------------


def test_replicas_repeat_the_work_where_their_link_is_slow() -> None:
    layout = rows_over(4, 8)
    matrices = [record(f"m{i}", 512, 2048, layout) for i in range(16)]
    auto = Freedom(replace(IDEAL, far=Link(1e12, 0.0)), replicas="auto")
    assert not any(bucket.repeated for bucket in make_plan(matrices, freedom=auto).buckets)
    slow = replace(auto, device=replace(IDEAL, far=Link(0.001, 1.0)))
    plan = make_plan(matrices, freedom=slow)
    assert all(bucket.repeated for bucket in plan.buckets)
    assert plan.loads() == dict.fromkeys(range(32), 2 * matrices[0].cost)
    once = make_plan(matrices, freedom=replace(slow, replicas="once"))
    assert simulate(plan, slow.device).step_ms < simulate(once, slow.device).step_ms
    assert max(plan.bytes_sent().values()) < max(once.bytes_sent().values())


def test_replicas_on_one_host_share_the_work() -> None:
    slow = replace(IDEAL, near=Link(0.001, 1.0))
    matrices = [record(f"m{i}", 64, 64, rows_over(2, 4)) for i in range(8)]
    plan = make_plan(matrices, freedom=Freedom(slow, replicas="auto"))
    assert not any(bucket.repeated for bucket in plan.buckets)


def test_matrices_without_replicas_are_not_repeated() -> None:
    mesh = Mesh(tuple(range(4)), (2, 2))
    both = Layout(mesh, (Split(0, 0), Split(1, 0)))
    matrices = [record("a", 64, 64, both), record("b", 64, 64, rows_over(2, 2))]
    plan = make_plan(matrices, freedom=Freedom(IDEAL, replicas="repeat"))
    assert {b.matrices[0].id: b.repeated for b in plan.buckets} == {"a": False, "b": True}
    # "b" is done twice, and "a" by a rank that has the least of it.
    assert sum(plan.loads().values()) == 3 * matrices[0].cost
    assert plan.makespan == matrices[0].cost


# -- homes --------------------------------------------------------------------------------------


def test_equal_matrices_change_places_to_lie_at_home() -> None:
    """Two stacks of three, of which rank 0 holds two each: one of its four has to leave."""
    layout = rows_over(2)
    stack = [record(f"e{i}", 64, 64, layout, (3, 64, 64)) for i in range(3)]
    experts = [*stack, *(replace(each, id=f"f{i}") for i, each in enumerate(stack))]
    plan = make_plan(experts)
    assert plan.makespan == 3 * experts[0].cost
    owners = plan.owners()
    assert sum(owners[e.id] in e.holders for e in experts) == 5


@given(st.integers(2, 9), st.integers(2, 5), st.integers(0, 6), st.integers(0, 3))
def test_homes_cost_no_time(experts: int, ranks: int, dense: int, large: int) -> None:
    layout = rows_over(ranks)
    stack = (experts, 32, 32)
    stacked = [record(f"e{i}", 32, 32, layout, stack) for i in range(experts)]
    stacked += [replace(each, id=f"f{i}") for i, each in enumerate(stacked)]
    matrices = [*stacked, *(record(f"m{i}", 32, 32, layout) for i in range(dense))]
    matrices += [record(f"l{i}", 64, 96, layout) for i in range(large)]
    plan = make_plan(matrices)
    homeless = [replace(m, cut=Cut((m.rows, m.cols))) for m in matrices]  # cut over all ranks
    assert plan.makespan == make_plan(homeless).makespan
    # No two of a kind could both be nearer home by changing places.
    owners = plan.owners()
    for one in stacked:
        for other in stacked:
            gains = owners[other.id] in one.holders and owners[one.id] in other.holders
            away = owners[one.id] not in one.holders and owners[other.id] not in other.holders
            assert not (gains and away)

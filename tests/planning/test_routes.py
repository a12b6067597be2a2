"""Routes, executed by a simulation of all ranks: every block arrives once, both ways.

The simulation moves sets of cells instead of tensors. It covers more than the optimizer accepts
yet (meshes of several axes), because routes are data and cost nothing to check.
"""

from __future__ import annotations

from itertools import permutations

from hypothesis import given, settings
from hypothesis import strategies as st

from shardmuon.planning.layout import Coordinate, Layout, Mesh, Split
from shardmuon.planning.plan import Bucket, Plan
from shardmuon.planning.routes import Hop, Parcel, Route
from tests.planning.records import matrix

Held = dict[int, dict[tuple[int, Coordinate], Parcel]]


@st.composite
def buckets(draw: st.DrawFn) -> Bucket:
    """A bucket of one to five matrices with random owners on a random mesh and layout."""
    shape = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))
    count = 1
    for size in shape:
        count *= size
    mesh = Mesh(tuple(range(10, 10 + count)), shape)
    cut = draw(st.lists(st.sampled_from([None, 0, 1]), min_size=len(shape), max_size=len(shape)))
    splits = [Split(axis, dim) for axis, dim in enumerate(cut) if dim is not None]
    order = draw(st.sampled_from(list(permutations(splits))))
    sizes = draw(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=5))
    layout = Layout(mesh, tuple(order))
    matrices = tuple(matrix(f"m{i}", *size, layout) for i, size in enumerate(sizes))
    return Bucket(matrices, tuple(draw(st.sampled_from(mesh.ranks)) for _ in matrices))


def move(held: Held, routes: dict[int, Route], hops: dict[int, Hop], mesh: Mesh) -> Held:
    """One hop on all ranks; both ends must list the same parcels in the same order."""
    after: Held = {rank: {} for rank in mesh.ranks}
    for rank, hop in hops.items():
        sent = [p for parcels in hop.outgoing for p in parcels]
        assert {(p.matrix, p.origin) for p in sent} == set(held[rank])
        place = mesh.coordinates[rank]
        for position, parcels in enumerate(hop.outgoing):
            peer = mesh.rank_at((*place[: hop.axis], position, *place[hop.axis + 1 :]))
            assert hops[peer].incoming[hop.index] == parcels
            after[peer].update({(p.matrix, p.origin): p for p in parcels})
    return after


@settings(max_examples=150, deadline=None)
@given(buckets(), st.sampled_from(["auto", "all_gather"]))
def test_blocks_reach_their_owner_and_updates_reach_every_rank(
    bucket: Bucket, exchange: str
) -> None:
    mesh = bucket.mesh
    routes = {rank: bucket.route(rank, exchange) for rank in mesh.ranks}
    held: Held = {
        rank: {(p.matrix, p.origin): p for p in route.departing} for rank, route in routes.items()
    }
    hops = len(bucket.sharded_axes)
    for depth in range(hops):
        held = move(held, routes, {r: route.hops[depth] for r, route in routes.items()}, mesh)
    for rank, route in routes.items():
        assert {i for i, _ in route.owned} == {
            i for i, owner in enumerate(bucket.owners) if owner == rank
        }
        for index, parcels in route.owned:
            whole = bucket.matrices[index]
            assert sum(p.block.numel for p in parcels) == whole.rows * whole.cols
            assert all((p.matrix, p.origin) in held[rank] for p in parcels)
    for depth in reversed(range(hops)):
        back = {r: route.hops[depth].backwards for r, route in routes.items()}
        held = move(held, routes, back, mesh)
    check_shares(bucket, routes, held)


def check_shares(bucket: Bucket, routes: dict[int, Route], held: Held) -> None:
    """After the all-gathers every rank has its own block of every matrix."""
    mesh = bucket.mesh
    for depth in range(len(bucket.replicated_axes)):
        after: Held = {rank: dict(blocks) for rank, blocks in held.items()}
        for rank, route in routes.items():
            share, place = route.shares[depth], mesh.coordinates[rank]
            assert {(p.matrix, p.origin) for p in share.parts[share.index]} == set(held[rank]) or (
                len(bucket.sharded_axes) == 0 and depth == 0
            )
            for position, parcels in enumerate(share.parts):
                peer = mesh.rank_at((*place[: share.axis], position, *place[share.axis + 1 :]))
                theirs = {(p.matrix, p.block) for p in held[peer].values()}
                assert {(p.matrix, p.block) for p in parcels} <= theirs
                after[rank].update({(p.matrix, p.origin): p for p in parcels})
        held = after
    for rank, route in routes.items():
        full = [p for p in route.held if p.block.numel]
        assert {(p.matrix, p.origin) for p in full} <= set(held[rank])
        assert [p.matrix for p in route.held] == list(range(len(bucket.matrices)))


@settings(max_examples=80, deadline=None)
@given(buckets(), st.sampled_from(["auto", "all_gather"]))
def test_all_bytes_that_are_sent_are_received(bucket: Bucket, exchange: str) -> None:
    plan = Plan((bucket,), exchange)
    assert sum(plan.bytes_sent().values()) == sum(plan.bytes_received().values())


def test_all_to_all_moves_each_block_once_each_way() -> None:
    layout = Layout(Mesh((0, 1, 2, 3), (4,)), (Split(0, 0),))
    plan = Plan((Bucket((matrix("m", 18, 10, layout),), (3,)),))
    # Rows 5, 5, 5, 3 of 10 columns in bf16; the owner keeps its own.
    assert plan.bytes_sent() == {0: 100, 1: 100, 2: 100, 3: 300}
    assert plan.bytes_received() == {0: 100, 1: 100, 2: 100, 3: 300}


def test_replicas_gather_padded_to_the_largest_share() -> None:
    layout = Layout(Mesh((0, 1), (2,)))
    members = (matrix("a", 4, 4, layout), matrix("b", 2, 4, layout))
    plan = Plan((Bucket(members, (0, 1)),))
    assert plan.bytes_sent() == {0: 32, 1: 32}

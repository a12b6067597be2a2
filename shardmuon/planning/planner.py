"""Makes plans: gives every matrix one owner and groups matrices into buckets.

Owns the two decisions of planning. Owners: longest processing time first over all matrices at
once, mesh by mesh, loads carried along, and then a local search (`balance.py`); a matrix stays
where it is whole if that costs no time.
Buckets: each owner's matrices cut into portions of `bucket_bytes`; bucket k holds the k-th portion
of every owner. Both are deterministic and do not depend on the order in which matrices are given.
Matrices are taken by cost, so that equal ones share a batch, or in the order of backward.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from shardmuon.planning.balance import balance
from shardmuon.planning.layout import Mesh
from shardmuon.planning.matrix import Matrix, lane, natural_order
from shardmuon.planning.plan import Bucket, Plan

__all__ = ["LARGEST_BUCKET", "bucket_size", "make_plan"]

# Smaller buckets cost the host more than they hide, larger ones gain nothing more.
SMALLEST_BUCKET, LARGEST_BUCKET = 128 * 2**20, 256 * 2**20
# An owner's matrices in as many buckets, so that the first and the last, which nothing hides, are
# a small part.
PORTIONS = 4


def make_plan(
    matrices: Iterable[Matrix],
    *,
    exchange: str = "auto",
    bucket_bytes: int | None = None,
    overlap: str = "none",
    settings: str = "",
) -> Plan:
    """Plan all `matrices`; see `Plan` for `exchange`, `overlap` and `settings`.

    bucket_bytes: of one owner in one bucket; None: `bucket_size` for each mesh.

    Meshes are planned from the largest to the smallest, and loads are carried only to meshes
    inside: all ranks of a mesh know of the meshes that contain it, and of no others for certain.
    """
    by_mesh: dict[Mesh, list[Matrix]] = defaultdict(list)
    for matrix in matrices:
        by_mesh[matrix.layout.mesh].append(matrix)
    added: dict[Mesh, dict[int, int]] = {}
    buckets: list[Bucket] = []
    for mesh in sorted(by_mesh, key=lambda m: (-len(m.ranks), m.ranks, m.shape)):
        around = [load for other, load in added.items() if set(mesh.ranks) <= set(other.ranks)]
        loads = {rank: sum(load[rank] for load in around) for rank in mesh.ranks}
        owners, after = assign_owners(by_mesh[mesh], mesh.ranks, loads)
        added[mesh] = {rank: after[rank] - loads[rank] for rank in mesh.ranks}
        ordered = sorted(by_mesh[mesh], key=_cost_order)
        if overlap == "backward":
            ordered.sort(key=_by_name, reverse=True)
        size = bucket_bytes or bucket_size(ordered)
        buckets += make_buckets(ordered, owners, size)
    if overlap == "backward":  # a bucket is complete with the last of its matrices
        buckets.sort(key=lambda bucket: min(map(_by_name, bucket.matrices)), reverse=True)
    return Plan(tuple(buckets), exchange, settings, overlap)


def bucket_size(matrices: Sequence[Matrix]) -> int:
    """Wire bytes of one owner in one bucket that suit these matrices of one mesh."""
    ranks = len(matrices[0].layout.mesh.ranks)
    if ranks == 1:
        return LARGEST_BUCKET  # nothing travels; buckets only bound the memory
    owned = sum(matrix.total_bytes for matrix in matrices) // ranks
    return min(LARGEST_BUCKET, max(SMALLEST_BUCKET, owned // PORTIONS))


def assign_owners(
    matrices: Sequence[Matrix], ranks: Sequence[int], loads: dict[int, int]
) -> tuple[dict[str, int], dict[int, int]]:
    """(owner of each matrix, loads with them); `loads` (FLOPs per rank) holds what was before.

    Two plans: one in which matrices that a rank holds whole stay there (whole experts need no
    exchange), one in which all are free. Staying wins unless it lengthens the step.
    """
    free = _assign(matrices, ranks, loads, stay=False)
    if not any(_stays(matrix, ranks) for matrix in matrices):
        return free
    plans = _assign(matrices, ranks, loads, stay=True), free
    return min(plans, key=lambda plan: max(plan[1].values()))


def _assign(
    matrices: Sequence[Matrix], ranks: Sequence[int], loads: dict[int, int], stay: bool
) -> tuple[dict[str, int], dict[int, int]]:
    """Longest first, then the search among the matrices that need not stay."""
    owners, filled = _longest_first(matrices, ranks, loads, stay)
    costs = {m.id: m.cost for m in matrices}
    free = {m.id: m.cost for m in matrices if not (stay and _stays(m, ranks))}
    owners |= balance({name: owners[name] for name in free}, free, filled)
    filled = {rank: loads[rank] for rank in ranks}
    for name, rank in owners.items():
        filled[rank] += costs[name]
    return owners, filled


def _stays(matrix: Matrix, ranks: Sequence[int]) -> bool:
    """Some ranks hold the whole matrix, and not all do."""
    return 0 < len(matrix.holders) < len(ranks)


def _longest_first(
    matrices: Sequence[Matrix], ranks: Sequence[int], loads: dict[int, int], stay: bool
) -> tuple[dict[str, int], dict[int, int]]:
    """(owners, loads). `loads` is not changed.

    Ties between ranks go to the one with fewer matrices, then to the lower rank; between matrices
    of one cost to the lower id, so that the result depends on names and not on order.
    """
    owners: dict[str, int] = {}
    filled = {rank: loads[rank] for rank in ranks}
    counts = dict.fromkeys(ranks, 0)

    def give(matrix: Matrix, rank: int) -> None:
        owners[matrix.id] = rank
        filled[rank] += matrix.cost
        counts[rank] += 1

    free = []
    for matrix in sorted(matrices, key=_cost_order):
        if stay and _stays(matrix, ranks):
            give(matrix, min(matrix.holders, key=lambda rank: (filled[rank], counts[rank], rank)))
        else:
            free.append(matrix)
    heap = [(filled[rank], counts[rank], rank) for rank in ranks]
    heapq.heapify(heap)
    for matrix in free:
        give(matrix, rank := heap[0][2])
        heapq.heapreplace(heap, (filled[rank], counts[rank], rank))
    return owners, filled


def make_buckets(
    matrices: Sequence[Matrix], owners: dict[str, int], bucket_bytes: int
) -> list[Bucket]:
    """Cut each owner's matrices into portions of at most `bucket_bytes` and align the portions.

    Matrices keep their order.

    Matrices that cannot travel in one message (other axes or wire dtype) never share a bucket.
    A matrix larger than `bucket_bytes` is a portion of its own.
    """
    lanes: dict[tuple[object, ...], dict[int, list[Matrix]]] = defaultdict(dict)
    for matrix in matrices:
        lanes[lane(matrix)].setdefault(owners[matrix.id], []).append(matrix)
    buckets: list[Bucket] = []
    for _, queues in sorted(lanes.items(), key=lambda item: str(item[0])):
        portions = {owner: _portions(queue, bucket_bytes) for owner, queue in queues.items()}
        for number in range(max(map(len, portions.values()))):
            members = [
                (matrix, owner)
                for owner in sorted(portions)
                if number < len(portions[owner])
                for matrix in portions[owner][number]
            ]
            buckets.append(Bucket(*map(tuple, zip(*members, strict=True))))
    return buckets


def _portions(queue: Sequence[Matrix], bucket_bytes: int) -> list[list[Matrix]]:
    portions: list[list[Matrix]] = []
    room = -1
    for matrix in queue:
        if matrix.total_bytes > room:
            portions.append([])
            room = bucket_bytes
        portions[-1].append(matrix)
        room -= matrix.total_bytes
    return portions


def _cost_order(matrix: Matrix) -> tuple[int, str]:
    return -matrix.cost, matrix.id


def _by_name(matrix: Matrix) -> tuple[list[Any], str]:
    """Backward meets the last layer first, and layers are numbered.

    Of the order inside a layer names say nothing, but a bucket spans layers.
    """
    return natural_order(matrix.id)

"""Makes plans: who owns which matrix, and which matrices travel together.

Owns the order of meshes, the cutting into buckets, and the choice between ways of finding owners
(`owners.py`), which is that of the shortest simulated step. Buckets: each owner's matrices cut into
portions of `bucket_bytes`; bucket k holds the k-th portion of every owner. All is deterministic and
does not depend on the order in which matrices are given. Matrices are taken by cost, so that equal
ones share a batch, or in the order of backward.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardmuon.planning.device import DEVICES, Device
from shardmuon.planning.layout import Mesh
from shardmuon.planning.matrix import Matrix, lane, natural_order
from shardmuon.planning.owners import Assigned, Way, assign, cost_order, mean_load, team_axis
from shardmuon.planning.plan import Bucket, Plan
from shardmuon.planning.simulation import simulate

__all__ = ["LARGEST_BUCKET", "Freedom", "bucket_size", "make_plan"]

# Smaller buckets cost the host more than they hide, larger ones gain nothing more.
SMALLEST_BUCKET, LARGEST_BUCKET = 128 * 2**20, 256 * 2**20
# An owner's matrices in as many buckets, so that the first and the last, which nothing hides, are
# a small part.
PORTIONS = 4
# Larger teams only add to what each of their ranks repeats.
LARGEST_TEAM = 16
# Predictions are right within a tenth; what is quicker by less is not worth a less simple way.
GAIN = 1.1


@dataclass(frozen=True)
class Freedom:
    """What a plan may do beyond one owner for each matrix.

    device: whose times decide. share_large: a team may orthogonalize what one rank would be too
    slow for. replicas: "once": each matrix once over all replicas, which send each other the
    updates; "repeat": once in every replica; "auto": as the times say, where replicas lie on
    several hosts.
    """

    device: Device = DEVICES["h200"]
    share_large: bool = False
    replicas: str = "once"


def make_plan(
    matrices: Iterable[Matrix],
    *,
    exchange: str = "auto",
    bucket_bytes: int | None = None,
    overlap: str = "none",
    settings: str = "",
    freedom: Freedom = Freedom(),
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
        here = by_mesh[mesh]
        size = bucket_bytes or bucket_size(here)
        drafts = []
        for way in _ways(here, mesh, loads, freedom):
            assigned, after = assign(here, mesh, loads, way, freedom.device)
            drafts.append((make_buckets(assigned, size, overlap), after))
        chosen, after = _quickest(drafts, freedom.device)
        added[mesh] = {rank: after[rank] - loads[rank] for rank in mesh.ranks}
        buckets += chosen
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


# -- ways ---------------------------------------------------------------------------------------


def _ways(
    matrices: Sequence[Matrix], mesh: Mesh, loads: Mapping[int, int], freedom: Freedom
) -> list[Way]:
    """What to try, the simplest first."""
    sizes = [1]
    largest = max((m.cost for m in matrices if m.may_share), default=0)
    if freedom.share_large and largest > mean_load(matrices, loads):
        most = min(LARGEST_TEAM, mesh.shape[team_axis(mesh)])
        sizes += [2**power for power in range(1, most.bit_length())]
    repeats = [freedom.replicas == "repeat"]
    if freedom.replicas == "auto" and len(mesh.ranks) > freedom.device.near_ranks:
        repeats += [True] if any(m.layout.replicated_axes for m in matrices) else []
    return [Way(size, repeat) for repeat in repeats for size in sizes]


Draft = tuple[list[Bucket], dict[int, int]]
"""Buckets of one mesh, and loads with them."""


def _quickest(drafts: Sequence[Draft], device: Device) -> Draft:
    """The first draft, unless another's step is clearly shorter."""
    if len(drafts) == 1:
        return drafts[0]
    times = [simulate(Plan(tuple(buckets)), device).step_ms for buckets, _ in drafts]
    best = min(range(len(drafts)), key=lambda index: times[index])
    return drafts[best] if times[best] * GAIN < times[0] else drafts[0]


# -- buckets ------------------------------------------------------------------------------------


def make_buckets(assigned: Iterable[Assigned], bucket_bytes: int, overlap: str) -> list[Bucket]:
    """Cut each owner's matrices into portions of at most `bucket_bytes` and align the portions.

    Matrices that cannot travel in one message (other axes or wire dtype) never share a bucket. A
    matrix larger than `bucket_bytes` is a portion of its own. Panels of a matrix stay together:
    the first, which is the largest, stands for all.
    """
    ordered = sorted(assigned, key=lambda each: cost_order(each.pieces[0]))
    if overlap == "backward":
        ordered.sort(key=lambda each: _by_name(each.pieces[0]), reverse=True)
    lanes: dict[tuple[object, ...], dict[int, list[Assigned]]] = defaultdict(dict)
    for each in ordered:
        key = (*lane(each.pieces[0]), each.repeated)
        lanes[key].setdefault(each.owners[0], []).append(each)
    buckets: list[Bucket] = []
    for _, queues in sorted(lanes.items(), key=lambda item: str(item[0])):
        portions = {owner: [*_portions(queue, bucket_bytes)] for owner, queue in queues.items()}
        for number in range(max(map(len, portions.values()))):
            here = [
                each
                for owner in sorted(portions)
                if number < len(portions[owner])
                for each in portions[owner][number]
            ]
            buckets.append(_bucket(here))
    return buckets


def _bucket(assigned: Sequence[Assigned]) -> Bucket:
    matrices = tuple(piece for each in assigned for piece in each.pieces)
    owners = tuple(owner for each in assigned for owner in each.owners)
    return Bucket(matrices, owners, assigned[0].repeated)


def _portions(queue: Sequence[Assigned], bucket_bytes: int) -> Iterator[list[Assigned]]:
    portion: list[Assigned] = []
    room = bucket_bytes
    for each in queue:
        size = each.pieces[0].total_bytes
        if portion and size > room:
            yield portion
            portion, room = [], bucket_bytes
        portion.append(each)
        room -= size
    yield portion


def _by_name(matrix: Matrix) -> tuple[list[Any], str]:
    """Backward meets the last layer first, and layers are numbered.

    Of the order inside a layer names say nothing, but a bucket spans layers.
    """
    return natural_order(matrix.id)

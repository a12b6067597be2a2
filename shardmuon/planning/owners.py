"""Gives every matrix an owner, or a team of owners.

Owns the decision for one mesh. Longest processing time first over all matrices at once, and then a
local search (`balance.py`); a matrix stays where it is whole if that costs no time. Beyond that,
if the `Way` says so: large matrices are cut into panels for a team of ranks, and what is
replicated is orthogonalized in every replica. Deterministic, and independent of the order in which
matrices are given.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import NamedTuple

from shardmuon.planning.balance import balance
from shardmuon.planning.device import Device
from shardmuon.planning.layout import Mesh, chunk
from shardmuon.planning.matrix import Matrix, panels_of

__all__ = ["Assigned", "Way", "assign", "cost_order", "mean_load", "team_axis"]

Loads = dict[int, int]
"""Cost per rank."""


class Way(NamedTuple):
    """How the owners of a mesh are found.

    team: ranks that orthogonalize a large matrix together. repeat: replicas orthogonalize for
    themselves what they all hold, and send each other no updates.
    """

    team: int = 1
    repeat: bool = False


class Assigned(NamedTuple):
    """A matrix and its owner; or its panels and the ranks of the team, in order.

    repeated: the owner is that of the first replica, and its peers in the others do the same.
    """

    pieces: tuple[Matrix, ...]
    owners: tuple[int, ...]
    repeated: bool = False


def assign(
    matrices: Sequence[Matrix], mesh: Mesh, loads: Mapping[int, int], way: Way, device: Device
) -> tuple[list[Assigned], Loads]:
    """(who owns what, loads with it); `loads` holds what was before, and is not changed.

    device: whose times say what a panel costs beside a matrix.
    """
    filled = {rank: loads[rank] for rank in mesh.ranks}
    rest = sorted(matrices, key=cost_order)
    assigned: list[Assigned] = []
    if way.team > 1:
        large = _large(rest, filled, way.team, device)
        assigned += _to_teams(large, mesh, filled, way.team)
        rest = [matrix for matrix in rest if matrix.id not in large]
    if way.repeat:
        repeated = [matrix for matrix in rest if matrix.layout.replicated_axes]
        assigned += _in_each_replica(repeated, mesh, filled)
        rest = [matrix for matrix in rest if not matrix.layout.replicated_axes]
    owners, filled = _owners(rest, mesh.ranks, filled)
    return [*assigned, *(Assigned((m,), (owners[m.id],)) for m in rest)], filled


def cost_order(matrix: Matrix) -> tuple[int, str]:
    """The most expensive first; names decide between equals."""
    return -matrix.cost, matrix.id


def mean_load(matrices: Sequence[Matrix], loads: Mapping[int, int]) -> float:
    """Of the ranks in `loads`, if they share `matrices` evenly."""
    return (sum(loads.values()) + sum(matrix.cost for matrix in matrices)) / len(loads)


# -- one owner ----------------------------------------------------------------------------------


def _owners(
    matrices: Sequence[Matrix], ranks: Sequence[int], loads: Loads
) -> tuple[dict[str, int], Loads]:
    """(owner of each matrix, loads with them).

    Two plans: one in which matrices that a rank holds whole stay there (whole experts need no
    exchange), one in which all are free. Staying wins unless it lengthens the step.
    """
    homes = {m.id: tuple(r for r in m.holders if r in loads) for m in matrices}
    homes = {name: ranks_of for name, ranks_of in homes.items() if 0 < len(ranks_of) < len(ranks)}
    free = _balanced(matrices, loads, {})
    if not homes:
        return free
    _settle(free[0], matrices, homes)
    plans = _balanced(matrices, loads, homes), free
    return min(plans, key=lambda plan: max(plan[1].values()))


Homes = Mapping[str, tuple[int, ...]]
"""Ranks that hold a matrix whole, where not all do; by matrix id."""


def _balanced(
    matrices: Sequence[Matrix], loads: Loads, homes: Homes
) -> tuple[dict[str, int], Loads]:
    """Longest first, then the search among the matrices that need not stay at home."""
    owners, filled = _longest_first(matrices, loads, homes)
    costs = {m.id: m.cost for m in matrices}
    free = {m.id: m.cost for m in matrices if m.id not in homes}
    owners |= balance({name: owners[name] for name in free}, free, filled)
    filled = dict(loads)
    for name, rank in owners.items():
        filled[rank] += costs[name]
    return owners, filled


def _longest_first(
    matrices: Sequence[Matrix], loads: Loads, homes: Homes
) -> tuple[dict[str, int], Loads]:
    """Ties between ranks go to the one with fewer matrices, then to the lower rank."""
    owners: dict[str, int] = {}
    filled = dict(loads)
    counts = dict.fromkeys(loads, 0)

    def give(matrix: Matrix, rank: int) -> None:
        owners[matrix.id] = rank
        filled[rank] += matrix.cost
        counts[rank] += 1

    free = []
    for matrix in matrices:
        if matrix.id in homes:
            give(matrix, min(homes[matrix.id], key=lambda r: (filled[r], counts[r], r)))
        else:
            free.append(matrix)
    heap = [(filled[rank], counts[rank], rank) for rank in loads]
    heapq.heapify(heap)
    for matrix in free:
        give(matrix, rank := heap[0][2])
        heapq.heapreplace(heap, (filled[rank], counts[rank], rank))
    return owners, filled


def _settle(owners: dict[str, int], matrices: Sequence[Matrix], homes: Homes) -> None:
    """Matrices of one kind change places, so that more lie where they are whole; loads stay."""
    strangers: dict[tuple[object, ...], list[str]] = defaultdict(list)
    for matrix in matrices:
        if owners[matrix.id] not in homes.get(matrix.id, ()):
            strangers[owners[matrix.id], _kind(matrix)].append(matrix.id)
    for matrix in matrices:
        here = owners[matrix.id]
        if here in homes.get(matrix.id, (here,)):
            continue
        for home in homes[matrix.id]:
            others = strangers[home, _kind(matrix)]
            if others:
                other = others.pop()
                owners[matrix.id], owners[other] = home, here
                strangers[here, _kind(matrix)].remove(matrix.id)
                if here not in homes.get(other, ()):
                    strangers[here, _kind(matrix)].append(other)
                break


def _kind(matrix: Matrix) -> tuple[int, int, int]:
    return matrix.rows, matrix.cols, matrix.cost


# -- teams and replicas -------------------------------------------------------------------------


def team_axis(mesh: Mesh) -> int:
    """The axis along which teams lie: the last with several ranks, which are nearest."""
    return max((axis for axis, size in enumerate(mesh.shape) if size > 1), default=0)


def _large(
    matrices: Sequence[Matrix], loads: Loads, team: int, device: Device
) -> dict[str, tuple[Matrix, int]]:
    """(matrix, cost of its panels) of those that alone would set the time of a step, by id."""
    mean = mean_load(matrices, loads)
    large = {}
    for matrix in matrices:
        longest = max(matrix.rows, matrix.cols)
        start, stop = chunk(0, longest, team, team - 1)
        if matrix.may_share and matrix.cost > mean and start < stop:
            sides = min(matrix.rows, matrix.cols), longest
            alone = device.newton_schulz_ms(1, *sides, matrix.segments, matrix.method)
            together = device.panel_ms(1, *sides, matrix.segments, team, matrix.wire_bytes)
            cost = round(matrix.cost * together / alone)
            if cost < matrix.cost:
                large[matrix.id] = matrix, cost
    return large


def _to_teams(
    large: Mapping[str, tuple[Matrix, int]], mesh: Mesh, loads: Loads, size: int
) -> Iterator[Assigned]:
    """Each matrix to the team that has least to do; adds to `loads`."""
    axis = team_axis(mesh)
    teams = [*_teams(mesh, axis, size)]
    for matrix, cost in large.values():
        team = min(teams, key=lambda ranks: (max(loads[rank] for rank in ranks), ranks))
        for rank in team:
            loads[rank] += cost
        yield Assigned(panels_of(matrix, size, axis, cost), team)


def _teams(mesh: Mesh, axis: int, size: int) -> Iterator[tuple[int, ...]]:
    """Every `size` neighbours along `axis`; what is left at its end is in no team."""
    others = [range(1 if a == axis else length) for a, length in enumerate(mesh.shape)]
    for at in product(*others):
        for first in range(0, mesh.shape[axis] - size + 1, size):
            yield tuple(mesh.rank_at((*at[:axis], first + i, *at[axis + 1 :])) for i in range(size))


def _in_each_replica(matrices: Sequence[Matrix], mesh: Mesh, loads: Loads) -> Iterator[Assigned]:
    """Owners in the first replica, for all of them; adds to `loads` of every replica."""
    by_axes: dict[tuple[int, ...], list[Matrix]] = defaultdict(list)
    for matrix in matrices:
        by_axes[matrix.layout.replicated_axes].append(matrix)
    for axes, those in sorted(by_axes.items()):
        peers: dict[int, list[int]] = defaultdict(list)
        for rank, coordinate in mesh.coordinates.items():
            first = [0 if axis in axes else c for axis, c in enumerate(coordinate)]
            peers[mesh.rank_at(first)].append(rank)
        before = {rank: max(loads[peer] for peer in peers[rank]) for rank in peers}
        owners, after = _owners(those, [*peers], before)
        for rank, same in peers.items():
            for peer in same:
                loads[peer] += after[rank] - before[rank]
        for matrix in those:
            yield Assigned((matrix,), (owners[matrix.id],), repeated=True)

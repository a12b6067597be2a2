"""What one rank sends and receives for one bucket, as lists of parcels.

Owns the geometry of the exchange and no data. A matrix travels to its owner in one hop per
sharded axis: in a hop along axis a every rank passes what it holds to the rank whose coordinate on
a is the owner's. Updates take the same hops backwards, then one all-gather per replicated axis
brings the updates made in other replicas. Both sides list parcels in the same order (matrix, then
origin), so no index ever travels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, product
from typing import NamedTuple

from shardmuon.planning.layout import Block, Coordinate
from shardmuon.planning.matrix import Matrix

__all__ = [
    "Hop",
    "Key",
    "PackingList",
    "Parcel",
    "Parcels",
    "Route",
    "Share",
    "gather_size",
    "make_route",
    "packing_list",
    "scatter_size",
]


class Parcel(NamedTuple):
    """The block of bucket matrix `matrix` that belongs to the rank at `origin`.

    gather_elements and scatter_elements: wire elements on the way in and on the way back; a number
    per row may travel either way, behind the block.
    """

    matrix: int
    origin: Coordinate
    block: Block
    gather_elements: int
    scatter_elements: int


Parcels = tuple[Parcel, ...]

Key = tuple[int, Coordinate]
"""Which parcel: index of the matrix in its bucket, and origin."""


class PackingList(NamedTuple):
    """Parcels that lie one after the other in a buffer: keys, and wire elements of each."""

    keys: tuple[Key, ...]
    sizes: tuple[int, ...]

    @property
    def elements(self) -> int:
        return sum(self.sizes)


def packing_list(parcels: Sequence[Parcel], *, back: bool) -> PackingList:
    """`parcels` in this order; back: with what travels beside updates."""
    return PackingList(
        tuple((p.matrix, p.origin) for p in parcels),
        tuple(p.scatter_elements if back else p.gather_elements for p in parcels),
    )


@dataclass(frozen=True)
class Hop:
    """One exchange along `axis`, in which this rank has position `index`.

    outgoing[j] / incoming[i]: parcels that this rank passes to position j / gets from position i.
    table[i][j]: what position i passes to position j, for everyone; made only for all-gathers,
    which carry all of it. back: the updates travel, so parcels count `scatter_elements`.
    """

    axis: int
    index: int
    outgoing: tuple[Parcels, ...]
    incoming: tuple[Parcels, ...]
    table: tuple[tuple[Parcels, ...], ...] = ()
    back: bool = False

    @cached_property
    def backwards(self) -> Hop:
        """The same hop on the way back: what came from a position returns to it."""
        turned = tuple(zip(*self.table, strict=True))
        return Hop(self.axis, self.index, self.incoming, self.outgoing, turned, back=True)

    def size(self, parcels: Sequence[Parcel]) -> int:
        """Wire elements of `parcels` in this hop."""
        return scatter_size(parcels) if self.back else gather_size(parcels)

    @cached_property
    def sent(self) -> PackingList:
        """This rank's send buffer, without padding."""
        return packing_list([*chain(*self.outgoing)], back=self.back)

    @cached_property
    def received(self) -> PackingList:
        """What arrives here, from all positions."""
        return packing_list([*chain(*self.incoming)], back=self.back)

    @cached_property
    def send_sizes(self) -> list[int]:
        """Wire elements to each position."""
        return [self.size(parcels) for parcels in self.outgoing]

    @cached_property
    def receive_sizes(self) -> list[int]:
        """Wire elements from each position."""
        return [self.size(parcels) for parcels in self.incoming]

    @cached_property
    def padded(self) -> int:
        """Length of each position's part of the all-gather."""
        return max(sum(map(self.size, row)) for row in self.table)

    @property
    def buffer_elements(self) -> int:
        """Wire elements of this rank's send buffer, padding included."""
        return self.padded if self.table else sum(self.send_sizes)

    @cached_property
    def wire_elements(self) -> tuple[int, int]:
        """Elements (sent to, received from) other ranks, padding included."""
        if self.table:
            count = self.padded * (len(self.outgoing) - 1)
            return count, count
        sent, received = sum(self.send_sizes), sum(self.receive_sizes)
        return sent - self.send_sizes[self.index], received - self.receive_sizes[self.index]


@dataclass(frozen=True)
class Share:
    """One all-gather of updates along replicated `axis`.

    parts[i]: the parcels (blocks of this rank) whose update position i brings.
    """

    axis: int
    index: int
    parts: tuple[Parcels, ...]

    @cached_property
    def lists(self) -> tuple[PackingList, ...]:
        """What each position brings."""
        return tuple(packing_list(parcels, back=True) for parcels in self.parts)

    @cached_property
    def padded(self) -> int:
        """Length of each position's part: torch has no uneven all-gather."""
        return max(map(scatter_size, self.parts))

    @property
    def wire_elements(self) -> tuple[int, int]:
        """Elements (sent to, received from) other ranks, padding included."""
        count = self.padded * (len(self.parts) - 1)
        return count, count


@dataclass(frozen=True)
class Route:
    """All that one rank does for one bucket.

    held: this rank's block of every matrix, empty ones too. hops: towards the owners, in order.
    owned: indices of the matrices orthogonalized here, each with its parcels from all origins.
    shares: all-gathers after the hops have been taken backwards.
    """

    coordinate: Coordinate
    held: Parcels
    hops: tuple[Hop, ...]
    owned: tuple[tuple[int, Parcels], ...]
    shares: tuple[Share, ...]

    @property
    def departing(self) -> Parcels:
        """Held parcels whose matrix is orthogonalized in this rank's replica."""
        if self.hops:
            return tuple(p for parcels in self.hops[0].outgoing for p in parcels)
        return tuple(p for _, parcels in self.owned for p in parcels)

    def wire_elements(self) -> tuple[int, int]:
        """Elements (sent to, received from) other ranks in a step, padding included."""
        legs = [hop.wire_elements for hop in self.hops]
        legs += [hop.backwards.wire_elements for hop in self.hops]
        legs += [share.wire_elements for share in self.shares]
        return sum(sent for sent, _ in legs), sum(received for _, received in legs)


def gather_size(parcels: Sequence[Parcel]) -> int:
    """Wire elements of `parcels` on the way in."""
    return sum(parcel.gather_elements for parcel in parcels)


def scatter_size(parcels: Sequence[Parcel]) -> int:
    """Wire elements of `parcels` on the way back."""
    return sum(parcel.scatter_elements for parcel in parcels)


def make_route(
    matrices: Sequence[Matrix],
    owners: Sequence[Coordinate],
    coordinate: Coordinate,
    exchange: str,
    alone: bool = False,
) -> Route:
    """Route of the rank at `coordinate`; `owners` are coordinates too, one per matrix.

    alone: its replica needs nothing of others; all owners lie in it.
    """
    maker = _RouteMaker(matrices, owners, coordinate)
    layout = matrices[0].layout
    sharded, replicated = layout.sharded_axes, layout.replicated_axes
    return Route(
        coordinate,
        held=tuple(maker.parcel(index, coordinate) for index in range(len(matrices))),
        hops=tuple(maker.hop(depth, exchange) for depth in range(len(sharded))),
        owned=tuple(
            (index, maker.parcels_at(index, coordinate, depth=len(sharded)))
            for index, owner in enumerate(owners)
            if owner == coordinate
        ),
        shares=() if alone else tuple(maker.share(depth) for depth in range(len(replicated))),
    )


class _RouteMaker:
    """Lists parcels by who holds them after some hops, seen from `coordinate`."""

    def __init__(
        self, matrices: Sequence[Matrix], owners: Sequence[Coordinate], coordinate: Coordinate
    ) -> None:
        layout = matrices[0].layout
        self._matrices = matrices
        self._owners = owners
        self._coordinate = coordinate
        self._shape = layout.mesh.shape
        self._sharded = layout.sharded_axes
        self._replicated = layout.replicated_axes

    def parcel(self, index: int, origin: Coordinate) -> Parcel:
        matrix = self._matrices[index]
        block = matrix.block_at(origin)
        by_rows = block.rows * matrix.row_stat_elements
        there = by_rows if matrix.row_state and block.col_start == 0 else 0
        back = by_rows if matrix.row_stats else 0
        return Parcel(index, origin, block, block.numel + there, block.numel + back)

    def parcels_at(self, index: int, holder: Coordinate, depth: int) -> Parcels:
        """Parcels of a matrix that `holder` has after `depth` hops, if it is on the way.

        Without empty ones: of most experts of a large model a rank holds nothing.
        """
        passed = self._sharded[:depth]
        choices = [
            range(size) if axis in passed else (holder[axis],)
            for axis, size in enumerate(self._shape)
        ]
        parcels = (self.parcel(index, origin) for origin in product(*choices))
        return tuple(parcel for parcel in parcels if parcel.block.numel)

    def hop(self, depth: int, exchange: str) -> Hop:
        """Hop number `depth` for the ranks that differ from `coordinate` on its axis only."""
        axis = self._sharded[depth]
        positions = range(self._shape[axis])
        # Axes on which a holder already agrees with the owner; others' matrices pass elsewhere.
        agreed = [a for a in range(len(self._shape)) if a not in self._sharded[depth:]]
        bound: list[list[int]] = [[] for _ in positions]
        for index, owner in enumerate(self._owners):
            if all(owner[a] == self._coordinate[a] for a in agreed):
                bound[owner[axis]].append(index)

        def passes(source: int, target: int) -> Parcels:
            holder = (*self._coordinate[:axis], source, *self._coordinate[axis + 1 :])
            return tuple(p for i in bound[target] for p in self.parcels_at(i, holder, depth))

        here = self._coordinate[axis]
        everyone = positions if exchange == "all_gather" else ()
        return Hop(
            axis,
            here,
            outgoing=tuple(passes(here, j) for j in positions),
            incoming=tuple(passes(i, here) for i in positions),
            table=tuple(tuple(passes(i, j) for j in positions) for i in everyone),
        )

    def share(self, depth: int) -> Share:
        """All-gather number `depth`: by then matrices of all earlier axes' replicas are here."""
        axis, later = self._replicated[depth], self._replicated[depth + 1 :]
        parts: list[list[Parcel]] = [[] for _ in range(self._shape[axis])]
        for index, owner in enumerate(self._owners):
            parcel = self.parcel(index, self._coordinate)
            if parcel.block.numel and all(owner[a] == self._coordinate[a] for a in later):
                parts[owner[axis]].append(parcel)
        return Share(axis, self._coordinate[axis], tuple(map(tuple, parts)))

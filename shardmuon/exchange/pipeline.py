"""The five phases of a step over all buckets: prepare, gather, orthogonalize, scatter, apply.

Owns the order in which buckets move. While bucket k is orthogonalized, bucket k + 1 is on its way
to its owners and bucket k - 1 on its way back; at most three buckets hold buffers. The order of
collectives depends on the plan alone, never on data.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shardmuon.exchange import collectives
from shardmuon.exchange.legs import (
    Cargo,
    Leg,
    pack,
    row_stats_from_wire,
    row_stats_to_wire,
    start_hop,
    start_share,
)
from shardmuon.planning.plan import Bucket
from shardmuon.planning.routes import Hop, Parcel, Route, gather_size
from shardmuon.rules import Commit, Shard, UpdateRule

__all__ = ["Member", "Passage", "Tally", "Transit", "run_buckets"]


@dataclass(frozen=True)
class Member:
    """A matrix as this rank takes part in it. missing: no gradient; nothing of it may change."""

    rule: UpdateRule
    shard: Shard
    settings: str
    missing: bool

    @property
    def idle(self) -> bool:
        """Nothing to do here: no gradient on any rank, or an empty block."""
        return self.missing or self.shard.parameter.numel() == 0


@dataclass
class Tally:
    """What this rank did in a step."""

    matrices_orthogonalized: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0


@dataclass(frozen=True)
class Passage:
    """How this rank carries a bucket, fixed by the plan.

    groups: process group by mesh axis. device: of the exchange and of Newton-Schulz; parameters
    may lie elsewhere (CPU offload). dtype: on the wire.
    """

    bucket: Bucket
    route: Route
    groups: Mapping[int, collectives.Group]
    device: torch.device
    dtype: torch.dtype
    batched: bool
    timeout_s: float | None


@dataclass
class Transit:
    """One bucket under way on this rank; holds its buffers between the phases."""

    passage: Passage
    members: Sequence[Member]
    commit: Commit
    tally: Tally
    leg: Leg | None = None
    cargo: Cargo = field(default_factory=dict)

    def depart(self) -> None:
        """Phases 1 and 2: advance every state, pack the blocks and start towards the owners."""
        route = self.passage.route
        hop = route.hops[0] if route.hops else None
        buffer = self._buffer(hop.buffer_elements if hop else gather_size(route.departing))
        places = dict(_places(route.departing, buffer))
        for index, member in enumerate(self.members):
            if not member.idle:
                block = member.rule.prepare(member.shard, self.commit)
                if index in places:
                    places[index].view(block.shape).copy_(block)
        if hop is None:
            self.cargo = {(p.matrix, p.origin): places[p.matrix] for p in route.departing}
        else:
            self._start(hop, buffer)

    def orthogonalize(self) -> None:
        """Finish phase 2, run phase 3 on the owned matrices and start phase 4."""
        self._arrive()
        for hop in self.passage.route.hops[1:]:
            self._send(hop)
            self._arrive()
        owned = dict(self.passage.route.owned)
        whole = {index: self._assemble(index, parcels) for index, parcels in owned.items()}
        self.cargo = {}
        for index, update, row_stats in self._updates(whole):
            for parcel in owned[index]:
                self.cargo[index, parcel.origin] = self._cut(parcel, update, row_stats)
        if self.passage.route.hops:
            self._send(self.passage.route.hops[-1].backwards())

    def apply(self) -> None:
        """Finish phase 4 and run phase 5 on this rank's block of every matrix."""
        route = self.passage.route
        self._arrive()
        for hop in reversed(route.hops[:-1]):
            self._send(hop.backwards())
            self._arrive()
        for share in route.shares:
            buffer = self._buffer(share.padded)
            pack(share.parts[share.index], self.cargo, buffer)
            self.leg = start_share(share, buffer, self.passage.groups[share.axis])
            self._count(*share.wire_elements())
            self._arrive()
        for parcel in route.held:
            member = self.members[parcel.matrix]
            elements = self.cargo.pop((parcel.matrix, parcel.origin))
            if not member.idle:
                count = parcel.block.numel
                elements = elements.to(member.shard.parameter.device)
                update = elements[:count].view(member.shard.parameter.shape)
                stats = row_stats_from_wire(elements[count:]) if member.rule.row_stats else None
                member.rule.apply(member.shard, update, stats, self.commit)

    def _buffer(self, elements: int) -> Tensor:
        """Zeros, so that padding and missing gradients never send uninitialized memory."""
        return torch.zeros(elements, dtype=self.passage.dtype, device=self.passage.device)

    def _send(self, hop: Hop) -> None:
        """Pack what this rank holds for `hop` and start it."""
        buffer = self._buffer(hop.buffer_elements)
        pack((parcel for parcels in hop.outgoing for parcel in parcels), self.cargo, buffer)
        self._start(hop, buffer)

    def _start(self, hop: Hop, buffer: Tensor) -> None:
        self._count(*hop.wire_elements())
        self.leg = start_hop(hop, buffer, self.passage.groups[hop.axis])

    def _arrive(self) -> None:
        if self.leg is not None:
            self.cargo = self.leg.finish(self.passage.timeout_s)
            self.leg = None

    def _count(self, sent: int, received: int) -> None:
        size = self.passage.dtype.itemsize
        self.tally.bytes_sent += sent * size
        self.tally.bytes_received += received * size

    def _assemble(self, index: int, parcels: Sequence[Parcel]) -> Tensor:
        """The whole matrix, fresh, contiguous and row-major: equal bits rest on that."""
        matrix = self.passage.bucket.matrices[index]
        whole = torch.empty(
            matrix.rows, matrix.cols, dtype=self.passage.dtype, device=self.passage.device
        )
        for parcel in parcels:
            block = parcel.block
            rows = whole[block.row_start : block.row_stop, block.col_start : block.col_stop]
            rows.copy_(self.cargo[index, parcel.origin].view(block.rows, block.cols))
        return whole

    def _updates(self, whole: Mapping[int, Tensor]) -> Iterable[tuple[int, Tensor, Tensor | None]]:
        """Orthogonalize each owned matrix once; equal ones together where batching is allowed."""
        batches: dict[object, list[int]] = defaultdict(list)
        for index, matrix in whole.items():
            alike = (tuple(matrix.shape), self.members[index].settings)
            batches[alike if self.passage.batched else index].append(index)
        for indices in batches.values():
            member = self.members[indices[0]]
            self.tally.matrices_orthogonalized += len(indices)
            if len(indices) == 1:
                update, stats = member.rule.orthogonalize(whole[indices[0]], member.shard.group)
                yield indices[0], update, stats
                continue
            stack = torch.stack([whole[index] for index in indices])
            updates, stats = member.rule.orthogonalize(stack, member.shard.group)
            for place, index in enumerate(indices):
                yield index, updates[place], None if stats is None else stats[place]

    def _cut(self, parcel: Parcel, update: Tensor, row_stats: Tensor | None) -> Tensor:
        """One origin's block of an update, flat in the wire dtype, its rows' statistics behind."""
        block = parcel.block
        rows = slice(block.row_start, block.row_stop)
        piece = update[rows, block.col_start : block.col_stop].reshape(-1).to(self.passage.dtype)
        if row_stats is None:
            return piece
        return torch.cat([piece, row_stats_to_wire(row_stats[rows], self.passage.dtype)])


def _places(parcels: Iterable[Parcel], buffer: Tensor) -> Iterable[tuple[int, Tensor]]:
    """This rank's place in `buffer` for the block of each departing matrix."""
    offset = 0
    for parcel in parcels:
        yield parcel.matrix, buffer[offset : offset + parcel.gather_elements]
        offset += parcel.gather_elements


def run_buckets(transits: Iterable[Transit]) -> None:
    """Run all buckets, three in flight. Transits are made lazily, when their turn comes."""
    queue = iter(transits)
    leaving: Transit | None = None
    working = next(queue, None)
    if working is not None:
        working.depart()
    while working is not None:
        coming = next(queue, None)
        if coming is not None:
            coming.depart()
        working.orthogonalize()
        if leaving is not None:
            leaving.apply()
        leaving, working = working, coming
    if leaving is not None:
        leaving.apply()

"""The five phases of a step over all buckets: prepare, gather, orthogonalize, scatter, apply.

Owns the order in which buckets move. While bucket k is orthogonalized, bucket k + 1 is on its way
to its owners and bucket k - 1 on its way back; at most three buckets hold buffers. The order of
collectives depends on the plan alone, never on data.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.profiler import record_function

from shardmuon.exchange import collectives
from shardmuon.exchange.activity import during, mark
from shardmuon.exchange.assembly import Batch, assemble, batches_of, row_states_of, take_apart
from shardmuon.exchange.legs import (
    Cargo,
    Leg,
    pack,
    rows_from_wire,
    rows_to_wire,
    start_hop,
    start_share,
    unpack,
)
from shardmuon.exchange.teams import AxisTeam
from shardmuon.exchange.waits import Waits
from shardmuon.orthogonalize.checks import orthogonality_error
from shardmuon.planning.plan import Bucket
from shardmuon.planning.routes import Hop, PackingList, Route, packing_list
from shardmuon.rules import Commit, Shard, UpdateRule

__all__ = ["Member", "Passage", "Tally", "Transit", "run_buckets", "set_out"]


class Member(NamedTuple):
    """A matrix as this rank takes part in it. missing: no gradient; nothing of it may change."""

    rule: UpdateRule
    shard: Shard
    missing: bool

    @property
    def idle(self) -> bool:
        """Nothing to do here: no gradient on any rank, or an empty block."""
        return self.missing or self.shard.parameter.numel() == 0


@dataclass
class Tally:
    """What this rank did in a step.

    measures: it also finds the largest orthogonality_error of its updates.
    """

    measures: bool = False
    matrices_orthogonalized: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    orthogonality_error: float | None = None
    waits: Waits = field(default_factory=Waits)


@dataclass(frozen=True)
class Passage:
    """How this rank carries a bucket, fixed by the plan.

    number: of the bucket, in the order of execution. groups: process group by mesh axis. device: of
    the exchange and of Newton-Schulz; parameters may lie elsewhere (CPU offload). dtype: on the
    wire.
    """

    number: int
    bucket: Bucket
    route: Route
    groups: Mapping[int, collectives.Group]
    device: torch.device
    dtype: torch.dtype
    batched: bool
    timeout_s: float | None

    @cached_property
    def batches(self) -> tuple[Batch, ...]:
        """Owned matrices, by what is orthogonalized together. Panels are of one kind."""
        together = self.batched or self.bucket.team is not None
        return batches_of(self.bucket.matrices, self.route, together)

    @cached_property
    def team(self) -> AxisTeam | None:
        """Those with whom this rank orthogonalizes the bucket, if it is one of panels."""
        panel = self.bucket.team
        if panel is None:
            return None
        here = self.route.coordinate[panel.axis]
        size = self.bucket.mesh.shape[panel.axis]
        return AxisTeam(self.groups[panel.axis], size, here, panel.size, self.timeout_s)

    @cached_property
    def due(self) -> int:
        """Matrices that this rank is to orthogonalize, those of a team counted by its first."""
        return 0 if self.team is not None and self.team.index else len(self.route.owned)

    @cached_property
    def present(self) -> tuple[int, ...]:
        """Indices of matrices of which this rank holds or owns something."""
        owned = {index for index, _ in self.route.owned}
        return tuple(p.matrix for p in self.route.held if p.block.numel or p.matrix in owned)

    @cached_property
    def departing(self) -> PackingList:
        """The blocks that this rank sends on their way, its own among them."""
        return packing_list(self.route.departing, back=False)

    def buffer(self, elements: int) -> Tensor:
        """Zeros, so that padding and missing gradients never send uninitialized memory."""
        return torch.zeros(elements, dtype=self.dtype, device=self.device)

    def range(self, phase: str) -> Stretch:
        """A named stretch of time, for profilers and watchdogs."""
        return Stretch(phase, self.number)


class Stretch:
    """`with Stretch(phase, number):` around what a rank does for a bucket."""

    def __init__(self, phase: str, number: int) -> None:
        self._range = record_function(f"shardmuon.{phase}.{number}")
        self._during = during(f"{phase} of bucket {number}", waits=phase in ("gather", "scatter"))

    def __enter__(self) -> None:
        self._during.__enter__()
        self._range.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._range.__exit__(*error)
        self._during.__exit__(*error)


@dataclass
class Transit:
    """One bucket under way on this rank; holds its buffers between the phases.

    members: by index of the matrix, those that are present here.
    """

    passage: Passage
    members: Mapping[int, Member]
    commit: Commit
    tally: Tally
    leg: Leg | None = None
    cargo: Cargo = field(default_factory=dict)

    def depart(self) -> None:
        """Phases 1 and 2: advance every state, pack the blocks and start towards the owners.

        A bucket that has set out during backward is on its way already.
        """
        hops = self.passage.route.hops
        if self.leg is None:
            group = self.passage.groups[hops[0].axis] if hops else None
            self.leg, self.cargo = set_out(self.passage, self.members, self.commit, group)
        else:
            with self.passage.range("prepare"):
                _prepare(self.members, {}, self.commit)
        if hops:
            self._count(*hops[0].wire_elements)

    def orthogonalize(self) -> None:
        """Finish phase 2, run phase 3 on the owned matrices and start phase 4."""
        with self.passage.range("gather"):
            self._arrive()
            for hop in self.passage.route.hops[1:]:
                self._send(hop)
                self._arrive()
        with self.passage.range("orthogonalize"):
            passage = self.passage
            wholes = assemble(passage.batches, self.cargo, passage.dtype, passage.device)
            row_states = [row_states_of(batch, self.cargo) for batch in passage.batches]
            self.cargo = {}
            for batch, whole, rows in zip(passage.batches, wholes, row_states, strict=True):
                self._update(batch, whole, rows)
            if passage.team is not None and not passage.batches:
                passage.team.attend(passage.bucket.matrices[0].segments, passage.buffer(0))
        if passage.route.hops:
            with self.passage.range("scatter"):
                self._send(passage.route.hops[-1].backwards)

    def apply(self) -> None:
        """Finish phase 4 and run phase 5 on this rank's block of every matrix."""
        with self.passage.range("scatter"):
            self._finish_scatter()
        with self.passage.range("apply"):
            for rule, indices in _busy(self.members):
                self._apply(rule, indices)

    def _finish_scatter(self) -> None:
        route = self.passage.route
        self._arrive()
        for hop in reversed(route.hops[:-1]):
            self._send(hop.backwards)
            self._arrive()
        for share in route.shares:
            buffer = self.passage.buffer(share.padded)
            pack(share.lists[share.index], self.cargo, buffer)
            self.cargo = {}
            self.leg = start_share(share, buffer, self.passage.groups[share.axis])
            self._count(*share.wire_elements)
            self._arrive()

    def _apply(self, rule: UpdateRule, indices: Sequence[int]) -> None:
        shards = [self.members[index].shard for index in indices]
        updates, row_stats = [], []
        for index, shard in zip(indices, shards, strict=True):
            parcel = self.passage.route.held[index]
            elements = self.cargo.pop((index, parcel.origin))
            if elements.is_cuda and not shard.parameter.is_cuda:
                elements = elements.to(shard.parameter.device)
            stats: Tensor | None = None
            if rule.row_stats:
                elements, behind = elements.tensor_split([parcel.block.numel])
                stats = rows_from_wire(behind)
            updates.append(elements)
            row_stats.append(stats)
        rule.apply_all(shards, updates, row_stats, self.commit)

    def _send(self, hop: Hop) -> None:
        """Pack what this rank holds for `hop` and start it."""
        buffer = self.passage.buffer(hop.buffer_elements)
        pack(hop.sent, self.cargo, buffer)
        self.cargo = {}  # it is in the buffer, and need not wait for the wire
        self._start(hop, buffer)

    def _start(self, hop: Hop, buffer: Tensor) -> None:
        self._count(*hop.wire_elements)
        self.leg = start_hop(hop, buffer, self.passage.groups[hop.axis])

    def _arrive(self) -> None:
        if self.leg is not None:
            with self.tally.waits.timed(self.passage.device):
                self.cargo = self.leg.finish(self.passage.timeout_s)
            self.leg = None
            mark(f"exchange of bucket {self.passage.number}", self.passage.device)

    def _count(self, sent: int, received: int) -> None:
        size = self.passage.dtype.itemsize
        self.tally.bytes_sent += sent * size
        self.tally.bytes_received += received * size

    def _update(self, batch: Batch, whole: Tensor, row_state: Tensor | None) -> None:
        """Orthogonalize a batch and lay each origin's block of the updates out for the way back."""
        first, team = self.members[batch.indices[0]], self.passage.team
        stats: Tensor | None = None
        if team is None:
            update, stats = first.rule.orthogonalize(whole, first.shard.group, row_state)
        else:
            panels = whole.view(-1, *whole.shape[-2:])
            shape = batch.matrix.whole_shape
            update = first.rule.orthogonalize_panels(panels, first.shard.group, shape, team)
            update = update.view(whole.shape)
        if team is None or team.index == 0:  # the others have parts of the same matrices
            self.tally.matrices_orthogonalized += len(batch.indices)
        if team is None and self.tally.measures:
            errors = [orthogonality_error(o) for o in update.view(-1, *update.shape[-2:])]
            self.tally.orthogonality_error = max(self.tally.orthogonality_error or 0.0, *errors)
        self.cargo |= take_apart(batch, update, stats, self.passage.dtype)


def set_out(
    passage: Passage, members: Mapping[int, Member], commit: Commit, group: collectives.Group
) -> tuple[Leg | None, Cargo]:
    """Prepare the members and start the first hop on `group`; (leg, what need not travel).

    What has no member travels as zeros.
    """
    hop = passage.route.hops[0] if passage.route.hops else None
    with passage.range("prepare"):
        buffer = passage.buffer(hop.buffer_elements if hop else passage.departing.elements)
        parts = unpack(passage.departing, buffer)
        _prepare(members, {index: part for (index, _), part in parts.items()}, commit)
    if hop is None:
        return None, parts
    with passage.range("gather"):
        return start_hop(hop, buffer, group), {}


def _prepare(members: Mapping[int, Member], places: Mapping[int, Tensor], commit: Commit) -> None:
    for rule, indices in _busy(members):
        shards = [members[index].shard for index in indices]
        blocks = []
        for index, shard in zip(indices, shards, strict=True):
            place = places.get(index)
            if place is not None and rule.row_state is not None:
                place, behind = place.tensor_split([shard.parameter.numel()])
                if behind.numel():
                    numbers = shard.state[rule.row_state].reshape(-1)
                    behind.copy_(rows_to_wire(numbers, behind.dtype))
            blocks.append(place)
        rule.prepare_all(shards, blocks, commit)


def _busy(members: Mapping[int, Member]) -> Iterable[tuple[UpdateRule, list[int]]]:
    """Indices of the members that have something to do here, by rule."""
    by_rule: dict[UpdateRule, list[int]] = defaultdict(list)
    for index, member in members.items():
        if not member.idle:
            by_rule[member.rule].append(index)
    return by_rule.items()


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

"""The plan: an immutable record of who owns which matrix and what is exchanged together.

Owns `Bucket` and `Plan`, the plan's checks of itself, its digest and its report. Makes no decision:
that is `planner.py`. Moves nothing: that is `exchange/`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import NamedTuple

from shardmuon.planning.layout import Mesh
from shardmuon.planning.matrix import Matrix, Panel, lane
from shardmuon.planning.memory import held_bytes, most_bytes
from shardmuon.planning.report import plan_report, plan_warnings
from shardmuon.planning.routes import Route, make_route

__all__ = ["Bucket", "Plan", "Traffic"]


@dataclass(frozen=True)
class Bucket:
    """Matrices exchanged together: one mesh, one set of sharded axes, one wire dtype.

    owners: global rank that orthogonalizes each matrix, in the order of `matrices`. repeated: it is
    that of one replica; in each other one its peer does the same, and no updates are gathered.
    """

    matrices: tuple[Matrix, ...]
    owners: tuple[int, ...]
    repeated: bool = False

    def __post_init__(self) -> None:
        if not self.matrices or len(self.matrices) != len(self.owners):
            raise ValueError("a bucket needs one owner per matrix and at least one matrix")
        first = self.matrices[0]
        for matrix, owner in zip(self.matrices, self.owners, strict=True):
            if owner not in matrix.layout.mesh.coordinates:
                raise ValueError(f"{matrix.id}: owner {owner} is not in its mesh")
            if lane(matrix) != lane(first):
                raise ValueError(f"{matrix.id} cannot share a bucket with {first.id}")
        self._check_teams()

    def _check_teams(self) -> None:
        """Panels lie in order on neighbours along their axis, and none is missing."""
        teams: dict[str, list[tuple[Panel, int]]] = {}
        for matrix, owner in zip(self.matrices, self.owners, strict=True):
            if matrix.panel is not None:
                teams.setdefault(matrix.whole_id, []).append((matrix.panel, owner))
        for name, members in teams.items():
            axis, size = members[0][0].axis, members[0][0].size
            if size != len(members) or not 0 <= axis < self.mesh.ndim:
                raise ValueError(f"the panels of {name} are not those of a team: {members}")
            at = [self.mesh.coordinates[owner] for _, owner in members]
            expected = [
                (*at[0][:axis], at[0][axis] + index, *at[0][axis + 1 :]) for index in range(size)
            ]
            numbers = [panel.number for panel, _ in members]
            if at != expected or numbers != [*range(size)] or at[0][axis] % size:
                raise ValueError(f"the panels of {name} are not those of a team: {members}")

    @property
    def team(self) -> Panel | None:
        """A panel of this bucket, if it is one of panels."""
        return self.matrices[0].panel

    def workers(self, owner: int) -> tuple[int, ...]:
        """The ranks that do what `owner` does: itself, and its peers in other replicas."""
        if not self.repeated:
            return (owner,)
        mesh, axes = self.mesh, self.replicated_axes
        at = mesh.coordinates[owner]
        choices = [range(n) if a in axes else (at[a],) for a, n in enumerate(mesh.shape)]
        return tuple(mesh.rank_at(coordinate) for coordinate in product(*choices))

    @property
    def mesh(self) -> Mesh:
        return self.matrices[0].layout.mesh

    @property
    def sharded_axes(self) -> tuple[int, ...]:
        return self.matrices[0].layout.sharded_axes

    @property
    def replicated_axes(self) -> tuple[int, ...]:
        return self.matrices[0].layout.replicated_axes

    @property
    def lane(self) -> tuple[object, ...]:
        """What its matrices share; see `planning.matrix.lane`."""
        return lane(self.matrices[0])

    @property
    def wire_dtype(self) -> str:
        return self.matrices[0].wire_dtype

    def route(self, rank: int, exchange: str) -> Route:
        """What `rank` sends and receives for this bucket; `exchange` as in `Runtime`."""
        here = self.mesh.coordinates[rank]
        owners = [self.mesh.coordinates[owner] for owner in self.owners]
        if self.repeated:  # those of the rank's own replica
            axes = self.replicated_axes
            owners = [
                tuple(here[axis] if axis in axes else c for axis, c in enumerate(owner))
                for owner in owners
            ]
        return make_route(self.matrices, owners, here, exchange, alone=self.repeated)


class Traffic(NamedTuple):
    """Bytes of one rank in one step: sent to others, received from them, held at most."""

    sent: int
    received: int
    held: int


@dataclass(frozen=True)
class Plan:
    """Owners and buckets of all matrices of an optimizer that this rank takes part in.

    buckets: in the order of execution, the same on all ranks of a mesh. exchange: as in Runtime.
    settings: canonical text of everything else that the ranks of a mesh must share. overlap: as in
    Runtime.
    """

    buckets: tuple[Bucket, ...]
    exchange: str = "auto"
    settings: str = ""
    overlap: str = "none"

    def __post_init__(self) -> None:
        seen: set[str] = set()
        for matrix, _ in self:
            if matrix.id in seen:
                raise ValueError(f"matrix ids must be unique, {matrix.id} is planned twice")
            seen.add(matrix.id)

    def __iter__(self) -> Iterator[tuple[Matrix, int]]:
        """All (matrix, owner) pairs, bucket by bucket."""
        for bucket in self.buckets:
            yield from zip(bucket.matrices, bucket.owners, strict=True)

    def __len__(self) -> int:
        return sum(len(bucket.matrices) for bucket in self.buckets)

    def owners(self) -> Mapping[str, int]:
        """Owner (global rank) of each matrix, by matrix id."""
        return {matrix.id: owner for matrix, owner in self}

    @cached_property
    def meshes(self) -> tuple[Mesh, ...]:
        """Meshes in the order in which their first bucket runs."""
        return tuple(dict.fromkeys(bucket.mesh for bucket in self.buckets))

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """All global ranks that appear in a mesh, ascending."""
        return tuple(sorted({rank for mesh in self.meshes for rank in mesh.ranks}))

    def loads(self) -> dict[int, int]:
        """Cost of each rank's Newton-Schulz in a step, in FLOPs; see `Matrix.cost`."""
        loads = dict.fromkeys(self.ranks, 0)
        for bucket in self.buckets:
            for matrix, owner in zip(bucket.matrices, bucket.owners, strict=True):
                for rank in bucket.workers(owner):
                    loads[rank] += matrix.cost
        return loads

    @property
    def makespan(self) -> int:
        """Largest load, in FLOPs."""
        return max(self.loads().values(), default=0)

    @property
    def lower_bound(self) -> float:
        """No plan of these matrices and panels can have a smaller makespan.

        It is max(mean load, largest of them).
        """
        total = sum(self.loads().values())
        largest = max((matrix.cost for matrix, _ in self), default=0)
        return max(total / max(1, len(self.ranks)), largest)

    @property
    def imbalance(self) -> float:
        """Makespan over mean load; 1.0 is ideal."""
        loads = self.loads().values()
        total = sum(loads)
        return self.makespan * len(loads) / total if total else 1.0

    @cached_property
    def _traffic_of(self) -> dict[int, Traffic]:
        """Filled when asked for: a large plan takes a second for each rank."""
        return {}

    def traffic(self, rank: int) -> Traffic:
        """What `rank` sends, receives and holds in one step."""
        if rank not in self._traffic_of:
            sent = received = 0
            buckets = []
            for bucket in self.buckets:
                if rank in bucket.mesh.coordinates:
                    route = bucket.route(rank, self.exchange)
                    size = bucket.matrices[0].wire_bytes
                    out, into = route.wire_elements()
                    sent, received = sent + out * size, received + into * size
                    buckets.append(held_bytes(bucket.matrices, route, self.overlap))
            self._traffic_of[rank] = Traffic(sent, received, most_bytes(buckets))
        return self._traffic_of[rank]

    def bytes_sent(self) -> dict[int, int]:
        """Wire bytes that each rank sends to others in one step, padding included."""
        return {rank: self.traffic(rank).sent for rank in self.ranks}

    def bytes_received(self) -> dict[int, int]:
        """Wire bytes that each rank receives from others in one step, padding included."""
        return {rank: self.traffic(rank).received for rank in self.ranks}

    def transient_bytes(self, ranks: Iterable[int] | None = None) -> dict[int, int]:
        """Bytes that a step takes at most beside parameters, gradients and state, by rank.

        Buffers of the buckets in flight, whole matrices and the work of Newton-Schulz in the wire
        dtype, with batches as on a GPU. Not in it: the memory that CUDA graphs keep, and what
        AdamW takes after the buckets have gone. ranks: all, unless given.
        """
        return {rank: self.traffic(rank).held for rank in (self.ranks if ranks is None else ranks)}

    @cached_property
    def digest(self) -> str:
        """Hex SHA-256 of the whole plan; equal plans and only they share it."""
        return self.digest_of(self.meshes)

    def digest_of(self, meshes: tuple[Mesh, ...]) -> str:
        """Digest of the part of the plan that runs on `meshes`."""
        text = json.dumps([self.exchange, self.settings, self.overlap, self.describe(meshes)])
        return hashlib.sha256(text.encode()).hexdigest()

    def describe(self, meshes: tuple[Mesh, ...]) -> list[list[object]]:
        """Plain lists that say everything ranks must agree on for `meshes`, bucket by bucket."""
        return [
            [
                [bucket.mesh.ranks, bucket.mesh.shape, bucket.repeated],
                [
                    [
                        matrix.id,
                        [matrix.rows, matrix.cols, matrix.cut.box, matrix.cut.shape],
                        matrix.wire_dtype,
                        matrix.settings,
                        matrix.method,
                        matrix.panel,
                        matrix.layout.splits,
                        owner,
                    ]
                    for matrix, owner in zip(bucket.matrices, bucket.owners, strict=True)
                ],
            ]
            for bucket in self.buckets
            if bucket.mesh in meshes
        ]

    def warnings(self) -> list[str]:
        """What limits this plan, in words; nothing if nothing is off."""
        return plan_warnings(self)

    def report(self) -> str:
        """Human-readable table: ranks with load and bytes, then every matrix with its owner."""
        return plan_report(self)

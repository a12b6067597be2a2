"""A step of a plan as it would run: who does what when, on devices that are not there.

Owns the order of work on a rank, which is that of `exchange/pipeline.py`, and what waits for what:
a rank's own stream, its link, and the ranks of a mesh that meet in each collective. Bytes are those
of even shards; exact ones are the routes', which a plan of many ranks takes minutes to list.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from shardmuon.planning.device import Device
from shardmuon.planning.matrix import Matrix
from shardmuon.planning.plan import Bucket, Plan

__all__ = ["Simulation", "Span", "simulate"]

# Bytes per element of elementwise work in float32, beside the wire: gradient and momentum are read
# and momentum is written; the parameter is read and written. AdamW reads four and writes three.
PREPARE_BYTES, APPLY_BYTES, ADAMW_BYTES = 12, 8, 28


class Span(NamedTuple):
    """Work of one rank, or a collective in which it takes part. Milliseconds."""

    rank: int
    phase: str
    bucket: int
    start: float
    stop: float


@dataclass(frozen=True)
class Simulation:
    """step_ms: of the slowest rank. host_ms: Python's part of it.

    A GPU works meanwhile, so that the longer of the two counts; a CPU does both.
    """

    spans: tuple[Span, ...]
    step_ms: float
    host_ms: float

    def phase_ms(self, phase: str) -> dict[int, float]:
        """Milliseconds of each rank in a phase."""
        total: dict[int, float] = defaultdict(float)
        for span in self.spans:
            if span.phase == phase:
                total[span.rank] += span.stop - span.start
        return dict(total)


@dataclass(frozen=True)
class _Work:
    """What one bucket costs, in milliseconds by rank; links by rank of its mesh."""

    ranks: tuple[int, ...]
    prepare: float
    gather: Mapping[int, float]
    orthogonalize: Mapping[int, float]
    scatter: Mapping[int, float]
    apply: float


def simulate(plan: Plan, device: Device, other_elements: int = 0) -> Simulation:
    """Run `plan` on `device`. other_elements: of parameters that take AdamW, evenly sharded."""
    run = _Run(plan.ranks)
    works = [_work(bucket, device) for bucket in plan.buckets]
    for mesh in plan.meshes:
        run.meet(
            "header", -1, mesh.ranks, dict.fromkeys(mesh.ranks, device.link(len(mesh.ranks)).ms)
        )
        run.wait("header", -1, mesh.ranks)
    if works:
        run.depart(0, works[0])
    for number, work in enumerate(works):
        if number + 1 < len(works):
            run.depart(number + 1, works[number + 1])
        run.wait("gather", number, work.ranks)
        run.compute("orthogonalize", number, work.orthogonalize)
        run.meet("scatter", number, work.ranks, work.scatter)
        if number:
            run.apply(number - 1, works[number - 1])
    if works:
        run.apply(len(works) - 1, works[-1])
    share = other_elements / max(1, len(plan.ranks)) * ADAMW_BYTES
    run.compute("elements", -1, dict.fromkeys(plan.ranks, share / device.memory_gbs * 1e-6))
    host = device.host_ms + device.host_ms_per_matrix * _present(plan)
    step = host + run.end if device.is_host else max(host, run.end)
    return Simulation(tuple(run.spans), step, host)


def _present(plan: Plan) -> int:
    """Matrices of which the first rank holds a block, or which the busiest one owns, if more."""
    rank = plan.ranks[0] if plan.ranks else 0
    held = sum(
        matrix.block_at(matrix.layout.mesh.coordinates[rank]).numel > 0
        for matrix, _ in plan
        if rank in matrix.layout.mesh.coordinates
    )
    return max(held, max(Counter(owner for _, owner in plan).values(), default=0))


class _Run:
    """Clocks of all ranks: when a rank's stream is free, and its link."""

    def __init__(self, ranks: Iterable[int]) -> None:
        self.spans: list[Span] = []
        self._stream = dict.fromkeys(ranks, 0.0)
        self._link = dict(self._stream)
        self._arrival: dict[tuple[str, int], dict[int, float]] = {}

    @property
    def end(self) -> float:
        return max(self._stream.values(), default=0.0)

    def depart(self, number: int, work: _Work) -> None:
        self.compute("prepare", number, dict.fromkeys(work.ranks, work.prepare))
        self.meet("gather", number, work.ranks, work.gather)

    def apply(self, number: int, work: _Work) -> None:
        self.wait("scatter", number, work.ranks)
        self.compute("apply", number, dict.fromkeys(work.ranks, work.apply))

    def compute(self, phase: str, number: int, durations: Mapping[int, float]) -> None:
        """Each rank works for its time, after what it did before."""
        for rank, duration in durations.items():
            start = self._stream[rank]
            self._stream[rank] = start + duration
            if duration:
                self.spans.append(Span(rank, phase, number, start, start + duration))

    def meet(
        self, phase: str, number: int, ranks: Sequence[int], durations: Mapping[int, float]
    ) -> None:
        """A collective: starts when the last rank has come and all links are free."""
        start = max(max(self._stream[rank], self._link[rank]) for rank in ranks)
        arrivals = self._arrival[phase, number] = {}
        for rank in ranks:
            arrivals[rank] = self._link[rank] = start + durations[rank]
            if durations[rank]:
                self.spans.append(Span(rank, phase, number, start, arrivals[rank]))

    def wait(self, phase: str, number: int, ranks: Sequence[int]) -> None:
        """Each rank's stream goes on when its part of the collective has arrived."""
        arrivals = self._arrival[phase, number]
        for rank in ranks:
            self._stream[rank] = max(self._stream[rank], arrivals[rank])


def _work(bucket: Bucket, device: Device) -> _Work:
    """Of one bucket. A matrix is copied once when it is put together, and once when it is sent."""
    mesh, first = bucket.mesh, bucket.matrices[0]
    ranks, size = mesh.ranks, first.wire_bytes
    shards = prod(mesh.shape[axis] for axis in bucket.sharded_axes)
    replicas = prod(mesh.shape[axis] for axis in bucket.replicated_axes)
    replicas = 1 if bucket.repeated else replicas  # they have nothing to do with each other
    elements = sum(m.rows * m.cols for m in bucket.matrices)
    owned: dict[int, list[Matrix]] = defaultdict(list)
    for matrix, owner in zip(bucket.matrices, bucket.owners, strict=True):
        for rank in bucket.workers(owner):
            owned[rank].append(matrix)
    received = {r: sum(m.rows * m.cols for m in owned[r]) for r in ranks}
    most = max(received.values())
    away = 1 - 1 / shards
    memory = device.memory_gbs * 1e6
    held = elements / shards
    inner = mesh.shape[min(bucket.sharded_axes, default=mesh.ndim) :]
    link, across = device.link(prod(inner)), device.link(len(ranks))
    # Blocks go to owners in the own replica only, and what they send is what owners receive.
    travelling = held / replicas
    gather = {r: link.time_ms(max(travelling, received[r]) * away * size) for r in ranks}
    share = across.time_ms(most / shards * (replicas - 1) * size) if replicas > 1 else 0.0
    return _Work(
        ranks,
        held * (PREPARE_BYTES + size / replicas) / memory,
        gather,
        {r: _newton_schulz_ms(owned[r], device) + received[r] * 4 * size / memory for r in ranks},
        {r: gather[r] + share for r in ranks},
        held * (APPLY_BYTES + size) / memory,
    )


def _newton_schulz_ms(matrices: Sequence[Matrix], device: Device) -> float:
    total = 0.0
    team = matrices[0].panel.size if matrices and matrices[0].panel else 0
    kinds = Counter((*m.whole_shape, m.segments, m.method) for m in matrices)
    for (rows, cols, segments, method), count in kinds.items():
        short, long = min(rows, cols), max(rows, cols)
        if team:
            size = matrices[0].wire_bytes
            total += device.panel_ms(count, short, long, segments, team, size)
        else:
            total += device.newton_schulz_ms(count, rows, cols, segments, method)
    return total

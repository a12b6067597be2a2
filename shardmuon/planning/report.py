"""The plan as text for people: who owns what, with load, imbalance and bytes.

Reads a plan and formats it; decides nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardmuon.planning.plan import Plan

__all__ = ["plan_report", "plan_warnings", "table"]

# A report finds bytes and memory from about this many parcels, which takes some seconds; a plan
# answers for any rank.
MOST_PARCELS = 50_000
# Below about this many bytes a link of today's machines does not reach half of its rate.
LEAST_BYTES = 16 * 2**20


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a left-aligned text table with a rule under its header."""
    widths = [max(len(line[i]) for line in (header, *rows)) for i in range(len(header))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in (header, ["-" * width for width in widths], *rows)
    ]


def plan_report(plan: Plan) -> str:
    """Summary, one row per rank, one row per matrix, and warnings in words."""
    loads, mean = plan.loads(), _mean(plan)
    counts = dict.fromkeys(plan.ranks, 0)
    for _, owner in plan:
        counts[owner] += 1
    lines = [
        f"plan {plan.digest[:12]}: {len(plan)} matrices on {len(plan.ranks)} rank(s) in"
        f" {len(plan.buckets)} bucket(s), imbalance {plan.imbalance:.3f}"
        f" (lower bound {_bound(plan):.3f}), exchange {plan.exchange}",
        "",
    ]
    detailed = plan.ranks[: max(1, MOST_PARCELS // max(1, len(plan)))]
    lines += table(
        ("rank", "matrices", "load GFLOP", "of mean", "sent MB", "received MB", "step MB"),
        [
            (
                str(rank),
                str(counts[rank]),
                f"{loads[rank] / 1e9:.3f}",
                f"{loads[rank] / mean:.3f}",
                *(
                    (f"{number / 1e6:.3f}" for number in plan.traffic(rank))
                    if rank in detailed
                    else "---"
                ),
            )
            for rank in plan.ranks
        ],
    )
    lines += ["", *_memory(plan, detailed)]
    lines += ["", *_matrix_table(plan), "", *_meshes(plan)]
    if warnings := plan_warnings(plan):
        lines += ["", *warnings]
    return "\n".join(lines)


def _memory(plan: Plan, ranks: Sequence[int]) -> list[str]:
    """What "step MB" means, and which ranks it was computed for."""
    most = max(plan.transient_bytes(ranks).values(), default=0)
    of = "" if len(ranks) == len(plan.ranks) else f", of the first {len(ranks)} ranks"
    return [
        f"step MB: what a step takes at most beside parameters, gradients and state; the largest is"
        f" {most / 1e6:.3f} MB{of}"
    ]


def _meshes(plan: Plan) -> list[str]:
    """Who shares work with whom. A plan cannot see replicas that its meshes do not know of."""
    lines = []
    for mesh in plan.meshes:
        count = sum(len(bucket.matrices) for bucket in plan.buckets if bucket.mesh == mesh)
        shape = "x".join(map(str, mesh.shape))
        lines.append(
            f"mesh {shape} of ranks {_ranges(sorted(mesh.ranks))}: {count} matrices, each"
            " orthogonalized once among these ranks; replicas outside them (DDP around a"
            " tensor-parallel mesh, plain tensors without mesh=) repeat it"
        )
    return lines


def _ranges(ranks: Sequence[int]) -> str:
    """`0-3, 8` for 0, 1, 2, 3, 8."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def _matrix_table(plan: Plan) -> list[str]:
    rows = [
        (
            matrix.id,
            f"{matrix.rows}x{matrix.cols}",
            matrix.layout.describe(),
            str(owner),
            str(number),
            matrix.wire_dtype,
            matrix.method,
            f"{matrix.cost / 1e9:.3f}",
        )
        for number, bucket in enumerate(plan.buckets)
        for matrix, owner in zip(bucket.matrices, bucket.owners, strict=True)
    ]
    header = ("matrix", "shape", "layout", "owner", "bucket", "wire", "method", "GFLOP")
    return table(header, sorted(rows))


def _mean(plan: Plan) -> float:
    return max(1.0, sum(plan.loads().values()) / max(1, len(plan.ranks)))


def _bound(plan: Plan) -> float:
    return plan.lower_bound / _mean(plan) if len(plan) else 1.0


def plan_warnings(plan: Plan) -> list[str]:
    """What limits this plan, in words."""
    lines = []
    mean = _mean(plan)
    largest = max((matrix for matrix, _ in plan), key=lambda m: m.cost, default=None)
    if largest is not None and largest.cost > 1.001 * mean:
        hint = ", a team (share_large) may" if largest.may_share and not largest.panel else ""
        lines.append(
            f"warning: {largest.id} alone costs {largest.cost / mean:.2f} times the mean"
            f" load, so it sets the time of a step; more ranks will not help{hint}"
        )
    idle = [str(rank) for rank, load in plan.loads().items() if load == 0]
    if idle and len(plan):
        lines.append(f"warning: {len(idle)} rank(s) own no matrix: {', '.join(idle[:16])}")
    return [*lines, *_small_messages(plan), *_uneven_memory(plan)]


def _small_messages(plan: Plan) -> list[str]:
    """Buckets that bring an owner too little for a fast link, though there is more to bring."""
    short = []
    for number, bucket in enumerate(plan.buckets):
        sharded = any(bucket.mesh.shape[axis] > 1 for axis in bucket.sharded_axes)
        owners = len(set(bucket.owners))
        each = sum(matrix.total_bytes for matrix in bucket.matrices) / owners
        same = sum(other.lane == bucket.lane for other in plan.buckets)
        if sharded and same > 1 and each < LEAST_BYTES:
            short.append(number)
    if len(short) < 2:  # what is left over makes one small bucket
        return []
    return [
        f"warning: {len(short)} buckets bring an owner less than {LEAST_BYTES // 2**20} MiB, for"
        " which links are slow; a larger bucket_bytes makes fewer of them"
    ]


def _uneven_memory(plan: Plan) -> list[str]:
    """Owners whose matrices take much more memory than those of most ranks."""
    held = dict.fromkeys(plan.ranks, 0)
    for matrix, owner in plan:
        held[owner] = max(held[owner], matrix.total_bytes)
    middle = sorted(held.values())[len(held) // 2] if held else 0
    rank = max(held, key=lambda r: held[r], default=-1)
    if not held or middle == 0 or held[rank] <= max(4 * middle, LEAST_BYTES):
        return []
    return [
        f"warning: memory of a step is uneven: rank {rank} owns a matrix of"
        f" {held[rank] / 1e6:.0f} MB, the largest of a rank in the middle has {middle / 1e6:.0f} MB"
    ]

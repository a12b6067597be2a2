"""`python -m shardmuon plan`: who would own what, and how long a step would take.

Owns what is printed about a model that is not there on ranks that are not there. The plan is the
planner's own; times are those of `planning/simulation.py`, and predictions.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

from shardmuon.orthogonalize.coefficients import schedule_of
from shardmuon.planning.cost import newton_schulz_flops
from shardmuon.planning.cut import Cut, cut_parameter
from shardmuon.planning.device import Device
from shardmuon.planning.layout import Layout, Mesh, Split
from shardmuon.planning.matrix import Matrix
from shardmuon.planning.plan import Plan
from shardmuon.planning.planner import LARGEST_BUCKET, Freedom, make_plan
from shardmuon.planning.report import table
from shardmuon.planning.simulation import Simulation, simulate
from shardmuon.rules import RULES
from shardmuon.tools import picture
from shardmuon.tools.sources import Listed, Source
from shardmuon.training.load import ConfigError

__all__ = ["Options", "Shape", "planned", "run"]

SEGMENTS = schedule_of("keller", 5).segments
STRUCTURAL = ("split_sizes", "num_heads", "transposed", "flatten")
DRAWN = 8  # ranks in a picture


@dataclass(frozen=True)
class Shape:
    """A mesh: ranks in all, of which each of `replicas` groups holds the whole model."""

    replicas: int
    shards: int

    @property
    def ranks(self) -> int:
        return self.replicas * self.shards

    def mesh(self) -> Mesh:
        return Mesh(tuple(range(self.ranks)), (self.replicas, self.shards), ("replicate", "shard"))

    def __str__(self) -> str:
        return f"{self.replicas}x{self.shards}" if self.replicas > 1 else str(self.shards)


@dataclass(frozen=True, kw_only=True)
class Options:
    """What was asked for. method: "auto" takes the quickest on the device.

    block: plan a step between, of blocks of so many rows and columns, as the group key `ns_block`.
    """

    shape: Shape
    freedom: Freedom
    method: str = "auto"
    bucket_bytes: int | None = None
    block: tuple[int | None, int | None] | None = None
    compare: bool = False
    json: Path | None = None
    plot: Path | None = None

    @property
    def device(self) -> Device:
        return self.freedom.device


def run(source: Source, options: Options) -> None:
    """Print the plan of `source`; write JSON and a picture if asked for."""
    plan, simulation = planned(source, options, options.shape)
    ranks = f"{options.shape.ranks} rank(s) ({options.shape})"
    print(f"{source.title} on {ranks}, {options.device.name}{_blocks(options)}\n")
    print("\n".join(_summary(plan, simulation, options)))
    print("\n" + "\n".join(_by_ranks(source, options)))
    if options.compare:
        print("\n" + "\n".join(_comparison(plan)))
    if options.json is not None:
        options.json.write_text(json.dumps(_numbers(source, plan, simulation), indent=1) + "\n")
    if options.plot is not None:
        _draw(source, plan, simulation, options)


def planned(source: Source, options: Options, shape: Shape) -> tuple[Plan, Simulation]:
    """The plan of a model under FSDP2 over `shape`, HSDP if it has replicas, and a step of it."""
    mesh = shape.mesh()
    layout = Layout(mesh, (Split(1, 0),))
    matrices = []
    for listed in source.parameters:
        rule = RULES.get(listed.keys["algorithm"])
        if rule is None:
            continue
        if rule.row_state and options.block and options.block[1]:
            raise ConfigError(f"{source.title}: blocks cut rows, of which its rule has a number")
        for suffix, cut in _cuts(listed, options):
            method = options.method
            if method == "auto":
                method = _quickest(options, cut.rows, cut.cols, len(source.parameters))
            cost = newton_schulz_flops(cut.rows, cut.cols, SEGMENTS, method)
            wire, size = ("float32", 4) if options.device.is_host else ("bfloat16", 2)
            matrices.append(
                Matrix(
                    listed.name + suffix,
                    cut,
                    layout,
                    wire,
                    size,
                    cost,
                    method=method,
                    segments=SEGMENTS,
                    may_share=rule.shares and not cut.flatten,
                    row_state=rule.row_state is not None,
                    row_stats=rule.row_stats,
                )
            )
    if not matrices:
        raise ConfigError(f"{source.title}: no parameter takes Muon")
    plan = make_plan(matrices, bucket_bytes=options.bucket_bytes, freedom=options.freedom)
    return plan, simulate(plan, options.device, _other_elements(source))


def _cuts(listed: Listed, options: Options) -> Iterator[tuple[str, Cut]]:
    """What the step orthogonalizes of a parameter, each with the suffix of its id."""
    keys = {key: listed.keys[key] for key in STRUCTURAL if key in listed.keys}
    for suffix, cut in cut_parameter(listed.shape, **keys):
        if options.block is None:
            yield suffix, cut
        else:
            yield from ((suffix + number, tile) for number, tile in cut.tiles(*options.block))


def _blocks(options: Options) -> str:
    """How a heading says which step it is."""
    if options.block is None:
        return ""
    return f", a step of blocks of {' x '.join(str(size or 'all') for size in options.block)}"


def _quickest(options: Options, rows: int, cols: int, parameters: int) -> str:
    """For batches of a size that an owner may have; methods differ little in what that is."""
    share = max(1, parameters // options.shape.ranks)
    fitting = max(1, (options.bucket_bytes or LARGEST_BUCKET) // (2 * rows * cols))
    return options.device.best_method(min(share, fitting), rows, cols, SEGMENTS)


def _other_elements(source: Source) -> int:
    return sum(prod(p.shape) for p in source.parameters if p.keys["algorithm"] not in RULES)


def _summary(plan: Plan, simulation: Simulation, options: Options) -> list[str]:
    loads = plan.loads()
    most, least = max(loads.values()), min(loads.values())
    busiest = max(loads, key=lambda rank: loads[rank])
    traffic = plan.traffic(busiest)
    ns = simulation.phase_ms("orthogonalize")
    lines = table(
        ("", ""),
        [
            ("matrices", f"{len(plan)} in {len(plan.buckets)} bucket(s)"),
            ("load of a rank, TFLOP", f"{least / 1e12:.3f} to {most / 1e12:.3f}"),
            ("makespan / mean load", f"{plan.imbalance:.3f}"),
            ("makespan / lower bound", f"{plan.makespan / plan.lower_bound:.4f}"),
            ("sent, received by its rank, MB", _megabytes(traffic.sent, traffic.received)),
            ("memory of a step there, MB", _megabytes(traffic.held)),
            ("predicted Newton-Schulz, ms", f"{max(ns.values(), default=0.0):.2f}"),
            ("predicted step, ms", f"{simulation.step_ms:.2f}"),
            ("of that the host's, ms", f"{simulation.host_ms:.2f}"),
        ],
    )[2:]
    return [*lines, *(f"\n{line}" for line in plan.warnings())]


def _megabytes(*sizes: int) -> str:
    return ", ".join(f"{size / 1e6:.1f}" for size in sizes)


def _by_ranks(source: Source, options: Options) -> list[str]:
    """The effect of 1, 2, 4, ... ranks, with as many replicas where they fit."""
    rows = []
    shards = 1
    while shards <= options.shape.shards:
        shape = Shape(options.shape.replicas, shards)
        plan, simulation = planned(source, options, shape)
        rows.append(
            (
                str(shape),
                f"{plan.imbalance:.3f}",
                f"{plan.lower_bound * len(plan.ranks) / max(1, sum(plan.loads().values())):.3f}",
                f"{max(simulation.phase_ms('orthogonalize').values()):.2f}",
                f"{simulation.step_ms:.2f}",
            )
        )
        shards *= 2
    header = ("ranks", "makespan / mean", "bound / mean", "Newton-Schulz ms", "step ms")
    return table(header, rows)


def _comparison(plan: Plan) -> list[str]:
    """Other ways to choose owners, by makespan over mean load."""
    pairs = list(plan)
    ranks = plan.ranks
    mean = max(1.0, sum(m.cost for m, _ in pairs) / len(ranks))
    matrices = [matrix for matrix, _ in sorted(pairs, key=lambda pair: pair[0].id)]

    def greedy(weight: Callable[[Matrix], int]) -> dict[int, int]:
        loads = dict.fromkeys(ranks, 0)
        weights = dict.fromkeys(ranks, 0)
        for matrix in sorted(matrices, key=lambda m: (-weight(m), m.id)):
            rank = min(ranks, key=lambda r: weights[r])
            weights[rank] += weight(matrix)
            loads[rank] += matrix.cost
        return loads

    turns = dict.fromkeys(ranks, 0)
    for number, matrix in enumerate(matrices):
        turns[ranks[number % len(ranks)]] += matrix.cost
    ways: dict[str, Mapping[int, int]] = {
        "round robin": turns,
        "elements, largest first": greedy(lambda m: m.rows * m.cols),
        "cost, largest first": greedy(lambda m: m.cost),
        "this plan": plan.loads(),
    }
    rows = [(name, f"{max(loads.values()) / mean:.3f}") for name, loads in ways.items()]
    rows.append(("lower bound", f"{plan.lower_bound / mean:.3f}"))
    return table(("owners by", "makespan / mean"), rows)


def _numbers(source: Source, plan: Plan, simulation: Simulation) -> dict[str, object]:
    return {
        "source": source.title,
        "ranks": len(plan.ranks),
        "matrices": len(plan),
        "buckets": len(plan.buckets),
        "loads_flop": plan.loads(),
        "makespan_flop": plan.makespan,
        "lower_bound_flop": plan.lower_bound,
        "step_ms": simulation.step_ms,
        "host_ms": simulation.host_ms,
        "newton_schulz_ms": simulation.phase_ms("orthogonalize"),
        "owners": plan.owners(),
    }


def _draw(source: Source, plan: Plan, simulation: Simulation, options: Options) -> None:
    assert options.plot is not None
    if not picture.drawable():
        raise ConfigError("--plot needs matplotlib; pip install 'shardmuon[plot]'")
    where = f"{options.shape.ranks} rank(s), {options.device.name}"
    title = f"Predicted step of {source.title}, {where}"
    lanes = picture.planned_rows(simulation.spans, _drawn(plan.ranks))
    picture.draw(lanes, title, options.plot)
    print(f"\n{options.plot}")


def _drawn(ranks: Sequence[int]) -> Sequence[int]:
    return ranks[:DRAWN]

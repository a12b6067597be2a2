"""`python -m shardmuon trace`: where a step of shardmuon spends its time, rank by rank.

Owns the files that it writes and the table that it prints. Each rank writes its own Chrome trace;
the first rank prints and draws for all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from shardmuon.exchange import collectives
from shardmuon.muon import Muon
from shardmuon.planning.report import table
from shardmuon.tools import picture
from shardmuon.tools.profiling import record
from shardmuon.tools.subjects import make_optimizers, make_subject
from shardmuon.tools.timeline import Summary, Timeline
from shardmuon.tools.workloads import WORKLOADS
from shardmuon.training import place
from shardmuon.training.config import Mesh

__all__ = ["report", "run"]

WARM_UP = 3
HEADER = (
    "rank",
    "step ms",
    "Newton-Schulz ms",
    "of all",
    "planned",
    "communication ms",
    "under Newton-Schulz",
    "exposed ms",
    "of the step",
)


def run(model: str, folder: Path, steps: int, optimizer: str = "shardmuon") -> None:
    """Profile `steps` iterations of `model`, write into `folder`. Collective.

    optimizer: "shardmuon" or, of the same with other settings, "owner" or "overlap".
    """
    here = place.start(Mesh(), place.choose_device(Mesh()))
    folder.mkdir(parents=True, exist_ok=True)
    subject = make_subject(WORKLOADS[model], here)
    subject.optimizers = make_optimizers(optimizer, subject)
    for _ in range(WARM_UP):
        subject.iterate()
    path = folder / f"trace-rank{here.rank}.json.gz"
    found = record(subject, steps, path)
    summaries: list[Summary] = collectives.gather_objects(found.summary())
    ranks: list[Timeline] = collectives.gather_objects(found.last_step())
    (muon,) = subject.optimizers
    if here.first and isinstance(muon, Muon):
        print(f"{model}, {here.ranks} rank(s) on {here.device.type}; means of {steps} step(s)\n")
        loads = muon.plan.loads()
        print("\n".join(report(summaries, loads)))
        if ranks[0].on_host:
            print("\nWithout a GPU: times of the host, and of gloo's threads for communication.")
        print()
        for rank in range(here.ranks):
            print(folder / f"trace-rank{rank}.json.gz")
        _draw(ranks, model, folder / "timeline.png")
    collectives.barrier()
    collectives.stop()


def report(ranks: Sequence[Summary], loads: Mapping[int, int]) -> list[str]:
    """One row per rank. Of all: its share of all ranks' Newton-Schulz, measured and planned."""
    busy = sum(each.orthogonalize_ms for each in ranks)
    planned = sum(loads.values())
    rows = [
        (
            str(rank),
            f"{each.step_ms:.2f}",
            f"{each.orthogonalize_ms:.2f}",
            _share(each.orthogonalize_ms / busy if busy else None),
            _share(loads.get(rank, 0) / planned if planned else None),
            f"{each.communication_ms:.2f}",
            _share(each.hidden_share),
            f"{each.exposed_ms:.2f}",
            _share(each.exposed_share),
        )
        for rank, each in enumerate(ranks)
    ]
    return table(HEADER, rows)


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _draw(ranks: Sequence[Timeline], model: str, path: Path) -> None:
    if not picture.drawable():
        print("no timeline.png: matplotlib is not installed; pip install 'shardmuon[plot]'")
        return
    title = f"One step of shardmuon on {model}, {len(ranks)} rank(s)"
    picture.draw(picture.rows(ranks), title, path)
    print(path)

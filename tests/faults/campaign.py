"""Kill training runs many times and count what was lost.

    python -m tests.faults.campaign --kills 200 --seed 0 [--minutes N]

Prints tables in markdown. Exits with 1 if a run resumed from a checkpoint that it should not have
taken, has other bits than a run left alone, lost more than it may, or did not reach its end.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.faults import files
from tests.faults.aim import Clock
from tests.faults.trial import KILLS, Fault, Outcome, Reference, Setting, Trial
from tests.training import launch

__all__ = ["Campaign", "main", "table_of_faults", "table_of_runs"]

RANKS = ((2,), (2,), (2,), (2,), (1,), (2, 1), (1, 2))
WAYS = ("sync", "async")
MOST_KILLS = 7
"""In one run: the ends of runs are to be judged as well."""


class Campaign:
    """Runs in subfolders of `folder`, which is left as it is only where something is wrong."""

    def __init__(self, folder: Path, seed: int, steps: int = 40) -> None:
        self.folder, self.steps = folder, steps
        self.dice = random.Random(seed)
        self.clock = Clock()
        self.outcomes: list[Outcome] = []
        self._data = folder / "data"
        self._data.mkdir(parents=True)
        launch.text_files(self._data)
        self._references: dict[int, Reference] = {}

    @property
    def kills(self) -> int:
        """Kills so far, without those that came too late."""
        faults = (fault for outcome in self.outcomes for fault in outcome.faults)
        return sum(fault.kind.startswith(KILLS) for fault in faults)

    @property
    def problems(self) -> list[str]:
        """What is wrong; nothing should be."""
        return [text for outcome in self.outcomes for text in outcome.problems]

    def settings(self) -> Iterator[Setting]:
        """Saves in the foreground and in the background by turns, all else at random."""
        while True:
            for asynchronous in (False, True):
                yield Setting(
                    asynchronous=asynchronous,
                    read_back=self.dice.random() < 0.3,
                    every=self.dice.choice([2, 3]),
                    ranks=self.dice.choice(RANKS),
                    steps=self.steps,
                )

    def run(self, setting: Setting, kills: int) -> Outcome:
        """One run with at most `kills` kills."""
        for ranks in setting.ranks:
            if ranks not in self._references:
                where = self.folder / f"alone-{ranks}"
                self._references[ranks] = Reference(ranks, self.steps, self._data, where)
        folder = self.folder / f"run-{len(self.outcomes)}"
        trial = Trial(setting, self._references, self._data, folder, self.dice)
        outcome = trial.run(kills, self.clock)
        self.outcomes.append(outcome)
        if not outcome.problems:
            shutil.rmtree(folder)
        return outcome


def table_of_faults(outcomes: Sequence[Outcome]) -> str:
    """Every kind of fault and what came of it, in markdown."""
    rows: dict[tuple[str, str], list[Fault]] = defaultdict(list)
    for outcome in outcomes:
        for fault in outcome.faults:
            rows[fault.kind, outcome.setting.saves].append(fault)
    kinds = [f"{kind}, {whom}" for kind in KILLS for whom in ("one rank", "all ranks")]
    order = [(kind, way) for kind in [*kinds, *files.DAMAGES] for way in WAYS]
    lines = [_line(kind, way, rows[kind, way]) for kind, way in order if rows[kind, way]]
    lines.append(_line("**all**", "", [fault for faults in rows.values() for fault in faults]))
    head = [
        "fault",
        "saves",
        "faults",
        "save cut off",
        "resumed",
        "steps lost: mean",
        "most",
        "in intervals",
        "since a save began, in intervals",
        "unfit taken",
        "wrong bits",
        "destroyed",
    ]
    return "\n".join([_row(head), _row(["---", "---", *["---:"] * (len(head) - 2)]), *lines])


def _line(kind: str, way: str, faults: Sequence[Fault]) -> str:
    count = len(faults)
    lost = [fault.lost for fault in faults]
    cells = [
        kind,
        way,
        count,
        sum(fault.hit for fault in faults),
        sum(fault.resumed for fault in faults),
        f"{sum(lost) / max(1, count):.1f}",
        max(lost, default=0),
        f"{max((f.lost / f.setting.every for f in faults), default=0):.1f}",
        f"{max((f.lost_begun / f.setting.every for f in faults), default=0):.1f}",
        sum(fault.took_unfit for fault in faults),
        sum(fault.wrong_bits for fault in faults),
        sum(fault.destroyed for fault in faults),
    ]
    return _row(cells)


def table_of_runs(outcomes: Sequence[Outcome]) -> str:
    """Runs by how they save and on how many ranks, in markdown."""
    rows: dict[tuple[str, str], list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        setting = outcome.setting
        ranks = " and ".join(map(str, sorted(set(setting.ranks))))
        rows[ranks, setting.saves + ", read back" * setting.read_back].append(outcome)
    head = ["ranks", "saves", "runs", "starts", "bits compared", "wrong results", "loss differs by"]
    lines = [_row(head), _row(["---", "---", *["---:"] * (len(head) - 2)])]
    for (ranks, saves), some in sorted(rows.items()):
        cells = [
            ranks,
            saves,
            len(some),
            sum(outcome.starts for outcome in some),
            sum(outcome.compared for outcome in some),
            sum(bool(outcome.problems) for outcome in some),
            f"{max(outcome.loss_difference for outcome in some):.1e}",
        ]
        lines.append(_row(cells))
    return "\n".join(lines)


def _row(cells: Sequence[object]) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def main(arguments: Sequence[str]) -> int:
    """The command; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.campaign")
    parser.add_argument("--kills", type=int, default=200, help="how many, at least")
    parser.add_argument("--seed", type=int, default=0, help="of all choices but the clock's")
    parser.add_argument("--minutes", type=float, default=60.0, help="start no run after that")
    options = parser.parse_args(arguments)
    folder = Path(tempfile.mkdtemp(prefix="shardmuon-faults-"))
    begun = time.monotonic()
    campaign = Campaign(folder / "runs", options.seed)
    for setting in campaign.settings():
        outcome = campaign.run(setting, campaign.dice.randint(3, MOST_KILLS))
        minutes = (time.monotonic() - begun) / 60
        count = f"{len(outcome.faults)} faults, {campaign.kills} kills so far"
        print(f"{minutes:5.1f} min: {count}; {setting}", file=sys.stderr, flush=True)
        if campaign.kills >= options.kills or minutes > options.minutes or campaign.problems:
            break
    _report(campaign, minutes)
    if campaign.problems:
        print(f"\nfiles are left in {folder}\n", *campaign.problems, sep="\n", file=sys.stderr)
        return 1
    shutil.rmtree(folder)
    return 0


def _report(campaign: Campaign, minutes: float) -> None:
    outcomes = campaign.outcomes
    print(f"{campaign.kills} kills in {len(outcomes)} runs, {minutes:.0f} minutes; ", end="")
    print(f"{sum(outcome.late for outcome in outcomes)} kills came after the end; ", end="")
    print(f"{sum(o.stubborn for o in outcomes)} times SIGTERM did not end the other rank\n")
    print(table_of_faults(outcomes), table_of_runs(outcomes), sep="\n\n", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""One training run that is killed again and again until it reaches its last step.

Owns the judgement after each fault: what the run lost, whether it took a checkpoint that it should
not have, and whether all checkpoints have the bits of a run that was left alone.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.faults import files, jobs
from tests.faults.aim import Clock, Watch

__all__ = ["KILLS", "LOSS_TOLERANCE", "Fault", "Outcome", "Reference", "Setting", "Trial"]

KEEP = 2
KILLS = ("random instant", "during a save")
LOSS_TOLERANCE = 1e-4
"""On another number of ranks gradients are summed in another order."""
MOST_STARTS = 60


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How a run saves, and on how many ranks it starts: the first time, the second, ..., again."""

    asynchronous: bool = False
    read_back: bool = False
    every: int = 2
    ranks: tuple[int, ...] = (2,)
    steps: int = 40

    @property
    def saves(self) -> str:
        """How saves are done, in a word."""
        return "async" if self.asynchronous else "sync"

    def arguments(self) -> list[str]:
        """As arguments of train.py."""
        return [
            f"schedule.steps={self.steps}",
            f"checkpoint.every={self.every}",
            f"checkpoint.keep_last={KEEP}",
            f"checkpoint.async={str(self.asynchronous).lower()}",
            f"checkpoint.verify={'read-back' if self.read_back else 'checksums'}",
        ]


@dataclass(kw_only=True)
class Fault:
    """One kill or damage and what came of it.

    lost: steps done minus the step of the newest fit checkpoint, at most `bound`. lost_begun: minus
    the step of the newest save that had begun. hit: a save was left unfinished.
    """

    kind: str
    setting: Setting
    bound: int
    lost: int
    lost_begun: int = 0
    hit: bool = False
    resumed: bool = False
    took_unfit: bool = False
    wrong_bits: bool = False
    destroyed: bool = False


@dataclass(kw_only=True)
class Outcome:
    """A run that is over.

    late: kills that found it over. stubborn: kills of one rank after which SIGTERM did not end the
    others. compared: checkpoints compared bit for bit. loss_difference: to the run left alone.
    """

    setting: Setting
    starts: int = 0
    late: int = 0
    stubborn: int = 0
    compared: int = 0
    loss_difference: float = 0.0
    wrong_bits: bool = False
    faults: list[Fault] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


class Reference:
    """A run on `ranks` ranks that nobody disturbs and that saves every step."""

    def __init__(self, ranks: int, steps: int, data: Path, folder: Path) -> None:
        self._root = folder / "checkpoints"
        self._contents: dict[int, files.Content] = {}
        settings = [f"schedule.steps={steps}", "checkpoint.every=1", "checkpoint.keep_last=null"]
        job = jobs.Job(jobs.tiny(data, folder, *settings), ranks, folder / "logs")
        codes = job.finish()
        if any(codes):
            raise RuntimeError(f"the run left alone ended with {codes}:\n{job.log()}")
        self.loss = validation_loss(folder)

    def at(self, step: int) -> files.Content:
        """The checkpoint after `step` steps."""
        if step not in self._contents:
            self._contents[step] = files.read(self._root / f"step_{step:08d}")
        return self._contents[step]


def records(folder: Path) -> list[dict[str, Any]]:
    """All whole lines of metrics.jsonl in the order in which they were written."""
    path = folder / "metrics.jsonl"
    whole = path.read_text().rpartition("\n")[0] if path.exists() else ""
    return [json.loads(line) for line in whole.splitlines()]


def validation_loss(folder: Path) -> float:
    """The last one."""
    return float([r["loss"] for r in records(folder) if r["event"] == "evaluate"][-1])


class Trial:
    """A run in `folder` on the files in `data`; `references` by number of ranks."""

    def __init__(
        self,
        setting: Setting,
        references: Mapping[int, Reference],
        data: Path,
        folder: Path,
        dice: random.Random,
    ) -> None:
        self.setting, self.references, self.dice = setting, references, dice
        self.folder, self.root = folder, folder / "checkpoints"
        self.arguments = jobs.tiny(data, folder, *setting.arguments())
        self.outcome = Outcome(setting=setting)
        self._expected = 0  # the step that the next start must resume from
        self._done = 0
        self._lines = 0
        self._unfit: set[files.Identity] = set()
        self._judged: dict[files.Identity, bool] = {}
        self._pending: list[Fault] = []

    def run(self, kills: int, clock: Clock) -> Outcome:
        """Start, kill, judge and damage until the last step is reached."""
        for ranks in self._ranks():
            job = jobs.Job(self.arguments, ranks, self.folder / "logs")
            watch = Watch(job, self.folder, self.setting.saves, clock)
            try:
                over = not kills or not self._kill(watch)
                if over:
                    self._await_end(job)
                kills -= not over
            finally:
                job.stop()
            if over or self.outcome.problems:
                break
        if not self.outcome.problems:
            self._judge_end()
        return self.outcome

    def _ranks(self) -> Iterator[int]:
        while self.outcome.starts < MOST_STARTS:
            self.outcome.starts += 1
            yield self.setting.ranks[(self.outcome.starts - 1) % len(self.setting.ranks)]
        self._complain(f"{MOST_STARTS} starts did not reach the last step")

    def _complain(self, text: str) -> None:
        self.outcome.problems.append(f"{self.folder} with {self.setting}: {text}")

    # -- faults ---------------------------------------------------------------------------------

    def _kill(self, watch: Watch) -> bool:
        """Kill, judge and perhaps damage; False if the run was over before."""
        job, kind = watch.job, self.dice.choice(KILLS)
        if kind == "random instant":
            there = watch.wait_for_instant(self.setting.steps - self._expected, self.dice)
        else:
            there = watch.wait_for_save(self.dice)
        everyone = list(range(job.ranks))
        victims = everyone if self.dice.random() < 0.4 else [self.dice.choice(everyone)]
        before = self._fit_steps()
        begun = {files.step_of(path) for path in watch.new_saves()}
        if there:
            self.outcome.stubborn += not job.kill(*victims)
        if not there or all(job.processes[rank].exitcode == 0 for rank in victims):
            self.outcome.late += 1
            return False
        self._read_records()
        whom = "all ranks" if victims == everyone else "one rank"
        # A rank that is left may have removed the folder of a save that failed, or begun another.
        begun |= {files.step_of(path) for path in watch.new_saves()}
        self._judge_kill(f"{kind}, {whom}", before, begun)
        if self.dice.random() < 0.4 and not self.outcome.problems:
            self._damage()
        return True

    def _damage(self) -> None:
        """Damage the newest checkpoint, if none is damaged yet: one good one must be left."""
        published = files.folders(self.root)
        if not published or len(self._fit()) < len(published):
            return
        kind = self.dice.choice(list(files.DAMAGES))
        if files.damage(published[-1], kind, self.dice):
            self._unfit.add(files.identity(published[-1]))
        newest = max(self._fit_steps(), default=0)
        bound = self.setting.every if self._unfit else 0
        lost = self._expected - newest
        self._add(Fault(kind=kind, setting=self.setting, bound=bound, lost=lost))
        self._done = self._expected = newest

    def _await_end(self, job: jobs.Job) -> None:
        codes = job.finish()
        self._read_records()
        if any(codes):
            logs = "\n".join(job.log(rank)[-3000:] for rank in range(job.ranks))
            self._complain(f"left alone, the ranks ended with {codes}:\n{logs}")

    # -- judgement ------------------------------------------------------------------------------

    def _read_records(self) -> None:
        """See what the last start has done, and where it resumed."""
        new = records(self.folder)[self._lines :]
        self._lines += len(new)
        if not new:
            return  # killed before it resumed
        resumed = new[0]["step"]
        for fault in self._pending:
            fault.resumed = True
            fault.took_unfit = resumed > self._expected
        if resumed != self._expected:
            self._complain(f"resumed from step {resumed}, expected {self._expected}")
        self._pending.clear()
        self._done = max(record["step"] for record in new)

    def _judge_kill(self, kind: str, before: list[int], begun: set[int]) -> None:
        """See what is left; `before` were the steps of fit checkpoints, `begun` those of saves."""
        after = self._fit_steps()
        newest = max(after, default=0)
        fault = Fault(
            kind=kind,
            setting=self.setting,
            # In the background a save may last until the next one is due.
            bound=self.setting.every * (2 if self.setting.asynchronous else 1),
            lost=self._done - newest,
            lost_begun=self._done - min(self._done, max(newest, *begun, 0)),
            hit=bool(begun.difference(after)),
            wrong_bits=not all(self._good(path) for path in self._fit()),
            destroyed=newest < max(before, default=0) or len(after) < min(KEEP, len(before)),
        )
        self._add(fault)
        self._done = self._expected = newest

    def _add(self, fault: Fault) -> None:
        self.outcome.faults.append(fault)
        self._pending.append(fault)
        if fault.lost > fault.bound or fault.wrong_bits or fault.destroyed:
            self._complain(f"{fault}")

    def _judge_end(self) -> None:
        if self._fit_steps()[-1:] != [self.setting.steps]:
            self._complain(f"the last checkpoint is missing, there are {self._fit_steps()}")
            return
        reference = self.references[self.setting.ranks[0]]
        self.outcome.loss_difference = abs(validation_loss(self.folder) - reference.loss)
        self.outcome.wrong_bits = not all(self._good(path) for path in self._fit())
        allowed = LOSS_TOLERANCE if len(set(self.setting.ranks)) > 1 else 0.0
        if self.outcome.wrong_bits or self.outcome.loss_difference > allowed:
            self._complain(f"another result: {self.outcome}")

    def _fit(self) -> list[Path]:
        """Published checkpoints that were not damaged here, oldest first."""
        found = files.folders(self.root)
        return [path for path in found if files.identity(path) not in self._unfit]

    def _fit_steps(self) -> list[int]:
        return [files.step_of(path) for path in self._fit()]

    def _good(self, path: Path) -> bool:
        """True if plain DCP reads it and, on one number of ranks, the bits are right."""
        key = files.identity(path)
        if key not in self._judged:
            self._judged[key] = self._compare(path)
        return self._judged[key]

    def _compare(self, path: Path) -> bool:
        try:
            content = files.read(path)
        except Exception as error:  # whatever DCP raises for a file that is not whole
            self._complain(f"{path} cannot be read: {error!r}")
            return False
        if len(set(self.setting.ranks)) > 1:
            return True
        self.outcome.compared += 1
        reference = self.references[self.setting.ranks[0]]
        return files.same(content, reference.at(files.step_of(path)))

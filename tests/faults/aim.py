"""When to kill: at an instant that is uniform over a run, or in the middle of a save.

Owns the measurements of this machine's pace that both need. Watches files only; the run under test
knows nothing of it.
"""

from __future__ import annotations

import random
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from tests.faults import files, jobs

__all__ = ["Clock", "Watch"]

POLL_S = 0.001


class Clock:
    """Moving means of how long things take on this machine now."""

    def __init__(self) -> None:
        self._means: dict[tuple[Any, ...], float] = {}
        self._guesses = defaultdict(lambda: 0.1, start=1.5)

    def learn(self, seconds: float, *key: Any) -> None:
        """Take a measurement of `key`, whose first part says of what kind it is."""
        self._means[key] = 0.7 * self._means.get(key, seconds) + 0.3 * seconds

    def guess(self, *key: Any) -> float:
        """The mean in seconds; before the first measurement, about that of an idle machine."""
        return self._means.get(key, self._guesses[key[0]])


class Watch:
    """One start of a run that saves in a certain `mode`, seen from outside."""

    def __init__(self, job: jobs.Job, folder: Path, mode: str, clock: Clock) -> None:
        self.job, self.clock = job, clock
        self._key = (job.ranks, mode)
        self._root, self._metrics = folder / "checkpoints", folder / "metrics.jsonl"
        self._lines = self._count()
        self._old = {files.identity(path) for path in files.leftovers(self._root)}

    def wait_for_instant(self, steps: int, dice: random.Random) -> bool:
        """Until an instant that is uniform over a run with `steps` to go; False if it has ended."""
        length = self.clock.guess("start", *self._key)
        length += steps * self.clock.guess("step", *self._key)
        instant = self.job.started + dice.uniform(0, length)
        begun = None
        while self.job.running and time.monotonic() < instant:
            if begun is None and self._count() > self._lines:
                begun = time.monotonic()
                self.clock.learn(begun - self.job.started, "start", *self._key)
            time.sleep(POLL_S)
        done = self._count() - self._lines - 1
        if begun is not None and done > 2:
            self.clock.learn((time.monotonic() - begun) / done, "step", *self._key)
        return self.job.running

    def wait_for_save(self, dice: random.Random) -> bool:
        """Until a moment during one of the next saves; False if the run has ended."""
        for _ in range(dice.randrange(4)):
            folder = self._next_save()
            seen = time.monotonic()
            while self.job.running and folder is not None and folder.exists():
                time.sleep(POLL_S)
            self.clock.learn(time.monotonic() - seen, "save", *self._key)
        folder = self._next_save()
        aim = dice.choice(["begin", "anywhere", "publication"])
        if aim == "begin":
            time.sleep(dice.uniform(0, 0.03))
        elif aim == "anywhere":
            time.sleep(dice.uniform(0, 1.2 * self.clock.guess("save", *self._key)))
        elif folder is not None:
            while self.job.running and folder.exists() and not (folder / files.MANIFEST).exists():
                time.sleep(POLL_S)
            time.sleep(dice.uniform(0, 0.01))
        return self.job.running

    def new_saves(self) -> list[Path]:
        """Temporary folders that were not there before this start."""
        found = files.leftovers(self._root)
        return [path for path in found if files.identity(path) not in self._old]

    def _next_save(self) -> Path | None:
        while self.job.running:
            found = self.new_saves()
            if found:
                return found[-1]
            time.sleep(POLL_S)
        return None

    def _count(self) -> int:
        return self._metrics.read_bytes().count(b"\n") if self._metrics.exists() else 0

"""Ends a job that hangs, and says which ranks are missing where.

Owns two threads per process and what it tells the others through the rendezvous store, which works
while process groups are stuck. It acts when this rank has waited too long for a collective, when a
rank beside it falls silent, or when another rank's watchdog has acted.
"""

from __future__ import annotations

import contextlib
import faulthandler
import itertools
import json
import os
import sys
import threading
import time
from collections import defaultdict
from types import TracebackType
from typing import NamedTuple

from shardmuon.exchange import activity, collectives
from shardmuon.limits import Seconds, describe, fits, show

__all__ = ["EXIT_CODE", "Watchdog"]

EXIT_CODE = 70
_END, _GONE = "end", "gone"
_entries = itertools.count()
# Others that wait in vain write what they wait for before it is read; others that fail, fail.
_GRACE_S = 1.0


class _Beat(NamedTuple):
    """What a rank says of itself: `time.time()`, step, activity and for how long."""

    at: float
    step: int
    text: str
    seconds: float

    def __str__(self) -> str:
        return f"step {self.step}, {self.text}, for {self.seconds:.0f} s"


class Watchdog:
    """`with Watchdog(limit_s):` around training; every rank of the job enters it, or none.

    limit_s: seconds after which a wait for other ranks, on the host or of the GPU, ends the job.
    Longer than the slowest legitimate wait, such as for a rank that compiles. silent_s: seconds
    without a sign of life after which a rank counts as dead or stopped.

    Ends the process with `EXIT_CODE`, after a report and the stacks of all threads on stderr: an
    exception could not reach a thread that is stuck in a collective. The launcher then ends the
    job. An exception that leaves the block ends the other ranks too. Without a process group it
    does nothing.
    """

    def __init__(self, limit_s: float = 600.0, silent_s: float = 60.0) -> None:
        for name, value in (("limit_s", limit_s), ("silent_s", silent_s)):
            if not fits(Seconds, value):
                raise ValueError(f"{name} must be {describe(Seconds)}, got {show(value)}")
        self._limit_s, self._silent_s = limit_s, silent_s
        self._beat_s = min(5.0, max(0.05, min(limit_s, silent_s) / 8))
        self._rank, self._ranks = collectives.rank(), collectives.world_size()
        self._stop = threading.Event()
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._looks = 0
        self._neighbour = (self._rank + 1) % self._ranks
        self._heard: tuple[str, float] | None = None

    def __enter__(self) -> Watchdog:
        if self._ranks > 1:
            # Ranks enter equally often, and what was said in an earlier block is over.
            prefix = f"shardmuon.watchdog.{next(_entries)}"
            self._store = collectives.side_channel(prefix, self._silent_s)
            activity.watch_marks(True)
            self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
            self._thread.start()
            threading.Thread(target=self._guard, name="watchdog's guard", daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._thread is None:
            return
        self._stop.set()
        self._thread.join()
        activity.watch_marks(False)
        with contextlib.suppress(RuntimeError):  # the store may be gone, and nobody left to tell
            if error is not None:
                self._ask_to_end(f"{type(error).__name__}: {error}")
            self._store.set(f"{_GONE}/{self._rank}", "")
        self._over.set()

    # -- the thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        lost_since: float | None = None
        while True:
            try:
                self._look()
                lost_since = None
            except RuntimeError as error:  # the store's process may have ended before this one
                lost_since = lost_since or time.monotonic()
                if time.monotonic() - lost_since > self._silent_s:
                    self._end(f"the rendezvous store is lost: {error}")
            self._looks += 1
            if self._stop.wait(self._beat_s):
                return

    def _guard(self) -> None:
        """End the process if the store never answers: it may live in a rank that is stopped.

        Counts turns of its own, so that a pause of the whole process is no silence of the store.
        """
        looks, quiet_s = self._looks, 0.0
        while not self._over.wait(self._beat_s):
            quiet_s = quiet_s + self._beat_s if looks == self._looks else 0.0
            looks = self._looks
            if quiet_s > self._silent_s + 2 * _GRACE_S:
                self._end("the rendezvous store does not answer", tell=False)

    def _look(self) -> None:
        beat, waits = self._own_beat()
        self._store.set(str(self._rank), json.dumps(beat))
        # An error that all ranks raise reaches each of them within moments.
        if self._store.check([_END]) and not self._stop.wait(_GRACE_S):
            self._end(f"asked to by {self._store.get(_END).decode()}")
        if waits and beat.seconds > self._limit_s:
            time.sleep(min(_GRACE_S, self._beat_s * 2))
            self._end(f"waits since more than {self._limit_s:g} s:\n{self._report(beat)}")
        if self._is_silent(self._neighbour):
            name = self._neighbour
            last = _Beat(*json.loads(self._store.get(str(name))))
            self._end(f"rank {name} is dead or stopped; its last sign of life: {last}")

    def _own_beat(self) -> tuple[_Beat, bool]:
        """(what this rank does, whether it waits for others)."""
        step, current = activity.now()
        text, since, waits = current
        mark = activity.oldest_mark(older_than_s=self._limit_s)
        if mark is not None and not waits:
            text, since, waits = f"GPU before: {mark.text}", mark.since, True
        return _Beat(time.time(), step, text, time.monotonic() - since), waits

    def _is_silent(self, rank: int) -> bool:
        """It has beaten once, has not left in good order, and has not beaten for too long."""
        if rank == self._rank or not self._store.check([str(rank)]):
            return False
        beat = self._store.get(str(rank)).decode()
        if self._heard is None or self._heard[0] != beat:
            self._heard = beat, time.monotonic()
        if time.monotonic() - self._heard[1] < self._silent_s:
            return False
        return not self._store.check([f"{_GONE}/{rank}"])

    def _report(self, mine: _Beat) -> str:
        """Who waits for the same, and where the others are."""
        groups: dict[str, list[int]] = defaultdict(list)
        for rank in range(self._ranks):
            groups[self._place_of(rank, mine)].append(rank)
        lines = [
            f"  {'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}: {place}"
            for place, ranks in sorted(groups.items(), key=lambda item: item[1])
        ]
        return "\n".join(lines)

    def _place_of(self, rank: int, mine: _Beat) -> str:
        if self._store.check([f"{_GONE}/{rank}"]):
            return "has left"
        if not self._store.check([str(rank)]):
            return "never seen"
        beat = _Beat(*json.loads(self._store.get(str(rank))))
        if time.time() - beat.at > 4 * self._beat_s + _GRACE_S:
            ago = time.time() - beat.at
            return f"silent for {ago:.0f} s, last in {beat.text} of step {beat.step}"
        if (beat.step, beat.text) == (mine.step, mine.text):
            return f"{beat.text} of step {beat.step}, as this one"
        return str(beat)

    def _end(self, why: str, tell: bool = True) -> None:
        """Say why, tell the others, and end the process."""
        print(f"[rank {self._rank}] watchdog ends the job: {why}", file=sys.stderr, flush=True)
        faulthandler.dump_traceback(file=sys.__stderr__ or 2, all_threads=True)
        with contextlib.suppress(RuntimeError):  # the store may be what was lost
            if tell:
                self._ask_to_end(why)
        os._exit(EXIT_CODE)

    def _ask_to_end(self, why: str) -> None:
        """Let the other ranks' watchdogs end their processes; the first reason stays."""
        if not self._store.check([_END]):
            self._store.set(_END, f"rank {self._rank}: {(why.splitlines() or [''])[0]}")

"""What the user sees while a run goes on: a live view, plain lines, or nothing.

Owns the choice between them, and the lines. All show what they are given: they are trackers of
the run's records, and never wait for a device or another rank.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any, Literal, Protocol

from shardmuon.training.load import ConfigError
from shardmuon.training.metrics import Tracker

__all__ = ["Kind", "Lines", "Pace", "Progress", "check", "choose", "make", "validation_text"]

Setting = Literal["auto", "live", "lines", "none"]
Kind = Literal["live", "lines", "none"]


class Progress(Tracker, Protocol):
    """Shows a run, from its records and what it is told besides."""

    def advance(self, step: int) -> None:
        """`step` steps are done."""

    def say(self, step: int, text: str) -> None:
        """Something happened after `step` steps."""


def check(setting: Setting) -> None:
    """Raise ConfigError if the live view is asked for and cannot be drawn."""
    if setting == "live" and find_spec("rich") is None:
        raise ConfigError(
            "logging.progress: got 'live', which needs rich: pip install 'shardmuon[train]'"
        )


def choose(setting: Setting, first: bool) -> Kind:
    """The kind for this rank: "auto" is live on a terminal that can show it, lines elsewhere."""
    if not first:
        return "none"
    if setting == "auto":
        return "live" if find_spec("rich") is not None and _is_terminal() else "lines"
    return setting


def _is_terminal() -> bool:
    """True if a person looks at both streams, on a terminal that moves its cursor."""
    return (
        sys.stdout.isatty()
        and sys.stderr.isatty()
        and os.environ.get("TERM", "dumb") not in ("dumb", "unknown", "")
        and os.environ.get("CI", "").lower() in ("", "0", "false")
        and sys.stdout.encoding.lower().startswith("utf")
    )


def make(kind: Kind) -> Progress:
    """What shows a run in this way."""
    if kind == "live":
        from shardmuon.training.live import Live  # needs rich

        return Live()
    return Lines() if kind == "lines" else Silent()


def validation_text(loss: float, bits_per_byte: float | None) -> str:
    """A validation loss in words. loss: nats per token."""
    unit = "token" if bits_per_byte is None else "byte"
    return f"loss {loss:.4f} ({loss / math.log(2):.3f} bits per {unit})"


class Pace:
    """Time left at the mean pace so far, without the first step, which also warms up."""

    def __init__(
        self, done: int, last: int, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.done, self.last = done, last
        self._clock = clock
        self.began = clock()
        self._from: tuple[int, float] | None = None

    @property
    def elapsed_s(self) -> float:
        """Seconds since this process began to train."""
        return self._clock() - self.began

    def advance(self, step: int) -> None:
        """`step` steps are done."""
        self.done = step
        if self._from is None:
            self._from = step, self._clock()

    def eta(self) -> str:
        """Time left as m:ss or h:mm:ss; "-" before two steps are done."""
        if self.done >= self.last:
            return clock_text(0)
        if self._from is None or self.done == self._from[0]:
            return "-"
        pace = (self._clock() - self._from[1]) / (self.done - self._from[0])
        return clock_text(pace * (self.last - self.done))


def clock_text(seconds: float) -> str:
    """Seconds as m:ss, h:mm:ss or d days h:mm:ss."""
    whole = round(seconds)
    days, hours, minutes = whole // 86400, whole // 3600 % 24, whole // 60 % 60
    if whole < 3600:
        return f"{minutes}:{whole % 60:02d}"
    day = f"{days} d " if days else ""
    return f"{day}{hours}:{minutes:02d}:{whole % 60:02d}"


def last_step(config: Mapping[str, Any]) -> int:
    """The step at which a run of this configuration ends."""
    schedule = config["schedule"]
    return int(min(schedule["steps"], schedule["stop_at"] or schedule["steps"]))


class Silent:
    """Shows nothing: of other ranks, and where the user wants that."""

    def write(self, event: str, step: int, numbers: Mapping[str, Any]) -> None:
        """Show nothing."""

    def advance(self, step: int) -> None:
        """Show nothing."""

    def say(self, step: int, text: str) -> None:
        """Show nothing."""

    def close(self) -> None:
        """Show nothing."""


class Lines:
    """A plain line on stdout for each record."""

    def __init__(self) -> None:
        self._total = 0
        self._pace = Pace(0, 0)

    def write(self, event: str, step: int, numbers: Mapping[str, Any]) -> None:
        """Print the record."""
        if event == "start":
            self._total = numbers["config"]["schedule"]["steps"]
            self._pace = Pace(step, last_step(numbers["config"]))
        elif event == "evaluate":
            text = validation_text(numbers["loss"], numbers["bits_per_byte"])
            self.say(step, f"validation {text}")
        else:
            shown = {
                "loss": f"{numbers['loss']:.3f}",
                "tok/s": f"{numbers['tokens_per_s']:,.0f}",
                "lr": f"{next(iter(numbers['lr'].values())):.2e}",
                "gnorm": f"{numbers['grad_norm']:.2f}",
                "ETA": self._pace.eta(),
            }
            text = "  ".join(f"{name} {value}" for name, value in shown.items())
            print(f"step {step}/{self._total}  {text}", flush=True)

    def advance(self, step: int) -> None:
        """Count the step; nothing is printed."""
        self._pace.advance(step)

    def say(self, step: int, text: str) -> None:
        """Print the line."""
        print(f"step {step}  {text}", flush=True)

    def close(self) -> None:
        """Nothing is left to print."""

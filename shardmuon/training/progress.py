"""What the user sees while a run goes on: a live bar, plain lines, or nothing.

Owns the terminal. One rank has a visible one; the others have kind "none".
"""

from __future__ import annotations

import sys
import time
from typing import Literal, NoReturn

from tqdm import tqdm

__all__ = ["Progress", "choose"]

Kind = Literal["bar", "lines", "none"]


def choose(setting: Literal["auto", "bar", "lines", "none"], first: bool) -> Kind:
    """The kind for this rank: "auto" is a bar on a terminal and lines elsewhere."""
    if not first:
        return "none"
    if setting == "auto":
        return "bar" if sys.stderr.isatty() else "lines"
    return setting


class Progress:
    """Progress over optimizer steps, from `done` to `total`."""

    def __init__(self, kind: Kind, done: int, total: int) -> None:
        self.kind = kind
        self.total = total
        self._done = self._initial = done
        self._start = time.perf_counter()
        self._bar: tqdm[NoReturn] | None = None
        if kind == "bar":
            self._bar = tqdm(
                total=total, initial=done, unit="step", dynamic_ncols=True, smoothing=0.05
            )

    def advance(self) -> None:
        """One more step is done."""
        self._done += 1
        if self._bar is not None:
            self._bar.update()

    def show(self, numbers: dict[str, str]) -> None:
        """Show the newest numbers."""
        if self._bar is not None:
            self._bar.set_postfix(numbers)
        elif self.kind == "lines":
            text = "  ".join(f"{name} {value}" for name, value in numbers.items())
            print(f"step {self._done}/{self.total}  {text}  ETA {self.eta()}", flush=True)

    def eta(self) -> str:
        """Time left at the mean pace so far, as m:ss."""
        pace = (time.perf_counter() - self._start) / max(1, self._done - self._initial)
        seconds = round(pace * (self.total - self._done))
        return f"{seconds // 60}:{seconds % 60:02d}"

    def say(self, text: str) -> None:
        """Print a line without breaking the bar."""
        if self.kind == "bar":
            tqdm.write(text, file=sys.stderr)
        elif self.kind == "lines":
            print(text, flush=True)

    def close(self) -> None:
        """Leave the bar as it stands."""
        if self._bar is not None:
            self._bar.close()

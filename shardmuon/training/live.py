"""The live view on a terminal.

Owns the terminal while a run goes on: a thread draws twice a second what the run last said.
The cursor stays visible, so that nothing is left to restore however the process ends.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import rich.live
from rich.console import Console, RenderableType

from shardmuon.training.view import View, layout

__all__ = ["Live"]

DRAWN_HZ = 2.0  # a picture takes some 4 ms of this process


class Live:
    """Draws a run from its start on; `console` is a terminal, whatever it looks like."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(force_terminal=True)
        self._view = View()
        self._lock = threading.Lock()
        self._width = self._console.width
        self._live: rich.live.Live | None = None

    def write(self, event: str, step: int, numbers: Mapping[str, Any]) -> None:
        """Take one record; the first begins to draw."""
        with self._lock:
            self._view.write(event, step, numbers)
        if self._live is None:
            # Prints and warnings of this process go through the console, above the view.
            self._live = rich.live.Live(
                console=self._console,
                get_renderable=self._draw,
                refresh_per_second=DRAWN_HZ,
                vertical_overflow="crop",
            )
            self._live.start(refresh=True)
            self._console.show_cursor(True)

    def advance(self, step: int) -> None:
        """Count the step; the thread shows it."""
        with self._lock:
            self._view.pace.advance(step)

    def say(self, step: int, text: str) -> None:
        """Keep the line among the last ones."""
        with self._lock:
            self._view.events.append((step, text))

    def close(self) -> None:
        """Draw the last numbers, and leave them."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _draw(self) -> RenderableType:
        width, height = self._console.size
        if width < self._width:
            # The terminal has broken the old lines anew, and nobody knows where they are.
            self._console.clear()
        self._width = width
        with self._lock:
            return layout(self._view, width, height)

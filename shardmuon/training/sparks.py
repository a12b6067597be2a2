"""Numbers as rows of unicode blocks, for terminals.

Owns the binning of many numbers into few cells. Knows no colours and no terminal.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

__all__ = ["Series", "bar", "chart", "heat_row"]

_HEIGHTS = " ▁▂▃▄▅▆▇█"
_WIDTHS = " ▏▎▍▌▋▊▉█"
_IDLE = "·"
_EARLY = 0.1


class Series:
    """Numbers of a run of any length in at most `most` means of neighbours, in order."""

    def __init__(self, most: int = 512) -> None:
        self._most = most
        self._each = 1  # numbers in one mean
        self._sums: list[tuple[float, int]] = []

    def add(self, value: float) -> None:
        """Append one number; what is not finite is left out."""
        if not math.isfinite(value):
            return
        if self._sums and self._sums[-1][1] < self._each:
            total, count = self._sums[-1]
            self._sums[-1] = total + value, count + 1
        else:
            self._sums.append((value, 1))
        if len(self._sums) > self._most:
            pairs = zip(self._sums[::2], [*self._sums[1::2], (0.0, 0)], strict=False)
            self._sums = [(a + c, b + d) for (a, b), (c, d) in pairs]
            self._each *= 2

    @property
    def means(self) -> list[float]:
        """The means, the oldest first."""
        return [total / count for total, count in self._sums]


def chart(values: Sequence[float], width: int, height: int) -> tuple[list[str], float, float]:
    """(`height` rows of at most `width` cells, the number at the top, that at the bottom).

    The top is the largest value after the first tenth: the fall at the start would leave no room
    for the rest. What is higher is cut off. Fewer values than cells take one cell each.
    """
    cells = _binned(values, width)
    later = cells[int(_EARLY * len(cells)) :]
    if not cells:
        return [""] * height, math.nan, math.nan
    top, bottom = max(later), min(cells)
    spread = (top - bottom) or 1.0
    levels = [1 + round(min(1.0, (v - bottom) / spread) * (8 * height - 1)) for v in cells]
    rows = [
        "".join(_HEIGHTS[min(8, max(0, level - 8 * row))] for level in levels)
        for row in reversed(range(height))
    ]
    return rows, top, bottom


def bar(share: float, width: int) -> str:
    """A bar over `share` (0 to 1) of `width` cells, to an eighth of a cell."""
    eighths = round(min(1.0, max(0.0, share)) * width * 8)
    return "█" * (eighths // 8) + (_WIDTHS[eighths % 8] if eighths % 8 else "")


def heat_row(loads: Sequence[float], width: int) -> str:
    """One cell a rank, as high as its load against the largest; `·` has none.

    More ranks than cells share cells, each as high as its largest load.
    """
    most = max(loads, default=0)
    cells = min(width, len(loads))
    row = ""
    for cell in range(cells):
        low, high = len(loads) * cell // cells, len(loads) * (cell + 1) // cells
        load = max(loads[low:high])
        row += _HEIGHTS[max(1, round(8 * load / most))] if load > 0 else _IDLE
    return row


def _binned(values: Sequence[float], width: int) -> list[float]:
    """Means of `width` equal shares of the values, or the values themselves if they are fewer."""
    count = len(values)
    if count <= width:
        return list(values)
    bounds = [count * cell // width for cell in range(width + 1)]
    return [sum(values[low:high]) / (high - low) for low, high in itertools.pairwise(bounds)]

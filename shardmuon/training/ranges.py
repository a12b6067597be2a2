"""Allowed numbers of configuration keys, and sections that hold to them.

Owns how a range is written down, shown and checked; knows no key. Must not import torch.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Annotated, Any, get_type_hints

__all__ = [
    "Count",
    "CountOrZero",
    "Decay",
    "Fraction",
    "NotNegative",
    "Positive",
    "Range",
    "Section",
]


@dataclass(frozen=True, kw_only=True)
class Range:
    """Allowed numbers of a key: bounds are None where open, `*_open` excludes the bound itself."""

    low: float | None = None
    high: float | None = None
    low_open: bool = False
    high_open: bool = False

    def __str__(self) -> str:
        if self.low is not None and self.high is not None:
            left, right = "(["[not self.low_open], ")]"[not self.high_open]
            return f"in {left}{self.low}, {self.high}{right}"
        if self.low is not None:
            return f"{'above' if self.low_open else 'at least'} {self.low}"
        return f"{'below' if self.high_open else 'at most'} {self.high}"

    def holds(self, value: float) -> bool:
        """True if `value` is inside."""
        if not math.isfinite(value):
            return False
        if self.low is not None and (value < self.low or (self.low_open and value == self.low)):
            return False
        return not (
            self.high is not None and (value > self.high or (self.high_open and value == self.high))
        )


Count = Annotated[int, Range(low=1)]
CountOrZero = Annotated[int, Range(low=0)]
Positive = Annotated[float, Range(low=0, low_open=True)]
NotNegative = Annotated[float, Range(low=0)]
Fraction = Annotated[float, Range(low=0, high=1)]
Decay = Annotated[float, Range(low=0, high=1, high_open=True)]


def _range_of(hint: Any) -> Range | None:
    """The Range in an annotation, also inside a union such as `Positive | None`."""
    for meta in getattr(hint, "__metadata__", ()):
        if isinstance(meta, Range):
            return meta
    for part in getattr(hint, "__args__", ()):
        found = _range_of(part)
        if found is not None:
            return found
    return None


@dataclass(frozen=True, kw_only=True)
class Section:
    """Base of all sections: checks numeric ranges, however the section was made."""

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self), include_extras=True)
        for entry in dataclasses.fields(self):
            limits = _range_of(hints[entry.name])
            if limits is None:
                continue
            value = getattr(self, entry.name)
            for number in value if isinstance(value, tuple) else (value,):
                if number is not None and not limits.holds(number):
                    raise ValueError(f"{entry.name}: got {number!r}, expected a number {limits}")
        self.check()

    def check(self) -> None:
        """Rules between keys; raises ValueError whose text starts with `key: `."""

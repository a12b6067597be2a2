"""Which values a setting may take: ranges and choices, each written once.

Owns those that parameter groups, `Runtime` and the YAML configuration share, whether a value fits
an annotation such as `Decay | None`, and the words for what is allowed and for the nearest valid
name. Knows no group and no section. Torch-free.
"""

from __future__ import annotations

import difflib
import math
import types
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

__all__ = [
    "AdjustLr",
    "Bytes",
    "Count",
    "CountOrZero",
    "Decay",
    "Finite",
    "Fraction",
    "Method",
    "NormFloor",
    "NotNegative",
    "NsDtype",
    "NsSteps",
    "Positive",
    "Preset",
    "Range",
    "Seconds",
    "advice",
    "choices",
    "describe",
    "fits",
    "nearest",
    "range_of",
    "show",
]

_SHOWN = 120


@dataclass(frozen=True, kw_only=True)
class Range:
    """Allowed numbers: bounds are None where open, `*_open` excludes the bound itself.

    whole: of integers. A bool, nan and inf are never allowed.
    """

    low: float | None = None
    high: float | None = None
    low_open: bool = False
    high_open: bool = False
    whole: bool = False

    def __str__(self) -> str:
        low, high = (f"{n:g}" if isinstance(n, float) else str(n) for n in (self.low, self.high))
        if self.low is not None and self.high is not None:
            left, right = "(["[not self.low_open], ")]"[not self.high_open]
            return f"in {left}{low}, {high}{right}"
        if self.low is not None:
            return f"{'above' if self.low_open else 'at least'} {low}"
        return f"{'below' if self.high_open else 'at most'} {high}"

    def describe(self) -> str:
        """With the kind of number."""
        return f"a whole number {self}" if self.whole else f"a number {self}"

    def holds(self, value: object) -> bool:
        """True if `value` is such a number."""
        if isinstance(value, bool) or not isinstance(value, int if self.whole else int | float):
            return False
        if isinstance(value, float) and not math.isfinite(value):
            return False
        if self.low is not None and (value < self.low or (self.low_open and value == self.low)):
            return False
        return not (
            self.high is not None and (value > self.high or (self.high_open and value == self.high))
        )


# float32 ends at 3e38, and torch refuses a factor beyond it in the middle of a step. This leaves
# room for products with the scale of a matrix.
_MOST = 1e30
_MOST_COUNT = 2**31 - 1
# A number of seconds also has to fit where torch counts nanoseconds in 64 bits.
_MOST_SECONDS = 1e9

Count = Annotated[int, Range(low=1, high=_MOST_COUNT, whole=True)]
CountOrZero = Annotated[int, Range(low=0, high=_MOST_COUNT, whole=True)]
Bytes = Annotated[int, Range(low=1, high=2**63 - 1, whole=True)]
Finite = Annotated[float, Range(low=-_MOST, high=_MOST)]
Positive = Annotated[float, Range(low=0, high=_MOST, low_open=True)]
NotNegative = Annotated[float, Range(low=0, high=_MOST)]
Seconds = Annotated[float, Range(low=0, high=_MOST_SECONDS, low_open=True)]
Fraction = Annotated[float, Range(low=0, high=1)]
Decay = Annotated[float, Range(low=0, high=1, high_open=True)]

# Settings of Newton-Schulz.
NsSteps = Annotated[int, Range(low=1, high=99, whole=True)]
# A zero matrix divided by a zero norm is nan, and float32 reads anything below 1e-45 as zero.
NormFloor = Annotated[float, Range(low=1e-30, high=_MOST)]
Preset = Literal["keller", "polar_express", "you", "cubic"]
Method = Literal["auto", "standard", "symmetric", "gram"]
AdjustLr = Literal["original", "match_rms_adamw", "spectral"]
NsDtype = Literal["float32", "bfloat16"]


def range_of(hint: Any) -> Range:
    """The range in an annotation such as `Decay`."""
    return next(part for part in get_args(hint) if isinstance(part, Range))


def choices(hint: Any) -> tuple[str, ...]:
    """All names that an annotation allows."""
    if get_origin(hint) in (Union, types.UnionType):
        return tuple(name for part in get_args(hint) for name in choices(part))
    return get_args(hint) if get_origin(hint) is Literal else ()


def fits(hint: Any, value: object) -> bool:
    """Whether `value` is what the annotation says; a whole number is a number."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return range_of(hint).holds(value)
    if origin in (Union, types.UnionType):
        return any(fits(part, value) for part in parts)
    if origin is Literal:
        return isinstance(value, str) and value in parts
    if origin is tuple:
        if not isinstance(value, tuple):
            return False
        each = (parts[0],) * len(value) if parts[-1] is Ellipsis else parts
        return len(each) == len(value) and all(map(fits, each, value))
    if hint in (int, float):
        return Range(whole=hint is int).holds(value)
    return isinstance(value, hint)


def describe(hint: Any) -> str:
    """What the annotation allows, in words."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return range_of(hint).describe()
    if origin in (Union, types.UnionType):
        return " or ".join(map(describe, parts))
    if origin is Literal:
        return f"one of {', '.join(parts)}"
    if origin is tuple:
        count = "values" if parts[-1] is Ellipsis else f"{len(parts)} values"
        return f"a tuple of {count}, each {describe(parts[0])}"
    names = {int: "a whole number", float: "a number", bool: "a bool", str: "text"}
    return "None" if hint is type(None) else names.get(hint, f"a {hint.__name__}")


def nearest(name: object, valid: Iterable[str]) -> str | None:
    """The valid name that is most like `name`, None if none is."""
    found = {each.lower(): each for each in valid}
    if not isinstance(name, str):
        return None
    near = difflib.get_close_matches(name[:_SHOWN].lower().replace("-", "_"), found, n=1)
    return found[near[0]] if near else None


def advice(name: object, valid: Iterable[str]) -> str:
    """`; did you mean 'x'?` with the nearest valid name, or nothing."""
    near = nearest(name, valid)
    return "" if near is None or near == name else f"; did you mean {near!r}?"


def show(value: object) -> str:
    """`repr` of a value that may be anything, on one line and not too long."""
    try:
        text = " ".join(repr(value).split())
    except Exception:  # integers of thousands of digits, and classes of others
        return f"a {type(value).__name__}"
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."

"""One key of a parameter group: its default, and which values it takes.

Owns how values are checked and described, in ready-made checks that rules declare their keys with:
`number`, `name`, `dtype`, `count`, `flag` and so on. The ranges are those of `limits`. Looks at
values only, and says nothing of what a key means.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardmuon import limits
from shardmuon.limits import Range, choices, range_of

__all__ = [
    "FLAG",
    "FLOATS",
    "Check",
    "Key",
    "Keys",
    "block",
    "coefficients",
    "count",
    "dtype",
    "name",
    "number",
    "or_none",
    "pair",
    "sizes",
]

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""Of parameters and momentum; torch does not compute with narrower ones."""


class Check(NamedTuple):
    """allowed: values in words. is_valid(value, wait): wait is that of `groups.check_settings`.

    names: text among the allowed values, for advice on misspelt ones.
    """

    allowed: str
    is_valid: Callable[[Any, bool], bool]
    names: Sequence[str] = ()


class Key(NamedTuple):
    """A key of a group."""

    default: Any
    check: Check


Keys = Mapping[str, Key]
"""The keys of one algorithm, by name."""


def number(hint: Any) -> Check:
    """A number, or a one-element tensor, in a range of `limits`."""
    bounds = range_of(hint)
    return Check(bounds.describe(), functools.partial(_in_range, bounds))


def pair(hint: Any) -> Check:
    """Two numbers in a range of `limits`."""
    bounds = range_of(hint)
    allowed = f"two numbers, each {bounds.describe()}"
    return Check(allowed, functools.partial(_numbers, bounds, 2))


def count(hint: Any) -> Check:
    """A whole number in a range of `limits`; never a tensor."""
    bounds = range_of(hint)
    return Check(bounds.describe(), lambda value, wait: bounds.holds(value))


def name(hint: Any) -> Check:
    """One of the names that a `Literal` of `limits` lists."""
    names = choices(hint)
    return Check(
        f"one of {names}", lambda value, wait: isinstance(value, str) and value in names, names
    )


def dtype(dtypes: Sequence[torch.dtype]) -> Check:
    """One of `dtypes`."""
    return Check(
        f"one of {', '.join(map(str, dtypes))}",
        lambda value, wait: isinstance(value, torch.dtype) and value in dtypes,
    )


def or_none(check: Check) -> Check:
    """None, or what `check` takes."""
    return Check(
        f"None or {check.allowed}",
        lambda value, wait: value is None or check.is_valid(value, wait),
        check.names,
    )


FLAG = Check("a bool", lambda value, wait: isinstance(value, bool))


def sizes() -> Check:
    """A list of whole numbers above 0."""
    bounds = range_of(limits.Count)

    def holds(value: Any, wait: bool) -> bool:
        listed = isinstance(value, (tuple, list)) and len(value) > 0
        return listed and all(map(bounds.holds, value))

    return Check("a list of whole numbers above 0", holds)


def block() -> Check:
    """(rows, cols), whole numbers above 0; one of them may be None, for all."""
    bounds = range_of(limits.Count)

    def holds(value: Any, wait: bool) -> bool:
        if not isinstance(value, (tuple, list)) or len(value) != 2:
            return False
        given = [each for each in value if each is not None]
        return len(given) > 0 and all(map(bounds.holds, given))

    return Check("(rows, cols) of whole numbers above 0, where one may be None for all", holds)


def coefficients() -> Check:
    """(a, b, c), a list of such, or the name of a preset."""
    bounds, presets = range_of(limits.Finite), choices(limits.Preset)

    def holds(value: Any, wait: bool) -> bool:
        if isinstance(value, str):
            return value in presets
        triple = functools.partial(_numbers, bounds, 3, wait=wait)
        if not isinstance(value, (tuple, list)):
            return False
        return triple(value) or (len(value) > 0 and all(map(triple, value)))

    allowed = f"three numbers (a, b, c) {bounds}, a list of such, or one of {presets}"
    return Check(allowed, holds, presets)


def _in_range(bounds: Range, value: Any, wait: bool) -> bool:
    """Whether a number, or a one-element tensor of a real number, is within `bounds`."""
    if type(value) in (Tensor, nn.Parameter):
        if value.numel() != 1 or value.is_meta or value.is_complex() or value.dtype == torch.bool:
            return False
        if not wait and not value.is_cpu:
            return True
        value = value.item()
    return bounds.holds(value)


def _numbers(bounds: Range, length: int, value: Any, wait: bool) -> bool:
    """Whether `value` lists `length` such numbers."""
    return (
        isinstance(value, (tuple, list))
        and len(value) == length
        and all(_in_range(bounds, each, wait) for each in value)
    )

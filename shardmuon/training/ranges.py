"""Sections of the configuration that hold to their annotations, however they were made.

Owns the check; the ranges are those of `shardmuon.limits`. Knows no key. Must not import torch.
"""

from __future__ import annotations

import functools
import types
from dataclasses import dataclass
from typing import Any, Union, get_args, get_origin, get_type_hints

from shardmuon.limits import advice, choices, describe, fits, show

__all__ = ["Section"]


@dataclass(frozen=True, kw_only=True)
class Section:
    """Base of all sections: checks types, ranges and choices, then the rules between keys."""

    def __post_init__(self) -> None:
        kind: Any = type(self)
        for name, hint in _hints(kind).items():
            value = getattr(self, name)
            if fits(hint, value):
                continue
            item = _misfit(hint, value)
            raise ValueError(
                f"{name.removesuffix('_')}: got {show(item)}, expected {describe(hint)}"
                f"{advice(item, choices(hint))}"
            )
        self.check()

    def check(self) -> None:
        """Rules between keys; raises ValueError whose text starts with `key: `."""


@functools.cache
def _hints(section: Any) -> dict[str, Any]:
    return get_type_hints(section, include_extras=True)


def _misfit(hint: Any, value: object) -> object:
    """Of a list of values the first that does not fit by itself; else the value."""
    parts = get_args(hint)
    if get_origin(hint) in (Union, types.UnionType):
        return next((item for part in parts if (item := _misfit(part, value)) is not value), value)
    if get_origin(hint) is tuple and isinstance(value, tuple):
        return next((each for each in value if not fits(parts[0], each)), value)
    return value

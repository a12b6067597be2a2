"""Values on the command line that several commands take.

Owns how their text is read and what is said where it cannot be.
"""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections.abc import Callable

__all__ = ["count", "counts", "names_among"]


def count(text: str) -> int:
    """A number of at least 1."""
    value = int(text)
    if value < 1:
        raise ArgumentTypeError(f"must be at least 1, got {text}")
    return value


def counts(text: str) -> tuple[int, ...]:
    """Several numbers, as in 2,4,8."""
    return tuple(count(part) for part in text.split(","))


def names_among(*known: str) -> Callable[[str], tuple[str, ...]]:
    """Reads several names, as in adamw,shardmuon."""

    def names(text: str) -> tuple[str, ...]:
        found = tuple(text.split(","))
        for name in found:
            if name not in known:
                raise ArgumentTypeError(f"got {name!r}, expected names among {', '.join(known)}")
        return found

    return names

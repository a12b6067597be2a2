"""The form of a checkpoint's manifest: what must be in it before anything is believed.

Owns the checks of what `Checkpointer` writes beside tensors. Files, sizes and checksums are those
of `publish`; whether groups fit an optimizer is for `settings` to say. Torch-free.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from shardmuon.checkpoint import publish
from shardmuon.checkpoint.publish import CheckpointError
from shardmuon.limits import Range, show

__all__ = ["read"]

_STEP = Range(low=0, high=2**53, whole=True)  # what JSON readers agree on
_RANKS = Range(low=1, high=2**31 - 1, whole=True)


def read(path: Path) -> dict[str, Any]:
    """As `publish.read_manifest`, its parts of the right form. Raises CheckpointError."""
    manifest = publish.read_manifest(path)
    for key, (expected, holds) in _PARTS.items():
        part = manifest.get(key)
        if not holds(part):
            raise CheckpointError(
                f"{path / publish.MANIFEST} has {key}={show(part)}, expected {expected}"
            )
    return manifest


def _table(value: object, holds: Callable[[Any], bool]) -> bool:
    """Whether it is a dict, whose keys are always text in JSON, of such values."""
    return isinstance(value, dict) and all(map(holds, value.values()))


def _texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _group(value: object) -> bool:
    return (
        isinstance(value, dict)
        and _texts(value.get("params"))
        and isinstance(value.get("settings"), dict)
    )


Part = tuple[str, Callable[[Any], bool]]

_PARTS: dict[str, Part] = {
    "step": (_STEP.describe(), _STEP.holds),
    "world_size": (_RANKS.describe(), _RANKS.holds),
    "groups": (
        "a list of groups with params and settings",
        lambda value: isinstance(value, list) and all(map(_group, value)),
    ),
    "aliases": ("names by name", lambda value: _table(value, _is_text)),
    "random": (
        "states by kind by rank",
        lambda value: _table(value, lambda states: _table(states, _is_text)),
    ),
}

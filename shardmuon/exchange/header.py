"""The header: one small all-reduce that opens a step and makes the ranks of a mesh agree.

Owns what ranks agree on (the plan, which parameters have a gradient, whether all gradients are
finite) and its wire form: a uint8 vector of fixed length under MAX, so that ranks with different
plans still meet in the same collective. A value and its complement travel together: their maxima
add up to 255 only if all ranks sent the same value.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from shardmuon.exchange import collectives

__all__ = [
    "ERROR",
    "GOOD",
    "HEADER_BYTES",
    "SKIP",
    "SLOTS",
    "Presence",
    "Statement",
    "Verdict",
    "exchange_header",
    "is_crowded",
    "note_severity",
    "read_header",
    "read_word",
    "severity_of",
    "spread_severity",
]

SLOTS = 4096
"""Parameters told apart; from there on, parameter i shares the slot of parameter i - SLOTS."""

GOOD, SKIP, ERROR = 0, 1, 2
"""Severity of what was found: the step is taken, skipped by rule, or an error."""

DIGEST_BYTES = 32
_NONFINITE = 2 * DIGEST_BYTES
_FAULT = _NONFINITE + 1
_ELSEWHERE = _FAULT + 1
_CROWDED = _ELSEWHERE + 1
_STALE = _CROWDED + 1
_MISSING = slice(_STALE + 1, _STALE + 1 + SLOTS)
_PRESENT = slice(_MISSING.stop, _MISSING.stop + SLOTS)
HEADER_BYTES = _PRESENT.stop


class Presence(NamedTuple):
    """One parameter's gradient on this rank. An empty local shard has nothing to say."""

    fqn: str
    missing: bool
    empty: bool


@dataclass(frozen=True)
class Statement:
    """What this rank has to say before a step.

    digest: hex SHA-256 of its plan. nonfinite: bool [], None if nothing was found or looked for.
    fault: it cannot take the step and comes to say so, since staying away would hang the others.
    elsewhere: severity [] uint8 of what it heard on other meshes. crowded: it is in several meshes.
    stale: bool [], gradients changed after they were used; None if none was.
    """

    digest: str
    presence: Sequence[Presence] = ()
    nonfinite: Tensor | None = None
    fault: bool = False
    elsewhere: Tensor | None = None
    crowded: bool = False
    stale: Tensor | None = None


@dataclass(frozen=True)
class Verdict:
    """What the ranks of a mesh agreed on, read on the host.

    fault: some rank cannot take the step. stale: gradients of some rank changed. missing: indices
    of parameters that have no gradient on any rank. conflict: FQNs with a gradient on some ranks
    only. severity: the worst that this or any other mesh has found.
    """

    same_plan: bool
    fault: bool
    stale: bool
    finite: bool
    conflict: tuple[str, ...]
    missing: frozenset[int]
    severity: int


def exchange_header(
    statement: Statement,
    device: torch.device,
    groups: Sequence[collectives.Group],
    timeout_s: float | None,
) -> Tensor:
    """Agree along the mesh's axes, whose process groups are `groups`; uint8 [HEADER_BYTES]."""
    plan = bytes.fromhex(statement.digest)
    mine = bytearray(HEADER_BYTES)
    mine[:DIGEST_BYTES] = plan
    mine[DIGEST_BYTES:_NONFINITE] = bytes(255 - byte for byte in plan)
    mine[_FAULT] = statement.fault
    mine[_CROWDED] = statement.crowded
    mine[_MISSING.start :] = _slots(tuple(statement.presence))
    header = torch.frombuffer(mine, dtype=torch.uint8)
    if device.type == "cuda":  # a copy from pageable memory would wait for the device
        header = header.pin_memory().to(device, non_blocking=True)
    if statement.nonfinite is not None:
        header[_NONFINITE] = statement.nonfinite
    if statement.stale is not None:
        header[_STALE] = statement.stale
    if statement.elsewhere is not None:
        header[_ELSEWHERE] = statement.elsewhere
    for group in groups:
        collectives.all_reduce_max_(header, group, timeout_s)
    return header


@functools.lru_cache(maxsize=64)
def _slots(presence: tuple[Presence, ...]) -> bytes:
    """The header's last bytes: who is missing, and who is present."""
    missing, present = bytearray(SLOTS), bytearray(SLOTS)
    for index, parameter in enumerate(presence):
        if not parameter.empty:
            (missing if parameter.missing else present)[index % SLOTS] = 1
    return bytes(missing + present)


def severity_of(header: Tensor, nonfinite: int) -> Tensor:
    """uint8 []: the worst that is known of the step, computed where `header` lies.

    nonfinite: severity of a non-finite gradient, which is the user's choice.
    """
    plan = header[:DIGEST_BYTES] + header[DIGEST_BYTES:_NONFINITE] == 255
    conflict = header[_MISSING].bool() & header[_PRESENT].bool()
    bad = ~plan.all() | conflict.any() | header[_FAULT].bool() | header[_STALE].bool()
    found = torch.maximum(bad * ERROR, header[_NONFINITE].bool() * nonfinite)
    return torch.maximum(found.to(torch.uint8), header[_ELSEWHERE])


def spread_severity(
    severity: Tensor,
    device: torch.device,
    groups: Sequence[collectives.Group],
    timeout_s: float | None,
) -> Tensor:
    """Maximum of `severity` over the ranks of a mesh, on its device."""
    severity = severity.to(device, copy=True)
    for group in groups:
        collectives.all_reduce_max_(severity, group, timeout_s)
    return severity


def note_severity(header: Tensor, severity: Tensor) -> None:
    """Write what all meshes together have found into an agreed header, for `read_header`."""
    header[_ELSEWHERE] = severity


def read_word(header: Tensor) -> Tensor:
    """bool []: the step is taken, after `note_severity`; without a look from the host."""
    return header[_ELSEWHERE] == GOOD


def is_crowded(header: Tensor) -> bool:
    """Some rank of the mesh is in other meshes too. Waits for the header's device."""
    return bool(header[_CROWDED])


def read_header(header: Tensor, presence: Sequence[Presence]) -> Verdict:
    """Verdict from an agreed header in host memory; the same on all ranks of the mesh."""
    plan = header[:DIGEST_BYTES] + header[DIGEST_BYTES:_NONFINITE] == 255
    missing, present = header[_MISSING].bool(), header[_PRESENT].bool()
    conflict = missing & present
    names: tuple[str, ...] = ()
    if bool(conflict.any()):
        names = tuple(p.fqn for i, p in enumerate(presence) if conflict[i % SLOTS])
    absent = frozenset[int]()
    if bool(missing.any()):
        slots = (missing & ~present).tolist()
        absent = frozenset(i for i in range(len(presence)) if slots[i % SLOTS])
    return Verdict(
        same_plan=bool(plan.all()),
        fault=bool(header[_FAULT]),
        stale=bool(header[_STALE]),
        finite=not bool(header[_NONFINITE]),
        conflict=names,
        missing=absent,
        severity=int(header[_ELSEWHERE]),
    )

"""The header: one small all-reduce that opens a step and makes the ranks of a mesh agree.

Owns what ranks agree on (the plan, which parameters have a gradient, whether all gradients are
finite) and its wire form: a uint8 vector of fixed length under MAX, so that ranks with different
plans still meet in the same collective. A value and its complement travel together: their maxima
add up to 255 only if all ranks sent the same value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardmuon.exchange import collectives

__all__ = [
    "HEADER_BYTES",
    "SLOTS",
    "Presence",
    "Statement",
    "Verdict",
    "accepted",
    "exchange_header",
    "read_header",
]

SLOTS = 4096
"""Parameters told apart; from there on, parameter i shares the slot of parameter i - SLOTS."""

DIGEST_BYTES = 32
_NONFINITE = 2 * DIGEST_BYTES
_FAULT = _NONFINITE + 1
_MISSING = slice(_FAULT + 1, _FAULT + 1 + SLOTS)
_PRESENT = slice(_MISSING.stop, _MISSING.stop + SLOTS)
HEADER_BYTES = _PRESENT.stop


@dataclass(frozen=True)
class Presence:
    """One parameter's gradient on this rank. An empty local shard has nothing to say."""

    fqn: str
    missing: bool
    empty: bool


@dataclass(frozen=True)
class Statement:
    """What this rank has to say before a step.

    digest: hex SHA-256 of its plan. nonfinite: bool [], None if nothing was found or looked for.
    fault: it cannot take the step and comes to say so, since staying away would hang the others.
    """

    digest: str
    presence: Sequence[Presence] = ()
    nonfinite: Tensor | None = None
    fault: bool = False


@dataclass(frozen=True)
class Verdict:
    """What the ranks of a mesh agreed on, read on the host.

    fault: some rank cannot take the step. missing: indices of parameters that have no gradient
    on any rank. conflict: FQNs with a gradient on some ranks only.
    """

    same_plan: bool
    fault: bool
    finite: bool
    conflict: tuple[str, ...]
    missing: frozenset[int]


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
    for index, parameter in enumerate(statement.presence):
        if not parameter.empty:
            start = _MISSING.start if parameter.missing else _PRESENT.start
            mine[start + index % SLOTS] = 1
    header = torch.frombuffer(mine, dtype=torch.uint8)
    if device.type == "cuda":  # a copy from pageable memory would wait for the device
        header = header.pin_memory().to(device, non_blocking=True)
    if statement.nonfinite is not None:
        header[_NONFINITE] = statement.nonfinite
    for group in groups:
        collectives.all_reduce_max_(header, group, timeout_s)
    return header


def accepted(header: Tensor, refuse_nonfinite: bool) -> Tensor:
    """bool []: the step is taken. Computed where `header` lies, without a look from the host."""
    plan = header[:DIGEST_BYTES] + header[DIGEST_BYTES:_NONFINITE] == 255
    conflict = header[_MISSING].bool() & header[_PRESENT].bool()
    good = plan.all() & ~conflict.any() & (header[_FAULT] == 0)
    return good & (header[_NONFINITE] == 0) if refuse_nonfinite else good


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
        finite=not bool(header[_NONFINITE]),
        conflict=names,
        missing=absent,
    )

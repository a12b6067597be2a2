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
    "Verdict",
    "accepted",
    "exchange_header",
    "read_header",
]

SLOTS = 4096
"""Parameters told apart; from there on, parameter i shares the slot of parameter i - SLOTS."""

DIGEST_BYTES = 32
HEADER_BYTES = 2 * DIGEST_BYTES + 1 + 2 * SLOTS
_FINITE = 2 * DIGEST_BYTES
_MISSING = slice(_FINITE + 1, _FINITE + 1 + SLOTS)
_PRESENT = slice(_FINITE + 1 + SLOTS, HEADER_BYTES)


@dataclass(frozen=True)
class Presence:
    """One parameter's gradient on this rank. An empty local shard has nothing to say."""

    fqn: str
    missing: bool
    empty: bool


@dataclass(frozen=True)
class Verdict:
    """What the ranks of a mesh agreed on, read on the host.

    missing: indices of parameters that have no gradient on any rank. conflict: FQNs with a
    gradient on some ranks only.
    """

    same_plan: bool
    finite: bool
    conflict: tuple[str, ...]
    missing: frozenset[int]


def exchange_header(
    digest: str,
    presence: Sequence[Presence],
    device: torch.device,
    groups: Sequence[collectives.Group],
    nonfinite: Tensor | None = None,
    timeout_s: float | None = None,
) -> Tensor:
    """Agree along the mesh's axes, whose process groups are `groups`; uint8 [HEADER_BYTES].

    digest: hex SHA-256. nonfinite: bool [], or None if nothing was found or looked for.
    """
    plan = bytes.fromhex(digest)
    mine = bytearray(HEADER_BYTES)
    mine[:DIGEST_BYTES] = plan
    mine[DIGEST_BYTES:_FINITE] = bytes(255 - byte for byte in plan)
    for index, parameter in enumerate(presence):
        if not parameter.empty:
            start = _MISSING.start if parameter.missing else _PRESENT.start
            mine[start + index % SLOTS] = 1
    header = torch.frombuffer(mine, dtype=torch.uint8)
    if device.type == "cuda":  # a copy from pageable memory would wait for the device
        header = header.pin_memory().to(device, non_blocking=True)
    if nonfinite is not None:
        header[_FINITE] = nonfinite
    for group in groups:
        collectives.all_reduce_max_(header, group, timeout_s)
    return header


def accepted(header: Tensor, refuse_nonfinite: bool) -> Tensor:
    """bool []: the step is taken. Computed where `header` lies, without a look from the host."""
    plan = header[:DIGEST_BYTES] + header[DIGEST_BYTES:_FINITE] == 255
    conflict = (header[_MISSING] & header[_PRESENT]).any()
    good = plan.all() & ~conflict
    return good & (header[_FINITE] == 0) if refuse_nonfinite else good


def read_header(header: Tensor, presence: Sequence[Presence]) -> Verdict:
    """Verdict from an agreed header in host memory; the same on all ranks of the mesh."""
    plan = header[:DIGEST_BYTES] + header[DIGEST_BYTES:_FINITE] == 255
    missing, present = header[_MISSING].bool(), header[_PRESENT].bool()
    conflict = missing & present
    names: tuple[str, ...] = ()
    if bool(conflict.any()):
        names = tuple(p.fqn for i, p in enumerate(presence) if conflict[i % SLOTS])
    absent = frozenset[int]()
    if bool(missing.any()):
        slots = (missing & ~present).tolist()
        absent = frozenset(i for i in range(len(presence)) if slots[i % SLOTS])
    return Verdict(bool(plan.all()), not bool(header[_FINITE]), names, absent)

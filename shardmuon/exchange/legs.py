"""One exchange in flight along one mesh axis: flat buffers in, parcels out.

Owns packing parcels into wire buffers and finding them again. Which parcels, and in which order,
comes from planning's `Hop` and `Share`; both sides derive the same order, so no index travels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from shardmuon.exchange import collectives
from shardmuon.planning.routes import Hop, Key, PackingList, Share, packing_list

__all__ = [
    "Cargo",
    "Leg",
    "copy_all",
    "pack",
    "rows_from_wire",
    "rows_to_wire",
    "start_hop",
    "start_share",
    "unpack",
    "views_of",
]

Cargo = dict[Key, Tensor]
"""Flat wire tensors by (index of the matrix in its bucket, origin)."""


class Leg:
    """An exchange that has been started; `finish` waits for it and returns what arrived."""

    def __init__(self, work: collectives.Work, unpack: Callable[[], Cargo]) -> None:
        self._work = work
        self._unpack = unpack

    def finish(self, timeout_s: float | None) -> Cargo:
        self._work.wait(timeout_s)
        return self._unpack()


def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each of `sources` into its target: one launch for all that are contiguous."""
    if targets:
        torch._foreach_copy_(list(targets), list(sources))


def pack(packing: PackingList, cargo: Cargo, buffer: Tensor) -> None:
    """Copy what `packing` lists one after the other to the front of 1-D `buffer`."""
    copy_all(views_of(packing, buffer), [cargo[key] for key in packing.keys])


def views_of(packing: PackingList, buffer: Tensor) -> Sequence[Tensor]:
    """The parts of 1-D `buffer` in which the listed parcels lie, from its front on."""
    return buffer[: packing.elements].split_with_sizes(packing.sizes)


def unpack(packing: PackingList, buffer: Tensor) -> Cargo:
    """What `packing` lists at the front of 1-D `buffer`, as views of it."""
    return dict(zip(packing.keys, views_of(packing, buffer), strict=True))


def start_hop(hop: Hop, buffer: Tensor, group: collectives.Group) -> Leg:
    """Send `buffer`, the parcels of `hop.outgoing` in order, along the hop's axis.

    With `hop.table` the exchange is an all-gather and `buffer` has length `hop.padded`.
    """
    if not hop.table:
        received, work = collectives.all_to_all(buffer, hop.send_sizes, hop.receive_sizes, group)
        return Leg(work, lambda: unpack(hop.received, received))
    gathered, work = collectives.all_gather(buffer, group)

    def mine() -> Cargo:
        cargo: Cargo = {}
        for row, received in zip(hop.table, gathered, strict=True):
            before = sum(map(hop.size, row[: hop.index]))
            cargo |= unpack(packing_list(row[hop.index], back=hop.back), received[before:])
        return cargo

    return Leg(work, mine)


def start_share(share: Share, buffer: Tensor, group: collectives.Group) -> Leg:
    """All-gather `buffer`, this rank's part padded to `share.padded`, along a replicated axis."""
    gathered, work = collectives.all_gather(buffer, group)

    def everyones() -> Cargo:
        result: Cargo = {}
        for packing, received in zip(share.lists, gathered, strict=True):
            result |= unpack(packing, received)
        return result

    return Leg(work, everyones)


def rows_to_wire(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """float32 [rows] as wire elements [rows * 4 / itemsize], bits kept."""
    return numbers.contiguous().view(dtype)


def rows_from_wire(elements: Tensor) -> Tensor:
    """Inverse of `rows_to_wire`; copies, since a slice may not be aligned for float32."""
    return elements.clone().view(torch.float32)

"""One exchange in flight along one mesh axis: flat buffers in, parcels out.

Owns packing parcels into wire buffers and finding them again. Which parcels, and in which order,
comes from planning's `Hop` and `Share`; both sides derive the same order, so no index travels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from shardmuon.exchange import collectives
from shardmuon.planning.layout import Coordinate
from shardmuon.planning.routes import Hop, Parcel, Parcels, Share

__all__ = [
    "Cargo",
    "Leg",
    "copy_all",
    "pack",
    "row_stats_from_wire",
    "row_stats_to_wire",
    "start_hop",
    "start_share",
]

Cargo = dict[tuple[int, Coordinate], Tensor]
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


def pack(parcels: Iterable[Parcel], cargo: Cargo, buffer: Tensor) -> None:
    """Copy `parcels` one after the other to the front of 1-D `buffer`."""
    pieces = [cargo[parcel.matrix, parcel.origin] for parcel in parcels]
    sizes = [piece.numel() for piece in pieces]
    copy_all(buffer[: sum(sizes)].split_with_sizes(sizes), pieces)


def start_hop(hop: Hop, buffer: Tensor, group: collectives.Group) -> Leg:
    """Send `buffer`, the parcels of `hop.outgoing` in order, along the hop's axis.

    With `hop.table` the exchange is an all-gather and `buffer` has length `hop.padded`.
    """
    if not hop.table:
        sends, receives = ([hop.size(p) for p in side] for side in (hop.outgoing, hop.incoming))
        received, work = collectives.all_to_all(buffer, sends, receives, group)
        return Leg(work, lambda: dict(_unpack(hop.incoming, received, hop.back)))
    gathered, work = collectives.all_gather(buffer, group)

    def mine() -> Cargo:
        cargo: Cargo = {}
        for row, received in zip(hop.table, gathered, strict=True):
            before = sum(map(hop.size, row[: hop.index]))
            cargo.update(_unpack([row[hop.index]], received[before:], hop.back))
        return cargo

    return Leg(work, mine)


def start_share(share: Share, buffer: Tensor, group: collectives.Group) -> Leg:
    """All-gather `buffer`, this rank's part padded to `share.padded`, along a replicated axis."""
    gathered, work = collectives.all_gather(buffer, group)

    def everyones() -> Cargo:
        result: Cargo = {}
        for parcels, received in zip(share.parts, gathered, strict=True):
            result.update(_unpack([parcels], received, back=True))
        return result

    return Leg(work, everyones)


def _unpack(
    sides: Iterable[Parcels], received: Tensor, back: bool
) -> Iterator[tuple[tuple[int, Coordinate], Tensor]]:
    """Views of `received`, parcel by parcel."""
    parcels = [parcel for side in sides for parcel in side]
    sizes = [p.scatter_elements if back else p.gather_elements for p in parcels]
    views = received[: sum(sizes)].split_with_sizes(sizes)
    for parcel, view in zip(parcels, views, strict=True):
        yield (parcel.matrix, parcel.origin), view


def row_stats_to_wire(row_stats: Tensor, dtype: torch.dtype) -> Tensor:
    """float32 [rows] as wire elements [rows * 4 / itemsize], bits kept."""
    return row_stats.contiguous().view(dtype)


def row_stats_from_wire(elements: Tensor) -> Tensor:
    """Inverse of `row_stats_to_wire`; copies, since a slice may not be aligned for float32."""
    return elements.clone().view(torch.float32)

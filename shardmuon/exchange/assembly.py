"""Whole matrices from the parcels that an owner receives, and parcels from their updates.

Owns which owned matrices are orthogonalized together and where in a whole matrix each parcel lies.
Moves data on one rank only.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from shardmuon.exchange.legs import Cargo, copy_all, rows_from_wire, rows_to_wire
from shardmuon.planning.layout import Block
from shardmuon.planning.matrix import Matrix
from shardmuon.planning.routes import PackingList, Parcel, Route

__all__ = ["Batch", "assemble", "batches_of", "row_states_of", "take_apart"]


@dataclass(frozen=True)
class Batch:
    """Owned matrices of one kind, orthogonalized together.

    indices: in the bucket. matrix: one of them. parcels: of each, from all origins.
    """

    indices: tuple[int, ...]
    matrix: Matrix
    parcels: tuple[tuple[Parcel, ...], ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """[rows, cols], or [n, rows, cols] for several."""
        count = (len(self.indices),) if len(self.indices) > 1 else ()
        return (*count, self.matrix.rows, self.matrix.cols)

    @cached_property
    def rows(self) -> PackingList | None:
        """Parcels in the order in which they lie in memory, if all are whole rows."""
        ordered = [p for of in self.parcels for p in sorted(of, key=lambda p: p.block.row_start)]
        if any(p.block.numel and p.block.cols != self.matrix.cols for p in ordered):
            return None
        keys = tuple((parcel.matrix, parcel.origin) for parcel in ordered)
        return PackingList(keys, tuple(parcel.block.numel for parcel in ordered))


def batches_of(matrices: Sequence[Matrix], route: Route, together: bool) -> tuple[Batch, ...]:
    """The matrices that are owned here; together: equal ones in one batch."""
    alike: dict[object, list[int]] = defaultdict(list)
    owned: Mapping[int, tuple[Parcel, ...]] = dict(route.owned)
    for index in owned:
        matrix = matrices[index]
        kind = (matrix.rows, matrix.cols, matrix.settings, matrix.method)
        alike[kind if together else index].append(index)
    return tuple(
        Batch(tuple(indices), matrices[indices[0]], tuple(owned[index] for index in indices))
        for indices in alike.values()
    )


def assemble(
    batches: Sequence[Batch], cargo: Cargo, dtype: torch.dtype, device: torch.device
) -> list[Tensor]:
    """The owned matrices batch by batch, [rows, cols] or [n, rows, cols].

    Each is fresh, contiguous and row-major: equal bits rest on that.
    """
    wholes, places, pieces = [], [], []
    for batch in batches:
        whole = torch.empty(batch.shape, dtype=dtype, device=device)
        wholes.append(whole)
        for key, place in _places(batch, whole).items():
            places.append(place)
            block = cargo[key]
            if batch.matrix.row_state:  # numbers of its rows may be behind it
                block = block[: place.numel()]
            pieces.append(block if batch.rows else block.view(place.shape))
    copy_all(places, pieces)
    return wholes


def row_states_of(batch: Batch, cargo: Cargo) -> Tensor | None:
    """The number of every row of a batch, float32 [rows] or [n, rows]; None if none travels."""
    if not batch.matrix.row_state:
        return None
    columns = []
    for index, parcels in zip(batch.indices, batch.parcels, strict=True):
        first = [p for p in parcels if p.block.col_start == 0]  # each row begins in one of them
        first.sort(key=lambda p: p.block.row_start)
        columns += [rows_from_wire(cargo[index, p.origin][p.block.numel :]) for p in first]
    return torch.cat(columns).view(batch.shape[:-1])


def take_apart(batch: Batch, update: Tensor, stats: Tensor | None, dtype: torch.dtype) -> Cargo:
    """Each origin's block of the updates in the wire dtype, flat, for the way back.

    update: as `Batch.shape`. stats: float32 per row, [rows] or [n, rows], or None.
    """
    # Those of tall matrices come column by column.
    whole = update.to(dtype).contiguous()
    cargo = _places(batch, whole)
    if not batch.rows:
        cargo = {key: piece.reshape(-1) for key, piece in cargo.items()}
    if stats is None:
        return cargo
    for index, parcels, theirs in zip(
        batch.indices, batch.parcels, stats.view(len(batch.indices), -1), strict=True
    ):
        for parcel in parcels:
            key = index, parcel.origin
            rows = theirs[parcel.block.row_start : parcel.block.row_stop]
            cargo[key] = torch.cat([cargo[key], rows_to_wire(rows, dtype)])
    return cargo


def _places(batch: Batch, whole: Tensor) -> Cargo:
    """Where in a batch each parcel lies: flat if all are whole rows, else rectangles."""
    if batch.rows is not None:  # one call, where a step would else slice hundreds of times
        parts = whole.view(-1).split_with_sizes(batch.rows.sizes)
        return dict(zip(batch.rows.keys, parts, strict=True))
    matrices = whole.view(-1, *whole.shape[-2:])
    return {
        (index, parcel.origin): _block_of(matrix, parcel.block)
        for index, parcels, matrix in zip(batch.indices, batch.parcels, matrices, strict=True)
        for parcel in parcels
    }


def _block_of(matrix: Tensor, block: Block) -> Tensor:
    """The rectangle `block` of a matrix."""
    return matrix[block.row_start : block.row_stop, block.col_start : block.col_stop]

"""Blocks follow torch's rule of splitting, for every mesh and every order of cuts."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardmuon.planning.layout import Coordinate, Layout, Mesh, Split, chunk


@given(st.integers(0, 70), st.integers(1, 9))
def test_chunk_is_that_of_torch(length: int, parts: int) -> None:
    pieces = [len(piece) for piece in torch.arange(length).chunk(parts)] if length else []
    ours = [chunk(0, length, parts, index) for index in range(parts)]
    sizes = [stop - start for start, stop in ours]
    assert sizes == pieces + [0] * (parts - len(pieces))
    assert [start for start, _ in ours[1:]] == [stop for _, stop in ours[:-1]]


def rows_of(layout: Layout, rows: int, coordinate: Coordinate) -> int:
    start, stop = layout.box((rows, 8), coordinate)[0]
    return stop - start


def test_uneven_rows_are_cut_ceil_first_without_padding() -> None:
    layout = Layout(Mesh((0, 1, 2, 3), (4,)), (Split(0, 0),))
    assert [rows_of(layout, 18, (i,)) for i in range(4)] == [5, 5, 5, 3]
    assert [rows_of(layout, 1, (i,)) for i in range(4)] == [1, 0, 0, 0]


def test_later_cuts_divide_the_range_of_earlier_ones() -> None:
    mesh = Mesh(tuple(range(4)), (2, 2))
    inner_first = Layout(mesh, (Split(1, 0), Split(0, 0)))
    boxes = [inner_first.box((16, 8), mesh.coordinates[rank]) for rank in range(4)]
    assert [rows for rows, _ in boxes] == [(0, 4), (8, 12), (4, 8), (12, 16)]


def test_both_dims_sharded_gives_rectangles_that_tile() -> None:
    mesh = Mesh(tuple(range(6)), (2, 3))
    layout = Layout(mesh, (Split(0, 0), Split(1, 1)))
    cells = [
        (row, col)
        for c in mesh.coordinates.values()
        for rows, cols in [layout.box((5, 7), c)]
        for row in range(*rows)
        for col in range(*cols)
    ]
    assert sorted(cells) == [(row, col) for row in range(5) for col in range(7)]


def test_axes_of_size_one_move_nothing() -> None:
    layout = Layout(Mesh((3, 5), (2, 1)), (Split(1, 0),))
    assert layout.sharded_axes == ()
    assert layout.replicated_axes == (0,)
    assert layout.box((4, 4), (1, 0)) == ((0, 4), (0, 4))


def test_rank_at_inverts_coordinates() -> None:
    mesh = Mesh((7, 3, 9, 1, 0, 2), (3, 2))
    assert [mesh.rank_at(mesh.coordinates[rank]) for rank in mesh.ranks] == list(mesh.ranks)


def test_meshes_and_layouts_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="does not hold"):
        Mesh((0, 1, 2), (2, 2))
    with pytest.raises(ValueError, match="names a rank twice"):
        Mesh((0, 0), (2,))
    with pytest.raises(ValueError, match="only one dim"):
        Layout(Mesh((0, 1), (2,)), (Split(0, 0), Split(0, 1)))

"""Cuts: the matrices of a parameter cover it once, and their blocks are what a rank holds."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardmuon.planning.cut import Cut, cut_parameter
from shardmuon.planning.layout import EMPTY, Block, Layout, Mesh, Split


def cells(box: tuple[tuple[int, int], ...]) -> set[tuple[int, ...]]:
    return set(product(*(range(*pair) for pair in box)))


@st.composite
def parameters(draw: st.DrawFn) -> tuple[tuple[int, ...], dict[str, Any]]:
    """A shape and keys of a group that fit it."""
    dims = draw(st.sampled_from([2, 3]))
    shape = tuple(draw(st.integers(1, 7)) for _ in range(dims))
    transposed = draw(st.booleans())
    rows = shape[-1] if transposed else shape[-2]
    keys: dict[str, Any] = {"transposed": transposed}
    kind = draw(st.sampled_from(["whole", "split", "heads"]))
    if kind == "split":
        border = draw(st.integers(1, rows))
        keys["split_sizes"] = [border, rows - border] if border < rows else [rows]
    if kind == "heads":
        keys["num_heads"] = draw(st.sampled_from([n for n in range(1, rows + 1) if rows % n == 0]))
    return shape, keys


@given(parameters())
def test_matrices_cover_their_parameter_once(case: tuple[tuple[int, ...], dict[str, Any]]) -> None:
    shape, keys = case
    cuts = cut_parameter(shape, **keys)
    assert len({suffix for suffix, _ in cuts}) == len(cuts)
    found = [cell for _, cut in cuts for cell in cells(cut.box)]
    assert sorted(found) == sorted(cells(tuple((0, n) for n in shape)))


@given(parameters(), st.integers(1, 5), st.data())
def test_blocks_are_what_a_rank_holds(
    case: tuple[tuple[int, ...], dict[str, Any]], ranks: int, data: st.DataObject
) -> None:
    shape, keys = case
    dim = data.draw(st.integers(0, len(shape) - 1))
    layout = Layout(Mesh(tuple(range(ranks)), (ranks,)), (Split(0, dim),))
    for _, cut in cut_parameter(shape, **keys):
        sizes = []
        for rank in range(ranks):
            box = layout.box(shape, (rank,))
            block = cut.block(box)
            assert block.numel == len(cells(box) & cells(cut.box))
            sizes.append(block.numel)
        holders = layout.holders(shape, cut.box)
        assert [rank for rank, size in enumerate(sizes) if size == cut.rows * cut.cols] == [
            *holders
        ]


def test_flattened_dims_are_columns() -> None:
    ((suffix, cut),) = cut_parameter((16, 3, 5, 5), flatten=True)
    assert (suffix, cut.rows, cut.cols) == ("", 16, 75)
    assert cut.block(((4, 8), (1, 3))) == Block(4, 8, 25, 75)


def test_a_border_inside_a_shard_gives_a_part_of_the_part() -> None:
    (_, first), (_, second) = cut_parameter((10, 4), split_sizes=[7, 3])
    assert first.block(((5, 10), (0, 4))) == Block(5, 7, 0, 4)
    assert second.block(((5, 10), (0, 4))) == Block(0, 3, 0, 4)
    assert second.block(((0, 5), (0, 4))) == EMPTY


def test_transposed_parts_are_column_ranges() -> None:
    cuts = dict(cut_parameter((4, 10), split_sizes=[7, 3], transposed=True))
    assert cuts[".1"] == Cut((4, 10), None, (7, 10), transposed=True)
    assert (cuts[".1"].rows, cuts[".1"].cols) == (3, 4)
    assert cuts[".1"].block(((0, 2), (0, 10))) == Block(0, 3, 0, 2)


@given(parameters(), st.integers(1, 4), st.integers(1, 6), st.data())
def test_panels_cover_their_matrix_once(
    case: tuple[tuple[int, ...], dict[str, Any]], ranks: int, count: int, data: st.DataObject
) -> None:
    shape, keys = case
    dim = data.draw(st.integers(0, len(shape) - 1))
    layout = Layout(Mesh(tuple(range(ranks)), (ranks,)), (Split(0, dim),))
    for _, cut in cut_parameter(shape, **keys):
        panels = [cut.panel(index, count) for index in range(count)]
        found = [cell for panel in panels for cell in cells(panel.box)]
        assert sorted(found) == sorted(cells(cut.box))
        short = min(cut.rows, cut.cols)
        assert all(short in (panel.rows, panel.cols) for panel in panels)
        for panel, rank in product(panels, range(ranks)):
            box = layout.box(shape, (rank,))
            block = panel.block(box)
            assert block.numel == len(cells(box) & cells(panel.box))
            assert block.row_stop <= panel.rows
            assert block.col_stop <= panel.cols


@pytest.mark.parametrize(
    ("shape", "keys", "text"),
    [
        ((10, 4), {"split_sizes": [7, 4]}, "add up to 11, not to 10 rows"),
        ((10, 4), {"num_heads": 3}, "num_heads 3 does not divide 10 rows"),
        ((10, 4), {"num_heads": 2, "split_sizes": [5, 5]}, "exclude each other"),
        ((10, 4), {"flatten": True}, "at least 3 dims"),
        ((10, 4, 3), {"flatten": True, "transposed": True}, "exclude each other"),
        ((10,), {}, r"not shape \(10,\)"),
        ((2, 3, 4, 5), {}, r"not shape \(2, 3, 4, 5\)"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(
    shape: tuple[int, ...], keys: dict[str, Any], text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        cut_parameter(shape, **keys)

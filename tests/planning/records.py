"""Makers of matrices and layouts for the planning tests."""

from __future__ import annotations

from shardmuon.planning.cost import newton_schulz_flops
from shardmuon.planning.cut import Cut
from shardmuon.planning.layout import Layout, Mesh, Split
from shardmuon.planning.matrix import Matrix


def rows_over(ranks: int) -> Layout:
    """A 1-D mesh that shards rows."""
    return Layout(Mesh(tuple(range(ranks)), (ranks,)), (Split(0, 0),))


def matrix(name: str, rows: int, cols: int, layout: Layout, *, wire: str = "bfloat16") -> Matrix:
    """A matrix with the standard cost of five steps."""
    cost = newton_schulz_flops(rows, cols, (3, 2))
    return Matrix(name, Cut((rows, cols)), layout, wire, 2 if wire == "bfloat16" else 4, cost)


def gpt2() -> list[tuple[str, int, int]]:
    """Shapes of the 48 hidden matrices of GPT-2 124M."""
    shapes = {"attn.qkv": (2304, 768), "attn.o": (768, 768), "up": (3072, 768), "down": (768, 3072)}
    return [(f"h.{layer}.{n}", *shape) for layer in range(12) for n, shape in shapes.items()]

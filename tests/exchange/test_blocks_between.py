"""Blocks of a given size between steps of whole matrices: against the formula, on any layout."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import shardmuon
from tests import reference
from tests.conftest import Worlds
from tests.grids import Grid, Weight, check, mesh_of, run, solve_alone
from tests.problems import local
from tests.reference import Array, Rule, relative_error

Block = tuple[int | None, int | None]
BLOCKS: list[Block] = [(4, None), (None, 3), (5, 3), (64, 64)]
STEPS = 5
PERIOD = 3


def tiles(whole: Any, block: Block) -> list[Any]:
    """Views of a matrix in blocks; written here anew."""
    rows, cols = (each or side for each, side in zip(block, whole.shape, strict=True))
    return [
        whole[i : i + rows, j : j + cols]
        for i in range(0, whole.shape[0], rows)
        for j in range(0, whole.shape[1], cols)
    ]


def optimizer_of(p: nn.Parameter, block: Block, **keys: Any) -> shardmuon.Muon:
    group = {"params": [p], "lr": 0.02, "ns_period": PERIOD, "ns_block": block, **keys}
    return shardmuon.Muon([group], runtime=shardmuon.Runtime(deterministic=True))


def train(p: nn.Parameter, optimizer: shardmuon.Muon, steps: range) -> None:
    for step in steps:
        p.grad = torch.from_numpy(reference.gradient(p.shape[0], p.shape[1], step)).float()
        optimizer.step()


def right_answer(shape: tuple[int, int], block: Block, rule: Rule) -> tuple[Array, Array]:
    """(parameter, momentum) after `STEPS` in float64, from the formula of Muon on each block."""
    p, m = reference.weights(*shape), np.zeros(shape)
    for step in range(STEPS):
        g = reference.gradient(*shape, step)
        size = (None, None) if step % PERIOD == 0 else block
        parts = zip(tiles(p, size), tiles(m, size), tiles(g, size), strict=True)
        for part, average, gradient in list(parts):
            part[:], average[:] = rule.step(part.copy(), average.copy(), gradient)
    return p, m


@pytest.mark.parametrize("mode", [None, "match_rms_adamw"])
@pytest.mark.parametrize("block", BLOCKS)
def test_blocks_follow_the_reference(block: Block, mode: str | None) -> None:
    p = nn.Parameter(torch.from_numpy(reference.weights(10, 8)).float())
    optimizer = optimizer_of(p, block, adjust_lr_fn=mode)
    train(p, optimizer, range(STEPS))
    right, momentum = right_answer((10, 8), block, Rule(adjust_lr_fn=mode))
    assert relative_error(p.detach().numpy(), right) < 1e-4
    assert relative_error(optimizer.state[p]["momentum_buffer"].numpy(), momentum) < 1e-4


WEIGHTS: list[tuple[tuple[int, ...], dict[str, Any]]] = [
    ((10, 8), {"ns_block": (4, None)}),
    ((9, 13), {"ns_block": (None, 3)}),
    ((12, 8), {"ns_block": (5, 3), "split_sizes": [5, 7]}),
    ((3, 6, 10), {"ns_block": (4, 4), "transposed": True}),
    ((6, 4, 3), {"ns_block": (2, 5), "flatten": True}),
    ((10, 7), {"ns_block": (3, None), "algorithm": "normuon"}),
]
MESHES: list[tuple[tuple[int, ...], str]] = [
    ((2,), "0"),
    ((2,), "1"),
    ((4,), "0"),
    ((2, 2), "R0"),
    ((2, 2), "s0"),
    ((2, 2), "01"),
]


@pytest.mark.parametrize(("mesh", "letters"), MESHES)
def test_ranks_have_the_bits_of_one_process(
    pools: Worlds, mesh: tuple[int, ...], letters: str
) -> None:
    """A rule's row average belongs to the row of the whole, so blocks of it have whole rows."""
    weights = tuple(
        Weight(shape=shape, letters=letters, keys={"ns_period": PERIOD, **keys})
        for shape, keys in WEIGHTS
    )
    runtime = shardmuon.Runtime(deterministic=True, bucket_bytes=600)
    grid = Grid(mesh=mesh, weights=weights, steps=STEPS, runtime=runtime)
    (right,) = pools.run(1, solve_alone, [grid])
    answers = pools.run(math.prod(mesh), check, [grid], right)
    assert [answer.fault for (answer,) in answers] == [""] * math.prod(mesh)


def _bytes_by_step(rows: int) -> list[int]:
    weights = tuple(
        Weight(shape=(16, 8), letters="0", keys={"ns_period": 2, "ns_block": (rows, None)})
        for _ in range(4)
    )
    sent = []
    for steps in (1, 2, 3):
        _, optimizer, _ = run(Grid(mesh=(4,), weights=weights, steps=steps))
        sent.append(optimizer.stats.bytes_sent)
    return sent


def test_blocks_that_lie_whole_on_a_rank_do_not_travel(pools: Worlds) -> None:
    """Of 16 rows a rank holds 4."""
    for whole, blocks, again in pools.run(4, _bytes_by_step, 4):
        assert whole == again > 0
        assert blocks == 0
    assert all(blocks > 0 for _, blocks, _ in pools.run(4, _bytes_by_step, 8))


def _overlapped(overlap: Any) -> tuple[list[Tensor], list[int]]:
    """This rank's parts after some backward passes, and what was on its way before each step."""
    mesh = mesh_of((dist.get_world_size(),))
    weights = (Weight(shape=(12, 8), letters="0"), Weight(shape=(8, 6), letters="1"))
    keys = {"ns_period": 2, "ns_block": (3, None)}
    grid = Grid(mesh=tuple(mesh.shape), weights=weights, steps=0)
    params, _, _ = run(grid)
    runtime = shardmuon.Runtime(deterministic=True, overlap=overlap)
    optimizer = shardmuon.Muon([{"params": params, "lr": 0.02, **keys}], runtime=runtime)
    early = []
    for step in range(7):
        torch.manual_seed(step)
        for p in params:
            p.grad = None
        parts = [p.to_local() for p in params if isinstance(p, DTensor)]
        torch.stack([(part * torch.randn(part.shape)).sum() for part in parts]).sum().backward()
        early.append(optimizer._engine._overlap.started)
        optimizer.step()
    return [local(p) for p in params], early


def test_overlap_follows_from_blocks_to_whole_matrices(pools: Worlds) -> None:
    """The first two steps prove a plan each; then both kinds set out during backward."""
    alone = pools.run(2, _overlapped, "none")
    early = pools.run(2, _overlapped, "backward")
    for (right, _), (found, started) in zip(alone, early, strict=True):
        assert all(map(torch.equal, right, found))
        assert started[:2] == [0, 0]
        assert all(started[step] > 0 for step in (2, 4, 6))


def test_a_loaded_run_goes_on_in_its_period() -> None:
    p = nn.Parameter(torch.from_numpy(reference.weights(10, 8)).float())
    optimizer = optimizer_of(p, (4, None))
    train(p, optimizer, range(2))
    twin = nn.Parameter(p.detach().clone())
    loaded = optimizer_of(twin, (4, None))
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for each, its in ((p, optimizer), (twin, loaded)):
        train(each, its, range(2, STEPS))
    assert torch.equal(p, twin)


def _with_other_counts() -> str:
    mesh = mesh_of((2,))
    weights = (Weight(shape=(12, 8), letters="0", keys={"ns_period": 2, "ns_block": (3, None)}),)
    params, optimizer, _ = run(Grid(mesh=tuple(mesh.shape), weights=weights, steps=2))
    optimizer.param_groups[0]["step"] += dist.get_rank()
    before = local(params[0]).clone()
    try:
        optimizer.step()
    except RuntimeError as error:
        assert torch.equal(local(params[0]), before)
        return str(error)
    return ""


def test_ranks_that_count_otherwise_are_found(pools: Worlds) -> None:
    for text in pools.run(2, _with_other_counts):
        assert "plan" in text


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"ns_period": 0}, "ns_period must be"),
        ({"ns_period": 2, "ns_block": None}, "ns_period=2 needs ns_block"),
        ({"ns_block": (None, None)}, "ns_block must be"),
        ({"ns_block": (0, 4)}, "ns_block must be"),
        ({"ns_block": 4}, "ns_block must be"),
        ({"ns_block": (4, 4), "algorithm": "normuon"}, "'normuon' has a number each"),
    ],
)
def test_what_is_no_block_is_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        optimizer_of(nn.Parameter(torch.ones(4, 4)), (2, 2), **{"ns_block": (2, 2), **keys})

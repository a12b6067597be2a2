"""Norms and clipping over any mix of meshes: each element counts once, on every rank alike."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import shardmuon
from shardmuon import clipping
from shardmuon.exchange import collectives
from shardmuon.training import gradients
from tests import reference
from tests.conftest import Worlds
from tests.grids import PLAIN, mesh_of, placed
from tests.optimizer.pieces import Piece, right_norm, same_everywhere
from tests.problems import local, whole, world_mesh

INF = math.inf
DTYPES = [torch.float32, torch.bfloat16, torch.float64]


def clip(pieces: Sequence[Piece], max_norm: float, norm_type: float = 2.0) -> float:
    """Clip on this rank; every local gradient must be that of the whole times one factor."""
    parameters = [piece.parameter() for piece in pieces]
    before = sum(collectives.calls.values())
    only_measured = shardmuon.grad_norm(parameters, norm_type)
    norm = shardmuon.clip_grad_norm_(iter(parameters), max_norm, norm_type)
    issued = sum(collectives.calls.values()) - before
    assert issued == (2 if dist.is_initialized() and dist.get_world_size() > 1 else 0)
    value = same_everywhere(norm)
    assert same_everywhere(only_measured) == value
    factor = min(1.0, max_norm / (value + 1e-6))
    for piece, parameter in zip(pieces, parameters, strict=True):
        if piece.time is None:
            assert parameter.grad is None
            continue
        assert parameter.grad is not None
        wanted = piece.place((piece.whole().double() * factor).to(piece.dtype))
        # A product of rounded numbers, rounded once more.
        torch.testing.assert_close(local(parameter.grad), local(wanted))
        assert not local(parameter).any()
    return value


def clip_all(problems: Sequence[tuple[Sequence[Piece], float, float]]) -> list[float]:
    """`clip` for many problems in one call."""
    return [clip(*problem) for problem in problems]


# -- each element once ------------------------------------------------------------------------

SUB = Piece((1, 64), "0", (2, 2), "b", time=2.0)
SEVERAL_MESHES = (Piece((10, 8), "0"), Piece((3, 16), "0", time=1.0), SUB)


@pytest.mark.parametrize("max_norm", [1.0, 5.0, 100.0, 0.0, INF])
def test_several_meshes_give_one_norm_and_one_factor(pools: Worlds, max_norm: float) -> None:
    """A number from outside of this code."""
    assert right_norm(SEVERAL_MESHES) == pytest.approx(9.789219, abs=1e-6)
    for norm in pools.run(4, clip, SEVERAL_MESHES, max_norm):
        assert norm == pytest.approx(9.789219, rel=1e-6)


EXPERTS = (
    Piece((10, 8), "01", (2, 2)),
    Piece((4, 6, 10), "R0", (2, 2), time=1.0),
    Piece((3, 10, 6), "1", (2, 2), "a", time=2.0),
    Piece((3, 10, 6), "0", (2, 2), "b", time=3.0),
    Piece((7,), PLAIN, time=4.0),
    Piece((9,), "R", time=5.0),
    Piece((18, 4), "s0", (2, 2), time=6.0),
)


@pytest.mark.parametrize("norm_type", [2.0, 1.0, 3.5, INF])
def test_expert_replicas_count_once(pools: Worlds, norm_type: float) -> None:
    """Dense weights cut on both axes of a mesh of 2 x 2, experts on one."""
    right = right_norm(EXPERTS, norm_type)
    for norm in pools.run(4, clip, EXPERTS, 0.5, norm_type):
        assert norm == pytest.approx(right, rel=2e-6)


def _norms_after_a_step() -> tuple[float, float]:
    pieces = EXPERTS[:3]
    named = [(f"w{i}", piece.parameter()) for i, piece in enumerate(pieces)]
    # Each mesh chooses its own quickest method on GPUs, and these hold replicas of each other.
    optimizer = shardmuon.Muon(named, lr=0.02, ns_method="standard")
    size = gradients.UpdateSize([p for _, p in named])
    optimizer.step()
    norm, _ = clipping.total_norm(clipping.count([p.detach() for _, p in named]))
    rms = size.rms()  # collective
    values = np.concatenate([whole(p).double().numpy().ravel() for _, p in named])
    right = float(np.sqrt(np.mean(values**2)))  # from zero
    assert rms == pytest.approx(right, rel=1e-5), (rms, right)
    return same_everywhere(norm), float(np.linalg.norm(values))


def test_norms_of_parameters_right_after_a_step(pools: Worlds) -> None:
    """Nobody reads a copy that is not there yet."""
    answers = pools.run(4, _norms_after_a_step)
    assert len({right for _, right in answers}) == 1
    for norm, right in answers:
        assert right > 0.1
        assert norm == pytest.approx(right, rel=1e-6)


def _norm_of_twos(letters: str) -> float:
    parameter = nn.Parameter(placed(torch.zeros(8, 4), letters, world_mesh()))
    parameter.grad = placed(torch.full((8, 4), 2.0), letters, world_mesh())
    return same_everywhere(shardmuon.clip_grad_norm_(parameter, 1e9))


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("letters", ["0", "1", "R", PLAIN])
def test_the_norm_is_not_that_of_a_shard(pools: Worlds, world: int, letters: str) -> None:
    """A number from outside of this code."""
    for norm in pools.run(world, _norm_of_twos, letters):
        assert norm == pytest.approx(11.313708, rel=1e-6)


@st.composite
def pieces_of(draw: st.DrawFn, world: int) -> Piece:
    """A parameter on some mesh of `world` ranks."""
    grids: dict[int, list[tuple[int, ...]]] = {
        1: [(1,)],
        2: [(2,), (1, 2), (2, 1)],
        4: [(4,), (2, 2), (1, 4)],
    }
    mesh = draw(st.sampled_from(grids[world]))
    axis = draw(st.sampled_from(["", *"ab"[: len(mesh)]])) if len(mesh) > 1 else ""
    ndim = draw(st.integers(1, 3))
    shape = tuple(draw(st.integers(0 if i == 0 else 1, 6)) for i in range(ndim))
    letters = "".join(
        draw(st.sampled_from("R012"[: ndim + 1])) for _ in range(1 if axis else len(mesh))
    )
    if letters == "00" and draw(st.booleans()):
        letters = "s0"
    plain = draw(st.integers(0, 4)) == 0
    return Piece(
        shape,
        PLAIN if plain else letters,
        mesh,
        axis,
        draw(st.sampled_from(DTYPES)),
        draw(st.one_of(st.none(), st.floats(0, 3), st.floats(0, 3), st.floats(0, 3))),
    )


@st.composite
def problems_of(draw: st.DrawFn) -> tuple[int, list[tuple[list[Piece], float, float]]]:
    """A number of ranks, and some (parameters, max_norm, norm_type) for them."""
    world = draw(st.sampled_from([1, 2, 4, 4]))
    problem = st.tuples(
        st.lists(pieces_of(world), max_size=6),
        st.sampled_from([0.1, 2.0, INF]),
        st.sampled_from([1.0, 2.0, 2.0, 2.5, 4.0, INF]),
    )
    return world, draw(st.lists(problem, min_size=5, max_size=10))


@settings(
    max_examples=15,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
@given(drawn=problems_of())
def test_any_mix_of_meshes_placements_and_dtypes(
    pools: Worlds, drawn: tuple[int, list[tuple[list[Piece], float, float]]]
) -> None:
    """Empty lists, empty tensors, empty shards and missing gradients among them."""
    world, problems = drawn
    rights = [right_norm(pieces, norm_type) for pieces, _, norm_type in problems]
    for norms in pools.run(world, clip_all, problems):
        for norm, right in zip(norms, rights, strict=True):
            assert norm == pytest.approx(right, rel=5e-6, abs=1e-7)


# -- ranks that have less than others ---------------------------------------------------------


def _with_less_on_rank_1(kind: str, letters: str, norm_type: float) -> float:
    piece = Piece((10, 8), letters)
    parameters: list[nn.Parameter] = [piece.parameter(), piece.parameter()]
    if dist.get_rank() == 1:
        if kind == "no parameters":
            parameters = []
        for parameter in parameters:
            parameter.grad = None
            parameter.requires_grad_(kind != "frozen")
    norm = shardmuon.clip_grad_norm_(parameters, 1e-3, norm_type)
    for parameter in parameters:
        if parameter.grad is not None:
            assert local(parameter.grad).abs().max() <= 1e-3
    return same_everywhere(norm)


@pytest.mark.parametrize("norm_type", [2.0, INF])
@pytest.mark.parametrize("letters", ["0", "R", PLAIN])
@pytest.mark.parametrize("kind", ["no parameters", "no gradients", "frozen"])
def test_a_rank_without_gradients_takes_part(
    pools: Worlds, kind: str, letters: str, norm_type: float
) -> None:
    """The norm of rank 0's gradients, on both ranks."""
    held = reference.gradient(10, 8, 0)[: 5 if letters == "0" else 10]
    flat = np.abs(np.concatenate([held, held]))
    right = float(flat.max() if norm_type == INF else np.sqrt((flat**2).sum()))
    for norm in pools.run(2, _with_less_on_rank_1, kind, letters, norm_type, limit_s=20):
        assert norm == pytest.approx(right, rel=1e-6)


def _nothing_anywhere(error_if_nonfinite: bool) -> list[float]:
    frozen = Piece((3, 4), time=None).parameter()
    lists: list[list[nn.Parameter]] = [[], [frozen]]
    return [
        same_everywhere(shardmuon.clip_grad_norm_(each, 1.0, norm_type, error_if_nonfinite))
        for each in lists
        for norm_type in (2.0, INF)
    ]


@pytest.mark.parametrize("world", [1, 2])
def test_no_gradient_on_any_rank_is_a_norm_of_zero(pools: Worlds, world: int) -> None:
    assert pools.run(world, _nothing_anywhere, True) == [[0.0] * 4] * world


# -- pipelines --------------------------------------------------------------------------------

STAGES = (
    (Piece((10, 8), "0", (2, 2), "b"), Piece((5,), PLAIN, time=1.0)),
    (
        Piece((1, 9), "0", (2, 2), "b", time=2.0),
        Piece((6, 7), "1", (2, 2), "b", time=3.0),
        Piece((4, 6), "R", (2, 2), "b", time=4.0),
    ),
)


def _pipeline(as_group: bool, idle_stage: bool, norm_type: float) -> float:
    """Stages along axis a of 2 x 2; each stage's ranks hold its parameters along axis b."""
    mesh = mesh_of((2, 2))
    stage = mesh.get_local_rank("a")
    parameters = [piece.parameter() for piece in STAGES[stage]]
    if idle_stage and stage == 1:
        parameters = []
    before = [local(p.grad).clone() for p in parameters if p.grad is not None]
    pipeline = mesh.get_group("a") if as_group else mesh["a"]
    issued = sum(collectives.calls.values())
    norm = shardmuon.clip_grad_norm_(parameters, 1.0, norm_type, pipeline=pipeline)
    assert sum(collectives.calls.values()) == issued + 1
    again = shardmuon.grad_norm(parameters, norm_type, pipeline=pipeline)
    value = same_everywhere(norm)
    assert same_everywhere(again) == pytest.approx(min(1.0, value), rel=1e-5)
    for parameter, old in zip(parameters, before, strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(local(parameter.grad), old / max(1.0, value + 1e-6))
    return value


@pytest.mark.parametrize("norm_type", [2.0, 1.0, INF])
@pytest.mark.parametrize("idle_stage", [False, True])
@pytest.mark.parametrize("as_group", [False, True])
def test_stages_of_a_pipeline_add_up(
    pools: Worlds, as_group: bool, idle_stage: bool, norm_type: float
) -> None:
    held = STAGES[0] if idle_stage else STAGES[0] + STAGES[1]
    right = right_norm(held, norm_type)
    for norm in pools.run(4, _pipeline, as_group, idle_stage, norm_type):
        assert norm == pytest.approx(right, rel=2e-6)

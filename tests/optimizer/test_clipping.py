"""Norms and clipping over any mix of meshes: each element counts once, on every rank alike.

The right numbers come from the whole tensors in float64, in the process that runs the tests.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial

import shardmuon
from shardmuon import clipping
from shardmuon.exchange import collectives
from shardmuon.training import gradients
from tests import ranks, reference
from tests.conftest import Worlds
from tests.grids import PLAIN, mesh_of, placed
from tests.problems import local, whole, world_mesh

INF = math.inf
Array = npt.NDArray[np.float64]

FLOATS = {torch.float32: 2e-6, torch.bfloat16: 2e-6, torch.float64: 2e-7}
"""Gradient dtypes, and the relative error of a float32 norm of a few hundred such elements."""


@dataclass(frozen=True)
class Piece:
    """One parameter. mesh: "world", or the shape of a mesh, and one of its axes if it is on that.

    time: None for a parameter without a gradient, else that of the reference's gradients.
    """

    shape: tuple[int, ...]
    letters: str = PLAIN
    mesh: str | tuple[int, ...] = "world"
    axis: str = ""
    dtype: torch.dtype = torch.float32
    time: float | None = 0.0

    def whole(self) -> Tensor:
        """The whole gradient on the host, in its dtype."""
        rows = self.shape[0]
        values = reference.gradient(rows, math.prod(self.shape[1:]), self.time or 0.0)
        return torch.from_numpy(values).view(self.shape).to(self.dtype)

    def place(self, value: Tensor) -> Tensor:
        """This rank's part of `value`."""
        mesh = world_mesh() if isinstance(self.mesh, str) else mesh_of(self.mesh)
        return placed(value, self.letters, mesh[self.axis] if self.axis else mesh)

    def parameter(self) -> nn.Parameter:
        """On this rank, with its gradient."""
        made = nn.Parameter(self.place(torch.zeros(self.shape, dtype=self.dtype)))
        if self.time is not None:
            made.grad = self.place(self.whole())
        return made


def right_norm(pieces: Sequence[Piece], norm_type: float = 2.0) -> float:
    """Norm of the whole gradients, from the definition."""
    values = [
        np.abs(piece.whole().double().numpy()).ravel() for piece in pieces if piece.time is not None
    ]
    flat = np.concatenate([np.zeros(1), *values])
    if norm_type == INF:
        return float(flat.max())
    return float(np.sum(flat**norm_type) ** (1 / norm_type))


def same_everywhere(norm: Tensor) -> float:
    """The value of a norm, after all ranks have compared its bits."""
    assert type(norm) is Tensor
    assert norm.shape == ()
    assert norm.dtype == torch.float32
    value = float(norm)
    if dist.is_initialized():
        seen: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(seen, np.float32(value).tobytes())
        assert len(set(seen)) == 1, seen
    return value


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
def test_c27_several_meshes_give_one_norm_and_one_factor(pools: Worlds, max_norm: float) -> None:
    """C27. The number is the case's own."""
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
def test_c53_expert_replicas_count_once(pools: Worlds, norm_type: float) -> None:
    """C53: dense weights cut on both axes of a mesh of 2 x 2, experts on one."""
    right = right_norm(EXPERTS, norm_type)
    for norm in pools.run(4, clip, EXPERTS, 0.5, norm_type):
        assert norm == pytest.approx(right, rel=2e-6)


def _norms_after_a_step() -> tuple[float, float]:
    pieces = EXPERTS[:3]
    named = [(f"w{i}", piece.parameter()) for i, piece in enumerate(pieces)]
    optimizer = shardmuon.Muon(named, lr=0.02)
    size = gradients.UpdateSize([p for _, p in named])
    optimizer.step()
    norm, _ = clipping.total_norm(clipping.count([p.detach() for _, p in named]))
    rms = size.rms()  # collective
    values = np.concatenate([whole(p).double().numpy().ravel() for _, p in named])
    assert rms == pytest.approx(float(np.sqrt(np.mean(values**2))), rel=1e-6)  # from zero
    return same_everywhere(norm), float(np.linalg.norm(values))


def test_c53_norms_of_parameters_right_after_a_step(pools: Worlds) -> None:
    """C53: nobody reads a copy that is not there yet."""
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
def test_c29_the_norm_is_not_that_of_a_shard(pools: Worlds, world: int, letters: str) -> None:
    """C29. The number is the case's own."""
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
        draw(st.sampled_from(list(FLOATS))),
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
def test_c58_a_rank_without_gradients_takes_part(
    pools: Worlds, kind: str, letters: str, norm_type: float
) -> None:
    """C58: the norm of rank 0's gradients, on both ranks."""
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
def test_c58_no_gradient_on_any_rank_is_a_norm_of_zero(pools: Worlds, world: int) -> None:
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


# -- not finite -------------------------------------------------------------------------------


def _poisoned(value: float, norm_type: float, error: bool) -> tuple[float, str, bool]:
    """The last element of the last rank's shard is `value`: norm, error, whether all is as it was.

    The bad gradient lies on a sub-mesh, so that half of the ranks hold no part of it.
    """
    mesh = mesh_of((2, 2))["b"]
    parameters = [Piece((10, 8), "0").parameter(), Piece((3, 8), "R").parameter()]
    parameters.append(nn.Parameter(placed(torch.zeros(6, 4), "0", mesh)))
    parameters[2].grad = placed(torch.ones(6, 4), "0", mesh)
    if dist.get_rank() == 3:
        local(parameters[2].grad)[-1, -1] = value
    before = [local(p.grad).clone() for p in parameters if p.grad is not None]
    norm, message = torch.tensor(0.0), ""
    try:
        norm = shardmuon.clip_grad_norm_(parameters, 1.0, norm_type, error)
    except RuntimeError as raised:
        message = str(raised)
    same = [
        torch.equal(local(p.grad).nan_to_num(), old.nan_to_num())
        for p, old in zip(parameters, before, strict=True)
        if p.grad is not None
    ]
    return same_everywhere(norm), message, all(same)


@pytest.mark.parametrize("norm_type", [2.0, 3.0, INF])
@pytest.mark.parametrize("value", [INF, -INF, math.nan])
def test_inf_and_nan_of_one_rank_reach_the_norm_of_all(
    pools: Worlds, value: float, norm_type: float
) -> None:
    for norm, message, same in pools.run(4, _poisoned, value, norm_type, False):
        assert not message
        assert not same  # as torch: zero or nan
        assert math.isnan(norm) if math.isnan(value) else norm == INF


@pytest.mark.parametrize("norm_type", [2.0, INF])
@pytest.mark.parametrize("value", [INF, math.nan])
def test_an_error_of_a_norm_that_is_not_finite_changes_nothing_on_any_rank(
    pools: Worlds, value: float, norm_type: float
) -> None:
    for _, message, same in pools.run(4, _poisoned, value, norm_type, True):
        assert "norm of the gradients is" in message
        assert str(value) in message
        assert same


def _clipped_then_stepped(policy: Any) -> tuple[str, int, bool]:
    """An inf on one rank, clipped to zeros on the others: error, steps skipped, all as it was."""
    pieces = (Piece((10, 8), "0"), Piece((9, 4), "1", time=1.0))
    named = [(f"w{i}", piece.parameter()) for i, piece in enumerate(pieces)]
    optimizer = shardmuon.Muon(named, lr=0.02, runtime=shardmuon.Runtime(nonfinite=policy))
    if dist.get_rank() == 3:
        local(named[0][1].grad)[-1, -1] = INF  # type: ignore[arg-type]
    shardmuon.clip_grad_norm_((p for _, p in named), 1.0)
    message = ""
    try:
        optimizer.step()
        optimizer.check()
    except RuntimeError as raised:
        message = str(raised)
    state = [local(optimizer.state[p]["momentum_buffer"]) for _, p in named]
    untouched = not any(t.any() for t in [*(local(p) for _, p in named), *state])
    return message, optimizer.stats.steps_skipped, untouched


@pytest.mark.parametrize("policy", ["skip", "error"])
def test_c30_clipping_hides_no_overflow_from_the_step(pools: Worlds, policy: str) -> None:
    """C30 without a scaler: clipping turns finite gradients into zeros, and inf into nan."""
    for message, skipped, untouched in pools.run(4, _clipped_then_stepped, policy):
        assert ("inf or nan" in message) == (policy == "error")
        assert skipped == (1 if policy == "skip" else 0)
        assert untouched


# -- one process ------------------------------------------------------------------------------


def plain(dtypes: Sequence[torch.dtype]) -> list[nn.Parameter]:
    """Parameters of several shapes, an empty one and one without a gradient among them."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for i, shape in enumerate([(4, 5), (7,), (0, 3), (2, 3, 4), ()]):
        dtype = dtypes[i % len(dtypes)]
        made.append(nn.Parameter(torch.zeros(shape, dtype=dtype)))
        made[-1].grad = torch.randn(shape, generator=generator).to(dtype)
    made.append(nn.Parameter(torch.zeros(3)))
    return made


@pytest.mark.parametrize("max_norm", [0.5, 100.0, INF])
@pytest.mark.parametrize("norm_type", [1, 2.0, 3.0, INF])
def test_one_process_gives_the_gradients_of_torch(max_norm: float, norm_type: float) -> None:
    ours, theirs = plain([torch.float32]), plain([torch.float32])
    norm = shardmuon.clip_grad_norm_(ours, max_norm, norm_type)
    # torch takes the largest magnitude of an empty tensor for an error.
    full = [p for p in theirs if p.numel()]
    torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(full, max_norm, norm_type))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.grad, other.grad)


def test_dtypes_may_be_mixed() -> None:
    parameters = plain(list(FLOATS))
    values = [p.grad.double().numpy().ravel() for p in parameters if p.grad is not None]
    right = float(np.linalg.norm(np.concatenate(values)))
    norm = shardmuon.clip_grad_norm_(parameters, 0.5)
    assert norm.dtype == torch.float32
    assert float(norm) == pytest.approx(right, rel=1e-6)
    assert float(shardmuon.grad_norm(parameters)) == pytest.approx(0.5, rel=1e-3)
    kept = [p.grad.dtype for p in parameters if p.grad is not None]
    assert kept == [p.dtype for p in parameters[:-1]]


def test_a_parameter_given_twice_counts_and_is_scaled_once() -> None:
    parameter = nn.Parameter(torch.zeros(4))
    parameter.grad = torch.full((4,), 3.0)
    assert float(shardmuon.clip_grad_norm_([parameter, parameter], 1.0)) == pytest.approx(6.0)
    assert parameter.grad.tolist() == pytest.approx([0.5] * 4)


def test_a_norm_that_float32_cannot_square_is_no_overflow() -> None:
    """Each tensor's norm fits into float32, the square of their sum does not."""
    parameters = [nn.Parameter(torch.zeros(1)) for _ in range(4)]
    for parameter in parameters:
        parameter.grad = torch.full((1,), 1.5e19)
    assert float(shardmuon.grad_norm(parameters)) == pytest.approx(3e19)


def test_gradients_with_a_graph_are_scaled_outside_of_it() -> None:
    parameter = nn.Parameter(torch.zeros(3))
    parameter.grad = torch.ones(3, requires_grad=True)
    norm = shardmuon.clip_grad_norm_(parameter, 1.0)
    assert not norm.requires_grad
    assert parameter.grad.norm().item() == pytest.approx(1.0)


def test_wishes_travel_with_the_norm() -> None:
    counted = clipping.count([torch.ones(4)])
    for norm_type in (2.0, INF):
        norm, wishes = clipping.total_norm(counted, norm_type, wish=3.0)
        assert (float(norm), float(wishes)) == (2.0 if norm_type == 2 else 1.0, 3.0)


def _wishes(norm_type: float) -> tuple[float, int]:
    before = sum(collectives.calls.values())
    counted = clipping.count([Piece((10, 8), "0").parameter()])
    _, wishes = clipping.total_norm(counted, norm_type, wish=float(dist.get_rank() == 1))
    return same_everywhere(wishes), sum(collectives.calls.values()) - before


@pytest.mark.parametrize("norm_type", [2.0, INF])
def test_a_wish_of_one_rank_costs_no_collective(pools: Worlds, norm_type: float) -> None:
    assert pools.run(4, _wishes, norm_type) == [(1.0, 1)] * 4


# -- the gradient itself: a sum or a mean over ranks --------------------------------------------


class Net(nn.Module):
    """A matrix for Muon and a vector for AdamW."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(6, 10)
        with torch.no_grad():
            self.hidden.weight.copy_(torch.from_numpy(reference.weights(10, 6)))
            self.hidden.bias.copy_(torch.from_numpy(reference.weights(1, 10)[0]))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.hidden(x)).square().mean()


def _train(steps: int, shard: bool) -> tuple[list[float], Tensor, Tensor]:
    """Four samples a step, over all ranks and micro-batches: norms, matrix and vector."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if dist.is_initialized() else 0
    net: Any = Net().to(ranks.device())
    if shard:
        fully_shard(net, mesh=world_mesh())
    groups = [
        {"params": [("w", net.hidden.weight)], "lr": 0.02},
        {"params": [("b", net.hidden.bias)], "algorithm": "adamw", "lr": 0.01, "eps": 1e-2},
    ]
    optimizer = shardmuon.Muon(groups, ns_dtype=torch.float32)
    samples, norms = 4 // world, []
    for step in range(steps):
        for sample in range(samples):
            if shard:
                net.set_requires_gradient_sync(sample == samples - 1)
            x = torch.from_numpy(reference.gradient(5, 6, 10 * step + rank * samples + sample))
            (net(x.float().to(ranks.device())) / samples).backward()
        norm = shardmuon.clip_grad_norm_(net.parameters(), 0.02)
        norms.append(same_everywhere(norm))
        optimizer.step()
        optimizer.zero_grad()
    return norms, whole(net.hidden.weight), whole(net.hidden.bias)


def right_norms() -> list[float]:
    """Norm of the first step's gradient of the mean over four samples, whole and in float64."""
    net = Net().double()
    xs = [torch.from_numpy(reference.gradient(5, 6, sample)) for sample in range(4)]
    torch.stack([net(x) for x in xs]).mean().backward()
    flat = [p.grad.numpy().ravel() for p in net.parameters() if p.grad is not None]
    return [float(np.linalg.norm(np.concatenate(flat)))]


def test_c33_the_gradient_is_the_mean_over_all_samples(pools: Worlds) -> None:
    """C33: one process with four micro-batches, and ranks that share them. Clipped every step.

    AdamW with a large eps sees the scale of gradients, which Muon does not.
    """
    norms, matrix, vector = _train(3, shard=False)
    assert norms[:1] == pytest.approx(right_norms(), rel=1e-5)
    assert min(norms) > 0.02
    for world in (1, 2, 4):
        for theirs, their_matrix, their_vector in pools.run(world, _train, 3, True):
            assert theirs == pytest.approx(norms, rel=1e-5)
            torch.testing.assert_close(their_matrix, matrix, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(their_vector, vector, rtol=1e-5, atol=1e-6)


# -- refusals ---------------------------------------------------------------------------------


@pytest.mark.parametrize("norm_type", [0.0, -1.0, -INF, math.nan])
def test_norm_types_out_of_range_are_refused(norm_type: float) -> None:
    with pytest.raises(ValueError, match="norm_type must be above 0"):
        shardmuon.grad_norm(plain([torch.float32]), norm_type)


@pytest.mark.parametrize("max_norm", [-1.0, math.nan])
def test_limits_out_of_range_are_refused(max_norm: float) -> None:
    parameters = plain([torch.float32])
    before = parameters[0].grad
    assert before is not None
    before = before.clone()
    with pytest.raises(ValueError, match="max_norm must be 0 or more"):
        shardmuon.clip_grad_norm_(parameters, max_norm)
    assert torch.equal(before, parameters[0].grad)  # type: ignore[arg-type]


def test_sparse_gradients_are_refused() -> None:
    embedding = nn.Embedding(5, 3, sparse=True)
    embedding(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(ValueError, match=r"tensor 0, \(5, 3\): sparse"):
        shardmuon.clip_grad_norm_(embedding.parameters(), 1.0)


def _partial() -> None:
    mesh = world_mesh()
    parameter = nn.Parameter(placed(torch.zeros(4, 3), "R", mesh))
    parameter.grad = DTensor.from_local(torch.ones(4, 3), mesh, [Partial()], run_check=False)
    shardmuon.grad_norm(parameter)


def _bad_pipeline(kind: str) -> None:
    mesh = mesh_of((2, 2))
    if kind == "two axes":
        shardmuon.grad_norm([], pipeline=mesh)
    if kind == "text":
        shardmuon.grad_norm([], pipeline="a")  # type: ignore[arg-type]
    if kind == "whole world":
        shardmuon.grad_norm(Piece((8, 4), "0").parameter(), pipeline=mesh["a"])
    if kind == "three of four":
        three = DeviceMesh(ranks.device().type, [0, 1, 2])
        if dist.get_rank() == 3:
            raise ValueError("no part of it")
        shardmuon.grad_norm([], pipeline=three)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("two axes", "must have one axis, got a mesh of shape (2, 2)"),
        ("text", "a process group or None, got str"),
        ("whole world", "tensor 0, (8, 4): cut into 4 parts, of which 2 ranks"),
        ("three of four", "pipeline has 3 stages, which 4 ranks cannot share equally"),
    ],
)
def test_pipelines_that_cannot_be_are_refused(pools: Worlds, kind: str, text: str) -> None:
    errors = pools.run_expecting_error(4, _bad_pipeline, kind)
    assert {error.type_name for error in errors} == {"ValueError"}
    assert all(text in error.message for error in errors[:3])


def test_partial_gradients_are_refused(pools: Worlds) -> None:
    for error in pools.run_expecting_error(2, _partial):
        assert error.type_name == "ValueError"
        assert "still a local sum" in error.message


# -- where ranks meet -------------------------------------------------------------------------


class _Module:
    """Stands for torch.cuda."""

    def __init__(self, used: bool) -> None:
        self._used = used

    def is_initialized(self) -> bool:
        return self._used

    def current_device(self) -> int:
        return 3


@pytest.mark.parametrize(
    ("backends", "computed_on", "used", "device"),
    [
        ("cpu:gloo,cuda:gloo", {"cpu"}, False, "cpu"),
        ("cpu:gloo,cuda:gloo", {"cuda"}, True, "cpu"),
        ("cuda:nccl", {"cpu"}, True, "cuda:3"),
        ("cuda:nccl", set(), True, "cuda:3"),
        ("cpu:gloo,cuda:nccl", {"cpu"}, True, "cpu"),
        ("cpu:gloo,cuda:nccl", {"cpu", "cuda"}, True, "cuda:3"),
        ("cpu:gloo,cuda:nccl", set(), True, "cuda:3"),
        ("cpu:gloo,cuda:nccl", set(), False, "cpu"),
        (None, {"cpu", "cuda"}, True, "cuda:3"),
        (None, {"cpu"}, True, "cpu"),
        (None, set(), True, "cpu"),
    ],
)
def test_ranks_meet_where_their_group_can(
    monkeypatch: pytest.MonkeyPatch,
    backends: str | None,
    computed_on: set[str],
    used: bool,
    device: str,
) -> None:
    answer: Callable[..., Any] = lambda *_: backends  # noqa: E731
    monkeypatch.setattr(collectives, "is_initialized", lambda: backends is not None)
    monkeypatch.setattr(dist, "get_backend_config", answer)
    monkeypatch.setattr(torch, "get_device_module", lambda _: _Module(used))
    assert collectives.meeting_device(computed_on) == torch.device(device)

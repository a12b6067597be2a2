"""Norms and clipping: what torch gives on one process, what is not finite, and what is refused."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial

import shardmuon
from shardmuon import clipping
from shardmuon.exchange import collectives
from tests import ranks, reference
from tests.conftest import Worlds
from tests.grids import mesh_of, placed
from tests.optimizer.pieces import Piece, same_everywhere
from tests.problems import local, whole, world_mesh

INF = math.inf
DTYPES = [torch.float32, torch.bfloat16, torch.float64]


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
def test_clipping_hides_no_overflow_from_the_step(pools: Worlds, policy: str) -> None:
    """Without a scaler: clipping turns finite gradients into zeros, and inf into nan."""
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
    parameters = plain(DTYPES)
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


def test_the_gradient_is_the_mean_over_all_samples(pools: Worlds) -> None:
    """One process with four micro-batches, and ranks that share them. Clipped every step.

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
    parameter.grad = DTensor.from_local(
        torch.ones(4, 3, device=ranks.device()), mesh, [Partial()], run_check=False
    )
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

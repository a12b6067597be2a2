"""Small optimization problems that one process and any number of ranks solve alike.

Owns how test parameters, gradients and optimizers are made on a rank, and how whole tensors are
compared between ranks. Holds no expectations: those are in the tests.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

import shardmuon
from tests import ranks, reference

__all__ = [
    "PLACEMENTS",
    "SHAPES",
    "Outcome",
    "Problem",
    "assert_ranks_agree",
    "build",
    "digest",
    "gradients",
    "local",
    "match",
    "momenta",
    "place",
    "set_gradients",
    "solve",
    "solve_alone",
    "whole",
    "world_mesh",
]

SHAPES = ((10, 8), (5, 7), (64, 24), (18, 48), (1, 64))
"""Tall, wide, one row; none divides evenly over 3 or 4 ranks in every dim."""

PLACEMENTS: dict[str, Placement] = {
    "rows": Shard(0),
    "columns": Shard(1),
    "replicate": Replicate(),
}


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What to optimize. `dtypes` and `placements` are cycled over `shapes`.

    seed: None takes the deterministic matrices of the reference, else normal random ones.
    placements: names of PLACEMENTS; ignored without a mesh.
    """

    shapes: Sequence[tuple[int, int]] = SHAPES
    dtypes: Sequence[torch.dtype] = (torch.float32,)
    placements: Sequence[str] = ("rows",)
    steps: int = 3
    seed: int | None = None
    options: dict[str, Any] = field(default_factory=lambda: {"lr": 0.02})
    runtime: shardmuon.Runtime = field(
        default_factory=lambda: shardmuon.Runtime(deterministic=True)
    )

    def names(self) -> list[str]:
        """Parameter names, in order."""
        return [f"layer{i}.weight" for i in range(len(self.shapes))]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Whole tensors on the CPU, in parameter order, and what the last step and the plan say."""

    params: list[Tensor]
    momenta: list[Tensor]
    orthogonalized: list[int]
    bytes_sent: int
    bytes_received: int
    collectives: int
    buckets: int
    owners: dict[str, int]
    planned_sent: dict[int, int]
    planned_received: dict[int, int]
    plan_digest: str


def world_mesh() -> DeviceMesh:
    """One-axis mesh over all ranks of the calling rank's pool."""
    return init_device_mesh(ranks.device().type, (dist.get_world_size(),))


def place(tensor: Tensor, mesh: DeviceMesh | None, placement: Placement) -> Tensor:
    """`tensor` on the rank's device; with a mesh, a DTensor made without communication."""
    if mesh is None:
        return tensor.clone()
    device = ranks.device()
    return distribute_tensor(tensor.to(device), mesh, [placement], src_data_rank=None)


def local(tensor: Tensor) -> Tensor:
    """This rank's part, detached; shares memory with `tensor`."""
    value = tensor.detach()
    return value.to_local() if isinstance(value, DTensor) else value


def whole(tensor: Tensor) -> Tensor:
    """The global value on the CPU, detached; a collective on DTensors."""
    value = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return value.detach().cpu().clone()


def digest(tensors: Sequence[Tensor]) -> str:
    """Hash of dtypes, shapes and bits."""
    sha = hashlib.sha256()
    for tensor in tensors:
        sha.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        sha.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


def assert_ranks_agree(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The whole tensors, after all ranks have compared a hash of them."""
    values = [whole(tensor) for tensor in tensors]
    _assert_digests_agree([digest(values)])
    return values


def _assert_digests_agree(digests: Sequence[str]) -> None:
    """Compare what every rank has seen over several steps, in one exchange."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        seen: list[Sequence[str]] = [()] * dist.get_world_size()
        dist.all_gather_object(seen, digests)
        assert all(each == seen[0] for each in seen), seen


def _matrices(problem: Problem, step: int | None) -> Iterator[Tensor]:
    """Float32 weights (step None) or gradients of one step."""
    for index, (rows, cols) in enumerate(problem.shapes):
        if problem.seed is not None:
            salt = problem.seed * 100_003 + index * 1009 + (0 if step is None else step + 1)
            yield torch.randn(rows, cols, generator=torch.Generator().manual_seed(salt))
        elif step is None:
            yield torch.from_numpy(reference.weights(rows, cols)).float()
        else:
            yield torch.from_numpy(reference.gradient(rows, cols, step)).float()


def _placement(problem: Problem, index: int) -> Placement:
    return PLACEMENTS[problem.placements[index % len(problem.placements)]]


def _dtype(problem: Problem, index: int) -> torch.dtype:
    return problem.dtypes[index % len(problem.dtypes)]


def build(
    problem: Problem, mesh: DeviceMesh | None = None
) -> tuple[list[nn.Parameter], shardmuon.Muon]:
    """Parameters and an optimizer over them, named as in `problem.names()`."""
    params = [
        nn.Parameter(place(w.to(_dtype(problem, i)), mesh, _placement(problem, i)))
        for i, w in enumerate(_matrices(problem, None))
    ]
    named = list(zip(problem.names(), params, strict=True))
    return params, shardmuon.Muon(named, **problem.options, runtime=problem.runtime)


def gradients(problem: Problem, step: int, mesh: DeviceMesh | None = None) -> list[Tensor]:
    """Gradients of one step, placed like the parameters."""
    return [
        place(g.to(_dtype(problem, i)), mesh, _placement(problem, i))
        for i, g in enumerate(_matrices(problem, step))
    ]


def set_gradients(
    params: Sequence[nn.Parameter], problem: Problem, step: int, mesh: DeviceMesh | None = None
) -> None:
    """Give every parameter its gradient of `step`."""
    for p, g in zip(params, gradients(problem, step, mesh), strict=True):
        p.grad = g


def momenta(optimizer: torch.optim.Optimizer, params: Sequence[nn.Parameter]) -> list[Tensor]:
    """Momentum buffers as the optimizer holds them, in the order of `params`."""
    return [optimizer.state[p]["momentum_buffer"] for p in params]


def _solve(problem: Problem, mesh: DeviceMesh | None) -> Outcome:
    params, optimizer = build(problem, mesh)
    orthogonalized, digests, values = [], [], []
    for step in range(problem.steps):
        set_gradients(params, problem, step, mesh)
        optimizer.step()
        orthogonalized.append(optimizer.stats.matrices_orthogonalized)
        values = [whole(p) for p in params]
        digests.append(digest(values))
    momentum = [whole(m) for m in momenta(optimizer, params)]
    _assert_digests_agree([*digests, digest(momentum)])
    stats, plan = optimizer.stats, optimizer.plan
    return Outcome(
        params=values,
        momenta=momentum,
        orthogonalized=orthogonalized,
        bytes_sent=stats.bytes_sent,
        bytes_received=stats.bytes_received,
        collectives=stats.collectives,
        buckets=len(plan.buckets),
        owners=dict(plan.owners()),
        planned_sent=dict(plan.bytes_sent()),
        planned_received=dict(plan.bytes_received()),
        plan_digest=plan.digest,
    )


def solve(problem: Problem) -> Outcome:
    """Run `problem` on all ranks of the calling rank's pool; every rank returns the whole."""
    return _solve(problem, world_mesh())


def solve_alone(problem: Problem) -> Outcome:
    """Run `problem` on plain tensors in this process."""
    return _solve(problem, None)


def match(one: Outcome, other: Outcome) -> bool:
    """True if parameters and momenta are equal bit by bit."""
    return digest(one.params + one.momenta) == digest(other.params + other.momenta)

"""Problems over any mesh and layout, with the right answer made from separate matrices.

Owns how a weight (matrix, stack, fused, transposed, convolution) is cut over the axes of a mesh
and which matrices it consists of; both are written here anew, from torch's `chunk` and `split`, so
that an error in the library cannot hide. Every rank compares the bits of its own shards, replicas
included. Holds no expectations about counts: those are in the tests.
"""

from __future__ import annotations

import functools
import math
import traceback
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import shardmuon
from tests import ranks
from tests.problems import local

__all__ = [
    "PLAIN",
    "Answer",
    "Grid",
    "Values",
    "Weight",
    "alone",
    "check",
    "cut",
    "matrices",
    "mesh_of",
    "placed",
    "random",
    "run",
    "same_bits",
    "solve_alone",
]

PLAIN = "plain"
"""Instead of letters: a plain tensor, replicated over the mesh."""


Values = Mapping[str, Tensor]
"""Of one weight: `parameter`, and its state by key; all whole or all as a rank holds them."""


@dataclass(frozen=True, kw_only=True)
class Weight:
    """One parameter in a group of its own.

    letters: one per mesh axis: R, the dim that a Shard cuts, or `s` / `t` for a strided shard of
    dim 0 / 1, which cuts after the axes to its right. keys: group keys.
    """

    shape: tuple[int, ...]
    letters: str
    dtype: torch.dtype = torch.float32
    gradient_dtype: torch.dtype | None = None
    keys: Mapping[str, Any] = field(default_factory=dict)

    def parts(self) -> int:
        """Number of matrices."""
        return len(matrices(self, torch.empty(self.shape)))


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Weights over one mesh of all ranks, and how to optimize them."""

    mesh: tuple[int, ...]
    weights: tuple[Weight, ...]
    steps: int = 2  # the first starts from zero momentum, the second from a momentum that moved
    seed: int = 0
    options: Mapping[str, Any] = field(default_factory=lambda: {"lr": 0.02})
    runtime: shardmuon.Runtime = field(
        default_factory=lambda: shardmuon.Runtime(deterministic=True)
    )


@dataclass(frozen=True)
class Answer:
    """What `check` found on one rank. fault: empty, or what is wrong."""

    fault: str = ""
    orthogonalized: tuple[int, ...] = ()
    bytes_sent: int = 0
    bytes_received: int = 0
    owners: Mapping[str, int] = field(default_factory=dict)


def random(shape: tuple[int, ...], seed: int) -> Tensor:
    """Normal float32 values on the CPU that depend on `seed` alone."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def matrices(weight: Weight, whole: Tensor) -> list[Tensor]:
    """Views [rows, cols] of a whole tensor shaped like `weight`: what Newton-Schulz runs on."""
    if weight.keys.get("flatten"):
        pieces = [whole.flatten(1)]
    else:
        pieces = list(whole) if whole.ndim == 3 else [whole]
    if weight.keys.get("transposed"):
        pieces = [piece.mT for piece in pieces]
    heads = weight.keys.get("num_heads")
    sizes = weight.keys.get("split_sizes")
    if heads:
        sizes = [pieces[0].shape[0] // heads] * heads
    return [part for piece in pieces for part in piece.split(list(sizes or piece.shape[:1]))]


def _values(grid: Grid, index: int, step: int) -> Tensor:
    """Float32 weights (step -1) or gradients of a step."""
    seed = (grid.seed * 101 + index) * 101 + step + 1
    return random(grid.weights[index].shape, seed)


def _start(grid: Grid, index: int) -> Tensor:
    return _values(grid, index, -1).to(grid.weights[index].dtype)


def _gradient(grid: Grid, index: int, step: int) -> Tensor:
    weight = grid.weights[index]
    return _values(grid, index, step).to(weight.gradient_dtype or weight.dtype)


STRUCTURE = {"split_sizes", "num_heads", "transposed", "flatten"}


def alone(grid: Grid) -> list[Values]:
    """What each weight comes to, from its matrices as separate plain parameters."""
    device = ranks.device()
    groups, params = [], []
    for index, weight in enumerate(grid.weights):
        own = [
            nn.Parameter(part.clone(memory_format=torch.contiguous_format).to(device))
            for part in matrices(weight, _start(grid, index))
        ]
        keys = {key: value for key, value in weight.keys.items() if key not in STRUCTURE}
        groups.append({**keys, "params": own})
        params.append(own)
    optimizer = shardmuon.Muon(groups, **grid.options, runtime=grid.runtime)
    for step in range(grid.steps):
        for index, (weight, own) in enumerate(zip(grid.weights, params, strict=True)):
            parts = matrices(weight, _gradient(grid, index, step))
            for p, part in zip(own, parts, strict=True):
                _set_gradient(p, part.clone(memory_format=torch.contiguous_format).to(device))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".* are plain tensors", UserWarning)
            optimizer.step()
    return [
        {
            "parameter": _joined(weight, own),
            **{
                kind: _joined(weight, [optimizer.state[p][kind] for p in own])
                for kind in optimizer.state[own[0]]
            },
        }
        for weight, own in zip(grid.weights, params, strict=True)
    ]


def _joined(weight: Weight, parts: Sequence[Tensor]) -> Tensor:
    """The whole tensor on the CPU from what each of its matrices has, whole or one column."""
    shape = list(weight.shape)
    if parts[0].shape != matrices(weight, torch.empty(shape))[0].shape:
        columns = range(1, len(shape)) if weight.keys.get("flatten") else [len(shape) - 1]
        columns = [len(shape) - 2] if weight.keys.get("transposed") else columns
        shape = [1 if dim in columns else size for dim, size in enumerate(shape)]
    whole = torch.empty(shape, dtype=parts[0].dtype)
    for view, part in zip(matrices(weight, whole), parts, strict=True):
        view.copy_(part.detach())
    return whole


def _set_gradient(parameter: Tensor, gradient: Tensor) -> None:
    if gradient.dtype != parameter.dtype:
        parameter.grad_dtype = gradient.dtype
    parameter.grad = gradient


def solve_alone(grids: Sequence[Grid]) -> list[list[Values]]:
    """`alone` for many problems: a case for a world of one rank."""
    return [alone(grid) for grid in grids]


@functools.cache
def mesh_of(shape: tuple[int, ...]) -> DeviceMesh:
    """The mesh of this shape over all ranks of the pool; made once, as groups are never freed."""
    return init_device_mesh(
        ranks.device().type, shape, mesh_dim_names=("a", "b", "c")[: len(shape)]
    )


def _dims(letters: str) -> list[int | None]:
    return [{"R": None, "s": 0, "t": 1}.get(x, int(x) if x.isdigit() else None) for x in letters]


def placements_of(letters: str, shape: tuple[int, ...]) -> list[Placement]:
    """torch's placements for `letters` on a mesh of `shape`."""
    dims = _dims(letters)
    result: list[Placement] = []
    for axis, (letter, dim) in enumerate(zip(letters, dims, strict=True)):
        if dim is None:
            result.append(Replicate())
            continue
        right = [shape[other] for other in range(axis + 1, len(shape)) if dims[other] == dim]
        factor = math.prod(right) if letter in "st" else 1
        result.append(_StridedShard(dim, split_factor=factor) if factor > 1 else Shard(dim))
    return result


def cut(whole: Tensor, letters: str, shape: tuple[int, ...], coordinate: Sequence[int]) -> Tensor:
    """The part at `coordinate` of a mesh of `shape`; a strided axis cuts after those to its right.

    Ceil-first chunks without padding, empty where nothing is left: torch's own rule.
    """
    if letters == PLAIN:
        return whole
    order = [axis for axis, letter in enumerate(letters) if letter not in "st"]
    order += [axis for axis in reversed(range(len(letters))) if letters[axis] in "st"]
    for axis in order:
        dim = _dims(letters)[axis]
        if dim is not None:
            chunks = whole.chunk(shape[axis], dim)
            if coordinate[axis] < len(chunks):
                whole = chunks[coordinate[axis]]
            else:
                whole = whole.narrow(dim, 0, 0)
    return whole


def placed(whole: Tensor, letters: str, mesh: DeviceMesh) -> Tensor:
    """`whole` on the rank's device, cut as `letters` say, without communication."""
    shape = tuple(mesh.shape)
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    part = cut(whole, letters, shape, coordinate).clone(memory_format=torch.contiguous_format)
    part = part.to(ranks.device())
    if letters == PLAIN:
        return part
    return DTensor.from_local(
        part,
        mesh,
        placements_of(letters, shape),
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Equal dtype, shape and bits, wherever they are."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    left, right = (
        t.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for t in (one, other)
    )
    return left.equal(right)


def check(grids: Sequence[Grid], right: Sequence[list[Values]]) -> list[Answer]:
    """Solve every problem on this rank and compare its shards with those of the right answers."""
    return [_check(grid, answer) for grid, answer in zip(grids, right, strict=True)]


def _check(grid: Grid, right: list[Values]) -> Answer:
    try:
        return _solve(grid, right)
    except Exception:  # all ranks raise alike, and a batch of problems goes on
        return Answer(traceback.format_exc())


def run(grid: Grid) -> tuple[list[nn.Parameter], shardmuon.Muon, list[int]]:
    """Take all steps on this rank: parameters, optimizer, matrices orthogonalized in each step."""
    mesh = mesh_of(grid.mesh)
    params = [
        nn.Parameter(placed(_start(grid, index), weight.letters, mesh))
        for index, weight in enumerate(grid.weights)
    ]
    groups = [
        {**weight.keys, "params": [(f"w{index}", p)]}
        for index, (weight, p) in enumerate(zip(grid.weights, params, strict=True))
    ]
    optimizer = shardmuon.Muon(groups, **grid.options, mesh=mesh, runtime=grid.runtime)
    counts = []
    for step in range(grid.steps):
        for index, (weight, p) in enumerate(zip(grid.weights, params, strict=True)):
            _set_gradient(p, placed(_gradient(grid, index, step), weight.letters, mesh))
        optimizer.step()
        counts.append(optimizer.stats.matrices_orthogonalized)
    return params, optimizer, counts


def _solve(grid: Grid, right: list[Values]) -> Answer:
    mesh = mesh_of(grid.mesh)
    params, optimizer, counts = run(grid)
    stats, plan = optimizer.stats, optimizer.plan
    rank = dist.get_rank()
    faults = []
    if stats.bytes_sent != plan.bytes_sent().get(rank, 0):
        faults.append(f"sent {stats.bytes_sent}, planned {plan.bytes_sent().get(rank, 0)}")
    if stats.bytes_received != plan.bytes_received().get(rank, 0):
        faults.append(f"received {stats.bytes_received}, planned {plan.bytes_received()}")
    for index, (weight, p) in enumerate(zip(grid.weights, params, strict=True)):
        found = {"parameter": p, **optimizer.state[p]}
        faults += _differences(f"w{index}", weight, found, right[index], mesh)
    return Answer(
        "\n".join(faults),
        tuple(counts),
        stats.bytes_sent,
        stats.bytes_received,
        dict(plan.owners()),
    )


def _differences(
    name: str,
    weight: Weight,
    found: Values,
    right: Values,
    mesh: DeviceMesh,
) -> list[str]:
    """What of a parameter and its state is not as it should be."""
    coordinate, shape = mesh.get_coordinate(), tuple(mesh.shape)
    assert coordinate is not None
    faults = [] if found.keys() == right.keys() else [f"{name}: has {list(found)}"]
    for kind, whole in right.items():
        tensor, part = found[kind], cut(whole, weight.letters, shape, coordinate)
        if not same_bits(local(tensor), part):
            held = local(tensor).detach().cpu()
            size = "other shape or dtype"
            if held.shape == part.shape:
                size = f"off by {(held.double() - part.double()).abs().max()}"
            faults.append(f"{name}: {kind} differs, {size}")
        if tensor.shape != whole.shape:
            faults.append(f"{name}: {kind} has shape {tuple(tensor.shape)}")
        if weight.letters != PLAIN:
            assert isinstance(tensor, DTensor)
            if list(tensor.placements) != placements_of(weight.letters, shape):
                faults.append(f"{name}: {kind} has placements {tensor.placements}")
            if tensor.device_mesh != mesh:
                faults.append(f"{name}: {kind} is on another mesh")
    return faults

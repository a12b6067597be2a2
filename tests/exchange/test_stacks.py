"""Expert stacks, fused weights, transposed weights and convolutions: each matrix by itself.

The right answers are those of separate 2-D parameters in one process, bit by bit; numbers that do
not come from the library stand beside them.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import shardmuon
from tests import ranks, reference
from tests.conftest import Worlds
from tests.grids import (
    Grid,
    Values,
    Weight,
    check,
    matrices,
    mesh_of,
    placed,
    same_bits,
    solve_alone,
)
from tests.problems import local, whole, world_mesh
from tests.reference import Rule, relative_error

EXPERTS, ROWS, COLS = 4, 6, 10
UPDATE_NORMS = [2.11092, 2.04164, 2.08120, 2.11393]
"""Frobenius norm of each expert's first update (gradient of expert t: reference times 10^t)."""

STACK_LAYOUTS = [
    *[((world,), letters) for world in (1, 2, 4) for letters in "R012"],
    *[((2, 2), letters) for letters in ("R0", "0R", "00", "s0", "01", "10", "02", "12", "21")],
    *[((2, 2), letters) for letters in ("R1", "2R", "11", "t1", "22", "RR")],
]


def expert_gradients() -> Tensor:
    experts = [reference.gradient(ROWS, COLS, t) * 10**t for t in range(EXPERTS)]
    return torch.stack([torch.from_numpy(expert) for expert in experts]).float()


def _first_update(mesh_shape: tuple[int, ...], letters: str) -> tuple[list[float], int, int, int]:
    """Norm of each expert's update, matrices orthogonalized here, bytes sent and received."""
    mesh = mesh_of(mesh_shape)
    p = nn.Parameter(placed(torch.zeros(EXPERTS, ROWS, COLS), letters, mesh))
    optimizer = shardmuon.Muon([("w", p)], lr=1.0, weight_decay=0.0, ns_dtype=torch.float32)
    p.grad = placed(expert_gradients(), letters, mesh)
    optimizer.step()
    norms = [float(expert.double().norm()) for expert in whole(p)]
    stats = optimizer.stats
    return norms, stats.matrices_orthogonalized, stats.bytes_sent, stats.bytes_received


@pytest.mark.parametrize(("mesh", "letters"), STACK_LAYOUTS)
@pytest.mark.supports(
    "stacks of experts `[experts, rows, cols]`, sharded over experts, rows or columns"
)
def test_experts_are_matrices_of_their_own(
    pools: Worlds, mesh: tuple[int, ...], letters: str
) -> None:
    answers = pools.run(math.prod(mesh), _first_update, mesh, letters)
    for norms, *_ in answers:
        assert norms == pytest.approx(UPDATE_NORMS, rel=1e-4)
    assert sum(count for _, count, _, _ in answers) == EXPERTS
    # Whole experts on every rank and none held twice: nothing needs to travel.
    still = math.prod(mesh) == 1 or set(letters) <= {"0", "s"}
    assert all((sent == received == 0) == still for _, _, sent, received in answers)


def _empty_experts(silent: bool) -> tuple[Tensor, int, int]:
    """Five experts over four ranks: weights after two steps, matrices done, bytes sent here."""
    mesh = world_mesh()
    p = nn.Parameter(placed(five("weights"), "0", mesh))
    optimizer = shardmuon.Muon([("w", p)], lr=0.02, ns_dtype=torch.float32)
    for step in range(2):
        p.grad = placed(five("gradients", step), "0", mesh)
        if silent and not local(p).numel():
            p.grad = None
        optimizer.step()
    stats = optimizer.stats
    return whole(p), stats.matrices_orthogonalized, stats.bytes_sent


def five(kind: str, step: int = 0) -> Tensor:
    """[5, 6, 10]; the gradient of expert 3 is zero."""
    if kind == "weights":
        return torch.stack([torch.from_numpy(reference.weights(6, 10)).float()] * 5)
    experts = [reference.gradient(6, 10, 5 * step + t) * (t != 3) for t in range(5)]
    return torch.stack([torch.from_numpy(expert) for expert in experts]).float()


@pytest.mark.parametrize("silent", [False, True])
@pytest.mark.supports("experts without tokens and ranks without experts (1e-4)")
def test_empty_shards_and_experts_without_tokens(pools: Worlds, silent: bool) -> None:
    answers = pools.run(4, _empty_experts, silent)
    start = reference.weights(6, 10)
    for value, _, sent in answers:
        assert value[3].equal(five("weights")[3] * (1 - 0.02 * 0.1) * (1 - 0.02 * 0.1))
        for t in (0, 1, 2, 4):
            right, _ = Rule().run(start, [reference.gradient(6, 10, 5 * s + t) for s in (0, 1)])
            assert relative_error(value[t], right) < 1e-4
        assert sent == 0  # two experts are the largest share with and without moving them
    assert [count for _, count, _ in answers] == [2, 2, 1, 0]


def _unbalanced_stack() -> tuple[dict[str, int], int, int]:
    """A stack whose experts all lie on the first two of four ranks, beside matrices of others."""
    mesh = world_mesh()
    stack = nn.Parameter(placed(torch.zeros(9, 16, 16), "0", mesh))  # 3, 3, 3, 0 experts
    optimizer = shardmuon.Muon([("w", stack)], lr=0.02)
    stack.grad = placed(torch.ones(9, 16, 16), "0", mesh)
    optimizer.step()
    return (
        dict(optimizer.plan.owners()),
        optimizer.stats.matrices_orthogonalized,
        optimizer.stats.bytes_sent - optimizer.plan.bytes_sent().get(dist.get_rank(), 0),
    )


def test_owners_of_experts_are_balanced(pools: Worlds) -> None:
    for owners, count, difference in pools.run(4, _unbalanced_stack):
        loads = [list(owners.values()).count(rank) for rank in range(4)]
        assert max(loads) == 3 == math.ceil(9 / 4)
        assert sorted(owners) == sorted(f"w[{t}]" for t in range(9))
        assert count in loads
        assert difference == 0


# -- structure: the bits of separate matrices ----------------------------------------------------

QKV = {"split_sizes": [5, 7, 6]}
STRUCTURES: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "fused": ((18, 48), QKV),
    "fused columns": ((48, 18), {**QKV, "transposed": True}),
    "heads": ((24, 10), {"num_heads": 6}),
    "heads in columns": ((10, 24), {"num_heads": 6, "transposed": True}),
    "transposed": ((5, 21), {"transposed": True}),
    "stack": ((5, 7, 9), {}),
    "transposed stack": ((5, 7, 9), {"transposed": True}),
    "fused stack": ((3, 18, 7), QKV),
    "fused transposed stack": ((3, 7, 18), {**QKV, "transposed": True}),
    "heads of a stack": ((3, 12, 5), {"num_heads": 3}),
}
MESHES = [
    *[((world,), letters) for world in (2, 3, 4) for letters in "01R"],
    *[((2, 2), letters) for letters in ("01", "10", "R0", "1R", "00", "s0", "t1")],
    ((4,), "2"),
    ((2, 2), "12"),
]


def structured(letters: str) -> tuple[Weight, ...]:
    """Every structure that `letters` can cut, with both scales."""
    dims = 3 if "2" in letters else 2
    return tuple(
        Weight(shape=shape, letters=letters, keys={**keys, "adjust_lr_fn": mode})
        for shape, keys in STRUCTURES.values()
        for mode in (None, "match_rms_adamw")
        if len(shape) >= dims
    )


@pytest.fixture(scope="module")
def right(pools: Worlds) -> dict[int, list[Values]]:
    """What one rank computes for so many weights: it knows neither mesh nor letters."""
    grids = [Grid(mesh=(1,), weights=structured(letters)) for letters in ("0", "2")]
    (answers,) = pools.run(1, solve_alone, grids)
    return {len(grid.weights): answer for grid, answer in zip(grids, answers, strict=True)}


@pytest.mark.parametrize(("mesh", "letters"), MESHES)
@pytest.mark.parametrize("exchange", ["auto", "all_gather"])
@pytest.mark.supports(
    "fused weights (`split_sizes`) and heads (`num_heads`), borders inside shards"
)
def test_structure_gives_the_bits_of_separate_matrices(
    pools: Worlds,
    right: dict[int, list[Values]],
    mesh: tuple[int, ...],
    letters: str,
    exchange: Any,
) -> None:
    weights = structured(letters)
    runtime = shardmuon.Runtime(deterministic=True, exchange=exchange, bucket_bytes=4000)
    grid = Grid(mesh=mesh, weights=weights, runtime=runtime)
    found = pools.run(math.prod(mesh), check, [grid], [right[len(weights)]])
    answers = [answer for (answer,) in found]
    assert [answer.fault for answer in answers] == [""] * math.prod(mesh)
    totals = [sum(step) for step in zip(*(a.orthogonalized for a in answers), strict=True)]
    assert totals == [sum(weight.parts() for weight in weights)] * grid.steps


@pytest.mark.parametrize(
    ("mesh", "letters"),
    [((2,), "0"), ((4,), "0"), ((4,), "1"), ((4,), "R"), ((2, 2), "R0"), ((2, 2), "s0")],
)
@pytest.mark.supports("convolutions (`flatten`)")
def test_convolutions_give_the_bits_of_flat_matrices(
    pools: Worlds, mesh: tuple[int, ...], letters: str
) -> None:
    shapes = ((10, 3, 3, 3), (5, 2, 4), (3, 7, 1, 1), (2, 3, 2, 2, 2))
    weights = tuple(Weight(shape=s, letters=letters, keys={"flatten": True}) for s in shapes)
    grid = Grid(mesh=mesh, weights=weights)
    (right,) = pools.run(1, solve_alone, [grid])
    answers = [answer for (answer,) in pools.run(math.prod(mesh), check, [grid], right)]
    assert [answer.fault for answer in answers] == [""] * math.prod(mesh)
    assert sum(answer.orthogonalized[-1] for answer in answers) == len(shapes)


def _twins(letters: str) -> list[bool]:
    """A transposed weight and its twin after three steps, in matrices and in stacks."""
    mesh = world_mesh()
    turned = letters.translate(str.maketrans("01", "10"))
    stacked = letters.translate(str.maketrans("01", "12"))
    stacked_turned = letters.translate(str.maketrans("01", "21"))
    shapes = [((10, 7), turned, letters), ((3, 5, 8), stacked_turned, stacked)]
    pairs = []
    for shape, mine, other in shapes:
        start = torch.randn(shape, generator=torch.Generator().manual_seed(1))
        pairs.append(
            (
                nn.Parameter(placed(start, mine, mesh)),
                nn.Parameter(placed(start.mT.contiguous(), other, mesh)),
                (mine, other),
            )
        )
    groups: list[dict[str, Any]] = [
        {"params": [(f"turned{i}", p) for i, (p, _, _) in enumerate(pairs)], "transposed": True},
        {"params": [(f"twin{i}", p) for i, (_, p, _) in enumerate(pairs)]},
    ]
    optimizer = shardmuon.Muon(groups, lr=0.02)
    for step in range(3):
        for p, twin, (mine, other) in pairs:
            gradient = torch.randn(p.shape, generator=torch.Generator().manual_seed(2 + step))
            p.grad = placed(gradient, mine, mesh)
            twin.grad = placed(gradient.mT.contiguous(), other, mesh)
        optimizer.step()
    return [same_bits(whole(p).mT, whole(twin)) for p, twin, _ in pairs]


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("letters", ["0", "1", "R"])
@pytest.mark.supports("weights stored transposed")
def test_transposed_weights_are_their_twins(pools: Worlds, world: int, letters: str) -> None:
    assert all(all(equal) for equal in pools.run(world, _twins, letters))


class Attention(nn.Module):
    """One projection of eight heads."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(256, 256, bias=False)


def _heads_of_a_sharded_layer(how: str) -> tuple[Tensor, list[int]]:
    """Weight after a step with `num_heads` from zero weights; rows this rank holds."""
    model = Attention().to(ranks.device())
    nn.init.zeros_(model.q.weight)
    mesh = init_device_mesh(ranks.device().type, (dist.get_world_size(),))
    if how == "tensor parallel":
        parallelize_module(model, mesh, {"q": ColwiseParallel()})
    else:
        fully_shard(model, mesh=mesh)
    p = model.q.weight
    assert isinstance(p, DTensor)
    groups = [{"params": [("q.weight", p)], "num_heads": 8}]
    optimizer = shardmuon.Muon(groups, lr=1.0, weight_decay=0.0, ns_dtype=torch.float32)
    p.grad = distribute_tensor(head_gradient().to(ranks.device()), p.device_mesh, p.placements)
    optimizer.step()
    return whole(p), list(local(p).shape)


def head_gradient() -> Tensor:
    return torch.randn(256, 256, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("how", ["tensor parallel", "fsdp"])
def test_heads_are_those_of_the_global_shape(pools: Worlds, how: str) -> None:
    for value, held in pools.run(2, _heads_of_a_sharded_layer, how):
        assert held == [128, 256]
        for rows, gradient in zip(value.split(32), head_gradient().split(32), strict=True):
            right = -reference.newton_schulz(gradient.double().numpy())
            assert relative_error(rows, right) < 1e-4


# -- scale ----------------------------------------------------------------------------------------

BARE = {"lr": 1.0, "weight_decay": 0.0, "ns_coefficients": (1.0, 0.0, 0.0), "ns_steps": 1}
"""Updates of norm 1 times their scale, up to rounding."""


def _norms(shape: tuple[int, ...], letters: str, keys: dict[str, Any]) -> list[float]:
    """Norm of the update of each matrix."""
    mesh = world_mesh()
    weight = Weight(shape=shape, letters=letters, keys=keys)
    p = nn.Parameter(placed(torch.zeros(shape), letters, mesh))
    groups = [{"params": [("w", p)], **keys}]
    optimizer = shardmuon.Muon(groups, **BARE, ns_dtype=torch.float32)  # type: ignore[arg-type]
    gradient = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    p.grad = placed(gradient, letters, mesh)
    optimizer.step()
    return [float(part.double().norm()) for part in matrices(weight, whole(p))]


RMS = {"adjust_lr_fn": "match_rms_adamw"}
SCALES = [
    ((64, 32, 3, 3), "0", {**RMS, "flatten": True}, [0.2 * math.sqrt(288)]),
    ((4, 32, 64), "0", RMS, [1.6] * 4),
    ((4, 32, 64), "1", RMS, [1.6] * 4),
    ((64, 4), "0", {"split_sizes": [36, 28]}, [3.0, math.sqrt(7)]),
    ((64, 4), "0", {**RMS, "split_sizes": [36, 28]}, [1.2, 0.2 * math.sqrt(28)]),
    ((64, 4), "1", {"num_heads": 4}, [2.0] * 4),
    ((4, 64), "0", {"transposed": True}, [4.0]),
    ((64, 4), "0", {"transposed": True}, [1.0]),
    ((2, 4, 64), "2", {"transposed": True, "num_heads": 4}, [2.0] * 8),
]


@pytest.mark.parametrize(("shape", "letters", "keys", "factors"), SCALES)
def test_scale_is_that_of_each_matrix(
    pools: Worlds, shape: tuple[int, ...], letters: str, keys: dict[str, Any], factors: list[float]
) -> None:
    for norms in pools.run(2, _norms, shape, letters, keys):
        assert norms == pytest.approx(factors, rel=1e-4)

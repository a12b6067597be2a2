"""Numbers: dtypes of parameters, gradients and momentum, what FSDP2 casts, bf16 and zero shards."""

from __future__ import annotations

import itertools
import math
import warnings
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

import shardmuon
from tests import models, ranks, reference
from tests.conftest import Worlds
from tests.grids import Grid, Weight, check, mesh_of, placed, random, same_bits, solve_alone
from tests.problems import assert_ranks_agree, local, whole, world_mesh
from tests.reference import Rule, relative_error

RUNTIME = shardmuon.Runtime(deterministic=True)


F32, BF16 = torch.float32, torch.bfloat16


@pytest.mark.parametrize(("mesh", "letters"), [((2,), "0"), ((3,), "1"), ((2, 2), "R0")])
@pytest.mark.parametrize("ns_dtype", [F32, BF16])
def test_parameter_gradient_and_momentum_dtypes_mix(
    pools: Worlds, mesh: tuple[int, ...], letters: str, ns_dtype: torch.dtype
) -> None:
    weights = tuple(
        Weight(
            shape=(10, 8) if gradient is None else (3, 5, 7),
            letters=letters,
            dtype=dtype,
            gradient_dtype=gradient,
            keys={"momentum_dtype": momentum},
        )
        for dtype in (F32, BF16)
        for gradient in (None, F32, BF16)
        for momentum in (None, F32, BF16)
    )
    options = {"lr": 0.02, "ns_dtype": ns_dtype}
    grid = Grid(mesh=mesh, weights=weights, options=options)
    (right,) = pools.run(1, solve_alone, [grid])
    for values, weight in zip(right[0], weights, strict=True):
        assert values["momentum_buffer"].dtype == (weight.keys["momentum_dtype"] or weight.dtype)
    for (answer,) in pools.run(math.prod(mesh), check, [grid], right):
        assert answer.fault == ""


def _foreign_gradient_dtype(dtype: torch.dtype, foreign: torch.dtype) -> tuple[Tensor, str, str]:
    """Weight after three steps; dtypes of momentum before and after the first of them."""
    mesh = world_mesh()
    start = torch.from_numpy(reference.weights(10, 8)).to(dtype)
    p = nn.Parameter(placed(start, "0", mesh))
    optimizer = shardmuon.Muon([("w", p)], lr=0.02, ns_dtype=F32)
    dtypes = [str(optimizer.state_dict()["state"][0]["momentum_buffer"].dtype)]
    for step in range(3):
        p.grad_dtype = foreign
        p.grad = placed(torch.from_numpy(reference.gradient(10, 8, step)).to(foreign), "0", mesh)
        before = local(p.grad).clone()
        optimizer.step()
        assert same_bits(local(p.grad), before)
        dtypes.append(str(optimizer.state_dict()["state"][0]["momentum_buffer"].dtype))
    return whole(p), dtypes[0], dtypes[1]


@pytest.mark.parametrize(("dtype", "foreign"), [(F32, BF16), (BF16, F32)])
def test_foreign_gradient_dtype_follows_the_reference(
    pools: Worlds, dtype: torch.dtype, foreign: torch.dtype
) -> None:
    right, _ = Rule().golden(10, 8)
    for value, before, after in pools.run(2, _foreign_gradient_dtype, dtype, foreign):
        assert value.dtype == dtype
        assert before == after == str(dtype)
        assert relative_error(value.float(), right) < 5e-2


def _mixed_precision(dtype: torch.dtype, offload: bool) -> tuple[bool, list[str]]:
    """FSDP2 with bf16 compute and fp32 reduction: finite and lower loss; dtypes of momenta."""
    policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=F32)
    options: dict[str, Any] = {"mesh": world_mesh(), "mp_policy": policy}
    if offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    model = models.make().to(ranks.device(), dtype)
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    optimizer = models.optimizer_of(model)
    losses = []
    for _ in range(12):
        losses.append(models.backward(model, 0))
        optimizer.step()
    assert_ranks_agree(list(model.parameters()))
    states = [s["momentum_buffer"] for s in optimizer.state.values() if "momentum_buffer" in s]
    return losses[-1] < 0.7 * losses[0], sorted({str(m.dtype) for m in states})


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_fsdp_mixed_precision_trains(pools: Worlds, dtype: torch.dtype) -> None:
    for falls, dtypes in pools.run(2, _mixed_precision, dtype, False):
        assert falls
        assert dtypes == [str(dtype)]


def _offloaded(offload: bool) -> list[Tensor]:
    """Three steps of a sharded model, on the CPU between steps or not."""
    options: dict[str, Any] = {"mesh": world_mesh()}
    if offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    model = models.make().to(ranks.device())
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    optimizer = models.optimizer_of(model)
    for step in range(3):
        models.backward(model, step)
        optimizer.step()
    # An offloaded DTensor cannot gather itself without a backend for the CPU.
    return [local(p).cpu() for p in model.parameters()]


@pytest.mark.supports(
    "CPU offload (`CPUOffloadPolicy`); on GPUs within 1e-3 of parameters kept there"
)
def test_cpu_offload_gives_the_same_result(pools: Worlds) -> None:
    pairs = zip(pools.run(2, _offloaded, True), pools.run(2, _offloaded, False), strict=True)
    for offloaded, kept in pairs:
        for one, other in zip(offloaded, kept, strict=True):
            if ranks.backend() == "gloo":
                assert one.equal(other)
            else:  # AdamW and the updates round on another device, and bf16 NS amplifies that
                torch.testing.assert_close(one, other, rtol=0, atol=1e-3)


def _load_other_momentum(
    saved_dtype: torch.dtype | None, own_dtype: torch.dtype | None
) -> tuple[list[str], bool, str]:
    """(warnings of the load, whether the momentum is the saved one cast once, its dtype)."""
    mesh = world_mesh() if dist.is_initialized() else None

    def made(momentum_dtype: torch.dtype | None) -> tuple[nn.Parameter, shardmuon.Muon]:
        value = random((10, 8), 0).to(BF16)
        p = nn.Parameter(placed(value, "0", mesh) if mesh else value)
        return p, shardmuon.Muon([("w", p)], momentum_dtype=momentum_dtype, runtime=RUNTIME)

    p, optimizer = made(saved_dtype)
    for step in range(2):
        gradient = random((10, 8), 1 + step).to(BF16)
        p.grad = placed(gradient, "0", mesh) if mesh else gradient
        optimizer.step()
    saved = optimizer.state_dict()
    q, other = made(own_dtype)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        other.load_state_dict(saved)
    assert {w.category for w in caught} <= {UserWarning}
    before = local(optimizer.state[p]["momentum_buffer"])
    after = local(other.state[q]["momentum_buffer"])
    equal = same_bits(after, before.to(after.dtype))
    assert other.param_groups[0]["momentum_dtype"] == own_dtype
    assert p.grad is not None
    q.grad = p.grad.clone()
    other.step()
    return [str(w.message) for w in caught], equal, str(after.dtype)


DTYPE_LOADS = [
    (None, None, 0, BF16),
    (F32, F32, 0, F32),
    (BF16, None, 0, BF16),
    (None, BF16, 0, BF16),
    (F32, None, 1, BF16),
    (F32, BF16, 1, BF16),
    (None, F32, 1, F32),
]


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(("saved", "own", "expected", "dtype"), DTYPE_LOADS)
def test_the_running_momentum_dtype_wins_on_load(
    pools: Worlds,
    world: int,
    saved: torch.dtype | None,
    own: torch.dtype | None,
    expected: int,
    dtype: torch.dtype,
) -> None:
    for messages, equal, found in pools.run(world, _load_other_momentum, saved, own):
        assert len(messages) == expected
        assert equal
        assert found == str(dtype)
        for message in messages:
            assert "float32" in message
            assert "bfloat16" in message


# -- energy in few rows ---------------------------------------------------------------------------


PARTS: list[list[int] | None] = [None, [4, 6], [2, 3, 5]]


def few_rows(step: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """A gradient that is zero outside of rows 0-2."""
    gradient = reference.gradient(10, 8, step)
    gradient[3:] = 0.0
    return gradient


def _energy_in_few_rows(letters: str) -> list[list[Tensor]]:
    """Weights of each of PARTS before 20 bf16 steps and after each of them."""
    mesh = mesh_of((2, 2))
    params = [nn.Parameter(placed(torch.zeros(10, 8), letters, mesh)) for _ in PARTS]
    settings: dict[str, Any] = {"lr": 1.0, "weight_decay": 0.0, "ns_dtype": torch.bfloat16}
    groups: list[dict[str, Any]] = [
        {"params": [(f"w{i}", p)], **({"split_sizes": sizes} if sizes else {})}
        for i, (p, sizes) in enumerate(zip(params, PARTS, strict=True))
    ]
    optimizer = shardmuon.Muon(groups, **settings, runtime=RUNTIME)
    found = [[whole(p) for p in params]]
    for step in range(20):
        for p in params:
            p.grad = placed(torch.from_numpy(few_rows(step)).float(), letters, mesh)
        optimizer.step()
        found.append([whole(p) for p in params])
    return [list(values) for values in zip(*found, strict=True)]


def largest_and_worst(values: list[Tensor], sizes: list[int]) -> tuple[float, float]:
    """Largest singular value of an update over its scale, and largest error of one."""
    rule = Rule(lr=1.0, weight_decay=0.0)
    rights = [(np.zeros((n, 8)), np.zeros((n, 8))) for n in sizes]
    largest = worst = 0.0
    for step, (before, after) in enumerate(itertools.pairwise(values)):
        pieces = np.split(few_rows(step), np.cumsum(sizes)[:-1])
        rows = (after - before).double().split(sizes)
        for i, (piece, mine) in enumerate(zip(pieces, rows, strict=True)):
            factor = reference.scale(sizes[i], 8, None)
            largest = max(largest, float(torch.linalg.matrix_norm(mine, 2)) / factor)
            start = rights[i][0]
            rights[i] = rule.step(*rights[i], piece)
            right = rights[i][0] - start
            worst = max(worst, float(np.linalg.norm(mine.numpy() - right)) / np.sqrt(8))
    return largest, worst


@pytest.mark.parametrize("letters", ["00", "01", "R0", "s0"])
def test_shards_and_parts_that_hold_only_zeros_stay_finite(pools: Worlds, letters: str) -> None:
    for found in pools.run(4, _energy_in_few_rows, letters):
        for values, sizes in zip(found, PARTS, strict=True):
            assert values[-1].isfinite().all()
            largest, worst = largest_and_worst(values, sizes or [10])
            assert largest <= 1.22
            assert worst < 5e-2

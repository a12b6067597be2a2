"""One result on every world size, placement, exchange kind and bucket size: bit by bit.

Gradients are placed from the same global tensors, so that no reduction order enters. "Bits" means
equality with a single rank of the same backend; the distance to float64 is tested beside it.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import pytest
import torch

import shardmuon
from tests import reference
from tests.conftest import Worlds
from tests.problems import (
    PLACEMENTS,
    SHAPES,
    Outcome,
    Problem,
    build,
    local,
    match,
    momenta,
    place,
    set_gradients,
    solve,
    whole,
    world_mesh,
)
from tests.reference import Rule, relative_error
from tests.test_reference import GOLDEN, Golden

EXCHANGES: list[Literal["auto", "all_gather"]] = ["auto", "all_gather"]
MODEL = Problem()


def runtime(**settings: Any) -> shardmuon.Runtime:
    return shardmuon.Runtime(deterministic=True, **settings)


@pytest.fixture(scope="module")
def one_rank(pools: Worlds) -> Outcome:
    return pools.run(1, solve, MODEL)[0]


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("golden", GOLDEN)
def test_golden_values(pools: Worlds, world: int, golden: Golden) -> None:
    options = {**golden.options(), "ns_dtype": torch.float32}
    for outcome in pools.run(world, solve, Problem(shapes=((10, 8),), options=options)):
        golden.check(outcome.params[0], outcome.momenta[0], tolerance=1e-4)


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.supports(
    "meshes of one axis: `Shard(0)`, `Shard(1)`, `Replicate`; uneven, empty and one-row shards"
)
def test_bits_do_not_depend_on_the_layout(
    pools: Worlds,
    one_rank: Outcome,
    placement: str,
    world: int,
    exchange: Literal["auto", "all_gather"],
) -> None:
    problem = Problem(placements=(placement,), runtime=runtime(exchange=exchange))
    assert match(pools.run(world, solve, problem)[0], one_rank)


def test_one_rank_follows_the_reference(pools: Worlds) -> None:
    options = {"lr": 0.02, "ns_dtype": torch.float32}
    outcome = pools.run(1, solve, Problem(steps=5, options=options))[0]
    for shape, p, m in zip(SHAPES, outcome.params, outcome.momenta, strict=True):
        right_p, right_m = Rule().golden(*shape, steps=5)
        assert relative_error(p, right_p) < 1e-4
        assert relative_error(m, right_m) < 1e-4


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.supports("several placements in one group")
def test_mixed_placements_in_one_group(pools: Worlds, one_rank: Outcome, world: int) -> None:
    for order in (("rows", "columns", "replicate"), ("replicate", "rows")):
        problem = Problem(placements=order)
        assert match(pools.run(world, solve, problem)[0], one_rank)


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_bits_do_not_depend_on_the_bucket_size(
    pools: Worlds,
    one_rank: Outcome,
    placement: str,
    exchange: Literal["auto", "all_gather"],
) -> None:
    counts = []
    for bucket_bytes in (1, 3000, 2**26):
        settings = runtime(exchange=exchange, bucket_bytes=bucket_bytes)
        outcome = pools.run(3, solve, Problem(placements=(placement,), runtime=settings))[0]
        counts.append(outcome.buckets)
        assert match(outcome, one_rank)
    assert counts[0] > counts[2] == 1, f"buckets {counts}: the pipeline was not tested"


# What NS on each rank's own rows would be off by, relative, over 2, 4 and 8 ranks.
BLOCKWISE_ERROR = {(256, 256): 0.53, (512, 128): 0.65, (128, 512): 0.35}


@pytest.mark.parametrize("world", [2, 4, 8])
@pytest.mark.parametrize("placement", ["rows", "columns"])
def test_update_is_that_of_the_whole_matrix(pools: Worlds, world: int, placement: str) -> None:
    shapes = tuple(BLOCKWISE_ERROR)
    options = {"lr": 1.0, "weight_decay": 0.0, "ns_dtype": torch.float32}
    problem = Problem(shapes=shapes, steps=1, seed=0, placements=(placement,), options=options)
    outcome = pools.run(world, solve, problem)[0]
    for index, (rows, cols) in enumerate(shapes):
        start = torch.randn(rows, cols, generator=torch.Generator().manual_seed(index * 1009))
        gradient = torch.randn(
            rows, cols, generator=torch.Generator().manual_seed(index * 1009 + 1)
        )
        right = -reference.scale(rows, cols, None) * reference.newton_schulz(
            gradient.double().numpy()
        )
        error = relative_error(outcome.params[index].double() - start.double(), right)
        assert error < 1e-4 < BLOCKWISE_ERROR[rows, cols] / 1000


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_every_matrix_is_orthogonalized_once_and_differs_from_sgd(
    pools: Worlds, world: int
) -> None:
    for placement in PLACEMENTS:
        problem = Problem(steps=2, placements=(placement,), options={"lr": 0.02})
        outcomes = pools.run(world, solve, problem)
        counts = [sum(o.orthogonalized[step] for o in outcomes) for step in range(2)]
        assert counts == [len(SHAPES)] * 2
        for rank, outcome in enumerate(outcomes):
            owned = [name for name, owner in outcome.owners.items() if owner == rank]
            assert outcome.orthogonalized[-1] == len(owned)
        assert {tuple(o.owners.items()) for o in outcomes} == {tuple(outcomes[0].owners.items())}
    shape, p = SHAPES[0], outcomes[0].params[0].double().numpy()
    weight = reference.weights(*shape)
    sgd = weight - 0.02 * sum(reference.gradient(*shape, t) for t in range(2))
    assert relative_error(p - weight, sgd - weight) > 0.5


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.supports("bf16 and fp32 parameters in one group (fp32: 1e-4, bf16: one rounding)")
def test_mixed_dtypes_do_not_meet_in_a_buffer(pools: Worlds, world: int) -> None:
    problem = Problem(
        shapes=((10, 8),) * 4,
        dtypes=(torch.bfloat16, torch.float32),
        options={"lr": 0.02, "ns_dtype": torch.float32},
    )
    outcome = pools.run(world, solve, problem)[0]
    right, _ = Rule().golden(10, 8)
    one_process = pools.run(1, solve, problem)[0]
    for index, p in enumerate(outcome.params):
        assert p.dtype == problem.dtypes[index % 2]
        if p.dtype == torch.float32:
            assert relative_error(p, right) < 1e-4
        else:
            assert relative_error(p.float(), right) < 2**-7
    assert match(outcome, one_process)


@pytest.mark.parametrize("ns_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("momentum_dtype", [None, torch.float32, torch.bfloat16])
def test_wire_and_momentum_dtypes_keep_the_bits(
    pools: Worlds, ns_dtype: torch.dtype, momentum_dtype: torch.dtype | None
) -> None:
    options = {"lr": 0.02, "ns_dtype": ns_dtype, "momentum_dtype": momentum_dtype}
    problem = Problem(
        shapes=((10, 8), (5, 7), (7, 5), (1, 9)),
        dtypes=(torch.float32, torch.bfloat16),
        placements=("rows", "rows", "columns", "replicate"),
        options=options,
    )
    one, three = (pools.run(world, solve, problem)[0] for world in (1, 3))
    assert match(one, three)
    expected = momentum_dtype or torch.float32
    assert one.momenta[0].dtype == three.momenta[0].dtype == expected


def _placed(array: reference.Array, placement: str) -> torch.Tensor:
    return place(torch.from_numpy(array).float(), world_mesh(), PLACEMENTS[placement])


def _zero_then_normal(placement: str, ns_dtype: torch.dtype) -> tuple[list[bool], list[float]]:
    options = {"lr": 0.02, "ns_dtype": ns_dtype}
    problem = Problem(placements=(placement,), options=options)
    params, optimizer = build(problem, world_mesh())
    before = [local(p).clone() for p in params]
    for p in params:
        p.grad = torch.zeros_like(p)
    optimizer.step()
    exact = [local(p).equal(b * (1 - 0.02 * 0.1)) for p, b in zip(params, before, strict=True)]
    still = [not local(m).any() for m in momenta(optimizer, params)]
    errors = []
    for p, shape in zip(params, SHAPES, strict=True):
        p.grad = _placed(reference.gradient(*shape, 0), placement)
    starts = [whole(p).double().numpy() for p in params]
    optimizer.step()
    for p, start, shape in zip(params, starts, SHAPES, strict=True):
        right, _ = Rule().run(start, [reference.gradient(*shape, 0)])
        errors.append(relative_error(whole(p), right))
    return exact + still, errors


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("ns_dtype", [torch.float32, torch.bfloat16])
def test_zero_gradient_decays_only_and_the_next_step_is_normal(
    pools: Worlds, placement: str, ns_dtype: torch.dtype
) -> None:
    for exact, errors in pools.run(2, _zero_then_normal, placement, ns_dtype):
        assert all(exact)
        assert max(errors) < (1e-4 if ns_dtype == torch.float32 else 1e-2)


def _norms_of_bare_updates(mode: str | None, placement: str) -> list[float]:
    options = {
        "lr": 1.0,
        "weight_decay": 0.0,
        "adjust_lr_fn": mode,
        "ns_coefficients": (1.0, 0.0, 0.0),
        "ns_steps": 1,
        "ns_dtype": torch.float32,
    }
    shapes = ((64, 1), (18, 2304), (256, 64))
    problem = Problem(shapes=shapes, placements=(placement,), options=options, seed=1)
    params, optimizer = build(problem, world_mesh())
    for p in params:
        local(p).zero_()
    set_gradients(params, problem, 0, world_mesh())
    optimizer.step()
    return [float(whole(p).double().norm()) for p in params]


@pytest.mark.parametrize("placement", ["rows", "columns"])
def test_scale_is_that_of_the_global_shape(pools: Worlds, placement: str) -> None:
    right = {"original": [8.0, 1.0, 2.0], "match_rms_adamw": [1.6, 9.6, 3.2]}
    right["spectral"] = [8.0, (18 / 2304) ** 0.5, 2.0]
    for mode, factors in right.items():
        for norms in pools.run(4, _norms_of_bare_updates, mode, placement):
            assert norms == pytest.approx(factors, rel=1e-4)


@pytest.mark.parametrize("world", [2, 4])
def test_equal_shapes_give_what_single_matrices_give(pools: Worlds, world: int) -> None:
    shapes = ((64, 24),) * 6 + ((5, 7),) * 5 + ((18, 48),)
    problem = Problem(shapes=shapes, seed=3)
    together, one = (pools.run(w, solve, problem)[0] for w in (world, 1))
    assert match(together, one)
    assert len(set(together.owners.values())) == world


def _energy_in_the_first_rows() -> tuple[float, float, float]:
    p = torch.nn.Parameter(_placed(np.zeros((10, 8)), "rows"))
    settings: dict[str, Any] = {"lr": 1.0, "weight_decay": 0.0, "ns_dtype": torch.bfloat16}
    optimizer = shardmuon.Muon([("weight", p)], **settings)
    largest = 0.0
    for step in range(20):
        gradient = reference.gradient(10, 8, step)
        gradient[3:] = 0.0
        p.grad = _placed(gradient, "rows")
        before = whole(p)
        optimizer.step()
        update = whole(p) - before
        largest = max(largest, float(torch.linalg.matrix_norm(update, 2)))
    rows_of_others = float(whole(p)[3:].abs().max())
    return largest, rows_of_others, float(whole(p).isfinite().all())


def test_ranks_that_hold_only_zeros_stay_finite(pools: Worlds) -> None:
    scale = reference.scale(10, 8, None)
    for largest, rows_of_others, finite in pools.run(4, _energy_in_the_first_rows):
        assert finite == 1.0
        assert largest <= 1.22 * scale
        assert rows_of_others < 0.05

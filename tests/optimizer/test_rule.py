"""The update rule on one process, against the float64 reference.

Tolerance 1e-4 relative where float32 NS meets float64, 5e-2 on an update in bfloat16; exact where
only the layout of the work differs.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import shardmuon
from tests import reference
from tests.problems import SHAPES, Problem, digest, match, solve_alone
from tests.reference import Rule, relative_error
from tests.test_reference import GOLDEN, Golden

FIRST_TERM_ONLY = {"ns_coefficients": (1.0, 0.0, 0.0), "ns_steps": 1}
"""Makes NS a division by the Frobenius norm, so that an update's norm is lr times its scale."""


def tensor(array: reference.Array) -> Tensor:
    return torch.from_numpy(array).float()


def one_step(weight: Tensor, gradient: Tensor, **options: Any) -> Tensor:
    """The parameter after one step from `weight` with `gradient`."""
    p = nn.Parameter(weight.clone())
    p.grad = gradient.clone()
    shardmuon.Muon([p], **options).step()
    return p.detach()


@pytest.mark.parametrize("golden", GOLDEN)
def test_golden_values(golden: Golden) -> None:
    outcome = solve_alone(Problem(shapes=((10, 8),), options=golden.options()))
    golden.check(outcome.params[0], outcome.momenta[0], tolerance=1e-4)


@pytest.mark.parametrize("mode", [None, "original", "match_rms_adamw", "spectral"])
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("momentum", [0.0, 0.95])
def test_all_shapes_follow_the_reference(mode: str | None, nesterov: bool, momentum: float) -> None:
    settings: dict[str, Any] = {"adjust_lr_fn": mode, "nesterov": nesterov, "momentum": momentum}
    outcome = solve_alone(Problem(steps=5, options={"lr": 0.02, **settings}))
    for shape, p, m in zip(SHAPES, outcome.params, outcome.momenta, strict=True):
        right_p, right_m = Rule(**settings).golden(*shape, steps=5)
        assert relative_error(p, right_p) < 1e-4
        assert relative_error(m, right_m) < 1e-4


def test_bfloat16_orthogonalization_is_close() -> None:
    weight, gradient = np.random.default_rng(0).standard_normal((2, 24, 48))
    got = one_step(tensor(weight), tensor(gradient), lr=0.02, ns_dtype=torch.bfloat16)
    right, _ = Rule().run(weight, [gradient])
    assert relative_error(got - 0.998 * tensor(weight), right - 0.998 * weight) < 5e-2


def test_momentum_is_a_running_average_not_a_decaying_sum() -> None:
    p = nn.Parameter(tensor(reference.weights(10, 8)))
    optimizer = shardmuon.Muon([p])
    p.grad = gradient = tensor(reference.gradient(10, 8, 0))
    optimizer.step()
    assert relative_error(optimizer.state[p]["momentum_buffer"], 0.05 * gradient.numpy()) < 1e-6


def test_updates_do_not_show_the_momentum_convention() -> None:
    average: reference.Array = np.zeros((10, 8))
    decaying_sum: reference.Array = np.zeros((10, 8))
    for step in range(2):
        g = reference.gradient(10, 8, step)
        average = 0.95 * average + 0.05 * g
        decaying_sum = 0.95 * decaying_sum + g
    start = torch.zeros(10, 8)
    got = one_step(start, tensor(average), momentum=0.0, lr=1.0, weight_decay=0.0)
    other = one_step(start, tensor(decaying_sum), momentum=0.0, lr=1.0, weight_decay=0.0)
    assert relative_error(other, got.double().numpy()) < 1e-5


@pytest.mark.parametrize(
    ("shape", "original", "match_rms", "spectral"),
    [
        ((4096, 1024), 2.0, 12.8, 2.0),
        ((1024, 4096), 1.0, 12.8, 0.5),
        ((1024, 1024), 1.0, 6.4, 1.0),
        ((64, 1), 8.0, 1.6, 8.0),
        ((18, 2304), 1.0, 9.6, 0.0883883),
    ],
)
def test_exactly_one_learning_rate_scale_applies(
    shape: tuple[int, int], original: float, match_rms: float, spectral: float
) -> None:
    gradient = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    factors = {None: original, "original": original, "match_rms_adamw": match_rms}
    factors["spectral"] = spectral
    for mode, factor in factors.items():
        options: dict[str, Any] = {"lr": 1.0, "weight_decay": 0.0, "adjust_lr_fn": mode}
        got = one_step(torch.zeros(shape), gradient, **options, **FIRST_TERM_ONLY)
        assert float(got.double().norm()) == pytest.approx(factor, rel=1e-3)


def test_decay_uses_the_plain_learning_rate() -> None:
    weight, gradient = reference.weights(16, 8), reference.gradient(16, 8, 0)
    options = {"lr": 0.1, "weight_decay": 2.0, "momentum": 0.0}
    got = one_step(tensor(weight), tensor(gradient), **options)
    update = one_step(
        torch.zeros(16, 8), tensor(gradient), lr=1.0, weight_decay=0.0, momentum=0.0
    )  # is -sqrt(2) NS(G)
    torch.testing.assert_close(got, 0.8 * tensor(weight) + 0.1 * update, atol=1e-6, rtol=0)
    right = 0.8 * weight - 0.1 * math.sqrt(2) * reference.newton_schulz(gradient)
    assert relative_error(got, right) < 1e-4


def test_zero_decay_means_none_and_groups_keep_their_own() -> None:
    weight = tensor(reference.weights(10, 8))
    params = [nn.Parameter(weight.clone()) for _ in range(3)]
    for p in params:
        p.grad = torch.zeros_like(p)
    groups: list[dict[str, Any]] = [
        {"params": [params[0]], "weight_decay": 0.0},
        {"params": [params[1]], "weight_decay": 0.5},
        {"params": [params[2]], "algorithm": "adamw", "lr": 0.1, "weight_decay": 0.0},
    ]
    shardmuon.Muon(groups, lr=0.1).step()
    assert digest([params[0].detach(), params[2].detach()]) == digest([weight, weight])
    torch.testing.assert_close(params[1].detach(), 0.95 * weight)


@pytest.mark.parametrize("ns_dtype", [torch.float32, torch.bfloat16])
def test_zero_gradient_decays_only_and_the_next_step_is_normal(ns_dtype: torch.dtype) -> None:
    weight = tensor(reference.weights(10, 8))
    p = nn.Parameter(weight.clone())
    optimizer = shardmuon.Muon([p], lr=0.02, ns_dtype=ns_dtype)
    p.grad = torch.zeros_like(p)
    optimizer.step()
    assert digest([p.detach()]) == digest([weight * (1 - 0.02 * 0.1)])
    assert not optimizer.state[p]["momentum_buffer"].any()
    p.grad = tensor(reference.gradient(10, 8, 0))
    before = p.detach().double().numpy().copy()
    optimizer.step()
    right, _ = Rule().run(before, [reference.gradient(10, 8, 0)])
    assert relative_error(p.detach(), right) < (1e-4 if ns_dtype == torch.float32 else 1e-2)


@pytest.mark.filterwarnings("ignore:a matrix has a norm below eps")
def test_gradient_far_below_eps_fades_without_nan() -> None:
    gradient = 1e-12 * reference.gradient(10, 8, 0)
    got = one_step(torch.zeros(10, 8), tensor(gradient), lr=1.0, weight_decay=0.0, momentum=0.0)
    right, _ = Rule(lr=1.0, momentum=0.0).run(np.zeros((10, 8)), [gradient])
    assert relative_error(got, right) < 1e-4


def test_large_gradient_keeps_its_direction() -> None:
    gradient = 1e6 * reference.gradient(16, 16, 0)
    for dtype, tolerance in ((torch.float32, 1e-4), (torch.bfloat16, 5e-2)):
        got = one_step(torch.zeros(16, 16), tensor(gradient), lr=1.0, ns_dtype=dtype)
        assert float(got.norm()) == pytest.approx(3.7505, rel=tolerance)


def test_matrices_of_one_step_do_not_influence_each_other() -> None:
    shapes = [(64, 24)] * 6 + [(5, 7)] * 5 + [(18, 48)]
    together = solve_alone(Problem(shapes=shapes, seed=3))
    buckets = shardmuon.Runtime(deterministic=True, bucket_bytes=1)
    assert match(together, solve_alone(Problem(shapes=shapes, seed=3, runtime=buckets)))
    for index, shape in enumerate(shapes):
        p = nn.Parameter(_random(3, index, shape, None))
        optimizer = shardmuon.Muon([p], lr=0.02)
        for step in range(3):
            p.grad = _random(3, index, shape, step)
            optimizer.step()
        assert digest([p.detach()]) == digest([together.params[index]])


def _random(seed: int, index: int, shape: tuple[int, int], step: int | None) -> Tensor:
    """The tensor that `Problem` with this seed makes for parameter `index`."""
    salt = seed * 100_003 + index * 1009 + (0 if step is None else step + 1)
    return torch.randn(shape, generator=torch.Generator().manual_seed(salt))


def test_norm_is_per_matrix() -> None:
    small, large = tensor(reference.gradient(5, 7, 0)), 1e4 * tensor(reference.gradient(5, 7, 1))
    params = [nn.Parameter(torch.zeros(5, 7)) for _ in range(2)]
    params[0].grad, params[1].grad = small, large
    shardmuon.Muon(params, lr=1.0, weight_decay=0.0, momentum=0.0).step()
    for p, g in zip(params, (small, large), strict=True):
        assert relative_error(-p.detach(), reference.newton_schulz(g.double().numpy())) < 1e-4


def test_gradient_is_not_written() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for nesterov in (True, False):
            p = nn.Parameter(tensor(reference.weights(10, 8)).to(dtype))
            p.grad = tensor(reference.gradient(10, 8, 0)).to(dtype)
            gradient, before = p.grad, p.grad.clone()
            shardmuon.Muon([p], nesterov=nesterov, momentum=0.0, ns_dtype=dtype).step()
            assert p.grad is gradient
            assert digest([gradient]) == digest([before])


def test_gradient_in_column_major_order_gives_the_same_bits() -> None:
    weight, gradient = tensor(reference.weights(18, 48)), tensor(reference.gradient(18, 48, 0))
    strided = gradient.T.contiguous().T
    assert strided.stride() != gradient.stride()
    plain = one_step(weight, gradient)
    p = nn.Parameter(weight.clone())
    p.grad = strided
    shardmuon.Muon([p]).step()
    assert digest([p.detach()]) == digest([plain])


def test_steps_count_what_was_orthogonalized() -> None:
    outcome = solve_alone(Problem(steps=4))
    assert outcome.orthogonalized == [len(SHAPES)] * 4
    assert outcome.bytes_sent == outcome.bytes_received == outcome.collectives == 0

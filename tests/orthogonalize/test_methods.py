"""The methods compute one polynomial of the singular values, at every shape and scale."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import shardmuon
from shardmuon.orthogonalize.coefficients import KELLER, PRESETS, Schedule, schedule_of
from shardmuon.orthogonalize.newton_schulz import METHODS, newton_schulz
from tests import reference

SHAPES = [(8, 8), (6, 20), (20, 6), (1, 7), (7, 1), (16, 5)]
KELLER_5 = schedule_of(KELLER, 5)


def matrix(rows: int, cols: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, cols, generator=generator, dtype=torch.float64)


def by_singular_values(x: Tensor, schedule: Schedule) -> Tensor:
    """The same in float64 by a singular value decomposition."""
    u, s, v = torch.linalg.svd(x.double(), full_matrices=False)
    s = s / (torch.linalg.vector_norm(s) * schedule.margin)
    for a, b, c in schedule.triples:
        s = a * s + b * s**3 + c * s**5
    out: Tensor = (u * s) @ v
    return out


@pytest.mark.parametrize("name", sorted(PRESETS))
@pytest.mark.parametrize("method", METHODS)
def test_a_method_is_its_polynomial(method: str, name: str) -> None:
    for steps in (1, 2, 3, 4, 5):
        schedule = schedule_of(name, steps)
        for number, shape in enumerate(SHAPES):
            x = matrix(*shape, seed=number)
            before = x.clone()
            out = newton_schulz(x, schedule, None, torch.float64, method)
            assert torch.equal(x, before)
            assert out.shape == x.shape
            torch.testing.assert_close(out, by_singular_values(x, schedule), atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("method", METHODS)
def test_a_batch_is_its_matrices(method: str) -> None:
    for rows, cols in ((6, 9), (9, 6)):
        batch = torch.stack([matrix(rows, cols, seed) for seed in range(3)])
        whole = newton_schulz(batch, KELLER_5, 1e-7, torch.float64, method)
        for x, out in zip(batch, whole, strict=True):
            alone = newton_schulz(x, KELLER_5, 1e-7, torch.float64, method)
            torch.testing.assert_close(out, alone, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("method", METHODS)
def test_many_steps_keep_to_the_polynomial(method: str) -> None:
    x = matrix(12, 30)
    schedule = schedule_of("cubic", 40)
    out = newton_schulz(x, schedule, None, torch.float64, method)
    torch.testing.assert_close(out @ out.T, torch.eye(12).double(), atol=1e-9, rtol=0)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_eps_scale_does_not_matter(method: str, dtype: torch.dtype) -> None:
    x = matrix(7, 11).float()
    expected = newton_schulz(x, KELLER_5, None, dtype, method).float()
    for scale in (1e-20, 1e-10, 1e10, 1e18):
        out = newton_schulz(x * scale, KELLER_5, None, dtype, method).float()
        # Rounding of the input itself is all that differs.
        limit = 2e-5 if dtype == torch.float32 else 5e-2
        torch.testing.assert_close(out, expected, atol=limit, rtol=limit)


def test_with_eps_updates_of_tiny_gradients_fade() -> None:
    x = matrix(7, 11).float()
    tiny = newton_schulz(x * 1e-12, KELLER_5, 1e-7, torch.float32)
    assert tiny.norm() < 0.1
    full = newton_schulz(x * 1e-12, KELLER_5, None, torch.float32)
    assert full.norm() > 1.5


@pytest.mark.parametrize("eps", [None, 1e-7])
@pytest.mark.parametrize("method", METHODS)
def test_edges_are_finite(method: str, eps: float | None) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for shape in ((0, 5), (5, 0), (0, 0), (1, 1), (2, 0, 3), (0, 2, 3)):
            out = newton_schulz(torch.ones(shape), KELLER_5, eps, dtype, method)
            assert out.shape == shape
            assert out.isfinite().all()
        zero = newton_schulz(torch.zeros(3, 5), KELLER_5, eps, dtype, method)
        assert not zero.any()
        rank_one = torch.outer(torch.arange(6.0), torch.arange(9.0))
        assert newton_schulz(rank_one, KELLER_5, eps, dtype, method).isfinite().all()


@pytest.mark.parametrize(
    ("dtype", "limit"), [(torch.float32, 1e-4), (torch.bfloat16, 0.05), (torch.float16, 0.05)]
)
def test_the_norm_of_a_large_gradient_does_not_overflow(dtype: torch.dtype, limit: float) -> None:
    """Cast to float16 before the norm, it would be inf, NaN and then zero."""
    out = newton_schulz(
        torch.from_numpy(reference.gradient(16, 16, 0)) * 1e6, KELLER_5, 1e-7, dtype
    )
    assert out.isfinite().all()
    assert abs(float(out.float().norm()) - 3.7505) <= limit * 3.7505


@pytest.mark.parametrize("method", METHODS)
def test_the_optimizer_takes_methods_and_presets(method: str) -> None:
    value = matrix(10, 14).float()
    for preset in ("keller", "polar_express"):
        p, q = (torch.nn.Parameter(value.clone()) for _ in range(2))
        for parameter, options in ((p, {"ns_method": method}), (q, {})):
            optimizer = shardmuon.Muon([parameter], lr=0.1, ns_coefficients=preset, **options)  # type: ignore[arg-type]
            parameter.grad = torch.sin(value * 3)
            optimizer.step()
        torch.testing.assert_close(p, q, atol=1e-5, rtol=1e-5)
        assert torch.equal(p, q) == (method == "standard")


def test_other_methods_do_not_go_with_deterministic() -> None:
    p = torch.nn.Parameter(torch.ones(4, 4))
    optimizer = shardmuon.Muon(
        [("w", p)], ns_method="gram", runtime=shardmuon.Runtime(deterministic=True)
    )
    p.grad = torch.ones(4, 4)
    with pytest.raises(ValueError, match="w: ns_method='gram' does not go with"):
        optimizer.step()

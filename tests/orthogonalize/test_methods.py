"""The methods compute one polynomial of the singular values, at every shape and scale."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import shardmuon
from shardmuon.orthogonalize import newton_schulz as module
from shardmuon.orthogonalize import products
from shardmuon.orthogonalize.coefficients import KELLER, PRESETS, Schedule, schedule_of
from shardmuon.orthogonalize.newton_schulz import METHODS, iteration_dtype, newton_schulz
from shardmuon.tools import accuracy
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
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tiny = newton_schulz(x * 1e-12, KELLER_5, 1e-7, torch.float32)
    assert tiny.norm() < 0.1
    full = newton_schulz(x * 1e-12, KELLER_5, None, torch.float32)
    assert full.norm() > 1.5


@pytest.fixture
def fresh_warnings() -> None:
    module._warn_once.cache_clear()


@pytest.mark.usefixtures("fresh_warnings")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_norm_below_eps_is_warned_of_once(dtype: torch.dtype) -> None:
    x = matrix(7, 11).float()
    normal_and_tiny = torch.stack([x, x * 1e-12])
    for method in METHODS:
        module._warn_once.cache_clear()
        with pytest.warns(UserWarning, match=r"below eps=1e-07.* eps=None divides any"):
            newton_schulz(x * 1e-12, KELLER_5, 1e-7, dtype, method)
        newton_schulz(x * 1e-12, KELLER_5, 1e-7, dtype, method)  # a second one would be an error
        module._warn_once.cache_clear()
        with pytest.warns(UserWarning, match="below eps"):
            newton_schulz(normal_and_tiny, KELLER_5, 1e-7, dtype, method)


@pytest.mark.usefixtures("fresh_warnings")
@pytest.mark.parametrize("method", METHODS)
def test_zero_and_empty_matrices_are_not_warned_of(method: str) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for x in (torch.zeros(3, 5), torch.zeros(0, 5), torch.zeros(2, 3, 5), torch.zeros(0, 3, 5)):
            newton_schulz(x, KELLER_5, 1e-7, dtype, method)
        newton_schulz(matrix(3, 5) * 1e-12, KELLER_5, None, dtype, method)


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


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("dtype", "limit"), [(torch.float32, 1e-4), (torch.bfloat16, 0.05), (torch.float16, 0.05)]
)
def test_the_norm_of_a_large_gradient_does_not_overflow(
    dtype: torch.dtype, limit: float, method: str
) -> None:
    """Cast to float16 before the norm, it would be inf, NaN and then zero."""
    x = torch.from_numpy(reference.gradient(16, 16, 0)) * 1e6
    for eps in (1e-7, None):
        for each in (x, x[None]):
            out = newton_schulz(each, KELLER_5, eps, dtype, method)
            assert out.isfinite().all()
            assert abs(float(out.float().norm()) - 3.7505) <= limit * 3.7505


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_gram_never_iterates_in_bfloat16(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is too coarse for a Gram matrix: on a CPU float32 stands in, on a GPU float16."""
    schedule = schedule_of(name, 5)
    seen: set[torch.dtype] = set()

    def product(a: Tensor, b: Tensor, **rest: object) -> Tensor:
        seen.update((a.dtype, b.dtype))
        return original(a, b, **rest)  # type: ignore[arg-type]

    original = products.symmetric_product
    monkeypatch.setattr(module, "symmetric_product", product)
    for eps in (None, 1e-7):
        for x in (matrix(7, 11), matrix(7, 11).bfloat16()):
            out = newton_schulz(x, schedule, eps, torch.bfloat16, "gram")
            assert out.dtype == torch.bfloat16
    assert seen == {torch.float32}
    for device in (torch.device("cpu"), torch.device("cuda")):
        for dtype in (torch.float16, torch.bfloat16, torch.float32):
            assert iteration_dtype(schedule, "gram", dtype, device) in schedule.gram_dtypes
            assert iteration_dtype(schedule, "symmetric", dtype, device) != torch.bfloat16
            assert iteration_dtype(schedule, "standard", dtype, device) == dtype
    assert torch.bfloat16 not in schedule.gram_dtypes


def test_a_schedule_may_forbid_float16() -> None:
    wide = replace(KELLER_5, gram_dtypes=(torch.float32,))
    assert iteration_dtype(wide, "gram", torch.bfloat16, torch.device("cuda")) == torch.float32
    assert iteration_dtype(wide, "symmetric", torch.bfloat16, torch.device("cuda")) == torch.float16


@pytest.mark.parametrize("dtype", accuracy.DTYPES)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", sorted(PRESETS))
def test_errors_are_within_their_bounds(name: str, method: str, dtype: torch.dtype) -> None:
    device = torch.device("cpu")
    inner = iteration_dtype(schedule_of(name, 5), method, dtype, device)
    found = accuracy.errors(name, method, dtype, device, ((64, 64), (256, 64)))
    limits = {kind: accuracy.bound(name, kind, inner, dtype) for kind in found}
    assert {kind: value for kind, value in found.items() if not value < limits[kind]} == {}


def test_bounds_of_bfloat16_are_those_of_its_roundoff() -> None:
    """None is so wide that a wrong result would pass."""
    for name in PRESETS:
        for kind in accuracy.KINDS:
            coarse = accuracy.bound(name, kind, torch.bfloat16, torch.bfloat16)
            half = accuracy.bound(name, kind, torch.float16, torch.float16)
            fine = accuracy.bound(name, kind, torch.float32, torch.float32)
            assert coarse == 8 * half == 2**12 * fine <= 0.28


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

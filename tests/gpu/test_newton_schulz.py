"""Newton-Schulz on a GPU: how exact its methods are, at the edges too, and that kernels run."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from shardmuon.orthogonalize import newton_schulz as module
from shardmuon.orthogonalize import products
from shardmuon.orthogonalize.coefficients import PRESETS, schedule_of
from shardmuon.orthogonalize.newton_schulz import METHODS, iteration_dtype, newton_schulz
from shardmuon.tools import accuracy
from tests import reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

HALF = (torch.float16, torch.bfloat16)


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.float32).to(dtype)


@pytest.mark.parametrize("method", ["symmetric", "gram"])
def test_methods_run_the_kernel(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = random(2, 128, 256, dtype=torch.bfloat16)
    if products.way_of(x) == "torch":
        pytest.skip("no kernel runs on this GPU")
    monkeypatch.setattr(torch, "baddbmm", None)  # what would stand in for the kernel
    newton_schulz(x, schedule_of("keller", 5), 1e-7, torch.bfloat16, method)


@pytest.mark.parametrize("dtype", accuracy.DTYPES)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", sorted(PRESETS))
def test_errors_are_within_their_bounds(name: str, method: str, dtype: torch.dtype) -> None:
    device = torch.device("cuda")
    inner = iteration_dtype(schedule_of(name, 5), method, dtype, device)
    assert inner == (dtype if method == "standard" else torch.float16)
    found = accuracy.errors(name, method, dtype, device, (*accuracy.SHAPES, (1000, 264)))
    limits = {kind: accuracy.bound(name, kind, inner, dtype) for kind in found}
    assert {kind: value for kind, value in found.items() if not value < limits[kind]} == {}


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_gram_takes_only_dtypes_that_are_fine_enough(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: set[torch.dtype] = set()

    def product(a: Tensor, b: Tensor, **rest: object) -> Tensor:
        seen.update((a.dtype, b.dtype))
        return original(a, b, **rest)  # type: ignore[arg-type]

    original = products.symmetric_product
    monkeypatch.setattr(module, "symmetric_product", product)
    for dtype in (torch.float32, *HALF):
        for eps in (None, 1e-7):
            x = random(2, 64, 128, dtype=dtype)
            newton_schulz(x, schedule_of(name, 5), eps, dtype, "gram")
    assert seen == {torch.float16}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
def test_the_norm_of_a_large_gradient_does_not_overflow(dtype: torch.dtype, method: str) -> None:
    """Cast to float16 before the norm, it would be inf, NaN and then zero."""
    x = torch.from_numpy(reference.gradient(16, 16, 0)).float().cuda() * 1e6
    inner = iteration_dtype(schedule_of("keller", 5), method, dtype, x.device)
    limit = 1e-4 if inner == torch.float32 else 0.05
    for eps in (1e-7, None):
        out = newton_schulz(x, schedule_of("keller", 5), eps, dtype, method)
        assert out.isfinite().all()
        assert float(out.float().norm()) == pytest.approx(3.7505, rel=limit)


@pytest.mark.parametrize("method", METHODS)
def test_edges_are_finite_and_zero_stays_zero(method: str) -> None:
    for name in PRESETS:
        schedule = schedule_of(name, 5)
        for eps in (None, 1e-7):
            for shape in ((0, 5), (5, 0), (1, 1), (1, 7), (2, 0, 3), (0, 2, 3)):
                x = torch.ones(shape, device="cuda")
                assert newton_schulz(x, schedule, eps, torch.bfloat16, method).isfinite().all()
            zero = torch.zeros(3, 64, 128, device="cuda")
            assert not newton_schulz(zero, schedule, eps, torch.bfloat16, method).any()


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("eps", [None, 1e-7])
def test_the_host_never_waits_even_below_eps(eps: float | None, method: str) -> None:
    schedule = schedule_of("keller", 5)
    x = random(64, 128) * 1e-12
    newton_schulz(x, schedule, eps, torch.bfloat16, method)  # compiles kernels
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        out = newton_schulz(x, schedule, eps, torch.bfloat16, method)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert (float(out.float().norm()) > 1) == (eps is None)

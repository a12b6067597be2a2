"""Kernels on a GPU: which one ran, that it is right at every size, and how exact methods are."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from shardmuon.orthogonalize import products
from shardmuon.orthogonalize.coefficients import PRESETS, schedule_of
from shardmuon.orthogonalize.newton_schulz import newton_schulz

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

HALF = (torch.float16, torch.bfloat16)


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.float32).to(dtype)


def error(value: Tensor, right: Tensor) -> float:
    return float((value.double() - right).norm() / right.norm())


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(
    ("n", "r", "k"), [(5, 8, 8), (3, 200, 136), (2, 136, 4096), (2, 3080, 264), (1, 3200, 3200)]
)
def test_the_kernel_is_right_and_symmetric(n: int, r: int, k: int, dtype: torch.dtype) -> None:
    a = random(n, r, k, dtype=dtype) / k**0.5
    if products.way_of(a) != "descriptors":
        pytest.skip("this GPU has no tensor descriptors")
    add = random(n, r, r, dtype=dtype)
    add = (add + add.mT) / 2
    eye = torch.eye(r, device="cuda", dtype=torch.float64)
    poison = torch.full((n, r, r), float("nan"), device="cuda", dtype=dtype)
    del poison  # its memory is what the next allocation gets
    out = products.symmetric_product(a, a, alpha=0.5, add=add, beta=2.0, diagonal=3.0)
    right = 0.5 * a.double() @ a.double().mT + 2.0 * add.double() + 3.0 * eye
    assert torch.equal(out, out.mT)
    assert error(out, right) < (5e-4 if dtype == torch.float16 else 4e-3)


def test_the_kernel_takes_what_it_can() -> None:
    takes = [
        products.way_of(random(1, r, k, dtype=dtype)) == "descriptors"
        for r, k, dtype in ((64, 64, HALF[0]), (60, 64, HALF[0]), (64, 64, torch.float32))
    ]
    hopper = torch.cuda.get_device_capability()[0] >= 9
    assert takes == [hopper, False, False]


@pytest.mark.parametrize("method", ["symmetric", "gram"])
def test_methods_run_the_kernel(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = random(2, 128, 256, dtype=torch.bfloat16)
    if products.way_of(x) != "descriptors":
        pytest.skip("this GPU has no tensor descriptors")
    monkeypatch.setattr(torch, "baddbmm", None)  # what would stand in for the kernel
    newton_schulz(x, schedule_of("keller", 5), 1e-7, torch.bfloat16, method)


# Relative error against float64 that a method may have, on the worst of the inputs below.
BOUNDS = {"standard": 0.2, "symmetric": 0.06, "gram": 0.06}


@pytest.mark.parametrize("method", sorted(BOUNDS))
@pytest.mark.parametrize("name", sorted(PRESETS))
@pytest.mark.parametrize("kind", ["gaussian", "1e2", "1e4", "1e6", "deficient"])
def test_methods_stay_within_their_bounds(kind: str, name: str, method: str) -> None:
    schedule = schedule_of(name, 5)
    for rows, cols in ((256, 256), (256, 1024), (1000, 264)):
        x = conditioned(kind, rows, cols)
        out = newton_schulz(x[None].float(), schedule, None, torch.bfloat16, method)[0]
        right = newton_schulz(x, schedule, None, torch.float64)
        assert error(out, right) < BOUNDS[method]


def conditioned(kind: str, rows: int, cols: int) -> Tensor:
    """A float64 matrix of that condition number, or of half the rank."""
    torch.manual_seed(rows + cols)
    x = random(rows, cols).double()
    if kind == "gaussian":
        return x
    u, s, v = torch.linalg.svd(x, full_matrices=False)
    if kind == "deficient":
        s[len(s) // 2 :] = 0
    else:
        s = torch.logspace(0, -float(kind[2:]), len(s), device="cuda", dtype=torch.float64)
    out: Tensor = (u * s) @ v
    return out

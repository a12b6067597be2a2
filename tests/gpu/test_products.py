"""Kernels of symmetric products on a GPU: right at every size, stride and offset, and which ran."""

from __future__ import annotations

import importlib.metadata

import pytest
import torch
from torch import Tensor

from shardmuon.orthogonalize.products import scaled, symmetric_product, way_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

HALF = (torch.float16, torch.bfloat16)
TILE = 128
ODD = [(3, 1, 1), (2, 7, 9), (2, 130, 70), (2, 257, 1001), (1, 3081, 515)]
EVEN = [(5, 8, 8), (3, 200, 136), (2, 136, 4096), (2, 2056, 264), (1, 3200, 3200)]
# Enough tiles for every processor of a Hopper GPU; the last have one step along k.
FULL = [
    (2, 4096, 512),
    (1, 4096, 1000),
    (96, 384, 256),
    (120, 264, 64),
    (544, 136, 8),
    (600, 8, 72),
]


def random(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


def way_here(aligned: bool, full: bool = False) -> str:
    major, minor = torch.cuda.get_device_capability()
    if major < 8:
        pytest.skip("kernels need compute capability 8.0")
    if not (aligned and 9 <= major < 12):
        return "pointers"
    tested = importlib.metadata.version("triton").startswith("3.6.")
    return "persistent" if full and tested and (major, minor) == (9, 0) else "descriptors"


def check(a: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's product of `a`, in memory that was NaN, with and without what is added."""
    n, r, _ = a.shape
    add = random(n, r, r, dtype=a.dtype)
    add = add + add.mT
    product = a.double() @ a.double().mT
    eye = torch.eye(r, device="cuda", dtype=torch.float64)
    monkeypatch.setattr(torch, "bmm", None)  # what would stand in for the kernel
    monkeypatch.setattr(torch, "baddbmm", None)
    torch.use_deterministic_algorithms(True)  # fills new memory with NaN
    try:
        plain = symmetric_product(a, a)
        full = symmetric_product(a, a, alpha=0.5, add=add, beta=2.0, diagonal=3.0)
    finally:
        torch.use_deterministic_algorithms(False)
    block = torch.arange(r, device="cuda") // TILE
    outside = block[:, None] != block[None, :]
    for out, right in ((plain, product), (full, 0.5 * product + 2.0 * add.double() + 3.0 * eye)):
        assert torch.equal(out[:, outside], out.mT[:, outside])
        error = float((out.double() - right).norm() / right.norm())
        assert error < (5e-4 if a.dtype == torch.float16 else 4e-3)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(("n", "r", "k"), ODD + EVEN + FULL)
def test_kernels_are_right_at_every_size(
    n: int, r: int, k: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = random(n, r, k, dtype=dtype) / k**0.5
    assert way_of(a, a) == way_here(aligned=(n, r, k) not in ODD, full=(n, r, k) in FULL)
    check(a, monkeypatch)


@pytest.mark.parametrize(("n", "r"), [(3, 200), (2, 2048), (8, 2048), (2, 4096), (64, 264)])
def test_products_of_different_matrices(n: int, r: int) -> None:
    """Polynomials of one matrix commute, so that their product is symmetric too."""
    x = random(n, r, 2 * r, dtype=torch.float16) / (2 * r) ** 0.5
    p = x @ x.mT
    p = (p + p.mT) / 2
    q = p @ p
    q = (q + q.mT) / 8
    out = symmetric_product(p, q)
    right = p.double() @ q.double()
    assert float((out.double() - right).norm() / right.norm()) < 1e-3
    for _ in range(3):
        assert torch.equal(symmetric_product(p, q), out)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("layout", ["transposed", "one for all", "part", "shifted"])
def test_pointers_take_any_strides(
    layout: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = random(4, 300, 300, dtype=dtype) / 16
    a = {
        "transposed": whole.mT,
        "one for all": whole[:1, :264, :136].expand(3, -1, -1),
        "part": whole[1::2, 3:267, 5:277:2],
        "shifted": whole.flatten()[1 : 2 * 264 * 136 + 1].view(2, 264, 136),
    }[layout]
    assert way_of(a, a) == way_here(aligned=False)
    check(a, monkeypatch)


def test_ways_agree() -> None:
    way_here(aligned=True)
    a = random(2, 264, 520, dtype=torch.float16) / 23
    strided = torch.stack([a, a], -1)[..., 0]
    assert way_of(strided, a) == way_of(a, strided) == "pointers"
    expected = symmetric_product(a, a)
    for pair in ((strided, a), (a, strided)):
        torch.testing.assert_close(symmetric_product(*pair), expected, rtol=2**-10, atol=1e-4)


@pytest.mark.parametrize("r", [1024, 1023])
def test_offsets_beyond_32_bits(r: int) -> None:
    """The last matrices lie 2^31 elements behind the first, in operands, in `add` and in `out`."""
    way_here(aligned=True)
    n, k = 2**31 // r**2 + 2, 8
    if torch.cuda.mem_get_info()[0] < 3.5 * n * r * r * 2:
        pytest.skip("needs 15 GB of GPU memory")
    a = random(n, r, k, dtype=torch.float16)
    far = torch.empty(n, r, r, device="cuda", dtype=torch.float16)[..., :k].copy_(a)
    once = symmetric_product(far, far)  # by pointers
    twice = symmetric_product(a, a, add=once, beta=1.0)  # by descriptors, where size and GPU allow
    assert (n - 1) * once.stride(0) >= 2**31
    for z in (0, 1, n - 2, n - 1):
        right = a[z].double() @ a[z].double().T
        torch.testing.assert_close(once[z].double(), right, rtol=2**-10, atol=1e-4)
        torch.testing.assert_close(twice[z].double(), 2 * right, rtol=2**-9, atol=1e-4)


@pytest.mark.parametrize("source", [torch.float32, *HALF])
@pytest.mark.parametrize("target", [torch.float32, *HALF])
def test_scaled_copies_round_once(source: torch.dtype, target: torch.dtype) -> None:
    for shape in ((1, 1, 1), (3, 65, 200), (2, 64, 64), (5, 8, 1000)):
        x = random(*shape, dtype=source)
        factors = random(shape[0], 1, 1, dtype=torch.float32)
        for operand in (x, x.mT, x[:, ::2], x[:, :, 1:]):
            right = (operand.float() * factors).to(target)
            out = scaled(operand, factors, target)
            assert out.is_contiguous()
            assert torch.equal(out, right)
            assert torch.equal(scaled(operand, None, target), operand.to(target))

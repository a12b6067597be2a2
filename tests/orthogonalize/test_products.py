"""Symmetric products: torch's way, which way is taken for what, and the kernels interpreted."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

import shardmuon.orthogonalize
from shardmuon.orthogonalize import products
from shardmuon.orthogonalize.products import symmetric_product, way_of

ROOT = Path(__file__).resolve().parents[2]
HALF = torch.float16


def random(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def empty(*shape: int, dtype: torch.dtype = HALF) -> Tensor:
    return torch.empty(shape, dtype=dtype)


def has_capability(monkeypatch: pytest.MonkeyPatch, major: int, persistent: bool = False) -> None:
    chip = products._Chip(major, processors=10, persistent=persistent)
    monkeypatch.setattr(products, "_chip", lambda device: chip)


# --- torch's way ----------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "strided"])
@pytest.mark.parametrize(("n", "r", "k"), [(1, 1, 1), (2, 7, 9), (3, 9, 7), (2, 3, 0), (0, 3, 2)])
def test_torch_computes_the_definition(n: int, r: int, k: int, layout: str) -> None:
    a = random(n, r, k)
    if layout == "transposed":
        a = random(n, k, r).mT
    elif layout == "strided":
        a = random(n, 2 * r, 2 * k)[:, ::2, 1::2]
    add = random(n, r, r)
    add = add + add.mT
    before = a.clone(), add.clone()
    product = torch.einsum("nik,njk->nij", a, a)
    torch.testing.assert_close(symmetric_product(a, a), product)
    torch.testing.assert_close(
        symmetric_product(a, a, alpha=0.5, add=add, beta=-2.0, diagonal=3.0),
        0.5 * product - 2.0 * add + 3.0 * torch.eye(r).double(),
    )
    assert torch.equal(a, before[0])
    assert torch.equal(add, before[1])


def test_torch_takes_what_no_kernel_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    for dtype in (HALF, torch.bfloat16, torch.float32, torch.float64):
        assert way_of(empty(1, 8, 8, dtype=dtype)) == "torch"  # a CPU
    has_capability(monkeypatch, 9)
    for dtype in (torch.float32, torch.float64):
        assert way_of(empty(1, 8, 8, dtype=dtype)) == "torch"
    for shape in ((0, 8, 8), (2, 0, 8), (2, 8, 0)):
        assert way_of(empty(*shape)) == "torch"


# --- which way ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [HALF, torch.bfloat16])
@pytest.mark.parametrize(
    ("major", "aligned", "odd"),
    [
        (0, "torch", "torch"),
        (7, "torch", "torch"),
        (8, "pointers", "pointers"),
        (9, "descriptors", "pointers"),
        (10, "descriptors", "pointers"),
        (12, "pointers", "pointers"),
    ],
)
def test_the_way_follows_from_gpu_and_size(
    major: int, aligned: str, odd: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_capability(monkeypatch, major)
    assert way_of(empty(2, 136, 72, dtype=dtype)) == aligned
    for r, k in ((1, 1), (137, 72), (136, 70), (132, 64)):
        assert way_of(empty(2, r, k, dtype=dtype)) == odd


def test_descriptors_want_aligned_rows_in_every_operand(monkeypatch: pytest.MonkeyPatch) -> None:
    has_capability(monkeypatch, 9)
    good, add = empty(2, 16, 24), empty(2, 16, 16)
    assert way_of(good, good, add) == "descriptors"
    assert way_of(empty(3, 16, 24)[1:], good) == "descriptors"
    for bad in (
        empty(2, 24, 16).mT,
        empty(4, 16, 24)[::2],
        empty(1, 16, 24).expand(2, -1, -1),
        empty(2 * 16 * 24 + 1)[1:].view(2, 16, 24),
        empty(400).as_strided((1, 16, 24), (3, 24, 1)),  # contiguous, says torch
    ):
        assert way_of(bad, good) == way_of(good, bad) == "pointers"
    assert way_of(good, good, add.mT) == "pointers"


def test_the_persistent_kernel_wants_enough_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    full = (4, 512, 64)  # 4 x 10 tiles, four for each of ten processors
    has_capability(monkeypatch, 9)
    assert way_of(empty(*full)) == "descriptors"
    has_capability(monkeypatch, 9, persistent=True)
    assert way_of(empty(*full)) == "persistent"
    for fewer in ((3, 512, 64), (4, 384, 64)):
        assert way_of(empty(*fewer)) == "descriptors"
    assert way_of(empty(4, 512, 60)) == "pointers"


@pytest.mark.parametrize(
    ("major", "called"),
    [(9, ["persistent"]), (10, ["descriptors"]), (8, ["pointers"]), (7, [])],
)
def test_the_way_is_taken(major: int, called: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    ways: list[str] = []

    def kernel(way: str, *arguments: object) -> Tensor:
        ways.append(way)
        assert arguments == (a, a, 0.5, a, 2.0, 3.0)
        return a

    fake = SimpleNamespace(
        symmetric_tiles=lambda *x: kernel("descriptors", *x),
        symmetric_tiles_by_pointers=lambda *x: kernel("pointers", *x),
    )
    monkeypatch.setattr(shardmuon.orthogonalize, "kernels", fake, raising=False)
    other = SimpleNamespace(symmetric_tiles=lambda *x: kernel("persistent", *x))
    monkeypatch.setattr(shardmuon.orthogonalize, "kernels_persistent", other, raising=False)
    has_capability(monkeypatch, major, persistent=major == 9)
    a = random(40, 8, 8, dtype=HALF)
    symmetric_product(a, a, alpha=0.5, add=a, beta=2.0, diagonal=3.0)
    assert ways == called


@pytest.mark.parametrize("compiler", [True, False])
def test_a_machine_without_a_compiler_takes_torch(
    compiler: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def scaled_copy(*arguments: object) -> None:
        if not compiler:
            raise RuntimeError("Failed to find C compiler.\nPlease specify via CC")

    properties = SimpleNamespace(major=9, minor=0, multi_processor_count=132)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: True)
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "3.6.0")
    name = "shardmuon.orthogonalize.kernels_copy"
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(scaled_copy=scaled_copy))
    products._chip.cache_clear()
    with contextlib.ExitStack() as stack:
        if not compiler:
            stack.enter_context(pytest.warns(UserWarning, match="RuntimeError: Please specify"))
        chip = products._chip(torch.device("cuda", 0))
    products._chip.cache_clear()
    assert chip == (products._Chip(9, 132, True) if compiler else products._Chip())


# --- kernels --------------------------------------------------------------------------------


def test_kernels_are_right_in_the_interpreter() -> None:
    try:
        major, minor = importlib.metadata.version("triton").split(".")[:2]
    except importlib.metadata.PackageNotFoundError:
        major, minor = "0", "0"
    if (int(major), int(minor)) < (3, 7):  # the interpreter of 3.6 fails with numpy 2.4
        pytest.skip("needs Triton, without a GPU too: pip install 'triton>=3.7'")
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "tests.orthogonalize.interpreted"],
        cwd=ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "all right\n"

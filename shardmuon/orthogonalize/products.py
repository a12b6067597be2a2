"""Products of matrices whose result is known to be symmetric, and copies of matrices.

Owns which of four ways computes products: kernels that compute one half and write both (persistent,
with tensor descriptors, or with pointers), or torch. Kernels need Triton, which comes with CUDA
builds of torch, and are imported when first used.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["KERNEL_VERSION", "has_kernels", "scaled", "symmetric_product", "way_of"]

KERNEL_VERSION = 2  # raised with every change of the kernel's speed: old measurements are then void


# The persistent kernel is written in Triton's experimental lower level, which may change.
PERSISTENT_TRITON = "3.6."


@dataclass(frozen=True)
class _Chip:
    """A GPU that Triton kernels run on; major 0: none. persistent: it takes that kernel."""

    major: int = 0
    processors: int = 0
    persistent: bool = False


def symmetric_product(
    a: Tensor,
    b: Tensor,
    *,
    alpha: float = 1.0,
    add: Tensor | None = None,
    beta: float = 0.0,
    diagonal: float = 0.0,
) -> Tensor:
    """alpha a b^T + beta add + diagonal I, for a product that is symmetric but for rounding.

    a, b: [n, r, k], one dtype, any strides. add: [n, r, r] symmetric. Returns a new [n, r, r].
    By the kernel sums are float32 and rounded once, and the result is exactly symmetric outside of
    the square tiles on the diagonal.
    """
    way = way_of(a, b) if add is None else way_of(a, b, add)
    if way != "torch":
        with torch.cuda.device_of(a):  # Triton launches on the current device
            return _kernel(way)(a, b, alpha, add, beta, diagonal)
    if add is None:
        out = torch.bmm(a, b.mT)
        out = out if alpha == 1.0 else out.mul_(alpha)
    else:
        out = torch.baddbmm(add, a, b.mT, beta=beta, alpha=alpha)
    if diagonal:
        out.diagonal(dim1=-2, dim2=-1).add_(diagonal)
    return out


def scaled(x: Tensor, factors: Tensor | None, dtype: torch.dtype) -> Tensor:
    """x [n, r, c] of any strides times factors [n, 1, 1], contiguous and in `dtype`.

    Multiplied in float32 at least and rounded once. May return x itself where nothing changes.
    """
    if factors is None and x.dtype == dtype:
        return x.contiguous()
    halves = (torch.float32, torch.float16, torch.bfloat16)
    if x.numel() and x.dtype in halves and dtype in halves and has_kernels(x.device):
        from shardmuon.orthogonalize.kernels_copy import scaled_copy

        with torch.cuda.device_of(x):
            return scaled_copy(x, factors, dtype)
    if factors is None:
        return x.to(dtype).contiguous()
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    return torch.mul(x, factors, out=out)


def way_of(*operands: Tensor) -> str:
    """Which way computes a product of these: "persistent", "descriptors", "pointers" or "torch".

    Kernels take half precision from compute capability 8.0 on. Tensor descriptors came with 9.0 and
    want rows that start at multiples of 16 bytes, those of the result too. GPUs from 12.0 on have
    them, but not the 160 KiB of shared memory that tiles by descriptors take. The persistent kernel
    is for Hopper, for a version of Triton whose lower level it was tested with, and for products
    that fill the GPU.
    """
    a = operands[0]
    if a.dtype not in (torch.float16, torch.bfloat16) or not a.numel():
        return "torch"
    chip = _chip(a.device)
    if 9 <= chip.major < 12 and a.size(-2) % 8 == 0 and all(map(_is_aligned, operands)):
        return "persistent" if chip.persistent and _fills(chip, a) else "descriptors"
    return "pointers" if chip.major >= 8 else "torch"


def _kernel(way: str) -> Callable[..., Tensor]:
    if way == "persistent":
        from shardmuon.orthogonalize import kernels_persistent

        return kernels_persistent.symmetric_tiles
    from shardmuon.orthogonalize import kernels

    return kernels.symmetric_tiles if way == "descriptors" else kernels.symmetric_tiles_by_pointers


def _fills(chip: _Chip, a: Tensor) -> bool:
    """Whether every processor gets four square tiles or more, so that their loads are even."""
    n, blocks = a.size(0), -(-a.size(1) // 128)
    return n * blocks * (blocks + 1) // 2 >= 4 * chip.processors


def _is_aligned(x: Tensor) -> bool:
    starts = (x.data_ptr() // x.element_size(), *x.stride()[:-1])
    return x.is_contiguous() and all(start % 8 == 0 for start in starts)


def has_kernels(device: torch.device) -> bool:
    """Whether Triton kernels run on `device`."""
    return _chip(device).major >= 8


@functools.cache
def _chip(device: torch.device) -> _Chip:
    triton = importlib.util.find_spec("triton") is not None
    if device.type != "cuda" or torch.version.cuda is None or not triton:
        return _Chip()
    properties = torch.cuda.get_device_properties(device)
    if properties.major < 8 or not _compiles(device):
        return _Chip()
    tested = importlib.metadata.version("triton").startswith(PERSISTENT_TRITON)
    persistent = tested and (properties.major, properties.minor) == (9, 0)
    return _Chip(properties.major, properties.multi_processor_count, persistent)


def _compiles(device: torch.device) -> bool:
    """Whether Triton can build a kernel here: it needs a C compiler, which some machines lack."""
    try:
        from shardmuon.orthogonalize.kernels_copy import scaled_copy

        with torch.cuda.device(device):
            scaled_copy(torch.zeros(1, 1, 1, device=device), None, torch.float32)
    except Exception as error:
        reason = str(error).strip().splitlines()[-1:] or [type(error).__name__]
        warnings.warn(
            f"Triton cannot build kernels on this machine, so torch's products stand in:"
            f" {type(error).__name__}: {reason[0]}",
            stacklevel=2,
        )
        return False
    return True

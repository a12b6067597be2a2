"""Triton kernels on a CPU, by Triton's interpreter: `python -m` runs all cases.

In a process of its own, because TRITON_INTERPRET changes Triton for the whole process and must be
set before Triton is imported. Memory is full of NaN before it is written: what a kernel leaves out
stays NaN. float16 only: the interpreter multiplies bfloat16 as if its bits were integers.
"""

from __future__ import annotations

import itertools
import os

os.environ["TRITON_INTERPRET"] = "1"

from collections.abc import Callable

import torch
from torch import Tensor

from shardmuon.orthogonalize import kernels, kernels_copy
from shardmuon.rules import elementwise
from shardmuon.rules.base import Commit, Shard, UpdateRule
from shardmuon.rules.muon import MuonRule

Tiles = Callable[[Tensor, Tensor, float, Tensor | None, float, float], Tensor]
DESCRIPTORS: Tiles = kernels.symmetric_tiles
POINTERS: Tiles = kernels.symmetric_tiles_by_pointers


def main() -> None:
    """Run all cases; the first that fails raises."""
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)  # fills new memory with NaN
    assert torch.empty(9, dtype=torch.float16).isnan().all()
    for r, k in ((8, 8), (136, 72), (264, 64)):
        check(DESCRIPTORS, random(2, r, k))
    for r, k in ((1, 1), (7, 9), (8, 130), (130, 70), (257, 7)):
        check(POINTERS, random(2, r, k))
    check_wide_tiles()
    check_strides()
    check_two_operands()
    check_far_offsets()
    check_copies()
    check_elementwise()
    check_nonfinite()
    print("all right")


def check_copies() -> None:
    """Scaled, rounded once, and turned."""
    x, factors = random(2, 65, 130), torch.randn(2, 1, 1)
    for operand in (x, x.mT, x[:, ::2, 3:], x.float()):
        out = kernels_copy.scaled_copy(operand, factors, torch.float16)
        assert torch.equal(out, (operand.float() * factors).half())
        assert torch.equal(kernels_copy.scaled_copy(operand, None, torch.float32), operand.float())


def check_elementwise() -> None:
    """What one launch does to many shards is what the rule does to one, but for fused rounding."""
    sizes = (1, 5, 3000, 4096)
    for word, columns, cautious in itertools.product(
        (None, True, False), (False, True), (False, True)
    ):
        commit = Commit(None if word is None else torch.tensor(word))
        for nesterov in (True, False):
            gradients, momenta, parameters = ([part(s, columns) for s in sizes] for _ in range(3))
            group = {name: key.default for name, key in MuonRule.keys.items()}
            group |= {"lr": 0.1, "weight_decay": 0.5}
            group |= {"nesterov": nesterov, "cautious_weight_decay": cautious}
            shards = [
                Shard(p.clone(), g, {"momentum_buffer": m.clone()}, group, 1, 1)
                for p, g, m in zip(parameters, gradients, momenta, strict=True)
            ]
            places = [torch.zeros(size) for size in sizes]
            updates = [torch.randn(size) for size in sizes]
            UpdateRule.prepare_all(MuonRule(), shards, places, commit)
            UpdateRule.apply_all(MuonRule(), shards, updates, [None] * 4, commit)
            ours = [torch.zeros(size) for size in sizes[:3]]
            elementwise.prepare_many(
                [
                    elementwise.Preparation(g, m, place, 0.95, nesterov)
                    for g, m, place in zip(gradients, momenta, (*ours, None), strict=True)
                ],
                commit,
            )
            elementwise.apply_many(
                [
                    elementwise.Application(p, u, 0.95, -0.1, cautious)
                    for p, u in zip(parameters, updates, strict=True)
                ],
                commit,
            )
            right = [*places[:3], *(s.parameter for s in shards)]
            right += [s.state["momentum_buffer"] for s in shards]
            for mine, theirs in zip((*ours, *parameters, *momenta), right, strict=True):
                torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6)


def part(size: int, columns: bool) -> Tensor:
    """Two rows of `size` elements, or one; columns: the middle of longer rows."""
    rows = 1 if size % 2 else 2
    width = size // rows
    return torch.randn(rows, width + 16)[:, 8 : 8 + width] if columns else torch.randn(rows, width)


def check_nonfinite() -> None:
    """One bad element of many tensors is found wherever it is."""
    for dtype in (torch.float32, torch.float16):
        tensors = [torch.randn(size).to(dtype) for size in (1, 5, 3000, 4096)]
        tensors.append(torch.full((3,), torch.finfo(dtype).max, dtype=dtype))
        assert not elementwise.has_nonfinite(tensors)
        for tensor in tensors:
            for value in (float("inf"), -float("inf"), float("nan")):
                old, tensor[-1] = tensor[-1].clone(), value
                assert elementwise.has_nonfinite(tensors)
                tensor[-1] = old
            bits = torch.zeros((), dtype=torch.int64)
            elementwise._scan(tensors, bits, "bit_sum_kernel")
            assert bits == elementwise.bit_sum(tensors)
    assert not elementwise.has_nonfinite([*tensors, torch.ones(7)])
    assert elementwise.has_nonfinite([*tensors, torch.ones(7) / 0])


def random(*shape: int) -> Tensor:
    return torch.randn(shape).to(torch.float16)


def check(tiles: Tiles, a: Tensor) -> None:
    """Values with and without what is added, and that the result is symmetric."""
    n, r, _ = a.shape
    add = random(n, r, r)
    add = add + add.mT
    product = a.double() @ a.double().mT
    compare(tiles(a, a, 1.0, None, 0.0, 0.0), product)
    eye = torch.eye(r, dtype=torch.float64)
    compare(tiles(a, a, 0.5, add, -2.0, 3.0), 0.5 * product - 2.0 * add.double() + 3.0 * eye)


def compare(out: Tensor, right: Tensor) -> None:
    """Near `right`: float32 sums, rounded once to 11 bits. Symmetric outside of diagonal tiles."""
    torch.testing.assert_close(out.double(), right, rtol=1.01 * 2**-11, atol=1e-5)
    block = torch.arange(out.size(1)) // kernels.TILE
    outside = block[:, None] != block[None, :]
    assert torch.equal(out[:, outside], out.mT[:, outside])


def check_wide_tiles() -> None:
    """Tiles of 128 x 256, where some halves lie above the diagonal or beyond the matrix."""
    usual, kernels.WIDE_ROWS = kernels.WIDE_ROWS, 1
    for r in (72, 136, 392):
        check(DESCRIPTORS, random(1, r, 72))
    kernels.WIDE_ROWS = usual


def check_strides() -> None:
    """Transposed matrices, one matrix for all, and a part of larger ones whose rest is NaN."""
    check(POINTERS, random(2, 70, 130).mT)
    check(POINTERS, random(1, 130, 70).expand(3, -1, -1))
    part = torch.empty(4, 140, 150, dtype=torch.float16)[1::2, 3:133, 5:145:2]
    check(POINTERS, part.copy_(random(2, 130, 70)))


def check_two_operands() -> None:
    """Two operands that commute, as the gram method has them, in different layouts."""
    a = random(2, 136, 16)
    p = (a @ a.mT / 16).contiguous()
    right = p.double() @ p.double().mT
    compare(DESCRIPTORS(p, p.clone(), 1.0, None, 0.0, 0.0), right)
    compare(POINTERS(p, torch.stack([p, p], -1)[..., 0], 1.0, None, 0.0, 0.0), right)


def check_far_offsets() -> None:
    """Offsets beyond 2^31 elements. The pages between are never touched, so they cost no memory."""
    torch.use_deterministic_algorithms(False)
    n, r, k = shape = (3, 130, 70)
    a = random(n, r, k)
    near = POINTERS(a, a, 1.0, None, 0.0, 0.0)
    for strides in ((2**30, k, 1), (k, 2**24, 1), (r, 1, 2**25)):
        last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        assert last >= 2**31
        far = torch.empty(last + 1, dtype=torch.float16).as_strided(shape, strides).copy_(a)
        assert torch.equal(POINTERS(far, far, 1.0, None, 0.0, 0.0), near)


if __name__ == "__main__":
    main()

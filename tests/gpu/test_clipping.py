"""Clipping and loss scaling on one GPU: the host waits for nothing, and may hold gradients too."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

import shardmuon

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype"),
]

SHAPES = [(128, 96), (7,), (64, 64), ()]
DTYPES = [torch.float32, torch.bfloat16]


def parameters(device: str = "cuda") -> list[nn.Parameter]:
    """Parameters of two dtypes with random gradients."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for i, shape in enumerate(SHAPES):
        value = torch.randn(shape, generator=generator).to(DTYPES[i % 2])
        made.append(nn.Parameter(torch.zeros_like(value, device=device)))
        made[-1].grad = value.to(device)
    return made


@contextmanager
def no_waiting() -> Iterator[None]:
    """An error if the host waits for the device."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, math.inf])
def test_the_host_waits_for_no_norm(norm_type: float) -> None:
    ours, theirs = parameters(), parameters("cpu")
    shardmuon.grad_norm(ours, norm_type)  # kernels are loaded
    with no_waiting():
        norm = shardmuon.clip_grad_norm_(ours, 0.5, norm_type)
    assert norm.is_cuda
    right = shardmuon.clip_grad_norm_(theirs, 0.5, norm_type)
    torch.testing.assert_close(norm.cpu(), right, rtol=1e-5, atol=0)
    for one, other in zip(ours, theirs, strict=True):
        assert one.grad is not None
        assert other.grad is not None
        rtol = 1e-5 if other.grad.dtype == torch.float32 else 0.01
        torch.testing.assert_close(one.grad.cpu(), other.grad, rtol=rtol, atol=1e-9)


def test_gradients_on_the_host_and_on_the_device_are_clipped_together() -> None:
    mixed = [*parameters()[:2], *parameters("cpu")[2:]]
    alone = parameters("cpu")
    norm = shardmuon.clip_grad_norm_(mixed, 0.5)
    torch.testing.assert_close(norm.cpu(), shardmuon.clip_grad_norm_(alone, 0.5))
    for one, other in zip(mixed, alone, strict=True):
        assert one.grad is not None
        assert one.grad.device == one.device
        torch.testing.assert_close(one.grad.cpu(), other.grad)


def _found(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return list(scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values())


@pytest.mark.parametrize("bad", [False, True])
def test_unscaling_waits_for_nothing(bad: bool) -> None:
    made = parameters()
    optimizer = torch.optim.SGD(made, lr=0.1)
    scaler = shardmuon.GradScaler("cuda", init_scale=4.0)
    scaler.scale(torch.zeros((), device="cuda"))
    wanted = [p.grad / 4 for p in made if p.grad is not None]
    if bad:
        made[2].grad[1, 2] = math.inf  # type: ignore[index]
    with no_waiting():
        scaler.unscale_(optimizer)
    assert [float(each) for each in _found(scaler, optimizer)] == [float(bad)]
    if not bad:
        for p, right in zip(made, wanted, strict=True):
            torch.testing.assert_close(p.grad, right)

"""One process on one GPU: parity with torch, fused AdamW, and answers that stay on the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardmuon import Muon, Runtime
from shardmuon.orthogonalize.coefficients import schedule_of
from shardmuon.orthogonalize.newton_schulz import newton_schulz
from tests.reference import relative_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

SHAPES = [(128, 128), (256, 64), (64, 256), (128, 128)]


def values(seed: int) -> list[Tensor]:
    generator = torch.Generator("cuda").manual_seed(seed)
    return [torch.randn(s, generator=generator, device="cuda") for s in SHAPES]


def train(make: Callable[[list[nn.Parameter]], Any], steps: int = 10) -> tuple[list[Tensor], Any]:
    """Parameters after `steps` steps from the same values and gradients."""
    params = [nn.Parameter(value) for value in values(0)]
    optimizer = make(params)
    for step in range(steps):
        for parameter, gradient in zip(params, values(1 + step), strict=True):
            parameter.grad = gradient
        optimizer.step()
    return [p.detach() for p in params], optimizer


@pytest.mark.parametrize("scale", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_one_process_has_the_bits_of_torch(scale: str, nesterov: bool) -> None:
    settings: dict[str, Any] = {"lr": 0.02, "nesterov": nesterov, "adjust_lr_fn": scale}
    theirs, _ = train(lambda ps: torch.optim.Muon(ps, **settings))
    ours, _ = train(lambda ps: Muon(ps, runtime=Runtime(deterministic=True), **settings))
    assert all(map(torch.equal, ours, theirs))


def test_equal_shapes_in_one_batch_stay_close_to_single_ones() -> None:
    batch = torch.stack([values(0)[0], values(0)[3]])
    schedule = schedule_of("keller", 5)
    together = newton_schulz(batch, schedule, 1e-7, torch.float32)
    for index in range(2):
        alone = newton_schulz(batch[index], schedule, 1e-7, torch.float32)
        # float32 products summed in another order, five times over.
        assert relative_error(together[index].cpu().numpy(), alone.cpu().numpy()) < 1e-4


def test_adamw_has_the_bits_of_torch_fused() -> None:
    theirs, _ = train(lambda ps: torch.optim.AdamW(ps, lr=0.01, fused=True))
    group: dict[str, Any] = {"algorithm": "adamw", "lr": 0.01}
    ours, _ = train(lambda ps: Muon([{**group, "params": ps}]))
    assert all(map(torch.equal, ours, theirs))


def spoiled(nonfinite: Any) -> tuple[Muon, list[nn.Parameter], list[Tensor]]:
    """An optimizer of both algorithms after two good steps and one with an inf; state before it."""
    params = [nn.Parameter(value) for value in values(0)]
    groups: list[dict[str, Any]] = [
        {"params": params[:2]},
        {"params": params[2:], "algorithm": "adamw"},
    ]
    optimizer = Muon(groups, runtime=Runtime(nonfinite=nonfinite))
    for step in range(3):
        for parameter, gradient in zip(params, values(1 + step), strict=True):
            parameter.grad = gradient
        if step == 2:
            before = [tensor.clone() for tensor in tensors(optimizer, params)]
            params[1].grad[3, 5] = float("inf")  # type: ignore[index]
        optimizer.step()
    return optimizer, params, before


def tensors(optimizer: Muon, params: list[nn.Parameter]) -> list[Tensor]:
    state = [value for p in params for value in optimizer.state[p].values()]
    return [p.detach() for p in params] + state


@pytest.mark.parametrize("nonfinite", ["error", "skip"])
def test_a_refused_step_selects_the_old_values_on_the_device(nonfinite: str) -> None:
    optimizer, params, before = spoiled(nonfinite)
    assert all(map(torch.equal, tensors(optimizer, params), before))


def test_the_error_comes_at_the_next_step_or_on_request() -> None:
    optimizer, _, _ = spoiled("error")
    with pytest.raises(RuntimeError, match="inf or nan"):
        optimizer.check()
    optimizer, params, _ = spoiled("error")
    with pytest.raises(RuntimeError, match="last step changed nothing"):
        optimizer.step()
    params[1].grad = torch.ones_like(params[1])
    optimizer.step()
    optimizer.check()


def test_skipped_steps_are_counted_and_training_goes_on() -> None:
    optimizer, params, before = spoiled("skip")
    params[1].grad = torch.ones_like(params[1])
    optimizer.step()
    assert optimizer.stats.steps_skipped == 1
    assert not any(map(torch.equal, tensors(optimizer, params), before))


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_a_step_of_a_known_plan_never_waits_for_the_device() -> None:
    params = [nn.Parameter(value) for value in values(0)]
    groups: list[dict[str, Any]] = [
        {"params": params[:2]},
        {"params": params[2:], "algorithm": "adamw"},
    ]
    optimizer = Muon(groups)
    for parameter, gradient in zip(params, values(1), strict=True):
        parameter.grad = gradient
    optimizer.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("nonfinite", ["error", "skip", "allow"])
def test_the_host_waits_for_no_step_of_a_known_plan(nonfinite: Any) -> None:
    torch.manual_seed(0)
    shapes = ((64, 128), (128, 64), (64, 64), (256, 64))
    matrices = [nn.Parameter(torch.randn(shape, device="cuda")) for shape in shapes]
    vectors = [nn.Parameter(torch.randn(64, device="cuda")) for _ in range(3)]
    groups: list[dict[str, Any]] = [
        {"params": matrices},
        {"params": vectors, "algorithm": "adamw"},
    ]
    optimizer = Muon(groups, lr=0.01, runtime=Runtime(nonfinite=nonfinite))
    for step in range(5):
        for p in (*matrices, *vectors):
            p.grad = torch.randn_like(p)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error" if step >= 2 else "default")
        try:
            optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    optimizer.check()

"""Bit-equality with `torch.optim.Muon` on one process, and where torch itself is at fault.

Matrices are small: bfloat16 products are slow on a CPU without bfloat16 units.
"""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim._muon import _zeropower_via_newtonschulz

import shardmuon
from tests.problems import digest

SHAPES = [(32, 32), (48, 24), (24, 48), (1, 17), (17, 1)]
MODES = [None, "original", "match_rms_adamw"]


def random(shape: tuple[int, int], seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return [nn.Parameter(random(shape, i, dtype)) for i, shape in enumerate(SHAPES)]


def give_gradients(params: list[nn.Parameter], step: int) -> None:
    for index, p in enumerate(params):
        p.grad = random((p.shape[0], p.shape[1]), 1000 + 100 * step + index, p.dtype)


def bits(params: list[nn.Parameter], optimizer: torch.optim.Optimizer) -> str:
    buffers = [optimizer.state[p]["momentum_buffer"] for p in params]
    return digest([p.detach() for p in params] + buffers)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("nesterov", [True, False])
def test_ten_steps_are_bit_equal(mode: str | None, nesterov: bool) -> None:
    options: dict[str, Any] = {
        "lr": 0.02,
        "weight_decay": 0.1,
        "nesterov": nesterov,
        "adjust_lr_fn": mode,
    }
    ours, theirs = parameters(), parameters()
    our_optimizer = shardmuon.Muon(ours, ns_dtype=torch.bfloat16, **options)
    their_optimizer = torch.optim.Muon(theirs, **options)
    for step in range(10):
        for params, optimizer in ((ours, our_optimizer), (theirs, their_optimizer)):
            give_gradients(params, step)
            optimizer.step()
        assert bits(ours, our_optimizer) == bits(theirs, their_optimizer), f"step {step}"


def test_defaults_are_bit_equal_too() -> None:
    ours, theirs = parameters(), parameters()
    our_optimizer = shardmuon.Muon(ours, ns_dtype=torch.bfloat16)
    their_optimizer = torch.optim.Muon(theirs)
    for step in range(3):
        for params, optimizer in ((ours, our_optimizer), (theirs, their_optimizer)):
            give_gradients(params, step)
            optimizer.step()
    assert bits(ours, our_optimizer) == bits(theirs, their_optimizer)


@pytest.mark.filterwarnings("ignore:a matrix has a norm below eps")
def test_other_coefficients_steps_and_eps_are_bit_equal() -> None:
    options: dict[str, Any] = {"ns_coefficients": (2.0, -1.5, 0.5), "ns_steps": 3, "eps": 5.0}
    ours, theirs = parameters(), parameters()
    our_optimizer = shardmuon.Muon(ours, ns_dtype=torch.bfloat16, **options)
    their_optimizer = torch.optim.Muon(theirs, **options)
    for params, optimizer in ((ours, our_optimizer), (theirs, their_optimizer)):
        give_gradients(params, 0)
        optimizer.step()
    assert bits(ours, our_optimizer) == bits(theirs, their_optimizer)


def right_step(
    p: Tensor, m: Tensor, g: Tensor, nesterov: bool, lr: float = 0.02
) -> tuple[Tensor, Tensor]:
    """One step with torch's own NS on a copy; all else in float32, each result rounded once."""
    m = m.float().lerp(g.float(), 1 - 0.95).to(m.dtype)
    update = g.float().lerp(m.float(), 0.95).to(m.dtype) if nesterov else m.clone()
    update = _zeropower_via_newtonschulz(update, (3.4445, -4.7750, 2.0315), 5, 1e-7)
    scale = max(1, p.shape[0] / p.shape[1]) ** 0.5
    new = p.float().mul_(1 - lr * 0.1).add_(update.float(), alpha=-lr * scale)
    return new.to(p.dtype), m


@pytest.mark.parametrize("nesterov", [True, False])
def test_bfloat16_parameters_are_rounded_once(nesterov: bool) -> None:
    params = parameters(torch.bfloat16)
    optimizer = shardmuon.Muon(params, lr=0.02, nesterov=nesterov, ns_dtype=torch.bfloat16)
    expected = [(p.detach().clone(), torch.zeros_like(p)) for p in params]
    for step in range(10):
        give_gradients(params, step)
        gradients = [p.grad for p in params]
        optimizer.step()
        expected = [
            right_step(p, m, g, nesterov)
            for (p, m), g in zip(expected, gradients, strict=True)
            if g is not None
        ]
        right = digest([p for p, _ in expected] + [m for _, m in expected])
        assert bits(params, optimizer) == right, f"step {step}"


def test_bfloat16_parameters_are_within_one_rounding_of_torch() -> None:
    ours, theirs = parameters(torch.bfloat16), parameters(torch.bfloat16)
    for p in (*ours, *theirs):  # near 1, so that one rounding has one size
        p.data.clamp_(-0.2, 0.2).add_(1.5)
    our_optimizer = shardmuon.Muon(ours, lr=0.02, ns_dtype=torch.bfloat16)
    their_optimizer = torch.optim.Muon(theirs, lr=0.02)
    for params, optimizer in ((ours, our_optimizer), (theirs, their_optimizer)):
        give_gradients(params, 0)
        optimizer.step()
    for our, their in zip(ours, theirs, strict=True):
        ulp = 2.0**-7
        assert float((our.detach().float() - their.detach().float()).abs().max()) <= ulp
        momenta = (our_optimizer.state[our], their_optimizer.state[their])
        assert digest([momenta[0]["momentum_buffer"]]) == digest([momenta[1]["momentum_buffer"]])


def test_bfloat16_momentum_survives_orthogonalization_without_nesterov() -> None:
    p = nn.Parameter(random((24, 48), 0, torch.bfloat16))
    p.grad = random((24, 48), 1, torch.bfloat16)
    optimizer = shardmuon.Muon([p], nesterov=False, ns_dtype=torch.bfloat16)
    optimizer.step()
    right = torch.zeros_like(p).lerp(p.grad, 1 - 0.95)
    assert digest([optimizer.state[p]["momentum_buffer"]]) == digest([right])


def test_state_dict_of_torch_muon_loads() -> None:
    ours, theirs = parameters(), parameters()
    their_optimizer = torch.optim.Muon(theirs, lr=0.05, weight_decay=0.2, momentum=0.9)
    for step in range(3):
        give_gradients(theirs, step)
        their_optimizer.step()
    our_optimizer = shardmuon.Muon(ours, ns_dtype=torch.bfloat16)
    our_optimizer.load_state_dict(copy.deepcopy(their_optimizer.state_dict()))
    for our, their in zip(ours, theirs, strict=True):
        our.data.copy_(their.data)
    group = our_optimizer.param_groups[0]
    assert (group["lr"], group["weight_decay"], group["momentum"]) == (0.05, 0.2, 0.9)
    assert group["algorithm"] == "muon"
    group["ns_dtype"] = torch.bfloat16  # torch's file has no such key
    for params, optimizer in ((ours, our_optimizer), (theirs, their_optimizer)):
        give_gradients(params, 3)
        optimizer.step()
    assert bits(ours, our_optimizer) == bits(theirs, their_optimizer)


def test_constructor_starts_like_that_of_torch() -> None:
    ours = list(inspect.signature(shardmuon.Muon).parameters.values())
    theirs = list(inspect.signature(torch.optim.Muon).parameters.values())
    assert [(p.name, p.default) for p in ours[: len(theirs)]] == [
        (p.name, p.default) for p in theirs
    ]
    *own, further = ours[len(theirs) :]
    assert all(p.kind is inspect.Parameter.KEYWORD_ONLY for p in own)
    assert further.kind is inspect.Parameter.VAR_KEYWORD

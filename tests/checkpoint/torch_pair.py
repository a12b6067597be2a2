"""A model under torch's own pair of optimizers and under ours, for tests of conversion."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

import shardmuon
from tests import models
from tests.problems import digest, local

MUON_KEYS: dict[str, Any] = {"lr": 0.02, "momentum": 0.9, "nesterov": True, "weight_decay": 0.2}
ADAMW_KEYS: dict[str, Any] = {"lr": 0.01, "betas": (0.8, 0.95)}
EARLY = models.MATRICES[:2]
LATE = models.MATRICES[2:]

Pair = tuple[torch.optim.Muon, torch.optim.AdamW]
States = list[dict[str, Any]]
Edit = Callable[[Any], object]


def parts(model: nn.Module) -> list[tuple[dict[str, Any], list[tuple[str, nn.Parameter]]]]:
    """Keys and named parameters of four groups, Muon and AdamW in turn, not in model order."""
    named = dict(model.named_parameters())
    others = [name for name in reversed(named) if name not in models.MATRICES]
    vectors = [name for name in others if named[name].ndim == 1]
    tables = [name for name in others if named[name].ndim > 1]
    keys: list[tuple[dict[str, Any], list[str]]] = [
        ({**MUON_KEYS}, LATE),
        ({**ADAMW_KEYS}, tables),
        ({**MUON_KEYS, "lr": 0.03, "adjust_lr_fn": "match_rms_adamw"}, EARLY),
        ({**ADAMW_KEYS, "weight_decay": 0.0}, vectors),
    ]
    return [(each, [(name, named[name]) for name in names]) for each, names in keys]


def theirs(model: nn.Module, named: bool = True) -> Pair:
    """torch's two optimizers over `parts(model)`."""
    groups: list[dict[str, Any]] = [
        {**keys, "params": pairs if named else [p for _, p in pairs]}
        for keys, pairs in parts(model)
    ]
    return torch.optim.Muon(groups[::2]), torch.optim.AdamW(groups[1::2])


def ours(model: nn.Module, named: bool = True, **muon: Any) -> shardmuon.Muon:
    """Our optimizer over `parts(model)`, with settings of its own where `muon` is empty."""
    groups: list[dict[str, Any]] = [
        {"params": pairs if named else [p for _, p in pairs], **(muon if number % 2 == 0 else {})}
        for number, (_, pairs) in enumerate(parts(model))
    ]
    for group in groups[1::2]:
        group["algorithm"] = "adamw"
    runtime = shardmuon.Runtime(deterministic=True)
    return shardmuon.Muon(groups, ns_dtype=torch.bfloat16, runtime=runtime)


def train(model: nn.Module, optimizers: Iterable[torch.optim.Optimizer], steps: range) -> None:
    for step in steps:
        models.spread_gradients(model, step)
        for optimizer in optimizers:
            optimizer.step()


def tensors(model: nn.Module, *optimizers: torch.optim.Optimizer) -> list[Tensor]:
    """Parameters and state, sorted by name and key."""
    found: list[Tensor] = []
    for _, p in sorted(model.named_parameters()):
        found.append(p)
        for optimizer in optimizers:
            found += [value for _, value in sorted(optimizer.state.get(p, {}).items())]
    return found


def bits(model: nn.Module, *optimizers: torch.optim.Optimizer) -> str:
    return digest([local(t) for t in tensors(model, *optimizers)])


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[str, str]:
    """Tensors and settings, to see that nothing changed."""
    groups = [sorted(group.items()) for group in optimizer.param_groups]
    settings = [[item for item in group if item[0] != "params"] for group in groups]
    return bits(model, optimizer), repr(settings)


def trained(named: bool = True, steps: int = 3) -> tuple[nn.Module, Pair]:
    """A whole model and torch's optimizers after some steps."""
    model = models.make()
    pair = theirs(model, named)
    train(model, pair, range(steps))
    return model, pair


def filled(model: nn.Module, **muon: Any) -> shardmuon.Muon:
    """Our optimizer of `model`, with state and settings that loading has to overwrite."""
    optimizer = ours(model, **muon)
    for state in optimizer.state.values():
        for value in state.values():
            local(value).fill_(7)
    return optimizer


def forms(model: nn.Module, pair: Pair, form: str) -> States:
    """torch's state of both optimizers in one of its forms."""
    if form in ("named", "unnamed"):
        return [copy.deepcopy(optimizer.state_dict()) for optimizer in pair]
    options = StateDictOptions(
        flatten_optimizer_state_dict="flat" in form, full_state_dict="full" in form
    )
    if "both" in form:
        state: Any = get_optimizer_state_dict(model, pair, options=options)
        return [state, state]
    found: Any = [get_optimizer_state_dict(model, each, options=options) for each in pair]
    return list(found)


def assert_equal_dicts(one: Any, other: Any) -> None:
    """Equal keys and plain values; tensors equal in dtype and bits."""
    if isinstance(other, Tensor):
        assert digest([local(one)]) == digest([local(other)])
    elif isinstance(other, dict):
        assert one.keys() == other.keys()
        for key in other:
            assert_equal_dicts(one[key], other[key])
    elif isinstance(other, list) and other and isinstance(other[0], dict):
        assert len(one) == len(other)
        for left, right in zip(one, other, strict=True):
            assert_equal_dicts(left, right)
    else:
        assert type(one) is type(other)
        assert one == other

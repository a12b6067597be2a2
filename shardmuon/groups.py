"""Parameter groups: their keys, defaults and validation.

Owns what a group dict may hold for each algorithm. Looks at values and at parameters' shapes and
dtypes, never at placements (planning refuses those), and changes no tensor.
"""

from __future__ import annotations

import difflib
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from shardmuon.orthogonalize.coefficients import KELLER, PRESETS, schedule_of
from shardmuon.orthogonalize.newton_schulz import METHODS
from shardmuon.planning.cut import Cut, cut_parameter
from shardmuon.planning.matrix import AUTO

__all__ = [
    "ADAMW",
    "MUON",
    "STRUCTURAL_KEYS",
    "check_group",
    "clean_fqn",
    "complete_group",
    "cuts_of",
    "plain",
]

MUON, ADAMW = "muon", "adamw"

STRUCTURAL_KEYS = ("algorithm", "split_sizes", "num_heads", "transposed", "flatten")
"""Keys that say what a group is; compared on load, never taken from a file."""

NS_DTYPES = (None, torch.float32, torch.bfloat16)

MUON_DEFAULTS: dict[str, Any] = {
    "lr": 1e-3,
    "weight_decay": 0.1,
    "momentum": 0.95,
    "nesterov": True,
    "ns_coefficients": KELLER,
    "eps": 1e-7,
    "ns_steps": 5,
    "ns_method": AUTO,
    "adjust_lr_fn": None,
    "ns_dtype": None,
    "momentum_dtype": None,
    "split_sizes": None,
    "num_heads": None,
    "transposed": False,
    "flatten": False,
}
# The defaults of torch.optim.AdamW, which differ from Muon's.
ADAMW_DEFAULTS: dict[str, Any] = {
    "lr": 1e-3,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "weight_decay": 0.01,
}
# Keys of torch itself and of its schedulers, some of which look like misspelt ones.
_FRAMEWORK_KEYS = ("params", "param_names", "algorithm", "mesh", "max_momentum", "base_momentum")
_KEYS = {MUON: MUON_DEFAULTS, ADAMW: ADAMW_DEFAULTS}
_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_forward_module")


@functools.cache  # a step asks for every name
def clean_fqn(name: str) -> str:
    """`name` without the parts that wrappers (compile, checkpointing, DDP) put in.

    `module` is a wrapper's only in front; inside a name it may be the user's own attribute.
    """
    parts = [part for part in name.split(".") if part not in _WRAPPERS]
    while len(parts) > 1 and parts[0] == "module":
        parts = parts[1:]
    return ".".join(parts)


def plain(value: Any) -> Any:
    """A setting as it is compared: tuples as lists, one-element tensors as numbers."""
    if isinstance(value, (tuple, list)):
        return [plain(item) for item in value]
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


def complete_group(group: Mapping[str, Any], muon_defaults: Mapping[str, Any]) -> dict[str, Any]:
    """`group` with the keys it does not give: Muon's from the constructor, AdamW's from torch."""
    algorithm = group.get("algorithm", MUON)
    if algorithm not in _KEYS:
        raise ValueError(f"group key algorithm must be one of {sorted(_KEYS)}, got {algorithm!r}")
    defaults = {**MUON_DEFAULTS, **muon_defaults} if algorithm == MUON else ADAMW_DEFAULTS
    for key in group:
        _check_key(key, algorithm)
    return {"algorithm": algorithm, **{key: defaults[key] for key in _KEYS[algorithm]}, **group}


def _check_key(key: str, algorithm: str) -> None:
    """Refuse keys of the other algorithm and misspelt ones; frameworks may add their own."""
    own = _KEYS[algorithm]
    if key in own or key in _FRAMEWORK_KEYS:
        return
    other = _KEYS[ADAMW if algorithm == MUON else MUON]
    if key in other:
        raise ValueError(f"group key {key} does not belong to algorithm {algorithm!r}")
    near = difflib.get_close_matches(key, own, n=1, cutoff=0.8)
    if near:
        raise ValueError(f"unknown group key {key}: did you mean {near[0]}?")


def check_group(group: Mapping[str, Any], names: list[str]) -> None:
    """ValueError naming the field and its value if anything in `group` is out of range.

    names: one per parameter, used in messages.
    """
    checks = _MUON_CHECKS if group["algorithm"] == MUON else _ADAMW_CHECKS
    for key, (allowed, is_valid) in checks.items():
        value = group[key]
        if not is_valid(value):
            raise ValueError(f"{key} must be {allowed}, got {value!r}")
    if group["algorithm"] == MUON:
        try:
            schedule_of(group["ns_coefficients"], group["ns_steps"])
        except ValueError as error:
            raise ValueError(f"ns_coefficients and ns_steps do not fit: {error}") from None
    for name, parameter in zip(names, group["params"], strict=True):
        _check_parameter(name, parameter, group)


def cuts_of(parameter: Tensor, group: Mapping[str, Any]) -> list[tuple[str, Cut]]:
    """The matrices of a parameter in a muon group, each with the suffix of its id."""
    return cut_parameter(
        parameter.shape,
        split_sizes=group["split_sizes"],
        num_heads=group["num_heads"],
        transposed=group["transposed"],
        flatten=group["flatten"],
    )


def _check_parameter(name: str, parameter: Tensor, group: Mapping[str, Any]) -> None:
    if not parameter.is_floating_point():
        raise ValueError(
            f"{name} has dtype {parameter.dtype}; only real floating point is supported"
        )
    if parameter.layout != torch.strided:
        raise ValueError(f"{name} has layout {parameter.layout}; only strided is supported")
    if group["algorithm"] == MUON:
        try:
            cuts_of(parameter, group)
        except ValueError as error:
            raise ValueError(
                f"{name}: {error}; or put it into a group with algorithm='adamw'"
            ) from None


def _number(value: object) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _at_least_zero(value: Any) -> bool:
    return _number(value) and bool(value >= 0)


def _fraction(value: Any) -> bool:
    return _number(value) and 0 <= value < 1


def _triple(value: Any) -> bool:
    return isinstance(value, (tuple, list)) and len(value) == 3 and all(map(_number, value))


def _coefficients(value: Any) -> bool:
    if isinstance(value, str):
        return value in PRESETS
    return _triple(value) or (
        isinstance(value, (tuple, list)) and len(value) > 0 and all(map(_triple, value))
    )


def _steps(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value < 100


def _betas(value: Any) -> bool:
    return isinstance(value, (tuple, list)) and len(value) == 2 and all(map(_fraction, value))


def _sizes(value: Any) -> bool:
    if value is None:
        return True
    return isinstance(value, (tuple, list)) and len(value) > 0 and all(map(_count, value))


def _count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _float_dtype(value: Any) -> bool:
    return value is None or (isinstance(value, torch.dtype) and value.is_floating_point)


Check = tuple[str, Callable[[Any], bool]]

_MUON_CHECKS: dict[str, Check] = {
    "lr": ("a number >= 0", _at_least_zero),
    "weight_decay": ("a number >= 0", _at_least_zero),
    "momentum": ("a number in [0, 1)", _fraction),
    "nesterov": ("a bool", lambda value: isinstance(value, bool)),
    "ns_coefficients": (
        f"three numbers (a, b, c), a list of such, or one of {sorted(PRESETS)}",
        _coefficients,
    ),
    "eps": ("None or a number >= 0", lambda value: value is None or _at_least_zero(value)),
    "ns_steps": ("an integer from 1 to 99", _steps),
    "ns_method": (f"one of {(AUTO, *METHODS)}", lambda value: value in (AUTO, *METHODS)),
    "adjust_lr_fn": (
        "None, 'original' or 'match_rms_adamw'",
        lambda value: value in (None, "original", "match_rms_adamw"),
    ),
    "ns_dtype": (f"one of {NS_DTYPES}", lambda value: value in NS_DTYPES),
    "momentum_dtype": ("None or a floating dtype", _float_dtype),
    "split_sizes": ("None or a list of integers above 0", _sizes),
    "num_heads": ("None or an integer above 0", lambda value: value is None or _count(value)),
    "transposed": ("a bool", lambda value: isinstance(value, bool)),
    "flatten": ("a bool", lambda value: isinstance(value, bool)),
}
_ADAMW_CHECKS: dict[str, Check] = {
    "lr": ("a number >= 0", _at_least_zero),
    "betas": ("two numbers in [0, 1)", _betas),
    "eps": ("a number >= 0", _at_least_zero),
    "weight_decay": ("a number >= 0", _at_least_zero),
}

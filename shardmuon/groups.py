"""Parameter groups: their keys, defaults and validation.

Owns what a group dict may hold for each algorithm; the ranges themselves are those of `limits`.
Looks at values and at parameters' shapes and dtypes, never at placements (planning refuses those),
and changes no tensor.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from shardmuon import limits
from shardmuon.limits import Range, advice, choices, range_of, show
from shardmuon.orthogonalize.coefficients import KELLER, Schedule, schedule_of
from shardmuon.planning.cut import Cut, cut_parameter
from shardmuon.planning.matrix import AUTO

__all__ = [
    "ADAMW",
    "MUON",
    "OTHER_RULES",
    "STATE",
    "STRUCTURAL_KEYS",
    "check_keys",
    "check_parameter",
    "check_settings",
    "clean_fqn",
    "complete_group",
    "cuts_of",
    "plain",
    "schedule_in",
]

MUON, ADAMW = "muon", "adamw"

STRUCTURAL_KEYS = ("algorithm", "split_sizes", "num_heads", "transposed", "flatten")
"""Keys that say what a group is; compared on load, never taken from a file."""

STATE = {MUON: {"momentum_buffer"}, ADAMW: {"step", "exp_avg", "exp_avg_sq"}}
"""Keys of a parameter's state under each algorithm."""

NS_DTYPES = tuple(getattr(torch, name) for name in choices(limits.NsDtype))
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""Of parameters and momentum; torch does not compute with narrower ones."""

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
OTHER_RULES = {"amsgrad": True, "maximize": True, "decoupled_weight_decay": False}
"""Keys of torch's optimizers, and with which value they ask for a rule that is not here."""
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
    """A setting as it is compared: tuples as lists, tensors as numbers or lists of numbers."""
    if isinstance(value, (tuple, list)):
        return [plain(item) for item in value]
    if not isinstance(value, Tensor):
        return value
    if value.is_meta or value.layout != torch.strided:
        return repr(value)
    return value.item() if value.numel() == 1 else value.tolist()


def complete_group(group: Mapping[str, Any], muon_defaults: Mapping[str, Any]) -> dict[str, Any]:
    """`group` with the keys it does not give: Muon's from the constructor, AdamW's from torch."""
    algorithm = _known(group.get("algorithm", MUON))
    defaults = {**MUON_DEFAULTS, **muon_defaults} if algorithm == MUON else ADAMW_DEFAULTS
    check_keys(group, algorithm)
    return {"algorithm": algorithm, **{key: defaults[key] for key in _KEYS[algorithm]}, **group}


def _known(algorithm: object) -> str:
    """`algorithm`, if it is the name of one."""
    if not isinstance(algorithm, str) or algorithm not in _KEYS:
        raise ValueError(
            f"group key algorithm must be one of {sorted(_KEYS)}, got {show(algorithm)}"
            f"{advice(algorithm, _KEYS)}"
        )
    return algorithm


def check_keys(group: Mapping[str, Any], algorithm: str) -> None:
    """Refuse keys of the other algorithm and misspelt ones; frameworks may add their own.

    Refused too are keys of torch under which it would compute something that we do not.
    """
    own, other = _KEYS[algorithm], _KEYS[ADAMW if algorithm == MUON else MUON]
    for key, value in group.items():
        if key in own or key in _FRAMEWORK_KEYS:
            continue
        if not isinstance(key, str):
            raise ValueError(f"group keys must be text, got {show(key)}")
        if key in other:
            raise ValueError(f"group key {key} does not belong to algorithm {algorithm!r}")
        if key in OTHER_RULES and isinstance(value, int) and bool(value) is OTHER_RULES[key]:
            raise ValueError(f"{key}={show(value)} is not supported")
        near = difflib.get_close_matches(key, own, n=1, cutoff=0.8)
        if near:
            raise ValueError(f"unknown group key {show(key)}: did you mean {near[0]}?")


def check_settings(group: Mapping[str, Any], *, wait: bool = True) -> None:
    """ValueError naming the field and its value if a setting in `group` is out of range.

    wait: also look at numbers that are on a GPU, which waits for it, and at what only a new plan
    can make wrong; False is for every step.
    """
    algorithm = _known(group.get("algorithm"))
    for key, (allowed, is_valid, names) in _CHECKS[algorithm].items():
        if key not in group:
            raise ValueError(
                f"a group lacks {key}, a key of algorithm {algorithm!r}; groups keep their"
                " algorithm and their keys"
            )
        value = group[key]
        if not is_valid(value, wait):
            near = advice(value, names)
            raise ValueError(f"{key} must be {allowed}, got {show(value)}{near}")
    if wait and algorithm == MUON:
        schedule_in(group)


def schedule_in(group: Mapping[str, Any]) -> Schedule:
    """The triples of a muon group's steps."""
    try:
        return schedule_of(group["ns_coefficients"], group["ns_steps"])
    except ValueError as error:
        raise ValueError(f"ns_coefficients and ns_steps do not fit: {error}") from None


def cuts_of(parameter: Tensor, group: Mapping[str, Any]) -> list[tuple[str, Cut]]:
    """The matrices of a parameter in a muon group, each with the suffix of its id."""
    return cut_parameter(
        parameter.shape,
        split_sizes=group["split_sizes"],
        num_heads=group["num_heads"],
        transposed=group["transposed"],
        flatten=group["flatten"],
    )


def check_parameter(name: str, parameter: Tensor, group: Mapping[str, Any]) -> None:
    """ValueError, with `name`, if the group's algorithm cannot take this parameter."""
    if is_lazy(parameter):
        raise ValueError(f"{name} has no shape yet; run the model once before")
    if parameter.dtype not in FLOATS:
        raise ValueError(
            f"{name} has dtype {parameter.dtype}; only real floating point is supported:"
            f" {', '.join(map(str, FLOATS))}"
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


Check = tuple[str, Callable[[Any, bool], bool], Sequence[str]]
"""(what is allowed, whether a value is, names among it). The bool is `wait` of `check_settings`."""


def _in_range(bounds: Range, value: Any, wait: bool) -> bool:
    """Whether a number, or a one-element tensor of a real number, is within `bounds`."""
    if type(value) in (Tensor, nn.Parameter):
        if value.numel() != 1 or value.is_meta or value.is_complex() or value.dtype == torch.bool:
            return False
        if not wait and not value.is_cpu:
            return True
        value = value.item()
    return bounds.holds(value)


def _numbers(bounds: Range, count: int, value: Any, wait: bool) -> bool:
    """Whether `value` lists `count` such numbers."""
    return (
        isinstance(value, (tuple, list))
        and len(value) == count
        and all(_in_range(bounds, each, wait) for each in value)
    )


_FINITE, _COUNT, _STEPS = map(range_of, (limits.Finite, limits.Count, limits.NsSteps))
_PRESETS = choices(limits.Preset)


def _coefficients(value: Any, wait: bool) -> bool:
    if isinstance(value, str):
        return value in _PRESETS
    triple = functools.partial(_numbers, _FINITE, 3, wait=wait)
    if not isinstance(value, (tuple, list)):
        return False
    return triple(value) or (len(value) > 0 and all(map(triple, value)))


def _count(value: Any) -> bool:
    return _COUNT.holds(value)


def _sizes(value: Any, wait: bool) -> bool:
    if value is None:
        return True
    return isinstance(value, (tuple, list)) and len(value) > 0 and all(map(_count, value))


def _number(hint: Any) -> Check:
    return range_of(hint).describe(), functools.partial(_in_range, range_of(hint)), ()


def _or_none(check: Check) -> Check:
    allowed, is_valid, names = check
    return f"None or {allowed}", lambda value, wait: value is None or is_valid(value, wait), names


def _name(hint: Any) -> Check:
    names = choices(hint)
    return f"one of {names}", lambda value, wait: isinstance(value, str) and value in names, names


def _dtype(dtypes: Sequence[torch.dtype]) -> Check:
    allowed = f"one of {', '.join(map(str, dtypes))}"
    return allowed, lambda value, wait: isinstance(value, torch.dtype) and value in dtypes, ()


_BOOL: Check = ("a bool", lambda value, wait: isinstance(value, bool), ())

_MUON_CHECKS: dict[str, Check] = {
    "lr": _number(limits.NotNegative),
    "weight_decay": _number(limits.NotNegative),
    "momentum": _number(limits.Decay),
    "nesterov": _BOOL,
    "ns_coefficients": (
        f"three numbers (a, b, c) {_FINITE}, a list of such, or one of {_PRESETS}",
        _coefficients,
        _PRESETS,
    ),
    "eps": _or_none(_number(limits.NormFloor)),
    "ns_steps": (
        _STEPS.describe(),
        lambda value, wait: _STEPS.holds(value),
        (),
    ),
    "ns_method": _name(limits.Method),
    "adjust_lr_fn": _or_none(_name(limits.AdjustLr)),
    "ns_dtype": _or_none(_dtype(NS_DTYPES)),
    "momentum_dtype": _or_none(_dtype(FLOATS)),
    "split_sizes": ("None or a list of whole numbers above 0", _sizes, ()),
    "num_heads": _or_none((_COUNT.describe(), lambda value, wait: _count(value), ())),
    "transposed": _BOOL,
    "flatten": _BOOL,
}
_ADAMW_CHECKS: dict[str, Check] = {
    "lr": _number(limits.NotNegative),
    "betas": (
        f"two numbers, each {range_of(limits.Decay).describe()}",
        functools.partial(_numbers, range_of(limits.Decay), 2),
        (),
    ),
    "eps": _number(limits.NotNegative),
    "weight_decay": _number(limits.NotNegative),
}
_CHECKS = {MUON: _MUON_CHECKS, ADAMW: _ADAMW_CHECKS}

"""Parameter groups: their keys, defaults and validation.

Owns which algorithms there are and what a group dict of each may hold, as its rule declares it
(`rules/`). Looks at values and at parameters' shapes and dtypes, never at placements (planning
refuses those), and changes no tensor.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from shardmuon.keys import FLOATS, Keys
from shardmuon.limits import advice, show
from shardmuon.orthogonalize.coefficients import Schedule, schedule_of
from shardmuon.planning.cut import Cut, cut_parameter

__all__ = [
    "ADAMW",
    "ALGORITHMS",
    "MUON",
    "OTHER_RULES",
    "STRUCTURAL_KEYS",
    "Algorithm",
    "StateKind",
    "block_now",
    "check_keys",
    "check_parameter",
    "check_settings",
    "clean_fqn",
    "complete_group",
    "cuts_of",
    "known",
    "plain",
    "schedule_in",
    "updates_matrices",
]

MUON, ADAMW = "muon", "adamw"

STRUCTURAL_KEYS = ("algorithm", "split_sizes", "num_heads", "transposed", "flatten")
"""Keys that say what a group is; compared on load, never taken from a file."""

Form = Literal["parameter", "rows", "counter"]


class StateKind(NamedTuple):
    """A tensor of state per parameter, which starts with zeros.

    form: "parameter" has the parameter's shape; "rows" has one column instead of all, for a number
    per row of each matrix; both are placed as the parameter is. "counter" is [] on every rank.
    dtype: one, the group key that has one, or None: the parameter's.
    """

    form: Form
    dtype: torch.dtype | str | None = None

    def dtype_for(self, parameter: Tensor, group: Mapping[str, Any]) -> torch.dtype:
        """The dtype of this state of `parameter`."""
        if isinstance(self.dtype, str):
            chosen: torch.dtype | None = group[self.dtype]
        else:
            chosen = torch.float32 if self.form == "counter" else self.dtype
        return chosen or parameter.dtype


@dataclass(frozen=True)
class Algorithm:
    """What is known of an algorithm without its arithmetic.

    keys: of its groups. state: of a parameter. on_matrices: it updates whole matrices, and takes no
    other parameters.
    """

    keys: Keys
    state: Mapping[str, StateKind]
    on_matrices: bool

    @cached_property
    def defaults(self) -> dict[str, Any]:
        """Default by key."""
        return {name: key.default for name, key in self.keys.items()}


ALGORITHMS: dict[str, Algorithm] = {}
"""Every algorithm by the name that the group key `algorithm` has; filled by `rules.register`."""

# Keys of torch itself and of its schedulers, some of which look like misspelt ones.
_FRAMEWORK_KEYS = ("params", "param_names", "algorithm", "mesh", "max_momentum", "base_momentum")
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
    """`group` with the keys it does not give.

    Those of the constructor hold for all algorithms that update matrices; the others have their
    own defaults.
    """
    algorithm = known(group.get("algorithm", muon_defaults.get("algorithm", MUON)))
    defaults = ALGORITHMS[algorithm].defaults
    if ALGORITHMS[algorithm].on_matrices:
        defaults = {key: muon_defaults.get(key, value) for key, value in defaults.items()}
    check_keys(group, algorithm)
    return {"algorithm": algorithm, **defaults, **group}


def updates_matrices(group: Mapping[str, Any]) -> bool:
    """Whether the group's algorithm updates whole matrices."""
    return ALGORITHMS[known(group.get("algorithm"))].on_matrices


def known(algorithm: object) -> str:
    """`algorithm`, if it is the name of one."""
    if not isinstance(algorithm, str) or algorithm not in ALGORITHMS:
        raise ValueError(
            f"group key algorithm must be one of {sorted(ALGORITHMS)}, got {show(algorithm)}"
            f"{advice(algorithm, ALGORITHMS)}"
        )
    return algorithm


def check_keys(group: Mapping[str, Any], algorithm: str) -> None:
    """Refuse keys of other algorithms and misspelt ones; frameworks may add their own.

    Refused too are keys of torch under which it would compute something that we do not.
    """
    own = ALGORITHMS[algorithm].keys
    others = {key for each in ALGORITHMS.values() for key in each.keys}
    for key, value in group.items():
        if key in own or key in _FRAMEWORK_KEYS:
            continue
        if not isinstance(key, str):
            raise ValueError(f"group keys must be text, got {show(key)}")
        if key in others:
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
    algorithm = known(group.get("algorithm"))
    for key, (_, (allowed, is_valid, names)) in ALGORITHMS[algorithm].keys.items():
        if key not in group:
            raise ValueError(
                f"a group lacks {key}, a key of algorithm {algorithm!r}; groups keep their"
                " algorithm and their keys"
            )
        value = group[key]
        if not is_valid(value, wait):
            near = advice(value, names)
            raise ValueError(f"{key} must be {allowed}, got {show(value)}{near}")
    if ALGORITHMS[algorithm].on_matrices:
        _check_blocks(group)
        if wait:
            schedule_in(group)


def _check_blocks(group: Mapping[str, Any]) -> None:
    """ValueError if the steps between those of whole matrices have no blocks, or unusable ones."""
    period, block = group.get("ns_period", 1), group.get("ns_block")
    if period == 1:
        return
    if block is None:
        raise ValueError(f"ns_period={period} needs ns_block, the rows and columns of a block")
    kinds = ALGORITHMS[group["algorithm"]].state.values()
    if block[1] is not None and any(kind.form == "rows" for kind in kinds):
        raise ValueError(
            f"ns_block={block} cuts rows, of which algorithm {group['algorithm']!r} has a number"
            " each; expected (rows, None)"
        )


def schedule_in(group: Mapping[str, Any]) -> Schedule:
    """The triples of the steps of a group that updates matrices."""
    try:
        return schedule_of(group["ns_coefficients"], group["ns_steps"])
    except ValueError as error:
        raise ValueError(f"ns_coefficients and ns_steps do not fit: {error}") from None


def cuts_of(parameter: Tensor, group: Mapping[str, Any]) -> list[tuple[str, Cut]]:
    """The matrices of a parameter in such a group, each with the suffix of its id."""
    return cut_parameter(
        parameter.shape,
        split_sizes=group["split_sizes"],
        num_heads=group["num_heads"],
        transposed=group["transposed"],
        flatten=group["flatten"],
    )


def block_now(group: Mapping[str, Any]) -> tuple[int | None, int | None] | None:
    """(rows, cols) of the blocks that this step orthogonalizes; None for whole matrices.

    Every `ns_period`-th step takes whole matrices, the first step among them.
    """
    if group.get("step", 0) % group.get("ns_period", 1) == 0:
        return None
    rows, cols = group["ns_block"]
    return rows, cols


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
    if updates_matrices(group):
        try:
            cuts_of(parameter, group)
        except ValueError as error:
            raise ValueError(
                f"{name}: {error}; or put it into a group with algorithm='adamw'"
            ) from None

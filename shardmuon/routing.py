"""Parameter groups from a model: which parameter takes which rule, and why.

Owns `param_groups`, its overrides and its table. The default rule is that of `kinds`: a parameter
goes to Muon only for a positive reason (it is the weight of a hidden linear layer, or a stack of
experts that says which way its matrices lie); everything unknown goes to AdamW and is listed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn

from shardmuon.groups import ADAMW, MUON, check_settings, complete_group, updates_matrices
from shardmuon.kinds import UNKNOWN, Use, default_rule, heads_of, uses_of
from shardmuon.limits import advice, show
from shardmuon.planning.report import table

__all__ = ["ParamGroups", "Routed", "param_groups"]


@dataclass(frozen=True)
class Routed:
    """One parameter's way: rule is the group key `algorithm`; shape is global."""

    name: str
    shape: tuple[int, ...]
    rule: str
    reason: str


class ParamGroups(list[dict[str, Any]]):
    """Groups ready for `Muon`, with the table that says how they came about."""

    def __init__(self, groups: Sequence[dict[str, Any]], routed: Sequence[Routed]) -> None:
        super().__init__(groups)
        self.table: tuple[Routed, ...] = tuple(routed)

    @property
    def unknown(self) -> tuple[Routed, ...]:
        """Rows of matrices, stacks and the like that no rule knows: they take AdamW."""
        return tuple(row for row in self.table if row.reason.startswith(UNKNOWN))

    def report(self) -> str:
        """The table as text; a reason that begins with "unknown" asks for a look."""
        rows = [(r.name, "x".join(map(str, r.shape)), r.rule, r.reason) for r in self.table]
        return "\n".join(table(("parameter", "shape", "rule", "reason"), rows))


def param_groups(
    model: nn.Module,
    *,
    muon: Mapping[str, Any] | None = None,
    adamw: Mapping[str, Any] | None = None,
    to_muon: Sequence[str] = (),
    to_adamw: Sequence[str] = (),
) -> ParamGroups:
    """Sort the trainable parameters of `model` into groups for `Muon`.

    Muon takes matrices of hidden layers: weights of `nn.Linear` and its subclasses (LoRA's factors
    are such, each a matrix of its own), of Hugging Face's `Conv1D` (stored transposed), and 3-D
    parameters [experts, ...] of modules with an attribute `is_transposed`, which says how they are
    stored. AdamW takes embeddings (by type), norms and biases, the output head, routers, matrices
    of one row or column, and everything unknown (`ParamGroups.unknown`); vectors and scalars
    without weight decay. A tied weight appears once, as what its first name says, or as an
    embedding or head if any name does.

    A head is what `get_output_embeddings()` returns, a module with a usual name, or an `nn.Linear`
    directly under the root while modules below others hold weights: the first or the last layer.
    A root whose layers all lie directly under it, such as an `nn.Sequential` of linear layers, has
    heads by name only. Wrappers around the model count as no level.

    muon, adamw: group keys for either kind; with `algorithm`, another rule takes the place of Muon
    or AdamW. to_muon, to_adamw: patterns (`*` and `?`, as in
    `fnmatch`) on parameter names without wrapper prefixes; they override the default rule.

    Raises ValueError if a group key or its value is refused, if a pattern matches nothing, if a
    parameter matches both kinds, if a parameter that is not a matrix is sent to Muon, or if no
    parameter at all takes Muon; TypeError if an argument is of another kind.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, got {show(model)}")
    _check_keys("muon", muon, MUON)
    _check_keys("adamw", adamw, ADAMW)
    uses = uses_of(model)
    _check_patterns("to_muon", to_muon, uses)
    _check_patterns("to_adamw", to_adamw, uses)
    heads = heads_of(model)
    named = {
        MUON: (muon or {}).get("algorithm", MUON),
        ADAMW: (adamw or {}).get("algorithm", ADAMW),
    }
    routed: list[Routed] = []
    groups: dict[Kind, list[tuple[str, Tensor]]] = {}
    for parameter, use in uses.items():
        name = use[0].name
        rule, reason = _overridden(name, parameter, to_muon, to_adamw) or default_rule(
            parameter, use, heads
        )
        routed.append(Routed(name, tuple(parameter.shape), named[rule], reason))
        decays = rule == MUON or parameter.ndim >= 2
        kind = (rule, decays, rule == MUON and all(each.is_transposed for each in use))
        groups.setdefault(kind, []).append((name, parameter))
    if not any(rule == MUON for rule, _, _ in groups):
        raise ValueError(
            "no parameter takes Muon: the model has no 2-D weight of a hidden nn.Linear (flattened"
            " FSDP1 parameters have none); name matrices with to_muon=[...]"
        )
    return ParamGroups(_group_dicts(groups, muon or {}, adamw or {}), routed)


def _check_keys(argument: str, keys: object, algorithm: str) -> None:
    """Refuse group keys that `Muon` would refuse, and those that are made here."""
    if keys is None:
        return
    if not isinstance(keys, Mapping):
        raise TypeError(f"{argument} must be a dict of group keys, got {show(keys)}")
    for key in ("params", "param_names"):
        if key in keys:
            raise ValueError(f"{argument} may not have the key {key}: param_groups makes it")
    try:
        group = complete_group({"algorithm": algorithm, **keys}, {})
        check_settings(group)
        if updates_matrices(group) != (algorithm == MUON):
            kind = "matrices" if algorithm == MUON else "single elements"
            raise ValueError(f"algorithm {group['algorithm']!r} is not one for {kind}")
    except ValueError as error:
        raise ValueError(f"{argument}: {error}") from None


def _check_patterns(argument: str, patterns: object, uses: Mapping[Tensor, Sequence[Use]]) -> None:
    """Refuse patterns that match nothing; a string would be taken letter by letter."""
    if isinstance(patterns, str) or not isinstance(patterns, Sequence):
        raise TypeError(f"{argument} must be a list of patterns, got {show(patterns)}")
    names = [use[0].name for use in uses.values()]
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise TypeError(f"{argument} must be a list of patterns, one is {show(pattern)}")
        if not any(fnmatchcase(name, pattern) for name in names):
            near = advice(pattern, names)
            raise ValueError(f"pattern {show(pattern)} matches no parameter ({argument}){near}")


Kind = tuple[str, bool, bool]
"""(algorithm, takes weight decay, stored transposed): what parameters of one group share."""


def _group_dicts(
    groups: Mapping[Kind, list[tuple[str, Tensor]]],
    muon: Mapping[str, Any],
    adamw: Mapping[str, Any],
) -> list[dict[str, Any]]:
    dicts: list[dict[str, Any]] = []
    order = sorted(groups, key=lambda kind: (kind[0] != MUON, not kind[1], kind[2]))
    for kind in order:
        rule, decays, transposed = kind
        keys = dict(muon if rule == MUON else adamw)
        if transposed:
            keys["transposed"] = True
        if not decays:
            keys["weight_decay"] = 0.0
        dicts.append({"algorithm": rule, **keys, "params": groups[kind]})
    return dicts


def _overridden(
    name: str, parameter: Tensor, to_muon: Sequence[str], to_adamw: Sequence[str]
) -> tuple[str, str] | None:
    matched = {
        rule: next((p for p in patterns if fnmatchcase(name, p)), None)
        for rule, patterns in ((MUON, to_muon), (ADAMW, to_adamw))
    }
    if matched[MUON] is not None and matched[ADAMW] is not None:
        raise ValueError(
            f"{name} matches {matched[MUON]!r} (to_muon) and {matched[ADAMW]!r} (to_adamw)"
        )
    if matched[MUON] is not None:
        if parameter.ndim < 2:
            raise ValueError(
                f"{name} has shape {tuple(parameter.shape)}, Muon takes matrices only; it matches"
                f" {matched[MUON]!r} (to_muon)"
            )
        return MUON, f"matches {matched[MUON]!r}"
    if matched[ADAMW] is not None:
        return ADAMW, f"matches {matched[ADAMW]!r}"
    return None

"""What a mapping gives: group keys for any shape, notes, and converted state.

Owns the scales of others and their ratio to ours. A scale that no `adjust_lr_fn` has is reached
through the learning rate: with lr r and weight_decay / r in a group of its own, a matrix gets r
times the update and the same decay, because both optimizers decay by lr x weight_decay.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor
from torch.optim.optimizer import Optimizer, StateDict

from shardmuon.groups import ADAMW, MUON, check_settings, complete_group, cuts_of
from shardmuon.limits import show
from shardmuon.planning.cut import Cut
from shardmuon.rules.muon import update_scale

__all__ = ["Migration", "Scale"]

ORIGINAL = "original"
_EQUALS = {
    "original": (ORIGINAL, 1.0),
    "rms": ("match_rms_adamw", 5.0),
    "spectral": ("spectral", 1.0),
}
"""Our `adjust_lr_fn` for the formulas that have one, and how many times ours they are."""
_FIRST = ("exp_avg", "moment1", "momentum")
_SECOND = ("exp_avg_sq", "moment2", "variance")
_SUMS = ("momentum_buffer", "momentum")


class Scale(NamedTuple):
    """Factor on the orthogonalized update: `factor` times the formula `name` of the shape.

    original: sqrt(max(1, rows / cols)). rms: sqrt(max(rows, cols)). spectral: sqrt(rows / cols).
    one: 1. kernel: original, but of the last two dims of a flattened convolution. The names are
    ours: what Megatron calls spectral is rms.
    """

    name: str
    factor: float = 1.0

    @property
    def nearest(self) -> str:
        """Our `adjust_lr_fn` with the same growth, or the one to start from."""
        return _EQUALS[self.name][0] if self.name in _EQUALS else ORIGINAL

    @property
    def ratio(self) -> float | None:
        """Theirs / ours where it is the same for all matrices, else None."""
        return _EQUALS[self.name][1] * self.factor if self.name in _EQUALS else None

    def ratio_of(self, cut: Cut) -> float:
        """Theirs / ours for one matrix."""
        if self.ratio is not None:
            return self.ratio
        rows, cols = cut.rows, cut.cols
        if self.name == "one":
            theirs = 1.0
        else:
            sides = cut.shape[-2:] if cut.flatten else (rows, cols)
            theirs = math.sqrt(max(1, sides[0] / sides[1]))
        return self.factor * theirs / update_scale(rows, cols, self.nearest)


@dataclass(frozen=True, kw_only=True)
class Migration:
    """Settings of another implementation as ours.

    source: its name. keys: of muon groups, with lr and weight_decay as they are there and without
    the scale. adamw: keys of adamw groups, empty where the source has no AdamW; with `algorithm`,
    they take that rule instead. scale: the factor on its updates. sums: its momentum is mu M + G,
    which is 1 / (1 - mu) times ours. notes: what else differs, in sentences.
    """

    source: str
    keys: Mapping[str, Any]
    adamw: Mapping[str, Any]
    scale: Scale
    sums: bool = False
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for algorithm, keys in ((MUON, self.keys), (ADAMW, self.adamw)):
            check_settings(complete_group({"algorithm": algorithm, **keys}, {}))

    @property
    def muon(self) -> dict[str, Any]:
        """Arguments of `Muon`, or keys of a muon group, that hold for matrices of any shape.

        Raises ValueError if the scale of the source has no equal for all shapes: use `groups`.
        """
        if self.scale.ratio is None:
            raise ValueError(
                f"the scale of {self.source} ({_FORMULAS[self.scale.name]}) is not that of any"
                " adjust_lr_fn for all shapes; give your groups to groups(), which makes one group"
                " per factor"
            )
        return self._scaled(self.scale.ratio)

    def groups(self, groups: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """`groups` for `Muon` with these settings in them. Changes nothing.

        groups: what `param_groups(model)` returns, or dicts with `params` and `algorithm`. Muon
        groups are split where matrices of their parameters need different factors on lr; keys of
        adamw groups win over ours, such as weight_decay=0 for vectors.

        Raises ValueError if a muon group has a key that the source sets, if a parameter is made of
        matrices that need different factors, or if there is an adamw group and the source has no
        AdamW and the group no lr.
        """
        made: list[dict[str, Any]] = []
        for group in groups:
            if group.get("algorithm", MUON) == MUON:
                made += self._muon_groups(group)
            elif not self.adamw and "lr" not in group:
                raise ValueError(
                    f"{self.source} has no AdamW: give adamw groups an lr of their own"
                )
            else:
                made.append({**self.adamw, **group, **self._rule_of_the_rest})
        return made

    def states(
        self, optimizer: Optimizer, states: Mapping[str, Mapping[str, Any]], step: int | None = None
    ) -> tuple[StateDict | None, StateDict | None]:
        """State of the source's optimizer for `shardmuon.checkpoint.from_torch`. Local.

        optimizer: ours, of named parameters; its settings are kept. states: the other optimizer's
        state by parameter name; momentum that is a sum is multiplied by 1 - momentum of ours, and
        AdamW moments are renamed. step: of AdamW, where states do not say it. Tensors are new, or
        those given.

        Returns (muon_state, adamw_state), None where no group of that kind is. Raises ValueError
        for a parameter without a name or state, AdamW state without a step, or a group of another
        algorithm.
        """
        files: dict[str, list[tuple[str, dict[str, Any], dict[str, Any]]]] = {MUON: [], ADAMW: []}
        for group in optimizer.param_groups:
            kept = {k: v for k, v in group.items() if k not in ("params", "param_names", "mesh")}
            names = group.get("param_names")
            if names is None:
                raise ValueError("the optimizer has parameters without names; see param_groups")
            if group["algorithm"] not in files:
                raise ValueError(
                    f"{names[0] if names else 'a group'} has algorithm={group['algorithm']!r};"
                    " state is converted for muon and adamw only"
                )
            for name in names:
                if name not in states:
                    raise ValueError(f"there is no state of {name}")
                if group["algorithm"] == MUON:
                    state = self._momentum(name, states[name], group["momentum"])
                else:
                    state = _moments(name, states[name], step)
                files[group["algorithm"]].append((name, kept, state))
        return _state_dict(files[MUON]), _state_dict(files[ADAMW])

    @property
    def _rule_of_the_rest(self) -> dict[str, Any]:
        return {key: value for key, value in self.adamw.items() if key == "algorithm"}

    def _scaled(self, ratio: float) -> dict[str, Any]:
        """Keys of a muon group whose matrices get `ratio` times our scale."""
        lr, decay = self.keys["lr"] * ratio, self.keys["weight_decay"] / ratio
        scale = {"lr": lr, "weight_decay": decay, "adjust_lr_fn": self.scale.nearest}
        return {**self.keys, **scale}

    def _muon_groups(self, group: Mapping[str, Any]) -> list[dict[str, Any]]:
        """`group`, split by factor in the order in which the factors appear."""
        settings = self._scaled(1.0)
        taken = sorted(settings.keys() & group.keys())
        if taken:
            raise ValueError(
                f"a muon group has {', '.join(taken)}, which {self.source} sets; map groups of"
                " other settings by a call of their own"
            )
        complete = complete_group({**settings, **group}, {})
        parts: dict[float, list[Any]] = {}
        for each in _listed(group["params"]):
            parts.setdefault(self._ratio(each, complete), []).append(each)
        return [{**group, **self._scaled(r), "params": members} for r, members in parts.items()]

    def _ratio(self, member: Any, group: Mapping[str, Any]) -> float:
        """Factor on lr for a parameter or (name, parameter)."""
        name, parameter = member if isinstance(member, tuple) else ("a parameter", member)
        if self.scale.ratio is not None:
            return self.scale.ratio
        try:
            cuts = [cut for _, cut in cuts_of(parameter, group)]
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        ratios = {self.scale.ratio_of(cut): (cut.rows, cut.cols) for cut in cuts}
        if len(ratios) > 1:
            shapes = ", ".join(f"{rows}x{cols} {r:.4g}" for r, (rows, cols) in ratios.items())
            raise ValueError(
                f"{name} is made of matrices that need different factors on lr ({shapes}) for the"
                f" scale of {self.source}; keep such parts as parameters of their own"
            )
        return next(iter(ratios), 1.0)

    def _momentum(self, name: str, state: Mapping[str, Any], momentum: float) -> dict[str, Any]:
        buffer = _tensor(name, state, _SUMS)
        return {"momentum_buffer": buffer * (1 - float(momentum)) if self.sums else buffer}


_FORMULAS = {
    "one": "1",
    "kernel": "sqrt(max(1, rows / cols)), of the kernel for convolutions",
}


def _listed(params: Any) -> Sequence[Any]:
    return [params] if isinstance(params, Tensor) else list(params)


def _tensor(name: str, state: Mapping[str, Any], keys: Sequence[str]) -> Tensor:
    for key in keys:
        if isinstance(state.get(key), Tensor):
            found: Tensor = state[key]
            return found
    raise ValueError(f"state of {name} has none of {', '.join(keys)}, but {show(sorted(state))}")


def _moments(name: str, state: Mapping[str, Any], step: int | None) -> dict[str, Any]:
    """State of AdamW under our names."""
    count = state.get("step", step)
    if count is None:
        raise ValueError(f"state of {name} has no step of AdamW; pass step=")
    return {
        "step": count if isinstance(count, Tensor) else Tensor([float(count)]).squeeze(),
        "exp_avg": _tensor(name, state, _FIRST),
        "exp_avg_sq": _tensor(name, state, _SECOND),
    }


def _state_dict(
    members: Sequence[tuple[str, dict[str, Any], dict[str, Any]]],
) -> StateDict | None:
    """By name, each parameter in a group of its own with the settings it has."""
    if not members:
        return None
    return {
        "state": {name: state for name, _, state in members},
        "param_groups": [{**settings, "params": [name]} for name, settings, _ in members],
    }

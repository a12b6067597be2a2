"""The file of a study: what is trained, under which methods, and how often.

Owns its keys and their meaning, and how a run's configuration is made from them. An *override* is a
key path of train.py's configuration with its value, as in `optimizer.muon.lr: 0.02`; a *point* is
the overrides that a sweep varies. Must not import torch.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardmuon.limits import Count, CountOrZero, show
from shardmuon.training.config import Config
from shardmuon.training.load import ConfigError, convert, read_tree
from shardmuon.training.ranges import Section

__all__ = ["DropIn", "Overrides", "Study", "Timing", "configure", "grid", "load_study"]

Overrides = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class DropIn:
    """A method that is not swept: it takes what is best for another one.

    from: the other method, whose best point holds here too.
    copy: key path -> key path of that point (or of the configuration it makes) whose value it gets.
    """

    from_: str
    copy: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Timing(Section):
    """Runs for the time of a step, each alone on the machine.

    steps: of such a run; those after its first tenth count.
    every: steps over which a time is taken; the median of these counts.
    """

    steps: Count = 60
    every: Count = 5


@dataclass(frozen=True, kw_only=True)
class Study:
    """A whole study.

    base: configuration of train.py that all runs share. Directory, checkpoints and progress are
        the study's own.
    tokenizer_bytes: bytes of training text from which a byte-pair tokenizer of
        `base.model.vocab_size` ids is made; 0 trains on bytes, or on what `base.data` says.
    methods: name -> overrides that make the method.
    sweep: method -> key path -> values; all combinations are run. Methods have equally many; where
        it is one, nothing is swept.
    sweep_seed: seed of the sweep; not one of `seeds`, so that no result is a lucky pick.
    seeds: of all runs after the sweep. A seed sets weights and order of data, for all methods.
    method: the one under study.
    baseline: the method that it is compared with.
    drop_in: method -> where it takes its values from.
    variants: name -> overrides on top of the best point of `method`.
    shorter: shares of the steps for which the best point of `method` is trained again, with its
        schedule as much shorter.
    timing: how step times are taken.
    """

    base: Mapping[str, Any]
    tokenizer_bytes: CountOrZero = 0
    methods: Mapping[str, Overrides]
    sweep: Mapping[str, Mapping[str, tuple[Any, ...]]]
    sweep_seed: CountOrZero = 0
    seeds: tuple[CountOrZero, ...] = (1, 2, 3)
    method: str = "muon"
    baseline: str = "adamw"
    drop_in: Mapping[str, DropIn] = field(default_factory=dict)
    variants: Mapping[str, Overrides] = field(default_factory=dict)
    shorter: tuple[float, ...] = ()
    timing: Timing = field(default_factory=Timing)

    def __post_init__(self) -> None:
        """Raises ValueError whose text starts with a key."""
        self._check_methods()
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"seeds: got {show(self.seeds)}, expected different ones")
        if self.sweep_seed in self.seeds:
            raise ValueError(f"sweep_seed: got {self.sweep_seed}, expected none of seeds")
        for share in self.shorter:
            if not 0 < share < 1:
                raise ValueError(f"shorter: got {show(share)}, expected shares in (0, 1)")
        if taken := set(self.variants) & set(self.methods):
            raise ValueError(f"variants: got {show(min(taken))}, which is the name of a method")

    def _check_methods(self) -> None:
        for key, name in (("method", self.method), ("baseline", self.baseline)):
            if name not in self.sweep:
                raise ValueError(f"{key}: got {show(name)}, expected a method of sweep")
        for name in self.methods:
            if (name in self.sweep) == (name in self.drop_in):
                raise ValueError(f"methods: {name}: expected it in sweep or in drop_in")
        for key, names in (("sweep", self.sweep), ("drop_in", self.drop_in)):
            for name in names:
                if name not in self.methods:
                    raise ValueError(f"{key}: got {show(name)}, expected a name of methods")
        for name, drop_in in self.drop_in.items():
            if drop_in.from_ not in self.sweep:
                raise ValueError(f"drop_in: {name}: from: got {show(drop_in.from_)}, not swept")
        sizes = {name: len(grid(values)) for name, values in self.sweep.items()}
        if len(set(sizes.values())) > 1:
            raise ValueError(f"sweep: got {sizes} points, expected equally many for all methods")


def grid(values: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """All points of a method's sweep."""
    return [dict(zip(values, each, strict=True)) for each in itertools.product(*values.values())]


def load_study(path: Path) -> tuple[Study, dict[str, Any]]:
    """The study in the YAML file at `path`, and its tree for the record. Raises ConfigError."""
    tree = read_tree(path, str(path))
    for key in ("base", "methods", "sweep"):
        if key not in tree:
            raise ConfigError(f"{path}: expected the key '{key}'")
    for name, each in (tree.get("drop_in") or {}).items():
        if not isinstance(each, dict) or not {"from", "copy"} <= each.keys():
            raise ConfigError(f"{path}: drop_in.{name}: expected the keys 'from' and 'copy'")
    return convert(Study, tree, "", str(path)), tree


def configure(study: Study, method: str, *layers: Overrides) -> Config:
    """The configuration of a run: base, method, then each of `layers`. Raises ConfigError."""
    tree = _copy(study.base)
    for layer in (study.methods[method], *layers):
        for path, value in layer.items():
            _put(tree, path, value)
    return convert(Config, tree, "", f"{method} of the study")


def _put(tree: dict[str, Any], path: str, value: Any) -> None:
    """Set one value in place."""
    *sections, key = path.split(".")
    for section in sections:
        tree = tree.setdefault(section, {})
        if not isinstance(tree, dict):
            raise ConfigError(f"{path}: unknown key, {section} is not a section")
    tree[key] = value


def _copy(tree: Any) -> Any:
    """A copy in which sections can be changed; empty ones are none."""
    if not isinstance(tree, Mapping):
        return tree
    return {key: _copy(value) for key, value in tree.items() if value is not None}

"""Update rules: what a step computes, one file per rule.

Owns which rule stands behind the group key `algorithm`: `RULES` update matrices through an
orthogonalized whole, `ELEMENT_RULES` all else element by element. What a rule of a user's own needs
can be imported from here; the checks of its keys are in `shardmuon.keys`.
"""

from __future__ import annotations

from shardmuon.groups import ADAMW, ALGORITHMS, MUON, Algorithm, StateKind
from shardmuon.keys import Key
from shardmuon.rules.adamw import AdamWRule
from shardmuon.rules.base import Commit, ElementRule, ElementShard, Group, Shard, UpdateRule, wide
from shardmuon.rules.lion import LionRule
from shardmuon.rules.muon import MuonRule
from shardmuon.rules.normuon import NorMuonRule

__all__ = [
    "ELEMENT_RULES",
    "RULES",
    "AdamWRule",
    "Commit",
    "ElementRule",
    "ElementShard",
    "Group",
    "Key",
    "LionRule",
    "MuonRule",
    "NorMuonRule",
    "Shard",
    "StateKind",
    "UpdateRule",
    "register",
    "wide",
]

RULES: dict[str, UpdateRule] = {}
ELEMENT_RULES: dict[str, ElementRule] = {}


def register(algorithm: str, rule: UpdateRule | ElementRule) -> None:
    """Let groups take `rule` by the name `algorithm`, on this rank; all ranks must do the same.

    Raises ValueError if the name is taken, TypeError for what is not a rule.
    """
    if not isinstance(rule, UpdateRule | ElementRule):
        raise TypeError(f"a rule must be an UpdateRule or an ElementRule, got {rule!r}")
    if algorithm in ALGORITHMS:
        raise ValueError(f"there is a rule for algorithm {algorithm!r} already")
    on_matrices = isinstance(rule, UpdateRule)
    ALGORITHMS[algorithm] = Algorithm(rule.keys, rule.state, on_matrices)
    if isinstance(rule, UpdateRule):
        RULES[algorithm] = rule
    else:
        ELEMENT_RULES[algorithm] = rule


register(MUON, MuonRule())
register("normuon", NorMuonRule())
register(ADAMW, AdamWRule())
register("lion", LionRule())

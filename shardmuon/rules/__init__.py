"""Update rules: what a step computes, one file per rule, on local shards and whole matrices.

`RULES` maps the group key `algorithm` to the rules that orthogonalize matrices; AdamW, which needs
no whole matrix, is `rules/adamw.py`.
"""

from __future__ import annotations

from shardmuon.rules.base import Commit, Shard, UpdateRule
from shardmuon.rules.muon import MuonRule

__all__ = ["RULES", "Commit", "Shard", "UpdateRule"]

RULES: dict[str, UpdateRule] = {"muon": MuonRule()}

"""What this rank holds of every parameter, as one step sees it.

Owns how local tensors of parameters, gradients and state become the shards that rules work on.
Finds them anew in each step and keeps none: frameworks replace tensors, or move them off a GPU,
between steps.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from shardmuon.entries import Entry, Group
from shardmuon.exchange.blocks import BlockView, local
from shardmuon.exchange.pipeline import Member, Passage
from shardmuon.planning.matrix import Matrix
from shardmuon.rules import ELEMENT_RULES, RULES, ElementShard, Shard

__all__ = ["Holdings", "Home", "State", "with_method"]

State = MutableMapping[Tensor, dict[str, Tensor]]


class Home(NamedTuple):
    """Where a matrix lies on this rank: index of its parameter's entry, and its place there."""

    entry: int
    view: BlockView


class _Held(NamedTuple):
    """Local tensors of a parameter; zeros stand for a gradient that counts as zero."""

    parameter: Tensor
    gradient: Tensor
    state: dict[str, Tensor]
    missing: bool


@dataclass(frozen=True)
class Holdings:
    """This rank's tensors.

    gradients: local ones by FQN; None counts as zero. missing: FQNs without a gradient, of which
    nothing may change.
    """

    entries: Sequence[Entry]
    homes: Mapping[str, Home]
    state: State
    gradients: Mapping[str, Tensor | None]
    missing: frozenset[str]
    _held: dict[int, _Held] = field(default_factory=dict)
    _groups: dict[tuple[int, str], Group] = field(default_factory=dict)

    def idle(self, passage: Passage) -> bool:
        """All matrices of the bucket lack gradients on all ranks, so nobody needs the exchange.

        Never on a GPU, where a rank knows only of its own gradients.
        """
        if passage.device.type != "cpu" or not self.missing:
            return False
        entries = (self.entries[self.homes[m.id].entry] for m in passage.bucket.matrices)
        return all(entry.fqn in self.missing for entry in entries)

    def members(self, passage: Passage) -> dict[int, Member]:
        """This rank's view of the matrices of a bucket that are present here, by index."""
        matrices = passage.bucket.matrices
        return {index: self._member(matrices[index]) for index in passage.present}

    def element_shards(self, group: Group) -> list[ElementShard]:
        """Local tensors of a group whose rule works on elements; nothing of other groups."""
        if group["algorithm"] not in ELEMENT_RULES:
            return []
        held = [self._hold(entry) for entry in self.entries if entry.group is group]
        return [ElementShard(h.parameter, h.gradient, h.state) for h in held if not h.missing]

    def _member(self, matrix: Matrix) -> Member:
        number, view = self.homes[matrix.id]
        held = self._held.get(number)
        group = self.entries[number].group
        if held is None:  # a stack of experts has one parameter for many matrices
            held = self._held[number] = self._hold(self.entries[number])
        kind = id(group), matrix.method
        settings = self._groups.get(kind)
        if settings is None:
            settings = self._groups[kind] = with_method(group, matrix)
        of, kinds = view.of, RULES[group["algorithm"]].state
        state = {
            key: view.rows_of(value) if kinds[key].form == "rows" else of(value)
            for key, value in held.state.items()
        }
        shape = matrix.whole_shape
        shard = Shard(of(held.parameter), of(held.gradient), state, settings, *shape)
        return Member(RULES[group["algorithm"]], shard, held.missing)

    def _hold(self, entry: Entry) -> _Held:
        parameter = local(entry.parameter)
        gradient = self.gradients[entry.fqn]
        missing = entry.fqn in self.missing
        if missing:  # nobody reads it, so it need not take memory
            gradient = parameter.new_zeros(()).expand_as(parameter)
        elif gradient is None:
            gradient = torch.zeros_like(parameter)
        state = {key: local(value) for key, value in self.state[entry.parameter].items()}
        return _Held(parameter, gradient, state, missing)


def with_method(group: Group, matrix: Matrix) -> Group:
    """The group's settings as they hold for `matrix`, which may have another's method."""
    return {**group, "ns_method": matrix.method}

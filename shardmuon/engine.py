"""Carries out steps for a list of parameter groups: the plan, the header, the buckets, the rest.

Owns the order of a step, its agreement between ranks, and what it has done on this rank. Holds no
parameter state and no settings of groups: those are the optimizer's. Made once and shared, so that
an optimizer and a framework's wrapper around it see the same plan.
"""

from __future__ import annotations

import warnings
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from torch.profiler import record_function

from shardmuon.entries import (
    Entry,
    EntryList,
    Group,
    mesh_parts,
)
from shardmuon.exchange import collectives
from shardmuon.exchange.activity import during, enter_step
from shardmuon.exchange.agreement import Agreed, Agreement, Doubt
from shardmuon.exchange.blocks import local
from shardmuon.exchange.pipeline import Passage, Tally, Transit, run_buckets
from shardmuon.exchange.replicas import differing_replicas
from shardmuon.exchange.waits import Waits
from shardmuon.holdings import Holdings, State
from shardmuon.overlap import Overlap
from shardmuon.planning.plan import Plan
from shardmuon.plans import Plans, Prepared
from shardmuon.rules import ELEMENT_RULES, Commit
from shardmuon.runtime import Runtime

__all__ = ["Engine", "StepStats"]

StepGroup = MutableMapping[str, Any]
"""A group whose count of steps goes up with a step that is taken."""


@dataclass(frozen=True)
class StepStats:
    """What the last step did on this rank.

    matrices_orthogonalized: Newton-Schulz runs. bytes_sent, bytes_received: wire bytes exchanged
    with other ranks, padding included. steps_skipped: steps refused so far because of a non-finite
    gradient. collectives: number of collectives issued. waited_s: seconds in which this rank only
    waited for blocks and updates; None while a GPU is not that far. orthogonality_error: see
    `orthogonality_error`, the largest of the updates made here; None if it was not asked for.

    Not among the bytes: what teams sum up (`share_large`).
    """

    matrices_orthogonalized: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    steps_skipped: int = 0
    collectives: int = 0
    waited_s: float | None = 0.0
    orthogonality_error: float | None = None


class Engine:
    """Plans and runs steps. `default_mesh`: where plain tensors are replicated, or None.

    A group's own `mesh` goes before it.
    """

    def __init__(self, runtime: Runtime, default_mesh: DeviceMesh | None) -> None:
        self.runtime = runtime
        self.default_mesh = default_mesh
        self._entries = EntryList(default_mesh)
        self._stats = StepStats()
        self._plans = Plans(runtime)
        self._has_stepped = False
        self._agreement = Agreement(runtime)
        self._overlap = Overlap(runtime)
        self._measures = False
        self._waits = Waits()

    def __getstate__(self) -> dict[str, Any]:
        """Plans, groups and pending answers belong to one process and do not travel."""
        return {"runtime": self.runtime, "default_mesh": self.default_mesh}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["runtime"], state["default_mesh"])  # type: ignore[misc]

    @property
    def stats(self) -> StepStats:
        """What the last step did, and how many steps were skipped as far as the host knows."""
        skipped, waited = self._agreement.steps_skipped, self._waits.seconds()
        return replace(self._stats, steps_skipped=skipped, waited_s=waited)

    def measure_next_step(self) -> None:
        """Let the next step find out how orthogonal its updates are."""
        self._measures = True

    # -- the plan -------------------------------------------------------------------------------

    def plan(self, groups: Sequence[Group]) -> Plan:
        """The plan for `groups`, made anew if anything that it depends on has changed."""
        return self._plans.of(self._entries.of(groups)).plan

    def prepare(self, groups: Sequence[Group]) -> None:
        """Plan and prove on the host that the ranks of every mesh made the same plan."""
        prepared = self._prepare_with_methods(self._entries.of(groups))
        self._agreement.compare(prepared.plan, prepared.parts)

    def check(self) -> None:
        """Raise what the last step on a GPU found out and could not say without a stall."""
        self._agreement.raise_deferred()

    def forget(self) -> None:
        """State, settings or parameters were replaced: keep none, start nothing early. Local."""
        self._overlap.pause()
        self._agreement.forget()
        self._entries.clear()
        self._plans.forget_entries()

    def check_replicas(self, groups: Sequence[Group]) -> None:
        """RuntimeError naming parameters whose replicas do not hold the same bits."""
        lying = {
            entry.fqn: (entry.parameter, entry.device_mesh)
            for entry in self._entries.of(groups)
            if entry.device_mesh is not None and len(entry.mesh.ranks) > 1
        }
        names = differing_replicas(lying, self.runtime.timeout_s)
        if names:
            raise RuntimeError(
                f"replicas hold different values of {len(names)} parameters, the first is"
                f" {names[0]}; give all ranks the same initial weights (the same seed), or load"
                " one checkpoint on all"
            )

    def _prepare_with_methods(self, entries: Sequence[Entry]) -> Prepared:
        """As `_prepare_or_refuse`; methods that are still open are chosen first. Collective then.

        All ranks of a mesh have the same ones open, or the comparison raises on all.
        """
        prepared = self._prepare_or_refuse(entries)
        if prepared.is_warm:
            return prepared
        if prepared.is_open:
            self._agreement.compare(prepared.plan, prepared.parts)
            self._plans.settle(prepared)
            prepared = self._prepare_or_refuse(entries)
        prepared.warm_up(entries)
        return prepared

    def _prepare_or_refuse(self, entries: Sequence[Entry]) -> Prepared:
        """As `Plans.of`; a rank that cannot plan tells the others before it raises."""
        try:
            return self._plans.of(entries)
        except ValueError as error:
            self._agreement.refuse(mesh_parts(None, entries), str(error))

    def _warn_of_no_gradients(self, entries: Sequence[Entry], agreed: Agreed) -> None:
        if self._has_stepped:
            return
        gradients = [agreed.gradients[e.fqn] for e in entries if local(e.parameter).numel()]
        if gradients and all(each is None for each in gradients):
            warnings.warn(
                "the first step found no gradient on any parameter; an optimizer that was built"
                " before fully_shard holds parameters that the model no longer uses",
                stacklevel=4,
            )
        self._has_stepped = True

    # -- one step -------------------------------------------------------------------------------

    def step(self, groups: Sequence[StepGroup], state: State) -> None:
        """Advance all parameters and states by one step, or leave everything as it was."""
        with enter_step():
            self._step(groups, state)

    def _step(self, groups: Sequence[StepGroup], state: State) -> None:
        before = sum(collectives.calls.values()) - self._overlap.started
        entries = self._entries.of(groups)
        doubt = self._overlap.complete(entries, state)
        try:
            tally = self._take_step(groups, entries, state, doubt)
        finally:
            self._overlap.close()
        self._stats = StepStats(
            tally.matrices_orthogonalized,
            tally.bytes_sent,
            tally.bytes_received,
            collectives=sum(collectives.calls.values()) - before,
            orthogonality_error=tally.orthogonality_error,
        )
        self._waits = tally.waits

    def _take_step(
        self, groups: Sequence[StepGroup], entries: Sequence[Entry], state: State, doubt: Doubt
    ) -> Tally:
        with during("header of the step before", waits=True):
            self._agreement.raise_deferred()
        with during("agreement on the plan", waits=True):
            prepared = self._prepare_with_methods(entries)
        with record_function("shardmuon.header"), during("header", waits=True):
            agreed = self._agreement.open(prepared.plan, prepared.parts, entries, doubt)
        self._warn_of_no_gradients(entries, agreed)
        tally, self._measures = Tally(self._measures), False
        if not agreed.refused:
            commit = Commit(agreed.accepted)
            holdings = Holdings(entries, prepared.homes, state, agreed.gradients, agreed.missing)
            busy = [passage for passage in prepared.passages if not holdings.idle(passage)]
            run_buckets(
                Transit(
                    passage, holdings.members(passage), commit, tally, self._overlap.take(passage)
                )
                for passage in busy
            )
            _check_work(tally, busy)
            with record_function("shardmuon.elements"):
                for group in groups:
                    if shards := holdings.element_shards(group):
                        ELEMENT_RULES[group["algorithm"]].step(shards, group, commit)
            for group in groups:
                if "step" in group:
                    group["step"] += 1
        self._arm(entries, state)
        return tally

    def _arm(self, entries: Sequence[Entry], state: State) -> None:
        """Let buckets of the next step set out early, if the ranks know that they agree on it."""
        if self.runtime.overlap == "none":
            return
        upcoming = self._plans.of(entries)
        if self._agreement.is_proven(upcoming.plan):
            self._overlap.arm(upcoming.passages, upcoming.homes, entries, state)
        else:
            self._overlap.pause()


def _check_work(tally: Tally, passages: Sequence[Passage]) -> None:
    """RuntimeError unless this rank has done its part; if all have, all of the plan is done."""
    due = sum(passage.due for passage in passages)
    if tally.matrices_orthogonalized != due:
        raise RuntimeError(
            f"this rank was to orthogonalize {due} matrices and orthogonalized"
            f" {tally.matrices_orthogonalized}; parameters are not what they should be"
        )

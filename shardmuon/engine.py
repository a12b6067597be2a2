"""Carries out steps for a list of parameter groups: the plan, the header, the buckets, AdamW.

Owns the plan's life (made from the groups, valid for exactly these tensor objects, agreed between
ranks) and what one step on this rank has done. Holds no parameter state and no settings of groups:
those are the optimizer's. Made once and shared, so that an optimizer and a framework's wrapper
around it see the same plan.
"""

from __future__ import annotations

import json
import warnings
import weakref
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.profiler import record_function

from shardmuon.entries import (
    Entry,
    EntryList,
    Group,
    check_distinct,
    compute_device,
    matrices_of,
    mesh_parts,
    structure_of,
)
from shardmuon.exchange import collectives
from shardmuon.exchange.activity import during, enter_step
from shardmuon.exchange.agreement import MOST_PLANS, Agreed, Agreement, Doubt, MeshPart
from shardmuon.exchange.blocks import BlockView, local
from shardmuon.exchange.pipeline import Passage, Tally, Transit, run_buckets
from shardmuon.exchange.replicas import differing_replicas
from shardmuon.exchange.waits import Waits
from shardmuon.holdings import Holdings, Home, State, with_method
from shardmuon.methods import Methods, is_open
from shardmuon.overlap import Overlap, check_overlap
from shardmuon.planning.device import DEVICES
from shardmuon.planning.matrix import AUTO, Matrix
from shardmuon.planning.plan import Plan
from shardmuon.planning.planner import Freedom, make_plan
from shardmuon.rules import ELEMENT_RULES, RULES, Commit
from shardmuon.runtime import Runtime
from shardmuon.version import __version__

__all__ = ["Engine", "StepStats"]

StepGroup = MutableMapping[str, Any]
"""A group whose count of steps goes up with a step that is taken."""

# Ranks that compute with other code may get other bits, or hang in another order of collectives.
VERSIONS = (f"torch {torch.__version__}", f"shardmuon {__version__}")


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


@dataclass(eq=False)
class Prepared:
    """A plan with everything that belongs to exactly the tensors it was made from.

    is_warm: methods are chosen and kernels compiled.
    """

    key: tuple[object, ...]
    alive: tuple[weakref.ref[Tensor], ...]
    plan: Plan
    passages: tuple[Passage, ...]
    parts: tuple[MeshPart, ...]
    homes: Mapping[str, Home]
    is_warm: bool = False

    def serves(self, entries: Sequence[Entry]) -> bool:
        """Whether these are the tensors."""
        return len(self.alive) == len(entries) and all(
            reference() is entry.parameter
            for reference, entry in zip(self.alive, entries, strict=True)
        )


class Engine:
    """Plans and runs steps. `default_mesh`: where plain tensors are replicated, or None.

    A group's own `mesh` goes before it.
    """

    def __init__(self, runtime: Runtime, default_mesh: DeviceMesh | None) -> None:
        self.runtime = runtime
        self.default_mesh = default_mesh
        self._entries = EntryList(default_mesh)
        self._stats = StepStats()
        self._plans: list[Prepared] = []
        self._seen: tuple[Sequence[Entry], dict[object, Prepared]] = ((), {})
        self._has_stepped = False
        self._agreement = Agreement(runtime)
        self._methods = Methods(runtime)
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
        return self._prepare_locally(self._entries.of(groups)).plan

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
        self._seen = ((), {})

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
        matrices = [matrix for matrix, _ in prepared.plan]
        if is_open(matrices):
            self._agreement.compare(prepared.plan, prepared.parts)
            self._methods.choose(matrices, prepared.parts)
            self._plans.remove(prepared)
            self._seen = ((), {})
            prepared = self._prepare_or_refuse(entries)
        self._warm_up(prepared, entries)
        prepared.is_warm = True
        return prepared

    def _warm_up(self, prepared: Prepared, entries: Sequence[Entry]) -> None:
        """Let the rules compile and capture what they will run on this rank."""
        for passage in prepared.passages:
            if passage.batched and passage.team is None:
                for batch in passage.batches:
                    whole = torch.zeros(batch.shape, dtype=passage.dtype, device=passage.device)
                    group = entries[prepared.homes[batch.matrix.id].entry].group
                    RULES[group["algorithm"]].warm_up(whole, with_method(group, batch.matrix))

    def _prepare_or_refuse(self, entries: Sequence[Entry]) -> Prepared:
        """As `_prepare_locally`; a rank that cannot plan tells the others before it raises."""
        try:
            return self._prepare_locally(entries)
        except ValueError as error:
            self._agreement.refuse(mesh_parts(None, entries), str(error))

    def _prepare_locally(self, entries: Sequence[Entry]) -> Prepared:
        """The plan for these tensors, a new one if there is none. No collective."""
        groups = {id(e.group): e.group for e in entries}
        kinds = {number: structure_of(group) for number, group in groups.items()}
        if self._seen[0] is not entries:
            self._seen = (entries, {})
        seen, mixture = self._seen[1], tuple(kinds.values())
        if mixture not in seen:
            key = tuple((e.fqn, e.mesh, kinds[id(e.group)]) for e in entries)
            seen[mixture] = self._known(entries, key) or self._make(entries, key)
            if len(seen) > MOST_PLANS:
                del seen[next(iter(seen))]
        return seen[mixture]

    def _known(self, entries: Sequence[Entry], key: tuple[object, ...]) -> Prepared | None:
        """The plan that was made for these tensors in such groups before."""
        for old in self._plans:
            if old.key == key and old.serves(entries):
                return old
        return None

    def _make(self, entries: Sequence[Entry], key: tuple[object, ...]) -> Prepared:
        check_distinct(entries)
        found: list[Matrix] = []
        entry_of: dict[str, int] = {}
        for index, entry in enumerate(entries):
            for matrix in matrices_of(entry):
                entry_of[matrix.id] = index
                found.append(matrix)
        runtime = self.runtime
        if runtime.deterministic:
            _refuse_other_methods(entries)
        if runtime.overlap == "backward":
            check_overlap(entries)
        matrices = self._methods.assign(found)
        plan = make_plan(
            matrices,
            exchange=runtime.exchange,
            bucket_bytes=runtime.bucket_bytes,
            overlap=runtime.overlap,
            settings=json.dumps(
                [runtime.deterministic, runtime.missing_grad, runtime.nonfinite, *VERSIONS]
            ),
            freedom=self._freedom(matrices, entries),
        )
        homes = {m.id: _home(m, entry_of[m.whole_id]) for m, _ in plan}
        self._warn_of_repeated_work(matrices)
        made = Prepared(
            key,
            tuple(weakref.ref(entry.parameter) for entry in entries),
            plan,
            tuple(self._passages(plan, entries, homes)),
            mesh_parts(plan, entries),
            homes,
        )
        current = [old for old in self._plans if old.serves(entries)]
        self._plans = [*current[1 - MOST_PLANS :], made]
        return made

    def _freedom(self, matrices: Sequence[Matrix], entries: Sequence[Entry]) -> Freedom:
        """Only costs of methods that are chosen can say what a team would gain."""
        on_gpu = any(compute_device(entry).type == "cuda" for entry in entries)
        return Freedom(
            DEVICES["h200" if on_gpu else "cpu"],
            share_large=self.runtime.share_large and not is_open(matrices),
            replicas=self.runtime.replicas,
        )

    def _passages(
        self, plan: Plan, entries: Sequence[Entry], homes: Mapping[str, Home]
    ) -> Iterator[Passage]:
        for number, bucket in enumerate(plan.buckets):
            entry = entries[homes[bucket.matrices[0].id].entry]
            axes = (*bucket.sharded_axes, *bucket.replicated_axes)
            mesh, device = entry.device_mesh, compute_device(entry)
            yield Passage(
                number,
                bucket,
                bucket.route(collectives.rank(), plan.exchange),
                {axis: mesh.get_group(axis) for axis in axes} if mesh else {},
                device,
                getattr(torch, bucket.wire_dtype),
                batched=device.type == "cuda" and not self.runtime.deterministic,
                timeout_s=self.runtime.timeout_s,
            )

    def _warn_of_repeated_work(self, matrices: Sequence[Matrix]) -> None:
        alone = [m for m in matrices if len(m.layout.mesh.ranks) == 1]
        if alone and collectives.world_size() > 1 and not self._plans:
            warnings.warn(
                f"{len(alone)} matrices (first: {alone[0].id}) are plain tensors, so each of"
                f" {collectives.world_size()} ranks orthogonalizes all of them; pass mesh=... if"
                " they are replicated, to share the work",
                stacklevel=4,
            )

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
            with record_function("shardmuon.adamw"):
                for group in groups:
                    if shards := holdings.element_shards(group):
                        ELEMENT_RULES[group["algorithm"]].step(shards, group, commit)
            for group in groups:
                if "step" in group:
                    group["step"] += 1
        self._arm(prepared, entries, state)
        return tally

    def _arm(self, prepared: Prepared, entries: Sequence[Entry], state: State) -> None:
        """Let buckets of the next step set out early, if the ranks know that they agree on it."""
        if self.runtime.overlap == "none":
            return
        upcoming = self._prepare_locally(entries)
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


def _home(matrix: Matrix, entry: int) -> Home:
    """Where `matrix` of parameter number `entry` lies on this rank."""
    layout = matrix.layout
    box = layout.box(matrix.cut.shape, layout.mesh.coordinates[collectives.rank()])
    return Home(entry, BlockView(matrix.cut, box))


def _refuse_other_methods(entries: Sequence[Entry]) -> None:
    for entry in entries:
        if entry.group.get("ns_method", AUTO) not in (AUTO, "standard"):
            raise ValueError(
                f"{entry.fqn}: ns_method={entry.group['ns_method']!r} does not go with"
                " Runtime(deterministic=True), which promises the bits of 'standard'"
            )

"""Plans as steps use them: each with all that belongs to exactly the tensors it was made from.

Owns a plan's life on this rank: made from the groups, kept while tensors, meshes and what groups
say of structure are the same, and dropped for the oldest one when there are too many. Steps that
alternate between whole matrices and blocks have a plan for each mixture. No collective, but for
`settle`.
"""

from __future__ import annotations

import json
import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardmuon.entries import (
    Entry,
    check_distinct,
    compute_device,
    matrices_of,
    mesh_parts,
    structure_of,
)
from shardmuon.exchange import collectives
from shardmuon.exchange.agreement import MOST_PLANS, MeshPart
from shardmuon.exchange.blocks import BlockView
from shardmuon.exchange.pipeline import Passage
from shardmuon.holdings import Home, with_method
from shardmuon.methods import Methods, is_open
from shardmuon.overlap import check_overlap
from shardmuon.planning.device import DEVICES
from shardmuon.planning.matrix import AUTO, Matrix
from shardmuon.planning.plan import Plan
from shardmuon.planning.planner import Freedom, make_plan
from shardmuon.rules import RULES
from shardmuon.runtime import Runtime
from shardmuon.version import __version__

__all__ = ["Plans", "Prepared"]

# Ranks that compute with other code may get other bits, or hang in another order of collectives.
VERSIONS = (f"torch {torch.__version__}", f"shardmuon {__version__}")


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

    @property
    def is_open(self) -> bool:
        """Whether some Newton-Schulz method is not chosen yet."""
        return is_open([matrix for matrix, _ in self.plan])

    def serves(self, entries: Sequence[Entry]) -> bool:
        """Whether these are the tensors."""
        return len(self.alive) == len(entries) and all(
            reference() is entry.parameter
            for reference, entry in zip(self.alive, entries, strict=True)
        )

    def warm_up(self, entries: Sequence[Entry]) -> None:
        """Let the rules compile and capture what they will run on this rank."""
        for passage in self.passages:
            if passage.batched and passage.team is None:
                for batch in passage.batches:
                    whole = torch.zeros(batch.shape, dtype=passage.dtype, device=passage.device)
                    group = entries[self.homes[batch.matrix.id].entry].group
                    RULES[group["algorithm"]].warm_up(whole, with_method(group, batch.matrix))
        self.is_warm = True


class Plans:
    """The plans of one optimizer.

    `of` gives one, `settle` chooses the methods that it leaves open.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._methods = Methods(runtime)
        self._plans: list[Prepared] = []
        self._seen: tuple[Sequence[Entry], dict[object, Prepared]] = ((), {})

    def forget_entries(self) -> None:
        """Compare tensors and groups anew, whatever list of entries they come in."""
        self._seen = ((), {})

    def settle(self, prepared: Prepared) -> None:
        """Choose the methods that `prepared` leaves open, and drop it. Collective.

        All ranks of its meshes must have been found to hold equal plans.
        """
        self._methods.choose([matrix for matrix, _ in prepared.plan], prepared.parts)
        self._plans.remove(prepared)
        self.forget_entries()

    def of(self, entries: Sequence[Entry]) -> Prepared:
        """The plan for these tensors, a new one if there is none. Raises ValueError."""
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
        runtime = self._runtime
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
            share_large=self._runtime.share_large and not is_open(matrices),
            replicas=self._runtime.replicas,
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
                batched=device.type == "cuda" and not self._runtime.deterministic,
                timeout_s=self._runtime.timeout_s,
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

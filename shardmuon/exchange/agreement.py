"""Opens a step: exchanges the headers and turns them into one decision of all ranks.

Owns when the host waits and what is raised. On CPU the answer is read at once. On a GPU it stays
on the device, where it selects old or new values, and the host reads it at the next step; only a
rank whose plan is new waits, because ranks that planned differently must not start to exchange.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NoReturn, Protocol

import torch
from torch import Tensor

from shardmuon.exchange import collectives
from shardmuon.exchange.blocks import local_gradient
from shardmuon.exchange.header import (
    ERROR,
    GOOD,
    SKIP,
    Presence,
    Statement,
    Verdict,
    exchange_header,
    is_crowded,
    note_severity,
    read_header,
    read_word,
    severity_of,
    spread_severity,
)
from shardmuon.planning.layout import Mesh
from shardmuon.planning.plan import Plan
from shardmuon.rules.elementwise import has_nonfinite, takes
from shardmuon.runtime import Runtime

_NONFINITE_SEVERITY = {"error": ERROR, "skip": SKIP, "allow": GOOD}

MOST_PLANS = 8
"""That are kept: groups may orthogonalize blocks at different steps, each mixture a plan."""

__all__ = ["MOST_PLANS", "Agreed", "Agreement", "Doubt", "MeshPart", "Trainable"]


class Trainable(Protocol):
    """A named parameter."""

    @property
    def fqn(self) -> str: ...

    @property
    def parameter(self) -> Tensor: ...


@dataclass(frozen=True)
class MeshPart:
    """What the ranks of one mesh must agree on.

    fqns: trainable parameters, sorted. groups: process group of each axis of size above 1.
    device: where this rank's tensors of the mesh are worked on, and so the header. empty: FQNs of
    which this rank holds nothing. on_gpu: all its tensors lie on a GPU.
    """

    mesh: Mesh
    fqns: tuple[str, ...]
    digest: str
    groups: tuple[collectives.Group, ...]
    device: torch.device
    empty: frozenset[str]
    on_gpu: bool


@dataclass(frozen=True)
class Agreed:
    """The decision about a step.

    refused: the host knows that nothing may change. accepted: the device's word, else None.
    missing: FQNs that have no gradient on any rank. gradients: this rank's parts by FQN.
    """

    refused: bool
    accepted: Tensor | None
    missing: frozenset[str]
    gradients: Mapping[str, Tensor | None]


@dataclass(frozen=True)
class Doubt:
    """Why this rank may not be able to take a step, as far as it is known before the header.

    fault: text. stale: bool [], gradients changed after they were used.
    """

    fault: str | None = None
    stale: Tensor | None = None


@dataclass(frozen=True)
class _Heard:
    """An agreed header of a mesh and what this rank had said."""

    part: MeshPart
    header: Tensor
    presence: Sequence[Presence]
    fault: str | None


@dataclass(frozen=True)
class _Deferred:
    """A header on its way to the host."""

    heard: _Heard
    host: Tensor
    arrived: torch.cuda.Event


@dataclass
class Agreement:
    """Headers of one optimizer. steps_skipped: steps refused under `nonfinite="skip"`."""

    runtime: Runtime
    steps_skipped: int = 0
    _proven: list[Plan] = field(default_factory=list)
    _deferred: list[_Deferred] = field(default_factory=list)
    _crowded: dict[Mesh, bool] = field(default_factory=dict)

    def open(
        self,
        plan: Plan,
        parts: Sequence[MeshPart],
        entries: Sequence[Trainable],
        doubt: Doubt = Doubt(),
    ) -> Agreed:
        """Agree on this step along every mesh. Raises on all ranks of these meshes, or on none."""
        # A rank may have made its plan before, alone, to look at it: what counts is the proof.
        is_new = not self.is_proven(plan)
        gradients, unusable = _read_gradients(entries)
        fault = doubt.fault or unusable
        # Tensors on the host cannot wait for the device's word.
        on_host = is_new or not parts or not all(part.on_gpu for part in parts)
        statements = [
            replace(self._statement(part, gradients, fault), stale=doubt.stale) for part in parts
        ]
        heard = self._hear(parts, statements, fault, look=on_host)
        if on_host:
            on_cpu = not any(each.header.is_cuda for each in heard)
            agreed = self._on_host(plan if on_cpu else None, heard, gradients)
            self._prove(plan)
            return agreed
        return self._on_device(heard, gradients)

    def refuse(self, parts: Sequence[MeshPart], fault: str) -> NoReturn:
        """Tell the other ranks that this one has no plan, and raise like them: ValueError."""
        statements = [Statement(part.digest, fault=True) for part in parts]
        self._on_host(None, self._hear(parts, statements, fault, look=True), {})
        raise ValueError(fault)

    def compare(self, plan: Plan, parts: Sequence[MeshPart]) -> None:
        """Prove equal plans by their digests; RuntimeError naming the first difference."""
        statements = [Statement(part.digest) for part in parts]
        heard = self._hear(parts, statements, None, look=True)
        answers = [(each, read_header(each.header.cpu(), ())) for each in heard]
        self._judge(answers, "prepare()", plan)
        self._prove(plan)

    def is_proven(self, plan: Plan) -> bool:
        """Whether the ranks have found that they all have this plan, and may still rely on it."""
        return any(plan is each for each in self._proven)

    def forget(self) -> None:
        """Rely on no proof: which of several plans a rank follows may have changed."""
        self._proven.clear()

    def _prove(self, plan: Plan) -> None:
        if not self.is_proven(plan):
            self._proven = [*self._proven[1 - MOST_PLANS :], plan]

    def raise_deferred(self) -> None:
        """Read the headers that earlier steps left on the device."""
        deferred, self._deferred = self._deferred, []
        for each in deferred:
            each.arrived.synchronize()
        answers = [(each.heard, read_header(each.host, each.heard.presence)) for each in deferred]
        self._judge(answers, "last step")

    def _hear(
        self,
        parts: Sequence[MeshPart],
        statements: Sequence[Statement],
        fault: str | None,
        look: bool,
    ) -> list[_Heard]:
        """Exchange the headers of all meshes, so that what one found stops the step on all.

        Meshes share ranks, and a rank takes a step on all of its meshes or on none. So each header
        carries what the smaller meshes have found, and a second sweep, from large to small, brings
        it back to meshes of which some rank is in several. look: the host may read headers.
        """
        crowded = sum(bool(part.groups) for part in parts) > 1
        severity: Tensor | None = None
        heard = []
        for part, statement in zip(parts, statements, strict=True):
            if severity is not None:
                severity = severity.to(part.device)
            said = replace(statement, elsewhere=severity, crowded=crowded)
            header = exchange_header(said, part.device, part.groups, self.runtime.timeout_s)
            heard.append(_Heard(part, header, statement.presence, fault))
            severity = severity_of(header, _NONFINITE_SEVERITY[self.runtime.nonfinite])
            if look:
                self._crowded[part.mesh] = is_crowded(header)
        for part in reversed(parts):
            if self._crowded[part.mesh] and severity is not None:
                severity = spread_severity(
                    severity, part.device, part.groups, self.runtime.timeout_s
                )
        for each in heard:
            assert severity is not None
            note_severity(each.header, severity)
        return heard

    def _statement(
        self,
        part: MeshPart,
        gradients: Mapping[str, Tensor | None],
        fault: str | None,
    ) -> Statement:
        mine = [gradients[name] for name in part.fqns]
        absent = frozenset(n for n, g in zip(part.fqns, mine, strict=True) if g is None)
        presence = _presence(part.fqns, part.empty, absent, self.runtime.missing_grad == "error")
        return Statement(part.digest, presence, self._nonfinite(mine), fault is not None)

    def _nonfinite(self, gradients: Sequence[Tensor | None]) -> Tensor | None:
        """bool []: a local gradient is inf or nan. None if that is not looked at."""
        present = [g for g in gradients if g is not None and g.numel()]
        if self.runtime.nonfinite == "allow" or not present:
            return None
        if takes(*present):
            return has_nonfinite(present)
        # The largest magnitude is nan or inf exactly if some element is.
        return ~torch.isfinite(torch.nn.utils.get_total_norm(present, float("inf")))

    def _on_host(
        self, plan: Plan | None, heard: Sequence[_Heard], gradients: Mapping[str, Tensor | None]
    ) -> Agreed:
        answers = [(each, read_header(each.header.cpu(), each.presence)) for each in heard]
        refused = self._judge(answers, "this step", plan)
        missing = {each.part.fqns[i] for each, verdict in answers for i in verdict.missing}
        return Agreed(refused, None, frozenset(missing), gradients)

    def _on_device(
        self,
        heard: Sequence[_Heard],
        gradients: Mapping[str, Tensor | None],
    ) -> Agreed:
        word = read_word(heard[-1].header)
        for each in heard:
            host = torch.empty(each.header.shape, dtype=torch.uint8, device="cpu", pin_memory=True)
            host.copy_(each.header, non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record()
            self._deferred.append(_Deferred(each, host, arrived))
        # What this rank misses all ranks miss, or the device refuses the step. An empty shard
        # knows nothing, and is taken to have what the others have.
        empty = {name for each in heard for name in each.part.empty}
        missing = {
            name
            for name, gradient in gradients.items()
            if gradient is None and self.runtime.missing_grad == "error" and name not in empty
        }
        return Agreed(False, word, frozenset(missing), gradients)

    def _judge(
        self, answers: Sequence[tuple[_Heard, Verdict]], step: str, plan: Plan | None = None
    ) -> bool:
        """True if the step is refused by rule; raises if it is an error. Nothing was changed.

        plan: given where all ranks are here and can exchange what they know of an error.
        """
        errors = [self._error(heard, verdict, step, plan) for heard, verdict in answers]
        for error in errors:
            if error is not None:
                raise error
        severity = max((verdict.severity for _, verdict in answers), default=GOOD)
        if severity == ERROR:
            raise RuntimeError(
                f"{step} changed nothing: ranks that share another mesh with this one refused it,"
                " and say why"
            )
        self.steps_skipped += severity == SKIP
        return severity == SKIP

    def _error(
        self, heard: _Heard, verdict: Verdict, step: str, plan: Plan | None
    ) -> Exception | None:
        """What is wrong on one mesh. Collective along it if ranks explain themselves."""
        if verdict.fault:
            return _fault_error(heard, step)
        if not verdict.same_plan and plan is not None:
            return _plans_differ(plan, heard.part)
        if not verdict.same_plan:
            return RuntimeError(
                f"{step} changed nothing: the ranks made different plans; call"
                " optimizer.prepare() on all ranks to see the first difference"
            )
        if verdict.conflict:
            return RuntimeError(
                f"{step} changed nothing: some ranks have no gradient for"
                f" {', '.join(verdict.conflict[:8])} and others have one; give all ranks"
                " a gradient or none, or set Runtime(missing_grad='zero')"
            )
        if verdict.stale:
            return RuntimeError(
                f"{step} changed nothing: on at least one rank a gradient changed between backward"
                " and step, after Runtime(overlap='backward') had used it; clipping, unscaling and"
                " zeroing need overlap='none'"
            )
        if not verdict.finite and self.runtime.nonfinite == "error":
            return RuntimeError(
                f"{step} changed nothing: a gradient is inf or nan on at least one rank; set"
                " Runtime(nonfinite='skip') to skip such steps or 'allow' to take them"
            )
        return None


@functools.lru_cache(maxsize=64)
def _presence(
    fqns: tuple[str, ...], empty: frozenset[str], absent: frozenset[str], counts: bool
) -> tuple[Presence, ...]:
    """What a rank says of its gradients, of which those of `absent` are None.

    counts: that matters. An empty shard says nothing: FSDP may leave its gradient out or not.
    """
    return tuple(
        Presence(name, name in absent and counts, name in empty or (name in absent and not counts))
        for name in fqns
    )


def _read_gradients(
    entries: Sequence[Trainable],
) -> tuple[dict[str, Tensor | None], str | None]:
    """(this rank's gradients by FQN, what is wrong with the first unusable one)."""
    gradients: dict[str, Tensor | None] = {}
    fault: str | None = None
    for entry in entries:
        try:
            gradients[entry.fqn] = local_gradient(entry.fqn, entry.parameter)
        except ValueError as error:
            gradients[entry.fqn] = None
            fault = fault or str(error)
    return gradients, fault


def _fault_error(heard: _Heard, step: str) -> ValueError:
    """ValueError with the text of the rank that cannot take the step.

    On CPU all ranks know of the fault now and exchange its text; on a GPU the others may have
    gone on, so there each rank says what it knows.
    """
    texts = [heard.fault]
    if not heard.header.is_cuda:
        for group in heard.part.groups:
            texts = [each for some in collectives.gather_objects(texts, group) for each in some]
    known = next((text for text in texts if text is not None), "another rank says why")
    return ValueError(f"{step} changed nothing, a rank cannot take it: {known}")


def _plans_differ(plan: Plan, part: MeshPart) -> RuntimeError:
    """The error that names the first thing in which ranks of the mesh differ. Collective."""
    mine = [plan.exchange, plan.settings, part.fqns, plan.describe((part.mesh,))]
    answers = [(collectives.rank(), mine)]
    for group in part.groups:  # after the last axis every rank has every rank's answer
        answers = [each for some in collectives.gather_objects(answers, group) for each in some]
    first_rank, first = answers[0]
    rank, other = next((r, each) for r, each in answers if each != first)
    return RuntimeError(
        f"ranks {first_rank} and {rank} made different plans; first difference:"
        f" {_first_difference(first, other)}"
    )


def _first_difference(one: object, other: object) -> str:
    """Where two nested lists part, as text."""
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        for left, right in zip(one, other, strict=False):
            if left != right:
                return _first_difference(left, right)
        longer = one if len(one) > len(other) else other
        return f"only one of them has {longer[min(len(one), len(other))]!r}"
    return f"{one!r} against {other!r}"

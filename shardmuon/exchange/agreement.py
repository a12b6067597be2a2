"""Opens a step: exchanges the headers and turns them into one decision of all ranks.

Owns when the host waits and what is raised. On CPU the answer is read at once. On a GPU it stays
on the device, where it selects old or new values, and the host reads it at the next step; only a
rank whose plan is new waits, because ranks that planned differently must not start to exchange.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from shardmuon.exchange import collectives
from shardmuon.exchange.blocks import local, local_gradient
from shardmuon.exchange.header import Presence, Verdict, accepted, exchange_header, read_header
from shardmuon.planning.layout import Mesh
from shardmuon.planning.plan import Plan
from shardmuon.runtime import Runtime

__all__ = ["Agreed", "Agreement", "MeshPart", "Trainable"]


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
    device: where this rank's tensors of the mesh lie, and so the header.
    """

    mesh: Mesh
    fqns: tuple[str, ...]
    digest: str
    groups: tuple[collectives.Group, ...]
    device: torch.device


@dataclass(frozen=True)
class Agreed:
    """refused: the host knows that nothing may change. accepted: the device's word, else None."""

    refused: bool
    accepted: Tensor | None
    missing: frozenset[str]


@dataclass(frozen=True)
class _Deferred:
    """A header on its way to the host."""

    header: Tensor
    presence: Sequence[Presence]
    arrived: torch.cuda.Event


@dataclass
class Agreement:
    """Headers of one optimizer. steps_skipped: steps refused under `nonfinite="skip"`."""

    runtime: Runtime
    steps_skipped: int = 0
    _deferred: list[_Deferred] = field(default_factory=list)

    def open(
        self, plan: Plan, parts: Sequence[MeshPart], entries: Sequence[Trainable], is_new: bool
    ) -> Agreed:
        """Agree on this step along every mesh. Raises the same error on all ranks, or none."""
        by_name = {entry.fqn: entry.parameter for entry in entries}
        gradients = {name: local_gradient(name, p) for name, p in by_name.items()}
        headers = [self._exchange(part, gradients, by_name) for part in parts]
        if is_new or not any(header.is_cuda for header, _ in headers):
            return self._on_host(plan, parts, headers)
        return self._on_device(headers, gradients)

    def compare(self, plan: Plan, parts: Sequence[MeshPart]) -> None:
        """Prove equal plans by their digests; RuntimeError naming the first difference."""
        for part in parts:
            header = exchange_header(part.digest, (), part.device, part.groups)
            if not read_header(header, ()).same_plan:
                raise _plans_differ(plan, part)

    def raise_deferred(self) -> None:
        """Read the headers that earlier steps left on the device."""
        deferred, self._deferred = self._deferred, []
        for each in deferred:
            each.arrived.synchronize()
        self._judge([read_header(each.header, each.presence) for each in deferred], "last step")

    def _exchange(
        self,
        part: MeshPart,
        gradients: Mapping[str, Tensor | None],
        parameters: Mapping[str, Tensor],
    ) -> tuple[Tensor, list[Presence]]:
        presence = []
        for name in part.fqns:
            gradient = gradients[name]
            absent = gradient is None and self.runtime.missing_grad == "error"
            # An empty shard says nothing about its gradient: FSDP may leave it out or not.
            empty = local(parameters[name]).numel() == 0 or (gradient is None and not absent)
            presence.append(Presence(name, absent, empty))
        nonfinite = self._nonfinite([gradients[name] for name in part.fqns])
        timeout_s = self.runtime.timeout_s
        header = exchange_header(
            part.digest, presence, part.device, part.groups, nonfinite, timeout_s
        )
        return header, presence

    def _nonfinite(self, gradients: Sequence[Tensor | None]) -> Tensor | None:
        """bool []: a local gradient is inf or nan. None if that is not looked at."""
        present = [g for g in gradients if g is not None and g.numel()]
        if self.runtime.nonfinite == "allow" or not present:
            return None
        # The largest magnitude is nan or inf exactly if some element is.
        return ~torch.isfinite(torch.nn.utils.get_total_norm(present, float("inf")))

    def _on_host(
        self,
        plan: Plan,
        parts: Sequence[MeshPart],
        headers: Sequence[tuple[Tensor, list[Presence]]],
    ) -> Agreed:
        verdicts = [read_header(header.cpu(), presence) for header, presence in headers]
        for part, verdict in zip(parts, verdicts, strict=True):
            if not verdict.same_plan and not any(header.is_cuda for header, _ in headers):
                raise _plans_differ(plan, part)
        refused = self._judge(verdicts, "this step")
        missing = {
            part.fqns[index]
            for part, verdict in zip(parts, verdicts, strict=True)
            for index in verdict.missing
        }
        return Agreed(refused, None, frozenset(missing))

    def _on_device(
        self,
        headers: Sequence[tuple[Tensor, list[Presence]]],
        gradients: Mapping[str, Tensor | None],
    ) -> Agreed:
        refuse = self.runtime.nonfinite != "allow"
        device = next(header.device for header, _ in headers if header.is_cuda)
        words = [accepted(header, refuse).to(device) for header, _ in headers]
        for header, presence in headers:
            host = torch.empty(header.shape, dtype=header.dtype, pin_memory=True)
            host.copy_(header, non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record()
            self._deferred.append(_Deferred(host, presence, arrived))
        # What this rank misses all ranks miss, or the device refuses the step.
        absent = self.runtime.missing_grad == "error"
        missing = frozenset(n for n, g in gradients.items() if g is None and absent)
        return Agreed(False, torch.stack(words).all(), missing)

    def _judge(self, verdicts: Sequence[Verdict], step: str) -> bool:
        """True if the step is refused by rule; raises if it is an error. Nothing was changed."""
        for verdict in verdicts:
            if not verdict.same_plan:
                raise RuntimeError(
                    f"{step} changed nothing: the ranks made different plans; call"
                    " optimizer.prepare() on all ranks to see the first difference"
                )
            if verdict.conflict:
                raise RuntimeError(
                    f"{step} changed nothing: some ranks have no gradient for"
                    f" {', '.join(verdict.conflict[:8])} and others have one; give all ranks"
                    " a gradient or none, or set Runtime(missing_grad='zero')"
                )
        finite = all(verdict.finite for verdict in verdicts)
        if finite or self.runtime.nonfinite == "allow":
            return False
        if self.runtime.nonfinite == "error":
            raise RuntimeError(
                f"{step} changed nothing: a gradient is inf or nan on at least one rank; set"
                " Runtime(nonfinite='skip') to skip such steps or 'allow' to take them"
            )
        self.steps_skipped += 1
        return True


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

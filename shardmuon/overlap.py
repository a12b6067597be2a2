"""Buckets that set out while backward still runs: `Runtime(overlap="backward")`.

Owns when a bucket sets out, and whether what it carries is still right when the step comes. Its
update is computed from gradient and state without changing either, and travels on process groups
of its own, since FSDP2 uses those of the mesh at that time. State and parameters are written by
the step.

Ranks stay together by one rule: on these groups buckets set out in the order of the plan, each once
per round, and a step begins by sending all that have not left. So it does not matter which
gradients a rank has, or when.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardmuon.entries import Entry, compute_device
from shardmuon.exchange import collectives
from shardmuon.exchange.agreement import Doubt
from shardmuon.exchange.blocks import local, local_gradient
from shardmuon.exchange.legs import Leg
from shardmuon.exchange.pipeline import Member, Passage, set_out
from shardmuon.holdings import Holdings, Home, State
from shardmuon.rules import RULES, Commit
from shardmuon.rules.elementwise import bit_sum
from shardmuon.runtime import Runtime

__all__ = ["Overlap", "check_overlap"]


@dataclass(frozen=True)
class _Itinerary:
    """Buckets that set out early, in order: their passage, private group and parameters.

    needs: indices of entries. homes: as the engine has them for this plan. alive: parameters of
    all entries.
    """

    passages: tuple[Passage, ...]
    groups: tuple[collectives.Group, ...]
    needs: tuple[frozenset[int], ...]
    homes: Mapping[str, Home]
    alive: tuple[weakref.ref[Tensor], ...]

    def fits(self, entries: Sequence[Entry]) -> bool:
        """Whether these are the parameters of the plan."""
        return len(entries) == len(self.alive) and all(
            reference() is entry.parameter
            for reference, entry in zip(self.alive, entries, strict=True)
        )


@dataclass
class _Round:
    """From one step to the next. state: None while what is known of it may be out of date.

    gradients: those that are there, by entry. legs: buckets on their way. sent: how many have
    left. used: by entry, what its blocks were computed from; bits: of all gradients in it, summed.
    """

    entries: Sequence[Entry]
    state: State | None
    gradients: dict[int, Tensor] = field(default_factory=dict)
    legs: list[tuple[Passage, Leg]] = field(default_factory=list)
    sent: int = 0
    used: dict[int, tuple[object, ...]] = field(default_factory=dict)
    bits: Tensor | None = None
    fault: str | None = None


class Overlap:
    """Buckets of one optimizer on their way before its step. started: by hooks in this round."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._twins: dict[collectives.Group, collectives.Group] | None = None
        self._itinerary: _Itinerary | None = None
        self._round = _Round((), None)
        self._hooks: list[Any] = []
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._seen: set[torch.cuda.Stream] = set()
        self.started = 0

    def arm(
        self,
        passages: Sequence[Passage],
        homes: Mapping[str, Home],
        entries: Sequence[Entry],
        state: State,
    ) -> None:
        """Let these buckets, proven equal on all ranks, set out from the next backward on.

        Collective over the world when it is called first.
        """
        if self._runtime.overlap == "none":
            return
        if self._itinerary is None or self._itinerary.homes is not homes:
            self._drop()
            self._itinerary = self._make(passages, homes, entries)
            self._hook(entries)
        self._round.entries, self._round.state = entries, state

    def pause(self) -> None:
        """Let nothing set out until the next step, since state was replaced. Local."""
        self._round.state = None
        self._round.entries = ()

    @torch.no_grad()
    def complete(self, entries: Sequence[Entry], state: State) -> Doubt:
        """Send all that has not left, and say whether what has is still right.

        entries, state: of the step that begins.
        """
        if self._itinerary is None:
            return Doubt()
        round_ = self._round
        round_.entries, round_.state = entries, state
        if not self._itinerary.fits(entries):  # another plan comes, and drops these
            round_.state = None
        while round_.sent < len(self._itinerary.passages):
            self._send()
        for device, stream in self._streams.items():
            # The step is about to write what that stream reads.
            torch.cuda.current_stream(device).wait_stream(stream)
        return Doubt(round_.fault or self._outdated(), self._stale())

    def take(self, passage: Passage) -> Leg | None:
        """The leg of a bucket that is on its way already."""
        for number, (other, leg) in enumerate(self._round.legs):
            if other is passage:
                del self._round.legs[number]
                return leg
        return None

    def close(self) -> None:
        """The step is over: whatever has become of it, a new round begins."""
        self._drop()
        self.started = 0

    # -- during backward ------------------------------------------------------------------------

    @torch.no_grad()
    def on_gradient(self, index: int, parameter: Tensor) -> None:
        """The gradient of entry `index` is there and reduced: send what has waited for it only."""
        if self._itinerary is None or self._round.state is None or parameter.grad is None:
            return
        gradient = local(parameter.grad)
        if gradient.is_cuda:
            self._seen.add(torch.cuda.current_stream(gradient.device))
        calls = sum(collectives.calls.values())
        if index in self._round.gradients:
            self._start_over(index, gradient)
        self._round.gradients[index] = gradient
        needs = self._itinerary.needs
        while self._round.sent < len(needs):
            if not needs[self._round.sent] <= self._round.gradients.keys():
                break
            self._note(needs[self._round.sent], gradient.device)
            self._send()
        self.started += sum(collectives.calls.values()) - calls

    def _start_over(self, index: int, gradient: Tensor) -> None:
        """Another backward has begun; what has left was for a step that was not taken."""
        assert self._itinerary is not None
        summed = self._round.gradients[index] is gradient
        state, self._round.state = self._round.state, None
        while self._round.sent < len(self._itinerary.passages):
            self._send()
        self._drop()
        self._round.state = state
        if summed:
            self._round.fault = (
                f"{self._round.entries[index].fqn}: several backward passes added up its"
                " gradient, and Runtime(overlap='backward') needs"
                " set_requires_gradient_sync(False) in all but the last of them"
            )

    def _send(self) -> None:
        """Let the next bucket set out: with zeros while the state is not known."""
        assert self._itinerary is not None
        round_, number = self._round, self._round.sent
        passage, group = self._itinerary.passages[number], self._itinerary.groups[number]
        round_.sent += 1
        with self._stream(passage.device):
            members: dict[int, Member] = {}
            if round_.state is not None:
                needs = self._itinerary.needs[number]
                holdings = self._holdings([round_.entries[i] for i in needs], round_.state)
                members = holdings.members(passage)
            leg, _ = set_out(passage, members, Commit(writes=False), group)
        assert leg is not None
        round_.legs.append((passage, leg))

    def _holdings(self, needed: Sequence[Entry], state: State) -> Holdings:
        assert self._itinerary is not None
        gradients = {entry.fqn: _gradient(entry) for entry in needed}
        absent = [fqn for fqn, gradient in gradients.items() if gradient is None]
        missing = frozenset(absent if self._runtime.missing_grad == "error" else ())
        return Holdings(self._round.entries, self._itinerary.homes, state, gradients, missing)

    def _note(self, needs: frozenset[int], device: torch.device) -> None:
        """Remember what the next bucket is computed from."""
        round_ = self._round
        assert round_.state is not None
        new = needs - round_.used.keys()  # experts of one stack can be in several buckets
        for index in new:
            round_.used[index] = _origin(round_.entries[index], round_.state)
        with self._stream(device):
            bits = bit_sum([round_.gradients[index] for index in new])
            round_.bits = bits if round_.bits is None else round_.bits + bits

    def _outdated(self) -> str | None:
        """Names a parameter whose state or settings are not those that were used."""
        round_ = self._round
        if round_.state is None:
            return None
        for index, used in round_.used.items():
            entry = round_.entries[index]
            if not all(map(_equal, _origin(entry, round_.state), used)):
                return (
                    f"{entry.fqn}: its state or settings changed between backward and step, after"
                    " Runtime(overlap='backward') had used them"
                )
        return None

    def _stale(self) -> Tensor | None:
        """bool []: gradients are not those that were used. None if none was used.

        Found in their bits: `clip_grad_norm_` changes DTensors without counting up their versions.
        """
        round_ = self._round
        if round_.bits is None or round_.state is None:
            return None
        now = [_gradient(round_.entries[index]) for index in round_.used]
        return bit_sum([gradient for gradient in now if gradient is not None]) != round_.bits

    # -- plans ----------------------------------------------------------------------------------

    def _make(
        self, passages: Sequence[Passage], homes: Mapping[str, Home], entries: Sequence[Entry]
    ) -> _Itinerary:
        travelling = [passage for passage in passages if passage.route.hops]
        groups = [passage.groups[passage.route.hops[0].axis] for passage in travelling]
        if self._twins is None:
            known = list(dict.fromkeys(groups))
            self._twins = dict(zip(known, collectives.private_groups(known), strict=True))
        # Groups that came with a later plan have no twin: to make one takes the whole world.
        twins = [self._twins.get(group) for group in groups]
        pairs = [(p, twin) for p, twin in zip(travelling, twins, strict=True) if twin is not None]
        return _Itinerary(
            tuple(passage for passage, _ in pairs),
            tuple(twin for _, twin in pairs),
            tuple(frozenset(homes[m.id].entry for m in p.bucket.matrices) for p, _ in pairs),
            homes,
            tuple(weakref.ref(entry.parameter) for entry in entries),
        )

    def _hook(self, entries: Sequence[Entry]) -> None:
        assert self._itinerary is not None
        for hook in self._hooks:
            hook.remove()
        self._hooks = [
            entries[index].parameter.register_post_accumulate_grad_hook(
                _telling(weakref.ref(self), index)
            )
            for index in sorted({index for need in self._itinerary.needs for index in need})
        ]

    def _drop(self) -> None:
        """Wait for what is still on its way, and open a new round."""
        for _, leg in self._round.legs:
            leg.finish(self._runtime.timeout_s)
        self._round = _Round(self._round.entries, self._round.state)
        self._seen.clear()

    @contextmanager
    def _stream(self, device: torch.device) -> Iterator[None]:
        """A stream that is behind those on which gradients were reduced, and beside the model's."""
        if device.type != "cuda":
            yield
            return
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        stream = self._streams[device]
        for other in (*self._seen, torch.cuda.current_stream(device)):
            stream.wait_stream(other)
        with torch.cuda.stream(stream):
            yield


def check_overlap(entries: Sequence[Entry]) -> None:
    """ValueError naming a parameter whose gradient is not there when its hook is called."""
    for entry in entries:
        if entry.group["algorithm"] not in RULES:
            continue
        if not isinstance(entry.parameter, DTensor) and len(entry.mesh.ranks) > 1:
            raise ValueError(
                f"{entry.fqn}: Runtime(overlap='backward') takes DTensors only; hooks of a plain"
                " tensor, such as DDP's, come before its gradient is reduced"
            )
        if local(entry.parameter).device.type != compute_device(entry).type:
            raise ValueError(
                f"{entry.fqn}: Runtime(overlap='backward') does not go with CPU offload"
            )


def _gradient(entry: Entry) -> Tensor | None:
    """The local gradient; None if it cannot be used, which the step will say."""
    try:
        return local_gradient(entry.fqn, entry.parameter)
    except ValueError:
        return None


def _origin(entry: Entry, state: State) -> tuple[object, ...]:
    """What the blocks of a parameter are computed from, beside its gradient."""
    keys = RULES[entry.group["algorithm"]].prepare_keys
    values = state[entry.parameter].values()
    return (*map(_Version.of, values), *(float(entry.group[key]) for key in keys))


class _Version(NamedTuple):
    """A tensor as it is now. Operations on a DTensor count in it, those on its part in that."""

    tensor: Tensor
    counts: tuple[int, int]

    @classmethod
    def of(cls, tensor: Tensor) -> _Version:
        return cls(tensor, (tensor._version, local(tensor)._version))


def _equal(one: object, other: object) -> bool:
    """Tensors are equal if they are the same in the same version."""
    if isinstance(one, _Version) and isinstance(other, _Version):
        return one.tensor is other.tensor and one.counts == other.counts
    return one == other


def _telling(reference: weakref.ref[Overlap], index: int) -> Callable[[Tensor], None]:
    """A hook that does not keep the optimizer alive."""

    def hook(parameter: Tensor) -> None:
        overlap = reference()
        if overlap is not None:
            overlap.on_gradient(index, parameter)

    return hook

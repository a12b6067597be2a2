"""Settings of how a step runs: never of what it computes, never in parameter groups or files.

Owns `Runtime`, which is also the YAML section `optimizer.runtime`. Torch-free.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Literal, get_type_hints

from shardmuon.limits import Bytes, Seconds, advice, choices, describe, fits, show

__all__ = ["Runtime"]

Exchange = Literal["auto", "all_gather"]
MissingGrad = Literal["error", "zero"]
NonFinite = Literal["error", "skip", "allow"]
Overlap = Literal["none", "backward"]
Replicas = Literal["auto", "once", "repeat"]


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """How a step runs. Equal on all ranks (the plan's digest proves it).

    exchange: "auto" moves blocks to their owner by all-to-all on sharded axes and all-gathers
        updates on replicated axes; "all_gather" uses all-gathers everywhere. Same bits.
    bucket_bytes: wire bytes of whole matrices that one owner receives in one bucket; bounds the
        transient memory of a step. A larger matrix is a bucket of its own. None: a quarter of what
        an owner has, but 128 to 256 MiB.
    deterministic: one matrix at a time on CUDA too, so that bits do not depend on the layout.
    missing_grad: "error" leaves a parameter that has no gradient on any rank untouched and raises
        on all ranks if they differ; "zero" reads a missing gradient as zeros (decay applies).
    nonfinite: what an inf or nan in any rank's gradient does: "error" on all ranks, "skip" the
        step on all ranks, or "allow". The first two change neither parameters nor state.
    overlap: "backward" sends a bucket to its owners as soon as backward has reduced its last
        gradient; the same bits, for more memory. Nothing may change gradients between backward
        and step then (no clipping). Needs process groups of its own, which the first step makes:
        all ranks of the world must take it.
    replicas: "once" orthogonalizes each matrix once over all replicas (HSDP, DDP), which then
        gather each other's updates; "repeat" does so in every replica, without that gathering;
        "auto" repeats where replicas lie on several hosts and it is predicted to be quicker.
    share_large: a matrix that alone would take longer than a step may be orthogonalized by a team
        of ranks along one mesh axis, if that is predicted to be quicker. The last bits then depend
        on the team, so it excludes `deterministic`.
    timeout_s: seconds a host-side wait for a collective may take; None keeps the group's own.
    """

    exchange: Exchange = "auto"
    bucket_bytes: Bytes | None = None
    deterministic: bool = False
    missing_grad: MissingGrad = "error"
    nonfinite: NonFinite = "error"
    overlap: Overlap = "none"
    replicas: Replicas = "auto"
    share_large: bool = False
    timeout_s: Seconds | None = None

    def __post_init__(self) -> None:
        for name, hint in _hints().items():
            value = getattr(self, name)
            if not fits(hint, value):
                near = advice(value, choices(hint))
                raise ValueError(
                    f"runtime.{name} must be {describe(hint)}, got {show(value)}{near}"
                )
        if self.deterministic and self.share_large:
            raise ValueError(
                "runtime.share_large does not go with runtime.deterministic, which promises bits"
                " that do not depend on the number of ranks"
            )


@functools.cache
def _hints() -> dict[str, Any]:
    return get_type_hints(Runtime, include_extras=True)

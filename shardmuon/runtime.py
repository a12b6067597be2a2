"""Settings of how a step runs: never of what it computes, never in parameter groups or files.

Owns `Runtime`, which is also the YAML section `optimizer.runtime`. Torch-free.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

__all__ = ["Runtime"]

Exchange = Literal["auto", "all_gather"]
MissingGrad = Literal["error", "zero"]
NonFinite = Literal["error", "skip", "allow"]
Overlap = Literal["none", "backward"]

_CHOICES: dict[str, tuple[str, ...]] = {
    "exchange": get_args(Exchange),
    "missing_grad": get_args(MissingGrad),
    "nonfinite": get_args(NonFinite),
    "overlap": get_args(Overlap),
}


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
    timeout_s: seconds a host-side wait for a collective may take; None keeps the group's own.
    """

    exchange: Exchange = "auto"
    bucket_bytes: int | None = None
    deterministic: bool = False
    missing_grad: MissingGrad = "error"
    nonfinite: NonFinite = "error"
    overlap: Overlap = "none"
    timeout_s: float | None = None

    def __post_init__(self) -> None:
        for name, allowed in _CHOICES.items():
            value = getattr(self, name)
            if value not in allowed:
                raise ValueError(f"runtime.{name} must be one of {allowed}, got {value!r}")
        size = self.bucket_bytes
        if size is not None and (isinstance(size, bool) or not isinstance(size, int)):
            raise ValueError(f"runtime.bucket_bytes must be an integer or None, got {size!r}")
        if size is not None and size < 1:
            raise ValueError(f"runtime.bucket_bytes must be at least 1, got {size}")
        if not isinstance(self.deterministic, bool):
            raise ValueError(f"runtime.deterministic must be a bool, got {self.deterministic!r}")
        if self.timeout_s is not None and not self.timeout_s > 0:
            raise ValueError(f"runtime.timeout_s must be above 0 or None, got {self.timeout_s}")

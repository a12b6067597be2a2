"""The norm of all gradients of a model that is spread over ranks, and clipping by it.

Owns how often an element is counted: once, however many ranks hold it. Works on local parts with
one small all-reduce, because arithmetic on DTensors would redistribute, and refuses parameters of
several meshes. Every rank takes part in the all-reduce, whatever gradients it has, even none.

With n ranks to a model and a tensor cut into m parts, each element lies on n / m ranks. So the sum
of powers over all ranks, each divided by n / m, counts each element once, on every mesh. A tensor
that is cut nowhere is a special case: the ranks that have a gradient are counted, so that its norm
is right also where some have none.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardmuon.exchange import collectives
from shardmuon.exchange.blocks import local

__all__ = [
    "Counted",
    "Pipeline",
    "by_kind",
    "clip_grad_norm_",
    "count",
    "count_gradients",
    "device_types",
    "grad_norm",
    "scale_",
    "total_norm",
]

Pipeline = DeviceMesh | ProcessGroup | None


@dataclass(frozen=True, kw_only=True)
class Counted:
    """What this rank holds of some tensors, and how often the ranks hold each element.

    parts: this rank's parts, maybe empty. copies: of each, how many of `ranks` hold its elements.
    ranks: that hold a model (with a pipeline: a stage) together. stages: number of stages. device:
    where all ranks add up numbers.
    """

    parts: Sequence[Tensor]
    copies: Sequence[int]
    ranks: int
    stages: int
    device: torch.device


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    *,
    pipeline: Pipeline = None,
) -> Tensor:
    """Scale all gradients in place so that their norm over all ranks is at most `max_norm`.

    As `torch.nn.utils.clip_grad_norm_`, for plain tensors and DTensors on any meshes, also mixed.
    Collective: all ranks call it, with their own parameters, even if they have no gradients.

    Args:
        parameters: a tensor or tensors, of any dtypes. DTensors with any placements but Partial;
            axes that are not of a tensor's own mesh replicate it. Plain tensors are replicated on
            all ranks (of a stage). A tensor that is given twice counts once.
        max_norm: 0 or more; `math.inf` changes nothing.
        norm_type: a number above 0, or `math.inf` for the largest magnitude.
        error_if_nonfinite: raise if the norm is inf or nan. It makes the host wait for a GPU.
        pipeline: process group, or mesh of one axis, along which stages hold different parameters.

    Returns the norm before, a plain float32 tensor [] with the same bits on all ranks. The factor
    is that of torch: max_norm / (norm + 1e-6), at most 1; a norm that is inf or nan makes the
    gradients zero or nan.

    Raises ValueError, before anything is changed, for an argument out of range, a sparse or Partial
    gradient, and where ranks cannot hold equally many copies of a tensor; RuntimeError, on all
    ranks and with nothing changed, if `error_if_nonfinite` and the norm is inf or nan.
    """
    if not max_norm >= 0:
        raise ValueError(f"max_norm must be 0 or more, got {max_norm!r}")
    counted = count_gradients(parameters, pipeline)
    norm, _ = total_norm(counted, norm_type)
    if error_if_nonfinite and not math.isfinite(norm):
        raise RuntimeError(
            f"the norm of the gradients is {float(norm)}; nothing was changed. Lower the learning"
            " rate or the loss scale, or set error_if_nonfinite=False"
        )
    scale_(counted.parts, norm, max_norm)
    return norm


@torch.no_grad()
def grad_norm(
    parameters: Tensor | Iterable[Tensor], norm_type: float = 2.0, *, pipeline: Pipeline = None
) -> Tensor:
    """The norm of all gradients over all ranks, which `clip_grad_norm_` clips by. Collective.

    Arguments, errors and result are those of `clip_grad_norm_`; changes nothing.
    """
    return total_norm(count_gradients(parameters, pipeline), norm_type)[0]


def count_gradients(parameters: Tensor | Iterable[Tensor], pipeline: Pipeline = None) -> Counted:
    """The gradients of those of `parameters` that have one. No collective."""
    listed = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    once = {id(p): p for p in listed}.values()
    gradients = [p.grad for p in once if p.grad is not None]
    # All parameters say where ranks meet: which gradients there are may differ between ranks.
    return count(gradients, pipeline, device_types(listed))


def count(
    tensors: Sequence[Tensor], pipeline: Pipeline = None, devices: frozenset[str] | None = None
) -> Counted:
    """This rank's parts of `tensors` and their copies; see the module. No collective.

    devices: kinds of device that the ranks compute on; None: those of `tensors`.
    """
    stages = _stages(pipeline)
    ranks, rest = divmod(collectives.world_size(), stages)
    if rest:
        raise ValueError(
            f"pipeline has {stages} stages, which {collectives.world_size()} ranks cannot share"
            " equally; pass the group of one rank of each stage"
        )
    return Counted(
        parts=[local(tensor) for tensor in tensors],
        copies=[_copies(index, tensor, ranks) for index, tensor in enumerate(tensors)],
        ranks=ranks,
        stages=stages,
        device=collectives.meeting_device(device_types(tensors) if devices is None else devices),
    )


def total_norm(
    counted: Counted, norm_type: float = 2.0, wish: float = 0.0
) -> tuple[Tensor, Tensor]:
    """The norm of all elements of all ranks, each counted once: float32 []. Collective.

    wish: any number; its sum over all ranks (with norm_type inf: the largest) is the second result,
    float32 [], and costs no collective of its own.
    """
    if not norm_type > 0:
        raise ValueError(f"norm_type must be above 0, got {norm_type!r}")
    if norm_type == math.inf:
        return _largest(counted, wish)
    # In parts; whole on each rank; ranks that have such; wishes. Powers need the range of float64.
    sums = torch.zeros(4, dtype=_wide(counted.device), device=counted.device)
    for (copies, *_), parts in _by_copies(counted).items():
        norms = _norms(parts, norm_type, counted.device)
        power = norms.to(sums.dtype).pow(norm_type).sum()
        if copies == counted.ranks and counted.stages == 1:
            sums[1] += power
            sums[2].fill_(1)
        else:
            sums[0] += power / copies
    sums[3].fill_(wish)
    collectives.all_reduce_sum_(sums)
    total = sums[0] + sums[1] / sums[2].clamp(min=1)
    return total.pow(1 / norm_type).float(), sums[3].float()


def scale_(parts: Sequence[Tensor], norm: Tensor, max_norm: float) -> None:
    """Multiply plain tensors in place by the factor of torch that brings `norm` to `max_norm`."""
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for (device, _), same in by_kind(parts).items():
        torch._foreach_mul_(same, factor.to(device))


def by_kind(tensors: Iterable[Tensor]) -> Mapping[tuple[torch.device, torch.dtype], list[Tensor]]:
    """Those of plain `tensors` that are not empty, together as foreach functions want them."""
    kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        if tensor.numel():
            kinds[tensor.device, tensor.dtype].append(tensor)
    return kinds


def device_types(tensors: Iterable[Tensor]) -> frozenset[str]:
    """Kinds of device that `tensors` are computed on: those of their meshes, even if offloaded."""
    return frozenset(
        t.device_mesh.device_type if isinstance(t, DTensor) else t.device.type for t in tensors
    )


def _largest(counted: Counted, wish: float) -> tuple[Tensor, Tensor]:
    """As `total_norm`, for the largest magnitude."""
    # The maximum; 1 if there is a nan, which a collective need not keep; the largest wish.
    found = torch.zeros(3, device=counted.device)
    for parts in by_kind(counted.parts).values():
        largest = _norms(parts, math.inf, counted.device).max().float()
        found[0] = torch.maximum(found[0], largest.nan_to_num(nan=0.0, posinf=math.inf))
        found[1] = torch.maximum(found[1], largest.isnan())
    found[2].fill_(wish)
    collectives.all_reduce_max_(found)
    return torch.where(found[1] > 0, math.nan, found[0]), found[2].clone()


def _norms(parts: Sequence[Tensor], norm_type: float, device: torch.device) -> Tensor:
    """[parts], the norm of each: at least float32, on `device`. parts: of one kind, not empty."""
    dtype = torch.promote_types(parts[0].dtype, torch.float32)
    return torch.stack(torch._foreach_norm(list(parts), norm_type, dtype=dtype)).to(device)


def _by_copies(
    counted: Counted,
) -> Mapping[tuple[int, torch.device, torch.dtype], list[Tensor]]:
    """Parts that are not empty, by copies and kind: few, and dividing by a number needs no copy."""
    groups: dict[tuple[int, torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
    for part, copies in zip(counted.parts, counted.copies, strict=True):
        if part.numel():
            groups[copies, part.device, part.dtype].append(part)
    return groups


def _copies(index: int, tensor: Tensor, ranks: int) -> int:
    """How many of `ranks` hold each element of `tensor`; ValueError if that cannot be known."""
    if tensor.is_sparse:
        raise ValueError(f"tensor {index}, {tuple(tensor.shape)}: sparse gradients not supported")
    parts = 1
    if isinstance(tensor, DTensor):
        for size, placement in zip(tensor.device_mesh.shape, tensor.placements, strict=True):
            if placement.is_partial():
                raise ValueError(
                    f"tensor {index}, {tuple(tensor.shape)}: gradient has placements"
                    f" {tensor.placements}, still a local sum; reduce it before its norm is taken"
                )
            parts *= 1 if placement.is_replicate() else size
    if ranks % parts:
        raise ValueError(
            f"tensor {index}, {tuple(tensor.shape)}: cut into {parts} parts, of which {ranks} ranks"
            " cannot hold equally many copies; its mesh and `pipeline` must divide all ranks"
        )
    return ranks // parts


def _stages(pipeline: Pipeline) -> int:
    """Number of pipeline stages."""
    if pipeline is None:
        return 1
    if isinstance(pipeline, DeviceMesh):
        if pipeline.ndim == 1:
            return pipeline.size()
        raise ValueError(
            f"pipeline must have one axis, got a mesh of shape {tuple(pipeline.shape)}; pass the"
            " axis along which the stages lie, such as mesh['pipeline']"
        )
    if not collectives.is_group(pipeline):
        raise ValueError(
            "pipeline must be a DeviceMesh of one axis, a process group or None, got"
            f" {type(pipeline).__name__}"
        )
    return collectives.world_size(pipeline)


def _wide(device: torch.device) -> torch.dtype:
    """float64 where devices are known to have it."""
    return torch.float64 if device.type in ("cpu", "cuda") else torch.float32

"""Do replicas hold the same bits? A hash of every parameter, compared along replicated axes.

Owns one check, which the user asks for: `fully_shard` does not synchronize replicas, so other seeds
give replicas that never agree, and a broken link or kernel lets them part. Changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from shardmuon.exchange import collectives
from shardmuon.exchange.blocks import local

__all__ = ["differing_replicas"]

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_WEIGHTS = 65_521  # a prime: moving a value changes the hash, not only changing it


def differing_replicas(
    parameters: Mapping[str, tuple[Tensor, DeviceMesh]], timeout_s: float | None = None
) -> list[str]:
    """Names of parameters whose replicas differ; the same answer on all ranks of a mesh.

    parameters: by name, each with the mesh of several ranks on which it lies; plain tensors are
    replicated over all of it. Collective: two int64 per parameter and replicated axis, and one
    per parameter and axis to tell all ranks.
    """
    meshes = sorted(
        {mesh for _, mesh in parameters.values()},
        key=lambda mesh: (mesh.size(), tuple(mesh.mesh.flatten().tolist())),
    )
    differing: list[str] = []
    for mesh in meshes:
        lying = {n: tensor for n, (tensor, its) in sorted(parameters.items()) if its == mesh}
        differs = torch.zeros(len(lying), dtype=torch.int64, device=mesh.device_type)
        for axis in range(mesh.ndim):
            _compare(lying, mesh, axis, differs, timeout_s)
        for axis in range(mesh.ndim):
            collectives.all_reduce_max_(differs, mesh.get_group(axis), timeout_s)
        differing += [name for name, found in zip(lying, differs.tolist(), strict=True) if found]
    return sorted(differing)


def _compare(
    lying: Mapping[str, Tensor],
    mesh: DeviceMesh,
    axis: int,
    differs: Tensor,
    timeout_s: float | None,
) -> None:
    """Set `differs` [parameters] where the hashes along a replicated axis are not all equal."""
    here = [i for i, tensor in enumerate(lying.values()) if _is_replicated(tensor, axis)]
    if not here or mesh.size(axis) == 1:
        return
    tensors = list(lying.values())
    hashes = torch.stack([_hash(local(tensors[i])) for i in here]).to(mesh.device_type)
    bounds = torch.stack((hashes, -hashes))
    collectives.all_reduce_max_(bounds, mesh.get_group(axis), timeout_s)
    differs[here] |= (bounds[0] != -bounds[1]).any(dim=1).to(torch.int64)


def _is_replicated(tensor: Tensor, axis: int) -> bool:
    return not isinstance(tensor, DTensor) or isinstance(tensor.placements[axis], Replicate)


def _hash(tensor: Tensor) -> Tensor:
    """int64 [2]: sum and weighted sum of the bits, modulo 2^64."""
    bits = tensor.contiguous().view(-1).view(_BITS[tensor.element_size()]).to(torch.int64)
    weights = torch.arange(bits.numel(), device=bits.device) % _WEIGHTS + 1
    return torch.stack((bits.sum(), (bits * weights).sum()))

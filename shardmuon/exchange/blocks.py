"""Reads layouts off tensors: DTensor or plain tensor in, planning's description out.

The only file that looks at placements. What it cannot describe it refuses by name, so that no
matrix is ever exchanged under a wrong picture of where its pieces lie.
"""

from __future__ import annotations

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from shardmuon.exchange import collectives
from shardmuon.planning.layout import Layout, Mesh, Split

__all__ = ["device_mesh_of", "layout_of", "local", "local_gradient", "planning_mesh"]


def local(tensor: Tensor) -> Tensor:
    """This rank's part of `tensor`, sharing its memory, outside of autograd."""
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


def device_mesh_of(tensor: Tensor, default: DeviceMesh | None) -> DeviceMesh | None:
    """The mesh of a DTensor; for a plain tensor `default`, over which it is replicated."""
    return tensor.device_mesh if isinstance(tensor, DTensor) else default


def planning_mesh(device_mesh: DeviceMesh | None) -> Mesh:
    """Torch-free copy of `device_mesh`; without one, this rank alone."""
    if device_mesh is None:
        return Mesh((collectives.rank(),), (1,))
    ranks = tuple(int(rank) for rank in device_mesh.mesh.flatten().tolist())
    return Mesh(ranks, tuple(device_mesh.shape), tuple(device_mesh.mesh_dim_names or ()))


def layout_of(fqn: str, parameter: Tensor, default: DeviceMesh | None) -> Layout:
    """How the ranks hold `parameter` (2-D).

    Raises ValueError, with name, placement and reason, for layouts that are not supported and
    where the local tensor is not the block that torch's rule of splitting gives.
    """
    mesh = planning_mesh(device_mesh_of(parameter, default))
    if not isinstance(parameter, DTensor):
        return Layout(mesh)
    layout = Layout(mesh, _splits(fqn, parameter))
    rows, cols = parameter.shape
    block = layout.block(rows, cols, mesh.coordinates[collectives.rank()])
    held = tuple(local(parameter).shape)
    if held != (block.rows, block.cols):
        reason = f"this rank holds {held}, torch's rule of splitting gives {tuple(block)}"
        raise _unsupported(fqn, parameter, reason)
    return layout


def _splits(fqn: str, parameter: DTensor) -> tuple[Split, ...]:
    """The cuts of a DTensor in the order in which they were made, each dim by itself.

    A Shard cuts before the axes to its right. A strided shard (FSDP2 over a tensor-parallel axis)
    cuts after some of them: those whose sizes multiply to its `split_factor`.
    """
    sizes = parameter.device_mesh.shape
    order: list[Split] = []
    for axis, placement in reversed(list(enumerate(parameter.placements))):
        if isinstance(placement, Replicate):
            continue
        factor = getattr(placement, "split_factor", 1)
        dim = getattr(placement, "dim", None)
        if dim is None or not (type(placement) is Shard or hasattr(placement, "split_factor")):
            raise _unsupported(fqn, parameter, f"{type(placement).__name__} is not supported")
        position, pieces = 0, 1
        while pieces < factor and position < len(order):
            earlier = order[position]
            pieces *= sizes[earlier.axis] if earlier.dim == dim % parameter.ndim else 1
            position += 1
        if pieces != factor:
            raise _unsupported(fqn, parameter, f"no axes make a split factor of {factor}")
        order.insert(position, Split(axis, dim % parameter.ndim))
    return tuple(order)


def local_gradient(fqn: str, parameter: Tensor) -> Tensor | None:
    """This rank's part of the gradient, or None.

    Raises ValueError if the gradient is sparse or not placed like its parameter: a Partial one is
    still a local sum, and orthogonalizing it would give another update on every rank.
    """
    gradient = parameter.grad
    if gradient is None:
        return None
    if gradient.is_sparse:
        raise ValueError(f"{fqn}: sparse gradients are not supported")
    if isinstance(parameter, DTensor) != isinstance(gradient, DTensor):
        raise ValueError(
            f"{fqn}: parameter is {type(parameter).__name__}, gradient {type(gradient).__name__}"
        )
    theirs, ours = (getattr(tensor, "placements", None) for tensor in (gradient, parameter))
    if theirs != ours:
        raise ValueError(
            f"{fqn}: gradient has placements {theirs}, the parameter {ours}; reduce or"
            " redistribute the gradient before step()"
        )
    return local(gradient)


def _unsupported(fqn: str, parameter: DTensor, reason: str) -> ValueError:
    return ValueError(
        f"{fqn}: shape {tuple(parameter.shape)} with placements {parameter.placements} on mesh"
        f" {tuple(parameter.device_mesh.shape)}: {reason}"
    )

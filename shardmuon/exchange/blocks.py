"""Reads layouts off tensors: DTensor or plain tensor in, planning's description out.

The only file that looks at placements. What it cannot describe it refuses by name, so that no
matrix is ever exchanged under a wrong picture of where its pieces lie.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.nn import Parameter

from shardmuon.exchange import collectives
from shardmuon.planning.cut import Cut
from shardmuon.planning.layout import Box, Layout, Mesh, Split

__all__ = [
    "BlockView",
    "as_device_mesh",
    "device_mesh_of",
    "layout_of",
    "local",
    "local_gradient",
    "planning_mesh",
    "zeros_like",
]


def local(tensor: Tensor) -> Tensor:
    """This rank's part of `tensor`, sharing its memory, outside of autograd."""
    # to_local() would make a view for autograd first, and a step asks hundreds of times.
    held: Tensor = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return held.detach() if held.requires_grad else held


def device_mesh_of(tensor: Tensor, default: DeviceMesh | None) -> DeviceMesh | None:
    """The mesh of a DTensor; for a plain tensor `default`, over which it is replicated."""
    return tensor.device_mesh if isinstance(tensor, DTensor) else default


def as_device_mesh(place: Any) -> DeviceMesh | None:
    """`place` (a DeviceMesh, a process group such as DDP's, or None) as a mesh. No collective."""
    if place is None or isinstance(place, DeviceMesh):
        return place
    if not collectives.is_group(place):
        raise ValueError(
            f"mesh must be a DeviceMesh, a process group or None, got {type(place).__name__}"
        )
    return DeviceMesh.from_group(place, collectives.device_type(place))


def planning_mesh(device_mesh: DeviceMesh | None) -> Mesh:
    """Torch-free copy of `device_mesh`; without one, this rank alone."""
    if device_mesh is None:
        return Mesh((collectives.rank(),), (1,))
    if device_mesh not in _meshes:
        _meshes[device_mesh] = _copy_of(device_mesh)
    return _meshes[device_mesh]


# A mesh is what its ranks are, so that equal ones may share a copy; steps ask for it every time.
_meshes: WeakKeyDictionary[DeviceMesh, Mesh] = WeakKeyDictionary()


def _copy_of(device_mesh: DeviceMesh) -> Mesh:
    ranks = tuple(int(rank) for rank in device_mesh.mesh.flatten().tolist())
    return Mesh(ranks, tuple(device_mesh.shape), tuple(device_mesh.mesh_dim_names or ()))


def zeros_like(parameter: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros of global `shape` that lie as `parameter` does; shapes differ where it has a 1."""
    if shape == tuple(parameter.shape):
        return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
    if not isinstance(parameter, DTensor):
        return torch.zeros(shape, dtype=dtype, device=parameter.device)
    layout = layout_of("state", parameter, None)
    box = layout.box(shape, layout.mesh.coordinates[collectives.rank()])
    sizes = [stop - start for start, stop in box]
    strides = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        torch.zeros(sizes, dtype=dtype, device=local(parameter).device),
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=torch.Size(shape),
        stride=strides,
    )


def layout_of(fqn: str, parameter: Tensor, default: DeviceMesh | None) -> Layout:
    """How the ranks hold `parameter`.

    Raises ValueError, with name, placement and reason, for layouts that are not supported and
    where the local tensor is not the block that torch's rule of splitting gives.
    """
    if type(local(parameter)) not in (Tensor, Parameter):
        raise ValueError(
            f"{fqn}: local tensors of type {type(local(parameter)).__name__} are not supported"
        )
    mesh = planning_mesh(device_mesh_of(parameter, default))
    if not isinstance(parameter, DTensor):
        return Layout(mesh)
    layout = Layout(mesh, _splits(fqn, parameter))
    box = layout.box(parameter.shape, mesh.coordinates[collectives.rank()])
    held = tuple(local(parameter).shape)
    if held != tuple(stop - start for start, stop in box):
        reason = f"this rank holds {held}, torch's rule of splitting gives {box}"
        raise _unsupported(fqn, parameter, reason)
    return layout


class BlockView:
    """Finds the block of a matrix in local tensors of its parameter, without copying.

    box: what a local tensor holds of the parameter.
    """

    def __init__(self, cut: Cut, box: Box) -> None:
        block, held = cut.block(box), cut.held(box)
        self._cut = cut
        self._index = None if cut.expert is None else cut.expert - box[0][0]
        self._rows: slice | None = None
        self._cols: slice | None = None  # all
        if held is not None and block.numel:
            first = cut.part_rows[0] + block.row_start - held[0][0]
            self._rows = slice(first, first + block.rows)
            if cut.columns is not None:
                first = cut.part_cols[0] + block.col_start - held[1][0]
                self._cols = slice(first, first + block.cols)
        # Most parameters are one matrix, and their local tensor is the block.
        plain = not (cut.flatten or cut.transposed or cut.columns) and self._index is None
        self._whole = plain and held is not None and self._rows == slice(0, held[0][1] - held[0][0])

    def of(self, tensor: Tensor) -> Tensor:
        """[block rows, block cols], sharing memory; [0, 0] if nothing of the matrix is here."""
        if self._whole:
            return tensor
        if self._rows is None:
            return tensor.new_empty(0, 0)
        if self._cut.flatten:
            tensor = tensor.view(tensor.size(0), -1)
        if self._index is not None:
            tensor = tensor[self._index]
        if self._cut.transposed:
            tensor = tensor.mT
        return tensor[self._rows] if self._cols is None else tensor[self._rows, self._cols]

    def rows_of(self, tensor: Tensor) -> Tensor:
        """[block rows, 1] of a local tensor with an element for every row, sharing memory.

        [block rows, 0] where the elements of the block's rows are elsewhere.
        """
        if self._rows is None:
            return tensor.new_empty(0, 0)
        if self._cut.flatten:
            tensor = tensor.flatten(1)
        if self._index is not None:
            tensor = tensor[self._index]
        return (tensor.mT if self._cut.transposed else tensor)[self._rows]


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

    A gradient that every rank holds whole is cut as its parameter is: tensor-parallel embeddings
    have such. Raises ValueError if it is sparse or placed otherwise than the parameter: a Partial
    one is still a local sum, and orthogonalizing it would give another update on every rank.
    """
    gradient = parameter.grad
    if gradient is None:
        return None
    if gradient.is_sparse:
        raise ValueError(f"{fqn}: sparse gradients are not supported")
    if isinstance(parameter, DTensor) and isinstance(gradient, DTensor):
        if gradient._spec is parameter._spec:  # FSDP2 gives both the same
            return local(gradient)
        if all(map(Placement.is_replicate, gradient.placements)):
            return _own_part(fqn, parameter, gradient)
    elif isinstance(parameter, DTensor) or isinstance(gradient, DTensor):
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


def _own_part(fqn: str, parameter: DTensor, gradient: DTensor) -> Tensor:
    """What this rank holds of `parameter`, out of a gradient that it holds whole; a copy."""
    layout = layout_of(fqn, parameter, None)
    box = layout.box(parameter.shape, layout.mesh.coordinates[collectives.rank()])
    return local(gradient)[tuple(slice(*bounds) for bounds in box)].contiguous()


def _unsupported(fqn: str, parameter: DTensor, reason: str) -> ValueError:
    return ValueError(
        f"{fqn}: shape {tuple(parameter.shape)} with placements {parameter.placements} on mesh"
        f" {tuple(parameter.device_mesh.shape)}: {reason}"
    )

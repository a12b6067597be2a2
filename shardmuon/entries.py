"""From parameter groups to the records that planning and the exchange work on.

Owns the reading of groups: which parameters take part, under which names, on which mesh and
device, which matrices they are made of, and what the ranks of a mesh must agree on. Local and
without effects.
"""

from __future__ import annotations

import hashlib
import json
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardmuon.exchange.agreement import MeshPart
from shardmuon.exchange.blocks import (
    as_device_mesh,
    device_mesh_of,
    layout_of,
    local,
    planning_mesh,
)
from shardmuon.groups import (
    STRUCTURAL_KEYS,
    block_now,
    check_parameter,
    check_settings,
    clean_fqn,
    cuts_of,
    schedule_in,
)
from shardmuon.planning.cost import newton_schulz_flops
from shardmuon.planning.cut import Cut
from shardmuon.planning.layout import Mesh
from shardmuon.planning.matrix import AUTO, Matrix
from shardmuon.planning.plan import Plan
from shardmuon.rules import RULES

__all__ = [
    "Entry",
    "EntryList",
    "Group",
    "check_devices",
    "check_distinct",
    "compute_device",
    "list_entries",
    "matrices_of",
    "mesh_parts",
    "parameter_names",
    "structure_of",
]

Group = Mapping[str, Any]


class Entry(NamedTuple):
    """A trainable parameter with its name, group and mesh (None: this rank alone)."""

    fqn: str
    parameter: Tensor
    group: Group
    device_mesh: DeviceMesh | None
    mesh: Mesh


def parameter_names(groups: Sequence[Group]) -> list[list[str]]:
    """Name of each parameter of each group: its FQN, or `group.position` if it has none."""
    return [
        [clean_fqn(name) for name in group["param_names"]]
        if "param_names" in group
        else [f"{number}.{position}" for position in range(len(group["params"]))]
        for number, group in enumerate(groups)
    ]


class EntryList:
    """Trainable parameters of groups; the same list as long as nothing has changed in it."""

    def __init__(self, default_mesh: DeviceMesh | None) -> None:
        self._default_mesh = default_mesh
        self.clear()

    def clear(self) -> None:
        """Keep no parameter alive."""
        self._seen: tuple[list[object], list[Tensor]] = ([], [])
        self._entries: list[Entry] = []

    def of(self, groups: Sequence[Group]) -> list[Entry]:
        """As `list_entries`."""
        shared = [
            part for g in groups for part in (g, g["params"], g.get("param_names"), g.get("mesh"))
        ]
        trainable = [p for group in groups for p in group["params"] if p.requires_grad]
        if not (_are_same(self._seen[0], shared) and _are_same(self._seen[1], trainable)):
            self._entries = list_entries(groups, self._default_mesh)
            self._seen = shared, trainable
        return self._entries


def _are_same(some: Sequence[object], others: Sequence[object]) -> bool:
    """Whether both list the same objects."""
    return len(some) == len(others) and all(map(operator.is_, some, others))


def list_entries(groups: Sequence[Group], default_mesh: DeviceMesh | None) -> list[Entry]:
    """All trainable parameters, group by group.

    default_mesh: where plain tensors are replicated, unless their group has a `mesh`.

    Raises ValueError if a group has come to have another number of parameters than of names.
    """
    meshes: dict[DeviceMesh | None, Mesh] = {}
    entries = []
    for group, names in zip(groups, parameter_names(groups), strict=True):
        group_mesh = as_device_mesh(group.get("mesh")) or default_mesh
        if len(names) != len(group["params"]):
            raise ValueError(
                f"a group that begins with {names[0]} has {len(names)} names for"
                f" {len(group['params'])} parameters: they were replaced after the optimizer was"
                " built. DeepSpeed's ZeRO does that; its flat partitions hold no matrices for Muon"
            )
        for fqn, parameter in zip(names, group["params"], strict=True):
            if parameter.requires_grad:
                device_mesh = device_mesh_of(parameter, group_mesh)
                if device_mesh not in meshes:
                    meshes[device_mesh] = planning_mesh(device_mesh)
                mesh = meshes[device_mesh]
                entries.append(Entry(fqn, parameter, group, device_mesh, mesh))
    return entries


def matrices_of(entry: Entry) -> Iterator[Matrix]:
    """Matrices of a parameter; none under a rule for elements. ValueError if it cannot be taken."""
    check_parameter(entry.fqn, entry.parameter, entry.group)
    if entry.group["algorithm"] not in RULES:
        return
    rule = RULES[entry.group["algorithm"]]
    layout = layout_of(entry.fqn, entry.parameter, entry.device_mesh)
    dtype = _ns_dtype(entry)
    method = _method(entry, dtype)
    segments = schedule_in(entry.group).segments
    may_share = entry.group["ns_method"] in (AUTO, "gram")
    costed = "standard" if method == AUTO else method
    for suffix, cut in _cuts_now(entry):
        if cut.flatten and any(split.dim > 1 for split in layout.splits):
            raise ValueError(f"{entry.fqn}: flatten needs dims after the second unsharded")
        if cut.flatten and not local(entry.parameter).is_contiguous():
            raise ValueError(f"{entry.fqn}: flatten needs contiguous memory")
        yield Matrix(
            id=entry.fqn + suffix,
            cut=cut,
            layout=layout,
            wire_dtype=str(dtype).removeprefix("torch."),
            wire_bytes=dtype.itemsize,
            cost=newton_schulz_flops(cut.rows, cut.cols, segments, costed),
            settings=_settings(entry.group),
            row_state=rule.row_state is not None,
            row_stats=rule.row_stats,
            method=method,
            segments=segments,
            may_share=rule.shares and not cut.flatten and may_share,
        )


def _cuts_now(entry: Entry) -> Iterator[tuple[str, Cut]]:
    """The matrices of this step: those of the parameter, or blocks of them."""
    block = block_now(entry.group)
    for suffix, cut in cuts_of(entry.parameter, entry.group):
        if block is None:
            yield suffix, cut
        else:
            yield from ((suffix + number, tile) for number, tile in cut.tiles(*block))


def mesh_parts(plan: Plan | None, entries: Sequence[Entry]) -> tuple[MeshPart, ...]:
    """What each mesh has to agree on, small meshes first, the same order on all ranks.

    Without a plan, parts that agree with no other rank's. With one, raises ValueError if a mesh's
    parameters are on several devices.
    """
    if plan is not None:
        _check_devices(entries)
    by_mesh: dict[Mesh, dict[str, Entry]] = {}
    for entry in entries:
        by_mesh.setdefault(entry.mesh, {})[entry.fqn] = entry
    parts = []
    for mesh in sorted(by_mesh, key=lambda m: (len(m.ranks), m.ranks, m.shape)):
        fqns = tuple(sorted(by_mesh[mesh]))
        text = json.dumps([plan.digest_of((mesh,)) if plan else None, fqns])
        digest = hashlib.sha256(text.encode()).hexdigest()
        first = by_mesh[mesh][fqns[0]]
        axes = [axis for axis, size in enumerate(mesh.shape) if size > 1]
        groups = [first.device_mesh.get_group(a) for a in axes] if first.device_mesh else []
        held = {fqn: local(entry.parameter) for fqn, entry in by_mesh[mesh].items()}
        parts.append(
            MeshPart(
                mesh,
                fqns,
                digest,
                tuple(groups),
                compute_device(first),
                empty=frozenset(fqn for fqn, tensor in held.items() if not tensor.numel()),
                on_gpu=all(tensor.is_cuda for tensor in held.values()),
            )
        )
    return tuple(parts)


def compute_device(entry: Entry) -> torch.device:
    """Where matrices are exchanged and orthogonalized: on the mesh's device, even if offloaded."""
    device = local(entry.parameter).device
    mesh = entry.device_mesh
    if mesh is not None and mesh.device_type == "cuda" and device.type != "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return device


def check_devices(groups: Sequence[Group], default_mesh: DeviceMesh | None) -> None:
    """ValueError, with two names, if trainable parameters of one mesh are on several devices."""
    _check_devices(list_entries(groups, default_mesh))


def _check_devices(entries: Sequence[Entry]) -> None:
    """One header and one answer serve all parameters of a mesh, on one device."""
    first: dict[Mesh, tuple[str, torch.device]] = {}
    for entry in entries:
        device = compute_device(entry)
        name, other = first.setdefault(entry.mesh, (entry.fqn, device))
        if device != other:
            raise ValueError(
                f"{name} is on {other} and {entry.fqn} on {device}; parameters of one mesh, or of"
                " one process without a mesh, must be on one device: use an optimizer for each"
            )


def check_distinct(entries: Sequence[Entry]) -> None:
    """ValueError, with two names, if one tensor has come into two places of the groups.

    Constructors refuse that; it can only come from someone who wrote into the groups since.
    """
    names: dict[Tensor, str] = {}
    for entry in entries:
        if entry.parameter in names:
            raise ValueError(
                f"{names[entry.parameter]} and {entry.fqn} are now the same tensor: the parameters"
                " were replaced after the optimizer was built, and mixed up. accelerate does that"
                " to a model that was sharded before accelerator.prepare(), where a rank holds"
                " nothing of several parameters: let prepare() shard the model, or keep the"
                " optimizer out of prepare() and build it after fully_shard"
            )
        names[entry.parameter] = entry.fqn


def structure_of(group: Group) -> tuple[str, str]:
    """Text of what in a group a plan depends on: settings of the work, and cuts.

    Every step asks for it, so it is also where settings that anyone may have changed since are
    looked at: the ranks are told of a ValueError here before they exchange anything.
    """
    check_settings(group, wait=False)
    cuts = [group.get(key) for key in STRUCTURAL_KEYS]
    return _settings(group), str([*cuts, block_now(group)])


def _ns_dtype(entry: Entry) -> torch.dtype:
    """Dtype of Newton-Schulz and of the wire; bf16 products are very slow on most CPUs."""
    chosen: torch.dtype | None = entry.group["ns_dtype"]
    if chosen is not None:
        return chosen
    return torch.bfloat16 if compute_device(entry).type == "cuda" else torch.float32


def _method(entry: Entry, dtype: torch.dtype) -> str:
    """The group's method.

    "auto" is "standard" on a CPU, whose bits then depend on no measurement, and where float32 is
    asked for, because the other methods iterate in float16 on a GPU.
    """
    method: str = entry.group["ns_method"]
    settled = dtype == torch.float32 or compute_device(entry).type == "cpu"
    return "standard" if method == AUTO and settled else method


def _settings(group: Group) -> str:
    """Canonical text of what shapes the plan and the wire; lr and the like may change freely."""
    rule = RULES.get(group["algorithm"])
    keys = ("algorithm", *(rule.owner_keys if rule else ()))
    return json.dumps([str(group.get(key)) for key in keys])

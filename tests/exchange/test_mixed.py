"""Several kinds of parameter in one optimizer: meshes, dtypes, ties, groups that change.

Each gives what it gives alone, and what cannot work is refused by name.
"""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.utils._pytree import tree_map_only

import shardmuon
from tests import ranks
from tests.conftest import Worlds
from tests.grids import PLAIN, mesh_of, placed, random
from tests.problems import assert_ranks_agree, digest, local, whole, world_mesh

RUNTIME = shardmuon.Runtime(deterministic=True)
Place = tuple[tuple[int, ...], str, DeviceMesh]


def train(
    places: dict[str, Place], keys: dict[str, dict[str, Any]] | None = None, steps: int = 3
) -> tuple[dict[str, str], shardmuon.Muon]:
    """Hash of each weight and its state after some steps; values depend on names' order alone."""
    params = {
        name: nn.Parameter(placed(random(shape, i), letters, mesh))
        for i, (name, (shape, letters, mesh)) in enumerate(sorted(places.items()))
    }
    groups = [{"params": [(name, p)], **(keys or {}).get(name, {})} for name, p in params.items()]
    optimizer = shardmuon.Muon(groups, lr=0.02, runtime=RUNTIME)
    for step in range(steps):
        for i, (name, (shape, letters, mesh)) in enumerate(sorted(places.items())):
            params[name].grad = placed(random(shape, 1000 + 100 * step + i), letters, mesh)
        optimizer.step()
    hashes = {}
    for name, p in params.items():
        state = optimizer.state[p]
        hashes[name] = digest([whole(t) for t in (p, *(state[k] for k in sorted(state)))])
    return hashes, optimizer


# -- several meshes -------------------------------------------------------------------------------

Where = dict[str, tuple[tuple[int, ...], str]]
DENSE: Where = {"dense.a": ((10, 8), "0"), "dense.b": ((33, 17), "1"), "dense.c": ((5, 7), "R")}
STACKS: Where = {"experts.up": ((4, 6, 10), "0"), "experts.down": ((3, 10, 6), "1")}


def _dense_and_experts(
    named_by_half: bool,
) -> tuple[dict[str, str], dict[str, int], int, list[int]]:
    """Dense weights on all four ranks; experts on each half of them, under names of their own."""
    inner, everyone = mesh_of((2, 2))["b"], world_mesh()
    half = dist.get_rank() // 2
    prefix = f"half{half}." if named_by_half else ""
    places: dict[str, Place] = {name: (*where, everyone) for name, where in DENSE.items()}
    places |= {f"zz.{prefix}{name}": (*where, inner) for name, where in STACKS.items()}
    hashes, optimizer = train(places)
    members = [int(rank) for rank in inner.mesh.tolist()]
    short = {name.replace(prefix, ""): hashed for name, hashed in hashes.items()}
    return (
        short,
        dict(optimizer.plan.owners()),
        optimizer.stats.matrices_orthogonalized,
        members,
    )


def _same_on_one_rank() -> dict[str, str]:
    mesh = world_mesh()
    places: dict[str, Place] = {name: (*where, mesh) for name, where in DENSE.items()}
    places |= {f"zz.{name}": (*where, mesh) for name, where in STACKS.items()}
    return train(places)[0]


@pytest.mark.parametrize("named_by_half", [False, True])
@pytest.mark.supports("several meshes in one optimizer")
def test_dense_on_all_ranks_and_experts_on_halves(pools: Worlds, named_by_half: bool) -> None:
    (right,) = pools.run(1, _same_on_one_rank)
    answers = pools.run(4, _dense_and_experts, named_by_half)
    for hashes, owners, _, members in answers:
        assert hashes == right
        dense = {name: owner for name, owner in owners.items() if name.startswith("dense")}
        assert dense == {n: o for n, o in answers[0][1].items() if n.startswith("dense")}
        assert all(owner in members for name, owner in owners.items() if name not in dense)
        assert len(owners) == 3 + 4 + 3
    assert sum(count for _, _, count, _ in answers) == 3 + 2 * (4 + 3)


def _views_of_one_mesh() -> dict[str, str]:
    """Weights on a mesh of two axes, on each axis alone and on the flattened mesh."""
    mesh = init_device_mesh(ranks.device().type, (2, 2), mesh_dim_names=("x", "y"))
    flat = mesh._flatten("xy")
    places: dict[str, Place] = {
        "a": ((10, 8), "R0", mesh),
        "b": ((18, 48), "01", mesh),
        "c": ((5, 7), "0", flat),
        "d": ((4, 6, 5), "0", flat),
        "e": ((9, 4), "1", mesh["x"]),
        "f": ((3, 6, 5), "2", mesh["y"]),
        "g": ((7, 7), "R", flat),
    }
    hashes, optimizer = train(places)
    rank = dist.get_rank()
    assert optimizer.stats.bytes_sent == optimizer.plan.bytes_sent().get(rank, 0)
    assert optimizer.stats.bytes_received == optimizer.plan.bytes_received().get(rank, 0)
    return hashes


def _views_of_one_rank() -> dict[str, str]:
    mesh = world_mesh()
    shapes = [(10, 8), (18, 48), (5, 7), (4, 6, 5), (9, 4), (3, 6, 5), (7, 7)]
    return train({n: (s, "R", mesh) for n, s in zip("abcdefg", shapes, strict=True)})[0]


@pytest.mark.supports("flattened meshes and sub-meshes")
def test_flattened_and_partial_views_of_one_mesh(pools: Worlds) -> None:
    (right,) = pools.run(1, _views_of_one_rank)
    assert pools.run(4, _views_of_one_mesh) == [right] * 4


def _rebuilt(turns: int) -> set[str]:
    """FSDP, HSDP and both dims, meshes and optimizers made and dropped in turn."""
    hashes = set()
    layouts = [((4,), "0"), ((2, 2), "R0"), ((2, 2), "01"), ((4,), "1")]
    for turn in range(turns):
        shape, letters = layouts[turn % len(layouts)]
        names = ("a", "b")[: len(shape)]
        mesh = init_device_mesh(ranks.device().type, shape, mesh_dim_names=names)
        result, optimizer = train({"w": ((10, 8), letters, mesh)}, steps=1)
        hashes.add(result["w"])
        del mesh, optimizer
        gc.collect()
    return hashes


def test_meshes_rebuilt_with_other_layouts(pools: Worlds) -> None:
    first, *others = pools.run(4, _rebuilt, 16)
    assert len(first) == 1
    assert all(hashes == first for hashes in others)


def _mixed_group() -> str:
    """Plain tensors and DTensors of two dtypes in one group of each kind."""
    mesh = world_mesh()
    letters = [PLAIN, "0", "1", "R", PLAIN, "0"]
    shapes = [(10, 8), (5, 7), (4, 6, 5), (7, 3), (2, 5, 5), (18, 4)]
    dtypes = [torch.float32, torch.bfloat16] * 3
    groups: list[dict[str, Any]] = []
    kinds: list[tuple[nn.Parameter, str]] = []
    for algorithm in ("muon", "adamw"):
        params = [
            nn.Parameter(placed(random(shape, i).to(dtype), letter, mesh))
            for i, (letter, shape, dtype) in enumerate(zip(letters, shapes, dtypes, strict=True))
        ]
        named = [(f"{algorithm}{i}", p) for i, p in enumerate(params)]
        groups.append({"params": named, "algorithm": algorithm, "lr": 0.02})
        kinds += list(zip(params, letters, strict=True))
    optimizer = shardmuon.Muon(groups, mesh=mesh, ns_dtype=torch.float32, runtime=RUNTIME)
    for step in range(3):
        for i, (p, letter) in enumerate(kinds):
            p.grad = placed(random(tuple(p.shape), 100 * step + i).to(p.dtype), letter, mesh)
        optimizer.step()
    values = [p for p, _ in kinds]
    state = [optimizer.state[p][key] for p in values for key in sorted(optimizer.state[p])]
    return digest(assert_ranks_agree([*values, *state]))


@pytest.mark.parametrize("world", [2, 3, 4])
def test_plain_tensors_and_dtensors_of_two_dtypes_in_one_group(pools: Worlds, world: int) -> None:
    (right,) = pools.run(1, _mixed_group)
    assert set(pools.run(world, _mixed_group)) == {right}


# -- refusals -------------------------------------------------------------------------------------


def _partial_gradient(shape: tuple[int, ...], letters: str) -> None:
    mesh = mesh_of((2, 2))
    p = nn.Parameter(placed(random(shape, 0), letters, mesh))
    optimizer = shardmuon.Muon([("net.weight", p)], runtime=RUNTIME)
    before = digest([local(p)])
    placements = [Partial() if x == "R" else Shard(int(x)) for x in letters]
    p.grad = DTensor.from_local(
        local(p).clone(), mesh, placements, run_check=False, shape=p.shape, stride=p.stride()
    )
    try:
        optimizer.step()
    finally:
        assert digest([local(p)]) == before


@pytest.mark.parametrize("shape", [(10, 8), (4, 6, 5)])
@pytest.mark.parametrize("letters", ["R0", "1R", "RR"])
def test_partial_gradients_are_refused_by_name(
    pools: Worlds, shape: tuple[int, ...], letters: str
) -> None:
    errors = pools.run_expecting_error(4, _partial_gradient, shape, letters)
    assert {e.type_name for e in errors} <= {"ValueError", "RuntimeError"}
    for error in errors:
        assert "net.weight" in error.message
        assert "Partial" in error.message or "placements" in error.message


class Odd(Tensor):
    """A subclass that does nothing but be one."""


class Wrapped(Tensor):
    """A subclass around another tensor, as quantized parameters are."""

    held: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapped:
        made: Wrapped = Tensor._make_wrapper_subclass(
            cls, inner.shape, dtype=inner.dtype, device=inner.device
        )
        made.held = inner
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args, kwargs = tree_map_only(Wrapped, lambda tensor: tensor.held, (args, kwargs or {}))
        return tree_map_only(Tensor, Wrapped, func(*args, **kwargs))


def _subclass(kind: str) -> None:
    value = torch.ones(6, 4, device=ranks.device())
    if kind == "odd":
        p = nn.Parameter(value.as_subclass(Odd))
    elif kind == "wrapped":
        p = nn.Parameter(Wrapped(value))
    else:
        local_part = Wrapped(value)
        p = nn.Parameter(DTensor.from_local(local_part, world_mesh(), [Shard(0)], run_check=False))
    optimizer = shardmuon.Muon([("net.weight", p)], mesh=world_mesh())
    print(optimizer.plan.report())


@pytest.mark.parametrize("kind", ["odd", "wrapped", "local"])
def test_local_tensors_of_a_subclass_are_refused_by_name(pools: Worlds, kind: str) -> None:
    for error in pools.run_expecting_error(2, _subclass, kind):
        assert error.type_name == "ValueError"
        assert "net.weight" in error.message
        assert ("Odd" if kind == "odd" else "Wrapped") in error.message

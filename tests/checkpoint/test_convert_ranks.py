"""Conversion of sharded state: each rank converts what it holds."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

import shardmuon
from shardmuon.checkpoint.convert import from_torch, to_torch
from tests import models, ranks
from tests.checkpoint.torch_pair import (
    MUON_KEYS,
    bits,
    everything,
    filled,
    forms,
    ours,
    tensors,
    theirs,
    train,
)
from tests.conftest import Worlds
from tests.problems import assert_ranks_agree, digest, local, place, whole, world_mesh


def shard(model: nn.Module) -> nn.Module:
    """A copy of `model` under FSDP2."""
    twin: Any = copy.deepcopy(model)
    for block in twin.blocks:
        fully_shard(block, mesh=world_mesh())
    fully_shard(twin, mesh=world_mesh())
    return twin  # type: ignore[no-any-return]


def _full_states(form: str) -> list[bool]:
    """Whole states of one process go to sharded and to whole parameters, then both continue."""
    model = models.make().to(ranks.device())
    pair = theirs(model, named=form != "unnamed")
    train(model, pair, range(3))
    states = forms(model, pair, form)
    sharded, twin = shard(model), copy.deepcopy(model)
    optimizer, alone = filled(sharded), filled(twin, mesh=world_mesh())
    from_torch(sharded, optimizer, *states)
    from_torch(twin, alone, *states)
    pieces, right = tensors(sharded, optimizer), tensors(model, *pair)
    kept = [digest(assert_ranks_agree(pieces)) == digest([whole(t) for t in right])]
    kept.append(any(local(piece).numel() not in (0, piece.numel()) for piece in pieces))
    train(sharded, [optimizer], range(3, 6))
    train(twin, [alone], range(3, 6))
    continued = digest(assert_ranks_agree(tensors(sharded, optimizer)))
    kept.append(continued == digest([whole(t) for t in tensors(twin, alone)]))
    if ranks.backend() == "gloo":
        train(model, pair, range(3, 6))
        kept.append(continued == digest([whole(t) for t in tensors(model, *pair)]))
    return kept


@pytest.mark.parametrize("form", ["named", "unnamed", "flat both"])
def test_whole_states_load_into_sharded_parameters(pools: Worlds, form: str) -> None:
    for kept in pools.run(2, _full_states, form):
        assert all(kept), kept


def _sharded_states() -> list[bool]:
    """Ours to torch's optimizers over the same DTensors, and from there in every form to ours."""
    model = shard(models.make().to(ranks.device()))
    optimizer = ours(model, **MUON_KEYS)
    train(model, [optimizer], range(2))
    right = bits(model, optimizer)
    states = to_torch(model, optimizer)
    kept = []
    pair = theirs(model)
    for state, each in zip(states, pair, strict=True):
        assert state is not None
        moments = [v for s in state["state"].values() for k, v in s.items() if k != "step"]
        kept.append(all(isinstance(value, DTensor) for value in moments))
        each.load_state_dict(state)
    kept.append(bits(model, *pair) == right)
    for form in ("named", "nested", "flat", "full nested", "full flat both"):
        fresh = filled(model)
        from_torch(model, fresh, *forms(model, pair, form))
        kept.append(bits(model, fresh) == right)
    return kept


def test_sharded_states_go_to_torch_and_return(pools: Worlds) -> None:
    for kept in pools.run(2, _sharded_states):
        assert all(kept), kept


def _one_rank_alone() -> list[bool]:
    """Rank 1 converts to and fro, after a forward pass, while rank 0 does not; then both step."""
    model = shard(models.make().to(ranks.device()))
    optimizer = ours(model)
    train(model, [optimizer], range(1))
    with torch.no_grad():
        model(torch.zeros(1, 2, dtype=torch.long, device=ranks.device()))
    before = digest([local(v) for s in optimizer.state.values() for v in s.values()])
    if dist.get_rank() == 1:
        from_torch(model, optimizer, *to_torch(model, optimizer))
    after = digest([local(v) for s in optimizer.state.values() for v in s.values()])
    dist.barrier()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    train(model, [optimizer], range(1, 2))
    return [before == after]


def test_conversions_need_no_other_rank(pools: Worlds) -> None:
    for kept in pools.run(2, _one_rank_alone):
        assert all(kept), kept


SHAPES: dict[str, tuple[tuple[int, ...], Any]] = {
    "uneven rows": ((5, 4), Shard(0)),
    "columns": ((4, 7), Shard(1)),
    "one row": ((1, 6), Shard(0)),
    "replicated": ((3, 4), Replicate()),
    "vector": ((3,), Shard(0)),
    "short vector": ((1,), Shard(0)),
    "scalar": ((), Replicate()),
    "middle of a cube": ((2, 5, 3), Shard(1)),
    "end of a kernel": ((2, 2, 3, 3), Shard(-1)),
}


def _parts_of_whole_tensors() -> dict[str, bool]:
    """AdamW state of every shape and placement, as parts of whole tensors."""
    generator = torch.Generator().manual_seed(0)
    values = {name: torch.randn(shape, generator=generator) for name, (shape, _) in SHAPES.items()}
    whole_ones = nn.ParameterDict({name: nn.Parameter(v) for name, v in values.items()})
    adamw = torch.optim.AdamW(whole_ones.named_parameters())
    model = nn.ParameterDict()
    for name, (shape, placement) in SHAPES.items():
        adamw.state[whole_ones[name]] = {
            "step": torch.tensor(4.0),
            "exp_avg": values[name],
            "exp_avg_sq": -values[name],
        }
        model[name] = nn.Parameter(place(torch.zeros(shape), world_mesh(), placement))
    optimizer = shardmuon.Muon([{"params": list(model.named_parameters()), "algorithm": "adamw"}])
    from_torch(model, optimizer, adamw_state=adamw.state_dict())
    kept = {}
    for name, value in values.items():
        state = optimizer.state[model[name]]
        loaded = [whole(state[key]) for key in ("step", "exp_avg", "exp_avg_sq")]
        kept[name] = digest(loaded) == digest([torch.tensor(4.0), value, -value])
    return kept


def test_each_rank_takes_its_part_of_whole_tensors(pools: Worlds) -> None:
    for kept in pools.run(2, _parts_of_whole_tensors):
        assert all(kept.values()), kept


def _misplaced() -> tuple[list[str], bool]:
    """States that are placed otherwise than the parameter."""
    mesh = world_mesh()
    weights = {"rows": place(torch.ones(4, 4), mesh, Shard(0)), "plain": torch.ones(4, 4)}
    model = nn.ParameterDict({name: nn.Parameter(w) for name, w in weights.items()})
    optimizer = shardmuon.Muon(model.named_parameters())
    before = everything(model, optimizer)
    messages = []
    for name, placement in (("rows", Shard(1)), ("rows", Replicate()), ("plain", Shard(0))):
        twin = torch.optim.Muon(model.named_parameters())
        for each, p in model.named_parameters():
            value = place(torch.ones(4, 4), mesh, placement) if each == name else torch.ones(4, 4)
            twin.state[p] = {"momentum_buffer": value}
        try:
            from_torch(model, optimizer, twin.state_dict())
        except ValueError as error:
            messages.append(str(error))
    return messages, everything(model, optimizer) == before


def test_state_that_is_placed_otherwise_is_refused(pools: Worlds) -> None:
    for messages, same in pools.run(2, _misplaced):
        assert same
        assert [m.split(" is placed as")[0] for m in messages] == [
            "muon_state: rows momentum_buffer",
            "muon_state: rows momentum_buffer",
            "muon_state: plain momentum_buffer",
        ]
        assert "Shard(dim=1)" in messages[0]
        assert messages[2].endswith("the parameter as a plain tensor")

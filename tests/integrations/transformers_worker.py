"""Cases of models of transformers: under fully_shard, DDP, and its own sharding; see jobs.py."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers.distributed import DistributedConfig

from shardmuon import Muon, param_groups
from shardmuon.checkpoint import Checkpointer
from tests.integrations import families
from tests.integrations.jobs import serve
from tests.integrations.pieces import (
    equal,
    groups_of,
    reference_step,
    run_page,
    same_bits,
    state_of,
    tiny_llama,
    whole,
)

SHARDED = ("llama", "qwen3", "qwen3_moe", "gpt2", "vit", "gpt_oss")


SPLIT = {"tp_size": 2, "tp_plan": "auto"}
"""DistributedConfig's arguments for tensor parallelism."""


def steps_like_one_process(
    model: Any, twin: nn.Module, family: str, data_rank: int, mesh: Any = None
) -> dict[str, Any]:
    """Two steps on `model` and, with its gradients, on the whole `twin` in this process alone."""
    optimizer, reference = Muon(groups_of(model), mesh=mesh), Muon(groups_of(twin))
    done = 0
    exact = []
    for step in range(2):
        model(**families.batch(family, seed=10 * step + data_rank)).loss.backward()
        reference_step(twin, reference, model)
        optimizer.step()
        optimizer.zero_grad()
        done += optimizer.stats.matrices_orthogonalized
        same = equal(whole(model.named_parameters()), whole(twin.named_parameters()))
        exact.append(same and equal(state_of(optimizer), state_of(reference)))
    plan = optimizer.plan
    return {
        "exact": exact,
        "moved": not equal(whole(twin.named_parameters()), whole(initial(family))),
        "each once": len(plan.owners()) == len(reference.plan.owners()),
        "owners": len(set(plan.owners().values())),
        "mine": done > 0,
    }


def initial(family: str) -> Any:
    return families.build(family).named_parameters()


def under_fully_shard(folder: Path) -> dict[str, Any]:
    """Six families: routed as the whole model is, and stepped as one process steps."""
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    got = {}
    for family in SHARDED:
        model = families.shard(families.build(family), mesh)
        twin = families.build(family)
        found = {"routed": families.rows(model) == families.rows(twin)}
        found["sharded"] = all(isinstance(p, DTensor) for p in model.parameters())
        got[family] = found | steps_like_one_process(model, twin, family, dist.get_rank())
    return got


def ddp(folder: Path) -> dict[str, Any]:
    """Ranks share the matrices; names have no prefix; state is local."""
    twin = tiny_llama()
    model = DistributedDataParallel(tiny_llama())
    optimizer, reference = Muon(groups_of(model), mesh=dist.group.WORLD), Muon(groups_of(twin))
    exact = []
    for step in range(2):
        tokens = families.batch("llama", seed=step + 5 * dist.get_rank())["input_ids"] % 64
        model(input_ids=tokens, labels=tokens).loss.backward()
        reference_step(twin, reference, model)
        optimizer.step()
        optimizer.zero_grad()
        exact.append(equal(whole(model.named_parameters()), whole(twin.named_parameters())))
    file = folder / "rank0.pt"
    if dist.get_rank() == 0:  # alone, as many trainers save
        torch.save([model.state_dict(), optimizer.state_dict()], file)
    dist.barrier()
    resumed = DistributedDataParallel(tiny_llama(seed=1))
    other = Muon(groups_of(resumed), mesh=dist.group.WORLD)
    weights, state = torch.load(file)
    resumed.load_state_dict(weights)
    other.load_state_dict(state)
    before = whole(model.named_parameters()), state_of(optimizer)
    got: Any = get_optimizer_state_dict(model, optimizer)["state"]
    names = got.keys()
    return {
        "exact": exact,
        "resumed": same_bits(resumed, other, before),
        "owners": sorted(set(optimizer.plan.owners().values())),
        "names": sorted(names)[0],
        "plain names": not any("module" in name for name in (*names, *optimizer.plan.owners())),
    }


def distributed(folder: Path, family: str, **sizes: Any) -> Any:
    """A model that `from_pretrained` has sharded, from files of its own."""
    # FSDP2 says so of a tensor-parallel embedding of transformers.
    warnings.filterwarnings("ignore", message=".*returned a view tensor")
    source = folder / family
    twin: Any = families.build(family)
    if dist.get_rank() == 0:
        twin.save_pretrained(source)
    dist.barrier()
    return type(twin).from_pretrained(source, distributed_config=DistributedConfig(**sizes))


def sharded_by_transformers(
    folder: Path, family: str, mesh: Any = None, **sizes: Any
) -> dict[str, Any]:
    """Such a model is routed as the whole one, and stepped as one process steps."""
    model, twin = distributed(folder, family, **sizes), families.build(family)
    found = {"routed": families.rows(model) == families.rows(twin)}
    kinds = {
        str(tuple(p.placements)) if isinstance(p, DTensor) else "plain" for p in model.parameters()
    }
    # Ranks of a tensor-parallel group take the same data; here all do then.
    data_rank = 0 if "tp_size" in sizes else dist.get_rank()
    stepped = steps_like_one_process(model, twin, family, data_rank, mesh)
    return found | stepped | {"placements": sorted(kinds)}


def fsdp(folder: Path) -> dict[str, Any]:
    """All six under its `fsdp_size`."""
    return {
        family: sharded_by_transformers(folder, family, fsdp_size=dist.get_world_size())
        for family in SHARDED
    }


def tp(folder: Path) -> dict[str, Any]:
    """Tensor parallelism alone: plain norms beside DTensors."""
    return sharded_by_transformers(folder, "llama", **SPLIT)


def tp_and_fsdp(folder: Path) -> dict[str, Any]:
    """Both."""
    return sharded_by_transformers(folder, "llama", fsdp_size=2, **SPLIT)


def replicas(folder: Path) -> dict[str, Any]:
    """HSDP."""
    return sharded_by_transformers(folder, "qwen3", dp_replicate_size=2, fsdp_size=2)


def experts(folder: Path) -> dict[str, Any]:
    """Expert parallelism: experts on a second mesh."""
    return sharded_by_transformers(folder, "qwen3_moe", fsdp_size=4, ep_size=2)


def experts_on_an_axis_of_one(folder: Path) -> dict[str, Any]:
    """Expert parallelism over all ranks: the second mesh has an axis of size 1."""
    return sharded_by_transformers(folder, "qwen3_moe", fsdp_size=2, ep_size=2)


def tp_with_whole_experts(folder: Path) -> dict[str, Any]:
    """Tensor parallelism for the dense part only; each rank has experts of its own."""
    return sharded_by_transformers(folder, "qwen3_moe", ep_size=2, **SPLIT)


def tp_and_fsdp_with_whole_experts(folder: Path) -> dict[str, Any]:
    """The same under FSDP2."""
    return sharded_by_transformers(folder, "qwen3_moe", fsdp_size=2, ep_size=2, **SPLIT)


def tp_with_plain_matrices(folder: Path) -> dict[str, Any]:
    """A plan that leaves all matrices plain: `mesh=` lets the ranks share them."""
    return sharded_by_transformers(folder, "gpt_oss", mesh=dist.group.WORLD, **SPLIT)


def tp_of_packed_experts(folder: Path) -> dict[str, Any]:
    """Gate and up, cut each for itself, are no block of rows: refused, and taken by AdamW."""
    model, twin = distributed(folder, "qwen3_moe", **SPLIT), families.build("qwen3_moe")
    model(**families.batch("qwen3_moe")).loss.backward()
    before = whole(model.named_parameters())
    error = ""
    try:
        Muon(groups_of(model)).step()
    except ValueError as refusal:
        error = str(refusal)
    unchanged = equal(whole(model.named_parameters()), before)
    pattern = ["*.gate_up_proj"]
    optimizer = Muon(param_groups(model, to_adamw=pattern))
    reference = Muon(param_groups(twin, to_adamw=pattern))
    reference_step(twin, reference, model)
    optimizer.step()
    same = equal(whole(model.named_parameters()), whole(twin.named_parameters()))
    return {"error": error, "unchanged": unchanged, "exact": same}


def checkpoint_in_another_layout(folder: Path) -> dict[str, bool]:
    """What FSDP2 has saved, tensor parallelism loads, to the bit."""
    model = distributed(folder, "llama", fsdp_size=2)
    optimizer, checkpoints = Muon(groups_of(model)), Checkpointer(folder / "saved")
    model(**families.batch("llama")).loss.backward()
    optimizer.step()
    path = checkpoints.save(1, model, optimizer)
    saved = whole(model.named_parameters()), state_of(optimizer)
    moved = distributed(folder, "llama", **SPLIT)
    resumed = Muon(groups_of(moved))
    fresh = same_bits(moved, resumed, saved)
    checkpoints.load(path, moved, resumed)
    return {"fresh": fresh, "loaded": same_bits(moved, resumed, saved)}


def ddp_page(folder: Path) -> int:
    """The examples of docs/integrations/ddp.md; the page makes the process group."""
    return run_page("ddp.md", folder)


def page(folder: Path) -> int:
    """The examples of docs/integrations/transformers.md."""
    return run_page("transformers.md", folder)


if __name__ == "__main__":
    torch.set_num_threads(1)
    if os.environ["WORLD_SIZE"] == "2":
        both = [ddp_page, under_fully_shard, ddp, page]
        split = [tp, tp_with_whole_experts, tp_with_plain_matrices, tp_of_packed_experts]
        serve([*both, fsdp, *split, experts_on_an_axis_of_one, checkpoint_in_another_layout])
    else:
        dist.init_process_group("gloo")
        serve([tp_and_fsdp, replicas, experts, tp_and_fsdp_with_whole_experts])
    dist.destroy_process_group()

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

from shardmuon import Muon
from tests.integrations import families
from tests.integrations.jobs import serve
from tests.integrations.pieces import (
    equal,
    groups_of,
    reference_step,
    run_page,
    state_of,
    tiny_llama,
    whole,
)

SHARDED = ("llama", "qwen3", "qwen3_moe", "gpt2", "vit", "gpt_oss")


def steps_like_one_process(
    model: Any, twin: nn.Module, family: str, data_rank: int
) -> dict[str, Any]:
    """Two steps on `model` and, with its gradients, on the whole `twin` in this process alone."""
    optimizer, reference = Muon(groups_of(model)), Muon(groups_of(twin))
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
    if dist.get_rank() == 0:
        optimizer.state_dict()  # alone
    got: Any = get_optimizer_state_dict(model, optimizer)["state"]
    names = got.keys()
    return {
        "exact": exact,
        "owners": sorted(set(optimizer.plan.owners().values())),
        "names": sorted(names)[0],
        "plain names": not any("module" in name for name in (*names, *optimizer.plan.owners())),
    }


def sharded_by_transformers(folder: Path, family: str, **sizes: Any) -> dict[str, Any]:
    """A model that `from_pretrained` has sharded, from files of its own."""
    # FSDP2 says so of a tensor-parallel embedding of transformers.
    warnings.filterwarnings("ignore", message=".*returned a view tensor")
    source = folder / family
    twin = families.build(family)
    if dist.get_rank() == 0:
        twin.save_pretrained(source)  # type: ignore[operator]
    dist.barrier()
    model = type(twin).from_pretrained(  # type: ignore[attr-defined]
        source, distributed_config=DistributedConfig(**sizes)
    )
    found = {"routed": families.rows(model) == families.rows(twin)}
    kinds = {
        str(tuple(p.placements)) if isinstance(p, DTensor) else "plain" for p in model.parameters()
    }
    # Ranks of a tensor-parallel group take the same data; here all do then.
    data_rank = 0 if "tp_size" in sizes else dist.get_rank()
    stepped = steps_like_one_process(model, twin, family, data_rank)
    return found | stepped | {"placements": sorted(kinds)}


def fsdp(folder: Path) -> dict[str, Any]:
    """All six under its `fsdp_size`."""
    return {
        family: sharded_by_transformers(folder, family, fsdp_size=dist.get_world_size())
        for family in SHARDED
    }


def tp(folder: Path) -> dict[str, Any]:
    """Tensor parallelism alone: plain norms beside DTensors."""
    return sharded_by_transformers(folder, "llama", tp_size=2, tp_plan="auto")


def tp_and_fsdp(folder: Path) -> dict[str, Any]:
    """Both."""
    return sharded_by_transformers(folder, "llama", tp_size=2, tp_plan="auto", fsdp_size=2)


def replicas(folder: Path) -> dict[str, Any]:
    """HSDP."""
    return sharded_by_transformers(folder, "qwen3", dp_replicate_size=2, fsdp_size=2)


def experts(folder: Path) -> dict[str, Any]:
    """Expert parallelism: experts on a second mesh."""
    return sharded_by_transformers(folder, "qwen3_moe", fsdp_size=4, ep_size=2)


def experts_on_an_axis_of_one(folder: Path) -> dict[str, Any]:
    """Expert parallelism over all ranks: the second mesh has an axis of size 1."""
    return sharded_by_transformers(folder, "qwen3_moe", fsdp_size=2, ep_size=2)


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
        serve([*both, fsdp, tp, experts_on_an_axis_of_one])
    else:
        dist.init_process_group("gloo")
        serve([tp_and_fsdp, replicas, experts])
    dist.destroy_process_group()

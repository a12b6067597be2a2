"""Models of transformers are stepped as in one process, however they are sharded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from shardmuon import Muon, param_groups
from tests.integrations import families
from tests.integrations.jobs import Job, run
from tests.integrations.transformers_worker import SHARDED

WORKER = "tests.integrations.transformers_worker"
RIGHT = {"exact": [True, True], "moved": True, "each once": True, "mine": True, "routed": True}


@pytest.fixture(scope="module")
def job() -> Job:
    return run(WORKER, 2)


@pytest.fixture(scope="module")
def job_of_four() -> Job:
    return run(WORKER, 4)


@pytest.mark.parametrize("family", SHARDED)
def test_fully_shard(job: Job, family: str) -> None:
    assert job.same("under_fully_shard")[family] == {**RIGHT, "owners": 2, "sharded": True}


@pytest.mark.parametrize("family", SHARDED)
def test_fsdp_of_transformers(job: Job, family: str) -> None:
    assert job.same("fsdp")[family] == {**RIGHT, "owners": 2, "placements": ["(Shard(dim=0),)"]}


def test_tensor_parallelism_of_transformers_with_plain_norms(job: Job) -> None:
    assert job.same("tp") == {
        **RIGHT,
        "owners": 2,
        "placements": ["(Shard(dim=0),)", "(Shard(dim=1),)", "plain"],
    }


def test_experts_on_a_mesh_with_an_axis_of_one(job: Job) -> None:
    got = job.same("experts_on_an_axis_of_one")
    assert len(got.pop("placements")) == 2
    assert got == {**RIGHT, "owners": 2}


def test_tensor_parallelism_of_transformers_with_whole_experts(job: Job) -> None:
    got = job.same("tp_with_whole_experts")
    assert got.pop("placements") == ["(Shard(dim=0),)", "(Shard(dim=1),)", "plain"]
    assert got == {**RIGHT, "owners": 2}


def test_plain_matrices_of_transformers_are_shared_along_a_mesh(job: Job) -> None:
    got = job.same("tp_with_plain_matrices")
    assert got.pop("placements") == ["(Shard(dim=0),)", "plain"]
    assert got == {**RIGHT, "owners": 2}


def test_packed_experts_under_tensor_parallelism_are_refused_or_take_adamw(job: Job) -> None:
    got = job.same("tp_of_packed_experts")
    assert "layers.0.mlp.experts.gate_up_proj: shape (4, 48, 32)" in got["error"]
    assert "this step changed nothing" in got["error"]
    assert got["unchanged"]
    assert got["exact"]


def test_a_checkpoint_of_fsdp_loads_under_tensor_parallelism(job: Job) -> None:
    assert job.same("checkpoint_in_another_layout") == {"fresh": False, "loaded": True}


TWO_AXES = {"tp_and_fsdp": 3, "replicas": 1, "experts": 2, "tp_and_fsdp_with_whole_experts": 3}


@pytest.mark.parametrize("case", TWO_AXES)
def test_two_axes_of_transformers(job_of_four: Job, case: str) -> None:
    got = job_of_four.same(case)
    assert len(got.pop("placements")) == TWO_AXES[case]
    assert got == {**RIGHT, "owners": 4}


def test_ddp(job: Job) -> None:
    assert job.same("ddp") == {
        "exact": [True, True],
        "resumed": True,
        "owners": [0, 1],
        "names": "lm_head.weight",
        "plain names": True,
    }


@pytest.mark.parametrize("page", ["page", "ddp_page"])
def test_the_pages_run(job: Job, page: str) -> None:
    assert job.same(page) == 1


@pytest.mark.parametrize("family", ["gpt2", "gpt_oss"])
def test_what_is_stored_transposed_moves_as_its_transposed_twin(family: str) -> None:
    """The bits of update and scale, on the real modules."""
    model = families.build(family)
    groups = param_groups(model, muon={"lr": 0.1})
    turned: dict[str, Any] = {
        name: p for group in groups if group.get("transposed") for name, p in group["params"]
    }
    assert len(turned) == {"gpt2": 8, "gpt_oss": 4}[family]
    # Row-major twins: a view that is only turned has other bits.
    twins = {
        name: nn.Parameter(p.detach().transpose(-2, -1).contiguous()) for name, p in turned.items()
    }
    model(**families.batch(family)).loss.backward()
    for name, parameter in turned.items():
        twins[name].grad = parameter.grad.transpose(-2, -1).contiguous()
    optimizer, reference = Muon(groups), Muon(twins.items(), lr=0.1)
    optimizer.step()
    reference.step()
    for name, parameter in turned.items():
        assert torch.equal(parameter.transpose(-2, -1), twins[name]), name

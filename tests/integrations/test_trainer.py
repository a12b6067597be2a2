"""transformers' Trainer: a given optimizer, a factory, and models that are sharded already."""

from __future__ import annotations

import pytest

from tests.integrations.jobs import Job, run

WORKER = "tests.integrations.trainer_worker"
RATES = [round(lr / 5, 9) for lr in (0.02, 3e-3, 3e-3)]  # 1 / (1 + step) after 4 steps


@pytest.fixture(scope="module")
def job() -> Job:
    return run(WORKER, 2)


@pytest.fixture(scope="module")
def alone() -> Job:
    return run(WORKER, 0)


def test_one_process_trains_saves_and_resumes(alone: Job) -> None:
    assert alone.same("whole_parameters") == {
        "wrapped": "AcceleratedOptimizer",
        "ours": True,
        "state dicts taken": 2,
        "owners": [0],
        "lr": RATES,
        "resumed": True,
    }
    assert alone.same("page") == 2


def test_ddp_takes_the_state_on_one_rank_and_resumes(job: Job) -> None:
    first, second = job.results("whole_parameters")
    assert (first.pop("state dicts taken"), second.pop("state dicts taken")) == (2, 0)
    assert (
        first
        == second
        == {
            "wrapped": "AcceleratedOptimizer",
            "ours": True,
            "owners": [0, 1],
            "lr": RATES,
            "resumed": True,
        }
    )


def test_the_factory_serves_fsdp2_which_refuses_a_finished_optimizer(job: Job) -> None:
    got = job.same("sharded_by_factory")
    assert "not allowed if PyTorch FSDP is enabled" in got.pop("optimizers")
    assert got == {
        "fsdp2": True,
        "ours": "Muon",
        "sharded": True,
        "decays": [0.1, 0.01, 0.0],
        "owners": [0, 1],
        "resumed": True,
    }


def test_a_model_that_transformers_sharded_takes_an_optimizer(job: Job) -> None:
    assert job.same("sharded_by_transformers") == {
        "sharded": True,
        "trained": True,
        "owners": [0, 1],
    }


def test_fsdp_on_cpus_is_ddp(job: Job) -> None:
    assert job.same("without_the_patch") == {"fsdp2": False, "kind": "DistributedDataParallel"}


def test_the_page_runs_under_torchrun(job: Job) -> None:
    assert job.same("page") == 2

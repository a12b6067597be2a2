"""Lightning's Fabric and Trainer with ModelParallelStrategy, on two CPU ranks."""

from __future__ import annotations

import pytest

from tests.integrations.jobs import Job, run


@pytest.fixture(scope="module")
def job() -> Job:
    return run("tests.integrations.lightning_worker", 2)


def test_fabric_steps_equal_one_process_and_the_wrapper_hides_nothing(job: Job) -> None:
    got = job.same("fabric_wrapper")
    assert got.pop("wrapper") == "FabricMuon"
    assert got.pop("names") == ["1.weight", "3.weight"]
    assert got.pop("equal to one process") == [True] * 3
    assert sorted(got.pop("owners").items()) == [("1.weight", 0), ("3.weight", 1)]
    assert [name for name, value in got.items() if value is not True] == []


@pytest.mark.parametrize("distributed", [True, False])
def test_fabric_continues_from_both_forms_of_checkpoint(job: Job, distributed: bool) -> None:
    assert job.same("fabric_files")[f"distributed {distributed}"] == {
        "restored": True,
        "lr": [0.02, 3e-3, 3e-3],
        "ended alike": True,
        "folder": distributed,
    }


@pytest.mark.parametrize("distributed", [True, False])
def test_the_trainer_restores_parameters_state_and_rates(job: Job, distributed: bool) -> None:
    got = job.same("lightning_trainer")[f"distributed {distributed}"]
    assert got.pop("owners") == [0, 1]
    assert got.pop("ours").endswith("Muon")
    assert [name for name, value in got.items() if value is not True] == []


def test_the_page_runs(job: Job) -> None:
    assert job.same("page") == 2

"""accelerate's FSDP2: its own prepare, save and load, on CPU ranks."""

from __future__ import annotations

import pytest

from tests.integrations.jobs import Job, run

WORKER = "tests.integrations.accelerate_worker"
CPU = {"ACCELERATE_TORCH_DEVICE": "cpu"}
NEW_PROCESS = {"restored": True, "losses": True, "ended alike": True, "dead state": 0}


@pytest.fixture(scope="module")
def job() -> Job:
    return run(WORKER, 2, CPU)


def test_nothing_is_planned_or_sent_before_the_swap_and_steps_equal_one_process(job: Job) -> None:
    got = job.same("prepare_and_train")
    # The schedule was made before prepare; accelerate steps it once for each process, so 6 times.
    assert got.pop("lr") == [round(lr / 7, 9) for lr in (0.02, 3e-3, 3e-3)]
    assert got == {
        "wrapped": "AcceleratedOptimizer",
        "inner is ours": True,
        "all are DTensors": True,
        "all were replaced": True,
        "in the model": True,
        "before the first step": [0, 0],
        "plans after": 0,
        "dead state": 0,
        "equal to one process": [True] * 3,
        "clipped": True,
        "owners": [0, 1],
    }


def test_prepare_frees_what_the_swap_left(job: Job) -> None:
    got = job.same("prepared_at_once")
    assert got.pop("kept until then") > 0
    assert got == {"dead": 0, "as the parameter": True}


@pytest.mark.parametrize("form", ["SHARDED_STATE_DICT", "FULL_STATE_DICT"])
def test_a_saved_run_repeats_every_bit(job: Job, form: str) -> None:
    assert job.same("save_and_continue")[form] == NEW_PROCESS


def test_a_run_is_saved_before_its_first_step(job: Job) -> None:
    assert job.same("saved_before_a_step") == {"zero": True, "loaded": True}


def test_accumulation_steps_once_and_bf16_stays_in_the_forward(job: Job) -> None:
    assert job.same("accumulation_and_bf16") == {
        "changed": [False, True, False, True],
        "dtypes": ["torch.float32"],
    }


def test_the_swap_by_hand(job: Job) -> None:
    assert job.same("switched_by_hand") == {
        "dead state": 0,
        "orthogonalized": 1,
        "owners": {"0.weight": 0, "2.weight": 1},
    }


def test_parameters_that_accelerate_mixed_up_are_refused_on_all_ranks(job: Job) -> None:
    said = job.same("sharded_before")
    assert said.startswith("ValueError: this step changed nothing, a rank cannot take it:")
    assert "b.weight and d.weight are now the same tensor" in said
    assert "accelerate does that to a model that was sharded before" in said
    assert "let prepare() shard the model" in said


def test_flat_parameters_are_refused(job: Job) -> None:
    said = job.same("flat_parameters")
    assert "flattened FSDP1 parameters have none" in said["FSDP1"]
    assert "weight: a muon group takes matrices" in said["FSDP1, original parameters"]
    assert "0.weight has 2 names for 1 parameters" in said["ZeRO"]
    assert "ZeRO does that; its flat partitions hold no matrices" in said["ZeRO"]


def test_the_page_runs(job: Job) -> None:
    assert job.same("page") == 1


def test_the_public_way_on_cpus_is_ddp(job: Job) -> None:
    assert job.same("without_the_patch") == {
        "fsdp2": False,
        "kind": "DistributedDataParallel",
        "owners": [0, 1],
    }


def test_replicas_on_four_ranks() -> None:
    assert run(WORKER, 4, CPU).same("replicas") == {
        "placements": ["R", "S(0)"],
        "equal to one process": [True, True],
        "restored": True,
        "losses": True,
        "owners": [0, 1, 2, 3],
    }

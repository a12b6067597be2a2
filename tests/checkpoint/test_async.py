"""Saving while training goes on, and storage that is slower than anybody waits."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout

from shardmuon.checkpoint import Checkpointer, publish
from tests import ranks
from tests.checkpoint.saving import Job, full_disk, names, refused, slow_disk
from tests.conftest import Worlds


@contextmanager
def held_back() -> Iterator[threading.Event]:
    """No data file is written before the event is set."""
    go, write = threading.Event(), Checkpointer._write_tensors

    def waiting(*arguments: Any) -> Any:
        assert go.wait(30)
        return write(*arguments)

    with patch.object(Checkpointer, "_write_tensors", waiting):
        yield go


def loaded(checkpoints: Checkpointer, path: Path) -> str:
    """This rank's bits of a checkpoint."""
    job = Job(seed=1)
    checkpoints.load(path, *job.parts)
    return job.bits()


def step_while_saving(folder: str) -> bool:
    """All that is saved is as it was when `save` was called."""
    job = Job()
    job.train(3)
    with closing(Checkpointer(folder, asynchronous=True)) as checkpoints:
        bits, extra = job.bits(), {"losses": [1.0]}
        torch.manual_seed(7)
        with held_back() as go:
            path = checkpoints.save(3, *job.parts, extra)
            drawn = torch.rand(3)
            extra["losses"].append(2.0)
            for group in job.optimizer.param_groups:
                group["lr"] = 0.5
            job.train(2)
            checkpoints.raise_error()
            assert not path.exists()
            go.set()
            checkpoints.wait()
        assert path == publish.final_path(Path(folder), 3)
        assert path.exists()
        assert loaded(checkpoints, path) == bits != job.bits()
        manifest = checkpoints.load(path, *job.parts)
        assert torch.equal(torch.rand(3), drawn)
    assert manifest["losses"] == [1.0]
    assert [group["lr"] for group in job.optimizer.param_groups] == [0.02, 0.01, 0.01]
    return True


def test_steps_after_an_asynchronous_save_are_not_in_it(pools: Worlds, shared_folder: str) -> None:
    assert all(pools.run(2, step_while_saving, shared_folder))


def save_twice(folder: str) -> bool:
    """The state moves to other memory in between, as offload and loading move it."""
    job = Job()
    job.train(3)
    with closing(Checkpointer(folder, asynchronous=True)) as checkpoints:
        with slow_disk(0, 0.3):
            first, early = checkpoints.save(3, *job.parts), job.bits()
            for state in job.optimizer.state.values():
                for key, value in list(state.items()):
                    state[key] = value.clone()
                    value.fill_(7)
            job.train(2)
            second, late = checkpoints.save(5, *job.parts), job.bits()
            assert first.exists(), "the second save waits for the first"
            job.train(1)
            checkpoints.wait()
        assert second.exists()
        assert loaded(checkpoints, first) == early
        assert loaded(checkpoints, second) == late
    return early != late


def test_the_second_save_waits_and_holds_newer_values(pools: Worlds, shared_folder: str) -> None:
    assert all(pools.run(2, save_twice, shared_folder))


def save_both_ways(folder: str) -> tuple[Any, Any]:
    job = Job()
    job.train(2)
    manifests = []
    for asynchronous in (False, True):
        root = f"{folder}/{asynchronous}"
        with closing(Checkpointer(root, asynchronous=asynchronous)) as checkpoints:
            path = checkpoints.save(2, *job.parts)
            checkpoints.wait()
            manifests.append(publish.read_manifest(path))
    return manifests[0], manifests[1]


def test_both_ways_write_the_same_files(pools: Worlds, shared_folder: str) -> None:
    for plain, background in pools.run(2, save_both_ways, shared_folder):
        assert plain == background
        assert {"__0_0.distcp", "__1_0.distcp", ".metadata"} == plain["files"].keys()


def save_often(folder: str) -> bool:
    """Host memory for the copies is taken once."""
    job = Job()
    job.train(1)
    with closing(Checkpointer(folder, asynchronous=True, keep_last=1)) as checkpoints:
        checkpoints.save(1, *job.parts)
        before = {key: copy.data_ptr() for key, copy in checkpoints._copies.items()}
        job.train(1)
        checkpoints.save(2, *job.parts)
        after = {key: copy.data_ptr() for key, copy in checkpoints._copies.items()}
    return len(before) > 10 and before == after


def test_host_copies_are_reused(pools: Worlds, shared_folder: str) -> None:
    assert all(pools.run(2, save_often, shared_folder))
    assert names(shared_folder) == ["step_00000002"]


def poll(checkpoints: Checkpointer, job: Job) -> None:
    """Train on until the error shows."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        checkpoints.raise_error()
        time.sleep(0.01)


WAYS: dict[str, Callable[[Checkpointer, Job], object]] = {
    "wait": lambda checkpoints, job: checkpoints.wait(),
    "save": lambda checkpoints, job: checkpoints.save(4, *job.parts),
    "raise_error": poll,
    "newest": lambda checkpoints, job: checkpoints.newest(),
    "load": lambda checkpoints, job: checkpoints.load("any", *job.parts),
    "close": lambda checkpoints, job: checkpoints.close(),
}


def fail_in_the_background(folder: str, way: str) -> str:
    job = Job()
    job.train(1)
    checkpoints = Checkpointer(folder, asynchronous=True)
    kept = checkpoints.save(1, *job.parts)
    checkpoints.wait()
    bits = job.bits()
    with full_disk(1):
        checkpoints.save(2, *job.parts)
        job.train(1)
        text = refused(lambda: WAYS[way](checkpoints, job))
    if way == "close":
        checkpoints = Checkpointer(folder, asynchronous=True)
    checkpoints.raise_error()  # is raised once
    assert loaded(checkpoints, kept) == bits
    path = checkpoints.save(2, *job.parts)
    checkpoints.wait()
    assert loaded(checkpoints, path) == job.bits()
    checkpoints.close()
    return text


@pytest.mark.parametrize("way", WAYS)
def test_an_error_in_the_background_is_raised_by_the_next_call(
    pools: Worlds, shared_folder: str, way: str
) -> None:
    texts = pools.run(2, fail_in_the_background, shared_folder, way)
    expected = "rank 1: OSError: [Errno 28] No space left on device"
    assert texts == [f"cannot save step 2 to {shared_folder}: {expected}"] * 2
    assert names(shared_folder) == ["step_00000001", "step_00000002"]


@contextmanager
def impatient_training(seconds: float) -> Iterator[None]:
    """The group that trains waits no longer than that."""
    _set_pg_timeout(timedelta(seconds=seconds))
    try:
        yield
    finally:
        _set_pg_timeout(timedelta(seconds=ranks.GROUP_TIMEOUT_S))


def save_slowly(folder: str) -> float:
    """A save that takes longer than the training group waits."""
    job = Job()
    job.train(1)
    with closing(Checkpointer(folder)) as checkpoints:
        dist.barrier()
        with impatient_training(3.0), slow_disk(0, 4.0):
            started = time.monotonic()
            path = checkpoints.save(1, *job.parts)
            seconds = time.monotonic() - started
            dist.all_reduce(torch.ones(1, device=ranks.device()))
        job.train(1)
        assert loaded(checkpoints, path) != job.bits()
    return seconds


def test_slow_storage_does_not_reach_the_training_group(pools: Worlds, shared_folder: str) -> None:
    assert min(pools.run(2, save_slowly, shared_folder)) > 3.9


def wait_in_vain(folder: str, asynchronous: bool) -> tuple[str, float]:
    """Rank 1 writes for longer than rank 0 waits for it."""
    job = Job()
    job.train(1)
    with closing(Checkpointer(folder)) as patient:
        kept, bits = patient.save(1, *job.parts), job.bits()
    checkpoints = Checkpointer(folder, asynchronous=asynchronous, timeout_s=2.0)
    with slow_disk(1, 3.0):
        started = time.monotonic()

        def save() -> None:
            checkpoints.save(2, *job.parts)
            checkpoints.wait()

        text = refused(save)
        seconds = time.monotonic() - started
        assert "did not answer" in refused(checkpoints.newest)  # that group is of no more use
        checkpoints.close()
    job.train(1)  # training goes on, and so do saves with another group
    with closing(Checkpointer(folder)) as others:
        assert loaded(others, kept) == bits
        others.save(2, *job.parts)
    return text, seconds


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_rank_that_is_too_slow_is_an_error_and_not_a_hang(
    pools: Worlds, shared_folder: str, asynchronous: bool
) -> None:
    start = f"cannot save step 2 to {shared_folder}: another rank did not answer within 2 s"
    for text, seconds in pools.run(2, wait_in_vain, shared_folder, asynchronous):
        assert text.startswith(start)
        assert seconds < 20
    assert names(shared_folder) == ["step_00000001", "step_00000002"]

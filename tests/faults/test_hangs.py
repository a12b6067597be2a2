"""No job hangs: a small version of `python -m tests.faults.hangs`, and what a report says."""

from __future__ import annotations

import contextlib
import re
import threading
import time

import pytest

import shardmuon
from shardmuon.exchange import collectives
from tests.conftest import Worlds
from tests.faults import hangs

QUICK = ["late", "killed at any time", "leaves", "raises", "other shape", "other order"]


@pytest.mark.parametrize("fault", QUICK)
def test_a_job_ends_in_time_as_documented(fault: str) -> None:
    job = hangs.run(fault, 4, who=2, seed=len(fault))
    assert not hangs.faults_of(job), "\n".join(job.logs)


def test_a_report_names_the_rank_that_is_missing_and_where_the_others_wait() -> None:
    job = hangs.run("absent", 4, who=1, seed=0)
    assert not hangs.faults_of(job), "\n".join(job.logs)
    reports = [log for log in job.logs if "ends the job: waits since" in log]
    assert reports
    for report in reports:
        assert re.search(r"ranks 0, 2, 3: header of step \d+, as this one", report), report
        assert re.search(r"rank 1: step \d+, outside of an optimizer step, for \d+ s", report)
    # The stack of the main thread, unless a broken connection ends the process before.
    assert any("exchange_header" in report for report in reports)


def test_a_rank_that_stands_still_ends_the_job() -> None:
    job = hangs.run("stopped", 4, who=3, seed=1)
    assert not hangs.faults_of(job), "\n".join(job.logs)
    said = re.compile(r"rank 3 is dead or stopped|rank 3: silent for \d+ s")
    assert any(said.search(log) for log in job.logs), "\n".join(job.logs)


def entered_again() -> list[float]:
    """Leave a block by an error, enter the next one and stay there for some beats."""
    with contextlib.suppress(KeyError), shardmuon.Watchdog(5.0, 0.4):
        time.sleep(0.2)
        raise KeyError
    with shardmuon.Watchdog(5.0, 0.4):
        time.sleep(1.5)
    return [1.0]


def test_what_was_said_in_an_earlier_block_is_over(pools: Worlds) -> None:
    assert pools.run(2, entered_again) == [[1.0]] * 2


class Mute:
    """A store that answers nothing until it is released, as that of a stopped process."""

    def __init__(self) -> None:
        self.released = threading.Event()

    def set(self, key: str, value: str) -> None:
        self.released.wait()

    def check(self, keys: list[str]) -> bool:
        return False


def test_a_store_that_does_not_answer_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    store, said = Mute(), list[tuple[str, bool]]()

    def end(self: shardmuon.Watchdog, why: str, tell: bool = True) -> None:
        said.append((why, tell))
        store.released.set()

    monkeypatch.setattr(collectives, "world_size", lambda: 2)
    monkeypatch.setattr(collectives, "side_channel", lambda prefix, timeout_s: store)
    monkeypatch.setattr(shardmuon.Watchdog, "_end", end)
    with shardmuon.Watchdog(60.0, 0.4):
        assert store.released.wait(20)
    assert said == [("the rendezvous store does not answer", False)]


def test_without_other_ranks_nothing_is_watched() -> None:
    with shardmuon.Watchdog(1e-3):
        pass
    for settings in ({"limit_s": 0.0}, {"silent_s": -1.0}, {"limit_s": float("nan")}):
        with pytest.raises(ValueError, match="_s must be a number"):
            shardmuon.Watchdog(**settings)

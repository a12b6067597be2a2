"""torchtitan's optimizer components with our container; in an environment that has torchtitan."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from tests.integrations.jobs import Job, run

pytestmark = pytest.mark.skipif(
    find_spec("torchtitan") is None, reason="torchtitan is tested in its own environment"
)
MATRICES = [f"layers.{i}.{w}.weight" for i in range(2) for w in ("w1", "w2")]


@pytest.fixture(scope="module")
def job() -> Job:
    return run("tests.integrations.torchtitan_worker", 2)


def test_titan_applies_the_override(job: Job) -> None:
    assert job.same("override") == {"made": True, "muon": {"lr": 0.02, "weight_decay": 0.05}}


def test_steps_equal_one_process_with_titans_groups_and_schedules(job: Job) -> None:
    got = job.same("steps")
    hidden, rest = got.pop("groups")
    assert hidden == ["muon", True, 0.02, MATRICES]
    assert rest[:3] == ["adamw", True, 3e-3]
    assert rest[3] == [
        "tok_embeddings.weight",
        "layers.0.w1.bias",
        "layers.1.w1.bias",
        "norm.weight",
        "output.weight",
    ]
    assert got == {
        "ours": "Muon",
        "sharded": True,
        "rates moved": True,
        "equal to one process": [True] * 3,
        "owners": [0, 1],
    }


def test_a_saved_run_repeats_every_bit(job: Job) -> None:
    assert job.same("files") == {
        "hidden step": True,
        "keys": [
            "state.layers.0.w1.bias.exp_avg",
            "state.layers.0.w1.bias.exp_avg_sq",
            "state.layers.0.w1.bias.step",
            "state.layers.0.w1.weight.momentum_buffer",
        ],
        "restored": True,
        "ended alike": True,
    }


def test_what_titan_cannot_ask_of_it_is_refused(job: Job) -> None:
    states, rule = job.same("refusals")
    assert "'fused_opt_states_bf16' is for torch's AdamW alone" in states
    assert "amsgrad=True is not supported" in rule


def test_the_page_runs(job: Job) -> None:
    assert job.same("page") == 1

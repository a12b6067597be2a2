"""The models and optimizers that are measured, and what is said about those that cannot be."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch

from shardmuon.exchange.blocks import local
from shardmuon.muon import Muon
from shardmuon.routing import param_groups
from shardmuon.tools import bench_step, picture, subjects, trace
from shardmuon.tools.bench_step import Measured, summary
from shardmuon.tools.profiling import record
from shardmuon.tools.subjects import Unfit, make_optimizers, make_subject
from shardmuon.tools.timeline import Summary, read
from shardmuon.tools.workloads import OPTIMIZERS, WORKLOADS, Experts, Workload
from shardmuon.training import place
from shardmuon.training.config import Mesh
from shardmuon.training.load import ConfigError
from tests import ranks
from tests.conftest import Worlds
from tests.tools.events import kernel, launch, range_
from tests.tools.test_timeline import two_buckets

STACKS = Workload(
    model=Experts(layers=1, dim=16, query_dim=32, kv_dim=8, hidden=12, experts=4),
)
ALONE = place.Place(device=torch.device("cpu"), rank=0, ranks=1, mesh=None)


@pytest.mark.parametrize(
    ("name", "matrices", "elements"),
    [
        ("gpt160m", 12 * 7, 12 * (4 * 768**2 + 3 * 768 * 3072)),
        ("llama1b", 16 * 7, 16 * (2 * 2048**2 + 2 * 512 * 2048 + 3 * 2048 * 8192)),
        ("llama8b-half", 16 * 7, 16 * (2 * 4096**2 + 2 * 1024 * 4096 + 3 * 4096 * 14336)),
        ("qwen3-moe", 4 * 7, 4 * (2 * 4096 * 2048 + 2 * 512 * 2048 + 3 * 128 * 768 * 2048)),
    ],
)
def test_the_matrices_that_take_muon(name: str, matrices: int, elements: int) -> None:
    with torch.device("meta"):
        model, layers = subjects.unfilled(WORKLOADS[name].model)
    assert len(layers) in (4, 12, 16)
    table = [row for row in param_groups(model).table if row.rule == "muon"]
    assert len(table) == matrices
    assert sum(torch.Size(row.shape).numel() for row in table) == elements


def test_experts_are_routed_as_stacks_and_their_router_is_not() -> None:
    model, _ = subjects.unfilled(STACKS.model)
    reasons = Counter(row.reason for row in param_groups(model).table)
    assert reasons == {"weight of a hidden linear layer": 4, "stack of experts": 3, "router": 1}


def iterate_sharded(workload: Workload, name: str) -> tuple[bool, list[bool], int]:
    """Two iterations: are all weights finite, which ones moved, and how many buckets are there."""
    subject = make_subject(workload, place.settle(Mesh(), ranks.device()))
    subject.optimizers = make_optimizers(name, subject)
    weights = [local(parameter.detach()) for parameter in subject.model.parameters()]
    before = [weight.clone() for weight in weights]
    marks: list[str] = []
    for _ in range(2):
        subject.iterate(lambda: marks.append("mark"))
    assert len(marks) == 2 * 3
    moved = [not torch.equal(a, b) for a, b in zip(before, weights, strict=True)]
    plans = [o.plan for o in subject.optimizers if isinstance(o, Muon)]
    finite = all(bool(weight.isfinite().all()) for weight in weights)
    return finite, moved, sum(len(plan.buckets) for plan in plans)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_moves_every_weight_of_a_sharded_model(pools: Worlds, name: str) -> None:
    for finite, moved, buckets in pools.run(2, iterate_sharded, WORKLOADS["tiny"], name):
        assert finite
        assert all(moved)
        assert buckets == (1 if name in ("owner", "shardmuon", "overlap") else 0)


def replicated(workload: Workload) -> tuple[tuple[str, ...] | None, int, float]:
    """Axes of the mesh, which shard this rank holds, and a sum of its weights after steps."""
    subject = make_subject(workload, place.settle(Mesh(replicate=2), ranks.device()))
    subject.optimizers = make_optimizers("shardmuon", subject)
    for _ in range(2):
        subject.iterate()
    assert subject.place.mesh is not None
    weights = [local(parameter.detach()) for parameter in subject.model.parameters()]
    total = float(sum(weight.double().abs().sum() for weight in weights))
    return subject.place.mesh.mesh_dim_names, subject.place.mesh.get_local_rank("shard"), total


@pytest.mark.parametrize("workload", [WORKLOADS["tiny"], STACKS])
def test_replicas_hold_equal_weights(pools: Worlds, workload: Workload) -> None:
    found = pools.run(4, replicated, workload)
    assert {names for names, *_ in found} == {("replicate", "shard")}
    totals: dict[int, set[float]] = {}
    for _, shard, total in found:
        totals.setdefault(shard, set()).add(total)
    assert [len(each) for each in totals.values()] == [1, 1]
    assert totals[0] != totals[1]


@pytest.mark.parametrize("name", ["adamw", "owner", "shardmuon", "overlap"])
def test_experts_take_steps_with_gradients_made_up(pools: Worlds, name: str) -> None:
    for finite, moved, _ in pools.run(2, iterate_sharded, STACKS, name):
        assert finite
        assert all(moved)


def test_ranks_fill_their_shards_differently_and_repeatably() -> None:
    first, again = (make_subject(WORKLOADS["tiny"], ALONE) for _ in range(2))
    other = make_subject(
        WORKLOADS["tiny"], place.Place(device=ALONE.device, rank=1, ranks=1, mesh=None)
    )
    weights = [next(each.model.parameters()) for each in (first, again, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


@pytest.mark.parametrize(
    ("name", "workload", "reason"),
    [
        ("vanilla", STACKS, "takes no stacks"),
        ("muonium", WORKLOADS["tiny"], "not installed; pip install muonium"),
        ("muon-fsdp2", WORKLOADS["tiny"], "not installed; pip install muon-fsdp2"),
    ],
)
def test_what_cannot_run_says_why(
    name: str, workload: Workload, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subjects, "find_spec", lambda _: None)
    with pytest.raises(Unfit, match=reason):
        make_optimizers(name, make_subject(workload, ALONE))


def test_an_optimizer_that_cannot_run_is_a_line_and_no_row(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(WORKLOADS, "qwen3-moe", STACKS)
    with pytest.raises(ConfigError, match="qwen3-moe takes no tokens"):
        bench_step.run("qwen3-moe", ["shardmuon"], 2, None, sequences=2)
    bench_step.run("qwen3-moe", ["vanilla", "shardmuon"], 2, None)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("qwen3-moe, parameters with made-up gradients, 1 rank(s) on CPU")
    assert "skipped vanilla: torch.optim.Muon takes no stacks of matrices" in lines
    assert not any(line.startswith("vanilla ") for line in lines)
    row = next(line for line in lines if line.startswith("shardmuon "))
    assert row.split()[2:4] == ["-", "-"]  # no iteration, no GPU
    assert lines[-2].startswith("shardmuon over vanilla: step - times")


def test_a_package_that_fails_is_a_line_but_shardmuon_raises(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("it broke\nat length")

    monkeypatch.setattr(bench_step, "make_optimizers", fail)
    bench_step.run("tiny", ["muonium"], 1, None, sequences=3)
    captured = capsys.readouterr()
    assert captured.out.startswith("tiny, 3 x 32 tokens a rank, 1 rank(s) on CPU")
    assert "skipped muonium: RuntimeError: it broke\n" in captured.out
    assert "Traceback" in captured.err
    with pytest.raises(RuntimeError, match="it broke"):
        bench_step.run("tiny", ["shardmuon"], 1, None)


@pytest.mark.gpu
def test_a_gpus_kernels_are_found_in_their_phases(tmp_path: Path) -> None:
    here = place.Place(device=torch.device("cuda", 0), rank=0, ranks=1, mesh=None)
    subject = make_subject(WORKLOADS["tiny"], here)
    subject.optimizers = make_optimizers("shardmuon", subject)
    for _ in range(3):
        subject.iterate()
    found = record(subject, 2, tmp_path / "trace.json.gz")
    assert not found.on_host
    assert len(found.windows) == 2
    phases = {span.phase for span in found.spans}
    assert {"model", "prepare", "orthogonalize", "apply", "elements"} <= phases
    times = found.summary()
    assert 0 < times.orthogonalize_ms < times.step_ms
    assert times.communication_ms == 0


def measured(step_ms: float, iteration_ms: float | None) -> Measured:
    return Measured(
        step_ms=step_ms,
        iteration_ms=iteration_ms,
        peak_gb=None,
        first_steps_s=1.0,
    )


def test_the_summary() -> None:
    found = {"adamw": measured(10, 128), "vanilla": measured(500, 640)}
    found["shardmuon"] = measured(25, 160)
    assert summary(found) == [
        "shardmuon over vanilla: step 20.00 times as fast, iteration 4.00 times as fast",
        "iteration with shardmuon over AdamW's: +25.0%",
    ]
    assert summary({}) == [
        "shardmuon over vanilla: step - times as fast, iteration - times as fast",
        "iteration with shardmuon over AdamW's: -",
    ]


def test_makespan_and_imbalance_of_measured_times() -> None:
    loads = bench_step.measured_loads([2.0, 4.0, 0.0, 2.0])
    assert loads == {"measured_makespan_ms": 4.0, "measured_imbalance": 2.0}
    assert bench_step.measured_loads([0.0, 0.0]) == {}


def test_the_report_sets_measured_beside_planned_shares() -> None:
    rank = {"step_ms": 10.0, "communication_ms": 4.0, "hidden_ms": 3.0, "exposed_ms": 0.5}
    busy = [Summary(orthogonalize_ms=ms, **rank) for ms in (6.0, 2.0)]
    lines = trace.report(busy, {0: 300, 1: 100})
    cells = ["0", "10.00", "6.00", "75.0%", "75.0%", "4.00", "75.0%", "0.50", "5.0%"]
    assert lines[2].split() == cells
    silent = Summary(
        step_ms=1.0, orthogonalize_ms=0.0, communication_ms=0.0, hidden_ms=0.0, exposed_ms=0.0
    )
    cells = ["0", "1.00", "0.00", "-", "-", "0.00", "-", "0.00", "0.0%"]
    assert trace.report([silent], {})[2].split() == cells


def test_rows_of_the_picture_are_streams_and_collectives_have_a_colour() -> None:
    timeline = read(two_buckets()).last_step()
    lanes = picture.rows([timeline, timeline])
    assert list(lanes) == [f"rank {rank}, stream {stream}" for rank in (0, 1) for stream in (1, 2)]
    talk = lanes["rank 0, stream 2"].pop("communication")
    assert lanes["rank 0, stream 2"] == {}
    assert [start for start, _ in talk] == pytest.approx([0.004, 0.022, 0.042])
    assert [extent for _, extent in talk] == pytest.approx([0.016, 0.014, 0.028])
    assert set(lanes["rank 1, stream 1"]) == {"prepare", "orthogonalize", "elements"}


def test_rows_of_a_host_are_phases_in_the_order_of_a_step() -> None:
    events = [range_("tools.step", 0, 100), range_("shardmuon.apply.0", 60, 70)]
    events += [range_("shardmuon.header", 0, 10), range_("gloo:all_reduce", 2, 9, thread=9)]
    lanes = picture.rows([read(events).last_step()])
    assert list(lanes) == [f"rank 0, {n}" for n in ("header", "apply", "communication", "other")]


def test_streams_are_sorted_by_number() -> None:
    events = [range_("tools.step", 0, 100), launch(1, 1)]
    events += [kernel(1, 5, 6, stream=stream) for stream in (20, 7)]
    assert list(picture.rows([read(events)])) == ["rank 0, stream 7", "rank 0, stream 20"]

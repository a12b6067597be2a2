"""Simulated steps: what a plan of known work must take, by hand."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardmuon.planning.cost import newton_schulz_flops
from shardmuon.planning.cut import Cut
from shardmuon.planning.device import DEVICES, Device, Link, Rate
from shardmuon.planning.layout import Layout, Mesh, Split
from shardmuon.planning.matrix import Matrix
from shardmuon.planning.plan import Plan
from shardmuon.planning.planner import make_plan
from shardmuon.planning.simulation import Simulation, simulate

SEGMENTS = (3, 2)
# A TFLOP/s, a GB/s: a million FLOPs a microsecond, a thousand bytes a microsecond.
IDEAL = Device(
    name="ideal",
    rates={"standard": Rate(tflops=1.0, half=0.0, batch_ms=0.0)},
    memory_gbs=1e12,
    near=Link(gbs=1e12, ms=0.0),
    far=Link(gbs=1.0, ms=0.5),
    near_ranks=8,
)


def square(name: str, side: int, layout: Layout, method: str = "standard") -> Matrix:
    cost = newton_schulz_flops(side, side, SEGMENTS, method)
    cut = Cut((side, side))
    return Matrix(name, cut, layout, "bfloat16", 2, cost, method=method, segments=SEGMENTS)


def over(ranks: int, replicas: int = 1) -> Layout:
    mesh = Mesh(tuple(range(ranks)), (replicas, ranks // replicas))
    return Layout(mesh, (Split(1, 0),))


def plan_of(
    sides: list[int], layout: Layout, in_bucket: int = 2**30, method: str = "standard"
) -> Plan:
    matrices = [square(f"m{i}", side, layout, method) for i, side in enumerate(sides)]
    return make_plan(matrices, bucket_bytes=in_bucket)


def test_with_free_links_and_memory_a_step_is_the_makespan() -> None:
    plan = plan_of([512, 512, 512, 256, 256], over(2))
    step = simulate(plan, IDEAL)
    assert step.step_ms == pytest.approx(plan.makespan * 1e-9, rel=1e-6)
    owned = step.phase_ms("orthogonalize")
    assert owned == pytest.approx({rank: load * 1e-9 for rank, load in plan.loads().items()})


def test_one_bucket_waits_for_the_link_and_several_hide_it() -> None:
    """Ten equal matrices for each of two ranks; the link takes half as long as the work."""
    side, count = 512, 10
    work = newton_schulz_flops(side, side, SEGMENTS) * 1e-9  # ms for one matrix
    sent = side * side * 2 / 2  # bytes of each matrix that come from the other rank
    device = replace(IDEAL, near=Link(gbs=sent / (work / 2) * 1e-6, ms=0.0))
    sides = [side] * (2 * count)
    alone = simulate(plan_of(sides, over(2)), device).step_ms
    assert alone == pytest.approx(count * work * (1 + 0.5 + 0.5), rel=1e-6)
    hidden = simulate(plan_of(sides, over(2), in_bucket=side * side * 2), device).step_ms
    assert hidden == pytest.approx(count * work + work * (0.5 + 0.5), rel=1e-6)


def test_a_collective_starts_when_the_last_rank_comes() -> None:
    """One matrix: its owner works, and the other rank waits for the update."""
    device = replace(IDEAL, near=Link(gbs=1e12, ms=0.25))
    plan = plan_of([512], over(2))
    step = simulate(plan, device)
    work = plan.makespan * 1e-9
    assert step.step_ms == pytest.approx(0.25 + 0.25 + work + 0.25, rel=1e-6)
    scatters = [span.start for span in step.spans if span.phase == "scatter"]
    assert scatters == pytest.approx([0.5 + work] * 2)


def test_far_ranks_use_the_far_link_and_replicas_gather_updates() -> None:
    near, far = (simulate(plan_of([64] * 16, over(n)), IDEAL) for n in (8, 16))
    assert far.step_ms > near.step_ms + 3 * 0.5 - 1e-6
    plan = plan_of([64] * 16, over(16, replicas=2))
    hsdp = simulate(plan, IDEAL)
    # Blocks stay in a replica, which is near; then each rank gets an eighth of the other's update.
    assert max(hsdp.phase_ms("gather").values()) == pytest.approx(0.0, abs=1e-6)
    gathered = 0.5 + 64 * 64 / 8 * 2 * 1e-6
    assert max(hsdp.phase_ms("scatter").values()) == pytest.approx(gathered)


def test_the_host_bounds_a_gpu_and_adds_up_on_a_cpu() -> None:
    plan = plan_of([256] * 4, over(1))
    gpu = replace(IDEAL, host_ms=1.0, host_ms_per_matrix=2.0)
    work = plan.makespan * 1e-9
    assert simulate(plan, gpu).step_ms == pytest.approx(max(9.0, work))
    assert simulate(plan, replace(gpu, is_host=True)).step_ms == pytest.approx(9.0 + work)


def test_batches_count_once_on_a_gpu_and_each_matrix_on_a_cpu() -> None:
    device = replace(IDEAL, rates={"standard": Rate(tflops=1e9, half=0.0, batch_ms=1.0)})
    plan = plan_of([64] * 5, over(1))
    assert simulate(plan, device).step_ms == pytest.approx(1.0, rel=1e-3)
    assert simulate(plan, replace(device, is_host=True)).step_ms == pytest.approx(5.0, rel=1e-3)


# Milliseconds measured on one H200, from docs/benchmarks.md: (matrices, rows, cols, method).
MEASURED = [
    (16, 512, 2048, "standard", 0.623),
    (16, 768, 768, "symmetric", 0.425),
    (14, 768, 3072, "gram", 0.811),
    (8, 1024, 4096, "gram", 0.944),
    (8, 2048, 2048, "symmetric", 2.453),
    (4, 2048, 8192, "standard", 5.49),
    (2, 4096, 4096, "gram", 4.628),
    (1, 4096, 14336, "gram", 4.090),
    (1, 8192, 8192, "symmetric", 17.260),
    (1, 8192, 28672, "gram", 31.080),
]


@pytest.mark.parametrize(("count", "rows", "cols", "method", "ms"), MEASURED)
def test_the_h200_is_as_fast_as_it_was(
    count: int, rows: int, cols: int, method: str, ms: float
) -> None:
    predicted = DEVICES["h200"].newton_schulz_ms(count, rows, cols, SEGMENTS, method)
    assert predicted == pytest.approx(ms, rel=0.1)


def test_the_quickest_method_is_that_of_the_table() -> None:
    device = DEVICES["h200"]
    assert device.best_method(8, 2048, 2048, SEGMENTS) == "symmetric"
    assert device.best_method(8, 2048, 8192, SEGMENTS) == "gram"


sides = st.lists(st.integers(1, 300), min_size=1, max_size=12)


@settings(max_examples=60, deadline=None)
@given(sides, st.sampled_from([1, 2, 3, 8]), st.integers(1, 100_000))
def test_nothing_overlaps_on_a_stream_and_no_step_beats_its_parts(
    shape: list[int], ranks: int, in_bucket: int
) -> None:
    device = DEVICES["h200"]
    step = simulate(plan_of(shape, over(ranks), in_bucket), device, other_elements=10_000)
    for rank in range(ranks):
        for phases in (("prepare", "orthogonalize", "apply", "elements"), ("gather", "scatter")):
            spans = sorted(
                (s.start, s.stop) for s in step.spans if s.rank == rank and s.phase in phases
            )
            assert all(a[1] <= b[0] + 1e-9 for a, b in itertools.pairwise(spans))
    assert step.step_ms >= max(step.phase_ms("orthogonalize").values()) - 1e-9
    assert step.step_ms >= step.host_ms


def test_an_empty_plan_takes_the_host_only() -> None:
    empty: Simulation = simulate(Plan(()), IDEAL)
    assert empty.step_ms == 0.0

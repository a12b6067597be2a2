"""Plans survive JSON."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardmuon.planning.cut import cut_parameter
from shardmuon.planning.layout import Layout, Mesh, Split
from shardmuon.planning.matrix import Matrix
from shardmuon.planning.plan import Plan
from shardmuon.planning.planner import make_plan
from shardmuon.planning.text import dumps, loads

WHOLE = Mesh((0, 1, 2, 3), (2, 2), ("a", "b"))
HALF = Mesh((2, 3), (2,))
LAYOUTS = [
    Layout(WHOLE),
    Layout(WHOLE, (Split(0, 0), Split(1, 1))),
    Layout(WHOLE, (Split(1, 0), Split(0, 0))),
    Layout(HALF, (Split(0, 1),)),
]
CUTS = [
    cut
    for _, cut in (
        *cut_parameter((3, 8, 6)),
        *cut_parameter((8, 6), split_sizes=(3, 5), transposed=False),
        *cut_parameter((8, 6), transposed=True),
        *cut_parameter((4, 3, 2, 2), flatten=True),
    )
]


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    matrices = [
        Matrix(
            f"m{i}",
            draw(st.sampled_from(CUTS)),
            draw(st.sampled_from(LAYOUTS)),
            *draw(st.sampled_from([("bfloat16", 2), ("float32", 4)])),
            cost=draw(st.integers(0, 99)),
            settings=draw(st.text(max_size=3)),
            row_state=draw(st.booleans()),
            row_stats=draw(st.booleans()),
            method=draw(st.sampled_from(["standard", "gram"])),
            segments=draw(st.sampled_from([(), (3, 2)])),
        )
        for i in range(draw(st.integers(0, 6)))
    ]
    return make_plan(
        matrices,
        bucket_bytes=draw(st.sampled_from([1, 1000])),
        exchange=draw(st.sampled_from(["auto", "all_gather"])),
        overlap=draw(st.sampled_from(["none", "backward"])),
        settings="x",
    )


@settings(max_examples=150, deadline=None)
@given(plans())
def test_what_was_dumped_is_loaded(plan: Plan) -> None:
    again = loads(dumps(plan))
    assert again == plan
    assert again.digest == plan.digest
    assert again.loads() == plan.loads()


@pytest.mark.parametrize(
    "text",
    ["", "{}", "[]", '{"form": 2}', '{"form": 1}', "nonsense", '{"form": 1, "meshes": [[1]]}'],
)
def test_what_is_no_plan_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="this is no plan"):
        loads(text)


def test_a_plan_that_was_tampered_with_is_refused() -> None:
    content = json.loads(
        dumps(make_plan([Matrix("m", CUTS[0], LAYOUTS[0], "bfloat16", 2, 1)], bucket_bytes=1))
    )
    content["buckets"][0][1][0][1] = 9
    with pytest.raises(ValueError, match="owner 9 is not in its mesh"):
        loads(json.dumps(content))

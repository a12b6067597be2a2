"""What sharding changes in training: the bits of a few settings, and the page against its file.

That every layout has the numbers of one rank within rounding is `test_layouts`' matter.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Worlds
from tests.training import equality, equality_text, launch

PAGE = launch.ROOT / "docs" / "evidence.md"
FILE = launch.ROOT / "docs" / "evidence" / "equality.json"

SHORT = [
    *launch.SMALL,
    "schedule.steps=4",
    "schedule.warmup_steps=0",
    "evaluation.every=0",
    "checkpoint.every=0",
    "logging.progress=none",
]


@pytest.fixture
def found() -> dict[str, Any]:
    made: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return made


def test_the_runtime_changes_no_bit_of_a_run(pools: Worlds, tmp_path: Path) -> None:
    text = launch.text_files(tmp_path)
    runtimes = [
        (),
        ("exchange=all_gather", "bucket_bytes=1"),
        ("overlap=backward", "bucket_bytes=6000"),
    ]
    plain, gathered, overlapped = equality.bits(
        pools, equality.FSDP, tmp_path, [*SHORT, *text], runtimes
    )
    for other in (gathered, overlapped):
        assert other["numbers"] == plain["numbers"]
        assert other["tensors"] == plain["tensors"]
        assert other["collectives"] > plain["collectives"]  # it was heard
    assert gathered["bytes_sent"] > plain["bytes_sent"]
    assert plain["steps"] == 4
    seed = ["optimizer.runtime.exchange=auto", "clipping.max_norm=null", "seed=1"]
    other = equality.digests(pools, equality.FSDP, tmp_path / "seed", [*SHORT, *text, *seed])
    assert other["numbers"] != plain["numbers"]
    assert other["tensors"] != plain["tensors"]


def test_the_page_holds_what_was_measured(found: dict[str, Any]) -> None:
    text = PAGE.read_text(encoding="utf-8")
    advice = f"python -m tests.training.equality --tables {FILE.name} --into {PAGE.name}"
    assert equality_text.with_tables(text, found) == text, advice
    assert "NOT" not in equality_text.tables(found)
    assert found["summary"] == json.loads(json.dumps(equality_text.summarize(found)))
    assert equality_text.as_json(found) == FILE.read_text(encoding="utf-8")
    assert list(found["summary"]["layouts"]) == [layout.name for layout in equality.LAYOUTS]
    ways = [list(way) for way in equality.RUNTIMES]
    for layout, more in ((equality.FSDP, []), (equality.HSDP, [list(equality.REPEAT)])):
        runs = [run["runtime"] for run in found["bits"] if run["layout"] == layout.name]
        assert runs == ways + more


def test_what_does_not_hold_is_said(found: dict[str, Any]) -> None:
    changed = copy.deepcopy(found)
    run = next(run for run in changed["parity"] if run["layout"] == equality.HSDP.name)
    run["losses"][7] += 0.25
    run["validation"] += 9.0
    changed["bits"][3]["tensors"] = "0"
    for run in changed["parity"]:
        if run["layout"] == equality_text.BLOCKS:
            run["losses"] = changed["parity"][run["seed"]]["losses"]
    changed["summary"] = equality_text.summarize(changed)
    text = equality_text.tables(changed)
    assert "at most 2.5e-1, NOT WITHIN 1e-4" in text
    assert "at most 9.0e+00, NOT WITHIN the 1.4e-2 between its two seeds" in text
    assert "| equal | DIFFERENT |" in text
    assert "A wrong update is NOT SEEN" in text
    assert "NOT EQUAL: 1 of 21 runs" in text
    assert "| 2.5e-1, " in text
    assert changed["summary"]["layouts"][equality.HSDP.name][0]["within"] == 7


def test_a_page_without_marks_is_refused(found: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="the page has no lines <!-- begin of equality -->"):
        equality_text.with_tables("nothing", found)

"""`python -m shardmuon plan`: a model that is not there on ranks that are not there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardmuon.planning.models import MODELS
from shardmuon.planning.planner import Freedom
from shardmuon.tools import picture, plan_model
from shardmuon.tools.command import main
from shardmuon.tools.plan_model import Options, Shape, planned
from shardmuon.tools.sources import read_source


def options(shape: Shape, **more: object) -> Options:
    return Options(shape=shape, freedom=Freedom(), **more)  # type: ignore[arg-type]


def test_a_named_model_is_planned_and_timed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    numbers, image = tmp_path / "plan.json", tmp_path / "plan.svg"
    arguments = ["plan", "gpt2-124m", "--ranks", "16", "--compare", "--json", str(numbers)]
    if picture.drawable():
        arguments += ["--plot", str(image)]
    assert main(arguments) == 0
    said = capsys.readouterr().out
    found = json.loads(numbers.read_text())
    matrices = sum(count for count, _, _ in MODELS["gpt2-124m"])
    assert (found["ranks"], found["matrices"], len(found["owners"])) == (16, matrices, matrices)
    assert f"predicted step, ms              {found['step_ms']:.2f}" in said
    assert max(found["loads_flop"].values()) == found["makespan_flop"]
    assert [line.split()[0] for line in said.splitlines() if line[:2].strip().isdecimal()] == [
        "1", "2", "4", "8", "16",
    ]  # fmt: skip
    assert "round robin" in said
    if picture.drawable():
        assert "<svg" in image.read_text()


def test_ways_to_choose_owners_are_those_of_the_field(capsys: pytest.CaptureFixture[str]) -> None:
    """Llama-3 70B on 256 ranks: longest-first by cost leaves 17 %, by elements 28 %."""
    arguments = ["plan", "llama3-70b", "--ranks", "256", "--method", "standard", "--compare"]
    assert main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    shares = {line[:25].strip(): line[25:].strip() for line in lines if line[:25].strip()}
    assert shares["cost, largest first"] == "1.171"
    assert float(shares["this plan"]) <= 1.171
    assert shares["lower bound"] == "1.000"
    assert float(shares["round robin"]) > float(shares["elements, largest first"]) > 1.2


def test_replicas_share_the_work() -> None:
    source = read_source("llama3-1b")
    alone, _ = planned(source, options(Shape(1, 8)), Shape(1, 8))
    replicated, _ = planned(source, options(Shape(2, 4)), Shape(2, 4))
    assert alone.makespan == replicated.makespan
    assert len(set(replicated.owners().values())) == 8


def test_rows_of_normuon_are_in_the_plan(tmp_path: Path) -> None:
    sent = {}
    for algorithm in ("muon", "normuon"):
        path = tmp_path / f"{algorithm}.yaml"
        path.write_text(f"optimizer: {{muon: {{algorithm: {algorithm}}}}}\n")
        shape = Shape(1, 2)
        plan, _ = planned(read_source(str(path)), options(shape), shape)
        sent[algorithm] = plan, sum(plan.bytes_sent().values())
    plan, much = sent["normuon"]
    assert all(matrix.row_state and matrix.row_stats for matrix, _ in plan)
    assert much > sent["muon"][1]


def test_blocks_that_are_shards_do_not_travel(capsys: pytest.CaptureFixture[str]) -> None:
    """Of the matrices of gpt2-124m one of 8 ranks holds 96, 288 or 384 rows."""
    found = {}
    for block in ("96xall", "allx512"):
        assert main(["plan", "gpt2-124m", "--ranks", "8", "--block", block]) == 0
        said = capsys.readouterr().out
        assert f"a step of blocks of {block.replace('x', ' x ')}\n" in said
        lines = said.splitlines()
        found[block] = {line[:32].strip(): line[32:] for line in lines}
    blocks = 12 * (2304 + 768 + 3072 + 768) // 96
    assert found["96xall"]["matrices"].split()[0] == str(blocks)
    assert found["96xall"]["sent, received by its rank, MB"] == "0.0, 0.0"
    assert found["allx512"]["sent, received by its rank, MB"] != "0.0, 0.0"


def test_blocks_do_not_cut_rows_of_which_a_rule_has_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "normuon.yaml"
    path.write_text("optimizer: {muon: {algorithm: normuon}}\n")
    assert main(["plan", str(path), "--block", "32xall"]) == 0
    assert main(["plan", str(path), "--block", "32x32"]) == 2
    assert "blocks cut rows" in capsys.readouterr().err


def test_more_ranks_than_matrices_are_warned_of(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "gpt2-124m", "--ranks", "64"]) == 0
    said = capsys.readouterr().out
    assert "own no matrix" in said
    assert "alone costs" in said


def test_what_does_not_fit_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "nothing-there", "--ranks", "2"]) == 2
    assert main(["plan", "gpt2-124m", "--ranks", "2", "--mesh", "2x2"]) == 2
    assert "--mesh 2x2 is not --ranks 2" in capsys.readouterr().err
    for wrong in (
        ["--mesh", "2"],
        ["--ranks", "0"],
        ["--device", "abacus"],
        ["--block", "256"],
        ["--block", "allxall"],
        ["--block", "0xall"],
    ):
        with pytest.raises(SystemExit):
            main(["plan", "gpt2-124m", *wrong])


def test_this_machine_can_be_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "tiny", "--device", "here"]) == 0
    said = capsys.readouterr().out
    assert "on 1 rank(s) (1), here" in said
    (step,) = [line.split()[-1] for line in said.splitlines() if line.startswith("predicted step")]
    assert 0 < float(step) < 1000


def test_a_picture_has_a_row_for_work_and_one_for_the_link() -> None:
    _, simulation = planned(read_source("llama3-1b"), options(Shape(1, 2)), Shape(1, 2))
    lanes = picture.planned_rows(simulation.spans, (0, 1))
    assert list(lanes) == ["rank 0, work", "rank 0, link", "rank 1, work", "rank 1, link"]
    assert set(lanes["rank 0, link"]) == {"header", "gather", "scatter"}
    assert {"prepare", "orthogonalize", "apply"} <= set(lanes["rank 1, work"])


def test_the_order_of_parameters_does_not_matter() -> None:
    source = read_source("gpt2-124m")
    turned = type(source)(source.title, tuple(reversed(source.parameters)))
    shape = Shape(1, 4)
    plans = [planned(each, options(shape), shape)[0] for each in (source, turned)]
    assert plans[0] == plans[1]
    assert plan_model.SEGMENTS == (3, 2)

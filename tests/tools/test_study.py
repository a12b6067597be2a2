"""A study from its file to its page: stages, going on, faults, arithmetic, words and figures."""

from __future__ import annotations

import dataclasses
import json
import os
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
import torch

from shardmuon.tools import command
from shardmuon.tools.study import config as study_config
from shardmuon.tools.study import figures as study_figures
from shardmuon.tools.study import plan as study_plan
from shardmuon.tools.study import pool as study_pool
from shardmuon.tools.study import summary as study_summary
from shardmuon.tools.study import tables as study_tables
from shardmuon.tools.study import worker as study_worker
from shardmuon.tools.study.config import Study, load_study
from shardmuon.training import reference
from shardmuon.training.load import key_of
from shardmuon.training.model import CausalLM

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "evidence.md"
NAMES = sorted(path.stem for path in (ROOT / "configs" / "study").glob("*.yaml"))
FILES = [ROOT / "docs" / "evidence" / f"{name}.json" for name in NAMES]
MEASURED = [path for path in FILES if path.exists()]

pytestmark = pytest.mark.timeout(240)

STEPS = 10
MODEL = {"vocab_size": 280, "dim": 16, "layers": 1, "heads": 2, "kv_heads": 1, "hidden": 32}


def tree(folder: Path, **changes: Any) -> dict[str, Any]:
    """A study of a very small model on a few files, with one point that diverges."""
    for i in range(8):
        text = "".join(f"def function_{i}_{n}(a, b):\n    return a + {n} * b\n" for n in range(40))
        (folder / f"text{i}.py").write_text(text)
    base: dict[str, Any] = {
        "model": MODEL,
        "data": {"source": "text", "files": [f"{folder}/text*.py"]},
        "optimizer": {"adamw": {"weight_decay": 0.01}},
        "schedule": {"steps": STEPS, "warmup_steps": 2},
        "mesh": {"device": "cpu"},
        "evaluation": {"every": 5, "sequences": 4},
        "logging": {"every": 1},
    }
    base["data"] |= {"sequence_length": 16, "batch_sequences": 4, "validation_fraction": 0.3}
    muon = {"optimizer.name": "muon"}
    return {
        "base": base,
        "tokenizer_bytes": 5000,
        "methods": {
            "adamw": {"optimizer.name": "adamw"},
            "muon": muon,
            "like_adamw": {**muon, "optimizer.muon.adjust_lr_fn": "match_rms_adamw"},
        },
        "sweep": {
            "adamw": {"optimizer.adamw.lr": [1e-3, 3e-3, 1e30]},
            "muon": {"optimizer.muon.lr": [0.01, 0.02, 0.03]},
        },
        "seeds": [1, 2],
        "drop_in": {
            "like_adamw": {
                "from": "adamw",
                "copy": {
                    "optimizer.muon.lr": "optimizer.adamw.lr",
                    "optimizer.muon.weight_decay": "optimizer.adamw.weight_decay",
                },
            }
        },
        "variants": {"polar_express": {"optimizer.muon.ns_coefficients": "polar_express"}},
        "shorter": [0.5, 0.8],
        "timing": {"steps": 6, "every": 1},
        **changes,
    }


def write(folder: Path, **changes: Any) -> Path:
    path = folder / "small.yaml"
    path.write_text(json.dumps(tree(folder, **changes)))  # YAML, too
    return path


def start(path: Path, *arguments: str) -> dict[str, Any]:
    """Run the command; the study's JSON."""
    folder = path.parent / "study"
    code = command.main(["study", str(path), "--folder", str(folder), *arguments])
    assert code == 0
    (found,) = study_tables.read([folder / "small.json"])
    return found


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("study"))


@pytest.fixture(scope="module")
def whole(path: Path) -> dict[str, Any]:
    """The study, trained by two processes."""
    return start(path, "--workers", "2")


def of(whole: dict[str, Any], stage: str, name: str) -> list[dict[str, Any]]:
    return [run for run in whole["runs"] if (run["stage"], run["name"]) == (stage, name)]


def test_all_stages_are_run(whole: dict[str, Any], path: Path) -> None:
    counts = dict.fromkeys(study_plan.STAGES, 0)
    for run in whole["runs"]:
        counts[run["stage"]] += 1
    assert list(counts.values()) == [6, 4, 2, 2, 4, 4]
    assert whole["facts"]["missing"] == 0
    assert (path.parent / "study" / "small.json").stat().st_size < 300_000
    assert not list((path.parent / "study" / "runs").iterdir())  # nor checkpoints
    config = whole["facts"]["config"]
    assert config["data"]["tokenizer"] == "tokenizer.json"  # no folder of this machine
    assert config["data"]["cache"] is None
    assert whole["facts"]["bytes_per_token"] > 1


def test_a_diverged_run_counts_as_one_and_is_never_the_best(whole: dict[str, Any]) -> None:
    assert [run["status"] for run in of(whole, "sweep", "adamw")] == ["done", "done", "diverged"]
    adamw, muon = (whole["summary"]["methods"][name] for name in ("adamw", "muon"))
    losses = [run["loss"] for run in of(whole, "sweep", "adamw")]
    assert losses[2] is None
    assert adamw["point"] == of(whole, "sweep", "adamw")[losses.index(min(losses[:2]))]["point"]
    assert adamw["loss"]["n"] == muon["loss"]["n"] == 2
    assert "Runs of the sweeps that diverged or failed: 1." in study_tables.tables(whole)


def test_the_same_seed_is_the_same_start_for_all_methods(whole: dict[str, Any]) -> None:
    for seed in (1, 2):
        runs = [r for r in whole["runs"] if r["seed"] == seed and r["stage"] != "timing"]
        assert len({run["curve"][1][0] for run in runs}) == 1, seed
    assert len({run["curve"][1][0] for run in whole["runs"]}) == 3  # and that of the sweep


def test_values_of_the_stages(whole: dict[str, Any]) -> None:
    adamw, muon = (whole["summary"]["methods"][name]["point"] for name in ("adamw", "muon"))
    lr = adamw["optimizer.adamw.lr"]
    for run in of(whole, "drop_in", "like_adamw"):
        wanted = {"optimizer.adamw.lr": lr, "optimizer.muon.lr": lr}
        assert run["point"] == {**wanted, "optimizer.muon.weight_decay": 0.01}
    for run in of(whole, "variants", "polar_express"):
        assert run["point"] == {**muon, "optimizer.muon.ns_coefficients": "polar_express"}
    assert {(r["share"], r["steps"]) for r in of(whole, "shorter", "muon")} == {(0.5, 5), (0.8, 8)}
    assert {r["steps"] for r in whole["runs"] if r["stage"] == "timing"} == {6}
    for run in of(whole, "seeds", "muon"):
        assert run["validation"][0] == [5, STEPS]
        assert run["validation"][1][-1] == run["loss"]
        assert run["bits_per_byte"] is not None


def test_a_study_goes_on_with_what_is_missing(
    whole: dict[str, Any], path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = path.parent / "study" / "results.jsonl"
    before = results.read_text().splitlines()
    lost = next(i for i, line in enumerate(before) if '"stage": "variants"' in line)
    # One line is gone, another torn.
    results.write_text("\n".join([*before[:lost], *before[lost + 1 :], before[lost][:50]]) + "\n")
    again = start(path)
    assert again["summary"] == {**again["summary"], "shorter": whole["summary"]["shorter"]}
    assert "1/1 variants: polar_express" in capsys.readouterr().out
    keep = ("stage", "name", "seed", "loss", "bits_per_byte", "curve", "validation")
    assert [[r[k] for k in keep] for r in again["runs"]] == [
        [r[k] for k in keep] for r in whole["runs"]
    ]


def test_results_on_other_text_are_not_mixed_in(
    whole: dict[str, Any], path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = path.parent / "study" / "results.jsonl"
    kept = results.read_text()
    results.write_text(kept.replace(whole["facts"]["fingerprint"], "of other text"))
    assert command.main(["study", str(path), "--folder", str(path.parent / "study")]) == 2
    assert "has results on other text (of other text, now" in capsys.readouterr().err
    results.write_text(kept)


def test_no_run_is_started_that_would_not_end_in_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = start(write(tmp_path), "--minutes", "1e-6")
    assert found["runs"] == []
    assert found["facts"]["missing"] == 6
    assert "start it again to go on" in capsys.readouterr().out
    assert "The study is not complete: 6 runs are missing." in study_tables.tables(found)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the run fails for want of a GPU")
def test_a_run_that_fails_ends_no_study(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    methods = tree(tmp_path)["methods"]
    methods["muon"]["mesh.device"] = "cuda"
    del methods["like_adamw"]
    found = start(write(tmp_path, methods=methods, drop_in={}, variants={}))
    assert [run["status"] for run in of(found, "sweep", "muon")] == ["failed"] * 3
    assert "mesh.device: got 'cuda' with 0 GPUs" in capsys.readouterr().out
    assert of(found, "sweep", "adamw")[0]["loss"] is not None
    assert "Runs of the sweeps that diverged or failed: 4." in study_tables.tables(found)


def die(pipe: Any, number: int) -> None:
    """A worker whose process ends in its first run."""
    pipe.recv()
    os._exit(7)


def test_a_process_that_dies_fails_its_run_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study, _ = load_study(write(tmp_path))
    tasks = study_plan.plan(study, tmp_path, {})["sweep"][:2]
    monkeypatch.setattr(study_pool, "serve", die)
    taken: list[Any] = []
    with study_pool.Pool(1, tmp_path) as pool:
        pool.run(tasks, 1, lambda task: True, lambda task, found: taken.append((task, found)))
    assert {id(task) for task, _ in taken} == {id(task) for task in tasks}
    assert {found["error"] for _, found in taken} == {"its process ended with 7"}


# --- plans and arithmetic ---------------------------------------------------------------------


def test_a_run_is_known_by_its_configuration_wherever_it_is(tmp_path: Path) -> None:
    study, _ = load_study(write(tmp_path))
    here, there = (study_plan.plan(study, Path(f), {})["sweep"] for f in ("here", "there"))
    assert [task.key for task in here] == [task.key for task in there]
    assert len({task.key for task in here}) == len(here)


def test_one_point_is_not_swept(tmp_path: Path, whole: dict[str, Any]) -> None:
    one = {"adamw": {"optimizer.adamw.lr": [1e-3]}, "muon": {"optimizer.muon.lr": [0.02]}}
    study, _ = load_study(write(tmp_path, sweep=one))
    tasks = study_plan.plan(study, tmp_path, {})
    assert not tasks["sweep"]
    assert {task.point["optimizer.muon.lr"] for task in tasks["variants"]} == {0.02}
    assert {task.point["optimizer.muon.lr"] for task in tasks["drop_in"]} == {1e-3}
    changed = {**whole, "study": {**whole["study"], "sweep": one}}
    changed["runs"] = [run for run in whole["runs"] if run["stage"] != "sweep"]
    changed["summary"] = study_summary.summarize(changed)
    assert changed["summary"]["methods"]["muon"]["point"] == {"optimizer.muon.lr": 0.02}
    text = study_tables.tables(changed)
    assert "; no sweep: 2 seeds at one point for each method." in text
    assert "end of its grid" not in text
    assert "sweep.svg" not in text


def test_without_runs_of_fewer_steps_none_are_claimed(whole: dict[str, Any]) -> None:
    changed = {**whole, "runs": [run for run in whole["runs"] if run["stage"] != "shorter"]}
    changed["summary"] = study_summary.summarize(changed)
    text = study_tables.tables(changed)
    assert "of the steps of adamw" not in text
    assert "of the time of adamw" not in text
    assert "not reached" not in text


def test_borders_are_named() -> None:
    values = {"lr": (1, 2, 3), "decay": (0.1, 0.2), "fixed": (5,)}
    losses = [9.0] * 6
    losses[2] = 1.0
    best = study_plan.find_best(values, losses)
    assert (best.point, best.loss) == ({"lr": 2, "decay": 0.1, "fixed": 5}, 1.0)
    assert best.border == ["decay"]
    assert study_plan.find_best(values, [None] * 6).point is None


def test_crossing_lies_between_two_runs() -> None:
    points = [(0.5, 3.0), (0.75, 2.0), (1.0, 1.5)]
    assert study_summary.crossing(points, 2.5) == (0.625, False)
    assert study_summary.crossing(points, 1.5) == (1.0, False)
    assert study_summary.crossing(points, 3.5) == (0.5, True)
    assert study_summary.crossing(points, 1.0) == (None, False)


def test_spread_counts_what_is_missing() -> None:
    found = study_summary.spread([1.0, None, 3.0])
    assert found == {"mean": 2.0, "low": 1.0, "high": 3.0, "n": 2, "diverged": 1}
    assert study_summary.spread([])["mean"] is None


def test_curves_are_means_of_neighbours() -> None:
    points: list[tuple[int, float | None]] = [(i, float(i)) for i in range(1, 6)]
    assert study_worker.thin(points, 2) == [[2.0, 4.5], [2.0, 4.5]]
    assert study_worker.thin([(1, None), (2, 4.0)], 9) == [[2], [4.0]]


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"seeds": [0, 1]}, "sweep_seed: got 0, expected none of seeds"),
        ({"seeds": [1, 1]}, "seeds: got (1, 1), expected different ones"),
        ({"shorter": [1.5]}, "shorter: got 1.5, expected shares in (0, 1)"),
        ({"method": "sgd"}, "method: got 'sgd', expected a method of sweep"),
        ({"variants": {"muon": {}}}, "variants: got 'muon', which is the name of a method"),
        ({"drop_in": {}}, "methods: like_adamw: expected it in sweep or in drop_in"),
        ({"sweeps": {}}, "sweeps: unknown key; the nearest valid key is sweep"),
        ({"variants": {"x": {"optimizer.muon.speed": 1}}}, "optimizer.muon.speed: unknown key"),
        ({"timing": {"steps": 0}}, "timing.steps: got 0, expected"),
        ({"drop_in": {"like_adamw": {"from": "adamw"}}}, "expected the keys 'from' and 'copy'"),
        (
            {"sweep": {"adamw": {"seed": [1]}, "muon": {"seed": [1, 2]}}},
            "sweep: got {'adamw': 1, 'muon': 2} points, expected equally many",
        ),
    ],
)
def test_refusals(
    changes: dict[str, Any], part: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path, **changes)
    assert command.main(["study", str(file), "--folder", str(tmp_path / "study")]) == 2
    assert part in capsys.readouterr().err
    assert not (tmp_path / "study" / "results.jsonl").exists()


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [("tiny", 0.8e6, 0.9e6), ("10m", 9e6, 11e6), ("50m", 48e6, 52e6), ("124m", 123e6, 126e6)],
)
def test_studies_of_the_repository(name: str, low: float, high: float) -> None:
    study, _ = load_study(ROOT / "configs" / "study" / f"{name}.yaml")
    plan = study_plan.plan(study, Path("x"), {})
    tasks = plan["sweep"] or plan["seeds"]
    with torch.device("meta"):
        size = sum(p.numel() for p in CausalLM(tasks[0].config.model).parameters())
    assert low < size < high
    assert len(study.seeds) >= 3
    done = {task.key: {"loss": float(i)} for i, task in enumerate(tasks)}
    assert all(study_plan.plan(study, Path("x"), done)[stage] for stage in ("seeds", "timing"))


# --- words and figures ------------------------------------------------------------------------


def test_sentences_say_where_the_method_does_not_win(whole: dict[str, Any]) -> None:
    changed = json.loads(json.dumps(whole))
    for run in changed["runs"]:
        if run["name"] == "muon" and run["stage"] in ("seeds", "shorter"):
            run["loss"] = 99.0
    changed["summary"] = study_summary.summarize(changed)
    text = study_tables.tables(changed)
    assert "muon does not reach the final loss of adamw in as many steps." in text
    assert "higher with every seed (2 pairs)" in text
    assert "not reached" in text
    for run in changed["runs"]:
        if run["name"] == "muon" and run["stage"] in ("seeds", "shorter"):
            run["loss"] = 1.0 / run["share"]
        if run["stage"] == "timing":
            run["ms"] |= {"step": 10.0 if run["name"] == "muon" else 1.0, "forward_backward": 0.5}
    changed["summary"] = study_summary.summarize(changed)
    text = study_tables.tables(changed)
    assert "muon needs at most 50% of the steps of adamw" in text
    assert "at most 500% of the time of adamw on this machine: it does not win there." in text
    assert "| 10.0 |" in text
    for run in of(changed, "timing", "adamw"):
        run["ms"]["forward_backward"] = 0.7
    changed["summary"] = study_summary.summarize(changed)
    text = study_tables.tables(changed)
    assert "Times of a step are left out" in text
    assert "of the time of adamw" not in text
    assert "| 10.0 |" not in text


def test_tables_are_put_between_their_marks(
    whole: dict[str, Any], path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page, file = tmp_path / "page.md", str(path.parent / "study" / "small.json")
    page.write_text("a\n<!-- begin of study small -->\nold\n<!-- end of study small -->\nb\n")
    assert command.main(["study", "--tables", file, "--into", str(page)]) == 0
    assert command.main(["study", "--tables", file]) == 0
    tables = capsys.readouterr().out.strip()
    begin, end = "<!-- begin of study small -->", "<!-- end of study small -->"
    assert page.read_text() == f"a\n{begin}\n\n{tables}\n\n{end}\nb\n"
    page.write_text("nothing")
    assert command.main(["study", "--tables", file, "--into", str(page)]) == 2
    assert "the page has no lines <!-- begin of study small -->" in capsys.readouterr().err
    assert command.main(["study", "--tables", str(page)]) == 2
    assert "is no JSON file of a study" in capsys.readouterr().err


def test_figures_are_the_same_bytes_each_time(whole: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    first, second = (study_figures.draw(whole, tmp_path / name) for name in ("a", "b"))
    kinds = ("loss", "sweep", "variants")
    assert [path.name for path in first] == [f"evidence-small-{kind}.svg" for kind in kinds]
    for one, other in zip(first, second, strict=True):
        ElementTree.fromstring(one.read_text())
        assert one.read_bytes() == other.read_bytes()
        assert f"](pictures/{one.name})" in study_tables.tables(whole)


def test_the_page_holds_what_was_measured() -> None:
    text, studies = PAGE.read_text(encoding="utf-8"), study_tables.read(MEASURED)
    advice = "python -m shardmuon study --tables docs/evidence/NAME.json --into docs/evidence.md"
    assert study_tables.with_tables(text, studies) == text, advice
    for found in studies:
        assert found["summary"] == json.loads(json.dumps(study_summary.summarize(found)))
        for kind in study_tables.pictures(found):
            assert (ROOT / f"docs/pictures/evidence-{found['name']}-{kind}.svg").exists()
    for name in {"tiny", "10m", "50m", "124m"} - {found["name"] for found in studies}:
        inside = text.partition(f"<!-- begin of study {name} -->")[2]
        inside = inside.partition(f"<!-- end of study {name} -->")[0]
        assert inside.strip() == "Not measured yet.", name


def test_claims_in_prose_are_those_of_the_studies() -> None:
    found = {whole["name"]: whole["summary"] for whole in study_tables.read(MEASURED)}
    prose = " ".join(PAGE.read_text(encoding="utf-8").partition("## Results")[0].split())
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    share = f"{found['10m']['shorter']['share']:.0%} of the steps"
    assert f"final loss in {share}, each with the best of nine" in readme
    assert f"and needs {share} for AdamW's final loss" in prose

    def against(study: str, name: str) -> float:
        mean: float = found[study]["methods"][name]["against"]["mean"]
        return mean

    def longer(study: str) -> str:
        times = found[study]["methods"]
        return f"{times['muon']['ms']['step'] / times['adamw']['ms']['step'] - 1:.0%} longer"

    assert f"Muon ends {-against('10m', 'muon'):.2f} nats below AdamW" in prose
    assert f"ends {-against('10m', 'muon_match_rms'):.2f} below AdamW there" in prose
    assert f"it ends {against('tiny', 'muon_match_rms'):.2f} *above* AdamW" in prose
    assert f"a step takes {longer('tiny')} on the tiny model" in prose
    assert f"it takes {longer('124m')}" in prose
    assert f"needs {found['tiny']['shorter']['time_share']:.0%} of AdamW's time" in prose
    normuon, spectral = (-against("10m", name) for name in ("normuon", "spectral"))
    assert f"by {normuon:.2f} and {spectral:.2f};" in prose
    for name in ("polar_express", "momentum_warmup"):
        difference = found["10m"]["methods"][name]["against"]
        assert difference["low"] <= 0 <= difference["high"]
    for name in ("cautious_decay", "block_periodic", "lion_rest"):
        assert found["10m"]["methods"][name]["against"]["low"] > 0


def test_the_page_explains_every_key() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for where, section in (
        ("", Study),
        ("timing.", study_config.Timing),
        ("drop_in.NAME.", study_config.DropIn),
    ):
        meanings = reference.meanings(section)
        for entry in dataclasses.fields(section):
            key = key_of(entry.name)
            if key != "timing":
                assert f"| `{where}{key}` | {meanings[key]} |" in text

"""The choice of method: what is measured, remembered, guessed, and never repeated."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from shardmuon.orthogonalize import choice
from shardmuon.orthogonalize.choice import Answer, Problem, choose_methods

GPU = torch.device("cuda", 0)
WIDE = Problem(4, 1024, 4096, "bfloat16", (2, 3))
SQUARE = Problem(8, 1024, 1024, "bfloat16", (2, 3))
SMALL = Problem(64, 64, 64, "bfloat16", (2, 3))
TIMES = {
    WIDE: {"standard": 9.0, "symmetric": 7.0, "gram": 5.0},
    SQUARE: {"standard": 3.0, "symmetric": 2.0, "gram": 2.5},
    SMALL: {"standard": 1.0, "symmetric": 0.98, "gram": 2.0},
}


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Problem]:
    """A GPU that is not there; the list of what was measured on it."""
    calls: list[Problem] = []

    def measure(problem: Problem, device: torch.device) -> dict[str, float]:
        assert device == GPU
        calls.append(problem)
        return TIMES[problem]

    monkeypatch.setattr(choice, "measure", measure)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Chip/1 (big)")
    monkeypatch.setenv("SHARDMUON_CACHE", str(tmp_path / "cache"))
    return calls


def test_the_quickest_is_taken_and_measured_once(measured: list[Problem]) -> None:
    methods = {WIDE: "gram", SQUARE: "symmetric", SMALL: "standard"}
    expected = {p: Answer(method, TIMES[p][method]) for p, method in methods.items()}
    assert choose_methods([SMALL, WIDE, SQUARE, WIDE], GPU) == expected
    assert measured == [WIDE, SQUARE, SMALL]  # the most work first
    assert choose_methods(expected, GPU) == expected
    assert len(measured) == 3


def test_a_near_tie_goes_to_the_standard_method() -> None:
    near, clear = ({"standard": 1.0, "symmetric": ms, "gram": 2.0} for ms in (0.98, 0.96))
    assert choice.fastest(near) == ("standard", 1.0)
    assert choice.fastest(clear) == ("symmetric", 0.96)


def test_the_cache_keeps_what_others_wrote(measured: list[Problem]) -> None:
    choose_methods([WIDE], GPU)
    choose_methods([SQUARE], GPU)
    choose_methods([WIDE, SQUARE], GPU)
    assert measured == [WIDE, SQUARE]
    file = choice.cache_file(GPU)
    assert list(file.parent.iterdir()) == [file]
    assert json.loads(file.read_text())[str(WIDE)] == TIMES[WIDE]


def test_the_cache_belongs_to_device_and_versions(
    measured: list[Problem], monkeypatch: pytest.MonkeyPatch
) -> None:
    name = choice.cache_file(GPU).name
    assert name.startswith("Chip-1-big-torch-")
    for target, attribute, value in (
        (torch.cuda, "get_device_name", lambda _: "Chip 2"),
        (torch, "__version__", "9.9"),
        (choice, "KERNEL_VERSION", 99),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(target, attribute, value)
            assert choice.cache_file(GPU).name != name


@pytest.mark.parametrize("content", ["", "{", "[]", '{"x": 3}', '{"x": {"gram": 1}}', "\x00"])
def test_a_spoilt_cache_is_measured_again(measured: list[Problem], content: str) -> None:
    file = choice.cache_file(GPU)
    file.parent.mkdir(parents=True)
    file.write_text(content)
    assert choose_methods([WIDE], GPU)[WIDE].method == "gram"
    assert measured == [WIDE]
    assert json.loads(file.read_text()) == {str(WIDE): TIMES[WIDE]}


def test_without_time_methods_are_guessed_and_not_remembered(measured: list[Problem]) -> None:
    guesses = choose_methods(TIMES, GPU, budget_s=0.0)
    assert guesses == {problem: Answer(choice.guess(problem)) for problem in TIMES}
    assert not measured
    assert not choice.cache_file(GPU).exists()
    choose_methods(TIMES, GPU)
    assert len(measured) == 3


def test_a_cache_that_cannot_be_written_costs_a_warning(
    measured: list[Problem], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SHARDMUON_CACHE", str(tmp_path / "file"))
    with pytest.warns(UserWarning, match="measured again by the next process"):
        assert choose_methods([WIDE], GPU)[WIDE].method == "gram"


def test_a_cpu_takes_the_standard_method(measured: list[Problem]) -> None:
    answer = choose_methods(TIMES, torch.device("cpu"))
    assert answer == dict.fromkeys(TIMES, Answer("standard"))
    assert not measured


def test_the_home_of_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Chip")
    monkeypatch.delenv("SHARDMUON_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert choice.cache_file(GPU).parent == tmp_path / "xdg" / "shardmuon"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert choice.cache_file(GPU).parent == tmp_path / ".cache" / "shardmuon"


def test_a_measurement_times_every_method() -> None:
    times = choice.measure(Problem(2, 16, 32, "float32", (2, 1)), torch.device("cpu"))
    assert set(times) == {"standard", "symmetric", "gram"}
    assert all(ms > 0 for ms in times.values())

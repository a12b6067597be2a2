"""Measures of orthogonality, and the command that prints them."""

from __future__ import annotations

import math

import pytest
import torch

from shardmuon import orthogonality_error, singular_value_range
from shardmuon.tools import accuracy, bench_ns
from shardmuon.tools.command import main


def test_orthogonal_matrices_have_no_error() -> None:
    q, _ = torch.linalg.qr(torch.randn(9, 5, generator=torch.Generator().manual_seed(0)).double())
    for matrix in (q, q.mT):
        assert orthogonality_error(matrix) < 1e-14
        assert singular_value_range(matrix) == pytest.approx((1.0, 1.0))


def test_values_are_those_of_the_definition() -> None:
    matrix = torch.diag(torch.tensor([0.5, 2.0]))
    assert orthogonality_error(matrix) == pytest.approx(math.sqrt((0.75**2 + 3.0**2) / 2))
    assert singular_value_range(matrix) == pytest.approx((0.5, 2.0))
    assert singular_value_range(torch.zeros(0, 4)) == (0.0, 0.0)
    assert orthogonality_error(torch.zeros(0, 4)) == 0.0


def test_the_command_prints_all_tables(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(bench_ns, "CPU_SHAPES", ((1, 16, 24),))
    monkeypatch.setattr(bench_ns, "ROUNDS", 2)
    monkeypatch.setattr(accuracy, "SHAPES", ((16, 24),))
    assert main(["bench", "ns"]) == 0
    lines = capsys.readouterr().out.splitlines()
    cubic = [line.split() for line in lines if line.startswith("cubic")]
    assert [row[1] for row in cubic[:3]] == ["standard", "symmetric", "gram"]
    errors = [float(number) for number in cubic[0][2:]]
    assert errors == sorted(errors, reverse=True)  # it converges, if slowly
    assert errors[-1] < 0.05 < errors[0]
    assert any(line.startswith("1 x 16 x 24") for line in lines)
    rows = [row for row in cubic if "float32" in row[2:4]]
    assert [row[1:4] for row in rows] == [
        ["standard", "float32", "float32"],
        ["symmetric", "float32", "float32"],
        ["symmetric", "bfloat16", "float32"],
        ["gram", "float32", "float32"],
        ["gram", "bfloat16", "float32"],
    ]
    assert all(0 < float(number.rstrip(",")) < 0.02 for row in rows for number in row[4:])

"""Prints what became of the inputs that the fuzz tests have drawn."""

from __future__ import annotations

from typing import Any

from tests.fuzz.inputs import outcomes


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """One line for each kind of input."""
    for kind, counts in outcomes.items():
        parts = ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))
        terminalreporter.write_line(f"fuzz: {kind}: {counts.total()} inputs ({parts})")

"""docs/configuration.md is what the dataclasses say."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import get_type_hints

from shardmuon.training import reference
from shardmuon.training.config import Config
from shardmuon.training.load import key_of

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"


def sections(section: type) -> list[type]:
    nested = [h for h in get_type_hints(section).values() if dataclasses.is_dataclass(h)]
    return [section, *(s for h in nested if isinstance(h, type) for s in sections(h))]


def test_the_page_is_up_to_date() -> None:
    advice = "run: python -m shardmuon.training.reference > docs/configuration.md"
    assert PAGE.read_text() == reference.render(), advice


def test_every_key_has_a_meaning() -> None:
    for section in sections(Config):
        docs = reference.meanings(section)
        for entry in dataclasses.fields(section):
            nested = dataclasses.is_dataclass(get_type_hints(section)[entry.name])
            assert nested or docs.get(key_of(entry.name)), f"{section.__name__}.{entry.name}"


def test_types_ranges_and_defaults_are_shown() -> None:
    page = reference.render()
    row = "| `optimizer.muon.momentum` | number in [0, 1) | `0.95` |"
    assert row in page
    assert '| `optimizer.runtime.exchange` | "auto", "all_gather" | `"auto"` |' in page
    assert "| `clipping.max_norm` | number in (0, 1e+30] or null | `1.0` |" in page

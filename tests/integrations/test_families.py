"""Routing of models of transformers: a table per family, each row of which was judged by a person.

`python -m tests.integrations.test_families` prints the tables anew. Look at every changed row
before you keep it: the file says what is right, not what the library does.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import shardmuon
from tests.integrations import families

GOLDEN = Path(__file__).parent / "golden" / "routing.txt"


def tables() -> dict[str, list[str]]:
    """The rows of each family in the golden file."""
    found: dict[str, list[str]] = {}
    for line in GOLDEN.read_text(encoding="utf-8").splitlines():
        if line.startswith("  "):
            found[list(found)[-1]].append(line.strip())
        else:
            found[line] = []
    return found


def test_every_family_has_a_table() -> None:
    assert list(tables()) == list(families.FAMILIES)


@pytest.mark.parametrize("family", families.FAMILIES)
def test_family_is_routed_without_overrides(family: str) -> None:
    assert families.rows(families.build(family)) == tables()[family]


def test_what_is_unknown_is_listed() -> None:
    groups = shardmuon.param_groups(families.build("vit"))
    assert [row.name for row in groups.unknown] == [
        "vit.embeddings.cls_token",
        "vit.embeddings.position_embeddings",
        "vit.embeddings.patch_embeddings.projection.weight",
    ]
    assert "unknown 4-D parameter of Conv2d" in groups.report()
    assert shardmuon.param_groups(families.build("llama")).unknown == ()


if __name__ == "__main__":
    for name in families.FAMILIES:
        print(name, *families.rows(families.build(name)), sep="\n  ")

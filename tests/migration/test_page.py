"""The examples of docs/migration.md run from top to bottom, in one process."""

from __future__ import annotations

import textwrap

from tests.test_documents import ROOT, examples


def test_the_examples_of_the_page_run() -> None:
    names: dict[str, object] = {"__name__": "page"}
    blocks = examples(ROOT / "docs" / "migration.md")
    for block in blocks:
        exec(compile(textwrap.dedent(block), "docs/migration.md", "exec"), names)
    assert len(blocks) >= 6

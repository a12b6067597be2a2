"""docs/supported.md says what the tests prove, and nothing else."""

from __future__ import annotations

from tests import support


def test_the_page_is_made_from_the_tests() -> None:
    written = (support.ROOT.parent / "docs" / "supported.md").read_text(encoding="utf-8")
    assert written == support.page(), "run python -m tests.support > docs/supported.md"
    assert written.count("\n| ") > 10

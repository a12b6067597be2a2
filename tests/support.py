"""The page "What is supported", made from the tests that prove it.

A test that proves a row carries `@pytest.mark.supports("row")`. `python -m tests.support` prints
the page; tests/test_support.py compares it with docs/supported.md.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parent

_HEAD = """# What is supported

Made by `python -m tests.support > docs/supported.md` from the tests that prove each row. Unless a
row says otherwise, a test demands that parameters and momentum are equal in bits to those of one
process, given the same gradients, on CPU.

| | proved by |
|---|---|
"""


def page() -> str:
    """The page as Markdown, rows in alphabetical order."""
    rows = defaultdict(list)
    for path in sorted(ROOT.rglob("test_*.py")):
        for name, features in _marked(path):
            for feature in features:
                rows[feature].append(f"`{path.relative_to(ROOT.parent)}::{name}`")
    lines = [f"| {feature} | {'<br>'.join(rows[feature])} |" for feature in sorted(rows)]
    return _HEAD + "\n".join(lines) + "\n"


def _marked(path: Path) -> list[tuple[str, list[str]]]:
    """(test, rows that it proves) of one file."""
    found = []
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef):
            calls = [each for each in node.decorator_list if isinstance(each, ast.Call)]
            features = [
                str(ast.literal_eval(argument))
                for call in calls
                if ast.unparse(call.func) == "pytest.mark.supports"
                for argument in call.args
            ]
            found.append((node.name, features))
    return found


if __name__ == "__main__":
    print(page(), end="")

"""Collectives are called in one file: the bans that keep it so, tested to bite.

Ruff sees functions; methods that hide a collective are found here, by name.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HIDDEN_COLLECTIVES = {"full_tensor", "redistribute"}


def banned_names() -> list[str]:
    """The functions and modules that pyproject.toml bans."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    tidy_imports = project["tool"]["ruff"]["lint"]["flake8-tidy-imports"]
    return sorted(tidy_imports["banned-api"])


def findings(code: str, pretended_path: str) -> int:
    """How many uses of a banned name ruff finds in `code`, taken for the file at that path."""
    command = [sys.executable, "-m", "ruff", "check", "--output-format", "json", "--no-cache"]
    command += ["--select", "TID251", "--stdin-filename", pretended_path, "-"]
    done = subprocess.run(command, cwd=ROOT, input=code, capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stderr
    return len(json.loads(done.stdout))


@pytest.mark.parametrize(
    "path", ["shardmuon/muon.py", "shardmuon/exchange/pipeline.py", "train.py"]
)
def test_each_banned_name_is_found_as_an_attribute_and_as_an_import(path: str) -> None:
    names = banned_names()
    uses = "".join(f"print({name})\n" for name in names)
    split = [name.rpartition(".") for name in names]
    imports = "".join(f"from {module} import {name}\n" for module, _, name in split)
    assert findings("import torch.distributed.nn.functional\n" + uses, path) >= len(names)
    assert findings(imports, path) == len(names)


def test_an_alias_is_seen_through() -> None:
    code = "import torch.distributed as dist\ndist.all_reduce(1)\n"
    assert findings(code, "shardmuon/muon.py") == 1


def test_only_the_collectives_file_and_tests_may_use_them() -> None:
    code = "import torch.distributed as dist\ndist.all_reduce(1)\n"
    assert findings(code, "shardmuon/exchange/collectives.py") == 0
    assert findings(code, "tests/exchange/test_pipeline.py") == 0


def test_no_method_hides_a_collective_outside_exchange() -> None:
    files = [ROOT / "train.py", *(ROOT / "shardmuon").rglob("*.py")]
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno} {node.attr}"
        for path in files
        if ROOT / "shardmuon" / "exchange" not in path.parents
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and node.attr in HIDDEN_COLLECTIVES
    ]
    assert found == []

"""The documents: their links lead somewhere and their Python examples run as they stand."""

from __future__ import annotations

import ast
import contextlib
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from shardmuon.rules import ELEMENT_RULES, RULES, ElementRule, UpdateRule
from tests import ranks
from tests.conftest import Worlds

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])

LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
PYTHON = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def anchors(document: Path) -> set[str]:
    """The names that GitHub gives to the headings of `document`."""
    headings = HEADING.findall(FENCED.sub("", document.read_text(encoding="utf-8")))
    return {re.sub(r"[^\w\- ]", "", heading).lower().replace(" ", "-") for heading in headings}


def examples(document: Path) -> list[str]:
    """The Python blocks of `document`, in order."""
    return PYTHON.findall(document.read_text(encoding="utf-8"))


def broken_links(document: Path) -> list[str]:
    """Relative links of `document` to files or headings that are not there."""
    broken = []
    for link in LINK.findall(FENCED.sub("", document.read_text(encoding="utf-8"))):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (document.parent / path).resolve() if path else document
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    return broken


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_relative_links_lead_somewhere(document: Path) -> None:
    assert broken_links(document) == []


def test_broken_links_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# Two Words\n[a](page.md) [b](#two-words) [c](no.md) [d](page.md#no) [e](https://x.y)\n"
        "```\n# no heading\n[f](no.md)\n```\n[g](#no-heading)\n"
    )
    assert broken_links(page) == ["no.md", "page.md#no", "#no-heading"]


def test_every_page_is_in_the_index() -> None:
    listed = set(LINK.findall((ROOT / "docs" / "README.md").read_text(encoding="utf-8")))
    folder = ROOT / "docs"
    pages = {path.relative_to(folder).as_posix() for path in folder.rglob("*.md")} - {"README.md"}
    assert pages <= listed


def test_the_guide_has_every_group_key_with_its_default() -> None:
    text = (ROOT / "docs" / "guide.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| (\w+) \| (`.*|those of muon.*) \|$", text, re.MULTILINE))
    rules: dict[str, UpdateRule | ElementRule] = {**RULES, **ELEMENT_RULES}
    for algorithm, rule in rules.items():
        row = rows[algorithm].replace("those of muon", rows["muon"])
        shown = {k: ast.literal_eval(value) for k, value in re.findall(r"`(\w+)=([^`]+)`", row)}
        assert shown == {k: key.default for k, key in rule.keys.items() if k != "step"}


def test_the_two_commands_are_in_the_first_screen() -> None:
    screen = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()[:20]
    commands = [" ".join(line.split()[:2]) for line in screen if line.startswith("    ")]
    assert commands[:2] == ["make train", "make test"]


def test_the_example_of_the_readme_runs_under_torchrun(tmp_path: Path) -> None:
    (example,) = examples(ROOT / "README.md")
    script = tmp_path / "usage.py"
    script.write_text(example, encoding="utf-8")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*torchrun, "--nproc-per-node", "2", str(script)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    assert "1.weight   192x64  muon   weight of a hidden linear layer" in done.stdout
    assert "2 matrices on 2 rank(s)" in done.stdout
    assert "StepStats(matrices_orthogonalized=1," in done.stdout


def _run_examples(page: str, folder: str) -> int:
    """Run a page from top to bottom on this rank, with `folder` as working directory."""
    names: dict[str, object] = {"__name__": "page"}
    blocks = examples(ROOT / "docs" / page)
    with contextlib.chdir(folder):
        for block in blocks:
            exec(compile(textwrap.dedent(block), f"docs/{page}", "exec"), names)
    return len(blocks)


@pytest.mark.parametrize("page", ["guide.md", "checkpoints.md"])
def test_the_examples_of_a_page_run_on_two_ranks(
    page: str, pools: Worlds, shared_folder: str
) -> None:
    if ranks.backend() != "gloo":
        pytest.skip("the examples compute on the CPU")
    counts = pools.run(2, _run_examples, page, shared_folder)
    assert counts[0] == counts[1] >= 5

"""The documentation site: it builds strictly, every page is in its nav, and what it says is there.

Needs no network.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml

import shardmuon
from docs import draw

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site."""
    pytest.importorskip("mkdocs")
    folder = tmp_path_factory.mktemp("site")
    # Material prints an advertisement about MkDocs 2 to stderr, which is no warning of the build.
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
        cwd=ROOT,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    return folder


class _Links(HTMLParser):
    """Addresses that a page links to or loads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for key, value in attrs:
            if value and key == "href" and tag == "a":
                self.links.append(value)
            elif value and (key == "src" or (key == "href" and tag == "link")):
                self.loaded.append(value)


def page(site: Path, name: str) -> Path:
    """The HTML file of a Markdown page."""
    stem = name.removesuffix(".md")
    if stem.rpartition("/")[2] in ("README", "index"):
        return site / stem.rpartition("/")[0] / "index.html"
    return site / stem / "index.html"


def test_every_page_is_reachable_from_the_nav(site: Path) -> None:
    start = site / "index.html"
    found = _Links(start.read_text(encoding="utf-8")).links
    reached = {(site / link.partition("#")[0]).resolve() for link in found if "://" not in link}
    names = [path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")]
    for name in [*names, "start.md", "contributing.md", "changelog.md"]:
        html = page(site, name)
        assert html.is_file(), name
        assert html.resolve().parent in reached, name


def test_links_lead_to_files_of_the_site_and_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    for html in site.rglob("*.html"):
        if html.name == "404.html":
            continue
        links = _Links(html.read_text(encoding="utf-8"))
        assert [link for link in links.loaded if "://" in link or link.startswith("//")] == []
        for link in links.links:
            path = link.partition("#")[0]
            if path and "://" not in path and not path.startswith("mailto:"):
                assert (html.parent / path).exists(), (html, link)


def test_tables_are_tables(site: Path) -> None:
    """A table whose header is not its first row is text to Python-Markdown, as it is to GitHub."""
    for html in site.rglob("*.html"):
        assert "<p>| " not in html.read_text(encoding="utf-8"), html


def test_the_build_finds_broken_links(tmp_path: Path) -> None:
    """What `--strict` promises: a link to nothing, and a page in no nav, end the build."""
    pytest.importorskip("mkdocs")
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "README.md").write_text("# One\n[a](no.md) [b](#none)\n")
    (tmp_path / "docs" / "lost.md").write_text("# Lost\n")
    small = {**config, "hooks": [], "nav": ["README.md"], "plugins": [], "theme": "mkdocs"}
    small["markdown_extensions"] = ["tables"]
    (tmp_path / "mkdocs.yml").write_text(yaml.safe_dump(small))
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 1
    for problem in ("no.md", "#none", "lost.md"):
        assert problem in done.stderr, problem


def test_the_reference_has_every_public_name(site: Path) -> None:
    text = (site / "api" / "index.html").read_text(encoding="utf-8")
    for name in set(shardmuon.__all__) - {"__version__"}:
        assert re.search(rf'id="shardmuon\.[\w.]*\b{name}"', text), name
    assert "__version__" in text
    assert ":class:" not in text


@pytest.mark.parametrize("name", draw.PICTURES)
def test_pictures_are_what_the_program_draws(name: str) -> None:
    path = DOCS / "pictures" / f"{name}.svg"
    drawn = path.read_text(encoding="utf-8")
    assert drawn == draw.PICTURES[name](), "run python -m docs.draw"
    ElementTree.fromstring(drawn)


def test_the_picture_of_owners_shows_the_owners_of_its_plan() -> None:
    plan = draw.block_plan()
    words = [element.text for element in ElementTree.fromstring(draw.ownership()).iter()]
    order = sorted(plan.owners())
    shown = [word for word in words if word and re.fullmatch(r"rank \d", word)]
    assert shown[4::5] == [f"rank {plan.owners()[name]}" for name in order]
    assert [name for name in words if name in order] == order


def _literals() -> str:
    """All text in the library's source, f-strings without their values, one a line."""
    lines = []
    for path in (ROOT / "shardmuon").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = [part.value for part in node.values if isinstance(part, ast.Constant)]
                lines.append("...".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                lines.append(node.value)
    return "\n".join(lines)


def test_messages_of_the_faq_are_messages_of_the_library() -> None:
    text = (DOCS / "faq.md").read_text(encoding="utf-8").partition("## Messages")[2]
    messages = re.findall(r"^\| `([^`]+)` \|", text, re.MULTILINE)
    source = _literals()
    assert len(messages) >= 15
    assert [message for message in messages if message not in source] == []

"""What the site does beyond MkDocs: names with * in the nav, and files outside of docs/.

Pages link to the repository as they do on GitHub (`../README.md`). README, CONTRIBUTING and
CHANGELOG become pages of the site; any other file that a page links to is copied to `files/`.
"""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

__all__ = ["on_config", "on_files", "on_page_content", "on_page_markdown"]

ROOT = Path(__file__).resolve().parents[1]
PAGES = {
    "README.md": "start.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
SOURCES = {page: source for source, page in PAGES.items()}
FENCE = re.compile(r"(^ *```.*?^ *```)", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(\[[^\]]*\]\()([^)\s#]+)(#[^)\s]*)?\)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Fill in names with *."""
    assert config.nav is not None
    config.nav = _expand(config.nav, Path(config.docs_dir))
    return config


def _expand(entries: list[Any], folder: Path) -> list[Any]:
    out: list[Any] = []
    for entry in entries:
        if isinstance(entry, Mapping):
            ((title, value),) = entry.items()
            value = _expand(value, folder) if isinstance(value, list) else value
            out += [{title: value}] if value else []
        elif "*" in entry:
            out += sorted(path.relative_to(folder).as_posix() for path in folder.glob(entry))
        else:
            out.append(entry)
    return out


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages and files that lie outside of docs/."""
    for source, page in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=text))
    linked = set()
    for file in files.documentation_pages():
        for link in LINK.finditer(FENCE.sub("", file.content_string)):
            target = _target(file.src_uri, link[2])
            if target and target not in PAGES and (ROOT / target).is_file():
                linked.add(target)
    for target in sorted(linked):
        files.append(File.generated(config, f"files/{target}", abs_src_path=str(ROOT / target)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links to files of the repository lead to what the site has of them."""
    uri = page.file.src_uri
    parts = FENCE.split(markdown)
    return "".join(part if n % 2 else _rewrite(part, uri) for n, part in enumerate(parts))


def _rewrite(text: str, uri: str) -> str:
    def link(found: re.Match[str]) -> str:
        target = _target(uri, found[2])
        if uri in SOURCES and target is None and "://" not in found[2]:
            there = posixpath.relpath(found[2], "docs")
        elif target is None:
            return found[0]
        else:
            there = PAGES.get(target, f"files/{target}")
        here = posixpath.relpath(there, posixpath.dirname(uri) or ".")
        return f"{found[1]}{here}{found[3] or ''})"

    return LINK.sub(link, text)


def _target(uri: str, link: str) -> str | None:
    """The path in the repository, if `link` of the page leads to a file outside of docs/."""
    if "://" in link or link.startswith("mailto:"):
        return None
    base = posixpath.dirname(SOURCES.get(uri, f"docs/{uri}"))
    path = os.path.normpath(posixpath.join(base, link))
    return None if path.split(os.sep)[0] == "docs" else path


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Sphinx roles, which torch's docstrings have and Python readers know, are plain code here."""
    return re.sub(r":(?:class|func|meth):(?=<code)", "", html)

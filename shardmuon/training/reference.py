"""The configuration reference page, rendered from the dataclasses.

Owns the text of docs/configuration.md; a test compares the two. `python -m
shardmuon.training.reference` prints it. Must not hold any key, default or meaning itself.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import sys
import types
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from shardmuon.limits import Range
from shardmuon.training.config import Config
from shardmuon.training.load import key_of

__all__ = ["meanings", "render"]

_INTRO = """\
# Configuration reference

Written by `python -m shardmuon.training.reference`; change the docstrings of
`shardmuon/training/config.py` and `inputs.py` instead of this page.

One YAML file is one run: `train.py CONFIG [key.path=value ...]`. A key that is left out takes its
default; `key.path=value` arguments override the file and are read and checked the same way, for
example `optimizer.muon.lr=5e-3` or `checkpoint.resume=none`. Unknown keys, wrong types and values
out of range end the run with exit code 2. Numbers follow YAML 1.2 (`1e-4` is a number, `off` is
text).
"""


def meanings(section: type) -> dict[str, str]:
    """Key -> meaning, from the `name: text` paragraphs of a class docstring."""
    found: dict[str, str] = {}
    names = {key_of(entry.name) for entry in dataclasses.fields(section)}
    current = ""
    for line in inspect.cleandoc(section.__doc__ or "").splitlines():
        start = re.match(r"(\w+): (.*)", line)
        if start and start[1] in names:
            current = start[1]
            found[current] = start[2]
        elif current and line.startswith(" "):
            found[current] += " " + line.strip()
        else:
            current = ""
    return found


def render() -> str:
    """The whole page as markdown."""
    return _INTRO + "".join(_section(Config, ""))


def _section(section: type, where: str) -> list[str]:
    title = f"`{where[:-1]}`" if where else "Top level"
    summary = inspect.cleandoc(section.__doc__ or "").split("\n\n")[0].replace("\n", " ")
    hints = get_type_hints(section, include_extras=True)
    docs = meanings(section)
    rows, nested = [], []
    for entry in dataclasses.fields(section):
        hint, key = hints[entry.name], key_of(entry.name)
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            nested += _section(hint, f"{where}{key}.")
            continue
        cells = (f"`{where}{key}`", _type(hint), f"`{_default(entry)}`", docs[key])
        rows.append(f"| {' | '.join(cells)} |\n")
    head = [f"\n## {title}\n\n{summary}\n"]
    if rows:
        head += ["\n| key | type | default | meaning |\n|---|---|---|---|\n", *rows]
    return head + nested


def _default(entry: dataclasses.Field[Any]) -> str:
    value = entry.default
    return json.dumps(list(value) if isinstance(value, tuple) else value)


def _type(hint: Any) -> str:
    """A type as a reader of YAML says it."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Annotated:
        limits = [str(part) for part in parts[1:] if isinstance(part, Range)]
        return " ".join([_type(parts[0]), *limits])
    if origin in (Union, types.UnionType):
        return " or ".join("null" if part is type(None) else _type(part) for part in parts)
    if origin is Literal:
        return ", ".join(f'"{choice}"' for choice in parts)
    if origin is tuple:
        if parts[-1] is Ellipsis:
            return f"list of {_type(parts[0])}"
        return f"list of {len(parts)}, each a {_type(parts[0])}"
    return {int: "whole number", float: "number", bool: "true or false", str: "text"}[hint]


if __name__ == "__main__":
    sys.stdout.write(render())

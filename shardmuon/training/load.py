"""From a YAML file and `key.path=value` arguments to a checked `Config`.

Owns YAML reading (numbers by the YAML 1.2 rule, so that `1e-4` is a number and `off` is text),
type checks and the text of input errors. Must not import torch or start anything: bad input ends
here, before a process group exists.
"""

from __future__ import annotations

import dataclasses
import re
import types
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml

from shardmuon.limits import advice, choices, nearest, show
from shardmuon.training.config import Config

__all__ = ["ConfigError", "as_tree", "convert", "differences", "key_of", "load", "read_tree"]

T = TypeVar("T")


class ConfigError(Exception):
    """The user's input is wrong; the text is one line that says where, what came, what was
    expected."""

    def __init__(self, text: str) -> None:
        super().__init__(" ".join(text.split()))  # keys and values may have line breaks


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader with the scalar rules of YAML 1.2 and without duplicate keys."""


# https://yaml.org/spec/1.2.2/#1032-tag-resolution. PyYAML's own rules are YAML 1.1: `1e-4` is
# text there, `off` is False, `1:30` is 90 and `012` is 10.
_SCALARS = (
    ("null", r"~|null|Null|NULL|", ("~", "n", "N", "")),
    ("bool", r"true|True|TRUE|false|False|FALSE", tuple("tTfF")),
    ("int", r"[-+]?[0-9]+", tuple("-+0123456789")),
    (
        "float",
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        tuple("-+0123456789."),
    ),
)
_Loader.yaml_implicit_resolvers = {}
for _name, _pattern, _first in _SCALARS:
    _Loader.add_implicit_resolver(
        f"tag:yaml.org,2002:{_name}", re.compile(rf"^(?:{_pattern})$"), list(_first)
    )


def _construct_int(loader: _Loader, node: yaml.ScalarNode) -> int:
    return int(node.value)


def _construct_mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: set[str] = set()
    for key, _ in node.value:
        if not isinstance(key, yaml.ScalarNode):
            raise yaml.MarkedYAMLError(problem="a key that is no text", problem_mark=key.start_mark)
        if key.value in seen:
            raise yaml.MarkedYAMLError(
                problem=f"key '{key.value}' twice", problem_mark=key.start_mark
            )
        seen.add(key.value)
    return loader.construct_mapping(node, deep=True)


_Loader.add_constructor("tag:yaml.org,2002:int", _construct_int)
_Loader.add_constructor("tag:yaml.org,2002:map", _construct_mapping)


def load(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read the YAML file at `path`, apply `key.path=value` overrides and check everything.

    Raises ConfigError.
    """
    name = str(path)
    tree = read_tree(Path(path), name)
    config = convert(Config, tree, "", name)
    if overrides:
        tree = _unshared(tree)
        for argument in overrides:
            _override(tree, argument)
        config = convert(Config, tree, "", "command line")
    assert isinstance(config, Config)
    return config


def as_tree(section: Any) -> dict[str, Any]:
    """A section as nested dicts, lists, numbers and text, ready for JSON; `load` reads it back."""
    tree: dict[str, Any] = {}
    for entry in dataclasses.fields(section):
        value = getattr(section, entry.name)
        if dataclasses.is_dataclass(value):
            value = as_tree(value)
        tree[key_of(entry.name)] = list(value) if isinstance(value, tuple) else value
    return tree


def key_of(name: str) -> str:
    """The YAML key of a field: a word of Python's own has an underscore behind it there."""
    return name.removesuffix("_")


def differences(old: dict[str, Any], new: dict[str, Any], where: str = "") -> list[str]:
    """Lines `key.path: old -> new` for all values that differ between two trees."""
    lines = []
    for key in sorted(old.keys() | new.keys()):
        before, after = old.get(key), new.get(key)
        if isinstance(before, dict) and isinstance(after, dict):
            lines += differences(before, after, f"{where}{key}.")
        elif before != after:
            lines.append(f"{where}{key}: {before} -> {after}")
    return lines


def _parse(text: str, source: str) -> Any:
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise ConfigError(
            f"{source}: {place}not valid YAML ({problem}); "
            "expected `key: value` lines, equally indented inside a section"
        ) from None
    except RecursionError:
        raise ConfigError(f"{source}: sections or lists are nested too deeply") from None
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        # What constructors raise for `!!int x` and for numbers of thousands of digits.
        raise ConfigError(f"{source}: not valid YAML ({show(error)})") from None


def _unshared(tree: Any) -> Any:
    """A copy in which no two sections are one dict, as an anchor and its aliases are in YAML."""
    if isinstance(tree, dict):
        return {key: _unshared(value) for key, value in tree.items()}
    return tree


def read_tree(path: Path, name: str) -> dict[Any, Any]:
    """The sections of the YAML file at `path`, called `name` in messages. Raises ConfigError."""
    if not _is_text(name):
        raise ConfigError(f"{show(name)}: cannot be read (not a file's name)")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise ConfigError(f"{name}: cannot be read ({reason}); expected a YAML file") from None
    tree = _parse(text, name)
    if tree is None:
        raise ConfigError(f"{name}: the file is empty; expected sections such as `model:`")
    if not isinstance(tree, dict):
        raise ConfigError(f"{name}: got {_show(tree)}, expected sections such as `model:`")
    return tree


def _override(tree: dict[Any, Any], argument: str) -> None:
    """Put one `key.path=value` into the raw tree, in place."""
    path, equals, text = argument.partition("=")
    keys = path.split(".")
    if not equals or not all(keys):
        raise ConfigError(f"command line: got '{argument}', expected key.path=value")
    node = tree
    for depth, key in enumerate(keys[:-1], 1):
        if node.get(key) is None:
            node[key] = {}
        node = node[key]
        if not isinstance(node, dict):
            raise ConfigError(
                f"command line: {path}: unknown key, {'.'.join(keys[:depth])} is not a section"
            )
    node[keys[-1]] = _parse(text, f"command line: {path}")


def convert(section: type[T], tree: Any, where: str, source: str) -> T:
    """Make the dataclass `section` from a raw tree; `where` is its key path with a final dot.

    source: where the tree is from, for messages. Raises ConfigError.
    """
    if tree is None:
        tree = {}
    if not isinstance(tree, dict):
        raise ConfigError(
            f"{source}: {where[:-1]}: got {_show(tree)}, expected a section with keys"
        )
    hints = get_type_hints(section, include_extras=True)
    fields = {key_of(name): name for name in hints}
    values: dict[str, Any] = {}
    for key, raw in tree.items():
        if key not in fields:
            raise ConfigError(
                f"{source}: {where}{key}: unknown key; {_nearest(key, where, fields)}"
            )
        values[fields[key]] = _value(hints[fields[key]], raw, f"{where}{key}", source)
    try:
        return section(**values)
    except ValueError as error:
        text = str(error).removeprefix("runtime.")
        raise ConfigError(f"{source}: {where}{text}") from None


def _nearest(key: Any, where: str, keys: Iterable[str]) -> str:
    """Advice for an unknown key: the nearest here, else the nearest anywhere, else all here."""
    here = {name: f"{where}{name}" for name in keys}
    everywhere = {path.rpartition(".")[2]: path for path in _paths(Config, "")}
    for names in (here, everywhere):
        close = nearest(key, names)
        if close:
            return f"the nearest valid key is {names[close]}"
    return f"expected one of {', '.join(here.values())}"


def _paths(section: type, where: str) -> list[str]:
    found = []
    for name, hint in get_type_hints(section).items():
        key = key_of(name)
        found.append(where + key)
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            found += _paths(hint, f"{where}{key}.")
    return found


def _value(hint: Any, raw: Any, where: str, source: str) -> Any:
    """Check `raw` against a type annotation; returns the value to store (tuples for lists)."""
    if hint is Any:
        return raw
    if get_origin(hint) is Annotated:
        return _value(get_args(hint)[0], raw, where, source)
    if get_origin(hint) is Mapping:
        return _mapping(get_args(hint)[1], raw, where, source)
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return convert(hint, raw, f"{where}.", source)
    if get_origin(hint) in (Union, types.UnionType):
        if raw is None and type(None) in get_args(hint):
            return None
        parts = [part for part in get_args(hint) if part is not type(None)]
        lists = [part for part in parts if get_origin(part) is tuple and isinstance(raw, list)]
        return _value((lists or parts)[0], raw, where, source)
    if get_origin(hint) is tuple:
        return _items(hint, raw, where, source)
    return _scalar(hint, raw, where, source)


def _scalar(hint: Any, raw: Any, where: str, source: str) -> Any:
    """A number, text, truth value or name against its type."""
    if get_origin(hint) is Literal:
        accepted = isinstance(raw, str) and raw in get_args(hint)
    elif hint is float:
        accepted = isinstance(raw, int | float) and not isinstance(raw, bool)
    elif hint is str:
        accepted = isinstance(raw, str) and _is_text(raw)
    else:
        accepted = isinstance(raw, hint) and not (hint is int and isinstance(raw, bool))
    if not accepted:
        near = advice(raw, choices(hint))
        raise ConfigError(f"{source}: {where}: got {_show(raw)}, expected {_describe(hint)}{near}")
    try:
        return float(raw) if hint is float else raw
    except OverflowError:
        raise ConfigError(f"{source}: {where}: got {show(raw)}, a number too large") from None


def _is_text(text: str) -> bool:
    """Whether `text` can be printed and be a file's name: YAML can write any code, also 0."""
    return "\0" not in text and not any("\ud800" <= each <= "\udfff" for each in text)


def _items(hint: Any, raw: Any, where: str, source: str) -> tuple[Any, ...]:
    """A list against `tuple[X, ...]` or `tuple[X, Y]`."""
    parts = get_args(hint)
    if not isinstance(raw, list):
        raise ConfigError(f"{source}: {where}: got {_show(raw)}, expected a list, as in [a, b]")
    if parts[-1] is Ellipsis:
        parts = (parts[0],) * len(raw)
    if len(parts) != len(raw):
        raise ConfigError(f"{source}: {where}: got {len(raw)} values, expected {len(parts)}")
    return tuple(
        _value(part, item, f"{where}[{i}]", source)
        for i, (part, item) in enumerate(zip(parts, raw, strict=True))
    )


def _mapping(hint: Any, raw: Any, where: str, source: str) -> dict[str, Any]:
    """A section whose keys are the user's own, with values of one kind."""
    if not isinstance(raw, dict):
        raise ConfigError(f"{source}: {where}: got {_show(raw)}, expected a section with keys")
    return {str(key): _value(hint, item, f"{where}.{key}", source) for key, item in raw.items()}


def _describe(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return "one of " + ", ".join(str(choice) for choice in get_args(hint))
    return {int: "a whole number", float: "a number", bool: "true or false", str: "text"}[hint]


def _show(raw: Any) -> str:
    kinds = {bool: "true/false", int: "a whole number", float: "a number", str: "text"}
    if raw is None:
        return "nothing (null)"
    if isinstance(raw, dict):
        return "a section"
    if isinstance(raw, list):
        return "a list"
    try:
        text = show(str(raw))
    except ValueError:  # of thousands of digits
        text = "a long one"
    return f"{text} ({kinds.get(type(raw), type(raw).__name__)})"

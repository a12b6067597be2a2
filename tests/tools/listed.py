"""What tests of plan sources share: files in the formats of Hugging Face, and answers as rows."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from shardmuon.groups import STRUCTURAL_KEYS
from shardmuon.routing import param_groups
from shardmuon.tools.sources import Source, read_source
from shardmuon.training.config import Model
from shardmuon.training.load import ConfigError

SMALL = Model(vocab_size=300, dim=32, layers=2, heads=4, kv_heads=2, hidden=48)
MUON, ADAMW = {"algorithm": "muon"}, {"algorithm": "adamw"}
TRANSPOSED = {"algorithm": "muon", "transposed": True}
TERABYTE = 2**40


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Any attempt fails the test, even where the error is caught."""
    tried: list[Any] = []

    def refuse(*arguments: Any, **_: Any) -> None:
        tried.append(arguments)
        raise OSError("no network")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    yield
    assert not tried


Rows = dict[str, tuple[tuple[int, ...], dict[str, Any]]]


def rows(source: Source) -> Rows:
    """Shape and keys by name; names must be unique."""
    found = {each.name: (each.shape, dict(each.keys)) for each in source.parameters}
    assert len(found) == len(source.parameters)
    return found


def rules(source: Source) -> dict[str, dict[str, Any]]:
    return {each.name: dict(each.keys) for each in source.parameters}


def routed(model: nn.Module) -> Rows:
    """What `param_groups` makes of a model that is there."""
    return {
        name: (
            tuple(parameter.shape),
            {key: group[key] for key in STRUCTURAL_KEYS if key in group},
        )
        for group in param_groups(model)
        for name, parameter in group["params"]
    }


def header(tensors: Mapping[str, Any]) -> bytes:
    """The first bytes of a safetensors file, without any data."""
    raw = json.dumps(tensors).encode()
    return len(raw).to_bytes(8, "little") + raw


def write(path: Path, shapes: Mapping[str, tuple[int, ...]], dtype: str = "F32") -> Path:
    entries = {
        name: {"dtype": dtype, "shape": list(shape), "data_offsets": [0, 0]}
        for name, shape in shapes.items()
    }
    path.write_bytes(header({"__metadata__": {"format": "pt"}, **entries}))
    return path


def refusal(source: object) -> str:
    """The one line with which a source is refused."""
    with pytest.raises(ConfigError) as caught:
        read_source(str(source))
    message = str(caught.value)
    assert message.startswith(str(source))
    assert "\n" not in message
    return message

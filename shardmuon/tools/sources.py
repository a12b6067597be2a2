"""The parameters of a model that is not there: names, shapes, and the rule that each takes.

Owns what `plan` accepts as a source: a known name, a training configuration, or files of Hugging
Face. Must not read or allocate weights, and must not reach for the network: modules are built on
the meta device, and of a .safetensors file only the header is read.

Modules are sorted by `param_groups`. A header holds names and shapes alone, so its tensors are
sorted by those, with the same outcome for models that follow the naming of transformers.
"""

from __future__ import annotations

import difflib
import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import gcd
from pathlib import Path
from typing import Any

from torch import nn

from shardmuon.groups import ADAMW, MUON, STRUCTURAL_KEYS, clean_fqn
from shardmuon.kinds import HEAD_NAMES, ROUTER_NAMES
from shardmuon.planning.matrix import natural_order
from shardmuon.planning.models import MODELS
from shardmuon.routing import param_groups
from shardmuon.tools.subjects import unfilled
from shardmuon.tools.workloads import WORKLOADS
from shardmuon.training.architecture import find, transformers_model
from shardmuon.training.load import ConfigError, load

__all__ = ["Listed", "Source", "read_source"]

INDEX = "model.safetensors.index.json"

# The limit of the format's own library, https://github.com/huggingface/safetensors. A length above
# it comes from a file of another kind.
HEADER_BYTES = 100_000_000

# Modules that are embeddings by name; beside these, those with a part such as `embed`.
EMBEDDING_NAMES = frozenset({"wte", "wpe", "shared", "relative_attention_bias"})

# Buffers that some files hold beside parameters.
BUFFER_NAMES = frozenset({"inv_freq", "masked_bias", "position_ids"})


@dataclass(frozen=True)
class Listed:
    """A parameter that is not there: name, global shape, and the group keys that shape the plan.

    keys: `algorithm`, and structural keys such as `transposed` where they apply.
    """

    name: str
    shape: tuple[int, ...]
    keys: Mapping[str, Any]


@dataclass(frozen=True)
class Source:
    """What `plan` is asked about: a short text for a heading, and the parameters."""

    title: str
    parameters: tuple[Listed, ...]


Shapes = dict[str, tuple[int, ...]]


def read_source(text: str) -> Source:
    """The parameters of what `text` names; a known name comes before a path of that name.

    Raises ConfigError, one line that says which source and what is wrong with it.
    """
    if text in MODELS:
        return Source(f"{text} (matrices only)", tuple(_known_matrices(text)))
    if text in WORKLOADS:
        model, _ = unfilled(WORKLOADS[text].model)
        return Source(text, _grouped(model, text))
    try:
        return _read_path(Path(text), text)
    except OSError as error:
        raise ConfigError(f"{text}: cannot be read ({error.strerror or error})") from None


def _read_path(path: Path, text: str) -> Source:
    if not text or not path.exists():
        raise ConfigError(f"{text}: no such file or folder, and no known model; {_nearest(text)}")
    if path.is_dir():
        return _read_folder(path, text)
    if not path.is_file():  # a pipe would be waited for
        raise ConfigError(f"{text}: got neither a file nor a folder")
    if path.suffix == ".safetensors":
        return _of_headers(_read_header(path, text), text)
    if path.suffix == ".json":
        return _of_transformers(path, text)
    return _of_configuration(path, text)


def _nearest(text: str) -> str:
    known = sorted({*MODELS, *WORKLOADS})
    close = difflib.get_close_matches(text, known, n=1)
    return f"the nearest is {close[0]}" if close else f"known are {', '.join(known)}"


def _known_matrices(name: str) -> Iterator[Listed]:
    """Made-up names: layer, shape, and a number among those of equal shape in the layer."""
    kinds = MODELS[name]
    layers = gcd(*(count for count, _, _ in kinds))
    for layer in range(layers):
        prefix = f"layers.{layer}." if layers > 1 else ""
        numbers: Counter[tuple[int, int]] = Counter()
        for count, *shape in kinds:
            rows, cols = shape
            for _ in range(count // layers):
                number = numbers[rows, cols]
                numbers[rows, cols] += 1
                yield Listed(f"{prefix}{rows}x{cols}.{number}", (rows, cols), {"algorithm": MUON})


def _of_configuration(path: Path, text: str) -> Source:
    """A training configuration, with its patterns."""
    config = load(path)
    if config.optimizer.name != "muon":
        raise ConfigError(
            f"{text}: optimizer.name: got '{config.optimizer.name}', expected 'muon': only"
            " matrices under Muon are planned"
        )
    tree = find(config).tree
    model = unfilled(config.model)[0] if tree is None else transformers_model(tree, text)
    chosen = config.optimizer
    groups = {
        "muon": {"algorithm": chosen.muon.algorithm},
        "adamw": {"algorithm": chosen.adamw.algorithm},
        "to_muon": chosen.to_muon,
        "to_adamw": chosen.to_adamw,
    }
    return Source(text, _grouped(model, text, **groups))


def _grouped(model: nn.Module, text: str, **arguments: Any) -> tuple[Listed, ...]:
    """The parameters of `model` as `param_groups(model, **arguments)` sorts them, in its order."""
    try:
        groups = param_groups(model, **arguments)
    except ValueError as error:
        raise ConfigError(f"{text}: {error}") from None
    keys = {
        name: {key: group[key] for key in STRUCTURAL_KEYS if key in group}
        for group in groups
        for name, _ in group["params"]
    }
    return tuple(Listed(row.name, row.shape, keys[row.name]) for row in groups.table)


# --- files of Hugging Face --------------------------------------------------------------------


def _read_folder(path: Path, text: str) -> Source:
    """What transformers would load from it: files of an index, else one file; else any."""
    if (path / INDEX).is_file():
        return _of_headers(_read_indexed(path, text), text)
    files = sorted(path.glob("*.safetensors"))
    if path / "model.safetensors" in files:
        files = [path / "model.safetensors"]
    if files:
        found: dict[str, _Tensor] = {}
        for file in files:
            header = _read_header(file, text)
            if twice := found.keys() & header.keys():
                raise ConfigError(f"{text}: {min(twice)} is in two files, and there is no {INDEX}")
            found |= header
        return _of_headers(found, text)
    if (path / "config.json").is_file():
        return _of_transformers(path / "config.json", text)
    raise ConfigError(f"{text}: the folder has no .safetensors file and no config.json")


def _of_transformers(path: Path, text: str) -> Source:
    model = transformers_model(_parse(path.read_bytes(), f"{text}: {path.name}"), text)
    return Source(f"{text} ({type(model).__name__})", _grouped(model, text))


@dataclass(frozen=True)
class _Tensor:
    """A tensor as a header describes it; dtype as in F32, BF16, U8."""

    dtype: str
    shape: tuple[int, ...]


def _read_indexed(folder: Path, text: str) -> dict[str, _Tensor]:
    """The tensors that the index of `folder` names, from the headers of the files it names."""
    places = _parse((folder / INDEX).read_bytes(), f"{text}: {INDEX}").get("weight_map")
    if not isinstance(places, dict) or not places:
        raise ConfigError(f"{text}: {INDEX} has no weight_map from names to files")
    headers: dict[str, dict[str, _Tensor]] = {}
    found: dict[str, _Tensor] = {}
    for name, file in places.items():
        # A file elsewhere is not part of the model, whatever an index says.
        if not isinstance(file, str) or Path(file).name != file:
            raise ConfigError(f"{text}: {INDEX} puts {name} into {file!r}, expected a file's name")
        if file not in headers:
            if not (folder / file).is_file():
                raise ConfigError(f"{text}: {INDEX} names {file}, which is not there")
            headers[file] = _read_header(folder / file, text)
        if name not in headers[file]:
            raise ConfigError(f"{text}: {INDEX} puts {name} into {file}, which lacks it")
        found[name] = headers[file][name]
    return found


def _read_header(path: Path, text: str) -> dict[str, _Tensor]:
    """The tensors of a .safetensors file by name; reads its first bytes only."""
    where = text if path.name == Path(text).name else f"{text}: {path.name}"
    with open(path, "rb", buffering=0) as file:  # a buffer would read on
        there = os.fstat(file.fileno()).st_size - 8
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(there, HEADER_BYTES):
            raise ConfigError(
                f"{where}: not a safetensors file: a header of {length} bytes, where"
                f" {max(there, 0)} follow and at most {HEADER_BYTES} are allowed"
            )
        raw = file.read(length)
    tree = _parse(raw, f"{where}: the header")
    return {
        name: _tensor(entry, f"{where}: {name}")
        for name, entry in tree.items()
        if name != "__metadata__"
    }


def _tensor(entry: Any, where: str) -> _Tensor:
    if isinstance(entry, dict):
        dtype, shape = entry.get("dtype"), entry.get("shape")
        if (
            isinstance(dtype, str)
            and isinstance(shape, list)
            and all(type(length) is int and length >= 0 for length in shape)
        ):
            return _Tensor(dtype, tuple(shape))
    raise ConfigError(f"{where}: the header gives no dtype and shape")


def _parse(raw: bytes, where: str) -> dict[str, Any]:
    try:
        tree = json.loads(raw)
    except (ValueError, RecursionError):
        raise ConfigError(f"{where} is not valid JSON") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{where} is not a JSON object")
    return tree


# --- rules by name and shape ------------------------------------------------------------------


def _of_headers(tensors: Mapping[str, _Tensor], text: str) -> Source:
    """Tensors of headers, sorted by name and shape; layer 2 comes before layer 10."""
    shapes: Shapes = {}
    for name in sorted(tensors, key=natural_order):
        if _is_parameter(name, tensors[name], text):
            shapes[clean_fqn(name)] = tensors[name].shape
    if not shapes:
        raise ConfigError(f"{text}: no parameters, the headers name none")
    muon = {name: shape for name, shape in shapes.items() if _takes_muon(name, shape)}
    if not muon:
        raise ConfigError(f"{text}: no parameter takes Muon, by the names in the headers")
    transposed = {*_conv1d(muon, shapes), *_transposed_stacks(muon)}
    keys = {name: {"algorithm": MUON if name in muon else ADAMW} for name in shapes}
    listed = (
        Listed(name, shape, keys[name] | ({"transposed": True} if name in transposed else {}))
        for name, shape in shapes.items()
    )
    return Source(f"{text} (rules by name)", tuple(listed))


def _is_parameter(name: str, tensor: _Tensor, text: str) -> bool:
    """False for buffers and scales of quantization; packed weights are an error."""
    own = name.rpartition(".")[2]
    is_mask = own == "bias" and len(tensor.shape) == 4  # of attention, as in GPT-2
    is_scale = own.startswith(("weight_scale", "input_scale")) or own.endswith("_scale_inv")
    if own in BUFFER_NAMES or is_mask or is_scale or tensor.dtype in ("BOOL", "I64"):
        return False
    if tensor.dtype.startswith(("F", "BF")):
        return True
    if len(tensor.shape) < 2:
        return False
    raise ConfigError(
        f"{text}: {name} has dtype {tensor.dtype}, and packed weights have other shapes;"
        " expected floating point, or the config.json"
    )


def _takes_muon(name: str, shape: tuple[int, ...]) -> bool:
    """What `param_groups` finds by kinds of module, as far as names and dims tell."""
    module, _, own = name.rpartition(".")
    last = module.rpartition(".")[2]
    if last in HEAD_NAMES or last in ROUTER_NAMES or _is_embedding(last):
        return False
    if len(shape) == 3:
        return last == "experts"
    # A 2-D parameter with a name of its own belongs to no linear layer.
    return len(shape) == 2 and own == "weight"


def _is_embedding(last: str) -> bool:
    """Projections of embeddings are linear layers."""
    parts = set(last.split("_"))
    return last in EMBEDDING_NAMES or bool(
        parts & {"emb", "embed", "embedding", "embeddings"}
        and not parts & {"proj", "project", "projection", "mapping"}
    )


def _conv1d(muon: Shapes, shapes: Shapes) -> set[str]:
    """Weights stored [in, out]: their biases are as long as their rows.

    A square weight does not show it; it is taken to be stored as the others of its model.
    """
    biases = {name: shapes.get(f"{name.removesuffix('weight')}bias") for name in muon}
    turned = {
        name
        for name, shape in muon.items()
        if len(shape) == 2 and shape[0] != shape[1] and biases[name] == shape[1:]
    }
    square = {name for name, shape in muon.items() if biases[name] == shape[1:] == shape[:1]}
    return turned | square if turned else turned


def _transposed_stacks(muon: Shapes) -> set[str]:
    """Stacks stored [experts, in, out], as the shapes of a fused gate and up projection show.

    Stored [experts, out, in] they are [n, 2 hidden, dim] and [n, dim, hidden], else [n, dim,
    2 hidden] and [n, hidden, dim]; no sizes fit both.
    """
    turned: set[str] = set()
    for name, fused in muon.items():
        module, _, own = name.rpartition(".")
        down = muon.get(f"{module}.down_proj", ())
        if own == "gate_up_proj" and len(fused) == len(down) == 3:
            experts, hidden, dim = down
            if fused == (experts, dim, 2 * hidden):
                turned |= {name, f"{module}.down_proj"}
    return turned

"""State of the variants through torch's own functions, and checkpoints that are refused by name.

That it moves between layouts is in `test_reshard.py`, whose model has groups of every rule.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import shardmuon
from shardmuon.checkpoint import Checkpointer, CheckpointError, export_checkpoint
from tests import models
from tests.checkpoint.placed_model import Pair, bits, make, train
from tests.conftest import Worlds
from tests.exchange.test_overlap import everything, fsdp_with_unused_one, hsdp, tensor_parallel

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
# Whole and flat at once is a form that torch itself cannot load, not even into torch.optim.AdamW.
FORMS: dict[str, StateDictOptions] = {
    "flat": FLAT,
    "full": StateDictOptions(full_state_dict=True),
}

VARIANTS = {"algorithm": "normuon"}, {"algorithm": "lion"}


def by_backward(build: Callable[[], models.Net], steps: int) -> tuple[models.Net, shardmuon.Muon]:
    """Groups without dtypes in them: torch gathers full state dicts of numbers only."""
    model = build()
    muon, rest = VARIANTS
    groups = shardmuon.param_groups(model, muon=muon, adamw=rest)
    optimizer = shardmuon.Muon(groups, runtime=shardmuon.Runtime(deterministic=True))
    for step in range(steps):
        models.backward(model, step)
        optimizer.step()
    return model, optimizer


def _by_torch(build: Callable[[], models.Net], forms: Sequence[str]) -> list[str]:
    """Forms in which state does not go from one optimizer to another."""
    faults = []
    source = by_backward(build, 2)
    for form in forms:
        options = FORMS[form]
        target = by_backward(build, 1)
        taken = copy.deepcopy(get_optimizer_state_dict(*source, options=options))
        rows = [v for k, v in flattened(taken).items() if k.endswith("row_average")]
        if not rows or any(value.shape[1:] != (1,) for value in rows):
            faults.append(f"{form}: {len(rows)} row averages")
        before = everything(*target)
        set_optimizer_state_dict(*target, taken, options=options)
        target[0].load_state_dict(source[0].state_dict())
        if before == everything(*source) or everything(*target) != everything(*source):
            faults.append(form)
    return faults


def flattened(tree: Any, name: str = "") -> dict[str, Any]:
    """Tensors by their path."""
    if isinstance(tree, dict):
        return {k: v for key in tree for k, v in flattened(tree[key], f"{name}.{key}").items()}
    return {name: tree} if isinstance(tree, Tensor) else {}


@pytest.mark.parametrize(
    ("world", "build"), [(2, fsdp_with_unused_one), (4, hsdp), (4, tensor_parallel)]
)
def test_state_dicts_of_torch_hold_every_state(pools: Worlds, world: int, build: Any) -> None:
    # torch cannot place whole tensors as FSDP2 over tensor parallelism does.
    forms = ["flat"] if build is tensor_parallel else list(FORMS)
    assert pools.run(world, _by_torch, build, forms) == [[]] * world


def _dcp_save(layout: str, folder: str) -> dict[str, str]:
    pair = make(layout)
    train(pair, range(2))
    state = get_optimizer_state_dict(*pair, options=FLAT)
    dcp.save({"optimizer": state}, checkpoint_id=folder)
    return state_of(pair)


def _dcp_load(layout: str, folder: str) -> dict[str, str]:
    pair = make(layout)
    state = get_optimizer_state_dict(*pair, options=FLAT)
    dcp.load({"optimizer": state}, checkpoint_id=folder)
    set_optimizer_state_dict(*pair, state, options=FLAT)
    return state_of(pair)


def state_of(pair: Pair) -> dict[str, str]:
    names = {name for name, _ in pair[0].named_parameters()}
    return {name: hash_ for name, hash_ in bits(pair).items() if name not in names}


def test_torch_moves_every_state_between_ranks_and_layouts(
    pools: Worlds, shared_folder: str
) -> None:
    first = pools.run(4, _dcp_save, "tp", f"{shared_folder}/tp")
    assert pools.run(2, _dcp_save, "fsdp", f"{shared_folder}/fsdp") == first[:2]
    for world, layout, source in ((3, "fsdp", "tp"), (4, "tp", "fsdp")):
        loaded = pools.run(world, _dcp_load, layout, f"{shared_folder}/{source}")
        assert loaded == [first[0]] * world


def plain_pair(**keys: object) -> tuple[nn.Module, shardmuon.Muon]:
    model = models.make()
    muon = {key: value for key, value in keys.items() if key != "rest"}
    rest = {"algorithm": keys.get("rest", "adamw")}
    return model, shardmuon.Muon(shardmuon.param_groups(model, muon=muon, adamw=rest))


def test_a_checkpoint_of_another_rule_is_refused_by_name(tmp_path: Path) -> None:
    checkpoints = Checkpointer(tmp_path)
    path = checkpoints.save(1, *plain_pair())
    for keys, text in (
        ({"algorithm": "normuon"}, "algorithm.*normuon"),
        ({"rest": "lion"}, "algorithm.*lion"),
    ):
        with pytest.raises(CheckpointError, match=text):
            checkpoints.load(path, *plain_pair(**keys))
    checkpoints.close()


def test_an_export_holds_every_state(tmp_path: Path) -> None:
    model, optimizer = plain_pair(algorithm="normuon", rest="lion")
    models.spread_gradients(model, 0)
    optimizer.step()
    checkpoints = Checkpointer(tmp_path / "ck")
    path = checkpoints.save(1, model, optimizer)
    checkpoints.close()
    export_checkpoint(path, tmp_path / "out", optimizer=True)
    found = load_file(tmp_path / "out" / "optimizer" / "optimizer.safetensors")
    expected = {
        f"{name}.{kind}": value
        for name, p in model.named_parameters()
        for kind, value in optimizer.state[p].items()
    }
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], value) for key, value in expected.items())
    groups = json.loads((tmp_path / "out" / "optimizer" / "groups.json").read_text())
    assert "row_average" in {key.rpartition(".")[2] for key in found}
    assert [name in json.dumps(groups) for name in ("normuon", "lion")] == [True, True]

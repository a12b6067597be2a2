"""`train.py` on every mesh gives the numbers of one rank: losses, gradient norms and updates."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardmuon import clipping
from shardmuon.exchange.blocks import local
from shardmuon.training import metrics, place
from shardmuon.training.config import Mesh, Model, Precision
from shardmuon.training.model import build
from tests import ranks
from tests.conftest import Worlds
from tests.training import launch

TINY = str(launch.ROOT / "configs" / "tiny.yaml")
SETTINGS = [
    *launch.SMALL,
    "model.heads=4",
    "model.kv_heads=2",
    "optimizer.muon.ns_dtype=float32",
    "optimizer.to_muon=['*embed_tokens*']",  # a matrix that tensor parallelism leaves whole
    "schedule.steps=4",
    "schedule.warmup_steps=0",
    "clipping.max_norm=0.5",
    "evaluation.every=2",
    "checkpoint.every=0",
    "logging.progress=none",
]
Numbers = dict[str, list[float]]

MESHES = [
    (2, Mesh(tensor=2)),
    (4, Mesh(tensor=2)),
    (4, Mesh(replicate=2)),
    (4, Mesh(replicate=4)),
    (4, Mesh(replicate=2, tensor=2)),
]


def train(mesh: Mesh, overrides: list[str]) -> None:
    """A whole run by the ranks of the pool."""
    layout = [f"mesh.replicate={mesh.replicate}", f"mesh.tensor={mesh.tensor}"]
    layout += ["mesh.check_replicas=2", "logging.orthogonality=true"]
    launch.train_as_rank(TINY, [*SETTINGS, *layout, *overrides])


def numbers(pools: Worlds, world: int, mesh: Mesh, text: list[str], folder: Path) -> Numbers:
    """What a run writes of its steps and evaluations."""
    pools.run(world, train, mesh, [*text, f"logging.directory={folder}"])
    steps, evaluations = (
        metrics.read(folder / "metrics.jsonl", event) for event in ("train", "evaluate")
    )
    keys = ("loss", "grad_norm", "update_rms")
    found = {key: [record[key] for record in steps] for key in keys}
    return found | {"validation": [record["loss"] for record in evaluations]}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Where all runs find their data: which files are held out depends on their paths."""
    return launch.text_files(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def right(pools: Worlds, text: list[str], tmp_path_factory: pytest.TempPathFactory) -> Numbers:
    """The numbers of one rank."""
    found = numbers(pools, 1, Mesh(), text, tmp_path_factory.mktemp("one"))
    assert len(found["loss"]) == 4
    assert len(found["validation"]) == 2
    assert min(found["grad_norm"]) > 0.5  # every step is clipped
    return found


@pytest.mark.parametrize(("world", "mesh"), MESHES)
def test_every_mesh_gives_the_numbers_of_one_rank(
    pools: Worlds, right: Numbers, text: list[str], tmp_path: Path, world: int, mesh: Mesh
) -> None:
    """Sums in another order differ in their last bits (seen: 2e-7 after four steps)."""
    found = numbers(pools, world, mesh, text, tmp_path)
    assert found.keys() == right.keys()
    for key, values in right.items():
        assert found[key] == pytest.approx(values, rel=1e-5), key


def test_a_run_goes_on_with_another_mesh_after_every_step(
    pools: Worlds, right: Numbers, text: list[str], tmp_path: Path
) -> None:
    """From two axes to four ranks, two and one, and back: the numbers of an unbroken run."""
    journey = [
        (4, Mesh(replicate=2, tensor=2)),
        (2, Mesh(tensor=2)),
        (1, Mesh()),
        (4, Mesh(replicate=2)),
    ]
    for step, (world, mesh) in enumerate(journey, 1):
        found = numbers(pools, world, mesh, [*text, f"schedule.stop_at={step}"], tmp_path)
        assert len(found["loss"]) == step
    for key in ("loss", "grad_norm", "update_rms"):
        assert found[key] == pytest.approx(right[key], rel=1e-5), key


def placed(mesh: Mesh) -> dict[str, tuple[tuple[int, ...], float, int]]:
    """Of each parameter: this rank's shape, its elements over their copies, and all elements."""
    here = place.settle(mesh, ranks.device())
    model = place.spread(build(Model(layers=1), 0), here, Precision())
    return {
        name: (
            tuple(local(p).shape),
            local(p).numel() / clipping.count([p]).copies[0],
            p.numel(),
        )
        for name, p in model.named_parameters()
    }


@pytest.mark.parametrize(("world", "mesh"), MESHES)
def test_copies_count_each_element_once(pools: Worlds, world: int, mesh: Mesh) -> None:
    answers = pools.run(world, placed, mesh)
    for name, (_, _, elements) in answers[0].items():
        assert sum(answer[name][1] for answer in answers) == elements


def test_blocks_are_split_over_tensor_and_all_else_over_shard_alone(pools: Worlds) -> None:
    shapes = {
        name: shape for name, (shape, _, _) in pools.run(4, placed, Mesh(tensor=2))[0].items()
    }
    block = "model.layers.0"
    assert shapes == {
        "model.embed_tokens.weight": (128, 128),
        f"{block}.input_layernorm.weight": (64,),
        f"{block}.self_attn.q_proj.weight": (32, 128),
        f"{block}.self_attn.k_proj.weight": (16, 128),
        f"{block}.self_attn.v_proj.weight": (16, 128),
        f"{block}.self_attn.o_proj.weight": (64, 64),
        f"{block}.post_attention_layernorm.weight": (64,),
        f"{block}.mlp.gate_proj.weight": (96, 128),
        f"{block}.mlp.up_proj.weight": (96, 128),
        f"{block}.mlp.down_proj.weight": (64, 192),
        "model.norm.weight": (64,),
        "lm_head.weight": (128, 128),
    }


@pytest.mark.parametrize(
    ("world", "mesh", "sizes"),
    [
        (4, Mesh(), {"shard": 4}),
        (2, Mesh(tensor=2), {"tensor": 2}),
        (8, Mesh(tensor=2), {"shard": 4, "tensor": 2}),
        (8, Mesh(replicate=2), {"replicate": 2, "shard": 4}),
        (2, Mesh(replicate=2), {"replicate": 2, "shard": 1}),
        (4, Mesh(replicate=2, tensor=2), {"replicate": 2, "shard": 1, "tensor": 2}),
        (24, Mesh(replicate=2, tensor=3), {"replicate": 2, "shard": 4, "tensor": 3}),
    ],
)
def test_axes_of_the_mesh(world: int, mesh: Mesh, sizes: dict[str, int]) -> None:
    assert list(place.axes(mesh, world).items()) == list(sizes.items())

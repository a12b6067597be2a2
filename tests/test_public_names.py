"""The public names: complete, importable, and lazy, so that planning needs no torch."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import subprocess
import sys

import pytest

import shardmuon

PUBLIC = {
    "GradScaler",
    "HeadRows",
    "Muon",
    "ParamGroups",
    "Plan",
    "QKHeads",
    "Runtime",
    "StepStats",
    "Watchdog",
    "__version__",
    "clip_grad_norm_",
    "grad_norm",
    "orthogonality_error",
    "param_groups",
    "qk_clip_",
    "singular_value_range",
}
KERNELS = ("kernels", "kernels_copy", "kernels_persistent")  # modules that need Triton


def test_all_lists_the_public_names() -> None:
    assert set(shardmuon.__all__) == PUBLIC
    assert set(dir(shardmuon)) >= PUBLIC
    for name in shardmuon.__all__:
        assert getattr(shardmuon, name) is not None
    with pytest.raises(AttributeError, match="Mouon"):
        _ = shardmuon.Mouon


def test_what_a_rule_needs_can_be_imported_in_one_place() -> None:
    needed = {"Commit", "ElementRule", "ElementShard", "Key", "MuonRule", "Shard", "StateKind"}
    rules = importlib.import_module("shardmuon.rules")
    assert set(rules.__all__) >= needed | {"UpdateRule", "register", "wide"}


def test_every_module_lists_what_it_exports() -> None:
    for info in pkgutil.walk_packages(shardmuon.__path__, "shardmuon."):
        if info.name.endswith(KERNELS) and importlib.util.find_spec("triton") is None:
            continue
        if info.name.endswith(".torchtitan") and importlib.util.find_spec("torchtitan") is None:
            continue
        module = importlib.import_module(info.name)
        exported = getattr(module, "__all__", [])
        assert len(set(exported)) == len(exported), info.name
        for name in exported:
            assert hasattr(module, name), f"{info.name}.{name}"


@pytest.mark.parametrize(
    "statement",
    [
        "import shardmuon",
        "import shardmuon; shardmuon.Runtime()",
        "import shardmuon; shardmuon.Plan",
        "import shardmuon.planning.planner, shardmuon.planning.plan, shardmuon.planning.report",
        "import pkgutil, importlib, shardmuon.planning as p\n"
        "for m in pkgutil.iter_modules(p.__path__, 'shardmuon.planning.'):\n"
        "    importlib.import_module(m.name)",
    ],
)
def test_planning_and_the_package_import_no_torch(statement: str) -> None:
    program = f"import sys\n{statement}\nsys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()


def test_optimizer_imports_no_compiler_or_kernel_language() -> None:
    program = "import sys, shardmuon; shardmuon.Muon; sys.exit('triton' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()

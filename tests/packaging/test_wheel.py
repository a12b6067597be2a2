"""What a user installs: the wheel holds every module, and imports where little else is there.

Builds without network and in a copy, so that no build folder appears in the working tree.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

import shardmuon

ROOT = Path(__file__).resolve().parents[2]
HARD_DEPENDENCIES = {"numpy>=1.26", "pyyaml>=6.0.1", "safetensors>=0.4.3", "torch>=2.11"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of the working tree, built once."""
    source = tmp_path_factory.mktemp("source")
    target = tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "shardmuon", source / "shardmuon", ignore=ignore)
    offline = ["--no-deps", "--no-index", "--no-build-isolation", "--quiet"]
    command = [sys.executable, "-m", "pip", "wheel", *offline, "--wheel-dir", str(target)]
    built = subprocess.run([*command, str(source)], capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    (path,) = target.glob("shardmuon-*.whl")
    return path


@pytest.fixture(scope="module")
def unpacked(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that a Python finds the unpacked wheel in."""
    folder = tmp_path_factory.mktemp("unpacked")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def run_with(unpacked: Path, code: str) -> str:
    """Standard output of `code`, run beside the wheel: no GPU, no compiler, warnings as errors."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(unpacked),
        "CUDA_VISIBLE_DEVICES": "",
        "PATH": "",
    }
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(code)]
    done = subprocess.run(command, cwd=unpacked, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_holds_every_module_and_nothing_else(wheel: Path) -> None:
    expected = {str(path.relative_to(ROOT)) for path in (ROOT / "shardmuon").rglob("*.py")}
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    packed = {name for name in names if ".dist-info/" not in name}
    assert packed == expected | {"shardmuon/py.typed"}


def test_every_folder_is_a_package() -> None:
    folders = {path.parent for path in (ROOT / "shardmuon").rglob("*.py")}
    assert [folder for folder in folders if not (folder / "__init__.py").is_file()] == []


def test_metadata_names_version_hard_dependencies_and_license(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        metadata = Parser().parsestr(archive.read(name).decode())
        licenses = [name for name in archive.namelist() if name.endswith("/LICENSE")]
    required = metadata.get_all("Requires-Dist", [])
    assert {entry for entry in required if "extra ==" not in entry} == HARD_DEPENDENCIES
    assert metadata["Version"] == shardmuon.__version__
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert len(licenses) == 1


def test_every_module_imports_without_gpu_triton_or_compiler(unpacked: Path) -> None:
    origin = run_with(
        unpacked,
        """
        import importlib, pkgutil, sys
        sys.modules["triton"] = None  # importing it raises ImportError
        import shardmuon
        for name in shardmuon.__all__:
            getattr(shardmuon, name)
        for module in pkgutil.walk_packages(shardmuon.__path__, "shardmuon."):
            needs_more = ("__main__", "kernels", "_copy", "_persistent", "torchtitan")
            if not module.name.endswith(needs_more):
                importlib.import_module(module.name)
        print(shardmuon.__file__)
        """,
    )
    assert Path(origin).is_relative_to(unpacked)


def test_planning_and_settings_import_without_torch(unpacked: Path) -> None:
    run_with(
        unpacked,
        """
        import sys
        sys.modules["torch"] = None  # importing it raises ImportError
        import shardmuon.planning
        from shardmuon import Runtime
        Runtime()
        """,
    )

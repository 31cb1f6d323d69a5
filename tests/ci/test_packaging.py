from __future__ import annotations

import subprocess
import sys
import zipfile

import pytest

from tests.tree import ROOT

HOUSE = {"pyproject.toml", "README.md", "LICENSE", "shardckpt", "strategies", "tests", "benchmarks"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The project's wheel, built without a network."""
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    return zipfile.ZipFile(next(out.glob("*.whl")))


def test_the_wheel_holds_the_packages_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    """Top-level names are the import packages: no stray strategies, tests or benchmarks in site-packages."""
    tops = {name.split("/")[0] for name in wheel.namelist()}
    packages = {top for top in tops if not top.endswith(".dist-info")}
    assert packages == {"shardckpt", *(path.name for path in (ROOT / "strategies").iterdir() if path.is_dir())}


def test_the_wheel_is_typed_licensed_and_registers_its_strategies(wheel: zipfile.ZipFile) -> None:
    """py.typed in every package, the licence, the command and the entry points are in the wheel."""
    names = wheel.namelist()
    for package in {name.split("/")[0] for name in names if name.endswith(".py")}:
        assert f"{package}/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    text = wheel.read(next(name for name in names if name.endswith("entry_points.txt"))).decode()
    assert "torch_dist = shardckpt_torch_dist.plugin" in text
    assert "shardckpt = shardckpt.cli:main" in text


def test_core_dependencies_are_four(wheel: zipfile.ZipFile) -> None:
    """The core depends on exactly torch, safetensors, pluggy and pydantic."""
    metadata = wheel.read(next(name for name in wheel.namelist() if name.endswith("METADATA"))).decode()
    required = {
        line.split()[1] for line in metadata.splitlines() if line.startswith("Requires-Dist") and "extra" not in line
    }
    assert {name.split(">")[0] for name in required} == {"torch", "safetensors", "pluggy", "pydantic"}


def test_the_top_level_is_the_house() -> None:
    """Nothing else stands at the top of the repository, besides .ci and dotfiles."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    tracked = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60).stdout
    assert {name.split("/")[0] for name in tracked.splitlines() if not name.startswith(".")} <= HOUSE

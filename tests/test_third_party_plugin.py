from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.plugins.session import whole
from tests.tree import ROOT

PLUGINS = Path(__file__).parent / "plugins"
OLD_DTYPES = ("float32", "int64", "bool")
NEW_DTYPES = ("float32", "bfloat16", "float8_e4m3fn")


class Environment:
    """A virtual environment that sees the packages of this one, with a release of the plugin or without."""

    def __init__(self, path: Path) -> None:
        venv.create(path, with_pip=False)  # ours installs into it
        self._python = path / "bin" / "python"
        self._installed = ""
        site = Path(self.run("-c", "import sysconfig; print(sysconfig.get_path('purelib'))").stdout.strip())
        self.package = site / "shardckpt_npy"
        ours = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
        lines = [f"import site; site.addsitedir({parent!r})" for parent in sorted(ours)]
        (site / "parent.pth").write_text("\n".join(lines))

    def run(self, *arguments: str, check: bool = True, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run its Python."""
        variables = {**os.environ, "PYTHONPATH": str(ROOT), "SHARDCKPT_DISABLED_PLUGINS": "", **variables}
        done = subprocess.run(
            [self._python, *arguments], env=variables, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0 or not check, f"{arguments}: {done.stdout}\n{done.stderr}"
        return done

    def session(self, *arguments: str, **variables: str) -> Any:
        """Run a part of tests/plugins/session.py; what it prints."""
        return json.loads(self.run("-m", "tests.plugins.session", *arguments, **variables).stdout)

    def shardckpt(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run the command; the result whatever its exit status is."""
        return self.run("-m", "shardckpt", *arguments, check=False, **variables)

    def install(self, release: str) -> None:
        """Make this release the installed one: ``npy_v1``, ``npy_v2``, ``zarr_v3``, or ``""`` for no npy."""
        if release == self._installed:
            return
        self._installed = "unknown"
        if release:
            options = ("--no-deps", "--no-build-isolation", "--no-index", "--force-reinstall", "--quiet")
            self._pip("install", *options, str(PLUGINS / release))
        else:
            self._pip("uninstall", "--yes", "--quiet", "shardckpt-npy")
        self._installed = release

    def _pip(self, *arguments: str) -> None:
        command = [sys.executable, "-m", "pip", "--python", str(self._python), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, f"{arguments}: {done.stdout}\n{done.stderr}"

    def damage(self, text: str) -> None:
        """Put a line at the top of the installed plugin's module, as a release that does not import has it."""
        module = self.package / "plugin.py"
        module.write_text(module.read_text().replace("from __future__ import annotations\n", f"{text}\n"))
        self._installed = "damaged"


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """A fresh environment, without the plugin."""
    return Environment(tmp_path_factory.mktemp("venv") / "venv")


@pytest.fixture(scope="module")
def old(environment: Environment, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that release 1.0 saved with 2 ranks, and loaded with 3."""
    path = tmp_path_factory.mktemp("checkpoints") / "old"
    environment.install("npy_v1")
    environment.session("save", "npy", str(path), *OLD_DTYPES)
    return path


@pytest.fixture(scope="module")
def migrated(environment: Environment, old: Path) -> tuple[Path, str]:
    """The same checkpoint as release 2.0 rewrites it, and what the command printed."""
    path = old.with_name("migrated")
    environment.install("npy_v2")
    done = environment.shardckpt("migrate", str(old), str(path))
    assert done.returncode == 0, done.stderr
    return path, done.stdout


@pytest.fixture(scope="module")
def new(environment: Environment, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that release 2.0 saved with 2 ranks, and loaded with 3."""
    path = tmp_path_factory.mktemp("checkpoints") / "new"
    environment.install("npy_v2")
    environment.session("save", "npy", str(path), *NEW_DTYPES)
    return path


def _rows(listing: str) -> list[list[str]]:
    return [line.split() for line in listing.splitlines() if line.startswith("npy ")]


@pytest.mark.ci
def test_an_installed_plugin_is_listed(environment: Environment) -> None:
    """`shardckpt strategies` shows what pip installed: backend, version, both directions, distribution and class."""
    environment.install("npy_v1")
    done = environment.shardckpt("strategies")
    assert done.returncode == 0, done.stderr
    load, save = _rows(done.stdout)
    assert load[:3] == ["npy", "1", "load"]
    assert save[:3] == ["npy", "1", "save"]
    assert load[-3:] == ["shardckpt-npy", "1.0", "shardckpt_npy.load.NpyLoadStrategy"]
    assert "torch_dist" in done.stdout
    assert "not working" not in done.stdout


@pytest.mark.proof
def test_a_checkpoint_of_2_ranks_loads_at_3(old: Path) -> None:
    """Saved by 2 ranks and loaded by 3 under other layouts; every data file is one that numpy opens by itself."""
    marker = json.loads((old / "metadata.json").read_text())
    assert (marker["sharded_backend"], marker["sharded_backend_version"]) == ("npy", 1)
    arrays = {path.name: np.load(path, allow_pickle=False) for path in old.glob("*.npy")}
    index = json.loads((old / "index.json").read_text())
    assert {entry["file"] for entry in index if "file" in entry} == set(arrays)
    assert {name.split("_")[1] for name in arrays} == {"0", "1"}  # both ranks wrote
    entry = next(entry for entry in index if entry["key"] == "int64.1" and entry["offset"] == [0, 1])
    expected = (np.arange(12 * 6).reshape(12, 6) % 16)[:, 1:]  # a dense copy of a strided shard
    assert np.array_equal(arrays[entry["file"]], expected)


@pytest.mark.proof
@pytest.mark.skipif(sys.version_info < (3, 11), reason="zarr 3 needs Python 3.11")
def test_a_zarr_checkpoint_is_what_zarr_opens(environment: Environment, tmp_path: Path) -> None:
    """What an installed strategy of another distribution saved is a group that zarr alone opens, bit for bit."""
    import zarr

    path = tmp_path / "checkpoint"
    environment.install("zarr_v3")
    environment.session("save", "zarr3", str(path), *NEW_DTYPES)
    group = zarr.open_group(path, mode="r")
    for dtype in NEW_DTYPES:
        for number in range(4):  # layouts: rows, columns of unequal width, a flattened tensor, a prepended axis
            array = group[f"{dtype}.{number}"]
            assert array.attrs["shardckpt"] == {"key": f"{dtype}.{number}", "dtype": dtype}
            expected = whole(getattr(torch, dtype)).view(torch.uint8).numpy()
            assert np.array_equal(array[:].view(np.uint8), expected)
    assert group["scale"][()] == 0.5
    assert group.attrs["shardckpt"]["common"]["json"]["step"] == 11
    record = json.loads((path / "shardckpt.json").read_text())
    writers = {file["name"]: file["rank"] for file in record["files"]}
    assert [writers[f"float32.0/c/{row}/0"] for row in range(2)] == [0, 1]  # each rank wrote its chunk
    assert writers["float32.2/c/0/0"] == 0  # slices that end inside of rows: no chunk shape fits, one rank wrote all


@pytest.mark.proof
def test_an_upgrade_refuses_the_old_version_and_names_the_migration(environment: Environment, old: Path) -> None:
    """Release 2.0 does not read version 1: the error says so, and names the command that rewrites it."""
    environment.install("npy_v2")
    [refusal] = environment.session("refusal", str(old))
    assert refusal["kind"] == "VersionTooOldError"
    assert refusal["builtin"]
    for text in (str(old), "'npy' checkpoint of version 1", f"shardckpt migrate {old} NEW", "as version 2"):
        assert text in refusal["message"]
    assert "shardckpt_npy.load.NpyLoadStrategy of shardckpt-npy 2.0: reads version 2" in refusal["message"]


@pytest.mark.ci
def test_migrate_rewrites_the_checkpoint(environment: Environment, old: Path, migrated: tuple[Path, str]) -> None:
    """`shardckpt migrate` makes a whole checkpoint of version 2 that loads equal, and leaves the old one alone."""
    path, output = migrated
    assert f"{path}: npy version 2, rewritten from version 1" in output
    environment.install("npy_v2")
    stored = environment.session("load", str(path), *OLD_DTYPES)
    assert stored["float32.0"] == ["torch.float32", [12, 6]]
    assert stored["bool.3"] == ["torch.bool", [12, 6]]
    assert json.loads((path / "shardckpt.json").read_text())["reader"] == "shardckpt-npy 2.0"
    assert json.loads((old / "metadata.json").read_text())["sharded_backend_version"] == 1
    lines = (f"verify {path}", f"migrate {path} {path.with_name('again')}")
    assert [code for code, _ in environment.session("commands", *lines)] == [0, 2]


@pytest.mark.proof
def test_version_2_stores_what_numpy_has_no_dtype_for(new: Path) -> None:
    """The new version is new for a reason: bfloat16 and float8 are integers on disk, and themselves when loaded."""
    index = json.loads((new / "index.json").read_text())
    on_disk = {entry["dtype"]: str(np.load(new / entry["file"]).dtype) for entry in index if "file" in entry}
    assert on_disk == {"float32": "float32", "bfloat16": "uint16", "float8_e4m3fn": "uint8"}


@pytest.mark.proof
def test_a_downgrade_refuses_the_new_version_and_names_its_reader(
    environment: Environment, migrated: tuple[Path, str], new: Path
) -> None:
    """Release 1.0 refuses version 2, migrated or saved, and names the release that reads it."""
    environment.install("npy_v1")
    paths = (migrated[0], new)
    for path, refusal in zip(paths, environment.session("refusal", *map(str, paths)), strict=True):
        assert refusal["kind"] == "VersionTooNewError"
        assert refusal["builtin"]
        for text in (str(path), "version 2", "installed (version 1)", "shardckpt-npy 2.0 or newer reads it"):
            assert text in refusal["message"]


@pytest.mark.ci
def test_a_broken_release_is_named_and_breaks_nothing_else(environment: Environment, old: Path) -> None:
    """A plugin that does not import stands in the listing and in the gate's error with its reason."""
    environment.install("npy_v1")
    environment.damage("raise ImportError('libnpy.so.3: no such file')")
    fault = "ImportError: libnpy.so.3: no such file"
    [refusal] = environment.session("refusal", str(old))
    assert refusal["kind"] == "BrokenPluginError"
    assert refusal["builtin"]
    assert f"npy of shardckpt-npy 1.0: {fault}" in refusal["message"]
    [(code, listing)] = environment.session("commands", "strategies")
    assert code == 0
    assert f"not working: npy (shardckpt_npy.plugin) of shardckpt-npy 1.0: {fault}" in listing
    assert not _rows(listing)
    assert "torch_dist" in listing


@pytest.mark.proof
def test_after_uninstalling_the_error_says_what_to_install(environment: Environment, old: Path) -> None:
    """Without the plugin its checkpoints are refused: which backend, what is installed, what to install."""
    if not environment.package.exists():
        environment.install("npy_v1")
    environment.install("")
    assert not environment.package.exists()
    assert not _rows(environment.shardckpt("strategies").stdout)
    [refusal] = environment.session("refusal", str(old))
    assert refusal["kind"] == "UnknownBackendError"
    assert refusal["builtin"]
    for text in (
        str(old),
        "'npy'",
        "shardckpt-npy 1.0 or newer, which reads or migrates it",
        "installed readers: ep 1 (shardckpt",
        "torch_dist 1 (shardckpt",
    ):
        assert text in refusal["message"]

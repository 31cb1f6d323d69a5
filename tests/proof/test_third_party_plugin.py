from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from tests.plugins.session import whole
from tests.third_party_plugin import OLD_DTYPES, Environment, environment, migrated, old, rows_of

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["environment", "migrated", "old"]  # fixtures

NEW_DTYPES = ("float32", "bfloat16", "float8_e4m3fn")


@pytest.fixture(scope="module")
def new(environment: Environment, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that release 2.0 saved with 2 ranks, and loaded with 3."""
    path = tmp_path_factory.mktemp("checkpoints") / "new"
    environment.install("npy_v2")
    environment.session("save", "npy", str(path), *NEW_DTYPES)
    return path


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


def test_an_upgrade_refuses_the_old_version_and_names_the_migration(environment: Environment, old: Path) -> None:
    """Release 2.0 does not read version 1: the error says so, and names the command that rewrites it."""
    environment.install("npy_v2")
    [refusal] = environment.session("refusal", str(old))
    assert refusal["kind"] == "VersionTooOldError"
    assert refusal["builtin"]
    for text in (str(old), "'npy' checkpoint of version 1", f"shardckpt migrate {old} NEW", "as version 2"):
        assert text in refusal["message"]
    assert "shardckpt_npy.load.NpyLoadStrategy of shardckpt-npy 2.0: reads version 2" in refusal["message"]


def test_version_2_stores_what_numpy_has_no_dtype_for(new: Path) -> None:
    """The new version is new for a reason: bfloat16 and float8 are integers on disk, and themselves when loaded."""
    index = json.loads((new / "index.json").read_text())
    on_disk = {entry["dtype"]: str(np.load(new / entry["file"]).dtype) for entry in index if "file" in entry}
    assert on_disk == {"float32": "float32", "bfloat16": "uint16", "float8_e4m3fn": "uint8"}


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


def test_after_uninstalling_the_error_says_what_to_install(environment: Environment, old: Path) -> None:
    """Without the plugin its checkpoints are refused: which backend, what is installed, what to install."""
    if not environment.package.exists():
        environment.install("npy_v1")
    environment.install("")
    assert not environment.package.exists()
    assert not rows_of(environment.shardckpt("strategies").stdout)
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
    assert code == 1
    assert f"not working: npy (shardckpt_npy.plugin) of shardckpt-npy 1.0: {fault}" in listing
    assert not rows_of(listing)
    assert "torch_dist" in listing

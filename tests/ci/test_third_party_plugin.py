from __future__ import annotations

import json
from typing import TYPE_CHECKING

from tests.third_party_plugin import OLD_DTYPES, Environment, environment, migrated, old, rows_of

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["environment", "migrated", "old"]  # fixtures


def test_an_installed_plugin_is_listed(environment: Environment) -> None:
    """`shardckpt strategies` shows what pip installed: backend, version, both directions, distribution and class."""
    environment.install("npy_v1")
    done = environment.shardckpt("strategies")
    assert done.returncode == 0, done.stderr
    load, save = rows_of(done.stdout)
    assert load[:3] == ["npy", "1", "load"]
    assert save[:3] == ["npy", "1", "save"]
    assert load[3:6] == ["shardckpt-npy", "1.0", "shardckpt_npy.load.NpyLoadStrategy"]
    assert "torch_dist" in done.stdout
    assert "not working" not in done.stdout


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

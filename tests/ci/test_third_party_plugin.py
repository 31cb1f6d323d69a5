from __future__ import annotations

from tests.third_party_plugin import Environment, environment, rows_of

__all__ = ["environment"]  # fixtures


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

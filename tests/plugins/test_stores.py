"""The folder of a URL, as a plugin makes it."""

from __future__ import annotations

from typing import Any

import pytest

from shardckpt import dist_checkpointing as dc
from shardckpt.errors import PluginError, StorageError
from shardckpt.plugins import get_plugin_manager, stores
from shardckpt.plugins.hookspecs import hookimpl
from shardckpt.plugins.stores import open_folder


class _HalfAStore:
    url = "wrong://half"

    def files(self) -> dict[str, int]:
        return {}


class _Wrong:
    """Serves URLs with what is no store."""

    @hookimpl
    def shardckpt_filesystem(self, url: str) -> Any:
        return {"wrong://number": 42, "wrong://half": _HalfAStore()}.get(url)


def test_what_is_no_store_is_named() -> None:
    """A hook that returns something else than a store is a plugin error that says what it lacks and what to return."""
    plugin = _Wrong()
    get_plugin_manager().register(plugin, "wrong")
    try:
        with pytest.raises(PluginError, match=r"returned 42, .* lacks files, read, upload, delete.*or None.*wrong"):
            open_folder("wrong://number", get_plugin_manager())
        with pytest.raises(PluginError, match="lacks read, upload, delete"):
            open_folder("wrong://half", get_plugin_manager())
        with pytest.raises(PluginError, match="returned 42"):
            dc.load({}, "wrong://number")
    finally:
        get_plugin_manager().unregister(plugin)


class _Quoting:
    """Fails with an error that quotes the URL."""

    @hookimpl
    def shardckpt_filesystem(self, url: str) -> Any:
        if url.startswith("quoting://"):
            raise ValueError(f"no host in {url}")


def test_no_password_that_a_plugin_quotes_is_said() -> None:
    """The error of a plugin that cannot open a URL shows no password of it, also where the plugin quotes the URL."""
    plugin = _Quoting()
    get_plugin_manager().register(plugin, "quoting")
    try:
        with pytest.raises(StorageError, match=r"no host in quoting://user:\*\*\*@host/run") as caught:
            open_folder("quoting://user:hunter2@host/run", get_plugin_manager())
    finally:
        get_plugin_manager().unregister(plugin)
    assert "hunter2" not in str(caught.value)


def test_hidden_names_are_asked_about_by_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the names beside a URL at which nothing is, hidden ones, as that of the holds, are not said."""
    monkeypatch.setattr(stores, "list_folders", lambda _: [".shardckpt-holds", "step-7"])
    said = stores.name_stored_siblings("memory://bucket/run/.shardckpt-hold", get_plugin_manager())
    assert said == "(in memory://bucket/run: step-7)"

"""Plugins: entry points of the group ``shardckpt``, imported at the first operation, each guarded by itself."""

from __future__ import annotations

import functools
import importlib.metadata
import logging
import threading
import traceback
from dataclasses import dataclass

import pluggy

from shardckpt import settings
from shardckpt.errors import PluginError
from shardckpt.plugins import hookspecs
from shardckpt.plugins.registry import StrategyRegistry

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Plugin:
    """An installed plugin, and why it does not work if it does not.

    Attributes:
        name: Its entry point.
        module: The module that the entry point names.
        distribution: Name and version of what installed it.
        fault: ``""``, ``disabled``, or the last line of the traceback.
    """

    name: str
    module: str
    distribution: str
    fault: str = ""


class PluginHost:
    """The registry and the plugins that fill it; they are imported when the registry is first asked for."""

    def __init__(self) -> None:
        self._manager = pluggy.PluginManager(hookspecs.GROUP)
        self._manager.add_hookspecs(hookspecs)
        self._registry = StrategyRegistry()
        self._plugins: dict[str, Plugin] | None = None
        self._lock = threading.RLock()

    @property
    def registry(self) -> StrategyRegistry:
        """The registry, with every working plugin's strategies in it."""
        self.plugins()
        return self._registry

    @property
    def unfilled(self) -> StrategyRegistry:
        """The registry as it is, without importing plugins for it: for what the user registers."""
        return self._registry

    def plugins(self) -> list[Plugin]:
        """Every installed plugin, imported if it was not yet."""
        with self._lock:
            if self._plugins is None:
                self._plugins = {}
                for entry_point in installed():
                    self._plugins[_key(entry_point)] = self._load(entry_point)
            return list(self._plugins.values())

    def broken(self) -> list[Plugin]:
        """The plugins that do not work."""
        return [plugin for plugin in self.plugins() if plugin.fault]

    def faults_text(self) -> str:
        """A line for each plugin that does not work, for the end of an error."""
        return "".join(f"\nbroken plugin: {p.name} of {p.distribution}: {p.fault}" for p in self.broken())

    @property
    def hook(self) -> pluggy.HookRelay:
        """Calls a hook of all working plugins."""
        self.plugins()
        return self._manager.hook

    def register(self, plugin: object, name: str | None = None) -> None:
        """Add a plugin object or module of this process: its hooks are called from now on."""
        self.plugins()
        with self._registry.registering("this process"):
            self._admit(plugin, name or f"{type(plugin).__name__}-{id(plugin)}")

    def unregister(self, plugin: object) -> None:
        """Call a plugin's hooks no more; what it registered stays."""
        self._manager.unregister(plugin)

    def _load(self, entry_point: importlib.metadata.EntryPoint) -> Plugin:
        plugin = Plugin(entry_point.name, entry_point.value, _distribution(entry_point))
        if entry_point.name in settings.disabled_plugins():
            return _with_fault(plugin, f"disabled by {settings.DISABLED_PLUGINS}")
        try:
            with self._registry.registering(plugin.distribution):
                self._admit(entry_point.load(), _key(entry_point))
        except Exception as exc:  # noqa: BLE001 - a plugin may fail in any way and must not break another
            fault = traceback.format_exception_only(exc)[-1].strip()
            logger.warning("plugin %s of %s does not work: %s", plugin.name, plugin.distribution, fault)
            return _with_fault(plugin, fault)
        return plugin

    def _admit(self, plugin: object, name: str) -> None:
        """Register a plugin's hooks and let it fill the registry; it is out again if that fails."""
        if self._manager.is_registered(plugin):
            raise PluginError(f"{name} is registered already, as {self._manager.get_name(plugin)}")
        try:
            self._manager.register(plugin, name)
            others = [other for other in self._manager.get_plugins() if other is not plugin]
            unknown = [hook.name for hook in self._manager.get_hookcallers(plugin) or [] if not hook.has_spec()]
            if unknown:
                raise PluginError(f"unknown hooks: {', '.join(sorted(unknown))}")
            self._manager.subset_hook_caller("shardckpt_register", others)(registry=self._registry)
        except BaseException:
            if self._manager.is_registered(plugin):
                self._manager.unregister(plugin)
            raise


def installed() -> list[importlib.metadata.EntryPoint]:
    """The entry points of all installed plugins, by name; nothing is imported."""
    return sorted(importlib.metadata.entry_points(group=hookspecs.GROUP), key=lambda ep: (ep.name, ep.value))


@functools.cache
def host() -> PluginHost:
    """The process's plugins and registry."""
    return PluginHost()


def _key(entry_point: importlib.metadata.EntryPoint) -> str:
    return f"{entry_point.name} = {entry_point.value}"


def _distribution(entry_point: importlib.metadata.EntryPoint) -> str:
    return f"{entry_point.dist.name} {entry_point.dist.version}" if entry_point.dist else "unknown"


def _with_fault(plugin: Plugin, fault: str) -> Plugin:
    return Plugin(plugin.name, plugin.module, plugin.distribution, fault)


__all__ = ["Plugin", "PluginHost", "host", "installed"]

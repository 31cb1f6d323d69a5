"""The plugin manager: it imports the entry points of the group ``shardckpt``; one that fails breaks no other."""

from __future__ import annotations

import functools
import importlib.metadata
import inspect
import logging
import threading
import traceback
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any

import pluggy

from shardckpt import settings
from shardckpt.errors import PluginError, UnknownBackendError, ask_nearest, listed
from shardckpt.plugins import hookspecs
from shardckpt.plugins.entries import USER
from shardckpt.plugins.registry import StrategyRegistry

logger = logging.getLogger(__name__)

#: The distribution of the built-in plugins.
_OWN = "shardckpt"


@dataclass(frozen=True)
class Plugin:
    """An installed plugin: its entry point, and the name and version of its distribution."""

    name: str
    module: str
    distribution: str
    #: Why it does not work: that it is disabled, or the last line of the traceback; ``""`` if it works.
    fault: str = ""
    #: The error of its import, if that is why; the cause of errors about it.
    error: Exception | SystemExit | None = field(default=None, repr=False, compare=False)
    #: The pairs that are switched off, since another plugin has claimed them before: a text for each.
    conflicts: tuple[str, ...] = ()

    @property
    def is_disabled(self) -> bool:
        """Whether the user has left it out."""
        return bool(self.fault) and self.error is None


class PluginManager:
    """The plugins of this process, and the registry that they fill; plugins are imported when it is first used."""

    def __init__(self) -> None:
        self._manager = pluggy.PluginManager(hookspecs.GROUP)
        self._manager.add_hookspecs(hookspecs)
        self._registry = StrategyRegistry()
        self._plugins: list[Plugin] = []
        self._lock = threading.RLock()
        #: Observers whose failure was logged, each with the class of the error.
        self._failed_observers: set[tuple[str, type[BaseException]]] = set()
        self._is_importing = False
        #: Whether all plugins have been imported: hooks are then called without a lock, at each phase of a load.
        self._is_complete = False

    @property
    def registry(self) -> StrategyRegistry:
        """The registry, with the strategies of every working plugin."""
        self.plugins()
        return self._registry

    @property
    def registry_before_plugins(self) -> StrategyRegistry:
        """The registry without a look at the plugins, which stay unimported; for strategies that the user registers."""
        return self._registry

    def plugins(self) -> list[Plugin]:
        """Return every installed plugin; the first call imports them."""
        with self._lock:
            if not self._is_complete and not self._is_importing:  # a plugin may use this manager while it is imported
                self._import_all()
            return list(self._plugins)

    def broken(self) -> list[Plugin]:
        """Return the plugins that do not work, or, with :attr:`Plugin.conflicts`, work only in part."""
        return [plugin for plugin in self.plugins() if plugin.fault]

    def find_plugins(self, module: str) -> list[Plugin]:
        """Return the plugins whose package a module is in; several if their entry points are equally near to it."""
        parts = module.split(".")
        plugins = self.plugins() if parts[0] != hookspecs.GROUP else []  # some modules of the core are entry points

        def count_shared(plugin: Plugin) -> int:
            others = plugin.module.partition(":")[0].split(".")
            return len([*takewhile(lambda pair: pair[0] == pair[1], zip(parts, others, strict=False))])

        nearest = max(map(count_shared, plugins), default=0)
        return [plugin for plugin in plugins if nearest and count_shared(plugin) == nearest]

    def find_default(self) -> tuple[str, int]:
        """Return backend and version that a save uses if the caller names none.

        If none has registered them, it is a PluginError; if a plugin that is disabled would have, an
        UnknownBackendError.
        """
        try:
            return self.registry.default
        except PluginError:
            disabled = [plugin.name for plugin in self.broken() if plugin.is_disabled]
            if not disabled:
                raise
            raise UnknownBackendError(
                f"no default strategy is registered: {settings.DISABLED_PLUGINS} leaves out {listed(disabled)}; take "
                "it out of that, or name another strategy"
            ) from None

    def faults_text(self) -> str:
        """Return a line for each plugin that does not work, or not all of it, to append to an error."""
        texts = [
            f"\n{'plugin' if p.is_disabled else 'broken plugin:'} {p.name} of {p.distribution}: {p.fault}"
            for p in self.broken()
        ]
        partly = [f"\nplugin {p.name} of {p.distribution}: {text}" for p in self.plugins() for text in p.conflicts]
        return "".join(texts + partly)

    @property
    def hook(self) -> pluggy.HookRelay:
        """Calls the hooks of all working plugins: ``manager.hook.shardckpt_event(event=...)``."""
        if not self._is_complete:
            self.plugins()
        return self._manager.hook

    @property
    def registered(self) -> set[Any]:
        """The objects whose hooks are called: modules of working plugins, and objects passed to :meth:`register`."""
        self.plugins()
        return self._manager.get_plugins()

    def register(self, plugin: object, name: str | None = None) -> None:
        """Add a plugin of this process: a module, or an object with hooks as methods. They are called from now on.

        It is a PluginError if it is registered already, or has hooks that do not exist.
        """
        self.plugins()
        with self._registry.attribute_to(USER):
            self._register(plugin, name or f"{type(plugin).__name__}-{id(plugin)}")

    def observe_by(self, plugin: object, name: str) -> None:
        """Register a plugin that observes events in the place of all others of this process.

        In a process whose parent passes the events to its own plugins, an installed one would count them twice.
        """
        others = [found.plugin for found in self.hook.shardckpt_event.get_hookimpls()]
        self.register(plugin, name)
        vars(self._manager.hook)["shardckpt_event"] = self._manager.subset_hook_caller("shardckpt_event", others)

    def report(self, event: hookspecs.Event) -> None:
        """Pass an event to all plugins that observe; one that fails takes it from no other, and fails no operation."""
        try:
            observers = self.hook.shardckpt_event.get_hookimpls()
        except Exception:
            logger.warning("plugins cannot be imported, and no event is reported", exc_info=True)
            return
        for observer in observers:
            is_for_all = event.state != "progress" or event.operation == "verify"
            if is_for_all or getattr(observer.plugin, "wants_progress", False):
                self._tell(observer, event)

    def _tell(self, observer: pluggy.HookImpl, event: hookspecs.Event) -> None:
        try:
            observer.function(*[event for _ in observer.argnames])
        except (Exception, SystemExit) as exc:  # an observer must not be able to fail a save, least of all on one rank
            kind = (observer.plugin_name, type(exc))
            level = logging.DEBUG if kind in self._failed_observers else logging.WARNING
            self._failed_observers.add(kind)
            logger.log(
                level,
                "plugin %s: its shardckpt_event failed, and it missed an event; others get it, and nothing else fails. "
                "Further %s of it are logged at DEBUG",
                observer.plugin_name,
                type(exc).__name__,
                exc_info=True,
            )

    def unregister(self, plugin: object) -> None:
        """Stop calling a plugin's hooks; the strategies that it registered stay."""
        self._manager.unregister(plugin)

    def _import_all(self) -> None:
        """Import all plugins. After Ctrl-C in the middle nothing of them stays, and the next call begins anew."""
        before, known = self._registry.content, self._manager.get_plugins()
        self._is_importing = True
        for name, near in settings.find_misspelt().items():
            logger.warning("%s in the environment has no effect: did you mean %s?", name, near)
        try:
            for entry_point in list_entry_points():
                self._plugins.append(self._load(entry_point))
            self._is_complete = True
            for text in list_unknown_disabled():
                logger.warning("%s", text)
        finally:
            self._is_importing = False
            if not self._is_complete:
                for plugin in self._manager.get_plugins() - known:
                    self._manager.unregister(plugin)
                self._plugins, self._registry.content = [], before

    def _load(self, entry_point: importlib.metadata.EntryPoint) -> Plugin:
        source = entry_point.dist
        distribution = f"{source.name} {source.version}" if source else settings.PLUGINS
        plugin = Plugin(entry_point.name, entry_point.value, distribution)
        if entry_point.name in settings.disabled_plugins():
            return replace(plugin, fault=f"disabled by {settings.DISABLED_PLUGINS}")
        conflicts: dict[Any, str] = {}
        try:
            if not entry_point.pattern.match(entry_point.value):
                raise PluginError(
                    f"{entry_point.value!r} is not how a module is imported: give my_module or pkg.mod:plugin, with "
                    "its folder in PYTHONPATH"
                )
            with self._registry.attribute_to(distribution, conflicts):
                self._register(entry_point.load(), f"{entry_point.name} = {entry_point.value}")
        # A plugin may fail in any way and must not break another. One that calls sys.exit has failed; Ctrl-C is the
        # user's, and ends the call.
        except (Exception, SystemExit) as exc:  # noqa: BLE001
            fault = traceback.format_exception_only(exc)[-1].strip()
            logger.warning("plugin %s of %s does not work: %s", plugin.name, plugin.distribution, fault)
            return replace(plugin, fault=fault, error=exc)
        for text in conflicts.values():
            logger.warning("plugin %s of %s: %s", plugin.name, plugin.distribution, text)
        return replace(plugin, conflicts=tuple(conflicts.values()))

    def _register(self, plugin: object, name: str) -> None:
        """Register a plugin's hooks and call its ``shardckpt_register``; if that fails, unregister it."""
        if self._manager.is_registered(plugin):
            raise PluginError(f"{name} is registered already, as {self._manager.get_name(plugin)}")
        hooks = {hook for hook in vars(hookspecs) if hook.startswith("shardckpt_")}
        for hook in sorted(hooks):
            if callable(getattr(plugin, hook, None)) and self._manager.parse_hookimpl_opts(plugin, hook) is None:
                raise PluginError(f"{hook} of {name} is not decorated with @shardckpt.hookimpl: nothing would call it")
        try:
            self._manager.register(plugin, name)
            others = [other for other in self._manager.get_plugins() if other is not plugin]
            found = self._manager.get_hookcallers(plugin)
            if not found:
                raise PluginError(
                    f"{name} has no hook: name the module, or the object in it, that has shardckpt_register(registry) "
                    "or another one"
                )
            unknown = [hook.name for hook in found if not hook.has_spec()]
            if unknown:
                near = ask_nearest(unknown[0], hooks).rstrip()
                raise PluginError(f"unknown hooks: {', '.join(sorted(unknown))}{', ' * bool(near)}{near}")
            _check_call(plugin, name, found)
            # without the others, which have registered already: a second time would be a duplicate
            self._manager.subset_hook_caller("shardckpt_register", others)(registry=self._registry)
        except BaseException as exc:
            if self._manager.is_registered(plugin):
                self._manager.unregister(plugin)
            if isinstance(exc, pluggy.PluginValidationError):
                raise PluginError(f"{name}: {_explain(str(exc))}") from exc
            raise


def _check_call(plugin: object, name: str, hooks: list[pluggy.HookCaller]) -> None:
    """Raise PluginError for a class whose hooks need an instance, and for a register hook that takes no registry."""
    functions = [inspect.getattr_static(plugin, hook.name, None) for hook in hooks]
    if isinstance(plugin, type) and any(map(inspect.isfunction, functions)):
        raise PluginError(
            f"{plugin.__qualname__} is a class: register an instance of it, {plugin.__qualname__}(...), or let its "
            "hooks be static methods"
        )
    for hook in hooks:
        if hook.name == "shardckpt_register" and any(
            each.plugin is plugin and not each.argnames for each in hook.get_hookimpls()
        ):
            raise PluginError(f"{name}: {hook.name}(): its arguments are named registry")


def _explain(error: str) -> str:
    """Return the fault of a hook, whose name and arguments pluggy says in its second line."""
    called = error.splitlines()[1:2]
    hook = "".join(called).rpartition(": ")[2]
    known = inspect.signature(vars(hookspecs)[hook.partition("(")[0]]).parameters if "(" in hook else ()
    return f"{hook}: its arguments are named {', '.join(known)}" if known else " ".join(error.split())


def list_entry_points() -> list[importlib.metadata.EntryPoint]:
    """Return the entry points of all plugins; nothing is imported.

    This distribution's plugins come first, and the plugins in ``SHARDCKPT_PLUGINS`` last: of two plugins that claim the
    same, the first gets it, and no installed package can take away a built-in strategy.
    """

    def order(entry_point: importlib.metadata.EntryPoint) -> tuple[bool, str, str]:
        source = entry_point.dist
        return source is None or source.name != _OWN, entry_point.name, entry_point.value

    named = [importlib.metadata.EntryPoint(value, value, hookspecs.GROUP) for value in settings.plugins()]
    return [*sorted(importlib.metadata.entry_points(group=hookspecs.GROUP), key=order), *named]


def list_unknown_disabled() -> list[str]:
    """Return a text for each name to disable that no plugin has: the intended plugin stays enabled."""
    if not settings.disabled_plugins():
        return []
    names = {entry_point.name for entry_point in list_entry_points()}
    return [
        f"{settings.DISABLED_PLUGINS} names {name!r}, and no plugin is called so: {ask_nearest(name, names)}there are "
        f"{listed(sorted(names))}"
        for name in sorted(settings.disabled_plugins() - names)
    ]


@functools.cache
def get_plugin_manager() -> PluginManager:
    """Return the plugin manager of this process."""
    return PluginManager()

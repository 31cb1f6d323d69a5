"""``shardckpt strategies``: list installed strategies and migrations, their distributions, and broken plugins."""

from __future__ import annotations

from typing import Any


def add(verbs: Any) -> None:
    """Add the verb."""
    parser = verbs.add_parser("strategies", help="list the installed strategies, and broken plugins with the reason")
    parser.set_defaults(run=run)


def run(_: Any) -> int:
    """Print a row per strategy and migration, then broken and disabled plugins. Return the exit code."""
    from shardckpt.cli.table import table
    from shardckpt.plugins import get_plugin_manager

    registry = get_plugin_manager().registry
    rows = [
        (entry.backend, entry.version, entry.action.verb, entry.summary, entry.distribution, entry.name)
        for entry in registry.entries()
    ]
    rows += [
        (entry.backend, entry.from_version, "migrate", f"to version {entry.to_version}", entry.distribution, entry.name)
        for entry in registry.migrations()
    ]
    print(table(("backend", "version", "does", "what", "distribution", "class"), rows))
    for plugin in get_plugin_manager().broken():
        print(f"\nnot working: {plugin.name} ({plugin.module}) of {plugin.distribution}: {plugin.fault}")
    return 0


__all__ = ["add", "run"]

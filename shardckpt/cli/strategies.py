"""List the installed strategies and migrations, and the distribution that each is from.

A strategy saves or loads a format (backend) in a version. Plugins that do not work, or of which another has claimed a
part before, come last, with the reason.
"""

from __future__ import annotations

from typing import Any

from shardckpt.cli.output import say


def add(verbs: Any) -> None:
    """Add the verb."""
    parser = verbs.add_parser(
        "strategies", help="list the installed strategies, and broken plugins with the reason", description=__doc__
    )
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
    say(table(("backend", "version", "does", "what", "distribution", "class"), rows))
    for plugin in get_plugin_manager().broken():
        say(f"\nnot working: {plugin.name} ({plugin.module}) of {plugin.distribution}: {plugin.fault}")
    for plugin in get_plugin_manager().plugins():
        for text in plugin.conflicts:
            say(f"\npartly working: {plugin.name} ({plugin.module}) of {plugin.distribution}: {text}")
    return 0

"""List the installed strategies and migrations, and the distribution that each is from.

A strategy saves or loads a format (backend) in a version. Plugins that do not work, or whose part another has claimed
before, come last, with the reason. Exit code 1 if there is one that is not left out by SHARDCKPT_DISABLED_PLUGINS.
"""

from __future__ import annotations

from typing import Any

from shardckpt.cli.exit_codes import FINE, FOUND
from shardckpt.cli.output import Output
from shardckpt.cli.table import fit_table


def add_options(_: Any) -> None:
    """Add none."""


def run(_: Any) -> Output:
    """Return a row per strategy and migration, then the plugins that do not work, or not all of them."""
    from shardckpt.plugins.manager import get_plugin_manager, list_unknown_disabled

    registry = get_plugin_manager().registry
    rows = [
        (entry.backend, entry.version, entry.action.verb, entry.distribution, entry.name, entry.summary)
        for entry in registry.entries()
    ]
    rows += [
        (entry.backend, entry.from_version, "migrate", entry.distribution, entry.name, f"to version {entry.to_version}")
        for entry in registry.migrations()
    ]
    faults = [("not", plugin, plugin.fault) for plugin in get_plugin_manager().broken()]
    faults += [("partly", plugin, text) for plugin in get_plugin_manager().plugins() for text in plugin.conflicts]
    warnings = list_unknown_disabled()
    header = ("backend", "version", "does", "distribution", "class", "what")
    return Output(
        lambda: {
            "strategies": [dict(zip(header, row, strict=True)) for row in rows],
            "faults": [
                {"works": how, "plugin": p.name, "module": p.module, "distribution": p.distribution, "fault": fault}
                for how, p, fault in faults
            ],
            "warnings": warnings,
        },
        lambda: [
            *fit_table(header, rows, optional=("class", "distribution")),
            *(f"\n{how} working: {p.name} ({p.module}) of {p.distribution}: {fault}" for how, p, fault in faults),
            *(f"\n{text}" for text in warnings),
        ],
        FINE if all(plugin.is_disabled for _, plugin, _ in faults) else FOUND,
    )

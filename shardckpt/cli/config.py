"""List the settings of a CheckpointManager with their defaults, and the variables of the environment with their values.

With names, all that is said of these. A variable that is almost one of shardckpt's is listed, too: nothing reads it.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from shardckpt.cli.output import Output

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardckpt.manager import Setting
    from shardckpt.settings import Variable


def add(verbs: Any) -> None:
    """Add the verb."""
    parser = verbs.add_parser(
        "config", help="list the settings of a CheckpointManager, and the variables", description=__doc__
    )
    parser.add_argument(
        "setting", nargs="*", help="show all that is said of this one, or of a variable; another library's name will do"
    )
    parser.set_defaults(run=run)


def run(options: Any) -> Output:
    """Return a row per setting and per variable, or the texts of some."""
    from shardckpt.errors import ConfigurationError, name_known
    from shardckpt.manager import list_settings
    from shardckpt.settings import list_variables

    variables = {each.name: each for each in list_variables()}
    names = [name for name in options.setting if name.startswith("SHARDCKPT_")]
    if unknown := [name for name in names if name not in variables]:
        known = name_known(unknown[0], variables, "variables", len(variables))
        raise ConfigurationError(f"there is no variable {unknown[0]} {known}")
    others = [name for name in options.setting if name not in names]
    settings = list_settings(others) if others or not names else []
    chosen = [variables[name] for name in names] if options.setting else [*variables.values()]
    return Output(
        lambda: [*settings, *chosen],
        lambda: _explain(settings, chosen) if options.setting else _make_tables(settings, chosen),
    )


def _explain(settings: Sequence[Setting], variables: Sequence[Variable]) -> list[str]:
    import shutil
    import textwrap

    width = shutil.get_terminal_size().columns - 4 if sys.stdout.isatty() else 100
    found = [*((each.name, each.default, each.text) for each in settings), *variables]
    texts = ((f"{name} = {value}", textwrap.fill(text, width)) for name, value, text in found)
    return [line for name, text in texts for line in (name, textwrap.indent(text, "    "))]


def _make_tables(settings: Sequence[Setting], variables: Sequence[Variable]) -> list[str]:
    from shardckpt.cli.table import fit_table

    # the first sentence: `shardckpt config NAME` has the rest
    rows = [(each.name, each.default, each.text.partition(". ")[0].rstrip(".")) for each in settings]
    lines = fit_table(("setting", "default", "what"), rows)
    others = [(each.name, each.value, each.text.partition(". ")[0].rstrip(".")) for each in variables]
    return [*lines, "", *fit_table(("variable", "value", "what"), others)]

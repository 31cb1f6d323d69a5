"""List the settings of a CheckpointManager, or show the whole text of some, and what they are by default.

The environment variables that shardckpt reads are in shardckpt/README.md.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from shardckpt.cli.output import Output

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardckpt.manager import Setting


def add(verbs: Any) -> None:
    """Add the verb."""
    parser = verbs.add_parser(
        "config", help="list the settings of a CheckpointManager, with their defaults", description=__doc__
    )
    parser.add_argument("setting", nargs="*", help="show all that is said of this one; another library's name will do")
    parser.set_defaults(run=run)


def run(options: Any) -> Output:
    """Return a row per setting, or the texts of some."""
    from shardckpt.manager import list_settings

    found = list_settings(options.setting)
    return Output(lambda: found, lambda: _explain(found) if options.setting else _make_table(found))


def _explain(found: Sequence[Setting]) -> list[str]:
    import shutil
    import textwrap

    width = shutil.get_terminal_size().columns - 4 if sys.stdout.isatty() else 100
    texts = ((f"{each.name} = {each.default}", textwrap.fill(each.text, width)) for each in found)
    return [line for name, text in texts for line in (name, textwrap.indent(text, "    "))]


def _make_table(found: Sequence[Setting]) -> list[str]:
    from shardckpt.cli.table import fit_table

    # the first sentence: `shardckpt config NAME` has the rest
    rows = [(each.name, each.default, each.text.partition(". ")[0].rstrip(".")) for each in found]
    return fit_table(("setting", "default", "what"), rows)

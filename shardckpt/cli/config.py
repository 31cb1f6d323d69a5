"""List the settings of a CheckpointManager, or show the whole text of some, and what they are by default.

The environment variables that shardckpt reads are in shardckpt/README.md.
"""

from __future__ import annotations

from typing import Any

from shardckpt.cli.output import say


def add(verbs: Any) -> None:
    """Add the verb."""
    parser = verbs.add_parser(
        "config", help="list the settings of a CheckpointManager, with their defaults", description=__doc__
    )
    parser.add_argument("setting", nargs="*", help="show all that is said of this one; another library's name will do")
    parser.add_argument("--json", action="store_true", help="print a JSON list")
    parser.set_defaults(run=run)


def run(options: Any) -> int:
    """Print a row per setting, or the texts of some. Return the exit code."""
    import json
    import textwrap

    from shardckpt.cli.table import table
    from shardckpt.manager import list_settings

    found = list_settings(options.setting)
    if options.json:
        say(json.dumps([each._asdict() for each in found], indent=1))
    elif options.setting:
        for each in found:
            say(f"{each.name} = {each.default}")
            say(textwrap.indent(textwrap.fill(each.text, 100), "    "))
    else:
        # the first sentence: `shardckpt config NAME` has the rest
        rows = [(each.name, each.default, each.text.partition(". ")[0].rstrip(".")) for each in found]
        say(table(("setting", "default", "what"), rows))
    return 0

"""Keep a step under a label, whatever a retention policy says, or list what holds the steps of a folder.

No CheckpointManager and no verb removes or replaces a pinned step, until the pin is taken away with --remove.
"""

from __future__ import annotations

from typing import Any

from shardckpt.cli.exit_codes import FINE
from shardckpt.cli.output import say


def add(verbs: Any) -> None:
    """Add the verb."""
    parser = verbs.add_parser("pin", help="keep a step under a label; list pins and leases", description=__doc__)
    parser.add_argument("folder", help="the directory or URL of the steps")
    parser.add_argument("step", nargs="?", type=int, help="the step; without it, what is held is listed")
    parser.add_argument("--label", help="why it is kept, such as 'release 1.2'")
    parser.add_argument("--remove", action="store_true", help="take the pin of this label away")
    parser.set_defaults(run=run, parser=parser)


def run(options: Any) -> int:
    """Pin, unpin or list. Return the exit code."""
    from shardckpt.cli.table import table
    from shardckpt.manager import find_holds, pin_step, unpin_step

    if options.step is None:
        if options.label or options.remove:
            options.parser.error("--label and --remove need a STEP")
        held = find_holds(options.folder)
        rows = [(directory, str(hold)) for directory, holds in sorted(held.items()) for hold in holds]
        say(table(("step", "held"), rows) if rows else f"nothing is held in {options.folder}")
        return FINE
    if not options.label:
        options.parser.error("a pin needs a --label")
    (unpin_step if options.remove else pin_step)(options.folder, options.step, options.label)
    return FINE

"""Remove the hidden directories that killed saves, overwrites, exports and removals have left beside checkpoints.

What a living process may use is kept, and so is what may be the only copy of a checkpoint; its row says why. Exit code:
0 if all was removed that is not needed, 2 if something could not be.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardckpt.errors import CheckpointingException

if TYPE_CHECKING:
    from shardckpt.engine import PruneResult

_FAILED = 2


def add(verbs: Any) -> None:
    """Add the verb."""
    parser = verbs.add_parser(
        "prune", help="remove what killed saves have left; nothing that a living process uses", description=__doc__
    )
    parser.add_argument("path", nargs="?", help="a folder of checkpoints, or one checkpoint; not a URL")
    parser.add_argument(
        "--spool",
        nargs="?",
        const="",
        metavar="DIR",
        help="also remove what killed uploads to stores have left on this machine: in DIR, or by default in "
        "SHARDCKPT_SPOOL_DIR or the temporary directory",
    )
    parser.add_argument(
        "--older-than",
        type=float,
        metavar="HOURS",
        help="age from which to remove what other hosts have left, whose processes cannot be seen from here "
        "(default: SHARDCKPT_LEFTOVER_HOURS, or 24)",
    )
    parser.add_argument("--dry-run", action="store_true", help="print what would be removed, and remove nothing")
    parser.set_defaults(run=run, parser=parser)


def run(options: Any) -> int:
    """Prune, and print a row per leftover. Return 0 if all that is not needed was removed, else 2."""
    from shardckpt.cli.failure import print_error
    from shardckpt.cli.table import table
    from shardckpt.engine import prune_leftovers, prune_spools

    if options.path is None and options.spool is None:
        options.parser.error("give a PATH, or --spool")
    results: list[PruneResult] = []
    try:
        if options.path is not None:
            results += prune_leftovers(options.path, options.older_than, dry_run=options.dry_run)
        if options.spool is not None:
            results += prune_spools(options.spool or None, options.older_than, dry_run=options.dry_run)
    except CheckpointingException as exc:
        print_error(exc, options)
        return _FAILED
    if results:
        print(table(("leftover", "bytes", "result"), [(r.path, r.nbytes, _said(r, options)) for r in results]))
    freed = sum(result.nbytes for result in results if not result.kept and not result.error)
    print(f"{freed} bytes {'would be ' * options.dry_run}freed")
    return _FAILED if any(result.error for result in results) else 0


def _said(result: PruneResult, options: Any) -> str:
    if result.kept:
        return f"kept: {result.kept}"
    return result.error or ("would be removed" if options.dry_run else "removed")

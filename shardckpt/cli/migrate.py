"""Write a checkpoint once more, in a newer version of its format.

That needs a plugin with a migration; `shardckpt strategies` lists those that are installed.
"""

from __future__ import annotations

from typing import Any


def add(verbs: Any) -> None:
    """Add the verb."""
    parser = verbs.add_parser(
        "migrate", help="rewrite a checkpoint of an old version as a newer one", description=__doc__
    )
    parser.add_argument("old", help="directory or URL of the checkpoint")
    parser.add_argument("new", help="directory or URL of the rewritten checkpoint: absent or empty, or see --overwrite")
    parser.add_argument("--to", type=int, metavar="VERSION", help="version to write (default: the newest possible)")
    parser.add_argument(
        "--overwrite",
        action="store_true",
        help="replace the checkpoint at NEW, which may be OLD, in one step when the new one is complete and on disk",
    )
    parser.set_defaults(run=run)


def run(options: Any) -> int:
    """Migrate, and print what was done. Return the exit code."""
    from shardckpt.maintenance import migrate_checkpoint

    backend, old, new = migrate_checkpoint(options.old, options.new, options.to, overwrite=options.overwrite)
    print(f"{options.new}: {backend} version {new}, rewritten from version {old}")
    return 0

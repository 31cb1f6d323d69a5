"""``shardckpt migrate OLD NEW``: rewrite a checkpoint of an old version as a newer one."""

from __future__ import annotations

from typing import Any


def add(verbs: Any) -> None:
    """Add the verb."""
    parser = verbs.add_parser("migrate", help="rewrite a checkpoint of an old version as a newer one")
    parser.add_argument("old", help="the checkpoint; it is not changed")
    parser.add_argument("new", help="directory or URL of the rewritten checkpoint")
    parser.add_argument("--to", type=int, help="version to write; by default the newest to which there is a migration")
    parser.set_defaults(run=run)


def run(options: Any) -> int:
    """Migrate, and print what was done. Return the exit code."""
    from shardckpt.maintenance import migrate_checkpoint

    backend, old, new = migrate_checkpoint(options.old, options.new, options.to)
    print(f"{options.new}: {backend} version {new}, rewritten from version {old}")
    return 0


__all__ = ["add", "run"]

"""``shardckpt verify DIR``: read every byte of a checkpoint and compare it with the digests."""

from __future__ import annotations

from typing import Any


def add(verbs: Any) -> None:
    """Add the verb."""
    parser = verbs.add_parser("verify", help="check every file of a checkpoint against its digests")
    parser.add_argument("directory", help="the checkpoint")
    parser.set_defaults(run=run)


def run(options: Any) -> int:
    """Print a row for every file; 1 if any is damaged, absent, or not the checkpoint's."""
    from shardckpt.cli.table import table
    from shardckpt.verifying import verify_checkpoint

    results = verify_checkpoint(options.directory)
    print(table(("file", "bytes", "result"), [(r.name, r.nbytes, r.fault or "as written") for r in results]))
    return int(any(result.fault for result in results))


__all__ = ["add", "run"]

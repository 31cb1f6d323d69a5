"""``shardckpt verify DIR``: read every byte of a checkpoint and compare it with the digests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardckpt.verifying import FileResult


def add(verbs: Any) -> None:
    """Add the verb."""
    parser = verbs.add_parser("verify", help="check every file of a checkpoint against its digests")
    parser.add_argument("directory", help="the checkpoint")
    parser.set_defaults(run=run)


def run(options: Any) -> int:
    """Print a row for every file; 1 if any of the checkpoint's is damaged or missing."""
    from shardckpt.cli.table import table
    from shardckpt.verifying import verify_checkpoint

    results = verify_checkpoint(options.directory)
    print(table(("file", "bytes", "result"), [(r.name, r.nbytes, _said(r)) for r in results]))
    return int(any(result.fault for result in results))


def _said(result: FileResult) -> str:
    return "not a file of this checkpoint" if result.foreign else result.fault or "as written"


__all__ = ["add", "run"]

"""``shardckpt demo``."""

from __future__ import annotations

from typing import Any


def add(verbs: Any) -> None:
    """Add the verb."""
    parser = verbs.add_parser("demo", help="train, save with 4 ranks, load with 2 and with 1, and show what happened")
    parser.set_defaults(run=run)


def run(_: Any) -> int:
    return 0


__all__ = ["add", "run"]

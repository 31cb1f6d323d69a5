"""The ``shardckpt`` command: one file a verb; a verb's imports wait until it runs, so that help is quick."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from shardckpt import __version__
from shardckpt.cli import demo, export, inspect, migrate, remove, strategies, verify
from shardckpt.errors import CheckpointingException

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a verb; 0 on success, 1 with the reason on standard error, 2 for a wrong call."""
    options = _parser().parse_args(arguments)
    try:
        return int(options.run(options) or 0)
    except CheckpointingException as exc:
        print(f"shardckpt {options.verb}: {exc}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    from shardckpt.plugins import host

    parser = argparse.ArgumentParser("shardckpt", description="Sharded checkpoints for PyTorch.")
    parser.add_argument("--version", action="version", version=f"shardckpt {__version__}")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for verb in (demo, strategies, inspect, verify, migrate, remove, export):
        verb.add(verbs)
    try:
        host().hook.shardckpt_commands(subparsers=verbs)
    except Exception as exc:  # noqa: BLE001 - a plugin's verb must not take ours away
        print(f"shardckpt: a plugin's shardckpt_commands failed: {type(exc).__name__}: {exc}", file=sys.stderr)
    return parser


__all__ = ["main"]

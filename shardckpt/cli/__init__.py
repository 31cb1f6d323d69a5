"""The ``shardckpt`` command: one file a verb; a verb's imports wait until it runs, so that help is quick."""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING

from shardckpt import __version__
from shardckpt.cli import demo, export, inspect, migrate, prune, remove, strategies, verify
from shardckpt.errors import CheckpointingException

if TYPE_CHECKING:
    from collections.abc import Sequence


#: What shells say of a program that was ended by SIGPIPE.
_NOBODY_READS = 128 + 13


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a verb; 0 on success, 1 with the reason on standard error, 2 for a wrong call, 141 where nobody reads on."""
    options = _parser().parse_args(arguments)
    try:
        code = int(options.run(options) or 0)
        sys.stdout.flush()
    except BrokenPipeError:  # ``shardckpt inspect PATH | head``
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains when it ends
        return _NOBODY_READS
    except CheckpointingException as exc:
        print(f"shardckpt {options.verb}: {exc}", file=sys.stderr)
        return 1
    return code


def _parser() -> argparse.ArgumentParser:
    from shardckpt.plugins import host

    parser = argparse.ArgumentParser("shardckpt", description="Sharded checkpoints for PyTorch.")
    parser.add_argument("--version", action="version", version=f"shardckpt {__version__}")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for verb in (demo, strategies, inspect, verify, migrate, remove, prune, export):
        verb.add(verbs)
    try:
        host().hook.shardckpt_commands(subparsers=verbs)
    except Exception as exc:  # noqa: BLE001 - a plugin's verb must not take ours away
        print(f"shardckpt: a plugin's shardckpt_commands failed: {type(exc).__name__}: {exc}", file=sys.stderr)
    return parser


__all__ = ["main"]

"""The ``shardckpt`` command.

Each verb has a file, whose docstring its help shows. A verb imports torch only when it runs, so that help is fast.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING

from shardckpt import __version__
from shardckpt.cli import (
    completion,
    convert,
    demo,
    diff,
    export,
    inspect,
    ls,
    merge,
    migrate,
    pin,
    prune,
    remove,
    strategies,
    verify,
)
from shardckpt.cli.exit_codes import FAILED, FINE, MEANINGS
from shardckpt.cli.failure import name_plugin, print_error

if TYPE_CHECKING:
    from collections.abc import Sequence

#: A file for each; help lists them in this order.
_VERBS = (
    *(ls, inspect, diff, verify, export, convert, merge, migrate, remove, prune, pin, strategies, demo),
    completion,
)
#: The exit code that shells report for a program that SIGPIPE has ended.
_BROKEN_PIPE = 128 + 13


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a verb, and return the exit code.

    Args:
        arguments: The command line without the program's name; by default that of this process.

    Returns:
        One of :mod:`shardckpt.cli.exit_codes`; 141 if the reader of standard output has closed it. An error is printed
        to standard error, with its traceback if ``--traceback`` is given. A wrong command line raises SystemExit.
    """
    options = _parser().parse_args(arguments)
    try:
        code = int(options.run(options) or FINE)
        sys.stdout.flush()
    except BrokenPipeError:  # ``shardckpt inspect PATH | head``
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains when it ends
        return _BROKEN_PIPE
    except Exception as exc:  # noqa: BLE001 - a plugin's verb may fail in any way
        print_error(exc, options)
        return FAILED
    return code


def _parser() -> argparse.ArgumentParser:
    from shardckpt.plugins import get_plugin_manager

    parser = argparse.ArgumentParser(
        "shardckpt",
        description="Look at, check and change checkpoints. `shardckpt VERB --help` explains a verb.",
        epilog=MEANINGS,
    )
    parser.add_argument("--traceback", action="store_true", help="after an error, show the whole traceback")
    parser.add_argument("--version", action="version", version=f"shardckpt {__version__}")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for verb in _VERBS:
        verb.add(verbs)
    try:
        get_plugin_manager().hook.shardckpt_commands(subparsers=verbs)
    except Exception as exc:  # noqa: BLE001 - a broken plugin must not disable the other verbs
        print(
            f"shardckpt: a plugin's shardckpt_commands failed: {type(exc).__name__}: {exc}{name_plugin(exc)}",
            file=sys.stderr,
        )
    return parser


__all__ = ["main"]

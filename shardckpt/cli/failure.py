"""What the command prints after an error."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from shardckpt.errors import CheckpointingException

if TYPE_CHECKING:
    import argparse


def print_error(error: Exception, options: argparse.Namespace) -> None:
    """Print an error to standard error: its text, after the whole traceback if ``--traceback`` is given."""
    if options.traceback:
        import traceback  # slow to import

        traceback.print_exception(error)
    print(f"shardckpt {options.verb}: {_describe_error(error)}", file=sys.stderr)


def _describe_error(error: Exception) -> str:
    """Return an error's text; of one that was not made for users, with its class, and how to see more."""
    if isinstance(error, CheckpointingException):
        return f"{error}{name_plugin(error)}"
    return f"{type(error).__name__}: {error}{name_plugin(error)}; shardckpt --traceback shows the whole traceback"


def name_plugin(error: Exception) -> str:
    """Return whose code raised an error, in brackets, or ``""``."""
    from shardckpt.plugins import describe_origin, get_plugin_manager

    origin = describe_origin(error, get_plugin_manager())
    return f" ({origin})" if origin else ""

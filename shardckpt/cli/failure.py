"""What the command prints after an error."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardckpt.cli.output import say_error, show_json
from shardckpt.errors import CheckpointingException

if TYPE_CHECKING:
    import argparse


def show_failure(error: BaseException, message: str, code: int, options: argparse.Namespace) -> int:
    """With ``--json``, print to standard output that a verb has no answer, and why not; return its exit code."""
    if options.as_json:
        show_json({"error": {"type": type(error).__name__, "message": message}, "exit_code": code})
    return code


def print_error(error: Exception, options: argparse.Namespace) -> None:
    """Print an error to standard error: its text, after the whole traceback if ``--traceback`` is given."""
    if options.traceback:
        import traceback  # slow to import

        for entry in traceback.format_exception(error):
            say_error(_indent(entry.rstrip("\n")))
    say_error(_indent(f"shardckpt {options.verb}: {_describe_error(error)}"))


def _indent(text: str) -> str:
    """Indent all lines but the first: a name in an error may have line ends, and begins no line of the command's."""
    return text.replace("\n", "\n  ")


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

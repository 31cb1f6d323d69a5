"""What the command prints: the one place that writes to the terminal.

Keys, names of files, labels and errors come from files that anybody may have written. None of them moves the cursor,
erases a line or turns the direction of text: what is no printable character is shown by its escape.
"""

from __future__ import annotations

import logging
import os
import sys
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from shardckpt.errors import escape_text

if TYPE_CHECKING:
    from collections.abc import Iterator

#: What lays out texts of several lines. A name that comes from a file is escaped with these, before it is in a text.
_LAYOUT = "\n\t"
_STREAMS = ("stdin", "stdout", "stderr")


def say(text: str = "", *, end: str = "\n", flush: bool = False) -> None:
    """Print a text to standard output, with all but printable characters, line ends and tabs escaped."""
    print(escape_text(text, _LAYOUT), end=end, flush=flush)


def say_error(text: str) -> None:
    """Print a text to standard error, likewise; a reader who has closed it is no error."""
    with suppress(OSError):
        print(escape_text(text, _LAYOUT), file=sys.stderr)


def open_closed_streams() -> None:
    """Open closed standard streams (``2>&-``) on the null device.

    Else Python has None for them, and the first file that is opened gets the descriptor: what a library writes to
    standard error would go into a checkpoint's file.
    """
    for number, name in enumerate(_STREAMS):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest that is free: this one
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "r+" if number == 0 else "w", closefd=False))  # noqa: SIM115


@contextmanager
def escaped_logs() -> Iterator[None]:
    """Escape, in the block, what a process without handlers of its own logs to standard error."""
    handler = logging.lastResort
    if handler is None:
        yield
        return
    before = handler.formatter
    handler.setFormatter(_Formatter())
    try:
        yield
    finally:
        handler.setFormatter(before)


class _Formatter(logging.Formatter):
    """Escapes whole lines; names that come as arguments with their line ends, too."""

    def format(self, record: logging.LogRecord) -> str:
        if isinstance(record.args, tuple):
            record.args = tuple(escape_text(each) if isinstance(each, str) else each for each in record.args)
        return escape_text(super().format(record), _LAYOUT)

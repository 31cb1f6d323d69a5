"""Print the command's output: the answers of its verbs, as text or JSON, in the one place that writes to the terminal.

Keys, names of files, labels and errors come from files of any origin. None of them moves the cursor, erases a line or
turns the direction of text: an unprintable character is shown by its escape.
"""

from __future__ import annotations

import argparse
import io
import logging
import os
import sys
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from shardckpt.cli.cells import fit_line
from shardckpt.cli.colour import Painted
from shardckpt.cli.exit_codes import FINE
from shardckpt.errors import escape_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

#: The characters that lay out texts of several lines. A name from a file is escaped with these, before it is in a text.
_LAYOUT = "\n\t"
_STREAMS = ("stdin", "stdout", "stderr")


class Output(NamedTuple):
    """The answer of a verb, made in one form: text, or with ``--json`` JSON.

    Attributes:
        data: Returns the whole answer for JSON: dataclasses, named tuples, dicts, lists, texts and numbers.
        text: Returns the lines for people.
        code: The exit code.
        is_long: Whether there may be a line for each of 100,000 tensors: on a terminal they go through a pager.
    """

    data: Callable[[], Any]
    text: Callable[[], Iterable[str]]
    code: int = FINE
    is_long: bool = False


def show(output: Output, *, as_json: bool) -> int:
    """Print the answer of a verb; return its exit code."""
    if as_json:
        show_json(output.data())
    elif output.is_long:
        _page(output.text())
    else:
        for line in output.text():
            say(_fit(line))
    return output.code


def show_json(data: Any) -> None:
    """Print an answer as one JSON document: for people, on a terminal, indented; for programs on one line."""
    from shardckpt.cli.encode import encode_json

    say(encode_json(data, indent=1 if sys.stdout.isatty() else None))


def say(text: str = "", *, end: str = "\n", flush: bool = False) -> None:
    """Print a text to standard output, with all but printable characters, line ends and tabs escaped."""
    print(_escape(text), end=end, flush=flush)


def say_error(text: str) -> None:
    """Print a text to standard error, escaped in the same way; a reader who has closed it is no error."""
    with suppress(OSError):
        print("\n".join(fit_line(line, sys.stderr) for line in escape_text(text, _LAYOUT).split("\n")), file=sys.stderr)


def _fit(text: str) -> str:
    """Return a line of standard output; a text that is painted, or has line ends, is laid out already."""
    return text if isinstance(text, Painted) else fit_line(_escape(text), sys.stdout)


def _escape(text: str) -> str:
    return text if isinstance(text, Painted) else escape_text(text, _LAYOUT)


def _page(lines: Iterable[str]) -> None:
    """Print lines; through ``$PAGER`` if standard output is a terminal that they do not fit on (``cat`` for none)."""
    text = "\n".join(map(_escape, map(_fit, lines)))
    if sys.stdout.isatty():
        import pydoc  # both are slow to import, and only needed here
        import shutil

        if text.count("\n") + 1 >= shutil.get_terminal_size().lines:
            os.environ.setdefault("LESS", "FRX")  # so that less shows colours, as git sets it
            pydoc.pager(f"{text}\n")
            return
    say(Painted(text))


def open_closed_streams() -> None:
    """Open closed standard streams (``2>&-``) on the null device.

    Else Python has None for them, and the first file that is opened gets the descriptor: a library's output to standard
    error would go into a checkpoint's file.
    """
    for number, name in enumerate(_STREAMS):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest that is free: this one
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "r+" if number == 0 else "w", closefd=False))  # noqa: SIM115


def escape_unencodable() -> None:
    """Let standard output escape the characters that its encoding lacks, as Latin-1 has none for a key in Greek."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")


@contextmanager
def escaped_logs() -> Iterator[None]:
    """Escape, in the block, log lines on standard error of a process without handlers of its own, each text once."""
    handler = logging.lastResort
    if handler is None:
        yield
        return
    before, once = handler.formatter, _make_filter()
    handler.setFormatter(_Formatter())
    handler.addFilter(once)
    try:
        yield
    finally:
        handler.setFormatter(before)
        handler.removeFilter(once)


@contextmanager
def without_logs(*names: str) -> Iterator[None]:
    """Log nothing of some loggers in the block: the answer of the verb says the same."""
    loggers = [*map(logging.getLogger, names)]

    def refuse(_: logging.LogRecord) -> bool:
        return False

    for logger in loggers:
        logger.addFilter(refuse)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(refuse)


def _make_filter() -> Callable[[logging.LogRecord], bool]:
    """Return a filter that lets each text pass once: a verb may look at a checkpoint several times."""
    said: set[str] = set()

    def is_new(record: logging.LogRecord) -> bool:
        text = record.getMessage()
        is_known = text in said
        said.add(text)
        return not is_known

    return is_new


class _Formatter(logging.Formatter):
    """Escapes whole lines; names that come as arguments with their line ends, too."""

    def format(self, record: logging.LogRecord) -> str:
        if isinstance(record.args, tuple):
            record.args = tuple(escape_text(each) if isinstance(each, str) else each for each in record.args)
        return fit_line(escape_text(super().format(record), _LAYOUT), sys.stderr)


def add_json(parser: Any) -> None:
    """Add ``--json`` to a verb whose ``run`` returns an :class:`Output`.

    Args:
        parser: The verb's parser.
    """
    parser.add_argument(
        "--json", action="store_true", dest="as_json", help="print the whole answer, or the error, as JSON"
    )


def parse_count(text: str) -> int:
    """Parse the number of an option."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def add_verbose(parser: Any, help: str) -> None:  # noqa: A002 - as argparse calls it
    """Add the option that shows more than a line."""
    parser.add_argument("-v", "--verbose", action="store_true", help=help)

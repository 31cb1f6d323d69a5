"""Colours of states: green, yellow and red.

A name that comes from a file must not draw one. So a text has colours by its type: a :class:`Painted` is made of texts
that are escaped before, and a text that is joined of others is none, and is escaped when it is printed.
"""

from __future__ import annotations

import os
import sys
from typing import Literal

from shardckpt.cli.cells import fit_line
from shardckpt.errors import escape_text

#: Green for whole, intact or equal; yellow for incomplete; red for damaged or different.
Style = Literal["good", "partial", "bad", ""]
_CODES = {"good": "\x1b[32m", "partial": "\x1b[33m", "bad": "\x1b[31m"}
_END = "\x1b[0m"


class Painted(str):
    """A text that is printed as it is: escaped already, with colours."""

    __slots__ = ()


def has_colours() -> bool:
    """Return whether standard output shows colours: by ``NO_COLOR``, ``FORCE_COLOR``, ``TERM``, or as a terminal."""
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return os.environ.get("TERM") != "dumb" and sys.stdout.isatty()


def paint(text: str, style: Style) -> str:
    """Return a line in the colour of a style, if standard output shows colours."""
    if not (style and has_colours()):
        return text
    lines = fit_line(escape_text(text, "\n\t"), sys.stdout).split("\n")
    return Painted("\n".join(colour(line, style) for line in lines))


def colour(escaped: str, style: Style) -> str:
    """Return an escaped text between the codes of a style."""
    return f"{_CODES[style]}{escaped}{_END}" if style else escaped

"""Texts in the cells of a terminal: a character of East Asian scripts takes two, and a combining mark none."""

from __future__ import annotations

import shutil
import unicodedata
from itertools import repeat
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

#: The beginning of a line that continues the one before it.
_BELOW = "  "


def measure(text: str) -> int:
    """Return how many cells a printable text takes."""
    return len(text) if text.isascii() else sum(map(_measure_char, text))


def measure_widest(texts: Collection[str]) -> int:
    """Return the cells of the widest of some texts, up to 100,000."""
    return max(map(len if all(map(str.isascii, texts)) else measure, texts))


def pad(text: str, width: int) -> str:
    """Return a text with blanks behind it, so that it takes at least so many cells."""
    return text + " " * (width - measure(text))


def pad_all(texts: Sequence[str], width: int) -> Iterator[str]:
    """Yield each of some texts, up to 100,000, as :func:`pad` returns it."""
    return map(str.ljust if all(map(str.isascii, texts)) else pad, texts, repeat(width))


def cut(text: str, most: int) -> str:
    """Return the longest beginning of a text that takes at most so many cells."""
    if text.isascii():
        return text[:most]
    taken = 0
    for place, char in enumerate(text):
        taken += _measure_char(char)
        if taken > most:
            return text[:place]
    return text


def cut_middle(text: str, most: int) -> str:
    """Return a text of at most so many cells: of a longer one both ends, since names differ in the end."""
    if measure(text) <= most:
        return text
    tail = (most - 3) * 2 // 3
    return f"{cut(text, most - 3 - tail)}...{_cut_beginning(text, tail)}"


def wrap(text: str, most: int, first: int = 0) -> list[str]:
    """Return the lines of a text, each of at most so many cells, broken at blanks, but at none of a command.

    A command stands between backquotes: a part of one that is copied alone would be another. Likewise a longer word,
    such as JSON or a path, is not broken: a line has it alone. ``first`` is the cells of the first line, by default
    ``most``; if that is less, and has no room for the first word, the first line is empty.
    """
    parts = text.split("`")
    parts[1::2] = [part.replace(" ", "\0") for part in parts[1::2]]
    lines, room = [""], first or most
    for word in "`".join(parts).split(" "):
        longer = f"{lines[-1]} {word}" if lines[-1] else word
        if measure(longer) <= room or (not lines[-1] and room >= most):
            lines[-1] = longer
        else:
            lines.append(word)
            room = most
    return [line.rstrip().replace("\0", " ") for line in lines]


def fit_line(text: str, stream: TextIO) -> str:
    """Return a line for a stream: for a terminal, lines of its width. A text with line ends is laid out already."""
    if "\n" in text or not stream.isatty():
        return text
    width = shutil.get_terminal_size().columns
    if measure(text) <= width:
        return text
    return f"\n{_BELOW}".join(wrap(text, width - len(_BELOW), width))


def _cut_beginning(text: str, most: int) -> str:
    """Return the longest end of a text that takes at most so many cells, and begins with no combining mark."""
    place, taken = len(text), 0
    while place and (taken := taken + _measure_char(text[place - 1])) <= most:
        place -= 1
    while place < len(text) and not _measure_char(text[place]):
        place += 1
    return text[place:]


def _measure_char(char: str) -> int:
    if unicodedata.category(char) in ("Mn", "Me"):
        return 0
    return 2 if unicodedata.east_asian_width(char) in ("W", "F") else 1

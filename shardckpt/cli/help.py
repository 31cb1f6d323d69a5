"""The layout of help pages."""

from __future__ import annotations

import argparse
import re
import textwrap

#: A row of a list in a docstring: a name, spaces and a text, or all of it.
_ROW = re.compile(r"( +)(\S.*?  +)?(?=\S)")


def _find_hanging(line: str) -> int:
    """Return the column in which the text of a row begins; 0 if the line is no row."""
    row = _ROW.match(line)
    return row.end() if row else 0


def _names_row(line: str) -> bool:
    """Return whether a line begins a row, by a name."""
    row = _ROW.match(line)
    return bool(row and row[2])


class HelpFormatter(argparse.HelpFormatter):
    """Formats a verb's help for the width of the terminal: its paragraphs stay, and rows of lists hang."""

    def format_help(self) -> str:
        """Return the help; lines that argparse does not break, such as mutually exclusive options, are broken here."""
        lines = super().format_help().splitlines()
        return "".join(
            f"{part}\n" for line in lines for part in (self._wrap(line) if len(line) > self._width else [line])
        )

    def _fill_text(self, text: str, width: int, indent: str) -> str:  # noqa: ARG002 - argparse's; it has the width, too
        filled: list[str] = []
        for paragraph in text.strip().split("\n\n"):
            pieces: list[str] = []
            for line in paragraph.splitlines():
                if pieces and _find_hanging(line) == _find_hanging(pieces[-1]) and not _names_row(line):
                    pieces[-1] += f" {line.strip()}"
                else:
                    pieces.append(line)
            filled.append("\n".join(part for piece in pieces for part in self._wrap(f"{indent}{piece}")))
        return "\n\n".join(filled)

    def _wrap(self, line: str) -> list[str]:
        hanging = " " * _find_hanging(line)
        return textwrap.wrap(
            line, self._width, subsequent_indent=hanging, break_long_words=False, break_on_hyphens=False
        )

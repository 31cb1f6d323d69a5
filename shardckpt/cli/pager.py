"""Long output on a terminal goes through a pager, as git's does."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from shardckpt.cli.output import say
from shardckpt.errors import escape_text

if TYPE_CHECKING:
    from collections.abc import Sequence


def page(lines: Sequence[str]) -> None:
    """Print lines; through ``$PAGER`` if standard output is a terminal on which they do not fit (``cat`` for none)."""
    text = escape_text("\n".join(lines), "\n\t")
    if sys.stdout.isatty():
        import pydoc  # both are slow to import, and only needed here
        import shutil

        if text.count("\n") + 1 >= shutil.get_terminal_size().lines:
            pydoc.pager(f"{text}\n")
            return
    say(text)

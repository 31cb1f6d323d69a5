"""``--rename OLD=NEW``: read a checkpoint by other names, as ``CheckpointConfig(rename=)`` does.

The verbs that read values have it. ``verify`` checks files, whose names do not change; ``remove`` and ``migrate`` write
the keys that are stored; ``ls`` and ``prune`` look at no key.
"""

from __future__ import annotations

import argparse
from typing import Any

from shardckpt.errors import CheckpointingException


def add_rename_option(parser: Any, what: str) -> None:
    """Add the option; ``what`` is what the verb calls the checkpoint that is renamed."""
    parser.add_argument(
        "--rename",
        type=_parse_rename,
        action="append",
        default=[],
        metavar="OLD=NEW",
        help=f"read what {what} has under OLD, such as optim or app.model, as NEW; may be repeated",
    )


def read_renames(options: Any) -> dict[str, str]:
    """Return the new names by the old ones; an old one that is given twice is an error."""
    found: dict[str, str] = {}
    for old, new in options.rename:
        if found.setdefault(old, new) != new:
            raise CheckpointingException(f"--rename: {old!r} cannot become both {found[old]!r} and {new!r}")
    return found


def split_renames(options: Any, count: int) -> list[dict[str, str]]:
    """Return the new names by the old ones for each of several sources: those of ``N:OLD=NEW`` for the N-th alone."""
    found: list[dict[str, str]] = [{} for _ in range(count)]
    for text, new in read_renames(options).items():
        number, sign, old = text.partition(":")
        if not (sign and number.isdecimal()):
            for names in found:
                names[text] = new
        elif 1 <= int(number) <= count:
            found[int(number) - 1][old] = new
        else:
            raise CheckpointingException(f"--rename {text}={new}: there are {count} SRC, numbered from 1")
    return found


def _parse_rename(text: str) -> tuple[str, str]:
    old, sign, new = text.partition("=")
    old, new = old.removesuffix("."), new.removesuffix(".")
    if not sign or not old + new:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not OLD=NEW, such as app.model=model (=model: all goes below it)"
        )
    return old, new

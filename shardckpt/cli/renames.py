"""``--rename OLD=NEW``: read a checkpoint by other names, as ``CheckpointConfig(rename=)`` does.

The verbs that read values have it. ``verify`` checks files, whose names do not change; ``remove`` and ``migrate`` write
the keys that are stored; ``ls`` and ``prune`` look at no key.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from shardckpt.errors import CheckpointingException

if TYPE_CHECKING:
    from collections.abc import Callable


def add_rename_option(parser: Any, what: str) -> None:
    """Add the option; ``what`` is the verb's name for the checkpoint whose keys are renamed."""
    parser.add_argument(
        "--rename",
        type=_parse_rename,
        action="append",
        default=[],
        metavar="OLD=NEW",
        help=f"read the keys of {what} under OLD, such as optim or app.model, as NEW; may be repeated",
    )


def set_once(found: dict[str, str], name: str, value: str, option: str, parse: Callable[[str], object] = str) -> None:
    """Add the value that an option gives for a name; another one, as ``parse`` reads both, is an error."""
    before = found.setdefault(name, value)
    if before != value and parse(before) != parse(value):
        raise CheckpointingException(f"{option}: {name!r} cannot become both {before!r} and {value!r}: give one")


def read_renames(options: Any) -> dict[str, str]:
    """Return the new names by the old ones."""
    found: dict[str, str] = {}
    for old, new in options.rename:
        set_once(found, old, new, "--rename")
    return found


def split_renames(options: Any, count: int) -> list[dict[str, str]]:
    """Return the new names by the old ones for each of several sources: those of ``N:OLD=NEW`` for the N-th alone."""
    found: list[dict[str, str]] = [{} for _ in range(count)]
    for text, new in options.rename:
        number, separator, old = text.partition(":")
        is_numbered = separator and number.isdecimal()
        if is_numbered and not 1 <= int(number) <= count:
            raise CheckpointingException(f"--rename {text}={new}: there are {count} SRC, numbered from 1")
        for names in [found[int(number) - 1]] if is_numbered else found:
            set_once(names, old if is_numbered else text, new, f"--rename {text}={new}")
    return found


def _parse_rename(text: str) -> tuple[str, str]:
    old, separator, new = text.partition("=")
    old, new = old.removesuffix("."), new.removesuffix(".")
    if not separator or not (old or new):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not OLD=NEW, such as app.model=model (=model: all goes below it)"
        )
    return old, new

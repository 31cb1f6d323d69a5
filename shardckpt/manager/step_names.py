"""Names in a folder of checkpoints: how trainers name the directories of steps, and where the marks of steps are."""

from __future__ import annotations

import operator
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardckpt.errors import CheckpointingException, show_given

if TYPE_CHECKING:
    from collections.abc import Iterable

#: The directory of the marks, next to the checkpoints; see :mod:`shardckpt.manager.marks`.
MARKS_NAME = ".shardckpt-marks"


@dataclass(frozen=True)
class StepNames:
    """A trainer's naming of step directories: a prefix and the number, with zeros up to ``width`` digits."""

    prefix: str
    width: int = 1

    def name(self, step: int) -> str:
        """Return the name of a step's directory."""
        if step < 0:
            raise CheckpointingException(f"step {step}: steps are counted from 0")
        return f"{self.prefix}{step:0{self.width}d}"

    def parse(self, name: str) -> int | None:
        """Return the step whose directory has exactly this name, or None."""
        digits = name.removeprefix(self.prefix)
        if not (digits.isascii() and digits.isdecimal()):
            return None
        # Only the exact name counts: step-007 is not step 7.
        return int(digits) if name == self.name(int(digits)) else None


def split_path(path: str) -> tuple[str, str]:
    """Return the folder that a path or URL is in, as it is given, and the name there."""
    above, _, name = path.rstrip("/").rpartition("/")
    return above or ("/" if path.startswith("/") else "."), name


def parse_number(given: Any, call: str, what: str) -> int:
    """Return a step that a call is given: a whole number, of numpy's or in a tensor, too.

    Anything else is an error, and so are negative numbers and numbers that are too large for a record.
    """
    try:
        step = -1 if isinstance(given, bool) else operator.index(given)
    except TypeError:
        step = -1
    if not 0 <= step < 1 << 53:  # a record is JSON, which readers may take for floating point
        raise CheckpointingException(f"{call}: {show_given(given)} is no step; give {what}")
    return step


#: The names that the manager gives.
STEPS = StepNames("step-")
#: How trainers name the steps' directories: ours, transformers', Megatron's, VeOmni's; and the directories of epochs.
NAMINGS = (STEPS, StepNames("checkpoint-"), StepNames("iter_", 7), StepNames("global_step_"), StepNames("epoch_"))


#: A name that ends with a number; and the ends of the text before it, where the number is a step's.
_NUMBERED = re.compile(r"(.*\D|)([0-9]+)", re.DOTALL)
_STEP_WORD = re.compile(
    r"(?:.*[^a-z])?(?:global_?step|step|iteration|iter|epoch|checkpoint|ckpt|chkpt|save|update)s?[-_.=]?", re.IGNORECASE
)


def find_namings(directories: Iterable[str], prefix: str | None = None) -> list[StepNames]:
    """Return the ways in which directories are named by steps: the known :data:`NAMINGS`, and those found in names.

    A name is one of a step if it ends with a number behind a word such as ``ckpt``, ``epoch`` or ``iter``: a number
    behind anything else (``run_3``, ``Llama-3``) may say something else. With a ``prefix`` that text counts, whatever
    it is, and not the words. No directory is counted in two ways; of one prefix with several widths the most frequent
    counts.
    """
    found = list(NAMINGS) if prefix is None else []
    others: dict[str, list[str]] = {}
    known: set[str] = set()
    for name in directories:
        parts = _NUMBERED.fullmatch(name)
        if parts is None or name.startswith("."):
            continue
        if any(names.parse(name) is not None for names in found):
            known.add(parts[1])
        elif parts[1] == prefix or (prefix is None and _STEP_WORD.fullmatch(parts[1])):
            others.setdefault(parts[1], []).append(parts[2])
    for before, digits in sorted(others.items()):
        padded = [len(number) for number in digits if number.startswith("0") and number != "0"]
        if before not in known:
            found.append(StepNames(before, max(sorted(padded), key=padded.count) if padded else 1))
    return found


def parse_step(name: str) -> int | None:
    """Return the step that a directory's name says, by :func:`find_namings`, or None."""
    return next((step for names in find_namings([name]) if (step := names.parse(name)) is not None), None)

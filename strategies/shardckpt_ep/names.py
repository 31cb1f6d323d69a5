"""Whose key a key is: a parameter's own, or that of its state in an optimizer; exact names, never endings."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

#: Modules that wrap another and leave no trace in what torch's state-dict functions name.
WRAPPERS = frozenset({"_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_orig_mod"})
#: What a state dict may put before the names of a model and of its optimizer.
SECTIONS = ("model", "optimizer")


class ExpertName(NamedTuple):
    """What a key means.

    Attributes:
        fqn: The parameter, without wrappers.
        slot: The name of the optimizer's state (``exp_avg``); empty for the parameter itself.
    """

    fqn: str
    slot: str


class ExpertNames:
    """The parameters of experts, and which keys are theirs.

    A key is a parameter's if it is its name, and its state's if it is ``state.<name>.<slot>``; before either may stand
    a section of the state dict. Where two names fit, the longer one counts.

    Args:
        fqns: The parameters' names; wrappers in them (``_orig_mod.``) do not count.
        sections: What may stand before them.
    """

    def __init__(self, fqns: Iterable[str], sections: Iterable[str] = SECTIONS) -> None:
        self._fqns = frozenset(map(clean, fqns))
        self.sections = frozenset(sections)
        self._patterns = frozenset(map(_pattern, self._fqns))

    def find(self, key: str) -> ExpertName | None:
        """Whose key it is, or None where it is no expert's."""
        return next((name for name in self._readings(key) if name.fqn in self._fqns), None)

    def resembles(self, key: str) -> bool:
        """Whether the key is that of a parameter, or its state's, whose name differs from an expert's in numbers."""
        return any(_pattern(name.fqn) in self._patterns for name in self._readings(key))

    def _readings(self, key: str) -> Iterator[ExpertName]:
        """What the key may mean, longer names first."""
        parts = clean(key).split(".")
        yield from _meanings(parts)
        if parts[0] in self.sections:
            yield from _meanings(parts[1:])


def _meanings(parts: Sequence[str]) -> Iterator[ExpertName]:
    yield ExpertName(".".join(parts), "")
    if parts[:1] == ["state"]:
        for end in range(len(parts) - 1, 1, -1):
            yield ExpertName(".".join(parts[1:end]), ".".join(parts[end:]))


def clean(fqn: str) -> str:
    """The name without the wrappers in it."""
    return ".".join(part for part in fqn.split(".") if part not in WRAPPERS)


def _pattern(fqn: str) -> str:
    return re.sub(r"\d+", "#", fqn)


__all__ = ["SECTIONS", "WRAPPERS", "ExpertName", "ExpertNames", "clean"]

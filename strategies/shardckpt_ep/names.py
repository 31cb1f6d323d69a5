"""Match keys to expert parameters and their optimizer state: by exact names, never by endings."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

#: Names of wrapper modules, which torch's state-dict functions leave out of parameter names. DDP's ``module`` is not
#: among them: a model may have a child of that name.
WRAPPERS = frozenset({"_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_orig_mod"})
#: Keys that a state dict may put before the names of a model and of its optimizer.
SECTIONS = ("model", "optimizer")


class ExpertName(NamedTuple):
    """The parameter that a key belongs to."""

    #: The parameter's name, without wrappers.
    fqn: str
    #: The name of its optimizer state (``exp_avg``); empty for the parameter itself.
    slot: str


class ExpertNames:
    """The names of expert parameters, and the keys that belong to them.

    A parameter's key is its name; the key of its optimizer state is ``state.<name>.<slot>``. Before either may stand
    one of the ``sections`` of the state dict. Where two names match, the longer one counts. Wrappers in names
    (``_orig_mod.``) are ignored.
    """

    def __init__(self, fqns: Iterable[str], sections: Iterable[str] = SECTIONS) -> None:
        self._fqns = frozenset(map(clean, fqns))
        self.sections = frozenset(sections)
        self._patterns = frozenset(map(_pattern, self._fqns))

    def find(self, key: str) -> ExpertName | None:
        """Return the parameter that the key belongs to, or None if it is not an expert's."""
        return next((name for name in self._candidates(key) if name.fqn in self._fqns), None)

    def resembles(self, key: str) -> bool:
        """Return whether the key differs only in numbers from one of an expert parameter or its state."""
        return any(_pattern(name.fqn) in self._patterns for name in self._candidates(key))

    def _candidates(self, key: str) -> Iterator[ExpertName]:
        """Yield every way to read the key, longer parameter names first."""
        parts = clean(key).split(".")
        yield from _parse(parts)
        if parts[0] in self.sections:
            yield from _parse(parts[1:])


def _parse(parts: Sequence[str]) -> Iterator[ExpertName]:
    """Yield every way to read a key without a section. Names and slots may both contain dots."""
    yield ExpertName(".".join(parts), "")
    if parts[:1] == ["state"]:
        for end in range(len(parts) - 1, 1, -1):
            yield ExpertName(".".join(parts[1:end]), ".".join(parts[end:]))


def clean(fqn: str) -> str:
    """Return the name without the wrappers in it."""
    return ".".join(part for part in fqn.split(".") if part not in WRAPPERS)


def _pattern(fqn: str) -> str:
    """Return the name with each number replaced by ``#``."""
    return re.sub(r"\d+", "#", fqn)

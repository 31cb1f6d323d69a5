"""Columns of names: each is two strings, and equal strings are stored once. Layers of a model repeat them."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import torch

from shardckpt.errors import CorruptCheckpointError, ShardingError
from shardckpt.planning import make_column, make_matrix

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

from collections.abc import Sequence

_T = TypeVar("_T")

#: Longest name, in bytes.
_LONGEST = 4096


class Lazy(Sequence[_T]):
    """A list that is made when an item is requested.

    Args:
        count: Its length.
        make: Makes it.
    """

    def __init__(self, count: int, make: Callable[[], list[_T]]) -> None:
        self._count = count
        self._make = make
        self._made: list[_T] | None = None

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN204 - Sequence has its overloads
        if self._made is None:
            self._made = self._make()
        return self._made[index]


class StringTable:
    """Strings under construction."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def add(self, text: str) -> int:
        """Return the number of a string."""
        return self._numbers.setdefault(text, len(self._numbers))

    def add_names(self, names: Iterable[str]) -> torch.Tensor:
        """Return names as pairs of strings, int64 of shape (names, 2): up to the last dot, and the rest.

        Raises:
            ShardingError: The format cannot hold a name.
        """
        pairs = []
        for name in names:
            check_name(name)
            cut = name.rfind(".") + 1
            pairs.append((self.add(name[:cut]), self.add(name[cut:])))
        return make_matrix(pairs, 2, 0)

    def columns(self) -> dict[str, torch.Tensor]:
        """Return the columns ``text`` and ``text_end``."""
        found = [text.encode() for text in self._numbers]
        data = b"".join(found)
        ends = make_column(list(map(len, found))).cumsum(0)
        text = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
        return {"text": text, "text_end": ends}


class Strings:
    """The strings of an index.

    Args:
        text: The column ``text``.
        ends: The column ``text_end``.

    Raises:
        CorruptCheckpointError: The columns contradict each other.
    """

    def __init__(self, text: memoryview, ends: torch.Tensor) -> None:
        if ends.dim() != 1 or (len(ends) and (int(ends[-1]) != len(text) or not bool((ends[:-1] <= ends[1:]).all()))):
            raise CorruptCheckpointError("its column 'text_end' does not ascend to the end of 'text'")
        if not len(ends) and len(text):
            raise CorruptCheckpointError("its column 'text' has more than 'text_end' says")
        self._text = bytes(text)
        if b"\0" in self._text:
            raise CorruptCheckpointError("its column 'text' has NUL")
        self._ends = ends

    def __len__(self) -> int:
        return len(self._ends)

    def get(self, numbers: torch.Tensor) -> list[str]:
        """Return some strings."""
        ends = self._ends[numbers].tolist()
        starts = torch.where(numbers > 0, self._ends[(numbers - 1).clamp(min=0)], 0).tolist()
        text = self._text
        try:
            return [text[start:end].decode() for start, end in zip(starts, ends, strict=True)]
        except UnicodeDecodeError as exc:
            raise CorruptCheckpointError(f"its column 'text' has what is not UTF-8: {exc}") from exc

    def names(self, column: str, pairs: torch.Tensor) -> list[str]:
        """Return the names of pairs.

        Raises:
            CorruptCheckpointError: One is empty, too long, not UTF-8, or there twice.
        """
        places = pairs.long()
        numbers = torch.arange(len(self), device="cpu")
        if len(self) > 2 * places.numel():  # most strings are of other columns
            numbers, places = places.unique(return_inverse=True)  # type: ignore[no-untyped-call]
        texts = self.get(numbers)
        found = [texts[first] + texts[second] for first, second in places.tolist()]
        for name in found:
            if not 0 < len(name) <= _LONGEST or (4 * len(name) > _LONGEST < len(name.encode())):
                raise CorruptCheckpointError(f"its column {column!r} has a name of {len(name)} characters")
        return found


def check_name(name: str) -> None:
    """Raise ShardingError if the format cannot hold a name."""
    try:
        nbytes = len(name.encode())
    except UnicodeEncodeError as exc:
        raise ShardingError(f"{name!r:.200} cannot be stored: a key is text that UTF-8 has ({exc})") from exc
    if not 0 < nbytes <= _LONGEST or "\0" in name:
        raise ShardingError(f"{name!r:.200} cannot be stored: a key has 1 to {_LONGEST} bytes of UTF-8, and no NUL")

"""The names in an index. Each is two strings, cut after its last dot; equal strings are stored once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

import torch

from shardckpt.errors import CorruptCheckpointError, ShardingError
from shardckpt.planning import make_column, make_matrix, sort_unique
from shardckpt.tensors import tensor_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator

_T = TypeVar("_T")

#: Longest name, in bytes.
_LONGEST = 4096


class Lazy(Sequence[_T]):
    """A list that is computed when its first item is requested."""

    def __init__(self, count: int, make: Callable[[], list[_T]]) -> None:
        self._count = count
        self._make = make
        self._made: list[_T] | None = None

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN204 - Sequence has its overloads
        return self._list()[index]

    def __iter__(self) -> Iterator[_T]:
        return iter(self._list())  # Sequence's own asks for one item after the other

    def _list(self) -> list[_T]:
        if self._made is None:
            self._made = self._make()
        return self._made


class StringTable:
    """The strings of an index that is being written."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def add(self, text: str) -> int:
        """Return the number of a string."""
        return self._numbers.setdefault(text, len(self._numbers))

    def add_names(self, names: Collection[str]) -> torch.Tensor:
        """Add names, and return the numbers of their strings: int64 of shape (names, 2)."""
        check_names(names)
        pairs = []
        for name in names:
            cut = name.rfind(".") + 1
            pairs.append((self.add(name[:cut]), self.add(name[cut:])))
        return make_matrix(pairs, 2, 0)

    def columns(self) -> dict[str, torch.Tensor]:
        """Return the columns ``text`` and ``text_end``."""
        found = [text.encode() for text in self._numbers]
        data = b"".join(found)
        ends = make_column(list(map(len, found))).cumsum(0)
        text = (
            torch.frombuffer(bytearray(data), dtype=torch.uint8)
            if data
            else torch.empty(0, dtype=torch.uint8, device="cpu")
        )
        return {"text": text, "text_end": ends}


class Strings:
    """The strings of an index, from its columns ``text`` and ``text_end``."""

    def __init__(self, text: memoryview, ends: torch.Tensor) -> None:
        if ends.dim() != 1 or (len(ends) and (int(ends[-1]) != len(text) or not bool((ends[:-1] <= ends[1:]).all()))):
            raise CorruptCheckpointError("its column 'text_end' does not ascend to the end of 'text'")
        if not len(ends) and len(text):
            raise CorruptCheckpointError("its column 'text' has more than 'text_end' says")
        self._text = bytes(text)
        if b"\0" in self._text:
            raise CorruptCheckpointError("its column 'text' has NUL")
        #: Where each string ends: a memoryview, because a list has an object for each of perhaps a million.
        self._ends = tensor_bytes(ends).cast("q")

    def __len__(self) -> int:
        return len(self._ends)

    def get(self, numbers: Sequence[int]) -> list[str]:
        """Return the strings of these numbers."""
        ends = self._ends
        return self._decode([ends[number - 1] if number else 0 for number in numbers], map(ends.__getitem__, numbers))

    def names(self, column: str, pairs: torch.Tensor) -> list[str]:
        """Return the names of pairs, after a check: none is empty, too long or not UTF-8. Names may be equal."""
        if not len(pairs):
            return []
        texts: Sequence[str] | dict[int, str]
        if len(self) > 2 * pairs.numel():  # most strings are of other columns
            numbers = sort_unique(pairs.view(-1)).tolist()
            texts = dict(zip(numbers, self.get(numbers), strict=True))
        else:
            ends = self._ends.tolist()
            texts = self._decode([0, *ends], ends)
        found = [texts[first] + texts[second] for first, second in pairs.tolist()]
        for name in found:
            # a character has at most 4 bytes: only long names are encoded
            may_be_long = 4 * len(name) > _LONGEST
            if not name or (may_be_long and len(name.encode()) > _LONGEST):
                raise CorruptCheckpointError(f"its column {column!r} has a name of {len(name)} characters")
        return found

    def _decode(self, starts: Iterable[int], ends: Iterable[int]) -> list[str]:
        text = self._text
        try:
            return [text[start:end].decode() for start, end in zip(starts, ends, strict=False)]
        except UnicodeDecodeError as exc:
            raise CorruptCheckpointError(f"its column 'text' is not UTF-8: {exc}") from exc


def check_names(names: Collection[str]) -> None:
    """Raise ShardingError if the format cannot hold a name."""
    text, lengths = "".join(names), set(map(len, names))
    if text.isascii() and "\0" not in text and lengths <= set(range(1, _LONGEST + 1)):
        return  # the usual case: one check of all names takes a tenth of the time
    for name in names:
        _check_name(name)


def _check_name(name: str) -> None:
    try:
        nbytes = len(name.encode())
    except UnicodeEncodeError as exc:
        raise ShardingError(f"{name!r:.200} cannot be stored: a key is text that UTF-8 has ({exc})") from exc
    if not 0 < nbytes <= _LONGEST or "\0" in name:
        raise ShardingError(f"{name!r:.200} cannot be stored: a key has 1 to {_LONGEST} bytes of UTF-8, and no NUL")

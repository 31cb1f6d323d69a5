"""The opcodes of a pickle, followed without building anything: what would cost more than the file is worth is refused.

Python's C unpickler takes memory for every memo place that it is asked for, copies what is in the memo as often as it
is told, and hashes nested tuples by recursion in C, without a limit. So each opcode is followed first on values that
know only what they would cost. https://docs.python.org/3/library/pickletools.html has the opcodes.
"""

from __future__ import annotations

import functools
import pickle
import re
from typing import TYPE_CHECKING

from shardckpt.errors import CorruptCheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from mmap import mmap

#: Bytes that a pickle's calls, states and keys may take: so many in any case, and so many for each of its own.
_FREE, _PER_BYTE = 16 << 20, 64
#: What they are taken to cost, in bytes: a call; an entry of a list, dict or set that is copied; one of a tuple; a
#: value that is hashed.
_CALL, _ENTRY, _SLOT, _HASH = 200, 32, 16, 16
#: Tuples in each other, which no pickler gets to by its own recursion, and values in a key, those of inner tuples
#: counted: hashing goes through all of them, on the stack of C.
_DEEPEST, _KEY = 1000, 10_000
#: Where counting ends: shared tuples have exponentially many values.
_MANY = 1 << 40
#: Picklers number their memo 0, 1, 2, ...; some leave a number out.
_GAP = 1024
#: The protocol that has MEMOIZE.
_MEMOIZING = b"\x04"
#: Digits of numbers that are written as text.
_DIGITS = 1000
#: In a plain pickle: keys that are numbers or tuples, at most, and bytes of an integer.
_ODD_KEYS, _PLAIN_BYTES = 1000, 32
#: Integers of so many bytes have hashes of their own.
_OWN_HASH_BYTES = 7
_TWO_WAYS = "numbers its memo in two ways"
#: Lists, dicts, sets, and marks that lie in each other: an opcode makes what takes so many bytes.
_LIST_BYTES, _DICT_BYTES, _SET_BYTES, _MARKS = 64, 64, 216, 10_000
#: Records are matched as a whole in pickles of at least so many bytes, and while no tuple has more values.
_LARGE, _LIGHT = 1 << 16, 64


def check_pickle(data: bytes | mmap, source: str, *, plain: bool = False, start: int = 0) -> int:
    """Refuse a pickle that would take time or memory out of proportion to its size, or crash the process.

    Nothing is built and no name is looked up: which globals it may name is for the unpickler to say.

    Args:
        data: The pickle; what follows its end is not looked at.
        source: Named in errors.
        plain: Whether nearly all keys of dicts are names, objects and small integers, as floats and tuples can be made
            to collide, and integers have at most 32 bytes.
        start: Where in the data the pickle begins.

    Returns:
        Where it ends.

    Raises:
        CorruptCheckpointError: It is cut, or asks for too much; says for what.
    """
    walk = _Walk(data, start, plain)
    try:
        walk.run()
    except CorruptCheckpointError as exc:
        raise CorruptCheckpointError(f"{source}: the pickle {exc}") from None
    except (LookupError, ValueError) as exc:
        raise CorruptCheckpointError(
            f"{source}: the pickle is damaged at byte {walk.at}: {type(exc).__name__}: {exc}"
        ) from exc
    return walk.at


class _Value:
    """What is known of a value: how many values hashing it visits, and the bytes that copying it takes."""

    __slots__ = ("cost", "weight")

    def __init__(self, weight: int = 1, cost: int = 0) -> None:
        self.weight = weight
        self.cost = cost


class _Made(_Value):
    """A container or the result of a call: it may grow."""

    __slots__ = ()


class _Tuple(_Value):
    """A tuple: as arguments it is copied, and what it holds may be."""

    __slots__ = ("depth", "items")

    def __init__(self, items: Sequence[_Value]) -> None:
        super().__init__(_sum_of_weights(items) + 2, _SLOT * len(items))
        self.depth: int = 1 + max((item.depth for item in items if isinstance(item, _Tuple)), default=0)
        self.items = items
        if self.depth > _DEEPEST:
            raise CorruptCheckpointError(f"has tuples in tuples, more than {_DEEPEST} deep")


def _sum_of_weights(items: Iterable[_Value]) -> int:
    return min(sum(item.weight for item in items), _MANY)


#: Values whose hashes differ if they do; numbers that can be made to collide; texts by their bytes.
_ATOM, _NUMBER = _Value(), _Value(2)
_TEXTS = [_Value(1, size) for size in range(256)]
_NO_VALUES = _Tuple(())


class _Walk:
    """One pass over a pickle."""

    def __init__(self, data: bytes | mmap, start: int, plain: bool) -> None:
        self.at = self._start = start
        self._data = data
        self._spent = 0
        self._odd_left = _ODD_KEYS if plain else None
        self._longest = _PLAIN_BYTES if plain else len(data)
        self._stack: list[_Value] = []
        self._outer: list[list[_Value]] = []
        self._memo: list[_Value] = []  # by MEMOIZE, which numbers it
        self._puts: dict[int, _Value] = {}  # by PUT, which says the number
        self._ended = False
        self._records: re.Pattern[bytes] | None = None
        if len(data) >= _LARGE:
            memoizes = data[start : start + 1] == pickle.PROTO and data[start + 1 : start + 2] >= _MEMOIZING
            self._records = _records(pickle.MEMOIZE if memoizes else b"")
            size = _Value(16)  # of at most nine numbers, as the pattern says
            self._record_memos = [
                [[_Made()] * 2 + [_TEXTS[255]] * texts + [size] * 3 * sizes for sizes in range(3)] for texts in (0, 1)
            ]
            self._memoizes = memoizes

    def run(self) -> None:
        """Follow the opcodes to the end."""
        data, handlers = self._data, _HANDLERS
        while not self._ended:
            code = data[self.at]
            self.at += 1
            handlers[code](self)

    # ---- costs

    def _spend(self, cost: int) -> None:
        self._spent += cost
        if self._spent > _FREE + _PER_BYTE * (self.at - self._start):
            raise CorruptCheckpointError(f"copies itself too often: more than {self._spent} bytes")

    def _hash(self, keys: Iterable[_Value]) -> None:
        """Count what hashing keys takes."""
        for key in keys:
            if key.weight == 1:
                continue
            if key.weight > _KEY:
                raise CorruptCheckpointError(f"has a key of more than {_KEY} values, tuples in tuples")
            self._spend(_HASH * key.weight)
            if self._odd_left is not None:
                self._odd_left -= 1
                if self._odd_left < 0:
                    raise CorruptCheckpointError("has too many keys that are numbers or tuples, and not names")

    def _grow(self, target: _Value, items: Sequence[_Value], weight: int) -> None:
        if isinstance(target, _Made):
            target.cost += _ENTRY * len(items)
            target.weight = min(target.weight + weight, _MANY)

    def _call(self, args: _Value, *more: _Value) -> None:
        """Put the result of a call on the stack."""
        items = [*(args.items if isinstance(args, _Tuple) else (args,)), *more]
        copied = sum(item.cost for item in items)
        self._spend(_CALL + args.cost + copied)
        self._stack.append(self._light(_Made(_sum_of_weights(items) + 2 if items else 1, copied)))

    def _light(self, value: _Value) -> _Value:
        if value.weight > _LIGHT:
            self._records = None  # they may have anything from the memo as keys
        return value

    # ---- reading

    def _number(self, width: int) -> int:
        start = self.at
        self.at += width
        if self.at > len(self._data):
            raise ValueError("it is cut")
        return int.from_bytes(self._data[start : self.at], "little")

    def _skip(self, size: int, what: str) -> None:
        if size > len(self._data) - self.at:
            raise CorruptCheckpointError(f"has {len(self._data) - self.at} bytes left, not {size} for {what}")
        self.at += size

    def _line(self) -> bytes:
        start, end = self.at, self._data.find(b"\n", self.at)
        if end < 0:
            raise ValueError("a line has no end")
        self.at = end + 1
        return self._data[start:end]

    def _to_mark(self) -> list[_Value]:
        items, self._stack = self._stack, self._outer.pop()
        return items

    # ---- opcodes

    def stop(self) -> None:
        self._ended = True

    def frame(self) -> None:
        size = self._number(8)
        if size > len(self._data) - self.at:
            raise CorruptCheckpointError(f"has {len(self._data) - self.at} bytes left, not {size} for a frame")

    def mark(self) -> None:
        if len(self._outer) >= _MARKS:
            raise CorruptCheckpointError(f"has values in values, more than {_MARKS} deep")
        self._outer.append(self._stack)
        self._stack = []

    def pop(self) -> None:
        if self._stack:
            self._stack.pop()
        else:
            self._to_mark()

    def pop_mark(self) -> None:
        self._to_mark()

    def dup(self) -> None:
        self._stack.append(self._stack[-1])

    def tuple_to_mark(self) -> None:
        items = self._to_mark()
        self._stack.append(self._light(_Tuple(items)))

    def list_to_mark(self) -> None:
        items = self._to_mark()
        self.make_list()
        self._grow(self._stack[-1], items, _sum_of_weights(items))

    def dict_to_mark(self) -> None:
        items = self._to_mark()
        self.make_dict()
        self._set(items)

    def frozenset_to_mark(self) -> None:
        items = self._to_mark()
        self._hash(items)
        self._stack.append(self._light(_Made(_sum_of_weights(items) + 2, _ENTRY * len(items))))

    def make_list(self) -> None:
        self._spend(_LIST_BYTES)
        self._stack.append(_Made())

    def make_dict(self) -> None:
        self._spend(_DICT_BYTES)
        self._stack.append(_Made())

    def make_set(self) -> None:
        self._spend(_SET_BYTES)
        self._stack.append(_Made())

    def empty_tuple(self) -> None:
        self._stack.append(_NO_VALUES)

    def append(self) -> None:
        item = self._stack.pop()
        self._grow(self._stack[-1], [item], item.weight)

    def appends(self) -> None:
        items = self._to_mark()
        self._grow(self._stack[-1], items, _sum_of_weights(items))

    def setitem(self) -> None:
        value, key = self._stack.pop(), self._stack.pop()
        self._set([key, value])

    def setitems(self) -> None:
        self._set(self._to_mark())

    def _set(self, items: list[_Value]) -> None:
        weight = _sum_of_weights(items)
        if weight > len(items):  # not all of them are plain
            self._hash(items[::2])
        self._grow(self._stack[-1], items[::2], weight)

    def additems(self) -> None:
        items = self._to_mark()
        self._hash(items)
        self._grow(self._stack[-1], items, _sum_of_weights(items))

    def call(self) -> None:
        args = self._stack.pop()
        self._stack.pop()
        self._call(args)

    def call_with_names(self) -> None:
        names, args, _ = self._stack.pop(), self._stack.pop(), self._stack.pop()
        self._call(args, names)

    def call_to_mark(self) -> None:
        items = self._to_mark()
        self._call(_Tuple(items[1:]))

    def call_named_to_mark(self) -> None:
        self.name()
        self._stack.pop()
        self._call(_Tuple(self._to_mark()))

    def build(self) -> None:
        state = self._stack.pop()
        parts = state.items if isinstance(state, _Tuple) else ()
        self._spend(state.cost + sum(part.cost for part in parts))
        if not self._stack:
            raise ValueError("there is nothing to build")

    def name(self) -> None:
        self._line()
        self._line()
        self._stack.append(_ATOM)

    def name_from_stack(self) -> None:
        self._stack.pop()
        self._stack[-1] = _ATOM

    def text_number(self) -> None:
        digits = len(self._line())
        if digits > _DIGITS:
            raise CorruptCheckpointError(f"has a number of {digits} digits")
        self._stack.append(_NUMBER)

    def line_of_text(self) -> None:
        self._stack.append(_Value(1, len(self._line())))

    def persistent(self) -> None:
        self._stack[-1] = _ATOM

    def extension(self) -> None:
        raise CorruptCheckpointError("has an extension code, which nothing registers")

    def get_text(self) -> None:
        self._get(int(self._line()))

    def get1(self) -> None:
        records = self._records if self._data[self.at + 1] == _EMPTY_TUPLE else None
        if records is None or not self._go_over_records(records.match):
            self._get(self._number(1))

    def get4(self) -> None:
        records = self._records if self._data[self.at + 4] == _EMPTY_TUPLE else None
        if records is None or not self._go_over_records(records.match):
            self._get(self._number(4))

    def _get(self, index: int) -> None:
        self._stack.append(self._puts[index] if self._puts else self._memo[index])

    def put_text(self) -> None:
        self._put(int(self._line()))

    def put1(self) -> None:
        self._put(self._number(1))

    def put4(self) -> None:
        self._put(self._number(4))

    def _put(self, index: int) -> None:
        if self._memo or not 0 <= index <= len(self._puts) + _GAP:
            raise CorruptCheckpointError(
                f"asks for memo place {index} after {len(self._puts) + len(self._memo)} values"
            )
        self._puts[index] = self._stack[-1]

    def memoize(self) -> None:
        if self._puts:
            raise CorruptCheckpointError(_TWO_WAYS)
        self._memo.append(self._stack[-1])

    def _go_over_records(self, match: Callable[[bytes | mmap, int], re.Match[bytes] | None]) -> bool:
        """Go over objects with their attributes, if they follow: most of ``.metadata`` is such records."""
        start = self.at = self.at - 1
        while found := match(self._data, self.at):
            self.at = found.end()
            self._stack.append(_ATOM)
            if self._memoizes:
                if self._puts:
                    raise CorruptCheckpointError(_TWO_WAYS)
                sizes = (found.end(2) > 0) + (found.end(3) > 0)
                self._memo += self._record_memos[found.end(1) > 0][sizes]
        if self.at > start:
            return True
        self.at += 1
        return False


def _pushes(nbytes: int, value: _Value) -> Callable[[_Walk], None]:
    """The handler of an opcode that pushes a value of so many bytes."""

    def push(walk: _Walk) -> None:
        walk._number(nbytes)  # noqa: SLF001 - a handler is a method
        walk._stack.append(value)  # noqa: SLF001

    return push


def _pushes_text(width: int) -> Callable[[_Walk], None]:
    """The handler of a text or bytes behind their length."""

    def push(walk: _Walk) -> None:
        size = walk._number(width)  # noqa: SLF001
        walk._skip(size, "a text")  # noqa: SLF001
        walk._stack.append(_TEXTS[size] if size < 256 else _Value(1, size))  # noqa: SLF001, PLR2004

    return push


def _pushes_long(width: int) -> Callable[[_Walk], None]:
    """The handler of an integer behind its length."""

    def push(walk: _Walk) -> None:
        size = walk._number(width)  # noqa: SLF001
        walk._skip(size, "a number")  # noqa: SLF001
        if size > walk._longest:  # noqa: SLF001
            raise CorruptCheckpointError(f"has a number of {size} bytes")
        walk._stack.append(_ATOM if size <= _OWN_HASH_BYTES else _NUMBER)  # noqa: SLF001

    return push


def _pushes_tuple(count: int) -> Callable[[_Walk], None]:
    def push(walk: _Walk) -> None:
        stack = walk._stack  # noqa: SLF001
        items = stack[len(stack) - count :]
        if len(items) != count:
            raise ValueError("a tuple has too few values")
        del stack[len(stack) - count :]
        stack.append(walk._light(_Tuple(items)))  # noqa: SLF001

    return push


def _nothing(_: _Walk) -> None:
    pass


_EMPTY_TUPLE = pickle.EMPTY_TUPLE[0]
_BY_NAME: dict[str, Callable[[_Walk], None]] = {
    "PROTO": lambda walk: walk._skip(1, "the protocol"),  # noqa: SLF001
    "FRAME": _Walk.frame,
    "STOP": _Walk.stop,
    "MARK": _Walk.mark,
    "POP": _Walk.pop,
    "POP_MARK": _Walk.pop_mark,
    **dict.fromkeys(("NONE", "NEWTRUE", "NEWFALSE", "NEXT_BUFFER"), _pushes(0, _ATOM)),
    "BININT": _pushes(4, _ATOM),
    "BININT1": _pushes(1, _ATOM),
    "BININT2": _pushes(2, _ATOM),
    "BINFLOAT": _pushes(8, _NUMBER),
    "LONG1": _pushes_long(1),
    "LONG4": _pushes_long(4),
    **dict.fromkeys(("INT", "LONG", "FLOAT"), _Walk.text_number),
    **dict.fromkeys(("STRING", "UNICODE", "PERSID"), _Walk.line_of_text),
    **dict.fromkeys(("SHORT_BINSTRING", "SHORT_BINUNICODE", "SHORT_BINBYTES"), _pushes_text(1)),
    **dict.fromkeys(("BINSTRING", "BINUNICODE", "BINBYTES"), _pushes_text(4)),
    **dict.fromkeys(("BINUNICODE8", "BINBYTES8", "BYTEARRAY8"), _pushes_text(8)),
    "EMPTY_LIST": _Walk.make_list,
    "EMPTY_DICT": _Walk.make_dict,
    "EMPTY_SET": _Walk.make_set,
    "LIST": _Walk.list_to_mark,
    "DICT": _Walk.dict_to_mark,
    "FROZENSET": _Walk.frozenset_to_mark,
    "EMPTY_TUPLE": _Walk.empty_tuple,
    "TUPLE": _Walk.tuple_to_mark,
    "TUPLE1": _pushes_tuple(1),
    "TUPLE2": _pushes_tuple(2),
    "TUPLE3": _pushes_tuple(3),
    "APPEND": _Walk.append,
    "APPENDS": _Walk.appends,
    "SETITEM": _Walk.setitem,
    "SETITEMS": _Walk.setitems,
    "ADDITEMS": _Walk.additems,
    "REDUCE": _Walk.call,
    "NEWOBJ": _Walk.call,
    "NEWOBJ_EX": _Walk.call_with_names,
    "OBJ": _Walk.call_to_mark,
    "INST": _Walk.call_named_to_mark,
    "BUILD": _Walk.build,
    "DUP": _Walk.dup,
    "GLOBAL": _Walk.name,
    "STACK_GLOBAL": _Walk.name_from_stack,
    "BINPERSID": _Walk.persistent,
    "GET": _Walk.get_text,
    "BINGET": _Walk.get1,
    "LONG_BINGET": _Walk.get4,
    "PUT": _Walk.put_text,
    "BINPUT": _Walk.put1,
    "LONG_BINPUT": _Walk.put4,
    "MEMOIZE": _Walk.memoize,
    **dict.fromkeys(("EXT1", "EXT2", "EXT4"), _Walk.extension),
    "READONLY_BUFFER": _nothing,
}
_HANDLERS = {getattr(pickle, name)[0]: handler for name, handler in _BY_NAME.items()}


@functools.cache
def _records(put: bytes) -> re.Pattern[bytes]:
    """The opcodes of an object without arguments and with a few attributes, where the memo has their names.

    Values are plain, but for at most one text, which is group 1, and two ``torch.Size`` behind it, groups 2 and 3.

    Args:
        put: The opcode that follows whatever goes into the memo.
    """
    put = re.escape(put)
    get = b"(?:h.|j.{4})"
    number = b"(?:K.|M.{2}|J.{4}|\\x8a(?:%s))" % b"|".join(b"\\x%02x.{%d}" % (size, size) for size in range(9))
    text = b"\\x8c" + _lengths(0, 255) + put
    sizes = b"(?:\\(%s{1,9}t|%s\\x85|%s{2}\\x86|%s{3}\\x87)" % (number, number, number, number)
    size = get + sizes + put + b"\\x85" + put + b"R" + put
    # what is not followed by the next name or the end is the function of a torch.Size
    plain = b"(?:%s(?:%s(?=[hju])|%s|[N\\x88\\x89]|G.{8})){0,8}" % (get, get, number)
    attributes = plain + b"(%s%s)?" % (get, text) + plain + (b"(%s%s)?" % (get, size) + plain) * 2
    return re.compile(get + b"\\)\\x81" + put + b"}" + put + b"\\(" + attributes + b"ub", re.DOTALL)


def _lengths(low: int, high: int) -> bytes:
    """A pattern of a byte and as many others as it says, by halves: an alternative for each would be slow."""
    if low == high:
        return b"\\x%02x.{%d}" % (low, low)
    middle = (low + high) // 2
    return b"(?:(?=[\\x%02x-\\x%02x])%s|%s)" % (low, middle, _lengths(low, middle), _lengths(middle + 1, high))


__all__ = ["check_pickle"]

"""Follow the opcodes of a pickle without building anything, and refuse one that would cost more than its size warrants.

Python's C unpickler allocates memory for every memo index in the file, copies values of the memo as often as the file
says, and hashes nested tuples by recursion in C, without limits. So a hostile pickle of a few bytes can exhaust memory,
time or the C stack. Each opcode is followed first with values that know only their cost, before the real unpickler.
https://docs.python.org/3/library/pickletools.html has the opcodes.
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

#: Bytes that a pickle's calls, states and keys may cost: a constant, and so many per byte of the pickle.
_FREE, _PER_BYTE = 16 << 20, 64
#: Assumed costs in bytes: of a call; of a copied entry of a list, dict or set; of one of a tuple; of a hashed value.
_CALL, _ENTRY, _SLOT, _HASH = 200, 32, 16, 16
#: Deepest nesting of tuples (no pickler's own recursion reaches it), and most values in a key, inner tuples included:
#: hashing visits all of them, on the C stack.
_DEEPEST, _KEY = 1000, 10_000
#: Counts stop here: tuples that share tuples have exponentially many values.
_MANY = 1 << 40
#: Largest gap in memo indices. Picklers count 0, 1, 2, ...; some skip a number.
_GAP = 1024
#: The first protocol with MEMOIZE.
_MEMOIZING = b"\x04"
#: Most digits of a number in text: int() takes quadratic time.
_DIGITS = 1000
#: In a plain pickle: most keys that are numbers or tuples, and most bytes of an integer.
_ODD_KEYS, _PLAIN_BYTES = 1000, 32
#: Integers of at most so many bytes have distinct hashes.
_OWN_HASH_BYTES = 7
_TWO_WAYS = "numbers its memo in two ways"
#: Bytes of an empty list, dict and set, which one opcode makes; and the deepest nesting of MARKs.
_LIST_BYTES, _DICT_BYTES, _SET_BYTES, _MARKS = 64, 64, 216, 10_000
#: Records are matched by a pattern in pickles of at least so many bytes, while no tuple has more than so many values.
_LARGE, _LIGHT = 1 << 16, 64


def check_pickle(data: bytes | mmap, source: str, *, plain: bool = False, start: int = 0) -> int:
    """Raise an error for a pickle that would cost time or memory out of proportion to its size, or crash the process.

    Returns the offset of the pickle's end in the data; the bytes after it are ignored. Nothing is built and no global
    is looked up: the unpickler decides which globals are allowed. A pickle that is cut or damaged, or costs too much,
    is a CorruptCheckpointError, which names the fault.

    With ``plain`` few dict keys are allowed other than text, objects and small integers (hashes of floats and tuples
    can be made to collide), and integers of at most 32 bytes.
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
    """The cost of a value: how many values hashing it visits (weight), and the bytes that a copy of it takes (cost)."""

    __slots__ = ("cost", "weight")

    def __init__(self, weight: int = 1, cost: int = 0) -> None:
        self.weight = weight
        self.cost = cost


class _Growing(_Value):
    """A container or the result of a call: its cost may grow."""

    __slots__ = ()


class _Tuple(_Value):
    """A tuple: copied when it is the arguments of a call, and so may be its items."""

    __slots__ = ("depth", "items")

    def __init__(self, items: Sequence[_Value]) -> None:
        super().__init__(_sum_of_weights(items) + 2, _SLOT * len(items))
        self.depth: int = 1 + max((item.depth for item in items if isinstance(item, _Tuple)), default=0)
        self.items = items
        if self.depth > _DEEPEST:
            raise CorruptCheckpointError(f"has tuples in tuples, more than {_DEEPEST} deep")


def _sum_of_weights(items: Iterable[_Value]) -> int:
    return min(sum(item.weight for item in items), _MANY)


#: A value that hashes without collisions; a number, whose hash may collide; texts by their number of bytes.
_ATOM, _NUMBER = _Value(), _Value(2)
_TEXTS = [_Value(1, size) for size in range(256)]
_NO_VALUES = _Tuple(())
#: The names of the codec by which pickles write bytes, and the value of such a text.
_LATIN1, _LATIN1_SIZES, _LATIN1_TEXT = (b"latin1", b"latin-1"), (6, 7), _Value(1, 7)
#: How much other codecs, and other treatments of errors, may expand a text: "namereplace" 40 times.
_EXPANDS = 50


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
                [[_Growing()] * 2 + [_TEXTS[255]] * texts + [size] * 3 * sizes for sizes in range(3)]
                for texts in (0, 1)
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
        """Count the cost of hashing keys."""
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
        if isinstance(target, _Growing):
            target.cost += _ENTRY * len(items)
            target.weight = min(target.weight + weight, _MANY)

    def _call(self, args: _Value, *more: _Value) -> None:
        """Push the result of a call onto the stack."""
        items = [*(args.items if isinstance(args, _Tuple) else (args,)), *more]
        copied = sum(item.cost for item in items)
        # in a plain pickle a value and a text may be for _codecs.encode, which torch's reader allows, with any codec
        names_codec = self._odd_left is not None and len(items) > 1 and type(items[1]) is _Value and items[1].cost
        if names_codec and not (len(items) == 2 and items[1] is _LATIN1_TEXT):  # noqa: PLR2004 - a text and its codec
            copied *= _EXPANDS
            if type(items[0]) is _Value:  # a text: punycode and idna take quadratic time
                self._spend(items[0].cost ** 2)
        self._spend(_CALL + args.cost + copied)
        self._stack.append(self._light(_Growing(_sum_of_weights(items) + 2 if items else 1, copied)))

    def _light(self, value: _Value) -> _Value:
        if value.weight > _LIGHT:
            self._records = None  # stop matching: a record may use such a tuple from the memo as a key
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

    def to_mark(self) -> list[_Value]:
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
            self.to_mark()

    def dup(self) -> None:
        self._stack.append(self._stack[-1])

    def tuple_to_mark(self) -> None:
        items = self.to_mark()
        self._stack.append(self._light(_Tuple(items)))

    def list_to_mark(self) -> None:
        items = self.to_mark()
        self.make_list()
        self._grow(self._stack[-1], items, _sum_of_weights(items))

    def dict_to_mark(self) -> None:
        items = self.to_mark()
        self.make_dict()
        self._set(items)

    def frozenset_to_mark(self) -> None:
        items = self.to_mark()
        self._hash(items)
        self._stack.append(self._light(_Growing(_sum_of_weights(items) + 2, _ENTRY * len(items))))

    def make_list(self) -> None:
        self._spend(_LIST_BYTES)
        self._stack.append(_Growing())

    def make_dict(self) -> None:
        self._spend(_DICT_BYTES)
        self._stack.append(_Growing())

    def make_set(self) -> None:
        self._spend(_SET_BYTES)
        self._stack.append(_Growing())

    def append(self) -> None:
        item = self._stack.pop()
        self._grow(self._stack[-1], [item], item.weight)

    def appends(self) -> None:
        items = self.to_mark()
        self._grow(self._stack[-1], items, _sum_of_weights(items))

    def setitem(self) -> None:
        value, key = self._stack.pop(), self._stack.pop()
        self._set([key, value])

    def setitems(self) -> None:
        self._set(self.to_mark())

    def _set(self, items: list[_Value]) -> None:
        weight = _sum_of_weights(items)
        if weight > len(items):  # at least one weighs more than 1
            self._hash(items[::2])
        self._grow(self._stack[-1], items[::2], weight)

    def additems(self) -> None:
        items = self.to_mark()
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
        items = self.to_mark()
        self._call(_Tuple(items[1:]))

    def call_named_to_mark(self) -> None:
        self.name()
        self._stack.pop()
        self._call(_Tuple(self.to_mark()))

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
        line = self._line()
        self._stack.append(_LATIN1_TEXT if line in _LATIN1 else _Value(1, len(line)))

    def persistent(self) -> None:
        self._stack[-1] = _ATOM

    def extension(self) -> None:
        raise CorruptCheckpointError("has an extension code, which nothing registers")

    def get_text(self) -> None:
        self._get(int(self._line()))

    def get1(self) -> None:
        records = self._records if self._data[self.at + 1] == _EMPTY_TUPLE else None
        if records is None or not self._skip_records(records.match):
            self._get(self._number(1))

    def get4(self) -> None:
        records = self._records if self._data[self.at + 4] == _EMPTY_TUPLE else None
        if records is None or not self._skip_records(records.match):
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

    def _skip_records(self, match: Callable[[bytes | mmap, int], re.Match[bytes] | None]) -> bool:
        """Skip records (objects with attributes) by a pattern, which is faster: most of ``.metadata`` is such."""
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
    """Return the handler of an opcode that pushes a value of so many bytes."""

    def push(walk: _Walk) -> None:
        walk._number(nbytes)  # noqa: SLF001 - a handler is a method
        walk._stack.append(value)  # noqa: SLF001

    return push


def _pushes_text(width: int) -> Callable[[_Walk], None]:
    """Return the handler of an opcode with a length, and a text or bytes after it."""

    def push(walk: _Walk) -> None:
        size = walk._number(width)  # noqa: SLF001
        walk._skip(size, "a text")  # noqa: SLF001
        value = _TEXTS[size] if size < 256 else _Value(1, size)  # noqa: PLR2004
        if size in _LATIN1_SIZES and walk._data[walk.at - size : walk.at] in _LATIN1:  # noqa: SLF001
            value = _LATIN1_TEXT
        walk._stack.append(value)  # noqa: SLF001

    return push


def _pushes_long(width: int) -> Callable[[_Walk], None]:
    """Return the handler of an opcode with a length, and an integer after it."""

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


_EMPTY_TUPLE = pickle.EMPTY_TUPLE[0]
_BY_NAME: dict[str, Callable[[_Walk], object]] = {
    "PROTO": lambda walk: walk._skip(1, "the protocol"),  # noqa: SLF001
    "FRAME": _Walk.frame,
    "STOP": _Walk.stop,
    "MARK": _Walk.mark,
    "POP": _Walk.pop,
    "POP_MARK": _Walk.to_mark,
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
    "EMPTY_TUPLE": _pushes(0, _NO_VALUES),
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
    "READONLY_BUFFER": lambda _: None,
}
_HANDLERS = {getattr(pickle, name)[0]: handler for name, handler in _BY_NAME.items()}


@functools.cache
def _records(put: bytes) -> re.Pattern[bytes]:
    """Return the pattern of an object without arguments and with a few attributes, whose names are in the memo.

    Values are plain, except for at most one text (group 1) and two ``torch.Size`` after it (groups 2 and 3). ``put`` is
    the opcode that follows each value that goes into the memo.
    """
    put = re.escape(put)
    get = b"(?:h.|j.{4})"
    number = b"(?:K.|M.{2}|J.{4}|\\x8a(?:%s))" % b"|".join(b"\\x%02x.{%d}" % (size, size) for size in range(9))
    text = b"\\x8c" + _lengths(0, 255) + put
    sizes = b"(?:\\(%s{1,9}t|%s\\x85|%s{2}\\x86|%s{3}\\x87)" % (number, number, number, number)
    size = get + sizes + put + b"\\x85" + put + b"R" + put
    # a GET that is not followed by the next name or the end gets the function of a torch.Size
    plain = b"(?:%s(?:%s(?=[hju])|%s|[N\\x88\\x89]|G.{8})){0,8}" % (get, get, number)
    attributes = plain + b"(%s%s)?" % (get, text) + plain + (b"(%s%s)?" % (get, size) + plain) * 2
    return re.compile(get + b"\\)\\x81" + put + b"}" + put + b"\\(" + attributes + b"ub", re.DOTALL)


def _lengths(low: int, high: int) -> bytes:
    """Return a pattern of a length byte and so many bytes, by halves: 256 alternatives in a row would be slow."""
    if low == high:
        return b"\\x%02x.{%d}" % (low, low)
    middle = (low + high) // 2
    return b"(?:(?=[\\x%02x-\\x%02x])%s|%s)" % (low, middle, _lengths(low, middle), _lengths(middle + 1, high))

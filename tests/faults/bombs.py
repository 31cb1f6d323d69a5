"""Pickles that would crash a process, or take memory or time out of proportion to their size, and what loads them.

``python -m tests.faults.bombs`` reads directories as JSON from standard input, and loads each in a fork of its own.
"""

from __future__ import annotations

import json
import os
import pickle
import resource
import signal
import sys
from pathlib import Path
from typing import Any

import torch

from shardckpt.errors import CheckpointingException
from tests.faults import samples
from tests.faults.forks import fork, wait
from tests.faults.hostile import archive, named

#: What a load may take: memory beyond this ends it, and so does this time.
_HEADROOM = 1 << 30
_SECONDS = 20

SIZE = 300_000
#: The modulus of Python's hashes of numbers.
_MODULUS = (1 << 61) - 1


# ---- making them


def opcodes(*parts: bytes | object) -> bytes:
    """A pickle of opcodes, and of plain values as their opcodes."""
    return b"\x80\x04" + b"".join(p if isinstance(p, bytes) else pickle.dumps(p, 2)[2:-1] for p in parts) + b"."


def memoized(value: Any, place: int) -> bytes:
    """A plain value that is in the memo, and nowhere else."""
    return _bare(value) + b"q" + bytes([place]) + b"0"


def _bare(value: Any) -> bytes:
    """The opcodes of a nest of plain values, without any memo."""
    if isinstance(value, dict):
        return b"}(" + b"".join(_bare(key) + _bare(inner) for key, inner in value.items()) + b"u"
    if isinstance(value, (list, tuple)):
        inside = b"".join(map(_bare, value))
        return b"](" + inside + b"e" if isinstance(value, list) else b"(" + inside + b"t"
    if isinstance(value, str):
        return b"X" + len(value).to_bytes(4, "little") + value.encode()
    if isinstance(value, bytes):
        return b"B" + len(value).to_bytes(4, "little") + value
    return pickle.dumps(value, 2)[2:-1]


def called(module: str, name: str, args: bytes) -> bytes:
    """A call of a global with arguments from the stack."""
    return named(module, name) + args + b"R"


def filled(start: bytes, repeated: bytes, end: bytes = b"e") -> bytes:
    """A pickle of a list of the same again and again, of 100 kB."""
    return opcodes(start, b"](", repeated * (100_000 // len(repeated)), end)


def copies(value: Any, made: tuple[str, str], repeated: bytes) -> bytes:
    """The same again and again, with a plain value at place 1 of the memo and a global at place 2."""
    return filled(memoized(value, 1) + named(*made) + b"q\x020", repeated)


NESTED = b"K\x01" + b"\x85" * SIZE
SHARED = b"K\x01" + b"2\x86" * 60
COLLIDING = [number * _MODULUS for number in range(1, 30_001)]
#: Every one has the hash of every other: those of -1 and of -2 are equal.
ALIKE = [tuple(-1 - (number >> bit & 1) for bit in range(15)) for number in range(15_000)]
NAMES = {f"n{number}": number for number in range(5_000)}

#: As any of the files that are pickles.
ANYWHERE: dict[str, bytes] = {
    "nested tuples as a key": opcodes(b"}", NESTED, b"Ns"),
    "nested tuples as one of many keys": opcodes(b"}(", NESTED, b"Nu"),
    "nested tuples in a dict from the mark": opcodes(b"(", NESTED, b"Nd"),
    "nested tuples in a frozenset": opcodes(b"(", NESTED, b"\x91"),
    "nested tuples in a set": opcodes(b"\x8f(", NESTED, b"\x90"),
    "nested tuples from the memo": opcodes(b"}K\x01", b"\x85q\x010h\x01" * (SIZE // 6), b"Ns"),
    "tuples that hold one twice, as a key": opcodes(b"}", SHARED, b"Ns"),
    "tuples that hold one twice, in a frozenset": opcodes(b"(", SHARED, b"\x91"),
    "a far memo place": b"\x80\x02Nr\x00\x00\x00\x08.",
    "a far memo place as text": b"\x80\x02Np134217728\n.",
    "memo places far from each other": opcodes(*(b"Nr" + (k << 20).to_bytes(4, "little") for k in range(100))),
    "a frame of a tebibyte": b"\x80\x04\x95" + (1 << 40).to_bytes(8, "little") + b"N.",
    **{
        f"{name} of 2 GiB": b"\x80\x05" + code + (0x7FFFFFF0).to_bytes(width, "little") + b"a."
        for name, code, width in (
            ("a text", b"X", 4),
            ("bytes", b"\x8e", 8),
            ("a bytearray", b"\x96", 8),
            ("a long text", b"\x8d", 8),
            ("a number", b"\x8b", 4),
        )
    },
    "a number of many digits": b"\x80\x02L" + b"7" * SIZE + b"L\n.",
    "copies of a torch.Size": copies(tuple(range(10_000)), ("torch", "Size"), b"h\x02h\x01\x85R"),
    "copies of a torch.Size, as arguments": copies(tuple(range(10_000)), ("torch", "Size"), b"h\x02h\x01\x81"),
    "copies of an OrderedDict": copies(
        [(number, number) for number in range(5_000)], ("collections", "OrderedDict"), b"h\x02h\x01\x85R"
    ),
    "a name that is a nest without end": opcodes(SHARED, b"Q"),
    "colliding keys": opcodes(b"}(", *(_bare(key) + b"N" for key in COLLIDING), b"u"),
    "colliding keys, one by one": opcodes(b"}", *(_bare(key) + b"Ns" for key in COLLIDING)),
    "colliding keys in a set": opcodes(b"\x8f(", *map(_bare, COLLIDING), b"\x90"),
    "colliding keys in a frozenset": opcodes(b"(", *map(_bare, COLLIDING), b"\x91"),
    "colliding tuples": opcodes(b"}(", *(_bare(key) + b"N" for key in ALIKE), b"u"),
}

_METADATA = ("torch.distributed.checkpoint.metadata", "Metadata")
#: As ``.metadata``.
METADATA: dict[str, bytes] = {
    "copies of a state": copies(NAMES, _METADATA, b"h\x02)\x81h\x01b"),
    "copies of arguments": copies(tuple(range(10_000)), _METADATA, b"h\x02h\x01R"),
    "parts of a path": copies(tuple("a" * 10 for _ in range(10_000)), ("pathlib", "PurePosixPath"), b"h\x02h\x01R"),
}


def _array_of(content: bytes) -> bytes:
    """A numpy array of one object; its function, class, arguments and dtype are in the memo."""
    return b"h\x01h\x02R(K\x01K\x01\x85h\x03\x89]" + content + b"atb"


_ARRAYS = (
    named("numpy.core.multiarray", "_reconstruct")
    + b"q\x010("
    + named("numpy", "ndarray")
    + b"K\x00\x85C\x01btq\x020"
    + called("numpy", "dtype", b"X\x02\x00\x00\x00O8\x89\x88\x87")
    + b"(K\x03X\x01\x00\x00\x00|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK?tbq\x030"
)


def _deque_of(content: bytes) -> bytes:
    return b"h\x01)R" + content + b"a"


def _nested(start: bytes, wrap: Any) -> bytes:
    """A value in another of its kind, and so on, in about 300 kB."""
    head, tail = wrap(b"\0").split(b"\0")
    count = SIZE // len(head + tail)
    return opcodes(start, head * count, b"N", tail * count)


def _of_a_storage(kind: bytes, numel: int, shape: bytes, stride: bytes, more: bytes = b"") -> bytes:
    """A tensor over the storage ``0``."""
    storage = b"(X\x07\x00\x00\x00storage" + named("torch", kind.decode()) + b"X\x01\x00\x00\x000X\x03\x00\x00\x00cpu"
    place = b"K\x00" + shape + stride + b"\x89" + called("collections", "OrderedDict", b")")
    return called("torch._utils", "_rebuild_tensor_v2", b"(" + storage + _bare(numel) + b"tQ" + place + more + b"t")


NEGATED = _bare({"neg": True})
_FIELDS = 5_000
_STRUCTURE = (
    called("numpy", "dtype", b"X\x02\x00\x00\x00f4\x89\x88\x87")
    + b"(K\x03X\x01\x00\x00\x00<NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tbq\x010"
    + b"(K\x03X\x01\x00\x00\x00|N("
    + b"".join(_bare(f"f{number}") for number in range(_FIELDS))
    + b"t}("
    + b"".join(_bare(f"f{number}") + b"h\x01" + _bare(4 * number) + b"\x86" for number in range(_FIELDS))
    + b"u"
    + _bare(4 * _FIELDS)
    + b"K\x04K\x00tq\x020"
    + named("numpy", "dtype")
    + b"q\x030"
    + _bare(f"V{4 * _FIELDS}")
    + b"\x89\x88\x87q\x040"
)

#: As common state and as an object; with storage ``0``, of 16 bytes.
OBJECTS: dict[str, bytes] = {
    "nested tuples in a set that is called for": opcodes(called("builtins", "set", b"](" + NESTED + b"e\x85")),
    "nested slices": opcodes(named("builtins", "slice"), b"q\x010", b"h\x01" * 75_000, b"N", b"\x85R" * 75_000),
    "nested deques": _nested(named("collections", "deque") + b"q\x010", _deque_of),
    "deques, each in another before it has one": opcodes(
        named("collections", "deque"), b"q\x010](h\x01)Rq\x02", b"h\x02h\x01)Rq\x02a" * 30_000, b"e"
    ),
    "nested defaultdicts": _nested(
        named("collections", "defaultdict") + b"q\x010", lambda inner: b"h\x01)RK\x01" + inner + b"s"
    ),
    "nested arrays": _nested(_ARRAYS, _array_of),
    "colliding keys in a set that is called for": opcodes(
        called("builtins", "set", b"](" + b"".join(map(_bare, COLLIDING)) + b"e\x85")
    ),
    "colliding keys in a dict that is called for": opcodes(
        called("builtins", "dict", b"](" + b"".join(_bare((key, 0)) for key in COLLIDING) + b"e\x85")
    ),
    "arguments that stand-ins keep": copies(tuple(range(10_000)), ("megatron.core", "A"), b"h\x02h\x01R"),
    "arguments by name that stand-ins keep": copies(NAMES, ("megatron.core", "A"), b"h\x02)h\x01\x92"),
    "states of namespaces": copies(NAMES, ("argparse", "Namespace"), b"h\x02)\x81h\x01b"),
    "dicts of a dict": copies(NAMES, ("builtins", "dict"), b"h\x02h\x01\x85R"),
    "dicts of a small dict": copies(dict.fromkeys(range(60)), ("builtins", "dict"), b"h\x02h\x01\x85R"),
    "structured dtypes": filled(_STRUCTURE, b"h\x03h\x04Rh\x02b"),
    "an archive in an archive, again and again": filled(
        memoized(archive(b"\x80\x02](" + b"N" * 20_000 + b"e."), 1)
        + named("torch.storage", "_load_from_bytes")
        + b"q\x020",
        b"h\x02h\x01\x85R",
    ),
}


#: Views that take no memory of their own, however large they are.
VIEWS: dict[str, bytes] = {
    "a negated view of an element, a gibibyte large": opcodes(
        _of_a_storage(b"FloatStorage", 1, _bare((1 << 28,)), _bare((0,)), NEGATED)
    ),
    "many negated views of an element": opcodes(
        b"](", _of_a_storage(b"FloatStorage", 1, _bare((1 << 22,)), _bare((0,)), NEGATED) * 128, b"e"
    ),
}


# ---- loading them


def _report(directory: Path, sound: Path, pipe: int) -> None:
    """Load one, and write what it came to: the error, and by how many MiB the peak of memory grew.

    A fork begins without the pages of libraries, which count: a load of the sound one touches them before.
    """
    samples.load(sound)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 10
    limit = pages * os.sysconf("SC_PAGE_SIZE") + _HEADROOM
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (_SECONDS, _SECONDS))
    kind, message = "", ""
    try:
        loaded = samples.load(directory)
        del loaded
    except Exception as exc:  # noqa: BLE001 - it is reported
        kind = type(exc).__name__ if isinstance(exc, CheckpointingException) else f"{type(exc).__name__}, of no family"
        message = str(exc)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - resident) >> 10
    os.write(pipe, json.dumps({"kind": kind, "message": message[:2000], "grown": grown}).encode())


def _loaded(directory: Path, sound: Path) -> dict[str, Any]:
    """What a fork reports of a directory, or that it died."""
    read_end, write_end = os.pipe()
    pid = fork(lambda: _report(directory, sound, write_end))
    os.close(write_end)
    status = wait([pid], 3 * _SECONDS)[pid]
    with os.fdopen(read_end) as pipe:
        text = pipe.read()
    if status is None or os.WIFSIGNALED(status):
        return {"kind": "no answer" if status is None else signal.Signals(os.WTERMSIG(status)).name}
    return json.loads(text) if text else {"kind": f"status {status}"}  # type: ignore[no-any-return]


def main() -> None:
    """Print a report for every directory."""
    torch.set_num_threads(1)
    directories = json.load(sys.stdin)
    sound = Path(directories[0])
    samples.load(sound)
    json.dump({directory: _loaded(Path(directory), sound) for directory in directories}, sys.stdout)


if __name__ == "__main__":
    main()

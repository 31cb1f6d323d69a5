"""Objects as bytes, encoded and decoded under one allow-list: a save refuses values that a load would refuse."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import torch

from shardckpt.archive.reader import load_bytes
from shardckpt.archive.unpickle import make_refusal
from shardckpt.archive.writer import make_plain_archive
from shardckpt.distributed.pickling import can_be_pickled
from shardckpt.errors import CheckpointingException, ShardingError, UnsafePickleError, listed
from shardckpt.state_dict import nested_items

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

#: Classes whose values any load accepts, however many there are; an integer may have millions of digits.
_PLAIN = frozenset((str, float, bool, type(None)))
#: The deepest containers that are looked into, and the largest integer.
_DEEPEST, _LARGEST = 8, 1 << 63


def encode_object(value: Any, what: str, allow_globals: Iterable[Any]) -> bytes:
    """Return a value as bytes that :func:`decode_object` accepts; a value that it would refuse is an error here.

    Example:
        In a strategy's ``save``, and in its ``load``::

            data = encode_object(shard.data, f"object {shard.key!r}", context.allow_globals)
            value = decode_object(data, f"object {shard.key!r}", context.allow_globals)

    Args:
        value: Plain values, dicts, lists, tensors, numpy arrays, and values of ``allow_globals``.
        what: A name for the value in errors: ``"object 'rng'"``.
        allow_globals: Classes and functions that the value may use, besides those that every load accepts: the
            ``allow_globals`` of the context.

    Returns:
        A ``torch.save`` archive.

    Raises:
        ShardingError: The value cannot be pickled; the error names the place in it.
        UnsafePickleError: A load would refuse it; the error names the places, the classes, and how to allow them.
    """
    if _is_plain(value):
        return make_plain_archive(value)
    allowed = tuple(allow_globals)  # an iterator would be empty when the place of an error is looked for
    archive = make_archive(value, what)
    try:
        check_loadable(archive, what, allowed)
    except UnsafePickleError:
        refuse_unloadable({what: value}, allowed)
        raise
    return archive.getvalue()


def decode_object(data: bytes, what: str, allow_globals: Iterable[Any]) -> Any:
    """Return the value that :func:`encode_object` has encoded; nothing outside the allow-list is run or imported.

    Args:
        data: A ``torch.save`` archive, from anyone.
        what: A name for the value in errors: ``"object 'rng'"``, or a file.
        allow_globals: Classes and functions that it may name, besides plain values, tensors and numpy arrays: the
            ``allow_globals`` of the context; each by itself, or as (class or function, ``"module.name"``).

    Returns:
        The value, with its tensors on the CPU.

    Raises:
        UnsafePickleError: It names a global outside the allow-list.
        CorruptCheckpointError: The bytes are damaged, or would take too much memory.
    """
    return load_bytes(data, what, allow_globals)


def make_archive(value: Any, what: str) -> io.BytesIO:
    """Pickle a value as a ``torch.save`` archive, positioned at its start; whether a load would accept it is not asked.

    A value that cannot be pickled is a ShardingError that names the place in it.
    """
    if _is_plain(value):
        return io.BytesIO(make_plain_archive(value))
    file = io.BytesIO()
    try:
        torch.save(value, file)
    except Exception as exc:
        unpicklable = (path for path, leaf in nested_items(value) if not can_be_pickled(leaf))
        place = _join_path(next(unpicklable, ()))
        raise ShardingError(f"{what}{place} cannot be pickled: {type(exc).__name__}: {exc}") from exc
    file.seek(0)
    return file


def check_loadable(archive: io.BytesIO, what: str, allow_globals: Iterable[Any] = ()) -> None:
    """Raise UnsafePickleError if a load would refuse the archive: for a class outside the allow-list, for example."""
    try:
        load_bytes(archive.getvalue(), what, allow_globals, to_save=True)
    except CheckpointingException as exc:
        raise _make_error(exc) from exc


def _is_plain(value: Any) -> bool:
    """Return whether no load can refuse a value: lists, tuples and dicts by name, few in each other, of plain values.

    To load it to find out takes a hundred times as long: an optimizer's groups name each parameter.
    """
    level = [value]
    for _ in range(_DEEPEST):  # a container that contains itself exceeds it
        containers = {id(each): each for each in level if type(each) not in _PLAIN}.values()
        level = []
        for each in containers:
            kind = type(each)
            if kind is int and -_LARGEST <= each < _LARGEST:
                continue
            is_named = kind is dict and set(map(type, each)) <= {str}
            if not is_named and kind not in (list, tuple):
                return False
            values = each.values() if is_named else each
            if not set(map(type, values)) <= _PLAIN:
                level += values
        if not level:
            return True
    return False


def refuse_unloadable(values: Mapping[str, Any], allow_globals: tuple[Any, ...]) -> None:
    """Raise UnsafePickleError for all parts of nested values that a load would refuse by themselves, with their places.

    The values are by their names in errors; ``allow_globals`` is as for :func:`encode_object`.
    """
    errors: dict[str, CheckpointingException] = {}
    for what, value in values.items():
        for path, leaf in nested_items(value):
            if type(leaf) in _PLAIN:
                continue
            place = what + _join_path(path)
            try:
                load_bytes(make_archive(leaf, place).getvalue(), place, allow_globals, to_save=True)
            except CheckpointingException as exc:
                errors[place] = exc
    if len(errors) == 1:
        raise _make_error(*errors.values())
    if errors:
        refused = {place: getattr(exc, "refused", ()) for place, exc in errors.items()}
        lines = [f"{place}: {listed(refused[place])}" if refused[place] else str(exc) for place, exc in errors.items()]
        names = list(dict.fromkeys(name for each in refused.values() for name in each))
        if not names:
            raise _make_error(next(iter(errors.values())))
        raise _make_error(make_refusal("what asks for", names, "\n  " + listed(lines, "\n  ")))


def _make_error(refusal: CheckpointingException) -> UnsafePickleError:
    """Return the error of a save about values that a load would refuse."""
    can_be_allowed = getattr(refusal, "can_be_allowed", True)
    error = UnsafePickleError(f"a load would refuse {refusal}{' (to save and to load)' if can_be_allowed else ''}")
    error.refused, error.can_be_allowed = getattr(refusal, "refused", ()), can_be_allowed
    return error


def _join_path(path: Iterable[Any]) -> str:
    return "".join(f"[{part!r}]" for part in path)

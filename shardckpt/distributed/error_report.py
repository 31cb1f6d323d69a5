"""Errors in a form that other processes of the job can read: from rank to rank, and from the worker to the trainer."""

from __future__ import annotations

import functools
import pkgutil
import sys
import traceback
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from shardckpt.distributed.pickling import try_pickle, unpickle_trusted
from shardckpt.errors import CheckpointingException, RankFailedError

if TYPE_CHECKING:
    from collections.abc import Sequence

#: How many ranks' errors a joint message shows after the first.
_SHOWN = 8
#: Bytes of a pickled attribute, at most. Longer ones are left out: an error may refer to a tensor, and all ranks fail.
_MAX_BYTES = 64 << 10
#: Attributes that mean nothing in another process: a Comm's number, and who was told of the error.
_OF_THIS_PROCESS = ("shared_by", "is_reported", "is_logged")


@dataclass(frozen=True)
class ErrorReport:
    """An error in a form that can be sent; :meth:`rebuild` makes the error from it.

    An error arrives as itself if every process can import its class: with the class, and with those attributes that can
    be pickled. The class's ``__new__`` and ``__init__`` are not called, so they may take any arguments.

    - A subclass of CheckpointingException has the rank and the phase in its text. One with a ``__str__`` of its own
      keeps its text, and has the rank and the phase in its ``__notes__``, which tracebacks show since Python 3.11.
    - A class from outside the family arrives as a class of the same name that derives from CheckpointingException and
      from it: whoever catches either of the two catches the error.

    Any other error arrives as a RankFailedError whose text names the class: one of Python's own classes, one that is
    defined in a function or in a module that some process cannot import (a ``__main__`` of its own), and one whose
    ``__str__`` does not make the same text from the attributes that have arrived. The rule is the same on one rank,
    where nothing travels, so an error's class does not depend on the number of ranks.

    Attributes:
        where: Rank and phase, or the process, for the text.
        class_name: Name of the class, for the text; empty if ``text`` begins with it.
        class_path: ``module:qualified.name`` of the class; empty where that does not import it.
        text: The error's text.
        attributes: Pickles of the error's attributes and ``args``, one each: one that cannot be pickled costs no other.
        traceback: The formatted traceback with all causes, or empty.
        phase: The phase in which it was raised, or empty.
    """

    where: str
    class_name: str
    class_path: str
    text: str
    attributes: dict[str, bytes]
    traceback: str = ""
    phase: str = ""

    @classmethod
    def of(cls, error: BaseException, where: str, phase: str = "", *, with_traceback: bool = False) -> ErrorReport:
        """Return the report of an error, also of one from outside the family.

        ``where`` is rank and phase, or the process, for the text. The traceback is long: leave it out where all ranks
        may fail at once.
        """
        kind = error.foreign_class if isinstance(error, _AdoptedError) else type(error)
        name, path = kind.__name__, f"{kind.__module__}:{kind.__qualname__}"
        try:
            text = str(error)
        except Exception:  # noqa: BLE001 - any class may fail in any way, and the other ranks wait
            text = "(the error has no text: its __str__ failed)"
        attributes = {}
        if _import_class(path) is kind:
            args, values = _get_state(error)
            for name_here in _OF_THIS_PROCESS:
                values.pop(name_here, None)
            found = {attribute: try_pickle(value) for attribute, value in {**values, "args": args}.items()}
            attributes = {attribute: data for attribute, data in found.items() if data and len(data) <= _MAX_BYTES}
        else:
            name, path, text = "", "", f"{name}: {text}"
        trace = "".join(traceback.format_exception(error)) if with_traceback else ""
        return cls(where, name, path, text, attributes, trace, phase)

    def message(self, *, named: bool = False) -> str:
        """Return the text after ``where``, and after the class's name if ``named``."""
        name = f"{self.class_name}: " if named and self.class_name else ""
        return f"{self.where}: {name}{self.text}"

    def rebuild(self, message: str) -> CheckpointingException | None:
        """Return the error with the message as its text, or None where this process cannot make it.

        A subclass of CheckpointingException with a ``__str__`` of its own gets the message as a note.
        """
        kind = _import_class(self.class_path)
        if kind is None:
            return None
        attributes = {}
        for name, data in self.attributes.items():
            with suppress(Exception):  # leave out attributes that this process cannot unpickle
                attributes[name] = unpickle_trusted(data)
        try:
            error = _make_error(kind, attributes.pop("args", ()), attributes)
            if isinstance(error, _AdoptedError):
                error.shared_text = message
            elif kind.__str__ is BaseException.__str__:
                error.args = (message,)
            elif str(error) == self.text:
                vars(error)["__notes__"] = [*vars(error).get("__notes__", ()), message]
            else:
                return None
            copy_error(error)  # it is raised as a copy: a class that cannot be copied must be known now, on all ranks
        except Exception:  # noqa: BLE001 - any class may fail in any way
            return None
        return error

    def to_error(self) -> CheckpointingException:
        """Return the error for a process that need not agree with others: made again, or a RankFailedError."""
        rebuilt = self.rebuild(self.message())
        return RankFailedError(self.message(named=True)) if rebuilt is None else rebuilt


def join_messages(reports: Sequence[ErrorReport], *, named: bool = False) -> str:
    """Return the first rank's message, then a line for each rank with another error, up to 8.

    The reports are from all ranks that failed, in rank order.
    """
    first, *others = reports
    also = [report for report in others if (report.class_name, report.text) != (first.class_name, first.text)]
    lines = [first.message(named=named), *(report.message() for report in also[:_SHOWN])]
    if len(also) > _SHOWN:
        lines.append(f"... and {len(also) - _SHOWN} more ranks")
    return "\n".join(lines)


class _AdoptedError(CheckpointingException):
    """An error of a class from outside the family; subclasses derive from that class, too: see :func:`_adopt_class`.

    ``shared_text`` is the text, with the rank and the phase; ``args`` are the original error's.
    """

    foreign_class: ClassVar[type[Exception]]
    shared_text: str = ""

    def __str__(self) -> str:
        return self.shared_text

    def __reduce__(self) -> tuple[Any, ...]:  # pickle would look for the class under its name, and find the foreign one
        return _make_error, (self.foreign_class, *_get_state(self))


@functools.cache
def _adopt_class(kind: Any) -> type[_AdoptedError]:
    """Return a class of the same name that derives from CheckpointingException and from the class.

    Callers of a save or load catch CheckpointingException, and the manager does, to go back to an older checkpoint.
    """
    names = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(kind.__name__, (_AdoptedError, kind), {**names, "foreign_class": kind})


def copy_error(error: CheckpointingException) -> CheckpointingException:
    """Return a copy of an error without its traceback and its causes."""
    return _make_error(type(error), *_get_state(error))


def replace_text(error: CheckpointingException, text: str) -> CheckpointingException:
    """Make an error with another text, to be raised in the place of the first one: ``from`` that one's cause.

    The new text should include the old one. The attributes are copied, and the traceback is taken over. The class is
    the same; where that has a ``__str__`` of its own, or cannot be made of a text, it is the nearest base class in the
    family that can. CheckpointingException always can.
    """
    if isinstance(error, _AdoptedError):
        copy = copy_error(error)
        vars(copy).update(shared_text=text, shared_by=None)
        return copy.with_traceback(error.__traceback__)
    _, attributes = _get_state(error)
    attributes.pop("shared_by", None)  # a Comm's number: other ranks need not give their copies the same text
    for kind in type(error).__mro__:
        if issubclass(kind, CheckpointingException) and kind.__str__ is BaseException.__str__:
            with suppress(Exception):
                return _make_error(kind, (text,), attributes).with_traceback(error.__traceback__)
    return CheckpointingException(text).with_traceback(error.__traceback__)


def _make_error(kind: Any, args: tuple[Any, ...], attributes: dict[str, Any]) -> CheckpointingException:
    """Make an error without calling the methods of its class, which may take other arguments."""
    made = kind if issubclass(kind, CheckpointingException) else _adopt_class(kind)
    base = _find_builtin_base(made)
    error: CheckpointingException = base.__new__(made, *args)
    base.__init__(error, *args)  # OSError and others keep their arguments in fields that are in no __dict__
    for name, value in attributes.items():
        object.__setattr__(error, name, value)  # some attributes are fields of the built-in class: ImportError.name
    return error


def _get_state(error: BaseException) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of an error's built-in base class, and its attributes."""
    _, args, *state = _find_builtin_base(type(error)).__reduce__(error)
    return args, {**(state[0] or {} if state else {}), **vars(error)}


def _find_builtin_base(kind: Any) -> Any:
    """Return the class, written in C, that lays out the memory: OSError for a class of StorageError and OSError."""
    while kind.__module__ != "builtins":
        kind = kind.__base__
    return kind


def _import_class(path: str) -> type[Exception] | None:
    """Return the exception class at ``module:qualified.name``, or None if it is none or if it is Python's own.

    Importing is safe: the name comes from a process of this job, which runs the same program, never from a checkpoint.
    """
    # Who catches a KeyError around a load means one of the code there, not another rank's. And a StopIteration that
    # leaves a generator, as each phase is one, would become a RuntimeError.
    if path.partition(":")[0].partition(".")[0] in sys.stdlib_module_names:
        return None
    try:
        found = pkgutil.resolve_name(path)
    except (Exception, SystemExit):  # noqa: BLE001 - a module may fail in any way, and the other ranks wait
        return None
    is_error = isinstance(found, type) and issubclass(found, Exception)
    return found if is_error and not issubclass(found, (StopIteration, StopAsyncIteration)) else None

"""Errors in a form that other processes of the job can read: from rank to rank, and from the worker to the trainer."""

from __future__ import annotations

import pkgutil
import traceback
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from shardckpt.distributed.pickling import pickled, unpickled
from shardckpt.errors import CheckpointingException

if TYPE_CHECKING:
    from collections.abc import Sequence

_E = TypeVar("_E", bound=CheckpointingException)

#: How many ranks' errors a joint message shows after the first.
_SHOWN = 8
#: Bytes of a pickled attribute, at most. Longer ones are left out: an error may refer to a tensor, and all ranks fail.
_MAX_ATTRIBUTE_BYTES = 64 << 10


@dataclass(frozen=True)
class ErrorReport:
    """An error in a form that can be sent; :meth:`rebuild` makes the error from it.

    An error arrives with its own class if that is a subclass of CheckpointingException and every process can import it.
    Its attributes arrive, too, but for those that cannot be pickled. The class's ``__init__`` is not called, so it may
    take any arguments. A class with a ``__str__`` of its own keeps the text that it makes; the rank and the phase are
    then in the error's ``__notes__``, which tracebacks show since Python 3.11.

    Any other error arrives as a RankFailedError whose text names the class: a class outside the family, one that is
    defined in a function or in a module that some process cannot import (a ``__main__`` of its own), and one whose
    ``__str__`` does not make the same text from the attributes that have arrived. The rule is the same on one rank,
    where nothing travels, so an error's class does not depend on the number of ranks.

    Attributes:
        where: Rank and phase, or the process, for the text.
        class_name: Name of the class, for the text.
        class_path: ``module:qualified.name`` of the class; empty where that does not import it.
        text: The error's text.
        attributes: Pickles of the error's attributes and ``args``, one each: what cannot be pickled costs no other.
        traceback: The formatted traceback with all causes, or empty.
    """

    where: str
    class_name: str
    class_path: str
    text: str
    attributes: dict[str, bytes]
    traceback: str = ""

    @classmethod
    def of(cls, error: BaseException, where: str, *, with_traceback: bool = False) -> ErrorReport:
        """Describe an error.

        Args:
            error: Any error, also one from outside the family.
            where: Rank and phase, or the process, for the text.
            with_traceback: Whether to include the traceback. It is long: leave it out where all ranks may fail at once.

        Returns:
            The report.
        """
        kind = type(error)
        path = f"{kind.__module__}:{kind.__qualname__}"
        try:
            text = str(error)
        except Exception:  # noqa: BLE001 - any class may fail in any way, and the other ranks wait
            text = "(the error has no text: its __str__ failed)"
        attributes = {}
        if _import_class(path) is not kind:
            path = ""
        else:
            values = {**vars(error), "args": error.args}
            values.pop("shared_by", None)  # a Comm's number, which means nothing in another process
            found = {name: pickled(value) for name, value in values.items()}
            attributes = {name: data for name, data in found.items() if data and len(data) <= _MAX_ATTRIBUTE_BYTES}
        trace = "".join(traceback.format_exception(error)) if with_traceback else ""
        return cls(where, kind.__name__, path, text, attributes, trace)

    def message(self, *, named: bool = False) -> str:
        """Return the text after ``where``, and after the class's name if ``named`` or if the class cannot be sent."""
        name = "" if self.class_path and not named else f"{self.class_name}: "
        return f"{self.where}: {name}{self.text}"

    def rebuild(self, message: str) -> CheckpointingException | None:
        """Make the error.

        Args:
            message: The new error's text; a class with a ``__str__`` of its own gets it as a note.

        Returns:
            An error of the same class, or None where this process cannot make it.
        """
        kind = _import_class(self.class_path)
        if kind is None:
            return None
        attributes = {}
        for name, data in self.attributes.items():
            with suppress(Exception):  # leave out what this process cannot unpickle
                attributes[name] = unpickled(data)
        try:
            error = _make_error(kind, attributes.pop("args", ()), attributes)
            if kind.__str__ is BaseException.__str__:
                error.args = (message,)
            elif str(error) == self.text:
                vars(error)["__notes__"] = [*vars(error).get("__notes__", ()), message]
            else:
                return None
            copy_error(error)  # it is raised as a copy: a class that cannot be copied must be known now, on all ranks
        except Exception:  # noqa: BLE001 - any class may fail in any way
            return None
        return error


def join_messages(reports: Sequence[ErrorReport], *, named: bool = False) -> str:
    """Join the errors of several ranks into the text of the one error that all ranks raise.

    Args:
        reports: The reports of all ranks that failed, in rank order.
        named: Whether to name the class of the first.

    Returns:
        The first rank's message, then a line for each rank with another error, up to 8.
    """
    first, *others = reports
    also = [report for report in others if (report.class_name, report.text) != (first.class_name, first.text)]
    lines = [first.message(named=named), *(report.message() for report in also[:_SHOWN])]
    if len(also) > _SHOWN:
        lines.append(f"... and {len(also) - _SHOWN} more ranks")
    return "\n".join(lines)


def copy_error(error: _E) -> _E:
    """Return a copy of an error without its traceback and its causes."""
    return _make_error(type(error), error.args, vars(error))


def _make_error(kind: type[_E], args: tuple[object, ...], attributes: dict[str, object]) -> _E:
    """Make an error without calling its class's ``__init__``, which may take other arguments."""
    error = kind.__new__(kind, *args)
    error.args = args
    vars(error).update(attributes)
    return error


def _import_class(path: str) -> type[CheckpointingException] | None:
    """Return the subclass of CheckpointingException at ``module:qualified.name``, or None.

    Importing is safe: the name comes from a process of this job, which runs the same program, never from a checkpoint.
    """
    try:
        found = pkgutil.resolve_name(path)
    except (Exception, SystemExit):  # noqa: BLE001 - a module may fail in any way, and the other ranks wait
        return None
    return found if isinstance(found, type) and issubclass(found, CheckpointingException) else None


__all__ = ["ErrorReport", "copy_error", "join_messages"]

"""The one family of errors: every failure that a user meets says what, where, why and what to do."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence


#: Names that are compared with a wrong one, to find the nearest.
_MOST_COMPARED = 10_000
_NUMBERS = re.compile(r"(\d+)")
_MOST_WARNINGS = 10_000
#: The warnings that this process has logged.
_warned: set[tuple[object, ...]] = set()


class CheckpointingException(Exception):
    """The root of the family (Megatron's name for it).

    A plugin's exception classes best derive from it, or from a subclass. Any exception class that every process can
    import, so one at the top level of a module, is raised as itself on every rank, and in the trainer where the worker
    process has failed; one from outside the family is caught as a CheckpointingException, too.
    """

    #: Number of the Comm whose ranks are all known to raise this same error, if any.
    shared_by: int | None = None
    #: The phase of the operation that failed, as events and logs name it; ``""`` where it failed in none.
    phase: str = ""
    #: Whether plugins have got the event of it, and whether the log has it: an error passes through several calls.
    is_reported: bool = False
    is_logged: bool = False

    def __init__(self, *args: object) -> None:
        # keys and names that come from files are in the text, and logs and terminals show it
        super().__init__(*(escape_text(each, "\n\t") if isinstance(each, str) else each for each in args))


class SettingFault(NamedTuple):
    """A fault of one setting of a configuration.

    Attributes:
        setting: Its name; ``""`` of an argument too many, and where the whole is no configuration.
        value: The value that was given for it, None if none was.
        message: The fault, with the suggestion.
        suggestion: The right name or value, and no other words; None if none is known.
        file: The file that it is in; ``""`` where it is in none.
    """

    setting: str
    value: Any
    message: str
    suggestion: str | None = None
    file: str = ""


class ConfigurationError(CheckpointingException, ValueError):
    """A setting has another name, or a value that it cannot have, or contradicts another.

    Attributes:
        faults: Each that was found in a configuration; empty where it is about something else.
    """

    faults: Sequence[SettingFault] = ()

    @classmethod
    def list_all(cls, beginning: str, faults: Sequence[SettingFault], separator: str = "; ") -> ConfigurationError:
        """Return the error of a configuration that has these faults."""
        error = cls(beginning + separator.join(fault.message for fault in faults))
        error.faults = faults
        return error


class ShardingError(CheckpointingException):
    """Shards that contradict themselves or each other: shapes, offsets, overlaps, holes."""


class ShapeMismatchError(ShardingError):
    """A wanted tensor whose global shape is not the stored one."""


class DtypeMismatchError(ShardingError):
    """A wanted tensor whose dtype cannot hold the stored values: floats as integers, integers as shorter ones."""


class KeyMismatchError(CheckpointingException):
    """Keys that are wanted and not stored, or stored and not wanted, where the caller forbids it."""


class StorageError(CheckpointingException):
    """A file operation that failed: names the file, the offset and the operating system's reason."""


class NotEnoughSpaceError(StorageError):
    """A file system, or a quota, that has no space for a write.

    Mostly it is refused before a file is written; else a write has failed, and the written files are removed.

    Attributes:
        advice: The checkpoints that could go, as the text has it; ``""`` if it names none.
        leftover: Bytes that interrupted saves have left, which the advice then names.
        is_forecast: Whether it was refused before a file was written.
    """

    advice: str = ""
    leftover: int = 0
    is_forecast: bool = False


class CheckpointReplacedError(StorageError):
    """A checkpoint that another save has replaced since it was opened: its files are gone, open it again."""


class CorruptCheckpointError(CheckpointingException):
    """Stored bytes that differ from the written ones: missing, cut, altered or malformed."""


#: How a file that is a whole ``nn.Module`` becomes one that is read, by the paths of both.
UNPACK_MODULE = (
    "it is a whole nn.Module: in Python, where you trust whoever wrote it, "
    "torch.save(torch.load({path!r}, weights_only=False).state_dict(), {new!r}) writes its state dict, which is read"
)


class UnsafePickleError(CheckpointingException):
    """A legacy pickle in a checkpoint that asks for a global outside the allow-list.

    Attributes:
        refused: All globals that it asks for and must not, as ``"module.name"``; empty where the error is another one.
        runs_code: Whether one of them runs commands or code, or reaches files: no error says how to allow that.
        can_be_allowed: Whether a load with ``allow_globals`` could read it.
        is_module: Whether a whole ``nn.Module`` was pickled, and no state dict.
    """

    refused: tuple[str, ...] = ()
    runs_code: bool = False
    can_be_allowed: bool = True
    is_module: bool = False


class CommunicationError(CheckpointingException):
    """A collective that failed: another rank died or did not answer before the group's timeout.

    Attributes:
        missing_ranks: Those ranks, as the whole job numbers them; empty where none could be found out.
    """

    missing_ranks: tuple[int, ...] = ()


class OtherJobError(CheckpointingException):
    """Another job saves to the same folder, which ``on_other_job="error"`` forbids."""


class RankFailedError(CheckpointingException):
    """An exception that not every process can raise as itself: a class of Python's own, or one that is not importable.

    The text names the class. It is raised on every rank, also where there is only one.
    """


class PluginError(CheckpointingException):
    """A plugin that is broken, or breaks the rules of the registry."""


class DuplicateStrategyError(PluginError):
    """Two strategies that claim the same backend and version."""


class CannotLoadError(CheckpointingException):
    """The version gate's refusals: every subclass is one case of it."""


class NotACheckpointError(CannotLoadError):
    """The directory does not exist, or nothing installed recognises it as a checkpoint."""


class IncompleteCheckpointError(CannotLoadError):
    """A save that began and was never committed."""


class UnknownBackendError(CannotLoadError):
    """No installed strategy has the checkpoint's backend."""


class VersionTooNewError(CannotLoadError):
    """The checkpoint's version is newer than every installed reader's."""


class VersionTooOldError(CannotLoadError):
    """The checkpoint's version is older than every installed reader's."""


class BrokenPluginError(CannotLoadError):
    """The strategy's plugin is installed, and fails to import or to register."""


class RefusedByPolicyError(CannotLoadError):
    """The caller's ``accept=``, a manager's, or ``SHARDCKPT_ACCEPT`` leaves this backend or version out.

    Or ``SHARDCKPT_DISABLED_PLUGINS`` names its plugin.
    """


class StrategyMismatchError(CannotLoadError):
    """The strategy that the caller named is not the one that the checkpoint needs."""


def escape_text(text: str, keep: str = "") -> str:
    """Return a text that may come from a file as terminals and logs may show it.

    Control characters, line ends, marks that turn the direction of text, spaces of other widths, and bytes that are no
    text are escaped, as in ``repr``.

    Args:
        text: The text.
        keep: Characters that stay: line ends, in a text of several lines.
    """
    rest = text
    for char in keep:
        rest = rest.replace(char, "")
    if rest.isprintable():  # of megabytes, in one step
        return text
    return "".join(
        char if char.isprintable() or char in keep else char.encode("unicode_escape").decode() for char in text
    )


def join_lines(text: str) -> str:
    """Return a text of several lines as one line, for logs and tables."""
    lines = filter(None, map(str.strip, text.splitlines()))
    return "; ".join(lines).replace(":; ", ": ")  # of a line that announces others


def show_given(value: object) -> str:
    """Return a value that a caller gave as an error shows it: text and numbers as Python writes them, else the type."""
    if value is None or isinstance(value, str | bytes | bool | int | float):
        return f"{value!r:.100}"
    return f"the class {value.__name__}" if isinstance(value, type) else f"an object of type {type(value).__name__}"


def list_given(given: object) -> list[Any]:
    """Return a caller's list; one value, as a text is, gives a list of it."""
    return list(given) if isinstance(given, Iterable) and not isinstance(given, (str, bytes)) else [given]


def is_first_warning(*what: object) -> bool:
    """Return whether this process has not warned of this yet; a training's warning at every save is logged once.

    Args:
        what: The module that warns, and the subject of the warning.
    """
    if what in _warned:
        return False
    if len(_warned) >= _MOST_WARNINGS:  # rather a warning twice than memory that only grows
        _warned.clear()
    _warned.add(what)
    return True


def list_causes(error: BaseException, *, with_context: bool = False) -> Iterator[BaseException]:
    """Yield an error and its causes, each once: a chain of causes may be a ring.

    Args:
        error: The error.
        with_context: Whether an error without a cause counts as raised from the one that was being handled.
    """
    seen = set[int]()
    found: BaseException | None = error
    while found is not None and id(found) not in seen:
        seen.add(id(found))
        yield found
        handled = found.__context__ if with_context and not found.__suppress_context__ else None
        found = found.__cause__ or handled


def name_call(*words: object) -> str:
    """Return a call of the command between backquotes, with its words quoted as a shell takes them."""
    return f"`{shlex.join(['shardckpt', *map(str, words)])}`"


def listed(texts: Collection[str], between: str = ", ", limit: int = 20) -> str:
    """Return the texts in one, as errors show them: the first ``limit``, escaped, and how many more there are."""
    shown = [*map(escape_text, list(texts)[:limit])]
    if len(texts) > limit:
        shown.append(f"... and {len(texts) - limit} more")
    return between.join(shown)


def format_many(count: int, noun: str) -> str:
    """Return a number of things with their name: ``1 tensor``, ``1,024 tensors``."""
    return f"{count:,} {noun}{'s' * (count != 1)}"


def natural_order(key: str) -> list[tuple[int, str, str]]:
    """Return a sort key of a name, by which layer 2 comes before layer 10.

    Args:
        key: The key.

    Returns:
        A tuple for each text and number in it.
    """
    texts = _NUMBERS.split(key)  # text and number in turn
    # not by int(), which refuses numbers of thousands of digits
    digits = [text.lstrip("0") if at % 2 else "" for at, text in enumerate(texts)]
    return [(len(number), number, text) for number, text in zip(digits, texts, strict=True)]


def name_known(wanted: str, known: Collection[str], what: str, limit: int = 6, also: Collection[str] = ()) -> str:
    """Return the end of an error about a name that matches nothing: the nearest known name, and the first ones.

    Args:
        wanted: The name.
        known: Those there are.
        what: Their kind, in the plural: ``"keys"``.
        limit: How many are listed.
        also: Other names that are asked about, and not listed.

    Returns:
        ``(did you mean loss? metrics: loss, ppl)``; without the question where none is near.
    """
    names = sorted(set(known), key=natural_order)
    return f"({ask_nearest(wanted, [*names, *also])}{what}: {listed(names, limit=limit) or 'none'})"


def ask_nearest(wanted: object, known: Collection[str]) -> str:
    """Return ``"did you mean loss? "`` for a wrong name, ``""`` if no known name is near."""
    nearest = find_nearest(wanted, [*known]) if isinstance(wanted, str) else ""
    return f"did you mean {escape_text(nearest)}? " if nearest not in ("", wanted) else ""


def describe_invalid(error: BaseException) -> str:
    """Return the faults of a file's content in one line; of pydantic's error, places and faults alone."""
    list_faults = getattr(error, "errors", None)
    if list_faults is None:
        return "; ".join(str(error).splitlines()[:4])
    faults = [
        (".".join(map(str, fault["loc"])), fault["msg"].partition(" or instance of ")[0]) for fault in list_faults()
    ]
    return "; ".join(f"{place}: {what}" if place else what for place, what in faults[:4])


def check_choice(argument: str, value: object, choices: Collection[str]) -> None:
    """Raise CheckpointingException unless the value of an argument is one of the texts that it may be."""
    if not isinstance(value, str) or value not in choices:
        expected = " or ".join([", ".join(map(repr, [*choices][:-1])), repr([*choices][-1])])
        raise CheckpointingException(
            f"{argument}={show_given(value)}: {ask_nearest(value, choices)}expected {expected}"
        )


def parse_globals(allow_globals: object) -> tuple[Any, ...]:
    """Return the classes and functions that a caller allows in pickles.

    Raises:
        CheckpointingException: it is a class, a text, or another value that is no list; or a text is among them.
    """
    # an Enum is a class that can be iterated over
    is_list = isinstance(allow_globals, Iterable) and not isinstance(allow_globals, type | str | bytes)
    found = tuple(allow_globals) if is_list else (allow_globals,)  # type: ignore[arg-type]
    wrong = [item for item in found if isinstance(item, str | bytes)] if is_list else [*found]
    if wrong:
        raise CheckpointingException(
            f"allow_globals: {show_given(wrong[0])} where a list of classes and functions is expected, such as "
            "allow_globals=[MyConfig]"
        )
    return found


#: The last number of a name's last part, if it has not more digits than one that is compared with others.
_LAST_NUMBER = re.compile(r"(|.*\D)(\d{1,18})([^\d.]*)", re.DOTALL | re.ASCII)


def find_nearest(wanted: str, known: Sequence[str]) -> str:
    """Return the one of some names that is most like another, or whose last part is; ``""`` if none is much like it.

    Of names with a number and otherwise the same text, such as steps, the one with the nearest number.
    """
    if near := _find_nearest_number(wanted, wanted, known):
        return near
    import difflib  # slow to import

    if len(known) > _MOST_COMPARED:  # a comparison takes microseconds, and a typing error changes the length by few
        known = [name for name in known if abs(len(name) - len(wanted)) < 3][:_MOST_COMPARED]  # noqa: PLR2004 - few
    if found := difflib.get_close_matches(wanted, known, 1):
        # of step_60 step-600 is the most like: its text is meant, and another number
        return _find_nearest_number(wanted, found[0], known) or found[0]
    ends = {name.rpartition(".")[2]: name for name in reversed(known)}
    end = difflib.get_close_matches(wanted.rpartition(".")[2], [*ends], 1)
    return ends[end[0]] if end else ""


def _find_nearest_number(wanted: str, like: str, known: Sequence[str]) -> str:
    """Return, of names that differ from ``like`` in their number alone, the nearest to another; ``""`` if none."""
    text, number = _split_number(like)[0], _split_number(wanted)[1]
    if number is None or not any(text):
        return ""
    numbers = {name: _split_number(name) for name in known}
    near = {
        name: abs(found - number) for name, (other, found) in numbers.items() if found is not None and other == text
    }
    return min(near, key=near.__getitem__, default="")


def _split_number(name: str) -> tuple[tuple[str, str], int | None]:
    """Return the texts around the last number of a name's last part, and the number; None without one."""
    found = _LAST_NUMBER.fullmatch(name)
    return (("", ""), None) if found is None else ((found[1], found[3]), int(found[2]))


def prefix_error(without: str, prefix: str, keys: Iterable[str]) -> KeyMismatchError:
    """Return the error of a prefix that no key begins with; ``without`` is the subject: ``"no tensor"``."""
    depth = prefix.strip(".").count(".") + 1
    parts = (key.split(".", depth) for key in keys)
    known = {".".join(found[:depth]) + "." * (len(found) > depth) for found in parts}  # as deep as the prefix
    return KeyMismatchError(f"{without} has a key that begins with {prefix!r} {name_known(prefix, known, 'keys')}")


def cut_prefix(key: str, prefix: str) -> str:
    """Return a key without the prefix that it begins with.

    Raises:
        KeyMismatchError: the rest is empty, or begins with the dot that the prefix lacks: nothing loads that name.
    """
    name = key[len(prefix) :]
    if prefix and (not name or name[0] == "."):
        way = f"give it with its dot, {f'{prefix}.'!r}" if name else "give a beginning of keys"
        raise KeyMismatchError(f"prefix={prefix!r} would leave {name!r} of {key!r}: {way}")
    return name


def refuse_copy(value: object, holds: str, instead: str) -> NoReturn:
    """Raise the error for copying or pickling an object that belongs to one process.

    Args:
        value: The object.
        holds: The part of it that no other object or process can have.
        instead: How to make another one.
    """
    raise CheckpointingException(
        f"a {type(value).__name__} cannot be copied or pickled: it has {holds} of this process. Make another one "
        f"{instead}, in the process that uses it; and leave it out of the copy, as of a trainer whose callback has it"
    )


__all__ = [
    "BrokenPluginError",
    "CannotLoadError",
    "CheckpointReplacedError",
    "CheckpointingException",
    "CommunicationError",
    "CorruptCheckpointError",
    "DtypeMismatchError",
    "DuplicateStrategyError",
    "IncompleteCheckpointError",
    "KeyMismatchError",
    "NotACheckpointError",
    "NotEnoughSpaceError",
    "OtherJobError",
    "PluginError",
    "RankFailedError",
    "RefusedByPolicyError",
    "ShapeMismatchError",
    "ShardingError",
    "StorageError",
    "StrategyMismatchError",
    "UnknownBackendError",
    "UnsafePickleError",
    "VersionTooNewError",
    "VersionTooOldError",
    "ask_nearest",
    "check_choice",
    "escape_text",
    "find_nearest",
    "format_many",
    "list_causes",
    "listed",
    "name_known",
    "natural_order",
    "prefix_error",
    "refuse_copy",
    "show_given",
]

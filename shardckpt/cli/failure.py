"""Print an error of the command."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, TypeVar

from shardckpt.cli.interrupted import find_target
from shardckpt.cli.output import say_error, show_json
from shardckpt.errors import (
    UNPACK_MODULE,
    CheckpointingException,
    ConfigurationError,
    NotEnoughSpaceError,
    UnsafePickleError,
    name_call,
)

if TYPE_CHECKING:
    import argparse

_E = TypeVar("_E", bound=Exception)

#: The functions of verbs that take classes, by verb: their module, name, and the verb's options that are arguments.
_CALLS = {
    "convert": ("shardckpt.maintenance", "convert_checkpoint", ("source", "target", "to")),
    "merge": ("shardckpt.maintenance", "merge_checkpoints", ("sources", "target", "to")),
    "diff": ("shardckpt.maintenance", "diff_checkpoints", ("first", "second")),
}
#: The function of the other verbs, for their inputs.
_OPENING: tuple[str, str, tuple[str, ...]] = ("shardckpt.dist_checkpointing", "open_checkpoint", ())


def show_failure(error: BaseException, message: str, code: int, options: argparse.Namespace) -> int:
    """With ``--json``, print to standard output that a verb has no answer, and why not; return its exit code."""
    if options.as_json:
        faults = {"faults": error.faults} if isinstance(error, ConfigurationError) else {}
        show_json({"error": {"type": type(error).__name__, "message": message, **faults}, "exit_code": code})
    return code


def explain_error(error: Exception, options: argparse.Namespace) -> Exception:
    """Return the error of a verb with advice: names next to a URL, or checkpoints that could go from a full disk."""
    target = options.directory if options.verb == "remove" else find_target(options)
    if isinstance(error, NotEnoughSpaceError) and target:
        from shardckpt.engine.locations import find_local
        from shardckpt.engine.space import explain_full

        if place := find_local(target):
            error = explain_full(error, place)
    return name_siblings(error, options)


def name_siblings(error: _E, options: argparse.Namespace) -> _E | CheckpointingException:
    """Add the names next to a URL to the error that nothing is there; return any other error unchanged."""
    given = [each for value in vars(options).values() for each in (value if isinstance(value, list) else [value])]
    urls = [each for each in given if isinstance(each, str) and "://" in each]
    if not urls or not isinstance(error, CheckpointingException):
        return error
    from shardckpt.engine.locations import locate
    from shardckpt.plugins.manager import get_plugin_manager
    from shardckpt.plugins.stores import ABSENT, name_stored_siblings

    plugins = get_plugin_manager()
    absent = [url for url in urls if ABSENT in str(error) and f"{locate(url, plugins)} {ABSENT}" in str(error)]
    if not absent or not (siblings := name_stored_siblings(absent[0], plugins)):
        return error
    from shardckpt.distributed.error_report import replace_text

    return replace_text(error, f"{error} {siblings}").with_traceback(error.__traceback__)


def print_error(error: Exception, options: argparse.Namespace) -> None:
    """Print an error to standard error: its text, after the whole traceback if ``--traceback`` is given."""
    if options.traceback:
        import traceback  # slow to import

        for entry in traceback.format_exception(error):
            say_error(_indent(entry.rstrip("\n")))
    say_error(_indent(f"shardckpt {options.verb}: {_describe_error(error, options)}"))


def _indent(text: str) -> str:
    """Indent all lines but the first: a name in an error may have line ends, and begins no line of the command's."""
    return text.replace("\n", "\n  ")


def _describe_error(error: Exception, options: argparse.Namespace) -> str:
    """Return an error's text; of one that was not made for users, with its class, and how to see more."""
    if isinstance(error, CheckpointingException):
        advice = _advise_of_globals(error, options) or _advise_of_damage(error, options)
        return f"{error}{name_plugin(error)}{advice}"
    return f"{type(error).__name__}: {error}{name_plugin(error)}; shardckpt --traceback shows the whole traceback"


def _advise_of_globals(error: CheckpointingException, options: argparse.Namespace) -> str:
    """Return the call in Python that takes the classes which a pickle asks for: no verb imports any."""
    if not isinstance(error, UnsafePickleError) or not error.refused or not error.can_be_allowed:
        return ""
    if not getattr(options, "reads", ()):
        return ""
    module, call, arguments = _CALLS.get(options.verb, _OPENING)
    values = [getattr(options, name) for name in arguments or options.reads]
    if not all(isinstance(value, str) for value in values):  # of verify: the error does not say which of its paths
        return ""
    given = [*map(repr, values)]
    if error.is_module:
        path = getattr(options, options.reads[0])
        return "\n" + UNPACK_MODULE.format(path=path if isinstance(path, str) else "PATH", new="NEW.pt")
    if call == _OPENING[1] and os.path.isfile(getattr(options, options.reads[0])):  # noqa: PTH113 - or a URL
        (module, call, _), given = _CALLS["convert"], [*given, "'NEW'", "'torch_dist'"]
    parts = [name.rpartition(".") for name in error.refused]
    lines = [f"from {module} import {call}", *(f"from {home} import {name}" for home, _, name in parts)]
    lines.append(f"{call}({', '.join(given)}, allow_globals=[{', '.join(name for *_, name in parts)}])")
    without = ""
    if options.verb in ("convert", "merge"):
        without = (
            " None is needed with --leave-out NAME of each entry that has some, such as args, nor where tensors alone "
            "are written: --prefix and --to hf."
        )
    begin = f"\nThe command imports no classes.{without} In Python, with its other options as arguments:"
    return "\n".join([begin, *lines])


def _advise_of_damage(error: CheckpointingException, options: argparse.Namespace) -> str:
    """Return how the rest is written where bytes are missing or damaged; ``""`` for other errors."""
    from shardckpt.engine.integrity import is_damage

    only_reads = hasattr(options, "reads") and not hasattr(options, "writes")
    if getattr(options, "skip_damaged", not only_reads) or not is_damage(error) or _is_of_target(error, options):
        return ""
    if "`shardckpt " in str(error):  # it has advice
        return ""
    if only_reads:  # of several, the error says which
        path = getattr(options, options.reads[0])
        is_sure = isinstance(path, str) and len(options.reads) == 1
        call = name_call("convert", path if is_sure else "PATH", "NEW", "--skip-damaged")
        return f"\nIf bytes are damaged, {call} writes the rest of it"
    return "\nIf the source is at fault, --skip-damaged writes the rest, and names the missing items"


def _is_of_target(error: CheckpointingException, options: argparse.Namespace) -> bool:
    """Return whether an error names the target of a verb, or its staging directory."""
    from shardckpt.engine.locations import find_local

    target = find_target(options)
    place = find_local(target) if target else None
    return place is not None and any(str(path) in str(error) for path in (place, place.with_name(f".{place.name}.")))


def name_plugin(error: Exception) -> str:
    """Return whose code raised an error, in brackets, or ``""``."""
    from shardckpt.plugins.manager import get_plugin_manager
    from shardckpt.plugins.origin import bracket_origin

    return bracket_origin(error, get_plugin_manager())

"""The ``shardckpt`` command.

Each verb has a file, whose docstring its help shows. A verb imports torch only when it runs, so that help is fast.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import os
import sys
import warnings
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NoReturn

from shardckpt import __version__
from shardckpt.cli.exit_codes import FAILED, FINE, MEANINGS
from shardckpt.cli.failure import explain_error, name_plugin, print_error, show_failure
from shardckpt.cli.folders import name_steps
from shardckpt.cli.help import HelpFormatter
from shardckpt.cli.interrupted import describe_left, find_published, identify_target
from shardckpt.cli.output import (
    Output,
    add_json,
    escape_unencodable,
    escaped_logs,
    open_closed_streams,
    say_error,
    show,
    show_json,
    without_logs,
)
from shardckpt.errors import PluginError, ask_nearest, listed, name_known, show_given

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

#: A file for each, and its line in the help, in this order.
_VERBS = {
    "ls": "list the checkpoints in a folder, and whether they are whole",
    "inspect": "list the tensors, objects and common state of a checkpoint",
    "diff": "compare two checkpoints",
    "verify": "check every file of checkpoints, against digests if they have them",
    "export": "write a checkpoint as a Hugging Face folder (safetensors)",
    "convert": "write any checkpoint, folder or file in another format, with a proof",
    "merge": "average or interpolate checkpoints of any formats",
    "migrate": "rewrite a checkpoint in another format, or in a newer version",
    "remove": "remove keys from a checkpoint, in one step, and free their bytes",
    "prune": "remove leftovers of killed saves, and steps that are not kept",
    "pin": "keep a step under a label; list pins and leases",
    "strategies": "list the installed strategies, and broken plugins with the reason",
    "config": "list the settings of a CheckpointManager, and the variables",
    "demo": "train with 4 ranks, kill them, go on with others, and compare the losses",
    "completion": "print a script that completes the command in a shell",
}
_TO_REMOVE = "prune, of steps and of leftovers of killed saves, or remove, of keys in a checkpoint"
#: Other commands' names of these verbs.
_OTHERS = {
    **dict.fromkeys(("rm", "delete", "del"), _TO_REMOVE),
    **dict.fromkeys(("gc", "clean", "cleanup"), "prune"),
    **dict.fromkeys(("cp", "copy"), "convert"),
    **dict.fromkeys(("list", "dir"), "ls"),
    **dict.fromkeys(("show", "cat", "info", "stat"), "inspect"),
    **dict.fromkeys(("best", "latest"), "ls, which shows the best step, or inspect FOLDER/best"),
    **dict.fromkeys(("compare", "cmp"), "diff"),
    **dict.fromkeys(("check", "fsck", "validate"), "verify"),
    **dict.fromkeys(("repair", "fix"), "verify --repair"),
}
#: Verbs that delete: none is advised for a word that is not clearly its misspelling, as ``resume`` is not.
_DESTRUCTIVE = frozenset({"remove", "prune"})
_ALMOST = 0.8
#: Those that also need the verbs of plugins: to list them, and to say which plugin does not work.
_NEED_ALL = ("strategies", "completion")
#: Verbs without --json: a show of processes at work, and a script of another language.
_WITHOUT_JSON = ("demo", "completion")
#: The exit codes that shells report for a program that SIGPIPE or SIGINT has ended.
_BROKEN_PIPE = 128 + 13
_INTERRUPTED = 128 + 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a verb, and return the exit code.

    Args:
        arguments: The command line without the program's name; by default the process's own.

    Returns:
        One of :mod:`shardckpt.cli.exit_codes`; 141 if the reader of standard output has closed it, and 130 after
        Ctrl-C. An error is printed to standard error, with its traceback if ``--traceback`` is given. A wrong command
        line raises SystemExit.
    """
    open_closed_streams()
    escape_unencodable()
    with escaped_logs(), warnings.catch_warnings():
        # torch warns where numpy is not installed; nothing here needs it
        warnings.filterwarnings("ignore", "Failed to initialize NumPy")
        return _run(sys.argv[1:] if arguments is None else arguments)


def _run(given: Sequence[str]) -> int:
    # options before the verb take no values: for a verb of ours neither the others nor the plugins are imported
    verb = next((word for word in given if not word.startswith("-")), "")
    parser, verbs = _make_parser(verb)
    before = [*itertools.takewhile(lambda word: word != verb, given)]
    if verb and (own := [word for word in before if word not in parser._option_string_actions]):  # noqa: SLF001 - argparse offers no other
        rest = " ".join([*given[len(before) + 1 :], *own])
        parser.error(f"options of a verb stand behind it: shardckpt {verb} {rest}")
    if verb and verb not in verbs:
        near = f"did you mean {_OTHERS[verb]}? " if verb in _OTHERS else _ask_verb(verb, verbs)
        parser.error(f"there is no verb {verb!r} ({near}verbs: {listed(sorted(verbs), limit=len(verbs))})")
    options, unknown = parser.parse_known_args(given)
    if unknown:
        _refuse_unknown(verbs[options.verb], unknown)
    try:
        code = _answer(options)
        sys.stdout.flush()
    except BrokenPipeError:  # ``shardckpt inspect PATH | head``
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains when it ends
        return _BROKEN_PIPE
    return code


def _ask_verb(given: str, verbs: Collection[str]) -> str:
    """Ask for the verb that is nearest to a word; for one that removes only if nearly all letters are the same."""
    import difflib  # slow to import

    near = difflib.get_close_matches(given, _DESTRUCTIVE, 1, _ALMOST)
    return ask_nearest(given, near or [verb for verb in verbs if verb not in _DESTRUCTIVE])


def _answer(options: argparse.Namespace) -> int:
    """Run a verb, and print its answer or its error; return the exit code."""
    before = identify_target(options)
    try:
        name_steps(options)
        if not hasattr(options, "run"):
            raise PluginError(
                f"the verb {options.verb!r} has no function: where shardckpt_commands of a plugin makes its parser, "
                "parser.set_defaults(run=FUNCTION) gives it one, which takes the options"
            )
        answer = options.run(options)
        if isinstance(answer, Output):
            code = show(answer, as_json=options.as_json)
        elif options.as_json:
            raise PluginError(
                f"the verb {options.verb!r} has --json, and its run returned {show_given(answer)}: return an Output"
            )
        else:  # the exit code of a verb that prints its answer itself
            code = int(answer or FINE)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except KeyboardInterrupt as exc:
        if published := find_published(options, before):
            say_error(f"shardckpt {options.verb}: interrupted after its end: {published} is complete")
            if options.as_json:
                show_json({"target": published, "interrupted": True})
            return FINE
        message = f"interrupted; {describe_left(options)}"
        say_error(f"shardckpt {options.verb}: {message}")
        return show_failure(exc, message, _INTERRUPTED, options)
    except Exception as exc:  # noqa: BLE001 - a plugin's verb may fail in any way
        error = explain_error(exc, options)
        print_error(error, options)
        return show_failure(error, str(error), FAILED, options)
    return code


def _refuse_unknown(parser: argparse.ArgumentParser, unknown: Sequence[str]) -> None:
    """Exit with the usage of a verb, and the nearest of its options to one that it does not have."""
    known = [action.option_strings[-1] for action in parser._actions if action.option_strings]  # noqa: SLF001 - argparse offers no other
    options = [word.partition("=")[0] for word in unknown if word.startswith("-")]
    begun = [each for each in known if options and each.startswith(f"{options[0]}-")]
    near = [f" {name_known(options[0], known, 'options', len(known))}"] if options else []
    near = [f" (options that begin so: {', '.join(begun)})"] if begun else near
    parser.error(f"unrecognized arguments: {' '.join(unknown)}{''.join(near)}")


class _Parser(argparse.ArgumentParser):
    """A parser whose errors look like the errors of verbs."""

    def exit(self, status: int = FINE, message: str | None = None) -> NoReturn:
        """Exit, after an error of the command line with its text."""
        if message:
            say_error(message.rstrip("\n"))
        raise SystemExit(status)


class _VerbParser(_Parser):
    """A verb's parser, which takes an optional argument behind options, too, as in ``inspect DIR --stats PREFIX``.

    That of Python before 3.13 gives the argument its default as soon as an option follows the one before it.
    """

    _is_intermixed = False

    def __init__(self, **settings: Any) -> None:
        # an abbreviation is a typo that is taken at its word: --keep-lates
        super().__init__(**{"allow_abbrev": False, "formatter_class": HelpFormatter, **settings})

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse, and if arguments are left over, parse options and the others by themselves."""
        found, unknown = super().parse_known_args(args, namespace)
        if self._is_intermixed or all(word.startswith("-") for word in unknown):
            return found, unknown
        self._is_intermixed = True  # argparse comes back here for each of the two
        try:
            return self.parse_known_intermixed_args(args, namespace)
        finally:
            self._is_intermixed = False


class _VerbsAction(argparse._SubParsersAction):  # type: ignore[type-arg] # noqa: SLF001 - argparse offers no other
    """The verbs; a plugin's that has the name of another is an error, on Python before 3.11, too."""

    def add_parser(self, name: str, **settings: Any) -> Any:
        """Add a verb."""
        if name in self.choices:
            whose = "is a built-in one, which stays" if name in _VERBS else "is there already"
            raise argparse.ArgumentError(self, f"the verb {name!r} {whose}: give the plugin's another name")
        return super().add_parser(name, **settings)


def _make_parser(given: str) -> tuple[argparse.ArgumentParser, Mapping[str, argparse.ArgumentParser]]:
    """Return the parser of the command line, and its verbs' parsers: the given one's, or if need be all."""
    only = given if given in _VERBS and given not in _NEED_ALL else ""
    parser = _Parser(
        "shardckpt",
        description="Look at, check and change checkpoints. `shardckpt VERB --help` explains a verb.",
        epilog=MEANINGS,
    )
    parser.add_argument("--traceback", action="store_true", help="after an error, show the whole traceback")
    parser.add_argument("--version", action="version", version=f"shardckpt {__version__}")
    parser.set_defaults(as_json=False)
    verbs = parser.add_subparsers(
        dest="verb", required=True, metavar="VERB", parser_class=_VerbParser, action=_VerbsAction
    )
    for verb in [only] if only else _VERBS:
        module = importlib.import_module(f"{__name__}.{verb}")
        own = verbs.add_parser(verb, help=_VERBS[verb], description=module.__doc__)
        # for errors about several options, and for the script that completes all verbs
        own.set_defaults(run=module.run, parser=own, verbs=verbs)
        module.add_options(own)
        if verb not in _WITHOUT_JSON:
            add_json(own)
    if only:
        return parser, verbs.choices
    from shardckpt.plugins.manager import get_plugin_manager

    try:
        with (
            without_logs("shardckpt.plugins.manager") if given == "strategies" else nullcontext()
        ):  # its answer has them
            get_plugin_manager().hook.shardckpt_commands(subparsers=verbs)
    except Exception as exc:  # noqa: BLE001 - a broken plugin must not disable the other verbs
        say_error(f"shardckpt: a plugin's shardckpt_commands failed: {type(exc).__name__}: {exc}{name_plugin(exc)}")
    return parser, verbs.choices


__all__ = ["Output", "add_json", "main"]

"""Print a script that completes verbs, options and their choices in a shell.

  bash  eval "$(shardckpt completion bash)"          in ~/.bashrc
  zsh   eval "$(shardckpt completion zsh)"           in ~/.zshrc, after compinit
  fish  shardckpt completion fish | source           in ~/.config/fish/config.fish

The script knows the verbs of the plugins that are installed when it is printed; completing starts no Python.
"""

from __future__ import annotations

import argparse
import shlex
from typing import TYPE_CHECKING, Any

from shardckpt.cli.exit_codes import FINE
from shardckpt.cli.output import say

if TYPE_CHECKING:
    from collections.abc import Mapping

_PROGRAM = "shardckpt"
#: Where it offers no words, the shell completes paths.
_BASH = """_shardckpt() {
    local current=${COMP_WORDS[COMP_CWORD]} verb="" word words
    COMPREPLY=()
    for word in "${COMP_WORDS[@]:1:$((COMP_CWORD - 1))}"; do
        [[ $word == -* ]] || { verb=$word; break; }
    done
    case "$verb ${COMP_WORDS[COMP_CWORD-1]}" in
%(choices)s
    esac
    if [[ -z ${words+set} ]]; then
        [[ -z $verb || $current == -* ]] || return 0
        case $verb in
%(options)s
        *) return 0;;
        esac
    fi
    COMPREPLY=($(compgen -W "$words" -- "$current"))
}
complete -o bashdefault -o default -F _shardckpt shardckpt
"""


def add_options(parser: Any) -> None:
    """Add the options."""
    parser.add_argument("shell", choices=("bash", "zsh", "fish"))


def run(options: Any) -> int:
    """Print the script for the shell that the options name; return the exit code."""
    found = options.verbs.choices  # the same parser stands under each name of a verb
    helps = {found[action.dest]: action for action in options.verbs._choices_actions}  # noqa: SLF001 - argparse offers no other
    verbs = {verb: parser for verb, parser in found.items() if parser not in helps or _is_shown(helps[parser])}
    is_fish = options.shell == "fish"
    say(_write_fish(verbs, helps) if is_fish else _write_bash(verbs, zsh=options.shell == "zsh"), end="")
    return FINE


def _write_bash(verbs: Mapping[str, argparse.ArgumentParser], *, zsh: bool) -> str:
    options = [f'        "") words={shlex.quote(" ".join([*verbs, "--help", "--traceback", "--version"]))};;']
    choices = []
    for verb, parser in verbs.items():
        flags = [flag for action in _list_options(parser) for flag in action.option_strings]
        options.append(f"        {verb}) words={shlex.quote(' '.join(flags))};;")
        for action in _list_options(parser):
            if action.choices:
                patterns = "|".join(f'"{verb} {flag}"' for flag in action.option_strings)
                choices.append(f"        {patterns}) words={shlex.quote(' '.join(map(str, action.choices)))};;")
        values = [str(choice) for action in _list_positional(parser) for choice in action.choices or ()]
        if values:
            choices.append(f'        "{verb} {verb}") words={shlex.quote(" ".join(values))};;')
    text = _BASH % {"choices": "\n".join(choices), "options": "\n".join(options)}
    # zsh calls bash's completion functions by bashcompinit
    return f"autoload -U +X bashcompinit && bashcompinit\n{text}" if zsh else text


def _write_fish(verbs: Mapping[str, argparse.ArgumentParser], helps: Mapping[Any, argparse.Action]) -> str:
    first = f"complete -c {_PROGRAM} -n __fish_use_subcommand"
    lines = [f"{first} -l {flag}" for flag in ("help", "traceback", "version")]
    for verb, parser in verbs.items():
        lines.append(f"{first} -f -a {verb} -d {shlex.quote(_read_help(parser, helps.get(parser)))}")
    for verb, parser in verbs.items():
        seen = f"complete -c {_PROGRAM} -n '__fish_seen_subcommand_from {verb}'"
        for action in _list_options(parser):
            names = " ".join(f"-l {f[2:]}" if f.startswith("--") else f"-s {f[1:]}" for f in action.option_strings)
            value = "" if action.nargs == 0 else " -r"
            if action.choices:
                value = f" -x -a {shlex.quote(' '.join(map(str, action.choices)))}"
            lines.append(f"{seen} {names}{value} -d {shlex.quote(_read_help(parser, action).partition(';')[0])}")
        lines += [
            f"{seen} -f -a {shlex.quote(' '.join(map(str, action.choices)))}"
            for action in _list_positional(parser)
            if action.choices
        ]
    return "\n".join([*lines, ""])


def _is_shown(action: argparse.Action) -> bool:
    return action.help != argparse.SUPPRESS


def _read_help(parser: argparse.ArgumentParser, action: argparse.Action | None) -> str:
    """Return the text that the help shows for an action; ``""`` if there is none."""
    return parser._get_formatter()._expand_help(action) if action and action.help else ""  # noqa: SLF001 - argparse offers no other


def _list_options(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    return [action for action in _list_shown(parser) if action.option_strings]


def _list_positional(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    return [action for action in _list_shown(parser) if not action.option_strings]


def _list_shown(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    return [action for action in parser._actions if _is_shown(action)]  # noqa: SLF001 - argparse offers no other

"""List the settings of a CheckpointManager with their defaults, and the variables of the environment with their values.

With names, these are explained in full. A variable whose name is nearly one of shardckpt's is listed, too: nothing
reads it. With --json, --check has its faults and notes as objects of setting, value, message, suggestion and file. Exit
code 1 if there is such a variable, or one with a wrong value; 2 if a file of --check has a wrong setting.
"""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

from shardckpt.cli.exit_codes import FINE, FOUND
from shardckpt.cli.output import Output
from shardckpt.cli.table import fit_table
from shardckpt.errors import (
    CheckpointingException,
    ConfigurationError,
    SettingFault,
    ask_nearest,
    format_many,
    name_known,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from shardckpt.manager.setting_list import Setting
    from shardckpt.settings import Variable


def add_options(parser: Any) -> None:
    """Add the options."""
    parser.add_argument(
        "setting", nargs="*", help="explain this setting or variable in full; another library's name of it works, too"
    )
    parser.add_argument(
        "--check",
        nargs="+",
        metavar="FILE",
        help="check the settings in files instead: JSON, TOML, or YAML if PyYAML is installed",
    )
    parser.add_argument(
        "--section", metavar="NAME", help="the table of each FILE that has them, as 'checkpoint' or 'a.b'"
    )


def run(options: Any) -> Output:
    """Return a row per setting and per variable, or the texts of some."""
    from shardckpt.manager.setting_list import list_settings
    from shardckpt.settings import list_variables

    if options.section and not options.check:
        raise ConfigurationError("--section names a table of a file: --check FILE --section NAME")
    if options.check and options.setting:
        raise ConfigurationError(f"--check checks all settings of the file: leave out {' '.join(options.setting)}")
    if options.check:
        return _check(options.check, options.section or "")
    variables = {each.name: _look_further(each) for each in list_variables()}
    names = [name for name in options.setting if name.startswith("SHARDCKPT_")]
    if unknown := [name for name in names if name not in variables]:
        known = name_known(unknown[0], variables, "variables", len(variables))
        raise ConfigurationError(f"there is no variable {unknown[0]} {known}")
    others = [name for name in options.setting if name not in names]
    settings = list_settings(others) if others or not names else []
    chosen = [variables[name] for name in names] if options.setting else [*variables.values()]
    return Output(
        lambda: [*settings, *chosen],
        lambda: _explain(settings, chosen) if options.setting else _make_tables(settings, chosen),
        FOUND if any(each.is_wrong for each in chosen) else FINE,
    )


def _look_further(variable: Variable) -> Variable:
    """Return a variable with the faults of what it names: plugins that do not load, a file of stores that is wrong."""
    from shardckpt import settings
    from shardckpt.integrations.s3_options import check_options
    from shardckpt.plugins.manager import get_plugin_manager, list_unknown_disabled
    from shardckpt.plugins.resolver import list_unknown_accepted
    from shardckpt.plugins.stores import read_stores

    faults = list_unknown_disabled() if variable.name == settings.DISABLED_PLUGINS else []
    if variable.name == settings.PLUGINS:
        named = settings.plugins()
        faults = [f"{each.name}: {each.fault}" for each in get_plugin_manager().broken() if each.name in named]
    if variable.name == settings.ACCEPT:
        faults = list_unknown_accepted(settings.accept(), get_plugin_manager())
    if variable.name == settings.STORES:
        try:
            for url, options in read_stores().items():
                check_options(url, options)
        except CheckpointingException as exc:
            faults = [str(exc)]
    return variable._replace(text="; ".join(faults), is_wrong=True) if faults else variable


class _Checked(NamedTuple):
    """A file whose settings are right."""

    file: str
    settings: dict[str, Any]
    notes: list[SettingFault]


def _check(files: Sequence[str], section: str) -> Output:
    """Return a line about each file, where the settings of all are right; else the error says each that is wrong."""
    from shardckpt.settings import list_variables

    checked, texts, faults = [], [], []
    for file in files:
        try:
            checked.append(_check_file(file, section))
        except ConfigurationError as exc:  # noqa: PERF203 - there are few
            texts.append(str(exc))
            faults += [each._replace(file=file) for each in exc.faults or [SettingFault("", None, str(exc))]]
    _note_shared_folders(checked)
    variables = [_describe_variable(each) for each in map(_look_further, list_variables()) if each.is_wrong]
    said = [each.message for each in variables]
    if said:
        said = [f"the environment: {format_many(len(said), 'wrong variable')}", *(f"  {each}" for each in said)]
    if faults:
        error = ConfigurationError("\n".join([*texts, *said]))
        error.faults = [*faults, *variables]
        raise error
    return Output(
        lambda: {"files": checked, "variables": variables},
        lambda: [*(line for each in checked for line in _describe_checked(each)), *said],
        FOUND if variables else FINE,
    )


def _check_file(file: str, section: str) -> _Checked:
    """Return the settings of a file where they are right; else the error lists each that is wrong."""
    from shardckpt.manager.config_check import find_faults
    from shardckpt.manager.faults import make_fault

    given = _read(file)
    for name in filter(None, section.split(".")):
        items = given.items() if isinstance(given, dict) else ()
        tables = {key: value for key, value in items if isinstance(value, dict)}
        if name not in tables:
            text = f"{file} has no section {name!r} {name_known(name, tables, 'sections')}"
            raise ConfigurationError.list_all("", [make_fault({}, "", text)])
        given = tables[name]
    if given is None:
        raise ConfigurationError(f"{file} is empty: expected settings by name, as 'interval: 500'")
    if inner := _find_section(given):
        option = f"--section {section}.{inner}" if section else f"--section {inner}"
        text = f"{file}: the settings of a CheckpointConfig are in the table {inner!r}: {option}"
        raise ConfigurationError.list_all("", [SettingFault("", None, text, option.partition(" ")[2])])
    if faults := find_faults(given):
        head = f"{file}: {format_many(len(faults), 'wrong setting')} of a CheckpointConfig"
        raise ConfigurationError.list_all(f"{head}\n  ", faults, "\n  ")
    return _Checked(file, given, [each._replace(file=file) for each in _find_notes(given)])


def _note_shared_folders(checked: Sequence[_Checked]) -> None:
    """Add a note to each file of a job that saves to the folder of an earlier one's."""
    from shardckpt.engine.locations import find_local
    from shardckpt.manager.faults import make_fault

    owners: dict[Path | str, str] = {}
    for file, given, notes in checked:
        saves = given.get("enable_checkpoint", True) and not given.get("load_only")
        if saves and isinstance(folder := given.get("folder"), str):
            path = find_local(folder) or folder.rstrip("/")
            if (owner := owners.setdefault(path, file)) != file:
                text = f"{owner} has it, too: two jobs in one folder replace, load and remove each other's steps"
                notes.append(make_fault(given, "folder", f"folder: {text}")._replace(file=file))


def _describe_checked(checked: _Checked) -> list[str]:
    file, given, notes = checked
    noted = f", with {format_many(len(notes), 'note')}" if notes else ""
    text = f"{file}: a CheckpointConfig, {format_many(len(given), 'setting')}: all right{noted}"
    return [text, *(note.message for note in notes)]


def _find_section(given: Any) -> str:
    """Return the name of the table that has most settings; ``""`` where none in it has more than the whole."""
    from shardckpt.manager.setting_list import list_settings

    known = {each.name for each in list_settings()}

    def count(table: dict[Any, Any], path: tuple[str, ...]) -> Iterator[tuple[int, tuple[str, ...]]]:
        yield len(known & table.keys()), path
        for name, value in table.items():
            if isinstance(value, dict) and name not in known:
                yield from count(value, (*path, str(name)))

    found = [*count(given, ())] if isinstance(given, dict) else []
    return ".".join(max(found, key=lambda each: each[0], default=(0, ()))[1])


def _describe_variable(variable: Variable) -> SettingFault:
    from shardckpt.manager.faults import make_fault

    name, value, text, _ = variable
    return make_fault({name: value}, name, text if text.startswith(name) else f"{name}={value}: {text}")


def _find_notes(given: dict[str, Any]) -> list[SettingFault]:
    """Return notes on settings that are right, but have no effect here."""
    from shardckpt.engine.locations import find_local
    from shardckpt.huggingface.mapping_file import find_code
    from shardckpt.manager.config import CheckpointConfig
    from shardckpt.manager.faults import make_fault
    from shardckpt.manager.states import DATALOADER, LR_SCHEDULER, MODEL, OPTIMIZER, TRAIN_STATE
    from shardckpt.storage.store_errors import mask_password

    notes = {}
    usual = (MODEL, OPTIMIZER, LR_SCHEDULER, DATALOADER, TRAIN_STATE)  # the others only the training knows
    config = CheckpointConfig(**given)
    states = {"exclude_from_loading": config.exclude_from_loading, "rename": config.rename.values()}
    for setting, names in states.items():
        for name in names:
            if near := ask_nearest(name.partition(".")[0], usual):
                notes[setting] = f"{name!r}: {near}A training without a state of that name fails at its start"
    if code := find_code(given.get("hf_mapping") or ""):
        notes["hf_mapping"] = f"{code} is code, and was not run: a training runs it at its start"
    if given.get("links") and find_local(config.folder) is None:
        notes["links"] = f"{mask_password(config.folder)} is on a store, which has none"
    if given.get("enable_checkpoint") is False:
        notes["enable_checkpoint"] = "the manager saves and loads nothing"
    if given.get("on_busy") == "skip" and given.get("async_mode", "disabled") == "disabled":
        notes["on_busy"] = "no step is skipped, since each save has ended before the next: async_mode is disabled"
    for name, value in given.items():
        if isinstance(value, str) and (variable := re.search(r"\$(\w+|\{\w+\})", value)):
            notes[name] = f"{variable[0]} is a part of the name: no variable is expanded in it"
    return [make_fault(given, name, f"{name}: {text}") for name, text in notes.items()]


def _read(file: str) -> Any:
    """Return the content of a file of JSON, TOML or YAML, by the suffix of its name."""
    from importlib import import_module
    from pathlib import Path

    from shardckpt.manifest.strict_json import parse_json

    readers: dict[str, Callable[[str], Any]] = {
        ".json": lambda text: parse_json(text.encode()),
        ".toml": lambda text: import_module("tomllib").loads(text),
        **dict.fromkeys((".yaml", ".yml"), _parse_yaml),
    }
    if (ending := Path(file).suffix.lower()) not in readers:
        raise ConfigurationError(f"{file}: the name of a file of settings ends with {', '.join(readers)}")
    try:
        return readers[ending](Path(file).read_text("utf-8"))
    except ImportError as exc:
        how = "TOML takes Python 3.11 or newer, JSON any" if ending == ".toml" else "pip install pyyaml"
        raise ConfigurationError(f"{file} cannot be read, there is no module {exc.name} here: {how}") from exc
    except Exception as exc:  # of any of the parsers
        raise ConfigurationError(f"{file} cannot be read: {type(exc).__name__}: {exc}") from exc


def _parse_yaml(text: str) -> Any:
    """Return the content of a text of YAML; a mapping that has a key twice is a ValueError: PyYAML takes the last."""
    import yaml  # type: ignore[import-untyped]

    to_check, checked = [yaml.compose(text, yaml.SafeLoader)], set[int]()
    while to_check:
        node = to_check.pop()
        if id(node) in checked or not isinstance(node, yaml.CollectionNode):
            continue
        checked.add(id(node))
        pairs = node.value if isinstance(node, yaml.MappingNode) else [(None, each) for each in node.value]
        to_check += [value for _, value in pairs]
        names = [key.value for key, _ in pairs if isinstance(key, yaml.ScalarNode)]
        if twice := [name for at, name in enumerate(names) if name in names[:at]]:
            raise ValueError(f"a mapping has {twice[0]!r:.100} twice")
    return yaml.safe_load(text)


def _explain(settings: Sequence[Setting], variables: Sequence[Variable]) -> list[str]:
    import shutil
    import textwrap

    width = shutil.get_terminal_size().columns - 4 if sys.stdout.isatty() else 100
    found = [
        *((each.name, each.default, each.text) for each in settings),
        *((each.name, each.value, each.text) for each in variables),
    ]
    texts = ((f"{name} = {value}", textwrap.fill(text, width)) for name, value, text in found)
    return [line for name, text in texts for line in (name, textwrap.indent(text, "    "))]


def _make_tables(settings: Sequence[Setting], variables: Sequence[Variable]) -> list[str]:
    # the first sentence: `shardckpt config NAME` has the rest
    rows = [(each.name, each.default, each.text.partition(". ")[0].rstrip(".")) for each in settings]
    lines = fit_table(("setting", "default", "what"), rows)
    others = [(each.name, each.value, each.text.partition(". ")[0].rstrip(".")) for each in variables]
    return [*lines, "", *fit_table(("variable", "value", "what"), others)]

"""Key mappings of a user's own file: ``rules.json``, or ``rules.py:MAPPING``."""

from __future__ import annotations

import codecs
import re
import runpy
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardckpt.engine.locations import expand_home
from shardckpt.errors import CheckpointingException, listed
from shardckpt.huggingface.folder import CONFIG, CONFIG_LIMIT, read_json
from shardckpt.huggingface.megatron import split_qkv, split_vocabulary
from shardckpt.huggingface.rules import Rule, RuleMapping
from shardckpt.manifest.strict_json import parse_json
from shardckpt.plugins.key_mapping import KeyMapping
from shardckpt.storage.filesystem import name_siblings, wrap_os_errors
from shardckpt.storage.input_file import read_file

if TYPE_CHECKING:
    from collections.abc import Mapping

#: A file of Python with the name of the mapping in it, or a file of JSON.
_FILE = re.compile(r"(?P<path>.+\.(?:json|py))(?::(?P<name>\w+))?")
_DEFAULT_NAME = "MAPPING"
#: The values of "split" in JSON: rows as Megatron has them, by the model's config.
_SPLITS = {"qkv": split_qkv, "vocabulary": split_vocabulary}


def find_file_mapping(text: str) -> KeyMapping | None:
    """Return the key mapping that a text names as a file; None if it names no file.

    It is ``FILE.json``, which has an object: the stored names, each with its name in the folder, a list of names, null
    for what is not written, or an object with the other arguments of :class:`Rule`. Or ``FILE.py:NAME``, a Python file
    that is run, with a KeyMapping, a list of rules, or a dict as in JSON; ``MAPPING`` if no name is given.
    """
    path, name = _find_file(text)
    if path is None:
        return None
    value = _read_rules(path) if path.suffix == ".json" else _run(path, name or _DEFAULT_NAME)
    return _make_mapping(value, text)


def find_code(mapping: str) -> Path | None:
    """Return the Python file that a search for this mapping runs, which must exist; None if it runs none."""
    path, _ = _find_file(mapping)
    return path if path is not None and path.suffix == ".py" else None


def _find_file(text: str) -> tuple[Path | None, str | None]:
    """Return the existing file that a text names, and the name in it; None for each that the text lacks."""
    found = _FILE.fullmatch(text)
    if found is None:
        return None, None
    path = Path(expand_home(found["path"]))
    with wrap_os_errors("access", path):
        is_file = path.is_file()
    if not is_file:
        siblings = name_siblings(path.absolute())
        raise CheckpointingException(f"mapping {text!r}: there is no file {path} {siblings}".rstrip())
    if path.suffix == ".json" and found["name"]:
        raise CheckpointingException(f"mapping {text!r}: a name after the colon is for Python files")
    return path, found["name"]


def read_config_file(text: str) -> dict[str, Any] | None:
    """Return the content of a model's ``config.json`` that a text names; None if it names something else."""
    path = Path(expand_home(text))
    if path.name != CONFIG or not path.is_file():
        return None
    found = read_json(path, CONFIG_LIMIT)
    if not isinstance(found.get("model_type"), str):
        raise CheckpointingException(f"mapping {text!r}: the config has no model_type")
    return found


def _read_rules(path: Path) -> Any:
    try:
        found = parse_json(read_file(path, CONFIG_LIMIT).removeprefix(codecs.BOM_UTF8))
    except ValueError as exc:  # a name twice, too: one of the two would be lost
        raise CheckpointingException(f"mapping {path}: {exc}") from exc
    if not isinstance(found, dict):
        raise CheckpointingException(f"mapping {path} is not a JSON object")
    return found


def _run(path: Path, name: str) -> object:
    try:
        values = runpy.run_path(str(path))
    except (Exception, SystemExit) as exc:
        raise CheckpointingException(f"mapping {path} failed: {type(exc).__name__}: {exc}") from exc
    if name not in values:
        names = [key for key in values if not key.startswith("_")]
        raise CheckpointingException(f"mapping {path} has no {name}; it has {listed(names) or 'nothing'}")
    return values[name]


def _make_mapping(value: Any, where: str) -> KeyMapping:
    if isinstance(value, KeyMapping) and not isinstance(value, type):  # a class has the method, and no rules
        return value
    if isinstance(value, dict):
        return RuleMapping([_make_rule(stored, hub, where) for stored, hub in value.items()])
    if isinstance(value, (list, tuple)) and value and all(isinstance(rule, Rule) for rule in value):
        return RuleMapping(value)
    raise CheckpointingException(
        f"mapping {where} is a {type(value).__name__}: expected a KeyMapping, a list of Rules, or a dict from stored "
        "names to names in the folder"
    )


def _make_rule(stored: object, hub: object, where: str) -> Rule:
    """Return the rule that an entry of a dict says; errors name ``where`` it stands."""
    given: Mapping[str, Any] = hub if isinstance(hub, dict) else {"hub": hub}
    names = given.get("hub")
    names = [] if names is None else [names] if isinstance(names, str) else names
    flags = {key: value for key, value in given.items() if key not in ("hub", "split")}
    split = given.get("split")
    is_sound = (
        "hub" in given
        and isinstance(stored, str)
        and isinstance(names, (list, tuple))
        and all(isinstance(name, str) for name in names)
        and flags.keys() <= {"transposed", "keep_dtype"}
        and all(isinstance(flag, bool) for flag in flags.values())
        and (split is None or (isinstance(split, str) and split in _SPLITS))
    )
    if not is_sound:
        raise CheckpointingException(
            f"mapping {where}: {stored!r} has {hub!r}; expected a name in the folder, a list of names, null for what "
            'is not written, or {"hub": [...], "transposed": true}, also with "keep_dtype": true and "split": "qkv" or '
            '"vocabulary"'
        )
    try:
        return Rule(str(stored), tuple(names), split=_SPLITS[split] if split else None, **flags)
    except CheckpointingException as exc:
        raise CheckpointingException(f"mapping {where}: {exc}") from exc

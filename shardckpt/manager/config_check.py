"""Check the settings of a file, before a job is started with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from pydantic import ValidationError

from shardckpt.engine.locations import find_local
from shardckpt.errors import CheckpointingException, ConfigurationError, SettingFault, show_given
from shardckpt.huggingface.mapping_file import find_code
from shardckpt.huggingface.models import find_mapping
from shardckpt.manager.config import AsyncMode, CheckpointConfig, find_wrong_settings, parse_config
from shardckpt.manager.faults import make_fault
from shardckpt.manager.setting_checks import check_assets, check_folder, check_place, find_step_saver, list_accepts
from shardckpt.plugins.manager import get_plugin_manager
from shardckpt.plugins.resolver import list_unknown_accepted

#: The settings that decide which abilities a strategy needs.
_SWITCHES = ("load_only", "steps_in_hf", "async_mode")


def find_faults(given: Any) -> list[SettingFault]:
    """Return the faults of settings in a file, each with the expected value; empty if there are none.

    Strategy, key mapping and the plugin of a URL's scheme must be installed here. The job may run elsewhere, so a
    folder may be absent here. Two faults of folders on this machine are found: a folder of steps that is a file, and
    assets without the ``config.json`` that says where to cut the vocabulary. No code that the settings name is run: a
    mapping's Python file must exist.
    """
    if not isinstance(given, Mapping):
        return [SettingFault("", None, f"{show_given(given)} is no table of settings by name")]
    faults: list[SettingFault] = []
    wrong: set[str] = set()
    try:
        parse_config(given)
    except ConfigurationError as exc:
        faults += exc.faults or [SettingFault("", None, str(exc))]
        if not isinstance(exc.__cause__, ValidationError):
            return faults
        wrong = find_wrong_settings(exc.__cause__)
    right = {name: value for name, value in given.items() if name not in wrong}
    for name, check in _list_checks(right):
        try:
            if name not in wrong:
                check(right.get(name, CheckpointConfig.model_fields[name].default))
        except CheckpointingException as exc:  # noqa: PERF203 - there are few
            found = exc.faults if isinstance(exc, ConfigurationError) else ()
            wrong.add(name)
            faults += found or [make_fault(given, name, f"{name}: {exc}")]
    if "accept" not in {*wrong, *(fault.setting for fault in faults)}:
        unknown = list_unknown_accepted(right.get("accept"), get_plugin_manager())
        faults += [make_fault(given, "accept", f"accept: {text}") for text in unknown]
    lacking = "" if wrong & {"hf_mapping", "hf_assets_path"} else _find_lacking_assets(right)
    if lacking:
        faults.append(make_fault(given, "hf_assets_path", lacking))
    # a fault shows the value in the file, not a validator's result
    return [
        make_fault(given, fault.setting, fault.message, fault.suggestion) if fault.setting in given else fault
        for fault in faults
    ]


def _list_checks(right: Mapping[str, Any]) -> list[tuple[str, Callable[[Any], object]]]:
    """Return the settings to check against installed plugins and local files, each with its check."""
    # parsed, since a file may say "Disabled" or "yes"
    config = CheckpointConfig(**{name: right[name] for name in _SWITCHES if name in right})
    saves = not config.load_only
    accepts = list_accepts(right.get("accept")) if saves else []
    is_async = saves and config.async_mode is not AsyncMode.DISABLED
    find_saver = partial(find_step_saver, accepts=accepts, in_hf=saves and config.steps_in_hf, is_async=is_async)
    return [
        ("hf_mapping", lambda mapping: (mapping and find_code(mapping)) or find_mapping(mapping)),
        ("strategy", find_saver),
        ("folder", check_folder),
        ("initial_load_path", check_place),
        ("hf_assets_path", check_place),
    ]


def _find_lacking_assets(given: Mapping[str, Any]) -> str:
    """Return the missing asset for ``hf_cut_vocabulary``; ``""`` if the folder is not here, or code must be run."""
    cut, folder, mapping = (given.get(name) for name in ("hf_cut_vocabulary", "hf_assets_path", "hf_mapping"))
    place = find_local(str(folder)) if cut and mapping else None
    if place is None or not place.is_dir() or find_code(str(mapping)):
        return ""
    try:
        check_assets(str(folder), mapping, cut_vocabulary=True)
    except CheckpointingException as exc:
        return str(exc)
    return ""

"""Check single settings against the installed plugins, and the content of the folders that they name."""

from __future__ import annotations

import re
from functools import partial
from typing import TYPE_CHECKING, Any

from shardckpt import settings
from shardckpt.distributed.error_report import replace_text
from shardckpt.engine.locations import find_local
from shardckpt.engine.saving import find_saver
from shardckpt.errors import CheckpointingException, ConfigurationError, SettingFault
from shardckpt.huggingface.assets import list_assets
from shardckpt.huggingface.config import read_config
from shardckpt.huggingface.models import find_mapping
from shardckpt.plugins.manager import get_plugin_manager
from shardckpt.plugins.resolver import is_accepted, list_unknown_accepted
from shardckpt.plugins.stores import check_served
from shardckpt.storage.filesystem import wrap_os_errors
from shardckpt.strategy import AsyncSaveStrategy, StoresHubFolders

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence
    from pathlib import Path

    from shardckpt.plugins.resolver import Accept
    from shardckpt.strategy import SaveStrategy

#: A URL that ends after its scheme.
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:/*")


def list_accepts(accept: Accept | None) -> list[tuple[str, Accept | None]]:
    """Return the two policies that accept or refuse checkpoints, by name: the setting and the variable."""
    return [("accept", accept), (settings.ACCEPT, settings.accept())]


def find_step_saver(
    strategy: Any, accepts: Sequence[tuple[str, Accept | None]], *, in_hf: bool, is_async: bool
) -> SaveStrategy:
    """Return the strategy that saves the steps.

    Args:
        strategy: The setting that names it; None for the default.
        accepts: The policies that its checkpoints must pass; none where nothing is saved.
        in_hf: Whether its checkpoints must be Hugging Face folders.
        is_async: Whether it must save in the background.

    Raises:
        CheckpointingException: There is no such strategy, or it does not do all of this.
    """
    saver = find_saver(strategy, get_plugin_manager())
    named = f"the default strategy {saver.backend!r}" if strategy is None else f"the strategy {strategy!r}"
    kind = f"{type(saver).__name__}, {named},"
    faults = [
        _make_refusal(source, policy, saver)
        for source, policy in accepts
        if not is_accepted(saver.backend, saver.version, policy)
    ]
    if is_async and not isinstance(saver, AsyncSaveStrategy):
        text = f"async_mode: {kind} saves in the foreground only: choose async_mode='disabled', or another strategy"
        faults.append(SettingFault("async_mode", None, text))
    if in_hf and not isinstance(saver, StoresHubFolders):
        text = (
            f"steps_in_hf: {kind} does not store Hugging Face folders: choose strategy='safetensors', or "
            "last_save_in_hf, which exports the last step"
        )
        faults.append(SettingFault("steps_in_hf", True, text))
    if faults:
        raise ConfigurationError.list_all("", faults)
    return saver


def _make_refusal(source: str, policy: Accept | None, saver: SaveStrategy) -> SettingFault:
    """Return the fault of a policy that does not accept what the strategy saves."""
    unknown = "; ".join(list_unknown_accepted(policy, get_plugin_manager()))
    why = f" ({unknown})" if unknown else ""
    text = (
        f"steps would be saved as {saver.backend}@{saver.version}, which {source} does not allow{why}: the job could "
        "not go on from them; add it, or choose another strategy"
    )
    return SettingFault(source, policy, text)


def check_assets(folder: str, mapping: Any, *, cut_vocabulary: bool) -> None:
    """Check that a folder of ``hf_assets_path`` has the files that an export copies, and the ``vocab_size`` for a cut.

    Raises:
        CheckpointingException: It does not exist, cannot be listed, or lacks something.
    """
    try:
        files = list_assets(folder, mapping)
        if cut_vocabulary:
            find_mapping(mapping, partial(read_config, files), "cut")
    except CheckpointingException as exc:
        raise replace_text(exc, f"hf_assets_path: {exc}") from exc.__cause__


def check_folder(place: str | os.PathLike[str] | None) -> None:
    """Check the folder of the steps, without opening it.

    Raises:
        ConfigurationError: It is a file, or the scheme of a URL without a bucket.
        StorageError: It cannot be looked at, or no plugin serves the URL.
    """
    if (local := check_place(place)) is not None:
        with wrap_os_errors("access", local):
            is_file = local.is_file()
        if is_file:
            raise ConfigurationError(f"{place} is a file: give the directory that the steps are to be in")
    text = str(place)
    if _SCHEME.fullmatch(text) or (place is not None and local is None and text.rstrip("/").endswith(":")):
        # pathlib makes s3: of s3://, and run: of ./run:
        local_name = "" if local is None else f" (a local directory of that name can be given as {local})"
        raise ConfigurationError(f"{text!r} names no bucket or directory: s3://bucket/run{local_name}")


def check_place(place: str | os.PathLike[str] | None) -> Path | None:
    """Return the local path that is given; for a URL return None, if a plugin may serve it. Nothing is opened."""
    local = None if place is None else find_local(str(place))
    if place is not None and local is None:
        check_served(str(place), get_plugin_manager())
    return local

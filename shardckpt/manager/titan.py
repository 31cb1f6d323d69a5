"""Translate torchtitan's checkpoint options and data loaders' states: for the managers of each of its releases."""

from __future__ import annotations

import os
from typing import Any

from shardckpt.engine.locations import expand_home
from shardckpt.manager.config import CheckpointConfig


def make_titan_config(options: dict[str, Any], base_folder: str) -> CheckpointConfig:
    """Return a manager's configuration for checkpoint options of any release of torchtitan.

    The option ``folder`` is relative to ``base_folder``, a folder or URL, unless it is a URL or an absolute path.
    """
    defaults = {
        "step_0_model_only": True,  # as torchtitan: of step 0 only the model is loaded
        # as torchtitan: keys without "model."; with steps_in_hf they are the Hub's names, and the option is refused
        "last_save_bare_keys": not options.get("steps_in_hf"),
    }
    folder = expand_home(options.get("folder", "checkpoint"))
    if base_folder and "://" not in folder:
        folder = os.path.join(base_folder, folder)  # noqa: PTH118 - as torchtitan does; a Path would join no URL
    values = {**defaults, **options, "folder": folder}
    if values.get("export_dtype") == "float32":
        values["export_dtype"] = None  # torchtitan's default, under which it casts nothing
    return CheckpointConfig(**values)


def merge_loader_states(states: list[dict[str, Any]], _rank: int, _world_size: int) -> dict[str, Any]:
    """Return one state with the entries of all ranks' data loaders, for a load on another number of ranks.

    torchtitan's loader looks for its entry under ``dp_rank_<n>``.
    """
    return {name: value for state in states for name, value in state.items()}

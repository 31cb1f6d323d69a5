"""The common part of the managers for all releases of torchtitan: its options, and the states of its loaders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shardckpt.engine.locations import expand_home
from shardckpt.manager.config import CheckpointConfig


def make_titan_config(options: dict[str, Any], base_folder: str) -> CheckpointConfig:
    """Return options of torchtitan, of any release, as a manager's.

    The option ``folder`` is relative to ``base_folder``, a folder or URL, unless it is a URL.
    """
    defaults = {"step_0_model_only": True, "last_save_bare_keys": not options.get("steps_in_hf")}
    folder = expand_home(options.get("folder", "checkpoint"))
    if base_folder and "://" not in folder:
        folder = f"{base_folder}/{folder}" if "://" in base_folder else str(Path(base_folder, folder))
    given = {**defaults, **options, "folder": folder}
    if given.get("export_dtype") == "float32":
        given["export_dtype"] = None  # the default there, which casts nothing
    return CheckpointConfig(**given)


def merge_loader_states(states: list[dict[str, Any]], _rank: int, _world_size: int) -> dict[str, Any]:
    """Return the states of all loaders in one: each is under its own ``dp_rank_<n>``."""
    return {name: value for state in states for name, value in state.items()}

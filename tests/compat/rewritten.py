"""The one rule by which code for Megatron is ported."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

from shardckpt.plugins import get_plugin_manager

SCRIPT = Path(__file__).with_name("training.py")
#: Strategies of Megatron's kind, and a job that uses them.
STRATEGIES = Path(__file__).with_name("path_strategy.py")


def ported(text: str) -> str:
    """Code for megatron.core.dist_checkpointing as code for shardckpt."""
    return text.replace("megatron.core.dist_checkpointing", "shardckpt.compat.megatron.dist_checkpointing").replace(
        "from megatron.core import dist_checkpointing", "from shardckpt.compat.megatron import dist_checkpointing"
    )


def run_script(path: Path, function: str, *args: Any) -> Any:
    """Call a function of a ported script. The registry is as it was again afterwards: other tests use the process."""
    module = types.ModuleType(f"ported_{path.stem}")
    with get_plugin_manager().registry.preserved():
        exec(compile(ported(path.read_text()), str(path), "exec"), vars(module))
        return getattr(module, function)(*args)


def run(function: str, *args: Any) -> Any:
    """Call a function of the ported training script."""
    return run_script(SCRIPT, function, *args)


__all__ = ["SCRIPT", "STRATEGIES", "ported", "run", "run_script"]

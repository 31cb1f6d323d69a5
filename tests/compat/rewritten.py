"""The one rule by which code for Megatron is ported."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).with_name("training.py")


def ported(text: str) -> str:
    """Code for megatron.core.dist_checkpointing as code for shardckpt."""
    return text.replace("megatron.core.dist_checkpointing", "shardckpt.compat.megatron.dist_checkpointing").replace(
        "from megatron.core import dist_checkpointing", "from shardckpt.compat.megatron import dist_checkpointing"
    )


def run(function: str, *args: Any) -> Any:
    """Call a function of the ported script."""
    module = types.ModuleType("ported_training")
    exec(compile(ported(SCRIPT.read_text()), str(SCRIPT), "exec"), vars(module))
    return getattr(module, function)(*args)


__all__ = ["SCRIPT", "ported", "run"]

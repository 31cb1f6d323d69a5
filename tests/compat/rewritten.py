"""The one rule by which code for another library is ported: its import lines name other modules."""

from __future__ import annotations

import re
import types
from pathlib import Path
from typing import Any

from shardckpt.plugins import get_plugin_manager

SCRIPT = Path(__file__).with_name("training.py")
#: Strategies of Megatron's kind, and a job that uses them.
STRATEGIES = Path(__file__).with_name("path_strategy.py")
#: The start of an import line there, and here.
IMPORTS = {
    r"from megatron\.core import dist_checkpointing": "from shardckpt.compat.megatron import dist_checkpointing",
    r"from megatron\.core\.dist_checkpointing": "from shardckpt.compat.megatron.dist_checkpointing",
    r"from mindspeed_llm\.fsdp2\.checkpoint\.utils": "from shardckpt.compat.mindspeed",
    r"from mindspeed_llm\.fsdp2\.checkpoint\.ep_load_planner": "from shardckpt.compat.mindspeed",
    r"from torch\.distributed\.checkpoint\.optimizer": "from shardckpt.compat.torch_optimizer",
    r"from torchtitan\.components\.checkpoint": "from shardckpt.compat.torchtitan",
}


def ported(text: str) -> str:
    """Code for another library as code for shardckpt."""
    for there, here in IMPORTS.items():
        text = re.sub(rf"^(\s*){there}\b", rf"\1{here}", text, flags=re.MULTILINE)
    return text


def run_script(path: Path, function: str, *args: Any) -> Any:
    """Call a function of a ported script. The registry is as it was again afterwards: other tests use the process."""
    module = types.ModuleType(f"ported_{path.stem}")
    with get_plugin_manager().registry.preserved():
        exec(compile(ported(path.read_text()), str(path), "exec", dont_inherit=True), vars(module))
        return getattr(module, function)(*args)


def run(function: str, *args: Any) -> Any:
    """Call a function of the ported training script."""
    return run_script(SCRIPT, function, *args)


__all__ = ["SCRIPT", "STRATEGIES", "ported", "run", "run_script"]

from __future__ import annotations

import subprocess
import sys

from tests.tensors.torch_private import OLDEST

PROGRAM = """
import importlib, sys, torch
torch.__version__ = type(torch.__version__)("2.9.1+cu128")
for name in sys.argv[1:]:
    module, _, member = name.partition(":")
    try:
        getattr(importlib.import_module(module), member)
    except ImportError as error:
        print(name, error)
"""


def test_the_refusal_is_at_import() -> None:
    """Nothing that saves or loads is imported under an older torch: the error says so before anything else fails."""
    names = [
        "shardckpt.dist_checkpointing:save",
        "shardckpt.manager:CheckpointManager",
        "shardckpt.adapters:load_into",
        "shardckpt.local:save_local",
        "shardckpt_torch_dist.save:Saver",
    ]
    command = [sys.executable, "-c", PROGRAM, *names]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    said = [line.partition(", and found torch 2.9.1+cu128 in ")[0] for line in ended.stdout.splitlines()]
    assert said == [f"{name} shardckpt needs torch {OLDEST} or newer" for name in names]

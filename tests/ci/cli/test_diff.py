"""``shardckpt diff``."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
import torch

from tests.backends import Backend, both
from tests.maintenance.diff import save_values

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("how", [[], ["--json"], ["--tensors-only"]])
@both
def test_diff_by_fingerprints_imports_no_torch(backend: Backend, how: list[str], tmp_path: Path) -> None:
    """To compare two checkpoints of ours by their stored fingerprints nobody waits for torch, pydantic or plugins."""
    for name in ("one", "two"):
        values = {"same": torch.arange(4.0), f"only in {name}": torch.ones(2)}
        save_values(tmp_path / name, values, backend.name, fingerprints=True)
    code = (
        "import sys; from shardckpt.cli import main; code = main(sys.argv[1:])\n"
        "slow = {'torch', 'numpy', 'pydantic', 'pluggy', 'importlib.metadata', 'shardckpt.strategy'} & {*sys.modules}\n"
        "sys.exit(f'imported: {slow}' if slow else code)"
    )
    command = [sys.executable, "-c", code, "diff", str(tmp_path / "one"), str(tmp_path / "two"), *how]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (1, "")
    assert "only in two" in done.stdout

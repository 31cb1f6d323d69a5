"""``shardckpt ls``: one row a checkpoint, whoever wrote it, and whether it is whole."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

from shardckpt.manager import pin_step
from tests.manager import folders

if TYPE_CHECKING:
    from pathlib import Path


def test_ls_of_a_folder_without_a_manifest_does_not_import_dtensor(tmp_path: Path) -> None:
    """To ask every installed reader whether it recognises a directory imports no DTensor, which takes half a second."""
    (tmp_path / "logs").mkdir()
    code = (
        "import sys; from shardckpt.cli import main; "
        f"assert main(['ls', {str(tmp_path)!r}]) == 0; assert 'shardckpt_ep.load' in sys.modules; "
        "assert 'torch.distributed.tensor' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_a_listing_of_pins_does_not_import_torch(tmp_path: Path) -> None:
    """Neither with pins nor without any."""
    folders.save_all(tmp_path, 1)
    code = (
        "import sys; from shardckpt.cli import main; "
        f"assert main(['pin', {str(tmp_path)!r}]) == 0; assert 'torch' not in sys.modules"
    )
    for label in ("", "release"):
        if label:
            pin_step(tmp_path, 1, label)
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        assert label in done.stdout

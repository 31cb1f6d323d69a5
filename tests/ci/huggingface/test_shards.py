from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from shardckpt.errors import StorageError
from shardckpt.huggingface import (
    save_state_dict,
)
from tests.faults.disks import small_disk
from tests.tables import table

if TYPE_CHECKING:
    from pathlib import Path


@table("safe_serialization", [True, False])
def test_a_full_disk_is_said_so(tmp_path: Path, safe_serialization: bool) -> None:
    """On a full disk, files of both kinds are an error that says so, with the file; the one that was there stays."""
    with small_disk(tmp_path / "disk", "1m") as disk:
        save_state_dict({"a": torch.ones(2)}, disk / "f", safe_serialization)
        with pytest.raises(StorageError, match=r"cannot write .*/disk/.*No space left on device \(ENOSPC\)"):
            save_state_dict({"a": torch.zeros(1_000_000), "b": torch.zeros(9)}, disk / "f", safe_serialization)
        assert [path.name for path in disk.iterdir()] == ["f"]

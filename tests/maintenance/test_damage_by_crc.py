"""What is said of how a damaged file was checked."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from shardckpt.maintenance import verify_checkpoint

if TYPE_CHECKING:
    from pathlib import Path


def test_a_file_with_a_wrong_crc_was_compared(tmp_path: Path) -> None:
    """A file whose values differ from their CRC-32 counts as compared with it, not as checked by structure alone."""
    path = tmp_path / "a.pt"
    torch.save({"w": torch.arange(64.0)}, path)
    data = bytearray(path.read_bytes())
    data[data.index(torch.arange(64.0).numpy().tobytes()) + 9] ^= 1
    path.write_bytes(data)
    (result,) = verify_checkpoint(path)
    assert "CRC-32" in result.fault
    assert result.checked == "crc32"

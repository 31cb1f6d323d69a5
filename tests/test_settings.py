from __future__ import annotations

import pytest

from shardckpt import settings
from shardckpt.errors import CheckpointingException
from tests.tables import table


@table(
    ("name", "value", "most"),
    [("IO_THREADS", "0", 1024), ("IO_THREADS", "1025", 1024), ("REMOTE_THREADS", "1e3", 1024), ("DIRECT_IO", "2", 1)],
)
def test_bad_setting(monkeypatch: pytest.MonkeyPatch, name: str, value: str, most: int) -> None:
    """A number that is none, more threads than a save would wait for, and a switch that is neither are errors."""
    monkeypatch.setenv(f"SHARDCKPT_{name}", value)
    with pytest.raises(
        CheckpointingException, match=f"SHARDCKPT_{name}='{value}': expected a whole number .* to {most}"
    ):
        settings.check_variables()

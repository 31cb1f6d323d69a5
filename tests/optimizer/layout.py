"""What the tests of layout share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardckpt.optimizer_state import load_sharded_optimizer_state_dict

if TYPE_CHECKING:
    from pathlib import Path


def load(directory: Path, params: dict[str, Any], **options: Any) -> dict[str, dict[str, Any]]:
    """Load the state of an optimizer, whose options are no shards."""
    found = load_sharded_optimizer_state_dict(params, "optimizer", directory, **options)
    assert found["optimizer"]["param_groups"] == []
    return found["optimizer"]["state"]

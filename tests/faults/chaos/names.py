"""The programs that the referee kills, and where their scores are kept; it is imported without the referee."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

#: Our programs, by the name in the table.
OURS = {
    "shardckpt manager": "manager_loop",
    "shardckpt callback, Hugging Face Trainer": "trainer",
    "shardckpt plugin, Lightning": "lightning_loop",
}
#: The referee's, by the name in the table.
THEIRS = {"plain DCP": "dcp_ddp", "Hugging Face Trainer": "hf_trainer", "Lightning": "lightning_trainer"}
SCORES = Path(__file__).with_name("scores.json")


def merge_scores(found: dict[str, Any], path: Path = SCORES) -> None:
    """Add scores to those that are kept in a file, or put them in their places there."""
    kept = json.loads(path.read_text())["scores"] if path.exists() else {}
    merged = {"versions": found["versions"], "scores": {**kept, **found["scores"]}}
    path.write_text(json.dumps(merged, indent=1) + "\n")

"""Where the repository lies, and the checkpoints in it that other libraries wrote."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[1]
GOLDEN = ROOT / "tests" / "golden"

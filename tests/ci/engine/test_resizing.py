"""Loads into a vocabulary of another size, on several ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.engine import resizing

if TYPE_CHECKING:
    from pathlib import Path

    from shardckpt.testing.ranks import Ranks


def test_a_grown_vocabulary_of_fsdp(ranks: Ranks, tmp_path: Path) -> None:
    """Rows that FSDP2 cuts elsewhere after the growth are where they belong, from two ranks to one, three and two."""
    saved = ranks.run(2, resizing.save, str(tmp_path / "c"), 10)[0]
    for world_size, rows in ((1, 13), (3, 11), (2, 15)):
        for before, after in ranks.run(world_size, resizing.load, str(tmp_path / "c"), rows):
            resizing.check(saved, before, after)

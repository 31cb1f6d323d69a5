"""Damage that many tests do to files."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def flip(path: Path, place: int | bytes | None = None) -> None:
    """Change one bit of a file: at a place, in the first of these bytes, or in the middle."""
    content = bytearray(path.read_bytes())
    at = content.index(place) if isinstance(place, bytes) else len(content) // 2 if place is None else place
    content[at] ^= 1
    path.write_bytes(content)


__all__ = ["flip"]

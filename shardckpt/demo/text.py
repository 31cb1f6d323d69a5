"""Real text that every Python has: the sources of its standard library."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch

from shardckpt.errors import CheckpointingException

#: Bytes of text to train on.
SIZE = 1 << 20


def library_text() -> torch.Tensor:
    """The first :data:`SIZE` bytes of the standard library's modules, by name, as uint8."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = bytearray()
    for path in sorted(folder.glob("*.py")):
        text += path.read_bytes()
        if len(text) >= SIZE:
            return torch.frombuffer(text, dtype=torch.uint8)[:SIZE]
    raise CheckpointingException(
        f"{folder} has {len(text)} bytes of Python sources, the demo trains on {SIZE}: run it with a Python whose "
        "standard library is installed as sources"
    )


def batch(text: torch.Tensor, step: int, count: int, length: int) -> torch.Tensor:
    """The global batch of a training step, for any number of ranks: ``count`` sequences of ``length`` bytes."""
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(len(text) - length, (count, 1), generator=generator)
    return text[starts + torch.arange(length)].long()


__all__ = ["SIZE", "batch", "library_text"]

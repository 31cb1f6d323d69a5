"""What each rank of a group does in the tests of errors: try, look what is left, and go on with a good save."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from shardckpt import dist_checkpointing
from shardckpt.errors import CheckpointingException
from tests.faults import samples

if TYPE_CHECKING:
    from collections.abc import Callable

BAD, GOOD = 1, 2


@dataclass
class Attempt:
    """How it went on one rank.

    Attributes:
        kind: Class of what the attempt raised; ``""`` for nothing.
        family: Whether it was a CheckpointingException.
        message: Its text.
        left: Names beside and at the target afterwards.
        wrong: Keys that a good save and load in the same processes got wrong.
    """

    kind: str
    family: bool
    message: str
    left: list[str]
    wrong: list[str]


def attempt(directory: str, action: Callable[[Path], Any]) -> Attempt:
    """``action`` on every rank with the target's path, then a good save to the same path."""
    target = Path(directory) / "ckpt"
    kind, family, message = "", False, ""
    try:
        action(target)
    except Exception as exc:  # noqa: BLE001 - the test decides
        kind, family, message = type(exc).__name__, isinstance(exc, CheckpointingException), str(exc)
    dist.barrier()
    left = sorted(path.name for path in Path(directory).iterdir())
    dist.barrier()
    samples.save(target, GOOD, overwrite=True)
    return Attempt(kind, family, message, left, samples.find_wrong(target, GOOD))


def save_with(directory: str, spoil: Callable[[dict[str, Any], int, int], Any], **options: Any) -> Attempt:
    """A save of a state dict that ``spoil(state, rank, world)`` has changed on some rank."""

    def action(target: Path) -> None:
        rank, world = dist.get_rank(), dist.get_world_size()
        state = samples.state_dict(BAD, rank, world)
        spoil(state, rank, world)
        dist_checkpointing.save(state, target, **options)

    return attempt(directory, action)

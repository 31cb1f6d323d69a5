"""What the demo tells a rank to do, and what the rank tells back: plain data, without torch."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Job:
    """The work of one rank.

    Attributes:
        rank: Which rank it is.
        world_size: Number of ranks; one trains a plain model without a process group, more train with FSDP2.
        seed: Of the fresh model's parameters.
        checkpoint: The checkpoint's directory.
        saves: Whether the rank trains, saves and goes on, or loads and goes on.
        steps: Training steps before the save.
        more_steps: Training steps after the save or load.
        rendezvous: File where the ranks meet.
        report_fd: Descriptor for messages to the demo.
    """

    rank: int
    world_size: int
    seed: int
    checkpoint: str
    saves: bool
    steps: int
    more_steps: int
    rendezvous: str
    report_fd: int = -1

    def dump(self) -> str:
        """As an argument of the worker's command line."""
        return json.dumps(asdict(self))

    @classmethod
    def parse(cls, text: str) -> Job:
        """What :meth:`dump` made."""
        return cls(**json.loads(text))


@dataclass(frozen=True)
class Dispatch:
    """The strategy that did a save or load, as the registry knows it."""

    backend: str
    version: int
    strategy: str
    distribution: str


@dataclass
class RankResult:
    """What a rank has to show.

    Attributes:
        losses: Of the steps after the save or load.
        fresh_loss: Of the freshly initialised model, on the batch of the first of these steps.
        parameters: Number of the model's parameters.
        digests: SHA-256 of the whole model and optimizer as they were saved, or after the load.
        rows: Rows of this rank's shards of some tensors, with the global shape, by key.
        seconds: Time of the save or load.
        dispatch: Who did it.
    """

    losses: list[float] = field(default_factory=list)
    fresh_loss: float = 0.0
    parameters: int = 0
    digests: dict[str, str] = field(default_factory=dict)
    rows: dict[str, tuple[int, list[int]]] = field(default_factory=dict)
    seconds: float = 0.0
    dispatch: Dispatch | None = None

    @classmethod
    def parse(cls, fields: dict[str, Any]) -> RankResult:
        """From JSON values."""
        dispatch = fields.pop("dispatch")
        return cls(dispatch=Dispatch(**dispatch) if dispatch else None, **fields)


__all__ = ["Dispatch", "Job", "RankResult"]

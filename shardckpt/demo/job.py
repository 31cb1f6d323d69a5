"""What the demo tells a rank to do, and what the rank tells back: plain data, without torch."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Layout:
    """How the ranks of a group share a model; one rank trains it plain, without a process group.

    Attributes:
        fsdp: Ranks that FSDP2 shards over; in a model with experts, those that have parts of the same experts.
        ep: Ranks with different experts; 0 for a model without experts.
    """

    fsdp: int
    ep: int = 0

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.fsdp * max(self.ep, 1)

    def __str__(self) -> str:
        if self.world_size == 1:
            return "1 rank"
        return f"ep {self.ep} x efsdp {self.fsdp}" if self.ep else f"{self.fsdp} ranks"


@dataclass(frozen=True)
class Job:
    """The work of one rank.

    Attributes:
        rank: Which rank it is.
        layout: Of its group.
        seed: Of the fresh model's parameters.
        checkpoint: The checkpoint's directory.
        saves: Whether the rank trains, saves and goes on, or loads and goes on.
        steps: Training steps before the save.
        more_steps: Training steps after the save or load.
        rendezvous: File where the ranks meet.
        report_fd: Descriptor for messages to the demo.
    """

    rank: int
    layout: Layout
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
        fields = json.loads(text)
        return cls(layout=Layout(**fields.pop("layout")), **fields)


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
        rows: Rows of this rank's shards of some tensors, as first and behind the last, with the global shape, by key.
        nbytes: Of this rank's shards of all tensors.
        read: Bytes that the process read during the load, by the system's count; 0 where it keeps none.
        seconds: Time of the save or load.
        dispatch: Who did it.
    """

    losses: list[float] = field(default_factory=list)
    fresh_loss: float = 0.0
    parameters: int = 0
    digests: dict[str, str] = field(default_factory=dict)
    rows: dict[str, tuple[list[list[int]], list[int]]] = field(default_factory=dict)
    nbytes: int = 0
    read: int = 0
    seconds: float = 0.0
    dispatch: Dispatch | None = None

    @classmethod
    def parse(cls, fields: dict[str, Any]) -> RankResult:
        """From JSON values."""
        dispatch = fields.pop("dispatch")
        return cls(dispatch=Dispatch(**dispatch) if dispatch else None, **fields)


__all__ = ["Dispatch", "Job", "Layout", "RankResult"]

"""What the runner asks of a library that saves and loads."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from pathlib import Path

    from benchmarks.state import State


class UnsupportedError(Exception):
    """Cannot be done here: no result, and no failure."""


class Adapter(ABC):
    """Saves a rank's state and loads it; an instance lives as long as its rank.

    Attributes:
        syncs: What has reached the disk when a save returns.
        operations: Of save, load, slice, reshard and async.
        maps_files: Whether it reads by mapping files, which nothing counts.
    """

    syncs: ClassVar[str]
    operations: ClassVar[frozenset[str]]
    maps_files: ClassVar[bool] = False

    def can(self, operation: str, world: int) -> bool:  # noqa: ARG002 - some can with one rank only
        """Whether it does an operation with so many ranks."""
        return operation in self.operations

    @abstractmethod
    def version(self) -> str:
        """Of the library."""

    def describe(self, state: State) -> Any:
        """The state in the library's terms; made before the clock starts."""
        return state

    @abstractmethod
    def save(self, described: Any, path: Path) -> None:
        """Save to a path where nothing is yet."""

    @abstractmethod
    def load(self, described: Any, path: Path) -> None:
        """Load into the state's own memory: what was saved with this sharding, or parts of it."""

    def start(self, described: Any, path: Path) -> None:
        """Begin a save behind the training; when this returns the state may change."""
        raise NotImplementedError

    def finish(self) -> None:
        """Wait until the save that was begun is complete."""
        raise NotImplementedError

    def release(self) -> None:  # noqa: B027 - most keep nothing
        """Give up memory and processes that are kept from save to save."""


__all__ = ["Adapter", "UnsupportedError"]

"""Megatron's base classes of strategies: a strategy saves to a path and loads from one by its own code.

:mod:`shardckpt.compat.megatron.path_adapter` makes a save or load of the engine of such a strategy.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from shardckpt import dist_checkpointing

if TYPE_CHECKING:
    import os

    from shardckpt.mapping.base import CommonStateDict, ShardedStateDict, StateDict

    PathLike = str | os.PathLike[str]


class _Handles(ABC):  # noqa: B024 - a base of bases
    """The common base of saving and loading strategies."""

    @property
    def can_handle_sharded_objects(self) -> bool:
        """Whether the strategy stores ShardedObjects itself; if not, it gets none, and they are stored apart."""
        return False


class SaveStrategyBase(_Handles):
    """A strategy that saves.

    Args:
        backend: Name of the format that it writes.
        version: Version of the format.
    """

    def __init__(self, backend: str, version: int) -> None:
        self.backend = backend
        self.version = version


class SaveShardedStrategy(SaveStrategyBase):
    """A strategy that saves shards to a directory."""

    @abstractmethod
    def save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: Any) -> None:
        """Collective: write this rank's part of a checkpoint.

        Args:
            sharded_state_dict: This rank's ShardedTensors and ShardedObjects by name, replicas among them.
            checkpoint_dir: The directory, a Path.
        """


class AsyncSaveShardedStrategy(SaveShardedStrategy):
    """A strategy that can write in the background."""

    @abstractmethod
    def async_save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: Any) -> Any:
        """Collective: plan a save.

        Args:
            sharded_state_dict: As in :meth:`save`.
            checkpoint_dir: As in :meth:`save`.

        Returns:
            An AsyncRequest, ours or another library's: ``async_fn`` writes, ``finalize_fns`` run when all have written.
        """

    def save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: Any) -> None:
        """Collective: plan, write and finalize in the caller's thread."""
        self.async_save(sharded_state_dict, checkpoint_dir).execute_sync()


class LoadStrategyBase(_Handles):
    """A strategy that loads."""

    def check_backend_compatibility(self, loaded_version: str) -> None:
        """Raise an error if the strategy does not read that backend; by default it reads every one that it is given."""

    def check_version_compatibility(self, loaded_version: int) -> None:
        """Raise an error if the strategy does not read that version; by default it reads every one that it is given."""


class LoadShardedStrategy(LoadStrategyBase):
    """A strategy that loads shards from a directory."""

    @abstractmethod
    def load(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: Any) -> StateDict:
        """Collective: read this rank's shards.

        Args:
            sharded_state_dict: ShardedTensors and ShardedObjects by name.
            checkpoint_dir: The checkpoint's directory, a Path.

        Returns:
            The tensors and objects by the same names.
        """

    @abstractmethod
    def load_tensors_metadata(self, checkpoint_dir: Any) -> dict[str, Any]:
        """Return the stored tensors by key, as ShardedTensors without data; called for Megatron's own checkpoints."""

    def load_sharded_metadata(self, checkpoint_dir: Any) -> dict[str, Any]:
        """Return all that is stored by key, without data; by default the tensors."""
        return self.load_tensors_metadata(checkpoint_dir)

    def load_common(self, checkpoint_dir: PathLike) -> CommonStateDict:
        """Return the common state: :func:`shardckpt.dist_checkpointing.load_common_state_dict`."""
        return dist_checkpointing.load_common_state_dict(checkpoint_dir)

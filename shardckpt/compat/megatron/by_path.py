"""Mixins for strategies that Megatron's callers call directly, with a state dict and a path."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardckpt import dist_checkpointing
from shardckpt.distributed import Comm
from shardckpt.engine import LoadOptions, OpenCheckpoint, load_checkpoint, read_checkpoint
from shardckpt.errors import StrategyMismatchError
from shardckpt.manifest import Manifest
from shardckpt.plugins import get_plugin_manager
from shardckpt.strategy import LoadContext
from shardckpt.validation import StrictHandling

if TYPE_CHECKING:
    import os
    from collections.abc import Callable

    from shardckpt.background import AsyncRequest
    from shardckpt.mapping import ShardedBase, ShardedStateDict, ShardedTensor, StateDict

    PathLike = str | os.PathLike[str]


class SavesByPath:
    """Lets a save strategy also be called as ``strategy.save(sharded_state_dict, checkpoint_dir)``."""

    def save(self, sharded_state_dict: Any, checkpoint_dir: Any, context: Any = None) -> None:
        """Collective: save a checkpoint to a path, replacing an existing one; with a context, write for the core.

        Args:
            sharded_state_dict: As for :func:`shardckpt.dist_checkpointing.save`; from the core, the shards.
            checkpoint_dir: The path; from the core, the common state.
            context: Given by the core alone.
        """
        if context is not None:
            super().save(sharded_state_dict, checkpoint_dir, context)  # type: ignore[misc]
        else:
            dist_checkpointing.save(sharded_state_dict, checkpoint_dir, self, overwrite=True)  # type: ignore[arg-type]

    def async_save(
        self, sharded_state_dict: ShardedStateDict, checkpoint_dir: PathLike, async_strategy: str = "mcore"
    ) -> AsyncRequest:
        """Collective: plan a save that replaces an existing checkpoint.

        Args:
            sharded_state_dict: As for :func:`shardckpt.dist_checkpointing.save`.
            checkpoint_dir: The path.
            async_strategy: Ignored.

        Returns:
            The request, for an AsyncCallsQueue.
        """
        request = dist_checkpointing.save(
            sharded_state_dict,
            checkpoint_dir,
            self,  # type: ignore[arg-type]
            async_sharded_save=True,
            async_strategy=async_strategy,
            overwrite=True,
        )
        return request  # type: ignore[return-value]


class LoadsByPath:
    """Lets a load strategy also be called with a path instead of the core's context."""

    def load(self, sharded_state_dict: Any, checkpoint_dir: Any) -> Any:
        """Collective: load the shards of a state dict, without the common state.

        Args:
            sharded_state_dict: As for :func:`shardckpt.dist_checkpointing.load`; from the core, the shards.
            checkpoint_dir: The path; from the core, its context.

        Returns:
            The state dict with tensors and objects for shards; to the core, the values of the shards.
        """
        if isinstance(checkpoint_dir, LoadContext):
            return super().load(sharded_state_dict, checkpoint_dir)  # type: ignore[misc]

        def read(checkpoint: OpenCheckpoint) -> Any:
            without_common = _WithoutCommon(checkpoint.strategy, checkpoint.context, checkpoint.operation)
            mode = StrictHandling.ASSUME_OK_UNEXPECTED
            return load_checkpoint(sharded_state_dict, without_common, validate=False, strict=mode)[0]

        return self._read(checkpoint_dir, Comm(), read)

    def load_common(self, checkpoint_dir: Any) -> Any:
        """Return the common state, which is not sharded. Needs no other rank."""
        if isinstance(checkpoint_dir, LoadContext):
            return super().load_common(checkpoint_dir)  # type: ignore[misc]
        return self._read(checkpoint_dir, Comm(alone=True), lambda checkpoint: checkpoint.common())

    def load_tensors_metadata(self, checkpoint_dir: PathLike) -> dict[str, ShardedTensor]:
        """Return stored tensors by key, without data: :func:`shardckpt.dist_checkpointing.load_tensors_metadata`."""
        return dist_checkpointing.load_tensors_metadata(checkpoint_dir, self)  # type: ignore[arg-type]

    def load_sharded_metadata(self, checkpoint_dir: PathLike) -> dict[str, ShardedBase]:
        """Return all stored shards, without data: :func:`shardckpt.dist_checkpointing.load_sharded_metadata`."""
        return dist_checkpointing.load_sharded_metadata(checkpoint_dir, self)  # type: ignore[arg-type]

    def remove_sharded_tensors(self, checkpoint_dir: PathLike, key_prefix: str) -> None:
        """Collective: see :func:`shardckpt.dist_checkpointing.remove_sharded_tensors`."""
        dist_checkpointing.remove_sharded_tensors(checkpoint_dir, key_prefix)

    def check_backend_compatibility(self: Any, loaded_backend: str) -> None:
        """Raise :class:`StrategyMismatchError` if this strategy does not read that backend."""
        self._check(Manifest(backend=loaded_backend, version=self.version))

    def check_version_compatibility(self: Any, loaded_version: int) -> None:
        """Raise :class:`StrategyMismatchError` if this strategy does not read that version of its backend."""
        self._check(Manifest(backend=self.backend, version=loaded_version))

    def _check(self: Any, manifest: Manifest) -> None:
        reason = self.cannot_load(manifest)
        if reason is not None:
            raise StrategyMismatchError(
                f"a {manifest.backend!r} checkpoint of version {manifest.version}: {type(self).__qualname__} {reason}"
            )

    def _read(self, checkpoint_dir: PathLike, comm: Comm, read: Callable[[OpenCheckpoint], Any]) -> Any:
        return read_checkpoint(checkpoint_dir, comm, get_plugin_manager(), LoadOptions(self), read)


class _WithoutCommon(OpenCheckpoint):
    """A checkpoint whose common state is not loaded."""

    def common(self) -> StateDict:
        """Return an empty dict."""
        return {}


__all__ = ["LoadsByPath", "SavesByPath"]

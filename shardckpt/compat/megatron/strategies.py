"""Megatron's strategy classes on top of ours: as bases, for ``isinstance``, and called with a state dict and a path."""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any

import shardckpt_torch_dist
from shardckpt import dist_checkpointing
from shardckpt.compat.megatron.base_classes import AsyncSaveShardedStrategy, LoadShardedStrategy
from shardckpt.compat.megatron.external_writers import make_request
from shardckpt.compat.megatron.path_adapter import PathLoader, PathSaver
from shardckpt.distributed.comm import Comm
from shardckpt.engine.loading import load_checkpoint
from shardckpt.engine.opening import LoadOptions, OpenCheckpoint, read_checkpoint
from shardckpt.errors import CheckpointingException, PluginError, StrategyMismatchError
from shardckpt.manifest.models import Manifest
from shardckpt.plugins.manager import get_plugin_manager
from shardckpt.storage.places import get_url
from shardckpt.strategy import LoadContext, LoadStrategy
from shardckpt.validation.keys import StrictHandling

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Sequence

    from torch.distributed.checkpoint.metadata import Metadata

    from shardckpt.background.request import AsyncRequest
    from shardckpt.mapping.base import ShardedBase, ShardedStateDict, StateDict
    from shardckpt.mapping.sharded_tensor import ShardedTensor

    PathLike = str | os.PathLike[str]


def _refuse_path_method(cls: type[Any], method: str, ours: str, base: str) -> None:
    """Raise if a subclass of a strategy of ours has a method of Megatron's kind, which the engine could not call."""
    written = vars(cls).get(method)
    if inspect.isfunction(written) and list(inspect.signature(written).parameters)[2:3] == ["checkpoint_dir"]:
        raise PluginError(
            f"{cls.__qualname__}.{method} takes a checkpoint_dir, and its base is a strategy of shardckpt: implement "
            f"{ours}, or derive the class from Megatron's {base} alone"
        )


class SavesByPath:
    """Lets a save strategy also be called as ``strategy.save(sharded_state_dict, checkpoint_dir)``."""

    #: Every strategy here handles objects too.
    can_handle_sharded_objects = True

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        ours = "save(shards, common, context) of shardckpt.SaveStrategy"
        _refuse_path_method(cls, "save", ours, "SaveShardedStrategy")
        _refuse_path_method(cls, "async_save", ours, "AsyncSaveShardedStrategy")

    # the core calls the method of the same name, so the arguments decide which of the two calls it is
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
            dist_checkpointing.save(sharded_state_dict, checkpoint_dir, self, overwrite=True)  # type: ignore[call-overload]

    def async_save(
        self: Any, sharded_state_dict: ShardedStateDict, checkpoint_dir: PathLike, async_strategy: str = "mcore"
    ) -> AsyncRequest | None:
        """Collective: plan a save that replaces an existing checkpoint.

        Args:
            sharded_state_dict: As for :func:`shardckpt.dist_checkpointing.save`.
            checkpoint_dir: The path.
            async_strategy: Ignored.

        Returns:
            The request, for an AsyncCallsQueue.
        """
        return dist_checkpointing.save(
            sharded_state_dict,
            checkpoint_dir,
            self,
            async_sharded_save=True,
            async_strategy=async_strategy,
            overwrite=True,
        )


class LoadsByPath:
    """Lets a load strategy also be called with a path instead of the core's context."""

    #: Every strategy here handles objects too.
    can_handle_sharded_objects = True
    #: The URL of the checkpoint that this instance has loaded last.
    _loaded: str | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        _refuse_path_method(cls, "load", "load(wanted, context) of shardckpt.LoadStrategy", "LoadShardedStrategy")

    def load(self, sharded_state_dict: Any, checkpoint_dir: Any, async_strategy: str | None = None) -> Any:  # noqa: ARG002
        """Collective: load the shards of a state dict, without the common state.

        Args:
            sharded_state_dict: As for :func:`shardckpt.dist_checkpointing.load`; from the core, the shards.
            checkpoint_dir: The path; from the core, its context.
            async_strategy: Ignored: one reader reads the checkpoints of any library.

        Returns:
            The state dict with tensors and objects for shards; to the core, the values of the shards.
        """
        if isinstance(checkpoint_dir, LoadContext):
            self._loaded = get_url(checkpoint_dir.reader.directory)
            return super().load(sharded_state_dict, checkpoint_dir)  # type: ignore[misc]

        def read(checkpoint: OpenCheckpoint) -> Any:
            # Megatron's callers load the common state by load_common, and merge the two themselves
            without_common = _WithoutCommon(checkpoint.strategy, checkpoint.context, checkpoint.operation)
            mode = StrictHandling.ASSUME_OK_UNEXPECTED
            return load_checkpoint(sharded_state_dict, without_common, validate=False, strict=mode)[0]

        return self._read(checkpoint_dir, Comm(), read)

    def load_common(self, checkpoint_dir: Any) -> Any:
        """Return the common state, a dict that is not sharded. Needs no other rank."""
        if isinstance(checkpoint_dir, LoadContext):
            return super().load_common(checkpoint_dir)  # type: ignore[misc]
        return self._read(checkpoint_dir, Comm(alone=True), OpenCheckpoint.common)

    def load_tensors_metadata(self: Any, checkpoint_dir: PathLike, metadata: Any = None) -> dict[str, ShardedTensor]:
        """Return stored tensors by key, without data: :func:`shardckpt.dist_checkpointing.load_tensors_metadata`.

        Args:
            checkpoint_dir: The path.
            metadata: DCP's ``Metadata`` of the checkpoint, whose keys alone are returned; by default all are.
        """
        stored = dist_checkpointing.load_tensors_metadata(checkpoint_dir, self)
        return stored if metadata is None else {k: v for k, v in stored.items() if k in metadata.state_dict_metadata}

    def load_sharded_metadata(self: Any, checkpoint_dir: PathLike) -> dict[str, ShardedBase]:
        """Return all stored shards, without data: :func:`shardckpt.dist_checkpointing.load_sharded_metadata`."""
        return dist_checkpointing.load_sharded_metadata(checkpoint_dir, self)

    def remove_sharded_tensors(self, checkpoint_dir: PathLike, key_prefix: str) -> None:
        """Collective: see :func:`shardckpt.dist_checkpointing.remove_sharded_tensors`."""
        dist_checkpointing.remove_sharded_tensors(checkpoint_dir, key_prefix)

    def check_backend_compatibility(self: Any, loaded_version: str) -> None:
        """Raise :class:`StrategyMismatchError` if this strategy does not read that backend.

        Args:
            loaded_version: The backend; the argument has Megatron's name.
        """
        self._check(Manifest(backend=loaded_version, version=self.version))

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


class TorchDistSaveShardedStrategy(
    SavesByPath, shardckpt_torch_dist.TorchDistSaveShardedStrategy, AsyncSaveShardedStrategy
):
    """Takes the arguments of :class:`shardckpt_torch_dist.TorchDistSaveShardedStrategy`, and ``cpu_shm_mode=False``.

    Attributes:
        cached_global_metadata: Megatron's trainer sets it to the load strategy's. It changes nothing: every save
            compares its plan with the last one.
        use_cached_ckpt_structure: Megatron's trainer sets it. It changes nothing either.
    """

    caches_plan = True
    cached_global_metadata: Metadata | None = None
    use_cached_ckpt_structure = False

    def __init__(self, *args: Any, cpu_shm_mode: bool = False, **kwargs: Any) -> None:
        if cpu_shm_mode:
            raise CheckpointingException(
                "cpu_shm_mode=True: leave it out; AsyncCallsQueue(persistent=True) stages in shared memory"
            )
        super().__init__(*args, **kwargs)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "_get_save_and_finalize_callbacks" in vars(cls):
            raise PluginError(
                f"{cls.__qualname__}._get_save_and_finalize_callbacks would never be called by a save: add functions "
                "to the request that dist_checkpointing.save(..., async_sharded_save=True) returns, by add_finalize_fn"
            )

    def _get_save_and_finalize_callbacks(self, writer: Any, save_state_dict_ret: Sequence[Any]) -> AsyncRequest:
        """Return the request for the plan of another library's writer: :func:`make_request`."""
        return make_request(writer, save_state_dict_ret)


class TorchDistLoadShardedStrategy(LoadsByPath, shardckpt_torch_dist.TorchDistLoadShardedStrategy, LoadShardedStrategy):
    """Takes Megatron's arguments and ignores them, and ``planner=`` of the class that it extends.

    Every load reads the metadata once, and never from a cache; quantized tensors are filled one by one, and no second
    copy of the model is made.
    """

    def __init__(
        self,
        cache_metadata: bool = False,  # noqa: ARG002
        checkpoint_name: str | None = None,  # noqa: ARG002
        *,
        stream_ckpt_dequant: bool = False,  # noqa: ARG002
        planner: Any = None,
    ) -> None:
        super().__init__(planner=planner)

    @property
    def cached_global_metadata(self) -> Metadata | None:
        """DCP's metadata of the checkpoint that this instance loaded last, read when it is asked for; None before."""
        if self._loaded is None:
            return None
        reader = shardckpt_torch_dist.CheckpointStorageReader(self._loaded)
        metadata = reader.read_metadata()
        reader.reset()  # closes the files
        return metadata


#: Megatron's classes, by the classes of ours that they extend.
_MEGATRONS: dict[type[Any], type[Any]] = {
    shardckpt_torch_dist.TorchDistSaveShardedStrategy: TorchDistSaveShardedStrategy,
    shardckpt_torch_dist.TorchDistLoadShardedStrategy: TorchDistLoadShardedStrategy,
}


def callable_with_path(strategy: Any) -> Any:
    """Make a save or load strategy callable with a path.

    Returns the strategy itself if it can be called so. If it adapts one of Megatron's kind, that one. Else a copy that
    can, of Megatron's class of the same name if there is one.
    """
    if isinstance(strategy, PathLoader | PathSaver):
        return strategy.strategy
    if isinstance(strategy, LoadsByPath | SavesByPath | LoadShardedStrategy):
        return strategy
    kind: Any = type(strategy)
    mixin = LoadsByPath if isinstance(strategy, LoadStrategy) else SavesByPath
    by_path: Any = _MEGATRONS.get(kind) or _derive(kind, mixin)
    # without __init__: its arguments are not known here, and it may have effects that must not happen twice
    copied = object.__new__(by_path)
    vars(copied).update(vars(strategy))
    return copied


@functools.cache  # plans are cached by the class
def _derive(kind: Any, mixin: Any) -> type[Any]:
    """Return a subclass of the same name with the mixin; it caches plans if the class itself says so."""
    own = {name: vars(kind)[name] for name in ("__module__", "caches_plan") if name in vars(kind)}
    return type(kind.__name__, (mixin, kind), own)

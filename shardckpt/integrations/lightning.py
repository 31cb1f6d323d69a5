"""Lightning: a Trainer that saves and loads by shardckpt: ``Trainer(plugins=[ShardedCheckpointIO()])``."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

try:
    from lightning.fabric.plugins import CheckpointIO
except ModuleNotFoundError:  # pytorch-lightning has the same under another name
    from lightning_fabric.plugins import CheckpointIO  # type: ignore[assignment]

from shardckpt.commit.removal import clear_tombstones_of, remove_checkpoint
from shardckpt.distributed.comm import Comm
from shardckpt.engine.loading import load_checkpoint
from shardckpt.engine.locations import expand_home, locate
from shardckpt.engine.opening import LoadOptions, open_checkpoint
from shardckpt.engine.saving import SaveOptions, save_checkpoint
from shardckpt.errors import CheckpointingException, parse_globals
from shardckpt.manager.plain_state import describe_form, describe_tensors, merge_tensors, request_tensors
from shardckpt.plugins.manager import get_plugin_manager
from shardckpt.state_dict import dict_list_map_outplace
from shardckpt.storage.directory import retry_if_replaced
from shardckpt.validation.keys import StrictHandling

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Iterator

    from shardckpt.engine.opening import OpenCheckpoint
    from shardckpt.mapping.base import ShardedStateDict, StateDict

    PathLike = str | os.PathLike[str]

#: The prefix of the tensors' keys, the key of all other values, and in ``content_metadata`` a Trainer's mark.
_NAME = "lightning"


class ShardedCheckpointIO(CheckpointIO):
    """Saves a Trainer's checkpoints as directories in a registered format; a crash leaves no incomplete checkpoint.

    Lightning calls it where rank 0 has the full state: on one device, and with DDP. Rank 0 alone saves, and every rank
    loads by itself: no method is collective. Lightning's FSDP and model-parallel strategies do not call a CheckpointIO:
    use a :class:`shardckpt.manager.CheckpointManager` there. ``load_from_checkpoint`` of modules does not call it
    either: pass ``module.load_state_dict`` the ``state_dict`` in the result of :meth:`load_checkpoint`.

    Args:
        strategy: Backend, ``"backend@version"`` or (backend, version); by default the registry's default.
        allow_globals: Classes in hyperparameters and callbacks' states that may be loaded, in addition to the plain
            ones; as for :func:`shardckpt.dist_checkpointing.save` and ``load``.
    """

    def __init__(self, strategy: str | tuple[str, int] | None = None, *, allow_globals: Iterable[Any] = ()) -> None:
        self._strategy = strategy
        self._allow_globals = parse_globals(allow_globals)
        for name in ("lightning.fabric.plugins", "lightning_fabric.plugins"):
            # a Trainer takes only instances of its own package's CheckpointIO, and both packages may be installed
            if name in sys.modules:
                sys.modules[name].CheckpointIO.register(type(self))

    def save_checkpoint(self, checkpoint: dict[str, Any], path: PathLike, storage_options: Any = None) -> None:
        """Save on this rank alone. A checkpoint at the path is replaced in one step; at a URL, that is an error.

        Args:
            checkpoint: Nested dicts and lists.
            path: A directory, or a URL.
            storage_options: None: options of a store are configured in its plugin.

        Raises:
            CheckpointingException: the save failed; a checkpoint at the path is unchanged.
        """
        if storage_options is not None:
            raise CheckpointingException(
                f"{path}: storage_options={storage_options!r} is not supported: configure a store in the plugin that "
                "serves its URLs (for fsspec, in its configuration files)"
            )
        state = {
            "form": describe_form(_NAME, checkpoint, "unchecked"),
            "tensors": describe_tensors(_NAME, checkpoint, "unchecked"),
        }
        plugins = get_plugin_manager()
        # content_metadata marks the checkpoint as a Trainer's: remove_checkpoint deletes no other
        options = SaveOptions(overwrite=True, content_metadata={_NAME: {}}, allow_globals=self._allow_globals)
        save_checkpoint(state, locate(path, plugins), self._strategy, Comm(alone=True), plugins, options)

    def load_checkpoint(
        self,
        path: PathLike,
        map_location: str | torch.device | None = None,
        weights_only: bool | None = None,  # noqa: ARG002 - see below
    ) -> dict[str, Any]:
        """Load a checkpoint on this rank alone.

        Args:
            path: The directory or URL.
            map_location: The device of its tensors; by default the CPU.
            weights_only: Accepted, without effect: only plain classes and ``allow_globals`` are ever loaded.

        Returns:
            The nested dicts and lists that were saved.

        Raises:
            CannotLoadError: there is no complete checkpoint.
            CheckpointingException: it is damaged, or was not saved by a Trainer.
        """
        try:
            device = None if map_location is None else torch.device(map_location)
        except (RuntimeError, TypeError) as exc:
            text = f"{path}: map_location={map_location!r} is not supported: pass one device"
            raise CheckpointingException(text) from exc
        checkpoint = retry_if_replaced(lambda: self._read(path), path)
        return checkpoint if device is None else _move(checkpoint, device)

    def _read(self, path: PathLike) -> dict[str, Any]:
        with _open(path, LoadOptions(allow_globals=self._allow_globals)) as stored:
            # the values that are no tensors first: they say which tensors there are
            form = _load({"form": describe_form(_NAME, None, "unchecked")}, stored)["form"]
            loaded = _load({"tensors": request_tensors(_NAME, form, None, set())}, stored)
        checkpoint: dict[str, Any] = merge_tensors(form, loaded.get("tensors", {}))
        return checkpoint

    def remove_checkpoint(self, path: PathLike) -> None:
        """Remove a Trainer's checkpoint in one step, then its files; of a symbolic link, only the link.

        Raises:
            CheckpointingException: it is not a Trainer's checkpoint; it is left as it is.
        """
        if (link := Path(expand_home(path))).is_symlink():
            link.unlink()
            return
        with _open(path, LoadOptions()):
            pass  # only to check that it is a Trainer's checkpoint
        directory = locate(path, get_plugin_manager())
        remove_checkpoint(directory)
        clear_tombstones_of(directory)

    def teardown(self) -> None:
        """Do nothing: no file stays open."""


@contextmanager
def _open(path: PathLike, options: LoadOptions) -> Iterator[OpenCheckpoint]:
    """Open a checkpoint; raise if no ShardedCheckpointIO has saved it."""
    plugins = get_plugin_manager()
    with open_checkpoint(locate(path, plugins), Comm(alone=True), plugins, options) as stored:
        record = stored.context.reader.manifest.record
        if record is None or _NAME not in (record.content_metadata or {}):
            raise CheckpointingException(
                f"{path} is a checkpoint, but not one that a ShardedCheckpointIO has saved: "
                "shardckpt.dist_checkpointing.load reads it, and it can be deleted by hand"
            )
        yield stored


def _move(state: Any, device: torch.device) -> Any:
    """Return nested dicts, lists and tuples with their tensors on the device."""

    def move_leaf(leaf: Any) -> Any:
        if type(leaf) is tuple or hasattr(leaf, "_make"):
            moved = [_move(each, device) for each in leaf]
            return leaf._make(moved) if hasattr(leaf, "_make") else tuple(moved)
        return leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf

    return dict_list_map_outplace(move_leaf, state)


def _load(wanted: ShardedStateDict, stored: OpenCheckpoint) -> StateDict:
    loaded, _ = load_checkpoint(wanted, stored, validate=True, strict=StrictHandling.RAISE_UNEXPECTED)
    return loaded


__all__ = ["ShardedCheckpointIO"]

"""Loads a checkpoint into the states of a training."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from shardckpt.distributed import Comm
from shardckpt.engine import LoadOptions, load_checkpoint, open_checkpoint
from shardckpt.errors import (
    CannotLoadError,
    CheckpointingException,
    DtypeMismatchError,
    KeyMismatchError,
    ShapeMismatchError,
)
from shardckpt.manager.rng import RNG
from shardckpt.manager.states import MODEL, Ranks
from shardckpt.manager.steps import CONTENT_KEY
from shardckpt.plugins import get_plugin_manager
from shardckpt.state_dict import nested_values
from shardckpt.storage import retry_if_replaced
from shardckpt.validation import StrictHandling

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence
    from pathlib import Path

    from torch.distributed import ProcessGroup

    from shardckpt.engine import OpenCheckpoint
    from shardckpt.manager.states import TrainingStates
    from shardckpt.mapping import ShardedStateDict, StateDict


class Fetched(NamedTuple):
    """A checkpoint that was read but not restored: the arguments of :meth:`TrainingStates.restore`."""

    names: list[str]
    objects: StateDict
    tensors: StateDict
    ranks: Ranks


class StepReader:
    """Loads checkpoints into the states of a training.

    Args:
        states: The states of the training.
        process_group: The ranks.
        allow_globals: As for :func:`shardckpt.dist_checkpointing.load`.
        excluded: Names of states that are not loaded.
    """

    def __init__(
        self,
        states: TrainingStates,
        process_group: ProcessGroup | None,
        allow_globals: Iterable[Any],
        excluded: Collection[str],
    ) -> None:
        self._states = states
        self._group = process_group
        self._options = LoadOptions(allow_globals=tuple(allow_globals))
        self._excluded = frozenset(excluded)

    def read(self, path: Path, *, model_only: bool = False) -> None:
        """Collective: load all states that are not excluded.

        Args:
            path: The checkpoint.
            model_only: Whether to load the model alone; that is always so for a seed checkpoint, of step 0.

        Raises:
            CorruptCheckpointError: the checkpoint is damaged; some tensors may contain what was read.
            CheckpointingException: any other failure; the same on every rank.
        """
        try:
            fetched = self.fetch(path, model_only=model_only)
        except (DtypeMismatchError, KeyMismatchError, ShapeMismatchError) as exc:
            raise type(exc)(
                f"{path} does not fit the states: {exc}\nBuild the states as they were when it was saved, or put "
                "those that need not be loaded into exclude_from_loading"
            ) from exc
        with Comm(self._group).collective_phase("restoring the states"):
            self._states.restore(*fetched)

    def fetch(self, path: Path, *, model_only: bool = False) -> Fetched:
        """Collective: read what :meth:`read` restores, but do not restore it.

        Tensors are read into the memory of the live ones where they fit: these are changed already.

        Returns:
            The arguments of :meth:`TrainingStates.restore`.
        """
        comm = Comm(self._group)
        return retry_if_replaced(lambda: self._fetch(path, comm, model_only=model_only), path)

    def _fetch(self, path: Path, comm: Comm, *, model_only: bool) -> Fetched:
        with open_checkpoint(path, comm, get_plugin_manager(), self._options) as checkpoint:
            record = checkpoint.context.reader.manifest.record
            content = (record.content_metadata or {}) if record is not None else {}
            ranks = Ranks.of(comm, None if record is None else record.world_size)
            # Two loads: the objects say which tensors a plain state had. Only then is each tensor requested.
            with comm.local_phase("choosing states"):
                names = self._choose_names(path, content.get(CONTENT_KEY) or {}, model_only)
                requested = self._states.request_objects(names, ranks)
            objects = _load(requested, checkpoint, validate=False)
            with comm.local_phase("describing the states"):
                requested = self._states.request_tensors(names, objects)
            tensors = _load(requested, checkpoint, validate=True)
        return Fetched(names, objects, tensors, ranks)

    def _choose_names(self, path: Path, content: dict[str, Any], model_only: bool) -> list[str]:
        """Choose the states to load from a checkpoint, by the ``content`` that the manager stored in it."""
        requested = [name for name in self._states.names if name not in self._excluded]
        if model_only or (content.get("model_only") and not content.get("step")):
            self._check_model(path)
            return [MODEL]
        if content.get("model_only"):
            self._refuse_more(path, requested)
        stored = content.get("states")
        if stored is None:  # not saved by a CheckpointManager: the keys are checked when they are loaded
            return requested
        missing = [name for name in requested if name not in stored and name != RNG]
        if missing:
            raise CheckpointingException(
                f"{path} has no state {', '.join(map(repr, missing))}; it has {', '.join(map(repr, stored))}. Put new "
                "states into exclude_from_loading: the training then starts with them as they are"
            )
        return [name for name in requested if name in stored]

    def _check_model(self, path: Path) -> None:
        """Raise if no state is the model: nothing would be loaded, and the training would start from scratch."""
        if MODEL not in self._states.names:
            raise CheckpointingException(
                f"{path}: only the model is to be loaded, and no state is named {MODEL!r} (there are "
                f"{', '.join(map(repr, self._states.names))}): give the model as {MODEL!r}, or set "
                "initial_load_model_only=False"
            )

    @staticmethod
    def _refuse_more(path: Path, requested: Sequence[str]) -> None:
        """Raise if more than the model is requested from a checkpoint that has only the model."""
        if set(requested) - {MODEL, RNG}:
            raise CannotLoadError(
                f"{path} has the model alone (last_save_model_only): the training that saved it was over. To start a "
                "training from its weights, give it as initial_load_path with another folder; to continue that "
                "training, give load_step=<an earlier step>"
            )


def _load(requested: ShardedStateDict, checkpoint: OpenCheckpoint, *, validate: bool) -> StateDict:
    """Collective: load what is requested; on a rank that requests nothing, take part in the load of the others."""
    comm = checkpoint.context.comm
    if not comm.largest(any(True for _ in nested_values(requested)))[0]:
        return {}
    loaded, _ = load_checkpoint(requested, checkpoint, validate=validate, strict=StrictHandling.RAISE_UNEXPECTED)
    return loaded


__all__ = ["Fetched", "StepReader"]

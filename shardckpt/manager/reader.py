"""Reads a checkpoint into the training's states."""

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
from shardckpt.manager.states import MODEL, Ranks
from shardckpt.manager.steps import CONTENT_KEY
from shardckpt.plugins import host
from shardckpt.state_dict import nested_values
from shardckpt.storage import retry_if_replaced
from shardckpt.validation import StrictHandling

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from torch.distributed import ProcessGroup

    from shardckpt.engine import OpenCheckpoint
    from shardckpt.manager.states import TrainingStates
    from shardckpt.mapping import ShardedStateDict, StateDict

#: Added by the manager itself: a checkpoint without it is no reason for an error.
RNG = "rng"


class Fetched(NamedTuple):
    """What :meth:`TrainingStates.restore` takes."""

    names: list[str]
    objects: StateDict
    tensors: StateDict
    ranks: Ranks


class StepReader:
    """Loads checkpoints.

    Args:
        states: The training's.
        process_group: The ranks.
        allow_globals: As for :func:`shardckpt.dist_checkpointing.load`.
        excluded: Names of states that stay as they are.
    """

    def __init__(
        self,
        states: TrainingStates,
        process_group: ProcessGroup | None,
        allow_globals: Iterable[Any],
        excluded: Sequence[str],
    ) -> None:
        self._states = states
        self._group = process_group
        self._options = LoadOptions(allow_globals=tuple(allow_globals))
        self._excluded = frozenset(excluded)

    def read(self, path: Path, *, model_only: bool = False) -> None:
        """Load a checkpoint; all states that it is asked for, or an error.

        Args:
            path: The checkpoint.
            model_only: Whether to load the model alone, whatever there is; by default only if it is a seed, of step 0.

        Raises:
            CorruptCheckpointError: it is damaged; tensors may have been filled in part.
            CheckpointingException: any other failure; the same on every rank.
        """
        try:
            fetched = self.fetch(path, model_only=model_only)
        except (DtypeMismatchError, KeyMismatchError, ShapeMismatchError) as exc:
            raise type(exc)(
                f"{path} does not fit the states: {exc}\nBuild the states as they were when it was saved, or name "
                "those that are to stay as they are in exclude_from_loading"
            ) from exc
        with Comm(self._group).collective_phase("handing back the states"):
            self._states.restore(*fetched)

    def fetch(self, path: Path, *, model_only: bool = False) -> Fetched:
        """What :meth:`read` hands back: read, tensors into the live ones, and not handed back yet."""
        comm = Comm(self._group)
        return retry_if_replaced(lambda: self._fetched(path, comm, model_only=model_only), path)

    def _fetched(self, path: Path, comm: Comm, *, model_only: bool) -> Fetched:
        with open_checkpoint(path, comm, host(), self._options) as checkpoint:
            record = checkpoint.context.reader.manifest.record
            content = (record.content_metadata or {}) if record is not None else {}
            ranks = Ranks.of(comm, None if record is None else record.world_size)
            with comm.local_phase("choosing states"):
                names = self._names(path, content.get(CONTENT_KEY) or {}, model_only)
                wanted = self._states.wanted_objects(names, ranks)
            objects = _load(wanted, checkpoint, validate=False)
            with comm.local_phase("describing the states"):
                wanted = self._states.wanted_tensors(names, objects)
            tensors = _load(wanted, checkpoint, validate=True)
        return Fetched(names, objects, tensors, ranks)

    def _names(self, path: Path, content: dict[str, Any], model_only: bool) -> list[str]:
        """The names of the states that are loaded from a checkpoint of which the manager has said ``content``."""
        wanted = [name for name in self._states.names if name not in self._excluded]
        if model_only or (content.get("model_only") and not content.get("step")):
            self._check_model(path)
            return [MODEL]
        if content.get("model_only"):
            self._refuse_more(path, wanted)
        stored = content.get("states")
        if stored is None:  # saved by another's hand
            return wanted
        missing = [name for name in wanted if name not in stored and name != RNG]
        if missing:
            raise CheckpointingException(
                f"{path} has no state {', '.join(map(repr, missing))}; it has {', '.join(map(repr, stored))}. Put the "
                "new ones into exclude_from_loading to begin with them as they are"
            )
        return [name for name in wanted if name in stored]

    def _check_model(self, path: Path) -> None:
        """Raise if no state is the model: nothing would be loaded, and the training begin from scratch."""
        if MODEL not in self._states.names:
            raise CheckpointingException(
                f"{path}: only the model is to be loaded, and no state is named {MODEL!r} (there are "
                f"{', '.join(map(repr, self._states.names))}): give the model as {MODEL!r}, or set "
                "initial_load_model_only=False"
            )

    @staticmethod
    def _refuse_more(path: Path, wanted: Sequence[str]) -> None:
        """Raise if more is wanted of a checkpoint than the model, which is all that it has."""
        if set(wanted) - {MODEL, RNG}:
            raise CannotLoadError(
                f"{path} has the model alone (last_save_model_only): the training that saved it was over. To go on "
                "from its weights, give it as initial_load_path with another folder; to go on from a whole state, give "
                "load_step=<an earlier step>"
            )


def _load(wanted: ShardedStateDict, checkpoint: OpenCheckpoint, *, validate: bool) -> StateDict:
    comm = checkpoint.context.comm
    if not comm.largest(any(True for _ in nested_values(wanted)))[0]:
        return {}
    found, _ = load_checkpoint(wanted, checkpoint, validate=validate, strict=StrictHandling.RAISE_UNEXPECTED)
    return found


__all__ = ["RNG", "Fetched", "StepReader"]

"""Loads a checkpoint into the states of a training."""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from shardckpt.adapters.modules import get_model_tensors
from shardckpt.distributed.comm import Comm
from shardckpt.distributed.error_report import replace_text
from shardckpt.engine.loading import load_checkpoint
from shardckpt.engine.opening import LoadOptions, open_checkpoint
from shardckpt.engine.renaming import list_names, list_top_names, rename_key, rename_stored
from shardckpt.errors import (
    CheckpointingException,
    DtypeMismatchError,
    KeyMismatchError,
    ShapeMismatchError,
    ask_nearest,
    listed,
)
from shardckpt.manager.exclusion import leave_out
from shardckpt.manager.numbered_optimizers import name_numbers
from shardckpt.manager.rng import RNG
from shardckpt.manager.states import LR_SCHEDULER, MODEL, OPTIMIZER, Ranks, name_state
from shardckpt.manager.steps import MODEL_PREFIX, PER_RANK_KEY, PREFIX_KEY, MissingStatesError
from shardckpt.manifest.names import CONTENT_KEY
from shardckpt.mapping.base import ShardedBase
from shardckpt.mapping.sharded_object import PlainObject, ShardedObject
from shardckpt.parallel.load import share_reading, split_budget
from shardckpt.plugins.manager import get_plugin_manager
from shardckpt.state_dict import nested_values
from shardckpt.storage.directory import retry_if_replaced
from shardckpt.validation.keys import UNUSED_KEYS, StrictHandling, find_usual_names, stored_key, use_bare_keys

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
    from pathlib import Path

    from torch.distributed import ProcessGroup

    from shardckpt.engine.opening import OpenCheckpoint
    from shardckpt.manager.config import CheckpointConfig
    from shardckpt.manager.states import TrainingStates
    from shardckpt.mapping.base import ShardedStateDict, StateDict
    from shardckpt.validation.keys import OnUnused

logger = logging.getLogger(__name__)

#: The setting that accepts formats, for errors.
ACCEPT_OF = "CheckpointConfig.accept"


class Fetched(NamedTuple):
    """A checkpoint that was read but not restored: the argument of :meth:`TrainingStates.restore`."""

    names: list[str]
    objects: StateDict
    tensors: StateDict
    ranks: Ranks
    #: Whether tensors of the model were left out of the checkpoint (``exclude_from_last_save``), and keep their values.
    is_partial: bool = False
    #: The id of the save; None if another library saved it.
    save_id: str | None = None

    def restore(self, states: TrainingStates) -> None:
        """Set the states to the read values."""
        states.restore(self.names, self.objects, self.tensors, self.ranks, strict=not self.is_partial)


class StepReader:
    """Reads checkpoints, as a configuration says, into states that are not ``excluded``."""

    def __init__(
        self,
        config: CheckpointConfig,
        states: TrainingStates,
        process_group: ProcessGroup | None,
        allow_globals: Iterable[Any],
        excluded: Collection[str],
    ) -> None:
        self._renames = config.rename
        self._resize = tuple(config.resize)
        self._states = states
        if strangers := {new for new in self._renames.values() if new.partition(".")[0] not in states.names}:
            near = ask_nearest(min(strangers), states.names)
            raise CheckpointingException(
                f"rename: no state is named {listed(sorted(strangers))}; {near}there are {listed(states.names)}"
            )
        self._on_unused: OnUnused = config.on_unused
        self._allow_cast = config.allow_dtype_cast
        self._group = process_group
        self._fully_parallel = config.fully_parallel_load
        self._budget, reading = split_budget(config.memory_budget, fully_parallel=self._fully_parallel)
        self._options = LoadOptions(None, config.accept, tuple(allow_globals), reading, accept_of=ACCEPT_OF)
        self._excluded = frozenset(excluded)
        #: Names of tensors of the model that a checkpoint may lack.
        self._left_out = frozenset(config.exclude_from_last_save)
        #: The id of the checkpoint to which the states were set last; None before that, or if it has none.
        self.restored_id: str | None = None

    def read(self, path: Path, *, model_only: bool = False) -> None:
        """Collective: load all states that are not excluded.

        With ``model_only``, and from a seed checkpoint (step 0), only the model is read. After a CorruptCheckpointError
        some tensors may contain values of the checkpoint.
        """
        try:
            fetched = self.fetch(path, model_only=model_only)
        except (DtypeMismatchError, KeyMismatchError, ShapeMismatchError) as exc:
            if UNUSED_KEYS in str(exc):  # the advice below refuses their names: they are of no state of this manager
                raise replace_text(exc, f"{path} does not fit the states: {exc}") from exc.__cause__
            cast = ", or cast them as torch does: CheckpointConfig(allow_dtype_cast=True)"
            raise replace_text(
                exc,
                f"{path} does not fit the states: {exc}\nBuild the states as they were when it was saved, or put "
                "those that need not be loaded into exclude_from_loading" + cast * isinstance(exc, DtypeMismatchError),
            ) from exc.__cause__
        comm = Comm(self._group)
        comm.describe_origin = name_state
        with comm.collective_phase("restoring the states"):
            fetched.restore(self._states)
        self.restored_id = fetched.save_id

    def fetch(self, path: Path, *, model_only: bool = False) -> Fetched:
        """Collective: read a checkpoint as :meth:`read` does, and restore nothing.

        Tensors are read into the memory of the live ones where they fit: these are changed already.
        """
        comm = Comm(self._group)
        comm.describe_origin = name_state
        return retry_if_replaced(lambda: self._fetch(path, comm, model_only=model_only), path)

    def _fetch(self, path: Path, comm: Comm, *, model_only: bool) -> Fetched:
        with open_checkpoint(path, comm, get_plugin_manager(), self._options) as opened:
            record = opened.context.reader.manifest.record
            content = (record.content_metadata or {}) if record is not None else {}
            is_foreign, saved = CONTENT_KEY not in content, content.get(CONTENT_KEY) or {}
            keys = list_names(opened) if is_foreign else []
            renamed = self._rename(opened, keys, model_only=model_only) if is_foreign else opened
            checkpoint = share_reading(renamed, self._budget) if self._fully_parallel else renamed
            stored = frozenset(map(stored_key, checkpoint.index()))
            common = checkpoint.common() if is_foreign else {}
            # Two loads: the objects say which tensors a plain state had. Only then is each tensor requested.
            with comm.local_phase("choosing states"):
                names = self._choose_names(path, saved, model_only)
                if is_foreign:
                    names = self._choose_foreign_names(path, names, checkpoint, stored, common, keys)
                    if comm.is_main and not model_only:
                        self._report_values(path, common)
                saved_by = self._count_saved_ranks(names, stored)
                if saved_by is None:
                    saved_by = comm.world_size if record is None else record.world_size
                ranks = Ranks(comm.rank, comm.world_size, saved_by)
                requested = self._states.request_objects(names, ranks)
            objects = _load(requested, checkpoint, validate=False)
            is_bare = False
            with comm.local_phase("describing the states"):
                if is_foreign:
                    self._states.restore_keys(objects)
                prefix = saved.get(PREFIX_KEY, MODEL_PREFIX)
                requested = self._states.request_tensors(names, objects, model_prefix=prefix)
                if is_foreign:
                    model = [leaf for leaf in nested_values(requested.get(MODEL, {})) if isinstance(leaf, ShardedBase)]
                    is_bare = use_bare_keys(model, stored, MODEL_PREFIX)
                left_out = {*self._left_out, *(saved.get("config") or {}).get("exclude_from_last_save", ())}
                is_partial = False
                if MODEL in requested:
                    requested[MODEL], is_partial = leave_out(requested[MODEL], left_out, stored)
            if is_foreign and model_only:
                is_bare = any(comm.largest(is_bare))  # a stage without a model has none
            tensors = _load(
                requested,
                checkpoint,
                validate=True,
                on_unused=self._on_unused,
                allow_dtype_cast=self._allow_cast,
                resize=self._resize,
                counts_unused=partial(
                    self._counts,
                    frozenset(names),
                    # bare keys of a model have no first part that says so
                    of_others=not model_only or is_bare or not any(key.startswith(MODEL_PREFIX) for key in stored),
                ),
            )
        return Fetched(names, objects, tensors, ranks, is_partial, None if record is None else record.save_id)

    def _count_saved_ranks(self, names: Sequence[str], stored: Iterable[str]) -> int | None:
        """Return how many ranks saved the chosen states of each rank; None if there are none.

        A record does not have it if one process has converted or merged the checkpoint.
        """
        grids = _find_grids([name for name in names if name in self._states.per_rank], stored)
        return next((grid[0] for _, grid in sorted(grids.items()) if len(grid) == 1), None)

    def _rename(self, checkpoint: OpenCheckpoint, keys: list[str], *, model_only: bool) -> OpenCheckpoint:
        """Collective: return another library's checkpoint under the names of the states."""
        given = self._renames
        usual = {
            old: new
            for old, new in find_usual_names(keys).items()
            if new in self._states.names and old not in self._states.names and new not in given.values()
        }
        if usual and MODEL in self._states.modules:
            # a model that is stored by its own names may have children of these: `net.model`, `cell.state`
            comm = checkpoint.context.comm
            with comm.local_phase("comparing the names of the model"):
                own = get_model_tensors(self._states.modules[MODEL]).keys() & set(keys)
                are_own = [any(key.startswith(f"{old}.") for key in own) for old in usual]
            usual = {old: usual[old] for old, is_own in zip(usual, comm.largest(*are_own), strict=True) if not is_own}
        names = {**usual, **given}
        if names and checkpoint.context.comm.is_main:
            logger.info("read by other names: %s", listed([f"{old} as {new}" for old, new in sorted(names.items())]))
        if not model_only and OPTIMIZER not in self._excluded:
            numbered = self._name_numbers(checkpoint, names, keys)
            names, keys = {**names, **numbered}, [*keys, *numbered]
        return rename_stored(checkpoint, names, keys)

    def _name_numbers(self, checkpoint: OpenCheckpoint, names: Mapping[str, str], keys: list[str]) -> dict[str, str]:
        """Collective: return the stored names of an optimizer's state and options, and ours, if it has numbers."""
        comm, common, columns = checkpoint.context.comm, checkpoint.common(), checkpoint.columns()
        where = next((old for old, new in names.items() if new == OPTIMIZER), OPTIMIZER)
        shapes: dict[str, tuple[int, ...] | None] = dict.fromkeys(keys)
        shapes.update(() if self._resize else zip(columns.keys, columns.shapes, strict=True))
        optimizers, found = self._states.optimizers, dict[str, str]()
        with comm.local_phase("comparing the parameters of the optimizer"):
            if len(optimizers) == 1:
                found = name_numbers(common, where, shapes, self._states.modules[MODEL], optimizers[0])
        if found and comm.is_main:
            logger.info("%s of the checkpoint numbers its parameters: taken in the order of the optimizer's", where)
        return found

    def _counts(self, chosen: frozenset[str], key: str, *, of_others: bool) -> bool:
        """Return whether the states should have asked for a stored key: it is theirs, or no state's."""
        name = key.partition(".")[0]
        if name in self._states.names:
            # a plain state is loaded whole
            is_whole = name in self._states.plain or name in self._states.per_rank
            return name in chosen and (name in self._states.modules or (name == OPTIMIZER and not is_whole))
        return of_others

    def _report_values(self, path: Path, common: StateDict) -> None:
        """Warn of values in another library's common state that belong to no state here."""
        unused = sorted({*map(str, common)} - {*self._states.names, "content_metadata"})
        if unused and self._on_unused != "ignore":
            logger.warning(
                "%s has values of no state of this manager: %s. To load those of an object with state_dict(), give it "
                "to the manager by that name; read others with dist_checkpointing.load_common_state_dict "
                "(on_unused='ignore' is silent)",
                path,
                listed(unused, limit=5),
            )

    def _choose_names(self, path: Path, content: dict[str, Any], model_only: bool) -> list[str]:
        """Choose the states to load from a checkpoint, by the ``content`` that the manager stored in it."""
        requested = [name for name in self._states.names if name not in self._excluded]
        if model_only or (content.get("model_only") and not content.get("step")):
            if MODEL not in self._states.names:  # nothing would be loaded, and the training would start from scratch
                raise CheckpointingException(
                    f"{path}: only the model is to be loaded, and no state is named {MODEL!r} (there are "
                    f"{', '.join(map(repr, self._states.names))}): give the model as {MODEL!r}, or set "
                    "initial_load_model_only=False"
                )
            return [MODEL]
        if content.get("model_only") and set(requested) - {MODEL, RNG}:
            raise MissingStatesError(
                f"{path} has the model alone (last_save_model_only): the training that saved it was over. To start a "
                "training from its weights, give it as initial_load_path with another folder; to continue that "
                "training, give load_step=<an earlier step>"
            )
        stored = content.get("states")
        if stored is None:  # not saved by a CheckpointManager
            return requested
        missing = self.list_missing(stored)
        if missing:
            raise MissingStatesError(
                f"{path} has no state {', '.join(map(repr, missing))}; it has {', '.join(map(repr, stored))}. Put new "
                "states into exclude_from_loading: the training then starts with them as they are"
                + "; rename= is for checkpoints that no manager has saved"
                * bool(self._renames)
            )
        chosen = [name for name in requested if name in stored]
        if (per_rank := content.get(PER_RANK_KEY)) is not None:  # a checkpoint of before does not say
            self._refuse_other_kinds(path, chosen, per_rank)
        return chosen

    def _refuse_other_kinds(self, path: Path, chosen: Sequence[str], per_rank: Collection[str]) -> None:
        """Raise an error if a state was saved as PerRank and is asked for without it, or the other way."""
        for name in chosen:
            if name in per_rank and name not in self._states.per_rank:
                raise CheckpointingException(
                    f"{path} has a state {name!r} of each rank: it was saved as PerRank, and is asked for as one state "
                    f"for all. Give it as PerRank(...), or put {name!r} into exclude_from_loading"
                )
            if name in self._states.per_rank and name not in per_rank:
                raise CheckpointingException(
                    f"{path} has one state {name!r} for all ranks, and it is asked for as PerRank: give the object "
                    f"without PerRank to load this checkpoint, or put {name!r} into exclude_from_loading"
                )

    def list_missing(self, stored: Collection[str]) -> list[str]:
        """Return the states to load that a manager's checkpoint lacks, given the names of the stored ones."""
        return [name for name in self._states.names if name not in {*self._excluded, *stored, RNG}]

    def _choose_foreign_names(
        self,
        path: Path,
        names: list[str],
        checkpoint: OpenCheckpoint,
        stored: frozenset[str],
        common: StateDict,
        keys: list[str],
    ) -> list[str]:
        """Return the states to load from another library: all, but random generators only if they are there.

        It is an error if the checkpoint has nothing of another state.
        """
        single = [name for name in names if name in self._states.plain or name in self._states.per_rank]
        wanted = [ShardedObject(name, None, (1,), (0,)) for name in single]
        built = checkpoint.find_buildable([shard for shard in wanted if shard.unique_key not in stored])
        absent = {shard.key for shard in wanted if shard.unique_key not in built} - {*_find_grids(single, stored)}
        # a state that dist_checkpointing.save, here or in Megatron, was given as a plain dict
        absent -= {name for name in self._states.plain if isinstance(common.get(name), dict)}
        absent |= {name for name in names if self._is_absent(name, stored)}
        if OPTIMIZER in names and self._states.optimizers:
            is_there = any(list_top_names([rename_key(key, checkpoint.names)]) == [OPTIMIZER] for key in keys)
            absent.update([OPTIMIZER] * (not is_there))
        if absent - {RNG}:
            raise CheckpointingException(
                f"{path} has no state {', '.join(map(repr, sorted(absent - {RNG})))}; its names begin with "
                f"{listed(_list_outer_names(keys))}. {self._advise_of_names(sorted(absent - {RNG}), keys)}"
            )
        return [name for name in names if name not in absent]

    def _advise_of_names(self, absent: Sequence[str], keys: Collection[str]) -> str:
        """Return advice about states that another library's checkpoint does not have under their own names."""
        modules = {
            name: get_model_tensors(self._states.modules[name]) for name in absent if name in self._states.modules
        }
        found = {old: name for name, tensors in modules.items() if (old := _find_prefix(tensors, keys))}
        rest = [name for name in absent if name not in found.values()]
        rename = f"CheckpointConfig(rename={found or {'net': 'model'}})"
        advice = [f"By other names it has {listed([*found.values()])}: {rename}"] if found else []
        if rest:
            advice += [] if found else [f"If it has them by other names, say so: {rename}"]
            if OPTIMIZER in rest and LR_SCHEDULER in {*self._states.names} - {*rest}:  # which sets its learning rate
                rest.append(LR_SCHEDULER)
            advice.append(
                f"put states that it does not have into exclude_from_loading={rest}: the training then starts with "
                "them as they are"
            )
        return "; ".join(advice)

    def _is_absent(self, name: str, stored: frozenset[str]) -> bool:
        """Return whether nothing of some modules is stored; torchtitan's keys of a model have no first part."""
        if name not in self._states.modules or any(key.startswith(f"{name}.") for key in stored):
            return False
        tensors = get_model_tensors(self._states.modules[name])
        return len(tensors) > 0 and (name != MODEL or stored.isdisjoint(tensors))


def _load(
    requested: ShardedStateDict,
    checkpoint: OpenCheckpoint,
    *,
    validate: bool,
    on_unused: OnUnused = "ignore",
    allow_dtype_cast: bool = False,
    counts_unused: Callable[[str], bool] = lambda _: True,
    resize: Sequence[str] = (),
) -> StateDict:
    """Collective: load the requested shards; on a rank without any, take part in the load of the others."""
    comm = checkpoint.context.comm
    if not comm.largest(any(True for _ in nested_values(requested)))[0]:
        return {}
    loaded, _ = load_checkpoint(
        requested,
        checkpoint,
        validate=validate,
        strict=StrictHandling.RAISE_UNEXPECTED,
        allow_dtype_cast=allow_dtype_cast,
        advise=False,
        on_unused=on_unused,
        counts_unused=counts_unused,
        resize=resize,
    )
    return loaded


def _list_outer_names(keys: Collection[str]) -> list[str]:
    """Return the first names of keys; where there is only one, as in ``app.model``, with the second names."""
    names = list_top_names(keys)
    if len(names) != 1:
        return names
    inner = list_top_names([key.removeprefix(f"{names[0]}.") for key in keys if key.startswith(f"{names[0]}.")])
    return [f"{names[0]}.{name}" for name in inner] or names


def _find_prefix(names: Collection[str], keys: Collection[str]) -> str:
    """Return the prefix, without its dot, of most names of a module's tensors in the keys of a checkpoint."""
    first, found = min(names), {*keys}
    prefixes = sorted(key.removesuffix(f".{first}") for key in found if key.endswith(f".{first}"))
    return max(prefixes, key=lambda each: sum(f"{each}.{name}" in found for name in names), default="")


def _find_grids(names: Collection[str], stored: Iterable[str]) -> dict[str, tuple[int, ...]]:
    """Return the shape of the grid of stored objects of each name that has one; a value inside an object is none."""
    begin = tuple(f"{name}/shard_" for name in names)
    found = (PlainObject.empty_from_unique_key(key) for key in stored if key.startswith(begin))
    return {each.key: each.global_shape for each in found if each.key in names}

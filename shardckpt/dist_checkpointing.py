"""Save and load sharded state dicts with any number of ranks, by Megatron's names."""

from __future__ import annotations

import logging
import re
import sys
from contextlib import ExitStack, contextmanager
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

from shardckpt.background.saving import request_save
from shardckpt.distributed.comm import Comm
from shardckpt.engine.loading import load_checkpoint
from shardckpt.engine.locations import locate, locate_local
from shardckpt.engine.opening import LoadOptions, lend_checkpoint, read_checkpoint
from shardckpt.engine.opening import open_checkpoint as open_any
from shardckpt.engine.operation import report_failure
from shardckpt.engine.saving import SaveOptions, find_saver, save_checkpoint
from shardckpt.errors import CheckpointingException, StorageError, parse_globals
from shardckpt.huggingface.weights import ModelCheckpoint
from shardckpt.maintenance.remove import RemovalReport, remove_keys
from shardckpt.manager.step_names import parse_number
from shardckpt.manifest.models import Marker
from shardckpt.manifest.names import MARKER_LIMIT, MARKER_NAME, SAVE_ID, Lineage
from shardckpt.mapping.factory import ShardedTensorFactory
from shardckpt.mapping.sharded_object import ShardedObject
from shardckpt.mapping.sharded_tensor import ShardedTensor
from shardckpt.mapping.unstored import LocalNonpersistentObject, LocalNonpersitentObject
from shardckpt.parallel.load import share_reading, split_budget
from shardckpt.plugins.entries import StrategyAction
from shardckpt.plugins.manager import get_plugin_manager
from shardckpt.storage.directory import retry_if_replaced
from shardckpt.storage.filesystem import is_there
from shardckpt.storage.input_file import read_file
from shardckpt.storage.memory_budget import parse_memory_budget
from shardckpt.validation.arguments import check_annotated
from shardckpt.validation.keys import StrictHandling, parse_on_unused, parse_strict_flag, stored_key

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Collection, Iterable, Iterator
    from contextlib import AbstractContextManager
    from types import ModuleType

    import torch
    from torch.distributed import ProcessGroup

    from shardckpt.background.request import AsyncRequest
    from shardckpt.engine.opening import OpenCheckpoint
    from shardckpt.mapping.base import CommonStateDict, ShardedBase, ShardedStateDict, StateDict
    from shardckpt.plugins.resolver import Accept
    from shardckpt.strategy import LoadStrategy, SaveStrategy
    from shardckpt.validation.keys import KeyMismatch, OnUnused

    PathLike = str | os.PathLike[str]
    LoadChoice = str | tuple[str, int] | LoadStrategy | None
    SaveChoice = str | tuple[str, int] | SaveStrategy | None
    Preprocess = Callable[[CommonStateDict], CommonStateDict] | None

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

#: Megatron's modules of this name, which users look for here: they are in shardckpt.compat.megatron.
_MEGATRON_MODULES = frozenset(
    {
        "core",
        "dict_utils",
        "exchange_utils",
        "gpt_checkpoint_interop",
        "mapping",
        "optimizer",
        "serialization",
        "state_dict_transformation",
        "state_dict_utils",
        "strategies",
        "tensor_aware_state_dict",
        "utils",
        "validation",
    }
)
#: Ports a code base.
_PORT = "python -m shardckpt.compat.megatron FOLDER"
#: Without it, Python says "not a package" of Megatron's modules before any finder is asked.
__path__: list[str] = []


@overload
def save(
    sharded_state_dict: ShardedStateDict,
    checkpoint_dir: PathLike,
    sharded_strategy: SaveChoice = None,
    validate_access_integrity: bool = True,
    *,
    async_sharded_save: Literal[True],
    preprocess_common_before_consistancy_check: Preprocess = None,
    content_metadata: Any = None,
    async_strategy: str = "nvrx",
    verify_integrity: bool = False,
    preprocess_common_before_consistency_check: Preprocess = None,
    overwrite: bool = False,
    allow_globals: Iterable[Any] = (),
    process_group: ProcessGroup | None = None,
    parent: str | None = None,
    step: int | None = None,
    fingerprints: bool = False,
    memory_budget: int | str | None = None,
) -> AsyncRequest: ...
@overload
def save(
    sharded_state_dict: ShardedStateDict,
    checkpoint_dir: PathLike,
    sharded_strategy: SaveChoice = None,
    validate_access_integrity: bool = True,
    async_sharded_save: bool = False,
    preprocess_common_before_consistancy_check: Preprocess = None,
    content_metadata: Any = None,
    async_strategy: str = "nvrx",
    verify_integrity: bool = False,
    *,
    preprocess_common_before_consistency_check: Preprocess = None,
    overwrite: bool = False,
    allow_globals: Iterable[Any] = (),
    process_group: ProcessGroup | None = None,
    parent: str | None = None,
    step: int | None = None,
    fingerprints: bool = False,
    memory_budget: int | str | None = None,
) -> AsyncRequest | None: ...
def save(
    sharded_state_dict: ShardedStateDict,
    checkpoint_dir: PathLike,
    sharded_strategy: SaveChoice = None,
    validate_access_integrity: bool = True,
    async_sharded_save: bool = False,
    preprocess_common_before_consistancy_check: Preprocess = None,
    content_metadata: Any = None,
    async_strategy: str = "nvrx",
    verify_integrity: bool = False,
    *,
    preprocess_common_before_consistency_check: Preprocess = None,
    overwrite: bool = False,
    allow_globals: Iterable[Any] = (),
    process_group: ProcessGroup | None = None,
    parent: str | None = None,
    step: int | None = None,
    fingerprints: bool = False,
    memory_budget: int | str | None = None,
) -> AsyncRequest | None:
    """Collective: save a sharded state dict; every rank of the group calls it with its own shards.

    When this returns, the whole checkpoint is at ``checkpoint_dir``; when it raises, nothing there has changed. The
    caller's dict, tensors and descriptions are not changed. With ``async_sharded_save`` the checkpoint is there when
    the returned request has been finalized by an :class:`~shardckpt.async_save.AsyncCallsQueue`.

    Args:
        sharded_state_dict: Nested dicts and lists whose leaves are ShardedTensors, ShardedObjects, factories,
            LocalNonpersistentObjects (left out) and common values (the main rank's are stored).
        checkpoint_dir: The checkpoint's directory, absent or empty unless ``overwrite``; or a URL that a plugin
            serves (``s3://bucket/step-1000``), under which there is nothing unless ``overwrite``.
        sharded_strategy: A backend (its newest version), ``"backend@version"``, (backend, version) or a SaveStrategy;
            by default the registry's default.
        validate_access_integrity: Check that the shards of all ranks cover every tensor exactly once.
        async_sharded_save: Only plan, and return a request that an AsyncCallsQueue writes in the background.
        preprocess_common_before_consistancy_check: ``preprocess_common_before_consistency_check``, misspelt as by
            Megatron.
        content_metadata: Anything that describes the content; :func:`load_content_metadata` returns it.
        async_strategy: Accepted for Megatron's callers, without effect: the queue chooses a thread or a process.
        verify_integrity: Write Megatron's ``integrity.json`` too, hashed while the files are written.
        preprocess_common_before_consistency_check: Removes from (a copy of) the common state values that may differ
            between ranks, before ranks are compared and a difference is logged.
        overwrite: Replace the checkpoint at ``checkpoint_dir`` in one step; files there that do not belong to the old
            checkpoint are kept. At a URL the new checkpoint goes into a folder next to the old one, where stock readers
            do not find it.
        allow_globals: Further classes and functions that objects and common state may be pickled with; a load
            needs the same list.
        process_group: The ranks that save; by default all, or this process alone without torch.distributed.
        parent: The ``save_id`` of the checkpoint that the job was resumed from (:func:`open_checkpoint` has it). It is
            stored with the checkpoint, as ``step`` is, and ``shardckpt inspect`` prints both.
        step: The step of the training, not negative.
        fingerprints: Store a fingerprint of each tensor, 16 bytes, computed while the files are written: equal for
            equal values, whatever the sharding, the ranks and the backend. :func:`open_checkpoint` has them, and
            ``shardckpt diff`` compares by them. It takes another core while it saves; ``benchmarks.fingerprints`` has
            figures.
        memory_budget: Bytes, or text such as ``"256MiB"``, that each rank may hold at a time besides its tensors:
            blocks and parts on their way, and with ``async_sharded_save`` the copies of its tensors, of which there are
            then as many as fit. A budget without room for one copy is refused: save in the foreground, which writes CPU
            tensors from where they are, and others in pieces. At least 8 MiB for a directory and 23 MiB for a URL (more
            for files of more than 45 GB). Not counted are the parts that are in memory as a whole: the index, objects
            and common state, and the plain copies of quantized tensors that are being written. A store whose client
            takes no such limit (fsspec's, but for s3fs) uploads with as much as it takes. None: as many as are fast.

    Returns:
        None, or with ``async_sharded_save`` the request to schedule.

    Raises:
        CheckpointingException: the same on every rank; ``checkpoint_dir`` is unchanged, unless the connection between
            ranks broke after the commit.
    """
    comm = Comm(process_group)
    with report_failure("save", checkpoint_dir, comm.rank):
        with comm.local_phase("reading the arguments"):
            target = locate(checkpoint_dir, get_plugin_manager())
            check_annotated(save, locals())
            options = SaveOptions(
                validate_access_integrity,
                overwrite,
                content_metadata,
                preprocess_common_before_consistency_check or preprocess_common_before_consistancy_check,
                parse_globals(allow_globals),
                verify_integrity,
                _parse_lineage(parent, step),
                fingerprints,
                parse_memory_budget(memory_budget),
            )
        if async_sharded_save:
            return request_save(sharded_state_dict, target, sharded_strategy, comm, get_plugin_manager(), options)
        save_checkpoint(sharded_state_dict, target, sharded_strategy, comm, get_plugin_manager(), options)
        return None


def _parse_lineage(parent: str | None, step: int | None) -> Lineage:
    if parent is not None and not re.fullmatch(SAVE_ID, str(parent)):
        raise CheckpointingException(
            f"parent={parent!r}: expected the id of a checkpoint, 32 hex digits: open_checkpoint(path).save_id"
        )
    step = None if step is None else parse_number(step, "save", "a whole number, as step=100")
    return Lineage(parent, step)


def load(
    sharded_state_dict: ShardedStateDict,
    checkpoint_dir: PathLike,
    sharded_strategy: LoadChoice = None,
    validate_access_integrity: bool = True,
    strict: str | bool | StrictHandling = StrictHandling.ASSUME_OK_UNEXPECTED,
    verify_integrity: bool = False,
    process_group: ProcessGroup | None = None,
    *,
    accept: Accept | None = None,
    allow_globals: Iterable[Any] = (),
    allow_dtype_cast: bool = False,
    fully_parallel: bool = False,
    memory_budget: int | str | None = None,
    on_unused: OnUnused = "warn",
    resize: Collection[str] = (),
) -> Any:
    """Collective: load the contents of a sharded state dict, with any number of ranks and any sharding.

    All ranks load from one save. If another job overwrites the checkpoint meanwhile, all ranks start over, a few times,
    and fill the destinations again.

    Where a wanted tensor has another dtype than the stored one, values are cast as they are loaded, if the dtype can
    hold them or their nearest; that is logged once a load. Casts that would cut or wrap values are refused by name,
    before anything is filled. Of other casts the values tell: one that changes an integer (2**24 + 1 as float32), makes
    a number infinite (1e5 as float16), or loses an infinity or a sign (inf as float8_e4m3fn, -1 as float8_e8m0fnu), is
    refused once it is made; destinations are filled then.

    =========================== ============================================= ======================================
    stored                      wanted                                        the load
    =========================== ============================================= ======================================
    bool                        any                                           casts, exactly
    an integer                  an integer that has all its values            casts, exactly
    an integer                  one that has not (int64 to int32), bool       refuses
    an integer                  float, complex                                casts; refuses values it would change
    float (float8 too)          float of any width, complex                   casts; rounds; refuses what overflows
    float                       an integer, bool                              refuses
    complex                     complex                                       casts; rounds; refuses what overflows
    complex                     any other                                     refuses
    packed (4 bits, bits8, ...) any other                                     refuses
    =========================== ============================================= ======================================

    Args:
        sharded_state_dict: As for :func:`save`; a ShardedTensor's ``data`` is filled in place where there is one.
        checkpoint_dir: The checkpoint: a directory, or a URL, of which only the ranges that are needed are read.
        sharded_strategy: A backend, ``"backend@version"``, (backend, version) or a LoadStrategy that must read the
            checkpoint; by default the one that the checkpoint names.
        validate_access_integrity: Check that the shards of all ranks cover every tensor exactly once.
        strict: The treatment of keys that do not match: a :class:`StrictHandling`, its value, True (raise) or False
            (log).
        verify_integrity: Before anything is loaded, read every file of the checkpoint and check it against
            ``integrity.json`` and the digests of ``shardckpt.json``; without it only the bytes that are loaded are
            checked.
        process_group: The ranks that load; by default all, or this process alone without torch.distributed.
        accept: The strategies whose checkpoints the caller is willing to load: a backend, ``"backend@version"``, a
            (backend, version) pair, or a list of these; by default any.
        allow_globals: Classes and functions that legacy pickles in the checkpoint may name besides the plain ones.
        allow_dtype_cast: Cast as torch's ``Tensor.to`` does, whatever is lost, where the table says that the load
            refuses (packed dtypes excepted, which torch does not cast).
        fully_parallel: Read a shard that several ranks want once: one of them reads it and sends it to the others. It
            saves time where reading is slower than the network between ranks: on object stores and shared file systems.
            It is the same for every format and store, and on every rank. Ranks share only the same region in the same
            dtype: different columns of the same rows (row-wise tensor parallelism) are read by each rank with the gaps
            below 64 KiB between them, and formats with digests read whole segments, so that a small tensor that is
            cut over ranks is read by each of them.
            :class:`~shardckpt.parallel.FullyParallelLoadStrategyWrapper` has more options.
        memory_budget: Bytes, or text such as ``"256MiB"``, that each rank may hold at a time besides the destinations
            and returned tensors: requests in flight, buffers, messages between ranks. With less the load is slower. Not
            counted are the parts that are in memory as a whole: the index, objects and common state, and one plain copy
            of each quantized tensor that is being filled. Files of ``torch.save`` with strides are read a tensor at a
            time. At least 8 MiB, or 16 with ``fully_parallel``; None: as many as are fast.
        on_unused: The treatment of stored tensors and objects that no rank asks for (layers that the model does not
            have, a forgotten state): ``"warn"`` once with their number and the first of them, ``"error"`` before
            anything is filled, ``"ignore"``. A mode of ``strict`` that looks for them does as it says, and
            ``"ignore_all"`` does not warn. A load that asks for nothing, to get the common state, reports nothing.
            It is also the treatment of tensors of the state dict that describe no shard, and that the common state
            lacks: no load fills them.
        resize: Patterns of keys, as of :mod:`fnmatch`, of tensors that may have another shape than is stored: a
            vocabulary that has grown (``["*embed_tokens.weight*", "*lm_head.weight*"]``, which match the optimizer's
            moments, too). The common region of both shapes is loaded; new rows keep the values that they have, which
            ranks with copies must have made the same way, also those of an optimizer's own weights (``fp32_param``,
            ``master_param``); moments of new rows become zero.

    Returns:
        The state dict, with the checkpoint's common state in it; for the modes ``return_unexpected`` and
        ``return_all`` a tuple ``(state_dict, missing_keys, unexpected_keys)`` in Megatron's words.

    Raises:
        CannotLoadError: no installed strategy reads the checkpoint, or it may not be read.
        CheckpointReplacedError: other saves replaced it in every attempt.
        DtypeMismatchError: stored values do not fit a wanted dtype.
        CheckpointingException: any other failure; the same on every rank.
    """
    comm = Comm(process_group)
    with report_failure("load", checkpoint_dir, comm.rank):
        with comm.local_phase("reading the arguments"):
            check_annotated(load, locals())
            budget, reading = split_budget(memory_budget, fully_parallel=fully_parallel)
            mode, options = (
                parse_strict_flag(strict),
                LoadOptions(sharded_strategy, accept, parse_globals(allow_globals), reading),
            )
            unused, resized = parse_on_unused(on_unused), tuple(resize)

        def attempt() -> tuple[StateDict, KeyMismatch]:
            with comm.local_phase("reading the arguments"):
                directory = locate(checkpoint_dir, get_plugin_manager())  # each time: links may lead elsewhere since
            with open_any(directory, comm, get_plugin_manager(), options) as checkpoint:
                return load_checkpoint(
                    sharded_state_dict,
                    share_reading(checkpoint, budget) if fully_parallel else checkpoint,
                    validate=validate_access_integrity,
                    strict=mode,
                    verify=verify_integrity,
                    allow_dtype_cast=allow_dtype_cast,
                    on_unused=unused,
                    resize=resized,
                )

        state_dict, keys = retry_if_replaced(attempt, checkpoint_dir)
        return (state_dict, set(keys.missing), set(keys.unexpected)) if mode.returns_keys else state_dict


@contextmanager
def open_checkpoint(
    checkpoint_dir: PathLike,
    sharded_strategy: LoadChoice = None,
    *,
    accept: Accept | None = None,
    allow_globals: Iterable[Any] = (),
    memory_budget: int | str | None = None,
) -> Iterator[ModelCheckpoint]:
    """Open a checkpoint as a mapping from key to stored tensor; slices read only the bytes that they need.

    Not collective. All reads are of the save that was there when the checkpoint was opened.

    Example:
        ::

            with open_checkpoint("step-100") as checkpoint:
                rows = checkpoint["decoder.weight"][:4]
                model.load_state_dict(dict(checkpoint.weights()))  # whole tensors, without the optimizer

    Args:
        checkpoint_dir: As for :func:`load`.
        sharded_strategy: As for :func:`load`.
        accept: As for :func:`load`.
        allow_globals: As for :func:`load`.
        memory_budget: As for :func:`load`: the memory of reading besides the returned tensors.

    Yields:
        The mapping; it is closed at the end of the block.

    Raises:
        CheckpointReplacedError: another save has replaced the checkpoint, and its files are gone: open it again.
    """
    _, reading = split_budget(memory_budget, fully_parallel=False)
    options = LoadOptions(sharded_strategy, accept, parse_globals(allow_globals), reading)
    with ExitStack() as stack:
        yield ModelCheckpoint(
            retry_if_replaced(
                lambda: stack.enter_context(lend_checkpoint(_open_alone(checkpoint_dir, options))), checkpoint_dir
            )
        )


def load_common_state_dict(checkpoint_dir: PathLike, *, allow_globals: Iterable[Any] = ()) -> CommonStateDict:
    """Return the common state of a checkpoint: the values that are not sharded. Not collective."""
    options = LoadOptions(allow_globals=parse_globals(allow_globals))
    return _read(checkpoint_dir, options, lambda checkpoint: checkpoint.common())


def load_sharded_metadata(checkpoint_dir: PathLike, sharded_strategy: LoadChoice = None) -> dict[str, ShardedBase]:
    """Return the stored items, without data. Not collective.

    Returns:
        ShardedTensors of the global shape by key, ShardedObjects by unique key.
    """
    index = _read(checkpoint_dir, LoadOptions(sharded_strategy), lambda checkpoint: checkpoint.index())
    return {stored_key(shard): shard for shard in index}


def load_tensors_metadata(checkpoint_dir: PathLike, sharded_strategy: LoadChoice = None) -> dict[str, ShardedTensor]:
    """Return the stored tensors, without data: a ShardedTensor of the global shape by key. Not collective."""
    stored = load_sharded_metadata(checkpoint_dir, sharded_strategy)
    return {key: shard for key, shard in stored.items() if isinstance(shard, ShardedTensor)}


def load_plain_tensors(checkpoint_dir: PathLike) -> dict[str, torch.Tensor]:
    """Return every stored tensor at its global shape and stored dtype, in CPU memory. Not collective."""

    def read(checkpoint: OpenCheckpoint) -> dict[str, torch.Tensor]:
        tensors: list[ShardedBase] = [s for s in checkpoint.index() if isinstance(s, ShardedTensor)]
        return dict(zip((shard.key for shard in tensors), checkpoint.values(tensors), strict=True))

    return _read(checkpoint_dir, LoadOptions(), read)


def load_content_metadata(
    checkpoint_dir: PathLike | None = None, *, preloaded_state_dict: StateDict | None = None
) -> dict[str, Any] | None:
    """Return the saved ``content_metadata``, or None. Not collective.

    Where it is plain JSON, it comes from ``shardckpt.json``, and nothing is unpickled.

    Returns:
        The value that ``save`` was given; None if it was given none.
    """
    check_annotated(load_content_metadata, locals())
    if preloaded_state_dict is not None:
        return preloaded_state_dict.get("content_metadata")
    if checkpoint_dir is None:
        raise CheckpointingException("load_content_metadata needs a checkpoint_dir or a preloaded_state_dict")
    return _read(checkpoint_dir, LoadOptions(), _read_content_metadata)


def remove_sharded_tensors(
    checkpoint_dir: PathLike, key_prefix: str, *, process_group: ProcessGroup | None = None, dry_run: bool = False
) -> RemovalReport:
    """Collective: remove the tensors and objects whose keys begin with a prefix; the common state stays.

    The checkpoint is replaced in one step: a load, or a crash, finds the old or the new one. Files that have only
    removed keys are deleted. A file that has other keys too is rewritten without the removed bytes, which takes disk
    space for the rest of it until the old file is gone (``separation_hint`` gives keys files of their own). All other
    files are kept. If no key matches, nothing changes.

    Args:
        checkpoint_dir: The checkpoint's directory; not a URL.
        key_prefix: The prefix of the keys to be removed.
        process_group: The ranks that call, which are all of the group; by default all ranks, or this process alone
            without torch.distributed.
        dry_run: Change nothing, and report the files that would go and the bytes that would be freed.

    Returns:
        The keys and files that are gone, and the bytes on disk before and after; the same on every rank.

    Raises:
        CannotLoadError: no installed strategy reads the checkpoint.
        CheckpointingException: any other failure; the same on every rank.
    """
    comm = Comm(process_group)
    with comm.local_phase("reading the arguments"):
        directory = locate_local(checkpoint_dir, "take keys out of")
        check_annotated(remove_sharded_tensors, locals())
    report = remove_keys(directory, key_prefix, comm, get_plugin_manager(), dry_run=dry_run)
    if not report.keys and comm.is_main:
        logger.warning(
            "no tensor or object of %s has a key that begins with %r: nothing is removed", directory, key_prefix
        )
    return report


def check_is_distributed_checkpoint(checkpoint_dir: PathLike) -> bool:
    """Return whether the directory has a ``metadata.json`` that names a strategy, as Megatron asks. Not collective.

    It is a StorageError if the system does not say. Plain torch.distributed.checkpoint directories have none;
    :func:`load` reads them nevertheless.
    """
    marker = locate(checkpoint_dir, get_plugin_manager()) / MARKER_NAME
    if not is_there(marker):
        return False
    try:
        Marker.parse(read_file(marker, MARKER_LIMIT))
    except StorageError:
        raise
    except (CheckpointingException, ValueError):
        return False
    return True


def get_default_save_sharded_strategy(backend: str | None = None, version: int | None = None) -> SaveStrategy:
    """Return the strategy that :func:`save` uses for a backend and version; by default the registry's default."""
    check_annotated(get_default_save_sharded_strategy, locals())
    choice = backend if backend is None or version is None else (backend, version)
    return find_saver(choice, get_plugin_manager())


def get_default_load_sharded_strategy(checkpoint_dir: PathLike) -> LoadStrategy:
    """Return the strategy that :func:`load` uses for a checkpoint. Not collective."""
    return _read(checkpoint_dir, LoadOptions(), lambda checkpoint: checkpoint.strategy)


def register_default_strategy(
    action: StrategyAction, backend: str, version: int, strategy: SaveStrategy | LoadStrategy | type[Any]
) -> None:
    """Register a strategy for (backend, version) in this process, in the place of a plugin's.

    Args:
        action: Whether it saves or loads.
        backend: Its backend.
        version: Its version, 1 or more.
        strategy: A class (a fresh instance serves every operation) or an instance.

    Raises:
        PluginError: it does not do that, or names another backend or version.
    """
    check_annotated(register_default_strategy, locals())
    get_plugin_manager().registry_before_plugins.put(action, backend, version, strategy)


def _read_content_metadata(checkpoint: OpenCheckpoint) -> dict[str, Any] | None:
    record = checkpoint.context.reader.manifest.record
    if record is not None and record.content_metadata is not None:
        return record.content_metadata  # type: ignore[no-any-return]
    return checkpoint.common().get("content_metadata")


def _read(checkpoint_dir: PathLike, options: LoadOptions, read: Callable[[OpenCheckpoint], _T]) -> _T:
    """Read from a checkpoint in this process alone."""
    return read_checkpoint(checkpoint_dir, Comm(alone=True), get_plugin_manager(), options, read)


def _open_alone(checkpoint_dir: PathLike, options: LoadOptions) -> AbstractContextManager[OpenCheckpoint]:
    """Open a checkpoint in this process alone."""
    return open_any(locate(checkpoint_dir, get_plugin_manager()), Comm(alone=True), get_plugin_manager(), options)


class _MegatronModules(Loader):
    """A finder of Megatron's modules, which are not here, and a loader that says where they are.

    ``importlib.util.find_spec`` must not raise; so the import does.
    """

    @classmethod
    def find_spec(cls, name: str, *_: object) -> ModuleSpec | None:
        """Return a spec if ``name``, the full name of a module, is one of Megatron's, looked for here."""
        module = name.removeprefix(f"{__name__}.")
        is_megatrons = module != name and module.partition(".")[0] in _MEGATRON_MODULES
        return ModuleSpec(name, cls()) if is_megatrons else None

    def exec_module(self, module: ModuleType) -> None:
        """Raise an ImportError that says where the module is, and the command that ports a code base."""
        name = module.__name__
        raise ImportError(
            f"there is no {name}: Megatron's module of that name is at "
            f"shardckpt.compat.megatron.dist_checkpointing.{name.removeprefix(f'{__name__}.')}. A code base ports by "
            f"one rule, megatron.core.dist_checkpointing becomes shardckpt.compat.megatron.dist_checkpointing: {_PORT}",
            name=name,
        )


# by its repr: where this module is loaded again, the class is another
if repr(_MegatronModules) not in map(repr, sys.meta_path):
    sys.meta_path.append(_MegatronModules)

__all__ = [
    "LocalNonpersistentObject",
    "LocalNonpersitentObject",
    "RemovalReport",
    "ShardedObject",
    "ShardedTensor",
    "ShardedTensorFactory",
    "StrategyAction",
    "StrictHandling",
    "check_is_distributed_checkpoint",
    "get_default_load_sharded_strategy",
    "get_default_save_sharded_strategy",
    "load",
    "load_common_state_dict",
    "load_content_metadata",
    "load_plain_tensors",
    "load_sharded_metadata",
    "load_tensors_metadata",
    "open_checkpoint",
    "register_default_strategy",
    "remove_sharded_tensors",
    "save",
]

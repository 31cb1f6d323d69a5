"""A load, from an open checkpoint to a state dict with the structure that the caller asks for."""

from __future__ import annotations

import copy
import logging
from typing import TYPE_CHECKING, Any

import torch

from shardckpt.engine.changed_values import describe_faults, find_suspects, request_stored_values
from shardckpt.engine.common_objects import CommonObjects
from shardckpt.engine.integrity import verify_integrity
from shardckpt.engine.load_template import MISSING, LoadTemplate
from shardckpt.engine.patterns import check_patterns, matches_any
from shardckpt.engine.resizing import Resizing, allow_resizing
from shardckpt.engine.twins import check_twins, find_twins
from shardckpt.errors import (
    KeyMismatchError,
    ShapeMismatchError,
    ShardingError,
    format_many,
    listed,
)
from shardckpt.mapping.sharded_object import ShardedObject
from shardckpt.mapping.sharded_tensor import ShardedTensor
from shardckpt.mapping.unstored import StoredNames
from shardckpt.planning.dtypes import Casts, check_dtypes, describe_casts, is_exact, make_changed_error
from shardckpt.planning.shapes import check_shapes
from shardckpt.tensors.casts import can_change_values
from shardckpt.tensors.memory import find_addresses, overlaps_itself
from shardckpt.validation.descriptions import validate_descriptions
from shardckpt.validation.keys import KeyMismatch, StrictHandling, compare_keys, stored_key, use_bare_keys
from shardckpt.validation.replicas import choose_main_replicas
from shardckpt.validation.sharding import validate_shards

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from shardckpt.distributed.comm import Comm
    from shardckpt.engine.opening import OpenCheckpoint
    from shardckpt.mapping.base import ShardedBase, ShardedStateDict, StateDict
    from shardckpt.strategy import StoredColumns
    from shardckpt.validation.keys import OnUnused

logger = logging.getLogger(__name__)
#: The prefix of a model's keys when it is described together with its optimizer.
_MODEL = "model."
#: How many of several names a message has.
_FEW = 5


def load_checkpoint(
    sharded_state_dict: ShardedStateDict,
    checkpoint: OpenCheckpoint,
    *,
    validate: bool,
    strict: StrictHandling,
    verify: bool = False,
    allow_dtype_cast: bool = False,
    advise: bool = True,
    on_unused: OnUnused = "ignore",
    counts_unused: Callable[[str], bool] = lambda _: True,
    filled_by_twins: Collection[str] = (),
    resize: Sequence[str] = (),
) -> tuple[StateDict, KeyMismatch]:
    """Collective: fill a state dict from an open checkpoint; see :func:`shardckpt.dist_checkpointing.load`.

    Returns the loaded state dict, and the keys that do not match. Everything that can be checked without data is
    checked before any destination is filled; errors are the same on every rank.

    ``validate`` and ``verify`` are ``validate_access_integrity`` and ``verify_integrity`` there. ``advise`` says
    whether errors may name arguments of ``dist_checkpointing.load`` and of ShardedTensor: whether the user can pass
    them. ``on_unused`` is the policy for stored tensors and objects that no rank requests, if ``strict`` does not look
    for them; ``counts_unused`` returns whether a key counts as unused. ``filled_by_twins`` are keys that are not
    stored, and that share their destination with a stored key. ``resize`` has patterns of the keys of tensors that may
    have another shape than is stored.
    """
    comm, strategy = checkpoint.context.comm, type(checkpoint.strategy)
    # these decide which collectives a rank calls: with different ones the ranks would wait for each other
    comm.agree(
        strict=strict.value,
        validate_access_integrity=validate,
        verify_integrity=verify,
        allow_dtype_cast=allow_dtype_cast,
        fully_parallel=checkpoint.fully_parallel,
        on_unused=on_unused,
        resize=resize,
        strategy_class=f"{strategy.__module__}.{strategy.__qualname__}",
    )
    if verify:
        with checkpoint.operation.local_phase("verifying the files"):
            verify_integrity(checkpoint.context.reader.place, checkpoint.context.reader.manifest, comm)
    stored = checkpoint.columns()  # no object for each tensor
    common = checkpoint.common()  # before the shards: if it cannot be read, no destination has been filled
    objects = CommonObjects(common)
    with checkpoint.operation.local_phase("reading the arguments"):
        check_patterns("resize", resize, stored.keys, comm)
    template = _make_template(sharded_state_dict, checkpoint, lambda: name_stored(stored, objects, resize))
    if validate:
        with checkpoint.operation.local_phase("validating"):
            validate_shards(template.shards, comm, state=sharded_state_dict)
    with checkpoint.operation.local_phase("comparing keys"):
        mismatch, built, given = _match_keys(
            template, checkpoint, stored, objects, strict, on_unused=on_unused, counts_unused=counts_unused
        )
        not_read = {*mismatch.absent, *given}
        is_read = [not not_read or stored_key(shard) not in not_read for shard in template.shards]
        available = [shard for shard, reads in zip(template.shards, is_read, strict=True) if reads]
    with checkpoint.operation.local_phase("comparing shapes"):
        if resize and (misshapen := template.find_misshapen(common)):
            raise ShapeMismatchError(
                f"resize= has no effect on tensors that no shard describes: {listed(misshapen, limit=3)}; describe the "
                "optimizer, too: to_sharded_state_dict(model, optimizer) of shardckpt.adapters, or leave it out"
            )
        shapes = dict(zip(stored.keys, stored.shapes, strict=True))
        available = allow_resizing(available, shapes, resize)
        check_shapes(available, shapes, advise=advise)
        resizing = Resizing(available, shapes, resize, is_main=comm.is_main)
    with checkpoint.operation.local_phase("comparing dtypes"):
        dtypes = dict(zip(stored.keys, stored.dtypes, strict=True))
        casts = check_dtypes(available, dtypes, allow_cast=allow_dtype_cast, advise=advise)
        if casts and comm.is_main:
            _log_casts(casts)
    twins = find_twins(available, filled_by_twins)
    ignored = [] if on_unused == "ignore" else template.find_ignored_tensors(common)
    # in the message that tells whether a rank has failed
    may_change, most_ignored = comm.largest(
        not allow_dtype_cast and any(can_change_values(*pair) for pair in casts), len(ignored)
    )
    if most_ignored:
        report_ignored(ignored, most_ignored, on_unused, comm)
    wanted_values = [_without_data(shard) if n in twins else shard for n, shard in enumerate(available)]
    found = checkpoint.values(wanted_values, is_synced=True)
    with checkpoint.operation.local_phase("comparing tied tensors"):
        check_twins(available, found, twins)
        resizing.restore(found)
    loaded = iter(found)
    with checkpoint.operation.local_phase("assembling the state dict"):
        values = [
            next(loaded) if reads else given.get(stored_key(shard), MISSING)
            for shard, reads in zip(template.shards, is_read, strict=True)
        ]
        # the common state has the values that these objects were built from
        in_common = {n for n, shard in enumerate(template.shards) if stored_key(shard) in built} if built else set()
        state_dict = template.fill(values, common, in_common=in_common, replaces_any=len(given) < len(built))
    if may_change:
        _refuse_changed_values(checkpoint, available, found, dtypes, advise=advise)
    _log_unused(mismatch)
    return state_dict, mismatch


def _log_unused(mismatch: KeyMismatch) -> None:
    """Warn of unused keys, behind all that could fail: a load that does has its error alone."""
    if mismatch.warning:
        logger.warning("%s", mismatch.warning)


def _make_template(
    wanted: ShardedStateDict,
    checkpoint: OpenCheckpoint,
    list_stored: Callable[[], StoredNames],
) -> LoadTemplate:
    """Collective: return the template of a load, checked and with the main replicas of its shards."""
    with checkpoint.operation.local_phase("preparing the state dict"):
        template = LoadTemplate(wanted, list_stored)
        validate_descriptions(template.shards)
        refuse_unfillable(template.shards)
        # copies are not compared: their values are about to be overwritten
        template.shards = choose_main_replicas(template.shards, checkpoint.context.comm, compare=False)
    return template


def _match_keys(
    template: LoadTemplate,
    checkpoint: OpenCheckpoint,
    stored: StoredColumns,
    objects: CommonObjects,
    strict: StrictHandling,
    *,
    on_unused: OnUnused,
    counts_unused: Callable[[str], bool],
) -> tuple[KeyMismatch, set[str], dict[str, Any]]:
    """Collective: compare the requested keys with the stored keys.

    Returns the mismatch; the unique keys of objects that are built from single values; and the values of those that are
    built from the common state.
    """
    keys = {key: key for key in stored.keys}
    keys.update((name, ShardedObject.empty_from_unique_key(name).key) for name in stored.objects)
    if checkpoint.context.reader.manifest.recognised_as is not None:  # another library's: it may be torchtitan's
        use_bare_keys(template.shards, keys, _MODEL)
    absent = [
        shard
        for shard in template.shards
        if type(shard) is not ShardedTensor  # most are, and to ask whether one is an object is slow
        and isinstance(shard, ShardedObject)
        and shard.unique_key not in keys
    ]
    by_strategy = checkpoint.find_buildable(absent)
    given = objects.build(shard for shard in absent if shard.unique_key not in by_strategy)
    built = {*by_strategy, *given}
    # every rank must compare with the same keys, and the objects that are built differ from rank to rank
    wanted = [shard for shard in template.shards if stored_key(shard) not in built] if built else template.shards
    comm = checkpoint.context.comm
    mismatch = compare_keys(wanted, keys, strict, comm, on_unused=on_unused, counts_unused=counts_unused)
    if template.left_out and comm.is_main:
        _log_left_out(template)
    return mismatch, built, given


def _refuse_changed_values(
    checkpoint: OpenCheckpoint,
    wanted: list[ShardedBase],
    values: list[Any],
    dtypes: dict[str, torch.dtype],
    *,
    advise: bool,
) -> None:
    """Collective: raise DtypeMismatchError, on every rank, if a cast has changed a value of any rank."""
    comm, faults = checkpoint.context.comm, list[str]()
    with checkpoint.operation.local_phase("checking casts"):
        suspects = find_suspects(wanted, values, dtypes)
    (rounds,) = comm.largest(len(suspects))
    for number in range(rounds):
        mine = suspects[number : number + 1]
        sources = checkpoint.values(request_stored_values(mine, dtypes))
        with checkpoint.operation.local_phase("checking casts"):
            faults += describe_faults(mine, sources)
    if rounds:
        with comm.collective_phase("checking casts"):
            if faults:
                raise make_changed_error(faults, advise=advise)


def _without_data(shard: ShardedBase) -> ShardedBase:
    copied = copy.copy(shard)
    copied.data = None
    return copied


def name_stored(columns: StoredColumns, common: CommonObjects | None = None, resize: Sequence[str] = ()) -> StoredNames:
    """Return the stored items by key, without objects that have several parts.

    Objects may be built of values of the common state.
    """
    objects = [ShardedObject.empty_from_unique_key(name) for name in columns.objects]
    keys = [shard.key for shard in objects if set(shard.global_shape) <= {1}]
    return StoredNames(
        dict(zip(columns.keys, zip(columns.dtypes, columns.shapes, strict=True), strict=True)),
        dict.fromkeys(sorted({*keys, *columns.values})),
        {key for key in columns.keys if matches_any(key, resize)} if resize else (),
        common,
    )


def _log_left_out(template: LoadTemplate) -> None:
    """Log one line per load: a warning only if all optional entries that the caller has are dropped."""
    level = logging.WARNING if template.lacks_all_optional else logging.INFO
    names = listed(sorted(template.left_out))
    logger.log(level, "left out of the result, since it did not exist when the checkpoint was saved: %s", names)


def report_ignored(ignored: list[str], count: int, on_unused: OnUnused, comm: Comm) -> None:
    """Collective: say of some rank which tensors of its state dict no load fills; raise if ``on_unused`` says so.

    ``count`` is the largest number of such tensors of a rank.
    """
    paths = next(filter(None, comm.all_gather(ignored[:_FEW])))
    text = (
        f"no shard describes {format_many(count, 'tensor')} of the state dict to load, neither filled nor in the "
        f"result: {listed(paths)}{', ...' if count > len(paths) else ''}; describe them as the save did: "
        "dist_checkpointing.load(to_sharded_state_dict(...), ...) of shardckpt.adapters"
    )
    with comm.collective_phase("comparing keys"):
        if on_unused == "error":
            raise KeyMismatchError(text)
    if comm.is_main:
        logger.warning("%s", text)


def _log_casts(casts: Casts) -> None:
    """Log one line per load: a warning only if a cast is not exact."""
    level = logging.INFO if all(is_exact(*pair) for pair in casts) else logging.WARNING
    logger.log(level, "stored tensors are cast as they are loaded: %s", describe_casts(casts))


def refuse_unfillable(shards: Sequence[ShardedBase]) -> None:
    """Raise for a destination that no values can be written to, before any other is filled."""
    destinations = [(shard, shard.data) for shard in shards if isinstance(shard, ShardedTensor)]
    filled = [(shard, data) for shard, data in destinations if data is not None]
    if find_addresses([data for _, data in filled]) is None:  # some may be no contiguous memory
        for shard, data in filled:
            _refuse_unfillable_tensor(shard, data)


def _refuse_unfillable_tensor(shard: ShardedTensor, data: torch.Tensor) -> None:
    if data.is_meta:
        raise ShardingError(
            f"{shard.key!r}: its data is on the meta device, which cannot be filled: give it memory (to_empty), or "
            "describe it without data to get a new tensor"
        )
    if data.layout != torch.strided:
        raise ShardingError(
            f"{shard.key!r}: its data is sparse ({data.layout}), which cannot be filled: describe it without data to "
            "get a new, dense tensor"
        )
    if overlaps_itself(data):
        raise ShardingError(
            f"{shard.key!r}: its data is expanded, or overlaps itself: several elements are one place in memory, which "
            "can hold one value only: give its clone() or contiguous(), or describe it without data to get a new tensor"
        )

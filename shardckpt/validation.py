"""What must hold across ranks before bytes move: shards agree, cover their tensors exactly, and keys are as wanted."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from shardckpt.comm import Comm, pickled
from shardckpt.errors import CheckpointingException, KeyMismatchError
from shardckpt.fit import refuse_misfits, validate_shards
from shardckpt.mapping import ShardedBase, ShardedObject
from shardckpt.state_dict import dict_list_map_outplace, diff, extract_matching_values, nested_values

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from torch.distributed import ProcessGroup

    from shardckpt.mapping import CommonStateDict, ShardedStateDict

logger = logging.getLogger(__name__)

_SHOWN = 20


class StrictHandling(Enum):
    """What a load does about keys that do not match, by Megatron's names.

    Megatron's words are the reverse of torch's: *unexpected* keys are wanted and not in the checkpoint (torch:
    missing); *missing* keys are in the checkpoint and wanted by no rank (torch: unexpected).
    """

    ASSUME_OK_UNEXPECTED = "assume_ok_unexpected"
    LOG_UNEXPECTED = "log_unexpected"
    LOG_ALL = "log_all"
    RAISE_UNEXPECTED = "raise_unexpected"
    RAISE_ALL = "raise_all"
    RETURN_UNEXPECTED = "return_unexpected"
    RETURN_ALL = "return_all"
    IGNORE_ALL = "ignore_all"

    @property
    def checks_all(self) -> bool:
        """Whether keys that no rank wants matter too: needs every rank's keys."""
        return self in (self.LOG_ALL, self.RAISE_ALL, self.RETURN_ALL)

    @property
    def returns_keys(self) -> bool:
        """Whether load returns the mismatched keys beside the state dict."""
        return self in (self.RETURN_UNEXPECTED, self.RETURN_ALL)

    @staticmethod
    def requires_explicit_ckpt_mismatch_check(val: StrictHandling) -> bool:
        """Whether the mode looks at the checkpoint's keys before it loads (Megatron's name)."""
        return val is not StrictHandling.ASSUME_OK_UNEXPECTED

    @staticmethod
    def requires_global_app_metadata(val: StrictHandling) -> bool:
        """Whether the mode needs every rank's keys (Megatron's name)."""
        return val.checks_all

    @staticmethod
    def requires_returning_mismatch_keys(val: StrictHandling) -> bool:
        """Whether load returns the mismatched keys beside the state dict (Megatron's name)."""
        return val.returns_keys


def parse_strict_flag(strict: str | bool | StrictHandling) -> StrictHandling:
    """The mode that a caller's flag means: True raises on every mismatch, False logs it."""
    if isinstance(strict, bool):
        return StrictHandling.RAISE_ALL if strict else StrictHandling.LOG_ALL
    if isinstance(strict, StrictHandling):
        return strict
    try:
        return StrictHandling(strict)
    except ValueError:
        modes = ", ".join(mode.value for mode in StrictHandling)
        raise CheckpointingException(f"strict={strict!r}: expected True, False or one of {modes}") from None


@dataclass(frozen=True)
class KeyMismatch:
    """Keys of a load that do not match, in Megatron's words (see :class:`StrictHandling`)."""

    missing: frozenset[str]
    unexpected: frozenset[str]


def stored_key(shard: ShardedBase) -> str:
    """The name under which a shard is stored: a tensor's key, an object's unique key."""
    return shard.unique_key if isinstance(shard, ShardedObject) else shard.key


def compare_keys(
    wanted: Sequence[ShardedBase], stored: Iterable[str], strict: StrictHandling, comm: Comm
) -> KeyMismatch:
    """Apply the strictness mode; the same verdict on every rank.

    Args:
        wanted: This rank's shards.
        stored: Keys in the checkpoint, common state left out.
        strict: What to do about a mismatch.
        comm: The ranks that load.

    Raises:
        KeyMismatchError: some rank's keys do not match and the mode forbids it.
    """
    have = frozenset(stored)
    mine = frozenset(map(stored_key, wanted))
    unexpected = mine - have
    missing: frozenset[str] = frozenset()
    if strict.checks_all:
        ordered = sorted(have)
        wanted_by_any = comm.largest(*(key in mine for key in ordered))
        missing = frozenset(key for key, is_wanted in zip(ordered, wanted_by_any, strict=True) if not is_wanted)
    with comm.task("comparing keys"):
        if strict in (StrictHandling.RAISE_UNEXPECTED, StrictHandling.RAISE_ALL) and (unexpected or missing):
            raise KeyMismatchError(_mismatch_text(missing, unexpected))
        if strict is StrictHandling.ASSUME_OK_UNEXPECTED and unexpected:
            raise KeyMismatchError(
                _mismatch_text(missing, unexpected) + "\nTo load the rest, pass strict='log_unexpected'."
            )
    if strict in (StrictHandling.LOG_UNEXPECTED, StrictHandling.LOG_ALL) and (missing or unexpected):
        logger.warning("%s", _mismatch_text(missing, unexpected))
    return KeyMismatch(missing, unexpected)


def determine_global_metadata(
    sharded_state_dict: ShardedStateDict, process_group: ProcessGroup | None = None
) -> tuple[list[ShardedBase], list[list[ShardedBase]]]:
    """This rank's shards without data, and those of all ranks, by rank.

    Args:
        sharded_state_dict: A nest of ShardedTensors and ShardedObjects; other leaves are left out.
        process_group: The ranks; by default all.
    """
    comm = Comm(process_group)
    with comm.task("describing shards"):
        mine = [leaf.without_data() for leaf in nested_values(sharded_state_dict) if isinstance(leaf, ShardedBase)]
    return mine, comm.all_gather(mine)


def validate_sharding_integrity(
    global_metadata: Sequence[Sequence[ShardedBase]], common_state_dict: CommonStateDict | None = None
) -> None:
    """Check, by :func:`determine_global_metadata`'s second result, what :func:`validate_shards` checks.

    Args:
        global_metadata: The shards of all ranks, by rank.
        common_state_dict: Where given, all ranks of the default group compare theirs, and warn of differences.

    Raises:
        ShardingError: shards that disagree on dtype or global shape, overlap, or leave a hole.
    """
    comm = Comm()
    with comm.phase("checking the shards of all ranks"):
        refuse_misfits(global_metadata)
    if common_state_dict is not None:
        compare_common(common_state_dict, None, comm)


def validate_integrity_and_strict_load(
    sharded_state_dict: ShardedStateDict,
    strict: StrictHandling,
    validate_access_integrity: bool,
    local_metadata: Sequence[ShardedBase] | None = None,
    global_metadata: Sequence[Sequence[ShardedBase]] | None = None,
    ckpt_sharded_metadata: Mapping[str, ShardedBase] | None = None,
) -> tuple[ShardedStateDict, set[str], set[str]]:
    """Apply a strictness mode to wanted shards; all ranks of the default group call it.

    Args:
        sharded_state_dict: A nest of the wanted shards.
        strict: What to do about keys that do not match.
        validate_access_integrity: Whether to check that all ranks' shards fit together too.
        local_metadata: This rank's shards, where they are listed already.
        global_metadata: All ranks' shards, by rank; needed for that check.
        ckpt_sharded_metadata: What is stored; needed for every mode but ``assume_ok_unexpected``.

    Returns:
        The wanted shards that are stored, and the missing and unexpected keys in Megatron's words.

    Raises:
        KeyMismatchError: some rank's keys do not match and the mode forbids it.
    """
    mismatch = KeyMismatch(frozenset(), frozenset())
    if strict is not StrictHandling.ASSUME_OK_UNEXPECTED:
        if ckpt_sharded_metadata is None:
            raise CheckpointingException(f"strict={strict.value!r} needs ckpt_sharded_metadata")
        wanted = list(nested_values(sharded_state_dict) if local_metadata is None else local_metadata)
        mismatch = compare_keys(wanted, map(stored_key, ckpt_sharded_metadata.values()), strict, Comm())
    if validate_access_integrity:
        if global_metadata is None:
            raise CheckpointingException("validate_access_integrity=True needs global_metadata")
        validate_sharding_integrity(global_metadata)
    kept = adjust_non_strict_load(sharded_state_dict, mismatch.unexpected)
    if strict is StrictHandling.IGNORE_ALL:
        return kept, set(), set()
    return kept, set(mismatch.missing), set(mismatch.unexpected)


def adjust_non_strict_load(
    sharded_state_dict: ShardedStateDict, sharded_keys_to_remove: Collection[str]
) -> ShardedStateDict:
    """The nest without the shards of the given keys (an object's plain key, or its unique one); the argument stays."""
    removed = frozenset(sharded_keys_to_remove)
    _, kept = extract_matching_values(
        sharded_state_dict, lambda leaf: isinstance(leaf, ShardedBase) and not removed.isdisjoint(_names(leaf))
    )
    return kept  # type: ignore[no-any-return]


def _names(shard: ShardedBase) -> tuple[str, str]:
    return shard.key, stored_key(shard)


def maybe_report_missing_and_unexpected_keys(
    missing_keys: Collection[str], unexpected_keys: Collection[str], raise_error: bool = True
) -> None:
    """Raise, or else log, if there are keys that do not match (in Megatron's words)."""
    if not missing_keys and not unexpected_keys:
        return
    text = _mismatch_text(frozenset(missing_keys), frozenset(unexpected_keys))
    if raise_error:
        raise KeyMismatchError(text)
    logger.warning("%s", text)


def compare_common(
    common: CommonStateDict, preprocess: Callable[[CommonStateDict], CommonStateDict] | None, comm: Comm
) -> None:
    """Warn, on every rank that differs, where its common state is not the main rank's, which is the one that is stored.

    Args:
        common: This rank's common state.
        preprocess: Takes out what may differ; gets a copy.
        comm: The ranks that save.
    """
    if comm.world_size == 1:
        return
    with comm.task("preparing the common state"):
        mine = dict_list_map_outplace(lambda leaf: leaf, common)
        mine = mine if preprocess is None else preprocess(mine)
    if comm.all_alike(pickled(mine) or os.urandom(8)):
        return
    stored = comm.broadcast_or(mine, None)  # what cannot travel may still be stored: its strategy says
    places = ([], [], []) if stored is None else diff(stored, mine)
    if any(places):
        only_main, only_here, different = places
        logger.warning(
            "rank %d: common state differs from the main rank's, which is stored: only there %s, only here %s, "
            "different %s",
            comm.rank,
            only_main[:_SHOWN],
            only_here[:_SHOWN],
            [path for path, *_ in different[:_SHOWN]],
        )


def _mismatch_text(missing: frozenset[str], unexpected: frozenset[str]) -> str:
    parts = []
    if unexpected:
        parts.append(
            "wanted and not in the checkpoint (Megatron: unexpected keys, torch: missing keys): "
            + ", ".join(sorted(unexpected))
        )
    if missing:
        parts.append(
            "in the checkpoint and wanted by no rank (Megatron: missing keys, torch: unexpected keys): "
            + ", ".join(sorted(missing))
        )
    return "\n".join(parts)


__all__ = [
    "KeyMismatch",
    "StrictHandling",
    "adjust_non_strict_load",
    "compare_common",
    "compare_keys",
    "determine_global_metadata",
    "maybe_report_missing_and_unexpected_keys",
    "parse_strict_flag",
    "stored_key",
    "validate_integrity_and_strict_load",
    "validate_sharding_integrity",
    "validate_shards",
]

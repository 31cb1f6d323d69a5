"""What must hold across ranks before bytes move: shards agree, cover their tensors exactly, and keys are as wanted."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from shardckpt.comm import Comm
from shardckpt.errors import CheckpointingException, KeyMismatchError, ShardingError
from shardckpt.mapping import ShardedBase, ShardedObject, ShardedTensor, is_main_replica
from shardckpt.planning.boxes import Box, Ints, shard_parts
from shardckpt.planning.coverage import find_hole, find_overlap
from shardckpt.state_dict import dict_list_map_outplace, diff, extract_matching_values, map_reduce, nested_values

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
        missing = have.difference(*comm.all_gather(mine))
    with comm.phase("comparing keys"):
        if strict in (StrictHandling.RAISE_UNEXPECTED, StrictHandling.RAISE_ALL) and (unexpected or missing):
            raise KeyMismatchError(_mismatch_text(missing, unexpected))
        if strict is StrictHandling.ASSUME_OK_UNEXPECTED and unexpected:
            raise KeyMismatchError(
                _mismatch_text(missing, unexpected) + "\nTo load the rest, pass strict='log_unexpected'."
            )
    if strict in (StrictHandling.LOG_UNEXPECTED, StrictHandling.LOG_ALL) and (missing or unexpected):
        logger.warning("%s", _mismatch_text(missing, unexpected))
    return KeyMismatch(missing, unexpected)


def validate_shards(shards: Sequence[ShardedBase], comm: Comm) -> None:
    """Check that the shards of all ranks describe every global tensor and object exactly once.

    Each shard by itself was checked before. Grids may be regular or not. Every rank raises the same error, with all
    faults found.

    Args:
        shards: This rank's shards.
        comm: The ranks that save or load together.

    Raises:
        ShardingError: shards that disagree on dtype or global shape, overlap, or leave a hole.
    """
    with comm.phase("describing shards"):
        claims = [_claim(shard) for shard in shards]
    everyone = comm.gather(claims)
    with comm.phase("checking the shards of all ranks"):
        if comm.is_main:
            _refuse(find_faults(everyone))


def determine_global_metadata(
    sharded_state_dict: ShardedStateDict, process_group: ProcessGroup | None = None
) -> tuple[list[ShardedBase], list[list[ShardedBase]]]:
    """This rank's shards without data, and those of all ranks, by rank.

    Args:
        sharded_state_dict: A nest of ShardedTensors and ShardedObjects; other leaves are left out.
        process_group: The ranks; by default all.
    """
    comm = Comm(process_group)
    with comm.phase("describing shards"):
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
        _refuse(find_faults([[_claim(shard) for shard in shards] for shards in global_metadata]))
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
    with comm.phase("preparing the common state"):
        mine = dict_list_map_outplace(lambda leaf: leaf, common)
        mine = mine if preprocess is None else preprocess(mine)
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


@dataclass(frozen=True)
class _Claim:
    """A shard as the check sees it: what it says of the whole, and the boxes that it fills."""

    key: str
    kind: str
    dtype: Any
    global_shape: Ints
    main: bool
    boxes: tuple[Box, ...]


def _claim(shard: ShardedBase) -> _Claim:
    main = is_main_replica(shard.replica_id)
    if isinstance(shard, ShardedTensor):
        boxes = tuple(part.box for part in shard_parts(shard))
        return _Claim(shard.key, "tensor", shard.dtype, tuple(shard.global_shape), main, boxes)
    if isinstance(shard, ShardedObject):
        cell = Box(tuple(shard.global_offset), (1,) * len(shard.global_shape))
        return _Claim(shard.key, "object", None, tuple(shard.global_shape), main, (cell,))
    raise ShardingError(f"{shard.key!r}: cannot store a {type(shard).__name__}; build factories first")


def find_faults(claims_by_rank: Sequence[Sequence[_Claim]]) -> list[str]:
    """What is wrong with the shards of all ranks, sorted by key."""
    ranked = ((rank, claim) for rank, claims in enumerate(claims_by_rank) for claim in claims)
    by_key = map_reduce(ranked, lambda item: (item[1].key, item[1].kind), lambda item: item, list)
    faults: list[str] = []
    for key, kind in sorted(by_key):
        faults.extend(f"{kind} {key!r}: {fault}" for fault in _faults_of_key(by_key[key, kind], kind))
    return faults


def _faults_of_key(claims: list[tuple[int, _Claim]], kind: str) -> Iterable[str]:
    first_rank, first = claims[0]
    for what in ("global_shape", "dtype"):
        for rank, claim in claims:
            if getattr(claim, what) != getattr(first, what):
                yield (
                    f"ranks disagree on its {what}: {getattr(first, what)} on rank {first_rank}, "
                    f"{getattr(claim, what)} on rank {rank}"
                )
                return
    mains = [(rank, box) for rank, claim in claims if claim.main for box in claim.boxes]
    boxes = [box for _, box in mains]
    overlap = find_overlap(boxes)
    if overlap is not None:
        yield (
            f"{_region(overlap.common)} is described as the main replica twice, by rank {mains[overlap.first][0]} and "
            f"rank {mains[overlap.second][0]}: give copies a replica_id other than 0"
        )
        return
    hole = find_hole(first.global_shape, boxes)
    if hole is not None:
        part = "no object" if kind == "object" else "no shard"
        hint = "" if boxes else " (no rank holds a main replica: replica_id 0)"
        yield f"{part} describes {_region(hole)} of the global shape {first.global_shape}{hint}"


def _refuse(faults: Sequence[str]) -> None:
    """Raise one error with the first faults, if there are any."""
    if faults:
        shown = [*faults[:_SHOWN], *([f"... and {len(faults) - _SHOWN} more"] if len(faults) > _SHOWN else [])]
        raise ShardingError("shards do not fit together:\n  " + "\n  ".join(shown))


def _region(box: Box) -> str:
    return "[" + ", ".join(f"{lo}:{hi}" for lo, hi in zip(box.offset, box.end, strict=True)) + "]"


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
    "find_faults",
    "maybe_report_missing_and_unexpected_keys",
    "parse_strict_flag",
    "stored_key",
    "validate_integrity_and_strict_load",
    "validate_sharding_integrity",
    "validate_shards",
]

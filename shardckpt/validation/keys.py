"""Compare the keys of a load with those of the checkpoint, and the common state of ranks: Megatron's strict modes."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from shardckpt.distributed import Comm, pickled
from shardckpt.errors import CheckpointingException, KeyMismatchError
from shardckpt.mapping import ShardedBase, ShardedObject
from shardckpt.state_dict import dict_list_map_outplace, diff
from shardckpt.validation.sharding import validate_shards

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from shardckpt.mapping import CommonStateDict

logger = logging.getLogger(__name__)

_SHOWN = 20


class StrictHandling(Enum):
    """What a load does about keys that do not match, by Megatron's names.

    Megatron's words are the reverse of torch's: *unexpected* keys are wanted and not in the checkpoint (torch:
    missing); *missing* keys are in the checkpoint and wanted by no rank (torch: unexpected).

    ``ASSUME_OK_UNEXPECTED``, the default, raises if keys are unexpected, and does not look for missing ones. The others
    log, raise, return or ignore: ``*_UNEXPECTED`` the unexpected keys, ``*_ALL`` both.
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
        """Whether missing keys matter, too: then the ranks exchange what they want."""
        return self in (self.LOG_ALL, self.RAISE_ALL, self.RETURN_ALL)

    @property
    def returns_keys(self) -> bool:
        """Whether a load returns the keys that do not match, together with the state dict."""
        return self in (self.RETURN_UNEXPECTED, self.RETURN_ALL)

    @staticmethod
    def requires_explicit_ckpt_mismatch_check(val: StrictHandling) -> bool:
        """Return whether the mode compares keys before it loads (Megatron's name)."""
        return val is not StrictHandling.ASSUME_OK_UNEXPECTED

    @staticmethod
    def requires_global_app_metadata(val: StrictHandling) -> bool:
        """Return whether the mode needs every rank's keys (Megatron's name)."""
        return val.checks_all

    @staticmethod
    def requires_returning_mismatch_keys(val: StrictHandling) -> bool:
        """Return whether a load returns the keys that do not match (Megatron's name)."""
        return val.returns_keys


def parse_strict_flag(strict: str | bool | StrictHandling) -> StrictHandling:
    """Parse the ``strict`` argument of a load.

    Args:
        strict: A mode or its value; True raises on every mismatch, False logs it.

    Returns:
        The mode.

    Raises:
        CheckpointingException: there is no such mode.
    """
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
    """Keys of a load that do not match, in Megatron's words (see :class:`StrictHandling`).

    Attributes:
        missing: Keys in the checkpoint that no rank wants; empty if the mode does not look for them.
        unexpected: Keys that this rank wants and the checkpoint has not.
    """

    missing: frozenset[str]
    unexpected: frozenset[str]


def stored_key(shard: ShardedBase) -> str:
    """Return the name under which a shard is stored: a tensor's key, an object's unique key."""
    return shard.unique_key if isinstance(shard, ShardedObject) else shard.key


def compare_keys(
    wanted: Sequence[ShardedBase], stored: Iterable[str], strict: StrictHandling, comm: Comm
) -> KeyMismatch:
    """Collective: compare the keys of a load with those of the checkpoint, and do what the mode says.

    Args:
        wanted: This rank's shards.
        stored: Keys in the checkpoint, without those of the common state; the same on every rank.
        strict: What to do about a mismatch; the same on every rank.
        comm: The ranks that load.

    Returns:
        The keys that do not match.

    Raises:
        KeyMismatchError: on every rank: some rank's keys do not match, and the mode forbids it.
    """
    have = frozenset(stored)
    mine = frozenset(map(stored_key, wanted))
    unexpected = mine - have
    missing: frozenset[str] = frozenset()
    if strict.checks_all:
        ordered = sorted(have)  # the same order on every rank: only one flag per key is sent
        wanted_by_any = comm.largest(*(key in mine for key in ordered))
        missing = frozenset(key for key, is_wanted in zip(ordered, wanted_by_any, strict=True) if not is_wanted)
    with comm.local_phase("comparing keys"):
        if strict in (StrictHandling.RAISE_UNEXPECTED, StrictHandling.RAISE_ALL) and (unexpected or missing):
            raise KeyMismatchError(describe_mismatch(missing, unexpected))
        if strict is StrictHandling.ASSUME_OK_UNEXPECTED and unexpected:
            raise KeyMismatchError(
                describe_mismatch(missing, unexpected) + "\nTo load the rest, pass strict='log_unexpected'."
            )
    if strict in (StrictHandling.LOG_UNEXPECTED, StrictHandling.LOG_ALL) and (missing or unexpected):
        logger.warning("%s", describe_mismatch(missing, unexpected))
    return KeyMismatch(missing, unexpected)


def compare_common(
    common: CommonStateDict, preprocess: Callable[[CommonStateDict], CommonStateDict] | None, comm: Comm
) -> None:
    """Collective: warn on every rank whose common state is not the main rank's, which is the one that is stored.

    Args:
        common: This rank's common state.
        preprocess: Returns the state without what may differ; gets a copy.
        comm: The ranks that save.
    """
    if comm.world_size == 1:
        return
    with comm.local_phase("preparing the common state"):
        mine = dict_list_map_outplace(lambda leaf: leaf, common)
        mine = mine if preprocess is None else preprocess(mine)
    if comm.all_alike(pickled(mine) or os.urandom(8)):  # what cannot be pickled is compared below: random bytes differ
        return
    stored = comm.broadcast_or(mine, None)  # None if it cannot be pickled: the strategy may store it even so
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


def describe_mismatch(missing: frozenset[str], unexpected: frozenset[str]) -> str:
    """Return which keys do not match as text, in Megatron's words and in torch's; empty if all match."""
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
    "compare_common",
    "compare_keys",
    "describe_mismatch",
    "parse_strict_flag",
    "stored_key",
    "validate_shards",
]

"""The forecast of space: a save that is larger than the free space is refused before a file is written."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from shardckpt import settings
from shardckpt.commit.claim import is_mark
from shardckpt.commit.leftovers import walk_folders
from shardckpt.engine.amounts import format_bytes
from shardckpt.engine.pruning import prune_leftovers
from shardckpt.errors import CheckpointingException, NotEnoughSpaceError, StorageError, name_call
from shardckpt.manifest.names import MARKER_NAME
from shardckpt.mapping.base import is_main_replica
from shardckpt.mapping.sharded_tensor import ShardedTensor
from shardckpt.planning.shard_copies import shard_nbytes
from shardckpt.storage.abilities import takes_requests
from shardckpt.storage.places import get_parent, list_names
from shardckpt.storage.store_errors import mask_password
from shardckpt.tensors.memory import ORDINARY

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from shardckpt.mapping.base import ShardedBase

#: Stands for the free bytes of a file system that are not known: 4 EiB, more than all ranks together store.
UNKNOWN = 1 << 62


class Forecast(NamedTuple):
    """The bytes that a rank is about to store, for the forecast of space.

    ``nbytes`` counts tied tensors once for each key: it is quickly known. ``shards`` serve to count tied tensors once
    if ``nbytes`` do not fit; they are not kept. Without shards, ``nbytes`` is the size of the save.
    """

    nbytes: int = 0
    shards: Sequence[ShardedBase] = ()

    def count_least(self) -> int:
        """Return the bytes that the tensors take at least."""
        return count_least_bytes(self.shards) if self.shards else self.nbytes


#: The action of a removal of keys, for errors; it keeps the files that it does not rewrite.
REMOVE = "remove keys from"

#: Of a save that is not forecast.
NO_FORECAST: Forecast = Forecast()


class EarlierSave(NamedTuple):
    """The bytes of an earlier save of the same states: of all its files, and of its tensors."""

    nbytes: int = 0
    tensors: int = 0


class Room(NamedTuple):
    """The caller's settings for the space of a save. Only the main rank calls ``find_used`` and ``find_earlier``.

    Attributes:
        make: Collective: called before a save is refused, which may fit after it, and when a write has found no space,
            with a description of the full place, as :meth:`name_limit` returns it; returns whether it removed anything.
            None if nothing makes room.
        quota: Bytes that the folder of the save may hold; 0: as many as its file system.
        find_used: Returns the bytes that the folder holds; called only where there is a quota.
        find_earlier: Returns the size of an earlier save, which tells the forecast of more than the tensors; gets the
            free bytes.
        explain: Collective: returns the error of a background save that found no space, with the checkpoints that could
            go.
    """

    make: Callable[[str], bool] | None = None
    quota: int = 0
    find_used: Callable[[], int] = lambda: 0
    find_earlier: Callable[[int], EarlierSave] = lambda _free: EarlierSave()
    explain: Callable[[NotEnoughSpaceError], Exception] = lambda error: error

    def limit(self, free: int) -> int:
        """Return the smaller of the free bytes of a place and the bytes that the quota leaves."""
        return min(free, max(0, self.quota - self.find_used())) if self.quota else free

    def is_quota_less(self, target: Path, free: int) -> bool:
        """Return whether it is the quota that leaves a target no more than these free bytes."""
        return bool(self.quota) and free < _find_system_bytes(target)

    def never_fits(self, nbytes: int) -> bool:
        """Return whether so many bytes exceed the quota itself: nothing that is removed makes room for them."""
        return 0 < self.quota < nbytes

    def name_limit(self, target: Path, free: int) -> str:
        """Return the limit that leaves a target these free bytes, with its verb: the quota, or the file system."""
        if self.is_quota_less(target, free):
            return f"quota={self.quota:,} of {_show_folder(target)} leaves"
        return f"the file system of {_show_folder(target)} has"

    def free_for_retry(self, error: NotEnoughSpaceError, target: Path) -> bool:
        """Collective: make room if a write has found none; return whether the save can be tried once more."""
        return self.make is not None and is_of_write(error, target) and self.make(self.name_limit(target, UNKNOWN))

    def find_rest(self, free: int, forecast: Forecast) -> int:
        """Return the bytes that a save takes in addition to its forecast, so far as an earlier one tells."""
        earlier = EarlierSave() if free >= UNKNOWN else self.find_earlier(free)
        return earlier.nbytes if forecast is NO_FORECAST else max(0, earlier.nbytes - earlier.tensors)


#: Of a save whose caller has no settings.
UNLIMITED: Room = Room()


def count_bytes(shards: Iterable[ShardedBase]) -> int:
    """Return the bytes of tensors that this rank stores."""
    return sum(nbytes for _, nbytes in _measure(shards))


def count_least_bytes(shards: Iterable[ShardedBase]) -> int:
    """Return the bytes that this rank's tensors take at least: as :func:`count_bytes`, with tied tensors once.

    Objects, common state and indices are left out: their bytes are not known before they are encoded.
    """
    return sum(nbytes for _, nbytes in set(_measure(shards)))


def count_stored_bytes(index: Iterable[ShardedBase]) -> int:
    """Return the bytes of the tensors that an index describes, whole ones without data."""
    return sum(shard_nbytes(shard) for shard in index if isinstance(shard, ShardedTensor))


def find_free_bytes(directory: str | Path) -> int:
    """Return the free bytes of a directory's file system; :data:`UNKNOWN` if it does not say, or is not to be asked."""
    found = _ask_system(directory)
    # A file system without a size, as some of FUSE and a tmpfs without a limit have none, says nothing. One that has a
    # size, and nothing free, is full.
    if found is None or found.f_blocks == 0 or found.f_frsize == 0:
        return UNKNOWN
    # root may fill the blocks that ext4 reserves for it
    return found.f_frsize * (found.f_bfree if os.geteuid() == 0 else found.f_bavail)


def _ask_system(directory: str | Path) -> os.statvfs_result | None:
    if not settings.space_check():
        return None
    try:
        return os.statvfs(directory)
    except OSError:  # the save itself will report the fault of the directory
        return None


def _describe_free(directory: Path) -> str:
    """Describe the free space of a directory's file system: bytes, and inodes if it counts them; ``""`` if unknown."""
    free, found = find_free_bytes(directory), _ask_system(directory)
    if free == UNKNOWN or found is None:
        return ""
    count = f"{found.f_favail:,}" if found.f_favail else "no"
    inodes = f" and {count} inodes (files)" if found.f_files else ""
    return f" The file system of {directory} has {format_bytes(free)}{inodes} free now."


def _show_folder(target: Path) -> str:
    return mask_password(get_parent(target))


def _find_system_bytes(target: Path) -> int:
    return UNKNOWN if takes_requests(target) else find_free_bytes(get_parent(target))


def refuse_full(
    target: Path, needed: int, action: str, free: int | None = None, room: Room = UNLIMITED, rest: int = 0
) -> None:
    """Raise NotEnoughSpaceError if the file system of a target has less free space than the write takes.

    ``needed`` are the bytes of the tensors, ``rest`` all other bytes. ``free`` are the free bytes of the file system,
    or those that the quota of the room leaves; None: look.
    """
    free = _find_system_bytes(target) if free is None else free
    if needed + rest > free:
        raise _make_space_error(target, needed, free, action, room, rest)


def _make_space_error(target: Path, needed: int, free: int, action: str, room: Room, rest: int) -> NotEnoughSpaceError:
    """Return the error of a save that does not fit, with the steps that could go."""
    takes = _describe_needs(needed, rest)
    if room.never_fits(needed + rest):  # no advice about checkpoints that could go
        error = NotEnoughSpaceError(
            f"cannot {action} {target}: it does not fit into quota={room.quota:,} of {_show_folder(target)}, whatever "
            f"is removed: raise the quota. {takes}, {format_bytes(needed + rest - room.quota)} too much. No file was "
            "written."
        )
        error.is_forecast = True
        return error
    leftover, advice = _advise_of_space(target)
    text = (
        f"cannot {action} {target}: {advice}. {takes}, and {room.name_limit(target, free)} "
        f"{format_bytes(free)} free, {format_bytes(needed + rest - free)} too little. No file was written."
    )
    if action != REMOVE and _is_overwrite(target):
        text += " The old checkpoint stays until the new one is complete, so both need space."
    if not room.is_quota_less(target, free):
        text += f" {settings.SPACE_CHECK}=0 skips this check."
    error = NotEnoughSpaceError(text)
    error.advice, error.leftover, error.is_forecast = advice, leftover, True
    return error


def _is_overwrite(target: Path) -> bool:
    """Return whether a target has a file, or more than the claim of this save; False if that cannot be seen now."""
    try:
        return target.is_file() or not all(map(is_mark, list_names(target)))
    except (StorageError, OSError):  # the error that is made says more
        return False


def _describe_needs(needed: int, rest: int) -> str:
    """Return the bytes that a save takes as the first part of a sentence."""
    if not needed:
        return f"By the size of an earlier save it takes {format_bytes(rest)}"
    more = f", and with all else, as in an earlier save, it is {format_bytes(needed + rest)}" if rest else ""
    return f"The tensors take {format_bytes(needed)}{more}"


def is_of_write(error: NotEnoughSpaceError, target: Path) -> bool:
    """Return whether a write found no space where the target is.

    Else a forecast has refused the save, the folder of temporary files before a store is full, or the error has its
    explanation already.
    """
    return not error.is_forecast and not error.advice and not takes_requests(target)


def explain_full(error: NotEnoughSpaceError, target: Path) -> NotEnoughSpaceError:
    """Return the error of a write without space, with the free space and steps that could go; a refusal as it is."""
    if not is_of_write(error, target):
        return error
    leftover, advice = _advise_of_space(target)
    quota = " A quota permits less than the free space: `quota -s` says how much." if "(EDQUOT)" in str(error) else ""
    text = f"{error}. To make space: {advice}.{quota}{_describe_free(target.parent)}"
    explained = NotEnoughSpaceError(text).with_traceback(error.__traceback__)
    explained.advice, explained.leftover = advice, leftover
    return explained


def _advise_of_space(target: Path) -> tuple[int, str]:
    """Return the bytes that interrupted saves have left next to a target, and advice how to free these, or others."""
    folder = get_parent(target)
    runs = None if takes_requests(target) else _find_runs_with_leftovers(Path(folder))
    leftover = sum(_count_leftovers(place) for place in ([folder] if runs is None else runs))
    call = ("prune", *["-r"] * (runs is not None), _show_folder(target))
    if leftover:
        return leftover, f"{name_call(*call)} frees {format_bytes(leftover)} that interrupted saves have left"
    return 0, f"{name_call(*call, '--keep-latest', 'N', '--dry-run')} says how much space old steps would free"


def _find_runs_with_leftovers(folder: Path) -> Sequence[Path] | None:
    """Return the folders of runs in a folder that leftovers are in; None if it has checkpoints itself, or no runs."""
    try:
        if any(folder.glob(f"*/{MARKER_NAME}")) or not any(folder.glob(f"*/*/{MARKER_NAME}")):
            return None
    except OSError:  # advice is no reason to fail in another way
        return None
    return walk_folders(folder).with_leftovers


def _measure(shards: Iterable[ShardedBase]) -> Iterator[tuple[int, int]]:
    """Yield for each stored tensor a number that none of other memory has, and its bytes, 0 if it does not say."""
    for shard in shards:
        if isinstance(shard, ShardedTensor) and is_main_replica(shard.replica_id) and shard.data is not None:
            tensor = shard.data
            try:
                # other classes hold their values elsewhere: their address, if any, may be another tensor's
                address = tensor.data_ptr() if type(tensor) in ORDINARY else 0
                yield address or id(tensor), tensor.numel() * tensor.element_size()
            except (RuntimeError, TypeError):  # sparse ones, and other libraries': the plan will refuse or take them
                yield id(tensor), 0


def _count_leftovers(folder: Path | str) -> int:
    """Return the bytes that ``shardckpt prune`` would free."""
    try:
        found = prune_leftovers(folder, dry_run=True)
    except CheckpointingException:  # advice is no reason to fail in another way
        return 0
    return sum(each.nbytes for each in found if not each.kept and not each.error)

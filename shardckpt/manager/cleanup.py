"""``cleanup_old_checkpoints``, as MindSpeed-LLM's trainers call it after a save."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from shardckpt.comm import Comm
from shardckpt.errors import CheckpointingException
from shardckpt.locations import is_remote
from shardckpt.manager.purge import purge
from shardckpt.manager.retention import Retention
from shardckpt.manager.steps import STEPS, StepFolder, StepNames
from shardckpt.plugins import host
from shardckpt.storage.filesystem import naming

if TYPE_CHECKING:
    from pathlib import Path

#: Names of the steps' directories, each trainer's own: ours, transformers', Megatron's, VeOmni's.
_FAMILIES = (STEPS, StepNames("checkpoint-"), StepNames("iter_", 7), StepNames("global_step_"))
#: What has the output folder: MindSpeed's FSDP2 and transformers' arguments, and Megatron's.
_FOLDER_ARGUMENTS = ("output_dir", "save")
#: Where Megatron notes the step that it loads.
_TRACKER = "latest_checkpointed_iteration.txt"
_LOCAL_RANK = "LOCAL_RANK"


def cleanup_old_checkpoints(args: Any, shared_file_system: bool = True) -> None:
    """Remove all but the newest ``args.save_total_limit`` checkpoints of a training's output folder.

    The step's number says what is new, never a time. Only whole, readable checkpoints count and are removed: no save
    that is under way, no damaged one, nothing with another name, and never the last one. Directories that are named
    ``step-<n>``, ``checkpoint-<n>``, ``iter_<n>`` and ``global_step_<n>`` count by themselves. What cannot be
    removed is said in a warning, and the next call tries again. All ranks call; it works without a process group.

    Args:
        args: Has ``save_total_limit`` (missing, None, 0 or less keeps all), and ``output_dir`` or ``save``: a directory
            or URL.
        shared_file_system: Whether all ranks see the same folder: rank 0 removes. Else the first rank of each node
            does, by the environment's ``LOCAL_RANK``.

    Raises:
        CheckpointingException: the same on every rank: the arguments do not say where; or the folder cannot be listed.
    """
    comm = Comm()
    limit = getattr(args, "save_total_limit", None) or 0
    comm.agree(save_total_limit=limit, shared_file_system=shared_file_system)
    with comm.phase("removing old checkpoints"):
        if _limit(limit) and _removes(comm, shared_file_system):
            _clean(_folder(args), limit)


def _limit(limit: Any) -> int:
    if not isinstance(limit, int):
        raise CheckpointingException(f"save_total_limit is {limit!r}: expected a whole number, or None")
    return max(0, limit)


def _removes(comm: Comm, shared_file_system: bool) -> bool:
    """Whether this rank removes for the others that see its folder."""
    if shared_file_system or comm.world_size == 1:
        return comm.is_main
    local_rank = os.environ.get(_LOCAL_RANK, "")
    if not local_rank.isdecimal():
        raise CheckpointingException(
            f"shared_file_system=False: {_LOCAL_RANK}={local_rank!r} in the environment does not say which rank of its "
            "node this is; torchrun sets it"
        )
    return int(local_rank) == 0


def _folder(args: Any) -> str:
    for name in _FOLDER_ARGUMENTS:
        found = getattr(args, name, None)
        if found:
            return str(os.fspath(found))
    raise CheckpointingException(
        f"save_total_limit is set, and the arguments name no folder: give one as {' or '.join(_FOLDER_ARGUMENTS)}"
    )


def _clean(folder: str, limit: int) -> None:
    for names in _FAMILIES:
        steps = StepFolder(folder, host(), names)
        purge(steps, Retention(keep_latest_k=limit), _tracked(steps.place))


def _tracked(place: Path) -> set[int]:
    """The step that Megatron would load: it may note a new one only after this."""
    tracker = place / _TRACKER
    if is_remote(place) or not tracker.is_file():
        return set()
    with naming("read", tracker):
        text = tracker.read_text(errors="replace").strip()
    return {int(text)} if text.isascii() and text.isdecimal() else set()


__all__ = ["cleanup_old_checkpoints"]

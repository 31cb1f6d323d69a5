"""``cleanup_old_checkpoints``, as MindSpeed-LLM's trainers call it after a save."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any

from shardckpt.distributed import Comm
from shardckpt.errors import CheckpointingException, listed
from shardckpt.manager.garbage_collection import collect_garbage
from shardckpt.manager.retention import KeepLatest
from shardckpt.manager.steps import STEPS, StepFolder, StepNames
from shardckpt.manifest import MARKER_NAME
from shardckpt.plugins import host
from shardckpt.storage import has_local_files, naming

if TYPE_CHECKING:
    from pathlib import Path

#: Names of the steps' directories, each trainer's own: ours, transformers', Megatron's, VeOmni's.
_FAMILIES = (STEPS, StepNames("checkpoint-"), StepNames("iter_", 7), StepNames("global_step_"))
#: What has the output folder, and where below it checkpoints are: MindSpeed's FSDP2 and transformers' arguments
#: (transformers' are in the folder itself), and Megatron's.
_FOLDER_ARGUMENTS: dict[str, tuple[str, ...]] = {"output_dir": ("checkpoints",), "save": ()}
#: Where Megatron notes the step that it loads.
_TRACKER = "latest_checkpointed_iteration.txt"
_LOCAL_RANK = "LOCAL_RANK"
#: What this process has said already: a trainer calls after every save.
_said: set[tuple[str, str]] = set()

logger = logging.getLogger(__name__)


def cleanup_old_checkpoints(training_args: Any, shared_file_system: bool = True) -> None:
    """Remove all but the newest ``save_total_limit`` checkpoints of a training's output folder.

    They are looked for in ``<output_dir>/checkpoints``, as MindSpeed's trainers lay them out; if that has no step's
    directory, in ``<output_dir>`` itself, as transformers does. Megatron's ``save`` is the folder itself.

    The step's number says what is new, never a time. Only whole, readable checkpoints count and are removed: no save
    that is under way, no damaged one, nothing with another name, no link, and never the last one. Directories that are
    named ``step-<n>``, ``checkpoint-<n>``, ``iter_<n>`` and ``global_step_<n>`` count by themselves. What is left for
    another reason than the limit is named in a warning, once in a process, with the reason; so is a folder without any
    checkpoint. What cannot be removed is said in a warning, and the next call tries again. All ranks call; it works
    without a process group.

    Args:
        training_args: Has ``save_total_limit`` (missing, None, 0 or less keeps all), and ``output_dir`` or ``save``: a
            directory or URL.
        shared_file_system: Whether all ranks see the same folder: rank 0 removes. Else the first rank of each node
            does, by the environment's ``LOCAL_RANK``.

    Raises:
        CheckpointingException: the same on every rank: the arguments do not say where; or the folder cannot be listed.
    """
    comm = Comm()
    limit = getattr(training_args, "save_total_limit", None) or 0
    comm.agree(save_total_limit=limit, shared_file_system=shared_file_system)
    with comm.collective_phase("removing old checkpoints"):
        if _limit(limit) and _removes(comm, shared_file_system):
            _clean(_folders(training_args), limit)


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


def _folders(training_args: Any) -> list[str]:
    """Where checkpoints may be: the first of these that has any is the one."""
    for name, below in _FOLDER_ARGUMENTS.items():
        found = getattr(training_args, name, None)
        if found:
            folder = str(os.fspath(found)).rstrip("/") or "/"
            return [*(f"{folder}/{each}" for each in below), folder]
    raise CheckpointingException(
        f"save_total_limit is set, and the arguments name no folder: give one as {' or '.join(_FOLDER_ARGUMENTS)}"
    )


def _has_steps(folder: str) -> bool:
    names = StepFolder(folder, host()).directories()
    return any(family.parse(name) is not None for family in _FAMILIES for name in names)


def _clean(folders: list[str], limit: int) -> None:
    """Remove the old checkpoints of the first folder that has any; say what is left there and in the others."""
    with_steps = [folder for folder in folders if _has_steps(folder)]
    folder = with_steps[0] if with_steps else folders[-1]
    for names in _FAMILIES:
        steps = StepFolder(folder, host(), names)
        collect_garbage(steps, [KeepLatest(limit)], _tracked(steps.place))
    left = _left(folder, all_directories=folder != folders[-1])
    left |= dict.fromkeys(with_steps[1:], f"{folder} is the one that is cleaned")
    if not with_steps:
        left[" and ".join(folders)] = "no checkpoint of a step is there: nothing is removed"
    new = {place: why for place, why in left.items() if (place, why) not in _said}
    _said.update(new.items())
    if new:
        logger.warning(
            "a save_total_limit of %d does not apply to what is left here; remove by hand what is not needed:\n  %s",
            limit,
            listed([f"{place}: {why}" for place, why in new.items()], "\n  "),
        )


def _left(folder: str, *, all_directories: bool) -> dict[str, str]:
    """Directories that the limit does not apply to, and why not.

    Args:
        folder: Where they are.
        all_directories: Whether those that no step has named count whatever is in them; else only checkpoints do, as
            an output folder has logs and the like, too.
    """
    left = {}
    by_family = [StepFolder(folder, host(), names) for names in _FAMILIES]
    for name in by_family[0].directories():
        path = by_family[0].place / name
        found = [(steps, step) for steps in by_family if (step := steps.names.parse(name)) is not None]
        if not found:
            if not name.startswith(".") and (all_directories or _is_checkpoint(path)):
                left[str(path)] = "its name is no step's (" + ", ".join(f"{n.prefix}<n>" for n in _FAMILIES) + ")"
        elif path.is_symlink():
            left[str(path)] = "it is a link"
        else:
            look = found[0][0].inspect_step(found[0][1])
            if not look.is_loadable:
                left[str(path)] = f"it is no whole checkpoint that can be read here: {look.error or look.refusal}"
    return left


def _is_checkpoint(path: Path) -> bool:
    return has_local_files(path) and any((path / marker).is_file() for marker in (MARKER_NAME, ".metadata"))


def _tracked(place: Path) -> set[int]:
    """The step that Megatron would load: it may note a new one only after this."""
    tracker = place / _TRACKER
    if not has_local_files(place) or not tracker.is_file():
        return set()
    with naming("read", tracker):
        text = tracker.read_text(errors="replace").strip()
    return {int(text)} if text.isascii() and text.isdecimal() else set()


__all__ = ["cleanup_old_checkpoints"]

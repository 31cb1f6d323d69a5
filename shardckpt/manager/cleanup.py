"""``cleanup_old_checkpoints``, which MindSpeed-LLM's trainers call after a save."""

from __future__ import annotations

import logging
import operator
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from shardckpt.distributed.comm import Comm
from shardckpt.engine.locations import locate
from shardckpt.errors import CheckpointingException, is_first_warning, listed, show_given
from shardckpt.manager.garbage_collection import collect_garbage
from shardckpt.manager.retention import KeepLatest
from shardckpt.manager.step_names import NAMINGS
from shardckpt.manager.steps import StepFolder
from shardckpt.manifest.names import MARKERS
from shardckpt.plugins.manager import get_plugin_manager
from shardckpt.storage.abilities import takes_requests
from shardckpt.storage.input_file import read_file
from shardckpt.validation.arguments import check_annotated, is_integer

if TYPE_CHECKING:
    from pathlib import Path

#: The arguments that may name the output folder, each with the folders below it that may have the checkpoints.
#: ``output_dir`` is MindSpeed's FSDP2 and transformers' (which has them in the folder itself), ``save`` is Megatron's.
_FOLDER_ARGUMENTS: dict[str, tuple[str, ...]] = {"output_dir": ("checkpoints",), "save": ()}
_LIMIT = "save_total_limit"
#: Megatron's file with the number of the step that it loads.
_TRACKER = "latest_checkpointed_iteration.txt"
_MOST_DIGITS = 20
_MOST_BYTES = 1 << 20
_LOCAL_RANK = "LOCAL_RANK"

logger = logging.getLogger(__name__)


def cleanup_old_checkpoints(training_args: Any, shared_file_system: bool = True) -> None:
    """Collective: remove all but the newest ``save_total_limit`` checkpoints of a training's output folder.

    The folder is ``<output_dir>/checkpoints`` (MindSpeed's trainers) or, if that has no directory of a step,
    ``<output_dir>`` itself (transformers). For Megatron it is ``save``.

    Steps are ordered by number, never by time. Only complete checkpoints that can be loaded here are counted and
    removed: no save under way, no damaged checkpoint, no other name, no link, and never the newest one. Directories
    named ``step-<n>``, ``checkpoint-<n>``, ``iter_<n>``, ``global_step_<n>`` and ``epoch_<n>`` are counted separately.
    A warning names, once in a process, every directory that is kept for another reason than the limit, with the
    reason, and a folder without a checkpoint. Another names what cannot be removed; the next call retries.

    Args:
        training_args: An object with ``save_total_limit`` (missing, None, or at most 0 keeps all), and with
            ``output_dir`` or ``save``, a directory or URL.
        shared_file_system: If True, all ranks see the same folder, and rank 0 removes. If False, the first rank of each
            node does, by ``LOCAL_RANK`` in the environment.

    Raises:
        CheckpointingException: the same on every rank. The arguments name no folder, or it cannot be listed.
    """
    comm = Comm()
    given = getattr(training_args, _LIMIT, None)
    comm.agree(save_total_limit=0 if given is None else given, shared_file_system=shared_file_system)
    with comm.collective_phase("removing old checkpoints"):
        check_annotated(cleanup_old_checkpoints, locals())
        if given is not None and not is_integer(given):
            raise CheckpointingException(f"save_total_limit is {show_given(given)}: expected a whole number, or None")
        if isinstance(training_args, Mapping) and not hasattr(training_args, _LIMIT) and training_args.get(_LIMIT):
            raise CheckpointingException(
                f"training_args is a dict with {_LIMIT}, which is read as an attribute: give argparse.Namespace(**args)"
            )
        limit = operator.index(given or 0)
        if limit > 0 and _is_remover(comm, shared_file_system):
            _clean(_find_folders(training_args), limit)


def _is_remover(comm: Comm, shared_file_system: bool) -> bool:
    """Return whether this rank removes, for all ranks that see its folder."""
    if shared_file_system or comm.world_size == 1:
        return comm.is_main
    local_rank = os.environ.get(_LOCAL_RANK, "")
    if not local_rank.isdecimal():
        raise CheckpointingException(
            f"shared_file_system=False: {_LOCAL_RANK}={local_rank!r} in the environment does not say which rank of its "
            "node this is; torchrun sets it"
        )
    return int(local_rank) == 0


def _find_folders(training_args: Any) -> list[str]:
    """Return the folders that may have the checkpoints; the first that has any is cleaned."""
    for name, below in _FOLDER_ARGUMENTS.items():
        found = getattr(training_args, name, None)
        if not isinstance(found, str | os.PathLike | None):
            raise CheckpointingException(f"{name} is {show_given(found)}: expected a directory or URL")
        if found:
            folder = os.fspath(found).rstrip("/") or "/"
            return [*(f"{folder}/{each}" for each in below), folder]
    raise CheckpointingException(
        f"save_total_limit is set, and the arguments name no folder: give one as {' or '.join(_FOLDER_ARGUMENTS)}"
    )


def _has_steps(folder: str) -> bool:
    names = StepFolder(folder, get_plugin_manager()).directories()
    return any(each.parse(name) is not None for each in NAMINGS for name in names)


def _clean(folders: list[str], limit: int) -> None:
    """Remove old checkpoints from the first folder that has any; warn of those kept there and in the others."""
    with_steps = [folder for folder in folders if _has_steps(folder)]
    folder = with_steps[0] if with_steps else folders[-1]
    tracked = _read_tracker(locate(folder, get_plugin_manager()))
    for names in NAMINGS:
        collect_garbage(StepFolder(folder, get_plugin_manager(), names), [KeepLatest(limit)], tracked)
    kept = _find_exempt(folder, all_directories=folder != folders[-1])
    kept |= dict.fromkeys(with_steps[1:], f"{folder} is the one that is cleaned")
    if not with_steps:
        kept[" and ".join(folders)] = "no checkpoint of a step is there: nothing is removed"
    new = {path: reason for path, reason in kept.items() if is_first_warning(__name__, path, reason)}
    if new:
        logger.warning(
            "a save_total_limit of %d does not apply to these; remove by hand what is not needed:\n  %s",
            limit,
            listed([f"{path}: {reason}" for path, reason in new.items()], "\n  "),
        )


def _find_exempt(folder: str, *, all_directories: bool) -> dict[str, str]:
    """Return the directories that the limit does not apply to, with the reason of each.

    With ``all_directories`` they are all whose name is not a step's; else only those that look like checkpoints,
    because an output folder also has logs.
    """
    exempt = {}
    by_naming = [StepFolder(folder, get_plugin_manager(), names) for names in NAMINGS]
    for name in by_naming[0].directories():
        path = by_naming[0].place / name
        found = [(steps, step) for steps in by_naming if (step := steps.names.parse(name)) is not None]
        if not found:
            if not name.startswith(".") and (all_directories or _is_checkpoint(path)):
                exempt[str(path)] = "its name is not a step's (" + ", ".join(f"{n.prefix}<n>" for n in NAMINGS) + ")"
        elif path.is_symlink():
            exempt[str(path)] = "it is a link"
        else:
            steps, step = found[0]
            checkpoint = steps.inspect_step(step)
            if not checkpoint.is_loadable:
                reason = checkpoint.error or checkpoint.refusal
                exempt[str(path)] = f"it is not a complete checkpoint that can be loaded here: {reason}"
    return exempt


def _is_checkpoint(path: Path) -> bool:
    if takes_requests(path):  # one for all that is below
        return False
    return any((path / marker).is_file() for marker in MARKERS)


def _read_tracker(place: Path) -> set[int]:
    """Return the step that Megatron would load, which must be kept: it may write a newer one only after this call."""
    tracker = place / _TRACKER
    if not tracker.is_file():
        return set()
    text = read_file(tracker.resolve(), _MOST_BYTES).decode(errors="replace").strip()
    # Python converts no texts of thousands of digits; no step has so many
    return {int(text)} if text.isascii() and text.isdecimal() and len(text) <= _MOST_DIGITS else set()

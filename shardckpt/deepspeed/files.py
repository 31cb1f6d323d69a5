"""Find the files of DeepSpeed in a folder by their names, and name the files that are not read here."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardckpt.errors import CannotLoadError, CorruptCheckpointError
from shardckpt.storage.abilities import find_ability
from shardckpt.storage.places import list_tree
from shardckpt.storage.remote import HasFolders

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

_PARTITION = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)(?:_\d+)?_model_states\.pt")
_EXPERTS = re.compile(r".*(?:expert_\d+|expp_rank_\d+)_.*\.pt")
_LAYERS = re.compile(r"layer_\d+-model_.*states\.pt")
#: The folder of a universal checkpoint that has one folder for each parameter.
UNIVERSAL = "zero"


@dataclass(frozen=True)
class DeepSpeedFiles:
    """The files of one checkpoint.

    ``models`` has the file of each rank with names, shapes and buffers; one for all ranks but in ZeRO stage 3.
    ``partitions`` has the file of each rank with its part of the optimizer; none in a universal checkpoint.
    """

    models: tuple[str, ...]
    partitions: tuple[str, ...]


def find_files(folder: Path, names: Collection[str]) -> DeepSpeedFiles | None:
    """Return the files of a ZeRO or universal checkpoint of DeepSpeed; None if the folder is something else.

    A checkpoint of a job that was cut in a way that is not read here is a CannotLoadError.
    """
    partitions = [found for name in sorted(names) if (found := _PARTITION.fullmatch(name))]
    models = [found for name in sorted(names) if (found := _MODEL.fullmatch(name))]
    # a store's listing has no folders, and one of all that is below may be long: it is asked where such a folder may be
    is_universal = bool(models or UNIVERSAL in names) and _has_parameters(folder)
    if not partitions and not is_universal:
        return None
    kind = "a universal" if is_universal else "a ZeRO"
    cut = (
        (any(map(_EXPERTS.fullmatch, names)), "expert"),
        (any(map(_LAYERS.fullmatch, names)), "pipeline"),
        # of a universal one too: the shapes, frozen parameters and buffers in its files are of the parts of a rank
        (any(int(found[2]) for found in (*models, *partitions)), "tensor"),
    )
    for is_cut, parallelism in cut:
        if is_cut:
            raise CannotLoadError(
                f"{folder} is {kind} checkpoint of DeepSpeed with {parallelism} parallelism, which is not read here: "
                "gather its weights with DeepSpeed"
            )
    return DeepSpeedFiles(
        _check_ranks(folder, models, "model_states.pt"),
        () if is_universal else _check_ranks(folder, partitions, "optim_states.pt"),
    )


def _has_parameters(folder: Path) -> bool:
    """Return whether it has the folder of a universal checkpoint with the parameters."""
    if find_ability(folder, HasFolders) is None:
        return (folder / UNIVERSAL).is_dir()
    return any(path.startswith(f"{UNIVERSAL}/") for path in list_tree(folder) or ())


def _check_ranks(folder: Path, found: list[re.Match[str]], what: str) -> tuple[str, ...]:
    """Return the names in the order of ranks."""
    by_rank = {int(name[1] or 0): name[0] for name in found}
    missing = [rank for rank in range(max(by_rank, default=0) + 1) if rank not in by_rank]
    if missing:
        raise CorruptCheckpointError(
            f"{folder} lacks the file of rank {missing[0]} that ends with {what}: copy it, too"
        )
    return tuple(by_rank[rank] for rank in sorted(by_rank))

"""Universal checkpoints: a folder for each parameter, with a file for the fp32 weight and one for each moment."""

from __future__ import annotations

import math
from itertools import chain
from typing import TYPE_CHECKING, Any

from shardckpt.deepspeed.files import UNIVERSAL
from shardckpt.deepspeed.index import (
    MODEL,
    MOMENTS,
    STATE,
    STEP,
    Index,
    IndexedTensor,
    ModelStates,
    StoredTensorFile,
    check_dict,
    join_parts,
    locate_tensor,
    make_whole,
    pick_options,
    read_step_count,
)
from shardckpt.errors import CorruptCheckpointError
from shardckpt.storage.places import list_tree

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import torch

    from shardckpt.planning.boxes import Ints

_WEIGHT, _VALUE = "fp32", "param"
#: The file with the options that are the same for all parameters.
_OPTIONS = "optimizer_state.pt"


def index_universal(
    directory: Path,
    describe: Callable[[str], Any],
    models: ModelStates,
    place: str,
    read: Callable[[StoredTensorFile], torch.Tensor],
) -> Index:
    """Return the index of a universal checkpoint.

    ``describe`` reads a file by its path in the checkpoint; its tensors are LazyTensors, whose values ``read`` reads.
    ``place`` is the checkpoint's name in errors.
    """
    index, shapes = Index(), dict(chain.from_iterable(group.items() for group in models.groups))
    folders = _list_parameters(directory)
    lacking = sorted(shapes.keys() - folders.keys())
    if lacking or not folders:
        raise CorruptCheckpointError(
            f"{place}/{UNIVERSAL} lacks the folder of {lacking[0] if lacking else 'any parameter'!r}"
        )
    steps: dict[str, Any] = {}
    for name, files in folders.items():
        kinds = {file.removesuffix(".pt") for file in files if file.endswith(".pt") and not file.startswith(".")}
        if _WEIGHT not in kinds:
            raise CorruptCheckpointError(f"{place}/{UNIVERSAL}/{name} lacks {_WEIGHT}.pt")
        index.unread.update(kinds - {_WEIGHT, STEP, *MOMENTS})
        for kind in (kind for kind in (_WEIGHT, STEP, *MOMENTS) if kind in kinds):
            file = f"{UNIVERSAL}/{name}/{kind}.pt"
            stored = describe(file)
            value = stored.get(_VALUE) if isinstance(stored, dict) else stored
            if kind == STEP:
                steps[name] = read_step_count(value, file, read)
                index.files.append(file)
            else:
                key = MODEL + name if kind == _WEIGHT else f"{STATE}{name}.{kind}"
                index.tensors[key] = _index_file(name, shapes.get(name), file, value)
    options: Any = None
    if (directory / UNIVERSAL / _OPTIONS).is_file():
        file = f"{UNIVERSAL}/{_OPTIONS}"
        stored = check_dict(describe(file), f"{place}/{file}")
        options = stored.get("param_groups")
        steps = _read_group_steps(stored, models.groups, file, read) | steps
        index.files.append(file)
    for number, group in enumerate(models.groups):
        for name in group:
            index.add_state(name, steps.get(name), pick_options(options, number, len(models.groups)))
    models.add_rest(index, is_cut=models.is_cut)
    return index


def _read_group_steps(
    stored: dict[Any, Any], groups: list[dict[str, Ints]], file: str, read: Callable[[StoredTensorFile], torch.Tensor]
) -> dict[str, Any]:
    """Return the count of steps of each parameter, which a checkpoint of stage 3 stores by group; None for no count."""
    state = stored
    for part in ("optimizer_state_dict", "state"):
        state = check_dict(state.get(part) or {}, f"{file}: {part}")
    found: dict[str, Any] = {}
    for number, group in enumerate(groups):
        values = check_dict(state.get(number) or {}, f"{file}: the state of group {number}")
        found |= dict.fromkeys(group, read_step_count(values.get(STEP), file, read))
    return found


def _index_file(name: str, shape: Ints | None, file: str, value: Any) -> IndexedTensor:
    """Return the tensor of a file; made of a ZeRO checkpoint of stage 3, it is flat, and may have padding at its end.

    ``shape`` is the parameter's shape; None if no file has it.
    """
    found = locate_tensor(value, file, name)
    stored = found.payload.shape
    if shape is not None and len(stored) == 1 and found.payload.is_contiguous and stored[0] >= math.prod(shape):
        return join_parts(name, shape, [found])
    return make_whole(name, stored if shape is None else shape, found)


def _list_parameters(directory: Path) -> dict[str, set[str]]:
    """Return the names of the files in each parameter's folder, by the parameter's name."""
    if (sizes := list_tree(directory)) is None:
        return {
            folder.name: {path.name for path in folder.iterdir()}
            for folder in sorted((directory / UNIVERSAL).iterdir(), key=lambda path: path.name)
            if folder.is_dir()
        }
    found: dict[str, set[str]] = {}
    for path in sorted(sizes):
        top, _, rest = path.partition("/")
        name, _, file = rest.rpartition("/")
        if top == UNIVERSAL and name:
            found.setdefault(name, set()).add(file)
    return found

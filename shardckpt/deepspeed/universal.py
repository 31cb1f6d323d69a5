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

_WEIGHT, _STEP, _VALUE = "fp32", "step", "param"
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

    ``describe`` returns the content of a file, with a LazyTensor for each tensor.
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
        if f"{_WEIGHT}.pt" not in files:
            raise CorruptCheckpointError(f"{place}/{UNIVERSAL}/{name} lacks {_WEIGHT}.pt")
        for kind in (_WEIGHT, *(moment for moment in MOMENTS if f"{moment}.pt" in files)):
            file = f"{UNIVERSAL}/{name}/{kind}.pt"
            key = MODEL + name if kind == _WEIGHT else f"{STATE}{name}.{kind}"
            index.tensors[key] = _index_file(name, shapes.get(name), file, describe(file))
        if f"{_STEP}.pt" in files:
            file = f"{UNIVERSAL}/{name}/{_STEP}.pt"
            found = describe(file)
            steps[name] = read_step_count(found.get(_VALUE) if isinstance(found, dict) else found, file, read)
            index.files.append(file)
    options: Any = None
    if (directory / UNIVERSAL / _OPTIONS).is_file():
        file = f"{UNIVERSAL}/{_OPTIONS}"
        stored = check_dict(describe(file), f"{place}/{file}")
        options = stored.get("param_groups")
        state = (stored.get("optimizer_state_dict") or {}).get("state") or {}  # of stage 3
        for number, group in enumerate(models.groups):
            step = read_step_count((state.get(number) or {}).get(_STEP), file, read)
            steps = dict.fromkeys(group, step) | steps
        index.files.append(file)
    for number, group in enumerate(models.groups):
        for name in group:
            index.add_state(name, steps.get(name), pick_options(options, number, len(models.groups)))
    models.add_rest(index, is_cut=models.is_cut)
    return index


def _index_file(name: str, shape: Ints | None, file: str, value: Any) -> IndexedTensor:
    """Return the tensor of a file; a ZeRO checkpoint of stage 3 has flat tensors, which may be padded."""
    found = locate_tensor(value.get(_VALUE) if isinstance(value, dict) else value, file, name)
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

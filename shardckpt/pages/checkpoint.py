"""The data of a page on a checkpoint, in columns that JSON can say."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from shardckpt.engine.optimizer_keys import is_parameter_key
from shardckpt.errors import CheckpointingException, CheckpointReplacedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from shardckpt.engine.integrity import IncompleteFile
    from shardckpt.engine.lazy import StoredCheckpoint
    from shardckpt.maintenance.statistics import Statistics
    from shardckpt.strategy import StoredBox

#: Boxes that a page has, at most: each takes some 20 bytes of it where no two tensors are cut the same way.
MOST_BOXES = 1 << 20
#: Keys that are listed of a file that is missing.
_KEYS_SHOWN = 20
#: Names of objects, and of values of the common state, that are listed.
_NAMES_SHOWN = 500


def describe_checkpoint(
    checkpoint: StoredCheckpoint,
    header: Mapping[str, Any],
    prefix: str = "",
    compute: Callable[[Sequence[str]], Sequence[Statistics | None]] | None = None,
) -> dict[str, Any]:
    """Return the data of a page: the header, tensors, boxes, files and timings.

    ``header`` has the known facts about the checkpoint as a whole, None for unknown ones, and the caller's name of it.
    Only tensors and objects whose keys begin with ``prefix`` are in it. ``compute`` reads the values of tensors, by
    their keys, and returns their statistics; None: no value is read.
    """
    keys = [key for key in sorted(checkpoint) if key.startswith(prefix)]
    tensors = [checkpoint[key] for key in keys]
    record = checkpoint.record
    if record is not None:
        files = sorted((file.name, file.size, file.rank) for file in record.files)
    else:  # of another library's checkpoint as its index says
        files = sorted((file.name, file.nbytes, -1) for file in checkpoint.list_files())
    names = [name for name, _, _ in files]
    return {
        "head": header,
        "prefix": prefix,
        **describe_tensors((t.key, str(t.dtype).removeprefix("torch."), t.shape, t.dtype.itemsize) for t in tensors),
        "parameters": sum(math.prod(t.shape) for t in tensors if is_parameter_key(t.key)),
        "files": names,
        "fileBytes": [size for _, size, _ in files],
        "fileRank": [rank for _, _, rank in files],
        **_describe_boxes(checkpoint, keys, names),
        **_describe_rest(checkpoint, prefix),
        "incomplete": _describe_faults(checkpoint.find_incomplete_files(), prefix),
        "statistics": None if compute is None else describe_statistics(compute(keys)),
        "timings": None if record is None or record.timings is None else record.timings.model_dump(mode="json"),
    }


def describe_tensors(tensors: Iterable[tuple[str, str, tuple[int, ...], int]]) -> dict[str, Any]:
    """Return columns of tensors, by the key, dtype, shape and bytes of an element of each.

    Each dtype and each shape stands in the page once.
    """
    dtypes, shapes = dict[str, int](), dict[tuple[int, ...], int]()
    keys, dtype, shape, nbytes = [], [], [], []
    for key, name, extents, itemsize in tensors:
        keys.append(key)
        dtype.append(dtypes.setdefault(name, len(dtypes)))
        shape.append(shapes.setdefault(extents, len(shapes)))
        nbytes.append(math.prod(extents) * itemsize)
    return {
        "keys": keys,
        "dtype": dtype,
        "shape": shape,
        "nbytes": nbytes,
        "dtypes": list(dtypes),
        "shapes": list(map(list, shapes)),
    }


def describe_statistics(found: Sequence[Statistics | None]) -> dict[str, list[Any]]:
    """Return columns of the statistics of tensors; norms, too, are None where there are none."""
    names = ("norm", "mean", "minimum", "maximum")
    columns: dict[str, list[Any]] = {
        name: [None if each is None else round_number(getattr(each, name)) for each in found] for name in names
    }
    counts = {name: [0 if each is None else getattr(each, name) for each in found] for name in ("nans", "infs")}
    return columns | counts


def round_number(value: float | None) -> float | str | None:
    """Return a number as JSON has it, with more digits than a page shows: it has no infinity, and no NaN."""
    if value is None:
        return None
    if not math.isfinite(value):
        return "infinite"
    rounded = float(f"{value:.5g}")
    return rounded if math.isfinite(rounded) else value  # the largest float64 rounds to infinity


def describe_layouts(
    boxes: Iterable[StoredBox], keys: Sequence[str], files: Sequence[str], most: int = MOST_BOXES
) -> dict[str, Any]:
    """Return how each tensor is cut: a layout for all tensors that are cut in one way into the same files.

    The boxes of a tensor come after each other. ``layouts`` has for each a list of (file, offset along each axis,
    extent along each axis) in one row, without the axes' number, which the tensor's shape says. ``layout`` has its
    number for each key, -1 if there is none. ``boxFiles`` names all files: ``files`` first, those of the page, then
    others that a box names. ``boxesLeftOut`` is how many there is no room for.
    """
    numbers = {name: number for number, name in enumerate(files)}
    wanted = set(keys)
    rows: dict[str, list[int]] = {}
    counts: dict[str, int] = {}
    for key, offset, shape, file in boxes:
        if key in wanted:
            rows.setdefault(key, []).extend((numbers.setdefault(file, len(numbers)), *offset, *shape))
            counts[key] = counts.get(key, 0) + 1
    layouts: dict[tuple[int, ...], int] = {}
    column, kept, left_out = [], 0, 0
    for key in keys:
        row = tuple(rows.get(key, ()))
        if row and row not in layouts and kept + counts[key] > most:
            left_out += counts[key]
            column.append(-1)
            continue
        if row and row not in layouts:
            kept += counts[key]
        column.append(layouts.setdefault(row, len(layouts)) if row else -1)
    return {
        "layouts": [list(row) for row in layouts],
        "layout": column,
        "boxFiles": list(numbers),
        "boxesLeftOut": left_out,
    }


def _describe_boxes(checkpoint: StoredCheckpoint, keys: Sequence[str], files: list[str]) -> dict[str, Any]:
    """Return the layouts, or why there are none."""
    fault = ""
    try:
        boxes = checkpoint.list_boxes()
        layouts = describe_layouts(boxes or (), keys, files)
        if boxes is None:
            fault = "The strategy of this format does not say which file holds which box."
    except CheckpointReplacedError:
        raise
    except CheckpointingException as exc:
        layouts, fault = describe_layouts((), keys, files), f"The boxes cannot be listed: {exc}"
    return {**layouts, "boxesFault": fault}


def _describe_rest(checkpoint: StoredCheckpoint, prefix: str) -> dict[str, Any]:
    """Return the names of objects and of the common state, and why that cannot be read, if so."""
    objects = sorted(key for key in checkpoint.objects if key.startswith(prefix))
    common, fault = list[str](), ""
    if not prefix:
        try:
            common = sorted(map(str, checkpoint.common))
        except CheckpointReplacedError:
            raise
        except CheckpointingException as exc:
            fault = str(exc)
    return {
        "objects": objects[:_NAMES_SHOWN],
        "objectCount": len(objects),
        "common": common[:_NAMES_SHOWN],
        "commonCount": len(common),
        "commonFault": fault,
    }


def _describe_faults(files: Iterable[IncompleteFile], prefix: str) -> list[dict[str, Any]]:
    """Return the files, with the lost keys that begin with a prefix."""
    found = [(file, [key for key in file.keys if key.startswith(prefix)]) for file in files]
    return [
        {"name": file.name, "fault": file.fault, "keys": keys[:_KEYS_SHOWN], "keyCount": len(keys)}
        for file, keys in found
    ]

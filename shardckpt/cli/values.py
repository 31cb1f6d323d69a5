"""``shardckpt inspect PATH KEY[0:4, ...]``: statistics and values of a region of one tensor; values of common state."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from shardckpt.cli.output import Output
from shardckpt.cli.table import fit_table
from shardckpt.errors import CheckpointingException, KeyMismatchError, escape_text, name_known

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardckpt.cli.colour import Style
    from shardckpt.engine.lazy import StoredCheckpoint
    from shardckpt.maintenance.statistics import Statistics

#: Elements that are printed in full; of a larger region its first corner.
_MOST = 400
_CORNER = 8
#: The name of the whole common state.
COMMON = "common"
_REGION = re.compile(r"(.+)\[([^\[\]]*)\]", re.DOTALL)


def split_region(text: str) -> tuple[str, tuple[Any, ...]] | None:
    """Return the key and the index of ``KEY[0:4, ...]``; None if the text does not end with brackets."""
    found = _REGION.fullmatch(text)
    if found is None:
        return None
    return found[1], tuple(_parse_part(part.strip(), text) for part in found[2].split(",") if part.strip())


def read_values(checkpoint: StoredCheckpoint, key: str, index: tuple[Any, ...]) -> Output:
    """Return the description of a region, its statistics, and its values or the first of them.

    An index that selects nothing of the tensor is an error.
    """
    from shardckpt.engine.display import show_progress
    from shardckpt.engine.progress import Progress
    from shardckpt.maintenance.statistics import compute_statistics
    from shardckpt.plugins.manager import get_plugin_manager

    if key not in checkpoint:
        raise KeyMismatchError(f"no tensor has the key {key!r} {name_known(key, checkpoint, 'keys')}")
    stored = checkpoint[key]
    with show_progress("inspect"):
        progress = Progress("inspect", "", stored.nbytes, get_plugin_manager())
        statistics = compute_statistics(stored, index, progress.add)
        progress.end()  # of a region, which is not all of the tensor
    shape = "x".join(map(str, stored.shape)) or "()"
    if not statistics.count and 0 not in stored.shape:  # torch clips a slice to the tensor: here it is a wrong number
        raise CheckpointingException(f"{key!r} has the shape {shape}, and the index selects no element of it")
    corner, is_all = _find_corner(stored.shape, index, statistics.count)
    values = stored[corner]
    has_json = not statistics.nans and not statistics.infs and not values.is_complex()
    dtype = str(stored.dtype).removeprefix("torch.")
    return Output(
        lambda: {
            "key": key,
            "dtype": dtype,
            "shape": stored.shape,
            **vars(statistics),
            "first": not is_all,
            "values": values.tolist() if has_json else str(values),
        },
        lambda: [
            f"{escape_text(key)}: {dtype}, shape {shape}, {statistics.count:,} elements read",
            *describe_statistics(statistics),
            "values:" if is_all else "first values:",
            str(values),
        ],
    )


def describe_statistics(statistics: Statistics) -> list[str]:
    """Return the lines about statistics."""
    numbers = ", ".join(
        f"{name} {'-' if value is None else format(value, '.9g')}"
        for name, value in (
            ("min", statistics.minimum),
            ("max", statistics.maximum),
            ("mean", statistics.mean),
            ("norm", statistics.norm),
        )
    )
    odd = f"NaN {statistics.nans:,}, Inf {statistics.infs:,}"
    left_out = " (left out above)" if statistics.nans or statistics.infs else ""
    return [numbers, f"{odd}{left_out}"]


def list_statistics(checkpoint: StoredCheckpoint, keys: Sequence[str]) -> list[Statistics | None]:
    """Return the statistics of tensors, in order; None of one whose dtype torch does not compute with."""
    from shardckpt.engine.display import show_progress
    from shardckpt.engine.progress import Progress
    from shardckpt.maintenance.statistics import compute_each, is_numeric
    from shardckpt.plugins.manager import get_plugin_manager

    numeric = [checkpoint[key] for key in keys if is_numeric(checkpoint[key].dtype)]
    with show_progress("inspect"):
        progress = Progress("inspect", "", sum(each.nbytes for each in numeric), get_plugin_manager())
        computed = compute_each(checkpoint, numeric, progress.add)
        found = {each.key: statistics for each, statistics in zip(numeric, computed, strict=True)}
    return [found.get(key) for key in keys]


def make_statistics_table(forms: Sequence[tuple[str, str, str]], found: Sequence[Statistics | None]) -> str:
    """Return a table of the statistics of tensors, with their keys, dtypes and shapes."""
    rows = [(*form, *_list_cells(each)) for form, each in zip(forms, found, strict=True)]
    styles: list[Style] = ["bad" if s is not None and (s.nans or s.infs) else "" for s in found]
    header = ("key", "kind", "shape", "norm", "mean", "min", "max", "not finite")
    return "\n".join(fit_table(header, rows, styles, optional=("mean", "min", "max")))


def _list_cells(found: Statistics | None) -> list[str]:
    if found is None:
        return ["-"] * 5
    odd = [f"{count:,} {name}" for name, count in (("NaN", found.nans), ("Inf", found.infs)) if count]
    return [*map(_format, (found.norm, found.mean, found.minimum, found.maximum)), ", ".join(odd) or "-"]


def _format(value: float | None) -> str:
    return "-" if value is None else f"{value:.6g}"


def find_common(checkpoint: StoredCheckpoint, path: str) -> tuple[str, Any] | None:
    """Return the value at a dotted path of the common state, after ``common.`` or without it, and its path.

    The path is ``common``, ``common.args.lr`` or ``args.lr``; its parts are keys of dicts, and numbers of items of
    lists. It is None if there is no such value, or a key of a tensor or object begins so; but a KeyMismatchError if a
    path that begins with ``common.`` has no value.
    """
    columns = checkpoint.columns
    if any(key.startswith(path) for key in (*columns.keys, *columns.objects)):
        return None
    value: Any = checkpoint.common
    rest = path.removeprefix(f"{COMMON}.") if path != COMMON else ""
    for part in rest.split(".") if rest else ():
        inside = dict(enumerate(value)) if isinstance(value, (list, tuple)) else value
        named = {str(key): each for key, each in inside.items()} if isinstance(inside, dict) else {}
        if part not in named and path.startswith(f"{COMMON}."):
            raise KeyMismatchError(
                f"{path!r}: the common state has no {part!r} there {name_known(part, named, 'names')}"
            )
        if part not in named:
            return None
        value = named[part]
    return rest or COMMON, value


def show_common(path: str, value: Any) -> Output:
    """Return a value of the common state, and its description."""
    return Output(lambda: {"common": path, "value": value}, lambda: _describe_common(path, value))


def _describe_common(path: str, value: Any) -> list[str]:
    import pprint  # slow to import

    from shardckpt.huggingface.structure import forget_structure

    shown = forget_structure(value) if path == COMMON and isinstance(value, dict) else value
    lines = [f"{escape_text(path)}: common state, {type(value).__name__}"]
    lines += pprint.pformat(shown, width=100).split("\n")
    if shown is not value:
        lines.append("not shown: how it and the tensors are nested (common.content_metadata has it, as has --json)")
    return lines


def _parse_part(part: str, text: str) -> Any:
    if part == "...":
        return ...
    try:
        numbers = [int(each) if each.strip() else None for each in part.split(":")]
    except ValueError:
        numbers = []
    if len(numbers) == 1 and numbers[0] is not None:
        return numbers[0]
    if len(numbers) == 2:  # noqa: PLR2004 - start and stop
        return slice(*numbers)
    raise CheckpointingException(
        f"{text!r}: {part!r} is no index: give integers, slices and '...', as in KEY[0:4, ...]"
    )


def _find_corner(shape: tuple[int, ...], index: tuple[Any, ...], count: int) -> tuple[tuple[Any, ...], bool]:
    """Return the index of the printed part of a region, and whether that is all of it."""
    if count <= _MOST:
        return index, True
    full = list(index)
    if ... in full:
        place = full.index(...)
        full[place : place + 1] = [slice(None)] * (len(shape) - len(full) + 1)
    full += [slice(None)] * (len(shape) - len(full))
    for axis, part in enumerate(full):
        if isinstance(part, slice):
            start, stop, _ = part.indices(shape[axis])
            most = _CORNER if axis >= len(shape) - 2 else 1  # the last two axes are a page
            full[axis] = slice(start, min(stop, start + most))
    return tuple(full), False

"""Lay out a rank's items in files, balanced by bytes: each position is known before anything is written."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from shardckpt.archive import ARCHIVE_ALIGN, make_frame
from shardckpt.chunks import LocalPlan
from shardckpt.planning import assign_holders, make_column, make_matrix
from shardckpt.storage import Column, PackedShards, pack_columns
from shardckpt.tensors import page_offset
from shardckpt_torch_dist.plan.write_plan import FilePlan, WritePlan

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from shardckpt.chunks import LocalItems


def lay_out(
    items: LocalItems,
    archives: Mapping[str, bytes],
    other_keys: Mapping[str, tuple[str, ...]],
    rank: int,
    count: int,
    hint: str | None,
) -> tuple[WritePlan, LocalPlan]:
    """Assign the items to files by bytes, and give each a position; return the write plan and its LocalPlan.

    ``archives`` are those of the rank's objects, by unique key; they come first in a file, as in Megatron's files.
    ``other_keys`` are the keys under which an object is listed, by unique key; others are listed by their unique key.
    Items whose keys begin with ``hint`` go to ``count`` separate files, whose names begin with it.
    """
    keys = [items.keys[number] for number in items.boxes.spec]
    sizes = [math.prod(tensor.shape) * tensor.dtype.itemsize for tensor in items.tensors]
    # Objects count as 0: only tensors are balanced.
    chosen = _choose_files([*keys, *archives], [*sizes, *(0 for _ in archives)], rank, count, hint)
    numbers = {name: number for number, name in enumerate(dict.fromkeys(chosen))}
    files = [FilePlan(name) for name in numbers]
    lengths: list[int] = []
    boxes: list[tuple[int, int, int]] = []
    objects: list[tuple[int, int, int]] = []
    for (key, archive), name in zip(archives.items(), chosen[len(keys) :], strict=True):
        file = files[numbers[name]]
        file.objects.append(key)
        objects.append((numbers[name], file.nbytes, len(archive)))
        file.nbytes += padded_length(len(archive))
    for position, (tensor, name) in enumerate(zip(items.tensors, chosen, strict=False)):
        file = files[numbers[name]]
        # The padding in the head depends on the position, so an archive is sized only once its start is known.
        head, tail = make_frame(tensor.dtype, tuple(tensor.shape), file.nbytes, page_offset(tensor))
        lengths.append(len(head) + sizes[position] + len(tail))
        file.tensors.append(position)
        boxes.append((numbers[name], file.nbytes, lengths[-1]))
        file.nbytes += padded_length(lengths[-1])

    locations: dict[str, Column] = {
        "files": list(numbers),
        "boxes": make_matrix(boxes, 3, 0),
        "objects": make_matrix(objects, 3, 0),
    }
    if other_keys:
        order = {key: number for number, key in enumerate(archives)}
        pairs = [(order[key], other) for key, others in other_keys.items() for other in others]
        locations["listed"] = [other for _, other in pairs]
        locations["listed_objects"] = make_column([number for number, _ in pairs])
    stored = PackedShards.pack(items.keys, items.dtypes, items.shapes, items.boxes.table(), items.objects)
    write_plan = WritePlan(
        files=files, tensors=items.tensors, keys=keys, lengths=lengths, objects=archives, stored=stored
    )
    return write_plan, LocalPlan(stored, pack_columns(locations))


def _choose_files(names: Sequence[str], sizes: Sequence[int], rank: int, count: int, hint: str | None) -> list[str]:
    """Return the name of the file that each item goes to."""
    chosen = [""] * len(names)
    hinted = [number for number, name in enumerate(names) if hint and name.startswith(hint)]
    for prefix, numbers in ((hint, hinted), ("", sorted(set(range(len(names))).difference(hinted)))):
        files = [f"{prefix}__{rank}_{number}.distcp" for number in range(count)]
        bins = [0] * len(numbers)
        if count > 1:
            bins = assign_holders([tuple(range(count))] * len(numbers), [sizes[number] for number in numbers])
        for number, bucket in zip(numbers, bins, strict=True):
            chosen[number] = files[bucket]
    return chosen


def padded_length(length: int) -> int:
    """Return the length of an archive in bytes, rounded up to where the next one begins."""
    return length + -length % ARCHIVE_ALIGN
